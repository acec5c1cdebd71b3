"""The `Materializer`: from raw samples to finished shards, on all cores.

    index ──> rows on disk ──> plan ──> parts ──(largest first)──> workers: Materializer.write_part
                                                                       │ receipts, never pixels
    manifest <── index files <── shards, flushed and named <── parts joined in order <──┘

Whatever stops a run, the next one takes over each finished part and continues from there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import pathlib
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from datamat.directory.display import feature_table, render_html, shorten
from datamat.directory.files import WORK, expand_home, lock_holder, locked, refuse_links
from datamat.directory.manifest import INDEX_FOLDER
from datamat.directory.mirror import UrlFiles, mirrored, url_folder, urls_in_errors
from datamat.directory.provenance import find_provenance
from datamat.directory.remote import is_url, without_secrets
from datamat.directory.rows import links_followed
from datamat.directory.stores import ObjectStore
from datamat.directory.verify import VerifyReport, verify
from datamat.errors import (
    OptionError,
    OutputError,
    SampleError,
    SourceError,
    fold,
    require_package,
)
from datamat.options import ErrorPolicy, ShardOptions, WorkerOptions
from datamat.parallel import get_logger
from datamat.parallel.byvalue import run_top_level_once
from datamat.plan.job import Job, checked_version, resolve_formats
from datamat.plan.pipeline import Pipeline
from datamat.run.dispatch import count_workers
from datamat.run.estimate import estimate
from datamat.run.limits import Deadline, parse_bytes, seconds_until, signals_raised
from datamat.run.repair import end_repair, prepare_repair, prepare_stored_repair, set_aside
from datamat.run.replay import preview_copies, replay, verify_sample
from datamat.run.report import Hook, checked_hooks
from datamat.run.run import RunRequest, run_job, run_task, work_folder
from datamat.run.slices import TaskBucket, TaskNumber
from datamat.run.status import compared_status, output_status
from datamat.run.upload import laid_out, scratch_folder
from datamat.run.worker import PartWorker
from datamat.transforms.augmenter import field_names
from datamat.writers.base import DatasetWriter, Sample, resolve_writer, writer_and_source

if TYPE_CHECKING:
    import datetime
    import logging
    from collections.abc import Callable, Collection, Mapping, Sequence

    from datamat.directory.ledger import FailedRow
    from datamat.directory.provenance import Provenance
    from datamat.directory.sidecars import Sidecar
    from datamat.formats import ShardFormat
    from datamat.plan.changes import ReusedRows
    from datamat.plan.plan import PartSpec, Plan
    from datamat.readers.preview import Picture
    from datamat.run.dispatch import Tasks
    from datamat.run.estimate import Estimate
    from datamat.run.receipts import Receipt, Sealed
    from datamat.run.report import RunReport
    from datamat.run.run import Existing
    from datamat.run.status import Status


__all__ = ["Materializer", "output_place", "run_as_task", "start"]

_MOST_ROUNDS = 4  # of a repair: what one round repairs may have hidden more damage from `verify`


_Options = ParamSpec("_Options")
_NAMES_OF_OTHERS = {
    "chunk_bytes": "shard_bytes",
    "max_shard_size": "shard_bytes",
    "max_workers": "num_workers",
    "maxsize": "shard_bytes",
    "n_jobs": "num_workers",
    "num_proc": "num_workers",
    "num_processes": "num_workers",
    "processes": "num_workers",
    "size_limit": "shard_bytes",
}


def _where_option_is(name: str) -> str | None:
    """Return how to write an option of that name, if there is one elsewhere, or by another name."""
    found = _NAMES_OF_OTHERS.get(name, name)
    for keyword, kind in (("workers", WorkerOptions), ("shards", ShardOptions), ("errors", ErrorPolicy)):
        if found in {field.name for field in dataclasses.fields(kind)}:
            return f"{keyword}={kind.__name__}({found}=...)"
    if found in inspect.signature(Materializer.run).parameters:
        return f"run({found}=...)"
    return None


def _naming_options(init: Callable[_Options, None]) -> Callable[_Options, None]:
    """Have a constructor say where an option belongs that it does not have."""
    accepted = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(*args: _Options.args, **options: _Options.kwargs) -> None:
        for name in options.keys() - accepted.keys():
            if where := _where_option_is(name):
                raise OptionError(f"{type(args[0]).__name__} has no option {name!r}; write {where}")
        init(*args, **options)

    return checked


class Materializer:
    """Turns a source into finished shards.

    Args:
        writer: a `DatasetWriter`, a subclass, a registered name ("camvid"), or "package.module:Class"; or, without a
            class, a kind of source ("parquet"), or the data itself, such as a table, a dataset or an iterator. None
            detects the kind of source.
        source: what the writer indexes, usually the folder of the raw data; `~` is your home folder.
        output: folder of the finished shards, created if missing; `~` is your home folder. Or the URL of a folder in a
            writable store (`s3://BUCKET/PATH`, `gs://`, `az://`, `memory://`, ...): workers upload each shard as soon
            as it is finished; see the guide on storage.
        format: name of the shard format ("tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord", or one of
            another package), a `ShardFormat` with its own options, or a list of these: each sample is then read and
            drawn once and written in every format. `load` reads the first, unless you ask for another.
        splits: fraction of each split ({"train": .8, "val": .2}) if the index names none, drawn by a hash of the key.
        shards: how samples are laid out in files.
        transform: an albumentations pipeline, or a callable of (sample) or (sample, rng) that returns a sample or
            several. It draws the splits that `copies` names; with a number there, "train", or all where no split is
            called so. The plan says which.
        copies: records per input row of the splits that are drawn: a number, or one for each such split by its name.
            Any other split gets one copy, untransformed. The key of a copy is KEY#COPY.
        seed: base seed, not negative; with the sample key it decides every random draw.
        include: shell patterns of the shards to make ("train-0000?"); None makes all.
        exclude: shell patterns of the shards to leave out.
        workers: the processes that do the work.
        executor: engine that does the work instead of datamat's own workers: a `dask.distributed.Client` or its address
            ("tcp://host:8786"), "ray" or a Ray address ("ray://host:10001"), or any `concurrent.futures.Executor`, as
            of mpi4py. None: datamat's own, on this machine.
        errors: what to do with bad samples: an `ErrorPolicy`, or its action alone.
        logger: where messages go; the writer can use it too, even in workers.
        version: replaces the digests of the code of the writer and the transform and of what they hold: shards are
            rebuilt when you change the version, and no longer when code or attributes change. None compares the code.
        untouched: fields that geometric transforms leave alone on purpose, such as ("embedding",). An albumentations
            pipeline that flips, rotates or crops is refused if it leaves out any other array field; its own
            `additional_targets` names further fields for it to take.
        columns: fields to store, for a source without a class; None stores all. The name of a struct means all its
            fields.
        rename: new names for such fields, by their names in the source.
        drop: fields of such a source to leave out.
        sidecars: functions that write files of your own beside the shards, for other readers; see `Sidecar`.
        hooks: callables of one event, which hear what happens in `run`, `rerun_failed` and `repair`; see
            `datamat.events`.
        follow_links: whether to follow links in the source that lead out of it, as in the cache of the Hugging Face
            Hub, in DVC and git-annex; their targets then count as input. Otherwise such a link to a file is refused,
            and one to a folder is not searched, because whoever packed an archive chose where its links lead. The same
            holds for absolute paths in a table.
        storage_options: options that fsspec gets with the URL of the output, such as `{"key": ..., "secret": ...}`.
        source_options: the same for the URL of the source; None takes `storage_options`, unless the output is in
            another kind of store. For URLs in rows (`url_fields` of a writer), by scheme or by the beginning of a URL:
            `{"s3": ..., "https://data.example": {"headers": ...}}`. A table may name any web server, and "https" alone
            is for the host of `source` only.
        scratch: local folder in which shards for a store are made, and files of a source behind a URL wait for their
            rows; None takes one in `TMPDIR`. A killed run is resumed from it.

    Raises:
        OptionError: an argument makes no sense.

    Example:
        >>> Materializer("camvid", source="CamVid", output="out/camvid").run()   # doctest: +SKIP
    """

    @_naming_options
    def __init__(  # noqa: PLR0913 -- all options of a run, by name
        self,
        writer: DatasetWriter | type[DatasetWriter] | str | Any = None,
        source: Any = None,
        output: str | os.PathLike[str] | None = None,
        *,
        format: str | ShardFormat | Sequence[str | ShardFormat] = "tfrecord",  # noqa: A002 -- the field's word, and DESIGN's
        splits: Mapping[str, float] | None = None,
        shards: ShardOptions | None = None,
        transform: Any = None,
        copies: int | Mapping[str, int] = 1,
        seed: int = 0,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        workers: WorkerOptions | None = None,
        executor: Any = None,
        errors: ErrorPolicy | Literal["raise", "skip", "quarantine"] | None = None,
        logger: logging.Logger | None = None,
        version: str | int | None = None,
        untouched: Collection[str] = (),
        columns: Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        drop: Sequence[str] = (),
        sidecars: Sequence[Sidecar] = (),
        hooks: Sequence[Hook] = (),
        follow_links: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        source_options: Mapping[str, Any] | None = None,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        writer, source = writer_and_source(writer, source)
        if output is None:
            raise OptionError("output is missing; name the folder of the finished shards, as in output='out/mine'")
        source = expand_home(source) if isinstance(source, (str, os.PathLike)) else source
        fields = {"columns": columns, "rename": rename, "drop": drop}
        chosen = {name: value for name, value in fields.items() if value is not None and value != ()}
        store, folder = output_place(output, storage_options, scratch)
        if source_options is None and (store is None or str(source).startswith(f"{store.scheme}:")):
            source_options = storage_options
        mirror = mirrored(source, source_options, scratch)
        source = source.removeprefix("file://") if isinstance(source, str) else source
        source = source if mirror is None else mirror.path
        with links_followed(follow_links), urls_in_errors():  # a writer may look into its source when it is bound to it
            writer = resolve_writer(writer, source, chosen)
        if scratch is not None and store is None and mirror is None and not writer.url_fields:
            raise OptionError(
                f"scratch is given, but output {os.fspath(output)!r} is no URL, and neither is the source: shards are "
                "made where they stay; leave scratch out"
            )
        self.job = Job(
            records=Pipeline.of(writer, transform, seed, field_names(untouched)),
            source=source,
            output=folder,
            store=store,
            formats=resolve_formats(format, writer.features),
            splits=None if splits is None else dict(splits),
            shards=ShardOptions() if shards is None else shards,
            copies=copies if isinstance(copies, int) else dict(copies),
            seed=seed,
            version=checked_version(version),
            include=include,
            exclude=exclude,
            workers=WorkerOptions() if workers is None else workers,
            executor=executor,
            errors=ErrorPolicy.of(errors),
            hooks=checked_hooks(hooks),
            sidecars=tuple(sidecars),
            logger=logger or get_logger("datamat"),
            follow_links=follow_links,
            mirror=mirror,
            urls=None
            if not writer.url_fields
            else UrlFiles(
                url_folder(output, scratch), source_options or {}, "" if mirror is None else str(mirror.root)
            ),
        )
        self._part_worker: PartWorker | None = None  # of the copy that travels to the workers of a run

    def __repr__(self) -> str:
        return f"Materializer({self.job.writer_name!r}, {self._source_text!r}, {str(self.job.place)!r})"

    def _repr_html_(self) -> str:
        job = self.job
        transform = job.records.pipeline.augmenter.transform if job.records.pipeline is not None else None
        facts = [
            ("writer", job.writer_name),
            ("source", self._source_text),
            ("output", job.place),
            ("format", ", ".join(made.name for made in job.formats)),
            ("copies", job.copies),
            ("transform", "none" if transform is None else shorten(str(transform))),
            ("seed", job.seed),
            ("workers", count_workers(job) if job.executor is None else type(job.executor).__name__),
            ("bad samples", job.errors.action),
        ]
        if job.include or job.exclude:
            facts.append(("shards", f"include={job.include}, exclude={job.exclude}"))
        try:
            tables = [feature_table(job.records.features)]
        except OptionError:  # of `materialize`, before they are inferred
            tables = []
        return render_html(f"Materializer of {job.name!r}", facts, tables)

    @property
    def _source_text(self) -> str:
        """The path or URL of the source, without secrets; of anything else its class."""
        source = self.job.source if self.job.mirror is None else str(self.job.mirror)
        if isinstance(source, (str, os.PathLike)):
            return without_secrets(os.fspath(source))
        return "none" if source is None else type(source).__qualname__

    @property
    def writer(self) -> DatasetWriter:
        """The plug-in that reads the samples."""
        found: DatasetWriter = self.job.records.writer
        return found

    @property
    def output(self) -> pathlib.Path | str:
        """The folder of the finished shards, absolute, or its URL."""
        return self.job.place

    def plan(self) -> Plan:
        """Return which rows go to which shard; writes nothing but temporary files.

        Raises:
            SourceError: the source cannot be indexed.
            OptionError: options and rows do not fit together.
            FingerprintError: the writer or the transform cannot be fingerprinted.
        """
        with self.job.planned() as planned:
            return planned.plan

    def estimate(self, num_samples: int = 32) -> Estimate:
        """Process a few rows in one worker, and return what a run from scratch will take: time, bytes, memory.

        Nothing is written. The rows are spread over the shards that `include` and `exclude` choose; those that fail
        are listed and not counted.

        Args:
            num_samples: number of rows to process; each split has at least one.

        Warns:
            UserWarning: the disk of the output has not enough free space.

        Raises:
            SampleError: every row of a split failed.
            WorkerDied: a row ended the worker.
            SourceError, OptionError, FingerprintError: as for `plan`.
        """
        return estimate(self.job, num_samples)

    def preview(self, count: int = 4, *, copies: int = 3, opacity: float = 0.5) -> Picture:
        """Return a picture of a few rows before and after the transform, as a run would store them; writes nothing.

        Each row of the picture is a sample as `read` gives it, and beside it its first copies, with the same random
        draws as in the run. Everything happens in this process; the global random state is restored at the end.

        Args:
            count: number of rows, at least 1, spread evenly over the splits that the transform changes; over all, where
                it changes none.
            copies: how many copies of each to show at most, at least 1.
            opacity: opacity of the masks, from 0 (invisible) to 1 (the image is hidden).

        Returns:
            A picture that a notebook displays; `.save(path)` writes a PNG, `.array` is uint8 (height, width, 3).

        Raises:
            OptionError: an argument is out of range.
            SampleError: a row fails, as it does in a run.
            SourceError, FingerprintError: as for `plan`.

        Example:
            >>> Materializer("camvid", "CamVid", "out/camvid", transform=augment).preview()   # doctest: +SKIP
        """
        with self.job.planned() as planned:
            return preview_copies(planned, count, copies, opacity)

    def run(
        self,
        *,
        deadline: str | float | datetime.timedelta | datetime.datetime | Deadline | None = None,
        max_disk: str | float | None = None,
        progress: bool = True,
        existing: Existing = "update",
        task_index: int | None = None,
        num_tasks: int | None = None,
    ) -> RunReport:
        """Make what is missing in the output, and nothing else.

        Where source, writer or options have changed, the affected shards are rebuilt. If that is more than a tenth of
        what is finished, a warning says why before the work begins.

        Rows that failed in earlier runs, which the ledger lists, are not tried again; see `rerun_failed`.

        Args:
            deadline: when to return, finished or not: "23h30m", seconds, a `timedelta`, or a `datetime`. With an
                `executor` of your own, running parts end first.
            max_disk: how much the output folder may hold, as "20GB" or in bytes.
            progress: show a bar and a summary on standard error.
            existing: what becomes of what is finished. "update" rebuilds shards whose inputs changed and adds new rows;
                it raises, before anything is touched, if finished rows are no longer in the source. With "replace", the
                source alone decides, and their records go. "refuse" raises wherever a finished shard would be replaced
                or removed.
            task_index: number of this task, from 0, if several processes make one output together on a shared file
                system or in a bucket, each with its own call. Each takes shards that no other has. See the guide
                on Slurm.
            num_tasks: how many they are. It decides nothing but where each begins: tasks may come and go.

        Returns:
            What was done. Where the deadline or limit came first, the report is not complete and says how much is done;
            the next run continues from there. In a script, `run(...).raise_if_incomplete()` makes that an error.

        Raises:
            SourceError: the source cannot be indexed.
            SampleError: a sample failed, or ended its worker repeatedly; names its key. What is finished stays, and
                the next run continues there.
            IncompleteRunError: more samples failed than the policy allows, or all of them; or earlier runs left rows
                out, and the policy is "raise".
            OutputLockedError: another run writes to the output, or tasks that share it do; or another process is at
                the same `task_index`.
            OptionError: there is no such task; or the output is in a store in which tasks cannot share it.
            OutputError: the output cannot be written, or holds another dataset; or tasks of another definition make it;
                or finished rows or shards would go, which `existing` forbids.
        """
        task = _task(task_index, num_tasks)
        if task is not None:
            return run_as_task(self, task, deadline, max_disk, progress=progress, existing=existing)
        return self._run(self.job, deadline, max_disk, mode="make", progress=progress, existing=existing)

    def finalize(self, *, progress: bool = True, existing: Existing = "update") -> RunReport:
        """Write the manifest of an output that several tasks have made together; see `task_index` of `run`.

        The last task does this itself; call it if that task was killed before it could. No shard is made.

        Args:
            progress: show a bar and a summary on standard error.
            existing: as the tasks had it.

        Raises:
            IncompleteRunError: shards are missing; names some.
            SourceError, OutputLockedError, OutputError: as for `run`.
        """
        request = dataclasses.replace(_request(None, None, "make", progress=progress, existing=existing), makes=False)
        with signals_raised():
            return run_job(self.job, self._traveller(self.job), request)

    def rerun_failed(
        self,
        *,
        deadline: str | float | datetime.timedelta | datetime.datetime | None = None,
        max_disk: str | float | None = None,
        progress: bool = True,
        existing: Existing = "update",
    ) -> RunReport:
        """Try again the rows that failed, and complete their shards; otherwise as `run`.

        Other rows of these shards are not read again if nothing that decides them has changed: their records are
        taken from the shard as it is.

        Args:
            deadline: when to return, finished or not; as for `run`.
            max_disk: how much the output folder may hold; as for `run`.
            progress: show a bar and a summary on standard error.
            existing: as for `run`; the shards of rows that are tried again do not count.

        Returns:
            What was done; `num_failed` counts the rows that failed again.

        Raises:
            SampleError, IncompleteRunError, SourceError, OutputLockedError, OutputError: as for `run`.
        """
        return self._run(self.job, deadline, max_disk, mode="retry", progress=progress, existing=existing)

    def status(self) -> Status:
        """Return how far the output has got, and which shards `run` would rebuild, each with the reason.

        Works during a run, in this process or another, and after a crash; it only reads. An output in a store is
        compared on any machine.
        """
        job = self.job
        try:
            if job.store is None or lock_holder(job.work / "lock"):  # a run here knows more than the store
                with job.planned() as planned:
                    return compared_status(planned)
            if (found := output_status(job)).state == "damaged":
                return found
            with laid_out(job) as (copied, remote), copied.planned() as planned:
                remote.note_made(planned.plan, TaskBucket(job.store).made())
                remote.adopt(planned.plan)
                return compared_status(planned)
        except SourceError as error:
            return dataclasses.replace(output_status(job), note=f"the source cannot be compared: {error}")

    def verify(self, deep: bool = False, *, sample: float | None = None) -> VerifyReport:
        """Compare the output with its manifest; see `datamat.verify`.

        Args:
            deep: also decode every record, not only the first of each shard.
            sample: fraction of the rows, above 0 and up to 1, whose records are made again from the source, in this
                process, and compared byte for byte; each call draws different rows.

        Raises:
            OutputError: the run is not finished.
            OptionError: `sample` is not between 0 and 1.
            SourceError: the source cannot be indexed.
        """
        if sample is None:
            store = self.job.store
            return verify(self.job.place, deep, storage_options=None if store is None else store.options)
        with self.job.planned() as planned:
            return verify_sample(planned, sample, deep=deep)

    def repair(self, *, progress: bool = True) -> RunReport:
        """Rebuild what is damaged, to the bytes that it had: shards, offsets, index files, manifest.

        Files that belong to no shard are moved to `.datamat/quarantine/foreign`. In a store, what is damaged waits in
        `.datamat/quarantine/damaged` until it is replaced.

        Args:
            progress: show a bar and a summary on standard error.

        Returns:
            What was done.

        Raises:
            OutputError: the run is not finished; source or options are not those that the output was made from; or the
                source no longer gives the bytes that were there: all else is repaired then, and the manifest stays.
            SampleError, SourceError, OutputLockedError: as for `run`.
        """
        whole = dataclasses.replace(self.job, include=None, exclude=None)
        if whole.store is not None:
            return self._repair_stored(whole, whole.store, progress=progress)
        output, work = self.job.output, _repairable(self.job)
        report = None
        for _ in range(_MOST_ROUNDS):
            with whole.planned() as planned, locked(work / "lock"):
                end_repair(output, work)  # one that was killed
                found = verify(output)
                if report is not None and found.ok:
                    return report
                for problem in found.problems:
                    self.job.logger.warning("%s", problem)
                prepare_repair(planned, found)
            try:
                report = self._run(whole, None, None, mode="repair", progress=progress, existing="replace")
            except BaseException:
                with contextlib.suppress(OutputError), locked(work / "lock"):
                    end_repair(output, work)
                raise
            if found.ok:
                return report
        raise OutputError(f"{verify(output)}\nstill so after {_MOST_ROUNDS} repairs; test memory and disk")

    def _repair_stored(self, whole: Job, store: ObjectStore, *, progress: bool) -> RunReport:
        work = work_folder(whole.output)
        if store.keeps_conditions:
            TaskBucket(store).refuse_if_alive(whole.logger)
        report = None
        for _ in range(_MOST_ROUNDS):
            found = verify(store.url, storage_options=store.options)
            if report is not None and found.ok:
                return report
            for problem in found.problems:
                whole.logger.warning("%s: %s", store.url, problem)
            with locked(work / "lock"):
                end_repair(whole.output, work)  # one that was killed
                aside = prepare_stored_repair(whole, store, found)
            try:
                report = self._run(whole, None, None, mode="repair", progress=progress, existing="replace")
            except BaseException:
                with contextlib.suppress(OutputError), locked(work / "lock"):
                    end_repair(whole.output, work)
                    aside.restore()
                raise
            aside.drop()
            if found.ok:
                return report
        found = verify(store.url, storage_options=store.options)
        raise OutputError(f"{found}\nstill so after {_MOST_ROUNDS} repairs; test memory, network and store")

    def replay(self, key: str, copy: int = 0) -> Sample:
        """Return the sample that a run stores for a row and copy, decoded, by processing that row here and now.

        For use with a debugger: everything happens in this process, with the same random draws as in the run. The
        global random state is restored at the end.

        Args:
            key: key of the row, or of a record: KEY#COPY.
            copy: number of the copy, where the key does not name one.

        Raises:
            OptionError: there is no such row or copy.
            SampleError: the row fails, as it does in a run; the cause is the error of `read` or of the transform.
        """
        with self.job.planned() as planned:
            return replay(planned, key, copy)

    def provenance(self, key: str) -> Provenance:
        """Return where a record came from: source paths, copy, seed, shard and position, as the index has it.

        Args:
            key: key of the record; the key of a row with several records means the first.

        Raises:
            OptionError: there is no such record.
            OutputError: the run is not finished.
            CorruptDataError: the index cannot be read.
        """
        return find_provenance(self.job.output, self.job.source, key)

    def write_part(
        self,
        spec: PartSpec,
        lost: Sequence[FailedRow] | None = None,
        reused: ReusedRows | None = None,
        run: str = "",
    ) -> Receipt:
        """Write one part of a shard: the bound method that a run dispatches to its workers.

        Args:
            spec: rows of a shard that make the part.
            lost: rows to leave out as failed, because they end their worker. None for a part whose worker has not
                died: only then are rows processed in blocks.
            reused: rows whose records are taken from a finished shard; None where there are none.
            run: mark of the run, whose parts may go straight onto the end of the shard's file; "" has this one lie
                apart until the shard is sealed.

        Returns:
            The receipt, which is also on disk beside the part.

        Raises:
            SampleError: a sample failed, and the policy is "raise".
            OutputError: the part cannot be written.
        """
        if self._part_worker is None:
            raise OptionError("write_part belongs to a run; call run(), which dispatches it")
        return self._part_worker.write_part(spec, lost, reused, run)

    def seal_shard(self, shard: str, fingerprint: str, num_parts: int, run: str) -> Sealed:
        """Complete a shard whose parts are done: join those that lie apart, write the offsets, flush the files.

        Args:
            shard: name of the shard.
            fingerprint: fingerprint of the shard.
            num_parts: number of its parts.
            run: mark of the run: workers of an earlier one stop.

        Raises:
            DamagedPartError: the bytes of a part are no longer those of its receipt.
        """
        if self._part_worker is None:
            raise OptionError("seal_shard belongs to a run; call run(), which dispatches it")
        return self._part_worker.seal_shard(shard, fingerprint, num_parts, run)

    def _run(
        self,
        job: Job,
        deadline: str | float | datetime.timedelta | datetime.datetime | Deadline | None,
        max_disk: str | float | None,
        *,
        mode: Literal["make", "retry", "repair"],
        progress: bool,
        existing: Existing,
    ) -> RunReport:
        return start(job, self._traveller(job), deadline, max_disk, mode=mode, progress=progress, existing=existing)

    def _traveller(self, job: Job) -> Materializer:
        """Return what travels to the workers of a run: a copy with the part worker of that run."""
        traveller = copy.copy(self)  # its part worker is for this run only: what workers keep must not outlive it
        traveller._part_worker = PartWorker(job, job.work / "rows")
        traveller.job = traveller._part_worker.job
        return traveller


def start(
    job: Job,
    tasks: Tasks,
    deadline: str | float | datetime.timedelta | datetime.datetime | Deadline | None,
    max_disk: str | float | None,
    *,
    mode: Literal["make", "retry", "repair"] = "make",
    progress: bool = True,
    existing: Existing = "update",
) -> RunReport:
    """Run a job, as `Materializer.run` and `convert` do.

    Args:
        job: the job, with its options checked and resolved.
        tasks: the bound methods that travel to the workers; they find the rows in `.datamat/rows`.
        deadline: when to return, finished or not; as for `Materializer.run`.
        max_disk: how much the output folder may hold; as for `Materializer.run`.
        mode: "make" makes what is missing; see `RunRequest`.
        progress: show a bar and a summary on standard error.
        existing: what becomes of what is finished; as for `Materializer.run`.
    """
    request = _request(deadline, max_disk, mode, progress=progress, existing=existing)
    with signals_raised():
        try:
            return run_job(job, tasks, request)
        except SampleError as error:
            fold(error)
            raise error.with_traceback(None)  # noqa: B904 -- it is the same error


def run_as_task(
    made: Materializer,
    task: TaskNumber,
    deadline: str | float | datetime.timedelta | datetime.datetime | Deadline | None = None,
    max_disk: str | float | None = None,
    *,
    progress: bool = True,
    existing: Existing = "update",
) -> RunReport:
    """Run a job as one of several tasks that share its output, as `Materializer.run` does.

    Args:
        made: the job.
        task: the number of the task, and how long its leases last.
        deadline: when to return, finished or not; as for `Materializer.run`.
        max_disk: how much the output folder may hold; as for `Materializer.run`.
        progress: show a bar and a summary on standard error.
        existing: what becomes of what is finished; as for `Materializer.run`.
    """
    request = _request(deadline, max_disk, "make", progress=progress, existing=existing)
    with signals_raised():
        return run_task(made.job, made._traveller, dataclasses.replace(request, task=task))


def _request(
    deadline: str | float | datetime.timedelta | datetime.datetime | Deadline | None,
    max_disk: str | float | None,
    mode: Literal["make", "retry", "repair"],
    *,
    progress: bool,
    existing: Existing,
) -> RunRequest:
    """Return how a run is to go, once its options are checked."""
    if existing not in ("update", "replace", "refuse"):
        raise OptionError(f"existing is {existing!r}; want 'update', 'replace' or 'refuse'")
    require_package("pyarrow", "the index of a dataset")
    run_top_level_once()  # also where there is nothing to do, and no pool starts
    if not isinstance(deadline, Deadline):
        deadline = Deadline(None if deadline is None else seconds_until(deadline))
    return RunRequest(
        mode=mode,
        existing=existing,
        deadline=deadline,
        max_disk=None if max_disk is None else parse_bytes(max_disk),
        progress=progress,
    )


def _task(index: int | None, count: int | None) -> TaskNumber | None:
    if index is None and count is None:
        return None
    if index is None or count is None:
        raise OptionError(
            f"task_index is {index!r} and num_tasks {count!r}; give both, as in run(task_index=3, num_tasks=16)"
        )
    return TaskNumber(index, count)


_FILES_OF_WORK = ("lock", "inputs", "ledger.jsonl", "names.json", "sidecars.json")
"""Files of `.datamat` that every run reads or writes; nobody can hold a lock that is none."""


def _repairable(job: Job) -> pathlib.Path:
    """Return the `.datamat` folder of an output; move aside what is in the way of its files and of index files."""
    output, work, index = job.output, job.work, job.output / INDEX_FOLDER
    for name in _FILES_OF_WORK if work.is_dir() else ():
        if os.path.lexists(work / name) and not (work / name).is_file():
            refuse_links(work)
            set_aside(output, work, f"{WORK}/{name}")
    is_folder = index.is_dir() and not index.is_symlink()
    found = [f"{INDEX_FOLDER}/{path.name}" for path in index.iterdir()] if is_folder else [INDEX_FOLDER]
    wrong = [name for name in found if os.path.islink(output / name) or is_folder == (output / name).is_dir()]
    wrong = [name for name in wrong if os.path.lexists(output / name)]
    if wrong and work.is_dir():
        refuse_links(work)
        with locked(work / "lock"):
            for name in wrong:
                set_aside(output, work, name)
    return work_folder(output)


def output_place(
    output: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    scratch: str | os.PathLike[str] | None,
) -> tuple[ObjectStore | None, pathlib.Path]:
    """Return the store of an output and its scratch folder; for one on a disk None and its folder.

    Raises:
        OptionError: the URL cannot be written, or options for a store are given without one.
    """
    if is_url(output) and not os.fspath(output).startswith("file://"):
        store = ObjectStore(os.fspath(output).rstrip("/"), dict(options or {}))
        return store, scratch_folder(store, scratch)
    return None, pathlib.Path(os.path.abspath(expand_home(os.fspath(output).removeprefix("file://"))))
