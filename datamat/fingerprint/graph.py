"""The objects that a value is made of, as a graph, and its digest.

There is no recursion, so that depth and cycles do not matter: `_Graph.grow` follows what `parts_of` says of each
object, and `_Graph.digest` folds the graph up, one strongly connected component after the other. Inside a component (a
class and the methods that name it) nodes are told apart by colour refinement: the digest depends neither on where the
walk came in nor on which equal parts are one object.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.errors import FingerprintError
from datamat.fingerprint.objects import parts_of
from datamat.fingerprint.parts import ATOMS, Import, Parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["fingerprint"]

_UNREADABLE = (
    TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, OSError, ReferenceError,
    pickle.PickleError,
)  # fmt: skip
"""What `__getstate__` and `__reduce__` raise where an object has no content to give."""


def fingerprint(value: Any, *, where: str) -> str:
    """Return the digest of a value as 32 hex digits (XXH3-128 over a prefix-free form).

    Not for adversaries: XXH3 is no cryptographic hash.

    Args:
        value: whatever decides the output.
        where: what messages call it: `writer`.

    Raises:
        FingerprintError: something in it cannot count; the message names its place.

    Example:
        >>> fingerprint({"a": 1, "b": {2, 3}}, where="options") == fingerprint({"b": {3, 2}, "a": 1}, where="options")
        True
    """
    graph = _Graph(where)
    return graph.digest(graph.grow(value)).hex()


@dataclasses.dataclass(slots=True)
class _Node:
    """One object of the graph; `links` are its children: the number of a node, or the digest of an atom."""

    value: Any  # kept: its id names the node
    parent: int
    position: int
    parts: Parts = dataclasses.field(init=False)
    links: list[int | bytes] = dataclasses.field(default_factory=list)
    digest: bytes = b""


class _Graph:
    """The objects that a value is made of, as nodes in the order of a breadth-first walk."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._nodes: list[_Node] = []
        self._numbers: dict[Any, int] = {}

    def grow(self, value: Any) -> int | bytes:
        """Follow a value to everything it is made of, and return its link."""
        root = self._link(value, -1, 0)
        for number, node in enumerate(self._nodes):  # grows as it goes
            try:
                node.parts = parts_of(node.value)
            except _UNREADABLE as error:
                raise self._refusal(number, error) from error
            node.links = [self._link(child, number, position) for position, child in enumerate(node.parts.children)]
        return root

    def digest(self, root: int | bytes) -> bytes:
        """Return the digest of a link, 16 bytes."""
        if isinstance(root, bytes):
            return root
        for component in _components([node.links for node in self._nodes]):
            self._fold(component)
        return self._nodes[root].digest

    def _link(self, value: Any, parent: int, position: int) -> int | bytes:
        atom = ATOMS.get(type(value))
        if atom is not None:
            return _hash(b"atom " + type(value).__name__.encode(), atom(value))
        key = value if isinstance(value, Import) else id(value)
        number = self._numbers.setdefault(key, len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(_Node(value, parent, position))
        return number

    def _fold(self, component: list[int]) -> None:
        """Set the digests of nodes that reach each other; whatever else they reach has its digest."""
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
        steps = []
        while (node := self._nodes[number]).parent >= 0:
            steps.append(_step(self._nodes[node.parent].parts, node.position))
            number = node.parent
        path = self._where + "".join(reversed(steps))
        return FingerprintError(
            f"{path}: {kind.__module__}.{kind.__qualname__} has no content that a fingerprint could count ({error}); "
            "drop it in __getstate__, or make it in setup_worker"
        )


def _components(links: Sequence[Sequence[int | bytes]]) -> Iterator[list[int]]:
    """Yield the strongly connected components of a graph, each after those it leads to.

    Tarjan, Depth-first search and linear graph algorithms, SIAM J. Comput. 1 (1972), without its recursion.
    """
    edges = [[link for link in each if isinstance(link, int)] for each in links]
    order: dict[int, int] = {}
    low: dict[int, int] = {}  # of the nodes of no component yet: the earliest node known to be in theirs
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
    """Return the XXH3-128 of pieces whose borders count where the first one's does: it alone varies in length."""
    digest = xxhash.xxh3_128(b"%d:" % len(pieces[0]))
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _step(parts: Parts, position: int) -> str:
    """Return how a path goes on to a child."""
    if parts.steps:
        return parts.steps[position]
    if parts.group == 2:  # a dict: keys and values in turn
        key = parts.children[position - position % 2]
        return f"[{key!r}]" if isinstance(key, (str, int)) else f"[{type(key).__name__}]"
    return f"[{position}]"
