"""A worker that retires ends after its task, and another takes its place: nothing is repeated, nothing logged."""

import concurrent.futures
import logging
import multiprocessing
import os
import threading

import pytest

from datamat.parallel import PathosExecutor, retire


def retire_and_tell(x):
    """Retire a few calls deep; return the argument and the process."""
    _give_up()
    return x, os.getpid()


def _give_up():
    retire()


def test_each_call_has_its_own_worker_if_all_retire(method):
    """The result of each call counts; a process that has retired runs nothing more."""
    with PathosExecutor(2, start_method=method) as pool:
        results = list(pool.map(retire_and_tell, range(8), chunksize=1))
        stats = pool.stats()

    assert [x for x, _ in results] == list(range(8))
    assert len({pid for _, pid in results}) == 8
    assert all(worker.tasks <= 1 for worker in stats.workers)


class Witness:
    """Counts how often each call begins, and retires in every tenth."""

    def __init__(self, path):
        self.path = path

    def run(self, x):
        with open(self.path, "a") as file:
            file.write(f"{x}\n")
        if x % 10 == 0:
            retire()
        return x


def test_calls_that_were_already_sent_run_once_elsewhere(method, tmp_path, caplog):
    """Nothing counts as a retry, which this pool does not allow; no death is reported."""
    witness = Witness(str(tmp_path / "begun"))
    caplog.set_level(logging.INFO)

    with PathosExecutor(2, start_method=method, max_retries=0) as pool:
        futures = [pool.submit(witness.run, x) for x in range(100)]
        results = [future.result(timeout=30) for future in futures]

    assert results == list(range(100))
    assert sorted(int(line) for line in (tmp_path / "begun").read_text().split()) == results
    assert not [record for record in caplog.records if record.name == "datamat.parallel"]


def retire_with_company():
    """Leave a thread behind that keeps the process from ending."""
    threading.Thread(target=threading.Event().wait).start()
    retire()
    return os.getpid()


@pytest.mark.long
def test_worker_that_cannot_end_is_ended(method):
    """A user's thread must not occupy a worker's place for ever."""
    with PathosExecutor(1, start_method=method) as pool:
        first = pool.submit(retire_with_company).result(timeout=20)
        second = pool.submit(os.getpid).result(timeout=20)

    assert second != first


def test_retire_does_nothing_in_the_caller():
    """Code of a task can also run there."""
    retire()

    with PathosExecutor(1) as pool:
        pid = pool.submit(os.getpid).result(timeout=20)
        assert pool.submit(os.getpid).result(timeout=20) == pid


def test_retire_does_nothing_in_workers_of_other_pools():
    """It can tell that they are not of this library."""
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        pids = {pool.submit(retire_and_tell, x).result(timeout=20)[1] for x in range(3)}

    assert len(pids) == 1
