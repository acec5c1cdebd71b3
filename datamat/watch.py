"""At which row a worker is: noted in a small file beside its part, which outlives the worker.

A sample that makes a library crash, eats all memory or loops for ever takes its worker with it, and no exception tells
which one it was. So the worker writes the position of each row before it begins with it. Where samples have a time
limit, an alarm is set for each: a handler in C, which needs no Python to run, writes the stack behind the position and
ends the process.

    parts/SHARD/00003.at    int64 position of the row, int64 number of rows that are done at once, stack as text
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import signal
import struct
from typing import TYPE_CHECKING, Self

from datamat.parallel.role import is_worker

if TYPE_CHECKING:
    import pathlib

__all__ = ["RowMark", "RowWatch", "read_mark"]

_MARK = struct.Struct("<qq")
_AT_REST = (-1, 0)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
_LONGEST_STACK = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class RowMark:
    """What a worker that died has left of its part.

    Attributes:
        position: of the row that it was at, in the order of the plan; None if it was at none.
        num_rows: rows that were done at once: more than one in a block.
        stack: Python frames at the moment when its time was over, else "".
    """

    position: int | None
    num_rows: int
    stack: str


class RowWatch:
    """Notes the row that this process is at. Used as a context manager; the file goes at the end.

    Args:
        path: the file.
        timeout_s: seconds that a row may take; None for no limit. Kept in datamat's own workers only: the alarm ends
            the process.
    """

    def __init__(self, path: pathlib.Path, timeout_s: float | None) -> None:
        self._path = path
        self._timeout_s = timeout_s if is_worker() else None

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, _FLAGS, 0o666)
        os.write(self._descriptor, _MARK.pack(*_AT_REST))  # what is written later, a stack, comes behind it
        if self._timeout_s is not None:
            # chain: and then what the system does, which is to end the process by this signal
            faulthandler.register(signal.SIGALRM, self._descriptor, all_threads=True, chain=True)
        return self

    def at(self, position: int, num_rows: int = 1) -> None:
        """Note that this row, or as many rows from it on, are begun."""
        os.pwrite(self._descriptor, _MARK.pack(position, num_rows), 0)
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s * num_rows)

    def rest(self) -> None:
        """Note that no row is under way: what comes is no row's fault."""
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        os.pwrite(self._descriptor, _MARK.pack(*_AT_REST), 0)

    def __exit__(self, *_: object) -> None:
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)
        os.close(self._descriptor)
        os.unlink(self._path)


def read_mark(path: pathlib.Path) -> RowMark:
    """Return what the watch of a process that died has left, and remove it."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MARK.size + _LONGEST_STACK)
        os.unlink(path)
    except OSError:  # it died before it began with the part, or after it had ended it
        return RowMark(None, 0, "")
    if len(data) < _MARK.size:
        return RowMark(None, 0, "")
    position, num_rows = _MARK.unpack_from(data)
    return RowMark(None if position < 0 else position, num_rows, data[_MARK.size :].decode(errors="replace"))
