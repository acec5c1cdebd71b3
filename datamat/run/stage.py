"""Where the shards are made that a finished set gets at once: those of rows that are appended, and of an edit in place.

    an ordinary run into .datamat/append or /edit ──> a finished set ──> its shards wait under their new names
                                                                    ──> one write of the manifest publishes them

So they are made, resumed and shared as any others, while the set that is published stays as it is; see
`datamat.directory.publication`. If another has published meanwhile, that set counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from typing import TYPE_CHECKING

from datamat.directory.files import locked
from datamat.directory.keys import ShardName
from datamat.directory.ledger import LEDGER_FILE, Ledger
from datamat.directory.manifest import Manifest
from datamat.directory.publication import finish_publication, version_there
from datamat.errors import CorruptDataError, OutputError, OutputLockedError
from datamat.folders import AbsentError
from datamat.folders.base import ChangedError
from datamat.plan.plan import PartSpec, Plan, ShardSpec
from datamat.run.merge import check_size
from datamat.run.outputs import STAGES
from datamat.run.report import RunReport
from datamat.run.upload import opened_output, output_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from datamat.directory.manifest import ShardInfo
    from datamat.options import Existing
    from datamat.plan.job import Job
    from datamat.run.merge import Renamed
    from datamat.run.outputs import LocalOutput

MOMENT_S = 0.5  # between two looks at who publishes
MOST_ROUNDS = 10  # of an append or an edit, in each of which another has published meanwhile


def stage_of(job: Job, name: str, existing: Existing) -> Job:
    """Return the job that makes a part of a set apart from it."""
    folder, output = job.folder.child(STAGES[name]), job.output / STAGES[name]
    how = dataclasses.replace(job.how, existing=existing)
    return dataclasses.replace(job, folder=folder, output=output, sidecars=(), how=how, part_of=job.place)


def begin(job: Job) -> str:
    """Finish what a killed process has begun to publish; return the version of the manifest, "" for none.

    Raises:
        OutputLockedError: another run is at work.
    """
    with locked(job.work / "lock"):
        finish_publication(job.folder)
        _remove_published(job)
    return version_there(job.folder)


def _remove_published(job: Job) -> None:
    """Remove what a killed process has published already; while the job is locked.

    A stage without a manifest stays: other tasks may be about to fill it.
    """
    for name in STAGES.values():
        with contextlib.suppress(AbsentError, CorruptDataError):
            made = Manifest.read(job.folder.child(name))
            published = {info.checksum for info in Manifest.read(job.folder).all_files}
            if published.issuperset(info.checksum for info in made.all_files):
                output_of(job).remove_stage(name)


@contextlib.contextmanager
def alone(job: Job, seen: str) -> Iterator[LocalOutput]:
    """Yield the output of a job, of which the lock is held, if what is published is what was seen.

    Raises:
        ChangedError: another has published.
        OutputLockedError: another run is at work.
    """
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(job.work / "lock"))
                break
            except OutputLockedError:
                if job.how.task_index is None or job.how.deadline.has_come:
                    raise
                time.sleep(MOMENT_S)  # most likely another task does the same
        place = stack.enter_context(opened_output(job))
        if version_there(job.folder) != seen:
            raise ChangedError(f"{job.place}: another has published meanwhile; run again")
        try:
            yield place
        except OutputError:  # of a shard that waited, and is published by another now
            if version_there(job.folder) != seen:
                place.give_up()
            raise


def publish(
    job: Job,
    place: LocalOutput,
    before: Manifest,
    manifest: Manifest,
    moved: Renamed,
    stage: tuple[Job, str],
    note: Callable[[Ledger], None],
) -> None:
    """Publish a set that has shards of the stage; what changed of its index waits.

    Args:
        job: the job of the whole output.
        place: the output.
        before: manifest of the set as it is.
        manifest: manifest of the set as it will be.
        moved: the files that get other names: those of the set, and those of the stage.
        stage: the job of the stage, and the version of its manifest that was seen.
        note: notes what the ledger says of the shards.
    """
    began = time.perf_counter()
    check_size(manifest)
    place.show_plan(_plan_of(manifest))
    waiting = {info.name for info in manifest.index if before.index_infos.get(info.name) != info}
    for number, below in enumerate(("", f"{stage[0].output.relative_to(job.output).as_posix()}/")):
        waiting |= _taken_over(place, moved, number, below)
    if version_there(stage[0].folder) != stage[1]:  # of another machine, which makes something else there
        raise ChangedError(f"{job.place}: another writes to {stage[0].folder} at the same time; run again")
    ledger = Ledger(job.work / LEDGER_FILE)
    with contextlib.closing(ledger):
        note(ledger)
        ledger.sync()  # once they are published, only the ledger says which rows the shards lack
        place.withdraw_sidecars(before, job.how.logger)
        place.publish(manifest, waiting, sorted(before.file_names - (manifest.file_names - waiting)))
        place.write_sidecars(manifest, job.how.logger, job.sidecars, before)
        place.sweep()
        elapsed_s = round(time.perf_counter() - began, 3)
        ledger.write("run_finished", is_complete=True, **manifest.counts.to_ledger(), elapsed_s=elapsed_s)


def _taken_over(place: LocalOutput, moved: Renamed, number: int, below: str) -> set[str]:
    """Have the shards of one of the sets wait under their new names; return the names of their files."""
    files: dict[str, list[tuple[ShardInfo, ShardInfo]]] = {}
    for both in moved.values():
        for old, new in both[number]:
            files.setdefault(new.name, []).append((old, new))
    for pairs in files.values():
        old_files, new_files = zip(*pairs, strict=True)
        place.take_over(old_files, new_files, below)
    return {name for pairs in files.values() for _, new in pairs for name in (new.file, new.index_file)}


def _plan_of(manifest: Manifest) -> Plan:
    """Return a plan that gives the shards of a manifest, for those who see that this is under way."""
    shards = []
    for info in manifest.shards:
        rows = PartSpec(info.name, 0, 0, info.num_rows, 0, 1, False, info.fingerprint, 1)
        shards.append(ShardSpec(info.name, info.split, ShardName.parse(info.name).number, info.fingerprint, (rows,)))
    return Plan(manifest.name, tuple(shards))


def who() -> dict[str, str | int]:
    """Return what the ledger says of this process."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


def report_on_all(report: RunReport, job: Job, manifest: Manifest) -> RunReport:
    """Return the report on the whole output of a job, given that on the stage, whose shards are published now."""
    num_reused = len(manifest.shards) - report.num_shards_written
    counts = {**manifest.counts.by_name(), "num_shards_reused": num_reused, "num_shards_held": 0}
    return dataclasses.replace(report, output=job.place, **counts)


def nothing_made(job: Job, place: LocalOutput, manifest: Manifest, began: float) -> RunReport:
    """Do what a call that was killed may have left to be done; return the report of one that found all there."""
    place.adopt(_plan_of(manifest))
    place.write_sidecars(manifest, job.how.logger, job.sidecars, manifest)
    place.sweep()
    return RunReport(
        output=job.place,
        is_complete=True,
        **manifest.counts.by_name(),
        num_shards_written=0,
        num_shards_reused=len(manifest.shards),
        num_parts_written=0,
        num_parts_resumed=0,
        elapsed_s=time.perf_counter() - began,
        busy_s=0.0,
        num_workers=0,
        remedies=job.remedies,
    )
