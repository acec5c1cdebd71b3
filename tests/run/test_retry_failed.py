"""`run(retry_failed=True)`: only the rows that failed run again, and shards end as if nothing had failed."""

import os
import pathlib
import shutil

import pytest
import small_pairs

from datamat import SampleError, ShardOptions, load, verify
from datamat.directory.ledger import read_ledger

BAD = ("train003", "train007", "val001")


class Marking(small_pairs.Pairs):
    """Reads as `Pairs` does, refuses the keys that a file lists, and leaves a mark for each key that it reads."""

    def __init__(self, refused, marks):
        self.refused = str(refused)
        self.marks = str(marks)

    def read(self, row):
        pathlib.Path(self.marks, row.key).touch()
        if row.key in pathlib.Path(self.refused).read_text().split():
            raise OSError("the disk does not answer")
        return super().read(row)


@pytest.fixture
def place(tmp_path):
    """A source, a list of keys that cannot be read, and a folder for marks."""
    small_pairs.make_pairs(tmp_path / "source", 14, 3)
    (tmp_path / "refused").write_text(" ".join(BAD))
    (tmp_path / "marks").mkdir()
    return tmp_path


def job(place, output="out", *, copies=1, policy="skip", **options):
    transform = small_pairs.jitter if copies != 1 else None
    writer = Marking(place / "refused", place / "marks")
    options = {
        "copies": copies,
        "transform": transform,
        "errors": policy,
        "shards": ShardOptions(num_shards=3),
        **options,
    }
    return small_pairs.job(place / "source", place / output, writer, **options)


def read_keys(place):
    """Return the keys that were read since the last call."""
    keys = {path.name for path in (place / "marks").iterdir()}
    for key in keys:
        (place / "marks" / key).unlink()
    return keys


def undisturbed(place, **options):
    """Remove the list of refused keys; return the digests of a run in which nothing fails."""
    (place / "refused").write_text("")
    job(place, "reference", **options).run(progress=False)
    read_keys(place)
    return small_pairs.digests(place / "reference")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("shard_format", "copies"),
    [
        ("tfrecord", {"train": 3}),
        ("tfrecord.gz", 1),
        (["tfrecord", "parquet", "webdataset"], {"train": 3}),
        (["parquet", "tfrecord"], 1),
    ],
    ids=str,
)
def test_rows_that_pass_now_are_put_where_they_belong(place, shard_format, copies):
    """Only they are read, and every file is as if they had never failed."""
    options = {"copies": copies, "format": shard_format}
    assert job(place, **options).run(progress=False).num_failed == len(BAD)
    read_keys(place)

    reference = undisturbed(place, **options)
    report = job(place, **options).run(retry_failed=True, progress=False)

    assert (report.num_failed, report.is_complete) == (0, True)
    assert read_keys(place) == set(BAD)
    assert small_pairs.digests(place / "out") == reference


def test_rows_whose_file_was_fixed_are_read_again(place):
    """A changed file changes the shard's fingerprint, but the rows beside it count as unchanged."""
    (place / "refused").write_text("")
    image = place / "source" / "train" / "train003.png"
    good = image.read_bytes()
    image.write_bytes(good[:-30])
    assert job(place).run(progress=False).num_failed == 1
    read_keys(place)

    image.write_bytes(good)
    assert job(place).run(retry_failed=True, progress=False).num_failed == 0

    assert read_keys(place) == {"train003"}
    assert small_pairs.digests(place / "out") == undisturbed(place)
    assert job(place).run(retry_failed=True, progress=False).did_nothing
    assert read_keys(place) == set()


def test_rows_that_fail_again_stay_out(place):
    """Under "raise" they end the run; the next `run` restores the dataset, and it stays so."""
    job(place).run(progress=False)
    before = small_pairs.digests(place / "out")

    assert job(place).run(retry_failed=True, progress=False).num_failed == len(BAD)
    assert small_pairs.digests(place / "out") == before
    with pytest.raises(SampleError, match="the disk does not answer"):
        job(place, policy="raise").run(retry_failed=True, progress=False)

    report = job(place).run(progress=False)
    assert (report.is_complete, report.num_failed) == (True, len(BAD))
    assert small_pairs.digests(place / "out") == before
    assert verify(place / "out").ok


@pytest.mark.long
def test_other_changes_are_done_as_by_run(place):
    """In a shard where another row changed, that row is read, too; shards without failures are not touched."""
    job(place).run(progress=False)
    read_keys(place)
    os.utime(place / "source" / "train" / "train003.png", (9, 9))
    shutil.copyfile(place / "source" / "train" / "train011.png", place / "source" / "train" / "train010.png")
    os.utime(place / "source" / "train" / "train012.png", (9, 9))  # its content is the same
    (place / "refused").write_text("")

    job(place).run(retry_failed=True, progress=False)

    assert {*BAD, "train010"} <= read_keys(place) <= {*BAD, "train010", "train012"}
    assert small_pairs.digests(place / "out") == undisturbed(place)


def test_damaged_shard_is_rebuilt(place):
    """Records are copied only from a file that is whole."""
    job(place).run(progress=False)
    for path in (place / "out").glob("*-train-*.tfrecord"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    reference = undisturbed(place)
    job(place).run(retry_failed=True, progress=False)

    assert small_pairs.digests(place / "out") == reference


def test_repaired_samples_leave_the_quarantine(place):
    """The ledger records it."""
    job(place, policy="quarantine").run(progress=False)
    kept = place / "out" / ".datamat" / "quarantine"
    assert {path.name for path in kept.glob("*/*")} == set(BAD)

    (place / "refused").write_text("train007")
    job(place, policy="quarantine").run(retry_failed=True, progress=False)

    mended = {e.values["key"] for e in read_ledger(kept.parent / "ledger.jsonl") if e.event == "sample_mended"}
    assert {path.name for path in kept.glob("*/*")} == {"train007"}
    assert mended == {"train003", "val001"}
    assert "train007" not in load(place / "out", "train").keys()  # noqa: SIM118 -- not a dict
