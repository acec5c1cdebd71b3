"""How `self` is pickled: fast, in time that grows with its size alone, and with all that dill can send."""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import os
import re
import sqlite3
import sys
import types
import typing
import weakref

import dill
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamat.errors import UnpicklableError
from datamat.parallel import PathosExecutor, pickling

ON_COMMIT = ("fork", "forkserver")  # one inherits `self`, the other gets it in a message


class Point:
    def __init__(self, x):
        self.x = x
        self.row = [x]


class Cloud:
    """Has many objects, one of which may have to stay behind."""

    def __init__(self, num_points, **held):
        self.points = [Point(i) for i in range(num_points)]
        vars(self).update(held)

    def total(self):
        return sum(point.x + point.row[0] for point in self.points)


def lines_to_pickle(obj):
    """Return how many lines the pickler executes: a measure of time that does not depend on the machine."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename == pickling.__file__:
            count += event == "line"
            return trace
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        pickling.dumps_code(obj)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("stays_behind", [False, True])
def test_work_grows_with_the_number_of_objects(stays_behind):
    """Twice the objects take twice the work, not four times, even if a place has to be named."""
    with sqlite3.connect(":memory:") as connection:
        held = {"connection": connection} if stays_behind else {}
        small, large = (lines_to_pickle(Cloud(n, **held).total) for n in (200, 800))

    connection.close()
    assert large < 5 * small


def sent(obj):
    """Return what arrives of an object, and the places where something stayed behind."""
    pickled = pickling.dumps_code(obj)
    return pickling.load_code(pickled.stream, [bytearray(buffer) for buffer in pickled.buffers]), pickled.standins


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.builds(types.SimpleNamespace, a=inner)
    ),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(value=VALUES)
def test_both_picklers_send_the_same(value):
    """The slower one takes over if anything stays behind."""
    connection = sqlite3.connect(":memory:")
    try:
        fast, none = sent({"value": value, "other": None})
        slow, places = sent({"value": value, "other": connection})
    finally:
        connection.close()

    assert fast["value"] == slow["value"] == value
    assert not none
    assert places == {"['other']": "sqlite3.Connection"}


def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)


@dataclasses.dataclass
class Row:
    a: int = 1
    b: list = dataclasses.field(default_factory=list)

    @property
    def double(self):
        return 2 * self.a

    @classmethod
    def made(cls):
        return cls()

    def method(self):
        return self.a

    @staticmethod
    def three():
        return 3


class Labelled(np.ndarray):
    """An array with attributes."""


class Registered:
    """Its author has registered it with dill."""

    def __reduce__(self):
        raise RuntimeError("only dill knows how")


@dill.register(Registered)
def save_registered(pickler, obj):
    pickler.save_reduce(Registered, (), obj=obj)


def labelled():
    array = np.arange(3).view(Labelled)
    array.label = "three"
    return array


POINT = Point(3)
WHAT_DILL_SENDS = {
    "weak reference": (lambda: weakref.ref(POINT), lambda it: type(it) is weakref.ref),
    "keys": (lambda: {1: 2}.keys(), lambda it: list(it) == [1]),
    "items": (lambda: collections.OrderedDict(a=1).items(), lambda it: list(it) == [("a", 1)]),
    "mapping proxy": (lambda: types.MappingProxyType({"a": 1}), lambda it: dict(it) == {"a": 1}),
    "property": (lambda: vars(Row)["double"], lambda it: it.fget(Row(4)) == 8),
    "class method": (lambda: vars(Row)["made"], lambda it: it.__func__(Row) == Row()),
    "static method": (lambda: vars(Row)["three"], lambda it: it.__func__() == 3),
    "bound method": (lambda: Row(7).method, lambda it: it() == 7),
    "bound class method": (lambda: Row.made, lambda it: it() == Row()),
    "slice": (lambda: slice(1, 2), lambda it: it == slice(1, 2)),
    "ellipsis": (lambda: ..., lambda it: it is ...),
    "NotImplemented": (lambda: NotImplemented, lambda it: it is NotImplemented),
    "range": (lambda: range(3), lambda it: it == range(3)),
    "pattern": (lambda: re.compile("a+"), lambda it: it.match("aa")),
    "descriptor": (
        lambda: vars(types.FunctionType)["__code__"],
        lambda it: it.__get__(factorial) is factorial.__code__,
    ),
    "slot wrapper": (lambda: int.__add__, lambda it: it(1, 2) == 3),
    "code": (lambda: factorial.__code__, lambda it: it.co_name == "factorial"),
    "recursive function": (lambda: factorial, lambda it: it(5) == 120),
    "MISSING": (lambda: dataclasses.MISSING, lambda it: it is dataclasses.MISSING),
    "fields": (lambda: dataclasses.fields(Row), lambda it: it[1].default is dataclasses.MISSING),
    "generic alias": (lambda: typing.List[int], lambda it: it == typing.List[int]),  # noqa: UP006
    "optional": (lambda: typing.Optional[int], lambda it: it == typing.Optional[int]),  # noqa: UP045
    "NoneType": (lambda: type(None), lambda it: it is type(None)),
    "type of functions": (lambda: types.FunctionType, lambda it: it is types.FunctionType),
    "type of keys": (lambda: type({}.keys()), lambda it: it is type({}.keys())),
    "array with attributes": (labelled, lambda it: it.label == "three" and it.sum() == 3),
    "masked array": (lambda: np.ma.array([1, 2], mask=[False, True]), lambda it: it.sum() == 1),
    "array of objects": (lambda: np.array([1, None, Row()], dtype=object), lambda it: it[2] == Row()),
    "ufunc": (lambda: np.add, lambda it: it is np.add),
    "partial": (lambda: functools.partial(max, 3), lambda it: it(1) == 3),
    "default dict": (lambda: collections.defaultdict(lambda: 3), lambda it: it["x"] == 3),
    "iterator": (lambda: iter([3, 4]), lambda it: next(it) == 3),
    "StringIO": (lambda: io.StringIO("ab"), lambda it: it.read() == "ab"),
    "module": (lambda: os.path, lambda it: it is os.path),
    "registered": (Registered, lambda it: type(it) is Registered),
}


@pytest.mark.parametrize("what", WHAT_DILL_SENDS)
def test_what_dill_sends_arrives(what):
    """Either pickler sends it."""
    make, is_right = WHAT_DILL_SENDS[what]
    with sqlite3.connect(":memory:") as connection:
        fast, _ = sent([make(), POINT])
        slow, places = sent([make(), POINT, connection])

    connection.close()
    assert is_right(fast[0])
    assert is_right(slow[0])
    assert list(places) == ["[2]"]


def test_arrays_stay_beside_the_stream():
    """Even after dill has registered their type."""
    array = np.zeros(10_000)
    dill.dumps(array)

    pickled = pickling.dumps_code({"array": array})

    assert [buffer.raw().nbytes for buffer in pickled.buffers] == [array.nbytes]
    assert len(pickled.stream) < 1000


class Link:
    def __init__(self, link):
        self.link = link


def nested(depth, wrap):
    made = None
    for _ in range(depth):
        made = wrap(made)
    return made


def depth_of(made):
    depth = 0
    while made is not None:
        made = made.link if isinstance(made, Link) else made[0]
        depth += 1
    return depth


class Deep:
    def __init__(self, held):
        self.held = held

    def depth(self):
        return depth_of(self.held)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner,), Link], ids=["list", "tuple", "object"])
def test_deep_nesting_travels(method, wrap):
    """On `self`, as an argument and as a result."""
    limit = sys.getrecursionlimit()
    # The first releases of Python 3.12 let nested calls in C be 1,500 deep, whatever is set; an object takes several.
    depth = 400 if wrap is Link and sys.version_info[:2] == (3, 12) else 1000
    with PathosExecutor(1, start_method=method) as pool:
        assert pool.submit(Deep(nested(depth, wrap)).depth).result(30) == depth
        assert pool.submit(depth_of, nested(depth, wrap)).result(30) == depth
        assert depth_of(pool.submit(nested, depth, wrap).result(30)) == depth

    assert sys.getrecursionlimit() == limit


class Endless:
    """Contains a new object at each level, without end."""

    def __reduce__(self):
        return Endless, (), {"inner": Endless()}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_endless_object_is_refused():
    """The pickler does not run out of stack."""
    with pytest.raises(UnpicklableError, match="RecursionError"):
        pickling.dumps_code(Endless())


def test_connection_in_depth_is_named():
    """Wherever it is."""
    with sqlite3.connect(":memory:") as connection:
        _, places = sent({"a": nested(1000, lambda inner: [inner or connection])})

    connection.close()
    assert list(places.values()) == ["sqlite3.Connection"]
    assert all(len(place) < 300 for place in places)


class Pair(tuple):
    """Is a subclass of tuple."""

    __slots__ = ()


class Remade:
    """Is rebuilt by a call, and gets its attributes from a function of its own."""

    def __reduce__(self):
        return Remade, (), vars(self), None, None, set_attributes


def set_attributes(obj, attributes):
    vars(obj).update(attributes)


class Named(dict):
    """Is a dictionary with attributes."""


class Wrapper:
    """Is rebuilt from what it holds."""

    def __init__(self, held):
        self.held = held

    def __reduce__(self):
        return Wrapper, (self.held,)


MUTABLE = (list, dict, types.SimpleNamespace, Remade, Named)
IMMUTABLE = (lambda *held: held, lambda *held: Pair(held), lambda *held: Wrapper(held))


def graph_of(kinds, edges):
    """Return objects of these kinds that refer to each other; immutable ones refer only to earlier ones."""
    objects = []
    for number, kind in enumerate(kinds):
        held = [objects[edge % number] for edge in edges[number] if number]
        objects.append(MUTABLE[kind]() if kind < len(MUTABLE) else IMMUTABLE[kind - len(MUTABLE)](number, *held))
    for number, obj in enumerate(objects):
        for edge in edges[number] if kinds[number] < len(MUTABLE) else ():
            held = objects[edge % len(objects)]
            if isinstance(obj, list):
                obj.append(held)
            if isinstance(obj, dict):
                obj[len(obj)] = held
            if hasattr(obj, "__dict__"):
                setattr(obj, f"held{edge}", held)
    return objects


def shape_of(obj):
    """Return types and plain values of all that an object holds, and where an object occurs twice."""
    seen, shape, waiting = {}, [], [obj]
    while waiting:
        each = waiting.pop()
        if isinstance(each, int | str):
            shape.append(each)
        elif id(each) in seen:
            shape.append(("seen", seen[id(each)]))
        else:
            seen[id(each)] = len(seen)
            held = [*each] if isinstance(each, list | tuple) else []
            held += each.values() if isinstance(each, dict) else []
            held += [part for pair in getattr(each, "__dict__", {}).items() for part in pair]
            shape.append((type(each), len(held)))
            waiting += reversed(held)
    return shape


NODES = st.tuples(st.integers(0, len(MUTABLE) + len(IMMUTABLE) - 1), st.lists(st.integers(0, 20), max_size=4))


@settings(max_examples=300, deadline=None)
@given(nodes=st.lists(NODES, min_size=1, max_size=20), picked=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_results_are_the_same_one_by_one(nodes, picked):
    """They equal those loaded together, with shared objects and with cycles."""
    objects = graph_of(*zip(*nodes, strict=True))
    chosen = [objects[number % len(objects)] for number in picked]

    whole, errors, none = pickling.loads_results(pickling.dumps_results([*chosen, "last"], {1: b"error"}))
    results, others, failures = pickling.loads_results(pickling.dumps_results([*chosen, Bomb()], {1: b"error"}))

    assert list(map(shape_of, results[:-1])) == list(map(shape_of, whole[:-1])) == list(map(shape_of, chosen))
    assert (errors, none) == (others, {}) == ({1: b"error"}, {})
    assert [*failures] == [len(picked)]


class Bomb:
    def __reduce__(self):
        return divmod, (1, 0)


def test_what_a_lost_result_shares_is_lost_with_it():
    """Results before it keep what they share with it, and so do those behind it."""
    kept, lost, other = Named(a=1), Named(b=2), Named(c=3)

    results, _, failures = pickling.loads_results(
        pickling.dumps_results([[kept], [kept, lost, Bomb()], [kept, other], [lost, kept], [other, kept]], {})
    )

    assert sorted(failures) == [1, 3]
    assert results == [[kept], None, [kept, other], None, [other, kept]]
    assert results[2][1] is results[4][0]
    assert results[0][0] is results[4][1]
