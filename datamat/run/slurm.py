"""Run options from Slurm: the array task that this process is, and when its job ends."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from datamat.errors import OptionError
from datamat.options import Deadline, seconds_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ENDS_BEFORE_S = 60.0  # before the end set by Slurm, so that parts in progress and the program can finish


@contextlib.contextmanager
def as_slurm_says(options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Iterator[dict[str, Any]]:
    """Yield run options with the task and deadline set by Slurm; given options take precedence.

    In the block, SIGUSR1, which Slurm can send before a time limit, acts as the deadline. The number of a task is its
    array index, so a task that is resubmitted alone finds its own parts.

    Raises:
        OptionError: the array's variables are inconsistent, or the deadline is invalid.
    """
    found = dict(options)
    if {"task_index", "num_tasks"}.isdisjoint(found) and "SLURM_ARRAY_TASK_ID" in environ:
        found["task_index"], found["num_tasks"] = _task(environ)
    ends = [] if found.get("deadline") is None else [seconds_until(found["deadline"])]
    with contextlib.suppress(KeyError, ValueError):
        ends.append(max(float(environ["SLURM_JOB_END_TIME"]) - time.time() - _ENDS_BEFORE_S, 0.0))
    deadline = found["deadline"] = Deadline(min(ends, default=None), may_be_called=True)
    before = signal.signal(signal.SIGUSR1, lambda *_: deadline.come())
    try:
        yield found
    finally:
        signal.signal(signal.SIGUSR1, before)


def _task(environ: Mapping[str, str]) -> tuple[int, int]:
    said = {name: environ.get(f"SLURM_ARRAY_TASK_{name}", "0") for name in ("ID", "MAX")}
    try:
        number, last = map(int, said.values())
    except ValueError as error:
        raise OptionError(
            f"the variables SLURM_ARRAY_TASK_... say {said}; want numbers, or give --task-index and --num-tasks"
        ) from error
    return number, max(number, last) + 1
