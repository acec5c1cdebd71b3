"""Send locks, queues, events and shared memory of `multiprocessing` and `multiprocess` to workers.

The two libraries send them only to their own children, at their start. Here they go with any callable, initializer or
argument, to a worker of any start method:

  named semaphore             opened by its name; those of the fork context have none
  unnamed semaphore           found among the inherited objects of a forked worker; no other process can open it
  pipe, shared memory         reopened as a file of the parent, and compared: its number may have been reused

Everything else consists of these (a `Queue` of three semaphores and a pipe, a `Value` of a lock and shared memory). The
library itself reassembles it, or it stays behind as a whole if one of its parts does.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from datamat.parallel.channel import place_of, reopen

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

Key = tuple[int, int]  # counter and id under which a library registers objects to repair after a fork
Inherited = weakref.WeakValueDictionary[tuple[str, Key], Any]

_known: weakref.WeakValueDictionary[tuple[str, str], Any] = weakref.WeakValueDictionary()  # semaphores by their names
_inherited: Inherited = weakref.WeakValueDictionary()  # in a forked worker: inherited objects
_is_worker = False
_trackers: dict[str, int | None] = {}  # in a worker: pids of resource trackers other than its own
_parent_pid: int | None = None  # in a forked worker


@functools.lru_cache(maxsize=4096)
def _library_of(kind: Hashable) -> str | None:
    for base in cast("type", kind).__mro__:
        if base.__module__ in _MODULES or f"{base.__module__}.{base.__qualname__}" in _TYPES:
            return base.__module__.partition(".")[0]
    return None


def is_shared(obj: Any) -> bool:
    """Return True for a lock, queue, event, value, ... of one of the libraries."""
    kind: Any = type(obj)
    return _library_of(kind) is not None or (may_be_shared(kind) and hasattr(obj, "_wrapper"))


def may_be_shared(kind: Any) -> bool:
    """Return True if objects of this type may be shared, such as `ctypes` objects made by `sharedctypes`."""
    return _library_of(kind) is not None or any(base.__module__ == "_ctypes" for base in kind.__mro__)


# ---------------------------------------------------------------- sending


class _Reopened:
    """A pipe or shared memory, for a library that needs a descriptor of it in another process."""

    def __init__(self, descriptor: int) -> None:
        import fcntl

        found = os.fstat(descriptor)
        if stat.S_ISSOCK(found.st_mode):
            raise ValueError("a socket")
        self._place = place_of(descriptor)
        self._file = (found.st_dev, found.st_ino)
        self._flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE

    def detach(self) -> int:
        """Return a descriptor for this process."""
        descriptor = reopen(self._place, self._flags)
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != self._file:
            os.close(descriptor)
            raise FileNotFoundError(f"{self._place} has been replaced by another file")
        return descriptor


class _Spawning:
    """Answers the libraries' requests for descriptors for a child that is being spawned."""

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
    """Return a function, its arguments, and a state or None, which rebuild the object in another process.

    Raises:
        Exception: the object cannot be sent.
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
    """Return why the object may not arrive in a worker, and the remedy."""
    kind: Any = type(obj)
    library, name = _library_of(kind) or "multiprocessing", kind.__qualname__
    if name == "Connection":
        return "it is closed, or a socket", f"make it with {library}.Pipe(duplex=False)"
    if name.startswith("Synchronized"):
        name = "Array" if name in ("SynchronizedArray", "SynchronizedString") else "Value"
    return (
        "it was made in the fork context, so only workers forked after that have it",
        f'make it with {library}.get_context("spawn").{name}(), which all workers can use',
    )


def _origin(library: str, obj: Any) -> tuple[int, str, Key | None]:
    """Return the process that made the object, and the key by which a fork of that process finds it."""
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
    """Rebuild the object that `parts` describes; return the stand-in `otherwise` if a part of it did not arrive."""
    held = (*arguments, *(state.values() if isinstance(state, dict) else state if isinstance(state, tuple) else ()))
    if any(type(part) is type(otherwise) for part in held):
        return otherwise
    try:
        obj = make(*arguments)
    except OSError as exc:  # a semaphore, a pipe or memory that is gone with its owner
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
    """Return the object if this process has inherited or made it, else None."""
    if key is None:
        return None
    if pid == os.getpid():
        return dict(_forked_with(library)).get(key)
    return _inherited.get((library, key)) if pid == _parent_pid else None


def _named(library: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...], state: Any) -> Any:
    """Return the semaphore of this name: one object per process, which counts how often a thread has taken it."""
    found = _known.get((library, name))
    if found is None:
        found = make(*arguments)
        found.__setstate__(state)
        _known[library, name] = found
    return found


def _attached(library: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return named shared memory; it stays owned by its creator.

    Python registers it with the resource tracker of each process that attaches to it; a tracker that the worker itself
    has started would unlink it when the worker ends (https://github.com/python/cpython/issues/82300).
    """
    made = make(*arguments)
    if _is_worker and _tracker_pid(library) != _trackers.get(library):
        sys.modules[f"{library}.resource_tracker"].unregister(getattr(made, "shm", made)._name, "shared_memory")
    return made


def _tracker_pid(library: str) -> int | None:
    """Return the pid of the resource tracker started by this process or by the one that it was forked from."""
    module = sys.modules.get(f"{library}.resource_tracker")
    return None if module is None else module._resource_tracker._pid


# ---------------------------------------------------------------- in a worker


def begin_worker(*, is_fork: bool) -> None:
    """Register the objects that the worker has inherited.

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
    _of_standard_library("_run_after_forkers")  # as in its own children; a queue's thread is not inherited


def end_worker() -> None:
    """Flush queues of the standard library; `multiprocess`, which runs the worker, flushes its own."""
    _of_standard_library("_run_finalizers")


def _of_standard_library(function: str) -> None:
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        getattr(util, function)()
