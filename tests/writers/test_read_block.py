"""Arrays by the block: every format gets the bytes that it gets row by row."""

import dataclasses
import hashlib

import numpy as np
import pytest
from prepared import Prepared

from datamat import (
    BBoxes,
    ClassLabel,
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    OptionError,
    SampleError,
    Scalar,
    SchemaError,
    ShardOptions,
    Tensor,
    Text,
    load,
    materialize,
)
from datamat.features import RaggedColumn, register_feature
from datamat.testing import InlineExecutor

FORMATS = ["tfrecord", pytest.param("tfrecord.gz", marks=pytest.mark.long), "webdataset", "parquet", "arrayrecord"]
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]
NUM_ROWS = 40


@register_feature
@dataclasses.dataclass(frozen=True)
class Kelvin(Scalar):
    """A type of another package that has `encode` of its own, and inherits a method for blocks that does not fit it."""

    def encode(self, value):
        return super().encode(np.float32(value + 273))

    def decode(self, column):
        return super().decode(column) - np.float32(273)


FEATURES = Features(
    {
        **{f"scalar_{dtype}": Scalar(dtype) for dtype in DTYPES},
        **{f"fixed_{dtype}": Tensor((3, 2), dtype) for dtype in DTYPES},
        **{f"large_{dtype}": Tensor((90,), dtype) for dtype in DTYPES},
        **{f"ragged_{dtype}": Tensor((None, 2), dtype) for dtype in DTYPES},
        **{f"raw_{dtype}": Tensor((None,), dtype, "raw") for dtype in DTYPES},
        "open": Tensor((None, 2, None), "int32"),
        "inner": Tensor((2, None), "float32"),
        "empty": Tensor((None, 0), "float32"),
        "nothing": Tensor((0,), "int64"),
        "label": ClassLabel(names=("a", "b", "c")),
        "labels": ClassLabel(num_classes=9, shape=(2,)),
        "tags": ClassLabel(num_classes=9, shape=(None,)),
        "boxes": BBoxes(),
        "caption": Text(),
        "picture": Image((4, 3, 3)),
        "kelvin": Kelvin(),
    }
)


def sample_of(number):
    """Return a sample whose arrays differ in length from row to row, from none to long."""
    rng = np.random.default_rng(number)
    length = (0, 1, 3, 200)[number % 4] + number % 3
    found = {}
    for dtype in DTYPES:
        found[f"scalar_{dtype}"] = numbers(rng, dtype, ())[()]
        found[f"fixed_{dtype}"] = numbers(rng, dtype, (3, 2))
        found[f"large_{dtype}"] = numbers(rng, dtype, (90,))
        found[f"ragged_{dtype}"] = numbers(rng, dtype, (length, 2))
        found[f"raw_{dtype}"] = numbers(rng, dtype, (length,))
    return {
        **found,
        "open": numbers(rng, "int32", (number % 4, 2, number % 3)),
        "inner": numbers(rng, "float32", (2, number % 5)),
        "empty": np.zeros((number % 3, 0), np.float32),
        "nothing": np.zeros(0, np.int64),
        "label": "abc"[number % 3],
        "labels": rng.integers(0, 9, 2),
        "tags": rng.integers(0, 9, number % 5),
        "boxes": np.sort(rng.random((number % 3, 2, 2), np.float32), 1).reshape(-1, 4),
        "caption": "ß" * (number % 50),
        "picture": rng.integers(0, 256, (4, 3, 3), np.uint8),
        "kelvin": float(number),
    }


def numbers(rng, dtype, shape):
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if np.dtype(dtype).kind in "iu":
        bounds = np.iinfo(dtype)
        return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
    found = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.startswith("complex") else 0)
    return np.asarray(found).astype(dtype)


def as_columns(samples, form):
    """Return the columns of samples: stacked where they have one shape, else in the given form."""
    columns = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        arrays = all(isinstance(value, (np.ndarray, np.generic)) for value in values)
        if arrays and len({np.shape(value) for value in values}) == 1 and form != "list":
            columns[name] = np.stack(values)
        elif arrays and form == "pair" and len({np.shape(value)[1:] for value in values}) == 1:
            columns[name] = np.concatenate(values), np.array([len(value) for value in values])
        elif arrays and np.ndim(values[0]) == 0:
            columns[name] = np.array(values)
        else:
            columns[name] = values
    return columns


class Rows(DatasetWriter):
    name = "set"
    features = FEATURES
    file_fields = ()

    def index(self, source):
        return [IndexRow(f"{'k' * (number % 5)}{number}", fields={"number": number}) for number in range(NUM_ROWS)]

    def read(self, row):
        return sample_of(row.fields["number"])


class Blocks(Rows):
    form = "pair"

    def read(self, row):
        raise AssertionError("one row was read")

    def read_block(self, keys, fields):
        return as_columns([sample_of(number) for number in fields["number"].tolist()], self.form)


class Lists(Blocks):
    form = "list"


def contents(folder, num_rows):
    """Return the digests of all shards and of their offsets."""
    report = load(folder)
    assert len(report) == num_rows
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}
    return {name: digest for name, digest in found.items() if name.startswith(("set", "data"))}


@pytest.mark.parametrize("name", FORMATS)  # each format makes records of columns in its own way
@pytest.mark.timeout(300)  # a busy machine
def test_blocks_give_the_bytes_of_rows(tmp_path, name):
    if name == "arrayrecord":
        pytest.importorskip("array_record")
    if name == "parquet":
        pytest.importorskip("pyarrow")
    for writer in (Rows, Blocks, Lists):
        job = Prepared(
            writer(),
            None,
            tmp_path / writer.__name__,
            format=name,
            shards=ShardOptions(num_shards=2),
            executor=InlineExecutor(),
        )
        job.run(progress=False)

    wanted = contents(tmp_path / "Rows", NUM_ROWS)

    assert wanted == contents(tmp_path / "Blocks", NUM_ROWS) == contents(tmp_path / "Lists", NUM_ROWS)


@pytest.mark.parametrize(
    ("feature", "values", "word"),
    [
        (Tensor((2,)), np.zeros((3, 2)), "float64"),
        (Tensor((2,)), np.zeros((3, 4), np.float32), r"\(3, 4\)"),
        (Tensor((2,)), [np.zeros(2, np.float32)] * 2 + [np.zeros(3, np.float32)], r"\(3,\)"),
        (Tensor((2,)), [[1.0, 2.0]] * 3, "a list"),
        (Tensor((None,)), (np.zeros(4, np.float32), np.array([2, 1, 2])), "sum 5"),
        (Tensor((None,)), (np.zeros(4, np.float32), np.array([5, -2, 1])), "lengths"),
        (Tensor((None,)), (np.zeros(4, np.float32), np.array([2.0, 1, 1])), "lengths"),
        (Tensor((None,)), (np.zeros(4, np.float32), np.array([2, 2])), "x: 2"),
        (Tensor((None,)), (np.zeros((3, 1), np.float32), np.array([1, 1, 1])), r"\(1, 1\)"),
        (Tensor((2,)), (np.zeros(6, np.float32), np.array([2, 1, 3])), r"\(1,\)"),
        (Tensor((2,)), {1: 2}, "a dict"),
        (ClassLabel(num_classes=2), np.array([0, 1, 2]), "class id 2"),
        (ClassLabel(num_classes=2), np.array([True, False, True]), "class name"),
        (ClassLabel(num_classes=2, shape=(None,)), (np.array([0, -1, 1]), np.array([1, 1, 1])), "class id -1"),
        (BBoxes(), np.full((3, 1, 4), 2, np.float32), "box 0"),
        (Image((2, 2, 3)), np.zeros((3, 2, 2, 4), np.uint8), r"\(2, 2, 4\)"),
    ],
)
def test_wrong_columns_are_refused_by_name(feature, values, word):
    with pytest.raises(SchemaError, match=word) as refused:
        Features({"x": feature}).encode_block({"key": ["a", "b", "c"], "x": values})
    assert "x" in str(refused.value)


def test_ragged_column_is_a_sequence_of_its_rows():
    column = RaggedColumn(np.arange(6), np.array([2, 0, 3, 1]))

    assert [row.tolist() for row in (column[0], column[1], column[-1])] == [[0, 1], [], [5]]
    assert [row.tolist() for row in column[1:3].rows()] == [[], [2, 3, 4]]
    assert len(column) == 4
    assert len(column[3:1]) == 0
    with pytest.raises(IndexError):
        column[4]


class Some(Blocks):
    """Reads some blocks row by row, because it says so or because they fail."""

    features = Features({"x": Tensor((1 << 16,), "float32")})

    def index(self, source):
        return [IndexRow(f"{number:03d}", fields={"number": number}) for number in range(300)]

    def read(self, row):
        number = row.fields["number"]
        if number == 200:
            raise ValueError("no such sample")
        return {"x": np.full(1 << 16, number, np.float32)}

    def read_block(self, keys, fields):
        numbers = fields["number"]
        if 100 in numbers:
            return None
        if 200 in numbers:
            raise ValueError("not in a block either")
        return {"x": np.repeat(numbers.astype(np.float32)[:, None], 1 << 16, 1)}


def test_blocks_that_fail_are_read_row_by_row(tmp_path):
    """A part is several blocks where its rows are large; the row that fails is named, and no other is lost."""
    options = {"shards": ShardOptions(num_shards=1), "executor": InlineExecutor()}

    with pytest.raises(SampleError, match="sample '200': ValueError: no such sample"):
        Prepared(Some(), None, tmp_path / "raised", **options).run(progress=False)
    Prepared(Some(), None, tmp_path / "out", errors="skip", **options).run(progress=False)

    found = {sample["key"]: float(sample["x"][0]) for sample in load(tmp_path / "out")}
    assert found == {f"{number:03d}": number for number in range(300) if number != 200}


@pytest.mark.parametrize("inputs", [range(50), list(range(50)), np.arange(50)], ids=["range", "list", "array"])
def test_materialize_takes_a_function_of_blocks(tmp_path, inputs):
    table = np.random.default_rng(0).random((50, 7), np.float32)
    features = Features({"x": Tensor((7,)), "n": Scalar("int64")})
    options = {"features": features, "progress": False, "executor": InlineExecutor()}

    def one(n):
        return {"x": table[n], "n": int(n)}

    def fail(n):
        raise AssertionError(f"{n} was asked for alone")

    def many(items):
        return {"x": table[items], "n": np.asarray(items, np.int64)}

    materialize(one, inputs, tmp_path / "rows", **options)
    materialize(fail, inputs, tmp_path / "blocks", block=many, **options)

    assert contents(tmp_path / "rows", 50) == contents(tmp_path / "blocks", 50)


def test_function_that_draws_takes_no_blocks(tmp_path):
    with pytest.raises(OptionError, match="block= cannot be used with a function that asks for a generator"):
        materialize(lambda n, rng: {"x": 1}, [1], tmp_path, block=lambda items: {"x": np.ones(len(items))})


def test_arrays_may_be_refilled_for_the_next_block(tmp_path, monkeypatch):
    monkeypatch.setattr("datamat.plan.pipeline._MOST_BLOCK_ROWS", 4)
    number, vector = np.empty(4), np.empty((4, 3), np.float32)

    def many(inputs):
        number[: len(inputs)], vector[: len(inputs)] = inputs, np.asarray(inputs)[:, None]
        return {"number": number[: len(inputs)], "vector": (vector[: len(inputs)].reshape(-1), np.full(len(inputs), 3))}

    features = {"number": Scalar("float64"), "vector": Tensor((None,), "float32")}
    options = {"features": features, "block": many, "format": "parquet", "executor": InlineExecutor()}
    materialize(lambda one: {"number": 0.0, "vector": [0.0]}, range(1000), tmp_path / "out", **options, progress=False)

    found = list(load(tmp_path / "out", "train"))
    assert [float(sample["number"]) for sample in found] == [float(sample["vector"][2]) for sample in found]
    assert sorted(float(sample["number"]) for sample in found) == list(range(1000))
    value = load(tmp_path / "out", "train").statistics["number"]["value"]
    assert (value["min"], value["max"]) == (0, 999)
