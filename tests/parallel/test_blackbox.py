"""What a worker notes in its black box is there after its death, whatever ended it."""

from __future__ import annotations

import os
import signal

import pytest

from datamat.parallel.blackbox import BlackBox


@pytest.fixture
def box():
    """Give a box, closed at the end."""
    box = BlackBox.create()
    yield box
    box.close()


def die_after(work, box):
    """Run `work` with the child's descriptor of the box in a fork that is then killed."""
    theirs = box.share()
    child = os.fork()
    if child == 0:
        work(theirs)
        os.kill(os.getpid(), signal.SIGKILL)
    theirs.close()
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_number_and_stacks_outlive_the_worker(box):
    """The last number that was begun, and all that was written, apart from it."""

    def work(theirs):
        begun = theirs.begun()
        begun[0] = 41
        os.write(theirs.fileno(), b"first stack\n")
        begun[0] = 2**40 + 2
        os.write(theirs.fileno(), b"second stack\n")

    die_after(work, box)

    assert box.last_begun() == 2**40 + 2
    assert box.stacks() == "first stack\nsecond stack\n"


def test_new_box_says_that_nothing_was_begun(box):
    """As of a worker that died before its first task."""
    assert (box.last_begun(), box.stacks()) == (0, "")
