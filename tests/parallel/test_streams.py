"""Results stream in order, in bounded memory, with errors in their turn; the tail is balanced."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamat.errors import BrokenPoolError, OptionError, ParallelError
from datamat.parallel import PathosExecutor


def double(x):
    return 2 * x


def add(x, y):
    return x + y


@pytest.mark.parametrize("chunksize", [None, 1, 3, 1000])
def test_map_keeps_the_order(method, chunksize):
    """For each chunk size."""
    with PathosExecutor(2, start_method=method) as pool:
        assert list(pool.map(double, range(500), chunksize=chunksize)) == [2 * x for x in range(500)]
        assert list(pool.starmap(add, [(i, i) for i in range(50)], chunksize=chunksize)) == [2 * i for i in range(50)]
        assert sorted(pool.map_unordered(double, range(50), chunksize=chunksize)) == [2 * x for x in range(50)]


def test_map_equals_the_builtin_map():
    """Also for several iterables of different lengths, and none."""
    with PathosExecutor(2) as pool:

        @settings(max_examples=60, deadline=None)
        @given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3), chunksize=st.none() | st.integers(1, 50))
        def check(lengths, chunksize):
            columns = [list(range(length)) for length in lengths]
            assert list(pool.map(total, *columns, chunksize=chunksize)) == list(map(total, *columns))

        check()


def total(*values):
    return sum(values)


def test_endless_input_is_pulled_as_results_are_taken(method):
    """At most a window of items is ahead."""
    pulled = itertools.count()
    with PathosExecutor(2, start_method=method) as pool:
        stream = pool.map(double, pulled)
        first = [next(stream) for _ in range(100)]
        stream.close()

    assert first == [2 * x for x in range(100)]
    assert next(pulled) < 10_000


def test_items_are_pulled_by_the_caller(method):
    """A generator is not run in a thread it does not know."""
    threads = set()

    def items():
        for i in range(200):
            threads.add(threading.current_thread())
            yield i

    with PathosExecutor(2, start_method=method) as pool:
        assert sum(pool.map(double, items())) == 2 * sum(range(200))

    assert threads == {threading.main_thread()}


def test_results_can_be_taken_after_the_pool_has_ended(method):
    """As with the standard library: leaving the block finishes the work."""
    with PathosExecutor(2, start_method=method) as pool:
        stream = pool.map(double, range(300))

    assert list(stream) == [2 * x for x in range(300)]


def fail_on(x):
    if x == 5:
        raise ValueError(f"bad item {x}")
    return x


@pytest.mark.parametrize("chunksize", [None, 1, 4])
def test_error_comes_in_its_turn_with_item_and_traceback(method, chunksize):
    """The results before it are there."""
    got = []
    with PathosExecutor(2, start_method=method) as pool, pytest.raises(ValueError, match="bad item 5") as caught:
        got.extend(pool.map(fail_on, range(10), chunksize=chunksize))

    assert caught.value.__notes__[0].startswith("item: 5 ")
    assert 'raise ValueError(f"bad item {x}")' in str(caught.value.__cause__)


def test_error_keeps_the_results_before_it(method):
    """They were paid for."""
    got = []
    with PathosExecutor(2, start_method=method) as pool:
        stream = pool.map(fail_on, range(10))
        with pytest.raises(ValueError, match="bad item 5"):
            got.extend(iter(stream.__next__, object()))

    assert got == [0, 1, 2, 3, 4]


class Picky(Exception):
    """Cannot be made from its own arguments."""

    def __init__(self, a, b):
        super().__init__("picky")


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.generator = (x for x in ())


def raise_error(kind):
    raise Picky(1, 2) if kind == "picky" else Unpicklable()


@pytest.mark.parametrize(("kind", "text"), [("picky", "Picky: picky"), ("unpicklable", "Unpicklable: holds a lock")])
def test_exception_that_cannot_be_pickled_is_reported(method, kind, text):
    """In words, with its traceback."""
    with PathosExecutor(1, start_method=method) as pool:
        future = pool.submit(raise_error, kind)
        with pytest.raises(ParallelError, match=text) as caught:
            future.result(timeout=20)

    assert "in raise_error" in str(caught.value.__cause__)


class Heavy:
    """Cannot be unpickled in the parent."""

    def __reduce__(self):
        return explode, ()


def explode():
    if threading.current_thread().name == "datamat-dispatcher":
        raise RuntimeError("not here")
    return Heavy()


def make_heavy():
    return Heavy()


def test_result_that_cannot_be_unpickled_is_the_error_of_its_call(method):
    """The pool goes on."""
    with PathosExecutor(1, start_method=method) as pool:
        with pytest.raises(ParallelError, match="its result cannot be unpickled: RuntimeError: not here"):
            pool.submit(make_heavy).result(timeout=20)
        assert pool.submit(double, 2).result(timeout=20) == 4


def test_timeout_of_map_counts_from_the_call(method):
    """As in the standard library."""
    with PathosExecutor(1, start_method=method) as pool:
        stream = pool.map(time.sleep, [0, 1.5], timeout=0.5)
        with pytest.raises(TimeoutError):
            list(stream)


def test_chunksize_below_one_is_refused():
    """When the call is made, not when it is used."""
    with PathosExecutor(1) as pool, pytest.raises(OptionError, match="chunksize is 0; pass 1 or more"):
        pool.map(double, [1], chunksize=0)


def test_large_arguments_and_results_pass(method):
    """Far more than a socket holds, to busy workers, in both directions at once."""
    data = bytes(range(256)) * 20_000
    with PathosExecutor(2, start_method=method) as pool:
        futures = [pool.submit(double, data) for _ in range(6)]
        assert all(future.result(timeout=30) == 2 * data for future in futures)


def test_progress_is_reported(method):
    """Done, failed, in flight, waiting; and the busy time of each worker."""
    reports = []
    with PathosExecutor(2, start_method=method) as pool:
        pool.on_progress(reports.append)
        futures = [pool.submit(fail_on, x) for x in range(10)]
        with pytest.raises(ValueError, match="bad item"):
            futures[5].result(timeout=20)
        pool.shutdown()

    last = reports[-1]
    assert (last.done, last.failed, last.in_flight, last.waiting) == (9, 1, 0, 0)
    assert sum(worker.tasks for worker in last.workers) == 10
    assert all(worker.busy_s >= 0 and worker.ended is not None for worker in last.workers)


def be_busy(seconds, until=None):
    end = time.monotonic() + seconds
    while time.monotonic() < end or (until is not None and not until.exists()):
        pass


def test_submitted_call_never_waits_behind_a_long_one(tmp_path):
    """It may be what the long one waits for, whatever the calls before have cost."""
    flag = tmp_path / "flag"
    with PathosExecutor(2) as pool:
        for future in [pool.submit(be_busy, 0.02) for _ in range(6)]:
            future.result()
        waits = pool.submit(be_busy, 0, flag)
        for future in [pool.submit(be_busy, 0.02) for _ in range(10)]:
            future.result()
        assert not waits.done()
        flag.touch()
        waits.result()


@pytest.fixture
def _interrupting_collector():
    """Let other threads run whenever the garbage collector does, as it may at each new tuple."""

    def give_way(*_):
        time.sleep(0)

    gc.callbacks.append(give_way)
    thresholds = gc.get_threshold()
    gc.set_threshold(20, 1000, 1000)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(give_way)


@pytest.mark.usefixtures("_interrupting_collector")
def test_stats_can_be_asked_for_while_tasks_are_given_out():
    """By another thread, again and again."""
    asked, is_over = [], threading.Event()

    def ask(pool):
        while not is_over.is_set():
            asked.append(pool.stats().workers)

    with PathosExecutor(2) as pool:
        pool.submit(double, 0).result()
        thread = threading.Thread(target=ask, args=(pool,))
        thread.start()
        futures = [pool.submit(double, x) for x in range(20_000)]
        results = [future.result() for future in futures]
        is_over.set()
        thread.join()

    assert results == [2 * x for x in range(20_000)] and asked


def test_progress_callback_that_fails_does_not_end_the_pool(method, caplog):
    """It is logged."""
    with PathosExecutor(1, start_method=method) as pool:
        pool.on_progress(lambda _: 1 / 0)
        assert pool.submit(double, 1).result(timeout=20) == 2

    assert any("progress callback failed" in message for message in caplog.messages)


def test_stream_that_outlives_its_pool_says_so(method):
    """Items of a stream without a known length are not all sent at shutdown; asking for them is no wait for ever."""
    with PathosExecutor(2, start_method=method) as pool:
        stream = pool.map(abs, itertools.count())
        assert next(stream) == 0

    with pytest.raises(BrokenPoolError, match="the pool was shut down"):
        list(stream)
