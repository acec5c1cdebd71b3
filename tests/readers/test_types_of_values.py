"""What every reader gives for values that are no plain arrays: bytes, JSON, times, and bfloat16."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from datamat import Bytes, Json, Tensor, Timestamp, Tokens, load, materialize
from datamat.testing import InlineExecutor

NOON = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
MICROSECONDS = int(NOON.timestamp()) * 1_000_000
FEATURES = {
    "blob": Bytes(),
    "info": Json(),
    "taken": Timestamp(tz="UTC"),
    "n": Tensor((2,), "int64"),
    "x": Tokens(vocab_size=50_257),
}


def sample(number):
    """Return a sample, the first of which has JSON that a batch could take for numbers."""
    info = number if number < 2 else {"b": [number, None], "a": {"text": "größe"}}
    taken = NOON + datetime.timedelta(microseconds=number)
    tokens = [*range(50_000, 50_000 + number)]
    return {"blob": b"\xff\0" * number, "info": info, "taken": taken, "n": np.full(2, number), "x": tokens}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Twenty samples in three formats: enough to be read in blocks."""
    output = tmp_path_factory.mktemp("types") / "out"
    options = {"format": ["tfrecord", "parquet", "webdataset"], "executor": InlineExecutor(), "progress": False}
    materialize(sample, range(20), output, features=FEATURES, **options)
    return output


@pytest.fixture(params=["tfrecord", "parquet", "webdataset"])
def dataset(request, output):
    return load(output, format=request.param)


def check(batch):
    """Hold the rows to what was written; shards hold them in an order of their own."""
    rows = [int(row[0]) for row in batch["n"]]
    assert len(rows) == 4
    assert batch["blob"] == [b"\xff\0" * number for number in rows]
    assert batch["info"] == [sample(number)["info"] for number in rows]
    assert np.asarray(batch["taken"]).view(np.int64).tolist() == [MICROSECONDS + number for number in rows]
    assert [ids.tolist() for ids in batch["x"]] == [sample(number)["x"] for number in rows]
    assert {np.asarray(ids).dtype for ids in batch["x"]} == {np.dtype("uint16")}


def test_batches_of_numpy_hold_lists_and_times(dataset):
    """Bytes and JSON as lists, whatever the JSON is; times as datetime64."""
    first = next(iter(dataset.to_numpy(batch_size=4)))

    check(first)
    assert first["taken"].dtype == "datetime64[us]"
    assert dataset[3]["taken"] == np.datetime64(MICROSECONDS + int(dataset[3]["n"][0]), "us")


def test_batches_of_processes_are_the_same(dataset):
    """The values travel unchanged."""
    batches = list(dataset.to_numpy(batch_size=4, num_workers=1, transform=kept))

    for batch in batches:
        check(batch)
    assert batches[0]["taken"].dtype == "datetime64[us]"


def kept(sample):
    """Return the sample, in a worker process."""
    return sample


def test_batches_of_torch_hold_int64_for_times(dataset):
    """Torch has no times."""
    torch = pytest.importorskip("torch")

    first = next(iter(dataset.to_torch(batch_size=4)))

    check(first)
    assert first["taken"].dtype == torch.int64


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_bfloat16_is_that_in_torch(tmp_path, num_workers):
    """Batches are stacked, through shared memory, too, and keep their dtype."""
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    features = {"x": Tensor((40_000,), "bfloat16")}
    value = np.linspace(-1, 1, 40_000).astype(ml_dtypes.bfloat16)
    options = {"features": features, "executor": InlineExecutor(), "progress": False}
    materialize(lambda number: {"x": value}, range(4), tmp_path / "out", **options)

    transform = kept if num_workers else None
    batch = next(iter(load(tmp_path / "out").to_torch(batch_size=2, num_workers=num_workers, transform=transform)))

    assert batch["x"].dtype == torch.bfloat16
    assert torch.equal(batch["x"].float(), torch.from_numpy(np.stack([value, value]).astype(np.float32)))
