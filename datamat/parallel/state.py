"""What a callable holds, as it was at one moment: to know before each call, without a pickle, whether it has changed.

A walk goes through `self`, closures, partials and containers, and notes of each object what it holds, by identity.
Later all of it is compared at the speed of C: 1 us for a `self` of a few attributes, 2 ms for a list of 100,000. What
cannot be changed is not looked into. What hides its content from Python (an array, the inside of a table, a model) is
known by a digest of its content, which takes 0.1 ms per MB; what makes its own pickle, by a digest of that.

Of globals that code by value uses, the binding counts; a container that is changed in place is not sent again. What
such a global holds is searched for more code, whose globals count as well.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import gc
import io
import logging
import operator
import pathlib
import re
import threading
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import chain, repeat, starmap
from typing import TYPE_CHECKING, Any, cast

import xxhash

from datamat.parallel import byvalue, pickling, shared, standins, unforkable
from datamat.parallel.errors import UnpicklableError

if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Collection, Hashable, Iterable


__all__ = ["State"]

_FIXED = (
    str, bytes, int, float, complex, type(None), type(...), type(NotImplemented), range, slice, enum.Enum,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction,
    pathlib.PurePath, uuid.UUID, re.Pattern, types.ModuleType, types.CodeType, property, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
)  # fmt: skip
_SETTLED = (tuple, frozenset)  # cannot change themselves
_CONTAINER_TYPES = (dict, list, deque, set, *_SETTLED)
_CONTAINERS = frozenset({OrderedDict, defaultdict, Counter, *_CONTAINER_TYPES})
_FUNCTION_PARTS = tuple(map(operator.attrgetter, ("__code__", "__defaults__", "__kwdefaults__", "__dict__")))
_PARTS: dict[type, tuple[Callable[[Any], Any], ...]] = {
    kind: tuple(map(operator.attrgetter, names))
    for kind, names in {
        types.FunctionType: ("__defaults__", "__kwdefaults__", "__dict__", "__closure__"),
        types.CellType: ("cell_contents",),
        types.MethodType: ("__func__", "__self__"),
        types.BuiltinFunctionType: ("__self__",),
        functools.partial: ("func", "args", "keywords"),
        functools._lru_cache_wrapper: ("__wrapped__",),
    }.items()
}
_KNOWN_SPECIALS = (  # they refer to nothing that refers to the callable
    type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore,
    logging.Logger, logging.Handler, io.IOBase,
)  # fmt: skip
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made at run time, as all classes that are written in Python
_NOTHING = object()


class State:
    """What a callable holds now.

    Args:
        function: callable whose attributes, closure and globals are examined.

    Attributes:
        may_rest: whether nothing kept here keeps the callable alive once `forget_owner` is called, nor, if that is a
            function, data of its globals.
        sees_all_code: whether no global of the callable could hide more code in an object that shows nothing to Python.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._owner = _owner_of(function)
        self.sees_all_code = True
        self.may_rest = self._owner is not None or _is_fixed(function)
        self._is_owner_noted = False
        self._instances: list[Any] = []
        self._mappings: list[dict[Any, Any]] = []
        self._rows: list[Collection[Any]] = []
        self._slots: list[tuple[Callable[[Any], Any], Any]] = []
        self._owner_slots: list[Callable[[Any], Any]] = []
        self._namespaces: list[dict[str, Any]] = []
        self._names: list[str] = []  # of globals, each in the namespace that stands at the same place
        self._contents: list[tuple[Any, bytes]] = []
        self._specials: list[tuple[Any, Any]] = []
        self._walk(function)
        mappings = self._all_mappings()
        self._sizes_before = self._sizes(mappings)
        self._held_before = list(self._held(mappings))

    def is_current(self) -> bool:
        """Return whether the callable still holds the same."""
        try:
            mappings = self._all_mappings()
            return (
                self._sizes(mappings) == self._sizes_before
                and (
                    all(map(operator.is_, self._held(mappings), self._held_before))
                    or all(map(_are_same, self._held(mappings), self._held_before))
                )
                and all(_reduction_of(special) == reduction for special, reduction in self._specials)
                and all(_digest(content) == digest for content, digest in self._contents)
            )
        except Exception:  # noqa: BLE001 -- it is being changed by another thread; whoever pickles it will see
            return False

    def forget_owner(self) -> None:
        """Release the function, or the object whose method it is."""
        self._owner = None
        if self._is_owner_noted:
            self._instances[0] = None

    def remember_owner(self, function: Callable[..., Any]) -> None:
        """Hold the function, or the object whose method it is, again."""
        self._owner = _owner_of(function)
        if self._is_owner_noted:
            self._instances[0] = self._owner

    # ------------------------------------------------------------ the walk

    def _walk(self, function: Callable[..., Any]) -> None:
        self._seen: dict[int, Any] = {}  # an id is that of one object as long as this lives
        self._seen_names: set[tuple[int, str]] = set()
        seen = self._seen
        self._code: list[Any] = []  # values of globals, which may hold code
        self._waiting: list[Any] = [function if self._owner is None else self._owner]
        if isinstance(function, types.MethodType):
            self._note_globals(function.__func__)
        while self._waiting:
            value = self._waiting.pop()
            if id(value) not in seen:
                seen[id(value)] = value
                self._visit(value)
            elif value is self._owner:
                self.may_rest = False
        searched: dict[int, Any] = {}
        while self._code:
            value = self._code.pop()
            if type(value) not in pickling.PLAIN and id(value) not in searched:
                searched[id(value)] = value
                self._search(value)
        del self._seen, self._seen_names, self._code, self._waiting

    def _visit(self, value: Any) -> None:
        kind: Any = type(value)
        if kind in pickling.PLAIN:
            return
        if _is_transparent(kind):
            self._note_instance(value)
        elif kind in _CONTAINERS:
            self._note_container(value)
        elif standins.is_a(value, type):
            self._note_class(value)
        elif standins.is_a(value, types.MethodType | types.BuiltinFunctionType):
            self._waiting += (getattr(value, "__func__", None), value.__self__)
        elif kind is functools.partial:
            self._waiting += (value.func, value.args, value.keywords)
        elif not (_is_fixed(value) or _is_number(kind)):
            self._visit_strange(value, kind)

    def _visit_strange(self, value: Any, kind: Any) -> None:
        if kind is types.FunctionType:
            self._note_function(value)
        elif standins.is_special(kind) and (shared.is_shared(value) or standins.replacement(value, "") is not None):
            self.may_rest &= standins.is_a(value, _KNOWN_SPECIALS) or shared.is_shared(value)
            self._specials.append((value, _reduction_of(value)))
        else:
            holds_nothing = not gc.is_tracked(value) or kind.__module__.partition(".")[0] in ("array", "numpy")
            self.may_rest &= value is not self._owner and holds_nothing
            self._contents.append((value, _digest(value)))

    def _note_container(self, value: Any) -> None:
        if standins.is_a(value, dict):
            self._mappings.append(value)
            self._look_at(value.keys())
            self._look_at(value.values())
        else:
            if not standins.is_a(value, _SETTLED):
                self._rows.append(value)
            self._look_at(value)

    def _look_at(self, values: Any) -> None:
        """Visit what a container holds, unless that cannot change: plain data is skipped at the speed of C."""
        kinds = set(map(type, values))
        if kinds <= pickling.PLAIN:
            return
        if kinds == {tuple} and pickling.PLAIN.issuperset(map(type, chain.from_iterable(values))):
            return
        self._waiting.extend(values)

    def _note_instance(self, value: Any) -> None:
        kind: Any = type(value)
        self._note_class(kind)
        attributes = getattr(value, "__dict__", None)
        if attributes is not None:
            self._is_owner_noted |= value is self._owner  # then it is the first
            self._instances.append(value)
            self._look_at(attributes.values())
        for member in unforkable.slots_of(kind).values():
            self._note_slot(member.__get__, value)
        if standins.is_a(value, _CONTAINER_TYPES):
            self.may_rest &= value is not self._owner
            self._note_container(value)

    def _note_slot(self, get: Callable[[Any], Any], holder: Any) -> None:
        if holder is self._owner:
            self._owner_slots.append(get)
        else:
            self._slots.append((get, holder))
        self._waiting.append(_value_of(get, holder))

    def _note_function(self, function: types.FunctionType) -> None:
        for get in _FUNCTION_PARTS:
            self._note_slot(get, function)
        for cell in function.__closure__ or ():
            self._note_slot(_content_of, cell)
        self._note_globals(function)

    def _note_class(self, cls: type) -> None:
        """Note the globals that methods of a class by value use; the class itself is sent once."""
        for base in cls.__mro__[:-1]:
            if (base is cls or id(base) not in self._seen) and byvalue.is_by_value(base.__module__):
                for held in list(vars(base).values()):
                    self._note_globals(getattr(held, "__func__", getattr(held, "fget", held)))
            self._seen[id(base)] = base

    def _note_globals(self, function: Any) -> None:
        """Note the globals of a function that travels by value."""
        if not standins.is_a(function, types.FunctionType) or not byvalue.is_by_value(function.__module__):
            return
        held = function.__globals__
        for name in byvalue.global_names(function.__code__):
            if (id(held), name) not in self._seen_names:
                self._seen_names.add((id(held), name))
                self._namespaces.append(held)
                self._names.append(name)
                value = held.get(name)
                if standins.is_a(self._owner, types.FunctionType):
                    self.may_rest &= value is not self._owner and _is_light(value)
                self._code.append(value)

    def _search(self, value: Any) -> None:
        """Note the globals of code in what a global holds, but not what it holds."""
        kind: Any = type(value)
        if standins.is_a(value, type):
            if id(value) not in self._seen:
                self._note_class(value)
        elif not (_is_fixed(value) or _is_number(kind)):
            if kind is types.FunctionType:
                self._note_globals(value)
            elif _is_transparent(kind):
                self._note_class(kind)
            parts = _parts_of(value, kind)
            self._code += parts or ()
            self.sees_all_code &= parts is not None or kind is object or standins.is_special(kind)

    # ------------------------------------------------------------ the look

    def _all_mappings(self) -> list[dict[Any, Any]]:
        return [*self._mappings, *cast("Iterable[dict[Any, Any]]", map(vars, self._instances))]

    def _sizes(self, mappings: list[dict[Any, Any]]) -> list[int]:
        return [*map(len, mappings), *map(len, self._rows)]

    def _held(self, mappings: list[dict[Any, Any]]) -> Iterable[Any]:
        """Return what is held now: kinds, keys, values, items, slots and globals."""
        return chain(
            map(type, self._instances),
            chain.from_iterable(mappings),
            chain.from_iterable(map(dict.values, mappings)),
            chain.from_iterable(self._rows),
            starmap(_value_of, self._slots),
            map(_value_of, self._owner_slots, repeat(self._owner)),
            map(dict.get, self._namespaces, self._names, repeat(_NOTHING)),
        )


def _owner_of(function: Callable[..., Any]) -> Any:
    """Return what holds what the callable holds: the object whose method it is, or the function; None for others."""
    if isinstance(function, types.MethodType):
        return function.__self__
    return function if standins.is_a(function, types.FunctionType) else None


def _is_fixed(value: Any) -> bool:
    return standins.is_a(value, _FIXED) or (standins.is_a(value, types.FunctionType) and unforkable.is_imported(value))


def _parts_of(value: Any, kind: Any) -> Collection[Any] | None:
    """Return what it holds that may be code, or hold code; None where Python cannot know."""
    if kind in _PARTS:
        return [_value_of(get, value) for get in _PARTS[kind]]
    if kind in _CONTAINERS:
        held = (*value, *value.values()) if standins.is_a(value, dict) else value
        return () if pickling.PLAIN.issuperset(map(type, held)) else held
    if _is_transparent(kind):
        slots = (_value_of(member.__get__, value) for member in unforkable.slots_of(kind).values())
        return (*getattr(value, "__dict__", {}).values(), *slots)
    return None


def _is_light(value: Any) -> bool:
    """Return whether nobody minds that it is kept: it holds no data."""
    if type(value) is types.FunctionType:
        return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__)
    is_class = standins.is_a(value, type) and not byvalue.is_by_value(value.__module__)
    return type(value) in pickling.PLAIN or is_class or _is_fixed(value)


def _are_same(now: Any, before: Any) -> bool:
    """Return whether these are one object, or indistinguishable numbers or strings."""
    if now is before:
        return True
    kind = type(now)
    if kind is not type(before) or kind not in pickling.PLAIN or now != before:
        return False
    return now != 0 or repr(now) == repr(before)  # 0.0 and -0.0


def _value_of(get: Callable[[Any], Any], obj: Any) -> Any:
    try:
        return get(obj)
    except (AttributeError, ValueError):  # a slot, or a cell, that has no value yet
        return _NOTHING


def _content_of(cell: types.CellType) -> Any:
    return cell.cell_contents


def _reduction_of(special: Any) -> Any:
    """Return what a worker gets for it, as far as that can change: the position in a file, say."""
    return None if shared.is_shared(special) else standins.replacement(special, "")


def _digest(obj: Any) -> bytes:
    """Return a digest of what would be sent of an object; nothing, where it cannot be sent."""
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    try:
        pickling.dumps_fast(obj, out, to_parent=False, buffers=buffers.append)
        stream = out.getvalue()
    except Exception:  # noqa: BLE001 -- whatever the C pickler cannot do, the other one tries
        try:
            pickled = pickling.dumps_code(obj)
        except UnpicklableError:
            return b""
        stream, buffers = pickled.stream, list(pickled.buffers)
    hasher = xxhash.xxh3_128(stream)
    for buffer in buffers:
        hasher.update(buffer.raw())
    return hasher.digest()


@functools.lru_cache(maxsize=4096)
def _is_number(kind: Hashable) -> bool:
    """Return whether it is a scalar, or a dtype, of numpy."""
    names = {f"{base.__module__}.{base.__qualname__}" for base in cast("type", kind).__mro__}
    return bool(names & {"numpy.generic", "numpy.dtype"}) and "numpy.void" not in names


@standins.per_type
def _is_transparent(kind: Hashable) -> bool:
    """Return whether objects of this class consist of their attributes, slots and items alone."""
    cls = cast("type", kind)
    if cls is types.SimpleNamespace:
        return True
    if cls in _CONTAINERS or standins.is_special(cls) or issubclass(cls, (type, *_FIXED)):
        return False
    if cls.__reduce__ is not object.__reduce__ or cls.__reduce_ex__ is not object.__reduce_ex__:
        return False
    for base in cls.__mro__[:-1]:
        own, parent = vars(base), base.__base__
        if base in _CONTAINERS:
            continue
        is_of_c = not base.__flags__ & _HEAP_TYPE or standins.is_a(own.get("__new__"), types.BuiltinFunctionType)
        # A class of Python is larger than its base by its slots alone.
        words = sum(name in own for name in ("__dict__", "__weakref__"))
        words += (
            sum(standins.is_a(each, types.MemberDescriptorType) for each in own.values()) if "__slots__" in own else 0
        )
        if is_of_c or parent is None or base.__basicsize__ - parent.__basicsize__ > 8 * words:
            return False
    return True
