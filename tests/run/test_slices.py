"""Several tasks make one output together: whatever becomes of them, its bytes are those of one ordinary run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import sliced_job
from sliced_job import content, make_source, start_task

from datamat import IncompleteRunError, OptionError, OutputError, OutputLockedError, load, read_ledger, verify
from datamat.cli import main
from datamat.directory.files import locked
from datamat.run import materializer
from datamat.run.status import read_status

LEASE_S = 0.6


@pytest.fixture
def source(tmp_path):
    """The raw data."""
    return make_source(tmp_path / "source")


@pytest.fixture
def wanted(source, tmp_path):
    """The files that an ordinary run gives."""
    sliced_job.job(source, tmp_path / "wanted").run(progress=False)
    return content(tmp_path / "wanted")


@pytest.fixture(autouse=True)
def short_leases(monkeypatch):
    """Have leases of this process expire soon."""
    monkeypatch.setattr(materializer, "_lease_s", LEASE_S)


def _run(source, output, index=1, count=2, **options):
    return sliced_job.job(source, output, **options).run(task_index=index, num_tasks=count, progress=False)


def _is_as_wanted(output, wanted):
    assert content(output) == wanted
    assert verify(output, deep=True).ok
    assert sorted(path.name for path in (output / ".datamat").iterdir()) == [
        "inputs",
        "ledger.jsonl",
        "lock",
        "sidecars.json",
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_one_task_alone_makes_everything(source, wanted, tmp_path, count):
    """The others need not come: a task takes all that nobody has."""
    report = _run(source, tmp_path / "out", 0, count)

    assert report.is_complete
    assert (report.num_shards_written, report.num_shards_reused) == (sliced_job.NUM_SHARDS, 0)
    _is_as_wanted(tmp_path / "out", wanted)


def test_tasks_that_start_together_share_the_work(source, wanted, tmp_path):
    """Five tasks at once, and one when all is done: no shard is missing, and each report says the whole."""
    output = tmp_path / "out"

    tasks = [start_task(source, output, number, 5) for number in range(5)]
    said = [task.communicate() for task in tasks]
    late = _run(source, output, 0, 5)

    assert [(task.returncode, out) for task, (out, _) in zip(tasks, said, strict=True)] == [(0, "True\n")] * 5, said
    assert late.is_complete
    assert late.did_nothing
    _is_as_wanted(output, wanted)
    assert len(load(output)) == 80


@pytest.mark.parametrize("at", [1, 12, 31])
def test_shards_of_a_killed_task_are_taken_over(source, wanted, tmp_path, at):
    """A task is killed with its workers at some read; its lease expires, and another makes what it had."""
    output = tmp_path / "out"
    killed = start_task(source, output, 0, 2, act=f"read,{at},9,{tmp_path / 'tally'}")
    killed.communicate()

    report = _run(source, output)

    assert killed.returncode == -signal.SIGKILL
    assert report.is_complete
    _is_as_wanted(output, wanted)


def test_task_that_comes_again_resumes_its_own_parts(source, wanted, tmp_path):
    """The next job of the same array does not wait for its own lease, and makes no finished shard again."""
    output = tmp_path / "out"
    start_task(source, output, 0, 2, act=f"read,31,9,{tmp_path / 'tally'}").communicate()
    materializer._lease_s = 3600.0

    report = _run(source, output, 0)

    assert report.is_complete
    assert 0 < report.num_shards_written < sliced_job.NUM_SHARDS
    _is_as_wanted(output, wanted)


def test_stopped_task_that_wakes_damages_nothing(source, wanted, tmp_path):
    """A task is stopped in mid-shard, another takes the shard and writes the manifest, and then the first goes on."""
    output = tmp_path / "out"
    stopped = start_task(source, output, 0, 2, act=f"read,10,{int(signal.SIGSTOP)},{tmp_path / 'tally'}")
    try:
        sliced_job.wait_until_stopped(stopped)
        report = _run(source, output)
        before = content(output)
    finally:
        sliced_job.wake(stopped)
    out, err = stopped.communicate()

    assert report.is_complete
    assert before == wanted
    assert (stopped.returncode, out) == (0, "True\n"), err
    _is_as_wanted(output, wanted)


def test_stopped_task_that_wakes_early_shares_on(source, wanted, tmp_path):
    """It wakes while the other is at work: both may make the same shard, and one of them counts."""
    output = tmp_path / "out"
    first = start_task(source, output, 0, 2, lease_s=LEASE_S, act=f"read,10,{int(signal.SIGSTOP)},{tmp_path / 'a'}")
    sliced_job.wait_until_stopped(first)
    second = start_task(source, output, 1, 2, lease_s=LEASE_S, act=f"read,25,{int(signal.SIGSTOP)},{tmp_path / 'b'}")
    try:
        sliced_job.wait_until_stopped(second)
    finally:
        sliced_job.wake(first)
    out, err = first.communicate()
    sliced_job.wake(second)
    out2, err2 = second.communicate()

    assert (first.returncode, out) == (0, "True\n"), err
    assert (second.returncode, out2) == (0, "True\n"), err2
    _is_as_wanted(output, wanted)


def test_report_of_a_late_waker_counts_what_it_made(source, wanted, tmp_path):
    """It was stopped in its fifth shard; what it reads then has nowhere to go, and its report keeps the first four."""
    output = tmp_path / "out"
    said = tmp_path / "said"
    named = f", hooks=[sliced_job.SayShards({str(said)!r})]"
    act = f"read,31,{int(signal.SIGSTOP)},{tmp_path / 'tally'}"
    stopped = start_task(source, output, 0, 2, act=act, options=named)
    try:
        sliced_job.wait_until_stopped(stopped)
        made = len(list((output / ".datamat/slices/done").glob("*.json")))
        report = _run(source, output)
    finally:
        sliced_job.wake(stopped)
    _, err = stopped.communicate()

    assert made + report.num_shards_written == sliced_job.NUM_SHARDS
    assert said.read_text() == f"{made} shards, failed: False", err
    _is_as_wanted(output, wanted)


def test_leaving_task_gives_its_leases_back_at_once(source, wanted, tmp_path):
    """It ends by a signal in mid-shard: nobody waits until its leases, of an hour, expire."""
    output = tmp_path / "out"
    act = f"read,10,{int(signal.SIGTERM)},{tmp_path / 'tally'}"
    left = start_task(source, output, 0, 2, lease_s=3600, act=act)
    left.communicate()
    materializer._lease_s = 3600.0
    held = {path.name for path in (output / ".datamat/slices/leases").iterdir()}
    done = {f"{path.stem}.00000" for path in (output / ".datamat/slices/done").iterdir()}

    report = sliced_job.job(source, output).run(task_index=1, num_tasks=2, deadline=60, progress=False)

    assert left.returncode != 0
    assert held - done
    assert report.is_complete
    _is_as_wanted(output, wanted)


def test_task_of_another_definition_is_refused(source, tmp_path):
    """It names what differs; what the others made stays."""
    output = tmp_path / "out"
    start_task(source, output, 0, 2, act=f"read,31,9,{tmp_path / 'tally'}").communicate()

    with pytest.raises(
        OutputError, match=r"tasks of another definition than that of this one: seed changed \(0 -> 1\)"
    ):
        _run(source, output, seed=1)

    assert any((output / ".datamat/slices/done").iterdir())


def test_others_are_refused_while_a_task_is_there(source, wanted, tmp_path):
    """An ordinary run, and a second process of the same number, name who is at work."""
    output = tmp_path / "out"
    task = start_task(source, output, 0, 2, act=f"read,5,{int(signal.SIGSTOP)},{tmp_path / 'tally'}")
    try:
        sliced_job.wait_until_stopped(task)
        with pytest.raises(OutputLockedError, match=f"tasks that share it: task-00000 is process {task.pid}"):
            sliced_job.job(source, output).run(progress=False)
        with pytest.raises(OutputLockedError, match=f"being written by process {task.pid}"):
            _run(source, output, 0)
    finally:
        sliced_job.wake(task)
    task.communicate()

    assert task.returncode == 0
    _is_as_wanted(output, wanted)


def test_task_is_refused_while_an_ordinary_run_is_there(source, tmp_path):
    """The run has the lock of the output, and shares nothing."""
    (tmp_path / "out/.datamat").mkdir(parents=True)

    with locked(tmp_path / "out/.datamat/lock"), pytest.raises(OutputLockedError, match="which shares it with nobody"):
        _run(source, tmp_path / "out")


def test_status_shows_each_task(source, wanted, tmp_path):
    """One is at work, one was killed: who, and how many shards; and what they have made together."""
    output = tmp_path / "out"
    start_task(source, output, 1, 2, act=f"read,31,9,{tmp_path / 'a'}").communicate()
    act = f"read,1,{int(signal.SIGSTOP)},{tmp_path / 'b'}"
    task = start_task(source, output, 0, 2, lease_s=LEASE_S, act=act)
    try:
        sliced_job.wait_until_stopped(task)
        made = len(list((output / ".datamat/slices/done").glob("*.json")))
        status = read_status(output)
    finally:
        sliced_job.wake(task)
    task.communicate()

    assert status.is_running
    assert status.done.num_shards == made > 0
    (first, holder, none), *second = status.tasks
    assert (first, none, second) == ("task-00000", 0, [("task-00001", "", made)])
    assert holder.startswith(f"process {task.pid} on ")
    assert f"task-00001: no process is at work; {made} shards done" in str(status)
    assert read_status(output).tasks == ()


def test_ordinary_run_takes_over_what_tasks_made(source, wanted, tmp_path):
    """Once no task is there, `run` continues."""
    output = tmp_path / "out"
    start_task(source, output, 0, 2, act=f"read,31,9,{tmp_path / 'tally'}").communicate()

    report = sliced_job.job(source, output).run(progress=False)

    assert report.is_complete
    assert 0 < report.num_shards_written < sliced_job.NUM_SHARDS
    _is_as_wanted(output, wanted)


def test_task_that_is_done_with_its_own_leaves_the_rest_to_others(source, wanted, tmp_path):
    """Each has its own `include`: the first to end has all of its shards, and the other is in mid-shard."""
    output = tmp_path / "out"
    act = f"read,5,{int(signal.SIGSTOP)},{tmp_path / 'tally'}"
    other = start_task(source, output, 1, 2, act=act, options=", include='*-0000[345]-of-*'")
    try:
        sliced_job.wait_until_stopped(other)
        report = _run(source, output, 0, include="*-0000[012]-of-*")
    finally:
        sliced_job.wake(other)
    out, err = other.communicate()

    assert (report.is_complete, report.stopped, report.num_shards_written) == (False, "", 3)
    assert (other.returncode, out) == (0, "True\n"), err
    _is_as_wanted(output, wanted)


def test_finalize_writes_the_manifest_after_a_kill(source, tmp_path):
    """The last task is killed right before it writes the manifest: nothing needs to be made again."""
    output = tmp_path / "out"
    options = {"sidecars": [sliced_job.end_at_manifest]}
    sliced_job.job(source, tmp_path / "wanted", **options).run(progress=False)
    act = f"manifest,1,9,{tmp_path / 'tally'}"
    named = ", sidecars=[sliced_job.end_at_manifest]"
    start_task(source, output, 0, 2, act=act, options=named).communicate()
    before = (output / "manifest.json").exists()

    report = sliced_job.job(source, output, **options).finalize(progress=False)

    assert not before
    assert report.is_complete
    assert report.num_shards_written == 0
    _is_as_wanted(output, content(tmp_path / "wanted"))


def test_finalize_names_what_is_missing(source, tmp_path):
    """It makes nothing."""
    output = tmp_path / "out"
    start_task(source, output, 0, 2, act=f"read,31,9,{tmp_path / 'tally'}").communicate()

    with pytest.raises(IncompleteRunError, match=r"lacks \d shards \(.*numbers-train-0000"):
        sliced_job.job(source, output).finalize(progress=False)

    assert not (output / "manifest.json").exists()


def test_finalize_makes_nothing_of_another_definition(source, tmp_path):
    """The code has changed since the tasks made all shards: they are of no use, and none is made instead."""
    output = tmp_path / "out"
    options = {"sidecars": [sliced_job.end_at_manifest]}
    act = f"manifest,1,9,{tmp_path / 'tally'}"
    start_task(source, output, 0, 2, act=act, options=", sidecars=[sliced_job.end_at_manifest]").communicate()

    with pytest.raises(IncompleteRunError, match=rf"lacks {sliced_job.NUM_SHARDS} shards .*run the tasks that make"):
        sliced_job.job(source, output, seed=1, **options).finalize(progress=False)
    report = sliced_job.job(source, output, **options).finalize(progress=False)

    assert (report.is_complete, report.num_shards_written) == (True, 0)


def test_only_what_changed_is_made_again(source, tmp_path):
    """Tasks rebuild the shards of changed rows, and readers see the old ones until all are there."""
    output = tmp_path / "out"
    _run(source, output, 0, 1)
    (source / "007.txt").write_text("changed")
    sliced_job.job(source, tmp_path / "wanted").run(progress=False)

    report = _run(source, output, 0, 1)

    assert report.is_complete
    assert (report.num_shards_written, report.num_shards_reused) == (1, sliced_job.NUM_SHARDS - 1)
    _is_as_wanted(output, content(tmp_path / "wanted"))


def test_deadline_leaves_the_rest_to_others(source, wanted, tmp_path):
    """A task whose time is over reports that; the next one continues."""
    output = tmp_path / "out"
    holder = start_task(source, output, 0, 2, act=f"read,5,{int(signal.SIGSTOP)},{tmp_path / 'tally'}")
    try:
        sliced_job.wait_until_stopped(holder)
        materializer._lease_s = 3600.0
        report = sliced_job.job(source, output).run(task_index=1, num_tasks=2, deadline=2, progress=False)
    finally:
        sliced_job.wake(holder)
    holder.communicate()

    assert report.stopped == "deadline"
    assert not report.is_complete
    _is_as_wanted(output, wanted)


def test_ledger_holds_what_every_task_recorded(source, tmp_path):
    """Each part is in it once, and the history ends with the run that wrote the manifest."""
    output = tmp_path / "out"

    _run(source, output, 0, 2)

    lines = list(read_ledger(output / ".datamat/ledger.jsonl"))
    committed = [(line.values["shard"], line.values["part"]) for line in lines if line.event == "part_committed"]
    assert len(committed) == len(set(committed)) >= sliced_job.NUM_SHARDS
    assert lines[-1].event == "run_finished"
    assert lines[-1].values["is_complete"]


def test_leases_name_the_task_and_only_grow(source, tmp_path):
    """After a kill the taken shard has a second generation, and the first is as it was."""
    output = tmp_path / "out"
    start_task(source, output, 0, 2, act=f"read,1,9,{tmp_path / 'tally'}").communicate()
    (first,) = (output / ".datamat/slices/leases").iterdir()

    with pytest.raises(KeyboardInterrupt):
        _run(source, output, hooks=[_Interrupt()])

    assert first.read_text().startswith("task-00000 ")
    assert json.loads((output / ".datamat/slices/plan.json").read_text())["name"] == "numbers"


class _Interrupt(materializer.RunHook):
    def on_shard_finished(self, event):
        raise KeyboardInterrupt


# ---------------------------------------------------------------- the command


@pytest.fixture
def jobs(source, tmp_path, monkeypatch):
    """A module that names jobs, in the working folder."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "my_jobs.py").write_text(
        "import sliced_job\n\n\n"
        f"def build():\n    return sliced_job.job({str(source)!r}, {str(tmp_path / 'out')!r})\n\n\n"
        "ready = build()\nnumber = 3\n\n\n"
        "def build_one(seed, *more, name='one', **options):\n    return build()\n"
    )
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("my_jobs", None)


@pytest.mark.parametrize("name", ["my_jobs:build", "my_jobs:ready"])
def test_command_runs_a_job_of_a_module(jobs, wanted, tmp_path, capsys, name):
    """A function that returns it, or the job itself."""
    assert main(["run", name]) == 0

    assert f"{tmp_path / 'out'}: complete: 80 records" in capsys.readouterr().out
    _is_as_wanted(tmp_path / "out", wanted)


def test_command_takes_its_number_from_slurm(jobs, wanted, tmp_path, monkeypatch, capsys):
    """It is that of the array, whichever others were submitted with it; the end of the job is a deadline."""
    array = {"ID": 9, "MIN": 3, "MAX": 11, "STEP": 6, "COUNT": 3}
    for name, value in {f"ARRAY_TASK_{name}": value for name, value in array.items()}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    stopped = main(["run", "my_jobs:build"])
    tasks = sorted(path.name for path in (tmp_path / "out/.datamat/slices").glob("task-*"))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))

    code = main(["run", "my_jobs:build"])

    assert (stopped, code) == (1, 0)
    assert tasks == ["task-00009"]
    assert "stopped by its deadline" in capsys.readouterr().err
    _is_as_wanted(tmp_path / "out", wanted)


def test_signal_before_the_limit_is_the_deadline(jobs, wanted, tmp_path):
    """SIGUSR1 to all processes of a task: it ends with code 1, and the next one continues."""
    act = f"read,10,{int(signal.SIGUSR1)},{tmp_path / 'tally'}"
    code = f"import sys; sys.path.insert(0, {os.path.dirname(sliced_job.__file__)!r}); from datamat.cli import main; "
    command = [
        sys.executable,
        "-c",
        f"{code}sys.exit(main(['run', 'my_jobs:build', '--task-index=0', '--num-tasks=2']))",
    ]
    done = subprocess.run(
        command, env={**os.environ, "SLICES_ACT": act}, start_new_session=True, capture_output=True, text=True
    )

    codes = [main(["finalize", "my_jobs:build"]), main(["run", "my_jobs:build"]), main(["finalize", "my_jobs:build"])]

    assert done.returncode == 1
    assert "stopped by its deadline" in done.stderr
    assert codes == [1, 0, 0]
    _is_as_wanted(tmp_path / "out", wanted)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_jobs", "names no job; want MODULE:JOB"),
        ("no_such:job", "there is no module 'no_such' in"),
        ("my_jobs:missing", "my_jobs has no 'missing'"),
        ("my_jobs:number", "gives 3; want a Materializer, or a function"),
        ("my_jobs:build_one", "my_jobs:build_one needs arguments (seed), and a JOB is called without any; give them"),
        ("my_jobs.py:build", "'my_jobs.py:build' names a file; name the module, as in my_jobs:build, from the folder"),
        ("./my_jobs:build", "names a file; name the module, as in my_jobs:build"),
        ("here/my_jobs.py:build", "names a file; name the module, as in my_jobs:build"),
    ],
)
def test_command_refuses_what_is_no_job(jobs, capsys, name, message):
    """With code 2, and what is wanted."""
    assert main(["run", name]) == 2

    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("index", "count", "message"),
    [
        (2, 2, "task_index is 2 of num_tasks=2; want a number from 0 to 1"),
        (None, 2, "give both, as in"),
        (True, 2, "task_index is True; want an int"),
    ],
)
def test_impossible_task_is_refused(source, tmp_path, index, count, message):
    """Before anything is touched."""
    with pytest.raises(OptionError, match=message):
        _run(source, tmp_path / "out", index, count)

    assert not (tmp_path / "out").exists()
