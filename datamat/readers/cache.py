"""Two caches below the readers, both bounded: encoded records in memory, whole shards on a local disk.

Neither drops what it holds to make room for more of the same data set. Training asks for every record once an epoch,
so what was used longest ago is what comes next: a cache that dropped it would be emptied just before each use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import struct
import threading
from typing import TYPE_CHECKING, Any, final

import numpy as np
import xxhash

from datamat.errors import CorruptDataError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from datamat.formats import Value
    from datamat.manifest import ShardInfo

__all__ = ["RecordCache", "ShardStore", "byte_limit"]

_COPY_BYTES = 4 << 20
_RECORD_OVERHEAD = 400  # of the dict, its entry and the objects in it, measured for three columns
_LOCK_FILE = ".lock"
_PART = ".part"
_ROOM = "room"
_CHECKSUM = re.compile("[0-9a-f]{32}")


def byte_limit(value: Any, where: str) -> int:
    """Return a number of bytes; raise `OptionError` where it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{where} is {value!r}; want a number of bytes, 0 or more")
    return value


@final
class RecordCache:
    """Keeps the encoded records that come first, until they fill the limit. Thread-safe; each process has its own.

    Args:
        max_bytes: of memory; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._records: dict[int, Mapping[str, Value]] = {}
        self._lock = threading.Lock()

    def get(self, position: int) -> Mapping[str, Value] | None:
        """Return a record that is kept, or None."""
        return self._records.get(position)

    def keep(self, position: int, record: Mapping[str, Value]) -> None:
        """Keep a record if there is room for it."""
        # Without waiting: a process that was forked while a thread held the lock would wait for ever.
        if self.num_bytes >= self.max_bytes or not self._lock.acquire(blocking=False):
            return
        try:
            size = _size_of(record)
            if position not in self._records and self.num_bytes + size <= self.max_bytes:
                self._records[position] = record
                self.num_bytes += size
        finally:
            self._lock.release()

    def __reduce__(self) -> tuple[type[RecordCache], tuple[int]]:
        return RecordCache, (self.max_bytes,)


def _size_of(record: Mapping[str, Value]) -> int:
    return _RECORD_OVERHEAD + sum(
        value.nbytes if isinstance(value, np.ndarray) else sum(len(one) for one in value if isinstance(one, bytes))
        for value in record.values()
    )


@final
class ShardStore:
    """Copies of shards on a local disk, for directories on a slow file system. Safe with any number of processes.

    A copy is named by the checksum of its content, which is tested while it is made: it cannot be that of a shard that
    was written anew. It appears under its name when it is complete. One process copies a shard while others wait.
    Copies of other data sets are removed where room is needed, oldest use first; those of this one stay, and what has
    no room is read where it is.

    Args:
        folder: where copies are kept; made if need be.
        max_bytes: of all copies together.
        shards: of this data set.

    Raises:
        OptionError: the folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, shards: Sequence[ShardInfo]) -> None:
        self._folder = pathlib.Path(folder)
        self._max_bytes = max_bytes
        self._own = {_name_of(info) for info in shards}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"cache_dir {self._folder}: {error.strerror}; give a folder that can be written to"
            ) from error

    def local(self, info: ShardInfo, source: pathlib.Path) -> pathlib.Path:
        """Return the path of a copy of a shard, made now if need be, or `source` where there is no room.

        Raises:
            CorruptDataError: the shard is not what the manifest says.
            OSError: it cannot be read.
        """
        copy = self._folder / _name_of(info)
        if not _used_now(copy):
            with self._lock(info.checksum):
                if not _used_now(copy) and not self._make(info, source, copy):
                    return source
        return copy

    def _make(self, info: ShardInfo, source: pathlib.Path, copy: pathlib.Path) -> bool:
        """Copy a shard if there is room; what is being copied counts already, by the file that it goes to."""
        part = copy.with_name(copy.name + _PART)
        with self._lock(_ROOM):
            if not self._make_room(info.num_bytes, but=part.name):
                return False
            try:
                with open(part, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(info.num_bytes, 1))
            except OSError:  # the disk is full, whatever the limit
                part.unlink(missing_ok=True)
                return False
        try:
            _copy(source, part, info)
            part.rename(copy)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return True

    def _make_room(self, num_bytes: int, *, but: str) -> bool:
        """Remove what is not of this data set until `num_bytes` fit below the limit; return whether they do."""
        found = [(path.stat(), path) for path in self._folder.iterdir() if path.name not in {_LOCK_FILE, but}]
        used = sum(status.st_size for status, _ in found)
        for status, path in sorted(found, key=lambda item: item[0].st_mtime_ns):
            if used + num_bytes <= self._max_bytes:
                break
            if path.name not in self._own and self._remove(path):
                used -= status.st_size
        return used + num_bytes <= self._max_bytes

    def _remove(self, path: pathlib.Path) -> bool:
        """Remove a copy, or what a killed process left of one; return whether it is gone. Readers of it read on."""
        checksum, _, rest = path.name.partition(".")
        if not _CHECKSUM.fullmatch(checksum):
            return False
        if rest.endswith(_PART):
            with contextlib.suppress(BlockingIOError), self._lock(checksum, wait=False):
                path.unlink(missing_ok=True)
                return True
            return False
        path.unlink(missing_ok=True)
        return True

    @contextlib.contextmanager
    def _lock(self, what: str, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock of one thing among all threads and processes; it is free again when its holder dies."""
        # A byte of one file for each thing. Locks of the open file (fcntl(2), F_OFD_SETLK), not of the process: they
        # hold among threads as well, and a child that was forked meanwhile does not share them once the file is closed.
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, xxhash.xxh3_64_intdigest(what.encode()) >> 2, 1, 0)
        with open(self._folder / _LOCK_FILE, "ab") as file:
            fcntl.fcntl(file, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
            yield


def _name_of(info: ShardInfo) -> str:
    return f"{info.checksum}.{info.file.partition('.')[2]}"


def _used_now(copy: pathlib.Path) -> bool:
    """Tell whether there is a copy, and note that it is in use."""
    try:
        os.utime(copy)
    except OSError:
        return False
    return True


def _copy(source: pathlib.Path, target: pathlib.Path, info: ShardInfo) -> None:
    digest, size = xxhash.xxh3_128(), 0
    with open(source, "rb", buffering=0) as original, open(target, "r+b") as file:
        while size <= info.num_bytes and (data := original.read(_COPY_BYTES)):
            file.write(data)
            digest.update(data)
            size += len(data)
    if (size, digest.hexdigest()) != (info.num_bytes, info.checksum):
        raise CorruptDataError(
            f"{source} is not what the manifest says: checksum {digest.hexdigest()} of {size} bytes read, wanted "
            f"{info.checksum} of {info.num_bytes}; run the job again to write it anew"
        )
