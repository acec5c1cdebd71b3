"""The encoded records of a directory by position: shards opened when first needed, found through their offsets.

position ── RecordCache ── the shard's reader: offsets beside it, one read ── encoded record
                           its file: in the directory, or a copy in a ShardStore
"""

from __future__ import annotations

import bisect
import functools
from itertools import accumulate
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import CorruptDataError
from datamat.formats import Offsets
from datamat.readers.keys import stored_key

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping, Sequence

    from datamat.formats import ShardFormat, ShardReader, Value
    from datamat.manifest import ShardInfo
    from datamat.readers.cache import RecordCache, ShardStore

__all__ = ["RecordFiles"]


@final
class RecordFiles:
    """Encoded records by position. Thread-safe and picklable: a copy in another process opens the files anew.

    Args:
        path: the directory.
        shards: those to read, in order.
        shard_format: of the shards.
        cache: of records in memory.
        store: of shards on a local disk, or None.
    """

    def __init__(
        self,
        path: pathlib.Path,
        shards: Sequence[ShardInfo],
        shard_format: ShardFormat,
        cache: RecordCache,
        store: ShardStore | None = None,
    ) -> None:
        self._path = path
        self._shards = shards
        self._format = shard_format
        self._cache = cache
        self._store = store
        self._ends = list(accumulate(info.num_records for info in shards))
        self._files: dict[int, ShardReader] = {}

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

    def file(self, shard: int) -> pathlib.Path:
        """Return the path of a shard in the directory."""
        return self._path / self._shards[shard].file

    def stored_keys(self, shard: int) -> list[str]:
        """Return the keys that the records of a shard hold, by reading them."""
        return [stored_key(self._opened(shard).read(number)) for number in range(self._shards[shard].num_records)]

    @functools.cached_property
    def group_records(self) -> int | None:
        """How many neighbouring records the format reads at once to get at one; None where it reads one by one."""
        rows = self._format.options().get("row_group_rows")
        return rows if isinstance(rows, int) else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files={})

    def __del__(self) -> None:
        for opened in self.__dict__.get("_files", {}).values():
            opened.close()

    def _opened(self, shard: int) -> ShardReader:
        found = self._files.get(shard)
        if found is None:
            # No lock, which a process forked meanwhile would find taken: of two that open a shard, one closes it again.
            opened = self._open(self._shards[shard])
            found = self._files.setdefault(shard, opened)
            if found is not opened:
                opened.close()
        return found

    def _open(self, info: ShardInfo) -> ShardReader:
        offsets = self._offsets(info)
        path = self._path / info.file
        try:
            return self._format.reader(self._store.local(info, path) if self._store else path, offsets)
        except OSError as error:
            raise CorruptDataError(f"{path}: {error.strerror}; run the job again to write it anew") from error

    def _offsets(self, info: ShardInfo) -> Offsets:
        path = self._path / info.index_file
        try:
            offsets = Offsets.from_text(path.read_text("ascii"))
        except (OSError, UnicodeDecodeError, CorruptDataError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CorruptDataError(f"{path}: {reason}; run the job again to write it anew") from error
        if len(offsets) != info.num_records:
            raise CorruptDataError(
                f"{path} holds {len(offsets)} offsets, the manifest says {info.num_records} records; run the job again"
            )
        end = np.uint64(info.num_bytes)
        outside = np.flatnonzero((offsets.offset > end) | (offsets.size > end - np.minimum(offsets.offset, end)))
        if len(outside):
            raise CorruptDataError(
                f"{path}: record {outside[0]} would lie outside of {info.file}, which has {info.num_bytes} bytes; "
                "run the job again to write it anew"
            )
        return offsets
