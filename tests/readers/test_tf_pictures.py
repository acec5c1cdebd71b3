"""Pictures decoded many at a time inside `tf.data`."""

from __future__ import annotations

import gc
import struct
import weakref
import zlib

import google_crc32c
import numpy as np
import pytest
from every_feature import ONE_WORKER, Everything
from shard_offsets import first_byte

from datamat import DatasetWriter, Features, Image, IndexRow, Materializer, ShardOptions, Text, load
from datamat.readers.tf import decode

PICTURES = ("png", "jpeg", "grey", "grey_jpeg", "rgba", "mask")


class Pictures(DatasetWriter):
    """Every kind of picture, in sizes that are declared; the text ends with zeros."""

    name = "pictures"
    features = Features(
        {name: Everything.features[name] for name in PICTURES} | {"mixed": Image((8, 6, 3)), "caption": Text()}
    )

    def index(self, source):
        return [IndexRow(f"row{number:02d}", fields={"number": number % 7}) for number in range(90)]

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


@pytest.fixture(scope="module", params=["tfrecord", "tfrecord.gz", "parquet", "webdataset"])
def pictures(request, tmp_path_factory):
    """A dataset of pictures, in a format that TensorFlow reads, or one that it does not."""
    output = tmp_path_factory.mktemp("pictures") / "out"
    options = {"shards": ShardOptions(num_shards=2), "workers": ONE_WORKER, "format": request.param}
    Materializer(Pictures, None, output, **options).run(progress=False)
    return load(output)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 7},
        {"batch_size": 200},
        {"batch_size": 7, "transform": lambda sample: sample},
        {"batch_size": 7, "cache": True},
        {"batch_size": 7, "deterministic": False},
        {"batch_size": 7, "shuffle": True},
    ],
)
def test_pictures_are_the_numpy_readers(pictures, options):
    """They are equal to the pixel, for each record, in batches that are all held until the end."""
    batches = list(pictures.to_tf(**options).as_numpy_iterator())

    found = {key.decode(): (batch, row) for batch in batches for row, key in enumerate(batch["key"])}
    assert found.keys() == set(pictures.keys())
    for sample in pictures:
        batch, row = found[sample["key"]]
        assert batch["caption"][row] == sample["caption"].encode()
        for name in (*PICTURES, "mixed"):
            assert np.array_equal(batch[name][row], sample[name]), name
    if not options.get("shuffle") and options.get("deterministic", True):
        assert list(found) == pictures.keys()


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"batch_size": 40}, [40, 40, 10]),
        ({"batch_size": 40, "drop_remainder": True}, [40, 40]),
        ({"batch_size": 40, "repeat": True}, [40, 40, 40, 40, 40]),
        ({"batch_size": 40, "repeat": True, "drop_remainder": True}, [40, 40, 40, 40, 40]),
        ({"batch_size": 40, "repeat": True, "transform": lambda sample: sample}, [40, 40, 40, 40, 40]),
    ],
)
def test_batches_are_cut_alike_for_all_formats(pictures, options, sizes):
    """Where Python reads, too, there is no short batch in the middle, and the number is known beforehand."""
    dataset = pictures.to_tf(**options)

    batches = list(dataset.take(5).as_numpy_iterator())
    keys = [key.decode() for batch in batches for key in batch["key"]]

    assert [len(batch["key"]) for batch in batches] == sizes
    assert keys == [*pictures.keys(), *pictures.keys(), *pictures.keys()][: len(keys)]
    assert int(dataset.cardinality()) == (-1 if "repeat" in options else len(sizes))
    known = {spec.shape[0] for spec in dataset.element_spec.values()}
    assert known == {40 if "drop_remainder" in options else None}


def test_blocks_of_large_pictures_are_small(monkeypatch, pictures):
    """Memory does not grow with the size of pictures: a block may hold a single one."""
    sizes = []
    real = decode.PictureDecoder._decode
    monkeypatch.setattr(
        "datamat.readers.tf.pipeline._BLOCK_BYTES", 2000
    )  # a record comes to 48 * 18 bytes of pixels, and two texts
    monkeypatch.setattr(
        decode.PictureDecoder,
        "_decode",
        lambda self, *columns: sizes.append(len(columns[0])) or real(self, *columns),
    )

    found = [sample["key"].decode() for sample in pictures.to_tf().as_numpy_iterator()]

    assert found == pictures.keys()
    assert set(sizes) <= {2}
    assert bool(sizes) == pictures.manifest.format.startswith("tfrecord")


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


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"transform": lambda sample: sample}])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_data, "'(png|grey|rgba|mask|mixed)': PNG"),
        (turned, r"field '(grey_)?jpeg' is declared uint8 \(8, 6, 3\) but is \(6, 8, 3\)"),
    ],
)
def test_picture_that_is_not_as_declared_is_an_error_that_names_it(tmp_path, options, change, message):
    """The error gives key and field; the checksums are right."""
    import tensorflow as tf

    Materializer(Pictures, None, tmp_path / "out", workers=ONE_WORKER).run(progress=False)
    data = load(tmp_path / "out")
    forge(data, change)

    with pytest.raises(tf.errors.InvalidArgumentError, match=f"record of key '{data.keys()[1]}' is damaged: {message}"):
        list(data.to_tf(**options))


def test_memory_is_released_with_the_dataset(monkeypatch, tmp_path):
    """TensorFlow keeps the function, and with it the decoder; the batches would stay behind every call of `to_tf`."""
    monkeypatch.setattr("datamat.readers.loader._LEAST_BYTES", 1)
    made = []
    real = decode.PictureDecoder.__init__
    monkeypatch.setattr(
        decode.PictureDecoder, "__init__", lambda self, features: made.append(self) or real(self, features)
    )
    Materializer(Pictures, None, tmp_path / "out", workers=ONE_WORKER).run(progress=False)
    dataset = load(tmp_path / "out").to_tf(32)

    last = list(dataset.as_numpy_iterator())[-1]
    pool = made[0]._memory
    assert 0 < len(pool._blocks) <= 40  # used again: six fields, a few batches
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()

    assert gone() is None and not pool._blocks
    assert last["png"].any()
