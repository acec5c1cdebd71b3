"""What dispatching a call costs, and how evenly a run ends: ours against six other ways.

    uv run --with loky --with mpire --with joblib python benchmarks/dispatch.py [--rounds 3] [--tasks 5000]
                                                                   [--cheap 200000] [--sleeps 300] [--ideal 2.0]

Calls of a trivial bound method, two workers, already running: microseconds of wall time and of processor time, the
parent's and the workers' together, per call. At chunk size 1, and in the chunks that suit such items: what the pool
chooses, or 1,000 where it chooses nothing.

Balance: sleeps with lognormal lengths on four workers, wall time over the ideal (their sum divided by the number of
workers). Longest first, in random order, and longest last: the order is what a pool cannot know. Ours finds its chunks
itself, the others are told to take one item at a time, which is the best that they can do here.

All are run in turn in each round, and the best round counts, so a busy moment of the machine hits all alike. A peer
that is not installed is left out.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from datamat.parallel import PathosExecutor

WORKERS, SLEEPERS = 2, 4
CHUNK = 1000  # for cheap items, where the pool leaves that to its user
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


# Each yields its way of one item at a time, and its way for cheap items.


@contextmanager
def ours(workers: int) -> Iterator[tuple[Map, Map]]:
    with PathosExecutor(workers) as pool:
        yield lambda f, xs: list(pool.map(f, xs, chunksize=1)), lambda f, xs: list(pool.map(f, xs))


@contextmanager
def multiprocessing_pool(workers: int) -> Iterator[tuple[Map, Map]]:
    import multiprocessing

    with multiprocessing.Pool(workers) as pool:
        yield lambda f, xs: pool.map(f, xs, chunksize=1), pool.map


@contextmanager
def pathos_pool(workers: int) -> Iterator[tuple[Map, Map]]:
    from pathos.multiprocessing import ProcessPool

    pool = ProcessPool(workers)
    yield lambda f, xs: pool.map(f, xs, chunksize=1), pool.map
    pool.close()
    pool.join()
    pool.clear()


@contextmanager
def concurrent_futures(workers: int) -> Iterator[tuple[Map, Map]]:
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(workers) as pool:
        yield lambda f, xs: list(pool.map(f, xs)), lambda f, xs: list(pool.map(f, xs, chunksize=CHUNK))


@contextmanager
def loky(workers: int) -> Iterator[tuple[Map, Map]]:
    from loky import ProcessPoolExecutor

    with ProcessPoolExecutor(workers) as pool:
        yield lambda f, xs: list(pool.map(f, xs)), lambda f, xs: list(pool.map(f, xs, chunksize=CHUNK))


@contextmanager
def mpire(workers: int) -> Iterator[tuple[Map, Map]]:
    from mpire import WorkerPool

    with WorkerPool(workers) as pool:
        yield lambda f, xs: pool.map(f, xs, chunk_size=1), pool.map


@contextmanager
def joblib(workers: int) -> Iterator[tuple[Map, Map]]:
    from joblib import Parallel, delayed

    with Parallel(workers, batch_size=1) as single, Parallel(workers) as automatic:
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


def orders(count: int, ideal: float) -> dict[str, list[float]]:
    """Seconds of sleep in three orders, `ideal` seconds for each of the workers."""
    rng = random.Random(3)
    drawn = [rng.lognormvariate(0, 1) for _ in range(count)]
    lengths = [length * ideal * SLEEPERS / sum(drawn) for length in drawn]
    return {"first": sorted(lengths, reverse=True), "random": lengths, "last": sorted(lengths)}


def processor_seconds() -> float:
    """Return what this process and its children have used so far; that of the children on Linux only."""
    seconds = time.process_time()
    for children in glob.glob("/proc/self/task/*/children"):
        with open(children) as file:
            pids = file.read().split()
        for schedstat in (path for pid in pids for path in glob.glob(f"/proc/{pid}/task/*/schedstat")):
            with suppress(OSError), open(schedstat) as file:  # a thread may have ended
                seconds += int(file.read().split()[0]) / 1e9
    return seconds


def cost_of_calls(run: Map, thing: Trivial, count: int) -> tuple[float, float]:
    """Return microseconds per call: wall time, and processor time."""
    items, expected = list(range(count)), list(range(1, count + 1))
    used = processor_seconds()
    begin = time.perf_counter()
    results = run(thing.add, items)
    wall = time.perf_counter() - begin
    used = processor_seconds() - used
    assert results == expected
    return wall / count * 1e6, used / count * 1e6


def measure(runner, options: argparse.Namespace) -> list[float]:
    """Return the figures of one pool, in the order of the columns."""
    thing = Trivial()
    with runner(WORKERS) as (single, cheap):
        single(thing.add, list(range(100)))
        figures = [*cost_of_calls(single, thing, options.tasks), *cost_of_calls(cheap, thing, options.cheap)]
    with runner(SLEEPERS) as (single, own):
        single(thing.add, list(range(100)))
        for lengths in orders(options.sleeps, options.ideal).values():
            begin = time.perf_counter()
            (own if runner is ours else single)(thing.sleep, lengths)
            figures.append((time.perf_counter() - begin) / options.ideal)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=5000, help="calls at chunk size 1")
    parser.add_argument("--cheap", type=int, default=200_000, help="calls in chunks")
    parser.add_argument("--sleeps", type=int, default=300)
    parser.add_argument("--ideal", type=float, default=2.0, help="seconds of sleep for each worker")
    parser.add_argument("--only", help="names of pools, with commas between them", default=",".join(RUNNERS))
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {options.rounds} rounds", flush=True)
    present = {
        name: RUNNERS[name] for name in options.only.split(",") if importlib.util.find_spec(NEEDS.get(name, "sys"))
    }
    found: dict[str, list[list[float]]] = {name: [] for name in present}
    for _ in range(options.rounds):
        for name, runner in present.items():
            found[name].append(measure(runner, options))
    print(f"{'':22}  chunk 1: us  processor   in chunks: us  processor   longest: first  random   last")
    for name, rounds in found.items():
        best = [min(figures) for figures in zip(*rounds, strict=True)]
        print("{:22} {:12.1f} {:10.1f} {:15.2f} {:10.2f} {:16.2f} {:7.2f} {:6.2f}".format(name, *best))


if __name__ == "__main__":
    main()
