"""Run a job, alone or as one of several tasks that make one output together.

    a claim of each shard, see `slices` ──> a run of the claimed shards ──> the last task writes the manifest

On a disk a task makes its shards in its own folder in the output; for a store, in a scratch folder beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import time
from typing import TYPE_CHECKING

from datamat.directory.files import (
    disk_errors_explained,
    empty_folder,
    lock_holder,
    locked,
)
from datamat.directory.manifest import Manifest
from datamat.directory.publication import finish_publication
from datamat.errors import CorruptDataError, OutputError, OutputLockedError, SampleError, fold, require_package
from datamat.events import PlanMade, RunEnded
from datamat.folders.local import look_anew
from datamat.parallel.byvalue import run_top_level_once
from datamat.parallel.tasks import warned_once
from datamat.plan.changes import (
    known_shards,
    lacking_shards,
    write_snapshot,
)
from datamat.plan.inputs import InputFiles
from datamat.run.existing import judge_existing, refuse_other_dataset
from datamat.run.limits import interrupted, signals_raised
from datamat.run.outputs import slices_folder
from datamat.run.reporting import reporting
from datamat.run.run import Run, run_job, work_folder
from datamat.run.slices import (
    LEASE_S,
    TaskClaims,
    TaskNumber,
    TaskSession,
)
from datamat.run.targets import claim_names, refuse_own_source
from datamat.run.upload import opened_output, output_of
from datamat.run.wanted import NOTHING_WANTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from datamat.plan.job import Job, PlannedJob
    from datamat.run.outputs import LocalOutput
    from datamat.run.report import RunReport
    from datamat.run.run import Mode
    from datamat.run.wanted import Wanted

_MOMENT_S = 0.5  # between two checks of who writes the manifest


def start(
    job: Job,
    *,
    mode: Mode = "make",
    lease_s: float = LEASE_S,
    wanted: Wanted = NOTHING_WANTED,
    through: Callable[[Job, Callable[[Job], RunReport]], RunReport] | None = None,
) -> RunReport:
    """Run a job, as `Materializer.run` and `convert` do: alone, or as one of several tasks that share its output.

    Args:
        job: the job, with its options checked and resolved.
        mode: purpose of the run.
        lease_s: seconds without a heartbeat after which this task takes over another task's shards.
        wanted: required result of a repair.
        through: function that runs the job, or another one, by the function that it is given; None for the one that
            `existing` names.
    """
    require_package("pyarrow", "the index of a dataset")
    run_top_level_once()  # even if there is nothing to do and no pool starts
    how = job.how
    with warned_once(), signals_raised():
        try:
            if how.task_index is None or how.num_tasks is None:
                run = functools.partial(run_job, mode=mode, wanted=wanted)
            else:
                run = functools.partial(_run_task, task=TaskNumber(how.task_index, how.num_tasks, lease_s))
            if through is None and how.existing == "append":
                from datamat.run.append import append as through
            return run(job) if through is None else through(job, run)
        except SampleError as error:
            fold(error)
            raise error.with_traceback(None)  # noqa: B904 -- the same error
        except KeyboardInterrupt:
            raise interrupted(
                f"interrupted; finished work in {job.place} is kept, and {job.remedies.again} continues from there"
            ) from None


def _run_task(job: Job, task: TaskNumber) -> RunReport:
    """Do the share of one of several tasks that make one output together; see `slices`.

    Raises:
        OutputLockedError: a separate run, or a process with the same task number, is at work.
        OutputError: tasks with another definition are at work; or as for `run_job`.
    """
    refuse_own_source(job)
    TaskSession(job.folder).check()
    shared, own = output_of(job).of_task(job, task.name)
    while True:
        _wait_for_others(job)
        attempt = _Task(shared, own, task)
        try:
            report = attempt.run()
        except OSError as error:  # OutputError is one
            if (
                isinstance(error, OutputLockedError)
                or attempt.is_refused
                or own.work.exists()
                or not shared.output.exists()
            ):
                raise  # otherwise another task has written the manifest, and removed this one's folder
            continue
        if report.is_complete:
            output_of(job).remove_scratch_of_tasks()
        return report


def _wait_for_others(job: Job) -> None:
    """Wait while a task of the same output writes the manifest."""
    while holder := lock_holder(job.work / "lock"):
        if not TaskSession(job.folder).is_there:
            time.sleep(_MOMENT_S)  # it may have just finished
            if lock_holder(job.work / "lock") and not TaskSession(job.folder).is_there:
                raise OutputLockedError(
                    f"{job.place} is being written by {holder}, which shares it with nobody; wait for it, or give "
                    "another output"
                )
        if job.how.deadline.has_come:
            return
        time.sleep(_MOMENT_S)


class _Task:
    """One of several tasks that make one output together.

    Args:
        shared: the job of the whole output; for a store, with the task's scratch folder.
        own: the same job, with the folder of the task as output.
        task: which of the tasks this is.

    Attributes:
        is_refused: whether the state of the output forbids any work.
    """

    def __init__(self, shared: Job, own: Job, task: TaskNumber) -> None:
        self._shared = shared
        self._own = own
        self._task = task
        self._began = time.perf_counter()
        self.is_refused = False

    def run(self) -> RunReport:
        """Make the shards that this task can claim; then write the manifest, or wait for the task that does."""
        is_new = not self._own.output.exists()
        work_folder(self._shared.output)
        with contextlib.suppress(OutputLockedError), locked(self._shared.work / "lock"):
            finish_publication(self._shared.folder)
        work_folder(self._own.output)
        with disk_errors_explained(self._shared.output):
            with locked(self._own.work / "lock"), opened_output(self._own, is_shared=True) as place:
                try:
                    report, claims, whole = self._share_made(place)
                except OutputError:
                    if is_new and self.is_refused:  # otherwise it holds earlier shards of this task
                        self._let_folder_go()
                    raise
            session = TaskSession(self._shared.folder) if claims is None else claims.session
            session.send_ledger(self._own.work)
            # With include or exclude, the rest may belong to other tasks, whose folders the last run would remove.
            if claims is not None and not report.stopped and claims.are_done(self._lacking):
                with contextlib.closing(claims):
                    self._finish(claims)
            session.remove_late()  # left by a killed task, or written by this one since
            return self._completed(report, whole)

    def _share_made(self, place: LocalOutput) -> tuple[RunReport, TaskClaims | None, PlannedJob]:
        """Make the shards that this task can claim; return None as its claims if there was nothing to do."""
        own = self._own
        with reporting(own, began=self._began) as events:
            empty_folder(own.work / "rows")
            planned = own.planned_in(own.work / "rows", self._shared.output)
            inputs = InputFiles(planned.store, self._shared.work)
            whole = dataclasses.replace(planned, job=self._shared, inputs=inputs)
            try:
                claims = self._claims(whole, TaskSession(self._shared.folder))
            except OutputError:
                self.is_refused = own.work.exists()  # otherwise another task has removed it
                raise
            events.emit(PlanMade.of(whole.plan, whole.chosen))
            if claims is None:
                self._let_folder_go()
                report = events.tally.report(own, is_complete=True, stopped="")
                events.emit(RunEnded(report=report, error=None))
                return report, None, whole
            with contextlib.closing(claims):
                # Otherwise its folder would be left behind: the task that writes the manifest removes those of all.
                if not claims.is_over and not claims.are_all_done:
                    place.show_plan(planned.plan)
                write_snapshot(own.work / "rows", planned.plan)
                report = self._made(Run(planned, events, place, claims), claims)
        if claims.is_over:
            place.give_up()  # files written after the end
        return report, claims, whole

    def _claims(self, whole: PlannedJob, session: TaskSession) -> TaskClaims | None:
        """Return the claims of this task; None if the output is complete."""
        finished = known_shards(self._shared.output, self._shared.work)
        refuse_other_dataset(self._shared, finished)
        judge_existing(whole, finished)
        claim_names(whole, *finished)
        self._lacking = lacking = lacking_shards(whole)
        if not lacking and not session.is_there and self._is_written(whole):
            return None
        shards = [shard for shard in whole.chosen if shard.name in lacking]
        return TaskClaims(whole, self._task, shards, session, self._own.work)

    def _let_folder_go(self) -> None:
        shutil.rmtree(self._own.output, ignore_errors=True)
        with contextlib.suppress(OSError):  # it exists already
            slices_folder(self._shared.work).rmdir()

    def _made(self, run: Run, claims: TaskClaims) -> RunReport:
        """Make shards; if another task has written the manifest meanwhile, those still in progress are not needed.

        This happens to a task that was stopped for longer than its leases last.
        """
        try:
            return run.execute()
        except OSError:
            if not claims.is_over and not claims.are_all_done:
                raise
            return run.end(is_complete=False)

    def _finish(self, claims: TaskClaims) -> None:
        """Write the manifest unless another task does."""
        whole = dataclasses.replace(self._shared, how=dataclasses.replace(self._shared.how, hooks=(), progress=False))
        while not claims.is_over and not whole.how.deadline.has_come:
            if claims.takes_end():
                # A task that was stopped while it wrote the manifest may hold the lock: then wait for it.
                with contextlib.suppress(OutputLockedError), claims.alive():
                    run_job(whole, task=self._task)
                    return
            claims.beat()
            time.sleep(claims.pause_s)

    def _completed(self, report: RunReport, whole: PlannedJob) -> RunReport:
        """Return this task's report with the totals of the output."""
        report = dataclasses.replace(report, output=self._shared.place, is_complete=False)
        manifest = self._is_written(whole)
        if manifest is None:
            return report
        return dataclasses.replace(
            report,
            is_complete=True,
            **manifest.counts.by_name(),
            num_shards_reused=len(manifest.shards) - report.num_shards_written,
        )

    def _is_written(self, whole: PlannedJob) -> Manifest | None:
        """Return the manifest of the output if it lists the shards of the plan."""
        look_anew(self._shared.output)  # another host may have just written it
        wanted = {shard.name: shard.fingerprint for shard in whole.plan.shards}
        with contextlib.suppress(OutputError, CorruptDataError):
            manifest = Manifest.read(self._shared.folder)
            if {info.name: info.fingerprint for info in manifest.shards} == wanted:
                return manifest
        return None
