"""Shards of two plans are never visible together, wherever the runs of both were killed."""

import os

import small_pairs

from datamat import ShardOptions, verify
from datamat.directory.manifest import Manifest, by_shard, write_entry


class VisibleShards:
    """Notes, at every event, which shards are visible."""

    def __init__(self, output):
        self.output = output
        self.seen = []

    def __call__(self, event):
        self.seen.append({path.name for path in self.output.glob("*.tfrecord")})


def leave_unnamed(finished, entries):
    """Leave the shards of a finished directory as a kill does that comes before they get their names."""
    for files in by_shard(Manifest.read(finished).all_files).values():
        for name in [name for info in files for name in (info.file, info.index_file)]:
            os.link(finished / name, entries / f"{name}.growing")
        write_entry(entries, files, lambda file: entries / f"{file}.growing")


def test_shard_that_a_kill_left_unnamed_waits_for_shards_of_another_plan_to_go(source, tmp_path):
    """Its entry is there and its files are complete, but a run of another plan has since finished its own."""
    output, one = tmp_path / "out", ShardOptions(num_shards=1)
    small_pairs.job(source, tmp_path / "other", shards=one).run(progress=False)
    small_pairs.job(source, output, shards=ShardOptions(num_shards=2)).run(progress=False)
    theirs = {path.name for path in output.glob("*.tfrecord")}
    entries = output / ".datamat" / "shards"
    entries.mkdir()
    for files in by_shard(Manifest.read(output).all_files).values():
        write_entry(entries, files, lambda file: output / file)
    (output / "manifest.json").unlink()
    leave_unnamed(tmp_path / "other", entries)
    looks = VisibleShards(output)

    report = small_pairs.job(source, output, shards=one, hooks=[looks]).run(progress=False)

    mine = {path.name for path in output.glob("*.tfrecord")}
    assert report.is_complete and report.num_parts_written == 0
    assert all(seen in (theirs, mine, set()) for seen in looks.seen)
    assert small_pairs.digests(output) == small_pairs.digests(tmp_path / "other")
    assert verify(output).ok


def test_shard_that_a_kill_left_unnamed_is_not_announced_as_lost(source, tmp_path, caplog):
    """Nobody says that it will be made again: the next run gives it its names."""
    small_pairs.job(source, tmp_path / "other").run(progress=False)
    entries = tmp_path / "out" / ".datamat" / "shards"
    entries.mkdir(parents=True)
    leave_unnamed(tmp_path / "other", entries)
    job = small_pairs.job(source, tmp_path / "out")
    assert job.status().changes == ()

    report = job.run(progress=False)

    assert report.is_complete and report.num_parts_written == 0
    assert [record.getMessage() for record in caplog.records if "made again" in record.getMessage()] == []
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "other")
