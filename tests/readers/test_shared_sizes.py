"""Sizes that no feature declares, and that all records share, are those of batches, in each client."""

from __future__ import annotations

import numpy as np
import pytest

from datamat import BBoxes, ClassLabel, Features, ListOf, Scalar, Tensor, Tokens, load, materialize
from datamat.testing import InlineExecutor

NUM_ROWS = 6


def shapes(number):
    return (2, 3) if number < 4 else (3, 3)


ROWS = {
    "inferred array": (lambda number: np.full(8, number), None, (8,)),
    "inferred list": (lambda number: [0.5] * 4, None, (4,)),
    "inferred matrix": (lambda number: np.full((2, 3), number), None, (2, 3)),
    "list": (lambda number: [number] * 3, ListOf(Scalar("int32")), (3,)),
    "list of arrays": (lambda number: np.ones((2, 3), np.float32), ListOf(Tensor((3,), "float32")), (2, 3)),
    "labels": (lambda number: [0, 1], ClassLabel(names=("a", "b"), shape=(None,)), (2,)),
    "tokens": (lambda number: np.arange(5), Tokens(vocab_size=10), (5,)),
    "raw": (lambda number: np.ones((4, 2), np.float16), Tensor((None, 2), "float16", "raw"), (4, 2)),
    "one axis": (lambda number: np.ones((number % 2 + 1, 3)), Tensor((None, None), "float64"), None),
    "lengths": (lambda number: np.ones(number % 2 + 1), None, None),
    "two shards": (lambda number: np.ones(shapes(number)), None, None),
    "none": (lambda number: np.zeros(0), None, None),
    "boxes": (lambda number: np.array([[0, 0, 1, 1]], np.float32), BBoxes(), None),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    output = tmp_path_factory.mktemp("shared") / "out"
    declared = {name: feature for name, (_, feature, _) in ROWS.items() if feature is not None}
    inferred = Features.infer({name: value(0) for name, (value, _, _) in ROWS.items() if name not in declared})
    materialize(
        lambda number: {name: value(number) for name, (value, _, _) in ROWS.items()},
        range(NUM_ROWS),
        output,
        features={**inferred, **declared},
        shards=2,
        executor=InlineExecutor(),
        progress=False,
    )
    return load(output)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("client", ["to_numpy", "to_torch", "to_tf"])
def test_sizes_that_all_records_share_are_stacked(data, client, name):
    pytest.importorskip({"to_numpy": "numpy", "to_torch": "torch", "to_tf": "tensorflow"}[client])
    read = getattr(data.columns(name), client)

    batches = list(read(NUM_ROWS // 2))

    _, _, shape = ROWS[name]
    for batch in batches:
        column = batch[name]
        is_list = isinstance(column, list) or hasattr(column, "row_splits")
        assert is_list == (shape is None)
        if shape is not None:
            assert tuple(column.shape) == (NUM_ROWS // 2, *shape)
    stored = {sample["key"]: sample[name] for sample in data}
    for batch in batches:
        for key, value in zip(batch["key"], batch[name], strict=True):
            key = key if isinstance(key, str) else key.numpy().decode()
            value = value.to_tensor() if hasattr(value, "to_tensor") else value
            assert np.array_equal(np.asarray(value), stored[key])


@pytest.mark.parametrize("name", ["boxes", "labels", "tokens"])
def test_functions_may_drop_boxes_and_their_labels(data, name):
    """Where all records have one box, the batches of a transform that drops some are lists all the same."""
    chosen = data.columns("boxes", "labels", "tokens")

    (batch,) = chosen.map(lambda sample: sample).to_numpy(NUM_ROWS)

    assert isinstance(batch[name], list)
