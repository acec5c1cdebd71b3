"""Many small records at once: rows given column by column become `tf.train.Example` bytes without a loop over rows.

Every row is laid out at full width in one uint8 matrix, each field at the same place in all rows, and a mask says which
bytes belong to the row: a varint or a string that is shorter than the longest of its column leaves a gap. Taking the
valid bytes in row order gives the records back to back.

    key "a1"  x 0.5   |..a1_..|..x.0000003f..|          "_" is a gap: not valid in this row
    key "a12" x 0.25  |..a12..|..x.0000803e..|

The bytes are those of `example.encode_example`; a property test holds both to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from datamat.errors import SchemaError
from datamat.formats.example import (
    DTYPE,
    Column,
    differing_columns,
    sorted_columns,
    wrong_value,
)
from datamat.formats.wire import varint, varint_matrix, varint_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from datamat.formats import Block, ColumnKind, Record, Value

__all__ = ["check_block", "checked_record", "pack_block", "row_of"]

_Size: TypeAlias = "int | NDArray[np.int64]"
"""A length in bytes: one for all rows, or int64 (n,)."""


class _Field(NamedTuple):
    """A stretch of bytes that every row has."""

    data: bytes | NDArray[np.uint8]
    """The same bytes for all rows, or uint8 (n, width)."""
    valid: NDArray[np.bool_] | None = None
    """Which of them belong to the row, bool (n, width); None for all."""

    @property
    def width(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.shape[1]


def check_block(columns: Block, kinds: Mapping[str, ColumnKind]) -> int:
    """Return the number of rows of a block.

    Raises:
        SchemaError: a column is missing, unknown, of another type, or of another length than the rest.
    """
    if columns.keys() != kinds.keys():
        raise SchemaError(differing_columns(columns.keys(), kinds.keys()))
    num_rows = {name: len(values) for name, values in columns.items()}
    if len(set(num_rows.values())) > 1:
        raise SchemaError(f"the columns of a block need one length, got {num_rows}")
    for name, values in columns.items():
        kind = kinds[name]
        if kind == "bytes":
            fits = not isinstance(values, np.ndarray) and set(map(type, values)) <= {bytes}
        else:
            fits = isinstance(values, np.ndarray) and values.dtype == DTYPE[kind] and values.ndim in (1, 2)
        if not fits:
            raise SchemaError(wrong_value(name, kind, values, per_row=True))
    return next(iter(num_rows.values()), 0)


def checked_record(record: Record, kinds: Mapping[str, ColumnKind]) -> dict[str, Any]:
    """Return a record with one bytes value in each bytes column, which may come as a list of it, as it is read.

    Raises:
        SchemaError: a column is missing, unknown or of another type.
    """
    if record.keys() != kinds.keys():
        raise SchemaError(differing_columns(record.keys(), kinds.keys()))
    found = {}
    for name, value in record.items():
        kind = kinds[name]
        if kind == "bytes":
            only = value[0] if isinstance(value, list) and len(value) == 1 else value
            fits = isinstance(only, bytes)
        else:
            only = value
            fits = isinstance(value, np.ndarray) and value.dtype == DTYPE[kind] and value.ndim == 1
        if not fits:
            raise SchemaError(wrong_value(name, kind, value))
        found[name] = only
    return found


def row_of(columns: Block, index: int) -> dict[str, Value]:
    """Return one row of a block as a record."""
    return {
        name: values[index] if not isinstance(values, np.ndarray) else np.ravel(values[index])
        for name, values in columns.items()
    }


def pack_block(
    columns: Block,
    kinds: Mapping[str, ColumnKind],
    *,
    header: Callable[[NDArray[np.int64]], NDArray[np.uint8]],
    trailer_size: int,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Encode n rows, with a container's header before each and room for its trailer after each.

    Takes memory for n times the longest row, so the caller passes rows of similar length, a few MB at a time.

    Args:
        columns: n > 0 rows that `check_block` accepts.
        kinds: the kind of each column.
        header: gets the length of each row's Example, int64 (n,), and returns uint8 (n, width).
        trailer_size: bytes to leave free after each row; their content is undefined.

    Returns:
        The rows back to back, uint8 (total,), and the length of each with header and trailer, int64 (n,).
    """
    num_rows = check_block(columns, kinds)
    fields: list[_Field] = []
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


def _list_fields(column: Column, values: NDArray[Any] | Sequence[bytes]) -> tuple[list[_Field], _Size]:
    """Return the body of each row's list as fields, and its length."""
    if column.kind == "bytes":
        body, size = _bytes_field(cast("Sequence[bytes]", values))
    else:
        rows = np.ascontiguousarray(values, DTYPE[column.kind]).reshape(len(values), -1)
        if not rows.shape[1]:
            return [], 0
        body, size = _float_field(rows) if column.kind == "float32" else _int64_field(rows)
    return [_Field(b"\x0a"), _varint_field(size), body], 1 + _varint_size(size) + size


def _entry_fields(column: Column, list_fields: list[_Field], list_size: _Size) -> tuple[list[_Field], _Size]:
    """Put the heads of the map entry before the fields of its list; the block form of `_entry_heads`."""
    feature_size = 1 + _varint_size(list_size) + list_size
    entry_size = len(column.key) + _varint_size(feature_size) + feature_size
    heads = [
        _Field(b"\x0a"),
        _varint_field(entry_size),
        _Field(column.key),
        _varint_field(feature_size),
        _Field(column.tag),
        _varint_field(list_size),
    ]
    return heads + list_fields, 1 + _varint_size(entry_size) + entry_size


def _bytes_field(values: Sequence[bytes]) -> tuple[_Field, _Size]:
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    width = int(lengths.max())
    if not width:
        return _Field(b""), 0
    # numpy pads with NUL, and strips NULs only when an item is taken out, so the raw bytes are the values.
    matrix = np.array(values, dtype=f"S{width}").view(np.uint8).reshape(-1, width)
    return _trimmed(matrix, lengths)


def _float_field(rows: NDArray[np.float32]) -> tuple[_Field, _Size]:
    return _Field(rows.view(np.uint8)), 4 * rows.shape[1]


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
    """Return the field of the first `lengths` bytes of each row; equal lengths become one number."""
    width = matrix.shape[1]
    if lengths.min() == width:
        return _Field(matrix), width
    return _Field(matrix, np.arange(width) < lengths[:, None]), lengths


def _varint_size(size: _Size) -> _Size:
    return len(varint(size)) if isinstance(size, int) else varint_sizes(size.view(np.uint64))


def _lay_out(fields: list[_Field], num_rows: int) -> NDArray[np.uint8]:
    """Write the fields side by side and return the valid bytes, row after row."""
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
    return rows.ravel() if valid is None else rows.ravel()[valid.ravel()]
