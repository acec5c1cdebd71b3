"""What happens in a run, as its hooks hear it: one class of event for each kind.

A hook is a callable of one event, passed as `hooks=[...]`. It looks at the events that it cares for, each a frozen
dataclass whose attributes describe what happened.

>>> from datamat.events import PartDone
>>> counts = []
>>> def count(event):
...     if isinstance(event, PartDone):
...         counts.append(event.num_records)
>>> Materializer("camvid", "CamVid", "out/camvid").run(hooks=[count])   # doctest: +SKIP

What a hook may rely on:

- It is called in the process and the thread that called `run` or `repair`, one event at a time; it never travels to a
  worker, and may hold what cannot be pickled.
- `RunStarted` comes first and `RunEnded` last, each once per run, however the run ends, unless the process is killed.
  `repair` may do several runs. `PlanMade` comes before anything about workers, parts, samples and shards.
- What an event reports is already on disk and in the ledger: a process that is killed inside a hook loses no work, and
  the next run resumes from there.
- Each part of the shards that the run makes gets `PartDone`, before the samples of that part that failed or were
  retried, and before the `ShardFinished` of its shard. A part that `PartDamaged` names in `again` gets another one.
  Parts come in the order in which workers finish them; nothing about the output depends on it.
- A shard that needs nothing gets only `ShardFinished`, with `is_reused`.
- Workers do not wait for hooks, but the driver does: while a hook runs, finished parts are not joined. Keep it short,
  or hand the event to a thread.

A hook that raises an `Exception` is logged once, with its traceback, and hears nothing more of the run, which
continues; the next run calls it again. `KeyboardInterrupt` and `SystemExit` pass through: they end the run as Ctrl-C
does, and the next run resumes from there.
"""

from __future__ import annotations

from datamat.run.report import (
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

__all__ = [
    "LimitReached",
    "PartDamaged",
    "PartDone",
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
