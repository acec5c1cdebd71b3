"""A view of a finished set, saved in its place: the shards that change are made in the stage, all others stay.

    records that `drop` has left out, fields that `map`, `join` and `columns` change ──> shards that change
        ──> an ordinary conversion of these, see `stage` ──> published under their names

A row that is dropped stays in the index, as one that was left out on purpose, and the manifest lists its key. So
rows stay where they are, later runs and appends leave it out, and a shard has the fingerprint that a run gives it.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from datamat.directory.failures import failed_keys
from datamat.directory.index_files import read_index
from datamat.directory.keys import RecordKey
from datamat.directory.manifest import INDEX_FOLDER, IndexInfo, Manifest, index_file, run_folder
from datamat.directory.publication import version_there
from datamat.errors import OutputError
from datamat.folders.base import ChangedError
from datamat.plan.plan import fingerprint_without
from datamat.run.merge import write_index
from datamat.run.run import work_folder
from datamat.run.stage import alone, begin, nothing_made, publish, report_on_all, stage_of, who
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from datamat.directory.ledger import Ledger
    from datamat.directory.manifest import ShardInfo
    from datamat.features import Features
    from datamat.plan.job import Job
    from datamat.run.outputs import LocalOutput
    from datamat.run.report import RunReport


@frozen(eq=False)
class Edit:
    """What changes in a finished set.

    Attributes:
        before: manifest of the set, with all of its formats.
        shards: numbers of the shards that change, ascending, by split; none where nothing does.
        features: schema of the records afterwards.
        removed: keys of the rows that each shard loses, and of records of rows that keep others, by split and number.
        fields: names of the fields that change, are new or go.
    """

    before: Manifest
    shards: Mapping[str, Sequence[int]]
    features: Features
    removed: Mapping[tuple[str, int], frozenset[str]]
    fields: frozenset[str]

    @classmethod
    def of(
        cls,
        before: Manifest,
        split: str | None,
        stays: np.ndarray,
        keys: Sequence[str],
        features: Features,
        fields: frozenset[str],
    ) -> Edit:
        """Return the edit that leaves some records of a set, or of one of its splits.

        Args:
            before: manifest of the set.
            split: the split, or None for all.
            stays: bool (num_records,): which records stay.
            keys: keys of the records; not looked at where all stay.
            features: schema of the records afterwards.
            fields: names of the fields that change.
        """
        shards: dict[str, list[int]] = {}
        removed, start = {}, 0
        for name, infos in before.splits.items():
            for number, info in enumerate(infos if split in (None, name) else ()):
                here = stays[start : start + info.num_records]
                if not here.all():
                    removed[name, number] = _removed(keys[start : start + len(here)], here)
                if fields or (name, number) in removed:
                    shards.setdefault(name, []).append(number)
                start += info.num_records
        return cls(before, shards, features, removed, fields)

    def restored(self, shard: tuple[str, int]) -> list[str]:
        """Return the records that were removed before of rows of which now none is left."""
        gone = self.removed.get(shard, ())
        return [key for key in self.before.removed if key not in gone and RecordKey.row_of(key) in gone]


def _removed(keys: Sequence[str], stays: np.ndarray) -> frozenset[str]:
    left = {RecordKey.row_of(keys[place]) for place in np.flatnonzero(stays).tolist()}
    gone = [keys[place] for place in np.flatnonzero(~stays).tolist()]
    return frozenset(key if (row := RecordKey.row_of(key)) in left else row for key in gone)


def edit(job: Job, run: Callable[[Job], RunReport], change: Edit) -> RunReport:
    """Change a finished set where it is.

    Raises:
        ChangedError: the set is no longer the one of which `change` is an edit.
        OutputError: as `run` does.
        OutputLockedError: another run is at work.
    """
    began, before = time.perf_counter(), change.before
    work_folder(job.output)
    seen = begin(job)
    with alone(job, seen) as place:  # to its end: who edits meanwhile is told at once
        if Manifest.read(job.folder).render() != before.render():
            raise ChangedError(job.place)
        if not change.shards:
            return nothing_made(job, place, before, began)
        stage = stage_of(job, "edit", "replace")
        try:
            report = run(stage)
        except OutputError as error:
            if version_there(job.folder) == seen:
                raise
            raise ChangedError(job.place) from error  # who has published has removed the stage
        if not report.is_complete:
            return dataclasses.replace(report, output=job.place)
        manifest = _published(job, place, change, stage)
    return report_on_all(report, job, manifest)


def _published(job: Job, place: LocalOutput, change: Edit, stage: Job) -> Manifest:
    before = change.before
    seen, made = version_there(stage.folder), Manifest.read(stage.folder)
    if Manifest.read(stage.output).render() != made.render():
        raise ChangedError(f"{job.place}: another edits it at the same time")
    new: dict[str, ShardInfo] = {}
    moved: dict[str, list[list[tuple[ShardInfo, ShardInfo]]]] = {split: [[], []] for split in change.shards}
    for name in before.by_format:
        old_shards, made_shards = before.of_format(name).splits, made.of_format(name).splits
        for split, numbers in change.shards.items():
            for number, info in zip(numbers, made_shards[split], strict=True):
                old = old_shards[split][number]
                assert info.num_rows == old.num_rows, "all rows of a shard are made again"
                new[old.file] = _changed(change, (split, number), old, info)
                moved[split][1].append((info, new[old.file]))
    lossy = {index_file(split) for split, _ in change.removed}
    manifest = dataclasses.replace(
        before,
        features=change.features,
        shards=tuple(new.get(info.file, info) for info in before.shards),
        also={name: tuple(new.get(info.file, info) for info in infos) for name, infos in before.also.items()},
        index=tuple(_written_index(job, change, info) if info.name in lossy else info for info in before.index),
        removed=tuple(sorted(_removed_keys(change))),
        edited=tuple(sorted({*before.edited, *change.fields})),
    )

    def note(ledger: Ledger) -> None:
        edits = {"removes": sum(map(len, change.removed.values())), "changes": sorted(change.fields)}
        ledger.write("run_started", name=before.name, edits=edits, **who())
        for (split, number), keys in change.removed.items():
            ledger.write_keys("samples_removed", sorted(keys), shard=before.splits[split][number].name)
        for old in before.shards:
            if old.file in new and old.num_failed:
                lack = new[old.file]
                ledger.write_keys("shard_lacks", failed_keys(job.work, [old]), shard=lack.name, checksum=lack.checksum)

    publish(job, place, before, manifest, moved, (stage, seen), note)
    return manifest


def _removed_keys(change: Edit) -> set[str]:
    restored = {key for shard in change.removed for key in change.restored(shard)}
    return {*change.before.removed, *(key for keys in change.removed.values() for key in keys)} - restored


def _changed(change: Edit, shard: tuple[str, int], old: ShardInfo, made: ShardInfo) -> ShardInfo:
    """Return the entry of a file that takes the place of another: rows that failed or were left out are still so."""
    fingerprint = made.fingerprint
    if not change.fields:
        fingerprint = fingerprint_without(old.fingerprint, change.removed[shard], change.restored(shard))
    return dataclasses.replace(
        made,
        file=old.file,
        index_file=old.index_file,
        num_failed=old.num_failed,
        num_dropped=made.num_dropped - old.num_failed,
        fingerprint=fingerprint,
        inputs=old.inputs,
    )


def _written_index(job: Job, change: Edit, info: IndexInfo) -> IndexInfo:
    """Write the index of a split: in shards that lose records, rows differ in how many they have."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table, waiting_in = read_index(job.output, info.file, info=info), run_folder(job.work)
    is_uneven = np.isin(table["shard"].to_numpy(), [number for split, number in change.removed if split == info.split])
    records = pc.if_else(pa.array(is_uneven), pa.scalar(None, pa.int64()), table["record"])
    place = table.column_names.index("record")
    (waiting_in / INDEX_FOLDER).mkdir(parents=True, exist_ok=True)
    path = waiting_in / info.name
    write_index(table.set_column(place, table.schema.field(place), records), path, waiting_in)
    return IndexInfo.of_file(path)
