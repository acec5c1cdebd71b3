"""A fault at file operations of runs that change a set, repair it or write other formats: the same bytes in the end.

On commit, one operation in 160 is hit, in the long tier one in ten.
"""

import dataclasses
import shutil

import pytest
import small_pairs
from crash_points import FAULTS, heal, hurt, operations
from fault_injection import records
from job import Job

from datamat.testing import InlineExecutor


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


@pytest.mark.sample(2)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["kill group", "io error"])
def test_kill_while_editing_leaves_the_old_set_or_the_new_one(job_server, small_source, former, tmp_path, points, name):
    """Readers find one of them, and the same call again makes the new one."""
    edit = Job(str(small_source), str(tmp_path / "counted"), deed="drop")
    shutil.copytree(former[0], edit.output)
    sets = [records(former[0])]
    count = operations(job_server, edit, FAULTS[name])
    sets.append(records(edit.output))
    whole = small_pairs.digests(edit.output)
    assert sets[0] != sets[1]

    for at in points(count):
        job = dataclasses.replace(edit, output=str(tmp_path / "out"))
        shutil.copytree(former[0], job.output)

        ended = job_server.run(job, dataclasses.replace(FAULTS[name], at=at))

        assert ended.code is not None and ended.num_orphans == 0, ended.said
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
