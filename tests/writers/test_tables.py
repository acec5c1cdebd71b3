"""Tables of pyarrow, pandas and polars as sources: each row is a sample."""

import math

import numpy as np
import pyarrow as pa
import pytest
from prepared import Prepared

from datamat import (
    Index,
    Materializer,
    Nullable,
    SampleError,
    Scalar,
    SourceError,
    Tensor,
    Text,
    WorkerOptions,
    load,
    materialize,
)
from datamat.testing import InlineExecutor
from datamat.writers.dataset import ImportWriter

COLUMNS = {
    "key": ["a", "b", "c", "d"],
    "split": ["train", "val", "train", "train"],
    "x": [1, 2, 3, 4],
    "y": [0.5, math.nan, 1.5, 2.0],
    "text": ["p", "q", "é", ""],
    "single": np.array([1, 2, 3, 4], np.float32),
}


def _materialize(function, inputs, output, **options):
    return materialize(function, inputs, output, executor=InlineExecutor(), progress=False, **options)


def _pandas(columns):
    return pytest.importorskip("pandas").DataFrame(columns)


def _filtered_pandas(columns):
    """Its index no longer counts from 0."""
    frame = _pandas({name: [*values[:1], *values] for name, values in columns.items()})
    return frame[1:]


def _polars(columns):
    return pytest.importorskip("polars").DataFrame(columns)


def _lazy_polars(columns):
    return _polars(columns).lazy()


def _chunked(columns):
    table = pa.table(columns)
    return pa.concat_tables([table[:1], table[1:]])


class Exporting:
    """A table of whatever package, which gives Arrow by its interface alone."""

    def __init__(self, columns):
        self.table = pa.table(columns)

    def __arrow_c_stream__(self, schema=None):
        return self.table.__arrow_c_stream__(schema)


KINDS = {
    "interface": Exporting,
    "pyarrow": pa.table,
    "chunks": _chunked,
    "batch": lambda columns: pa.RecordBatch.from_pydict(columns),
    "dataset": lambda columns: pytest.importorskip("pyarrow.dataset").dataset(pa.table(columns)),
    "pandas": _pandas,
    "filtered": _filtered_pandas,
    "polars": _polars,
    "lazy": _lazy_polars,
    "duckdb": lambda columns: pytest.importorskip("duckdb").from_arrow(pa.table(columns)),
}


def _same(found, wanted):
    return found == wanted or (found != found and wanted != wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_function_gets_each_row_as_a_dict(kind, tmp_path):
    """NaN stays NaN, and the key is that of a column; all else that takes tables gets the same rows."""
    table = KINDS[kind](COLUMNS)

    _materialize(lambda row: {"x2": 2 * row["x"], **row}, table, tmp_path / "out", key="key")
    Materializer("table", table, tmp_path / "table").run(executor=InlineExecutor(), progress=False)

    found = load(tmp_path / "out")
    for place, key in enumerate(COLUMNS["key"]):
        assert int(found[key]["x2"]) == 2 * COLUMNS["x"][place]
        assert all(_same(found[key][name], COLUMNS[name][place]) for name in ("y", "text", "single", "split"))
    assert [int(load(tmp_path / "table", "train")[key]["x"]) for key in "acd"] == [1, 3, 4]
    rows = list(zip(COLUMNS["key"], COLUMNS["split"], COLUMNS["x"], strict=True))
    for index in (Index.from_table(table), Index.from_rows(table)):
        assert [(row.key, row.split, row.fields["x"]) for row in index] == rows
    assert [(row.key, row.split) for row in Index.from_dataset(table)] == [row[:2] for row in rows]


def test_columns_have_the_types_of_the_table(tmp_path):
    """But those that hold keys and splits, which are no fields."""
    Materializer(ImportWriter(), pa.table(COLUMNS), tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    assert dict(load(tmp_path / "out").features) == {
        "key": Text(),
        "x": Scalar("int64"),
        "y": Scalar("float64"),
        "text": Text(),
        "single": Scalar("float32"),
    }
    assert load(tmp_path / "out", "val").keys() == ["b"]


@pytest.mark.parametrize("name", ["pyarrow", "pandas", "polars"])
def test_column_as_inputs_gives_its_values(name, tmp_path):
    """It gives no value under a label of the index."""
    column = KINDS["filtered" if name == "pandas" else name](COLUMNS)["text"]

    _materialize(lambda text: {"text": text}, column, tmp_path / "out")

    assert sorted(sample["text"] for sample in load(tmp_path / "out")) == ["", "p", "q", "é"]


def test_empty_cell_is_refused_with_its_place(tmp_path):
    """All writers that store cells unchanged refuse it; a function gets None, and may know what it means."""
    table = pa.table({"x": [1, 2, None]})

    with pytest.raises(SourceError, match="row 3, column 'x'"):
        Materializer("table", table, tmp_path / "table").run(executor=InlineExecutor(), progress=False)
    with pytest.raises(SampleError, match=r"'x' .* is empty"):
        Materializer(ImportWriter(), table, tmp_path / "import").run(executor=InlineExecutor(), progress=False)
    _materialize(lambda row: {"x": row["x"] or -1}, table, tmp_path / "out")
    assert sorted(int(sample["x"]) for sample in load(tmp_path / "out")) == [-1, 1, 2]


def test_nested_columns_are_arrays_and_flattened_names_or_refused(tmp_path):
    """Lists of numbers are tensors; dicts give a field for each of their values."""
    table = pa.table({"list": [[1.0, 2.0], [3.0]], "of": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]})

    Materializer(ImportWriter(), table, tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    found = load(tmp_path / "out")
    assert found["00000000"]["list"].tolist() == [1.0, 2.0] and found["00000001"]["of"]["b"] == "y"
    assert found.features["list"] == Tensor((None,), "float64")
    with pytest.raises(SourceError, match="column 'list'"):
        Prepared("table", table, tmp_path / "table", executor=InlineExecutor())


def test_index_of_pandas_is_a_column_where_it_has_a_name():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1, 2]}, index=pandas.Index(["a", "b"], name="id"))

    named, unnamed = (list(Index.from_table(table)) for table in (frame, frame.rename_axis(None)))

    assert [dict(row.fields) for row in named] == [{"id": "a", "x": 1}, {"id": "b", "x": 2}]
    assert [dict(row.fields) for row in unnamed] == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize(
    ("values", "columns", "word"), [([[1], ["a"], [object()]], ["x"], "'x'"), ([[1, 2]], ["x", "x"], "same name")]
)
def test_frame_that_is_no_table_is_refused_by_the_name_of_a_column(tmp_path, values, columns, word):
    pandas = pytest.importorskip("pandas")

    with pytest.raises(SourceError, match=word):
        Materializer(pandas.DataFrame(values, columns=columns), output=tmp_path / "out")


def test_table_in_chunks_reaches_workers(tmp_path):
    """Its content is the same there, and that of the table in one piece."""
    for table, num_written in ((_chunked(COLUMNS), 2), (pa.table(COLUMNS), 0)):
        workers = WorkerOptions(num_workers=2)
        report = Materializer(table, output=tmp_path / "out").run(workers=workers, progress=False)
        assert report.num_shards_written == num_written

    assert sorted(int(sample["x"]) for sample in load(tmp_path / "out")) == COLUMNS["x"]


@pytest.mark.parametrize("kept_as", ["tfrecord", "webdataset", "parquet", "arrayrecord"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_texts_and_missing_numbers_of_a_table_are_stored_exactly(tmp_path, kept_as, kind):
    if kept_as == "arrayrecord":
        pytest.importorskip("array_record")
    texts = ["", "sea", "日本", "naïve café", "𝄞", "x" * 300, "a"] * 9
    numbers = [None, 1.5, float("nan"), -0.0, 7.0, None, 2.0] * 9
    table = pa.table(
        {"text": pa.array(["cut off", *texts], kind), "only": pa.array(["", *texts], kind),
         "number": pa.array([0.0, *numbers], pa.float64()), "flag": pa.array([None, *[True, None, False] * 21])}
    ).slice(1)  # fmt: skip
    features = {"number": Nullable(Scalar("float64")), "flag": Nullable(Scalar("bool"))}
    writer = ImportWriter(features=features)
    Materializer(writer, table, tmp_path / "out", format=kept_as).run(executor=InlineExecutor(), progress=False)
    found = load(tmp_path / "out")
    samples = sorted(found, key=lambda sample: sample["key"])
    assert [sample["text"] for sample in samples] == [sample["only"] for sample in samples] == texts
    found_numbers = [None if sample["number"] is None else float(sample["number"]) for sample in samples]
    assert [*map(repr, found_numbers)] == [*map(repr, numbers)]  # NaN equals nothing, and -0.0 equals 0.0
    assert [sample["flag"] for sample in samples] == [True, None, False] * 21
    assert found.statistics["text"]["characters"]["max"] == 300
    assert found.statistics["text"]["characters"]["mean"] == pytest.approx(sum(map(len, texts)) / len(texts))


def test_a_masked_array_in_a_block_is_of_missing_numbers(tmp_path):
    def block(numbers):
        return {"x": np.ma.masked_array(np.float32(numbers), np.array(numbers) % 3 == 0)}

    def row(number):
        return {"x": np.float32(number) if number % 3 else None}

    features = {"x": Nullable(Scalar("float32"))}
    given = {"features": features, "executor": InlineExecutor(), "progress": False, "format": "parquet"}
    materialize(row, range(50), tmp_path / "rows", **given)
    materialize(row, range(50), tmp_path / "blocks", block=block, **given)
    one, other = (next((tmp_path / name).glob("*.parquet")).read_bytes() for name in ("rows", "blocks"))
    assert one == other
