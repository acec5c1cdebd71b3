"""Provides `frozen`, a frozen dataclass that is cheap to define.

`dataclasses.dataclass(frozen=True)` compiles the source of six methods for each class, half a millisecond of the start
of every program and worker, a third of the time of a short job. Here only `__init__` is compiled, when the first object
is made; the other methods are the same functions for all classes. Everything else is as in a dataclass: `fields`,
`replace`, `asdict`, `match`.
"""

from __future__ import annotations

import dataclasses
import operator
import reprlib
import sys
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["frozen"]

_Class = TypeVar("_Class")
_MISSING: Any = dataclasses.MISSING


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen(*, slots: bool = True, eq: bool = True, kw_only: bool = False) -> Callable[[type[_Class]], type[_Class]]:
    """Return a decorator that makes a class a frozen dataclass, without inheritance.

    Args:
        slots: whether objects have only the fields; not for classes with a `cached_property`.
        eq: whether objects with equal fields are equal, and hash alike; False compares by identity.
        kw_only: whether fields can only be given by name.

    Example:
        >>> @frozen()
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> Point(1)
        Point(x=1, y=0)
    """

    def made(cls: type[_Class]) -> type[_Class]:
        own = set(vars(cls))
        kind: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
        fields = dataclasses.fields(kind)
        methods = {"__repr__": _repr, "__init__": _FirstInit(kind)}
        if eq:
            names = [field.name for field in fields if field.compare]
            kind.__compared__ = operator.attrgetter(*names, *names[:1]) if names else type  # at least two: a tuple
            methods |= {"__eq__": _eq, "__hash__": _hash}
        if slots:
            methods |= {"__getstate__": _getstate, "__setstate__": _setstate}
        for name, method in methods.items():
            if name not in own:
                setattr(kind, name, method)
        kind.__setattr__, kind.__delattr__ = _setattr, _delattr
        kind.__dataclass_params__.frozen = True
        return kind  # type: ignore[no-any-return]

    return made


class _FirstInit:
    """Stands for the `__init__` of a class until it is looked up: a job uses less than half of the classes."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __get__(self, found: Any, owner: type) -> Any:
        init = _init_of(self.cls)
        self.cls.__init__ = init  # type: ignore[misc]
        return init.__get__(found, owner)


def _init_of(cls: type) -> Callable[..., None]:
    """Return the `__init__` of a class, which sets its fields and calls `__post_init__`."""
    fields = dataclasses.fields(cls)
    module = cls.__module__  # which tracebacks go by
    outer: dict[str, Any] = {"_set": object.__setattr__, "_MISSING": _MISSING}  # what it closes over
    plain, named, body = ["self"], list[str](), list[str]()
    for field in fields:
        name, given = field.name, field.name
        if field.default_factory is not _MISSING:
            outer[f"_of_{name}"] = field.default_factory
            given = f"_of_{name}() if {name} is _MISSING else {name}" if field.init else f"_of_{name}()"
            default = "=_MISSING"
        elif field.default is not _MISSING:
            outer[f"_of_{name}"] = field.default
            given = name if field.init else f"_of_{name}"
            default = f"=_of_{name}"
        elif field.init:
            default = ""
        else:
            continue
        if field.init:
            (named if field.kw_only else plain).append(f"{name}{default}")
        body.append(f"  _set(self, {name!r}, {given})")
    if hasattr(cls, "__post_init__"):
        body.append("  self.__post_init__()")
    parameters = ", ".join([*plain, *(["*", *named] if named else [])])
    source = [
        f"def made({', '.join(outer)}):",
        f" def __init__({parameters}):",
        *(body or ["  pass"]),
        " return __init__",
    ]
    found: dict[str, Any] = {}
    exec("\n".join(source), vars(sys.modules[module]), found)  # noqa: S102 -- as dataclasses do
    init: Callable[..., None] = found["made"](**outer)
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", module
    init.__annotations__ = {field.name: field.type for field in fields if field.init} | {"return": None}
    return init


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({shown})"


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self.__compared__(self) == self.__compared__(other)


def _hash(self: Any) -> int:
    return hash(self.__compared__(self))


def _setattr(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__slots__]


def _setstate(self: Any, state: list[Any]) -> None:
    for name, content in zip(self.__slots__, state, strict=True):
        object.__setattr__(self, name, content)
