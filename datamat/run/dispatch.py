"""Hand the parts of a run to workers, seal its shards, and recover from the deaths of workers.

    parts ── submit ──> executor ── receipts ──> the run ── all of a shard are there ──> seal ──> executor ──> the run
               ^            └── WorkerDied: which row was it at? ── once: again ── twice: without that row, as failed
               └────────────────────────────────────────────────────┘

Datamat's own workers get the parts of a shard one after another, so that each is appended directly to the shard's file.
The number of shards in progress is that of workers plus one, so that no worker waits. When fewer shards are left,
several workers share one, and some of its parts go to separate files first. Another executor may run a call twice at
once, so its workers never append.

A limit of time or disk, or an error, ends the stream of receipts early. In any case, no worker is writing to the output
when the stream has ended.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import math
import os
import queue
import signal
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from datamat.directory.ledger import FailedRow
from datamat.errors import BrokenPoolError, OptionError, SampleError, TaskTimeout, WorkerDied
from datamat.events import WorkerLost, WorkersStarted
from datamat.options import LONGEST_GRACE_S
from datamat.parallel import PathosExecutor, physical_cores
from datamat.parallel.processes import choose_start_method, hashes_as_workers_do, is_frozen
from datamat.parallel.tasks import CallLost
from datamat.plan.memos import KnownMemos
from datamat.plan.plan import PartSpec, ShardSpec
from datamat.run.limits import raise_swallowed
from datamat.run.outputs import StoredShard, UploadTask
from datamat.run.receipts import DamagedPartError, Receipt, Sealed, part_folder, read_receipt
from datamat.run.row_watch import RowMark
from datamat.run.shards import remove_folder
from datamat.run.upload import upload
from datamat.run.worker import LEAST_CALL_S, MOST_CALL_S, PartWorker, set_up_process

if TYPE_CHECKING:
    import contextlib
    import logging
    import pathlib
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor
    from typing import TypeGuard

    from datamat.options import WorkerOptions
    from datamat.parallel.engines import EngineExecutor
    from datamat.plan.changes import ReusedRows
    from datamat.plan.digests import JobDigests
    from datamat.plan.job import Job
    from datamat.run.limits import DiskLimit
    from datamat.run.reporting import RunEvents
    from datamat.run.slices import TaskClaims
    from datamat.sources.store import RowStore

_CALLERS = ("/datamat/run/worker.py", "/datamat/run/function.py")

_PRELOAD = ("datamat.run.worker",)
"""Named explicitly, because a clone of datamat counts as user code, which no server imports."""

_MOST_NAMED = 5
"""Files or pieces of code listed in a warning."""

_MOST_UNDER_WAY = 4096
"""Parts submitted to a user's executor at a time: its number of workers is unknown, and each part takes 2 KB."""

_MOST_LOST = 8
"""Calls that an engine may lose in a row before the run gives up."""

_CANCEL_AGAIN_S = 1.0
"""Seconds between attempts to cancel calls that have not ended."""

_SILENCE_S = 10.0
"""Seconds without a result after which the run checks whether the engine has workers."""

_SMALL_S = 0.5
"""A job expected to take less than this, in seconds, starts with one worker; first rows are slower than others."""

_ONE_WORKER_S = 0.2
"""Seconds of work after which such a job starts all workers, if more than half is left."""

_MOST_UNBEGUN = 8
"""Tolerated deaths in a row before any row is begun; beyond that, workers fail during setup."""


Task: TypeAlias = tuple[PartSpec, ...] | ShardSpec | UploadTask
"""A call: make consecutive parts of a shard, seal a shard, or upload one."""

Result: TypeAlias = Receipt | Sealed | StoredShard


class PartOrder:
    """The queue of parts, which chooses the next one.

    The parts of a shard come in order, and one at a time as long as there are other shards: then each one's predecessor
    is in the file.

    Args:
        parts: parts to make.
        appends: whether workers append; otherwise all parts go to separate files, and none waits for another.
    """

    def __init__(self, parts: Iterable[PartSpec] = (), *, appends: bool = True) -> None:
        self._appends = appends
        self._waiting: dict[str, collections.deque[PartSpec]] = {}
        self._cost: collections.Counter[str] = collections.Counter()  # of the waiting parts
        self._under_way: dict[str, set[int]] = collections.defaultdict(set)
        self._begun: set[str] = set()
        self._ready: list[tuple[bool, int, str]] = []  # a heap of shards whose next part can be appended
        self._is_ready: set[str] = set()
        self._num_waiting = 0
        self.add(parts)

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def cost(self) -> int:
        """Estimated cost of the queued parts, in bytes of input."""
        return sum(self._cost.values())

    def add(self, parts: Iterable[PartSpec]) -> None:
        """Queue more parts, in the order of their shards."""
        for shard, mine in itertools.groupby(parts, key=lambda part: part.shard):
            found = [*self._waiting.get(shard, ()), *mine]
            self._cost[shard] = sum(part.cost for part in found)
            self._num_waiting += len(found) - len(self._waiting.get(shard, ()))
            self._waiting[shard] = collections.deque(sorted(found, key=lambda part: part.number))
            self._note(shard)

    def next(self, *, may_lie_apart: bool) -> PartSpec | None:
        """Return the next part to hand out; None if none is queued.

        Shards in progress go first, those with the most remaining work before others.

        Args:
            may_lie_apart: whether the part may go to a separate file because its predecessor is in progress.
        """
        if self._ready:
            _, _, shard = heapq.heappop(self._ready)
            self._is_ready.discard(shard)
            part = self._taken(shard, 0)
            if not self._appends:
                self._note(shard)
            return part
        waiting = [shard for shard, numbers in self._under_way.items() if numbers and self._waiting.get(shard)]
        if not waiting or not may_lie_apart:
            return None
        shard = max(waiting, key=lambda shard: (self._cost[shard], shard))
        # The next part is left for the worker that finishes its predecessor.
        return self._taken(shard, min(1, len(self._waiting[shard]) - 1))

    def after(self, part: PartSpec) -> PartSpec | None:
        """Return the next part of the same shard, for the same worker; None if it is not queued."""
        waiting = self._waiting.get(part.shard)
        return self._taken(part.shard, 0) if waiting and waiting[0].number == part.number + 1 else None

    def end(self, part: PartSpec) -> None:
        """Mark a part as no longer in progress."""
        numbers = self._under_way[part.shard]
        numbers.discard(part.number)
        if not numbers:
            del self._under_way[part.shard]
        self._note(part.shard)

    def _taken(self, shard: str, place: int) -> PartSpec:
        waiting = self._waiting[shard]
        part = waiting[place]
        del waiting[place]
        self._num_waiting -= 1
        self._cost[shard] -= part.cost
        self._begun.add(shard)
        self._under_way[shard].add(part.number)
        if not waiting:
            del self._waiting[shard], self._cost[shard]
        return part

    def _note(self, shard: str) -> None:
        waiting = self._waiting.get(shard)
        if not waiting or shard in self._is_ready:
            return
        under_way = self._under_way.get(shard, ()) if self._appends else ()
        if all(number > waiting[0].number for number in under_way):
            self._is_ready.add(shard)
            heapq.heappush(self._ready, (shard not in self._begun, -self._cost[shard], shard))


def count_workers(job: Job) -> int:
    """Return the number of workers of datamat's own executor for a job."""
    return job.how.workers.num_workers or len(physical_cores())


def open_executor(
    given: Any, options: WorkerOptions, num_workers: int, logger: logging.Logger, hashing: str = ""
) -> contextlib.AbstractContextManager[Executor]:
    """Return the executor of a run: the user's engine, or datamat's own workers.

    Datamat's workers retry nothing: `PartQueue` decides that by row.

    Args:
        given: the user's engine, or None.
        options: options of datamat's own workers.
        num_workers: number of datamat's own workers.
        logger: receives warnings about either.
        hashing: description of code whose results may depend on a process's hash seed; "" for none. Workers of a
            forkserver and of engines have a fixed seed, forked workers the caller's.
    """
    depends = bool(hashing) and not hashes_as_workers_do()

    def warn(others: str, instead: str) -> None:
        logger.warning(
            "%s: its order or value differs between processes with different hash seeds, as %s; sort the result, or %s",
            hashing,
            others,
            instead,
        )

    if given is not None:
        if depends and isinstance(given, PathosExecutor) and given.stats().start_method == "fork":
            warn("forks of two programs have", "pass one with start_method='forkserver'")
        from datamat.parallel.engines import open_engine

        here = functools.partial(warn, "two programs that make the calls themselves have", "set PYTHONHASHSEED=0")
        return open_engine(given, _PRELOAD, here if depends else None)
    method = options.start_method
    if depends and method == "fork":
        warn("forks of two programs have", "leave out 'fork'")
    elif depends and method is None and choose_start_method()[0] == "fork" and not is_frozen():
        method = "forkserver"
    return PathosExecutor(
        num_workers,
        start_method=method,
        affinity=options.affinity,
        initializer=set_up_process,
        max_retries=0,
        logger=logger,
        preload=_PRELOAD,
    )


def _is_engine(executor: Executor) -> TypeGuard[EngineExecutor]:
    """Return True for a user's engine: `open_executor` wraps every executor that is not datamat's own."""
    return not isinstance(executor, PathosExecutor)


def result_of(future: Future[Any], executor: Executor, logger: logging.Logger) -> Any:
    """Return the result of a single call; warn if the user's engine has no workers."""
    if _is_engine(executor) and not wait([future], _SILENCE_S).done:
        executor.warn_without_workers(logger)
    return future.result()


class PartQueue:
    """The remaining parts of a run, and the workers that make them.

    Args:
        job: the job, with its executor, workers and error policy.
        store: the rows, in the order of the plan.
        run: mark of this run, which allows datamat's own workers to append to the shards' files.
        disk: bytes on disk at which no further part is started.
        events: receives the start and the deaths of workers.
        digests: the digests of the job, with the code that depends on the hash seed or cannot be seen.
        claims: claims of this task if several share an output; None for a single task.

    Attributes:
        stopped: "deadline" or "max_disk" if that ended the stream, else "".
    """

    def __init__(
        self,
        job: Job,
        store: RowStore,
        *,
        run: str,
        disk: DiskLimit,
        events: RunEvents,
        digests: JobDigests,
        claims: TaskClaims | None = None,
    ) -> None:
        self.stopped: Literal["", "deadline", "max_disk"] = ""
        self._job = job
        self._worker = PartWorker(job, store.folder, run)
        self._write = self._worker.write_parts if job.dispatched is None else job.dispatched(self._worker)
        self._store = store
        self._claims = claims
        self._deadline = job.how.deadline
        self._disk = disk
        self._events = events
        self._hashing = digests.hashing
        self._unseen = digests.unseen  # until the user has been told
        self._given = digests.given
        self._memos = KnownMemos(job.work, digests.code)
        self._is_own = job.how.executor is None
        self._num_workers = count_workers(job)
        self._reused: Mapping[str, ReusedRows] = {}
        self._waiting = PartOrder(appends=self._is_own)
        self._to_end: collections.deque[ShardSpec | UploadTask] = collections.deque()
        self._to_remove: collections.deque[pathlib.Path] = collections.deque()
        self._under_way: dict[Future[Any], Task] = {}
        self._removing: dict[Future[Any], pathlib.Path] = {}
        self._done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._lost: dict[tuple[str, int], list[FailedRow]] = {}
        self._rate: float | None = None  # seconds per byte of cost, of the fastest part
        self._one_worker_s: float | None = None  # of work so far, if one worker is expected to suffice
        self._done_cost = 0
        self._more: Callable[[], Sequence[PartSpec]] | None = None
        self._num_lost = 0  # calls in a row that an engine lost
        self._num_unbegun = 0  # deaths in a row before any row was begun
        self._heard_at = 0.0
        self._has_warned_of_undeclared = False
        self._passed_on: set[str] = set()
        self._deaths: collections.Counter[tuple[type, str, int, int | None]] = collections.Counter()

    def of(
        self,
        parts: Sequence[PartSpec],
        reused: Mapping[str, ReusedRows],
        more: Callable[[], Sequence[PartSpec]] | None = None,
    ) -> Generator[Result]:
        """Yield receipts of parts, and sealed or uploaded shards, as they finish.

        Args:
            parts: parts to make, those of a shard in order.
            reused: rows whose records exist already, by name of the shard.
            more: returns further parts for an idle worker, or none if there are none now; None if there are no
                other parts.

        Raises:
            SampleError: a row failed, or ended its worker more often than `max_retries` allows, and the policy is
                "raise".
            WorkerDied: workers died repeatedly before they started a row.
            BrokenPoolError: the user's engine has lost a part and does not accept it again.
        """
        if not parts and not self._to_end:
            return
        self._waiting.add(parts)
        self._reused = reused
        self._more = more
        if self._is_own and more is None:
            self._num_workers = min(self._num_workers, len(parts) + len(self._to_end))
        if self._is_small_job(parts):
            most, self._num_workers, self._one_worker_s = self._num_workers, 1, 0.0
            self._worker.most_call_s = _ONE_WORKER_S  # nobody else waits for its parts
            yield from self._results()
            self._num_workers, self._one_worker_s = most, None
            self._worker.most_call_s = MOST_CALL_S
            if self.stopped or not (self._waiting or self._to_end):
                return
            if self._job.how.workers.start_method is not None:
                self._hashing = ""  # the user has been told
        yield from self._results()

    def add(self, task: Task) -> None:
        """Queue a call: parts only while `of` yields, a shard to seal or upload also before."""
        if isinstance(task, tuple):
            self._waiting.add(task)
        elif isinstance(task, ShardSpec):
            self._to_end.append(task)
        else:
            self._to_end.appendleft(task)  # first, because an upload frees disk space

    def remove(self, folder: pathlib.Path) -> None:
        """Queue the removal of a folder that is no longer used; only while `of` yields."""
        if self._disk.is_set or self._one_worker_s is not None:
            remove_folder(folder)  # its space counts for the next part; or it is small, and the worker may end
        else:
            self._to_remove.append(folder)

    def _results(self) -> Iterator[Result]:
        how = self._job.how
        with open_executor(how.executor, how.workers, self._num_workers, how.logger, self._hashing) as executor:
            try:
                if self._deadline.has_come:
                    self.stopped = "deadline"
                    return
                self._submit(executor)
                if self._under_way:
                    import pyarrow.parquet  # noqa: F401 -- needed for the index at the end; workers are busy now
                self._heard_at = time.monotonic()
                stats = executor.stats() if isinstance(executor, PathosExecutor) else None
                self._events.emit(
                    WorkersStarted(
                        num_workers=self._num_workers if self._is_own else 0,
                        start_method="" if stats is None else f"{stats.start_method}: {stats.reason}",
                        engine=executor.name if _is_engine(executor) else "",
                    )
                )
                while self._under_way:
                    raise_swallowed()
                    if self._claims is not None:
                        self._claims.beat()
                    for result in self._next(executor):
                        yield result
                        if isinstance(result, StoredShard):
                            self._disk.measure()
                    if self._deadline.has_come and (self._under_way or self._waiting or self._to_end):
                        self.stopped = "deadline"
                        yield from self._last_results(executor)
                        return
                    self._submit(executor)
                wait(list(self._removing), self._deadline.left_s)
            except Exception:
                self._let_end(executor, LONGEST_GRACE_S)  # parts in progress may finish, and are kept
                raise
            finally:
                self._end(executor)

    def _submit(self, executor: Executor) -> None:
        """Submit waiting tasks: one for each of datamat's own workers, and one more that can be appended.

        Another executor gets as many as the largest one could use.
        """
        self._submit_removals(executor)
        self._submit_ends(executor)
        most = self._num_workers + 1 if self._is_own else _MOST_UNDER_WAY
        # Stop here if a job turns out larger than expected, with less than half of it done: then all workers start.
        is_small = (self._one_worker_s or 0.0) <= _ONE_WORKER_S or self._waiting.cost <= self._done_cost
        while len(self._under_way) < most and is_small:
            if self._more is not None and not self._waiting and len(self._under_way) < self._num_workers:
                self._waiting.add(self._more())
            if not self._waiting:
                return
            part = self._waiting.next(may_lie_apart=len(self._under_way) < self._num_workers)
            if part is None:
                return
            under_way = (one.cost for task in self._under_way.values() if isinstance(task, tuple) for one in task)
            if self._disk.is_set and not self._disk.allows([part.cost, *under_way]):
                self._waiting.end(part)
                self._waiting.add([part])
                if not self._under_way:  # otherwise those may turn out smaller than estimated
                    self.stopped = "max_disk"
                return
            lost = self._lost.get((part.shard, part.number))
            reused = self._reused.get(part.shard)
            mine = reused and reused.of(part.start, part.stop)
            others = [] if lost is not None or reused is not None else self._others(part)
            self._hand_out(executor, (part, *others), self._write, (part, *others), lost, mine)

    def _submit_ends(self, executor: Executor) -> None:
        """Submit the shards to seal and to upload."""
        while self._to_end:
            task = self._to_end.popleft()
            if isinstance(task, ShardSpec):
                call = (task.name, task.fingerprint, len(task.parts))
                self._hand_out(executor, task, self._worker.seal_shard, *call)
            elif task.store.is_private and self._is_own:
                self._await(_done_here(task), task)  # a store in the memory of this process
            else:
                self._hand_out(executor, task, upload, task)

    @property
    def _may_join(self) -> bool:
        """Whether a call may make several parts: not if disk or memory is checked after each part."""
        return self._is_own and not self._disk.is_set and self._job.how.workers.max_rss is None

    def _is_small_job(self, parts: Sequence[PartSpec]) -> bool:
        """Return True if all parts should take less time than starting a second worker."""
        if not self._may_join or self._more is not None or self._job.row_s is None:
            return False
        expected_s = self._job.row_s * sum((part.stop - part.start) * part.copies for part in parts)
        if expected_s < _SMALL_S:
            self._rate = expected_s / max(sum(part.cost for part in parts), 1)
        return expected_s < _SMALL_S

    def _others(self, part: PartSpec) -> list[PartSpec]:
        """Take further parts after `part` for the same call, to make it worth its overhead."""
        others: list[PartSpec] = []
        if not self._may_join or self._rate is None:
            return others
        least = LEAST_CALL_S / self._rate if self._rate else math.inf
        cost = part.cost
        while cost < least and (part.shard, part.number + 1) not in self._lost:
            after = self._waiting.after(part)
            if after is None:
                break
            others.append(after)
            part, cost = after, cost + after.cost
        return others

    def _submit_removals(self, executor: Executor) -> None:
        while self._to_remove:
            folder = self._to_remove[0]
            try:
                future = executor.submit(remove_folder, os.fspath(folder))
            except (OptionError, RuntimeError):  # the executor accepts no more calls: `_end` removes the folder
                return
            self._removing[future] = self._to_remove.popleft()
            future.add_done_callback(self._removing.pop)

    def _await(self, future: Future[Any], task: Task) -> None:
        self._under_way[future] = task
        future.add_done_callback(self._done.put)

    def _hand_out(self, executor: Executor, task: Task, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._await(executor.submit(function, *args), task)
        except CallLost as error:
            raise self._lost_for_good(task, error) from error

    def _next(self, executor: Executor) -> Iterator[Result]:
        """Yield the results of the next call to end; none if its worker died or a timeout came first."""
        future = self._ended(executor)
        if future is None:
            return
        task = self._under_way.pop(future)
        parts = task if isinstance(task, tuple) else ()
        for part in parts:
            self._waiting.end(part)
        try:
            result: list[Receipt] | Sealed | StoredShard = future.result()
        except WorkerDied as error:
            self._lose(task, error)
            return
        except CallLost as error:
            self._repeat(task, error)
            return
        except DamagedPartError as error:
            if not isinstance(task, ShardSpec):
                raise
            yield Sealed(task.name, damaged=error)
            return
        self._num_unbegun = self._num_lost = 0
        if isinstance(result, list):
            for part, receipt in zip(parts, result, strict=False):
                self._note(part, receipt)
            self._waiting.add(parts[len(result) :])
        yield from _each(result)

    def _note(self, part: PartSpec, receipt: Receipt) -> None:
        self._warn_of_unseen(receipt)
        if receipt.memos:
            self._memos.add(self._given, receipt.memos)
        for remark in receipt.remarks:
            if remark not in self._passed_on:  # once, however many workers make it
                self._passed_on.add(remark)
                self._job.how.logger.warning("%s", remark)
        self._deadline.add(receipt.elapsed_s)
        self._disk.add(part.cost, receipt.num_bytes)
        self._done_cost += part.cost
        rate = receipt.elapsed_s / max(part.cost, 1)
        self._rate = rate if self._rate is None else min(self._rate, rate)
        if self._one_worker_s is not None:
            self._one_worker_s += receipt.elapsed_s

    def _ended(self, executor: Executor) -> Future[Any] | None:
        """Wait for a call to end; return None on a timeout."""
        waits = [self._deadline.left_s, self._deadline.wait_s, None if self._claims is None else self._claims.pause_s]
        if _is_engine(executor):
            waits.append(_SILENCE_S)
        try:
            future = self._done.get(timeout=min((wait_s for wait_s in waits if wait_s is not None), default=None))
        except queue.Empty:
            if _is_engine(executor) and time.monotonic() - self._heard_at >= _SILENCE_S:
                executor.warn_without_workers(self._job.how.logger)
                self._heard_at = time.monotonic()  # to ask again
            return None
        self._heard_at = time.monotonic()
        return future

    def _warn_of_unseen(self, receipt: Receipt) -> None:
        """Warn once about undeclared inputs of records: opened files, and values that code looks up."""
        unseen, self._unseen = self._unseen, ()
        files = () if self._has_warned_of_undeclared else receipt.undeclared
        self._has_warned_of_undeclared |= bool(files)
        said, remedies = [], []
        if unseen:
            said.append(f"use {_listed(unseen)}, which a fingerprint cannot cover")
            remedies.append("Name in the code what it needs, as in os.environ['NAME'], or pass it as an attribute")
        if files:
            said.append(f"opened {_listed(list(map(repr, files)))}, which no row of the index declares")
            remedies.append(
                "Declare a file of one sample by IndexRow(files=[...]), or by its path in the items of materialize; a "
                "file of all samples by the attribute `files` of the writer"
            )
        if said:
            self._job.how.logger.warning(
                "read, augment or the transform %s: when one of them changes, finished shards stay as they are. %s; or "
                "pass version='1', and raise it with every change",
                ", and ".join(said),
                ". ".join(remedies),
            )

    def _last_results(self, executor: Executor) -> Iterator[Result]:
        """Yield results that arrive within the grace period."""
        self._let_end(executor, self._deadline.grace_s)
        while not self._done.empty():
            future = self._done.get()
            if not future.cancelled() and future.exception() is None:
                self._under_way.pop(future, None)
                yield from _each(future.result())
        for task in self._under_way.values():  # finished parts of an interrupted call count
            if isinstance(task, tuple) and len(task) > 1:
                yield from itertools.takewhile(bool, map(self._left_receipt, task))

    def _left_receipt(self, part: PartSpec) -> Receipt | None:
        receipt = read_receipt(part_folder(self._job.work, part.shard), part.number)
        return receipt if receipt is not None and receipt.is_for(part) else None

    def _let_end(self, executor: Executor, grace_s: float) -> None:
        """Cancel calls that have not started, and give the others a little time."""
        wait(_cancelled(executor, self._under_way), grace_s)

    def _end(self, executor: Executor) -> None:
        """Stop everything: datamat's own workers are killed, which never leaves a partial part."""
        removing = dict(self._removing)
        if _cancelled(executor, self._under_way) and isinstance(executor, PathosExecutor) and self._is_own:
            executor.terminate()
        else:
            # More than once: if a worker is lost, its engine would resubmit calls that could not be cancelled.
            while left := _cancelled(executor, [*self._under_way, *removing]):
                wait(left, _CANCEL_AGAIN_S)
        for folder in (*self._to_remove, *removing.values()):
            remove_folder(folder)
        self._to_remove.clear()

    # ------------------------------------------------------------ deaths

    def _repeat(self, task: Task, error: CallLost) -> None:
        """Requeue a task that the user's engine lost, for example when its scheduler restarted.

        Raises:
            BrokenPoolError: the engine does not accept it, or loses one call after the other.
        """
        self._num_lost += 1
        if not error.may_repeat or self._num_lost > _MOST_LOST + len(self._under_way):
            raise self._lost_for_good(task, error) from error
        self._job.how.logger.warning("%s is submitted again: %s", self._name_of(task), error)
        self.add(task)

    def _lost_for_good(self, task: Task, error: CallLost) -> BrokenPoolError:
        return BrokenPoolError(
            f"{self._name_of(task)} was lost: {error}. Finished parts stay: run again to resume once the engine works. "
            "If a row kills the process that reads it, a run without executor finds out which one, and skips it with "
            "errors='skip'"
        )

    def _name_of(self, task: Task) -> str:
        if isinstance(task, UploadTask):
            return f"the upload of {task.shard}"
        if isinstance(task, ShardSpec):
            return f"the end of {task.name}"
        part = task[0]
        first, last = self._key(part.start), self._key(part.stop - 1)
        return f"part {part.number} of {part.shard} (rows {first!r} to {last!r})"

    def _lose(self, task: Task, error: WorkerDied) -> None:
        """Requeue a task after its worker died, without a row that has killed workers too often.

        Raises:
            SampleError: there is such a row, and the policy is "raise".
            WorkerDied: workers died too often before they started a row.
        """
        self.add(task)
        mark, lost = None, list[FailedRow]()
        if isinstance(task, tuple):
            mark = RowMark.of(error)
            part = next((one for one in task if mark and one.start <= mark.position < one.stop), task[0])
            shard, number = part.shard, part.number
            lost = self._lost.setdefault((shard, number), lost)  # one row at a time from now on
        elif isinstance(task, ShardSpec):
            shard, number = task.name, len(task.parts) - 1
        else:
            shard, number = task.shard, 0
        place = type(task), shard, number, None if mark is None else mark.position
        self._deaths[place] += 1
        self._num_unbegun = self._num_unbegun + 1 if mark is None else 0
        workers, policy = self._job.how.workers, self._job.how.errors
        cause, message = describe_death(error, workers)
        self._events.emit(
            WorkerLost(
                shard=shard,
                part=number,
                key=None if mark is None else self._key(mark.position),
                num_rows=0 if mark is None else mark.num_rows,
                timed_out=isinstance(cause, TaskTimeout),
                message=message,
            )
        )
        if self._num_unbegun >= _MOST_UNBEGUN:
            raise error
        if self._deaths[place] <= workers.max_retries or (mark is not None and mark.num_rows > 1):
            return  # once more, with the rows of a block one at a time; the next death shows which one it is
        if mark is None:
            raise error
        failed = FailedRow(
            position=mark.position,
            key=self._key(mark.position),
            error=type(cause).__name__,
            message=f"{type(cause).__name__}: {message}",
            action=policy.action,
            attempts=self._deaths[place],
        )
        if policy.action == "raise":
            raise SampleError(failed.key, failed.message) from cause
        lost.append(failed)

    def _key(self, position: int) -> str:
        return self._store.keys(self._store.order[position : position + 1])[0]


def _each(result: list[Receipt] | Sealed | StoredShard) -> Sequence[Result]:
    return result if isinstance(result, list) else [result]


def _listed(names: Sequence[str]) -> str:
    others = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {others} more" if others > 0 else "")


def _cancelled(executor: Executor, futures: Iterable[Future[Any]]) -> list[Future[Any]]:
    """Cancel calls that have not started; return those that have not ended."""
    asked = [future for future in futures if not future.done()]
    if _is_engine(executor):
        executor.cancel(asked)  # in one step: each one may cost the engine a request
    else:
        for future in asked:
            future.cancel()
    return [future for future in asked if not future.done()]


def _done_here(task: UploadTask) -> Future[Any]:
    """Upload in this process; return a future of the result."""
    future: Future[Any] = Future()
    try:
        future.set_result(upload(task))
    except Exception as error:  # noqa: BLE001 -- raised when the result is read
        future.set_exception(error)
    return future


def describe_death(error: WorkerDied, workers: WorkerOptions) -> tuple[TaskTimeout | WorkerDied, str]:
    """Return the exception and the message for a row that killed its worker."""
    lines = error.worker_exit.stack.splitlines()  # the outer frames are the same for all rows
    own = itertools.takewhile(lambda line: not any(caller in line for caller in _CALLERS), lines)
    ended = dataclasses.replace(error.worker_exit, stack="\n".join(own).strip(), log_lines=())
    if workers.sample_timeout_s is not None and ended.signal == signal.SIGALRM:
        message = ended.describe_timeout("sample_timeout_s", workers.sample_timeout_s)
        return TaskTimeout(message), message
    return error, f"its worker ended by {ended.describe()}"
