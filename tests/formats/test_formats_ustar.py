"""Members of tar archives: equal to what Python's tarfile writes, and read by it where names are long."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datamat.errors import CorruptDataError, SchemaError
from datamat.formats.webdataset import BLOCK_BYTES, END_OF_ARCHIVE, member, parse_header, read_pax_path

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


def stored(name, data=b"data"):
    return b"".join(member(name, data))


def fits(name):
    folder, slash, base = name.encode().rpartition(b"/")
    stem, dot, extensions = base.partition(b".")
    return bool(base) and len(folder + slash + stem) <= 70 and len(dot + extensions) <= 30


@given(names.filter(fits), st.binary(max_size=2000))
def test_member_is_what_tarfile_writes(name, data):
    """Names that fit into the header give the bytes of tarfile's USTAR format with nothing set."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT, encoding="utf-8") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))

    assert file.getvalue().startswith(stored(name, data) + END_OF_ARCHIVE)


@given(names.filter(lambda name: "/" not in name), st.integers(1, 400))
@example("ü", 200)
def test_long_names_are_read_by_tarfile(stem, repeats):
    """A name of any length comes back whole."""
    name = "folder/" + stem * repeats + ".image.png"

    with tarfile.open(fileobj=io.BytesIO(stored(name) + END_OF_ARCHIVE), mode="r|") as archive:
        found = [(info.name, archive.extractfile(info).read()) for info in archive]

    assert found == [(name, b"data")]


def test_readers_without_pax_see_a_short_name_with_its_extensions():
    """Members of a sample share their short stem, and those of another sample do not."""
    headers = {}
    long = "a" * 200, "a" * 201, "d/" * 80 + "ü" * 90
    for name in (f"{long[0]}.image.png", *(f"{stem}.json" for stem in long), "b.%s.npy" % ("field" * 9)):
        data = stored(name)
        pax = parse_header(data[:BLOCK_BYTES])
        assert (pax.name, pax.type) == ("././@PaxHeader", b"x")
        assert read_pax_path(data[BLOCK_BYTES : BLOCK_BYTES + pax.size]) == name
        start = BLOCK_BYTES + pax.padded
        headers[name] = parse_header(data[start : start + BLOCK_BYTES]).name

    stems = [short.partition(".")[0] for short in headers.values()]
    endings = ["image.png", "json", "json", "json", ("field" * 9 + ".npy")[-29:]]
    assert [short.partition(".")[2] for short in headers.values()] == endings
    assert stems[0] == stems[1]
    assert len(set(stems)) == 4
    assert all(len(short.encode()) <= 100 for short in headers.values())


@pytest.mark.parametrize("place", range(0, BLOCK_BYTES, 37))
def test_damaged_header_is_refused(place):
    """A changed byte anywhere in a header is detected."""
    header = bytearray(stored("key.json")[:BLOCK_BYTES])
    header[place] ^= 2

    with pytest.raises(CorruptDataError, match="tar header"):
        parse_header(header)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "ends inside a tar header, after 0"),
        (bytes(511), "ends inside a tar header, after 511"),
        (tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT), "of kind b'ustar  .*' .*want ustar and a file"),
    ],
)
def test_other_headers_are_refused(header, message):
    """Headers that datamat does not write are refused."""
    with pytest.raises(CorruptDataError, match=message):
        parse_header(header)


@pytest.mark.parametrize("data", [b"", b"8 path=a\n", b"10 path=a\n ", b"10 name=a\n", b"11 path=\xff\xff\n"])
def test_other_pax_records_are_refused(data):
    """A pax header that does not hold just a name is damage."""
    message = "the name in the pax header is not UTF-8" if b"\xff" in data else "pax header"
    with pytest.raises(CorruptDataError, match=message):
        read_pax_path(data)


def test_member_too_large_for_a_tar_is_refused():
    """Its size would not fit into the header, and the archive would be read wrong."""

    class Huge(bytes):
        def __len__(self):
            return 8**11

    with pytest.raises(SchemaError, match="a tar archive allows 8589934591"):
        member("a.npy", Huge())
