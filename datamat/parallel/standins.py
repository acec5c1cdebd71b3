"""What arrives in a worker in place of objects that cannot travel, or must not travel as they are.

Three kinds, decided by `replacement`:

fresh       locks, conditions, events, thread pools, thread-locals: a new one in the same configuration. A lock arrives
            free. (dill restores every RLock locked for ever: https://github.com/uqfoundation/dill/issues/321.)
reopened    files open for reading: by path, at the same position. (dill also re-opens files for *writing* by their
            mode, which truncates them.)
stand-in    connections, sockets, generators, files open for writing, ...: a `Standin`, which raises an error that says
            what it was and what to do, as soon as it is used. Never a silent None.
"""

from __future__ import annotations

import contextvars
import functools
import io
import logging
import os
import sys
import threading
import types
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn, cast

from datamat.errors import UnpicklableError
from datamat.parallel import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["REMEDY", "Reduction", "Standin", "is_special", "replacement", "standin_reduction", "type_name"]

Reduction = tuple["Callable[..., Any]", tuple[Any, ...]]
REMEDY = "create it in the worker: give the class a method `setup_worker(self)`, which runs there once"


class Standin:
    """Stands for an object that stayed in the parent; using it raises `UnpicklableError`."""

    __slots__ = ("_datamat_place", "_datamat_reason", "_datamat_type")

    def __init__(self, place: str, type_name: str, reason: str = "") -> None:
        object.__setattr__(self, "_datamat_place", place)
        object.__setattr__(self, "_datamat_type", type_name)
        object.__setattr__(self, "_datamat_reason", reason)

    def __repr__(self) -> str:
        return f"<stand-in for {self._datamat_place}: {self._datamat_type}>"

    def __reduce__(self) -> Reduction:
        return Standin, (self._datamat_place, self._datamat_type, self._datamat_reason)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # what copy, pickle and inspect look for
        self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        reason: str = f" ({self._datamat_reason})" if self._datamat_reason else ""
        raise UnpicklableError(
            f"{self._datamat_place}: {self._datamat_type} cannot be sent to a worker{reason}; {REMEDY}"
        )

    __call__ = __getitem__ = __setitem__ = __delitem__ = __iter__ = __next__ = __len__ = _refuse
    __contains__ = __bool__ = __enter__ = __exit__ = __int__ = __float__ = __add__ = __setattr__ = _refuse


def standin_reduction(obj: object, place: str, reason: str = "") -> Reduction:
    """Return how a stand-in for `obj` is made in the worker."""
    return Standin, (place, type_name(obj), reason)


def type_name(obj: object) -> str:
    """Return the name of the object's type as users write it: `sqlite3.Connection`, `generator`."""
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


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


# ---------------------------------------------------------------- stand-ins

_STANDIN_TYPES: tuple[type, ...] = (
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.FrameType,
    contextvars.ContextVar,
    threading.Thread,
    Executor,
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


def _is_own_pool(kind: type) -> bool:
    return any(base.__module__ == "datamat.parallel.executor" for base in kind.__mro__)


@functools.lru_cache(maxsize=4096)
def is_special(kind: Hashable) -> bool:
    """May `replacement` have something for objects of this type?"""
    assert isinstance(kind, type)
    if kind in _FRESH or issubclass(kind, (*_LOGGING, *_FILES)):
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
        obj: any object.
        place: how users reach it, as in `self.reader._conn`.
    """
    kind: Any = type(obj)
    if not is_special(kind):
        return None
    if (fresh := _FRESH.get(kind)) is not None:
        return fresh(obj)
    if issubclass(kind, _LOGGING):
        return _logging_reduction(obj)
    if issubclass(kind, _FILES):
        return _file(obj, place)
    if _is_own_pool(kind):
        return cast("Reduction", obj.__reduce__())  # a serial one in a worker
    return standin_reduction(obj, place)
