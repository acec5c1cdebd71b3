"""`PathosExecutor`: a `concurrent.futures.Executor` for bound methods of anything, anywhere."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from datamat.errors import OptionError
from datamat.parallel import affinity as cpu
from datamat.parallel import byvalue, logs, payloads, role, serial
from datamat.parallel.chunks import compute_chunksize
from datamat.parallel.crew import PoolOptions
from datamat.parallel.maps import ResultStream
from datamat.parallel.pool import Dispatcher
from datamat.parallel.startmethod import choose_start_method
from datamat.parallel.tasks import Task

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from datamat.parallel.handle import WorkerStats
    from datamat.parallel.progress import Progress

__all__ = ["PathosExecutor", "PoolStats"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool is and has done.

    Attributes:
        start_method: how its workers are started; "serial" inside a worker.
        reason: why that one.
        workers: every worker so far, running or not.
    """

    start_method: str
    reason: str
    workers: tuple[WorkerStats, ...]


class PathosExecutor(Executor):
    """Run calls in worker processes.

    Args:
        max_workers: most worker processes; None takes one per physical core that this process may use.
        start_method: "fork", "forkserver", "spawn"; None takes the fastest that is safe here and now.
        affinity: "physical" (all physical cores), "pinned" (one core each) or None.
        initializer: called in each worker before its first task.
        initargs: its arguments.
        preload: modules that a forkserver imports once for all workers.
        task_timeout_s: seconds that one call may take, with what it imports at first; its worker is then replaced.
        max_retries: how often a call is repeated whose worker died.
        logger: where the pool itself logs.
    """

    _max_tasks_per_child: int | None = None

    def __init__(  # noqa: PLR0913 -- what users may choose; all but the first by name
        self,
        max_workers: int | None = None,
        *,
        start_method: str | None = None,
        affinity: str | None = "physical",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        preload: Sequence[str] = (),
        task_timeout_s: float | None = None,
        max_retries: int = 0,
        logger: logging.Logger | None = None,
    ) -> None:
        role.refuse_while_importing()
        for name in role.modules_being_run():  # their top level must not run in a worker as well, now or later
            byvalue.force_by_value(name)
        _check(max_workers, initializer, task_timeout_s, max_retries)
        cores = len(cpu.physical_cores())
        self._max_workers = max_workers or cores
        self._masks = tuple(cpu.worker_masks(affinity, self._max_workers))
        self._num_threads = max(1, cores // self._max_workers)
        self._initializer = None if initializer is None else (initializer, tuple(initargs))
        self._preload = tuple(preload)
        self._task_timeout_s = task_timeout_s
        self._max_retries = max_retries
        self._logger = logs.get_logger("datamat.parallel") if logger is None else logger
        self._lock = threading.RLock()
        self._is_shut_down = False
        self._streams: weakref.WeakSet[ResultStream] = weakref.WeakSet()
        self._pid = os.getpid()
        self._dispatcher: Dispatcher | None = None
        self._on_progress: Callable[[Progress], object] | None = None
        if role.is_worker():
            self._start_method, self._reason = "serial", "this is a worker: its cores are taken"
        else:
            self._start_method, self._reason = choose_start_method(start_method)
        self._has_told = False
        self._reference = weakref.ref(self)

    # ------------------------------------------------------------ calls

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Have `fn(*args, **kwargs)` called in a worker.

        `fn`, with its `self`, travels once per worker and not once per call.

        Raises:
            RuntimeError: the pool has been shut down.
            BrokenPoolError: its workers cannot be started.
            UnpicklableError: `fn` cannot be sent to a worker.
        """
        if self._runs_here():
            return serial.run_now(fn, args, kwargs)
        future: Future[T] = Future()
        with self._lock:
            dispatcher = self._ready_dispatcher()
            code = dispatcher.codes.lend(fn)
            try:
                self._prepare(dispatcher, code)
                payload = payloads.dumps_data((args, kwargs))
            except Exception as exc:  # noqa: BLE001 -- as in concurrent.futures, the future tells
                dispatcher.codes.give_back(code)
                future.set_exception(exc)
                return future
            dispatcher.submit(Task(code, payload, future))
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
    ) -> Iterator[T]:
        """Return an iterator over `fn` of the items, in their order.

        Args:
            fn: called in the workers; it travels once to each.
            iterables: its arguments, as for the built-in `map`; endless ones are fine.
            timeout: seconds from now in which each result must have come.
            chunksize: items sent to a worker in one message; None adapts it to their cost.

        Raises:
            TimeoutError: a result did not come in time.
        """
        return self._stream(fn, zip(*iterables, strict=False), _length(iterables), chunksize, timeout, ordered=True)

    def starmap(
        self, fn: Callable[..., T], iterable: Iterable[Iterable[Any]], chunksize: int | None = None
    ) -> Iterator[T]:
        """Return an iterator over `fn(*item)` of the items, in their order; see `map`."""
        items = (tuple(item) for item in iterable)
        return self._stream(fn, items, _length((iterable,)), chunksize, None, ordered=True)

    def map_unordered(
        self, fn: Callable[..., T], *iterables: Iterable[Any], chunksize: int | None = None
    ) -> Iterator[T]:
        """Return an iterator over `fn` of the items, each result as soon as it is there; see `map`."""
        return self._stream(fn, zip(*iterables, strict=False), _length(iterables), chunksize, None, ordered=False)

    def _stream(
        self,
        fn: Callable[..., T],
        items: Iterable[tuple[Any, ...]],
        num_items: int | None,
        chunksize: int | None,
        timeout: float | None,
        *,
        ordered: bool,
    ) -> Iterator[T]:
        if chunksize is not None and chunksize < 1:
            raise OptionError(f"chunksize is {chunksize}; pass 1 or more, or None to have it computed")
        if self._runs_here():
            return (fn(*item) for item in items)
        return self._open_stream(fn, items, num_items, chunksize, ordered=ordered).results(timeout)

    def _open_stream(
        self,
        fn: Callable[..., Any],
        items: Iterable[tuple[Any, ...]],
        num_items: int | None,
        chunksize: int | None,
        *,
        ordered: bool,
        with_futures: bool = False,
    ) -> ResultStream:
        with self._lock:
            dispatcher = self._ready_dispatcher()
            code = dispatcher.codes.lend_once(fn)
            self._prepare(dispatcher, code)
            stream = ResultStream(
                dispatcher,
                code,
                items,
                num_items=num_items,
                chunksize=chunksize,
                num_workers=self._max_workers,
                ordered=ordered,
                with_futures=with_futures,
            )
            self._streams.add(stream)
        return stream

    def _runs_here(self) -> bool:
        """Are calls made in this process: a worker, or a fork of the pool's owner?"""
        if not role.is_worker() and os.getpid() == self._pid:
            return False
        if not self._has_told:
            self._has_told = True
            self._logger.info(
                "nested pool: its calls run one after the other, because this worker's pool has the cores"
            )
        return True

    def _ready_dispatcher(self) -> Dispatcher:
        if self._dispatcher is not None and self._dispatcher.broken is not None:
            raise self._dispatcher.broken
        if self._is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if _is_exiting:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        if self._dispatcher is None:
            self._dispatcher = Dispatcher(self._options())
            self._dispatcher.tally.callback = self._on_progress
            dispatcher = self._dispatcher
            self._reference = weakref.ref(self, lambda _: dispatcher.shutdown())
        return self._dispatcher

    def _prepare(self, dispatcher: Dispatcher, code: Any) -> None:
        if dispatcher.thread is None:
            self._logger.debug("workers start by %s: %s", self._start_method, self._reason)
            try:
                _threads[dispatcher.start(code)] = dispatcher
            except BaseException:  # its workers are ended; the next call may try again
                self._dispatcher = None
                raise
        if not code.is_inherited and not code.is_prepared:
            code.prepare()

    def _options(self) -> PoolOptions:
        return PoolOptions(
            max_workers=self._max_workers,
            start_method=self._start_method,
            masks=self._masks,
            num_threads=self._num_threads,
            initializer=self._initializer,
            preload=self._preload,
            task_timeout_s=self._task_timeout_s,
            max_retries=self._max_retries,
            max_tasks=self._max_tasks_per_child,
            logger=self._logger,
        )

    def map_all(
        self, fn: Callable[..., T], items: Sequence[tuple[Any, ...]], chunksize: int | None = None
    ) -> tuple[list[Future[Any]], Iterator[T]]:
        """Submit all items at once.

        Returns:
            A future for each message sent, and the iterator over the results, in order.
        """
        if self._runs_here():
            return [], (fn(*item) for item in items)
        size = chunksize or compute_chunksize(len(items), self._max_workers)
        stream = self._open_stream(fn, items, len(items), size, ordered=True, with_futures=True)
        stream.submit_rest()
        return stream.futures(), stream.results(None)

    # ------------------------------------------------------------ state

    @property
    def max_workers(self) -> int:
        """Most worker processes at a time."""
        return self._max_workers

    @property
    def is_shut_down(self) -> bool:
        """Has `shutdown` or `terminate` been called?"""
        return self._is_shut_down

    def stats(self) -> PoolStats:
        """Return the start method, why it was chosen, and what each worker has done."""
        workers = self._dispatcher.progress().workers if self._dispatcher is not None else ()
        return PoolStats(self._start_method, self._reason, workers)

    def on_progress(self, callback: Callable[[Progress], object] | None) -> None:
        """Have `callback` called with a `Progress`, about ten times a second, from the pool's thread."""
        self._on_progress = callback
        if self._dispatcher is not None:
            self._dispatcher.tally.callback = callback

    # ------------------------------------------------------------ end

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls and end the workers once all calls are done.

        Args:
            wait: return when the workers have ended.
            cancel_futures: cancel calls that have not started.
        """
        if self._runs_here():
            return
        with self._lock:
            if not self._is_shut_down and not cancel_futures:
                for stream in list(self._streams):
                    if stream.is_sized:
                        stream.submit_rest()
            self._is_shut_down = True
        dispatcher = self._dispatcher
        if dispatcher is None or dispatcher.thread is None:
            return
        dispatcher.shutdown(cancel_waiting=cancel_futures)
        if wait:
            try:
                dispatcher.thread.join()
            except BaseException:  # Ctrl-C: the caller wants out
                self.terminate()
                raise

    def terminate(self) -> None:
        """End the workers at once, whatever they do; calls that are not done fail or are cancelled."""
        self._is_shut_down = True
        dispatcher = self._dispatcher
        if dispatcher is not None and dispatcher.thread is not None and not self._runs_here():
            dispatcher.shutdown(kill=True)
            dispatcher.thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C, or the interpreter is leaving
            self.terminate()
        else:
            self.shutdown(wait=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return PathosExecutor, (self._max_workers,)


_threads: weakref.WeakKeyDictionary[threading.Thread, Dispatcher] = weakref.WeakKeyDictionary()
_is_exiting = False


def _end_all() -> None:
    """At interpreter exit: finish what is under way, or kill it if the program ends by Ctrl-C."""
    global _is_exiting  # noqa: PLW0603 -- the interpreter exits once
    _is_exiting = True
    interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
    for dispatcher in list(_threads.values()):
        dispatcher.shutdown(kill=interrupted)
    for thread in list(_threads):
        thread.join()


# Not atexit: that runs after the interpreter has waited for non-daemon threads, which the dispatcher's is.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]


def _check(
    max_workers: int | None,
    initializer: Callable[..., object] | None,
    task_timeout_s: float | None,
    max_retries: int,
) -> None:
    if max_workers is not None and max_workers < 1:
        raise OptionError(f"max_workers must be greater than 0; it is {max_workers}")
    if initializer is not None and not callable(initializer):
        raise TypeError(f"initializer must be a callable; it is {initializer!r}")
    if task_timeout_s is not None and not task_timeout_s > 0:
        raise OptionError(f"task_timeout_s is {task_timeout_s}; pass seconds above 0, or None for no limit")
    if max_retries < 0:
        raise OptionError(f"max_retries is {max_retries}; pass how often a call may be repeated, 0 or more")


def _length(iterables: tuple[Any, ...]) -> int | None:
    """Return how many items the shortest iterable has, None if one does not say."""
    try:
        return min((len(iterable) for iterable in iterables), default=0)
    except TypeError:
        return None
