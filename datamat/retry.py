"""What `rerun_failed` needs not do again: the rows of a finished shard that gave records and are as they were.

A row is as it was if nothing has changed of what decides records beside the rows (the manifest keeps digests of it),
and if its own line in the index, with size and time of change of its files, is the same. Where that cannot be told,
the row is done again: the result is the same, and only time is lost.
"""

from __future__ import annotations

import contextlib
import functools
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import CorruptDataError, OutputError
from datamat.index_files import MTIME, SIZE, field_of_column, read_index_file
from datamat.kept import KeptRows
from datamat.manifest import Manifest
from datamat.storage import digest_file

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping, Sequence

    from datamat.formats import ShardFormat
    from datamat.manifest import ShardInfo
    from datamat.plan import ShardSpec
    from datamat.rows import RowStore

__all__ = ["KeptFinder"]


class KeptFinder:
    """Finds the rows of finished shards whose records can be kept.

    Args:
        output: folder of the finished shards.
        work: its `.datamat`; the manifest of the last finished run was put aside there.
        store: the rows as they are now, in the order of the plan.
        shard_format: the first of the shards; records are taken from its files.
        ingredients: digests of what decides records beside the rows, as they are now.
    """

    def __init__(
        self,
        output: pathlib.Path,
        work: pathlib.Path,
        store: RowStore,
        shard_format: ShardFormat,
        ingredients: Mapping[str, str],
    ) -> None:
        self._output = output
        self._work = work
        self._store = store
        self._format = shard_format
        self._ingredients = ingredients

    def find(self, shard: ShardSpec, info: ShardInfo) -> KeptRows | None:
        """Return where the records of a shard's rows lie in the file of the last run, or None where none can be kept.

        Args:
            shard: as it is to be.
            info: of the file, as it is.
        """
        path = self._output / info.file
        with contextlib.suppress(OSError, CorruptDataError):
            if not self._is_made_alike(shard) or digest_file(path) != info.checksum:
                return None
            rows = self._store.order[shard.start : shard.stop]
            keys = self._store.keys(rows)
            same = self._is_same(shard, rows, keys)
            places = self._places(path)
            found = np.array([places.get(key, (0, 0)) for key in keys], np.int64).reshape(-1, 2)
            count = np.where(same, found[:, 1], 0)
            return KeptRows(str(path), str(self._output / info.index_file), shard.start, found[:, 0], count)
        return None

    @functools.cached_property
    def _manifest(self) -> Manifest | None:
        with contextlib.suppress(OutputError, CorruptDataError):
            return Manifest.read(self._work / "shards")
        return None

    def _is_made_alike(self, shard: ShardSpec) -> bool:
        """Tell whether the last run would have made the records of unchanged rows just as this one does."""
        before = self._manifest
        if before is None:
            return False
        names = ["writer", "features", "format"] + (["transform", "seed"] if shard.augmented else [])
        return (
            all(name in before.ingredients and before.ingredients[name] == self._ingredients[name] for name in names)
            and before.copies.get(shard.split) == shard.copies
            and (shard.split in before.augmented) == shard.augmented
        )

    def _is_same(self, shard: ShardSpec, rows: np.ndarray, keys: Sequence[str]) -> np.ndarray:
        """Return bool (n,): whether the last run's index says the same of each row."""
        table = read_index_file(self._output / "index" / f"{shard.split}.parquet")
        place_of = {key: place for place, key in enumerate(table["key"].to_pylist())}
        places = np.array([place_of.get(key, -1) for key in keys], np.int64)
        same = places >= 0
        before = {what: table[name] for name in table.column_names if (what := _what_of_column(name))}
        after = _told(self._store, rows)
        if before.keys() != after.keys() or not same.any():
            return np.zeros(len(keys), bool)
        known = np.flatnonzero(same)
        for what, values in after.items():
            old = before[what].take(places[known]).to_pylist()
            same[known] &= np.array([a == values[b] for a, b in zip(old, known.tolist(), strict=True)], bool)
        return same

    def _places(self, path: pathlib.Path) -> dict[str, tuple[int, int]]:
        """Return the number of the first record of each row in a shard, and how many it has, as the records tell."""
        found, first = {}, 0
        keys = (bytes(record["key"][0]).decode() for record in self._format.read(path))
        for key, records in groupby(keys, key=lambda key: key.partition("#")[0]):
            count = sum(1 for _ in records)
            found[key] = (first, count)
            first += count
        return found


def _what_of_column(name: str) -> tuple[str, str] | None:
    """Return the field that a column of an index file tells of, and what of it."""
    ending = next((ending for ending in (SIZE, MTIME) if name.endswith(ending)), "")
    field = field_of_column(name.removesuffix(ending))
    return None if field is None else (field, ending)


def _told(store: RowStore, rows: np.ndarray) -> dict[tuple[str, str], Any]:
    """Return what an index file would tell of rows, by field and what of it."""
    told: dict[tuple[str, str], Any] = {(name, ""): values for name, values in store.columns(rows)}
    for name, sizes, mtimes in store.file_columns(rows):
        told |= {(name, SIZE): sizes, (name, MTIME): mtimes}
    return told
