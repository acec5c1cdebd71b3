"""A job for tasks that share an output, of which one can end or stop itself: workers import this, and not pytest."""

import os
import pathlib
import signal
import subprocess
import sys
import traceback

from prepared import Prepared

from datamat import DatasetWriter, Features, IndexRow, Scalar, ShardOptions, Text, WorkerOptions
from datamat.events import RunEnded
from datamat.options import RunOptions
from datamat.run.tasks import start

NUM_SHARDS = 6


class Numbers(DatasetWriter):
    """Forty rows of a number and a text."""

    name = "numbers"
    features = Features({"x": Scalar("int64"), "text": Text()})

    def index(self, source):
        folder = pathlib.Path(source)
        return (IndexRow(path.stem, "train", {"path": path}) for path in sorted(folder.glob("*.txt")))

    def read(self, row):
        _act("read")
        if row.key[-1] in (_value_from_test("SLICES_FAIL") or ""):
            raise ValueError(f"{row.key} fails in this task")
        return {"x": int(row.key), "text": row.fields["path"].read_text()}


class SayShards:
    """Writes down how many shards the report of a task counts."""

    def __init__(self, path):
        self._path = pathlib.Path(path)

    def __call__(self, event):
        if isinstance(event, RunEnded):
            number = event.report and event.report.num_shards_written
            self._path.write_text(f"{number} shards, failed: {event.error is not None}")


def add_noise(sample, rng):
    """Draw a number."""
    return {**sample, "x": sample["x"] + int(rng.integers(0, 1000))}


def end_at_manifest(manifest):
    """A sidecar, written right before the manifest."""
    _act("manifest")
    return {}


def _act(where):
    """Do what a test has asked for, at the n-th call of all processes: send a signal to this task."""
    asked = _value_from_test("SLICES_ACT")  # by a computed name, so that it is no part of the fingerprint
    if not asked:
        return
    place, at, number, tally = asked.split(",")
    if place != where:
        return
    with open(tally, "ab") as file:
        file.write(b".")
        file.flush()
        if os.fstat(file.fileno()).st_size == int(at):
            os.killpg(os.getsid(0), int(number))  # workers that have started a process lead groups of their own


def _value_from_test(variable):
    return os.environ.get(variable)


def make_source(folder, num_rows=40):
    """Write the files that the job reads."""
    folder.mkdir()
    for number in range(num_rows):
        path = folder / f"{number:03d}.txt"
        path.write_text(f"row {number} " * 20)
        os.utime(path, (1, 1))
    return folder


def job(source, output, **options):
    """Return the job; it has one worker, unless it is given an executor."""
    options = {"shards": ShardOptions(num_shards=NUM_SHARDS), "copies": 2, "transform": add_noise, **options}
    if "executor" not in options:
        options["workers"] = WorkerOptions(num_workers=1)
    return Prepared(Numbers(), source, output, **options)


def run_task(source, output, index, count, lease_s, *, deadline=None, **options):
    """Run one task, whose leases expire after `lease_s`."""
    made = job(source, output, **options)
    task = {"task_index": index, "num_tasks": count, "deadline": deadline, "progress": False}
    how = RunOptions.of({**made.options, **task})
    return start(made._made(how), lease_s=float(lease_s))


def start_task(source, output, index, count, *, lease_s=60, act="", options="", fails=""):
    """Start a task as a program that leads a group of its own, and in which rows fail whose key ends in `fails`."""
    here = str(pathlib.Path(__file__).parent)
    call = f"sliced_job.run_task({str(source)!r}, {str(output)!r}, {index}, {count}, {lease_s}{options})"
    code = f"import sys; sys.path.insert(0, {here!r}); import sliced_job; print({call}.is_complete)"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "SLICES_ACT": act, "SLICES_FAIL": fails},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class ForkedTask:
    """A task that a test forks, which saves the second that a program takes to import everything.

    It leads a group of its own. `act` is what it does to itself: a place, the number of the call, a signal, a tally.
    """

    def __init__(self, source, output, index, count, *, lease_s=60, act="", **options):
        self._log = pathlib.Path(f"{output}.log-{index}")
        self.pid = os.fork()
        if not self.pid:
            self._run(act, lambda: run_task(source, output, index, count, lease_s, **options))

    def _run(self, act, run):
        code = 1
        try:
            os.setsid()
            os.environ["SLICES_ACT"] = act
            with open(self._log, "w") as sys.stderr:
                try:
                    code = 0 if run().is_complete else 3
                except BaseException:
                    traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self):
        """Wait until it has ended; return its exit code and what it wrote on standard error."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), self._log.read_text()


def wait_until_stopped(process):
    """Wait until a process has been stopped by a signal."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), status
    assert os.WSTOPSIG(status) == signal.SIGSTOP


def wake(process):
    """Continue a stopped task with its workers."""
    os.killpg(process.pid, signal.SIGCONT)


def content(output):
    """Return the files that readers see, by their paths."""
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(pathlib.Path(output).rglob("*"))
        if path.is_file() and ".datamat" not in path.parts
    }
