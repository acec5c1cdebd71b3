"""Tasks that share an output on Google's and Azure's stores, against their emulators.

What one run does is in `test_object_store`, `test_upload` and `test_source`, for these stores as well.
"""

import hashlib
import os
import signal

import pytest
import sliced_job
from sliced_job import content, make_source, start_task

from datamat import OutputError

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

LEASE_S = 3


@pytest.fixture(params=["gs", "az"])
def kind(request):
    """The stores."""
    return request.param


@pytest.fixture
def place(server, request):
    """The URL of a folder in a bucket of its own, the options for it, and the filesystem."""
    bucket = f"b{hashlib.md5(request.node.name.encode()).hexdigest()}"
    files = server.files()
    files.mkdir(bucket)
    return f"{server.kind}://{bucket}/sets/one", server.options(), files


def test_tasks_make_the_set_of_an_ordinary_run(place, tmp_path):
    """One is killed, one is stopped in mid-shard and wakes after the manifest, the last makes what they had."""
    url, options, files = place
    source = make_source(tmp_path / "source")

    def start(index, scratch, act=""):
        more = f", storage_options={options!r}, scratch={str(tmp_path / scratch)!r}"
        act = f"{act},{tmp_path / f'tally-{scratch}'}" if act else ""
        return start_task(source, url, index, 3, lease_s=LEASE_S, act=act, options=more)

    killed = start(0, "a", "read,16,9")
    killed.communicate()
    stopped = start(1, "b", f"read,5,{int(signal.SIGSTOP)}")
    sliced_job.wait_until_stopped(stopped)
    try:
        last = start(2, "c")
        said, _ = last.communicate()
    finally:
        sliced_job.wake(stopped)
        stopped.communicate()
    sliced_job.job(source, tmp_path / "wanted").run(progress=False)

    assert said == "True\n"
    wanted = content(tmp_path / "wanted")
    assert {name: files.cat_file(f"{url.partition('://')[2]}/{name}") for name in wanted} == wanted
    assert sliced_job.job(source, url, storage_options=options, scratch=tmp_path / "d").run(progress=False).did_nothing


def test_task_at_work_is_seen(place, tmp_path):
    """By the clock of the store: `status` names its process, and a task of another definition is refused."""
    url, options, _ = place
    source = make_source(tmp_path / "source")
    more = f", storage_options={options!r}, scratch={str(tmp_path / 'a')!r}"
    act = f"read,5,{int(signal.SIGSTOP)},{tmp_path / 'tally'}"
    task = start_task(source, url, 0, 2, lease_s=30, act=act, options=more)
    sliced_job.wait_until_stopped(task)
    try:
        status = sliced_job.job(source, url, storage_options=options, scratch=tmp_path / "c").status()
        job = sliced_job.job(source, url, storage_options=options, scratch=tmp_path / "b", seed=1)
        with pytest.raises(OutputError, match="tasks of another definition than that of this one: seed changed"):
            job.run(task_index=1, num_tasks=2, progress=False)
    finally:
        os.killpg(task.pid, signal.SIGKILL)
        task.communicate()

    ((name, process, _),) = status.tasks
    assert name == "task-00000"
    assert process.startswith(f"process {task.pid} on ")
