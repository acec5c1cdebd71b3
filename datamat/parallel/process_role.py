"""Whether this process is the caller's or one of our workers, and whether a worker is importing the caller's code.

A new pool asks both. Inside a worker it runs its calls one after the other, since the cores are taken. Inside an
*import* that a worker does to rebuild a callable, it must not run at all: that module was being imported in the parent
when the parent's pool was made, and its top level must not run twice. `NestedRunError` names the module, and the parent
then sends its code by value.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from datamat.parallel.errors import ParallelError

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator

_is_worker = False
_is_retiring = False
_importer: types.FrameType | None = None  # the frame that is importing the caller's modules, if any


class NestedRunError(BaseException):
    """A module that a worker imports starts a pool at its top level; a user's `except Exception` does not catch it."""

    def __init__(self, module_name: str | None) -> None:
        super().__init__(module_name)
        self.module_name = module_name


def become_worker() -> None:
    """Declare this process a worker, for the rest of its life."""
    global _is_worker  # noqa: PLW0603 -- a process is one thing or the other
    _is_worker = True


def is_worker() -> bool:
    """Return True if this process is one of our workers."""
    return _is_worker


def retire() -> None:
    """End this worker after its current task; the pool starts another in its place.

    Call this in a task that finds its process unusable: a library leaks memory, or is stuck in a state that only a new
    process can fix. The result of the task is returned as usual. The end of the worker does not count as a death:
    nothing is repeated, counted as a retry or logged. Outside the workers of this library, this does nothing.

    Example:
        >>> from datamat.parallel import PathosExecutor, retire
        >>> def measure(x):
        ...     retire()
        ...     return 2 * x
        >>> with PathosExecutor(max_workers=2) as pool:
        ...     list(pool.map(measure, range(3)))
        [0, 2, 4]
    """
    global _is_retiring  # noqa: PLW0603 -- one worker per process
    _is_retiring = _is_worker


def is_retiring() -> bool:
    """Return True if this worker has been asked to end."""
    return _is_retiring


def refuse_in_fork(owner: int, what: str, remedy: str) -> None:
    """Refuse to continue in a fork of the process that began something: its threads do not run here, so it would hang.

    Raises:
        ParallelError: this is another process.
    """
    if os.getpid() != owner:
        raise ParallelError(
            f"{what} was begun in process {owner}; this process ({os.getpid()}) is a fork of it, without its threads: "
            f"{remedy} here"
        )


@contextmanager
def importing() -> Iterator[None]:
    """Mark the block as importing the caller's modules."""
    global _importer  # noqa: PLW0603 -- seen by pools that the imported modules make
    before, _importer = _importer, sys._getframe(2)  # past this generator and contextlib's __enter__
    try:
        yield
    finally:
        _importer = before


def refuse_while_importing() -> None:
    """Raise `NestedRunError` at the top level of a module that is imported inside `importing`."""
    if _importer is not None and (names := modules_being_run(until=_importer)):
        raise NestedRunError(names[0])


def modules_being_run(until: types.FrameType | None = None) -> list[str]:
    """Return the modules whose top level is running, innermost first, up to the frame `until`.

    Modules of this library are left out: they start no pool, but doctests run under their names.
    """
    own = __name__.partition(".")[0]
    names = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame is not until:
        if frame.f_code.co_name == "<module>":
            name = str(frame.f_globals.get("__name__"))
            if name.partition(".")[0] != own:
                names.append(name)
        frame = frame.f_back
    return names
