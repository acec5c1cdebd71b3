"""An executor without processes, and the tests of any executor."""

from __future__ import annotations

import concurrent.futures
import operator
import pathlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from datamat.errors import SampleError
from datamat.options import WorkerOptions
from datamat.readers.dataset import load
from datamat.testing.assertions import compare, digests, plain, preview, raises
from datamat.testing.small_run import run_numbers


class _Scale:
    """An object whose bound method is sent to workers."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def apply(self, values: Any, *, offset: int = 0) -> Any:
        return values * self.factor + offset


class InlineExecutor(Executor):
    """Runs each call at once in the thread that submits it, without starting a process or pickling anything.

    A run writes the same bytes as with workers. There is no isolation: a call cannot time out, and one that ends its
    process ends the program.

    Example:
        >>> import tempfile
        >>> from datamat import materialize
        >>> report = materialize(
        ...     lambda n: {"square": n * n}, range(10), tempfile.mkdtemp() + "/out",
        ...     executor=InlineExecutor(), progress=False,
        ... )
        >>> report.num_records
        10
    """

    def __init__(self) -> None:
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `fn` and return a finished future; only what is not an `Exception`, such as Ctrl-C, propagates.

        Raises:
            RuntimeError: the executor is shut down.
        """
        if self._is_shut_down:
            raise RuntimeError("cannot submit after shutdown")
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            result = fn(*args, **kwargs)
        except Exception as exc:  # noqa: BLE001 -- the future hands it to the caller
            future.set_exception(exc)
        else:
            future.set_result(result)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Reject later calls; all earlier ones have ended."""
        self._is_shut_down = True


class ExecutorConformance:
    """What datamat expects of an executor passed as `executor=`: a run's bytes do not depend on it."""

    def make_executor(self) -> Executor:
        """Return a new executor; the test shuts it down."""
        raise NotImplementedError(f"{type(self).__name__}: define make_executor(self)")

    def test_run_has_the_same_bytes(self, tmp_path: pathlib.Path) -> None:
        """Every file of a run is what datamat's own worker writes."""
        run_numbers(tmp_path / "own", workers=WorkerOptions(num_workers=1))

        with self.make_executor() as executor:
            run_numbers(tmp_path / "out", executor=executor)

        compare(digests(tmp_path / "out"), digests(tmp_path / "own"), "files, compared with those of datamat's worker")

    def test_row_that_fails_fails_alone(self, tmp_path: pathlib.Path) -> None:
        """A skipped row is counted, and all others are stored."""
        with self.make_executor() as executor:
            report = run_numbers(tmp_path / "out", bad=17, executor=executor, errors="skip")

        compare(report.num_failed, 1, "failed rows")
        numbers = sorted(int(sample["number"]) for sample in load(tmp_path / "out"))
        compare(numbers, [number for number in range(40) if number != 17], "stored numbers")

    def test_failed_run_names_the_row_and_can_be_continued(self, tmp_path: pathlib.Path) -> None:
        """An error in a worker reaches the caller with its type, and the executor still serves the next run."""
        with self.make_executor() as executor:
            with raises(SampleError, "0017.*number 17 is bad", "run with a bad row"):
                run_numbers(tmp_path / "out", bad=17, executor=executor)
            report = run_numbers(tmp_path / "out", executor=executor)

        assert report.is_complete, f"second run: found {report}, expected a complete run"

    def test_method_and_arguments_arrive(self) -> None:
        """A bound method is called with its object, and arrays come back unchanged."""
        with self.make_executor() as executor:
            future = executor.submit(_Scale(3).apply, np.arange(5), offset=1)
            found = future.result(timeout=60)

        compare(plain({"": found}), plain({"": np.arange(5) * 3 + 1}), "result of a method of an object")

    def test_error_is_the_futures_own(self) -> None:
        """A task that raises fails only its own future, with the error's type and message."""
        with self.make_executor() as executor:
            futures = [executor.submit(operator.truediv, 6, divisor) for divisor in (2, 0, 3)]
            errors = [future.exception(timeout=60) for future in futures]
            found = [future.result() for future in futures if future.exception() is None]

        compare([type(error) for error in errors], [type(None), ZeroDivisionError, type(None)], "errors of three tasks")
        compare(found, [3.0, 2.0], "results of the other tasks")

    def test_futures_can_be_waited_for(self) -> None:
        """`wait` and callbacks see each future end once."""
        ended: list[Any] = []
        with self.make_executor() as executor:
            futures = [executor.submit(abs, -number) for number in range(50)]
            for future in futures:
                future.add_done_callback(ended.append)
            strangers = [future for future in futures if not isinstance(future, concurrent.futures.Future)]
            assert not strangers, f"submit: found {preview(strangers)}, expected concurrent.futures.Future"
            done, left = concurrent.futures.wait(futures, timeout=60)

        compare((len(done), len(left)), (50, 0), "finished and unfinished futures after wait")
        compare(sorted(map(id, ended)), sorted(map(id, futures)), "futures whose callback ran")

    def test_map_keeps_the_order(self) -> None:
        """Results come in the order of the items."""
        with self.make_executor() as executor:
            found = list(executor.map(abs, range(-100, 0)))

        compare(found, list(range(100, 0, -1)), "results of map")

    def test_shutdown_ends_what_was_submitted(self) -> None:
        """Leaving the `with` block waits for every task; later ones are rejected."""
        with self.make_executor() as executor:
            futures = [executor.submit(abs, -number) for number in range(50)]

        unfinished = [number for number, future in enumerate(futures) if not future.done()]
        compare(unfinished, [], "tasks without a result after shutdown")
        compare([future.result() for future in futures], list(range(50)), "results after shutdown")
        with raises(RuntimeError, "", "submit after shutdown"):
            executor.submit(abs, -1)
