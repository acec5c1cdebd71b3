"""The graph of objects that make up a value, and its digest.

Nothing recurses, so depth and cycles do not matter. `_Graph.grow` follows the parts of each object, and `_Graph.digest`
folds the graph, one strongly connected component after another. Inside a component (such as a class and the methods
that name it), colour refinement distinguishes nodes: the digest depends neither on where the walk entered nor on which
equal parts are the same object.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import time
import types
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.errors import FingerprintError
from datamat.fingerprint.code import (
    ATOMS,
    CodeInPackage,
    Environment,
    Import,
    Parts,
    Reached,
    hashes,
    is_installed,
    origin_of_function,
    reach,
    unseen_of,
)
from datamat.fingerprint.objects import held_here, hidden_in, parts_of
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from datamat.fingerprint.code import Home

_UNREADABLE = (
    TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, OSError, ReferenceError,
    pickle.PickleError,
)  # fmt: skip
"""Errors of `__getstate__` and `__reduce__` for objects without content."""
_BY_VALUE = (Environment, Import)
_SHORT = 16  # tuples of up to this many items are cheaper to digest again than to remember
_MOST_VALUES = 1 << 20


def fingerprint(value: Any, *, where: str) -> str:
    """Return the digest of a value as 32 hex digits (XXH3-128 over a prefix-free form).

    XXH3 is not cryptographic: it does not protect against adversaries.

    Args:
        value: value that decides output: code, arrays, containers, or any object that can be pickled.
        where: name of the value in messages, such as `writer`.

    Raises:
        FingerprintError: part of the value has no content to digest; the message gives the path to it.

    Example:
        >>> fingerprint({"a": 1, "b": {2, 3}}, where="options") == fingerprint({"b": {3, 2}, "a": 1}, where="options")
        True
    """
    found = examine(value, where=where)
    if not found.packages and not found.environment:
        return found.digest
    beside = repr([sorted(found.packages.items()), sorted(found.environment.items())])
    return _hash(b"value", found.digest.encode(), beside.encode()).hex()


@frozen()
class ModuleValue:
    """A value that code reads from one of the user's modules, or a class in one, and that may be set at run time.

    Attributes:
        path: path to the value, such as `writer.read -> cfg.sizes`.
        digest: digest of the value, 16 bytes.
        value: the value itself.
    """

    path: str
    digest: bytes
    value: Any


@frozen()
class Examined:
    """Everything that decides a value.

    Attributes:
        digest: digest of everything but packages and environment, as 32 hex digits.
        packages: versions of the installed packages and parts of datamat that the value uses, by name.
        environment: digests of the environment variables that the value reads, by name.
        module_values: values read from the user's modules, by module and attribute path.
        memos: locations that the user's code fills itself (see `fingerprint.memos`); their contents are not part of
            the digest.
        hashing: description of the first user code that makes a set or hashes a value, or of the first set in a user
            module: its result may depend on the hash seed of the process. "" if there is none.
        pieces: short digests by name, which show what changed: one for each piece of code ("code.read"), module value
            that code reads ("global.GAIN") and attribute ("attribute.scale"), each without the parts that have a name
            of their own.
        unseen: descriptions of what the digest cannot count in the user code that makes samples: lookups resolved only
            when it runs, and objects whose content stays in this process.
    """

    digest: str
    packages: dict[str, str]
    environment: Mapping[str, str]
    module_values: Mapping[Home, ModuleValue]
    memos: Collection[Home]
    hashing: str
    unseen: Sequence[str] = ()
    pieces: Mapping[str, str] = dataclasses.field(default_factory=dict)


def examine(value: Any, *, where: str) -> Examined:
    """Return everything that decides a value; arguments and errors are those of `fingerprint`.

    Example:
        >>> import numpy as np
        >>> found = examine(np.zeros, where="fn")
        >>> sorted(found.packages)
        ['numpy']
    """
    graph = _Graph(where)
    root = graph.grow(value)
    return Examined(
        graph.digest(root).hex(),
        graph.packages(),
        graph.environment(),
        graph.module_values(),
        graph.memos,
        graph.hashing(),
        graph.unseen(),
        graph.pieces(),
    )


def content_of(value: Any) -> str | None:
    """Return the digest of a value as 32 hex digits; None if it has no content to fingerprint.

    Raises:
        OverflowError: the value is made of more than a million values, which would take seconds in each process.
    """
    graph = _Graph("memo")
    try:
        return graph.digest(graph.grow(value, most=_MOST_VALUES)).hex()
    except _TooMany as error:
        raise OverflowError(f"more than {_MOST_VALUES} values") from error
    except Exception:  # noqa: BLE001 -- the object's own methods may raise anything
        return None


class _TooMany(Exception):  # noqa: N818 -- reads as what it is
    """A value is made of more values than allowed."""


@dataclasses.dataclass(slots=True, repr=False, eq=False)
class _ObjectNode:
    """One object in the graph; each of its `links` is the number of a node or the digest of an atom."""

    value: Any  # kept alive, because its id names the node
    parent: int
    position: int
    parts: Parts = dataclasses.field(init=False)
    links: list[int | bytes] = dataclasses.field(default_factory=list)
    digest: bytes = b""


class _Graph:
    """The objects that make up a value: nodes, in breadth-first order."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._nodes: list[_ObjectNode] = []
        self._numbers: dict[Any, int] = {}
        self.memos: set[Home] = set()

    def grow(self, value: Any, *, most: float = math.inf) -> int | bytes:
        """Add a value and everything it is made of, and return its link.

        Raises:
            _TooMany: that would be more than `most` values.
        """
        root = self._link(value, -1, 0)
        for number, node in enumerate(self._nodes):  # grows during the loop
            try:
                node.parts = parts_of(node.value)
            except _UNREADABLE as error:
                raise self._refusal(number, error) from error
            if (most := most - len(node.parts.children)) < 0:
                raise _TooMany
            node.links = [self._link(child, number, position) for position, child in enumerate(node.parts.children)]
        self._set_memos_apart()
        return root

    def _set_memos_apart(self) -> None:
        """Record which locations the code both fills and reads, and exclude their contents from the digest."""
        read = {_of_main(home) for node in self._nodes for home in node.parts.homes.values()}
        for number, node in enumerate(self._nodes):
            for (module, path), is_read in node.parts.memos.items():
                home: Home | None = (module, path) if module else self._home_inside(number, path)
                if home is not None and (is_read or _of_main(home) in read):
                    self.memos.add(_of_main(home))
        for node in self._nodes if self.memos else ():
            for position, home in node.parts.homes.items():
                if _of_main(home) in self.memos:
                    node.links[position] = _hash(b"memo")

    def _home_inside(self, number: int, path: str) -> Home | None:
        """Return the location of an attribute of an object that a module holds; None if no module holds the object."""
        while (node := self._nodes[number]).parent >= 0:
            parts = self._nodes[node.parent].parts
            if node.position in parts.homes:
                module, start = parts.homes[node.position]
                return module, start + path
            step = _step(parts, node.position)
            if not step.startswith("."):
                return None
            path, number = step + path, node.parent
        return None

    def digest(self, root: int | bytes) -> bytes:
        """Return the digest of a link, 16 bytes."""
        if isinstance(root, bytes):
            return root
        for component in _components([node.links for node in self._nodes]):
            self._fold(component)
        return self._nodes[root].digest

    def packages(self) -> dict[str, str]:
        """Return the versions of the installed packages and parts of datamat in the graph, by name."""
        return {name: version for node in self._nodes for name, version in node.parts.origins if version}

    def environment(self) -> dict[str, str]:
        """Return the digest of each environment variable that is read, as hex digits."""
        names = {node.value.name for node in self._nodes if type(node.value) is Environment}
        values = {name: os.environ.get(name) for name in sorted(names)}
        if "TZ" in values:  # if unset, the host's zone counts
            values["TZ"] = repr((time.tzname, time.timezone, time.altzone))
        return {
            name: _hash(b"unset" if value is None else b"set", os.fsencode(value or "")).hex()
            for name, value in values.items()
        }

    def module_values(self) -> dict[Home, ModuleValue]:
        """Return the values read from the user's modules; call `digest` first."""
        found: dict[Home, ModuleValue] = {}
        for number, node in enumerate(self._nodes):
            for position, place in node.parts.homes.items():
                home = _of_main(place)
                if home not in found and home not in self.memos:
                    link, value = node.links[position], node.parts.children[position]
                    digest = link if isinstance(link, bytes) else self._nodes[link].digest
                    value = value.value if isinstance(value, Reached) else value
                    found[home] = ModuleValue(self._path(number) + _step(node.parts, position), digest, value)
        return found

    def pieces(self) -> dict[str, str]:
        """Return a short digest of each named thing in the user's code, by kind and name; call `digest` first."""
        found: dict[str, list[bytes]] = {}
        for node in self._nodes:
            for position, name in _names_in(node).items():
                link = node.links[position]
                value = None if isinstance(link, bytes) else self._nodes[link].value
                holder = "global" if isinstance(node.value, types.FunctionType) else "attribute"
                kind = "code" if isinstance(value, _CODE) else holder
                found.setdefault(f"{kind}.{name}", []).append(self._own(link, ()))
        # Long enough to tell what changed, too short to reveal the content.
        return {name: _hash(b"piece", *sorted(set(digests))).hex()[:4] for name, digests in sorted(found.items())}

    def _own(self, link: int | bytes, around: tuple[int, ...]) -> bytes:
        """Return the digest of a link's target, without the parts that have a name of their own."""
        if isinstance(link, bytes) or link in around:
            return link if isinstance(link, bytes) else b""
        node = self._nodes[link]
        if not isinstance(node.value, _CODE):
            return node.digest
        names = _names_in(node)
        inner = [b"" if place in names else self._own(one, (*around, link)) for place, one in enumerate(node.links)]
        return _combine(node.parts, inner)

    def hashing(self) -> str:
        """Describe the first object in the graph that may depend on the hash seed; "" if there is none."""
        for number, node in enumerate(self._nodes):
            if isinstance(node.value, types.FunctionType) and (how := hashes(node.value)):
                return f"{self._path(number)} {how}"
            if isinstance(node.value, (set, frozenset)) and len(node.value) > 1 and self._is_the_users(number):
                return f"{self._path(number)} is a set"
        return ""

    def unseen(self) -> tuple[str, ...]:
        """Return the descriptions for `Examined.unseen`.

        If the whole class of an object counts, only its code that makes samples is searched: what `index` looks up is
        in the rows that it returns.
        """
        making: dict[type, set[str]] = {}
        for node in self._nodes:
            if isinstance(node.value, Reached) and node.value.is_whole:
                for base in type(node.value.value).__mro__:
                    making.setdefault(base, set()).update(reach(node.value.value, node.value.entries).names)
        found: dict[str, None] = {}
        numbers = dict.fromkeys([0] if self._nodes else [])
        waiting = list(numbers)
        for number in waiting:  # grows during the loop
            node = self._nodes[number]
            found.update(dict.fromkeys(self._unseen_in(number)))
            names = making.get(node.value) if isinstance(node.value, type) else None
            for position, link in enumerate(node.links):
                is_made = names is None or _step(node.parts, position).removeprefix(".") in names
                if isinstance(link, int) and link not in numbers and is_made:
                    numbers[link] = None
                    waiting.append(link)
        return tuple(found)

    def _unseen_in(self, number: int) -> Iterator[str]:
        value, parent = self._nodes[number].value, self._nodes[max(self._nodes[number].parent, 0)].value
        if isinstance(value, types.FunctionType) and not origin_of_function(value):
            yield from unseen_of(value.__code__, value.__globals__)
        elif isinstance(value, CodeInPackage) and isinstance(parent, Import):
            yield from unseen_of(value.code, {})
        elif value is os.environ and not self._path(number).endswith(("-> environ", "-> os.environ")):
            yield f"os.environ as {self._path(number)}"
        elif isinstance(value, types.BuiltinFunctionType) and value in (eval, exec, globals):
            yield f"{value.__name__}() as {self._path(number)}"
        elif isinstance(value, Reached):
            yield from hidden_in(value)
        elif (how := held_here(value)) and self._is_the_users(number):
            yield f"what {self._path(number)} holds {how} (workers lack it)"

    def _is_the_users(self, number: int) -> bool:
        """Return True if the user's code may iterate over a set: neither a package nor a code constant holds it.

        `hashes` tells which constants are iterated over.
        """
        if isinstance(self._nodes[self._nodes[number].parent].value, CodeInPackage):
            return False
        while (number := self._nodes[number].parent) >= 0:
            holder = self._nodes[number].value
            holder = holder.value if isinstance(holder, Reached) else holder
            if isinstance(holder, types.FunctionType):
                return not origin_of_function(holder)
            kind = holder if isinstance(holder, type) else type(holder)
            if kind.__module__ != "builtins" and not kind.__module__.startswith("datamat.fingerprint"):
                return not is_installed(kind.__module__)
        return True

    def _link(self, value: Any, parent: int, position: int) -> int | bytes:
        leaf = _leaf(value)
        if leaf is not None:
            return leaf
        key = value.key if isinstance(value, Reached) else value if isinstance(value, _BY_VALUE) else id(value)
        number = self._numbers.setdefault(key, len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(_ObjectNode(value, parent, position))
        return number

    def _fold(self, component: list[int]) -> None:
        """Set the digests of one component; the nodes that it leads to already have theirs."""
        nodes = self._nodes
        colours = dict.fromkeys(component, bytes(16))
        classes = 0
        while len(set(colours.values())) > classes:
            classes = len(set(colours.values()))
            colours = {
                number: _combine(
                    nodes[number].parts,
                    [
                        link if isinstance(link, bytes) else colours.get(link, nodes[link].digest)
                        for link in nodes[number].links
                    ],
                )
                for number in component
            }
        everyone = b"".join(sorted(set(colours.values())))
        for number in component:
            nodes[number].digest = _hash(colours[number], everyone)

    def _refusal(self, number: int, error: BaseException) -> FingerprintError:
        kind = type(self._nodes[number].value)
        place = f"{self._path(number)}: {kind.__module__}.{kind.__qualname__}"
        return FingerprintError(
            f"{place} has no content to fingerprint ({error}); drop it in __getstate__, or create it in setup_worker"
        )

    def _path(self, number: int) -> str:
        """Return the path from the root to a node."""
        steps = []
        while (node := self._nodes[number]).parent >= 0:
            steps.append(_step(self._nodes[node.parent].parts, node.position))
            number = node.parent
        return (self._where + "".join(reversed(steps))).lstrip(".")


_PREFIXES = {kind: b"%d:atom %b" % (5 + len(kind.__name__), kind.__name__.encode()) for kind in ATOMS}


def _leaf(value: Any) -> bytes | None:
    """Return the digest of a value that needs no node: an atom, or a short tuple of atoms; else None.

    This keeps a table of a million entries out of the graph.
    """
    kind: Any = type(value)
    if kind in ATOMS:
        return xxhash.xxh3_128_digest(_PREFIXES[kind] + ATOMS[kind](value))
    if kind is not tuple or len(value) > _SHORT or not ATOMS.keys() >= set(map(type, value)):
        return None
    parts = [xxhash.xxh3_128_digest(_PREFIXES[type(part)] + ATOMS[type(part)](part)) for part in value]
    colour = _combine(Parts(b"tuple"), parts)
    return _hash(colour, colour)


def _of_main(home: Home) -> Home:
    """Return a location, with `__mp_main__`, as which multiprocessing reruns the main program, as `__main__`."""
    module, path = home
    return ("__main__" if module == "__mp_main__" else module, path)


def _components(links: Sequence[Sequence[int | bytes]]) -> Iterator[list[int]]:
    """Yield the strongly connected components of a graph, each after those that it leads to.

    Tarjan, Depth-first search and linear graph algorithms, SIAM J. Comput. 1 (1972), without its recursion.
    """
    edges = [[link for link in each if isinstance(link, int)] for each in links]
    order: dict[int, int] = {}
    low: dict[int, int] = {}  # for each node without a component: the earliest node known to share it
    unassigned: list[int] = []
    for start in range(len(edges)):
        walk = [] if start in order else [(start, iter(edges[start]))]
        while walk:
            node, ahead = walk[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                unassigned.append(node)
            new = next((link for link in ahead if link not in order), None)
            if new is not None:
                walk.append((new, iter(edges[new])))
                continue
            walk.pop()
            low[node] = min(low[link] for link in [node, *edges[node]] if link in low)
            if low[node] == order[node]:
                component = [unassigned.pop()]
                while component[-1] != node:
                    component.append(unassigned.pop())
                for member in component:
                    del low[member]
                yield component


def _combine(parts: Parts, digests: Sequence[bytes]) -> bytes:
    """Return the digest of a node from those of its children."""
    size = parts.group
    members = sorted(b"".join(digests[i : i + size]) for i in range(0, len(digests), size)) if size else digests
    return _hash(parts.tag, b"%d,%d;" % (size, len(digests)), *members)


def _hash(*pieces: bytes) -> bytes:
    """Return the XXH3-128 of pieces; only the first may vary in length, so its length is hashed too."""
    digest = xxhash.xxh3_128(b"%d:" % len(pieces[0]))
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


_CODE = (types.FunctionType, types.MethodType, type)


def _names_in(node: _ObjectNode) -> dict[int, str]:
    """Return the names that code, or the user's object, has for its parts, by position."""
    if not isinstance(node.value, (*_CODE, Reached)):
        return {}
    steps = {place: _step(node.parts, place) for place in range(len(node.links))}
    return {
        place: step.removeprefix(" -> ").removeprefix(".").removesuffix(" of the class")
        for place, step in steps.items()
        if step.startswith((" -> ", "."))
    }


def _step(parts: Parts, position: int) -> str:
    """Return the path step to a child."""
    if parts.steps:
        return parts.steps[position]
    if parts.group == 2:  # a dict: keys and values alternate
        key = parts.children[position - position % 2]
        return f"[{key!r}]" if isinstance(key, (str, int)) else f"[{type(key).__name__}]"
    return f"[{position}]"
