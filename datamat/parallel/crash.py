"""What is known of a worker that died: the note that it leaves however it ends, and the description of its end."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import tempfile
from typing import Self

from datamat.parallel.channel import Descriptor, close_in_forks
from datamat.parallel.frozen import frozen

# ---------------------------------------------------------------- the note
#
# A small file in memory. The worker records what it is working on; its parent reads that after its death.
#
#   bytes 0 to 7     number of the task, or of the callable, that the worker began last; 0 once it is done
#   bytes 8 to 15    if calls have a time limit: when the current one began, in nanoseconds of the monotonic clock
#   bytes 16 to 39   number of the task that recorded a step, and the step: two numbers that a long task chooses
#   then             Python stacks, as `faulthandler` writes them when the process crashes or a signal asks for them
#
# The worker writes its numbers through a memory map: that takes no system call, and wakes no process. So the parent can
# distinguish a task that killed its worker from one that merely lay in the socket of a worker that died of something
# else.


_NUMBERS = struct.Struct("<5Q")
_STACKS_AT = _NUMBERS.size

_own: CrashNote | None = None  # in a worker


class CrashNote:
    """A descriptor of the file; the parent and the worker have one each."""

    __slots__ = ("_begun", "_descriptor")

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._begun: memoryview | None = None

    @classmethod
    def create(cls) -> Self:
        """Return a new, empty note."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("datamat-worker")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.write(descriptor, bytes(_STACKS_AT))  # stacks follow: all descriptors of the file share one position
        note = cls(Descriptor(descriptor))
        close_in_forks(note._descriptor)
        return note

    def share(self) -> CrashNote:
        """Return a duplicate of the descriptor, for the worker."""
        return CrashNote(self._descriptor.share())

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor.fileno()

    def close(self) -> None:
        """Close the descriptor; safe to repeat."""
        self._descriptor.close()

    # ------------------------------------------------------------ in the worker

    def open(self) -> memoryview:
        """Make this the note of the process; return a uint64 view for the number of a task, and a time."""
        global _own  # noqa: PLW0603 -- a process has one
        _own = self
        self._begun = memoryview(mmap.mmap(self.fileno(), _NUMBERS.size)).cast("Q")
        return self._begun

    def write_step(self, first: int, second: int) -> None:
        """Record the step of the current task: two numbers of its choice, from 0; (0, 0) for none."""
        begun = self._begun
        assert begun is not None
        begun[3] = first
        begun[4] = second
        begun[2] = begun[0]

    # ------------------------------------------------------------ in the parent

    def last_begun(self) -> int:
        """Return the number of the task or callable that the worker had begun and not finished, else 0."""
        return int.from_bytes(os.pread(self.fileno(), 8, 0), "little")

    def call_since(self) -> float:
        """Return when the current call began, in seconds of the monotonic clock; 0 if unknown."""
        return int.from_bytes(os.pread(self.fileno(), 8, 8), "little") / 1e9

    def step(self) -> tuple[int, int]:
        """Return the step that the task which the worker began last had recorded; (0, 0) for none."""
        last, _, number, first, second = _NUMBERS.unpack(os.pread(self.fileno(), _NUMBERS.size, 0))
        return (first, second) if number == last else (0, 0)

    def stacks(self) -> str:
        """Return the Python stacks that the worker wrote."""
        size = os.fstat(self.fileno()).st_size
        return os.pread(self.fileno(), size, _STACKS_AT).decode(errors="replace")


def own_note() -> CrashNote | None:
    """Return the note of this process; None if it is not a worker."""
    return _own


# ---------------------------------------------------------------- the description


@frozen()
class WorkerExit:
    """What is known of a worker that ended.

    Attributes:
        pid: process id of the worker.
        exitcode: exit code as in `multiprocessing`: negative for a signal; None if unknown.
        peak_rss_bytes: highest resident memory seen.
        last_begun: number of the task, or callable, that it had begun and not finished, else 0.
        step: the step that this task had recorded, two numbers of its choice; (0, 0) for none.
        stack: Python frames written when it crashed or a signal asked for them, else "".
        log_lines: last log messages of the worker.
    """

    pid: int
    exitcode: int | None
    peak_rss_bytes: int
    last_begun: int
    step: tuple[int, int] = (0, 0)
    stack: str = ""
    log_lines: tuple[str, ...] = ()

    @property
    def signal(self) -> int | None:
        """The signal that ended it, None if it exited."""
        return -self.exitcode if self.exitcode is not None and self.exitcode < 0 else None

    def cause(self) -> str:
        """Describe how it ended: exit code, or signal and its usual sender."""
        if self.signal is None:
            return f"exit code {self.exitcode}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = "real-time signal"
        hint = ", as the kernel's out-of-memory killer sends it" if self.signal == signal.SIGKILL else ""
        return f"signal {self.signal} ({name}{hint})"

    def report(self) -> str:
        """Return peak memory, stack and last log lines as text."""
        text = f"peak memory {self.peak_rss_bytes / 2**20:.0f} MiB"
        if self.stack:
            text += f", Python stack:\n{self.stack.rstrip()}"
        if self.log_lines:
            text += "\nlast log lines of the worker:\n" + "\n".join(f"  {line}" for line in self.log_lines)
        return text

    def describe(self) -> str:
        """Describe how it ended, with all known details."""
        return f"{self.cause()}, {self.report()}"

    def describe_timeout(self, limit: str, limit_s: float) -> str:
        """Describe a worker that was killed because of a time limit, with all known details.

        Args:
            limit: name of the option that sets the limit.
            limit_s: value of that option, in seconds.
        """
        return f"it ran longer than {limit}={limit_s:g}, so worker {self.pid} was killed; {self.report()}"
