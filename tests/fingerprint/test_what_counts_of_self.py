"""Which attributes count: those that the code for samples reads, except for those that it fills."""

from __future__ import annotations

import dis
import functools
import importlib
import subprocess
import sys
import textwrap

import pytest
from prepared import Prepared

from datamat import DatasetWriter, Features, IndexRow, Scalar, materialize
from datamat.fingerprint import code, fingerprint
from datamat.plan.digests import as_drawn, as_written
from datamat.testing import InlineExecutor


def digest(value):
    return fingerprint(value, where="value")


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Return an instance of a class with these lines in its body."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit within a second may leave a file's size and time

    def make(body, **attributes):
        source = "import functools, operator\nclass Base:\n    def base(self):\n        return self.scale\n"
        source += "def helper(trainer):\n    return trainer.scale\n"
        source += "class Trainer(Base):\n" + textwrap.indent(textwrap.dedent(body), "    ")
        (tmp_path / "training.py").write_text(source)
        sys.modules.pop("training", None)
        importlib.invalidate_caches()
        made = importlib.import_module("training").Trainer()
        vars(made).update({"scale": 2, "w": 0.0, "log": []} | attributes)
        return made

    yield make
    sys.modules.pop("training", None)


FACTOR = "def factor(self):\n    return self.scale\ndef make_sample(self, n):\n"


@pytest.mark.parametrize(
    "body",
    [
        "def make_sample(self, n):\n    return {'n': n * self.scale}",
        "def make_sample(self, n):\n    return {'n': n * self.base()}",
        "def make_sample(self, n):\n    return {'n': n * super().base()}",
        f"@property\n{FACTOR}    return {{'n': n * self.factor}}",
        "def make_sample(self, n):\n    return {'n': [m * self.scale for m in range(n)]}",
        "def make_sample(self, n):\n    inner = lambda: self.scale\n    return {'n': n * inner()}",
        f"@functools.cached_property\n{FACTOR}    return {{'n': n * self.factor}}",
        f"@functools.lru_cache\n{FACTOR}    return {{'n': n * self.factor()}}",
        f"{FACTOR.replace('factor(self)', '__getattr__(self, name)')}    return {{'n': n * self.absent}}",
    ],
)
@pytest.mark.parametrize("way", ["method", "lambda"])
def test_of_self_only_what_is_read_counts(trainer, body, way):
    """A weight that training changed does not count; a setting that the method, or one that it calls, reads does."""
    body += "\ndef step(self):\n    self.w += 1\n"

    def counted(**attributes):
        made = trainer(body, **attributes)
        return digest(made.make_sample if way == "method" else lambda n: made.make_sample(n))

    before = counted()
    assert counted(w=1.5, log=[1], more=iter([1])) == before
    assert counted(scale=3) != before


@pytest.mark.parametrize("attributes", [{}, {"w": 0.0}], ids=["none", "one"])
def test_unused_methods_of_an_object_without_attributes_do_not_count(attributes):
    """Of a pytest test class, the methods in use count, not the whole class."""

    def counted(number, loop):
        namespace = {"LOOP": loop, "__name__": "mine"}
        making = f"k = {number}\ndef make(self, n):\n    return n * self.k\n"
        exec("class C:\n" + textwrap.indent(making + "def fit(self):\n    return LOOP\n", "    "), namespace)
        made = namespace["C"]()
        vars(made).update(attributes)
        return digest(made.make)

    assert counted(3, 1) == counted(3, 2) != counted(4, 1)


@pytest.mark.parametrize(
    "body",
    [
        "def make_sample(self, n):\n    return helper(self)",
        "def make_sample(self, n):\n    return getattr(self, 'sca' + 'le')",
        "def make_sample(self, n):\n    return vars(self)['scale']",
        "def make_sample(self, n):\n    return self.__dict__['scale']",
        "def make_sample(self, n):\n    me = self\n    return me.scale",
        "def make_sample(self, n):\n    return operator.attrgetter('scale')(self)",
        "def make_sample(self, n):\n    return [self][0].scale",
        "def make_sample(*args):\n    return args[0].scale",
    ],
)
def test_everything_counts_where_self_is_passed_on(trainer, body):
    """The fingerprint cannot see what is read of it."""
    before = digest(trainer(body).make_sample)

    assert digest(trainer(body, scale=3).make_sample) != before
    assert digest(trainer(body, w=1.5).make_sample) != before


def test_only_code_that_is_used_counts(trainer):
    """An edited training loop changes no sample."""
    body = "limit = 3\ndef make_sample(self, n):\n    return self.limit * self.double(n)\n"
    body += "def double(self, n):\n    return 2 * n\ndef step(self):\n    self.w += 1\n"
    before = digest(trainer(body).make_sample)

    assert digest(trainer(body.replace("w += 1", "w += 2")).make_sample) == before
    assert digest(trainer(body.replace("2 * n", "3 * n")).make_sample) != before
    assert digest(trainer(body.replace("limit = 3", "limit = 4")).make_sample) != before


class Numbers(DatasetWriter):
    name = "numbers"
    features = Features({"n": Scalar("int64")})

    def __init__(self, scale=1):
        self.scale = scale
        self.unused = 0
        self.table = None
        self.seen = {}
        self.names: list[str] = []
        self.classes = {}
        self.start = None

    def bind(self, source):
        self.classes["a"] = source
        self.start = source

    def index(self, source):
        return [IndexRow(f"{n:02d}", fields={"n": n}) for n in range(8)]

    def setup_worker(self):
        self.stream = iter([1, 2])

    def read(self, row):
        if self.table is None:
            self.table = {"factor": 1}
        seen = self.seen
        seen[row.key] = 1
        self.names.append(row.key)
        return {"n": row.fields["n"] * self.scale * self.table["factor"] * self._factor + self.start}

    @functools.cached_property
    def _factor(self):
        return 1


def counted(writer):
    writer.bind(0)
    return digest(as_written(writer))


def test_memo_of_read_is_no_change(tmp_path):
    """The same job, run again in this process after some work, has nothing to do."""
    writer = Numbers()
    job = Prepared(writer, 0, tmp_path / "out", executor=InlineExecutor())
    before = digest(as_written(writer))
    assert job.run(progress=False).num_shards_written == 1
    writer.setup_worker()
    for number in range(3):
        writer.read(IndexRow(f"{number}", fields={"n": number}))
    job.replay("03")

    assert writer.table and writer.seen and writer.names
    assert digest(as_written(writer)) == before
    assert job.status().changes == ()
    assert job.run(progress=False).num_shards_written == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda writer: setattr(writer, "scale", 2),
        lambda writer: setattr(writer, "start", 5),
        lambda writer: writer.classes.update(b=1),
    ],
)
def test_options_of_a_writer_count(change):
    """So does what `bind` has learned from the source."""
    writer = Numbers()
    before = counted(writer)
    change(writer)

    assert digest(as_written(writer)) != before


class Limited(Numbers):
    """`read` takes an attribute beside a local variable, which Python 3.13 loads in one instruction with `self`."""

    def read(self, row):
        number = len(row.key)
        return {"n": min(number, self.scale)}


@pytest.mark.parametrize("kind", [Numbers, Limited])
def test_attribute_that_no_method_reads_does_not_count(kind):
    """A count that the program keeps is an example."""
    writer = kind(2)
    before = counted(writer)
    writer.unused = 7

    assert digest(as_written(writer)) == before != counted(kind(3))


class Rescaled(Numbers):
    """`read` assigns an attribute that was an option."""

    def read(self, row):
        if self.scale is None:
            self.scale = 3
        return super().read(row)


def test_option_that_read_fills_in_counts():
    """Other code of the class assigned it, so it is not a memo."""
    assert counted(Rescaled(2)) != counted(Rescaled(4))


class Shift:
    """A transform with a memo and an option."""

    def __init__(self, amount):
        self.amount = amount
        self.calls = {}

    def __call__(self, sample, rng):
        self.calls[sample["key"]] = 1
        return {**sample, "n": sample["n"] + self.amount}


def test_transform_counts_by_what_its_call_reads():
    """A transform counts by `__call__`, as a writer by `read`."""
    one, other = Shift(1), Shift(2)
    before = digest(as_drawn(one))
    one({"key": "a", "n": 1}, None)

    assert digest(as_drawn(one)) == before != digest(as_drawn(other))


class Learner:
    """A training class in a notebook makes its data and trains on them."""

    def __init__(self):
        self.w, self.scale = 0.0, 2
        self.lines = iter([1, 2])

    def make_sample(self, n):
        return {"n": n * self.scale}

    def run(self, output):
        return materialize(self.make_sample, range(12), output, executor=InlineExecutor(), progress=False)


def test_training_step_rebuilds_nothing(tmp_path):
    """Attributes that the method does not read need not be fingerprintable."""
    learner = Learner()
    assert learner.run(tmp_path).num_shards_written > 0

    learner.w += 1

    assert learner.run(tmp_path).num_shards_written == 0
    learner.scale = 3
    assert learner.run(tmp_path).num_shards_written > 0


def test_instructions_of_later_pythons_are_read_as_what_they_stand_for():
    """Python 3.14 borrows references, and has no instruction of its own for `[]` and for small numbers."""
    load = next(step for step in dis.get_instructions(lambda x: x) if step.opname.startswith("LOAD_FAST"))

    def made(name, value, text=""):
        return load._replace(opname=name, argval=value, argrepr=text)

    steps = [made("LOAD_FAST_BORROW", "a"), made("LOAD_FAST_BORROW_LOAD_FAST_BORROW", ("b", "c"))]
    found = list(code._singly(steps))

    assert [(step.opname, step.argval) for step in found] == [("LOAD_FAST", name) for name in "abc"]
    assert {step.opcode for step in found} == {dis.opmap["LOAD_FAST"]}
    read = [made("LOAD_ATTR", "environ"), made("LOAD_CONST", "HOME"), made("BINARY_OP", 26, "[]")]
    read[1] = read[1]._replace(opcode=dis.opmap["LOAD_CONST"])
    assert code._key(None, read, 0, {}) == "HOME"
    assert code._loads_constant(made("LOAD_SMALL_INT", 0)) and code._is_empty([made("LOAD_SMALL_INT", 0), load], 1)
    assert not code._is_empty([made("LOAD_SMALL_INT", 2), load], 1)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are made when the class is")
def test_annotations_that_only_a_type_checker_knows_hinder_nothing(tmp_path, monkeypatch):
    """Python 3.14 makes them when they are asked for; the names in them may not be there."""
    source = """
from datamat import DatasetWriter, Features, IndexRow, Materializer, Scalar, WorkerOptions, load
class Holder(DatasetWriter):
    name = "holder"
    features = Features({"n": Scalar("int64")})
    table: Missing
    size: int = 3
    def index(self, source) -> Nowhere:
        return [IndexRow(str(n), "train", {"n": n}) for n in range(4)]
    def read(self, row: Absent):
        return {"n": row.fields["n"] * self.size}
"""
    run = """
for method in ("spawn", "fork"):
    Materializer(Holder(), None, method).run(workers=WorkerOptions(num_workers=1, start_method=method), progress=False)
    assert sorted(int(sample["n"]) for sample in load(method)) == [0, 3, 6, 9]
"""
    (tmp_path / "script.py").write_text(source + run)
    (tmp_path / "holders.py").write_text(source)
    (tmp_path / "others.py").write_text(source.replace("table: Missing", "table: Other"))
    monkeypatch.syspath_prepend(str(tmp_path))

    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=50)

    first, other = (importlib.import_module(name).Holder for name in ("holders", "others"))
    assert digest(first()) == digest(first()) != digest(other())
