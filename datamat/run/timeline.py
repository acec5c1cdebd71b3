"""The timeline of a run: which worker was at which part, what each stage took, and what limits the run.

a worker: StageClock ── PartTrace, in its receipt ──> Timeline, in the report ──> a page, a trace for Perfetto
"""

from __future__ import annotations

import base64
import collections
import html
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.directory.display import render_document
from datamat.errors import count_of
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.directory.failures import Failure


__all__ = ["PartTrace", "Timeline", "TimelineBuilder", "Totals", "render_page"]

STAGES = ("read", "decode", "transform", "encode", "write")
"""Stages in their order; "read" is all that is none of the others."""
_REMEDIES = {
    "read": "reading the samples (`read` of the writer): read less of each file, decode at the size that is stored, or "
    "hand over the bytes of files that need no change",
    "decode": "decoding pictures for the transform: store smaller pictures, or source files that decode faster",
    "transform": "the transform: crop before costly steps, or draw fewer copies",
    "encode": "encoding: JPEG in place of PNG where its loss is no matter, or the bytes of files that need no change",
    "write": "writing shards: an uncompressed format, or a faster disk for the output",
}
_LEAST_AT_WORK, _LEAST_BUSY, _LEAST_PARTS = 0.6, 0.5, 0.5
_MOST_PARTS = 20_000  # of which a run remembers when and where they were made: 10 MB
_MOST_SLOW = 10
_MOST_FAILED = 200
_US = 1e6


@frozen(kw_only=True)
class PartTrace:
    """When and where a part was made, and what took how long.

    Attributes:
        shard: name of the shard.
        part: number of the part in its shard.
        worker: host and process that made it, as "host:pid".
        began_at: when that began, in seconds since 1970 by the clock of that host.
        elapsed_s: wall time that it took, in seconds.
        busy_s: processor time that it took, in seconds.
        num_records: number of its records.
        num_bytes: size of its records in all formats.
        peak_bytes: highest resident memory that the worker has had so far.
        stages: seconds of each stage: "read", "decode", "transform", "encode", "write".
        slowest: keys of the rows that took longest, with their seconds; rows that are made many at once are left out.
    """

    shard: str
    part: int
    worker: str
    began_at: float
    elapsed_s: float
    busy_s: float
    num_records: int
    num_bytes: int
    peak_bytes: int
    stages: Mapping[str, float]
    slowest: tuple[tuple[str, float], ...] = ()

    @property
    def ended_at(self) -> float:
        """When it was done."""
        return self.began_at + self.elapsed_s


class Totals:
    """Sums over the parts that a run has made so far."""

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
        """Seconds from the begin of the first part to the end of the last; 0 where there is none."""
        return max(0.0, self._ended_at - self._began_at)

    def limit(self, num_workers: int) -> tuple[str, str]:
        """Return what limits the run, in a word and in a sentence that says what to change; "" where nothing is known.

        Args:
            num_workers: number of workers; 0 where it is not known.
        """
        if not self.at_work_s:
            return "", ""
        whole_s = self.span_s * num_workers
        if whole_s and self.at_work_s < _LEAST_AT_WORK * whole_s:
            return "too few parts", (
                f"The {num_workers} workers were at a part {self.at_work_s / whole_s:.0%} of the time: there were too "
                "few parts to keep them busy; fewer workers would take as long, `WorkerOptions(num_workers=...)`."
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
    """What a run did when.

    Attributes:
        began_at: when the run began, in seconds since 1970.
        elapsed_s: wall time of the run, in seconds.
        num_workers: number of datamat's own workers; 0 where an `executor` did the work.
        parts: the parts that the run made, in the order in which they were done; of very many the first.
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
        """The parts of each worker, in order of time."""
        found: dict[str, list[PartTrace]] = {}
        for part in sorted(self.parts, key=lambda part: part.began_at):
            found.setdefault(part.worker, []).append(part)
        return found

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of all parts by stage, in the order of the stages."""
        return {stage: sum(part.stages.get(stage, 0.0) for part in self.parts) for stage in STAGES}

    @property
    def slowest(self) -> list[tuple[str, float]]:
        """Keys and seconds of the rows that took longest."""
        return sorted((row for part in self.parts for row in part.slowest), key=lambda row: (-row[1], row[0]))[
            :_MOST_SLOW
        ]

    def chrome_trace(self) -> dict[str, Any]:
        """Return the timeline as JSON values in Chrome's Trace Event Format, which ui.perfetto.dev opens.

        The stages of a part stand one after another, although they alternate from sample to sample.
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
    """Puts the timeline together while the run goes on.

    Args:
        began_at: when the run began, in seconds since 1970.
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
        """Return the timeline as it is now."""
        limit, advice = self.totals.limit(num_workers)
        if limit and (parts_s := self.totals.span_s) < _LEAST_PARTS * elapsed_s:
            limit = "start and end"
            advice = (
                f"The parts took {parts_s:.1f} of {elapsed_s:.1f} s; the rest went to index, plan, the start of the "
                "workers and the manifest, which a larger run hardly lengthens: nothing has to change."
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
    """Return the stages of a part, with begin and length in seconds, as if one came after another."""
    found, begin = [], 0.0
    for stage in STAGES:
        seconds = part.stages.get(stage, 0.0)
        if seconds > 0:
            found.append((stage, begin, seconds))
            begin += seconds
    return found


# ---------------------------------------------------------------- the page
#
# One file without scripts: SVG drawn in coordinates of 0 to 1,000. Bars that would be narrower than half a unit are
# drawn together, so that the page of a long run is no larger than that of a short one.


_WIDTH = 1000.0
_LANE, _LABEL = 20, 18
_CHART = 90
_NUM_STEPS = 100
_COLOURS = {"read": "#0072b2", "decode": "#56b4e9", "transform": "#e69f00", "encode": "#009e73", "write": "#cc79a7"}
_STYLE = """
.advice { background: var(--box); border-left: 4px solid #e69f00; padding: .6em 1em }
svg { width: 100%; display: block; background: var(--box) } svg text { fill: var(--ink); font-size: 12px }
.cards { display: flex; flex-wrap: wrap; gap: 12px } .cards div { width: 160px; overflow-wrap: anywhere }
.cards img { max-width: 100%; display: block }
"""


def render_page(
    title: str,
    facts: Iterable[tuple[str, str]],
    timeline: Timeline,
    failed: Sequence[Failure],
    pictures: Mapping[str, bytes],
) -> str:
    """Return the page of a run, as HTML that needs no other file.

    Args:
        title: first line.
        facts: names with their values, for the table at the top.
        timeline: what the run did when.
        failed: samples that the run did without; of very many the page shows the first.
        pictures: PNG images of these, by key.
    """
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="advice">{_with_code(timeline.advice)}</p>' if timeline.advice else "",
        _table([[name, value] for name, value in facts]),
    ]
    if timeline.parts:
        sections += [
            "<h2>Workers</h2>",
            _legend(),
            _lanes(timeline),
            "<h2>Records per second</h2>",
            _chart(_throughput(timeline), _span(timeline), "{:,.0f}"),
            "<h2>Peak memory of the largest worker, MB</h2>",
            _chart(_memory(timeline), _span(timeline), "{:,.0f}"),
            "<h2>Stages</h2>",
            _stage_table(timeline),
        ]
    if timeline.slowest:
        rows = [[key, _Number(f"{seconds * 1e3:,.1f} ms")] for key, seconds in timeline.slowest]
        sections += ["<h2>Slowest samples</h2>", _table(rows)]
    if failed:
        sections += ["<h2>Samples that failed</h2>", _cards(failed[:_MOST_FAILED], pictures)]
    return render_document(title, "\n".join(section for section in sections if section), style=_STYLE)


class _Number(str):
    """A cell that is set to the right."""

    __slots__ = ()


def _table(rows: Iterable[Sequence[str]]) -> str:
    def cell(text: str) -> str:
        kind = ' class="n"' if isinstance(text, _Number) else ""
        return f"<td{kind}>{html.escape(text)}</td>"

    return f"<table>{''.join('<tr>' + ''.join(map(cell, row)) + '</tr>' for row in rows)}</table>"


def _legend() -> str:
    keys = " ".join(
        f'<span style="white-space:nowrap"><i class="key" style="background:{colour}"></i>{name}</span>'
        for name, colour in _COLOURS.items()
    )
    return f'<p class="faint">One lane per worker, one bar per part; the stages of a part side by side: {keys}</p>'


def _span(timeline: Timeline) -> float:
    ends = [part.ended_at - timeline.began_at for part in timeline.parts]
    return max([timeline.elapsed_s, *ends, 1e-6])


def _lanes(timeline: Timeline) -> str:
    span, drawn = _span(timeline), []
    workers = timeline.workers
    for number, parts in enumerate(workers.values()):
        top = number * (_LANE + _LABEL) + _LABEL
        share = sum(part.elapsed_s for part in parts) / span
        drawn += [_bar(group, timeline.began_at, span, top) for group in _groups(parts, span)]
        label = f"worker {number + 1}: {share:.0%} busy, {count_of(len(parts), 'part')}"
        drawn.append(f'<text x="4" y="{top - 5}">{label}</text>')
    return _svg("".join(drawn), len(workers) * (_LANE + _LABEL)) + _axis(span)


def _groups(parts: Sequence[PartTrace], span: float) -> list[list[PartTrace]]:
    """Return parts that follow one another, those together that are too short to be seen alone."""
    least, groups = span / _WIDTH / 2, list[list[PartTrace]]()
    for part in parts:
        group = groups[-1] if groups else []
        if group and part.ended_at - group[0].began_at < least:
            group.append(part)
        else:
            groups.append([part])
    return groups


def _bar(group: Sequence[PartTrace], began_at: float, span: float, top: float) -> str:
    left = (group[0].began_at - began_at) / span * _WIDTH
    width = max((group[-1].ended_at - group[0].began_at) / span * _WIDTH, 0.5)
    first = group[0]
    name = (
        f"{first.shard} part {first.part}" if len(group) == 1 else f"{count_of(len(group), 'part')} from {first.shard}"
    )
    seconds = {stage: sum(part.stages.get(stage, 0.0) for part in group) for stage in STAGES}
    whole = sum(seconds.values()) or 1.0
    told = [f"{name}: {count_of(sum(part.num_records for part in group), 'record')}"]
    told += [f"{stage} {value:.3f} s" for stage, value in seconds.items() if value]
    pieces, x = [f"<title>{html.escape(chr(10).join(told))}</title>"], left
    for stage, value in seconds.items():
        wide = width * value / whole
        if wide:
            pieces.append(_rect(x, top, wide, _LANE, _COLOURS[stage]))
        x += wide
    edge = f'<path d="M{left:.2f} {top}v{_LANE}" stroke="var(--box)"/>' if width > 2 else ""
    return f"<g>{''.join(pieces)}{edge}</g>"


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{colour}"/>'


def _svg(inner: str, height: float) -> str:
    return f'<svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img">{inner}</svg>'


def _axis(span: float) -> str:
    digits = 1 if span >= 2 else 2
    labels = "".join(
        f'<text x="{min(max(_WIDTH * tick / 4, 2), _WIDTH - 2):.0f}" y="12" '
        f'text-anchor="{("start", "middle", "middle", "middle", "end")[tick]}">{span * tick / 4:,.{digits}f} s</text>'
        for tick in range(5)
    )
    return _svg(labels, 16)


def _throughput(timeline: Timeline) -> np.ndarray:
    """Return records per second in each step, float64 (steps,): those of a part are spread over its time."""
    span = _span(timeline)
    edges = np.linspace(0, span, _NUM_STEPS + 1)
    found = np.zeros(_NUM_STEPS)
    for part in timeline.parts:
        begin, end = part.began_at - timeline.began_at, max(part.ended_at - timeline.began_at, 1e-9)
        overlap = np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin), 0, None)
        found += part.num_records * overlap / max(end - begin, 1e-9)
    return found / (span / _NUM_STEPS)


def _with_code(text: str) -> str:
    """Return a sentence as HTML, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _memory(timeline: Timeline) -> np.ndarray:
    """Return the memory of the largest worker in each step, or before it, in MB, float64 (steps,)."""
    span, found = _span(timeline), np.zeros(_NUM_STEPS)
    for part in timeline.parts:
        first = min(max(int((part.began_at - timeline.began_at) / span * _NUM_STEPS), 0), _NUM_STEPS - 1)
        last = min(max(int((part.ended_at - timeline.began_at) / span * _NUM_STEPS), 0), _NUM_STEPS - 1)
        found[first : last + 1] = np.maximum(found[first : last + 1], part.peak_bytes / 1e6)
    known = np.flatnonzero(found)
    if len(known):
        between = np.arange(known[0], known[-1] + 1)
        found[between] = found[known[np.searchsorted(known, between, side="right") - 1]]
    return found


def _chart(values: np.ndarray, span: float, number: str) -> str:
    most = float(values.max()) or 1.0
    step = _WIDTH / len(values)
    tops = _CHART - values / most * (_CHART - 18)
    line = "".join(f"L{x * step:.1f} {y:.1f}H{(x + 1) * step:.1f}" for x, y in enumerate(tops.tolist()))
    area = f'<path d="M0 {_CHART}{line}V{_CHART}Z" fill="#0072b2" fill-opacity=".35" stroke="#0072b2"/>'
    return _svg(f'{area}<text x="4" y="13">{number.format(most)} at most</text>', _CHART) + _axis(span)


def _stage_table(timeline: Timeline) -> str:
    stages = timeline.stages
    whole = sum(stages.values()) or 1.0
    rows = [[name, _Number(f"{seconds:,.2f} s"), _Number(f"{seconds / whole:.0%}")] for name, seconds in stages.items()]
    return _table(rows)


def _cards(failed: Sequence[Failure], pictures: Mapping[str, bytes]) -> str:
    cards = []
    for sample in failed:
        image = ""
        if sample.key in pictures:
            data = base64.b64encode(pictures[sample.key]).decode()
            image = f'<img alt="{html.escape(sample.key)}" src="data:image/png;base64,{data}">'
        cards.append(
            f"<div>{image}<b>{html.escape(sample.key)}</b><br>{html.escape(sample.reason[:400])} "
            f'<span class="faint">({html.escape(sample.action)})</span></div>'
        )
    return f'<div class="cards">{"".join(cards)}</div>'
