"""The index beside the shards: rows as the run used them, with size and digest of their files."""

import pathlib

import pyarrow.parquet
import pytest
import small_pairs
import xxhash

from datamat import CorruptDataError, DatasetWriter, Features, IndexRow, Scalar
from datamat.directory.index_files import column_of_field, column_values, field_of_column, read_index


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


class Kinds(DatasetWriter):
    """Has a field of each kind, with nulls and without."""

    name = "kinds"
    features = Features({"x": Scalar("int64")})

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def fields(self, number):
        there = number % 3 > 0
        return {
            "int": number,
            "float": number / 2,
            "text": f"té{number}" * (number % 4),
            "path": pathlib.Path(f"f{number % 2}"),
            "list": [number, "x"],
            "no_int": number if there else None,
            "no_float": number / 2 if there else None,
            "no_bool": number % 2 == 0 if there else None,
            "no_text": f"{number}" if there else None,
            "no_path": pathlib.Path("f1") if there else None,
        }

    def index(self, source):
        return (IndexRow(f"k{number}", fields=self.fields(number)) for number in range(self.num_rows))

    def read_block(self, keys, fields):
        return {"x": fields["int"]}

    def read(self, row):
        return {"x": row["int"]}


@pytest.mark.parametrize("num_rows", [5, 20_000])  # small pages; several groups, and pages that are compressed
def test_index_has_the_values_of_every_field(num_rows, tmp_path):
    """By pyarrow, and by datamat, which gives paths and lists back."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(2):
        (source / f"f{number}").write_bytes(b"x" * number)
    writer = Kinds(num_rows)
    fields = {f"k{number}": writer.fields(number) for number in range(num_rows)}

    small_pairs.job(source, tmp_path / "out", writer).run(progress=False)

    table = read_index(tmp_path / "out", "_index/train.index")
    assert table.num_rows == num_rows
    columns = {name: column_values(table, name) for name in table.column_names}
    for name in writer.fields(0):
        assert columns[name] == [fields[key][name] for key in columns["key"]]
    assert sorted(zip(columns["shard"], columns["record"], strict=True)) == [
        *zip(columns["shard"], columns["record"], strict=True)
    ]
    digests = [xxhash.xxh3_128_digest(b"x" * number) for number in range(2)]
    wanted = [None if path is None else digests[int(path.name[1:])] for path in columns["no_path"]]
    assert columns["no_path:digest"] == wanted
    seen = pyarrow.parquet.read_table(tmp_path / "out" / "_index" / "train.index").to_pydict()
    assert seen == {**columns, **{name: table[name].to_pylist() for name in ("path", "list", "no_path")}}


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
