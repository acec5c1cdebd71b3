"""Folders on a disk: only regular files of the folder are read, and links are never written through.

A file is written under a hidden name in its folder, flushed, and renamed atomically; then the folder is flushed.
Without both flushes a power cut leaves names with missing bytes, on ext4 and xfs alike.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar, cast, final

from datamat.errors import READ_FLAGS, CorruptDataError, OptionError, OutputError, require_posix, want_of_resources
from datamat.folders.base import (
    ASIDE,
    AbsentError,
    ChangedError,
    DeniedError,
    ExistsError,
    Folder,
    Mode,
    Range,
    ReplaceIf,
    Stat,
    checked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from io import BufferedReader
    from typing import BinaryIO

_BLOCK_BYTES = 4 << 20
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_CLOEXEC", 0)
# In the Hugging Face Hub cache, all files of a snapshot are links to files named after their content.
_SNAPSHOT = re.compile(r"(.*)/snapshots/[0-9a-f]{40}(?:/.*)?")
_BLOB = re.compile(r"/blobs/[0-9a-f]{40,64}")
_COLLAPSED_URL = re.compile(r"[A-Za-z][\w+.-]+:/[^/]")
PathLike = TypeVar("PathLike", bound="str | os.PathLike[str]")


def expand_home(path: PathLike) -> PathLike:
    """Expand a leading `~` or `~USER` to the home folder, as a shell does; return other paths unchanged.

    Raises:
        OptionError: there is no such home folder, or the path is a URL mangled by `pathlib`.

    Example:
        >>> expand_home("out/~x")
        'out/~x'
    """
    text = os.fspath(cast("str | os.PathLike[str]", path))
    if isinstance(path, pathlib.PurePath) and _COLLAPSED_URL.match(str(text)):
        raise OptionError(f"{path!r} was made from a URL, and pathlib drops a slash of it; pass the URL as a str")
    if not isinstance(text, str) or not text.startswith("~"):
        return path
    found = os.path.expanduser(text)
    if found == text:
        raise OptionError(f"{text!r}: there is no such home folder; give the full path, or ./{text} if it is a name")
    return found if isinstance(path, str) else type(path)(found)  # type: ignore[return-value, call-arg]  # of the same type


def regular_path(folder: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Return the path to open for a file of a directory, which is a regular file inside it.

    The directory itself may be a link. Links in it are followed if they stay in it, or lead to the blobs of the Hugging
    Face Hub cache that it is a snapshot of.

    Raises:
        OSError: it does not exist, cannot be examined, or is a folder.
        CorruptDataError: it is a FIFO or a device, or is outside the directory.
    """
    path = real = pathlib.Path(folder, name)
    places = name.split("/")  # from the file up to the entry in the directory: usually just the file
    modes = [os.lstat(os.path.join(folder, *places[:end])).st_mode for end in range(len(places), 0, -1)]
    mode = modes[0]
    if any(map(stat.S_ISLNK, modes)):
        root, real = os.path.realpath(folder), pathlib.Path(os.path.realpath(path))
        hub = _SNAPSHOT.fullmatch(root)
        if not (real.is_relative_to(root) or (hub and _BLOB.fullmatch(str(real).removeprefix(hub[1])))):
            raise CorruptDataError(
                f"{path} is a link to {real}, outside its directory, and is not followed; copy the directory with "
                "its links followed (cp -rL), or put the file itself there"
            )
        if not real.exists() or real.is_symlink():  # an unresolved link is part of a cycle
            raise CorruptDataError(f"{path} is a link that leads nowhere; run repair() to rebuild it")
        mode = os.stat(real).st_mode
    if not stat.S_ISREG(mode):
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise CorruptDataError(f"{path} is a pipe, socket or device, not a regular file; run repair() to rebuild it")
    return real


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading; never wait for a FIFO or read a device.

    Raises:
        OSError: it cannot be opened.
        CorruptDataError: it is not a regular file.
    """
    descriptor = os.open(path, READ_FLAGS)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # checked before `open`, whose error for a folder does not name it
        return open(descriptor, "rb")
    os.close(descriptor)
    raise CorruptDataError(f"{os.fspath(path)} is not a regular file")


def look_anew(folder: str | os.PathLike[str]) -> None:
    """Make a network file system refresh a folder from its server.

    NFS caches for half a minute which names were missing, even if other hosts have since written them. Opening the
    folder compares it with the server's.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(folder, _FOLDER))


def read_regular(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Return the content of a regular file of limited size; never wait for a FIFO or read a device.

    Args:
        path: path of the file.
        max_bytes: maximum size.

    Raises:
        OSError: it cannot be read.
        CorruptDataError: it is not a regular file, or is larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CorruptDataError(f"{os.fspath(path)} has {size} bytes, more than the {max_bytes} allowed")
        return file.read(size)  # no more than its size: `read` allocates the requested bytes


@final
class LocalFolder(Folder):
    """A folder on a disk of this machine, or one mounted there.

    The folder itself may be a link. Links in it are read if they stay in it, see `regular_path`, and never written
    through: folders are opened relative to each other (openat(2)), and a link at the end is replaced.

    Without hard links, a kill between the two steps of a "create" leaves an empty file.

    Args:
        path: its absolute path.
    """

    keeps = frozenset({"create", "replace_if"})
    renames = True

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def place(self, name: str) -> str:
        return str(self._path / name)

    def blocks(self, name: str, max_bytes: int) -> Generator[bytes]:
        try:
            with open_regular(self._regular(name)) as file:
                left = max_bytes + 1  # one byte more than expected shows that there are more
                while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
                    left -= len(block)
                    yield block
        except OSError as error:
            raise self._explained(name, error) from error

    def read_range(self, name: str, start: int, stop: int) -> Range:
        try:
            path = self._regular(name)
            descriptor = os.open(path, READ_FLAGS)  # not a Python file object, which takes three times as long to open
            try:
                version = _stat_of(os.fstat(descriptor)).version
                os.lseek(descriptor, start, os.SEEK_SET)
                found = os.read(descriptor, stop - start)
                while len(found) < stop - start and (more := os.read(descriptor, stop - start - len(found))):
                    found += more  # the system reads 2 GB at a time
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._explained(name, error) from error
        if len(found) < stop - start:
            raise CorruptDataError(f"{self.place(name)} ends before byte {stop}; run the job again to rewrite it")
        return Range(found, version)

    def stat(self, name: str) -> Stat | None:
        try:
            with open_regular(self._regular(name)) as file:  # NFS asks its server when a file is opened
                return _stat_of(os.fstat(file.fileno()))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise self._explained(name, error) from error

    def list(self, below: str = "", *, deep: bool = False) -> Mapping[str, Stat]:
        top = self._path / checked(below) if below else self._path
        try:
            return _Listing(f"{top}/", _names_in(f"{top}/", "", deep=deep))
        except OSError as error:
            raise OutputError(f"{top} cannot be listed: {error.strerror}; let this process read it") from error

    def write(self, name: str, content: bytes, mode: Mode = "overwrite") -> str:
        return self._written(name, mode, lambda file: file.write(content))

    def write_file(self, name: str, path: str | os.PathLike[str], mode: Mode = "overwrite") -> str:
        with open_regular(path) as source:
            return self._written(name, mode, lambda file: shutil.copyfileobj(source, file, _BLOCK_BYTES))

    def copy(self, name: str, target: str) -> None:
        """Copy a file, by a hard link if possible, since files are replaced and never modified; see `Folder.copy`."""
        with self._opened(name) as source:
            try:
                with self._aside(target) as (place, last, aside):
                    os.link(regular_path(self._path, name), aside, dst_dir_fd=place)
                    os.rename(aside, last, src_dir_fd=place, dst_dir_fd=place)
            except OutputError:  # a file system without links, or another user's file
                self._written(target, "overwrite", lambda file: shutil.copyfileobj(source, file, _BLOCK_BYTES))

    def move(self, name: str, target: str) -> None:
        with self._inside(name, make=False) as (source, first):
            if not _is_there(first, source):
                raise AbsentError(f"{self.place(name)} is not there")
            with self._inside(target, make=True) as (place, last):
                os.rename(first, last, src_dir_fd=source, dst_dir_fd=place)

    def delete(self, name: str) -> None:
        with contextlib.suppress(AbsentError), self._inside(name, make=False) as (place, last):
            os.unlink(last, dir_fd=place)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / checked(name))

    def local_path(self, name: str = "") -> pathlib.Path:
        return regular_path(self._path, checked(name)) if name else self._path

    def _opened(self, name: str) -> BufferedReader:
        try:
            return open_regular(self._regular(name))
        except OSError as error:
            raise self._explained(name, error) from error

    def _regular(self, name: str) -> pathlib.Path:
        try:
            return regular_path(self._path, checked(name))
        except FileNotFoundError:
            for folder in reversed([self._path / name, *(self._path / name).parents][1 : name.count("/") + 2]):
                look_anew(folder)
            return regular_path(self._path, name)

    def _written(self, name: str, mode: Mode, fill: Callable[[BinaryIO], object]) -> str:
        with self._aside(name) as (place, last, aside):
            with open(os.open(aside, _NEW, 0o666, dir_fd=place), "wb") as file:
                fill(file)
                file.flush()
                now = time.time_ns()
                os.utime(file.fileno(), ns=(now, now))  # its own clock may give two files one version
                os.fsync(file.fileno())
                version = _stat_of(os.fstat(file.fileno())).version
            if mode == "create":
                try:
                    _name_first(place, aside, last)
                except FileExistsError:
                    raise ExistsError(f"{self.place(name)} is to be created, but already exists") from None
            elif isinstance(mode, ReplaceIf):
                with _alone(place, f"{ASIDE}lock"):
                    found = self.stat(name)
                    if found is None or found.version != mode.version:
                        raise ChangedError(f"{self.place(name)} has changed meanwhile, so it was not replaced")
                    os.rename(aside, last, src_dir_fd=place, dst_dir_fd=place)
            else:
                os.rename(aside, last, src_dir_fd=place, dst_dir_fd=place)
        return version

    @contextlib.contextmanager
    def _aside(self, name: str) -> Iterator[tuple[int, str, str]]:
        """Yield the open folder of a file, the last part of its name, and a temporary name in that folder."""
        with self._inside(name, make=True) as (place, last):
            aside = f"{ASIDE}{secrets.token_hex(8)}"
            try:
                yield place, last, aside
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside, dir_fd=place)

    @contextlib.contextmanager
    def _inside(self, name: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """Yield the open folder of a file, and the last part of its name; flush the folder at the end."""
        require_posix("writing to a folder")
        *parts, last = checked(name).split("/")
        try:
            if make and not self._path.is_dir():
                self._path.mkdir(parents=True, exist_ok=True)
                with _closed(os.open(self._path.parent, _FOLDER)) as parent:
                    os.fsync(parent)
            with contextlib.ExitStack() as opened:
                place = opened.enter_context(_closed(os.open(self._path, _FOLDER)))
                for part in parts:
                    if make:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(part, dir_fd=place)
                            os.fsync(place)
                    place = opened.enter_context(_closed(os.open(part, _FOLDER | _NO_LINK, dir_fd=place)))
                yield place, last
                os.fsync(place)
        except OutputError:
            raise
        except OSError as error:
            if not make and error.errno == errno.ENOENT:
                raise AbsentError(f"{self.place(name)} is not there") from None
            raise self._explained(name, error, "written") from error

    def _explained(self, name: str, error: OSError, done: str = "read") -> OutputError:
        if found := want_of_resources(self.place(name), error):
            return found
        said = f"{self.place(name)} cannot be {done}: {error.strerror or error}"
        if done == "written":
            kind = DeniedError if error.errno == errno.EACCES else OutputError
            return kind(f"{said}; make room, or repair the disk or what is in the way there, and run again")
        if error.errno == errno.EISDIR:
            return OutputError(f"{self.place(name)} is a folder, and a file belongs there; move it away")
        kinds = {errno.ENOENT: AbsentError, errno.ENOTDIR: AbsentError, errno.EACCES: DeniedError}
        return kinds.get(error.errno or 0, OutputError)(f"{said}; let this process read it")


def version_of(path: str | os.PathLike[str]) -> str:
    """Return the version of a file on disk, as in `LocalFolder`; raise `OSError` if there is none."""
    return _stat_of(os.stat(path)).version


def _stat_of(found: os.stat_result) -> Stat:
    return Stat(found.st_size, f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}")


class _Listing(Mapping[str, Stat]):
    """The files in a folder, sorted; each is examined on access, since tasks list thousands and need few."""

    def __init__(self, top: str, names: Iterable[str]) -> None:
        self._top, self._names = top, dict.fromkeys(sorted(names))

    def __getitem__(self, name: str) -> Stat:
        if name not in self._names:
            raise KeyError(name)
        with contextlib.suppress(OSError):  # it is gone, or is a broken link
            return _stat_of(os.stat(self._top + name))
        return Stat(0, "")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _names_in(top: str, below: str, *, deep: bool) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(top + below) as entries:
        for entry in entries:
            name, is_folder = below + entry.name, False
            with contextlib.suppress(OSError):  # a link to itself
                is_folder = entry.is_dir()
            if is_folder:
                if deep and not entry.is_symlink():
                    yield from _names_in(top, f"{name}/", deep=True)
            elif not entry.name.startswith(ASIDE):
                yield name


def _name_first(place: int, aside: str, last: str) -> None:
    """Give a file its final name; raise `FileExistsError` if the name is taken."""
    try:
        os.link(aside, last, src_dir_fd=place, dst_dir_fd=place)
    except FileExistsError:
        if os.stat(aside, dir_fd=place).st_nlink == 1:  # else it is ours: NFS repeated a request
            raise
    except OSError:  # a file system without links
        os.close(os.open(last, _NEW, 0o666, dir_fd=place))
        os.rename(aside, last, src_dir_fd=place, dst_dir_fd=place)


@contextlib.contextmanager
def _closed(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _alone(place: int, name: str) -> Iterator[None]:
    """Hold a lock in a folder: of a file, since NFS does not share locks of folders between hosts.

    If the file system has no locks, like Lustre by default, it holds nothing.
    """
    import fcntl

    while True:
        with _closed(os.open(name, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666, dir_fd=place)) as lock:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _has_name(lock, place, name):
                continue
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=place)  # before the release, so that waiting processes see it
            return


def _is_there(name: str, place: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISREG(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode)
    return False


def _has_name(descriptor: int, place: int, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=place, follow_symlinks=False))
    return False
