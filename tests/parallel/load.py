"""Pools of every start method under mixed load, for as long as you like: every call is counted, every leak is seen.

    python tests/parallel/load.py [--seconds 3600] [--seed 1]

Each round, a few seconds long, has two halves. In the first, pools live for a moment: they come from every start method
and end by leaving the `with`, by `shutdown(wait=False)`, by `terminate` in the middle of their work, by an initializer
that raises, and by being dropped. In the second, four threads use three pools that live for the whole run: single
calls, maps of all kinds, iterators that are closed early, tasks that fail, results and items that cannot be pickled,
arrays of several megabytes both ways, workers that retire; and a fifth thread kills workers and servers all the while.

Every call has one known outcome, and one that is lost, doubled or wrong ends the program. Between rounds, when nothing
is under way, it counts what the process holds: descriptors, threads, children, memory, files in its temporary folder,
semaphores and segments in /dev/shm. The last line on stdout has the counts as JSON; the exit code is 1 if
any has grown.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress

import numpy as np
import psutil

from datamat.errors import BrokenPoolError, TaskTimeout, UnpicklableError, WorkerDied
from datamat.parallel import PathosExecutor, PathosPool, processes, retire

METHODS = ("fork", "forkserver", "spawn")
WORKERS = 3
PRELOADED = [("wave",), ("mailbox",), ("plistlib",), ("fractions", "cmd"), ()]  # each wants a server of its own
WARM_UP_ROUNDS = 2  # until every module is imported and every free list filled
MEMORY_PER_ROUND = 20_000  # bytes: allocators are not exact
MEMORY_AT_ALL = 48 << 20  # with MALLOC_ARENA_MAX=1; with an arena for each thread, an hour leaves 64 MB in pieces

log = logging.getLogger("load")


class Stubborn:
    """Cannot be pickled."""

    def __reduce__(self):
        raise TypeError("I stay")


class Work:
    """What the workers do; it holds what users' objects hold."""

    def __init__(self, megabytes: int = 0):
        self.lock = threading.RLock()
        self.logger = log
        self.table = np.arange(megabytes << 17, dtype=np.float64)

    def square(self, x):
        with self.lock:
            return x * x

    def pause(self, x, seconds):
        time.sleep(seconds)
        return x

    def fail(self, x):
        if x % 7 == 3:
            raise ValueError(x)
        return x

    def unpicklable(self, x):
        return Stubborn() if x % 11 == 5 else x

    def total(self, array):
        return float(array.sum()) + float(self.table.sum())

    def array(self, count):
        return np.full(count, count, np.int64)

    def say(self, x):
        self.logger.info("item %d", x)
        return x

    def leave(self, x):
        retire()
        return x

    def die(self, x):
        if x == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def broken_initializer(self):
        raise RuntimeError("this pool has no workers")


class Records(logging.Handler):
    """Counts the records of the workers."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def emit(self, record):
        self.num += 1


class Load:
    """The pools, and what has been counted."""

    def __init__(self, seed: int):
        self.seed = seed
        self.outcomes: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.records = Records()
        log.setLevel(logging.INFO)
        log.propagate = False
        log.addHandler(self.records)
        logging.getLogger("datamat.parallel").setLevel(logging.CRITICAL + 1)  # deaths are what it is about
        self.pools = {method: PathosExecutor(WORKERS, start_method=method, max_retries=1000) for method in METHODS}
        for pool in self.pools.values():  # a pool whose first three workers are killed as they start gives up
            pool.submit(int).result()

    def expect(self, what: str, found: object, wanted: object, count: int) -> None:
        """Count calls whose outcome is the right one."""
        if found != wanted:
            raise AssertionError(f"{what}: found {str(found)[:500]}, wanted {str(wanted)[:500]}")
        with self.lock:
            self.outcomes[what] += count

    def raises(
        self, what: str, kind: type[BaseException] | tuple[type[BaseException], ...], function, count: int = 1
    ) -> None:
        """Count a call that is to fail."""
        try:
            result = function()
        except kind:
            self.expect(what, True, True, count)
        else:
            raise AssertionError(f"{what}: {kind} expected, {result!r} found")

    # ------------------------------------------------------------ pools that live for the whole run

    def use(self, pool: PathosExecutor, rng: random.Random) -> None:
        """Do something with a pool some of whose workers are being killed."""
        work, count = Work(), rng.randrange(1, 200)
        kinds = (
            self._submit, self._map, self._generator, self._unordered, self._starmap, self._close,
            self._fail, self._unpicklable_result, self._unpicklable_item, self._arrays, self._retire,
        )  # fmt: skip
        rng.choice(kinds)(pool, work, count, rng)

    def _submit(self, pool, work, count, rng):
        futures = [pool.submit(work.pause, x, rng.choice([0, 0, 0.001, 0.01])) for x in range(count)]
        self.expect("submit", [future.result(timeout=300) for future in futures], list(range(count)), count)

    def _map(self, pool, work, count, rng):
        count *= rng.choice([1, 50])
        found = list(pool.map(work.square, range(count), chunksize=rng.choice([None, 1, 16])))
        self.expect("map", found, [x * x for x in range(count)], count)

    def _generator(self, pool, work, count, rng):
        found = list(pool.map(work.square, (x for x in range(count))))
        self.expect("generator", found, [x * x for x in range(count)], count)

    def _unordered(self, pool, work, count, rng):
        found = sorted(pool.map_unordered(work.square, range(count)))
        self.expect("map_unordered", found, [x * x for x in range(count)], count)

    def _starmap(self, pool, work, count, rng):
        found = list(pool.starmap(work.pause, [(x, 0.0005) for x in range(count)]))
        self.expect("starmap", found, list(range(count)), count)

    def _close(self, pool, work, count, rng):
        taken = rng.randrange(20)
        results = pool.map(work.square, itertools.count())
        self.expect("closed map", list(itertools.islice(results, taken)), [x * x for x in range(taken)], taken)
        results.close()

    def _fail(self, pool, work, count, rng):
        for x in range(20):
            future = pool.submit(work.fail, x)
            if x % 7 == 3:
                self.raises("failing task", ValueError, future.result)
            else:
                self.expect("beside a failing task", future.result(timeout=300), x, 1)
        self.raises("failing map", ValueError, lambda: list(pool.map(work.fail, range(20))))

    def _unpicklable_result(self, pool, work, count, rng):
        futures = [pool.submit(work.unpicklable, x) for x in range(12)]
        for x, future in enumerate(futures):
            if x % 11 == 5:
                self.raises("unpicklable result", Exception, future.result)
            else:
                self.expect("beside an unpicklable result", future.result(timeout=300), x, 1)

    def _unpicklable_item(self, pool, work, count, rng):
        results = pool.map(work.pause, [1, Stubborn(), 3], [0, 0, 0])
        self.expect("before an unpicklable item", next(results), 1, 1)
        self.raises("unpicklable item", (TypeError, UnpicklableError), lambda: next(results))

    def _arrays(self, pool, work, count, rng):
        work = Work(megabytes=rng.choice([0, 8]))
        size = rng.choice([10, 1_000, 500_000])
        expected = float(size) + float(work.table.sum())
        self.expect("array there", pool.submit(work.total, np.ones(size)).result(timeout=300), expected, 1)
        found = pool.submit(work.array, size).result(timeout=300)
        self.expect("array back", (found.shape, int(found[-1])), ((size,), size), 1)

    def _retire(self, pool, work, count, rng):
        self.expect("retire", sorted(pool.map(work.leave, range(4), chunksize=1)), list(range(4)), 4)

    # ------------------------------------------------------------ pools that live for a moment

    def short(self, method: str, rng: random.Random) -> None:
        """Make pools and end them in every way there is."""
        work = Work()
        with PathosExecutor(2, start_method=method) as pool:
            before = self.records.num
            found = list(pool.map(work.say, range(30)))
        self.expect("short pool", found, list(range(30)), 30)
        self.expect("log records", self.records.num - before, 30, 30)

        with PathosExecutor(2, start_method=method) as pool:
            pool.map(work.square, range(100))  # nobody takes the results
            future = pool.submit(work.array, 300_000)
        self.expect("after the with", len(future.result()), 300_000, 1)

        with PathosExecutor(2, start_method=method) as pool:  # no retries: the one that kills its worker fails alone
            futures = [pool.submit(work.die, x) for x in range(5)]
            for x, future in enumerate(futures):
                if x == 2:
                    self.raises("suicide", WorkerDied, future.result)
                else:
                    self.expect("beside a suicide", future.result(), x, 1)

        pool = PathosExecutor(2, start_method=method)
        futures = [pool.submit(work.pause, x, 0.01) for x in range(10)]
        pool.shutdown(wait=False)
        self.expect("shutdown without waiting", [future.result() for future in futures], list(range(10)), 10)

        pool = PathosExecutor(2, start_method=method, preload=rng.choice(PRELOADED))
        futures = [pool.submit(work.pause, x, 60) for x in range(6)]
        if rng.random() < 0.5:  # else before a worker, or a server, has begun
            time.sleep(rng.random() * 0.5)
        pool.terminate()
        self.expect("terminated", [f.cancelled() or isinstance(f.exception(), BrokenPoolError) for f in futures],
                    [True] * 6, 6)  # fmt: skip

        pool = PathosExecutor(1, start_method=method, initializer=work.broken_initializer)
        self.raises("broken initializer", BrokenPoolError, pool.submit(work.square, 1).result)
        pool.shutdown()

        with PathosExecutor(1, start_method=method, task_timeout_s=0.5) as pool:
            self.raises("timeout", TaskTimeout, pool.submit(work.pause, 1, 60).result)
            self.expect("after a timeout", pool.submit(abs, -1).result(), 1, 1)

        pool = PathosExecutor(1, start_method=method)
        self.expect("dropped pool", pool.submit(work.square, 3).result(), 9, 1)
        del pool

        pathos = PathosPool(2, id=f"{method}-{rng.random()}", start_method=method)
        self.expect("PathosPool", pathos.map(work.square, range(50)), [x * x for x in range(50)], 50)
        self.expect("PathosPool.amap", pathos.amap(abs, [-1, 2]).get(), [1, 2], 2)
        pathos.clear()

    # ------------------------------------------------------------ a round

    def round(self, number: int, seconds: float) -> None:
        """Do it all once."""
        rng = random.Random(f"{self.seed} {number}")
        for method in METHODS:
            self.short(method, rng)
        until, errors, stopped = time.monotonic() + seconds, [], threading.Event()

        def in_thread(lane):
            own = random.Random(f"{self.seed} {number} {lane}")
            try:
                while time.monotonic() < until and not errors:
                    self.use(self.pools[own.choice(METHODS)], own)
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=in_thread, args=(lane,), name=f"lane-{lane}") for lane in range(4)]
        reaper = threading.Thread(target=self._reap, args=(stopped, random.Random(f"{self.seed} {number} reaper")))
        for thread in (*threads, reaper):
            thread.start()
        for thread in threads:
            thread.join()
        stopped.set()
        reaper.join()
        if errors:
            raise errors[0]

    def _reap(self, stopped: threading.Event, rng: random.Random) -> None:
        while not stopped.wait(rng.random() * 0.8):
            servers = [server._process_id for server in processes._servers._running if server._process_id]
            if servers and rng.random() < 0.05:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(servers), signal.SIGKILL)
                    self.outcomes["kill of a server"] += 1
            pool = self.pools[rng.choice(METHODS)]
            alive = [worker.pid for worker in pool.stats().workers if worker.ended is None]
            if alive:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(alive), signal.SIGKILL)
                    self.outcomes["kill"] += 1

    # ------------------------------------------------------------ what is held

    def settle(self) -> None:
        """Have every pool that lives on at its full number of workers, and nothing else under way."""
        for pool in self.pools.values():
            while len(alive := [w for w in pool.stats().workers if w.ended is None]) < WORKERS:
                list(pool.map(time.sleep, [0.05] * WORKERS, chunksize=1))
            del alive
        gc.collect()
        deadline = time.monotonic() + 30
        wanted = len(self.pools)
        while time.monotonic() < deadline:  # of pools that nobody waited for
            names = [thread.name for thread in threading.enumerate()]
            if names.count("datamat-dispatcher") == wanted:
                return
            time.sleep(0.05)

    def held(self) -> dict[str, int]:
        """Count what this process holds."""
        self.settle()
        me = psutil.Process()
        children = me.children(recursive=True)
        memory = 0
        for child in children:
            with suppress(psutil.Error):
                memory += child.memory_info().rss
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "native_threads": me.num_threads(),
            "children": len(children),
            "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in children if child.is_running()),
            "temporary_files": num_temporary_files(),
            "shared_memory": len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0,
            "memory_of_the_driver": me.memory_info().rss,
            "memory_of_children": memory,
        }


def num_temporary_files() -> int:
    """Count what lies in the temporary folder, but for what dill tries on import: whether it can write there."""
    found = [os.path.join(place, name) for place, folders, names in os.walk(tempfile.gettempdir())
             for name in (*folders, *names)]  # fmt: skip
    probe = re.compile(r"[a-z0-9_]{8}")  # stays where a process is killed in the middle of that
    return sum(not (probe.fullmatch(os.path.basename(path)) and os.path.isfile(path)) for path in found)


def grown(first: dict[str, int], last: dict[str, int], rounds: int) -> dict[str, tuple[int, int]]:
    """Return what has grown between two rounds: its counts then and now."""
    # A server that has ended for want of work, or was started, is no leak: it has one process, one folder of two files;
    # and a worker that retires is still there when its successor is. This process has up to eight descriptors for each.
    # A leak would be one for each of the ninety short pools of a round, or for each call.
    room = {
        "descriptors": 20,
        "children": 2,
        "temporary_files": 6,
        "native_threads": 2,
        "memory_of_the_driver": MEMORY_AT_ALL + rounds * MEMORY_PER_ROUND,
        "memory_of_children": 12 * (MEMORY_AT_ALL + rounds * MEMORY_PER_ROUND),
        "shared_memory": sys.maxsize,  # others on this machine have theirs there, too
    }
    return {name: (first[name], last[name]) for name in last if last[name] > first[name] + room.get(name, 0)}


def main() -> int:
    """Load the pools; return 1 if something has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--round", type=float, default=8, help="seconds of the second half of each round")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        load, begin, first, number = Load(options.seed), time.monotonic(), None, 0
        while number <= WARM_UP_ROUNDS or time.monotonic() - begin < options.seconds:
            load.round(number, options.round)
            number += 1
            last = load.held()
            if number == WARM_UP_ROUNDS:
                first = last
        for pool in load.pools.values():
            pool.shutdown()
        assert first is not None
        difference = grown(first, last, number)
    calls = sum(load.outcomes.values())
    print(json.dumps({"rounds": number, "calls": calls, "grown": difference, "first": first, "last": last,
                      "outcomes": load.outcomes}))  # fmt: skip
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
