"""What every reader gives for values that are no plain arrays: bytes, JSON, times, and bfloat16."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from datamat import Bytes, Json, Scalar, Tensor, Timestamp, Tokens, load, materialize

NOON = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
MICROSECONDS = int(NOON.timestamp()) * 1_000_000
FEATURES = {"blob": Bytes(), "info": Json(), "taken": Timestamp(tz="UTC"), "n": Tensor((2,), "int64")}


def sample(number):
    """Return a sample, the first of which has JSON that a batch could take for numbers."""
    info = number if number < 2 else {"b": [number, None], "a": {"text": "größe"}}
    taken = NOON + datetime.timedelta(microseconds=number)
    return {"blob": b"\xff\0" * number, "info": info, "taken": taken, "n": np.full(2, number)}


@pytest.fixture(scope="module", params=["tfrecord", "parquet", "webdataset"])
def dataset(request, tmp_path_factory):
    """Give twenty samples in order, in a format: enough to be read in blocks."""
    output = tmp_path_factory.mktemp("types") / "out"
    materialize(sample, range(20), output, features=FEATURES, format=request.param, progress=False)
    return load(output)


def check(batch):
    """Hold the rows to what was written; shards hold them in an order of their own."""
    rows = [int(row[0]) for row in batch["n"]]
    assert len(rows) == 4
    assert batch["blob"] == [b"\xff\0" * number for number in rows]
    assert batch["info"] == [sample(number)["info"] for number in rows]
    assert np.asarray(batch["taken"]).view(np.int64).tolist() == [MICROSECONDS + number for number in rows]


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
    """Return the sample: a transform that a worker process calls."""
    return sample


def test_batches_of_torch_hold_int64_for_times(dataset):
    """Torch has no times."""
    torch = pytest.importorskip("torch")

    first = next(iter(dataset.to_torch(batch_size=4)))

    check(first)
    assert first["taken"].dtype == torch.int64


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("transform", [None, lambda sample, rng: sample, lambda sample: sample])
def test_tf_data_holds_strings_and_int64(dataset, batch_size, transform):
    """JSON as its text; a transform that Python calls gets the values that `load` gives."""
    pytest.importorskip("tensorflow")

    found = list(dataset.to_tf(batch_size=batch_size, transform=transform).as_numpy_iterator())

    rows = [(row["n"], row["blob"], row["info"], row["taken"]) for row in found]
    if batch_size:
        rows = [row for batch in rows for row in zip(*batch, strict=True)]
    rows = sorted((int(n[0]), blob, info, int(taken)) for n, blob, info, taken in rows)
    assert [row[1] for row in rows] == [b"\xff\0" * number for number in range(20)]
    assert [row[2] for row in rows][1:3] == [b"1", '{"a":{"text":"größe"},"b":[2,null]}'.encode()]
    assert [row[3] for row in rows] == [MICROSECONDS + number for number in range(20)]


def test_python_transforms_of_tf_data_see_the_values(dataset):
    """They may look into JSON and count with times, and put arrays in their places."""
    pytest.importorskip("tensorflow")

    def measured(sample, rng):
        assert sample["taken"].dtype == "datetime64[us]"
        assert type(sample["blob"]) is bytes
        info = sample["info"] if isinstance(sample["info"], int) else sample["info"]["b"][0]
        return {"key": sample["key"], "info": np.int64(info), "taken": sample["taken"] + np.timedelta64(1, "s")}

    found = list(dataset.to_tf(transform=measured).as_numpy_iterator())

    rows = sorted((int(row["info"]), int(row["taken"])) for row in found)
    assert rows == [(number, MICROSECONDS + 1_000_000 + number) for number in range(20)]


@pytest.mark.parametrize("name", ["tfrecord", "parquet", "webdataset"])
def test_tokens_are_ragged_in_batches(tmp_path, name):
    """Each with the number that it has and the dtype that is declared."""
    features = {"n": Scalar("int64"), "x": Tokens(vocab_size=50_257)}
    wanted = {number: np.arange(50_000, 50_000 + number, dtype=np.uint16) for number in range(20)}

    materialize(
        lambda number: {"n": number, "x": wanted[number].tolist()},
        range(20),
        tmp_path / "out",
        features=features,
        format=name,
        progress=False,
    )

    dataset = load(tmp_path / "out")
    for batch in (*dataset.to_numpy(batch_size=4), next(iter(dataset.to_numpy(batch_size=20, num_workers=1)))):
        for number, ids in zip(batch["n"].tolist(), batch["x"], strict=True):
            assert ids.dtype == np.uint16
            assert np.array_equal(ids, wanted[number])


@pytest.mark.parametrize("batch_size", [None, 4])
def test_tokens_are_ragged_in_torch_and_tf_data(tmp_path, batch_size):
    """As tensors of the declared dtype."""
    pytest.importorskip("tensorflow")
    features = {"n": Scalar("int64"), "x": Tokens(vocab_size=50_257)}
    wanted = {number: list(range(50_000, 50_000 + number)) for number in range(8)}
    materialize(
        lambda number: {"n": number, "x": wanted[number]}, range(8), tmp_path / "out", features=features, progress=False
    )
    dataset = load(tmp_path / "out")

    found = list(dataset.to_tf(batch_size=batch_size))
    rows = [(row["n"], row["x"]) for row in found]
    rows = [pair for n, x in rows for pair in zip(n, x, strict=True)] if batch_size else rows

    assert {int(n): x.numpy().tolist() for n, x in rows} == wanted
    assert {x.dtype.name for _, x in rows} == {"uint16"}
    torch = pytest.importorskip("torch")
    for batch in dataset.to_torch(batch_size=4):
        assert {int(n): x.tolist() for n, x in zip(batch["n"], batch["x"], strict=True)}.items() <= wanted.items()
        assert all(x.dtype == torch.uint16 for x in batch["x"])


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_bfloat16_is_that_in_torch(tmp_path, num_workers):
    """Batches are stacked, through shared memory, too, and keep their dtype."""
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    features = {"x": Tensor((40_000,), "bfloat16")}
    value = np.linspace(-1, 1, 40_000).astype(ml_dtypes.bfloat16)
    materialize(lambda number: {"x": value}, range(4), tmp_path / "out", features=features, progress=False)

    transform = kept if num_workers else None
    batch = next(iter(load(tmp_path / "out").to_torch(batch_size=2, num_workers=num_workers, transform=transform)))

    assert batch["x"].dtype == torch.bfloat16
    assert torch.equal(batch["x"].float(), torch.from_numpy(np.stack([value, value]).astype(np.float32)))
