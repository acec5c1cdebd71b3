"""Pictures decoded many at a time inside `tf.data`."""

from __future__ import annotations

import gc
import shutil
import struct
import weakref
import zlib

import google_crc32c
import numpy as np
import pytest
from every_feature import Everything
from forged import relist
from prepared import Prepared
from shard_offsets import first_byte

from datamat import DatasetWriter, Features, Image, IndexRow, OptionError, ShardOptions, Text, load, materialize
from datamat.readers.tf import TfOptions, decode
from datamat.testing import InlineExecutor

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("tf")]  # a busy machine imports TensorFlow slowly
PICTURES = ("png", "jpeg", "grey", "grey_jpeg", "rgba", "mask")


class Pictures(DatasetWriter):
    """Every kind of picture, in sizes that are declared; the text ends with zeros."""

    name = "pictures"
    features = Features(
        {name: Everything.features[name] for name in PICTURES} | {"mixed": Image((8, 6, 3)), "caption": Text()}
    )

    def index(self, source):
        return [IndexRow(f"row{number:02d}", fields={"number": number % 7}) for number in range(30)]

    def read(self, row):
        sample = Everything().read(row)
        pictures = {name: sample[name] for name in PICTURES}
        return {**pictures, "mixed": mixed_png(pictures["png"]), "caption": f"{row.key}ä\0\0"}


def mixed_png(pixels):
    """Encode a picture with filters 1 (sub) and 2 (up) by turns: it is not decoded straight into the batch."""
    rows, above = b"", np.zeros_like(pixels[0])
    for number, row in enumerate(pixels):
        left = np.concatenate([np.zeros((1, 3), np.uint8), row[:-1]])
        rows += bytes([1 + number % 2]) + (row - (above if number % 2 else left)).tobytes()
        above = row
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    file = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        file += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return file


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A directory of pictures, in formats that TensorFlow reads, and in others. Read only."""
    output = tmp_path_factory.mktemp("pictures") / "out"
    formats = ["tfrecord", "tfrecord.gz", "parquet", "webdataset"]
    options = {"shards": ShardOptions(num_shards=2), "executor": InlineExecutor(), "format": formats}
    Prepared(Pictures, None, output, **options).run(progress=False)
    return output


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tfrecord", {"batch_size": 7}),
        ("tfrecord", {"batch_size": 7, "shuffle": True, "tf": TfOptions(deterministic=False)}),
        ("tfrecord.gz", {"batch_size": 200}),
        ("parquet", {"batch_size": 7, "transform": lambda sample: sample}),
        ("webdataset", {"batch_size": 7, "tf": TfOptions(cache=True)}),
        pytest.param("tfrecord", {"batch_size": 7, "tf": TfOptions(cache=True)}, marks=pytest.mark.long),
        pytest.param("tfrecord.gz", {"batch_size": 7, "transform": lambda sample: sample}, marks=pytest.mark.long),
        pytest.param("parquet", {"batch_size": 7, "shuffle": True}, marks=pytest.mark.long),
    ],
)
def test_pictures_are_the_numpy_readers(output, name, options):
    """They are equal to the pixel, for each record, in batches that are all held until the end."""
    data = load(output, format=name)
    batches = list(data.to_tf(**options).as_numpy_iterator())

    found = {key.decode(): (batch, row) for batch in batches for row, key in enumerate(batch["key"])}
    assert found.keys() == set(data.keys())
    for sample in data:
        batch, row = found[sample["key"]]
        assert batch["caption"][row] == sample["caption"].encode()
        for field in (*PICTURES, "mixed"):
            assert np.array_equal(batch[field][row], sample[field]), field
    if not options.get("shuffle"):
        assert list(found) == data.keys()


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("tfrecord", {}, [13, 13, 4]),
        ("parquet", {"drop_last": True}, [13, 13]),
        ("parquet", {"tf": TfOptions(repeat=True)}, [13] * 5),
        ("tfrecord", {"transform": lambda sample: sample, "tf": TfOptions(repeat=True)}, [13] * 5),
    ],
)
def test_batches_are_cut_alike_for_all_formats(output, name, options, sizes):
    """Where Python reads, too, there is no short batch in the middle, and the number is known beforehand."""
    data = load(output, format=name).columns("mask")
    dataset = data.to_tf(13, **options)

    batches = list(dataset.take(5).as_numpy_iterator())
    keys = [key.decode() for batch in batches for key in batch["key"]]

    assert [len(batch["key"]) for batch in batches] == sizes
    assert keys == [*data.keys(), *data.keys(), *data.keys()][: len(keys)]
    assert int(dataset.cardinality()) == (-1 if "tf" in options else len(sizes))
    assert {spec.shape[0] for spec in dataset.element_spec.values()} == {13 if "drop_last" in options else None}


def test_formats_have_the_same_types_and_a_seed_decides_the_order(output):
    native, other = load(output, format="tfrecord"), load(output, format="parquet")
    orders = [[key for batch in other.columns("mask").to_tf(7, shuffle=True, seed=2) for key in batch["key"].numpy()]
              for _ in range(2)]  # fmt: skip

    assert native.to_tf().element_spec == other.to_tf().element_spec
    assert orders[0] == orders[1]


def forge(pictures, change):
    """Write the first shard again with its second record changed, of the same size, and right checksums."""
    path = pictures.files[0]
    with open(path, "rb") as file:
        data = file.read()
    start = first_byte(pictures.files[0], 1)
    size = int.from_bytes(data[start : start + 8], "little")
    payload = change(data[start + 12 : start + 12 + size])
    assert len(payload) == size
    crc = google_crc32c.value(payload)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    with open(path, "wb") as file:
        file.write(data[: start + 12] + payload + masked.to_bytes(4, "little") + data[start + 16 + size :])


def without_data(payload):
    """Have a PNG without pixels."""
    return payload.replace(b"IDAT", b"IDAX", 1)


def turned(payload):
    """Swap height and width of a JPEG; its one block of 8 x 8 pixels serves both."""
    start = payload.index(b"\xff\xc0") + 5
    return payload[:start] + payload[start + 2 : start + 4] + payload[start : start + 2] + payload[start + 4 :]


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"batch_size": 4}, without_data, "field '(png|grey|rgba|mask|mixed)': PNG"),
        ({"transform": lambda sample: sample}, turned, r"field '(grey_)?jpeg' is declared .* but is \(6, 8, 3\)"),
    ],
)
def test_picture_that_is_not_as_declared_is_an_error_that_names_it(tf, output, tmp_path, options, change, message):
    """The error gives key and field; the checksums are right."""
    data = load(shutil.copytree(output, tmp_path / "out"), format="tfrecord")
    forge(data, change)
    relist(tmp_path / "out")
    data = load(tmp_path / "out", format="tfrecord")

    with pytest.raises(tf.errors.InvalidArgumentError, match=f"record of key '{data.keys()[1]}' is damaged: {message}"):
        list(data.to_tf(**options))


def test_memory_is_released_with_the_dataset(monkeypatch, output):
    """TensorFlow keeps the function, and with it the decoder; the batches would stay behind every call of `to_tf`."""
    monkeypatch.setattr("datamat.readers.loader._LEAST_BYTES", 1)
    made = []
    real = decode.PictureDecoder.__init__
    monkeypatch.setattr(
        decode.PictureDecoder, "__init__", lambda self, features: made.append(self) or real(self, features)
    )
    dataset = load(output, format="tfrecord").to_tf(10)

    last = list(dataset.as_numpy_iterator())[-1]
    pool = made[0]._memory
    assert 0 < len(pool._blocks) <= 40  # used again: six fields, a few batches
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()

    assert gone() is None and not pool._blocks
    assert last["png"].any()


def test_pictures_that_differ_in_size_are_refused_by_key(tmp_path):
    """Before the first batch; one at a time, and as lists for numpy, they are there."""
    made = materialize(
        lambda n: {"image": np.zeros((8 + n, 8, 3), np.uint8)}, range(3), tmp_path / "out",
        features={"image": Image()}, executor=InlineExecutor(), progress=False,
    )  # fmt: skip
    dataset = load(made.output)
    keys = "|".join(dataset.keys())

    with pytest.raises(OptionError, match=rf"'image' has .* in sample '({keys})' and .* in '({keys})'"):
        dataset.to_tf(2)

    assert {len(batch["image"][0]) for batch in dataset.to_tf(1)} == {8, 9, 10}
    assert {len(sample["image"]) for sample in dataset.to_tf()} == {8, 9, 10}
    assert isinstance(next(iter(dataset.to_numpy(3)))["image"], list)
