"""The globals of code that travels by value, and who may change them.

Functions of one module share one dictionary in the worker, as they do at home. A worker keeps what its own code has
put into a global (an initializer that loads a model, a cache that fills) until the parent binds the name to another
object, as a notebook cell does that defines a function anew.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["bequeath_globals", "install_globals", "namespace", "namespace_key", "remember_globals", "version_of"]

_guard = threading.Lock()
_namespaces: dict[str, dict[str, Any]] = {}
_modules: list[types.ModuleType] = []  # keeps the stand-in modules whose dictionaries are in use
_versions: dict[
    tuple[str, str], tuple[Callable[[], Any], int]
] = {}  # in the parent: what was sent last, and its number
_installed: dict[tuple[str, str], tuple[int, Any]] = {}  # in a worker: number and object that came last
_first_values: dict[str, dict[str, Any]] = {}  # in a worker: what it began with
_counter = itertools.count(1)


def version_of(key: str, name: str, value: Any) -> int:
    """Return a number that changes when the name is bound to another object."""
    held = _versions.get((key, name))
    if held is not None and held[0]() is value:
        return held[1]
    try:
        reference: Callable[[], Any] = weakref.ref(value)
    except TypeError:  # numbers, strings, lists, ...: kept alive, since an id alone may come back as another object
        reference = functools.partial(_identity, value)
    version = next(_counter)
    _versions[key, name] = reference, version
    return version


def _identity(value: Any) -> Any:
    return value


def bequeath_globals(modules: dict[str, dict[str, Any]], functions: Iterable[Callable[..., Any]]) -> None:
    """In the parent: let workers that are forked from now on know these globals under the keys that will be sent.

    A forked worker has the functions that it inherited, and those that come later by value; all of one module are to
    see what an initializer has put into a global.

    Args:
        modules: globals of those whose code may travel by value, by their names.
        functions: what workers inherit; their globals may be those of no module.
    """
    _namespaces.update(modules)
    for each in functions:
        function: Any = each
        while isinstance(function, functools.partial):
            function = function.func
        if hasattr(function, "__globals__"):
            namespace_key(function)


def remember_globals() -> None:
    """In a worker: note what the globals are before its own code can change them."""
    for key in ("__main__", *_namespaces):
        _first_values[key] = dict(namespace(key))


def install_globals(shipped: dict[tuple[str, str], tuple[int, Any]], *, override: bool) -> None:
    """In a worker: bind the globals that came with some code, by namespace and name, with their version.

    Args:
        shipped: version and value of each.
        override: replace what is there, where that is older; else only add what is missing.
    """
    for (key, name), (version, value) in shipped.items():
        held = namespace(key)
        known = _installed.get((key, name))
        if known is None:
            first = _first_values.get(key, {})
            is_own = name in held and held[name] is not first.get(name, held[name])
        else:
            is_own = known[0] == version
        if name not in held or (override and not is_own):
            held[name] = value
        _installed[key, name] = version, value


def namespace_key(function: types.FunctionType) -> str:
    """Return the name under which sender and receiver hold the globals of a function."""
    held = function.__globals__
    name = function.__module__ or held.get("__name__") or "?"
    if held is sys.modules["__main__"].__dict__:
        return "__main__"
    for key, known in list(_namespaces.items()):
        if known is held:
            return key
    module = sys.modules.get(name)
    key = name if module is not None and module.__dict__ is held else f"{name}#{id(held):x}"
    _namespaces[key] = held
    return key


def namespace(key: str) -> dict[str, Any]:
    """Return the globals that stand for those of a module that travels by value."""
    if key == "__main__":
        return sys.modules["__main__"].__dict__
    with _guard:
        if key not in _namespaces:
            module = types.ModuleType(key.partition("#")[0])
            module.__dict__["__builtins__"] = __builtins__
            _modules.append(module)
            _namespaces[key] = module.__dict__
            if "#" not in key:
                sys.modules.setdefault(key, module)
        return _namespaces[key]
