"""What a notebook shows of samples and batches: types and shapes, not pixels."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from datamat import Features, Image, ListOf, Scalar, Text, load, materialize
from datamat.testing import InlineExecutor

FEATURES = Features({"image": Image((40, 50, 3)), "ids": ListOf(Scalar("int64")), "text": Text()})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    made = materialize(
        lambda n: {"image": np.zeros((40, 50, 3), np.uint8), "ids": [n, 2], "text": "long " * 100},
        range(5),
        tmp_path_factory.mktemp("made") / "out",
        features=FEATURES,
        executor=InlineExecutor(),
        progress=False,
    )
    return load(made.output)


@pytest.mark.parametrize(
    "of", [lambda data: data[0], lambda data: next(iter(data)), lambda data: next(iter(data.to_numpy()))]
)
def test_sample_shows_types_and_shapes(dataset, of):
    """It is a dict in every other way."""
    sample = of(dataset)

    assert "'image': <uint8 (40, 50, 3)>" in repr(sample) and len(repr(sample)) < 300
    assert "2]" in repr(sample) and "characters)" in repr(sample)
    assert type({**sample}) is dict and isinstance(sample, dict)
    assert type(pickle.loads(pickle.dumps(sample))) is type(sample)


def test_batch_and_batches_say_what_they_are(dataset):
    """How many records, in how many steps, and which epoch is next."""
    batches = dataset.to_numpy(2)
    before = repr(batches)

    (first, *_) = batches

    assert "'image': <uint8 (2, 40, 50, 3)>" in repr(first)
    assert before == "Batches(5 records, 2 a batch, 3 steps, for numpy, next epoch 0)"
    assert "next epoch 1" in repr(batches)
    assert "one sample at a time" in repr(dataset.to_numpy())
    assert "rank 1 of 2" in repr(dataset.to_numpy(2, rank=1, world_size=2))
