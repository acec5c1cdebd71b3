"""Bring a damaged directory back to what its manifest says, by making anew only what is damaged.

    verify ──> damaged files ──> prepare_repair: what is whole stays and keeps its entry, the manifest is put aside
                                        └──> run() makes the rest, index files and manifest too, to the same bytes

Offsets need no source: they are found again in their shard. Files that belong to nothing are moved to
`.datamat/quarantine/foreign`, not deleted.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from datamat.changes import find_changes
from datamat.errors import OutputError
from datamat.formats import get_format
from datamat.index import named
from datamat.manifest import MANIFEST_FILE, Manifest, file_names
from datamat.shard_entries import put_aside, salvaged_shards
from datamat.storage import commit, fsync_folder

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

    from datamat.formats import ShardFormat
    from datamat.manifest import ShardInfo
    from datamat.survey import Survey
    from datamat.verification import VerifyReport

__all__ = ["prepare_repair", "repair_offsets"]


def prepare_repair(survey: Survey, formats: Sequence[ShardFormat], report: VerifyReport) -> None:
    """Leave a damaged directory so that the next run makes anew what is damaged, and nothing else.

    Args:
        survey: source and options: they must be those that the directory was made from.
        formats: of the shards.
        report: what `verify` found.

    Raises:
        OutputError: source or options have changed, so that what was damaged cannot come back as it was.
    """
    output, damaged = survey.output, set(report.files)
    is_told = MANIFEST_FILE not in damaged
    infos = list(Manifest.read(output).all_files) if is_told else salvaged_shards(output)
    if is_told:
        _check_unchanged(survey, infos)
    damaged -= _set_strangers_aside(survey, formats, damaged)
    if is_told:
        damaged -= repair_offsets(output, damaged)
    if damaged:  # the run looks at the checksums of what it is to leave alone
        hurt = {info.name for info in infos if {info.file, info.index_file} & damaged}
        put_aside(output, survey.work / "shards", [info for info in infos if info.name not in hurt])


def repair_offsets(output: pathlib.Path, damaged: set[str]) -> set[str]:
    """Write those of the damaged files of a finished directory anew that are the offsets of whole shards.

    Args:
        output: the directory.
        damaged: paths in it, as `verify` reports them.

    Returns:
        The paths of those that are whole now.
    """
    manifest = Manifest.read(output)
    mended = set()
    for format_name, infos in manifest.by_format.items():
        shard_format = get_format(format_name).with_features(manifest.features)
        for info in infos:
            if info.index_file not in damaged or info.file in damaged:
                continue
            with open(output / info.file, "rb") as file:
                offsets = shard_format.find_offsets(file, path=info.file)
            with commit(output / info.index_file) as index:
                index.write(offsets.to_text().encode())
            mended.add(info.index_file)
    return mended


def _check_unchanged(survey: Survey, infos: list[ShardInfo]) -> None:
    made = {info.name: info.fingerprint for info in infos}
    wanted = {shard.name: shard.fingerprint for shard in survey.plan.shards}
    if made == wanted:
        return
    changes = find_changes(survey.output, survey.work, survey.store, survey.plan, survey.ingredients)
    told = [str(change) for change in changes if made.get(change.shard) != wanted[change.shard]]
    told += [f"{name}: no longer in the plan" for name in made if name not in wanted]
    raise OutputError(
        f"{survey.output} cannot be repaired: source or options are not those that it was made from ({named(told)}); "
        "run() brings it up to date, or give back what has changed"
    )


def _set_strangers_aside(survey: Survey, formats: Sequence[ShardFormat], damaged: set[str]) -> set[str]:
    """Move what belongs to no shard of the plan, and what stands in a file's place without being one."""
    extensions = [made.extension for made in formats]
    ours = {name for shard in survey.plan.shards for names in file_names(shard.name, extensions) for name in names}
    ours |= {MANIFEST_FILE, *(f"index/{split}.parquet" for split in survey.plan.splits)}
    strange = {
        name
        for name in damaged
        if os.path.lexists(survey.output / name) and (name not in ours or not (survey.output / name).is_file())
    }
    aside = survey.work / "quarantine" / "foreign"
    for name in sorted(strange):
        aside.mkdir(parents=True, exist_ok=True)
        os.replace(survey.output / name, aside / name.replace("/", "-"))
    if strange:
        fsync_folder(survey.output)
    return strange - ours
