"""What functions, classes and modules are made of: the user's by content, installed ones by name and version."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.machinery
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from datamat.fingerprint.bytecode import DESCRIBING, Code, read_globals
from datamat.fingerprint.origins import find_spec, is_installed, is_users_module, origin_of_file, origin_of_module
from datamat.fingerprint.parts import ATOMS, Import, Parts, named

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LRU", "parts_of_class", "parts_of_function", "parts_of_import", "parts_of_module", "written_attributes"]

LRU = type(functools.lru_cache(lambda: None))
_CODE = (
    types.FunctionType,
    classmethod,
    staticmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    LRU,
)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_PLAIN = frozenset([*ATOMS, list, tuple, dict, set, frozenset, np.ndarray])
_DECLARED = frozenset({"__slots__", "__match_args__", "__annotations__", "__pydantic_fields__"})
"""Attributes of a class with names between double underscores that its author declares."""


def parts_of_function(value: types.FunctionType) -> Parts:
    """Return a function by its bytecode and by what that uses: defaults, closure, globals."""
    if is_installed(value.__module__) and "<" not in value.__qualname__:  # no lambda, nor local to another function
        return Parts(f"function {value.__qualname__}".encode(), [Import(value.__module__)], [""])
    # A function that an installed decorator made has the name of what it wraps, but its own globals.
    origin = origin_of_file(value.__globals__.get("__name__") or "", value.__globals__.get("__file__"))
    held: list[tuple[str, Any]] = [
        ("", Code(value.__code__, value.__globals__.get("__package__") or "")),
        (" defaults", value.__defaults__),
        (" defaults", value.__kwdefaults__),
        ("", None if origin else vars(value)),
    ]
    used = dict(_closure_of(value)) | ({} if origin else dict(read_globals(value)))
    return named(f"function {origin}".encode(), held, used, step=" -> ")


def _closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents


def parts_of_class(value: type) -> Parts:
    """Return a class by its bases and by the attributes that its author wrote."""
    if is_installed(value.__module__):
        return Parts(f"class {value.__qualname__}".encode(), [Import(value.__module__)], [""])
    body = written_attributes(dict(vars(value)))
    if isinstance(value, enum.EnumMeta):
        members: dict[str, Any] = {name: value[name].value for name in value.__members__}
        body = {name: part for name, part in body.items() if isinstance(part, _CODE)} | members
    tag = f"class {value.__name__} {len(value.__bases__)} ".encode()
    return named(tag, [(" class", base) for base in (type(value), *value.__bases__)], body)


def written_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a class that its author wrote, out of all that it has."""
    return {
        name: value
        for name, value in attributes.items()
        if name in _DECLARED
        or isinstance(value, _CODE)
        or not (
            name in DESCRIBING or (name.startswith("__") and name.endswith("__")) or isinstance(value, _DESCRIPTORS)
        )
    }


def parts_of_module(value: types.ModuleType) -> Parts:
    """Return a module that code uses as a whole: by version, or by what the user defined in it."""
    if not is_users_module(value):
        return Parts(b"module", [Import(value.__name__)], [""])
    own = {
        name: part
        for name, part in vars(value).items()
        if not name.startswith("__") and (type(part) in _PLAIN or getattr(part, "__module__", None) == value.__name__)
    }
    return named(b"module", [], own)


def parts_of_import(value: Import) -> Parts:
    """Return a module that code imports: by version, or by the user's source, which is compiled but not run."""
    origin, spec = origin_of_module(value.name), find_spec(value.name)
    if origin:
        return Parts(f"module {value.name} of {origin}".encode())
    if spec is None or spec.origin is None:
        return Parts(b"module without source")
    if spec.origin.endswith((".py", ".pyc")):
        package = value.name if spec.submodule_search_locations is not None else value.name.rpartition(".")[0]
        code = importlib.machinery.SourceFileLoader(value.name, spec.origin).get_code(value.name)
        return Parts(b"module", [] if code is None else [Code(code, package)], [f" ({value.name})"])
    with open(spec.origin, "rb") as file:
        return Parts(b"module " + xxhash.xxh3_128_digest(file.read()))
