"""Estimate a run from a few measured samples: time, bytes, memory, and the cost of each stage."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.directory.display import render_html
from datamat.errors import OptionError, SampleError, count_of
from datamat.parallel.worker import peak_rss_bytes
from datamat.plan.pipeline import Pipeline
from datamat.run.dispatch import count_workers, open_executor, result_of
from datamat.run.limits import free_bytes
from datamat.run.worker import PartWorker
from datamat.sources.fetching import fetches_files
from datamat.sources.store import RowStore
from datamat.transforms.seeding import global_state_kept
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.formats import Buffer, ShardFormat, ShardWriter
    from datamat.plan.job import Job
    from datamat.plan.plan import ShardSpec
    from datamat.sources.rows import IndexRow

# ---------------------------------------------------------------- measuring a few rows
#
# Writer, features and augmenter are wrapped in timers, so that rows take the same path as in a run.


_ROWS_PER_SAMPLE_OF_A_BLOCK = 64  # rows processed in blocks are too cheap to be timed one by one


@frozen()
class SampledRows:
    """The rows that are measured as a sample of a split.

    Attributes:
        split: name of the split.
        num_rows: total number of its rows.
        copies: records per row.
        augmented: whether the transform applies.
        positions: positions of the rows to measure, in the order of the plan.
    """

    split: str
    num_rows: int
    copies: int
    augmented: bool
    positions: tuple[int, ...]


@frozen()
class Measurement:
    """The measurements of a worker.

    Attributes:
        rows: number of measured rows, by split.
        seconds: wall time of these rows, by split.
        num_bytes: size of their records in a shard, by split.
        stages: seconds of all rows, by stage.
        warm_up_s: seconds that the first rows took longer than when repeated: imports of packages.
        elapsed_s: wall time of the whole measurement.
        peak_bytes: peak resident memory of the worker.
        failed: messages of the rows that failed.
    """

    rows: Mapping[str, int]
    seconds: Mapping[str, float]
    num_bytes: Mapping[str, int]
    stages: Mapping[str, float]
    warm_up_s: float
    elapsed_s: float
    peak_bytes: int
    failed: tuple[str, ...]


def choose_rows(shards: Sequence[ShardSpec], num_samples: int) -> list[SampledRows]:
    """Return rows of every split, spread evenly; each split gets its share of the samples by cost.

    Args:
        shards: shards that the run would make.
        num_samples: total number of rows; each split has at least one.
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
        chosen.append(SampledRows(split, len(positions), copies, augmented, tuple(positions[places].tolist())))
    return chosen


def measure_rows(worker: PartWorker, samples: Sequence[SampledRows]) -> Measurement:
    """Process rows as a run would, in this process, and measure them; their records are discarded.

    Args:
        worker: the job and the folder of its rows.
        samples: rows to process, split by split.
    """
    worker.settle()
    pipeline = worker.job.records.pipeline
    assert pipeline is not None  # a conversion is not estimated
    pipeline.setup_worker()
    trial = _Trial(pipeline, RowStore(worker.folder), worker.job.formats)
    with global_state_kept():
        for sample in samples:
            trial.measure(sample)
    return trial.measurement()


class _Trial:
    def __init__(self, pipeline: Pipeline, store: RowStore, formats: Sequence[ShardFormat]) -> None:
        self._clock = _Clock()
        writer = _Timed(pipeline.writer, self._clock, {"read": "read", "read_block": "read"})
        features = {"encode": "encode", "encode_block": "encode", "prepare": "decode"}
        writer.features = _Timed(pipeline.writer.features, self._clock, features)
        augmenter: Any = _Timed(pipeline.augmenter, self._clock, {"stream": "augment"})
        timed: Any = writer
        self._pipeline = Pipeline(timed, augmenter, pipeline.seed)
        self._in_blocks = pipeline.makes_blocks and not (fetches_files() and store.file_fields)
        self._columns = pipeline.writer.features.columns
        self._store = store
        self._formats = formats
        self._begun = time.perf_counter()
        self._warm_up_s = 0.0
        self._rows: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._num_bytes: Counter[str] = Counter()
        self._failed: list[str] = []

    def measure(self, sample: SampledRows) -> None:
        sink = _CountingFile()
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

    def _measure_row(self, row: IndexRow, sample: SampledRows, writers: Sequence[ShardWriter]) -> None:
        try:
            for _, record in self._pipeline.records(row, copies=sample.copies, augmented=sample.augmented):
                begun = time.perf_counter()
                for writer in writers:
                    writer.append(record)
                self._clock.add("write", time.perf_counter() - begun)
        except SampleError as error:
            self._failed.append(str(error))
            return
        self._rows[sample.split] += 1

    def _measure_block(self, sample: SampledRows, writers: Sequence[ShardWriter]) -> bool:
        """Measure rows in blocks, many more of them; return False if rows are not processed in blocks."""
        if sample.augmented or sample.copies != 1 or not self._in_blocks:
            return False
        first = sample.positions[0]
        count = min(len(sample.positions) * _ROWS_PER_SAMPLE_OF_A_BLOCK, sample.num_rows)
        rows = np.asarray(self._store.order[first : first + count])
        begun = time.perf_counter()
        try:
            block = self._pipeline.block(self._store.gathered("key", rows), dict(self._store.columns(rows)))
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
        self._rows[sample.split] += len(rows)
        return True

    def _warm_up(self, row: IndexRow, sample: SampledRows) -> None:
        """Process one row twice, to separate the time of imports from that of a row."""
        times = []
        before = self._clock.seconds.copy()
        for _ in range(2):
            begun = time.perf_counter()
            try:
                for _ in self._pipeline.records(row, copies=sample.copies, augmented=sample.augmented):
                    pass
            except SampleError:
                return
            times.append(time.perf_counter() - begun)
        self._warm_up_s += max(0.0, times[0] - times[1])
        self._clock.seconds = before

    def measurement(self) -> Measurement:
        stages = dict(self._clock.seconds)
        stages["other"] = max(0.0, sum(self._seconds.values()) - sum(stages.values()))
        peak = peak_rss_bytes()
        return Measurement(
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
    """Seconds by stage; nested stages count as the outer one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.is_running = False

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] += seconds


class _Timed:
    """An object some of whose methods are timed.

    Args:
        target: object that does the work.
        clock: adds up the seconds of each stage.
        stages: stage of each timed method, by name.
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

        @functools.wraps(found)  # keeps the signature, which says whether it takes `rng`
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._clock.is_running:
                return found(*arguments, **options)
            self._clock.is_running = True
            begun = time.perf_counter()
            try:
                result = found(*arguments, **options)
                return self._each(result, self._stages[name]) if isinstance(result, Iterator) else result
            finally:
                self._clock.add(self._stages[name], time.perf_counter() - begun)
                self._clock.is_running = False

        return timed

    def _each(self, items: Iterator[Any], stage: str) -> Iterator[Any]:
        """Yield items, timing the creation of each."""
        while True:
            begun = time.perf_counter()
            self._clock.is_running = True
            try:
                item = next(items, self)
            finally:
                self._clock.is_running = False
                self._clock.add(stage, time.perf_counter() - begun)
            if item is self:
                return
            yield item

    def __getitem__(self, name: str) -> Any:
        return self._target[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._target)


class _CountingFile:
    """A file that only counts bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: Buffer) -> int:
        self.num_bytes += len(memoryview(data))
        return len(memoryview(data))


# ---------------------------------------------------------------- the estimate


_ROOM = 1.05  # index and offsets, and files that exist twice for a moment


def estimate(job: Job, num_samples: int) -> Estimate:
    """Measure a few rows in a worker, and estimate a run from scratch; see `Materializer.estimate`."""
    if num_samples < 1:
        raise OptionError(f"estimate: num_samples is {num_samples!r}; want an int, 1 or more")
    begun = time.perf_counter()
    with job.planned() as planned, contextlib.ExitStack() as stack:
        samples = choose_rows(planned.chosen, num_samples)
        executor = stack.enter_context(open_executor(job.how.executor, job.how.workers, 1, job.how.logger))
        # The job is the `self` of the call, not an argument: an engine pickles arguments by its own rules.
        call = executor.submit(functools.partial(measure_rows, PartWorker(job, planned.store.folder)), samples)
        measurement = result_of(call, executor, job.how.logger)
        start_s = time.perf_counter() - begun - measurement.elapsed_s
    found = Estimate.of(
        measurement, samples, num_workers=count_workers(job), start_s=start_s, free_bytes=free_bytes(job.output)
    )
    if not found.fits:
        warnings.warn(
            f"{job.output} needs about {found.needed_bytes / 1e6:,.1f} MB, but its disk has "
            f"{found.free_bytes / 1e6:,.1f} MB free; make room, or give an output on another disk",
            stacklevel=3,
        )
    return found


@frozen()
class Estimate:
    """The estimated cost of a run from scratch. `str` gives a summary; a notebook shows a table.

    Attributes:
        num_samples: number of rows that were measured.
        num_rows: number of rows of the run.
        num_workers: number of workers that will share the work.
        seconds: wall time of the run.
        num_bytes: size of the finished shards.
        worker_bytes: peak memory of each worker, including pages that it shares with others.
        free_bytes: free space on the disk of the output.
        stages: seconds per row on one core, by stage: "read", "decode", "augment", "encode", "write", "other".
        failed: messages of failed samples, which the other numbers exclude.
    """

    num_samples: int
    num_rows: int
    num_workers: int
    seconds: float
    num_bytes: int
    worker_bytes: int
    free_bytes: int
    stages: Mapping[str, float]
    failed: tuple[str, ...]

    @classmethod
    def of(
        cls,
        measurement: Measurement,
        samples: Sequence[SampledRows],
        *,
        num_workers: int,
        start_s: float,
        free_bytes: int,
    ) -> Estimate:
        """Extrapolate a measurement to all rows.

        Args:
            measurement: the measurements of a worker.
            samples: the measured rows.
            num_workers: number of workers that will share the work.
            start_s: seconds before the first row starts.
            free_bytes: free space on the disk of the output.

        Raises:
            SampleError: every measured sample of a split failed.
        """
        busy_s = num_bytes = 0.0
        for sample in samples:
            if not measurement.rows.get(sample.split):
                raise SampleError(sample.split, f"each sample of this split failed: {measurement.failed[0]}")
            share = sample.num_rows / measurement.rows[sample.split]
            busy_s += measurement.seconds[sample.split] * share
            num_bytes += measurement.num_bytes[sample.split] * share
        num_measured = sum(measurement.rows.values())
        return cls(
            num_samples=num_measured,
            num_rows=sum(sample.num_rows for sample in samples),
            num_workers=num_workers,
            seconds=start_s + measurement.warm_up_s + busy_s / num_workers,
            num_bytes=round(num_bytes),
            worker_bytes=measurement.peak_bytes,
            free_bytes=free_bytes,
            stages={stage: seconds / num_measured for stage, seconds in measurement.stages.items()},
            failed=measurement.failed,
        )

    @property
    def needed_bytes(self) -> int:
        """Disk space that the run needs."""
        return round(self.num_bytes * _ROOM)

    @property
    def fits(self) -> bool:
        """Whether the free disk space suffices."""
        return self.needed_bytes <= self.free_bytes

    def _lines(self) -> list[tuple[str, str]]:
        total = sum(self.stages.values()) or 1.0
        stages = sorted(self.stages.items(), key=lambda item: -item[1])
        free = f"{self.free_bytes / 1e6:,.1f} MB free" + ("" if self.fits else ": NOT ENOUGH")
        workers = count_of(self.num_workers, "worker")
        return [
            (
                "time",
                f"{self.seconds:,.1f} s with {workers}, for {count_of(self.num_rows, 'row')}",
            ),
            ("disk", f"{self.needed_bytes / 1e6:,.1f} MB, {free}"),
            ("memory", f"{self.worker_bytes / 1e6:,.0f} MB per worker"),
            *(
                (stage, f"{seconds * 1e3:,.3f} ms per row, {seconds / total:.0%} of the work")
                for stage, seconds in stages
            ),
            *([("failed", f"{count_of(len(self.failed), 'sample')}: {self.failed[0]}")] if self.failed else []),
        ]

    def __str__(self) -> str:
        lines = [f"{name:>8}  {text}" for name, text in self._lines()]
        return "\n".join([f"Estimate from {count_of(self.num_samples, 'sample')}:", *lines])

    def _repr_html_(self) -> str:
        return render_html(f"Estimate from {count_of(self.num_samples, 'sample')}", self._lines())

    def __repr__(self) -> str:
        return (
            f"Estimate({count_of(self.num_rows, 'row')} with {count_of(self.num_workers, 'worker')}: "
            f"{self.seconds:,.1f} s, {self.num_bytes / 1e6:,.1f} MB, "
            f"{self.worker_bytes / 1e6:,.0f} MB of memory per worker)"
        )
