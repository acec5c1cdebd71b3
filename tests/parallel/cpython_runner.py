"""Run CPython's own executor tests against `PathosExecutor`.

    python tests/parallel/cpython_runner.py METHOD [--suite PATH] [--only WORD]

The tests come with the interpreter (3.12 and later: the package `test.test_concurrent_futures`), with Debian's
`libpython3.11-testsuite` (one file), or from a source checkout given by `--suite` (its `Lib/test`). Exit code 77
means that there are none.

What differs by design is listed in `SKIPPED`, each with its reason.
"""

from __future__ import annotations

import argparse
import concurrent.futures.process
import concurrent.futures.thread  # defines its exceptions before they are replaced below
import importlib
import importlib.util
import multiprocessing.util
import sys
import unittest
from concurrent.futures import _base
from pathlib import Path

from datamat.errors import BrokenPoolError, ParallelError
from datamat.parallel import PathosExecutor
from datamat.parallel.failures import RemoteTraceback

METHODS = {"fork": "ProcessPoolFork", "forkserver": "ProcessPoolForkserver", "spawn": "ProcessPoolSpawn"}
MODULES = ("test_process_pool", "test_wait", "test_as_completed", "test_init", "test_shutdown", "test_deadlock")
DEBIAN = Path("/usr/lib/python3.11/test/test_concurrent_futures.py")

_COUNTS = "expects the workers to run when `submit` returns; here the dispatcher's thread starts them"
_BY_NAME = "imports the executor by name from concurrent.futures in a new interpreter; test_life.py has the same tests"
_OWN_ERROR = "expects the error of the pickler; here an UnpicklableError names the place of what cannot be sent"
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
    "test_error_at_task_pickle": _OWN_ERROR,
    "test_error_during_result_pickle_on_worker": _OWN_ERROR,
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


def load(suite: Path | None) -> list:
    """Return the modules of tests, with `Adapter` in place of the standard library's pool."""
    broken = (BrokenPoolError, ParallelError)
    concurrent.futures.process.BrokenProcessPool = _base.BrokenExecutor = broken
    concurrent.futures.process._RemoteTraceback = RemoteTraceback
    multiprocessing.util._cleanup_tests = lambda: None  # it expects the standard library's resource tracker
    from test import support

    support.use_resources = ["walltime", "cpu"]
    single = suite / "test_concurrent_futures.py" if suite is not None else DEBIAN
    if sys.version_info < (3, 12):
        if not single.exists():
            return []
        spec = importlib.util.spec_from_file_location("test.test_concurrent_futures", single)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        util, modules = module, [module]
    else:
        if suite is not None:
            import test

            test.__path__.insert(0, str(suite))
        try:
            util = importlib.import_module("test.test_concurrent_futures.util")
        except ImportError:
            return []
        modules = [importlib.import_module(f"test.test_concurrent_futures.{name}") for name in MODULES]
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
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    suite = collect(load(options.suite), options.method, options.only)
    if not suite.countTestCases():
        return 77
    result = unittest.TextTestRunner(verbosity=2 if options.v else 1).run(suite)
    print(
        f"{options.method}: {result.testsRun} run, {len(result.failures)} failures, {len(result.errors)} errors, "
        f"{len(result.skipped)} skipped by CPython, {len(SKIPPED)} names skipped here"
    )
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
