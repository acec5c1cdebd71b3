"""`PathosExecutor`: a `concurrent.futures.Executor` for bound methods of anything, anywhere."""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, Self, TypeVar

from datamat.parallel import affinity as cpu
from datamat.parallel import byvalue, logs, pickling, process_role
from datamat.parallel.dispatcher import Dispatcher
from datamat.parallel.errors import BrokenPoolError, OptionError, require_posix
from datamat.parallel.frozen import frozen
from datamat.parallel.processes import choose_start_method, danger_of_fork
from datamat.parallel.streams import Items, ResultStream
from datamat.parallel.tasks import CallFuture, Task, compute_chunksize, warn
from datamat.parallel.workers import PoolOptions, PoolProgress, UserObjects, WorkerStats, describe_start_error

if TYPE_CHECKING:
    from datamat.parallel.tasks import RemoteFunction

# ---------------------------------------------------------------- calls in the caller's own process
#
# Calls that run immediately in this process: a pool inside a worker does this, since the outer pool has all the cores.


def run_now(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
    """Run the call here and return its finished future."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    try:
        result = function(*args, **kwargs)
    except BaseException as exc:  # noqa: BLE001 -- a future carries any error to its reader
        future.set_exception(exc)
    else:
        future.set_result(result)
    return future


T = TypeVar("T")
_SHUT_DOWN = "cannot schedule new futures after shutdown"


@frozen()
class PoolStats:
    """State of a pool and of its workers.

    Attributes:
        start_method: start method of the workers; "serial" inside a worker.
        reason: why this start method was chosen.
        workers: statistics of every worker so far, running or not.
    """

    start_method: str
    reason: str
    workers: tuple[WorkerStats, ...]


class PathosExecutor(Executor):
    """Run calls in worker processes.

    Args:
        max_workers: maximum number of worker processes; None takes one per physical core that this process may use.
        start_method: "fork", "forkserver" or "spawn"; None takes the fastest method that is safe at the first call.
        affinity: cores of each worker: "physical" (all physical cores) or "pinned" (one core each); None leaves them.
        initializer: function that each worker calls before its first task.
        initargs: positional arguments of `initializer`, sent to each worker with it.
        preload: modules that a forkserver imports once for all workers.
        task_timeout_s: seconds that one call may take, including its first imports; then its worker is replaced.
        max_retries: how often a call is retried after its worker has died.
        logger: logger for messages of the pool itself.

    Raises:
        OptionError: an argument is invalid, or not possible on this system.
        UnpicklableError: `initargs` holds a thread queue, of which workers would get copies.
    """

    _max_tasks_per_child: int | None = None

    def __init__(  # noqa: PLR0913 -- options of users; all but the first by name
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
        require_posix("a pool of worker processes")
        byvalue.run_top_level_once()
        _check(max_workers, initializer, task_timeout_s, max_retries)
        pickling.refuse_local(initargs)
        cores = len(cpu.physical_cores())
        self._max_workers = max_workers or cores
        self._masks = tuple(cpu.worker_masks(affinity, self._max_workers))
        self._num_threads = max(1, cores // self._max_workers)
        self._user_objects = UserObjects(None if initializer is None else (initializer, tuple(initargs)))
        self._preload = tuple(preload)
        self._task_timeout_s = task_timeout_s
        self._max_retries = max_retries
        self._logger = logs.get_logger("datamat.parallel") if logger is None else logger
        self._lock = threading.RLock()
        self._is_shut_down = False
        self._streams: weakref.WeakSet[ResultStream] = weakref.WeakSet()
        self._pid = os.getpid()
        self._dispatcher: Dispatcher | None = None
        self._asked_for = start_method
        if process_role.is_worker():
            self._start_method, self._reason = "serial", "this is a worker: its cores are taken"
        else:
            self._start_method, self._reason = choose_start_method(start_method)  # refuses invalid values
        self._has_logged_nesting = False

    # ------------------------------------------------------------ calls

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `fn(*args, **kwargs)` in a worker.

        `fn`, with its `self`, is sent in its present state, once per worker instead of once per call. The arguments are
        pickled when a worker is free to take them, as in `concurrent.futures`: until then the call holds references to
        them, so do not change them before it has ended.

        Returns:
            A future; `cancel()` works until a worker has begun the call. It raises the error of an argument, or of
            `fn`, that cannot be sent to a worker.

        Raises:
            RuntimeError: the pool has been shut down.
            BrokenPoolError: its workers cannot be started.
            UnpicklableError: `fn` cannot be sent to a worker.
        """
        if self._runs_here():
            return run_now(fn, args, kwargs)
        dispatcher = self._ready_dispatcher()
        future = CallFuture()
        future.dispatcher = dispatcher
        remote = dispatcher.functions.acquire(fn)
        try:
            _refuse_bound(fn)
            self._prepare(dispatcher, remote)
        except Exception as exc:  # noqa: BLE001 -- as in concurrent.futures, the future raises it
            dispatcher.functions.release(remote)
            future.set_exception(exc)
            return future
        except BaseException:  # an interrupt, or a `__reduce__` that exits; otherwise `fn` would be kept for ever
            dispatcher.functions.release(remote)
            raise
        task = Task(remote, (args, kwargs), future, context=contextvars.copy_context())
        with self._lock:
            if not self._is_shut_down:
                dispatcher.submit(task)
                return future
        dispatcher.functions.release(remote)
        raise RuntimeError(_SHUT_DOWN)

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
    ) -> Iterator[T]:
        """Return an iterator over `fn` of the items, in their order.

        Args:
            fn: called in the workers; it is sent once to each.
            iterables: arguments of the calls, as for the built-in `map`; they may be endless.
            timeout: seconds from now within which each result must arrive.
            chunksize: items per message to a worker; None adapts it to their cost.

        Raises:
            TimeoutError: a result did not arrive in time.
        """
        return self._stream(fn, Items(iterables), chunksize, timeout, ordered=True)

    def starmap(
        self, fn: Callable[..., T], iterable: Iterable[Iterable[Any]], chunksize: int | None = None
    ) -> Iterator[T]:
        """Return an iterator over `fn(*item)` of the items, in their order; see `map`."""
        return self._stream(fn, Items((iterable,), unpacked=True), chunksize, None, ordered=True)

    def map_unordered(
        self, fn: Callable[..., T], *iterables: Iterable[Any], chunksize: int | None = None
    ) -> Iterator[T]:
        """Return an iterator over `fn` of the items, in order of completion; see `map`."""
        return self._stream(fn, Items(iterables), chunksize, None, ordered=False)

    def _stream(
        self,
        fn: Callable[..., T],
        items: Items,
        chunksize: int | None,
        timeout: float | None,
        *,
        ordered: bool,
    ) -> Iterator[T]:
        if chunksize is not None and chunksize < 1:
            raise OptionError(f"chunksize is {chunksize}; pass 1 or more, or None to have it computed")
        if self._runs_here():
            return items.call_each(fn)
        return self._open_stream(fn, items, chunksize, ordered=ordered).results(timeout)

    def _open_stream(
        self,
        fn: Callable[..., Any],
        items: Items,
        chunksize: int | None,
        *,
        ordered: bool,
        with_futures: bool = False,
    ) -> ResultStream:
        dispatcher = self._ready_dispatcher()
        remote = dispatcher.functions.acquire_for_map(fn)
        try:
            _refuse_bound(fn)
            self._prepare(dispatcher, remote)
            stream = ResultStream(
                self,
                dispatcher,
                remote,
                items,
                chunksize=chunksize,
                num_workers=self._max_workers,
                ordered=ordered,
                with_futures=with_futures,
            )
            with self._lock:
                if self._is_shut_down:
                    raise RuntimeError(_SHUT_DOWN)
                self._streams.add(stream)
        except BaseException:
            dispatcher.functions.release(remote)
            raise
        # Not under the lock: the caller's iterator may wait for another thread that submits to this pool.
        stream.begin()
        return stream

    def _runs_here(self) -> bool:
        """Return True if calls run in this process, which is a worker or a fork of the pool's owner."""
        if not process_role.is_worker() and os.getpid() == self._pid:
            return False
        if not self._has_logged_nesting:
            self._has_logged_nesting = True
            self._logger.info(
                "nested pool: its calls run one after the other, because this worker's pool has the cores"
            )
        return True

    def _ready_dispatcher(self) -> Dispatcher:
        with self._lock:
            if self._dispatcher is not None and self._dispatcher.broken is not None:
                raise self._dispatcher.broken
            if self._is_shut_down:
                raise RuntimeError(_SHUT_DOWN)
            if _is_exiting:
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")
            if self._dispatcher is None:
                # Now, not when the pool was made: since then a thread may have been started, or TensorFlow used.
                self._start_method, self._reason = choose_start_method(self._asked_for)
                if self._asked_for == "fork" and (danger := danger_of_fork()) is not None:
                    warn(
                        f"start_method='fork' was asked for, but {danger}: a worker that uses the same library may "
                        "wait for ever; leave start_method out, or pass 'forkserver'",
                        RuntimeWarning,
                    )
                try:
                    self._dispatcher = Dispatcher(self._options(), self._user_objects)
                except OSError as exc:
                    raise _no_workers(exc) from exc
            return self._dispatcher

    def _prepare(self, dispatcher: Dispatcher, remote: RemoteFunction) -> None:
        """Start the workers at the first call, and pickle the callable; no lock is held, since both run user code."""
        if dispatcher.thread is None and dispatcher.claim_start():
            self._logger.debug("workers start by %s: %s", self._start_method, self._reason)
            try:
                dispatcher.start(remote)
                # Not referenced from this object: it would vanish silently with a cycle that this object is part of.
                weakref.finalize(self, dispatcher.shutdown).atexit = False
                _dispatchers.add(dispatcher)
                _executors.add(self)
            except BaseException as exc:  # its workers are ended; the next call may try again
                self._dispatcher = None
                if isinstance(exc, OSError):
                    raise _no_workers(exc) from exc
                raise
        if not remote.is_inherited:
            remote.prepare()

    def _options(self) -> PoolOptions:
        return PoolOptions(
            max_workers=self._max_workers,
            start_method=self._start_method,
            masks=self._masks,
            num_threads=self._num_threads,
            preload=self._preload,
            task_timeout_s=self._task_timeout_s,
            max_retries=self._max_retries,
            max_tasks=self._max_tasks_per_child,
            logger=self._logger,
        )

    def map_all(
        self, fn: Callable[..., T], items: Sequence[tuple[Any, ...]], chunksize: int | None = None
    ) -> tuple[list[Future[Any]], Iterator[T]]:
        """Submit all items immediately.

        Returns:
            A future for each message sent, and the iterator over the results, in order.
        """
        if self._runs_here():
            return [], (fn(*item) for item in items)
        size = chunksize or compute_chunksize(len(items), self._max_workers)
        stream = self._open_stream(fn, Items((items,), unpacked=True), size, ordered=True, with_futures=True)
        stream.submit_rest()
        return stream.futures(), stream.results(None)

    # ------------------------------------------------------------ state

    @property
    def max_workers(self) -> int:
        """Maximum number of worker processes."""
        return self._max_workers

    @property
    def is_shut_down(self) -> bool:
        """Whether `shutdown` or `terminate` has been called."""
        return self._is_shut_down

    def stats(self) -> PoolStats:
        """Return the start method, the reason for it, and the statistics of each worker."""
        workers = self._dispatcher.progress().workers if self._dispatcher is not None else ()
        return PoolStats(self._start_method, self._reason, workers)

    def on_progress(self, callback: Callable[[PoolProgress], object] | None) -> None:
        """Call `callback` with a `PoolProgress` about ten times a second, from the pool's thread."""
        self._user_objects.on_progress = callback

    # ------------------------------------------------------------ end

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls and end the workers once all calls are done.

        Args:
            wait: wait for the workers to end.
            cancel_futures: cancel calls that have not started.
        """
        if self._runs_here():
            return
        with self._lock:
            is_first = not self._is_shut_down
            self._is_shut_down = True
        dispatcher = self._dispatcher
        if dispatcher is None:
            return
        try:
            if cancel_futures:
                self._abandon_streams()
            elif is_first:
                self.submit_rest()
        finally:
            dispatcher.shutdown(cancel_waiting=cancel_futures)
        if wait:
            try:
                dispatcher.join()
            except BaseException:  # Ctrl-C: the caller wants out
                self.terminate()
                raise

    def submit_rest(self) -> None:
        """Submit the items that open maps have not yet pulled from their iterables."""
        for stream in list(self._streams):
            stream.submit_rest()

    def _abandon_streams(self) -> None:
        for stream in list(self._streams):
            stream.abandon()

    def terminate(self) -> None:
        """End the workers immediately, whatever they do; unfinished calls fail or are cancelled."""
        self._is_shut_down = True
        self._abandon_streams()
        dispatcher = self._dispatcher
        if dispatcher is not None and not self._runs_here():
            dispatcher.shutdown(kill=True)
            dispatcher.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.terminate()
        else:
            self.shutdown(wait=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return PathosExecutor, (self._max_workers,)


# Each dispatcher is kept alive by its thread, and each executor by its open maps of iterators, as long as they run.
_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
_executors: weakref.WeakSet[PathosExecutor] = weakref.WeakSet()
_is_exiting = False


def _end_all() -> None:
    """At interpreter exit: finish running calls, or kill them if the program ends by Ctrl-C."""
    global _is_exiting  # noqa: PLW0603 -- the interpreter exits once
    _is_exiting = True
    interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
    try:
        for executor in [] if interrupted else list(_executors):
            executor.submit_rest()  # another thread may be in the middle of a map
    finally:
        dispatchers = list(_dispatchers)
        for dispatcher in dispatchers:
            dispatcher.shutdown(kill=interrupted)
        for dispatcher in dispatchers:
            dispatcher.join()


# Not atexit: it runs after the interpreter has waited for non-daemon threads, such as the dispatcher's.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]


def _refuse_bound(function: Callable[..., Any]) -> None:
    """Apply `pickling.refuse_local` to the arguments that partials bind."""
    while type(function) is functools.partial:
        pickling.refuse_local((function.args, function.keywords))
        function = function.func


def _no_workers(error: OSError) -> BrokenPoolError:
    return BrokenPoolError(f"no worker could be started: {describe_start_error(error)}")


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
