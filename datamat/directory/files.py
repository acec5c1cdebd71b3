"""Files on disk: written atomically, flushed, locked; read only if they are regular files in the directory."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import pathlib
import re
import shutil
import socket
import stat
import struct
import sys
import tempfile
import threading
import weakref
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.errors import (
    READ_FLAGS,
    DatamatError,
    OutputError,
    OutputLockedError,
    SourceError,
    require_posix,
)
from datamat.folders.local import open_regular, read_regular
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO


# ---------------------------------------------------------------- text
#
# Text from outside (file names, keys, messages of other programs), made safe to display.


def printable(text: str) -> str:
    r"""Return text on one line that is safe in any terminal or log: unprintable characters become escapes.

    Example:
        >>> print(printable("a\x1b[31m\nb"))
        a\x1b[31m\nb
    """
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


WORK = ".datamat"
"""The folder in an output for files that runs need and users do not."""

MADE = "made"
"""The folder in it for files made from shards that are in a store and no longer on disk."""


# ---------------------------------------------------------------- storage
#
# Files that appear complete under their names or not at all.
#
# Every file visible to readers goes through `commit`: it is written under a temporary name, flushed to disk and
# renamed, and then the folder is flushed. Without both flushes a power cut leaves final names with missing bytes, on
# ext4 and xfs alike.
#
# A process that writes to an output holds its lock (`locked`). A lock file can be deleted while it is held, and some
# file systems have no locks. So before any file in an output gets its name, `check_lock` compares the file at the
# lock's path with the held one: of two runs that both believe to hold the output, one sees the difference and stops.


SPOOL = "datamat-rows-"
"""Prefix of temporary folders: for rows, unpacked files, fetched and shared files."""

_COPY_BYTES = 1 << 20
_LINE = "\n"
_HELD: dict[str, _HeldLock] = {}  # by their real paths
_HELD_LOCK = threading.Lock()  # held while these and the system's locks are synchronised
_STAND_IN_NS = 1_000_000_000  # one second after the epoch, which every file system can store
_MOST_JSON_BYTES = 1 << 28  # a manifest of half a million shards; larger files are not ours
_OF_DISKS = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE})
_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_HOLDER = re.compile(r"process (\d{1,9}) on (.+)")
_FLOCK = struct.Struct("hhqqi")  # struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, pid


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power cut."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows, where folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def empty_folder(folder: pathlib.Path) -> None:
    """Make an empty folder, replacing anything of that name."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir()


def temporary_folder(owner: object, below: str | None = None) -> str:
    """Make a folder that this process removes together with its owner, and return its path.

    Folders left by killed processes are removed. Folders in use are recognised by a lock, not by a process id, since
    containers share folders and each counts its processes from 1.

    Args:
        owner: object that uses the folder; workers that inherit it by fork do not remove the folder.
        below: parent folder; None for `TMPDIR`.
    """
    below = tempfile.gettempdir() if below is None else below
    _remove_abandoned(below)
    while True:
        folder = tempfile.mkdtemp(prefix=SPOOL, dir=below)
        descriptor = _hold(folder)
        if os.path.isdir(folder):  # otherwise another process considered it abandoned before it was locked
            weakref.finalize(owner, _remove_own, folder, os.getpid(), descriptor)
            return folder
        if descriptor is not None:
            os.close(descriptor)


def default_scratch() -> pathlib.Path:
    """Make this user's private scratch folder in `TMPDIR`; return its path.

    Raises:
        OutputError: something that another user could change has its name.
    """
    import getpass

    folder = pathlib.Path(tempfile.gettempdir(), f"datamat-{getpass.getuser()}")
    return private_folder(folder, "pass scratch= or set TMPDIR to a folder of your own")


def private_folder(folder: pathlib.Path, remedy: str) -> pathlib.Path:
    """Make a folder that no other user may read, unless it exists; return its path.

    Args:
        folder: its path, in an existing folder.
        remedy: alternative for the user, for messages.

    Raises:
        OutputError: something that another user could change has its name.
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OutputError(f"{folder} is not a folder; remove it, or {remedy}")
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise OutputError(
            f"{folder} belongs to another user (uid {found.st_uid}), who could change what is made there; {remedy}"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


_IN_USE = "in-use.lock"
_REMOVED = "-removed"  # temporary names end with a letter, a digit or "_"


def _hold(folder: str) -> int | None:
    """Lock a folder for the life of this process; return the descriptor, or None if locking is impossible."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    path = os.path.join(folder, _IN_USE)
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a file system without locks, where use cannot be detected
            os.close(descriptor)
            os.unlink(path)
            return None
        return descriptor
    return None


def _remove_abandoned(root: str) -> None:
    """Remove temporary folders of this user left by dead processes."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    for name in os.listdir(root):
        folder = os.path.join(root, name)
        if not name.startswith(SPOOL):
            continue
        if name.endswith(_REMOVED):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):  # another user's, locked, or gone meanwhile
            descriptor = os.open(os.path.join(folder, _IN_USE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(descriptor)


def _remove_own(folder: str, process: int, descriptor: int | None) -> None:
    if os.getpid() == process:
        with contextlib.suppress(OSError):  # already removed
            _remove(folder)
        if descriptor is not None:
            os.close(descriptor)


def _remove(folder: str) -> None:
    """Rename a folder, then remove it: if killed in between, its name marks it even if its lock is gone."""
    os.rename(folder, folder + _REMOVED)
    shutil.rmtree(folder + _REMOVED, ignore_errors=True)


def refuse_links(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that is, or contains, a link: a write through it would land elsewhere.

    Raises:
        OutputError: there is a link.
    """
    if os.path.islink(folder):
        raise OutputError(f"{os.fspath(folder)} is a link, which datamat does not write through: remove it")
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() or entry.is_dir(follow_symlinks=False):
                refuse_links(entry.path)


@contextlib.contextmanager
def disk_errors_explained(folder: pathlib.Path) -> Iterator[None]:
    """Add a place and a remedy to system errors of the block about files in a folder, or about its disk.

    System errors of failed writes do not name the file.

    Args:
        folder: the output that the block writes to.

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
        if isinstance(error, IsADirectoryError):
            raise OutputError(
                f"{error.filename2 or error.filename} is a folder, where a run writes a file; move it away and run "
                "again, or call repair(), which does so in a finished output"
            ) from error
        raise OutputError(
            f"the system stopped the run into {folder}: {error}; make room or repair the disk, and run again to resume"
        ) from error


def publish(temporary: str | os.PathLike[str], final: str | os.PathLike[str], *, flushes_name: bool = True) -> None:
    """Give a complete and flushed file its final name, and flush the name.

    Args:
        temporary: path of the complete file, on the same disk.
        final: its final path.
        flushes_name: False if the caller flushes the folder, once for several names.

    Raises:
        OutputLockedError: another process has taken over the lock on the output.
    """
    check_lock(final)
    os.replace(temporary, final)
    if flushes_name:
        fsync_folder(pathlib.Path(final).parent)


@contextlib.contextmanager
def commit(
    path: str | os.PathLike[str], *, through: pathlib.Path | None = None, flushes_name: bool = True
) -> Iterator[BinaryIO]:
    """Open a file for writing that is renamed to `path` only if the block ends without an error.

    Args:
        path: final path of the file, in an existing folder. An existing file is replaced atomically.
        through: folder, on the same disk, for the temporary file, so that leftovers of a killed process are not among
            finished files; None uses the folder of `path`.
        flushes_name: see `publish`.

    Yields:
        A writable binary file, which is removed if the block fails.
    """
    path = pathlib.Path(path)
    temporary = (through or path.parent) / f".{path.name}.{os.getpid()}.tmp"
    # O_EXCL and O_NOFOLLOW: a planted link at the temporary name is refused, not written through.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # left by a killed process with our id
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path, flushes_name=flushes_name)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def leave_stand_in(path: pathlib.Path, num_bytes: int) -> None:
    """Replace a file that is in a store by a stand-in: of the same size, without content, dated 1970.

    It takes no disk space. Comparing sizes and times, it passes for the file; reading it gives zeros, which are not a
    valid shard of any format.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.truncate(num_bytes)
    os.utime(temporary, ns=(_STAND_IN_NS, _STAND_IN_NS))
    os.replace(temporary, path)


def is_stand_in(path: str | os.PathLike[str] | os.DirEntry[str]) -> bool:
    """Return True if a file is a stand-in."""
    try:
        found = path.stat(follow_symlinks=False) if isinstance(path, os.DirEntry) else os.lstat(path)
    except OSError:
        return False
    return found.st_mtime_ns == _STAND_IN_NS and stat.S_ISREG(found.st_mode)


def render_json(value: Any) -> bytes:
    """Return a value as readable JSON with sorted keys: equal values give equal bytes.

    It equals `json.dumps` with `indent=1`, which Python implements slowly: here its fast encoder writes all values
    without nested dicts or lists, which is nearly everything in a manifest of many shards.
    """
    return f"{_rendered(value, _LINE)}\n".encode()


def _rendered(value: Any, line: str) -> str:
    """Return a value as JSON; `line` is the line break and the indentation of its line."""
    is_dict = isinstance(value, dict)
    if not value or not (is_dict or isinstance(value, (list, tuple))):
        return _encoder(",").encode(value)
    inner = f"{line} "
    if not any(isinstance(part, (dict, list, tuple)) for part in (value.values() if is_dict else value)):
        text = _encoder(f",{inner}").encode(value)
        return f"{text[0]}{inner}{text[1:-1]}{line}{text[-1]}"
    if not is_dict:
        return f"[{inner}{f',{inner}'.join([_rendered(part, inner) for part in value])}{line}]"
    # The text of a single-entry dict shows how a key of another type is encoded.
    names = [
        (encode_basestring(name) if type(name) is str else _encoder(",").encode({name: 0})[1:-4], name)
        for name in sorted(value)
    ]
    pairs = [f"{text}: {_rendered(value[name], inner)}" for text, name in names]
    return f"{{{inner}{f',{inner}'.join(pairs)}{line}}}"


@functools.cache
def _encoder(between: str) -> json.JSONEncoder:
    return json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(between, ": "))


def commit_json(path: str | os.PathLike[str], value: Any, *, through: pathlib.Path | None = None) -> None:
    """Write `value` as in `render_json`; see `commit`."""
    with commit(path, through=through) as file:
        file.write(render_json(value))


def path_inside(folder: str | os.PathLike[str], name: Any, named_by: str | os.PathLike[str]) -> pathlib.Path:
    """Return the path of a file named in a foreign index, which must be a relative path below its folder.

    Args:
        folder: folder to which the names are relative.
        name: the name in the index.
        named_by: path of the index, for the message.

    Raises:
        SourceError: the name leads out of the folder or is not a path.

    Example:
        >>> path_inside("set", "shards/0.mds", "set/index.json").as_posix()
        'set/shards/0.mds'
    """
    path = pathlib.PurePosixPath(name) if isinstance(name, str) else None
    if path is None or not path.name or "\0" in str(path) or path.is_absolute() or ".." in path.parts:
        raise SourceError(
            f"{os.fspath(named_by)} names the file {name!r}; want a relative path below {os.fspath(folder)}: "
            "correct the index, or get it again from a trusted place"
        )
    return pathlib.Path(folder, path)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a file of strict JSON: UTF-8, no duplicate names in an object, no NaN or Infinity.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not strict JSON; names the file.
    """
    return parse_json(read_regular(path, max_bytes=_MOST_JSON_BYTES), os.fspath(path))


def parse_json(content: bytes, place: str) -> Any:
    """Parse strict JSON, as `read_json` does; messages name `place`."""
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
    raise ValueError(f"{name} is not a JSON number")


def digest_file(path: str | os.PathLike[str], *, start: int = 0, num_bytes: int | None = None) -> str:
    """Return the XXH3-128 digest of a file, or of `num_bytes` bytes of it from `start`, as 32 hex digits.

    Raises:
        OSError: it cannot be read.
        CorruptDataError: it is not a regular file.
    """
    digest = xxhash.xxh3_128()
    left = num_bytes
    buffer = bytearray(_COPY_BYTES if left is None else min(_COPY_BYTES, left))
    view = memoryview(buffer)
    with open_regular(path) as file:
        file.seek(start)
        while count := file.readinto(view if left is None else view[:left]):
            digest.update(view[:count])
            if left is not None:
                left -= count
    return digest.hexdigest()


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Hold a lock file for the block; the system releases it however the process ends.

    It is a record lock (`fcntl`), which belongs only to this process: a lock inherited by forked workers would outlive
    a killed parent. Record locks do not distinguish threads of one process, so a table lists the paths held here.

    On a file system without locks, the last process to arrive holds the file: it puts its own file at the path, and the
    earlier run stops at its next `check_lock`. It does not displace a live process on this host.

    Args:
        path: path of the lock file, created if missing.

    Raises:
        OutputLockedError: another run holds it; names the process and host.
        OutputError: the path is not a regular file.
    """
    require_posix("writing a dataset")
    name = os.path.realpath(path)
    with _HELD_LOCK:
        if name in _HELD:
            raise _locked_by(path, f"another thread of this process ({os.getpid()})")
        descriptor = _lock(path)
        _HELD[name] = _HeldLock(descriptor, os.getpid(), path, _output_of(path))
    try:
        yield
    finally:
        with _HELD_LOCK:
            del _HELD[name]
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)  # it then names no holder, even without system locks
            os.close(descriptor)


def check_lock(path: str | os.PathLike[str]) -> None:
    """Raise if this process had locked the output of a path but no longer has the lock file.

    Call it before renaming anything in the output: if the file was deleted or replaced, two processes may be at work.

    Args:
        path: any path in the output.

    Raises:
        OutputLockedError: the lock file is gone or replaced.
        OutputError: the whole output was removed.
    """
    if not _HELD:
        return
    place = os.path.join(os.path.dirname(path), "")
    for name, held in list(_HELD.items()):
        if held.pid != os.getpid():  # in a forked worker the descriptor's number may be another file
            continue
        # By the locked path if it is a prefix of this one: links are resolved only for other paths, since a run checks
        # this for each part, and each step of a path is a system call.
        if place.startswith(held.output) or f"{os.path.realpath(place)}{os.sep}".startswith(_output_of(name)):
            _check_held(held)


def _output_of(lock: str | os.PathLike[str]) -> str:
    """Return the output of a lock file, with a trailing separator."""
    return os.path.join(os.path.dirname(os.path.dirname(lock)), "")


@frozen()
class _HeldLock:
    """A held lock: its open file, the holding process, the path of the file, and the locked folder."""

    descriptor: int
    pid: int
    path: pathlib.Path
    output: str


def _check_held(held: _HeldLock) -> None:
    if _is_at(held.descriptor, held.path):
        return
    output = held.path.parent.parent
    if not output.exists():
        raise OutputError(
            f"{output} was removed while this run (process {os.getpid()}) wrote to it: {os.strerror(errno.ENOENT)}; "
            "run again to make it from the beginning"
        )
    change = "was deleted"
    with contextlib.suppress(OSError, ValueError):
        holder = read_regular(held.path, max_bytes=200).decode(errors="replace").strip()
        change = f"was replaced by that of {holder or 'nobody'}"
    raise OutputLockedError(
        f"{held.path} {change} while this run (process {os.getpid()}) held it, and there may be two at work. This one "
        "stops; once no other is at work, run again to resume"
    )


def _lock(path: pathlib.Path) -> int:
    """Lock the file, write this process's name into it, and return its descriptor."""
    while True:
        descriptor = _open_lock(path)
        try:
            has_locks = _take(descriptor, path)
            if has_locks and _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _own_name(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not has_locks:
            return _lock_without_locks(path)
        # Otherwise it was deleted between the two steps, and another one may have been locked.


def _open_lock(path: pathlib.Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OutputError(f"{path} is not a regular file; datamat keeps its lock there: remove it")


def _take(descriptor: int, path: pathlib.Path) -> bool:
    """Lock a file; return False if its file system has no locks."""
    import fcntl

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return False
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        raise _locked_by(path, holder or "a process that is just starting") from error
    return True


def _lock_without_locks(path: pathlib.Path) -> int:
    """Put our own file at the path, unless the present one names a live process on this host."""
    holder = read_regular(path, max_bytes=200).decode(errors="replace").strip()
    found = _HOLDER.fullmatch(holder)
    if found and found[2] == socket.gethostname() and _is_alive(int(found[1])):
        raise _locked_by(path, holder)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.pwrite(descriptor, _own_name(), 0)
        os.replace(temporary, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    """Return True if the open file is the one at this path."""
    mine = os.fstat(descriptor)
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(path, follow_symlinks=False)
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
    return False


def _is_alive(pid: int) -> bool:
    """Return True if another process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return pid != os.getpid()


def _own_name() -> bytes:
    return f"process {os.getpid()} on {socket.gethostname()}\n".encode()


def lock_holder(path: pathlib.Path) -> str:
    """Return the holder of a lock file as text ("process 71 on host"); "" if there is none.

    It takes no lock, never waits, and never interferes with a run that is about to lock.
    """
    with _HELD_LOCK:
        if os.path.realpath(path) in _HELD:  # closing any descriptor of the file would release this process's own lock
            return f"process {os.getpid()} on {socket.gethostname()}"
        try:
            descriptor = os.open(path, READ_FLAGS | getattr(os, "O_NOFOLLOW", 0))
        except OSError:
            return ""
        try:
            return _holder_of(descriptor) if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""
        finally:
            os.close(descriptor)


def _holder_of(descriptor: int) -> str:
    found = os.read(descriptor, 200).decode(errors="replace").strip()
    try:
        import fcntl

        if sys.platform != "linux":  # the request has another layout there
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except (OSError, ImportError):  # the file system has no locks: only the text is known
        named = _HOLDER.fullmatch(found)
        is_gone = named and named[2] == socket.gethostname() and not _is_alive(int(named[1]))
        return "" if is_gone else found
    return "" if kind == fcntl.F_UNLCK else found or f"process {pid}"


def _locked_by(path: pathlib.Path, holder: str) -> OutputLockedError:
    return OutputLockedError(f"{path.parent.parent} is being written by {holder}; wait for it, or give another output")
