"""What `run` would make anew, and why: the finished directory compared with the rows and options as they are now.

    manifest      fingerprint of each shard, digests of the ingredients ──┐
    index files   each row: fields, size and time of its files ───────────┼──> (shard, reasons)
    plan, rows    the same, of today ─────────────────────────────────────┘

A shard is made anew where its fingerprint differs. The reasons come from a second look, at ingredients and rows one by
one, and never decide anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import CorruptDataError, OutputError
from datamat.index_files import MTIME, SIZE, column_of_field, read_index_file
from datamat.ingredients import changed_ingredients
from datamat.manifest import Manifest, by_shard
from datamat.shard_entries import read_entry
from datamat.text import printable

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping, Sequence

    from datamat.manifest import ShardFiles, ShardInfo
    from datamat.plan import Plan, ShardSpec
    from datamat.rows import RowStore

__all__ = ["NOT_MADE", "ShardChange", "find_changes", "known_shards", "short_name"]

NOT_MADE = "not made yet"
_MOST_NAMED = 3  # rows that one reason names


@dataclasses.dataclass(frozen=True, slots=True)
class ShardChange:
    """A shard that `run` would make, and why.

    Attributes:
        shard: its name.
        reasons: one at least.
    """

    shard: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return printable(f"{short_name(self.shard)}: {'; '.join(self.reasons)}")


def short_name(shard: str) -> str:
    """Return the name of a shard without the number of shards: NAME-SPLIT-XXXXX."""
    return shard.rpartition("-of-")[0]


def known_shards(output: pathlib.Path, work: pathlib.Path) -> tuple[Manifest | None, dict[str, ShardFiles]]:
    """Return what is known of the finished shards of a directory, by name, whether its run is finished or not.

    Returns:
        The manifest, or the one that was there before the run that is under way; and the files of each shard.
    """
    with contextlib.suppress(OutputError, CorruptDataError):
        manifest = Manifest.read(output, strict=False)
        return manifest, by_shard(manifest.all_files)
    entries = map(read_entry, sorted((work / "shards").glob("*.json")))
    known = {files[0].name: files for files in entries if files}
    with contextlib.suppress(OutputError, CorruptDataError):
        return Manifest.read(work / "shards", strict=False), known
    return None, known


def find_changes(
    output: pathlib.Path, work: pathlib.Path, store: RowStore, plan: Plan, ingredients: Mapping[str, str]
) -> list[ShardChange]:
    """Return the shards of a plan that are not there as the plan has them.

    Args:
        output: the directory.
        work: its `.datamat`.
        store: the rows of the plan.
        plan: what there should be.
        ingredients: as the manifest would have them.
    """
    manifest, known = known_shards(output, work)
    comparison = None if manifest is None else _Comparison(output, manifest, store, plan, ingredients)
    found = []
    for shard in plan.shards:
        files = known.get(shard.name, ())
        if files and all(info.fingerprint == shard.fingerprint for info in files):
            reasons = [reason for info in files for reason in _missing_files(output, info)]
        elif comparison is None:
            reasons = [NOT_MADE]
        else:
            reasons = comparison.reasons(shard)
        if reasons:
            found.append(ShardChange(shard.name, tuple(reasons)))
    return found


def _missing_files(output: pathlib.Path, info: ShardInfo) -> list[str]:
    """Return what a look at its folder entry tells against a file that is up to date; `verify` looks inside."""
    try:
        size = (output / info.file).stat().st_size
    except OSError:
        return [f"{info.file} is missing"]
    if size != info.num_bytes:
        return [f"{info.file} has {size} bytes, not {info.num_bytes}"]
    return [] if (output / info.index_file).is_file() else [f"{info.index_file} is missing"]


class _Comparison:
    """What the last finished run had, against the rows, plan and ingredients of today."""

    def __init__(
        self, output: pathlib.Path, manifest: Manifest, store: RowStore, plan: Plan, ingredients: Mapping[str, str]
    ) -> None:
        self._output = output
        self._manifest = manifest
        self._store = store
        self._plan = plan
        self._ingredients = ingredients
        self._old_rows = functools.cache(self._read_rows)
        self._new_keys = functools.cache(self._read_new_keys)

    def reasons(self, shard: ShardSpec) -> list[str]:
        """Return why a shard would be made anew."""
        before, now = self._manifest.splits.get(shard.split, ()), self._plan.splits[shard.split]
        if not before:
            return [f"split {shard.split} is new"]
        if len(before) != len(now):
            return [f"split {shard.split} has {len(now)} shards now, it had {len(before)}"]
        reasons = [*self._changed_options(shard), *self._changed_rows(shard)]
        return reasons or ["the order of its rows changed"]

    def _changed_options(self, shard: ShardSpec) -> list[str]:
        old_copies = self._manifest.copies.get(shard.split, 1)
        reasons = changed_ingredients(self._manifest.ingredients, self._ingredients, augmented=shard.augmented)
        if old_copies != shard.copies:
            reasons.append(f"copies changed ({old_copies} -> {shard.copies})")
        if (shard.split in self._manifest.augmented) != shard.augmented and "transform changed" not in reasons:
            reasons.append("transform applies now" if shard.augmented else "transform no longer applies")
        return reasons

    def _changed_rows(self, shard: ShardSpec) -> list[str]:
        try:
            rows = self._old_rows(shard.split)
        except (CorruptDataError, OutputError, KeyError) as error:
            return [f"its rows cannot be compared: {error}"]
        positions = np.asarray(self._store.order[shard.start : shard.stop])
        keys = self._store.keys(positions)
        before, left = rows.places_of_shard(shard.number), set(keys)
        come = [key for key in keys if key not in before]
        gone = [key for key in before if key not in left]
        both = [number for number, key in enumerate(keys) if key in before]
        places = np.array([before[keys[number]] for number in both], np.int64)
        touched, edited = _compared(rows, places, self._store, positions[both])
        groups = {
            "changed on disk": [keys[both[number]] for number in touched],
            "changed in the index": [keys[both[number]] for number in edited],
            "added": [key for key in come if key not in rows.all_keys],
            "removed": [key for key in gone if key not in self._new_keys(shard.split)],
        }
        if self._manifest.ingredients.get("seed") == self._ingredients["seed"]:  # another seed moves all of them
            groups["came from another shard"] = [key for key in come if key in rows.all_keys]
            groups["moved to another shard"] = [key for key in gone if key in self._new_keys(shard.split)]
        return [_told(what, named) for what, named in groups.items() if named]

    def _read_new_keys(self, split: str) -> frozenset[str]:
        shards = self._plan.splits[split]
        return frozenset(self._store.keys(np.asarray(self._store.order[shards[0].start : shards[-1].stop])))

    def _read_rows(self, split: str) -> _OldRows:
        return _OldRows(read_index_file(self._output / "index" / f"{split}.parquet"))


class _OldRows:
    """The rows of a split as an index file has them."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.keys: list[str] = table["key"].to_pylist()
        self._shards = table["shard"].to_numpy()

    @functools.cached_property
    def all_keys(self) -> frozenset[str]:
        """The keys of all rows."""
        return frozenset(self.keys)

    def places_of_shard(self, number: int) -> dict[str, int]:
        """Return the places in the table of the rows of a shard, by key."""
        return {self.keys[place]: place for place in np.flatnonzero(self._shards == number).tolist()}

    def column(self, name: str, places: np.ndarray) -> np.ndarray | None:
        """Return values of a column, or None where there is no such column."""
        if name not in self._table.column_names:
            return None
        values: np.ndarray = self._table[name].take(places).to_numpy(zero_copy_only=False)
        return values


def _compared(
    rows: _OldRows, places: np.ndarray, store: RowStore, positions: np.ndarray
) -> tuple[list[int], list[int]]:
    """Return the numbers of the rows whose files changed, and of those whose fields did."""
    touched = np.zeros(len(places), bool)
    edited = np.zeros(len(places), bool)
    for name, *columns in store.file_columns(positions):
        for ending, values in zip((SIZE, MTIME), columns, strict=True):
            touched |= _differs(rows.column(column_of_field(name) + ending, places), values)
    for name, values in store.columns(positions):
        edited |= _differs(rows.column(column_of_field(name), places), values)
    return np.flatnonzero(touched).tolist(), np.flatnonzero(edited).tolist()


def _differs(old: np.ndarray | None, new: Any) -> np.ndarray:
    values = np.asarray(new, object if isinstance(new, list) else None)
    if old is None:
        return np.ones(len(values), bool)
    differs = np.asarray(old != values, bool)
    if values.dtype.kind == "f":
        differs &= ~(np.isnan(values) & np.isnan(old.astype(np.float64)))
    return differs


def _told(what: str, keys: Sequence[str]) -> str:
    more = len(keys) - _MOST_NAMED
    named = ", ".join(keys[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"row{'s' if len(keys) > 1 else ''} {named} {what}"
