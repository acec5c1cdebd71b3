"""Faults while shards are assembled from parts, or closed with a trailer: the bytes afterwards are the same."""

from __future__ import annotations

import shutil

import pytest
import small_pairs
import test_crash_points
from job import Job
from test_crash_points import FAULTS, heal, hurt, operations

points = test_crash_points.points


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("parquet", "kill group"),
        ("parquet", "disk full once"),
        ("webdataset", "kill group"),
    ],
)
def test_fault_at_any_operation_is_recovered_from(job_server, small_source, tmp_path, points, name, fault):
    """Whether an operation is killed or refused, no wrong file is visible, and the next run makes the same bytes."""
    undisturbed = Job(str(small_source), str(tmp_path / "undisturbed"), format_name=name)
    count = operations(job_server, undisturbed, FAULTS[fault])
    whole = small_pairs.digests(undisturbed.output)

    for at in points(count):
        job = Job(str(small_source), str(tmp_path / "out"), format_name=name)
        hurt(job_server, job, FAULTS[fault], at, whole)
        heal(job_server, job, whole)
        shutil.rmtree(job.output)
