"""`existing="append"`: rows that a finished set has not got become new shards of it, and all others are left alone.

    keys of `_index` ──> rows that are new ──> an ordinary run of these, into .datamat/append ──> joined and published

What is made of the new rows is a set of its own, with its receipts, tasks and manifest: so it is resumed and shared as
any other. Then one write of the manifest publishes both as one, see `datamat.directory.publication`: files of the old
set keep their bytes, and get names with the new number of shards. If another has published meanwhile, that set counts,
and the rows that it has not got are appended to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import socket
import tempfile
import time
from typing import TYPE_CHECKING

from datamat.directory.files import SPOOL, locked
from datamat.directory.keys import ShardName
from datamat.directory.ledger import LEDGER_FILE, Ledger
from datamat.directory.manifest import INDEX_FOLDER, Manifest, run_folder
from datamat.directory.publication import finish_publication, version_there
from datamat.errors import CorruptDataError, OptionError, OutputError, OutputLockedError
from datamat.folders import AbsentError
from datamat.folders.base import ChangedError
from datamat.options import option
from datamat.plan.changes import compared
from datamat.plan.generations import Generations
from datamat.plan.plan import PartSpec, Plan, ShardSpec
from datamat.run.merge import (
    FinishedSet,
    check_size,
    differences,
    joined_manifest,
    renamed_in,
    take_samples,
    write_joined_index,
)
from datamat.run.outputs import STAGE
from datamat.run.report import RunReport
from datamat.run.run import work_folder
from datamat.run.targets import refuse_own_source
from datamat.run.upload import laid_out, opened_output, output_of
from datamat.writers.function import FunctionWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from datamat.directory.manifest import ShardInfo
    from datamat.plan.job import Job
    from datamat.run.merge import Renamed
    from datamat.run.outputs import LocalOutput


__all__ = ["append"]

_MOST_ROUNDS = 10  # in each of which another has published meanwhile
_MOMENT_S = 0.5  # between two looks at who publishes


def append(job: Job, run: Callable[[Job], RunReport]) -> RunReport:
    """Append the rows that the output of a job has not got; make all of them where nothing is published.

    Args:
        job: the job of the whole output.
        run: makes the output of a job, alone or as one of several tasks.

    Raises:
        OptionError: the rows have positions as keys, or are those of a conversion.
        OutputError: new shards would not fit those that are there; or as `run` does.
    """
    began = time.perf_counter()
    refuse_own_source(job)
    _refuse_positions(job)
    work_folder(job.output)
    for _ in range(_MOST_ROUNDS):
        with contextlib.suppress(OutputLockedError), locked(job.work / "lock"):
            finish_publication(job.folder)
            _remove_published(job)
        seen = version_there(job.folder)
        if not seen:
            return run(dataclasses.replace(job, how=dataclasses.replace(job.how, existing="update")))
        before = Manifest.read(job.folder)
        with _at_hand(job) as folder:
            known = Generations.of(folder, before, is_append=True)
            there, differing, copies, is_all = _compared(job, known)
        _check_fit(job, before, copies)
        stage = _stage(job, known)
        try:
            if is_all:
                with _alone(job, seen) as place:  # one that was killed may have left something to be done
                    place.write_sidecars(before, job.how.logger, job.sidecars, before)
                    place.sweep()
                return _noted(_nothing_made(job, before, began), job, there, differing)
            report = run(stage)
            if report.is_complete:
                with _alone(job, seen) as place, _at_hand(stage) as folder:
                    manifest = _joined(job, place, before, stage, folder)
                num_reused = len(manifest.shards) - report.num_shards_written
                counts = {**manifest.counts.by_name(), "num_shards_reused": num_reused, "num_shards_held": 0}
                report = dataclasses.replace(report, **counts)
                return _noted(report, job, there, differing)
        except OSError:  # OutputError is one
            if version_there(job.folder) == seen:
                raise
            continue
        if version_there(job.folder) == seen:
            return _noted(report, job, there, differing)
    raise OutputError(f"{job.place}: others have published {_MOST_ROUNDS} times meanwhile; end them, and append again")


def _refuse_positions(job: Job) -> None:
    writer = job.records.writer
    if job.records.pipeline is None:
        raise OptionError(f"a conversion has no new rows; leave out {option('existing', 'append')}")
    if isinstance(writer, FunctionWriter) and writer.keys_are_positions:
        raise OptionError(
            f"{option('existing', 'append')} tells rows apart by their keys, and an input has its position as key, so "
            "that the first of the new ones would pass for the first of the old; pass key= in both calls"
        )


@contextlib.contextmanager
def _at_hand(job: Job) -> Iterator[pathlib.Path]:
    """Yield a folder with the manifest and the index of the output of a job; of one in a store, a temporary one."""
    if job.store is None:
        yield job.output
        return
    with laid_out(job) as (copied, _):
        yield copied.output


def _compared(job: Job, known: Generations) -> tuple[int, int, Mapping[str, int], bool]:
    """Compare the source with a set.

    Returns:
        How many rows are there already, how many of them differ, records per row by split, and whether none is new.
    """
    with tempfile.TemporaryDirectory(prefix=SPOOL) as folder:
        store = job.write_rows(pathlib.Path(folder))
        num_there = num_differing = 0
        for split, rows, places in known.known(store):
            touched, edited = compared(known.indexes[split], places, store, rows, store.inputs(rows))
            num_there += len(rows)
            num_differing += len({*touched, *edited})
        return num_there, num_differing, job.copies_by_split(store), num_there == len(store)


def _check_fit(job: Job, before: Manifest, copies: Mapping[str, int]) -> None:
    formats = [made.name for made in job.formats]
    if problems := differences(before, job.records.features, formats, copies):
        raise OutputError(
            f"rows cannot be appended to {job.place}: there and here, {', and '.join(problems)}; make them alike, or "
            "give another output"
        )


def _stage(job: Job, known: Generations) -> Job:
    """Return the job of the new rows alone."""
    store = None if job.store is None else job.store.child(STAGE)
    how = dataclasses.replace(job.how, existing="update")
    return dataclasses.replace(job, output=job.output / STAGE, store=store, sidecars=(), appends_to=known, how=how)


def _remove_published(job: Job) -> None:
    """Remove what a killed append has published already; while the job is locked."""
    stage = job.folder.child(STAGE)
    with contextlib.suppress(AbsentError, CorruptDataError):
        if not stage.list(deep=True):
            output_of(job).remove_stage()
            return
        before = {(info.fingerprint, info.checksum) for info in Manifest.read(job.folder).all_files}
        if before.issuperset((info.fingerprint, info.checksum) for info in Manifest.read(stage).all_files):
            output_of(job).remove_stage()


@contextlib.contextmanager
def _alone(job: Job, seen: str) -> Iterator[LocalOutput]:
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
                time.sleep(_MOMENT_S)  # most likely another task does the same
        place = stack.enter_context(opened_output(job))
        if version_there(job.folder) != seen:
            raise ChangedError(f"{job.place}: another has published meanwhile; run again")
        try:
            yield place
        except OutputError:  # of a shard that waited, and is published by another now
            if version_there(job.folder) != seen:
                place.give_up()
            raise


def _joined(job: Job, place: LocalOutput, before: Manifest, stage: Job, folder: pathlib.Path) -> Manifest:
    began, made = time.perf_counter(), Manifest.read(stage.folder)
    sets = [FinishedSet(job.output, before), FinishedSet(folder, made, stage.folder)]
    check_size(sets, before.name)
    renamed = renamed_in(sets, before.name)
    waiting_in = run_folder(job.work)
    (waiting_in / INDEX_FOLDER).mkdir(parents=True, exist_ok=True)
    index = tuple(
        info
        for split in renamed
        for info in (
            write_joined_index(sets, split, waiting_in, waiting_in)
            if split in made.splits
            else [info for info in before.index if info.split == split]
        )
    )
    grown = {split: len(shards) for split, shards in made.splits.items()}
    manifest = dataclasses.replace(
        joined_manifest(sets, before.name, renamed, index),
        made_by=before.made_by,
        generations=(*(before.generations or [{name: len(all_) for name, all_ in before.splits.items()}]), grown),
    )
    place.show_plan(_plan_of(manifest))
    moved = {
        split: [
            [(old, new) for old, new in pairs if number or old.file != new.file] for number, pairs in enumerate(both)
        ]
        for split, both in renamed.items()
    }
    waiting = {info.name for info in index if info.split in made.splits}
    for number, below in enumerate(("", f"{STAGE}/")):
        waiting |= _taken_over(place, moved, number, below)
    ledger = Ledger(job.work / LEDGER_FILE)
    with contextlib.closing(ledger):
        who = {"host": socket.gethostname(), "pid": os.getpid()}
        ledger.write("run_started", name=before.name, appends=made.counts.num_rows, **who)
        take_samples(sets, ledger, moved)
        ledger.sync()  # once they are published, only the ledger says which rows the shards lack
        place.withdraw_sidecars(before, job.how.logger)
        place.publish(manifest, waiting, sorted(before.file_names - (manifest.file_names - waiting)))
        place.write_sidecars(manifest, job.how.logger, job.sidecars, before)
        place.sweep()
        elapsed_s = round(time.perf_counter() - began, 3)
        ledger.write("run_finished", is_complete=True, **manifest.counts.to_ledger(), elapsed_s=elapsed_s)
    return manifest


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


def _noted(report: RunReport, job: Job, there: int, differing: int) -> RunReport:
    """Return the report on the whole output of what was made of the new rows."""
    return dataclasses.replace(report, output=job.place, num_rows_there=there, num_rows_differing=differing)


def _nothing_made(job: Job, manifest: Manifest, began: float) -> RunReport:
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
