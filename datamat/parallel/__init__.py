"""Map bound methods over items on all cores: no guard, no hangs, nothing lost.

    >>> from datamat.parallel import PathosExecutor
    >>> with PathosExecutor(max_workers=2) as pool:
    ...     list(pool.map(abs, [-1, 2, -3]))
    [1, 2, 3]

The names load when they are first used, so importing the package costs nothing. Inside it, a module imports only from
the lines above its own:

    affinity, blackbox, channel, chunks, logs, namespaces, role, serial, shipment, slot, startmethod
    byvalue, contexts, standins
    pickling, servers
    payloads
    outcomes
    worker
    failures, tasks
    handle, inquest
    progress
    crew
    pool
    maps
    executor
    pathos_pool
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamat.parallel.affinity import physical_cores
    from datamat.parallel.chunks import compute_chunksize
    from datamat.parallel.executor import PathosExecutor, PoolStats
    from datamat.parallel.handle import WorkerStats
    from datamat.parallel.logs import get_logger
    from datamat.parallel.pathos_pool import PathosPool
    from datamat.parallel.progress import Progress
    from datamat.parallel.role import retire

__all__ = [
    "PathosExecutor",
    "PathosPool",
    "PoolStats",
    "Progress",
    "WorkerStats",
    "compute_chunksize",
    "get_logger",
    "physical_cores",
    "retire",
]

_HOMES = {
    "PathosExecutor": "executor",
    "PathosPool": "pathos_pool",
    "PoolStats": "executor",
    "Progress": "progress",
    "WorkerStats": "handle",
    "compute_chunksize": "chunks",
    "get_logger": "logs",
    "physical_cores": "affinity",
    "retire": "role",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
