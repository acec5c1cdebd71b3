"""A task that no worker has begun is to blame for no death, but not for ever; `test_death.py` has the others."""

from __future__ import annotations

import pytest

from datamat.parallel.crash import WorkerExit
from datamat.parallel.dispatcher import MAX_UNBEGUN, blame
from datamat.parallel.tasks import CallFuture, FunctionTable, Task
from datamat.parallel.worker import Mode


@pytest.fixture
def lost():
    """Return a function that makes calls of `abs` as a dead worker may have had them."""

    def make(count, num_calls=1):
        remote = make.functions.acquire_for_map(abs)
        tasks = []
        for _ in range(count):
            make.functions.add_tasks(remote)
            items = [(-i,) for i in range(num_calls)]
            tasks.append(Task(remote, items, CallFuture(), Mode.CHUNK))
        return tasks

    make.functions = FunctionTable()
    return make


def decide(lost, tasks, last_begun, timeout_s=None):
    """Decide after a worker was killed that had last begun a certain number."""
    ended = WorkerExit(7, -9, 0, last_begun)
    return blame(tasks, ended, lost.functions, timeout_s=timeout_s, max_retries=0)


@pytest.mark.parametrize("timeout_s", [None, 1.0])
@pytest.mark.parametrize("num_calls", [1, 5])
def test_task_that_was_not_begun_is_requeued_without_blame(lost, timeout_s, num_calls):
    """A chunk stays whole, too; the last task that the worker began was answered."""
    tasks = lost(2, num_calls)

    decision = decide(lost, tasks, 1, timeout_s)

    assert (decision.failed, list(decision.again), decision.warning) == (None, tasks, None)
    assert tasks[0].tries == 0


def test_task_that_no_worker_lives_to_begin_is_given_up(lost):
    """Its size may be what kills workers: it is not retried for ever."""
    tasks = lost(1)

    decisions = [decide(lost, tasks, 0) for _ in range(MAX_UNBEGUN)]

    assert [decision.failed for decision in decisions] == [None] * (MAX_UNBEGUN - 1) + tasks
