"""How callables travel.

The callable goes with its `self`, by dill, with everything that it needs of `__main__` by value. On top of dill, this
pickler repairs what dill gets wrong or cannot do (`standins`): locks arrive free, files are not
truncated, classes keep their identity, and what cannot travel arrives as a stand-in that names itself when used.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import types
import typing
from typing import TYPE_CHECKING, Any

import dill
from dill import _dill

from datamat.errors import UnpicklableError
from datamat.parallel import byvalue, namespaces, standins

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BUILTIN_TYPES", "PLAIN", "Capsule", "dumps_code", "load_code"]

Globals = dict[str, tuple[dict[str, Any], set[str]]]  # by namespace: the dictionary, and the names used of it
Shipped = dict[tuple[str, str], tuple[int, Any]]  # by namespace and name: version and value

_MAX_STANDINS = 100
BUILTIN_TYPES = set(_dill._typemap.values()) | {type(None), type(...), type(NotImplemented)}
PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


class CapsulePickler(dill.Pickler):  # type: ignore[misc]  # dill ships no types
    """A dill pickler that sends code by value safely.

    Args:
        file: where the bytes go.
        homewards: is the receiver the process that the code came from? Then code goes by id, without globals.
        banned: ids of objects for which a stand-in travels, with the reason.
        buffers: collects large buffers (arrays) that travel beside the stream; None keeps them in it.
    """

    dispatch = dill.Pickler.dispatch.copy()

    def __init__(
        self,
        file: Any,
        *,
        homewards: bool = False,
        banned: dict[int, str] | None = None,
        buffers: Callable[[pickle.PickleBuffer], Any] | None = None,
    ) -> None:
        super().__init__(file, protocol=5, byref=False, recurse=False, buffer_callback=buffers)
        self._homewards = homewards
        self._banned = banned or {}
        self._stack: list[Any] = []
        self.failure: list[Any] | None = None  # the stack where the first error struck
        self.standins: dict[str, str] = {}
        self.modules: set[str] = set()
        self.globals: Globals = {}

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        """Save one object; every object of the graph passes here."""
        if type(obj) in PLAIN or id(obj) in self.memo:
            return super().save(obj, save_persistent_id)
        self._stack.append(obj)
        try:
            return self._save_special(obj) or super().save(obj, save_persistent_id)
        except Exception:
            if self.failure is None:
                self.failure = list(self._stack)
            raise
        finally:
            self._stack.pop()

    def _save_special(self, obj: Any) -> bool:
        """Save what dill would get wrong; say whether `obj` was such a thing."""
        reason = self._banned.get(id(obj))
        kind = type(obj)
        if isinstance(obj, types.ModuleType):
            return self._save_module(obj)
        if reason is not None:
            self._save_standin(obj, reason)
        elif kind is types.FunctionType:
            self._save_function(obj)
        elif isinstance(obj, type):
            return self._save_class(obj)
        elif kind in _SAVERS:
            return _SAVERS[kind](self, obj)
        elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            self.save_reduce(*obj.__reduce_ex__(5), obj=obj)  # dill's own way copies the data into the stream
        else:
            place = self._place()
            reduction = standins.replacement(obj, place)
            if reduction is None:
                return False
            if reduction[0] is standins.Standin:
                self.standins[place] = standins.type_name(obj)
            self.save_reduce(*reduction, obj=obj)
        return True

    def _save_standin(self, obj: Any, reason: str) -> None:
        place = self._place()
        self.standins[place] = standins.type_name(obj)
        self.save_reduce(*standins.standin_reduction(obj, place, reason), obj=obj)

    def _place(self) -> str:
        return describe_path(self._stack)

    def _goes_by_name(self, obj: Any) -> bool:
        """Does the receiver find this function or class under its name?"""
        module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", "")
        if "<locals>" in name or (byvalue.is_by_value(module) and not self._homewards):
            return False
        if module is None or byvalue.lookup(module, name) is not obj:
            return False
        self.modules.add(module)
        return True

    def _save_function(self, function: types.FunctionType) -> None:
        if self._goes_by_name(function):
            self.save_global(function, name=function.__qualname__)
            return
        if hasattr(function, "dispatch") and hasattr(function, "registry"):
            registered = tuple(function.registry.items())
            self.save_reduce(byvalue.single_dispatch_of, (registered,), obj=function)
            return
        state = (function.__defaults__, function.__kwdefaults__, function.__annotations__, function.__doc__,
                 function.__qualname__, function.__module__, function.__dict__)  # fmt: skip
        module = sys.modules.get(function.__module__ or "")
        at_home = module is not None and module.__dict__ is function.__globals__
        if at_home and not byvalue.is_by_value(function.__module__):
            make: Callable[..., Any] = byvalue.make_function_in
            home = function.__module__
        else:
            make, home = byvalue.make_function, namespaces.namespace_key(function)
            names = self.globals.setdefault(home, (function.__globals__, set()))[1]
            names |= byvalue.global_names(function.__code__)
        parts = (function.__code__, home, function.__name__, function.__closure__)
        self.save_reduce(make, parts, state, None, None, byvalue.fill_function, obj=function)

    def _save_class(self, cls: type) -> bool:
        if cls in BUILTIN_TYPES:
            return False
        if self._homewards and (identity := byvalue.known_id(cls)) is not None:
            self.save_reduce(byvalue.class_by_id, (identity,), obj=cls)
        elif self._goes_by_name(cls):
            self.save_global(cls, name=cls.__qualname__)
        elif byvalue.is_by_value(cls.__module__) or "<locals>" in cls.__qualname__ or byvalue.lost_its_name(cls):
            make, arguments, state = byvalue.class_parts(cls)
            self.save_reduce(make, arguments, state, None, None, byvalue.fill_class, obj=cls)
        else:
            return False
        return True

    def _save_module(self, module: types.ModuleType) -> bool:
        """Send a module by its name; dill would send the content of those outside the standard library's places."""
        name = module.__name__
        if sys.modules.get(name) is not module or (name != "__main__" and byvalue.is_by_value(name)):
            return False
        self.modules.add(name)
        self.save_reduce(importlib.import_module, (name,), obj=module)
        return True

    def _save_cell(self, cell: types.CellType) -> bool:
        try:
            content = (cell.cell_contents,)
        except ValueError:  # empty
            self.save_reduce(byvalue.make_cell, (), obj=cell)
        else:
            self.save_reduce(byvalue.make_cell, (), content, None, None, byvalue.set_cell, obj=cell)
        return True

    def _save_type_variable(self, variable: Any) -> bool:
        if not byvalue.is_by_value(variable.__module__):
            return False
        variance = (variable.__covariant__, variable.__contravariant__)
        parts = (variable.__name__, variable.__bound__, variable.__constraints__, variance, variable.__module__)
        self.save_reduce(byvalue.type_variable, parts, obj=variable)
        return True

    def _save_lru_cache(self, cached: Any) -> bool:
        if self._goes_by_name(cached):
            return False
        self.save_reduce(byvalue.lru_cache_of, (cached.__wrapped__, cached.cache_parameters()), obj=cached)
        return True

    def _save_container(self, container: Any) -> bool:
        """Send a large container of plain values by the C pickle."""
        if len(container) < 64 or not _is_plain(container):
            return False
        self.save_reduce(pickle.loads, (pickle.dumps(container, 5),), obj=container)
        return True


_SAVERS: dict[type, Callable[[CapsulePickler, Any], bool]] = {
    types.CellType: CapsulePickler._save_cell,
    typing.TypeVar: CapsulePickler._save_type_variable,
    functools._lru_cache_wrapper: CapsulePickler._save_lru_cache,
    list: CapsulePickler._save_container,
    dict: CapsulePickler._save_container,
}


def _is_plain(container: list[Any] | dict[Any, Any]) -> bool:
    values = container.values() if isinstance(container, dict) else container
    keys = container if isinstance(container, dict) else ()
    return all(type(value) in PLAIN for value in values) and all(type(key) in PLAIN for key in keys)


_CONTAINERS = (dict, list, tuple, set, frozenset)


def describe_path(stack: list[Any]) -> str:
    """Return how users reach the last object of a pickler's stack: `self.reader._conn`, `fit.<locals>[0]`."""
    place = ""
    for i, obj in enumerate(stack):
        before = stack[i - 1] if i else None
        method = stack[i - 2] if i > 1 else None
        if isinstance(method, types.MethodType) and obj is method.__self__:
            place = f"{place}.__self__" if place else "self"
        elif isinstance(before, dict):
            key = next((key for key, value in before.items() if value is obj), None)
            owner = stack[i - 2] if i > 1 else None
            is_attribute = isinstance(key, str) and not isinstance(owner, dict | list | set | frozenset | None)
            place += f".{key}" if is_attribute else f"[{key!r}]"
        elif isinstance(before, list):
            place += f"[{next((n for n, value in enumerate(before) if value is obj), '?')}]"
        elif not place and isinstance(obj, types.FunctionType):
            place = obj.__qualname__
    return place or standins.type_name(stack[-1])


def _culprit(stack: list[Any]) -> Any:
    """Return the object to replace: the failing one, or what holds it as an attribute or item."""
    for i in range(len(stack) - 1, 0, -1):
        in_cell = i > 1 and isinstance(stack[i - 2], types.CellType)
        if isinstance(stack[i - 1], dict | list) or in_cell:
            if isinstance(stack[i], _CONTAINERS) and i < len(stack) - 1:
                continue
            return stack[i]
    return None


# ---------------------------------------------------------------- code


class Capsule(typing.NamedTuple):
    """A callable, ready to travel.

    Attributes:
        stream: the pickle.
        buffers: large buffers beside it.
        standins: type by place of what could not travel.
        modules: installed modules that it refers to.
    """

    stream: bytes
    buffers: tuple[pickle.PickleBuffer, ...]
    standins: dict[str, str]
    modules: tuple[str, ...]


def dumps_code(obj: Any, *, homewards: bool = False) -> Capsule:
    """Return `obj` and the globals that its code uses, ready to travel.

    Raises:
        UnpicklableError: it cannot travel, not even with stand-ins for some of its attributes.
    """
    banned: dict[int, str] = {}
    kept: list[Any] = []  # ids stay valid as long as the objects live
    first = _explore(obj, banned, kept, homewards)
    needed = {} if homewards else first.pickler.globals
    shipped = _gather_globals(needed, banned, kept)
    if not shipped:
        return first.capsule()
    # Once more, now behind its globals: code that runs while `obj` is rebuilt (__setstate__, a metaclass) needs them.
    second = _Pass(homewards, banned)
    second.pickler.dump((shipped, obj))
    return second.capsule()


class _Pass:
    """One run of the pickler."""

    def __init__(self, homewards: bool, banned: dict[int, str]) -> None:
        self._out = io.BytesIO()
        self._buffers: list[pickle.PickleBuffer] = []
        self.pickler = CapsulePickler(self._out, homewards=homewards, banned=banned, buffers=_aside(self._buffers))

    def capsule(self) -> Capsule:
        modules = tuple(sorted(filter(byvalue.is_installed, self.pickler.modules)))
        return Capsule(self._out.getvalue(), tuple(self._buffers), self.pickler.standins, modules)


def _aside(buffers: list[pickle.PickleBuffer]) -> Callable[[pickle.PickleBuffer], bool]:
    def take(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < 1 << 14:
            return True  # small ones stay in the stream
        buffers.append(buffer)
        return False

    return take


def _explore(obj: Any, banned: dict[int, str], kept: list[Any], homewards: bool) -> _Pass:
    """Pickle `obj` without its globals, again and again until it works, banning what cannot travel."""
    while True:
        attempt = _Pass(homewards, banned)
        try:
            attempt.pickler.dump(({}, obj))
        except Exception as exc:  # a user's __reduce__ may raise anything
            stack = (attempt.pickler.failure or [None, obj])[1:]
            culprit = _culprit(stack)
            if culprit is None or culprit is obj or id(culprit) in banned or len(banned) >= _MAX_STANDINS:
                raise UnpicklableError(
                    f"{describe_path(stack)}: {standins.type_name(stack[-1])} cannot be sent to a worker "
                    f"({type(exc).__name__}: {exc}); {standins.REMEDY}, or pass what it is made from"
                ) from exc
            banned[id(culprit)] = f"{type(exc).__name__}: {exc}"
            kept.append(culprit)
        else:
            return attempt


def _gather_globals(needed: Globals, banned: dict[int, str], kept: list[Any]) -> Shipped:
    """Return the globals that code uses, directly or through other globals; stand-ins for those that cannot go."""
    shipped: Shipped = {}
    waiting = _unseen(needed, shipped)
    while waiting:
        for key, name, value in waiting:
            version = namespaces.version_of(key, name, value)
            try:
                more = _explore(value, banned, kept, homewards=False).pickler.globals
            except UnpicklableError as exc:
                stand_in = standins.Standin(f"global {name}", standins.type_name(value), str(exc))
                shipped[key, name] = version, stand_in
                continue
            shipped[key, name] = version, value
            for other, (held, names) in more.items():
                needed.setdefault(other, (held, set()))[1].update(names)
        waiting = _unseen(needed, shipped)
    return shipped


def _unseen(needed: Globals, seen: Shipped) -> list[tuple[str, str, Any]]:
    return [
        (key, name, held[name])
        for key, (held, names) in needed.items()
        for name in sorted(names)
        if name in held and (key, name) not in seen
    ]


def load_code(stream: bytes, buffers: typing.Iterable[Any] = (), *, override: bool = True) -> Any:
    """Return the object of a capsule, its globals installed.

    Args:
        stream: `Capsule.stream`.
        buffers: `Capsule.buffers`.
        override: replace globals that an earlier capsule brought.
    """
    # Not from a file or a network: from a process of our own, over its own socket.
    unpickler = dill.Unpickler(io.BytesIO(stream), buffers=buffers, ignore=True)  # noqa: S301
    shipped, obj = unpickler.load()
    namespaces.install_globals(shipped, override=override)
    return obj
