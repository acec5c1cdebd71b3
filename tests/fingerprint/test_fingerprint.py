"""The digest of what decides the output: equal for equal meaning, different where the output may differ."""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import copyreg
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import importlib.util
import io
import itertools
import logging
import operator
import os
import pathlib
import random
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import types
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamat.errors import FingerprintError
from datamat.features import ClassLabel, Features, Image
from datamat.fingerprint import fingerprint


def digest(value):
    return fingerprint(value, where="value")


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load source text as a new module of the user's, from a file."""
    numbers = itertools.count()

    def load_source(source, name="users_code"):
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        path = folder / f"{name}.py"
        path.write_text(textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load_source


# ---- values


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0


class Named(collections.namedtuple("Named", "a b")):
    __slots__ = ()


class Tags(list):
    pass


class Words(set):
    pass


VALUES = [
    None, ..., NotImplemented, True, False, 0, 1, -1, 255, 2**70, 0.0, -0.0, 1.0, float("nan"),
    float("inf"), 1j, "", "1",
    "é", "\udc80", b"", b"1", bytearray(b"1"), (), (1,), [], [1], [1, 2], [2, 1], [[1], 2], {}, {1: 2},
    {2: 1}, {"1": 2},
    set(), {1}, frozenset(), frozenset({1}), range(3), range(4), slice(1), slice(1, 2), Colour.RED,
    Colour.BLUE, Colour,
    Level.LOW, Level.LOW | Level.HIGH, pathlib.Path("a"), pathlib.Path("b"), pathlib.PurePosixPath("a"),
    Point(1), Point(1, 2),
    Named(1, 2), Named(2, 1), Tags([1]), Words({1}), collections.OrderedDict(a=1, b=2),
    collections.OrderedDict(b=2, a=1),
    collections.defaultdict(int, a=1), collections.defaultdict(list, a=1), collections.Counter("a"),
    collections.deque([1]),
    collections.deque([1], 3), datetime.date(2020, 1, 2), datetime.date(2020, 1, 3),
    datetime.timedelta(1), decimal.Decimal("1.0"),
    decimal.Decimal("1.00"), fractions.Fraction(1, 3), types.SimpleNamespace(a=1), types.SimpleNamespace(a=2),
    np.zeros(3), np.zeros(3, np.float32), np.zeros((3, 1)), np.zeros((1, 3)), np.ones(3), np.zeros(0),
    np.zeros((0, 3)),
    np.array(["a", "b"]), np.array([1, "a"], object), np.array([None]), np.float32(1), np.float64(1),
    np.int64(1),
    np.datetime64("2020-01-01"), np.dtype("<f4"), np.dtype(">f4"), np.dtype([("a", "<f4")]),
    np.dtype([("b", "<f4")]),
    np.zeros(2, [("a", "<i2"), ("b", "<i8")]), np.ma.array([1, 2], mask=[0, 1]),
    np.ma.array([1, 2], mask=[1, 0]),
    int, float, len, max, str.upper, str.lower, np.sin, np.cos, operator.itemgetter(1),
    operator.itemgetter(2),
    functools.partial(int, base=2), functools.partial(int, base=3), "a".join, "b".join, list[int],
    list[str], int | None,
    Image(), Image(encoding="jpeg"), ClassLabel(names=("a", "b")), Features({"a": Image()}),
    Features({"b": Image()}),
    random.Random, np.random.SeedSequence(1), np.random.SeedSequence(2), lambda: 1, lambda: 2,
    ValueError("a"), ValueError("b"),
]  # fmt: skip


def test_different_values_have_different_digests():
    """No two of these values mean the same, down to type, dtype and shape."""
    digests = [digest(value) for value in VALUES]

    assert len(set(digests)) == len(VALUES)


SHARED = [1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, 2, 300}, {300, 2, 1}),
        ({frozenset({1, 2}): {3: 4, 5: 6}}, {frozenset({2, 1}): {5: 6, 3: 4}}),
        (float("nan"), -float("nan")),
        (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
        (np.arange(6)[::2], np.array([0, 2, 4])),
        (types.MappingProxyType({"a": 1}), types.MappingProxyType({"a": 1})),
        (Point(1, 2), Point(1, 2)),
        ([SHARED, SHARED], [[1], [1]]),  # unpickling may or may not keep two equal lists one
        (random.Random(1), random.Random(2)),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (logging.getLogger("a"), logging.getLogger("b")),
    ],
)
def test_equal_meaning_has_equal_digest(one, other):
    """Order of sets and dicts, memory layout, and the state of generators and loggers do not count."""
    assert digest(one) == digest(other)


def test_arrays_count_by_content_alone(tmp_path):
    """Neither the padding between the fields of a structured array counts, nor the file that holds one."""
    aligned = np.dtype([("a", "u1"), ("b", "<i8")], align=True)
    one, other = np.zeros(2, aligned), np.zeros(2, aligned)
    other.view(np.uint8)[1] = 7
    np.save(tmp_path / "a.npy", np.arange(5))

    assert digest(one) == digest(other)
    assert digest(np.load(tmp_path / "a.npy", mmap_mode="r")) == digest(np.arange(5))


nested = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda part: st.lists(part) | st.tuples(part, part) | st.dictionaries(st.text() | st.integers(), part),
    max_leaves=10,
)


def canonical(value):
    """Return a text that is equal if, and only if, two plain values are."""
    if isinstance(value, dict):
        return f"{{{sorted(canonical(item) for item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}{[canonical(part) for part in value]}"
    return f"{type(value).__name__} {value!r}"


@settings(max_examples=150, deadline=None)
@given(nested, nested)
def test_plain_values_are_distinguished_exactly(one, other):
    """Two nested plain values have one digest if and only if they are equal, types included."""
    assert (digest(one) == digest(other)) == (canonical(one) == canonical(other))


# ---- shape of the graph


def test_value_that_holds_itself_has_a_digest():
    """The digest is the same wherever such a value was built."""
    one, other = [1], [1]
    one.append(one)
    other.append(other)
    different = [2]
    different.append(different)

    assert digest(one) == digest(other)
    assert digest(one) != digest(different)
    assert digest(one) != digest([1, [1]])


def ring(*values):
    nodes = [types.SimpleNamespace(value=value) for value in values]
    for node, following in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        node.next = following
    return nodes[0]


def test_cycles_are_distinguished_by_content_and_order():
    """Rings of the same objects in another order, or entered elsewhere, differ."""
    assert digest(ring(1, 2, 3)) == digest(ring(1, 2, 3))
    assert digest(ring(1, 2, 3)) != digest(ring(1, 3, 2))
    assert digest(ring(1, 2, 3)) != digest(ring(2, 3, 1))


def test_cycle_in_a_set_of_values_is_found_in_any_order():
    """Order-free containers inside a cycle do not depend on the order of insertion."""

    def family(names):
        parent = types.SimpleNamespace(children={})
        for name in names:
            parent.children[name] = types.SimpleNamespace(parent=parent, name=name)
        return parent

    assert digest(family("abc")) == digest(family("cab"))


def test_deep_value_has_a_digest():
    """Neither a deep list nor a linked list needs recursion, and shared parts are visited once."""
    deep, linked, pairs = [], None, [1]
    for _ in range(2_000):
        deep, linked = [deep], types.SimpleNamespace(next=linked)

    assert digest(deep) != digest([deep])
    assert digest(linked) != digest(linked.next)
    for _ in range(60):  # 2**60 paths lead through 60 nodes
        pairs = [pairs, pairs]
    assert len(digest(pairs)) == 32


# ---- the user's code

FUNCTION = '''
import numpy as np
from collections import OrderedDict
LIMIT, TABLE = 3, {"a": 1}
def helper(x):
    return x + 1
class Tool:
    size = 4
    def use(self, x):
        return x * self.size
def made(k):
    def inner(x):
        return x + k
    return inner
adder = made(5)
def f(x, y=2, *, z=3):
    """What f does."""
    # a comment
    a = helper(x) + LIMIT + TABLE["a"]
    if a in {1, 2, 3}:
        return [np.sin(i) for i in range(y)]
    try:
        return Tool().use(adder(x)), z
    except ValueError:
        return None
'''


CLASS = """
import dataclasses, enum, functools
class Base:
    factor = 1
    def __init__(self):
        self.n = 1
class Mode(enum.Enum):
    FAST = 1
    def text(self):
        return "fast"
@dataclasses.dataclass
class Options:
    a: int = 1
    b: list = dataclasses.field(default_factory=lambda: [2])
# a comment
class Writer(Base):
    __slots__ = ("s",)
    mode = Mode.FAST
    def __init__(self):
        super().__init__()
        self.options = Options()
        self.s = 5
    @property
    def p(self):
        return 6
    @staticmethod
    def q():
        return 7
    @classmethod
    def r(cls):
        return 8
    @functools.cached_property
    def t(self):
        return [9]
    class Inner:
        u = 10
    def read(self):
        return self.p, Writer.q()
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""What f does."""', '"""Something else."""'),
        ('    """What f does."""\n', ""),
        ("# a comment", "# another one\n\n    # and one more"),
        ("import numpy as np", "# moved down\n\n\nimport numpy as np"),
        ("def f(x, y=2", "def unused():\n    return 7\ndef f(x, y=2"),
        ("class Tool:", 'class Tool:\n    """A tool."""'),
        ("def helper(x):", "def helper(x: int) -> int:"),
        ("class Base:", 'class Base:\n    """Docs."""'),
        ("def read(self):", 'def read(self):\n        """Docs."""'),
        ("    def q():", '    def q():\n        """Docs."""'),
    ],
)
def test_edits_that_cannot_change_behaviour_keep_the_digest(load, before, after):
    """Comments, docstrings, lines, annotations and code that is not used do not count."""
    assert before in FUNCTION + CLASS

    assert _digests(load, before, after) == _digests(load, "", "")


def _digests(load, before, after):
    """Return the digests of a function and of an instance, after an edit of their code."""
    return [
        digest(load(FUNCTION.replace(before, after) if before else FUNCTION).f),
        digest(load(CLASS.replace(before, after) if before else CLASS).Writer()),
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("y=2", "y=3"),
        ("z=3", "z=4"),
        ("z=3", "w=3"),
        ("*, z", "z"),
        ("{1, 2, 3}", "{1, 2, 4}"),
        ("return x + 1", "return x + 2"),
        ("return x + 1", "return x - 1"),
        ("LIMIT, TABLE = 3", "LIMIT, TABLE = 4"),
        ('{"a": 1}', '{"a": 2}'),
        ("size = 4", "size = 5"),
        ("x * self.size", "x ** self.size"),
        ("made(5)", "made(6)"),
        ("return x + k", "return x - k"),
        ("np.sin(i)", "np.cos(i)"),
        ("except ValueError", "except KeyError"),
        ("class Tool:", "class Tool(OrderedDict):"),
        ("return None", "return False"),
        ("factor = 1", "factor = 2"),
        ("self.n = 1", "self.n = 2"),
        ("FAST = 1", "FAST = 2"),
        ('"fast"', '"slow"'),
        ("a: int = 1", "a: int = 2"),
        ("lambda: [2]", "lambda: [3]"),
        ("self.s = 5", "self.s = 6"),
        ("return 6", "return 7"),
        ("return 7", "return 8"),
        ("return 8", "return 9"),
        ("[9]", "[10]"),
        ("u = 10", "u = 11"),
        ("Writer(Base)", "Writer(Base, dict)"),
        ("@staticmethod\n    def q():", "@classmethod\n    def q(cls):"),
    ],
)
def test_edits_of_statements_change_the_digest(load, before, after):
    """Whatever runs counts: statements, constants, defaults, closures, globals, members, and what those use."""
    assert before in FUNCTION + CLASS

    assert _digests(load, before, after) != _digests(load, "", "")


def test_extent_of_a_try_block_counts(load):
    """Moving a statement out of `try` leaves the instructions but not what they catch."""
    inside = "def f(a, b):\n    try:\n        a()\n        b()\n    except ValueError:\n        return 1\n"
    outside = "def f(a, b):\n    try:\n        a()\n    except ValueError:\n        return 1\n    else:\n        b()\n"

    assert digest(load(inside).f) != digest(load(outside).f)


def test_cell_of_a_notebook_counts_like_the_whole_script():
    """Python compiles a call of a module's function differently if the import is in the same piece of code."""
    imports = "import math\nimport operator as op\n"
    body = (
        "def f(x):\n"
        "    for _ in range(3):\n"
        "        try:\n"
        "            x = math.sqrt(op.add(x, 1)) if x > 0 else math.exp(x)\n"
        "        except ValueError:\n"
        "            x = sum([math.floor(y) for y in range(3) if op.neg(y)]) + (lambda: math.ceil(x))()\n"
        "    while op.lt(x, 5):\n"
        "        x = math.pow(x, 2)\n"
        "        if math.isinf(x):\n"
        "            break\n"
        "    return x\n"
    )
    script, cells = {"__name__": "script"}, {"__name__": "cells"}
    exec(imports + body, script)
    exec(imports, cells)
    exec(body, cells)

    assert digest(script["f"]) == digest(cells["f"])


def test_replacements_of_builtins_by_ipython_do_not_count():
    """IPython's own `open` does not count; one that the user wraps does."""
    shell = pytest.importorskip("IPython.core.interactiveshell")
    body = "def f(path):\n    with open(path) as file:\n        return file.read()\n"
    script, cell, users = {}, {"open": shell._modified_open}, {"open": lambda path: io.StringIO(path)}
    for namespace in (script, cell, users):
        exec(body, namespace)

    assert digest(script["f"]) == digest(cell["f"])
    assert digest(script["f"]) != digest(users["f"])


def test_function_keeps_its_digest_when_it_has_run(load):
    """Python rewrites bytecode in place as it warms up; a model loaded on first use is not a parameter."""
    module = load(
        "model = None\ndef f(n):\n    global model\n    model = model or object\n    total = 0\n"
        "    for i in range(n):\n        total += i * 2\n    return total\n"
    )
    before = digest(module.f)

    for _ in range(100):
        module.f(100)

    assert digest(module.f) == before


def test_file_and_module_name_do_not_count(load):
    """The same code in another file, or run as a script, means the same."""
    source = "import logging\nlog = logging.getLogger(__name__)\ndef f(x):\n    log.info(__name__)\n    return x\n"

    assert digest(load(source, "one").f) == digest(load(source, "other").f)


@pytest.mark.parametrize("is_passed_on", [False, True])
def test_attributes_taken_from_the_users_modules_count(load, is_passed_on):
    """`helpers.scale` counts by its content, and nothing else of `helpers` unless it is passed on as a whole."""
    use = "getattr(helpers, x)" if is_passed_on else "helpers.scale(x)"

    def with_helpers(limit, scale):
        load(f"LIMIT = {limit}\ndef scale(x):\n    return x * {scale}\n", "helpers")
        return digest(load(f"import helpers\ndef f(x):\n    return {use}\n").f)

    original = with_helpers(1, 1)
    assert with_helpers(1, 1) == original != with_helpers(1, 2)
    assert (with_helpers(2, 1) != original) is is_passed_on


@pytest.mark.parametrize(
    "imported", ["import lazy_part.deep", "from lazy_part import deep", "from lazy_part.deep import g"]
)
def test_modules_imported_inside_functions_count(tmp_path, monkeypatch, load, imported):
    """A local import counts by the source of the user's module and of those that it imports, without importing it."""
    package = tmp_path / "lazy_part"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("from . import base\ndef g():\n    return base.h()\nraise SystemExit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = f"def f():\n    {imported}\n    return 1\n"

    def with_base(text):
        (package / "base.py").write_text(text)
        os.utime(package / "base.py", (0, len(text)))  # not the time stamp of bytecode that the case before has cached
        return digest(load(source).f)

    original = with_base("def h():\n    return 1\n")
    assert with_base('def h():\n    "Docs."\n    return 1  # one\n') == original
    assert with_base("def h():\n    return 22\n") != original
    assert "lazy_part.deep" not in sys.modules


@pytest.mark.parametrize(
    "read",
    [
        "import set_later\n    return set_later.K",
        "import set_later\n    n = 2\n    return max(n, set_later.K)",  # Python 3.13 loads both at once
        "import set_later; return set_later.K",
        "from set_later import K\n    return K",
    ],
)
def test_module_imported_inside_a_function_counts_by_what_was_set(tmp_path, monkeypatch, load, read):
    """Whether it was imported before makes no difference, as long as it holds what its source says."""
    (tmp_path / "set_later.py").write_text("K = 1\nL = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = f"def f():\n    {read}\n"
    before = digest(load(source).f)

    module = importlib.import_module("set_later")
    try:
        assert digest(load(source).f) == before
        module.L = 7
        assert digest(load(source).f) == before
        module.K = 7
        assert digest(load(source).f) != before
    finally:
        sys.modules.pop("set_later")


def test_installed_code_counts_by_version(monkeypatch):
    """Another version of a distribution is another digest, for functions, classes and local imports alike."""
    import google_crc32c

    from datamat.fingerprint import code

    def local():
        import google_crc32c

        return google_crc32c

    subjects = [np.random.default_rng, google_crc32c.value, google_crc32c.Checksum, google_crc32c, local]
    before = [digest(subject) for subject in subjects]
    monkeypatch.setattr(code, "_version", lambda top: ((top, "99"),))
    code.origin_of_file.cache_clear()
    try:
        after = [digest(subject) for subject in subjects]
    finally:
        code.origin_of_file.cache_clear()

    assert all(one != other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("metadata", "counts"),
    [
        ({"top_level.txt": "other\nunlike_its_name\n"}, True),
        ({"RECORD": "other/__init__.py,,\nunlike_its_name/__init__.py,sha256=ab,0\n"}, True),
        ({"RECORD": "unlike_its_name.cpython-311-x86_64-linux-gnu.so,,\n"}, True),
        ({"top_level.txt": "\n", "RECORD": "unlike_its_name.py,,\n"}, True),
        ({"top_level.txt": "other", "RECORD": "unlike_its_name/__init__.py,,\n"}, False),
        ({"RECORD": "unlike_its_name.libs/libz.so,,\nunlike_its_name_too.py,,\nother/unlike_its_name.py,,\n"}, False),
        ({}, False),
    ],
)
def test_distribution_counts_for_its_own_modules(tmp_path, monkeypatch, metadata, counts):
    """Its declaration, or else its list of files, says which these are; modules of similar names are not."""
    one, other = (_digest_where_installed(tmp_path / n, monkeypatch, metadata, version=n) for n in "12")

    assert (one != other) is counts


def _digest_where_installed(root, monkeypatch, metadata, *, version):
    """Return the digest of a module, `unlike_its_name`, beside the one distribution `some-name` with such metadata."""
    from datamat.fingerprint import code

    described = root / "site-packages" / f"some_name-{version}.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some-name\nVersion: {version}\n")
    for name, text in metadata.items():
        (described / name).write_text(text)
    module = types.ModuleType("unlike_its_name")
    module.__file__ = str(described.parent / "unlike_its_name.py")
    (described.parent / "unlike_its_name.py").write_text("")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(described.parent))
        code._version.cache_clear()
        return digest(module)


def test_package_installed_into_a_folder_counts_by_version(tmp_path, monkeypatch):
    """Modules that `pip install --target` installed count by version, the user's in the same folder by content."""
    from datamat.fingerprint import code

    (tmp_path / "put_there-1.5.dist-info").mkdir()
    (tmp_path / "put_there-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: put-there\nVersion: 1.5\n"
    )
    (tmp_path / "put_there").mkdir()
    (tmp_path / "put_there" / "__init__.py").write_text("def f():\n    return 1\n")
    (tmp_path / "mine_beside.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert code.versions_of(["put_there", "mine_beside"]) == {"put_there": "1.5"}
    assert code.origin_of_module("mine_beside") == ()


def test_decorators_of_installed_packages_count_with_what_they_wrap(load):
    """`functools.wraps`, `lru_cache`, `contextmanager` do not hide the function inside."""
    source = """
    import contextlib, functools
    def mine(g):
        @functools.wraps(g)
        def wrapper(x):
            return g(x)
        return wrapper
    @mine
    def a(x):
        return x + 1
    @functools.lru_cache
    def b(x):
        return x + 1
    @contextlib.contextmanager
    def c(x):
        yield x + 1
    @functools.singledispatch
    def d(x):
        return x + 1
    """
    before, after = load(source), load(source.replace("x + 1", "x + 2"))

    for name in "abcd":
        one = digest(getattr(before, name))
        getattr(before, name)(1)
        assert digest(getattr(before, name)) == one
        assert digest(getattr(after, name)) != one


def test_getstate_decides_what_counts(load):
    """What pickling leaves out does not count."""
    source = """
    import sqlite3
    class Writer:
        def __init__(self, size):
            self.size, self.conn = size, sqlite3.connect(":memory:")
        def __getstate__(self):
            return {"size": self.size}
    """
    one, same, other = (load(source).Writer(size) for size in (1, 1, 2))
    try:
        assert digest(one) == digest(same) != digest(other)
    finally:
        for writer in (one, same, other):
            writer.conn.close()


def test_pickling_that_packages_register_for_exceptions_does_not_count(monkeypatch):
    """What imports Dask has exceptions pickled with their tracebacks, which a worker need not have imported."""
    error = ConnectionResetError("try later")
    before = digest(error)

    monkeypatch.setitem(copyreg.dispatch_table, ConnectionResetError, lambda error: (sqlite3.Error, error.args))

    assert digest(error) == before != digest(ConnectionResetError("never"))


def test_every_part_of_a_custom_state_counts(load):
    """A state that merely looks like (`__dict__`, slots) is not merged."""
    module = load("class Writer:\n    def __getstate__(self):\n        return self.state\n")
    digests = set()
    for state in (({"a": 1}, {"a": 2}), ({"a": 3}, {"a": 2}), ({"a": 2}, {}), {"a": 2}, [{"a": 2}]):
        writer = module.Writer()
        writer.state = state
        digests.add(digest(writer))

    assert len(digests) == 5


def test_bound_method_counts_with_its_object(load):
    """The same method of an object in another state, which it reads, is another callable."""
    module = load(CLASS.replace("return self.p, ", "return self.s, self.p, "))
    one, other = module.Writer(), module.Writer()
    other.s = 6

    assert digest(one.read) != digest(other.read)
    assert digest(one.read) != digest(one.r)
    before = digest(one)
    assert one.t == [9] and digest(one) == before  # a `cached_property` is computed on use


def test_code_of_datamat_counts_by_the_number_of_its_output_format(load, monkeypatch):
    """A higher OUTPUT_VERSION rebuilds shards; a new version of datamat, or an edit of its code, does not."""
    from datamat.fingerprint import code, examine
    from datamat.transforms import seeding
    from datamat.writers.table import TableWriter

    user = load(
        "from datamat.transforms.seeding import sample_rng\ndef read(x):\n    return sample_rng(0, x, 0)\n"
    ).read
    before = examine([TableWriter, user], where="value")
    monkeypatch.setattr("datamat.__version__", "99.0")
    monkeypatch.setattr(TableWriter, "read", lambda self, row: {"other": 1})
    assert examine([TableWriter, user], where="value") == before

    monkeypatch.setattr(seeding, "OUTPUT_VERSION", seeding.OUTPUT_VERSION + 1)
    code.origin_of_file.cache_clear()
    try:
        after = examine([TableWriter, user], where="value")
    finally:
        code.origin_of_file.cache_clear()

    assert after.digest == before.digest
    assert {name for name in after.packages if after.packages[name] != before.packages.get(name)} == {
        "datamat.transforms.seeding"
    }


@pytest.mark.parametrize(
    "source",
    [
        "import os\ndef f():\n    return os.environ['SETTING']\n",
        "import os as system\ndef f():\n    return system.environ.get('SETTING', '1')\n",
        "import os\ndef f():\n    return 'SETTING' in os.environ\n",
        "import os\ndef f():\n    return [os.getenv('SETTING') for _ in range(3)]\n",
        "from os import environ\ndef f():\n    return environ['SETTING']\n",
        "from os import getenv\ndef f():\n    return getenv('SETTING', default='1')\n",
        "def f():\n    import os\n    return os.environ['SETTING']\n",
    ],
)
def test_environment_variables_that_code_reads_count(load, monkeypatch, source):
    """Variables that code reads count, by name and value; those that it only sets do not."""
    module = load(source)
    setter = load("import os\ndef f():\n    os.environ['SETTING'] = '1'\n", "setter")
    found = set()
    for value in ("1", "2", None):
        monkeypatch.setenv("SETTING", value) if value else monkeypatch.delenv("SETTING")
        monkeypatch.setenv("OTHER", str(value))
        found.add((digest(module.f), digest(setter.f)))

    assert len({one for one, _ in found}) == 3
    assert len({other for _, other in found}) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\ndef f():\n    return importlib.import_module('plugged_in').g()\n",
        "from importlib import import_module\ndef f():\n    return import_module('plugged_in').g()\n",
        "def f():\n    return __import__('plugged_in').g()\n",
    ],
)
def test_modules_imported_by_name_count(tmp_path, monkeypatch, load, source):
    """Variables count if the code names them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def with_module(text):
        (tmp_path / "plugged_in.py").write_text(text)
        os.utime(tmp_path / "plugged_in.py", (0, len(text)))
        return digest(load(source).f)

    assert with_module("def g():\n    return 1\n") != with_module("def g():\n    return 22\n")


# ---- what has no content


@pytest.mark.parametrize(
    "make",
    [
        lambda: logging.getLogger("x"),
        lambda: logging.StreamHandler(io.StringIO()),
        threading.Lock,
        threading.RLock,
        threading.Event,
        threading.Condition,
        threading.local,
        lambda: threading.Thread(target=print),
        lambda: concurrent.futures.ThreadPoolExecutor(1),
        np.random.default_rng,
        np.random.RandomState,
        random.Random,
        weakref.WeakValueDictionary,
    ],
)
def test_objects_without_meaning_count_by_type(make):
    """Loggers, locks, pools and random generators count by type, not by state."""
    assert digest([make()]) == digest([make()])
    assert digest([make()]) != digest([None])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: sqlite3.connect(":memory:"), "sqlite3.Connection"),
        (socket.socket, "socket.socket"),
        (lambda: (i for i in range(3)), "builtins.generator"),
        (lambda: iter([1, 2]), "builtins.list_iterator"),
        (lambda: open(os.devnull), "_io.TextIOWrapper"),  # noqa: SIM115 -- closed below
        (lambda: itertools.count(), "itertools.count"),
        (lambda: map(str, []), "builtins.map"),
    ],
)
def test_objects_without_content_are_refused_by_path(make, kind):
    """The message says where the object is, what it is and what to do."""
    reader = types.SimpleNamespace(_conn=make())
    writer = types.SimpleNamespace(reader={"main": [reader]})
    try:
        with pytest.raises(FingerprintError) as caught:
            fingerprint(writer, where="writer")
    finally:
        getattr(reader._conn, "close", lambda: None)()

    assert str(caught.value).startswith(f"writer.reader['main'][0]._conn: {kind} ")
    assert "__getstate__" in str(caught.value)


def test_refusal_names_the_global_of_a_method(load):
    """The path leads through class, method and global."""
    source = """
    import sqlite3
    connection = sqlite3.connect(":memory:")
    class Writer:
        def read(self, row):
            return connection.execute("select 1")
    """
    module = load(source)
    try:
        with pytest.raises(FingerprintError, match=r"^writer\.read -> connection: sqlite3\.Connection "):
            fingerprint(module.Writer(), where="writer")
    finally:
        module.connection.close()


# ---- other processes

SCRIPT = """
import enum, functools, logging, pathlib, random, sys, threading
import numpy as np
from datamat.fingerprint import fingerprint
from datamat.features import Features, Image
class Mode(enum.Flag):
    A = 1
    B = 2
class Writer:
    features = Features({"image": Image()})
    names = {"b", "a", "c", 1, None}
    def __init__(self):
        self.lock, self.log, self.rng = threading.RLock(), logging.getLogger(__name__), np.random.default_rng()
        self.table = {name: {name, 1} for name in self.names}
        self.array, self.path, self.mode = np.arange(5), pathlib.Path("a/b"), Mode.A | Mode.B
        self.partial = functools.partial(sorted, key=lambda x: x in {"x", "y", "z"})
    def read(self, row):
        import yaml
        return super().__repr__(), row in self.names, Writer, random.random(), yaml
print(fingerprint(Writer(), where="writer"))
"""


def test_digest_is_equal_in_other_processes(tmp_path):
    """Hash seed, folder, file name and way of starting make no difference."""
    (tmp_path / "here").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "here" / "other.py").write_text("# elsewhere\n\n" + SCRIPT)
    ways = [
        (["script.py"], tmp_path, "0"),
        (["-m", "other"], tmp_path / "here", "1"),
        (["-c", SCRIPT], tmp_path, "2"),
    ]

    digests = {
        subprocess.run(
            [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
            capture_output=True, check=True,
        ).stdout
        for arguments, folder, seed in ways
    }  # fmt: skip

    assert len(digests) == 1


def test_digests_are_pinned():
    """A change of these values makes every unfinished run start again: change them knowingly."""
    value = {"a": [1, 2.5, None, "é", b"\x00"], "b": (True, {1, 2}), "c": np.arange(3, dtype="<i4")}

    assert digest(value) == "62b1002b65fd803b9af21be9755ea335"


def test_tensors_of_torch_count_by_content():
    """Pickles of tensors hold addresses, so each process, and each copy, would get another digest."""
    torch = pytest.importorskip("torch")
    mean = torch.tensor([0.1, 0.2, 0.3])
    wide = torch.zeros(3, 2)
    wide[:, 0] = mean

    assert digest(mean) == digest(mean.clone()) == digest(wide[:, 0])
    others = [mean + 1, mean.double(), mean.reshape(3, 1), mean.bfloat16(), torch.nn.Parameter(mean), torch.tensor(0.1)]
    assert len({digest(tensor) for tensor in [mean, *others]}) == 7
    assert digest(torch.nn.Linear(2, 2)) != digest(torch.nn.Linear(2, 2))
    layer = torch.nn.Linear(2, 2)
    assert digest(layer) == digest(copy.deepcopy(layer))
