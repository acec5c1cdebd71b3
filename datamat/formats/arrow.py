"""Stored columns as typed Arrow columns, and back, many rows at a time.

    feature                       stored column        Arrow type
    Image, Mask                   bytes                binary: the PNG or JPEG file
    Text                          bytes                string
    ClassLabel                    int64                int64, or a list of it
    BBoxes                        float32              list of fixed_size_list[4] of float
    Scalar                        as its dtype says    that type; float16 as float, complex numbers as binary
    Tensor                        as its dtype says    lists of that type; with encoding="raw" or complex: binary
    Tensor, several open sizes    also its shape       list of int64

A size that the features fix becomes a fixed_size_list. Nothing is ever null. float64 and uint64, which records hold as
bytes, become numbers here, and bytes again where a record is read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import SchemaError
from datamat.features import BBoxes, ClassLabel, Scalar, Tensor, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from datamat.features import Feature, Features
    from datamat.formats import Value

__all__ = ["ArrowColumn", "arrow_columns"]

_STORED = {"float16": "float32"}  # few readers know 16-bit floats; no number changes on the way
_AS_BYTES = {"complex64", "complex128"}
_SMALL_VALUES = 1024
"""Numbers up to which a tensor counts as small: more of them fill a row group sooner than pictures do."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ArrowColumn:
    """One stored column and its Arrow type.

    Attributes:
        name: of the column.
        dtype: of its numbers; "binary" or "string" where it holds bytes.
        sizes: of the lists around a number, from the outside; None where it varies, which only the first does.
        kind: what records hold: "bytes", "int64" or "float32".
        is_large: whether one value may take many kilobytes.
        is_category: whether few different values are expected.
    """

    name: str
    dtype: str
    sizes: tuple[int | None, ...]
    kind: str
    is_large: bool = False
    is_category: bool = False

    @property
    def is_numeric(self) -> bool:
        """Whether it holds numbers."""
        return self.dtype not in {"binary", "string"}

    @property
    def type(self) -> Any:
        """The Arrow type."""
        return self._type_from(0)

    def to_arrow(self, values: Sequence[Any] | NDArray[Any]) -> Any:
        """Return the Arrow array of a column of n records.

        Args:
            values: as records hold them: n bytes values, n arrays (k,), or an array (n,) or (n, k).

        Raises:
            SchemaError: a value does not have the declared size, or is no UTF-8.
        """
        import pyarrow as pa

        try:
            if not self.is_numeric:
                return pa.array(values, self.type)
            numbers, lengths = self._flattened(values)
            return self._listed(numbers, lengths)
        except (pa.ArrowException, ValueError) as exc:
            raise SchemaError(f"column {self.name!r} does not fit into {self.type}: {exc}") from exc

    def row_bytes(self, array: Any) -> NDArray[np.int64] | int:
        """Return the bytes that each row of an array of the type takes, int64 (n,), or one number for all."""
        import pyarrow.compute as pc

        width = self._width * np.dtype(self.dtype).itemsize if self.is_numeric else 1
        if self.is_numeric and None not in self.sizes:
            return width
        lengths = pc.list_value_length(array) if self.is_numeric else pc.binary_length(array)
        return np.asarray(lengths, np.int64) * width

    def getter(self, chunks: Any) -> Callable[[int], Value]:
        """Return a function from the number of a row to its value as records hold it.

        Args:
            chunks: a `pyarrow.ChunkedArray` of the type.
        """
        import pyarrow as pa

        if not self.is_numeric:
            raw = chunks.cast(pa.binary()) if self.dtype == "string" else chunks
            return lambda row: [raw[row].as_py()]
        array, ends = chunks.combine_chunks(), None
        for size in self.sizes:
            if size is None:
                ends = array.offsets.to_numpy() - array.offsets[0].as_py()
            array = array.flatten()
        bounds = (np.arange(len(chunks) + 1) if ends is None else ends.astype(np.int64)) * self._width
        flat = array.to_numpy(zero_copy_only=False)
        if self.kind == "bytes":
            data = flat.astype(np.dtype(self.dtype).newbyteorder("<"), copy=False)
            return lambda row: [data[bounds[row] : bounds[row + 1]].tobytes()]
        numbers = flat.astype(self.kind)
        return lambda row: numbers[bounds[row] : bounds[row + 1]].copy()

    @property
    def _width(self) -> int:
        """How many numbers the lists of fixed size hold."""
        return math.prod(size for size in self.sizes if size is not None)

    def _flattened(self, values: Sequence[Any] | NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return all numbers of the column and how many of them each row has."""
        if isinstance(values, np.ndarray):
            rows = values.reshape(len(values), -1)
            numbers, lengths = rows.reshape(-1), np.full(len(rows), rows.shape[1])
        elif self.kind == "bytes":
            dtype = np.dtype(self.dtype).newbyteorder("<")
            numbers = np.frombuffer(b"".join(values), dtype)
            lengths = np.fromiter(map(len, values), np.int64, len(values)) // dtype.itemsize
        else:
            numbers = np.concatenate([np.empty(0, self.kind), *values])
            lengths = np.fromiter(map(len, values), np.int64, len(values))
        return numbers.astype(_STORED.get(self.dtype, self.dtype), copy=False), lengths

    def _listed(self, numbers: NDArray[Any], lengths: NDArray[np.int64]) -> Any:
        """Return the numbers in their lists."""
        import pyarrow as pa

        width = self._width
        is_open = None in self.sizes
        wrong = np.flatnonzero(lengths % width if is_open else lengths != width)
        if len(wrong):
            raise ValueError(f"a record holds {lengths[wrong[0]]} numbers, where {width} make one value")
        array = pa.array(numbers)
        for depth in reversed(range(len(self.sizes))):
            if self.sizes[depth] is None:
                ends = pa.array(np.concatenate([[0], np.cumsum(lengths // width)]), pa.int32())
                array = pa.ListArray.from_arrays(ends, array, type=self._type_from(depth))
            else:
                array = pa.FixedSizeListArray.from_arrays(array, type=self._type_from(depth))
        return array

    def _type_from(self, depth: int) -> Any:
        """Return the Arrow type inside the first `depth` lists."""
        import pyarrow as pa

        if not self.is_numeric:
            return pa.type_for_alias(self.dtype)
        found = pa.from_numpy_dtype(_STORED.get(self.dtype, self.dtype))
        for size in reversed(self.sizes[depth:]):
            item = pa.field("element", found, nullable=False)
            found = pa.list_(item) if size is None else pa.list_(item, size)
        return found


def arrow_columns(features: Features) -> list[ArrowColumn]:
    """Return the Arrow column of each stored column, in the order of the features."""
    return [_column(name, kind, features) for name, kind in features.columns.items()]


def _column(name: str, kind: str, features: Features) -> ArrowColumn:
    feature = features.get(name)
    if feature is None:  # the column beside a tensor that holds its shape
        return ArrowColumn(name, "int64", (None,), kind)
    dtype, sizes, is_large = _typed(feature)
    is_category = isinstance(feature, ClassLabel) and not sizes  # pyarrow asks for another name where it is a list
    return ArrowColumn(name, dtype, sizes, kind, is_large, is_category)


def _typed(feature: Feature) -> tuple[str, tuple[int | None, ...], bool]:
    """Return dtype, list sizes, and whether values may be large."""
    if isinstance(feature, Text):
        return "string", (), False
    if isinstance(feature, ClassLabel):
        return "int64", feature.shape, False
    if isinstance(feature, BBoxes):
        return "float32", (None, 4), False
    if isinstance(feature, Scalar):
        return ("binary" if feature.dtype in _AS_BYTES else feature.dtype), (), False
    if isinstance(feature, Tensor):
        is_large = None in feature.shape or math.prod(size or 1 for size in feature.shape) > _SMALL_VALUES
        if feature.encoding == "raw" or feature.dtype in _AS_BYTES:
            return "binary", (), is_large
        return feature.dtype, _list_sizes(feature), is_large
    return "binary", (), True


def _list_sizes(feature: Tensor) -> tuple[int | None, ...]:
    """Return the lists that hold a tensor: as its shape, where Arrow has lists of that shape."""
    inner = feature.shape[1:]
    # A size of 0 ends pyarrow's process (26.0.1: a division by zero); such tensors hold no number anyway.
    is_nested = None not in inner and 0 not in feature.shape
    return feature.shape if is_nested else (None,)
