"""Tables: columns become features, by blocks and by rows alike."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from datamat.errors import SchemaError, SourceError
from datamat.features import ClassLabel, Features, Scalar, Text
from datamat.writers.table import TableWriter

CSV = "key,speed,lane,kind,split\n007,13.5,2,car,train\nb.ü,-0.25,3,van,val\n"


@pytest.fixture
def csv(tmp_path):
    """Write a CSV file."""

    def write(text=CSV, name="rows.csv"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def bound(source, **options):
    writer = TableWriter(**options)
    writer.bind(source)
    return writer


def test_columns_become_features(csv):
    """Integers, fractions and text; key and split are not features."""
    assert bound(csv()).features == Features({"speed": Scalar("float64"), "lane": Scalar("int64"), "kind": Text()})


def test_rows_carry_keys_and_splits(csv):
    """They are text: leading zeros stay; where there are no keys, the rows are counted."""
    counted, folds, source = csv("x\n5\n6\n", "1.csv"), csv("key,split,x\n007,0,1\n7,1,2\n", "2.csv"), csv()

    assert [row.key for row in bound(counted).index(counted)] == ["00000000", "00000001"]
    assert [(row.key, row.split) for row in bound(folds).index(folds)] == [("007", "0"), ("7", "1")]

    rows = list(bound(source).index(source))

    assert [(row.key, row.split, row.fields["kind"]) for row in rows] == [
        ("007", "train", "car"),
        ("b.ü", "val", "van"),
    ]
    assert rows[1].origin == "rows.csv row 2"


def test_columns_of_other_names_hold_key_and_split(csv):
    """They are named in the constructor."""
    source = csv("id,fold,x\na,train,1\n")

    writer = bound(source, key="id", split="fold")

    assert sorted(writer.features) == ["key", "x"]
    assert [(row.key, row.split) for row in writer.index(source)] == [("a", "train")]


def test_read_gives_what_features_take(csv):
    """One row at a time."""
    source = csv()
    writer = bound(source)
    (row, _) = writer.index(source)

    sample = writer.read(row)

    assert sample == {"speed": 13.5, "lane": 2, "kind": "car"}
    assert writer.features.encode({**sample, "key": row.key})["lane"].tolist() == [2]


def test_declared_features_choose_columns(csv):
    """Labels by name, a narrower number; other columns are left out."""
    source = csv()
    writer = bound(source, features={"kind": ClassLabel(names=("van", "car")), "lane": Scalar("uint8")})
    (row, _) = writer.index(source)

    assert writer.features.encode({**writer.read(row), "key": row.key})["kind"].tolist() == [1]
    assert writer.read_block(["007"], {"kind": ["car"], "lane": [2]}) is None
    with pytest.raises(SchemaError, match=r"field 'lane' .* 300"):
        writer.features.encode({"kind": "car", "lane": 300, "key": row.key})


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("x\n", {}, r"rows\.csv holds no rows"),
        ("x\n1\n", {"key": "id"}, r"rows\.csv has no column 'id'"),
        ("x\n1\n", {"split": "fold"}, r"rows\.csv has no column 'fold'"),
        ("x\n1\n", {"features": {"y": Scalar("int64")}}, r"rows\.csv has no column 'y'"),
        ("id,key\na,1\n", {"key": "id"}, "column 'key' does not hold the keys"),
        ("x,y\n1,2\n1,2,3\n", {}, r"rows\.csv .*Expected 2 columns, got 3"),
    ],
)
def test_bad_table_is_refused(csv, text, options, message):
    """The message names file, row or column."""
    source = csv(text)

    with pytest.raises(SourceError, match=message):
        list(bound(source, **options).index(source))


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ({"x": []}, {}, "the table holds no rows"),
        ({"id": ["a"], "key": [1]}, {"key": "id"}, "the table: column 'key'"),
        ({"x": [1]}, {"features": {"y": Scalar("int64")}}, "the table has no column 'y'"),
    ],
)
def test_bad_table_in_memory_is_refused(table, options, message):
    """It has no path that would name it."""
    with pytest.raises(SourceError, match=message):
        bound(pa.table(table), **options)


@pytest.mark.parametrize("line", ['{"x": 1', "[1, 2]"])
def test_line_that_is_no_object_is_refused(csv, line):
    """With its number in the file: lines that are blank count, too."""
    with pytest.raises(SourceError, match=r"rows\.jsonl line 3"):
        bound(csv(f'{{"x": 1}}\n\n{line}\n', "rows.jsonl"))


@pytest.mark.parametrize("options", [{}, {"features": {"a": Scalar("int64"), "b": Scalar("float64"), "t": Text()}}])
def test_round_trip_is_exact(tmp_path, materialized, options):
    """Extreme values and odd text come back, in blocks and row by row."""
    values = {"a": [2**63 - 1, -(2**63)], "b": [np.pi, 5e-324], "t": ["", "naïve 🙂"]}
    parquet.write_table(pa.table({"key": ["x", "y"], **values}), tmp_path / "rows.parquet")

    found = materialized(TableWriter(**options), tmp_path / "rows.parquet")["train"]

    for number, key in enumerate(["x", "y"]):
        assert {name: found[key][name] for name in values} == {name: column[number] for name, column in values.items()}
