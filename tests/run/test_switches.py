"""Switches of libraries are the caller's in every worker, count in the fingerprint, and are left as they were."""

import csv
import decimal
import locale
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest

from datamat import load, materialize
from datamat.testing import InlineExecutor

PROGRAM = """
import csv, decimal, locale, sys, time, os, warnings
import cv2, numpy as np
from datamat import Materializer, WorkerOptions, load, materialize

PIL = sys.argv[2] == "all"
if PIL:
    import pandas as pd, PIL.Image, PIL.ImageFile, torch

def look(n):
    found = {
        "csv": csv.field_size_limit(), "cv2": cv2.useOptimized(), "quotient": str(decimal.Decimal(1) / 7),
        "printed": str(np.array([1 / 3])), "digits": sys.get_int_max_str_digits(),
        "limit": sys.getrecursionlimit(), "hour": time.localtime(0).tm_hour,
        "errors": repr(sorted(np.geterr().items())),
        "strict": sum(kind == "error" for kind, *_ in warnings.filters),
        "number": locale.format_string("%.1f", 1.5),
    }
    if PIL:
        frame = str(pd.DataFrame({"a": [1 / 3]}))
        found |= {"frame": frame, "mode": pd.get_option("mode.sim_interactive"), "torch": str(torch.zeros(1).dtype)}
        found |= {"matmul": torch.get_float32_matmul_precision(), "cut": PIL.ImageFile.LOAD_TRUNCATED_IMAGES}
        found |= {"pixels": PIL.Image.MAX_IMAGE_PIXELS}
    return found

csv.field_size_limit(7000)
cv2.setUseOptimized(False)
decimal.getcontext().prec = 5
np.set_printoptions(precision=2)
np.seterr(invalid="raise")
sys.set_int_max_str_digits(5000)
sys.setrecursionlimit(1234)
os.environ["TZ"] = "Asia/Seoul"
time.tzset()
warnings.simplefilter("error", UserWarning)
if PIL:
    pd.set_option("display.precision", 3, "mode.sim_interactive", True)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True
    PIL.Image.MAX_IMAGE_PIXELS = 12345
materialize(look, range(4), "out", workers=WorkerOptions(num_workers=2, start_method=sys.argv[1]), progress=False)
wanted = look(0)
assert all(dict(sample, key=0) == dict(wanted, key=0) for sample in load("out")), [wanted, load("out")[0]]
print(sorted(wanted.items()))
"""


@pytest.mark.parametrize("libraries", ["light", "all"])
@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_have_the_switches_of_the_caller(tmp_path, method, libraries):
    """Whatever their start method: the records show what each worker has."""
    if libraries == "all":
        for name in ("pandas", "torch", "PIL"):
            pytest.importorskip(name)
    (tmp_path / "program.py").write_text(PROGRAM)

    done = subprocess.run(
        [sys.executable, "program.py", method, libraries], check=False, capture_output=True, text=True, cwd=tmp_path
    )

    assert (done.returncode, done.stderr) == (0, "")
    for found in ("0.14286", "[0.33]", "7000", "1234", "('hour', 9)", "('invalid', 'raise')"):
        assert found in done.stdout


def text(n):
    return {"n": n, "text": str(decimal.Decimal(1) / 7), "array": str(np.array([1 / 3]))}


@pytest.fixture
def restored():
    printed, errors, context = np.get_printoptions(), np.geterr(), decimal.getcontext().copy()
    size, zone = csv.field_size_limit(), locale.setlocale(locale.LC_NUMERIC)
    yield
    np.set_printoptions(**printed)
    np.seterr(**errors)
    decimal.setcontext(context)
    csv.field_size_limit(size)
    locale.setlocale(locale.LC_NUMERIC, zone)
    cv2.setUseOptimized(True)


CHANGES = {
    "decimal.getcontext": lambda: setattr(decimal.getcontext(), "prec", 5),
    "numpy.set_printoptions": lambda: np.set_printoptions(precision=2),
    "numpy.seterr": lambda: np.seterr(divide="raise"),
    "csv.field_size_limit": lambda: csv.field_size_limit(1000),
    "cv2.setUseOptimized": lambda: cv2.setUseOptimized(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_switch_counts(tmp_path, caplog, restored, name):
    """It is named, everything is made again; put back, nothing differs."""

    def run():
        return materialize(text, range(20), tmp_path / "out", key=str, executor=InlineExecutor(), progress=False)

    run()
    assert run().did_nothing
    CHANGES[name]()

    assert run().num_shards_written
    assert f"{name} changed" in caplog.text
    assert run().did_nothing


def test_switches_by_thread_are_those_of_the_caller(tmp_path, restored):
    """The context of decimal and numpy's errors belong to a thread; the executor's have their own."""
    decimal.getcontext().prec = 5
    np.seterr(divide="raise")

    def divide(n):
        return {"n": n, "text": str(decimal.Decimal(1) / 7), "error": np.geterr()["divide"]}

    with ThreadPoolExecutor(2) as threads:
        materialize(divide, range(8), tmp_path / "out", executor=threads, progress=False)

    assert {(sample["text"], sample["error"]) for sample in load(tmp_path / "out")} == {("0.14286", "raise")}


def test_caller_keeps_its_switches(tmp_path, restored):
    before = decimal.getcontext().prec, np.geterr(), sys.getrecursionlimit(), list(warnings.filters)

    materialize(text, range(4), tmp_path / "out", executor=InlineExecutor(), progress=False)

    assert before == (decimal.getcontext().prec, np.geterr(), sys.getrecursionlimit(), list(warnings.filters))
