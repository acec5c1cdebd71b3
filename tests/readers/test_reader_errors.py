"""What cannot be read: caches, offsets and indexes that are not there, and fields that do not fit the call."""

from __future__ import annotations

import dataclasses
import os
import shutil

import numpy as np
import pytest
from pyarrow.compute import field
from small_rows import job
from web import serving

import datamat
from datamat import Manifest, Scalar, Tensor
from datamat.errors import CorruptDataError, OptionError, OutputError


@pytest.fixture
def output(tmp_path):
    """A finished directory."""
    job(tmp_path / "out").run(progress=False)
    return tmp_path / "out"


def test_index_that_the_manifest_of_a_url_does_not_list(output):
    """Nobody knows its checksum."""
    Manifest.write(dataclasses.replace(Manifest.read(output), index=()), output)
    pytest.importorskip("aiohttp")
    with serving(output) as web:
        data = datamat.load(web.url, cache_dir=output.parent / "cache")

        with pytest.raises(CorruptDataError, match="index"):
            data.keys()


def test_cache_that_cannot_be_used(output, tmp_path):
    """A file is where its folder should be, from the beginning or later."""
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="file/cache"):
        datamat.load(output, cache_dir=tmp_path / "file/cache")[0]

    data = datamat.load(output, cache_dir=tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").touch()
    with pytest.raises(OutputError, match="cache_dir"):
        data[0]


@pytest.mark.parametrize("kind", ["folder", "text"])
def test_offsets_that_are_none(output, kind):
    """A folder has their name, or they are somebody's text."""
    for path in output.glob("*.idx"):
        path.unlink()
        path.mkdir() if kind == "folder" else path.write_text("hello\n")

    with pytest.raises(CorruptDataError, match=r"\.idx: "):
        datamat.load(output)[0]


def test_offsets_that_change_while_they_are_open(output):
    """Whoever reads many records looks many up."""
    data = datamat.load(output)
    data[0]
    for path in output.glob("*.idx"):
        os.truncate(path, 1)

    with pytest.raises(CorruptDataError, match=r"\.idx"):
        data._records.parts[0].reader.records._opened(0)._spans.spans(np.arange(2))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A directory of lists, dicts and complex numbers."""
    folder = tmp_path_factory.mktemp("mixed") / "out"
    features = {
        "x": Tensor((None,), "int64"),
        "d": {"a": Scalar("int64")},
        "c": Scalar("complex64"),
        "n": Scalar("int64"),
    }
    job(folder, features=features, made={"x": np.array([1]), "d": {"a": 1}, "c": 1j, "n": 1}).run(progress=False)
    return datamat.load(folder)


def without_x(sample, rng=None):
    """Return a sample with fewer fields."""
    return {"n": sample["n"]}


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda data: next(iter(data.map(without_x).to_numpy(2, pad={"x": 0}))), "'x'"),
        (lambda data: next(iter(data.to_numpy(2, pack={"x": 8}, transform=without_x))), "'x'"),
        (lambda data: data.to_numpy(bucket={"n": 5}), "'n'"),
        (lambda data: data.map(without_x).filter(field("n") == 1)[0], "'n'"),
        (lambda data: data.filter(field("d") == 1)[0], "d/a"),
        (lambda data: data.filter(field("c") == 1)[0], "'c'"),
    ],
    ids=["pad", "pack", "bucket", "mapped", "dict", "complex"],
)
def test_field_that_cannot_be_used_is_named(mixed, read, named):
    """It is not there, or not of a kind for this."""
    with pytest.raises(OptionError, match=named):
        read(mixed)
