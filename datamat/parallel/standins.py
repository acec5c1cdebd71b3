"""What workers get in place of objects that cannot travel, or that a fork must not inherit as they are."""

from __future__ import annotations

import functools
import gc
import io
import itertools
import logging
import math
import mmap
import os
import queue
import stat
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar, cast

from datamat.parallel import byvalue, logs
from datamat.parallel.channel import place_of, reopen
from datamat.parallel.errors import OptionError, UnpicklableError

__all__ = [
    "REMEDY",
    "Reduction",
    "Standin",
    "Unforkable",
    "begin_worker",
    "end_worker",
    "find_unforkables",
    "innermost",
    "is_a",
    "is_imported",
    "is_local",
    "is_registered",
    "is_shared",
    "is_special",
    "map_array",
    "may_be_shared",
    "parts",
    "per_type",
    "rebuild",
    "register_standin",
    "registrations",
    "replacement",
    "roots_of",
    "rule_for",
    "shared_name",
    "slots_of",
    "standin_reduction",
    "standin_type",
    "storage_of",
    "take_over",
    "type_name",
    "typed_storage_of",
    "why_not",
]

# ---------------------------------------------------------------- arrays that have a file, or memory of torch
#
# How arrays travel that the standard library's pickle would copy: by their file, or beside the stream.
#
# numpy.memmap    by its file, where that is still the one that is mapped: the worker maps the same bytes, however many
#                 there are. What was mapped to be changed in private (`mode="c"`), or lost its file, goes as an array.
# torch storages  as an array of bytes, which goes beside the stream. Tensors that share memory share it in the worker.
#
# numpy and torch are imported by those who have such objects, not by this module.


ArrayReduction = Any  # as of `__reduce__`


@functools.lru_cache(maxsize=4096)
def rule_for(kind: Any) -> Callable[[Any], ArrayReduction] | None:
    """Return the rule for arrays of this type; None for a type that this module does not know."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((rule for name in names if (rule := _RULES.get(name)) is not None), None)


# ---------------------------------------------------------------- numpy.memmap


def _memmap(array: Any) -> ArrayReduction:
    """Return how to map the array again, or the array as an ordinary one."""
    numpy = sys.modules["numpy"]
    plain = array.view(numpy.ndarray)
    mapping, path = getattr(array, "_mmap", None), getattr(array, "filename", None)
    if mapping is None or path is None or array.mode == "c" or not array.size or array.dtype.hasobject:
        return plain.__reduce_ex__(5)
    begin = numpy.frombuffer(mapping, numpy.uint8).__array_interface__["data"][0]
    if not _is_mapped(os.path.realpath(path), begin):
        return plain.__reduce_ex__(5)
    first = array.__array_interface__["data"][0]
    low = first + sum(min(0, (length - 1) * stride) for length, stride in zip(array.shape, array.strides, strict=True))
    high = first + sum(max(0, (length - 1) * stride) for length, stride in zip(array.shape, array.strides, strict=True))
    offset = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + low - begin  # of `low` in the file
    mode = "r" if array.mode == "r" or not array.flags.writeable else "r+"  # never "w+", which empties the file
    layout = (array.dtype, array.shape, array.strides, first - low)
    return map_array, (os.path.abspath(path), mode, offset, high - low + array.itemsize, layout)


def _is_mapped(path: str, address: int) -> bool:
    """Is it still the file of this name that is mapped at an address? Another one may have taken its place."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as regions:
        for region in regions:
            bounds, *_, name = region.rstrip("\n").split(maxsplit=5)
            first, _, last = bounds.partition("-")
            if int(first, 16) <= address < int(last, 16):
                return name == path.replace("\n", "\\012")
        return False
    return os.path.exists(path)


def map_array(path: str, mode: Any, offset: int, num_bytes: int, layout: tuple[Any, ...]) -> Any:
    """Return an array that is mapped from a file.

    Args:
        path: absolute path of the file to map.
        mode: mode of the mapping, "r" or "r+".
        offset: byte of the file at which the mapping begins.
        num_bytes: number of bytes to map.
        layout: type, shape and strides of the array, and where its first item is.
    """
    import numpy as np

    dtype, shape, strides, first = layout
    if first == 0 and num_bytes == math.prod(shape) * dtype.itemsize:
        ordered: Any = np.memmap(path, dtype, mode, offset, shape)
        if ordered.strides == strides:
            return ordered
    return np.ndarray(shape, dtype, np.memmap(path, np.uint8, mode, offset, (num_bytes,)), first, strides)


# ---------------------------------------------------------------- torch


def _storage(storage: Any) -> ArrayReduction:
    if storage.device.type != "cpu" or not storage.nbytes():
        return NotImplemented
    torch = sys.modules["torch"]
    return storage_of, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),)


def _typed_storage(storage: Any) -> ArrayReduction:
    content = storage._untyped_storage  # all else of this class warns that it is about to go
    if content.device.type != "cpu" or not content.nbytes():
        return NotImplemented
    return typed_storage_of, (content, storage.dtype)


def storage_of(content: Any) -> Any:
    """Return the torch storage that is the memory of an array of bytes."""
    import torch

    return torch.from_numpy(content).untyped_storage()


def typed_storage_of(storage: Any, dtype: Any) -> Any:
    """Return a view of a torch storage as numbers of a type, as tensors are made from."""
    import torch

    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=storage, dtype=dtype, _internal=True)


_RULES: dict[str, Callable[[Any], ArrayReduction]] = {
    "numpy.memmap": _memmap,
    "torch.storage.UntypedStorage": _storage,
    "torch.storage.TypedStorage": _typed_storage,
}


# ---------------------------------------------------------------- what multiprocessing shares
#
# Locks, queues, events and shared memory of `multiprocessing` and `multiprocess`, on their way to workers.
#
# The two libraries send them at the start of a process alone, to a child of their own. Here they go with any callable,
# initializer or argument, to a worker of any start method:
#
#   semaphore that has a name   opened under it. It has one unless it is of the fork context
#   semaphore that has none     found among what a forked worker has inherited; no other process can open it
#   pipe, shared memory         opened again as a file of the parent's, and compared: its number may be another's by now
#
# Everything else is made of these (a `Queue` of three semaphores and a pipe, a `Value` of a lock and shared memory),
# and is put together again by the library itself, or stays behind as a whole where a part of it does.


_LIBRARIES = ("multiprocessing", "multiprocess")
_MODULES = frozenset(
    f"{library}.{name}" for library in _LIBRARIES for name in ("synchronize", "queues", "sharedctypes")
)
_TYPES = frozenset(
    f"{library}.{name}"
    for library in _LIBRARIES
    for name in (
        "connection.Connection",
        "heap.Arena",
        "shared_memory.SharedMemory",
        "shared_memory.ShareableList",
    )
)

Key = tuple[int, int]  # counter and id under which a library registers what it repairs after a fork
Inherited = weakref.WeakValueDictionary[tuple[str, Key], Any]

_known: weakref.WeakValueDictionary[tuple[str, str], Any] = weakref.WeakValueDictionary()  # semaphores by their names
_inherited: Inherited = weakref.WeakValueDictionary()  # in a forked worker: what it has inherited
_is_worker = False
_trackers: dict[str, int | None] = {}  # in a worker: pids of the resource trackers that are not its own
_parent_pid: int | None = None  # in a worker that is a fork


@functools.lru_cache(maxsize=4096)
def _library_of(kind: Hashable) -> str | None:
    for base in cast("type", kind).__mro__:
        if base.__module__ in _MODULES or f"{base.__module__}.{base.__qualname__}" in _TYPES:
            return base.__module__.partition(".")[0]
    return None


def is_shared(obj: Any) -> bool:
    """Return whether it is a lock, queue, event, value, ... of one of the libraries."""
    kind: Any = type(obj)
    return _library_of(kind) is not None or _is_shared_memory(obj)


def may_be_shared(kind: Any) -> bool:
    """Return whether objects of this type may be shared; `ctypes` objects are if `sharedctypes` made them."""
    return _library_of(kind) is not None or any(base.__module__ == "_ctypes" for base in kind.__mro__)


def _is_shared_memory(obj: Any) -> bool:
    return any(base.__module__ == "_ctypes" for base in type(obj).__mro__) and hasattr(obj, "_wrapper")


# ---------------------------------------------------------------- sending


class _Reopened:
    """A pipe or shared memory, for the library that wants a descriptor of it in another process."""

    def __init__(self, descriptor: int) -> None:
        import fcntl

        found = os.fstat(descriptor)
        if stat.S_ISSOCK(found.st_mode):
            raise ValueError("a socket")
        self._place = place_of(descriptor)
        self._file = (found.st_dev, found.st_ino)
        self._flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE

    def detach(self) -> int:
        """Return a descriptor of it in this process."""
        descriptor = reopen(self._place, self._flags)
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != self._file:
            os.close(descriptor)
            raise FileNotFoundError(f"{self._place} is another file by now")
        return descriptor


class _Spawning:
    """What the libraries ask for the descriptors of a child that is being spawned."""

    @staticmethod
    def duplicate_for_child(descriptor: int) -> int:
        return descriptor

    DupFd = _Reopened


@contextmanager
def _as_if_spawning(library: str) -> Iterator[None]:
    context = sys.modules[f"{library}.context"]
    before = context.get_spawning_popen()
    context.set_spawning_popen(_Spawning)
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def parts(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """Return what makes it in another process: a function, its arguments, and a state or None.

    Raises:
        Exception: it cannot be sent.
    """
    kind: Any = type(obj)
    library = _library_of(kind) or type(obj._wrapper).__module__.partition(".")[0]
    semaphore = getattr(obj, "_semlock", None)
    if semaphore is not None and semaphore.name is None:
        return _inherited_of, _origin(library, obj), None
    with _as_if_spawning(library):
        reducer = sys.modules[f"{library}.reduction"].ForkingPickler._extra_reducers.get(kind)
        reduced = obj.__reduce_ex__(5) if reducer is None else reducer(obj)
    make, arguments, state = (*reduced, None)[:3]
    if type(obj).__module__ == f"{library}.shared_memory":
        return _attached, (library, make, arguments), None
    if semaphore is not None:
        _known[library, semaphore.name] = obj
        return _named, (library, semaphore.name, make, arguments, state), None
    return make, arguments, state


def why_not(obj: Any) -> tuple[str, str]:
    """Return why it may not arrive in a worker, and the remedy."""
    kind: Any = type(obj)
    library, name = _library_of(kind) or "multiprocessing", kind.__qualname__
    if name == "Connection":
        return "it is closed, or a socket", f"make it with {library}.Pipe(duplex=False)"
    if name.startswith("Synchronized"):
        name = "Array" if name in ("SynchronizedArray", "SynchronizedString") else "Value"
    return (
        "it was made in the fork context, and only workers that were forked after that have it",
        f'make it with {library}.get_context("spawn").{name}(), which all workers can use',
    )


def _origin(library: str, obj: Any) -> tuple[int, str, Key | None]:
    """Return the process that has made it, and how a fork of that finds it."""
    for (_, key), inherited in list(_inherited.items()):
        if inherited is obj:
            assert _parent_pid is not None
            return _parent_pid, library, key
    return os.getpid(), library, next((key for key, held in _forked_with(library) if held is obj), None)


def _forked_with(library: str) -> list[tuple[Key, Any]]:
    util = sys.modules.get(f"{library}.util")
    return [] if util is None else [(key[:2], obj) for key, obj in list(util._afterfork_registry.items())]


# ---------------------------------------------------------------- arriving


def rebuild(otherwise: Any, make: Callable[..., Any], arguments: tuple[Any, ...], state: Any) -> Any:
    """Return what `parts` describes, or `otherwise`, a stand-in, where a part of it has not arrived."""
    held = (*arguments, *(state.values() if isinstance(state, dict) else state if isinstance(state, tuple) else ()))
    if any(type(part) is type(otherwise) for part in held):
        return otherwise
    try:
        obj = make(*arguments)
    except OSError as exc:  # a semaphore, a pipe or memory that has gone with what had it
        place, kind, *_ = otherwise.__reduce__()[1]
        return type(otherwise)(place, kind, f"gone where it was made: {exc}", "keep it there while workers use it")
    if obj is None:
        return otherwise
    if state is not None and hasattr(obj, "__setstate__"):
        obj.__setstate__(state)
    elif state is not None:
        vars(obj).update(state)
    return obj


def _inherited_of(pid: int, library: str, key: Key | None) -> Any:
    """Return what this process has inherited of another, or has made itself; None if it has not."""
    if key is None:
        return None
    if pid == os.getpid():
        return dict(_forked_with(library)).get(key)
    return _inherited.get((library, key)) if pid == _parent_pid else None


def _named(library: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...], state: Any) -> Any:
    """Return the semaphore of this name: one object in each process, which counts how often a thread has taken it."""
    found = _known.get((library, name))
    if found is None:
        found = make(*arguments)
        found.__setstate__(state)
        _known[library, name] = found
    return found


def _attached(library: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return shared memory that has a name, which stays its maker's.

    Python registers it with the resource tracker of whoever attaches to it; one that the worker has started itself
    would unlink it with the worker's end (https://github.com/python/cpython/issues/82300).
    """
    made = make(*arguments)
    if _is_worker and _tracker_pid(library) != _trackers.get(library):
        sys.modules[f"{library}.resource_tracker"].unregister(getattr(made, "shm", made)._name, "shared_memory")
    return made


def _tracker_pid(library: str) -> int | None:
    """Return the pid of the resource tracker that this process has started, or the one that it is a fork of."""
    module = sys.modules.get(f"{library}.resource_tracker")
    return None if module is None else module._resource_tracker._pid


# ---------------------------------------------------------------- in a worker


def begin_worker(*, is_fork: bool) -> None:
    """Register what the worker has inherited.

    Args:
        is_fork: whether the worker is a fork of the process that owns the pool.
    """
    global _is_worker, _parent_pid  # noqa: PLW0603 -- a process has one parent
    _is_worker = True
    _trackers.update({library: _tracker_pid(library) for library in _LIBRARIES})
    if not is_fork:
        return
    _parent_pid = os.getppid()
    for library in _LIBRARIES:
        for key, obj in _forked_with(library):
            _inherited[library, key] = obj
            if name := getattr(getattr(obj, "_semlock", None), "name", None):
                _known[library, name] = obj
    _of_standard_library("_run_after_forkers")  # as in its own children; a queue's thread, say, has stayed behind


def end_worker() -> None:
    """Send what queues of the standard library hold back; `multiprocess`, which runs the worker, sends its own."""
    _of_standard_library("_run_finalizers")


def _of_standard_library(function: str) -> None:
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        getattr(util, function)()


# ---------------------------------------------------------------- what cannot travel as it is
#
# What arrives in a worker in place of objects that cannot travel, or must not travel as they are.
#
# Five kinds, decided by `replacement`:
#
# fresh     locks, conditions, events, thread pools, thread-locals: a new one of the same configuration. A lock
#           arrives free. (dill restores every RLock locked for ever: https://github.com/uqfoundation/dill/issues/321.)
# reopened  files open for reading: by path, at the same position. (dill also re-opens files for *writing* by their
#           mode, which truncates them.)
# own       generators behind `random.random` and `numpy.random.rand`: those of the worker, which are seeded there. (A
#           script that says `from random import random` would otherwise send a generator that nobody seeds.)
# shared    locks, queues, events, values of `multiprocessing`: the very same ones; see `shared`.
# stand-in  connections, sockets, generators, files open for writing, ...: a `Standin`, which raises an error that says
#           what it was and what to do, as soon as it is used. Never a silent None.


Reduction = tuple["Callable[..., Any]", tuple[Any, ...]]
Answer = TypeVar("Answer")
REMEDY = "create it in the worker: give the class a method `setup_worker(self)`, which runs there once"


class Standin:
    """Stands for an object that stayed in the parent; using it raises `UnpicklableError`."""

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
            raise AttributeError(name)  # what copy, pickle and inspect look for
        self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        reason: str = f" ({self._datamat_reason})" if self._datamat_reason else ""
        raise UnpicklableError(
            f"{self._datamat_place}: {self._datamat_type} cannot be sent to a worker{reason}; {self._datamat_remedy}"
        )

    __call__ = __getitem__ = __setitem__ = __delitem__ = __iter__ = __next__ = __len__ = _refuse
    __contains__ = __bool__ = __enter__ = __exit__ = __int__ = __float__ = __add__ = __setattr__ = _refuse


def is_a(obj: Any, kinds: Any) -> bool:
    """Return what `isinstance` does, but ask the type alone: a `Mock(spec=...)` says that it is what it stands for."""
    return issubclass(type(obj), kinds)


def standin_reduction(obj: object, place: str, reason: str = "") -> Reduction:
    """Return how a stand-in for `obj` is made in the worker."""
    return Standin, (place, type_name(obj), reason)


def standin_type(reduction: Reduction) -> str:
    """Return what a stand-in stands for: its type, with the reason where there is one."""
    _, kind, reason, *_ = (*reduction[1], "")
    return f"{kind} ({reason})" if reason else str(kind)


def type_name(obj: object) -> str:
    """Return the name of the object's type as users write it: `sqlite3.Connection`, `generator`."""
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---------------------------------------------------------------- registered by users

_registered: dict[str, Callable[[Any], Reduction]] = {}  # by name: a worker imports nothing to know them
_caches: list[functools._lru_cache_wrapper[Any]] = []
# What a pickler, or a fork, deals with before it asks anybody.
_NOT_REGISTERED = (
    bool, int, float, complex, str, bytes, bytearray, type(None), type(...), range, slice,
    list, tuple, dict, set, frozenset, deque, functools.partial,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CellType,
)  # fmt: skip


def per_type(answer: Callable[[Hashable], Answer]) -> functools._lru_cache_wrapper[Answer]:
    """Cache what is known of a type, until a user registers one."""
    cached = functools.lru_cache(maxsize=4096)(answer)
    _caches.append(cached)
    return cached


def register_standin(kind: type, reduce: Callable[[Any], Reduction] | None) -> None:
    """Register how objects of a type travel between processes, instead of what pickle, dill or datamat do.

    It applies in both directions and under every start method: to what `self` holds, and to arguments, `initargs` and
    results. A forked worker replaces what it inherits before using it. An object held in two places is one object in
    the worker, too. Register before a pool's first call: its workers know only what was registered by then. What forked
    workers find under global names stays as inherited.

    Args:
        kind: a class. It stands for its subclasses, too, unless they are registered themselves. A class is known by its
            name and module, so a class that a notebook cell redefines need not be registered again.
        reduce: called with an object in the process that has it. Returns `(make, arguments)`; `make(*arguments)`, in
            the other process, returns the replacement. Both are pickled. It may be called for each submitted call, so
            it should be cheap, and return equal arguments for the same object. If it raises, a stand-in replaces what
            `self` holds, and gives the reason when used; an argument or result fails its call. None removes what was
            registered.

    Raises:
        OptionError: `kind` is not a class, or is one that pickle handles on its own, such as `dict` or a function; or
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
    """Return what is registered, by name of the type."""
    return dict(_registered)


def take_over(name: str, reduce: Callable[[Any], Reduction]) -> None:
    """In a worker: register what its parent has, by name."""
    _registered.setdefault(name, reduce)
    for cached in _caches:
        cached.cache_clear()


def is_registered(kind: Any) -> bool:
    """Return whether a user has registered how objects of this type travel."""
    return _reduce_of(kind) is not None


def _reduce_of(kind: Any) -> Callable[[Any], Reduction] | None:
    if not _registered:
        return None
    return next(filter(None, map(_registered.get, map(_name_of, cast("type", kind).__mro__))), None)


def _as_registered(obj: Any, place: str) -> Reduction:
    reduce = _reduce_of(type(obj))
    assert reduce is not None
    try:
        reduction = reduce(obj)
    except Exception as exc:  # noqa: BLE001 -- a user's function may raise anything
        return standin_reduction(
            obj, place, f"the function that is registered for it raised {type(exc).__name__}: {exc}"
        )
    if (
        isinstance(reduction, tuple)
        and len(reduction) == 2
        and callable(reduction[0])
        and isinstance(reduction[1], tuple)
    ):
        return reduction
    return standin_reduction(
        obj, place, f"the function that is registered for it returned {reduction!r}, not (make, arguments)"
    )


# ---------------------------------------------------------------- fresh


def _event(is_set: bool) -> threading.Event:
    event = threading.Event()
    if is_set:
        event.set()
    return event


def _lock(_: Any) -> Reduction:
    return threading.Lock, ()


def _rlock(_: Any) -> Reduction:
    return threading.RLock, ()


def _thread_pool(pool: ThreadPoolExecutor) -> Reduction:
    prefix, initializer, initargs = pool._thread_name_prefix, pool._initializer, pool._initargs
    return ThreadPoolExecutor, (pool._max_workers, prefix, initializer, initargs)


_FRESH: dict[type, Callable[[Any], Reduction]] = {
    type(threading.Lock()): _lock,
    type(threading.RLock()): _rlock,
    threading.Condition: lambda condition: (threading.Condition, (condition._lock,)),
    threading.Event: lambda event: (_event, (event.is_set(),)),
    threading.Semaphore: lambda semaphore: (threading.Semaphore, (semaphore._value,)),
    threading.BoundedSemaphore: lambda semaphore: (threading.BoundedSemaphore, (semaphore._initial_value,)),
    threading.Barrier: lambda barrier: (threading.Barrier, (barrier.parties,)),
    threading.local: lambda _: (threading.local, ()),
    ThreadPoolExecutor: _thread_pool,
}

# Of no use as arguments: a call would put into a copy what threads, or coroutines, of the caller wait for.
_LOCAL = (queue.Queue, queue.SimpleQueue)


def is_local(kind: Any) -> bool:
    """Return whether objects of this type are queues of threads, or connect coroutines."""
    return issubclass(kind, _LOCAL) or any(
        base.__module__ in ("asyncio.mixins", "asyncio.queues") for base in kind.__mro__
    )


def shared_name(obj: Any) -> str:
    """Return the name of what a manager of `multiprocessing` has instead of an object that is local."""
    names = {base.__name__ for base in type(obj).__mro__}
    return next((name for name in ("Event", "Condition", "Barrier", "Lock", "Semaphore") if name in names), "Queue")


# ---------------------------------------------------------------- reopened


_FILES = (io.IOBase,)
_LOGGING = (logging.Logger, logging.Handler)


def _reopen(path: str, mode: str, position: int, options: dict[str, Any]) -> Any:
    file = open(path, mode, **options)  # noqa: SIM115 -- it lives as long as the object that holds it
    file.seek(position)
    return file


def _file(file: Any, place: str) -> Reduction | None:
    """Return how to open the file again, a stand-in where that would harm it, None where dill does the right thing."""
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


# ---------------------------------------------------------------- the own

# By name, so that nothing is imported for the question.
_OWN: dict[str, tuple[str, str]] = {
    "random.Random": ("random", "_inst"),
    "numpy.random.mtrand.RandomState": ("numpy.random.mtrand", "_rand"),
    "torch._C.Generator": ("torch", "default_generator"),
}


def _own(obj: Any) -> Reduction | None:
    """Return how to get the worker's own one of an object of which each process has one; None for any other."""
    module, name = _OWN[type_name(obj)]
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
    Future,  # a copy would never be done
)
# By name, so that nothing is imported for the question.
_STANDIN_NAMES = frozenset({
    "_socket.socket", "socket.socket", "ssl.SSLSocket", "mmap.mmap", "select.epoll", "select.poll",
    "sqlite3.Connection", "sqlite3.Cursor", "sqlite3.Blob", "subprocess.Popen", "_queue.SimpleQueue",
    "_asyncio.Future", "_asyncio.Task", "asyncio.base_events.BaseEventLoop",
    "tqdm.std.tqdm",
    "tensorflow.python.data.ops.dataset_ops.DatasetV2", "tensorflow.python.lib.io.tf_record.TFRecordWriter",
    "tensorflow.python.client.session.BaseSession",
})  # fmt: skip


def _is_standin_type(kind: type) -> bool:
    if issubclass(kind, _STANDIN_TYPES):
        return True
    return any(f"{base.__module__}.{base.__qualname__}" in _STANDIN_NAMES for base in kind.__mro__)


# ---------------------------------------------------------------- shared


def _shared(obj: Any, place: str) -> Reduction:
    reason, remedy = why_not(obj)
    otherwise = Standin(place, type_name(obj), reason, remedy)
    try:
        return rebuild, (otherwise, *parts(obj))
    except (ValueError, OSError):  # a socket, or something closed
        return Standin, otherwise.__reduce__()[1]


# ---------------------------------------------------------------- the choice


def _is_own_pool(kind: type) -> bool:
    return any(base.__module__ == f"{__package__}.executor" for base in kind.__mro__)


@per_type
def is_special(kind: Hashable) -> bool:
    """May `replacement` have something for objects of this type?"""
    assert isinstance(kind, type)
    if is_registered(kind) or kind in _FRESH or issubclass(kind, (*_LOGGING, *_FILES)):
        return True
    if f"{kind.__module__}.{kind.__qualname__}" in _OWN or may_be_shared(kind):
        return True
    return _is_own_pool(kind) or _is_standin_type(kind)


def _logging_reduction(obj: logging.Logger | logging.Handler) -> Reduction:
    if isinstance(obj, logging.Handler):
        return logs.remote_handler, (obj.level, logs.target_key(obj))
    if obj is logging.root:
        return logging.getLogger, ()
    if logging.root.manager.loggerDict.get(obj.name) is obj:
        return logging.getLogger, (obj.name,)
    return logs.remote_logger, (obj.name, obj.level, logs.target_key(obj))


def replacement(obj: Any, place: str) -> Reduction | None:
    """Return the function and arguments that make what a worker gets for `obj`, or None to let it travel as it is.

    Args:
        obj: object that is to travel.
        place: how users reach it, as in `self.reader._conn`.
    """
    kind: Any = type(obj)
    if not is_special(kind):
        return None
    make = _as_registered if is_registered(kind) else _replacement
    return make(obj, place)


def _replacement(obj: Any, place: str) -> Reduction | None:
    kind: Any = type(obj)
    if kind in _FRESH:
        return _FRESH[kind](obj)
    if issubclass(kind, _LOGGING):
        return _logging_reduction(obj)
    if issubclass(kind, _FILES):
        return _file(obj, place)
    if type_name(obj) in _OWN:
        return _own(obj)
    if may_be_shared(kind):
        return _shared(obj, place) if is_shared(obj) else None
    if _is_own_pool(kind):
        return cast("Reduction", obj.__reduce__())  # a serial one in a worker
    return standin_reduction(obj, place)


# ---------------------------------------------------------------- what a fork inherits
#
# What a forked worker must replace in the objects that it inherits, by the rules of `standins`.


_VALUES = frozenset({str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, type(...)})
_ROWS = frozenset({tuple, list})
_COLLECTIONS = (dict, list, tuple, set, frozenset, deque)
_REBUILT = (tuple, frozenset, types.MethodType)
_NEVER_ENTERED = (type, types.ModuleType)
_MAX_ITEMS = 1_000  # what longer collections hold is mostly data, and looked at together


def name_in_places(obj: Any) -> str | None:
    """Return what messages call an object in place of how it is reached: `_datamat_name` of its class; else None."""
    name = getattr(type(obj), "_datamat_name", None)
    return name if isinstance(name, str) else None


def step_to(attribute: str) -> str:
    """Return the step of a place to an attribute; to the object that a method is bound to, in words."""
    return "'s self" if attribute == "__self__" else f".{attribute}"


class _ReachedObject:
    """An object on the way from the root.

    Attributes:
        obj: the object; a tuple that is rebuilt replaces the earlier one here, too.
        parent: object that holds it; None for a root.
        key: index, key or attribute in the parent; name of a root.
    """

    __slots__ = ("key", "obj", "parent")

    def __init__(self, obj: Any, parent: _ReachedObject | None, key: Any) -> None:
        self.obj = obj
        self.parent = parent
        self.key = key

    def place(self) -> str:
        """Return how users reach the object."""
        steps: list[str] = []
        node = self
        while node.parent is not None and (not steps or name_in_places(node.obj) is None):
            is_item = is_a(node.parent.obj, _COLLECTIONS) and node.key != "__dict__"
            if not is_a(node.parent.obj, set | frozenset):
                steps.append(f"[{node.key!r}]" if is_item else step_to(node.key))
            node = node.parent
        name = name_in_places(node.obj)
        return "".join((str(node.key) if name is None else name, *reversed(steps))).lstrip("._")

    def put(self, value: Any) -> None:
        """Replace the object in what holds it."""
        assert self.parent is not None
        holder = self.parent.obj
        if is_a(holder, dict | list | deque):
            holder[self.key] = value
        elif is_a(holder, set):
            holder.discard(self.obj)
            holder.add(value)
        elif (rebuild := _rebuilder(holder)) is not None:
            self.parent.put(rebuild(self.key, self.obj, value))
        elif is_a(holder, functools.partial):
            parts = {"func": holder.func, "args": holder.args, "keywords": holder.keywords, self.key: value}
            holder.__setstate__((*parts.values(), vars(holder)))  # functools: in place
        elif is_a(holder, types.FunctionType) and self.key in holder.__code__.co_freevars:
            cells = holder.__closure__ or ()
            cells[holder.__code__.co_freevars.index(self.key)].cell_contents = value
        elif self.key in getattr(holder, "__dict__", ()):
            vars(holder)[self.key] = value  # not setattr: it may be the user's
        else:
            kind: Any = type(holder)
            slots_of(kind)[self.key].__set__(holder, value)
        self.obj = value


class Unforkable:
    """An attribute or item that a forked worker must replace before it uses the object.

    Attributes:
        place: how users reach it, as in `self.reader._conn`.
        reduction: function and arguments that make the replacement.
    """

    __slots__ = ("_made", "_node", "place", "reduction")

    def __init__(self, node: _ReachedObject, place: str, reduction: Reduction, made: list[Any]) -> None:
        self._node = node
        self._made = made  # of all places where the object is: it is replaced by one
        self.place = place
        self.reduction = reduction

    @property
    def is_registered(self) -> bool:
        """Has a user registered its type?"""
        return is_registered(type(self._node.obj))

    @property
    def is_standin(self) -> bool:
        """Is the replacement a stand-in?"""
        return self.reduction[0] is Standin

    def repair(self) -> None:
        """Put the replacement in place; locks are released in place, since other objects may refer to them."""
        original = self._node.obj
        if hasattr(original, "_at_fork_reinit") and not (self.is_registered or is_a(original, logging.Handler)):
            original._at_fork_reinit()
            return
        make, arguments = self.reduction
        if not self._made:
            self._made.append(make(*arguments))
        self._node.put(self._made[0])


def roots_of(function: Any) -> dict[str, Any]:
    """Return what a callable starts from, by the name that users have for it: its `self`, or itself."""
    roots = {"partial": function} if is_a(function, functools.partial) else {}
    owner = innermost(function)
    if is_a(owner, types.MethodType):
        return roots | {"self": owner.__self__}
    return roots | {logs.label_of(owner): owner}


def innermost(function: Any) -> Any:
    """Return what partials call in the end."""
    while is_a(function, functools.partial):
        function = function.func
    return function


def find_unforkables(roots: Mapping[str, Any]) -> list[Unforkable]:
    """Return what must be replaced in inherited objects.

    It is found through attributes, slots, collections, bound methods, partials and closures. Collections of mere
    values are passed over at the speed of C, since `self` may hold a lot of data, and each new pool asks; so is what
    long collections hold, unless there is something among it.

    Args:
        roots: the objects by the name that users have for them, as in `self` of a bound method.
    """
    found: list[Unforkable] = []
    made: dict[int, list[Any]] = {}
    seen = set(map(id, roots.values()))
    waiting = deque(_ReachedObject(obj, None, name) for name, obj in roots.items() if not is_shared(obj))
    while waiting:
        node = waiting.popleft()
        is_long = is_a(node.obj, _COLLECTIONS) and len(node.obj) > _MAX_ITEMS
        is_entered = not is_long or _holds_special(node.obj)
        for key, value in _children(node.obj):
            kind: Any = type(value)
            if kind in _VALUES or id(value) in seen:
                continue
            child = _ReachedObject(value, node, key)
            if is_special(kind):
                if is_shared(value):  # a fork has it
                    continue
                place = child.place()
                if (reduction := replacement(value, place)) is not None:
                    found.append(Unforkable(child, place, reduction, made.setdefault(id(value), [])))
                    continue
            if is_entered and _may_be_entered(value):
                waiting.append(child)
                if not issubclass(kind, _REBUILT):  # those must be rebuilt wherever they are
                    seen.add(id(value))
    return found


def _holds_special(collection: Any) -> bool:
    """Return whether something that may have to be replaced is anywhere below this; under a microsecond for each part.

    Objects are asked for their parts many at a time, so it is not known where they are.
    """
    level = [collection]
    seen = {id(collection), *(id(vars(module)) for module in list(sys.modules.values()) if hasattr(module, "__dict__"))}
    while level:
        parts = gc.get_referents(*level)
        kinds = {kind for kind in set(map(type, parts)) if kind not in _VALUES and _is_entered(kind)}
        if any(map(is_special, kinds)):
            return True
        parts = [part for part in parts if type(part) in kinds]
        keys = list(map(id, parts))
        level = list({key: part for key, part in zip(keys, parts, strict=True) if key not in seen}.values())
        seen.update(keys)
    return False


def _may_be_entered(obj: Any) -> bool:
    kind: Any = type(obj)
    return byvalue.module_of(obj) is None if kind is dict else _is_entered(kind)


def _is_entered(kind: Any) -> bool:
    return not issubclass(kind, _NEVER_ENTERED) and rule_for(kind) is None  # a fork has mapped files


def _children(obj: Any) -> Iterable[tuple[Any, Any]]:
    """Return what an object holds, by index, key or attribute; nothing of a collection of values."""
    if is_a(obj, _COLLECTIONS):
        return itertools.chain(_items(obj), (("__dict__", each) for each in (getattr(obj, "__dict__", None),) if each))
    if is_a(obj, types.MethodType):
        return (("__self__", obj.__self__),)
    if is_a(obj, functools.partial):
        return (("func", obj.func), ("args", obj.args), ("keywords", obj.keywords))
    return _attributes(obj)


def _items(collection: Any) -> Iterable[tuple[Any, Any]]:
    values = collection.values() if is_a(collection, dict) else collection
    kinds = set(map(type, values))
    if kinds <= _VALUES:
        return ()
    if kinds <= _ROWS and _VALUES.issuperset(map(type, itertools.chain.from_iterable(values))):
        return ()
    return list(collection.items() if is_a(collection, dict) else enumerate(collection))


def _attributes(obj: Any) -> Iterable[tuple[str, Any]]:
    attributes: Any = getattr(obj, "__dict__", None)
    if is_a(attributes, dict):
        yield from list(attributes.items())
    if is_a(obj, types.FunctionType) and not is_imported(obj):
        yield from _closure(obj)
    kind: Any = type(obj)
    for name, member in slots_of(kind).items():
        try:
            yield name, member.__get__(obj)
        except AttributeError:  # it has no value yet
            continue


def is_imported(function: types.FunctionType) -> bool:
    """Return whether it belongs to a library, which itself knows what to do after a fork."""
    module = function.__module__
    return not byvalue.is_by_value(module) and byvalue.lookup(module, function.__qualname__) is function


def _closure(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue


@functools.lru_cache(maxsize=4096)
def slots_of(kind: Hashable) -> Mapping[str, types.MemberDescriptorType]:
    """Return the slots of a class, by name."""
    return {
        name: member
        for base in cast("type", kind).__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if is_a(member, types.MemberDescriptorType)
    }


def _rebuilder(holder: Any) -> Callable[[Any, Any, Any], Any] | None:
    """Return what makes another one of an immutable object (key, value before, value after), or None."""
    if is_a(holder, tuple):
        return lambda key, _, after: _tuple_like(holder, [*holder[:key], after, *holder[key + 1 :]])
    if is_a(holder, frozenset):
        return lambda _, before, after: (holder - {before}) | {after}
    if is_a(holder, types.MethodType):
        return lambda _, __, after: types.MethodType(holder.__func__, after)
    return None


def _tuple_like(row: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    make: Callable[[list[Any]], tuple[Any, ...]] = getattr(row, "_make", tuple)  # of a named tuple
    return make(items)
