"""The encoded records of a directory by position: shards opened when needed, records found through their offsets.

position ── RecordCache ── the shard's reader: offsets beside it, mapped; one read ── encoded record
                           its file: in the directory, or a copy in a ShardStore
                           behind a URL: copies of both
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import operator
import resource
import weakref
from itertools import accumulate
from typing import TYPE_CHECKING, Any, final

from datamat.readers.keys import stored_key
from datamat.readers.opening import ShardOpener

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping, Sequence

    from datamat.formats import ShardFormat, ShardReader, Value
    from datamat.manifest import ShardInfo
    from datamat.readers.cache import RecordCache, ShardStore
    from datamat.readers.remote import RemotePath

__all__ = ["RecordFiles"]

_MOST_OPEN = 1024


@final
class RecordFiles:
    """Encoded records by position. Thread-safe and picklable: a copy in another process opens the files anew.

    Of many shards, those opened last stay open: for all data sets of the process together, as many as take a quarter of
    the descriptors that it may have.

    Args:
        path: the directory.
        shards: those to read, in order.
        shard_format: of the shards.
        cache: of records in memory.
        store: of copies on a local disk; needed where the directory is behind a URL.
    """

    def __init__(
        self,
        path: pathlib.Path | RemotePath,
        shards: Sequence[ShardInfo],
        shard_format: ShardFormat,
        cache: RecordCache,
        store: ShardStore | None = None,
    ) -> None:
        self._shards = shards
        self._format = shard_format
        self._cache = cache
        self._opener = ShardOpener(path, shard_format, store)
        self._ends = list(accumulate(info.num_records for info in shards))
        self._files: dict[int, ShardReader] = {}  # in the order in which they were opened

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, position: int) -> Mapping[str, Value]:
        """Return one record, its checksums tested.

        Raises:
            CorruptDataError: it is damaged; names file, record and place.
        """
        found = self._cache.get(position)
        if found is None:
            shard, number = self.place(position)
            found = self._opened(shard).read(number)
            self._cache.keep(position, found)
        return found

    def place(self, position: int) -> tuple[int, int]:
        """Return the number of the shard that holds a record, and the number of the record in it."""
        shard = bisect.bisect_right(self._ends, position)
        return shard, position - (self._ends[shard - 1] if shard else 0)

    def positions(self, file: str) -> range:
        """Return the positions of the records of a shard, by its path."""
        shard = [str(self.file(number)) for number in range(len(self._shards))].index(file)
        return range(self._ends[shard] - self._shards[shard].num_records, self._ends[shard])

    def file(self, shard: int) -> pathlib.Path | RemotePath:
        """Return the path of a shard in the directory."""
        return self._opener.folder / self._shards[shard].file

    def stored_keys(self, shard: int) -> list[str]:
        """Return the keys that the records of a shard hold, by reading them."""
        return [stored_key(self._opened(shard).read(number)) for number in range(self._shards[shard].num_records)]

    @property
    def are_tested(self) -> bool:
        """Whether a checksum shows that a record which `read` returns is what was written."""
        return self._format.has_checksums

    @functools.cached_property
    def group_records(self) -> int | None:
        """How many neighbouring records the format reads at once to get at one; None where it reads one by one."""
        rows = self._format.options().get("row_group_rows")
        return rows if isinstance(rows, int) else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def __del__(self) -> None:
        for opened in self.__dict__.get("_files", {}).values():
            opened.close()

    def _opened(self, shard: int) -> ShardReader:
        found = self._files.get(shard)
        if found is None:
            _keep_at_most(_most_open() - 1)
            # No lock, which a process forked meanwhile would find taken: of two that open a shard, one closes it again.
            opened = self._opener.open(self._shards[shard])
            found = self._files.setdefault(shard, opened)
            if found is not opened:
                opened.close()
            else:
                _opened_here[id(self)] = self
        return found

    def _let_go(self) -> None:
        """Drop the shard that was opened first. It closes itself when the last thread that reads it is done."""
        with contextlib.suppress(StopIteration, RuntimeError):  # other threads open and drop shards meanwhile
            self._files.pop(next(iter(self._files)), None)


_opened_here: weakref.WeakValueDictionary[int, RecordFiles] = weakref.WeakValueDictionary()


def _most_open() -> int:
    """Return how many shards may be open in this process. Each takes two descriptors; others need some, too."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else min(max(limit // 8, 1), _MOST_OPEN)


def _keep_at_most(most: int) -> None:
    """Have the data sets of this process let go of shards until `most` are open; those that have most of them do."""
    while True:
        held = [(len(files._files), files) for found in _opened_here.valuerefs() if (files := found()) is not None]
        if sum(count for count, _ in held) <= most:
            return
        max(held, key=operator.itemgetter(0))[1]._let_go()
