"""Rows on disk: what is checked, what is stored, what a worker gets back."""

import math
import os

import numpy as np
import pytest

from datamat.directory.keys import safe_key
from datamat.errors import SourceError
from datamat.sources.rows import IndexRow, Texts, relative_to_source, stored_rows
from datamat.sources.store import RowStore
from datamat.sources.writing import write_rows


def _store(tmp_path, rows, **options):
    folder = tmp_path / f"rows{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    return write_rows(rows, folder, source=options.pop("source", str(tmp_path)), **options)


def test_rows_come_back_as_they_went_in(tmp_path):
    """Keys, splits, fields of each kind and origins survive, in any order asked for."""
    rows = [
        IndexRow(f"k{n}-é", "val" if n % 3 else None, {"t": f"text {n}\n", "n": n - 5, "x": n / 3}, f"l.txt:{n}")
        for n in range(40_000)
    ]

    store = _store(tmp_path, rows, file_fields=())
    picked = store.read(np.array([39_999, 0, 17]))

    assert [row.key for row in picked] == ["k39999-é", "k0-é", "k17-é"]
    assert picked[0] == IndexRow("k39999-é", "train", {"t": "text 39999\n", "n": 39_994, "x": 13333.0}, "l.txt:39999")
    assert picked[2].split == "val"
    assert len(store) == len(RowStore(store.folder)) == 40_000


def test_splits_by_hash_keep_their_shares_and_never_move(tmp_path):
    """Added samples leave the old ones in their splits."""
    shares = {"train": 0.8, "val": 0.1, "test": 0.1}
    few = _store(tmp_path, [IndexRow(f"{n}") for n in range(10_000)], splits=shares)
    more = _store(tmp_path, [IndexRow(f"{n}") for n in reversed(range(20_000))], splits=shares)

    shared = {key: more.split_codes[place] for place, key in enumerate(more.keys(np.arange(20_000)))}

    assert np.abs(np.bincount(few.split_codes) / 10_000 - [0.8, 0.1, 0.1]).max() < 0.02
    assert all(shared[f"{n}"] == code for n, code in enumerate(few.split_codes.tolist()))


@pytest.mark.parametrize("key", ["a/b", "a\\b", "..", "a..b", "a#1", "a\nb", "a\0b", "\x1b[31m", "a%2Fb"])
def test_unsafe_keys_are_made_safe(tmp_path, key):
    """Keys that could leave a folder, a line or the terminal are escaped, each in its own way."""
    store = _store(tmp_path, [IndexRow("good"), IndexRow(key), IndexRow("a_b")])

    assert store.keys(np.arange(3)) == ["good", safe_key(key), "a_b"]
    assert store.find(safe_key(key)) == 1


def test_missing_files_name_their_lines(tmp_path):
    """One message lists up to ten; a folder is not a file."""
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "dir").mkdir()
    rows = [
        IndexRow("a", fields={"image": "a.png"}, origin="l:1"),
        IndexRow("b", fields={"image": "b.png"}, origin="l:2"),
        IndexRow("c", fields={"image": "dir"}, origin="l:3"),
        IndexRow("d", fields={"image": "dir/../a.png"}, origin="l:4"),
    ]

    with pytest.raises(SourceError) as caught:
        _store(tmp_path, rows)

    assert "l:2: image 'b.png': no such file" in str(caught.value)
    assert "l:3: image 'dir': not a regular file" in str(caught.value)
    assert "l:4: image 'dir/../a.png': leads out" in str(caught.value)


def test_field_that_no_row_has_is_none_in_each(tmp_path):
    """As an empty column of a table, which a feature may not need, or take as `Nullable`."""
    store = _store(tmp_path, [IndexRow(key, fields={"x": None, "y": 1}) for key in "ab"])

    assert [row.fields for row in store.read(np.arange(2))] == [{"x": None, "y": 1}] * 2


def test_a_type_that_changes_after_a_batch_is_an_error(tmp_path):
    """Batches do not hide it; an int among floats is a float."""
    rows = [IndexRow(f"{n}", fields={"x": n}) for n in range(20_000)] + [IndexRow("z", fields={"x": "text"})]

    with pytest.raises(SourceError, match="field 'x' holds"):
        _store(tmp_path, rows)
    store = _store(tmp_path, [IndexRow("a", fields={"x": math.pi}), IndexRow("b", fields={"x": 1})])
    assert store.read(np.array([1]))[0].fields == {"x": 1.0}


def test_digest_changes_with_whatever_the_row_says(tmp_path):
    """Key, field, size and time of a file count; the place of the row does not."""
    path = tmp_path / "a.png"
    path.write_bytes(b"one")
    os.utime(path, ns=(0, 10))
    base = [IndexRow("a", fields={"image": "a.png", "n": 1}), IndexRow("b", fields={"image": "a.png", "n": 1})]
    first = _store(tmp_path, base)

    changed = {
        "order": _store(tmp_path, base[::-1]).digests[::-1],
        "field": _store(tmp_path, [base[0], base[1]._replace(fields={"image": "a.png", "n": 2})]).digests,
    }
    os.utime(path, ns=(0, 11))
    changed["time"] = _store(tmp_path, base).digests

    assert (changed["order"] == first.digests).all()
    assert changed["field"][0] == first.digests[0] and changed["field"][1] != first.digests[1]
    assert (changed["time"] != first.digests).all()


def test_files_are_found_by_existence_or_as_declared(tmp_path):
    """`read` gets paths of files joined to the source; other strings do not change."""
    (tmp_path / "a.png").write_bytes(b"1234")
    rows = [IndexRow("a", fields={"image": "a.png", "note": "hello"})]

    found, declared = _store(tmp_path, rows), _store(tmp_path, rows, file_fields=())

    assert found.read(np.array([0]))[0].fields == {"image": str(tmp_path / "a.png"), "note": "hello"}
    assert found.input_bytes().tolist() == [4]
    assert declared.read(np.array([0]))[0].fields["image"] == "a.png"


def test_a_row_may_have_no_file_in_a_field(tmp_path):
    """An empty path means no file: nothing looks for it, and `read` gets it empty."""
    (tmp_path / "a.png").write_bytes(b"1234")
    rows = [IndexRow("a", fields={"image": "a.png"}), IndexRow("b", fields={"image": ""})]

    store = _store(tmp_path, rows)

    assert [row.fields["image"] for row in store.read(np.arange(2))] == [str(tmp_path / "a.png"), ""]
    assert store.input_bytes().tolist() == [4, 0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        *(([IndexRow("a"), IndexRow(key, origin="l.txt:2")], r"l\.txt:2: key ") for key in ("", "\ud800", 7)),
        ([IndexRow("a", origin="l:1"), IndexRow("a", "val", {}, "l:9")], "key 'a' at l:1 and l:9"),
        ([IndexRow("a", "../x")], r"split '\.\./x'"),
        ([IndexRow("a", fields={"x": 1}), IndexRow("b", fields={"y": 1})], r"row 1: the fields are \['y'\]"),
        ([IndexRow("a", fields={"x": 1}), IndexRow("b", fields={"x": "1"})], "row 1: field 'x'"),
        ([IndexRow("a", fields={"x": object()})], "row 0: field 'x'"),
        ([{"key": "0", "x": 1}], "row 0 of the index is a dict"),
        ([IndexRow("0"), ("1", "train", {})], "row 1 of the index is a tuple"),
        ([IndexRow("0"), IndexRow("1", "train", "1.png", "l.txt:2")], r"l\.txt:2: its fields are a str"),
    ],
)
@pytest.mark.parametrize("source", ["absolute", "relative"])
def test_wrong_rows_are_named(tmp_path, rows, message, source):
    """With their number or origin, before anything is read."""
    with pytest.raises(SourceError, match=message):
        _store(tmp_path, relative_to_source(rows, "photos", None) if source == "relative" else rows)


def test_index_without_return_is_named():
    """None in place of rows is a forgotten `return`."""
    with pytest.raises(SourceError, match=r"index returned None.*is a `return` or a `yield` missing"):
        stored_rows(None)


@pytest.mark.parametrize(
    "texts", [["ab", "cd"], ["a\0", "b\0"], ["é", "ab"], ["\udcff", "a"], ["a", "bcd"], ["", ""], []]
)
def test_columns_of_texts_are_cut_where_each_ends(texts):
    """Texts of equal length are cut all at once."""
    column = Texts.of(["before", *texts])[1:]

    assert column.tolist() == texts
    assert column.pieces() == [text.encode("utf-8", "surrogateescape") for text in texts]
