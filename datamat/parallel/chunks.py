"""How many items travel together: pure functions, no clock, no processes.

Dispatching one item costs about 15 microseconds, so items of a millisecond or more travel alone: any chunk of two
would only make the tail of the run uneven. Cheaper items are grouped, by *estimated cost* and never by their count:
`ceil(items / workers)` finishes up to 2.4 times later than ideal when the expensive items come last.
"""

from __future__ import annotations

import math

from datamat.errors import OptionError

__all__ = ["CHUNK_COST_S", "compute_chunksize", "prefetch_depth"]

CHUNK_COST_S = 0.005  # a chunk of 5 ms hides 15 us of dispatch (0.3 %) and delays the end of a run by 5 ms at most
PREFETCH_COST_S = 0.010  # work that waits at a worker: more than one switch interval (5 ms) of the parent's threads
CHUNKS_PER_WORKER = 32  # with unknown costs: even if one chunk costs ten times the mean, the tail stays short
MAX_CHUNKSIZE = 4096
MAX_PREFETCH = 128


def compute_chunksize(num_items: int, num_workers: int, cost: float | None = None) -> int:
    """Return how many items to send to a worker in one message.

    Args:
        num_items: items that are still to be dispatched.
        num_workers: worker processes that share them.
        cost: mean cost of one item in seconds; None where nothing is known yet.

    Returns:
        At least 1. With a known cost, as many items as cost 5 ms together; never so many that a worker would get
        fewer than four chunks. Without, 1/32 of a worker's share.

    Raises:
        OptionError: `num_items` is negative, `num_workers` is below 1, or `cost` is negative or not a number.

    Example:
        >>> compute_chunksize(100_000, 4, cost=0.000_05)
        100
        >>> compute_chunksize(100_000, 4, cost=0.2)
        1
        >>> compute_chunksize(1_000, 4)
        8
    """
    if num_items < 0:
        raise OptionError(f"num_items is {num_items}; pass the number of items, 0 or more")
    if num_workers < 1:
        raise OptionError(f"num_workers is {num_workers}; pass the number of worker processes, 1 or more")
    if cost is not None and not cost >= 0:  # also refuses NaN
        raise OptionError(f"cost is {cost}; pass the mean seconds of one item, 0 or more, or None")
    if cost is None:
        return _bounded(math.ceil(num_items / (num_workers * CHUNKS_PER_WORKER)))
    fair = math.ceil(num_items / (num_workers * 4))
    if cost * MAX_CHUNKSIZE <= CHUNK_COST_S:
        return _bounded(fair)
    return _bounded(min(round(CHUNK_COST_S / cost), fair))


def prefetch_depth(cost: float | None) -> int:
    """Return how many tasks may be at a worker, the running one included.

    Args:
        cost: recent cost of one task in seconds; None where nothing is known yet.

    Returns:
        1 for tasks of 10 ms or more (a waiting task could have run elsewhere), else enough for 10 ms of work.

    Example:
        >>> prefetch_depth(None), prefetch_depth(0.05), prefetch_depth(0.004), prefetch_depth(0.0)
        (1, 1, 3, 128)
    """
    if cost is None or cost >= PREFETCH_COST_S:
        return 1
    if cost * MAX_PREFETCH <= PREFETCH_COST_S:
        return MAX_PREFETCH
    return 1 + round(PREFETCH_COST_S / cost)


def _bounded(size: int) -> int:
    return max(1, min(size, MAX_CHUNKSIZE))
