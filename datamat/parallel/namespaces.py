"""The globals of code that travels by value, and who may change them.

Functions of one module share one dictionary in the worker, as they do at home. A worker keeps what its own code has
put into a global (an initializer that loads a model, a cache that fills) until the parent binds the name to another
object, as a notebook cell does that defines a function anew.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["bequeath_globals", "install_globals", "namespace", "namespace_key", "remember_globals", "version_of"]

_guard = threading.Lock()
_namespaces: dict[str, dict[str, Any]] = {}
_modules: list[types.ModuleType] = []  # keeps the stand-in modules whose dictionaries are in use
_versions: dict[tuple[str, str], tuple[weakref.ref[Any], int]] = {}  # in the parent: what was sent last, its number
_boxes: dict[tuple[str, str], _Box] = {}  # in the parent: those of `_versions` that nothing else keeps
_installed: dict[tuple[str, str], tuple[int, Any]] = {}  # in a worker: number and object that came last
_first_values: dict[str, dict[str, Any]] = {}  # in a worker: what it began with
_counter = itertools.count(1)


def version_of(key: str, name: str, value: Any, keeper: list[Any] | None = None) -> int:
    """Return a number that changes when the name is bound to another object.

    Args:
        key: of the namespace.
        name: the global.
        value: what it is bound to now.
        keeper: is given what must live as long as the number is to be the same for the same object; None keeps that
            until the name is bound to another one.
    """
    reference, version = _versions.get((key, name), (None, 0))
    held = None if reference is None else reference()  # None: it is gone; where None is the value, it is in a box
    if held is None or (held.value if isinstance(held, _Box) else held) is not value:
        _boxes.pop((key, name), None)
        version = next(_counter)
        try:
            held, reference = value, weakref.ref(value)
        except TypeError:  # numbers, strings, lists, ...: kept alive, since an id alone may come back as another object
            held = _Box(value)
            reference = weakref.ref(held)
        _versions[key, name] = reference, version
    if isinstance(held, _Box):
        if keeper is None:
            _boxes[key, name] = held
        else:
            keeper.append(held)
    return version


class _Box:
    """Keeps an object of which there are no weak references."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


def bequeath_globals(namespaces: Mapping[str, dict[str, Any]]) -> tuple[Callable[[], None], list[Any]]:
    """In the parent: let workers that are forked from now on have these globals as if they had been sent.

    A forked worker has the functions that it inherited, and those that come later by value: all are to see one
    namespace, and what an initializer has put there.

    Args:
        namespaces: the globals of code that travels by value, by their keys.

    Returns:
        A function that ends it, to be called after the fork, and what to keep as long as these workers live.
    """
    keeper: list[Any] = []
    added = {key: held for key, held in namespaces.items() if key != "__main__" and key not in _namespaces}
    _namespaces.update(added)
    inherited = {
        (key, name): (version_of(key, name, value, keeper), value)
        for key, held in namespaces.items()
        for name, value in list(held.items())
    }
    _installed.update(inherited)

    def end() -> None:
        for place in inherited:
            _installed.pop(place, None)
        for key in added:
            _namespaces.pop(key, None)

    return end, keeper


def remember_globals(key: str) -> None:
    """In a worker: note what the globals are before its own code can change them."""
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
    for key, known in _namespaces.items():
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
