"""Collect samples that are read one by one into columns: encoding them together takes a fraction of the time.

    read ── sample ──> SampleColumns.add ... take() ──> Features.encode_block
                       └── full: by rows, by bytes, or where a value cannot be copied

`read` may return the same dict, with the same arrays, each time, refilled. So whatever it could change is copied before
the next row is read. Arrays of 64 KiB or more, and texts or files of 1 MiB, go to the encoder of single samples, which
copies nothing.
"""

from __future__ import annotations

import datetime
import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from datamat.features.base import as_array

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_MOST_SAMPLES, _MOST_BYTES = 1024, 1 << 20
_LARGE_BYTES = 1 << 16  # of one array
_IMMUTABLE = frozenset({str, bytes, int, float, bool, datetime.datetime, type(None)})
_NUMBER_TYPES = frozenset({int, float, bool})
_NUMBERS = frozenset("biufc")  # dtype kinds of arrays that are held as bytes

_Steps: TypeAlias = "tuple[tuple[int, Callable[[int, Any], Any]], ...]"
"""The values of a sample to measure or copy, by place, and the functions that do it."""


class SampleColumns:
    """Columns of samples that are added one by one.

    Args:
        names: names of the fields, without "key".
        nullable: names of the fields that may be None.

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
        self._varied: set[int] = set()  # places of columns with values of several types
        self._samples: list[Any] = []
        self._forms: dict[int, tuple[np.dtype[Any], tuple[int, ...]]] = {}  # of arrays that are held as bytes
        self._num_bytes = 0

    def add(self, sample: Mapping[str, Any], row_key: str, key: str) -> bool:
        """Add a sample; return False if it must be encoded alone.

        That is the case if it is large, cannot be copied, or does not fit the schema: encoding it then shows the
        reason.

        Args:
            sample: result of `read`.
            row_key: key of the row.
            key: key of the sample, which has a number if the row gives several.
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
        except (KeyError, RecursionError, _AloneError):  # a list may contain itself
            return False
        self._samples.append(values)
        self.keys.append(key)
        if len(self.keys) >= _MOST_SAMPLES or self._num_bytes >= _MOST_BYTES:
            self.is_full = True
        return True

    def __len__(self) -> int:
        return len(self.keys)

    def cut(self, count: int) -> None:
        """Keep only the first samples."""
        del self._samples[count:], self.keys[count:]

    def take(self) -> dict[str, Any]:
        """Return and clear the columns by field, including "key": arrays (n, ...), or lists of n values."""
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
        """Remove all samples."""
        self.keys, self._samples, self._forms = [], [], {}
        self._num_bytes, self.is_full = 0, False

    def _steps_of(self, types: tuple[type, ...]) -> _Steps:
        """Return the steps for values of these types."""
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
        """Return an array as bytes while all in its column have one form, else a copy."""
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
        """Convert the bytes in a column to arrays."""
        form = self._forms.pop(place, None)
        if form is not None:
            for sample in self._samples:
                sample[place] = np.frombuffer(sample[place], form[0]).reshape(form[1])

    def _measured(self, place: int, value: str | bytes) -> Any:
        del place
        if len(value) >= _MOST_BYTES:  # below that, blocks of a few are faster: it is not copied in either case
            raise _AloneError
        self._num_bytes += len(value)
        return value

    def _other(self, place: int, value: Any) -> Any:
        del place
        if hasattr(value, "getbands"):  # the meaning of its pixels depends on the feature
            raise _AloneError
        return self._own(as_array(value))

    def _refused(self, place: int, value: Any) -> Any:
        del place, value
        raise _AloneError

    def _own(self, value: Any) -> Any:
        """Return a value that is not shared with other code, and count its bytes.

        Raises:
            _AloneError: the value is large or cannot be copied.
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
    """Return True if an array can be held as bytes."""
    return array.dtype.kind in _NUMBERS and 0 < array.nbytes < _LARGE_BYTES


class _AloneError(Exception):
    """The sample of a value must be encoded alone."""
