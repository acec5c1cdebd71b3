"""What a source holds is stored exactly, or refused by name: nothing becomes another value in silence."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from foreign_files import tfrecord
from prepared import Prepared
from pyarrow import parquet

from datamat import (
    DatamatError,
    Index,
    ListOf,
    Materializer,
    Nullable,
    Scalar,
    SourceError,
    Text,
    Timestamp,
    load,
)
from datamat.testing import InlineExecutor
from datamat.writers import ImportWriter


def stored(source, output, **options):
    """Return the samples of a source, in the order of their keys."""
    writer = ImportWriter(**options)
    Prepared(writer, source, output, executor=InlineExecutor()).run(progress=False)
    return sorted(load(output), key=lambda sample: sample["key"])


def _extension(kind, cells):
    return pa.table({"x": pa.ExtensionArray.from_storage(kind, pa.array(cells, kind.storage_type))})


def _frame(**columns):
    return pytest.importorskip("pandas").DataFrame(columns)


def _months():
    return _frame(x=pytest.importorskip("pandas").period_range("2026-01", "2026-03", freq="M"))


def _objects():
    polars = pytest.importorskip("polars")
    return polars.DataFrame({"x": polars.Series([object(), object()], dtype=polars.Object)})


_TIMES = [datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)]
WRONG = {
    "masked array": (lambda: [{"x": np.ma.masked_array([1, -9999, 3], [0, 1, 0])}], "1 of 3 values .* masked"),
    "masked column": (lambda: {"x": np.ma.masked_array([1, -9999, 3], [0, 1, 0])}, "1 of 3 values .* masked"),
    "uuid": (lambda: _extension(pa.uuid(), [b"a" * 16]), "'x' is extension<arrow.uuid>"),
    "transposed": (
        lambda: _extension(pa.fixed_shape_tensor(pa.int8(), (1, 2), permutation=[1, 0]), [[1, 2]]),
        "'x' is",
    ),
    "map": (lambda: pa.table({"x": pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int8()))}), "key twice"),
    "struct": (lambda: pa.table({"a": [{"b": 1}], "a/b": [2]}), "two columns 'a/b'"),
    "dict": (lambda: [{"a": {"b": 1}, "a/b": 2}], "two fields 'a/b'"),
    "period": (_months, "'x' of the table is period"),
    "objects": (_objects, "'x' .* Python objects"),
    **{
        f"times in {name}": (
            lambda make=make: _frame(x=[*map(make, _TIMES)]),
            "'x' .* times with a time zone and others",
        )
        for name, make in {
            "cells": lambda time: time,
            "lists": lambda time: [time],
            "dicts": lambda time: {"a": [{"b": time}]},
        }.items()
    },
}


def test_times_of_one_kind_are_stored_beside_those_of_another(tmp_path):
    """In another field, or none."""
    pandas = pytest.importorskip("pandas")
    naive, aware = _TIMES

    (_, found) = stored(
        _frame(x=[pandas.NaT, aware], y=[None, {"a": naive, "b": aware}]),
        tmp_path / "out",
        features={"x": Nullable(Timestamp("UTC")), "y/a": Nullable(Timestamp()), "y/b": Nullable(Timestamp("UTC"))},
    )

    assert found["x"] == found["y"]["b"] == np.datetime64("2026-01-01", "us") == found["y"]["a"]


@pytest.mark.parametrize("name", WRONG)
def test_what_no_feature_stores_exactly_is_refused(tmp_path, name):
    """It was stored as something else."""
    make, message = WRONG[name]

    with pytest.raises(DatamatError, match=message):
        stored(make(), tmp_path / "out")


def test_booleans_of_a_byte_are_booleans(tmp_path):
    """They were stored as the integers that hold them."""
    samples = stored(_extension(pa.bool8(), [1, 0, 2]), tmp_path / "out")

    assert [sample["x"].tolist() for sample in samples] == [True, False, True]


@pytest.mark.parametrize("place", ["rows", "rows/data", "rows/*.parquet", "rows/data/*.parquet"])
@pytest.mark.parametrize("log", ["_delta_log/0.json", "metadata/v1.metadata.json", ".hoodie/hoodie.properties"])
def test_table_with_a_log_is_not_read_by_its_files(tmp_path, log, place):
    """Rows that an overwrite had deleted came back."""
    (tmp_path / "rows" / log).parent.mkdir(parents=True)
    (tmp_path / "rows" / log).write_text("{}")
    (tmp_path / "rows" / "data").mkdir()
    for name in ("a", "b", "data/a", "data/b"):
        parquet.write_table(pa.table({"x": [1]}), tmp_path / "rows" / f"{name}.parquet")

    with pytest.raises(SourceError, match="whose log says which of its files count"):
        Materializer("parquet", tmp_path / place, tmp_path / "out")
    if "*" not in place:
        with pytest.raises(SourceError, match="whose log says which of its files count"):
            list(Index.from_table(tmp_path / place))


def test_folder_of_lance_names_what_reads_it(tmp_path):
    """Its files are none that anything else reads."""
    (tmp_path / "rows.lance" / "_versions").mkdir(parents=True)
    (tmp_path / "rows.lance" / "_versions" / "1.manifest").write_bytes(b"")

    with pytest.raises(SourceError, match=r"a table of Lance, .*Materializer\(lance\.dataset\("):
        Materializer(tmp_path / "rows.lance", output=tmp_path / "out")


def test_files_of_one_table_may_differ(tmp_path):
    """In the width of a type, in how text is stored, in columns without values or that are not there."""
    rows = tmp_path / "rows"
    rows.mkdir()
    parquet.write_table(pa.table({"x": pa.array([1], pa.int32()), "y": ["a"], "z": [1]}), rows / "a.parquet")
    parquet.write_table(pa.table({"x": [2**40], "y": pa.array(["b"], pa.large_string())}), rows / "b.parquet")
    table = pa.table({"x": pa.nulls(1), "y": pa.array(["c"]).dictionary_encode(), "z": [3]})
    parquet.write_table(table, rows / "c.parquet")
    features = {"x": Nullable(Scalar("int64")), "z": Nullable(Scalar("int64"))}

    with pytest.raises(SourceError, match=r"b\.parquet has no column 'z'.*Nullable"):
        Materializer("parquet", rows, tmp_path / "out")
    samples = stored(rows, tmp_path / "out", features=features)

    assert [tuple(sample[name] for name in "xyz") for sample in samples] == [
        (1, "a", 1),
        (2**40, "b", None),
        (None, "c", 3),
    ]


@pytest.mark.parametrize("form", [list, iter])
@pytest.mark.parametrize("missing", [0, 1])
def test_sample_may_lack_a_field_that_is_declared_nullable(tmp_path, form, missing):
    """The first as any other."""
    rows = [{"a": number} | ({} if number == missing else {"b": number}) for number in range(3)]

    samples = stored(form(rows), tmp_path / "out", features={"b": Nullable(Scalar("int64"))})

    assert [sample["b"] for sample in samples] == [None if number == missing else number for number in range(3)]


def test_lists_of_a_tfrecord_are_taken_as_declared(tmp_path):
    """Of no, one and three texts, as the Object Detection API writes them; each was refused that was not one."""
    kinds = {"names": "bytes_list"}
    (tmp_path / "rows.tfrecord").write_bytes(tfrecord([{"names": [b"car"] * count} for count in (1, 0, 3)], kinds))

    samples = stored(tmp_path / "rows.tfrecord", tmp_path / "out", features={"names": ListOf(Text())})

    assert [sample["names"] for sample in samples] == [["car"], [], ["car"] * 3]
