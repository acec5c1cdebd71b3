"""Parquet's metadata: structs in Thrift's compact protocol, which footers and the headers of pages are.

The protocol is described in github.com/apache/thrift, doc/specs/thrift-compact-protocol.md; the structs in
github.com/apache/parquet-format, src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

from datamat.formats.example import varint

LENGTH = struct.Struct("<I")
MAGIC = b"PAR1"
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
_MOST_DEPTH = 32

Struct: TypeAlias = "dict[int, tuple[int, Any]]"
"""Fields by their numbers, in order: type and value."""


def footer_bytes(footer: Struct) -> bytes:
    """Return the end of a file: the footer, its length, and the magic bytes."""
    out = bytearray()
    write_struct(out, footer)
    return bytes(out) + LENGTH.pack(len(out)) + MAGIC


def read_struct(data: bytes, at: int, depth: int = 0) -> tuple[Struct, int]:
    """Return the struct at a position, and where it ends; raise `ValueError` or `LookupError` if there is none."""
    if depth > _MOST_DEPTH:
        raise ValueError("its footer is nested too deeply")
    fields: Struct = {}
    number = 0
    while (head := data[at]) != 0:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _read_int(data, at)
        kind = head & 15
        value, at = (None, at) if kind in (TRUE, FALSE) else _read_value(data, at, kind, depth)
        fields[number] = (kind, value)
    return fields, at + 1


def _read_value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (I16, I32, I64):
        return _read_int(data, at)
    if kind == STRUCT:
        return read_struct(data, at, depth + 1)
    if kind == BINARY:
        size, at = _read_varint(data, at)
        if at + size > len(data):
            raise ValueError("its footer is cut off")
        return data[at : at + size], at + size
    if kind in (LIST, SET):
        item, size = data[at] & 15, data[at] >> 4
        at += 1
        if size == 15:
            size, at = _read_varint(data, at)
        items = []
        for _ in range(size):
            value, at = _read_value(data, at, item, depth + 1)
            items.append(value)
        return (item, items), at
    size = {DOUBLE: 8, BYTE: 1, TRUE: 1, FALSE: 1}.get(kind, 0)  # a flag in a list takes a byte
    if not size:  # a map, which Parquet does not use
        raise ValueError(f"its footer holds a value of type {kind}")
    return data[at : at + size], at + size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


def _read_int(data: bytes, at: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def write_struct(out: bytearray, fields: Struct) -> None:
    """Append a struct."""
    before = 0
    for number, (kind, value) in sorted(fields.items()):
        if 0 < number - before <= 15:
            out.append((number - before) << 4 | kind)
        else:
            out.append(kind)
            write_int(out, number)
        if value is not None:
            _write_value(out, kind, value)
        before = number
    out.append(0)


def _write_value(out: bytearray, kind: int, value: Any) -> None:
    if kind in (I16, I32, I64):
        write_int(out, value)
    elif kind == STRUCT:
        write_struct(out, value)
    elif kind == BINARY:
        out += varint(len(value)) + value
    elif kind in (LIST, SET):
        item, items = value
        if len(items) < 15:
            out.append(len(items) << 4 | item)
        else:
            out.append(0xF0 | item)
            out += varint(len(items))
        for one in items:
            _write_value(out, item, one)
    else:
        out += value


def write_int(out: bytearray, value: int) -> None:
    """Append a signed number."""
    out += varint(value << 1 if value >= 0 else (-value << 1) - 1)
