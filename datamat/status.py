"""How far an output is: what its files tell, while a run is alive in another process as after it crashed.

    manifest.json       the run is finished: what it made
    .datamat/lock       who is at work now
             rows/      the plan of the run that is not finished
             shards/    its finished shards, and what the directory was before
             parts/     receipts of its finished parts
             ledger.jsonl   what happened

Only reads, takes no lock, and waits for nobody: files may come and go meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import html
import pathlib
from typing import TYPE_CHECKING, Literal

from datamat.changes import NOT_MADE, ShardChange, find_changes, known_shards
from datamat.errors import CorruptDataError, OutputError
from datamat.ledger import LEDGER_FILE, LedgerEntry, read_ledger
from datamat.manifest import Manifest
from datamat.receipts import Receipt, part_folder
from datamat.snapshot import PlannedShard, read_snapshot
from datamat.storage import lock_holder, read_json
from datamat.survey import WORK
from datamat.text import printable

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from datamat.manifest import ShardFiles
    from datamat.plan import ShardSpec
    from datamat.survey import Survey

__all__ = ["Done", "State", "Status", "compared_status", "read_status"]

State = Literal["empty", "running", "unfinished", "complete", "damaged"]
_LAST_EVENTS = 3
_ENDS = {"run_finished", "run_failed", "interrupted", "deadline_reached", "disk_reached"}


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """How much is there: of shards, and of parts of shards that are not finished."""

    num_shards: int = 0
    num_rows: int = 0
    num_failed: int = 0
    num_records: int = 0
    num_bytes: int = 0

    def __add__(self, other: Done) -> Done:
        return Done(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """How far an output is. `str` of it tells the story.

    Attributes:
        output: the directory.
        state: "empty" (nothing was begun), "running" (a process is at work), "unfinished" (no process is), "complete",
            or "damaged" (there is a manifest, but it cannot be read).
        holder: the process at work, with its host; "" where there is none.
        done: what is finished.
        num_shards, num_rows: how many there are to be, of a run that is not finished; None where no plan is known.
        events: the last run's first line in the ledger, and its last ones.
        changes: the shards that `run` would make now, and why; None where nobody looked at the source.
        obsolete: shards that are there and that the plan has not any more; `run` removes them.
        note: what kept this from being the whole story.
    """

    output: pathlib.Path
    state: State
    holder: str = ""
    done: Done = Done()
    num_shards: int | None = None
    num_rows: int | None = None
    events: tuple[LedgerEntry, ...] = ()
    changes: tuple[ShardChange, ...] | None = None
    obsolete: tuple[str, ...] = ()
    note: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the last run is finished; it may be out of date all the same, see `changes`."""
        return self.state == "complete"

    @property
    def is_running(self) -> bool:
        """Whether a process is at work."""
        return self.state == "running"

    def __str__(self) -> str:
        lines = [f"{self.output}: {self._headline()}", *(f"  {printable(line)}" for line in self._story())]
        if self.note:
            lines.append(f"  {printable(self.note)}")
        return "\n".join([*lines, *self._prospect()])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _headline(self) -> str:
        done = self.done
        size = f"{done.num_records:,} records, {done.num_bytes / 1e6:,.1f} MB"
        if done.num_failed:
            size += f"; {done.num_failed:,} rows failed"
        if self.state == "empty":
            return "nothing was begun here"
        if self.state == "damaged":
            return "its manifest is damaged; repair() makes it anew"
        if self.state == "complete":
            return f"complete: {done.num_shards:,} shards, {size}"
        verb = f"being written by {printable(self.holder)}" if self.state == "running" else "not finished"
        remedy = "" if self.state == "running" else "; run() goes on from there"
        if self.num_rows is None:
            return f"{verb}: {done.num_shards} shards done, {size}{remedy}"
        share = f"{done.num_rows:,} of {self.num_rows:,} rows ({done.num_rows / max(self.num_rows, 1):.0%})"
        return f"{verb}: {share} and {done.num_shards} of {self.num_shards} shards done, {size}{remedy}"

    def _story(self) -> list[str]:
        lines = [_told(entry) for entry in self.events]
        if self.state == "unfinished" and self.events and self.events[-1].event not in _ENDS:
            lines.append("that run ended without a word: it was killed, or the machine went down")
        return lines

    def _prospect(self) -> list[str]:
        if self.changes is None:
            return []
        begun = [change for change in self.changes if change.reasons == (NOT_MADE,)]
        changed = [change for change in self.changes if change.reasons != (NOT_MADE,)]
        lines = [f"  {_count(begun)} {NOT_MADE}"] if begun else []
        if changed:
            lines.append(f"  run() would make {_count(changed)} anew:")
            lines += [f"    {change}" for change in changed]
        if self.obsolete:
            lines.append(f"  run() would remove {_count(self.obsolete)} that the plan has not any more:")
            lines += [f"    {name}" for name in self.obsolete]
        return lines or ["  up to date with source, writer and options"]


def read_status(path: str | os.PathLike[str], planned: Sequence[PlannedShard] | None = None) -> Status:
    """Return how far an output is, as its files tell; neither source nor writer are looked at.

    Args:
        path: the directory.
        planned: the shards that there are to be, for a run that is not finished and left no plan.

    Example:
        >>> print(read_status("out/camvid"))   # doctest: +SKIP
        out/camvid: complete: 3 shards, 256 records, 21.5 MB
          2026-11-21 07:30:00 UTC run_started on host, process 71
    """
    output = pathlib.Path(path)
    work = output / WORK
    events, note = _last_run(work / LEDGER_FILE)
    holder = lock_holder(work / "lock")
    state, note = _state(output, work, holder, note)
    _, known = known_shards(output, work)
    planned = read_snapshot(work / "rows") or planned
    if planned is None or state not in {"running", "unfinished"}:
        done = sum((_done_of(files) for files in known.values()), Done())
        return Status(output, state, holder, done, events=events, note=note)
    return Status(
        output,
        state,
        holder,
        done=sum((_done(output, work, shard, known.get(shard.name, ())) for shard in planned), Done()),
        num_shards=len(planned),
        num_rows=sum(shard.num_rows for shard in planned),
        events=events,
        note=note,
    )


def compared_status(survey: Survey, chosen: Sequence[ShardSpec]) -> Status:
    """Return how far an output is, compared with the source and the options as they are now.

    Args:
        survey: source and options.
        chosen: the shards of its plan that a run would make.
    """
    shards = survey.plan.shards
    planned = [PlannedShard.of(shard) for shard in shards]
    changes = find_changes(survey.output, survey.work, survey.store, survey.plan, survey.ingredients)
    names = {shard.name for shard in chosen}
    _, known = known_shards(survey.output, survey.work)
    return dataclasses.replace(
        read_status(survey.output, planned),
        changes=tuple(change for change in changes if change.shard in names),
        obsolete=tuple(sorted(known.keys() - {shard.name for shard in shards})),
    )


def _state(output: pathlib.Path, work: pathlib.Path, holder: str, note: str) -> tuple[State, str]:
    if holder:
        return "running", note
    try:
        Manifest.read(output)
    except OutputError:
        return ("unfinished" if work.is_dir() else "empty"), note
    except CorruptDataError as error:
        return "damaged", str(error)
    return "complete", note


def _done_of(files: ShardFiles) -> Done:
    info = files[0]
    return Done(1, info.num_rows, info.num_failed, info.num_records, sum(info.num_bytes for info in files))


def _done(output: pathlib.Path, work: pathlib.Path, shard: PlannedShard, files: ShardFiles) -> Done:
    """Return what is finished of a planned shard: all of it, or some parts."""
    if files and all(info.fingerprint == shard.fingerprint and (output / info.file).is_file() for info in files):
        return _done_of(files)
    done = Done()
    for path in part_folder(work, shard.name).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError):  # gone, or not whole
            receipt = Receipt.from_json(read_json(path))
            if receipt.fingerprint == shard.fingerprint:
                failed = len(receipt.failed)
                done += Done(0, receipt.num_rows, failed, receipt.num_records, receipt.num_bytes)
    return done


def _last_run(path: pathlib.Path) -> tuple[tuple[LedgerEntry, ...], str]:
    """Return the first and the last lines that the last run wrote to the ledger, and what is wrong with it."""
    first: LedgerEntry | None = None
    last: collections.deque[LedgerEntry] = collections.deque(maxlen=_LAST_EVENTS)
    note = ""
    try:
        for entry in read_ledger(path) if path.is_file() else ():
            if entry.event == "run_started":
                first = entry
                last.clear()
            elif entry.event != "part_committed":
                last.append(entry)
    except (OSError, CorruptDataError) as error:
        note = str(error)
    return (() if first is None else (first, *last)), note


def _count(shards: Sequence[object]) -> str:
    return f"{len(shards):,} shard{'' if len(shards) == 1 else 's'}"


def _told(entry: LedgerEntry) -> str:
    values = dict(entry.values)
    when = f"{entry.time:%Y-%m-%d %H:%M:%S} UTC {entry.event}"
    if entry.event == "run_started":
        return f"{when} on {values.get('host')}, process {values.get('pid')}"
    message = str(values.get("message", ""))
    error = str(values.get("error", ""))
    named = [text for text in (values.get("key"), "" if message.startswith(error) else error, message) if text]
    counts = [f"{values[name]} {name}" for name in ("rows", "records") if name in values]
    return f"{when}: {', '.join([*map(str, named), *counts])}" if named or counts else when
