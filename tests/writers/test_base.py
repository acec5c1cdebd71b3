"""The plug-in: every way to name one, and the moments at which it is called."""

import inspect
import os
import sys

import pytest

from datamat import (
    DatasetWriter,
    Features,
    ImportWriter,
    IndexRow,
    Materializer,
    MissingDependencyError,
    OptionError,
    Scalar,
    Text,
    WorkerOptions,
    load,
)
from datamat.testing import InlineExecutor
from datamat.writers.base import bind_writer, resolve_writer, writer_names
from datamat.writers.camvid import CamVidWriter


class Squares(DatasetWriter):
    """The smallest writer."""

    name = "squares"
    features = Features({"square": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"{n:03d}", fields={"n": n}) for n in range(int(source))]

    def read(self, row):
        return {"square": row.fields["n"] ** 2}


class Unread(DatasetWriter):
    """One that lacks a method."""

    def index(self, source):
        return []


class Outer:
    """A place for a writer inside another class."""

    class Inner(Squares):
        """Found by its qualified name."""


class Learning(Squares):
    """Its features come from the source."""

    features = None

    def bind(self, source):
        self.features = Features({"square": Scalar("int64"), f"of_{source}": Text()})


@pytest.mark.parametrize(
    "writer",
    [Squares, Squares(), f"{__name__}:Squares", f"{__name__}:Outer.Inner"],
    ids=["class", "instance", "a", "b"],
)
def test_writers_are_found_however_they_are_named(writer):
    """A class is instantiated; an instance is used as it is."""
    found = resolve_writer(writer)

    assert isinstance(found, Squares)
    assert found.read(IndexRow("a", fields={"n": 3})) == {"square": 9}
    assert found is writer or not isinstance(writer, DatasetWriter)


def test_registered_writers_are_found_by_name(tmp_path):
    """Those of datamat, and those of other packages."""
    names = writer_names()

    assert {"camvid", "coco", "image_folder", "pedestrian", "table"} <= set(names)
    assert names == sorted(names)
    (tmp_path / "train.txt").write_text("")
    assert isinstance(resolve_writer("camvid"), CamVidWriter)


def test_names_of_writers_are_listed_without_importing_them():
    """A package that cannot be imported does no harm."""
    before = set(sys.modules)

    writer_names()

    assert not [name for name in set(sys.modules) - before if name.startswith("datamat.writers.")]


@pytest.mark.parametrize(
    ("writer", "error", "word"),
    [
        ("camvit", OptionError, "registered writers are camvid"),
        ("", OptionError, "registered writers are camvid"),
        (f"{__name__}:Cubes", OptionError, "no 'Cubes'"),
        (f"{__name__}:Squares.Inner", OptionError, r"no 'Squares\.Inner'"),
        (f"{__name__}:", OptionError, "want 'package.module:Class'"),
        (":Class", OptionError, "want 'package.module:Class'"),
        ("no_such_module:A", MissingDependencyError, "no_such_module"),
        (f"{__name__}:os", OptionError, "want a DatasetWriter"),
        (3, OptionError, "writer is 3"),
        (None, OptionError, "writer is None"),
        (dict, OptionError, "dict"),
        (DatasetWriter, OptionError, "no index and no read"),
        (Unread, OptionError, "no read"),
    ],
)
def test_what_is_no_writer_is_refused(writer, error, word):
    """The error lists the registered writers, or says what is wanted."""
    with pytest.raises(error, match=word):
        resolve_writer(writer)


def test_arguments_of_a_writer_are_shown():
    """By `help`, and by editors: those of its own `__init__`."""
    assert {"kind", "columns", "rename"} <= {*inspect.signature(ImportWriter).parameters}


def test_writer_that_needs_arguments_is_passed_as_an_instance():
    """The error says so."""

    class Powers(Squares):
        def __init__(self, exponent):
            self.exponent = exponent

    with pytest.raises(OptionError, match=r"exponent.*pass an instance"):
        resolve_writer(Powers)
    assert resolve_writer(Powers(3)).exponent == 3


@pytest.mark.parametrize("features", [None, {"square": Scalar("int64")}, Features])
def test_writer_without_features_is_refused(features):
    """The error comes before anything is indexed."""
    wrong = type("Wrong", (Squares,), {"features": features})

    with pytest.raises(OptionError, match=r"Wrong\.features"):
        bind_writer(wrong(), 3)


def test_source_is_bound_before_features_are_asked_for():
    """They may depend on it: class names, columns."""
    for source in (5, "x"):
        writer = Learning()
        bind_writer(writer, source)
        assert list(writer.features) == ["key", "square", f"of_{source}"]


def test_bind_is_called_once_and_before_the_index(tmp_path):
    """It gets the source as it was given."""
    calls = []

    class Noting(Squares):
        def bind(self, source):
            calls.append(("bind", source))

        def index(self, source):
            calls.append(("index", source))
            return super().index(source)

    Materializer(Noting(), 4, tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    assert calls == [("bind", 4), ("index", 4)]


def test_each_worker_is_set_up_once_before_its_first_sample(tmp_path):
    """What it opens there is available in `read`; the parent is not set up."""
    log = tmp_path / "log"

    class Opening(Squares):
        features = Features({"square": Scalar("int64"), "pid": Scalar("int64")})

        def setup_worker(self):
            self.pid = os.getpid()
            with open(log, "a") as file:
                file.write(f"{self.pid}\n")

        def read(self, row):
            return {**super().read(row), "pid": self.pid}

    writer = Opening()
    Materializer(writer, 300, tmp_path / "out").run(workers=WorkerOptions(num_workers=2), progress=False)

    pids = [int(line) for line in log.read_text().split()]
    assert 1 <= len(pids) == len(set(pids)) <= 2
    assert os.getpid() not in pids
    assert {int(sample["pid"]) for sample in load(tmp_path / "out")} == set(pids)
    assert not hasattr(writer, "pid")
