"""A small data set with every kind of column, finished in each format; clients are held to its samples."""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", DO_NOT_TRACK="1")  # before a client reads them

import pytest
import streets

from datamat import Materializer, ShardOptions, load


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """Give a function that returns the finished directory of a format, made once."""
    made = {}

    def directory(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name.replace(".", "_")) / "streets"
            Materializer(streets.Streets(), None, made[name], format=name, shards=ShardOptions(num_shards=4)).run(
                progress=False
            )
        return made[name]

    return directory


@pytest.fixture(scope="session")
def samples(directory):
    """The samples of the split `train`, by key, as datamat reads them from TFRecord."""
    return {sample["key"]: sample for sample in load(directory("tfrecord"), "train")}
