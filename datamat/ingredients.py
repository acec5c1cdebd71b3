"""What decides the bytes of a shard beside its rows: each ingredient with a digest, so that a change has a name.

    writer, features, format                   of every split
    transform, seed                            of the splits that are augmented; the seed also decides the order of rows
    copies                                     of the one split

The fingerprint of a shard is made of these digests and of its rows, and of nothing else. So where it differs from the
one in the manifest, one of them does, and can be named. The manifest keeps them, and the digests of the writer's
methods, which only serve to say which one was edited.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from datamat.fingerprint import fingerprint
from datamat.fingerprint.code import written_attributes
from datamat.writer import DatasetWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from datamat.formats import ShardFormat

__all__ = ["Ingredients", "changed_ingredients", "method_digests"]

_METHOD = "writer."


@dataclasses.dataclass(frozen=True, slots=True)
class Ingredients:
    """Digests of what decides the bytes of shards beside their rows, 32 hex digits each.

    Attributes:
        writer: its class, with all code that this uses, and its attributes.
        features: the schema.
        format: names and options of the shard formats, in their order.
        transform: of the run.
        seed: itself, in decimal digits.
    """

    writer: str
    features: str
    format: str
    transform: str
    seed: str

    @classmethod
    def of(cls, writer: DatasetWriter, formats: Sequence[ShardFormat], transform: Any, seed: int) -> Ingredients:
        """Return the ingredients of a run.

        Raises:
            FingerprintError: the writer or the transform holds something that cannot be fingerprinted.
        """
        return cls(
            writer=fingerprint(writer, where="writer"),
            features=fingerprint(writer.features.to_json(), where="writer.features"),
            format=fingerprint([[made.name, made.options()] for made in formats], where="format"),
            transform=fingerprint(transform, where="transform"),
            seed=str(seed),
        )

    def of_split(self, *, augmented: bool, copies: int) -> str:
        """Return the digest of all that decides the records of a split, beside its rows."""
        always = [self.writer, self.features, self.format]
        drawn = [self.transform, self.seed] if augmented else []
        return fingerprint([always, drawn, copies], where="options")

    def to_json(self) -> dict[str, str]:
        """Return the digests by name."""
        return dataclasses.asdict(self)


def method_digests(writer: DatasetWriter) -> dict[str, str]:
    """Return the digest of each piece of a writer's code, as "writer.NAME".

    These are the methods and constants of its class and of those that it is derived from, and functions that the
    instance holds, as that of `materialize` does.
    """
    written: dict[str, Any] = {}
    for base in reversed(type(writer).__mro__):
        if issubclass(base, DatasetWriter) and base is not DatasetWriter:
            written |= written_attributes(dict(vars(base)))
    written |= {name: value for name, value in vars(writer).items() if callable(value) and name not in written}
    return {f"{_METHOD}{name}": fingerprint(part, where=f"writer.{name}") for name, part in written.items()}


def changed_ingredients(old: Mapping[str, str], new: Mapping[str, str], *, augmented: bool) -> list[str]:
    """Return what changed between two manifests' ingredients, in words: what concerns one split.

    Args:
        old: ingredients and method digests, as the manifest has them.
        new: as they are now.
        augmented: whether the transform applies to the split.

    Example:
        >>> old = {"writer": "a", "writer.read": "a", "writer.index": "a", "transform": "a", "seed": "0"}
        >>> changed_ingredients(old, {**old, "writer": "b", "writer.read": "b"}, augmented=True)
        ['writer code changed (read)']
        >>> changed_ingredients(old, {**old, "transform": "b"}, augmented=False)
        []
    """
    differing = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    told = []
    if "writer" in differing:
        methods = [name.removeprefix(_METHOD) for name in differing if name.startswith(_METHOD)]
        if "features" in differing:
            methods = [name for name in methods if name != "features"]
        told.append(f"writer code changed ({', '.join(methods)})" if methods else "writer's attributes changed")
    told += [f"{name} changed" for name in ("features", "format") if name in differing]
    if augmented and "transform" in differing:
        told.append("transform changed")
    if "seed" in differing:  # of every split: it decides the order of the rows, too
        told.append(f"seed changed ({old.get('seed')} -> {new.get('seed')})")
    return told
