"""What decides the output of a run: the same recipe and the same source give the same bytes, whoever runs it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat import codecs
from datamat.errors import OptionError
from datamat.formats import ShardFormat, get_format
from datamat.ingredients import Ingredients, method_digests
from datamat.manifest import Manifest
from datamat.pipeline import Pipeline
from datamat.plan import make_plan
from datamat.row_writer import write_rows
from datamat.transforms import Augmenter
from datamat.writer import DatasetWriter

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Sequence

    from datamat.features import Features
    from datamat.manifest import IndexInfo, ShardFiles
    from datamat.options import ShardOptions
    from datamat.plan import Plan
    from datamat.rows import RowStore

__all__ = ["Recipe", "resolve_formats"]


def resolve_formats(given: Any, features: Features) -> tuple[ShardFormat, ...]:
    """Return the formats that a user names, each for records of these features.

    Args:
        given: a name, a `ShardFormat`, or a list or tuple of them; the first is the one that readers take.
        features: of the records.

    Raises:
        OptionError: there is none, one is neither a name nor a format, or two would write files of the same names.
        MissingDependencyError: a format needs a package that is not installed.
    """
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    if not listed:
        raise OptionError("format is an empty list; name one format at least, as in format='tfrecord'")
    found: dict[str, ShardFormat] = {}
    for one in listed:
        made = get_format(one) if isinstance(one, str) else one
        if not isinstance(made, ShardFormat):
            raise OptionError(f"format holds {one!r}; want a name such as 'tfrecord', a ShardFormat, or a list of them")
        other = found.setdefault(made.extension, made)
        if other is not made:
            raise OptionError(
                f"format names {other.name!r} and {made.name!r}, which both write files ending in .{made.extension}; "
                "leave one out, or write it to another output"
            )
    return tuple(made.with_features(features) for made in found.values())


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """What decides the output of a run; the arguments are those of `Materializer`, resolved.

    Raises:
        OptionError: an argument makes no sense.
    """

    writer: DatasetWriter
    source: Any
    formats: tuple[ShardFormat, ...]
    splits: Mapping[str, float] | None
    shards: ShardOptions
    transform: Any
    copies: int | Mapping[str, int]
    seed: int
    augmenter: Augmenter = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        _check_shares(self.splits)
        _check_copies(self.copies)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise OptionError(f"seed is {self.seed!r}; want an int, not negative")
        augmenter = Augmenter(self.writer.features, self.transform, self._hook())
        object.__setattr__(self, "augmenter", augmenter)

    def pipeline(self) -> Pipeline:
        """Return what makes records of rows."""
        return Pipeline(self.writer, self.augmenter, self.seed)

    def write_rows(self, folder: pathlib.Path) -> RowStore:
        """Index the source, check its rows, and write them to a folder; raises `SourceError`."""
        is_path = isinstance(self.source, (str, os.PathLike))
        base = os.path.abspath(self.source) if is_path else ""
        rows = self.writer.index(self.source)
        return write_rows(rows, folder, source=base, splits=self.splits, file_fields=self.writer.file_fields)

    def ingredients(self) -> Ingredients:
        """Return the digests of what decides the bytes of shards beside the rows; raises `FingerprintError`."""
        return Ingredients.of(self.writer, self.formats, self.transform, self.seed)

    def plan(self, store: RowStore, ingredients: Ingredients) -> Plan:
        """Return which row goes to which shard; raises `OptionError` where rows and options do not fit together."""
        copies = self._copies_by_split(store)
        augmented = {split: self._is_augmented(split) for split in store.splits}
        digests = {
            split: ingredients.of_split(augmented=augmented[split], copies=copies[split]) for split in store.splits
        }
        return make_plan(
            store,
            name=self.writer.name or type(self.writer).__name__.lower(),
            options=self.shards,
            copies=copies,
            augmented=augmented,
            fingerprint=digests,
            seed=self.seed,
        )

    def manifest(
        self, plan: Plan, ingredients: Ingredients, finished: Sequence[ShardFiles], index: tuple[IndexInfo, ...]
    ) -> Manifest:
        """Return the manifest of the files of finished shards and of the index."""
        by_format = zip(self.formats, zip(*finished, strict=True), strict=True)
        (first, shards), *others = [(made.name, infos) for made, infos in by_format]
        return Manifest(
            name=plan.name,
            format=first,
            features=self.writer.features,
            shards=shards,
            seed=self.seed,
            copies={split: shards[0].copies for split, shards in plan.splits.items()},
            augmented=tuple(split for split, shards in plan.splits.items() if shards[0].augmented),
            made_by={
                "writer": self.writer_name,
                "transform": None if self.transform is None else type(self.transform).__qualname__,
                "codecs": codecs.codec_versions(),
            },
            index=index,
            ingredients=self.told(ingredients),
            also=dict(others),
        )

    def told(self, ingredients: Ingredients) -> dict[str, str]:
        """Return the digests that the manifest keeps: of the ingredients, and of each method of the writer."""
        return {**ingredients.to_json(), **method_digests(self.writer)}

    @property
    def writer_name(self) -> str:
        """The class of the writer, as "module:Class"."""
        return f"{type(self.writer).__module__}:{type(self.writer).__qualname__}"

    def _hook(self) -> Callable[..., Any] | None:
        overridden = type(self.writer).augment is not DatasetWriter.augment
        return self.writer.augment if overridden else None

    def _copies_by_split(self, store: RowStore) -> dict[str, int]:
        if isinstance(self.copies, int):
            return dict.fromkeys(store.splits, self.copies)
        unknown = sorted(set(self.copies) - set(store.splits))
        if unknown:
            raise OptionError(f"copies names the split {unknown[0]!r}; the index has {', '.join(store.splits)}")
        return {split: self.copies.get(split, 1) for split in store.splits}

    def _is_augmented(self, split: str) -> bool:
        named = isinstance(self.copies, int) or split in self.copies
        return named and (self.transform is not None or self._hook() is not None)


def _check_shares(splits: Mapping[str, float] | None) -> None:
    if splits is None:
        return
    total = sum(splits.values())
    if not splits or any(share <= 0 for share in splits.values()) or not np.isclose(total, 1):
        raise OptionError(f"splits is {dict(splits)}; want positive shares that add up to 1 (they add up to {total:g})")


def _check_copies(copies: int | Mapping[str, int]) -> None:
    for number in copies.values() if isinstance(copies, Mapping) else [copies]:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise OptionError(f"copies is {copies!r}; want a number of at least 1, or such numbers by split")
