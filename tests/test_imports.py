"""What is loaded when: heavy packages cost seconds and hundreds of megabytes, in the caller and in every worker.

The modules that a new process holds afterwards show it, never milliseconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

import datamat
from datamat import materialize

pytestmark = pytest.mark.timeout(300)

HEAVY = ("albumentations", "av", "cv2", "pyarrow", "soundfile", "tensorflow", "torch")
NOT_AT_FIRST = (*HEAVY, "dill", "multiprocess", "numpy", "pandas", "pathos", "scipy", "tqdm", "xxhash")


def _run(code: str, folder) -> str:
    """Run code in a new process; return what it prints."""
    (folder / "program.py").write_text(code)
    found = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, check=False, cwd=folder, timeout=280
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


STEPS = {
    "import datamat": NOT_AT_FIRST,
    "from datamat import Materializer": NOT_AT_FIRST,
    "import datamat.parallel.worker": (*HEAVY, "numpy", "pathos", "ppft", "pox"),
    "from datamat import PathosExecutor": (*HEAVY, "numpy", "pandas", "scipy"),
    "from datamat import Materializer, DatasetWriter, load, verify, materialize": (*HEAVY, "asyncio", "ssl"),
    "import datamat.testing": ("pytest",),
}
"""What a program imports, one after the other, and what is not loaded then."""

LOADED = "sorted({name.partition('.')[0] for name in sys.modules})"


def test_first_use_of_a_name_loads_nothing_heavy(tmp_path):
    """The package and `Materializer` load the standard library only, as does the parallel core; a worker no pathos."""
    code = "".join(f"{step}\nprint(json.dumps({LOADED}))\n" for step in STEPS)

    printed = _run("import json, sys\n" + code, tmp_path).splitlines()

    for (step, absent), line in zip(STEPS.items(), printed, strict=True):
        assert "datamat" in (loaded := json.loads(line))
        assert set(loaded).isdisjoint(absent), step


def test_garbage_is_collected_as_before(tmp_path):
    """The first use of a name loads modules without collections in between; who had turned them off keeps it so."""
    code = "import gc, datamat\ndatamat.load\nprint(gc.isenabled())\ngc.disable()\ndatamat.view\nprint(gc.isenabled())"

    assert _run(code, tmp_path).split() == ["True", "False"]


def test_what_a_program_has_frozen_stays_so(tmp_path):
    code = "import gc, datamat\ngc.freeze()\ndatamat.load\nprint(gc.get_freeze_count() > 1000)"

    assert _run(code, tmp_path).split() == ["True"]


RUN = f"""
import json
import datamat

def item(number):
    import sys
    return {{"number": number, "loaded": json.dumps({LOADED})}}

for method in ("forkserver", "spawn"):
    options = datamat.WorkerOptions(num_workers=1, start_method=method)
    datamat.materialize(item, range(3), method, workers=options, progress=False)
    print(datamat.load(method)[0]["loaded"])
"""


def test_worker_loads_no_tensorflow(tmp_path):
    """A worker writes TFRecords without TensorFlow, which saves 590 MB and six seconds each."""
    for line in _run(RUN, tmp_path).splitlines():
        assert "datamat" in (loaded := json.loads(line))
        assert set(loaded).isdisjoint({"albumentations", "av", "cv2", "soundfile", "tensorflow", "torch"})


CALLER = """
import pathlib
import datamat

pathlib.Path("a.txt").write_text("a")
items = [
    {"text": "a" * number, "number": number, "half": number / 2, "some": number or None}
    | {"may": None if number else True, "file": pathlib.Path("a.txt"), "list": [number]}
    for number in range(3)
]
workers = datamat.WorkerOptions(num_workers=1)
datamat.materialize(lambda item: {"number": item["number"]}, items, "out", workers=workers, progress=False)
"""


def test_caller_of_a_run_loads_no_pandas(tmp_path):
    """`pyarrow.array` imports it where it is installed, for nothing: 0.4 s and 40 MB at the end of every run."""
    _put_pandas(tmp_path)

    loaded = json.loads(_run(f"{CALLER}import json, sys\nprint(json.dumps({LOADED}))\n", tmp_path).splitlines()[-1])

    assert "pyarrow" in loaded
    assert "pandas" not in loaded


WRITER = """
import sys
import numpy as np
import datamat
from datamat import Bytes, ListOf, Nullable, Scalar, Tensor, Text

FEATURES = {
    "has_pandas": Scalar("bool"), "text": Text(), "some": Nullable(Scalar()), "data": Nullable(Bytes()),
    "vector": Tensor((None,), "float64"), "texts": ListOf(Text()), "maybe": Nullable(Tensor((None,), "int64")),
}

def make(number):
    some = {"some": 0.5, "data": b"a", "maybe": np.arange(number % 3)} if number % 2 else {}
    vector, texts = np.ones(number % 4), ["a"] * (number % 3)
    return {"some": None, "data": None, "maybe": None, "text": "a", "vector": vector, "texts": texts, **some,
            "has_pandas": "pandas" in sys.modules}

workers = datamat.WorkerOptions(num_workers=1)
datamat.materialize(make, range(20_000), "out", features=FEATURES, format="parquet", workers=workers, progress=False)
"""


def test_worker_that_writes_parquet_loads_no_pandas(tmp_path):
    """Rows are put into Arrow's arrays thousands at a time; those made afterwards find no pandas."""
    _put_pandas(tmp_path)

    _run(WRITER, tmp_path)

    assert not any(record["has_pandas"] for record in datamat.load(tmp_path / "out"))


def _put_pandas(folder) -> None:
    if importlib.util.find_spec("pandas") is None:  # that it is asked for shows all the same
        (folder / "pandas.py").write_text("__version__ = '2.2.0'\n")


NOT_OF_A_JOB = {
    "datamat.directory.describe",
    "datamat.directory.verify",
    "datamat.parallel.engines",
    "datamat.readers.dataset",
    "datamat.readers.tf.pipeline",
    "datamat.run.append",
    "datamat.run.estimate",
    "datamat.run.merge",
    "datamat.run.replay",
    "datamat.run.status",
    "datamat.writers.sources",
    "difflib",
    "email",
    "html",
    "importlib.metadata",
    "numpy.ma",
    "xml",
}
"""Modules of other work: a short job would spend more time on them than on its rows."""

JOB = """
import json, pathlib, sys
import datamat

pathlib.Path("a.txt").write_text("a")
items = [{"text": "a" * number, "some": number or None, "file": pathlib.Path("a.txt")} for number in range(10)]
datamat.materialize(lambda item: {"x": len(item["text"]), "text": item["text"]}, items, "out", progress=False)
print(json.dumps([*sys.modules]))
"""


def test_job_loads_no_module_of_other_work(tmp_path):
    """Neither what reads finished datasets or opens those of others, nor what engines and web pages need."""
    loaded = json.loads(_run(JOB, tmp_path))

    assert "datamat.run.run" in loaded
    assert NOT_OF_A_JOB.isdisjoint(loaded)


# ---- packages and modules that are not there

ABSENT = """
import importlib.abc, importlib.machinery, os, sys
GONE = set(filter(None, os.environ["GONE"].split(",")))


class Broken(importlib.abc.Loader):
    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise AttributeError("_ARRAY_API not found")


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in GONE:
            return importlib.machinery.ModuleSpec(name, Broken()) if "BROKEN" in os.environ else None
        return super().find_spec(name, path, target)


sys.meta_path[:] = [Finder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""
"""Read by each new interpreter, also by workers that are not forked: what is gone is as if it were not installed."""

WITHOUT = """
import numpy as np
import datamat
from datamat import *


def make(number):
    return {
        "image": np.full((16, 16, 3), number, np.uint8),
        "mask": np.full((16, 16), number % 3, np.uint8),
        "text": str(number),
        "vector": np.arange(4, dtype=np.float32) + number,
    }


def flip(sample, rng):
    return {**sample, "image": sample["image"][:, ::-1] + rng.integers(50, dtype=np.uint8)}


features = Features(
    {"image": Image((16, 16, 3)), "mask": Mask((16, 16)), "text": Text(), "vector": Tensor((4,), "float32")}
)
for name, options in {
    "tfrecord": {"workers": WorkerOptions(num_workers=2, start_method="forkserver")},
    "webdataset": {"transform": flip, "copies": 2},
    "parquet": {},
}.items():
    report = materialize(make, range(12), name, features=features, format=name, progress=False, **options)
    found = load(name)
    assert report.is_complete and len(found) == 12 * options.get("copies", 1) == len(list(found))
    assert sum(len(batch["key"]) for batch in found.to_numpy(5)) == len(found)
    assert verify(name, deep=True).ok and describe(name).num_records == len(found)
    key = "00000003#1" if "copies" in options else "00000003"
    assert found[key]["text"] == "3" and found[key]["mask"].max() == 0 and list(found[key]["vector"]) == [3, 4, 5, 6]
    assert materialize(make, range(12), name, features=features, format=name, progress=False, **options).did_nothing
datamat.convert("tfrecord", "converted", format="webdataset", progress=False)
for name, reader in {"tensorflow": "to_tf", "torch": "to_torch"}.items():
    if name in sys.argv[1].split(","):
        try:
            next(iter(getattr(load("tfrecord"), reader)(4)))
        except MissingDependencyError as error:
            assert name in str(error)
        else:
            raise AssertionError(f"{reader} worked without {name}")
"""


def _run_without(gone, code, tmp_path, **environment):
    """Run code in a new process, in which and in whose workers some packages cannot be imported."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(ABSENT)
    path = os.pathsep.join([str(tmp_path / "hook"), str(pathlib.Path(datamat.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}", gone],
        env={**os.environ, "PYTHONPATH": path, "GONE": gone, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "gone",
    ["tensorflow,albumentations", "cv2,simplejpeg,pyspng,isal", "torch"],
    ids=lambda gone: gone.partition(",")[0],
)
def test_everything_else_works_where_a_package_is_absent(gone, tmp_path):
    """Write, read, verify, convert, and once more with nothing to do; what needs the package says so."""
    _run_without(gone, WITHOUT, tmp_path)


@pytest.mark.long
def test_everything_else_works_where_packages_are_broken(tmp_path):
    """TensorFlow and albumentations that were built for another numpy raise an AttributeError on import."""
    _run_without("tensorflow,albumentations", WITHOUT, tmp_path, BROKEN="1")


def test_package_that_every_index_needs_is_named_before_any_work(tmp_path):
    """Without pyarrow, TFRecord is read by position and key; a run says what it needs before it starts a worker."""
    materialize(lambda n: {"x": n}, range(6), tmp_path / "out", progress=False)
    code = """
import datamat

found = datamat.load("out")
assert sorted(int(sample["x"]) for sample in found) == [0, 1, 2, 3, 4, 5]
assert int(found["00000003"]["x"]) == 3 and "nothing" not in found
for act in (found.keys, lambda: datamat.verify("out")):
    try:
        act()
    except datamat.MissingDependencyError as error:
        assert "pyarrow" in str(error) and "pip install" in str(error)
    else:
        raise AssertionError("it worked without pyarrow")
features = datamat.Features({"x": datamat.Scalar("int64")})
try:
    datamat.materialize(lambda n: 1 // 0, range(3), "other", features=features, progress=False)
except datamat.MissingDependencyError as error:
    assert "the index of a dataset needs the package pyarrow" in str(error)
else:
    raise AssertionError("a run worked without pyarrow")
"""

    _run_without("pyarrow", code, tmp_path)
