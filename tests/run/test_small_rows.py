"""Small rows are read one at a time and encoded together: bytes, errors and draws are those of each row alone."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
from prepared import Prepared

from datamat import (
    ClassLabel,
    DatasetWriter,
    ErrorPolicy,
    Features,
    IndexRow,
    SampleError,
    Scalar,
    ShardOptions,
    Tensor,
    Text,
    load,
)
from datamat.plan.pipeline import Pipeline
from datamat.testing import InlineExecutor
from datamat.transforms import seeding

NUM_ROWS = 700
OPTIONS = {"shards": ShardOptions(num_shards=1), "executor": InlineExecutor()}


class Rows(DatasetWriter):
    name = "rows"
    features = Features(
        {
            "x": Tensor((3,)),
            "label": ClassLabel(names=("a", "b")),
            "share": Scalar("float64"),
            "words": Tensor((None,), "int32"),
            "text": Text(),
        }
    )
    file_fields = ()

    def index(self, source):
        return [IndexRow(f"{number:04d}", "train", {"number": number}) for number in range(NUM_ROWS)]

    def read(self, row):
        number = row.fields["number"]
        return {
            "x": np.full(3, number, np.float32),
            "label": "ab"[number % 2] if number % 3 else number % 2,
            "share": number / 7,
            "words": np.arange(number % 5 if number % 50 else 30_000, dtype=np.int32),
            "text": "ß" * (number % 9),
        }


def shards(folder):
    return {path.name: path.read_bytes() for path in folder.glob("rows-*")}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["tfrecord", "webdataset", "parquet"])
def test_rows_encoded_together_are_those_encoded_alone(tmp_path, monkeypatch, name):
    encoded = []

    def encode_samples(self, samples, *, original=Pipeline.encode_samples):
        encoded.append(len(samples))
        return original(self, samples)

    monkeypatch.setattr(Pipeline, "encode_samples", encode_samples)
    Prepared(Rows(), None, tmp_path / "together", format=name, **OPTIONS).run(progress=False)
    assert sum(encoded) > NUM_ROWS * 0.9
    monkeypatch.setattr(Pipeline, "gathers_samples", False)
    Prepared(Rows(), None, tmp_path / "alone", format=name, **OPTIONS).run(progress=False)

    assert shards(tmp_path / "together") == shards(tmp_path / "alone")


class Reused(Rows):
    """Gives the same arrays and lists for each row, filled again."""

    features = Features({"x": Tensor((3,)), "labels": ClassLabel(num_classes=NUM_ROWS, shape=(None,))})
    held = np.zeros(3, np.float32)
    listed: ClassVar[list[int]] = []

    def read(self, row):
        self.held[:] = row.fields["number"]
        self.listed[:] = [row.fields["number"]]
        return {"x": self.held, "labels": self.listed}


def test_read_may_use_its_arrays_again(tmp_path):
    Prepared(Reused(), None, tmp_path, **OPTIONS).run(progress=False)

    found = {sample["key"]: (sample["x"].tolist(), sample["labels"].tolist()) for sample in load(tmp_path)}
    assert found == {f"{number:04d}": ([number] * 3, [number]) for number in range(NUM_ROWS)}


class Spoilt(Rows):
    """Rows 10 and 300 raise, row 20 has the wrong shape, and row 30 ends the program."""

    def read(self, row):
        number = row.fields["number"]
        if number in {10, 300}:
            raise ValueError(f"{number} is missing")
        if number == 30:
            raise SystemExit(1)
        return {**super().read(row), **({"x": np.zeros(4, np.float32)} if number == 20 else {})}


def test_rows_that_fail_are_named_and_leave_the_others(tmp_path):
    Prepared(Spoilt(), None, tmp_path / "out", errors="skip", **OPTIONS).run(progress=False)

    assert len(load(tmp_path / "out")) == NUM_ROWS - 4
    assert not {"0010", "0020", "0030", "0300"} & set(load(tmp_path / "out").keys())
    with pytest.raises(SampleError, match=r"sample '00[123]0'|sample '0300'"):
        Prepared(Spoilt(), None, tmp_path / "raised", **OPTIONS).run(progress=False)


class Flaky(Rows):
    """Row 40 can be read only at the third attempt."""

    attempts = 0

    def read(self, row):
        if row.fields["number"] == 40:
            self.attempts += 1
            if self.attempts % 3:
                raise OSError("the disk did not answer")
        return super().read(row)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("retries", "is_there"), [(1, False), (2, True)])
def test_attempts_are_counted_from_the_first_read(tmp_path, retries, is_there):
    Prepared(Flaky(), None, tmp_path, errors=ErrorPolicy("skip", retries=retries), **OPTIONS).run(progress=False)

    assert ("0040" in {sample["key"] for sample in load(tmp_path)}) is is_there


class Drawing(Rows):
    """Every ninetieth row draws from the global generators."""

    features = Features({"n": Scalar("float64"), "m": Scalar("float64")})

    def read(self, row):
        if row.fields["number"] % 90 != 89:
            return {"n": 0.0, "m": 0.0}
        return {"n": float(np.random.random()), "m": random.random()}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_rows_that_draw_now_and_then_get_their_own_numbers(tmp_path, num_shards):
    """They come from the full seed, however many rows without draws preceded."""
    options = {**OPTIONS, "shards": ShardOptions(num_shards=num_shards), "seed": 5}
    Prepared(Drawing(), None, tmp_path, **options).run(progress=False)

    found = {sample["key"]: (sample["n"], sample["m"]) for sample in load(tmp_path)}
    for number in range(89, NUM_ROWS, 90):
        with seeding.global_state_kept():
            seeding.seed_row(5, f"{number:04d}")
            assert found[f"{number:04d}"] == (np.random.random(), random.random())


@pytest.mark.parametrize(
    "draw", [lambda: np.random.random_sample(312), lambda: [random.getrandbits(32) for _ in range(624)], random.random]
)
def test_draws_from_the_global_generators_are_noticed(draw):
    """Also where the position comes round to the same one, after 624 words of 32 bits."""
    draws = seeding.GlobalDraws()
    with seeding.global_state_kept():
        mark = draws.rest(0)
        assert not draws.are_expected
        assert draws.mark() == draws.rest(0) == mark
        draw()
        assert draws.mark() != mark


def test_generators_that_rest_are_the_same_for_every_row():
    """A row that looks at them finds what it would find in any other process."""
    draws = seeding.GlobalDraws()
    with seeding.global_state_kept():
        draws.rest(0)
        state = seeding.GlobalState.take()
        random.random()
        draws.rest(0)
        assert seeding.GlobalState.take() == state
        draws.rest(1)
        assert seeding.GlobalState.take() != state
