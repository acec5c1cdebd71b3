"""Makes batches in a fixed order: decides which records they hold, and where a loader resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from fractions import Fraction
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

import numpy as np
import xxhash

from datamat.directory.keys import MIX64_STEPS, mix64
from datamat.errors import CorruptDataError, MissingDependencyError, OptionError, count_of
from datamat.features.base import is_number_dtype
from datamat.readers.loader import (
    BatchJob,
    BatchMaker,
    MemoryPool,
    closed_at_exit,
    in_blocks,
    in_processes,
    in_threads,
    made_here,
)
from datamat.readers.remote import ahead
from datamat.readers.sample import Sample
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from datamat.readers.loader import Skipped
    from datamat.readers.remote import LookAhead


# ---------------------------------------------------------------- order
#
# Which record stands at which place of an epoch is a pure function of place, seed and epoch, so nothing is stored.
#
#     whole      any record may stand anywhere; its place is computed, not looked up. Reads jump around the files.
#     window     blocks of neighbouring records in random order, the records of a few blocks at a time mixed. Reads stay
#                within those blocks: for spinning disks, network file systems, and formats that read groups.
#     none       the order of the files
#
# Both shuffles are built on `permuted`. It uses integers alone, so that an epoch that began under one version of numpy
# continues exactly under another.


_MOST_SORTED = 1 << 16  # places: to sort so many takes 2 ms, before the first batch
_SHIFT = np.uint64(32)
_ROUNDS = 8  # four are enough for a pseudo-random permutation (Luby and Rackoff 1988); each takes 14 ns a place
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK_RECORDS = 64  # for formats without groups: 13 MB of contiguous images of 200 KB


def permuted(places: NDArray[np.int64], size: int, *seeds: int) -> NDArray[np.int64]:
    """Return where a pseudo-random permutation of `size` items sends some places.

    A few items are sorted by hashes of their numbers. The place of one of many is computed, without a table, by the
    generalized Feistel cipher of Black and Rogaway ("Ciphers with Arbitrary Finite Domains", CT-RSA 2002): a place is a
    row and a column of a table that is almost square, and each round moves the one by a hash of the other. What leaves
    the table's first `size` cells goes through the cipher again.

    Args:
        places: int64 (n,), places before the permutation, each from 0 to size - 1.
        size: number of items permuted, at least 1.
        seeds: non-negative numbers that select the permutation, together with `size`.

    Returns:
        int64 (n,), places after the permutation, different for different places.

    Example:
        >>> permuted(np.arange(5), 5, 7).tolist()
        [4, 3, 1, 0, 2]
    """
    if size <= _MOST_SORTED:
        return _sorted(size, *seeds)[places].astype(np.int64)
    salts = _hashes(_ROUNDS, size, *seeds)
    found = _encrypted(places, size, salts)
    while len(outside := np.flatnonzero(found >= size)):
        found[outside] = _encrypted(found[outside], size, salts)
    return found


@functools.lru_cache(maxsize=16)
def _sorted(size: int, *seeds: int) -> NDArray[np.uint16]:
    """Return the numbers of items in the order of their hashes; equal ones, by number."""
    low = np.uint64(_MOST_SORTED - 1)
    keys = _hashes(size, size, *seeds) & ~low | np.arange(size, dtype=np.uint64)
    keys.sort()  # several times as fast as `argsort`
    return (keys & low).astype(np.uint16)


def _hashes(count: int, *seeds: int) -> NDArray[np.uint64]:
    """Return the first numbers of splitmix64 after a seed that derives from some numbers."""
    word = np.uint64(xxhash.xxh3_64_intdigest(",".join(map(str, seeds)).encode()))
    return mix64(word + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def _encrypted(places: NDArray[np.int64], size: int, salts: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return where the cipher sends some cells of the table, which has a few more than `size`."""
    num_rows = math.isqrt(size - 1) + 1
    num_columns = -(-size // num_rows)
    cells = np.divmod(places.astype(np.uint64), np.uint64(num_columns))
    sizes = np.uint64(num_rows), np.uint64(num_columns)
    # Reusing memory takes half the time of an expression for each of these lines.
    bits, shifted = np.empty((2, len(places)), np.uint64)
    for number, salt in enumerate(salts):
        moved, other, modulus = cells[number % 2], cells[1 - number % 2], sizes[number % 2]
        np.bitwise_xor(other, salt, out=bits)
        for shift, factor in MIX64_STEPS:  # like `mix64`, whose last line would change the lower half alone
            np.right_shift(bits, shift, out=shifted)
            np.bitwise_xor(bits, shifted, out=bits)
            np.multiply(bits, factor, out=bits)
        np.right_shift(bits, _SHIFT, out=bits)  # a number below the modulus, in proportion to the upper half
        np.multiply(bits, modulus, out=bits)
        np.right_shift(bits, _SHIFT, out=bits)
        np.add(moved, bits, out=moved)
        np.subtract(moved, modulus, out=bits)  # wraps around to more than `moved` where that is below
        np.minimum(moved, bits, out=moved)
    return (cells[0] * sizes[1] + cells[1]).view(np.int64)


def check_seed(seed: Any) -> None:
    """Raise `OptionError` unless a seed is a whole number, 0 or more."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise OptionError(f"seed is {seed!r}; want a number, 0 or more")


def check_shuffle(shuffle: Any) -> None:
    """Raise `OptionError` unless `shuffle` is True, False, or a number of records, 1 or more."""
    if not isinstance(shuffle, bool) and (not isinstance(shuffle, int | np.integer) or shuffle < 1):
        raise OptionError(f"shuffle is {shuffle!r}; want True, False, or the number of records to mix at a time")


@final
@frozen(slots=False)
class Order:
    """The order of an epoch. An immutable value: thread-safe, picklable.

    Args:
        sizes: number of records in each shard or, for a selection, in each run of neighbours.
        seed: base seed, which decides the order together with the number of the epoch.
        window: number of records that are mixed at a time; None mixes all, 0 keeps the order of the shards.
        block: number of neighbouring records that stay in one window.
        has_runs: whether `sizes` are those of runs, which may be far smaller than a block: a window then ends when it
            has its records, not after as many blocks as would hold them if all were full.
    """

    sizes: tuple[int, ...]
    seed: int = 0
    window: int | None = 0
    block: int = _BLOCK_RECORDS
    has_runs: bool = False

    @classmethod
    def of(cls, sizes: Sequence[int], shuffle: bool | int, seed: int, *, groups: tuple[int, int] | None) -> Order:
        """Return the order that a user asked for.

        Args:
            sizes: number of records in each shard.
            shuffle: False for the order of the shards, True to mix all records, or the size of the window.
            seed: base seed of the shuffling, 0 or more.
            groups: number of neighbouring records that the format reads to get at one, and the most such groups to mix;
                None if it reads records one by one.

        Raises:
            OptionError: an argument is invalid.
        """
        check_shuffle(shuffle)
        check_seed(seed)
        window = None if shuffle is True else int(shuffle)
        if groups is None:
            return cls(tuple(sizes), int(seed), window)
        group_records, several = groups[0], math.prod(groups)
        return cls(tuple(sizes), int(seed), several if window is None else window, group_records)

    @functools.cached_property
    def num_records(self) -> int:
        """Number of places in an epoch."""
        return sum(self.sizes)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the order apart from the records themselves, as JSON values."""
        return {"seed": self.seed, "window": self.window, "block": self.block}

    def positions(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of the records at some places of an epoch, int64 (n,)."""
        if self.window == 0 or not len(places):
            return places
        if self.window is None:
            return permuted(places, self.num_records, self.seed, epoch)
        return self._positions_in_windows(epoch, places)

    def _positions_in_windows(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        starts, ends, bounds = _windows(self, epoch)
        windows = np.searchsorted(bounds, places, side="right") - 1
        found = np.empty(len(places), np.int64)
        for window in np.unique(windows).tolist():
            begin, end = int(bounds[window]), int(bounds[window + 1])
            mine = windows == window
            mixed = begin + permuted(places[mine] - begin, end - begin, self.seed, epoch, window)
            block = np.searchsorted(ends, mixed, side="right")
            found[mine] = starts[block] + mixed - np.where(block > 0, ends[block - 1], 0)
        return found


@functools.lru_cache(maxsize=4)
def _windows(order: Order, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the blocks of an epoch in order, with 24 bytes for each.

    Returns:
        the position at which each block starts, the place after its last record, and the places at which windows begin,
        followed by the end of the epoch.
    """
    starts, sizes = _blocks(order.sizes, order.block)
    shuffled = permuted(np.arange(len(starts)), len(starts), order.seed, epoch, 0, 0)
    ends = np.cumsum(sizes[shuffled])
    if order.has_runs:
        return starts[shuffled], ends, _bounds_of_windows(ends, order.window or 1)
    per_window = max(1, -(-(order.window or 1) // order.block))
    bounds = np.concatenate([[0], ends[per_window - 1 : -1 : per_window], ends[-1:]])
    return starts[shuffled], ends, bounds


def _bounds_of_windows(ends: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """Return the places at which windows of at least so many records begin and end, given where blocks end."""
    bounds, last = [0], int(ends[-1])
    while bounds[-1] < last:
        block = int(np.searchsorted(ends, bounds[-1] + window))
        bounds.append(int(ends[min(block, len(ends) - 1)]))
    return np.array(bounds)


def _blocks(shards: Sequence[int], block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut shards into blocks of neighbouring records; return the first position and the size of each."""
    starts, sizes, first = [], [], 0
    for size in shards:
        begins = np.arange(0, size, block, dtype=np.int64)
        starts.append(first + begins)
        sizes.append(np.minimum(block, size - begins))
        first += size
    return np.concatenate(starts), np.concatenate(sizes)


# ---------------------------------------------------------------- orders of views
#
# What `select`, `filter`, `take`, `shard` and `concat` make of an order, and `mix` of several. Which record stands at a
# place is computed here as well, so that a place is still all that a state needs.
#
#     Selected   an order over the places of a selection, mapped to the selected records
#     Mixed      at each place the next record of one of several orders, in proportion to their weights
#
#     weights .7 and .3    a pattern of 7 and 3 places, shuffled in each block of 10:   a a b a a a b a b a | b a a ...
#     epochs               each member goes through its own: where one epoch of the mix ends, the next one continues


class EpochOrder(Protocol):
    """Which record stands at which place of an epoch. An immutable value: thread-safe, picklable."""

    @property
    def num_records(self) -> int:
        """Number of places in an epoch."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the order apart from the records themselves, as JSON values."""

    def positions(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of the records at some places of an epoch, int64 (n,).

        A thousand places take hardly longer than one: both cost some hundred array operations.

        Args:
            epoch: number of the epoch, from 0.
            places: int64 (n,), places in the epoch.
        """


@final
@frozen(eq=False)
class Selected:
    """An order of the records of a selection.

    Args:
        order: order over the places of the selection.
        records: the selection: the position of the record at each of its places.
    """

    order: Order
    records: range | NDArray[np.int64]

    @property
    def num_records(self) -> int:
        """Number of places in an epoch."""
        return len(self.records)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the order apart from the records themselves, as JSON values."""
        return self.order.identity

    def positions(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of the records at some places of an epoch, int64 (n,)."""
        return records_at(self.records, self.order.positions(epoch, places))


def records_at(records: range | NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions at some places of a selection, int64 (n,).

    Args:
        records: the selection: the position of the record at each of its places.
        places: int64 (n,), places in the selection.
    """
    if isinstance(records, range):
        return places if records[:1] == range(1) and records.step == 1 else records.start + records.step * places
    return records[places]


_MOST_IN_PATTERN = 1000


@final
@frozen()
class Mixture:
    """Which member of a mix stands at each place: in each block of places, each member as often as its quota says.

    Args:
        sizes: number of records of each member, at least 1.
        quotas: number of places of each member in a block.
        seed: seed of the pattern, which decides the order in a block together with the number of the block.
        repeats: whether shorter members repeat until the longest is finished; otherwise an epoch ends before the first
            repetition.
    """

    sizes: tuple[int, ...]
    quotas: tuple[int, ...]
    seed: int = 0
    repeats: bool = False

    @staticmethod
    def quotas_of(weights: Sequence[float]) -> tuple[int, ...]:
        """Return small quotas in the proportion of weights, to 1 in 1,000.

        Args:
            weights: one positive number for each member.

        Example:
            >>> Mixture.quotas_of([0.7, 0.3])
            (7, 3)
        """
        shares = [weight / math.fsum(weights) for weight in weights]
        fractions = [Fraction(share).limit_denominator(_MOST_IN_PATTERN) for share in shares]
        size = math.lcm(*(fraction.denominator for fraction in fractions))
        exact = all(abs(fraction - share) < 1e-9 for fraction, share in zip(fractions, shares, strict=True))
        if exact and sum(fractions) == 1 and size <= _MOST_IN_PATTERN:
            return tuple(int(fraction * size) for fraction in fractions)
        found = [max(1, math.floor(share * _MOST_IN_PATTERN)) for share in shares]
        by_rest = sorted(
            range(len(shares)), key=lambda member: (found[member] - shares[member] * _MOST_IN_PATTERN, member)
        )
        for member in by_rest[: max(0, _MOST_IN_PATTERN - sum(found))]:
            found[member] += 1
        return tuple(found)

    @property
    def num_records(self) -> int:
        """Number of places in an epoch."""
        if self.repeats:
            return 1 + max(self._place_of(member, size - 1) for member, size in enumerate(self.sizes))
        return min(self._place_of(member, size) for member, size in enumerate(self.sizes))

    def members(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the member at each place, and how often it came at earlier places.

        Args:
            places: int64 (n,), places in the epoch.

        Returns:
            two int64 (n,).
        """
        blocks, within = np.divmod(places, sum(self.quotas))
        if len(places) and (np.diff(places) == 1).all():  # which need no sorting
            found, which = np.arange(blocks[0], blocks[-1] + 1), blocks - blocks[0]
        else:
            found, which = np.unique(blocks, return_inverse=True)
        patterns = self._patterns(found)
        before = np.empty_like(patterns)
        for member, quota in enumerate(self.quotas):  # row by row, of which each has as many of it
            before[patterns == member] = np.tile(np.arange(quota), len(patterns))
        members = patterns[which, within]
        return members, blocks * np.array(self.quotas)[members] + before[which, within]

    def count(self, member: int, places: int) -> int:
        """Return how often a member comes at the first places of an epoch."""
        block, rest = divmod(places, sum(self.quotas))
        pattern = self._patterns(np.array([block]))[0, :rest]
        return block * self.quotas[member] + int((pattern == member).sum())

    def _place_of(self, member: int, number: int) -> int:
        """Return the place at which a member comes for the n-th time, from 0."""
        block, rest = divmod(number, self.quotas[member])
        within = np.flatnonzero(self._patterns(np.array([block]))[0] == member)[rest]
        return block * sum(self.quotas) + int(within)

    def _patterns(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the members at the places of some blocks, int64 (blocks, places)."""
        size = sum(self.quotas)
        word = np.uint64(xxhash.xxh3_64_intdigest(f"mix,{self.quotas},{self.seed}".encode()))
        places = blocks[:, None].astype(np.uint64) * np.uint64(size) + np.arange(1, size + 1, dtype=np.uint64)
        order = np.argsort(mix64(word ^ mix64(places * _GOLDEN)), axis=1, kind="stable")
        return np.repeat(np.arange(len(self.quotas)), self.quotas)[order]


@final
@frozen(eq=False)
class Mixed:
    """The order of a mix: at each place the next record of one of its members.

    Args:
        mixture: which member stands at each place.
        orders: order of each member, in which it goes through its own epochs.
    """

    mixture: Mixture
    orders: tuple[EpochOrder, ...]
    num_records: int

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the order apart from the records themselves, as JSON values."""
        found = [order.identity for order in self.orders]
        return {name: [one[name] for one in found] for name in found[0]}

    def positions(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of the records at some places of an epoch, int64 (n,)."""
        members, counts = self.mixture.members(places)
        found = np.empty(len(places), np.int64)
        for member, order in enumerate(self.orders):
            mine = np.flatnonzero(members == member)
            per_epoch = self.mixture.count(member, self.num_records)
            epochs, own = np.divmod(epoch * per_epoch + counts[mine], order.num_records)
            for own_epoch in np.unique(epochs).tolist():
                these = epochs == own_epoch
                found[mine[these]] = order.positions(own_epoch, own[these])
        return found


@final
class _KnownOrder:
    """An order that remembers the places around the last ones asked for. Thread-safe; copies start empty.

    For readers that ask for few neighbouring places at each call, which costs as much as a thousand places.
    """

    def __init__(self, order: EpochOrder) -> None:
        self._order = order
        self._positions = functools.lru_cache(maxsize=_BLOCKS_KNOWN)(self._computed)

    def __reduce__(self) -> tuple[type[_KnownOrder], tuple[EpochOrder]]:
        return _KnownOrder, (self._order,)

    @property
    def num_records(self) -> int:
        return self._order.num_records

    @property
    def identity(self) -> dict[str, Any]:
        return self._order.identity

    def positions(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(places):
            return places
        first, last = int(places[0]) // _PLACES_AT_ONCE, int(places[-1]) // _PLACES_AT_ONCE
        known = [self._positions(epoch, block) for block in range(first, last + 1)]
        return np.concatenate(known)[places - first * _PLACES_AT_ONCE]

    def _computed(self, epoch: int, block: int) -> NDArray[np.int64]:
        first = block * _PLACES_AT_ONCE
        return self._order.positions(epoch, np.arange(first, min(first + _PLACES_AT_ONCE, self.num_records)))


_PLACES_AT_ONCE = 4096  # 0.1 us a place; 1,024 take 0.3, 256 take 1
_BLOCKS_KNOWN = 4


# ---------------------------------------------------------------- schedule
#
# Which places of an epoch make up each batch of each rank: all ranks get the same number of batches, each place once.
#
# A *step* is one batch on every rank. Steps go through the places of the epoch in order, so that everything before a
# step was delivered: that single number says where to resume, with any number of ranks.
#
#     places   0 ............ start                                                        num_places
#     steps                     | rank 0 | rank 1 | rank 0 | rank 1 | ... | rank 0 | rank 1 |


@final
@frozen(slots=False)
class Schedule:
    """The batches from `start` to the end of an epoch.

    Records that do not fill the last step are divided evenly: ranks then differ by at most one record. If fewer
    records than ranks are left, the last two steps share their records. So every record comes exactly once, with one
    exception: if batches hold single records, or there are fewer records than ranks, a rank without a record repeats
    that of another rank.

    Args:
        num_places: number of places in the epoch.
        batch_size: most records in a batch.
        world_size: number of ranks that share each step.
        drop_last: whether to drop records that do not fill a step.
        start: place at which the first step begins.
    """

    num_places: int
    batch_size: int
    world_size: int = 1
    drop_last: bool = False
    start: int = 0

    @functools.cached_property
    def num_steps(self) -> int:
        """Number of steps, and so of batches on each rank."""
        full, rest = divmod(self.num_places - self.start, self._step)
        return full + (rest > 0 and not self.drop_last)

    def place(self, step: int) -> int:
        """Return the first place of a step; the end of the epoch for the step after the last."""
        last = self.num_steps
        if step < last - 1:
            return self.start + step * self._step
        if step >= last:
            return self.start + last * self._step if self.drop_last else max(self.start, self.num_places)
        before_last = self.start + (last - 2) * self._step
        left = self.num_places - before_last
        if step > 0 and self.batch_size > 1 and left < self._step + self.world_size:
            return self.num_places - left // 2
        return self.start + step * self._step

    def bounds(self, step: int, rank: int) -> tuple[int, int]:
        """Return the first place of one rank's batch, and the place after its last."""
        start, stop = self.place(step), self.place(step + 1)
        size = stop - start
        first, behind = start + size * rank // self.world_size, start + size * (rank + 1) // self.world_size
        if first == behind:
            first = start + rank % size
            behind = first + 1
        return first, behind

    @functools.cached_property
    def _step(self) -> int:
        return self.batch_size * self.world_size


# ---------------------------------------------------------------- states to resume from
#
# Where a loader stands, as numbers that survive JSON and `torch.save`.


_VERSION = 2  # incremented when the same seed gives another order


@final
@frozen()
class Position:
    """Where a loader stands: a step of the schedule of an epoch.

    Attributes:
        epoch: number of the epoch, from 0.
        schedule: steps of the epoch, or of the rest of it.
        step: next step to deliver.
        num_workers: number of copies of the loader that take the steps in turn, one in each worker of a torch
            `DataLoader`; with several, `step` is the next one of a single worker.
    """

    epoch: int
    schedule: Schedule
    step: int
    num_workers: int = 1

    @property
    def is_at_end(self) -> bool:
        """Whether all batches were delivered, or all those of one worker if there are several."""
        return self.step >= self.schedule.num_steps > 0

    def for_worker(self, worker_id: int, num_workers: int) -> Position:
        """Return the position for one of several workers that share the steps; a worker's position is unchanged."""
        if self.num_workers == num_workers:
            return self
        return Position(self.epoch, self.schedule, self.step + worker_id, num_workers)

    def jobs(self, order: EpochOrder, units: Units | None, rank: int, steps: range) -> Iterator[BatchJob]:
        """Yield the job of a rank for each step, given the order in which an epoch takes records or their units."""
        if units is not None:
            for step in steps:
                yield self._job_of_units(units, rank, step)
            return
        at_once = -(-_PLACES_AT_ONCE // self.schedule.batch_size)
        for first in range(0, len(steps), at_once):
            bounds = [self.schedule.bounds(step, rank) for step in steps[first : first + at_once]]
            places = np.concatenate([np.arange(*one, dtype=np.int64) for one in bounds])
            positions = order.positions(self.epoch, places)
            end = 0
            for start, stop in bounds:
                begin, end = end, end + stop - start
                yield BatchJob(self.epoch, positions[begin:end])

    def _job_of_units(self, units: Units, rank: int, step: int) -> BatchJob:
        first, behind = self.schedule.bounds(step, rank)
        size = self.schedule.place(step + 1) - self.schedule.place(step)
        found = [units.unit(self.epoch, number) for number in range(first, behind)]
        if size < self.schedule.world_size:  # ranks with the same unit share its records
            ranks = range(self.schedule.world_size)
            sharing = [one for one in ranks if self.schedule.bounds(step, one)[0] == first]
            mine = np.array_split(found[0], len(sharing), axis=1)[sharing.index(rank)]
            found = [mine if mine.size else found[0][:, -1:]]
        positions, *pieces = np.concatenate(found, axis=1)
        if not units.packs:
            return BatchJob(self.epoch, positions)
        rows = np.repeat(np.arange(len(found)), [one.shape[1] for one in found])
        return BatchJob(self.epoch, positions, np.column_stack([rows, *pieces]))

    def to_state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "step": self.step,
            "num_workers": self.num_workers,
            "schedule": dataclasses.asdict(self.schedule),
        }


def read_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Position:
    """Return the position that a state describes.

    Args:
        state: what `Batches.state_dict`, or a `StatefulDataLoader` around it, returned.
        identity: identity of the dataset and its order, by name, which must match the state's.

    Raises:
        OptionError: the state belongs to another dataset or order, or is not the state of a loader.
    """
    try:
        states = _states_of_workers(state)
        for one in states:
            _check_identity(one, identity)
        found = [Position(one["epoch"], Schedule(**one["schedule"]), one["step"], one["num_workers"]) for one in states]
        first = min(found, key=lambda position: position.step)
        if len(found) not in (1, first.num_workers):
            raise TypeError(f"{len(found)} states of {count_of(first.num_workers, 'worker')}")
    except (KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"this is not a state that state_dict of datamat's loader returned ({error!r}); load such a state"
        ) from error
    return first if len(found) == 1 else dataclasses.replace(first, num_workers=1)


def _states_of_workers(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return datamat's states inside a state; a state of a `StatefulDataLoader` has one for each worker."""
    if "schedule" in state:
        return [state]
    if "_snapshot" in state:
        if state.get("_steps_since_snapshot"):
            raise OptionError(
                "the state was taken between two snapshots of a StatefulDataLoader and describes only the last one; "
                "leave snapshot_every_n_steps at 1, or load the state into a StatefulDataLoader with as many workers"
            )
        return [worker["dataset_state"] for worker in state["_snapshot"]["_worker_snapshots"].values()]
    return [state["dataset_state"]]


def _check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    for name, wanted in {"version": _VERSION, **identity}.items():
        if state[name] != wanted:
            raise OptionError(
                f"the state belongs to a loader with {name} {state[name]!r}, this one has {wanted!r}; make a loader "
                "with the same order, or start a new epoch without the state"
            )


# ---------------------------------------------------------------- batches
#
# `Batches` is what `to_numpy` and `to_torch` return. Each iteration is an epoch of batches; there is no last epoch.
#
#     Order       which record stands at which place of the epoch       (seed, epoch)
#     Schedule    which places are the batch of this rank at this step  (batch_size, world_size, start)
#     loader      reads, decodes, transforms and collates those records, ahead of their use
#     Client      what the arrays become: those of numpy, or tensors of torch
#
# The position in an epoch is a step of a schedule; all places before it were delivered. A state is thus a few numbers,
# equal on all ranks, which describe the rest of the epoch for any number of ranks, workers or records in a batch.


_SAMPLES_PER_THREAD = 4  # in progress or ready, times `prefetch`, if samples are not batched


@final
@frozen()
class Cut:
    """How records are cut into batches; `BatchOptions` describes the arguments.

    Raises:
        OptionError: a number is out of range.
    """

    batch_size: int | None = None
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    num_threads: int | None = None
    prefetch: int = 2

    def __post_init__(self) -> None:
        for name, least in {
            "batch_size": 1,
            "world_size": 1,
            "num_workers": 0,
            "num_threads": 1,
            "prefetch": 1,
        }.items():
            value = getattr(self, name)
            if value is None and name in {"batch_size", "num_threads"}:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise OptionError(f"{name} is {value!r}; want an int, {least} or more")
        check_rank(self.rank, self.world_size, "world_size")


def check_rank(rank: Any, world: Any, name: str) -> None:
    """Raise `OptionError` unless `rank` is one of `world` ranks; `name` is the argument that gave `world`."""
    if isinstance(world, bool) or not isinstance(world, Integral) or int(world) < 1:
        raise OptionError(f"{name} is {world!r}; want an int, 1 or more")
    if isinstance(rank, bool) or not isinstance(rank, Integral) or not 0 <= int(rank) < int(world):
        raise OptionError(f"rank is {rank!r} of {name} {world}; want 0 to {int(world) - 1}")


class Units(Protocol):
    """Takes the place of records in a schedule: batches of a bucket, or packed rows. Picklable."""

    @property
    def packs(self) -> bool:
        """Whether units are packed rows; otherwise each is a batch."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the units apart from the order, as JSON values."""

    def num_units(self, epoch: int) -> int:
        """Return the number of units of an epoch."""

    def unit(self, epoch: int, number: int) -> NDArray[np.int64]:
        """Return the pieces of a unit, int64 (3, n): position of the record, first token, place after the last."""


@final
@frozen()
class Client:
    """The library that batches are for, and the fields of its tuples.

    Attributes:
        library: "numpy" or "torch".
        names: fields of the tuple, in order; None for dicts of all fields.
    """

    library: Literal["numpy", "torch"]
    names: tuple[str, ...] | None = None

    def convert(self, batch: dict[str, Any]) -> Any:
        """Return a batch of arrays in the types of the library.

        Tensors share the memory of the arrays, unless torch cannot use it, because it is read-only, reversed, or in a
        foreign byte order. Times become int64 microseconds; text and objects stay.

        Args:
            batch: arrays and lists by feature name.

        Raises:
            OptionError: a transform has dropped a field of the tuple.
        """
        batch = batch if self.names is None else chosen_fields(batch, self.names)
        if self.library == "torch":
            batch = {name: _tensor(value) for name, value in batch.items()}
        return Sample(batch) if self.names is None else tuple(batch.values())

    def worker(self) -> tuple[int, int]:
        """Return worker_id and num_workers of the `DataLoader` that this process works for; (0, 1) outside of one."""
        if self.library == "numpy":
            return 0, 1
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        return (0, 1) if info is None else (info.id, info.num_workers)


_SEEN_AS = {
    "bfloat16": ("int16", "bfloat16"),
    "datetime64[us]": ("int64", None),
    "timedelta64[us]": ("int64", None),
}
"""Dtypes of arrays that torch does not take, each with numpy's dtype of the same bits, and torch's own, if any."""


def _tensor(value: Any) -> Any:
    import torch

    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind in "mM":
            array = array.astype(f"{array.dtype.kind}8[us]", copy=False)
        seen, dtype = _SEEN_AS.get(array.dtype.name, (None, None))
        if seen is None and not is_number_dtype(array.dtype):
            return array.tolist()
        if not array.dtype.isnative or not array.flags.writeable or min(array.strides, default=0) < 0:
            array = np.array(array, array.dtype.newbyteorder("="), order="C")  # torch has none of these
        tensor = torch.from_numpy(array if seen is None else array.view(seen))
        return tensor if dtype is None else tensor.view(getattr(torch, dtype))
    if isinstance(value, dict):
        return {name: _tensor(item) for name, item in value.items()}
    return [_tensor(item) for item in value] if isinstance(value, list) else value


def supervised_fields(given: Any, features: Collection[str] | None) -> tuple[str, ...] | None:
    """Return the fields that batches deliver as a tuple, or None.

    Args:
        given: argument of the user.
        features: names of the fields that samples have; None if a function decides them.

    Raises:
        OptionError: it does not name two or three fields.
    """
    if given is None:
        return None
    names = tuple(given) if isinstance(given, list | tuple) and all(isinstance(name, str) for name in given) else ()
    if len({*names}) != len(names) or len(names) not in {2, 3}:
        raise OptionError(
            f"as_supervised is {given!r}; want the fields of inputs and targets, as in ('image', 'label'), and a third "
            "for weights if there are any"
        )
    known = None if features is None else {"key", *(name.partition("/")[0] for name in features)}
    for name in names:
        if known is not None and name not in known:
            raise OptionError(f"as_supervised names {name!r}; the fields are {', '.join(sorted(known))}")
    return names


def chosen_fields(sample: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return some fields of a sample or batch, in the order of `names`; raise `OptionError` if one is missing."""
    for name in names:
        if name not in sample:
            raise OptionError(f"as_supervised names {name!r}; batches have the fields {', '.join(sorted(sample))}")
    return {name: sample[name] for name in names}


def default_rank() -> tuple[int, int]:
    """Return rank and world size of the process group; (0, 1) if there is none."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def register_iterable(kind: type) -> None:
    """Make torch's `DataLoader` treat objects of a class as an `IterableDataset`.

    Args:
        kind: class with `__iter__`, which becomes a virtual `IterableDataset`.

    Raises:
        MissingDependencyError: torch is not installed.
    """
    try:
        from torch.utils.data import IterableDataset
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "to_torch needs the package torch; install it with: pip install 'datamat[torch]'"
        ) from error
    IterableDataset.register(kind)  # an abstract base class, which only requires `__iter__`


def _reads_in_one_go(window: Any) -> bool:
    """Return True if an order reads each shard in one go, given its window (a list for a mix)."""
    return all(map(_reads_in_one_go, window)) if isinstance(window, list) else window is not None


@final
class Batches:
    """An iterable of batches, each a dict by feature name; each `iter` goes through the next epoch.

    `ShardedDataset.to_numpy` and `to_torch` return it. `state_dict` and `load_state_dict` follow the protocol of
    torchdata's `StatefulDataLoader`: take the state after a batch, and another loader resumes with the next record,
    even with a different number of ranks, workers or records per batch. A loader is not thread-safe; it is picklable if
    its transform is.

    Args:
        order: order of the records in each epoch.
        maker: reads, decodes and transforms the records of a batch.
        options: how records are cut into batches, and by how many threads or processes they are made.
        client: library that the batches are for.
        skipped: counts damaged records that were skipped.
        identity: identity of the dataset and its order, by name; a state with another identity is refused.
        look_ahead: returns an object that fetches the shards of an epoch before they are needed, or None if all are
            local; its argument says whether the epoch reads each shard in one go.
        units: batches or packed rows that replace records, or None.
        collate_fn: function that makes a batch from a list of samples, or None.
    """

    def __init__(  # noqa: PLR0913 -- all but the first are passed by name
        self,
        order: EpochOrder,
        maker: BatchMaker,
        options: Cut,
        *,
        client: Client,
        skipped: Skipped,
        identity: Mapping[str, Any],
        look_ahead: Callable[[bool], LookAhead | None],
        units: Units | None = None,
        collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
    ) -> None:
        self._order = order
        self._known_order = _KnownOrder(order)
        self._look_ahead = look_ahead
        self._units = units
        self._collate_fn = collate_fn
        self._maker = maker
        self._options = options
        self._client = client
        self._skipped = skipped
        self._identity = {**identity, **({} if units is None else units.identity)}
        self._memory = MemoryPool()  # outlives an epoch: getting 80 MB from the system again takes 30 ms
        self._epoch = 0  # of the next `iter`
        self._resumed: Position | None = None  # where it begins, unless at the start
        self._now: Position | None = None  # position of the most recently advanced iteration

    def __repr__(self) -> str:
        cut, num_records = self._options, count_of(self._order.num_records, "record")
        size = "one sample at a time" if cut.batch_size is None else f"{cut.batch_size:,} a batch"
        if self._units is None:
            size = f"{size}, {count_of(len(self), 'step')}"
        ranks = f", rank {cut.rank} of {cut.world_size}" if cut.world_size > 1 else ""
        return f"Batches({num_records}, {size}{ranks}, for {self._client.library}, next epoch {self._epoch})"

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch; with `bucket` or `pack`, in the next one."""
        return self._schedule(self._epoch).num_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of the next epoch, or of the rest of one whose state was loaded."""
        here = self._begin()
        steps = range(here.step, here.schedule.num_steps, here.num_workers)
        jobs = here.jobs(self._order, self._units, self._options.rank, steps)
        with contextlib.closing(self._made(jobs)) as batches:
            for step, batch in zip(steps, batches, strict=True):
                self._now = Position(here.epoch, here.schedule, step + here.num_workers, here.num_workers)
                if batch and self._collate_fn is not None:
                    yield self._collate_fn([self._client.convert(sample) for sample in batch[""]])
                elif batch:
                    yield self._client.convert(batch)
                else:
                    self._check_skipped(step)

    def num_steps(self, epoch: int, start: int = 0) -> int:
        """Return the number of batches in an epoch that begins at place `start` on all ranks."""
        return self._schedule(epoch, start).num_steps

    def place_after(self, epoch: int, start: int) -> int:
        """Return the place that all ranks reach after the step that begins at `start`; the end if there is none.

        Steps that each begin where the last one ends are those of the whole epoch: the place of any step tells the
        rest.
        """
        return self._schedule(epoch, start).place(1)

    def at(self, epoch: int, step: int, start: int = 0) -> dict[str, Any]:
        """Return one batch, made in this thread with the help of others; empty if all of its records were skipped.

        Iteration gives the same batch, and is not affected. Thread-safe.

        Args:
            epoch: number of the epoch, from 0.
            step: number of the batch, from 0.
            start: place of the epoch at which step 0 begins.

        Raises:
            CorruptDataError: all of its records were skipped, and other ranks have a batch at this step.
        """
        here = Position(epoch, self._schedule(epoch, start), step)
        (job,) = here.jobs(self._known_order, self._units, self._options.rank, range(step, step + 1))
        num_threads = self._options.num_threads or self._maker.num_threads
        batch = made_here(job, dataclasses.replace(self._maker, num_threads=num_threads), self._memory)
        if not batch:
            self._check_skipped(step)
        if batch and self._collate_fn is not None:
            return {"": self._collate_fn([self._client.convert(sample) for sample in batch[""]])}
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter` go through this epoch from its start; an epoch that is being resumed continues.

        Needed only if copies of this object read, as in a torch `DataLoader` with workers: they cannot count epochs.

        Args:
            epoch: number of the epoch, from 0.

        Raises:
            OptionError: the epoch is not such a number; 1.0 would have another order than 1.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, Integral) or epoch < 0:
            raise OptionError(f"set_epoch({epoch!r}); want the number of an epoch, 0 or more")
        if epoch != self._epoch:
            self._epoch, self._resumed = int(epoch), None

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as numbers and strings; the same on all ranks."""
        now = self._now or self._start(self._epoch)
        return {**now.for_worker(*self._client.worker()).to_state(), **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next `iter` resume after the last batch that was delivered when `state` was taken.

        Args:
            state: state of a loader over the same directory in the same order, or of a torchdata `StatefulDataLoader`
                that wraps such a loader, so that its number of workers may change.

        Raises:
            OptionError: the state belongs to another dataset or order, or is not the state of a loader.
        """
        found = read_state(state, self._identity)
        if not found.is_at_end and self._schedule(found.epoch, found.schedule.start) != found.schedule:
            found = Position(found.epoch, self._schedule(found.epoch, found.schedule.place(found.step)), 0)
        self._resumed = self._now = found
        self._epoch = found.epoch

    def _begin(self) -> Position:
        """Return where this `iter` begins, and let the next one begin with the next epoch."""
        worker_id, num_workers = self._client.worker()
        here = self._resumed or self._start(self._epoch)
        if here.is_at_end and 1 in {num_workers, here.num_workers}:  # other workers may not have finished
            here = self._start(here.epoch + 1)
        self._epoch, self._resumed = here.epoch + 1, None
        self._now = here.for_worker(worker_id, num_workers)
        return self._now

    def _check_skipped(self, step: int) -> None:
        if self._options.world_size > 1:
            raise CorruptDataError(
                f"all records of batch {step} were damaged and skipped, so this rank would have one batch less "
                "than the others; run repair() on the directory, or use larger batches"
            )

    def _start(self, epoch: int) -> Position:
        return Position(epoch, self._schedule(epoch), 0)

    def _schedule(self, epoch: int, start: int = 0) -> Schedule:
        """Return the schedule of the places of an epoch from `start` on."""
        options, size = self._options, self._options.batch_size or 1
        if self._units is None:
            return Schedule(self._order.num_records, size, options.world_size, options.drop_last, start)
        size = size if self._units.packs else 1
        return Schedule(self._units.num_units(epoch), size, options.world_size, options.drop_last, start)

    def _made(self, jobs: Iterator[BatchJob]) -> Generator[dict[str, Any]]:
        options = self._options
        is_worker = self._client.worker()[1] > 1
        if options.num_workers and not is_worker:
            depth = self._depth(options.num_workers) + options.num_workers
            jobs = self._fetched(jobs, depth)
            return closed_at_exit(in_processes(jobs, self._maker, options.num_workers, depth, self._skipped))
        num_threads = options.num_threads or (1 if is_worker else self._maker.num_threads)
        maker = dataclasses.replace(self._maker, num_threads=num_threads)
        if maker.read_block is not None and maker.is_plain:
            in_block = -(-maker.block_records // (options.batch_size or 1))
            return closed_at_exit(in_blocks(self._fetched(jobs, (num_threads + 1) * in_block), maker, self._memory))
        depth = self._depth(num_threads)
        return closed_at_exit(in_threads(self._fetched(jobs, depth), maker, depth, self._memory))

    def _fetched(self, jobs: Iterator[BatchJob], depth: int) -> Iterator[BatchJob]:
        """Return the jobs, `depth` of which are in progress; fetch shards for later jobs where necessary."""
        look = self._look_ahead(self._units is None and _reads_in_one_go(self._order.identity["window"]))
        return jobs if look is None else ahead(jobs, look, depth)

    def _depth(self, num_makers: int) -> int:
        return self._options.prefetch * (1 if self._options.batch_size else _SAMPLES_PER_THREAD * num_makers)
