"""What a folder is to all that read from it, wherever it lies."""

from __future__ import annotations

import abc
import contextlib
import pathlib
import re
from collections.abc import Generator

from datamat.errors import CorruptDataError, OptionError, OutputError

__all__ = ["AbsentError", "DeniedError", "Folder", "checked"]

_NO_NAME = re.compile(r"[\0-\x1f\\]")


class AbsentError(OutputError):
    """There is no such file, as far as its place says: a bucket that is missing, or a dead server, never means that."""


class DeniedError(OutputError):
    """A file may not be read."""


class Folder(abc.ABC):
    """A folder of files with names such as `_index/train.index`, on a disk, in a bucket, or behind a web server.

    Thread-safe and picklable: it holds nothing that is open, and works in any process, also in a forked one. A read
    returns exactly the bytes that it was asked for, or raises. Names stay in the folder: `..` and absolute ones are
    refused. Neither `str` nor a message shows a secret.

    Whoever needs a real file asks for its `local_path`, and reads by ranges where there is none: nothing else tells a
    place on this machine from others.
    """

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
    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return some bytes of a file; raise as `blocks` does, and where the file ends before `stop`.

        Args:
            name: name of the file.
            start: first byte.
            stop: byte after the last one.
        """

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """Return the number of bytes of a file; raise as `blocks` does."""

    @abc.abstractmethod
    def names(self, below: str = "", *, deep: bool = False) -> list[str] | None:
        """Return the sorted names of the files in a folder; none where there is no folder, None if no place tells.

        Args:
            below: folder in this one; "" for this one. Names are relative to it.
            deep: whether to list the folders in it, too.

        Raises:
            OutputError: it cannot be listed.
        """

    @abc.abstractmethod
    def child(self, name: str) -> Folder:
        """Return a folder in this one."""

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
