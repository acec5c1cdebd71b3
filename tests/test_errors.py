"""The messages of errors: each has a remedy and its place in the documentation, and is expected by a test."""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import linecache
import pathlib
import re
import runpy
import traceback
import types

import pytest

import datamat
from datamat import DatasetWriter, Features, IndexRow, Materializer, SampleError, Scalar, WorkerOptions
from datamat.errors import SchemaError, fold
from datamat.parallel.worker import pack_error
from datamat.parallel.workers import unpack_error

TESTS = pathlib.Path(__file__).parent
WITHOUT_TEST = TESTS / "errors_without_test.txt"

# A message of these is a part of a longer one, or carries the error of a worker: the docstring says what to do.
PARTS = {"CorruptDataError", "SampleError", "ParallelError", "BrokenPoolError", "WorkerDied", "TaskTimeout"}
ARE_PARTS = ("a record holds ", "row {number}: {text}", "transform {type}: {problem}", "{file}: the source gives bytes")


@functools.cache
def _pages():
    return types.SimpleNamespace(**runpy.run_path(str(TESTS.parent / "docs/pages.py")))


@functools.cache
def _messages():
    return _pages().messages()


@pytest.mark.timeout(300)  # all modules are parsed
def test_page_of_errors_is_as_the_code_makes_it():
    """`python docs/pages.py` writes it anew."""
    page = (TESTS.parent / "docs/errors.md").read_text()

    assert page == _pages().errors_page(_messages())


def test_every_exception_says_what_to_do():
    """The page shows it above the messages, for those that do not say it themselves."""
    short = [kind.__name__ for kind in _pages()._KINDS if len(inspect.getdoc(kind).split("\n\n")) < 2]

    assert not short


def test_every_message_says_what_to_do():
    """The remedy follows what was found: a message without one leaves its reader alone."""
    bare = [
        f"{message.module}: {message.text}"
        for message in _messages()
        if not message.remedy and message.kind not in PARTS and not message.text.startswith(ARE_PARTS)
    ]

    assert not bare, "\n".join(bare)


@pytest.mark.timeout(300)  # all tests are parsed
def test_every_message_is_expected_by_a_test():
    """A test holds words that no other message has; the list of those without one may only shrink."""
    listed = WITHOUT_TEST.read_text().splitlines()

    found = [f"{message.kind}: {message.text}" for message in _without_test()]

    assert sorted(set(found) - set(listed)) == [], "give these a test: pytest.raises(..., match=...)"
    assert sorted(set(listed) - set(found)) == [], f"these have a test now: remove them from {WITHOUT_TEST.name}"


def test_words_of_tests_are_told_from_those_of_other_messages():
    """Words that several messages share count for none, and a value of a word may stand where the code has a name."""
    expected = set(_runs("quality is 101; want 1 to 100", with_values=True))

    assert set(_runs("quality is * want 1 to 100")) & expected
    assert ("quality", "is", "*", "want") in expected
    assert not set(_runs("size is * pass 1 or more")) & expected


def _without_test():
    """Return the messages of which no test holds the words that tell them from the others."""
    runs = {message: set(_runs(re.sub(r"\{.*?\}", " * ", message.text))) for message in _messages()}
    num_messages = collections.Counter(run for message in runs for run in runs[message])
    expected = _expected()
    for message, own in runs.items():
        least = min((num_messages[run] for run in own), default=0)
        if not any(run in expected for run in own if num_messages[run] == least):
            yield message


def _expected():
    """Return the runs of words in the text of all tests, of docstrings and comments apart."""
    found = set()
    for path in TESTS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                text = re.sub(r"\\(?=[^\w\s])", "", node.value)  # as in a pattern for `match`
                for piece in re.split(r"\.\*|\.\+|\n", text):
                    found.update(_runs(piece.replace("*", ""), with_values=True))
    return found


def _runs(text, *, with_values=False):
    """Yield the runs of two to four words of a text, where `*` stands for a value; each word inside may be one."""
    words = re.findall(r"\*|[\w=']+", text)
    for length in range(2, 5):
        for run in zip(*(words[start:] for start in range(length)), strict=False):
            if run[0] != "*" != run[-1]:
                yield run
            if with_values:
                yield from ((*run[:place], "*", *run[place + 1 :]) for place in range(1, length - 1))


class Failing(DatasetWriter):
    """A writer whose `read` fails in a method of its own."""

    name = "failing"
    features = Features({"x": Scalar("int64")})

    def index(self, source):
        """Return one row."""
        del source
        return [IndexRow("a", "train", {})]

    def read(self, row):
        """Fail."""
        return {"x": self.look_up(row)}

    def look_up(self, row):
        """Fail."""
        return {}["gone"]


def test_error_in_read_shows_the_lines_of_the_user_first(tmp_path):
    """No frame of datamat is above them, and few below: a reader sees what to correct."""
    with pytest.raises(SampleError, match="'gone'") as caught:
        Materializer(Failing(), None, tmp_path / "out", workers=WorkerOptions(num_workers=1)).run(progress=False)

    told = "".join(traceback.format_exception(caught.value)).splitlines()
    frames = [line for line in told if line.startswith("  File ")]
    assert "in read" in frames[0]
    assert "in look_up" in frames[1]
    assert [frame for frame in frames if f"{pathlib.Path(datamat.__file__).parent}/" in frame] == frames[-3:]
    assert not getattr(caught.value, "__notes__", [])


def test_error_of_a_function_shows_its_line_first(tmp_path):
    """The first item, from which the features are inferred, fails like any other."""
    with pytest.raises(SampleError, match="modulo by zero") as caught:
        datamat.materialize(lambda item: {"x": 1 // item}, [0], tmp_path / "out", progress=False)

    frames = re.findall(r'^  File "(.+)", line', "".join(traceback.format_exception(caught.value)), re.MULTILINE)
    assert frames[0] == __file__
    assert len([frame for frame in frames if "datamat/" in frame.removeprefix(str(TESTS))]) <= 1


def test_error_of_datamat_itself_keeps_its_frames():
    """They are what a report of a defect needs."""
    error = _raised_by(lambda: datamat.errors.join_problems(None))
    frames = traceback.extract_tb(error.__traceback__)

    fold(error)

    assert not isinstance(error, datamat.DatamatError)
    assert traceback.extract_tb(error.__traceback__) == frames


def test_cause_of_a_sample_error_is_folded_too():
    """It arose in the user's code, which datamat called."""
    error = SampleError("a", "it failed")
    error.__cause__ = _raised_by(lambda: Features({"x": Scalar("no such dtype")}))

    fold(error)

    assert isinstance(error.__cause__, SchemaError)
    assert [frame.name for frame in traceback.extract_tb(error.__cause__.__traceback__)][:1] == ["_raised_by"]


def _raised_by(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def test_traceback_of_a_worker_has_the_lines_of_a_cell(monkeypatch):
    """A worker does not have the source of a notebook's cell; the process that shows the error has."""
    cell = "/tmp/ipykernel_1/2.py"
    code = "def fail():\n    raise ValueError('in a cell')\n"
    made: dict[str, object] = {}
    exec(compile(code, cell, "exec"), made)
    packed = pack_error(_raised_by(made["fail"]))
    monkeypatch.setitem(linecache.cache, cell, (len(code), None, code.splitlines(keepends=True), cell))

    told = str(unpack_error(packed).__cause__)

    assert f"  File \"{cell}\", line 2, in fail\n    raise ValueError('in a cell')\n" in told
