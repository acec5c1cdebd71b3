"""Rows that are left out: the ledger names each of them, whatever happens to the runs that found them."""

import collections
import dataclasses
import pathlib
import shutil

import pytest
import small_pairs
from fault_injection import Fault
from job import Job

from datamat.directory.ledger import Ledger, read_ledger
from datamat.testing import InlineExecutor

BAD = ("train001", "train004", "train007", "val000")


@pytest.fixture
def bad_source(tmp_path):
    """Ten pairs, four of which are no pictures."""
    folder = small_pairs.make_pairs(tmp_path / "source", num_train=8, num_val=2)
    for key in BAD:
        (folder / key[:-3] / f"{key}.png").write_bytes(b"no picture")
    return folder


def named(output):
    """Return how often the ledger names each row that is left out."""
    entries = read_ledger(pathlib.Path(output) / ".datamat" / "ledger.jsonl")
    return collections.Counter(entry.values["key"] for entry in entries if entry.event == "sample_skipped")


def test_rows_of_a_reused_part_are_named(bad_source, tmp_path, monkeypatch):
    """A run dies with the part on the disk but its rows not in the ledger; the next run records them, once."""
    job = Job(str(bad_source), str(tmp_path / "out"), errors="skip")
    write = Ledger.write

    def interrupted(self, event, **values):
        if event == "sample_skipped":
            raise KeyboardInterrupt
        write(self, event, **values)

    monkeypatch.setattr(Ledger, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.run(InlineExecutor())
    assert not named(job.output)
    monkeypatch.undo()

    job.run(InlineExecutor())
    job.run(InlineExecutor())

    assert named(job.output) == dict.fromkeys(BAD, 1)


@pytest.mark.timeout(3600)
def test_every_row_is_named_once_however_often_the_run_is_killed(job_server, bad_source, tmp_path, points):
    """The run is killed at any operation, and once more while it recovers."""
    job = Job(str(bad_source), str(tmp_path / "out"), errors="skip")
    count = job_server.run(job, Fault()).num_operations
    whole = small_pairs.digests(job.output)

    for at in points(count):
        shutil.rmtree(job.output)
        for place in (at, max(1, at // 2)):
            assert job_server.run(job, Fault("kill group", at=place)).code is not None
        ended = job_server.run(dataclasses.replace(job))

        assert (ended.code, ended.num_orphans) == (0, 0), ended.said
        assert small_pairs.digests(job.output) == whole
        assert named(job.output) == dict.fromkeys(BAD, 1), f"killed at operation {at}"
