"""Describes what a dataset reads: the records of one or more directories, and a selection of them. Both are values.

    Part          the records of one directory, as some of their fields, with those of what was joined to them, each
                  through the functions of `map`
    Records       parts, end to end: a position leads to a part and a record of it
    Selection     positions in an order: a range, or an index array made when it is first needed
    Member        records and a selection: what `mix` mixes

Each view of a dataset is another selection of the same records, or the same selection of other records. An order over
the places of a selection therefore serves all views, and a state is a place in it with a digest of both.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import re
from itertools import accumulate
from typing import TYPE_CHECKING, Any, final

import numpy as np
import xxhash

from datamat.errors import OptionError, SampleError
from datamat.features import Statistics
from datamat.features.nesting import value_at
from datamat.parallel import physical_cores
from datamat.readers.batches import Order, Selected, records_at
from datamat.readers.loader import DecodingThreads
from datamat.readers.records import partners_of
from datamat.readers.remote import LookAhead
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from datamat.directory.manifest import Manifest, ShardInfo
    from datamat.errors import CorruptDataError
    from datamat.features import Features
    from datamat.folders import Folder
    from datamat.readers.batches import EpochOrder
    from datamat.readers.records import Partner, SampleReader
    from datamat.transforms.augmenter import SampleTransform


# ---------------------------------------------------------------- records


@final
@frozen(eq=False)
class Part:
    """The records of one directory.

    Attributes:
        folder: the directory.
        manifest: manifest of the directory when it was loaded.
        split: split to read, or None for all splits.
        reader: decoded samples of the split, by position.
        maps: functions that each sample goes through, in this order.
    """

    folder: Folder
    manifest: Manifest
    split: str | None
    reader: SampleReader
    maps: tuple[SampleTransform, ...] = ()

    @property
    def shards(self) -> Sequence[ShardInfo]:
        """The shards of the split, in order."""
        return self.manifest.shards if self.split is None else self.manifest.splits[self.split]

    @property
    def partners(self) -> Sequence[Partner]:
        """Partners joined to the records, in this order."""
        return partners_of(self.reader.records)

    @property
    def digest(self) -> str:
        """Digest of the records, which changes when any record does."""
        made_of = [*(info.checksum for info in self.shards), *(partner.digest for partner in self.partners)]
        return xxhash.xxh3_64_hexdigest(",".join(made_of).encode())

    def statistics(self) -> Statistics | None:
        """Return the statistics of all records of the split and of those joined to them; None if unknown."""
        found = Statistics.total(info.statistics for info in self.shards)
        if found is not None:
            for known in [one.statistics for one in self.partners if one.statistics is not None]:
                for name, of_field in known.fields.items():
                    found.observe(name, of_field)
        return found

    def read_as(self, features: Features) -> Part:
        """Return the part, with records decoded by a schema that `Features.as_found` returned."""
        return dataclasses.replace(self, reader=dataclasses.replace(self.reader, features=features))

    def with_fields(self, names: Sequence[str]) -> Part:
        """Return the part with some of the fields of its records; `key` stays.

        Raises:
            OptionError: the records have no such field.
        """
        features = self.reader.features
        unknown = [name for name in names if name not in features]
        if unknown:
            raise OptionError(
                f"the records of {self.folder} have no field {unknown[0]!r}; want some of {', '.join(features)}"
            )
        return dataclasses.replace(self, reader=self.reader.with_fields(names))


def mapped(maps: Sequence[SampleTransform], sample: dict[str, Any], epoch: int, seeds_globals: bool) -> dict[str, Any]:
    """Return a sample after the functions of `map`; its key stays."""
    key = sample["key"]
    for function in maps:
        sample = {"key": key, **function(sample, epoch, seeds_globals=seeds_globals)}
    return sample


@final
class Records:
    """The records of parts that have the same fields, end to end. Thread-safe and picklable.

    Args:
        parts: the parts, at least one.

    Raises:
        OptionError: the parts differ in their fields.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        first, *others = self.parts
        for other in others:
            _check_same(first, other)
        self._ends = list(accumulate(len(part.reader.records) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def starts(self) -> list[int]:
        """Position of the first record of each part."""
        return [0, *self._ends[:-1]]

    @property
    def features(self) -> Features:
        """Schema of the records."""
        return self.parts[0].reader.features

    @property
    def digest(self) -> str:
        """Digest of all records: that of the part, if there is one."""
        if len(self.parts) == 1:
            return self.parts[0].digest
        return xxhash.xxh3_64_hexdigest("+".join(part.digest for part in self.parts).encode())

    @property
    def is_mapped(self) -> bool:
        """Whether samples go through functions of `map`."""
        return any(part.maps for part in self.parts)

    @property
    def is_joined(self) -> bool:
        """Whether records have columns of others."""
        return any(part.partners for part in self.parts)

    def statistics(self) -> Statistics | None:
        """Return the statistics of all records of the splits; None if those of any split are unknown."""
        found = Statistics()
        for part in self.parts:
            if (known := part.statistics()) is None:
                return None
            found.add(known)
        return found

    def changed(self, change: Callable[[Part], Part]) -> Records:
        """Return the records with each part changed."""
        return Records([change(part) for part in self.parts])

    def place(self, position: int) -> tuple[Part, int]:
        """Return the part that holds a record, and the position of the record in it."""
        number = bisect.bisect_right(self._ends, position)
        return self.parts[number], position - (self._ends[number - 1] if number else 0)

    # Called by `BatchMaker`.

    @property
    def read_or_skip(self) -> Callable[..., dict[str, Any] | None]:
        """Function of a position and memory that returns the stored sample or None, as in `SampleReader`."""
        return self.parts[0].reader.read_or_skip if len(self.parts) == 1 else self._read_or_skip

    def _read_or_skip(self, position: int, memory: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
        part, own = self.place(position)
        return part.reader.read_or_skip(own, memory)

    def reading(self, positions: NDArray[np.int64]) -> Callable[..., dict[str, Any] | None]:
        """Return a function that acts as `read_or_skip` at these positions, as in `SampleReader`."""
        if len(self.parts) == 1:
            return self.parts[0].reader.reading(positions)
        which = np.searchsorted(self._ends, positions, side="right")
        readers: dict[int, Callable[..., dict[str, Any] | None]] = {
            number: self.parts[number].reader.reading(positions[which == number] - self.starts[number])
            for number in np.unique(which).tolist()
        }

        def read(position: int, memory: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
            number = bisect.bisect_right(self._ends, position)
            return readers[number](position - self.starts[number], memory)

        return read

    @property
    def block_records(self) -> int:
        """How many records `read_block` should read at once; 0 if one by one is as fast."""
        return min(part.reader.block_records for part in self.parts)

    @property
    def num_threads(self) -> int:
        """How many threads read fastest."""
        return max(part.reader.num_threads for part in self.parts)

    def read_block(self, positions: NDArray[np.int64], num_threads: int = 1) -> dict[str, Any] | None:
        """Return many stored samples by field, or None if they have to be read one by one."""
        if len(self.parts) == 1:
            return self.parts[0].reader.read_block(positions, num_threads)
        which = np.searchsorted(self._ends, positions, side="right")
        order = np.argsort(which, kind="stable")
        blocks = []
        for number in np.unique(which).tolist():
            own = positions[which == number] - self.starts[number]
            block = self.parts[number].reader.read_block(own, num_threads)
            if block is None:
                return None
            blocks.append(block)
        back = np.argsort(order)
        return {name: _joined([block[name] for block in blocks], back) for name in self.features}

    def transformed(
        self, last: SampleTransform | None
    ) -> Callable[[int, dict[str, Any], int, bool], dict[str, Any]] | None:
        """Return the function that `BatchMaker` calls with each sample, or None if there is nothing to do.

        Args:
            last: function that all samples go through after those of `map`.
        """
        return _Steps(self, last) if self.is_mapped or last is not None else None

    def sample(self, position: int) -> dict[str, Any]:
        """Return a sample as it is in the first epoch.

        Raises:
            CorruptDataError: the record is damaged.
        """
        part, own = self.place(position)
        return mapped(part.maps, part.reader.read_sample(own), 0, False)

    def sample_or_skip(self, position: int) -> dict[str, Any] | None:
        """Return a sample as it is in the first epoch, or None if its record is damaged and skipped."""
        part, own = self.place(position)
        found = part.reader.read_or_skip(own)
        return None if found is None else mapped(part.maps, found, 0, False)

    # Damaged records that were skipped, as `loader.Skipped` wants them.

    @property
    def is_skipping(self) -> bool:
        """Whether damaged records of any part are skipped."""
        return any(part.reader.skipped.is_skipping for part in self.parts)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the records that were skipped, each once, even if several parts are the same directory."""
        found = {
            (id(part.reader.skipped), one): start + one
            for start, part in zip(self.starts[::-1], self.parts[::-1], strict=True)
            for one in part.reader.skipped.positions
        }
        return tuple(sorted(found.values()))

    def add(self, positions: Iterable[int]) -> None:
        """Count records that another process has skipped and logged."""
        for position in positions:
            part, own = self.place(position)
            part.reader.skipped.add([own])
        for part in self.parts:
            part.reader.skipped.add([])

    # Keys.

    def positions_of(self, key: str, *, is_read: bool = False) -> Iterator[int]:
        """Yield the positions of the records with a key, at most one in each part.

        Args:
            key: key of the records.
            is_read: whether they are read next.
        """
        for start, part in zip(self.starts, self.parts, strict=True):
            found = part.reader.keys.position_of(key, is_read=is_read)
            if found is not None:
                yield start + found

    def keys(self) -> list[str]:
        """Return the keys of all records, in order."""
        return [key for part in self.parts for key in part.reader.keys.keys()]  # noqa: SIM118 -- not a dict

    # Files.

    def look_ahead(self, is_local: bool) -> LookAhead | None:
        """Return the object that fetches the shards of an epoch; None if none are copied.

        Args:
            is_local: whether the epoch reads each shard in one go.
        """
        shards = [one for part in self.parts for one in part.reader.records.fetched]
        shards += [one for part in self.parts for partner in part.partners for one in partner.records.fetched]
        if not any(fetcher for _, fetcher in shards):
            return None
        if self.is_joined:
            return LookAhead(shards, is_local=False, reached=self._reached)
        return LookAhead(shards, is_local=is_local)

    def _reached(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return positions followed by those of the partners, among all shards end to end."""
        found, behind = [positions], len(self)
        for start, end, part in zip(self.starts, self._ends, self.parts, strict=True):
            own = positions[(positions >= start) & (positions < end)] - start
            for partner in part.partners:
                num_records = sum(info.num_records for info, _ in partner.records.fetched)
                rows = partner.rows[own] if num_records else own[:0]
                found.append(rows[rows >= 0] + behind)
                behind += num_records
        return np.concatenate(found)

    def damage_in(self, file: str) -> CorruptDataError:
        """Return what is wrong with a shard of which not all records could be read."""
        owner = next(part for part in self.parts if file in {part.folder.place(info.file) for info in part.shards})
        return owner.reader.damage_in(file)

    def blocks(self) -> tuple[NDArray[np.int64], int, int] | None:
        """Return how formats want neighbours to be read; None if all read records one by one.

        Returns:
            Position at which each group of neighbours begins; most records of a group; how many to mix if all are
            mixed.
        """
        groups = [part.reader.records.groups for part in self.parts]
        if not any(groups):
            return None
        found = [group or (_BLOCK_RECORDS, 1) for group in groups]
        return (
            self.starts_of_blocks([size for size, _ in found]),
            max(size for size, _ in found),
            max(map(math.prod, found)),
        )

    def starts_of_blocks(self, sizes: Sequence[int]) -> NDArray[np.int64]:
        """Return the position where each block of neighbours begins, given the most records per block in each part."""
        found = [np.empty(0, np.int64)]
        for first, part, size in zip(self.starts, self.parts, sizes, strict=True):
            start = first
            for info in part.shards:
                found.append(np.arange(start, start + info.num_records, size, dtype=np.int64))
                start += info.num_records
        return np.concatenate(found)


_BLOCK_RECORDS = 64


def _check_same(one: Part, other: Part) -> None:
    features, others = one.reader.features, other.reader.features
    for name in {**features, **others}:
        if features.get(name) != others.get(name):
            declared = [part.get(name) for part in (features, others)]
            first, second = ("missing" if feature is None else feature.declared() for feature in declared)
            raise OptionError(
                f"field {name!r} is {first} in {one.folder} and {second} in {other.folder}; choose fields that both "
                "have by columns(...), or write one of them again"
            )


def _joined(pieces: Sequence[Any], order: NDArray[np.int64]) -> Any:
    """Return a column of several blocks as one column, with its rows in another order."""
    kinds = {(piece.dtype, piece.shape[1:]) if isinstance(piece, np.ndarray) else None for piece in pieces}
    if len(kinds) == 1 and None not in kinds:
        return np.concatenate(pieces)[order]
    rows = [row for piece in pieces for row in piece]
    return [rows[place] for place in order.tolist()]


@final
@frozen()
class _Steps:
    """All functions that a sample goes through. Picklable if the functions are."""

    records: Records
    last: SampleTransform | None

    def __call__(self, position: int, sample: dict[str, Any], epoch: int, seeds_globals: bool) -> dict[str, Any]:
        part, _ = self.records.place(position)
        sample = mapped(part.maps, sample, epoch, seeds_globals)
        return sample if self.last is None else self.last(sample, epoch, seeds_globals=seeds_globals)


# ---------------------------------------------------------------- selections


@final
class Selection:
    """Positions of records in an order. Thread-safe; a pickled copy has the index array.

    Args:
        made: the positions, or a function that returns them, called when they are first needed.
    """

    def __init__(self, made: range | NDArray[np.int64] | Callable[[], range | NDArray[np.int64]]) -> None:
        self._make = made if callable(made) else lambda: made
        if not callable(made):
            self.__dict__["positions"] = _as_range(made)

    @functools.cached_property
    def positions(self) -> range | NDArray[np.int64]:
        """The positions: a range, or an int64 array (n,)."""
        return _as_range(self._make())

    def __len__(self) -> int:
        return len(self.positions)

    def __getstate__(self) -> dict[str, Any]:
        return {"positions": self.positions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def at(self, place: int) -> int:
        """Return the position at a place."""
        return int(self.positions[place])

    def place_of(self, positions: Iterable[int]) -> int | None:
        """Return the first place that holds one of these positions, or None."""
        found = [place for position in positions if (place := self._place_of(position)) is not None]
        return min(found, default=None)

    def _place_of(self, position: int) -> int | None:
        if isinstance(self.positions, range):
            return self.positions.index(position) if position in self.positions else None
        order = self._by_position
        place = int(np.searchsorted(self.positions, position, sorter=order))
        return int(order[place]) if place < len(order) and self.positions[order[place]] == position else None

    @functools.cached_property
    def _by_position(self) -> NDArray[np.int64]:
        return np.argsort(self.positions, kind="stable")

    def then(self, choose: Callable[[Selection], range | NDArray[np.int64]]) -> Selection:
        """Return what a function selects from this selection; it returns places in it."""

        def make() -> range | NDArray[np.int64]:
            places = choose(self)
            if isinstance(places, range) and isinstance(self.positions, range):
                whole = self.positions
                first, behind = (whole.start + whole.step * place for place in (places.start, places.stop))
                return range(first, behind, whole.step * places.step)
            return records_at(self.positions, np.asarray(places, np.int64))

        return Selection(make)

    def is_all(self, total: int) -> bool:
        """Return True if these are all positions, in order."""
        return self.positions == range(total) if isinstance(self.positions, range) else False

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the positions."""
        if isinstance(self.positions, range):
            return str(self.positions)
        return xxhash.xxh3_64_hexdigest(self.positions.astype("<i8").tobytes())


def _as_range(positions: range | NDArray[np.int64]) -> range | NDArray[np.int64]:
    """Return consecutive positions as a range, so that selections are equal however they were made."""
    if isinstance(positions, range):
        return positions if len(positions) else range(0)
    if not len(positions):
        return range(0)
    first = int(positions[0])
    if int(positions[-1]) - first == len(positions) - 1 and (np.diff(positions) == 1).all():
        return range(first, first + len(positions))
    return positions


def order_of(records: Records, selection: Selection, shuffle: bool | int, seed: int) -> EpochOrder:
    """Return the order in which an epoch takes the records of a selection.

    Args:
        records: the records.
        selection: which of them, and their order without shuffling.
        shuffle: False for that order, True to mix all records, or the size of the window.
        seed: base seed of the shuffling, 0 or more.

    Raises:
        OptionError: an argument is invalid.
    """
    if shuffle > 1:
        for part in records.parts:
            part.reader.records.keep_window(min(int(shuffle), len(selection)))
    if len(records.parts) == 1 and selection.is_all(len(records)):
        part = records.parts[0]
        return Order.of([info.num_records for info in part.shards], shuffle, seed, groups=part.reader.records.groups)
    blocks = records.blocks()
    found = Order.of((len(selection),), shuffle, seed, groups=None if blocks is None else (blocks[1], 1))
    if not found.window:
        return Selected(found, selection.positions)
    starts = records.starts_of_blocks([_BLOCK_RECORDS] * len(records.parts)) if blocks is None else blocks[0]
    window = found.window if blocks is None or shuffle is not True else blocks[2]
    runs = _runs(selection.positions, starts)
    return Selected(Order(runs, found.seed, window, found.block, has_runs=True), selection.positions)


def _runs(positions: range | NDArray[np.int64], starts: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the lengths of the runs of positions within one block, given where blocks start."""
    at = np.arange(positions.start, positions.stop, positions.step) if isinstance(positions, range) else positions
    blocks = np.searchsorted(starts, at, side="right")
    cuts = np.flatnonzero(np.diff(blocks)) + 1
    return tuple(np.diff([0, *cuts.tolist(), len(at)]).tolist()) if len(at) else (0,)


# ---------------------------------------------------------------- filters
#
# What a condition keeps of a selection, as places in it. A function gets every sample; an expression gets the fields
# that it names, from the index if the samples do not have them: no shard is read for these.


_CHUNK = 1024


def kept_by_function(
    condition: Callable[[dict[str, Any]], Any], records: Records, positions: range | NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the places of samples, as in the first epoch, for which a function is true; skipped samples have none."""

    def kept(first: int) -> list[int]:
        chunk = positions[first : first + _CHUNK]
        own = np.asarray(chunk, np.int64)
        block = records.read_block(own) if records.block_records and not records.is_mapped else None
        if block is None:
            samples = (records.sample_or_skip(int(position)) for position in own)
        else:
            samples = ({name: values[row] for name, values in block.items()} for row in range(len(own)))
        return [first + row for row, sample in enumerate(samples) if sample is not None and _is_true(condition, sample)]

    with DecodingThreads(len(physical_cores()), "datamat-filter") as threads:
        found = list(threads.map(kept, range(0, len(positions), _CHUNK)))
    return np.array([place for places in found for place in places], np.int64)


def lengths_of(records: Records, positions: NDArray[np.int64], field: str) -> NDArray[np.int64]:
    """Return int64 (records,): the length of a field's value at each of the positions; 0 elsewhere and if skipped.

    Raises:
        OptionError: the values have no length.
    """
    found = np.zeros(len(records), np.int64)

    def measure(first: int) -> None:
        own = positions[first : first + _CHUNK]
        block = records.read_block(own) if records.block_records and not records.is_mapped else None
        if block is not None:
            found[own] = [len(value) for value in block[field]]
            return
        for position in own.tolist():
            sample = records.sample_or_skip(position)
            if sample is not None:
                found[position] = len(value_at(sample, field))

    try:
        with DecodingThreads(len(physical_cores()), "datamat-measure") as threads:
            list(threads.map(measure, range(0, len(positions), _CHUNK)))
    except (TypeError, KeyError) as error:
        raise OptionError(
            f"bucket and pack want a field of sequences, but {field!r} is not one ({error!r}); name another"
        ) from error
    return found


def kept_by_row(
    condition: Callable[[dict[str, Any]], Any], records: Records, positions: range | NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the places of the records for which a function of their row in the index, including `key`, is true."""
    rows = _index_table(records).take(np.asarray(positions, np.int64))
    return np.flatnonzero([_is_true(condition, row) for row in rows.to_pylist()])


def _is_true(condition: Callable[[dict[str, Any]], Any], sample: dict[str, Any]) -> bool:
    """Return True if a function is true of a sample or row, which it may write to.

    Raises:
        SampleError: the function raised, or its result is neither true nor false.
    """
    key = sample["key"]
    try:
        return bool(condition(sample))
    except Exception as error:
        raise SampleError(key, f"filter: the condition raised {type(error).__name__}: {error}") from error


def kept_by_expression(
    expression: Any, records: Records, positions: range | NDArray[np.int64], *, on_index: bool
) -> NDArray[np.int64]:
    """Return the places of the records for which a `pyarrow.compute.Expression` is true.

    With `on_index`, names stand for fields of the index, even if samples have a field of that name.

    Raises:
        OptionError: the expression names a field that neither samples nor index have, or does not fit its type.
    """
    import pyarrow as pa

    places = np.asarray(positions, np.int64)
    fields = functools.cache(lambda: _index_table(records))
    type_of = functools.partial(_type_of, features=records.features, fields=fields, on_index=on_index)
    names = _names_in(expression, type_of, {} if on_index else records.features)
    from_samples = [] if on_index else [name for name in names if name in records.features and name != "key"]
    if records.is_mapped and from_samples:
        raise OptionError(
            f"filter: the expression names {from_samples[0]!r}, which a function of map may change; filter before "
            "map, or by a function of the sample"
        )
    table = pa.table({"": pa.array(np.arange(len(places)))})
    of_index = [name for name in names if name not in from_samples]
    if of_index:
        rows = fields().take(places)
        for name in of_index:
            if name not in rows.column_names:
                known = ", ".join(dict.fromkeys([*([] if on_index else records.features), *rows.column_names]))
                raise OptionError(f"filter: neither samples nor index have a field {name!r}; want some of {known}")
            table = table.append_column(name, rows[name])
    if from_samples:
        values = values_at(records.changed(lambda part: part.with_fields(from_samples)), places)
        table = table.take(np.array(values[""], np.int64))
        for name in from_samples:
            plain = [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in values[name]]
            table = table.append_column(name, pa.array(plain, type_of(name)))
    try:
        return np.asarray(table.filter(expression)[""].to_numpy(), np.int64)
    except (pa.ArrowException, TypeError) as error:
        raise _misfit(expression, error, names, {} if on_index else records.features) from error


def _misfit(expression: Any, error: Exception, names: Iterable[str], features: Mapping[str, Any]) -> OptionError:
    """Return the error for an expression that Arrow cannot evaluate, with the types of the fields that it names."""
    declared = ", ".join(f"{name!r} is {features[name].declared()}" for name in names if name in features)
    remedy = "want one that fits" + (f": {declared}" if declared else "")
    return OptionError(f"filter: {expression} does not fit the fields ({error}); {remedy}")


def _names_in(expression: Any, type_of: Callable[[str], Any], features: Mapping[str, Any]) -> list[str]:
    """Return the fields that an expression names: Arrow says which field is missing, one after another."""
    import pyarrow as pa

    types: dict[str, Any] = {}
    while True:
        try:
            pa.table({name: pa.nulls(0, kind) for name, kind in types.items()}).filter(expression)
        except (pa.ArrowException, TypeError) as error:
            found = re.match(r"No match for FieldRef\.(?:Nested\(FieldRef\.)?Name\((.*?)\)", str(error))
            if found is None or found[1] in types:
                raise _misfit(expression, error, types, features) from error
            types[found[1]] = type_of(found[1])
        else:
            return list(types)


def _type_of(name: str, features: Features, fields: Callable[[], Any], *, on_index: bool) -> Any:
    """Return the Arrow type of a field of samples or index; that of null if neither has it.

    Raises:
        OptionError: Arrow has no type for the values.
    """
    import pyarrow as pa

    if name not in features or name == "key" or on_index:
        table = fields()
        return table.schema.field(name).type if name in table.column_names else pa.null()
    if name in features.dicts:
        children = ", ".join(features.dicts[name].paths.values())
        raise OptionError(f"filter: {name!r} is a dict; name a field in it, as in field({children.split(', ')[0]!r})")
    dtype, shape = features[name].value_type()
    others = {"string": pa.string(), "bytes": pa.binary(), "datetime64[us]": pa.timestamp("us")}
    try:
        found = others[dtype] if dtype in others else pa.from_numpy_dtype(np.float32 if dtype == "bfloat16" else dtype)
    except (pa.ArrowException, TypeError) as error:
        raise OptionError(
            f"filter: {name!r} is {features[name].declared()}, for which Arrow has no type; filter by a function of "
            "the sample"
        ) from error
    for _ in shape:
        found = pa.list_(found)
    return found


def _index_table(records: Records) -> Any:
    """Return the key of each record, and the fields of its row, as a `pyarrow.Table`."""
    import pyarrow as pa

    indexes = [part.reader.keys for part in records.parts]
    tables = [index.fields().append_column("key", pa.array([*index.keys()], pa.string())) for index in indexes]
    return pa.concat_tables(tables, promote_options="permissive")


def values_at(records: Records, positions: NDArray[np.int64]) -> dict[str, Any]:
    """Return the stored values of some records by field, and under "" the places of records that were not skipped."""
    found: dict[str, list[Any]] = {name: [] for name in ["", *records.features]}

    def read(first: int) -> dict[str, Any]:
        own = positions[first : first + _CHUNK]
        block = records.read_block(own) if records.block_records else None
        if block is not None:
            return {"": range(first, first + len(own)), **block}
        samples = [(first + row, records.sample_or_skip(int(position))) for row, position in enumerate(own)]
        there = [(place, sample) for place, sample in samples if sample is not None]
        flat = [records.features.flatten(sample) for _, sample in there]
        columns = {name: [sample[name] for sample in flat] for name in records.features}
        return {"": [place for place, _ in there], **columns}

    with DecodingThreads(len(physical_cores()), "datamat-filter") as threads:
        for block in threads.map(read, range(0, len(positions), _CHUNK)):
            for name, values in found.items():
                values.extend(block[name])
    return found
