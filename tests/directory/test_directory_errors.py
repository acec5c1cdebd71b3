"""Outputs, manifests and ledgers that cannot be used, or that somebody has replaced."""

import gzip
import os
import shutil

import pytest
from small_rows import job, shard_of

import datamat
from datamat import IndexRow, Manifest, Scalar, load, materialize
from datamat.directory import index_files
from datamat.directory.files import check_lock, locked
from datamat.directory.ledger import read_ledger
from datamat.errors import CorruptDataError, OptionError, OutputError
from datamat.testing import InlineExecutor


@pytest.fixture
def output(tmp_path):
    """A finished directory."""
    job(tmp_path / "out").run(progress=False)
    return tmp_path / "out"


def test_work_folder_that_is_a_link_is_refused(tmp_path):
    """What is written there would land elsewhere."""
    for name in ("out", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "out/.datamat").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OutputError, match="is a link"):
        job(tmp_path / "out").run(progress=False)

    assert not list((tmp_path / "elsewhere").iterdir())


def test_shard_that_is_a_pipe_is_not_waited_for(output):
    """Reading it would never end."""
    path = shard_of(output)
    path.unlink()
    os.mkfifo(path)

    with pytest.raises(CorruptDataError, match=path.name):
        load(output)[0]


def test_output_that_vanishes_during_a_run(tmp_path):
    """Someone else removes it: while a row is read, and between two parts."""

    def remove(item):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return {"x": item}

    with pytest.raises(OutputError, match="run again"):
        materialize(
            remove,
            range(3),
            tmp_path / "out",
            features={"x": Scalar("int64")},
            executor=InlineExecutor(),
            progress=False,
        )
    (tmp_path / "out/.datamat").mkdir(parents=True)
    with locked(tmp_path / "out/.datamat/lock"):
        shutil.rmtree(tmp_path / "out")
        with pytest.raises(OutputError, match="was removed"):
            check_lock(tmp_path / "out/manifest.json")


def test_ledger_that_is_no_file(tmp_path):
    """Neither is a pipe read, nor a folder written."""
    os.mkfifo(tmp_path / "ledger.jsonl")
    (tmp_path / "out/.datamat/ledger.jsonl").mkdir(parents=True)

    with pytest.raises(CorruptDataError, match=r"ledger\.jsonl"):
        list(read_ledger(tmp_path / "ledger.jsonl"))
    with pytest.raises(OutputError, match=r"ledger\.jsonl"):
        job(tmp_path / "out").run(progress=False)


def test_what_is_no_directory_of_datamat(tmp_path):
    """A name that the disk refuses, a single shard, a scheme that fsspec does not know."""
    (tmp_path / "one.tfrecord").touch()

    with pytest.raises(OutputError):
        Manifest.read("x" * 300)
    with pytest.raises(OutputError, match=r"one\.tfrecord"):
        load(tmp_path / "one.tfrecord")
    with pytest.raises(OptionError, match="nowhere://x"):
        load("nowhere://x/y", cache_dir=tmp_path)


def test_copy_that_a_row_does_not_have(tmp_path):
    """Copies count from 0."""
    made = job(tmp_path / "out", copies=2, transform=lambda sample, rng: sample)
    made.run(progress=False)

    with pytest.raises(OptionError, match="r1#7"):
        made.provenance("r1#7")


@pytest.mark.parametrize(("text", "budget"), [("", 20), ("long " * 200, 50_000)], ids=["says", "unfolds"])
def test_index_file_that_would_fill_the_memory(tmp_path, monkeypatch, text, budget):
    """By what it says of itself, or by one long text that every row has."""
    rows = [IndexRow(f"r{number}", "train", {"text": text}) for number in range(100)]
    job(tmp_path / "out", rows=rows).run(progress=False)
    monkeypatch.setattr(index_files, "_LEAST_BUDGET", budget)
    monkeypatch.setattr(index_files, "_MOST_BYTES_PER_ROW", 1)

    with pytest.raises(CorruptDataError, match="memory"):
        index_files.read_index(tmp_path / "out", "_index/train.index")


def test_damage_inside_a_compression_is_placed_in_what_it_inflates_to(output):
    """A place in the compressed file would help nobody."""
    damaged = bytearray(shard_of(output).read_bytes())
    damaged[20] ^= 1
    (output / "a.tfrecord.gz").write_bytes(gzip.compress(bytes(damaged)))

    assert "at byte 0 once inflated" in str(datamat.describe(output / "a.tfrecord.gz"))
