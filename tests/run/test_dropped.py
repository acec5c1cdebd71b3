"""Samples that are left out on purpose, and inputs that give several: every count, key and byte is that of a loop."""

from __future__ import annotations

import collections
import os
import pathlib
import signal
import subprocess
import sys

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
    Materializer,
    OptionError,
    RunHook,
    SampleError,
    Scalar,
    ShardOptions,
    Skip,
    WorkerOptions,
    convert,
    load,
    materialize,
    read_ledger,
    verify,
)

NUM_ROWS = 60
FORMATS = ["tfrecord", "parquet", "webdataset", "arrayrecord"]


class TooDark(Skip):
    """A reason with a class of its own."""


def parsed(text, number=0):
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
        die_if_told()
        text = pathlib.Path(row.fields["path"]).read_text() if self.file_fields else row.fields["text"]
        return parsed(text)


def die_if_told():
    """Kill all processes of the job at the n-th read, where a test says so."""
    tally = os.environ.get("_".join(["DROPPED", "TALLY"]))  # by a computed name, so that it is no part of the code
    if tally:
        with open(tally, "ab") as file:
            file.write(b".")
            file.flush()
            if os.fstat(file.fileno()).st_size >= int(os.environ["_".join(["DROPPED", "AT"])]):
                os.killpg(0, signal.SIGKILL)


def make_source(folder):
    folder.mkdir()
    for number in range(NUM_ROWS):
        (folder / f"{number:03d}.txt").write_text(WORDS[number % 10])
    (folder / "-0.txt").write_text("none")  # all that the split "empty" has
    return folder


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "source")


def job(source, output, *, has_files=True, **options):
    options = {"shards": ShardOptions(num_shards=3), "workers": WorkerOptions(num_workers=2), **options}
    return Materializer(Moody(has_files=has_files), source, output, **options)


def names(key, values, copy=0, *, is_plain=True):
    """Return the keys of the records of a row, and those that it leaves out, by their values."""
    if len(values) == 1:
        return {key if is_plain else f"{key}#{copy}": values[0]}
    return {f"{key}#{copy}-{number}": value for number, value in enumerate(values)}


def expected():
    """Return the value of each record of the plain job by key, and the keys of what it leaves out."""
    found, dropped = {}, {"-0"}
    for number in range(NUM_ROWS):
        key, values = f"{number:03d}", VALUES[number % 10]
        dropped |= set() if values else {key}
        for name, value in names(key, values).items():
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


@pytest.mark.parametrize("has_files", [True, False], ids=["files", "rows"])
@pytest.mark.parametrize("shard_format", FORMATS)
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


@pytest.mark.timeout(240)  # on a machine that is busy with other things
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_bytes_do_not_depend_on_who_makes_them(source, tmp_path, start_method):
    """One worker that is forked, and two of either kind."""
    options = {"copies": {"train": 3}, "transform": some_copies}
    job(source, tmp_path / "one", workers=WorkerOptions(num_workers=1), **options).run(progress=False)

    workers = WorkerOptions(num_workers=2, start_method=start_method)
    job(source, tmp_path / "two", workers=workers, **options).run(progress=False)

    assert small_pairs.digests(tmp_path / "one") == small_pairs.digests(tmp_path / "two")
    assert recorded(tmp_path / "one") == recorded(tmp_path / "two")


def some_copies(sample, rng):
    """Leave out a third of all copies, and double some of the others."""
    draw = int(rng.integers(1 << 30))
    if draw % 3 == 0:
        raise Skip("an ugly crop")
    made = {**sample, "draw": draw}
    return [made, {**made, "draw": draw + 1}] if draw % 3 == 1 else made


def test_copies_that_a_transform_leaves_out_leave_the_others(source, tmp_path):
    """A loop over `records` gives the same; each copy keeps its key, and a row without any is one that is left out."""
    made = job(source, tmp_path / "out", copies={"train": 3}, transform=some_copies)

    report = made.run(progress=False)

    found, dropped = set(), set()
    with made.job.planned() as planned:
        for key in planned.store.keys(planned.store.order):
            row, shard = planned.find(key)
            reasons = {}
            mine = planned.pipeline.records(row, copies=shard.copies, augmented=shard.augmented, dropped=reasons)
            keys = [name for name, _ in mine]
            found |= set(keys)
            dropped |= set(reasons) if keys else {key}
    assert set(load(tmp_path / "out").keys()) == found
    assert recorded(tmp_path / "out") == dict.fromkeys(dropped, 1)
    assert any(key.endswith("#2") for key in found) and any(key.endswith("#1-1") for key in found)
    assert report.num_dropped == sum("#" not in key for key in dropped)
    assert report.num_dropped_records == sum("#" in key for key in dropped)
    assert verify(tmp_path / "out").ok and made.verify(sample=1.0).ok
    one = next(key for key in found if key.endswith("#2"))
    assert made.replay(one)["draw"] == load(tmp_path / "out")[one]["draw"]


def test_all_samples_of_an_input_draw_differently(tmp_path):
    """Equal samples of one input get different copies."""
    materialize(
        lambda n: [{"x": 0}] * 4, range(5), tmp_path / "out", progress=False, copies=2, transform=add_noise, seed=3
    )

    draws = [int(sample["x"]) for sample in load(tmp_path / "out")]

    assert len(draws) == len(set(draws)) == 40


def add_noise(sample, rng):
    return {**sample, "x": int(rng.integers(1 << 60))}


@pytest.mark.timeout(240)  # on a machine that is busy with other things
@pytest.mark.parametrize("shard_format", ["tfrecord", "parquet"])
def test_killed_run_resumes_to_the_same_bytes(source, tmp_path, shard_format):
    """All processes are killed at several reads in turn; every sample that is left out has one line in the ledger."""
    job(source, tmp_path / "reference", format=shard_format).run(progress=False)
    here = pathlib.Path(__file__).parent
    code = f"""
import sys
sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]
import test_dropped
test_dropped.job({str(source)!r}, {str(tmp_path / "out")!r}, format={shard_format!r}).run(progress=False)
"""

    for at in (3, 40):
        env = {**os.environ, "DROPPED_TALLY": str(tmp_path / f"tally{at}"), "DROPPED_AT": str(at)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, start_new_session=True, capture_output=True, check=False
        )
        assert done.returncode in (-signal.SIGKILL, 0), done.stderr.decode()
    job(source, tmp_path / "out", format=shard_format, workers=WorkerOptions(num_workers=1)).run(progress=False)

    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "reference")
    assert recorded(tmp_path / "out") == recorded(tmp_path / "reference")


def test_edited_file_brings_a_sample_and_takes_one(source, tmp_path):
    """Only the shards of the edited files are made again; the result is that of a new run."""
    job(source, tmp_path / "out").run(progress=False)
    (source / "001.txt").write_text("111")
    (source / "010.txt").write_text("none")

    report = job(source, tmp_path / "out").run(progress=False)

    job(source, tmp_path / "reference").run(progress=False)
    assert 1 <= report.num_shards_written <= 2
    assert stored(tmp_path / "out")["001"] == 111 and "010" not in stored(tmp_path / "out")
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "reference")
    assert verify(tmp_path / "out").ok


class EditedMeanwhile(Moody):
    """Its second file changes when it has been read for the first time: what it said left the sample out."""

    def read(self, row):
        path = pathlib.Path(row.fields["path"])
        found = path.read_text()
        if path.stem == "001" and found == "raise":
            path.write_text("111")
        return parsed(found)


def test_file_that_changes_while_it_leaves_a_sample_out_is_read_again(source, tmp_path):
    """What the manifest records of the file is what the sample was made from."""
    options = {"shards": ShardOptions(num_shards=3), "workers": WorkerOptions(num_workers=1)}

    Materializer(EditedMeanwhile(), source, tmp_path / "out", **options).run(progress=False)

    assert stored(tmp_path / "out")["001"] == 111
    assert verify(tmp_path / "out").ok


def test_failures_beside_samples_that_are_left_out(source, tmp_path):
    """The policy counts and names failures alone; trying them again gives what a run without failures gives."""
    job(source, tmp_path / "reference").run(progress=False)
    for key in ("000", "008"):
        os.utime(source / f"{key}.txt", (1, 1))
        (source / f"{key}.txt").write_text("bad")
    report = job(source, tmp_path / "out", errors=ErrorPolicy("skip", max_errors=2, retries=1)).run(progress=False)
    assert (report.num_failed, report.num_dropped) == (2, 31)
    with pytest.raises(IncompleteRunError, match=r"without 2 rows that failed in earlier runs \((000; 008|008; 000)\)"):
        job(source, tmp_path / "out").run(progress=False)
    (source / "000.txt").write_text(WORDS[0])
    (source / "008.txt").write_text(WORDS[8])

    job(source, tmp_path / "out").rerun_failed(progress=False)

    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "reference")


def test_sample_that_is_left_out_is_not_tried_again(tmp_path):
    """Retries are for failures."""
    calls = tmp_path / "calls"

    def make(number):
        with open(calls, "a") as file:
            file.write(f"{number}\n")
        if number % 2:
            raise Skip("odd")
        return {"x": number}

    materialize(
        make,
        range(8),
        tmp_path / "out",
        features=Features({"x": Scalar("int64")}),
        progress=False,
        errors=ErrorPolicy(retries=3),
        workers=WorkerOptions(num_workers=1),
    )

    counts = collections.Counter(calls.read_text().split())
    assert all(counts[str(number)] == 1 for number in range(1, 8, 2))


def test_repair_and_conversion_keep_what_was_left_out(source, tmp_path):
    """A lost shard comes back with the same bytes; another format holds the same records under the same keys."""
    made = job(source, tmp_path / "out", copies={"train": 2}, transform=some_copies)
    made.run(progress=False)
    before = small_pairs.digests(tmp_path / "out")
    found = stored(tmp_path / "out")
    sorted((tmp_path / "out").glob("moody-train-*.tfrecord"))[1].unlink()

    made.repair(progress=False)
    convert(tmp_path / "out", tmp_path / "parquet", format="parquet", progress=False)

    assert small_pairs.digests(tmp_path / "out") == before
    assert stored(tmp_path / "parquet") == found
    assert verify(tmp_path / "parquet").ok


def test_shard_of_which_all_is_left_out(tmp_path):
    """It is there, and empty; the others are whole."""
    keep = {"00000003", "00000011"}

    materialize(
        lambda n: {"x": n} if f"{n:08d}" in keep else None,
        range(40),
        tmp_path / "out",
        progress=False,
        format=["tfrecord", "parquet", "webdataset"],
        shards=ShardOptions(num_shards=8),
    )

    assert set(load(tmp_path / "out").keys()) == keep
    for shard_format in ("parquet", "webdataset"):
        assert set(load(tmp_path / "out", format=shard_format).keys()) == keep
    assert verify(tmp_path / "out", deep=True).ok
    assert sorted(int(sample["x"]) for sample in load(tmp_path / "out").to_numpy()) == [3, 11]


def test_run_that_leaves_everything_out_says_so(tmp_path):
    """A forgotten `return` is the usual cause; the next run says the same."""
    for _ in range(2):
        with pytest.raises(IncompleteRunError, match=r"all 5 rows were left out.*is a `return` missing"):
            materialize(
                lambda n: None,
                range(5),
                tmp_path / "out",
                features=Features({"x": Scalar("int64")}),
                progress=False,
            )
    with pytest.raises(IncompleteRunError, match=r"all 5 inputs were left out.*the last: sample '00000004': too dark"):
        materialize(lambda n: Skip("too dark"), range(5), tmp_path / "inferred", progress=False)


def test_features_come_from_the_first_sample_that_is_there(tmp_path):
    """Inputs that are left out before it are no failures."""
    report = materialize(
        lambda n: [{"x": n}, {"x": -n}] if n > 5 else None,
        range(8),
        tmp_path / "out",
        progress=False,
        errors=ErrorPolicy("skip", max_errors=0),
    )

    assert (report.num_records, report.num_dropped, report.num_failed) == (4, 6, 0)
    assert stored_x(tmp_path / "out") == {"00000006#0-0": 6, "00000006#0-1": -6, "00000007#0-0": 7, "00000007#0-1": -7}


def stored_x(output):
    return {sample["key"]: int(sample["x"]) for sample in load(output)}


def test_several_samples_of_which_one_is_bad_fail_together(tmp_path):
    """None of them is stored, and nothing of the row counts as left out."""
    many = lambda n: [{"x": n}, Skip("dull"), {"x": "bad" if n == 3 else n}]  # noqa: E731

    report = materialize(
        many, range(6), tmp_path / "out", features=Features({"x": Scalar("int64")}), progress=False, errors="skip"
    )

    assert (report.num_failed, report.num_records, report.num_dropped_records) == (1, 10, 5)
    assert not any(key.startswith("00000003") for key in load(tmp_path / "out").keys())  # noqa: SIM118 -- not a dict


def test_hooks_hear_what_is_left_out(source, tmp_path):
    """Each record once, with its reason and the class of it; parts and shards count rows."""

    class Heard(RunHook):
        def __init__(self):
            self.dropped, self.parts, self.shards = {}, 0, 0

        def on_sample_dropped(self, event):
            self.dropped[event.key] = (event.error, event.message)

        def on_part_done(self, event):
            self.parts += event.num_dropped

        def on_shard_finished(self, event):
            self.shards += event.num_dropped

    heard = Heard()

    job(source, tmp_path / "out", hooks=[heard]).run(progress=False)

    assert set(heard.dropped) == expected()[1]
    assert heard.dropped["001"] == ("TooDark", "too dark")
    assert heard.dropped["002"] == ("NoSample", "read returned None")
    assert heard.dropped["004"] == ("Skip", "no reason given")
    assert heard.dropped["007#0-1"] == ("Skip", "dull")
    assert heard.parts == heard.shards == sum("#" not in key for key in heard.dropped)


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
        Materializer(Forgetful(), None, tmp_path / "out").run(progress=False)


def test_error_in_a_generator_is_a_failure_of_its_input(tmp_path):
    """What it yielded before is not stored."""

    def make(number):
        yield {"x": number}
        if number == 2:
            raise ValueError("no second")

    with pytest.raises(SampleError, match=r"00000002.*no second"):
        materialize(make, range(4), tmp_path / "out", progress=False)
