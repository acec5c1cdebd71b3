"""One run, from the call to its report: the lock, finished shards, missing parts, and the commit.

    manifest, entries, receipts of earlier runs ──> missing parts ──> PartQueue ──> receipts ──> shards ──> manifest

The order of the last steps keeps a directory consistent: shards are flushed and named, then the index files, and the
manifest last. Files that would replace published or visible ones wait until the whole plan is finished, and are then
published by one write, see `datamat.directory.publication`: until then the old set is complete.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import shutil
import time
from typing import TYPE_CHECKING, Literal, TypeAlias

from datamat.directory.counts import Counts
from datamat.directory.failures import failed_keys
from datamat.directory.files import (
    WORK,
    check_lock,
    disk_errors_explained,
    empty_folder,
    fsync_folder,
    locked,
    refuse_links,
)
from datamat.directory.ledger import LEDGER_FILE
from datamat.directory.manifest import (
    INDEX_FOLDER,
    IndexInfo,
    Manifest,
    by_shard,
    index_file,
    keys_file,
    read_entries,
    run_folder,
    salvaged_shards,
    under_name,
    write_entry,
)
from datamat.errors import CorruptDataError, IncompleteRunError, OutputError, count_of, join_problems
from datamat.events import PartDamaged, PlanMade, RunEnded, SampleRecovered, ShardFinished
from datamat.folders import AbsentError, LocalFolder
from datamat.options import option
from datamat.plan.changes import (
    equal_shards,
    find_reusable,
    index_reader,
    known_shards,
    lacking_shards,
    missing_files,
    write_snapshot,
)
from datamat.run.dispatch import PartQueue
from datamat.run.existing import judge_existing, refuse_other_dataset
from datamat.run.limits import DiskLimit, ErrorLimit
from datamat.run.outputs import StoredShard
from datamat.run.publish import write_index_files
from datamat.run.quarantine import kept_names, release, safe_name
from datamat.run.receipts import DamagedPartError, Sealed
from datamat.run.reporting import reporting
from datamat.run.shards import ShardBuilder, begin_run, remove_waiting
from datamat.run.slices import TaskClaims, TaskNumber, TaskSession
from datamat.run.targets import claim_names, refuse_own_source
from datamat.run.upload import opened_output, output_of
from datamat.run.wanted import NOTHING_WANTED, OtherBytesError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from datamat.directory.index_files import IndexTable
    from datamat.directory.ledger import FailedRow
    from datamat.directory.manifest import ShardFiles, ShardInfo
    from datamat.plan.changes import ReusedRows
    from datamat.plan.job import Job, PlannedJob
    from datamat.plan.plan import PartSpec, ShardSpec
    from datamat.run.outputs import LocalOutput, UploadTask
    from datamat.run.receipts import Receipt
    from datamat.run.report import RunReport
    from datamat.run.reporting import RunEvents
    from datamat.run.wanted import Wanted
    from datamat.sources.store import RowStore

Mode: TypeAlias = Literal["make", "finalize", "repair"]
"""The purpose of a run: "make" makes what is missing; "finalize" only commits existing shards; "repair" restores the
output to its former state, which may lack failed rows."""

_MOST_NAMED = 10  # rows named in an error
_MOST_DAMAGED = 3  # times that a part may be damaged before the run gives up


def run_job(
    job: Job, *, mode: Mode = "make", task: TaskNumber | None = None, wanted: Wanted = NOTHING_WANTED
) -> RunReport:
    """Lock the output, index the source, make the plan, and run it.

    Args:
        job: the job, with its options checked and resolved.
        mode: purpose of the run.
        task: which of several tasks that share the output this is; None for a single task.
        wanted: required result of a repair.
    """
    began = time.perf_counter()
    refuse_own_source(job)
    work_folder(job.output)
    with disk_errors_explained(job.output), locked(job.work / "lock"):
        session = TaskSession(job.folder)
        if task is None:
            session.refuse_if_alive(job.how.logger)
        with opened_output(job, salvages=mode == "repair") as place:
            report = _run_locked(job, mode, place, session, began, wanted)
            if report.is_complete:
                session.take_ledgers(job.work)
        # After the ledger is uploaded. Shards made by tasks on a disk have been moved by now, even if some are missing.
        if report.is_complete or (session.is_local and task is None):
            session.remove()
    if report.is_complete:
        output_of(job).remove_scratch_of_tasks()
    return report


def _run_locked(
    job: Job,
    mode: Mode,
    place: LocalOutput,
    session: TaskSession,
    began: float,
    wanted: Wanted,
) -> RunReport:
    how = job.how
    session.adopt()
    finished = known_shards(job.output, job.work)
    refuse_other_dataset(job, finished)
    with reporting(job, began=began) as events:
        empty_folder(job.work / "rows")
        planned = job.planned_in(job.work / "rows")
        try:
            if mode != "repair":  # which restores the former state
                judge_existing(planned, finished)
                claim_names(planned, *finished)
            place.adopt(planned.plan, session.made())
            if mode == "finalize" and (lacking := sorted(lacking_shards(planned))):
                raise IncompleteRunError(
                    f"{job.place} lacks {count_of(len(lacking), 'shard')} ({join_problems(lacking)}): run the tasks "
                    "that make them again, or run the job alone to make them in this process"
                )
        except (OutputError, IncompleteRunError):
            shutil.rmtree(job.work / "rows", ignore_errors=True)
            raise
        write_snapshot(job.work / "rows", planned.plan)
        for uneven in planned.plan.uneven().values():
            how.logger.warning("%s", uneven)
        if job.groups is not None and (
            empty := [split for split in job.splits or () if split not in planned.plan.splits]
        ):
            how.logger.warning(
                "no row falls into split %s: %s, and a share is one of groups; change splits= or groups=",
                " or ".join(map(repr, empty)),
                planned.plan.groups,
            )
        events.emit(PlanMade.of(planned.plan, planned.chosen))
        return Run(planned, events, place, mode=mode, wanted=wanted).execute()


class Run:
    """A run whose output is locked and whose plan is made.

    Args:
        planned: the job, its rows and its plan.
        events: passes events to ledger, report and hooks.
        place: the output, in its folder or in a store.
        claims: claims of this task if several share an output; its `.output` is then the task's folder.
        mode: what the run is for.
        wanted: what must come out, of a repair.
    """

    def __init__(
        self,
        planned: PlannedJob,
        events: RunEvents,
        place: LocalOutput,
        claims: TaskClaims | None = None,
        *,
        mode: Mode = "make",
        wanted: Wanted = NOTHING_WANTED,
    ) -> None:
        self._place = place
        self._claims = claims
        self._uploads: dict[str, tuple[UploadTask, ShardSpec, ShardFiles, bool]] = {}  # by shard
        self._planned = planned
        self._job = job = planned.job
        self._output, self._work, self._logger = job.output, job.work, job.how.logger
        self._store, self._plan, self._inputs = planned.store, planned.plan, planned.inputs
        self._events = events
        self._retries = job.how.retry_failed
        self._wants_all = job.how.errors.action == "raise" and mode != "repair" and not self._retries
        self._limit = ErrorLimit(job.how.errors, sum(shard.num_rows for shard in planned.chosen), job.remedies)
        self._queue = PartQueue(
            job,
            planned.store,
            run=begin_run(job.work),
            disk=DiskLimit(job.output, job.how.max_disk, num_formats=len(job.formats)),
            events=events,
            digests=planned.digests,
            claims=claims,
        )
        self._reused: dict[str, ReusedRows] = {}
        self._builders: dict[str, ShardBuilder] = {}  # of the chosen shards, if there is anything to do
        self._in_quarantine = {split: kept_names(job.work, split) for split in planned.plan.splits}
        self._before: Manifest | None = None  # the published manifest
        self._is_current = False
        self._finished: dict[str, ShardFiles] = {}
        self._waiting: set[str] = set()  # finished shards whose files are not named yet
        self._replaces = place.is_shared  # so that a late task can do no harm
        self._damaged: collections.Counter[tuple[str, int]] = collections.Counter()
        self._wanted = wanted
        self._is_repair = mode == "repair"
        self._unlike: dict[str, str] = {}  # by shard: why its bytes differ from those that a repair wants

    def execute(self) -> RunReport:
        """Make what is missing, account for every row, and write the manifest.

        Raises:
            IncompleteRunError: a shard lacks rows, too many rows failed, or rows failed in an earlier run and the
                policy is "raise".
        """
        self._is_current = self._claims is None and self._is_up_to_date()
        if not self._is_current:
            self._place.show_plan(self._plan)
        if self._claims is not None:
            self._make_claimed(self._claims)
            return self.end(is_complete=False)
        if not self._is_current:
            if self._before is None:
                self._place.withdraw_sidecars(self._before, self._logger)
            elif not self._is_repair:
                run_folder(self._work).mkdir(exist_ok=True)
            self._make()
        return self.end(is_complete=not self._queue.stopped and self._finish())

    def end(self, *, is_complete: bool) -> RunReport:
        """Tell hooks and ledger that the run is over; return its report."""
        if self._queue.stopped:
            self._events.emit(self._events.tally.limit_reached(self._queue.stopped))
        report = self._events.tally.report(self._job, is_complete=is_complete, stopped=self._queue.stopped)
        self._events.emit(RunEnded(report=report, error=None))
        return report

    def _builder(self, shard: ShardSpec) -> ShardBuilder:
        listed = () if self._before is None else self._listed.get(shard.name, ())
        return ShardBuilder(self._work, self._output, shard, self._job.formats, self._inputs, listed)

    def _is_up_to_date(self) -> bool:
        """Return True if the output matches the plan exactly; otherwise record what is there."""
        try:
            manifest = Manifest.read(self._output)
        except AbsentError:
            return False
        except CorruptDataError as error:
            self._logger.warning("%s: shards that it no longer lists are rebuilt", error)
            (self._work / "shards").mkdir(exist_ok=True)
            for files in by_shard(salvaged_shards(LocalFolder(self._output))).values():
                if not (self._work / "shards" / f"{files[0].name}.json").exists():
                    write_entry(self._work / "shards", files)
            return False
        self._before = manifest
        wanted = {shard.name: shard for shard in self._plan.shards}
        known = self._listed
        fresh = {
            name: files
            for name, files in known.items()
            if name in wanted
            and name not in self._wanted.hurt
            and self._stands(files)
            and not any(missing_files(self._output, info) for info in files)
            and self._inputs.stand(wanted[name], files)
        }
        self._refuse_left_out(list(fresh.values()))
        self._inputs.save()
        indexed = {name for split in self._plan.splits for name in (index_file(split), keys_file(split))}
        has_index = indexed == manifest.index_infos.keys()
        has_index = has_index and all(info.is_there(self._output) for info in manifest.index)
        if len(fresh) == len(wanted) == len(known) and has_index:
            self._limit.add(Counts.of(*(files[0] for files in fresh.values())))
            for name, files in fresh.items():
                self._set_finished(wanted[name], files, is_reused=True)
            return True
        return False

    @functools.cached_property
    def _listed(self) -> dict[str, ShardFiles]:
        """The shards in the published manifest, by name."""
        return {} if self._before is None else by_shard(self._before.all_files)

    def _refuse_left_out(self, shards: Sequence[ShardFiles], rows: Sequence[FailedRow] = ()) -> None:
        """Refuse to resume from work that lacks rows if the policy requires all of them.

        Raises:
            IncompleteRunError: names rows.
        """
        lacking = [files[0] for files in shards if files[0].num_failed]
        num_failed = sum(info.num_failed for info in lacking) + len({row.key for row in rows})
        if not self._wants_all or not num_failed:
            return
        keys = [*(row.key for row in rows), *failed_keys(self._work, lacking)]
        shown = "; ".join(keys[:_MOST_NAMED])
        if num_failed > _MOST_NAMED <= len(keys):
            shown += f"; and {num_failed - _MOST_NAMED} more"
        remedies = self._job.remedies
        raise IncompleteRunError(
            f"{self._output} is without {count_of(num_failed, 'row')} that failed in earlier runs ({shown}), and "
            f"{option('errors', 'raise')} wants them all: fix them and use "
            f"{remedies.passing('retry_failed', True)}, which tries them again, or pass "
            f"{option('errors', 'skip')} to do without them; {remedies.failures} says what was wrong with each"
        )

    def _set_finished(self, shard: ShardSpec, files: ShardFiles, *, is_reused: bool) -> None:
        self._finished[shard.name] = files
        if self._claims is not None:
            self._events.ledger.sync()  # before the shard counts
            self._claims.finish(shard.name, self._place.stored(files))
        self._events.emit(ShardFinished.of(shard, files, is_reused=is_reused, is_held=shard.name in self._waiting))

    def _set_complete(self, shard: ShardSpec, files: ShardFiles, *, is_reused: bool) -> None:
        """Record a finished shard; for a store, after a worker has uploaded it."""
        task = self._place.task(shard.name, files, waits=shard.name in self._waiting)
        if task is None:
            self._set_finished(shard, files, is_reused=is_reused)
        else:
            self._uploads[shard.name] = (task, shard, files, is_reused)
            self._queue.add(task)

    def _stands(self, files: ShardFiles) -> bool:
        """Return True unless rows of this finished shard are to be retried."""
        return not (self._retries and files[0].num_failed)

    def _make(self) -> None:
        self._builders = {shard.name: self._builder(shard) for shard in self._planned.chosen}
        planned, waiting = {shard.name for shard in self._plan.shards}, run_folder(self._work)
        held = read_entries(waiting)
        for name, files in held.items():
            if name not in planned:  # it waits for an obsolete plan, and takes up disk space
                remove_waiting(waiting, files)
        if not self._is_repair:
            self._take_over(held)
        self._replaces = self._before is None and (self._has_others() or self._place.has_others)
        self._take_results(self._missing(list(self._builders.values())))

    def _take_over(self, held: Mapping[str, ShardFiles]) -> None:
        """Reuse published shards for equal ones in the plan: they wait under their new names."""
        planned = {shard.name: shard for shard in self._planned.chosen}
        for name, files in equal_shards(self._planned, self._listed).items():
            renamed = under_name(files, name, planned[name].split)
            if held.get(name) == renamed:  # by an earlier run, which was killed
                continue
            self._place.take_over(files, renamed)

    def _missing(self, builders: Sequence[ShardBuilder]) -> list[PartSpec]:
        """Resume from earlier runs; return the parts to make."""
        for builder in builders:
            self._resume(builder)
        self._inputs.save()
        there = self._finished | {name: files for name, (_, _, files, _) in self._uploads.items()}
        self._refuse_left_out(
            [there[builder.spec.name] for builder in builders if builder.spec.name in there],
            [row for builder in builders for receipt in builder.taken() for row in receipt.failed],
        )
        return [part for builder in builders if builder.spec.name not in there for part in builder.missing()]

    def _take_results(self, parts: Sequence[PartSpec], more: Callable[[], Sequence[PartSpec]] | None = None) -> None:
        with contextlib.closing(self._queue.of(parts, self._reused, more)) as results:
            for result in results:
                check_lock(self._work)
                match result:
                    case StoredShard():
                        task, shard, files, is_reused = self._uploads.pop(result.name)
                        self._place.settle(task, result)
                        self._set_finished(shard, files, is_reused=is_reused)
                    case Sealed(damaged=DamagedPartError() as error):
                        self._queue.add(self._forgotten(self._builders[result.shard], error))
                    case Sealed():
                        self._publish(self._builders[result.shard], result)
                    case _:
                        self._take(result)

    def _make_claimed(self, claims: TaskClaims) -> None:
        """Make the shards that this task can claim, until all tasks' shards are done."""

        def more() -> list[PartSpec]:
            """Claim shards until one has missing parts, and return these; none if no shard can be claimed now."""
            while shard := claims.take():
                builder = self._builders[shard.name] = self._builder(shard)
                if parts := self._missing([builder]):
                    return parts
            return []

        while not claims.is_over and not self._queue.stopped:
            parts = more()
            self._take_results(parts, more)
            if self._queue.stopped or claims.are_all_done:
                break
            if parts:
                continue
            if self._job.how.deadline.has_come:
                self._queue.stopped = "deadline"
                break
            claims.beat()
            time.sleep(claims.pause_s)  # other tasks hold the rest; watch their heartbeats
        self._inputs.save()

    def _resume(self, builder: ShardBuilder) -> None:
        """Resume a shard of an earlier run."""
        shard = builder.spec
        files = self._found(builder)
        if files is not None and self._stands(files):
            self._limit.add(files[0])
            self._set_complete(shard, files, is_reused=True)
            return
        self._waiting.discard(shard.name)
        if self._manifest_before is not None and (previous := builder.previous()):
            reused = find_reusable(self._planned, self._manifest_before, shard, previous[0], self._old_index)
            if reused is not None:
                self._reused[shard.name] = reused
                self._inputs.records(shard.start, shard.stop)  # so that workers find their digests in the row store
        for receipt in builder.resume(with_failed=not self._retries):
            self._limit.add(receipt, receipt.failed)
            self._events.emit_part(receipt, is_resumed=True)  # the run that made it may not have recorded its rows
        if builder.is_complete:
            self._queue.add(shard)

    @functools.cached_property
    def _manifest_before(self) -> Manifest | None:
        """The manifest of the last finished run, if records of its shards may be reused."""
        if self._retries and self._place.holds_shards:
            with contextlib.suppress(AbsentError, CorruptDataError):
                return Manifest.read(self._output)
        return None

    @functools.cached_property
    def _old_index(self) -> Callable[[str], IndexTable]:
        """Returns the index of a split of the last finished run."""
        return index_reader(self._job.output, self._manifest_before)

    def _take(self, receipt: Receipt) -> None:
        builder = self._builders[receipt.shard]
        _check_conserved(builder.spec, receipt, self._store)
        self._events.emit_part(receipt, is_resumed=False)
        for key in self._recovered(receipt, builder.spec.split):
            self._events.emit(SampleRecovered(shard=receipt.shard, key=key))
        self._limit.add(receipt, receipt.failed)
        builder.add(receipt)
        if not builder.is_complete:
            return  # even if sealed: another part's receipt is on disk, but its worker has yet to return it
        if receipt.sealed is not None:
            self._publish(builder, receipt.sealed)
        else:
            self._queue.add(builder.spec)

    def _forgotten(self, builder: ShardBuilder, error: DamagedPartError) -> tuple[PartSpec, ...]:
        """Discard a part that was damaged on its way into the shard; return the parts to rebuild."""
        name = builder.spec.name
        self._damaged[name, error.number] += 1
        if self._damaged[name, error.number] > _MOST_DAMAGED:
            raise OutputError(
                f"{name}, {error}: that is the {_MOST_DAMAGED + 1}th time. Memory or disk of this machine change what "
                "is written to them; test them, or run on another machine"
            ) from error
        taken = {receipt.number: receipt for receipt in builder.taken()}
        parts = tuple(builder.forget(error))
        for part in parts:
            self._limit.remove(taken[part.number])
        numbers = tuple(part.number for part in parts)
        self._events.emit(PartDamaged(shard=name, part=error.number, again=numbers, message=str(error)))
        return parts

    def _recovered(self, receipt: Receipt, split: str) -> list[str]:
        """Release quarantined rows that have succeeded; return their keys."""
        kept = self._in_quarantine[split]
        if not kept:
            return []
        failed = {row.key for row in receipt.failed}
        keys = self._store.keys(self._store.order[receipt.start : receipt.stop])
        recovered = [key for key in keys if key not in failed and safe_name(key) in kept]
        for key in recovered:
            release(self._work, split, key)
        return recovered

    def _publish(self, builder: ShardBuilder, sealed: Sealed) -> None:
        if any(receipt.failed or receipt.dropped for receipt in builder.taken()):
            self._events.ledger.sync()  # once the shard is finished, only the ledger lists its missing rows
        files = builder.complete(sealed)
        try:
            files = self._judge(files)
        except OtherBytesError as error:
            builder.discard()
            self._unlike[builder.spec.name] = str(error)
            return
        waits = not self._may_have_names(files)
        if waits:
            self._waiting.add(builder.spec.name)
        builder.publish(files, waits=waits, remove=self._queue.remove)
        _check_published(builder.spec, files[0])
        self._set_complete(builder.spec, files, is_reused=False)

    def _judge(self, files: ShardFiles) -> ShardFiles:
        """Return the entries of a shard to be published; raise if a repair requires other bytes."""
        self._wanted.judge(files)
        keys = [row.key for receipt in self._builders[files[0].name].taken() for row in receipt.failed]
        self._events.ledger.record_lack(files[0], keys)
        # A repair does not encode the parts that it keeps: the old statistics hold for equal bytes.
        return tuple(
            dataclasses.replace(info, statistics=info.statistics or known.statistics)
            if (known := self._known.get(info.file, info)).checksum == info.checksum
            and known.fingerprint == info.fingerprint
            else info
            for info in files
        )

    @functools.cached_property
    def _known(self) -> dict[str, ShardInfo]:
        """The entry of each file in the published manifest."""
        return {info.file: info for info in self._before.all_files} if self._before else {}

    def _may_have_names(self, files: Iterable[ShardInfo | IndexInfo]) -> bool:
        """Return True if the files replace nothing, or only files with the same bytes."""
        if self._before is None:
            return not self._replaces
        index = self._before.index_infos
        return all(
            index.get(info.name) == info
            if isinstance(info, IndexInfo)
            else (known := self._known.get(info.file)) is not None
            and (known.checksum, known.offsets) == (info.checksum, info.offsets)
            for info in files
        )

    def _finish(self) -> bool:
        """Write index, sidecars and manifest if the whole plan is finished; return True if it is."""
        if self._unlike:
            raise OtherBytesError(
                f"{self._job.place}: {len(self._unlike)} shards cannot be repaired, because the source no longer gives "
                f"the bytes that they had ({'; '.join(self._unlike.values())}). Everything else is repaired, and the "
                "manifest "
                "still describes the old bytes. Restore what has changed (files, code, versions of packages), or "
                "remove manifest.json and run again to get what the source gives now"
            )
        missing = [shard.name for shard in self._planned.chosen if shard.name not in self._finished]
        if missing:
            raise IncompleteRunError(
                f"{len(missing)} of {count_of(len(self._planned.chosen), 'shard')} unfinished ({missing[0]}, ...); "
                "run again"
            )
        for shard in self._plan.shards:  # shards left out by include and exclude may exist from other runs
            if shard.name not in self._finished:
                files = self._found(self._builder(shard))
                if files and self._place.has(files):
                    self._set_finished(shard, files, is_reused=True)
        self._limit.check_end()
        finished = [self._finished[shard.name] for shard in self._plan.shards if shard.name in self._finished]
        check_lock(self._work)
        is_complete = len(finished) == len(self._plan.shards)
        if is_complete:
            is_copied = self._job.records.pipeline is None and not any(files[0].num_failed for files in finished)
            if not any(files[0].num_records for files in finished) and not (self._plan.removed or is_copied):
                raise IncompleteRunError(
                    f"{self._output}: all {sum(files[0].num_rows for files in finished):,} rows were left out or "
                    f"failed: there is no record. .datamat/{LEDGER_FILE} says why. Where read or a transform returned "
                    "None, is a `return` missing? Change that, and run again"
                )
            if self._is_current and self._before is not None:
                self._write_sidecars(self._before)
            else:
                self._publish_set(finished)
            self._place.sweep()
        shutil.rmtree(self._work / "rows", ignore_errors=True)
        return is_complete

    def _publish_set(self, finished: Sequence[ShardFiles]) -> None:
        """Write the index, and publish exactly the finished shards."""
        from datamat.directory.equal_inputs import equal_inputs

        manifest, waiting = self._described(finished)
        self._inputs.remember(map(self._inputs_of, self._plan.shards))
        visible = set(self._before.file_names) if self._before else set()
        entries = read_entries(self._work / "shards").values()
        visible |= {name for files in entries for info in files for name in (info.file, info.index_file)}
        going = sorted(visible - (manifest.file_names - waiting))
        if going or waiting:
            self._place.withdraw_sidecars(self._before, self._logger)
            fsync_folder(self._output)
        else:
            self._write_sidecars(manifest)  # which flushes the folder, with the names of the shards
        self._place.publish(manifest, waiting, going)
        if going or waiting:
            self._write_sidecars(manifest)
        if equal := equal_inputs(self._output, self._plan.splits):
            self._logger.warning("%s: %s", self._job.place, equal)
        planned = self._plan.uneven()  # ranks may get fewer records, because rows failed
        num_records = {files[0].name: files[0].num_records for files in finished}
        for split, message in self._plan.uneven(num_records).items():
            if split not in planned:
                self._logger.warning("%s", message)

    def _write_sidecars(self, manifest: Manifest) -> None:
        self._place.write_sidecars(manifest, self._logger, self._job.sidecars, self._before)

    def _described(self, finished: Sequence[ShardFiles]) -> tuple[Manifest, set[str]]:
        """Write the index files; return the manifest and the names of its files that wait to be published."""
        index = write_index_files(
            self._output,
            self._store,
            self._plan,
            [files[0] for files in finished],
            self._inputs_of,
            through=self._work / "shards",
            place=lambda info: self._output if self._may_have_names([info]) else run_folder(self._work),
            wanted=self._wanted.index,
        )
        waiting = {info.name for info in index if not self._may_have_names([info])}
        for name in self._waiting:
            waiting |= {file for info in self._finished[name] for file in (info.file, info.index_file)}
        manifest = self._job.manifest(self._plan, self._planned.digests, finished, index)
        if self._wanted.manifest and self._wanted.is_met(manifest.all_files, manifest.index):
            return self._wanted.manifest, waiting
        return manifest, waiting

    def _inputs_of(self, shard: ShardSpec) -> np.ndarray:
        builder = self._builders.get(shard.name)
        return (builder or self._builder(shard)).inputs()

    # ------------------------------------------------------------ replaced files

    def _found(self, builder: ShardBuilder) -> ShardFiles | None:
        """Return the files of a shard that an earlier run finished, published or waiting."""
        if self._replaces:
            builder.unname()
        if (files := builder.waiting()) and self._place.holds_shards and self._may_have_names(files):
            builder.give_names(files)
        elif files:
            self._waiting.add(builder.spec.name)
            return files
        return None if builder.spec.name in self._wanted.hurt else builder.finished()

    def _has_others(self) -> bool:
        """Return True if a visible shard will be removed: it is from another plan, or rows of it are retried."""
        planned = {shard.name: shard for shard in self._plan.shards}
        return any(
            (self._output / info.file).exists()
            for name, files in {**self._listed, **read_entries(self._work / "shards")}.items()
            if name not in planned
            or not self._inputs.stand(planned[name], files)
            or (name in self._builders and not self._stands(files))
            for info in files
        )


def _check_conserved(shard: ShardSpec, receipt: Receipt, store: RowStore) -> None:
    """Raise `IncompleteRunError` if a receipt does not account for each row of its part."""
    part = shard.parts[receipt.number]
    num_expected = receipt.num_done * shard.copies - receipt.num_dropped_records
    if receipt.is_for(part) and not receipt.num_lost and receipt.num_records >= num_expected:
        return
    keys = store.keys(store.order[part.start : part.stop])
    raise IncompleteRunError(
        f"part {part.number} of {shard.name} has {count_of(len(keys), 'row')}, {join_problems(keys)}; its receipt "
        f"counts {receipt.num_done} with {count_of(receipt.num_records, 'record')}, {len(receipt.failed)} that failed "
        f"and {receipt.num_dropped} that were left out; each should give {count_of(shard.copies, 'record')}, fail or "
        "be left out: run again to make it again"
    )


def _check_published(shard: ShardSpec, info: ShardInfo) -> None:
    num_expected = info.num_done * shard.copies - info.num_dropped_records
    if info.num_rows != shard.num_rows or info.num_records < num_expected:
        raise IncompleteRunError(
            f"{info.file} holds {count_of(info.num_records, 'record')} of {count_of(info.num_done, 'row')}, "
            f"{info.num_failed} failed and "
            f"{info.num_dropped} were left out; "
            f"the plan has {shard.num_rows} rows and {shard.copies} copies of each: remove the file and run again"
        )


def work_folder(output: pathlib.Path) -> pathlib.Path:
    """Return the `.datamat` folder of an output, created if missing.

    Raises:
        OutputError: it cannot be created, or there is a link where datamat writes.
    """
    work = output / WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"output {output} cannot be made: {error}; give a folder that can be written") from error
    refuse_links(work)
    index = output / INDEX_FOLDER
    if index.exists() and not index.is_dir():
        raise OutputError(
            f"{index} is a file that no run of datamat has made, where datamat needs a folder; move it away, or give "
            "another output"
        )
    refuse_links(index)
    return work
