"""What a worker notes is there after its death, whatever ended it, and worded in one place."""

import os
import signal

import pytest

from datamat.errors import WorkerDied
from datamat.parallel import PathosExecutor
from datamat.parallel.crash import CrashNote, WorkerExit, own_note


@pytest.fixture
def note():
    note = CrashNote.create()
    yield note
    note.close()


def die_after(work, note):
    """Run `work` with the child's descriptor of the note, in a fork that is then killed."""
    theirs = note.share()
    child = os.fork()
    if child == 0:
        work(theirs, theirs.open())
        os.kill(os.getpid(), signal.SIGKILL)
    theirs.close()
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("last", "step"), [(2**40 + 2, (42, 1)), (2**40 + 3, (0, 0))], ids=["last task", "earlier task"]
)
def test_number_step_and_stacks_outlive_the_worker(last, step, note):
    """The note keeps the last number, all stacks apart, and the last step, but not that of an earlier task."""

    def work(theirs, begun):
        begun[0] = 41
        os.write(theirs.fileno(), b"first stack\n")
        begun[0] = 2**40 + 2
        theirs.write_step(41, 7)
        theirs.write_step(42, 1)
        begun[0] = last
        os.write(theirs.fileno(), b"second stack\n")

    assert (note.last_begun(), note.step(), note.stacks()) == (0, (0, 0), "")

    die_after(work, note)

    assert (note.last_begun(), note.step(), note.stacks()) == (last, step, "first stack\nsecond stack\n")


def die_at(*step):
    own_note().write_step(*step)
    os.kill(os.getpid(), signal.SIGKILL)


def test_error_of_a_death_has_the_step_of_its_task(method):
    """It has none if the task noted nothing; the caller's own process has no note."""
    with PathosExecutor(1, start_method=method) as pool:
        with pytest.raises(WorkerDied) as noted:
            pool.submit(die_at, 3, 2**40).result(timeout=20)
        with pytest.raises(WorkerDied) as silent:
            pool.submit(os._exit, 3).result(timeout=20)

    assert own_note() is None
    assert noted.value.worker_exit.step == (3, 2**40)
    assert silent.value.worker_exit.step == (0, 0)


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [(3, "exit code 3"), (-signal.SIGSEGV, "SIGSEGV"), (-signal.SIGKILL, "out-of-memory"), (-40, "real-time signal")],
)
def test_end_of_a_worker_is_described(exitcode, words):
    ended = WorkerExit(7, exitcode, 3 << 20, 0, stack="in read\n", log_lines=("half way",))

    for part in (words, "3 MiB", "in read\n", "half way"):
        assert part in ended.describe()
    assert "limit_s=0.5" in ended.describe_timeout("limit_s", 0.5)
