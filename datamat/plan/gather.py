"""Samples of rows that are read one by one, as columns: encoded together, they take a fraction of the time.

    read ── sample ──> SampleColumns.add ... take() ──> Features.encode_block
                       └── full: by rows, by bytes, or where a value cannot be copied

`read` may return the same dict, with the same arrays, each time, and fill them anew. So whatever it could change is
copied before the next row is read. Arrays of 64 KiB or more, and texts or files of 1 MiB, are left to the encoder of
one sample, which copies none.
"""

from __future__ import annotations

import datetime
import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from datamat.features.base import as_array

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


__all__ = ["SampleColumns"]

_MOST_SAMPLES, _MOST_BYTES = 1024, 1 << 20
_LARGE_BYTES = 1 << 16  # of one array
_IMMUTABLE = frozenset({str, bytes, int, float, bool, datetime.datetime, type(None)})
_NUMBER_TYPES = frozenset({int, float, bool})
_NUMBERS = frozenset("biufc")  # kinds of the dtypes of arrays that are held as their bytes

_Steps: TypeAlias = "tuple[tuple[int, Callable[[int, Any], Any]], ...]"
"""Which values of a sample are measured or copied, by their place, and the functions that do it."""


class SampleColumns:
    """Columns of samples, which are added one by one.

    Args:
        names: names of the fields, without "key".
        nullable: names of those that may be None.

    Attributes:
        keys: the key of each sample.
        is_full: whether the samples have to be encoded before the next row is read.
    """

    def __init__(self, names: Sequence[str], nullable: Collection[str]) -> None:
        self.keys: list[str] = []
        self.is_full = False
        self._names = tuple(names)
        self._nullable = nullable
        self._values_of: Callable[[Mapping[str, Any]], Sequence[Any]]
        if len(names) > 1:
            self._values_of = operator.itemgetter(*names)
        else:
            self._values_of = lambda sample: [sample[name] for name in names]
        self._steps: dict[tuple[type, ...], _Steps] = {}  # by the types of a sample's values
        self._varied: set[int] = set()  # places of columns whose values are not all of one type
        self._samples: list[Any] = []
        self._forms: dict[int, tuple[np.dtype[Any], tuple[int, ...]]] = {}  # of arrays that are held as their bytes
        self._num_bytes = 0

    def add(self, sample: Mapping[str, Any], row_key: str, key: str) -> bool:
        """Add a sample; return False where it is left out, to be encoded alone.

        That is where it is large, holds what cannot be copied, or is not as declared: encoding it tells what is wrong.

        Args:
            sample: what `read` returned.
            row_key: key of the row.
            key: key of the sample, which has a number where the row gives several.
        """
        if len(sample) != len(self._names):
            given = sample.get("key")
            if len(sample) != len(self._names) + 1 or type(given) is not str or given != row_key:
                return False
        try:
            values = self._values_of(sample)
            types = tuple(map(type, values))
            steps = self._steps.get(types)
            if steps is None:
                steps = self._steps[types] = self._steps_of(types)
            if steps:
                values = list(values)
                for place, step in steps:
                    values[place] = step(place, values[place])
        except (KeyError, RecursionError, _AloneError):  # a list may hold itself
            return False
        self._samples.append(values)
        self.keys.append(key)
        if len(self.keys) >= _MOST_SAMPLES or self._num_bytes >= _MOST_BYTES:
            self.is_full = True
        return True

    def __len__(self) -> int:
        return len(self.keys)

    def cut(self, count: int) -> None:
        """Leave out all samples but the first ones."""
        del self._samples[count:], self.keys[count:]

    def take(self) -> dict[str, Any]:
        """Return the columns by field, "key" among them, and begin anew: arrays (n, ...), or lists of n values."""
        columns: dict[str, Any] = {"key": self.keys}
        for place, values in enumerate(zip(*self._samples, strict=True)):
            form = self._forms.get(place)
            if form is None:
                columns[self._names[place]] = list(values)
            else:
                joined = np.frombuffer(bytearray().join(values), form[0])
                columns[self._names[place]] = joined.reshape(len(values), *form[1])
        self.clear()
        return columns

    def clear(self) -> None:
        """Begin anew."""
        self.keys, self._samples, self._forms = [], [], {}
        self._num_bytes, self.is_full = 0, False

    def _steps_of(self, types: tuple[type, ...]) -> _Steps:
        """Return what has to be done with values of these types."""
        steps: list[tuple[int, Callable[[int, Any], Any]]] = []
        first = next(iter(self._steps), types)
        for place, kind in enumerate(types):
            if kind is not first[place]:
                self._varied.add(place)
                self._separate(place)
            if kind is np.ndarray:
                steps.append((place, self._array))
            elif kind is type(None):
                if self._names[place] not in self._nullable:
                    steps.append((place, self._refused))
            elif kind is str or kind is bytes:
                steps.append((place, self._measured))
            elif kind not in _IMMUTABLE and not issubclass(kind, np.generic):
                steps.append((place, self._other))
        return tuple(steps)

    def _array(self, place: int, value: np.ndarray) -> Any:
        """Return an array as bytes as long as all of its column have one form, else a copy."""
        form = self._forms.get(place)
        if form is not None and value.dtype is form[0] and value.shape == form[1]:
            found = value.tobytes()
            self._num_bytes += len(found)
            return found
        if form is not None:
            self._separate(place)
        elif not self._samples and place not in self._varied and _is_small(value):
            self._forms[place] = value.dtype, value.shape
            return self._array(place, value)
        return self._own(value)

    def _separate(self, place: int) -> None:
        """Make arrays of the bytes of a column."""
        form = self._forms.pop(place, None)
        if form is not None:
            for sample in self._samples:
                sample[place] = np.frombuffer(sample[place], form[0]).reshape(form[1])

    def _measured(self, place: int, value: str | bytes) -> Any:
        del place
        if len(value) >= _MOST_BYTES:  # below that, blocks of a few are faster: it is not copied in any case
            raise _AloneError
        self._num_bytes += len(value)
        return value

    def _other(self, place: int, value: Any) -> Any:
        del place
        if hasattr(value, "getbands"):  # what its pixels mean depends on the feature
            raise _AloneError
        return self._own(as_array(value))

    def _refused(self, place: int, value: Any) -> Any:
        del place, value
        raise _AloneError

    def _own(self, value: Any) -> Any:
        """Return a value that nobody else can change, and count its bytes.

        Raises:
            _AloneError: it is large, or cannot be copied.
        """
        kind = type(value)
        found = value
        num_bytes = 0
        if kind is str or kind is bytes:
            num_bytes = len(value)
        elif isinstance(value, np.ndarray):
            num_bytes = value.nbytes
            if num_bytes >= _LARGE_BYTES or (value.dtype.hasobject and not set(map(type, value.flat)) <= _IMMUTABLE):
                raise _AloneError
            found = value.copy()
        elif kind is list or kind is tuple:
            if set(map(type, value)) <= _NUMBER_TYPES:
                found, num_bytes = kind(value), 8 * len(value)
            else:
                found = kind([self._own(item) for item in value])
        elif kind is dict:
            found = {name: self._own(item) for name, item in value.items()}
        elif kind not in _IMMUTABLE and not isinstance(value, np.generic):
            raise _AloneError
        if num_bytes >= _LARGE_BYTES:
            raise _AloneError
        self._num_bytes += num_bytes
        return found


def _is_small(array: np.ndarray) -> bool:
    """Return True if an array can be held as its bytes."""
    return array.dtype.kind in _NUMBERS and 0 < array.nbytes < _LARGE_BYTES


class _AloneError(Exception):
    """A value whose sample has to be encoded alone."""
