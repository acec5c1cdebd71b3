"""The main job in every format: one shard by all workers, killed and resumed, verified, and read."""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
import pytest
import small_pairs
from killed_job import COPIES, job, run_until_killed

from datamat import Manifest, Materializer, ShardOptions, load, materialize, verify
from datamat.formats import Offsets
from datamat.formats.parquet import ParquetFormat

NUM_TRAIN, NUM_VAL = 20, 4
FORMATS = ["tfrecord", "tfrecord.gz", "parquet", "webdataset"]
FORMATS.append(
    pytest.param(
        "arrayrecord",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("array_record") is None, reason="the package array-record is not installed"
        ),
    )
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small_pairs.make_pairs(tmp_path_factory.mktemp("source"), NUM_TRAIN, NUM_VAL)


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    """Give a function that returns the folder of the undisturbed job in a format, made once by one worker."""

    @functools.cache
    def finished(name):
        output = tmp_path_factory.mktemp("finished") / "out"
        job(source, output, name).run(progress=False)
        return output

    return finished


@pytest.mark.parametrize("name", FORMATS)
def test_one_shard_is_the_same_for_any_number_of_workers(source, finished, tmp_path, name):
    """Three workers that share the parts of a shard write the bytes that one writes."""
    report = job(source, tmp_path / "out", name, num_workers=3).run(progress=False)

    assert report.is_complete
    assert report.num_parts_written > 6
    assert len(Manifest.read(tmp_path / "out").shards) == 2
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(finished(name))


@pytest.mark.parametrize("name", FORMATS)
def test_killed_run_resumes_to_the_same_bytes(source, finished, tmp_path, name):
    """SIGKILL to all processes in the middle of a shard, twice; no finished part is made again."""
    for at in (9, 6):
        run_until_killed(source, tmp_path / "out", name, at=at)

    report = job(source, tmp_path / "out", name, num_workers=2).run(progress=False)

    assert report.num_parts_resumed > 2
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(finished(name))
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize("name", FORMATS)
def test_finished_directory_verifies_and_reads(finished, name):
    """Verify finds nothing, and `load` gives by position, key and iteration the samples that it gives of TFRecord."""
    reference, found = load(finished("tfrecord")), load(finished(name))

    assert str(verify(finished(name), deep=True)).endswith("all as the manifest says")
    assert len(found) == NUM_TRAIN * COPIES + NUM_VAL
    assert found.keys() == reference.keys()
    for wanted, sample in zip(reference, found, strict=True):
        assert_same(sample, wanted)
    assert_same(found[-1], reference[-1])
    assert_same(found["train003#2"], reference["train003#2"])


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_named(source, finished, tmp_path, name):
    """Verify finds a flipped byte in the middle of a shard and names the file."""
    job(source, tmp_path / "out", name).run(progress=False)
    shard = tmp_path / "out" / Manifest.read(tmp_path / "out").shards[0].file
    data = bytearray(shard.read_bytes())
    place = int(Offsets.from_text(shard.with_name(f"{shard.name.partition('.')[0]}.idx").read_text()).offset[9]) + 700
    data[place] ^= 1
    shard.write_bytes(data)

    report = verify(tmp_path / "out")

    assert not report.ok
    assert report.files == (shard.name,)


def test_change_of_format_replaces_the_shards(source, tmp_path):
    """No shard of the old format stays in the output, even where the new one has fewer shards."""
    for shard_format, options in (("tfrecord", ShardOptions(num_shards=2)), ("webdataset", ShardOptions(num_shards=1))):
        Materializer(small_pairs.Pairs(), source, tmp_path / "out", format=shard_format, shards=options).run(
            progress=False
        )

    names = sorted(path.name for path in (tmp_path / "out").glob("pairs*"))

    shards = [f"pairs-{split}-00000-of-00001" for split in ("train", "val")]
    files = [f"{shard}.{ending}" for shard in shards for ending in ("idx", "tar", "tar.idx")]
    assert names == sorted([*files, "pairs-train.json", "pairs-val.json"])


def test_format_with_options_of_its_own(tmp_path):
    """A format object is used as given, and its options decide when shards are rebuilt."""
    for rows, num_written in ((5, 1), (5, 0), (4, 1)):
        report = materialize(square, range(22), tmp_path / "out", format=ParquetFormat(rows), progress=False)

        assert report.num_shards_written == num_written

    assert sorted(sample["square"] for sample in load(tmp_path / "out")) == [number**2 for number in range(22)]


def square(number):
    return {"square": number**2}


def assert_same(sample, wanted):
    assert sample.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(sample[name], value)
