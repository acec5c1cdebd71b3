"""One worker as its parent sees it: how it is started, what is under way there, what is known when it ends."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datamat.parallel import worker
from datamat.parallel.blackbox import BlackBox
from datamat.parallel.channel import ParentChannel, close_in_forks
from datamat.parallel.contexts import ForkPopen, start_process
from datamat.parallel.failures import Autopsy

if TYPE_CHECKING:
    from collections.abc import Callable

    from datamat.parallel.tasks import Task

__all__ = ["LAST_WORDS_S", "Handle", "WorkerStats"]

LAST_WORDS_S = 1.0  # between the request to end and SIGKILL
_LAST_LINES = 20
_EXIT_CODE_S = 1.0  # a server writes an exit code within microseconds, unless it was killed too


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What one worker has done so far.

    Attributes:
        pid: process id.
        tasks: tasks finished.
        busy_s: seconds spent in them.
        started: when it was started, as `time.time()`.
        ended: when it ended, None while it runs.
        peak_rss_bytes: highest resident memory seen.
    """

    pid: int
    tasks: int
    busy_s: float
    started: float
    ended: float | None
    peak_rss_bytes: int


class Handle:
    """A running worker."""

    def __init__(self, config: worker.WorkerConfig, slot: int, launcher: Callable[[Any], Any]) -> None:
        self.slot = slot
        ours, theirs = socket.socketpair()
        lifeline, their_lifeline = socket.socketpair()
        self.channel = ParentChannel(ours)
        self._lifeline = lifeline
        self._box = BlackBox.create()
        their_box = self._box.share()
        close_in_forks(self)
        self.pidfd: int | None = None
        try:
            arguments = (config, theirs, their_lifeline, their_box)
            self.process = start_process(launcher, worker.main, arguments, config.name)
        except BaseException:
            self.channel.close()
            self.abandon()
            raise
        finally:
            for end in (theirs, their_lifeline, their_box):
                end.close()
        self.pid = int(self.process.pid)
        self.pidfd = _open_pidfd(self.pid)
        self.in_flight: deque[Task] = deque()
        self.known_codes: set[int] = set()
        self.is_fork = launcher is ForkPopen  # then it has what codes let it inherit
        self.is_ready = False
        self.is_leaving = False
        self.has_hung_up = False
        self.has_ended = False
        self.has_timed_out = False
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.head_since = 0.0  # monotonic, when the task at the head of in_flight began
        self.kill_at: float | None = None
        self._started = time.time()
        self._ended: float | None = None
        self._tasks = 0
        self._busy_s = 0.0
        self.peak_rss_bytes = 0

    def abandon(self) -> None:
        """In a fork of the parent: let go of the descriptors."""
        self._lifeline.close()
        self._box.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    @property
    def sentinel(self) -> int:
        """The descriptor that becomes readable when the process ends."""
        return self.pidfd if self.pidfd is not None else int(self.process.sentinel)

    @property
    def takes_tasks(self) -> bool:
        """May it be given tasks?"""
        return self.is_ready and not (self.is_leaving or self.has_hung_up or self.has_timed_out)

    def count(self, num_calls: int, busy_s: float, peak_rss_bytes: int) -> None:
        """Note that a task is finished; the next one, if there is one, has begun."""
        self.head_since = time.monotonic()
        self._tasks += num_calls
        self._busy_s += busy_s
        self.peak_rss_bytes = max(self.peak_rss_bytes, peak_rss_bytes)

    def leave(self) -> None:
        """Give it no more tasks; SIGKILL follows if it does not end by itself."""
        self.is_leaving = True
        self.kill_at = time.monotonic() + LAST_WORDS_S

    def kill(self) -> None:
        """Send SIGKILL; its effect is noticed like any death."""
        with suppress(ProcessLookupError, OSError):
            self._send_signal(signal.SIGKILL)

    def kill_with_stack(self) -> None:
        """Have the worker write down its Python stack and end; SIGKILL follows if it cannot."""
        self.kill_at = time.monotonic() + LAST_WORDS_S
        with suppress(ProcessLookupError, OSError):
            self._send_signal(worker.TRACE_SIGNAL)

    def _send_signal(self, number: int) -> None:
        if self.pidfd is not None:
            signal.pidfd_send_signal(self.pidfd, number)
        else:
            os.kill(self.pid, number)

    def sample_memory(self) -> None:
        """Note the peak memory so far; what the kernel knew of it is gone once the process has ended."""
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{self.pid}/status", "rb") as status:
            for line in status:
                if line.startswith(b"VmHWM:"):
                    self.peak_rss_bytes = max(self.peak_rss_bytes, int(line.split()[1]) * 1024)
                    return

    def stats(self) -> WorkerStats:
        """Return what the worker has done so far."""
        return WorkerStats(self.pid, self._tasks, self._busy_s, self._started, self._ended, self.peak_rss_bytes)

    def bury(self) -> Autopsy:
        """Reap the ended process, close everything, and say what is known."""
        self.process.join(_EXIT_CODE_S)
        exitcode = self.process.exitcode
        self._ended = time.time()
        last_begun, stack = self._box.last_begun(), self._box.stacks()
        self.channel.close()
        self.abandon()
        with suppress(ValueError):  # it did not end after all: its server lost sight of it
            self.process.close()
        return Autopsy(self.pid, exitcode, self.peak_rss_bytes, last_begun, stack, tuple(self.last_lines))


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor of the process, which no sibling or grandchild can keep open as it can a pipe."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # ended already: its sentinel tells
        return None
