"""Hands the parts of a run to workers, and deals with workers that die under them.

    parts ── submit ──> executor ── receipts ──> the run
               ^            └── WorkerDied: which row was it at? ── once: again ── twice: without that row, as failed
               └────────────────────────────────────────────────────┘

A limit of time or disk ends the stream of receipts early; so does an error. Whatever happens, no worker is at work on
the output when the stream has ended.
"""

from __future__ import annotations

import collections
import itertools
import queue
import signal
from concurrent.futures import wait
from typing import TYPE_CHECKING

from datamat.errors import SampleError, TaskTimeout, WorkerDied
from datamat.interrupts import raise_swallowed
from datamat.ledger import FailedRow
from datamat.limits import LONGEST_GRACE_S
from datamat.parallel import PathosExecutor
from datamat.watch import read_mark
from datamat.work import set_up_process, watch_file

if TYPE_CHECKING:
    import logging
    import pathlib
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from datamat.kept import KeptRows
    from datamat.ledger import Ledger
    from datamat.limits import Deadline, DiskLimit
    from datamat.options import ErrorPolicy, WorkerOptions
    from datamat.plan import PartSpec
    from datamat.receipts import Receipt
    from datamat.rows import RowStore
    from datamat.watch import RowMark

__all__ = ["Dispatch", "own_executor"]

_MOST_UNBEGUN = 8
"""Deaths in a row under no row at all, after which it is not chance: workers fail while they set themselves up."""


def own_executor(options: WorkerOptions, num_workers: int, logger: logging.Logger) -> PathosExecutor:
    """Return datamat's own executor; what is tried again after a death is decided by row, here, and not there."""
    return PathosExecutor(
        num_workers,
        start_method=options.start_method,
        affinity=options.affinity,
        initializer=set_up_process,
        max_retries=0,
        logger=logger,
    )


class Dispatch:
    """The receipts of parts, as workers finish them, and what is known of the workers.

    Args:
        write_part: the bound method that is dispatched: (part, lost rows or None, kept rows or None) -> receipt.
        executor: the user's own, or None.
        num_workers: most workers of datamat's own executor.
        workers: how those are.
        errors: what is done about rows that end their worker.
        store: the rows, in the order of the plan.
        work: the `.datamat` folder.
        ledger: is told of deaths and limits.
        deadline: when to stop.
        disk: where to stop.
        logger: for messages.

    Attributes:
        num_workers: that were asked for; 0 until there was something to do.
        start_method: of the workers, and why.
        stopped: "deadline" or "max_disk" where that ended the stream, else "".
    """

    def __init__(  # noqa: PLR0913 -- all that a run knows of its workers
        self,
        write_part: Callable[[PartSpec, Sequence[FailedRow] | None, KeptRows | None], Receipt],
        *,
        executor: Executor | None,
        num_workers: int,
        workers: WorkerOptions,
        errors: ErrorPolicy,
        store: RowStore,
        work: pathlib.Path,
        ledger: Ledger,
        deadline: Deadline,
        disk: DiskLimit,
        logger: logging.Logger,
    ) -> None:
        self.num_workers = 0
        self.start_method = ""
        self.stopped = ""
        self._write_part = write_part
        self._foreign = executor
        self._most_workers = num_workers
        self._workers = workers
        self._errors = errors
        self._store = store
        self._work = work
        self._ledger = ledger
        self._deadline = deadline
        self._disk = disk
        self._logger = logger
        self._kept: Mapping[str, KeptRows] = {}
        self._waiting: collections.deque[PartSpec] = collections.deque()
        self._under_way: dict[Future[Receipt], PartSpec] = {}
        self._done: queue.SimpleQueue[Future[Receipt]] = queue.SimpleQueue()
        self._lost: dict[tuple[str, int], list[FailedRow]] = {}
        self._num_unbegun = 0  # deaths in a row before any row was begun
        self._deaths: collections.Counter[tuple[str, int, int | None]] = collections.Counter()

    def of(self, parts: Sequence[PartSpec], kept: Mapping[str, KeptRows]) -> Generator[Receipt]:
        """Yield the receipt of each part, in the order in which they are finished; the first part is begun first.

        Args:
            parts: the work.
            kept: rows whose records are there already, by name of the shard.

        Raises:
            SampleError: a row failed, or ended its worker more often than `max_retries` says, and the policy is to
                raise.
            WorkerDied: a worker died again and again before it began with a row.
        """
        if not parts:
            return
        self._waiting.extend(parts)
        self._kept = kept
        if self._foreign is not None:
            yield from self._receipts(self._foreign)
            return
        self.num_workers = min(self._most_workers, len(parts))
        with own_executor(self._workers, self.num_workers, self._logger) as executor:
            yield from self._receipts(executor)

    def _receipts(self, executor: Executor) -> Iterator[Receipt]:
        try:
            if self._deadline.has_come:
                self.stopped = "deadline"
                return
            self._submit(executor)
            if isinstance(executor, PathosExecutor):
                found = executor.stats()
                self.start_method = f"{found.start_method}: {found.reason}"
            while self._under_way:
                raise_swallowed()
                receipt = self._next(executor)
                if receipt is not None:
                    yield receipt
                if self._deadline.has_come and (self._under_way or self._waiting):
                    self.stopped = "deadline"
                    yield from self._last_receipts()
                    return
                self._submit(executor)
        except Exception:
            self._let_end(LONGEST_GRACE_S)  # what is under way may be finished, and stay
            raise
        finally:
            self._end(executor)

    def _submit(self, executor: Executor) -> None:
        """Hand out what waits: all of it, or only as much as surely fits where disk is limited."""
        while self._waiting:
            if self._disk.is_set and len(self._under_way) > self._most_workers:
                return
            part = self._waiting[0]
            if not self._disk.allows([part.cost, *(other.cost for other in self._under_way.values())]):
                if not self._under_way:  # else those may come out smaller than they were taken for
                    self.stopped = "max_disk"
                return
            self._waiting.popleft()
            lost = self._lost.get((part.shard, part.number))
            kept = self._kept.get(part.shard)
            future = executor.submit(self._write_part, part, lost, kept and kept.of(part.start, part.stop))
            self._under_way[future] = part
            future.add_done_callback(self._done.put)

    def _next(self, executor: Executor) -> Receipt | None:
        """Return the next receipt; None where a worker has died, or the deadline has come first."""
        try:
            future = self._done.get(timeout=self._deadline.left_s)
        except queue.Empty:
            return None
        part = self._under_way.pop(future)
        try:
            receipt = future.result()
        except WorkerDied as error:
            if executor is self._foreign:
                raise
            self._lose(part, error)
            return None
        self._num_unbegun = 0
        self._deadline.add(receipt.elapsed_s)
        self._disk.add(part.cost, receipt.num_bytes)
        return receipt

    def _last_receipts(self) -> Iterator[Receipt]:
        """Yield what comes in of the parts under way before the grace is over."""
        self._let_end(self._deadline.grace_s)
        while not self._done.empty():
            future = self._done.get()
            if not future.cancelled() and future.exception() is None:
                yield future.result()

    def _let_end(self, grace_s: float) -> None:
        """Cancel what is not begun, and wait a little for the rest."""
        for future in self._under_way:
            future.cancel()
        wait([future for future in self._under_way if not future.done()], grace_s)

    def _end(self, executor: Executor) -> None:
        """See that nothing is under way any more: in datamat's own workers by force, which leaves no half of a part."""
        for future in self._under_way:
            future.cancel()
        left = [future for future in self._under_way if not future.done()]
        if left and isinstance(executor, PathosExecutor) and executor is not self._foreign:
            executor.terminate()
        elif left:
            wait(left)

    # ------------------------------------------------------------ deaths

    def _lose(self, part: PartSpec, error: WorkerDied) -> None:
        """Put a part whose worker died back, without the row that did it where that has happened too often.

        Raises:
            SampleError: it has, and the policy is to raise.
            WorkerDied: it has before any row was begun.
        """
        mark = read_mark(watch_file(self._work, part))
        lost = self._lost.setdefault((part.shard, part.number), [])
        timed_out = getattr(error, "signal", None) == signal.SIGALRM and self._workers.sample_timeout_s is not None
        place = (part.shard, part.number, mark.position)
        self._deaths[place] += 1
        self._num_unbegun = self._num_unbegun + 1 if mark.position is None else 0
        self._tell_death(part, mark, error, timed_out=timed_out)
        self._waiting.appendleft(part)
        if self._num_unbegun >= _MOST_UNBEGUN:
            raise error
        if self._deaths[place] <= self._workers.max_retries or mark.num_rows > 1:
            return  # once more; rows of a block go one by one then, and the next death tells which it is
        if mark.position is None:
            raise error
        cause = self._timeout(mark) if timed_out else error
        failed = FailedRow(
            position=mark.position,
            key=self._key(mark.position),
            error=type(cause).__name__,
            message=f"{type(cause).__name__}: {cause if timed_out else _death(error)}",
            action=self._errors.action,
            attempts=self._deaths[place],
        )
        if self._errors.action == "raise":
            raise SampleError(failed.key, failed.message) from cause
        lost.append(failed)

    def _tell_death(self, part: PartSpec, mark: RowMark, error: WorkerDied, *, timed_out: bool) -> None:
        key = None if mark.position is None else self._key(mark.position)
        message = str(self._timeout(mark)) if timed_out else _death(error)
        event = "sample_timeout" if timed_out else "worker_died"
        self._ledger.write(event, shard=part.shard, part=part.number, key=key, rows=mark.num_rows, message=message)
        at = "before its first row" if key is None else f"at sample {key!r}"
        self._logger.warning("part %d of %s, %s: %s", part.number, part.shard, at, message)

    def _timeout(self, mark: RowMark) -> TaskTimeout:
        limit = self._workers.sample_timeout_s or 0.0
        stack = _own_frames(mark.stack)
        return TaskTimeout(f"it ran longer than sample_timeout_s={limit:g}; its Python stack:\n{stack}")

    def _key(self, position: int) -> str:
        return self._store.keys(self._store.order[position : position + 1])[0]


def _death(error: WorkerDied) -> str:
    """Return how a worker ended: signal or exit code, peak memory, stack."""
    number, code = getattr(error, "signal", None), getattr(error, "exitcode", None)
    how = f"exit code {code}"
    if number is not None:
        names = {member.value: member.name for member in signal.Signals}
        hint = ", as the kernel's out-of-memory killer sends it" if number == signal.SIGKILL else ""
        how = f"signal {number} ({names.get(number, 'real-time signal')}{hint})"
    peak = getattr(error, "peak_rss_bytes", 0) / 2**20
    stack = _own_frames(getattr(error, "stack", ""))
    return f"its worker ended by {how}, peak memory {peak:.0f} MiB" + (f"\n{stack}" if stack else "")


def _own_frames(stack: str) -> str:
    """Return a stack without what called the row's own code: that is the same for all."""
    lines = itertools.takewhile(lambda line: "/datamat/work.py" not in line, stack.splitlines())
    return "\n".join(lines).strip()
