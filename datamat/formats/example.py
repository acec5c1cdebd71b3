"""The wire format of `tf.train.Example`, written and read without TensorFlow and without protobuf.

A record is stored as this message (tensorflow/core/example/example.proto, feature.proto):

    Example  { Features features = 1; }
    Features { map<string, Feature> feature = 1; }        an entry is { string key = 1; Feature value = 2; }
    Feature  { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }        each list is { repeated value = 1; }

The bytes equal `SerializeToString(deterministic=True)`: keys sorted by their UTF-8 bytes, numbers packed. A list
without values keeps the kind of its column, because TensorFlow refuses an empty list of another kind.

This encoder takes one record and never copies a large value; `block.pack_block` does many small ones at once. The
encoding itself is described at https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from datamat.errors import CorruptDataError, SchemaError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from datamat.formats import Buffer, ColumnKind, Record, Value

__all__ = ["ExampleEncoder", "decode_example", "encode_example"]

MAX_EXAMPLE_BYTES = 2**31 - 1
"""Protobuf parsers refuse a longer message."""

KIND_TAG = {"bytes": b"\x0a", "float32": b"\x12", "int64": b"\x1a"}  # fields 1, 2 and 3 of Feature
_KIND_OF_FIELD: dict[int, ColumnKind] = {1: "bytes", 2: "float32", 3: "int64"}
DTYPE: dict[ColumnKind, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
_VARINT, _I64, _LEN, _GROUP, _END_GROUP, _I32 = range(6)  # wire types
_MAX_VARINT_BYTES = 10
_MAX_GROUP_DEPTH = 100  # what protobuf's own parsers allow

# From here on numpy is faster than a loop over the numbers (measured: 24 values for writing, 30 for reading).
_MANY_INTS = 24

_SMALL_VARINTS = [bytes([value]) for value in range(128)]


def encode_example(record: Record, columns: Mapping[str, ColumnKind]) -> bytes:
    r"""Return one record as a serialized `tf.train.Example`.

    Args:
        record: for each column a bytes value, a sequence of them, or a 1-D int64 or float32 array.
        columns: the kind of each column; the record holds exactly these.

    Raises:
        SchemaError: the record's columns or types differ from `columns`, or it is over 2 GiB.

    >>> encode_example({"key": b"a1"}, {"key": "bytes"})
    b'\n\x0f\n\r\n\x03key\x12\x06\n\x04\n\x02a1'
    """
    return b"".join(ExampleEncoder(columns).encode(record)[0])


@final
class ExampleEncoder:
    """Encodes records with the same columns, one at a time. Thread-safe, without state between records."""

    __slots__ = ("_columns", "_names")

    def __init__(self, columns: Mapping[str, ColumnKind]) -> None:
        self._columns = sorted_columns(columns)
        self._names = columns.keys()

    def encode(self, record: Record) -> tuple[list[bytes], int]:
        """Return the bytes of one record in pieces, large values uncopied, and their total length.

        Raises:
            SchemaError: as `encode_example`.
        """
        if record.keys() != self._names:
            raise SchemaError(differing_columns(record.keys(), self._names))
        pieces = [b""]
        total = 0
        for column in self._columns:
            start = len(pieces)
            pieces.append(b"")  # the heads, known once the length of the list is
            list_size = _append_list(pieces, column, record[column.name])
            heads = _entry_heads(column, list_size)
            pieces[start] = heads + pieces[start]
            total += len(heads) + list_size
        pieces[0] = b"\x0a" + varint(total)
        total += len(pieces[0])
        if total > MAX_EXAMPLE_BYTES:
            raise SchemaError(
                f"the record makes a tf.train.Example of {total} bytes, but protobuf reads no more than "
                f"{MAX_EXAMPLE_BYTES}; split the sample, encode it smaller, or store the path of its largest value"
            )
        return pieces, total


class Column(NamedTuple):
    name: str
    kind: ColumnKind
    key: bytes
    """The key field of the map entry and the tag of its value: what comes before the Feature's length."""


def sorted_columns(columns: Mapping[str, ColumnKind]) -> list[Column]:
    found = []
    for name, kind in columns.items():
        encoded = name.encode()
        found.append((encoded, Column(name, kind, b"\x0a" + varint(len(encoded)) + encoded + b"\x12")))
    return [column for _, column in sorted(found)]


def _append_list(pieces: list[bytes], column: Column, value: Value) -> int:
    """Append the body of a BytesList, FloatList or Int64List to the pieces and return its length.

    The last piece so far belongs to the heads of the column; the tag of a first value is added to it.
    """
    if column.kind != "bytes":
        return _append_numbers(pieces, column, value)
    values = (value,) if isinstance(value, bytes) else value
    if isinstance(values, np.ndarray) or not isinstance(values, Sequence):
        raise SchemaError(wrong_value(column.name, column.kind, value))
    size = 0
    for item in values:
        if not isinstance(item, bytes):
            raise SchemaError(wrong_value(column.name, column.kind, value))
        tag = b"\x0a" + varint(len(item))
        pieces[-1] += tag
        pieces.append(item)
        size += len(tag) + len(item)
        if len(values) > 1:
            pieces.append(b"")
    return size


def _append_numbers(pieces: list[bytes], column: Column, value: Value) -> int:
    dtype = DTYPE[column.kind]
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
        raise SchemaError(wrong_value(column.name, column.kind, value))
    if not len(value):
        return 0
    packed = value.tobytes() if column.kind == "float32" else _pack_int64(value)
    pieces[-1] += b"\x0a" + varint(len(packed))
    size = len(pieces[-1]) + len(packed)
    pieces.append(packed)
    return size


def _entry_heads(column: Column, list_size: int) -> bytes:
    """Return everything of a map entry that comes before the body of its list."""
    list_length = varint(list_size)
    feature_size = 1 + len(list_length) + list_size
    feature_length = varint(feature_size)
    entry_length = varint(len(column.key) + len(feature_length) + feature_size)
    return b"".join((b"\x0a", entry_length, column.key, feature_length, KIND_TAG[column.kind], list_length))


def varint(value: int) -> bytes:
    if value < 128:
        return _SMALL_VARINTS[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _pack_int64(values: NDArray[np.int64]) -> bytes:
    unsigned = values.astype("<i8", copy=False).view(np.uint64)  # negative numbers take ten bytes, as protobuf has it
    if len(values) < _MANY_INTS:
        return b"".join(map(varint, unsigned.tolist()))
    matrix, sizes = varint_matrix(unsigned)
    return matrix[np.arange(matrix.shape[1]) < sizes[:, None]].tobytes()


def varint_sizes(values: NDArray[np.uint64]) -> NDArray[np.int64]:
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


def decode_example(data: Buffer) -> dict[str, Value]:
    r"""Return the columns of a serialized `tf.train.Example` from any writer.

    Fields in any order, packed and unpacked numbers and unknown fields are accepted, as protobuf asks. A feature whose
    kind is unset gives an empty list.

    Returns:
        For each column a list of bytes, an int64 array (k,) or a float32 array (k,).

    Raises:
        CorruptDataError: the data is not such a message.

    >>> decode_example(b"\n\x0f\n\r\n\x03key\x12\x06\n\x04\n\x02a1")
    {'key': [b'a1']}
    """
    buffer = data if isinstance(data, bytes) else memoryview(data)
    columns: dict[str, Value] = {}
    for number, wire_type, start, stop in _fields(buffer, 0, len(buffer)):
        if (number, wire_type) != (1, _LEN):
            continue
        for entry in _fields(buffer, start, stop):
            if entry[:2] == (1, _LEN):
                name, value = _decode_entry(buffer, *entry[2:])
                columns[name] = value
    return columns


def _decode_entry(data: Buffer, start: int, stop: int) -> tuple[str, Value]:
    name = b""
    kind: ColumnKind | None = None
    lists: list[tuple[int, int]] = []
    for number, wire_type, begin, end in _fields(data, start, stop):
        if (number, wire_type) == (1, _LEN):
            name = bytes(data[begin:end])
        elif (number, wire_type) == (2, _LEN):
            for field, list_type, *span in _fields(data, begin, end):
                if list_type != _LEN or field not in _KIND_OF_FIELD:
                    continue
                if _KIND_OF_FIELD[field] != kind:  # of a oneof, the last one that is set counts
                    kind, lists = _KIND_OF_FIELD[field], []
                lists.append((span[0], span[1]))
    try:
        return name.decode(), _decode_lists(data, kind, lists)
    except UnicodeDecodeError as exc:
        raise CorruptDataError(f"the column name {name[:80]!r} before byte {stop} is not UTF-8") from exc


def _decode_lists(data: Buffer, kind: ColumnKind | None, lists: list[tuple[int, int]]) -> Value:
    spans = [
        (wire_type, begin, end)
        for start, stop in lists
        for number, wire_type, begin, end in _fields(data, start, stop)
        if number == 1
    ]
    if kind == "float32":
        return _decode_floats(data, spans)
    if kind == "int64":
        return _decode_ints(data, spans)
    return [bytes(data[begin:end]) for wire_type, begin, end in spans if wire_type == _LEN]


def _decode_floats(data: Buffer, spans: list[tuple[int, int, int]]) -> NDArray[np.float32]:
    found = []
    for wire_type, begin, end in spans:
        if wire_type not in (_LEN, _I32):
            continue
        if (end - begin) % 4:
            raise CorruptDataError(f"the float list at byte {begin} has {end - begin} bytes, which is no multiple of 4")
        found.append(data[begin:end])
    return np.frombuffer(b"".join(found), "<f4").astype(np.float32)


def _decode_ints(data: Buffer, spans: list[tuple[int, int, int]]) -> NDArray[np.int64]:
    found = [_unpack_varints(data, begin, end) for wire_type, begin, end in spans if wire_type in (_LEN, _VARINT)]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _unpack_varints(data: Buffer, start: int, stop: int) -> NDArray[np.int64]:
    if stop - start < _MANY_INTS:
        values = []
        position = start
        while position < stop:
            value, position = _read_varint(data, position, stop)
            values.append(value)
        return np.array(values, np.uint64).view(np.int64)
    raw = np.frombuffer(data, np.uint8, stop - start, start)
    ends = np.flatnonzero(raw < 128)
    if not len(ends) or ends[-1] != len(raw) - 1 or (lengths := np.diff(ends, prepend=-1)).max() > _MAX_VARINT_BYTES:
        raise CorruptDataError(f"the int64 list at byte {start} holds a number that does not end")
    starts = ends - lengths + 1
    shifts = (np.arange(len(raw)) - np.repeat(starts, lengths)).astype(np.uint64) * np.uint64(7)
    return np.bitwise_or.reduceat((raw & 127).astype(np.uint64) << shifts, starts).view(np.int64)


def _fields(data: Buffer, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, begin, end) of each field of the message in data[start:stop]."""
    while start < stop:
        tag, begin = _read_varint(data, start, stop)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise CorruptDataError(f"byte {start} starts a field with number {number}, which protobuf doesn't allow")
        if wire_type == _LEN:
            size, begin = _read_varint(data, begin, stop)
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
    if wire_type == _VARINT:
        return _read_varint(data, begin, stop)[1]
    if wire_type in (_I32, _I64):
        return begin + (4 if wire_type == _I32 else 8)
    if wire_type == _GROUP and depth < _MAX_GROUP_DEPTH:
        return _skip_group(data, begin, stop, tag >> 3, depth=depth + 1)
    raise CorruptDataError(f"the field before byte {begin} has the wire type {wire_type} where none is allowed")


def _skip_group(data: Buffer, begin: int, stop: int, number: int, *, depth: int) -> int:
    while begin < stop:
        tag, begin = _read_varint(data, begin, stop)
        if tag == number << 3 | _END_GROUP:
            return begin
        if tag & 7 == _LEN:
            size, begin = _read_varint(data, begin, stop)
            begin += size
        else:
            begin = _skip_value(data, begin, stop, tag, depth=depth)
    raise CorruptDataError(f"the group with field number {number} has no end before byte {stop}")


def _read_varint(data: Buffer, start: int, stop: int) -> tuple[int, int]:
    """Return the number at `start` and the position after it; bits over 64 are dropped, as protobuf does."""
    value = 0
    for position in range(start, min(stop, start + _MAX_VARINT_BYTES)):
        byte = data[position]
        value |= (byte & 127) << 7 * (position - start)
        if byte < 128:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position + 1
    raise CorruptDataError(f"the number at byte {start} does not end within its {stop - start} bytes")


def differing_columns(found: Any, wanted: Any) -> str:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    return (
        f"the record has the columns {sorted(found)}, wanted are {sorted(wanted)}: missing {missing}, unknown {extra}; "
        f"give an empty list or array where a column has no value"
    )


def wrong_value(name: str, kind: ColumnKind, value: Any, *, per_row: bool = False) -> str:
    found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
    if kind == "bytes":
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            found += " of " + ", ".join(sorted({type(item).__name__ for item in itertools.islice(value, 1000)}))
        wanted = "one bytes value per row" if per_row else "bytes or a sequence of bytes"
    else:
        wanted = f"a numpy array of {kind}, " + ("(n,) or (n, k)" if per_row else "(k,)")
    return f"column {name!r} holds {found}, wanted is {wanted}; convert it before it is appended"
