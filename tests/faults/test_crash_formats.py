"""Faults while shards are assembled from parts, or ended with a trailer: the same bytes after, in every format."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import sets
import test_crash_points
from job import Job
from test_crash_points import FAULTS, heal, hurt, operations

points = test_crash_points.points
needs_array_record = pytest.mark.skipif(
    importlib.util.find_spec("array_record") is None, reason="the package array-record is not installed"
)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("parquet", "kill group"),
        ("parquet", "disk full once"),
        ("webdataset", "kill group"),
        pytest.param("arrayrecord", "kill group", marks=needs_array_record),
        pytest.param("arrayrecord", "disk full once", marks=needs_array_record),
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
