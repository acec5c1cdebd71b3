"""Streams of results: `map`, `starmap` and `map_unordered`, with bounded memory.

Items are pulled from the caller's iterator, by the caller's own thread, only as results are taken: at most a window of
them is under way or waiting to be taken, so that an endless iterator is as good as a list.
"""

from __future__ import annotations

import functools
import itertools
import queue
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from datamat.parallel import chunks, payloads, worker
from datamat.parallel.failures import with_remote_traceback
from datamat.parallel.slot import SLICE_S, Bell, Slot
from datamat.parallel.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from datamat.parallel.pool import Dispatcher
    from datamat.parallel.tasks import Code

__all__ = ["ResultStream"]

_MANY = 1 << 40


class ResultStream:
    """Submits items in chunks as far as the window allows, and yields their results.

    Args:
        dispatcher: runs the tasks.
        code: what is called, lent for this stream.
        items: tuples of arguments.
        num_items: how many, None where that is not known.
        chunksize: items per task; None adapts it to their cost.
        num_workers: workers of the pool.
        ordered: yield in the order of the items, else as they come.
        with_futures: give the tasks real futures, for `futures`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        code: Code,
        items: Iterable[tuple[Any, ...]],
        *,
        num_items: int | None,
        chunksize: int | None,
        num_workers: int,
        ordered: bool,
        with_futures: bool = False,
    ) -> None:
        self._dispatcher = dispatcher
        self._code = code
        self._items = iter(items)
        self._left = num_items
        self._chunksize = chunksize
        self._num_workers = num_workers
        self._in_order: deque[Task] | None = deque() if ordered else None
        self._make_future: Callable[[], Any] = Future if with_futures else functools.partial(Slot, Bell())
        self._finished: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._open_tasks = 0
        self._is_exhausted = False
        self._cost: float | None = None
        self.is_sized = num_items is not None
        self._top_up()

    # ------------------------------------------------------------ sending

    def submit_rest(self) -> None:
        """Submit all items that are left: the pool is about to accept no more."""
        while not self._is_exhausted:
            self._submit(64)

    def futures(self) -> list[Future[Any]]:
        """Return the futures of the tasks under way, if they have any."""
        return [task.future for task in self._in_order or () if isinstance(task.future, Future)]

    def _top_up(self) -> None:
        depth = chunks.prefetch_depth(None if self._cost is None else self._cost * self._size())
        window = self._num_workers * (2 * depth + 2)
        if self._open_tasks <= window // 2 or depth <= 2:
            self._submit(window - self._open_tasks)

    def _submit(self, num_tasks: int) -> None:
        tasks: list[Task] = []
        while len(tasks) < num_tasks and not self._is_exhausted:
            size = self._size()
            batch = list(itertools.islice(self._items, size))
            if self._left is not None:
                self._left -= len(batch)
            self._is_exhausted = len(batch) < size
            if batch:
                tasks.append(self._task(batch))
        if tasks:
            self._open_tasks += len(tasks)
            self._dispatcher.codes.lend_again(self._code, len(tasks))
            self._dispatcher.submit(*tasks)

    def _task(self, batch: list[tuple[Any, ...]]) -> Task:
        task = Task(self._code, payloads.dumps_data(batch), self._make_future(), worker.Mode.CHUNK, len(batch))
        if self._in_order is not None:
            self._in_order.append(task)
        else:
            task.future.add_done_callback(lambda _: self._finished.put(task))
        return task

    def _size(self) -> int:
        if self._chunksize is not None:
            return self._chunksize
        if self._cost is None:
            return 1
        return chunks.compute_chunksize(_MANY if self._left is None else self._left, self._num_workers, self._cost)

    # ------------------------------------------------------------ receiving

    def results(self, timeout: float | None) -> Iterator[Any]:
        """Yield results; an item's error is raised in its turn and ends the stream.

        Args:
            timeout: seconds from now that all results may take.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return self._results(deadline)

    def _results(self, deadline: float | None) -> Iterator[Any]:
        try:
            while self._open_tasks:
                task = self._next_task(deadline)
                values = task.future.result(None if deadline is None else deadline - time.monotonic())
                self._open_tasks -= 1
                cost = task.busy_s / task.count
                self._cost = cost if self._cost is None else 0.8 * self._cost + 0.2 * cost
                del task  # results are freed as they are taken
                self._top_up()
                values.reverse()
                while values:
                    yield _value_of(values.pop())  # not held here while the caller has it
        finally:
            self.close()

    def _next_task(self, deadline: float | None) -> Task:
        if self._in_order is not None:
            return self._in_order.popleft()
        while True:
            left = SLICE_S if deadline is None else max(0.0, min(SLICE_S, deadline - time.monotonic()))
            try:
                return self._finished.get(timeout=left)
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError from None

    def close(self) -> None:
        """Give up what has not started."""
        self._is_exhausted = True
        for task in self._in_order or ():
            task.future.cancel()
        if self._open_tasks >= 0:
            self._open_tasks = -1
            self._dispatcher.codes.give_back(self._code)


def _value_of(outcome: tuple[bool, Any]) -> Any:
    succeeded, value = outcome
    if not succeeded:
        raise with_remote_traceback(*payloads.loads_data(value))
    return value
