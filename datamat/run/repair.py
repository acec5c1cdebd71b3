"""Brings a damaged directory back to what its manifest says, by rebuilding only what is damaged.

    verify ──> damaged files ──> _prepared: what must come out ──> run() makes what is damaged, index files too
      ^                                                                                    │
      └──────────── until nothing is damaged <── files get their names where they are what the manifest lists

The manifest stays, and a shard or an index that comes out with other bytes than it lists never gets its name. A
manifest that is damaged is written again from what can still be read of it, and from the source.

Of a damaged shard, the parts that are intact in every format are copied to `.datamat/parts`, each with a receipt, as an
interrupted run leaves them: the run then makes the damaged ones alone, and joins all of them to a new file.

Offsets need no source: they are found again in their shard. Files that belong to nothing are moved to
`.datamat/quarantine/foreign`, not deleted; links leave a note there of where they led.

In a store, a damaged object stays until the run writes the shard that takes its place; its parts are fetched.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from datamat.directory.files import WORK, locked, refuse_links
from datamat.directory.keys import KeyDigest, row_runs, stored_key
from datamat.directory.manifest import (
    INDEX_FOLDER,
    MANIFEST_FILE,
    Manifest,
    by_shard,
    file_names,
    index_file,
    keys_file,
    salvaged_shards,
)
from datamat.directory.publication import finish_publication
from datamat.directory.sidecars.exporting import export, known_sidecars, sidecar_names
from datamat.errors import CorruptDataError, OutputError, join_problems
from datamat.folders import LocalFolder
from datamat.folders.local import regular_path
from datamat.formats import Offsets, get_format
from datamat.plan.changes import edited_in_words, find_changes
from datamat.plan.inputs import content_digest
from datamat.run.growing import GrowingShard
from datamat.run.outputs import LocalOutput
from datamat.run.receipts import PartInfo, Receipt, part_path, write_receipt
from datamat.run.slices import TaskSession
from datamat.run.upload import output_of
from datamat.run.wanted import Wanted

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping
    from typing import BinaryIO

    from datamat.directory.manifest import ShardFiles, ShardInfo
    from datamat.directory.verify import VerifyReport
    from datamat.folders import Folder
    from datamat.formats import ShardFormat
    from datamat.plan.job import Job, PlannedJob
    from datamat.plan.plan import PartSpec, ShardSpec
    from datamat.run.report import RunReport

_COPY_BYTES = 1 << 20
_MOST_ROUNDS = 4  # what one round repairs may have hidden more damage from `verify`
_FILES_OF_WORK = ("lock", "inputs", "ledger.jsonl", "names.json", "sidecars.json")
"""Files of `.datamat` that every run reads or writes; nobody can hold a lock that is none."""


def repair(job: Job) -> RunReport:
    """Rebuild what is damaged in the output of a job, round by round until nothing is; see `Materializer.repair`."""
    from datamat.directory.verify import examine
    from datamat.run.run import work_folder
    from datamat.run.tasks import start

    place, work, logger = job.folder, job.work, job.how.logger
    _clear_the_way(job)
    work_folder(job.output)
    TaskSession(job.folder).refuse_if_alive(logger)
    report = None
    for _ in range(_MOST_ROUNDS):
        with locked(work / "lock"):
            finish_publication(place)
            found = examine(place, deep=False, recomputed=None)
            if report is not None and found.ok:
                return report
            for problem in found.problems:
                logger.warning("%s: %s", job.place, problem)
            wanted = _prepared(job, found)
        report = start(job, mode="repair", wanted=wanted)
        if found.ok:
            return report
    found = examine(place, deep=False, recomputed=None)
    raise OutputError(f"{found}\nstill so after {_MOST_ROUNDS} repairs; test memory, disk and network")


def _clear_the_way(job: Job) -> None:
    """Move aside what is in the way of the files of `.datamat` and of index files."""
    output, work, index = job.output, job.work, job.output / INDEX_FOLDER
    here = LocalOutput(output)
    for name in _FILES_OF_WORK if work.is_dir() else ():
        if os.path.lexists(work / name) and not (work / name).is_file():
            refuse_links(work)
            here.set_aside(f"{WORK}/{name}")
    is_folder = index.is_dir() and not index.is_symlink()
    found = [f"{INDEX_FOLDER}/{path.name}" for path in index.iterdir()] if is_folder else [INDEX_FOLDER]
    wrong = [name for name in found if os.path.islink(output / name) or is_folder == (output / name).is_dir()]
    wrong = [name for name in wrong if os.path.lexists(output / name)]
    if wrong and work.is_dir():
        refuse_links(work)
        with locked(work / "lock"):
            for name in wrong:
                here.set_aside(name)


def _prepared(job: Job, report: VerifyReport) -> Wanted:
    """Prepare a damaged output for a run that rebuilds what is damaged, and nothing else; while the job is locked.

    Args:
        job: the job, whose rows and plan must equal those of the output.
        report: damage that `verify` found.

    Returns:
        What must come out of that run.

    Raises:
        OutputError: source or options have changed, so what was damaged cannot come back as it was.
    """
    place, damaged = output_of(job), set(report.files)
    manifest = None
    if MANIFEST_FILE in damaged:
        infos = salvaged_shards(job.folder)
    else:
        place.begin()
        manifest = Manifest.read(job.output)
        infos = list(manifest.all_files)
    with job.planned() as planned:
        if manifest:
            _check_unchanged(planned, manifest)
        damaged -= _set_strangers_aside(planned, place, damaged)
        if not manifest:
            return Wanted({info.file: (info.fingerprint, _checksums(job.output, info)) for info in infos})
        damaged -= _repair_offsets(job.folder, place, damaged)
        hurt = {info.name for info in infos if {info.file, info.index_file} & damaged}
        files = by_shard(infos)
        for shard in planned.plan.shards:
            if shard.name in hurt:
                with place.at_hand(files[shard.name]) as folder:
                    _keep_intact_parts(planned, shard, files[shard.name], folder)
        return Wanted.of(manifest, hurt)


def _keep_intact_parts(planned: PlannedJob, shard: ShardSpec, files: ShardFiles, folder: pathlib.Path) -> None:
    """Leave the intact parts of a damaged shard, whose files are in a folder, where the next run resumes from them.

    A part counts if its bytes have their digest in every format, and its records are those of its rows; one that lacks
    rows which failed is made again.
    """
    job = planned.job
    growing = GrowingShard(job.work, shard.name, shard.fingerprint, job.formats, len(shard.parts))
    found = {made.extension: info for made in job.formats for info in files if info.file.endswith(f".{made.extension}")}
    if len(found) < len(job.formats) or not all(made.joins_parts for made in job.formats):
        return
    intact = set(range(len(shard.parts)))
    for info in found.values():
        intact &= _intact_parts(folder, info, len(shard.parts))
    if not intact:
        return
    growing.folder.mkdir(parents=True, exist_ok=True)
    with growing.held() as is_held:
        if is_held is False:  # by a worker that outlives a killed repair
            return
        kept = {number for number in intact if _is_kept(planned, shard.parts[number], growing, found, folder)}
    rows = sum(part.stop - part.start for part in shard.parts if part.number not in kept)
    message = "%s: %d of %d parts are intact and stay; %d of %d rows are made again"
    job.how.logger.warning(message, shard.name, len(kept), len(shard.parts), rows, shard.num_rows)


def _intact_parts(folder: pathlib.Path, info: ShardInfo, num_parts: int) -> set[int]:
    """Return the numbers of the parts that a file of a shard holds in their places; it may also have a trailer."""
    if len(info.parts) - num_parts not in (0, 1):  # an older plan divided it differently
        return set()
    with contextlib.suppress(OSError, CorruptDataError):
        path = regular_path(folder, info.file)
        return {number for number, is_there in enumerate(info.intact_parts(path)[:num_parts]) if is_there}
    return set()


def _is_kept(
    planned: PlannedJob,
    part: PartSpec,
    growing: GrowingShard,
    files: Mapping[str, ShardInfo],
    folder: pathlib.Path,
) -> bool:
    """Copy a part out of the files of a shard and give it a receipt; return True if it has one."""
    if growing.receipt(part.number) is not None:  # of a killed repair
        return True
    store, inputs = planned.store, planned.inputs
    kept: list[PartInfo] = []
    offsets = b""
    keys: list[str] = []
    for made in planned.job.formats:
        info = files[made.extension]
        start = sum(one.num_bytes for one in info.parts[: part.number])
        size, digest = info.parts[part.number]
        with open(regular_path(folder, info.file), "rb") as file:
            path = part_path(growing.folder, part.number, made.extension)
            try:
                places, keys = _copied_part(file, start, size, path, made)
            except CorruptDataError:  # a bit has changed since the comparison
                return False
        offsets += places
        kept.append(PartInfo(made.extension, size, digest, len(places), xxhash.xxh3_128_hexdigest(places)))
    runs = [row_key for row_key, _, _ in row_runs(keys)]
    if runs != store.keys(store.order[part.start : part.stop]):
        return False
    write_receipt(
        growing.folder,
        Receipt(
            shard=part.shard,
            number=part.number,
            start=part.start,
            stop=part.stop,
            fingerprint=part.fingerprint,
            num_records=len(keys),
            files=tuple(kept),
            keys=KeyDigest(keys).hexdigest(),
            busy_s=0.0,
            elapsed_s=0.0,
            num_done=len(runs),
            inputs=content_digest(inputs.records(part.start, part.stop)) if inputs.has_files else "",
        ),
        offsets,
    )
    return True


def _copied_part(
    shard: BinaryIO, start: int, size: int, path: pathlib.Path, made: ShardFormat
) -> tuple[bytes, list[str]]:
    """Copy a part to a file of its own; return its offsets and its keys."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    shard.seek(start)
    with open(temporary, "w+b") as file:
        for left in range(size, 0, -_COPY_BYTES):
            file.write(shard.read(min(left, _COPY_BYTES)))
        trailer = made.trailer(file, [(0, size)])  # parts and a trailer make a shard: it can be read
        file.seek(size)
        file.write(trailer)
        file.seek(0)
        keys, table, width = [], array("Q"), 2
        for record, place in made.read_file(file, path=str(path)):
            keys.append(stored_key(record))
            table.extend(place)
            width = len(place)
        file.truncate(size)
    columns = np.array(table, np.uint64).reshape(-1, width).T
    os.replace(temporary, path)
    return Offsets(*map(np.ascontiguousarray, columns)).to_bytes(), keys


def _checksums(output: pathlib.Path, info: ShardInfo) -> tuple[str, ...]:
    """Return which bytes a file may have where the manifest is damaged and may be wrong: those on disk, too."""
    with contextlib.suppress(OSError, CorruptDataError):
        return info.checksum, info.checksum_of(regular_path(output, info.file))
    return (info.checksum,)


def repair_without_source(output: pathlib.Path) -> tuple[list[str], VerifyReport]:
    """Rewrite what is damaged in a finished directory and needs no source: offsets, and files for other readers.

    Returns:
        What was done, in lines, and what `verify` finds then.

    Raises:
        OutputError, CorruptDataError: as for `verify` and `export`.
    """
    from datamat.directory.verify import verify

    done: list[str] = []
    report = verify(output)
    if report.ok or MANIFEST_FILE in report.files:
        return done, report
    rewritten = _repair_offsets(LocalFolder(output), LocalOutput(output), set(report.files))
    done += [f"{name}: rewritten from its shard" for name in sorted(rewritten)]
    report = verify(output)
    if not report.ok and set(report.files) <= sidecar_names(Manifest.read(output)) | known_sidecars(output):
        done.append(str(export(output)))
        report = verify(output)
    return done, report


def _repair_offsets(folder: Folder, place: LocalOutput, damaged: set[str]) -> set[str]:
    """Rewrite damaged files that hold the offsets of whole shards; return their paths."""
    manifest = Manifest.read(folder)
    repaired = set()
    for format_name, infos in manifest.by_format.items():
        shard_format = get_format(format_name).with_features(manifest.features)
        for info in infos:
            if info.index_file not in damaged or info.file in damaged:
                continue
            with place.at_hand((info,)) as here, open(here / info.file, "rb") as file:
                offsets = shard_format.find_offsets(file, path=info.file)
            folder.write(info.index_file, b"".join(offsets.text_blocks()))
            repaired.add(info.index_file)
    return repaired


def _check_unchanged(planned: PlannedJob, manifest: Manifest) -> None:
    infos = [*manifest.all_files]
    if manifest.edited:
        raise OutputError(
            f"{planned.job.place} cannot be repaired: {edited_in_words(manifest)}, of which the source knows nothing; "
            "copy what is damaged from an intact copy"
        )
    made = {info.name: info.fingerprint for info in infos}
    wanted = {shard.name: shard.fingerprint for shard in planned.plan.shards}
    shards = {shard.name: shard for shard in planned.plan.shards}
    known = {name: files for name, files in by_shard(infos).items() if name in shards}
    changed = {name for name, files in known.items() if not planned.inputs.stand(shards[name], files)}
    if made == wanted and not changed:
        return
    changes = find_changes(planned)
    reasons = [str(change) for change in changes if change.shard in changed or change.shard not in made]
    reasons += [f"{name}: no longer in the plan" for name in made if name not in wanted]
    raise OutputError(
        f"{planned.job.place} cannot be repaired: source or options are not those that it was made from "
        f"({join_problems(reasons)}); a run brings it up to date, or restore what has changed"
    )


def _set_strangers_aside(planned: PlannedJob, place: LocalOutput, damaged: set[str]) -> set[str]:
    """Move aside whatever belongs to no shard of the plan, or is in a file's place without being a file."""
    job = planned.job
    extensions = [made.extension for made in job.formats]
    shards = {name for shard in planned.plan.shards for names in file_names(shard.name, extensions) for name in names}
    indexes = {name for split in planned.plan.splits for name in (index_file(split), keys_file(split))}
    # A damaged index may still be readable: the run takes digests of inputs that it does not read again from it.
    strange = damaged - shards - {MANIFEST_FILE}
    # All names, since a damaged manifest hides damage to other files.
    strange |= place.in_the_way(damaged | shards | indexes | {MANIFEST_FILE} | known_sidecars(job.output))
    for name in sorted(strange):
        place.set_aside(name)
    return strange
