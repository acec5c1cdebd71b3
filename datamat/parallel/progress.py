"""How far a pool is: what a caller's callback is told, so that it can draw a bar and a timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from datamat.parallel.handle import WorkerStats

__all__ = ["Progress", "Tally"]

_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pool is, in calls.

    Attributes:
        done: calls that ended with a result.
        failed: calls that ended with an error.
        in_flight: calls at workers.
        waiting: calls not yet sent.
        workers: every worker so far.
    """

    done: int
    failed: int
    in_flight: int
    waiting: int
    workers: tuple[WorkerStats, ...]


class Tally:
    """Counts calls that have ended, and tells the callback of it.

    Args:
        progress: returns what the callback is to be told.
        logger: where an error of the callback is logged.

    Attributes:
        done: calls that ended with a result.
        failed: calls that ended with an error.
        callback: the caller's, if there is one.
    """

    def __init__(self, progress: Callable[[], Progress], logger: logging.Logger) -> None:
        self.done = 0
        self.failed = 0
        self.callback: Callable[[Progress], object] | None = None
        self._progress = progress
        self._logger = logger
        self._next = 0.0

    def report_if_due(self, now: float) -> None:
        """Call the callback about ten times a second; `now` is of the monotonic clock."""
        if now >= self._next:
            self._next = now + _INTERVAL_S
            self.report()

    def report(self) -> None:
        """Call the callback."""
        if self.callback is not None:
            try:
                self.callback(self._progress())
            except Exception:  # a user's callback must not end the pool
                self._logger.exception("the progress callback failed")
