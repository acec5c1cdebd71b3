"""Faults while shards are assembled from parts, or ended with a trailer: the same bytes after."""

from __future__ import annotations

import shutil

import pytest
import sets
import test_crash_points
from job import Job
from test_crash_points import FAULTS, heal, hurt, operations

points = test_crash_points.points


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("parquet", "kill group"),
        ("parquet", "disk full once"),
        ("webdataset", "kill group"),
    ],
)
def test_fault_at_any_operation_is_recovered_from(nursery, small_source, tmp_path, points, name, fault):
    """Killed or refused at any operation: nothing wrong in sight, and undisturbed it makes the same bytes."""
    undisturbed = Job(str(small_source), str(tmp_path / "undisturbed"), format_name=name)
    count = operations(nursery, undisturbed, FAULTS[fault])
    whole = sets.digests(undisturbed.output)

    for at in points(count):
        job = Job(str(small_source), str(tmp_path / "out"), format_name=name)
        hurt(nursery, job, FAULTS[fault], at, whole)
        heal(nursery, job, whole)
        shutil.rmtree(job.output)
