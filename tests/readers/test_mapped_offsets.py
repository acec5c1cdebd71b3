"""Offsets looked up in their file: the same places, and no signal where the file is changed."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat import CorruptDataError, load
from datamat.formats import Offsets
from datamat.readers.records import LineMarks, MappedOffsets


def mapped(path):
    with open(path, "rb") as file:
        return MappedOffsets(str(path), file, LineMarks.of(path.read_bytes(), None))


@given(sizes=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=70), has_skip=st.booleans())
def test_places_are_those_of_the_table(tmp_path_factory, sizes, has_skip):
    """This holds for every line, however wide the lines before it are."""
    path = tmp_path_factory.mktemp("offsets") / "shard.idx"
    size = np.array(sizes, np.uint64)
    offsets = Offsets(np.cumsum(size) - size, size, size[::-1].copy() if has_skip else None)
    path.write_text(offsets.to_text())

    found = mapped(path)

    assert [found.span(number) for number in range(len(sizes))] == [offsets.span(n) for n in range(len(sizes))]


def test_memory_holds_little_for_each_record(tmp_path):
    """Half a byte suffices: the file holds the rest."""
    path = tmp_path / "shard.idx"
    size = np.full(10_000, 7, np.uint64)
    path.write_text(Offsets(np.cumsum(size) - size, size).to_text())

    marks = LineMarks.of(path.read_bytes(), None)

    assert len(marks.starts) * marks.starts.itemsize <= 10_000 // 2 + 8


@pytest.mark.parametrize("change", ["cut short", "emptied", "longer", "other text"])
def test_file_that_is_changed_while_it_is_mapped_is_an_error(tmp_path, change):
    """Pages behind its end would end the process with SIGBUS."""
    path = tmp_path / "shard.idx"
    size = np.full(2_000, 7, np.uint64)
    path.write_text(Offsets(np.cumsum(size) - size, size).to_text())
    found = mapped(path)
    num_bytes = path.stat().st_size

    if change == "longer":
        with path.open("a") as file:
            file.write("14000 7\n")
    elif change == "other text":
        with path.open("r+") as file:
            file.write("-" * num_bytes)
    else:
        os.truncate(path, 0 if change == "emptied" else num_bytes - 4100)

    with pytest.raises(CorruptDataError, match=r"shard\.idx was changed while it was open: line 2000 differs"):
        found.span(1999)


def test_file_that_is_shorter_than_its_marks_say_is_an_error(tmp_path):
    """It may be truncated after its marks were read."""
    path = tmp_path / "shard.idx"
    path.write_text("0 7\n7 7\n")
    with open(path, "rb") as file:
        marks = LineMarks.of(path.read_bytes(), None)
        os.truncate(path, 3)

        with pytest.raises(CorruptDataError, match=r"shard\.idx was changed while it was opened: "):
            MappedOffsets(str(path), file, marks)


def test_rewritten_offsets_are_checked_again(make_pairs_output, tmp_path):
    """Marks hold for the file that was scanned, and for no other."""
    data = load(make_pairs_output(tmp_path / "out"), "train")
    records = data._records.parts[0].reader.records
    info = data.manifest.splits["train"][0]
    before = records.read_record(0)
    assert records._opener.open(info).read(0).keys() == before.keys()

    (tmp_path / "out" / info.index_file).write_text("0 1\n")

    with pytest.raises(CorruptDataError, match=f"holds 1 offsets, the manifest says {info.num_records} records"):
        records._opener.open(info)
