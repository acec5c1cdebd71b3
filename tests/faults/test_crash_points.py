"""A fault at every file operation of a small job, and again while it recovers: no hang, no silence, the same bytes.

On commit, one operation in twenty is hit, by one of the kinds in turn; in the long tier every one is, by all of them,
and one in ten of the operations of a run that recovers.
"""

import shutil

import pytest
from crash_points import FAULTS, HARMLESS, heal, hurt, operations
from job import Job


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
