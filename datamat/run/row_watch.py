"""Record the row that a worker is processing, as a step in its crash note, which outlives the worker.

A sample that crashes a library, uses up all memory or loops forever kills its worker without an exception that names
it. So the worker records each row before it starts. If samples have a time limit, each sets an alarm, whose C handler
runs without Python: it writes the stack into the note and ends the process.
"""

from __future__ import annotations

import faulthandler
import signal
from typing import TYPE_CHECKING, Self

from datamat.parallel.crash import own_note
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.errors import WorkerDied


@frozen()
class RowMark:
    """The rows that a worker is processing.

    Attributes:
        position: position of the first row in the plan.
        num_rows: number of rows processed together: more than one in a block.
    """

    position: int
    num_rows: int = 1

    @classmethod
    def of(cls, error: WorkerDied) -> RowMark | None:
        """Return the mark of a worker that died; None if it was not processing a row."""
        position, num_rows = error.worker_exit.step
        return cls(position, num_rows) if num_rows else None


class RowWatch:
    """Records the row that this process is at, in datamat's own workers. A context manager.

    Args:
        timeout_s: time limit of a row in seconds, after which the process is ended; None for no limit.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._note = own_note()
        self._timeout_s = None if self._note is None else timeout_s

    def __enter__(self) -> Self:
        if self._timeout_s is not None:
            assert self._note is not None
            # chain: then the default action of this signal ends the process
            faulthandler.register(signal.SIGALRM, self._note, all_threads=True, chain=True)
        return self

    def at(self, position: int, num_rows: int = 1) -> None:
        """Record that a row, or several rows beginning with it, starts now."""
        if self._note is not None:
            self._note.write_step(position, num_rows)
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s * num_rows)

    def rest(self) -> None:
        """Record that no row is in progress, so that none is blamed for what happens next."""
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self._note is not None:
            self._note.write_step(0, 0)

    def __exit__(self, *_: object) -> None:
        self.rest()
        if self._timeout_s is not None:
            faulthandler.unregister(signal.SIGALRM)
