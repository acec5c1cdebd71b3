"""`status` is right while a run is alive in another process, and after a crash, whatever that left."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import small_pairs

from datamat import OutputError, OutputLockedError, SampleError, failures, load, verify
from datamat.directory.files import locked
from datamat.plan.changes import NOT_MADE
from datamat.run.status import status as read_status

HELD = """
import os, signal, sys, small_pairs
from datamat import Materializer, ShardOptions, WorkerOptions

class Held(small_pairs.Pairs):
    def read(self, row):
        if row.key == "train013":
            print("held", flush=True)
            while True:
                signal.pause()
        return super().read(row)

    def __getstate__(self):
        return {}

workers = WorkerOptions(num_workers=1, start_method="fork")
Materializer(Held(), sys.argv[1], sys.argv[2], shards=2).run(workers=workers, progress=False)
"""


def test_status_without_a_run_says_so(source, tmp_path):
    """Before any run, and for a folder that belongs to somebody else."""
    (tmp_path / "other").mkdir()

    found = [read_status(tmp_path / name) for name in ("out", "other")]
    status = small_pairs.job(source, tmp_path / "out").status()

    assert [status.state for status in found] == ["empty", "empty"]
    assert "nothing was started here" in str(status)
    assert {change.reasons for change in status.changes} == {(NOT_MADE,)} and len(status.changes) == 4
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("read", [read_status, load, verify, failures])
@pytest.mark.parametrize("name", ["file", "file/out"])
def test_file_in_place_of_a_directory_is_named(tmp_path, read, name):
    """With what to give instead."""
    (tmp_path / "file").touch()

    with pytest.raises(OutputError, match=f"{tmp_path}/file is a file, not a folder; give the folder that a run has"):
        read(tmp_path / name)


def test_finished_directory_is_complete_and_up_to_date(source, output):
    """It gives the numbers, the run that made it, and what a notebook shows."""
    status = small_pairs.job(source, output).status()

    assert (status.is_complete, status.is_running, status.changes, status.obsolete) == (True, False, (), ())
    assert (status.done.num_shards, status.done.num_rows, status.done.num_records) == (4, 24, 24)
    assert f"{output}: complete: 4 shards, 24 records" in str(status)
    assert "run_started" in str(status) and "run_finished" in str(status) and "up to date" in str(status)
    shown = status._repr_html_()
    assert "complete: 4 shards, 24 records" in shown and "run_finished" in shown and "up to date" in shown


def test_live_run_is_reported_from_another_process(source, tmp_path):
    """A spine test: a second run is refused; status says who works and how far it is, and, once it is killed, was."""
    output = tmp_path / "out"
    script = tmp_path / "held.py"
    script.write_text(HELD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parents[1]), *sys.path])}
    with subprocess.Popen(
        [sys.executable, script, source, output],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        process_group=0,
    ) as run:
        assert run.stdout.readline() == "held\n"
        alive = read_status(output)
        with pytest.raises(OutputLockedError, match=f"process {run.pid} on"):
            small_pairs.job(source, output).run(progress=False)
        os.killpg(run.pid, signal.SIGKILL)
    dead = read_status(output)

    assert alive.is_running and alive.holder.startswith(f"process {run.pid} on ")
    assert f"being written by process {run.pid} on " in str(alive) and "of 24 rows" in str(alive)
    assert (alive.num_rows, alive.num_shards) == (dead.num_rows, dead.num_shards) == (24, 4)
    assert dead.state == "unfinished" and dead.done.num_rows < 24
    assert "not finished" in str(dead) and "next run continues from there" in str(dead)
    assert "that run ended silently" in str(dead)


def test_failed_run_is_reported_with_its_error(source, tmp_path):
    """Status says how far it came, and which sample ended it."""

    class Failing(small_pairs.Pairs):
        def read(self, row):
            if row.key == "train013" and not (tmp_path / "good").exists():
                raise ValueError("broken \x1b[31m sample")
            return super().read(row)

    job = small_pairs.job(source, tmp_path / "out", Failing())
    with pytest.raises(SampleError):
        job.run(progress=False)

    status = job.status()

    assert status.state == "unfinished"
    assert 0 < status.done.num_rows < 24 and status.num_rows == 24
    assert "train013" in str(status) and "broken \\x1b[31m sample" in str(status)
    assert "ended silently" not in str(status)
    (tmp_path / "good").touch()
    assert job.run(progress=False).is_complete


def test_status_of_the_holding_process_keeps_its_lock(source, output):
    """Closing any descriptor of the lock file would release it: the process that asks may be the holder itself."""
    with locked(output / ".datamat" / "lock"):
        status = read_status(output)
        command = [sys.executable, "-m", "datamat", "status", output]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)

    assert status.is_running and f"process {os.getpid()} on" in status.holder
    assert f"being written by process {os.getpid()} on" in asked.stdout
    assert read_status(output).is_complete


@pytest.mark.parametrize("damage", ["manifest", "ledger", "no ledger"])
def test_damage_is_reported_and_hides_nothing(output, damage):
    """A damaged manifest is named; a ledger that is damaged or gone leaves the numbers unchanged."""
    ledger = output / ".datamat" / "ledger.jsonl"
    if damage == "manifest":
        os.truncate(output / "manifest.json", 100)
        status = read_status(output)
        assert status.state == "damaged" and "repair" in str(status)
        return
    ledger.write_bytes(b"\x80\x04\n" * 3) if damage == "ledger" else ledger.unlink()

    status = read_status(output)

    assert status.is_complete and "24 records" in str(status) and bool(status.note) is (damage == "ledger")


def test_part_of_a_plan_is_counted(source, tmp_path):
    """A run with `include` leaves the rest to others; the status has the share of the whole."""
    small_pairs.job(source, tmp_path / "out", include="val-*").run(progress=False)

    status = small_pairs.job(source, tmp_path / "out").status()

    assert status.state == "unfinished"
    assert "4 of 24 rows (17%) and 2 of 4 shards done" in str(status)


@pytest.mark.parametrize("content", ["{}", '{"failed": [], "retried": [], "files": [{}]}', '"text"'])
def test_receipt_of_another_version_is_skipped(source, tmp_path, content):
    """Status reads whatever is there, whoever wrote it, and raises nothing."""
    job = small_pairs.job(source, tmp_path / "out")
    folder = tmp_path / "out" / ".datamat" / "parts" / job.plan().shards[0].name
    folder.mkdir(parents=True)
    (folder / "00000.receipt").write_text(f"{content}\n")

    status = job.status()

    assert (status.state, status.done.num_rows) == ("unfinished", 0)
