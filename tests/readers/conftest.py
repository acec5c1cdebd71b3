"""Finished directories for the readers to read: one with every feature type, and some of pairs."""

from __future__ import annotations

import shutil

import pytest
import small_pairs
from every_feature import Everything
from prepared import Prepared

from datamat import ShardOptions
from datamat.testing import InlineExecutor


@pytest.fixture(scope="session")
def tf():
    """TensorFlow: the suite passes without it, and a process imports it once."""
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """A directory with every feature type, in two shards."""
    output = tmp_path_factory.mktemp("everything") / "out"
    options = {"shards": ShardOptions(num_shards=2), "executor": InlineExecutor()}
    Prepared(Everything, None, output, **options).run(progress=False)
    return output


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """Images and masks."""
    return small_pairs.make_pairs(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def make_pairs_output(source):
    """Make directories of image and mask pairs."""

    def make(output, **options):
        options = {
            "copies": {"train": 3},
            "transform": small_pairs.jitter,
            "shards": ShardOptions(num_shards=2),
            "executor": InlineExecutor(),
            **options,
        }
        Prepared(small_pairs.Pairs(), source, output, **options).run(progress=False)
        return output

    return make


@pytest.fixture(scope="session")
def pairs(make_pairs_output, tmp_path_factory):
    """20 rows in three copies in `train`, 4 rows in `val`; two shards each. Read only."""
    return make_pairs_output(tmp_path_factory.mktemp("pairs") / "out")


@pytest.fixture(scope="session")
def formats(make_pairs_output, tmp_path_factory):
    """The same pairs in every format that needs no further package. Read only."""
    return make_pairs_output(
        tmp_path_factory.mktemp("formats") / "out", format=["tfrecord", "tfrecord.gz", "parquet", "webdataset"]
    )


@pytest.fixture
def copied(pairs, tmp_path):
    """A copy of `pairs` that a test may damage."""
    return shutil.copytree(pairs, tmp_path / "out")
