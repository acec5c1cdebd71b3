"""`repair` makes anew what is damaged, touches nothing else, and ends with the bytes that there were."""

from __future__ import annotations

import os
import shutil

import pytest
import sets

from datamat import Manifest, Materializer, OutputError, ShardOptions, WorkerOptions, verify


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Forty pairs in `train`, four in `val`."""
    return sets.make_pairs(tmp_path_factory.mktemp("source"), num_train=40)


def _job(source, output, **options):
    options = {"transform": sets.jitter, "workers": WorkerOptions(num_workers=1), **options}
    return Materializer(sets.Pairs(), source, output, copies={"train": 2}, shards=ShardOptions(num_shards=2), **options)


@pytest.fixture(scope="module")
def template(source, tmp_path_factory):
    """A finished directory."""
    output = tmp_path_factory.mktemp("template") / "out"
    _job(source, output).run(progress=False)
    return output


@pytest.fixture
def output(template, tmp_path):
    """A finished directory to damage."""
    return shutil.copytree(template, tmp_path / "out")


def shard(folder, number=0, split="train"):
    return folder / Manifest.read(folder).splits[split][number].file


def _flip(path, share):
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 4
    path.write_bytes(content)


def _swap(folder):
    first, second = shard(folder), shard(folder, 1)
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)


def _make_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "flipped bit": (lambda folder: _flip(shard(folder), 0.5), 1),
    "flipped bits in two": (lambda folder: [_flip(shard(folder, 1, split), 0.9) for split in ("train", "val")], 2),
    "cut": (lambda folder: os.truncate(shard(folder), 1000), 1),
    "deleted": (lambda folder: shard(folder, 1).unlink(), 1),
    "swapped": (_swap, 2),
    "doubled": (lambda folder: shutil.copy(shard(folder), shard(folder, 1)), 1),
    "folder in its place": (lambda folder: _make_folder(shard(folder)), 1),
    "shard and offsets deleted": (
        lambda folder: [shard(folder).with_suffix(end).unlink() for end in (".idx", ".tfrecord")],
        1,
    ),
    "offsets deleted": (lambda folder: shard(folder).with_suffix(".idx").unlink(), 0),
    "offsets flipped": (lambda folder: _flip(shard(folder).with_suffix(".idx"), 0.5), 0),
    "index deleted": (lambda folder: shutil.rmtree(folder / "index"), 0),
    "index flipped": (lambda folder: _flip(folder / "index" / "val.parquet", 0.5), 0),
    "foreign": (lambda folder: shutil.copy(shard(folder), folder / "pairs-train-00002-of-00003.tfrecord"), 0),
    "foreign index": (lambda folder: shutil.copy(folder / "index" / "val.parquet", folder / "index" / "x.parquet"), 0),
    "manifest flipped": (lambda folder: _flip(folder / "manifest.json", 0.1), 0),
    "manifest cut": (lambda folder: os.truncate(folder / "manifest.json", 20), 4),
    "manifest is a pickle": (lambda folder: (folder / "manifest.json").write_bytes(b"\x80\x04N."), 4),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_repair_brings_every_file_back_and_leaves_the_rest(source, template, output, damage):
    """Byte for byte; whole shards are not even touched."""
    inflict, num_shards = DAMAGES[damage]
    before = {path.name: path.stat().st_ino for path in output.glob("*.tfrecord")}
    inflict(output)
    assert not verify(output).ok
    whole = {path.name for path in output.glob("*.tfrecord") if path.stat().st_ino == before.get(path.name)}

    report = _job(source, output).repair(progress=False)

    assert sets.digests(output) == sets.digests(template)
    assert verify(output).ok and report.num_shards_written == num_shards
    kept = [name for name in whole if (output / name).stat().st_ino == before[name]]
    assert len(kept) >= len(before) - max(num_shards, 1)
    assert sorted(path.name for path in (output / ".datamat").iterdir() if path.name != "quarantine") == [
        "ledger.jsonl",
        "lock",
    ]


def test_entry_of_a_shard_that_cannot_be_read_any_more_costs_that_shard_alone(source, template, output):
    """The others are still told of by what is left of the manifest, and their checksums prove it."""
    text = (output / "manifest.json").read_text()
    place = text.index('"checksum"', text.index('"shards"'))
    (output / "manifest.json").write_text(f"{text[:place]}\x00{text[place + 1 :]}")

    report = _job(source, output).repair(progress=False)

    assert report.num_shards_written == 1
    assert sets.digests(output) == sets.digests(template)


def test_damaged_manifest_hides_no_damaged_shard(source, template, output):
    """What its entries tell is only believed where the checksum proves it; the rest is looked at afterwards."""
    _flip(output / "manifest.json", 0.1)
    _flip(shard_of := next(output.glob("*-train-00001-*.tfrecord")), 0.5)
    next(output.glob("*-train-00000-*.idx")).write_text("0 16\n")

    _job(source, output).repair(progress=False)

    assert sets.digests(output) == sets.digests(template) and shard_of.exists()


def test_whole_directory_is_left_alone(source, output):
    """And the report says that there was nothing to do."""
    before = {
        path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file() and ".datamat" not in path.parts
    }

    report = _job(source, output).repair(progress=False)

    assert report.did_nothing
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_strangers_are_kept_in_quarantine(source, output):
    """Nobody knows whose they are."""
    (output / "pairs-extra.tfrecord").write_bytes(b"mine")

    _job(source, output).repair(progress=False)

    assert (output / ".datamat" / "quarantine" / "foreign" / "pairs-extra.tfrecord").read_bytes() == b"mine"


@pytest.mark.parametrize("damaged", [False, True])
def test_changed_job_is_refused(source, output, damaged):
    """What was damaged could not come back as it was: the reason is told, and nothing is touched."""
    if damaged:
        _flip(shard(output), 0.5)
    before = sets.digests(output)

    with pytest.raises(OutputError, match=r"cannot be repaired: .*pairs-train-00000: transform .*run\(\) brings it up"):
        _job(source, output, transform=lambda sample, rng: sample).repair(progress=False)

    assert sets.digests(output) == before


def test_unfinished_directory_is_refused(source, tmp_path):
    """There is nothing to go back to."""
    with pytest.raises(OutputError, match=r"holds no manifest\.json"):
        _job(source, tmp_path / "out").repair(progress=False)


def test_repair_makes_shards_that_include_leaves_out(source, template, output):
    """The job may be one of several that share the work; the damage is no less for it."""
    _flip(shard(output), 0.5)
    job = _job(source, output, include="val-*")

    job.repair(progress=False)

    assert sets.digests(output) == sets.digests(template)
    assert job.include == "val-*"
