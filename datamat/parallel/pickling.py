"""Pickling for workers and their results: the C pickler, with our own rules, and dill's for objects that it refuses."""

from __future__ import annotations

import builtins
import contextvars
import copyreg
import functools
import importlib
import importlib.machinery
import io
import itertools
import operator
import pickle
import sys
import threading
import types
import typing
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import dill
import xxhash
from dill import _dill

from datamat.parallel import arrays, byvalue, standins
from datamat.parallel.errors import UnpicklableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# ---------------------------------------------------------------- callables
#
# How callables travel.
#
# The callable is sent with its `self`, and with everything that it uses of `__main__`, by value. Three parts cooperate:
#
# the C pickler     sends nearly everything. It asks `_Rules` about each object except plain values and collections.
# `_Rules`          repair what pickle and dill get wrong (`standins`, `byvalue`): locks arrive free, files are not
#                   truncated, classes keep their identity.
# dill              reduces the types that it knows and pickle refuses: weak references, properties, ...
#
# An object that cannot travel arrives as a stand-in that names itself when it is used. To find the name, a slower
# pickler in Python starts over, since it knows where in `self` it is. No other call pays for the names.


Reduction = Any  # a tuple as returned by `__reduce__`, the name of a global, or NotImplemented
Place = tuple[str, str]  # of a global: its namespace and its name
Versions = dict[Place, int]  # of globals; 0 for one that is not bound
Banned = dict[int, tuple[Any, str]]  # by id: an object that cannot travel, and why

_PythonPickler: Any = pickle._Pickler  # unlike the C pickler, it can be overridden
_MAX_STANDINS = 100
_LONGEST_PLACE = 200
# Depth of nested saves, each of which takes some 200 bytes of a thread's 8 MiB stack; Python's own limit is 1,000.
_DEEPEST = 10_000
_recursion_guard = threading.Lock()
_limits_before: list[int] = []  # recursion limits to restore, of picklers that are inside deep objects
BUILTIN_TYPES = {*_dill._typemap, type(None), type(...), type(NotImplemented)}
PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


class _Rules:
    """Rules of both picklers for objects that the standard library's pickle refuses or gets wrong.

    Args:
        file: binary file that takes the pickle.
        to_parent: whether the receiver is the process that sent the code: then code travels by id, without globals.
        buffers: collects large buffers (arrays) that travel beside the stream; None leaves them in it.
    """

    def __init__(self, file: Any, *, to_parent: bool, buffers: Callable[[pickle.PickleBuffer], Any] | None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers)  # type: ignore[call-arg]  # of the pickler beside it
        self.to_parent = to_parent
        self.classes: list[type] | None = None  # a list collects the classes by value, then referred to by id
        self.is_digest = False  # the pickle is never loaded: code is replaced by its hash, and places need no names
        self.local: list[Any] = []
        self.standins: dict[str, str] = {}
        self.modules: set[str] = set()
        self.globals: set[Place] = set()

    def reducer_override(self, obj: Any) -> Reduction:
        """Return the reduction of `obj`; NotImplemented if pickle does the right thing, as it usually does."""
        kind: Any = type(obj)
        rule = _rule_for(kind)
        return NotImplemented if rule is None else rule(self, obj)

    def _place(self) -> str:
        """Return the attribute path of the object that is being sent, as users write it."""
        if self.is_digest:
            return ""
        raise _NeedsTracingError

    def goes_by_name(self, obj: Any) -> bool:
        """Return True if the receiver finds this function or class by its name."""
        module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", "")
        if "<locals>" in name or (byvalue.is_by_value(module) and not self.to_parent):
            return False
        if module is None or byvalue.lookup(module, name) is not obj:
            return False
        if self.to_parent and byvalue.is_new(module, name):
            return False
        self.modules.add(module)
        return True

    def _function(self, function: types.FunctionType) -> Reduction:
        if self.goes_by_name(function):
            return function.__qualname__
        if hasattr(function, "dispatch") and hasattr(function, "registry"):
            return byvalue.single_dispatch_of, (tuple(function.registry.items()),)
        state = (function.__defaults__, function.__kwdefaults__, byvalue.annotations_of(function), function.__doc__,
                 function.__qualname__, function.__module__, function.__dict__)  # fmt: skip
        module = sys.modules.get(function.__module__ or "")
        at_home = module is not None and module.__dict__ is function.__globals__
        if at_home and not byvalue.is_by_value(function.__module__):
            make: Callable[..., Any] = byvalue.make_function_in
            home = function.__module__
        else:
            make, home = byvalue.make_function, byvalue.namespace_key(function)
            self.globals.update((home, name) for name in byvalue.global_names(function.__code__))
        code = hash(function.__code__) if self.is_digest else function.__code__
        parts = (code, home, function.__name__, function.__closure__)
        return make, parts, state, None, None, byvalue.fill_function

    def _class(self, cls: type) -> Reduction:
        if self.to_parent and (identity := byvalue.id_at_home(cls)) is not None:
            return byvalue.class_by_id, (identity,)
        if self.goes_by_name(cls):
            return cls.__qualname__
        if cls in BUILTIN_TYPES:
            return (_dill._load_type, (_dill._typemap[cls],)) if cls in _dill._typemap else NotImplemented
        if byvalue.is_by_value(cls.__module__) or "<locals>" in cls.__qualname__ or byvalue.lost_its_name(cls):
            if self.classes is None:
                return byvalue.class_parts(cls)
            self.classes.append(cls)
            return byvalue.class_by_id, (byvalue.class_id(cls),)
        return NotImplemented

    def _module(self, module: types.ModuleType) -> Reduction:
        """Send a module by its name; dill would send the content of modules outside the standard library."""
        name = module.__name__
        if module is builtins:  # apparently among the globals of a module
            self.expect_namespaces()
        if sys.modules.get(name) is not module or (name != "__main__" and byvalue.is_by_value(name)):
            return _by_dill(module)
        self.modules.add(name)
        return importlib.import_module, (name,)

    def expect_namespaces(self) -> None:
        """Register an object that only module namespaces hold; these travel by name."""
        raise _NeedsTracingError

    def _cell(self, cell: types.CellType) -> Reduction:
        try:
            content = (cell.cell_contents,)
        except ValueError:  # empty
            return types.CellType, ()
        return types.CellType, (), content, None, None, byvalue.set_cell

    def _special(self, obj: Any) -> Reduction:
        reduction = standins.replacement(obj, self._place)
        if reduction is None:
            return _by_dill(obj) if type(obj) in dill.Pickler.dispatch else NotImplemented
        self.standins |= standins.standin_of(reduction)
        return reduction


class _NeedsTracingError(Exception):
    """The fast pickler found an object that only the tracing one can send."""


_RULES: dict[type, Callable[[Any, Any], Reduction]] = {
    types.FunctionType: _Rules._function,
    types.MethodType: lambda _, method: (types.MethodType, (method.__func__, method.__self__)),
    types.CellType: _Rules._cell,
    importlib.machinery.ModuleSpec: lambda rules, _: rules.expect_namespaces() or NotImplemented,
    contextvars.Context: lambda _, context: (byvalue.make_context, (list(context.items()),)),
    **dict.fromkeys(
        byvalue.SINGLETON_TYPES, lambda rules, thing: byvalue.singleton_parts(thing, to_parent=rules.to_parent)
    ),
    functools._lru_cache_wrapper: lambda rules, it: it.__qualname__ if rules.goes_by_name(it) else _by_dill(it),
}
_NATIVE = frozenset({*PLAIN, tuple, list, dict, set, frozenset, bytearray, pickle.PickleBuffer})


@standins.per_type
def _rule_for(kind: Any) -> Callable[[Any, Any], Reduction] | None:
    """Return the rule for objects of this type; None leaves them to pickle."""
    rule = _rule_of(kind)
    if not standins.is_local(kind):
        return rule

    def noted(rules: _Rules, obj: Any) -> Reduction:
        rules.local.append(obj)
        return NotImplemented if rule is None else rule(rules, obj)

    return noted


def _rule_of(kind: Any) -> Callable[[Any, Any], Reduction] | None:
    if kind in _NATIVE or (kind.__module__, kind.__name__) == ("numpy", "ndarray"):  # dill would copy the array
        return None
    if (rule := _RULES.get(kind)) is not None:
        return rule
    if issubclass(kind, type):
        return _Rules._class
    if issubclass(kind, types.ModuleType):
        return _Rules._module
    if standins.is_special(kind):
        return _Rules._special
    own = arrays.rule_for(kind) or (_by_dill if kind in dill.Pickler.dispatch or _is_array(kind) else None)
    if own is None and _answers_to_any_name(kind):
        own = _reduced_by_type
    return None if own is None else lambda _, obj: own(obj)


def _answers_to_any_name(kind: Any) -> bool:
    """Return True for types with a `__getattr__` of their own that leave pickling to `object`.

    pickle looks up `__setstate__` and the like on instances. A wrapper that forwards such look-ups to one of its
    attributes recurses without end before its state is set.
    """
    is_plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return is_plain and kind not in copyreg.dispatch_table and any("__getattr__" in vars(base) for base in kind.__mro__)


def _reduced_by_type(obj: Any) -> Reduction:
    """Return the reduction of `object.__reduce_ex__`, but look methods up on the type, as for other special methods."""
    kind: Any = type(obj)
    if hasattr(kind, "__getnewargs_ex__"):
        args, options = kind.__getnewargs_ex__(obj)
        make: tuple[Any, ...] = (functools.partial(kind.__new__, kind, *args, **options), ())
    else:
        args = kind.__getnewargs__(obj) if hasattr(kind, "__getnewargs__") else ()
        make = (copyreg.__newobj__, (kind, *args))  # type: ignore[attr-defined]  # the name that pickle knows
    items = iter(obj) if issubclass(kind, list) else None
    pairs = iter(obj.items()) if issubclass(kind, dict) else None
    return *make, kind.__getstate__(obj), items, pairs, _set_state


def _set_state(obj: Any, state: Any) -> None:
    """Set the state of an instance as pickle does, but look up `__setstate__` on its type."""
    if (setter := getattr(type(obj), "__setstate__", None)) is not None:
        setter(obj, state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        object.__getattribute__(obj, "__dict__").update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(obj, name, value)


def _is_array(kind: type) -> bool:
    return any((base.__module__, base.__name__) == ("numpy", "ndarray") for base in kind.__mro__)


class _Recorder(dill.Pickler):  # type: ignore[misc]  # dill ships no types
    """Records how dill reduces one object, instead of sending it.

    dill, and libraries that register types with it, have functions for some eighty types; these call a Python pickler.
    """

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=5, byref=False, recurse=False)
        self.reduction: Reduction = NotImplemented
        self.write = self._take
        self._is_saving = False

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        """Let dill save an object, but not its contents."""
        if not self._is_saving:
            self._is_saving = True
            super().save(obj, save_persistent_id)

    def save_reduce(self, func: Any, args: Any, *rest: Any, obj: Any = None, **more: Any) -> None:
        """Record the reduction."""
        names = ("state", "listitems", "dictitems", "state_setter")
        options = dict(zip(names, rest, strict=False)) | more
        self.reduction = (func, args, *map(options.get, names))

    def _take(self, data: bytes) -> None:
        if data[:1] == pickle.GLOBAL:  # as in dill, for the sentinels of dataclasses
            self.reduction = data.split(b"\n")[1].decode()


def _by_dill(obj: Any) -> Reduction:
    """Return dill's reduction of an object; NotImplemented if it leaves the object to pickle."""
    recorder = _Recorder()
    recorder.save(obj)
    return recorder.reduction


class _FastPickler(_Rules, pickle.Pickler):
    """The C pickler with our rules."""


class _TracingPickler(_Rules, _PythonPickler):  # type: ignore[misc]  # no types either
    """A pickler that always knows its position: a tenth as fast, for objects that stop the fast one.

    Args:
        banned: objects to replace by stand-ins.
        values: the globals that travel ahead of the code that uses them.
    """

    # dill puts its own functions into the table that this one inherits.
    dispatch = dict(_PythonPickler.dispatch) | {dict: _PythonPickler.save_dict, type: _PythonPickler.save_type}

    def __init__(self, file: Any, *, banned: Banned, values: dict[Place, Any], **options: Any) -> None:
        super().__init__(file, **options)
        self._banned = banned
        self._values = values
        self._stack: list[Any] = []
        self.failure: list[Any] | None = None  # the stack at the first error

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        """Save one object; every object of the graph passes here."""
        if type(obj) in PLAIN or id(obj) in self.memo:
            return super().save(obj, save_persistent_id)
        self._stack.append(obj)
        try:
            if id(obj) in self._banned:
                self.standins[self._place()] = standins.type_name(obj)
                return self.save_reduce(
                    *standins.standin_reduction(obj, self._place, self._banned[id(obj)][1]), obj=obj
                )
            if type(obj) is dict and (name := byvalue.module_of(obj)) is not None:
                home = (byvalue.namespace, (name,)) if byvalue.is_by_value(name) else (vars, (sys.modules[name],))
                return self.save_reduce(*home, obj=obj)
            return super().save(obj, save_persistent_id)
        except Exception:
            if self.failure is None:
                self.failure = list(self._stack)
            raise
        finally:
            self._stack.pop()

    def _place(self) -> str:
        return self.place_of(self._stack)

    def place_of(self, stack: list[Any]) -> str:
        """Return the path of the last object of a stack, which may begin at the globals."""
        if stack[0] is not self._values or len(stack) == 1:
            return describe_path(stack)
        name = next(name for (_, name), value in self._values.items() if value is stack[1])
        return describe_path(stack[1:], f"global {name}")

    def expect_namespaces(self) -> None:
        """Do nothing: this pickler checks each dictionary."""


_CONTAINERS = (dict, list, tuple, set, frozenset)


def describe_path(stack: list[Any], place: str = "") -> str:
    """Return the path of the last object of a pickler's stack: `self.reader._conn`, `fit.<locals>[0]`.

    Args:
        stack: objects, each of which holds the next one; between an object and an attribute is a dictionary of these.
        place: name of the first one, if any.
    """
    for i, obj in enumerate(stack):
        before = stack[i - 1] if i else None
        methods = [each for each in stack[max(i - 2, 0) : i] if isinstance(each, types.MethodType)]
        if any(obj is method.__self__ for method in methods):
            place = f"{place}'s self" if place else "self"
        elif isinstance(before, dict):
            key = next((key for key, value in before.items() if value is obj), None)
            owner = stack[i - 2] if i > 1 else None
            is_attribute = isinstance(key, str) and not isinstance(owner, dict | list | set | frozenset | None)
            place += f".{key}" if is_attribute else f"[{key!r}]"
        elif isinstance(before, list):
            place += f"[{next((n for n, value in enumerate(before) if value is obj), '?')}]"
        elif not place and isinstance(obj, types.FunctionType):
            place = obj.__qualname__
        if i + 1 < len(stack) and (name := standins.name_in_places(obj)) is not None:
            place = name
    place = place.lstrip("._")
    if len(place) > _LONGEST_PLACE:
        place = f"{place[: _LONGEST_PLACE // 2]}...{place[-_LONGEST_PLACE // 2 :]}"
    return place or standins.type_name(stack[-1])


def _culprit(stack: list[Any]) -> Any:
    """Return the object to replace: the failing one, or its holder."""
    for i in range(len(stack) - 1, 0, -1):
        in_cell = i > 1 and isinstance(stack[i - 2], types.CellType)
        if isinstance(stack[i - 1], dict | list) or in_cell:
            if isinstance(stack[i], _CONTAINERS) and i < len(stack) - 1:
                continue
            return stack[i]
    return None


# ---------------------------------------------------------------- code


class PickledFunction(typing.NamedTuple):
    """A pickled callable.

    Attributes:
        stream: pickle of the callable.
        buffers: large buffers that the pickle refers to.
        standins: type of each object that could not travel, by its path.
        modules: installed modules that the callable refers to.
    """

    stream: bytes
    buffers: tuple[pickle.PickleBuffer, ...]
    standins: dict[str, str]
    modules: tuple[str, ...]


def dumps_code(obj: Any, *, to_parent: bool = False) -> PickledFunction:
    """Pickle `obj` with the globals that its code uses.

    Raises:
        UnpicklableError: it cannot travel, not even with stand-ins for some of its attributes.
    """
    banned: Banned = {}
    use = _NO_USE
    while True:
        versions = _versions_of_all(use)
        values = {place: byvalue.namespace(place[0])[place[1]] for place, version in versions.items() if version}
        parts = {place: versions[place] for place in values}, values, obj
        pickled, used = _pickle(parts, banned, to_parent)
        missing = used - versions.keys()
        if to_parent or not missing:
            return pickled
        # Again, after its globals: code that runs while `obj` is rebuilt (__setstate__, a metaclass) needs them.
        use = _Use(use.names | missing, frozenset())


class _Attempt:
    """One run of a pickler."""

    def __init__(self, make: Callable[..., _Rules], **options: Any) -> None:
        self._out = io.BytesIO()
        self._beside: list[pickle.PickleBuffer] = []
        # No reference to this object: that would keep the pickled objects alive until garbage is collected.
        self.pickler: Any = make(self._out, buffers=functools.partial(_put_aside, self._beside), **options)

    def dump(self, parts: tuple[Any, ...]) -> tuple[PickledFunction, set[Place]]:
        """Return the pickles of the parts, in order: rebuilding one may need those before it."""
        for part in parts:
            self.pickler.dump(part)
        modules = tuple(sorted(filter(byvalue.is_installed, self.pickler.modules)))
        pickled = PickledFunction(self._out.getvalue(), tuple(self._beside), self.pickler.standins, modules)
        return pickled, self.pickler.globals


def _put_aside(beside: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    stays = buffer.raw().nbytes < 1 << 14
    if not stays:
        beside.append(buffer)
    return stays


def _pickle(
    parts: tuple[Versions, dict[Place, Any], Any], banned: Banned, to_parent: bool
) -> tuple[PickledFunction, set[Place]]:
    """Pickle globals and the code that uses them: fast, or repeatedly, banning what cannot travel, until it works."""
    if not banned:
        try:
            return _Attempt(_FastPickler, to_parent=to_parent).dump(parts)
        except RecursionError:
            with _deep_recursion(), suppress(Exception):
                return _Attempt(_FastPickler, to_parent=to_parent).dump(parts)
        except Exception:  # noqa: BLE001, S110 -- the other pickler finds its origin
            pass
    _, values, obj = parts
    with _deep_recursion():
        while True:
            attempt = _Attempt(_TracingPickler, to_parent=to_parent, banned=banned, values=values)
            try:
                return attempt.dump(parts)
            except Exception as exc:  # a user's __reduce__ may raise anything
                stack = attempt.pickler.failure or [obj]
                culprit = _culprit(stack)
                if culprit is None and stack[0] is values and len(stack) > 1:
                    culprit = stack[1]
                if culprit is None or culprit is obj or id(culprit) in banned or len(banned) >= _MAX_STANDINS:
                    place, what = attempt.pickler.place_of(stack), standins.type_name(stack[-1])
                    raise UnpicklableError(
                        f"{what if place == what else f'{place}: {what}'} cannot be sent to a worker "
                        f"({type(exc).__name__}: {exc}); {standins.REMEDY}, or pass what it is made from"
                    ) from exc
                banned[id(culprit)] = culprit, f"{type(exc).__name__}: {exc}"


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Raise the recursion limit of the interpreter for deeply nested objects, until the last such block ends."""
    with _recursion_guard:
        _limits_before.append(sys.getrecursionlimit())
        sys.setrecursionlimit(max(_limits_before[0], _DEEPEST))
    try:
        yield  # without the guard: user code runs there
    finally:
        with _recursion_guard:
            limit = _limits_before.pop()
            if not _limits_before:
                sys.setrecursionlimit(limit)


# ---------------------------------------------------------------- digests
#
# A call uses its callable as it was at submission, and an unchanged callable is not sent again: a digest of its pickle
# detects changes. Of a global that its code uses, only the binding counts. The global's value is searched for more
# code, once per binding, since the globals of that code count as well.


class _Use(typing.NamedTuple):
    """The globals that code uses, by namespace and name, and the ids of by-value classes that contain more code."""

    names: frozenset[Place]
    classes: frozenset[str]


_NO_USE = _Use(frozenset(), frozenset())
_known_versions: dict[_Use, Versions] = {}  # of the globals that code uses, directly or indirectly
_uses: dict[Place, tuple[int, _Use]] = {}  # by global, with the version of its value
_uses_by_class: dict[str, _Use] = {}
_named: dict[int, weakref.ref[Any]] = {}  # by id: functions and classes that were found by name
Rows = dict[tuple[type, int], tuple[list[Any], bytes]]  # by type and id of a collection: its items, their digest
_MANY_ROWS = 100


def digest(function: Any, rows: Rows | None = None) -> bytes:
    """Return a digest of the contents of a callable and of the bindings of the globals that its code uses.

    It takes about as long as pickling the callable: 10 us for a few attributes, 0.1 ms per MB of arrays.

    Args:
        function: the callable; one that workers find by name always has the same digest.
        rows: large collections seen by an earlier call for the same callable; updated in place.
    """
    if is_found(function):
        return b""
    hasher = xxhash.xxh3_128()
    pickler: Any = _DigestPickler(hasher.update, lambda buffer: hasher.update(buffer.raw()))
    try:
        if rows is not None and (digests := _digests_of_rows(function, rows)):
            pickler.persistent_id = lambda obj: digests.get(id(obj))
        pickler.dump((function.__func__, function.__self__) if type(function) is types.MethodType else function)
    except Exception:  # noqa: BLE001 -- the other pickler tries whatever the C pickler cannot do
        with suppress(UnpicklableError):  # a fork can inherit it nevertheless
            pickled = dumps_code(function)
            hasher = xxhash.xxh3_128(pickled.stream)
            for buffer in pickled.buffers:
                hasher.update(buffer.raw())
        return hasher.digest()
    if (use := pickler.use()) != _NO_USE:
        versions = _versions(_known_versions.get(use, ()))
        if versions != _known_versions.get(use):
            versions = _known_versions[use] = _versions_of_all(use)
        hasher.update(repr(versions).encode())
    return hasher.digest()


def is_found(function: Any) -> bool:
    """Return True for functions that workers find by name: none of their contents is sent."""
    if type(function) is types.BuiltinFunctionType:
        return type(function.__self__) is types.ModuleType
    if type(function) is not types.FunctionType:
        return False
    if not _is_named(function) and byvalue.is_imported(function):
        _named[id(function)] = weakref.ref(function)
    return _is_named(function)


def _is_named(code: Any) -> bool:
    reference = _named.get(id(code))
    return reference is not None and reference() is code


def _digests_of_rows(method: Any, rows: Rows) -> dict[int, bytes]:
    """Return digests of the large collections of plain rows in the attributes of a `self`, by id.

    Comparing their items by identity takes a tenth of the time of pickling them.
    """
    found: Rows = {}
    attributes = getattr(method.__self__, "__dict__", None) if type(method) is types.MethodType else None
    for value in attributes.values() if type(attributes) is dict else ():
        kind = type(value)
        if kind in (list, dict, set) and len(value) >= _MANY_ROWS:
            items = [*value, *value.values()] if kind is dict else [*value]
            known, digest_of_items = rows.get((kind, id(value)), ([], b""))
            if len(items) != len(known) or not all(map(operator.is_, items, known)):
                within = itertools.chain.from_iterable(item for item in items if type(item) is tuple)
                if not {*map(type, items)} - {tuple} | {*map(type, within)} <= PLAIN:
                    continue
                digest_of_items = xxhash.xxh3_128_digest(pickle.dumps((kind.__name__, items), 5))
            found[kind, id(value)] = items, digest_of_items
    for gone in rows.keys() - found.keys():
        rows.pop(gone, None)
    rows.update(found)  # another thread always finds the unchanged ones
    return {identity: digest_of_items for (_, identity), (_, digest_of_items) in found.items()}


def _versions(places: typing.Iterable[Place]) -> Versions:
    found = [(place, byvalue.namespace(place[0])) for place in places]
    return {place: byvalue.version_of(*place, held[place[1]]) if place[1] in held else 0 for place, held in found}


def _versions_of_all(use: _Use) -> Versions:
    """Return the versions of these globals, and of those used by code in their values."""
    versions: Versions = {}
    classes: set[str] = set()
    waiting = [use]
    while waiting:
        use = waiting.pop()
        for place, version in _versions(sorted(use.names - versions.keys())).items():
            versions[place] = version
            if version and _uses.get(place, (0, _NO_USE))[0] != version:
                _uses[place] = version, _use_of(byvalue.namespace(place[0])[place[1]])
            waiting.append(_uses[place][1] if version else _NO_USE)
        waiting += map(_uses_by_class.__getitem__, use.classes - classes)
        classes |= use.classes
    return versions


class _DigestPickler(_FastPickler):
    """Feeds a digest with a pickle that cannot be loaded: code is replaced by its hash, by-value classes by their ids.

    Args:
        write: takes the bytes.
        beside: takes buffers.
    """

    def __init__(self, write: Callable[[bytes], Any], beside: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(types.SimpleNamespace(write=write), to_parent=False, buffers=beside)
        self.is_digest = True
        self.classes = []

    def reducer_override(self, obj: Any) -> Reduction:
        """Return the reduction of `obj`; for code known to travel by name, at once."""
        kind: Any = type(obj)
        is_code = kind is types.FunctionType or issubclass(kind, type)
        if is_code and _is_named(obj):
            return obj.__qualname__
        rule = _rule_for(kind)
        reduction = NotImplemented if rule is None else rule(self, obj)
        if is_code and type(reduction) is str:
            _named[id(obj)] = weakref.ref(obj)
        return reduction

    def use(self) -> _Use:
        """Return the globals and classes that the code seen so far uses."""
        met = {byvalue.class_id(cls): cls for cls in self.classes or ()}
        for identity, cls in met.items():
            if identity not in _uses_by_class:
                _uses_by_class[identity] = _NO_USE  # during the search, since it may refer to itself
                with suppress(Exception):  # the user's metaclass may raise anything
                    _uses_by_class[identity] = _use_of(byvalue.class_parts(cls)[1:])
        return _Use(frozenset(self.globals), frozenset(met))


def _use_of(value: Any) -> _Use:
    """Return what the code in a value uses, except for parts that cannot be pickled."""
    pickler = _DigestPickler(len, lambda _: None)
    with suppress(Exception):
        pickler.dump(value)
    return pickler.use()


def load_code(stream: bytes, buffers: typing.Iterable[Any] = (), *, override: bool = True) -> Any:
    """Return the object of a `PickledFunction`, after installing its globals.

    Args:
        stream: pickle, the `stream` of a `PickledFunction`.
        buffers: large buffers that the pickle refers to, in order: the `buffers` of a `PickledFunction`.
        override: whether to replace globals that came with an earlier pickle.
    """
    # Not from a file or a network, but from one of our own processes, over its own socket.
    unpickler = pickle.Unpickler(io.BytesIO(stream), buffers=buffers)  # noqa: S301
    byvalue.install_globals(unpickler.load(), unpickler.load(), override=override)
    return unpickler.load()


# ---------------------------------------------------------------- arguments and results
#
# How arguments and results travel: like callables, but without globals unless code in them needs those.
#
# The class of an item may travel by value: it is sent once to each worker, ahead of its first instance; instances refer
# to it by id.


_PLAIN_MARK = ord("p")
_ROWS = frozenset({tuple, list})
_FEW = 16  # items; beyond that, the nested calls of `_is_simple` cost more than a pickler


def dumps_items(obj: Any) -> tuple[bytes, list[type]]:
    """Return arguments as bytes for `loads_data`, and the classes that must arrive before them.

    Raises:
        UnpicklableError: a part cannot be sent, or a copy of it would be useless.
    """
    local: list[Any] = []
    packed = _dumps(obj, to_parent=False, local=local)
    if local:
        refuse_local(obj)
    return packed


def refuse_local(arguments: Any) -> None:
    """Refuse arguments that connect a call to threads of this process; such objects in attributes are allowed.

    Raises:
        UnpicklableError: an argument, or an item of a collection among them, is a queue of threads or of asyncio.
    """
    waiting, seen = [arguments], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if standins.is_local(type(each)):
            name = standins.type_name(each)
            raise UnpicklableError(
                f"{name} as an argument: a worker would get a copy, and neither side would see what the other does "
                f"with it; return values from the call instead, or pass one that processes share: "
                f"pathos.helpers.mp.Manager().{standins.shared_name(each)}()"
            )
        if standins.is_a(each, dict):
            waiting += (*each, *each.values())
        elif standins.is_a(each, (*_CONTAINERS, deque)):
            waiting += each


def dumps_data(obj: Any) -> bytes:
    """Return a result as bytes for `loads_data` in the calling process.

    Raises:
        UnpicklableError: a part cannot be sent.
    """
    return _dumps(obj, to_parent=True, local=[])[0]


def _dumps(obj: Any, *, to_parent: bool, local: list[Any]) -> tuple[bytes, list[type]]:
    try:
        if _is_simple(obj):
            return b"p" + pickle.dumps(obj, 5), []
        out = io.BytesIO()
        out.write(b"p")
        pickler = _FastPickler(out, to_parent=to_parent, buffers=None)
        pickler.classes, pickler.local = None if to_parent else [], local
        pickler.dump(obj)
        if to_parent or not pickler.globals:
            return out.getvalue(), pickler.classes or []
    except Exception:  # noqa: BLE001, S110 -- the other pickler tries whatever the C pickler cannot do, and reports errors
        pass
    local.append(obj)  # it may contain some
    stream, buffers, places, _ = dumps_code(obj, to_parent=to_parent)
    if places:
        place, name = next(iter(places.items()))
        raise UnpicklableError(
            f"{place}: {name} cannot be sent between processes as an argument or result; send what it is made from"
        )
    return b"c" + pickle.dumps((stream, [bytes(buffer) for buffer in buffers]), 5), []


def _is_simple(obj: Any) -> bool:
    """Return True for a plain value, or a few in tuples and lists; takes less time than creating a pickler."""
    kind = type(obj)
    if kind is tuple or kind is list:
        if len(obj) > _FEW:
            return False
        for part in obj:  # noqa: SIM110 -- the generator of an `all` costs more than the pickle
            if type(part) not in PLAIN and not _is_simple(part):
                return False
        return True
    return kind in PLAIN or (kind is dict and not obj)


def loads_data(data: bytes | memoryview) -> Any:
    """Return the unpickled object."""
    content = pickle.loads(memoryview(data)[1:])  # noqa: S301 -- from our own process, over its own socket
    if data[0] == _PLAIN_MARK:
        return content
    stream, buffers = content
    return load_code(stream, buffers, override=False)


# ---------------------------------------------------------------- results of a chunk
#
# Plain data is one pickle, which is written and read several times as fast as hundreds. Otherwise each result is a
# pickle of its own, so that one that cannot be unpickled does not fail the others. One pickler writes them: objects
# that results share travel once. Results that need the slower pickler share nothing.


def dumps_results(results: list[Any], errors: dict[int, bytes]) -> bytes:
    """Return the results of a chunk, and the packed errors by position, as bytes for `loads_results`.

    Raises:
        BaseException: whatever stops the C pickler; `join_results` takes them one by one.
    """
    kinds = set(map(type, results))
    if kinds <= PLAIN or (kinds <= _ROWS and PLAIN.issuperset(map(type, itertools.chain.from_iterable(results)))):
        return b"p" + pickle.dumps((results, errors), 5)
    out = io.BytesIO()
    out.write(b"e")
    pickler = _FastPickler(out, to_parent=True, buffers=None)
    for each in (errors, *results):
        pickler.dump(each)
    return out.getvalue()


def join_results(packed: list[bytes], errors: dict[int, bytes]) -> bytes:
    """Do the same with results that `dumps_data` has packed."""
    return b"s" + pickle.dumps((packed, errors), 5)


def loads_results(data: bytes | memoryview) -> tuple[list[Any], dict[int, Any], dict[int, BaseException]]:
    """Return the results of a chunk, with None for those that cannot be unpickled.

    Returns:
        The results; the packed errors; and the errors of unpickling, by position.
    """
    if data[0] == _PLAIN_MARK:
        return *pickle.loads(memoryview(data)[1:]), {}  # noqa: S301 -- from our own process, over its own socket
    content = bytes(memoryview(data)[1:])
    failures: dict[int, BaseException] = {}
    if data[:1] == b"e":
        file = io.BytesIO(content)
        unpickler = pickle.Unpickler(file)  # noqa: S301 -- from our own process, over its own socket
        values: list[Any] = []
        try:
            while file.tell() < len(content):
                values.append(unpickler.load())
        except BaseException:  # noqa: BLE001 -- whatever the class of a result raises while it is rebuilt
            values = _load_each(file, len(content), failures)
        return values[1:], values[0], failures
    results, errors = pickle.loads(content)  # noqa: S301
    for position, packed in enumerate(results):
        try:
            results[position] = loads_data(packed)
        except BaseException as exc:  # noqa: BLE001 -- as above
            results[position], failures[position] = None, exc
    return results, errors, failures


def _load_each(file: io.BytesIO, size: int, failures: dict[int, BaseException]) -> list[Any]:
    """Load the pickles of one pickler, even if some of them raise.

    A pickle that refers to a part of one that cannot be unpickled fails, too.

    Args:
        file: the pickles.
        size: bytes of it.
        failures: receives the errors, by position; the first pickle has none.
    """
    import pickletools  # imported here, since no worker needs it

    file.seek(0)
    unpickler: Any = pickle._Unpickler(file)  # in Python, since its memo can be filled
    values: list[Any] = []
    lost: dict[int, BaseException] = {}  # by the object numbers that a pickler counts
    num_objects = 0
    while (start := file.tell()) < size:
        operations = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(file)]
        end = file.tell()
        own = range(num_objects, num_objects + operations.count(("MEMOIZE", None)))
        num_objects = own.stop
        try:
            for name, number in operations:
                if name in ("BINGET", "LONG_BINGET") and number in lost:
                    raise lost[number]
            file.seek(start)
            values.append(unpickler.load())
        except BaseException as exc:  # noqa: BLE001 -- as above
            failures[len(values) - 1] = exc
            values.append(None)
            lost.update(dict.fromkeys(own, exc))
            unpickler.memo.update(dict.fromkeys(own))  # otherwise later objects would get other numbers
            file.seek(end)
    return values
