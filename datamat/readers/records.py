"""The encoded records of a directory by position: shards opened when needed, records found through their offsets.

position ── RecordCache ── the shard's reader: offsets beside it, mapped; one read ── encoded record
                           its file: in the directory, or a copy in a ShardStore
                           behind a URL: copies of both
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import functools
import resource
import weakref
from itertools import accumulate
from typing import TYPE_CHECKING, final

from datamat.errors import OutputError
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
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


@final
class RecordFiles:
    """Encoded records by position. Thread-safe and picklable: a copy in another process opens the files anew.

    Of many shards, those opened last stay open: for all data sets of the process together, as many as take a quarter of
    the descriptors that it may have; none, where others have taken the rest.

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

    def _opened(self, shard: int) -> ShardReader:
        files = self._files
        found = files.get(shard)
        if found is None:
            _keep_at_most(_most_open() - 1)
            # No lock, which a process forked meanwhile would find taken: of two that open a shard, one closes it again.
            try:
                opened = self._opener.open(self._shards[shard])
            except OutputError as error:
                if getattr(error.__cause__, "errno", None) not in _TOO_MANY or not any(_open_files.values()):
                    raise
                _keep_at_most(0)  # others have taken what there was: it may be these that are missing
                opened = self._opener.open(self._shards[shard])
            found = files.setdefault(shard, opened)
            if found is not opened:
                opened.close()
        return found

    @property
    def _files(self) -> dict[int, ShardReader]:
        """The shards that are open, in the order in which they were opened."""
        files = _open_files.get(id(self))
        if files is None:
            files = _open_files.setdefault(id(self), {})
            weakref.finalize(self, _open_files.pop, id(self), None)
        return files


# Not in the objects, which travel to worker processes: pools look through what a forked worker inherits for files and
# maps, which they take away from it. These work on there.
_open_files: dict[int, dict[int, ShardReader]] = {}


def _most_open() -> int:
    """Return how many shards may be open in this process. Each takes two descriptors; others need some, too."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else min(max(limit // 8, 1), _MOST_OPEN)


def _keep_at_most(most: int) -> None:
    """Have the data sets of this process let go of shards until `most` are open; those that have most of them do."""
    while True:
        held = list(_open_files.values())
        if sum(map(len, held)) <= most:
            return
        fullest = max(held, key=len)
        with contextlib.suppress(StopIteration, RuntimeError):  # other threads open shards and let go of them meanwhile
            # Not closed here: a shard closes itself when the last thread that reads it lets go.
            fullest.pop(next(iter(fullest)), None)
