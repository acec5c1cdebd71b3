"""A fault at every file operation of a small job, and again while it recovers: no hang, no silence, the same bytes.

In the suite a few operations of each kind of fault are chosen, evenly spread; under --stress it is every one.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import shutil

import pytest
import sets
from injury import CHANGES, Fault, check_visible, left_behind
from job import Job

READS = (*CHANGES, "read")
FAULTS = {
    "kill": Fault("kill"),
    "kill group": Fault("kill group"),
    "tear": Fault("tear", kinds=("write",)),
    "io error": Fault("fail", error=errno.EIO, kinds=READS),
    "disk full": Fault("fail", error=errno.ENOSPC, goes_on=True, kinds=("open", "write", "mkdir", "truncate", "fsync")),
    "disk full once": Fault("fail", error=errno.ENOSPC, kinds=("open", "write", "mkdir", "truncate", "fsync")),
    "short": Fault("short", kinds=("write", "read")),
    "interrupted": Fault("fail", error=errno.EINTR, kinds=("open", "write", "read", "fsync")),
}
HARMLESS = {"short", "interrupted"}
POINTS_OF_THE_SUITE = 4


@pytest.fixture
def points(request):
    """Choose from so many operations: all of them, or a few."""
    full = request.config.getoption("--stress")

    def choose(count):
        step = 1 if full else max(1, count // POINTS_OF_THE_SUITE)
        return range(1 + (step - 1) // 2, count + 1, step)

    return choose


def operations(nursery, job, fault):
    """Return how many operations of the fault's kinds an undisturbed run of the job has."""
    ended = nursery.run(job, Fault(kinds=fault.kinds))
    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    return ended.num_operations


def hurt(nursery, job, fault, at, whole):
    """Run the job under the fault, on an output that holds nothing else; check what must hold whatever it does."""
    output = os.path.realpath(job.output)

    ended = nursery.run(job, dataclasses.replace(fault, at=at))

    assert ended.code is not None, f"hung: {ended.said}"
    assert ended.num_orphans == 0
    check_visible(pathlib.Path(output), whole)
    if ended.code == 0:
        assert sets.digests(output) == whole, "silent: it ended well with something else than the output"
    elif fault.action == "fail":
        assert os.strerror(fault.error) in ended.error, ended.said
    return ended


def heal(nursery, job, whole):
    """Run the job undisturbed; check that it makes what an undisturbed run from nothing makes, and leaves nothing."""
    ended = nursery.run(job)

    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert sets.digests(job.output) == whole
    assert left_behind(pathlib.Path(job.output)) == []


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_at_any_operation_is_told_and_recovered_from(nursery, small_source, whole, tmp_path, points, name):
    """Killed, torn, refused or cut short: an error that says why, nothing wrong in sight, and the same bytes after."""
    fault = FAULTS[name]
    count = operations(nursery, Job(str(small_source), str(tmp_path / "undisturbed")), fault)

    for at in points(count):
        job = Job(str(small_source), str(tmp_path / "out"))
        ended = hurt(nursery, job, fault, at, whole)
        assert ended.code == 0 or name not in HARMLESS, f"operation {at}: {ended.said}"
        heal(nursery, job, whole)
        shutil.rmtree(job.output)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["kill group", "io error"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_fault_while_recovering_is_recovered_from(nursery, small_source, whole, tmp_path, points, name, share):
    """The first run is killed at some share of its operations, the second is hurt at any of its own."""
    torn = tmp_path / "torn"
    count = operations(nursery, Job(str(small_source), str(tmp_path / "undisturbed")), FAULTS["kill group"])
    hurt(nursery, Job(str(small_source), str(torn)), FAULTS["kill group"], int(share * count), whole)
    shutil.copytree(torn, tmp_path / "counted")
    count = operations(nursery, Job(str(small_source), str(tmp_path / "counted")), FAULTS[name])

    for at in points(count):
        job = Job(str(small_source), str(tmp_path / "out"))
        shutil.copytree(torn, job.output)
        hurt(nursery, job, FAULTS[name], at, whole)
        heal(nursery, job, whole)
        shutil.rmtree(job.output)


@pytest.fixture(scope="module")
def former(small_source, tmp_path_factory):
    """The output of a former run with another seed, and its digests."""
    output = tmp_path_factory.mktemp("former") / "out"
    Job(str(small_source), str(output), seed=1).run()
    return output, sets.digests(output)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["kill group", "io error"])
def test_kill_while_rebuilding_leaves_no_manifest_that_lies(
    nursery, small_source, whole, former, tmp_path, points, name
):
    """Each file is of the former output or of the new one, and a manifest is there only beside what it tells of."""
    shutil.copytree(former[0], tmp_path / "counted")
    count = operations(nursery, Job(str(small_source), str(tmp_path / "counted")), FAULTS[name])

    for at in points(count):
        job = Job(str(small_source), str(tmp_path / "out"))
        shutil.copytree(former[0], job.output)
        fault = dataclasses.replace(FAULTS[name], at=at)

        ended = nursery.run(job, fault)

        found = sets.digests(job.output)
        assert ended.code is not None and ended.num_orphans == 0, ended.said
        assert all(digest in {whole.get(path), former[1].get(path)} for path, digest in found.items())
        assert "manifest.json" not in found or found in (whole, former[1]), f"operation {at}: the manifest lies"
        heal(nursery, job, whole)
        shutil.rmtree(job.output)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["kill group", "io error"])
def test_fault_while_repairing_is_recovered_from(nursery, small_source, whole, tmp_path, points, name):
    """A shard is flipped and another is gone; the repair is hurt at any operation, and done again."""
    damaged = tmp_path / "damaged"
    assert nursery.run(Job(str(small_source), str(damaged))).code == 0
    flipped, gone = sorted(damaged.glob("*-train-*.tfrecord"))
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\0")
    gone.unlink()
    shutil.copytree(damaged, tmp_path / "counted")
    repair = Job(str(small_source), str(tmp_path / "counted"), deed="repair")
    count = operations(nursery, repair, FAULTS[name])

    for at in points(count):
        job = dataclasses.replace(repair, output=str(tmp_path / "out"))
        shutil.copytree(damaged, job.output)

        ended = nursery.run(job, dataclasses.replace(FAULTS[name], at=at))

        assert ended.code is not None and ended.num_orphans == 0, ended.said
        assert ended.code != 0 or sets.digests(job.output) == whole, f"operation {at}: silent"
        heal(nursery, dataclasses.replace(job, deed="run"), whole)
        shutil.rmtree(job.output)
