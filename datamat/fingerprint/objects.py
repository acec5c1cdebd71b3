"""The parts of one object: values, instances, and the tables with the rule for each type."""

from __future__ import annotations

import collections
import concurrent.futures
import contextvars
import copyreg
import dataclasses
import enum
import functools
import logging
import os
import random
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from datamat.fingerprint.code import (
    ATOMS,
    LRU,
    CodeInPackage,
    Environment,
    Import,
    Parts,
    Reached,
    home_of,
    is_installed,
    is_users_object,
    memos_of,
    named,
    parts_of_class,
    parts_of_code,
    parts_of_function,
    parts_of_import,
    parts_of_module,
    reach,
    written_attributes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_LAST_IMAGE = frozenset(
    {
        "params", "seed", "random_generator", "py_random", "_key2func", "processors", "check_each_transform",
        "_images_was_list", "_masks_was_list",
    }
)  # fmt: skip
"""Attributes that albumentations transforms set for each image, or derive from other attributes."""

_ALONE_MODULES = frozenset({"multiprocess.synchronize", "multiprocessing.synchronize"})
_USUAL_STATE: Any = object.__getstate__


def parts_of(value: Any) -> Parts:
    """Return the parts of an object; if it has no content, raise what pickle raises."""
    kind = type(value)
    if kind in _TABLE:
        return _TABLE[kind](value)
    for base in kind.__mro__[:-1]:
        if base in _KINDS:
            return _KINDS[base](value)
    if any((base.__module__, base.__qualname__) == ("torch", "Tensor") for base in kind.__mro__):
        return _tensor(value)
    if kind.__module__ in _ALONE_MODULES:
        return _alone(value)
    if kind.__module__ == "datamat.parallel.standins":
        return _standin(value)
    if isinstance(value, collections.abc.Iterator) and is_installed(kind.__module__):
        raise TypeError("its items depend on how many were read before")
    return _instance(value)


_PLAIN = frozenset([*ATOMS, list, tuple, dict, set, frozenset])
_CONTENT = _PLAIN | {np.ndarray}


def _sequence(value: Sequence[Any]) -> Parts:
    return Parts(type(value).__name__.encode(), value)


def _set(value: Iterable[Any]) -> Parts:
    return Parts(type(value).__name__.encode(), tuple(value), group=1)


def _dict(value: Any) -> Parts:
    if "__module__" in value and "__qualname__" in value:  # the body of a class, which metaclasses keep
        value = written_attributes(value)
    return Parts(b"dict", [part for item in value.items() for part in item], group=2)


def _alone(value: Any) -> Parts:
    return Parts(f"any {_kind_of(type(value))}".encode())


def _kind_of(kind: type) -> str:
    """Return the name of the base class that counts: a worker's logger may have another type than its caller's."""
    base = next((base for base in kind.__mro__ if base in _LONERS), kind)
    return f"{base.__module__}.{base.__qualname__}"


def _standin(value: Any) -> Parts:
    """Return the parts of a stand-in, which counts as the object that stayed in the caller."""
    module, _, name = value._datamat_type.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    return Parts(f"any {_kind_of(kind) if isinstance(kind, type) else value._datamat_type}".encode())


def _array(value: np.ndarray) -> Parts:
    if type(value) not in {np.ndarray, np.memmap}:
        return _instance(value)
    tag = repr(("array", value.dtype, value.shape)).encode()
    if value.dtype.hasobject:
        return Parts(tag, value.ravel().tolist())
    if value.dtype.names:  # field by field, as the padding between fields is arbitrary
        return Parts(tag, [np.asarray(value[name]) for name in value.dtype.names], value.dtype.names)
    flat = np.ascontiguousarray(value).reshape(-1)  # copies only arrays that are not contiguous
    return Parts(tag + xxhash.xxh3_128_digest(flat.view(np.uint8).data if flat.nbytes else b""))


def _tensor(value: Any) -> Parts:
    """Return the parts of a torch tensor by content, as its pickle holds memory addresses."""
    torch = sys.modules["torch"]
    if value.layout is not torch.strided or value.is_quantized:
        raise TypeError(f"tensors of layout {value.layout} are not supported; store a dense tensor, or its parts")
    tag = repr((type(value).__qualname__, str(value.dtype), tuple(value.shape), value.requires_grad)).encode()
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return Parts(b"tensor " + tag + xxhash.xxh3_128_digest(flat.data if flat.nbytes else b""))


def _instance(value: Any, counts: Callable[[str], bool] | None = None) -> Parts:
    """Return the parts of an object as pickle sees them, without cached properties.

    Args:
        value: object whose type has no rule of its own.
        counts: predicate for the names of attributes that count; None if all do.
    """
    kind = type(value)
    # tblib, which Dask uses, registers every exception type so that tracebacks travel, but only in processes that
    # import it.
    reduce = None if isinstance(value, BaseException) else copyreg.dispatch_table.get(kind)
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global, by the name under which pickle finds it
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
    computed = _computed(kind)
    if usual and state and isinstance(state, dict) and state.keys() <= computed:
        state = None  # as before any was computed
    if isinstance(state, dict):
        lasting = {name: part for name, part in _lasting(kind, state).items() if counts is None or counts(str(name))}
        parts = named(b"instance", held, lasting)
    else:
        parts = named(b"instance", [*held, (" state", state)], {})
    if computed and not is_installed(kind.__module__):
        return dataclasses.replace(parts, memos={("", f".{name}"): True for name in computed})
    return parts


def _reached(found: Reached) -> Parts:
    """Return the parts of an object that its counted methods use, without those that they fill themselves."""
    value = found.value
    kind: Any = type(value)
    making = reach(value, found.entries)
    memos = memos_of(value, making, found.others)
    uses = reach(value, [*found.entries, *found.others]).uses
    if found.is_whole or uses.escapes or kind.__reduce_ex__ is not object.__reduce_ex__:
        return _instance(value, lambda name: name not in memos and (uses.escapes or name in uses.reads))
    whole = _instance(value)
    state = {step.removeprefix("."): part for step, part in zip(whole.steps, whole.children, strict=True) if step}
    # An object without attributes has the state None; its methods still count one by one.
    has_usual_state = state.get(" state") is None and kind.__getstate__ is _USUAL_STATE
    if (" state" in state and not has_usual_state) or kind.__reduce__ is not object.__reduce__:
        return whole
    attributes: dict[str, Any] = {name: state[name] for name in uses.reads - memos if name in state}
    homes = {}
    for name in uses.reads:
        base = next((base for base in kind.__mro__ if name in vars(base)), object)
        if base is not object and not is_installed(base.__module__):
            attributes[f"{name} of the class"] = vars(base)[name]
            homes[f"{name} of the class"] = (base.__module__, f"{base.__qualname__}.{name}")
    is_of_the_class = any(isinstance(part, classmethod) for part in attributes.values()) or "__class__" in uses.reads
    return named(b"reached", [("", kind)] if is_of_the_class else [], attributes, homes=homes)


def hidden_in(found: Reached) -> Iterator[str]:
    """Yield non-empty attributes that an object's methods read but that its `__getstate__` or `__reduce__` omits."""
    value = found.value
    kind: Any = type(value)
    by = "__reduce__" if kind.__reduce__ is not object.__reduce__ else "__getstate__"
    base = next(base for base in kind.__mro__ if by in vars(base))
    reduced = () if base is object or is_installed(base.__module__) else value.__reduce_ex__(4)
    if not isinstance(reduced, tuple) or not reduced:
        return
    making = reach(value, found.entries)
    arguments, state = (*reduced, None)[1:3]
    kept = [*arguments, state, *(state if isinstance(state, (list, tuple)) else ())]
    names = {name for each in kept if isinstance(each, dict) for name in each}
    for name in sorted(making.uses.reads - memos_of(value, making, found.others) - names):
        held = getattr(value, "__dict__", {}).get(name)
        has_content = type(held) in _CONTENT and (held.size if isinstance(held, np.ndarray) else held)
        if has_content and not any(held is each for each in kept):
            yield f"{kind.__qualname__}.{name} (left out by {by})"


def _lasting(kind: type, state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an instance, without those set by using it."""
    computed = _computed(kind)
    if not _is_albumentations(kind):
        return {name: value for name, value in state.items() if name not in computed and name != "__doc__"}
    lasting = {name: value for name, value in state.items() if name not in computed | _LAST_IMAGE}
    # Processors remember the labels they have seen, but only their parameters decide.
    lasting["processors"] = {name: vars(processor.params) for name, processor in state.get("processors", {}).items()}
    return lasting


def _computed(kind: type) -> set[str]:
    """Return the names of a type's cached properties, which are computed on first access."""
    return {
        name
        for base in kind.__mro__
        for name, part in vars(base).items()
        if isinstance(part, functools.cached_property)
    }


def _is_albumentations(kind: type) -> bool:
    modules = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    return "albumentations" in modules and hasattr(kind, "set_random_state")


def _method(value: types.MethodType) -> Parts:
    owner, name = value.__self__, value.__func__.__name__
    if is_users_object(owner) and _is_same_code(getattr(type(owner), name, None), value.__func__):
        return Parts(b"method", [value.__func__, Reached(owner, frozenset({name}))], ["", "'s self"])
    return Parts(b"method", [value.__func__, value.__self__], ["", "'s self"])


def _is_same_code(one: Any, other: Any) -> bool:
    """Return True if two functions are the same or copies: in a worker, a class may arrive with another message."""
    code = getattr(one, "__code__", None)
    return one is other or (code is not None and code == getattr(other, "__code__", None))


def _builtin(value: Any) -> Parts:
    """Return the parts of a function or method written in C: its name, and the object it is bound to."""
    owner = getattr(value, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return Parts(f"builtin {value.__qualname__}".encode(), [Import(value.__module__ or "builtins")], [""])
    return Parts(f"builtin {value.__name__}".encode(), [owner], ["'s self"])


def _descriptor(value: Any) -> Parts:
    return Parts(f"descriptor {value.__name__}".encode(), [value.__objclass__], [""])


def _property(value: Any) -> Parts:
    return Parts(b"property", [value.fget, value.fset, value.fdel], ["", ".setter", ".deleter"])


def _wrapped(value: Any) -> Parts:
    return Parts(type(value).__name__.encode(), [value.__wrapped__], [""])


def _cached(value: Any) -> Parts:
    """Return the parts of a cached function; the contents of its cache are a memo."""
    home = home_of(value)
    parts = _wrapped(value)
    return parts if home is None else dataclasses.replace(parts, memos={(home[0], f"{home[1]}()"): True})


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
    LRU: _cached,
    types.FunctionType: parts_of_function,
    types.MethodType: _method,
    types.BuiltinFunctionType: _builtin,
    types.MethodWrapperType: _builtin,
    types.WrapperDescriptorType: _descriptor,
    types.MethodDescriptorType: _descriptor,
    types.ClassMethodDescriptorType: _descriptor,
    types.GetSetDescriptorType: _descriptor,
    types.MemberDescriptorType: _descriptor,
    types.CodeType: lambda value: Parts(b"", [CodeInPackage(value, "")], [""]),
    weakref.ref: lambda value: Parts(b"weakref", [value()], [""]),
    contextvars.ContextVar: lambda value: Parts(b"context variable", [value.get(None)], [".get()"]),
    CodeInPackage: parts_of_code,
    Reached: _reached,
    type(os.environ): lambda _: Parts(b"os.environ"),  # only the variables that code reads count
    Environment: lambda value: Parts(f"environment {value.name}".encode()),
    Import: parts_of_import,
}
"""Parts of objects of exactly these types."""

_LONERS: tuple[type, ...] = (
            np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random,
            logging.Logger, logging.Handler,
            type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore,
            threading.Barrier, threading.Thread, threading.local, concurrent.futures.Executor,
            weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
)  # fmt: skip
"""Types of objects that never reach the output, or whose state is set for each record."""

_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


def held_here(value: Any) -> str:
    """Describe how an object holds values that neither travel to workers nor count in digests; "" if it holds none."""
    if isinstance(value, _WEAK) and len(value):
        return "by weak references"
    is_filled = isinstance(value, threading.local) and any(
        type(held) not in _PLAIN or held for held in vars(value).values()
    )
    return "for one thread" if is_filled else ""


_KINDS: dict[type, Callable[[Any], Parts]] = {
    type: parts_of_class,
    types.ModuleType: parts_of_module,
    enum.Enum: _enum,
    np.ndarray: _array,
    np.generic: lambda value: Parts(b"scalar", [np.asarray(value)], [""]),
    np.dtype: lambda value: Parts(b"dtype " + repr(value).encode()),
    set: lambda value: Parts(b"", [type(value), frozenset(value), getattr(value, "__dict__", {})]),
    frozenset: lambda value: Parts(b"", [type(value), frozenset(value), getattr(value, "__dict__", {})]),
    **dict.fromkeys(_LONERS, _alone),
}  # fmt: skip
"""Parts of objects of these types and of their subclasses."""
