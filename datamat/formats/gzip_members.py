"""Gzip members (RFC 1952) with a constant header, written and read one at a time.

A gzip file is a row of members, each with its own header, deflate stream, CRC32 and length. Members of whole records
can be joined byte for byte and inflated one by one, which gives random access. A member may inflate to a thousand
times its size: it gets only as much memory as what it has inflated to so far accounts for.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from datamat.errors import CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from datamat.formats import Buffer

__all__ = ["deflate_member", "inflate_member", "read_member"]

Bound: TypeAlias = "Callable[[bytearray], int]"

_HEADER = bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 255])  # deflate, no flags, no time, no hint, unknown system
_TRAILER = struct.Struct("<II")
_READ_BYTES = 1 << 20
_GZIP = zlib.MAX_WBITS | 16  # lets zlib read header and trailer, and test the CRC and the length


def deflate_member(data: Buffer, *, level: int) -> bytes:
    """Return the data as one gzip member."""
    deflate = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    # In one call: that the output doesn't depend on how input is cut is true of zlib, but promised nowhere.
    body = (deflate.compress(data), deflate.flush())
    return b"".join((_HEADER, *body, _TRAILER.pack(zlib.crc32(data), len(data) & 0xFFFF_FFFF)))


def read_member(file: BinaryIO, buffer: bytes, bound: Bound) -> tuple[bytes, int, bytes]:
    """Return the next member inflated, its bytes in the file, and what was read behind it.

    Args:
        file: where the member goes on.
        buffer: what was read already.
        bound: how many bytes a member may hold that begins with what is inflated so far.
    """
    while len(buffer) < len(_HEADER) and (more := file.read(_READ_BYTES)):
        buffer += more
    _check_header(buffer)
    return _inflate(itertools.chain([buffer], iter(lambda: file.read(_READ_BYTES), b"")), bound)


def inflate_member(buffer: Buffer, bound: Bound) -> tuple[bytes, int]:
    """Return the member at the start of the buffer inflated, and the number of bytes behind it."""
    _check_header(buffer)
    data, _, rest = _inflate([buffer], bound)
    return data, len(rest)


def _inflate(pieces: Iterable[Buffer], bound: Bound) -> tuple[bytes, int, bytes]:
    inflate = zlib.decompressobj(_GZIP)
    found = bytearray()
    size = 0
    for piece in pieces:
        size += len(piece)
        left = piece
        while not inflate.eof:
            # One more than there may be shows that there is more, and lets zlib reach the trailer where there is not.
            least = len(found)
            try:
                found += inflate.decompress(left, bound(found) - least + 1)
            except zlib.error as exc:
                raise CorruptDataError(f"the gzip member doesn't inflate: {exc}") from exc
            if len(found) > bound(found):
                raise CorruptDataError(f"the gzip member holds more than its records, which end at {bound(found)}")
            left = inflate.unconsumed_tail
            if not left and len(found) == least:
                break
        if inflate.eof:
            return bytes(found), size - len(inflate.unused_data), inflate.unused_data
    raise CorruptDataError(f"the data ends inside a gzip member, after {size} of its bytes")


def _check_header(buffer: Buffer) -> None:
    found = bytes(buffer[: len(_HEADER)])
    if found != _HEADER:
        raise CorruptDataError(f"the gzip header is {found.hex()}, expected is {_HEADER.hex()}")
