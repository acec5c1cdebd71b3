"""The index beside the shards: rows as they were used, with size and time of their files."""

from __future__ import annotations

import os

import pytest

from datamat import CorruptDataError, DatasetWriter, Features, IndexRow, Materializer, Scalar, WorkerOptions
from datamat.index_files import column_of_field, field_of_column, read_index_file


class Odd(DatasetWriter):
    """Has fields whose names the index uses itself."""

    name = "odd"
    features = Features({"x": Scalar("int64")})

    def index(self, source):
        names = ("key", "record", "a:size", "field_key", "plain")
        return [
            IndexRow(f"r{number}", fields={"file": f"f{number}", **{name: f"{name}{number}" for name in names}})
            for number in range(3)
        ]

    def read(self, row):
        return {"x": 1}


def test_every_field_has_a_column_of_its_own(tmp_path):
    """Whatever it is called; files have their size and time of change beside them."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / f"f{number}").write_bytes(b"x" * number)
        os.utime(source / f"f{number}", ns=(5, 1000 + number))

    Materializer(Odd(), source, tmp_path / "out", workers=WorkerOptions(num_workers=1)).run(progress=False)

    table = read_index_file(tmp_path / "out" / "index" / "train.parquet")
    rows = sorted(table.to_pylist(), key=lambda row: row["key"])
    assert [row["key"] for row in rows] == ["r0", "r1", "r2"]
    assert [(row["file"], row["file:size"], row["file:mtime_ns"]) for row in rows] == [
        (f"f{number}", number, 1000 + number) for number in range(3)
    ]
    fields = {field_of_column(name): name for name in table.column_names}
    for name in ("key", "record", "a:size", "field_key", "plain"):
        assert rows[2][fields[name]] == f"{name}2"


@pytest.mark.parametrize(
    "name", ["image", "key", "shard", "record", "field_key", "field_", "a:size", "a:mtime_ns", "a:b"]
)
def test_column_names_lead_back_to_their_fields(name):
    """And no two fields to one column."""
    assert field_of_column(column_of_field(name)) == name


def test_index_file_that_cannot_be_read_is_named(tmp_path):
    """Missing, or no Parquet."""
    (tmp_path / "x.parquet").write_bytes(b"no")

    for path, message in ((tmp_path / "y.parquet", "No such file"), (tmp_path / "x.parquet", "arquet")):
        with pytest.raises(CorruptDataError, match=rf"index file {path}: .*{message}"):
            read_index_file(path)
