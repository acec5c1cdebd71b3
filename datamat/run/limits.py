"""Limits that stop a run early: time, disk, failed samples, and signals. The next run resumes from there."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import mmap
import os
import shutil
import signal
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from datamat.directory.files import is_stand_in
from datamat.errors import IncompleteRunError, count_of
from datamat.options import Remedies

if TYPE_CHECKING:
    import pathlib
    import types
    from collections.abc import Iterable, Iterator, Sequence

    from datamat.directory.ledger import FailedRow
    from datamat.options import ErrorPolicy

# ---------------------------------------------------------------- time, disk and failed samples
#
# Each limit stops a run in a state from which the next one continues.


_MOST_NAMED = 10
_ALL_FAIL = 100  # rows: if none of this many, and of half of all, gave a record, none will
_BESIDE_A_PART = 2048  # bytes of a part's receipt and its ledger lines


def tree_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the total size of the files below a folder, in bytes, except stand-ins and files that vanish meanwhile."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    total += tree_bytes(entry.path)
                else:
                    total += 0 if is_stand_in(entry) else entry.stat(follow_symlinks=False).st_size
    return total


def free_bytes(path: pathlib.Path) -> int:
    """Return the space available to this user, in bytes, on the disk of a path, which need not exist."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


class DiskLimit:
    """The limit on the size of the output folder.

    Args:
        folder: output folder; everything in it counts, including `.datamat`.
        most: limit in bytes; None for no limit.
        num_formats: number of formats of each record.
    """

    def __init__(self, folder: pathlib.Path, most: int | None, *, num_formats: int = 1) -> None:
        self._num_formats = num_formats
        self._folder = folder
        self._most = most
        self._used = 0 if most is None else tree_bytes(folder)
        self._bytes_per_cost: float | None = None  # learned from finished parts

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self._most is not None

    def add(self, cost: int, num_bytes: int) -> None:
        """Record the size of a finished part."""
        if self._most is not None:
            self._used = tree_bytes(self._folder)
            self._bytes_per_cost = max(self._bytes_per_cost or 0.0, num_bytes / cost)

    def measure(self) -> None:
        """Measure the folder again after files were removed."""
        if self._most is not None:
            self._used = tree_bytes(self._folder)

    def allows(self, costs: Iterable[int]) -> bool:
        """Return True if parts of these costs fit, counting the largest twice: it exists twice while it is joined."""
        if self._most is None:
            return True
        listed = list(costs)
        # Initially assume that files are stored unchanged: each output is as large as the input.
        ratio = float(self._num_formats) if self._bytes_per_cost is None else self._bytes_per_cost
        beside = (len(listed) + 1) * _BESIDE_A_PART
        return self._used + (sum(listed) + max(listed)) * ratio + beside <= self._most


class ErrorLimit:
    """The limit on failed rows.

    Args:
        policy: error policy with the limit.
        num_rows: number of rows of the run.
        remedies: suggestions for messages.
    """

    def __init__(self, policy: ErrorPolicy, num_rows: int, remedies: Remedies = Remedies()) -> None:  # noqa: B008 -- immutable
        self._remedies = remedies
        self._limit = policy.limit(num_rows)
        self._num_rows = num_rows
        self._num_done = 0
        self._first: list[FailedRow] = []
        self.num_failed = 0

    def add(self, counted: Any, failed: Sequence[FailedRow] = ()) -> None:
        """Count the rows of a part or of shards.

        Args:
            counted: object with `num_rows` and `num_failed`: `Counts`, a receipt, a file of a shard.
            failed: failed rows, as far as known.

        Raises:
            IncompleteRunError: too many rows have failed, or all; names the first ones.
        """
        self._num_done += counted.num_rows - counted.num_failed
        self.num_failed += counted.num_failed
        self._first += failed[: _MOST_NAMED - len(self._first)]
        if self._limit is not None and self.num_failed > self._limit:
            raise self._error(f"more than the {self._limit} that max_errors allows", "raise max_errors")
        if not self._num_done and self.num_failed >= max(_ALL_FAIL, self._num_rows // 2):
            raise self._error("every one so far", "see what they have in common")

    def remove(self, counted: Any) -> None:
        """Stop counting the rows of a part that is rebuilt."""
        self._num_done -= counted.num_rows - counted.num_failed
        self.num_failed -= counted.num_failed

    def check_end(self) -> None:
        """Raise `IncompleteRunError` if not a single row gave a record."""
        if self.num_failed and not self._num_done:
            raise self._error("all of them", "see what they have in common")

    def _error(self, how_many: str, remedy: str) -> IncompleteRunError:
        listed = "".join(f"\n  {row}" for row in self._first)
        num_more = self.num_failed - len(self._first)
        more = f"\n  and {num_more} more" if num_more else ""
        if not listed:  # all failed in earlier runs
            more = f"; {self._remedies.failures} lists them"
        return IncompleteRunError(
            f"{self.num_failed} of {count_of(self._num_rows, 'row')} failed, {how_many}; {remedy}, or fix them and use "
            f"{self._remedies.passing('retry_failed', True)}, which tries them again. What is finished "
            f"stays{listed}{more}"
        )


# ---------------------------------------------------------------- signals
#
# Ctrl-C and SIGTERM end a run like an error; it stays resumable.
#
# The program then usually ends soon, too. At exit the interpreter searches all objects for garbage, repeatedly. With
# TensorFlow imported that takes a second of CPU time, ten times as long as ending a run, and several seconds on a busy
# machine. So after a signal these objects are left to the system, and only files are flushed.


def interrupted(text: str) -> KeyboardInterrupt:
    """Return the `KeyboardInterrupt` of a run, with a text that says how to continue.

    It is not a subclass: only this exact class makes a program end as if by the signal.
    """
    error = KeyboardInterrupt(text)
    # IPython shows this instead of a traceback of two screens.
    error._render_traceback_ = functools.partial(list, [text])  # type: ignore[attr-defined]
    return error


_received: list[int] = []  # signals in the current block
_raised_in: set[int] = set()  # processes in which a signal was raised: this one and those it was forked from
_WRITERS = (io.BufferedRandom, io.BufferedWriter, io.TextIOWrapper)


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """In the block, make SIGINT raise `KeyboardInterrupt` and SIGTERM `SystemExit(143)`; then restore the handlers.

    Only the main thread receives signals: in other threads nothing changes. An ignored signal, such as SIGINT under
    nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    _received.clear()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and handler is not None:  # None: set by C code, and could not be restored
                before[number] = handler
                signal.signal(number, _raise)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()


def raise_swallowed() -> None:
    """Raise again what a signal raised in the block, in case it was swallowed; for the loops of the block.

    Python swallows exceptions in finalizers, in callbacks from C code and in functions that run at a fork.
    """
    if _received and threading.current_thread() is threading.main_thread():
        _raise(_received[-1], None)


def _raise(number: int, _frame: types.FrameType | None) -> NoReturn:
    _received.append(number)
    _raised_in.add(os.getpid())
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)  # the status that shells report for a process ended by a signal


def _leave_garbage() -> None:
    """If a signal has ended a run of this process, keep the interpreter from collecting garbage at exit."""
    if os.getpid() not in _raised_in:
        return
    for found in gc.get_objects():
        if type(found) in _WRITERS and not found.closed:
            with contextlib.suppress(OSError, ValueError):  # a pipe without a reader, a full disk
                found.flush()
    gc.freeze()


# At import, not at the signal: handlers registered later run earlier, and may use objects that are frozen here.
atexit.register(_leave_garbage)


# ---------------------------------------------------------------- memory of a worker


_LEAST_HEADROOM = 1 << 30  # bytes that one sample may always allocate, even if max_rss is smaller
_RESIDENT, _DATA = 1, 5  # positions in /proc/self/statm


def limit_memory(max_rss: int) -> None:
    """Make allocations far above the worker's limit fail, before the system has to kill a process.

    Only Linux has such a limit; elsewhere a worker is replaced after the part in which it exceeded its limit.
    """
    import resource

    data_bytes = _statm_bytes(_DATA)
    if data_bytes is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data_bytes + max(max_rss, _LEAST_HEADROOM)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def resident_bytes() -> int:
    """Return the resident memory of this process, in bytes."""
    found = _statm_bytes(_RESIDENT)
    if found is None:
        import psutil

        return int(psutil.Process().memory_info().rss)
    return found


def _statm_bytes(place: int) -> int | None:
    """Return an entry of proc_pid_statm(5) in bytes, which only Linux has.

    Each worker would have to import psutil, which has no data size.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[place]) * mmap.PAGESIZE
    except FileNotFoundError:
        return None
