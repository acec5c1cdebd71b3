"""Tasks that share an output in a bucket: of two that made one shard, the first counts; what is left of others goes.

The store is a server of this process, and the other task runs when a request of the first arrives. In
`interop/test_shared_bucket.py`, the tasks are processes.
"""

import multiprocessing
import os
import threading
import types

import pytest
import sliced_job
from loopback_s3 import s3

from datamat import OptionError, OutputLockedError, ShardOptions, materialize
from datamat.directory.files import locked
from datamat.folders import open_output
from datamat.options import RunOptions
from datamat.run.slices import TaskClaims, TaskNumber, TaskSession
from datamat.testing import InlineExecutor

__all__ = ["s3"]

URL = "s3://bucket/sets/one"
ROOT = "bucket/sets/one/"


def _numbered(n):
    return {"n": n}


@pytest.fixture
def source(tmp_path):
    return sliced_job.make_source(tmp_path / "source", 12)


@pytest.fixture
def run(s3, source, tmp_path):
    """Give a function that runs a task of two; each scratch folder is one of another host."""

    def run(index, scratch, url=URL, lease_s=60, **options):
        options = {"scratch": tmp_path / scratch, "executor": InlineExecutor(), **options}
        return sliced_job.run_task(source, url, index, 2, lease_s, **options)

    return run


def names(s3, folder):
    """Return the names of what the tasks of a session share."""
    return sorted(name.rpartition("/")[2] for name in s3.objects if f"/{folder}/" in name)


def check(s3, source, tmp_path, **options):
    """Assert that the bucket holds what an ordinary run gives, and nothing is left over."""
    sliced_job.job(source, tmp_path / "wanted", executor=InlineExecutor(), **options).run(progress=False)
    found = {name[len(ROOT) :]: one.content for name, one in s3.objects.items()}
    assert {name: found[name] for name in found if ".datamat" not in name} == sliced_job.content(tmp_path / "wanted")
    assert {name for name in found if ".datamat" in name} <= {
        f".datamat/{name}" for name in ("ledger.jsonl", "names.json", "sidecars.json", "inputs")
    }


def test_later_of_two_that_made_a_shard_does_not_count(s3, source, run, tmp_path, monkeypatch):
    """It is held in the upload of the shard, which lacks rows, and writes the manifest in the end."""
    monkeypatch.setenv("SLICES_FAIL", "0123456")
    began, goes_on = threading.Event(), threading.Event()

    def meet(operation, path):
        if operation != "put_object":
            return
        if "/heartbeats/task-00000" in path and began.is_set():
            goes_on.wait()
        if path.endswith(".tfrecord") and not began.is_set():
            began.set()
            with monkeypatch.context() as patch:
                patch.delenv("SLICES_FAIL")
                shard = names(s3, "leases")[0].partition(".")[0]
                others.append(run(1, "other", lease_s=1, errors="skip", include=[shard]))
            goes_on.set()

    others = []
    s3.meet = meet
    report = run(0, "late", lease_s=1, errors="skip")

    assert [(other.num_shards_written, other.num_failed) for other in others] == [(1, 0)]
    assert report.is_complete
    monkeypatch.delenv("SLICES_FAIL")
    sliced_job.job(source, tmp_path / "whole", executor=InlineExecutor(), errors="skip").run(progress=False)
    shard = min(name for name in s3.objects if name.endswith(".tfrecord"))
    assert s3.objects[shard].content == sliced_job.content(tmp_path / "whole")[shard[len(ROOT) :]]


def test_tasks_make_the_set_of_an_ordinary_run(s3, source, run, tmp_path):
    """The one that completes the plan writes the manifest; a late one has nothing to do."""
    first = run(0, "here", include=["*-0000[0-2]-*"])
    has_manifest = f"{ROOT}manifest.json" in s3.objects

    second = run(1, "there", exclude=["*-0000[0-2]-*"])

    assert (first.is_complete, has_manifest, second.is_complete) == (False, False, True)
    assert second.num_shards_written == sliced_job.NUM_SHARDS // 2
    check(s3, source, tmp_path)
    assert run(0, "third").did_nothing


def test_task_takes_shards_over(s3, tmp_path):
    """The store copies shards that differ from those of the plan in their names alone; no row is made again."""

    def make(splits, output=URL, **options):
        shards = ShardOptions(records_per_shard=4, shuffle=False)
        options = {"executor": InlineExecutor(), "progress": False, "shards": shards, **options}
        return materialize(_numbered, range(24), output, splits=splits, **options)

    make({"train": 0.7, "val": 0.3}, scratch=tmp_path / "here")

    splits = {"train": 0.7, "validation": 0.3}
    report = make(splits, scratch=tmp_path / "there", task_index=1, num_tasks=2)

    assert (report.is_complete, report.num_parts_written) == (True, 0)
    make(splits, tmp_path / "anew")
    found = {name[len(ROOT) :]: one.content for name, one in s3.objects.items() if ".datamat" not in name}
    assert found == sliced_job.content(tmp_path / "anew")


@pytest.mark.parametrize("ends", ["a task", "finalize"])
def test_scratch_folders_of_killed_tasks_go(s3, source, run, tmp_path, ends):
    """With the end of the set, on the same machine; that of a task which is alive stays."""
    killed = multiprocessing.get_context("fork").Process(target=run, args=(0, "here"))
    s3.meet = lambda operation, path: killed.kill() if path.endswith(".tfrecord") else None
    killed.start()
    killed.join()
    s3.meet = lambda operation, path: None
    (left,) = (tmp_path / "here").iterdir()
    alive = left.with_name(left.name.replace("task-00000", "task-00007"))
    (alive / ".datamat").mkdir(parents=True)

    with locked(alive / ".datamat" / "lock"):
        report = run(1, "here" if ends == "a task" else "there", lease_s=1)
        if ends == "finalize":
            assert left.exists()
            how = {"scratch": tmp_path / "here", "executor": InlineExecutor(), "progress": False}
            sliced_job.job(source, URL).finalize(**how)

    assert report.is_complete
    assert [path for path in (tmp_path / "here").iterdir() if "-task-" in path.name] == [alive]
    check(s3, source, tmp_path)


@pytest.fixture
def claims(s3, tmp_path):
    """Return the claims of a task, of a session that has begun if none had."""
    planned = types.SimpleNamespace(
        job=types.SimpleNamespace(place=URL), plan=types.SimpleNamespace(name="n", shards=[]), manifest_digests={}
    )
    return lambda lease_s=60.0: TaskClaims(
        planned, TaskNumber(1, 2, lease_s), [], TaskSession(open_output(URL)), tmp_path
    )


def test_ordinary_run_is_refused_while_a_task_shows_life(s3, source, claims, tmp_path):
    """On whatever host it is; one that has left is not waited for."""
    task = claims(lease_s=6.0)

    def meet(operation, path):
        if operation == "list_objects_v2":
            task.close()
            task.beat()

    s3.meet = meet
    job = sliced_job.job(source, URL, scratch=tmp_path / "a", executor=InlineExecutor())

    with pytest.raises(OutputLockedError, match=r"tasks, and one is alive \(task-00001, process \d+ on "):
        job.run(progress=False)
    s3.meet = lambda operation, path: None
    task.close()
    assert job.run(progress=False).is_complete


def test_what_is_left_of_an_ended_session_goes(s3, claims):
    """Of one that was killed while it cleared up, or woke later; not that of the present one."""
    claims()
    ended = TaskSession(open_output(URL))
    del s3.objects[f"{ROOT}.datamat/slices/plan.json"]
    before = {*s3.objects}
    claims()
    present = TaskSession(open_output(URL))

    ended.remove()

    assert before
    assert not before & {*s3.objects}
    assert [name.rpartition("/")[2].partition(".")[0] for name in sorted(s3.objects)] == ["task-00001", "plan"]
    assert present.is_there
    assert not present.is_over
    present.remove()
    assert not s3.objects


def test_store_without_conditions_is_refused(s3, run, tmp_path, monkeypatch):
    """By name, before any work: one of which nothing is known, one that says so, and one that ignores a condition."""
    message = r"%s is in a store that is not known to support conditional writes \(If-None-Match: \*\), which"
    memory = f"memory://{tmp_path.name}/out"
    with pytest.raises(OptionError, match=message % memory):
        run(0, "a", memory)

    monkeypatch.setattr(s3, "check", lambda path, headers: None)
    with pytest.raises(OptionError, match=message % URL):
        run(0, "b")
    s3.meet = lambda operation, path: 501 if operation == "put_object" else None
    with pytest.raises(OptionError, match=message % URL):
        run(0, "c")
    assert not s3.objects


def test_task_is_refused_while_an_ordinary_run_of_this_host_is_there(source, run, tmp_path, s3):
    """It has the lock of the scratch folder."""
    job = sliced_job.job(source, URL, scratch=tmp_path / "here", executor=InlineExecutor())
    work = job._made(RunOptions.of(job.options)).work
    os.makedirs(work)

    with locked(work / "lock"), pytest.raises(OutputLockedError, match=rf"{URL} .* shares it with nobody"):
        run(1, "here")
