"""Two bounded caches below the readers: encoded records in memory, and whole shards on a local disk.

Neither evicts entries to make room for more of the same dataset. Training reads every record once per epoch, so the
least recently used one is needed next: a cache that evicted it would lose each entry just before its use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import shutil
import threading
from typing import TYPE_CHECKING, Any, final

from datamat.errors import CorruptDataError, DatamatError, OptionError, OutputError, require_posix, want_of_resources
from datamat.features import num_bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from datamat.directory.manifest import IndexInfo, ShardInfo
    from datamat.features import Column
    from datamat.readers.remote import RemotePath


__all__ = ["RecordCache", "ShardStore", "byte_limit"]

_COPY_BYTES = 4 << 20
_RECORD_OVERHEAD = 400  # bytes of the dict, its entry and the objects in it, measured for three columns
_LOCK = ".lock"
_OFFSETS = ".offsets"
_PART = ".part"
_ROOM = "room"
_CHECKSUM = re.compile("[0-9a-f]{32}")


def byte_limit(value: Any, where: str) -> int:
    """Return a number of bytes that the user gave.

    Args:
        value: number of bytes, or text such as "2GB", as the user gave it.
        where: name of the option, for the message.

    Raises:
        OptionError: it is not a number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{where} is {value!r}; want a number of bytes, 0 or more")
    return value


@final
class RecordCache:
    """Keeps the encoded records that come first, until they fill the limit. Thread-safe; each process has its own.

    Args:
        max_bytes: most bytes of memory; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._records: dict[int, Mapping[str, Column]] = {}
        self._lock = threading.Lock()

    def get(self, position: int) -> Mapping[str, Column] | None:
        """Return a cached record, or None.

        Args:
            position: position of the record in the dataset, from 0.
        """
        return self._records.get(position)

    def keep(self, position: int, record: Mapping[str, Column]) -> None:
        """Cache a record if there is room for it.

        Args:
            position: position of the record in the dataset, from 0.
            record: encoded columns of the record.
        """
        # Without waiting: a process forked while a thread held the lock would wait forever.
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


def _size_of(record: Mapping[str, Column]) -> int:
    return _RECORD_OVERHEAD + sum(map(num_bytes_of, record.values()))


@final
class ShardStore:
    """Copies of files on a local disk, for directories on a slow file system or behind a URL.

    Safe with any number of processes. The name of a copy is the checksum of its content, which is checked while
    copying, so a copy never stands for a file that was rewritten since. It appears under its name once it is complete.
    One process copies a file while the others wait. Copies of other datasets are removed when room is needed, least
    recently used first; copies of this one stay. A shard that does not fit is read in place, unless it is behind a URL.

    Args:
        folder: folder of the copies; created if missing.
        max_bytes: most bytes of all copies together.
        files: shards of this dataset, and files of its index.

    Raises:
        OptionError: the folder cannot be created.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, files: Sequence[ShardInfo | IndexInfo]) -> None:
        self._folder = pathlib.Path(folder)
        self._max_bytes = max_bytes
        self._own = {_name_of(info): info.num_bytes for info in files}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"cache_dir {self._folder}: {error.strerror}; name a writable folder") from error

    def local(self, info: ShardInfo, source: pathlib.Path) -> pathlib.Path:
        """Return the path of a copy of a shard, made now if it is missing, or `source` if the copy does not fit.

        Args:
            info: entry of the shard in the manifest.
            source: path of the shard, on a slower disk.

        Raises:
            CorruptDataError: the shard differs from what the manifest says.
            OSError: the shard cannot be read.
        """
        return self._copy(info, str(source), lambda: _blocks(source)) or source

    def fetch(self, info: ShardInfo | IndexInfo, source: RemotePath) -> pathlib.Path:
        """Return the path of a copy of a file behind a URL, made now if it is missing.

        Args:
            info: entry of the file in the manifest.
            source: URL of the file, which is read once.

        Raises:
            CorruptDataError: the file differs from what the manifest says.
            OutputError: the file cannot be read, or does not fit here.
        """
        with self._translate_disk_errors():
            copy = self._copy(info, str(source), source.blocks)
        if copy is None:
            held = sum(status.st_size for status, _ in self._held())
            raise OutputError(
                f"{source} has {info.num_bytes} bytes and no room in cache_dir {self._folder}: it holds {held} of "
                f"the {self._max_bytes} of cache_bytes, and its disk has {shutil.disk_usage(self._folder).free} free; "
                "a file behind a URL is read from its copy only: load with a larger cache_bytes, or a cache_dir on a "
                "larger disk"
            )
        return copy

    def offsets(self, info: ShardInfo) -> pathlib.Path | None:
        """Return the path of the copied offsets of a shard, or None; other processes may remove that file.

        Args:
            info: entry of the shard in the manifest.
        """
        kept = self._folder / (_name_of(info) + _OFFSETS)
        return kept if _used_now(kept) else None

    def keep_offsets(self, info: ShardInfo, content: bytes) -> bool:
        """Keep the offsets of a shard if they fit beside all files of this dataset; return whether they did.

        Args:
            info: entry of the shard in the manifest.
            content: content of its file of offsets.
        """
        kept = self._folder / (_name_of(info) + _OFFSETS)
        missing = sum(size for name, size in self._own.items() if not (self._folder / name).exists())
        with self._translate_disk_errors(), self._lock(info.checksum):
            return self._make(kept, len(content), lambda file: file.write(content), free=missing)

    def _copy(
        self, info: ShardInfo | IndexInfo, place: str, blocks: Callable[[], Generator[bytes, None, None]]
    ) -> pathlib.Path | None:
        """Return the path of a copy of a file, made of its blocks if it is missing; None if it does not fit."""
        copy = self._folder / _name_of(info)
        if not _used_now(copy):
            with self._lock(info.checksum):
                if not _used_now(copy):
                    with contextlib.closing(blocks()) as content:
                        made = self._make(copy, info.num_bytes, lambda file: _write(content, file, info, place))
                    return copy if made else None
        return copy

    def _make(self, path: pathlib.Path, num_bytes: int, write: Callable[[BinaryIO], Any], *, free: int = 0) -> bool:
        """Write a file if it fits and leaves `free` bytes; a file counts with its full size while it is written."""
        part = path.with_name(path.name + _PART)
        with self._lock(_ROOM):
            if not self._make_room(num_bytes + free, but=part.name):
                return False
            try:
                with open(part, "wb") as file:
                    _reserve(file, num_bytes)
            except OSError:  # the disk is full, whatever the limit
                part.unlink(missing_ok=True)
                return False
        try:
            with open(part, "r+b") as file:
                write(file)
                file.truncate()  # an empty file, for which the system cannot reserve space
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return True

    def _make_room(self, num_bytes: int, *, but: str) -> bool:
        """Remove files of other datasets until `num_bytes` fit below the limit; return whether they do."""
        found = [(status, path) for status, path in self._held() if path.name != but]
        used = sum(status.st_size for status, _ in found)
        for status, path in sorted(found, key=lambda item: item[0].st_mtime_ns):
            if used + num_bytes <= self._max_bytes:
                break
            if path.name.removesuffix(_OFFSETS) not in self._own and self._remove(path):
                used -= status.st_size
        return used + num_bytes <= self._max_bytes

    def _remove(self, path: pathlib.Path) -> bool:
        """Remove a copy, or a part that a killed process left; return whether it is gone. Open readers keep working."""
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
        """Return status and path of all files in the folder, finished and unfinished."""
        while True:
            paths = [path for path in self._folder.iterdir() if not path.name.endswith(_LOCK)]
            # A file that another process has just renamed exists under its new name: list again, and count it.
            with contextlib.suppress(FileNotFoundError):
                return [(path.lstat(), path) for path in paths]

    @contextlib.contextmanager
    def _translate_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, DatamatError):
                raise
            raise want_of_resources(f"cache_dir {self._folder}", error) or OutputError(
                f"cache_dir {self._folder}: {error}; name a writable folder"
            ) from error

    @contextlib.contextmanager
    def _lock(self, what: str, *, wait: bool = True) -> Iterator[None]:
        """Hold a named lock among all threads and processes; it is released when its holder dies."""
        require_posix("cache_dir=")
        import fcntl

        # flock(2) belongs to the open file and not to the process, so that threads exclude each other, too. It is
        # released explicitly: a forked child may have the file open.
        path = self._folder / f".{what}{_LOCK}"
        file = _locked(path, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()


def _locked(path: pathlib.Path, how: int) -> BinaryIO:
    """Open a lock file, and lock it; one that its last holder has removed meanwhile excludes nobody, so try again."""
    import fcntl

    while True:
        file = open(path, "ab")  # noqa: SIM115 -- open as long as it is locked
        try:
            fcntl.flock(file, how)
            if _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _is_at(file: BinaryIO, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _reserve(file: BinaryIO, num_bytes: int) -> None:
    """Give a file its size, and the space for it on the disk.

    Raises:
        OSError: the disk has less.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, max(num_bytes, 1))
    elif shutil.disk_usage(file.name).free < num_bytes:  # macOS
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    else:
        file.truncate(num_bytes)


def _name_of(info: ShardInfo | IndexInfo) -> str:
    return f"{info.checksum}.{info.file.partition('.')[2]}"


def _used_now(copy: pathlib.Path) -> bool:
    """Return whether a copy exists, and mark it as used now."""
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
    """Write the content of a file of the directory, and check it."""
    digest, size = info.hasher(), 0
    for block in blocks:
        digest.update(block)
        size += len(block)
        if size > info.num_bytes:
            break
        file.write(block)
    if (size, digest.hexdigest()) != (info.num_bytes, info.checksum):
        raise CorruptDataError(
            f"{place} is not what the manifest says: checksum {digest.hexdigest()} of {size} bytes read, wanted "
            f"{info.checksum} of {info.num_bytes}; run the job again to rewrite it"
        )
