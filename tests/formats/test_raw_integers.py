"""Large tensors of integers: stored as bytes, read as numbers by datamat and by the readers of others."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest

from datamat import Features, ShardOptions, Tensor, load, materialize
from datamat.formats.example import encode_example
from datamat.testing import InlineExecutor

OPTIONS = {"shards": ShardOptions(num_shards=1), "executor": InlineExecutor(), "progress": False}
SHAPE = (4, 5, 6)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
VOLUMES = np.random.default_rng(0).integers(-3000, 3000, (9, *SHAPE), np.int16)


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        ((5, 13), "int64", "bytes"),
        ((None, 65), "int32", "bytes"),
        ((None, 64), "int32", "int64"),
        ((None, None), "int32", "bytes"),
        *(((None,), dtype, "bytes") for dtype in ("int16", "uint8")),
        *(((None,), dtype, "int64") for dtype in ("int32", "int64", "uint32")),
        *((shape, dtype, "bytes") for dtype in (*INTEGERS, "bool") for shape in ((65,), (None, None))),
        *(((64,), dtype, "int64") for dtype in (*INTEGERS[:-1], "bool")),
        ((2,), "float16", "bytes"),
        ((65,), "float32", "float32"),
    ],
)
def test_which_tensors_are_stored_as_bytes(shape, dtype, kind):
    assert Tensor(shape, dtype).columns("x")["x"].kind == kind
    assert Tensor(shape, dtype, "raw").columns("x")["x"].kind == "bytes"
    if dtype != "uint64":  # which is no number of a tf.train.Example
        assert Tensor(shape, dtype, "list").columns("x")["x"].kind != "bytes"


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [
        ("bool", (1000,), 1),
        ("uint8", (1000,), 1),
        ("int8", (1000,), 1),
        ("uint16", (1000,), 2),
        ("int16", (None,), 2),
        ("float16", (1000,), 2),
        ("float16", (None,), 2),
        ("float32", (1000,), 4),
        ("int32", (1000,), 4),
        ("int64", (1000,), 8),
        ("uint64", (None,), 8),
        ("float64", (1000,), 8),
    ],
)
def test_numbers_take_the_bytes_of_their_dtype(dtype, shape, num_bytes):
    """In a record of TFRecord and ArrayRecord, with less than 40 bytes for the rest of it."""
    features = Features({"x": Tensor(shape, dtype)})
    value = np.arange(1000).astype(dtype)

    record = encode_example(features.encode({"key": "a", "x": value}), features.columns)

    assert num_bytes * 1000 <= len(record) < num_bytes * 1000 + 40


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord"])
def test_integers_of_every_type_take_no_more_in_any_format(name, tmp_path):
    """Random bits, which nothing compresses: as many bytes as the array has, and what the format needs beside them.

    Parquet stores integers of 8 and 16 bits in 32; a member of a tar archive has a header; a part of ArrayRecord fills
    its last block of 64 KiB, and the shard has two more.
    """
    if name == "arrayrecord":
        pytest.importorskip("array_record")
    rng = np.random.default_rng(0)
    values = {dtype: np.frombuffer(rng.bytes(200_000), dtype).reshape(25, -1) for dtype in INTEGERS}
    features = Features({dtype: Tensor(array.shape[1:], dtype) for dtype, array in values.items()})
    make = lambda n: {dtype: array[n] for dtype, array in values.items()}  # noqa: E731

    materialize(make, range(25), tmp_path / "out", features=features, format=name, **OPTIONS)

    data = load(tmp_path / "out")
    num_bytes = sum(array.nbytes for array in values.values())
    most = {"parquet": 1.4, "webdataset": 1.7}.get(name, 1.1)
    blocks = sum(len(shard.parts) + 1 for shard in data.manifest.shards) if name == "arrayrecord" else 0
    assert num_bytes < sum(os.path.getsize(path) for path in data.files) < most * num_bytes + blocks * 65_536
    for sample in data:
        for dtype, array in values.items():
            np.testing.assert_array_equal(sample[dtype], array[int(sample["key"])], strict=True)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Return a function that writes the volumes in a format, once."""

    @functools.cache
    def write(name, encoding=None):
        folder = tmp_path_factory.mktemp(name) / "out"
        features = Features({"x": Tensor(SHAPE, "int16", encoding), "open": Tensor((None,) * 3, "int16", encoding)})
        volumes = VOLUMES
        make = lambda n: {"x": volumes[n], "open": volumes[n, : n % 4]}  # noqa: E731
        materialize(make, range(9), folder, features=features, format=name, **OPTIONS)
        return folder

    return write


def test_they_take_two_bytes_each(output):
    def num_bytes(folder):
        return sum(path.stat().st_size for path in folder.glob("data-*.tfrecord"))

    raw = num_bytes(output("tfrecord"))

    numbers = VOLUMES.nbytes + sum(VOLUMES[n, : n % 4].nbytes for n in range(9))
    assert numbers < raw < 1.5 * numbers
    assert num_bytes(output("tfrecord", "list")) > 2.4 * raw


def test_tensorflow_reads_them(output):
    """They come through `to_tf`, and by hand as docs/interop.md shows."""
    tf = pytest.importorskip("tensorflow")
    folder = output("tfrecord")

    for sample in load(folder).to_tf():
        np.testing.assert_array_equal(sample["x"], VOLUMES[int(sample["key"].numpy())])
        assert sample["x"].dtype == tf.int16
    found = tf.data.TFRecordDataset([str(path) for path in sorted(folder.glob("data-*.tfrecord"))]).map(
        lambda record: tf.io.parse_single_example(
            record, {name: tf.io.FixedLenFeature([], tf.string) for name in ("key", "x")}
        )
    )
    for sample in found:
        numbers = tf.reshape(tf.io.decode_raw(sample["x"], tf.int16), SHAPE)
        np.testing.assert_array_equal(numbers, VOLUMES[int(sample["key"].numpy())])
