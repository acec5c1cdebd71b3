"""What nobody uses any more is collected: pools in cycles, what a pool was given, what the program has made besides."""

import gc
import os
import threading
import time
import weakref

import pytest
from fresh import run

from datamat.parallel import PathosExecutor


class Owner:
    """Holds a pool that refers back to it; a worker gets neither."""

    def __init__(self, method, make=lambda _, **options: PathosExecutor(1, **options)):
        self.me = self
        self.pool = make(self, start_method=method)

    def __getstate__(self):
        return {}

    def begin(self, *_):
        """Serve as an initializer or as a callback."""

    def double(self, x):
        return 2 * x


def set_ready():
    global ready
    ready = "ready"


def die_once(path):
    """Die in the first worker; return in the second what the initializer has set."""
    if not path.exists():
        path.touch()
        os._exit(3)
    return ready


class Thing:
    def begin(self, *_):
        """Serve as an initializer or as a callback."""

    def name_of(self, other):
        return type(other).__name__


def told_of_progress(owner, **options):
    pool = PathosExecutor(1, **options)
    pool.on_progress(owner.begin)
    return pool


def with_a_callback(owner, **options):
    pool = PathosExecutor(1, **options)
    owner.future = pool.submit(owner.double, 1)
    owner.future.add_done_callback(owner.begin)
    return pool


def in_the_middle_of(items):
    def make(owner, **options):
        pool = PathosExecutor(1, **options)
        owner.results = pool.map(owner.double, items(owner))
        assert next(owner.results) == 2
        return pool

    return make


HOLDERS = {
    "attribute": lambda _, **options: PathosExecutor(1, **options),
    "initializer": lambda owner, **options: PathosExecutor(1, initializer=owner.begin, **options),
    "initargs": lambda owner, **options: PathosExecutor(1, initializer=id, initargs=(owner,), **options),
    "progress": told_of_progress,
    "callback": with_a_callback,
    "list": in_the_middle_of(lambda _: [1, 2, 3]),
    "generator": in_the_middle_of(lambda owner: (x for x in [1, 2, 3] if owner)),
}


def collect_until(is_done):
    """Collect until the condition holds: the pool's thread releases a call just after its result is there."""
    deadline = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < deadline, "it was never collected"
        time.sleep(0.005)
        gc.collect()


@pytest.mark.parametrize("holder", HOLDERS)
def test_pool_in_a_cycle_ends_its_workers(method, holder, pool_thread):
    owner = Owner(method, HOLDERS[holder])
    assert owner.pool.submit(owner.double, 2).result() == 4
    thread, gone = pool_thread(), weakref.ref(owner)

    del owner
    collect_until(lambda: not thread.is_alive())

    assert gone() is None


def test_pool_may_go_before_the_results_of_its_map(method, pool_thread):
    """All items run, and then the workers end: the items of a list or range need no pool to submit them."""
    pool = PathosExecutor(1, start_method=method)
    results = pool.map(abs, range(-1000, 0))
    thread, gone = pool_thread(), weakref.ref(pool)

    del pool

    assert gone() is None
    assert list(results) == list(range(1000, 0, -1))
    thread.join(20)
    assert not thread.is_alive()


def test_forked_pool_does_not_live_on_in_a_global_that_it_was_given():
    """The globals of the function that is called hold a list of pools."""
    program = """
        import gc, threading
        from datamat.parallel import PathosExecutor
        def double(x): return 2 * x
        pools = [PathosExecutor(1, start_method="fork")]
        print(pools[0].submit(double, 2).result())
        (thread,) = [each for each in threading.enumerate() if each.name == "datamat-dispatcher"]
        del pools
        while thread.is_alive(): gc.collect(); thread.join(0.01)
    """

    assert run(program) == "4\n"


def test_dropped_pool_finishes_its_calls_and_replaces_its_workers(method, tmp_path, pool_thread):
    """Workers still get the initializer, which only the calls under way keep alive."""
    pool = PathosExecutor(1, start_method=method, initializer=set_ready, max_retries=1)
    future, thread = pool.submit(die_once, tmp_path / "died"), pool_thread()

    del pool
    gc.collect()

    assert future.result() == "ready"
    thread.join()


@pytest.mark.parametrize("end", ["forgotten", "shut down", "at rest"])
def test_nothing_of_the_callers_is_kept(method, end, pool_thread):
    """A pool that has ended keeps nothing; an idle one keeps only what it may still need."""
    given, called, argument, told, back = things = [Thing() for _ in range(5)]
    pool = PathosExecutor(1, start_method=method, initializer=id, initargs=(given,))
    pool.on_progress(told.begin)
    future = pool.submit(called.name_of, argument)
    future.add_done_callback(back.begin)
    assert future.result() == "Thing"
    ended, thread = [weakref.ref(each) for each in things], pool_thread()
    del things, given, called, argument, told, back, future

    if end == "at rest":
        collect_until(lambda: [each() is None for each in ended] == [False, True, True, False, True])
        pool.shutdown()
    else:
        if end == "shut down":
            pool.shutdown()
        del pool
        collect_until(lambda: not any(each() for each in ended))
    thread.join(20)


def test_callback_may_shut_down_the_pool(method, caplog):
    """A callback runs in the very thread that is to end."""
    pool = PathosExecutor(1, start_method=method)
    future = pool.submit(abs, -3)

    future.add_done_callback(lambda _: pool.shutdown())

    assert future.result() == 3
    pool.shutdown()
    assert not caplog.records


IN_THE_MIDDLE = """
import gc, os, sys, threading, weakref
from datamat.parallel import PathosExecutor
pool = PathosExecutor(1, start_method="fork")
ring = [pool.map(abs, [1, 2, 3] if sys.argv[1] == "list" else iter([1, 2, 3]))]
ring.append(ring)
print(next(ring[0]))
gone = weakref.ref(ring[0])
def collect():
    with pool._dispatcher.functions._lock, pool._dispatcher._lock:
        gc.collect()
thread = threading.Thread(target=collect)
del ring
thread.start()
thread.join(10)
print(thread.is_alive(), gone(), flush=True)
os._exit(0)  # a thread that waits for ever would be waited for
"""


@pytest.mark.parametrize("items", ["list", "iterator"])
def test_map_may_be_collected_at_any_moment(items):
    """Even while the pool holds its own locks."""
    assert run(IN_THE_MIDDLE, items) == "1\nFalse None\n"


# ---------------------------------------------------------------- the collector of the program


FREEZING = """
import gc, sys, weakref
from datamat.parallel import PathosExecutor
class Model:
    def __init__(self): self.me = self
model = Model()
gone = weakref.ref(model)
with PathosExecutor(1, start_method=sys.argv[1]) as pool:
    print(pool.submit(abs, -1).result(), gc.get_freeze_count())
    del model
    gc.collect()
    print(gone())
    gc.freeze()
    mine = gc.get_freeze_count()
print(mine > 1000 and gc.get_freeze_count() > mine - 1000)
"""


def test_collector_of_the_program_is_left_alone(method):
    """Cycles are collected while a pool lives, and what the program has frozen stays frozen."""
    assert run(FREEZING, method) == "1 0\nNone\nTrue\n"


def test_worker_leaves_what_it_inherits_out_of_collections(method):
    """A collection would copy every page that it shares with its parent."""
    gc.unfreeze()  # what `conftest.py` froze, a fork would inherit as such
    try:
        with PathosExecutor(1, start_method=method) as pool:
            assert pool.submit(gc.get_freeze_count).result() > 1000
    finally:
        gc.freeze()


def test_what_a_call_has_used_goes_without_a_collection(method):
    """Memory would otherwise grow by each object whose method is called."""
    with PathosExecutor(1, start_method=method) as pool:
        assert pool.submit(abs, -1).result() == 1
        gc.disable()
        try:
            gone = threading.Event()
            owner = Owner.__new__(Owner)
            weakref.finalize(owner, gone.set)
            pool.submit(owner.double, 2)
            del owner
            assert gone.wait(20)
        finally:
            gc.enable()
