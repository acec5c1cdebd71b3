"""Chance in `read` and in the function of `materialize`: drawn from (seed, key) alone, or refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from prepared import Prepared

from datamat import (
    DatasetWriter,
    ErrorPolicy,
    Features,
    IndexRow,
    Materializer,
    OptionError,
    Scalar,
    ShardOptions,
    Tensor,
    WorkerOptions,
    load,
    materialize,
)
from datamat.testing import InlineExecutor
from datamat.transforms.seeding import row_rng, sample_rng, with_rng

each_method = pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.long) for name in ("forkserver", "spawn"))]
)


class Dice(DatasetWriter):
    """Draws from each source of chance that `read` may use."""

    name = "dice"
    features = Features({"r": Scalar("float64"), "n": Scalar("float64"), "g": Scalar("float64")})

    def index(self, source):
        return [IndexRow(f"{number:03d}") for number in range(source)]

    def read(self, row, rng):
        return {"r": random.random(), "n": np.random.rand(), "g": rng.random()}


def _drawn(fn, inputs, output, **options):
    """Return the fields of each record by key."""
    options = {"executor": InlineExecutor(), **options}
    if "workers" in options:
        del options["executor"]
    materialize(fn, inputs, output, progress=False, **options)
    return {sample.pop("key"): sample for sample in map(dict, load(output))}


def _rolled(output, source=60, **options):
    Prepared(Dice(), source, output, executor=InlineExecutor(), **options).run(progress=False)
    return {sample.pop("key"): sample for sample in map(dict, load(output))}


# ---- what is drawn


@each_method
def test_every_item_draws_its_own_numbers_in_any_process(tmp_path, method):
    """400 items draw 400 numbers, as in a plain loop, and the same ones in two workers."""

    def roll(item):
        return {"r": random.random(), "n": np.random.rand(), "normal": random.gauss(0, 1), "i": item}

    found = _drawn(roll, range(400), tmp_path / "here")
    workers = WorkerOptions(num_workers=2, start_method=method)

    assert all(len({sample[name] for sample in found.values()}) == 400 for name in ("r", "n", "normal"))
    assert not {sample["r"] for sample in found.values()} & {sample["n"] for sample in found.values()}
    assert _drawn(roll, range(400), tmp_path / "workers", workers=workers) == found


@each_method
def test_names_imported_from_random_and_numpy_draw_from_seeded_generators(method, tmp_path):
    """`from random import random` binds a method of a generator; in a worker it means that process's generator."""
    uniform, normal, rand, randint = random.random, random.gauss, np.random.rand, np.random.randint

    def roll(item):
        return {"u": uniform(), "g": normal(0, 1), "n": rand(), "i": int(randint(1 << 60))}

    found = _drawn(roll, range(50), tmp_path / "out", workers=WorkerOptions(num_workers=2, start_method=method))

    assert len({tuple(sample.values()) for sample in found.values()}) == 50
    random.seed(3)
    assert found == _drawn(roll, range(50), tmp_path / "other", workers=WorkerOptions(num_workers=1))


def test_pictures_of_a_readme_are_all_different(tmp_path):
    """The first example of popular libraries: pictures made of random numbers."""
    found = _drawn(
        lambda item: {"image": np.random.randint(0, 256, (32, 32, 3), np.uint8), "class": np.random.randint(10)},
        range(200),
        tmp_path / "out",
        workers=WorkerOptions(num_workers=2, start_method="fork"),  # which inherit one state
    )

    assert len({sample["image"].tobytes() for sample in found.values()}) == 200


@pytest.mark.long
def test_many_rows_do_not_share_a_stream_by_accident():
    """A seed of 32 bits would give some of 200,000 keys the same numbers: 4 or 5 pairs, on average."""
    from datamat.transforms.seeding import global_state_kept, seed_row

    found = set()
    with global_state_kept():
        for key in range(200_000):
            seed_row(0, str(key))
            found.add(np.random.bytes(16))

    assert len(found) == 200_000


def test_function_and_read_can_ask_for_the_generator_of_their_row(tmp_path):
    """It is a stream of (seed, key), distinct from those of the copies."""
    rolled = _rolled(tmp_path / "writer", seed=5)
    drawn = _drawn(lambda item, rng: {"g": rng.random()}, range(3), tmp_path / "fn", seed=5)

    assert rolled["007"]["g"] == row_rng(5, "007").random() != sample_rng(5, "007", 0).random()
    assert {key: sample["g"] for key, sample in drawn.items()} == {key: row_rng(5, key).random() for key in drawn}


def test_retried_replayed_and_verified_rows_draw_the_same_again(tmp_path):
    """After a failure, in a debugger, in `verify(sample=...)`, and after a deadline in between."""

    class Fickle(Dice):
        def read(self, row, rng):
            rng.random(), random.random(), np.random.rand()
            if not (marker := tmp_path / row.key).exists():
                marker.touch()
                raise OSError("not yet")
            return super().read(row, row_rng(0, row.key))

    wanted = _rolled(tmp_path / "wanted")
    errors = ErrorPolicy("raise", retries=2)
    job = Prepared(Fickle(), 60, tmp_path / "out", executor=InlineExecutor(), errors=errors)
    job.run(progress=False)

    found = {sample.pop("key"): sample for sample in map(dict, load(tmp_path / "out"))}
    assert [sample["g"] for sample in found.values()] == [wanted[key]["g"] for key in found]
    assert {name: job.replay("011")[name] for name in ("r", "n", "g")} == found["011"]
    assert job.verify(sample=1.0).ok


@pytest.mark.long
def test_retried_rows_draw_what_they_would_have_drawn(tmp_path):
    """The shard equals that of a run in which nothing failed."""

    class Broken(Dice):
        def read(self, row, rng):
            if row.key == "013" and not (tmp_path / "fixed").exists():
                raise ValueError("broken")
            return super().read(row, rng)

    job = Prepared(Broken(), 60, tmp_path / "out", errors="skip", executor=InlineExecutor())
    job.run(progress=False)
    (tmp_path / "fixed").touch()

    job.run(retry_failed=True, progress=False)

    assert {sample.pop("key"): sample for sample in map(dict, load(tmp_path / "out"))} == _rolled(tmp_path / "wanted")


@pytest.mark.long
def test_other_seed_draws_other_numbers_and_reuses_no_shard(tmp_path):
    """This holds even where the seed does not decide the order of the rows."""
    options = {"shards": ShardOptions(shuffle=False)}
    first = _rolled(tmp_path / "out", **options)

    job = Prepared(Dice(), 60, tmp_path / "out", seed=1, **options)
    assert {"seed changed (0 -> 1)" in str(change) for change in job.status().changes} == {True}
    second = _rolled(tmp_path / "out", seed=1, **options)

    assert not {s["r"] for s in first.values()} & {s["r"] for s in second.values()}


def test_callers_own_random_state_is_restored(tmp_path):
    """This holds where the work is done in the caller's own process."""
    random.seed(3), np.random.seed(3)
    wanted = random.random(), np.random.random()
    random.seed(3), np.random.seed(3)

    _rolled(tmp_path / "out")

    assert (random.random(), np.random.random()) == wanted


_LIBRARY = """
import datamat, sys
from datamat import WorkerOptions, load, materialize

def roll(item):
    {draw}

if __name__ == "__main__":
    {parent}
    found = []
    for count in (1, 2):
        output = f"{{sys.argv[1]}}/{{count}}"
        materialize(roll, range(40), output, progress=False, workers=WorkerOptions(num_workers=count))
        found.append({{sample["key"]: float(sample["x"]) for sample in load(output)}})
    assert len(set(found[0].values())) == 40, sorted(found[0].values())
    assert found[0] == found[1]
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("parent", ["pass", "import torch; torch.rand(1)"], ids=["in-worker", "in-parent"])
def test_torch_draws_from_the_seed_of_the_row_even_where_read_imports_it(parent, tmp_path):
    """The first row of each worker is the one that imports it."""
    pytest.importorskip("torch")
    _run(_LIBRARY.format(draw='import torch; return {"x": torch.rand(1).item()}', parent=parent), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_tensorflow_draws_from_the_seed_of_the_row_even_where_read_imports_it(tmp_path):
    """The first row of each worker is the one that imports it."""
    draw = 'import tensorflow as tf; return {"x": float(tf.random.uniform([1])[0])}'
    _run(_LIBRARY.format(draw=draw, parent="pass"), tmp_path)


def _run(program, folder):
    (folder / "program.py").write_text(program)
    ended = subprocess.run([sys.executable, folder / "program.py", folder], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("library", ["torch", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_generators_of_libraries_are_restored(library):
    """Work in the caller's own process leaves the generators of loaded libraries unchanged."""
    module = pytest.importorskip(library)
    from datamat.transforms.seeding import global_state_kept, seed_row

    draw = (lambda: module.rand(1).item()) if library == "torch" else (lambda: float(module.random.uniform([1])[0]))
    seed = module.manual_seed if library == "torch" else module.random.set_seed
    seed(3)
    wanted = [draw(), draw()]
    seed(3)
    found = [draw()]
    with global_state_kept():
        seed_row(0, "a")
        inside = draw()
        seed_row(0, "a")
        assert draw() == inside

    assert [*found, draw()] == wanted


# ---- who asks for a generator


def _second(item, generator):
    return item, generator


def _named(item, scale=1, rng=None):
    return item, rng


def _only_by_name(item, *, rng):
    return item, rng


class _Called:
    def __call__(self, item, rng):
        return item, rng


@pytest.mark.parametrize(
    "function",
    [
        _second,
        _named,
        _only_by_name,
        _Called(),
        lambda item, rng=None: (item, rng),
        functools.partial(_second),
        functools.partial(lambda scale, item, rng: (item, rng), 2),
        functools.partial(_named, scale=2),
    ],
)
def test_function_asks_by_a_second_parameter_or_by_its_name(function):
    """The function gets it there."""
    assert with_rng(function)("item", "generator") == ("item", "generator")


@dataclasses.dataclass
class _Pair:
    item: int
    label: str


@pytest.mark.parametrize("function", [lambda item, idx: item, lambda item, label: str(label), _Pair])
def test_function_of_an_item_and_its_index_is_refused(function, tmp_path):
    """The map of Hugging Face passes an index there; a text of the generator would be stored in its place."""
    with pytest.raises(OptionError, match=r"'(idx|label)'.* rng.* enumerate\(items\)"):
        materialize(function, range(3), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "function",
    [
        lambda item: item,
        lambda item, scale=2: item,
        lambda *items: items,
        lambda item, **options: item,
        functools.partial(_only_by_name, rng="mine"),
        functools.partial(_second, generator="mine"),
        functools.partial(lambda scale, item: item, 2),
        lambda rng: rng,
        "text".join,
        np.sqrt,
        str,
        dict,
    ],
)
def test_function_with_one_argument_gets_no_generator(function):
    """Parameters with defaults, and those that a partial function binds, are not touched."""
    assert with_rng(function) is None


# ---- what is refused

GENERATOR, CALLS = np.random.default_rng(), []


def _count():
    CALLS.append(None)
    return float(len(CALLS))


@pytest.mark.parametrize(
    "chance",
    [lambda: GENERATOR.random(), time.perf_counter, _count, lambda: np.random.default_rng().random()],
    ids=["generator-of-the-module", "clock", "counter", "fresh-generator"],
)
def test_chance_that_no_seed_decides_is_refused_with_the_field(chance, tmp_path):
    """A worker reads a row twice, and compares."""
    with pytest.raises(OptionError, match=r"in field 'x'; .*rng"):
        _drawn(lambda item: {"i": item, "x": chance()}, range(30), tmp_path / "out", errors="skip")


def test_chance_in_a_read_that_refills_one_buffer_is_refused(tmp_path):
    """The check keeps a copy of the first sample, which the second fill overwrites."""
    buffer = np.zeros(4)

    def fill(item):
        buffer[:] = GENERATOR.random(4)
        return {"x": buffer}

    with pytest.raises(OptionError, match="in field 'x'"):
        _drawn(fill, range(30), tmp_path / "out")


def test_rows_of_a_kind_that_comes_later_are_compared_too(tmp_path):
    """The first row of a worker need not be like the others: the first of each large part is read twice, too."""

    def mostly(item):
        return {"x": GENERATOR.random() if item >= 100 else 0.5}

    with pytest.raises(OptionError, match="in field 'x'"):
        _drawn(mostly, range(40_000), tmp_path / "out", shards=ShardOptions(shuffle=False, num_shards=1))


def test_memory_and_numbers_that_equal_nothing_are_no_chance(tmp_path):
    """A `read` may cache; NaN equals NaN; a row with an object that nobody can compare is accepted."""

    class Remembering(DatasetWriter):
        name = "remembering"
        features = Features({"x": Scalar("float64"), "y": Tensor((2,), "float32")})

        def index(self, source):
            return [IndexRow(f"{number}") for number in range(source)]

        def read(self, row):
            if not hasattr(self, "table"):
                self.table = {"x": math.nan, "y": np.full(2, np.nan, np.float32)}
            return self.table

    report = Materializer(Remembering(), 20, tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    assert report.num_records == 20


def test_input_that_can_be_read_only_once_is_refused_whatever_the_policy(tmp_path):
    """If the first worker that reads it skipped it and no other did, the output would depend on the workers."""
    items = []
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("1")
        items.append(number)

    def consume(number):
        path = tmp_path / f"{number}.txt"
        value = int(path.read_text())
        path.unlink()
        return {"x": value}

    with pytest.raises(OptionError, match="cannot be read again"):
        _drawn(consume, items, tmp_path / "out", errors="skip", features=Features({"x": Scalar("int64")}))


# ---- blocks


class Blocks(DatasetWriter):
    """Rows that are read many at a time."""

    name = "blocks"
    features = Features({"x": Scalar("float64")})

    def __init__(self, draw, *, by_row=False):
        self.draw = draw
        self.by_row = by_row

    def index(self, source):
        return [IndexRow(f"{number:04d}") for number in range(source)]

    def read(self, row):
        return {"x": random.random()}

    def read_block(self, keys, fields):
        return {"x": self.draw(len(keys))} if self.draw else None


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (np.random.rand, "read_block drew random numbers"),
        (GENERATOR.random, "read_block: .* in field 'x'"),
    ],
)
def test_block_that_draws_is_refused(draw, message, tmp_path):
    """No seed of a row could decide its draws."""
    job = Prepared(Blocks(draw), 1000, tmp_path / "out", executor=InlineExecutor())

    with pytest.raises(OptionError, match=message):
        job.run(progress=False)


@pytest.mark.long
def test_rows_whose_block_fails_draw_what_they_draw_one_by_one(tmp_path):
    """Reading the rows of a block one by one changes no number."""

    class Mixed(Blocks):
        def read(self, row):
            if row.key == "0007":
                raise ValueError("broken")
            return super().read(row)

        def read_block(self, keys, fields):
            if "0007" in keys and not self.by_row:
                raise ValueError(f"broken, as {np.random.rand()} tells")
            return super().read_block(keys, fields)

    for name, by_row in {"failed": False, "by-row": True}.items():
        writer = Mixed(None, by_row=by_row)
        Materializer(writer, 300, tmp_path / name).run(errors="skip", executor=InlineExecutor(), progress=False)

    failed, by_row = ({s["key"]: s["x"] for s in load(tmp_path / name)} for name in ("failed", "by-row"))
    assert failed == by_row
    assert len(set(by_row.values())) == 299
