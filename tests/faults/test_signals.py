"""Signals to the run and to its workers, and a second run beside it."""

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest
import small_pairs
from fault_injection import Process, check_visible, left_behind, wait_until
from job import Job

from datamat import verify

GRACE_S = 5.0
MARGIN_S = 5.0  # what a loaded machine may add to it
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


BY_METHOD = pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.long) for method in ("forkserver", "spawn"))]
)
INTERRUPTS = [
    ("fork", "parent", signal.SIGINT),
    ("fork", "group", signal.SIGTERM),
    pytest.param("forkserver", "group", signal.SIGINT, marks=pytest.mark.long),
    pytest.param("spawn", "parent", signal.SIGTERM, marks=pytest.mark.long),
]


@pytest.fixture
def job_by(small_source, tmp_path):
    """Make the job with a start method."""
    return lambda method: Job(str(small_source), str(tmp_path / "out"), start_method=method)


@pytest.fixture
def check_resumed(job_server, whole):
    """Give a function that runs a job again, and checks that it makes the same bytes and leaves nothing else."""

    def check_resumed(job):
        ended = job_server.run(job)
        assert (ended.code, ended.num_orphans) == (0, 0), ended.said
        assert small_pairs.digests(job.output) == whole
        assert left_behind(pathlib.Path(job.output)) == []

    return check_resumed


@pytest.mark.parametrize(("method", "target", "number"), INTERRUPTS)
def test_interrupt_ends_a_run_in_time_although_a_row_never_ends(
    job_by, tmp_path, whole, check_resumed, method, target, number
):
    """Within five seconds, with an exit code other than 0, no process left, and work to resume from."""
    job = job_by(method)
    with Process(job, tmp_path, is_gated=True) as process:
        process.wait_at_gate()
        (os.kill if target == "parent" else os.killpg)(process.popen.pid, number)
        ended = process.ended(GRACE_S + MARGIN_S)

    assert ended.code not in {0, None}, ended.said
    assert ended.num_orphans == 0
    assert not (pathlib.Path(job.output) / "manifest.json").exists()
    check_visible(pathlib.Path(job.output), whole)
    check_resumed(job)


PROGRAM = """
import atexit, gc, pathlib, sys, time
atexit.register(lambda: print(gc.get_freeze_count() > 10_000))  # the first is called last

from datamat import Features, Scalar, WorkerOptions, materialize

class Loop:
    pass

def wait(number):
    pathlib.Path(begun).touch()
    while sleeps:
        time.sleep(0.01)
    return {"x": number}

begun, output, written, method, sleeps = *sys.argv[1:5], sys.argv[5] == "True"
loop = Loop()
loop.itself = loop
loop.file = open(written, "w")
loop.file.write("every byte")
workers = WorkerOptions(num_workers=2, start_method=method)
materialize(wait, range(4), output, features=Features({"x": Scalar()}), workers=workers, progress=False)
"""


@pytest.mark.parametrize(
    ("method", "number"), [("fork", signal.SIGINT), ("forkserver", signal.SIGTERM), ("spawn", None)]
)
def test_interrupted_program_leaves_its_garbage_to_the_system(tmp_path, method, number):
    """Collecting it takes a second of processor time where TensorFlow is imported; files are still flushed."""
    begun, written = tmp_path / "begun", tmp_path / "written"
    arguments = [str(begun), str(tmp_path / "out"), str(written), method, str(number is not None)]
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True) as program:
        if number is not None:
            wait_until(begun.exists)
            program.send_signal(number)
        said, _ = program.communicate(timeout=50)

    assert said == f"{number is not None}\n"
    assert written.read_text() == "every byte"
    assert program.returncode == {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143, None: 0}[number]


def test_worker_that_is_stopped_for_a_while_costs_nothing(job_by, tmp_path, whole):
    """SIGSTOP, then SIGCONT once the other worker has done all that it can do alone."""
    job = job_by("fork")
    with Process(job, tmp_path, is_gated=True) as process:
        worker = process.wait_at_gate()
        worker.suspend()
        wait_until(lambda: any(pathlib.Path(job.output).glob("*-val-*.tfrecord")))
        worker.resume()
        process.open_gate()
        ended = process.ended()

    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert small_pairs.digests(job.output) == whole


@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("fork", signal.SIGKILL),
        pytest.param("forkserver", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("spawn", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_stopped_worker_ends_with_its_run(job_by, tmp_path, check_resumed, method, number):
    """A stopped process notices nothing; yet it is gone two seconds after its parent."""
    job = job_by(method)
    with Process(job, tmp_path, is_gated=True) as process:
        worker = process.wait_at_gate()
        worker.suspend()
        process.popen.send_signal(number)
        ended = process.ended(GRACE_S + MARGIN_S)

    assert ended.code not in {0, None}, ended.said
    assert ended.num_orphans == 0
    check_resumed(job)


@BY_METHOD
def test_killed_parent_takes_busy_workers_along(job_by, tmp_path, check_resumed, method):
    """Two seconds after the parent, no worker lives, although one is in the middle of a row."""
    job = job_by(method)
    with Process(job, tmp_path, is_gated=True) as process:
        process.wait_at_gate()
        process.popen.kill()
        ended = process.ended(MARGIN_S)

    assert (ended.code, ended.num_orphans) == (-signal.SIGKILL, 0)
    check_resumed(job)


def test_second_run_on_an_output_is_refused_and_harms_nothing(small_source, tmp_path, whole):
    """The error names the holder's process and host; the first run ends with the same bytes."""
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
    assert small_pairs.digests(job.output) == whole


@BY_METHOD
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)], ids=["same-job", "another-job"])
def test_run_whose_lock_is_deleted_does_not_finish_beside_the_one_that_took_its_place(job_by, tmp_path, method, seed):
    """The second makes the whole output; the first wakes up after it, changes nothing and says why."""
    job = job_by(method)
    with Process(job, tmp_path, is_gated=True) as first:
        first.wait_at_gate()
        (pathlib.Path(job.output) / ".datamat" / "lock").unlink()
        with Process(dataclasses.replace(job, seed=seed), tmp_path / "second") as second:
            made = second.ended()
        before = small_pairs.digests(job.output)
        first.open_gate()
        ended = first.ended()

    assert (made.code, made.num_orphans) == (0, 0), made.said
    assert ended.code not in {0, None} and ended.num_orphans == 0
    reason = "lock (was deleted|was replaced by that of nobody) while|shards/run names another run"
    assert re.search(rf"OutputLockedError: .*/({reason})", ended.error)
    assert small_pairs.digests(job.output) == before
    assert verify(job.output, deep=True).ok


@pytest.mark.long
def test_run_whose_lock_belongs_to_another_stops_and_lets_that_one_finish(job_by, tmp_path, whole):
    """The first finishes its rows before the second: it still stops, and the second succeeds."""
    job = job_by("fork")
    with Process(job, tmp_path, is_gated=True) as first:
        first.wait_at_gate()
        (pathlib.Path(job.output) / ".datamat" / "lock").unlink()
        (tmp_path / "second").mkdir()
        with Process(job, tmp_path / "second", is_gated=True) as second:
            second.wait_at_gate()
            first.open_gate()
            refused = first.ended()
            second.open_gate()
            ended = second.ended()

    assert refused.code not in {0, None}
    reason = f"was deleted|was replaced by that of process {second.popen.pid} on {socket.gethostname()}"
    assert re.search(f"OutputLockedError: .*/(lock ({reason}) while|shards/run names another run)", refused.error)
    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert small_pairs.digests(job.output) == whole
    assert left_behind(pathlib.Path(job.output)) == []


@pytest.mark.long
def test_deleted_lock_costs_no_finished_work(job_by, tmp_path, check_resumed):
    """Nobody took its place, but the run cannot know that: it stops, and the next one resumes."""
    job = job_by("fork")
    with Process(job, tmp_path, is_gated=True) as process:
        process.wait_at_gate()
        (pathlib.Path(job.output) / ".datamat" / "lock").unlink()
        process.open_gate()
        ended = process.ended()

    assert ended.code not in {0, None}
    assert "/lock was deleted while this run" in ended.error
    check_resumed(job)


@pytest.mark.long
def test_runs_started_at_once_end_with_one_output(small_source, tmp_path, whole):
    """One of them makes it; the others are refused, or find it finished."""
    job = Job(str(small_source), str(tmp_path / "out"))
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(Process(job, tmp_path)) for _ in range(4)]
        ended = [run.ended() for run in runs]

    assert 0 in [run.code for run in ended]
    assert all(run.code == 0 or "is being written by" in run.error for run in ended), ended
    assert small_pairs.digests(job.output) == whole
