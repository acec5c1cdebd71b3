"""Which code travels by value, and how a worker rebuilds it.

Code that a fresh interpreter can import travels by reference: module and name. Code of `__main__`, of a notebook
cell, of a module that is still being imported, of an exec'd namespace and of `<locals>` travels by value.

What makes that hold together is identity. A class gets an id when it is first sent, known on both sides: the worker
builds it once, results come back as instances of the caller's own class, and a class that is defined anew (a notebook
cell run again) is another class. Functions of one module share one namespace in the worker, as they do at home.
Classes are made in two steps, an empty skeleton and then its content, so that they may refer to themselves.
"""

from __future__ import annotations

import abc
import dis
import enum
import functools
import os
import sys
import threading
import types
import typing
import uuid
import weakref
from typing import TYPE_CHECKING, Any

from datamat.parallel.namespaces import namespace, namespace_key

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "adopt_classes",
    "class_by_id",
    "class_id",
    "class_parts",
    "fill_class",
    "fill_function",
    "force_by_value",
    "global_names",
    "is_by_value",
    "is_forced",
    "is_installed",
    "known_id",
    "lookup",
    "lost_its_name",
    "lru_cache_of",
    "make_cell",
    "make_class",
    "make_enum",
    "make_function",
    "make_function_in",
    "namespaces_around",
    "set_cell",
    "single_dispatch_of",
    "type_variable",
]

_guard = threading.RLock()
_ids: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_known: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_filled: set[str] = set()
_type_variables: dict[tuple[str, str], typing.TypeVar] = {}
_forced: set[str] = set()
_importable: dict[str, bool] = {}


# ---------------------------------------------------------------- the choice


def is_by_value(module_name: str | None) -> bool:
    """Must code of this module travel by value?"""
    if module_name is None or module_name in ("__main__", "__mp_main__") or is_forced(module_name):
        return True
    module = sys.modules.get(module_name)
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return True
    return not _is_importable(module_name)


def force_by_value(module_name: str) -> None:
    """From now on send code of this module, and of modules inside it, by value: a worker could not import it."""
    _forced.add(module_name)


def is_forced(module_name: str) -> bool:
    """Has `force_by_value` been called for this module, or for a package that it is in?"""
    return any(module_name == name or module_name.startswith(f"{name}.") for name in _forced)


def _is_importable(name: str) -> bool:
    """Would a fresh interpreter with our search path find this module, in the same file?"""
    if name not in _importable:
        _importable[name] = _find_again(name)
    return _importable[name]


def _find_again(name: str) -> bool:
    module = sys.modules[name]
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and (path is None or not _is_importable(parent)):
        return False
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except (ImportError, AttributeError, ValueError):  # finders of other packages; they are not asked at import
            continue
        if spec is not None:
            origin = spec.origin
            return origin in (None, "built-in", "frozen") or origin == getattr(module, "__file__", origin)
    return False


def is_installed(module_name: str) -> bool:
    """Is it a module of an installed package, which nobody edits while the session runs?"""
    path = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path


def namespaces_around(functions: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return the globals of code that travels by value, by their keys: of `__main__`, of functions, and next to them.

    Args:
        functions: where to begin; what is no function, method or partial of one is passed over. A second step takes
            the functions and modules that are named in their globals.
    """
    found = {"__main__": vars(sys.modules["__main__"])}

    def take(value: Any) -> None:
        if type(value) is types.FunctionType and is_by_value(value.__module__):
            found[namespace_key(value)] = value.__globals__
        elif type(value) is types.ModuleType:  # another kind may load itself at a look
            name = vars(value).get("__name__")
            if isinstance(name, str) and name != "__main__" and sys.modules.get(name) is value and is_by_value(name):
                found[name] = vars(value)

    for each in functions:
        function = each
        while isinstance(function, (functools.partial, types.MethodType)):
            function = function.func if isinstance(function, functools.partial) else function.__func__
        take(function)
    for value in [value for held in found.values() for value in list(held.values())]:
        take(value)
    return found


def lookup(module_name: str | None, qualified_name: str) -> Any:
    """Return what this process finds under a name, None if nothing."""
    try:
        return functools.reduce(getattr, qualified_name.split("."), sys.modules.get(module_name or ""))
    except AttributeError:
        return None


def lost_its_name(cls: type) -> bool:
    """Is it a class of a Python module under whose name there is something else by now?

    A module that was loaded twice, as pytest's conftest files are, or a class that was defined anew.
    """
    path = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return path.endswith(".py") and lookup(cls.__module__, cls.__qualname__) is not cls


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the global names that this code and the code nested in it read.

    `co_names` would not do: it also holds attribute names, and so would ship a notebook's large `data` because some
    method reads `self.data`.
    """
    operations = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
    names = {step.argval for step in dis.get_instructions(code) if step.opname in operations}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return frozenset(names)


# ---------------------------------------------------------------- identities


def class_id(cls: type) -> str:
    """Return the id of a class, giving it one if it has none."""
    with _guard:
        if (found := _ids.get(cls)) is None:
            found = uuid.uuid4().hex
            _register(cls, found)
        return found


def known_id(cls: type) -> str | None:
    """Return the id of a class that has been sent or received, else None."""
    return _ids.get(cls)


def class_by_id(identity: str) -> type:
    """Return the class with this id.

    Raises:
        LookupError: the process has none (any more).
    """
    found = _known.get(identity)
    if found is None:
        raise LookupError("a class that travelled by value is gone; keep a reference to it while its pool is in use")
    return found


def adopt_classes(values: Iterable[Any]) -> None:
    """Give ids to the classes among `values` before a fork, so that forked workers know them as the same."""
    for value in values:
        if isinstance(value, type) and (is_by_value(value.__module__) or "<locals>" in value.__qualname__):
            class_id(value)


def _register(cls: type, identity: str) -> None:
    _ids[cls] = identity
    _known[identity] = cls
    _filled.add(identity)


# ---------------------------------------------------------------- functions


def make_function(code: types.CodeType, key: str, name: str, closure: Any) -> types.FunctionType:
    """Return a function whose globals are those of `namespace(key)`."""
    return types.FunctionType(code, namespace(key), name, None, closure)


def make_function_in(code: types.CodeType, module_name: str, name: str, closure: Any) -> types.FunctionType:
    """Return a function whose globals are those of an importable module."""
    __import__(module_name)
    return types.FunctionType(code, sys.modules[module_name].__dict__, name, None, closure)


def fill_function(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    """Set what may refer back to the function itself."""
    (function.__defaults__, function.__kwdefaults__, function.__annotations__, function.__doc__,
     function.__qualname__, function.__module__, attributes) = state  # fmt: skip
    function.__dict__.update(attributes)


def make_cell() -> types.CellType:
    """Return an empty cell."""
    return types.CellType()


def set_cell(cell: types.CellType, state: tuple[Any]) -> None:
    """Fill a cell."""
    cell.cell_contents = state[0]


def lru_cache_of(function: Any, parameters: dict[str, Any]) -> Any:
    """Return `function` behind an empty cache."""
    return functools.lru_cache(**parameters)(function)


def single_dispatch_of(implementations: tuple[tuple[type, Any], ...]) -> Any:
    """Return a generic function with these implementations."""
    by_type = dict(implementations)
    generic = functools.singledispatch(by_type.pop(object))
    for kind, function in by_type.items():
        generic.register(kind, function)
    return generic


# ---------------------------------------------------------------- classes

_NOT_COPIED = ("__dict__", "__weakref__", "__module__", "__qualname__", "_abc_impl", "__static_attributes__",
               "__firstlineno__")  # fmt: skip
_ENUM_OWN = frozenset(enum.Enum.__dict__) | frozenset(enum.Flag.__dict__) | {
    "_member_names_", "_member_map_", "_value2member_map_", "_member_type_", "_new_member_", "_use_args_",
    "_unhashable_values_", "_hashable_values_", "_unhashable_values_map_", "_value_repr_", "_generate_next_value_",
    "_flag_mask_", "_all_bits_", "_singles_mask_", "_inverted_", "_boundary_", "__new__", *_NOT_COPIED,
}  # fmt: skip


def class_parts(cls: type) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return the function that makes the empty class, its arguments, and the state that fills it."""
    identity = class_id(cls)
    if isinstance(cls, enum.EnumMeta):
        table: dict[str, enum.Enum] = dict(cls.__members__)
        members = [(name, member.value) for name, member in table.items()]
        names = {name for name, _ in members}
        content = {k: v for k, v in cls.__dict__.items() if k not in names and k not in _ENUM_OWN}
        return (
            make_enum,
            (cls.__bases__, cls.__name__, cls.__qualname__, cls.__module__, members, identity),
            (identity, content, ()),
        )
    content = dict(cls.__dict__)
    skeleton: dict[str, Any] = {}
    if "__slots__" in content:
        skeleton["__slots__"] = slots = content.pop("__slots__")
        for slot in [slots] if isinstance(slots, str) else slots:
            content.pop(slot, None)
    if "__orig_bases__" in content:
        skeleton["__orig_bases__"] = content.pop("__orig_bases__")
    descriptors = (types.GetSetDescriptorType, types.MemberDescriptorType)
    content = {k: v for k, v in content.items() if k not in _NOT_COPIED and not isinstance(v, descriptors)}
    registered: tuple[type, ...] = ()
    if isinstance(cls, abc.ABCMeta):
        references = abc._get_dump(cls)[0]  # type: ignore[attr-defined]  # undocumented, as the registry is
        registered = tuple(subclass for reference in references if (subclass := reference()) is not None)
    arguments = (type(cls), cls.__name__, cls.__qualname__, cls.__module__, cls.__bases__, skeleton, identity)
    return make_class, arguments, (identity, content, registered)


def make_class(
    metaclass: type, name: str, qualified_name: str, module: str, bases: Any, content: Any, identity: str
) -> type:
    """Return the class with this id, made empty if the process has none."""
    with _guard:
        if (found := _known.get(identity)) is not None:
            return found
        content = dict(content, __module__=module, __qualname__=qualified_name)
        made = types.new_class(name, bases, {"metaclass": metaclass}, lambda held: held.update(content))
        _ids[made], _known[identity] = identity, made
        return made


def make_enum(bases: Any, name: str, qualified_name: str, module: str, members: Any, identity: str) -> type:
    """Return the enumeration with this id, made with its members if the process has none."""
    with _guard:
        if (found := _known.get(identity)) is not None:
            return found
        metaclass: Any = type(bases[-1])
        content = metaclass.__prepare__(name, bases)
        content["__module__"], content["__qualname__"] = module, qualified_name
        for member, value in members:
            content[member] = value
        made: type = metaclass.__new__(metaclass, name, bases, content)
        _ids[made], _known[identity] = identity, made
        return made


def fill_class(cls: type, state: tuple[str, dict[str, Any], tuple[type, ...]]) -> None:
    """Give a class that was made empty its attributes, once."""
    identity, content, registered = state
    with _guard:
        if identity in _filled:
            return
        _filled.add(identity)
    for name, value in content.items():
        try:
            setattr(cls, name, value)
        except (AttributeError, TypeError):  # read-only on this kind of class, and set by its metaclass
            continue
    for subclass in registered:
        cls.register(subclass)  # type: ignore[attr-defined]  # only an ABC has any


def type_variable(name: str, bound: Any, constraints: Any, variance: tuple[bool, bool], module: str) -> typing.TypeVar:
    """Return one and the same type variable for each name of a module."""
    covariant, contravariant = variance
    made = typing.TypeVar(name, *constraints, bound=bound, covariant=covariant, contravariant=contravariant)  # type: ignore[misc]
    return _type_variables.setdefault((module, name), made)
