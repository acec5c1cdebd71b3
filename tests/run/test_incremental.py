"""A finished dataset whose source or job changes: a run rebuilds exactly the shards concerned; `status` says why."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
import re
import shutil
import sys

import pytest
import small_pairs
from pyarrow import parquet

from datamat import ShardOptions, load, verify

WRITER = """
from datamat import DatasetWriter, Features, Index, Scalar
from datamat.codecs import read_file

class Numbers(DatasetWriter):
    name = "numbers"
    features = Features({"number": Scalar("int64")})

    def index(self, source):
        return Index.from_folder(
            source, "*/*.txt", field="file", split_of=lambda path: path.parts[0], fields_of=lambda path: {"weight": 1.5}
        )

    def read(self, row):
        # the file holds digits
        return {"number": int(read_file(row.fields["file"])) + 0}
"""


@dataclasses.dataclass(frozen=True)
class Shift:
    """A transform with one parameter."""

    amount: int

    def __call__(self, sample, rng):
        return {**sample, "number": sample["number"] * 1000 + int(rng.integers(100)) + self.amount}


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size of the dataset, and how much of it changes."""

    rows: int
    shards: int
    changed: int = 2
    added: int = 2
    removed: int = 1


SMALL = Scale(rows=60, shards=4)
LARGE = Scale(rows=2_000, shards=32, changed=3, added=40, removed=10)


class Job:
    """A dataset of tiny files, half of them in `train`, and the job that materializes it."""

    def __init__(self, folder, scale, monkeypatch):
        self.source, self.output, self.scale = folder / "source", folder / "out", scale
        self._module = folder / "modules" / "edited_writer.py"
        self._module.parent.mkdir()
        monkeypatch.syspath_prepend(self._module.parent)
        self.edit(WRITER)

    def make(self):
        """Write the files, and materialize them."""
        for split in ("train", "val"):
            (self.source / split).mkdir(parents=True)
        for number in range(self.scale.rows):
            self.write(number)
        self.job().run(progress=False)
        return self

    def write(self, number, content=None, time_s=1):
        """Write one file and return its key."""
        split, name = ("val", "train")[number % 2], f"n{number:06d}"
        path = self.source / split / f"{name}.txt"
        path.write_text(str(number if content is None else content))
        os.utime(path, (time_s, time_s))
        return f"{split}-{name}"

    def remove(self, number):
        """Remove one file and return its key."""
        key = self.write(number)
        (self.source / f"{key.replace('-', '/')}.txt").unlink()
        return key

    def edit(self, text):
        """Give the writer another text, as an editor and a new process would."""
        self._module.write_text(text)
        sys.modules.pop("edited_writer", None)
        importlib.invalidate_caches()
        pathlib.Path(importlib.util.cache_from_source(self._module)).unlink(missing_ok=True)
        self.writer = importlib.import_module("edited_writer").Numbers

    def job(self, **options):
        given = {"copies": {"train": 2}, "transform": Shift(1), "shards": ShardOptions(num_shards=self.scale.shards)}
        return small_pairs.job(self.source, self.output, self.writer, **{**given, **options})

    def shard_of(self):
        """Return the short name of the shard of each row, by key."""
        found = {}
        for split in ("train", "val"):
            table = parquet.read_table(self.output / "_index" / f"{split}.index")
            pairs = zip(table["key"].to_pylist(), table["shard"].to_pylist(), strict=True)
            found |= {key: f"numbers-{split}-{shard:05d}" for key, shard in pairs}
        return found

    def files(self):
        """Return size and times of each shard, by its short name: they show whether it was written again."""
        found = {}
        for path in self.output.glob("*.tfrecord"):
            seen = path.stat()
            found[path.stem.rpartition("-of-")[0]] = (seen.st_ino, seen.st_mtime_ns)
        return found


def rebuilt(job, existing="update", **options):
    """Run; return the shards that were rebuilt, and the reasons that `status` gave for each before."""
    before = job.files()
    status = job.job(**options).status()
    reasons_given = dict(str(change).split(": ", 1) for change in status.changes)

    report = job.job(**options).run(progress=False, existing=existing)

    after = job.files()
    assert report.num_shards_written == len(reasons_given)
    status = job.job(**options).status()
    assert status.changes == () and "up to date" in str(status)
    return {name for name in after if after[name] != before.get(name)}, reasons_given


@pytest.fixture(
    params=[SMALL, pytest.param(LARGE, marks=[pytest.mark.long, pytest.mark.timeout(300)])], ids=["small", "large"]
)
def scale(request):
    """The size of a dataset: of a few files, and of thousands."""
    return request.param


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished job, which tests only look at."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Job(tmp_path_factory.mktemp("made"), SMALL, monkeypatch).make()


@pytest.fixture
def small(made, tmp_path, monkeypatch):
    """A copy of that job, to change."""
    for folder in (made.source, made.output):
        shutil.copytree(folder, tmp_path / folder.name)
    return Job(tmp_path, SMALL, monkeypatch)


def test_changed_added_and_removed_files_rebuild_their_shards_alone(tmp_path, monkeypatch, scale):
    """Of thousands of files, three change, some are added, ten are removed."""
    job = Job(tmp_path, scale, monkeypatch).make()
    old = job.shard_of()
    changed = [job.write(number, content=number + 1, time_s=9) for number in range(5, 5 + scale.changed)]
    added = [job.write(scale.rows + number) for number in range(scale.added)]
    removed = [job.remove(number) for number in range(40, 40 + scale.removed)]

    remade, reasons = rebuilt(job, existing="replace")

    new = job.shard_of()
    assert all(new[key] == shard for key, shard in old.items() if key not in removed)  # no row has moved
    concerned = {old[key] for key in (*changed, *removed)} | {new[key] for key in added}
    assert remade == set(reasons) == concerned and len(remade) < 2 * scale.shards
    for keys, what in ((changed, "changed on disk"), (added, "added"), (removed, "removed")):
        for key in keys:
            shard = (new if what == "added" else old)[key]
            assert re.search(rf"rows? [^;]*({key}|more)[^;]* {what}", reasons[shard])
    assert verify(job.output).ok
    assert {load(job.output)[f"{key}#0" if new[key].startswith("numbers-train") else key]["key"] for key in added}


def test_changed_job_rebuilds_what_it_concerns(tmp_path, monkeypatch, scale):
    """A parameter of the transform concerns the augmented split, an edited `read` every shard, a comment none."""
    job = Job(tmp_path, scale, monkeypatch).make()
    train = {name for name in job.files() if name.startswith("numbers-train")}
    everything = set(job.files())

    assert rebuilt(job, transform=Shift(2)) == (train, dict.fromkeys(train, "transform changed (attribute amount)"))
    job.edit(WRITER.replace("the file holds digits", "digits are in the file\n"))
    assert rebuilt(job, transform=Shift(2)) == (set(), {})
    job.edit(WRITER.replace("+ 0", "+ 1"))
    assert rebuilt(job, transform=Shift(2)) == (everything, dict.fromkeys(everything, "writer code changed (read)"))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("options", "concerned", "reason"),
    [
        ({"seed": 3}, "", r"seed changed \(0 -> 3\)"),
        ({"copies": {"train": 3}}, "train", r"copies changed \(2 -> 3\)"),
        ({"transform": None, "copies": {"train": 2, "val": 2}}, "", r"copies changed|transform (changed|no longer)"),
        ({"transform": Shift(1), "copies": {"val": 1}}, "", r"transform (applies now|no longer applies)"),
        ({"shards": ShardOptions(num_shards=2)}, "", r"split \w+ has 2 shards now, it had 4"),
        ({"shards": ShardOptions(num_shards=4, shuffle=False)}, "", r"another shard"),
    ],
)
def test_changed_options_are_named(made, options, concerned, reason):
    """`status` names them for the shards that they concern, and for no other."""
    status = made.job(**options).status()

    names = {change.shard for change in status.changes}
    wanted = {shard.name for shard in made.job(**options).plan().shards if concerned in shard.name}
    assert names == wanted
    assert all(re.search(reason, str(change)) for change in status.changes), status


def test_changed_field_of_the_index_is_named(small):
    """A weight in the index that no file holds counts, too."""
    small.edit(WRITER.replace('{"weight": 1.5}', '{"weight": 2.5 if path.stem == "n000007" else 1.5}'))

    reasons = [str(change) for change in small.job().status().changes]

    shard = small.shard_of()["train-n000007"]
    assert f"{shard}: writer code changed (index); row train-n000007 changed in the index" in reasons


NAMED = (
    WRITER.replace("+ 0", "* GAIN + scaled(1) + self.step + self.sizes['a'] + LEVELS[0].value")
    + """
    step = 1

    def __init__(self):
        self.sizes = {"a": 1}

class Level:
    def __init__(self, value):
        self.value = value

GAIN, OFFSET = 2, 3
LEVELS = [Level(1), Level(2)]

def scaled(x):
    return x * OFFSET
"""
)


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        ("GAIN, OFFSET = 2, 3", "GAIN, OFFSET = 4, 3", {"global GAIN changed"}),
        ("GAIN, OFFSET = 2, 3", "GAIN, OFFSET = 4, 4", {"global GAIN changed", "global OFFSET changed"}),
        ("Level(2)", "Level(3)", {"global LEVELS changed"}),
        ('{"a": 1}', '{"a": 2}', {"writer code changed (__init__)", "attribute sizes changed"}),
        ("step = 1", "step = 2", {"attribute step changed"}),
        ("x * OFFSET", "x + OFFSET", {"writer code changed (scaled)"}),
        ("* GAIN", "+ GAIN", {"writer code changed (read)"}),
        ("* GAIN", "* 2", {"writer code changed (read)"}),
    ],
)
def test_what_changed_has_its_name(tmp_path, monkeypatch, before, after, reasons):
    """A global or an attribute, and not the methods that read it; a function, and not those that call it."""
    job = Job(tmp_path, Scale(rows=4, shards=1), monkeypatch)
    job.edit(NAMED)
    job.make()
    job.edit(NAMED.replace(before, after))

    assert {reason for change in job.job().status().changes for reason in change.reasons} == reasons


OFFSET = 1


def shift(sample):
    """Add a global."""
    return {**sample, "number": sample["number"] + OFFSET}


def test_global_of_a_transform_has_its_name(tmp_path, monkeypatch):
    """It concerns the split that is drawn alone."""
    job = Job(tmp_path, Scale(rows=4, shards=1), monkeypatch).make()
    job.job(transform=shift).run(progress=False)
    monkeypatch.setitem(globals(), "OFFSET", 2)

    (change,) = job.job(transform=shift).status().changes

    assert str(change) == "numbers-train-00000: transform changed (global OFFSET)"


def test_shards_of_a_split_that_is_gone_are_named(small):
    """So are shards of a split that is new."""
    (small.source / "val").rename(small.source / "test")

    status = small.job().status()

    assert {change.reasons for change in status.changes} == {("split test is new",)}
    assert len(status.obsolete) == 4 and all(name.startswith("numbers-val-") for name in status.obsolete)
    assert "would remove 4 shards" in str(status)


@pytest.mark.parametrize("damage", ["missing", "cut", "offsets"])
def test_lost_files_are_named_without_reading_any(small, damage):
    """The listing of the folder shows them; only `verify` reads contents."""
    shard = next(small.output.glob("numbers-train-00003-of-*.tfrecord"))
    if damage == "cut":
        os.truncate(shard, 5)
    else:
        (shard if damage == "missing" else shard.with_suffix(".idx")).unlink()

    (change,) = small.job().status().changes

    assert str(change).startswith(f"numbers-train-00003: {shard.stem}.")
    assert ("5 bytes" if damage == "cut" else "is missing") in str(change)


def test_status_gives_reasons_after_an_interrupted_rebuild(small, monkeypatch):
    """The old set stays as it is until the new one is complete, and the reasons remain."""
    small.edit(WRITER.replace("+ 0", "+ 1"))
    monkeypatch.setattr("datamat.run.run.write_index_files", _stopped)
    with pytest.raises(RuntimeError, match="stopped"):
        small.job().run(progress=False)
    assert verify(small.output).ok
    small.edit(WRITER.replace("+ 0", "+ 2"))

    status = small.job().status()

    assert status.state == "unfinished" and len(status.changes) == 8
    assert {reason for change in status.changes for reason in change.reasons} == {"writer code changed (read)"}


def _stopped(*_, **__):
    raise RuntimeError("stopped")


def test_status_of_a_lost_source_reports_what_is_there(small):
    """Nobody needs the raw data to ask how much is done."""
    small.source.rename(small.source.with_name("away"))

    status = small.job().status()

    assert status.is_complete and status.changes is None
    assert "the source cannot be compared" in str(status)
