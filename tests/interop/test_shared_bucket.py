"""Tasks that share an output in a bucket: whatever becomes of them, its bytes are those of one ordinary run.

The server is moto's. Tasks are processes, which end or stop themselves at a certain read. Scratch folders of two
names are those of two hosts.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import threading

import pytest
import sliced_job
from sliced_job import NUM_SHARDS, content, make_source, start_task

from datamat import IncompleteRunError, OutputError, OutputLockedError, failures
from datamat import status as read_status
from datamat.directory.ledger import read_ledger

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

LEASE_S = 1.5


class Bucket:
    """An output in a bucket, and the job whose tasks make it."""

    def __init__(self, options, tmp_path):
        self.tmp_path = tmp_path
        self.num_started = 0
        self.source = make_source(tmp_path / "source")
        self.options = options
        self.files = s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False)
        bucket = f"b{hashlib.md5(str(tmp_path).encode()).hexdigest()}"
        self.files.mkdir(bucket)
        self.url = f"s3://{bucket}/sets/one"

    def job(self, scratch="here", **options):
        """Return the job; a scratch folder of another name is one of another host."""
        options = {"storage_options": self.options, "scratch": self.tmp_path / scratch, **options}
        return sliced_job.job(self.source, self.url, **options)

    def run(self, index=1, count=2, scratch="here", lease_s=LEASE_S, **options):
        """Run a task in this process."""
        options = {"storage_options": self.options, "scratch": self.tmp_path / scratch, **options}
        return sliced_job.run_task(self.source, self.url, index, count, lease_s, **options)

    def start(self, index, act="", lease_s=LEASE_S, scratch="there", options="", tally="", storage=None, **more):
        """Start a task as a process; see `sliced_job`. Those of one tally count together."""
        self.num_started += 1
        act = f"{act},{self.tmp_path / (tally or f'tally-{self.num_started}')}" if act else ""
        storage = storage or self.options
        place = f", storage_options={storage!r}, scratch={str(self.tmp_path / scratch)!r}{options}"
        return start_task(self.source, self.url, index, 2, lease_s=lease_s, act=act, options=place, **more)

    @contextlib.contextmanager
    def late_task(self, proxy, is_held):
        """Start a task in which rows fail; hold a request of it, and then all others, for the block; see it end."""
        asked, goes_on = threading.Event(), threading.Event()

        def meet(_, handler):
            if is_held(handler):
                asked.set()
            return goes_on if asked.is_set() else None

        proxy.meet = meet
        task = self.start(0, storage=self.through(proxy), options=", errors='skip'", fails="13579")
        try:
            while not asked.wait(0.1):
                assert task.poll() is None, task.communicate()
            yield
        finally:
            goes_on.set()
        out, err = task.communicate()
        assert (task.returncode, out) == (0, "True\n"), err

    def through(self, proxy):
        """Return the options by which the store is reached through a proxy."""
        return {**self.options, "endpoint_url": f"http://127.0.0.1:{proxy.server_port}"}

    def wanted(self, **options):
        """Return the files that an ordinary run gives."""
        sliced_job.job(self.source, self.tmp_path / "wanted", **options).run(progress=False)
        return content(self.tmp_path / "wanted")

    def there(self):
        """Return what is in the bucket, and the names of what is in its `.datamat`."""
        root = self.url.removeprefix("s3://")
        names = [path[len(root) + 1 :] for path in self.files.find(root)]
        seen = {name: self.files.cat_file(f"{root}/{name}") for name in names if ".datamat" not in name}
        return seen, {name.removeprefix(".datamat/") for name in names if ".datamat" in name}

    def names(self, folder):
        """Return the names of what the tasks of a session share."""
        return sorted(name.rpartition("/")[2] for name in self.there()[1] if f"/{folder}/" in name)

    def check(self, wanted):
        """Assert that the bucket holds the dataset, and nothing is left over, there or in the scratch folders."""
        found, work = self.there()
        assert found == wanted
        assert work <= {"ledger.jsonl", "names.json", "sidecars.json", "inputs"}
        assert not list(self.tmp_path.glob("*/one-*-task-*"))


@pytest.fixture
def bucket(options, tmp_path):
    """An output in a bucket, and the job whose tasks make it."""
    return Bucket(options, tmp_path)


def test_shards_of_a_killed_task_are_taken_over(bucket):
    """It is killed with its workers; its lease expires, and a task of another host makes what it had."""
    killed = bucket.start(0, act="read,20,9")
    killed.communicate()
    made = len(bucket.names("done"))
    with pytest.raises(IncompleteRunError, match=rf"{bucket.url} lacks {NUM_SHARDS - made} shards"):
        bucket.job("third").finalize(progress=False)

    report = bucket.run()
    late = bucket.run(0, scratch="third")

    assert killed.returncode == -signal.SIGKILL
    assert made > 0
    assert report.is_complete
    assert report.num_shards_written + made == NUM_SHARDS
    assert late.is_complete
    assert late.did_nothing
    assert late.num_records == 80
    bucket.files.get(f"{bucket.url}/.datamat/ledger.jsonl", str(bucket.tmp_path / "ledger"))
    lines = list(read_ledger(bucket.tmp_path / "ledger"))
    assert len({line.values["shard"] for line in lines if line.event == "part_committed"}) == NUM_SHARDS
    assert lines[-1].event == "run_finished"
    shutil.rmtree(bucket.tmp_path / "there")
    bucket.check(bucket.wanted())


def test_task_that_comes_again_resumes_its_own_parts(bucket):
    """It does not wait for its own lease, of an hour, as long as its scratch folder is there."""
    bucket.start(0, act="read,20,9", lease_s=3600).communicate()

    report = bucket.run(0, scratch="there", lease_s=3600)

    assert report.is_complete
    assert 0 < report.num_shards_written < NUM_SHARDS
    bucket.check(bucket.wanted())


def test_stopped_task_that_wakes_damages_nothing(bucket):
    """It is stopped in mid-shard; another takes the shard and writes the manifest; then the first goes on."""
    stopped = bucket.start(0, act=f"read,10,{int(signal.SIGSTOP)}")
    sliced_job.wait_until_stopped(stopped)
    try:
        with pytest.raises(OutputError, match=r"tasks of another definition than that of this one: seed changed"):
            bucket.run(seed=1, scratch="other")
        with pytest.raises(OutputLockedError, match=f"being written by process {stopped.pid}"):
            bucket.run(0, scratch="there")
        report = bucket.run()
        before, _ = bucket.there()
    finally:
        sliced_job.wake(stopped)
    out, err = stopped.communicate()
    shutil.rmtree(bucket.tmp_path / "other")

    assert report.is_complete
    assert before == bucket.wanted()
    assert (stopped.returncode, out) == (0, "True\n"), err
    bucket.check(before)


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
def test_late_upload_of_a_shard_that_lacks_a_row_replaces_nothing(bucket, proxy, replaces):
    """It was begun before another task made the shard with all rows, and goes on after the manifest."""
    if replaces:
        bucket.run(0, 1, errors="skip", scratch="before")
        for path in bucket.source.iterdir():
            path.write_text("changed")
            os.utime(path, (2, 2))

    def is_shard(handler):
        sends = handler.command == "PUT" and handler.path.endswith(".tfrecord")
        return sends and (".datamat" in handler.path or not replaces)

    with bucket.late_task(proxy, is_shard):
        report = bucket.run(errors="skip")
        before, _ = bucket.there()

    assert any(seen.startswith("PUT") and seen.endswith(".tfrecord") for seen in proxy.seen)
    assert (report.is_complete, report.num_failed) == (True, 0)
    assert before == bucket.wanted(errors="skip")
    bucket.check(before)


def test_uploaded_shard_of_a_killed_task_counts(bucket, proxy):
    """It had not noted the shard for the others; what failed in it is told, too."""

    def meet(_, handler):
        if handler.command == "PUT" and "/done/" in handler.path:
            os.killpg(killed.pid, signal.SIGKILL)
            return "cut"
        return None

    proxy.meet = meet
    killed = bucket.start(0, storage=bucket.through(proxy), options=", errors='skip'", fails="13579")
    killed.communicate()
    shard = bucket.names("leases")[0].partition(".")[0]
    others = bucket.names("done")

    other = bucket.run(1, errors="skip", include=[shard], scratch="other")
    noted = bucket.names("done")
    last = bucket.run(0, errors="skip", scratch="there")

    assert (others, noted) == ([], [f"{shard}.json"])
    num_failed = other.num_failed
    assert (other.num_shards_written, other.is_complete) == (0, False)
    assert num_failed > 0
    assert (last.num_failed, last.is_complete) == (num_failed, True)
    told = failures(bucket.url, storage_options=bucket.options)
    assert {failure.shard.partition(".")[0] for failure in told} == {shard}
    assert len(told) == num_failed
    shutil.rmtree(bucket.tmp_path / "other")
    bucket.check(bucket.there()[0])


def test_two_last_tasks_write_one_manifest(bucket):
    """Two of one host share the work; the one that is stopped right before the manifest goes on after the other."""
    act = f"manifest,1,{int(signal.SIGSTOP)}"
    named = ", sidecars=[sliced_job.end_at_manifest]"
    tasks = [bucket.start(number, act=act, tally="tally", options=named) for number in range(2)]
    stopped = os.waitid(os.P_ALL, 0, os.WSTOPPED).si_pid
    (first,) = [task for task in tasks if task.pid == stopped]
    (second,) = [task for task in tasks if task.pid != stopped]
    out, err = second.communicate()
    before, _ = bucket.there()
    sliced_job.wake(first)
    out_of_first, err_of_first = first.communicate()

    assert (second.returncode, out) == (0, "True\n"), err
    assert (first.returncode, out_of_first) == (0, "True\n"), err_of_first
    assert before == bucket.wanted(sidecars=[sliced_job.end_at_manifest])
    bucket.check(before)


def test_kills_while_tasks_replace_a_shard(bucket):
    """Readers see the old one until all are made; the end, where the last task is killed, needs none of its disk."""
    bucket.run(0, 1)
    old, _ = bucket.there()
    (bucket.source / "007.txt").write_text("changed")
    bucket.start(0, act="read,3,9").communicate()
    between, _ = bucket.there()
    named = ", sidecars=[sliced_job.end_at_manifest]"
    bucket.start(0, act="manifest,1,9", options=named).communicate()
    killed, _ = bucket.there()

    report = bucket.job("third", sidecars=[sliced_job.end_at_manifest]).finalize(progress=False)

    assert between == old
    assert killed["manifest.json"] == bucket.wanted(sidecars=[sliced_job.end_at_manifest])["manifest.json"]
    assert report.is_complete
    assert (report.num_shards_written, report.num_shards_reused) == (0, NUM_SHARDS)
    shutil.rmtree(bucket.tmp_path / "there")
    bucket.check(bucket.wanted(sidecars=[sliced_job.end_at_manifest]))


# ---------------------------------------------------------------- without processes


def test_status_shows_the_tasks_at_work(bucket):
    """One is at work, one was killed: who, what each has made, and all together; another host has no scratch folder."""
    bucket.start(1, "read,20,9", scratch="one", lease_s=30).communicate()
    task = bucket.start(0, f"read,1,{int(signal.SIGSTOP)}", scratch="two", lease_s=30)
    try:
        sliced_job.wait_until_stopped(task)
        status = bucket.job("three").status()
        by_url = read_status(bucket.url, storage_options=bucket.options)
    finally:
        os.killpg(task.pid, signal.SIGKILL)
        task.communicate()

    made = len(bucket.names("done"))
    assert status.is_running
    assert status.output == bucket.url
    assert (status.done.num_shards, status.num_shards) == (made, NUM_SHARDS)
    assert made > 0
    assert len(status.changes) == NUM_SHARDS - made
    (first, holder, none), (second, _, shards) = status.tasks
    assert (first, none, second, shards) == ("task-00000", 0, "task-00001", made)
    assert holder.startswith(f"process {task.pid} on ")
    assert (by_url.state, by_url.done, by_url.tasks) == ("running", status.done, status.tasks)
    assert by_url.num_shards == NUM_SHARDS
