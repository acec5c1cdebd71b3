"""Defines every exception that datamat raises on purpose, as one tree.

`described` and `place_of` say where in the user's code an error arose, and `fold` reduces its traceback to that code;
`want_of_resources` keeps system errors that do not concern a file from blaming it; `require_posix`, `require_package`
and `READ_FLAGS` deal with features that a system lacks. Each message gives the place, what was found, what was wanted
and what to do about it.

    DatamatError
    ├── OptionError                 an argument or a combination of arguments makes no sense
    ├── SourceError                 the raw data cannot be indexed: names the line, row or file
    ├── SchemaError                 a sample, or a declaration, disagrees with `Features`
    ├── InputError                  an input file cannot be read, is too large, or does not decode
    ├── SampleError                 one sample failed in `read`, `augment` or encoding: names its key
    ├── FingerprintError            an object that decides the output cannot be fingerprinted
    ├── OutputError                 the output directory cannot be used
    │   └── OutputLockedError       another run holds it: names process and host
    ├── IncompleteRunError          a run ended without every sample accounted for
    ├── CorruptDataError            a finished file does not hold what its manifest says
    ├── MissingDependencyError      an optional package is needed: names the `pip install` line
    └── ParallelError               dispatch to worker processes failed
        ├── UnpicklableError        something cannot be sent to a worker: names the attribute
        ├── WorkerDied              a worker ended under a task: names task, signal and exit code
        ├── TaskTimeout             a task ran over its time: carries its Python stack
        └── BrokenPoolError         workers cannot be started, or die before any task

    Skip                            not an error: leaves a sample out; plug-ins raise or return it
"""

from __future__ import annotations

import errno
import functools
import operator
import os
import sysconfig
import traceback
from typing import TYPE_CHECKING

from datamat.parallel.errors import (
    OWN,
    BrokenPoolError,
    DatamatError,
    MissingDependencyError,
    OptionError,
    ParallelError,
    TaskTimeout,
    UnpicklableError,
    WorkerDied,
    is_own,
)
from datamat.parallel.errors import count_of as count_of
from datamat.parallel.errors import fold as fold
from datamat.parallel.errors import require_posix as require_posix

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = [
    "BrokenPoolError",
    "CorruptDataError",
    "DatamatError",
    "FingerprintError",
    "IncompleteRunError",
    "InputError",
    "MissingDependencyError",
    "OptionError",
    "OutputError",
    "OutputLockedError",
    "ParallelError",
    "SampleError",
    "SchemaError",
    "Skip",
    "SourceError",
    "TaskTimeout",
    "UnpicklableError",
    "WorkerDied",
]


def __dir__() -> list[str]:
    return __all__


RESOURCES = (errno.ENFILE, errno.EMFILE, errno.ENOMEM)
"""Codes of errors that do not concern the file: descriptors or memory ran out. ENFILE's text contains EMFILE's."""


_IF_THERE = ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")  # Windows only has the last
READ_FLAGS = functools.reduce(operator.or_, (getattr(os, name, 0) for name in _IF_THERE), os.O_RDONLY)
"""Flags to open any path for reading: a FIFO without a writer does not block, and no terminal takes control."""


class SourceError(DatamatError, ValueError):
    """The raw data cannot be indexed; the message names the line, row or file.

    Correct the source there, or the `index` of the writer.
    """


class SchemaError(DatamatError, ValueError):
    """A sample or a declaration disagrees with `Features`.

    Change what `read`, the function or the transform returns, or the declaration.
    """


class InputError(DatamatError, ValueError):
    """An input file cannot be read, is over a limit, or does not decode.

    Replace the file, or take it out of the source; `errors="skip"` leaves such samples out and lists them.
    """


class SampleError(DatamatError, RuntimeError):
    """One sample failed in `read`, `augment` or encoding.

    `Materializer.replay(key)` makes that sample again in this process, where a debugger can follow it;
    `errors="skip"` leaves such samples out and lists them.

    Attributes:
        key: key of the sample.
        reason: the failure, in one line.
    """

    names_its_item = True

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"sample {self.key!r}: {self.reason}"


class FingerprintError(DatamatError, TypeError):
    """An object that decides the output cannot be fingerprinted; the message names it.

    Remove it from the writer and the transform, or pass `version="1"` to stand for their code and state; change the
    version whenever you change them.
    """


class OutputError(DatamatError, OSError):
    """The output directory cannot be used.

    Remove the cause and run again: finished work is kept.
    """


class OutputLockedError(OutputError):
    """Another run holds the output directory; the message names its process and host.

    Wait for that run, end it, or use another output.
    """


class IncompleteRunError(DatamatError, RuntimeError):
    """A run ended without every sample accounted for; the message lists what is missing.

    Finished work is kept: remove the cause and run again.
    """


class CorruptDataError(DatamatError, ValueError):
    """A finished file contradicts its manifest, index or checksum.

    `datamat verify DIR` names each damaged file and record. `datamat repair JOB`, or another run of the job,
    rebuilds those shards from the source; without the source, copy the files again from an intact copy.
    """


class Skip(Exception):  # noqa: N818 -- it is not an error
    """Leaves a sample out on purpose: raise or return it in `read`, the function of `materialize` or a transform.

    In `read` and the function, it leaves out the sample with all its copies; in `augment` and the transform, the copy
    being made. `return None` does the same. The sample goes into the ledger with the reason, and is counted
    (`RunReport.num_dropped`). It is not a failure: error policy, `max_errors` and `retries` do not apply to it.

    Args:
        reason: why the sample is left out, for the ledger.

    Attributes:
        reason: the same.

    Example:
        >>> def make(path):
        ...     image = cv2.imread(path)
        ...     if image.mean() < 8:
        ...         raise datamat.Skip("too dark")
        ...     return {"image": image}
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = str(reason) or "no reason given"


def kind_of(value: object) -> str:
    """Return the kind of a value for a message: "an int", "a dict"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def want_of_resources(path: object, error: Exception) -> OutputError | None:
    """Return the error to raise if descriptors or memory ran out, which is never damage; otherwise None.

    Args:
        path: file that was opened or read, for the message.
        error: error that the system raised.
    """
    if not isinstance(error, OSError) or error.errno not in RESOURCES:
        return None
    return OutputError(f"{path}: {os.strerror(error.errno)}; close what is open, or raise the limit (ulimit -n)")


def require_package(name: str, what: str) -> None:
    """Raise `MissingDependencyError` if a package that datamat depends on is not installed, without importing it.

    Args:
        name: name of the package and of its module.
        what: what needs it, for the message.
    """
    import importlib.util

    if importlib.util.find_spec(name) is None:
        raise MissingDependencyError(f"{what} needs the package {name}; install it with: pip install {name}")


def described(error: BaseException) -> str:
    """Return type and message of an error in one line, and where in the user's own code it arose, if it did.

    Example:
        >>> described(ValueError("no such sample"))
        'ValueError: no such sample'
    """
    text = f"{type(error).__name__}: {error}"
    return text if isinstance(error, DatamatError) else text + place_of(error)


def place_of(error: BaseException) -> str:
    """Return where in the user's own code an error arose, as " (in read, jobs.py:12)"; "" if it did not."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not code.co_filename.startswith(_not_of_users()) and not is_own(frame):
            place = f" (in {code.co_name}, {os.path.basename(code.co_filename)}:{line})"
    return place


@functools.cache
def _not_of_users() -> tuple[str, ...]:
    """Return the beginnings of the paths of datamat's own code, of installed packages and of Python."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return OWN, "<frozen ", *(folder + os.sep for folder in sorted(folders) if folder)


_MOST_NAMED = 10


def join_problems(problems: Sequence[str]) -> str:
    """Return the first ten problems as one phrase for a message, with the number of further ones.

    Args:
        problems: one phrase each, without a final stop.
    """
    shown = "; ".join(problems[:_MOST_NAMED])
    more = len(problems) - _MOST_NAMED
    return f"{shown}; and {more} more" if more > 0 else shown
