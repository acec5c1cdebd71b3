"""A run is complete only if every row is accounted for, whoever lost it; and many failures cost no other row."""

from __future__ import annotations

import dataclasses
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import small_pairs

from datamat import (
    DatasetWriter,
    Features,
    IncompleteRunError,
    IndexRow,
    Materializer,
    Scalar,
    ShardOptions,
    load,
    verify,
)
from datamat.codecs import read_file
from datamat.directory.ledger import read_ledger
from datamat.run.worker import PartWorker, _PartTask


@pytest.fixture
def source(tmp_path):
    return small_pairs.make_pairs(tmp_path / "source")


@pytest.fixture
def here():
    """An executor that runs tasks in this process, where a test can break its code."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def job(source, output, **options):
    return Materializer(small_pairs.Pairs(), source, output, errors="skip", **options)


def test_row_that_a_worker_loses_ends_the_run(source, tmp_path, monkeypatch, here):
    """The error names the row, the part does not count, and the next run makes it again."""
    append = _PartTask._append

    def lossy(self, position, row, records):
        append(self, position, row, [] if row.key == "train007" else records)

    monkeypatch.setattr(_PartTask, "_append", lossy)
    with pytest.raises(IncompleteRunError, match=r"part \d+ of pairs-train-00000-of-00001 has 1 rows, train007; its"):
        job(source, tmp_path / "out", executor=here).run(progress=False)
    assert not (tmp_path / "out" / "manifest.json").exists()

    monkeypatch.undo()
    job(source, tmp_path / "out").run(progress=False)
    job(source, tmp_path / "reference").run(progress=False)
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "reference")


def test_copies_that_a_worker_loses_end_the_run(source, tmp_path, monkeypatch, here):
    """A row has all of its copies, or none."""
    append = _PartTask._append
    monkeypatch.setattr(_PartTask, "_append", lambda self, *given: append(self, *given[:-1], [*given[-1]][:2]))

    with pytest.raises(IncompleteRunError, match=r"each should give 3 records, fail or be left out"):
        job(source, tmp_path / "out", copies=3, transform=small_pairs.jitter, executor=here).run(progress=False)


@pytest.mark.parametrize("lie", [{"num_records": 0}, {"num_done": 0}, {"stop": 10**6}, {"fingerprint": "other"}])
def test_receipt_that_does_not_add_up_ends_the_run(source, tmp_path, monkeypatch, here, lie):
    """A count that does not match the part is an error, whichever count it is."""
    write = PartWorker.write_part
    monkeypatch.setattr(PartWorker, "write_part", lambda *args: dataclasses.replace(write(*args), **lie))

    with pytest.raises(IncompleteRunError, match="its receipt counts"):
        job(source, tmp_path / "out", executor=here).run(progress=False)


def test_third_copy_that_fails_takes_the_others_along(source, tmp_path):
    """A row with half of its copies would have the wrong weight."""

    def late(sample, rng):
        draws.append(sample["key"])
        if sample["key"] == "train007" and draws.count("train007") % 3 == 0:
            raise ValueError("the third is too much")
        return small_pairs.jitter(sample, rng)

    draws = []
    report = job(source, tmp_path / "out", copies=3, transform=late).run(progress=False)

    keys = {key.partition("#")[0] for key in load(tmp_path / "out").keys()}  # noqa: SIM118 -- not a dict
    assert (report.num_failed, report.num_records) == (1, 23 * 3)
    assert "train007" not in keys


class Numbered(DatasetWriter):
    """Reads the number that a file holds, in a process that has never used more than ``most_memory`` KiB."""

    name = "numbered"
    features = Features({"number": Scalar("int64")})

    def __init__(self, most_memory):
        self.most_memory = most_memory

    def index(self, source):
        names = sorted(os.listdir(source))
        return [IndexRow(name, fields={"file": name}) for name in names]

    def read(self, row):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if peak > self.most_memory:
            raise MemoryError(f"{peak} KiB used at row {row.key}; at most {self.most_memory} are expected")
        return {"number": int(read_file(row.fields["file"]))}


@pytest.mark.parametrize(
    ("total", "bad", "action"),
    [(2_000, 1_000, "skip"), pytest.param(12_000, 10_000, "quarantine", marks=pytest.mark.long)],
)
def test_many_bad_files_cost_no_good_one(tmp_path, total, bad, action):
    """Each row is accounted for once, as a record or in the ledger, and memory does not grow."""
    (tmp_path / "source").mkdir()
    for number in range(total):
        is_bad = number * bad // total != (number + 1) * bad // total
        (tmp_path / "source" / f"{number:05d}").write_text("x" if is_bad else str(number))
    most_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + (512 << 10)

    shards = ShardOptions(num_shards=3)
    writer = Numbered(most_memory)
    report = Materializer(writer, tmp_path / "source", tmp_path / "out", errors=action, shards=shards).run(
        progress=False
    )

    found = load(tmp_path / "out")
    good = set(found.keys())
    ledger = list(read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl"))
    failed = [entry.values["key"] for entry in ledger if entry.event in ("sample_skipped", "sample_quarantined")]
    assert (report.num_rows, report.num_failed, report.num_records) == (total, bad, total - bad)
    assert len(failed) == len(set(failed)) == bad and len(good) == total - bad
    assert good | set(failed) == {f"{number:05d}" for number in range(total)}
    assert all(int(sample["number"]) == int(sample["key"]) for sample in found)
    kept = tmp_path / "out" / ".datamat" / "quarantine" / "train"
    assert action == "skip" or len(os.listdir(kept)) == bad
    assert verify(tmp_path / "out").ok
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < most_memory
