"""Small rows are read one at a time and encoded together: bytes, errors and draws are those of each row alone."""

from __future__ import annotations

import json
import random
from typing import ClassVar

import numpy as np
import pytest
from features.test_feature_conformance import CASES
from prepared import Prepared

from datamat import (
    ClassLabel,
    DatasetWriter,
    ErrorPolicy,
    Features,
    IndexRow,
    ListOf,
    Nullable,
    SampleError,
    Scalar,
    ShardOptions,
    Skip,
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


def together(monkeypatch):
    """Return a list that receives the number of samples in each block that is encoded."""
    encoded = []

    def encode_columns(self, columns, *, original=Pipeline.encode_columns):
        count = len(columns)
        block = original(self, columns)
        encoded.append(0 if block is None else count)
        return block

    monkeypatch.setattr(Pipeline, "encode_columns", encode_columns)
    return encoded


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["tfrecord", "webdataset", "parquet"])
def test_rows_encoded_together_are_those_encoded_alone(tmp_path, monkeypatch, name):
    encoded = together(monkeypatch)
    Prepared(Rows(), None, tmp_path / "together", format=name, **OPTIONS).run(progress=False)
    assert sum(encoded) > NUM_ROWS * 0.9
    monkeypatch.setattr(Pipeline, "gathers_samples", False)
    Prepared(Rows(), None, tmp_path / "alone", format=name, **OPTIONS).run(progress=False)

    assert shards(tmp_path / "together") == shards(tmp_path / "alone")


class AnyRows(DatasetWriter):
    """Values of every feature, fresh, or in dicts, arrays and lists that the next row fills anew.

    Args:
        seed: decides which.
        share_bad: share of the rows of which something is unusual or wrong.
    """

    name = "rows"
    file_fields = ()
    cases: ClassVar = {name: case for name, case in CASES.items() if case.feature.encodes_many()}
    features = Features(
        {
            **{name: case.feature for name, case in cases.items()},
            "nested": {"a": Scalar("int64"), "b": Nullable(Text())},
            "dicts": ListOf({"box": Tensor((4,)), "name": Text()}),
        }
    )

    def __init__(self, seed, share_bad):
        self.seed, self.share_bad = seed, share_bad
        self.held = {}

    def index(self, source):
        return [IndexRow(f"{number:04d}", "train", {"number": number}) for number in range(300)]

    def read(self, row):
        chance = np.random.default_rng([self.seed, row.fields["number"]])
        sample = self.sample_of(row, chance)
        if chance.random() < 0.5:
            sample = self.filled("sample", sample)
        return self.spoilt(row, sample, chance) if chance.random() < self.share_bad else sample

    def sample_of(self, row, chance):
        number = row.fields["number"]
        sample = {name: case.values[chance.integers(len(case.values))] for name, case in self.cases.items()}
        sample |= {
            "nested": {"a": number, "b": None if number % 3 else "ü"},
            "dicts": [{"box": np.full(4, number, np.float32), "name": str(n)} for n in range(number % 4)],
        }
        return {name: self.guise(name, value, chance) for name, value in sample.items()}

    def guise(self, name, value, chance):
        kind = chance.integers(4)
        if kind == 0:
            return self.filled(name, value)
        if kind == 1 and isinstance(value, np.ndarray):
            return np.stack([value, value], -1)[..., 0]  # not contiguous
        return value

    def filled(self, name, value):
        """Return the object that it returned before, with this value in it."""
        if isinstance(value, np.ndarray):
            held = self.held.setdefault((name, value.dtype.str, value.shape), np.empty_like(value))
            held[...] = value
            return held
        if isinstance(value, list):
            held = self.held.setdefault((name, "list"), [])
            held[:] = value
            return held
        if isinstance(value, dict):
            held = self.held.setdefault((name, "dict"), {})
            held.clear()
            held.update(value)
            return held
        return value

    def spoilt(self, row, sample, chance):
        name = sorted(self.cases)[chance.integers(len(self.cases))]
        wrong = self.cases[name].wrong
        changes = [
            lambda: {**sample, name: wrong[chance.integers(len(wrong))]},
            lambda: {key: value for key, value in sample.items() if key != name},
            lambda: {**sample, "more": 1},
            lambda: {**sample, name: None},
            lambda: {**sample, "bytes": b"x" * 1_100_000},
            lambda: {**sample, "text": "x" * 1_100_000},
            lambda: {**sample, "key": row.key},
            lambda: {**sample, "key": "other"},
            lambda: [sample, Skip("no use"), self.filled("sample", sample)],
            lambda: (self.filled("sample", {**sample, "text": str(n)}) for n in range(3)),
            list,
            lambda: None,
            lambda: Skip("as a value"),
            lambda: 1 / 0,
            lambda: raised(Skip("no use")),
            lambda: raised(SystemExit(2)),
        ]
        return changes[chance.integers(len(changes))]()


def raised(error):
    raise error


@pytest.mark.sample(6)
@pytest.mark.parametrize("share_bad", [0, 0.05])
@pytest.mark.parametrize("seed", range(6))
def test_any_values_encoded_together_are_those_encoded_alone(tmp_path, monkeypatch, seed, share_bad):
    """Bytes, statistics and failures: for values of every feature, and for what may be wrong with a row."""
    found = []
    encoded = together(monkeypatch)
    for gathers in (True, False):
        if not gathers:
            monkeypatch.setattr(Pipeline, "gathers_samples", False)
        folder = tmp_path / str(gathers)
        job = Prepared(AnyRows(seed, share_bad), None, folder, errors="skip", **OPTIONS)
        job.run(progress=False)
        manifest = json.loads((folder / "manifest.json").read_text())
        found.append((shards(folder), manifest["statistics"], of_samples(folder / ".datamat" / "ledger.jsonl")))

    assert found[0] == found[1]
    assert sum(encoded) > (100 if share_bad else 200)


def of_samples(ledger):
    """Return what a ledger says of samples, without times."""
    lines = map(json.loads, ledger.read_text().splitlines())
    return [line | {"time": "", "run": ""} for line in lines if line["event"].startswith("sample")]


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
