"""Show the progress of a run: a bar on a terminal or in a notebook, and lines in the log."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from datamat.errors import count_of
from datamat.events import (
    PartDamaged,
    PartDone,
    PlanMade,
    RunEnded,
    RunEvent,
    RunStarted,
    ShardFinished,
    WorkerLost,
    WorkersStarted,
)
from datamat.run.report import RunReport
from datamat.run.timeline import Totals

_LINE_EVERY_S, _DRAW_EVERY_S = 30.0, 0.1
_BAR_WIDTH = 10


class ProgressBar:
    """Shows a bar that counts records, and the summary at the end.

    In a terminal it is a line of standard error that is redrawn; in a notebook its own display, which no front end
    shows as an error; elsewhere, as in the log of a batch job, it is a line every half minute.

    Args:
        logger: logger of the run: if it shows the summary on the console, the bar does not repeat it.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger
        self._screen: _Screen | None = None
        self._begin("", 0)

    def _begin(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._num_workers = 0
        self._num_records = 0  # existing ones, also from earlier runs
        self._num_new = self._num_failed = 0
        self._totals = Totals()
        self._began = time.perf_counter()

    def __call__(self, event: RunEvent) -> None:
        """Handle an event; other kinds are ignored."""
        match event:
            case RunStarted():
                self._say(f"{event.name}: indexing the source")
            case PlanMade():
                self._begin(event.plan.name, event.num_records)
                self._say(f"{self._name}: {count_of(event.num_records, 'sample')}; looking at what is there")
            case WorkersStarted():
                self._num_workers = event.num_workers
                self._began = time.perf_counter()
                who = count_of(event.num_workers, "worker") if event.num_workers else event.engine or "the executor"
                self._say(f"{self._name}: {count_of(self._total, 'sample')}; {who} at the first parts")
            case ShardFinished(is_reused=True) | PartDone(is_resumed=True):
                self._num_records += event.num_records
                self._num_failed += event.num_failed
            case PartDone():
                self._num_records += event.num_records
                self._num_failed += event.num_failed
                self._num_new += event.num_records
                if event.trace is not None:
                    self._totals.add(event.trace)
                self._screen = self._screen or _open_screen()
                self._screen.show(self._line)
            case RunEnded():
                self._end("" if event.report is None or _shows_on_console(self._logger) else str(event.report))

    def _say(self, what: str) -> None:
        """Show what the run is doing before its first part, which may take a while."""
        self._screen = self._screen or _open_screen()
        self._screen.say(what)

    def _end(self, summary: str) -> None:
        if self._screen is None and summary:
            self._screen = _open_screen()
        if self._screen is not None:
            self._screen.close(self._line() if self._num_new else "", summary)
            self._screen = None

    def _line(self) -> str:
        elapsed_s = max(time.perf_counter() - self._began, 1e-9)
        rate = self._num_new / elapsed_s
        share = min(self._num_records / max(self._total, 1), 1.0)
        full = int(share * _BAR_WIDTH)
        bar = "█" * full + "░" * (_BAR_WIDTH - full)
        parts = [
            f"{self._name} {share:4.0%} {bar} {self._num_records:,}/{count_of(self._total, 'sample')}",
            f"{rate:,.0f}/s" if rate >= 1 else f"{rate * 60:,.0f}/min",
        ]
        left = self._total - self._num_records
        if left > 0 and rate:
            parts.append(f"{_clock_text(left / rate)} left")
        if self._num_failed:
            parts.append(f"{self._num_failed:,} failed")
        limit, _ = self._totals.limit(self._num_workers)
        return "  ".join([*parts, *([f"limit: {limit}"] if limit else [])])


class _Screen:
    """The place where the bar is drawn; this one writes a line every half minute.

    Args:
        every_s: minimum seconds between two lines.
    """

    def __init__(self, every_s: float = _LINE_EVERY_S) -> None:
        self._every_s = every_s
        self._next = time.perf_counter() + (every_s if every_s > 1 else 0)

    def show(self, line: Callable[[], str]) -> None:
        """Draw the line if it is due."""
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + self._every_s
            self._draw(line())

    def say(self, what: str) -> None:
        """Show what the run is doing: immediately on a screen, in a log if a line is due."""
        self.show(lambda: what)

    def close(self, line: str, summary: str) -> None:
        """Draw the last line, if any, and the summary."""
        del line
        self._write(f"{summary}\n" if summary else "")

    def _draw(self, line: str) -> None:
        self._write(f"{line}\n")

    @staticmethod
    def _write(text: str) -> None:
        if text and sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


class _Terminal(_Screen):
    """A terminal, where each line overwrites the previous one."""

    def __init__(self) -> None:
        super().__init__(_DRAW_EVERY_S)

    def say(self, what: str) -> None:
        self._draw(what)

    def close(self, line: str, summary: str) -> None:
        self._draw(line)  # over the last message, if there is no line
        if line:
            self._write("\n")
        super().close("", summary)

    def _draw(self, line: str) -> None:
        self._write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")


class _Notebook(_Screen):
    """A notebook, where one display is updated, and shows the summary in the end."""

    def __init__(self, display: Callable[..., Any]) -> None:
        super().__init__(_DRAW_EVERY_S)
        self._display, self._handle = display, None

    def say(self, what: str) -> None:
        self._draw(what)

    def close(self, line: str, summary: str) -> None:
        self._draw(summary or line)

    def _draw(self, line: str) -> None:
        import html

        bundle = {"text/plain": line, "text/html": f"<pre>{html.escape(line)}</pre>"}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def _open_screen() -> _Screen:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and hasattr(shell, "kernel"):
        from IPython.display import display

        return _Notebook(display)
    return _Terminal() if sys.stderr is not None and sys.stderr.isatty() else _Screen()


def _shows_on_console(logger: logging.Logger | None) -> bool:
    """Return True if INFO messages of a logger appear where the bar is."""
    if logger is None or not logger.isEnabledFor(logging.INFO):
        return False
    one: logging.Logger | None = logger
    while one is not None:
        for handler in one.handlers:
            is_console = isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout)
            if is_console and handler.level <= logging.INFO:
                return True
        one = one.parent if one.propagate else None
    return False


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class RunLog:
    """Logs problems and the report."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __call__(self, event: RunEvent) -> None:
        """Handle an event; other kinds are ignored."""
        match event:
            case WorkerLost():
                at = "before its first row" if event.key is None else f"at sample {event.key!r}"
                self._logger.warning("part %d of %s, %s: %s", event.part, event.shard, at, event.message)
            case PartDamaged():
                self._logger.warning(
                    "%s, %s; %d parts of it are made again", event.shard, event.message, len(event.again)
                )
            case RunEnded(report=RunReport() as report):
                self._logger.info("%s", report)
