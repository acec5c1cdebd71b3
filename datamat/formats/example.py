"""`tf.train.Example`: encoded columns to bytes and back, one record or a block of them at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, final

import numpy as np

from datamat.errors import CorruptDataError, SchemaError
from datamat.features import RaggedColumn
from datamat.features.base import (
    DTYPE_OF_KIND,
    RawColumn,
    bytes_array,
    cut,
    is_block_of_kind,
    is_of_kind,
    joined_spans,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from datamat.features.base import Column, Kind
    from datamat.formats import Block, Buffer, Record


# ---------------------------------------------------------------- the wire format of protocol buffers
#
# Protobuf's wire format: varints, and the fields of a message, whose meaning the caller knows.
#
# See https://protobuf.dev/programming-guides/encoding/. Nothing here reads past the given bounds: a message that
# does not end where its length says raises `CorruptDataError`.


VARINT, I64, LEN, GROUP, END_GROUP, I32 = range(6)  # wire types
_MAX_VARINT_BYTES = 10
_UINT64_MAX = 2**64 - 1
_MAX_GROUP_DEPTH = 100  # the limit of protobuf's own parsers

# From these sizes on, numpy is faster than a loop (measured: about 90 numbers to write, 30 bytes to read).
_MANY_TO_PACK = 90
_MANY_BYTES_TO_UNPACK = 32
_BYTES_TO_UNPACK = 1 << 16

_WORDS = np.uint32, np.uint64  # that hold the bytes of a number
_MORE_FOLLOWS = 0x8080_8080_8080_8080  # the bits of its bytes that say so

_SMALL_VARINTS = [bytes([value]) for value in range(128)]


def varint(value: int) -> bytes:
    """Return a number from 0 to 2**64 - 1 as a varint: groups of seven bits, the lowest first."""
    if value < 128:
        return _SMALL_VARINTS[value]
    if value < 1 << 14:
        return bytes((value & 127 | 128, value >> 7))
    if value < 1 << 21:
        return bytes((value & 127 | 128, value >> 7 & 127 | 128, value >> 14))
    return bytes((value & 127 | 128,)) + varint(value >> 7)


def pack_varints(values: NDArray[np.int64]) -> bytes:
    """Return int64 numbers (n,) as a packed field; a negative one takes ten bytes."""
    if len(values) < _MANY_TO_PACK:
        return b"".join([varint(value & _UINT64_MAX) for value in values.tolist()])
    matrix, sizes = varint_matrix(values.astype("<i8", copy=False).view(np.uint64))
    return matrix[np.arange(matrix.shape[1]) < sizes[:, None]].tobytes()


def varint_sizes(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the length of the varint of each value, int64 (n,), for uint64 (n,) with n > 0."""
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
    found = bytes(data[start:stop])
    if found.isascii():  # each takes a byte
        return np.frombuffer(found, np.uint8).astype(np.int64)
    if stop - start < _MANY_BYTES_TO_UNPACK:
        values = []
        position = start
        while position < stop:
            value, position = read_varint(data, position, stop)
            values.append(value)
        return np.array(values, np.uint64).view(np.int64)
    raw = np.frombuffer(data, np.uint8, stop - start, start)
    ends = np.flatnonzero(raw < 128)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise CorruptDataError(f"the int64 list at byte {start} holds a number without an end")
    numbers = np.empty(len(ends), np.int64)
    _unpack(raw, ends, start, numbers)
    return numbers


def _unpack(raw: NDArray[np.uint8], ends: NDArray[np.int64], place: int, found: NDArray[np.int64]) -> None:
    """Write the numbers whose last bytes are at `ends` to `found`; `place` is for the error."""
    starts = np.zeros_like(ends)
    np.add(ends[:-1], 1, out=starts[1:])
    for word in _WORDS:
        # The bytes from each start as one number, minus those of the next ones: 3 ns per number instead of 50.
        size = np.dtype(word).itemsize
        padded = np.zeros(len(raw) + size, np.uint8)
        padded[: len(raw)] = raw
        # `take` copies unaligned numbers three times as fast as indexing.
        words = np.ndarray((len(raw),), word, padded.data, 0, (1,)).take(starts)
        last = ~words & word(_MORE_FOLLOWS >> 64 - 8 * size)
        if not last.all():  # one has more bytes
            continue
        words &= last - word(1)
        unpacked, most, index = words & word(127), int(words.max()), 1
        while most >> 8 * index:
            unpacked |= (words & word(127 << 8 * index)) >> word(index)
            index += 1
        found[:] = unpacked
        return
    sizes = ends - starts + 1
    if sizes.max() > _MAX_VARINT_BYTES:
        raise CorruptDataError(f"the int64 list at byte {place} holds a number without an end")
    shifts = (np.arange(len(raw)) - np.repeat(starts, sizes)).astype(np.uint64) * np.uint64(7)
    found[:] = np.bitwise_or.reduceat((raw & 127).astype(np.uint64) << shifts, starts).view(np.int64)


def fields(data: Buffer, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, begin, end) of each field of the message in data[start:stop]."""
    while start < stop:
        tag, begin = read_varint(data, start, stop)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise CorruptDataError(f"byte {start} starts a field with number {number}, which protobuf does not allow")
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
    """Return the end of a value that is not length-delimited."""
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
    if stop - start > 2:  # lengths of pictures have two or three bytes: a third of the loop's time
        first = data[start]
        if first < 128:
            return first, start + 1
        second = data[start + 1]
        if second < 128:
            return first & 127 | second << 7, start + 2
        third = data[start + 2]
        if third < 128:
            return first & 127 | (second & 127) << 7 | third << 14, start + 3
    value = 0
    for position in range(start, min(stop, start + _MAX_VARINT_BYTES)):
        byte = data[position]
        value |= (byte & 127) << 7 * (position - start)
        if byte < 128:
            return value & _UINT64_MAX, position + 1
    raise CorruptDataError(f"the number at byte {start} does not end within its {stop - start} bytes")


# ---------------------------------------------------------------- one record
#
# The wire format of `tf.train.Example`, written and read without TensorFlow or protobuf.
#
# A record is stored as this message (tensorflow/core/example/example.proto, feature.proto):
#
#     Example  { Features features = 1; }
#     Features { map<string, Feature> feature = 1; }        an entry is { string key = 1; Feature value = 2; }
#     Feature  { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }        each list is { repeated value = 1; }
#
# The bytes equal `SerializeToString(deterministic=True)` of protobuf's Python package: numbers packed, keys sorted by
# their UTF-8 bytes, except that a key follows the longer ones that start with it (`image/height`, `image`), as in
# protobuf's upb. The C++ package puts `image` first: any order is valid, none is canonical, and this one is fixed here.
# An empty list keeps the kind of its column, because TensorFlow refuses an empty list of another kind.
#
# This encoder takes one record and never copies a large value; `pack_block` takes many small records at once. The
# encoding is described at https://protobuf.dev/programming-guides/encoding/.


MAX_EXAMPLE_BYTES = 2**31 - 1
"""Longest message that protobuf parsers accept."""

_KIND_TAG = {
    "bytes": b"\x0a",
    "bytes_list": b"\x0a",
    "float32": b"\x12",
    "int64": b"\x1a",
}  # fields 1, 2 and 3 of Feature
_OF_BYTES = {"bytes", "bytes_list"}
_KIND_OF_FIELD: dict[int, Kind] = {1: "bytes", 2: "float32", 3: "int64"}
_KIND_OF_TAG: dict[int, Kind] = {field << 3 | LEN: kind for field, kind in _KIND_OF_FIELD.items()}
# Chunks up to this size are joined with their neighbours: copying them costs less than another CRC call.
# From this size on, rows are written one by one: that copies no value.
_LARGE_ROW_BYTES = 64 << 10
# Rows are packed this many bytes at a time, so that the matrix stays in cache (measured: 0.51 us per record of 120
# bytes, and 0.66 with all 20,000 at once), but at least as many rows at a time as make numpy's calls cheap.
_BLOCK_BYTES = 128 << 10
_FEW_ROWS = 32  # fewer take longer as a block than one by one: 0.4 ms or more, whatever their number
_LEAST_BLOCK_ROWS = 1000
_LARGE_BYTES = 1024


def encode_example(record: Record, columns: Mapping[str, Kind]) -> bytes:
    r"""Return one record as a serialized `tf.train.Example`.

    Args:
        record: one bytes value, a sequence of them, or a 1-D int64 or float32 array for each column.
        columns: kind of each column; the record holds exactly these.

    Raises:
        SchemaError: the record's columns or types differ from `columns`, or it exceeds 2 GiB.

    >>> encode_example({"key": b"a1"}, {"key": "bytes"})
    b'\n\x0f\n\r\n\x03key\x12\x06\n\x04\n\x02a1'
    """
    return b"".join(ExampleEncoder(columns).encode(record)[0])


@final
class ExampleEncoder:
    """Encodes records with the same columns, one at a time. Thread-safe: it keeps no state between records."""

    __slots__ = ("_entries", "_names")

    def __init__(self, columns: Mapping[str, Kind]) -> None:
        self._entries = [(column.name, _entry_of(column)) for column in sorted_columns(columns)]
        self._names = columns.keys()

    def encode(self, record: Record) -> tuple[list[bytes], int]:
        """Return the bytes of one record in pieces, large values uncopied, and their total length.

        Raises:
            SchemaError: as `encode_example`.
        """
        if record.keys() != self._names:
            raise SchemaError(differing_columns(record.keys(), self._names))
        pieces: list[bytes] = []
        for name, entry in self._entries:
            pieces += entry(record[name])
        size = sum(map(len, pieces))
        head = b"\x0a" + varint(size)
        total = len(head) + size
        if size < _LARGE_BYTES:
            return [b"".join((head, *pieces))], total
        if total > MAX_EXAMPLE_BYTES:
            raise SchemaError(
                f"the record makes a tf.train.Example of {total} bytes, but protobuf reads at most "
                f"{MAX_EXAMPLE_BYTES}; split the sample, encode it smaller, or store the path of its largest value"
            )
        found: list[bytes] = []
        small = [head]  # bytes before the next large value
        for piece in pieces:
            if len(piece) < _LARGE_BYTES:
                small.append(piece)
            else:
                found += (b"".join(small), piece)
                small = []
        if small:
            found.append(b"".join(small))
        return found, total


class ColumnPrefix(NamedTuple):
    """The bytes of a column that are the same in every record."""

    name: str
    kind: Kind
    key: bytes
    """The key field of the map entry and the tag of its value: the bytes before the length of the Feature."""
    tag: bytes
    """The tag of the list inside the Feature."""


def sorted_columns(columns: Mapping[str, Kind]) -> list[ColumnPrefix]:
    """Return the columns in the order of the map on the wire."""
    found = []
    for name, kind in columns.items():
        encoded = name.encode()
        column = ColumnPrefix(name, kind, b"\x0a" + varint(len(encoded)) + encoded + b"\x12", _KIND_TAG[kind])
        found.append((encoded + b"\xff", column))  # above UTF-8: a key sorts after its extensions
    return [column for _, column in sorted(found)]


@functools.lru_cache(maxsize=1024)  # the parts of a job have the same columns
def _entry_of(column: ColumnPrefix) -> Callable[[Any], Sequence[bytes]]:
    """Return the function from a value of a column to the pieces of its map entry."""
    name, kind, key, tag = column
    empty = _entry_heads(key, tag, 0)

    @functools.lru_cache(maxsize=256)
    def heads_of(size: int) -> bytes:
        """Return everything that precedes the content of the only field of a list."""
        field = b"\x0a" + varint(size)
        return _entry_heads(key, tag, len(field) + size) + field

    def of_bytes(value: Column) -> Sequence[bytes]:
        if isinstance(value, bytes):
            return heads_of(len(value)), value
        if isinstance(value, np.ndarray) or not isinstance(value, Sequence):
            raise SchemaError(wrong_value(name, kind, value))
        body: list[bytes] = []
        for item in value:
            if not isinstance(item, bytes):
                raise SchemaError(wrong_value(name, kind, value))
            body += (b"\x0a" + varint(len(item)), item)
        return _entry_heads(key, tag, sum(map(len, body))), *body

    if kind in _OF_BYTES:
        return of_bytes
    dtype, pack = DTYPE_OF_KIND[kind], np.ndarray.tobytes if kind == "float32" else pack_varints

    def of_numbers(value: Column) -> Sequence[bytes]:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
            raise SchemaError(wrong_value(name, kind, value))
        packed = pack(value)
        return (heads_of(len(packed)), packed) if packed else (empty,)

    return of_numbers


def _entry_heads(key: bytes, tag: bytes, list_size: int) -> bytes:
    """Return everything in a map entry that precedes the body of its list."""
    list_length = varint(list_size)
    feature_size = 1 + len(list_length) + list_size
    feature_length = varint(feature_size)
    entry_length = varint(len(key) + len(feature_length) + feature_size)
    return b"".join((b"\x0a", entry_length, key, feature_length, tag, list_length))


def decode_example(data: Buffer) -> dict[str, Column]:
    r"""Return the columns of a serialized `tf.train.Example` from any writer.

    Accepts fields in any order, packed and unpacked numbers, and unknown fields, as protobuf requires. A feature
    without a kind becomes an empty list.

    Returns:
        For each column a list of bytes, an int64 array (k,) or a float32 array (k,).

    Raises:
        CorruptDataError: the data is not a `tf.train.Example`.

    >>> decode_example(b"\n\x0f\n\r\n\x03key\x12\x06\n\x04\n\x02a1")
    {'key': [b'a1']}
    """
    buffer = data if isinstance(data, bytes) else memoryview(data)
    try:
        return _decode_canonical(buffer)
    except (_NotCanonicalError, IndexError, UnicodeDecodeError, CorruptDataError):
        return _decode_any(buffer)


class _NotCanonicalError(Exception):
    """The message is valid, or may be, but not in the form that `encode_example` writes."""


def _decode_canonical(data: Buffer) -> dict[str, Column]:
    """Decode the output of `encode_example`, several times as fast as `_decode_any`; a property test compares both."""
    columns: dict[str, Column] = {}
    position, stop = _span(data, 0, 0x0A, len(data))
    if stop != len(data):
        raise _NotCanonicalError
    while position < stop:
        if data[position + 1] < 128:  # so are all lengths in it
            name, read, begin, end = _short_entry(bytes(data[position : position + data[position + 3] + 10]))
            begin, end = position + begin, position + end
            if end > stop:
                raise _NotCanonicalError
        else:
            begin, end = _span(data, position, 0x0A, stop)
            key_begin, key_end = _span(data, begin, 0x0A, end)
            begin, feature_end = _span(data, key_end, 0x12, end)
            kind = _KIND_OF_TAG.get(data[begin])
            begin, list_end = _span(data, begin, data[begin], end)
            if kind is None or feature_end != end or list_end != end:
                raise _NotCanonicalError
            name, read = bytes(data[key_begin:key_end]).decode(), _CANONICAL_LIST[kind]
        columns[name] = read(data, begin, end)
        position = end
    return columns


# Cached, because parsing a head takes four times as long as finding one that was seen before.
@functools.lru_cache(maxsize=1 << 13)
def _short_entry(head: bytes) -> tuple[str, Callable[[Buffer, int, int], Column], int, int]:
    """Return the name of a column, the function that reads its value, begin and end of what that reads.

    Args:
        head: the beginning of a map entry of less than 128 bytes, up to the length of the first field in its list.
    """
    key_end = 4 + head[3]
    begin, kind, size = key_end + 4, _KIND_OF_TAG.get(head[key_end + 2]), head[key_end + 3]
    if kind is None or head[:begin] != _entry_heads(
        b"\x0a" + head[3:key_end] + b"\x12", head[key_end + 2 : key_end + 3], size
    ):
        raise _NotCanonicalError
    name, is_one = head[4:key_end].decode(), size > 1 and head[begin:] == bytes((0x0A, size - 2))
    if is_one:
        return name, _CANONICAL_FIELD[kind], begin + 2, begin + size
    return name, _CANONICAL_LIST[kind], begin, begin + size


def _span(data: Buffer, position: int, tag: int, stop: int) -> tuple[int, int]:
    """Return begin and end of the length-delimited field at `position`, which must have this tag and end by `stop`."""
    if data[position] != tag:
        raise _NotCanonicalError
    size = data[position + 1]
    begin = position + 2
    if size > 127:
        size, begin = read_varint(data, position + 1, stop)
    if begin + size > stop:
        raise _NotCanonicalError
    return begin, begin + size


def _canonical_list(kind: Kind, data: Buffer, begin: int, end: int) -> Column:
    """Return the values of a list: those of any number of fields of bytes, or of at most one of packed numbers."""
    if kind == "bytes":
        values = []
        while begin < end:
            start, begin = _span(data, begin, 0x0A, end)
            values.append(bytes(data[start:begin]))
        return values
    if begin == end:
        return np.empty(0, DTYPE_OF_KIND[kind])
    start, stop = _span(data, begin, 0x0A, end)
    if stop != end:
        raise _NotCanonicalError
    return _CANONICAL_FIELD[kind](data, start, stop)


def _floats(data: Buffer, start: int, stop: int) -> NDArray[np.float32]:
    if (stop - start) % 4:
        raise _NotCanonicalError
    return np.frombuffer(data, DTYPE_OF_KIND["float32"], (stop - start) // 4, start).astype(np.float32)


_CANONICAL_FIELD: dict[Kind, Callable[[Buffer, int, int], Column]] = {
    "bytes": lambda data, start, stop: [bytes(data[start:stop])],
    "float32": _floats,
    "int64": unpack_varints,
}
_CANONICAL_LIST: dict[Kind, Callable[[Buffer, int, int], Column]] = {
    kind: functools.partial(_canonical_list, kind) for kind in _CANONICAL_FIELD
}


def _decode_any(data: Buffer) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for number, wire_type, start, stop in fields(data, 0, len(data)):
        if (number, wire_type) != (1, LEN):
            continue
        for entry in fields(data, start, stop):
            if entry[:2] == (1, LEN):
                name, value = _decode_entry(data, *entry[2:])
                columns[name] = value
    return columns


def _decode_entry(data: Buffer, start: int, stop: int) -> tuple[str, Column]:
    name = b""
    kind: Kind | None = None
    lists: list[tuple[int, int]] = []
    for number, wire_type, begin, end in fields(data, start, stop):
        if (number, wire_type) == (1, LEN):
            name = bytes(data[begin:end])
        elif (number, wire_type) == (2, LEN):
            for field, list_type, *span in fields(data, begin, end):
                if list_type != LEN or field not in _KIND_OF_FIELD:
                    continue
                if _KIND_OF_FIELD[field] != kind:  # the last member of a oneof wins
                    kind, lists = _KIND_OF_FIELD[field], []
                lists.append((span[0], span[1]))
    try:
        return name.decode(), _decode_lists(data, kind, lists)
    except UnicodeDecodeError as exc:
        raise CorruptDataError(f"the column name {name[:80]!r} before byte {stop} is not UTF-8") from exc


def _decode_lists(data: Buffer, kind: Kind | None, lists: list[tuple[int, int]]) -> Column:
    spans = [
        (wire_type, begin, end)
        for start, stop in lists
        for number, wire_type, begin, end in fields(data, start, stop)
        if number == 1
    ]
    if kind == "float32":
        return _decode_floats(data, spans)
    if kind == "int64":
        return _decode_ints(data, spans)
    return [bytes(data[begin:end]) for wire_type, begin, end in spans if wire_type == LEN]


def _decode_floats(data: Buffer, spans: list[tuple[int, int, int]]) -> NDArray[np.float32]:
    found = []
    for wire_type, begin, end in spans:
        if wire_type not in (LEN, I32):
            continue
        if (end - begin) % 4:
            raise CorruptDataError(f"the float list at byte {begin} has {end - begin} bytes, not a multiple of 4")
        found.append(data[begin:end])
    return np.frombuffer(b"".join(found), "<f4").astype(np.float32)


def _decode_ints(data: Buffer, spans: list[tuple[int, int, int]]) -> NDArray[np.int64]:
    found = [unpack_varints(data, begin, end) for wire_type, begin, end in spans if wire_type in (LEN, VARINT)]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def differing_columns(found: Any, wanted: Any) -> str:
    """Return the message for a record or block whose columns are not the writer's."""
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    return (
        f"the record has the columns {sorted(found)}; want {sorted(wanted)}: missing {missing}, unknown {extra}; "
        f"give an empty list or array where a column has no value"
    )


def wrong_value(name: str, kind: Kind, value: Any, *, per_row: bool = False) -> str:
    """Return the message for a column with a value that does not match its kind."""
    found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
    if kind in _OF_BYTES:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            found += " of " + ", ".join(sorted({type(item).__name__ for item in itertools.islice(value, 1000)}))
        one = "a RaggedColumn of bytes" if kind == "bytes_list" else "one bytes value per row"
        wanted = one if per_row else "bytes or a sequence of bytes"
    else:
        wanted = f"a numpy array of {kind}, " + ("(n,) or (n, k), or a RaggedColumn" if per_row else "(k,)")
    return f"column {name!r} holds {found}; want {wanted}; convert it before appending"


# ---------------------------------------------------------------- many records at once
#
# Many small records at once: columns become `tf.train.Example` bytes without a loop over rows.
#
# All rows are laid out at full width in one uint8 matrix, each field at the same position in every row. A mask marks
# the bytes that belong to a row: a varint or string shorter than the longest in its column leaves a gap. The valid
# bytes, taken in row order, are the records back to back.
#
#     key "a1"  x 0.5   |..a1_..|..x.0000003f..|          "_" is a gap: not valid in this row
#     key "a12" x 0.25  |..a12..|..x.0000803e..|
#
# A column of long or very different values would make the matrix too wide. It stays a run of all values, and splits the
# matrix in two; then records are assembled from slices: matrix, value, matrix.
#
# The bytes are those of `encode_example`; a property test compares the two.


_WIDE_BYTES = 256  # average of a column's values above which slices cost less than masks

_Size: TypeAlias = "int | NDArray[np.int64]"
"""A length in bytes: one number for all rows, or int64 (n,)."""


class _Field(NamedTuple):
    """A stretch of bytes in every row."""

    data: bytes | NDArray[np.uint8]
    """The same bytes for all rows, or uint8 (n, width)."""
    valid: NDArray[np.bool_] | None = None
    """The bytes that belong to the row, bool (n, width); None for all."""

    @property
    def width(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.shape[1]


class _Run(NamedTuple):
    """A stretch of bytes in every row, stored one row after the other, since a matrix would be too wide."""

    data: bytes
    lengths: NDArray[np.int64]


_Layout: TypeAlias = "list[_Field | _Run]"


def check_block(columns: Block, kinds: Mapping[str, Kind]) -> int:
    """Return the number of rows of a block.

    Raises:
        SchemaError: a column is missing, unknown or of the wrong type, or columns differ in length.
    """
    if columns.keys() != kinds.keys():
        raise SchemaError(differing_columns(columns.keys(), kinds.keys()))
    num_rows = {name: len(values) for name, values in columns.items()}
    if len(set(num_rows.values())) > 1:
        raise SchemaError(f"the columns of a block differ in length: {num_rows}; give one value per row in each")
    for name, values in columns.items():
        if not is_block_of_kind(values, kinds[name]):
            raise SchemaError(wrong_value(name, kinds[name], values, per_row=True))
    return next(iter(num_rows.values()), 0)


def checked_record(record: Record, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Return a record with a plain bytes value in each bytes column, unpacked from the list that readers return.

    Raises:
        SchemaError: a column is missing, unknown or of the wrong type.
    """
    if record.keys() != kinds.keys():
        raise SchemaError(differing_columns(record.keys(), kinds.keys()))
    found = {}
    for name, value in record.items():
        kind = kinds[name]
        only: Any = value[0] if kind == "bytes" and isinstance(value, list) and len(value) == 1 else value
        if not is_of_kind(only, kind):
            raise SchemaError(wrong_value(name, kind, value))
        found[name] = only
    return found


def pack_block(
    columns: Block,
    kinds: Mapping[str, Kind],
    *,
    header: Callable[[NDArray[np.int64]], NDArray[np.uint8]],
    trailer_size: int,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Encode n rows, each between a header and room for a trailer.

    This takes several times the memory of the rows, so callers pass a few MB at a time.

    Args:
        columns: n > 0 rows that `check_block` accepts.
        kinds: kind of each column, by its name.
        header: function from the length of each row's Example, int64 (n,), to its header, uint8 (n, width).
        trailer_size: number of bytes to leave free after each row; their content is undefined.

    Returns:
        The rows back to back, uint8 (total,), and the length of each with header and trailer, int64 (n,).
    """
    num_rows = check_block(columns, kinds)
    fields: _Layout = []
    body: _Size = 0
    for column in sorted_columns(kinds):
        list_fields, list_size = _list_fields(column, columns[column.name])
        entry_fields, entry_size = _entry_fields(column, list_fields, list_size)
        fields += entry_fields
        body = body + entry_size
    fields = [_Field(b"\x0a"), _varint_field(body), *fields]
    sizes = np.broadcast_to(np.asarray(1 + _varint_size(body) + body, np.int64), (num_rows,))
    head = _Field(header(sizes))
    fields = [head, *fields, _Field(bytes(trailer_size))]
    return _lay_out(fields, num_rows), sizes + (head.width + trailer_size)


def buffers_of(columns: Block, kinds: Mapping[str, Kind], append: Callable[[Record], None]) -> Iterator[Block]:
    """Yield a block in pieces for packing; pass rows that are too few or too large for that to `append` instead.

    Raises:
        SchemaError: as `check_block`.
    """
    num_rows = check_block(columns, kinds)
    step = max(_LEAST_BLOCK_ROWS, _BLOCK_BYTES * num_rows // _num_bytes(columns))
    for start in range(0, num_rows, step):
        rows = {name: values[start : start + step] for name, values in columns.items()}
        if num_rows >= _FEW_ROWS and _num_bytes(rows) <= _LARGE_ROW_BYTES * min(step, num_rows - start):
            yield rows
        else:
            for row in rows_of(rows):
                append(row)


def encode_examples(columns: Block, kinds: Mapping[str, Kind]) -> Iterator[bytes]:
    """Yield each of n > 0 rows as an Example.

    Raises:
        SchemaError: the columns are not those of `kinds`.
    """
    packed, sizes = pack_block(columns, kinds, header=lambda sizes: np.empty((len(sizes), 0), np.uint8), trailer_size=0)
    yield from cut(packed.tobytes(), sizes)


def _num_bytes(columns: Block) -> int:
    """Estimate the bytes of a block in a file, at least 1."""
    return 1 + sum(_column_bytes(values) for values in columns.values())


def _column_bytes(values: NDArray[Any] | RaggedColumn | Sequence[bytes]) -> int:
    if isinstance(values, RaggedColumn):
        return _column_bytes(values.values.tolist() if values.values.dtype == object else values.values)
    return values.nbytes if isinstance(values, np.ndarray) else sum(map(len, values))


def _list_fields(column: ColumnPrefix, values: NDArray[Any] | RaggedColumn | Sequence[bytes]) -> tuple[_Layout, _Size]:
    """Return the body of each row's list as fields, and its length."""
    body: _Field | _Run
    size: _Size
    if isinstance(values, RawColumn):
        body, size = _raw_field(values)
    elif isinstance(values, RaggedColumn):
        return _lists_of_bytes(values) if column.kind == "bytes_list" else _ragged_fields(column.kind, values)
    elif not isinstance(values, np.ndarray):
        body, size = _bytes_field(values)
    else:
        rows = np.ascontiguousarray(values, DTYPE_OF_KIND.get(column.kind)).reshape(len(values), -1)
        if not rows.shape[1]:
            return [], 0
        if column.kind == "int64":
            body, size = _int64_field(rows)
        elif (size := rows.itemsize * rows.shape[1]) > _WIDE_BYTES:
            body = _Run(rows.tobytes(), np.full(len(rows), size))
        else:
            body = _Field(rows.view(np.uint8))
    return [_Field(b"\x0a"), _varint_field(size), body], 1 + _varint_size(size) + size


def _lists_of_bytes(column: RaggedColumn) -> tuple[_Layout, _Size]:
    """Return the body of a list of bytes of any length, each with its tag and length."""
    bodies = [b"\x0a" + varint(len(value)) + value for value in column.values.tolist()]
    ends = np.concatenate([[0], np.cumsum(np.fromiter(map(len, bodies), np.int64, len(bodies)))])
    lengths = np.diff(ends[np.concatenate([[0], np.cumsum(column.lengths)])])
    return [_run_or_field(b"".join(bodies), lengths)], lengths


def _ragged_fields(kind: Kind, column: RaggedColumn) -> tuple[_Layout, _Size]:
    """Return the body of a list of numbers of any length; empty for no numbers."""
    if kind == "float32":
        data, lengths = np.ascontiguousarray(column.values, DTYPE_OF_KIND[kind]).tobytes(), 4 * column.lengths
    elif len(column.values):
        matrix, sizes = varint_matrix(np.ascontiguousarray(column.values, DTYPE_OF_KIND[kind]).view(np.uint64))
        data = matrix[np.arange(matrix.shape[1]) < sizes[:, None]].tobytes()
        ends = np.concatenate([[0], np.cumsum(sizes)])[np.cumsum(column.lengths)]
        lengths = np.diff(ends, prepend=0)
    else:
        data, lengths = b"", column.lengths
    filled = (lengths > 0)[:, None]
    matrix, sizes = varint_matrix(lengths.view(np.uint64))
    heads = [
        _Field(np.full((len(column), 1), 0x0A, np.uint8), filled),
        _Field(matrix, filled & (np.arange(matrix.shape[1]) < sizes[:, None])),
    ]
    return [*heads, _run_or_field(data, lengths)], lengths + filled[:, 0] * (1 + sizes)


def _entry_fields(column: ColumnPrefix, list_fields: _Layout, list_size: _Size) -> tuple[_Layout, _Size]:
    """Return the fields of a list after the heads of its map entry; the block form of `_entry_heads`."""
    feature_size = 1 + _varint_size(list_size) + list_size
    entry_size = len(column.key) + _varint_size(feature_size) + feature_size
    heads: _Layout = [
        _Field(b"\x0a"),
        _varint_field(entry_size),
        _Field(column.key),
        _varint_field(feature_size),
        _Field(column.tag),
        _varint_field(list_size),
    ]
    return heads + list_fields, 1 + _varint_size(entry_size) + entry_size


def _raw_field(column: RawColumn) -> tuple[_Field | _Run, _Size]:
    data, lengths = column.values.tobytes(), column.lengths * column.values.itemsize
    if (width := int(lengths[0])) and (lengths == width).all():
        is_run = width > _WIDE_BYTES
        return _Run(data, lengths) if is_run else _Field(np.frombuffer(data, np.uint8).reshape(-1, width)), width
    return _run_or_field(data, lengths), lengths


def _bytes_field(values: Sequence[bytes]) -> tuple[_Field | _Run, _Size]:
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    width = int(lengths.max())
    if not width:
        return _Field(b""), 0
    if _is_wide(lengths):
        return _Run(b"".join(values), lengths), width if lengths.min() == width else lengths
    # numpy pads with NULs and strips them only from items, so the raw bytes are the values.
    matrix = np.array(values, dtype=f"S{width}").view(np.uint8).reshape(-1, width)
    return _trimmed(matrix, lengths)


def _is_wide(lengths: NDArray[np.int64]) -> bool:
    """Return True if values of these lengths would make a matrix of mostly gaps, or one that takes long to copy."""
    width, total = int(lengths.max()), int(lengths.sum())
    return total > _WIDE_BYTES * len(lengths) or width * len(lengths) > 2 * total + 64 * len(lengths)


def _run_or_field(data: bytes, lengths: NDArray[np.int64]) -> _Field | _Run:
    """Return concatenated values of these lengths as a stretch of the rows."""
    if _is_wide(lengths):
        return _Run(data, lengths)
    valid = np.arange(int(lengths.max())) < lengths[:, None]
    matrix = np.zeros(valid.shape, np.uint8)
    matrix[valid] = np.frombuffer(data, np.uint8)
    return _Field(matrix, valid)


def _int64_field(rows: NDArray[np.int64]) -> tuple[_Field, _Size]:
    num_rows, num_values = rows.shape
    matrix, sizes = varint_matrix(rows.view(np.uint64).ravel())
    if num_values == 1:
        return _trimmed(matrix, sizes)
    valid = (np.arange(matrix.shape[1]) < sizes[:, None]).reshape(num_rows, -1)
    return _Field(matrix.reshape(num_rows, -1), valid), sizes.reshape(rows.shape).sum(axis=1)


def _varint_field(size: _Size) -> _Field:
    if isinstance(size, int):
        return _Field(varint(size))
    return _trimmed(*varint_matrix(size.view(np.uint64)))[0]


def _trimmed(matrix: NDArray[np.uint8], lengths: NDArray[np.int64]) -> tuple[_Field, _Size]:
    """Return the first `lengths` bytes of each row as a field; equal lengths become one number."""
    width = matrix.shape[1]
    if lengths.min() == width:
        return _Field(matrix), width
    return _Field(matrix, np.arange(width) < lengths[:, None]), lengths


def _varint_size(size: _Size) -> _Size:
    return len(varint(size)) if isinstance(size, int) else varint_sizes(size.view(np.uint64))


def _lay_out(fields: _Layout, num_rows: int) -> NDArray[np.uint8]:
    """Write the fields side by side and return the valid bytes, row by row, in a writable array."""
    groups = [(kind, list(some)) for kind, some in itertools.groupby(fields, type)]
    if len(groups) == 1:
        return _matrix(cast("list[_Field]", fields), num_rows)[0]
    pieces: list[list[bytes]] = []
    for kind, some in groups:
        if kind is _Run:
            pieces += (cut(run.data, run.lengths) for run in cast("list[_Run]", some))
        else:
            found, lengths = _matrix(cast("list[_Field]", some), num_rows)
            pieces.append(cut(found.tobytes(), lengths))
    joined = bytearray().join(itertools.chain.from_iterable(zip(*pieces, strict=True)))
    return np.frombuffer(joined, np.uint8)


def _matrix(fields: list[_Field], num_rows: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the valid bytes of some fields, row by row, and their number per row, int64 (n,)."""
    width = sum(field.width for field in fields)
    rows = np.empty((num_rows, width), np.uint8)
    valid = None if all(field.valid is None for field in fields) else np.ones((num_rows, width), np.bool_)
    start = 0
    for field in fields:
        stop = start + field.width
        rows[:, start:stop] = np.frombuffer(field.data, np.uint8) if isinstance(field.data, bytes) else field.data
        if field.valid is not None and valid is not None:
            valid[:, start:stop] = field.valid
        start = stop
    if valid is None:
        return rows.ravel(), np.full(num_rows, width)
    return rows.ravel()[valid.ravel()], valid.sum(axis=1)


# ---------------------------------------------------------------- many records at once, read
#
# The canonical form again, without a loop over rows: one cursor per row moves over the fields, which are in the same
# order in all rows. If a row has any other form, valid or not, the records of the block are decoded one by one, which
# reads every form and reports damage.


_MOST_LENGTH_BYTES = 5  # of the varint of a length below 2**31


def decode_block(
    data: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64], kinds: Mapping[str, Kind]
) -> dict[str, RaggedColumn | list[bytes]] | None:
    r"""Return columns of n serialized `tf.train.Example`s; None unless all are in the form of `encode_example`.

    Args:
        data: bytes that contain the messages, with anything between them.
        starts: int64 (n,), the first byte of each.
        stops: int64 (n,), the byte after each.
        kinds: the kind of each wanted column; bytes columns have one value in each row.

    >>> one = b"\n\x0f\n\r\n\x03key\x12\x06\n\x04\n\x02a1"
    >>> decode_block(one + one, np.array([0, 17]), np.array([17, 34]), {"key": "bytes"})
    {'key': [b'a1', b'a1']}
    """
    raw = np.frombuffer(data, np.uint8)
    try:
        position, ends = _block_spans(raw, starts, b"\x0a")
        _insist(ends == stops)
        columns: dict[str, RaggedColumn | list[bytes]] = {}
        for column in sorted_columns(kinds):
            begin, entry_end = _block_spans(raw, position, b"\x0a")
            while not data.startswith(column.key, int(begin[0])):
                position = _behind_others(data, raw, begin, entry_end)
                _insist(position < stops)
                begin, entry_end = _block_spans(raw, position, b"\x0a")
            begin, feature_end = _block_spans(raw, begin, column.key)
            begin, list_end = _block_spans(raw, begin, column.tag)
            _insist((feature_end == entry_end) & (list_end == entry_end))
            columns[column.name] = _block_column(data, raw, column.kind, begin, list_end)
            position = entry_end
        while (position < stops).any():
            _insist(position < stops)
            position = _behind_others(data, raw, *_block_spans(raw, position, b"\x0a"))
        _insist(position == stops)
    except (_NotCanonicalError, IndexError, CorruptDataError):
        return None
    return columns


def _behind_others(
    data: bytes, raw: NDArray[np.uint8], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Skip an unwanted entry, which must be of the same column in all rows; return its end in each row."""
    first = int(begin[0])
    size = raw[first + 1]
    _insist(np.asarray(size < 128))
    _, feature_end = _block_spans(raw, begin, data[first : first + 3 + int(size)])  # the key, and the tag of its value
    _insist(feature_end == end)
    return end


def _insist(holds: NDArray[np.bool_]) -> None:
    if not holds.all():
        raise _NotCanonicalError


def _block_spans(
    raw: NDArray[np.uint8], position: NDArray[np.int64], head: bytes
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return begin and end of the bytes after a common head and a length in each row; the block form of `_span`."""
    for byte in head:
        _insist(raw[position] == byte)
        position = position + 1
    size = raw[position].astype(np.int64)
    position = position + 1
    if (size > 127).any():
        more, shift = size > 127, 7
        size &= 127
        while more.any():
            if shift == 7 * _MOST_LENGTH_BYTES:
                raise _NotCanonicalError
            byte_here = np.where(more, raw[np.where(more, position, 0)], 0).astype(np.int64)
            size |= (byte_here & 127) << shift
            position = position + more
            more, shift = byte_here > 127, shift + 7
    return position, position + size


def _block_column(
    data: bytes, raw: NDArray[np.uint8], kind: Kind, begin: NDArray[np.int64], end: NDArray[np.int64]
) -> RaggedColumn | list[bytes]:
    if kind == "bytes":
        start, stop = _block_spans(raw, begin, b"\x0a")
        _insist(stop == end)
        return [data[one:other] for one, other in zip(start.tolist(), stop.tolist(), strict=True)]
    if kind == "bytes_list":
        # A loop is as fast as a cursor here: each value is a separate object.
        rows = [
            _canonical_list("bytes", data, one, other) for one, other in zip(begin.tolist(), end.tolist(), strict=True)
        ]
        values = bytes_array([value for row in rows for value in row])
        return RaggedColumn(values, np.fromiter(map(len, rows), np.int64, len(rows)))
    filled = begin < end  # an empty list has no packed field
    start = stop = end
    if filled.all():
        start, stop = _block_spans(raw, begin, b"\x0a")
    elif filled.any():
        start, stop = end.copy(), end.copy()
        start[filled], stop[filled] = _block_spans(raw, begin[filled], b"\x0a")
    _insist(stop == end)
    lengths = stop - start
    found = joined_spans(raw, start, lengths)
    if kind == "int64":
        return _unpacked_rows(found, lengths)
    _insist(lengths % 4 == 0)
    return RaggedColumn(found.view("<f4"), lengths // 4)


def _unpacked_rows(raw: NDArray[np.uint8], lengths: NDArray[np.int64]) -> RaggedColumn:
    """Return the numbers of consecutive packed fields; the block form of `unpack_varints`."""
    row_ends = np.cumsum(lengths)
    is_last = raw < 128
    filled = lengths > 0
    _insist(is_last[row_ends[filled] - 1])
    if is_last.all():
        return RaggedColumn(raw.astype(np.int64), lengths)
    ends = np.flatnonzero(is_last)
    counts = np.diff(np.searchsorted(ends, row_ends), prepend=0)
    # Some at a time: the temporary arrays take ten times the bytes, and should stay in cache.
    cuts = np.searchsorted(ends, np.arange(_BYTES_TO_UNPACK, len(raw), _BYTES_TO_UNPACK)) + 1
    found, start = np.empty(len(ends), np.int64), 0
    for first, last in itertools.pairwise(sorted({0, *cuts.tolist(), len(ends)})):  # the last number may also be cut
        stop = int(ends[last - 1]) + 1
        _unpack(raw[start:stop], ends[first:last] - start, start, found[first:last])
        start = stop
    return RaggedColumn(found, counts)
