"""The interface of a folder, wherever it is."""

from __future__ import annotations

import abc
import contextlib
import os
import pathlib
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from datamat.errors import CorruptDataError, OptionError, OutputError

AT_ONCE = 32
"""Concurrent requests of a process."""
ASIDE = ".datamat-tmp-"
"""Prefix of incomplete files, including those of killed processes: no listing shows them."""

_NO_NAME = re.compile(r"[\0-\x1f\\]")


class AbsentError(OutputError):
    """There is no such file. A missing bucket or a dead server never raises this."""


class DeniedError(OutputError):
    """A file may not be read or written."""


class ExistsError(OutputError):
    """A file was to be created, but already exists."""


class ChangedError(OutputError):
    """A version of a file was to be replaced, but the file is gone or has another version."""


class UnsupportedError(OutputError):
    """The place does not support a condition, although its kind does: it answers 501 Not Implemented."""


class Stat(NamedTuple):
    """The status of a file.

    Attributes:
        num_bytes: its size.
        version: changes whenever other content is written; for `ReplaceIf`. "" if a listing does not include it.
    """

    num_bytes: int
    version: str


class Range(NamedTuple):
    """Some bytes of a file.

    Attributes:
        content: the bytes.
        version: `Stat.version` of the file, which tells whether several ranges are from one version; "" if the
            response does not include it.
    """

    content: bytes
    version: str


class ReplaceIf(NamedTuple):
    """Write mode: replace this version of a file, or raise `ChangedError`."""

    version: str


Mode = Literal["overwrite", "create"] | ReplaceIf
"""What a write may replace: any file, none (or raise `ExistsError`), or one version (or raise `ChangedError`)."""


class Folder(abc.ABC):
    """A folder of files with names such as `_index/train.index`, on a disk, in a bucket, or behind a web server.

    Thread-safe and picklable: it holds no open resources, and works in any process, including forked ones. A read
    returns exactly the requested bytes, or raises. A written file is visible whole or not at all, even if a process is
    killed, and durable once the call returns. Names stay in the folder: `..` and absolute ones are refused. Neither
    `str` nor messages show secrets.

    Code that needs a real file asks for its `local_path`, and reads ranges if there is none: nothing else distinguishes
    folders on this machine from others.

    A writable subclass defines `write` and `delete`, and overrides `write_file` and `copy` if it has better ways.

    Attributes:
        keeps: conditions of a write that hold between processes, of "create" and "replace_if".
        is_private: whether only this process sees the files.
        renames: whether `move` renames a file, and does not copy it.
    """

    keeps: frozenset[str] = frozenset()
    is_private: bool = False
    renames: bool = False

    @abc.abstractmethod
    def __str__(self) -> str:
        """Path or URL of the folder, without secrets."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @property
    def address(self) -> pathlib.Path | str:
        """The folder as its user knows it: a path on this machine, or a URL without secrets."""
        return self.local_path() or str(self)

    @abc.abstractmethod
    def place(self, name: str) -> str:
        """Return the path or URL of a file, without secrets, for messages.

        Args:
            name: name of the file, a path below the folder, as for all methods.
        """

    @abc.abstractmethod
    def blocks(self, name: str, max_bytes: int) -> Generator[bytes]:
        """Yield the content of a file, a few megabytes at a time; if it is too long, a little more than `max_bytes`.

        Args:
            name: name of the file.
            max_bytes: its size if known, else its maximum size.

        Raises:
            AbsentError: there is no such file.
            DeniedError: it may not be read.
            OutputError: it cannot be read to its end.
        """

    @abc.abstractmethod
    def read_range(self, name: str, start: int, stop: int) -> Range:
        """Return some bytes of a file, and its version; raise as `blocks` does, or if the file ends before `stop`.

        Args:
            name: name of the file.
            start: first byte.
            stop: byte after the last one.
        """

    @abc.abstractmethod
    def stat(self, name: str) -> Stat | None:
        """Return the size and version of a file, None if there is none; otherwise raise as `blocks` does."""

    @abc.abstractmethod
    def list(self, below: str = "", *, deep: bool = False) -> Mapping[str, Stat] | None:
        """Return the files in a folder, sorted by name; empty if there is no folder, None if it cannot be listed.

        Args:
            below: folder in this one; "" for this one. Names are relative to it.
            deep: whether to list subfolders, too.

        Raises:
            OutputError: it cannot be listed.
        """

    @abc.abstractmethod
    def child(self, name: str) -> Folder:
        """Return a folder in this one."""

    def write(self, name: str, content: bytes, mode: Mode = "overwrite") -> str:
        """Write a small file, and return its version.

        If a response was lost, a repeated conditional write may find the file that it has itself created: see
        `create_once`.

        Args:
            name: name of the file; missing folders are created.
            content: its content.
            mode: what it may replace.

        Raises:
            ExistsError: the file exists, and `mode` is "create".
            ChangedError: the version to replace is not there.
            UnsupportedError: the store does not support the condition.
            DeniedError: it may not be written.
            OutputError: it cannot be written.
            OptionError: the folder is read-only.
        """
        raise not_written(str(self))

    def write_file(self, name: str, path: str | os.PathLike[str], mode: Mode = "overwrite") -> str:
        """Write a file of any size from one on this machine, and return its version; raise as `write` does.

        Args:
            name: name of the file.
            path: path of the file with the content, which must not change meanwhile.
            mode: what it may replace.
        """
        return self.write(name, pathlib.Path(path).read_bytes(), mode)

    def copy(self, name: str, target: str) -> None:
        """Copy a file to another name, replacing it; on the server if possible.

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
        """Rename a file, replacing any file of the new name; raise as `copy` does.

        Args:
            name: name of the file.
            target: its new name.
        """
        self.copy(name, target)
        self.delete(name)

    def delete(self, name: str) -> None:
        """Delete a file if it exists; raise as `write` does if it cannot be deleted."""
        raise not_written(str(self))

    def local_path(self, name: str = "") -> pathlib.Path | None:
        """Return the path of a file, or of the folder itself, on this machine; None if the folder is elsewhere.

        Args:
            name: name of the file; "" for the folder.

        Raises:
            OSError: the folder is on this machine, but there is no such file.
            CorruptDataError: it is not a regular file in the folder.
        """
        return None

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a small file.

        Args:
            name: name of the file.
            max_bytes: its maximum size.

        Raises:
            CorruptDataError: it is larger.

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
        """Return the content of a small file as `read` does; None if there is none."""
        try:
            return self.read(name, max_bytes)
        except AbsentError:
            return None


def checked(name: str) -> str:
    """Return the name of a file, or raise `OptionError` if it leads out of its folder or nowhere."""
    if any(part in {"", ".", ".."} for part in name.split("/")) or _NO_NAME.search(name):
        raise OptionError(f"{name!r} is not the name of a file in a folder; want one such as _index/train.index")
    return name


def create_once(folder: Folder, name: str, content: bytes) -> bool:
    """Create a small file; return True if the file that is there now has this content.

    If the response to a first attempt was lost, the next one finds the file that it has itself created: the content
    decides. So a process that must be the only one writes unique content.

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
    """Return the results of a function for each value, computed concurrently; raise the first error."""
    from concurrent.futures import ThreadPoolExecutor

    if not (listed := list(values)):
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(listed))) as pool:
        return list(pool.map(call, listed))


def not_written(place: str) -> OptionError:
    """Return the error for a read-only place."""
    return OptionError(
        f"{place.partition('://')[0]}:// can be read, not written; give a folder, or a URL such as s3://bucket/out"
    )
