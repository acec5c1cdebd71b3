"""The report of a run, counted while it goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from datamat.directory.counts import Counts
from datamat.directory.failures import Failure
from datamat.directory.files import WORK
from datamat.directory.keys import ShardName
from datamat.errors import DatamatError, IncompleteRunError, count_of
from datamat.events import (
    LimitReached,
    PartDamaged,
    PartDone,
    PlanMade,
    RunEvent,
    SampleFailed,
    ShardFinished,
    WorkersStarted,
)
from datamat.options import Remedies
from datamat.run.quarantine import QUARANTINE_FOLDER, safe_name
from datamat.run.timeline import Timeline, TimelineBuilder
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.plan.job import Job

_MOST_FAILURES = 10  # shown in a notebook
_LARGEST_FILE, _MOST_PIXELS, _THUMBNAIL = 16 << 20, 32 << 20, 96  # of their pictures: bytes, pixels, pixels per side


class RunTally:
    """Counts the numbers of the report."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._num_rows_planned = 0
        self._left_aside = ""
        self._workers = WorkersStarted(num_workers=0, start_method="")
        self._shards: dict[str, ShardFinished] = {}
        self._parts: dict[str, dict[int, PartDone]] = {}  # of unfinished shards
        self._failed: dict[tuple[str, int], list[SampleFailed]] = {}  # by shard and part
        self._failed_now: list[SampleFailed] = []  # of the last finished part
        self._num_written = 0
        self._num_resumed = self._num_repeated = 0
        self._busy_s = 0.0
        self._timeline = TimelineBuilder(time.time() - (time.perf_counter() - began))

    def __call__(self, event: RunEvent) -> None:
        """Handle an event; other kinds are ignored."""
        match event:
            case PlanMade():
                self._num_rows_planned = event.num_rows
                self._left_aside = event.plan.left_aside
            case WorkersStarted():
                self._workers = event
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
        """Return the event for a limit that stops the run now."""
        return LimitReached(limit=limit, **self._done().by_name(), num_rows_planned=self._num_rows_planned)

    def report(self, job: Job, *, is_complete: bool, stopped: str) -> RunReport:
        """Return the report of the run so far.

        Args:
            job: the job, with its output and remedies.
            is_complete: whether every shard of the plan is finished.
            stopped: "deadline" or "max_disk" if that ended the run, else "".
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
            num_workers=self._workers.num_workers,
            start_method=self._workers.start_method,
            engine=self._workers.engine,
            stopped=stopped,
            num_shards_held=0 if is_complete else sum(shard.is_held for shard in self._shards.values()),
            remedies=job.remedies,
            timeline=self._timeline.timeline(elapsed_s=elapsed_s, num_workers=self._workers.num_workers),
            failures=tuple(self._failures(job.formats[0].extension)),
        )

    def _failures(self, extension: str) -> Iterator[Failure]:
        for event in itertools.chain.from_iterable(self._failed.values()):
            if event.action != "raise":  # there is no report after an error
                split = ShardName.parse(event.shard).split
                values = {name: getattr(event, name) for name in [field.name for field in dataclasses.fields(event)]}
                yield Failure.of(values, event.action, split=split, shard=f"{event.shard}.{extension}")

    def _done(self) -> Counts:
        """Return the totals of finished shards and of finished parts of other shards."""
        return Counts.of(*self._shards.values(), *(part for parts in self._parts.values() for part in parts.values()))


def describe_dropped(num_dropped: int, num_dropped_records: int) -> str:
    """Describe how much was intentionally left out, for a summary; "" if nothing was."""
    samples = count_of(num_dropped, "sample")
    of_others = " of other samples" if num_dropped else ""
    records = f"{count_of(num_dropped_records, 'record')}{of_others}"
    listed = [text for text, count in ((samples, num_dropped), (records, num_dropped_records)) if count]
    return f"{' and '.join(listed)} left out" if listed else ""


@frozen()
class RunReport:
    """The report of a run. Its `str` is a summary.

    Attributes:
        output: folder of the finished shards.
        is_complete: whether every shard of the plan is finished and the manifest written; False if `include` or
            `exclude` left some out.
        num_rows, num_records, num_bytes: totals of finished shards, plus finished parts if the run stopped early.
        num_shards_written, num_shards_reused: number of shards that this run made, and that it kept unchanged.
        num_parts_written, num_parts_resumed: number of parts that this run made, and that it reused from an interrupted
            one.
        elapsed_s: wall time of the run, in seconds.
        busy_s: CPU time of all workers for parts, in seconds.
        at_work_s: wall time of all workers for parts, in seconds.
        num_workers: number of datamat's own worker processes; 0 if there was nothing to do or an `executor` was used.
        start_method: start method of the workers, and the reason for it.
        engine: name of the engine, such as "Dask at tcp://10.0.0.7:8786"; "" for datamat's own workers.
        num_failed: rows among `num_rows` that failed, in this run or earlier; the ledger says why.
        num_dropped: rows among `num_rows` whose records were all intentionally left out, by `Skip` or None, in this run
            or earlier; the ledger says why.
        num_dropped_records: records, such as single copies, left out from rows that gave others.
        num_parts_repeated: number of parts that an engine is known to have made twice; the first one counts.
        num_rows_planned: number of rows in the shards that this run had to make.
        stopped: "deadline" or "max_disk" if that ended the run early, else "".
        num_shards_held: number of finished shards that are not published yet: they replace others, and wait in
            `.datamat` until the whole plan is finished, so that readers never see a mixture.
        left_aside: number, suffixes and first names of source files that the index does not use.
        remedies: calls that `str` recommends next.
        timeline: which worker made which part when, and the duration of each stage.
        num_rows_there: for an append, the rows of the source that were already there and were left alone.
        num_rows_differing: the number of these that now differ from the source.
        failures: the samples that this run skipped or quarantined, in the order of finished parts; those of unchanged
            shards are in `datamat.failures(output)`.
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
    num_rows_there: int = 0
    num_rows_differing: int = 0
    failures: tuple[Failure, ...] = ()

    @property
    def did_nothing(self) -> bool:
        """Whether there was nothing to do."""
        return not self.stopped and self.num_shards_written == 0 and self.num_parts_written == 0

    @property
    def busy_share(self) -> float:
        """Share of the run in which its workers worked on parts, 0 to 1; 0 with an `executor`."""
        whole_s = self.elapsed_s * self.num_workers
        return min(self.at_work_s / whole_s, 1.0) if whole_s else 0.0

    @property
    def limit(self) -> str:
        """What limited the run, and what to change, in a sentence; "" if unknown."""
        return self.timeline.advice

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of the run in Chrome's Trace Event Format: open the file in ui.perfetto.dev.

        Args:
            path: file to write; its folder must exist.

        Raises:
            OSError: the file cannot be written.

        Example:
            >>> job.run().to_chrome_trace("run.json")   # doctest: +SKIP
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.timeline.chrome_trace(), file)

    def raise_if_incomplete(self) -> RunReport:
        """Raise if the run stopped before the whole plan was finished; return the report otherwise.

        A script that does not catch the error exits with status 1, so that a scheduler restarts it.

        Raises:
            IncompleteRunError: the run is incomplete; says why it stopped, how much is done, and how to resume.

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
        if self.num_rows_there:
            remark = f"{count_of(self.num_rows_there, 'row')} already there, left as they are"
            differing = f"; {self.num_rows_differing:,} of them differ from the source now"
            remarks.append(remark + (differing if self.num_rows_differing else ""))
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
        from datamat.directory.display import Table, render_html

        rows = [
            [failure.key, failure.reason, _thumbnail(failure, self.output)]
            for failure in self.failures[:_MOST_FAILURES]
        ]
        num_more = len(self.failures) - len(rows)
        more = f"and {num_more:,} more failed; {self.remedies.failures} says why" if num_more else ""
        return render_html(
            "RunReport", self._facts, [Table(["failed", "reason", ""], rows)], filter(None, [more, self.limit])
        )

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


def _thumbnail(failure: Failure, output: pathlib.Path | str) -> bytes | str:
    """Return a thumbnail of a failed sample's picture as a JPEG; "" if it has no readable one."""
    import cv2

    from datamat import codecs
    from datamat.codecs.files import PICTURES

    kept = pathlib.Path(output, WORK, QUARANTINE_FOLDER, safe_name(failure.split or "none"), safe_name(failure.key))
    with contextlib.suppress(OSError, ValueError):
        for path in [failure.path, *map(str, sorted(kept.iterdir()) if kept.is_dir() else ())]:
            if not path.lower().endswith(PICTURES):
                continue
            with contextlib.suppress(DatamatError, cv2.error):
                data = codecs.read_file(path, max_bytes=_LARGEST_FILE)
                info = codecs.probe(data, max_pixels=_MOST_PIXELS)
                scale = min(_THUMBNAIL / max(info.width, info.height), 1.0)
                small = cv2.resize(codecs.decode_image(data, channels=3), None, fx=scale, fy=scale, interpolation=3)
                return codecs.encode_jpeg(small)
    return ""
