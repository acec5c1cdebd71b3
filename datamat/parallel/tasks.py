"""Tasks and the futures that stand for them, from submission to result; how many calls make one task."""

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

__all__ = [
    "MESSAGE_COST_S",
    "PREFETCH_COST_S",
    "SLICE_S",
    "CallFuture",
    "CallLost",
    "FunctionTable",
    "LightFuture",
    "RemoteFunction",
    "Task",
    "TaskSource",
    "Wakeup",
    "compute_chunksize",
    "identity_of",
    "least_chunksize",
    "prefetch_depth",
    "split",
    "warn",
    "warned_once",
]


class CallLost(ParallelError):  # noqa: N818 -- reads as the event, as `WorkerDied` does
    """An engine has lost a call: its worker or its scheduler is gone.

    Attributes:
        may_repeat: whether the engine takes the same call again.
    """

    def __init__(self, message: str, *, may_repeat: bool) -> None:
        super().__init__(message)
        self.may_repeat = may_repeat


# ---------------------------------------------------------------- a light future
#
# A substitute for `Future` in the tasks of a stream, at a third of its cost.
#
# Each `Future` creates a lock and a condition, which is most of the cost of dispatching a trivial call. The tasks of a
# stream have one reader, so they share one lock.


SLICE_S = 0.5  # a thread that waits wakes this often


class Wakeup:
    """Wakes the one thread that reads a stream; a bare lock, since an Event takes several times as long."""

    __slots__ = ("_lock", "awaited")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.awaited: LightFuture | None = None

    def ring(self) -> None:
        """End the wait, or the next one if nobody waits now."""
        with suppress(RuntimeError):  # it has been rung already
            self._lock.release()

    def wait(self, timeout: float | None) -> bool:
        """Wait until it rings; return False if it does not within `timeout` seconds.

        It waits in slices: Python checks for a Ctrl-C before it blocks in a lock. One that arrives in between, which is
        milliseconds on a busy machine, would otherwise only be seen once the lock is free.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._lock.acquire(timeout=SLICE_S if timeout is None else min(SLICE_S, timeout)):
            timeout = None if timeout is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                return False
        return True


# States; not an Enum, whose members cost 0.15 us at each look. From _CANCELLED on the future is settled.
_WAITING, _RUNNING, _CANCELLED, _FAILED, _DONE = range(5)


class LightFuture:
    """The part of a Future that the dispatcher and a stream use; settled by one thread, read by one other."""

    __slots__ = ("_callback", "_state", "_value", "_wakeup", "is_ahead")

    def __init__(self, wakeup: Wakeup) -> None:
        self.is_ahead = False
        self._wakeup = wakeup
        self._state = _WAITING
        self._value: Any = None
        self._callback: Callable[[Any], object] | None = None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Set the one callback, which runs when the future is settled; call this before the task is submitted."""
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
        """Is it cancelled?"""
        return self._state == _CANCELLED

    def cancel(self) -> bool:
        """Cancel a task that is not sent. Should it be sent at this moment, nobody reads its result."""
        if self._state == _WAITING:
            self._settle(_CANCELLED, None)
        return self._state == _CANCELLED

    def set_result(self, value: Any) -> None:
        """Settle with a result."""
        self._settle(_DONE, value)

    def set_exception(self, error: BaseException) -> None:
        """Settle with an error."""
        self._settle(_FAILED, error)

    def _settle(self, state: int, value: Any) -> None:
        self._value = value
        self._state = state
        if self._wakeup.awaited is self:
            self._wakeup.ring()
        if self._callback is not None:
            callback, self._callback = self._callback, None  # which has the task, and that this future
            callback(self)

    def done(self) -> bool:
        """Is it settled?"""
        return self._state >= _CANCELLED

    def result(self, timeout: float | None = None, meanwhile: Callable[[], object] | None = None) -> Any:
        """Return the result, or raise the error.

        Args:
            timeout: seconds to wait; None for no limit.
            meanwhile: called before each wait: after each wakeup.

        Raises:
            TimeoutError: there is no result after `timeout` seconds.
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
            while not self.done():  # asked after `awaited` is set: who settles later rings
                if meanwhile is not None:
                    meanwhile()
                if not wakeup.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
        finally:
            wakeup.awaited = None


# ---------------------------------------------------------------- a future that can be taken back


class Recaller(Protocol):
    """A dispatcher, as its futures know it."""

    def recall(self, is_meant: Callable[[Task], bool]) -> None:
        """Take back what workers have not begun, from those that have a task which is meant; `wake` sends it again."""

    def wake(self) -> None:
        """End the sleep of its thread."""


class CallFuture(Future[Any]):
    """The future of a call that may wait at a worker, behind another call: until that has ended, it can be cancelled.

    Attributes:
        is_ahead: whether the call is at a worker that has not begun it.
        dispatcher: dispatcher of the pool; None for a future that nobody cancels.
    """

    is_ahead = False
    dispatcher: Recaller | None = None

    def cancelled(self) -> bool:
        """Return whether the call is cancelled; asked for each call, so without the lock."""
        return self._state.startswith("CANCELLED")

    def running(self) -> bool:
        """Return whether a worker has begun the call."""
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
    """A callable that workers have, or are to get.

    Args:
        function: callable that the workers call.
        digest: of what the callable holds, to detect changes; None for one that is used once.
        rows: what `pickling.digest` has kept for the next digest.

    Attributes:
        number: id of the callable on the wire.
        label: name of the callable in messages.
        digest: of what the callable held when it was submitted; None where nobody asks.
        unfinished: number of tasks that still need the callable.
        identity: key in `FunctionTable`; None for a callable of a single map.
        is_inherited: whether the workers have the callable from their fork.
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
        """Let workers that are forked now inherit the callable; return a function that ends that."""
        assert self.function is not None
        roots = unforkable.roots_of(self.function)
        if any(standins.is_registered(type(root)) for root in roots.values()):
            self.prepare()  # what stands for it is made in the worker
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
        """Pickle the callable as it is now, unless that is done.

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
        """Return the modules of installed packages that it needs, for a server to import once."""
        self.prepare()
        return self._modules

    def frame(self) -> tuple[bytes, bytes]:
        """Return the parts of the frame that carries it."""
        return worker.FUNCTION.pack(self.number), self.prepare().packed

    def send_by_value(self, module_name: str) -> None:
        """Pickle it again, with the code of this module by value."""
        byvalue.force_by_value(module_name)
        self._packed = None
        self.prepare()


class FunctionTable:
    """Knows which callables the workers have, so that each travels once.

    Each call is made with the callable, and its `self`, as they are when it is submitted: one that has changed since it
    was sent is another `RemoteFunction`, while earlier calls keep theirs. Once no task of a callable is unfinished,
    only a weak reference to it is kept.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a map that is collected in the middle of it comes back here
        self._by_identity: dict[tuple[int, int], RemoteFunction] = {}
        self._on_rest: dict[int, weakref.ref[Any]] = {}
        self._classes: dict[type, RemoteFunction] = {}
        self.forgotten: deque[int] = deque()  # numbers that workers are to drop; the dispatcher sends them

    def acquire(self, function: Callable[..., Any]) -> RemoteFunction:
        """Return the `RemoteFunction` of a callable for one more task; `release` follows when that task is finished.

        No lock is held while the callable is pickled: that may run the user's code, which may wait for another thread
        that is about to submit.
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
        """Return the functions of classes that travel by value; each is sent once to a worker, as it is the first time.

        Raises:
            UnpicklableError: one cannot travel.
        """
        for cls in classes:
            if cls not in self._classes:
                remote = RemoteFunction(cls)
                remote.prepare()
                self._classes.setdefault(cls, remote)
        return tuple(map(self._classes.__getitem__, classes))

    def acquire_for_map(self, function: Callable[..., Any]) -> RemoteFunction:
        """Return the `RemoteFunction` for all calls of one map, to which its calls count as one task.

        It is a new one, since no map is to find what an earlier one left in `self`; but plain functions keep nothing.

        Raises:
            UnpicklableError: it cannot travel any more.
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
            function = remote.function  # until the lock is free: to drop it may run code of the user's
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
    """Return a digest of what a callable holds, or of what its `self` says may change of it."""
    owner = function.__self__ if isinstance(function, types.MethodType) else None
    changing = getattr(type(owner), "_datamat_changing", None)
    return pickling.digest(function if changing is None else changing(owner), rows)


def identity_of(function: Callable[..., Any]) -> tuple[int, int]:
    """Return a key that is the same for each access to one object's method (`obj.fit is obj.fit` is False)."""
    if isinstance(function, types.MethodType):
        return id(function.__self__), id(function.__func__)
    return id(function), 0


def _keeps_nothing(function: Callable[..., Any]) -> bool:
    """Return whether a worker's copy stays as it was sent: calls can only change globals, which outlive it."""
    if pickling.is_found(function):
        return True
    if type(function) is not types.FunctionType or function.__closure__ or function.__dict__:
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return pickling.PLAIN.issuperset(map(type, defaults))


class TaskSource(Protocol):
    """A map, as the dispatcher knows it."""

    def draw(self, num_tasks: int) -> list[Task]:
        """Return the next tasks; fewer, or none, where its items end."""

    def task_cost(self) -> float | None:
        """Return the seconds that its next task is likely to take, None if nothing is known yet."""

    def learn(self, task: Task, busy_s: float, num_bytes: int) -> None:
        """Record the seconds that a task took, and the size of its packed result."""

    def num_left(self) -> int:
        """Return how many items are not drawn yet, as far as that is known."""

    def abandon(self) -> None:
        """Draw nothing more; who takes the results gets a `CancelledError` after those that are there."""


class Task:
    """Calls of one `RemoteFunction`, sent in one message.

    Attributes:
        number: its id on the wire.
        remote: function that is called.
        arguments: arguments of the calls in the layout `mode`, until they are answered. A lost chunk is taken apart
            with them: to unpickle its payload would run code of their classes in the parent, which may be what kills.
        payload: pickled arguments, from `pack` until the task is answered: the worker may die.
        mode: layout of the arguments, one of `Mode`.
        count: number of calls in the task.
        future: gets the result, or what `worker.call_each` returns of a chunk.
        tries: workers that have died under it.
        unbegun: workers that have died before they began it, when it was next in line there.
        is_started: is it at a worker, or has it been when one died?
        busy_s: seconds that it took, once done.
        stream: map that it belongs to, None for a single call.
        num_bytes: size of its packed result, once done.
        needs: the classes of its arguments that travel by value.
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
        self._context = context or None  # most have no variables
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
        """Pickle the arguments, as they are now, unless that is done; variables have the values of the call.

        Raises:
            BaseException: it is not possible, or a `__reduce__` of the user's raises this.
        """
        if not self.payload:
            dump = pickling.dumps_items
            payload, classes = self._context.run(dump, self.arguments) if self._context else dump(self.arguments)
            self.needs = functions.for_classes(classes)
            self.payload = payload

    def begin(self) -> bool:
        """Mark the task as started unless its caller has cancelled it; return whether it is to run."""
        self.is_started = self.is_started or self.future.set_running_or_notify_cancel()
        return self.is_started

    def take_back(self) -> None:
        """Mark the task as not started: its worker will not run it. One that was begun by a worker that died stays."""
        self.future.is_ahead = False
        if not self.tries:
            self.is_started = False
            self.future.set_pending()

    def parts(self) -> list[Task]:
        """Return a task for each call of a chunk."""
        return [Task(self.remote, [item], CallFuture(), self.mode, context=self._context) for item in self.arguments]

    def drop_arguments(self) -> None:
        """Release its arguments: its result may wait for long."""
        self.payload, self.arguments, self._context = b"", (), None

    def was_begun(self, worker_exit: WorkerExit) -> bool:
        """Did the worker work on this task, or receive its callable, when it died?"""
        return worker_exit.last_begun in (self.number, self.remote.number)

    def header(self, *, is_claimed: bool) -> bytes:
        """Return the header of its frame.

        Args:
            is_claimed: whether the worker asks before it begins the task; see `Claims`.
        """
        return worker.TASK.pack(self.number, self.remote.number, self.mode, is_claimed)


def split(task: Task, functions: FunctionTable) -> list[Task]:
    """Return a task for each call of a chunk that its worker has not answered, so that only the guilty call fails.

    The chunk's own future is settled once all of them are.
    """
    parts = task.parts()
    functions.add_tasks(task.remote, len(parts) - 1)
    futures = [cast("CallFuture", part.future) for part in parts]
    unfinished: set[Future[Any]] = set(futures)
    for future in futures:
        future.add_done_callback(functools.partial(_join, task, parts, unfinished))
    return parts


def _join(chunk: Task, parts: list[Task], unfinished: set[Future[Any]], future: Future[Any]) -> None:
    """Settle the chunk with the outcomes of its calls once the last of them is there."""
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
    """Return the `stacklevel` with which a warning of the calling function shows the line of the user's program."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_own(frame):
        level, frame = level + 1, frame.f_back
    return level


_said: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("said", default=None)


@contextlib.contextmanager
def warned_once() -> Iterator[None]:
    """Have all pools that are used in the block give each warning once: a job may need one after the other."""
    token = _said.set(_said.get() or set())
    try:
        yield
    finally:
        _said.reset(token)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning at the line of the user's program."""
    said = _said.get()
    if said is not None:
        if text in said:
            return
        said.add(text)
    warnings.warn(text, category, stacklevel=callers_stacklevel())


def _warn(places: dict[str, str]) -> None:
    """Warn once of the parts of `self` that cannot travel."""
    if places:
        named = ", ".join(f"{place}: {name}" for place, name in places.items())
        warn(
            f"{named} cannot be sent to a worker: a stand-in goes instead, which raises when it is used; "
            f"{standins.REMEDY}"
        )


# ---------------------------------------------------------------- how many calls travel together
#
# Pure functions: no clock, no processes.
#
# Dispatching one item costs about 15 microseconds, so items of a millisecond or more travel alone: any chunk of two
# would only make the tail of the run uneven. Cheaper items are grouped, by *estimated cost* and never by their count:
# `ceil(items / workers)` finishes up to 2.4 times later than ideal when the expensive items come last.


CHUNK_COST_S = 0.005  # a chunk of 5 ms hides 15 us of dispatch (0.3 %) and delays the end of a run by 5 ms at most
PREFETCH_COST_S = 0.010  # work that waits at a worker: more than one switch interval (5 ms) of the parent's threads
LONG_COST_S = 0.100  # the 0.3 ms in which a worker waits for its next task are not worth a task that waits behind this
LEAST_COST_S = 0.000_1  # six times what dispatching it costs
MESSAGE_COST_S = 0.000_01  # at most, of the time that a worker takes for a task: to read it and to pack its results
CHUNKS_PER_WORKER = 32  # with unknown costs: even if one chunk costs ten times the mean, the tail stays short
MAX_CHUNKSIZE = 4096
MAX_PREFETCH = 128


def compute_chunksize(num_items: int, num_workers: int, cost: float | None = None) -> int:
    """Return how many items to send to a worker in one message.

    Args:
        num_items: items that are still to be dispatched.
        num_workers: worker processes that share them.
        cost: mean cost of one item in seconds; None if it is not known yet.

    Returns:
        At least 1. With a known cost, as many items as together cost 5 ms, but never so many that a worker would get
        fewer than four chunks. Without one, 1/32 of a worker's share.

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
    """Return how many items a message has at least, however few are left: messages of single cheap items only cost.

    Args:
        num_items: items of the whole map.
        num_workers: worker processes that share them.
        cost: mean cost of one item in seconds so far.

    Returns:
        As many items as cost 0.1 ms together, and no more than an eighth of a worker's share: should the last ones be
        the dearest by far, the run ends no later for it than that.

    Example:
        >>> least_chunksize(100_000, 4, cost=0.000_000_1), least_chunksize(1_000, 4, cost=0.000_000_1)
        (1000, 31)
        >>> least_chunksize(100_000, 4, cost=0.001)
        1
    """
    share = num_items // (num_workers * 8)
    return max(1, share if cost * share <= LEAST_COST_S else round(LEAST_COST_S / cost))


def prefetch_depth(cost: float | None, num_waiting: float = math.inf) -> int:
    """Return how many tasks may be at a worker, the running one included.

    Args:
        cost: recent cost of one task in seconds; None where nothing is known yet.
        num_waiting: tasks that no worker has yet, for each worker.

    Returns:
        Enough for 10 ms of work. Of tasks between 10 and 100 ms two, the next one being there when the first ends, but
        only while two others wait: at the end of a run, each could have run elsewhere. Of longer ones 1.

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
