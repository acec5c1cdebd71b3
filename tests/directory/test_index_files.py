"""The index beside the shards: rows as the run used them, with size and digest of their files."""

import pytest
import small_pairs
import xxhash

from datamat import CorruptDataError, DatasetWriter, Features, IndexRow, Scalar
from datamat.directory.index_files import column_of_field, field_of_column, read_index


class Odd(DatasetWriter):
    """Has fields whose names the index uses for itself."""

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
    """This holds for any name; files have size and digest beside them, and no time."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / f"f{number}").write_bytes(b"x" * number)

    small_pairs.job(source, tmp_path / "out", Odd()).run(progress=False)

    table = read_index(tmp_path / "out", "_index/train.index")
    rows = sorted(table.to_pylist(), key=lambda row: row["key"])
    assert [row["key"] for row in rows] == ["r0", "r1", "r2"]
    assert [(row["file"], row["file:size"], row["file:digest"]) for row in rows] == [
        (f"f{number}", number, xxhash.xxh3_128_digest(b"x" * number)) for number in range(3)
    ]
    fields = {field_of_column(name): name for name in table.column_names}
    for name in ("key", "record", "a:size", "field_key", "plain"):
        assert rows[2][fields[name]] == f"{name}2"


@pytest.mark.parametrize(
    "name", ["image", "key", "shard", "record", "field_key", "field_", "a:size", "a:digest", "a:b"]
)
def test_column_names_lead_back_to_their_fields(name):
    """No two fields share a column."""
    assert field_of_column(column_of_field(name)) == name


def test_index_file_that_cannot_be_read_is_named(tmp_path):
    """It is missing, or no Parquet."""
    (tmp_path / "x.parquet").write_bytes(b"no")

    for path, message in ((tmp_path / "y.parquet", "No such file"), (tmp_path / "x.parquet", "arquet")):
        with pytest.raises(CorruptDataError, match=rf"index file {path}: .*{message}"):
            read_index(path.parent, path.name)


def test_readers_of_tables_do_not_take_the_index_for_data(tmp_path):
    """Neither its name nor its content puts it among the Parquet files of a directory."""
    import pyarrow.dataset

    source = small_pairs.make_pairs(tmp_path / "source", 3, 1)
    for name in ("tfrecord", "parquet"):
        output = tmp_path / name
        small_pairs.job(source, output, format=name).run(progress=False)
        shards = {path.name for path in output.glob("*.parquet")}

        assert {path.name for path in output.rglob("*.parquet")} == shards
        table = pyarrow.dataset.dataset(output, format="parquet", exclude_invalid_files=True).to_table()
        assert table.num_rows == (4 if name == "parquet" else 0) and "shard" not in table.column_names


def test_index_of_a_removed_split_is_removed(tmp_path):
    """No other file in the folder is."""
    source = small_pairs.make_pairs(tmp_path / "source", 3, 1)
    job = small_pairs.job(source, tmp_path / "out")
    job.run(progress=False)
    (tmp_path / "out" / "_index" / "mine.txt").write_text("mine")
    (source / "val.txt").unlink()

    job.run(progress=False, existing="replace")

    left = sorted(path.name for path in (tmp_path / "out" / "_index").iterdir())
    assert left == ["mine.txt", "train.index", "train.keys"]
