"""A view saved in the place of its dataset: what was dropped stays away, and what does not change keeps its bytes."""

import json
import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import small_pairs
from loopback_s3 import s3

from datamat import (
    OptionError,
    OutputError,
    OutputLockedError,
    concat,
    failures,
    load,
    materialize,
    merge,
    status,
    verify,
)
from datamat.errors import CorruptDataError
from datamat.events import RunEnded, ShardFinished
from datamat.folders import open_folder
from datamat.testing import InlineExecutor

__all__ = ["s3"]

HERE = {"executor": InlineExecutor(), "progress": False}


@pytest.fixture(params=["disk", "store"])
def output(request, tmp_path):
    """An empty place for a dataset."""
    if request.param == "disk":
        return str(tmp_path / "out")
    request.getfixturevalue("s3")
    return "s3://bucket/sets/out"


def squares(numbers, output, function=None, **options):
    """Write numbers and their squares, three shards a split."""
    options = {"splits": {"train": 0.75, "val": 0.25}, "shards": 3, "key": _key, **HERE, **options}
    return materialize(function or _square, numbers, output, **options)


def _key(n):
    return f"n{n:05d}"


def _square(n):
    return {"n": n, "square": n * n}


def numbers_of(output):
    """Return the numbers of all records, after a look at the whole directory."""
    report = verify(output, deep=True)
    assert report.ok, str(report)
    return sorted(int(sample["n"]) for split in load(output).manifest.splits for sample in load(output, split))


def contents(output):
    """Return the bytes of each shard and its offsets."""
    folder = open_folder(output)
    return {name: folder.read(name, 1 << 20) for name in folder.list() if "-of-" in name}


def drop(output, numbers, split=None, **options):
    return load(output, split).drop(map(_key, numbers)).save(**HERE, **options)


def inner(output):
    """Return what lies in `.datamat` beside what every finished output has there."""
    known = {"lock", "names.json", "sidecars.json", "ledger.jsonl", "inputs", "known.json"}
    return sorted(set(open_folder(output).list(".datamat", deep=True)) - known)


@pytest.mark.parametrize("formats", ["tfrecord", "parquet", ["webdataset", "tfrecord"]])
def test_only_shards_that_lose_records_change(output, formats):
    """Under their names; index, statistics and counts follow."""
    squares(range(60), output, format=formats)
    before = contents(output)
    keys = load(output, "val").keys()[:2]

    report = load(output).drop(keys).save(**HERE)

    gone = {int(key[1:]) for key in keys}
    assert numbers_of(output) == sorted(set(range(60)) - gone)
    after = contents(output)
    assert after.keys() == before.keys()
    assert {name.split("-")[1] for name in after if after[name] != before[name]} == {"val"}
    assert (report.num_records, report.num_rows, report.num_dropped) == (58, 60, 2) and report.is_complete
    assert report.num_shards_written <= 2 and report.num_shards_reused == 6 - report.num_shards_written
    assert status(output).is_complete and inner(output) == []
    known = load(output, "val").statistics["n"]["value"]
    left = [int(sample["n"]) for sample in load(output, "val")]
    assert (known["count"], known["min"], known["max"]) == (len(left), min(left), max(left))
    assert all(_key(n) not in load(output) for n in gone)
    assert load(output)[_key(min(left))]["n"] == min(left)


def test_files_that_stay_are_not_even_copied(tmp_path):
    squares(range(60), tmp_path / "out")
    before = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*-of-*")}

    drop(tmp_path / "out", [int(load(tmp_path / "out", "train").keys()[0][1:])])

    after = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*-of-*")}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"data-train-00000-of-00003.{kind}" for kind in ("tfrecord", "idx")}


def test_nothing_to_change_changes_nothing(output):
    """Also what was dropped before, once more."""
    squares(range(30), output)
    drop(output, [3, 17])
    before = contents(output), load(output).manifest

    assert load(output).save(**HERE).did_nothing
    assert load(output, "val").save(**HERE).did_nothing
    report = drop(output, [3, 17])

    assert report.did_nothing and report.num_records == 28 and "nothing to do" in str(report)
    assert (contents(output), load(output).manifest) == before
    with pytest.raises(KeyError, match="n00099"):
        load(output).drop(["n00003", "n00099"])


def test_rows_are_named_by_their_keys_in_the_source_too(tmp_path):
    paths = [f"cats/{number}.png" for number in range(6)]
    materialize(lambda path: {"size": len(path)}, paths, tmp_path / "out", key=lambda path: path, **HERE)

    load(tmp_path / "out").drop(["cats/3.png"]).save(**HERE)

    assert load(tmp_path / "out").manifest.removed == ("cats%2F3.png",)
    assert load(tmp_path / "out").drop(["cats/3.png"]).save(**HERE).did_nothing
    with pytest.raises(TypeError, match=r"keys\(\)\[3\]"):
        load(tmp_path / "out").drop([3])


def test_no_later_run_brings_dropped_rows_back(output):
    """Neither one that has nothing to do, nor an append, nor one that makes all shards again; only a replacement."""
    squares(range(40), output)
    drop(output, [3, 17])
    left = sorted(set(range(40)) - {3, 17})

    assert squares(range(40), output).did_nothing
    assert numbers_of(output) == left
    squares(range(50), output, existing="append")
    assert numbers_of(output) == [*left, *range(40, 50)]
    drop(output, [44])
    assert squares(range(50), output).did_nothing
    squares(range(60), output, lambda n: {"n": n, "square": n * n + 0}, version="2")
    assert numbers_of(output) == [*left, *range(40, 44), *range(45, 60)]
    assert load(output).manifest.removed == tuple(map(_key, [3, 17, 44]))

    squares(range(60), output, version="2", existing="replace")
    assert numbers_of(output) == list(range(60)) and load(output).manifest.removed == ()


def test_hooks_get_reports_on_the_output(output):
    """Not on the folder in it where the shards are made that change, or that are new."""
    squares(range(30), output)
    ended = []
    hooks = [lambda event: ended.append(event.report.output) if isinstance(event, RunEnded) else None]

    drop(output, [3], hooks=hooks)
    squares(range(35), output, existing="append", hooks=hooks)

    assert len(ended) == 2 and {*map(str, ended)} == {str(output)}


def test_dropped_row_may_be_gone_from_the_source_and_return(output):
    squares(range(20), output)
    drop(output, [5])

    squares([n for n in range(20) if n != 5], output)
    assert load(output).manifest.removed == ("n00005",)
    report = squares([5], output, existing="append")
    assert report.did_nothing
    squares(range(20), output)

    assert numbers_of(output) == [n for n in range(20) if n != 5]


def test_tasks_leave_dropped_rows_out(tmp_path):
    """Each of them plans for itself."""
    squares(range(20), tmp_path / "out")
    drop(tmp_path / "out", [5])

    for index in range(2):
        squares(range(20), tmp_path / "out", version="2", task_index=index, num_tasks=2)

    assert numbers_of(tmp_path / "out") == [n for n in range(20) if n != 5]


@pytest.mark.parametrize("form", ["tfrecord", "parquet", "webdataset", "tfrecord.gz", "arrayrecord"])
def test_shard_has_the_bytes_that_a_run_gives_it(tmp_path, form):
    """So the source still repairs it, after several edits, of rows and of copies of one."""
    if form == "arrayrecord":
        pytest.importorskip("array_record")
    source, output = small_pairs.make_pairs(tmp_path / "source"), tmp_path / "out"
    options = {"format": form, "copies": {"train": 3}, "transform": small_pairs.jitter}
    job = small_pairs.job(source, output, **options)
    job.run(progress=False)
    load(output).drop(["train003", "train005#1", "val002"]).save(**HERE)
    assert "train005#1" not in load(output) and len(load(output)) == 3 * 20 + 4 - 5
    load(output).drop(["train005", load(output, "train").keys()[0]]).save(**HERE)
    load(output).drop(load(output, "val").keys()).save(**HERE)

    assert "train005" in load(output).manifest.removed and "train005#1" not in load(output).manifest.removed
    assert verify(output, deep=True).ok and len(load(output, "val")) == 0
    assert job.run(progress=False).did_nothing and "up to date" in str(job.status())
    assert job.verify(sample=1.0).ok
    before = small_pairs.digests(output)
    for path in output.glob("*-of-*"):
        path.unlink()
    job.repair(progress=False)
    assert small_pairs.digests(output) == before


def test_changed_row_is_made_again_without_its_neighbours_that_were_dropped(tmp_path):
    """Though the files of these are gone, which nobody reads."""
    source, output = small_pairs.make_pairs(tmp_path / "source"), tmp_path / "out"
    small_pairs.job(source, output).run(progress=False)
    load(output).drop([f"train{number:03d}" for number in range(9)]).save(**HERE)
    for number in range(9):
        (source / f"train/train{number:03d}.png").write_bytes(b"")

    shutil.copy(source / "train/train010.png", source / "train/train011.png")
    small_pairs.job(source, output).run(progress=False)

    assert verify(output).ok
    assert sorted(load(output, "train").keys()) == [f"train{number:03d}" for number in range(9, 20)]
    assert np.array_equal(load(output)["train011"]["image"], load(output)["train010"]["image"])


def test_splits_and_sets_may_be_left_empty(output):
    """Their shards stay, without records, and so do later runs and edits."""
    squares(range(30), output)
    load(output).drop(load(output, "val").keys()).save(**HERE)
    left = numbers_of(output)
    assert len(load(output, "val")) == 0 and list(load(output, "val")) == [] and len(left) == len(load(output, "train"))
    assert len(load(output).manifest.splits["val"]) == 3
    assert squares(range(30), output).did_nothing

    drop(output, left)

    assert numbers_of(output) == [] and len(load(output)) == 0
    assert squares(range(30), output).did_nothing
    squares(range(40), output, existing="append")
    assert numbers_of(output) == list(range(30, 40))


def test_samples_that_failed_are_still_listed(output):
    def odd(n):
        if n % 10 == 3:
            raise ValueError("three")
        return _square(n)

    squares(range(40), output, odd, errors="skip", splits=None)
    before = {(failure.key, failure.reason, failure.shard) for failure in failures(output)}

    drop(output, [2, 12, 22, 32])

    assert {(failure.key, failure.reason, failure.shard) for failure in failures(output)} == before
    counts = load(output).manifest.counts
    assert (counts.num_rows, counts.num_failed, counts.num_dropped, counts.num_records) == (40, 4, 4, 32)
    squares(range(40), output, splits=None, errors="skip", retry_failed=True)
    assert numbers_of(output) == [n for n in range(40) if n not in (2, 12, 22, 32)]


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize("form", ["tfrecord", "parquet"])
def test_fields_are_added_changed_and_removed(output, form):
    squares(range(30), output, format=form)
    load(output).drop(load(output, "val").keys()).save(**HERE)
    table = pa.table({"key": [_key(n) for n in range(30)], "name": [f"n{n}" for n in range(30)]})

    report = load(output).join(table).map(lambda sample: {**sample, "square": sample["square"] / 2}).save(**HERE)

    assert report.is_complete and report.num_shards_reused == 0
    assert verify(output, deep=True).ok and status(output).is_complete and inner(output) == []
    data = load(output)
    assert {name: data.features[name].declared() for name in data.features} == {
        "key": "str",
        "n": "int64 scalar",
        "square": "float64 scalar",
        "name": "str",
    }
    assert all(sample["square"] == int(sample["n"]) ** 2 / 2 and sample["name"] == f"n{sample['n']}" for sample in data)
    load(output).columns("name", "n").save(**HERE)
    assert set(load(output).features) == {"key", "n", "name"}
    assert load(output).manifest.edited == ("n", "name", "square")
    assert len(numbers_of(output)) == len(data)


def test_view_of_one_split_changes_that_alone(output):
    squares(range(30), output)
    before = contents(output)
    load(output, "val").map(lambda sample: {**sample, "square": sample["square"] + 1}).save(**HERE)

    after = contents(output)
    assert {name.split("-")[1] for name in after if after[name] != before[name]} == {"val"}
    assert all(sample["square"] == sample["n"] ** 2 + 1 for sample in load(output, "val"))
    assert all(sample["square"] == sample["n"] ** 2 for sample in load(output, "train"))
    with pytest.raises(OptionError, match=r"the split 'val' would have other fields \(square\) than train; load all"):
        load(output, "val").columns("n").save(**HERE)


def test_run_does_not_undo_what_was_edited(output):
    """It names the fields, and what to do; new rows can be appended where they fit."""
    squares(range(30), output)
    load(output).map(lambda sample: {**sample, "square": sample["square"] + 1}).save(**HERE)
    before = contents(output)
    with pytest.raises(OutputError, match=r"edited in place.*'square'.*existing='append'.*existing='replace'"):
        squares(range(30), output)
    assert contents(output) == before
    squares(range(35), output, existing="append")
    assert {int(s["n"]): int(s["square"]) for s in load(output)} == {n: n * n + (n < 30) for n in range(35)}
    with pytest.raises(OutputError, match="edited in place"):
        squares(range(35), output)
    squares(range(35), output, existing="replace")
    assert all(sample["square"] == sample["n"] ** 2 for sample in load(output))
    assert squares(range(35), output).did_nothing


def test_repair_names_the_edit(tmp_path):
    source, output = small_pairs.make_pairs(tmp_path / "source"), tmp_path / "out"
    small_pairs.job(source, output).run(progress=False)
    load(output).columns("mask").save(**HERE)
    path = min(output.glob("*.tfrecord"))
    path.unlink()

    with pytest.raises(OutputError, match=r"cannot be repaired: .*'image'"):
        small_pairs.job(source, output).repair(progress=False)


def test_stored_values_pass_through(tmp_path):
    """What an edit of another field leaves keeps its bytes, though JPEG would change it again."""
    from datamat import Features, Image, Scalar
    from datamat.formats import get_format

    def photo(n):
        return {"image": np.random.default_rng(n).integers(0, 256, (16, 16, 3), np.uint8), "label": n}

    features = Features({"image": Image(encoding="jpeg"), "label": Scalar("int32")})
    materialize(photo, range(10), tmp_path / "out", features=features, key=_key, **HERE)

    def stored():
        files = load(tmp_path / "out").files
        return {
            bytes(one["key"][0]): bytes(one["image"][0]) for file in files for one in get_format("tfrecord").read(file)
        }

    before = stored()

    load(tmp_path / "out").drop(["n00002"]).map(lambda sample: {**sample, "label": 1}).save(**HERE)

    assert stored().items() <= before.items() and len(stored()) == 9


# ---------------------------------------------------------------- what is refused


def test_records_go_by_drop_alone_unless_asked(output):
    squares(range(30), output)
    data = load(output)

    for view in (data.take(10), data.filter(pc.field("n") > 10), data.drop(["n00003"]).shard(0, 2)):
        with pytest.raises(OptionError, match=r"would go though drop does not name them; .*existing='replace'"):
            view.save(**HERE)
    assert numbers_of(output) == list(range(30))
    data.filter(pc.field("n") > 10).save(existing="replace", **HERE)

    assert numbers_of(output) == list(range(11, 30))
    assert squares(range(30), output).did_nothing


def test_what_cannot_be_saved_in_place_is_refused(tmp_path):
    output = tmp_path / "out"
    squares(range(10), output)
    squares(range(10), tmp_path / "other")
    data = load(output)
    before = contents(output)
    refused = {
        "come from 2 directories": lambda: concat([data, load(tmp_path / "other")]).save(),
        "has the record .* twice": lambda: data.select([0, 0, *range(1, 10)]).save(),
        "another order in this view": lambda: data[::-1].save(),
        "format='parquet' does not apply": lambda: data.save(format="parquet"),
        "shards=2 does not apply": lambda: data.save(shards=2),
        r"splits=.* does not apply": lambda: data.save(splits={"all": 1.0}),
        "task_index=0 does not apply": lambda: data.save(task_index=0, num_tasks=2),
        r"include=.* does not apply": lambda: data.save(include="train-*"),
        "retry_failed=True does not apply": lambda: data.save(retry_failed=True),
        "existing='append' does not apply": lambda: data.save(existing="append"),
        "errors='skip' does not apply": lambda: data.save(errors="skip"),
    }
    for message, save in refused.items():
        with pytest.raises(OptionError, match=message):
            save()
    assert contents(output) == before and inner(output) == []


def test_function_that_fails_changes_nothing(tmp_path):
    squares(range(10), tmp_path / "out")
    before = contents(tmp_path / "out")

    def fails(sample):
        if sample["n"] == 7:
            raise ValueError("seven")
        return sample

    with pytest.raises(Exception, match=r"n00007.*seven"):
        load(tmp_path / "out").map(fails).save(**HERE)

    assert contents(tmp_path / "out") == before and numbers_of(tmp_path / "out") == list(range(10))
    load(tmp_path / "out").drop(["n00007"]).map(fails).save(**HERE)
    assert 7 not in numbers_of(tmp_path / "out")
    assert inner(tmp_path / "out") == []


def test_damage_is_no_part_of_an_edit(tmp_path):
    """A shard that changes is compared with its checksum first; nothing becomes of one that is damaged."""
    squares(range(30), tmp_path / "out")
    data = load(tmp_path / "out", "train")
    path = pathlib.Path(data.files[0])
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    with pytest.raises(CorruptDataError, match="data-train-00000"):
        data.drop(data.keys()[:1]).save(**HERE)


# ---------------------------------------------------------------- others


def test_second_of_two_edits_is_made_of_the_result_of_the_first(output):
    """Neither is lost; so with rows that somebody has appended meanwhile."""
    squares(range(30), output)
    one, other = load(output).drop(["n00003"]), load(output).drop(key for key in ["n00003", "n00004"])
    changing = load(output).columns("n")

    one.save(**HERE)
    other.save(**HERE)
    assert numbers_of(output) == [n for n in range(30) if n not in (3, 4)]
    squares(range(32), output, existing="append")
    changing.save(**HERE)

    assert numbers_of(output) == [n for n in range(32) if n not in (3, 4)]
    assert set(load(output)[0]) == {"key", "n"}


def test_second_of_two_edits_is_told_if_it_chose_or_computed(output):
    """What a filter would choose now is for its user to say; a function might be applied twice."""
    squares(range(30), output)
    chosen = load(output).filter(lambda sample: sample["n"] > 3)
    computed = load(output).map(lambda sample: {**sample, "n": sample["n"] + 1})

    load(output).drop(["n00003"]).save(**HERE)

    for view in (chosen, computed):
        with pytest.raises(OutputError, match=r"has changed since it was loaded.*load it again"):
            view.save(**HERE, existing="replace")
    assert numbers_of(output) == [n for n in range(30) if n != 3]


DEEDS = {
    "edit": lambda output, **options: load(output).drop(["n00004"]).save(**HERE, **options),
    "append": lambda output, **options: squares(range(35), output, existing="append", **options),
    "run": lambda output, **options: squares(range(30), output, version="2", **options),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_nobody_else_writes_meanwhile(output, deed):
    """On one machine, that is refused by name; the edit is made."""
    squares(range(30), output)
    left, refused = iter([DEEDS[deed]]), []

    def write_meanwhile(event):
        if isinstance(event, ShardFinished) and (other := next(left, None)):
            with pytest.raises(OutputLockedError) as error:
                other(output)
            refused.append(error.value)

    drop(output, [3], hooks=[write_meanwhile])

    assert len(refused) == 1
    assert numbers_of(output) == [n for n in range(30) if n != 3]
    DEEDS[deed](output)
    assert 3 not in numbers_of(output) and inner(output) == []


@pytest.mark.parametrize("deed", DEEDS)
def test_what_another_machine_publishes_meanwhile_stays(s3, tmp_path, deed):
    """The edit is made again, of that."""
    output = "s3://bucket/sets/out"
    squares(range(30), output)
    left = iter([DEEDS[deed]])

    def write_meanwhile(event):
        if isinstance(event, ShardFinished) and (other := next(left, None)):
            other(output, scratch=tmp_path / "elsewhere")

    drop(output, [3], hooks=[write_meanwhile])

    assert next(left, None) is None
    kept = {"edit": [n for n in range(30) if n != 4], "append": list(range(35)), "run": list(range(30))}
    assert numbers_of(output) == [n for n in kept[deed] if n != 3] and inner(output) == []


def test_reader_from_before_goes_on_or_says_so(tmp_path):
    squares(range(40), tmp_path / "out")
    before, untouched = load(tmp_path / "out", "train"), load(tmp_path / "out", "val")
    keys = before.keys()
    state = before.to_numpy(4).state_dict()

    load(tmp_path / "out").drop(keys[:1]).save(**HERE)

    assert len(list(untouched)) == len(untouched)
    with pytest.raises(OutputError, match="load"):
        list(before)
    with pytest.raises(OptionError, match="the state belongs to"):
        load(tmp_path / "out", "train").to_numpy(4).load_state_dict(state)


def test_edited_sets_are_merged_and_saved_elsewhere(tmp_path):
    for name, numbers in (("one", range(20)), ("two", range(20, 40))):
        squares(numbers, tmp_path / name)
        drop(tmp_path / name, [numbers[3]])

    merge([tmp_path / "one", tmp_path / "two"], tmp_path / "both")
    load(tmp_path / "both").save(tmp_path / "copy", **HERE)

    left = [n for n in range(40) if n not in (3, 23)]
    assert numbers_of(tmp_path / "both") == numbers_of(tmp_path / "copy") == left
    assert load(tmp_path / "both").manifest.removed == ("n00003", "n00023")
    drop(tmp_path / "both", [30])
    assert numbers_of(tmp_path / "both") == [n for n in left if n != 30]


def test_manifest_and_ledger_say_what_was_removed(tmp_path):
    squares(range(20), tmp_path / "out")
    drop(tmp_path / "out", [3])

    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["removed"] == ["n00003"]
    lines = [json.loads(line) for line in (tmp_path / "out" / ".datamat" / "ledger.jsonl").read_text().splitlines()]
    assert [line["keys"] for line in lines if line["event"] == "samples_removed"] == [["n00003"]]
