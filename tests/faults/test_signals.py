"""Signals to the run and to its workers, and a second run beside it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import sys

import pytest
import sets
from injury import Process, check_visible, left_behind, wait_until
from job import Job

GRACE_S = 5.0
MARGIN_S = 5.0  # what a loaded machine may add to it
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


METHODS = ("fork", "forkserver", "spawn")
INTERRUPTS = [
    ("fork", "parent", signal.SIGINT),
    ("fork", "group", signal.SIGTERM),
    ("forkserver", "group", signal.SIGINT),
    ("spawn", "parent", signal.SIGTERM),
]


@pytest.fixture
def job_by(small_source, tmp_path):
    """Make the job with a start method."""
    return lambda method: Job(str(small_source), str(tmp_path / "out"), start_method=method)


def resumed(job, folder, whole):
    """Run the job again; check that it makes the same bytes and leaves nothing."""
    with Process(job, folder) as again:
        ended = again.ended()
    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert sets.digests(job.output) == whole
    assert left_behind(pathlib.Path(job.output)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("method", "target", "number"), INTERRUPTS)
def test_interrupt_ends_a_run_in_time_although_a_row_never_ends(job_by, tmp_path, whole, method, target, number):
    """Within five seconds, with an exit code that is not 0, no process left, and work to go on from."""
    job = job_by(method)
    with Process(job, tmp_path, is_gated=True) as process:
        process.wait_at_gate()
        (os.kill if target == "parent" else os.killpg)(process.popen.pid, number)
        ended = process.ended(GRACE_S + MARGIN_S)

    assert ended.code not in {0, None}, ended.said
    assert ended.num_orphans == 0
    assert not (pathlib.Path(job.output) / "manifest.json").exists()
    check_visible(pathlib.Path(job.output), whole)
    resumed(job, tmp_path, whole)


@pytest.mark.slow
def test_worker_that_is_stopped_for_a_while_costs_nothing(job_by, tmp_path, whole):
    """SIGSTOP, and SIGCONT once the other worker has done what can be done without it."""
    job = job_by("fork")
    with Process(job, tmp_path, is_gated=True) as process:
        worker = process.wait_at_gate()
        worker.suspend()
        wait_until(lambda: any(pathlib.Path(job.output).glob("*-val-*.tfrecord")))
        worker.resume()
        process.open_gate()
        ended = process.ended()

    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert sets.digests(job.output) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "number"), [("fork", signal.SIGKILL), ("forkserver", signal.SIGKILL), ("spawn", signal.SIGTERM)]
)
def test_stopped_worker_ends_with_its_run(job_by, tmp_path, whole, method, number):
    """A process that is stopped notices nothing by itself; it is gone two seconds after its parent all the same."""
    job = job_by(method)
    with Process(job, tmp_path, is_gated=True) as process:
        worker = process.wait_at_gate()
        worker.suspend()
        process.popen.send_signal(number)
        ended = process.ended(GRACE_S + MARGIN_S)

    assert ended.code not in {0, None}, ended.said
    assert ended.num_orphans == 0
    resumed(job, tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_parent_takes_busy_workers_along(job_by, tmp_path, whole, method):
    """Two seconds after the parent, no worker lives, although one is in the middle of a row."""
    job = job_by(method)
    with Process(job, tmp_path, is_gated=True) as process:
        process.wait_at_gate()
        process.popen.kill()
        ended = process.ended(MARGIN_S)

    assert (ended.code, ended.num_orphans) == (-signal.SIGKILL, 0)
    resumed(job, tmp_path, whole)


@pytest.mark.slow
def test_second_run_on_an_output_is_refused_and_harms_nothing(small_source, tmp_path, whole):
    """It names the holder's process and host; the first run goes on to the same bytes."""
    job = Job(str(small_source), str(tmp_path / "out"))
    with Process(job, tmp_path, is_gated=True) as first:
        first.wait_at_gate()
        with Process(job, tmp_path) as second:
            refused = second.ended()
        first.open_gate()
        ended = first.ended()

    assert refused.code not in {0, None}
    assert f"process {first.popen.pid} on {socket.gethostname()}" in refused.error
    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert sets.digests(job.output) == whole


@pytest.mark.slow
def test_runs_started_at_once_end_with_one_output(small_source, tmp_path, whole):
    """One of them makes it; the others are refused, or find it made."""
    job = Job(str(small_source), str(tmp_path / "out"))
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(Process(job, tmp_path)) for _ in range(4)]
        ended = [run.ended() for run in runs]

    assert 0 in [run.code for run in ended]
    assert all(run.code == 0 or "is being written by" in run.error for run in ended), ended
    assert sets.digests(job.output) == whole
