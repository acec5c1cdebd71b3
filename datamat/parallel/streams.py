"""Streams of results: `map`, `starmap` and `map_unordered`.

Every item runs, as in `concurrent.futures`, unless the caller closes the iterator. Who submits the items, and when,
depends on their source:

    list, range, array, ...  the dispatcher draws chunks as the workers need them, whether or not results are taken: a
                             long item delays no other, and items are pickled only when they are drawn
    anything else            may run the caller's code, or be endless: the caller's own thread pulls items as
                                 results are taken, with a window of unfinished ones. The rest is submitted when the
                                                          results are dropped untaken, or when the pool or the program
                                                          ends
"""

from __future__ import annotations

import array
import contextvars
import itertools
import operator
import os
import queue
import threading
import time
import types
import weakref
from collections import deque
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from datamat.parallel import process_role, worker
from datamat.parallel.tasks import (
    MESSAGE_COST_S,
    SLICE_S,
    CallFuture,
    LightFuture,
    Task,
    Wakeup,
    compute_chunksize,
    least_chunksize,
    prefetch_depth,
)
from datamat.parallel.workers import unpack_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from datamat.parallel.dispatcher import Dispatcher
    from datamat.parallel.tasks import RemoteFunction

_MANY = 1 << 40
_MAX_HELD_BYTES = 1 << 28  # of results that may wait behind a long item before an iterator is no longer pulled
_LARGE_BYTES = 1 << 16  # of a chunk's results; smaller chunks may be kept until their last result has been taken
_TASK_BYTES = 600  # of the parent's objects per result
_KEPT_AS_THEY_ARE = frozenset({range, tuple, str, bytes, types.MappingProxyType})
_COPIED = frozenset(
    {list, dict, set, frozenset, deque, bytearray, array.array, *map(type, ({}.keys(), {}.values(), {}.items()))}
)


class Items:
    """The arguments of the calls of one map.

    Args:
        iterables: arguments of `map`: one item of each forms the arguments of a call.
        unpacked: whether the only iterable yields tuples of arguments.

    Attributes:
        mode: layout of the arguments: tuples for several iterables; bare items for one, which take half the time.
        num_items: number of calls according to `len`, which may be wrong; None if an iterable has no length.
        is_at_hand: whether iteration is finite and runs none of the caller's code.
        is_endless: whether iteration is known to be endless.
    """

    def __init__(self, iterables: tuple[Iterable[Any], ...], *, unpacked: bool = False) -> None:
        self.num_items = _length(iterables)
        self.is_at_hand = self.num_items is not None and all(_is_at_hand(iterable) for iterable in iterables)
        self.is_endless = bool(iterables) and all(map(_is_endless, iterables))
        if self.is_at_hand:  # changing a list after the call does not change the calls
            iterables = tuple(list(each) if type(each) in _COPIED else each for each in iterables)
        self.mode = worker.Mode.CHUNK
        self._items: Iterable[Any]
        if unpacked:
            self._items = map(tuple, iterables[0])
        elif len(iterables) == 1:
            self._items = iterables[0]
            self.mode = worker.Mode.ITEMS
        else:
            self._items = zip(*iterables, strict=False)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def call_each(self, function: Callable[..., Any]) -> Iterator[Any]:
        """Return an iterator that makes the calls in this process, one after the other."""
        if self.mode == worker.Mode.ITEMS:
            return (function(item) for item in self)
        return (function(*item) for item in self)


class Results(itertools.chain[Any]):
    """The caller's iterator over results; it unpacks chunks in C."""

    _chunks: Generator[Iterable[Any], None, None]

    @classmethod
    def of(cls, chunks: Generator[Iterable[Any], None, None]) -> Results:
        """Return an iterator over the results of the chunks that the generator yields."""
        results = cast("Results", cls.from_iterable(chunks))
        results._chunks = chunks
        return results

    def close(self) -> None:
        """Cancel the calls that have not begun; the iterator ends."""
        self._chunks.close()


def _drain(results: list[Any]) -> Iterator[Any]:
    """Yield results without keeping references to those already taken."""
    results.reverse()
    while results:
        yield results.pop()


def _is_at_hand(iterable: Iterable[Any]) -> bool:
    kind = type(iterable)
    is_array = (kind.__module__, kind.__name__) == ("numpy", "ndarray")  # the core imports no numpy
    return is_array or kind in _KEPT_AS_THEY_ARE or kind in _COPIED


def _is_endless(iterable: Iterable[Any]) -> bool:
    if isinstance(iterable, itertools.repeat):
        return operator.length_hint(iterable, -1) < 0
    return isinstance(iterable, (itertools.count, itertools.cycle))


def _length(iterables: tuple[Any, ...]) -> int | None:
    """Return the length of the shortest iterable; None if one has no length."""
    try:
        return min((len(iterable) for iterable in iterables), default=0)
    except TypeError:
        return None


class ResultStream:
    """Submits items in chunks and yields their results.

    Args:
        owner: executor, which must not end while there are items that the dispatcher cannot draw.
        dispatcher: dispatcher of the pool, which runs the tasks.
        remote: function that is called, acquired for this stream.
        items: the arguments of each call; drawn as workers need them.
        chunksize: items per task; None adapts it to their cost.
        num_workers: number of workers in the pool.
        ordered: whether results come in the order of the items; otherwise in order of completion.
        with_futures: whether tasks get real futures, for `futures`.
    """

    def __init__(
        self,
        owner: object,
        dispatcher: Dispatcher,
        remote: RemoteFunction,
        items: Items,
        *,
        chunksize: int | None,
        num_workers: int,
        ordered: bool,
        with_futures: bool = False,
    ) -> None:
        self._pid = os.getpid()
        self._dispatcher = dispatcher
        self._remote = remote
        self._items = iter(items)
        self._mode = items.mode
        self._num_items = self._left = items.num_items
        self._is_endless = items.is_endless
        self._is_drawn = items.is_at_hand and not with_futures
        self._owner = None if self._is_drawn else owner  # the dispatcher draws all items on its own
        self._chunksize = chunksize
        self._num_workers = num_workers
        self._with_futures = with_futures
        self._wakeup = Wakeup()
        self._context = contextvars.copy_context()
        self._reading = threading.RLock()  # the dispatcher, `shutdown` and program exit read, too
        self._in_order: deque[Task] | None = deque() if ordered else None
        self._unordered: set[Task] = set()
        self._finished: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._num_submitted = 0  # changed under `_reading`
        self._num_settled = self._bytes_received = 0  # changed by the dispatcher
        self._num_taken = self._bytes_taken = 0  # changed by the thread that takes the results
        self._when_untaken: weakref.finalize[..., Any] | None = None
        self._is_exhausted = False
        self._is_closed = False
        self._source_error: BaseException | None = None
        self._recent_s = self._recent_items = 0.0

    # ------------------------------------------------------------ sending

    def begin(self) -> None:
        """Submit the first items; call this without a lock that the caller's iterator might need."""
        if self._is_drawn:
            self._dispatcher.open_source(self)
        else:
            self._top_up()

    def submit_rest(self) -> None:
        """Submit all remaining items: no more results are taken, or the pool is about to end."""
        while not (self._is_exhausted or self._is_endless or self._is_drawn or os.getpid() != self._pid):
            self._submit(64)

    def abandon(self) -> None:
        """Submit nothing more: after the available results, the caller gets a `CancelledError`."""
        with self._reading:
            if not self._is_exhausted:
                self._is_exhausted = True
                self._source_error = CancelledError()

    def futures(self) -> list[Future[Any]]:
        """Return the futures of the unfinished tasks, if they have any."""
        return [task.future for task in self._in_order or () if isinstance(task.future, Future)]

    def num_left(self) -> int:
        """Return the number of items not submitted yet, as far as known."""
        return 0 if self._is_exhausted else self._left or 0

    def draw(self, num_tasks: int) -> list[Task]:
        """Return the next tasks for the caller to submit; fewer if the items end."""
        with self._reading:
            tasks: list[Task] = []
            while len(tasks) < num_tasks and not self._is_exhausted:
                size = self._size()
                batch = self._pull(size)
                if self._left is not None:
                    self._left = max(0, self._left - len(batch))
                self._is_exhausted |= len(batch) < size
                if batch:
                    tasks.append(self._expect(batch))
            if tasks:
                self._dispatcher.functions.add_tasks(self._remote, len(tasks))
            return tasks

    def _submit(self, num_tasks: int) -> None:
        tasks = self.draw(num_tasks)
        if tasks:
            self._dispatcher.submit(*tasks)

    def _top_up(self) -> None:
        """Fill the window of items with untaken results."""
        if not self._is_drawn:
            self._fill_window(self._num_submitted - self._num_taken)

    def _top_up_behind(self) -> None:
        """Submit items while a long one runs: results that have arrived use memory, but no room in the window."""
        held = self._bytes_received - self._bytes_taken + _TASK_BYTES * (self._num_settled - self._num_taken)
        if not self._is_drawn and held <= _MAX_HELD_BYTES:
            self._fill_window(self._num_submitted - self._num_settled)

    def _fill_window(self, num_tasks: int) -> None:
        depth = prefetch_depth(self.task_cost())
        window = self._num_workers * (2 * depth + 2)
        if num_tasks <= window // 2 or depth <= 2:
            self._submit(window - num_tasks)

    def _pull(self, size: int) -> list[Any]:
        """Return the next items; an error of the caller's iterator waits until their results are taken."""
        batch: list[Any] = []
        try:
            batch.extend(itertools.islice(self._items, size))
        except Exception as exc:  # noqa: BLE001 -- the user's own; raised when the results before it have been taken
            self._source_error = exc
            self._is_exhausted = True
        return batch

    def _expect(self, batch: list[Any]) -> Task:
        """Register a task whose result is taken in its turn, and return it."""
        future: Any = CallFuture() if self._with_futures else LightFuture(self._wakeup)
        task = Task(self._remote, batch, future, self._mode, context=self._context, stream=self)
        self._num_submitted += 1
        if self._in_order is not None:
            self._in_order.append(task)
        else:
            self._unordered.add(task)
        if self._in_order is None or not self._is_drawn:
            future.add_done_callback(lambda _: self._note_settled(task))
        return task

    def _size(self) -> int:
        if self._chunksize is not None:
            return self._chunksize
        if not self._recent_items:
            return 1
        cost = self._recent_s / self._recent_items
        size = compute_chunksize(self._left or _MANY, self._num_workers, cost)
        return max(size, least_chunksize(self._num_items or 0, self._num_workers, cost))

    # ------------------------------------------------------------ called by the dispatcher

    def task_cost(self) -> float | None:
        """Return the seconds that the next task is likely to take; None if nothing is known yet."""
        return self._recent_s / self._recent_items * self._size() if self._recent_items else None

    def learn(self, task: Task, busy_s: float, num_bytes: int) -> None:
        """Record the cost of a task."""
        calls_s = max(busy_s - MESSAGE_COST_S, 0.1 * busy_s)  # or the first items, sent alone, would seem expensive
        self._recent_s = 0.8 * self._recent_s + calls_s
        self._recent_items = 0.8 * self._recent_items + task.count  # so that chunks count more than single items
        task.num_bytes = num_bytes
        self._bytes_received += num_bytes

    def _note_settled(self, task: Task) -> None:
        self._num_settled += 1
        if self._in_order is None:
            self._finished.put(task)
        elif self._wakeup.awaited is not None and self._num_submitted - self._num_settled <= self._num_workers:
            self._wakeup.ring()  # a thread that waits for a long item submits others meanwhile

    # ------------------------------------------------------------ receiving

    def results(self, timeout: float | None) -> Iterator[Any]:
        """Yield results; an item's error is raised in its turn and ends the stream.

        Args:
            timeout: seconds from now within which all results must come; None for no limit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        chunks = self._chunks(deadline)
        if not self._is_drawn:
            # A generator that is dropped before its first result is requested never runs, not even its `finally`.
            self._when_untaken = weakref.finalize(chunks, self.submit_rest)
            self._when_untaken.atexit = False
        return Results.of(chunks)

    def _chunks(self, deadline: float | None) -> Generator[Iterable[Any], None, None]:
        if self._when_untaken is not None:
            self._when_untaken.detach()  # it would keep this map and its contents alive as long as the generator
        results: list[Any] = []
        try:
            while (task := self._next_task(deadline)) is not None:
                results, errors = self._await(task, deadline)
                self._num_taken += 1
                self._bytes_taken += task.num_bytes
                is_large = len(results) == 1 or task.num_bytes > _LARGE_BYTES
                del task  # results are freed as they are taken
                self._top_up()
                if errors:
                    position = min(errors)
                    del results[position:]
                    yield results
                    raise unpack_error(errors[position])
                yield _drain(results) if is_large else results
            if self._source_error is not None:
                raise self._source_error
        finally:
            results.clear()  # if the iterator is closed, the caller may still have this list
            self.close()

    def _next_task(self, deadline: float | None) -> Task | None:
        """Return the task whose result comes next; None at the end."""
        process_role.refuse_in_fork(self._pid, "this map", "call map()")
        if self._num_taken == self._num_submitted:
            self._submit(1)
        if self._num_taken == self._num_submitted:
            return None
        if self._in_order is not None:
            return self._in_order.popleft()
        while True:
            left = SLICE_S if deadline is None else max(0.0, min(SLICE_S, deadline - time.monotonic()))
            try:
                task = self._finished.get(timeout=left)
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError from None
            else:
                self._unordered.discard(task)
                return task

    def _await(self, task: Task, deadline: float | None) -> tuple[list[Any], dict[int, bytes | BaseException]]:
        left = None if deadline is None else deadline - time.monotonic()
        if isinstance(task.future, LightFuture):
            outcome: tuple[list[Any], dict[int, bytes | BaseException]] = task.future.result(
                left, meanwhile=self._top_up_behind
            )
        else:
            outcome = task.future.result(left)
        return outcome

    def close(self) -> None:
        """Cancel the tasks that have not started; in a fork do nothing, since the calls are its parent's."""
        if os.getpid() != self._pid:
            return
        self._is_exhausted = True
        # The dispatcher reads only for a moment; another thread of the caller may be reading for ever.
        with self._reading if self._is_drawn else nullcontext():
            tasks = [*(self._in_order or ()), *self._unordered]
            if any(task.is_started for task in tasks):
                self._dispatcher.recall(lambda task: task.stream is self)
            for task in tasks:
                task.future.cancel()
            if not self._is_closed:
                self._is_closed = True
                self._dispatcher.functions.release(self._remote)
                self._dispatcher.wake()
