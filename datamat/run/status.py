"""The progress of an output, read from its files, during a run in another process or after a crash.

    manifest.json       the result of a finished run
    .datamat/lock       the process at work now
             rows/      the plan of an unfinished run
             shards/    its finished shards, and the previous state of the directory
             parts/     receipts of its finished parts
             ledger.jsonl   the events
             slices/    shards made by tasks that share the output, see `slices.py`

It only reads, takes no lock, and never waits: files may come and go meanwhile.

For an output in a store, the store is read: see `upload.py` for its content. It shows who last began to write; whether
that process is still active shows only on its own host, or for tasks that share the output, by their heartbeats.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import itertools
import os
import pathlib
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from datamat.directory.counts import Counts
from datamat.directory.display import Table, render_html
from datamat.directory.failures import Failure, failures_in
from datamat.directory.files import WORK, lock_holder, parse_json, printable
from datamat.directory.keys import ShardName
from datamat.directory.ledger import LEDGER_FILE, LedgerEntry, ledger_in, parse_ledger
from datamat.directory.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardFiles,
    ShardInfo,
    by_shard,
    counts_of,
    refuse_file,
)
from datamat.errors import CorruptDataError, count_of, join_problems
from datamat.folders import AbsentError, LocalFolder, open_folder
from datamat.folders.base import each
from datamat.plan.changes import (
    NOT_MADE,
    PlannedShard,
    ShardChange,
    equal_shards,
    find_changes,
    find_loss,
    known_shards,
    parse_snapshot,
)
from datamat.run.receipts import Receipt, parse_receipt
from datamat.run.report import describe_dropped
from datamat.run.slices import TaskSession
from datamat.run.upload import scratch_folder
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.folders import Folder
    from datamat.plan.job import Job, PlannedJob

State = Literal["empty", "running", "unfinished", "complete", "damaged"]
_LAST_EVENTS = 3
_ENTRY = re.compile(r"(shards|run-\d+)/(?!plan\.json$)[^/]+\.json$")
_BEGUN = re.compile(r"run-|append/|rows/plan\.json$")
_LEDGER_OF_TASK = re.compile(rf"slices/(.*/)?(ledgers/|{re.escape(LEDGER_FILE)}$)")
_MOST_BYTES = 1 << 28  # maximum size of a small file
_TAIL_BYTES = 4 << 20  # bytes read at the end of a ledger
_ENDS = {"run_finished", "run_failed", "interrupted", "deadline_reached", "disk_reached"}


@frozen()
class Done:
    """Totals of finished shards, and of finished parts of other shards."""

    num_shards: int = 0
    num_rows: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_dropped_records: int = 0
    num_records: int = 0
    num_bytes: int = 0

    @classmethod
    def of(cls, there: Sequence[ShardFiles | Receipt]) -> Done:
        """Return the totals of shards and of parts of other shards."""
        counts = (Counts.of(made) if isinstance(made, Receipt) else counts_of(made) for made in there)
        return cls(sum(not isinstance(made, Receipt) for made in there), **Counts.of(*counts).by_name())


@frozen()
class Status:
    """The progress of an output. `str` gives a summary.

    Attributes:
        output: the output folder, or its URL.
        state: "empty" (nothing was started), "running" (a process is at work), "unfinished" (none is), "complete", or
            "damaged" (the manifest cannot be read).
        holder: the process at work, with its host; "" if there is none.
        done: numbers of finished shards, rows, records and bytes.
        num_shards, num_rows: planned numbers of an unfinished run; None if no plan is known.
        events: the first and the last ledger lines of the last run.
        changes: the shards that `run` would make now, and why; None if the source was not compared.
        obsolete: existing shards that are no longer in the plan, under any name; `run` removes them.
        note: why this status is incomplete; "" if it is complete.
        tasks: unfinished tasks that share the output: name, the process at work ("" if there is none), and number of
            finished shards. In a store, a killed process counts as at work until another task takes over its shards.
        failures: the skipped or quarantined samples so far; for a complete output, those of `datamat.failures`, as far
            as its ledgers can be read.
    """

    output: pathlib.Path | str
    state: State
    holder: str = ""
    done: Done = Done()
    num_shards: int | None = None
    num_rows: int | None = None
    events: tuple[LedgerEntry, ...] = ()
    changes: tuple[ShardChange, ...] | None = None
    obsolete: tuple[str, ...] = ()
    note: str = ""
    tasks: tuple[tuple[str, str, int], ...] = ()
    failures: tuple[Failure, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the last run is finished; its output may be out of date, see `changes`."""
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

    def __repr__(self) -> str:
        return f"Status({self.output}: {self._headline()})"

    def _repr_html_(self) -> str:
        done = self.done
        facts: list[tuple[str, Any]] = [("output", self.output), ("state", self._headline())]
        if self.num_rows is not None:
            facts.append(("rows", f"{done.num_rows:,} of {self.num_rows:,}"))
            facts.append(("shards", f"{done.num_shards:,} of {self.num_shards:,}"))
        last = Table(["last run"], [[printable(line)] for line in self._story()])
        return render_html("Status", facts, [last], filter(None, [printable(self.note), *self._prospect()]))

    def _headline(self) -> str:
        done = self.done
        size = f"{count_of(done.num_records, 'record')}, {done.num_bytes / 1e6:,.1f} MB"
        if left_out := describe_dropped(done.num_dropped, done.num_dropped_records):
            size += f"; {left_out}"
        if done.num_failed:
            size += f"; {count_of(done.num_failed, 'row')} failed"
        if self.state == "empty":
            return "nothing was started here"
        if self.state == "damaged":
            return "its manifest is damaged; a repair rebuilds it"
        if self.state == "complete":
            return f"complete: {count_of(done.num_shards, 'shard')}, {size}"
        verb = f"being written by {printable(self.holder)}" if self.state == "running" else "not finished"
        remedy = "" if self.state == "running" else "; the next run continues from there"
        if self.num_rows is None:
            return f"{verb}: {count_of(done.num_shards, 'shard')} done, {size}{remedy}"
        share = f"{done.num_rows:,} of {count_of(self.num_rows, 'row')} ({done.num_rows / max(self.num_rows, 1):.0%})"
        return (
            f"{verb}: {share} and {done.num_shards} of {count_of(self.num_shards or 0, 'shard')} done, {size}{remedy}"
        )

    def _story(self) -> list[str]:
        lines = [_describe(entry) for entry in self.events]
        for task, holder, num_shards in self.tasks:
            lines.append(f"{task}: {holder or 'no process is at work'}; {count_of(num_shards, 'shard')} done")
        if self.state == "unfinished" and self.events and self.events[-1].event not in _ENDS:
            lines.append("that run ended silently: it was killed, or the machine went down")
        return lines

    def _prospect(self) -> list[str]:
        if self.changes is None:
            return []
        begun = [change for change in self.changes if change.reasons == (NOT_MADE,)]
        changed = [change for change in self.changes if change.reasons != (NOT_MADE,)]
        lines = [f"  {count_of(len(begun), 'shard')} {NOT_MADE}"] if begun else []
        if changed:
            lines.append(f"  the next run would rebuild or take over {count_of(len(changed), 'shard')}:")
            lines += [f"    {change}" for change in changed]
        if self.obsolete:
            number = count_of(len(self.obsolete), "shard")
            lines.append(f"  the next run would remove {number} that are no longer in the plan:")
            lines += [f"    {name}" for name in self.obsolete]
        return lines or ["  up to date with source, writer and options"]


def status(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Status:
    """Return the progress of an output, from its files; source and writer are not compared.

    Args:
        path: output of the run, finished or not: a folder, or any URL that fsspec can read.
        storage_options: fsspec options for the URL, such as `{"key": ..., "secret": ...}` or `{"anon": True}`.

    Raises:
        OutputError: the URL cannot be read, or the path is a file.
        MissingDependencyError: the package that reads such URLs is not installed.

    Example:
        >>> print(status("out/camvid"))   # doctest: +SKIP
        out/camvid: complete: 3 shards, 256 records, 21.5 MB
          2026-11-21 07:30:00 UTC run_started on host, process 71
    """
    folder = open_folder(path, storage_options)
    refuse_file(folder)
    return _Output(folder).status()


def output_status(job: Job, planned: Sequence[PlannedShard] | None = None) -> Status:
    """Return the progress of a job's output, as `status` does.

    Args:
        job: the job.
        planned: the planned shards, used if an unfinished run left no plan.
    """
    if lock_holder(job.work / "lock"):  # a process at work here knows more than the store
        return _Output(LocalFolder(job.output), job.folder).status(planned)
    return _Output(job.folder).status(planned)


def compared_status(planned: PlannedJob) -> Status:
    """Return the progress of an output, compared with the present source and options."""
    shards = planned.plan.shards
    # The manifest is kept until the end, so that the steps below do not parse it again.
    manifest, known = known_shards(planned.job.output, planned.job.work)
    taken = {} if manifest is None else equal_shards(planned, known)
    changes = find_changes(planned)
    names = {shard.name for shard in planned.chosen}
    found = output_status(planned.job, [PlannedShard.of(shard) for shard in shards])
    loss, again = find_loss(planned, known), planned.job.remedies.again
    return dataclasses.replace(
        found,
        note="; ".join(filter(None, [found.note, loss and f"{again} raises: {loss}", planned.plan.left_aside])),
        changes=tuple(change for change in changes if change.shard in names),
        obsolete=tuple(
            sorted(known.keys() - {shard.name for shard in shards} - {files[0].name for files in taken.values()})
        ),
    )


class _Output:
    """The state of an output, from its files.

    Args:
        root: the folder.
        shared: folder shared by its tasks: the store, if `root` is its scratch folder.
    """

    def __init__(self, root: Folder, shared: Folder | None = None) -> None:
        self._root = root
        self._shared = shared or root
        self._work = root.child(WORK)
        self._names = root.list(WORK, deep=True)  # None for a web server, which has only finished datasets
        # The plan of the unfinished run; in a store, the run begun last, and its plan.
        begun = [name for name in self._names or () if name.startswith("run-") and name.endswith("/plan.json")]
        marks = begun[-1:] or [name for name in self._names or () if name == "rows/plan.json"]
        (mark,) = self._contents(marks) or [None]
        self._mark: dict[str, Any] = mark if isinstance(mark, dict) else {"shards": mark}

    def status(self, planned: Sequence[PlannedShard] | None = None) -> Status:
        """Return its progress; `planned` as for `output_status`."""
        visible, damage = self._visible()
        before = {} if visible is None else by_shard(visible.all_files)
        tasks, shared = ((), {}) if self._names is None else TaskSession(self._shared).tasks()
        made = {name: files for name, files in {**self._entries(), **shared}.items() if files != before.get(name)}
        holder = self._holder() or next((holder for _, holder, _ in tasks if holder), "")
        events, problem = self._last_run()
        state: State = "running" if holder else "unfinished"
        if not holder and (damage or not (made or tasks or self._is_begun)):
            begun: State = "unfinished" if self._names else "empty"
            state = "damaged" if damage else "complete" if visible is not None else begun
        notes = [damage or problem]
        there: list[ShardFiles | Receipt] = [*before.values()]
        if state in {"running", "unfinished"}:
            notes.append("" if holder else self._who_began(events))
            planned = parse_snapshot(self._mark.get("shards")) or planned
            there = [*{**before, **made}.values()]
        else:
            planned = None
        if planned is not None:
            there = self._made_of(planned, made, before)
        of_tasks = [name for name in self._names or () if _LEDGER_OF_TASK.match(name)]
        return Status(
            self._shared.address,
            state,
            holder,
            done=Done.of(there),
            num_shards=None if planned is None else len(planned),
            num_rows=None if planned is None else sum(shard.num_rows for shard in planned),
            events=events,
            note=self._others() if state == "empty" else "; ".join(filter(None, notes)),
            tasks=tasks,
            failures=_failures_of(there, [(self._work, name) for name in (LEDGER_FILE, *sorted(of_tasks))]),
        )

    def _visible(self) -> tuple[Manifest | None, str]:
        """Return the manifest as far as it can be read, and its defect, if any."""
        try:
            return Manifest.read(self._root), ""
        except AbsentError:
            return None, ""
        except CorruptDataError as error:
            with contextlib.suppress(CorruptDataError):
                return Manifest.read(self._root, strict=False), str(error)
            return None, str(error)

    @property
    def _is_begun(self) -> bool:
        """Whether an unpublished run has begun that would change the published set."""
        return any(_BEGUN.match(name) for name in self._names or ())

    # ------------------------------------------------------------ files

    def _contents(self, names: Sequence[str], parse: Callable[[bytes, str], Any] = parse_json) -> list[Any]:
        """Return the values of files in `.datamat`, as a function parses them; None for missing or damaged ones."""

        def content(name: str) -> Any:
            with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
                found = self._work.read_if_there(name, _MOST_BYTES)
                return None if found is None else parse(found, self._work.place(name))
            return None

        return each(content, names)

    def _entries(self) -> dict[str, ShardFiles]:
        """Return the finished shards of an unpublished run, by name."""
        found: dict[str, ShardFiles] = {}
        for value in self._contents([name for name in self._names or () if _ENTRY.match(name)]):
            with contextlib.suppress(ValueError, TypeError, LookupError):
                files = tuple(ShardInfo.from_json(info) for info in value["files"])
                found[files[0].name] = files
        return found

    def _made_of(
        self,
        planned: Sequence[PlannedShard],
        made: Mapping[str, ShardFiles],
        before: Mapping[str, ShardFiles],
    ) -> list[ShardFiles | Receipt]:
        """Return the finished part of planned shards: whole shards, or some of their parts."""
        there: list[ShardFiles | Receipt] = []
        visible = self._root.list() or ()
        receipts = [name for name in self._names or () if name.startswith("parts/") and name.endswith(".receipt")]
        parts: dict[str, list[Receipt]] = {}
        for receipt in filter(None, self._contents(receipts, parse_receipt)):
            parts.setdefault(receipt.shard, []).append(receipt)
        for shard in planned:
            files = made.get(shard.name) or before.get(shard.name, ())
            is_there = files is not before.get(shard.name) or all(info.file in visible for info in files)
            if files and is_there and all(info.fingerprint == shard.fingerprint for info in files):
                there.append(files)
            else:
                there += [one for one in parts.get(shard.name, ()) if one.fingerprint == shard.fingerprint]
        return there

    def _last_run(self) -> tuple[tuple[LedgerEntry, ...], str]:
        """Return the first and last ledger lines of the last run, and the ledger's defect, if any."""
        try:
            there = self._work.stat(LEDGER_FILE)
            num_bytes = 0 if there is None else there.num_bytes
            for start in (max(num_bytes - _TAIL_BYTES, 0), 0):
                content = self._work.read_range(LEDGER_FILE, start, num_bytes).content if num_bytes else b""
                content = content.partition(b"\n")[2] if start else content  # from the beginning of a line
                events, problem = _last_run(
                    parse_ledger(io.BytesIO(content), self._work.place(LEDGER_FILE), without="part_committed")
                )
                if events or problem:
                    return events, problem
        except OSError as error:
            return (), str(error)
        return (), ""

    def _others(self) -> str:
        """Describe what is there if there is no dataset."""
        files = self._root.list()
        if files is None:
            return f"{self._root} has no {MANIFEST_FILE}, and web servers cannot be listed"
        names = [*files] or [*dict.fromkeys(f"{name.partition('/')[0]}/" for name in self._root.list(deep=True) or ())]
        return (
            f"it holds {join_problems(names)}" if names else "there is nothing: correct the path or URL, or run the job"
        )

    # ------------------------------------------------------------ who writes

    def _holder(self) -> str:
        """Return the process at work; for a store, only if it is on this host, else ""."""
        here = self._root.local_path()
        if here is None and self._mark.get("host") == platform.node():
            here = scratch_folder(self._root, None)
        return "" if here is None else lock_holder(here / WORK / "lock")

    def _who_began(self, events: Sequence[LedgerEntry]) -> str:
        """Return the process that last began to write to a store; "" if its end is in the ledger."""
        mark = self._mark
        ended = dict(events[0].values) if events and events[-1].event in _ENDS else {}
        if "pid" not in mark or (ended.get("host"), ended.get("pid")) == (mark.get("host"), mark.get("pid")):
            return ""
        who = f"process {mark.get('pid')} on {mark.get('host')}"
        return f"{who} began to write there last; a store does not show whether it is still at work"


def _failures_of(there: Iterable[ShardFiles | Receipt], ledgers: Iterable[tuple[Folder, str]]) -> tuple[Failure, ...]:
    """Return the failed samples of shards, as far as ledgers list them, and of parts of other shards."""
    lacking: list[ShardInfo] = []
    found: list[Failure] = []
    for made in there:
        if not isinstance(made, Receipt):
            lacking += [info for info in made[:1] if info.num_failed]
            continue
        shard, split = f"{made.shard}.{made.files[0].extension}", ShardName.parse(made.shard).split
        found += [Failure.of(dataclasses.asdict(row), row.action, split=split, shard=shard) for row in made.failed]
    entries = itertools.chain.from_iterable(itertools.starmap(_entries, ledgers)) if lacking else ()
    return (*failures_in(entries, lacking), *found)


def _entries(folder: Folder, ledger: str) -> Iterator[LedgerEntry]:
    with contextlib.suppress(OSError, CorruptDataError):  # damage to the output's ledger is in `note`
        yield from ledger_in(folder, ledger, without="part_committed")


def _last_run(entries: Iterable[LedgerEntry]) -> tuple[tuple[LedgerEntry, ...], str]:
    """Return the first and last entries of the last run, and the ledger's defect, if any."""
    first: LedgerEntry | None = None
    last: collections.deque[LedgerEntry] = collections.deque(maxlen=_LAST_EVENTS)
    note = ""
    try:
        for entry in entries:
            if entry.event == "run_started":
                first = entry
                last.clear()
            else:
                last.append(entry)
    except CorruptDataError as error:
        note = str(error)
    return (() if first is None else (first, *last)), note


def _describe(entry: LedgerEntry) -> str:
    values = dict(entry.values)
    when = f"{entry.time:%Y-%m-%d %H:%M:%S} UTC {entry.event}"
    if entry.event == "run_started":
        return f"{when} on {values.get('host')}, process {values.get('pid')}"
    message = str(values.get("message", ""))
    error = str(values.get("error", ""))
    texts = [text for text in (values.get("key"), "" if message.startswith(error) else error, message) if text]
    counts = [count_of(values[f"{noun}s"], noun) for noun in ("row", "record") if f"{noun}s" in values]
    counts += [f"{count_of(len(values['keys']), 'key')} of {values['shard']}"] if "keys" in values else []
    return f"{when}: {', '.join([*map(str, texts), *counts])}" if texts or counts else when
