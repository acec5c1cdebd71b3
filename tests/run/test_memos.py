"""What code keeps between calls is the caller's in each worker, and counts where the program has set it."""

import gc
import importlib
import subprocess
import sys
import textwrap

import pytest
from prepared import Prepared

from datamat import load
from datamat.fingerprint import read_memos
from datamat.testing import InlineExecutor

# Each kind: what defines `get()`, which returns a dict of the size; and the name by which a change of it is told.
KINDS = {
    "global": (
        """
        kept = None
        def get():
            global kept
            if kept is None:
                kept = {"size": 1}
            return kept
        """,
        "kept",
    ),
    "global_of_two": (
        """
        shared = None
        def fill():
            global shared
            shared = {"size": 1}
        def get():
            if shared is None:
                fill()
            return shared
        """,
        "shared",
    ),
    "cache": (
        """
        @functools.lru_cache
        def get():
            return {"size": 1}
        """,
        "get()",
    ),
    "cache_by_name": (
        """
        BASE = 1
        @functools.cache
        def load(name, *, scale):
            return {"size": BASE}
        def get():
            return load("train.yaml", scale=2)
        """,
        "load('train.yaml', scale=2)",
    ),
    "cached_property": (
        """
        class Config:
            @functools.cached_property
            def options(self):
                return {"size": 1}
        class Holder:
            config = Config()
        HOLDER = types.SimpleNamespace(config=Config())
        def get():
            return HOLDER.config.options
        """,
        "HOLDER.config.options",
    ),
    "singleton": (
        """
        class Single:
            instance = None
            def __new__(cls):
                if cls.instance is None:
                    cls.instance = super().__new__(cls)
                    cls.instance.options = {"size": 1}
                return cls.instance
        def get():
            return Single().options
        """,
        "Single.instance",
    ),
    "instance_of_class": (
        """
        class Lazy:
            def __init__(self):
                self.options = {"size": 1}
            @classmethod
            def get(cls):
                if not hasattr(cls, "made"):
                    cls.made = cls()
                return cls.made.options
        get = Lazy.get
        """,
        "Lazy.made",
    ),
}
"""Filled by the code on first use, and changed in place by the program."""

OTHERS = {
    "function_attribute": """
        def get():
            return get.options
        get.options = {"size": 1}
        """,
    "default": """
        def get(options={"size": 1}):
            return options
        """,
    "closure": """
        def keep(function):
            options = {}
            @functools.wraps(function)
            def kept():
                if not options:
                    options.update(function())
                return options
            return kept
        @keep
        def get():
            return {"size": 1}
        """,
    "registry": """
        REGISTRY = {}
        def register(function):
            REGISTRY[function.__name__] = function()
        @register
        def options():
            return {"size": 1}
        def get():
            return REGISTRY["options"]
        """,
    "registry_of_class": """
        class Registry:
            items = {}
            @classmethod
            def register(cls, name, value):
                cls.items[name] = value
        Registry.register("size", 1)
        def get():
            return Registry.items
        """,
}
"""State that counts whoever has changed it."""

NAMES = {"closure": "global options", "registry": "global REGISTRY", "registry_of_class": "attribute items"}

WRITER = """
import functools, types
from datamat import DatasetWriter, Features, IndexRow, Scalar
class Writer(DatasetWriter):
    name = "w"
    features = Features({"v": Scalar("int64")})
    def index(self, source):
        return [IndexRow(f"{n}", fields={"n": n}) for n in range(4)]
    def read(self, row):
        return {"v": row.fields["n"] * get()["size"]}
"""


def body_of(kind):
    return textwrap.dedent(KINDS[kind][0] if kind in KINDS else OTHERS[kind])


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Import a module with a writer that uses a memo of some kind, as a program does that starts."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def start(kind):
        (tmp_path / "memo_module.py").write_text(WRITER + body_of(kind))
        sys.modules.pop("memo_module", None)
        importlib.invalidate_caches()
        return importlib.import_module("memo_module")

    yield start
    sys.modules.pop("memo_module", None)


def job(module, tmp_path):
    return Prepared(module.Writer(), None, tmp_path / "out", executor=InlineExecutor())


def reasons(module, tmp_path):
    return [reason for change in job(module, tmp_path).status().changes for reason in change.reasons]


@pytest.mark.parametrize("kind", KINDS)
def test_memo_that_the_code_fills_is_no_change(imported, tmp_path, kind):
    """Rows that were read in this process have filled it, or the program did, to look at a sample."""
    module = imported(kind)
    assert job(module, tmp_path).run(progress=False).num_shards_written == 1
    assert module.get() == {"size": 1} and reasons(module, tmp_path) == []

    assert reasons(imported(kind), tmp_path) == []
    module = imported(kind)
    module.get()
    assert job(module, tmp_path).run(progress=False).num_shards_written == 0


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_what_the_program_puts_there_is_a_change(imported, tmp_path, kind):
    """Also if the run before had a value of its own, and if the next has none."""
    job(imported(kind), tmp_path).run(progress=False)
    name = f"memo_module.{KINDS[kind][1]}" if kind in KINDS else NAMES.get(kind, "writer code")
    for size in (5, 6):
        module = imported(kind)
        module.get()["size"] = size
        assert any(name in reason for reason in reasons(module, tmp_path)), reasons(module, tmp_path)
        job(module, tmp_path).run(progress=False)
        assert reasons(module, tmp_path) == []
        assert load(tmp_path / "out")["3"]["v"] == 3 * size

    assert any(name in reason for reason in reasons(imported(kind), tmp_path))


def test_memo_that_varies_with_the_rows_is_no_change(imported, tmp_path, monkeypatch):
    """What the last call left there decides nothing."""
    monkeypatch.setitem(
        KINDS,
        "counter",
        (
            """
            calls = 0
            def get():
                global calls
                calls += 1
                return {"size": 1}
            """,
            "calls",
        ),
    )
    module = imported("counter")
    job(module, tmp_path).run(progress=False)
    module.get()
    job(module, tmp_path).run(progress=False)

    module.get()
    assert reasons(module, tmp_path) == []


def test_memo_that_is_too_large_to_compare_is_named(imported, tmp_path, caplog):
    """A digest of a table of millions of entries would take seconds, in every process."""
    module = imported("global")
    module.get()["table"] = [0] * 2_000_000
    job(module, tmp_path).run(progress=False)
    (warning,) = caplog.messages
    assert "memo_module.kept" in warning

    module.get()["table"].append(1)
    assert reasons(module, tmp_path) == []


def fail(cache):
    raise TypeError(cache)


GC = gc.get_referents
LAYOUTS = {
    "results first": lambda cache: GC(cache)[::-1],
    "no table": lambda cache: [part for part in GC(cache) if type(part) is not dict],
    "further parts": lambda cache: [None, *GC(cache)],
    "keys alone": lambda cache: [key for part in GC(cache) if type(part) is dict for key in part],
    "none": lambda _: [],
    "an error": fail,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["cache", "cache_by_name"])
def test_cache_that_another_python_lays_out_differently_is_not_read(imported, monkeypatch, kind, layout):
    """A cache of which nothing is known for sure is untold; one without results needs no reading."""
    module = imported(kind)
    place = ("memo_module", "get()" if kind == "cache" else "load()")
    monkeypatch.setattr(gc, "get_referents", LAYOUTS[layout])

    assert read_memos([place]) == ({}, [])
    module.get()
    assert read_memos([place]) == ({}, [place])


PROGRAM = """
import logging, sys
import NAMES
from datamat import DatasetWriter, Features, IndexRow, Materializer, Scalar, ListOf, WorkerOptions, load

logging.basicConfig(format="%(message)s", stream=sys.stdout)
METHOD, KINDS = sys.argv[1], [NAMES]

@functools.lru_cache
def own():
    return {"size": 1}

class Writer(DatasetWriter):
    name = "w"
    features = Features({"v": ListOf(Scalar("int64"))})
    def index(self, source):
        return [IndexRow(f"{n}", fields={"n": n}) for n in range(8)]
    def read(self, row):
        if connections.get() is None or connections.load(connections) is None:
            raise ValueError(row.key)
        return {"v": [row.fields["n"] * get()["size"] for get in [*GETTERS, own]]}

GETTERS = [kind.get for kind in KINDS]
for number, get in enumerate([*GETTERS, own]):
    get()["size"] = number + 2
connections.get(), connections.load(connections)

writer = Writer()
workers = WorkerOptions(num_workers=2, start_method=METHOD)
Materializer(writer, None, "out").run(workers=workers, progress=False)
made = load("out")
print([row.key for row in writer.index(0) if made[row.key]["v"].tolist() != writer.read(row)["v"]])
"""

UNSENDABLE = """
import functools, sqlite3
kept, other = None, None
def get():
    global kept, other
    if kept is None:
        kept, other = sqlite3.connect(":memory:"), {"size": 1}
    return other
@functools.cache
def load(config):
    return {"size": 1}
"""


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("fork", marks=pytest.mark.long),
        "forkserver",
        pytest.param("spawn", marks=pytest.mark.long),
    ],
)
def test_workers_have_what_the_program_has_put_into_memos(tmp_path, method):
    """Of every kind, in modules and in the program; warnings name those that are not compared, and not sent."""
    names = [*KINDS, *OTHERS]
    for name in names:
        (tmp_path / f"{name}s.py").write_text("import functools, types\n" + body_of(name))
    (tmp_path / "connections.py").write_text(UNSENDABLE)
    sendable = ", ".join(f"{name}s" for name in names)
    source = PROGRAM.replace("import NAMES", f"import connections, functools, {sendable}").replace(
        "[NAMES]", f"[{sendable}]"
    )
    (tmp_path / "program.py").write_text(source)

    done = subprocess.run(
        [sys.executable, "program.py", method], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    *warned, wrong = done.stdout.splitlines() or ["nothing"]
    assert wrong == "[]", done.stdout + done.stderr
    named = [("connections.kept" in line, "connections.load" in line) for line in warned]
    assert named == [(False, True), (True, True)][: 1 if method == "fork" else 2]
