"""What datamat gives workers in place of locks, loggers, files and arrays passes the tests for registered types.

What has no use in another process (sockets, generators, connections) travels as an object that says so when it is
used: `test_pickling.py`.
"""

from __future__ import annotations

import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from datamat import testing
from datamat.parallel.pickling import dumps_code


class Case(NamedTuple):
    """How an object is created in a folder, and what a program gets from it."""

    make: Any
    use: Any


def take(lock):
    """Take a lock that must be free, and release it."""
    taken = lock.acquire(blocking=False)
    lock.release()
    return taken


def notify(condition):
    with condition:
        condition.notify_all()
    return True


def event_that_is_set(folder):
    event = threading.Event()
    event.set()
    return event


def count(semaphore):
    """Return how often it can be taken."""
    number = 0
    while semaphore.acquire(blocking=False):
        number += 1
    semaphore.release(number)
    return number


def text_file(folder):
    path = folder / "text"
    path.write_text("größer als zuvor", encoding="utf-8")
    file = open(path, encoding="utf-8")  # noqa: SIM115 -- the test reads it in two processes
    file.seek(8)
    return file


def binary_file(folder):
    path = folder / "bytes"
    path.write_bytes(bytes(range(256)))
    file = open(path, "rb")  # noqa: SIM115 -- the test reads it in two processes
    file.seek(200)
    return file


def read_on(file):
    """Read on from the current position, and return to it."""
    position = file.tell()
    found = file.read(5)
    file.seek(position)
    return position, found


def mapped(folder):
    return np.memmap(folder / "array", np.int32, "w+", shape=(3, 4))


CASES = {
    "lock": Case(lambda folder: threading.Lock(), take),
    "rlock": Case(lambda folder: threading.RLock(), take),
    "condition": Case(lambda folder: threading.Condition(), notify),
    "event": Case(event_that_is_set, threading.Event.is_set),
    "semaphore": Case(lambda folder: threading.Semaphore(3), count),
    "bounded semaphore": Case(lambda folder: threading.BoundedSemaphore(2), count),
    "barrier": Case(lambda folder: threading.Barrier(3), lambda barrier: (barrier.parties, barrier.n_waiting)),
    "local": Case(lambda folder: threading.local(), lambda local: dict(vars(local))),
    "thread pool": Case(lambda folder: ThreadPoolExecutor(2), lambda pool: pool.submit(abs, -3).result()),
    "logger": Case(lambda folder: logging.getLogger("conformance"), lambda logger: (logger.name, logger.disabled)),
    "root logger": Case(lambda folder: logging.getLogger(), lambda logger: logger is logging.root),
    "logger without a name": Case(lambda folder: logging.Logger("own", 30), lambda logger: (logger.name, logger.level)),
    "handler": Case(lambda folder: logging.StreamHandler(), lambda handler: handler.level),
    "text file": Case(text_file, read_on),
    "binary file": Case(binary_file, read_on),
    "memmap": Case(mapped, lambda array: (array.shape, array.dtype.str, array.tolist())),
    "random": Case(lambda folder: random._inst, lambda generator: generator is random._inst),
    "numpy.random": Case(lambda folder: np.random.mtrand._rand, lambda generator: generator is np.random.mtrand._rand),
}


class TestBuiltIn(testing.StandinConformance):
    """All cases at once: a start of a worker takes longer than they do."""

    test_reduce_is_the_same_each_time = None  # of registered types; the pickle is compared below

    @pytest.fixture(autouse=True)
    def given(self, tmp_path):
        """Close what a test used."""
        self.folder, self.made = tmp_path, []
        yield
        for thing in self.made:
            getattr(thing, "close", getattr(thing, "shutdown", id))()

    def __getstate__(self):
        return {}

    def make_object(self):
        return {name: case.make(self.folder) for name, case in CASES.items()}

    def use(self, thing):
        if hasattr(self, "made"):  # in the process of the test, also what came back
            self.made += [thing["thread pool"], thing["text file"], thing["binary file"]]
        return {name: case.use(thing[name]) for name, case in CASES.items()}

    @pytest.mark.parametrize("name", CASES)
    def test_pickle_is_the_same_each_time(self, name):
        """A function that holds the object and has not changed is not sent again."""
        everything = self.make_object()

        self.use(everything)

        first, second = (dumps_code([everything[name]]) for _ in range(2))

        assert bytes(first.stream) == bytes(second.stream)
