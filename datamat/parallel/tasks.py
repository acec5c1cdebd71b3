"""The units that the dispatcher moves: a callable (`Code`), shipped once per worker, and calls of it (`Task`)."""

from __future__ import annotations

import functools
import itertools
import threading
import types
import warnings
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from datamat.errors import BrokenPoolError
from datamat.parallel import byvalue, inherited, payloads, pickling, standins, worker
from datamat.parallel.shipment import Shipment

if TYPE_CHECKING:
    from collections.abc import Callable

    from datamat.parallel.slot import Slot

__all__ = ["Code", "CodeBook", "Task", "split"]

_numbers = itertools.count(1)


class Code:
    """A callable on its way to the workers.

    Attributes:
        number: its id on the wire.
        label: how users know it.
        unfinished: tasks that still need it.
        identity: what `CodeBook` finds it by; None for one that belongs to a single map.
        is_inherited: do the workers have it from their fork?
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.number = next(_numbers)
        self.label = getattr(function, "__qualname__", type(function).__qualname__)
        self.function: Callable[..., Any] | None = function
        self.unfinished = 0
        self.identity: tuple[int, int] | None = None
        self.is_inherited = False
        self._modules: tuple[str, ...] = ()
        self._shipment: Shipment | None = None

    def inherit(self) -> Callable[[], None]:
        """Let workers that are forked now inherit the callable; return what ends that."""
        assert self.function is not None
        roots: dict[str, Any] = {}
        owner: Any = self.function
        while isinstance(owner, functools.partial):
            roots["partial"] = owner
            owner = owner.func
        if isinstance(owner, types.MethodType):
            roots["self"] = owner.__self__
            byvalue.adopt_classes(type(owner.__self__).__mro__)
        else:
            roots[getattr(owner, "__qualname__", type(owner).__qualname__)] = owner
        hazards = inherited.find_hazards(roots)
        byvalue.adopt_classes(list(getattr(owner, "__globals__", {}).values()))
        _warn({hazard.place: hazard.original_type for hazard in hazards if hazard.is_standin})
        self.is_inherited = True
        return worker.bequeath(self.number, self.function, hazards)

    @property
    def is_prepared(self) -> bool:
        """Has it been pickled?"""
        return self._shipment is not None

    def prepare(self) -> None:
        """Pickle the callable as it is now.

        Raises:
            UnpicklableError: it cannot travel.
        """
        assert self.function is not None
        capsule = pickling.dumps_code(self.function)
        _warn(capsule.standins)
        self._modules = capsule.modules
        self._shipment = Shipment(capsule.stream, capsule.buffers)

    def is_as_sent(self) -> bool:
        """Is the callable, with its `self`, still what was shipped?"""
        assert self.function is not None
        if self._shipment is None:
            return False
        capsule = pickling.dumps_code(self.function)
        return self._shipment.is_same_as(capsule.stream, capsule.buffers)

    def modules(self) -> tuple[str, ...]:
        """Return the installed packages' modules that it needs, for a server to import once."""
        if self._shipment is None:
            self.prepare()
        return self._modules

    def frame(self) -> tuple[bytes, bytes]:
        """Return the parts of the frame that ships it."""
        if self._shipment is None:
            self.prepare()
        assert self._shipment is not None
        return worker.CODE.pack(self.number), self._shipment.packed

    def send_by_value(self, module_name: str) -> None:
        """Pickle again, with this module's code by value."""
        byvalue.force_by_value(module_name)
        self.prepare()


class CodeBook:
    """Knows which callables the workers have, so that each travels once.

    A callable and its `self` are pickled when the first of a run of tasks is submitted, and are the same for all tasks
    of that run. Once none of its tasks is unfinished, only a weak reference is kept; the next task then pickles it
    anew and, if it has changed, ships it again: workers never use a `self` from before a change made in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_identity: dict[tuple[int, int], Code] = {}
        self._on_rest: dict[int, weakref.ref[Any]] = {}
        self.forgotten: deque[int] = deque()  # numbers that workers are to drop; the dispatcher tells them

    def lend(self, function: Callable[..., Any]) -> Code:
        """Return the `Code` of a callable for one more task; `give_back` follows when that task is finished."""
        identity = _identity_of(function)
        with self._lock:
            code = self._by_identity.get(identity)
            if code is not None and code.unfinished:
                code.unfinished += 1
                return code
        return self._renew(function, identity, code)

    def _renew(self, function: Callable[..., Any], identity: tuple[int, int], known: Code | None) -> Code:
        if known is not None and known.number in self._on_rest:
            known.function = function
            if known.is_as_sent():
                del self._on_rest[known.number]
                known.unfinished = 1
                return known
            self._forget(known)
        code = Code(function)
        code.identity = identity
        code.unfinished = 1
        with self._lock:
            self._by_identity[identity] = code
        return code

    def lend_once(self, function: Callable[..., Any]) -> Code:
        """Return a `Code` of its own, for all calls of one map."""
        code = Code(function)
        code.unfinished = 1
        return code

    def lend_again(self, code: Code, num_tasks: int = 1) -> None:
        """Count more tasks of a code that is lent already."""
        with self._lock:
            code.unfinished += num_tasks

    def give_back(self, code: Code) -> None:
        """Count one task of `code` as finished."""
        with self._lock:
            code.unfinished -= 1
            if code.unfinished:
                return
        function, code.function = code.function, None
        owner = function.__self__ if isinstance(function, types.MethodType) else function
        if code.identity is None or code.is_inherited:
            self._forget(code)
            return
        try:
            self._on_rest[code.number] = weakref.ref(owner, lambda _: self._forget(code))
        except TypeError:  # no weak references to this kind of object
            self._forget(code)

    def _forget(self, code: Code) -> None:
        self._on_rest.pop(code.number, None)
        if code.identity is not None and self._by_identity.get(code.identity) is code:
            del self._by_identity[code.identity]
        self.forgotten.append(code.number)


def _identity_of(function: Callable[..., Any]) -> tuple[int, int]:
    """Return a key that is the same for each access to one object's method (`obj.fit is obj.fit` is False)."""
    if isinstance(function, types.MethodType):
        return id(function.__self__), id(function.__func__)
    return id(function), 0


class Task:
    """Calls of one `Code`, sent in one message.

    Attributes:
        number: its id on the wire.
        code: what is called.
        payload: the packed arguments.
        mode: their layout.
        count: number of calls.
        future: gets the result, or the list of results of a chunk.
        tries: workers that have died under it.
        unbegun: workers that have died before they began it, when it was next in line there.
        is_started: has it been at a worker? Then its future is running, and cannot be cancelled.
        busy_s: seconds that it took, once done.
    """

    __slots__ = ("busy_s", "code", "count", "future", "is_started", "mode", "number", "payload", "tries", "unbegun")

    def __init__(
        self,
        code: Code,
        payload: bytes,
        future: Future[Any] | Slot,
        mode: int = worker.Mode.CALL,
        count: int = 1,
    ) -> None:
        self.number = next(_numbers)
        self.code = code
        self.payload = payload
        self.mode = mode
        self.count = count
        self.future = future
        self.tries = 0
        self.unbegun = 0
        self.is_started = False
        self.busy_s = 0.0

    @property
    def label(self) -> str:
        """How users know it."""
        return f"{self.code.label}[{self.number}]"

    def begin(self) -> bool:
        """Mark the task as started, unless its caller has cancelled it; say whether it is to run."""
        self.is_started = self.is_started or self.future.set_running_or_notify_cancel()
        return self.is_started

    def header(self) -> bytes:
        """Return the header of its frame."""
        return worker.TASK.pack(self.number, self.code.number, self.mode)


def split(task: Task, codes: CodeBook) -> list[Task]:
    """Return a task for each call of a chunk whose worker died, so that only the guilty call is blamed.

    The chunk's own future is settled once all of them are.
    """
    parts: list[tuple[Task, Future[Any]]] = []
    for item in payloads.loads_data(task.payload):
        codes.lend_again(task.code)
        future: Future[Any] = Future()
        parts.append((Task(task.code, payloads.dumps_data([item]), future, worker.Mode.CHUNK), future))
    codes.give_back(task.code)
    unfinished = {future for _, future in parts}
    for _, future in parts:
        future.add_done_callback(functools.partial(_join, task, parts, unfinished))
    return [part for part, _ in parts]


def _join(
    chunk: Task, parts: list[tuple[Task, Future[Any]]], unfinished: set[Future[Any]], future: Future[Any]
) -> None:
    """Settle the chunk with the outcomes of its calls once the last of them is there."""
    unfinished.discard(future)
    if unfinished or chunk.future.done():
        return
    outcomes: list[Any] = []
    for _, each in parts:
        if each.cancelled():
            outcomes.append((False, payloads.dumps_data((BrokenPoolError("the pool was shut down"), ""))))
        elif (error := each.exception()) is not None:
            outcomes.append((False, payloads.dumps_data((error, ""))))
        else:
            outcomes += each.result()
    chunk.busy_s = sum(part.busy_s for part, _ in parts)
    chunk.future.set_result(outcomes)


def _warn(places: dict[str, str]) -> None:
    """Say once which parts of `self` stay behind."""
    if places:
        named = ", ".join(f"{place}: {name}" for place, name in places.items())
        warnings.warn(
            f"{named} cannot be sent to a worker: a stand-in goes instead, which raises when it is used; "
            f"{standins.REMEDY}",
            stacklevel=5,
        )
