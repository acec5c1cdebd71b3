"""`existing="append"`: new rows become new shards, and nothing of what is there is made again, or lost."""

import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import small_pairs
from loopback_s3 import s3

from datamat import OptionError, OutputError, WorkerOptions, convert, failures, load, materialize, status, verify
from datamat.directory.index_files import read_index
from datamat.events import RunEnded, ShardFinished
from datamat.folders import open_folder
from datamat.testing import InlineExecutor

__all__ = ["s3"]


@pytest.fixture(params=["disk", "store"])
def output(request, tmp_path):
    """An empty place for a dataset."""
    if request.param == "disk":
        return str(tmp_path / "out")
    request.getfixturevalue("s3")
    return "s3://bucket/sets/out"


def squares(numbers, output, function=None, **options):
    """Write numbers and their squares, three shards a split."""
    options = {"splits": {"train": 0.75, "val": 0.25}, "shards": 3, "key": _key, **options}
    options = {"executor": InlineExecutor(), "progress": False, **options}
    return materialize(function or _square, numbers, output, **options)


def append(numbers, output, function=None, **options):
    """Append numbers and their squares."""
    return squares(numbers, output, function, existing="append", **options)


def _key(n):
    return f"n{n:05d}"


def _square(n):
    return {"n": n, "square": n * n}


def numbers_of(output):
    """Return the numbers of all records, after a look at their squares and at the whole directory."""
    report = verify(output, deep=True)
    assert report.ok, str(report)
    samples = [sample for split in load(output).manifest.splits for sample in load(output, split)]
    assert all(sample["square"] == sample["n"] ** 2 for sample in samples)
    assert all(sample["key"] == _key(sample["n"]) for sample in samples)
    return sorted(int(sample["n"]) for sample in samples)


def shards(output):
    """Return the digests of all shards, in any order."""
    folder = open_folder(output)
    names = [name for name in folder.list() if "-of-" in name]
    return sorted(hashlib.sha256(folder.read(name, 1 << 20)).hexdigest() for name in names)


def inner(output):
    """Return what lies in `.datamat` beside what every finished output has there."""
    known = {"lock", "names.json", "sidecars.json", "ledger.jsonl", "inputs", "known.json"}
    return sorted(set(open_folder(output).list(".datamat", deep=True)) - known)


@pytest.mark.parametrize("formats", ["tfrecord", "parquet", ["webdataset", "tfrecord"]])
def test_rows_that_are_new_become_new_shards(output, formats):
    """Old shards keep their bytes; the old source may be gone; what is there already is counted."""
    squares(range(60), output, format=formats)
    before, index = shards(output), load(output).manifest.counts.num_rows

    report = append(range(40, 80), output, format=formats)

    assert index == 60
    assert numbers_of(output) == list(range(80))
    assert set(before) < set(shards(output))
    assert (report.num_rows, report.num_rows_there, report.num_rows_differing) == (80, 20, 0)
    assert report.is_complete and "20 rows already there, left as they are" in str(report)
    assert status(output).is_complete
    assert inner(output) == []
    assert load(output).manifest.generations[0] == {"train": 3, "val": 3}


def test_shards_keep_their_names_where_renaming_is_copying(output):
    """In a store, new ones have the new number of shards; whatever runs later agrees, and TFDS gets no files."""
    squares(range(40), output)
    names = {info.file for info in load(output).manifest.shards}
    is_store = "://" in output

    append(range(40, 60), output)

    files = load(output).files
    after = {info.file for info in load(output).manifest.shards}
    assert (names < after) if is_store else names.isdisjoint(after)
    assert ("dataset_info.json" in open_folder(output).list()) != is_store
    assert squares(range(60), output).did_nothing and load(output).files == files
    append(range(60, 80), output)
    assert numbers_of(output) == list(range(80)) and (not is_store or set(files) < set(load(output).files))
    load(output).drop([_key(3), _key(50)]).save(executor=InlineExecutor(), progress=False)
    before = load(output).files
    squares(range(90), output, version="2")
    assert numbers_of(output) == [n for n in range(90) if n not in (3, 50)]
    assert not is_store or set(before) < set(load(output).files)
    squares(range(90), output, existing="replace")
    assert numbers_of(output) == list(range(90)) and "dataset_info.json" in open_folder(output).list()


def test_append_is_idempotent(output):
    """The second time there is nothing to do, and nothing changes."""
    squares(range(30), output)
    append(range(20, 50), output)
    before = shards(output)

    report = append(range(20, 50), output)

    assert report.did_nothing and report.num_rows_there == 30
    assert shards(output) == before


def test_append_to_nothing_makes_the_dataset(output):
    """So the first call and all others may be the same line of a script."""
    for stop in (10, 20, 30):
        append(range(stop), output)

    assert numbers_of(output) == list(range(30))


def test_rows_that_are_there_stay_whatever_their_source_now_is(tmp_path):
    """How many of them differ is said, and nothing else becomes of it."""
    source = small_pairs.make_pairs(tmp_path / "source")
    small_pairs.job(source, tmp_path / "out").run(progress=False)
    before = {sample["key"]: sample["image"] for sample in load(tmp_path / "out", "val")}
    more = small_pairs.make_pairs(tmp_path / "more", num_val=5)
    with open(more / "val" / "val002.png", "ab") as file:
        file.write(b"\0")

    report = small_pairs.job(more, tmp_path / "out").run(progress=False, existing="append")

    after = {sample["key"]: sample["image"] for sample in load(tmp_path / "out", "val")}
    assert after.keys() - before.keys() == {"val004"}
    assert all(np.array_equal(after[key], image) for key, image in before.items())
    assert report.num_rows_there == 24 and report.num_rows_differing == 1
    assert "1 of them differ from the source now" in str(report)


def test_ordinary_run_of_a_set_that_has_grown(output):
    """It is up to date; changed code makes its shards again where they are; new rows are a generation of their own."""
    squares(range(40), output)
    append(range(40, 60), output)
    before = load(output).manifest.generations

    assert squares(range(60), output).did_nothing
    report = squares(range(60), output, lambda n: {"n": n, "square": n * n + 0}, version="2")
    assert report.num_shards_reused == 0 and numbers_of(output) == list(range(60))
    assert load(output).manifest.generations == before

    report = squares(range(70), output, lambda n: {"n": n, "square": n * n + 0}, version="2")
    assert report.num_shards_reused == sum(map(sum, (counts.values() for counts in before)))
    assert len(load(output).manifest.generations) == len(before) + 1
    with pytest.raises(OutputError, match=r"no longer has 40 of the 70 rows"):
        squares(range(40, 70), output, version="2")

    squares(range(40, 70), output, existing="replace")
    assert load(output).manifest.generations == ()
    assert numbers_of(output) == list(range(40, 70))


def test_set_that_has_grown_is_repaired(tmp_path):
    """From a source that has all of its rows, to the same bytes."""
    source = small_pairs.make_pairs(tmp_path / "source")
    lines = (source / "train.txt").read_text().splitlines()
    (source / "train.txt").write_text("\n".join(lines[:12]))
    small_pairs.job(source, tmp_path / "out").run(progress=False)
    (source / "train.txt").write_text("\n".join(lines))
    small_pairs.job(source, tmp_path / "out").run(progress=False, existing="append")
    before = small_pairs.digests(tmp_path / "out")
    for path in sorted((tmp_path / "out").glob("*-train-*.tfrecord"))[1:]:
        path.unlink()

    small_pairs.job(source, tmp_path / "out").repair(progress=False)

    assert small_pairs.digests(tmp_path / "out") == before
    assert small_pairs.job(source, tmp_path / "out").verify(sample=1.0).ok


def test_samples_that_fail_are_listed_with_their_shards(output):
    """Those of the set as it was, whose shards have other names now, and new ones; neither is tried again."""

    def odd(n):
        if n % 10 == 3:
            raise ValueError("three")
        return _square(n)

    squares(range(20), output, odd, errors="skip", splits=None)
    append(range(10, 40), output, odd, errors="skip", splits=None)
    report = append(range(10, 40), output, odd, errors="skip", splits=None)

    assert report.did_nothing
    found = failures(output)
    assert sorted(failure.key for failure in found) == [_key(n) for n in (3, 13, 23, 33)]
    assert {failure.shard for failure in found} <= {info.file for info in load(output).manifest.shards}
    assert report.num_failed == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": lambda n: {"n": float(n), "square": n * n}}, r"features differ \(n: .*int64.*, .*float64"),
        ({"format": "parquet"}, r"formats differ \(tfrecord; parquet\)"),
        ({"copies": 2, "transform": lambda sample: sample}, r"copies of train differ \(1; 2\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(output, options, message):
    """By field, with both sides."""
    squares(range(20), output)
    before = shards(output)

    with pytest.raises(OutputError, match=rf"rows cannot be appended to .*{message}"):
        append(range(20, 30), output, **options)

    assert shards(output) == before
    assert inner(output) == []


def test_keys_that_are_positions_are_refused(tmp_path):
    """The first of the new inputs would pass for the first of the old: that is said before the first is made."""
    with pytest.raises(OptionError, match=r"an input has its position as key.* pass key= in both calls"):
        append(range(10), tmp_path / "out", key=None)


def test_conversion_is_refused(tmp_path):
    """Its rows are those of another dataset, whose shards it keeps."""
    squares(range(10), tmp_path / "out")

    with pytest.raises(OptionError, match="a conversion has no new rows; leave out existing='append'"):
        convert(tmp_path / "out", tmp_path / "parquet", format="parquet", existing="append")


@pytest.mark.parametrize("option", [{"retry_failed": True}, {"include": "train-*"}, {"exclude": "val-*"}])
def test_options_that_choose_shards_are_refused(tmp_path, option):
    """There is nothing to choose from."""
    with pytest.raises(OptionError, match="makes every row that is new, and no other; leave out retry_failed"):
        append(range(10), tmp_path / "out", **option)


_TASK = """
import sys
from datamat import materialize

index, output = int(sys.argv[1]), sys.argv[2]
options = {"splits": {"train": 0.75, "val": 0.25}, "shards": 3, "key": lambda n: f"n{n:05d}", "progress": False}
if output.startswith("s3://"):
    options["scratch"] = sys.argv[3]
report = materialize(
    lambda n: {"n": n, "square": n * n}, range(20, 220), output, existing="append", task_index=index, num_tasks=2,
    workers=1, **options,
)
assert report.is_complete, report
"""


def test_tasks_append_together(output, tmp_path):
    """Each row is made by one of them, and one publishes."""
    squares(range(40), output)

    tasks = [
        subprocess.Popen([sys.executable, "-c", _TASK, str(index), output, str(tmp_path / f"scratch{index}")])
        for index in range(2)
    ]

    assert [task.wait(120) for task in tasks] == [0, 0]
    assert numbers_of(output) == list(range(220))
    assert inner(output) == []


def test_set_that_another_publishes_while_its_index_is_read(tmp_path, monkeypatch):
    """The index that the manifest lists is gone: both are read again."""
    output = tmp_path / "out"
    squares(range(20), output)
    others = iter([range(30)])

    def read_late(*args, **options):
        if numbers := next(others, None):
            append(numbers, output)
        return read_index(*args, **options)

    monkeypatch.setattr("datamat.plan.generations.read_index", read_late)
    append(range(25, 40), output)

    assert numbers_of(output) == list(range(40))


def test_tasks_see_that_a_set_has_grown(tmp_path):
    """Each plans its run as one process does."""
    squares(range(40), tmp_path / "out")
    append(range(40, 60), tmp_path / "out")

    for index in range(2):
        assert squares(range(60), tmp_path / "out", task_index=index, num_tasks=2).did_nothing


def test_set_that_another_appends_to_meanwhile(output):
    """Both are in it in the end: who comes second plans again from what is there then."""
    squares(range(20), output)
    others = iter([range(30)])

    def publish_more(event):
        if isinstance(event, ShardFinished) and (numbers := next(others, None)):
            squares(numbers, output)

    append(range(30, 40), output, hooks=[publish_more])

    assert next(others, None) is None

    assert numbers_of(output) == list(range(40))


def test_another_that_is_killed_once_it_has_published(tmp_path):
    """What was made to be appended is there still, and does not take the place of the other's rows."""
    output, kept = tmp_path / "out", tmp_path / "kept"
    squares(range(20), output)
    others = iter([range(30)])

    def publish_more(event):
        if isinstance(event, RunEnded) and event.report and (numbers := next(others, None)):
            shutil.copytree(output / ".datamat" / "append", kept)
            squares(numbers, output)
            shutil.move(kept, output / ".datamat" / "append")

    append(range(30, 40), output, hooks=[publish_more])

    assert next(others, None) is None
    assert numbers_of(output) == list(range(40))


def test_folder_that_another_task_is_about_to_fill_stays(tmp_path):
    """Even if this one has nothing to append."""
    squares(range(20), tmp_path / "out")
    begun = tmp_path / "out/.datamat/append/.datamat"
    begun.mkdir(parents=True)

    append(range(20), tmp_path / "out")

    assert begun.is_dir()


def test_workers_in_processes_append(tmp_path):
    """As everywhere: the rows travel, and not the set that they are appended to."""
    options = {"executor": None, "workers": WorkerOptions(num_workers=2)}
    squares(range(200), tmp_path / "out", **options)

    append(range(150, 400), tmp_path / "out", **options)

    assert numbers_of(tmp_path / "out") == list(range(400))


def test_manifest_says_what_was_appended(tmp_path):
    """In JSON, by generation."""
    squares(range(20), tmp_path / "out")
    append(range(20, 25), tmp_path / "out")

    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert sorted(manifest["generations"][0]) == ["train", "val"]
    assert manifest["splits"]["train"]["num_shards"] == sum(
        counts.get("train", 0) for counts in manifest["generations"]
    )
