"""Find objects that a forked worker inherits but cannot use, by a walk through a callable's contents."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from datamat.parallel import byvalue, logs
from datamat.parallel.arrays import rule_for
from datamat.parallel.pickling import describe_path
from datamat.parallel.shared import is_shared
from datamat.parallel.standins import is_a, is_registered, is_special, per_type, replacement, standin_of

_HOLDERS = (
    dict, list, tuple, set, frozenset, deque, functools.partial, types.MethodType, types.FunctionType, types.CellType,
)  # fmt: skip


class Unforkables:
    """Objects that a forked worker must replace in their holders before it uses these.

    They are found in attributes, slots, collections, bound methods, partials and closures. Objects are visited in bulk,
    in under a microsecond each, since `self` may hold a lot of data and each new pool does this.

    Args:
        roots: objects to begin with, by the name that users know, such as `self` of a bound method.
        only_registered: whether to look only for types that users have registered.

    Attributes:
        standins: type of each object that a stand-in replaces, by its path.
    """

    def __init__(self, roots: Mapping[str, Any], *, only_registered: bool = False) -> None:
        self.standins: dict[str, str] = {}
        self._roots = roots
        self._found: list[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = []
        above: list[list[Any]] = []
        for holders, specials in _levels(roots):
            for obj in specials:
                if is_shared(obj) or (only_registered and not is_registered(type(obj))):
                    continue
                reduction = replacement(obj, functools.partial(_place, roots, above, obj))
                if reduction is not None:
                    self.standins |= standin_of(reduction)
                    self._found.append((obj, *reduction))
            above.append(holders)

    def repair(self) -> None:
        """Put the replacements in place; locks are released in place, since other objects may refer to them."""
        new: dict[int, Any] = {}
        for obj, make, arguments in self._found:
            if hasattr(obj, "_at_fork_reinit") and not (is_registered(type(obj)) or is_a(obj, logging.Handler)):
                obj._at_fork_reinit()
            else:
                new[id(obj)] = make(*arguments)
        kept = []  # keeps the objects alive, so that no id is reused
        while new:
            holders = [
                holder
                for holders, _ in _levels(self._roots)
                for holder in holders
                if not new.keys().isdisjoint(map(id, gc.get_referents(holder)))
            ]
            rebuilt = {id(holder): made for holder in holders if (made := _rebuilt(holder, new)) is not None}
            for holder in holders:
                if id(holder) not in rebuilt:
                    _put(holder, new)
            new = rebuilt
            kept.append(holders)


def roots_of(function: Any) -> dict[str, Any]:
    """Return the object to begin with, by the name that users know: the `self` of a callable, or itself."""
    roots = {"partial": function} if is_a(function, functools.partial) else {}
    owner = innermost(function)
    if is_a(owner, types.MethodType):
        return roots | {"self": owner.__self__}
    return roots | {logs.label_of(owner): owner}


def innermost(function: Any) -> Any:
    """Return the function that nested partials call."""
    while is_a(function, functools.partial):
        function = function.func
    return function


def _levels(roots: Mapping[str, Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield, level by level, the objects that may hold others and those that may have to be replaced."""
    seen = {id(vars(module)) for module in list(sys.modules.values()) if hasattr(module, "__dict__")}
    holders = [root for root in roots.values() if not is_shared(root)]
    specials: list[Any] = []
    while holders or specials:
        yield holders, specials
        seen.update(map(id, holders))
        functions = [each for each in holders if type(each) is types.FunctionType]
        seen.update(id(each.__globals__) for each in functions)
        closed = set(map(id, filter(byvalue.is_imported, functions)))
        parts = gc.get_referents(*[each for each in holders if id(each) not in closed])
        kinds = set(map(type, parts))
        special, entered = set(filter(is_special, kinds)), set(filter(_is_entered, kinds))
        found = {id(part): part for part in parts if type(part) in special or type(part) in entered}
        parts = [part for key, part in found.items() if key not in seen]
        specials = [part for part in parts if type(part) in special]
        holders = [part for part in parts if type(part) not in special]
        seen.update(map(id, specials))


@per_type
def _is_entered(kind: Hashable) -> bool:
    """Return True if objects of this type may hold something to replace; forks keep mapped files."""
    cls: Any = kind
    if issubclass(cls, (type, types.ModuleType)) or rule_for(cls) is not None:
        return False
    return issubclass(cls, _HOLDERS) or cls.__dictoffset__ != 0 or bool(_slots_of(cls))


def _place(roots: Mapping[str, Any], above: list[list[Any]], obj: Any) -> str:
    """Return the path of an object, found through its holders on the levels above, up to a root."""
    stack = [obj]
    for holders in reversed(above):
        value = stack[0]
        holder = next(
            (each for each in holders if any(part is value for part in gc.get_referents(each))),
            None,
        )
        if holder is None:  # it has got a `__dict__` meanwhile
            holder = next(each for each in holders if any(part is value for part in _attributes(each).values()))
        attributes = _attributes(holder)
        between = [attributes] if any(part is value for part in attributes.values()) else []
        stack[:0] = [holder, *between]
    return describe_path(stack, next(name for name, root in roots.items() if root is stack[0]))


def _attributes(obj: Any) -> dict[str, Any]:
    found = dict(vars(obj)) if is_a(getattr(obj, "__dict__", None), dict) else {}
    kind: Any = type(obj)
    for name, member in _slots_of(kind).items():
        try:
            found[name] = member.__get__(obj)
        except AttributeError:  # it has no value yet
            continue
    return found


@functools.lru_cache(maxsize=4096)
def _slots_of(kind: Any) -> Mapping[str, types.MemberDescriptorType]:
    return {
        name: member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if is_a(member, types.MemberDescriptorType)
    }


def _rebuilt(holder: Any, new: Mapping[int, Any]) -> Any:
    """Return an immutable object with its parts replaced, by their ids; None for a mutable object."""
    if is_a(holder, tuple):
        make: Callable[[list[Any]], tuple[Any, ...]] = getattr(holder, "_make", tuple)  # of a named tuple
        return make([new.get(id(value), value) for value in holder])
    if is_a(holder, frozenset):
        return frozenset(new.get(id(value), value) for value in holder)
    if is_a(holder, types.MethodType):
        return types.MethodType(holder.__func__, new.get(id(holder.__self__), holder.__self__))
    return None


def _put(holder: Any, new: Mapping[int, Any]) -> None:
    """Replace parts, attributes and items of an object, by their ids."""
    if is_a(holder, functools.partial):
        parts = (new.get(id(value), value) for value in (holder.func, holder.args, holder.keywords))
        holder.__setstate__((*parts, vars(holder)))  # functools: in place
    elif is_a(holder, types.CellType):
        holder.cell_contents = new[id(holder.cell_contents)]
    elif is_a(holder, set):
        for value in [value for value in holder if id(value) in new]:
            holder.discard(value)
            holder.add(new[id(value)])
    elif is_a(holder, dict | list | deque):
        for key, value in list(holder.items() if is_a(holder, dict) else enumerate(holder)):
            if id(value) in new:
                holder[key] = new[id(value)]
    for name, value in _attributes(holder).items():
        if id(value) in new:
            _set_attribute(holder, name, new[id(value)])


def _set_attribute(obj: Any, name: str, value: Any) -> None:
    kind: Any = type(obj)
    if (slot := _slots_of(kind).get(name)) is not None:
        slot.__set__(obj, value)
    else:
        vars(obj)[name] = value  # not setattr, which the user may have overridden
