"""The `Materializer`: from raw samples to finished shards, on all cores.

    index ──> rows on disk ──> plan ──> parts ──(largest first)──> workers: Materializer.write_part
                                                                       │ receipts, never pixels
    manifest <── index files <── shards, flushed and named <── parts joined in order <──┘

Whatever stops a run, the next one takes over each finished part and goes on from there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING, Any, Literal

from datamat.errors import OptionError, SourceError
from datamat.interrupts import signals_raised
from datamat.launch import Launch, work_folder
from datamat.limits import Deadline, parse_bytes, seconds_until
from datamat.manifest import MANIFEST_FILE
from datamat.options import ErrorPolicy, ShardOptions, WorkerOptions
from datamat.parallel import get_logger
from datamat.pilot import run_pilot
from datamat.provenance import find_provenance
from datamat.recipe import Recipe, resolve_formats
from datamat.repair import prepare_repair
from datamat.replay import replay, verify_sample
from datamat.rows import RowStore
from datamat.status import compared_status, read_status
from datamat.storage import locked
from datamat.survey import open_survey
from datamat.verification import VerifyReport, verify
from datamat.work import Workplace
from datamat.writer import DatasetWriter, Sample, resolve_writer

if TYPE_CHECKING:
    import datetime
    import logging
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from datamat.estimate import Estimate
    from datamat.formats import ShardFormat
    from datamat.kept import KeptRows
    from datamat.ledger import FailedRow
    from datamat.pilot import Pilot, SplitSample
    from datamat.plan import PartSpec, Plan
    from datamat.provenance import Provenance
    from datamat.receipts import Receipt
    from datamat.report import RunReport
    from datamat.status import Status

__all__ = ["Materializer"]


class Materializer:
    """Turns a source into finished shards.

    Args:
        writer: a `DatasetWriter`, a subclass, a registered name ("camvid"), or "package.module:Class".
        source: what the writer indexes: most often the folder of the raw data.
        output: folder of the finished shards; made if missing.
        format: name of the shard format ("tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord", or one of
            another package), a `ShardFormat` with options of its own, or a list of these: each sample is then read and
            drawn once and written in every format. `load` reads the first, unless it is asked for another.
        splits: share of each split ({"train": .8, "val": .2}) where the index brings none, drawn by hash of the key.
        shards: how samples are laid out in files.
        transform: an albumentations `Compose`, or a callable(sample, rng) that returns a sample or several.
        copies: records per input row, for all splits or by split. A split that a dict does not name gets one copy,
            untransformed. The key of a copy is KEY#COPY.
        seed: of every random choice, not negative.
        include: shell patterns of shards to run ("train-0000?"); None runs all.
        exclude: shell patterns of shards to leave out.
        workers: the processes that do the work.
        executor: any `concurrent.futures.Executor`, instead of datamat's own.
        errors: what to do with bad samples: an `ErrorPolicy`, or its action alone.
        logger: for messages; also usable in the writer, in workers too.

    Raises:
        OptionError: an argument makes no sense.

    Example:
        >>> Materializer("camvid", source="CamVid", output="out/camvid").run()   # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913 -- the whole of a run is said here, in words
        self,
        writer: DatasetWriter | type[DatasetWriter] | str,
        source: Any,
        output: str | os.PathLike[str],
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
        executor: Executor | None = None,
        errors: ErrorPolicy | Literal["raise", "skip", "quarantine"] | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self.writer = resolve_writer(writer, source)
        self.recipe = Recipe(
            self.writer,
            source,
            resolve_formats(format, self.writer.features),
            None if splits is None else dict(splits),
            shards or ShardOptions(),
            transform,
            copies if isinstance(copies, int) else dict(copies),
            seed,
        )
        self.output = _local_folder(output)
        self.include = include
        self.exclude = exclude
        self.workers = workers or WorkerOptions()
        self.executor = executor
        self.errors = ErrorPolicy(errors) if isinstance(errors, str) else errors or ErrorPolicy()
        _check_executor(executor, self.workers)
        self.logger = logger or get_logger("datamat")
        self._rows_folder: pathlib.Path | None = None
        self._places: dict[pathlib.Path, Workplace] = {}

    def plan(self) -> Plan:
        """Return which rows go to which shard; touches nothing but temporary files.

        Raises:
            SourceError: the source cannot be indexed.
            OptionError: options and rows do not fit together.
            FingerprintError: the writer or the transform cannot be fingerprinted.
        """
        with open_survey(self.recipe, self.output) as survey:
            return survey.plan

    def estimate(self, num_samples: int = 32) -> Estimate:
        """Do a few rows, in one worker, and return what a run from nothing will take: time, bytes, memory.

        Nothing is written. Rows are spread over the shards that `include` and `exclude` choose; those that fail are
        told of and not counted.

        Args:
            num_samples: rows to do; each split has one at least.

        Warns:
            UserWarning: the free space on the disk of the output will not do.

        Raises:
            SampleError: every row of a split failed.
            WorkerDied: a row ended the worker.
            SourceError, OptionError, FingerprintError: as `plan`.
        """
        return self._launch().estimate(self._run_pilot, num_samples)

    def run(
        self,
        *,
        deadline: str | float | datetime.timedelta | datetime.datetime | None = None,
        max_disk: str | float | None = None,
        progress: bool = True,
    ) -> RunReport:
        """Make what is missing of the output, and nothing else.

        Rows that failed in earlier runs, and that the ledger tells of, are not tried again; see `rerun_failed`.

        Args:
            deadline: when to have returned, finished or not: "23h30m", seconds, a `timedelta`, or a moment. With an
                `executor` of your own, parts that are under way end first.
            max_disk: how much may lie below the output, as "20GB" or in bytes.
            progress: show a bar and a summary on standard error.

        Returns:
            What was done. Where a deadline or limit came first it is not complete, and says how much is done; the
            next run goes on from there.

        Raises:
            SourceError: the source cannot be indexed.
            SampleError: a sample failed, or ended its worker again and again; names its key. What is finished stays,
                the next run goes on there.
            IncompleteRunError: more samples failed than the policy allows, or all of them.
            OutputLockedError: another run writes to the output.
            OutputError: the output cannot be written.
        """
        return self._run(deadline, max_disk, show=progress, retry_failed=False)

    def rerun_failed(
        self,
        *,
        deadline: str | float | datetime.timedelta | datetime.datetime | None = None,
        max_disk: str | float | None = None,
        progress: bool = True,
    ) -> RunReport:
        """Try the rows again that failed, and repair the shards concerned; otherwise as `run`.

        Other rows of these shards, if nothing has changed that decides them, are not read again: their records are
        taken from the shard as it is.

        Args:
            deadline: as for `run`.
            max_disk: as for `run`.
            progress: as for `run`.

        Returns:
            What was done; `num_failed` counts the rows that failed again.

        Raises:
            SampleError, IncompleteRunError, SourceError, OutputLockedError, OutputError: as `run`.
        """
        return self._run(deadline, max_disk, show=progress, retry_failed=True)

    def status(self) -> Status:
        """Return how far the output is, and which shards `run` would make anew, each with the reason.

        Works while a run is alive, here or in another process, and after one crashed; reads only.
        """
        try:
            with open_survey(self.recipe, self.output) as survey:
                return compared_status(survey, survey.plan.select(self.include, self.exclude))
        except SourceError as error:
            note = f"the source cannot be compared: {error}"
            return dataclasses.replace(read_status(self.output), note=note)

    def verify(self, deep: bool = False, *, sample: float | None = None) -> VerifyReport:
        """Compare the output with its manifest; see `datamat.verify`.

        Args:
            deep: also decode every record.
            sample: share of the rows, above 0 and up to 1, whose records are made anew from the source, here and now,
                and compared byte for byte; other rows each time.

        Raises:
            OutputError: the run is not finished.
            OptionError: the share makes no sense.
            SourceError: the source cannot be indexed.
        """
        if sample is None:
            return verify(self.output, deep)
        with open_survey(self.recipe, self.output) as survey:
            return verify_sample(survey, sample, deep=deep)

    def repair(self, *, progress: bool = True) -> RunReport:
        """Make what is damaged anew, to the bytes that it had: shards, offsets, index files, manifest.

        Files that belong to no shard are moved to `.datamat/quarantine/foreign`.

        Args:
            progress: show a bar and a summary on standard error.

        Returns:
            What was done.

        Raises:
            OutputError: the run is not finished, or source and options are not those that it was made from.
            SampleError, SourceError, OutputLockedError: as `run`.
        """
        job = copy.copy(self)
        job.include = job.exclude = None
        report = None
        while True:
            with open_survey(self.recipe, self.output) as survey, locked(work_folder(self.output) / "lock"):
                found = verify(self.output)
                if report is not None and found.ok:
                    return report
                for problem in found.problems:
                    self.logger.warning("%s", problem)
                prepare_repair(survey, self.recipe.formats, found)
            report = job.run(progress=progress)
            if MANIFEST_FILE not in found.files:
                return report  # else nothing could be told of the other files: look again

    def replay(self, key: str, copy: int = 0) -> Sample:
        """Return the sample that a run stores for a row and copy, decoded, by doing that row here and now.

        For a debugger: it happens in this process, with the very random draws of the run. The global random state is
        as before when it returns.

        Args:
            key: of the row, or of a record: KEY#COPY.
            copy: number of the copy, where the key does not name one.

        Raises:
            OptionError: there is no such row or copy.
            SampleError: the row fails, as it does in a run; its cause is the error of `read` or of the transform.
        """
        with open_survey(self.recipe, self.output) as survey:
            return replay(survey, key, copy)

    def provenance(self, key: str) -> Provenance:
        """Return where a record came from: source paths, copy, seed, shard and position, as the finished index has it.

        Args:
            key: of the record; of a row that has several, the first is meant.

        Raises:
            OptionError: there is no such record.
            OutputError: the run is not finished.
            CorruptDataError: the index cannot be read.
        """
        return find_provenance(self.output, self.recipe.source, key)

    def write_part(
        self, spec: PartSpec, lost: Sequence[FailedRow] | None = None, kept: KeptRows | None = None
    ) -> Receipt:
        """Write one part of a shard; what is dispatched to the workers.

        Args:
            spec: which rows, of which shard.
            lost: rows that are to be left out as failed, because they end their worker. None for a part whose worker
                has not died: only then are rows done in blocks.
            kept: rows whose records are taken from a finished shard; None where there are none.

        Returns:
            The receipt, which is on the disk beside the part, too.

        Raises:
            SampleError: a sample failed, and the policy is to raise.
            OutputError: the part cannot be written.
        """
        return self._workplace().write_part(spec, lost, kept)

    def _run_pilot(self, folder: pathlib.Path, samples: Sequence[SplitSample]) -> Pilot:
        self.writer.setup_worker()
        return run_pilot(self.recipe.pipeline(), RowStore(folder), self.recipe.formats, samples)

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what a worker has no use for."""
        return {**self.__dict__, "executor": None, "_places": {}}

    def _run(
        self,
        deadline: str | float | datetime.timedelta | datetime.datetime | None,
        max_disk: str | float | None,
        *,
        show: bool,
        retry_failed: bool,
    ) -> RunReport:
        until = Deadline(None if deadline is None else seconds_until(deadline))
        with signals_raised():
            return self._launch().run(
                self.write_part,
                self._placed,
                deadline=until,
                max_disk=None if max_disk is None else parse_bytes(max_disk),
                show=show,
                retry_failed=retry_failed,
            )

    def _launch(self) -> Launch:
        return Launch(
            recipe=self.recipe,
            output=self.output,
            include=self.include,
            exclude=self.exclude,
            workers=self.workers,
            executor=self.executor,
            errors=self.errors,
            logger=self.logger,
        )

    @contextlib.contextmanager
    def _placed(self, rows_folder: pathlib.Path) -> Iterator[None]:
        """Have `write_part` know the folder of the rows, wherever it arrives, for as long as the block lasts."""
        self._rows_folder = rows_folder
        try:
            yield
        finally:
            self._rows_folder = None
            self._places.clear()

    def _workplace(self) -> Workplace:
        """Return what this process keeps from part to part of a run."""
        folder = self._rows_folder
        if folder is None:
            raise OptionError("write_part belongs to a run; call run(), which dispatches it")
        if folder not in self._places:
            self.writer.setup_worker()
            made = Workplace(folder, self.recipe.pipeline(), self.recipe.formats, self.errors, self.workers)
            # In one step, without a lock that a fork could find taken: threads that come here together get the same.
            self._places.setdefault(folder, made)
        return self._places[folder]


def _local_folder(output: str | os.PathLike[str]) -> pathlib.Path:
    if "://" in os.fspath(output):
        raise OptionError(f"output {os.fspath(output)!r} is a URL; this version writes to local folders")
    return pathlib.Path(os.path.abspath(output))


def _check_executor(executor: Executor | None, workers: WorkerOptions) -> None:
    for name in ("sample_timeout_s", "max_rss"):
        if executor is not None and getattr(workers, name) is not None:
            raise OptionError(
                f"WorkerOptions: {name} is kept by datamat's own workers only, which can be replaced; leave out "
                f"executor, or {name}"
            )
