"""Nothing that was asked for is left out without an error: what `concurrent.futures` promises of `map` and `submit`."""

import functools
import gc
import itertools
import logging
import os
import pathlib
import sys
import threading
import time
import weakref

import pytest
from fresh import run

from datamat.errors import ParallelError, TaskTimeout, UnpicklableError, WorkerDied
from datamat.parallel import PathosExecutor, PathosPool


def leave_mark(folder, number):
    (pathlib.Path(folder) / str(number)).touch()
    return number


def marks(folder):
    return sorted(int(path.name) for path in pathlib.Path(folder).iterdir())


@pytest.mark.parametrize("kind", ["sized", "generator"])
@pytest.mark.parametrize("mapping", ["map", "map_unordered", "starmap"])
def test_items_run_whose_results_nobody_takes(method, mapping, kind, tmp_path):
    """A map is often called only for its effect."""
    numbers = range(100) if kind == "sized" else iter(range(100))

    with PathosExecutor(2, start_method=method) as pool:
        if mapping == "starmap":
            pool.starmap(leave_mark, zip(itertools.repeat(str(tmp_path)), numbers, strict=False))
        else:
            getattr(pool, mapping)(leave_mark, itertools.repeat(str(tmp_path)), numbers)

    assert marks(tmp_path) == list(range(100))


def test_program_runs_all_items_of_a_map_that_another_thread_is_in(method, tmp_path):
    """The interpreter exits in the middle of the map, after some results have been taken."""
    program = f"""
        import pathlib, threading
        from datamat.parallel import PathosExecutor

        def leave_mark(number):
            pathlib.Path({str(tmp_path)!r}, str(number)).touch()
            return number

        begun = threading.Event()
        def work():
            with PathosExecutor(2, start_method={method!r}) as pool:
                results = pool.map(leave_mark, (number for number in range(100)), chunksize=1)
                first = next(results)
                begun.set()
                threading.main_thread().join()
                print(first + sum(results))

        threading.Thread(target=work).start()
        begun.wait()
    """

    assert run(program) == "4950\n"
    assert marks(tmp_path) == list(range(100))


@pytest.mark.parametrize("mapping", ["map", "map_unordered"])
def test_results_before_an_error_of_the_source_are_kept(method, mapping):
    """A generator that raises at its thirtieth item has yielded twenty-nine."""

    def source():
        yield from range(30)
        raise OSError("the disk is gone")

    got = []
    with PathosExecutor(2, start_method=method) as pool, pytest.raises(OSError, match="the disk is gone"):
        got.extend(getattr(pool, mapping)(abs, source()))

    assert sorted(got) == list(range(30))


class Sized:
    """Has a length that is only a guess, as `tqdm(generator, total=100)` has."""

    def __init__(self, length, items):
        self.length, self.items = length, items

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize("length", [0, 100, 1000])
def test_length_is_a_guess(method, length):
    """All items run, whether it is too small or too large."""
    with PathosExecutor(2, start_method=method) as pool:
        assert list(pool.map(abs, Sized(length, range(300)))) == list(range(300))


@pytest.mark.parametrize("chunksize", [None, 1, 4])
@pytest.mark.parametrize("mapping", ["map", "map_unordered"])
def test_item_that_cannot_be_pickled_fails_its_own_result(method, mapping, chunksize):
    """The others run, and the pool ends."""
    items = [*range(10), threading.current_thread(), *range(10, 20)]
    got = []

    with PathosExecutor(2, start_method=method) as pool:
        results = getattr(pool, mapping)(repr, items, chunksize=chunksize)
        with pytest.raises(UnpicklableError):
            got.extend(results)
        assert pool.submit(abs, -1).result() == 1

    if mapping == "map":
        assert got == [repr(number) for number in range(10)]


class Unreadable:
    """Can be pickled, but raises, or kills the process, when it is unpickled."""

    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        return rebuild, (self.kind, os.getpid())


def rebuild(kind, parent):
    assert os.getpid() != parent, "an item was unpickled in the process that it comes from"
    if kind == "kills":
        os._exit(5)
    raise SystemExit("out of order") if kind == "exits" else LookupError("out of order")


UNREADABLE = [
    ("raises", LookupError, "map", 7),
    ("raises", LookupError, "map_unordered", None),
    ("raises", LookupError, "imap", None),
    ("exits", SystemExit, "map", None),
    ("exits", SystemExit, "uimap", 7),
    ("kills", WorkerDied, "map", 7),
    ("kills", WorkerDied, "map_unordered", None),
]


@pytest.mark.parametrize(("kind", "error", "mapping", "chunksize"), UNREADABLE)
def test_item_that_cannot_be_unpickled_fails_its_own_result(method, kind, error, mapping, chunksize):
    """Items in the same message do not fail, and the parent never unpickles any to find the culprit."""
    items = [*range(10), Unreadable(kind), *range(10, 40)]
    pool = (PathosPool if mapping.endswith("imap") else PathosExecutor)(2, start_method=method)
    got = []
    try:
        with pytest.raises(error):
            got.extend(getattr(pool, mapping)(repr, items, chunksize=chunksize))
        again = list(getattr(pool, mapping)(repr, range(20)))
    finally:
        pool.clear() if isinstance(pool, PathosPool) else pool.shutdown()

    assert len(got) == len(set(got))
    assert set(got) <= {repr(number) for number in range(40)}
    if mapping in ("map", "imap"):
        assert got == [repr(number) for number in range(10)]
    assert sorted(again, key=int) == [repr(number) for number in range(20)]


def test_every_item_beside_those_that_cannot_be_unpickled_runs(method, tmp_path):
    """One chunk has two of them, and nobody takes the results."""
    numbers = [Unreadable("raises") if number in (3, 5) else number for number in range(16)]

    with PathosExecutor(2, start_method=method) as pool:
        pool.map(leave_mark, [str(tmp_path)] * 16, numbers, chunksize=8)

    assert marks(tmp_path) == [number for number in range(16) if number not in (3, 5)]


def test_closing_an_unordered_map_cancels_what_has_not_begun(tmp_path):
    """As `map` does."""
    (tmp_path / "marks").mkdir()

    with PathosExecutor(1) as pool:
        results = pool.map_unordered(functools.partial(pass_gate, str(tmp_path)), range(1000), chunksize=1)
        assert next(results) == 0
        results.close()
        (tmp_path / "gate").touch()

    assert len(marks(tmp_path / "marks")) < 1000


def pass_gate(folder, number):
    """Return item 0 at once, and the others when the gate is open."""
    while number and not pathlib.Path(folder, "gate").exists():
        time.sleep(0.001)
    return leave_mark(pathlib.Path(folder, "marks"), number)


def test_source_may_wait_for_another_thread_that_uses_the_pool(method):
    """The pool's lock is not held while the caller's generator runs."""
    with PathosExecutor(2, start_method=method) as pool:
        answers = []

        def source():
            for number in range(6):
                other = threading.Thread(target=lambda: answers.append(pool.submit(abs, -1).result(timeout=30)))
                other.start()
                other.join(30)
                yield number

        assert list(pool.map(abs, source())) == list(range(6))

    assert answers == [1] * 6


def test_callback_may_submit_while_a_map_reads_its_source(method):
    """It runs in the pool's own thread, which must not wait for the reader."""
    with PathosExecutor(2, start_method=method) as pool:
        called = threading.Event()
        second = []

        def submit_again(_):
            second.append(pool.submit(abs, -2))
            called.set()

        def source():
            yield 0
            pool.submit(abs, -1).add_done_callback(submit_again)
            assert called.wait(30)
            yield 1

        assert list(pool.map(abs, source())) == [0, 1]
        assert second[0].result(timeout=30) == 2


def wait_for_the_others(folder, count, number):
    """Let item 0 end only when all others have left their marks."""
    while number == 0 and len(os.listdir(folder)) < count - 1:
        time.sleep(0.001)
    return leave_mark(folder, number)


@pytest.mark.parametrize("kind", ["sized", "generator"])
def test_no_worker_idles_behind_a_long_item(method, kind, tmp_path):
    """Results come in order, but calls do not wait for that: here the first one needs all others."""
    count = 400
    numbers = list(range(count)) if kind == "sized" else (number for number in range(count))

    with PathosExecutor(2, start_method=method) as pool:
        results = pool.map(functools.partial(wait_for_the_others, str(tmp_path), count), numbers, chunksize=1)
        assert list(results) == list(range(count))


def test_call_that_waits_for_a_later_one_does_not_keep_it(method, tmp_path):
    """Short calls are sent ahead; one that ends up behind a long call goes to a free worker."""
    with PathosExecutor(2, start_method=method) as pool:
        list(pool.map(abs, range(200)))
        for burst in range(20):
            folder = tmp_path / str(burst)
            folder.mkdir()
            waiting = pool.submit(wait_for_marks, str(folder), 3)
            marking = [pool.submit(leave_mark, str(folder), number) for number in range(3)]
            waiting.result(timeout=20)
            assert [call.result(timeout=20) for call in marking] == [0, 1, 2]


def wait_for_marks(folder, count):
    while len(os.listdir(folder)) < count:
        time.sleep(0.001)


def test_list_that_changes_after_the_call_does_not_change_the_calls(method):
    numbers = list(range(2000))
    with PathosExecutor(2, start_method=method) as pool:
        results = pool.map(abs, numbers, chunksize=1)
        numbers.clear()
        assert list(results) == list(range(2000))


def test_two_maps_and_calls_share_the_workers(method):
    with PathosExecutor(2, start_method=method) as pool:
        endless = pool.map(abs, range(10**9))
        assert list(pool.map(abs, range(100))) == list(range(100))
        assert pool.submit(abs, -3).result(timeout=50) == 3
        assert [next(endless) for _ in range(10)] == list(range(10))
        endless.close()


def sleep_on(folder, number):
    if number == 700:
        time.sleep(60)
    return leave_mark(folder, number)


def test_time_limit_is_that_of_each_call_also_in_a_chunk(method, tmp_path):
    """The number of calls in a chunk does not matter, and the error names the one that took too long."""
    with PathosExecutor(1, start_method=method, task_timeout_s=3) as pool:
        results = pool.map(functools.partial(sleep_on, str(tmp_path)), range(1000), chunksize=1000)
        with pytest.raises(TaskTimeout, match="task_timeout_s=3") as caught:
            list(results)

    assert "item: 700" in "".join(caught.value.__notes__)


def fork_and_come_back(number):
    if os.fork() == 0:
        return "from the child"
    os.wait()
    return number


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_child_that_comes_back_from_a_task_ends(method):
    """It has copies of the worker's loop and socket."""
    with PathosExecutor(1, start_method=method) as pool:
        assert [pool.submit(fork_and_come_back, number).result(timeout=30) for number in range(5)] == list(range(5))


def log_badly():
    logging.getLogger("bad").warning("value %d", "abc")
    return 1


class RaisingHandler(logging.Handler):
    def emit(self, record):
        raise RuntimeError("no room in the log")


@pytest.mark.parametrize("trouble", ["arguments", "handler", "filter"])
def test_log_record_that_fails_is_reported_once(method, trouble, capsys):
    """Neither the pool nor the call fails."""
    logger = logging.getLogger("bad")
    handler = RaisingHandler() if trouble == "handler" else logging.StreamHandler()
    if trouble == "filter":
        handler.addFilter(lambda record: 1 / 0)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with PathosExecutor(1, start_method=method) as pool:
            assert [pool.submit(log_badly).result(timeout=30) for _ in range(2)] == [1, 1]
    finally:
        logger.removeHandler(handler)
        logger.propagate = True

    assert "--- Logging error ---" in capsys.readouterr().err


class Strange(Exception):
    """Is unpickled as something that is no exception."""

    def __reduce__(self):
        return dict, ()


def raise_strange():
    raise Strange


def test_exception_that_is_unpickled_as_something_else_fails_its_own_call(method):
    """Its future is settled, and so are the others."""
    with PathosExecutor(1, start_method=method) as pool:
        with pytest.raises(ParallelError, match=r"unpickled as \{\}; correct its __reduce__"):
            pool.submit(raise_strange).result(timeout=30)
        with pytest.raises(ParallelError, match=r"unpickled as \{\}"):
            list(pool.map(lambda _: raise_strange(), [1]))
        assert pool.submit(abs, -1).result(timeout=30) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is always spawn")
def test_start_method_is_chosen_at_the_first_call():
    """A thread started after the pool was created may hold a lock, which a fork would copy."""
    program = """
        import threading
        from datamat.parallel import PathosExecutor

        lock, held, done = threading.Lock(), threading.Event(), threading.Event()

        def hold():
            with lock:
                held.set()
                done.wait()

        def use_the_lock():
            with lock:
                return "free"

        pool = PathosExecutor(1)
        assert pool.stats().start_method == "fork"
        threading.Thread(target=hold).start()
        held.wait()
        print(pool.submit(use_the_lock).result(timeout=30), pool.stats().start_method)
        done.set()
        pool.shutdown()
    """

    assert run(program) == "free forkserver\n"


class Exits:
    """Is interrupted while it is pickled, after some times that went well: a Ctrl-C comes at any moment."""

    def __init__(self, num_good):
        self.num_left = num_good

    def __reduce__(self):
        self.num_left -= 1
        if self.num_left < 0:
            raise KeyboardInterrupt
        return Exits, (0,)


class Scaled:
    def scale(self, x):
        return 2 * x


@pytest.mark.parametrize("num_good", [0, 1])
def test_interrupt_while_the_callable_is_pickled_releases_it(method, num_good):
    """No task will ever need it."""
    with PathosExecutor(1, start_method=method) as pool:
        assert pool.submit(abs, -1).result(timeout=30) == 1
        scaled = Scaled()
        freed = weakref.ref(scaled)
        scaled.exits = Exits(num_good)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(scaled.scale, 1)
        del scaled
        gc.collect()

        assert freed() is None
