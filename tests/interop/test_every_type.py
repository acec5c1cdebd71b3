"""A field of every type and dtype that datamat stores, as the clients that are told of types read it."""

from __future__ import annotations

import numpy as np
import pytest
import streets

from datamat import ClassLabel, DatasetWriter, Features, Image, IndexRow, Mask, Materializer, Scalar, Tensor, Text, load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # clients take long to import
    pytest.mark.filterwarnings("ignore"),  # what they warn of is theirs
]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS = ("bool", *INTEGERS, "float16", "float32", "float64")
FLAT = {"open"}  # come flat, with their shape beside them


class Zoo(DatasetWriter):
    name = "zoo"
    features = Features(
        {
            **{f"one_{dtype}": Scalar(dtype) for dtype in NUMBERS},
            **{f"some_{dtype}": Tensor((None, 2), dtype) for dtype in NUMBERS},
            "two_behind": Tensor((2, None), "int32"),
            "open": Tensor((None, None), "float32"),
            "raw": Tensor((2, 3), "uint8", "raw"),
            "raw_uint32": Tensor((4,), "uint32", "raw"),
            "grey": Image((None, None, 1)),
            "alpha": Image((4, 5, 4)),
            "jpeg": Image((8, 8, 3), encoding="jpeg"),
            "mask": Mask(),
            "pair": ClassLabel(num_classes=3, shape=(2,)),
            "text": Text(),
        }
    )

    def index(self, source):
        return [IndexRow(f"row{number}", split="train") for number in range(5)]

    def read(self, row):
        number = int(row.key.removeprefix("row"))
        rng = np.random.default_rng(number)

        def of(dtype, *shape):
            return rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)

        return {
            **{f"one_{dtype}": of(dtype)[()] for dtype in NUMBERS},
            **{f"some_{dtype}": of(dtype, number, 2) for dtype in NUMBERS},
            "one_uint64": np.uint64(2**64 - 1 - number),
            "two_behind": of("int32", 2, number),
            "open": of("float32", number, 2),
            "raw": of("uint8", 2, 3),
            "raw_uint32": of("uint32", 4),
            "grey": of("uint8", 3, 4 + number, 1),
            "alpha": of("uint8", 4, 5, 4),
            "jpeg": np.full((8, 8, 3), 90, np.uint8),  # one colour: decoders differ in how they smooth
            "mask": of("uint8", 3, 4),
            "pair": [1, 2],
            "text": "größe" * number,
        }


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Give a function that returns the finished directory of one format or several."""
    made = {}

    def zoo(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("zoo") / "out"
            Materializer(Zoo(), None, made[name], format=name).run(progress=False)
        return made[name]

    return zoo


def check(row, sample):
    """Hold what a client gives to what datamat gives."""
    for name, value in sample.items():
        found = row[name]
        if name in FLAT:
            found = np.asarray(found).reshape(row[f"{name}/shape"])
        elif isinstance(value, str):
            found = found.decode() if isinstance(found, bytes) else found
        if isinstance(found, bytes):  # raw numbers, where a client has no type for them
            found = np.frombuffer(found, value.dtype)
        if isinstance(value, np.ndarray):
            found = np.asarray(found)
            assert found.size == value.size, name
            found = found.reshape(value.shape)  # a mask has a channel for TFDS
        assert np.array_equal(found, value), f"{name}: {found!r} instead of {value!r}"


@pytest.mark.parametrize("name", ["tfrecord", "arrayrecord"])
def test_tfds_gives_every_type(zoo, name):
    """As `as_dataset` and as `as_data_source`."""
    tfds = pytest.importorskip("tensorflow_datasets")
    if name == "arrayrecord":
        pytest.importorskip("array_record")

    builder = tfds.builder_from_directory(zoo(name))
    if name == "tfrecord":
        rows = list(builder.as_dataset(split="train").as_numpy_iterator())
    else:
        rows = list(builder.as_data_source(split="train"))

    samples = {sample["key"]: sample for sample in load(zoo(name), "train")}
    assert sorted(row["key"].decode() for row in rows) == sorted(samples)
    for row in rows:
        check(row, samples[row["key"].decode()])


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_gives_every_type(zoo, tmp_path, streaming):
    """Decoded by the head of the card."""
    datasets = pytest.importorskip("datasets")

    loaded = datasets.load_dataset(str(zoo("parquet")), split="train", streaming=streaming, cache_dir=str(tmp_path))

    samples = {sample["key"]: sample for sample in load(zoo("parquet"), "train")}
    rows = list(loaded)
    assert sorted(row["key"] for row in rows) == sorted(samples)
    for row in rows:
        check(row, samples[row["key"]])


def test_croissant_gives_every_type(zoo):
    """Numbers, pictures and text; raw bytes as bytes."""
    mlcroissant = pytest.importorskip("mlcroissant")

    dataset = mlcroissant.Dataset(str(zoo("parquet") / "croissant.json"))

    samples = {sample["key"]: sample for sample in load(zoo("parquet"), "train")}
    rows = [{name.removeprefix("train/"): value for name, value in row.items()} for row in dataset.records("train")]
    assert sorted(row["key"].decode() for row in rows) == sorted(samples)
    for row in rows:
        check(row, samples[row["key"].decode()])


def test_directory_of_several_formats_opens_in_all_of_them(tmp_path):
    """Each client finds its own shards beside those of others."""
    tfds, datasets = pytest.importorskip("tensorflow_datasets"), pytest.importorskip("datasets")
    wids = pytest.importorskip("wids")
    output = tmp_path / "out"

    Materializer(streets.Streets(), None, output, format=["tfrecord", "parquet", "webdataset"]).run(progress=False)

    keys = [sample["key"] for sample in load(output, "train")]
    builder = tfds.builder_from_directory(output)
    found = {
        "tfds": [row["key"].decode() for row in builder.as_dataset(split="train").as_numpy_iterator()],
        "parquet": datasets.load_dataset(str(output), split="train", cache_dir=str(tmp_path / "cache"))["key"],
        "tar": [
            row["json"]["key"]
            for row in datasets.load_dataset(
                "webdataset", data_files=str(output / "*-train-*.tar"), split="train", cache_dir=str(tmp_path / "cache")
            )
        ],
    }
    assert {name: sorted(rows) for name, rows in found.items()} == dict.fromkeys(found, sorted(keys))
    dataset = wids.ShardListDataset(str(output / "streets-train.json"), cache_dir=str(tmp_path / "wids"))
    assert len(dataset) == len(keys)
