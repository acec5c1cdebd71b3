"""The timeline of a run: which worker made which part, the time of each stage, and what limits the run.

a worker: StageClock ── PartTrace, in its receipt ──> Timeline, in the report ──> a trace for Perfetto
"""

from __future__ import annotations

import collections
from typing import Any

from datamat.errors import count_of
from datamat.events import PartTrace
from datamat.values import frozen

STAGES = ("read", "decode", "transform", "encode", "write")
"""Stages in order; "read" is everything that is not in another stage."""
_REMEDIES = {
    "read": "reading the samples (`read` of the writer): read less of each file, decode at the size that is stored, or "
    "hand over the bytes of files that need no change",
    "decode": "decoding pictures for the transform: store smaller pictures, or source files that decode faster",
    "transform": "the transform: crop before costly steps, or draw fewer copies",
    "encode": "encoding: JPEG instead of PNG where losses are acceptable, or the bytes of files that need no change",
    "write": "writing shards: an uncompressed format, or a faster disk for the output",
}
_LEAST_AT_WORK, _LEAST_BUSY, _LEAST_PARTS = 0.6, 0.5, 0.5
_MOST_PARTS = 20_000  # whose times and workers a run remembers: 10 MB
_MOST_SLOW = 10
_US = 1e6


class Totals:
    """Totals of the parts that a run has made so far."""

    def __init__(self) -> None:
        self.stages: collections.Counter[str] = collections.Counter()
        self.busy_s = self.at_work_s = 0.0
        self._began_at, self._ended_at = float("inf"), 0.0

    def add(self, trace: PartTrace) -> None:
        """Add a part."""
        self.stages.update(trace.stages)
        self.busy_s += trace.busy_s
        self.at_work_s += trace.elapsed_s
        self._began_at = min(self._began_at, trace.began_at)
        self._ended_at = max(self._ended_at, trace.ended_at)

    @property
    def span_s(self) -> float:
        """Seconds from the start of the first part to the end of the last; 0 if there are none."""
        return max(0.0, self._ended_at - self._began_at)

    def limit(self, num_workers: int) -> tuple[str, str]:
        """Return what limits the run, in a word and in a sentence that says what to change; "" if unknown.

        Args:
            num_workers: number of workers; 0 if unknown.
        """
        if not self.at_work_s:
            return "", ""
        whole_s = self.span_s * num_workers
        if whole_s and self.at_work_s < _LEAST_AT_WORK * whole_s:
            return "too few parts", (
                f"Parts kept {count_of(num_workers, 'worker')} at work {self.at_work_s / whole_s:.0%} of the time: "
                "there were too few to keep them busy; fewer workers would take as long, `workers=...`."
            )
        stage, seconds = max(self.stages.items(), key=lambda item: item[1])
        if self.busy_s < _LEAST_BUSY * self.at_work_s:
            which = "output" if stage == "write" else "source"
            option = ", `WorkerOptions(num_workers=...)`" if num_workers else ""
            return "waiting", (
                f"Workers waited {1 - self.busy_s / self.at_work_s:.0%} of their time, for the disk, the network or a "
                f"processor that others use, and {stage} took longest: put the {which} on a faster disk, or take more "
                f"workers than cores{option}."
            )
        share = seconds / max(sum(self.stages.values()), 1e-9)
        return stage, f"{share:.0%} of the work is {_REMEDIES[stage]}; or take more cores."


@frozen(kw_only=True)
class Timeline:
    """The timeline of a run.

    Attributes:
        began_at: start of the run, in seconds since 1970.
        elapsed_s: wall time of the run, in seconds.
        num_workers: number of datamat's own workers; 0 with an `executor`.
        parts: the parts that the run made, in order of completion; only the first ones if there are very many.
        limit: what limited the run, in a word: a stage, "waiting", "too few parts" or "start and end"; "" where nothing
            is known.
        advice: the same in a sentence, with what to change.
    """

    began_at: float = 0.0
    elapsed_s: float = 0.0
    num_workers: int = 0
    parts: tuple[PartTrace, ...] = ()
    limit: str = ""
    advice: str = ""

    @property
    def workers(self) -> dict[str, list[PartTrace]]:
        """The parts of each worker, in order."""
        found: dict[str, list[PartTrace]] = {}
        for part in sorted(self.parts, key=lambda part: part.began_at):
            found.setdefault(part.worker, []).append(part)
        return found

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of all parts by stage, in order."""
        return {stage: sum(part.stages.get(stage, 0.0) for part in self.parts) for stage in STAGES}

    @property
    def slowest(self) -> list[tuple[str, float]]:
        """Keys and seconds of the slowest rows."""
        return sorted((row for part in self.parts for row in part.slowest), key=lambda row: (-row[1], row[0]))[
            :_MOST_SLOW
        ]

    def chrome_trace(self) -> dict[str, Any]:
        """Return the timeline as JSON values in Chrome's Trace Event Format, which ui.perfetto.dev opens.

        The stages of a part are shown one after another, although they alternate from sample to sample.
        """
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "datamat"}}]
        for number, (worker, parts) in enumerate(self.workers.items(), 1):
            lane: dict[str, Any] = {"pid": 1, "tid": number}
            name = f"worker {number} ({worker})"
            events.append({"ph": "M", "name": "thread_name", **lane, "args": {"name": name}})
            for part in parts:
                at = (part.began_at - self.began_at) * _US
                memory = {"MB": round(part.peak_bytes / 1e6, 1)}
                about = {
                    "records": part.num_records,
                    "bytes": part.num_bytes,
                    "processor_s": round(part.busy_s, 6),
                    "slowest": {key: round(seconds, 6) for key, seconds in part.slowest},
                }
                span = {"ph": "X", "ts": round(at, 3), "dur": round(part.elapsed_s * _US, 3), **lane}
                events.append({"name": f"{part.shard} part {part.part}", "cat": "part", **span, "args": about})
                for stage, begin, seconds in _stages_of(part):
                    place = {"ts": round(at + begin * _US, 3), "dur": round(seconds * _US, 3)}
                    events.append({"ph": "X", "name": stage, "cat": "stage", **place, **lane})
                end = round(at + part.elapsed_s * _US, 3)
                events.append({"ph": "C", "name": f"peak memory of {name}", "ts": end, "pid": 1, "args": memory})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


class TimelineBuilder:
    """Builds the timeline during the run.

    Args:
        began_at: start of the run, in seconds since 1970.
    """

    def __init__(self, began_at: float) -> None:
        self.totals = Totals()
        self._began_at = began_at
        self._parts: list[PartTrace] = []

    def add(self, trace: PartTrace) -> None:
        """Add a part."""
        self.totals.add(trace)
        if len(self._parts) < _MOST_PARTS:
            self._parts.append(trace)

    def timeline(self, *, elapsed_s: float, num_workers: int) -> Timeline:
        """Return the timeline so far."""
        limit, advice = self.totals.limit(num_workers)
        if limit and (parts_s := self.totals.span_s) < _LEAST_PARTS * elapsed_s:
            limit = "start and end"
            advice = (
                f"The parts took {parts_s:.1f} of {elapsed_s:.1f} s; the rest went to index, plan, the start of the "
                "workers and the manifest, which hardly grow with the run: nothing has to change."
            )
        return Timeline(
            began_at=self._began_at,
            elapsed_s=elapsed_s,
            num_workers=num_workers,
            parts=tuple(self._parts),
            limit=limit,
            advice=advice,
        )


def _stages_of(part: PartTrace) -> list[tuple[str, float, float]]:
    """Return the stages of a part, with start and duration in seconds, as if one came after another."""
    found, begin = [], 0.0
    for stage in STAGES:
        seconds = part.stages.get(stage, 0.0)
        if seconds > 0:
            found.append((stage, begin, seconds))
            begin += seconds
    return found
