"""Gzip members (RFC 1952) with a constant header, written and read one at a time.

A gzip file is a row of members, each with its own header, deflate stream, CRC32 and length. Members of whole records
can be joined byte for byte and inflated one by one, which gives random access.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO

from datamat.errors import CorruptDataError

if TYPE_CHECKING:
    from datamat.formats import Buffer

__all__ = ["deflate_member", "inflate_member", "read_member"]

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


def read_member(file: BinaryIO, buffer: bytes) -> tuple[bytes, int, bytes]:
    """Return the next member inflated, its bytes in the file, and what was read behind it."""
    while len(buffer) < len(_HEADER) and (more := file.read(_READ_BYTES)):
        buffer += more
    _check_header(buffer)
    inflate = zlib.decompressobj(_GZIP)
    found = []
    size = 0
    while True:
        try:
            found.append(inflate.decompress(buffer))
        except zlib.error as exc:
            raise CorruptDataError(f"the gzip member doesn't inflate: {exc}") from exc
        size += len(buffer) - len(inflate.unused_data)
        if inflate.eof:
            return b"".join(found), size, inflate.unused_data
        buffer = file.read(_READ_BYTES)
        if not buffer:
            raise CorruptDataError(f"the data ends inside a gzip member, after {size} of its bytes")


def inflate_member(buffer: Buffer) -> tuple[bytes, int]:
    """Return the member at the start of the buffer inflated, and the number of bytes behind it."""
    _check_header(buffer)
    inflate = zlib.decompressobj(_GZIP)
    try:
        data = inflate.decompress(buffer)
    except zlib.error as exc:
        raise CorruptDataError(f"the gzip member doesn't inflate: {exc}") from exc
    if not inflate.eof:
        raise CorruptDataError(f"the data ends inside a gzip member, after {len(buffer)} of its bytes")
    return data, len(inflate.unused_data)


def _check_header(buffer: Buffer) -> None:
    found = bytes(buffer[: len(_HEADER)])
    if found != _HEADER:
        raise CorruptDataError(f"the gzip header is {found.hex()}, expected is {_HEADER.hex()}")
