"""The samples that a page or a server shows, with their classes and origins."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.directory.display import Table, feature_table, statistics_table
from datamat.directory.provenance import ProvenanceFinder
from datamat.errors import DatamatError, count_of
from datamat.folders import open_folder
from datamat.readers.dataset import load
from datamat.readers.preview import look_at, preview_of
from datamat.values import frozen
from datamat.view.tables import fields_of

if TYPE_CHECKING:
    from datamat.directory.manifest import Manifest
    from datamat.features import Feature
    from datamat.readers.dataset import ShardedDataset
    from datamat.readers.preview import Scene

PER_PAGE = 24
"""Number of samples shown at a time."""

OPACITIES = {"0": "no masks", "25": "masks 25%", "50": "masks 50%", "75": "masks 75%", "100": "masks alone"}
"""Opacities of masks to choose from, in percent, with their labels; the styles define those other than 50."""

_MOST_LETTERS, _MOST_IN_FULL = 600, 50_000  # limits of a text on a card, and on the page of a sample
_MOST_ROWS, _MOST_ROWS_IN_FULL = 16, 64  # limits of a table, likewise
_MOST_SEARCHED, _LONGEST_S = 5_000, 3.0  # samples that a request looks through for a class


@frozen()
class Shot:
    """A sample as shown.

    Attributes:
        position: its number among all shown samples; None if it was requested by key.
        split: name of its split.
        key: its key; "" if it cannot be read.
        scene: its pictures and texts; None if it cannot be read.
        fields: name, value and declaration of each field; the value is text or a table.
        classes: numbers of its classes in `Collection.classes`.
        problem: why it cannot be shown; "" otherwise.
    """

    position: int | None
    split: str
    key: str = ""
    scene: Scene | None = None
    fields: tuple[tuple[str, str | Table, str], ...] = ()
    classes: frozenset[int] = frozenset()
    problem: str = ""

    @property
    def legend(self) -> list[tuple[str, tuple[int, int, int]]]:
        """Name and colour of each class in its pictures, each once."""
        panels = self.scene.panels if self.scene else ()
        parts = (part for panel in panels for part in panel.legend.values())
        return list(dict.fromkeys((swatch.name, swatch.colour) for part in parts for swatch in part))


class Collection:
    """The shown samples, numbered from 0, one split after the other."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str | None,
        cache_dir: str | os.PathLike[str] | None,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self.folder = open_folder(path, storage_options)
        opened = functools.partial(load, path, cache_dir=cache_dir, storage_options=storage_options)
        whole = opened(split)
        self.manifest: Manifest = whole.manifest
        self.features = whole.features
        self.splits: dict[str, ShardedDataset] = {
            name: opened(name) for name in ([split] if split is not None else self.manifest.splits)
        }
        sizes = [len(dataset) for dataset in self.splits.values()]
        self.starts: dict[str, int] = dict(zip(self.splits, np.cumsum([0, *sizes]).tolist(), strict=False))
        self._size = sum(sizes)
        self.named = {name: feature for name, feature in self.features.items() if feature.class_names()}
        pairs = [(name, said) for name, feature in self.named.items() for said in feature.class_names() or ()]
        self.classes: dict[tuple[str, str], int] = {pair: number for number, pair in enumerate(pairs)}
        self._labels = {name: data.columns(*self.named) for name, data in self.splits.items()} if self.named else {}
        self._provenance = ProvenanceFinder(self.folder, self.manifest)

    def __len__(self) -> int:
        return self._size

    @property
    def title(self) -> str:
        """Title of all pages."""
        return f"{self.manifest.name}: {count_of(self._size, 'sample')}"

    @property
    def split_options(self) -> list[tuple[str, str]]:
        """Value and label of each selectable split; "" for all."""
        return [("", "all splits"), *((name, f"{name} ({len(data):,})") for name, data in self.splits.items())]

    @property
    def class_options(self) -> list[tuple[str, str]]:
        """Value and label of each selectable class; "" for any."""
        several = len(self.named) > 1
        return [("", "all classes" if self.classes else "no classes")] + [
            (str(number), f"{field}: {name}" if several else name) for (field, name), number in self.classes.items()
        ]

    @property
    def opacity_options(self) -> list[tuple[str, str]]:
        """Value and label of each selectable mask opacity; empty if no picture can have a mask."""
        drawn = {preview.preview for feature in self.features.values() if (preview := preview_of(feature))}
        return [*OPACITIES.items()] if drawn >= {"image", "mask"} else []

    @property
    def split_facts(self) -> list[tuple[str, str, str, str]]:
        """Name, number of samples, number of shards and megabytes of each split."""
        return [
            (name, f"{len(data):,}", f"{len(shards):,}", f"{sum(info.num_bytes for info in shards) / 1e6:,.1f}")
            for name, data in self.splits.items()
            for shards in [self.manifest.splits[name]]
        ]

    @property
    def field_facts(self) -> Sequence[Sequence[str]]:
        """Name, feature and declaration of each field."""
        return feature_table(self.features).rows

    @property
    def statistics(self) -> Sequence[Sequence[str]]:
        """Split, field and statistics of its values."""
        known = self.manifest.statistics
        return statistics_table({split: known[split] for split in known if split in self.splits}).rows

    def _split_at(self, position: int) -> str:
        return [name for name, start in self.starts.items() if start <= position and len(self.splits[name])][-1]

    def _split_of(self, key: object) -> str:
        for name, dataset in self.splits.items():
            if key in dataset:
                return name
        raise KeyError(key)

    def bounds(self, split: str) -> tuple[int, int]:
        """Return the positions of a split, or of all for ""."""
        if not split:
            return 0, self._size
        return self.starts[split], self.starts[split] + len(self.splits[split])

    def spread(self, count: int) -> list[int]:
        """Return positions spread evenly over each split, in proportion to its size."""
        found = []
        for split, dataset in self.splits.items():
            share = min(max(round(count * len(dataset) / max(self._size, 1)), 1), len(dataset))
            found += [self.starts[split] + place * len(dataset) // share for place in range(share)]
        return found

    def shot(self, item: int | str, size: int, *, in_full: bool = False) -> Shot:
        """Return a sample to show; a damaged one says so.

        Args:
            item: its number or key.
            size: maximum width and height of its pictures, in pixels.
            in_full: whether texts are complete.

        Raises:
            KeyError: no sample has this key.
        """
        position, number = (None, item) if isinstance(item, str) else (item, item - self.starts[self._split_at(item)])
        split = self._split_of(item) if isinstance(item, str) else self._split_at(item)
        most, rows = (_MOST_IN_FULL, _MOST_ROWS_IN_FULL) if in_full else (_MOST_LETTERS, _MOST_ROWS)
        try:
            sample = self.splits[split][number]
            scene = look_at(sample, self.features, width=size, height=size, opacity=None, in_full=in_full)
        except (DatamatError, OSError, ValueError) as error:  # damage, or a missing decoder
            return Shot(position, split, problem=f"{type(error).__name__}: {error}")
        values = self.features.flatten(sample)
        fields = [
            (name, _cut(value, most) if isinstance(value, str) else _cut_cells(value), declared)
            for name, value, declared in fields_of(self.features, values, rows)
        ]
        scene = dataclasses.replace(scene, words=tuple((name, _cut(text, most)) for name, text in scene.words))
        return Shot(position, split, scene.key, scene, tuple(fields), self.classes_of(values))

    def classes_of(self, values: Mapping[str, Any]) -> frozenset[int]:
        """Return the numbers of the classes in a sample's labels and pixels."""
        found = set[int]()
        for name, feature in self.named.items():
            found.update(
                self.classes[name, said]
                for said in _classes_in(feature, values.get(name))
                if (name, said) in self.classes
            )
        return frozenset(found)

    def search(self, start: int, split: str, wanted: int | None, text: str = "") -> tuple[list[int], int | None]:
        """Return the next samples of a split with a class, and the position to continue at; None at the end.

        Args:
            start: first position to look at.
            split: name of the split; "" for all.
            wanted: number of the class; None for any.
            text: text in their keys, ignoring case.
        """
        found, ends_at = list[int](), time.monotonic() + _LONGEST_S
        for looked, position in enumerate(self._holding(text, start, split)):
            is_long = wanted is not None and (looked == _MOST_SEARCHED or time.monotonic() > ends_at)
            if is_long or len(found) == PER_PAGE:
                return found, position
            if wanted is None or self._has(position, wanted):
                found.append(position)
        return found, None

    def _holding(self, text: str, start: int, split: str) -> Iterator[int]:
        """Yield the positions, from `start` on, of the samples of a split whose keys contain a text."""
        low, high = self.bounds(split)
        if not text:
            yield from range(max(start, low), high)
            return
        wanted = text.casefold()
        for name in [split] if split else self.splits:
            for position, key in enumerate(self.splits[name].keys(), self.starts[name]):
                if position >= start and wanted in key.casefold():
                    yield position

    def _has(self, position: int, wanted: int) -> bool:
        split = self._split_at(position)
        try:
            sample = self._labels[split][position - self.starts[split]]
        except (DatamatError, OSError, ValueError):  # its classes are unknown
            return False
        return wanted in self.classes_of(self.features.flatten(sample))

    def provenance(self, key: str) -> list[tuple[str, str]]:
        """Return facts about the origin of a record, or why it is unknown."""
        try:
            found = self._provenance.find(key)
        except (DatamatError, OSError) as error:
            return [("provenance", str(error))]
        facts: list[tuple[str, Any]] = [
            ("row", found.row_key),
            ("copy", "none: stored unchanged" if found.copy is None else found.copy),
            ("shard", found.shard),
            ("position", "none" if found.position is None else found.position),
            ("seed", found.seed),
        ]
        facts += [*found.sources.items(), *found.fields.items()]
        return [(name, _cut(str(value), _MOST_LETTERS)) for name, value in facts]


def _classes_in(feature: Feature, value: Any) -> list[str]:
    """Return the names of the classes in a value of labels or pixels, each once."""
    names = feature.class_names() or ()
    if value is None:
        return []
    ids = np.unique(np.asarray(value))
    if ids.dtype.kind not in "iu":
        return []
    return [names[number] for number in ids.tolist() if 0 <= number < len(names)]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} letters)"


def _cut_cells(table: Table) -> Table:
    return Table(table.head, [[_cut(cell, _MOST_LETTERS) for cell in row] for row in table.rows])
