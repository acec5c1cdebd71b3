"""Async functions: some calls at once in each worker; order, draws, errors and time limits as of any function."""

import asyncio
import functools
import os
import random

import numpy as np
import pytest

from datamat import (
    ErrorPolicy,
    OptionError,
    SampleError,
    ShardOptions,
    Skip,
    WorkerOptions,
    failures,
    load,
    materialize,
)
from datamat.testing import InlineExecutor

HERE = {"executor": InlineExecutor(), "progress": False, "key": str}


def numbers(output):
    return [int(sample["n"]) for sample in load(output)]


class Meter:
    """An async function that notes how many calls run at once; they end in another order than they begin."""

    def __init__(self, notes=os.devnull):
        self.notes, self.now = notes, 0

    async def __call__(self, n):
        self.now += 1
        with open(self.notes, "a") as file:
            file.write(f"{self.now}\n")
        for _ in range(n * 7 % 5 + 1):
            await asyncio.sleep(0.001)
        self.now -= 1
        return {"n": n}


@pytest.mark.parametrize("concurrency", [1, 4, None, 64])
def test_some_calls_run_at_once_and_samples_keep_their_order(tmp_path, concurrency):
    """How many run at once decides no byte: another number makes nothing anew."""
    notes, output = tmp_path / "notes", tmp_path / "out"
    options = {"shards": ShardOptions(num_shards=1, shuffle=False), "version": 1}

    materialize(Meter(notes), range(100), output, **HERE, **options, concurrency=concurrency)

    assert numbers(output) == list(range(100))
    found = [*map(int, notes.read_text().split())]
    most = concurrency or 16
    assert min(most, 2) <= max(found) <= most  # on a busy machine, some end before as many as may run have begun
    assert len(found) <= 110  # some are called twice, to see that they are determined, and one to see its features
    assert materialize(Meter(notes), range(100), output, **HERE, **options, concurrency=2).did_nothing


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_make_the_shards_that_one_process_makes(tmp_path, method):
    async def wait(n):
        await asyncio.sleep(0.001 * (n % 3))
        return {"n": n, "square": n * n}

    workers = WorkerOptions(num_workers=2, start_method=method)
    materialize(wait, range(60), tmp_path / "two", key=str, progress=False, workers=workers, shards=3)
    materialize(wait, range(60), tmp_path / "one", **HERE, shards=3, concurrency=1)

    contents = [sorted((path.name, path.read_bytes()) for path in (tmp_path / name).glob("*.tfrecord"))
                for name in ("one", "two")]  # fmt: skip
    assert contents[0] == contents[1] and len(contents[0]) == 3


def test_draws_depend_on_seed_and_key_alone(tmp_path):
    async def draw(n, rng):
        await asyncio.sleep(0)
        return {"n": n, "x": rng.random()}

    def plain(n, rng):
        return {"n": n, "x": rng.random()}

    found = []
    for name, fn, more in (("a", draw, {}), ("b", draw, {"concurrency": 1}), ("c", plain, {})):
        materialize(fn, range(30), tmp_path / name, seed=3, **HERE, **more)
        found.append({sample["key"]: float(sample["x"]) for sample in load(tmp_path / name)})
    assert found[0] == found[1] == found[2] and len(set(found[0].values())) == 30


def test_errors_are_those_of_their_items(tmp_path):
    """Those that fail, are left out, or fail once."""
    tries = {}

    async def fails(n):
        tries[n] = tries.get(n, 0) + 1
        await asyncio.sleep(0)
        if n == 7:
            raise ValueError("seven")
        if n == 9:
            raise Skip("nine")
        if n == 11:
            return None
        if n == 13 and tries[n] == 1:
            raise ConnectionResetError("once")
        if n == 15:
            raise SystemExit(3)
        return [{"n": n}, {"n": n}] if n == 17 else {"n": n}

    errors = ErrorPolicy("skip", retries=2)
    report = materialize(fails, range(20), tmp_path, **HERE, errors=errors, version=1)

    assert sorted(set(numbers(tmp_path))) == sorted(set(range(20)) - {7, 9, 11, 15})
    assert {failure.key for failure in failures(tmp_path)} == {"7", "15"}
    assert report.num_dropped == 2
    with pytest.raises(SampleError, match=r"'(7|15)'.*(seven|called sys.exit)"):
        materialize(fails, range(20), tmp_path / "raise", **HERE, version=1)


async def hangs_or_dies(n):
    if n == 5:
        await asyncio.sleep(600)
    if n == 6:
        os._exit(3)
    return {"n": n}


def test_call_that_hangs_or_kills_its_worker_costs_its_item_alone(tmp_path):
    workers = WorkerOptions(num_workers=2, sample_timeout_s=2, max_retries=1)

    materialize(
        hangs_or_dies, range(20), tmp_path, key=str, workers=workers, errors="skip", progress=False, concurrency=4
    )

    assert sorted(numbers(tmp_path)) == sorted(set(range(20)) - {5, 6})
    assert {failure.key for failure in failures(tmp_path)} == {"5", "6"}


def test_function_that_draws_from_what_calls_share_is_refused(tmp_path):
    async def draws(n):
        await asyncio.sleep(0)
        return {"n": n, "x": random.random()}

    with pytest.raises((OptionError, SampleError), match=r"drew from a generator that all calls share.*rng"):
        materialize(draws, range(30), tmp_path, **HERE)


class Asks:
    """A callable with a state, as a client of a server is."""

    def __init__(self, scale):
        self.scale = scale

    async def __call__(self, n):
        await asyncio.sleep(0)
        return {"n": n * self.scale}


@pytest.mark.parametrize("form", ["object", "partial", "method"])
def test_any_kind_of_async_callable(tmp_path, form):
    async def scaled(n, scale):
        return {"n": n * scale}

    fn = {"object": Asks(2), "partial": functools.partial(scaled, scale=2), "method": Asks(2).__call__}[form]

    materialize(fn, range(6), tmp_path, **HERE, shards=ShardOptions(num_shards=1, shuffle=False))

    assert numbers(tmp_path) == [0, 2, 4, 6, 8, 10]


async def generates(n):
    yield {"n": n}


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (lambda n: {"n": n}, {"concurrency": 4}, "needs an async function"),
        (Meter(), {"concurrency": 0}, r"want a number of calls in each worker, from 1 to 64"),
        (Meter(), {"concurrency": 2.5}, "want a number of calls"),
        (Meter(), {"block": lambda items: {"n": np.array(items)}}, "block= cannot be used with an async function"),
        (generates, {}, "let it return a list"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, fn, options, message):
    with pytest.raises(OptionError, match=message):
        materialize(fn, range(3), tmp_path, **HERE, **options)
