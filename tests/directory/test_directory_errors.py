"""Outputs, manifests and ledgers that cannot be used, or that somebody has replaced."""

import gzip
import os

import pytest
from small_rows import job, shard_of

import datamat
from datamat import Manifest, load
from datamat.directory.ledger import read_ledger
from datamat.errors import CorruptDataError, OptionError, OutputError


@pytest.fixture
def output(tmp_path):
    """A finished directory."""
    job(tmp_path / "out").run(progress=False)
    return tmp_path / "out"


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


def test_damage_inside_a_compression_is_placed_in_what_it_inflates_to(output):
    """A place in the compressed file would help nobody."""
    damaged = bytearray(shard_of(output).read_bytes())
    damaged[20] ^= 1
    (output / "a.tfrecord.gz").write_bytes(gzip.compress(bytes(damaged)))

    assert "at byte 0 once inflated" in str(datamat.describe(output / "a.tfrecord.gz"))
