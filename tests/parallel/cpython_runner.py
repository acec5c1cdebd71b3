"""Run CPython's own executor tests against `PathosExecutor`.

    python tests/parallel/cpython_runner.py METHOD [--suite PATH] [--only WORD]

The tests (`test_concurrent_futures`, one file or a package) are looked for in the folder `test` of this interpreter and
of its neighbours below pyenv or uv, since many come without: CPython itself forgot to install them for some releases,
3.11.7 and 3.12.1 among them (https://github.com/python/cpython/issues/115421); Debian has a package for them.
`--suite`, or the environment variable DATAMAT_CPYTHON_TESTS, names the `Lib/test` of a source checkout. Exit code 77
means that there are none; the places that were looked at are printed.

What differs by design is listed in `SKIPPED`, each with its reason.
"""

from __future__ import annotations

import argparse
import concurrent.futures.process
import concurrent.futures.thread  # defines its exceptions before they are replaced below
import glob
import importlib
import importlib.util
import multiprocessing.util
import os
import sys
import tempfile
import unittest
from concurrent.futures import _base
from pathlib import Path

from datamat.errors import BrokenPoolError, ParallelError
from datamat.parallel import PathosExecutor
from datamat.parallel.workers import RemoteTraceback

METHODS = {"fork": "ProcessPoolFork", "forkserver": "ProcessPoolForkserver", "spawn": "ProcessPoolSpawn"}
MODULES = ("test_process_pool", "test_wait", "test_as_completed", "test_init", "test_shutdown", "test_deadlock")

NEIGHBOURS = ("3.13", "3.12", "3.11")  # whose tests run on each of the others, too
HOMES = ("~/.pyenv/versions/{}*", "~/.local/share/uv/python/cpython-{}*", "/usr", "/usr/local")

_COUNTS = "expects the workers to run when `submit` returns; here the dispatcher's thread starts them"
_BY_NAME = "imports the executor by name from concurrent.futures in a new interpreter; test_life.py has the same tests"
_LIVES = "expects a broken pool; here the call alone fails, with its own error, and the others go on"
_PRIVATE = "looks at private attributes of ProcessPoolExecutor; test_death.py has the same test"
SKIPPED = {
    "test_saturation": _COUNTS,
    "test_killed_child": "expects a broken pool; here another worker runs what the dead one had not begun",
    "test_processes_terminate": "joins the Process objects after the pool, which has closed them",
    "test_idle_process_reuse_one": _COUNTS,
    "test_idle_process_reuse_multiple": _COUNTS,
    "test_cancel_futures": "expects a call to have started when `shutdown` follows at once",
    "test_hang_gh83386": _BY_NAME,
    "test_hang_gh94440": _BY_NAME,
    "test_interpreter_shutdown": _BY_NAME,
    "test_submit_after_interpreter_shutdown": _BY_NAME,
    "test_error_at_task_unpickle": _LIVES,
    "test_exit_at_task_unpickle": _LIVES,
    "test_shutdown_deadlock_pickle": _PRIVATE,
    "test_python_finalization_error": "makes the start of a thread fail that only ProcessPoolExecutor starts",
    "FailingInitializerTest.test_initializer": "expects a message in the logger of concurrent.futures",
}

PASSED_BY_FORK = {"test_saturation"}  # all workers are forked at the first `submit`


class Adapter(PathosExecutor):
    """Takes the constructor arguments of `ProcessPoolExecutor`."""

    def __init__(self, max_workers=None, mp_context=None, initializer=None, initargs=(), *, max_tasks_per_child=None):
        if max_tasks_per_child is not None:
            if not isinstance(max_tasks_per_child, int):
                raise TypeError("max_tasks_per_child must be an integer")
            if max_tasks_per_child <= 0:
                raise ValueError("max_tasks_per_child must be >= 1")
        if mp_context is None:
            mp_context = multiprocessing.get_context("fork" if max_tasks_per_child is None else "spawn")
        start_method = mp_context.get_start_method()
        if start_method == "fork" and max_tasks_per_child is not None:
            raise ValueError("max_tasks_per_child is incompatible with the 'fork' multiprocessing start method")
        super().__init__(max_workers, start_method=start_method, initializer=initializer, initargs=initargs)
        self._max_tasks_per_child = max_tasks_per_child
        self._mp_context = mp_context

    @property
    def _processes(self):
        return self._dispatcher.processes() if self._dispatcher is not None else {}

    @property
    def _broken(self):
        return self._dispatcher is not None and self._dispatcher.broken is not None


def places(suite: Path | None) -> list[Path]:
    """Return the folders that may hold the tests, in the order of preference."""
    named = suite or os.environ.get("DATAMAT_CPYTHON_TESTS")
    if named:
        return [Path(named)]
    own = importlib.util.find_spec("test")
    folders = [Path(folder) for folder in (own.submodule_search_locations or [] if own else [])]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for each in dict.fromkeys((version, *NEIGHBOURS)):
        roots = [
            sys.base_prefix,
            *(root for home in HOMES for root in glob.glob(os.path.expanduser(home.format(each)))),
        ]
        folders += [Path(root, "lib", f"python{each}", "test") for root in roots]
    return list(dict.fromkeys(folders))


def holds_tests(folder: Path) -> bool:
    """Does the folder hold CPython's tests of executors, and what they need?"""
    tests = folder / "test_concurrent_futures.py", folder / "test_concurrent_futures" / "util.py"
    return (folder / "support").is_dir() and any(path.exists() for path in tests)


def load(folder: Path, home: str) -> list:
    """Return the modules of tests, with `Adapter` in place of the standard library's pool.

    Args:
        folder: holds them.
        home: an empty directory, where this process and its workers find the folder as the package `test`, also where
            this interpreter has none, or another one.
    """
    broken = (BrokenPoolError, ParallelError)
    concurrent.futures.process.BrokenProcessPool = _base.BrokenExecutor = broken
    concurrent.futures.process._RemoteTraceback = RemoteTraceback
    multiprocessing.util._cleanup_tests = lambda: None  # it expects the standard library's resource tracker
    os.symlink(folder, os.path.join(home, "test"))
    sys.path.insert(0, home)
    from test import support

    support.use_resources = ["walltime", "cpu"]
    tests = importlib.import_module("test.test_concurrent_futures")
    if hasattr(tests, "__path__"):
        util = importlib.import_module("test.test_concurrent_futures.util")
        modules = [importlib.import_module(f"test.test_concurrent_futures.{name}") for name in MODULES]
    else:
        util, modules = tests, [tests]
    for mixin in (util.ProcessPoolForkMixin, util.ProcessPoolForkserverMixin, util.ProcessPoolSpawnMixin):
        mixin.executor_type = Adapter
    return modules


def collect(modules: list, method: str, only: str) -> unittest.TestSuite:
    """Return the tests of one start method, without the skipped ones."""
    suite = unittest.TestSuite()
    prefix = METHODS[method]
    for module in modules:
        for name, cls in sorted(vars(module).items()):
            if not (isinstance(cls, type) and issubclass(cls, unittest.TestCase) and name.startswith(prefix)):
                continue
            if method == "fork" and name.startswith(METHODS["forkserver"]):
                continue
            for test in unittest.defaultTestLoader.getTestCaseNames(cls):
                skipped = any(f"{name}.{test}".endswith(known) for known in SKIPPED)
                passed_here = method == "fork" and test in PASSED_BY_FORK
                if (passed_here or not skipped) and only in f"{name}.{test}":
                    suite.addTest(cls(test))
    return suite


def main() -> int:
    """Run the tests; return 0 if all pass, 77 if there are none here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    folders = places(options.suite)
    folder = next(filter(holds_tests, folders), None)
    if folder is None:
        print(f"Python {sys.version.split()[0]}: no test_concurrent_futures in any of {', '.join(map(str, folders))}")
        return 77
    with tempfile.TemporaryDirectory() as home:
        suite = collect(load(folder, home), options.method, options.only)
        result = unittest.TextTestRunner(verbosity=1).run(suite)
    print(
        f"{folder}, {options.method}: {result.testsRun} run, {len(result.failures)} failures, "
        f"{len(result.errors)} errors, {len(result.skipped)} skipped by CPython, {len(SKIPPED)} names skipped here"
    )
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
