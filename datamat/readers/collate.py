"""The memory of one batch: samples are put into it by their row, from several threads at once.

What a column becomes does not depend on chance. Boxes, lists of labels and tensors of open shape are a list of arrays,
however long they happen to be; text is a list of str. All else is one array, unless pictures differ in size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from datamat.features import BBoxes, ClassLabel, Tensor

if TYPE_CHECKING:
    from datamat.features import Feature, Features

__all__ = ["Allocate", "BatchBuffer", "SampleSlot", "ragged_names"]

Allocate: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray]
"""Returns an array of that shape and dtype, of any content."""

_NOTHING: Mapping[str, Any] = {}


def ragged_names(features: Features) -> frozenset[str]:
    """Return the fields whose values are of any length: they are lists in a batch."""
    return frozenset(name for name, feature in features.items() if _is_ragged(feature))


def _is_ragged(feature: Feature) -> bool:
    if isinstance(feature, (ClassLabel, Tensor)):
        return None in feature.shape
    return isinstance(feature, BBoxes)


@final
class BatchBuffer:
    """Gathers the samples of one batch. `put` may be called by several threads, for different rows.

    Args:
        num_rows: of the batch.
        ragged: names of the columns that are lists.
        allocate: makes the arrays.
    """

    def __init__(self, num_rows: int, ragged: frozenset[str], allocate: Allocate = np.empty) -> None:
        self._num_rows = num_rows
        self._ragged = ragged
        self._allocate = allocate
        self._columns: dict[str, _Column] = {}
        self._rows = [False] * num_rows

    def memory(self, row: int) -> dict[str, np.ndarray]:
        """Return where the values of a row will lie, by name, as far as columns are there already."""
        return {
            name: array for name, column in list(self._columns.items()) if (array := column.memory(row)) is not None
        }

    def put(self, row: int, sample: Mapping[str, Any], lent: Mapping[str, np.ndarray] = _NOTHING) -> None:
        """Copy the values of a sample into the batch; those that are `memory`, as it was lent, lie there."""
        for name, value in sample.items():
            if value is lent.get(name, _NOTHING):
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns.setdefault(name, _Column(self._num_rows, name in self._ragged, self._allocate))
            column.put(row, value)
        self._rows[row] = True

    def finish(self) -> dict[str, Any]:
        """Return the batch by name, without the rows that got no sample; empty if none did."""
        rows = [row for row, is_there in enumerate(self._rows) if is_there]
        return {name: column.finish(rows) for name, column in self._columns.items()} if rows else {}


@final
class SampleSlot:
    """Takes the one sample of a job without a batch, as it is."""

    def __init__(self) -> None:
        self._sample: Mapping[str, Any] = {}

    def memory(self, row: int) -> dict[str, np.ndarray]:
        """Return nothing: the sample brings its own."""
        del row
        return {}

    def put(self, row: int, sample: Mapping[str, Any], lent: Mapping[str, np.ndarray] = _NOTHING) -> None:
        """Take the sample."""
        del row, lent
        self._sample = sample

    def finish(self) -> dict[str, Any]:
        """Return it; empty if there was none."""
        return dict(self._sample)


@final
class _Column:
    def __init__(self, num_rows: int, is_ragged: bool, allocate: Allocate) -> None:
        self._is_ragged = is_ragged
        self._allocate = allocate
        self._stacked: np.ndarray | None = None
        self._apart: list[Any] = [None] * num_rows
        self._is_apart = [False] * num_rows
        self._lock = threading.Lock()

    def memory(self, row: int) -> np.ndarray | None:
        stacked = self._stacked
        return stacked[row] if stacked is not None and stacked.ndim > 1 else None

    def put(self, row: int, value: Any) -> None:
        if not self._is_ragged and _is_array(value):
            array = np.asarray(value)
            stacked = self._stacked
            if stacked is None:
                stacked = self._make(array)
            if array.shape == stacked.shape[1:] and array.dtype == stacked.dtype:
                stacked[row] = array
                return
        self._apart[row] = value
        self._is_apart[row] = True

    def finish(self, rows: list[int]) -> Any:
        stacked = self._stacked
        if stacked is None or any(self._is_apart):
            return [self._apart[row] if self._is_apart[row] else stacked[row] for row in rows]  # type: ignore[index]
        return stacked if len(rows) == len(stacked) else stacked[rows]

    def _make(self, first: np.ndarray) -> np.ndarray:
        with self._lock:
            if self._stacked is None:
                self._stacked = self._allocate((len(self._apart), *first.shape), first.dtype)
            return self._stacked


def _is_array(value: Any) -> bool:
    """Tell whether a value is a number, or an array or tensor of numbers."""
    if isinstance(value, (bool, int, float, complex, np.number, np.bool_)):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    return hasattr(value, "__array__") and not isinstance(value, (str, bytes))
