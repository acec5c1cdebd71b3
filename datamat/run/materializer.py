"""The `Materializer`: from raw samples to finished shards, on all cores.

    index ──> rows on disk ──> plan ──> parts ──(largest first)──> workers: Materializer.write_part
                                                                       │ receipts, never pixels
    manifest <── index files <── shards, flushed and named <── parts joined in order <──┘

However a run was stopped, the next one reuses all finished parts and continues from there.
"""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import glob
import inspect
import os
import pathlib

# Each method imports what it needs, so that the class alone is cheaper to import than numpy. Annotations refer to
# attributes of `datamat`, which loads them for `typing.get_type_hints`.
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import datamat
from datamat.errors import OptionError, SourceError
from datamat.options import (
    RUN_PARAMETERS,
    WORK_PARAMETERS,
    Existing,
    RunKeywords,
    RunOptions,
    ShardOptions,
    WorkKeywords,
    check_flags,
    check_mappings,
    refusing_others,
    takes,
)
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.folders import Folder
    from datamat.plan.job import Job
    from datamat.run.receipts import Receipt
    from datamat.run.worker import PartWorker
    from datamat.sources.mirror import SourceMirror
    from datamat.sources.url_files import UrlFiles


class Materializer:
    """Turn a source into finished shards.

    Args:
        writer: a `DatasetWriter`, a subclass, a registered name ("camvid"), or "package.module:Class". Without a class:
            a kind of source ("parquet"), or the data itself, such as a table, a dataset or an iterator. None detects
            the kind of source.
        source: source for the writer to index, usually the folder of the raw data; `~` is your home folder.
        output: folder for the finished shards, created if missing; `~` is your home folder. Or the URL of a folder in a
            writable store (`s3://BUCKET/PATH`, `gs://`, `az://`, `memory://`, ...), to which workers upload each shard
            as soon as it is finished; see the guide on storage.
        format: name of the shard format ("tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord", or one from
            another package), a `ShardFormat` with its own options, or a list of these: then each sample is read and
            drawn once, and written in every format. `load` reads the first unless you ask for another.
        splits: fraction of each split ({"train": .8, "val": .2}) if the index names none, drawn by a hash of the key.
        groups: name of the field that identifies a row's group (a patient, a video), or a function of an `IndexRow`
            that returns it. Rows of a group land in the same split, drawn by the hash of the group; new groups do not
            move old ones. The shares in `splits` are shares of groups, whatever their numbers of rows. A group is a
            non-empty str, int, bool, bytes, path, or a tuple of these; 7 and "7" are the same group.
        shards: number of shards per split, their size, such as "256MB", or `ShardOptions`.
        transform: an albumentations pipeline, or a callable of (sample) or (sample, rng) that returns a sample or
            several. It applies to the splits that `copies` names; if `copies` is a number, to "train", or to all splits
            if there is none of that name. The plan says which.
        copies: records per input row in the transformed splits: a number, or a number per split by name. Other splits
            get one copy, untransformed. The key of a copy is KEY#COPY.
        seed: base seed, not negative; together with the sample key it determines every random draw.
        version: replaces the digests of the code and attributes of the writer and the transform: shards are rebuilt
            when the version changes, and no longer when code or attributes change. None compares the code.
        untouched: fields that geometric transforms intentionally leave alone, such as ("embedding",). An albumentations
            pipeline that flips, rotates or crops is refused if it leaves out any other array field; list further fields
            for it to transform in its `additional_targets`.
        sidecars: functions that write additional files beside the shards, for other readers; see `Sidecar`.
        follow_links: whether to follow links that lead out of the source, as in the cache of the Hugging Face Hub, DVC
            and git-annex; their targets then count as input. Otherwise such a link to a file is refused, and one to a
            folder is not searched, because the author of an archive chooses where its links lead. The same holds for
            absolute paths in a table.
        storage_options: fsspec options for the URL of the output, such as `{"key": ..., "secret": ...}`.
        source_options: the same for the URL of the source; None uses `storage_options`, unless the output is in another
            kind of store. For URLs in rows (`url_fields` of a writer), by scheme or URL prefix:
            `{"s3": ..., "https://data.example": {"headers": ...}}`. "https" alone applies only to the host of `source`,
            since a table may name any web server.

    Raises:
        OptionError: an argument is invalid.

    Example:
        >>> Materializer("camvid", source="CamVid", output="out/camvid").run()   # doctest: +SKIP
    """

    @refusing_others
    def __init__(  # noqa: PLR0913 -- everything that decides the bytes of a dataset, by name
        self,
        writer: datamat.DatasetWriter | type[datamat.DatasetWriter] | str | Any = None,
        source: Any = None,
        output: str | os.PathLike[str] | None = None,
        *,
        format: str | datamat.formats.ShardFormat | Sequence[str | datamat.formats.ShardFormat] = "tfrecord",  # noqa: A002 -- the usual word
        splits: Mapping[str, float] | None = None,
        groups: str | Callable[[datamat.IndexRow], Any] | None = None,
        shards: int | str | ShardOptions | None = None,
        transform: Any = None,
        copies: int | Mapping[str, int] = 1,
        seed: int = 0,
        version: str | int | None = None,
        untouched: Collection[str] = (),
        sidecars: Sequence[Callable[..., Any]] = (),
        follow_links: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        source_options: Mapping[str, Any] | None = None,
    ) -> None:
        from datamat.plan.inputs import placeholders_refused
        from datamat.plan.job import Job, checked_version, resolve_formats
        from datamat.plan.pipeline import Pipeline
        from datamat.sources.fetching import urls_in_errors
        from datamat.sources.files import links_followed
        from datamat.sources.mirror import mirrored
        from datamat.transforms.augmenter import field_names
        from datamat.writers.base import always_needed, bind_writer, resolve_writer, writer_and_source

        writer, source = writer_and_source(writer, source)
        check_flags(follow_links=follow_links)
        check_mappings(storage_options=storage_options, source_options=source_options)
        if splits is not None and not isinstance(splits, collections.abc.Mapping):
            raise OptionError(f"splits is {splits!r}; want shares by split, as in {{'train': 0.9, 'val': 0.1}}")
        if not isinstance(copies, int | collections.abc.Mapping):
            raise OptionError(f"copies is {copies!r}; want a number of at least 1, or such numbers by split")
        if output is None or output == "":
            raise OptionError("output is missing; name the folder of the finished shards, as in output='out/mine'")
        source = _absolute(source) if isinstance(source, (str, os.PathLike)) else source
        place, folder = output_place(output, storage_options, None)
        source_options = options_of_source(source, source_options, place, storage_options)
        self._given = _Given(source, output, storage_options, source_options)
        writer = resolve_writer(writer)
        mirror = mirrored(source, source_options, None, always_needed(writer))
        source = source.removeprefix("file://") if isinstance(source, str) else source
        source = source if mirror is None else mirror.path
        with (
            links_followed(follow_links),
            urls_in_errors(),
            placeholders_refused(),
        ):  # a writer may read its source when it is bound
            bind_writer(writer, source)
        self._job = Job(
            records=Pipeline.of(writer, transform, seed, field_names(untouched or ())),
            source=source,
            folder=place,
            output=folder,
            formats=resolve_formats(format, writer.features),
            splits=None if splits is None else dict(splits),
            groups=groups,
            shards=ShardOptions.of(shards),
            copies=copies if isinstance(copies, int) else dict(copies),
            seed=seed,
            version=checked_version(version),
            sidecars=tuple(sidecars or ()),
            how=RunOptions(),
            follow_links=follow_links,
            mirror=mirror,
            urls=self._given.urls(None, mirror) if writer.url_fields else None,
        )
        self._part_worker: PartWorker | None = None  # of the copy that is sent to the workers of a run

    def __repr__(self) -> str:
        return f"Materializer({self._job.writer_name!r}, {self._source_text!r}, {str(self._job.place)!r})"

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name.startswith("__") or not name.startswith("_")]

    def _repr_html_(self) -> str:
        from datamat.directory.display import feature_table, render_html, shorten
        from datamat.sources.groups import groups_in_words

        job = self._job
        transform = job.records.pipeline.augmenter.transform if job.records.pipeline is not None else None
        facts = [
            ("writer", job.writer_name),
            ("source", self._source_text),
            ("output", job.place),
            ("format", ", ".join(made.name for made in job.formats)),
            ("splits", "as the index names them" if job.splits is None else job.splits),
            *([] if job.groups is None else [("groups", groups_in_words(job.groups))]),
            ("copies", job.copies),
            ("transform", "none" if transform is None else shorten(str(transform))),
            ("seed", job.seed),
        ]
        try:
            tables = [feature_table(job.records.features)]
        except OptionError:  # those of `materialize` are not inferred yet
            tables = []
        return render_html(f"Materializer of {job.name!r}", facts, tables)

    @property
    def _source_text(self) -> str:
        """The path or URL of the source, without secrets; for other sources, the class."""
        from datamat.folders.urls import without_secrets

        source = self._job.source if self._job.mirror is None else str(self._job.mirror)
        if isinstance(source, (str, os.PathLike)):
            return without_secrets(os.fspath(source))
        return "none" if source is None else type(source).__qualname__

    @property
    def writer(self) -> datamat.DatasetWriter:
        """The writer, which reads the samples."""
        found: datamat.DatasetWriter = self._job.records.writer
        return found

    @property
    def output(self) -> pathlib.Path | str:
        """The absolute path or the URL of the folder of the finished shards."""
        return self._job.place

    def plan(self) -> datamat.Plan:
        """Return the plan: which rows go to which shard. Writes only temporary files.

        Raises:
            SourceError: the source cannot be indexed.
            OptionError: the options do not fit the rows.
            FingerprintError: the writer or the transform cannot be fingerprinted.
        """
        with self._job.planned() as planned:
            return planned.plan

    @takes(*WORK_PARAMETERS)
    def estimate(
        self,
        num_samples: int = 32,
        *,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        **options: Unpack[WorkKeywords],
    ) -> datamat.Estimate:
        """Process a few rows in one worker to estimate the time, size and memory of a run from scratch.

        Nothing is written. The rows are spread over the shards that `include` and `exclude` choose; failing rows are
        listed and not counted.

        Args:
            num_samples: number of rows to process; each split gets at least one.
            include: shell patterns of the shards to make; None for all.
            exclude: shell patterns of the shards to leave out.
            options: as for `run`.

        Warns:
            UserWarning: the disk of the output does not have enough free space.

        Raises:
            SampleError: every row of a split failed.
            WorkerDied: a row killed the worker.
            SourceError, OptionError, FingerprintError: as for `plan`.
        """
        from datamat.run.estimate import estimate

        how = RunOptions.of(options, "estimate", WorkKeywords.__annotations__)
        return estimate(self._made(dataclasses.replace(how, include=include, exclude=exclude)), num_samples)

    def preview(self, count: int = 4, *, copies: int = 3, opacity: float = 0.5) -> datamat.Picture:
        """Return a picture of a few rows before and after the transform, as a run would store them. Writes nothing.

        Each row of the picture shows a sample as returned by `read`, followed by its first copies, with the same random
        draws as in the run. Everything happens in this process; the global random state is restored at the end.

        Args:
            count: number of rows, at least 1, spread evenly over the splits that the transform changes, or over all if
                it changes none.
            copies: maximum number of copies to show of each, at least 1.
            opacity: opacity of the masks, from 0 (invisible) to 1 (the image is hidden).

        Returns:
            A picture that a notebook displays; `.save(path)` writes a PNG, `.array` is uint8 (height, width, 3).

        Raises:
            OptionError: an argument is out of range.
            SampleError: a row fails, as it would in a run.
            SourceError, FingerprintError: as for `plan`.

        Example:
            >>> Materializer("camvid", "CamVid", "out/camvid", transform=augment).preview()   # doctest: +SKIP
        """
        from datamat.run.replay import preview_copies

        with self._job.planned() as planned:
            return preview_copies(planned, count, copies, opacity)

    @takes(*RUN_PARAMETERS)
    def run(self, **options: Unpack[RunKeywords]) -> datamat.RunReport:
        """Make whatever is missing in the output, and nothing else.

        If source, writer or options have changed, the affected shards are rebuilt. If these are more than a tenth of
        the finished rows, a warning says why before the work begins.

        Args:
            options: how to run, which shards to make now, and how to treat existing output; see `RunOptions`.

        Returns:
            A report of what was done. If a deadline or limit stopped the run, the report is incomplete and says how
            much is done; the next run continues from there. In a script, `run(...).raise_if_incomplete()` makes this an
            error.

        Raises:
            SourceError: the source cannot be indexed.
            SampleError: a sample failed, or killed its worker repeatedly; names its key. Finished work is kept, and
                the next run continues from there.
            IncompleteRunError: more samples failed than the policy allows, or all of them; or rows failed in earlier
                runs, and the policy is "raise".
            OutputLockedError: another run, or tasks that share the output, are writing to it; or another process has
                the same `task_index`.
            OptionError: an option is invalid or belongs to the constructor; or tasks cannot share an output in this
                kind of store.
            OutputError: the output cannot be written, or holds another dataset; or tasks with another definition are
                making it; or finished rows or shards would be removed, which `existing` forbids.

        Example:
            >>> Materializer("camvid", "CamVid", "out/camvid").run(workers=4, deadline="23h30m")   # doctest: +SKIP
        """
        from datamat.run.tasks import start

        return start(self._made(RunOptions.of(options)))

    @takes(*WORK_PARAMETERS)
    def finalize(self, *, existing: Existing = "update", **options: Unpack[WorkKeywords]) -> datamat.RunReport:
        """Write the manifest of an output that several tasks made together; see `task_index` of `run`.

        The last task does this itself; call it if that task was killed first. No shard is made.

        Args:
            existing: as in the tasks.
            options: as for `run`; `scratch` as in the tasks.

        Raises:
            IncompleteRunError: shards are missing; names some.
            SourceError, OutputLockedError, OutputError: as for `run`.
        """
        from datamat.run.tasks import start

        how = RunOptions.of(options, "finalize", WorkKeywords.__annotations__)
        how = dataclasses.replace(how, existing=existing)
        return start(self._made(how), mode="finalize")

    def status(self) -> datamat.Status:
        """Return the progress of the output, and which shards `run` would rebuild, each with the reason.

        Works during a run in this or another process, and after a crash; it only reads. An output in a store can be
        compared from any machine.
        """
        from datamat.directory.files import lock_holder
        from datamat.run.slices import TaskSession
        from datamat.run.status import compared_status, output_status
        from datamat.run.upload import laid_out

        job = self._job
        try:
            if lock_holder(job.work / "lock"):  # a run on this machine knows more than a store
                with job.planned() as planned:
                    return compared_status(planned)
            if (found := output_status(job)).state == "damaged":
                return found
            with laid_out(job) as (copied, place), copied.planned() as planned:
                place.adopt(planned.plan, TaskSession(job.folder).made())
                return compared_status(planned)
        except SourceError as error:
            return dataclasses.replace(output_status(job), note=f"the source cannot be compared: {error}")

    def verify(self, deep: bool = False, *, sample: float | None = None) -> datamat.VerifyReport:
        """Compare the output with its manifest; see `datamat.verify`.

        Args:
            deep: also decode every record, not only the first of each shard.
            sample: fraction of the rows, above 0 and up to 1, whose records are rebuilt from the source, in this
                process, and compared byte for byte; each call draws different rows.

        Raises:
            OutputError: the run is not finished.
            OptionError: `sample` is not between 0 and 1.
            SourceError: the source cannot be indexed.
        """
        from datamat.directory.verify import examine
        from datamat.run.replay import verify_sample

        if sample is None:
            return examine(self._job.folder, deep=deep, recomputed=None)
        with self._job.planned() as planned:
            return verify_sample(planned, sample, deep=deep)

    @takes(*WORK_PARAMETERS)
    def repair(self, **options: Unpack[WorkKeywords]) -> datamat.RunReport:
        """Restore damaged files to their original bytes: shards, offsets, index files, manifest.

        Files that belong to no shard are moved to `.datamat/quarantine/foreign`. In a store, a damaged shard stays
        until the rebuilt one is written in its place.

        Args:
            options: as for `run`.

        Returns:
            A report of what was done.

        Raises:
            OutputError: the run is not finished; or the output was made from another source or other options; or the
                source no longer gives the original bytes: then everything else is repaired, and the manifest stays.
            SampleError, SourceError, OutputLockedError: as for `run`.
        """
        from datamat.run.repair import repair

        how = RunOptions.of(options, "repair", WorkKeywords.__annotations__)
        return repair(self._made(how))

    def replay(self, key: str, copy: int = 0) -> dict[str, Any]:
        """Process a row here and now, and return the sample that a run would store for it, decoded.

        For debugging: everything happens in this process, with the same random draws as in the run. The global random
        state is restored at the end.

        Args:
            key: key of the row, or of a record: KEY#COPY.
            copy: number of the copy, if the key does not name one.

        Raises:
            OptionError: there is no such row or copy.
            SampleError: the row fails, as it would in a run; the cause is the error of `read` or of the transform.
        """
        from datamat.run.replay import replay

        with self._job.planned() as planned:
            return replay(planned, key, copy)

    def provenance(self, key: str) -> datamat.Provenance:
        """Return the origin of a record, from the index: source paths, copy, seed, shard and position.

        Args:
            key: key of the record; a row's key means the first of its records.

        Raises:
            OptionError: there is no such record.
            OutputError: the run is not finished.
            CorruptDataError: the index cannot be read.
        """
        from datamat.directory.manifest import Manifest
        from datamat.directory.provenance import ProvenanceFinder

        output = self._job.folder
        return ProvenanceFinder(output, Manifest.read(output), self._job.source).find(key)

    def write_part(self, parts: Any, lost: Any = None, reused: Any = None) -> Any:
        """Write consecutive parts of a shard; a run dispatches this bound method to its workers.

        Args:
            parts: runs of rows of the shard.
            lost: rows to leave out as failed, because they kill their worker; None for parts whose worker has not died.
            reused: rows whose records are copied from a finished shard; None if there are none.

        Returns:
            The receipts of the written parts, which are also on disk beside them.

        Raises:
            OptionError: no run has dispatched it.
            SampleError: a sample failed, and the policy is "raise".
            OutputError: a part cannot be written.
        """
        if self._part_worker is None:
            raise OptionError("write_part belongs to a run; call run(), which dispatches it")
        return self._part_worker.write_parts(parts, lost, reused)

    def _dispatched(self, worker: PartWorker) -> Callable[..., list[Receipt]]:
        """Return the method of a copy that serves one run: workers must not keep state beyond it."""
        traveller = copy.copy(self)
        traveller._part_worker, traveller._job = worker, worker.job
        del traveller._given  # the source may be an iterator or a connection; workers only need its rows
        return traveller.write_part

    def _datamat_changing(self) -> None:
        """Return nothing to compare between calls, like the part worker."""
        assert self._part_worker is not None
        self._part_worker._datamat_changing()

    def _made(self, how: RunOptions) -> Job:
        """Return the job with the options of one call."""
        from datamat.plan.pipeline import Pipeline
        from datamat.sources.fetching import urls_in_errors
        from datamat.sources.files import links_followed
        from datamat.sources.mirror import mirrored
        from datamat.writers.base import always_needed

        job = dataclasses.replace(self._job, how=how, dispatched=self._dispatched)
        if how.scratch is None:
            return job
        given, writer = self._given, self.writer
        place, folder = output_place(given.output, given.storage_options, how.scratch)
        mirror = mirrored(given.source, given.source_options, how.scratch, always_needed(writer))
        if place.local_path() is not None and mirror is None and not writer.url_fields:
            raise OptionError(
                f"scratch is given, but output {os.fspath(given.output)!r} is not a URL, and neither is the source: "
                "shards are made where they stay; leave scratch out"
            )
        if mirror is not None:  # its files are elsewhere now
            writer = copy.copy(writer)
            with links_followed(job.follow_links), urls_in_errors():
                writer.bind(mirror.path)
            made = job.records.pipeline
            assert made is not None
            records = Pipeline.of(writer, made.augmenter.transform, made.seed, made.augmenter.untouched)
            job = dataclasses.replace(job, source=mirror.path, mirror=mirror, records=records)
        urls = given.urls(how.scratch, mirror) if writer.url_fields else None
        return dataclasses.replace(job, folder=place, output=folder, urls=urls)


DATASET_PARAMETERS = tuple(
    one
    for one in inspect.signature(Materializer.__init__).parameters.values()
    if one.kind is inspect.Parameter.KEYWORD_ONLY
)
"""The keyword parameters of `Materializer`, for the signatures of functions that take them as `**options`."""


@frozen(slots=False)
class _Given:
    """The source and the output as given by the user; `scratch` decides the rest."""

    source: Any
    output: str | os.PathLike[str]
    storage_options: Mapping[str, Any] | None
    source_options: Mapping[str, Any] | None

    def urls(self, scratch: str | os.PathLike[str] | None, mirror: SourceMirror | None) -> UrlFiles:
        """Return the fetcher of files behind URLs in rows."""
        from datamat.sources.url_files import UrlFiles, url_folder

        root = "" if mirror is None else str(mirror.root)
        return UrlFiles(url_folder(self.output, scratch), self.source_options or {}, root)


def output_place(
    output: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    scratch: str | os.PathLike[str] | None,
) -> tuple[Folder, pathlib.Path]:
    """Return an output, and the folder on this machine in which it is made.

    Raises:
        OptionError: the URL cannot be written, or options for a store are given without one.
    """
    from datamat.folders import open_output
    from datamat.run.upload import scratch_folder

    place = open_output(output, options)
    return place, scratch_folder(place, scratch)


def options_of_source(
    source: Any, given: Mapping[str, Any] | None, place: Folder, options: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the options for a source: those of its output, unless it has its own or is in a store of another kind."""
    from datamat.folders.urls import scheme_of

    is_alike = place.local_path() is not None or scheme_of(str(source)) == scheme_of(str(place))
    return options if given is None and is_alike else given


def _absolute(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Make the path of a source absolute; a text that names no file is left to the writer."""
    from datamat.folders.local import expand_home
    from datamat.folders.urls import is_url

    source = expand_home(source)
    text = os.fspath(source)
    if os.path.isabs(text) or is_url(text) or not (os.path.lexists(text) or glob.has_magic(text)):
        return source
    whole = os.path.abspath(text) if os.path.lexists(text) else os.path.join(glob.escape(os.getcwd()), text)
    return pathlib.Path(whole) if isinstance(source, pathlib.PurePath) else whole
