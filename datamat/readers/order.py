"""Which record stands at which place of an epoch: a pure function of place, seed and epoch, so nothing is remembered.

    whole      every record may stand anywhere; a place is computed, not looked up. Reads jump about the files.
    window     blocks of neighbouring records in random order, and the records of a few blocks at a time mixed. Reads
               stay within those blocks: for disks that seek, network file systems, and formats that read groups.
    none       as they are stored

Both shuffles are made of `permuted`. It is computed with integers alone, so that an epoch that was begun with one
version of numpy goes on exactly with another.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, final

import numpy as np
import xxhash

from datamat.errors import OptionError
from datamat.seeding import mix64

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Order", "permuted"]

_ROUNDS = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK_RECORDS = 64  # where the format has no groups: 13 MB of pictures of 200 KB, one after the other on the disk
_GROUPS_AT_ONCE = 4  # half of those that the Parquet reader keeps: one window ends while the next one begins


def permuted(places: NDArray[np.int64], size: int, *seeds: int) -> NDArray[np.int64]:
    """Return where a pseudo-random permutation of `size` things sends some places: no table of it is made.

    The swap-or-not shuffle (Hoang, Morris, Rogaway: An Enciphering Scheme Based on a Card Shuffle, CRYPTO 2012): in
    each round every place has a partner, and one bit, hashed from the pair, says whether the two change places.

    Args:
        places: int64 (n,), each from 0 to size - 1.
        size: of the permutation, at least 1.
        seeds: what the permutation depends on, beside size; not negative.

    Returns:
        int64 (n,), different for different places.

    Example:
        >>> permuted(np.arange(5), 5, 7).tolist()
        [4, 3, 2, 1, 0]
    """
    name = ",".join(map(str, (size, *seeds)))
    counter = np.arange(1, 2 * _ROUNDS + 1, dtype=np.uint64) * _GOLDEN
    words = mix64(np.uint64(xxhash.xxh3_64_intdigest(name.encode())) ^ mix64(counter))
    num = np.uint64(size)
    found = places.astype(np.uint64)
    for key, salt in zip(words[:_ROUNDS] % num, words[_ROUNDS:], strict=True):
        partner = key + (num - found)
        partner -= num * (partner >= num)
        swaps = mix64(np.maximum(found, partner) ^ salt) >> np.uint64(63) == 1
        found = np.where(swaps, partner, found)
    return found.astype(np.int64)


@final
@dataclasses.dataclass(frozen=True)
class Order:
    """The order of an epoch. An immutable value: thread-safe, picklable.

    Args:
        sizes: records of each shard.
        seed: of the shuffling.
        window: records that are mixed among each other; None for all; 0 keeps the order of the shards.
        block: neighbouring records that stay in one window.
    """

    sizes: tuple[int, ...]
    seed: int = 0
    window: int | None = 0
    block: int = _BLOCK_RECORDS

    @classmethod
    def of(cls, sizes: Sequence[int], shuffle: bool | int, seed: int, *, group_records: int | None) -> Order:
        """Return the order that a user asked for.

        Args:
            sizes: records of each shard.
            shuffle: False, True, or the size of the window.
            seed: not negative.
            group_records: how many neighbouring records the format reads to get at one; None where it reads just one.

        Raises:
            OptionError: an argument makes no sense.
        """
        if not isinstance(shuffle, bool) and (not isinstance(shuffle, int | np.integer) or shuffle < 1):
            raise OptionError(f"shuffle is {shuffle!r}; want True, False, or the number of records to mix at a time")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise OptionError(f"seed is {seed!r}; want a number, 0 or more")
        window = None if shuffle is True else int(shuffle)
        if group_records is None:
            return cls(tuple(sizes), int(seed), window)
        most = _GROUPS_AT_ONCE * group_records
        return cls(tuple(sizes), int(seed), most if window is None else min(window, most), group_records)

    @property
    def num_records(self) -> int:
        """Number of places, one for each record."""
        return sum(self.sizes)

    def positions(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of the records at some places of an epoch, int64.

        A thousand places take hardly longer than one: each costs 60 rounds of operations on arrays.
        """
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
    """Return the blocks of an epoch in their order, 24 bytes for each.

    Returns:
        the position at which each block starts, the place behind its last record, and the places at which windows
        begin, with the end behind them.
    """
    starts, sizes = _blocks(order.sizes, order.block)
    shuffled = permuted(np.arange(len(starts)), len(starts), order.seed, epoch, 0, 0)
    ends = np.cumsum(sizes[shuffled])
    per_window = max(1, -(-(order.window or 1) // order.block))
    bounds = np.concatenate([[0], ends[per_window - 1 : -1 : per_window], ends[-1:]])
    return starts[shuffled], ends, bounds


def _blocks(shards: Sequence[int], block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut shards into blocks of neighbouring records: position of the first one, and number."""
    starts, sizes, first = [], [], 0
    for size in shards:
        begins = np.arange(0, size, block, dtype=np.int64)
        starts.append(first + begins)
        sizes.append(np.minimum(block, size - begins))
        first += size
    return np.concatenate(starts), np.concatenate(sizes)
