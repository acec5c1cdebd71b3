"""Joins one dataset per split into one source."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from datamat.writers.base import DataSource, identity_of

if TYPE_CHECKING:
    import numpy as np

    from datamat.features import Feature


@final
class SplitSource(DataSource):
    """The samples of several sources, one after another."""

    def __init__(self, parts: dict[str, DataSource]) -> None:
        self.parts = list(parts.values())
        self._splits = list(parts)
        self.identity = {split: identity_of(part) for split, part in parts.items()}
        self.features = self.parts[0].features
        self.refused = self.parts[0].refused
        self.keys_are_places, self.has_schema = self.parts[0].keys_are_places, self.parts[0].has_schema
        self.files = {f"{split}/{name}": path for split, part in parts.items() for name, path in part.files.items()}

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not number and not self.parts[0].is_empty:
            return self.parts[0][0]  # without counting the rows of iterators
        place, start = self._part_of(number)
        return self.parts[place][number - start]

    def _part_of(self, number: int) -> tuple[int, int]:
        """Return the number of the part that holds a sample, and the position of the part's first sample."""
        place = bisect.bisect_right(self._ends, number)
        return place, self._ends[place - 1] if place else 0

    @property
    def is_empty(self) -> bool:
        return all(part.is_empty for part in self.parts)

    @property
    def dicts(self) -> Collection[str]:  # type: ignore[override]  # known once the first sample was read
        return self.parts[0].dicts

    def field_names(self) -> Sequence[str] | None:
        return self.parts[0].field_names()

    def narrow(self, names: Collection[str]) -> None:
        for part in self.parts:
            if part.field_names() is not None:
                part.narrow(names)

    def declare(self, features: Mapping[str, Feature]) -> None:
        self.features = {**self.features, **features}
        for part in self.parts:
            part.declare(features)

    def block(self, positions: np.ndarray) -> Mapping[str, Any] | None:
        place, start = self._part_of(int(positions.min()))
        return None if positions.max() >= self._ends[place] else self.parts[place].block(positions - start)

    def contents(self) -> Iterator[int] | None:
        found = [part.contents() for part in self.parts]
        if not any(found):
            return None
        parts = zip(found, self.parts, strict=True)
        return itertools.chain.from_iterable(
            itertools.repeat(0, len(part)) if one is None else one for one, part in parts
        )

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        for split, part in zip(self._splits, self.parts, strict=True):
            for key, _ in part.keys_and_splits():
                yield f"{split}-{key}", split
