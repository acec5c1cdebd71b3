"""Items whose classes travel by value: a class goes once to each worker, and its instances cost what others do."""

from __future__ import annotations

import dataclasses
import enum
import os
import signal
import sys
import typing

import pytest

from datamat.parallel import PathosExecutor, PathosPool

MAPPINGS = ("map", "chunks", "submit", "unordered", "generator", "pathos")


class Marker:
    pickled = 0

    def __reduce__(self):
        type(self).pickled += 1
        return Marker, ()


class Colour(enum.Enum):
    RED = 1


class Pair(typing.NamedTuple):
    first: int
    second: object


class Base:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def double(self):
        return 2 * self.value


@dataclasses.dataclass
class Item:
    marker: typing.ClassVar = Marker()
    value: int
    parts: object = None

    def add(self):
        return self.value + self.parts.second.double()


class Child(Item):
    """An item of a subclass."""


def make(kind, i):
    return kind(i, Pair(i, Base(i)))


def use(item):
    assert isinstance(item, Item)
    assert isinstance(item.parts, Pair)
    return item.add(), item, Colour.RED


def calls(mapping, method, items):
    if mapping == "pathos":
        pool = PathosPool(2, id="items", start_method=method)
        try:
            return pool.map(use, items)
        finally:
            pool.clear()
    with PathosExecutor(2, start_method=method) as pool:
        if mapping == "submit":
            return [future.result(timeout=50) for future in [pool.submit(use, item) for item in items]]
        if mapping == "unordered":
            return sorted(pool.map_unordered(use, items), key=lambda result: result[0])
        if mapping == "generator":
            return list(pool.map(use, (item for item in items)))
        return list(pool.map(use, items, chunksize=7 if mapping == "chunks" else 1))


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_class_of_items_is_pickled_once(method, mapping):
    """Not for each item or message; both sides know instances of the one class."""
    items = [make(Item if i % 2 else Child, i) for i in range(40)]
    Marker.pickled = 0

    results = calls(mapping, method, items)

    assert [total for total, _, _ in results] == [3 * i for i in range(40)]
    assert all(
        type(back) is type(item) and back.value == item.value for item, (_, back, _) in zip(items, results, strict=True)
    )
    assert all(colour is Colour.RED for _, _, colour in results)
    # Calls that are submitted before the worker has said that it has the class bring it along.
    assert Marker.pickled < (len(items) if mapping == "submit" else 10)


def kill_once(item):
    if os.path.exists(item.parts):
        os.remove(item.parts)
        os.kill(os.getpid(), signal.SIGKILL)
    return item.value


@pytest.mark.parametrize("chunksize", [1, 4])
def test_worker_that_takes_the_place_of_another_gets_the_class(method, chunksize, tmp_path):
    """So does one that gets the parts of a chunk that was split."""
    fatal = tmp_path / "fatal"
    fatal.touch()
    items = [Item(i, str(fatal) if i == 5 else "") for i in range(12)]

    with PathosExecutor(1, start_method=method, max_retries=1) as pool:
        assert list(pool.map(kill_once, items, chunksize=chunksize)) == list(range(12))


def test_redefined_class_is_another(method):
    """Running a cell of a notebook again does the same."""

    def define(factor):
        class Scaled:
            def __init__(self, value):
                self.value = value

            def get(self):
                return factor * self.value

        return Scaled

    with PathosExecutor(1, start_method=method) as pool:
        got = [pool.submit(lambda item: item.get(), define(factor)(5)).result(timeout=30) for factor in range(4)]

    assert got == [0, 5, 10, 15]


def value_of(item):
    return item.value


def test_class_is_sent_again_with_the_module_that_a_worker_cannot_import(tmp_path, monkeypatch):
    """Its tasks wait until it arrives."""
    (tmp_path / "only_in_the_parent.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    raise ImportError('no')\n\n\nclass Base:\n    value = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("only_in_the_parent")

    class Strange(module.Base):
        pass

    try:
        with PathosExecutor(1, start_method="forkserver") as pool:
            assert list(pool.map(value_of, [Strange(), Strange()], chunksize=1)) == [3, 3]
            assert pool.submit(value_of, Strange()).result(timeout=30) == 3
    finally:
        del sys.modules["only_in_the_parent"]


def explode():
    raise RuntimeError("not here")


class Explosive:
    def __reduce__(self):
        return explode, ()


class Unmakable:
    value = Explosive()


def test_class_that_cannot_be_rebuilt_fails_its_items_and_no_other():
    with PathosExecutor(1, start_method="forkserver") as pool:
        assert pool.submit(value_of, Item(1)).result(timeout=30) == 1
        with pytest.raises(RuntimeError, match="not here"):
            pool.submit(value_of, Unmakable()).result(timeout=30)
        assert pool.submit(value_of, Item(2)).result(timeout=30) == 2
