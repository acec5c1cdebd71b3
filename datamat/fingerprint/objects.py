"""What one object is made of: values, instances, and the tables that say how each type counts."""

from __future__ import annotations

import collections
import concurrent.futures
import copyreg
import enum
import functools
import logging
import random
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from datamat.fingerprint.bytecode import Code, parts_of_code
from datamat.fingerprint.code import (
    LRU,
    parts_of_class,
    parts_of_function,
    parts_of_import,
    parts_of_module,
    written_attributes,
)
from datamat.fingerprint.origins import is_installed
from datamat.fingerprint.parts import Import, Parts, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["parts_of"]

_LAST_IMAGE = frozenset(
    {
        "params", "seed", "random_generator", "py_random", "_key2func", "processors", "check_each_transform",
        "_images_was_list", "_masks_was_list",
    }
)  # fmt: skip
"""Attributes of albumentations transforms that they set anew for each image, or derive from the others."""

_ALONE_MODULES = frozenset({"multiprocess.synchronize", "multiprocessing.synchronize"})
_USUAL_STATE: Any = object.__getstate__


def parts_of(value: Any) -> Parts:
    """Return what an object is made of; raises what pickle does where it has no content to give."""
    kind = type(value)
    if kind in _TABLE:
        return _TABLE[kind](value)
    for base in kind.__mro__[:-1]:
        if base in _KINDS:
            return _KINDS[base](value)
    if kind.__module__ in _ALONE_MODULES:
        return _alone(value)
    if isinstance(value, collections.abc.Iterator) and is_installed(kind.__module__):
        raise TypeError("what it yields depends on what was read from it before")
    return _instance(value)


def _sequence(value: Sequence[Any]) -> Parts:
    return Parts(type(value).__name__.encode(), value)


def _set(value: Iterable[Any]) -> Parts:
    return Parts(type(value).__name__.encode(), tuple(value), group=1)


def _dict(value: Any) -> Parts:
    if "__module__" in value and "__qualname__" in value:  # the body of a class, as metaclasses keep it
        value = written_attributes(value)
    return Parts(b"dict", [part for item in value.items() for part in item], group=2)


def _alone(value: Any) -> Parts:
    return Parts(b"any", [type(value)], [" type"])


def _array(value: np.ndarray) -> Parts:
    if type(value) not in {np.ndarray, np.memmap}:
        return _instance(value)
    tag = repr(("array", value.dtype, value.shape)).encode()
    if value.dtype.hasobject:
        return Parts(tag, value.ravel().tolist())
    if value.dtype.names:  # field by field: the padding between them is whatever memory held
        return Parts(tag, [np.asarray(value[name]) for name in value.dtype.names], value.dtype.names)
    flat = np.ascontiguousarray(value).reshape(-1)  # a copy only of what is not contiguous
    return Parts(tag + xxhash.xxh3_128_digest(flat.view(np.uint8).data if flat.nbytes else b""))


def _instance(value: Any) -> Parts:
    """Take an object apart as pickle does, without what it computes anew."""
    kind = type(value)
    reduce = copyreg.dispatch_table.get(kind)
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global, as pickle finds it
        module = getattr(value, "__module__", None) or kind.__module__
        return Parts(f"global {reduced}".encode(), [kind, Import(module)], ["", ""])
    build, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    pairs = None if pairs is None else list(pairs)
    held = [
        ("", kind),
        ("", arguments),
        ("", build),
        ("", None if items is None else list(items)),
        ("", dict(pairs) if pairs and not isinstance(value, collections.OrderedDict) else pairs),
    ]
    usual = build in {copyreg.__newobj__, copyreg.__newobj_ex__} and kind.__getstate__ is _USUAL_STATE  # type: ignore[attr-defined]
    if usual and isinstance(state, tuple):
        state = {**(state[0] or {}), **state[1]}  # `__dict__` and slots
    if not isinstance(state, dict):
        return named(b"instance", [*held, (" state", state)], {})
    return named(b"instance", held, _lasting(kind, state))


def _lasting(kind: type, state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an instance without those that using it sets."""
    computed = {
        name
        for base in kind.__mro__
        for name, part in vars(base).items()
        if isinstance(part, functools.cached_property)
    }
    if not _is_albumentations(kind):
        return {name: value for name, value in state.items() if name not in computed and name != "__doc__"}
    lasting = {name: value for name, value in state.items() if name not in computed | _LAST_IMAGE}
    # Processors remember the labels that they saw; their parameters decide.
    lasting["processors"] = {name: vars(processor.params) for name, processor in state.get("processors", {}).items()}
    return lasting


def _is_albumentations(kind: type) -> bool:
    modules = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    return "albumentations" in modules and hasattr(kind, "set_random_state")


def _method(value: types.MethodType) -> Parts:
    return Parts(b"method", [value.__func__, value.__self__], ["", ".__self__"])


def _builtin(value: Any) -> Parts:
    """Return a function or method written in C: by name, and by the object it is bound to."""
    owner = getattr(value, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return Parts(f"builtin {value.__qualname__}".encode(), [Import(value.__module__ or "builtins")], [""])
    return Parts(f"builtin {value.__name__}".encode(), [owner], [".__self__"])


def _descriptor(value: Any) -> Parts:
    return Parts(f"descriptor {value.__name__}".encode(), [value.__objclass__], [""])


def _property(value: Any) -> Parts:
    return Parts(b"property", [value.fget, value.fset, value.fdel], ["", ".setter", ".deleter"])


def _wrapped(value: Any) -> Parts:
    return Parts(type(value).__name__.encode(), [value.__wrapped__], [""])


def _enum(value: enum.Enum) -> Parts:
    return Parts(b"enum", [type(value), value.value], ["", ".value"])


_TABLE: dict[type, Callable[[Any], Parts]] = {
    list: _sequence,
    tuple: _sequence,
    set: _set,
    frozenset: _set,
    dict: _dict,
    types.MappingProxyType: _dict,
    bytearray: lambda value: Parts(b"bytearray", [bytes(value)]),
    memoryview: lambda value: Parts(b"memoryview", [np.asarray(value)]),
    property: _property,
    classmethod: _wrapped,
    staticmethod: _wrapped,
    LRU: _wrapped,
    types.FunctionType: parts_of_function,
    types.MethodType: _method,
    types.BuiltinFunctionType: _builtin,
    types.MethodWrapperType: _builtin,
    types.WrapperDescriptorType: _descriptor,
    types.MethodDescriptorType: _descriptor,
    types.ClassMethodDescriptorType: _descriptor,
    types.GetSetDescriptorType: _descriptor,
    types.MemberDescriptorType: _descriptor,
    types.CodeType: lambda value: Parts(b"", [Code(value, "")], [""]),
    weakref.ref: lambda value: Parts(b"weakref", [value()], [""]),
    Code: parts_of_code,
    Import: parts_of_import,
}
"""What objects of exactly these types are made of."""

_KINDS: dict[type, Callable[[Any], Parts]] = {
    type: parts_of_class,
    types.ModuleType: parts_of_module,
    enum.Enum: _enum,
    np.ndarray: _array,
    np.generic: lambda value: Parts(b"scalar", [np.asarray(value)], [""]),
    np.dtype: lambda value: Parts(b"dtype " + repr(value).encode()),
    set: lambda value: Parts(b"", [type(value), frozenset(value), getattr(value, "__dict__", {})]),
    frozenset: lambda value: Parts(b"", [type(value), frozenset(value), getattr(value, "__dict__", {})]),
    **dict.fromkeys(
        [
            np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random,
            logging.Logger, logging.Handler,
            type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore,
            threading.Barrier, threading.Thread, threading.local, concurrent.futures.Executor,
            weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
        ],
        _alone,
    ),
}  # fmt: skip
"""What objects of these types, and of types derived from them, are made of."""
