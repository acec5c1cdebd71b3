"""`materialize`: shards from a function and its inputs, without a class."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast

from datamat.directory.files import locked
from datamat.directory.keys import safe_key
from datamat.errors import BrokenPoolError, IncompleteRunError, SampleError, Skip, WorkerDied, count_of, fold
from datamat.features import Features
from datamat.features.base import as_array
from datamat.fingerprint import Switches
from datamat.options import (
    RUN_PARAMETERS,
    DatasetKeywords,
    ErrorPolicy,
    Remedies,
    RunDatasetKeywords,
    RunKeywords,
    RunOptions,
    WorkerOptions,
    refuse_others,
    takes,
)
from datamat.parallel.process_role import is_worker
from datamat.parallel.tasks import CallLost, warned_once
from datamat.plan.pipeline import Pipeline
from datamat.run.dispatch import describe_death, open_executor, result_of
from datamat.run.limits import limit_memory, signals_raised
from datamat.run.materializer import DATASET_PARAMETERS, Materializer, output_place
from datamat.run.module_state import ModuleState
from datamat.run.part_task import exit_error, may_pass, pause
from datamat.run.report import RunReport
from datamat.run.row_watch import RowMark, RowWatch
from datamat.run.run import work_folder
from datamat.transforms import Augmenter
from datamat.transforms.seeding import global_state_kept
from datamat.values import frozen
from datamat.writers.base import Sample
from datamat.writers.function import function_writer

if TYPE_CHECKING:
    import logging
    from collections.abc import Collection, Iterator

    from datamat.sources.rows import IndexRow
    from datamat.writers.function import FunctionWriter

# ---------------------------------------------------------------- features of what a function returns
#
# Features are inferred from the function's first sample, which a worker makes. An empty list has no type; then further
# samples are made until one has items there.
#
# A function that crashes, loops or exits does so in that worker, as in the run itself, and the error names the key.
# Failing items are skipped if the policy allows it; the run then fails on them again, and records them in the ledger.


_MOST_FAILED = 1000  # failures in a row after which no item is expected to work


def infer_features(writer: FunctionWriter, seed: int, how: RunOptions) -> tuple[Features, float]:
    """Return the features of the function's first sample, and the seconds that it took.

    Raises:
        SampleError: an item failed, killed its worker or timed out, and the policy is to raise.
        IncompleteRunError: more items failed than the policy allows, or all of the first ones.
        WorkerDied: a worker died before it reached an item.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_raised())
        logger = how.logger
        search = _Search(writer, seed, how.workers, how.errors, is_own_pool=how.executor is None)
        run_here = stack.enter_context(open_executor(how.executor, how.workers, 1, logger))
        deaths: collections.Counter[int] = collections.Counter()
        start, last = 0, ""
        while True:
            try:
                first = run_here.submit(search.first, start, last)
                import datamat.run.run  # noqa: F401 -- needed next; the worker is busy now

                found: _First = result_of(first, run_here, logger)
                break
            except CallLost as error:
                raise BrokenPoolError(
                    f"the first sample was lost: {error}; run again once the engine works, or declare features"
                ) from error
            except WorkerDied as error:
                start, last = search.after_death(error, deaths)
        dead: set[int] = set()
        while found.empty_lists:
            try:
                lists = run_here.submit(search.lists, found.position, found.empty_lists, frozenset(dead)).result()
                return _with_lists(found, lists, len(writer), logger), found.seconds
            except WorkerDied as error:  # the run will fail on that item again
                mark = RowMark.of(error)
                if mark is None:
                    raise
                dead.add(mark.position)
        return found.features, found.seconds


_Path = tuple[str, ...]  # names of the enclosing dicts of a field, and its own


class _First(NamedTuple):
    """The first sample.

    Attributes:
        features: its features.
        position: number of its item.
        empty_lists: paths of the fields with empty lists.
        seconds: duration of the function call.
    """

    features: Features
    position: int
    empty_lists: tuple[_Path, ...]
    seconds: float

    @classmethod
    def of(cls, sample: Mapping[str, Any], position: int, seconds: float) -> _First:
        features = Features.infer(sample)
        return cls(features, position, tuple(_empty_lists(sample, features.as_declared)), seconds)


def _empty_lists(sample: Mapping[str, Any], declared: Mapping[str, Any], path: _Path = ()) -> Iterator[_Path]:
    for name, value in sample.items():
        feature, here = declared.get(name), (*path, name)
        if isinstance(feature, collections.abc.Mapping):
            yield from _empty_lists(value, feature, here)
        elif isinstance(value, (list, tuple)) and not value:
            yield here


def _at(sample: Any, path: _Path) -> Any:
    for name in path:
        sample = sample.get(name) if isinstance(sample, collections.abc.Mapping) else None
    return sample


def _with_lists(first: _First, lists: Mapping[_Path, Any], num_items: int, logger: logging.Logger) -> Features:
    """Return the features of a first sample, after inferring those of its empty lists."""
    from datamat.writers.samples import MOST_AHEAD

    def replaced(declared: Mapping[str, Any], path: _Path = ()) -> dict[str, Any]:
        return {
            name: replaced(feature, (*path, name))
            if isinstance(feature, collections.abc.Mapping)
            else lists.get((*path, name), feature)
            for name, feature in declared.items()
        }

    still = ["/".join(path) for path in first.empty_lists if path not in lists]
    if still and num_items > first.position + MOST_AHEAD:
        logger.warning(
            "materialize: the lists in field %r of the first %d samples are empty, so lists of this field are stored "
            "as JSON; if others hold numbers, texts or arrays, pass features=, as in {%r: ListOf(Scalar('int64'))}",
            still[0],
            MOST_AHEAD,
            still[0],
        )
    return Features(replaced(first.features.as_declared))


@frozen(slots=False)
class _Search:
    """The search through the items; travels to a worker.

    Args:
        writer: writer that calls the function.
        seed: base seed of the function's random draws.
        workers: options of the worker, with the time and memory limits of an item.
        errors: what happens to items that fail.
        is_own_pool: whether the worker is one of datamat's own.
        state: state of the user's modules in the caller, which the worker restores.
        switches: switches of libraries in the caller, which it also restores.
    """

    writer: FunctionWriter
    seed: int
    workers: WorkerOptions
    errors: ErrorPolicy
    is_own_pool: bool
    state: ModuleState | None = None
    switches: Switches = dataclasses.field(default_factory=Switches.of)

    def __getstate__(self) -> dict[str, Any]:
        """Include the state of the user's modules, as the run does."""
        return {**self.__dict__, "state": ModuleState.of(self._pipeline, is_own_pool=self.is_own_pool)}

    def _datamat_changing(self) -> None:
        """Return nothing to compare between calls: the search is the same for all."""

    @property
    def _pipeline(self) -> Pipeline:
        return Pipeline(self.writer, Augmenter(Features({})), self.seed)

    def first(self, start: int, last: str) -> _First:
        """Return the first sample of the items from `start` on.

        Args:
            start: number of the first item to try; all before it failed.
            last: why the item before it failed; "" if unknown.
        """
        pipeline = self._settled_pipeline()
        error: SampleError | None = None
        num_dropped = 0
        with global_state_kept(), RowWatch(self.workers.sample_timeout_s) as watch:
            # The first call in a process takes a millisecond or more, whatever the function does.
            nothing = function_writer(lambda _: {}, [0], name="nothing")
            Pipeline(nothing, Augmenter(Features({})), self.seed).samples(next(iter(nothing.index(None))))
            for position, row in self._rows(start):
                watch.at(position)
                begun = time.perf_counter()
                try:
                    sample = self._samples(pipeline, row)[0]
                    seconds = time.perf_counter() - begun
                    with _named(row):
                        return _First.of(sample, position, seconds)
                except Skip as skip:
                    num_dropped, last = num_dropped + 1, f"sample {row.key!r}: {skip.reason}"
                    continue
                except SampleError as raised:
                    error, last = raised, str(raised)
                self._check(position + 1 - num_dropped, error)
        what = "failed" if not num_dropped else "failed or were left out" if error else "were left out"
        raise IncompleteRunError(
            f"materialize: all {count_of(len(self.writer), 'input')} {what}, so there is no sample to infer the "
            "features "
            "from; fix the function, or pass features=" + (f"; the last: {last}" if last else "")
        ) from error

    def lists(self, start: int, paths: Sequence[_Path], dead: Collection[int]) -> dict[_Path, Any]:
        """Return the features of lists, by path, inferred from the first non-empty list of each.

        Args:
            start: number of the first item to look at; at most a hundred are.
            paths: paths of the fields.
            dead: numbers of items that killed their workers.
        """
        from datamat.writers.samples import MOST_AHEAD, shows_type

        pipeline = self._settled_pipeline()
        found: dict[_Path, Any] = {}
        with global_state_kept(), RowWatch(self.workers.sample_timeout_s) as watch:
            for position, row in itertools.islice(self._rows(start), MOST_AHEAD):
                if position in dead:
                    continue
                watch.at(position)
                try:
                    samples = self._samples(pipeline, row)
                except (Skip, SampleError):
                    continue  # the run fails on it again
                for sample, path in itertools.product(samples, paths):
                    value = as_array(_at(sample, path))
                    if path not in found and shows_type(value):
                        name = "/".join(path)
                        with _named(row):
                            found[path] = Features.infer({name: value}).as_declared[name]
                if len(found) == len(paths):
                    break
        return found

    def after_death(self, error: WorkerDied, deaths: collections.Counter[int]) -> tuple[int, str]:
        """Return the item to resume at after the death of a worker, and why its last item is skipped."""
        mark = RowMark.of(error)
        if mark is None:
            raise error
        deaths[mark.position] += 1
        if deaths[mark.position] <= self.workers.max_retries:
            return mark.position, ""
        cause, message = describe_death(error, self.workers)
        row = next(itertools.islice(self.writer.index(None), mark.position, None))
        failed = SampleError(row.key, f"{type(cause).__name__}: {message}")
        failed.__cause__ = cause
        self._check(mark.position + 1, failed)
        return mark.position + 1, str(failed)

    def _settled_pipeline(self) -> Pipeline:
        """Return the pipeline that makes the samples, after giving this process the state that a run's workers have."""
        self.switches.set()
        if self.state is not None:
            self.state.settle(self._pipeline)
        if self.workers.max_rss is not None and is_worker():
            limit_memory(self.workers.max_rss)
        return self._pipeline

    def _rows(self, start: int) -> Iterator[tuple[int, IndexRow]]:
        """Yield the number and the row of each item from `start` on, as in the run."""
        for position, row in enumerate(itertools.islice(self.writer.index(None), start, None), start):
            yield position, row._replace(key=safe_key(row.key))

    def _samples(self, pipeline: Pipeline, row: IndexRow) -> list[Sample]:
        """Return the samples of an item; raise `Skip` if the function leaves the item out."""
        for attempt in itertools.count(1):
            try:
                samples = pipeline.samples(row)
            except (SampleError, SystemExit) as raised:
                failure = raised if isinstance(raised, SampleError) else exit_error(row, raised)
                if attempt > self.errors.retries or not may_pass(failure):
                    raise failure from failure.__cause__
                pause(failure, attempt)
                continue
            kept = [sample for sample in samples if not isinstance(sample, Skip)]
            if not kept:
                skip = samples[0]
                assert isinstance(skip, Skip)
                raise skip
            return kept
        raise AssertionError("unreachable")

    def _check(self, num_failed: int, error: SampleError) -> None:
        """Raise if the policy allows no more failures."""
        if self.errors.action == "raise":
            raise error
        limit = self.errors.limit(len(self.writer))
        if limit is not None and num_failed > limit:
            raise IncompleteRunError(
                f"materialize: {count_of(num_failed, 'input')} failed, more than max_errors={self.errors.max_errors} "
                f"allows; the last: {error}"
            ) from error
        if num_failed >= _MOST_FAILED:
            raise IncompleteRunError(
                f"materialize: the first {num_failed:,} inputs failed, so there is no sample to infer the features "
                f"from; fix the function, or pass features=; the last: {error}"
            ) from error


@contextlib.contextmanager
def _named(row: IndexRow) -> Iterator[None]:
    """Add the key of the item to errors of inference."""
    try:
        yield
    except Exception as error:
        raise SampleError(row.key, f"{type(error).__name__}: {error}") from error


# ---------------------------------------------------------------- materialize


def _marked(
    output: str | os.PathLike[str], dataset: DatasetKeywords, how: RunOptions
) -> contextlib.AbstractContextManager[object]:
    """Hold the lock of an output, so that the run is visible from its first sample on; tasks share theirs."""
    if how.task_index is not None or not output:
        return contextlib.nullcontext()
    _, folder = output_place(output, dataset.get("storage_options"), how.scratch)
    return locked(work_folder(folder) / "lock")


@takes(*DATASET_PARAMETERS, *RUN_PARAMETERS)
def materialize(  # noqa: PLR0913 -- independent options, all but three by name
    fn: Callable[[Any], Sample],
    inputs: Iterable[Any],
    output: str | os.PathLike[str],
    *,
    name: str = "data",
    features: Features | None = None,
    key: Callable[[Any], str] | str | None = None,
    split: Callable[[Any], str | None] | str | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    block: Callable[[Any], Mapping[str, Any] | None] | None = None,
    concurrency: int | None = None,
    **both: Unpack[RunDatasetKeywords],
) -> RunReport:
    """Write `fn(item)` for each input as one record: no class needed.

    Args:
        fn: callable of (item), or of (item, rng) if it draws random numbers, that returns a dict of values by feature
            name; called in the workers, in any order. A list or generator of such dicts gives several samples, with the
            keys KEY#0-0, KEY#0-1 and so on. None, or `Skip("too dark")`, raised or returned, leaves the item out.
        inputs: the items; each is one sample. Or the path of a dataset that `Materializer(source=...)` reads, such as a
            folder of Parquet files: its samples, dicts that workers read, are the items, with its keys and splits;
            pictures are the bytes of their files.
        output: folder of the finished shards.
        name: name of the dataset, with which the names of its shards begin.
        features: the schema; None infers it, without loss, from the first item that works, in a worker. If that sample
            has an empty list, its type comes from the first non-empty one among the next hundred items.
        key: function that returns the key of an item, a str or int; or, if items are dicts, the name of the field that
            holds it. None: a path or string (also from an array) is its own key, with a hash if it contains `/`, is
            long or appears twice; other items use their position, so inserting one changes all later keys.
        split: function that returns the split of an item, such as "train"; or, if items are dicts, the name of the
            field that holds it. Items whose split is None, or all items without this option, are divided by `splits`.
        files: paths of input files that every sample depends on, such as a label map that `fn` opens; if one
            changes, all shards are rebuilt. Items that are paths of files, or hold such paths (in tuples, lists, sets,
            dicts, dataclasses, arrays), are tracked automatically.
        block: callable of a list of items (an array if `inputs` is one) that returns the results of `fn` for all of
            them by columns, as `DatasetWriter.read_block` does: for numbers and arrays, where a call per item costs
            more than the item itself. It must not draw random numbers. If it returns None or raises, `fn` is called for
            each item.
        concurrency: number of concurrent calls of an `async def` function in each worker, up to 64, for downloads and
            requests; None for 16. Samples keep the order of the items, and a call that fails or times out affects only
            its own item.
        both: keyword arguments of `Materializer`, such as `format`, `transform` or `copies`, and of its `run`, such as
            `workers`, `errors` or `deadline`. `groups` may name a field of items that are dicts; the `IndexRow` that a
            function gets has the fields of such an item, or any other item as the field "item".

    Raises:
        OptionError: there are no inputs; or `block` is given and `fn` draws random numbers; or `concurrency` is given
            and `fn` is not async; or `Materializer` refuses an option.
        SourceError: `key` returns no key for an item, or the same for two; or `split` returns an invalid name.
        SampleError: an item failed, and the policy is to raise.

    Example:
        >>> materialize(lambda n: {"square": n * n}, range(10), "out/squares")   # doctest: +SKIP

        The same by the block:

        >>> squares = lambda items: {"square": np.square(items)}
        >>> materialize(lambda n: {"square": n * n}, range(10), "out/squares", block=squares)   # doctest: +SKIP
    """
    refuse_others("materialize", both, RunDatasetKeywords.__annotations__)
    writer = function_writer(
        fn,
        inputs,
        name=name,
        features=features,
        key=key,
        split=split,
        files=files,
        block=block,
        concurrency=concurrency,
    )
    of_run = RunKeywords.__annotations__
    run = cast("RunKeywords", {name: value for name, value in both.items() if name in of_run})
    dataset = cast("DatasetKeywords", {name: value for name, value in both.items() if name not in of_run})
    with warned_once():
        row_s = None
        if features is None:
            try:
                how = RunOptions.of(run)
                run["deadline"] = how.deadline  # counts from here: the first sample may take long
                with _marked(output, dataset, how):
                    writer.features, row_s = infer_features(writer, dataset.get("seed", 0), how)
            except SampleError as error:
                fold(error)
                raise error.with_traceback(None)  # noqa: B904 -- the same error
        made = Materializer(writer, None, output, **dataset)
        made._job = dataclasses.replace(made._job, remedies=Remedies("materialize(..., {})"), row_s=row_s)
        return made.run(**run)
