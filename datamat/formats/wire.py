"""Protobuf's wire format: varints, and the fields of a message whose meaning the caller knows.

See https://protobuf.dev/programming-guides/encoding/. Nothing here reads past the bounds it is given: a message that
doesn't end where its length says raises `CorruptDataError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from datamat.errors import CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from datamat.formats import Buffer

__all__ = ["fields", "pack_varints", "read_varint", "unpack_varints", "varint", "varint_matrix", "varint_sizes"]

VARINT, I64, LEN, GROUP, END_GROUP, I32 = range(6)  # wire types
_MAX_VARINT_BYTES = 10
_UINT64_MAX = 2**64 - 1
_MAX_GROUP_DEPTH = 100  # what protobuf's own parsers allow

# From here on numpy is faster than a loop over the numbers (measured: about 90 to write, 30 bytes of them to read).
_MANY_TO_PACK = 90
_MANY_BYTES_TO_UNPACK = 32

_SMALL_VARINTS = [bytes([value]) for value in range(128)]


def varint(value: int) -> bytes:
    """Return a number from 0 to 2**64 - 1 in groups of seven bits, the lowest first."""
    if value < 128:
        return _SMALL_VARINTS[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def pack_varints(values: NDArray[np.int64]) -> bytes:
    """Return int64 numbers (n,) as a packed field; negative ones take ten bytes."""
    if len(values) < _MANY_TO_PACK:
        return b"".join([varint(value & _UINT64_MAX) for value in values.tolist()])
    matrix, sizes = varint_matrix(values.astype("<i8", copy=False).view(np.uint64))
    return matrix[np.arange(matrix.shape[1]) < sizes[:, None]].tobytes()


def varint_sizes(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the bytes that the varint of each value takes, int64 (n,), for uint64 (n,) with n > 0."""
    sizes = np.ones(len(values), np.int64)
    for bits in range(7, int(values.max()).bit_length(), 7):
        sizes += values >= np.uint64(1 << bits)
    return sizes


def varint_matrix(values: NDArray[np.uint64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the varint of each value at the start of a row of a uint8 matrix, and its length, int64 (n,)."""
    sizes = varint_sizes(values)
    width = int(sizes.max())
    matrix = np.empty((len(values), width), np.uint8)
    for index in range(width):
        matrix[:, index] = (values >> np.uint64(7 * index)) & np.uint64(127)
        matrix[:, index] |= (sizes > index + 1).view(np.uint8) << np.uint8(7)
    return matrix, sizes


def unpack_varints(data: Buffer, start: int, stop: int) -> NDArray[np.int64]:
    """Return the int64 numbers (n,) of the packed field in data[start:stop]."""
    if stop - start < _MANY_BYTES_TO_UNPACK:
        values = []
        position = start
        while position < stop:
            value, position = read_varint(data, position, stop)
            values.append(value)
        return np.array(values, np.uint64).view(np.int64)
    raw = np.frombuffer(data, np.uint8, stop - start, start)
    ends = np.flatnonzero(raw < 128)
    if not len(ends) or ends[-1] != len(raw) - 1 or (lengths := np.diff(ends, prepend=-1)).max() > _MAX_VARINT_BYTES:
        raise CorruptDataError(f"the int64 list at byte {start} holds a number that does not end")
    starts = ends - lengths + 1
    shifts = (np.arange(len(raw)) - np.repeat(starts, lengths)).astype(np.uint64) * np.uint64(7)
    return np.bitwise_or.reduceat((raw & 127).astype(np.uint64) << shifts, starts).view(np.int64)


def fields(data: Buffer, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, begin, end) of each field of the message in data[start:stop]."""
    while start < stop:
        tag, begin = read_varint(data, start, stop)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise CorruptDataError(f"byte {start} starts a field with number {number}, which protobuf doesn't allow")
        if wire_type == LEN:
            size, begin = read_varint(data, begin, stop)
            end = begin + size
        else:
            end = _skip_value(data, begin, stop, tag, depth=0)
        if end > stop:
            raise CorruptDataError(
                f"the field at byte {start} needs {end - begin} bytes but its message has {stop - begin} left"
            )
        yield number, wire_type, begin, end
        start = end


def _skip_value(data: Buffer, begin: int, stop: int, tag: int, *, depth: int) -> int:
    """Return where a value that is not length-delimited ends."""
    wire_type = tag & 7
    if wire_type == VARINT:
        return read_varint(data, begin, stop)[1]
    if wire_type in (I32, I64):
        return begin + (4 if wire_type == I32 else 8)
    if wire_type == GROUP and depth < _MAX_GROUP_DEPTH:
        return _skip_group(data, begin, stop, tag >> 3, depth=depth + 1)
    raise CorruptDataError(f"the field before byte {begin} has the wire type {wire_type} where none is allowed")


def _skip_group(data: Buffer, begin: int, stop: int, number: int, *, depth: int) -> int:
    while begin < stop:
        tag, begin = read_varint(data, begin, stop)
        if tag == number << 3 | END_GROUP:
            return begin
        if tag & 7 == LEN:
            size, begin = read_varint(data, begin, stop)
            begin += size
        else:
            begin = _skip_value(data, begin, stop, tag, depth=depth)
    raise CorruptDataError(f"the group with field number {number} has no end before byte {stop}")


def read_varint(data: Buffer, start: int, stop: int) -> tuple[int, int]:
    """Return the number at `start` and the position after it; bits over 64 are dropped, as protobuf does."""
    value = 0
    for position in range(start, min(stop, start + _MAX_VARINT_BYTES)):
        byte = data[position]
        value |= (byte & 127) << 7 * (position - start)
        if byte < 128:
            return value & _UINT64_MAX, position + 1
    raise CorruptDataError(f"the number at byte {start} does not end within its {stop - start} bytes")
