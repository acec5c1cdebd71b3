"""What a forked worker must replace in the objects that it inherits, by the rules of `standins`."""

from __future__ import annotations

import functools
import itertools
import types
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from datamat.parallel import byvalue, standins

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

__all__ = ["Hazard", "find_hazards"]

_VALUES = frozenset({str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, type(...)})
_ROWS = frozenset({tuple, list})
_COLLECTIONS = (dict, list, tuple, set, frozenset, deque)
_REBUILT = (tuple, frozenset, types.MethodType)
_NEVER_ENTERED = (type, types.ModuleType)
_MAX_VISITED = 100_000
_MAX_ITEMS = 1_000  # what longer collections hold is looked at, not what that holds in turn: they are data


class _Node:
    """An object on the way from the root.

    Attributes:
        obj: the object; a tuple that was put together anew replaces the earlier one here, too.
        parent: what holds it; None for a root.
        key: its index, key or attribute there; the name of a root.
    """

    __slots__ = ("key", "obj", "parent")

    def __init__(self, obj: Any, parent: _Node | None, key: Any) -> None:
        self.obj = obj
        self.parent = parent
        self.key = key

    def place(self) -> str:
        """Return how users reach the object."""
        if self.parent is None:
            return str(self.key)
        before = self.parent.place()
        if isinstance(self.parent.obj, set | frozenset):
            return before
        is_item = isinstance(self.parent.obj, _COLLECTIONS) and self.key != "__dict__"
        return f"{before}[{self.key!r}]" if is_item else f"{before}.{self.key}"

    def put(self, value: Any) -> None:
        """Have what holds the object hold another one instead."""
        assert self.parent is not None
        holder = self.parent.obj
        if isinstance(holder, dict | list | deque):
            holder[self.key] = value
        elif isinstance(holder, set):
            holder.discard(self.obj)
            holder.add(value)
        elif (rebuild := _rebuilder(holder)) is not None:
            self.parent.put(rebuild(self.key, self.obj, value))
        elif isinstance(holder, functools.partial):
            parts = {"func": holder.func, "args": holder.args, "keywords": holder.keywords, self.key: value}
            holder.__setstate__((*parts.values(), vars(holder)))  # type: ignore[attr-defined]  # functools: in place
        elif isinstance(holder, types.FunctionType) and self.key in holder.__code__.co_freevars:
            cells = holder.__closure__ or ()
            cells[holder.__code__.co_freevars.index(self.key)].cell_contents = value
        elif self.key in getattr(holder, "__dict__", ()):
            vars(holder)[self.key] = value  # not setattr: it may be the user's
        else:
            kind: Any = type(holder)
            _slots(kind)[self.key].__set__(holder, value)
        self.obj = value


class Hazard:
    """An attribute or item that a forked worker must replace before it uses the object.

    Attributes:
        place: how users reach it, as in `self.reader._conn`.
        reduction: what makes the replacement.
    """

    __slots__ = ("_node", "original_type", "place", "reduction")

    def __init__(self, node: _Node, place: str, reduction: standins.Reduction) -> None:
        self._node = node
        self.place = place
        self.reduction = reduction
        self.original_type = standins.type_name(node.obj)

    @property
    def is_standin(self) -> bool:
        """Is the replacement a stand-in?"""
        return self.reduction[0] is standins.Standin

    def repair(self) -> None:
        """Put the replacement in place; locks are freed where they are, since others may refer to them."""
        original = self._node.obj
        if hasattr(original, "_at_fork_reinit"):
            original._at_fork_reinit()
            return
        make, arguments = self.reduction
        self._node.put(make(*arguments))


def find_hazards(roots: Mapping[str, Any]) -> list[Hazard]:
    """Return what must be replaced in inherited objects.

    It is found through attributes, slots, collections, bound methods, partials and closures. Collections of mere
    values are passed over at the speed of C, since `self` may hold a lot of data, and each new pool asks.

    Args:
        roots: the objects by the name that users have for them, as in `self` of a bound method.
    """
    found: list[Hazard] = []
    seen = set(map(id, roots.values()))
    waiting = deque(_Node(obj, None, name) for name, obj in roots.items())
    for _ in range(_MAX_VISITED):
        if not waiting:
            break
        node = waiting.popleft()
        is_entered = not isinstance(node.obj, _COLLECTIONS) or len(node.obj) <= _MAX_ITEMS
        for key, value in _children(node.obj):
            kind: Any = type(value)
            if kind in _VALUES or id(value) in seen:
                continue
            child = _Node(value, node, key)
            if standins.is_special(kind):
                place = child.place()
                if (reduction := standins.replacement(value, place)) is not None:
                    found.append(Hazard(child, place, reduction))
                    continue
            if is_entered and not issubclass(kind, _NEVER_ENTERED):
                waiting.append(child)
                if not issubclass(kind, _REBUILT):  # those must be put together anew wherever they are
                    seen.add(id(value))
    return found


def _children(obj: Any) -> Iterable[tuple[Any, Any]]:
    """Return what an object holds, by index, key or attribute; nothing of a collection of values."""
    if isinstance(obj, _COLLECTIONS):
        return itertools.chain(_items(obj), (("__dict__", each) for each in (getattr(obj, "__dict__", None),) if each))
    if isinstance(obj, types.MethodType):
        return (("__self__", obj.__self__),)
    if isinstance(obj, functools.partial):
        return (("func", obj.func), ("args", obj.args), ("keywords", obj.keywords))
    return _attributes(obj)


def _items(collection: Any) -> Iterable[tuple[Any, Any]]:
    values = collection.values() if isinstance(collection, dict) else collection
    kinds = set(map(type, values))
    if kinds <= _VALUES:
        return ()
    if kinds <= _ROWS and _VALUES.issuperset(map(type, itertools.chain.from_iterable(values))):
        return ()
    return list(collection.items() if isinstance(collection, dict) else enumerate(collection))


def _attributes(obj: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(attributes := getattr(obj, "__dict__", None), dict):
        yield from list(attributes.items())
    if isinstance(obj, types.FunctionType) and not _is_imported(obj):
        yield from _closure(obj)
    kind: Any = type(obj)
    for name, member in _slots(kind).items():
        try:
            yield name, member.__get__(obj)
        except AttributeError:  # it has no value yet
            continue


def _is_imported(function: types.FunctionType) -> bool:
    """Is it a library's, which knows by itself what to do after a fork?"""
    module = function.__module__
    return not byvalue.is_by_value(module) and byvalue.lookup(module, function.__qualname__) is function


def _closure(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue


@functools.lru_cache(maxsize=4096)
def _slots(kind: Hashable) -> Mapping[str, types.MemberDescriptorType]:
    return {
        name: member
        for base in cast("type", kind).__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }


def _rebuilder(holder: Any) -> Callable[[Any, Any, Any], Any] | None:
    """Return what makes another one of an immutable object (key, value before, value after), or None."""
    if isinstance(holder, tuple):
        return lambda key, _, after: _tuple_like(holder, [*holder[:key], after, *holder[key + 1 :]])
    if isinstance(holder, frozenset):
        return lambda _, before, after: (holder - {before}) | {after}
    if isinstance(holder, types.MethodType):
        return lambda _, __, after: types.MethodType(holder.__func__, after)
    return None


def _tuple_like(row: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    make: Callable[[list[Any]], tuple[Any, ...]] = getattr(row, "_make", tuple)  # of a named tuple
    return make(items)
