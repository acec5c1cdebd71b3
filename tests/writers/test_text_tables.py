"""CSV and JSON Lines: types of whole columns, what is declared, encodings, delimiters, cells that are missing."""

import datetime
import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from datamat import (
    ClassLabel,
    Features,
    ImportWriter,
    Index,
    InputError,
    Json,
    ListOf,
    Materializer,
    Nullable,
    OptionError,
    SampleError,
    Scalar,
    SchemaError,
    SourceError,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    load,
)
from datamat.testing import InlineExecutor
from datamat.writers import TableWriter

INT, FLOAT, TRUTH = Scalar("int64"), Scalar("float64"), Scalar("bool")


@pytest.fixture
def table(tmp_path):
    """Return what a directory holds that a table was made into: features and values by column, in order."""

    def made(content, name="rows.csv", **options):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        writer = TableWriter(**options)
        Materializer(writer, path, tmp_path / "out").run(executor=InlineExecutor(), progress=False)
        found = load(tmp_path / "out")
        rows = [found[key] for key in sorted(found.keys())]
        names = [name for name in found.features if name != "key"]
        return {name: found.features[name] for name in names}, {name: [row[name] for row in rows] for name in names}

    return made


OF_CELLS = [
    (["1", "-20", "0"], INT, [1, -20, 0]),
    (["19.90", "0.5", "-.5", "7"], FLOAT, [19.9, 0.5, -0.5, 7.0]),
    (["1e-05", "1.5e3", "2"], FLOAT, [1e-05, 1500.0, 2.0]),
    (["1.5", "inf"], FLOAT, [1.5, np.inf]),
    (["true", "FALSE"], TRUTH, [True, False]),
    (["2026-01-31"], Timestamp(), [np.datetime64("2026-01-31", "us")]),
    (["2026-01-31 10:00:01.5"], Timestamp(), [np.datetime64("2026-01-31T10:00:01.500000")]),
    (["2026-01-31T10:00:00+09:00"], Timestamp("UTC"), [np.datetime64("2026-01-31T01:00:00", "us")]),
    (["1", ""], Nullable(INT), [1, None]),
    (["", "0.5"], Nullable(FLOAT), [None, 0.5]),
    (["true", '""'], Nullable(TRUTH), [True, None]),
    (["2026-01-31", ""], Nullable(Timestamp()), [np.datetime64("2026-01-31", "us"), None]),
    *(
        (cells, Text(), cells)
        for cells in (
            ["01012345678", "1"],
            ["1", "007"],
            ["-01"],
            ["+8210", "1"],
            ["0x10", "1"],
            ["1e5", "1"],
            ["2E10", "0.5"],
            ["9223372036854775808", "1"],
            ["-9223372036854775809"],
            ["9007199254740993", "0.5"],
            ["NA", "1"],
            ["n/a", "null", "None"],
            ["nan", "nan"],
            ["yes", "no"],
            ["1;5", "2"],
            ["10:00:00"],
            ["2026-01-31", "31.01.2026"],
            ["2026-01-31T10:00:00", "2026-01-31T10:00:00Z"],
            ["2026-01-31T10:00:00.123456789"],
            ["", "x"],
            ["", ""],
            [" 7"],
        )
    ),
]
"""Cells of a column, its feature, and their values."""


def _filled(cells):
    """Return four cells, the last one as often as needed."""
    return [*cells, *cells[-1:] * (4 - len(cells))]


def test_column_of_csv_has_the_type_of_all_its_cells(table):
    """What would be written differently, were it a number, stays text."""
    names = [f"c{number:02d}" for number in range(len(OF_CELLS))]
    rows = zip(*(_filled(cells) for cells, _, _ in OF_CELLS), strict=True)

    features, found = table("\n".join(map(",".join, [names, *rows])))

    for name, (cells, feature, values) in zip(names, OF_CELLS, strict=True):
        assert (cells, features[name], found[name]) == (cells, feature, _filled(values))


LATE = {"a": (1, 0.5), "b": (1, None), "c": (1, "x"), "d": (True, None), "e": ("1", "007")}


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_last_row_decides_on_types_as_much_as_the_first(tmp_path, name):
    """It lies further behind than a parser looks ahead."""
    columns = {field: pair for field, pair in LATE.items() if name == "rows.csv" or field != "c"}
    first, last = ({field: pair[place] for field, pair in columns.items()} for place in (0, 1))
    many = [first] * 70_000
    if name == "rows.csv":
        cells = (",".join("" if value is None else str(value) for value in row.values()) for row in [*many, last])
        (tmp_path / name).write_text("\n".join([",".join(columns), *cells]))
    else:
        last = {field: value for field, value in last.items() if value is not None}
        (tmp_path / name).write_text("\n".join(map(json.dumps, [*many, last])))
    writer = TableWriter()

    writer.bind(tmp_path / name)
    (*_, row) = writer.index(tmp_path / name)

    wanted = {"a": FLOAT, "b": Nullable(INT), "c": Text(), "d": Nullable(TRUTH), "e": Text()}
    assert writer.features == Features({field: wanted[field] for field in columns})
    assert row.fields == {field: pair[1] for field, pair in columns.items()}


def test_nan_is_a_number_among_numbers(table):
    features, found = table("x\nnan\n1.5\n")

    assert features["x"] == FLOAT and np.isnan(found["x"][0])


DECLARED = [
    ("00501", Text(), "00501"),
    ("2026-01-31", Text(), "2026-01-31"),
    ("007", INT, 7),
    ("3.0", Scalar("int8"), 3),
    ("1e5", Scalar("float32"), 1e5),
    ("18446744073709551615", Scalar("uint64"), 2**64 - 1),
    ("1", TRUTH, True),
    ("False", TRUTH, False),
    ("2026-01-31", Timestamp(), np.datetime64("2026-01-31", "us")),
    ("2026-01-31T00:00Z", Nullable(Timestamp("UTC")), np.datetime64("2026-01-31", "us")),
    ("2", ClassLabel(("a", "b", "c")), 2),
    ("2", ClassLabel(("3", "2")), 1),
    ("", Text(), ""),
    ("", Nullable(Text()), None),
    ("", Nullable(INT), None),
]


def test_declared_feature_reads_the_cells(table):
    """It decides, not what they look like."""
    names = [f"c{number:02d}" for number in range(len(DECLARED))]
    declared = {name: feature for name, (_, feature, _) in zip(names, DECLARED, strict=True)}

    features, found = table("\n".join(map(",".join, [names, [cell for cell, _, _ in DECLARED]])), features=declared)

    assert features == declared
    assert found == {name: [value] for name, (_, _, value) in zip(names, DECLARED, strict=True)}


@pytest.mark.parametrize(
    ("cell", "feature"), [("", INT), ("zz", INT), ("3.5", INT), ("300", Scalar("uint8")), ("31.1.26", Timestamp())]
)
def test_cell_that_is_none_of_its_feature_fails_its_row(tmp_path, cell, feature):
    (tmp_path / "rows.csv").write_text(f"x,y\n2026-01-31,1\n{cell},1\n")
    writer = TableWriter(features={"x": Nullable(feature) if cell else feature, "y": INT})
    writer.bind(tmp_path / "rows.csv")
    (_, row) = writer.index(tmp_path / "rows.csv")

    with pytest.raises((InputError, SchemaError)):
        writer.features.encode({**writer.read(row), "key": row.key})


def test_files_of_a_table_have_the_types_of_all(tmp_path):
    (tmp_path / "rows").mkdir()
    for number, cell in enumerate(["1", "0.5", ""]):
        (tmp_path / "rows" / f"{number}.csv").write_text(f"x,y\n{cell},1\n")

    Materializer("table", tmp_path / "rows", tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    assert [load(tmp_path / "out")[f"{number:08d}"]["x"] for number in range(3)] == [1.0, 0.5, None]


MAYBE = Nullable(INT)
OF_FILES = [
    (None, [2], MAYBE, [None, 2]),
    (pa.nulls(1), [2], MAYBE, [None, 2]),
    (pa.array([1], pa.int32()), [2], INT, [1, 2]),
    (pa.array([1], pa.uint8()), [0.5], FLOAT, [1.0, 0.5]),
    (["a"], pa.array(["b"], pa.large_string()), Text(), ["a", "b"]),
    (pa.array(["a"]).dictionary_encode(), ["b"], Text(), ["a", "b"]),
    (pa.array(["a"], pa.string_view()), pa.array(["b"]).dictionary_encode(), Text(), ["a", "b"]),
    ([[1]], pa.array([[2, 3]], pa.list_(pa.int8())), ListOf(INT), [[1], [2, 3]]),
    (["7"], [2], INT, [7, 2]),
    ([True], ["x"], Text(), ["true", "x"]),
]
"""A column in the first file of a table, in its second, its feature, and the values."""


@pytest.mark.parametrize(("one", "other", "feature", "values"), OF_FILES, ids=range(len(OF_FILES)))
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("kind", [TableWriter, ImportWriter])
def test_declared_column_is_cast_where_the_files_of_a_table_differ(
    tmp_path, one, other, feature, values, in_order, kind
):
    (tmp_path / "rows").mkdir()
    for number, column in enumerate([one, other] if in_order else [other, one]):
        table = pa.table({"n": [number], **({} if column is None else {"y": column})})
        parquet.write_table(table, tmp_path / "rows" / f"{number}.parquet")
    writer = kind(features={"n": INT, "y": feature})

    Materializer(writer, tmp_path / "rows", tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    found = {int(row["n"]): row["y"] for row in load(tmp_path / "out")}
    read = [list(value) if isinstance(value, (list, np.ndarray)) else value for value in (found[0], found[1])]
    assert read == (values if in_order else values[::-1])


def test_json_is_read_from_the_cells_that_declare_it(tmp_path):
    """A cell that holds none fails its row, and says what to write; an empty one is missing."""
    (tmp_path / "rows.csv").write_text('n,meta\n0,"{""a"": [1, null]}"\n1,"""text"""\n2,\n3,7\n4,no\n')
    writer = TableWriter(features={"n": INT, "meta": Nullable(Json())})
    writer.bind(tmp_path / "rows.csv")
    *rows, last = writer.index(tmp_path / "rows.csv")

    assert [writer.read(row)["meta"] for row in rows] == [{"a": [1, None]}, "text", None, 7]
    with pytest.raises(InputError, match=r"column 'meta' holds 'no', which is not valid JSON.*'meta': Text\(\)"):
        writer.read(last)


def test_folders_of_parquet_name_columns(tmp_path):
    """As Hive, Spark and `pyarrow.dataset` lay tables out, one folder or several."""
    for year in (2025, 2026):
        (tmp_path / f"rows/year={year}").mkdir(parents=True)
        parquet.write_table(pa.table({"x": [year % 100]}), tmp_path / f"rows/year={year}/a.parquet")
        found = [row.fields for row in Index.from_table(tmp_path / "rows")]
        assert found == [{"x": each % 100, "year": each} for each in range(2025, year + 1)]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_files_of_a_table_may_lack_a_declared_column(tmp_path, suffix):
    """One that nobody declares is named, with the file that lacks it; lines of JSON may always lack it."""
    (tmp_path / "rows").mkdir()
    for number, row in enumerate([{"x": 1, "y": 2}, {"x": 3}]):
        path = tmp_path / "rows" / f"{number}{suffix}"
        if suffix == ".parquet":
            parquet.write_table(pa.table({name: [value] for name, value in row.items()}), path)
        else:
            csv = f"{','.join(row)}\n{','.join(map(str, row.values()))}\n"
            path.write_text(csv if suffix == ".csv" else json.dumps(row))
    writer = TableWriter(features={"x": INT, "y": Nullable(INT)})

    writer.bind(tmp_path / "rows")

    assert [writer.read(row)["y"] for row in writer.index(tmp_path / "rows")] == [2, None]
    with pytest.raises(SourceError, match="no column 'z'"):
        TableWriter(features={"x": INT, "z": INT}).bind(tmp_path / "rows")
    if suffix == ".jsonl":
        return
    with pytest.raises(SourceError, match=r"1\.(csv|parquet) has no column 'y', which .*0\.(csv|parquet) has; declare"):
        Materializer(TableWriter(), tmp_path / "rows", tmp_path / "out").plan()


@pytest.mark.parametrize(
    ("encoding", "options"),
    [
        ("utf-8-sig", {}),
        ("utf-16", {}),
        ("cp949", {"encoding": "cp949"}),
        ("utf-16-le", {"encoding": "utf-16-le"}),
    ],
)
@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.jsonl"])
def test_text_is_decoded(tmp_path, encoding, options, name):
    """UTF-8 and UTF-16 say what they are."""
    text = '{"이름": "홍길동", "y": 1}\n' if name == "rows.jsonl" else "이름,y\n홍길동,1\n"
    (tmp_path / name).write_bytes(text.replace(",", "\t" if "tsv" in name else ",").encode(encoding))

    (row,) = Index.from_table(tmp_path / name, **options)

    assert row.fields == {"이름": "홍길동", "y": 1}


@pytest.mark.parametrize(
    ("text", "name"),
    [("이름,y\n홍길동,1\n", "rows.csv"), ("x,y\n홍길동,1\n", "rows.csv"), ('{"x": "홍길동"}\n', "rows.jsonl")],
)
@pytest.mark.parametrize("encoding", ["cp949", "utf-16-le"])
def test_encoding_that_cannot_be_known_is_asked_for(tmp_path, text, name, encoding):
    (tmp_path / name).write_bytes(text.encode(encoding))

    with pytest.raises(SourceError, match=f"{name} .*encoding=") as raised:
        TableWriter().bind(tmp_path / name)

    assert not isinstance(raised.value, UnicodeError)


@pytest.mark.parametrize(
    ("text", "options", "columns"),
    [
        ("a;b\n1;x,y\n2;z\n", {}, {"a": [1, 2], "b": ["x,y", "z"]}),
        ("a\tb\n1\tx\n", {}, {"a": [1], "b": ["x"]}),
        ("a|b\n1|x\n", {}, {"a": [1], "b": ["x"]}),
        ('a;b\n1;"x;y"\n', {}, {"a": [1], "b": ["x;y"]}),
        ("a,b\n1;2,x\n", {}, {"a": ["1;2"], "b": ["x"]}),
        ("a\nx; y\nz\n", {}, {"a": ["x; y", "z"]}),
        ("a:b\n1:x\n", {"delimiter": ":"}, {"a": [1], "b": ["x"]}),
        ("a;b\n1;x\n", {"delimiter": ","}, {"a;b": ["1;x"]}),
        ("a;b\n1,5;2\n", {}, {"a": ["1,5"], "b": [2]}),
        ("sep=;\na;b\n1;x\n", {}, {"a": [1], "b": ["x"]}),
        ('\ufeff"SEP=|"\r\na|b\r\n1|x,y\r\n', {}, {"a": [1], "b": ["x,y"]}),
        ("sep=;\na\n1\n", {}, {"a": [1]}),
        ("sep=;\na|b\n1|x\n", {"delimiter": "|"}, {"a": [1], "b": ["x"]}),
    ],
)
def test_delimiter_is_found_where_it_is_certain(tmp_path, text, options, columns):
    (tmp_path / "rows.csv").write_text(text)

    rows = [row.fields for row in Index.from_table(tmp_path / "rows.csv", **options)]

    assert {name: [row[name] for row in rows] for name in rows[0]} == columns


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a;b|c\n1;2|3\n", "a semicolon or at a bar"),
        ("a;b\tc\n1;2\n1\t2\t3\n", "a semicolon or at a tab"),
        ("a;b\nx\ny\n", "a comma or at a semicolon"),
        ("a;b;c\n1;2;3\n1;2\n", r"Row #3: Expected 3 columns, got 2"),
        ("a;b\n1,5;2;3\n", r"Row #2: Expected 2 columns, got 3"),
        ("a\tb\n1\n1\t2\n", r"Row #2: Expected 2 columns, got 1"),
        ("a,b\n1,2\n1,2,3\n", r"Row #3: Expected 2 columns, got 3"),
    ],
)
def test_delimiter_that_is_not_certain_is_asked_for(tmp_path, text, message):
    """Rows of different lengths are never one column."""
    (tmp_path / "rows.csv").write_text(text)

    with pytest.raises(SourceError, match=f"{message}.*delimiter="):
        TableWriter().bind(tmp_path / "rows.csv")


OTHER_FILES = [
    (b"a,b\n1,x\0y\n", "byte 7 is NUL"),
    (b"a,b\n" + b"1,x\n" * 70_000 + b"1,\0\n", "column 'b' is NUL"),
    ("a,b\n1,이름\n".encode("utf-16-le"), "encoding='utf-16-le'"),
    ("a,b\n1,이름\n".encode("utf-16-be"), "encoding='utf-16-be'"),
    (b"PK\x03\x04\x14\0\0\0", r"pandas.read_excel\("),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", r"pandas.read_excel\("),
    (b"PAR1\x15\0", "a Parquet file; call it .parquet"),
    (b"\xfd7zXZ\0\0", "unxz"),
    (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    (b"\n<!DOCTYPE html>\n<html>", "a web page"),
    (gzip.compress(b"a,b\n" * 1000)[:40], "Truncated compressed stream; write the file again"),
    (b"a,b,a\n1,2,3\n", "column 1 of 3 is called 'a', as another is"),
    (b",a\n0,1\n", r"column 1 of 2 has no name.*to_csv\(index=False\)"),
]


@pytest.mark.parametrize(("content", "message"), OTHER_FILES, ids=[message for _, message in OTHER_FILES])
def test_file_that_is_no_table_of_its_name_is_told_by_what_it_is(tmp_path, content, message):
    (tmp_path / "rows.csv").write_bytes(content)

    with pytest.raises(SourceError, match=f"rows.csv.*{message}"):
        TableWriter().bind(tmp_path / "rows.csv")


@pytest.mark.parametrize("name", ["rows.xlsx", "rows.parquet", "rows.jsonl"])
def test_workbook_is_told_whatever_it_is_called(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK\x03\x04\x14\0\0\0")

    with pytest.raises(SourceError, match=r"an Excel workbook.*pandas.read_excel\("):
        TableWriter().bind(tmp_path / name)


@pytest.mark.parametrize("text", ["a,x,a\n1,2,3\n", ",x\n1,2\n", "x,\n2,\n"])
def test_name_of_a_column_that_nobody_reads_does_not_matter(table, text):
    assert table(text, features={"x": INT})[1] == {"x": [2]}


PLAIN = {
    ".csv": b"a,b\n1,2\n",
    ".tsv": b"a\tb\n1\t2\n",
    ".jsonl": b'{"a": 1, "b": 2}\n',
    ".ndjson": b'{"a": 1, "b": 2}\n',
}


@pytest.mark.parametrize(
    "suffix", [".CSV", ".Tsv", ".JSONL", ".ndjson", ".CSV.GZ", ".csv", ".csv.gz", ".PARQUET", ".pq"]
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_kind_of_a_table_does_not_depend_on_how_its_name_is_spelt(tmp_path, suffix, is_packed):
    """Nor how it is packed on its name; alone, and in a folder."""
    content = PLAIN.get(f".{suffix.lower().split('.')[1]}")
    if content is None:
        parquet.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / f"rows{suffix}")
    else:
        (tmp_path / f"rows{suffix}").write_bytes(gzip.compress(content) if is_packed else content)

    for place in (tmp_path / f"rows{suffix}", tmp_path):
        assert [row.fields for row in Index.from_table(place)] == [{"a": 1, "b": 2}]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("which", ["key", "split"])
def test_column_of_keys_or_splits_is_a_field_where_it_is_declared(tmp_path, name, which):
    rows = {"id": ["7", "8"], "x": [1, 2]}
    if name == "rows.csv":
        (tmp_path / name).write_text("id,x\n7,1\n8,2\n")
    elif name == "rows.jsonl":
        (tmp_path / name).write_text('{"id": "7", "x": 1}\n{"id": "8", "x": 2}\n')
    else:
        parquet.write_table(pa.table(rows), tmp_path / name)
    writer = TableWriter(**{which: "id"}, features={"id": INT, "x": INT})

    writer.bind(tmp_path / name)

    read = [(getattr(row, which), writer.read(row)) for row in writer.index(tmp_path / name)]
    assert read == [("7", {"id": 7, "x": 1}), ("8", {"id": 8, "x": 2})]


@pytest.mark.parametrize("options", [{"encoding": "klingon"}, {"delimiter": ";;"}, {"delimiter": 7}])
def test_option_that_is_none_is_refused(options):
    for make in (TableWriter, lambda **options: Index.from_table("rows.csv", **options)):
        with pytest.raises(OptionError, match=next(iter(options))):
            make(**options)


def test_rows_of_an_index_have_the_same_types(tmp_path):
    """Times stay as they are written."""
    (tmp_path / "rows.csv").write_bytes("key;n;zip;day;é\na;1;007;2026-01-31;\nb;;8;2026-02-01;x\n".encode("cp1252"))

    rows = [(row.key, dict(row.fields)) for row in Index.from_table(tmp_path / "rows.csv", encoding="cp1252")]

    assert rows == [
        ("a", {"n": 1, "zip": "007", "day": "2026-01-31", "é": ""}),
        ("b", {"n": None, "zip": "8", "day": "2026-02-01", "é": "x"}),
    ]


OF_LINES = [
    (["1", "0.5"], FLOAT, [1.0, 0.5]),
    (['"007"', '"2026-01-31"'], Text(), ["007", "2026-01-31"]),
    (["true", "null"], Nullable(TRUTH), [True, None]),
    (["", "1"], Nullable(INT), [None, 1]),
    (["9223372036854775808", "9223372036854775809"], Json(), [2**63, 2**63 + 1]),
    (["9007199254740993", "0.5"], Json(), [2**53 + 1, 0.5]),
    (['["a"]', "[]"], ListOf(Text()), [["a"], []]),
    (['{"a": [1, "x"]}', "null"], Json(), [{"a": [1, "x"]}, None]),
    (["1", '"x"'], Json(), [1, "x"]),
    (['"1"', '{"a": true}'], Json(), ["1", {"a": True}]),
    (["false", "[1]"], Json(), [False, [1]]),
    (["1", "true"], Json(), [1, True]),
]
"""Values in lines, "" where a line lacks it, their feature, and what they are."""


def test_column_of_json_lines_has_the_type_of_all_its_values(table):
    """Text is never a number or a time."""
    names = [f"c{number}" for number in range(len(OF_LINES))]
    rows = zip(*(values for values, _, _ in OF_LINES), strict=True)
    lines = [", ".join(f'"{name}": {value}' for name, value in zip(names, row, strict=True) if value) for row in rows]

    features, found = table("".join(f"{{{line}}}\n" for line in lines), "rows.jsonl")

    for name, (values, feature, wanted) in zip(names, OF_LINES, strict=True):
        assert (values, features[name], found[name]) == (values, feature, wanted)


def test_lists_of_json_lines_are_arrays(table):
    features, found = table('{"x": [1]}\n{"x": [0.5, 2]}\n{"x": []}\n', "rows.jsonl")

    assert features["x"] == Tensor((None,), "float64")
    assert [value.tolist() for value in found["x"]] == [[1.0], [0.5, 2.0], []]


def test_times_and_truths_of_a_table_in_memory_are_stored(tmp_path):
    columns = {"day": [datetime.date(2026, 1, 31)], "at": [datetime.datetime(2026, 1, 31, 10, 0, 0, 5)], "ok": [True]}
    columns["ns"] = pa.array(columns["at"], pa.timestamp("ns", "Asia/Seoul"))  # as pandas has them
    for number, features in enumerate([None, {"day": Timestamp(), "at": Timestamp(), "ok": TRUTH}]):
        writer = TableWriter(features=features)
        Materializer(writer, pa.table(columns), tmp_path / f"{number}").run(executor=InlineExecutor(), progress=False)

        (found,) = load(tmp_path / f"{number}")
        assert found["day"] == np.datetime64("2026-01-31", "us") and found["ok"]
        assert found["at"] == np.datetime64("2026-01-31T10:00:00.000005")
        assert features or (load(tmp_path / "0").features["ns"], found["ns"]) == (Timestamp("UTC"), found["at"])


@pytest.mark.parametrize(
    "values", ["[1, null]", "[9223372036854775808]", "[1.5, 9007199254740993]", '["x", 1]', "null"]
)
def test_lists_and_nulls_that_no_array_holds_stay_json(table, values):
    features, found = table(f'{{"n": 1, "x": {values}}}\n', "rows.jsonl")

    assert features["x"] == Json()
    assert found["x"] == [json.loads(values)]


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        ("[70000, 1]", Tokens("uint16")),
        ("[-1, 1]", Tensor((2,), "uint8")),
        ("[300]", ListOf(Scalar("int8"))),
        ("[2, 0]", Tensor((2,), "bool")),
        ("[70000, 1]", Tensor((2,), "float16")),
    ],
    ids=str,
)
def test_list_that_its_feature_cannot_hold_fails_its_row(table, values, feature):
    """None of its numbers is stored as another."""
    with pytest.raises(SampleError, match="field 'x' is declared"):
        table(f'{{"x": {values}}}\n', "rows.jsonl", features={"x": feature})


MIXED = '{"x": 1}\n{"x": "2"}\n{"x": {"a": [1, "b"]}}\n{"x": null}\n'


@pytest.mark.parametrize("feature", [Json(), Nullable(Json())])
def test_json_holds_values_of_any_kinds(table, feature):
    assert table(MIXED, "rows.jsonl", features={"x": feature})[1]["x"] == [1, "2", {"a": [1, "b"]}, None]


@pytest.mark.parametrize(
    ("feature", "failing"),
    [(Text(), "023"), (Nullable(Text()), "02"), (Scalar("float64"), "23"), (ClassLabel(("1", "2", "3")), "23")],
    ids=str,
)
def test_row_whose_value_is_of_another_kind_than_its_feature_fails_alone(tmp_path, feature, failing):
    """Text takes what is a string in JSON, and nothing else."""
    (tmp_path / "rows.jsonl").write_text(MIXED)
    options = {"errors": "skip", "executor": InlineExecutor(), "progress": False}

    report = Materializer(TableWriter(features={"x": feature}), tmp_path / "rows.jsonl", tmp_path / "out").run(
        **options
    )

    assert "".join(sorted(failure.key[-1] for failure in report.failures)) == failing


def test_column_of_numbers_is_no_text(table):
    with pytest.raises(SampleError, match="declared str but the sample holds int"):
        table('{"x": 1}\n', "rows.jsonl", features={"x": Text()})


def test_quote_that_is_never_closed_takes_in_no_rows(table):
    """A quote within a cell, and a cell of several lines at the end, are fine."""
    with pytest.raises(SourceError, match="never closed, so that 3 lines would be one cell"):
        table('a,b\n1,"x\n2,y\n3,z\n')

    assert table('a,b\n1,5" pipe\n2,"y\nz"\n')[1]["b"] == ['5" pipe', "y\nz"]


def test_half_a_character_is_refused_with_its_line(table):
    with pytest.raises(SourceError, match=r"rows.jsonl line 2 holds half of a surrogate pair"):
        table('{"x": "\\ud83d\\ude00"}\n{"x": "\\ud800"}\n', "rows.jsonl")


def test_csv_and_json_lines_are_two_tables(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n')

    with pytest.raises(SourceError, match=r"a.csv is CSV and .*b.jsonl JSON Lines"):
        Materializer(TableWriter(), tmp_path / "*", tmp_path / "out").plan()
