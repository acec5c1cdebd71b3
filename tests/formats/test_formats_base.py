"""Offsets, the look-up of formats, and what importing them costs."""

from __future__ import annotations

import importlib.metadata
import io
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat.errors import CorruptDataError, MissingDependencyError, OptionError
from datamat.formats import Offsets, ShardFormat, format_names, get_format

EXTENSIONS = {"parquet": "parquet", "tfrecord": "tfrecord", "tfrecord.gz": "tfrecord.gz", "webdataset": "tar"}
numbers = st.integers(0, 10**18)


def offsets_of(*rows: tuple[int, ...]) -> Offsets:
    return Offsets(*(np.array(column, np.uint64) for column in zip(*rows, strict=True)))


@given(st.lists(st.tuples(numbers, numbers), min_size=1) | st.lists(st.tuples(numbers, numbers, numbers), min_size=1))
def test_offsets_survive_their_text(rows):
    """to_text writes one line per record, and from_text reads them back."""
    offsets = offsets_of(*rows)

    text = offsets.to_text()

    assert text == "".join(" ".join(map(str, row)) + "\n" for row in rows)
    assert Offsets.from_text(text) == offsets


def test_offsets_of_many_records_survive_their_text():
    """An index longer than the pieces that it is written in is complete."""
    sizes = np.arange(1, 40_001, dtype=np.uint64)
    offsets = Offsets(np.cumsum(sizes) - sizes, sizes)

    text = offsets.to_text()

    assert text.splitlines() == [f"{index * (index - 1) // 2} {index}" for index in range(1, 40_001)]
    assert Offsets.from_text(text) == offsets


def test_no_offsets_are_an_empty_text():
    """A shard without records has an empty index."""
    nothing = Offsets.from_text("")

    assert len(nothing) == 0
    assert nothing.to_text() == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0 20\n20 30", 2),
        ("0 20\n20\n30 40 50\n", 2),
        ("0 20\n20 -1\n", 2),
        ("0 20\n20 1e5\n", 2),
        ("0 20\n20  30\n", 2),
        ("0 20\n\n20 30\n", 2),
        ("0 20\r\n20 30\r\n", 1),
        ("0 20\n20 99999999999999999999\n", 2),
        ("0 20\n20 ٣\n", 2),
        ("0\n20\n", 1),
        ("0 1 2 3\n", 1),
        (" 0 20\n", 1),
        ("\x00\x00\n", 1),
    ],
)
def test_from_text_names_the_bad_line(text, line):
    """A damaged index is refused, with the number of its first bad line."""
    with pytest.raises(CorruptDataError, match=rf"line {line} of the record index is .*remove the shard"):
        Offsets.from_text(text)


@given(st.lists(st.lists(st.integers(1, 2**40), max_size=5), max_size=5))
def test_joined_offsets_are_those_of_the_joined_file(parts):
    """Offsets of parts, joined, equal the offsets of all their records in one file."""

    def offsets(sizes):
        sizes = np.array(sizes, np.uint64)
        return Offsets(np.cumsum(sizes, dtype=np.uint64) - sizes, sizes)

    joined = Offsets.joined([(offsets(sizes), sum(sizes)) for sizes in parts])

    assert joined == offsets([size for sizes in parts for size in sizes])


def test_joined_offsets_go_beyond_four_gib():
    """Positions in a file of terabytes are exact."""
    part = offsets_of((0, 3), (3, 2**41 - 3))

    joined = Offsets.joined([(part, 2**41)] * 3)

    assert joined.offset.tolist() == [0, 3, 2**41, 2**41 + 3, 2**42, 2**42 + 3]
    assert Offsets.from_text(joined.to_text()) == joined


def test_joined_offsets_keep_the_skips_past_an_empty_part():
    """A part without records does not drop the third column of the others."""
    part = offsets_of((0, 50, 0), (0, 50, 30))

    joined = Offsets.joined([(Offsets.from_text(""), 0), (part, 50), (part, 50)])

    assert joined.to_text() == "0 50 0\n0 50 30\n50 50 0\n50 50 30\n"


def test_offsets_differ_from_others():
    """Equality looks at every column, and at whether there is a skip."""
    offsets = offsets_of((0, 20), (20, 30))

    assert offsets != offsets_of((0, 20), (20, 31))
    assert offsets != offsets_of((0, 20, 0), (20, 30, 0))
    assert offsets != "0 20\n20 30\n"


def test_offsets_of_another_type_are_refused():
    """Columns of another dtype or length are an error when made, not when used."""
    good = np.array([1, 2], np.uint64)

    with pytest.raises(OptionError, match="uint64 columns of 2 values, one per record; got int64"):
        Offsets(good, np.array([1, 2]))
    with pytest.raises(OptionError, match=r"uint64 columns of 2 values, one per record; got uint64 \(1,\)"):
        Offsets(good, good[:1])


def test_get_format_knows_its_built_ins():
    """Each built-in format answers to its own name."""
    for name, extension in EXTENSIONS.items():
        shard_format = get_format(name)

        assert isinstance(shard_format, ShardFormat)
        assert shard_format.name == name
        assert shard_format.extension == extension


def test_unknown_format_names_the_known_ones():
    """The message for a typing error lists the formats."""
    with pytest.raises(OptionError, match=r"no format 'tfrecords'.*tfrecord, tfrecord\.gz, webdataset"):
        get_format("tfrecords")


@pytest.fixture
def plug_in(monkeypatch):
    """Let an entry point 'mine' in the group of formats name a missing module."""

    def entry_points(*, group):
        assert group == "datamat.formats"
        return [importlib.metadata.EntryPoint("mine", "no_such_package_at_all.formats:Mine", group)]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_listing_formats_imports_no_plug_in(plug_in):
    """The names are known without importing what they point to."""
    assert format_names() == ["arrayrecord", "mine", "parquet", "tfrecord", "tfrecord.gz", "webdataset"]


def test_plug_in_without_its_package_says_what_to_install(plug_in):
    """A known format with a missing package is not an unknown format."""
    with pytest.raises(MissingDependencyError, match=r"format 'mine' .* needs the package 'no_such_package_at_all'"):
        get_format("mine")


def test_format_imports_no_more_than_it_needs():
    """Workers write, and readers read, without TensorFlow and protobuf in memory; pyarrow is Parquet's alone."""
    code = """
import io, sys
import numpy as np
import datamat.features, datamat.formats as formats
features = datamat.features.Features({"n": datamat.features.Scalar("int64")})
for name in ("tfrecord", "tfrecord.gz", "webdataset", "parquet"):
    shard_format, file = formats.get_format(name).with_features(features), io.BytesIO()
    writer = shard_format.writer(file, features.columns)
    writer.append({"key": b"a", "n": np.array([1])})
    writer.append_block({"key": [b"b"], "n": np.array([2])})
    writer.finish()
    size = file.tell()
    trailer = shard_format.trailer(file, [(0, size)])
    file.seek(size)
    file.write(trailer)
    file.seek(0)
    assert [record["key"] for record, _ in shard_format.read_file(file, path="")] == [[b"a"], [b"b"]]
    print(name, sorted({"tensorflow", "google.protobuf", "pyarrow", "cv2", "torch"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    wanted = ["tfrecord []", "tfrecord.gz []", "webdataset []", "parquet ['pyarrow']"]
    assert (done.stdout.splitlines(), done.stderr) == (wanted, "")


def test_format_without_its_package_says_what_to_install(monkeypatch):
    """A missing optional package is reported when the format is chosen, before any work."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(MissingDependencyError, match=r"array-record.*pip install 'datamat\[arrayrecord\]'"):
        get_format("arrayrecord")


@pytest.mark.parametrize("name", ["parquet", "webdataset"])
def test_format_that_stores_features_asks_for_them(name):
    """Columns without features are refused, and the message says how to give them."""
    with pytest.raises(OptionError, match=r"stores features, not columns; use get_format\(.*with_features"):
        get_format(name).writer(io.BytesIO(), {"key": "bytes"})
