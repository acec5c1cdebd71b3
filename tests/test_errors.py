"""Errors as users see them: their texts, their page, and tracebacks that begin with the user's own lines.

`tests/golden/messages.txt` is a sample of the texts, one or more of each class. To renew it:

    python tests/test_errors.py
"""

from __future__ import annotations

import inspect
import linecache
import os
import pathlib
import re
import signal
import tempfile
import traceback

import numpy as np
import pytest
from small_rows import FailingRows, job, shard_of

import datamat
from datamat import (
    ClassLabel,
    DatamatError,
    ErrorPolicy,
    Features,
    Image,
    ImportWriter,
    Index,
    IndexRow,
    Keypoints,
    ListOf,
    PathosExecutor,
    SampleError,
    Scalar,
    ShardOptions,
    Tensor,
    Video,
    WorkerOptions,
    compute_chunksize,
    errors,
)
from datamat.codecs import encode_jpeg
from datamat.directory.files import locked
from datamat.errors import SchemaError, fold, require_package
from datamat.parallel.worker import pack_error
from datamat.parallel.workers import unpack_error
from datamat.testing import InlineExecutor

TESTS = pathlib.Path(__file__).parent
GOLDEN = TESTS / "golden/messages.txt"
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DatamatError) and kind is not DatamatError
]


def finished(**options):
    """Make a directory, and return its path."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=".")) / "out"
    job(folder, **options).run(progress=False)
    return folder


def truncated():
    """Return a directory of which a shard is empty."""
    os.truncate(shard_of(folder := finished()), 0)
    return folder


def edited():
    """Return a directory whose manifest was edited."""
    manifest = finished() / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed":0', '"seed":1').replace('"seed": 0', '"seed": 1'))
    return manifest.parent


def run_locked():
    """Run a job whose output another one holds."""
    pathlib.Path("held/.datamat").mkdir(parents=True)
    with locked(pathlib.Path("held/.datamat/lock")):
        job("held").run(progress=False)


def called(function, *arguments, **options):
    """Call a function in a worker."""
    with PathosExecutor(1, start_method="fork", **options) as pool:
        pool.submit(function, *arguments).result(timeout=60)


def fail(kind=ImportError):
    """Fail, in the initializer of a worker or in a call."""
    raise kind("no such library")


def wait_for_ever():
    """Wait for ever."""
    signal.pause()


class Local(Exception):
    """An error that cannot travel."""

    def __reduce__(self):
        raise TypeError("it stays here")


NUMBERS = iter(())
VARYING = {
    r"(\./)?tmp\w{8}/": "TMP/",
    r"\[\d+\]": "[N]",
    r"(process|worker) \(?\d+\)?": r"\1 PID",
    r"[;,] peak memory.*": "",
    r"\.py:\d+": ".py:N",
}
"""What differs from run to run, and what stands for it."""

PROVOKED = [
    lambda: WorkerOptions(start_method="thread"),
    lambda: WorkerOptions(affinity="all"),
    lambda: WorkerOptions(max_retries=-1),
    lambda: WorkerOptions(num_workers=0),
    lambda: ShardOptions(num_shards=2, records_per_shard=3),
    lambda: ErrorPolicy("skip", max_errors=-1),
    lambda: encode_jpeg(np.zeros((2, 2, 3), np.uint8), quality=0),
    lambda: PathosExecutor(max_retries=-1),
    lambda: compute_chunksize(5, 0),
    lambda: job("out", seed=-1),
    lambda: job("out").verify(sample=2),
    lambda: ImportWriter(rename="img"),
    lambda: datamat.load(finished()).take(-1),
    lambda: datamat.load(finished()).preview(count=0),
    lambda: datamat.load(finished()).to_numpy(2, pad=7),
    lambda: datamat.concat([3]),
    lambda: datamat.load(finished(), errors=ErrorPolicy("quarantine")),
    lambda: job("out", rows=[]).run(progress=False),
    lambda: job("out", rows=[IndexRow("a", "train", {})] * 2).run(progress=False),
    lambda: job("out", rows=[IndexRow("a", "tr/in", {})]).run(progress=False),
    lambda: list(Index.from_lists(".", {"train": "nowhere.txt"}, fields=["image"])),
    lambda: Image(encoding="jpeg", quality=101),
    lambda: ClassLabel(names=("a", "b"), num_classes=3),
    lambda: Keypoints(shape=(2, 2), names=("a",)),
    lambda: Video(fps=0),
    lambda: ListOf(ListOf(ListOf(Scalar("int64")))),
    lambda: Features({"image": Image((48, 36, 3))}).encode({"key": "a", "image": np.zeros((36, 48, 3), np.float32)}),
    lambda: Features({"x": Tensor((2,), "int64")}).encode({"key": "a"}),
    lambda: datamat.describe("strange"),
    lambda: Features({"image": Image()}).encode({"key": "a", "image": b"\xff\xd8\xff"}),
    lambda: job("out", FailingRows()).run(progress=False),
    lambda: job("out", transform=lambda sample, numbers=NUMBERS: sample, copies=2).run(progress=False),
    lambda: datamat.load("nowhere"),
    lambda: datamat.load("."),
    run_locked,
    lambda: job("out", FailingRows(), errors=ErrorPolicy("skip", max_errors=1)).run(progress=False),
    lambda: datamat.load(truncated())[0],
    lambda: datamat.load(edited()),
    lambda: require_package("no_such_package", "this test"),
    lambda: called(fail, Local),
    lambda: called(len, (number for number in ())),
    lambda: called(os._exit, 3, max_retries=0),
    lambda: called(wait_for_ever, task_timeout_s=0.1),
    lambda: called(len, [], initializer=fail),
]


def texts():
    """Return class and first line of each error, without what differs from machine to machine."""
    pathlib.Path("strange").write_bytes(b"something else entirely")
    found = []
    for provoke in PROVOKED:
        error = _raised_by(provoke)
        text = str(error).partition("\n")[0].replace(os.getcwd(), "HERE")
        for varying, name in VARYING.items():
            text = re.sub(varying, name, text)
        public = next(kind for kind in type(error).__mro__ if kind in KINDS)
        found.append(f"{public.__name__}: {text}")
    return found


def test_texts_are_as_before(tmp_path, monkeypatch):
    """Each gives the place, what was found, what was wanted and what to do; a change of wording shows in the diff."""
    monkeypatch.chdir(tmp_path)

    found = texts()

    assert "\n".join(found) + "\n" == GOLDEN.read_text(), f"if the new texts are better: python {__file__}"
    assert {line.partition(":")[0] for line in found} == {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_exception_is_documented_with_cause_and_remedy(kind):
    """In its docstring, and on the page of errors."""
    page = (TESTS.parent / "docs/errors.md").read_text()
    section = page.partition(f"\n## {kind.__name__}\n")[2].partition("\n## ")[0]

    assert len(inspect.getdoc(kind).split("\n\n")) > 1
    assert re.search(r"^\| cause \| remedy \|\n\| --- \| --- \|\n\| .+ \| .+ \|$", section, re.MULTILINE)


def test_error_in_read_shows_the_lines_of_the_user_first(tmp_path):
    """No frame of datamat is above them, and few below: a reader sees what to correct."""

    class Failing(FailingRows):
        def read(self, row):
            return {"x": self.look_up(row)}

        def look_up(self, row):
            return {}["gone"]

    with pytest.raises(SampleError, match="'gone'") as caught:
        job(tmp_path / "out", Failing(), executor=None, workers=WorkerOptions(num_workers=1)).run(progress=False)

    told = "".join(traceback.format_exception(caught.value)).splitlines()
    frames = [line for line in told if line.startswith("  File ") and "prepared.py" not in line]
    assert "in read" in frames[0]
    assert "in look_up" in frames[1]
    assert [frame for frame in frames if f"{pathlib.Path(datamat.__file__).parent}/" in frame] == frames[-2:]
    assert not getattr(caught.value, "__notes__", [])


def test_error_of_a_function_shows_its_line_first(tmp_path):
    """The first item, from which the features are inferred, fails like any other."""
    with pytest.raises(SampleError, match="modulo by zero") as caught:
        datamat.materialize(
            lambda item: {"x": 1 // item}, [0], tmp_path / "out", executor=InlineExecutor(), progress=False
        )

    frames = re.findall(r'^  File "(.+)", line', "".join(traceback.format_exception(caught.value)), re.MULTILINE)
    assert frames[0] == __file__
    assert len([frame for frame in frames if "datamat/" in frame.removeprefix(str(TESTS))]) <= 1


def test_error_of_datamat_itself_keeps_its_frames():
    """They are what a report of a defect needs."""
    error = _raised_by(lambda: errors.join_problems(None))
    frames = traceback.extract_tb(error.__traceback__)

    fold(error)

    assert not isinstance(error, DatamatError)
    assert traceback.extract_tb(error.__traceback__) == frames


@pytest.mark.parametrize("is_ring", [False, True])
def test_cause_of_a_sample_error_is_folded_too(is_ring):
    """It arose in the user's code, which datamat called; an error that is raised twice may be among its own causes."""
    error, cause = SampleError("a", "it failed"), _raised_by(lambda: Features({"x": Scalar("no such dtype")}))
    error.__cause__ = cause
    cause.__cause__ = error if is_ring else None

    fold(error)

    assert isinstance(cause, SchemaError)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)][:1] == ["_raised_by"]


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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        GOLDEN.write_text("\n".join(texts()) + "\n")
