"""`frozen`: a frozen dataclass that costs a program little to define.

`dataclasses.dataclass(frozen=True)` compiles the source of six methods for each class, half a millisecond of the start
of every program and worker: of a short job, a third was spent there. Here `__init__` is compiled when the first object
is made, what `dataclasses.fields` returns is made when it is first asked for, and the other methods are the same
functions for all classes. All else is as in a dataclass: `fields`, `replace`, `asdict`, `match`.
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
_NO_FIELDS = ("ClassVar", "typing.ClassVar")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen(*, slots: bool = True, eq: bool = True, kw_only: bool = False) -> Callable[[type[_Class]], type[_Class]]:
    """Return what makes a class a frozen dataclass. None is derived from another.

    Args:
        slots: whether objects have only the fields; not where a `cached_property` is to be kept.
        eq: whether objects with equal fields are equal, and hash alike; False compares by identity.
        kw_only: whether fields are given by name only.

    Example:
        >>> @frozen()
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> Point(1)
        Point(x=1, y=0)
    """

    def made(cls: type[_Class]) -> type[_Class]:
        own = dict(vars(cls))
        names = tuple(_names_of(cls))
        given = {name: own[name] for name in names if name in own}
        special = {name: value for name, value in given.items() if isinstance(value, dataclasses.Field)}
        hidden = {name for name, value in special.items() if not value.init}
        named = {name for name in names if _is_named(special.get(name), kw_only)}
        added: dict[str, Any] = {
            "__repr__": _repr,
            "__init__": _Init(names, given, named),
            "__match_args__": tuple(name for name in names if name not in hidden | named),
            "__replace__": _replace,
        }
        if eq:
            compared = [name for name in names if name not in special or special[name].compare]
            added |= {"__eq__": _eq, "__hash__": _hash}
            # At least two names: a tuple.
            added["__compared__"] = operator.attrgetter(*compared, *compared[:1]) if compared else type
        if slots:
            added |= {"__getstate__": _getstate, "__setstate__": _setstate}
        added |= {name: _Described(cls, given, kw_only) for name in ("__dataclass_fields__", "__dataclass_params__")}
        namespace = {**added, **own, "__stored__": names, "__setattr__": _setattr, "__delattr__": _delattr}
        return _slotted(cls, names, namespace) if slots else _filled(cls, given, own, namespace)

    return made


def _slotted(cls: type[_Class], names: tuple[str, ...], namespace: dict[str, Any]) -> type[_Class]:
    """Return a class made anew, as slots must be declared before it is."""
    kept = {name: value for name, value in namespace.items() if name not in {*names, "__dict__", "__weakref__"}}
    kept |= {"__slots__": names, "__qualname__": cls.__qualname__}
    kind: Any = type(cls)
    made: type[_Class] = kind(cls.__name__, cls.__bases__, kept)
    return made


def _filled(cls: type[_Class], given: dict[str, Any], own: dict[str, Any], namespace: dict[str, Any]) -> type[_Class]:
    """Return the class with what was added to it, and with the defaults of its fields."""
    for name, value in given.items():
        if isinstance(value, dataclasses.Field):
            del namespace[name]
            if value.default is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, value.default)
    for name, value in namespace.items():
        if name not in own or own[name] is not value:
            setattr(cls, name, value)
            if isinstance(value, _Init | _Described):
                value.__set_name__(cls, name)
    return cls


def _names_of(cls: type) -> list[str]:
    """Return the names of the fields that a class declares itself."""
    return [name for name, kind in cls.__annotations__.items() if not str(kind).startswith(_NO_FIELDS)]


def _is_named(field: dataclasses.Field[Any] | None, kw_only: bool) -> bool:
    """Return whether a field is given by name only."""
    return kw_only if field is None or field.kw_only is _MISSING else bool(field.kw_only)


class _Described:
    """The fields and parameters that functions of `dataclasses` ask a class for; made when one of them first does.

    Args:
        cls: the class, as it was declared.
        given: what it assigns to its fields.
        kw_only: whether fields are given by name only.
    """

    def __init__(self, cls: type, given: dict[str, Any], kw_only: bool) -> None:
        self._cls, self._given, self._kw_only = cls, given, kw_only

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: Any, owner: type) -> Any:
        # With a docstring, or one would be made of its signature.
        declared = {"__module__": self._cls.__module__, "__annotations__": dict(self._cls.__annotations__)}
        like: Any = type(self._cls.__name__, (), {**self._given, **declared, "__doc__": self._cls.__name__})
        like = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=self._kw_only)(like)
        like.__dataclass_params__.frozen = True
        for name in ("__dataclass_fields__", "__dataclass_params__"):
            setattr(self._owner, name, getattr(like, name))
        return getattr(self._owner, self._name)


class _Init:
    """The `__init__` of a class, compiled when it is first used: a short job uses every third class that it loads.

    Args:
        names: names of the fields.
        given: what the class assigns to them.
        named: those that are given by name only.
    """

    def __init__(self, names: tuple[str, ...], given: dict[str, Any], named: set[str]) -> None:
        self._described = names, given, named

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner

    def __get__(self, instance: Any, owner: type) -> Any:
        init: Any = _init_of(self._owner, *self._described)
        self._owner.__init__ = init  # type: ignore[misc]  # of this very class
        return init if instance is None else init.__get__(instance)


def _init_of(cls: type, names: tuple[str, ...], given: dict[str, Any], named: set[str]) -> Callable[..., None]:
    """Return the `__init__` of a class, which sets its fields and calls `__post_init__`."""
    module = cls.__module__  # which tracebacks go by
    outer: dict[str, Any] = {"_set": object.__setattr__, "_MISSING": _MISSING}  # what it closes over
    plain, by_name, body = ["self"], list[str](), list[str]()
    annotations: dict[str, Any] = {}
    for name in names:
        default: Any = given.get(name, _MISSING)
        factory, value, is_given = _MISSING, name, True
        if isinstance(default, dataclasses.Field):
            default, factory, is_given = default.default, default.default_factory, default.init
        shown = ""
        if factory is not _MISSING:
            outer[f"_of_{name}"] = factory
            value = f"_of_{name}() if {name} is _MISSING else {name}" if is_given else f"_of_{name}()"
            shown = "=_MISSING"
        elif default is not _MISSING:
            outer[f"_of_{name}"] = default
            value = name if is_given else f"_of_{name}"
            shown = f"=_of_{name}"
        elif not is_given:
            continue
        if is_given:
            (by_name if name in named else plain).append(f"{name}{shown}")
            annotations[name] = cls.__annotations__[name]
        body.append(f"  _set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("  self.__post_init__()")
    parameters = ", ".join([*plain, *(["*", *by_name] if by_name else [])])
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
    init.__annotations__ = {**annotations, "return": None}
    return init


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({shown})"


def _replace(self: Any, /, **changes: Any) -> Any:
    return dataclasses.replace(self, **changes)


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


def _stored(cls: type) -> tuple[str, ...]:
    """Return the names of the fields of a class, which may be a dataclass that is derived from one of these."""
    return vars(cls).get("__stored__") or tuple(field.name for field in dataclasses.fields(cls))


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, name) for name in _stored(type(self))]


def _setstate(self: Any, state: list[Any]) -> None:
    for name, content in zip(_stored(type(self)), state, strict=True):
        object.__setattr__(self, name, content)
