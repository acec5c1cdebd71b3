"""What a value of each feature takes in a shard of each format, in bytes; docs/formats.md has the table.

Each figure is that of a shard with 256 records of key and value, less that of one with the keys alone, per record. So
it includes headers, padding and what columns cost. No clock is read: the table depends on the versions of the packages
alone. Numbers are noise, which does not compress; sound needs the extra `audio`.
"""

import importlib.util
import io

import numpy as np

from datamat import (
    Audio,
    BBoxes,
    Bytes,
    ClassLabel,
    Depth,
    Features,
    Image,
    Json,
    Keypoints,
    ListOf,
    Mask,
    Nullable,
    Polygons,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Tokens,
)
from datamat.features.base import dtype_of
from datamat.formats import get_format

RECORDS = 256
FORMATS = ("tfrecord", "tfrecord.gz", "parquet", "webdataset")
NUMBERS = 1024
DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES += ("float16", "bfloat16", "float32", "float64", "complex64")


def noise(dtype, shape, rng):
    """Return numbers that fill what a dtype holds, normally distributed where they are floats."""
    kind = dtype_of(dtype)
    if kind.kind in "iu":
        return rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, kind, endpoint=True)
    if kind.kind == "b":
        return rng.random(shape) < 0.5
    if kind.kind == "c":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(kind)
    return rng.normal(size=shape).astype(kind)


def picture(rng, channels=3):
    """Return a smooth picture with some noise, uint8 (64, 64, channels)."""
    slope = np.linspace(0, 200, 64)[:, None, None] + np.linspace(0, 40, 64)[None, :, None]
    return (slope + rng.integers(0, 8, (64, 64, channels))).astype(np.uint8)


def cases():
    """Return name, feature and a function that draws a value, for each line of the table."""
    words = ["street", "car", "pedestrian", "tree", "sky", "sign"]
    found = [
        ('`Scalar("int64")`', Scalar("int64"), lambda rng: int(rng.integers(1000))),
        ('`Scalar("float32")`', Scalar("float32"), lambda rng: float(rng.random(dtype=np.float32))),
        ("`ClassLabel`, one of 10", ClassLabel(num_classes=10), lambda rng: int(rng.integers(10))),
        ("`Timestamp`", Timestamp(), lambda rng: np.datetime64(int(rng.integers(1 << 50)), "us")),
        (
            '`Nullable(Scalar("int64"))`, half of them None',
            Nullable(Scalar("int64")),
            lambda rng: int(rng.integers(1000)) if rng.random() < 0.5 else None,
        ),
        ("`Text`, 10 words", Text(), lambda rng: " ".join(rng.choice(words, 10))),
        (
            "`Json`, a dict of 3",
            Json(),
            lambda rng: {"word": str(rng.choice(words)), "count": int(rng.integers(100)), "list": [1, 2]},
        ),
        ("`Bytes`, 1,000", Bytes(), lambda rng: rng.bytes(1000)),
        ("`ListOf(Text())`, 10 words", ListOf(Text()), lambda rng: rng.choice(words, 10).tolist()),
        (
            "`ListOf(ClassLabel(...))`, 10",
            ListOf(ClassLabel(num_classes=10)),
            lambda rng: rng.integers(0, 10, 10).tolist(),
        ),
        ("`BBoxes`, 10", BBoxes(), lambda rng: np.sort(rng.random((10, 2, 2), np.float32), 1).reshape(10, 4)),
        ("`Keypoints`, 17", Keypoints(), lambda rng: rng.random((17, 2), np.float32)),
        (
            "`Polygons`, 3 of 12 points",
            Polygons(),
            lambda rng: [rng.random((12, 2), np.float32) for _ in range(3)],
        ),
        ("`Image`, PNG, 64 × 64 × 3", Image((64, 64, 3)), picture),
        ("`Image`, JPEG, 64 × 64 × 3", Image((64, 64, 3), encoding="jpeg"), picture),
        ("`Mask`, 64 × 64", Mask((64, 64)), lambda rng: picture(rng, 1)[..., 0] // 32),
        ("`Depth`, 64 × 64", Depth((64, 64)), lambda rng: picture(rng, 1)[..., 0].astype(np.uint16) * 40),
        ("`Tokens(vocab_size=50_257)`, 512", Tokens(vocab_size=50_257), lambda rng: rng.integers(0, 50_257, 512)),
    ]
    if importlib.util.find_spec("soundfile"):
        sound = Audio(8_000)
        found.append(("`Audio`, 8,000", sound, lambda rng: rng.uniform(-0.5, 0.5, (8_000, 1)).astype(np.float32)))
    for dtype in DTYPES:
        found.append((f'`Tensor(({NUMBERS},), "{dtype}")`', Tensor((NUMBERS,), dtype), drawn(dtype)))
    return found


def drawn(dtype):
    """Return a function that draws the numbers of a tensor."""
    return lambda rng: noise(dtype, NUMBERS, rng)


def shard_bytes(name, features, samples):
    """Return the size of a shard."""
    shard_format = get_format(name).with_features(features)
    file = io.BytesIO()
    writer = shard_format.writer(file, features.columns)
    for sample in samples:
        writer.append(features.encode(sample))
    writer.finish()
    return len(file.getvalue())


def main():
    """Print the table."""
    keys = [{"key": f"{number:08d}"} for number in range(RECORDS)]
    alone = {name: shard_bytes(name, Features({}), keys) for name in FORMATS}
    print("| feature |", " | ".join(f"`{name}`" for name in FORMATS), "|")
    print("| --- |" + " ---: |" * len(FORMATS))
    for title, feature, draw in cases():
        rng = np.random.default_rng(0)
        features = Features({"x": feature})
        samples = [{**key, "x": draw(rng)} for key in keys]
        sizes = [(shard_bytes(name, features, samples) - alone[name]) / RECORDS for name in FORMATS]
        print(f"| {title} |", " | ".join(f"{size:,.0f}" for size in sizes), "|")


if __name__ == "__main__":
    main()
