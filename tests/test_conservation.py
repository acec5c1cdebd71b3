"""No run is complete in which a row is unaccounted for, whoever lost it; and many failures cost no other row."""

from __future__ import annotations

import dataclasses
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import sets

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
from datamat.ledger import read_ledger
from datamat.work import Workplace, _PartWork


@pytest.fixture
def source(tmp_path):
    return sets.make_pairs(tmp_path / "source")


@pytest.fixture
def here():
    """An executor of this very process, whose code can be broken."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def job(source, output, **options):
    return Materializer(sets.Pairs(), source, output, errors="skip", **options)


def test_row_that_a_worker_loses_ends_the_run(source, tmp_path, monkeypatch, here):
    """By name; the part does not count, and the next run makes it anew."""
    append = _PartWork._append

    def lossy(self, records):
        append(self, [] if records[0][0] == "train007" else records)

    monkeypatch.setattr(_PartWork, "_append", lossy)
    with pytest.raises(IncompleteRunError, match=r"part \d+ of pairs-train-00000-of-00001 has 1 rows, train007; its"):
        job(source, tmp_path / "out", executor=here).run(progress=False)
    assert not (tmp_path / "out" / "manifest.json").exists()

    monkeypatch.undo()
    job(source, tmp_path / "out").run(progress=False)
    job(source, tmp_path / "reference").run(progress=False)
    assert sets.digests(tmp_path / "out") == sets.digests(tmp_path / "reference")


def test_copies_that_a_worker_loses_end_the_run(source, tmp_path, monkeypatch, here):
    """A row is there with all of them, or not at all."""
    append = _PartWork._append
    monkeypatch.setattr(_PartWork, "_append", lambda self, records: append(self, records[:2]))

    with pytest.raises(IncompleteRunError, match=r"where each should give 3 records or fail"):
        job(source, tmp_path / "out", copies=3, transform=sets.jitter, executor=here).run(progress=False)


@pytest.mark.parametrize("lie", [{"num_records": 0}, {"num_done": 0}, {"stop": 10**6}, {"fingerprint": "other"}])
def test_receipt_that_does_not_add_up_ends_the_run(source, tmp_path, monkeypatch, here, lie):
    """Whatever it says wrongly of its part."""
    write = Workplace.write_part
    monkeypatch.setattr(Workplace, "write_part", lambda *args: dataclasses.replace(write(*args), **lie))

    with pytest.raises(IncompleteRunError, match="its receipt tells of"):
        job(source, tmp_path / "out", executor=here).run(progress=False)


def test_third_copy_that_fails_takes_the_others_along(source, tmp_path):
    """Half of a row's copies would weigh it wrongly."""

    def late(sample, rng):
        draws.append(sample["key"])
        if sample["key"] == "train007" and draws.count("train007") % 3 == 0:
            raise ValueError("the third is too much")
        return sets.jitter(sample, rng)

    draws = []
    report = job(source, tmp_path / "out", copies=3, transform=late).run(progress=False)

    keys = {key.partition("#")[0] for key in load(tmp_path / "out").keys()}  # noqa: SIM118 -- not a dict
    assert (report.num_failed, report.num_records) == (1, 23 * 3)
    assert "train007" not in keys


class Numbered(DatasetWriter):
    """Reads the number that a file holds; says how much memory its process has used."""

    name = "numbered"
    features = Features({"number": Scalar("int64"), "peak": Scalar("int64")})

    def index(self, source):
        names = sorted(os.listdir(source))
        return [IndexRow(name, fields={"file": name}) for name in names]

    def read(self, row):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        return {"number": int(read_file(row.fields["file"])), "peak": peak}


@pytest.mark.parametrize(
    ("total", "bad", "action"),
    [(2_000, 1_000, "skip"), pytest.param(12_000, 10_000, "quarantine", marks=pytest.mark.slow)],
)
def test_many_bad_files_cost_no_good_one(tmp_path, total, bad, action):
    """Every row is accounted for once: in a record, or in the ledger; and memory stays where it was."""
    (tmp_path / "source").mkdir()
    for number in range(total):
        is_bad = number * bad // total != (number + 1) * bad // total
        (tmp_path / "source" / f"{number:05d}").write_text("x" if is_bad else str(number))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    shards = ShardOptions(num_shards=3)
    report = Materializer(Numbered(), tmp_path / "source", tmp_path / "out", errors=action, shards=shards).run(
        progress=False
    )

    found = load(tmp_path / "out")
    good = set(found.keys())
    ledger = list(read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl"))
    told = [entry.values["key"] for entry in ledger if entry.event in ("sample_skipped", "sample_quarantined")]
    assert (report.num_rows, report.num_failed, report.num_records) == (total, bad, total - bad)
    assert len(told) == len(set(told)) == bad and len(good) == total - bad
    assert good | set(told) == {f"{number:05d}" for number in range(total)}
    assert all(int(sample["number"]) == int(sample["key"]) for sample in found)
    kept = tmp_path / "out" / ".datamat" / "quarantine" / "train"
    assert action == "skip" or len(os.listdir(kept)) == bad
    assert verify(tmp_path / "out").ok
    assert max(int(sample["peak"]) for sample in found) < (before >> 10) + 512
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (512 << 10)
