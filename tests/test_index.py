"""Rows from folders, lists, tables and iterables."""

from pathlib import PurePosixPath as P

import pytest

from datamat.errors import SourceError
from datamat.index import Index, IndexRow, pair_files


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


def test_missing_folder_is_an_error(tmp_path):
    """A source that is no folder is named."""
    with pytest.raises(SourceError, match="nowhere is not a folder"):
        list(Index.from_folder(tmp_path / "nowhere"))


def test_lists_map_a_prefix_that_is_not_on_this_machine(tmp_path):
    """Paths written on another machine are found by their tail."""
    _touch(tmp_path, "train/1.png", "trainannot/1.png")
    (tmp_path / "train.txt").write_text(
        "# made elsewhere\n\n/SegNet/CamVid/train/1.png /SegNet/CamVid/trainannot/1.png\n"
    )

    rows = list(Index.from_lists(tmp_path, {"train": "train.txt"}))

    assert rows == [IndexRow("1", "train", {"image": "train/1.png", "mask": "trainannot/1.png"}, "train.txt:3")]


def test_lists_take_a_prefix_that_is_given(tmp_path):
    """A given prefix is taken off, whether or not the file exists."""
    (tmp_path / "l.txt").write_text("/data/x/a.png\n")

    rows = list(Index.from_lists(tmp_path, {"val": "l.txt"}, fields=("image",), prefix="/data"))

    assert rows[0].fields == {"image": "x/a.png"}


def test_list_line_with_another_number_of_paths_names_the_line(tmp_path):
    """One path where two are wanted."""
    (tmp_path / "train.txt").write_text("a.png b.png\nc.png\n")

    with pytest.raises(SourceError, match=r"train.txt:2: found 1 paths, want 2 \(image mask\)"):
        list(Index.from_lists(tmp_path, {"train": "train.txt"}))


def test_list_file_that_is_missing_or_not_text_is_named(tmp_path):
    """The list itself can be wrong."""
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")

    with pytest.raises(SourceError, match=r"none.txt: No such file"):
        list(Index.from_lists(tmp_path, {"train": "none.txt"}))
    with pytest.raises(SourceError, match=r"bad.txt is not UTF-8"):
        list(Index.from_lists(tmp_path, {"train": "bad.txt"}))


def test_tabs_separate_names_with_spaces(tmp_path):
    """A tab in the line is the separator."""
    (tmp_path / "t.txt").write_text("my image.png\tmy mask.png\n")

    assert next(iter(Index.from_lists(tmp_path, {"train": "t.txt"}))).fields["image"] == "my image.png"


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_table_rows_have_columns_as_fields(tmp_path, suffix):
    """CSV, TSV and Parquet give the same rows; `key` and `split` are taken where they are."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    table = pa.table({"key": ["a", "b"], "split": ["train", "val"], "x": [1.5, 2.5], "n": [1, 2]})
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        csv.write_csv(table, path, csv.WriteOptions(delimiter="\t" if suffix == ".tsv" else ","))

    rows = list(Index.from_table(path))

    assert [(row.key, row.split, dict(row.fields)) for row in rows] == [
        ("a", "train", {"x": 1.5, "n": 1}),
        ("b", "val", {"x": 2.5, "n": 2}),
    ]
    assert rows[1].origin == f"rows{suffix} row 2"


def test_table_without_key_counts_rows(tmp_path):
    """Row numbers are keys of eight digits."""
    (tmp_path / "r.csv").write_text("x\n1\n2\n")

    assert [row.key for row in Index.from_table(tmp_path / "r.csv")] == ["00000000", "00000001"]


def test_table_errors_name_file_row_and_column(tmp_path):
    """A missing column, an empty cell, an unknown kind of file."""
    (tmp_path / "r.csv").write_text("x,y\n1,2\n3,\n")

    with pytest.raises(SourceError, match="has no column 'id'; it has x, y"):
        list(Index.from_table(tmp_path / "r.csv", key="id"))
    with pytest.raises(SourceError, match=r"r.csv row 2, column 'y': found None"):
        list(Index.from_table(tmp_path / "r.csv"))
    with pytest.raises(SourceError, match=r"want .csv, .tsv or .parquet"):
        list(Index.from_table(tmp_path / "r.xlsx"))


def test_rows_from_an_iterable_can_be_gone_through_twice():
    """Keys, tuples and rows are all taken; a generator is kept."""
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
