"""Pass the events of a run to its hooks, and write the ledger.

Run, PartQueue ── one frozen record per event ──> RunEvents ──> LedgerHook, RunTally (the report)
                                                      └──> hooks of the user, ProgressBar, RunLog
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from datamat.directory.counts import Counts
from datamat.directory.ledger import LEDGER_FILE, FailedRow, Ledger, cut_text
from datamat.errors import OutputError, SampleError
from datamat.events import (
    LimitReached,
    PartDamaged,
    PartDone,
    RunEnded,
    RunEvent,
    RunStarted,
    SampleDropped,
    SampleFailed,
    SampleRecovered,
    SampleRetried,
    WorkerLost,
)
from datamat.run.receipts import Receipt

if TYPE_CHECKING:
    from datamat.directory.manifest import ShardInfo
    from datamat.options import Hook
    from datamat.plan.job import Job
from datamat.run.progress import ProgressBar, RunLog
from datamat.run.report import RunReport, RunTally

# ---------------------------------------------------------------- hooks


class RunEvents:
    """Passes the events of one run to its hooks.

    Args:
        ledger: writes the ledger; called first, and its errors end the run: unrecorded work does not count.
        tally: counts the numbers of the report; called next.
        hooks: all other hooks, in order; a hook that raises is disabled.
        logger: logger for hooks that raise.
    """

    def __init__(self, ledger: LedgerHook, tally: RunTally, hooks: Sequence[Hook], logger: logging.Logger) -> None:
        self.tally = tally
        self.ledger = ledger
        self._hooks = list(hooks)
        self._logger = logger
        self._has_ended = False

    def emit(self, event: RunEvent) -> None:
        """Pass an event on; raise `OutputError` if the ledger cannot be written."""
        self.ledger(event)
        self.tally(event)
        self._has_ended = isinstance(event, RunEnded)
        for hook in self._hooks[:]:
            self._call(hook, event)

    def emit_part(self, receipt: Receipt, *, is_resumed: bool) -> None:
        """Emit the events of a finished part: its failed, retried and dropped rows, and the part itself."""
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
        """Pass the error that ends the run to every hook, even if the ledger cannot be written."""
        ending: list[RunEvent] = [RunEnded(report=None, error=error)]
        if isinstance(error, SampleError):
            kind = type(error.__cause__ or error).__name__
            ending.insert(0, _sample_event("", FailedRow(-1, error.key, kind, error.reason, "raise"), is_resumed=False))
        for event in [] if self._has_ended else ending:
            with contextlib.suppress(OutputError):  # the disk may have failed
                self.ledger(event)
            for hook in self._hooks[:]:
                self._call(hook, event)

    def _call(self, hook: Hook, event: RunEvent) -> None:
        try:
            hook(event)
        except Exception:
            self._hooks = [other for other in self._hooks if other is not hook]
            self._logger.warning(
                "hook %s raised at %s; the run continues without this hook",
                getattr(hook, "__qualname__", type(hook).__qualname__),
                type(event).__name__,
                exc_info=True,
            )


@contextlib.contextmanager
def reporting(job: Job, *, began: float) -> Iterator[RunEvents]:
    """Report a run from its start to its end, or to the error that the block raises."""
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
    """Writes the lines of the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._recorded: set[tuple[str, str, str, str]] | None = None  # rows that already have a line

    def __call__(self, event: RunEvent) -> None:
        """Handle an event; other kinds are ignored."""
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
        """Write and flush a shard's failed rows: once it has its final name, only the ledger lists them."""
        self._ledger.write_keys("shard_lacks", keys, shard=shard.name, checksum=shard.checksum)
        if keys:
            self._ledger.sync()

    def sync(self) -> None:
        """Flush the ledger to disk."""
        self._ledger.sync()

    def _write_row(self, kind: str, event: SampleFailed | SampleRetried | SampleDropped) -> None:
        """Write the line of a row once, even if several runs are needed to finish the output.

        If a run is killed after its worker left the receipt, the next run, which reuses the part, writes the line.
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
