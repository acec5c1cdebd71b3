"""Provides two bounded caches below the readers: encoded records in memory, and whole shards on a local disk.

Neither evicts entries to make room for more of the same dataset. Training reads every record once per epoch, so the
least recently used record is needed next: a cache that evicted it would lose each entry just before its use. The only
exception are shards behind a URL that an epoch reads one after another: shards that it has finished make room for the
next ones, as the disk cannot grow.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import shutil
import stat
import tempfile
import threading
from typing import TYPE_CHECKING, Any, TypeAlias, final

from datamat.directory.files import private_folder
from datamat.errors import CorruptDataError, DatamatError, OptionError, OutputError, require_posix, want_of_resources
from datamat.features.base import num_bytes_of
from datamat.formats.io import write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from datamat.directory.manifest import ListedFile, ShardInfo
    from datamat.features.base import Column
    from datamat.folders import Folder


Watch: TypeAlias = "Callable[[pathlib.Path, int], None]"
"""Called with the path of an unfinished copy, and the number of its first bytes that are there."""


_MOST_BYTES = 10 << 30  # of copies, if the user names no folder for them
_RECORD_OVERHEAD = 400  # bytes of the dict, its entry and the objects in it, measured for three columns
_LOCK = ".lock"
_PART = ".part"
_SCRATCH = ".scratch"
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


_MOST_SHARE = 10  # of the free space: the rest is left to the user


def default_cache() -> tuple[pathlib.Path, int]:
    """Make the folder for copies of shards in this user's cache folder; return its path and the most bytes to keep.

    The folder is `datamat` in `XDG_CACHE_HOME` or `~/.cache`, which no other user can read. The limit is 10 GB or a
    tenth of the free space, whichever is less.

    Raises:
        OptionError: it cannot be made.
        OutputError: something that another user could change has its name.
    """
    above = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    remedy = "name another folder with cache_dir="
    try:
        above.mkdir(parents=True, exist_ok=True)
        folder = private_folder(above / "datamat", remedy)
        return folder, min(_MOST_BYTES, shutil.disk_usage(folder).free // _MOST_SHARE)
    except OSError as error:
        if isinstance(error, DatamatError):
            raise
        reason = f"no folder for copies of shards: {above / 'datamat'}: {error.strerror}"
        raise OptionError(f"{reason}; {remedy}") from error


@final
class RecordCache:
    """Keeps the first encoded records until they reach the limit. Thread-safe; each process has its own.

    Args:
        max_bytes: most bytes of memory; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._records: dict[int, Mapping[str, Column]] = {}
        self._lock = threading.Lock()

    def get(self, position: int) -> Mapping[str, Column] | None:
        """Return the cached record at a position, or None."""
        return self._records.get(position)

    def keep(self, position: int, record: Mapping[str, Column]) -> None:
        """Cache the record at a position if there is room for it."""
        # Do not wait: a process forked while a thread held the lock would wait forever.
        if self.num_bytes >= self.max_bytes or not self._lock.acquire(blocking=False):
            return
        try:
            size = _RECORD_OVERHEAD + sum(map(num_bytes_of, record.values()))
            if position not in self._records and self.num_bytes + size <= self.max_bytes:
                self._records[position] = record
                self.num_bytes += size
        finally:
            self._lock.release()

    def __reduce__(self) -> tuple[type[RecordCache], tuple[int]]:
        return RecordCache, (self.max_bytes,)


@final
class ShardStore:
    """Copies files of slow directories to a local disk.

    Safe with any number of processes. The name of a copy is the checksum of its content, which is checked while
    copying, so that a copy never stands for a file rewritten since. It appears under its name when it is complete. One
    process copies a file while the others wait. When room is needed, copies of other datasets are removed, least
    recently used first; copies of this dataset stay, unless an epoch says which ones it still needs (`need`). Copies
    that a reader has open (`in_use`) always stay. Other files, such as offsets, are kept only if all files of this
    dataset fit.

    Args:
        folder: folder of the copies; created if missing.
        max_bytes: most bytes of all copies together.
        files: shards of this dataset, and files of its index.

    Raises:
        OptionError: the folder cannot be created.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, files: Sequence[ListedFile]) -> None:
        self._folder = pathlib.Path(folder)
        self._max_bytes = max_bytes
        self._own = {_name_of(info): info.num_bytes for info in files}
        self._needed: dict[tuple[int, int], frozenset[str]] = {}  # by process and reader
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"cache_dir {self._folder}: {error.strerror}; name a writable folder") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_needed": {}}

    @property
    def is_too_small(self) -> bool:
        """Whether the files of this dataset do not all fit at once."""
        return sum(self._own.values()) > self._max_bytes

    def fetch(self, info: ListedFile, folder: Folder) -> pathlib.Path:
        """Return the path of a copy of a file of a directory, made now if it is missing.

        Raises:
            CorruptDataError: the file differs from what the manifest says, even when it is fetched again.
            OutputError: the file cannot be read, or does not fit here.
        """
        copy = self.fetch_if_it_fits(info, folder)
        if copy is None:
            held = sum(status.st_size for status, _ in self._held())
            raise OutputError(
                f"{folder.place(info.file)} has {info.num_bytes} bytes and no room in cache_dir {self._folder}: it "
                f"holds {held} of the {self._max_bytes} of cache_bytes, and its disk has "
                f"{shutil.disk_usage(self._folder).free} free; load with a larger cache_bytes, or a cache_dir on a "
                "larger disk"
            )
        return copy

    def fetch_if_it_fits(
        self, info: ListedFile, folder: Folder, *, wait: bool = True, watch: Watch = lambda _part, _num_bytes: None
    ) -> pathlib.Path | None:
        """Return the path of a copy of a file as `fetch` does, or None if it does not fit.

        Raises:
            BlockingIOError: another process fetches it, and `wait` is False.
        """
        with self._translate_disk_errors(but=BlockingIOError):
            for is_last in (False, True):  # twice, for bad cables and proxies, and for files just replaced
                try:
                    return self._copy(info, folder, wait=wait, watch=watch)
                except CorruptDataError:
                    if is_last:
                        raise
        raise AssertionError("the loop returns or raises")

    def copy_of(self, info: ListedFile) -> pathlib.Path | None:
        """Return the path of the copy of a file if there is one, marked as used now."""
        copy = self._folder / _name_of(info)
        return copy if _used_now(copy, info.num_bytes) else None

    def is_being_made(self, info: ListedFile) -> bool:
        """Return True if a thread or process is making the copy of a file right now."""
        if not (self._folder / f".{info.checksum}{_LOCK}").exists():
            return False
        try:
            with self._lock(info.checksum, wait=False):
                return False
        except BlockingIOError:
            return True

    def drop_damaged(self, info: ListedFile) -> None:
        """Remove the copy of a file unless it holds what the manifest says."""
        copy = self._folder / _name_of(info)
        with contextlib.suppress(OSError, CorruptDataError):
            if info.is_whole(copy):
                return
        with self._translate_disk_errors():
            copy.unlink(missing_ok=True)

    @contextlib.contextmanager
    def scratch(self, num_bytes: int) -> Iterator[BinaryIO]:
        """Open a file of a given size that takes no room yet, and has its name only within the block."""
        with (
            self._translate_disk_errors(),
            tempfile.NamedTemporaryFile(dir=self._folder, suffix=_SCRATCH) as file,
        ):
            file.truncate(num_bytes)
            yield file  # type: ignore[misc]  # a wrapper around one

    def in_use(self, copy: pathlib.Path) -> Callable[[], None]:
        """Keep a copy until the returned function is called: no process removes it to make room.

        Raises:
            FileNotFoundError: there is no such copy.
        """
        import fcntl

        file = open(copy, "rb")  # noqa: SIM115 -- stays open while it is in use
        fcntl.flock(file, fcntl.LOCK_SH)
        owner = os.getpid()

        def release() -> None:
            # Unlock explicitly, as a forked child may have the file open; the child only closes it.
            with contextlib.suppress(ValueError):
                if os.getpid() == owner:
                    fcntl.flock(file, fcntl.LOCK_UN)
                file.close()

        return release

    def need(self, reader: int, infos: Iterable[ShardInfo] | None) -> None:
        """Say which shards an epoch still needs, so that the others may make room; None when it ends.

        Args:
            reader: number of the epoch's reader, to tell simultaneous readers apart.
            infos: the shards that it needs next.
        """
        own = os.getpid(), reader
        if infos is None:
            self._needed.pop(own, None)
        else:
            self._needed[own] = frozenset(map(_name_of, infos))

    def _copy(self, info: ListedFile, folder: Folder, *, wait: bool, watch: Watch) -> pathlib.Path | None:
        """Return the path of a copy of a file, made now if it is missing; None if it does not fit."""
        copy = self._folder / _name_of(info)
        if not _used_now(copy, info.num_bytes):
            with self._lock(info.checksum, wait=wait):
                if not _used_now(copy, info.num_bytes) and not self._make(copy, info, folder, watch):
                    return None
        return copy

    def _make(self, path: pathlib.Path, info: ListedFile, folder: Folder, watch: Watch) -> bool:
        """Copy a file if it fits; it counts at its full size while it is written."""
        part = path.with_name(path.name + _PART)
        is_own = path.name in self._own
        free = 0 if is_own else sum(size for name, size in self._own.items() if not (self._folder / name).exists())
        with self._lock(_ROOM):
            if not self._make_room(info.num_bytes + free, but=part.name):
                return False
            _clear(part)
            try:
                with open(part, "wb") as file:
                    _reserve(file, info.num_bytes)
            except OSError:  # the disk is full, whatever the limit
                part.unlink(missing_ok=True)
                return False
        try:
            with (
                open(part, "r+b", buffering=0) as file,
                contextlib.closing(folder.blocks(info.file, info.num_bytes)) as blocks,
            ):
                _write(blocks, file, info, folder.place(info.file), watch)
                file.truncate()  # an empty file, for which the system cannot reserve space
            _clear(path)
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return True

    def _make_room(self, num_bytes: int, *, but: str) -> bool:
        """Remove files, of other datasets first, until `num_bytes` fit below the limit; return True if they do."""
        found = [(status, path) for status, path in self._held() if path.name != but]
        used = sum(status.st_size for status, _ in found)
        for _, _, status, path in sorted(
            (path.name in self._own, status.st_mtime_ns, status, path) for status, path in found
        ):
            if used + num_bytes <= self._max_bytes:
                break
            if self._may_go(path.name) and self._remove(path):
                used -= status.st_size
        return used + num_bytes <= self._max_bytes

    def _may_go(self, name: str) -> bool:
        """Return True if a file may be removed: of another dataset, or one that an epoch of this one has finished."""
        if name not in self._own:
            return True
        # What the parent of a forked process needed then says nothing about what it needs now.
        needed = [names for (pid, _), names in [*self._needed.items()] if pid == os.getpid()]
        return bool(needed) and not any(name in one for one in needed)

    def _remove(self, path: pathlib.Path) -> bool:
        """Remove a copy, or a part left by a killed process; return True if it is gone. Open readers keep working."""
        import fcntl

        checksum, _, rest = path.name.partition(".")
        if not _CHECKSUM.fullmatch(checksum):
            return False
        if rest.endswith(_PART):
            with contextlib.suppress(BlockingIOError), self._lock(checksum, wait=False):
                path.unlink(missing_ok=True)
                return True
            return False
        try:
            with contextlib.suppress(FileNotFoundError), _open_to_lock(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while a reader has it open
                path.unlink(missing_ok=True)
        except OSError:  # or if it belongs to another user
            return False
        return True

    def _held(self) -> list[tuple[os.stat_result, pathlib.Path]]:
        """Return status and path of all files in the folder, finished and unfinished."""
        while True:
            paths = [path for path in self._folder.iterdir() if not path.name.endswith((_LOCK, _SCRATCH))]
            # A file that another process has just renamed exists under its new name: list again to count it.
            with contextlib.suppress(FileNotFoundError):
                return [(path.lstat(), path) for path in paths]

    @contextlib.contextmanager
    def _translate_disk_errors(self, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, (DatamatError, but)):
                raise
            raise want_of_resources(f"cache_dir {self._folder}", error) or OutputError(
                f"cache_dir {self._folder}: {error}; name a writable folder"
            ) from error

    @contextlib.contextmanager
    def _lock(self, what: str, *, wait: bool = True) -> Iterator[None]:
        """Hold a named lock, which excludes all threads and processes, and is released when its holder dies."""
        require_posix("cache_dir=")
        import fcntl

        # flock(2) belongs to the open file and not to the process, so that threads exclude each other as well. It is
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
    """Open and lock a lock file; a file that its last holder has removed meanwhile excludes no one, so try again."""
    import fcntl

    while True:
        _clear(path)
        file = open(path, "ab")  # noqa: SIM115 -- stays open while it is locked
        try:
            fcntl.flock(file, how)
            if _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _open_to_lock(path: pathlib.Path) -> BinaryIO:
    """Open a file for an exclusive lock, which NFS refuses without write permission."""
    try:
        return open(path, "r+b")
    except PermissionError:
        return open(path, "rb")


def _is_at(file: BinaryIO, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _reserve(file: BinaryIO, num_bytes: int) -> None:
    """Give a file its size, and reserve the space for it on the disk.

    Raises:
        OSError: the disk has less space.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, max(num_bytes, 1))
    elif shutil.disk_usage(file.name).free < num_bytes:  # macOS
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    else:
        file.truncate(num_bytes)


def _name_of(info: ListedFile) -> str:
    return f"{info.checksum}.{info.extension}"


def _clear(path: pathlib.Path) -> None:
    """Remove anything that has the name of a cache file but is not a file: opening a FIFO would wait forever."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another thread or process was faster
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            shutil.rmtree(path)
        elif not stat.S_ISREG(mode):
            path.unlink(missing_ok=True)


def _used_now(copy: pathlib.Path, num_bytes: int) -> bool:
    """Return True if a copy exists with its full size, and mark it as used now."""
    try:
        found = copy.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
            return False
        os.utime(copy)
    except OSError:
        return False
    return True


def _write(blocks: Iterable[bytes], file: BinaryIO, info: ListedFile, place: str, watch: Watch) -> None:
    """Write the content of a file of the directory and check it."""
    digest, size = info.hasher(), 0
    part = pathlib.Path(file.name)
    watch(part, 0)
    for block in blocks:
        digest.update(block)
        size += len(block)
        if size > info.num_bytes:
            break
        write_all(file, memoryview(block))
        watch(part, size)
    if (size, digest.hexdigest()) != (info.num_bytes, info.checksum):
        raise CorruptDataError(
            f"{place} is not what the manifest says: checksum {digest.hexdigest()} of {size} bytes read, wanted "
            f"{info.checksum} of {info.num_bytes}; run the job again to rewrite it"
        )
