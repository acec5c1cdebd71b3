"""Results stream in order, in bounded memory, with errors in their turn; the tail is balanced."""

import gc
import itertools
import os
import re
import sys
import threading
import time
import types
import weakref

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
    with PathosExecutor(2, start_method=method) as pool:
        assert list(pool.map(double, range(500), chunksize=chunksize)) == [2 * x for x in range(500)]
        assert list(pool.starmap(add, [(i, i) for i in range(50)], chunksize=chunksize)) == [2 * i for i in range(50)]
        assert sorted(pool.map_unordered(double, range(50), chunksize=chunksize)) == [2 * x for x in range(50)]


def test_map_equals_the_builtin_map():
    """With several iterables of different lengths, and with none."""
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
    """The map is ahead by no more than what the workers do in some milliseconds."""
    pulled = itertools.count()
    with PathosExecutor(2, start_method=method) as pool:
        stream = pool.map(double, pulled)
        first = [next(stream) for _ in range(100)]
        stream.close()

    assert first == [2 * x for x in range(100)]
    assert next(pulled) < 1_000_000


def test_items_are_pulled_by_the_caller(method):
    """A generator does not run in a thread that it does not know; results can be taken after the pool has ended."""
    threads = set()

    def items():
        for i in range(200):
            threads.add(threading.current_thread())
            yield i

    with PathosExecutor(2, start_method=method) as pool:
        from_generator, from_range = pool.map(double, items()), pool.map(double, range(300))

    assert list(from_generator) == [2 * x for x in range(200)]
    assert list(from_range) == [2 * x for x in range(300)]
    assert threads == {threading.main_thread()}


def fail_on(x):
    if x == 5:
        raise ValueError(f"bad item {x}")
    return x


@pytest.mark.parametrize("chunksize", [None, 1, 4])
def test_error_comes_in_its_turn_with_item_and_traceback(method, chunksize):
    got = []
    with PathosExecutor(2, start_method=method) as pool, pytest.raises(ValueError, match="bad item 5") as caught:
        got.extend(pool.map(fail_on, range(10), chunksize=chunksize))  # keeps what came before an error

    assert got == [0, 1, 2, 3, 4]
    assert caught.value.__notes__[0].startswith("item: 5 ")
    assert 'raise ValueError(f"bad item {x}")' in str(caught.value.__cause__)


@pytest.mark.parametrize("chunksize", [None, 4, 20])
def test_item_that_raises_stop_iteration_does_not_end_the_others(method, chunksize):
    """The built-in `map` takes it for the end of its input, and `multiprocessing.Pool.map` loses the rest."""
    got = []
    with PathosExecutor(2, start_method=method) as pool, pytest.raises(RuntimeError) as caught:
        got.extend(pool.map(stop_at_five, range(20), chunksize=chunksize))

    assert got == [0, 1, 2, 3, 4]
    assert "item: 5 " in caught.value.__cause__.__notes__[0]


def stop_at_five(x):
    if x == 5:
        raise StopIteration("five")
    return x


@pytest.mark.parametrize("mapping", ["map", "map_unordered", "starmap"])
def test_closed_iterator_gives_nothing_more(method, mapping):
    """Even if the rest of a chunk has arrived."""
    with PathosExecutor(1, start_method=method) as pool:
        items = [(x,) for x in range(50)] if mapping == "starmap" else range(50)
        stream = getattr(pool, mapping)(double, items, chunksize=10)
        first = [next(stream), next(stream)]
        stream.close()
        rest = list(stream)

    assert (first, rest) == ([0, 2], [])


class Weighty:
    def __init__(self, num_bytes):
        self.content = bytes(num_bytes)


@pytest.mark.parametrize(("num_bytes", "chunksize"), [(10, 1), (100_000, 4)])
def test_result_that_was_taken_is_held_by_nobody_else(method, num_bytes, chunksize):
    """Whether it came alone or in a large chunk."""
    with PathosExecutor(1, start_method=method) as pool:
        stream = pool.map(Weighty, [num_bytes] * 8, chunksize=chunksize)
        for result in stream:
            taken = weakref.ref(result)
            del result
            assert taken() is None


class CountsPicklings:
    """Counts in this process how many items were sent."""

    sent = 0

    def __reduce__(self):
        type(self).sent += 1
        return CountsPicklings, ()


def begin_and_wait(_, folder):
    (folder / "begun").touch()
    wait_for(folder / "released")


def wait_for(path):
    while not path.exists():
        time.sleep(0.001)


def test_map_begins_with_one_item_whatever_ran_before_it(method, tmp_path):
    """The cost of another map's calls says nothing about these."""
    with PathosExecutor(1, start_method=method) as pool:
        list(pool.map(double, range(500), chunksize=1))  # the last of them are short, however busy the machine is
        CountsPicklings.sent = 0
        stream = pool.starmap(begin_and_wait, [(CountsPicklings(), tmp_path) for _ in range(10)])
        wait_for(tmp_path / "begun")  # all that the worker gets along with its first item is pickled by now
        sent = CountsPicklings.sent
        (tmp_path / "released").touch()
        list(stream)

    assert sent == 1


class Picky(Exception):
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
    """The error has its text and its traceback."""
    with PathosExecutor(1, start_method=method) as pool:
        future = pool.submit(raise_error, kind)
        with pytest.raises(ParallelError, match=text) as caught:
            future.result(timeout=20)

    assert "in raise_error" in str(caught.value.__cause__)


@pytest.mark.parametrize("chunksize", [None, 4, 100])
@pytest.mark.parametrize("kind", ["raises", "exits", "stays"])
def test_result_that_cannot_be_pickled_fails_its_own_item(method, kind, chunksize):
    """Results in the same message arrive; the error names the item."""
    for results, error in outcomes_of_all_maps(method, stubborn, kind, chunksize):
        assert results == list(range(13))
        assert f"item: '{kind}', 13 " in str(error.__notes__)


def stubborn(kind, x):
    return x if x != 13 else (x for x in ()) if kind == "stays" else Stubborn(kind)


class Stubborn:
    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        raise {"raises": TypeError, "exits": SystemExit}[self.kind]("I stay")


def outcomes(stream):
    """Return the results before an error, and the error."""
    results = []
    with pytest.raises((ParallelError, SystemExit)) as caught:
        results.extend(stream)  # a list that is extended keeps what came before an error
    return results, caught.value


def outcomes_of_all_maps(method, function, kind, chunksize):
    """Return what each kind of map gives of a function that fails at item 13; calls beside it go on."""
    with PathosExecutor(1, start_method=method) as pool:
        found = [
            outcomes(pool.map(function, [kind] * 20, range(20), chunksize=chunksize)),
            outcomes(pool.starmap(function, [(kind, x) for x in range(20)], chunksize=chunksize)),
            outcomes(pool.map_unordered(function, [kind] * 20, range(20), chunksize=chunksize)),
        ]
        futures = [pool.submit(function, kind, x) for x in range(12, 15)]
        assert [future.exception() is None for future in futures] == [True, False, True]
    return found


@pytest.mark.parametrize("chunksize", [None, 1, 4, 100])
@pytest.mark.parametrize("kind", ["raises", "exits", "unknown", "returns-nothing"])
def test_result_that_cannot_be_unpickled_fails_its_own_item(method, kind, chunksize):
    """Results in the same message arrive, with what they share with it; the error names item and process."""
    for results, error in outcomes_of_all_maps(method, indigestible, kind, chunksize):
        assert [(number, shared["name"]) for number, shared in results] == [(x, "shared") for x in range(13)]
        assert isinstance(error, ParallelError)
        assert re.search(f"item: '{kind}', 13 \\(process \\d+\\)", str(error.__notes__))


def test_results_beside_one_that_cannot_be_unpickled_keep_their_arrays(method):
    """Each has the array that several results of a chunk share."""
    np = pytest.importorskip("numpy")

    with PathosExecutor(1, start_method=method) as pool:
        results, _ = outcomes(pool.map(with_array, range(8), chunksize=8))

    assert len(results) == 5
    for number, (array, shared) in enumerate(results):
        assert (array == np.full(100_000, number)).all()
        assert (shared == np.arange(200_000)).all()
        assert array.flags.writeable


def with_array(number):
    import numpy as np

    global _table
    _table = np.arange(200_000) if _table is None else _table
    return np.full(100_000, number), _table if number != 5 else Indigestible("raises")


_table = None
_shared = {"name": "shared"}


def indigestible(kind, x):
    return x, Indigestible(kind) if x == 13 else _shared


class Indigestible:
    """Can be pickled in the worker, and not unpickled in the parent."""

    def __init__(self, kind):
        self.shared = _shared
        self.kind = kind

    def __reduce__(self):
        if self.kind == "unknown":
            sys.modules["only_in_the_worker"] = module = types.ModuleType("only_in_the_worker")
            module.make = make_in_the_worker
            make_in_the_worker.__module__, make_in_the_worker.__qualname__ = "only_in_the_worker", "make"
            return make_in_the_worker, (self.shared,)
        return refuse, (self.kind, self.shared, os.getpid())


def make_in_the_worker(shared):
    return shared


def refuse(kind, shared, pid):
    if os.getpid() == pid:
        return shared
    raise {"raises": LookupError, "exits": SystemExit, "returns-nothing": Wordless}[kind]("not here")


class Wordless(Exception):
    """Raises an error when its text is wanted."""

    def __str__(self):
        raise TypeError


def test_exception_that_cannot_be_unpickled_fails_its_own_call(method):
    """The error has the worker's traceback; the results before it arrive."""
    with PathosExecutor(1, start_method=method) as pool:
        submitted = pool.submit(raise_resident, 5)
        with pytest.raises(ParallelError, match=_RESIDENT) as called:
            submitted.result(timeout=20)
        results, mapped = outcomes(pool.map(raise_resident, range(10), chunksize=10))
        assert pool.submit(double, 2).result(timeout=20) == 4

    assert results == [0, 1, 2, 3, 4]
    assert re.search(_RESIDENT, str(mapped))
    for error in (called.value, mapped):
        assert "in raise_resident" in str(error.__cause__)
        assert "item: 5 " in str(error.__cause__)


_RESIDENT = "an exception that cannot be unpickled: LookupError: not here"


class Resident(Exception):
    """Cannot leave its process."""

    def __reduce__(self):
        return refuse, ("raises", None, os.getpid())


def raise_resident(x):
    if x == 5:
        raise Resident
    return x


def test_timeout_of_map_counts_from_the_call(method):
    with PathosExecutor(1, start_method=method) as pool:
        stream = pool.map(time.sleep, [0, 1.5], timeout=0.5)
        with pytest.raises(TimeoutError):
            list(stream)


def test_chunksize_below_one_is_refused():
    """When the call is made, not when its results are taken."""
    with PathosExecutor(1) as pool, pytest.raises(OptionError, match="chunksize is 0; pass 1 or more"):
        pool.map(double, [1], chunksize=0)


def test_large_arguments_and_results_pass(method):
    """They are far larger than a socket's buffer, and go to busy workers in both directions at once."""
    data = bytes(range(256)) * 20_000
    with PathosExecutor(2, start_method=method) as pool:
        futures = [pool.submit(double, data) for _ in range(6)]
        assert all(future.result(timeout=30) == 2 * data for future in futures)


def test_progress_is_reported(method):
    """It counts calls done, failed, in flight and waiting, and gives each worker's busy time."""
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
    asked, is_over = [], threading.Event()

    def ask(pool):
        while not is_over.is_set():
            asked.append(pool.stats().workers)

    with PathosExecutor(2) as pool:
        pool.submit(double, 0).result()
        thread = threading.Thread(target=ask, args=(pool,))
        thread.start()
        futures = [pool.submit(double, x) for x in range(4_000)]
        results = [future.result() for future in futures]
        is_over.set()
        thread.join()

    assert results == [2 * x for x in range(4_000)] and asked


def test_progress_callback_that_fails_does_not_end_the_pool(method, caplog):
    with PathosExecutor(1, start_method=method) as pool:
        pool.on_progress(lambda _: 1 / 0)
        assert pool.submit(double, 1).result(timeout=20) == 2

    assert any("progress callback failed" in message for message in caplog.messages)


def test_stream_that_outlives_its_pool_says_so(method):
    """Shutdown does not send all items of an endless stream; asking for more raises instead of waiting for ever."""
    with PathosExecutor(2, start_method=method) as pool:
        stream = pool.map(abs, itertools.count())
        assert next(stream) == 0

    with pytest.raises(BrokenPoolError, match="the pool was shut down"):
        list(stream)
