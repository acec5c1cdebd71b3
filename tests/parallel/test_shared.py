"""Locks, queues, events and shared memory of `multiprocessing` and `multiprocess`: workers use the caller's own."""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import shared_memory
from queue import Empty

import pytest

from datamat.errors import UnpicklableError
from datamat.parallel import PathosExecutor, workers

KINDS = (
    "Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition", "Event", "Value", "Array", "RawValue", "Queue",
    "JoinableQueue", "SimpleQueue",
)  # fmt: skip
GIVEN = {}


@pytest.fixture(params=["multiprocessing", "multiprocess"])
def library(request):
    return importlib.import_module(request.param)


class Holder:
    def __init__(self, held):
        self.held = held

    def use(self, _=None):
        return use(self.held)


def made_by(context):
    arguments = {"Value": ("i", 0), "Array": ("d", 2), "RawValue": (ctypes.c_int, 0)}
    return {kind: getattr(context, kind)(*arguments.get(kind, ())) for kind in KINDS}


def use(held):
    """Use one of each kind, as a worker would; return what it sees of them."""
    for kind in ("Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition"):
        with held[kind]:
            pass
    with held["Value"].get_lock():
        held["Value"].value += 1
    held["Array"][1] = 0.5
    held["RawValue"].value = 7
    held["Event"].set()
    for kind in ("Queue", "JoinableQueue", "SimpleQueue"):
        held[kind].put(kind)
    return held["Lock"].acquire(block=False) and not held["Lock"].release()


def check(held):
    assert held["Value"].value == 1
    assert held["Array"][:] == [0.0, 0.5]
    assert held["RawValue"].value == 7
    assert held["Event"].is_set()
    for kind in ("Queue", "JoinableQueue"):
        assert held[kind].get(timeout=20) == kind
        held[kind].close()
    assert held["SimpleQueue"].get() == "SimpleQueue"


def give(held):
    GIVEN.update(held)


def use_given():
    return use(GIVEN)


def kill_self(_=None):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("method", "context", "way", "library"),
    [
        ("fork", "fork", "self", "multiprocessing"),
        ("fork", "fork", "argument", "multiprocess"),
        ("fork", "fork", "later", "multiprocess"),
        ("fork", "spawn", "initargs", "multiprocess"),
        ("fork", "forkserver", "later", "multiprocessing"),
        ("forkserver", "spawn", "self", "multiprocess"),
        ("forkserver", "forkserver", "initargs", "multiprocessing"),
        ("forkserver", "spawn", "argument", "multiprocessing"),
        ("forkserver", "forkserver", "later", "multiprocess"),
        ("spawn", "forkserver", "self", "multiprocessing"),
        ("spawn", "spawn", "initargs", "multiprocess"),
    ],
    indirect=["library"],
)
def test_shared_objects_are_the_callers_own(method, library, context, way):
    """They arrive by `self`, `initargs` or as an argument; those of the fork context only in forks."""
    held = made_by(library.get_context(context))

    initializer = {"initializer": give, "initargs": (held,)} if way == "initargs" else {}
    with PathosExecutor(1, start_method=method, **initializer) as pool:
        if way == "later":  # by then workers have been forked: nothing more is inherited
            assert pool.submit(abs, -1).result(timeout=30) == 1
        if way == "initargs":
            assert pool.submit(use_given).result(timeout=30)
        elif way == "argument":
            assert pool.submit(use, held).result(timeout=30)
        else:
            assert pool.submit(Holder(held).use).result(timeout=30)

    check(held)


@pytest.mark.parametrize(
    ("kind", "way", "library"),
    [
        ("Lock", "self", "multiprocess"),
        ("Value", "initargs", "multiprocessing"),
        ("Queue", "self", "multiprocessing"),
        ("Event", "initargs", "multiprocess"),
    ],
    indirect=["library"],
)
def test_object_of_the_fork_context_names_the_context_to_make_it_in(library, kind, way):
    """Its semaphores have no name for another process to open; the rest of `self` arrives."""
    held = {kind: made_by(library.get_context("fork"))[kind]}
    initializer = {"initializer": give, "initargs": (held,)} if way == "initargs" else {}

    with PathosExecutor(1, start_method="forkserver", **initializer) as pool:
        with pytest.raises(UnpicklableError, match=rf'{library.__name__}\.get_context\("spawn"\)\.{kind}\(\)'):
            pool.submit(touch_given if way == "initargs" else Toucher(held[kind]).touch, kind).result(timeout=30)
        assert pool.submit(Toucher(held[kind]).look_away).result(timeout=30)


class Toucher:
    def __init__(self, shared):
        self.shared = shared

    def touch(self, _):
        touch(self.shared)

    def look_away(self):
        return True


def touch(shared):
    for name in ("acquire", "get", "wait"):
        getattr(shared, name)


def touch_given(kind):
    touch(GIVEN[kind])


def test_worker_that_takes_the_place_of_a_forked_one_has_them():
    """It comes from a server, and inherits nothing."""
    held = made_by(multiprocessing.get_context("spawn"))

    with PathosExecutor(1, start_method="fork", initializer=give, initargs=(held,)) as pool:
        assert pool.submit(abs, -1).result(timeout=30) == 1
        assert pool.submit(kill_self).exception(timeout=30) is not None
        assert pool.submit(use_given).result(timeout=30)

    check(held)


def test_queue_that_the_caller_has_used_works_in_a_fork():
    """The queue's thread stays behind, and the worker starts another."""
    queue = multiprocessing.get_context("fork").Queue()
    queue.put("caller")
    assert queue.get(timeout=20) == "caller"

    with PathosExecutor(1, start_method="fork") as pool:
        pool.submit(queue.put, "worker").result(timeout=30)

    assert queue.get(timeout=20) == "worker"
    queue.close()
    queue.join_thread()


class Counter:
    """Is what many tutorials show: one thread takes the same lock twice, under two names."""

    def __init__(self, context):
        self.lock = context.RLock()
        self.value = context.Value("i", 0, lock=self.lock)

    def add(self, lock):
        with lock, self.lock, self.value.get_lock():
            self.value.value += 1
        return self


def test_one_lock_stays_one_lock(method, library):
    """Otherwise its holder would wait for itself; what comes back is the caller's own."""
    counter = Counter(library.get_context("spawn"))

    with PathosExecutor(2, start_method=method) as pool:
        back = [pool.submit(counter.add, counter.lock) for _ in range(20)]
        back = [future.result(timeout=30) for future in back]

    assert counter.value.value == 20
    assert all(each.lock is counter.lock for each in back)


def test_shared_object_that_is_gone_says_so():
    """An argument is kept until its call has ended, but what is removed by its name is not."""
    context = multiprocessing.get_context("spawn")
    memory = shared_memory.SharedMemory(create=True, size=8)

    with PathosExecutor(1, start_method="spawn") as pool:
        gone = pool.submit(Board(memory).write, 0)
        kept = pool.submit(taken, context.Lock())
        memory.close()
        memory.unlink()

        assert kept.result(timeout=30)
        with pytest.raises(UnpicklableError, match="gone where it was made"):
            gone.result(timeout=30)


def taken(lock):
    return lock.acquire()


class Board:
    """Holds memory that has a name."""

    def __init__(self, memory):
        self.memory = memory

    def write(self, i):
        self.memory.buf[i] = i
        return self.memory.name


def test_memory_with_a_name_outlives_the_workers(method, library):
    shared_memory = importlib.import_module(f"{library.__name__}.shared_memory")
    memory = shared_memory.SharedMemory(create=True, size=8)
    try:
        with PathosExecutor(2, start_method=method) as pool:
            assert set(pool.map(Board(memory).write, range(8))) == {memory.name}
        with PathosExecutor(1, start_method=method) as pool:  # another look, after the first workers have ended
            pool.submit(Board(memory).write, 0).result(timeout=30)

        assert bytes(memory.buf[:8]) == bytes(range(8))
    finally:
        memory.close()
        memory.unlink()


class Filler:
    """Puts more into a queue than its pipe holds."""

    def __init__(self, queue):
        self.queue = queue

    def fill(self, size):
        self.queue.put(bytes(size))
        return size


SIZES = [300_000, 300_001]


def test_queue_that_is_read_late_loses_nothing(method):
    """As the pool ends, a worker stays as long as somebody may read what it has put."""
    queue = multiprocessing.get_context("spawn").Queue()
    pool = PathosExecutor(2, start_method=method)
    found = []

    def read():
        while pool._dispatcher.thread.is_alive() and not any(
            handle.is_held_up for handle in list(pool._dispatcher._workers.handles)
        ):
            time.sleep(0.01)
        with contextlib.suppress(Empty):
            for _ in SIZES:
                found.append(len(queue.get(timeout=20)))

    with pool:
        assert list(pool.map(Filler(queue).fill, SIZES, chunksize=1)) == SIZES
        reader = threading.Thread(target=read)
        reader.start()
    reader.join()

    assert sorted(found) == SIZES


def test_queue_that_nobody_reads_is_lost_with_a_warning(method, monkeypatch, caplog):
    """The pool waits for a while; a program must not wait for ever."""
    monkeypatch.setattr(workers, "_HELD_UP_S", 0.2)
    queue = multiprocessing.get_context("spawn").Queue()

    with PathosExecutor(1, start_method=method) as pool:
        assert pool.submit(Filler(queue).fill, SIZES[0]).result() == SIZES[0]

    assert "nothing has read" in caplog.text
