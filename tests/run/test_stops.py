"""A run that is stopped (by time, disk or a signal) keeps finished work, reports how much, and resumes later."""

import datetime
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
import small_pairs

from datamat import IncompleteRunError, OptionError, ShardOptions, WorkerOptions
from datamat.directory.ledger import read_ledger
from datamat.options import Deadline
from datamat.run.limits import tree_bytes


class Waiting(small_pairs.Pairs):
    """Reads six rows as `Pairs` does; further ones wait until the gate is there."""

    def __init__(self, folder):
        self.folder = str(folder)

    def read(self, row):
        pathlib.Path(self.folder, row.key).touch()
        while len(os.listdir(self.folder)) > 6 and not os.path.exists(os.path.join(self.folder, "gate")):
            pass
        return super().read(row)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small_pairs.make_pairs(tmp_path_factory.mktemp("source"), 12, 2)


def job(source, output, writer=None, **options):
    return small_pairs.job(source, output, writer, shards=ShardOptions(num_shards=2, shuffle=False), **options)


def events(output):
    return [entry.event for entry in read_ledger(output / ".datamat" / "ledger.jsonl")]


# ------------------------------------------------------------ spine: the first two, signals at a fork, and the script


def test_deadline_ends_a_run_that_the_next_resumes(source, tmp_path, monkeypatch):
    """Parts under way that do not end are dropped; finished ones stay and are not made again."""
    marks = tmp_path / "marks"
    marks.mkdir()
    # It comes once all workers have waited for a while, however fast this machine is.
    waits = itertools.count()
    left = property(lambda _: 0.0 if len(os.listdir(marks)) > 6 and next(waits) > 50 else 0.02)
    monkeypatch.setattr(Deadline, "left_s", left)
    workers = WorkerOptions(num_workers=2)
    report = job(source, tmp_path / "out", Waiting(marks), workers=workers).run(deadline="2s", progress=False)

    assert (report.stopped, report.is_complete) == ("deadline", False)
    assert 0 < report.num_rows <= 6
    assert f"stopped by its deadline with {report.num_rows} of 14 rows done" in str(report)
    assert "run() again continues from there" in str(report)
    assert events(tmp_path / "out")[-2:] == ["deadline_reached", "run_finished"]
    assert not (tmp_path / "out" / "manifest.json").exists()

    monkeypatch.undo()
    (marks / "gate").touch()
    again = job(source, tmp_path / "out", Waiting(marks)).run(progress=False)
    job(source, tmp_path / "reference", Waiting(marks)).run(progress=False)

    assert again.is_complete
    assert again.num_parts_written == 14 - report.num_rows
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "reference")


def test_deadline_before_the_first_part_starts_no_worker(source, tmp_path):
    """The next run can resume even from there."""
    for deadline in (0.001, datetime.timedelta(milliseconds=1), "0.001s"):
        report = job(source, tmp_path / "out").run(deadline=deadline, progress=False)
        assert (report.stopped, report.num_rows, report.num_parts_written) == ("deadline", 0, 0)

    assert job(source, tmp_path / "out").run(progress=False).is_complete


@pytest.mark.parametrize("deadline", [0, float("nan"), "soon", True, datetime.datetime(2020, 1, 1)])
def test_malformed_deadline_is_refused(source, tmp_path, deadline):
    """The error comes before anything is made."""
    with pytest.raises(OptionError, match=r"deadline|duration"):
        job(source, tmp_path / "out").run(deadline=deadline, progress=False)

    assert not (tmp_path / "out").exists()


def test_limits_that_are_not_reached_change_nothing(source, tmp_path):
    """A deadline may be a moment or a duration."""
    tomorrow = datetime.datetime.now() + datetime.timedelta(days=1)

    assert job(source, tmp_path / "out").run(deadline=tomorrow, max_disk="1GB", progress=False).is_complete


def test_disk_limit_ends_a_run_that_the_next_resumes(source, tmp_path):
    """The output never takes more than the limit, and the result is that of a run without one."""
    job(source, tmp_path / "reference").run(progress=False)
    whole = tree_bytes(tmp_path / "reference")

    limited = job(source, tmp_path / "out", workers=WorkerOptions(num_workers=2))
    report = limited.run(max_disk=whole // 2, progress=False)

    assert (report.stopped, report.is_complete) == ("max_disk", False)
    assert 0 < report.num_rows < 14
    assert tree_bytes(tmp_path / "out") <= whole // 2
    assert "stopped by its max_disk" in str(report)
    assert events(tmp_path / "out")[-2:] == ["disk_reached", "run_finished"]
    assert job(source, tmp_path / "out").run(max_disk=4 * whole, progress=False).is_complete
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "reference")


@pytest.mark.parametrize(("num_shards", "stopped"), [(16, ""), (1, "max_disk")])
def test_disk_limit_of_a_store_is_for_what_is_not_uploaded(tmp_path, num_shards, stopped):
    """Finished shards make room for others; one that alone takes more ends the run."""
    source = small_pairs.make_pairs(tmp_path / "source", 96, 2)
    shards = ShardOptions(num_shards=num_shards, shuffle=False)
    small_pairs.job(source, tmp_path / "reference", shards=shards).run(progress=False)
    limit = 2 * tree_bytes(tmp_path / "reference") // 3

    output = small_pairs.job(source, f"memory://{tmp_path.name}/{num_shards}", shards=shards)
    report = output.run(max_disk=limit, scratch=tmp_path / "scratch", progress=False)

    assert (report.stopped, report.is_complete) == (stopped, not stopped)
    assert tree_bytes(tmp_path / "scratch") <= limit
    assert ("stopped by its max_disk" in str(report)) == bool(stopped)


def test_stopped_run_can_make_a_program_fail(source, tmp_path):
    """`raise_if_incomplete` gives progress, reason and remedy; of a finished run it returns the report."""
    stopped = job(source, tmp_path / "out").run(deadline=0.001, progress=False)
    with pytest.raises(IncompleteRunError, match=r"stopped by its deadline with 0 of 14 rows done .*run\(\) again"):
        stopped.raise_if_incomplete()
    part = job(source, tmp_path / "out", include="val-*").run(progress=False)
    with pytest.raises(IncompleteRunError, match="finished as far as include"):
        part.raise_if_incomplete()

    report = job(source, tmp_path / "out").run(progress=False)

    assert report.raise_if_incomplete() is report


def test_script_of_a_stopped_run_exits_with_an_error(source, tmp_path):
    """A scheduler sees the exit code, and the text is that of the report."""
    code = (
        "import small_pairs\n"
        f"job = small_pairs.job({str(source)!r}, {str(tmp_path / 'out')!r})\n"
        "job.run(deadline=0.001, progress=False).raise_if_incomplete()\n"
    )
    place = {"cwd": pathlib.Path(__file__).parents[1], "capture_output": True, "text": True}

    stopped = subprocess.run([sys.executable, "-c", code], check=False, **place)

    assert stopped.returncode == 1 and "IncompleteRunError" in stopped.stderr and "its deadline" in stopped.stderr


class Interrupting(small_pairs.Pairs):
    """Sends a signal to the process that asks for the index."""

    def __init__(self, number):
        self.number = number

    def index(self, source):
        os.kill(os.getpid(), self.number)
        return super().index(source)


@pytest.fixture
def handlers():
    """Handlers of the caller for SIGINT and SIGTERM, which hear nothing; those of before come back."""
    heard = []
    before = {number: signal.signal(number, lambda *_: heard.append(1)) for number in (signal.SIGINT, signal.SIGTERM)}
    yield {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not heard


def test_handlers_of_the_caller_are_restored(source, tmp_path, handlers):
    """The run does not call them: it ends with what Python raises for these signals."""
    with pytest.raises(KeyboardInterrupt):
        job(source, tmp_path / "out", Interrupting(signal.SIGINT)).run(progress=False)
    with pytest.raises(SystemExit, match="143"):
        job(source, tmp_path / "out", Interrupting(signal.SIGTERM)).run(progress=False)

    assert {number: signal.getsignal(number) for number in handlers} == handlers


class Finalized:
    """Sends a signal when it is collected: Python swallows what the handler raises then."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        signal.raise_signal(self.number)


class Swallowing(Interrupting):
    def index(self, source):
        Finalized(self.number)
        return small_pairs.Pairs.index(self, source)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_that_python_swallows_is_raised_at_the_next_part(source, tmp_path, handlers, number, raised):
    """It ends this run, and not the next one."""
    with pytest.raises(raised):
        job(source, tmp_path / "out", Swallowing(number)).run(progress=False)
    assert job(source, tmp_path / "out").run(progress=False).is_complete


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", -signal.SIGINT), pytest.param("SIGTERM", 143, marks=pytest.mark.long)]
)
def test_signal_during_a_fork_ends_the_run(source, tmp_path, name, code):
    """Python swallows it there, while `logging` holds its lock: a function that runs at the fork raises it."""
    script = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.{name}))
import small_pairs
from datamat import Materializer, WorkerOptions
options = WorkerOptions(num_workers=2, start_method="fork")
Materializer(small_pairs.Pairs(), sys.argv[1], sys.argv[2]).run(workers=options, progress=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, source, tmp_path / "out"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip

    assert done.returncode == code
    assert "Exception ignored" not in done.stderr


def test_ignored_signal_stays_ignored(source, tmp_path, handlers):
    """Jobs started by nohup ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    assert job(source, tmp_path / "out", Interrupting(signal.SIGINT)).run(progress=False).is_complete
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_run_in_another_thread_sets_no_handlers(source, tmp_path):
    """Only the main thread may set them."""
    reports = []
    thread = threading.Thread(target=lambda: reports.append(job(source, tmp_path / "out").run(progress=False)))

    thread.start()
    thread.join()

    assert reports[0].is_complete
