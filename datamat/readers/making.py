"""Batches made ahead of their use: in threads of the reading process, or in worker processes.

jobs ── at most `depth` at work or ready ── batches, in the order of the jobs

threads     a job is cut into a run of rows for each thread, which decodes them straight into the memory of the batch.
            Decoders and large copies let go of the interpreter's lock, so that two threads keep two cores busy. One
            that is done with its run goes on with the next batch.
processes   a job is one call; the worker decodes into shared memory (`sharing`), which the reading process has mapped
            as well. For transforms that keep the interpreter to themselves.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING, Any, final

from datamat.parallel import PathosExecutor
from datamat.readers.collate import BatchBuffer, SampleSlot
from datamat.readers.memory import keep_freed_pages
from datamat.readers.sharing import Borrowed, SharedFolder, loans_in
from datamat.readers.threads import DecodingThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import numpy as np

    from datamat.readers.collate import Allocate
    from datamat.readers.damage import Damages
    from datamat.readers.memory import MemoryPool
    from datamat.readers.sharing import Returned
    from datamat.readers.transforms import SampleTransform

__all__ = ["BatchMaker", "Job", "ended_at_exit", "in_processes", "in_threads"]

_unfinished: weakref.WeakSet[Generator[dict[str, Any]]] = weakref.WeakSet()


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One batch to make.

    Attributes:
        epoch: that it belongs to, for the random numbers of the transform.
        positions: of its records, int64 (n,).
    """

    epoch: int
    positions: np.ndarray


@final
@dataclasses.dataclass(frozen=True, slots=True)
class BatchMaker:
    """Makes batches of records. Thread-safe, and picklable if the transform is.

    Attributes:
        read: returns a sample by its position, None where it is damaged and left out. It is given arrays by field
            that it may decode into.
        transform: applied to each, or None.
        ragged: columns that are lists.
        is_batched: whether samples are put together; else each job is one sample.
    """

    read: Callable[[int, Mapping[str, np.ndarray]], dict[str, Any] | None]
    transform: SampleTransform | None
    ragged: frozenset[str]
    is_batched: bool

    def buffer(self, job: Job, allocate: Allocate) -> BatchBuffer | SampleSlot:
        """Return what takes the samples of a job."""
        return BatchBuffer(len(job.positions), self.ragged, allocate) if self.is_batched else SampleSlot()

    def fill(self, buffer: BatchBuffer | SampleSlot, job: Job, rows: range) -> None:
        """Read, decode, transform and put some rows."""
        for row in rows:
            # What goes through a transform may have another shape before it.
            memory = buffer.memory(row) if self.transform is None else {}
            sample = self.read(int(job.positions[row]), memory)
            if sample is not None:
                buffer.put(row, self.transform(sample, job.epoch) if self.transform else sample, memory)


def in_threads(
    jobs: Iterator[Job], maker: BatchMaker, num_threads: int, depth: int, memory: MemoryPool
) -> Generator[dict[str, Any]]:
    """Yield the batch of each job, made in threads; an empty one where no record is left of it.

    Args:
        jobs: in order.
        maker: makes them.
        num_threads: that decode.
        depth: most jobs at work or ready while a batch is in use.
        memory: of the batches.
    """
    keep_freed_pages()
    pool = DecodingThreads(num_threads, "datamat-read")

    def start(job: Job) -> Callable[[], dict[str, Any]]:
        buffer = maker.buffer(job, memory.allocate)
        size = len(job.positions)
        step = -(-size // num_threads)
        runs = [
            pool.submit(maker.fill, buffer, job, range(size)[first : first + step]) for first in range(0, size, step)
        ]

        def finish() -> dict[str, Any]:
            for run in runs:
                run.result()
            return buffer.finish()

        return finish

    try:
        yield from _ahead(jobs, start, depth)
    finally:
        # Without waiting, which the collector could ask of a thread of the pool itself.
        pool.shutdown(wait=False, cancel_futures=True)


def in_processes(
    jobs: Iterator[Job], maker: BatchMaker, num_workers: int, depth: int, damages: Damages
) -> Generator[dict[str, Any]]:
    """Yield the batch of each job, made in worker processes; see `in_threads`.

    Args:
        jobs: in order.
        maker: makes them.
        num_workers: processes.
        depth: most jobs at work or ready while a batch is in use.
        damages: where records are counted that workers left out.

    Raises:
        WorkerDied: a worker ended under a batch.
    """
    with SharedFolder() as folder, PathosExecutor(num_workers) as pool:
        worker = _Worker(maker, damages, folder.path)
        borrowed = Borrowed(folder.path)

        def start(job: Job) -> Callable[[], dict[str, Any]]:
            future = pool.submit(worker.make, job, borrowed.returned())

            def finish() -> dict[str, Any]:
                batch, dropped, skipped = future.result()
                borrowed.drop(dropped)
                damages.add(skipped)
                return {name: borrowed.take(value) for name, value in batch.items()}

            return finish

        try:
            yield from _ahead(jobs, start, depth)
        finally:
            pool.shutdown(cancel_futures=True)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Worker:
    """What travels to a worker, once."""

    maker: BatchMaker
    damages: Damages
    folder: str

    def make(self, job: Job, returned: Returned) -> tuple[dict[str, Any], Sequence[str], Sequence[int]]:
        """Return the batch, its large arrays in shared memory, blocks that are no more, and the records left out."""
        keep_freed_pages()
        before = len(self.damages.positions)
        loans = loans_in(self.folder)
        loans.begin(returned)
        buffer = self.maker.buffer(job, loans.allocate)
        self.maker.fill(buffer, job, range(len(job.positions)))
        return *loans.receipts(buffer.finish()), self.damages.positions[before:]


def ended_at_exit(batches: Generator[dict[str, Any]]) -> Generator[dict[str, Any]]:
    """Return the same, which a program that ends in the middle of an epoch closes while its modules still work."""
    _unfinished.add(batches)
    return batches


@atexit.register
def _end_all() -> None:
    for batches in list(_unfinished):
        with contextlib.suppress(ValueError):  # another thread is in it
            batches.close()


def _ahead(
    jobs: Iterator[Job], start: Callable[[Job], Callable[[], dict[str, Any]]], depth: int
) -> Iterator[dict[str, Any]]:
    """Yield the results of jobs in order, `depth` of them started while one is in use."""
    started = collections.deque(map(start, itertools.islice(jobs, depth)))
    while started:
        batch = started.popleft()()
        started.extend(map(start, itertools.islice(jobs, 1)))
        yield batch
