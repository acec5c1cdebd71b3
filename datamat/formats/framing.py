"""TFRecord framing: what stands around a payload in the file, and the test of it.

A record in the file (tensorflow/core/lib/io/record_writer.h), all little endian:

    uint64 length | uint32 masked CRC32C of those 8 bytes | payload, length bytes | uint32 masked CRC32C of the payload

The mask keeps a CRC over data that holds CRCs from being weak (tensorflow/core/lib/hash/crc32c.h).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import google_crc32c
import numpy as np

from datamat.errors import CorruptDataError
from datamat.formats.block import pack_block
from datamat.formats.buffered import read_up_to
from datamat.formats.example import MAX_EXAMPLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from datamat.formats import Block, Buffer, ColumnKind

__all__ = ["FRAMING_BYTES", "encode_block", "frame", "read_payload", "record_size", "unframe"]

FRAMING_BYTES = 16
_HEADER_BYTES = 12
_TRAILER_BYTES = 4
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")

_Crc = TypeVar("_Crc", int, "NDArray[np.uint64]")


def frame(pieces: list[bytes], length: int) -> list[bytes]:
    """Put header and trailer around the pieces of one payload, without copying large ones."""
    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, piece)
    return [_header(length) + pieces[0], *pieces[1:], _CRC.pack(_mask(crc))]


def encode_block(columns: Block, kinds: Mapping[str, ColumnKind]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return n rows as framed records back to back, uint8 (total,), and the length of each, int64 (n,).

    Args:
        columns: n > 0 rows of similar length: int64 or float32 (n,) or (n, k), or n bytes values.
        kinds: the kind of each column.

    Raises:
        SchemaError: the columns are not those of `kinds`.
    """
    packed, sizes = pack_block(columns, kinds, header=_block_headers, trailer_size=_TRAILER_BYTES)
    ends = np.cumsum(sizes)
    raw = packed.tobytes()  # the CRC needs bytes objects: slices of one are the fastest to make
    stops = (ends - _TRAILER_BYTES).tolist()
    starts = (ends - sizes + _HEADER_BYTES).tolist()
    crcs = np.array([google_crc32c.value(raw[a:b]) for a, b in zip(starts, stops, strict=True)], np.uint64)
    masked = _mask(crcs).astype("<u4")
    packed[ends[:, None] + np.arange(-_TRAILER_BYTES, 0)] = masked.view(np.uint8).reshape(-1, _TRAILER_BYTES)
    return packed, sizes


def read_payload(file: BinaryIO) -> bytes | None:
    """Return the next payload of a plain file, None at its end."""
    header = file.read(_HEADER_BYTES)
    if not header:
        return None
    length = _checked_length(header)
    payload = read_up_to(file, length)
    _check_payload(payload, length, file.read(_TRAILER_BYTES))
    return payload


def record_size(buffer: Buffer, start: int) -> int:
    """Return the bytes of the record at `start`, framing included, of which the buffer need hold the header alone."""
    return _checked_length(memoryview(buffer)[start : start + _HEADER_BYTES]) + FRAMING_BYTES


def unframe(buffer: Buffer, start: int) -> tuple[memoryview, int]:
    """Return the payload of the record at `start`, and the bytes of the whole record."""
    view = memoryview(buffer)[start:]
    length = _checked_length(view[:_HEADER_BYTES])
    payload = view[_HEADER_BYTES : _HEADER_BYTES + length]
    _check_payload(payload, length, view[_HEADER_BYTES + length : FRAMING_BYTES + length])
    return payload, length + FRAMING_BYTES


def _mask(crc: _Crc) -> _Crc:
    """Return a CRC32C as TFRecord stores it (tensorflow/core/lib/hash/crc32c.h)."""
    # numpy keeps uint64 beside Python integers; its stubs don't know.
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF  # type: ignore[return-value]


def _header(length: int) -> bytes:
    packed = _LENGTH.pack(length)
    return packed + _CRC.pack(_mask(google_crc32c.value(packed)))


def _block_headers(lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the header of each record, uint8 (n, 12); rows of a block have few different lengths."""
    least = int(lengths.min())
    table = np.zeros((int(lengths.max()) - least + 1, _HEADER_BYTES), np.uint8)
    for index in np.flatnonzero(np.bincount(lengths - least)).tolist():
        table[index] = np.frombuffer(_header(index + least), np.uint8)
    return table[lengths - least]


def _checked_length(header: Buffer) -> int:
    if len(header) < _HEADER_BYTES:
        raise CorruptDataError(f"the data ends inside the header, which has {len(header)} of {_HEADER_BYTES} bytes")
    stored, length = _CRC.unpack_from(header, 8)[0], _LENGTH.unpack_from(header)[0]
    found = _mask(google_crc32c.value(bytes(header[:8])))
    if found != stored:
        raise CorruptDataError(f"the checksum of the length is {found:#010x}, but {stored:#010x} is stored")
    if length > MAX_EXAMPLE_BYTES:
        raise CorruptDataError(f"the record claims {length} bytes, but {MAX_EXAMPLE_BYTES} is the most of any Example")
    return int(length)


def _check_payload(payload: Buffer, length: int, trailer: Buffer) -> None:
    if len(payload) + len(trailer) < length + _TRAILER_BYTES:
        raise CorruptDataError(
            f"the data ends inside the record, {len(payload) + len(trailer)} bytes after its header, "
            f"where {length + _TRAILER_BYTES} were expected"
        )
    # The CRC takes bytes or arrays, but no memoryview.
    crc = google_crc32c.value(payload if isinstance(payload, bytes) else np.frombuffer(payload, np.uint8))
    found, stored = _mask(crc), _CRC.unpack(trailer)[0]
    if found != stored:
        raise CorruptDataError(f"the checksum of the data is {found:#010x}, but {stored:#010x} is stored")
