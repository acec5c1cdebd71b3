"""Samples that are left out on purpose, and inputs that give several: every count, key and byte is that of a loop."""

import collections
import os
import pathlib

import numpy as np
import pytest
import small_pairs

from datamat import (
    DatasetWriter,
    ErrorPolicy,
    Features,
    IncompleteRunError,
    Index,
    IndexRow,
    OptionError,
    Scalar,
    ShardOptions,
    Skip,
    convert,
    load,
    materialize,
    status,
    verify,
)
from datamat.directory.ledger import read_ledger
from datamat.events import PartDone, SampleDropped, ShardFinished
from datamat.testing import InlineExecutor

NUM_ROWS = 20
HERE = {"executor": InlineExecutor(), "progress": False}


class TooDark(Skip):
    """A reason with a class of its own."""


def parsed(text):
    """Return what a file says: one sample or several, or that there is none, in each of the ways to say it."""
    words = text.split()
    if words[0] == "raise":
        raise TooDark("too dark")
    if words[0] == "bad":
        raise ValueError("bad")
    answers = {"none": None, "skip": Skip("blurred"), "class": Skip, "empty": []}
    if words[0] in answers:
        return answers[words[0]]
    if words[0] == "yield":
        return yielded(words[1:])
    if words[0] == "list":
        return [Skip("dull") if word == "skip" else {"value": int(word), "draw": 0} for word in words[1:]]
    return {"value": int(words[0]), "draw": 0}


def yielded(words):
    for word in words:
        if word == "raise":
            raise Skip("no more")
        yield {"value": int(word), "draw": int(np.random.randint(1 << 30))}


WORDS = ["5", "raise", "none", "skip", "class", "empty", "yield 1 2 3", "list 4 skip 6", "yield 7", "yield 8 raise"]
VALUES = [[5], [], [], [], [], [], [1, 2, 3], [4, None, 6], [7], [8, None]]
"""What a row gives, by its number modulo ten; None is left out of a row that gives others."""


class Moody(DatasetWriter):
    """Reads what its files say; with `files=False`, what its rows say."""

    name = "moody"
    features = Features({"value": Scalar("int64"), "draw": Scalar("int64")})

    def __init__(self, *, has_files=True):
        self.file_fields = ("path",) if has_files else ()

    def index(self, source):
        paths = sorted(pathlib.Path(source).glob("*.txt"))
        for path in paths:
            split = "empty" if path.stem < "0" else "train"
            field = {"path": path.name} if self.file_fields else {"text": path.read_text()}
            yield IndexRow(path.stem, split, field)

    def read(self, row):
        text = pathlib.Path(row.fields["path"]).read_text() if self.file_fields else row.fields["text"]
        return parsed(text)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(NUM_ROWS):
        (folder / f"{number:03d}.txt").write_text(WORDS[number % 10])
    (folder / "-0.txt").write_text("none")  # all that the split "empty" has
    return folder


def job(source, output, *, has_files=True, **options):
    return small_pairs.job(
        source, output, Moody(has_files=has_files), **{"shards": ShardOptions(num_shards=3), **options}
    )


def expected():
    """Return the value of each record of the plain job by key, and the keys of what it leaves out."""
    found, dropped = {}, {"-0"}
    for number in range(NUM_ROWS):
        key, values = f"{number:03d}", VALUES[number % 10]
        dropped |= set() if values else {key}
        for position, value in enumerate(values):
            name = key if len(values) == 1 else f"{key}#0-{position}"
            if value is None:
                dropped.add(name)
            else:
                found[name] = value
    return found, dropped


def stored(output, split=None):
    return {sample["key"]: int(sample["value"]) for sample in load(output, split)}


def recorded(output):
    """Return how many lines the ledger has of each record that was left out."""
    lines = read_ledger(output / ".datamat" / "ledger.jsonl")
    return collections.Counter(line.values["key"] for line in lines if line.event == "sample_dropped")


@pytest.mark.parametrize(
    ("shard_format", "has_files"),
    [("tfrecord", True), ("tfrecord", False), ("parquet", True), ("webdataset", False), ("arrayrecord", True)],
)
def test_every_count_and_key_is_that_of_a_loop(source, tmp_path, shard_format, has_files):
    """Report, records, look-up by key, ledger, status, manifest and verify agree; the second run has nothing to do."""
    if shard_format == "arrayrecord":
        pytest.importorskip("array_record")
    found, dropped = expected()
    num_rows_dropped = sum("#" not in key for key in dropped)

    report = job(source, tmp_path / "out", format=shard_format, has_files=has_files).run(progress=False)

    assert stored(tmp_path / "out") == found
    dataset = load(tmp_path / "out", "train")
    assert sorted(dataset.keys()) == sorted(found) and all(dataset[key]["value"] == found[key] for key in found)
    assert recorded(tmp_path / "out") == dict.fromkeys(dropped, 1)
    counts = (report.num_rows, report.num_records, report.num_dropped, report.num_dropped_records, report.num_failed)
    assert counts == (NUM_ROWS + 1, len(found), num_rows_dropped, len(dropped) - num_rows_dropped, 0)
    text = f"{num_rows_dropped} samples and {counts[3]} records of other samples left out"
    again = job(source, tmp_path / "out", format=shard_format, has_files=has_files)
    assert text in str(report) and text in str(again.status())
    assert verify(tmp_path / "out", deep=True).ok and again.verify(sample=1.0).ok
    assert again.run(progress=False).did_nothing
    assert len(load(tmp_path / "out", "empty")) == 0


def some_copies(sample, rng):
    """Leave out a third of all copies, and double some of the others."""
    draw = int(rng.integers(1 << 30))
    if draw % 3 == 0:
        raise Skip("an ugly crop")
    made = {**sample, "draw": draw}
    return [made, {**made, "draw": draw + 1}] if draw % 3 == 1 else made


def test_copies_that_a_transform_leaves_out_leave_the_others(source, tmp_path):
    """Each copy keeps its key, and a row without any is one that is left out."""
    made = job(source, tmp_path / "out", copies={"train": 3}, transform=some_copies)

    report = made.run(progress=False)

    found, dropped = load(tmp_path / "out").keys(), recorded(tmp_path / "out")
    of_found, of_dropped = ({key.partition("#")[0] for key in keys} for keys in (found, dropped))
    assert of_found | of_dropped == {"-0", *(f"{number:03d}" for number in range(NUM_ROWS))}
    assert {key for key in dropped if "#" not in key} == of_dropped - of_found
    assert not dropped.keys() & set(found) and set(dropped.values()) == {1}
    for key in (name for name in of_found if len(VALUES[int(name) % 10]) == 1):
        copies = {name.partition("#")[2].partition("-")[0] for name in [*found, *dropped] if name.startswith(f"{key}#")}
        assert copies == {"0", "1", "2"}
    assert any("#1-" in key for key in found)
    assert report.num_dropped == sum("#" not in key for key in dropped)
    assert report.num_dropped_records == sum("#" in key for key in dropped)
    assert verify(tmp_path / "out").ok and made.verify(sample=1.0).ok
    one = next(key for key in found if "#2" in key)
    assert made.replay(one)["draw"] == load(tmp_path / "out")[one]["draw"]


def test_all_samples_of_an_input_draw_differently(tmp_path):
    """Equal samples of one input get different copies."""
    materialize(lambda n: [{"x": 0}] * 4, range(5), tmp_path / "out", copies=2, transform=add_noise, seed=3, **HERE)

    draws = [int(sample["x"]) for sample in load(tmp_path / "out")]

    assert len(draws) == len(set(draws)) == 40


def add_noise(sample, rng):
    return {**sample, "x": int(rng.integers(1 << 60))}


class Interrupted(Moody):
    """Is interrupted at a late row until a file says that it may go on."""

    def __init__(self, gate):
        super().__init__()
        self.gate = str(gate)

    def read(self, row):
        if row.key == "016" and not os.path.exists(self.gate):
            raise KeyboardInterrupt
        return super().read(row)


def test_interrupted_run_resumes_to_the_same_bytes(source, tmp_path):
    """Parts that it finished are not made again, and the ledger names all that they left out."""
    writer, shards = Interrupted(tmp_path / "gate"), ShardOptions(num_shards=1, shuffle=False)
    with pytest.raises(KeyboardInterrupt):
        small_pairs.job(source, tmp_path / "out", writer, shards=shards).run(progress=False)
    (tmp_path / "gate").touch()

    report = small_pairs.job(source, tmp_path / "out", writer, shards=shards).run(progress=False)

    small_pairs.job(source, tmp_path / "reference", writer, shards=shards).run(progress=False)
    assert report.num_parts_resumed > 0
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "reference")
    assert recorded(tmp_path / "out") == dict.fromkeys(expected()[1], 1)


class EditedMeanwhile(Moody):
    """Its second file changes when it has been read for the first time: what it said left the sample out."""

    def read(self, row):
        path = pathlib.Path(row.fields["path"])
        found = path.read_text()
        if path.stem == "001" and found == "raise":
            path.write_text("111")
        return parsed(found)


def test_file_that_changes_while_it_leaves_a_sample_out_is_read_again(source, tmp_path):
    """The manifest records the file that the sample was made from; a later edit makes that sample's shard again."""
    made = small_pairs.job(source, tmp_path / "out", EditedMeanwhile())
    made.run(progress=False)

    assert stored(tmp_path / "out")["001"] == 111
    assert verify(tmp_path / "out").ok
    (source / "010.txt").write_text("none")
    assert made.run(progress=False).num_shards_written == 1
    assert "010" not in stored(tmp_path / "out") and verify(tmp_path / "out").ok


def test_failures_beside_samples_that_are_left_out(source, tmp_path):
    """The policy counts and names failures alone; trying them again gives what a run without failures gives."""
    job(source, tmp_path / "reference").run(progress=False)
    for key in ("000", "008"):
        os.utime(source / f"{key}.txt", (1, 1))
        (source / f"{key}.txt").write_text("bad")
    report = job(source, tmp_path / "out", errors=ErrorPolicy("skip", max_errors=2, retries=1)).run(progress=False)
    assert (report.num_failed, report.num_dropped) == (2, 11)
    with pytest.raises(IncompleteRunError, match=r"without 2 rows that failed in earlier runs \((000; 008|008; 000)\)"):
        job(source, tmp_path / "out").run(progress=False)
    for number in (0, 8):
        (source / f"00{number}.txt").write_text(WORDS[number])

    job(source, tmp_path / "out").run(retry_failed=True, progress=False)

    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "reference")


def test_repair_and_conversion_keep_what_was_left_out(source, tmp_path):
    """A lost shard comes back with the same bytes; another format holds the same records under the same keys."""
    made = job(source, tmp_path / "out", copies={"train": 2}, transform=some_copies)
    made.run(progress=False)
    before = small_pairs.digests(tmp_path / "out")
    found = stored(tmp_path / "out")
    sorted((tmp_path / "out").glob("moody-train-*.tfrecord"))[1].unlink()

    made.repair(progress=False)
    convert(tmp_path / "out", tmp_path / "parquet", format="parquet", **HERE)

    assert small_pairs.digests(tmp_path / "out") == before
    assert stored(tmp_path / "parquet") == found
    assert verify(tmp_path / "parquet").ok


def test_shard_of_which_all_is_left_out(tmp_path):
    """It is there, and empty; the others are whole."""
    keep = {"00000003", "00000011"}
    formats = ["tfrecord", "parquet", "webdataset"]
    shards = ShardOptions(num_shards=8)

    make = lambda n: {"x": n} if f"{n:08d}" in keep else None  # noqa: E731
    materialize(make, range(16), tmp_path / "out", format=formats, shards=shards, **HERE)

    for shard_format in formats:
        assert set(load(tmp_path / "out", format=shard_format).keys()) == keep
    assert verify(tmp_path / "out", deep=True).ok
    assert sorted(int(sample["x"]) for sample in load(tmp_path / "out").to_numpy()) == [3, 11]


def test_run_that_leaves_everything_out_says_so(tmp_path):
    """A forgotten `return` is the usual cause; the next run says the same."""
    features = Features({"x": Scalar("int64")})
    for _ in range(2):
        with pytest.raises(IncompleteRunError, match=r"all 5 rows were left out.*is a `return` missing"):
            materialize(lambda n: None, range(5), tmp_path / "out", features=features, **HERE)
    with pytest.raises(IncompleteRunError, match=r"all 5 inputs were left out.*the last: sample '00000004': too dark"):
        materialize(lambda n: Skip("too dark"), range(5), tmp_path / "inferred", **HERE)


def test_features_come_from_the_first_sample_that_is_there(tmp_path):
    """Inputs that are left out before it are no failures."""
    make = lambda n: [{"x": n}, {"x": -n}] if n > 5 else None  # noqa: E731

    report = materialize(make, range(8), tmp_path / "out", errors=ErrorPolicy("skip", max_errors=0), **HERE)

    assert (report.num_records, report.num_dropped, report.num_failed) == (4, 6, 0)
    found = {sample["key"]: int(sample["x"]) for sample in load(tmp_path / "out")}
    assert found == {"00000006#0-0": 6, "00000006#0-1": -6, "00000007#0-0": 7, "00000007#0-1": -7}


def test_several_samples_of_which_one_is_bad_fail_together(tmp_path):
    """None of them is stored, and nothing of the row counts as left out; so where a generator raises."""

    def make(number):
        yield {"x": number}
        yield Skip("dull")
        if number == 5:
            raise ValueError("no third")
        yield {"x": "bad" if number == 3 else number}

    features = Features({"x": Scalar("int64")})
    report = materialize(make, range(6), tmp_path / "out", features=features, errors="skip", **HERE)

    assert (report.num_failed, report.num_records, report.num_dropped_records) == (2, 8, 4)
    keys = load(tmp_path / "out").keys()
    assert {key.partition("#")[0] for key in keys} == {f"0000000{number}" for number in (0, 1, 2, 4)}


def test_hooks_hear_what_is_left_out(source, tmp_path):
    """Each record once, with its reason and the class of it; parts and shards count rows."""

    class Heard:
        dropped, parts, shards = {}, 0, 0

        def __call__(self, event):
            match event:
                case SampleDropped():
                    self.dropped[event.key] = (event.error, event.message)
                case PartDone():
                    self.parts += event.num_dropped
                case ShardFinished():
                    self.shards += event.num_dropped

    heard = Heard()

    job(source, tmp_path / "out", hooks=[heard]).run(progress=False)

    assert heard.dropped.keys() == expected()[1]
    reasons = {"001": ("TooDark", "too dark"), "002": ("NoSample", "read returned None")}
    reasons |= {"004": ("Skip", "no reason given"), "007#0-1": ("Skip", "dull")}
    assert reasons.items() <= heard.dropped.items()
    assert heard.parts == heard.shards == sum("#" not in key for key in heard.dropped)


def test_parts_shards_report_and_status_count_alike(source, tmp_path):
    """Rows, records and bytes: parts make up shards, and shards what is done."""
    names = ("num_rows", "num_failed", "num_dropped", "num_dropped_records", "num_records", "num_bytes")
    heard = []
    report = job(source, tmp_path / "out", hooks=[heard.append]).run(progress=False)
    done = status(tmp_path / "out").done

    for kind in (PartDone, ShardFinished):
        events = [event for event in heard if isinstance(event, kind)]
        assert [sum(getattr(event, name) for event in events) for name in names] == [
            getattr(done, name) for name in names
        ]
    assert [getattr(report, name) for name in names] == [getattr(done, name) for name in names]
    assert 0 not in (report.num_dropped, report.num_dropped_records, report.num_bytes)


def test_skip_that_time_decides_is_refused(tmp_path):
    """The first row that gives a sample is read twice, and the two must agree."""

    class Forgetful(DatasetWriter):
        name = "forgetful"
        features = Features({"x": Scalar("int64")})

        def index(self, source):
            return Index.from_rows([f"{number}" for number in range(4)])

        def read(self, row):
            seen = self.__dict__.setdefault("_seen", [])
            seen.append(row.key)
            return {"x": 1} if seen.count(row.key) < 2 else None

    with pytest.raises(OptionError, match=r"twice gave two results|cannot be read again"):
        small_pairs.job(None, tmp_path / "out", Forgetful()).run(progress=False)
