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
import shutil
import struct
import threading
from typing import TYPE_CHECKING, Any, final

import numpy as np
import xxhash

from datamat.errors import CorruptDataError, DatamatError, OptionError, OutputError, want_of_resources

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from datamat.formats import Value
    from datamat.manifest import IndexInfo, ShardInfo
    from datamat.readers.remote import RemotePath

__all__ = ["RecordCache", "ShardStore", "byte_limit"]

_COPY_BYTES = 4 << 20
_RECORD_OVERHEAD = 400  # of the dict, its entry and the objects in it, measured for three columns
_LOCK_FILE = ".lock"
_OFFSETS = ".offsets"
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
    """Copies of files on a local disk, for directories on a slow file system or behind a URL.

    Safe with any number of processes. A copy is named by the checksum of its content, which is tested while it is made:
    it cannot be that of a file that was written anew. It appears under its name when it is complete. One process copies
    a file while others wait. Copies of other data sets are removed where room is needed, oldest use first; those of
    this one stay. A shard that has no room is read where it is, unless that is behind a URL.

    Args:
        folder: where copies are kept; made if need be.
        max_bytes: of all copies together.
        files: shards of this data set, and files of its index.

    Raises:
        OptionError: the folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, files: Sequence[ShardInfo | IndexInfo]) -> None:
        self._folder = pathlib.Path(folder)
        self._max_bytes = max_bytes
        self._own = {_name_of(info): info.num_bytes for info in files}
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
        return self._copy(info, str(source), lambda: _blocks(source)) or source

    def fetch(self, info: ShardInfo | IndexInfo, source: RemotePath) -> pathlib.Path:
        """Return the path of a copy of a file behind a URL, made now if need be.

        Raises:
            CorruptDataError: the file is not what the manifest says.
            OutputError: it cannot be read, or has no room here.
        """
        with self._disk_errors_told():
            copy = self._copy(info, str(source), source.blocks)
        if copy is None:
            held = sum(status.st_size for status, _ in self._held())
            raise OutputError(
                f"{source} has {info.num_bytes} bytes and no room in cache_dir {self._folder}: it holds {held} of "
                f"the {self._max_bytes} of cache_bytes, and its disk has {shutil.disk_usage(self._folder).free} free; "
                "what lies behind a URL is read from there alone: load with larger cache_bytes, or with a cache_dir on "
                "a larger disk"
            )
        return copy

    def offsets(self, info: ShardInfo) -> pathlib.Path | None:
        """Return the path of the file of offsets that is kept for a shard, or None. Others may remove it."""
        kept = self._folder / (_name_of(info) + _OFFSETS)
        return kept if _used_now(kept) else None

    def keep_offsets(self, info: ShardInfo, content: bytes) -> bool:
        """Keep the content of a file of offsets for a shard, if there is room beside all files of this data set."""
        kept = self._folder / (_name_of(info) + _OFFSETS)
        missing = sum(size for name, size in self._own.items() if not (self._folder / name).exists())
        with self._disk_errors_told(), self._lock(info.checksum):
            return self._make(kept, len(content), lambda file: file.write(content), free=missing)

    def _copy(
        self, info: ShardInfo | IndexInfo, place: str, blocks: Callable[[], Generator[bytes, None, None]]
    ) -> pathlib.Path | None:
        """Return the path of a copy of a file, made of its blocks if need be; None where there is no room."""
        copy = self._folder / _name_of(info)
        if not _used_now(copy):
            with self._lock(info.checksum):
                if not _used_now(copy):
                    with contextlib.closing(blocks()) as content:
                        made = self._make(copy, info.num_bytes, lambda file: _write(content, file, info, place))
                    return copy if made else None
        return copy

    def _make(self, path: pathlib.Path, num_bytes: int, write: Callable[[BinaryIO], Any], *, free: int = 0) -> bool:
        """Make a file if there is room, and `free` is left; one that is being made counts already, with all of it."""
        part = path.with_name(path.name + _PART)
        with self._lock(_ROOM):
            if not self._make_room(num_bytes + free, but=part.name):
                return False
            try:
                with open(part, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(num_bytes, 1))
            except OSError:  # the disk is full, whatever the limit
                part.unlink(missing_ok=True)
                return False
        try:
            with open(part, "r+b") as file:
                write(file)
                file.truncate()  # of an empty file, to which the system gives no room
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return True

    def _make_room(self, num_bytes: int, *, but: str) -> bool:
        """Remove what is not of this data set until `num_bytes` fit below the limit; return whether they do."""
        found = [(status, path) for status, path in self._held() if path.name != but]
        used = sum(status.st_size for status, _ in found)
        for status, path in sorted(found, key=lambda item: item[0].st_mtime_ns):
            if used + num_bytes <= self._max_bytes:
                break
            if path.name.removesuffix(_OFFSETS) not in self._own and self._remove(path):
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

    def _held(self) -> list[tuple[os.stat_result, pathlib.Path]]:
        """Return what the folder holds, finished and unfinished."""
        while True:
            paths = [path for path in self._folder.iterdir() if path.name != _LOCK_FILE]
            # A file that another process renames meanwhile is there under its new name: looked for again, and counted.
            with contextlib.suppress(FileNotFoundError):
                return [(path.lstat(), path) for path in paths]

    @contextlib.contextmanager
    def _disk_errors_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, DatamatError):
                raise
            raise want_of_resources(f"cache_dir {self._folder}", error) or OutputError(
                f"cache_dir {self._folder}: {error}; give a folder that can be written to"
            ) from error

    @contextlib.contextmanager
    def _lock(self, what: str, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock of one thing among all threads and processes; it is free again when its holder dies."""
        # A byte of one file for each thing. Locks of the open file (fcntl(2), F_OFD_SETLK), not of the process: they
        # hold among threads as well. They are given back by name: a child that was forked meanwhile has the file open.
        place = xxhash.xxh3_64_intdigest(what.encode()) >> 2
        with open(self._folder / _LOCK_FILE, "ab") as file:
            fcntl.fcntl(file, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, place))
            try:
                yield
            finally:
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, place))


def _request(kind: int, place: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, place, 1, 0)


def _name_of(info: ShardInfo | IndexInfo) -> str:
    return f"{info.checksum}.{info.file.partition('.')[2]}"


def _used_now(copy: pathlib.Path) -> bool:
    """Tell whether there is a copy, and note that it is in use."""
    try:
        os.utime(copy)
    except OSError:
        return False
    return True


def _blocks(source: pathlib.Path) -> Generator[bytes, None, None]:
    with open(source, "rb", buffering=0) as file:
        while block := file.read(_COPY_BYTES):
            yield block


def _write(blocks: Iterable[bytes], file: BinaryIO, info: ShardInfo | IndexInfo, place: str) -> None:
    """Write the content of a file of the directory, and test it."""
    digest, size = xxhash.xxh3_128(), 0
    for block in blocks:
        digest.update(block)
        size += len(block)
        if size > info.num_bytes:
            break
        file.write(block)
    if (size, digest.hexdigest()) != (info.num_bytes, info.checksum):
        raise CorruptDataError(
            f"{place} is not what the manifest says: checksum {digest.hexdigest()} of {size} bytes read, wanted "
            f"{info.checksum} of {info.num_bytes}; run the job again to write it anew"
        )
