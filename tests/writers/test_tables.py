"""Tables of pyarrow, pandas and polars as sources: each row is a sample."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from datamat import (
    Index,
    Materializer,
    SampleError,
    Scalar,
    ShardOptions,
    SourceError,
    Tensor,
    Text,
    WorkerOptions,
    load,
    materialize,
)
from datamat.writers.dataset import ImportWriter
from datamat.writers.existing import TableRows, content_of, table_of

ONE = WorkerOptions(num_workers=1)
COLUMNS = {
    "key": ["a", "b", "c", "d"],
    "split": ["train", "val", "train", "train"],
    "x": [1, 2, 3, 4],
    "y": [0.5, math.nan, 1.5, 2.0],
    "text": ["p", "q", "é", ""],
    "single": np.array([1, 2, 3, 4], np.float32),
}


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


KINDS = {
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


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def _same(found, wanted):
    return found == wanted or (found != found and wanted != wanted)


def test_function_gets_each_row_as_a_dict(make, tmp_path):
    """NaN stays NaN, and the key is that of a column."""
    table = make(COLUMNS)

    materialize(
        lambda row: {"x2": 2 * row["x"], **row}, table, tmp_path / "out", key="key", workers=ONE, progress=False
    )

    found = load(tmp_path / "out")
    for place, key in enumerate(COLUMNS["key"]):
        assert int(found[key]["x2"]) == 2 * COLUMNS["x"][place]
        assert all(_same(found[key][name], COLUMNS[name][place]) for name in ("y", "text", "single", "split"))


def test_import_writer_takes_rows_with_their_types(make, tmp_path):
    """Columns `key` and `split` are those of the rows."""
    Materializer(ImportWriter(), make(COLUMNS), tmp_path / "out", workers=ONE).run(progress=False)

    found = load(tmp_path / "out", "train")
    assert sorted(found.keys()) == ["a", "c", "d"] and load(tmp_path / "out", "val").keys() == ["b"]
    assert dict(found.features) == {
        "key": Text(),
        "x": Scalar("int64"),
        "y": Scalar("float64"),
        "text": Text(),
        "single": Scalar("float32"),
    }
    assert (int(found["c"]["x"]), found["c"]["text"]) == (3, "é")


def test_table_writer_and_indexes_take_rows(make, tmp_path):
    """They treat rows like those of a file with the same columns."""
    table = make(COLUMNS)

    Materializer("table", table, tmp_path / "out", workers=ONE).run(progress=False)

    assert {key: int(load(tmp_path / "out", "train")[key]["x"]) for key in "acd"} == {"a": 1, "c": 3, "d": 4}
    for index in (Index.from_table(table), Index.from_rows(table)):
        assert [(row.key, row.split, row.fields["x"]) for row in index] == [
            ("a", "train", 1),
            ("b", "val", 2),
            ("c", "train", 3),
            ("d", "train", 4),
        ]
    assert [(row.key, row.split) for row in Index.from_dataset(table)] == list(
        zip(COLUMNS["key"], COLUMNS["split"], strict=True)
    )


@pytest.mark.parametrize("name", ["pyarrow", "pandas", "polars"])
def test_column_as_inputs_gives_its_values(name, tmp_path):
    """It gives no value under a label of the index."""
    column = KINDS["filtered" if name == "pandas" else name](COLUMNS)["text"]

    materialize(lambda text: {"text": text}, column, tmp_path / "out", workers=ONE, progress=False)

    assert sorted(sample["text"] for sample in load(tmp_path / "out")) == ["", "p", "q", "é"]


def test_tables_by_split_are_imported(tmp_path):
    """They are imported like other datasets."""
    source = {"train": pa.table({"x": [1, 2]}), "test": pa.table({"x": [3]})}

    Materializer(ImportWriter(), source, tmp_path / "out", workers=ONE).run(progress=False)

    assert load(tmp_path / "out", "test").keys() == ["test-00000000"]


def test_named_index_of_pandas_becomes_a_column():
    """An index without a name is only a numbering."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1, 2]}, index=pandas.Index(["a", "b"], name="id"))

    assert table_of(frame).to_pydict() == {"id": ["a", "b"], "x": [1, 2]}
    assert table_of(frame.rename_axis(None)).to_pydict() == {"x": [1, 2]}


def test_one_row_more_concerns_one_shard(tmp_path):
    """Each row has its own digest."""
    options = {"key": "id", "shards": ShardOptions(num_shards=4), "workers": ONE, "progress": False}
    for numbers, reused in ((range(40), 0), ([99, *range(40)], 3)):
        table = pa.table({"id": list(numbers), "x": [number * number for number in numbers]})
        report = materialize(lambda row: {"x": row["x"]}, table, tmp_path / "out", **options)
        assert report.num_shards_reused == reused


def test_empty_cell_is_refused_with_its_place(tmp_path):
    """All writers that store cells unchanged refuse it; a function gets None, and may know what it means."""
    table = pa.table({"x": [1, 2, None]})

    with pytest.raises(SourceError, match=r"the table row 3, column 'x': found None .*fill in empty cells"):
        Materializer("table", table, tmp_path / "table", workers=ONE).run(progress=False)
    with pytest.raises(SampleError, match=r"'x' of the table is empty; .*; or declare it with features={'x': Opt"):
        Materializer(ImportWriter(), table, tmp_path / "import", workers=ONE).run(progress=False)
    materialize(lambda row: {"x": row["x"] or -1}, table, tmp_path / "out", workers=ONE, progress=False)
    assert sorted(int(sample["x"]) for sample in load(tmp_path / "out")) == [-1, 1, 2]


def test_nested_columns_are_arrays_and_flattened_names_or_refused(tmp_path):
    """Lists of numbers are tensors; dicts give a field for each of their values."""
    table = pa.table({"list": [[1.0, 2.0], [3.0]], "of": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]})

    Materializer(ImportWriter(), table, tmp_path / "out", workers=ONE).run(progress=False)

    found = load(tmp_path / "out")
    assert found["00000000"]["list"].tolist() == [1.0, 2.0] and found["00000001"]["of"]["b"] == "y"
    assert found.features["list"] == Tensor((None,), "float64")
    with pytest.raises(SourceError, match=r"column 'list': found \[1.0, 2.0\] \(list\), want text or a number"):
        Materializer("table", table, tmp_path / "table", workers=ONE)


def test_mixed_column_of_pandas_is_refused_by_name():
    """No column of Arrow can hold it."""
    pandas = pytest.importorskip("pandas")

    with pytest.raises(SourceError, match=r"column 'x' of the table cannot be converted: .*frame.to_dict"):
        table_of(pandas.DataFrame({"x": [1, "a", object()]}))
    with pytest.raises(SourceError, match=r"the table has two columns with the same name \(x, x\); rename one"):
        table_of(pandas.DataFrame([[1, 2]], columns=["x", "x"]))


def test_content_does_not_depend_on_chunks():
    """It depends on every cell."""
    assert content_of(_chunked(COLUMNS)) == content_of(pa.table(COLUMNS))
    assert content_of(pa.table({"x": [1, 2]})) != content_of(pa.table({"x": [1, 3]}))


def test_rows_are_a_sequence():
    """By position, from the end, in slices, and in order."""
    rows = TableRows(_chunked(COLUMNS))

    assert [row["x"] for row in rows] == [rows[place]["x"] for place in range(4)] == COLUMNS["x"]
    assert rows[-1]["key"] == "d" and [row["x"] for row in rows[1:3]] == [2, 3]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_table_reaches_workers_of_every_kind(method, tmp_path):
    """Its content is the same there."""
    workers = WorkerOptions(num_workers=2, start_method=method)

    materialize(lambda row: {"x": row["x"]}, _chunked(COLUMNS), tmp_path / "out", workers=workers, progress=False)

    assert sorted(int(sample["x"]) for sample in load(tmp_path / "out")) == COLUMNS["x"]


def test_no_package_is_imported_to_ask_whether_something_is_a_table():
    """Only the name of its type is compared."""
    code = (
        "import sys, datamat; from datamat.writers.existing import table_of, listed_column;"
        "assert table_of([1]) is None and listed_column({}) is None;"
        "assert not {'pandas', 'polars', 'pyarrow'} & set(sys.modules), sorted(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
