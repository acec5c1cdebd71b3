"""Every exception that datamat raises on purpose, as one tree.

A message gives the place, what was found, what was wanted and what to do about it. `want_of_resources` keeps errors of
the system that say nothing of a file from becoming errors that do.

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
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import BrokenExecutor

__all__ = [
    "RESOURCES",
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
    "SourceError",
    "TaskTimeout",
    "UnpicklableError",
    "WorkerDied",
    "want_of_resources",
]

RESOURCES = (errno.ENFILE, errno.EMFILE, errno.ENOMEM)
"""Codes of errors that say nothing of the file: descriptors or memory ran out. The longer text stands first."""


class DatamatError(Exception):
    """Base of every error that datamat raises on purpose."""


class OptionError(DatamatError, ValueError):
    """An argument, or a combination of arguments, makes no sense."""


class SourceError(DatamatError, ValueError):
    """The raw data cannot be indexed; the message names the line, row or file."""


class SchemaError(DatamatError, ValueError):
    """A sample or a declaration disagrees with `Features`."""


class InputError(DatamatError, ValueError):
    """An input file cannot be read, is over a limit, or does not decode."""


class SampleError(DatamatError, RuntimeError):
    """One sample failed in `read`, `augment` or encoding.

    Attributes:
        key: the key of the sample.
        reason: what went wrong, in one line.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"sample {self.key!r}: {self.reason}"


class FingerprintError(DatamatError, TypeError):
    """An object that decides the output cannot be fingerprinted; the message names it."""


class OutputError(DatamatError, OSError):
    """The output directory cannot be used."""


class OutputLockedError(OutputError):
    """Another run holds the output directory; the message names its process and host."""


class IncompleteRunError(DatamatError, RuntimeError):
    """A run ended without every sample accounted for; the message lists what is missing."""


class CorruptDataError(DatamatError, ValueError):
    """A finished file does not hold what its manifest, index or checksum says."""


class MissingDependencyError(DatamatError, ImportError):
    """An optional package is needed; the message names who needs it and how to install it."""


class ParallelError(DatamatError, RuntimeError):
    """Dispatch to worker processes failed."""


class UnpicklableError(ParallelError, TypeError):
    """Something cannot be sent to a worker; the message names the attribute path."""


class WorkerDied(ParallelError):  # noqa: N818 -- the name that DESIGN.md and users know
    """A worker process ended while it ran a task."""


class TaskTimeout(ParallelError):  # noqa: N818 -- reads as the event, like TimeoutExpired
    """A task ran longer than it may; the message carries its Python stack."""


class BrokenPoolError(ParallelError, BrokenExecutor):
    """Workers cannot be started, or die before they take any task; code for any executor catches `BrokenExecutor`."""


def want_of_resources(path: object, error: Exception) -> OutputError | None:
    """Return what to raise where descriptors or memory ran out: no damage, and nothing may be left out for it."""
    if not isinstance(error, OSError) or error.errno not in RESOURCES:
        return None
    return OutputError(f"{path}: {os.strerror(error.errno)}; close what is open, or raise the limit (ulimit -n)")
