"""Tasks and their futures, from submission to result, and the number of calls per task."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
import sys
import threading
import time
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, cast

from datamat.parallel import byvalue, logs, pickling, standins, unforkable, worker
from datamat.parallel.channel import PackedFunction
from datamat.parallel.errors import BrokenPoolError, OptionError, ParallelError, UnpicklableError, is_own

if TYPE_CHECKING:
    from datamat.parallel.crash import WorkerExit


class CallLost(ParallelError):  # noqa: N818 -- reads as the event, as `WorkerDied` does
    """An engine has lost a call: its worker or its scheduler is gone.

    Attributes:
        may_repeat: whether the engine accepts the same call again.
    """

    def __init__(self, message: str, *, may_repeat: bool) -> None:
        super().__init__(message)
        self.may_repeat = may_repeat


# ---------------------------------------------------------------- a light future
#
# A replacement for `Future` in the tasks of a stream, at a third of its cost.
#
# Each `Future` creates a lock and a condition, which is most of the cost of dispatching a trivial call. The tasks of a
# stream have one reader, so they share one lock.


SLICE_S = 0.5  # waiting threads wake this often


class Wakeup:
    """Wakes the one thread that reads a stream; a bare lock, since an Event is several times slower."""

    __slots__ = ("_lock", "awaited")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.awaited: LightFuture | None = None

    def ring(self) -> None:
        """End the wait, or the next one if no thread waits now."""
        with suppress(RuntimeError):  # already rung
            self._lock.release()

    def wait(self, timeout: float | None) -> bool:
        """Wait until it rings; return False after `timeout` seconds.

        It waits in slices: Python checks for Ctrl-C before it blocks in a lock. A Ctrl-C that arrives between the two,
        which may be milliseconds apart on a busy machine, would otherwise be handled only once the lock is free.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._lock.acquire(timeout=SLICE_S if timeout is None else min(SLICE_S, timeout)):
            timeout = None if timeout is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                return False
        return True


# States; not an Enum, whose members cost 0.15 us per access. From _CANCELLED on, the future is resolved.
_WAITING, _RUNNING, _CANCELLED, _FAILED, _DONE = range(5)


class LightFuture:
    """The part of a Future that the dispatcher and a stream use; resolved by one thread, read by another."""

    __slots__ = ("_callback", "_state", "_value", "_wakeup", "is_ahead")

    def __init__(self, wakeup: Wakeup) -> None:
        self.is_ahead = False
        self._wakeup = wakeup
        self._state = _WAITING
        self._value: Any = None
        self._callback: Callable[[Any], object] | None = None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Set the only callback, which runs when the future is resolved; call this before the task is submitted."""
        self._callback = callback

    def set_running_or_notify_cancel(self) -> bool:
        """Mark the task as sent, unless it has been cancelled."""
        if self._state == _CANCELLED:
            return False
        self._state = _RUNNING
        return True

    def set_pending(self) -> None:
        """Mark the task as not sent: its worker will not run it."""
        self._state = _WAITING

    def cancelled(self) -> bool:
        """Return True if it is cancelled."""
        return self._state == _CANCELLED

    def cancel(self) -> bool:
        """Cancel a task that is not sent. If it is being sent at this moment, its result is ignored."""
        if self._state == _WAITING:
            self._settle(_CANCELLED, None)
        return self._state == _CANCELLED

    def set_result(self, value: Any) -> None:
        """Resolve with a result."""
        self._settle(_DONE, value)

    def set_exception(self, error: BaseException) -> None:
        """Resolve with an error."""
        self._settle(_FAILED, error)

    def _settle(self, state: int, value: Any) -> None:
        self._value = value
        self._state = state
        if self._wakeup.awaited is self:
            self._wakeup.ring()
        if self._callback is not None:
            callback, self._callback = self._callback, None  # the callback holds the task, which holds this future
            callback(self)

    def done(self) -> bool:
        """Return True if it is resolved."""
        return self._state >= _CANCELLED

    def result(self, timeout: float | None = None, meanwhile: Callable[[], object] | None = None) -> Any:
        """Return the result, or raise the error.

        Args:
            timeout: seconds to wait; None for no limit.
            meanwhile: called before each wait, so also after each wake-up.

        Raises:
            TimeoutError: no result arrived within `timeout` seconds.
            CancelledError: the task was cancelled.
        """
        if not self.done():
            self._wait(timeout, meanwhile)
        if self._state == _CANCELLED:
            raise CancelledError
        if self._state == _FAILED:
            raise self._value
        return self._value

    def _wait(self, timeout: float | None, meanwhile: Callable[[], object] | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        wakeup = self._wakeup
        wakeup.awaited = self
        try:
            while not self.done():  # checked after `awaited` is set: a thread that resolves it later rings
                if meanwhile is not None:
                    meanwhile()
                if not wakeup.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
        finally:
            wakeup.awaited = None


# ---------------------------------------------------------------- a future that can be taken back


class Recaller(Protocol):
    """The part of a dispatcher that futures use."""

    def recall(self, is_meant: Callable[[Task], bool]) -> None:
        """Take back the tasks that workers have not begun, where a matching task is among them; `wake` resends them."""

    def wake(self) -> None:
        """Wake its thread."""


class CallFuture(Future[Any]):
    """The future of a call that may queue at a worker behind another call: until that has ended, it can be cancelled.

    Attributes:
        is_ahead: whether the call is at a worker that has not begun it.
        dispatcher: dispatcher of the pool; None for a future that is never cancelled.
    """

    is_ahead = False
    dispatcher: Recaller | None = None

    def cancelled(self) -> bool:
        """Return True if the call is cancelled; without the lock, since it is used for every call."""
        return self._state.startswith("CANCELLED")

    def running(self) -> bool:
        """Return True if a worker has begun the call."""
        return not self.is_ahead and super().running()

    def cancel(self) -> bool:
        """Cancel the call if no worker has begun it; return whether it is cancelled."""
        if not self.is_ahead or self.dispatcher is None:
            return super().cancel()
        self.dispatcher.recall(lambda task: task.future is self)
        is_cancelled = super().cancel()
        self.dispatcher.wake()
        return is_cancelled

    def set_pending(self) -> None:
        """Mark the call as not sent: its worker will not run it."""
        with self._condition:
            self._state = "PENDING"


# ---------------------------------------------------------------- tasks
#
# The units that the dispatcher moves: a callable (`RemoteFunction`), sent once per worker, and calls of it (`Task`).


_numbers = itertools.count(1)


class RemoteFunction:
    """A callable that workers have or will get.

    Args:
        function: the callable.
        digest: digest of its contents, to detect changes; None for a callable that is used once.
        rows: state of `pickling.digest` for the next digest.

    Attributes:
        number: id of the callable on the wire.
        label: name of the callable in messages.
        digest: digest of its contents at submission; None if unused.
        unfinished: number of tasks that still need the callable.
        identity: key in `FunctionTable`; None for a callable of a single map.
        is_inherited: whether the workers have inherited the callable by fork.
    """

    def __init__(
        self, function: Callable[..., Any], digest: bytes | None = None, rows: pickling.Rows | None = None
    ) -> None:
        self.number = next(_numbers)
        self.digest = digest
        self.rows = {} if rows is None else rows
        self.label = logs.label_of(function)
        self.function: Callable[..., Any] | None = function
        self.unfinished = 0
        self.identity: tuple[int, int] | None = None
        self.is_inherited = False
        self._modules: tuple[str, ...] = ()
        self._packed: PackedFunction | None = None

    def inherit(self) -> Callable[[], None]:
        """Let workers that are forked now inherit the callable; return a function that ends this."""
        assert self.function is not None
        roots = unforkable.roots_of(self.function)
        if any(standins.is_registered(type(root)) for root in roots.values()):
            self.prepare()  # its replacement is made in the worker
            return lambda: None
        owner = unforkable.innermost(self.function)
        if isinstance(owner, types.MethodType):
            byvalue.register_inherited(type(owner.__self__).__mro__)
        unforkables = unforkable.Unforkables(roots)
        function = owner.__func__ if isinstance(owner, types.MethodType) else owner
        if isinstance(function, types.FunctionType):
            byvalue.register_inherited(list(function.__globals__.values()))
        _warn(unforkables.standins)
        self.is_inherited = True
        return worker.inherit(self.number, self.function, unforkables)

    def prepare(self) -> PackedFunction:
        """Pickle the callable in its present state, unless it has been pickled.

        Raises:
            UnpicklableError: it cannot travel.
        """
        if self._packed is not None:
            return self._packed
        assert self.function is not None
        if self.is_inherited and self.digest not in (None, _digest(self.function, self.rows)):
            raise UnpicklableError(
                f"{self.label} was changed while calls of it were under way, and the worker that had it as it was has "
                'ended; change a copy, or pass start_method="forkserver", where it is kept as it was'
            )
        pickled = pickling.dumps_code(self.function)
        _warn(pickled.standins)
        self._modules = pickled.modules
        self._packed = PackedFunction(pickled.stream, pickled.buffers)
        return self._packed

    def modules(self) -> tuple[str, ...]:
        """Return the modules of installed packages that it uses, for a server to import once."""
        self.prepare()
        return self._modules

    def frame(self) -> tuple[bytes, bytes]:
        """Return the parts of its frame."""
        return worker.FUNCTION.pack(self.number), self.prepare().packed

    def send_by_value(self, module_name: str) -> None:
        """Pickle it again, with code of this module by value."""
        byvalue.force_by_value(module_name)
        self._packed = None
        self.prepare()


class FunctionTable:
    """Records which callables the workers have, so that each is sent once.

    Each call uses the callable, and its `self`, as they are at submission: a callable that has changed since it was
    sent becomes another `RemoteFunction`, while earlier calls keep theirs. Once all tasks of a callable are finished,
    only a weak reference to it is kept.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a map may be garbage-collected while it is held
        self._by_identity: dict[tuple[int, int], RemoteFunction] = {}
        self._on_rest: dict[int, weakref.ref[Any]] = {}
        self._classes: dict[type, RemoteFunction] = {}
        self.forgotten: deque[int] = deque()  # numbers that workers should drop; the dispatcher sends them

    def acquire(self, function: Callable[..., Any]) -> RemoteFunction:
        """Return the `RemoteFunction` of a callable for one more task; call `release` when that task is finished.

        No lock is held while the callable is pickled: that may run user code, which may wait for another thread that is
        about to submit.
        """
        identity = identity_of(function)
        remote = self._by_identity.get(identity)
        rows: pickling.Rows = {} if remote is None else remote.rows
        digest = _digest(function, rows)
        with self._lock:
            remote = self._by_identity.get(identity)
            if remote is None or remote.digest != digest:
                remote = self._by_identity[identity] = RemoteFunction(function, digest, rows)
                remote.identity = identity
            remote.function = function
            remote.unfinished += 1
            self._on_rest.pop(remote.number, None)
            return remote

    def for_classes(self, classes: Sequence[type]) -> tuple[RemoteFunction, ...]:
        """Return the functions that carry by-value classes; each is sent once to a worker, in its first state.

        Raises:
            UnpicklableError: a class cannot travel.
        """
        for cls in classes:
            if cls not in self._classes:
                remote = RemoteFunction(cls)
                remote.prepare()
                self._classes.setdefault(cls, remote)
        return tuple(map(self._classes.__getitem__, classes))

    def acquire_for_map(self, function: Callable[..., Any]) -> RemoteFunction:
        """Return the `RemoteFunction` for all calls of one map, which count as one task of it.

        It is a new one, since no map may see what an earlier one left in `self`; plain functions keep nothing and are
        reused.

        Raises:
            UnpicklableError: it can no longer travel.
        """
        if _keeps_nothing(function):
            return self.acquire(function)
        remote = RemoteFunction(function)
        remote.unfinished = 1
        return remote

    def add_tasks(self, remote: RemoteFunction, num_tasks: int = 1) -> None:
        """Count more tasks of a function that is in use already."""
        with self._lock:
            remote.unfinished += num_tasks

    def release(self, remote: RemoteFunction) -> None:
        """Count one task of `remote` as finished."""
        with self._lock:
            remote.unfinished -= 1
            if remote.unfinished:
                return
            function = remote.function  # until the lock is free: dropping it may run user code
            remote.function = None
            if remote.identity is None or self._by_identity.get(remote.identity) is not remote:
                self._forget(remote)
                return
            owner = function.__self__ if isinstance(function, types.MethodType) else function
            try:
                self._on_rest[remote.number] = weakref.ref(owner, lambda _: self._forget(remote))
            except TypeError:  # no weak references to this kind of object
                self._forget(remote)

    def _forget(self, remote: RemoteFunction) -> None:
        self._on_rest.pop(remote.number, None)
        if remote.identity is not None and self._by_identity.get(remote.identity) is remote:
            del self._by_identity[remote.identity]
        self.forgotten.append(remote.number)


def _digest(function: Callable[..., Any], rows: pickling.Rows) -> bytes:
    """Return a digest of the contents of a callable, or of the part that its `self` declares changeable."""
    owner = function.__self__ if isinstance(function, types.MethodType) else None
    changing = getattr(type(owner), "_datamat_changing", None)
    return pickling.digest(function if changing is None else changing(owner), rows)


def identity_of(function: Callable[..., Any]) -> tuple[int, int]:
    """Return a key that is the same for every access to an object's method (`obj.fit is obj.fit` is False)."""
    if isinstance(function, types.MethodType):
        return id(function.__self__), id(function.__func__)
    return id(function), 0


def _keeps_nothing(function: Callable[..., Any]) -> bool:
    """Return True if a worker's copy never changes: calls can only change globals, which outlive it."""
    if pickling.is_found(function):
        return True
    if type(function) is not types.FunctionType or function.__closure__ or function.__dict__:
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return pickling.PLAIN.issuperset(map(type, defaults))


class TaskSource(Protocol):
    """The part of a map that the dispatcher uses."""

    def draw(self, num_tasks: int) -> list[Task]:
        """Return the next tasks; fewer, or none, if its items end."""

    def task_cost(self) -> float | None:
        """Return the seconds that its next task is likely to take; None if nothing is known yet."""

    def learn(self, task: Task, busy_s: float, num_bytes: int) -> None:
        """Record the seconds that a task took, and the size of its packed result."""

    def num_left(self) -> int:
        """Return the number of items not drawn yet, as far as known."""

    def abandon(self) -> None:
        """Draw nothing more; the reader gets a `CancelledError` after the available results."""


class Task:
    """Calls of one `RemoteFunction`, sent in one message.

    Attributes:
        number: its id on the wire.
        remote: function that is called.
        arguments: arguments of the calls in the layout `mode`, until they are answered. They serve to split a lost
            chunk: unpickling its payload would run code of their classes in the parent, which may be what kills.
        payload: pickled arguments, from `pack` until the task is answered, since the worker may die.
        mode: layout of the arguments, one of `Mode`.
        count: number of calls in the task.
        future: receives the result, or for a chunk what `worker.call_each` returns.
        tries: number of workers that died while running it.
        unbegun: number of workers that died just before beginning it.
        is_started: whether it is at a worker, or was at one that died.
        busy_s: seconds that it took, once done.
        stream: map that it belongs to; None for a single call.
        num_bytes: size of its packed result, once done.
        needs: by-value classes of its arguments.
    """

    __slots__ = (
        "_context", "arguments", "busy_s", "count", "future", "is_started", "mode", "needs", "num_bytes", "number",
        "payload", "remote", "stream", "tries", "unbegun",
    )  # fmt: skip

    def __init__(
        self,
        remote: RemoteFunction,
        arguments: Any,
        future: CallFuture | LightFuture,
        mode: int = worker.Mode.CALL,
        *,
        context: contextvars.Context | None = None,
        stream: TaskSource | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.remote = remote
        self.arguments = arguments
        self.payload = b""
        self.mode = mode
        self.count = 1 if mode == worker.Mode.CALL else len(arguments)
        self.future = future
        self._context = context or None  # most contexts have no variables
        self.tries = 0
        self.unbegun = 0
        self.is_started = False
        self.busy_s = 0.0
        self.stream = stream
        self.needs: tuple[RemoteFunction, ...] = ()
        self.num_bytes = 0

    @property
    def label(self) -> str:
        """Name of the task in messages."""
        return f"{self.remote.label}[{self.number}]"

    def pack(self, functions: FunctionTable) -> None:
        """Pickle the arguments in their present state, unless that is done, in the context of the call.

        Raises:
            BaseException: they cannot be pickled, or a user's `__reduce__` raises this.
        """
        if not self.payload:
            dump = pickling.dumps_items
            payload, classes = self._context.run(dump, self.arguments) if self._context else dump(self.arguments)
            self.needs = functions.for_classes(classes)
            self.payload = payload

    def begin(self) -> bool:
        """Mark the task as started unless its caller has cancelled it; return True if it should run."""
        self.is_started = self.is_started or self.future.set_running_or_notify_cancel()
        return self.is_started

    def take_back(self) -> None:
        """Mark the task as not started: its worker will not run it. One begun by a worker that died stays started."""
        self.future.is_ahead = False
        if not self.tries:
            self.is_started = False
            self.future.set_pending()

    def parts(self) -> list[Task]:
        """Return a task for each call of a chunk."""
        return [Task(self.remote, [item], CallFuture(), self.mode, context=self._context) for item in self.arguments]

    def drop_arguments(self) -> None:
        """Release its arguments: its result may be kept for a long time."""
        self.payload, self.arguments, self._context = b"", (), None

    def was_begun(self, worker_exit: WorkerExit) -> bool:
        """Return True if the worker died while it ran this task or received its callable."""
        return worker_exit.last_begun in (self.number, self.remote.number)

    def header(self, *, is_claimed: bool) -> bytes:
        """Return the header of its frame.

        Args:
            is_claimed: whether the worker must claim the task before it begins; see `Claims`.
        """
        return worker.TASK.pack(self.number, self.remote.number, self.mode, is_claimed)


def split(task: Task, functions: FunctionTable) -> list[Task]:
    """Return a task for each call of an unanswered chunk, so that only the guilty call fails.

    The chunk's own future is resolved once all of them are.
    """
    parts = task.parts()
    functions.add_tasks(task.remote, len(parts) - 1)
    futures = [cast("CallFuture", part.future) for part in parts]
    unfinished: set[Future[Any]] = set(futures)
    for future in futures:
        future.add_done_callback(functools.partial(_join, task, parts, unfinished))
    return parts


def _join(chunk: Task, parts: list[Task], unfinished: set[Future[Any]], future: Future[Any]) -> None:
    """Resolve the chunk with the outcomes of its calls once the last of them has arrived."""
    unfinished.discard(future)
    if unfinished or chunk.future.done():
        return
    results: list[Any] = []
    errors: dict[int, bytes | BaseException] = {}
    for position, part in enumerate(parts):
        each = cast("CallFuture", part.future)
        error = (
            BrokenPoolError("the pool was shut down; wait for results before") if each.cancelled() else each.exception()
        )
        (result,), failed = each.result() if error is None else ([None], {0: error})
        results.append(result)
        if failed:
            errors[position] = failed[0]
    chunk.busy_s = sum(part.busy_s for part in parts)
    chunk.future.set_result((results, errors))


def callers_stacklevel() -> int:
    """Return the `stacklevel` at which a warning of the calling function shows the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_own(frame):
        level, frame = level + 1, frame.f_back
    return level


_said: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("said", default=None)


@contextlib.contextmanager
def warned_once() -> Iterator[None]:
    """Let all pools used in the block give each warning once: a job may need several pools."""
    token = _said.set(_said.get() or set())
    try:
        yield
    finally:
        _said.reset(token)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the user's line."""
    said = _said.get()
    if said is not None:
        if text in said:
            return
        said.add(text)
    warnings.warn(text, category, stacklevel=callers_stacklevel())


def _warn(places: dict[str, str]) -> None:
    """Warn once about the parts of `self` that cannot travel."""
    if places:
        named = ", ".join(f"{place}: {name}" for place, name in places.items())
        warn(
            f"{named} cannot be sent to a worker: a stand-in goes instead, which raises when it is used; "
            f"{standins.REMEDY}"
        )


# ---------------------------------------------------------------- chunk sizes
#
# Pure functions: no clock, no processes.
#
# Dispatching one item costs about 15 microseconds, so items of a millisecond or more travel alone: any chunk of two
# would only make the tail of the run uneven. Cheaper items are grouped, by *estimated cost* and never by their count:
# `ceil(items / workers)` finishes up to 2.4 times later than ideal when the expensive items come last.


CHUNK_COST_S = 0.005  # a chunk of 5 ms hides 15 us of dispatch (0.3 %) and delays the end of a run by 5 ms at most
PREFETCH_COST_S = 0.010  # work queued at a worker: more than one switch interval (5 ms) of the parent's threads
LONG_COST_S = 0.100  # beyond this, the 0.3 ms that a worker waits for its next task do not justify queueing one
LEAST_COST_S = 0.000_1  # six times what dispatching it costs
MESSAGE_COST_S = 0.000_01  # upper bound of a worker's overhead per task: reading it and packing its results
CHUNKS_PER_WORKER = 32  # with unknown costs: even if one chunk costs ten times the mean, the tail stays short
MAX_CHUNKSIZE = 4096
MAX_PREFETCH = 128


def compute_chunksize(num_items: int, num_workers: int, cost: float | None = None) -> int:
    """Return how many items to send to a worker in one message.

    Args:
        num_items: items still to be dispatched.
        num_workers: worker processes that share them.
        cost: mean cost of one item in seconds; None if it is not known yet.

    Returns:
        At least 1. With a known cost, enough items for 5 ms, but never so many that a worker would get fewer than four
        chunks. Otherwise 1/32 of a worker's share.

    Raises:
        OptionError: `num_items` is negative, `num_workers` is below 1, or `cost` is negative or not a number.

    Example:
        >>> compute_chunksize(100_000, 4, cost=0.000_05)
        100
        >>> compute_chunksize(100_000, 4, cost=0.2)
        1
        >>> compute_chunksize(1_000, 4)
        8
    """
    if num_items < 0:
        raise OptionError(f"num_items is {num_items}; pass the number of items, 0 or more")
    if num_workers < 1:
        raise OptionError(f"num_workers is {num_workers}; pass the number of worker processes, 1 or more")
    if cost is not None and not cost >= 0:  # also refuses NaN
        raise OptionError(f"cost is {cost}; pass the mean seconds of one item, 0 or more, or None")
    if cost is None:
        return _bounded(math.ceil(num_items / (num_workers * CHUNKS_PER_WORKER)))
    fair = math.ceil(num_items / (num_workers * 4))
    if cost * MAX_CHUNKSIZE <= CHUNK_COST_S:
        return _bounded(fair)
    return _bounded(min(round(CHUNK_COST_S / cost), fair))


def least_chunksize(num_items: int, num_workers: int, cost: float) -> int:
    """Return the minimum number of items per message, however few are left: single cheap items are all overhead.

    Args:
        num_items: items of the whole map.
        num_workers: worker processes that share them.
        cost: mean cost of one item in seconds so far.

    Returns:
        Enough items for 0.1 ms, but no more than an eighth of a worker's share: even if the last items are by far the
        most expensive, the run is delayed by no more than that.

    Example:
        >>> least_chunksize(100_000, 4, cost=0.000_000_1), least_chunksize(1_000, 4, cost=0.000_000_1)
        (1000, 31)
        >>> least_chunksize(100_000, 4, cost=0.001)
        1
    """
    share = num_items // (num_workers * 8)
    return max(1, share if cost * share <= LEAST_COST_S else round(LEAST_COST_S / cost))


def prefetch_depth(cost: float | None, num_waiting: float = math.inf) -> int:
    """Return the number of tasks that may be at a worker, including the running one.

    Args:
        cost: recent cost of one task in seconds; None if nothing is known yet.
        num_waiting: waiting tasks per worker.

    Returns:
        Enough for 10 ms of work. For tasks between 10 and 100 ms, 2, so that the next one is there when the first ends,
        but only while two others wait: at the end of a run, each could run elsewhere. For longer tasks, 1.

    Example:
        >>> prefetch_depth(None), prefetch_depth(0.05), prefetch_depth(0.004), prefetch_depth(0.0)
        (1, 2, 3, 128)
        >>> prefetch_depth(0.05, num_waiting=1), prefetch_depth(0.5)
        (1, 1)
    """
    if cost is None or cost >= LONG_COST_S or (cost >= PREFETCH_COST_S and num_waiting < 2):
        return 1
    if cost >= PREFETCH_COST_S:
        return 2
    if cost * MAX_PREFETCH <= PREFETCH_COST_S:
        return MAX_PREFETCH
    return 1 + round(PREFETCH_COST_S / cost)


def _bounded(size: int) -> int:
    return max(1, min(size, MAX_CHUNKSIZE))
