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

import numpy as np
import pytest

import datamat
from datamat import (
    ClassLabel,
    DatasetWriter,
    ErrorPolicy,
    Features,
    Image,
    ImportWriter,
    IndexRow,
    Keypoints,
    Materializer,
    PathosExecutor,
    SampleError,
    Scalar,
    Video,
    WorkerOptions,
    compute_chunksize,
)
from datamat.codecs import encode_jpeg
from datamat.errors import SchemaError, fold
from datamat.parallel.worker import pack_error
from datamat.parallel.workers import unpack_error
from datamat.readers.speed import measure_reading
from datamat.run.limits import parse_bytes

TESTS = pathlib.Path(__file__).parent

# A message of these is a part of a longer one, or carries the error of a worker: the docstring says what to do.
PARTS = {"CorruptDataError", "SampleError", "ParallelError", "BrokenPoolError", "WorkerDied", "TaskTimeout"}
ARE_PARTS = ("a record holds ", "row {number}: {text}", "transform {type}: {problem}", "{file}: the source gives bytes")


VALUE = "VALUE"
"""What stands in the pattern of a test for `[^;]+` and its like: any value, of one word or several."""


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
    """A test holds words that no other message has."""
    assert not [f"{message.module}: {message.text}" for message in _without_test()], "pytest.raises(..., match=...)"


def test_words_of_tests_are_told_from_those_of_other_messages():
    """Words that several messages share count for none, and a value of a word may stand where the code has a name."""
    expected = set(_runs("quality is 101; want 1 to 100", with_values=True))

    assert set(_runs("quality is * want 1 to 100")) & expected
    assert ("quality", "is", "*", "want") in expected
    assert not set(_runs("size is * pass 1 or more")) & expected


def _without_test():
    """Return the messages of which no test holds the words that tell them from the others.

    Those of one word, such as `row {number}: {text}`, are left out: what they carry is a message of its own.
    """
    runs = {message: set(_runs(re.sub(r"\{.*?\}", " * ", message.text))) for message in _messages()}
    num_messages = collections.Counter(run for message in runs for run in runs[message])
    expected = _expected()
    for message, own in runs.items():
        least = min((num_messages[run] for run in own), default=0)
        if own and not any(run in expected for run in own if num_messages[run] == least):
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
                text = re.sub(r"\[\^.\]\+", f" {VALUE} ", text)
                for piece in re.split(r"\.\*|\.\+|\n", text):
                    found.update(_runs(piece.replace("*", ""), with_values=True))
    return found


def _runs(text, *, with_values=False):
    """Yield the runs of two to four words of a text, where `*` stands for a value; each word inside may be one."""
    words = re.findall(r"\*|[\w']+=?", text)
    for length in range(2, 5):
        for run in zip(*(words[start:] for start in range(length)), strict=False):
            if run[0] != "*" != run[-1]:
                yield run
            if with_values:
                yield from ((*run[:place], "*", *run[place + 1 :]) for place in range(1, length - 1))
                yield tuple("*" if word == VALUE else word for word in run)


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


def test_chain_of_causes_that_is_a_ring_is_folded():
    """An error that is caught and raised again from another one may be among its own causes."""
    first, second = SampleError("a", "it failed"), _raised_by(lambda: Features({"x": Scalar("no such dtype")}))
    first.__cause__, second.__cause__ = second, first

    fold(first)

    assert [frame.name for frame in traceback.extract_tb(second.__traceback__)][:1] == ["_raised_by"]


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


# Messages that nothing else provokes.

REFUSED = [
    (
        lambda: WorkerOptions(start_method="thread"),
        "WorkerOptions: start_method is 'thread'; want 'fork',",
    ),
    (lambda: WorkerOptions(affinity="all"), "WorkerOptions: affinity is 'all'; want 'physical', 'pinned' or None"),
    (lambda: WorkerOptions(max_retries=-1), "WorkerOptions: max_retries is -1; want 0 or more"),
    (lambda: WorkerOptions(num_workers=0), "num_workers is 0; want a positive number, or None for the default"),
    (lambda: ErrorPolicy("skip", max_errors=-1), "ErrorPolicy: max_errors is -1; want a number of samples, a share"),
    (lambda: encode_jpeg(np.zeros((2, 2, 3), np.uint8), quality=0), "encode_jpeg: quality is 0; want 1 to 100"),
    (lambda: Image(encoding="jpeg", quality=101), "Image: quality is 101; want 1 to 100"),
    (lambda: ClassLabel(num_classes=3, shape=(2, 3)), "ClassLabel: shape is (2, 3); want one size at most"),
    (lambda: ClassLabel(names=("a", "b"), num_classes=3), "2 names for num_classes=3; leave num_classes out"),
    (lambda: Keypoints(shape=(2, 2), names=("a",)), "Keypoints: 1 names for the shape (2, 2); want one for each point"),
    (lambda: Video(fps=0), "Video: fps is 0; want a positive number, or None"),
    (lambda: PathosExecutor(max_retries=-1), "max_retries is -1; pass how often a call may be repeated, 0 or more"),
    (lambda: compute_chunksize(5, 0), "num_workers is 0; pass the number of worker processes, 1 or more"),
    (lambda: _job(seed=-1), "seed is -1; want an int, not negative"),
    (lambda: _job().write_part(None, None), "write_part belongs to a run; call run(), which dispatches it"),
    (lambda: _job().seal_shard("", "", 1, ""), "seal_shard belongs to a run; call run(), which dispatches it"),
    (lambda: _job().verify(sample=2), "verify: sample=2; want a share of the rows, above 0 and up to 1"),
    (
        lambda: _job(writer="no/such/writer").run(),
        "there is no writer 'no/such/writer', nor a file or folder of that name",
    ),
    (lambda: ImportWriter(rename="img"), "rename is 'img'; want new names by old ones, as in rename={'img': 'image'}"),
    (lambda: parse_bytes("much"), "size 'much': want a positive number of bytes, or text as in '20GB'"),
]


READS = [
    (lambda data: data.take(-1), "take(-1); want a number of records, 0 or more"),
    (lambda data: data.preview(count=0), "preview: count=0; want at least 1 sample"),
    (lambda data: data.to_numpy(2, pad=7), "pad is 7; want fields and what fills them up, as in pad={'tokens': 0}"),
    (lambda data: datamat.concat([data, 3]), "3 is no dataset; want what load returned, or what was selected from it"),
    (lambda data: data.to_numpy(bucket={"x": 5}), "bucket and pack want a field of sequences, and 'x' is none"),
    (
        lambda data: datamat.load(data.path, errors=ErrorPolicy("quarantine")),
        "readers raise or skip; want 'raise', 'skip'",
    ),
    (lambda data: measure_reading(data.path, readers=["disk"]), "bench: there is no reader 'disk'; want"),
    (lambda data: measure_reading(data.path, num_workers=[]), "bench: num_workers is empty; want 0 or more"),
]


def _job(**options):
    return Materializer(options.pop("writer", Failing()), None, "out", **options)


@pytest.mark.parametrize(("call", "told"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_makes_no_sense_is_refused_with_the_remedy(call, told, tmp_path, monkeypatch):
    """Each before anything is written."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(datamat.DatamatError, match=re.escape(told)):
        call()

    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A directory of a few numbers."""
    folder = tmp_path_factory.mktemp("numbers") / "out"
    datamat.materialize(lambda item: {"x": item}, range(4), folder, progress=False)
    return datamat.load(folder)


@pytest.mark.parametrize(("call", "told"), READS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_read_is_refused_with_the_remedy(call, told, numbers):
    """Before a record is read, where that can be known."""
    with pytest.raises(datamat.DatamatError, match=re.escape(told)):
        call(numbers)
