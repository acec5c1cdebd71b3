"""Makes batches ahead of their use, collated into reusable memory by threads or worker processes."""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar, final

import numpy as np

from datamat.errors import SampleError, SchemaError
from datamat.features.base import as_array, is_number_dtype
from datamat.parallel import PathosExecutor, physical_cores
from datamat.parallel.process_role import refuse_in_fork
from datamat.readers.sharing import BlockUser, SharedFolder, block_owner
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from datamat.features import Features
    from datamat.readers.sharing import Returned


# ---------------------------------------------------------------- threads
#
# Decoding threads that other threads can use until the program has ended.


_P = ParamSpec("_P")
_T = TypeVar("_T")
_Job = TypeVar("_Job")
_Made = TypeVar("_Made")

_TOO_LATE = "cannot schedule new futures"  # after the executor or the interpreter has shut down


class DecodingThreads(concurrent.futures.ThreadPoolExecutor):
    """A thread pool that other threads can still use after the main thread has ended.

    Python waits for those threads, but its executors refuse their calls by then: here, the thread that submits a call
    runs it itself.
    """

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> concurrent.futures.Future[_T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if _TOO_LATE not in str(error):
                raise
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- `result` raises it
            done.set_exception(error)
        return done


# ---------------------------------------------------------------- memory
#
# Reusable memory: fresh pages cost a tenth of the time that it takes to decode into them.


_LEAST_BYTES = 1 << 20  # the allocator itself keeps the pages of smaller arrays
_KEPT_BYTES = 8 << 20  # several times what decoding a megapixel needs; larger batches get huge pages
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3), in glibc's malloc.h
_ALIGNMENT = 64  # bytes; TensorFlow copies arrays with a smaller alignment (EIGEN_MAX_ALIGN_BYTES)
_REFERENCES_OF_FREE = 2  # the pool's list, and the argument of getrefcount


@functools.cache
def keep_freed_pages() -> None:
    """Make the C library keep a few megabytes of freed memory for the next allocations, from now on.

    glibc returns the top of a heap to the system from 128 KiB on, and maps larger blocks one by one: with two decoding
    threads, page faults and their locks took 6 % of the time. It raises both limits to the size of any block that is
    freed (mallopt(3), M_MMAP_THRESHOLD), so this frees one large block, which is never touched. Other C libraries
    ignore it.
    """
    np.empty(_KEPT_BYTES, np.uint8)


def keep_freed_pages_again() -> None:
    """Make the C library keep freed pages even though TensorFlow has told it not to.

    Each generator of `tf.data`, such as one of the user's, sets the limit to 128 KiB (generator_dataset_op.cc: "Memory
    patch applied"), and from then on glibc no longer raises it. Decoding images in one took 1.6 times as long.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BYTES)


@functools.cache
def _mallopt() -> Any:
    """Return `mallopt` of the C library, or None if it has none."""
    try:
        return ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return None


@final
class MemoryPool:
    """Allocates arrays in the memory of earlier arrays that are gone. Thread-safe; copies start empty.

    Every view, tensor or buffer on an array holds a reference to the memory below it. Once the pool's own reference is
    the last one, the memory can be reused unnoticed.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array with arbitrary content."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return np.empty(shape, dtype)
        with self._lock:
            block = np.empty(num_bytes + _ALIGNMENT, np.uint8) if self._is_closed else self._block(num_bytes)
        start = -block.ctypes.data % _ALIGNMENT
        return block[start : start + num_bytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Release the memory that is not in use, and keep none from now on; `allocate` still works."""
        with self._lock:
            self._blocks, self._is_closed = [], True

    def __reduce__(self) -> tuple[type[MemoryPool], tuple[()]]:
        return MemoryPool, ()

    def _block(self, num_bytes: int) -> np.ndarray:
        blocks = self._blocks  # looked up by number: a loop variable would hold one more reference
        free = [number for number in range(len(blocks)) if sys.getrefcount(blocks[number]) == _REFERENCES_OF_FREE]
        for number in free:
            if blocks[number].nbytes == num_bytes + _ALIGNMENT:
                return blocks[number]
        # Free blocks of other sizes are released, so that memory does not grow with the variety of sizes.
        self._blocks = [block for number, block in enumerate(blocks) if number not in free]
        self._blocks.append(np.empty(num_bytes + _ALIGNMENT, np.uint8))
        return self._blocks[-1]


# ---------------------------------------------------------------- collate
#
# The memory of a batch: several threads put samples into it at once, each into its own row.
#
# The type of a column never depends on the batch. Boxes, and arrays of open shape that differ in size anywhere in the
# dataset, are a list of arrays; text is a list of str. Everything else is one array, unless images differ in size.


Allocate: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray]
"""Returns an array of the given shape and dtype, with arbitrary content."""

_NOTHING: Mapping[str, Any] = {}


def ragged_names(features: Features) -> frozenset[str]:
    """Return the fields whose values vary in length, and which are lists in a batch."""
    return frozenset(name for name, feature in features.items() if feature.is_ragged())


@final
class BatchBuffer:
    """Gathers the samples of one batch. Several threads may call `put` at once, for different rows.

    Args:
        num_rows: number of rows in the batch.
        ragged: names of the columns that are lists.
        allocate: allocates the arrays of the other columns.
        features: schema of the samples; a batch holds a dict of columns for each dict.
    """

    def __init__(self, num_rows: int, ragged: frozenset[str], allocate: Allocate, features: Features) -> None:
        self._num_rows = num_rows
        self._ragged = ragged
        self._allocate = allocate
        self._features = features
        self._columns: dict[str, _BatchColumn] = {}
        self._names: frozenset[str] | None = None  # the fields of the first sample
        self._lock = threading.Lock()
        self._rows = [False] * num_rows

    def memory(self, row: int) -> dict[str, np.ndarray]:
        """Return the memory for the values of a row, by name, for the columns that already exist."""
        return {
            name: array for name, column in list(self._columns.items()) if (array := column.memory(row)) is not None
        }

    def put(self, row: int, sample: Mapping[str, Any], lent: Mapping[str, np.ndarray] = _NOTHING) -> None:
        """Copy the values of a sample into the batch, except those that were decoded in place.

        Args:
            row: number of the row in the batch, from 0.
            sample: decoded values by feature name, `key` among them.
            lent: what `memory` has returned for this row.

        Raises:
            SchemaError: the sample has other fields than an earlier sample of the batch.
        """
        values = self._features.flatten(sample)
        names = self._names
        if names is None:
            with self._lock:
                names = self._names = self._names or frozenset(values)
        if values.keys() != names:
            others = "; ".join(
                f"{says} {', '.join(sorted(map(str, found)))}"
                for says, found in (("has", values.keys() - names), ("lacks", names - values.keys()))
                if found
            )
            raise SchemaError(
                f"compared with another sample of its batch, it {others}; return the same fields for every sample, or "
                "collect "
                "them by collate_fn"
            )
        for name, value in values.items():
            if value is lent.get(name, _NOTHING):
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns.setdefault(
                    name, _BatchColumn(self._num_rows, name in self._ragged, self._allocate)
                )
            column.put(row, value)
        self._rows[row] = True

    @property
    def found(self) -> list[int]:
        """Numbers of the rows that have a sample."""
        return [row for row, is_there in enumerate(self._rows) if is_there]

    def finish(self) -> dict[str, Any]:
        """Return the batch by feature name, without the rows that got no sample; empty if none did."""
        rows = self.found
        if not rows:
            return {}
        return self._features.unflatten({name: column.finish(rows) for name, column in self._columns.items()})


@final
class SampleList:
    """Gathers the samples of a job unchanged, for a function that collates them, or as the only sample without a batch.

    Args:
        num_rows: number of rows of the job.
        is_batch: whether they are to be collated.
    """

    def __init__(self, num_rows: int, *, is_batch: bool) -> None:
        self.is_batch = is_batch
        self._samples: list[dict[str, Any] | None] = [None] * num_rows

    def memory(self, row: int) -> dict[str, np.ndarray]:
        """Return no memory: each sample brings its own."""
        del row
        return {}

    def put(self, row: int, sample: Mapping[str, Any], lent: Mapping[str, np.ndarray] = _NOTHING) -> None:
        """Store a sample unchanged."""
        del lent
        self._samples[row] = dict(sample)

    @property
    def found(self) -> list[int]:
        """Numbers of the rows that have a sample."""
        return [row for row, sample in enumerate(self._samples) if sample is not None]

    def finish(self) -> dict[str, Any]:
        """Return the samples as a list under "", or the only sample itself; nothing if there are none."""
        samples = [sample for sample in self._samples if sample is not None]
        return {"": samples} if samples and self.is_batch else samples[0] if samples else {}


@final
class _BatchColumn:
    def __init__(self, num_rows: int, is_ragged: bool, allocate: Allocate) -> None:
        self._is_ragged = is_ragged
        self._allocate = allocate
        self._stacked: np.ndarray | None = None
        self._apart: list[Any] = [None] * num_rows
        self._is_apart = [False] * num_rows
        self._lock = threading.Lock()

    def memory(self, row: int) -> np.ndarray | None:
        stacked = self._stacked
        return stacked[row] if stacked is not None and stacked.ndim > 1 else None

    def put(self, row: int, value: Any) -> None:
        if not self._is_ragged and _is_array(value):
            array = value if isinstance(value, np.ndarray) else np.asarray(as_array(value))
            stacked = self._stacked
            if stacked is None:
                stacked = self._make(array)
            if array.shape == stacked.shape[1:] and array.dtype == stacked.dtype:
                stacked[row] = array
                return
        self._apart[row] = value
        self._is_apart[row] = True

    def finish(self, rows: list[int]) -> Any:
        stacked = self._stacked
        if stacked is None or any(self._is_apart):
            return [self._apart[row] if self._is_apart[row] else stacked[row] for row in rows]  # type: ignore[index]
        return stacked if len(rows) == len(stacked) else stacked[rows]

    def _make(self, first: np.ndarray) -> np.ndarray:
        with self._lock:
            if self._stacked is None:
                self._stacked = self._allocate((len(self._apart), *first.shape), first.dtype)
            return self._stacked


def _is_array(value: Any) -> bool:
    """Return True if a value is a number, or an array or tensor of numbers."""
    if isinstance(value, (bool, int, float, complex, np.number, np.bool_)):
        return True
    if isinstance(value, np.ndarray):
        return is_number_dtype(value.dtype)
    return hasattr(value, "__array__") and not isinstance(value, (str, bytes))


# ---------------------------------------------------------------- batches
#
# Batches made ahead of their use, in threads of the reading process or in worker processes.
#
# jobs ── at most `depth` in progress or ready ── batches, in the order of the jobs
#
# threads     a job is cut into one run of rows per thread, which decodes them straight into the memory of the batch.
#             Decoders and large copies release the GIL, so two threads keep two cores busy. A thread that has finished
#             its run takes one of the next batch.
# processes   a job is one call; the worker decodes into shared memory (`sharing`), which the reading process maps, too.
#             For transforms that hold the GIL.


_LEAST_BLOCK_ROWS = 16  # fewer are faster one by one

Buffer: TypeAlias = "BatchBuffer | SampleList"
"""Gathers the samples of a job."""

_unfinished: weakref.WeakSet[Generator[dict[str, Any]]] = weakref.WeakSet()


class Skipped(Protocol):
    """Counts the damaged records that were skipped. Picklable."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Their positions, each once."""

    def add(self, positions: Iterable[int]) -> None:
        """Count records that another process has skipped and logged.

        Args:
            positions: positions of the records, from 0.
        """


@final
@frozen()
class BatchJob:
    """One batch to make.

    Attributes:
        epoch: number of the epoch, from which the transform's random numbers derive.
        positions: int64 (n,), positions of the records.
        rows: int64 (n, 3), for each record, the number of its packed row, the first token of its piece there, and the
            token after the last; None if records are rows.
    """

    epoch: int
    positions: np.ndarray
    rows: np.ndarray | None = None


@final
@frozen()
class BatchMaker:
    """Makes batches of records. Thread-safe, and picklable if the transform is.

    Attributes:
        read_sample: returns a sample by its position, or None if the record is damaged and skipped. It receives arrays
            by field that it may decode into.
        transform: transforms each sample, called with its position, or None.
        ragged: names of the columns that are lists.
        features: schema of the samples.
        is_batched: whether samples are collated; otherwise each job is a single sample.
        read_block: returns many samples by field, given their positions and the number of threads that read at the
            same time, or None if they must be read one by one; None for records that are never read in blocks.
        block_records: number of records that `read_block` reads at once.
        num_threads: number of threads that make batches at the same time.
        shapes: functions for each finished batch (padding and packing), called with the rows of its records.
        keeps_samples: whether a batch is a list of samples, under "", for a user's function to collate.
        reading: returns a function that replaces `read_sample` for some positions, which are read next, if it is
            faster; None otherwise.
    """

    read_sample: Callable[[int, Mapping[str, np.ndarray]], dict[str, Any] | None]
    transform: Callable[[int, dict[str, Any], int, bool], dict[str, Any]] | None
    ragged: frozenset[str]
    features: Features
    is_batched: bool
    read_block: Callable[[np.ndarray, int], dict[str, Any] | None] | None = None
    block_records: int = 0
    num_threads: int = 1
    shapes: tuple[Callable[[dict[str, Any], np.ndarray], dict[str, Any]], ...] = ()
    keeps_samples: bool = False
    reading: Callable[[np.ndarray], Callable[..., dict[str, Any] | None]] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether batches hold what was read, because nothing changes samples or finished batches."""
        return self.transform is None and not self.shapes and not self.keeps_samples

    def finish(self, buffer: Buffer, job: BatchJob) -> dict[str, Any]:
        """Return the batch of a job whose samples are all in the buffer; empty if there are none."""
        batch = buffer.finish()
        if batch and self.shapes:
            rows = np.arange(len(job.positions)) if job.rows is None else job.rows
            for shape in self.shapes:
                batch = shape(batch, rows[buffer.found])
        return batch

    def buffer(self, job: BatchJob, allocate: Allocate) -> Buffer:
        """Return an empty buffer for the samples of a job."""
        if self.keeps_samples or not self.is_batched:
            return SampleList(len(job.positions), is_batch=self.keeps_samples)
        return BatchBuffer(len(job.positions), self.ragged, allocate, self.features)

    def fill(self, buffer: Buffer, job: BatchJob, rows: range, *, seeds_globals: bool = False) -> None:
        """Read, decode and transform some rows of a job, and put them into its buffer.

        Args:
            buffer: what `buffer` returned for the job.
            job: batch to make: positions of its records, and the epoch.
            rows: numbers of the rows to fill, from 0; threads share a batch by disjoint ranges.
            seeds_globals: whether to seed the global random generators for each sample; only in a process of our own,
                where a single thread transforms.
        """
        block, read = None, self.read_sample
        if self.read_block is not None and len(rows) >= _LEAST_BLOCK_ROWS:
            block = self.read_block(job.positions[rows.start : rows.stop], self.num_threads)
        if self.reading is not None and block is None and len(rows) >= _LEAST_BLOCK_ROWS:
            read = self.reading(job.positions[rows.start : rows.stop])
        for row in rows:
            # A transform may change the shape, so nothing is decoded in place before it.
            memory = buffer.memory(row) if self.transform is None else {}
            if block is None:
                sample = read(int(job.positions[row]), memory)
            else:
                sample = self.features.unflatten({name: values[row - rows.start] for name, values in block.items()})
            if sample is None:
                continue
            key = sample["key"]
            if self.transform is not None:
                sample = self.transform(int(job.positions[row]), sample, job.epoch, seeds_globals)
            try:
                buffer.put(row, sample, memory)
            except SchemaError as error:
                raise SampleError(key, str(error)) from error

    def batches(self, jobs: Sequence[BatchJob], allocate: Allocate) -> list[dict[str, Any]]:
        """Return the batch of each job, without a transform; all records are read at once."""
        assert self.read_block is not None, "in_blocks is for makers that have it"
        block = self.read_block(np.concatenate([job.positions for job in jobs]), self.num_threads)
        made, first = [], 0
        for job in jobs:
            stop = first + len(job.positions)
            if block is None:
                buffer = self.buffer(job, allocate)
                dataclasses.replace(self, read_block=None).fill(buffer, job, range(stop - first))
                made.append(buffer.finish())
            else:
                which = slice(first, stop) if self.is_batched else first
                made.append(self.features.unflatten({name: values[which] for name, values in block.items()}))
            first = stop
        return made


def in_threads(
    jobs: Iterator[BatchJob], maker: BatchMaker, depth: int, memory: MemoryPool
) -> Generator[dict[str, Any]]:
    """Yield the batch of each job, made in threads; it is empty if all of its records were skipped.

    Args:
        jobs: batches to make, in order.
        maker: reads, decodes and transforms the records of a batch.
        depth: most jobs in progress or ready while a batch is in use.
        memory: allocates the arrays of the batches.
    """
    keep_freed_pages()
    pool = DecodingThreads(maker.num_threads, "datamat-read")

    def start(job: BatchJob) -> Callable[[], dict[str, Any]]:
        buffer = maker.buffer(job, memory.allocate)
        size = len(job.positions)
        step = -(-size // maker.num_threads)
        runs = [
            pool.submit(maker.fill, buffer, job, range(size)[first : first + step]) for first in range(0, size, step)
        ]

        def finish() -> dict[str, Any]:
            for run in runs:
                run.result()
            return maker.finish(buffer, job)

        return finish

    try:
        yield from _ahead(jobs, start, depth)
    finally:
        # Do not wait: the garbage collector may run this in a thread of the pool itself.
        pool.shutdown(wait=False, cancel_futures=True)


def made_here(job: BatchJob, maker: BatchMaker, memory: MemoryPool) -> dict[str, Any]:
    """Return the batch of a job, made by this thread and by threads that all callers share; empty without records."""
    keep_freed_pages_again()
    buffer = maker.buffer(job, memory.allocate)
    size = len(job.positions)
    # Many small records are read at once, and Python functions hold the GIL: more threads would not help.
    is_alone = maker.transform is not None or maker.read_block is not None or not maker.is_batched
    step = max(1, size if is_alone else -(-size // maker.num_threads))
    own, *others = (range(size)[first : first + step] for first in range(0, max(1, size), step))
    helping = [shared_threads().submit(maker.fill, buffer, job, run) for run in others]
    maker.fill(buffer, job, own)
    for run in helping:
        run.result()
    return maker.finish(buffer, job)


def shared_threads() -> DecodingThreads:
    """Return threads that help those of TensorFlow, shared by all datasets of the process."""
    return _threads_of(os.getpid())


@functools.cache
def _threads_of(process: int) -> DecodingThreads:
    del process  # a forked process has none of its parent's threads
    return DecodingThreads(max(1, len(physical_cores()) - 1), "datamat-help")


def in_blocks(jobs: Iterator[BatchJob], maker: BatchMaker, memory: MemoryPool) -> Generator[dict[str, Any]]:
    """Yield the batch of each job as `in_threads` does, but read the records of several small batches at once.

    Args:
        jobs: batches to make, in order.
        maker: one with `read_block` and without a transform, whose calls are divided among threads.
        memory: allocates the arrays of batches that are not slices of a block.
    """
    keep_freed_pages()
    pool = DecodingThreads(maker.num_threads, "datamat-read")

    def start(group: list[BatchJob]) -> Callable[[], list[dict[str, Any]]]:
        return pool.submit(maker.batches, group, memory.allocate).result

    try:
        for batches in _ahead(_grouped(jobs, maker.block_records), start, maker.num_threads):
            yield from batches
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _grouped(jobs: Iterator[BatchJob], num_records: int) -> Iterator[list[BatchJob]]:
    """Yield neighbouring jobs in groups of about the same number of records; the first groups are smaller."""
    group: list[BatchJob] = []
    size, wanted = 0, 1
    for job in jobs:
        group.append(job)
        size += len(job.positions)
        if size >= wanted:
            yield group
            # The first batch is ready at once, and a program that wants few batches makes few.
            group, size, wanted = [], 0, min(4 * max(size, wanted), num_records)
    if group:
        yield group


def in_processes(
    jobs: Iterator[BatchJob], maker: BatchMaker, num_workers: int, depth: int, skipped: Skipped
) -> Generator[dict[str, Any]]:
    """Yield the batch of each job, made in worker processes; it is empty if all of its records were skipped.

    Args:
        jobs: batches to make, in order.
        maker: reads, decodes and transforms the records of a batch; pickled for each worker.
        num_workers: number of worker processes, at least 1.
        depth: most jobs in progress or ready while a batch is in use.
        skipped: counts the damaged records that workers skip.

    Raises:
        WorkerDied: a worker died while it made a batch.
    """
    with SharedFolder() as folder, PathosExecutor(num_workers) as pool:
        worker = _Worker(maker, skipped, folder.path)
        user = BlockUser(folder.path)

        def start(job: BatchJob) -> Callable[[], dict[str, Any]]:
            future = pool.submit(worker.make, job, user.returned())

            def finish() -> dict[str, Any]:
                batch, dropped, positions = future.result()
                user.drop(dropped)
                skipped.add(positions)
                return {name: user.unpack(value) for name, value in batch.items()}

            return finish

        try:
            yield from _ahead(jobs, start, depth)
        finally:
            pool.shutdown(cancel_futures=True)


@final
@frozen()
class _Worker:
    """Everything that each worker receives once."""

    maker: BatchMaker
    skipped: Skipped
    folder: str

    def _datamat_changing(self) -> Skipped:
        """Return the part that is compared for each batch to find out whether everything has to be sent again."""
        return self.skipped

    def make(self, job: BatchJob, returned: Returned) -> tuple[dict[str, Any], Sequence[str], Sequence[int]]:
        """Return the batch with its large arrays in shared memory, the dropped blocks, and the skipped positions."""
        keep_freed_pages()
        before = {*self.skipped.positions}
        owner = block_owner(self.folder)
        owner.begin(returned)
        buffer = self.maker.buffer(job, owner.allocate)
        self.maker.fill(buffer, job, range(len(job.positions)), seeds_globals=True)
        return *owner.pack(self.maker.finish(buffer, job)), [one for one in self.skipped.positions if one not in before]


def closed_at_exit(batches: Generator[dict[str, Any]]) -> Generator[dict[str, Any]]:
    """Return the same generator, closed at exit: its clean-up needs modules that the interpreter removes later."""
    _unfinished.add(batches)
    return batches


@atexit.register
def _close_all() -> None:
    for batches in list(_unfinished):
        with contextlib.suppress(ValueError):  # another thread is running it
            batches.close()


def _ahead(jobs: Iterator[_Job], start: Callable[[_Job], Callable[[], _Made]], depth: int) -> Iterator[_Made]:
    """Yield the results of jobs in order; `depth` jobs are started while a result is in use."""
    owner = os.getpid()
    started = collections.deque(map(start, itertools.islice(jobs, depth)))
    while started:
        refuse_in_fork(owner, "this iterator over batches or samples", "call iter() of its dataset")
        batch = started.popleft()()
        started.extend(map(start, itertools.islice(jobs, 1)))
        yield batch
