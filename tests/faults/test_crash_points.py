"""A fault at every file operation of a small job, and again while it recovers: no hang, no silence, the same bytes.

On commit, one operation in twenty is hit, by one of the kinds in turn; in the long tier every one is, by all of them,
and one in ten of the operations of a run that recovers.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import shutil

import pytest
import small_pairs
from fault_injection import CHANGES, Fault, check_visible, left_behind, records
from job import Job

from datamat.testing import InlineExecutor

READS = (*CHANGES, "read")
FAULTS = {
    "kill": Fault("kill"),
    "kill group": Fault("kill group"),
    "tear": Fault("tear", kinds=("write",)),
    "io error": Fault("fail", error=errno.EIO, kinds=READS),
    "disk full": Fault(
        "fail", error=errno.ENOSPC, persists=True, kinds=("open", "write", "mkdir", "truncate", "fsync")
    ),
    "disk full once": Fault("fail", error=errno.ENOSPC, kinds=("open", "write", "mkdir", "truncate", "fsync")),
    "short": Fault("short", kinds=("write", "read")),
    "interrupted": Fault("fail", error=errno.EINTR, kinds=("open", "write", "read", "fsync")),
}
HARMLESS = {"short", "interrupted"}


def operations(job_server, job, fault):
    """Return how many operations of the fault's kinds an undisturbed run of the job has."""
    ended = job_server.run(job, Fault(kinds=fault.kinds))
    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    return ended.num_operations


def hurt(job_server, job, fault, at, whole):
    """Run the job under the fault on an empty output; check what must hold whatever the fault does."""
    output = os.path.realpath(job.output)

    ended = job_server.run(job, dataclasses.replace(fault, at=at))

    assert ended.code is not None, f"hung: {ended.said}"
    assert ended.num_orphans == 0
    check_visible(pathlib.Path(output), whole)
    if ended.code == 0:
        assert small_pairs.digests(output) == whole, "silent: it ended well with something else than the output"
    elif fault.action == "fail":
        assert os.strerror(fault.error) in ended.error, ended.said
    return ended


def heal(job_server, job, whole):
    """Run the job undisturbed; check that it makes the same output as a run from nothing, and leaves nothing else."""
    ended = job_server.run(job)

    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert small_pairs.digests(job.output) == whole
    assert left_behind(pathlib.Path(job.output)) == []


@pytest.mark.sample(2)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_at_any_operation_is_reported_and_recovered_from(job_server, small_source, whole, tmp_path, points, name):
    """Killed, torn, refused or cut short: an error gives the reason, no wrong file is visible, and a rerun succeeds."""
    fault = FAULTS[name]
    count = operations(job_server, Job(str(small_source), str(tmp_path / "undisturbed")), fault)

    for at in points(count, [*FAULTS].index(name)):
        job = Job(str(small_source), str(tmp_path / "out"))
        ended = hurt(job_server, job, fault, at, whole)
        assert ended.code == 0 or name not in HARMLESS, f"operation {at}: {ended.said}"
        heal(job_server, job, whole)
        shutil.rmtree(job.output)


@pytest.mark.sample(6)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["kill group", "io error"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_fault_while_recovering_is_recovered_from(job_server, small_source, whole, tmp_path, points, name, share):
    """The first run is killed at some share of its operations; the fault hits any operation of the second."""
    torn = tmp_path / "torn"
    count = operations(job_server, Job(str(small_source), str(tmp_path / "undisturbed")), FAULTS["kill group"])
    hurt(job_server, Job(str(small_source), str(torn)), FAULTS["kill group"], int(share * count), whole)
    shutil.copytree(torn, tmp_path / "counted")
    count = operations(job_server, Job(str(small_source), str(tmp_path / "counted")), FAULTS[name])

    for at in points(count):
        job = Job(str(small_source), str(tmp_path / "out"))
        shutil.copytree(torn, job.output)
        hurt(job_server, job, FAULTS[name], at, whole)
        heal(job_server, job, whole)
        shutil.rmtree(job.output)


@pytest.fixture(scope="module")
def former(small_source, tmp_path_factory):
    """The output of an earlier run with another seed, and its digests."""
    output = tmp_path_factory.mktemp("former") / "out"
    Job(str(small_source), str(output), seed=1).run(InlineExecutor())
    return output, small_pairs.digests(output)


@pytest.mark.sample(2)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["kill group", "io error"])
def test_kill_while_rebuilding_leaves_the_old_set_or_the_new_one(
    job_server, small_source, whole, former, tmp_path, points, name
):
    """Each file is from the old output or the new one, and readers find all of one of them."""
    shutil.copytree(former[0], tmp_path / "counted")
    sets = [records(former[0])]
    count = operations(job_server, Job(str(small_source), str(tmp_path / "counted")), FAULTS[name])
    sets.append(records(tmp_path / "counted"))

    for at in points(count):
        job = Job(str(small_source), str(tmp_path / "out"))
        shutil.copytree(former[0], job.output)
        fault = dataclasses.replace(FAULTS[name], at=at)

        ended = job_server.run(job, fault)

        found = small_pairs.digests(job.output)
        assert ended.code is not None and ended.num_orphans == 0, ended.said
        is_moving = b'"moving"' in (tmp_path / "out" / "manifest.json").read_bytes()
        assert all(digest in {whole.get(path), former[1].get(path)} or is_moving for path, digest in found.items())
        assert records(job.output) in sets, f"operation {at}"
        heal(job_server, job, whole)
        shutil.rmtree(job.output)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["kill group", "io error"])
def test_fault_while_repairing_is_recovered_from(job_server, small_source, whole, tmp_path, points, name):
    """One shard is damaged, another is gone; the fault hits any operation of the repair, and a second one succeeds."""
    damaged = tmp_path / "damaged"
    assert job_server.run(Job(str(small_source), str(damaged))).code == 0
    flipped, gone = sorted(damaged.glob("*-train-*.tfrecord"))
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\0")
    gone.unlink()
    shutil.copytree(damaged, tmp_path / "counted")
    repair = Job(str(small_source), str(tmp_path / "counted"), deed="repair")
    count = operations(job_server, repair, FAULTS[name])

    for at in points(count):
        job = dataclasses.replace(repair, output=str(tmp_path / "out"))
        shutil.copytree(damaged, job.output)

        ended = job_server.run(job, dataclasses.replace(FAULTS[name], at=at))

        assert ended.code is not None and ended.num_orphans == 0, ended.said
        assert ended.code != 0 or small_pairs.digests(job.output) == whole, f"operation {at}: silent"
        # A run alone need not find the flipped byte: once the other shard is back, every file has its size.
        assert job_server.run(dataclasses.replace(job, deed="run")).code == 0
        heal(job_server, job, whole)
        shutil.rmtree(job.output)


@pytest.mark.sample(3)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "fault"),
    [("parquet", "kill group"), ("parquet", "disk full once"), ("webdataset", "kill group")],
)
def test_fault_in_another_format_is_recovered_from(job_server, small_source, tmp_path, points, name, fault):
    """Also while shards are assembled from parts, or closed with a trailer: the bytes afterwards are the same."""
    undisturbed = Job(str(small_source), str(tmp_path / "undisturbed"), format_name=name)
    count = operations(job_server, undisturbed, FAULTS[fault])
    whole = small_pairs.digests(undisturbed.output)

    for at in points(count):
        job = Job(str(small_source), str(tmp_path / "out"), format_name=name)
        hurt(job_server, job, FAULTS[fault], at, whole)
        heal(job_server, job, whole)
        shutil.rmtree(job.output)
