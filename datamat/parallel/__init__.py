"""Map bound methods over items on all cores: no guard, no hangs, nothing lost.

    >>> from datamat.parallel import PathosExecutor
    >>> with PathosExecutor(max_workers=2) as pool:
    ...     list(pool.map(abs, [-1, 2, -3]))
    [1, 2, 3]

The names load when they are first used, so importing the package costs nothing. Inside it, a module imports only from
the lines above its own:

    errors
    affinity, channel, logs, process_role
    crash                 what is known of a worker that died
    processes             starting workers
    byvalue, arrays, shared, standins     objects that need special handling on the way to a worker
    pickling
    unforkable            inherited objects that a forked worker cannot use
    worker                the program of a worker
    tasks                 tasks, futures and chunk sizes
    workers               a worker, and all workers of a pool
    dispatcher            sends tasks to workers, collects their answers
    streams               `map`: draws items, yields results
    executor              `PathosExecutor`    <- start reading here
    pathos_pool           `PathosPool`
    engines               calls on Dask, Ray or any other executor
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamat.parallel.affinity import physical_cores
    from datamat.parallel.executor import PathosExecutor, PoolStats
    from datamat.parallel.logs import get_logger
    from datamat.parallel.pathos_pool import PathosPool
    from datamat.parallel.process_role import retire
    from datamat.parallel.standins import register_standin
    from datamat.parallel.tasks import compute_chunksize
    from datamat.parallel.workers import PoolProgress, WorkerStats

__all__ = [
    "PathosExecutor",
    "PathosPool",
    "PoolProgress",
    "PoolStats",
    "WorkerStats",
    "compute_chunksize",
    "get_logger",
    "physical_cores",
    "register_standin",
    "retire",
]

_HOMES = {
    "PathosExecutor": "executor",
    "PathosPool": "pathos_pool",
    "PoolProgress": "workers",
    "PoolStats": "executor",
    "WorkerStats": "workers",
    "compute_chunksize": "tasks",
    "get_logger": "logs",
    "physical_cores": "affinity",
    "register_standin": "standins",
    "retire": "process_role",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
