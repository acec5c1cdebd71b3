"""Which row a worker is at: a step in its crash note, which outlives the worker.

A sample that crashes a library, uses up all memory or loops forever takes its worker down, and no exception says
which sample it was. So the worker notes each row before it starts it. Where samples have a time limit, each sets an
alarm: a handler in C, which runs without Python, writes the stack into the note and ends the process.
"""

from __future__ import annotations

import faulthandler
import signal
from typing import TYPE_CHECKING, Self

from datamat.parallel.crash import own_note
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.errors import WorkerDied


__all__ = [
    "RowMark",
    "RowWatch",
]


@frozen()
class RowMark:
    """The rows that a worker is at.

    Attributes:
        position: position of the first row in the order of the plan.
        num_rows: number of rows processed at once: more than one in a block.
    """

    position: int
    num_rows: int = 1

    @classmethod
    def of(cls, error: WorkerDied) -> RowMark | None:
        """Return the mark of a worker that died; None if it was at no row."""
        position, num_rows = error.worker_exit.step
        return cls(position, num_rows) if num_rows else None


class RowWatch:
    """Notes the row that this process is at, in datamat's own workers. Used as a context manager.

    Args:
        timeout_s: seconds that a row may take; None for no limit. The alarm ends the process.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._note = own_note()
        self._timeout_s = None if self._note is None else timeout_s

    def __enter__(self) -> Self:
        if self._timeout_s is not None:
            assert self._note is not None
            # chain: afterwards the default action of this signal ends the process
            faulthandler.register(signal.SIGALRM, self._note, all_threads=True, chain=True)
        return self

    def at(self, position: int, num_rows: int = 1) -> None:
        """Note that a row, or a number of rows beginning with it, starts now."""
        if self._note is not None:
            self._note.write_step(position, num_rows)
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s * num_rows)

    def rest(self) -> None:
        """Note that no row is under way: what happens next is no row's fault."""
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self._note is not None:
            self._note.write_step(0, 0)

    def __exit__(self, *_: object) -> None:
        self.rest()
        if self._timeout_s is not None:
            faulthandler.unregister(signal.SIGALRM)
