"""Workers get the state of the user's modules from the program that called `run`, or refuse to begin."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import textwrap
import types

import pytest

from datamat import FingerprintError
from datamat.plan.pipeline import Pipeline
from datamat.run.module_state import ModuleState, _settled

SETTINGS = """
import types, threading
K = 1
OPTIONS = {"k": 1}
args = None
HELD = types.SimpleNamespace(thread=threading.Thread())
class Handle:
    def __init__(self, number):
        self.number = number
    def __setstate__(self, state):
        raise RuntimeError("not in another process")
HANDLE = Handle(1)
class Config:
    size = 1
def helper(x):
    return x * K
def patched(x):
    return x
"""

PROGRAM = """
import concurrent.futures, contextlib, dataclasses, functools, logging, multiprocessing, sys, threading
import settings
from settings import Config, OPTIONS
from datamat import DatasetWriter, Features, IndexRow, Materializer, PathosExecutor, Tensor, WorkerOptions, load

LIMIT = None
LOCK, LOG, POOL = threading.Lock(), logging.getLogger("x"), concurrent.futures.ThreadPoolExecutor(1)

@dataclasses.dataclass
class Options:
    size: int = 1
    more: dict = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def opened(self):
        yield self.size

    @functools.lru_cache
    def cached(self):
        return 1

class Writer(DatasetWriter):
    name = "w"
    features = Features({"v": Tensor((7,), "int64")})

    def __init__(self):
        self.options, self.lock, self.thread, self.pool = Options(), contextlib.nullcontext(), None, 0
        if sys.argv[1] == "own":  # a plain pickle cannot send these
            self.lock, self.thread, self.pool = threading.RLock(), threading.Thread(), PathosExecutor(1)

    def index(self, source):
        return [IndexRow(f"{n:03d}", fields={"n": n}) for n in range(32)]

    def read(self, row):
        import numpy as np

        assert settings.HELD is not settings.HANDLE and self.options is not POOL and self.pool is not self.thread
        with self.lock, LOCK, self.options.opened(), settings.args.opened():
            LOG.debug("%s", self.options)
        return {"v": np.array([
            settings.K, OPTIONS["k"], settings.args.size, Config.size, settings.helper(1), settings.patched(1), LIMIT,
        ])}

def changed(x):
    return x + 50

if __name__ == "__main__":
    settings.K = 1000
    settings.OPTIONS["k"] = 3
    settings.args = Options(size=7)
    Config.size = 9
    settings.patched = changed
    LIMIT = 12
    EXTRA
    executor, method = sys.argv[1:]
    options = {"workers": WorkerOptions(num_workers=2, start_method=method)}
    if executor == "futures":
        context = multiprocessing.get_context(method)
        options = {"executor": concurrent.futures.ProcessPoolExecutor(2, mp_context=context)}
    Materializer(Writer(), None, "out").run(progress=False, **options)
    print(sorted({tuple(sample["v"].tolist()) for sample in load("out")}))
"""


def program(folder, executor, method, *, extra="pass", settings=SETTINGS):
    """Run a program that changes what its modules hold; return its output and exit code."""
    (folder / "settings.py").write_text(settings)
    (folder / "program.py").write_text(PROGRAM.replace("EXTRA", extra))
    return subprocess.run(
        [sys.executable, "program.py", executor, method], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("executor", "method"),
    [
        pytest.param("own", "fork", marks=pytest.mark.long),
        ("own", "forkserver"),
        pytest.param("own", "spawn", marks=pytest.mark.long),
        pytest.param("futures", "fork", marks=pytest.mark.long),
        pytest.param("futures", "forkserver", marks=pytest.mark.long),
        pytest.param("futures", "spawn", marks=pytest.mark.long),
    ],
)
def test_every_start_method_sees_what_the_program_has_set(tmp_path, executor, method):
    """Values, dictionaries changed in place, attributes of classes, patched functions, and what functions read."""
    done = program(tmp_path, executor, method)

    assert done.stdout.strip() == str([(1000, 3, 7, 9, 1000, 51, 12)]), done.stderr


@pytest.mark.long
def test_what_cannot_be_sent_is_refused_before_anything_is_written(tmp_path):
    """The error uses the code's name for it. What is the same in a worker does no harm, sent or not: see above."""
    done = program(tmp_path, "own", "forkserver", extra="settings.HANDLE = settings.Handle(2)")

    assert done.returncode != 0
    assert "FingerprintError: writer.read -> settings.HANDLE: not the same in this worker" in done.stderr
    assert not list(tmp_path.glob("out/**/*.part")) and not list(tmp_path.glob("out/*.tfrecord"))


@pytest.mark.long
def test_module_that_was_edited_after_its_import_is_refused(tmp_path):
    """The program has the old code, and a worker would import the new one."""
    extra = "import pathlib; p = pathlib.Path('settings.py'); p.write_text(p.read_text().replace('x * K', 'x * K + 1'))"

    done = program(tmp_path, "own", "spawn", extra=extra)

    assert "FingerprintError: writer.read -> settings.helper: not the same in this worker" in done.stderr


# ---- the same in one process: the state of a fresh import is restored before the state of the program is applied


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """The module whose state is sent."""
    monkeypatch.setattr("datamat.fingerprint.code._assumed", {})
    (tmp_path / "state_settings.py").write_text(SETTINGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("state_settings")
    yield module
    sys.modules.pop("state_settings")
    _settled.clear()


def fresh(module):
    """Restore all that a fresh import gives a module, and its class."""
    vars(module).update(dict.fromkeys(("K", "OPTIONS", "args", "patched")))
    with open(module.__file__) as file:
        exec(compile(file.read(), module.__file__, "exec"), vars(module))
    return module


def writer_of(expression):
    """Return a writer whose `read` evaluates an expression of the module `settings`."""
    source = f"""
    import state_settings as settings
    from datamat import DatasetWriter, Features, Scalar
    def local():
        import state_settings
        from state_settings import args
        return state_settings.K, args
    class Writer(DatasetWriter):
        features = Features({{"n": Scalar("int64")}})
        def index(self, source):
            return []
        def read(self, row):
            return {{"n": ({expression})}}
    """
    module = types.ModuleType("state_writer")
    sys.modules["state_writer"] = module
    exec(textwrap.dedent(source), vars(module))
    return module.Writer()


def change(settings):
    """Change all that code may read: names, an object in place, a class, a function."""
    settings.K = 5
    settings.OPTIONS["more"] = [1]
    settings.Config.size, settings.Config.other = 4, 5
    settings.patched = settings.helper
    settings.args = argparse.Namespace(size=3, names={"a"})


@pytest.mark.parametrize(
    "expression",
    [
        "settings.K",
        "settings.helper(2)",
        "settings.OPTIONS",
        "settings.Config().size",
        "settings.Config.other",
        "settings.patched(2)",
        "settings.args.size",
        "__import__('importlib') and local()",
    ],
)
def test_what_code_reads_of_modules_is_set_in_a_worker(settings, expression):
    """And nothing else."""
    writer = writer_of(expression)
    change(settings)
    wanted = writer.read(None)
    state = ModuleState.of(Pipeline.of(writer, None, 0), is_own_pool=True)
    settings.K, settings.unread = 1, object()
    fresh(settings)

    state.settle(Pipeline.of(writer, None, 0))

    assert writer.read(None) == wanted


def test_equal_modules_are_not_touched(settings):
    """Their objects stay the same ones, even where they could not have been sent."""
    writer = writer_of("settings.OPTIONS, settings.HELD, settings.HANDLE")
    state = ModuleState.of(Pipeline.of(writer, None, 0), is_own_pool=True)
    options, held = settings.OPTIONS, settings.HELD

    state.settle(Pipeline.of(writer, None, 0))

    assert settings.OPTIONS is options and settings.HELD is held


def test_what_differs_and_cannot_be_sent_is_named(settings):
    """The error gives the path of the object, without those that merely lead to it."""
    writer = writer_of("settings.helper(1), settings.HANDLE")
    settings.HANDLE = settings.Handle(2)
    state = ModuleState.of(Pipeline.of(writer, None, 0), is_own_pool=True)
    fresh(settings)

    with pytest.raises(FingerprintError, match=r"^writer\.read -> settings\.HANDLE: not the same in this worker"):
        state.settle(Pipeline.of(writer, None, 0))
