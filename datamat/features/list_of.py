"""`ListOf`: lists of any length, and the columns that hold their items."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from datamat.errors import SchemaError, count_of, kind_of
from datamat.features.base import (
    ArrowType,
    ColumnBlock,
    Feature,
    Kind,
    RaggedColumn,
    RawColumn,
    Shape,
    as_array,
    by_part,
    bytes_array,
    cut,
    dtype_of,
    gathered,
    holds_numbers,
    mismatch,
    one_bytes,
    rows_of,
    values_of,
    whole,
)
from datamat.features.composed import Composed, alone, as_ragged, checked_part, declared_as, encoded_texts
from datamat.features.nullable import Nullable
from datamat.features.registry import built_in
from datamat.features.statistics import FieldStatistics, Numbers, merged
from datamat.features.values import ClassLabel, Scalar, Tensor, numbers_in
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


@frozen()
class ListOf(Composed):
    """A list of any length whose items are all values of one feature: texts, numbers, labels, times, files.

    A sample holds a list, a tuple or an array. It reads back as an array (n, ...) if the items are numbers or arrays of
    one shape, and otherwise as a list; a batch is a list of those, and a ragged tensor in TensorFlow.
    `ListOf(Scalar("int64"))` is stored as `Tensor((None,), "int64")` is, and `ListOf(ClassLabel(...))` as one with
    `shape=(None,)`.

    Args:
        feature: the feature of each item.

    Example:
        >>> from datamat import Text
        >>> ListOf(Text()).encode(["sea", "dusk"])
        [b'sea', b'dusk']
        >>> ListOf(Scalar("int32")).encode([1, 2, 3])
        array([1, 2, 3])
    """

    type_name: ClassVar[str] = "Sequence"  # on disk
    feature: Feature

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature", checked_part(self.feature, "ListOf"))
        if isinstance(self.feature, Mapping):
            return
        if any(f"{part}/lengths" in self.packed for part in self.packed):
            raise SchemaError(
                f"ListOf: {self.item.declared()} is a list of lists itself; declare Json() for lists in lists in lists"
            )
        if self.has_gaps and "/present" in self.stored.columns(""):
            raise SchemaError(f"ListOf: {self.item.declared()} marks what is missing in itself; declare Json()")

    @property
    def item(self) -> Feature:
        """The feature of present items."""
        found = alone(self.feature, "ListOf")
        return found.stored if isinstance(found, Nullable) else found

    @property
    def has_gaps(self) -> bool:
        """Whether items may be missing; then the column `NAME/present` marks the present ones."""
        return isinstance(self.feature, Nullable)

    @property
    def array(self) -> Feature | None:
        """The feature that stores the present items as one array; else None."""
        return _array_of(self.item)

    @property
    def stored(self) -> Feature:
        return self.array or self.item

    @property
    def packed(self) -> Mapping[str, Packed]:
        """The layout of each column of the items; empty if they are one array."""
        return self.layout.columns

    @property
    def type(self) -> ArrowType | dict[str, ArrowType]:
        found = self.array.columns("") if self.array else {}
        found |= {part: how.type for part, how in self.packed.items()}
        found |= {f"{part}/lengths": _INTEGERS for part, how in self.packed.items() if how.has_lengths}
        found |= {"/present": _INTEGERS} if self.has_gaps else {}
        types: ArrowType | dict[str, ArrowType] = whole(found)
        return types

    def value_type(self) -> tuple[str, Shape]:
        dtype, shape = self.item.value_type()
        return dtype, (None, *shape)

    def encode(self, value: Any) -> Any:
        items, layout = self._list(value), self.layout
        there = [item for item in items if item is not None] if layout.has_gaps else items
        columns: dict[str, Any] = {}
        try:
            if layout.array:
                found = layout.array.encode(_as_one(layout, there))
                if not layout.has_gaps:
                    return found
                columns |= by_part(found)
            else:
                block = by_part(layout.item.encode_many([as_array(item) for item in there]))
        except SchemaError as error:
            raise self._refusal(items, error) from error
        for part, how in layout.columns.items():
            leaves = how.leaves(block[part])
            columns[part] = leaves.tolist() if how.kind == "bytes_list" and not isinstance(leaves, list) else leaves
            if how.has_lengths:
                columns[f"{part}/lengths"] = how.lengths(block[part])
        if layout.has_gaps:
            columns["/present"] = np.array([item is not None for item in items], np.int64)
        return whole(columns)

    def encode_many(self, values: Any) -> Any:
        if not isinstance(values, (np.ndarray, RaggedColumn)):
            values = [self._list(value) for value in values]
        rows = values.rows() if isinstance(values, RaggedColumn) else values
        try:
            return self._encoded_block(values, rows)
        except SchemaError:
            for value in rows:
                self.encode(value)  # raises, naming the item
            raise

    def _encoded_block(self, values: Any, rows: Any) -> Any:
        layout = self.layout
        columns: dict[str, Any] = {}
        if layout.has_gaps:
            present = [np.array([item is not None for item in row], np.int64) for row in rows]
            columns["/present"] = gathered(present, "int64")
            values = rows = [[item for item in row if item is not None] for row in rows]
        if layout.array:
            if not isinstance(values, (np.ndarray, RaggedColumn)):
                values = [_as_one(layout, row) for row in rows]
            return whole(columns | by_part(layout.array.encode_many(values)))
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        block = by_part(layout.item.encode_many([item for row in rows for item in row]))
        for part, how in layout.columns.items():
            sizes = counts
            if how.has_lengths:
                lengths = how.lengths(block[part])
                columns[f"{part}/lengths"], sizes = RaggedColumn(lengths, counts), _sums(lengths, counts)
            columns[part] = how.rows(how.leaves(block[part]), sizes * how.unit)
        return whole(columns)

    def decode_into(self, stored: Any, out: np.ndarray | None, *, are_intact: bool = False) -> Any:
        layout = self.layout
        if layout.array and not layout.has_gaps:
            return layout.array.decode_into(stored, out, are_intact=are_intact)
        if layout.array:
            found = layout.array.decode_into(layout.of_array(stored), None, are_intact=are_intact)
        elif layout.decodes_many:
            found = layout.together(layout.item.decode_many(layout.items(stored)))
        else:
            rows = layout.rows(stored)
            found = layout.together([layout.item.decode_into(row, None, are_intact=are_intact) for row in rows])
        return _spread(found, stored["/present"]) if layout.has_gaps else found

    def decode_many(self, stored: Any) -> np.ndarray | list[Any] | None:
        layout = self.layout
        if layout.array:
            rows: Any = layout.array.decode_many(layout.of_array(stored))
        else:
            block, counts = layout.block_of_items(stored)
            items: Any = layout.item.decode_many(block) if counts.any() else []
            rows = cut(items, counts)
            if layout.nothing is not None and not counts.any():
                rows = list(map(layout.together, rows))
        return list(map(_spread, rows, stored["/present"].rows())) if layout.has_gaps else rows

    def encoded_value(self, stored: Any) -> Any:
        layout = self.layout
        if layout.array:
            found = layout.array.encoded_value(layout.of_array(stored))
        else:
            found = [layout.item.encoded_value(row) for row in layout.rows(stored)]
        return _spread(found, stored["/present"]) if layout.has_gaps else found

    def prepare(self, value: Any) -> Any:
        if self.array and not self.has_gaps:
            return value
        return [None if item is None and self.has_gaps else self.item.prepare(item) for item in value]

    def observe(self, stored: Any) -> FieldStatistics:
        layout = self.layout
        lengths = [f"{part}/lengths" for part, how in layout.columns.items() if how.has_lengths]
        if layout.array:
            found = layout.array.observe(layout.of_array(stored))
        elif lengths:  # items are lists themselves
            found = {"items": Numbers.of(stored[lengths[0]].lengths, with_bins=True)}
        else:
            block, counts = layout.block_of_items(stored)
            items = layout.item.observe(block) if counts.any() else {}
            found = {**items, "items": Numbers.of(counts, with_bins=True)}
        if not layout.has_gaps:
            return found
        present = stored["/present"]
        found = {key: one for key, one in found.items() if key not in _COUNTS_OF_ITEMS}
        missing = int(np.count_nonzero(present.values == 0))
        return {**found, "items": Numbers.of(present.lengths, with_bins=True), "missing": missing}

    def observe_value(self, value: Any) -> FieldStatistics:
        found: FieldStatistics = {}
        for item in value:
            merged(found, {} if item is None else self.item.observe_value(item))
        return found

    def num_items(self, stored: Any) -> int | list[int]:
        """Return the number of items of one record, or of each in a block, from `encode` or `encode_many`."""
        part, unit, is_bytes = self.layout.counted
        column = by_part(stored)[part]
        if is_bytes and not isinstance(column, bytes):
            return [len(value) // unit for value in values_of(column)]
        if isinstance(column, RaggedColumn):
            found: list[int] = (column.lengths // unit).tolist()
            return found
        if isinstance(column, np.ndarray) and column.ndim > 1:
            return [column.shape[1] // unit] * len(column)
        return len(column) // unit

    def declared(self) -> str:
        return f"list of {alone(self.feature, 'ListOf').declared()}"

    def _list(self, value: Any) -> Any:
        value = as_array(value)
        if not (isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim)):
            raise mismatch(self, f"{kind_of(value)}", "give a list")
        return value

    def _refusal(self, items: Any, error: SchemaError) -> SchemaError:
        """Return the error of refused items: that of the first bad item, if any."""
        for number, item in enumerate(() if self.array and isinstance(items, np.ndarray) else items):
            try:
                if item is not None or not self.has_gaps:
                    self.item.encode(as_array(item))
            except SchemaError as found:
                return _of_item(self, number, item, found)
        return declared_as(self, self.stored, error)

    @functools.cached_property
    def layout(self) -> _ListLayout:
        """The storage layout of the columns."""
        item, array = self.item, self.array
        dtype, shape = item.value_type()
        sizes = [0, *(size for size in shape if size is not None)]
        is_one = array is None and holds_numbers(dtype) and None not in shape
        nothing = np.empty(sizes, dtype_of(dtype)) if is_one else None
        columns = {} if array else _packed_columns(item)
        counted = "/present" if self.has_gaps else "/lengths", 1, False
        if not self.has_gaps and not (columns and columns[""].has_lengths):
            kind = array.columns("")[""].kind if array else columns[""].kind
            width = 1 if kind == "bytes_list" else math.prod(size for size in shape if size)
            is_bytes = kind == "bytes"
            counted = "", width * (dtype_of(dtype).itemsize if is_bytes else 1), is_bytes
        return _ListLayout(item, array, self.has_gaps, item.decodes_many(), nothing, columns, counted)


class _ListLayout(NamedTuple):
    """The layout of a `ListOf`.

    Attributes:
        item: feature of present items.
        array: feature that stores them as one array, or None.
        has_gaps: whether items may be missing.
        decodes_many: whether many items are decoded at once.
        nothing: the array of no items if decoded values are one array; else None.
        columns: the layout of each column of the items, if they are not one array.
        counted: the column that counts the items, its values per item, or bytes, and whether it is one of bytes.
    """

    item: Feature
    array: Feature | None
    has_gaps: bool
    decodes_many: bool
    nothing: np.ndarray | None
    columns: Mapping[str, Packed]
    counted: tuple[str, int, bool]

    def of_array(self, stored: Any) -> Any:
        """Return the stored array, without the separate column that marks present items."""
        return whole({part: one for part, one in stored.items() if part != "/present"}) if self.has_gaps else stored

    def items(self, stored: Any) -> Any:
        """Return the items of a record as a block."""
        if not isinstance(stored, dict):  # numbers or bytes objects, with the same number in each item
            return self.columns[""].items(stored, None)
        found = {}
        for part, how in self.columns.items():
            lengths = np.asarray(stored[f"{part}/lengths"], np.int64) if how.has_lengths else None
            found[part] = how.items(one_bytes(stored[part]) if how.kind == "bytes" else stored[part], lengths)
        return whole(found)

    def rows(self, stored: Any) -> Iterator[Any]:
        """Yield the stored form of each item of a record."""
        return map(whole, rows_of(by_part(self.items(stored))))

    def block_of_items(self, stored: Any) -> tuple[Any, NDArray[np.int64]]:
        """Return the items of n records as a block, and the number of items of each, int64 (n,)."""
        columns, found = by_part(stored), {}
        counts = np.zeros(0, np.int64)
        for part, how in self.columns.items():
            column, lengths = columns[part], columns.get(f"{part}/lengths")
            if how.kind == "bytes":
                leaves, sizes = b"".join(column), np.fromiter(map(len, column), np.int64, len(column))
            else:
                leaves, sizes = column.values, column.lengths
            counts = sizes // how.unit if lengths is None else lengths.lengths
            wanted = counts if lengths is None else _sums(lengths.values, counts)
            if (sizes != wanted * how.unit).any():
                raise SchemaError("its column holds another number of values than the lengths of its items say")
            found[part] = how.items(leaves, None if lengths is None else lengths.values)
        return whole(found), counts

    def together(self, items: Any) -> Any:
        """Return items as one array if they all have one declared shape."""
        if self.nothing is None or isinstance(items, np.ndarray):
            return items
        return np.stack(items) if items else self.nothing.copy()


def _spread(values: Any, present: Any) -> list[Any]:
    """Return the present values, with None for missing ones."""
    present = np.asarray(present, np.int64)
    if present.sum() != len(values):
        raise ValueError(f"{count_of(len(values), 'value')}, where {present.sum()} are marked as present")
    there = iter(values)
    return [next(there) if is_there else None for is_there in present.tolist()]


_INTEGERS = ArrowType("int64", (None,))
_COUNTS_OF_ITEMS = {"items", "length"}
"""Statistics of a list without gaps that count its items."""


class Packed(NamedTuple):
    """The layout of a column of a `ListOf`'s items: the leaves of all items, and their numbers if these differ.

    Attributes:
        type: type of its column.
        kind: kind of its column.
        unit: number of leaves (numbers, bytes objects, or single bytes) of one value in an item.
        has_lengths: whether items differ in size; then the column COLUMN/lengths holds the number of values of each.
    """

    type: ArrowType
    kind: Kind
    unit: int
    has_lengths: bool

    def leaves(self, items: Any) -> Any:
        """Return the leaves of a block of items: an array (total,), a list of bytes objects, or bytes."""
        if self.kind == "bytes":
            return b"".join(values_of(items))
        if isinstance(items, list):
            return items
        return items.values if isinstance(items, RaggedColumn) else items.reshape(-1)

    def lengths(self, items: Any) -> NDArray[np.int64]:
        """Return the number of values of each item of a block, int64 (n,)."""
        if isinstance(items, (list, RawColumn)):
            return np.fromiter(map(len, values_of(items)), np.int64, len(items)) // self.unit
        return as_ragged(items).lengths // self.unit

    def items(self, leaves: Any, lengths: NDArray[np.int64] | None) -> ColumnBlock:
        """Return the block of items with these leaves and lengths."""
        if lengths is None and self.kind == "bytes_list":
            return leaves if isinstance(leaves, list) else encoded_texts(leaves)
        if lengths is None:
            sizes = np.full(len(leaves) // self.unit, self.unit)
            total = self.unit * len(sizes)
        else:
            sizes = lengths * self.unit
            total = -1 if len(sizes) and sizes.min() < 0 else int(sizes.sum())
        if total != len(leaves):
            raise ValueError(f"{len(leaves)} numbers or bytes, where the lengths of the items say {total}")
        return self.rows(leaves, sizes)

    def rows(self, leaves: Any, lengths: NDArray[np.int64]) -> ColumnBlock:
        """Return leaves as a column of n rows, given the number of leaves of each."""
        if self.kind == "bytes":
            return cut(leaves, lengths)
        return RaggedColumn(bytes_array(leaves) if isinstance(leaves, list) else leaves, lengths)


def _packed_columns(item: Feature) -> Mapping[str, Packed]:
    """Return the layout of the columns of a `ListOf`'s items."""
    found: dict[str, Packed] = {}
    for part, one in item.columns("").items():
        is_open = None in one.sizes
        kind = one if is_open else dataclasses.replace(one, sizes=(None, *one.sizes))
        unit = one.width if one.holds_numbers else 1
        if kind.kind == "bytes":
            unit *= one.raw_dtype.itemsize
        found[part] = Packed(kind, kind.kind, unit, is_open or kind.kind == "bytes")
    return found


def _sums(lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums of groups of lengths, given the size of each group, int64 (n,)."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=ends[1:])
    found: NDArray[np.int64] = ends[counts.cumsum()]
    found[1:] -= found[:-1].copy()
    return found


@functools.lru_cache(maxsize=1024)
def _array_of(item: Feature) -> Feature | None:
    """Return the feature whose values are arrays of all items of a list, if they can be one array."""
    if type(item) is Scalar:
        return Tensor((None,), item.dtype)
    if type(item) is Tensor and None not in item.shape:
        return Tensor((None, *item.shape), item.dtype, item.encoding)
    if type(item) is ClassLabel and not item.shape:
        return dataclasses.replace(item, shape=(None,))
    return None


def _as_one(layout: _ListLayout, items: Any) -> Any:
    """Return items for the feature that stores them as one array: numbers as an array."""
    if isinstance(items, np.ndarray) or not isinstance(layout.array, Tensor):
        return items
    dtype, item = dtype_of(layout.array.dtype), layout.item
    found = numbers_in(items, dtype) if isinstance(item, Scalar) and items else None
    if found is not None:
        return found
    arrays = []
    for one in map(as_array, items):
        item.encode(one)  # refuses other values
        arrays.append(np.asarray(one, dtype))
    return np.stack(arrays) if arrays else np.empty((0, *item.value_type()[1]), dtype)


def _of_item(feature: ListOf, number: int, item: Any, error: SchemaError) -> SchemaError:
    """Return the error of an item with its number."""
    if item is None:
        return SchemaError(
            f"the field is declared {feature.declared()} but item {number} of the sample is None; give a "
            "value, or declare ListOf(Nullable(...))"
        )
    declared, outer = f"is declared {feature.item.declared()} but ", f"is declared {feature.declared()} but "
    text = str(error).replace(f"{declared}the sample holds", f"{outer}item {number} of the sample is", 1)
    return SchemaError(text.replace(f"{declared}item ", f"{outer}item {number}, item ", 1))


built_in(ListOf)
