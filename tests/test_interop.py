"""What stands beside the shards for other readers: its bytes, who owns it, and when it is written and taken away."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil

import pytest
import sets

from datamat import (
    Manifest,
    Materializer,
    OutputError,
    OutputLockedError,
    ShardOptions,
    WorkerOptions,
    interop,
    verify,
)
from datamat.cli import main
from datamat.interop import export

TABLES = {
    "tfrecord": {"dataset_info.json", "features.json", "mask.labels.txt"},
    "tfrecord.gz": set(),
    "parquet": {"index.json"},
    "webdataset": {
        "pairs-train.json",
        "pairs-val.json",
        *(f"pairs-{split}-0000{number}-of-00002.tar.idx" for split in ("train", "val") for number in (0, 1)),
    },
}
DOCUMENTS = {"README.md", "croissant.json"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small set of pairs."""
    return sets.make_pairs(tmp_path_factory.mktemp("source"), 8, 4)


def job(source, output, *, name="tfrecord", num_workers=1, num_shards=2, seed=0):
    """Return a job over the pairs."""
    return Materializer(
        sets.Pairs(),
        source,
        output,
        format=name,
        shards=ShardOptions(num_shards=num_shards),
        workers=WorkerOptions(num_workers=num_workers),
        seed=seed,
    )


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """Give a function that returns the finished directory of a format, made once."""
    outputs = {}

    def made(name):
        if name not in outputs:
            outputs[name] = tmp_path_factory.mktemp("made") / "out"
            job(source, outputs[name], name=name).run(progress=False)
        return outputs[name]

    return made


@pytest.fixture
def output(made, tmp_path):
    """A TFRecord directory to change."""
    return shutil.copytree(made("tfrecord"), tmp_path / "out")


def sidecars(folder):
    """Return name and content of each file beside shards, offsets and manifest."""
    manifest = Manifest.read(folder)
    own = {"manifest.json", *(name for shard in manifest.shards for name in (shard.file, shard.index_file))}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in own}


@pytest.mark.parametrize("name", TABLES)
def test_run_writes_what_the_readers_of_its_format_need(made, name):
    """And no other file; `verify` knows them all."""
    assert set(sidecars(made(name))) == TABLES[name] | DOCUMENTS
    assert verify(made(name)).ok


@pytest.mark.parametrize("name", TABLES)
def test_bytes_do_not_depend_on_the_workers(source, made, tmp_path, name):
    """Three workers instead of one."""
    job(source, tmp_path / "out", name=name, num_workers=3).run(progress=False)

    assert sidecars(tmp_path / "out") == sidecars(made(name))


@pytest.mark.parametrize("name", TABLES)
def test_export_restores_what_was_deleted(made, tmp_path, name):
    """Byte for byte, and without the folder of the run."""
    whole = sets.digests(made(name))
    output = shutil.copytree(made(name), tmp_path / "out", ignore=shutil.ignore_patterns(".datamat"))
    for file in sidecars(output):
        (output / file).unlink()

    report = export(output)

    assert set(report.written) == TABLES[name] | DOCUMENTS and not report.unchanged
    assert sets.digests(output) == whole
    assert export(output).written == () and set(export(output).unchanged) == TABLES[name] | DOCUMENTS
    assert [path.name for path in (output / ".datamat").iterdir()] == ["lock"]


@pytest.mark.parametrize("name", ["tfrecord", "webdataset"])
def test_nothing_in_them_tells_of_machine_or_time(made, name):
    """No path, host or year of this run."""
    content = b"".join(sidecars(made(name)).values())

    for told in (os.fspath(made(name).parent), os.uname().nodename, "2026"):
        assert told.encode() not in content


@pytest.mark.slow
def test_run_that_is_killed_before_the_manifest_is_completed_by_the_next(source, made, tmp_path, monkeypatch):
    """At every file between the first sidecar and the manifest."""
    whole = sets.digests(made("tfrecord"))
    names = [*interop.sidecar_names(Manifest.read(made("tfrecord"))), "manifest.json"]

    for at in sorted(names):
        output = tmp_path / at
        _fail_at(monkeypatch, output / at)
        with pytest.raises(KeyboardInterrupt):
            job(source, output).run(progress=False)
        monkeypatch.undo()
        assert not (output / at).exists() and not (output / "manifest.json").exists()

        job(source, output).run(progress=False)

        assert sets.digests(output) == whole


def _fail_at(monkeypatch, path):
    """Interrupt the process as it gives a file its name."""
    replace = os.replace

    def interrupted(old, new):
        if pathlib.Path(new) == path:
            raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", interrupted)


def test_files_of_a_run_that_was_killed_do_not_outlive_other_options(source, output, monkeypatch):
    """Killed between its sidecars and its manifest, a run in another format leaves files that the next one removes."""
    _fail_at(monkeypatch, output / "manifest.json")
    with pytest.raises(KeyboardInterrupt):
        job(source, output, name="webdataset").run(progress=False)
    monkeypatch.undo()
    assert (output / "pairs-train.json").exists()

    job(source, output, name="parquet").run(progress=False)

    assert set(sidecars(output)) == TABLES["parquet"] | DOCUMENTS
    assert b"parquet" in (output / "README.md").read_bytes()
    assert verify(output).ok


@pytest.mark.parametrize("name", ["parquet", "webdataset", "tfrecord.gz"])
def test_other_options_replace_them(source, made, output, name):
    """What readers of the earlier format needed is gone, and the card tells of the present one."""
    job(source, output, name=name).run(progress=False)

    assert sidecars(output) == sidecars(made(name))


def test_they_are_gone_while_shards_are_replaced(source, output, monkeypatch):
    """A reader finds no counts of shards that are no more."""
    _fail_at(monkeypatch, output / "pairs-val-00000-of-00001.tfrecord")

    with pytest.raises(KeyboardInterrupt):
        job(source, output, num_shards=1).run(progress=False)

    assert [path.name for path in output.iterdir() if path.suffix in {".json", ".md", ".txt"}] == []


def test_run_with_nothing_to_do_writes_what_is_missing(source, made, output):
    """And touches no other file."""
    (output / "features.json").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in output.iterdir() if path.is_file()}

    job(source, output).run(progress=False)

    assert sets.digests(output) == sets.digests(made("tfrecord"))
    assert {name: (output / name).stat().st_mtime_ns for name in before} == before


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_document_of_the_user_is_left_alone(source, made, tmp_path, name):
    """By the first run, by later ones, by an export; the others are written all the same."""
    output = tmp_path / "out"
    output.mkdir()
    (output / name).write_text("mine")

    job(source, output).run(progress=False)
    job(source, output, num_shards=1).run(progress=False)
    report = export(output)

    assert (output / name).read_text() == "mine"
    assert report.kept == (name,) and f"{name}: left alone" in str(report)
    assert set(sidecars(output)) == TABLES["tfrecord"] | DOCUMENTS
    assert verify(output).ok


def test_document_that_the_user_changed_is_left_alone(source, output):
    """A license that was added survives another run, and its going away brings ours back."""
    card = output / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nlicense: mit\n", 1))

    job(source, output, num_shards=1).run(progress=False)

    assert "license: mit" in card.read_text()
    card.unlink()
    assert export(output).written == ("README.md",)
    assert "license" not in card.read_text()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_disk_that_fails_is_not_taken_for_a_document_of_the_user(source, made, tmp_path, monkeypatch, number):
    """The run would end well without its own; it is an error, and the next run writes it."""
    output = tmp_path / "out"
    open_file = os.open

    def failing(path, *args, **options):
        if path == output / "README.md":
            raise OSError(number, os.strerror(number), os.fspath(path))
        return open_file(path, *args, **options)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(OutputError, match=r"README\.md"):
        job(source, output).run(progress=False)
    monkeypatch.undo()
    job(source, output).run(progress=False)

    assert sets.digests(output) == sets.digests(made("tfrecord"))


def test_damage_of_what_programs_read_is_named_and_mended(made, output, capsys):
    """By `verify`, `datamat export` and `datamat repair`."""
    (output / "mask.labels.txt").write_text("road\nsky\n")

    assert verify(output).files == ("mask.labels.txt",)
    assert main(["export", str(output)]) == 0
    assert "mask.labels.txt: written" in capsys.readouterr().out
    assert sets.digests(output) == sets.digests(made("tfrecord"))

    (output / "features.json").write_text("{}")
    assert main(["repair", str(output)]) == 0
    assert sets.digests(output) == sets.digests(made("tfrecord"))


def test_damaged_index_of_members_is_named_and_mended(made, tmp_path):
    """It is compared with the shard."""
    output = shutil.copytree(made("webdataset"), tmp_path / "out")
    index = output / "pairs-train-00000-of-00002.tar.idx"
    whole = index.read_bytes()
    index.write_bytes(whole.replace(b"512", b"513", 1))

    assert verify(output).files == (index.name,)
    assert export(output).written == (index.name,)
    assert index.read_bytes() == whole


def test_repair_in_python_mends_them(source, made, output):
    """What is no longer as it was stands in quarantine."""
    (output / "dataset_info.json").write_text("{}")

    job(source, output).repair(progress=False)

    assert sets.digests(output) == sets.digests(made("tfrecord"))


def test_repair_of_a_shard_leaves_them_alone(source, output):
    """They are right once it is back, and are not even touched."""
    before = {name: (output / name).stat().st_mtime_ns for name in sidecars(output)}
    (output / "pairs-train-00000-of-00002.tfrecord").write_bytes(b"")

    job(source, output).repair(progress=False)

    assert {name: (output / name).stat().st_mtime_ns for name in sidecars(output)} == before


def test_unfinished_directory_is_not_exported(output, capsys):
    """There is no manifest to go by."""
    (output / "manifest.json").unlink()

    with pytest.raises(OutputError, match=r"holds no manifest\.json"):
        export(output)
    assert main(["export", str(output)]) == 2
    assert "holds no manifest.json" in capsys.readouterr().err


def test_directory_that_is_being_written_is_not_exported(output):
    """Two writers would be at work."""
    from datamat.storage import locked

    with locked(output / ".datamat/lock"), pytest.raises(OutputLockedError):
        export(output)


def test_link_is_replaced_and_not_written_through(output, tmp_path):
    """What it leads to stays as it is."""
    (tmp_path / "victim").write_text("mine")
    (output / "features.json").unlink()
    (output / "features.json").symlink_to(tmp_path / "victim")

    export(output)

    assert (tmp_path / "victim").read_text() == "mine"
    assert not (output / "features.json").is_symlink()


def test_tfds_is_told_counts_names_and_types(made):
    """Counts of each shard in order, and the fields as they are stored."""
    info = json.loads((made("tfrecord") / "dataset_info.json").read_text())
    features = json.loads((made("tfrecord") / "features.json").read_text())["content"]["features"]

    counts = {split["name"]: [int(count) for count in split["shardLengths"]] for split in info["splits"]}
    assert counts == {
        split: [shard.num_records for shard in shards]
        for split, shards in Manifest.read(made("tfrecord")).splits.items()
    }
    assert (info["name"], info["fileFormat"]) == ("pairs", "tfrecord")
    assert features["image"]["image"]["shape"]["dimensions"] == ["24", "32", "3"]
    assert features["mask"]["image"]["label"] == {"numClasses": "4"}
    assert (made("tfrecord") / "mask.labels.txt").read_text().splitlines() == list(sets.NAMES)
