"""What a task of a stream has in place of a Future, at a third of its cost.

A `Future` makes a lock and a condition of its own, which is most of what dispatching a trivial call costs in the
parent. The tasks of a stream have one reader, so they share one event.
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SLICE_S", "Bell", "Slot"]

SLICE_S = 0.5  # a thread that waits wakes this often


class Bell:
    """Wakes the one thread that reads a stream; a bare lock, since an Event takes several times as long."""

    __slots__ = ("_lock", "awaited")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.awaited: Slot | None = None

    def ring(self) -> None:
        """End the wait, or the next one if nobody waits now."""
        with suppress(RuntimeError):  # it has been rung already
            self._lock.release()

    def wait(self, timeout: float | None) -> bool:
        """Wait until it rings; return False if it does not within `timeout` seconds.

        In slices: Python looks for a Ctrl-C before it blocks in a lock. One that comes in between, which takes
        milliseconds on a busy machine, would be heard of when the lock is free.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._lock.acquire(timeout=SLICE_S if timeout is None else min(SLICE_S, timeout)):
            timeout = None if timeout is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                return False
        return True


# States; not an Enum, whose members cost 0.15 us at each look. From _CANCELLED on the slot is settled.
_WAITING, _RUNNING, _CANCELLED, _FAILED, _DONE = range(5)


class Slot:
    """The part of a Future that the dispatcher and a stream use; settled by one thread, read by one other."""

    __slots__ = ("_bell", "_callback", "_state", "_value")

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._state = _WAITING
        self._value: Any = None
        self._callback: Callable[[Any], object] | None = None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Have `callback` called when the slot is settled; one only, and before the task is submitted."""
        self._callback = callback

    def set_running_or_notify_cancel(self) -> bool:
        """Mark the task as started, unless it has been cancelled."""
        if self._state == _CANCELLED:
            return False
        self._state = _RUNNING
        return True

    def cancel(self) -> bool:
        """Give up a task that has not started. Should it start at this very moment, nobody reads its result."""
        if self._state == _WAITING:
            self._settle(_CANCELLED, None)
        return self._state == _CANCELLED

    def set_result(self, value: Any) -> None:
        """Settle with a result."""
        self._settle(_DONE, value)

    def set_exception(self, error: BaseException) -> None:
        """Settle with an error."""
        self._settle(_FAILED, error)

    def _settle(self, state: int, value: Any) -> None:
        self._value = value
        self._state = state
        if self._bell.awaited is self:
            self._bell.ring()
        if self._callback is not None:
            self._callback(self)

    def done(self) -> bool:
        """Is it settled?"""
        return self._state >= _CANCELLED

    def result(self, timeout: float | None = None) -> Any:
        """Return the result, or raise the error.

        Raises:
            TimeoutError: it is not there after `timeout` seconds.
            CancelledError: the task was cancelled.
        """
        if not self.done():
            self._wait(timeout)
        if self._state == _CANCELLED:
            raise CancelledError
        if self._state == _FAILED:
            raise self._value
        return self._value

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        bell = self._bell
        bell.awaited = self
        try:
            while not self.done():  # asked after `awaited` is set: who settles later rings
                if not bell.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
        finally:
            bell.awaited = None
