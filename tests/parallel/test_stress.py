"""A random worker is killed again and again, and every result is there exactly once."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from datamat.parallel import PathosExecutor


class Squares:
    """Holds a lock and some memory, as users' objects do."""

    def __init__(self):
        self.lock = threading.RLock()
        self.data = bytes(1_000_000)

    def square(self, x, pause_s):
        with self.lock:
            time.sleep(pause_s)
            return x, x * x


class Reaper(threading.Thread):
    """Kills a random worker at every interval in which a call has ended: a busy machine may need longer."""

    def __init__(self, pool, interval_s):
        super().__init__(name="reaper")
        self.pool = pool
        self.interval_s = interval_s
        self.kills = 0
        self.stopped = threading.Event()

    def run(self):
        rng, done = random.Random(7), -1
        while not self.stopped.wait(self.interval_s):
            workers = self.pool.stats().workers
            before, done = done, sum(worker.tasks for worker in workers)
            alive = [worker.pid for worker in workers if worker.ended is None]
            if alive and done > before:
                try:
                    os.kill(rng.choice(alive), signal.SIGKILL)
                except ProcessLookupError:  # it had ended, and nobody has noticed yet
                    continue
                self.kills += 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_result_is_there_once_while_workers_are_killed(method):
    num_calls, duration_s = 10_000, 60.0
    interval_s = 0.05 if method != "spawn" else 0.25  # a spawned worker needs 0.2 s to start
    pause_s = duration_s * 4 / num_calls

    with PathosExecutor(4, start_method=method, max_retries=1000) as pool:
        reaper = Reaper(pool, interval_s)
        reaper.start()
        squares = Squares()
        futures = [pool.submit(squares.square, x, pause_s) for x in range(num_calls)]
        try:
            results = [future.result(timeout=500) for future in futures]
        finally:
            reaper.stopped.set()
            reaper.join()

    assert results == [(x, x * x) for x in range(num_calls)]
    assert reaper.kills >= num_calls / 100
