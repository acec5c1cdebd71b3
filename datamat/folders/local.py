"""Folders on a disk, and how their files are opened: regular files of the folder, and nothing else."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import stat
from typing import TYPE_CHECKING, TypeVar, cast, final

from datamat.errors import READ_FLAGS, CorruptDataError, OptionError, OutputError, want_of_resources
from datamat.folders.base import AbsentError, DeniedError, Folder, checked

if TYPE_CHECKING:
    from collections.abc import Generator
    from io import BufferedReader


__all__ = ["LocalFolder", "expand_home", "open_regular", "read_regular", "regular_path"]

_BLOCK_BYTES = 4 << 20
# In the cache of the Hugging Face Hub all files of a snapshot are links to files that are named after their content.
_SNAPSHOT = re.compile(r"(.*)/snapshots/[0-9a-f]{40}(?:/.*)?")
_BLOB = re.compile(r"/blobs/[0-9a-f]{40,64}")
_COLLAPSED_URL = re.compile(r"[A-Za-z][\w+.-]+:/[^/]")
PathLike = TypeVar("PathLike", bound="str | os.PathLike[str]")


def expand_home(path: PathLike) -> PathLike:
    """Expand a leading `~` or `~USER` to the home folder, as a shell does; return other paths as they are.

    Raises:
        OptionError: there is no such home folder, or the path is what `pathlib` has made of a URL.

    Example:
        >>> expand_home("out/~x")
        'out/~x'
    """
    text = os.fspath(cast("str | os.PathLike[str]", path))
    if isinstance(path, pathlib.PurePath) and _COLLAPSED_URL.match(str(text)):
        raise OptionError(f"{path!r} was made of a URL, of which pathlib drops a slash; pass the URL as a str")
    if not isinstance(text, str) or not text.startswith("~"):
        return path
    found = os.path.expanduser(text)
    if found == text:
        raise OptionError(f"{text!r}: there is no such home folder; give the whole path, or ./{text} if it is a name")
    return found if isinstance(path, str) else type(path)(found)  # type: ignore[return-value, call-arg]  # of its kind


def regular_path(folder: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Return the path to open for a file of a directory: that of a regular file inside the directory.

    The directory itself may be a link. Links in it are followed as long as they stay in it, or lead to the blobs of
    the Hugging Face Hub cache that it is a snapshot of.

    Raises:
        OSError: it does not exist, cannot be examined, or is a folder.
        CorruptDataError: it is a FIFO or a device, or lies outside the directory.
    """
    path = real = pathlib.Path(folder, name)
    places = name.split("/")  # from the file up to what lies in the directory: mostly the file alone
    modes = [os.lstat(os.path.join(folder, *places[:end])).st_mode for end in range(len(places), 0, -1)]
    mode = modes[0]
    if any(map(stat.S_ISLNK, modes)):
        root, real = os.path.realpath(folder), pathlib.Path(os.path.realpath(path))
        hub = _SNAPSHOT.fullmatch(root)
        if not (real.is_relative_to(root) or (hub and _BLOB.fullmatch(str(real).removeprefix(hub[1])))):
            raise CorruptDataError(
                f"{path} is a link to {real}, outside of its directory, and is not followed; copy the directory with "
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
    """Open a regular file for reading; never wait for a FIFO, never read a device.

    Raises:
        OSError: it cannot be opened.
        CorruptDataError: it is not a regular file; names it.
    """
    descriptor = os.open(path, READ_FLAGS)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # looked at before `open`, whose error for a folder does not name it
        return open(descriptor, "rb")
    os.close(descriptor)
    raise CorruptDataError(f"{os.fspath(path)} is not a regular file")


def read_regular(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Return the content of a regular file of limited size; never wait for a FIFO, never read a device.

    Args:
        path: path of the file.
        max_bytes: largest size that is read.

    Raises:
        OSError: it cannot be read.
        CorruptDataError: it is not a regular file, or larger; names the file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CorruptDataError(f"{os.fspath(path)} has {size} bytes, more than the {max_bytes} it may have")
        return file.read(size)  # no more than it holds: `read` allocates what it is asked for


@final
class LocalFolder(Folder):
    """A folder on a disk of this machine, or one that looks so.

    The folder itself may be a link, and those in it are followed as long as they stay in it; see `regular_path`.

    Args:
        path: its absolute path.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def place(self, name: str) -> str:
        return str(self._path / name)

    def blocks(self, name: str, max_bytes: int) -> Generator[bytes]:
        with self._opened(name) as file:
            left = max_bytes + 1  # one byte more than there should be shows that there are more
            while left > 0 and (block := self._read(file, min(left, _BLOCK_BYTES), name)):
                left -= len(block)
                yield block

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        try:
            path = regular_path(self._path, checked(name))
            descriptor = os.open(path, READ_FLAGS)  # not a file of Python's, which takes three times as long to open
            try:
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
        return found

    def size(self, name: str) -> int:
        with self._opened(name) as file:
            return os.fstat(file.fileno()).st_size

    def names(self, below: str = "", *, deep: bool = False) -> list[str]:
        top = self._path / checked(below) if below else self._path
        found = []
        try:
            for folder, folders, files in os.walk(top, onerror=_raise):
                found += [os.path.relpath(os.path.join(folder, name), top) for name in files]
                if not deep:
                    folders.clear()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise OutputError(f"{top} cannot be listed: {error.strerror}; let this process read it") from error
        return sorted(found)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / checked(name))

    def local_path(self, name: str = "") -> pathlib.Path:
        return regular_path(self._path, checked(name)) if name else self._path

    def _opened(self, name: str) -> BufferedReader:
        try:
            return open_regular(regular_path(self._path, checked(name)))
        except OSError as error:
            raise self._explained(name, error) from error

    def _read(self, file: BufferedReader, num_bytes: int, name: str) -> bytes:
        try:
            return file.read(num_bytes)
        except OSError as error:
            raise self._explained(name, error) from error

    def _explained(self, name: str, error: OSError) -> OutputError:
        if found := want_of_resources(self.place(name), error):
            return found
        kinds = {errno.ENOENT: AbsentError, errno.ENOTDIR: AbsentError, errno.EACCES: DeniedError}
        kind = kinds.get(error.errno or 0, OutputError)
        return kind(f"{self.place(name)} cannot be read: {error.strerror or error}; let this process read it")


def _raise(error: OSError) -> None:
    raise error
