"""The `Materializer`: from raw samples to finished shards, on all cores.

    index ──> rows on disk ──> plan ──> parts ──(largest first)──> workers: Materializer.write_part
                                                                       │ receipts, never pixels
    manifest <── index files <── shards, flushed and named <── parts joined in order <──┘

Whatever stops a run, the next one takes over each finished part and goes on from there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat import codecs
from datamat.errors import OptionError, OutputError
from datamat.formats import get_format
from datamat.ingredients import Ingredients, method_digests
from datamat.manifest import IndexInfo, KeyDigest, Manifest, ShardInfo
from datamat.options import ErrorPolicy, ShardOptions, WorkerOptions
from datamat.parallel import PathosExecutor, get_logger, physical_cores
from datamat.parts import PartFile, Receipt
from datamat.pipeline import Pipeline
from datamat.plan import PartSpec, Plan, make_plan
from datamat.rows import RowStore, write_rows
from datamat.running import Dispatched, Run
from datamat.seeding import global_state_kept
from datamat.snapshot import write_snapshot
from datamat.storage import locked
from datamat.transforms import Augmenter, forbid_update_check
from datamat.verification import VerifyReport, verify
from datamat.writer import DatasetWriter, Sample, resolve_writer
from datamat.writers.function import FunctionWriter

if TYPE_CHECKING:
    import logging
    from collections.abc import Generator
    from concurrent.futures import Executor, Future

    from datamat.features import Features
    from datamat.formats import ShardWriter
    from datamat.report import RunReport

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

    def __init__(  # noqa: PLR0913 -- the whole of a run is said here, in words
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
            return self._make_plan(self._write_rows(pathlib.Path(folder)), self._fingerprints())

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
            ingredients = self._fingerprints()
            plan = self._make_plan(store, ingredients)
            write_snapshot(work / "rows", plan)
            chosen = plan.select(self.include, self.exclude)
            describe = functools.partial(self._manifest, plan, ingredients)
            run = Run(self.output, work, store, plan, chosen, self.format, describe, self.logger)
            dispatched = Dispatched(functools.partial(self._dispatch, work / "rows"))
            report = run.execute(dispatched, started=started, show=progress)
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
        folder = self._rows()
        opened = _open(folder, self)
        # One part at a time in a process: a transform keeps the generators of the draw it is at.
        with opened.lock, global_state_kept(), PartFile(folder.parent, spec) as file:
            started = time.process_time()
            writer = self.format.writer(file, self.writer.features.columns)  # type: ignore[arg-type]  # `write` is enough
            keys = _write_records(opened, spec, writer)
            offsets = writer.finish()
            return file.finish(offsets, keys, time.process_time() - started)

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what a worker has no use for."""
        return {**self.__dict__, "executor": None}

    def _dispatch(self, rows_folder: pathlib.Path, told: Dispatched, parts: Sequence[PartSpec]) -> Generator[Receipt]:
        """Yield the receipts of parts as they come; the first part is begun first."""
        if not parts:
            return
        self._rows_folder = rows_folder
        done: queue.SimpleQueue[Future[Receipt]] = queue.SimpleQueue()
        futures: list[Future[Receipt]] = []
        with contextlib.ExitStack() as stack:
            executor = self.executor or stack.enter_context(self._own_executor(len(parts)))
            try:
                for part in parts:
                    futures.append(executor.submit(self.write_part, part))
                    futures[-1].add_done_callback(done.put)
                if isinstance(executor, PathosExecutor):
                    found = executor.stats()
                    told.num_workers = min(self._num_workers(), len(parts))
                    told.start_method = f"{found.start_method}: {found.reason}"
                for _ in futures:
                    yield done.get().result()
            finally:
                for future in futures:
                    future.cancel()
                if self.executor is not None:
                    wait(futures)  # parts that are under way end before the output is given free
                self._rows_folder = None

    def _own_executor(self, num_parts: int) -> PathosExecutor:
        options = self.workers
        return PathosExecutor(
            min(self._num_workers(), num_parts),
            start_method=options.start_method,
            affinity=options.affinity,
            initializer=_set_up_process,
            max_retries=options.max_retries,
            logger=self.logger,
        )

    def _num_workers(self) -> int:
        return self.workers.num_workers or len(physical_cores())

    def _manifest(
        self, plan: Plan, ingredients: Ingredients, infos: tuple[ShardInfo, ...], index: tuple[IndexInfo, ...]
    ) -> Manifest:
        return Manifest(
            name=plan.name,
            format=self.format.name,
            features=self.writer.features,
            shards=infos,
            seed=self.seed,
            copies={split: shards[0].copies for split, shards in plan.splits.items()},
            augmented=tuple(split for split, shards in plan.splits.items() if shards[0].augmented),
            made_by={
                "writer": f"{type(self.writer).__module__}:{type(self.writer).__qualname__}",
                "transform": None if self.transform is None else type(self.transform).__qualname__,
                "codecs": codecs.codec_versions(),
            },
            index=index,
            ingredients={**ingredients.to_json(), **method_digests(self.writer)},
        )

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

    def _make_plan(self, store: RowStore, ingredients: Ingredients) -> Plan:
        copies = self._copies_by_split(store)
        augmented = {split: self._is_augmented(split) for split in store.splits}
        digests = {
            split: ingredients.of_split(augmented=augmented[split], copies=copies[split]) for split in store.splits
        }
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
        return named and (self.transform is not None or self._hook() is not None)

    def _fingerprints(self) -> Ingredients:
        return Ingredients.of(self.writer, self.format, self.transform, self.seed)


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
    writer = FunctionWriter(fn, items, name, features)
    return Materializer(writer, None, output, **options).run(progress=progress)


class _Opened:
    """What a worker keeps from part to part."""

    def __init__(self, store: RowStore, pipeline: Pipeline) -> None:
        self.store = store
        self.pipeline = pipeline
        self.lock = threading.Lock()
        self.is_checked = False  # whether the transform was seen to draw from the seed alone


@functools.lru_cache(maxsize=1)
def _open(folder: pathlib.Path, job: Materializer) -> _Opened:
    job.writer.setup_worker()
    return _Opened(RowStore(folder), Pipeline(job.writer, job.augmenter, job.seed))


def _write_records(opened: _Opened, spec: PartSpec, writer: ShardWriter) -> KeyDigest:
    """Write the records of a part, and return the digest of their keys."""
    positions = np.asarray(opened.store.order[spec.start : spec.stop])
    if not spec.augmented and spec.copies == 1:
        keys = _write_block(opened, positions, writer)
        if keys is not None:
            return keys
    keys = KeyDigest()
    rows = opened.store.read(positions)
    if spec.augmented and not opened.is_checked:
        opened.pipeline.check_determined(rows[0])
        opened.is_checked = True
    for row in rows:
        for key, record in opened.pipeline.records(row, copies=spec.copies, augmented=spec.augmented):
            writer.append(record)
            keys.add(key)
    return keys


def _write_block(opened: _Opened, positions: np.ndarray, writer: ShardWriter) -> KeyDigest | None:
    """Write rows as one block, or return None where the plug-in wants to be asked for each."""
    if type(opened.pipeline.writer).read_block is DatasetWriter.read_block:
        return None
    names = opened.store.keys(positions)
    block = opened.pipeline.block(names, dict(opened.store.columns(positions)))
    if block is None:
        return None
    writer.append_block(block)
    return KeyDigest(names)


def _set_up_process() -> None:
    """Prepare a worker before anything is sent to it."""
    forbid_update_check()
    # glibc gives large blocks back as soon as they are freed, and the next picture faults every page in again: a third
    # of the time of decoding. Freeing one block of nearly 32 MB, the largest that it learns from, raises its
    # thresholds for good (mallopt(3), M_MMAP_THRESHOLD); the pages of this one are never touched.
    np.empty((32 << 20) - (1 << 16), np.uint8)


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
