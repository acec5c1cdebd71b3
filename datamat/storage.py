"""Files that appear complete under their name, or not at all.

Everything that a reader may see goes through `commit`: it is written under a temporary name, flushed to the disk,
renamed, and the folder is flushed too. Without both flushes a power cut leaves finished names with missing bytes
on ext4 and xfs alike.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
import socket
import stat
import struct
import threading
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.errors import DatamatError, OutputError, OutputLockedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

__all__ = [
    "commit",
    "commit_json",
    "digest_file",
    "disk_errors_told",
    "empty_folder",
    "fsync_folder",
    "lock_holder",
    "locked",
    "parse_json",
    "publish",
    "read_json",
    "read_regular",
    "refuse_links",
    "render_json",
]

_COPY_BYTES = 1 << 20
_HELD: set[str] = set()
_HELD_LOCK = threading.Lock()  # held while the set and the system's locks are made to agree
_MOST_JSON_BYTES = 1 << 28  # a manifest of half a million shards; more is no file of ours
_OF_DISKS = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE})
_FLOCK = struct.Struct("hhqqi")  # struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, pid


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Flush a folder's own entries to the disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def empty_folder(folder: pathlib.Path) -> None:
    """Make a folder, without what may be in it."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir()


def refuse_links(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that is a link, or holds one at any depth: what is written through it would land elsewhere.

    Raises:
        OutputError: names the link.
    """
    if os.path.islink(folder):
        raise OutputError(f"{os.fspath(folder)} is a link, which datamat does not write through: remove it")
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() or entry.is_dir(follow_symlinks=False):
                refuse_links(entry.path)


@contextlib.contextmanager
def disk_errors_told(folder: pathlib.Path) -> Iterator[None]:
    """Give errors of the system in the block, that come from below a folder or from its disk, a place and a remedy.

    A write that fails does not say by itself to which file.

    Raises:
        OutputError: instead of such an error.
    """
    try:
        yield
    except OSError as error:
        is_below = isinstance(error.filename, str) and pathlib.Path(error.filename).is_relative_to(folder)
        of_disk = error.filename is None and error.errno in _OF_DISKS
        if isinstance(error, DatamatError) or not (is_below or of_disk):
            raise
        raise OutputError(
            f"the run into {folder} was stopped by the system: {error}; make room or mend the disk, and run again to "
            "go on"
        ) from error


def publish(temporary: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Give a file that is complete and flushed its final name, and flush that name."""
    os.replace(temporary, final)
    fsync_folder(pathlib.Path(final).parent)


@contextlib.contextmanager
def commit(path: str | os.PathLike[str], *, through: pathlib.Path | None = None) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the name `path` only when the block ends without an error.

    Args:
        path: final name; its folder must exist. A file already there is replaced in one step.
        through: folder, on the same disk, for the temporary file: what a kill leaves there is not seen beside
            finished files. None: the folder of `path`.

    Yields:
        A binary file, writable. It is removed if the block fails.
    """
    path = pathlib.Path(path)
    temporary = (through or path.parent) / f".{path.name}.{os.getpid()}.tmp"
    # O_EXCL and O_NOFOLLOW: a link planted at the temporary name is refused, not written through.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # left by a killed process that had our number
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def render_json(value: Any) -> bytes:
    """Return the one form in which we write a value: readable JSON with sorted keys, so that equal values are equal."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def commit_json(path: str | os.PathLike[str], value: Any, *, through: pathlib.Path | None = None) -> None:
    """Write `value` as `render_json` gives it; see `commit`."""
    with commit(path, through=through) as file:
        file.write(render_json(value))


def read_regular(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Return the content of a regular file of a limited size: never waits for a FIFO, never reads a device.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else than a regular file, or larger; names the file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):  # looked at before `open`, whose error for a folder does not name it
            raise ValueError(f"{os.fspath(path)} is not a regular file")
        if found.st_size > max_bytes:
            raise ValueError(f"{os.fspath(path)} has {found.st_size} bytes, more than the {max_bytes} it may have")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(found.st_size)  # not more than it holds: `read` takes the memory that it is asked for
    finally:
        os.close(descriptor)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a file of strict JSON: UTF-8, no name twice in an object, no NaN or Infinity.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not that; names the file.
    """
    return parse_json(read_regular(path, max_bytes=_MOST_JSON_BYTES), os.fspath(path))


def parse_json(content: bytes, place: str) -> Any:
    """Return the value of strict JSON, as `read_json`; `place` is where it came from, for messages."""
    try:
        return json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(f"{place} is not JSON of ours: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def digest_file(path: str | os.PathLike[str], *, start: int = 0, num_bytes: int | None = None) -> str:
    """Return the XXH3-128 digest of a file, or of `num_bytes` bytes of it from `start`, as 32 hex digits."""
    digest = xxhash.xxh3_128()
    left = num_bytes
    with open(path, "rb") as file:
        file.seek(start)
        while block := file.read(_COPY_BYTES if left is None else min(_COPY_BYTES, left)):
            digest.update(block)
            if left is not None:
                left -= len(block)
    return digest.hexdigest()


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Hold a lock file for the block; the system frees it when the process ends, however it ends.

    A record lock (`fcntl`), which belongs to this process alone: a lock that forked workers inherit would outlive a
    killed parent. Record locks don't tell threads of one process apart, so paths held here are kept in a set.

    Raises:
        OutputLockedError: it is held; names the holder's process and host.
    """
    name = os.path.realpath(path)
    with _HELD_LOCK:
        descriptor = _lock(path, name)
    try:
        yield
    finally:
        with _HELD_LOCK:
            _HELD.discard(name)
            os.close(descriptor)


def _lock(path: pathlib.Path, name: str) -> int:
    if name in _HELD:
        raise _locked_by(path, f"another thread of this process ({os.getpid()})")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise _locked_by(path, holder or "a process that is just starting") from error
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError:
        os.close(descriptor)
        raise
    _HELD.add(name)
    return descriptor


def lock_holder(path: pathlib.Path) -> str:
    """Return who holds a lock file, as text ("process 71 on host"), or "" where nobody does; takes no lock.

    Never waits, and never disturbs a run: a process that is about to lock sees nothing of it.
    """
    with _HELD_LOCK:
        if os.path.realpath(path) in _HELD:  # closing any descriptor of the file would end this process's own lock
            return f"process {os.getpid()} on {socket.gethostname()}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
            found = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        finally:
            os.close(descriptor)
    return "" if kind == fcntl.F_UNLCK else found or f"process {pid}"


def _locked_by(path: pathlib.Path, holder: str) -> OutputLockedError:
    return OutputLockedError(f"{path.parent.parent} is being written by {holder}; wait for it, or give another output")
