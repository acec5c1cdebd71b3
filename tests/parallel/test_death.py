"""A worker's death is an error of one call, at most; it is never a hang, wherever it strikes."""

import ctypes
import itertools
import logging
import os
import pickle
import signal
import tempfile
import threading
import time
from concurrent.futures import BrokenExecutor, as_completed
from pathlib import Path

import psutil
import pytest
from fresh import METHODS, environment, run, start

from datamat.errors import BrokenPoolError, TaskTimeout, WorkerDied
from datamat.parallel import PathosExecutor
from datamat.parallel.dispatcher import MAX_UNBEGUN


def die(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "exit":
        os._exit(7)
    elif how == "segfault":
        ctypes.string_at(0)


class Killer:
    def __init__(self, place, flag=None):
        self.place = place
        self.flag = flag
        self.lock = threading.RLock()

    def _die_once(self):
        if self.flag is None or not os.path.exists(self.flag):
            if self.flag is not None:
                Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, x):
        if self.place == "running":
            self._die_once()
        if self.place == "holding a lock":
            with self.lock:
                self._die_once()
        if self.place == "logging":
            logging.getLogger("killer").info("last words")
            self._die_once()
        if self.place == "sending":
            return Bomb(self, x)
        return x * 2


class Bomb:
    """Kills its process in the middle of being pickled, behind much data."""

    def __init__(self, killer, x):
        self.data = bytes(10_000_000)
        self.killer, self.x = killer, x

    def __reduce__(self):
        if os.path.exists(self.killer.flag):
            return int, (self.x * 2,)
        self.killer._die_once()
        raise AssertionError("it is dead")


@pytest.mark.parametrize(
    ("how", "number", "exitcode"),
    [("kill", signal.SIGKILL, -9), ("term", signal.SIGTERM, -15), ("segfault", signal.SIGSEGV, -11), ("exit", None, 7)],
)
def test_death_is_the_error_of_its_call_alone(method, how, number, exitcode):
    """The error says how the worker ended, also after it was pickled; all other calls finish."""
    with PathosExecutor(2, start_method=method) as pool:
        doomed = pool.submit(die, how)
        others = [pool.submit(abs, -i) for i in range(20)]
        with pytest.raises(WorkerDied, match=r"die\[\d+\]: worker \d+ ended while it ran this task") as caught:
            doomed.result(timeout=20)
        assert [future.result(timeout=20) for future in others] == list(range(20))

    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.signal, error.exitcode) == (number, exitcode)
        assert error.peak_rss_bytes >= 0
        assert error.task.startswith("die[")
        assert ("in die" in error.stack) == (how == "segfault")


def test_death_report_shows_the_last_log_lines(method):
    """No line is lost, although the worker dies right after logging."""
    logging.getLogger("killer").setLevel(logging.INFO)

    with PathosExecutor(1, start_method=method) as pool, pytest.raises(WorkerDied, match="last words") as caught:
        pool.submit(Killer("logging").run, 1).result(timeout=20)

    assert caught.value.log_lines == ("last words",)


@pytest.mark.parametrize("place", ["running", "holding a lock", "logging", "sending"])
def test_lost_call_is_repeated_on_a_fresh_worker(method, place, tmp_path):
    killer = Killer(place, str(tmp_path / "flag"))

    with PathosExecutor(2, start_method=method, max_retries=1) as pool:
        futures = [pool.submit(killer.run, x) for x in range(12)]
        results = [future.result(timeout=30) for future in futures]

    assert results == [2 * x for x in range(12)]


def die_on(x):
    if x == 37:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_only_the_guilty_call_of_a_chunk_fails(method):
    """The others run again, and their results come in their turn."""
    got = []
    with PathosExecutor(2, start_method=method) as pool:
        stream = pool.map(die_on, range(100), chunksize=25)
        with pytest.raises(WorkerDied, match=r"die_on\[\d+\]: worker"):
            got.extend(iter(stream.__next__, object()))

    assert got == list(range(37))


@pytest.mark.parametrize("method", METHODS)
def test_call_is_repeated_as_often_as_allowed(method):
    with PathosExecutor(1, start_method=method, max_retries=2) as pool:
        with pytest.raises(WorkerDied, match=r"\(3 attempts\)"):
            pool.submit(die, "kill").result(timeout=20)
        assert pool.submit(abs, -1).result(timeout=20) == 1


def test_idle_worker_that_dies_is_replaced(method):
    """A call sent to it before anyone noticed is not blamed: nothing was lost, so nothing is reported."""
    with PathosExecutor(1, start_method=method) as pool:
        first = pool.submit(os.getpid).result(timeout=20)
        os.kill(first, signal.SIGKILL)
        second = pool.submit(os.getpid).result(timeout=20)

    assert second != first


def test_call_that_was_only_delivered_is_not_blamed(method, caplog):
    """The worker is stopped before it can begin the call, and then killed; no retry is used up."""
    with PathosExecutor(1, start_method=method, max_retries=0) as pool:
        for _ in range(MAX_UNBEGUN - 1):
            stopped = pool.submit(os.getpid).result(timeout=20)
            os.kill(stopped, signal.SIGSTOP)
            futures = [pool.submit(abs, -i) for i in range(3)]
            while pool._dispatcher.progress().in_flight == 0:
                time.sleep(0.001)
            os.kill(stopped, signal.SIGKILL)
            assert [future.result(timeout=20) for future in futures] == [0, 1, 2]

    assert not [record for record in caplog.records if record.name == "datamat.parallel"]


class KillsWhenUnpickled:
    """Stands for data that crashes the library that reads it."""

    def __reduce__(self):
        return os._exit, (9,)

    def run(self):
        raise AssertionError("it is never there to be called")


def test_call_that_kills_while_it_is_received_is_given_up():
    """It has as many attempts as a call that dies half-way."""
    bomb = KillsWhenUnpickled()
    with PathosExecutor(1, start_method="forkserver", max_retries=1) as pool:
        pool.submit(abs, -1).result(timeout=20)
        for arguments in ((bomb.run,), (id, bomb)):
            with pytest.raises(WorkerDied, match="exit code 9") as caught:
                pool.submit(*arguments).result(timeout=20)
            assert "(2 attempts)" in str(caught.value)
        assert pool.submit(abs, -2).result(timeout=20) == 2


def wait_until_gone(pid):
    """Wait for a process to end; whether its new parent has reaped it does not matter here."""
    for _ in range(2000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.005)
    raise AssertionError(f"process {pid} is still there")


def test_stopped_worker_does_not_stall_the_others(method):
    """A process that reads nothing must not block the dispatcher, however much is sent to it."""
    with PathosExecutor(2, start_method=method) as pool:
        stopped = pool.submit(os.getpid).result(timeout=20)
        os.kill(stopped, signal.SIGSTOP)
        futures = [pool.submit(len, bytes(3_000_000)) for _ in range(6)]
        assert len(list(itertools.islice(as_completed(futures, timeout=20), 5))) == 5
        os.kill(stopped, signal.SIGCONT)
        assert [future.result(timeout=20) for future in futures] == [3_000_000] * 6


def fail_at_start():
    raise RuntimeError("no GPU")


def test_initializer_that_fails_ends_the_pool_with_its_traceback(method):
    """Every call, waiting or new, fails with the cause, as an error that code for any executor catches."""
    with PathosExecutor(2, start_method=method, initializer=fail_at_start) as pool:
        for number in range(5):  # the first is waiting when the pool breaks; the others may be refused at once
            with pytest.raises(BrokenExecutor, match="RuntimeError: no GPU"):
                pool.submit(abs, number).result(timeout=20)


def test_workers_that_keep_dying_at_start_end_the_pool(method):
    with PathosExecutor(2, start_method=method, initializer=die, initargs=("exit",)) as pool:
        future = pool.submit(abs, 1)
        with pytest.raises(BrokenPoolError, match=r"3 workers in a row ended while they started: exit code 7"):
            future.result(timeout=30)


def sleep_long():
    time.sleep(600)


def spin():
    while True:
        pass


def do_nothing():
    pass


def _import_this_module(pool):
    """Import in the worker what the calls need: a call's time counts from when the worker gets it."""
    while True:
        try:
            return pool.submit(do_nothing).result(timeout=20)
        except TaskTimeout:
            continue


@pytest.mark.parametrize("function", [sleep_long, spin])
def test_timeout_kills_and_shows_the_python_stack(method, function):
    """The worker is replaced; the others are not affected."""
    with PathosExecutor(1, start_method=method, task_timeout_s=1.5) as pool:
        _import_this_module(pool)
        slow = pool.submit(function)
        with pytest.raises(
            TaskTimeout, match=rf"{function.__name__}\[\d+\]: it ran longer than task_timeout_s=1.5"
        ) as caught:
            slow.result(timeout=20)
        assert pool.submit(abs, -5).result(timeout=20) == 5

    assert f"in {function.__name__}" in caught.value.stack


def stop_oneself():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.long
def test_timeout_of_a_stopped_worker_kills_it(method):
    """It cannot write its stack, but it is replaced all the same."""
    with PathosExecutor(1, start_method=method, task_timeout_s=1.5) as pool:
        with pytest.raises(TaskTimeout):
            pool.submit(stop_oneself).result(timeout=20)
        assert pool.submit(abs, -5).result(timeout=20) == 5


PARENT = """
import os, sys, time
from datamat.parallel import PathosExecutor
def spin(_):
    while True: pass
pool = PathosExecutor(2, start_method=sys.argv[1])
pids = [pool.submit(os.getpid).result()]
stream = [pool.submit(spin, i) for i in range(2)]
while len(pool.stats().workers) < 2: time.sleep(0.01)
print(*[w.pid for w in pool.stats().workers], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("method", "number"),
    [("fork", signal.SIGKILL), ("forkserver", signal.SIGTERM), ("spawn", signal.SIGKILL)],
)
def test_workers_end_with_their_parent(method, number):
    """Even in the middle of a call that never returns to Python's loop; no temporary file stays."""
    with tempfile.TemporaryDirectory() as folder, start(PARENT, method, env=environment(TMPDIR=folder)) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        pids += [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        parent.send_signal(number)
        parent.wait()

        for pid in pids:
            wait_until_gone(pid)
        assert len(pids) >= 4
        assert os.listdir(folder) == []


FORKING = PARENT.replace("print(*", "child = os.fork()\nif child == 0: time.sleep(600)\nprint(child, *")


def test_process_that_the_parent_forked_does_not_keep_workers_alive(method):
    """Otherwise it would hold the parent's ends of their lifelines."""
    with start(FORKING, method) as parent:
        child, *pids = (int(word) for word in parent.stdout.readline().split())
        parent.kill()
        parent.wait()
        try:
            for pid in pids:
                wait_until_gone(pid)
            assert Path(f"/proc/{child}").exists()
        finally:
            os.kill(child, signal.SIGKILL)


INTERRUPTED_FORK = """
import os, signal
import psutil
from datamat.parallel import PathosExecutor

def interrupt():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), name)

left = 0
os.register_at_fork(after_in_parent=interrupt)
for name in (signal.SIGINT, signal.SIGTERM):
    signal.signal(name, signal.default_int_handler)
    for number in (1, 2, 3):
        with PathosExecutor(3, start_method="fork") as pool:
            left = number
            try:
                pool.submit(abs, -1)
            except KeyboardInterrupt:
                print("interrupted", psutil.Process().children())
            print(pool.submit(abs, -1).result())
"""


def test_interrupt_between_forks_leaves_no_worker_behind():
    """Such workers would wait for tasks, and the end of the program for them."""
    assert run(INTERRUPTED_FORK) == "interrupted []\n1\n" * 6


INTERRUPTED = """
import os, signal, sys, threading, time
from datamat.parallel import PathosExecutor
signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background has it ignored
def sleep(_): time.sleep(600)
try:
    with PathosExecutor(2, start_method=sys.argv[1]) as pool:
        pool.submit(abs, 1).result()
        futures = [pool.submit(sleep, i) for i in range(10)]
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        futures[0].result()
except KeyboardInterrupt:
    print("interrupted", flush=True)
with PathosExecutor(2, start_method=sys.argv[1]) as pool:
    print(list(pool.map(abs, [-1, -2])), flush=True)
"""


def test_interrupt_ends_the_calls_and_leaves_the_interpreter_usable(method):
    """The stop button of a notebook does the same: only the parent gets the signal."""
    assert run(INTERRUPTED, method) == "interrupted\n[1, 2]\n"


def test_terminate_ends_running_calls_at_once(method):
    """Running calls fail; waiting calls are cancelled."""
    pool = PathosExecutor(1, start_method=method)
    running = pool.submit(sleep_long)
    waiting = pool.submit(abs, 1)
    while not running.running():
        time.sleep(0.005)

    pool.terminate()

    with pytest.raises(BrokenPoolError, match="shut down"):
        running.result(timeout=5)
    assert waiting.cancelled()
