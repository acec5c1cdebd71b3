"""Finished directories for the readers to read: one with every feature type, and some of pairs."""

from __future__ import annotations

import pytest
import small_pairs
from every_feature import ONE_WORKER, Everything

from datamat import Materializer, ShardOptions


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """A directory with every feature type, in two shards."""
    output = tmp_path_factory.mktemp("everything") / "out"
    options = {"shards": ShardOptions(num_shards=2), "workers": ONE_WORKER}
    Materializer(Everything, None, output, **options).run(progress=False)
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
            **options,
        }
        Materializer(small_pairs.Pairs(), source, output, workers=ONE_WORKER, **options).run(progress=False)
        return output

    return make


@pytest.fixture(scope="session")
def pairs(make_pairs_output, tmp_path_factory):
    """20 rows in three copies in `train`, 4 rows in `val`; two shards each. Read only."""
    return make_pairs_output(tmp_path_factory.mktemp("pairs") / "out")
