"""The tests of a hook."""

from __future__ import annotations

import pathlib

from datamat.errors import SampleError
from datamat.events import RunEnded, RunEvent
from datamat.options import Hook
from datamat.testing.assertions import compare, digests, raises
from datamat.testing.small_run import run_numbers


class _Overheard:
    """Passes events on to a hook, and keeps the errors that it raises."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.errors: list[str] = []
        self.ends: list[RunEnded] = []

    def __call__(self, event: RunEvent) -> None:
        if isinstance(event, RunEnded):
            self.ends.append(event)
        try:
            self.hook(event)
        except Exception as error:  # noqa: BLE001 -- the test reports it
            self.errors.append(f"{type(event).__name__}: {error!r}")


class HookConformance:
    """What every hook does: it handles the events of all kinds of runs without an error, and changes nothing."""

    def make_hook(self) -> Hook:
        """Return a new hook."""
        raise NotImplementedError(f"{type(self).__name__}: define make_hook(self)")

    def test_run_has_the_same_bytes(self, tmp_path: pathlib.Path) -> None:
        """Every file of a run is the same as without the hook."""
        run_numbers(tmp_path / "without")

        run_numbers(tmp_path / "with", hooks=[self.make_hook()])

        compare(digests(tmp_path / "with"), digests(tmp_path / "without"), "files with the hook, compared with none")

    def test_good_run_is_heard_without_an_error(self, tmp_path: pathlib.Path) -> None:
        """A run, and a second one that has nothing to do, with the same hook."""
        heard = _Overheard(self.make_hook())

        run_numbers(tmp_path / "out", hooks=[heard])
        report = run_numbers(tmp_path / "out", hooks=[heard])

        compare(heard.errors, [], "errors of the hook")
        assert report.did_nothing, f"second run: found {report}, expected it to have nothing to do"
        compare(len(heard.ends), 2, "RunEnded events that the hook got")

    def test_rows_that_fail_are_heard_without_an_error(self, tmp_path: pathlib.Path) -> None:
        """A run that skips a row, and one that the row's error ends."""
        heard = _Overheard(self.make_hook())

        run_numbers(tmp_path / "skipped", bad=17, errors="skip", hooks=[heard])
        with raises(SampleError, "0017.*number 17 is bad", "run with a bad row"):
            run_numbers(tmp_path / "raised", bad=17, hooks=[heard])

        compare(heard.errors, [], "errors of the hook")

    def test_run_that_is_stopped_is_heard_without_an_error(self, tmp_path: pathlib.Path) -> None:
        """A run that reaches its deadline before any work, and the one that finishes the job."""
        heard = _Overheard(self.make_hook())

        stopped = run_numbers(tmp_path / "out", hooks=[heard], deadline=1e-9)
        finished = run_numbers(tmp_path / "out", hooks=[heard])

        compare((stopped.stopped, finished.is_complete), ("deadline", True), "end of the stopped run and of the next")
        compare(heard.errors, [], "errors of the hook")
