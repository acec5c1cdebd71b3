"""Several tasks make one output together: whatever becomes of them, its bytes are those of one ordinary run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import sliced_job
from sliced_job import ForkedTask, content, make_source, start_task, wait_until_stopped, wake

from datamat import IncompleteRunError, OptionError, OutputError, OutputLockedError, load, verify
from datamat.cli import main
from datamat.directory.files import locked
from datamat.directory.ledger import read_ledger
from datamat.run.slices import TaskClaims
from datamat.run.status import status as read_status
from datamat.testing import InlineExecutor

LEASE_S = 0.6
STOP, KILL, TERM = int(signal.SIGSTOP), int(signal.SIGKILL), int(signal.SIGTERM)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The raw data."""
    return make_source(tmp_path_factory.mktemp("raw") / "source")


@pytest.fixture(scope="module")
def wanted(source, tmp_path_factory):
    """The files that an ordinary run gives."""
    output = tmp_path_factory.mktemp("wanted") / "out"
    _job(source, output).run(progress=False)
    return content(output)


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def _job(source, output, **options):
    return sliced_job.job(source, output, executor=InlineExecutor(), **options)


def _run(source, output, index=1, count=2, lease_s=LEASE_S, **options):
    return sliced_job.run_task(source, output, index, count, lease_s, **{"executor": InlineExecutor(), **options})


@pytest.fixture
def start(source, output, tmp_path):
    """Start a task that does something to itself at a call of `read`: its number, and the signal."""
    number = iter(range(9))

    def start(index, at, signal_number, place="read", **options):
        act = f"{place},{at},{signal_number},{tmp_path / f'tally-{next(number)}'}"
        return ForkedTask(source, output, index, 2, act=act, **{"executor": InlineExecutor(), **options})

    return start


def _num_done(output):
    return len(list((output / ".datamat/slices").glob("*/done/*.json")))


def _is_as_wanted(output, wanted):
    assert content(output) == wanted
    assert verify(output, deep=True).ok
    assert sorted(os.listdir(output / ".datamat")) == ["inputs", "ledger.jsonl", "lock", "names.json", "sidecars.json"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [1, 3])
def test_one_task_alone_makes_everything(source, wanted, output, count):
    """The others need not come. The ledger holds each part once, and ends with the run that wrote the manifest."""
    report = _run(source, output, 0, count)

    assert report.is_complete
    assert (report.num_shards_written, report.num_shards_reused) == (sliced_job.NUM_SHARDS, 0)
    _is_as_wanted(output, wanted)
    lines = list(read_ledger(output / ".datamat/ledger.jsonl"))
    committed = [(line.values["shard"], line.values["part"]) for line in lines if line.event == "part_committed"]
    assert len(committed) == len(set(committed)) >= sliced_job.NUM_SHARDS
    assert (lines[-1].event, lines[-1].values["is_complete"]) == ("run_finished", True)


@pytest.mark.long
def test_programs_that_start_together_share_the_work(source, wanted, output):
    """Five tasks with workers at once, and one when all is done: no shard is missing, each report says the whole."""
    tasks = [start_task(source, output, number, 5) for number in range(5)]
    said = [task.communicate() for task in tasks]
    late = _run(source, output, 0, 5)

    assert [(task.returncode, out) for task, (out, _) in zip(tasks, said, strict=True)] == [(0, "True\n")] * 5, said
    assert late.is_complete
    assert late.did_nothing
    _is_as_wanted(output, wanted)
    assert len(load(output)) == 80


def test_tasks_that_start_together_share_the_work(source, wanted, output):
    """Each report says the whole."""
    tasks = [ForkedTask(source, output, number, 3, executor=InlineExecutor()) for number in range(3)]

    said = [task.wait() for task in tasks]

    assert [code for code, _ in said] == [0] * 3, said
    _is_as_wanted(output, wanted)


@pytest.mark.parametrize(
    ("at", "executor"),
    [(12, InlineExecutor()), *(pytest.param(at, None, marks=pytest.mark.long) for at in (1, 12, 31))],
)
def test_shards_of_a_killed_task_are_taken_over(source, wanted, output, start, at, executor):
    """A task is killed with its workers at some read; its lease expires, and another makes what it had."""
    killed, _ = start(0, at, KILL, executor=executor).wait()

    report = _run(source, output)

    assert killed == -KILL
    assert report.is_complete
    _is_as_wanted(output, wanted)


@pytest.mark.long
def test_task_that_comes_again_resumes_its_own_parts(source, wanted, output, start):
    """The next job of the same array does not wait for its own lease, and makes no finished shard again."""
    start(0, 31, KILL).wait()

    report = _run(source, output, 0, lease_s=3600)

    assert report.is_complete
    assert 0 < report.num_shards_written < sliced_job.NUM_SHARDS
    _is_as_wanted(output, wanted)


def test_stopped_task_that_wakes_damages_nothing(source, wanted, output, start, tmp_path):
    """Another takes its shard and writes the manifest; the report of the first counts what it made itself."""
    said = tmp_path / "said"
    stopped = start(0, 31, STOP, hooks=[sliced_job.SayShards(said)])
    try:
        wait_until_stopped(stopped)
        made = _num_done(output)
        report = _run(source, output)
        before = content(output)
    finally:
        wake(stopped)
    code, err = stopped.wait()

    assert before == wanted
    assert report.is_complete
    assert made + report.num_shards_written == sliced_job.NUM_SHARDS
    assert (code, said.read_text()) == (0, f"{made} shards, failed: False"), err
    _is_as_wanted(output, wanted)


@pytest.mark.long  # each waits for the other's lease
@pytest.mark.parametrize("executor", [InlineExecutor(), None], ids=["inline", "workers"])
def test_stopped_task_that_wakes_early_shares_on(wanted, output, start, executor):
    """It wakes while the other is at work: both may make the same shard, and one of them counts."""
    first = start(0, 10, STOP, lease_s=LEASE_S, executor=executor)
    wait_until_stopped(first)
    second = start(1, 25, STOP, lease_s=LEASE_S, executor=executor)
    try:
        wait_until_stopped(second)
    finally:
        wake(first)
    ended = first.wait()
    wake(second)

    assert (ended[0], second.wait()[0]) == (0, 0), ended
    _is_as_wanted(output, wanted)


def test_task_that_is_late_for_the_manifest_leaves_nothing(source, wanted, output, monkeypatch):
    """Another has written it, removed what the tasks shared, and still holds the lock when this one takes the lease."""
    with contextlib.ExitStack() as stack:

        def takes_end(self, *, original=TaskClaims.takes_end):
            monkeypatch.setattr(TaskClaims, "takes_end", original)
            assert _run(source, output, 1, 2).is_complete
            stack.enter_context(locked(output / ".datamat" / "lock"))
            assert original(self)
            return True

        monkeypatch.setattr(TaskClaims, "takes_end", takes_end)
        assert _run(source, output, 0, 2).is_complete

    _is_as_wanted(output, wanted)


def test_leaving_task_gives_its_leases_back_at_once(source, wanted, output, start):
    """It ends by a signal in mid-shard: nobody waits until its leases, of an hour, expire."""
    code, _ = start(0, 10, TERM, lease_s=3600).wait()
    held = {path.name for path in (output / ".datamat/slices").glob("*/leases/*")}
    done = {f"{path.stem}.00000" for path in (output / ".datamat/slices").glob("*/done/*")}

    report = _run(source, output, lease_s=3600, deadline=60)

    assert code != 0
    assert held - done
    assert report.is_complete
    _is_as_wanted(output, wanted)


def test_task_of_another_definition_is_refused(source, output, start):
    """The error names what differs; what the others made stays, and an ordinary run continues it."""
    start(0, 31, KILL).wait()
    made = _num_done(output)

    with pytest.raises(OutputError, match=r"seed changed \(0 -> 1\)"):
        _run(source, output, seed=1)
    with pytest.raises(IncompleteRunError, match=r"lacks \d shards \(.*numbers-train-0000"):
        _job(source, output).finalize(progress=False)
    report = _job(source, output).run(progress=False)

    assert report.is_complete
    assert report.num_shards_written == sliced_job.NUM_SHARDS - made > 0


def test_task_that_is_refused_leaves_no_folder(source, output):
    """Of a finished output, it would look as if tasks were at work."""
    _job(source, output).run(progress=False)
    before = content(output)

    with pytest.raises(OutputError, match=r"existing='refuse'"):
        sliced_job.job(source, output, seed=1, executor=InlineExecutor()).run(
            task_index=0, num_tasks=2, existing="refuse", progress=False
        )

    assert not (output / ".datamat" / "slices").exists()
    assert content(output) == before


def test_others_are_refused_while_a_task_is_there(source, wanted, output, start):
    """An ordinary run, and a second process of the same number, name who is at work."""
    task = start(0, 5, STOP)
    try:
        wait_until_stopped(task)
        with pytest.raises(OutputLockedError, match=f"task-00000 is process {task.pid}"):
            _job(source, output).run(progress=False)
        with pytest.raises(OutputLockedError, match=f"being written by process {task.pid}"):
            _run(source, output, 0)
    finally:
        wake(task)

    assert task.wait()[0] == 0
    _is_as_wanted(output, wanted)


def test_task_is_refused_while_an_ordinary_run_is_there(source, output):
    """The run has the lock of the output, and shares nothing."""
    (output / ".datamat").mkdir(parents=True)

    with locked(output / ".datamat/lock"), pytest.raises(OutputLockedError):
        _run(source, output)


def test_status_shows_each_task(wanted, output, start):
    """One is at work, one was killed: who, and how many shards; and what they have made together."""
    start(1, 31, KILL).wait()
    task = start(0, 1, STOP, lease_s=LEASE_S)
    try:
        wait_until_stopped(task)
        made = _num_done(output)
        status = read_status(output)
    finally:
        wake(task)
    task.wait()

    assert status.is_running
    assert status.done.num_shards == made > 0
    (first, holder, none), *second = status.tasks
    assert (first, none, second) == ("task-00000", 0, [("task-00001", "", made)])
    assert holder.startswith(f"process {task.pid} on ")
    assert "task-00001: no process is at work" in str(status)
    assert read_status(output).tasks == ()


def test_task_that_is_done_with_its_own_leaves_the_rest_to_others(source, wanted, output, start):
    """Each has its own `include`: the first to end has all of its shards, and the other is in mid-shard."""
    other = start(1, 5, STOP, include="*-0000[345]-of-*")
    try:
        wait_until_stopped(other)
        report = _run(source, output, 0, include="*-0000[012]-of-*")
    finally:
        wake(other)

    assert (report.is_complete, report.stopped, report.num_shards_written) == (False, "", 3)
    assert other.wait()[0] == 0
    _is_as_wanted(output, wanted)


def test_finalize_writes_the_manifest_after_a_kill(source, output, tmp_path, start):
    """The last task is killed right before it writes the manifest; of another definition finalize makes nothing."""
    options = {"sidecars": [sliced_job.end_at_manifest]}
    start(0, 1, KILL, place="manifest", **options).wait()
    assert not (output / "manifest.json").exists()

    with pytest.raises(IncompleteRunError, match=rf"lacks {sliced_job.NUM_SHARDS} shards"):
        _job(source, output, seed=1, **options).finalize(progress=False)
    report = _job(source, output, **options).finalize(progress=False)

    assert (report.is_complete, report.num_shards_written) == (True, 0)
    _job(source, tmp_path / "wanted", **options).run(progress=False)
    _is_as_wanted(output, content(tmp_path / "wanted"))


def test_only_what_changed_is_made_again(tmp_path, output):
    """Tasks rebuild the shards of changed rows, and readers see the old ones until all are there."""
    source = make_source(tmp_path / "source")
    _run(source, output, 0, 1)
    (source / "007.txt").write_text("changed")
    _job(source, tmp_path / "wanted").run(progress=False)

    report = _run(source, output, 0, 1)

    assert report.is_complete
    assert (report.num_shards_written, report.num_shards_reused) == (1, sliced_job.NUM_SHARDS - 1)
    _is_as_wanted(output, content(tmp_path / "wanted"))


@pytest.mark.long
def test_deadline_leaves_the_rest_to_others(source, wanted, output, start):
    """A task whose time is over reports that; the next one continues."""
    holder = start(0, 5, STOP)
    try:
        wait_until_stopped(holder)
        report = _run(source, output, lease_s=3600, deadline=1)
    finally:
        wake(holder)
    holder.wait()

    assert report.stopped == "deadline"
    assert not report.is_complete
    _is_as_wanted(output, wanted)


# ---------------------------------------------------------------- the command


@pytest.fixture
def jobs(source, output, tmp_path, monkeypatch):
    """A module that names jobs, in the working folder."""
    here = tmp_path / "here"
    here.mkdir()
    made = f"sliced_job.job({str(source)!r}, {str(output)!r}, executor=InlineExecutor())"
    (here / "my_jobs.py").write_text(
        "import sliced_job\nfrom datamat.testing import InlineExecutor\n\n\n"
        f"def build():\n    return {made}.pair\n\n\n"
        "ready = build()\nnumber = 3\n\n\n"
        "def build_one(seed, *more, name='one', **options):\n    return build()\n"
    )
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("my_jobs", None)


@pytest.mark.parametrize("name", ["my_jobs:build", "my_jobs:ready"])
def test_command_runs_a_job_of_a_module(jobs, wanted, output, capsys, name):
    """A function that returns it, or the job itself."""
    assert main(["run", name]) == 0

    assert f"{output}: complete: 80 records" in capsys.readouterr().out
    _is_as_wanted(output, wanted)


def test_command_takes_its_number_from_slurm(jobs, wanted, output, monkeypatch, capsys):
    """It is that of the array, whichever others were submitted with it; the end of the job is a deadline."""
    array = {"ID": 9, "MIN": 3, "MAX": 11, "STEP": 6, "COUNT": 3}
    for name, value in {f"ARRAY_TASK_{name}": value for name, value in array.items()}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    stopped = main(["run", "my_jobs:build"])
    tasks = sorted(path.name for path in (output / ".datamat/slices").glob("task-*"))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))

    code = main(["run", "my_jobs:build"])

    assert (stopped, code) == (1, 0)
    assert tasks == ["task-00009"]
    assert "stopped by its deadline" in capsys.readouterr().err
    _is_as_wanted(output, wanted)


def test_signal_before_the_limit_is_the_deadline(jobs, wanted, output, tmp_path):
    """SIGUSR1 to all processes of a task: it ends with code 1, and the next one continues."""
    act = f"read,10,{int(signal.SIGUSR1)},{tmp_path / 'tally'}"
    path = f"import sys; sys.path.insert(0, {os.path.dirname(sliced_job.__file__)!r})"
    code = f"{path}; from datamat.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "my_jobs:build", "--task-index=0", "--num-tasks=2"],
        env={**os.environ, "SLICES_ACT": act}, start_new_session=True, capture_output=True, text=True, check=False,
    )  # fmt: skip

    codes = [main(["finalize", "my_jobs:build"]), main(["run", "my_jobs:build"]), main(["finalize", "my_jobs:build"])]

    assert done.returncode == 1
    assert "stopped by its deadline" in done.stderr
    assert codes == [1, 0, 0]
    _is_as_wanted(output, wanted)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_jobs", "want MODULE:JOB"),
        ("no_such:job", "there is no module 'no_such'"),
        ("my_jobs:missing", "my_jobs has no 'missing'"),
        ("my_jobs:number", "my_jobs:number gives 3; want a Materializer"),
        ("my_jobs:build_one", "needs arguments (seed)"),
        ("here/my_jobs.py:build", "as in my_jobs:build"),
    ],
)
def test_command_refuses_what_is_no_job(jobs, capsys, name, message):
    """With code 2, and what is wanted."""
    assert main(["run", name]) == 2

    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("index", "count"), [(2, 2), (None, 2), (True, 2)])
def test_impossible_task_is_refused(source, output, index, count):
    """Before anything is touched."""
    with pytest.raises(OptionError, match="task_index is"):
        _job(source, output).run(task_index=index, num_tasks=count, progress=False)

    assert not output.exists()
