"""Replacements for objects that cannot be sent to a worker, or must not be sent as they are.

Five kinds, decided by `replacement`:

fresh     locks, conditions, events, thread pools, thread-locals: a new one of the same configuration. A lock
          arrives free. (dill restores every RLock locked for ever: https://github.com/uqfoundation/dill/issues/321.)
reopened  files open for reading: by path, at the same position. (dill also re-opens files for *writing* by their
          mode, which truncates them.)
own       generators behind `random.random` and `numpy.random.rand`: the worker's own, which are seeded there. (A
          script with `from random import random` would otherwise send a generator that is never seeded.)
shared    locks, queues, events, values of `multiprocessing`: the same objects; see `shared`.
stand-in  connections, sockets, generators, files open for writing, ...: a `Standin`, which raises an error as soon as
          it is used, naming the object and the remedy. Never a silent None.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import queue
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar, cast

from datamat.parallel import logs
from datamat.parallel.errors import OptionError, UnpicklableError
from datamat.parallel.shared import is_shared, may_be_shared, parts, rebuild, why_not

Reduction = tuple["Callable[..., Any]", tuple[Any, ...]]
Place = Callable[[], str]
Answer = TypeVar("Answer")
REMEDY = "create it in the worker: give the class a method `setup_worker(self)`, which runs there once"


class Standin:
    """Replaces an object that stayed in the parent; using it raises `UnpicklableError`."""

    __slots__ = ("_datamat_place", "_datamat_reason", "_datamat_remedy", "_datamat_type")

    def __init__(self, place: str, type_name: str, reason: str = "", remedy: str = REMEDY) -> None:
        object.__setattr__(self, "_datamat_place", place)
        object.__setattr__(self, "_datamat_type", type_name)
        object.__setattr__(self, "_datamat_reason", reason)
        object.__setattr__(self, "_datamat_remedy", remedy)

    def __repr__(self) -> str:
        return f"<stand-in for {self._datamat_place}: {self._datamat_type}>"

    def __reduce__(self) -> Reduction:
        return Standin, (self._datamat_place, self._datamat_type, self._datamat_reason, self._datamat_remedy)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # looked up by copy, pickle and inspect
        self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        reason: str = f" ({self._datamat_reason})" if self._datamat_reason else ""
        raise UnpicklableError(
            f"{self._datamat_place}: {self._datamat_type} cannot be sent to a worker{reason}; {self._datamat_remedy}"
        )

    __call__ = __getitem__ = __setitem__ = __delitem__ = __iter__ = __next__ = __len__ = _refuse
    __contains__ = __bool__ = __enter__ = __exit__ = __int__ = __float__ = __add__ = __setattr__ = _refuse


def is_a(obj: Any, kinds: Any) -> bool:
    """Do what `isinstance` does, but look only at the type: a `Mock(spec=...)` claims to be its spec."""
    return issubclass(type(obj), kinds)


def standin_reduction(obj: object, place: Place, reason: str = "") -> Reduction:
    """Return the reduction that makes a stand-in for `obj` in the worker."""
    return Standin, (place(), type_name(obj), reason)


def standin_of(reduction: Reduction) -> dict[str, str]:
    """Return {path: type of the replaced object, with the reason if any} of a stand-in; empty for other objects."""
    if reduction[0] is not Standin:
        return {}
    place, kind, reason, *_ = (*reduction[1], "")
    return {place: f"{kind} ({reason})" if reason else kind}


def type_name(obj: object) -> str:
    """Return the name of an object's type as users write it: `sqlite3.Connection`, `generator`."""
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---------------------------------------------------------------- registered by users

_registered: dict[str, Callable[[Any], Reduction]] = {}  # by name, so that a worker need not import them
_caches: list[functools._lru_cache_wrapper[Any]] = []
# Types that a pickler or a fork handles before it looks anywhere else.
_NOT_REGISTERED = (
    bool, int, float, complex, str, bytes, bytearray, type(None), type(...), range, slice,
    list, tuple, dict, set, frozenset, deque, functools.partial,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CellType,
)  # fmt: skip


def per_type(answer: Callable[[Hashable], Answer]) -> functools._lru_cache_wrapper[Answer]:
    """Cache a function of a type until a user registers a type."""
    cached = functools.lru_cache(maxsize=4096)(answer)
    _caches.append(cached)
    return cached


def register_standin(kind: type, reduce: Callable[[Any], Reduction] | None) -> None:
    """Register how objects of a type travel between processes, instead of what pickle, dill or datamat do.

    It applies in both directions and under every start method: to what `self` holds, and to arguments, `initargs` and
    results. A forked worker replaces what it inherits before using it. An object held in two places is one object in
    the worker, too. Register before a pool's first call: its workers know only the types registered by then. Globals
    of forked workers stay as inherited.

    Args:
        kind: a class. This covers its subclasses, too, unless they are registered themselves. A class is identified by
            its name and module, so a class that a notebook cell redefines need not be registered again.
        reduce: called with an object in the process that has it. Returns `(make, arguments)`; in the other process,
            `make(*arguments)` returns the replacement. Both are pickled. It may be called for each submitted call, so
            it should be cheap, and return equal arguments for the same object. If it raises, an object held by `self`
            is replaced by a stand-in, which gives the reason when used; an argument or result fails its call. None
            removes the registration.

    Raises:
        OptionError: `kind` is not a class, or is one that pickle itself handles, such as `dict` or a function; or
            `reduce` is not callable.

    Example:
        >>> import sqlite3
        >>> from datamat.parallel import PathosExecutor, register_standin
        >>> class Store:
        ...     def __init__(self, path):
        ...         self.path, self.connection = path, sqlite3.connect(path)
        ...     def total(self, number):
        ...         return self.connection.execute("select ? + 1", (number,)).fetchone()[0]
        >>> register_standin(Store, lambda store: (Store, (store.path,)))
        >>> with PathosExecutor(max_workers=2) as pool:
        ...     list(pool.map(Store(":memory:").total, range(3)))
        [1, 2, 3]
    """
    if not isinstance(kind, type):
        raise OptionError(f"register_standin takes a class, not {kind!r}; pass the type of the objects")
    if (
        kind in (object, *_NOT_REGISTERED)
        or issubclass(kind, type | types.ModuleType)
        or _name_of(kind) == "numpy.ndarray"
    ):
        raise OptionError(f"{kind.__qualname__} always travels as it is; register a class of its own for such objects")
    if reduce is not None and not callable(reduce):
        raise OptionError(
            f"{kind.__qualname__}: reduce is {reduce!r}; pass a function that takes an object and returns "
            "(make, arguments)"
        )
    if reduce is None:
        _registered.pop(_name_of(kind), None)
    else:
        _registered[_name_of(kind)] = reduce
    for cached in _caches:
        cached.cache_clear()


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def registrations() -> dict[str, Callable[[Any], Reduction]]:
    """Return the registered functions by name of the type."""
    return dict(_registered)


def take_over(name: str, reduce: Callable[[Any], Reduction]) -> None:
    """In a worker: register the parent's functions, by name."""
    _registered.setdefault(name, reduce)
    for cached in _caches:
        cached.cache_clear()


def is_registered(kind: Any) -> bool:
    """Return True if a user has registered this type."""
    return _reduce_of(kind) is not None


def _reduce_of(kind: Any) -> Callable[[Any], Reduction] | None:
    if not _registered:
        return None
    return next(filter(None, map(_registered.get, map(_name_of, cast("type", kind).__mro__))), None)


def _as_registered(obj: Any, place: Place) -> Reduction:
    reduce = _reduce_of(type(obj))
    assert reduce is not None
    try:
        reduction = reduce(obj)
    except Exception as exc:  # noqa: BLE001 -- a user's function may raise anything
        return standin_reduction(obj, place, f"the function registered for it raised {type(exc).__name__}: {exc}")
    if (
        isinstance(reduction, tuple)
        and len(reduction) == 2
        and callable(reduction[0])
        and isinstance(reduction[1], tuple)
    ):
        return reduction
    return standin_reduction(
        obj, place, f"the function registered for it returned {reduction!r}, not (make, arguments)"
    )


# ---------------------------------------------------------------- fresh


def _event(is_set: bool) -> threading.Event:
    event = threading.Event()
    if is_set:
        event.set()
    return event


def _thread_pool(pool: ThreadPoolExecutor) -> Reduction:
    prefix, initializer, initargs = pool._thread_name_prefix, pool._initializer, pool._initargs
    return ThreadPoolExecutor, (pool._max_workers, prefix, initializer, initargs)


_FRESH: dict[type, Callable[[Any], Reduction]] = {
    type(threading.Lock()): lambda _: (threading.Lock, ()),
    type(threading.RLock()): lambda _: (threading.RLock, ()),
    threading.Condition: lambda condition: (threading.Condition, (condition._lock,)),
    threading.Event: lambda event: (_event, (event.is_set(),)),
    threading.Semaphore: lambda semaphore: (threading.Semaphore, (semaphore._value,)),
    threading.BoundedSemaphore: lambda semaphore: (threading.BoundedSemaphore, (semaphore._initial_value,)),
    threading.Barrier: lambda barrier: (threading.Barrier, (barrier.parties,)),
    threading.local: lambda _: (threading.local, ()),
    ThreadPoolExecutor: _thread_pool,
}

# Useless as arguments: a call would fill a copy, while threads or coroutines of the caller wait on the original.
_LOCAL = (queue.Queue, queue.SimpleQueue)


def is_local(kind: Any) -> bool:
    """Return True if objects of this type are queues of threads, or connect coroutines."""
    return issubclass(kind, _LOCAL) or any(
        base.__module__ in ("asyncio.mixins", "asyncio.queues") for base in kind.__mro__
    )


def shared_name(obj: Any) -> str:
    """Return the method of a `multiprocessing` manager that makes a shared counterpart of a local object."""
    names = {base.__name__ for base in type(obj).__mro__}
    return next((name for name in ("Event", "Condition", "Barrier", "Lock", "Semaphore") if name in names), "Queue")


# ---------------------------------------------------------------- reopened


def _reopen(path: str, mode: str, position: int, options: dict[str, Any]) -> Any:
    file = open(path, mode, **options)  # noqa: SIM115 -- it lives as long as the object that holds it
    file.seek(position)
    return file


def _file(file: Any, place: Place) -> Reduction | None:
    """Return how to reopen the file, a stand-in if that would harm it, None if dill does the right thing."""
    if isinstance(file, io.BytesIO | io.StringIO):
        return None
    for name in ("stdin", "stdout", "stderr"):
        if file is getattr(sys, name) or file is getattr(sys, f"__{name}__"):
            return getattr, (sys, name)
    if isinstance(file, io.TextIOBase) and hasattr(file, "isatty") and type(file).__module__.startswith("ipykernel"):
        return getattr, (sys, "stdout")
    path = getattr(file, "name", None)
    if file.closed or not isinstance(path, str) or not os.path.isfile(path):
        return standin_reduction(file, place, "it is closed or has no path")
    if file.writable() or not file.seekable():
        return standin_reduction(file, place, "it is open for writing: a second writer would destroy its content")
    if isinstance(file, io.TextIOWrapper):
        options: dict[str, Any] = {"encoding": file.encoding, "errors": file.errors}
        return _reopen, (os.path.abspath(path), "r", file.tell(), options)
    options = {"buffering": 0} if isinstance(file, io.RawIOBase) else {}
    return _reopen, (os.path.abspath(path), "rb", file.tell(), options)


# ---------------------------------------------------------------- own

# By name, so that the check imports nothing.
_OWN: dict[str, tuple[str, str]] = {
    "random.Random": ("random", "_inst"),
    "numpy.random.mtrand.RandomState": ("numpy.random.mtrand", "_rand"),
    "torch._C.Generator": ("torch", "default_generator"),
}


def _own(obj: Any, _: Place) -> Reduction | None:
    """Return how to get the worker's own one of an object of which each process has one; None for any other."""
    module, name = _OWN[_name_of(type(obj))]
    held = sys.modules.get(module)
    return (getattr, (held, name)) if held is not None and getattr(held, name, None) is obj else None


# ---------------------------------------------------------------- stand-ins

_STANDIN_TYPES: tuple[type, ...] = (
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.FrameType,
    threading.Thread,
    Executor,
    Future,  # a copy would never complete
)
# By name, so that the check imports nothing.
_STANDIN_NAMES = frozenset({
    "_socket.socket", "socket.socket", "ssl.SSLSocket", "mmap.mmap", "select.epoll", "select.poll",
    "sqlite3.Connection", "sqlite3.Cursor", "sqlite3.Blob", "subprocess.Popen", "_queue.SimpleQueue",
    "_asyncio.Future", "_asyncio.Task", "asyncio.base_events.BaseEventLoop",
    "tqdm.std.tqdm",
    "tensorflow.python.data.ops.dataset_ops.DatasetV2", "tensorflow.python.lib.io.tf_record.TFRecordWriter",
    "tensorflow.python.client.session.BaseSession",
})  # fmt: skip


def _is_standin_type(kind: type) -> bool:
    return issubclass(kind, _STANDIN_TYPES) or not _STANDIN_NAMES.isdisjoint(map(_name_of, kind.__mro__))


# ---------------------------------------------------------------- shared


def _shared(obj: Any, place: Place) -> Reduction | None:
    if not is_shared(obj):
        return None
    reason, remedy = why_not(obj)
    otherwise = Standin(place(), type_name(obj), reason, remedy)
    try:
        return rebuild, (otherwise, *parts(obj))
    except (ValueError, OSError):  # a socket, or something closed
        return Standin, otherwise.__reduce__()[1]


# ---------------------------------------------------------------- the choice


def _logging_reduction(obj: logging.Logger | logging.Handler, _: Place) -> Reduction:
    if isinstance(obj, logging.Handler):
        return logs.remote_handler, (obj.level, logs.target_key(obj))
    if obj is logging.root:
        return logging.getLogger, ()
    if logging.root.manager.loggerDict.get(obj.name) is obj:
        return logging.getLogger, (obj.name,)
    return logs.remote_logger, (obj.name, obj.level, logs.target_key(obj))


def _is_own_pool(kind: type) -> bool:
    return any(base.__module__ == f"{__package__}.executor" for base in kind.__mro__)


# The first rule that applies to a type decides the replacement of its objects; None lets them travel unchanged.
_CHOICE: tuple[tuple[Callable[[Any], bool], Callable[[Any, Place], Reduction | None]], ...] = (
    (is_registered, _as_registered),
    (_FRESH.__contains__, lambda obj, _: _FRESH[type(obj)](obj)),
    (lambda kind: issubclass(kind, (logging.Logger, logging.Handler)), _logging_reduction),
    (lambda kind: issubclass(kind, io.IOBase), _file),
    (lambda kind: _name_of(kind) in _OWN, _own),
    (may_be_shared, _shared),
    (_is_own_pool, lambda pool, _: cast("Reduction", pool.__reduce__())),  # a serial one in a worker
    (_is_standin_type, standin_reduction),
)


@per_type
def _rule_for(kind: Any) -> Callable[[Any, Place], Reduction | None] | None:
    return next((rule for applies, rule in _CHOICE if applies(kind)), None)


def is_special(kind: Any) -> bool:
    """Return True if `replacement` may replace objects of this type."""
    return _rule_for(kind) is not None


def replacement(obj: Any, place: Place) -> Reduction | None:
    """Return the function and arguments that make a worker's replacement for `obj`; None to send it unchanged.

    Args:
        obj: object that is to travel.
        place: returns its path, such as `self.reader._conn`; called only if a stand-in may replace it.
    """
    kind: Any = type(obj)
    rule = _rule_for(kind)
    return None if rule is None else rule(obj, place)


def name_in_places(obj: Any) -> str | None:
    """Return the name that messages use for an object instead of its path: `_datamat_name` of its class, else None."""
    name = getattr(type(obj), "_datamat_name", None)
    return name if isinstance(name, str) else None
