"""What a folder is to all that read and write it, wherever it lies."""

from __future__ import annotations

import abc
import contextlib
import os
import pathlib
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from datamat.errors import CorruptDataError, OptionError, OutputError

__all__ = [
    "ASIDE",
    "AT_ONCE",
    "AbsentError",
    "ChangedError",
    "DeniedError",
    "ExistsError",
    "Folder",
    "Mode",
    "Range",
    "ReplaceIf",
    "Stat",
    "UnsupportedError",
    "checked",
    "create_once",
    "each",
    "not_written",
]

AT_ONCE = 32
"""Requests that a process makes at once."""
ASIDE = ".datamat-tmp-"
"""Prefix of files that are not complete yet, or that a kill left so: no listing shows them."""

_NO_NAME = re.compile(r"[\0-\x1f\\]")


class AbsentError(OutputError):
    """There is no such file, as far as its place says: a bucket that is missing, or a dead server, never means that."""


class DeniedError(OutputError):
    """A file may not be read or written."""


class ExistsError(OutputError):
    """A file was to be created, and there is one."""


class ChangedError(OutputError):
    """A version of a file was to be replaced, and the file is gone or has another version."""


class UnsupportedError(OutputError):
    """The place does not support a condition, although its kind does: it answers 501 Not Implemented."""


class Stat(NamedTuple):
    """What a place says of a file.

    Attributes:
        num_bytes: its size.
        version: changes whenever another content is written; for `ReplaceIf`. "" where a listing does not tell.
    """

    num_bytes: int
    version: str


class Range(NamedTuple):
    """Some bytes of a file.

    Attributes:
        content: the bytes.
        version: `Stat.version` of the file that they are from, so that whoever reads several ranges knows whether they
            are of one version; "" where the answer does not tell.
    """

    content: bytes
    version: str


class ReplaceIf(NamedTuple):
    """Write mode: replace this version of a file, or raise `ChangedError`."""

    version: str


Mode = Literal["overwrite", "create"] | ReplaceIf
"""What a write may replace: any file, none (else `ExistsError`), or one version (else `ChangedError`)."""


class Folder(abc.ABC):
    """A folder of files with names such as `_index/train.index`, on a disk, in a bucket, or behind a web server.

    Thread-safe and picklable: it holds nothing that is open, and works in any process, also in a forked one. A read
    returns exactly the bytes that it was asked for, or raises. A written file is visible whole or not at all, whoever
    is killed, and durable once the call returns. Names stay in the folder: `..` and absolute ones are refused. Neither
    `str` nor a message shows a secret.

    Whoever needs a real file asks for its `local_path`, and reads by ranges where there is none: nothing else tells a
    place on this machine from others.

    A subclass that can be written defines `write` and `delete`, and `write_file` and `copy` where it has better ways.

    Attributes:
        keeps: conditions of a write that hold between processes, of "create" and "replace_if".
        is_private: whether only this process sees the files.
    """

    keeps: frozenset[str] = frozenset()
    is_private: bool = False

    @abc.abstractmethod
    def __str__(self) -> str:
        """Path or URL of the folder, without secrets."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @abc.abstractmethod
    def place(self, name: str) -> str:
        """Return path or URL of a file, without secrets, for messages.

        Args:
            name: name of the file, a path below the folder, as for all methods.
        """

    @abc.abstractmethod
    def blocks(self, name: str, max_bytes: int) -> Generator[bytes]:
        """Yield the content of a file, a few megabytes at a time; of one that is too long, a byte more or some.

        Args:
            name: name of the file.
            max_bytes: its size, as far as that is known; the most it may have otherwise.

        Raises:
            AbsentError: there is no such file.
            DeniedError: it may not be read.
            OutputError: it cannot be read to its end.
        """

    @abc.abstractmethod
    def read_range(self, name: str, start: int, stop: int) -> Range:
        """Return some bytes of a file, and its version; raise as `blocks` does, and where the file ends before `stop`.

        Args:
            name: name of the file.
            start: first byte.
            stop: byte after the last one.
        """

    @abc.abstractmethod
    def stat(self, name: str) -> Stat | None:
        """Return size and version of a file; None where there is none. Raise as `blocks` does otherwise."""

    @abc.abstractmethod
    def list(self, below: str = "", *, deep: bool = False) -> Mapping[str, Stat] | None:
        """Return the files in a folder, sorted by name; none where there is no folder, None if no place tells.

        Args:
            below: folder in this one; "" for this one. Names are relative to it.
            deep: whether to list the folders in it, too.

        Raises:
            OutputError: it cannot be listed.
        """

    @abc.abstractmethod
    def child(self, name: str) -> Folder:
        """Return a folder in this one."""

    def write(self, name: str, content: bytes, mode: Mode = "overwrite") -> str:
        """Write a small file, and return its version.

        Where an answer was lost, a repeated conditional write may meet the file that it made itself: see `create_once`.

        Args:
            name: name of the file; folders on the way to it are made.
            content: its content.
            mode: what it may replace.

        Raises:
            ExistsError: there is such a file, and `mode` is "create".
            ChangedError: the version that was to be replaced is not there.
            UnsupportedError: the place does not know the condition.
            DeniedError: it may not be written.
            OutputError: it cannot be written.
            OptionError: the place can only be read.
        """
        raise not_written(str(self))

    def write_file(self, name: str, path: str | os.PathLike[str], mode: Mode = "overwrite") -> str:
        """Write a file of any size from one on this machine's disk, and return its version; raise as `write` does.

        Args:
            name: name of the file.
            path: path of the file with the content, which nobody changes meanwhile.
            mode: what it may replace.
        """
        return self.write(name, pathlib.Path(path).read_bytes(), mode)

    def copy(self, name: str, target: str) -> None:
        """Give the content of a file to another, which is replaced; within the place where it can do so.

        Args:
            name: name of the file.
            target: name of the copy.

        It raises what `read` and `write` raise.
        """
        found = self.stat(name)
        if found is None:
            raise AbsentError(f"{self.place(name)} cannot be copied: there is no such file")
        self.write(target, self.read(name, found.num_bytes))

    def move(self, name: str, target: str) -> None:
        """Give a file another name, under which what was there is replaced; raise as `copy` does.

        Args:
            name: name of the file.
            target: its name afterwards.
        """
        self.copy(name, target)
        self.delete(name)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there; raise as `write` does where it cannot be deleted."""
        raise not_written(str(self))

    def local_path(self, name: str = "") -> pathlib.Path | None:
        """Return the path of a file on this machine, or of the folder itself; None where the folder has no files here.

        Args:
            name: name of the file; "" for the folder.

        Raises:
            OSError: the folder is on this machine, and there is no such file.
            CorruptDataError: what has that name is no regular file in the folder.
        """
        return None

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a small file.

        Args:
            name: name of the file.
            max_bytes: most bytes that it may have.

        Raises:
            CorruptDataError: it has more.

        It also raises what `blocks` raises.
        """
        content = bytearray()
        with contextlib.closing(self.blocks(name, max_bytes)) as blocks:
            for block in blocks:
                content += block
                if len(content) > max_bytes:
                    raise CorruptDataError(
                        f"{self.place(name)} has over {max_bytes} bytes, the most it may have; run the job again"
                    )
        return bytes(content)

    def read_if_there(self, name: str, max_bytes: int) -> bytes | None:
        """Return the content of a small file as `read` does; None where there is none."""
        try:
            return self.read(name, max_bytes)
        except AbsentError:
            return None


def checked(name: str) -> str:
    """Return the name of a file, or raise `OptionError` where it leads out of its folder, or nowhere."""
    if any(part in {"", ".", ".."} for part in name.split("/")) or _NO_NAME.search(name):
        raise OptionError(f"{name!r} is not the name of a file in a folder; want one such as _index/train.index")
    return name


def create_once(folder: Folder, name: str, content: bytes) -> bool:
    """Create a small file; return whether what is there now has this content.

    Where the answer to a first attempt was lost, the next one meets the file that it made itself: content decides. So
    whoever must be the only one writes what nobody else does.

    Args:
        folder: the folder.
        name: name of the file.
        content: its content.

    It raises what `write` and `read` raise.
    """
    try:
        folder.write(name, content, "create")
    except ExistsError:
        found = folder.stat(name)
        is_as_long = found is not None and found.num_bytes == len(content)
        return is_as_long and folder.read_if_there(name, len(content)) == content
    return True


def each(call: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """Return what a function returns for each value, many at once; raise what the first that fails raises."""
    from concurrent.futures import ThreadPoolExecutor

    if not (listed := list(values)):
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(listed))) as pool:
        return list(pool.map(call, listed))


def not_written(place: str) -> OptionError:
    """Return the error to raise where a place can only be read."""
    return OptionError(
        f"{place.partition('://')[0]}:// can be read, not written; give a folder, or a URL such as s3://bucket/out"
    )
