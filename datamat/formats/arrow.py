"""Stored columns as typed Arrow columns, and back, many rows at a time.

The `type` of a feature determines its Arrow type, by a table that does not need pyarrow; docs/formats.md lists them.

A fixed size becomes a fixed_size_list. Only values of a `Nullable` may be null. A list in it is also null if it is
empty: `NAME/present` distinguishes the two. float64, uint64 and bfloat16, which records hold as bytes, are numbers in
Arrow, and bytes again in records that are read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, final

import numpy as np

from datamat.errors import SchemaError
from datamat.features import (
    Audio,
    BBoxes,
    Bytes,
    ClassLabel,
    Feature,
    Keypoints,
    ListOf,
    Nullable,
    Polygons,
    RaggedColumn,
    Tokens,
    Video,
)
from datamat.features.base import RawColumn, as_bfloat16, dtype_of, gathered, holds_numbers, values_of
from datamat.features.composed import encoded_texts
from datamat.features.nullable import Maybe
from datamat.features.pictures import PictureFile
from datamat.formats.arrays import MOST_ITEMS, binary_array, ends_array, numbers_array, packed_array
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from datamat.features import Features
    from datamat.features.base import ArrowType, Column, ColumnBlock


Rows: TypeAlias = "slice | NDArray[np.int64]"
"""Numbers of rows: a slice with both ends, or int64 (n,) in any order."""

_TIMES = {"timestamp[us]": None, "timestamp[us, tz=UTC]": "UTC"}
"""Time zone of each type of time."""
_STORED = {
    **dict.fromkeys(["float16", "bfloat16"], "float32"),  # few readers support 16-bit floats; float32 is exact
    **dict.fromkeys(_TIMES, "int64"),  # times in memory
}
_FEW_BYTES = 1 << 16
_SMALL_VALUES = 1024
"""Maximum numbers in a small value: larger ones fill a row group sooner than images do."""


@final
@frozen()
class ArrowColumn:
    """One stored column and its Arrow type.

    Attributes:
        name: name of the column.
        stored: its type, without pyarrow.
        storage: further options of its storage in Parquet.
        is_category: whether the column has few distinct values.
    """

    name: str
    stored: ArrowType
    storage: Storage
    is_category: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of each number of a column of numbers."""
        return dtype_of(_STORED.get(self.stored.dtype, self.stored.dtype)).itemsize

    @property
    def _is_list(self) -> bool:
        """Whether a value is a list of bytes."""
        return not self.stored.holds_numbers and bool(self.stored.sizes)

    @property
    def type(self) -> Any:
        """The Arrow type."""
        return self._type_from(0)

    def to_arrow(self, values: Sequence[Any] | RaggedColumn | NDArray[Any]) -> Any:
        """Return the Arrow array of a column of n records.

        Args:
            values: n values, as in records: n bytes or lists of bytes, n arrays (k,), a `RaggedColumn`, or an array
                (n,) or (n, k).

        Raises:
            SchemaError: a value does not have the declared size or is not UTF-8.
        """
        import pyarrow as pa

        try:
            if self._is_list:
                return self._lists(values)
            if self.stored.is_nullable:
                return self._with_nulls(values)
            if not self.stored.holds_numbers:
                return _typed(_bytes_array(values, _plain_type(self.stored.dtype)), self.type)
            numbers, lengths = self._flattened(values)
            return self._listed(numbers, lengths)
        except (pa.ArrowException, ValueError) as exc:
            raise SchemaError(
                f"column {self.name!r} does not fit into {self.type}: {exc}; give what its feature declares"
            ) from exc

    def row_bytes(self, array: Any) -> NDArray[np.int64] | int:
        """Return the bytes of each row of an array of this type, int64 (n,), or one number for all rows."""
        width = self.stored.width * self.item_bytes if self.stored.holds_numbers else 1
        if self.stored.holds_numbers and None not in self.stored.sizes:
            return width
        ends = _ends_of(array)
        if self._is_list:
            ends = _ends_of(_items(array))[ends - ends[0]]
        return np.diff(ends) * width

    def getter(self, chunks: Any) -> Callable[[int], Column]:
        """Return a function that takes a row number and returns the value, as in records.

        Args:
            chunks: the column, a `pyarrow.ChunkedArray` of this type.
        """
        import pyarrow as pa

        if self._is_list:
            values, ends = self._flat_values(chunks)
            return lambda row: encoded_texts(values[ends[row] : ends[row + 1]])
        if self.stored.is_nullable:
            return self._getter_of_nullable(chunks)
        if not self.stored.holds_numbers:
            raw = chunks if self.stored.dtype == "binary" else _plain(_combined(chunks)).cast(pa.binary())
            return lambda row: [raw[row].as_py()]
        flat, bounds = self._numbers(chunks)
        if self.stored.kind == "bytes":
            data = flat.astype(self.stored.raw_dtype, copy=False)
            return lambda row: [data[bounds[row] : bounds[row + 1]].tobytes()]
        numbers = flat.astype(self.stored.kind, copy=False)
        return lambda row: numbers[bounds[row] : bounds[row + 1]].copy()

    def taker(self, chunks: Any) -> Callable[[Rows], ColumnBlock]:
        """Return a function from row numbers to the column of those records.

        Numbers of a slice are read-only views: the caller copies them, unless it joins several.

        Args:
            chunks: a `pyarrow.ChunkedArray` of the type.
        """
        if self._is_list:
            values, ends = self._flat_values(chunks)
            lists = RaggedColumn(values, np.diff(ends))
            return lambda rows: lists[rows] if isinstance(rows, slice) else lists.take(rows)
        if self.stored.is_nullable:
            return self._taker_of_nullable(chunks)
        if not self.stored.holds_numbers:
            array = _plain(_combined(chunks))
            if array.nbytes < _FEW_BYTES:  # a selection in Arrow takes at least 20 µs
                objects = array.to_numpy(zero_copy_only=False)
                return lambda rows: cast("Sequence[Any]", objects[rows].tolist())

            def values_of(rows: Rows) -> Sequence[Any]:
                found = array[rows] if isinstance(rows, slice) else array.take(rows)
                values: Sequence[Any] = found.to_numpy(zero_copy_only=False).tolist()
                return values

            return values_of
        flat, bounds = self._numbers(chunks)
        flat = flat.view()
        flat.flags.writeable = False
        if None in self.stored.sizes:
            column = RaggedColumn(flat, np.diff(bounds))
            return lambda rows: column[rows] if isinstance(rows, slice) else column.take(rows)
        matrix = flat.reshape(len(chunks), self.stored.width)

        return lambda rows: matrix[rows] if isinstance(rows, slice) else matrix.take(rows, axis=0)

    def _with_nulls(self, values: Sequence[Any] | RaggedColumn | NDArray[Any]) -> Any:
        """Return the Arrow array of values that may be missing."""
        present = self._of_present
        if isinstance(values, np.ndarray):
            return present.to_arrow(values)
        column: Any = values if isinstance(values, RaggedColumn) else gathered(values, self.stored.kind)
        is_there = column.lengths > 0
        found = present.to_arrow(Maybe.of_type(present.stored).unwrap_block(column, is_there))
        places = numbers_array(np.cumsum(is_there) - 1, is_there)
        return _typed(_plain(found).take(places), self.type)

    @property
    def _of_present(self) -> ArrowColumn:
        """The column of the records with a value."""
        stored = dataclasses.replace(self.stored, is_nullable=False, is_raw=self.stored.kind == "bytes_list")
        return dataclasses.replace(self, stored=stored)

    def _present(self, chunks: Any) -> tuple[NDArray[np.bool_], Any]:
        """Return which rows have a value, bool (n,), and their values, as a chunked array."""
        import pyarrow as pa

        array = _combined(chunks)
        is_there = array.is_valid().to_numpy(zero_copy_only=False)
        return is_there, pa.chunked_array([_typed(_plain(array).drop_null(), self.type)], self.type)

    def _getter_of_nullable(self, chunks: Any) -> Callable[[int], Column]:
        is_there, there = self._present(chunks)
        places, present = np.cumsum(is_there) - 1, self._of_present
        get, nothing = present.getter(there), Maybe.of_type(present.stored).nothing
        return lambda row: get(int(places[row])) if is_there[row] else nothing()

    def _taker_of_nullable(self, chunks: Any) -> Callable[[Rows], ColumnBlock]:
        is_there, there = self._present(chunks)
        places, present = np.cumsum(is_there) - 1, self._of_present
        get: Callable[[int], Any] = present.getter(there)
        take, how = present.taker(there), Maybe.of_type(present.stored)
        is_raw = how.of == "bytes" and self.stored.holds_numbers  # in bytes, a value without numbers is not missing

        def values_of(rows: Rows) -> RaggedColumn:
            found = is_there[rows]
            mine = places[rows][found]
            if is_raw or not len(mine):
                return how.wrap_block(gathered([get(place)[0] for place in mine.tolist()], how.of), found)
            return how.wrap_block(take(mine), found)

        return values_of

    def _lists(self, values: Sequence[Any] | RaggedColumn | NDArray[Any]) -> Any:
        """Return the Arrow array of n lists of bytes; an empty list is null if the column is nullable."""
        import pyarrow as pa

        if isinstance(values, RaggedColumn):
            flat, lengths = values.values.tolist(), values.lengths
        else:
            flat = [item for value in values for item in value]
            lengths = np.array([len(value) for value in values], int)
        array = _typed(binary_array(flat, _plain_type(self.stored.dtype)), self._type_from(1))
        nulls = numbers_array(np.asarray(lengths) == 0) if self.stored.is_nullable else None
        return pa.ListArray.from_arrays(ends_array(lengths), array, type=self.type, mask=nulls)

    def _flat_values(self, chunks: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the values of all lists, bytes or text, with the start of each row and the end of the last."""
        array = _combined(chunks)
        ends = array.offsets.to_numpy().astype(np.int64)
        values = _plain(_items(array)).to_numpy(zero_copy_only=False)
        return values.astype(object, copy=False), ends - ends[0]

    def _numbers(self, chunks: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return all numbers of a column, with the start of each row and the end of the last."""
        array, ends = _combined(chunks), None
        for size in self.stored.sizes:
            if size is None:
                ends = array.offsets.to_numpy() - array.offsets[0].as_py()
            array = _items(array)
        bounds = (np.arange(len(chunks) + 1) if ends is None else ends.astype(np.int64)) * self.stored.width
        numbers = array.to_numpy(zero_copy_only=False)
        if self.stored.dtype in _TIMES:
            numbers = numbers.view(np.int64)
        elif self.stored.dtype == "bfloat16":
            numbers = as_bfloat16(numbers)
        return numbers, bounds

    def _flattened(self, values: Sequence[Any] | RaggedColumn | NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return all numbers of the column, and the number per row."""
        if isinstance(values, RaggedColumn):
            numbers, lengths = values.values, values.lengths
        elif isinstance(values, np.ndarray):
            numbers, lengths = values.reshape(-1), np.full(len(values), math.prod(values.shape[1:]))
        elif self.stored.kind == "bytes":
            numbers = np.frombuffer(b"".join(values), self.stored.raw_dtype)
            lengths = np.fromiter(map(len, values), np.int64, len(values)) // self.stored.raw_dtype.itemsize
        else:
            numbers = np.concatenate([np.empty(0, self.stored.kind), *values])
            lengths = np.fromiter(map(len, values), np.int64, len(values))
        return numbers.astype(_STORED.get(self.stored.dtype, self.stored.dtype), copy=False), lengths

    def _listed(self, numbers: NDArray[Any], lengths: NDArray[np.int64]) -> Any:
        """Return the numbers, nested in lists."""
        import pyarrow as pa

        width = self.stored.width
        is_open = None in self.stored.sizes
        wrong = np.flatnonzero(lengths % width if is_open else lengths != width)
        if len(wrong):
            raise ValueError(f"a record holds {lengths[wrong[0]]} numbers, where {width} make one value")
        array = numbers_array(numbers)
        if self.stored.dtype in _TIMES:
            array = array.view(self._type_from(len(self.stored.sizes)))
        for depth in reversed(range(len(self.stored.sizes))):
            if self.stored.sizes[depth] is None:
                array = pa.ListArray.from_arrays(ends_array(lengths // width), array, type=self._type_from(depth))
            else:
                array = pa.FixedSizeListArray.from_arrays(array, type=self._type_from(depth))
        return array

    def _type_from(self, depth: int) -> Any:
        """Return the Arrow type below the outermost `depth` lists."""
        import pyarrow as pa

        if not self.stored.holds_numbers:
            found = pa.json_() if self.stored.dtype == "json" else _plain_type(self.stored.dtype)
        elif self.stored.dtype in _TIMES:
            found = pa.timestamp("us", _TIMES[self.stored.dtype])
        else:
            found = pa.from_numpy_dtype(_STORED.get(self.stored.dtype, self.stored.dtype))
        for size in reversed(self.stored.sizes[depth:]):
            item = pa.field("element", found, nullable=False)
            found = pa.list_(item) if size is None else pa.list_(item, size)
        return found


def _bytes_array(values: Any, kind: Any) -> Any:
    """Return the Arrow array of n bytes; those of a `RawColumn` are shared."""
    if isinstance(values, RawColumn) and values.values.nbytes <= MOST_ITEMS:
        return packed_array(values.values, values.lengths * values.values.itemsize, kind)
    return binary_array(values_of(values), kind)


def _ends_of(array: Any) -> NDArray[np.int64]:
    """Return where each list, bytes or text begins, and where the last ends: int64 (n + 1,)."""
    plain = _plain(array)
    ends = np.frombuffer(plain.buffers()[1], np.int32)[plain.offset : plain.offset + len(plain) + 1]
    return ends.astype(np.int64)


def _plain_type(dtype: str) -> Any:
    """Return the Arrow type that holds the bytes of a dtype."""
    import pyarrow as pa

    return pa.type_for_alias("string" if dtype == "json" else dtype)


def _typed(array: Any, kind: Any) -> Any:
    """Convert an array to the type, if it is an extension type."""
    import pyarrow as pa

    return pa.ExtensionArray.from_storage(kind, array) if isinstance(kind, pa.BaseExtensionType) else array


def _plain(array: Any) -> Any:
    """Return the storage of an array of an extension type, and other arrays unchanged."""
    import pyarrow as pa

    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


def _combined(chunks: Any) -> Any:
    """Return a chunked array as one array; `combine_chunks` would copy even a single chunk."""
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def _items(lists: Any) -> Any:
    """Return the items of all lists of an array without nulls.

    `flatten` does the same, but imports `pyarrow.compute`: 60 ms before the first batch.
    """
    import pyarrow as pa

    if pa.types.is_fixed_size_list(lists.type):
        width = lists.type.list_size
        return lists.values.slice(lists.offset * width, len(lists) * width)
    first, stop = lists.offsets[0].as_py(), lists.offsets[-1].as_py()
    return lists.values.slice(first, stop - first)


class Storage(NamedTuple):
    """Storage options of a field's columns in Parquet, besides their types.

    Attributes:
        is_large: whether a value may take many kilobytes: then row groups are smaller, and have no statistics.
        is_compressed: whether its bytes are already compressed, like a PNG or MP4: they are stored unchanged, and
            readers decode them in one thread per core.
    """

    is_large: bool
    is_compressed: bool = False


@functools.singledispatch
def storage_of(feature: Feature) -> Storage:
    """Return the storage options of a field in Parquet; for unknown types, many numbers count as large.

    Workers also use this, so types cannot be registered by users: a registration in `__main__` would not reach workers.
    """
    dtype, shape = feature.value_type()
    return Storage(holds_numbers(dtype) and (None in shape or math.prod(size or 1 for size in shape) > _SMALL_VALUES))


for _kind, _storage in {
    **dict.fromkeys([ClassLabel, BBoxes, Keypoints, Polygons], Storage(is_large=False)),  # few numbers, if any
    **dict.fromkeys([Bytes, Tokens], Storage(is_large=True)),
    **dict.fromkeys([PictureFile, Audio, Video], Storage(is_large=True, is_compressed=True)),
}.items():
    storage_of.register(_kind, functools.partial(lambda found, _: found, _storage))


@storage_of.register(Nullable)
@storage_of.register(ListOf)
def _(feature: Nullable | ListOf) -> Storage:
    return storage_of(feature.stored)


def arrow_columns(features: Features) -> list[ArrowColumn]:
    """Return the Arrow column of each stored column, in the order of the features."""
    return [
        ArrowColumn(name + part, stored, storage, is_category)
        for name, feature in features.items()
        for part, stored, storage, is_category in _options(feature)
    ]


@functools.lru_cache(maxsize=1024)
def _options(feature: Feature) -> list[tuple[str, ArrowType, Storage, bool]]:
    """Return the options of each column of a field, after the end of its name."""
    storage = storage_of(feature)
    found = []
    for part, stored in feature.columns("").items():
        is_large = storage.is_large and (not part or stored.kind in {"bytes", "bytes_list"})
        is_compressed = storage.is_compressed and stored.dtype == "binary"
        # pyarrow names a column in a list by its path, so only plain columns are marked.
        is_category = feature.class_names() is not None and stored.dtype == "int64" and not stored.sizes
        found.append((part, stored, Storage(is_large, is_compressed), is_category))
    return found
