"""From import to exit: what a pool leaves behind is nothing, and it leaves the caller as it was."""

import gc
import multiprocessing
import os
import random
import signal
import threading

import psutil
import pytest
from fresh import METHODS, run
from pathos.helpers import mp

from datamat.errors import OptionError
from datamat.parallel import PathosExecutor


def test_import_is_cheap():
    """It loads neither dill nor pathos, and neither a pool nor its workers load a numeric library."""
    program = """
        import sys, datamat.parallel
        NAMES = {"numpy", "tensorflow", "torch", "pyarrow", "cv2", "albumentations", "psutil"}
        def heavy(_): return NAMES & sys.modules.keys()
        print(heavy(0) | {"dill", "pathos", "multiprocess"} & sys.modules.keys())
        from datamat.parallel import PathosExecutor
        with PathosExecutor(1, start_method="spawn") as pool: print(list(pool.map(heavy, [0])), heavy(0))
    """

    assert run(program) == "set()\n[set()] set()\n"


def snapshot():
    """Return what a pool might leave: the number of descriptors, children and threads."""
    process = psutil.Process()
    gc.collect()
    return process.num_fds(), {child.pid for child in process.children()}, set(threading.enumerate())


def assert_nothing_is_new_since(before):
    """Compare with a snapshot; what earlier tests left may have ended meanwhile."""
    for found, known in zip(snapshot(), before, strict=True):
        assert found <= known


def use_pool(method):
    with PathosExecutor(2, start_method=method) as pool:
        assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]


@pytest.mark.sample(3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", METHODS)
def test_pools_leave_nothing_behind(request, method, monkeypatch):
    prefix = f"/datamat-test-{os.getpid()}"  # other tests make semaphores meanwhile
    for library in (multiprocessing, mp):
        monkeypatch.setitem(library.current_process()._config, "semprefix", prefix)
    use_pool(method)  # a forkserver stays for the session
    before = snapshot()

    for _ in range(
        {"fork": 20, "forkserver": 5, "spawn": 2}[method] * (1 if request.config.getoption("--commit") else 10)
    ):
        use_pool(method)

    assert_nothing_is_new_since(before)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"sem.{prefix[1:]}")]


def test_pool_that_cannot_start_leaves_nothing_behind(method):
    """Here it cannot start a thread; the next call tries again."""
    use_pool(method)
    before = snapshot()
    pool = PathosExecutor(2, start_method=method)
    size = threading.stack_size(1 << 46)
    try:
        for _ in range(5):
            with pytest.raises(RuntimeError, match="start new thread"):
                pool.submit(abs, -1).result()
    finally:
        threading.stack_size(size)

    assert_nothing_is_new_since(before)
    assert pool.submit(abs, -1).result() == 1
    pool.shutdown()


EXIT = """
import sys, atexit, time
from datamat.parallel import PathosExecutor
def late():
    try:
        pool.submit(abs, 1)
    except RuntimeError as error:
        print(error, flush=True)
atexit.register(late)
def tell(x):
    time.sleep(0.2)
    print(x, flush=True)
pool = PathosExecutor(1, start_method=sys.argv[1])
pool.submit(tell, "done")
if sys.argv[2] == "shutdown":
    pool.shutdown(wait=False)
"""


@pytest.mark.parametrize("how", ["nothing", "shutdown"])
def test_interpreter_exit_waits_for_what_was_submitted(method, how):
    """As in the standard library; later calls are refused."""
    late = "cannot schedule new futures after " + ("shutdown" if how == "shutdown" else "interpreter shutdown")

    assert run(EXIT, method, how) == f"done\n{late}\n"


def state_of_the_caller():
    return (
        os.sched_getaffinity(0), dict(os.environ), multiprocessing.get_start_method(allow_none=True),
        mp.get_start_method(allow_none=True), [signal.getsignal(n) for n in (2, 15, 17)], random.getstate(),
        os.getcwd(), signal.pthread_sigmask(signal.SIG_BLOCK, []),
    )  # fmt: skip


def test_caller_is_left_as_it_was(method):
    before = state_of_the_caller()

    use_pool(method)

    assert state_of_the_caller() == before


def test_shutdown_can_cancel_what_waits(method):
    pool = PathosExecutor(1, start_method=method)
    gate = mp.Event()
    running = pool.submit(pause)
    while not running.running():
        pass
    waiting = [pool.submit(abs, i) for i in range(10)]
    gate.set()

    pool.shutdown(cancel_futures=True)

    assert running.result(timeout=0) == "rested"
    assert all(future.cancelled() for future in waiting)


def pause():
    import time

    time.sleep(0.2)
    return "rested"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_workers": 0}, "max_workers must be greater than 0; it is 0"),
        ({"task_timeout_s": 0}, "task_timeout_s is 0; pass seconds above 0"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"affinity": "some"}, "affinity is 'some'; pass 'physical', 'pinned' or None"),
        ({"start_method": "thread"}, "start_method is 'thread'; pass one of fork, forkserver, spawn"),
    ],
)
def test_nonsense_options_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        PathosExecutor(**options)


def environment():
    return os.environ.get("OMP_NUM_THREADS"), os.environ.get("DATAMAT_TEST"), sorted(os.sched_getaffinity(0))


def make_folder(path):
    os.mkdir(path)
    return os.stat(path).st_mode & 0o777


def test_workers_have_the_umask_of_their_parent_as_it_is_now(method, tmp_path):
    """So do workers from a server that was started under another umask."""
    old = os.umask(0o022)
    modes = []
    try:
        for umask in (0o022, 0o077):
            os.umask(umask)
            with PathosExecutor(1, start_method=method) as pool:
                modes.append(pool.submit(make_folder, str(tmp_path / str(umask))).result(timeout=20))
            assert os.umask(umask) == umask
    finally:
        os.umask(old)

    assert modes == [0o755, 0o700]


@pytest.mark.parametrize("set_by_user", [None, "3"])
def test_workers_see_the_environment_and_their_share_of_threads(method, set_by_user, monkeypatch):
    """They see what the caller set after the forkserver began, and libraries start no more threads than the share.

    Whoever sets OMP_NUM_THREADS means it.
    """
    monkeypatch.setenv("DATAMAT_TEST", method)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)

    with PathosExecutor(2, start_method=method, affinity="pinned") as pool:
        threads, variable, mask = pool.submit(environment).result(timeout=20)

    assert threads == set_by_user or (set_by_user is None and int(threads) >= 1)
    assert variable == method
    assert len(mask) == 1


def test_stats_give_start_method_and_work(method):
    with PathosExecutor(2, start_method=method) as pool:
        list(pool.map(abs, range(10), chunksize=1))
        stats = pool.stats()

    assert (stats.start_method, stats.reason) == (method, "asked for")
    assert sum(worker.tasks for worker in stats.workers) == 10
    assert max(worker.peak_rss_bytes for worker in stats.workers) > 1_000_000
