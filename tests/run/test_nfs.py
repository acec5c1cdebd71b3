"""Tasks that share an output over NFS, each by a mount of its own, as two hosts have it: the same bytes.

`DATAMAT_TEST_NFS=/mnt/a:/mnt/b` names two mounts of one export, made with `nosharecache`, so that neither has what the
other has cached. `sh tests/run/nfs.sh` runs this file where the kernel has no NFS: in User Mode Linux, which has.
"""

import os
import pathlib
import shutil
import signal
import uuid

import pytest
import sliced_job
from sliced_job import content, make_source, start_task

from datamat import OutputLockedError, verify

MOUNTS = os.environ.get("DATAMAT_TEST_NFS", "")

pytestmark = [
    pytest.mark.skipif(not MOUNTS, reason="DATAMAT_TEST_NFS names no two mounts of one export; see tests/README.md"),
    pytest.mark.long,
    pytest.mark.timeout(600),
]


@pytest.fixture
def hosts():
    """One folder, as two hosts see it."""
    name = uuid.uuid4().hex
    places = [pathlib.Path(mount, name) for mount in MOUNTS.split(":")]
    places[0].mkdir()
    yield places
    shutil.rmtree(places[0])


@pytest.fixture
def source(tmp_path):
    """The raw data, on a local disk."""
    return make_source(tmp_path / "source")


@pytest.fixture
def wanted(source, tmp_path):
    """The files that an ordinary run gives."""
    sliced_job.job(source, tmp_path / "wanted").run(progress=False)
    return content(tmp_path / "wanted")


def ended(task):
    out, err = task.communicate()
    return task.returncode, out, err


def test_tasks_of_two_hosts_share_the_work(source, wanted, hosts):
    """All of them see at once that the output is complete, whoever wrote the manifest."""
    tasks = [start_task(source, hosts[number % 2] / "out", number, 4, lease_s=20) for number in range(4)]
    said = [ended(task) for task in tasks]

    assert [(code, out) for code, out, _ in said] == [(0, "True\n")] * 4, said
    assert content(hosts[0] / "out") == content(hosts[1] / "out") == wanted
    assert verify(hosts[1] / "out", deep=True).ok


def test_shards_of_a_host_that_died_are_taken_over(source, wanted, hosts, tmp_path):
    """It was killed in mid-shard; the other sees its number stand still."""
    start_task(source, hosts[0] / "out", 0, 2, act=f"read,12,9,{tmp_path / 'tally'}").communicate()

    code, out, err = ended(start_task(source, hosts[1] / "out", 1, 2, lease_s=3))

    assert (code, out) == (0, "True\n"), err
    assert content(hosts[0] / "out") == wanted


def test_host_that_was_stopped_and_wakes_damages_nothing(source, wanted, hosts, tmp_path):
    """The other has written the manifest, and removed its folder."""
    act = f"read,10,{int(signal.SIGSTOP)},{tmp_path / 'tally'}"
    stopped = start_task(source, hosts[0] / "out", 0, 2, act=act)
    sliced_job.wait_until_stopped(stopped)
    try:
        second = ended(start_task(source, hosts[1] / "out", 1, 2, lease_s=3))
        before = content(hosts[1] / "out")
    finally:
        sliced_job.wake(stopped)
    first = ended(stopped)

    assert [said[:2] for said in (first, second)] == [(0, "True\n")] * 2, (first, second)
    assert before == content(hosts[1] / "out") == wanted


def test_lock_of_one_host_holds_on_the_other(source, hosts, tmp_path):
    """A second process of the same number, and an ordinary run, are refused while the first is there."""
    task = start_task(source, hosts[0] / "out", 0, 2, act=f"read,5,{int(signal.SIGSTOP)},{tmp_path / 'tally'}")
    sliced_job.wait_until_stopped(task)
    job = sliced_job.job(source, hosts[1] / "out")
    try:
        with pytest.raises(OutputLockedError, match="tasks that share it: task-00000 is process"):
            job.run(progress=False)
        with pytest.raises(OutputLockedError, match="being written by process"):
            job.run(task_index=0, num_tasks=2, progress=False)
    finally:
        sliced_job.wake(task)

    assert ended(task)[:2] == (0, "True\n")
