"""A field of every type and dtype that datamat stores, as the clients that know types read it."""

import datetime
import functools
import importlib.util
import json

import numpy as np
import pytest
import streets
from real_clients import MARKS

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
    Tensor,
    Text,
    Timestamp,
    Tokens,
    load,
)
from datamat.features.base import dtype_of

pytestmark = MARKS

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS = (
    "bool",
    *INTEGERS,
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    *(["bfloat16"] if importlib.util.find_spec("ml_dtypes") else []),
)
MISSING = {"age", "score", "note", "corner"}  # null, or a list of one value or none
FLAT = {"open"}  # come flat, with their shape beside them
AS_FILES = {"two", "deep2", "deep3", "deep4", "metres"}  # come as PNG files where a client cannot decode them


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
            **{f"deep{channels}": Image((None, None, channels), dtype="uint16") for channels in (1, 2, 3, 4)},
            "two": Image((3, 4, 2)),
            "instances": Mask(dtype="uint16"),
            "named": Mask((3, 4), names=("a", "b"), dtype="uint16"),
            "points": Keypoints(),
            "people": Keypoints((None, 2, 3)),
            "polygons": Polygons(),
            "rotated": BBoxes(rotated=True),
            "millimetres": Depth(),
            "metres": Depth((3, 4), dtype="float32"),
            "pair": ClassLabel(num_classes=3, shape=(2,)),
            "text": Text(),
            "tokens": Tokens(vocab_size=50_257),
            "ids": Tokens(),
            "blob": Bytes(),
            "info": Json(),
            "taken": Timestamp(tz="UTC"),
            "local": Timestamp(),
            "age": Nullable(Scalar("int64")),
            "score": Nullable(Scalar("float64")),
            "note": Nullable(Text()),
            "corner": Nullable(Tensor((2,), "float32")),
            "tags": ListOf(Text()),
            "counts": ListOf(Scalar("int64")),
            "times": ListOf(Timestamp()),
            "camera": {"iso": Scalar("int32"), "kind": ClassLabel(names=("slr", "phone"))},
            "objects": ListOf({"box": Tensor((4,), "float32"), "name": Text()}),
        }
    )

    def index(self, source):
        return [IndexRow(f"row{number}", split="train") for number in range(5)]

    def read(self, row):
        number = int(row.key.removeprefix("row"))
        rng = np.random.default_rng(number)

        def of(dtype, *shape):
            return rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype_of(dtype))

        def deep(*shape):
            return rng.integers(0, 65536, shape, np.uint16)

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
            "jpeg": np.full((8, 8, 3), 90, np.uint8),  # one colour, because decoders smooth differently
            "mask": of("uint8", 3, 4),
            **{f"deep{channels}": deep(3, 4 + number, channels) for channels in (1, 2, 3, 4)},
            "two": of("uint8", 3, 4, 2),
            "instances": deep(3, 4),
            "named": np.full((3, 4), 65535, np.uint16),
            "points": of("float32", number, 2),
            "people": of("float32", number, 2, 3) % 3,
            "polygons": [of("float32", sides, 2) for sides in range(number)],
            "rotated": of("float32", number, 5),
            "millimetres": deep(3, 4 + number),
            "metres": of("float32", 3, 4) / 7,
            "pair": [1, 2],
            "text": "größe" * number,
            "tokens": list(range(50_000, 50_000 + number)),
            "ids": np.arange(-number, number),
            "blob": b"\xff\0" * number,
            "info": {"größe": [number, None, 0.5], "a": {"b": [{}]}},
            "taken": datetime.datetime(2026, 11, 23, 12, 30, number, 5, tzinfo=datetime.UTC),
            "local": datetime.datetime(1969, 7, 20, 20, 17, number),
            "age": None if number % 2 else number,
            "score": number / 3 if number % 2 else None,
            "note": None if number == 2 else "größe" * number,
            "corner": None if number == 3 else of("float32", 2),
            "tags": [f"größe {place}" for place in range(number)],
            "counts": list(range(number)),
            "times": [np.datetime64(place, "us") for place in range(number)],
            "camera": {"iso": number, "kind": "phone"},
            "objects": [{"box": of("float32", 4), "name": f"o{place}"} for place in range(number % 3)],
        }


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Give a function that returns the finished directory of one format or several."""

    @functools.cache
    def zoo(name):
        output = tmp_path_factory.mktemp("zoo") / "out"
        Materializer(Zoo(), None, output, format=name).run(progress=False)
        return output

    return zoo


def flat(sample):
    """Yield name and value of each field; those of dicts have their paths."""
    for name, value in sample.items():
        if isinstance(value, dict) and name in Zoo.features.dicts:
            yield from ((f"{name}/{part}", one) for part, one in value.items())
        else:
            yield name, value


def check(row, sample):
    """Compare what a client gives with what datamat gives."""
    for name, value in flat(sample):
        found = row[name]
        if name == "polygons":  # come as vertices, and how many of them each has
            vertices, sizes = np.asarray(found, np.float32).reshape(-1, 2), np.asarray(row["polygons/sizes"], np.int64)
            found = Polygons().decode({"": vertices.reshape(-1), "/sizes": sizes})
            assert found.shape == value.shape
            found, value = np.nan_to_num(found, nan=-1), np.nan_to_num(value, nan=-1)
        if name in MISSING:
            check_missing(name, found, value)
            continue
        if name == "times":
            assert [_time_of(time) for time in found] == value.tolist() or np.array_equal(
                np.array([_time_of(time) for time in found], "datetime64[us]"), value
            )
            continue
        if isinstance(value, list):
            assert [one.decode() if isinstance(one, bytes) else one for one in found] == value, name
            continue
        if name in FLAT:
            found = np.asarray(found).reshape(row[f"{name}/shape"])
        elif isinstance(value, str):
            found = found.decode() if isinstance(found, bytes) else found
        elif isinstance(value, dict):
            found = json.loads(found) if isinstance(found, (bytes, str)) else found
        elif isinstance(value, np.datetime64):
            found = _time_of(found)
        if isinstance(found, bytes) and found.startswith(b"\x89PNG"):  # what Pillow cannot hold comes as the file
            assert name in AS_FILES, name
            found = Zoo.features[name].decode(found)
        if isinstance(found, bytes) and not isinstance(
            value, bytes
        ):  # raw numbers, where a client has no type for them
            found = np.frombuffer(found, value.dtype).reshape(-1 if np.ndim(value) else ())
        if isinstance(value, np.ndarray):
            found = np.asarray(found)
            assert found.size == value.size, name
            found = found.reshape(value.shape)  # a mask has a channel for TFDS
        assert np.array_equal(found, value), f"{name}: {found!r} instead of {value!r}"


def check_missing(name, found, value):
    """Compare null, or a list of one value or none."""
    if isinstance(found, (list, np.ndarray)) and np.ndim(found) > np.ndim(0 if value is None else value):
        assert len(found) == (value is not None), name
        found = found[0] if len(found) else None
    if isinstance(found, float) and np.isnan(found):
        found = None  # in a table of pandas
    if value is None or found is None:
        assert found is None and value is None, f"{name}: {found!r} instead of {value!r}"
        return
    found = found.decode() if isinstance(found, bytes) and isinstance(value, str) else found
    if isinstance(found, bytes):
        found = np.frombuffer(found, value.dtype)[0]
    assert np.array_equal(found, value), f"{name}: {found!r} instead of {value!r}"


def _time_of(found):
    """Return what a client gives for a time, int64 or any kind of datetime, as numpy has it."""
    if isinstance(found, bytes):
        found = datetime.datetime.fromisoformat(found.decode())
    if isinstance(found, datetime.datetime):
        found = found.replace(tzinfo=None)
    return np.datetime64(int(found), "us") if isinstance(found, (int, np.integer)) else np.datetime64(found, "us")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["tfrecord", "arrayrecord"])
def test_tfds_gives_every_type(zoo, name):
    """`as_dataset` and `as_data_source` both do."""
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_gives_every_type(zoo, tmp_path, streaming):
    """The head of the card says how to decode them."""
    datasets = pytest.importorskip("datasets")

    loaded = datasets.load_dataset(str(zoo("parquet")), split="train", streaming=streaming, cache_dir=str(tmp_path))

    samples = {sample["key"]: sample for sample in load(zoo("parquet"), "train")}
    rows = list(loaded)
    assert sorted(row["key"] for row in rows) == sorted(samples)
    for row in rows:
        check(row, samples[row["key"]])


@pytest.mark.long
def test_croissant_gives_every_type(zoo):
    """Numbers, pictures and text come as such, raw bytes as bytes."""
    mlcroissant = pytest.importorskip("mlcroissant")

    dataset = mlcroissant.Dataset(str(zoo("parquet") / "croissant.json"))

    samples = {sample["key"]: sample for sample in load(zoo("parquet"), "train")}
    rows = [{name.removeprefix("train/"): value for name, value in row.items()} for row in dataset.records("train")]
    assert sorted(row["key"].decode() for row in rows) == sorted(samples)
    for row in rows:
        check(row, samples[row["key"].decode()])


def test_tables_have_types_for_json_and_times(zoo):
    """DuckDB, polars and pandas know JSON and times; bytes are bytes, bfloat16 is float32."""
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    pandas = pytest.importorskip("pandas")
    files = [str(path) for path in sorted(zoo("parquet").glob("*.parquet"))]
    samples = {sample["key"]: sample for sample in load(zoo("parquet"), "train")}

    names = ["key", "text", "blob", "info", "taken", "local", "one_float16", "age", "score", "note", "tags"]
    names += ["one_bfloat16"] if importlib.util.find_spec("ml_dtypes") else []
    table = duckdb.read_parquet(files)
    assert str(dict(zip(table.columns, table.types, strict=True))["info"]) == "JSON"
    wanted = ", ".join(names).replace("taken", "epoch_us(taken)")  # a time with a zone takes the package pytz
    rows = [dict(zip(names, row, strict=True)) for row in table.project(wanted).fetchall()]
    inner = duckdb.sql(f"select info->>'$.größe[2]', year(taken) from read_parquet({files})").fetchall()
    frames = [polars.read_parquet(files).select(names).to_dicts()]
    frames.append(pandas.concat([pandas.read_parquet(file, columns=names) for file in files]).to_dict("records"))

    assert set(inner) == {("0.5", 2026)}
    for found in (rows, *frames):
        assert sorted(row["key"] for row in found) == sorted(samples)
        for row in found:
            check(row, {name: samples[row["key"]][name] for name in names})


@pytest.mark.long
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
