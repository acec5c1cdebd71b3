"""What stops a run before its end: time, disk, failed samples, and signals. The next run resumes from there."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import io
import math
import os
import re
import shutil
import signal
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from datamat.directory.files import is_stand_in
from datamat.errors import IncompleteRunError, OptionError

if TYPE_CHECKING:
    import pathlib
    import types
    from collections.abc import Iterable, Iterator, Sequence

    from datamat.directory.ledger import FailedRow
    from datamat.options import ErrorPolicy


__all__ = [
    "LONGEST_GRACE_S",
    "Deadline",
    "DiskLimit",
    "ErrorLimit",
    "free_bytes",
    "parse_bytes",
    "parse_duration",
    "raise_swallowed",
    "seconds_until",
    "signals_raised",
    "tree_bytes",
]

# ---------------------------------------------------------------- time, disk and failed samples
#
# What a run may use: time, disk, and samples that fail. Each limit stops it in a state from which the next continues.


_UNIT_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)\s*d(?:ays?)?)?\s*(?:(\d+(?:\.\d+)?)\s*h(?:(?:ou)?rs?)?)?\s*"
    r"(?:(\d+(?:\.\d+)?)\s*m(?:in(?:ute)?s?)?)?\s*(?:(\d+(?:\.\d+)?)\s*s(?:ec(?:ond)?s?)?)?\Z"
)
_BETWEEN = re.compile(r"\s*,\s*|\s+and\s+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\Z", re.IGNORECASE)
_MOST_NAMED = 10
_ALL_FAIL = 100  # rows: if none of so many, and of half of all, gave a record, the others will not either
_MOMENT_S = 0.5  # until a call of `come` is noticed
_WIND_DOWN_S = 0.5  # from the last receipt to the return of `run`
_BESIDE_A_PART = 2048  # bytes of its receipt and its lines in the ledger
LONGEST_GRACE_S = 4.0
"""Seconds that parts under way get to end when a run stops."""


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as "23h30m", "90m", "1d", "45s" or "2h 15m".

    Raises:
        OptionError: it is not one.

    Example:
        >>> parse_duration("1h30m")
        5400.0
    """
    found = _DURATION.match(_BETWEEN.sub(" ", text.strip().lower()))
    if not found or not any(found.groups()):
        raise OptionError(
            f"duration {text!r}: want days, hours, minutes and seconds, as in '23h30m', '1 day, 2 hours' or '45s'"
        )
    return sum(float(number) * unit for number, unit in zip(found.groups(), _UNIT_S.values(), strict=True) if number)


def seconds_until(deadline: str | float | datetime.timedelta | datetime.datetime) -> float:
    """Return how many seconds from now a deadline is.

    Args:
        deadline: duration as text, in seconds or as a `timedelta`; or a `datetime`, in local time if it has no time
            zone.

    Raises:
        OptionError: `deadline` is none of these, or has passed.
    """
    if isinstance(deadline, str):
        left = parse_duration(deadline)
    elif isinstance(deadline, datetime.timedelta):
        left = deadline.total_seconds()
    elif isinstance(deadline, datetime.datetime):
        left = deadline.timestamp() - time.time()
    elif isinstance(deadline, int | float) and not isinstance(deadline, bool):
        left = float(deadline)
    else:
        raise OptionError(f"deadline is {deadline!r}; want '23h30m', seconds, a timedelta or a datetime")
    if not 0 < left < math.inf:
        raise OptionError(f"deadline {deadline!r} is {left:g} s from now; want a moment that is still to come")
    return left


def parse_bytes(size: str | float) -> int:
    """Return the bytes of a size such as "20GB", "512MiB" or a number.

    Raises:
        OptionError: it is not one, or not positive.

    Example:
        >>> parse_bytes("1.5 GB"), parse_bytes("1KiB")
        (1500000000, 1024)
    """
    number: float = 0
    if isinstance(size, str) and (found := _SIZE.match(size.strip())):
        digits, letter, binary = found.groups()
        number = float(digits) * (1024 if binary else 1000) ** " kmgtp".index(letter.lower() or " ")
    elif isinstance(size, int | float) and not isinstance(size, bool):
        number = size
    if not 0 < number < math.inf:
        raise OptionError(f"size {size!r}: want a positive number of bytes, or text as in '20GB' or '512MiB'")
    return int(number)


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


class Deadline:
    """The time by which a run must have returned.

    Attributes:
        wait_s: how long to wait for something else before looking again, in seconds; None for as long as it takes.

    Args:
        left_s: seconds from now; None for no deadline.
        may_be_called: whether `come` may be called while the run waits for workers.
    """

    def __init__(self, left_s: float | None, *, may_be_called: bool = False) -> None:
        self.wait_s = _MOMENT_S if may_be_called else None
        self._is_called = False
        self._at = math.inf if left_s is None else time.monotonic() + left_s
        self._longest_part_s = 0.0

    def come(self) -> None:
        """Have it come now, for a signal handler: parts under way may still end."""
        self._is_called = True
        self._at = min(self._at, time.monotonic() + _WIND_DOWN_S + LONGEST_GRACE_S)

    def add(self, part_s: float) -> None:
        """Learn how long a part took, in seconds."""
        self._longest_part_s = max(self._longest_part_s, part_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until no more parts start, so that those under way can end; None where there is no deadline."""
        if self._is_called:
            return 0.0
        if self._at == math.inf:
            return None
        return max(0.0, self._at - time.monotonic() - _WIND_DOWN_S - min(self._longest_part_s, LONGEST_GRACE_S))

    @property
    def has_come(self) -> bool:
        """Whether no more parts may start."""
        return self.left_s == 0

    @property
    def grace_s(self) -> float:
        """Seconds that parts under way may still take."""
        return min(max(0.0, self._at - time.monotonic() - _WIND_DOWN_S), LONGEST_GRACE_S)


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
        """Return whether parts of these costs fit, with the largest twice: it is there twice while it is joined."""
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
        retry: call that tries failed rows again, for messages.
    """

    def __init__(self, policy: ErrorPolicy, num_rows: int, retry: str = "rerun_failed()") -> None:
        self._retry = retry
        self._limit = policy.limit(num_rows)
        self._num_rows = num_rows
        self._num_done = 0
        self._first: list[FailedRow] = []
        self.num_failed = 0

    def add(self, num_done: int, num_failed: int, failed: Sequence[FailedRow] = ()) -> None:
        """Count rows.

        Args:
            num_done: number of rows that did not fail: they gave records, or were left out on purpose.
            num_failed: number of rows that failed.
            failed: as many of the failed rows as are known.

        Raises:
            IncompleteRunError: too many have failed, or all; names the first of them.
        """
        self._num_done += num_done
        self.num_failed += num_failed
        self._first += failed[: _MOST_NAMED - len(self._first)]
        if self._limit is not None and self.num_failed > self._limit:
            raise self._error(f"more than the {self._limit} that max_errors allows", "raise max_errors")
        if not self._num_done and self.num_failed >= max(_ALL_FAIL, self._num_rows // 2):
            raise self._error("every one so far", "see what they have in common")

    def check_end(self) -> None:
        """Raise `IncompleteRunError` where not a single row gave a record."""
        if self.num_failed and not self._num_done:
            raise self._error("all of them", "see what they have in common")

    def _error(self, how_many: str, remedy: str) -> IncompleteRunError:
        listed = "".join(f"\n  {row}" for row in self._first)
        more = f"\n  and {self.num_failed - len(self._first)} more" if self.num_failed > len(self._first) else ""
        return IncompleteRunError(
            f"{self.num_failed} of {self._num_rows} rows failed, {how_many}; {remedy}, or fix them and call "
            f"{self._retry}, which tries them again. What is finished stays{listed}{more}"
        )


# ---------------------------------------------------------------- signals
#
# Ctrl-C and SIGTERM during a run: it ends as at an error, and its state stays resumable.
#
# The program then usually ends soon, too. At exit the interpreter would search all objects for garbage, repeatedly.
# With TensorFlow imported that takes a second of processor time, ten times as long as the end of a run, and several
# seconds on a busy machine. So after a signal these objects are left to the system, and only files are flushed.


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
