"""Measures, in a worker, what the stages of a few rows cost; what they give goes nowhere.

The plug-in, its features and the augmenter are put on a clock, so that the rows go the very way they go in a run.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import SampleError
from datamat.pipeline import Pipeline
from datamat.seeding import global_state_kept
from datamat.writer import DatasetWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from datamat.formats import Buffer, ShardFormat, ShardWriter
    from datamat.index import IndexRow
    from datamat.plan import ShardSpec
    from datamat.rows import RowStore

__all__ = ["Pilot", "SplitSample", "choose_samples", "run_pilot"]

_ROWS_PER_SAMPLE_OF_A_BLOCK = 64  # rows that go in blocks cost too little to be timed by ones
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of getrusage


@dataclasses.dataclass(frozen=True, slots=True)
class SplitSample:
    """The rows of a split that stand for all of them.

    Attributes:
        split: the split.
        num_rows: rows that it has in all.
        copies: records per row.
        augmented: whether the transform applies.
        positions: the rows to measure, in the order of the plan.
    """

    split: str
    num_rows: int
    copies: int
    augmented: bool
    positions: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Pilot:
    """What a worker measured.

    Attributes:
        rows: rows measured, by split.
        seconds: processor and waiting time of those rows, by split.
        num_bytes: what they take in a shard, by split.
        stages: seconds of all rows, by stage.
        warm_up_s: seconds of the first rows over what they took at the second time: packages that they imported.
        elapsed_s: of the whole measurement.
        peak_bytes: resident memory of the worker at its highest.
        failed: what was said of rows that failed.
    """

    rows: Mapping[str, int]
    seconds: Mapping[str, float]
    num_bytes: Mapping[str, int]
    stages: Mapping[str, float]
    warm_up_s: float
    elapsed_s: float
    peak_bytes: int
    failed: tuple[str, ...]


def choose_samples(shards: Sequence[ShardSpec], num_samples: int) -> list[SplitSample]:
    """Return rows of every split, spread evenly over it; each split has its share of the samples by cost.

    Args:
        shards: the shards of the run.
        num_samples: rows in all; each split has one at least.
    """
    splits: dict[str, list[ShardSpec]] = {}
    for shard in shards:
        splits.setdefault(shard.split, []).append(shard)
    total = sum(shard.cost for shard in shards)
    chosen = []
    for split, mine in splits.items():
        positions = np.concatenate([np.arange(shard.start, shard.stop) for shard in mine])
        share = sum(shard.cost for shard in mine) / total
        count = min(max(round(num_samples * share), 1), len(positions))
        places = np.linspace(0, len(positions) - 1, count).round().astype(int)
        copies, augmented = mine[0].copies, mine[0].augmented
        chosen.append(SplitSample(split, len(positions), copies, augmented, tuple(positions[places].tolist())))
    return chosen


def run_pilot(
    pipeline: Pipeline, store: RowStore, formats: Sequence[ShardFormat], samples: Sequence[SplitSample]
) -> Pilot:
    """Do rows as a run would, in this process, and measure; what they give goes nowhere.

    Args:
        pipeline: makes records of rows.
        store: the rows, in the order of the plan.
        formats: in which records are written.
        samples: which rows.
    """
    trial = _Trial(pipeline, store, formats)
    with global_state_kept():
        for sample in samples:
            trial.measure(sample)
    return trial.pilot()


class _Trial:
    def __init__(self, pipeline: Pipeline, store: RowStore, formats: Sequence[ShardFormat]) -> None:
        self._clock = _Clock()
        writer = _Timed(pipeline.writer, self._clock, {"read": "read", "read_block": "read"})
        features = {"encode": "encode", "encode_block": "encode", "prepare": "decode"}
        writer.features = _Timed(pipeline.writer.features, self._clock, features)
        augmenter: Any = _Timed(pipeline.augmenter, self._clock, {"draw": "augment"})
        timed: Any = writer
        self._pipeline = Pipeline(timed, augmenter, pipeline.seed)
        self._in_blocks = type(pipeline.writer).read_block is not DatasetWriter.read_block
        self._columns = pipeline.writer.features.columns
        self._store = store
        self._formats = formats
        self._begun = time.perf_counter()
        self._warm_up_s = 0.0
        self._rows: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._num_bytes: Counter[str] = Counter()
        self._failed: list[str] = []

    def measure(self, sample: SplitSample) -> None:
        sink = _Sink()
        file: Any = sink  # `write` is enough
        writers = [made.writer(file, self._columns) for made in self._formats]
        rows = self._store.read(np.asarray(self._store.order[list(sample.positions)]))
        self._warm_up(rows[0], sample)
        begun = time.perf_counter()
        if not self._measure_block(sample, writers):
            for row in rows:
                self._measure_row(row, sample, writers)
            self._seconds[sample.split] += time.perf_counter() - begun
        begun = time.perf_counter()
        for writer in writers:
            writer.finish()
        self._clock.add("write", time.perf_counter() - begun)
        self._num_bytes[sample.split] += sink.num_bytes

    def _measure_row(self, row: IndexRow, sample: SplitSample, writers: Sequence[ShardWriter]) -> None:
        try:
            records = list(self._pipeline.records(row, copies=sample.copies, augmented=sample.augmented))
        except SampleError as error:
            self._failed.append(str(error))
            return
        begun = time.perf_counter()
        for _, record in records:
            for writer in writers:
                writer.append(record)
        self._clock.add("write", time.perf_counter() - begun)
        self._rows[sample.split] += 1

    def _measure_block(self, sample: SplitSample, writers: Sequence[ShardWriter]) -> bool:
        """Measure rows that go in blocks, many more of them; tell whether they do."""
        if sample.augmented or sample.copies != 1 or not self._in_blocks:
            return False
        first = sample.positions[0]
        count = min(len(sample.positions) * _ROWS_PER_SAMPLE_OF_A_BLOCK, sample.num_rows)
        rows = np.asarray(self._store.order[first : first + count])
        begun = time.perf_counter()
        try:
            names = self._store.keys(rows)
            block = self._pipeline.block(names, dict(self._store.columns(rows)))
        except SampleError:
            return False
        if block is None:
            return False
        writing = time.perf_counter()
        for writer in writers:
            writer.append_block(block)
        ended = time.perf_counter()
        self._clock.add("write", ended - writing)
        self._seconds[sample.split] += ended - begun
        self._rows[sample.split] += len(names)
        return True

    def _warm_up(self, row: IndexRow, sample: SplitSample) -> None:
        """Do one row twice: what packages take to be imported is not what a row takes."""
        times = []
        before = self._clock.seconds.copy()
        for _ in range(2):
            begun = time.perf_counter()
            try:
                list(self._pipeline.records(row, copies=sample.copies, augmented=sample.augmented))
            except SampleError:
                return
            times.append(time.perf_counter() - begun)
        self._warm_up_s += max(0.0, times[0] - times[1])
        self._clock.seconds = before

    def pilot(self) -> Pilot:
        stages = dict(self._clock.seconds)
        stages["other"] = max(0.0, sum(self._seconds.values()) - sum(stages.values()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
        return Pilot(
            rows=dict(self._rows),
            seconds=dict(self._seconds),
            num_bytes=dict(self._num_bytes),
            stages=stages,
            warm_up_s=self._warm_up_s,
            elapsed_s=time.perf_counter() - self._begun,
            peak_bytes=peak,
            failed=tuple(self._failed),
        )


class _Clock:
    """Seconds by stage; of stages inside one another, the outer one counts."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.is_running = False

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] += seconds


class _Timed:
    """An object some of whose methods are on the clock.

    Args:
        target: the object.
        clock: told of the seconds.
        stages: the stage of each method, by name.
    """

    features: Any

    def __init__(self, target: Any, clock: _Clock, stages: Mapping[str, str]) -> None:
        self._target = target
        self._clock = clock
        self._stages = stages

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in self._stages:
            return found

        def timed(*arguments: Any, **options: Any) -> Any:
            if self._clock.is_running:
                return found(*arguments, **options)
            self._clock.is_running = True
            begun = time.perf_counter()
            try:
                return found(*arguments, **options)
            finally:
                self._clock.add(self._stages[name], time.perf_counter() - begun)
                self._clock.is_running = False

        return timed

    def __getitem__(self, name: str) -> Any:
        return self._target[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._target)


class _Sink:
    """A file that only counts."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: Buffer) -> int:
        self.num_bytes += len(memoryview(data))
        return len(memoryview(data))
