"""What a run reports, and to whom: the events of a run, the hooks that hear them, and the report at its end.

Run, PartQueue ── one frozen record per event ──> RunEvents ──> LedgerHook, RunTally (the report)
                                                      └──> hooks of the user, ProgressBar, RunLog
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from datamat.directory.counts import Counts
from datamat.directory.failures import Failure
from datamat.directory.keys import ShardName
from datamat.directory.ledger import LEDGER_FILE, FailedRow, Ledger, cut_text
from datamat.errors import IncompleteRunError, OutputError, SampleError, count_of
from datamat.events import (
    LimitReached,
    PartDamaged,
    PartDone,
    PlanMade,
    RunEnded,
    RunEvent,
    RunStarted,
    SampleDropped,
    SampleFailed,
    SampleRecovered,
    SampleRetried,
    ShardFinished,
    WorkerLost,
    WorkersStarted,
)
from datamat.options import Remedies
from datamat.run.receipts import Receipt
from datamat.run.timeline import Timeline, TimelineBuilder, Totals
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.directory.manifest import ShardInfo
    from datamat.options import Hook
    from datamat.plan.job import Job


__all__ = [
    "LedgerHook",
    "ProgressBar",
    "RunEvents",
    "RunLog",
    "RunReport",
    "RunTally",
    "describe_dropped",
    "reporting",
]

_KEYS_PER_LINE = 10_000  # of the ledger
_LINE_EVERY_S, _DRAW_EVERY_S = 30.0, 0.1
_BAR_WIDTH = 10

# ---------------------------------------------------------------- hooks


class RunEvents:
    """Passes the events of one run to its hooks.

    Args:
        ledger: writes the ledger; called first, and its errors end the run: what is not recorded has not happened.
        tally: counts what the report says; called next.
        hooks: all other hooks, in their order; one that raises is switched off.
        logger: logger for hooks that raise.
    """

    def __init__(self, ledger: LedgerHook, tally: RunTally, hooks: Sequence[Hook], logger: logging.Logger) -> None:
        self.tally = tally
        self._ledger = ledger
        self._hooks = list(hooks)
        self._logger = logger
        self._has_ended = False

    def emit(self, event: RunEvent) -> None:
        """Pass an event on; raises `OutputError` where the ledger cannot take it."""
        self._ledger(event)
        self.tally(event)
        self._has_ended = isinstance(event, RunEnded)
        for hook in self._hooks[:]:
            self._call(hook, event)

    def emit_part(self, receipt: Receipt, *, is_resumed: bool) -> None:
        """Pass on that a part is done, and which of its rows failed, were retried or left out."""
        done = PartDone(
            shard=receipt.shard,
            part=receipt.number,
            **Counts.of(receipt).by_name(),
            busy_s=receipt.busy_s,
            is_resumed=is_resumed,
            is_repeated=receipt.is_repeated,
            trace=None if is_resumed else receipt.trace,
        )
        self.emit(done)
        for row in (*receipt.failed, *receipt.retried, *receipt.dropped):
            self.emit(_sample_event(receipt.shard, row, is_resumed=is_resumed))

    def fail(self, error: BaseException) -> None:
        """Pass on the error that ends the run, to every hook; a ledger that cannot take it hides nothing."""
        ending: list[RunEvent] = [RunEnded(report=None, error=error)]
        if isinstance(error, SampleError):
            kind = type(error.__cause__ or error).__name__
            ending.insert(0, _sample_event("", FailedRow(-1, error.key, kind, error.reason, "raise"), is_resumed=False))
        for event in [] if self._has_ended else ending:
            with contextlib.suppress(OutputError):  # the disk may be what failed
                self._ledger(event)
            for hook in self._hooks[:]:
                self._call(hook, event)

    def record_lack(self, shard: ShardInfo, keys: Sequence[str]) -> None:
        """Have the ledger say which rows failed of a shard that is about to get its name."""
        self._ledger.record_lack(shard, keys)

    def sync(self) -> None:
        """Flush the ledger to the disk."""
        self._ledger.sync()

    def _call(self, hook: Hook, event: RunEvent) -> None:
        try:
            hook(event)
        except Exception:
            self._hooks = [other for other in self._hooks if other is not hook]
            self._logger.warning(
                "hook %s raised at %s; the run continues, and calls this hook no more",
                getattr(hook, "__qualname__", type(hook).__qualname__),
                type(event).__name__,
                exc_info=True,
            )


@contextlib.contextmanager
def reporting(job: Job, *, began: float) -> Iterator[RunEvents]:
    """Report a run from its start to its end, which is an error where the block raises one.

    Args:
        job: the job, with its output, ledger and hooks.
        began: when the run began, by `time.perf_counter`.
    """
    ledger = Ledger(job.work / LEDGER_FILE)
    how, logger = job.how, job.how.logger
    hooks: list[Hook] = [*how.hooks, *([ProgressBar(logger)] if how.progress else []), RunLog(logger)]
    events = RunEvents(LedgerHook(ledger), RunTally(began), hooks, logger)
    try:
        events.emit(
            RunStarted(
                output=job.place,
                name=job.name,
                writer=job.writer_name,
                formats=tuple(made.name for made in job.formats),
                seed=job.seed,
                copies=job.copies,
                include=how.include,
                exclude=how.exclude,
                shards=job.shards,
                workers=how.workers,
                errors=how.errors,
            )
        )
        yield events
    except BaseException as error:
        events.fail(error)
        raise
    finally:
        ledger.close()


def _sample_event(shard: str, row: FailedRow, *, is_resumed: bool) -> RunEvent:
    made: Any = {"drop": SampleDropped, "retry": SampleRetried}.get(row.action, SampleFailed)
    values: dict[str, Any] = {**dataclasses.asdict(row), "shard": shard, "is_resumed": is_resumed}
    event: RunEvent = made(**{field.name: values[field.name] for field in dataclasses.fields(made)})
    return event


# ---------------------------------------------------------------- the hooks of every run


class LedgerHook:
    """Writes the lines of the ledger.

    Args:
        ledger: ledger that is open for writing; the caller closes it.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._recorded: set[tuple[str, str, str, str]] | None = None  # rows that have a line already

    def __call__(self, event: RunEvent) -> None:
        """Take an event; kinds that are not here say nothing to it."""
        match event:
            case PartDone(is_resumed=False):
                self._ledger.write(
                    "part_committed",
                    shard=event.shard,
                    part=event.part,
                    **Counts.of(event).to_ledger(),
                    **({"repeated": 1} if event.is_repeated else {}),
                    busy_s=round(event.busy_s, 3),
                )
            case PartDamaged():
                self._ledger.write(
                    "part_damaged", shard=event.shard, part=event.part, again=list(event.again), message=event.message
                )
            case SampleFailed(action="raise"):
                self._ledger.write("sample_failed", key=event.key, message=event.message)
            case SampleFailed():
                self._write_row({"skip": "sample_skipped", "quarantine": "sample_quarantined"}[event.action], event)
            case SampleDropped():
                self._write_row("sample_dropped", event)
            case SampleRetried():
                self._write_row("sample_retried", event)
            case SampleRecovered():
                self._ledger.write("sample_mended", shard=event.shard, key=event.key)
            case WorkerLost():
                self._ledger.write(
                    "sample_timeout" if event.timed_out else "worker_died",
                    shard=event.shard,
                    part=event.part,
                    key=event.key,
                    rows=event.num_rows,
                    message=event.message,
                )
            case RunStarted() | LimitReached() | RunEnded():
                self._write_run(event)

    def _write_run(self, event: RunStarted | LimitReached | RunEnded) -> None:
        match event:
            case RunStarted():
                self._ledger.write(
                    "run_started",
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    python=sys.version.partition(" ")[0],
                    writer=event.writer,
                    formats=list(event.formats),
                    seed=event.seed,
                    copies=event.copies,
                    include=event.include,
                    exclude=event.exclude,
                    shards=dataclasses.asdict(event.shards),
                    workers=dataclasses.asdict(event.workers),
                    errors=dataclasses.asdict(event.errors),
                )
            case LimitReached():
                self._ledger.write(
                    {"deadline": "deadline_reached", "max_disk": "disk_reached"}[event.limit],
                    planned=event.num_rows_planned,
                    **Counts.of(event).to_ledger(),
                )
            case RunEnded(report=RunReport() as report):
                self._ledger.write(
                    "run_finished",
                    is_complete=report.is_complete,
                    **Counts.of(report).to_ledger(),
                    elapsed_s=round(report.elapsed_s, 3),
                )
            case RunEnded():
                kind = "run_failed" if isinstance(event.error, Exception) else "interrupted"
                self._ledger.write(kind, error=type(event.error).__name__, message=str(event.error))

    def record_lack(self, shard: ShardInfo, keys: Sequence[str]) -> None:
        """Write which rows failed of a shard, and flush it: once the shard has its name, only the ledger tells."""
        for start in range(0, len(keys), _KEYS_PER_LINE):
            part = list(keys[start : start + _KEYS_PER_LINE])
            self._ledger.write("shard_lacks", shard=shard.name, checksum=shard.checksum, keys=part)
        if keys:
            self._ledger.sync()

    def sync(self) -> None:
        """Flush what was written to the disk."""
        self._ledger.sync()

    def _write_row(self, kind: str, event: SampleFailed | SampleRetried | SampleDropped) -> None:
        """Write the line of a row once, however many runs it takes to finish the output.

        A run that is killed after its worker left the receipt has no line of it yet; then the next run, which takes the
        part over, writes it.
        """
        if self._recorded is None:
            self._recorded = self._ledger.recorded_rows()
        row = (kind, event.shard, event.key, cut_text(event.message))
        if row not in self._recorded:
            self._recorded.add(row)
            names = ["shard", "position", "key", "error", "message"]
            if not isinstance(event, SampleDropped):
                names.append("attempts")
            if isinstance(event, SampleFailed):
                names += ["row", "path", "traceback"]
            self._ledger.write(kind, **{name: getattr(event, name) for name in names})


class RunTally:
    """Counts what the report says.

    Args:
        began: when the run began, by `time.perf_counter`.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._num_rows_planned = 0
        self._left_aside = ""
        self._num_workers = 0
        self._start_method = self._engine = ""
        self._shards: dict[str, ShardFinished] = {}
        self._parts: dict[str, dict[int, PartDone]] = {}  # of shards that are not finished
        self._failed: dict[tuple[str, int], list[SampleFailed]] = {}  # by shard and part
        self._failed_now: list[SampleFailed] = []  # of the part that was done last
        self._num_written = 0
        self._num_resumed = self._num_repeated = 0
        self._busy_s = 0.0
        self._timeline = TimelineBuilder(time.time() - (time.perf_counter() - began))

    def __call__(self, event: RunEvent) -> None:
        """Take an event; kinds that are not here say nothing to it."""
        match event:
            case PlanMade():
                self._num_rows_planned = event.num_rows
                self._left_aside = event.plan.left_aside
            case WorkersStarted():
                self._num_workers = event.num_workers
                self._start_method = event.start_method
                self._engine = event.engine
            case PartDone():
                self._parts.setdefault(event.shard, {})[event.part] = event
                self._failed_now = self._failed[event.shard, event.part] = []
                if event.is_resumed:
                    self._num_resumed += 1
                else:
                    self._num_written += 1
                    self._num_repeated += event.is_repeated
                    self._busy_s += event.busy_s
                    if event.trace is not None:
                        self._timeline.add(event.trace)
            case SampleFailed():
                self._failed_now.append(event)
            case PartDamaged():
                for part in event.again:
                    self._parts.get(event.shard, {}).pop(part, None)
                    self._failed.pop((event.shard, part), None)
            case ShardFinished():
                self._shards[event.shard] = event
                self._parts.pop(event.shard, None)

    def limit_reached(self, limit: Literal["deadline", "max_disk"]) -> LimitReached:
        """Return the event of a limit that stops the run now."""
        return LimitReached(limit=limit, **self._done().by_name(), num_rows_planned=self._num_rows_planned)

    def report(self, job: Job, *, is_complete: bool, stopped: str) -> RunReport:
        """Return the report of the run, as it is now.

        Args:
            job: the job; names output and remedies.
            is_complete: whether every shard of the plan is finished.
            stopped: "deadline" or "max_disk" where that ended the run, else "".
        """
        elapsed_s = time.perf_counter() - self._began
        num_reused = sum(shard.is_reused for shard in self._shards.values())
        return RunReport(
            output=job.place,
            is_complete=is_complete,
            **self._done().by_name(),
            num_rows_planned=self._num_rows_planned,
            left_aside=self._left_aside,
            num_shards_written=len(self._shards) - num_reused,
            num_shards_reused=num_reused,
            num_parts_written=self._num_written,
            num_parts_resumed=self._num_resumed,
            num_parts_repeated=self._num_repeated,
            elapsed_s=elapsed_s,
            busy_s=self._busy_s,
            at_work_s=self._timeline.totals.at_work_s,
            num_workers=self._num_workers,
            start_method=self._start_method,
            engine=self._engine,
            stopped=stopped,
            num_shards_held=0 if is_complete else sum(shard.is_held for shard in self._shards.values()),
            remedies=job.remedies,
            timeline=self._timeline.timeline(elapsed_s=elapsed_s, num_workers=self._num_workers),
            failures=tuple(self._failures(job.formats[0].extension)),
        )

    def _failures(self, extension: str) -> Iterator[Failure]:
        from datamat.directory.failures import Failure

        for event in (event for events in self._failed.values() for event in events):
            if event.action != "raise":  # after which there is no report
                split = ShardName.parse(event.shard).split
                values = {name: getattr(event, name) for name in [field.name for field in dataclasses.fields(event)]}
                yield Failure.of(values, event.action, split=split, shard=f"{event.shard}.{extension}")

    def _done(self) -> Counts:
        """Return what finished shards hold, and finished parts of the others."""
        return Counts.of(*self._shards.values(), *(part for parts in self._parts.values() for part in parts.values()))


class ProgressBar:
    """Shows one bar over records, and the summary at the end.

    In a terminal it is a line of standard error that is drawn over; in a notebook a display of its own, which no front
    end paints as an error; elsewhere, as in the log of a batch job, it is a line every half minute.

    Args:
        logger: logger of the run: where it shows the summary on the console, the bar does not repeat it.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger
        self._screen: _Screen | None = None
        self._begin("", 0)

    def _begin(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._num_workers = 0
        self._num_records = 0  # that are there, also from earlier runs
        self._num_new = self._num_failed = 0
        self._totals = Totals()
        self._began = time.perf_counter()

    def __call__(self, event: RunEvent) -> None:
        """Take an event; kinds that are not here say nothing to it."""
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
        """Show what the run does before it has a part, which may take a while."""
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
        parts = [
            f"{self._name} {share:4.0%} {_drawn(share)} {self._num_records:,}/{count_of(self._total, 'sample')}",
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
    """Where the bar is drawn: nothing but a line every half minute, here.

    Args:
        every_s: least time from one line to the next, in seconds.
    """

    def __init__(self, every_s: float = _LINE_EVERY_S) -> None:
        self._every_s = every_s
        self._next = time.perf_counter() + (every_s if every_s > 1 else 0)

    def show(self, line: Callable[[], str]) -> None:
        """Draw the line if its time has come."""
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + self._every_s
            self._draw(line())

    def say(self, what: str) -> None:
        """Draw what the run does now: at once on a screen, and in a log if it is time for a line."""
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
    """A terminal, where each line is drawn over the one before."""

    def __init__(self) -> None:
        super().__init__(_DRAW_EVERY_S)

    def say(self, what: str) -> None:
        self._draw(what)

    def close(self, line: str, summary: str) -> None:
        self._draw(line)  # over what it said last, if there is none
        if line:
            self._write("\n")
        super().close("", summary)

    def _draw(self, line: str) -> None:
        self._write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")


class _Notebook(_Screen):
    """A notebook, where one display is replaced: by the summary in the end."""

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
    """Return whether what a logger takes at level INFO is seen where the bar is."""
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


def _drawn(share: float) -> str:
    full = int(share * _BAR_WIDTH)
    return "█" * full + "░" * (_BAR_WIDTH - full)


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class RunLog:
    """Logs what goes wrong, and the report.

    Args:
        logger: receives warnings and, at the end, the report.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __call__(self, event: RunEvent) -> None:
        """Take an event; kinds that are not here say nothing to it."""
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


# ---------------------------------------------------------------- the report


def describe_dropped(num_dropped: int, num_dropped_records: int) -> str:
    """Return how much was left out on purpose, for a summary; "" where nothing was."""
    samples = count_of(num_dropped, "sample")
    of_others = " of other samples" if num_dropped else ""
    records = f"{count_of(num_dropped_records, 'record')}{of_others}"
    listed = [text for text, count in ((samples, num_dropped), (records, num_dropped_records)) if count]
    return f"{' and '.join(listed)} left out" if listed else ""


@frozen()
class RunReport:
    """What a run did. Its `str` is the summary.

    Attributes:
        output: folder of the finished shards.
        is_complete: whether every shard of the plan is finished and the manifest written; False if `include` or
            `exclude` left some out.
        num_rows, num_records, num_bytes: totals of what is finished, including finished parts if the run stopped early.
        num_shards_written, num_shards_reused: number of shards that this run made, and that it left as they were.
        num_parts_written, num_parts_resumed: number of parts that this run made, and that it reused from an interrupted
            one.
        elapsed_s: wall time of the run, in seconds.
        busy_s: processor time of all workers for parts, in seconds.
        at_work_s: wall time of all workers for parts, in seconds.
        num_workers: number of datamat's own worker processes; 0 if there was nothing to do, or an `executor` did it.
        start_method: start method of the workers, and why it was chosen.
        engine: name of the engine that did the work, such as "Dask at tcp://10.0.0.7:8786"; "" for datamat's own
            workers.
        num_failed: rows among `num_rows` that failed, in this run or earlier; the ledger says why.
        num_dropped: rows among `num_rows` of which every record was left out on purpose, by `Skip` or None, in this run
            or earlier; the ledger says why.
        num_dropped_records: records, such as single copies, that were left out, from rows that gave others.
        num_parts_repeated: number of parts that an engine is known to have made twice; the first of the two counts.
        num_rows_planned: number of rows in the shards that this run was to make.
        stopped: "deadline" or "max_disk" if that ended the run before it was done, else "".
        num_shards_held: number of finished shards without a name: they replace others, and wait in `.datamat` until
            the whole plan is finished, so that no reader finds old and new ones together.
        left_aside: number, suffixes and first names of the files of the source that the index has not taken.
        remedies: calls that `str` recommends next.
        timeline: which worker made which part when, and how long each stage took.
        failures: the samples that this run skipped or quarantined, in the order in which parts were done; those of
            shards that it left as they were are among `datamat.failures(output)`.
    """

    output: pathlib.Path | str
    is_complete: bool
    num_rows: int
    num_records: int
    num_bytes: int
    num_shards_written: int
    num_shards_reused: int
    num_parts_written: int
    num_parts_resumed: int
    elapsed_s: float
    busy_s: float
    num_workers: int
    at_work_s: float = 0.0
    start_method: str = ""
    engine: str = ""
    num_failed: int = 0
    num_dropped: int = 0
    num_dropped_records: int = 0
    num_parts_repeated: int = 0
    num_rows_planned: int = 0
    stopped: str = ""
    num_shards_held: int = 0
    remedies: Remedies = dataclasses.field(default_factory=Remedies)
    timeline: Timeline = dataclasses.field(default_factory=Timeline, compare=False)
    left_aside: str = ""
    failures: tuple[Failure, ...] = ()

    @property
    def did_nothing(self) -> bool:
        """Whether everything was there already."""
        return not self.stopped and self.num_shards_written == 0 and self.num_parts_written == 0

    @property
    def busy_share(self) -> float:
        """Share of the run in which its workers were at a part, 0 to 1; 0 where an `executor` did the work."""
        whole_s = self.elapsed_s * self.num_workers
        return min(self.at_work_s / whole_s, 1.0) if whole_s else 0.0

    @property
    def limit(self) -> str:
        """What limited the run, and what to change, in a sentence; "" if that is not known."""
        return self.timeline.advice

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of the run in Chrome's Trace Event Format: open the file in ui.perfetto.dev.

        Args:
            path: file to write; its folder must be there.

        Raises:
            OSError: it cannot be written.

        Example:
            >>> job.run().to_chrome_trace("run.json")   # doctest: +SKIP
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.timeline.chrome_trace(), file)

    def raise_if_incomplete(self) -> RunReport:
        """Raise if the run stopped before the whole plan was finished; return the report otherwise.

        A script that does not catch the error exits with status 1, so that a scheduler starts it again.

        Raises:
            IncompleteRunError: says why the run stopped, how much is done, and how to resume.

        Example:
            >>> job.run(deadline="23h30m").raise_if_incomplete()   # doctest: +SKIP
        """
        if not self.is_complete:
            raise IncompleteRunError(str(self))
        return self

    def __str__(self) -> str:
        return "\n  ".join([self._headline, *self._remarks])

    @property
    def _headline(self) -> str:
        size = f"{count_of(self.num_records, 'record')}, {self.num_bytes / 1e6:,.1f} MB"
        if self.did_nothing:
            return f"{self.output}: nothing to do, {size} are there and up to date ({self.elapsed_s:.2f} s)"
        busy = f" ({self.busy_share:.0%} busy)" if self.num_workers and self.num_parts_written else ""
        return f"{self.output}: {self._state}: {size} in {self.elapsed_s:.2f} s with {self._workers}{busy}"

    @property
    def _remarks(self) -> list[str]:
        remarks = []
        if self.num_failed:
            rows, retry = count_of(self.num_failed, "row"), self.remedies.passing("retry_failed", True)
            remarks.append(f"{rows} failed; {self.remedies.failures} says why, and {retry} tries them again")
        if left_out := describe_dropped(self.num_dropped, self.num_dropped_records):
            remarks.append(f"{left_out}; .datamat/ledger.jsonl says why")
        reused = [
            f"{count_of(number, noun)} {what}"
            for number, noun, what in (
                (self.num_parts_resumed, "part", "resumed"),
                (0 if self.did_nothing else self.num_shards_reused, "shard", "reused"),
                (self.num_parts_repeated, "part", "made twice"),
            )
            if number
        ]
        return [*remarks, *([", ".join(reused)] if reused else []), *([self.left_aside] if self.left_aside else [])]

    @property
    def _state(self) -> str:
        if self.did_nothing:
            return "nothing to do, up to date"
        state = "complete"
        if not self.is_complete:
            state = f"finished as far as include and exclude say, {self.remedies.again} without them makes the rest"
        if self.stopped:
            share = self.num_rows / max(self.num_rows_planned, 1)
            state = (
                f"stopped by its {self.stopped} with {self.num_rows:,} of {count_of(self.num_rows_planned, 'row')} "
                "done "
                f"({share:.0%}), {self.remedies.again} again continues from there"
            )
        if self.num_shards_held:
            held = count_of(self.num_shards_held, "new shard")
            state += f"; {held} wait in .datamat until all that replace others are finished"
        return state

    @property
    def _workers(self) -> str:
        if self.num_parts_written and not self.num_workers:
            return self.engine or "the executor given"
        return count_of(self.num_workers, "worker")

    def __repr__(self) -> str:
        return f"RunReport({self._headline})"

    def _repr_html_(self) -> str:
        from datamat.directory.display import render_html

        return render_html("RunReport", self._facts, notes=filter(None, [self.limit]))

    @property
    def _facts(self) -> list[tuple[str, str]]:
        facts = [
            ("output", str(self.output)),
            ("state", self._state),
            ("records", f"{self.num_records:,}, {self.num_bytes / 1e6:,.1f} MB"),
            ("rows", f"{self.num_rows:,} of {self.num_rows_planned:,}"),
            ("failed", f"{self.num_failed:,}"),
            ("left out", describe_dropped(self.num_dropped, self.num_dropped_records) or "0"),
            ("shards", f"{self.num_shards_written:,} written, {self.num_shards_reused:,} reused"),
            ("parts", f"{self.num_parts_written:,} written, {self.num_parts_resumed:,} resumed"),
            ("time", f"{self.elapsed_s:,.1f} s with {self._workers}"),
        ]
        if self.num_workers and not self.did_nothing:
            facts.append(("workers busy", f"{self.busy_share:.0%}"))
        return facts
