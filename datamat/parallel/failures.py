"""Errors of tasks as callers see them: with the worker's traceback, or with all that is known of its death."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datamat.errors import ParallelError, TaskTimeout, WorkerDied

if TYPE_CHECKING:
    from datamat.parallel.tasks import Task

__all__ = ["Autopsy", "RemoteTraceback", "death_error", "timeout_error", "with_remote_traceback"]


class RemoteTraceback(Exception):  # noqa: N818 -- shown as the cause of an error; the name says what it is
    """The traceback of an error in a worker, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tb = text  # the name that concurrent.futures gives it

    def __str__(self) -> str:
        return f'\n"""\n{self.tb}"""'


def with_remote_traceback(error: BaseException, text: str) -> BaseException:
    """Return a worker's error with its traceback, if it brought one, as the cause."""
    if text:
        error.__cause__ = RemoteTraceback(text)
    return error


@dataclass(frozen=True, slots=True)
class Autopsy:
    """What is known of a worker that ended.

    Attributes:
        pid: process id.
        exitcode: as in `multiprocessing`: negative for a signal; None where it could not be learnt.
        peak_rss_bytes: highest resident memory seen.
        last_begun: number of the task, or callable, that it had begun and was not done with, else 0.
        stack: Python frames that it left behind when it crashed or was told to, else "".
        log_lines: its last log messages.
    """

    pid: int
    exitcode: int | None
    peak_rss_bytes: int
    last_begun: int
    stack: str
    log_lines: tuple[str, ...]

    def had_begun(self, task: Task) -> bool:
        """Did the worker work on this task, or on its callable, when it died?"""
        return self.last_begun in (task.number, task.code.number)

    @property
    def signal(self) -> int | None:
        """The signal that ended it, None if it exited."""
        return -self.exitcode if self.exitcode is not None and self.exitcode < 0 else None

    def cause(self) -> str:
        """Return in words how it ended."""
        if self.signal is None:
            return f"exit code {self.exitcode}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = "real-time signal"
        hint = "; the kernel's out-of-memory killer sends it" if self.signal == signal.SIGKILL else ""
        return f"signal {self.signal} ({name}{hint})"

    def report(self) -> str:
        """Return peak memory, stack and last log lines as text."""
        text = f"peak memory {self.peak_rss_bytes / 2**20:.0f} MiB"
        if self.stack:
            text += f"\n{self.stack.rstrip()}"
        if self.log_lines:
            text += "\nlast log lines of the worker:\n" + "\n".join(f"  {line}" for line in self.log_lines)
        return text


def death_error(task: Task, autopsy: Autopsy) -> WorkerDied:
    """Return the error of a task whose worker died once too often."""
    attempts = "" if task.tries == 1 else f" ({task.tries} attempts)"
    if autopsy.had_begun(task):
        when = f"while it ran this task{attempts}"
    else:
        when = f"before it began this task, as {task.unbegun - 1} others did; the task may be too large to be received"
    error = WorkerDied(f"{task.label}: worker {autopsy.pid} ended {when}: {autopsy.cause()}; {autopsy.report()}")
    _attach(error, task, autopsy)
    return error


def timeout_error(task: Task, autopsy: Autopsy, timeout_s: float) -> TaskTimeout:
    """Return the error of a task that ran too long."""
    error = TaskTimeout(
        f"{task.label}: it ran longer than task_timeout_s={timeout_s:g}, so worker {autopsy.pid} was killed; "
        f"{autopsy.report()}"
    )
    _attach(error, task, autopsy)
    return error


def _attach(error: ParallelError, task: Task, autopsy: Autopsy) -> None:
    """Set what programs want to know as attributes, which also survive pickling."""
    vars(error).update(
        task=task.label,
        exitcode=autopsy.exitcode,
        signal=autopsy.signal,
        peak_rss_bytes=autopsy.peak_rss_bytes,
        stack=autopsy.stack,
        log_lines=autopsy.log_lines,
    )
