"""Rows from folders, lists, tables and iterables."""

import pathlib
import unicodedata
from pathlib import PurePosixPath as P

import pytest

from datamat import Materializer
from datamat.errors import OptionError, SourceError
from datamat.sources.rows import IndexRow
from datamat.writers.index import Index, pair_files


def _touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def test_folder_gives_sorted_rows_with_flat_keys(tmp_path):
    """Keys are paths without suffix, `/` as `-`; hidden files and other suffixes are left out."""
    _touch(tmp_path, "b/2.png", "a/1.PNG", "a/.hidden.png", "notes.txt", ".git/x.png")

    rows = list(Index.from_folder(tmp_path, suffixes=(".png",)))

    assert [row.key for row in rows] == ["a-1", "b-2"]
    assert rows[0].fields == {"image": "a/1.PNG"}


def test_lists_map_a_prefix_that_is_not_on_this_machine(tmp_path):
    """Paths written on another machine are found by their tail."""
    _touch(tmp_path, "train/1.png", "trainannot/1.png")
    (tmp_path / "train.txt").write_text(
        "# made elsewhere\n\n/SegNet/CamVid/train/1.png /SegNet/CamVid/trainannot/1.png\n"
    )

    rows = list(Index.from_lists(tmp_path, {"train": "train.txt"}))

    assert rows == [IndexRow("1", "train", {"image": "train/1.png", "mask": "trainannot/1.png"}, "train.txt:3")]


@pytest.mark.parametrize(
    ("line", "options", "wanted"),
    [
        ("/data/x/a.png", {"fields": ("image",), "prefix": "/data"}, {"image": "x/a.png"}),
        ("my image.png\tmy mask.png", {}, {"image": "my image.png", "mask": "my mask.png"}),
    ],
)
def test_lists_take_a_prefix_and_names_with_spaces(tmp_path, line, options, wanted):
    """A given prefix is removed, whether or not the file exists; a tab in the line is the separator."""
    (tmp_path / "l.txt").write_text(f"{line}\n")

    (row,) = Index.from_lists(tmp_path, {"val": "l.txt"}, **options)

    assert row.fields == wanted


def test_folder_or_list_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "lists").mkdir()

    with pytest.raises(SourceError, match="nowhere is not a folder"):
        list(Index.from_folder(tmp_path / "nowhere"))
    for name in ("none.txt", "bad.txt", "lists"):
        with pytest.raises(SourceError, match=name):
            list(Index.from_lists(tmp_path, {"train": name}))


def test_list_line_with_another_number_of_paths_names_the_line(tmp_path):
    """One path where two are expected."""
    (tmp_path / "train.txt").write_text("a.png b.png\nc.png\n")

    with pytest.raises(SourceError, match=r"train.txt:2: found 1 paths, want 2 \(image mask\)"):
        list(Index.from_lists(tmp_path, {"train": "train.txt"}))


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".csv.gz", ".tsv.bz2", ".csv.zst", ".csv.lz4"])
def test_table_rows_have_columns_as_fields(tmp_path, suffix):
    """CSV, TSV and Parquet, compressed or not, give the same rows; `key` and `split` are used if present."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    table = pa.table({"key": ["a", "b"], "split": ["train", "val"], "x": [1.5, 2.5], "n": [1, 2]})
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with pa.output_stream(path) as file:  # which compresses as the name says
            csv.write_csv(table, file, csv.WriteOptions(delimiter="\t" if ".tsv" in suffix else ","))

    rows = list(Index.from_table(path))

    assert [(row.key, row.split, dict(row.fields)) for row in rows] == [
        ("a", "train", {"x": 1.5, "n": 1}),
        ("b", "val", {"x": 2.5, "n": 2}),
    ]
    assert rows[1].origin == f"rows{suffix} row 2"


def test_table_errors_name_file_row_and_column(tmp_path):
    """A missing column, an empty cell, an unknown kind of file."""
    (tmp_path / "r.csv").write_text("x,y\n1,2\n3,\n")

    with pytest.raises(SourceError, match="'id'"):
        list(Index.from_table(tmp_path / "r.csv", key="id"))
    with pytest.raises(SourceError, match=r"the table row 2, column 'y': found None"):
        list(Index.from_table({"x": [1, 3], "y": [2, None]}))
    with pytest.raises(SourceError, match="found no table"):
        list(Index.from_table(tmp_path / "r.xlsx"))
    (tmp_path / "r.parquet").write_bytes(b"PAR1, and no more")
    with pytest.raises(SourceError, match=r"r.parquet"):
        list(Index.from_table(tmp_path / "r.parquet"))


def test_rows_from_an_iterable_can_be_iterated_twice():
    """Keys, tuples and rows are all accepted; a generator's rows are kept."""
    index = Index.from_rows(iter(["a", ("b", "val", {"n": 1}), IndexRow("c")]))

    assert [row.key for row in index] == [row.key for row in index] == ["a", "b", "c"]
    with pytest.raises(SourceError, match="row 0 is a int"):
        Index.from_rows([3])


def test_pairs_name_what_has_no_partner():
    """An annotation without image and an image without annotation."""
    assert pair_files([P("i/1.png")], [P("m/1.png")]) == [(P("i/1.png"), P("m/1.png"))]
    with pytest.raises(SourceError, match=r"i/2.png: image without annotation; m/3.png: annotation without image"):
        pair_files([P("i/2.png")], [P("m/3.png")])
    with pytest.raises(SourceError, match="both annotate '1'"):
        pair_files([P("i/1.png")], [P("m/1.png"), P("n/1.png")])


# ---- files and the table beside them


@pytest.fixture
def audio(tmp_path):
    """Six files in two folders, and a table that names them by path, by name, and without suffix."""
    folder = tmp_path / "audio"
    for name in ("a/c1", "a/0002", "a/c3", "b/d1", "b/d2", "b/d3"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.wav").write_text(name)
    lines = ["file,label", "a/c1.wav,x", "0002,y", "c3.wav,x", "b/d1,y", f"{folder / 'b' / 'd2.wav'},x", "./b/d3.wav,y"]
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_join_gives_each_row_its_file(audio):
    """The table itself is no file of it; keys come from the files, fields from the table; paths can be opened."""
    rows = list(Index.join(audio, audio / "labels.csv", on="file"))

    assert [row.key for row in rows] == ["a-c1", "a-0002", "a-c3", "b-d1", "b-d2", "b-d3"]
    assert [pathlib.Path(row.fields["file"]).read_text().replace("/", "-") for row in rows] == [row.key for row in rows]
    assert [row.fields["label"] for row in rows] == list("xyxyxy")
    below = Index.join(audio, audio / "labels.csv", on="file", root=audio.parent)
    assert next(iter(below)).fields["file"] == "audio/a/c1.wav"


def test_join_takes_keys_and_splits_of_the_table(audio):
    """A table in memory does as well; a folder of several suffixes is narrowed by them."""
    (audio / "notes.txt").write_text("")
    table = {"key": ["1", "2"], "split": ["train", "val"], "file": ["c1", "d1"]}

    rows = list(Index.join(audio, table, on="file", how="rows", suffixes=[".wav"]))

    assert [(row.key, row.split) for row in rows] == [("1", "train"), ("2", "val")]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exact", r"'nine.wav' \(labels.csv row 7\); 2 of 8 files have no row: a/e0.wav, a/e1.wav"),
        ("rows", r"1 of 7 rows have no file: 'nine.wav' \(labels.csv row 7\)"),
        ("files", "2 of 8 files have no row: a/e0.wav, a/e1.wav"),
    ],
)
def test_join_names_what_has_no_partner(audio, how, message):
    """It says how many, and the first of them; what need not have one is left out."""
    for number in range(2):
        (audio / "a" / f"e{number}.wav").write_text("")
    with open(audio / "labels.csv", "a") as file:
        file.write("nine.wav,x\n")

    with pytest.raises(SourceError, match=message):
        list(Index.join(audio, audio / "labels.csv", on="file", how=how))
    assert len(list(Index.join(audio, audio / "labels.csv", on="file", how="inner"))) == 6


def test_names_are_the_same_however_their_accents_are_stored(tmp_path):
    """A letter and its accent lie apart on a Mac, and are one in tables and elsewhere."""
    apart = unicodedata.normalize("NFD", "가é")
    _touch(tmp_path, f"{apart}.png")

    (row,) = Index.join(tmp_path, {"file": ["가é.png"]}, on="file")

    assert row.fields["file"] == str(tmp_path / f"{apart}.png")
    assert pair_files([P("i/가é.jpg")], [P(f"m/{apart}.png")]) == [(P("i/가é.jpg"), P(f"m/{apart}.png"))]


def test_join_refuses_what_is_ambiguous(audio):
    """A name of two files, one file of two rows, a column that is not there, and a `how` that is none."""
    (audio / "b" / "c1.wav").write_text("")
    for table, message in (
        ({"file": ["c1"]}, "a/c1.wav or b/c1.wav"),
        ({"file": ["d1", "b/d1.wav"]}, "row 1 and .* row 2 both name b/d1.wav"),
        ({"path": ["d1"]}, "no column 'file'"),
    ):
        with pytest.raises(SourceError, match=message):
            list(Index.join(audio, table, on="file", how="rows"))
    with pytest.raises(OptionError, match="how is 'left'"):
        Index.join(audio, {"file": ["d1"]}, on="file", how="left")


def test_files_of_one_name_need_keys_of_their_own(tmp_path):
    """The message names both, and says what to do."""
    for name in ("1.jpg", "1.png"):
        (tmp_path / "source/cat").mkdir(parents=True, exist_ok=True)
        (tmp_path / "source/cat" / name).write_bytes(b"")

    with pytest.raises(SourceError, match=r"'cat-1' at cat/1.jpg and cat/1.png; .*: rename a file, or give"):
        Materializer("image_folder", tmp_path / "source", tmp_path / "out").plan()
