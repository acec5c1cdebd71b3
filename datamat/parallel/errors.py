"""Errors of the parallel core, and the base of every error that datamat raises on purpose."""

from __future__ import annotations

import os
import sys
from concurrent.futures import BrokenExecutor
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import types


class DatamatError(Exception):
    """Base of every error that datamat raises on purpose.

    Attributes:
        names_its_item: the message says which item failed and why, so that a worker adds no note, and the traceback
            begins in the user's code.
    """

    names_its_item: ClassVar[bool] = False


class OptionError(DatamatError, ValueError):
    """An argument, or a combination of arguments, makes no sense.

    Change the call or the argument file that the message names.
    """


class MissingDependencyError(DatamatError, ImportError):
    """An optional package is missing; the message names what needs it and how to install it.

    Install it into this Python's environment, and restart Python.
    """


class ParallelError(DatamatError, RuntimeError):
    """Dispatch to worker processes failed.

    The message has the worker's error, which says what to change. A run keeps its finished work: run again.
    """


class UnpicklableError(ParallelError, PicklingError, TypeError):
    """Something cannot be sent to a worker; the message names the attribute path.

    It is also a `PicklingError` and a `TypeError`, the two errors that pickle raises. Create such an object in the
    worker (`setup_worker`, an initializer, the function itself) instead of sending it.
    """


class WorkerDied(ParallelError):  # noqa: N818 -- the name that DESIGN.md and users know
    """A worker process died while it ran a task.

    If signal 9 killed it, it most likely ran out of memory: use fewer workers or smaller samples. After a crash in
    native code, the message has the Python stack, which names the library. A run tells you which sample it was, and
    `errors="skip"` leaves it out.

    Attributes:
        task: the call that was running, such as `fit[17]`.
        exitcode: exit code of the process; negative for a signal.
        signal: number of the signal that killed it; None if it exited.
        peak_rss_bytes: highest resident memory seen, in bytes.
        stack: Python frames at the moment of a crash, else "".
        log_lines: last log messages of the worker.
        worker_exit: all of the above, with the text that describes them.
    """

    task: str
    exitcode: int | None
    signal: int | None
    peak_rss_bytes: int
    stack: str
    log_lines: tuple[str, ...]
    worker_exit: Any


class TaskTimeout(ParallelError):  # noqa: N818 -- reads as the event, like TimeoutExpired
    """A task exceeded its time limit; the message has its Python stack.

    Raise the limit (`sample_timeout_s`, `task_timeout_s`), or change the code where the stack ends.
    """


class BrokenPoolError(ParallelError, BrokenExecutor):
    """Workers cannot be started, or die before they take a task; also a `BrokenExecutor`, as in other executors.

    The message has the cause: most often an import that fails in a new process, or a system limit on processes, open
    files or memory.
    """


def count_of(number: int, noun: str) -> str:
    """Return a count for a message: "1 row", "2,000 rows"; the noun's plural must end in "s"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def require_posix(what: str) -> None:
    """Raise `MissingDependencyError` on a system without the file locks and processes that writing needs."""
    try:
        import fcntl
        import resource
    except ImportError as error:
        raise MissingDependencyError(
            f"{what} needs the module {error.name!r}, which Python has on Linux and macOS, and not on {sys.platform}: "
            "use WSL or another machine for it; datamat.load reads finished directories here"
        ) from error
    del fcntl, resource


_TOP = __name__.partition(".")[0]

OWN = os.path.dirname(str(sys.modules[_TOP].__file__)) + os.sep
"""Path prefix of this package's code: of the whole package, if the parallel core is part of a larger one."""


def fold(error: BaseException) -> None:
    """Remove datamat's frames from the traceback of an error and its causes, down to the user code that it called.

    An error that names its item is about the user's code, so that code is shown first. Any other error that arose in
    datamat itself keeps its frames, which a bug report needs.
    """
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:  # an error raised twice may be among its own causes
        seen.add(id(chain))
        trace = chain.__traceback__
        while trace is not None and is_own(trace.tb_frame):
            trace = trace.tb_next
        if trace is not None or isinstance(chain, DatamatError):
            chain.__traceback__ = trace
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)


def is_own(frame: types.FrameType) -> bool:
    """Return True if a frame runs code of datamat; methods that dataclasses generate are in no file."""
    is_ours = str(frame.f_globals.get("__name__")).startswith(f"{_TOP}.")
    return is_ours and frame.f_code.co_filename.startswith((OWN, "<string>"))
