"""Train one small model per target on all cores, from inside a class, without a guard.

    python examples/many_models.py [--targets 1000] [--rounds 1]

`Analyzer.train` maps the bound method `self.algorithm.fit` over thousands of targets. The data that `self` holds travel
once per worker, not once per target; its logger and its lock are live in the workers. Nothing here is written for
multiprocessing except the line that makes the pool.
At the end a table compares one process with 2 to n.
"""

from __future__ import annotations

import argparse
import logging
import random
import threading
import time

from datamat.parallel import PathosExecutor, get_logger, physical_cores

logging.basicConfig(level=logging.WARNING, format="%(processName)s %(name)s: %(message)s")
logger = get_logger("example.training")


class RidgeRegression:
    """A model that is slow enough to be worth a process: gradient descent in plain Python."""

    def __init__(self, frames: dict[str, list[tuple[float, float]]], logger: logging.Logger, steps: int = 1200):
        self.frames = frames
        self.logger = logger
        self.lock = threading.RLock()  # as real models have them
        self.steps = steps

    def fit(self, target: str) -> tuple[float, float]:
        """Return slope and intercept for one target."""
        frame = self.frames[target]
        slope = intercept = 0.0
        for _ in range(self.steps):
            errors = [(slope * x + intercept - y, x) for x, y in frame]
            slope -= 0.1 * (sum(error * x for error, x in errors) / len(frame) + 1e-3 * slope)
            intercept -= 0.1 * sum(error for error, _ in errors) / len(frame)
        with self.lock:
            self.logger.info("fitted %s", target)
        return slope, intercept


class Analyzer:
    """Owns the algorithm and decides where it runs."""

    def __init__(self, algorithm: RidgeRegression, logger: logging.Logger):
        self.algorithm = algorithm
        self.logger = logger

    def train(self, targets: list[str], num_processes: int | None = None) -> dict[str, tuple[float, float]]:
        """Return the fitted parameters of each target."""
        cores = len(physical_cores()) if num_processes is None else num_processes
        if cores == 1:
            self.logger.info("one core: training in this process")
            return {target: self.algorithm.fit(target) for target in targets}
        with PathosExecutor(cores) as pool:
            return dict(zip(targets, pool.map(self.algorithm.fit, targets), strict=True))


def make_frames(num_targets: int) -> dict[str, list[tuple[float, float]]]:
    """Return noisy lines, one for each target."""
    rng = random.Random(0)
    points = [i / 100 for i in range(100)]
    return {f"target-{n:04}": [(x, n * x + 1 + rng.gauss(0, 0.1)) for x in points] for n in range(num_targets)}


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--targets", type=int, default=1000)
parser.add_argument("--rounds", type=int, default=1)
arguments = parser.parse_args()

frames = make_frames(arguments.targets)
analyzer = Analyzer(RidgeRegression(frames, logger), logger)
counts = range(1, max(2, len(physical_cores())) + 1)
times = {count: [] for count in counts}
expected = None
for _ in range(arguments.rounds):  # interleaved, so that a busy moment of the machine hits all alike
    for count in counts:
        begin = time.perf_counter()
        fitted = analyzer.train(list(frames), count)
        times[count].append(time.perf_counter() - begin)
        expected = expected or fitted
        assert fitted == expected  # the same, whoever computes it

print(f"{len(frames)} targets\nprocesses  seconds  speed-up  per process")
for count in counts:
    best, alone = min(times[count]), min(times[1])
    print(f"{count:9}  {best:7.2f}  {alone / best:7.2f}x  {alone / best / count:10.0%}")
