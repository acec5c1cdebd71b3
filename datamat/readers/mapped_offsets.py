r"""The offsets of a shard's records, left in the file beside it: a line is looked up in a map of the file.

00017.idx  "0 20\n20 30\n ... 1950 31\n1981 28\n ..."      mapped: its pages are shared among all processes
            ^ line 0              ^ line 16               marks: where every 16th line begins
"""

from __future__ import annotations

import dataclasses
import mmap
from array import array
from typing import TYPE_CHECKING, BinaryIO, final

import numpy as np

from datamat.errors import CorruptDataError

if TYPE_CHECKING:
    from datamat.formats import Place

__all__ = ["LineMarks", "MappedOffsets"]

_LINES_PER_MARK = 16  # half a byte of memory for each record, and a few hundred bytes to look through for one


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LineMarks:
    """Where the lines of a file are, as far as one needs to know to find each of them soon.

    Attributes:
        identity: of the file that was looked through, by whatever tells it from others.
        starts: the first byte of every 16th line, and the end of the file.
    """

    identity: object
    starts: array[int]

    @classmethod
    def of(cls, content: bytes, identity: object) -> LineMarks:
        """Return the marks of a file with this content, which is not empty."""
        ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
        marked = ends[_LINES_PER_MARK - 1 : len(ends) - 1 : _LINES_PER_MARK] + 1
        return cls(identity, array("Q", [0, *marked.tolist(), len(content)]))


@final
class MappedOffsets:
    """Where each record of one shard lies, looked up when it is asked for. Thread-safe.

    Args:
        path: the file of offsets, for messages.
        file: the same, open; it may be closed afterwards.
        marks: its own.
    """

    __slots__ = ("_marks", "_pages", "_path")

    def __init__(self, path: str, file: BinaryIO, marks: LineMarks) -> None:
        self._path = path
        self._marks = marks.starts
        try:
            # Private, though nothing is written: not every network file system maps files that are shared.
            self._pages = mmap.mmap(file.fileno(), marks.starts[-1], mmap.MAP_PRIVATE, mmap.PROT_READ)
        except ValueError as error:  # it is shorter now
            raise CorruptDataError(f"{path} was changed while it was opened: {error}; verify its directory") from error

    def place(self, number: int) -> Place:
        """Return offset, size and skip of a record; raise `CorruptDataError` where the file was changed meanwhile."""
        mark, rest = divmod(number, _LINES_PER_MARK)
        try:
            # To touch pages of a map that its file has lost would end the process: one system call to ask first.
            if self._pages.size() == self._marks[-1]:
                lines = self._pages[self._marks[mark] : self._marks[mark + 1]].split(b"\n", rest + 1)
                numbers = lines[rest].split()
                return int(numbers[0]), int(numbers[1]), int(numbers[2]) if len(numbers) > 2 else 0
        except (IndexError, ValueError):
            pass
        raise CorruptDataError(
            f"{self._path} was changed while it was open: line {number + 1} is not what it was; verify its directory"
        )
