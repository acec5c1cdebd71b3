"""Defines the events of a run, as its hooks hear them: one class for each kind.

A hook is a callable of one event, passed as `hooks=[...]`. It handles the events that it cares about; each is a frozen
dataclass whose attributes describe what happened.

>>> from datamat.events import PartDone
>>> counts = []
>>> def count(event):
...     if isinstance(event, PartDone):
...         counts.append(event.num_records)
>>> Materializer("camvid", "CamVid", "out/camvid").run(hooks=[count])   # doctest: +SKIP

A hook may rely on this:

- It is called in the process and the thread that called `run` or `repair`, one event at a time; it never travels to a
  worker, and may hold objects that cannot be pickled.
- `RunStarted` comes first and `RunEnded` last, each once per run, however the run ends, unless the process is killed.
  `repair` may do several runs. `PlanMade` comes before anything about workers, parts, samples and shards.
- The result that an event reports is already on disk and in the ledger: a process killed inside a hook loses no work,
  and the next run resumes from there.
- Each part of the shards that the run makes gets `PartDone`, before the samples of that part that failed or were
  retried, and before the `ShardFinished` of its shard. A part that `PartDamaged` names in `again` gets another one.
  Parts come in the order in which workers finish them; nothing about the output depends on it.
- A shard that needs no work only gets `ShardFinished`, with `is_reused`.
- Workers do not wait for hooks, but the driver does: while a hook runs, finished parts are not joined. Keep it short,
  or hand the event to a thread.

A hook that raises an `Exception` is logged once, with its traceback, and hears nothing more of the run, which
continues; the next run calls it again. `KeyboardInterrupt` and `SystemExit` pass through: they end the run as Ctrl-C
does, and the next run resumes from there.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Literal

import datamat
from datamat.directory.manifest import ShardFiles, counts_of
from datamat.options import ErrorPolicy, ShardOptions, WorkerOptions
from datamat.plan.plan import Plan, ShardSpec
from datamat.values import frozen

__all__ = [
    "LimitReached",
    "PartDamaged",
    "PartDone",
    "PartTrace",
    "PlanMade",
    "RunEnded",
    "RunEvent",
    "RunStarted",
    "SampleDropped",
    "SampleFailed",
    "SampleRecovered",
    "SampleRetried",
    "ShardFinished",
    "WorkerLost",
    "WorkersStarted",
]


def __dir__() -> list[str]:
    return __all__


class RunEvent:
    """Something that happened in a run, passed to hooks. See `datamat.events`."""

    __slots__ = ()


@frozen(kw_only=True)
class RunStarted(RunEvent):
    """A run has locked its output, and has touched nothing yet.

    Attributes:
        output: folder of the finished shards.
        name: name of the dataset.
        writer: class of the writer, as "module:Class".
        formats: names of the shard formats.
        seed: base seed; with the sample key it decides every random draw.
        copies: records per input row, for all splits or by split.
        include: shell patterns of the shards to make; None makes all.
        exclude: shell patterns of the shards to leave out.
        shards: how samples are laid out in files.
        workers: the processes that do the work.
        errors: what happens to samples that fail.
    """

    output: pathlib.Path | str
    name: str
    writer: str
    formats: tuple[str, ...]
    seed: int
    copies: int | Mapping[str, int]
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    shards: ShardOptions
    workers: WorkerOptions
    errors: ErrorPolicy


@frozen(kw_only=True)
class PlanMade(RunEvent):
    """The source is indexed, and every row has its shard.

    Attributes:
        plan: the whole plan.
        shards: names of the shards that this run will have at its end.
        num_rows: input rows of these shards.
        num_records: records that they hold if no row fails.
    """

    plan: Plan
    shards: tuple[str, ...]
    num_rows: int
    num_records: int

    @classmethod
    def of(cls, plan: Plan, shards: Sequence[ShardSpec]) -> PlanMade:
        """Return the event for a plan and its shards to make."""
        return cls(
            plan=plan,
            shards=tuple(shard.name for shard in shards),
            num_rows=sum(shard.num_rows for shard in shards),
            num_records=sum(shard.num_rows * shard.copies for shard in shards),
        )


@frozen(kw_only=True)
class WorkersStarted(RunEvent):
    """The first parts are handed out; comes again if a job that one worker began turns out to need all.

    Attributes:
        num_workers: datamat's own worker processes; 0 if an `executor` does the work.
        start_method: start method of these processes, and why it was chosen; "" if an `executor` does the work.
        engine: name of the engine behind the `executor`, with its address if it has one; "" for datamat's own.
    """

    num_workers: int
    start_method: str
    engine: str = ""


@frozen(kw_only=True)
class PartTrace:
    """When and where a part was made, and how long each stage took.

    Attributes:
        shard: name of the shard.
        part: number of the part in its shard.
        worker: host and process that made it, as "host:pid".
        began_at: when the part was begun, in seconds since 1970 by the clock of that host.
        elapsed_s: wall time in seconds.
        busy_s: processor time in seconds.
        num_records: number of its records.
        num_bytes: size of its records in all formats.
        peak_bytes: peak resident memory of the worker so far.
        stages: seconds of each stage: "read", "decode", "transform", "encode", "write".
        slowest: keys of the slowest rows, with their seconds; rows made many at once are left out.
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


@frozen(kw_only=True)
class PartDone(RunEvent):
    """A part of a shard is done: its records and its receipt are on disk.

    Attributes:
        shard: name of the shard.
        part: number of the part in its shard.
        num_rows: input rows of the part.
        num_failed: rows among them that failed.
        num_dropped: rows among them that were left out on purpose.
        num_dropped_records: records that were left out on purpose, from rows that gave others.
        num_records: records that the others gave.
        num_bytes: size of these records in all formats.
        busy_s: processor time that the worker spent on the part.
        is_resumed: whether an earlier run did the part, and this one reuses it.
        is_repeated: whether an engine repeated the call after another worker had completed the part, which is kept.
        trace: when and where the part was made, and how long each stage took; None for a part from an earlier run.
    """

    shard: str
    part: int
    num_rows: int
    num_failed: int
    num_dropped: int
    num_dropped_records: int
    num_records: int
    num_bytes: int
    busy_s: float
    is_resumed: bool
    is_repeated: bool = False
    trace: PartTrace | None = None


@frozen(kw_only=True)
class PartDamaged(RunEvent):
    """A part changed between its worker and its shard, as on a bad disk, and is rebuilt.

    Attributes:
        shard: name of the shard.
        part: number of the part in its shard.
        again: numbers of all parts of the shard that are rebuilt.
        message: what is wrong with the part.
    """

    shard: str
    part: int
    again: tuple[int, ...]
    message: str


@frozen(kw_only=True)
class SampleDropped(RunEvent):
    """A sample was left out on purpose, by `Skip` or None, which is not a failure.

    Attributes:
        shard: name of the shard that lacks it.
        position: place of its row in the order of the plan.
        key: key of its row; if the row gave others, KEY#COPY or KEY#COPY-NUMBER of the one that was left out.
        error: name of the class: "Skip", or a subclass of it; "NoSample" if None or nothing was returned.
        message: reason that was given.
        is_resumed: whether an earlier run left it out, whose part this one reuses.
    """

    shard: str
    position: int
    key: str
    error: str
    message: str
    is_resumed: bool


@frozen(kw_only=True)
class SampleFailed(RunEvent):
    """A sample failed, and gave no record.

    Attributes:
        shard: name of the shard that lacks it; "" if the failure ends the run.
        position: place of its row in the order of the plan; -1 if the failure ends the run.
        key: key of its row.
        error: name of the exception's class.
        message: what went wrong.
        action: response of the run: "skip" or "quarantine" continues without the sample, "raise" ends the run.
        attempts: how often it was tried.
        row: number of its row in the index, from 0; -1 if the failure ends the run.
        path: path or URL of its input file; "" if it has none, or the failure ends the run.
        traceback: traceback of the exception; "" if none was raised, or the failure ends the run.
        is_resumed: whether it failed in an earlier run, whose part this one reuses.
    """

    shard: str
    position: int
    key: str
    error: str
    message: str
    action: Literal["skip", "quarantine", "raise"]
    attempts: int
    row: int
    path: str
    traceback: str
    is_resumed: bool


@frozen(kw_only=True)
class SampleRetried(RunEvent):
    """A sample failed at first, and gave its records when it was tried again.

    Attributes:
        shard: name of the shard.
        position: place of its row in the order of the plan.
        key: key of its row.
        error: name of the class of the last exception.
        message: description of the last failure.
        attempts: how often it was tried.
        is_resumed: whether an earlier run tried it, whose part this one reuses.
    """

    shard: str
    position: int
    key: str
    error: str
    message: str
    attempts: int
    is_resumed: bool


@frozen(kw_only=True)
class SampleRecovered(RunEvent):
    """A sample that an earlier run quarantined is good now.

    Attributes:
        shard: name of the shard.
        key: key of its row.
    """

    shard: str
    key: str


@frozen(kw_only=True)
class WorkerLost(RunEvent):
    """A worker died, or was ended because a sample ran out of time; its part is retried.

    Attributes:
        shard: name of the shard.
        part: number of the part in its shard.
        key: key of the row that it was working on, the first one of a block; None if there was none.
        num_rows: rows that it was working on: more than one in a block.
        timed_out: whether a sample ran longer than `sample_timeout_s`.
        message: signal or exit code, peak memory and, if known, the Python stack.
    """

    shard: str
    part: int
    key: str | None
    num_rows: int
    timed_out: bool
    message: str


@frozen(kw_only=True)
class ShardFinished(RunEvent):
    """All parts of a shard are in its files, which are flushed to disk.

    Attributes:
        shard: name of the shard.
        split: name of its split.
        files: names of its files in the output, one per format.
        num_rows: input rows of the shard.
        num_failed: rows among them that failed.
        num_dropped: rows among them that were left out on purpose.
        num_dropped_records: records that were left out on purpose, from rows that gave others.
        num_records: records of the shard.
        num_bytes: size of its files.
        is_reused: whether an earlier run finished it, and this one leaves it unchanged.
        is_held: whether its files wait in `.datamat`, without their final names, until all shards that replace others
            are finished.
    """

    shard: str
    split: str
    files: tuple[str, ...]
    num_rows: int
    num_failed: int
    num_dropped: int
    num_dropped_records: int
    num_records: int
    num_bytes: int
    is_reused: bool
    is_held: bool

    @classmethod
    def of(cls, shard: ShardSpec, files: ShardFiles, *, is_reused: bool, is_held: bool) -> ShardFinished:
        """Return the event of a shard with these files."""
        return cls(
            shard=shard.name,
            split=shard.split,
            files=tuple(info.file for info in files),
            **counts_of(files).by_name(),
            is_reused=is_reused,
            is_held=is_held,
        )


@frozen(kw_only=True)
class LimitReached(RunEvent):
    """The run stops here, with work left.

    Attributes:
        limit: name of the limit: "deadline" or "max_disk".
        num_rows: input rows that are done.
        num_failed: rows among them that failed.
        num_dropped: rows among them that were left out on purpose.
        num_dropped_records: records that were left out on purpose, from rows that gave others.
        num_records: records that the others gave.
        num_bytes: size of these records in all formats.
        num_rows_planned: input rows that the run was to do.
    """

    limit: Literal["deadline", "max_disk"]
    num_rows: int
    num_failed: int
    num_dropped: int
    num_dropped_records: int
    num_records: int
    num_bytes: int
    num_rows_planned: int


@frozen(kw_only=True)
class RunEnded(RunEvent):
    """The run is over; nothing comes after this event.

    Attributes:
        report: what `run` is about to return; None if an error ended the run.
        error: what `run` is about to raise, `KeyboardInterrupt` included; None if it returns.
    """

    report: datamat.RunReport | None
    error: BaseException | None
