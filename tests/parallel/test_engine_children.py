"""Children of the workers of an engine, in which its calls are made: how long they live, and how many there are."""

import _thread
import concurrent.futures
import os
import pickle
import threading
import time

import psutil
import pytest

from datamat.parallel import engines
from datamat.testing import InlineExecutor


def own_pid(_=None):
    return os.getpid()


@pytest.fixture
def open_job():
    """Open an engine of two threads of this process; return a function that makes calls there."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:

        def open_one():
            return engines.open_engine(pool)

        yield open_one


def wait_until(holds):
    """Return once it holds; the time-out of the test ends it otherwise."""
    while not holds():
        time.sleep(0.01)


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_calls_of_a_job_have_one_child_and_those_of_two_threads_two(open_job, tmp_path):
    """It is kept from one call to the next, and ends with the job."""
    with open_job() as executor:
        alone = {executor.submit(own_pid).result() for _ in range(3)}
        both = list(map(executor.submit, [meet] * 2, [tmp_path] * 2))
        pids = {future.result() for future in both}

    assert len(alone) == 1 and len(pids) == 2 and alone < pids
    assert os.getpid() not in pids
    wait_until(lambda: all(map(has_ended, pids)))


def meet(folder):
    """Return once another process makes the same call."""
    (folder / str(os.getpid())).touch()
    wait_until(lambda: len(list(folder.iterdir())) > 1)
    return os.getpid()


def test_child_without_calls_ends_and_the_next_call_has_another(open_job, monkeypatch):
    """Between jobs a worker of a cluster may wait for hours."""
    monkeypatch.setattr(engines, "_IDLE_S", 0.05)
    with open_job() as executor:
        first = executor.submit(own_pid).result()
        wait_until(lambda: has_ended(first))

        assert executor.submit(own_pid).result() != first


def test_jobs_one_after_the_other_leave_few_children(open_job, monkeypatch):
    """Where they begin elsewhere, nobody says when they end."""
    end_job, pids = engines._Child.end_job, []
    monkeypatch.setattr(engines._Child, "end_job", lambda _: None)
    jobs = []
    for _ in range(5):
        with open_job() as executor:
            pids.append(executor.submit(own_pid).result())
            jobs.append(executor.job)

    assert len(set(pids)) == 5
    wait_until(lambda: sum(map(has_ended, pids)) == 2)
    assert not any(map(has_ended, pids[2:]))
    for job in jobs:
        end_job(job)


class Elsewhere(InlineExecutor):
    """Makes each call at once, with what it is sent."""

    def submit(self, fn, /, *args):
        return super().submit(pickle.loads(pickle.dumps(fn)), *args)


def test_call_that_is_interrupted_takes_its_child_along(tmp_path):
    """As Ray interrupts one that is cancelled: not by a signal, which would wake the thread."""

    def interrupt():
        wait_until(lambda: list(tmp_path.iterdir()))
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with engines.open_engine(Elsewhere()) as executor, pytest.raises(KeyboardInterrupt):
        executor.submit(wait_for_ever, tmp_path)
    thread.join()

    (named,) = tmp_path.iterdir()
    wait_until(lambda: has_ended(int(named.name)))


def wait_for_ever(folder):
    (folder / str(os.getpid())).touch()
    threading.Event().wait()
