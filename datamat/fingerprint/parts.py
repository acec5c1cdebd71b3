"""What one object is made of, as the walk over the graph wants to know it."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ATOMS", "Import", "Parts", "named"]

ATOMS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"",
    type(...): lambda _: b"",
    type(NotImplemented): lambda _: b"",
    bool: lambda value: b"%d" % value,
    int: lambda value: b"%x" % value,
    float: lambda value: struct.pack("<d", value) if value == value else b"nan",  # noqa: PLR0124 -- NaN alone differs
    complex: lambda value: struct.pack("<dd", value.real, value.imag),
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    bytes: lambda value: value,
}
"""The content of values that hold no others, by their exact type."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What an object is made of.

    Attributes:
        tag: its kind, and whatever of it is no object of its own.
        children: the objects it holds.
        steps: how the path goes on to each child; by position where left out.
        group: 0 where the order of the children counts, else how many make one member of a set.
    """

    tag: bytes
    children: Sequence[Any] = ()
    steps: Sequence[str] = ()
    group: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Import:
    """A module that code imports when it runs, by name: it need not be imported now."""

    name: str


def named(tag: bytes, held: list[tuple[str, Any]], attributes: dict[Any, Any], *, step: str = ".") -> Parts:
    """Return the parts of an object that holds attributes by name beside what it holds by place.

    Args:
        tag: as in `Parts`; the names are added to it.
        held: what it holds by place, each with how the path goes on to it.
        attributes: what it holds by name, in any order.
        step: what stands before a name in a path.
    """
    names = sorted(attributes, key=str)
    return Parts(
        tag + repr([str(name) for name in names]).encode(),
        [*(part for _, part in held), *(attributes[name] for name in names)],
        [*(place for place, _ in held), *(f"{step}{name}" for name in names)],
    )
