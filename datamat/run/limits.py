"""What stops a run before its end: time, disk, failed samples, and signals. The next run resumes from there."""

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


__all__ = [
    "DiskLimit",
    "ErrorLimit",
    "free_bytes",
    "interrupted",
    "limit_memory",
    "raise_swallowed",
    "resident_bytes",
    "signals_raised",
    "tree_bytes",
]

# ---------------------------------------------------------------- time, disk and failed samples
#
# What a run may use: time, disk, and samples that fail. Each limit stops it in a state from which the next continues.


_MOST_NAMED = 10
_ALL_FAIL = 100  # rows: if none of so many, and of half of all, gave a record, the others will not either
_BESIDE_A_PART = 2048  # bytes of its receipt and its lines in the ledger


def tree_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the size of all files below a folder, in bytes, without those that vanish meanwhile or are in a store."""
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
    """Return the free space, for this user, on the disk that a path is or would be on, in bytes."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


class DiskLimit:
    """How much the output folder may hold.

    Args:
        folder: output folder, of which everything counts, `.datamat` too.
        most: limit in bytes; None for no limit.
        num_formats: number of formats that every record is written in.
    """

    def __init__(self, folder: pathlib.Path, most: int | None, *, num_formats: int = 1) -> None:
        self._num_formats = num_formats
        self._folder = folder
        self._most = most
        self._used = 0 if most is None else tree_bytes(folder)
        self._bytes_per_cost: float | None = None  # of a part; learned from finished ones

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self._most is not None

    def add(self, cost: int, num_bytes: int) -> None:
        """Learn how large a part turned out."""
        if self._most is not None:
            self._used = tree_bytes(self._folder)
            self._bytes_per_cost = max(self._bytes_per_cost or 0.0, num_bytes / cost)

    def measure(self) -> None:
        """Note that room has become free."""
        if self._most is not None:
            self._used = tree_bytes(self._folder)

    def allows(self, costs: Iterable[int]) -> bool:
        """Return True if parts of these costs fit, with the largest twice: it is there twice while it is joined."""
        if self._most is None:
            return True
        listed = list(costs)
        # At first, assume files that are stored as they are: each output as large as the input.
        ratio = float(self._num_formats) if self._bytes_per_cost is None else self._bytes_per_cost
        beside = (len(listed) + 1) * _BESIDE_A_PART
        return self._used + (sum(listed) + max(listed)) * ratio + beside <= self._most


class ErrorLimit:
    """How many rows may fail.

    Args:
        policy: error policy, which sets the limit.
        num_rows: number of rows of the run.
        remedies: what the user may do about it, for messages.
    """

    def __init__(self, policy: ErrorPolicy, num_rows: int, remedies: Remedies = Remedies()) -> None:  # noqa: B008 -- a frozen value
        self._remedies = remedies
        self._limit = policy.limit(num_rows)
        self._num_rows = num_rows
        self._num_done = 0
        self._first: list[FailedRow] = []
        self.num_failed = 0

    def add(self, counted: Any, failed: Sequence[FailedRow] = ()) -> None:
        """Count the rows of a part or of shards.

        Args:
            counted: what has `num_rows` and `num_failed`: `Counts`, a receipt, a file of a shard.
            failed: as many of the failed rows as are known.

        Raises:
            IncompleteRunError: too many have failed, or all; names the first of them.
        """
        self._num_done += counted.num_rows - counted.num_failed
        self.num_failed += counted.num_failed
        self._first += failed[: _MOST_NAMED - len(self._first)]
        if self._limit is not None and self.num_failed > self._limit:
            raise self._error(f"more than the {self._limit} that max_errors allows", "raise max_errors")
        if not self._num_done and self.num_failed >= max(_ALL_FAIL, self._num_rows // 2):
            raise self._error("every one so far", "see what they have in common")

    def remove(self, counted: Any) -> None:
        """Count no longer the rows of a part that is made again."""
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
# Ctrl-C and SIGTERM during a run: it ends as at an error, and its state stays resumable.
#
# The program then usually ends soon, too. At exit the interpreter would search all objects for garbage, repeatedly.
# With TensorFlow imported that takes a second of processor time, ten times as long as the end of a run, and several
# seconds on a busy machine. So after a signal these objects are left to the system, and only files are flushed.


def interrupted(text: str) -> KeyboardInterrupt:
    """Return what Ctrl-C, or the stop button of a notebook, makes of a run: a text that says how to go on.

    It is of no class of its own: a program that ends by one ends as by the signal only if it is this very one.
    """
    error = KeyboardInterrupt(text)
    # IPython shows this; where the run was is nobody's concern, and would fill two screens.
    error._render_traceback_ = functools.partial(list, [text])  # type: ignore[attr-defined]
    return error


_received: list[int] = []  # signals in the current block
_raised_in: set[int] = set()  # processes in which a signal was raised: this one, and those that it was forked from
_WRITERS = (io.BufferedRandom, io.BufferedWriter, io.TextIOWrapper)


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Make SIGINT raise `KeyboardInterrupt`, and SIGTERM `SystemExit(143)`, in the block; restore the handlers then.

    Only the main thread receives signals: in other threads nothing changes. A signal that is ignored, as SIGINT is
    under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    _received.clear()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and handler is not None:  # None: set by C code; we could not restore it
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
    raise SystemExit(128 + number)  # the status that shells give a process that a signal ended


def _leave_garbage() -> None:
    """Keep the interpreter from searching for garbage at exit, if a signal has ended a run of this process."""
    if os.getpid() not in _raised_in:
        return
    for found in gc.get_objects():
        if type(found) in _WRITERS and not found.closed:
            with contextlib.suppress(OSError, ValueError):  # a pipe without a reader, a full disk
                found.flush()
    gc.freeze()


# At import, not at the signal: what is registered later runs earlier, and may use objects that are frozen here.
atexit.register(_leave_garbage)


# ---------------------------------------------------------------- memory of a worker


_LEAST_HEADROOM = 1 << 30  # bytes that one sample may always allocate, however small max_rss is
_RESIDENT, _DATA = 1, 5  # places in /proc/self/statm


def limit_memory(max_rss: int) -> None:
    """Let an allocation far above the worker's limit fail, before the system has to end some process.

    Only Linux has such a limit; elsewhere a worker is replaced after the part in which it exceeded its own.
    """
    import resource

    data_bytes = _statm_bytes(_DATA)
    if data_bytes is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data_bytes + max(max_rss, _LEAST_HEADROOM)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def resident_bytes() -> int:
    """Return how much memory this process holds."""
    found = _statm_bytes(_RESIDENT)
    if found is None:
        import psutil

        return int(psutil.Process().memory_info().rss)
    return found


def _statm_bytes(place: int) -> int | None:
    """Return an entry of proc_pid_statm(5) in bytes, which only Linux has.

    psutil would cost each worker its import, and has no data size.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[place]) * mmap.PAGESIZE
    except FileNotFoundError:
        return None
