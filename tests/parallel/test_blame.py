"""Who is to blame for the death of a worker: at most the first task it had not answered, and only once it began it."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from datamat.errors import TaskTimeout, WorkerDied
from datamat.parallel import pickling
from datamat.parallel.crash import WorkerExit
from datamat.parallel.dispatcher import MAX_UNBEGUN, blame
from datamat.parallel.tasks import FunctionTable, Task
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
            tasks.append(Task(remote, pickling.dumps_items(items)[0], Future(), Mode.CHUNK, items))
        return tasks

    make.functions = FunctionTable()
    return make


def decide(lost, tasks, last_begun, timeout_s=None, max_retries=0):
    """Decide after a worker was killed that had last begun a certain number."""
    ended = WorkerExit(7, -9, 0, last_begun)
    return blame(tasks, ended, lost.functions, timeout_s=timeout_s, max_retries=max_retries)


@pytest.mark.parametrize(
    ("number_of", "timeout_s", "max_retries", "error"),
    [
        pytest.param(lambda task: task.number, None, 0, WorkerDied, id="begun"),
        pytest.param(lambda task: task.remote.number, None, 0, WorkerDied, id="its callable was being received"),
        pytest.param(lambda task: task.number, 0.5, 9, TaskTimeout, id="too long: never repeated"),
    ],
)
def test_first_unanswered_task_fails_and_the_others_are_requeued(lost, number_of, timeout_s, max_retries, error):
    tasks = lost(3)

    decision = decide(lost, tasks, number_of(tasks[0]), timeout_s, max_retries)

    assert (decision.failed, list(decision.again)) == (tasks[0], tasks[1:])
    assert isinstance(decision.error, error)


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


def test_begun_task_is_repeated_as_often_as_allowed(lost):
    """Each repetition is announced by a warning."""
    tasks = lost(1)

    decisions = [decide(lost, tasks, tasks[0].number, max_retries=2) for _ in range(3)]

    assert [decision.failed for decision in decisions] == [None, None, *tasks]
    assert [bool(decision.warning) for decision in decisions] == [True, True, False]


def test_chunk_that_killed_is_taken_apart(lost):
    """If it kills again, only the guilty call is blamed."""
    tasks = lost(2, num_calls=4)

    decision = decide(lost, tasks, tasks[0].number)

    assert decision.failed is None
    assert [task.count for task in decision.again] == [1, 1, 1, 1, 4]
