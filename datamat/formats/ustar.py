"""Members of tar archives: headers written and read one at a time, always the same bytes for the same member.

POSIX 1003.1 calls the form ustar: a header of 512 bytes, the data, zeros up to the next multiple of 512. Times are 0,
owners root without a name, modes 0644. Names are UTF-8, which every reader in use takes them for.

A header holds a name of 100 bytes: here up to 70 before the first dot, and up to 30 from there on. A longer one goes
into a pax header before it (`path`), which tar, Python and webdataset read. Readers that skip pax headers (wids) see a
short name in the header itself: the begin of the long one with a digest, and its extensions. It depends on each half
alone, so that members of one sample still have one name before the dot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import xxhash

from datamat.errors import CorruptDataError, SchemaError

if TYPE_CHECKING:
    from datamat.formats import Buffer

__all__ = ["BLOCK_BYTES", "END_OF_ARCHIVE", "Member", "member", "parse_header", "read_pax_path"]

BLOCK_BYTES = 512
END_OF_ARCHIVE = bytes(2 * BLOCK_BYTES)

_NAME_BYTES = 100
_STEM_BYTES = 70
_LARGEST = 8**11 - 1  # what eleven octal digits hold
_REST = b"ustar\x0000" + bytes(247)  # owners' names, device, prefix and padding: none


class Member(NamedTuple):
    """What a header says."""

    name: str
    size: int
    type: bytes
    """b"0" for a file, b"x" for a pax header."""

    @property
    def padded(self) -> int:
        """The bytes that the data takes in the archive."""
        return -(-self.size // BLOCK_BYTES) * BLOCK_BYTES


def member(name: str, data: bytes) -> list[bytes]:
    """Return a file as it stands in an archive, in pieces, the data uncopied; raise `SchemaError` over 8 GiB."""
    if len(data) > _LARGEST:
        raise SchemaError(f"member {name!r} has {len(data)} bytes, a tar archive holds {_LARGEST}; split the sample")
    encoded = name.encode()
    short = _shortened(encoded)
    pax = [] if short == encoded else _stored(b"././@PaxHeader", _pax_record(b"path", encoded), b"x")
    return [*pax, *_stored(short, data, b"0")]


def parse_header(block: Buffer) -> Member:
    """Return what a header of 512 bytes says.

    Raises:
        CorruptDataError: it is no ustar header, or not the one that was written.
    """
    raw = bytes(block)
    if len(raw) < BLOCK_BYTES:
        raise CorruptDataError(f"the data ends inside a tar header, after {len(raw)} of its {BLOCK_BYTES} bytes")
    stored, found = raw[148:156], _checksum(raw)
    if stored != found:
        raise CorruptDataError(f"the checksum of the tar header is {found!r}, but {stored!r} is stored")
    if raw[257:265] != b"ustar\x0000" or raw[156:157] not in (b"0", b"x"):
        raise CorruptDataError(
            f"the tar header is of kind {raw[257:265]!r} and type {raw[156:157]!r}, expected are ustar and a file"
        )
    try:
        return Member(raw[:_NAME_BYTES].rstrip(b"\0").decode(), int(raw[124:136].rstrip(b"\0 "), 8), raw[156:157])
    except ValueError as exc:
        raise CorruptDataError(f"the tar header has a name or a size that is none ({exc})") from exc


def read_pax_path(data: bytes) -> str:
    """Return the name that a pax header gives the next member.

    Raises:
        CorruptDataError: it does not hold one `path` and nothing else.
    """
    length, _, rest = data.partition(b" ")
    if length != b"%d" % len(data) or not rest.startswith(b"path=") or not rest.endswith(b"\n"):
        raise CorruptDataError(f"the pax header holds {data[:40]!r}, expected is the name of the next member")
    try:
        return rest[5:-1].decode()
    except UnicodeDecodeError as exc:
        raise CorruptDataError(f"the name in the pax header is not UTF-8 ({exc})") from exc


def _stored(name: bytes, data: bytes, kind: bytes) -> list[bytes]:
    """Return header, data and padding."""
    head = b"0000644\x000000000\x000000000\x00%011o\x0000000000000\x00" % len(data)
    header = name.ljust(_NAME_BYTES, b"\0") + head + bytes(8) + kind + bytes(_NAME_BYTES) + _REST
    return [header[:148] + _checksum(header) + header[156:], data, bytes(-len(data) % BLOCK_BYTES)]


def _checksum(header: bytes) -> bytes:
    """Return the checksum field: the sum of all bytes, the field itself taken as spaces."""
    return b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * ord(" "))


def _pax_record(key: bytes, value: bytes) -> bytes:
    """Return `LENGTH key=value` and a newline, where LENGTH counts all of it, itself included."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length += 1
    return b"%d" % length + rest


def _shortened(name: bytes) -> bytes:
    """Return a name that fits into a header: this one, if it does."""
    folder, slash, base = name.rpartition(b"/")
    stem, dot, extensions = base.partition(b".")
    stem = folder + slash + stem
    if len(stem) > _STEM_BYTES:
        digest = b"~" + xxhash.xxh3_64_hexdigest(stem).encode()
        begin = base.partition(b".")[0][: _STEM_BYTES - len(digest)]
        stem = begin.decode(errors="ignore").encode() + digest  # cut between characters
    room = _NAME_BYTES - _STEM_BYTES - len(dot)
    return stem + dot + extensions[-room:].decode(errors="ignore").encode()
