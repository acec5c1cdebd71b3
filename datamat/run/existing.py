"""Judge which finished shards of earlier runs a run would replace or remove, and whether it may.

    manifest, entries, plan and receipts of earlier runs ──> of another dataset: refused
    their fingerprints, against those of the plan ─────────> shards to be replaced: a warning, or refused

Nothing here changes a file.
"""

from __future__ import annotations

import collections
import glob
from typing import TYPE_CHECKING, TypeAlias

from datamat.directory.keys import ShardName
from datamat.directory.manifest import (
    INDEX_FOLDER,
    Manifest,
    run_folder,
    salvaged_shards,
)
from datamat.errors import OutputError, count_of
from datamat.folders import LocalFolder
from datamat.options import option
from datamat.plan.changes import (
    Comparison,
    equal_shards,
    find_loss,
    lost_files,
    read_snapshot,
)
from datamat.run.receipts import part_folder

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable, Mapping

    from datamat.directory.manifest import ShardFiles
    from datamat.plan.job import Job, PlannedJob

Finished: TypeAlias = "tuple[Manifest | None, Mapping[str, ShardFiles]]"

_SILENT_SHARE = 0.1  # of the finished rows: rebuilding more than this causes a warning
_MOST_COMPARED = 4  # shards whose rows are compared for the reasons: common reasons show in the first


def refuse_other_dataset(job: Job, finished: Finished) -> None:
    """Refuse to write where another dataset is: it would be removed once this one is finished.

    Raises:
        OutputError: the output holds finished shards or parts of a dataset of another name.
    """
    output, name = job.output, job.name
    others = sorted(_datasets(output, job.work, finished) - {name})
    if others:
        raise OutputError(
            f"{output} holds the dataset {others[0]!r}, and a run of {name!r} would remove it; give {name!r} another "
            f"output, or delete {output} if {others[0]!r} is no longer wanted"
        )


def _datasets(output: pathlib.Path, work: pathlib.Path, finished: Finished) -> set[str]:
    """Return the names of the datasets with finished shards or parts in a directory."""
    manifest, known = finished
    found = {ShardName.parse(shard).dataset for shard in known}
    if manifest is not None:
        found.add(manifest.name)
    else:  # it may be damaged
        found |= {ShardName.parse(info.name).dataset for info in salvaged_shards(LocalFolder(output))}
        found |= _datasets_by_their_files(output)
    for shard in read_snapshot(work / "rows") or ():
        if any(part_folder(work, shard.name).glob("*.receipt")):
            found.add(ShardName.parse(shard.name).dataset)
    return found


def _datasets_by_their_files(output: pathlib.Path) -> set[str]:
    """Return the names of the datasets in a directory, by file names, without the manifest.

    A split that lacks shards does not count: a renamed file looks like that.
    """
    found = _shards_by_their_files(output)
    numbers = collections.Counter((ShardName.parse(name).dataset, split, name[-5:]) for name, split in found.items())
    return {dataset for (dataset, _, number), count in numbers.items() if count == int(number)}


def _shards_by_their_files(output: pathlib.Path) -> dict[str, str]:
    """Return the split of each finished shard in a directory, by file names, without the manifest.

    An index is written once all shards exist. It names the splits; offset files distinguish shards from other files.
    """
    splits = sorted((path.stem for path in (output / INDEX_FOLDER).glob("*.index")), key=len)
    number = "[0-9]" * 5
    found = {}
    for split in splits:  # the longest that fits comes last
        for path in output.glob(f"*-{glob.escape(split)}-{number}-of-{number}.*"):
            if path.name.endswith((".idx", ".offsets")):
                found[path.name.partition(".")[0]] = split
    return found


def judge_existing(planned: PlannedJob, finished: Finished) -> None:
    """Before a run, warn about the finished shards that it will rebuild, and why; or refuse.

    Raises:
        OutputError: `existing` forbids what the run would remove: "update" refuses if finished rows are no longer in
            the source, "refuse" if any finished shard would be replaced or removed.
    """
    job, output, existing = planned.job, planned.job.output, planned.job.how.existing
    manifest, known = finished
    refuse = option("existing", "refuse")
    if existing == "refuse" and manifest is None and _shards_by_their_files(output):
        raise OutputError(
            f"{output} holds finished shards, but its manifest is missing or damaged, so that it is unknown which of "
            f"them would be replaced, which {refuse} forbids; repair it first, or leave that option out"
        )
    wanted = {shard.name: shard for shard in planned.plan.shards}
    stay = {name for name in known.keys() & wanted.keys() if planned.inputs.stand(wanted[name], known[name])}
    if existing == "update" and (problem := find_loss(planned, known)):
        raise OutputError(f"{job.place}: {problem}")
    mine = {shard.name for shard in planned.chosen} | (known.keys() - wanted.keys())
    going = (mine & known.keys()) - stay
    if existing != "refuse" and manifest is not None:  # renamed shards are not rebuilt
        going -= {files[0].name for files in equal_shards(planned, known).values()}
    gone = {name for name in mine & known.keys() if any(lost_files(output, job.work, info) for info in known[name])}
    again = going if existing == "refuse" else going | gone
    num_rows = _num_rows(known, again)
    if not again or (existing != "refuse" and num_rows <= _SILENT_SHARE * _num_rows(known, known)):
        return
    if existing != "refuse" and manifest is not None and run_folder(job.work).exists():
        return  # the unfinished run that this one continues has already warned
    share = num_rows / max(_num_rows(known, known), 1)
    made = ""
    if job.how.retry_failed and manifest is not None and existing != "refuse":
        comparison = Comparison(planned, manifest)
        num_made = sum(
            shard.num_rows if shard.name in gone else comparison.num_changed_rows(shard)
            for shard in planned.plan.shards
            if shard.name in again
        )
        if num_made <= _SILENT_SHARE * _num_rows(known, known):
            return
        made = f", of which {count_of(num_made, 'row')} are read again"
    reasons = _reasons(planned, manifest, known, going)
    reasons += [f"{count_of(len(gone - going), 'shard')} missing or changed"] if gone - going else []
    affected = f"{len(again)} of {count_of(len(known), 'finished shard')} ({share:.0%} of the rows{made})"
    why = "; ".join(reasons)
    if existing == "refuse":
        raise OutputError(
            f"{job.place}: {affected} would be replaced or removed, which {refuse} forbids: {why}; undo the "
            "change, give another output, or leave that option out"
        )
    raising = job.remedies.passing("existing", "refuse")
    job.how.logger.warning("%s: %s will be rebuilt: %s; %s stops instead", job.place, affected, why, raising)


def _num_rows(known: Mapping[str, ShardFiles], names: Iterable[str]) -> int:
    return sum(known[name][0].num_rows for name in names)


def _reasons(
    planned: PlannedJob, manifest: Manifest | None, known: Mapping[str, ShardFiles], going: set[str]
) -> list[str]:
    plan = planned.plan
    if manifest is None:
        return ["source, writer or options changed since an unfinished run made them"] if going else []
    splits = {known[name][0].split for name in going}
    found = [f"split {split} is no longer in the plan" for split in sorted(splits - plan.splits.keys())]
    # One shard of each split first: what changed for a whole split shows in any of its shards.
    firsts = [shards[0] for split, shards in plan.splits.items() if split in splits]
    others = [shard for shard in plan.shards if shard.name in going]
    changed = [shard for shard in (*firsts, *others) if shard.name in going or shard.name not in known]
    comparison = Comparison(planned, manifest)
    compared = list(dict.fromkeys(changed))[:_MOST_COMPARED]
    reasons = (reason for shard in compared for reason in comparison.reasons(shard, is_brief=True))
    return found + list(dict.fromkeys(reasons))
