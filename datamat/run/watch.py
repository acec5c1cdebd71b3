"""Follow an output that another process is writing: status, rate and remaining time, repeatedly."""

from __future__ import annotations

import collections
import datetime
import time
from typing import TYPE_CHECKING

from datamat.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from datamat.run.status import Status

_WINDOW_S = 60.0  # long enough for some parts to end in it, short enough to show that a run has slowed down


def watch(
    look: Callable[[], Status],
    *,
    every_s: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[Status, str]]:
    """Yield the status of an output and a description of its pace, every few seconds, until no process is at work.

    Args:
        look: returns the status.
        every_s: interval in seconds.
        clock: returns a time in seconds.
        wait: waits for a number of seconds.

    Raises:
        OptionError: `every_s` is not positive.
    """
    if not every_s > 0:
        raise OptionError(f"interval is {every_s:g}; want a positive number of seconds")
    looks: collections.deque[tuple[float, Status]] = collections.deque()
    while True:
        status = look()
        looks.append((clock(), status))
        while len(looks) > 2 and looks[-1][0] - looks[1][0] >= _WINDOW_S:
            looks.popleft()
        yield status, _pace(looks)
        if not status.is_running:
            return
        wait(every_s)


def _pace(looks: Sequence[tuple[float, Status]]) -> str:
    (began, first), (ended, last) = looks[0], looks[-1]
    seconds, num_rows = ended - began, last.done.num_rows - first.done.num_rows
    if not last.is_running or seconds <= 0 or num_rows <= 0:
        return ""
    rate = num_rows / seconds
    shown = f"{rate:,.0f} rows/s" if rate >= 1 else f"{rate * 60:,.0f} rows/min"
    if last.num_rows is None:
        return shown
    left = datetime.timedelta(seconds=round((last.num_rows - last.done.num_rows) / rate))
    return f"{shown}, {left} left"
