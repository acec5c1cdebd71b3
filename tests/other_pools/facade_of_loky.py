"""A pytest plug-in: with it, the executor of loky's own tests is `PathosExecutor`, whose workers are forked."""

import sys
import time
import weakref

import loky.process_executor as theirs

from datamat.errors import BrokenPoolError, ParallelError
from datamat.parallel import PathosExecutor
from datamat.parallel.workers import RemoteTraceback


class Flags:
    """`executor._flags`: the state of an executor that may be gone."""

    def __init__(self, executor):
        self._executor = weakref.ref(executor)

    @property
    def broken(self):
        executor = self._executor()
        return None if executor is None or executor._dispatcher is None else executor._dispatcher.broken

    @property
    def shutdown(self):
        executor = self._executor()
        return executor is None or executor.is_shut_down


class ProcessPoolExecutor(PathosExecutor):
    """`loky.process_executor.ProcessPoolExecutor`, less its reducers, timeout and environment."""

    def __init__(self, max_workers=None, *_, context=None, initializer=None, initargs=(), **__):
        super().__init__(max_workers, start_method="fork", initializer=initializer, initargs=initargs)
        self._flags = Flags(self)

    @property
    def _processes(self):
        return self._dispatcher.processes() if self._dispatcher is not None else {}

    @property
    def _executor_manager_thread(self):
        return self._dispatcher.thread

    def shutdown(self, wait=True, *, kill_workers=False):
        if kill_workers:
            self.terminate()
        else:
            super().shutdown(wait)


theirs.ProcessPoolExecutor = ProcessPoolExecutor
theirs.BrokenProcessPool = theirs.TerminatedWorkerError = (BrokenPoolError, ParallelError)
theirs.ShutdownExecutorError = RuntimeError
theirs._RemoteTraceback = RemoteTraceback


def pytest_collection_modifyitems():
    """Have the programs that their tests start use ours, too, and count workers as they start on demand."""
    mixin, cases = (sys.modules[f"tests.{name}"] for name in ("_executor_mixin", "_test_process_executor"))
    mixin._check_subprocesses_number = _check_number_of_workers
    run = cases.check_subprocess_call
    cases.check_subprocess_call = lambda command, **options: run(
        [*command[:-1], f"import facade_of_loky\n{command[-1]}"], **options
    )


def _check_number_of_workers(executor, expected):
    """Check that no more workers than expected remain, a moment later at most."""
    deadline = time.monotonic() + 10
    while len(executor._processes) > expected:
        assert time.monotonic() < deadline, f"{len(executor._processes)} workers, {expected} expected"
        time.sleep(0.01)
