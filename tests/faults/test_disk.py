"""Full, dead, read-only or limited disks: an error says so, no torn file is visible, and the next run resumes."""

import errno
import os
import pathlib
import random
import resource
import shutil
import subprocess

import pytest
import small_pairs
from fault_injection import Fault, Process, check_visible, left_behind
from job import Job


@pytest.fixture
def tiny_disk(tmp_path):
    """Mount a tmpfs of a given size in KiB; skips where this user may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        again = "remount," if folder.is_mount() else ""
        command = ["mount", "-t", "tmpfs", "-o", again + options, "datamat-test", folder]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this user cannot mount a tmpfs here: {getattr(error, 'stderr', error)}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)


def check_refused(ended, job, whole, reason):
    """Check that a run failed for a reason that it names, with the place."""
    assert ended.code not in {0, None}, ended.said
    assert ended.num_orphans == 0
    assert os.strerror(reason) in ended.error, ended.said
    assert str(job.output) in ended.error, f"the error does not say where: {ended.error}"
    check_visible(pathlib.Path(job.output), whole)


def check_resumes(job_server, job, whole):
    ended = job_server.run(job)
    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert small_pairs.digests(job.output) == whole
    assert left_behind(pathlib.Path(job.output)) == []


@pytest.fixture
def kilobytes(request):
    """Sizes of disks that the small job does not fit on."""
    rng = random.Random(request.config.option.sample_seed)
    return [rng.randrange(8, 100, 4) for _ in range(1 if request.config.getoption("--commit") else 20)]


@pytest.mark.timeout(600)
def test_disk_that_is_full_at_a_random_write_is_reported_and_survived(
    job_server, tiny_disk, kilobytes, small_source, whole
):
    """Once there is room, the next run ends with the same bytes."""
    for size in kilobytes:
        disk = tiny_disk(f"size={size}k")
        job = Job(str(small_source), str(disk / f"out{size}"))

        check_refused(job_server.run(job), job, whole, errno.ENOSPC)

        tiny_disk("size=64m")
        check_resumes(job_server, job, whole)
        shutil.rmtree(job.output)


@pytest.mark.long
def test_disk_without_inodes_is_reported_and_survived(job_server, tiny_disk, small_source, whole):
    """It counts as full, although there is room for data."""
    job = Job(str(small_source), str(tiny_disk("size=64m,nr_inodes=30") / "out"))

    check_refused(job_server.run(job), job, whole, errno.ENOSPC)

    tiny_disk("nr_inodes=1000")
    check_resumes(job_server, job, whole)


@pytest.mark.long
def test_output_that_is_read_only_is_reported(job_server, tiny_disk, small_source, whole):
    """The error comes before any work."""
    disk = tiny_disk("size=64m,ro")
    job = Job(str(small_source), str(disk / "out"))

    check_refused(job_server.run(job), job, whole, errno.EROFS)

    tiny_disk("rw")
    check_resumes(job_server, job, whole)


@pytest.mark.sample(2)
@pytest.mark.parametrize("limit", [1 << 10, 5 << 10])
def test_limit_on_file_size_is_reported_and_survived(job_server, small_source, tmp_path, whole, limit):
    """Under `ulimit -f`, the system refuses to let a file grow."""
    job = Job(str(small_source), str(tmp_path / "out"))

    options = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    with Process(job, tmp_path, **options) as process:
        ended = process.ended()

    check_refused(ended, job, whole, errno.EFBIG)
    check_resumes(job_server, job, whole)


@pytest.mark.sample(3)
@pytest.mark.parametrize("reason", [errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE])
@pytest.mark.parametrize("at", [20, 100, 200])
def test_disk_that_fails_from_some_moment_on_is_reported_and_survived(
    job_server, small_source, tmp_path, whole, reason, at
):
    """A dead disk, a used-up quota, a mount gone read-only, a lost file server."""
    job = Job(str(small_source), str(tmp_path / "out"))
    kinds = ("open", "write", "fsync", "rename", "mkdir")

    ended = job_server.run(job, Fault("fail", at, reason, persists=True, kinds=kinds))

    assert ended.num_hit
    check_refused(ended, job, whole, reason)
    check_resumes(job_server, job, whole)


def test_disk_that_transfers_half_of_everything_changes_nothing(job_server, small_source, tmp_path, whole):
    """Reads and writes on a file server or a pipe may be short; datamat repeats them until all bytes are through."""
    job = Job(str(small_source), str(tmp_path / "out"))

    ended = job_server.run(job, Fault("short", 1, persists=True, kinds=("write", "read")))

    assert ended.num_hit > 50
    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert small_pairs.digests(job.output) == whole
