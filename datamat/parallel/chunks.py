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
LONG_COST_S = 0.100  # the 0.3 ms in which a worker waits for its next task are not worth a task that waits behind this
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


def prefetch_depth(cost: float | None, num_waiting: float = math.inf) -> int:
    """Return how many tasks may be at a worker, the running one included.

    Args:
        cost: recent cost of one task in seconds; None where nothing is known yet.
        num_waiting: tasks that no worker has yet, for each worker.

    Returns:
        Enough for 10 ms of work. Of tasks between 10 and 100 ms two, the next one being there when the first ends, but
        only while two others wait: at the end of a run, each could have run elsewhere. Of longer ones 1.

    Example:
        >>> prefetch_depth(None), prefetch_depth(0.05), prefetch_depth(0.004), prefetch_depth(0.0)
        (1, 2, 3, 128)
        >>> prefetch_depth(0.05, num_waiting=1), prefetch_depth(0.5)
        (1, 1)
    """
    if cost is None or cost >= LONG_COST_S or (cost >= PREFETCH_COST_S and num_waiting < 2):
        return 1
    if cost >= PREFETCH_COST_S:
        return 2
    if cost * MAX_PREFETCH <= PREFETCH_COST_S:
        return MAX_PREFETCH
    return 1 + round(PREFETCH_COST_S / cost)


def _bounded(size: int) -> int:
    return max(1, min(size, MAX_CHUNKSIZE))
