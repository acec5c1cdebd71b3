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
def functions():
    """Return an empty table of callables."""
    return FunctionTable()


def tasks_of(functions, count, num_calls=1):
    """Return calls of `abs` as a worker may have them, all under way."""
    remote = functions.acquire_for_map(abs)
    made = []
    for _ in range(count):
        functions.add_tasks(remote)
        items = [(-i,) for i in range(num_calls)]
        made.append(Task(remote, pickling.dumps_items(items)[0], Future(), Mode.CHUNK, items))
    return made


def death(last_begun):
    """Return what the pool knows of a worker that was killed."""
    return WorkerExit(7, -9, 0, last_begun)


def test_first_unanswered_task_is_blamed_if_it_was_begun(functions):
    """The other tasks are requeued."""
    lost = tasks_of(functions, 3)

    decision = blame(lost, death(lost[0].number), functions, timeout_s=None, max_retries=0)

    assert (decision.failed, list(decision.again)) == (lost[0], lost[1:])
    assert isinstance(decision.error, WorkerDied)
    assert "ended while it ran this task: signal 9" in str(decision.error)


def test_task_whose_callable_was_being_received_is_blamed(functions):
    """The callable, or its `setup_worker`, may be what kills."""
    lost = tasks_of(functions, 2)

    decision = blame(lost, death(lost[0].remote.number), functions, timeout_s=None, max_retries=0)

    assert decision.failed is lost[0]


@pytest.mark.parametrize("has_timed_out", [False, True])
def test_task_that_was_not_begun_is_requeued_without_blame(functions, has_timed_out):
    """A chunk stays whole, too; the last task that the worker began was answered."""
    for lost in (tasks_of(functions, 2), tasks_of(functions, 2, num_calls=5)):
        decision = blame(lost, death(1), functions, timeout_s=1.0 if has_timed_out else None, max_retries=0)

        assert (decision.failed, list(decision.again), decision.warning) == (None, lost, None)
        assert lost[0].tries == 0


def test_task_that_no_worker_lives_to_begin_is_given_up(functions):
    """Its size may be what kills workers: it is not retried for ever."""
    lost = tasks_of(functions, 1)

    decisions = [blame(lost, death(0), functions, timeout_s=None, max_retries=0) for _ in range(MAX_UNBEGUN)]

    assert [decision.failed for decision in decisions] == [None] * (MAX_UNBEGUN - 1) + lost
    assert f"ended before it began this task, as {MAX_UNBEGUN - 1} others did" in str(decisions[-1].error)


def test_begun_task_is_repeated_as_often_as_allowed(functions):
    """Each repetition is announced by a warning."""
    lost = tasks_of(functions, 1)

    decisions = [blame(lost, death(lost[0].number), functions, timeout_s=None, max_retries=2) for _ in range(3)]

    assert [decision.failed for decision in decisions] == [None, None, lost[0]]
    assert [bool(decision.warning) for decision in decisions] == [True, True, False]
    assert "attempt 2 of 3 follows" in decisions[0].warning


def test_task_that_ran_too_long_is_not_repeated(functions):
    """It would take as long again, however many retries are left."""
    lost = tasks_of(functions, 2)

    decision = blame(lost, death(lost[0].number), functions, timeout_s=0.5, max_retries=9)

    assert (decision.failed, list(decision.again)) == (lost[0], lost[1:])
    assert isinstance(decision.error, TaskTimeout)


def test_chunk_that_killed_is_taken_apart(functions):
    """If it kills again, only the guilty call is blamed."""
    lost = tasks_of(functions, 2, num_calls=4)

    decision = blame(lost, death(lost[0].number), functions, timeout_s=None, max_retries=0)

    assert decision.failed is None
    assert [task.count for task in decision.again] == [1, 1, 1, 1, 4]
