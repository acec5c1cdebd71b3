"""Who is to blame for the death of a worker: at most the first task it had not answered, and only once it began it."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from datamat.errors import TaskTimeout, WorkerDied
from datamat.parallel import payloads
from datamat.parallel.failures import Autopsy
from datamat.parallel.inquest import MAX_UNBEGUN, hold_inquest
from datamat.parallel.tasks import CodeBook, Task
from datamat.parallel.worker import Mode


@pytest.fixture
def codes():
    """A fresh book of callables."""
    return CodeBook()


def tasks_of(codes, count, num_calls=1):
    """Return calls of `abs` as a worker may have them, all under way."""
    code = codes.lend_once(abs)
    made = []
    for _ in range(count):
        codes.lend_again(code)
        packed = payloads.dumps_data([(-i,) for i in range(num_calls)])
        made.append(Task(code, packed, Future(), Mode.CHUNK, num_calls))
    return made


def death(last_begun):
    """Return what is known of a worker that was killed."""
    return Autopsy(7, -9, 0, last_begun, "", ())


def test_first_unanswered_task_is_blamed_if_it_was_begun(codes):
    """The others go on without it."""
    lost = tasks_of(codes, 3)

    verdict = hold_inquest(lost, death(lost[0].number), codes, timeout_s=None, max_retries=0)

    assert (verdict.failed, list(verdict.again)) == (lost[0], lost[1:])
    assert isinstance(verdict.error, WorkerDied)
    assert "ended while it ran this task: signal 9" in str(verdict.error)


def test_task_whose_callable_was_being_received_is_blamed(codes):
    """What kills may be the callable, or its `setup_worker`."""
    lost = tasks_of(codes, 2)

    verdict = hold_inquest(lost, death(lost[0].code.number), codes, timeout_s=None, max_retries=0)

    assert verdict.failed is lost[0]


@pytest.mark.parametrize("has_timed_out", [False, True])
def test_task_that_was_not_begun_goes_on_free_of_charge(codes, has_timed_out):
    """Also a chunk, which stays whole; the last thing that the worker began was answered."""
    for lost in (tasks_of(codes, 2), tasks_of(codes, 2, num_calls=5)):
        verdict = hold_inquest(lost, death(1), codes, timeout_s=1.0 if has_timed_out else None, max_retries=0)

        assert (verdict.failed, list(verdict.again), verdict.warning) == (None, lost, None)
        assert lost[0].tries == 0


def test_task_that_no_worker_lives_to_begin_is_given_up(codes):
    """Its size may be what kills them: it does not go round for ever."""
    lost = tasks_of(codes, 1)

    verdicts = [hold_inquest(lost, death(0), codes, timeout_s=None, max_retries=0) for _ in range(MAX_UNBEGUN)]

    assert [verdict.failed for verdict in verdicts] == [None] * (MAX_UNBEGUN - 1) + lost
    assert f"ended before it began this task, as {MAX_UNBEGUN - 1} others did" in str(verdicts[-1].error)


def test_begun_task_is_repeated_as_often_as_allowed(codes):
    """Each time but the last with a warning."""
    lost = tasks_of(codes, 1)

    verdicts = [hold_inquest(lost, death(lost[0].number), codes, timeout_s=None, max_retries=2) for _ in range(3)]

    assert [verdict.failed for verdict in verdicts] == [None, None, lost[0]]
    assert [bool(verdict.warning) for verdict in verdicts] == [True, True, False]
    assert "attempt 2 of 3 follows" in verdicts[0].warning


def test_task_that_ran_too_long_is_not_repeated(codes):
    """However many retries there are: it would be as slow again."""
    lost = tasks_of(codes, 2)

    verdict = hold_inquest(lost, death(lost[0].number), codes, timeout_s=0.5, max_retries=9)

    assert (verdict.failed, list(verdict.again)) == (lost[0], lost[1:])
    assert isinstance(verdict.error, TaskTimeout)


def test_chunk_that_killed_is_taken_apart(codes):
    """So that only the guilty one of its calls is blamed, when it kills again."""
    lost = tasks_of(codes, 2, num_calls=4)

    verdict = hold_inquest(lost, death(lost[0].number), codes, timeout_s=None, max_retries=0)

    assert verdict.failed is None
    assert [task.count for task in verdict.again] == [1, 1, 1, 1, 4]
