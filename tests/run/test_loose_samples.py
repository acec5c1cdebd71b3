"""What a sample may leave out or write as lists, because its declaration leaves one meaning."""

import pytest

from datamat import BBoxes, Nullable, SampleError, Scalar, load, materialize
from datamat.testing import InlineExecutor


def made(samples, features, output):
    materialize(
        samples.__getitem__,
        range(len(samples)),
        output,
        features=features,
        format="parquet",
        executor=InlineExecutor(),
        progress=False,
    )
    return sorted(load(output), key=lambda sample: sample["key"])


@pytest.mark.parametrize("first", [0, 1])
def test_field_that_may_be_missing_may_be_left_out(tmp_path, first):
    samples = [{"a": 1, "b": 2}, {"a": 1}] * 3

    found = made(samples[first:], {"a": Scalar("int64"), "b": Nullable(Scalar("int64"))}, tmp_path)

    assert [sample["b"] for sample in found] == [2, None, 2, None, 2, None][first:]


def test_boxes_may_be_a_list(tmp_path):
    boxes = [[[0.0, 0.25, 1, 0.5]], [], [(0, 0, 1, 1), (0, 0, 0.5, 0.5)]]

    found = made([{"x": some} for some in boxes], {"x": BBoxes()}, tmp_path / "out")

    assert [sample["x"].tolist() for sample in found] == [[list(box) for box in some] for some in boxes]
    for wrong in ([[0, 0, 1]], [[0, 0, 1, "a"]], [0, 0, 1, 1], [[0, 0, 1, 1], [0, 0]], [[0, 0, 2, 2]]):
        with pytest.raises(SampleError):
            made([{"x": wrong}], {"x": BBoxes()}, tmp_path / "no")
