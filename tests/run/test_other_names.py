"""Shards whose names change, and nothing else of them, are taken over: no row of them is made again."""

import hashlib

import pytest
import small_pairs
from memory_store import s3

from datamat import OutputError, ShardOptions, load, materialize, status, verify
from datamat.events import ShardFinished
from datamat.folders import open_folder
from datamat.testing import InlineExecutor

__all__ = ["s3"]


@pytest.fixture(params=["disk", "store"])
def output(request, tmp_path):
    """An empty place for a dataset."""
    if request.param == "disk":
        return tmp_path / "out"
    request.getfixturevalue("s3")
    return "s3://bucket/sets/out"


def squares(num_items, output, splits=None, **options):
    """Write numbers and their squares, four in a shard, in their order."""
    options = {"shards": ShardOptions(records_per_shard=4, shuffle=False), **options}
    options = {"executor": InlineExecutor(), "progress": False, **options}
    return materialize(_square, range(num_items), output, splits=splits, **options)


def _square(n):
    if n < 0:
        raise ValueError("negative")
    return {"n": n, "square": n * n}


def content(output):
    """Return the digest of each file that readers see."""
    folder = open_folder(output)
    found = {name: there for name, there in folder.list(deep=True).items() if not name.startswith(".datamat")}
    return {name: hashlib.sha256(folder.read(name, there.num_bytes)).hexdigest() for name, there in found.items()}


def records(output, split):
    """Return the numbers of a split."""
    return sorted(int(sample["n"]) for sample in load(output, split))


@pytest.mark.parametrize("formats", ["tfrecord", "parquet", ["webdataset", "tfrecord"]])
def test_split_of_another_name_keeps_its_shards(output, tmp_path, formats):
    """Nothing is read; what is there in the end is what a run in an empty place makes."""
    squares(24, output, {"train": 0.7, "val": 0.3}, format=formats)
    if output == tmp_path / "out":
        before = {path.stat().st_ino for path in output.glob("*-val-*.t*") if path.suffix != ".idx"}

    report = squares(24, output, {"train": 0.7, "validation": 0.3}, format=formats)

    assert report.num_parts_written == 0 and report.is_complete
    squares(24, tmp_path / "anew", {"train": 0.7, "validation": 0.3}, format=formats)
    assert content(output) == content(tmp_path / "anew")
    assert verify(output).ok
    if output == tmp_path / "out":
        now = {path.stat().st_ino for path in output.glob("*-validation-*.t*") if path.suffix != ".idx"}
        assert now == before  # no byte was copied


def test_tasks_take_shards_over(tmp_path):
    """The last task does so; the others have nothing to make."""
    output = tmp_path / "out"
    squares(24, output, {"train": 0.7, "val": 0.3})

    report = squares(24, output, {"train": 0.7, "validation": 0.3}, task_index=1, num_tasks=2)

    assert report.is_complete
    assert (report.num_parts_written, report.num_shards_written) == (0, 0)
    squares(24, tmp_path / "anew", {"train": 0.7, "validation": 0.3})
    assert content(output) == content(tmp_path / "anew")
    assert verify(output).ok


def test_shards_of_two_splits_change_places(output, tmp_path):
    """Each name is that of the other's, before and afterwards."""
    squares(16, output, {"a": 0.5, "b": 0.5})
    a, b = records(output, "a"), records(output, "b")

    report = squares(16, output, {"b": 0.5, "a": 0.5})

    assert (records(output, "a"), records(output, "b")) == (b, a)
    assert report.num_parts_written == 0
    assert verify(output).ok


def test_set_that_grows_in_its_order_keeps_its_full_shards(output, tmp_path):
    """All names change, as each has the number of shards; the last shard alone was not full."""
    squares(10, output)
    events = []

    squares(17, output, hooks=[events.append])

    made = [event.shard for event in events if isinstance(event, ShardFinished) and not event.is_reused]
    assert sorted(made) == [f"data-train-0000{number}-of-00005" for number in (2, 3, 4)]
    squares(17, tmp_path / "anew")
    assert content(output) == content(tmp_path / "anew")
    assert records(output, "train") == list(range(17))


def test_shard_without_some_of_its_rows_is_made_again(tmp_path):
    """The ledger names these rows by the name of the shard."""
    output = tmp_path / "out"
    inputs = [-1, *range(1, 9)]

    def write(splits):
        shards = ShardOptions(records_per_shard=4, shuffle=False)
        options = {"executor": InlineExecutor(), "progress": False, "errors": "skip", "key": str}
        return materialize(_square, inputs, output, splits=splits, shards=shards, **options)

    write({"all": 1.0})
    report = write({"each": 1.0})
    assert {failure.key for failure in status(output).failures} == {"-1"}
    assert report.num_parts_written > 0


def test_status_says_what_is_taken_over_and_no_warning_that_it_is_made_again(tmp_path, caplog):
    """`existing="refuse"` keeps the names, too."""
    source, output = small_pairs.make_pairs(tmp_path / "source"), tmp_path / "out"
    job = small_pairs.job(source, output)
    job.run(progress=False)
    (source / "val.txt").rename(source / "test.txt")
    caplog.clear()

    changes = [str(change) for change in job.status().changes]
    assert changes == [
        f"pairs-test-0000{number}: taken over from pairs-val-0000{number}-of-00002" for number in range(2)
    ]
    assert job.status().obsolete == ()
    with pytest.raises(OutputError, match=r"2 of 4 finished shards .* would be replaced or removed"):
        job.run(progress=False, existing="refuse")
    report = job.run(progress=False)

    assert report.num_parts_written == 0
    assert [record.getMessage() for record in caplog.records if "again" in record.getMessage()] == []


class Killed(BaseException):
    """Ends a run where nothing is put in order."""


def test_run_that_ends_before_the_set_is_published_loses_nothing(output, tmp_path):
    """The old set stays, and the next run goes on from what has been taken over."""
    squares(24, output, {"train": 0.7, "val": 0.3})
    before = content(output)

    def end(event):
        if isinstance(event, ShardFinished) and "validation" in event.shard:
            raise Killed

    with pytest.raises(Killed):
        squares(24, output, {"train": 0.7, "validation": 0.3}, hooks=[end])
    assert content(output) == before and verify(output).ok

    assert squares(24, output, {"train": 0.7, "validation": 0.3}).num_parts_written == 0
    squares(24, tmp_path / "anew", {"train": 0.7, "validation": 0.3})
    assert content(output) == content(tmp_path / "anew")
