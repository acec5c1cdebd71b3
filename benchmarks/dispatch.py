"""What dispatching a call costs, and how evenly a run ends: ours against six other ways.

    uv run --with loky --with mpire --with joblib python benchmarks/dispatch.py [--rounds 3] [--tasks 5000]

Overhead: microseconds of wall time per call of a trivial bound method at chunk size 1, two workers, workers already
running. Balance: wall time of sleeps with lognormal lengths, the longest last, over the ideal (their sum divided by the
number of workers, or the longest if that is more). All are run in turn in each round, and the best round counts, so a
busy moment of the machine hits all alike. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from datamat.parallel import PathosExecutor

WORKERS = 2
Map = Callable[[Callable, list], list]


class Trivial:
    """The bound method whose dispatch is measured."""

    def __init__(self):
        self.offset = 1

    def add(self, x):
        return x + self.offset

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds


@contextmanager
def ours() -> Iterator[tuple[Map, Map]]:
    with PathosExecutor(WORKERS) as pool:
        yield lambda f, xs: list(pool.map(f, xs, chunksize=1)), lambda f, xs: list(pool.map(f, xs))


@contextmanager
def multiprocessing_pool() -> Iterator[tuple[Map, Map]]:
    import multiprocessing

    with multiprocessing.Pool(WORKERS) as pool:
        yield lambda f, xs: pool.map(f, xs, chunksize=1), pool.map


@contextmanager
def pathos_pool() -> Iterator[tuple[Map, Map]]:
    from pathos.multiprocessing import ProcessPool

    pool = ProcessPool(WORKERS)
    yield lambda f, xs: pool.map(f, xs, chunksize=1), pool.map
    pool.close()
    pool.join()
    pool.clear()


@contextmanager
def concurrent_futures() -> Iterator[tuple[Map, Map]]:
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(WORKERS) as pool:
        yield (lambda f, xs: list(pool.map(f, xs)),) * 2


@contextmanager
def loky() -> Iterator[tuple[Map, Map]]:
    from loky import ProcessPoolExecutor

    with ProcessPoolExecutor(WORKERS) as pool:
        yield (lambda f, xs: list(pool.map(f, xs)),) * 2


@contextmanager
def mpire() -> Iterator[tuple[Map, Map]]:
    from mpire import WorkerPool

    with WorkerPool(WORKERS) as pool:
        yield lambda f, xs: pool.map(f, xs, chunk_size=1), pool.map


@contextmanager
def joblib() -> Iterator[tuple[Map, Map]]:
    from joblib import Parallel, delayed

    with Parallel(WORKERS, batch_size=1) as single, Parallel(WORKERS) as automatic:
        yield lambda f, xs: single(delayed(f)(x) for x in xs), lambda f, xs: automatic(delayed(f)(x) for x in xs)


RUNNERS = {
    "datamat": ours,
    "multiprocessing.Pool": multiprocessing_pool,
    "pathos ProcessPool": pathos_pool,
    "concurrent.futures": concurrent_futures,
    "loky": loky,
    "mpire": mpire,
    "joblib": joblib,
}
NEEDS = {"loky": "loky", "mpire": "mpire", "joblib": "joblib"}


def lognormal_lengths(count: int) -> list[float]:
    """Seconds of sleep, 4 s of work in all, the longest last."""
    rng = random.Random(3)
    lengths = sorted(rng.lognormvariate(0, 1) for _ in range(count))
    return [length * 4.0 / sum(lengths) for length in lengths]


def measure(runner, num_tasks: int) -> tuple[float, float]:
    """Return microseconds per call, and wall time over ideal."""
    thing = Trivial()
    lengths = lognormal_lengths(400)
    ideal = max(sum(lengths) / WORKERS, *lengths)
    with runner() as (single, automatic):
        single(thing.add, list(range(100)))
        begin = time.perf_counter()
        assert single(thing.add, list(range(num_tasks))) == list(range(1, num_tasks + 1))
        overhead = (time.perf_counter() - begin) / num_tasks * 1e6
        begin = time.perf_counter()
        automatic(thing.sleep, lengths)
        balance = (time.perf_counter() - begin) / ideal
    return overhead, balance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=5000)
    options = parser.parse_args()
    present = {name: run for name, run in RUNNERS.items() if importlib.util.find_spec(NEEDS.get(name, "sys"))}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in present}
    for _ in range(options.rounds):
        for name, runner in present.items():
            found[name].append(measure(runner, options.tasks))
    print(f"{'':22} us per call   longest last, over ideal")
    for name, results in found.items():
        print(f"{name:22} {min(r[0] for r in results):11.1f} {min(r[1] for r in results):15.2f}")


if __name__ == "__main__":
    main()
