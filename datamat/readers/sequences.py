"""Batches of sequences: padded to one length, bucketed by length within a budget of tokens, or packed into rows.

    measured    one pass over one field: the length of each record
    planned     for each epoch, the places of its order in windows: sorted by length and cut into batches, or fitted
                into rows (`Planner`); or all its records one after another, cut into rows of one length
    shaped      the lists of a batch as arrays (`Padding`, `Packing`)

A plan is a pure function of lengths, order and epoch. Its units (batches of a bucket, packed rows) take the place of
records in the schedule, so that ranks, workers and states work as they do for records. A row may hold a *piece* of a
record: the tokens from one place on to another. The last piece of each record goes to its end, wherever that is, so no
token is lost if a transform makes records longer.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, final

import numpy as np
import xxhash

from datamat.errors import OptionError, SampleError, count_of
from datamat.features.nesting import value_at, with_value
from datamat.readers.batches import permuted
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from datamat.readers.batches import EpochOrder


_WINDOW = 4096  # places whose records are sorted or fitted together
_TO_END = np.iinfo(np.int64).max  # behind the last token of a piece that goes to the end of its record


# ---------------------------------------------------------------- plans


@final
class Planner:
    """Cuts the epochs of an order into units of several records, as `Units` wants them. Thread-safe and picklable.

    Args:
        order: order of the records in each epoch.
        lengths: int (num_records,), length of the record at each position.
        budget: most tokens of a unit: of a batch that is padded to its longest record, or of a packed row.
        most: most records of a batch, or None; ignored for rows.
        seed: base seed of the order of the units.
        packs: whether units are packed rows.
        shuffles: whether units come in random order; otherwise in that of the records, window by window.
        chunk: which records are cut into pieces of several rows: "long", "all" or None, as in `BatchOptions`.

    Raises:
        OptionError: a record is longer than the budget, and is not to be cut.
    """

    def __init__(
        self,
        order: EpochOrder,
        lengths: NDArray[np.int64],
        budget: int,
        most: int | None,
        seed: int,
        *,
        packs: bool,
        shuffles: bool,
        chunk: str | None = None,
    ) -> None:
        self._order = order
        self._lengths = lengths
        self._budget = budget
        self._most = most
        self._seed = seed
        self.packs = packs
        self._shuffles = shuffles
        self._chunk = chunk
        self._plans: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        if len(lengths) and lengths.max() > budget and chunk is None:
            cut = "cut them with chunk='long'" if packs else "filter or cut such records (map)"
            raise OptionError(
                f"the record at position {int(lengths.argmax())} has {count_of(int(lengths.max()), 'token')}, and the "
                f"budget is {budget}; {cut}, or set a larger budget"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the units beside the order, as JSON values."""
        digest = xxhash.xxh3_64_hexdigest(self._lengths.astype("<i8").tobytes())
        found = [self.packs, self._budget, None if self.packs else self._most, self._shuffles, digest]
        return {"units": found if self._chunk is None else [*found, self._chunk]}

    def num_units(self, epoch: int) -> int:
        """Return the number of units of an epoch."""
        return len(self._plan(epoch)[1]) - 1

    def unit(self, epoch: int, number: int) -> NDArray[np.int64]:
        """Return the pieces of a unit, int64 (3, n): position of the record, first token, place behind the last.

        The last piece of a record, and so a whole one, has the largest int64 there.
        """
        pieces, bounds = self._plan(epoch)
        found = pieces[:, bounds[number] : bounds[number + 1]]
        return found if self._chunk is not None else _whole(found[0])

    def _plan(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pieces of all units, int64 (3, pieces), and where each unit begins; of whole records, (1, n)."""
        found = self._plans.get(epoch)
        if found is None:
            windows = range(0, self._order.num_records, _WINDOW)
            if self._chunk == "all":
                units = self._stream(epoch, windows)
            else:
                units = [unit for first in windows for unit in self._window(epoch, first)]
            sizes = np.fromiter((unit.shape[1] for unit in units), np.int64, len(units))
            pieces = np.concatenate([np.empty((1 if self._chunk is None else 3, 0), np.int64), *units], axis=1)
            found = pieces, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            self._plans = {epoch: found}
        return found

    def _window(self, epoch: int, first: int) -> list[NDArray[np.int64]]:
        positions = self._positions(epoch, first)
        lengths = self._lengths[positions]
        pieces = positions[None]
        if self._chunk is not None:
            pieces = _cut(positions, lengths, np.zeros_like(lengths), self._budget)
            lengths = self._sizes(pieces)
        by_length = np.argsort(lengths, kind="stable")
        cut = _rows if self.packs else _batches
        units = [pieces[:, unit] for unit in cut(by_length, lengths, self._budget, self._most)]
        return self._shuffled(units, epoch, first)

    def _stream(self, epoch: int, windows: range) -> list[NDArray[np.int64]]:
        """Return the rows of an epoch whose records follow each other without a gap; the last row may be shorter."""
        positions = np.concatenate([np.empty(0, np.int64), *(self._positions(epoch, first) for first in windows)])
        lengths = self._lengths[positions]
        pieces = _cut(positions, lengths, (np.cumsum(lengths) - lengths) % self._budget, self._budget)
        sizes = self._sizes(pieces)
        last = max(0, int(lengths.sum()) - 1) // self._budget  # records without tokens may follow the last token
        rows = np.minimum((np.cumsum(sizes) - sizes) // self._budget, last)
        units = np.split(pieces, np.flatnonzero(np.diff(rows)) + 1, axis=1) if len(rows) else []
        parts = (
            self._shuffled(units[first : first + _WINDOW], epoch, first) for first in range(0, len(units), _WINDOW)
        )
        return [unit for part in parts for unit in part]

    def _sizes(self, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        positions, starts, stops = pieces
        found: NDArray[np.int64] = np.minimum(stops, self._lengths[positions]) - starts
        return found

    def _positions(self, epoch: int, first: int) -> NDArray[np.int64]:
        """Return the positions of the records in the window that begins at a place of an epoch, int64 (n,)."""
        places = np.arange(first, min(first + _WINDOW, self._order.num_records), dtype=np.int64)
        return self._order.positions(epoch, places)

    def _shuffled(self, units: list[NDArray[np.int64]], epoch: int, first: int) -> list[NDArray[np.int64]]:
        if not self._shuffles or len(units) < 2:
            return units
        shuffled = permuted(np.arange(len(units)), len(units), self._seed, epoch, first, 1)
        return [units[place] for place in shuffled.tolist()]


def _whole(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([positions, np.zeros_like(positions), np.full_like(positions, _TO_END)])


def _cut(
    positions: NDArray[np.int64], lengths: NDArray[np.int64], places: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """Return the pieces of records that are cut at the ends of rows, int64 (3, pieces), as `Planner.unit` has them.

    Args:
        positions: int64 (n,), position of each record.
        lengths: int64 (n,), its tokens.
        places: int64 (n,), place in a row at which it begins.
        size: tokens of a row.
    """
    counts = np.maximum(1, -(-(places + lengths) // size))
    record = np.repeat(np.arange(len(positions)), counts)
    nth = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = nth * size - places[record]
    stops = np.where(nth + 1 == counts[record], _TO_END, starts + size)
    return np.stack([positions[record], np.maximum(starts, 0), stops])


def _batches(
    by_length: NDArray[np.int64], lengths: NDArray[np.int64], budget: int, most: int | None
) -> Iterator[NDArray[np.int64]]:
    """Yield batches of neighbours in length, as many records as the budget allows once all are as long as the last."""
    ordered = lengths[by_length].tolist()
    first = 0
    while first < len(ordered):
        limit = len(ordered) if most is None else min(len(ordered), first + most)
        ends = range(first + 1, limit + 1)
        count = bisect.bisect_right(ends, budget, key=functools.partial(_padded_tokens, ordered, first))
        yield by_length[first : first + max(1, count)]
        first += max(1, count)


def _padded_tokens(ordered: list[int], first: int, end: int) -> int:
    return (end - first) * ordered[end - 1]


def _rows(
    by_length: NDArray[np.int64], lengths: NDArray[np.int64], budget: int, most: int | None
) -> list[NDArray[np.int64]]:
    """Return rows of records, by best fit: the longest first, each into the fullest row that has room for it."""
    del most
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens that fit, number of the row), sorted
    for place in by_length[::-1].tolist():
        length = int(lengths[place])
        found = bisect.bisect_left(room, (length, -1))
        left, row = room.pop(found) if found < len(room) else (budget, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(place)
        bisect.insort(room, (left - length, row))
    return [np.array(row, np.int64) for row in rows]


# ---------------------------------------------------------------- shapes


@final
@frozen()
class Padding:
    """Makes one array of the values of a field that differ in their first dimension.

    Attributes:
        values: what fills the rest, by field.
    """

    values: Mapping[str, float]

    def __call__(self, batch: dict[str, Any], rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the batch with (n, longest, ...) instead of n arrays, and their lengths as NAME_length."""
        del rows
        found = batch
        for name, value in self.values.items():
            items = _of_one_dtype([np.asarray(item) for item in _values_of("pad", batch, name)], value)
            if len({(item.dtype, item.shape[1:]) for item in items}) > 1 or not items[0].ndim:
                shapes = ", ".join(sorted({f"{item.dtype} {item.shape}" for item in items}))
                raise OptionError(
                    f"pad: the values of {name!r} differ in more than their length ({shapes}); make them alike by map, "
                    "or do not pad that field"
                )
            lengths = np.array([len(item) for item in items], np.int64)
            shape = (len(items), lengths.max(), *items[0].shape[1:])
            padded = np.full(shape, _filler(name, value, items[0].dtype), items[0].dtype)
            for row, item in zip(padded, items, strict=True):
                row[: len(item)] = item
            found = with_value(with_value(found, name, padded), f"{name}_length", lengths)
        return found


@final
@frozen()
class Packing:
    """Lays the sequences of each row one behind another, and says which token belongs to which.

    Attributes:
        fields: fields that are packed, which have as many tokens as each other in every record.
        length: tokens of a row.
        values: what fills the rest, by field; 0 for those that it does not name.
    """

    fields: tuple[str, ...]
    length: int
    values: Mapping[str, float]

    def __call__(self, batch: dict[str, Any], rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the packed batch.

        Args:
            batch: arrays and lists by feature name.
            rows: int64 (n, 3), number of the row of each record, in order, and the first token of its piece there and
                the one behind the last.

        Returns:
            for each packed field (rows, length, ...); `segment_ids` and `positions`, int32 (rows, length); every other
            field as a list of lists, one for each row, also in dicts.

        Raises:
            SampleError: the fields of a record differ in length, or no longer fit into the row.
        """
        pieces = [slice(*piece) for piece in rows[:, 1:].tolist()]
        _, rows = np.unique(rows[:, 0], return_inverse=True)
        num_rows = int(rows.max()) + 1
        segments, places = np.zeros((2, num_rows, self.length), np.int32)
        columns: dict[str, np.ndarray] = {}
        packed = {name: _values_of("pack", batch, name) for name in self.fields}
        for name, items in packed.items():
            filler = self.values.get(name, 0)
            first = _of_one_dtype([np.asarray(item) for item in items], filler)[0]
            shape = (num_rows, self.length, *first.shape[1:])
            columns[name] = np.full(shape, _filler(name, filler, first.dtype), first.dtype)
        used, count = [0] * num_rows, [0] * num_rows
        for record, (row, piece) in enumerate(zip(rows.tolist(), pieces, strict=True)):
            whole = [np.asarray(items[record]) for items in packed.values()]
            values = [value[piece] for value in whole]
            size, start = len(values[0]), used[row]
            if any(len(value) != len(whole[0]) for value in whole) or start + size > self.length:
                lengths = ", ".join(f"{name}: {len(value)}" for name, value in zip(self.fields, whole, strict=True))
                raise SampleError(
                    str(batch["key"][record]) if "key" in batch else "?",
                    f"its fields have {lengths} tokens, and {self.length - start} are left in the row that was planned "
                    f"for it by the length of {self.fields[0]!r}; change lengths by map, before the reader plans",
                )
            for name, value in zip(self.fields, values, strict=True):
                columns[name][row, start : start + size] = value
            count[row] += 1
            segments[row, start : start + size] = count[row]
            places[row, start : start + size] = np.arange(size)
            used[row] = start + size
        found: dict[str, Any] = _by_row(batch, rows, num_rows)
        for name, column in columns.items():
            found = with_value(found, name, column)
        return {**found, "segment_ids": segments, "positions": places}


def _values_of(use: str, batch: Mapping[str, Any], name: str) -> Any:
    try:
        return value_at(batch, name)
    except KeyError as error:
        raise OptionError(f"{use}: the batch has no field {name!r}; it has {', '.join(batch)}") from error


def _of_one_dtype(items: list[np.ndarray], filler: Any) -> list[np.ndarray]:
    """Return arrays of text with the width of the longest word, and empty lists, which tell no dtype, as the others.

    Where all are empty, a filler that is text says that they would hold text.
    """
    texts = [item for item in items if item.dtype.kind == "U"]
    dtype = np.result_type(*texts) if texts else next((item.dtype for item in items if item.size), None)
    if dtype is None and isinstance(filler, str):
        dtype = np.dtype("U1")
    if dtype is None:
        return items
    return [item.astype(dtype) if not item.size or item.dtype.kind == "U" else item for item in items]


def _filler(name: str, value: Any, dtype: np.dtype[Any]) -> Any:
    """Return what fills up the values of a field.

    Raises:
        OptionError: the dtype of the values does not have it: it would become another number.
    """
    is_number = isinstance(value, (Real, np.number, np.bool_))
    if dtype.kind == "U":
        fits = isinstance(value, str) and len(value) * 4 <= max(dtype.itemsize, 4)
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        fits = is_number and limits.min <= value <= limits.max and value == int(value)
    else:
        fits = is_number and (dtype.kind != "b" or value in (0, 1))
    if not fits:
        raise OptionError(
            f"pad: {value!r} is not {dtype}, as the values of {name!r} are; convert these with map, as in "
            "values.astype('int64'), or choose another number"
        )
    return value


@final
@frozen()
class Budget:
    """Holds batches of a bucket to their budget, where a function may have changed the lengths that were planned with.

    Attributes:
        field: field by which records were put together.
        tokens: most tokens of a batch that is padded to its longest record.
    """

    field: str
    tokens: int

    def __call__(self, batch: dict[str, Any], rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the batch unchanged, which may be a list of samples under "".

        Raises:
            SampleError: the batch has more tokens than its budget, or a value has no length.
        """
        del rows
        samples = batch.get("")
        values = _lengthy(batch, self.field) if samples is None else [_lengthy(one, self.field) for one in samples]
        lengths = [len(value) for value in values]
        if lengths and len(lengths) * max(lengths) > self.tokens:
            longest = lengths.index(max(lengths))
            keys = batch.get("key") if samples is None else [sample.get("key", "?") for sample in samples]
            raise SampleError(
                "?" if keys is None else str(keys[longest]),
                f"its field {self.field!r} has {count_of(lengths[longest], 'token')} now, so its batch of "
                f"{len(lengths)} has more "
                f"than {self.tokens}: lengths are measured once, before the first epoch; change them in the same way "
                "in each epoch, or after they are batched",
            )
        return batch


def _lengthy(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field; an empty one if a function has left it out."""
    try:
        return value_at(fields, name)
    except KeyError:
        return ()


def _by_row(values: Any, rows: NDArray[np.int64], num_rows: int) -> Any:
    """Return the values of a field in a list for each row; those of a dict of fields in a dict of such lists."""
    if isinstance(values, dict):
        return {name: _by_row(part, rows, num_rows) for name, part in values.items()}
    found: list[list[Any]] = [[] for _ in range(num_rows)]
    for row, value in zip(rows.tolist(), values, strict=True):
        found[row].append(value)
    return found


# ---------------------------------------------------------------- arguments


def one_budget(value: Any, features: Mapping[str, Any] | None = None) -> tuple[str, int]:
    """Return field and tokens of `bucket={field: tokens}`.

    Raises:
        OptionError: the value is not such a dict, or names no field.
    """
    if not isinstance(value, Mapping) or len(value) != 1:
        raise OptionError(f"bucket is {value!r}; want one field and its most tokens, as in bucket={{'tokens': 4096}}")
    return next(iter(_checked("bucket", value, features).items()))


def packed_fields(value: Any, features: Mapping[str, Any] | None = None) -> tuple[tuple[str, ...], int]:
    """Return the fields and tokens of `pack={field: tokens, ...}`.

    Raises:
        OptionError: the value is not such a dict, names no field, or gives fields rows of different lengths.
    """
    if not isinstance(value, Mapping) or not value:
        raise OptionError(f"pack is {value!r}; want fields and the tokens of a row, as in pack={{'tokens': 2048}}")
    found = _checked("pack", value, features)
    if len(set(found.values())) > 1:
        raise OptionError(f"pack is {value!r}; want one length of rows for all fields")
    return tuple(found), next(iter(found.values()))


def check_chunk(value: Any, pack: Any) -> None:
    """Raise `OptionError` unless `chunk` is None, or says which records of packed rows are cut."""
    if value not in (None, "long", "all"):
        raise OptionError(f"chunk is {value!r}; want 'long', 'all' or None")
    if value is not None and pack is None:
        raise OptionError(f"chunk is {value!r}, which is for pack; add pack={{FIELD: TOKENS}}")


def check_padded(value: Any, features: Mapping[str, Any] | None) -> None:
    """Raise `OptionError` unless `pad` is None or a dict of what fills up fields of the samples."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise OptionError(f"pad is {value!r}; want fields and what fills them up, as in pad={{'tokens': 0}}")
    unknown = [name for name in value if features is not None and name not in features]
    if unknown:
        raise OptionError(f"pad names {unknown[0]!r}; want a field of the samples: {', '.join(features or ())}")


def _checked(name: str, value: Mapping[Any, Any], features: Mapping[str, Any] | None) -> dict[str, int]:
    for field, tokens in value.items():
        if features is not None and field not in features:
            raise OptionError(f"{name} names {field!r}; want a field of the samples: {', '.join(features)}")
        if isinstance(tokens, bool) or not isinstance(tokens, int | np.integer) or tokens < 1:
            raise OptionError(f"{name}: {field!r} has {tokens!r} tokens; want a number, 1 or more")
    return {str(field): int(tokens) for field, tokens in value.items()}
