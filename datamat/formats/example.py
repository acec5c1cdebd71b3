"""The wire format of `tf.train.Example`, written and read without TensorFlow and without protobuf.

A record is stored as this message (tensorflow/core/example/example.proto, feature.proto):

    Example  { Features features = 1; }
    Features { map<string, Feature> feature = 1; }        an entry is { string key = 1; Feature value = 2; }
    Feature  { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }        each list is { repeated value = 1; }

The bytes equal `SerializeToString(deterministic=True)` of protobuf's Python package: numbers packed, keys sorted by
their UTF-8 bytes, but a key after those that it begins (`image/height`, `image`), as protobuf's upb has it. The C++
package puts `image` first: no order is canonical, any order is valid, and this one is fixed here. A list without
values keeps the kind of its column, because TensorFlow refuses an empty list of another kind.

This encoder takes one record and never copies a large value; `block.pack_block` does many small ones at once. The
encoding itself is described at https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from datamat.errors import CorruptDataError, SchemaError
from datamat.formats.wire import I32, LEN, VARINT, fields, pack_varints, read_varint, unpack_varints, varint

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from datamat.formats import Buffer, ColumnKind, Record, Value

__all__ = ["ExampleEncoder", "decode_example", "encode_example"]

MAX_EXAMPLE_BYTES = 2**31 - 1
"""Protobuf parsers refuse a longer message."""

_KIND_TAG = {"bytes": b"\x0a", "float32": b"\x12", "int64": b"\x1a"}  # fields 1, 2 and 3 of Feature
_KIND_OF_FIELD: dict[int, ColumnKind] = {1: "bytes", 2: "float32", 3: "int64"}
_KIND_OF_TAG: dict[int, ColumnKind] = {field << 3 | LEN: kind for field, kind in _KIND_OF_FIELD.items()}
# Chunks up to this size are joined with their neighbours: a copy costs less than one more CRC call.
_LARGE_BYTES = 1024
DTYPE: dict[ColumnKind, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}


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
        pieces: list[bytes] = []
        small: list[bytes] = []  # what comes before the next large value
        for column in self._columns:
            body = _list_body(column, record[column.name])
            small.append(_entry_heads(column.key, column.tag, sum(map(len, body))))
            for chunk in body:
                if len(chunk) < _LARGE_BYTES:
                    small.append(chunk)
                else:
                    pieces += (b"".join(small), chunk)
                    small = []
        if small:
            pieces.append(b"".join(small))
        size = sum(map(len, pieces))
        head = b"\x0a" + varint(size)
        total = len(head) + size
        pieces[:1] = [head + pieces[0]] if pieces else [head]
        if total > MAX_EXAMPLE_BYTES:
            raise SchemaError(
                f"the record makes a tf.train.Example of {total} bytes, but protobuf reads no more than "
                f"{MAX_EXAMPLE_BYTES}; split the sample, encode it smaller, or store the path of its largest value"
            )
        return pieces, total


class Column(NamedTuple):
    """What is the same in every record of one column."""

    name: str
    kind: ColumnKind
    key: bytes
    """The key field of the map entry and the tag of its value: what comes before the Feature's length."""
    tag: bytes
    """The tag of the list inside the Feature."""


def sorted_columns(columns: Mapping[str, ColumnKind]) -> list[Column]:
    """Return the columns in the order that the map has on the wire."""
    found = []
    for name, kind in columns.items():
        encoded = name.encode()
        column = Column(name, kind, b"\x0a" + varint(len(encoded)) + encoded + b"\x12", _KIND_TAG[kind])
        found.append((encoded + b"\xff", column))  # no UTF-8 byte is that high: it puts a key behind its extensions
    return [column for _, column in sorted(found)]


def _list_body(column: Column, value: Value) -> list[bytes]:
    """Return the BytesList, FloatList or Int64List of a value: for each field its tag and length, then its bytes."""
    if column.kind == "bytes":
        return _bytes_body(column, value)
    if not isinstance(value, np.ndarray) or value.dtype != DTYPE[column.kind] or value.ndim != 1:
        raise SchemaError(wrong_value(column.name, column.kind, value))
    if not len(value):
        return []
    packed = value.tobytes() if column.kind == "float32" else pack_varints(value)
    return [b"\x0a" + varint(len(packed)), packed]


def _bytes_body(column: Column, value: Value) -> list[bytes]:
    if isinstance(value, bytes):
        return [b"\x0a" + varint(len(value)), value]
    if isinstance(value, np.ndarray) or not isinstance(value, Sequence):
        raise SchemaError(wrong_value(column.name, column.kind, value))
    body: list[bytes] = []
    for item in value:
        if not isinstance(item, bytes):
            raise SchemaError(wrong_value(column.name, column.kind, value))
        body += (b"\x0a" + varint(len(item)), item)
    return body


def _entry_heads(key: bytes, tag: bytes, list_size: int) -> bytes:
    """Return everything of a map entry that comes before the body of its list."""
    list_length = varint(list_size)
    feature_size = 1 + len(list_length) + list_size
    feature_length = varint(feature_size)
    entry_length = varint(len(key) + len(feature_length) + feature_size)
    return b"".join((b"\x0a", entry_length, key, feature_length, tag, list_length))


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
    try:
        return _decode_canonical(buffer)
    except (_NotCanonicalError, IndexError, UnicodeDecodeError, CorruptDataError):
        return _decode_any(buffer)


class _NotCanonicalError(Exception):
    """The message is not in the one form that our encoder writes."""


def _decode_canonical(data: Buffer) -> dict[str, Value]:
    """Decode what `encode_example` writes, four times as fast as `_decode_any`, which a property test holds it to."""
    columns: dict[str, Value] = {}
    position, stop = _span(data, 0, 0x0A, len(data))
    if stop != len(data):
        raise _NotCanonicalError
    while position < stop:
        begin, end = _span(data, position, 0x0A, stop)
        key_begin, key_end = _span(data, begin, 0x0A, end)
        begin, feature_end = _span(data, key_end, 0x12, end)
        kind = _KIND_OF_TAG.get(data[begin])
        begin, list_end = _span(data, begin, data[begin], end)
        if kind is None or feature_end != end or list_end != end:
            raise _NotCanonicalError
        name = bytes(data[key_begin:key_end]).decode()
        columns[name] = _CANONICAL_LIST[kind](data, begin, end)
        position = end
    return columns


def _span(data: Buffer, position: int, tag: int, stop: int) -> tuple[int, int]:
    """Return begin and end of the length-delimited field at `position`, which has this tag and ends by `stop`."""
    if data[position] != tag:
        raise _NotCanonicalError
    size = data[position + 1]
    begin = position + 2
    if size > 127:
        size, begin = read_varint(data, position + 1, stop)
    if begin + size > stop:
        raise _NotCanonicalError
    return begin, begin + size


def _canonical_bytes(data: Buffer, begin: int, end: int) -> list[bytes]:
    values = []
    while begin < end:
        start, begin = _span(data, begin, 0x0A, end)
        values.append(bytes(data[start:begin]))
    return values


def _canonical_floats(data: Buffer, begin: int, end: int) -> NDArray[np.float32]:
    if begin == end:
        return np.empty(0, np.float32)
    start, stop = _span(data, begin, 0x0A, end)
    if stop != end or (stop - start) % 4:
        raise _NotCanonicalError
    return np.array(np.frombuffer(data, "<f4", (stop - start) // 4, start), np.float32)


def _canonical_ints(data: Buffer, begin: int, end: int) -> NDArray[np.int64]:
    if begin == end:
        return np.empty(0, np.int64)
    start, stop = _span(data, begin, 0x0A, end)
    if stop != end:
        raise _NotCanonicalError
    return unpack_varints(data, start, stop)


_CANONICAL_LIST: dict[ColumnKind, Callable[[Buffer, int, int], Value]] = {
    "bytes": _canonical_bytes,
    "float32": _canonical_floats,
    "int64": _canonical_ints,
}


def _decode_any(data: Buffer) -> dict[str, Value]:
    columns: dict[str, Value] = {}
    for number, wire_type, start, stop in fields(data, 0, len(data)):
        if (number, wire_type) != (1, LEN):
            continue
        for entry in fields(data, start, stop):
            if entry[:2] == (1, LEN):
                name, value = _decode_entry(data, *entry[2:])
                columns[name] = value
    return columns


def _decode_entry(data: Buffer, start: int, stop: int) -> tuple[str, Value]:
    name = b""
    kind: ColumnKind | None = None
    lists: list[tuple[int, int]] = []
    for number, wire_type, begin, end in fields(data, start, stop):
        if (number, wire_type) == (1, LEN):
            name = bytes(data[begin:end])
        elif (number, wire_type) == (2, LEN):
            for field, list_type, *span in fields(data, begin, end):
                if list_type != LEN or field not in _KIND_OF_FIELD:
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
            raise CorruptDataError(f"the float list at byte {begin} has {end - begin} bytes, which is no multiple of 4")
        found.append(data[begin:end])
    return np.frombuffer(b"".join(found), "<f4").astype(np.float32)


def _decode_ints(data: Buffer, spans: list[tuple[int, int, int]]) -> NDArray[np.int64]:
    found = [unpack_varints(data, begin, end) for wire_type, begin, end in spans if wire_type in (LEN, VARINT)]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def differing_columns(found: Any, wanted: Any) -> str:
    """Return the message for a record or block whose set of columns is not the writer's."""
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    return (
        f"the record has the columns {sorted(found)}, wanted are {sorted(wanted)}: missing {missing}, unknown {extra}; "
        f"give an empty list or array where a column has no value"
    )


def wrong_value(name: str, kind: ColumnKind, value: Any, *, per_row: bool = False) -> str:
    """Return the message for a column that doesn't hold what its kind asks for."""
    found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
    if kind == "bytes":
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            found += " of " + ", ".join(sorted({type(item).__name__ for item in itertools.islice(value, 1000)}))
        wanted = "one bytes value per row" if per_row else "bytes or a sequence of bytes"
    else:
        wanted = f"a numpy array of {kind}, " + ("(n,) or (n, k)" if per_row else "(k,)")
    return f"column {name!r} holds {found}, wanted is {wanted}; convert it before it is appended"
