"""A run is complete only if every row is accounted for, whoever lost it; and many failures cost no other row."""

import dataclasses
import os
import resource

import pytest
import small_pairs

from datamat import (
    DatasetWriter,
    Features,
    IncompleteRunError,
    IndexRow,
    Scalar,
    ShardOptions,
    WorkerOptions,
    load,
    verify,
)
from datamat.codecs import read_file
from datamat.directory.ledger import read_ledger
from datamat.run.part_task import PartTask
from datamat.run.worker import PartWorker


@pytest.fixture
def source(tmp_path):
    return small_pairs.make_pairs(tmp_path / "source", 9, 2)


def job(source, output, **options):
    return small_pairs.job(source, output, errors="skip", shards=ShardOptions(num_shards=1), **options)


def test_row_that_a_worker_loses_ends_the_run(source, tmp_path, monkeypatch):
    """The error names the row, the part does not count, and the next run makes it again."""
    append = PartTask._append

    def lossy(self, position, row, records):
        append(self, position, row, [] if row.key == "train007" else records)

    monkeypatch.setattr(PartTask, "_append", lossy)
    with pytest.raises(IncompleteRunError, match=r"part \d+ of pairs-train-00000-of-00001 has 1 row, train007; its"):
        job(source, tmp_path / "out").run(progress=False)
    assert not (tmp_path / "out" / "manifest.json").exists()

    monkeypatch.undo()
    job(source, tmp_path / "out").run(progress=False)
    job(source, tmp_path / "reference").run(progress=False)
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "reference")


def test_copies_that_a_worker_loses_end_the_run(source, tmp_path, monkeypatch):
    """A row has all of its copies, or none."""
    append = PartTask._append
    monkeypatch.setattr(PartTask, "_append", lambda self, *given: append(self, *given[:-1], [*given[-1]][:2]))

    with pytest.raises(IncompleteRunError, match=r"each should give 3 records, fail or be left out"):
        job(source, tmp_path / "out", copies=3, transform=small_pairs.jitter).run(progress=False)


@pytest.mark.parametrize("lie", [{"num_records": 0}, {"num_done": 0}, {"stop": 10**6}, {"fingerprint": "other"}])
def test_receipt_that_does_not_add_up_ends_the_run(source, tmp_path, monkeypatch, lie):
    """A count that does not match the part is an error, whichever count it is."""
    write = PartWorker.write_parts
    lying = lambda *args: [dataclasses.replace(receipt, **lie) for receipt in write(*args)]  # noqa: E731
    monkeypatch.setattr(PartWorker, "write_parts", lying)

    with pytest.raises(IncompleteRunError, match="its receipt counts"):
        job(source, tmp_path / "out").run(progress=False)


def test_third_copy_that_fails_takes_the_others_along(source, tmp_path):
    """A row with half of its copies would have the wrong weight."""

    def late(sample, rng):
        draws.append(sample["key"])
        if sample["key"] == "train007" and draws.count("train007") % 3 == 0:
            raise ValueError("the third is too much")
        return small_pairs.jitter(sample, rng)

    draws = []
    report = job(source, tmp_path / "out", copies={"train": 3, "val": 3}, transform=late).run(progress=False)

    assert (report.num_failed, report.num_records) == (1, 10 * 3)
    assert not [key for key in load(tmp_path / "out").keys() if key.startswith("train007")]  # noqa: SIM118 -- not a dict


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


@pytest.mark.long
@pytest.mark.timeout(300)
def test_many_bad_files_cost_no_good_one(tmp_path):
    """Each row is accounted for once, as a record or in the ledger, and memory does not grow."""
    total, bad = 3_000, 2_500
    (tmp_path / "source").mkdir()
    for number in range(total):
        is_bad = number * bad // total != (number + 1) * bad // total
        (tmp_path / "source" / f"{number:05d}").write_text("x" if is_bad else str(number))
    most_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + (512 << 10)

    options = {"errors": "quarantine", "shards": ShardOptions(num_shards=3), "workers": WorkerOptions()}
    made = small_pairs.job(tmp_path / "source", tmp_path / "out", Numbered(most_memory), **options)
    report = made.run(progress=False)

    found = load(tmp_path / "out")
    good = set(found.keys())
    ledger = list(read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl"))
    failed = [entry.values["key"] for entry in ledger if entry.event == "sample_quarantined"]
    assert (report.num_rows, report.num_failed, report.num_records) == (total, bad, total - bad)
    assert len(failed) == len(set(failed)) == bad and len(good) == total - bad
    assert good | set(failed) == {f"{number:05d}" for number in range(total)}
    assert all(int(sample["number"]) == int(sample["key"]) for sample in found)
    assert len(os.listdir(tmp_path / "out" / ".datamat" / "quarantine" / "train")) == bad
    assert verify(tmp_path / "out").ok
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < most_memory
