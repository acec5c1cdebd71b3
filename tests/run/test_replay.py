"""Single records recomputed in this process: `replay`, `provenance`, and `verify(sample=...)`."""

import os
import random
import shutil

import numpy as np
import pytest
import small_pairs
from prepared import Prepared

from datamat import (
    DatasetWriter,
    ErrorPolicy,
    Features,
    IndexRow,
    OptionError,
    OutputError,
    SampleError,
    Scalar,
    ShardOptions,
    WorkerOptions,
    load,
)
from datamat.testing import InlineExecutor

COPIES = 3


def _job(source, output, **options):
    return Prepared(
        small_pairs.Pairs(),
        source,
        output,
        copies={"train": COPIES},
        transform=small_pairs.jitter,
        shards=ShardOptions(num_shards=2),
        **{"executor": InlineExecutor(), **options},
    )


@pytest.fixture(scope="module")
def template(source, tmp_path_factory):
    """A finished directory."""
    output = tmp_path_factory.mktemp("template") / "out"
    _job(source, output, executor=None, workers=WorkerOptions(num_workers=2, start_method="fork")).run(progress=False)
    return output


@pytest.fixture
def job(source, template, tmp_path):
    """A job whose directory is finished."""
    return _job(source, shutil.copytree(template, tmp_path / "out"))


def _equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_replay_gives_what_every_record_holds(job):
    """The draws are those of the run, in which two workers shared the rows: augmented copies and kept originals."""
    data = load(job.output)

    for number in range(0, 20, 5):
        for copy in range(COPIES):
            assert _equal(job.replay(f"train{number:03d}", copy), data[f"train{number:03d}#{copy}"])
    assert _equal(job.replay("val002"), data["val002"])
    assert _equal(job.replay("train003#2"), data["train003#2"])


def test_replay_runs_here_and_keeps_the_random_state(job):
    """A debugger stops in `read`; the program's own random numbers are not disturbed."""
    random.seed(3), np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    seen, read = [], job.writer.read
    job.writer.__dict__["read"] = lambda row: (seen.append((os.getpid(), row.key)), read(row))[1]

    job.replay("train004", copy=1)

    assert seen == [(os.getpid(), "train004")]
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


def test_replay_needs_no_finished_run(source, tmp_path):
    """The row that ended a run is the one to look into; its error is the cause of the one raised."""
    job = _job(source, tmp_path / "out")
    broken = small_pairs.make_pairs(tmp_path / "source")
    (broken / "train" / "train005.png").write_bytes(b"\x89PNG no more")

    with pytest.raises(SampleError, match="train005") as raised:
        _job(broken, tmp_path / "out").replay("train005")

    assert raised.value.__cause__ is not None
    assert job.replay("train005")["image"].shape == (24, 32, 3)
    assert not (tmp_path / "out").exists()


class SetUp(small_pairs.Pairs):
    """Makes in `setup_worker` what it needs later, and what cannot be fingerprinted or sent to a worker."""

    def setup_worker(self):
        self.numbers = iter(range(1000))

    def read(self, row):
        next(self.numbers)
        return super().read(row)

    def augment(self, sample, rng):
        next(self.numbers)
        return sample


def test_replay_sets_up_a_writer_of_its_own(source, tmp_path):
    """As a worker does; the job's writer can still be fingerprinted and sent."""
    job = Prepared(SetUp(), source, tmp_path / "out", workers=WorkerOptions(num_workers=1))

    assert job.replay("train003")["image"].shape == (24, 32, 3)

    assert not hasattr(job.writer, "numbers")
    assert job.run(progress=False).is_complete
    assert job.verify(sample=0.2).ok and job.status().changes == ()


@pytest.mark.parametrize(("key", "copy"), [("nobody", 0), ("train003", 3), ("val001", 1), ("train003#x", 0)])
def test_missing_record_is_refused(job, key, copy):
    """The error names it, and `provenance` refuses it, too."""
    with pytest.raises(OptionError, match=key):
        job.replay(key, copy)
    with pytest.raises(OptionError, match=key):
        job.provenance(f"{key}#{copy}" if copy else key)


class Several(DatasetWriter):
    """Rows of which some give two samples per copy."""

    name = "several"
    features = Features({"x": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"r{number}", fields={"x": number}) for number in range(6)]

    def read(self, row):
        return {"x": row.fields["x"]}

    def augment(self, sample, rng):
        return [{**sample, "x": sample["x"] * 100 + int(rng.integers(50))} for _ in range(1 + sample["x"] % 2)]


def test_rows_of_several_samples_are_found_too(tmp_path):
    """A key is KEY#COPY-NUMBER; without a number it means the first sample."""
    job = Prepared(Several(), None, tmp_path / "out", copies=2, executor=InlineExecutor())
    job.run(progress=False)
    keys = load(tmp_path / "out").keys()

    found = {key: job.provenance(key).position for key in keys}

    assert "r1#1-1" in keys and "r2#1" in keys
    assert found == {key: place for place, key in enumerate(keys)}
    assert all(_equal(job.replay(key), load(tmp_path / "out")[key]) for key in keys)
    assert _equal(job.replay("r1", 1), load(tmp_path / "out")["r1#1-0"])
    with pytest.raises(OptionError, match=r"has no record 'r1#7'; row 'r1' has r1#0-0"):
        job.provenance("r1#7")
    assert job.verify(sample=1.0).ok


class Keyed(DatasetWriter):
    """Rows with keys of all sorts."""

    name = "keyed"
    features = Features({"x": Scalar("int64")})
    keys = ("a", "a/b", "%2F", "%00%25", "a#1", "%2F#9", "a#x", "50%")

    def index(self, source):
        return [IndexRow(key, fields={"x": number}) for number, key in enumerate(self.keys)]

    def read(self, row):
        return {"x": row.fields["x"]}


@pytest.mark.parametrize("copies", [1, 2])
def test_record_is_found_by_the_key_that_its_row_has_in_the_source(tmp_path, copies):
    """Whatever of it is escaped where it is stored."""
    job = Prepared(Keyed(), None, tmp_path / "out", copies=copies, executor=InlineExecutor())
    job.run(progress=False)
    found = load(tmp_path / "out")

    for number, key in enumerate(Keyed.keys):
        name = key if copies == 1 else f"{key}#1"
        assert [one[name]["x"] for one in (found, {name: job.replay(name)})] == [number, number]
        assert job.provenance(name).key == found[name]["key"]


def test_provenance_names_files_copy_seed_shard_and_position(job, source):
    """It does so for every record, as the readers find it."""
    for split in ("train", "val"):
        data = load(job.output, split)
        for key in data.keys()[::7]:
            found = job.provenance(key)
            number = found.position + sum(
                info.num_records for info in data.manifest.splits[split] if info.file < found.shard
            )
            row_key, _, copy = key.partition("#")
            assert data[number]["key"] == key == found.key
            wanted = (row_key, int(copy) if copy else None, split, 0)
            assert (found.row_key, found.copy, found.split, found.seed) == wanted
            assert found.sources == {
                "image": str(source / split / f"{row_key}.png"),
                "mask": str(source / f"{split}annot" / f"{row_key}.png"),
            }
    assert found.fields == {"image": f"val/{row_key}.png", "mask": f"valannot/{row_key}.png"}
    assert str(job.provenance("train003#2")).startswith(
        f"train003#2: {source}/train/train003.png, {source}/trainannot/train003.png, copy 2, drawn from seed 0: record "
    )
    assert job.provenance("train003") == job.provenance("train003#0")


def test_provenance_needs_a_finished_directory(source, tmp_path):
    """An unfinished run has no index that records came from."""
    with pytest.raises(OutputError, match=r"holds no manifest\.json"):
        _job(source, tmp_path / "out").provenance("train003")


def test_sample_of_a_good_directory_is_ok(job):
    """The check recomputes here, with other numbers of workers and several copies together."""
    assert job.verify(sample=1.0, deep=True).ok
    assert job.verify(sample=0.01).ok
    assert job.verify().ok and job.verify(True).ok


def test_sample_check_finds_what_no_checksum_can(source, template, tmp_path):
    """The directory is whole but differs from what its source gives now: mtime and size are the same, pixels differ."""
    changed = shutil.copytree(source, tmp_path / "source")
    path = changed / "val" / "val001.png"
    before = path.stat()
    other = (changed / "val" / "val002.png").read_bytes()
    path.write_bytes(other)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    output = shutil.copytree(template, tmp_path / "out")

    (found,) = _job(changed, output).verify(sample=1.0).problems

    assert "('val001') differs from what its source gives now, in image" in found


def test_sample_check_reports_rows_that_are_new_or_fail_now(source, template, tmp_path):
    """A new row has no record; one whose file broke cannot be compared."""
    changed = shutil.copytree(source, tmp_path / "source")
    for folder in ("val", "valannot"):
        shutil.copy(changed / folder / "val001.png", changed / folder / "new.png")
    with (changed / "val.txt").open("a") as file:
        file.write("/elsewhere/val/new.png /elsewhere/valannot/new.png\n")
    (changed / "val" / "val002.png").write_bytes(b"broken")
    output = shutil.copytree(template, tmp_path / "out")

    found = _job(changed, output).verify(sample=1.0).problems

    assert len(found) == 2
    assert "('val002') cannot be made again: sample 'val002'" in found[0]
    assert found[1] == "manifest.json: row 'new' of the source is in no record; the next run adds it"


def test_rows_that_failed_are_no_damage(source, tmp_path):
    """They gave no record, and give none now; the rows around them are found in their places."""
    changed = shutil.copytree(source, tmp_path / "source")
    (changed / "train" / "train003.png").write_bytes(b"broken")
    job = _job(changed, tmp_path / "out", errors=ErrorPolicy("skip"))
    job.run(progress=False)
    data = load(tmp_path / "out")

    assert job.verify(deep=True, sample=1.0).ok and job.status().changes == ()
    assert job.provenance("train003").position is None
    assert "which gave no record" in str(job.provenance("train003"))
    for key in load(tmp_path / "out").keys():  # noqa: SIM118 -- not a dict
        info = next(info for info in data.manifest.shards if info.file == job.provenance(key).shard)
        first = sum(other.num_records for other in data.manifest.shards if other.file < info.file)
        assert data[first + job.provenance(key).position]["key"] == key


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_share_that_makes_no_sense_is_refused(job, share):
    """Zero, and more than all, are refused."""
    with pytest.raises(OptionError, match=f"sample={share}"):
        job.verify(sample=share)
