"""What a run would rebuild, and why: the finished directory compared with the present rows and options."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.directory.files import is_stand_in, printable, read_json, render_json
from datamat.directory.index_files import DIGEST, SIZE, IndexTable, MappedKeys, column_of_field, read_index
from datamat.directory.keys import RecordKey, records_by_row, stored_key
from datamat.directory.manifest import (
    CONVERTED,
    Manifest,
    by_shard,
    growing_path,
    index_file,
    keys_file,
    read_entries,
    run_folder,
)
from datamat.errors import CorruptDataError, OutputError, count_of, join_problems
from datamat.features import Image, Numbers, Statistics
from datamat.features.composed import innermost
from datamat.features.pictures import PictureFile
from datamat.folders import AbsentError
from datamat.folders.local import read_regular
from datamat.formats import Offsets, get_format
from datamat.plan.digests import changed_digests
from datamat.plan.pipeline import MadeColumns
from datamat.values import frozen

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from datamat.directory.manifest import ShardFiles, ShardInfo
    from datamat.features import Features
    from datamat.features.base import Column
    from datamat.formats import ShardFormat
    from datamat.plan.job import PlannedJob
    from datamat.plan.plan import Plan, ShardSpec
    from datamat.sources.store import RowStore

# ---------------------------------------------------------------- reused records


_MOST_BYTES = 1 << 32  # of offsets


@frozen(eq=False)
class ReusedRows:
    """The places of the records of consecutive rows in a finished shard.

    Attributes:
        path: file of the shard.
        index: the file of its offsets.
        start: position of the first row in the plan.
        first: int64 (n,): number of the first record of each row.
        count: int64 (n,): number of its records; 0 for a row to compute.
        measured: fields whose values entered the statistics of the shard when they were encoded.
    """

    path: str
    index: str
    start: int
    first: np.ndarray
    count: np.ndarray
    measured: tuple[str, ...] = ()

    def of(self, start: int, stop: int) -> ReusedRows:
        """Return the places of the rows of a part."""
        rows = slice(start - self.start, stop - self.start)
        return dataclasses.replace(self, start=start, first=self.first[rows], count=self.count[rows])

    def numbers(self, position: int) -> range:
        """Return the numbers of the records of a row; none for a row to compute."""
        place = position - self.start
        first = int(self.first[place])
        return range(first, first + int(self.count[place]))


@contextlib.contextmanager
def open_reused(
    reused: ReusedRows | None, shard_format: ShardFormat, features: Features
) -> Iterator[Callable[[int], list[tuple[str, dict[str, Column]]]]]:
    """Open the shard that holds the reused records.

    Args:
        reused: places of the records; None if none are reused.
        shard_format: format of the shard, bound to its features.
        features: schema of the records.

    Yields:
        A function that returns (key, columns) of each record of a row, given its position in the plan; nothing for a
        row to compute. It raises `CorruptDataError` if the shard is damaged.
    """
    if reused is None:
        yield lambda _: []
        return
    offsets = Offsets.from_text(read_regular(reused.index, max_bytes=_MOST_BYTES).decode("ascii"))
    with contextlib.closing(shard_format.reader(reused.path, offsets)) as reader:

        def records(position: int) -> list[tuple[str, dict[str, Column]]]:
            found = [with_seen(reader.read(number), features, reused.measured) for number in reused.numbers(position)]
            return [(bytes(record["key"][0]).decode(), record) for record in found]

        yield records


def with_seen(record: dict[str, Column], features: Features, measured: Sequence[str]) -> dict[str, Column]:
    """Return a record with the statistics of its values: decoding them restores the encoded ones."""
    values = {name: features[name].decode(features.stored(name, record)) for name in measured}
    seen = {name: features[name].observe_value(value) for name, value in values.items()}
    return MadeColumns.of(record, seen) if seen else record


# ---------------------------------------------------------------- the plan of the current run
#
# A summary on disk of the plan of the current run, which `status` compares finished work with.
#
# It is `.datamat/rows/plan.json`, written once a run has made its plan and removed when the run is complete.


_FILE = "plan.json"


@frozen()
class PlannedShard:
    """The facts about a planned shard that show its progress.

    Attributes:
        name: file name of the shard without extension.
        split: the split that it belongs to.
        fingerprint: digest of everything that decides its bytes.
        num_rows: number of its input rows.
    """

    name: str
    split: str
    fingerprint: str
    num_rows: int

    @classmethod
    def of(cls, shard: ShardSpec) -> PlannedShard:
        """Return the summary of a shard of a plan."""
        return cls(shard.name, shard.split, shard.fingerprint, shard.num_rows)


def write_snapshot(rows_folder: pathlib.Path, plan: Plan) -> None:
    """Write the shards of a plan beside its rows.

    It is not flushed to disk: it only shows the progress of a run.
    """
    (rows_folder / _FILE).write_bytes(render_json(snapshot(plan)))


def snapshot(plan: Plan) -> list[dict[str, Any]]:
    """Return the JSON value of that file."""
    return [
        {"name": shard.name, "split": shard.split, "fingerprint": shard.fingerprint, "num_rows": shard.num_rows}
        for shard in plan.shards
    ]


def read_snapshot(rows_folder: pathlib.Path) -> list[PlannedShard] | None:
    """Return the shards of a run's plan, or None if it is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        return parse_snapshot(read_json(rows_folder / _FILE))
    return None


def parse_snapshot(value: Any) -> list[PlannedShard] | None:
    """Return the shards listed in the JSON value of such a file; None if it is malformed."""
    with contextlib.suppress(TypeError):
        return [PlannedShard(**shard) for shard in value]
    return None


# ---------------------------------------------------------------- what would be rebuilt, and why
#
#     manifest      fingerprint of each shard, digests of the ingredients ──┐
#     index files   each row: fields, size and digest of its files ─────────┼──> (shard, reasons)
#     plan, rows    the same, of today ─────────────────────────────────────┘
#
# A shard is rebuilt if its fingerprint differs. The reasons come from a second comparison, of digests and single rows,
# and decide nothing.


NOT_MADE = "not made yet"
_MOST_NAMED = 3  # rows named in a reason


@frozen()
class ShardChange:
    """A shard that `run` would make, or take over from one with another name, and why.

    Attributes:
        shard: name of the shard.
        reasons: why `run` would make it, or its origin if it is taken over. At least one.
    """

    shard: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return printable(f"{short_name(self.shard)}: {'; '.join(self.reasons)}")


def short_name(shard: str) -> str:
    """Return the name of a shard without the number of shards: NAME-SPLIT-XXXXX."""
    return shard.rpartition("-of-")[0]


def known_shards(output: pathlib.Path, work: pathlib.Path) -> tuple[Manifest | None, dict[str, ShardFiles]]:
    """Return the finished shards of a directory, by name, whether its run is finished or not.

    Returns:
        The manifest and the files of each shard in it; without a manifest, those of an unfinished run.
    """
    with contextlib.suppress(AbsentError, CorruptDataError):
        manifest = Manifest.read(output, strict=False)
        return manifest, by_shard(manifest.all_files)
    return None, read_entries(work / "shards")


def waiting_shards(work: pathlib.Path, shards: Iterable[ShardSpec | PlannedShard]) -> dict[str, ShardFiles]:
    """Return the files of the shards that wait to be published, by shard name, without opening them."""
    waiting = read_entries(run_folder(work))
    return {
        shard.name: files
        for shard in shards
        if (files := waiting.get(shard.name)) and all(info.fingerprint == shard.fingerprint for info in files)
    }


def equal_shards(planned: PlannedJob, listed: Mapping[str, ShardFiles]) -> dict[str, ShardFiles]:
    """Return the published files that match shards of a plan except for their names, by planned name.

    If a split is renamed or gets another shard, its other shards keep their rows, and so their bytes.

    Args:
        planned: source and options as they are now, and the directory.
        listed: shards of the published manifest by name.
    """
    extensions = [made.extension for made in planned.job.formats]
    known = {files[0].fingerprint: files for files in listed.values() if not files[0].num_failed}
    return {
        shard.name: files
        for shard in planned.chosen
        if (files := known.get(shard.fingerprint)) is not None
        and files[0].name != shard.name
        and [info.extension for info in files] == extensions
        and planned.inputs.stand(shard, files)
        and not any(missing_files(planned.job.output, info) for info in files)
    }


def find_changes(planned: PlannedJob) -> list[ShardChange]:
    """Return the shards of a plan that are missing or outdated."""
    manifest, known = known_shards(planned.job.output, planned.job.work)
    waiting = waiting_shards(planned.job.work, planned.plan.shards)
    comparison = None if manifest is None else Comparison(planned, manifest)
    equal = {} if manifest is None else equal_shards(planned, known)
    found = []
    for shard in planned.plan.shards:
        files = known.get(shard.name, ())
        if shard.name in waiting and planned.inputs.stand(shard, waiting[shard.name]):
            reasons = []
        elif files and planned.inputs.stand(shard, files):
            place = planned.job.output, planned.job.work
            reasons = [reason for info in files for reason in lost_files(*place, info)]
        elif shard.name in equal:
            reasons = [f"taken over from {equal[shard.name][0].name}"]
        elif comparison is None:
            reasons = [NOT_MADE]
        else:
            reasons = comparison.reasons(shard)
        if reasons:
            found.append(ShardChange(shard.name, tuple(reasons)))
    return found


def lacking_shards(planned: PlannedJob) -> set[str]:
    """Return the names of the shards of a plan that have to be made: those of `find_changes`, less equal ones."""
    manifest, known = known_shards(planned.job.output, planned.job.work)
    equal = {} if manifest is None else equal_shards(planned, known)
    return {change.shard for change in find_changes(planned)} - equal.keys()


def find_loss(planned: PlannedJob, known: Mapping[str, ShardFiles]) -> str:
    """Return which finished rows a run would remove because the source lacks them, and the remedy; "" if none.

    Finished rows are those that are counted in a published manifest and gave records.

    Args:
        planned: source and options as they are now, and the directory.
        known: finished shards by name, as returned by `known_shards`.
    """
    job = planned.job
    wanted = {shard.name: shard for shard in planned.plan.shards}
    num_same = sum(name in wanted and planned.inputs.stand(wanted[name], files) for name, files in known.items())
    try:
        manifest = Manifest.read(job.output, strict=False)
    except (AbsentError, CorruptDataError):
        return ""  # nothing is published
    replace = job.remedies.passing("existing", "replace")
    if manifest.edited:
        return (
            f"{edited_in_words(manifest)}, and a run would undo that. To add new rows, use "
            f"{job.remedies.passing('existing', 'append')}; to have what the source gives, {replace}; or give another "
            "output"
        )
    if num_same == len(known):
        return ""
    if job.records.pipeline is None and CONVERTED not in manifest.made_by:
        return (
            f"the finished dataset {manifest.name!r} there was not made by a conversion, and this one would replace "
            f"it; give another output, or use {replace}"
        )
    if lost := _lost_rows(planned, manifest):
        num_rows = sum(info.num_rows for info in manifest.shards)
        return (
            f"the source no longer has {len(lost):,} of the {count_of(num_rows, 'row')} that are finished there "
            f"({join_problems(lost)}), and a run would remove their records. Give back what is missing; or use "
            f"{replace}, by which the source alone decides; or give another output"
        )
    if not num_same and _has_other_items(planned, manifest):
        return (
            "none of the inputs is among those that are finished there, and a run would replace their records: without "
            "key=, an input has its position as key, so the new ones have the keys of the old. Pass key= in both "
            f"calls, to tell them apart; or use {replace}, to have the new ones alone; or give another output"
        )
    return ""


def edited_in_words(manifest: Manifest) -> str:
    """Return which fields of a set were changed in place."""
    fields = ", ".join(map(repr, manifest.edited))
    return f"the finished records were edited in place, by save after map, join or columns (fields {fields})"


def _lost_rows(planned: PlannedJob, manifest: Manifest) -> list[str]:
    """Return the keys of rows that gave records but are not in the source now, by comparing key hashes."""
    output, lost = planned.job.output, list[str]()
    hashes = np.sort(planned.store.hashes)
    for split, infos in manifest.splits.items():
        listed = manifest.index_infos.get(keys_file(split))
        try:
            if listed is None or not listed.is_there(output):
                raise CorruptDataError(f"{output / keys_file(split)} is not the file that the manifest lists")
            rows = MappedKeys(output, listed.file, sum(info.num_rows for info in infos)).rows_without(hashes)
            if len(rows):
                lost += _with_records(planned, manifest, infos, index_reader(output, manifest)(split), rows)
        except CorruptDataError:  # the index is damaged or missing; the records themselves hold the keys
            keys = sorted(set[str]().union(*(_row_keys(planned, manifest, info) or () for info in infos)))
            lost += [keys[place] for place in np.flatnonzero(planned.store.find_all(keys) < 0).tolist()]
    return sorted({*lost}.difference(manifest.removed))


def _with_records(
    planned: PlannedJob, manifest: Manifest, infos: Sequence[ShardInfo], index: IndexTable, rows: np.ndarray
) -> list[str]:
    """Return the keys of those rows of an index that gave records; reads shards in which some did not."""
    keys = index.keys_at(rows)
    shards = index.shards[rows]
    without: set[str] = set()
    for number in np.unique(shards).tolist():
        if infos[number].lacks_records and (there := _row_keys(planned, manifest, infos[number])) is not None:
            without |= {keys[place] for place in np.flatnonzero(shards == number).tolist()} - there
    return [key for key in keys if key not in without]


def _row_keys(planned: PlannedJob, manifest: Manifest, info: ShardInfo) -> set[str] | None:
    """Return the keys of the rows with records in a shard; None if it is missing or unreadable."""
    path = planned.job.output / info.file
    with contextlib.suppress(OSError, CorruptDataError):
        if not is_stand_in(path):
            whole = info.path_in(planned.job.output)
            return set(map(RecordKey.row_of, map(stored_key, get_format(manifest.format).read(whole))))
    return None


def _has_other_items(planned: PlannedJob, manifest: Manifest) -> bool:
    """Return True if the rows are keyed by position and none of the finished items is in the source now."""
    from datamat.writers.function import ITEM, FunctionWriter

    store, writer = planned.store, planned.job.records.writer
    field = next((field for field in store.fields if field.name == ITEM), None)
    if field is None or not isinstance(writer, FunctionWriter) or not writer.keys_are_positions:
        return False
    now = set(_listed(store.column(field, np.arange(len(store)))))
    with contextlib.suppress(CorruptDataError, OutputError):
        for split in manifest.splits:
            index = index_reader(planned.job.output, manifest)(split)
            before = index.values(column_of_field(ITEM), np.arange(len(index)))
            if before is None or not now.isdisjoint(_listed(before)):
                return False
        return True
    return False


def _listed(values: Any) -> list[Any]:
    return list(values.tolist() if isinstance(values, np.ndarray) else values)


def missing_files(output: pathlib.Path, info: ShardInfo) -> list[str]:
    """Return defects of an up-to-date shard that sizes and file ends show; `verify` reads the content."""
    folder = os.fspath(output)  # joined as text: creating path objects would cost more than the stat calls
    path = os.path.join(folder, info.file)
    try:
        is_elsewhere = is_stand_in(path) and os.path.getsize(path) == info.num_bytes
        found = {} if is_elsewhere else info.differences_of(path)
    except FileNotFoundError:
        return [f"{info.file} is missing"]
    except (OSError, CorruptDataError) as error:
        return [f"{info.file} cannot be read: {error}"]
    if found:
        return [f"{info.file} {next(iter(found.values()))}"]
    index = os.path.join(folder, info.index_file)
    if not os.path.isfile(index):
        return [f"{info.index_file} is missing"]
    is_right = is_stand_in(index) or info.has_offsets(index)
    return [] if is_right else [f"{info.index_file} does not hold the offsets that were written"]


def lost_files(output: pathlib.Path, work: pathlib.Path, info: ShardInfo) -> list[str]:
    """Like `missing_files`, but allow for a run killed between entry and names, which the next run completes."""
    found = missing_files(output, info)
    with contextlib.suppress(OSError):
        if found and growing_path(work / "shards", info.file).stat().st_size == info.num_bytes:
            return []
    return found


class Comparison:
    """The last finished run compared with the present rows, plan and digests."""

    def __init__(self, planned: PlannedJob, manifest: Manifest) -> None:
        self._output = planned.job.output
        self._manifest = manifest
        self._store = planned.store
        self._plan = planned.plan
        self._digests = planned.manifest_digests
        self._inputs = planned.inputs
        self._index = index_reader(self._output, manifest)

    def reasons(self, shard: ShardSpec, *, is_brief: bool = False) -> list[str]:
        """Return why a shard would be rebuilt; in brief, compare its rows only if nothing else explains it."""
        found = self._changed_layout(shard)
        if not found:
            found = self._changed_options(shard)
            if not (found and is_brief):
                found = [*found, *self._changed_rows(shard, is_why=not found)]
        return found or ["the order of its rows changed"]

    def _changed_layout(self, shard: ShardSpec) -> list[str]:
        before, now = self._manifest.splits.get(shard.split, ()), self._plan.splits[shard.split]
        if not before:
            return [f"split {shard.split} is new"]
        if len(before) != len(now):
            return [f"split {shard.split} has {count_of(len(now), 'shard')} now, it had {len(before)}"]
        return []

    def _changed_options(self, shard: ShardSpec) -> list[str]:
        old_copies = self._manifest.copies.get(shard.split, 1)
        reasons = changed_digests(self._manifest.ingredients, self._digests, augmented=shard.augmented)
        if old_copies != shard.copies:
            reasons.append(f"copies changed ({old_copies} -> {shard.copies})")
        is_named = any(reason.startswith("transform changed") for reason in reasons)
        if (shard.split in self._manifest.augmented) != shard.augmented and not is_named:
            reasons.append("transform applies now" if shard.augmented else "transform no longer applies")
        return reasons

    def num_changed_rows(self, shard: ShardSpec) -> int:
        """Return the number of rows of a shard that need new records, if all others are reused."""
        if self._changed_layout(shard) or self._changed_options(shard):
            return shard.num_rows
        try:
            rows = self._index(shard.split)
        except (CorruptDataError, OutputError, KeyError):
            return shard.num_rows
        positions = np.asarray(self._store.order[shard.start : shard.stop])
        places = rows.find_all(self._store.keys(positions))
        both = np.flatnonzero(rows.are_in_shard(places, shard.number))
        inputs = self._inputs.records(shard.start, shard.stop)[both]
        touched, edited = compared(rows, places[both], self._store, positions[both], inputs)
        return len(places) - len(both) + len({*touched, *edited})

    def _changed_rows(self, shard: ShardSpec, *, is_why: bool) -> list[str]:
        """Return the changes in the rows; input files are read only if nothing else explains the change."""
        try:
            rows = self._index(shard.split)
        except (CorruptDataError, OutputError, KeyError) as error:
            return [f"its rows cannot be compared: {error}"]
        positions = np.asarray(self._store.order[shard.start : shard.stop])
        keys = self._store.keys(positions)
        places = rows.find_all(keys)
        is_here, left = rows.are_in_shard(places, shard.number), set(keys)
        both = np.flatnonzero(is_here)
        gone = [key for key in rows.keys_at(rows.rows_of_shard(shard.number)) if key not in left]
        split_of = self._splits_now(gone)
        new = [keys[number] for number in np.flatnonzero(places < 0)]
        moved = self._came(new, shard.split)
        inputs = self._inputs.records(shard.start, shard.stop) if is_why else self._store.inputs(positions)
        touched, edited = compared(rows, places[both], self._store, positions[both], inputs[both])
        groups = {
            "changed on disk": [keys[both[number]] for number in touched],
            "changed in the index": [keys[both[number]] for number in edited],
            "added": [key for key in new if key not in moved],
            "came from another split": [key for key in new if key in moved],
            "removed": [key for key in gone if split_of[key] is None],
            "moved to another split": [key for key in gone if split_of[key] not in {None, shard.split}],
        }
        if self._manifest.ingredients.get("seed") == self._digests["seed"]:  # another seed moves all of them
            groups["came from another shard"] = [keys[number] for number in np.flatnonzero((places >= 0) & ~is_here)]
            groups["moved to another shard"] = [key for key in gone if split_of[key] == shard.split]
        return [_row_change(change, rows_of_it) for change, rows_of_it in groups.items() if rows_of_it]

    def _splits_now(self, keys: Sequence[str]) -> dict[str, str | None]:
        """Return the split of each key's row; None if the source has no such row."""
        rows = self._store.find_all(keys)
        codes = np.asarray(self._store.split_codes)[rows].tolist()
        splits = [self._store.splits[code] for code in codes]
        return {key: split if row >= 0 else None for key, split, row in zip(keys, splits, rows.tolist(), strict=True)}

    def _came(self, keys: Sequence[str], split: str) -> set[str]:
        """Return the keys that were in other splits."""
        found: set[str] = set()
        for other in self._manifest.splits.keys() - {split}:
            with contextlib.suppress(CorruptDataError, OutputError, KeyError):
                places = self._index(other).find_all(keys)
                found.update(key for key, place in zip(keys, places.tolist(), strict=True) if place >= 0)
        return found


def compared(
    rows: IndexTable, places: np.ndarray, store: RowStore, positions: np.ndarray, inputs: np.ndarray
) -> tuple[list[int], list[int]]:
    """Return the numbers of the rows whose files changed, and of those whose fields did."""
    touched = np.zeros(len(places), bool)
    edited = np.zeros(len(places), bool)
    for number, field in enumerate(store.file_fields):
        found = inputs[:, number]
        is_known = (found["path"] == 0) | (found["digest"] != np.zeros((), "V16"))
        for ending, what in ((SIZE, "size"), (DIGEST, "digest")):
            now = [value if path else None for value, path in found[[what, "path"]].tolist()]
            differs = _differs(rows.values(column_of_field(field.name) + ending, places), now)
            touched |= differs if what == "size" else differs & is_known
    for name, values in store.columns(positions):
        edited |= _differs(rows.values(column_of_field(name), places), list(values))
    return np.flatnonzero(touched).tolist(), np.flatnonzero(edited).tolist()


def _differs(old: Sequence[Any] | None, new: Sequence[Any]) -> np.ndarray:
    if old is None:
        return np.ones(len(new), bool)
    return np.array([a != b and (a == a or b == b) for a, b in zip(old, new, strict=True)], bool)  # noqa: PLR0124 -- nan


def _row_change(change: str, keys: Sequence[str]) -> str:
    more = len(keys) - _MOST_NAMED
    named = ", ".join(keys[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"row{'s' if len(keys) > 1 else ''} {named} {change}"


# ---------------------------------------------------------------- rows that a retry can reuse
#
# `run(retry_failed=True)` reuses the rows of a finished shard that gave records and have not changed.
#
# A row is unchanged if nothing else that decides records has changed (the manifest has the digests), and if its index
# line, with the sizes and digests of its files, is the same. If that is unknown, the row is processed again: the result
# is the same, and only time is lost.


_PLACE = frozenset({"key", "shard", "record"})
"""Columns of an index file that locate a row, and do not affect its records."""


def index_reader(output: pathlib.Path, manifest: Manifest | None) -> Callable[[str], IndexTable]:
    """Return a function that returns the index of a split in a manifest, read once.

    The function raises `CorruptDataError` if the file cannot be read, and `OutputError` if descriptors run out.
    """

    def read(split: str) -> IndexTable:
        listed = None if manifest is None else manifest.index_infos.get(index_file(split))
        return IndexTable(read_index(output, index_file(split) if listed is None else listed.file, info=listed))

    return functools.cache(read)


def find_reusable(
    planned: PlannedJob, before: Manifest, shard: ShardSpec, info: ShardInfo, index: Callable[[str], IndexTable]
) -> ReusedRows | None:
    """Return the places of the records of a shard's rows in the last run's file; None if none can be reused."""
    output, job = planned.job.output, planned.job
    with contextlib.suppress(OSError, CorruptDataError):
        if not _is_made_alike(planned, before, shard) or not info.is_whole(output / info.file):
            return None
        if not info.has_offsets(output / info.index_file):
            return None
        if info.num_dropped_records:  # only the code that makes a record knows why it was left out
            return None
        measured = measured_fields(job.records.features, info)
        if measured is None:
            return None
        keys = planned.store.keys(planned.store.order[shard.start : shard.stop])
        same = _is_same(planned, shard, keys, index(shard.split))
        places = records_by_row(map(stored_key, job.formats[0].read(output / info.file)))
        found = np.array([places.get(key, (0, 0)) for key in keys], np.int64).reshape(-1, 2)
        count = np.where(same, found[:, 1], 0)
        return ReusedRows(
            str(output / info.file), str(output / info.index_file), shard.start, found[:, 0], count, measured
        )
    return None


def measured_fields(features: Features, info: ShardInfo) -> tuple[str, ...] | None:
    """Return the fields whose values entered the statistics of a shard; None if that cannot be repeated.

    It can if all pictures of a field were encoded losslessly from arrays, or none was.
    """
    known = Statistics.from_lines(info.statistics)
    if not features.measured:
        return ()
    if known is None:
        return None
    found = []
    for name, feature in features.measured.items():
        number, pictures = (known.fields.get(name, {}).get(key) for key in ("measured", "height"))
        if number is None:
            continue
        one = innermost(feature)
        is_exact = isinstance(one, PictureFile) and not (isinstance(one, Image) and one.encoding == "jpeg")
        if not is_exact or not isinstance(pictures, Numbers) or pictures.count != number:
            return None
        found.append(name)
    return tuple(found)


def _is_made_alike(planned: PlannedJob, before: Manifest, shard: ShardSpec) -> bool:
    """Return True if this run makes the records of unchanged rows exactly like the last one."""
    return (
        not changed_digests(before.ingredients, planned.manifest_digests, augmented=shard.augmented)
        and before.copies.get(shard.split) == shard.copies
        and (shard.split in before.augmented) == shard.augmented
    )


def _is_same(planned: PlannedJob, shard: ShardSpec, keys: Sequence[str], index: IndexTable) -> np.ndarray:
    """Return bool (n,): whether each row's line in the last run's index is the same."""
    places = index.find_all(keys)
    same = places >= 0
    after = _index_columns(planned, shard)
    names = {name for name in index.table.column_names if name not in _PLACE}
    if names != after.keys() or not same.any():
        return np.zeros(len(keys), bool)
    known = np.flatnonzero(same)
    for name, values in after.items():
        old = index.values(name, places[known])
        assert old is not None  # it is among the columns
        same[known] &= np.array([a == values[b] for a, b in zip(old, known.tolist(), strict=True)], bool)
    return same


def _index_columns(planned: PlannedJob, shard: ShardSpec) -> dict[str, Any]:
    """Return the columns of an index file for the fields and input files of a shard's rows."""
    store = planned.store
    rows = store.order[shard.start : shard.stop]
    found: dict[str, Any] = {column_of_field(field.name): store.column(field, rows) for field in store.fields}
    inputs = planned.inputs.records(shard.start, shard.stop)
    for number, field in enumerate(store.file_fields):
        states = inputs[:, number]
        for ending, what in ((SIZE, "size"), (DIGEST, "digest")):
            values = [value if path else None for value, path in states[[what, "path"]].tolist()]
            found[column_of_field(field.name) + ending] = values
    return found
