"""A call is made with its callable as that was when it was submitted; what has not changed is not sent again."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import gc
import multiprocessing
import os
import queue
import signal
import threading
import types
import weakref

import numpy as np
import pytest

from datamat.errors import UnpicklableError
from datamat.parallel import PathosExecutor
from datamat.parallel.pickling import digest

ON_COMMIT = ("fork", "forkserver")  # one inherits `self`, the other gets it in a message
RATE = 0


@dataclasses.dataclass
class Options:
    rate: int = 0


class Slotted:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 0


class Table(dict):
    """Is a user's class that is a container."""


class Model:
    """Holds whatever may change between two calls."""

    def __init__(self):
        self.rate = 0
        self.text = "text"
        self.options = Options()
        self.slotted = Slotted()
        self.layers = [{"rate": 0}, [0, 0], (Options(),)]
        self.names = {"a"}
        self.weights = np.zeros(3)
        self.large = np.zeros(1 << 18)
        self.bytes = bytearray(2)
        self.numbers = array.array("d", [0.0])
        self.rows = [(i, str(i)) for i in range(1000)]
        self.index = {str(i): i for i in range(1000)}
        self.recent = collections.deque([0], maxlen=3)
        self.table = Table(rate=0)
        self.space = types.SimpleNamespace(rate=0)
        self.counts = collections.defaultdict(int)
        self.random = np.random.default_rng(0)
        self.apply = functools.partial(max, Options().rate)
        self.lock = threading.RLock()
        self.queue = queue.Queue()

    def look(self, gate=None):
        if gate is not None:
            assert gate.wait(30)
        return [
            self.rate, self.options.rate, self.layers[0]["rate"], self.layers[1][1], self.layers[2][0].rate,
            len(self.names), float(self.weights[1]), float(self.large[1]), self.slotted.rate, RATE,
        ]  # fmt: skip


def change_everything(model, to):
    global RATE
    RATE = to
    model.rate = model.options.rate = model.slotted.rate = to
    model.layers[0]["rate"] = model.layers[1][1] = model.layers[2][0].rate = to
    model.names = {str(i) for i in range(to)}
    model.weights[1] = model.large[1] = to


CHANGES = {
    "attribute": lambda model: setattr(model, "rate", 1),
    "another type": lambda model: setattr(model, "rate", False),
    "sign of zero": lambda model: setattr(model, "rate", -0.0),
    "new attribute": lambda model: setattr(model, "more", 1),
    "attribute that goes": lambda model: delattr(model, "text"),
    "order of attributes": lambda model: (delattr(model, "rate"), setattr(model, "rate", 0)),
    "class": lambda model: setattr(model, "__class__", type("Other", (Model,), {})),
    "object within": lambda model: setattr(model.options, "rate", 1),
    "slot": lambda model: setattr(model.slotted, "rate", 1),
    "dict within a list": lambda model: model.layers[0].update(rate=1),
    "list within a list": lambda model: model.layers[1].__setitem__(0, 1),
    "list of numbers grows": lambda model: model.layers[1].append(0),
    "object in a tuple": lambda model: setattr(model.layers[2][0], "rate", 1),
    "row": lambda model: model.rows.__setitem__(500, (500, "other")),
    "order of rows": lambda model: model.rows.reverse(),
    "sign of zero in rows": lambda model: model.rows.__setitem__(0, (-0.0, "0")),
    "list in rows": lambda model: model.rows.__setitem__(0, [0, "0"]),
    "value of a large dict": lambda model: model.index.update({"5": 6}),
    "order of a large dict": lambda model: model.index.update({"0": model.index.pop("0")}),
    "set": lambda model: model.names.add("b"),
    "array": lambda model: model.weights.__setitem__(0, 1),
    "large array": lambda model: model.large.__setitem__(-1, 1),
    "shape of an array": lambda model: model.weights.resize((3, 1), refcheck=False),
    "bytes": lambda model: model.bytes.__setitem__(0, 1),
    "numbers": lambda model: model.numbers.append(1.0),
    "deque": lambda model: model.recent.append(1),
    "container of the user's": lambda model: model.table.update(rate=1),
    "namespace": lambda model: setattr(model.space, "rate", 1),
    "defaultdict": lambda model: model.counts["a"],
    "random numbers drawn": lambda model: model.random.random(),
    "queue": lambda model: model.queue.put(1),
    "partial": lambda model: setattr(model, "apply", functools.partial(max, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_seen(change):
    model, rows = Model(), {}
    before = digest(model.look), digest(model.look, rows)
    assert (digest(model.look), digest(model.look, rows)) == before

    CHANGES[change](model)

    assert digest(model.look) != before[0]
    assert digest(model.look, rows) != before[1]


@pytest.mark.parametrize("row", [([0], "0"), (([0],), "0")])
def test_change_within_a_row_is_seen(row):
    """Rows that hold lists are not compared by identity."""
    model, rows = Model(), {}
    model.rows[0] = row
    before = digest(model.look, rows)

    (row[0][0] if isinstance(row[0], tuple) else row[0]).append(1)

    assert digest(model.look, rows) != before


def test_same_again_is_no_change():
    """Setting an attribute to the same value, taking a lock or counting memory changes nothing."""
    model, rows = Model(), {}
    before = digest(model.look), digest(model.look, rows)

    model.rate, model.layers[2] = int("0"), (Options(),)
    model.rows, model.index = [(i, str(i)) for i in range(1000)], dict(model.index)
    with model.lock:
        gc.collect()
        assert (digest(model.look), digest(model.look, rows)) == before


def test_change_of_a_closure_is_seen():
    """In its cells, in what these hold, in its defaults and in its attributes."""
    first, more = [0], 0

    def add(x, *, scale=1):
        return (first[0] + more + x) * scale

    def set_more(value):
        nonlocal more
        more = value

    changes = [
        lambda: first.append(1),
        lambda: set_more(2),
        lambda: setattr(add, "factor", 3),
        lambda: add.__kwdefaults__.update(scale=4),
        lambda: setattr(add, "__kwdefaults__", {"scale": 5}),
    ]
    for change in changes:
        before = digest(add)
        assert digest(add) == before
        change()
        assert digest(add) != before


def test_call_is_made_with_self_as_it_was_when_submitted(method):
    """Calls from before the change are still queued, and the worker has begun none of them."""
    gate = multiprocessing.get_context("spawn").Event()
    model = Model()
    change_everything(model, 0)

    with PathosExecutor(1, start_method=method) as pool:
        futures = [pool.submit(model.look, gate)]
        for i in range(1, 4):
            futures += [pool.submit(model.look)]
            change_everything(model, i)
        futures += [pool.submit(model.look)]
        gate.set()
        seen = [future.result(timeout=30) for future in futures]

    assert seen == [[i] * 10 for i in (0, 0, 1, 2, 3)]


CELL = """
import functools, sys

RATE, copies = 0, []

def count_copies(_):
    code = sys._getframe().f_code
    if not any(code is each for each in copies):
        copies.append(code)
    return len(copies)

def rate(*_):
    return RATE

class Holder:
    def rate(self, *_):
        return RATE

def make(function):
    def wrapped(*_):
        return function()
    return wrapped

table, held = {"rate": [rate]}, Holder()
held.inner, partial, closure = rate, functools.partial(rate), make(rate)

def by_name(_): return rate()
def by_table(_): return table["rate"][0]()
def by_partial(_): return partial()
def by_class(_): return Holder().rate()
def by_object(_): return held.rate()
def by_attribute(_): return held.inner()
def by_closure(_): return closure()
"""
WAYS = ("rate", "by_name", "by_table", "by_partial", "by_class", "by_object", "by_attribute", "by_closure")


def wait_for(gate):
    return gate.wait(30)


def run_cell():
    """Return the globals of code that travels by value, as that of a notebook does."""
    cell = {"__name__": "cell_of_a_notebook"}
    exec(CELL, cell)
    return cell


@pytest.mark.parametrize("way", WAYS)
def test_rebound_global_is_seen_wherever_the_code_is_that_uses_it(method, way):
    """In functions that a global holds as well; while calls of it are under way, and after them."""
    cell = run_cell()
    gate = multiprocessing.get_context("spawn").Event()
    futures, seen = [], []

    with PathosExecutor(1, start_method=method) as pool:
        waiting = pool.submit(wait_for, gate)
        for cell["RATE"] in range(3):
            futures.append(pool.submit(cell[way], None))
        gate.set()
        assert waiting.result(timeout=30)
        for cell["RATE"] in range(3, 6):
            seen += [pool.submit(cell[way], None).result(timeout=30), *pool.map(cell[way], [None])]

    assert [future.result() for future in futures] == [0, 1, 2]
    assert seen == [3, 3, 4, 4, 5, 5]


def test_plain_function_is_not_sent_again_for_each_map(method):
    """It cannot keep anything that the next map would find."""
    cell = run_cell()

    with PathosExecutor(1, start_method=method) as pool:
        copies = [next(iter(pool.map(cell["count_copies"], [0]))) for _ in range(8)]

    assert copies[-1] <= 2  # a fork has inherited the first


def add_default(item, more=[]):  # noqa: B006 -- what it keeps from one call to the next is what this is about
    more.append(item)
    return len(more)


@pytest.mark.parametrize("kind", ["default", "closure", "self", "partial"])
def test_map_finds_nothing_of_an_earlier_map(method, kind):
    """What calls leave in the callable is gone in the next map."""
    kept: list[int] = []
    function = {
        "default": types.FunctionType(add_default.__code__, run_cell(), "add", ([],)),
        "closure": lambda item: kept.append(item) or len(kept),
        "self": Keeper().keep,
        "partial": functools.partial(Keeper.keep, Keeper()),
    }[kind]

    with PathosExecutor(1, start_method=method) as pool:
        got = [list(pool.map(function, range(3), chunksize=3)) for _ in range(3)]

    assert got == [[1, 2, 3]] * 3


class Keeper:
    def __init__(self):
        self.kept = []

    def keep(self, item):
        self.kept.append(item)
        return len(self.kept)


@pytest.mark.parametrize("way", ["rate", "by_name", "by_object", "by_closure"])
def test_function_of_a_map_is_freed_with_what_its_globals_held(method, way):
    """An idle pool keeps neither."""
    cell = run_cell()
    del cell["table"]  # which pools that fork keep, since nothing else says whether it is still the same

    with PathosExecutor(1, start_method=method) as pool:
        for _ in range(3):
            assert list(pool.map(cell[way], [None])) == [0]
        function, held = (weakref.ref(cell[name]) for name in (way, "held"))
        del cell["held"]
        gc.collect()
        assert held() is None
        cell.clear()
        gc.collect()
        assert function() is None


class Parent:
    def __init__(self):
        self.child = types.SimpleNamespace(parent=self)

    def look(self):
        return len(vars(self))


@pytest.mark.parametrize("kind", [Model, Parent])
def test_callable_is_freed_although_its_state_is_known(method, kind):
    """What is kept for comparison does not keep the callable alive."""
    holder = kind()
    reference = weakref.ref(holder)

    with PathosExecutor(1, start_method=method) as pool:
        for _ in range(3):
            pool.submit(holder.look).result(timeout=30)
        del holder
        gc.collect()
        assert reference() is None


class Fragile:
    rate = 0

    def die(self, gate):
        assert gate.wait(30)
        os.kill(os.getpid(), signal.SIGKILL)

    def look(self):
        return self.rate


def test_what_only_a_dead_fork_had_is_not_invented():
    """It was never pickled and has changed since, so earlier calls can no longer be made as intended."""
    gate = multiprocessing.get_context("spawn").Event()
    fragile = Fragile()

    with PathosExecutor(1, start_method="fork") as pool:
        first = [pool.submit(fragile.die, gate), pool.submit(fragile.die, gate)]
        fragile.rate = 1
        second = pool.submit(fragile.look)
        gate.set()
        assert first[0].exception(timeout=30) is not None
        with pytest.raises(UnpicklableError, match="was changed while calls of it were under way"):
            first[1].result(timeout=30)
        assert second.result(timeout=30) == 1
