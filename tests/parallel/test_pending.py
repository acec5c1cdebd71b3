"""What becomes of calls that no worker has begun: what they cost, who pickles them, how they are cancelled."""

import contextvars
import operator
import threading
from concurrent.futures import wait

import pytest
from pathos.helpers import mp

from datamat.errors import UnpicklableError
from datamat.parallel import PathosExecutor, PathosPool

ON_COMMIT = ("fork",)
Semaphore = mp.get_context("spawn").Semaphore
KINDS = {
    "submit": lambda pool, function, items: [pool.submit(function, item) for item in items],
    "map": lambda pool, function, items: pool.map(function, items, chunksize=1),
    "map of a generator": lambda pool, function, items: pool.map(function, (item for item in items), chunksize=1),
    "map_unordered": lambda pool, function, items: pool.map_unordered(function, items, chunksize=1),
    "map_all": lambda pool, function, items: pool.map_all(function, [(item,) for item in items], chunksize=1),
}


class Counted:
    """Counts, in the parent, how often it is pickled."""

    pickled = 0

    def __reduce__(self):
        Counted.pickled += 1
        return int, (7,)


class Hold:
    """Keeps a worker busy until the test lets it go on."""

    def __init__(self, gate):
        self.gate = gate

    def wait(self, item):
        self.gate.acquire()
        return item


@pytest.mark.parametrize("kind", KINDS)
def test_pending_calls_are_not_pickled(method, kind):
    """They hold references: sixty calls with one large array cost no copy of it until a worker is free."""
    Counted.pickled = 0
    gate = Semaphore(0)
    pool = PathosExecutor(1, start_method=method)
    started = pool.submit(Hold(gate).wait, 0)
    while not started.running():
        pass

    calls = KINDS[kind](pool, operator.neg, [Counted() for _ in range(40)])
    before = Counted.pickled
    gate.release()
    if kind == "map_all":
        calls = calls[1]
    results = [call.result() for call in calls] if kind == "submit" else [*calls]

    assert results == [-7] * 40
    assert before == 0
    assert Counted.pickled == 40
    pool.shutdown()


def test_large_arguments_are_not_sent_ahead(method):
    """However short their calls are: a worker holds one, and a few megabytes more."""
    Counted.pickled = 0
    gate = Semaphore(0)
    large = bytes(5_000_000)
    with PathosExecutor(1, start_method=method) as pool:
        wait([pool.submit(len, b"") for _ in range(200)])  # now the pool takes calls for short
        held = pool.submit(Hold(gate).wait, 0)
        while not held.running():
            pass

        passes = threading.Semaphore(0)
        calls = [pool.submit(operator.itemgetter(1), [large, Counted()]) for _ in range(30)]
        pool.on_progress(lambda _: passes.release())
        for _ in range(2):  # between two reports, the pool sends what it may
            assert passes.acquire(timeout=30)
        before = Counted.pickled
        gate.release()

        assert [call.result() for call in calls] == [7] * 30
        assert before <= 2


def test_variable_in_an_argument_has_its_value_at_the_call(method):
    variable = contextvars.ContextVar("variable")
    gate = Semaphore(0)
    with PathosExecutor(1, start_method=method) as pool:
        held = pool.submit(Hold(gate).wait, 0)
        variable.set("then")
        call = pool.submit(contextvars.ContextVar.get, variable)
        calls = pool.map(contextvars.ContextVar.get, [variable] * 3)
        variable.set("later")
        gate.release()

        assert held.result() == 0
        assert call.result() == "then"
        assert [*calls] == ["then"] * 3


class Guarded:
    """Pickles itself under its own lock."""

    def __init__(self):
        self.lock = threading.RLock()
        self.is_pickled = threading.Event()

    def __getstate__(self):
        self.is_pickled.set()
        with self.lock:
            return {}

    def method(self, item=0):
        return 7


def first_call(pool, guarded):
    return pool.submit(guarded.method)


def later_call(pool, guarded):
    assert pool.submit(abs, -1).result() == 1
    return pool.submit(guarded.method)


def argument(pool, guarded):
    assert pool.submit(abs, -1).result() == 1
    return pool.submit(isinstance, guarded, Guarded)


def odd_argument(pool, guarded):
    """One that the fast pickler cannot send."""
    assert pool.submit(abs, -1).result() == 1
    nested = [guarded]
    for _ in range(2000):
        nested = [nested]
    return pool.submit(isinstance, nested, list)


def mapped(pool, guarded):
    return pool.submit(len, [*pool.map(guarded.method, [1])])


def mapped_items(pool, guarded):
    assert pool.submit(abs, -1).result() == 1
    return pool.map(Guarded.method, [guarded] * 2, chunksize=1)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize("use", [first_call, later_call, argument, odd_argument, mapped, mapped_items, "initializer"])
def test_no_lock_is_held_while_an_object_pickles_itself(method, use):
    """Another thread, which has the object's lock, submits under it."""
    guarded = Guarded()
    initializer = (isinstance, (guarded, Guarded)) if use == "initializer" else (None, ())
    pool = PathosExecutor(1, start_method=method, initializer=initializer[0], initargs=initializer[1])
    use = first_submit if use == "initializer" else use
    submitted, done = [], []
    ready = threading.Event()

    def other():
        with guarded.lock:
            ready.set()
            assert guarded.is_pickled.wait(30)
            submitted.extend((pool.submit(abs, -2), pool.map(abs, [-3])))

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    ready.wait()
    call = threading.Thread(target=lambda: done.append(use(pool, guarded)), daemon=True)
    call.start()
    thread.join(30)
    call.join(30)

    assert not thread.is_alive() and not call.is_alive()
    assert submitted[0].result() == 2
    assert [*submitted[1]] == [3]
    assert done
    pool.shutdown()


def first_submit(pool, guarded):
    return pool.submit(abs, -1)


def test_argument_that_cannot_be_pickled_fails_its_own_call(method):
    """Whatever it raises, in a chunk or alone."""
    with PathosExecutor(1, start_method=method) as pool:
        assert pool.submit(abs, -1).result() == 1
        bad, good = pool.submit(repr, Raises()), pool.submit(abs, -2)

        with pytest.raises(SystemExit):
            bad.result()
        assert good.result() == 2
        results = pool.map(repr, [1, Raises(), 3], chunksize=3)
        assert next(results) == "1"
        with pytest.raises(SystemExit):
            next(results)
        with pytest.raises(UnpicklableError):
            pool.submit(repr, (each for each in ())).result()


class Raises:
    def __reduce__(self):
        raise SystemExit(3)


# ---------------------------------------------------------------- cancelling


@pytest.fixture
def busy(method):
    """Yield a pool whose worker holds one call, and takes all calls for short; and what ends that call."""
    gate = Semaphore(0)
    pool = PathosExecutor(1, start_method=method)
    wait([pool.submit(abs, 0) for _ in range(300)])
    held = pool.submit(Hold(gate).wait, "held")
    while not held.running():
        pass
    yield pool, held, gate
    gate.release()
    pool.shutdown()


class Sent:
    """A number that notes when it is pickled, which is when it is sent."""

    num_sent = threading.Semaphore(0)

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        Sent.num_sent.release()
        return int, (self.number,)


def sent_ahead(pool):
    """Submit 40 calls, and return them once some of them are at the worker that is busy."""
    Sent.num_sent = threading.Semaphore(0)
    calls = [pool.submit(operator.neg, Sent(n)) for n in range(40)]
    for _ in range(3):
        assert Sent.num_sent.acquire(timeout=30)
    return calls


def test_call_that_waits_at_a_worker_is_not_running(busy):
    pool, held, gate = busy
    calls = sent_ahead(pool)

    assert held.running()
    assert not any(call.running() for call in calls)
    gate.release()
    assert [call.result() for call in calls] == [-n for n in range(40)]


def test_call_that_waits_at_a_worker_can_be_cancelled(busy):
    pool, held, gate = busy
    calls = sent_ahead(pool)

    cancelled = [call.cancel() for call in calls[::2]]
    gate.release()

    assert all(cancelled)
    assert not held.cancel()
    assert held.result() == "held"
    assert [call.result() for call in calls[1::2]] == [-n for n in range(1, 40, 2)]
    assert wait(calls, timeout=30).not_done == set()


def test_shutdown_cancels_what_waits_at_a_worker(busy):
    pool, held, gate = busy
    calls = sent_ahead(pool)

    pool.shutdown(wait=False, cancel_futures=True)
    wait(calls)
    gate.release()
    pool.shutdown()

    assert all(call.cancelled() for call in calls)
    assert held.result() == "held"


def test_terminate_cancels_what_waits_at_a_worker(busy):
    pool, held, _ = busy
    calls = sent_ahead(pool)

    pool.terminate()

    assert all(call.cancelled() for call in calls)
    assert held.exception() is not None


@pytest.mark.parametrize("is_drawn", [True, False])
def test_closed_map_runs_nothing_that_waits_at_a_worker(method, tmp_path, is_drawn):
    gate = Semaphore(0)
    Sent.num_sent = threading.Semaphore(0)
    items = [*([None] * 300), "held", *map(Sent, range(40))]
    with PathosExecutor(1, start_method=method) as pool:
        results = pool.map(Notes(tmp_path, gate).note, items if is_drawn else iter(items), chunksize=1)
        for _ in range(300):
            next(results)
        for _ in range(3):
            assert Sent.num_sent.acquire(timeout=30)

        results.close()
        gate.release()

    assert [*tmp_path.iterdir()] == []


class Notes:
    def __init__(self, folder, gate):
        self.folder, self.gate = folder, gate

    def note(self, item):
        if item == "held":
            self.gate.acquire()
        elif item is not None:
            (self.folder / str(item)).touch()


def test_call_is_run_once_or_cancelled(method):
    """At any moment."""
    with PathosExecutor(2, start_method=method) as pool:
        for _ in range(20):
            calls = [pool.submit(operator.neg, n) for n in range(100)]
            for call in calls[::-7]:
                call.cancel()
            assert [call.cancelled() or call.result() for call in calls] == [
                call.cancelled() or -n for n, call in enumerate(calls)
            ]
        assert pool.submit(abs, -1).result() == 1
    done = sum(worker.tasks for worker in pool.stats().workers)
    assert done <= 2001


def test_closed_pathos_pool_finishes_what_waits(method):
    """`close` and `join` run what was submitted; `terminate` does not."""
    pool = PathosPool(1, id="pending", start_method=method)
    calls = [pool.apipe(abs, -n) for n in range(50)]
    pool.close()
    pool.join()

    assert [call.get() for call in calls] == [*range(50)]
    pool.clear()
