"""What a fork inherits and cannot use, found by a walk through what a callable holds."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, cast

from datamat.parallel import byvalue, logs
from datamat.parallel.arrays import rule_for
from datamat.parallel.shared import is_shared
from datamat.parallel.standins import (
    Reduction,
    Standin,
    is_a,
    is_registered,
    is_special,
    name_in_places,
    replacement,
    step_to,
)

__all__ = [
    "Unforkable",
    "find_unforkables",
    "innermost",
    "is_imported",
    "roots_of",
    "slots_of",
]

_VALUES = frozenset({str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, type(...)})
_ROWS = frozenset({tuple, list})
_COLLECTIONS = (dict, list, tuple, set, frozenset, deque)
_REBUILT = (tuple, frozenset, types.MethodType)
_NEVER_ENTERED = (type, types.ModuleType)
_MAX_ITEMS = 1_000  # what longer collections hold is mostly data, and looked at together


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
