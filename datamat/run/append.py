"""`existing="append"`: rows that a finished set has not got become new shards of it, and all others are left alone.

    keys of `_index` ──> rows that are new ──> an ordinary run of these, see `stage` ──> joined and published

Files of the old set keep their bytes, and get names with the new number of shards; in a store, where a file that gets
another name is copied, they keep their names. If another has published meanwhile,
that set counts, and the rows that it has not got are appended to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from typing import TYPE_CHECKING

from datamat.directory.files import SPOOL, lock_holder
from datamat.directory.manifest import INDEX_FOLDER, Manifest, run_folder
from datamat.directory.publication import version_there
from datamat.errors import CorruptDataError, OptionError, OutputError, OutputLockedError
from datamat.options import option
from datamat.plan.changes import compared
from datamat.plan.generations import Generations
from datamat.run.merge import (
    FinishedSet,
    differences,
    joined_manifest,
    renamed_in,
    take_samples,
    write_joined_index,
)
from datamat.run.run import work_folder
from datamat.run.stage import MOMENT_S, MOST_ROUNDS, alone, begin, nothing_made, publish, report_on_all, stage_of, who
from datamat.run.targets import refuse_own_source
from datamat.run.upload import laid_out
from datamat.writers.function import FunctionWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from datamat.directory.ledger import Ledger
    from datamat.plan.job import Job
    from datamat.run.outputs import LocalOutput
    from datamat.run.report import RunReport


def append(job: Job, run: Callable[[Job], RunReport]) -> RunReport:
    """Append the rows that the output of a job has not got; make all of them where nothing is published.

    Raises:
        OptionError: the rows have positions as keys, or are those of a conversion.
        OutputError: new shards would not fit those that are there; or as `run` does.
    """
    began = time.perf_counter()
    refuse_own_source(job)
    _refuse_positions(job)
    work_folder(job.output)
    for _ in range(MOST_ROUNDS):
        with contextlib.suppress(OutputLockedError):
            begin(job)
        seen = version_there(job.folder)
        if not seen:
            return run(dataclasses.replace(job, how=dataclasses.replace(job.how, existing="update")))
        try:
            before = Manifest.read(job.folder)
            with _at_hand(job) as folder:
                known = Generations.of(folder, before, is_append=True)
        except (OSError, CorruptDataError):
            if version_there(job.folder) == seen and not lock_holder(job.work / "lock"):
                raise
            time.sleep(MOMENT_S)  # another is publishing, and moves the files of the index
            continue
        there, differing, copies, is_all = _compared(job, known)
        _check_fit(job, before, copies)
        stage = dataclasses.replace(stage_of(job, "append", "update"), appends_to=known)
        try:
            if is_all:
                with alone(job, seen) as place:
                    return _noted(nothing_made(job, place, before, began), job, there, differing)
            report = run(stage)
            if report.is_complete:
                with alone(job, seen) as place, _at_hand(stage) as folder:
                    manifest = _joined(job, place, before, stage, folder)
                return _noted(report_on_all(report, job, manifest), job, there, differing)
        except OSError:  # OutputError is one
            if version_there(job.folder) == seen:
                raise
            continue
        if version_there(job.folder) == seen:
            return _noted(report, job, there, differing)
    raise OutputError(f"{job.place}: others have published {MOST_ROUNDS} times meanwhile; end them, and append again")


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
        return num_there, num_differing, job.copies_by_split(store), bool((known.turns(store) < 0).all())


def _check_fit(job: Job, before: Manifest, copies: Mapping[str, int]) -> None:
    formats = [made.name for made in job.formats]
    if problems := differences(before, job.records.features, formats, copies):
        raise OutputError(
            f"rows cannot be appended to {job.place}: there and here, {', and '.join(problems)}; make them alike, or "
            "give another output"
        )


def _joined(job: Job, place: LocalOutput, before: Manifest, stage: Job, folder: pathlib.Path) -> Manifest:
    seen, made = version_there(stage.folder), Manifest.read(stage.folder)
    sets = [FinishedSet(job.output, before), FinishedSet(folder, made, stage.folder)]
    renamed = renamed_in(sets, before.name, keeps_first=not job.folder.renames)
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
    moved = {
        split: [
            [(old, new) for old, new in pairs if number or old.file != new.file] for number, pairs in enumerate(both)
        ]
        for split, both in renamed.items()
    }

    def note(ledger: Ledger) -> None:
        ledger.write("run_started", name=before.name, appends=made.counts.num_rows, **who())
        take_samples(sets, ledger, moved)

    publish(job, place, before, manifest, moved, (stage, seen), note)
    return manifest


def _noted(report: RunReport, job: Job, there: int, differing: int) -> RunReport:
    """Return the report on the whole output of what was made of the new rows."""
    return dataclasses.replace(report, output=job.place, num_rows_there=there, num_rows_differing=differing)
