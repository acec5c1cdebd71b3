"""The `Materializer`: from raw samples to finished shards, on all cores.

    index ──> rows on disk ──> plan ──> parts ──(largest first)──> workers: Materializer.write_part
                                                                       │ receipts, never pixels
    manifest <── index files <── shards, flushed and named <── parts joined in order <──┘

Whatever stops a run, the next one takes over each finished part and goes on from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import queue
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat import codecs
from datamat.errors import CorruptDataError, IncompleteRunError, OptionError, OutputError
from datamat.features import Features
from datamat.fingerprint import fingerprint
from datamat.formats import get_format
from datamat.index import IndexRow
from datamat.index_files import write_index_files
from datamat.manifest import MANIFEST_FILE, KeyDigest, Manifest, ShardInfo
from datamat.options import ErrorPolicy, ShardOptions, WorkerOptions
from datamat.parallel import PathosExecutor, get_logger
from datamat.parts import PartFile, Receipt, ShardAssembly
from datamat.pipeline import Pipeline
from datamat.plan import PartSpec, Plan, ShardSpec, make_plan
from datamat.report import Progress, RunReport, progress_bar
from datamat.rows import RowStore, write_rows
from datamat.storage import commit_json, fsync_folder, locked
from datamat.transforms import Augmenter, forbid_update_check
from datamat.verification import VerifyReport, verify
from datamat.writer import DatasetWriter, Sample, resolve_writer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor, Future

__all__ = ["Materializer", "materialize"]

_WORK = ".datamat"


class Materializer:
    """Turns a source into finished shards.

    Args:
        writer: a `DatasetWriter`, a subclass, a registered name ("camvid"), or "package.module:Class".
        source: what the writer indexes: most often the folder of the raw data.
        output: folder of the finished shards; made if missing.
        format: name of the shard format, "tfrecord" or "tfrecord.gz".
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
        errors: what to do with bad samples.
        logger: for messages; also usable in the writer, in workers too.

    Raises:
        OptionError: an argument makes no sense.

    Example:
        >>> Materializer("camvid", source="CamVid", output="out/camvid").run()   # doctest: +SKIP
    """

    def __init__(
        self,
        writer: DatasetWriter | type[DatasetWriter] | str,
        source: Any,
        output: str | os.PathLike[str],
        *,
        format: str = "tfrecord",  # noqa: A002 -- the field's word, and DESIGN's
        splits: Mapping[str, float] | None = None,
        shards: ShardOptions | None = None,
        transform: Any = None,
        copies: int | Mapping[str, int] = 1,
        seed: int = 0,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        workers: WorkerOptions | None = None,
        executor: Executor | None = None,
        errors: ErrorPolicy | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self.writer = resolve_writer(writer, source)
        self.source = source
        self.output = _local_folder(output)
        self.format = get_format(format)
        self.splits = _checked_shares(splits)
        self.shards = shards or ShardOptions()
        self.transform = transform
        self.copies = _checked_copies(copies)
        self.seed = _checked_seed(seed)
        self.include = include
        self.exclude = exclude
        self.workers = workers or WorkerOptions()
        self.executor = executor
        self.errors = errors or ErrorPolicy()
        self.logger = logger or get_logger("datamat")
        self.augmenter = Augmenter(self.writer.features, transform, self._hook())
        self._rows_folder: pathlib.Path | None = None

    def plan(self) -> Plan:
        """Return which rows go to which shard; touches nothing but temporary files.

        Raises:
            SourceError: the source cannot be indexed.
            OptionError: options and rows do not fit together.
            FingerprintError: the writer or the transform cannot be fingerprinted.
        """
        with tempfile.TemporaryDirectory(prefix="datamat-") as folder:
            return self._make_plan(self._write_rows(pathlib.Path(folder)))

    def run(self, *, progress: bool = True) -> RunReport:
        """Make what is missing of the output, and nothing else.

        Args:
            progress: show a bar and a summary on standard error.

        Returns:
            What was done.

        Raises:
            SourceError: the source cannot be indexed.
            SampleError: a sample failed; names its key. What is finished stays, the next run goes on there.
            WorkerDied: a worker died under the same part more often than `max_retries` says.
            OutputLockedError: another run writes to the output.
        """
        started = time.perf_counter()
        work = self._work_folder()
        with locked(work / "lock"):
            shutil.rmtree(work / "rows", ignore_errors=True)
            (work / "rows").mkdir()
            store = self._write_rows(work / "rows")
            plan = self._make_plan(store)
            run = _Run(self, work, store, plan, started)
            report = run.finish() if run.has_nothing_to_do() else run.execute(show=progress)
        self.logger.info("%s", report)
        return report

    def verify(self) -> VerifyReport:
        """Compare the output with its manifest; see `datamat.verify`."""
        return verify(self.output)

    def write_part(self, spec: PartSpec) -> Receipt:
        """Write one part of a shard; what is dispatched to the workers.

        Args:
            spec: which rows, of which shard.

        Returns:
            The receipt, which is on the disk beside the part, too.

        Raises:
            SampleError: a sample failed.
        """
        started = time.perf_counter()
        store, pipeline = _opened(self._rows(), self)
        positions = np.asarray(store.order[spec.start : spec.stop])
        columns = self.writer.features.columns
        keys = KeyDigest()
        with PartFile(self._rows().parent, spec) as file:
            writer = self.format.writer(file, columns)  # type: ignore[arg-type]  # it needs `write` only
            if spec.augmented or spec.copies > 1 or not _write_block(writer, store, pipeline, positions, keys):
                for row in store.read(positions):
                    for key, record in pipeline.records(row, copies=spec.copies, augmented=spec.augmented):
                        writer.append(record)
                        keys.add(key)
            offsets = writer.finish()
            return file.finish(offsets, keys, time.perf_counter() - started)

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what a worker has no use for."""
        return {**self.__dict__, "executor": None}

    def _hook(self) -> Callable[..., Any] | None:
        overridden = type(self.writer).augment is not DatasetWriter.augment
        return self.writer.augment if overridden else None

    def _rows(self) -> pathlib.Path:
        if self._rows_folder is None:
            raise OptionError("write_part belongs to a run; call run(), which dispatches it")
        return self._rows_folder

    def _work_folder(self) -> pathlib.Path:
        work = self.output / _WORK
        try:
            work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"output {self.output} cannot be made: {error}; give a folder that can be written"
            ) from error
        if work.is_symlink():
            raise OutputError(f"{work} is a link; datamat writes only below {self.output}: remove it")
        return work

    def _write_rows(self, folder: pathlib.Path) -> RowStore:
        is_path = isinstance(self.source, (str, os.PathLike))
        base = os.path.abspath(self.source) if is_path else ""
        rows = self.writer.index(self.source)
        return write_rows(rows, folder, source=base, splits=self.splits, file_fields=self.writer.file_fields)

    def _make_plan(self, store: RowStore) -> Plan:
        copies = self._copies_by_split(store)
        augmented = {split: self._is_augmented(split) for split in store.splits}
        digests = {split: self._fingerprint(copies[split], augmented=augmented[split]) for split in store.splits}
        return make_plan(
            store,
            name=self.writer.name or type(self.writer).__name__.lower(),
            options=self.shards,
            copies=copies,
            augmented=augmented,
            fingerprint=digests,
            seed=self.seed,
        )

    def _copies_by_split(self, store: RowStore) -> dict[str, int]:
        if isinstance(self.copies, int):
            return dict.fromkeys(store.splits, self.copies)
        unknown = sorted(set(self.copies) - set(store.splits))
        if unknown:
            raise OptionError(f"copies names the split {unknown[0]!r}; the index has {', '.join(store.splits)}")
        return {split: self.copies.get(split, 1) for split in store.splits}

    def _is_augmented(self, split: str) -> bool:
        named = isinstance(self.copies, int) or split in self.copies
        return named and self.augmenter.is_needed

    def _fingerprint(self, copies: int, *, augmented: bool) -> str:
        parts = {
            "writer": fingerprint(self.writer, where="writer"),
            "features": fingerprint(self.writer.features.to_json(), where="writer.features"),
            "format": fingerprint([self.format.name, self.format.options()], where="format"),
            "copies": str(copies),
        }
        if augmented:  # what is not augmented depends on neither
            parts["transform"] = fingerprint(self.transform, where="transform")
            parts["seed"] = str(self.seed)
        return fingerprint(parts, where="options")


class _Run:
    """One call of `Materializer.run`, between the lock and the report."""

    def __init__(self, job: Materializer, work: pathlib.Path, store: RowStore, plan: Plan, started: float) -> None:
        self.job = job
        self.work = work
        self.store = store
        self.plan = plan
        self.started = started
        self.chosen = plan.select(job.include, job.exclude)
        self.finished: dict[str, ShardInfo] = {}
        self.receipts: list[Receipt] = []
        self.num_written = 0
        self.num_resumed = 0
        self.num_workers = 0
        self.start_method = ""

    def has_nothing_to_do(self) -> bool:
        """Take over the shards of the last finished run that are still right; tell whether that is all of them."""
        try:
            manifest = Manifest.read(self.job.output)
        except OutputError:
            return False
        except CorruptDataError as error:
            self.job.logger.warning("%s; the shards are checked one by one", error)
            return False
        wanted = {shard.name: shard.fingerprint for shard in self.plan.shards}
        fresh = {
            info.name: info
            for info in manifest.shards
            if wanted.get(info.name) == info.fingerprint and _is_there(self.job.output, info)
        }
        if len(fresh) == len(wanted) == len(manifest.shards):
            self.finished = fresh
            return True
        # The manifest no longer tells the truth once a shard changes: what it says of the others is kept aside.
        (self.work / "shards").mkdir(exist_ok=True)
        for info in manifest.shards:
            commit_json(self.work / "shards" / f"{info.name}.json", info.to_json())
        (self.job.output / MANIFEST_FILE).unlink()
        fsync_folder(self.job.output)
        return False

    def execute(self, *, show: bool) -> RunReport:
        """Run the parts that are missing, and finish what can be finished."""
        assemblies = {
            shard.name: ShardAssembly(self.work, self.job.output, shard, self.job.format) for shard in self.chosen
        }
        total = sum(shard.num_rows * shard.copies for shard in self.chosen)
        parts = []
        with contextlib.ExitStack() as stack:
            resumed = [self._resume(assembly) for assembly in assemblies.values()]
            parts = sorted(
                (part for name, a in assemblies.items() if name not in self.finished for part in a.missing()),
                key=lambda part: -part.cost,
            )
            receipts = stack.enter_context(contextlib.closing(self._dispatch(parts)))
            first = next(receipts, None)  # the workers are busy before the bar is imported
            bar = stack.enter_context(progress_bar(self.plan.name, total, show=show))
            bar.add(sum(resumed), 0, resumed=True)
            if first is not None:
                self._take(first, assemblies, bar)
            for receipt in receipts:
                self._take(receipt, assemblies, bar)
        report = self.finish()
        if show:
            _show(str(report))
        return report

    def finish(self) -> RunReport:
        """Check that every row is accounted for, write what stands beside the shards, and the manifest last."""
        missing = [shard for shard in self.chosen if shard.name not in self.finished]
        if missing:
            raise IncompleteRunError(
                f"{len(missing)} of {len(self.chosen)} shards are not finished ({missing[0].name}, ...); run again"
            )
        for shard in self.chosen:
            _check_conserved(shard, self.finished[shard.name])
        is_complete = all(shard.name in self.finished or self._was_finished(shard) for shard in self.plan.shards)
        infos = tuple(self.finished[shard.name] for shard in self.plan.shards if shard.name in self.finished)
        if is_complete and not (self.job.output / MANIFEST_FILE).exists():
            self._remove_stale()
            write_index_files(self.job.output / "index", self.store, self.plan, infos)
            self._manifest(infos).write(self.job.output)
            for folder in ("parts", "shards"):
                shutil.rmtree(self.work / folder, ignore_errors=True)
        shutil.rmtree(self.work / "rows", ignore_errors=True)
        return RunReport(
            output=self.job.output,
            is_complete=is_complete,
            num_rows=sum(info.num_rows for info in infos),
            num_records=sum(info.num_records for info in infos),
            num_bytes=sum(info.num_bytes for info in infos),
            num_shards_written=self.num_written,
            num_shards_reused=len(infos) - self.num_written,
            num_parts_written=len(self.receipts),
            num_parts_resumed=self.num_resumed,
            elapsed_s=time.perf_counter() - self.started,
            busy_s=sum(receipt.busy_s for receipt in self.receipts),
            num_workers=self.num_workers,
            start_method=self.start_method,
        )

    def _resume(self, assembly: ShardAssembly) -> int:
        """Take over what an earlier run left of a shard; return the number of its records that are done."""
        if info := assembly.finished():
            self.finished[assembly.spec.name] = info
            return info.num_records
        receipts = assembly.resume()
        self.num_resumed += len(receipts)
        if assembly.is_complete:
            self._publish(assembly)
        return sum(receipt.num_records for receipt in receipts)

    def _take(self, receipt: Receipt, assemblies: Mapping[str, ShardAssembly], bar: Progress) -> None:
        self.receipts.append(receipt)
        bar.add(receipt.num_records, receipt.num_bytes)
        assembly = assemblies[receipt.shard]
        assembly.add(receipt)
        if assembly.is_complete:
            self._publish(assembly)

    def _publish(self, assembly: ShardAssembly) -> None:
        self.finished[assembly.spec.name] = assembly.publish()
        self.num_written += 1

    def _was_finished(self, shard: ShardSpec) -> bool:
        """Take over a shard that include and exclude leave alone, where an earlier run finished it."""
        info = ShardAssembly(self.work, self.job.output, shard, self.job.format).finished()
        if info is not None:
            self.finished[shard.name] = info
        return info is not None

    def _dispatch(self, parts: Sequence[PartSpec]) -> Iterator[Receipt]:
        """Yield the receipts of parts as they come; the most costly part is begun first."""
        if not parts:
            return
        self.job._rows_folder = self.work / "rows"
        done: queue.SimpleQueue[Future[Receipt]] = queue.SimpleQueue()
        with contextlib.ExitStack() as stack:
            executor = self.job.executor or stack.enter_context(self._executor(len(parts)))
            futures = [executor.submit(self.job.write_part, part) for part in parts]
            try:
                for future in futures:
                    future.add_done_callback(done.put)
                for _ in futures:
                    yield done.get().result()
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
            finally:
                self.job._rows_folder = None
            self._note(executor)

    def _executor(self, num_parts: int) -> PathosExecutor:
        options = self.job.workers
        executor = PathosExecutor(
            options.num_workers,
            start_method=options.start_method,
            affinity=options.affinity,
            initializer=functools.partial(_set_up, self.job.writer),
            max_retries=options.max_retries,
            logger=self.job.logger,
        )
        self.num_workers = min(num_parts, executor.stats().num_workers)
        return executor

    def _note(self, executor: Executor) -> None:
        if isinstance(executor, PathosExecutor):
            self.start_method = executor.stats().start_method

    def _remove_stale(self) -> None:
        """Remove the files of shards that an earlier plan had and this one has not."""
        wanted = {shard.name for shard in self.plan.shards}
        for path in sorted((self.work / "shards").glob("*.json")):
            if path.stem not in wanted:
                for stale in (f"{path.stem}.{self.job.format.extension}", f"{path.stem}.idx"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self.job.output / stale)

    def _manifest(self, infos: tuple[ShardInfo, ...]) -> Manifest:
        job = self.job
        return Manifest(
            name=self.plan.name,
            format=job.format.name,
            features=job.writer.features,
            shards=infos,
            seed=job.seed,
            copies={split: shards[0].copies for split, shards in self.plan.splits.items()},
            made_by={
                "writer": f"{type(job.writer).__module__}:{type(job.writer).__qualname__}",
                "transform": None if job.transform is None else type(job.transform).__qualname__,
                "codecs": codecs.codec_versions(),
            },
        )


class _FunctionWriter(DatasetWriter):
    """The writer behind `materialize`: each input is handed to a function."""

    def __init__(
        self, fn: Callable[[Any], Sample], inputs: Sequence[Any], name: str, features: Features | None
    ) -> None:
        self.fn = fn
        self.inputs = inputs
        self.data_name = name
        self._features = features

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.data_name

    @functools.cached_property
    def features(self) -> Features:  # type: ignore[override]
        return self._features or Features.infer(self.fn(self.inputs[0]))

    def index(self, source: Any) -> Iterable[IndexRow]:
        del source
        return (IndexRow(f"{number:08d}", fields={"number": number}) for number in range(len(self.inputs)))

    def read(self, row: IndexRow) -> Sample:
        return self.fn(self.inputs[int(row.fields["number"])])


def materialize(
    fn: Callable[[Any], Sample],
    inputs: Iterable[Any],
    output: str | os.PathLike[str],
    *,
    name: str = "data",
    features: Features | None = None,
    progress: bool = True,
    **options: Any,
) -> RunReport:
    """Write `fn(item)` of each input as one record: no class needed.

    Args:
        fn: called in the workers, in any order; returns a dict of values by feature name.
        inputs: the items; each is one sample, with its position as key.
        output: folder of the finished shards.
        name: of the data set.
        features: the schema; None infers it from the first sample, without loss.
        progress: show a bar and a summary.
        options: further arguments of `Materializer`.

    Raises:
        OptionError: there are no inputs, or `Materializer` refuses an option.

    Example:
        >>> materialize(lambda n: {"square": n * n}, range(10), "out/squares")   # doctest: +SKIP
    """
    items = inputs if isinstance(inputs, Sequence) else list(inputs)
    if not items:
        raise OptionError("materialize: inputs is empty; give at least one item")
    writer = _FunctionWriter(fn, items, name, features)
    return Materializer(writer, None, output, **options).run(progress=progress)


def _write_block(writer: Any, store: RowStore, pipeline: Pipeline, positions: np.ndarray, keys: KeyDigest) -> bool:
    """Write rows as one block, where the writer plug-in reads blocks; tell whether it did."""
    if type(pipeline.writer).read_block is DatasetWriter.read_block:
        return False
    names = store.keys(positions)
    block = pipeline.block(names, dict(store.columns(positions)))
    if block is None:
        return False
    writer.append_block(block)
    for name in names:
        keys.add(name)
    return True


@functools.lru_cache(maxsize=1)
def _opened(folder: pathlib.Path, job: Materializer) -> tuple[RowStore, Pipeline]:
    """Return what a worker keeps from part to part."""
    return RowStore(folder), Pipeline(job.writer, job.augmenter, job.seed)


def _set_up(writer: DatasetWriter) -> None:
    forbid_update_check()
    writer.setup_worker()


def _show(text: str) -> None:
    import sys

    from tqdm.auto import tqdm

    tqdm.write(text, file=sys.stderr)


def _is_there(output: pathlib.Path, info: ShardInfo) -> bool:
    with contextlib.suppress(OSError):
        return (output / info.file).stat().st_size == info.num_bytes and (output / info.index_file).is_file()
    return False


def _check_conserved(shard: ShardSpec, info: ShardInfo) -> None:
    if info.num_rows != shard.num_rows or info.num_records < shard.num_rows * shard.copies:
        raise IncompleteRunError(
            f"{info.file} holds {info.num_records} records of {info.num_rows} rows; the index has {shard.num_rows} rows of "
            f"{shard.copies} copies for it: remove the file and run again"
        )


def _local_folder(output: str | os.PathLike[str]) -> pathlib.Path:
    if "://" in os.fspath(output):
        raise OptionError(f"output {os.fspath(output)!r} is a URL; this version writes to local folders")
    return pathlib.Path(os.path.abspath(output))


def _checked_shares(splits: Mapping[str, float] | None) -> dict[str, float] | None:
    if splits is None:
        return None
    total = sum(splits.values())
    if not splits or any(share <= 0 for share in splits.values()) or not np.isclose(total, 1):
        raise OptionError(f"splits is {dict(splits)}; want positive shares that add up to 1 (they add up to {total:g})")
    return dict(splits)


def _checked_copies(copies: int | Mapping[str, int]) -> int | dict[str, int]:
    for number in copies.values() if isinstance(copies, Mapping) else [copies]:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise OptionError(f"copies is {copies!r}; want a number of at least 1, or such numbers by split")
    return dict(copies) if isinstance(copies, Mapping) else copies


def _checked_seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise OptionError(f"seed is {seed!r}; want an int, not negative")
    return seed
