"""Map bound methods over items on all cores: no guard, no hangs, nothing lost.

    >>> from datamat.parallel import PathosExecutor
    >>> with PathosExecutor(max_workers=2) as pool:
    ...     list(pool.map(abs, [-1, 2, -3]))
    [1, 2, 3]

The names load when they are first used, so importing the package costs nothing. Inside it, a module imports only from
the lines above its own:

    affinity, channel, logs, process_role
    crash                 what a worker leaves when it dies
    processes             starting workers
    byvalue, standins     what needs care on the way to a worker
    pickling
    worker                the program of a worker
    tasks                 and futures; how many calls make one
    workers               one, and all of a pool
    dispatcher            tasks to workers, answers back
    streams               `map`: items as they are drawn, results as they are taken
    executor              `PathosExecutor`    <- start reading here
    pathos_pool           `PathosPool`
    engines               executors of others, for those that take them in place of ours
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datamat import _lazy

if TYPE_CHECKING or not _lazy(__name__):
    from datamat.parallel.affinity import physical_cores as physical_cores
    from datamat.parallel.executor import PathosExecutor as PathosExecutor
    from datamat.parallel.executor import PoolStats as PoolStats
    from datamat.parallel.logs import get_logger as get_logger
    from datamat.parallel.pathos_pool import PathosPool as PathosPool
    from datamat.parallel.process_role import retire as retire
    from datamat.parallel.standins import register_standin as register_standin
    from datamat.parallel.tasks import compute_chunksize as compute_chunksize
    from datamat.parallel.workers import PoolProgress as PoolProgress
    from datamat.parallel.workers import WorkerStats as WorkerStats
