"""Features made of others: what can be declared reads back equal from every format by every reader.

Every type is tried as it is, in a `Nullable`, a `ListOf` and a dict, and in each of these within each of these. All
compositions that `Features` accepts are fields of one dataset, whose samples hold none, one and several items, missing
ones among them. The others are refused when they are declared.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools

import numpy as np
import pytest
from prepared import Prepared

from datamat import (
    BBoxes,
    Bytes,
    ClassLabel,
    DatasetWriter,
    Depth,
    Features,
    Image,
    IndexRow,
    Json,
    Keypoints,
    ListOf,
    Mask,
    Materializer,
    Nullable,
    Polygons,
    Scalar,
    SchemaError,
    ShardOptions,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    convert,
    load,
)
from datamat.features.base import dtype_of
from datamat.readers.tf import tf_field
from datamat.testing import InlineExecutor

NUM_SAMPLES = 4


def numbers(dtype, *shape):
    """Return a function of a random generator that gives an array; sizes of None are drawn, 0 among them."""

    def draw(rng):
        sizes = [rng.integers(0, 4) if size is None else size for size in shape]
        return rng.integers(0, 2 if dtype == "bool" else 100, sizes).astype(dtype_of(dtype))

    return draw


def pixels(*shape, dtype="uint8"):
    """Return a function of a random generator that gives a picture; sizes of None are drawn."""

    def draw(rng):
        sizes = [rng.integers(1, 4) if size is None else size for size in shape]
        return rng.integers(0, 256, sizes).astype(dtype)

    return draw


def outlines(rng):
    """Return polygons of one size, which need no padding."""
    return rng.random((rng.integers(0, 3), 3, 2)).astype(np.float32)


LEAVES = {
    "int": (Scalar("int64"), lambda rng: rng.integers(-9, 9)),
    "float": (Scalar("float64"), lambda rng: np.float64(rng.random())),
    "half": (Scalar("float16"), lambda rng: np.float16(rng.random())),
    "truth": (Scalar("bool"), lambda rng: np.bool_(rng.integers(2))),
    "fixed": (Tensor((2, 2), "float32"), numbers("float32", 2, 2)),
    "raw": (Tensor((3,), "float64"), numbers("float64", 3)),
    "open": (Tensor((None,), "int32"), numbers("int32", None)),
    "rows": (Tensor((None, 2), "uint8"), numbers("uint8", None, 2)),
    "shapes": (Tensor((None, None), "float32"), numbers("float32", None, None)),
    "complex": (Tensor((None,), "complex64"), numbers("complex64", None)),
    "label": (ClassLabel(names=("a", "b")), lambda rng: rng.integers(2)),
    "labels": (ClassLabel(num_classes=100, shape=(None,)), numbers("int64", None)),
    "boxes": (BBoxes(), lambda rng: np.sort(rng.random((rng.integers(3), 2, 2)), 1).reshape(-1, 4).astype(np.float32)),
    "text": (Text(), lambda rng: "größe" * rng.integers(3)),
    "bytes": (Bytes(), lambda rng: rng.bytes(rng.integers(3)) + bytes(rng.integers(2))),
    "json": (Json(), lambda rng: {"a": [int(rng.integers(9)), None]}),
    "time": (Timestamp(), lambda rng: np.datetime64(int(rng.integers(1 << 40)), "us")),
    "tokens": (Tokens(vocab_size=100), numbers("uint8", None)),
    "image": (Image(), pixels(None, None, 3)),
    "small": (Image((2, 3, 3)), pixels(2, 3, 3)),
    "mask": (Mask(), pixels(None, None)),
    "depth": (Depth(), pixels(None, None, dtype="uint16")),
    "points": (Keypoints(), lambda rng: rng.random((rng.integers(3), 2)).astype(np.float32)),
    "polygons": (Polygons(), outlines),
}
if importlib.util.find_spec("ml_dtypes"):
    LEAVES["bfloat"] = (Tensor((None,), "bfloat16"), numbers("bfloat16", None))


def optional(feature, draw):
    """Make a feature that may be missing, of one and of its values."""
    return Nullable(feature), lambda rng: None if rng.integers(3) == 0 else draw(rng)


def sequence(feature, draw):
    """Make a list of a feature, of one and of its values."""
    return ListOf(feature), lambda rng: [draw(rng) for _ in range(rng.integers(4))]


def nested(feature, draw):
    """Make a dict with a feature, of one and of its values."""
    return {"a": feature, "n": Scalar("int8")}, lambda rng: {"a": draw(rng), "n": np.int8(3)}


WRAPPERS = {"optional": optional, "sequence": sequence, "dict": nested}


@functools.cache
def compositions():
    """Return feature and function that draws a value of all compositions, and the messages of those refused."""
    accepted, refused = {}, {}
    for leaf, depth in itertools.product(LEAVES, range(3)):
        for wrappers in itertools.product(WRAPPERS, repeat=depth):
            name = "_".join([*reversed(wrappers), leaf])
            try:
                made = functools.reduce(lambda found, wrapper: WRAPPERS[wrapper](*found), wrappers, LEAVES[leaf])
                Features({name: made[0]})
            except SchemaError as error:
                refused[name] = str(error)
            else:
                accepted[name] = made
    return accepted, refused


class Composed(DatasetWriter):
    name = "composed"

    def __init__(self, names=None):
        self.names = list(names or compositions()[0])
        self.features = Features({name: compositions()[0][name][0] for name in self.names})

    def index(self, source):
        return [IndexRow(f"{number:04d}") for number in range(NUM_SAMPLES)]

    def read(self, row):
        return {name: value for name, value in sample_of(int(row.key)).items() if name in self.names}


def sample_of(number):
    """Return the sample with a number."""
    rng = np.random.default_rng(number)
    return {name: draw(rng) for name, (_, draw) in compositions()[0].items()}


def as_read(feature, value):
    """Return a value as it reads back: a list of dicts as a dict of lists."""
    inner = feature.feature if isinstance(feature, (Nullable, ListOf)) else feature
    if not isinstance(inner, (dict, Features)) or value is None:
        return value
    parts = {name: part for name, part in inner.items() if name != "key"}
    if isinstance(feature, ListOf):
        return {name: as_read(ListOf(part), [row[name] for row in value]) for name, part in parts.items()}
    return {name: as_read(part, value[name]) for name, part in parts.items()}


def plain(value):
    """Return a value as nested lists with the dtypes of arrays, so that equal means equal bits."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "numpy") and not isinstance(value, (np.ndarray, np.generic)):
        import torch

        value = value.view(torch.int16).numpy().view(dtype_of("bfloat16")) if value.dtype == torch.bfloat16 else (
            value.numpy())  # fmt: skip
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind == "M":  # microseconds in torch
        value = value.view(np.int64)
    if isinstance(value, np.ndarray) and value.ndim:
        return [value.dtype.name, value.shape, value.tobytes()] if value.size else [value.dtype.name, value.shape]
    return value.item() if isinstance(value, (np.ndarray, np.generic)) else value


def loose(value):
    """Return a value as nested lists, whatever of it is an array."""
    if isinstance(value, dict):
        return {name: loose(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [loose(item) for item in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Give a function that returns the finished directory of a format."""

    @functools.cache
    def write(name):
        output = tmp_path_factory.mktemp("composed") / "out"
        shards = ShardOptions(num_shards=1, shuffle=False)
        if name == "tfrecord":
            Materializer(Composed(), None, output, format=name, shards=shards).run(
                executor=InlineExecutor(), progress=False
            )
        else:
            convert(write("tfrecord"), output, format=name, executor=InlineExecutor(), progress=False)
        return output

    return write


@functools.cache
def expected():
    """Return the samples as they are read, one after the other."""
    features = Composed().features
    return [features.decode(features.encode({"key": f"{n:04d}", **sample_of(n)})) for n in range(NUM_SAMPLES)]


def test_what_is_not_stored_is_refused_when_it_is_declared():
    """In one sentence that says what to declare instead; these alone are refused."""
    accepted, refused = compositions()

    assert len(accepted) > 250
    for name, message in refused.items():
        assert "declare Json()" in message or "declare it once" in message, f"{name}: {message}"
        assert message.count(". ") == 0
    assert {name.rpartition("_")[0] for name in refused} == {"optional_optional", "sequence_sequence"}


def test_columns_hold_every_composition():
    """Before any format: what is decoded is what was encoded, and of one dtype and shape."""
    for number, sample in enumerate(expected()):
        given = sample_of(number)
        for name, (feature, _) in compositions()[0].items():
            assert loose(sample[name]) == loose(as_read(feature, given[name])), name


@pytest.mark.sample(3)
@pytest.mark.parametrize("format_name", ["tfrecord", "parquet", "webdataset"])
def test_every_composition_survives_every_format(written, format_name):
    """One by one, in batches, and as tensors of torch."""
    dataset = load(written(format_name), "train")

    for found, wanted in zip(dataset, expected(), strict=True):
        for name, value in wanted.items():
            assert plain(found[name]) == plain(value), name
    loaders = [dataset.to_numpy(batch_size=3)]
    if importlib.util.find_spec("torch"):
        loaders.append(dataset.to_torch(batch_size=3))
    split = dataset.features.flatten
    for loader in loaders:
        batches = [split(batch) for batch in loader]
        rows = [{name: part[row] for name, part in one.items()} for one in batches for row in range(len(one["key"]))]
        for found, wanted in zip(rows, map(split, expected()), strict=True):
            for name, value in wanted.items():
                assert plain(found[name]) == plain(value), name


OPEN = (
    *("sequence_image", "sequence_open", "sequence_rows", "sequence_shapes", "sequence_dict_polygons"),
    *("sequence_sequence_text", "sequence_sequence_image", "sequence_optional_raw", "sequence_optional_image"),
    *("optional_sequence_text", "optional_sequence_image", "optional_sequence_json", "optional_dict_sequence_bytes"),
)
"""Compositions whose items differ in size, or may be missing."""


@pytest.mark.long  # building its graph takes ten seconds; to_tf of lists and dicts is tested in test_features_of_others
@pytest.mark.parametrize("format_name", ["tfrecord", "parquet"])
def test_tensorflow_gives_lists_of_open_size(tmp_path, format_name):
    """TensorFlow decodes TFRecord, Python decodes Parquet for it; alone, in batches and for a transform in Python."""
    pytest.importorskip("tensorflow")
    names = [name for name in OPEN if name in compositions()[0]]
    shards = ShardOptions(num_shards=1, shuffle=False)
    job = Prepared(
        Composed(names), None, tmp_path / "out", format=format_name, shards=shards, executor=InlineExecutor()
    )
    job.run(progress=False)
    dataset = load(tmp_path / "out", "train")
    split = dataset.features.flatten

    singles = [split(sample) for sample in dataset.to_tf()]
    changed = [split(sample) for sample in dataset.to_tf(transform=lambda sample, rng: sample)]
    batch = split(next(iter(dataset.to_tf(batch_size=NUM_SAMPLES))))

    for number, wanted in enumerate(map(split, expected())):
        for name, feature in dataset.features.items():
            row = batch[name][number]
            row = row.to_tensor() if hasattr(row, "to_tensor") else row
            for tensor in (singles[number][name], changed[number][name], row):
                found = (
                    tensor.numpy() if name == "key" or tensor.shape.num_elements() else singles[number][name].numpy()
                )
                assert plain(tf_field(feature).as_value(found)) == plain(wanted[name]), name
