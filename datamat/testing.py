"""Tests that a plug-in passes: subclass the class for its kind in a test module of yours, and let pytest collect it.

    from datamat.testing import ShardFormatConformance

    class TestLines(ShardFormatConformance):
        def make_format(self):
            return LinesFormat()

| plug-in | class | the subclass defines |
| --- | --- | --- |
| `DatasetWriter` | `DatasetWriterConformance` | `make_writer`, `make_source` |
| `DataSource`, or any object with `len` and items | `DataSourceConformance` | `make_source` |
| `Feature` | `FeatureConformance` | `make_feature`, `make_values` |
| `ShardFormat` | `ShardFormatConformance` | `make_format` |
| `Folder` | `FolderConformance` | `make_folder` |
| `Sidecar` | `SidecarConformance` | `make_sidecar` |
| a hook | `HookConformance` | `make_hook` |
| a type for `register_standin` | `StandinConformance` | `make_object`, `use` |
| `concurrent.futures.Executor` | `ExecutorConformance` | `make_executor` |

`InlineExecutor` runs every call in the calling thread: tests of a writer or a whole run then take milliseconds, and a
debugger stops in `read`.

datamat's own plug-ins pass the same tests. A failed assertion says which case it was, what was found and what was
expected. To leave a test out, set it to None in the subclass and say why. This module does not import pytest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import importlib.util
import itertools
import json
import multiprocessing
import operator
import os
import pathlib
import pickle
import random
import re
import tempfile
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np

from datamat.codecs import encode_jpeg, encode_png
from datamat.directory.manifest import Manifest
from datamat.directory.sidecars import Sidecar
from datamat.directory.sidecars.croissant import croissant_type
from datamat.directory.sidecars.exporting import export
from datamat.directory.sidecars.huggingface import hugging_face_type
from datamat.directory.sidecars.tfds import tfds_entries
from datamat.directory.verify import verify
from datamat.errors import (
    CorruptDataError,
    DatamatError,
    MissingDependencyError,
    OptionError,
    SampleError,
    SchemaError,
)
from datamat.events import RunEnded, RunEvent
from datamat.features import (
    Audio,
    BBoxes,
    Bytes,
    ClassLabel,
    Depth,
    Feature,
    Features,
    Image,
    Json,
    Keypoints,
    Mask,
    Polygons,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    Video,
)
from datamat.features.base import by_column, dtype_of, holds_numbers
from datamat.features.registry import register_feature
from datamat.folders import AbsentError, ChangedError, ExistsError, Folder, ReplaceIf, Stat, create_once
from datamat.formats import Offsets, ShardFormat, get_format
from datamat.options import Hook, WorkerOptions
from datamat.parallel import PathosExecutor
from datamat.parallel.standins import registrations
from datamat.readers.dataset import load
from datamat.readers.tf.decode import as_read
from datamat.run.materializer import Materializer
from datamat.sources.rows import IndexRow, single_rows
from datamat.writers.base import DatasetWriter
from datamat.writers.dataset import ImportWriter
from datamat.writers.sources import open_source

if TYPE_CHECKING:
    from datamat.formats import ShardWriter
    from datamat.options import RunKeywords
    from datamat.run.report import RunReport
    from datamat.writers.base import Sample

__all__ = [
    "DataSourceConformance",
    "DatasetWriterConformance",
    "ExecutorConformance",
    "FeatureConformance",
    "FolderConformance",
    "HookConformance",
    "InlineExecutor",
    "ShardFormatConformance",
    "SidecarConformance",
    "StandinConformance",
]


def __dir__() -> list[str]:
    return __all__


# ---------------------------------------------------------------- assertions

_MOST_SHOWN = 6
_MOST_CHARACTERS = 200


def _compare(found: Any, expected: Any, place: str) -> None:
    """Assert that two values are equal; of lists and dicts the message shows the first difference."""
    assert found == expected, f"{place}: {_difference(found, expected)}"


def _difference(found: Any, expected: Any) -> str:
    if isinstance(found, dict) and isinstance(expected, dict):
        key = next(key for key in {**expected, **found} if found.get(key, ...) != expected.get(key, ...))
        return f"{key!r}: {_difference(found.get(key), expected.get(key))}"
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        number = next(number for number, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        return f"entry {number}: {_difference(found[number], expected[number])}"
    return f"found {_preview(found)}, expected {_preview(expected)}"


def _preview(value: Any) -> str:
    if isinstance(value, list) and len(value) > _MOST_SHOWN:
        return f"{len(value)} entries"
    text = repr(value[:_MOST_CHARACTERS] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


@contextlib.contextmanager
def _raises(expected: type[Exception], pattern: str, place: str) -> Iterator[None]:
    """Assert that the block raises an error whose message contains a pattern."""
    try:
        yield
    except expected as error:
        assert re.search(pattern, str(error)), f"{place}: found the message {str(error)!r}, expected {pattern!r} in it"
    except Exception as error:
        raise AssertionError(f"{place}: found {error!r}, expected {expected.__name__}") from error
    else:
        raise AssertionError(f"{place}: found no error, expected {expected.__name__}")


def _digests(folder: pathlib.Path) -> dict[str, str]:
    """Return the digest of each file of a finished directory."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".datamat" not in path.parts
    }


# ---------------------------------------------------------------- dataset writers


class DatasetWriterConformance:
    """What every `DatasetWriter` does: the same rows, in any order and process, give the same records.

    A dozen rows are enough for `make_source`; the tests read all of them several times.
    """

    def make_writer(self) -> DatasetWriter:
        """Return a new writer, as a program makes one when it starts."""
        raise NotImplementedError(f"{type(self).__name__}: define make_writer(self)")

    def make_source(self, folder: pathlib.Path) -> Any:
        """Return the source of the writer; its files, if any, go into an empty folder."""
        raise NotImplementedError(f"{type(self).__name__}: define make_source(self, folder)")

    def test_index_is_the_same_each_time(self, tmp_path: pathlib.Path) -> None:
        """Equal rows in the same order, which a plan can be made of."""
        source = self._source(tmp_path)

        rows, again = ([*single_rows(_bound(self.make_writer(), source).index(source))] for _ in range(2))

        assert rows, "index: found no rows, expected one for each sample of the source"
        _compare(again, rows, "index, called a second time")
        _compare(self._job(source, tmp_path / "out").plan().num_rows, len(rows), "rows of the plan")

    def test_every_row_is_stored(self, tmp_path: pathlib.Path) -> None:
        """What `read` returns fits the declared features, and each row gives its copies."""
        source = self._source(tmp_path)
        job = self._job(source, tmp_path / "out")

        report = job.run(executor=InlineExecutor(), progress=False)

        dataset = load(tmp_path / "out")
        _compare(report.num_rows, job.plan().num_rows, "rows that were read")
        _compare(len({*dataset.keys()}), report.num_records, "distinct keys of the records")
        for sample in dataset:
            _compare({*sample}, {*job.writer.features, "key"}, f"fields of the record {sample['key']!r}")

    def test_records_do_not_depend_on_workers(self, tmp_path: pathlib.Path) -> None:
        """Two runs write the same bytes, with one worker and with two; the random draws of copies included."""
        source = self._source(tmp_path)

        self._job(source, tmp_path / "one").run(workers=1, progress=False)
        self._job(source, tmp_path / "two").run(workers=2, progress=False)

        _compare(_digests(tmp_path / "two"), _digests(tmp_path / "one"), "files of two workers beside those of one")

    def test_records_do_not_depend_on_other_rows(self, tmp_path: pathlib.Path) -> None:
        """A row that is read alone, by a new writer, gives the record that it gives in a run."""
        source = self._source(tmp_path)
        self._job(source, tmp_path / "out").run(executor=InlineExecutor(), progress=False)
        dataset = load(tmp_path / "out")

        for sample in [*dataset][:: -max(len(dataset) // 6, 1)]:
            alone = self._job(source, tmp_path / "out").replay(str(sample["key"]))
            _compare(_plain(alone), _plain(sample), f"record {sample['key']!r}, read alone")

    def test_second_run_has_nothing_to_do(self, tmp_path: pathlib.Path) -> None:
        """A new writer has the fingerprint of the first: nothing in it depends on the time, place or process."""
        source = self._source(tmp_path)
        self._job(source, tmp_path / "out").run(executor=InlineExecutor(), progress=False)

        report = self._job(source, tmp_path / "out").run(executor=InlineExecutor(), progress=False)

        assert report.did_nothing, f"second run: found that it wrote {report}, expected that it had nothing to do"

    def test_read_block_agrees_with_read(self, tmp_path: pathlib.Path) -> None:
        """The columns of a block hold what `read` returns for each row."""
        source = self._source(tmp_path)
        by_rows = self._job(source, tmp_path / "rows", copies=1)  # where there are copies, nobody asks for blocks
        by_rows.writer.read_block = _no_block  # type: ignore[method-assign]  # on the instance alone
        by_rows.run(executor=InlineExecutor(), progress=False)

        self._job(source, tmp_path / "blocks", copies=1).run(executor=InlineExecutor(), progress=False)

        rows, blocks = ([_plain(sample) for sample in load(tmp_path / name)] for name in ("rows", "blocks"))
        _compare(blocks, rows, "samples from read_block beside those from read")

    def _source(self, tmp_path: pathlib.Path) -> Any:
        folder = tmp_path / "source"
        folder.mkdir()
        return self.make_source(folder)

    def _job(self, source: Any, output: pathlib.Path, copies: int = 2) -> Materializer:
        return Materializer(self.make_writer(), source, output, shards=2, copies=copies)


def _bound(writer: DatasetWriter, source: Any) -> DatasetWriter:
    writer.bind(source)
    return writer


def _no_block(keys: Sequence[str], fields: Mapping[str, Any]) -> None:
    del keys, fields


# ---------------------------------------------------------------- data sources


class DataSourceConformance:
    """What every `DataSource` does, and every object with `len` and items that is passed as a dataset.

    A dozen samples are enough for `make_source`; the tests read all of them several times.
    """

    def make_source(self) -> Any:
        """Return a new data source, as a program makes one when it starts."""
        raise NotImplementedError(f"{type(self).__name__}: define make_source(self)")

    def test_keys_and_splits_are_the_same_each_time(self) -> None:
        """One pair for each sample, in the same order, with no key twice."""
        source = open_source(self.make_source())

        pairs = [*source.keys_and_splits()]

        assert pairs, "len: found no samples, expected at least one"
        _compare(len(pairs), len(source), "pairs of keys_and_splits beside len")
        _compare([*source.keys_and_splits()], pairs, "keys_and_splits, called a second time")
        _compare(len({key for key, _ in pairs}), len(pairs), "distinct keys")

    def test_samples_do_not_depend_on_order_or_process(self) -> None:
        """A copy in a worker process, read backwards, gives the samples of the original."""
        source = open_source(self.make_source())
        samples = [_plain(source[position]) for position in range(len(source))]

        with PathosExecutor(1) as pool:
            found = [*pool.map(source.__getitem__, reversed(range(len(source))))]

        _compare([_plain(sample) for sample in found[::-1]], samples, "samples of a copy, read backwards")

    def test_every_sample_is_stored(self, tmp_path: pathlib.Path) -> None:
        """Each sample fits the features that the source declares, and is a record under its key."""
        source = open_source(self.make_source())

        self._run(tmp_path / "out")

        dataset = load(tmp_path / "out")
        _compare(sorted(dataset.keys()), sorted(key for key, _ in source.keys_and_splits()), "keys of the records")
        _compare({name: dataset.features[name] for name in source.features}, {**source.features}, "features")

    def test_second_run_has_nothing_to_do(self, tmp_path: pathlib.Path) -> None:
        """A new source has the identity of the first: nothing in it depends on the time, place or process."""
        self._run(tmp_path / "out")

        report = self._run(tmp_path / "out")

        assert report.did_nothing, f"second run: found that it wrote {report}, expected that it had nothing to do"

    def _run(self, output: pathlib.Path) -> RunReport:
        job = Materializer(ImportWriter(), self.make_source(), output)
        return job.run(executor=InlineExecutor(), progress=False)


def _plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample in a form that compares: arrays by their bits."""
    return {
        name: (value.dtype.name, value.shape, value.tobytes()) if isinstance(value, np.ndarray | np.generic) else value
        for name, value in sample.items()
    }


# ---------------------------------------------------------------- executors


class _Numbers(DatasetWriter):
    """Rows whose records depend on number and seed; one of them may fail."""

    name = "numbers"
    features = Features({"number": Scalar("int64"), "noise": Tensor((3,), "float64")})

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def index(self, source: Any) -> Iterable[IndexRow]:
        return [IndexRow(f"{number:04d}", fields={"number": number}) for number in range(source)]

    def read(self, row: IndexRow, rng: np.random.Generator) -> Sample:  # type: ignore[override]  # as documented
        if row.fields["number"] == self.bad:
            raise ValueError(f"number {self.bad} is bad")
        return {"number": row.fields["number"], "noise": rng.random(3)}


class _Scale:
    """An object whose bound method is sent to workers."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def apply(self, values: Any, *, offset: int = 0) -> Any:
        return values * self.factor + offset


class InlineExecutor(Executor):
    """Makes each call at once, in the thread that submits it: no process is started, and nothing is pickled.

    A run has the same bytes as with workers. What only a process can do is not there: a call cannot time out, and one
    that ends the process ends the program.

    Example:
        >>> import tempfile
        >>> from datamat import materialize
        >>> report = materialize(
        ...     lambda n: {"square": n * n}, range(10), tempfile.mkdtemp() + "/out",
        ...     executor=InlineExecutor(), progress=False,
        ... )
        >>> report.num_records
        10
    """

    def __init__(self) -> None:
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `fn` and return a future that has ended; only what is no `Exception`, as Ctrl-C, is raised here.

        Raises:
            RuntimeError: the executor is shut down.
        """
        if self._is_shut_down:
            raise RuntimeError("cannot submit after shutdown")
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            result = fn(*args, **kwargs)
        except Exception as exc:  # noqa: BLE001 -- the future hands it to the caller
            future.set_exception(exc)
        else:
            future.set_result(result)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse later calls; all earlier ones have ended."""
        self._is_shut_down = True


class ExecutorConformance:
    """What datamat expects of an executor that is passed as `executor=`: a run's bytes do not depend on it."""

    def make_executor(self) -> Executor:
        """Return a new executor, which the test shuts down."""
        raise NotImplementedError(f"{type(self).__name__}: define make_executor(self)")

    def test_run_has_the_same_bytes(self, tmp_path: pathlib.Path) -> None:
        """Every file of a run is what one worker of datamat's own writes."""
        _run(tmp_path / "own", workers=WorkerOptions(num_workers=1))

        with self.make_executor() as executor:
            _run(tmp_path / "out", executor=executor)

        _compare(_digests(tmp_path / "out"), _digests(tmp_path / "own"), "files beside those of datamat's own worker")

    def test_row_that_fails_fails_alone(self, tmp_path: pathlib.Path) -> None:
        """A skipped row is counted, and all others are stored."""
        with self.make_executor() as executor:
            report = _run(tmp_path / "out", bad=17, executor=executor, errors="skip")

        _compare(report.num_failed, 1, "failed rows")
        numbers = sorted(int(sample["number"]) for sample in load(tmp_path / "out"))
        _compare(numbers, [number for number in range(40) if number != 17], "stored numbers")

    def test_failed_run_names_the_row_and_can_be_continued(self, tmp_path: pathlib.Path) -> None:
        """An error in a worker reaches the caller as what it is, and the executor still serves the next run."""
        with self.make_executor() as executor:
            with _raises(SampleError, "0017.*number 17 is bad", "run with a bad row"):
                _run(tmp_path / "out", bad=17, executor=executor)
            report = _run(tmp_path / "out", executor=executor)

        assert report.is_complete, f"second run: found {report}, expected that it is complete"

    def test_method_and_arguments_arrive(self) -> None:
        """A bound method is called with its object, and arrays come back as they are."""
        with self.make_executor() as executor:
            future = executor.submit(_Scale(3).apply, np.arange(5), offset=1)
            found = future.result(timeout=60)

        _compare(_plain({"": found}), _plain({"": np.arange(5) * 3 + 1}), "result of a method of an object")

    def test_error_is_the_futures_own(self) -> None:
        """A task that raises fails its own future, with the error's type and message; others are as before."""
        with self.make_executor() as executor:
            futures = [executor.submit(operator.truediv, 6, divisor) for divisor in (2, 0, 3)]
            errors = [future.exception(timeout=60) for future in futures]
            found = [future.result() for future in futures if future.exception() is None]

        _compare(
            [type(error) for error in errors], [type(None), ZeroDivisionError, type(None)], "errors of three tasks"
        )
        _compare(found, [3.0, 2.0], "results beside a task that failed")

    def test_futures_can_be_waited_for(self) -> None:
        """`wait` and callbacks see each future end, once."""
        ended: list[Any] = []
        with self.make_executor() as executor:
            futures = [executor.submit(abs, -number) for number in range(50)]
            for future in futures:
                future.add_done_callback(ended.append)
            strangers = [future for future in futures if not isinstance(future, concurrent.futures.Future)]
            assert not strangers, f"submit: found {_preview(strangers)}, expected concurrent.futures.Future"
            done, left = concurrent.futures.wait(futures, timeout=60)

        _compare((len(done), len(left)), (50, 0), "futures that ended, and that did not, after wait")
        _compare(sorted(map(id, ended)), sorted(map(id, futures)), "futures that called back")

    def test_map_keeps_the_order(self) -> None:
        """Results come in the order of their items."""
        with self.make_executor() as executor:
            found = list(executor.map(abs, range(-100, 0)))

        _compare(found, list(range(100, 0, -1)), "results of map")

    def test_shutdown_ends_what_was_submitted(self) -> None:
        """Leaving the `with` waits for every task; later ones are refused."""
        with self.make_executor() as executor:
            futures = [executor.submit(abs, -number) for number in range(50)]

        unfinished = [number for number, future in enumerate(futures) if not future.done()]
        _compare(unfinished, [], "tasks without a result after shutdown")
        _compare([future.result() for future in futures], list(range(50)), "results after shutdown")
        with _raises(RuntimeError, "", "submit after shutdown"):
            executor.submit(abs, -1)


def _run(output: pathlib.Path, bad: int | None = None, **options: Unpack[RunKeywords]) -> RunReport:
    options["progress"] = False
    # One version: a row that fails is no other dataset.
    return Materializer(_Numbers(bad), 40, output, shards=4, version="1").run(**options)


# ---------------------------------------------------------------- stand-ins


@contextlib.contextmanager
def _one_worker(start_method: Any) -> Iterator[PathosExecutor]:
    with warnings.catch_warnings():
        # Other tests of the same process may have used libraries that a fork does not suit; these tests do not.
        warnings.filterwarnings("ignore", "start_method='fork' was asked for", RuntimeWarning)
        with PathosExecutor(1, start_method=start_method) as pool:
            yield pool


class _Held:
    """An object that holds another, and uses it."""

    def __init__(self, use: Callable[[Any], Any], thing: Any) -> None:
        self.use, self.thing = use, thing

    def call(self) -> Any:
        return self.use(self.thing)


def _same(thing: Any) -> Any:
    return thing


class StandinConformance:
    """What every `register_standin` does: an object of the type works in workers as it does in the caller."""

    def make_object(self) -> Any:
        """Return an object of the registered type; the module of the test registers it."""
        raise NotImplementedError(f"{type(self).__name__}: define make_object(self)")

    def use(self, thing: Any) -> Any:
        """Return what a program gets from the object: a value that compares and can be pickled."""
        raise NotImplementedError(f"{type(self).__name__}: define use(self, thing)")

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Let pytest run a test that asks for a start method once with each."""
        if "start_method" in metafunc.fixturenames:
            metafunc.parametrize("start_method", ["fork", "forkserver", "spawn"])

    def test_object_on_self_works_in_a_worker(self, start_method: Any) -> None:
        """A method whose `self` holds the object finds one there that does the same."""
        thing = self.make_object()
        expected = self.use(thing)

        with _one_worker(start_method) as pool:
            found = pool.submit(_Held(self.use, thing).call).result()

        _compare(found, expected, f"{start_method}: result of `use` in a worker")

    def test_object_travels_as_argument_and_result(self, start_method: Any) -> None:
        """It arrives in the worker and comes back, and is used in both places."""
        thing = self.make_object()
        expected = self.use(thing)

        with _one_worker(start_method) as pool:
            there = pool.submit(self.use, thing).result()
            back = pool.submit(_same, thing).result()

        _compare(there, expected, f"{start_method}: result of `use` with the object as argument")
        _compare(self.use(back), expected, f"{start_method}: result of `use` with the object that came back")

    def test_reduce_is_the_same_each_time(self) -> None:
        """For one object it gives equal arguments: a function that has not changed is not sent again."""
        thing = self.make_object()
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(thing).__mro__]
        reduces = [registrations()[name] for name in names if name in registrations()]
        assert reduces, f"register_standin: found no registration of {names[0]}, expected one"

        first, second = (pickle.dumps(reduces[0](thing)[1]) for _ in range(2))

        assert first == second, f"reduce, called twice: found {reduces[0](thing)[1]!r}, expected equal arguments"


# ---------------------------------------------------------------- feature types

FORMATS = ["tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord"]
"""The built-in formats; where the package of one is missing, its tests are left out."""


class _Given(DatasetWriter):
    """Rows with given values of one feature."""

    name = "given"

    def __init__(self, feature: Feature, values: Sequence[Any]) -> None:
        self.features = Features({"value": feature})
        self.values = values

    def index(self, source: Any) -> Iterable[IndexRow]:
        del source
        return [IndexRow(f"{number:04d}", fields={"number": number}) for number in range(len(self.values))]

    def read(self, row: IndexRow) -> Sample:
        return {"value": self.values[row.fields["number"]]}


class FeatureConformance:
    """What every `Feature` does: a value keeps its bits through every format and reader.

    Attributes:
        is_lossy: whether `decode` may return something other than the encoded value. In any case, it must return the
            same everywhere.
    """

    is_lossy: ClassVar[bool] = False

    def make_feature(self) -> Feature:
        """Return the feature, with arguments other than the default ones where it has any."""
        raise NotImplementedError(f"{type(self).__name__}: define make_feature(self)")

    def make_values(self) -> Sequence[Any]:
        """Return values of it, three or more: the smallest, the largest, the empty, whatever is special."""
        raise NotImplementedError(f"{type(self).__name__}: define make_values(self)")

    def make_wrong_values(self) -> Sequence[Any]:
        """Return values that it refuses."""
        return [object()]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Let pytest run a test that asks for a format once with each."""
        if "format_name" in metafunc.fixturenames:
            metafunc.parametrize("format_name", FORMATS)

    def test_columns_are_as_declared(self) -> None:
        """`encode` gives the columns that `columns` names, of their kinds."""
        for value in self.make_values():
            record = self._features().encode({"key": "a", "value": value})
            kinds = {name: _kind_of(part) for name, part in record.items()}
            _compare(kinds, dict(self._features().columns), f"columns of {_preview(value)}")

    def test_value_is_decoded_as_declared(self) -> None:
        """`decode` returns the value, of the dtype and shape that `value_type` names."""
        feature = self.make_feature()
        dtype, shape = feature.value_type()
        for value in self.make_values():
            found = feature.decode(feature.encode(value))
            place = f"decoded {_preview(value)}"
            if found is None:
                assert feature.takes_none, f"{place}: found None, expected a {dtype}: takes_none is False"
            elif not holds_numbers(dtype):
                kind = list if shape else {"string": str, "bytes": bytes}.get(dtype, object)
                assert isinstance(found, kind), f"{place}: found {_preview(found)}, expected {kind.__name__}"
            else:
                _compare(np.asarray(found).dtype.name, dtype, f"{place}: dtype")
                sizes = np.shape(found)
                fits = len(sizes) == len(shape) and all(
                    want in (None, size) for want, size in zip(shape, sizes, strict=True)
                )
                assert fits, f"{place}: found shape {sizes}, expected {shape}"
            if not self.is_lossy:
                is_array = holds_numbers(dtype) and value is not None
                expected = np.asarray(value, dtype_of(dtype)) if is_array else value
                _compare(_bits(found), _bits(expected), f"{place} (is_lossy is False)")

    def test_decoded_value_can_be_stored_again(self) -> None:
        """`encoded_value` returns what `encode` stores as the same columns: a conversion changes nothing."""
        feature = self.make_feature()
        for value in self.make_values():
            stored = feature.encode(value)
            again = feature.encode(feature.encoded_value(stored))
            found, expected = (_normal(by_column("value", one)) for one in (again, stored))
            _compare(found, expected, f"columns of {_preview(value)}, stored again")

    def test_equal_features_encode_equally(self) -> None:
        """One that was pickled, as on the way to a worker, is equal to the first, and gives the same columns."""
        feature, pickled = self.make_feature(), pickle.loads(pickle.dumps(self.make_feature()))

        assert pickled == feature, f"feature, pickled: found {pickled!r}, expected it to be equal to {feature!r}"
        _compare(hash(pickled), hash(feature), "hash of the feature, pickled")
        for value in self.make_values():
            found, expected = (_normal(by_column("value", one.encode(value))) for one in (pickled, feature))
            _compare(found, expected, f"columns of {_preview(value)}, from the feature that was pickled")

    def test_block_equals_its_values(self) -> None:
        """`encode_block` gives the columns that `encode` gives for each value."""
        features, values = self._features(), self.make_values()
        keys = [f"{number:04d}" for number in range(len(values))]

        block = features.encode_block({"key": keys, "value": values})

        for number, (key, value) in enumerate(zip(keys, values, strict=True)):
            expected = _normal(features.encode({"key": key, "value": value}))
            found = _normal({name: _row_of(column, number) for name, column in block.items()})
            _compare(found, expected, f"columns of {_preview(value)}, in a block")

    def test_declaration_survives_the_manifest(self) -> None:
        """The arguments, through JSON, make an equal feature."""
        feature = self.make_feature()

        again = type(feature).from_arguments(json.loads(json.dumps(feature.arguments())))

        assert again == feature, f"feature, from its JSON: found {again!r}, expected it to be equal to {feature!r}"

    def test_wrong_value_is_refused(self) -> None:
        """What does not fit is a `SchemaError` that names the field."""
        for value in self.make_wrong_values():
            with _raises(SchemaError, "value", f"encode of {_preview(value)}"):
                self._features().encode({"key": "a", "value": value})

    def test_value_survives_every_format(self, tmp_path: pathlib.Path, format_name: str) -> None:
        """Records of a shard decode to each value: in order, by their numbers, and as a block."""
        features = self._features()
        try:
            shard_format = get_format(format_name).with_features(features)
        except MissingDependencyError as error:
            raise unittest.SkipTest(str(error)) from error
        samples = [{"key": f"{number:04d}", "value": value} for number, value in enumerate(self.make_values())]
        numbers = np.arange(len(samples))

        shard = _MadeShard(tmp_path, shard_format, features, [samples])

        expected = [_bits(features.decode(record)["value"]) for record in shard.records]
        found = [_bits(features.decode(record)["value"]) for record in shard_format.read(shard.path)]
        _compare(found, expected, f"{format_name}: values, in order")
        with contextlib.closing(shard_format.reader(shard.path, shard.offsets)) as reader:
            found = [_bits(features.decode(reader.read(number))["value"]) for number in reversed(numbers.tolist())]
            _compare(found[::-1], expected, f"{format_name}: values, by their numbers")
            block = shard_format.read_block([reader], np.zeros_like(numbers), numbers, features.columns)
        if features.is_flat and block is not None:
            found = [_bits(value) for value in features.decode_block(block)["value"]]
            _compare(found, expected, f"{format_name}: values, as a block")

    def test_value_survives_a_run(self, tmp_path: pathlib.Path) -> None:
        """A finished directory gives each value back, alone and in batches, and verifies."""
        expected = self._write(tmp_path / "out")

        dataset = load(tmp_path / "out")

        _compare([_bits(sample["value"]) for sample in dataset], expected, "values, one by one")
        batches = dataset.to_numpy(batch_size=2)
        found = [_bits(value) for batch in batches for value in batch["value"]]
        _compare(found, expected, "values of batches")
        report = verify(tmp_path / "out", deep=True)
        assert report.ok, f"found {report}, expected that the directory verifies"

    def test_sidecars_describe_its_columns(self) -> None:
        """TFDS finds an entry for each; Hugging Face and Croissant a type, or nothing, for that of the Arrow column."""
        feature = self.make_feature()

        _compare(set(tfds_entries(feature, "value")), set(feature.columns("value")), "columns with an entry for TFDS")
        card, kind = hugging_face_type(feature), croissant_type(feature)
        assert card is None or isinstance(card, str | dict), f"Hugging Face: found {card!r}, expected str, dict or None"
        assert kind is None or isinstance(kind, str), f"Croissant: found {kind!r}, expected a str or None"

    def test_tf_data_gives_the_same_values(self, tmp_path: pathlib.Path) -> None:
        """`to_tf` decodes as `load` does."""
        if importlib.util.find_spec("tensorflow") is None:
            raise unittest.SkipTest("TensorFlow is not installed")
        expected = self._write(tmp_path / "out")

        found = [sample["value"].numpy() for sample in load(tmp_path / "out").to_tf()]

        values = [as_read({"value": value}, self._features())["value"] for value in found]
        _compare([_bits(value) for value in values], expected, "values of tf.data")

    def _features(self) -> Features:
        return Features({"value": self.make_feature()})

    def _write(self, output: pathlib.Path) -> list[Any]:
        """Write the values, and return the bits of what each decodes to."""
        feature, values = self.make_feature(), self.make_values()
        if type(feature).__module__.partition(".")[0] != __name__.partition(".")[0]:
            register_feature(type(feature))
        Materializer(_Given(feature, values), "", output).run(executor=InlineExecutor(), progress=False)
        order = [int(str(sample["key"])) for sample in load(output)]
        return [_bits(feature.decode(feature.encode(values[number]))) for number in order]


def _kind_of(column: Any) -> str:
    return (
        column.dtype.name if isinstance(column, np.ndarray) else "bytes_list" if isinstance(column, list) else "bytes"
    )


def _row_of(column: Any, number: int) -> Any:
    """Return one row of a column of a block, as `encode` gives it."""
    found = column[number]
    if isinstance(found, np.ndarray | np.generic):
        found = np.ravel(found)
        return found.tolist() if found.dtype == object else found
    return found


def _bits(value: Any) -> Any:
    """Return a value in a form that compares: an array or number by its bits."""
    if isinstance(value, list):
        return [_bits(item) for item in value]
    is_plain = value is None or type(value) in {str, bytes, dict, list, bool, int, float}
    return value if is_plain else _plain({"": np.asarray(value)})[""]


# ---------------------------------------------------------------- shard formats


PIXELS = np.random.default_rng(0).integers(0, 256, (8, 6, 4), np.uint8)
BOXES = np.array([[0, 0.25, 0.5, 1], [0.1, 0.1, 0.3, 0.7]], np.float32)
DEEP = np.random.default_rng(1).integers(0, 65536, (8, 6, 3), np.uint16)
PEOPLE = np.array([[[1.5, -2, 2], [0, 0, 0]]], np.float32)
ROTATED = np.array([[5, 4, 3, 2, -30.5]], np.float32)
METRES = np.array([[0.0, 65.535, np.nan], [np.inf, np.finfo(np.float32).tiny, -1.0]], np.float32)


def extremes(dtype: str) -> Any:
    """Return the bounds of a dtype, and values at odd places between them."""
    kind = dtype_of(dtype).kind
    if kind in "iu":
        return np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 7], dtype)
    if kind == "b":
        return np.array([True, False, True])
    if dtype == "bfloat16":  # among them the smallest and the largest, infinity and NaN
        return np.array([0x3DCD, 0x8000, 0x7F80, 0x7FC0, 0x0001, 0x7F7F], np.uint16).view(dtype_of(dtype))
    values = [0.1, -0.0, np.inf, np.nan, np.finfo(dtype).tiny, np.finfo(dtype).max]
    return np.array(values, dtype) + (1j if kind == "c" else 0) * np.array(1, dtype)


NUMBERS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]
NUMBERS += ["bfloat16"] if importlib.util.find_spec("ml_dtypes") else []

CASES: dict[str, tuple[Feature, list[Any]]] = {
    "png": (Image((8, 6, 3)), [encode_png(PIXELS[..., :3]), encode_png(PIXELS[..., :3] // 2)]),
    "jpeg": (Image((8, 6, 3)), [encode_jpeg(PIXELS[..., :3])]),
    "either": (Image((8, 6, 3)), [encode_png(PIXELS[..., :3]), encode_jpeg(PIXELS[..., :3])]),
    "mask": (Mask((8, 6)), [encode_png(PIXELS[..., 0] % 3)]),
    "grey and alpha": (Image((8, 6, 2)), [PIXELS[..., :2]]),
    "16 bits": (Image((None, None, 3), dtype="uint16"), [DEEP, DEEP[:2, :3]]),
    "many ids": (Mask((None, None), dtype="uint16"), [DEEP[..., 0], encode_png(DEEP[..., 1])]),
    "millimetres": (Depth(), [DEEP[..., 0], encode_png(DEEP[..., 1])]),
    "points": (Keypoints(), [BOXES[:, :2] * 9, np.zeros((0, 2), np.float32)]),
    "people": (Keypoints((None, 2, 3)), [PEOPLE, PEOPLE[:0]]),
    "polygons": (Polygons(), [[[[0, 0], [4, 0], [0.5, 4]], [], [5, 5, 9, 5, 9, 9, 5, 9]], [], [[]]]),
    "rotated boxes": (BBoxes(rotated=True), [ROTATED, ROTATED[:0]]),
    "metres": (Depth(dtype="float32"), [METRES]),
    "label": (ClassLabel(num_classes=5), [0, 4]),
    "labels": (ClassLabel(num_classes=5, shape=(None,)), [[], [4], [0, 1, 2, 3, 4]]),
    "two labels": (ClassLabel(num_classes=5, shape=(2,)), [[0, 4], [1, 1]]),
    "boxes": (BBoxes(), [np.zeros((0, 4), np.float32), BOXES, BOXES[:1]]),
    "text": (Text(), ["", "größer – 日本語 \U0001f600", 'a "quote"\n\0 and \\ more', "x" * 5000]),
    "bytes": (Bytes(), [b"", b"\0\xff\0", b"x" * 5000]),
    "json": (Json(), [None, {"b": [1, 0.5, {"größe": "\0 \\ \U0001f600"}], "a": {}}, [], "text", 2**70]),
    "moments": (Timestamp("UTC"), [np.datetime64(n, "us") for n in (1 - 2**63, -1, 0, 2**63 - 1)]),
    "times": (Timestamp(), [np.datetime64("2026-11-23T12:00")]),
    "tokens": (Tokens(vocab_size=50_257), [[0, 50_256, 7], [], [256] * 3000]),
    **(
        {"audio": (Audio(8_000), [np.sin(np.arange(2 * n, dtype=np.float32)).reshape(-1, 2) for n in (0, 1, 900)])}
        if importlib.util.find_spec("soundfile")
        else {}
    ),
    **(
        {"video": (Video(fps=10), [DEEP.astype(np.uint8)[None, ..., :3], np.zeros((3, 9, 7, 3), np.uint8)])}
        if importlib.util.find_spec("av")
        else {}
    ),
    **{f"scalar {dtype}": (Scalar(dtype), list(extremes(dtype))) for dtype in NUMBERS},
    **{f"fixed {dtype}": (Tensor((3,), dtype), [extremes(dtype)[:3], extremes(dtype)[-3:]]) for dtype in NUMBERS},
    **{f"open {dtype}": (Tensor((None,), dtype), [extremes(dtype)[:n] for n in (0, 1, 3)]) for dtype in NUMBERS},
    **{f"raw {dtype}": (Tensor((None,), dtype, "raw"), [extremes(dtype)[:n] for n in (0, 3)]) for dtype in NUMBERS},
    "matrix": (Tensor((2, 3), "int32"), [np.arange(6, dtype=np.int32).reshape(2, 3)]),
    "matrices": (Tensor((None, 2, 3), "int16"), [np.arange(6 * n, dtype=np.int16).reshape(n, 2, 3) for n in (2, 0)]),
    "open inside": (Tensor((2, None), "float32"), [np.ones((2, n), np.float32) for n in (3, 0)]),
    "open twice": (Tensor((None, 2, None), "int32"), [np.ones((2, 2, 3), np.int32), np.ones((0, 2, 5), np.int32)]),
    "no numbers": (Tensor((None, 0), "float32"), [np.zeros((4, 0), np.float32), np.zeros((0, 0), np.float32)]),
    "large": (Tensor((50_000,), "float32"), [np.arange(50_000, dtype=np.float32)]),
}
"""Features and values of them, the extremes included, by name of the case."""

ODD_KEYS = [
    *("plain", "größe/日本語", "a.b.c", "%2E", "../../etc/passwd", "/abs", "end/", "two//slashes", "__meta__/x"),
    *("name#0", "with space", "tab\tnew\nline", "back\\slash", "x" * 300, "ü" * 60, "d/" * 80 + "deep.name", "."),
]

IMAGES = [encode_png(np.roll(PIXELS[..., :3], shift)) for shift in range(7)]
MIXED = Features(
    {"image": Image((8, 6, 3)), "label": ClassLabel(num_classes=500), "boxes": BBoxes(), "caption": Text()}
)
TABLE = Features({"label": ClassLabel(num_classes=500), "x": Scalar("float64"), "caption": Text()})


def mixed(number: int) -> Sample:
    """Return a sample of `MIXED`, different from all others."""
    return {
        "key": f"sample {number:05d}",
        "image": IMAGES[number % len(IMAGES)],
        "label": number % 500,
        "boxes": BOXES[: number % 3],
        "caption": f"number {number} " * (number % 5),
    }


def _normal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in a form that compares: numbers by their bits."""
    return {
        name: (value.dtype.name, value.tobytes())
        if isinstance(value, np.ndarray)
        else bytes(value if isinstance(value, bytes) else b"".join(value))
        for name, value in record.items()
    }


def _append_each(writer: ShardWriter, records: Sequence[Mapping[str, Any]]) -> None:
    for record in records:
        writer.append(record)


def _append_as_block(writer: ShardWriter, records: Sequence[Mapping[str, Any]]) -> None:
    block = {name: [record[name] for record in records] for name in TABLE.columns}
    writer.append_block({**block, "label": np.concatenate(block["label"])})


class _MadeShard:
    """A shard that was made as a run makes it: parts by writers, then joined or assembled.

    Args:
        folder: folder that its files go into.
        shard_format: format of the shard, bound to its features.
        features: schema of the samples, which encodes them.
        parts: the samples of each part, in order.
        append: appends the records of a part to its writer.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        shard_format: ShardFormat,
        features: Features,
        parts: Sequence[Iterable[Sample]],
        append: Callable[[ShardWriter, Sequence[Mapping[str, Any]]], None] = _append_each,
    ) -> None:
        self.format = shard_format
        self.features = features
        self.records: list[Any] = []
        self.path = folder / f"data-train-00000-of-00001.{shard_format.extension}"
        self.parts: list[pathlib.Path] = []
        written = []
        for number, part in enumerate(parts):
            records = [features.encode(sample) for sample in part]
            self.parts.append(folder / f"{number:05d}.part")
            offsets = self.write_part(self.parts[-1], records, append)
            self.records += records
            written.append((offsets, self.parts[-1].stat().st_size))
        self.offsets = self.assemble(written)

    def write_part(
        self,
        path: pathlib.Path,
        records: Sequence[Mapping[str, Any]],
        append: Callable[[ShardWriter, Sequence[Mapping[str, Any]]], None] = _append_each,
    ) -> Offsets:
        with open(path, "wb", buffering=0) as file:
            writer = self.format.writer(file, self.features.columns)
            append(writer, records)
            _compare(writer.num_records, len(records), "num_records of the writer")
            offsets = writer.finish()
            _compare(writer.num_bytes, file.tell(), "num_bytes of the writer")
        _compare(len(offsets), len(records), "number of offsets of the part")
        return offsets

    def assemble(self, written: Sequence[tuple[Offsets, int]]) -> Offsets:
        if self.format.joins_parts:
            sizes = [size for _, size in written]
            self.path.write_bytes(b"".join(part.read_bytes() for part in self.parts))
            with open(self.path, "rb") as file:
                starts = itertools.accumulate(sizes, initial=0)
                trailer = self.format.trailer(file, list(zip(starts, sizes, strict=False)))
            with open(self.path, "ab") as file:
                file.write(trailer)
            return Offsets.joined(written)
        assembler = self.format.assembler(self.path)
        for part in self.parts:
            assembler.add(part)
        offsets = assembler.finish()
        assembler.close()
        return offsets

    def keys(self) -> list[str]:
        return [bytes(record["key"][0]).decode() for record in self.format.read(self.path)]

    def read(self) -> list[dict[str, Any]]:
        return [_normal(record) for record in self.format.read(self.path)]


class ShardFormatConformance:
    """What every `ShardFormat` does: records come back bit for bit, and damage is found and named.

    Attributes:
        hides_cuts: whether the bytes of a shard are the same wherever its parts began.
        shows_missing_tail: whether a file that lacks whole records at its end is refused.
    """

    hides_cuts: ClassVar[bool] = True
    shows_missing_tail: ClassVar[bool] = True

    def make_format(self) -> ShardFormat:
        """Return the format."""
        raise NotImplementedError(f"{type(self).__name__}: define make_format(self)")

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Let pytest run a test that asks for a case once with each."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", list(CASES))

    def test_every_feature_type_survives(self, tmp_path: pathlib.Path, case: str) -> None:
        """Values come back bit by bit, in order and one by one, and decode to what they were."""
        feature, values = CASES[case]
        features = Features({"value": feature})
        samples = [{"key": f"k{number}", "value": value} for number, value in enumerate(values)]

        shard = self._make(tmp_path, features, samples)

        expected = [_normal(record) for record in shard.records]
        _compare(shard.read(), expected, f"{case}: records of the file")
        reader = shard.format.reader(shard.path, shard.offsets)
        by_number = [_normal(reader.read(number)) for number in range(len(samples))]
        _compare(by_number, expected, f"{case}: records by their numbers")
        for written, record in zip(shard.records, shard.format.read(shard.path), strict=True):
            kinds = {
                name: value.dtype.name if isinstance(value, np.ndarray) else "bytes" for name, value in record.items()
            }
            wanted = {name: "bytes" if kind == "bytes_list" else kind for name, kind in features.columns.items()}
            _compare(kinds, wanted, f"{case}: kinds of the columns")
            found, expected = (_bits(features.decode(one)["value"]) for one in (record, written))
            _compare(found, expected, f"{case}: value")

    def test_shard_without_records_is_valid(self, tmp_path: pathlib.Path) -> None:
        """Neither a part nor a shard without records is an error; both are read as nothing."""
        shard = self._make(tmp_path, MIXED, [], [])

        _compare(shard.read(), [], "records of an empty shard")
        _compare(len(shard.offsets), 0, "offsets of an empty shard")
        with open(shard.path, "rb") as file:
            _compare(len(shard.format.find_offsets(file, path="s")), 0, "offsets that reading finds")
        shard.format.reader(shard.path, shard.offsets).close()

    def test_records_keep_their_order(self, tmp_path: pathlib.Path) -> None:
        """Records stand in the order in which they were appended, whatever part they were in."""
        shard = self._make(tmp_path, MIXED, *(map(mixed, range(start, start + 40)) for start in range(0, 200, 40)))

        _compare(shard.keys(), [f"sample {number:05d}" for number in range(200)], "keys of five parts")

    def test_offsets_cover_every_record(self, tmp_path: pathlib.Path) -> None:
        """There is one for each record, they lie in the file, and reading the file finds the same."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(30)), [], map(mixed, range(30, 150)))

        offsets = shard.offsets

        _compare(len(offsets), 150, "number of offsets")
        end, size = int((offsets.offset + offsets.size).max()), shard.path.stat().st_size
        assert end <= size, f"offsets: found a record that ends at {end}, expected at most {size}, the file's size"
        assert (np.diff(offsets.offset.astype(np.int64)) >= 0).all(), "offsets: found a smaller one behind a larger"
        _compare(Offsets.from_text(offsets.to_text()), offsets, "offsets, through text")
        with open(shard.path, "rb") as file:
            _compare(shard.format.find_offsets(file, path="s"), offsets, "offsets that reading the file finds")

    def test_records_are_read_in_any_order(self, tmp_path: pathlib.Path) -> None:
        """A reader gives any record by its number, in several threads and in a forked child."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(70)), map(mixed, range(70, 150)))
        numbers = random.Random(0).sample(range(150), 150)
        expected = [_normal(shard.records[number]) for number in numbers]
        reader = shard.format.reader(shard.path, shard.offsets)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = [_normal(record) for record in pool.map(reader.read, numbers)]
        in_child = _call_in_fork(lambda: [_normal(reader.read(number)) for number in numbers[:5]])

        _compare(found, expected, "records read in four threads")
        _compare(in_child, expected[:5], "records read in a forked child")
        reader.close()

    def test_odd_keys_survive(self, tmp_path: pathlib.Path) -> None:
        """Keys of any script and length, with every character that means something to paths, come back."""
        samples = [{**mixed(number), "key": key} for number, key in enumerate(ODD_KEYS)]

        shard = self._make(tmp_path, MIXED, samples)

        _compare(shard.keys(), ODD_KEYS, "keys")
        _compare(shard.read(), [_normal(record) for record in shard.records], "records")

    def test_cuts_between_parts_do_not_show(self, tmp_path: pathlib.Path) -> None:
        """However records are cut into parts, the records and, where promised, bytes and offsets are the same."""
        whole = self._make(tmp_path, MIXED, map(mixed, range(150)))

        for cuts in ([1, 2, 100], [0, 63, 64, 65, 128], [149], list(range(150))):
            parts = [map(mixed, range(*bounds)) for bounds in itertools.pairwise([0, *cuts, 150])]
            shard = self._make(tmp_path, MIXED, *parts)

            place = f"shard of {len(parts)} parts"
            _compare(shard.read(), whole.read(), f"{place}: records")
            if self.hides_cuts:
                _compare(shard.path.read_bytes(), whole.path.read_bytes(), f"{place}: bytes (hides_cuts is True)")
                _compare(shard.offsets, whole.offsets, f"{place}: offsets (hides_cuts is True)")

    def test_blocks_and_single_records_make_the_same_shard(self, tmp_path: pathlib.Path) -> None:
        """A table given by columns is the same file as the same rows given one by one."""
        samples = [{"key": f"row{n}", "label": n % 500, "x": n / 7, "caption": "é" * (n % 9)} for n in range(10_000)]
        by_rows = self._make(tmp_path, TABLE, samples[:9000], samples[9000:])

        by_blocks = self._make(tmp_path, TABLE, samples[:9000], samples[9000:], append=_append_as_block)

        _compare(by_blocks.path.read_bytes(), by_rows.path.read_bytes(), "bytes of blocks beside those of records")
        _compare(by_blocks.offsets, by_rows.offsets, "offsets of blocks beside those of records")

    def test_truncated_file_is_noticed(self, tmp_path: pathlib.Path) -> None:
        """A file cut at any place is an error, or at least has fewer records than the manifest counts."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(20)))
        data = shard.path.read_bytes()
        torn = shard.path.with_suffix(".torn")
        ends = {int(offset) for offset in shard.offsets.offset}

        for length in sorted({*range(0, len(data), max(len(data) // 60, 1)), len(data) - 1, *ends}):
            torn.write_bytes(data[:length])
            place = f"file of {len(data)} bytes, cut to {length}"
            if self.shows_missing_tail or length not in ends:
                with _raises(CorruptDataError, r"torn.*(record \d+ at byte|columns)", place):
                    list(shard.format.read(torn))
            else:
                num_records = len(list(shard.format.read(torn)))
                assert num_records < 20, f"{place}: found {num_records} records, expected fewer than 20"

    def test_no_record_is_read_wrong(self, tmp_path: pathlib.Path) -> None:
        """A flipped bit is an error that names file and record, or changes no record."""
        if not self.make_format().has_checksums:
            raise unittest.SkipTest("the format has no checksums of its data; the manifest's digest shows damage")
        shard = self._make(tmp_path, MIXED, map(mixed, range(20)))
        data, expected = shard.path.read_bytes(), shard.read()
        damaged = shard.path.with_suffix(".damaged")
        rng = random.Random(1)
        num_noticed = 0

        for _ in range(150):
            place = rng.randrange(int(shard.offsets.offset[-1] + shard.offsets.size[-1]))
            flipped = bytearray(data)
            flipped[place] ^= 1 << rng.randrange(8)
            damaged.write_bytes(flipped)
            found, message = _outcome(shard.format, damaged)
            num_noticed += bool(message)
            if "damaged" not in message:
                _compare(found, expected, f"records of a file with a flipped bit in byte {place}")

        assert num_noticed > 100, f"flipped bits: found {num_noticed} of 150 noticed, expected more than 100"

    def test_other_files_are_refused(self, tmp_path: pathlib.Path) -> None:
        """A missing file is `FileNotFoundError`; one of another kind is reported as damaged, by name."""
        shard = self._make(tmp_path, MIXED, [mixed(0)])
        other = tmp_path / "other"
        other.write_bytes(random.Random(0).randbytes(100_000))

        with _raises(FileNotFoundError, "nothing", "reader of a missing file"):
            shard.format.reader(tmp_path / "nothing", shard.offsets)
        with _raises(CorruptDataError, "other", "reader of a file of another kind"):
            shard.format.reader(other, shard.offsets).read(0)
        with _raises(CorruptDataError, "other", "read of a file of another kind"):
            list(shard.format.read(other))

    def test_wrong_record_is_refused_and_leaves_no_trace(self, tmp_path: pathlib.Path) -> None:
        """A record with other columns or types is a `SchemaError`; the writer then takes the next one."""
        shard = self._make(tmp_path, MIXED, [mixed(0), mixed(1)])
        first, second = shard.records
        wrong: dict[str, dict[str, Any]] = {
            "missing \\['label'\\]": {name: value for name, value in second.items() if name != "label"},
            "column 'label' holds list": {**second, "label": [1]},
            "column 'image' holds": {**second, "image": np.array([1])},
        }
        with open(tmp_path / "part", "wb", buffering=0) as file:
            writer = shard.format.writer(file, MIXED.columns)
            writer.append(first)
            for pattern, record in wrong.items():
                with _raises(SchemaError, pattern, "append of a wrong record"):
                    writer.append(record)
            writer.append(second)
            writer.finish()

        _compare((tmp_path / "part").read_bytes(), shard.parts[0].read_bytes(), "bytes of a part that refused records")
        late: tuple[Callable[[], Any], ...] = (
            lambda: writer.append(first),
            lambda: writer.append_block(
                {name: [part] if isinstance(part, bytes) else part[None] for name, part in first.items()}
            ),
            writer.finish,
        )
        for call in late:
            with _raises(OptionError, "finish was called", "call of a writer that has finished"):
                call()

    def test_arrays_of_a_record_may_be_filled_again(self, tmp_path: pathlib.Path) -> None:
        """What happens to the arrays of a record after `append` has returned does not matter."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(30)))

        def append(writer: ShardWriter, records: Sequence[Mapping[str, Any]]) -> None:
            for record in records:
                lent = {
                    name: value.copy() if isinstance(value, np.ndarray) else value for name, value in record.items()
                }
                writer.append(lent)
                for value in lent.values():
                    if isinstance(value, np.ndarray):
                        value[...] = 0

        shard.write_part(tmp_path / "again", shard.records, append)

        _compare((tmp_path / "again").read_bytes(), shard.parts[0].read_bytes(), "bytes of a part of lent arrays")

    def test_records_can_be_written_as_they_were_read(self, tmp_path: pathlib.Path) -> None:
        """Records from a reader, whose bytes are in lists, go into another part unchanged."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(30)))

        shard.write_part(tmp_path / "again", list(shard.format.read(shard.path)))

        _compare((tmp_path / "again").read_bytes(), shard.parts[0].read_bytes(), "bytes of a part written from a shard")

    def test_equal_formats_write_equal_bytes(self, tmp_path: pathlib.Path) -> None:
        """A format that was pickled, as on the way to a worker, writes the same; its options survive JSON."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(30)))

        pickled = pickle.loads(pickle.dumps(shard.format))
        again = _MadeShard(shard.path.parent, pickled, MIXED, [map(mixed, range(30))])

        _compare(again.path.read_bytes(), shard.path.read_bytes(), "bytes of a format that was pickled")
        options = shard.format.options()
        _compare(json.loads(json.dumps(options)), options, "options, through JSON")

    def test_part_can_be_assembled_again(self, tmp_path: pathlib.Path) -> None:
        """A run that was killed while it assembled starts over, on what the killed one left."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(60)), map(mixed, range(60, 100)))
        self._skip_where_parts_are_joined(shard)
        data = shard.path.read_bytes()
        left = shard.format.assembler(shard.path)
        left.add(shard.parts[0])
        left.close()
        left.close()

        offsets = shard.assemble([])

        _compare(shard.path.read_bytes(), data, "bytes of a shard assembled again")
        _compare(offsets, shard.offsets, "offsets of a shard assembled again")

    def test_torn_part_is_refused(self, tmp_path: pathlib.Path) -> None:
        """A part that lacks its end is named, and does not become half a shard."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(60)))
        self._skip_where_parts_are_joined(shard)
        shard.parts[0].write_bytes(shard.parts[0].read_bytes()[:-100])

        with (
            contextlib.closing(shard.format.assembler(shard.path)) as assembler,
            _raises(CorruptDataError, r"00000\.part: not ", "add of a part that lacks its end"),
        ):
            assembler.add(shard.parts[0])

    def _make(self, tmp_path: pathlib.Path, features: Features, *parts: Iterable[Sample], **options: Any) -> _MadeShard:
        folder = tmp_path / f"shard{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return _MadeShard(folder, self.make_format().with_features(features), features, parts, **options)

    @staticmethod
    def _skip_where_parts_are_joined(shard: _MadeShard) -> None:
        if shard.format.joins_parts:
            raise unittest.SkipTest("parts of the format are joined byte for byte")


def _outcome(shard_format: ShardFormat, path: pathlib.Path) -> tuple[list[dict[str, Any]], str]:
    """Return the records of a file, or the message about its damage."""
    try:
        return [_normal(record) for record in shard_format.read(path)], ""
    except CorruptDataError as error:
        return [], str(error)


def _call_in_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked child."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sending, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


# ---------------------------------------------------------------- folders

_FOLDER_FILES = {
    "manifest.json": b"{}",
    "empty": b"",
    "_index/train.index": bytes(range(256)) * 2000,
    "_index/deep/er": b"deep",
    "indexed": b"not in _index",
}


class FolderConformance:
    """What every `Folder` does: it gives the bytes that were asked for, keeps those that were written, or says why not.

    Attributes:
        secrets: texts that no message may show, such as those among the options of the folder.
        is_writable: whether the folder can be written.
        large_bytes: size of a large file; more than what the folder sends at once, where it sends large files in parts.
    """

    secrets: ClassVar[Sequence[str]] = ()
    is_writable: ClassVar[bool] = True
    large_bytes: ClassVar[int] = 3 << 20

    def make_folder(self, files: Mapping[str, bytes], tmp_path: pathlib.Path) -> Folder:
        """Return a folder that holds these files, by name, and no others."""
        raise NotImplementedError(f"{type(self).__name__}: define make_folder(self, files, tmp_path)")

    def test_files_are_read(self, tmp_path: pathlib.Path) -> None:
        """Whole, in blocks, and by their sizes."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        for name, content in _FOLDER_FILES.items():
            _compare(folder.read(name, 1 << 20), content, f"{name}: content")
            _compare(
                folder.read_if_there(name, len(content)), content, f"{name}: content of a file of the largest size"
            )
            _compare(b"".join(folder.blocks(name, len(content))), content, f"{name}: its blocks, joined")
            _compare(getattr(folder.stat(name), "num_bytes", None), len(content), f"{name}: size")

    def test_file_that_is_too_long_is_refused(self, tmp_path: pathlib.Path) -> None:
        """`read` names it; its blocks go beyond the limit, so that whoever counts them notices."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        with _raises(CorruptDataError, "manifest.json", "a file of 2 bytes that may have 1"):
            folder.read("manifest.json", 1)
        found = sum(map(len, folder.blocks("_index/train.index", 100)))
        assert found > 100, f"blocks of a file that is too long: found {found} bytes, expected more than 100"

    def test_range_is_exactly_what_was_asked_for(self, tmp_path: pathlib.Path) -> None:
        """Wherever it lies; where the file ends before it does, it is refused and not cut."""
        folder, name = self.make_folder(_FOLDER_FILES, tmp_path), "_index/train.index"
        content = _FOLDER_FILES[name]
        size = len(content)
        for start, stop in [(0, 1), (10, 300_000), (size - 3, size), (0, size), (5, 5)]:
            _compare(folder.read_range(name, start, stop).content, content[start:stop], f"bytes {start} to {stop}")
        for start, stop in [(size - 3, size + 1), (size, size + 1), (size + 10, size + 20)]:
            with _raises(DatamatError, re.escape(name), f"bytes {start} to {stop} of {size}"):
                folder.read_range(name, start, stop)

    def test_range_says_its_version(self, tmp_path: pathlib.Path) -> None:
        """That of the file that it is from, and another once the file was replaced; or none, where no answer tells."""
        folder = self.make_folder({"file": b"one"}, tmp_path)
        first = folder.read_range("file", 0, 2).version
        if first:
            _compare(first, getattr(folder.stat("file"), "version", None), "version of a range")
        if self.is_writable:
            written = folder.write("file", b"two")
            again = folder.read_range("file", 1, 3).version
            _compare(again, written if first else "", "version of a range of a file that was replaced")

    def test_file_that_is_not_there_is_said_to_be_absent(self, tmp_path: pathlib.Path) -> None:
        """That is told from all other errors, and the message names the file."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        for name in ("nothing", "nothing/at/all", "_index/nothing"):
            for use in (
                lambda name: folder.read(name, 10),
                lambda name: list(folder.blocks(name, 10)),
                lambda name: folder.read_range(name, 0, 1),
            ):
                with _raises(AbsentError, re.escape(name), f"{name}, which is not there"):
                    use(name)
            assert folder.read_if_there(name, 10) is None, f"{name}: found a file, expected None"
        for name in ("nothing", "nothing/at/all", "_index"):
            assert folder.stat(name) is None, f"{name}: found the size of a file, expected None"

    def test_names_are_listed(self, tmp_path: pathlib.Path) -> None:
        """Sorted, of a folder or of all below it; or not at all."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        if folder.list() is None:
            assert folder.list(deep=True) is None, "found names of all files, and none of those at the top"
            return
        _compare(_names(folder), ["empty", "indexed", "manifest.json"], "names")
        _compare(_names(folder, deep=True), sorted(_FOLDER_FILES), "names of all files")
        _compare(_names(folder, "_index"), ["train.index"], "names in _index")
        _compare(_names(folder, "_index", deep=True), ["deep/er", "train.index"], "names below _index")
        _compare(_names(folder, "nothing"), [], "names in a folder that is not there")
        _compare(_names(folder.child("_index"), "deep"), ["er"], "names in a folder of a folder")
        for name, found in (folder.list(deep=True) or {}).items():
            told = folder.stat(name)
            assert found in (told, told and told._replace(version="")), f"{name}: listed as {found}, expected {told}"

    def test_folder_in_a_folder_holds_its_files(self, tmp_path: pathlib.Path) -> None:
        """By their names below it."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        _compare(folder.child("_index").read("deep/er", 10), b"deep", "_index, deep/er")
        place = folder.child("_index").place("deep/er")
        _compare(place, folder.place("_index/deep/er"), "place of a file in a folder of the folder")

    def test_names_do_not_leave_the_folder(self, tmp_path: pathlib.Path) -> None:
        """They may come from somebody's manifest."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path).child("_index")
        for name in (
            "../manifest.json",
            "deep/../../manifest.json",
            "/etc/hostname",
            "",
            ".",
            "deep//er",
            "deep/",
            "a\0",
        ):
            for use in (
                lambda name: folder.read(name, 10),
                lambda name: folder.read_range(name, 0, 1),
                lambda name: folder.write(name, b""),
                lambda name: folder.write_file(name, __file__),
                folder.delete,
                folder.stat,
                folder.child,
            ):
                with _raises(OptionError, "", f"the name {name!r}"):
                    use(name)

    def test_odd_names_are_names(self, tmp_path: pathlib.Path) -> None:
        """Blanks, signs and letters of any language are read and written as they are."""
        files = {name: name.encode() for name in ("a b", "ü/é", "100%", "a%20b", "a+b&c", "'", "q#x", "x" * 200)}
        folder = self.make_folder(files, tmp_path)
        for name, content in files.items():
            _compare(folder.read(name, 1000), content, f"content of {name!r}")
        if folder.list() is not None:
            _compare(_names(folder, deep=True), sorted(files), "names")
        if self.is_writable:
            folder = folder.child("written")
            for name, content in files.items():
                folder.write(name, content)
            _compare({name: folder.read(name, 1000) for name in _names(folder, deep=True)}, files, "what was written")

    def test_local_path_leads_to_the_file(self, tmp_path: pathlib.Path) -> None:
        """Where there is one."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        path = folder.local_path("_index/train.index")
        assert (path is None) == (folder.local_path() is None), "found a path of the file or of the folder, not of both"
        if path is not None:
            _compare(path.read_bytes(), _FOLDER_FILES["_index/train.index"], "content of the file at local_path")

    def test_copy_reads_and_shows_no_secret(self, tmp_path: pathlib.Path) -> None:
        """It travels to other processes; neither its name nor an error holds what opens the door."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        _compare(pickle.loads(pickle.dumps(folder)).read("manifest.json", 10), b"{}", "content, read by a pickled copy")
        said = f"{folder} {folder!r} {folder.place('manifest.json')}"
        try:
            folder.read("nothing", 10)
        except AbsentError as error:
            said += f"{error} {error.__cause__!r} {error.__context__!r}"
        try:
            folder.write("manifest.json", b"", ReplaceIf("nonsense"))
        except DatamatError as error:
            said += f"{error} {error.__cause__!r} {error.__context__!r}"
        shown = [secret for secret in self.secrets if secret in said]
        assert not shown, f"found {shown} in a message, expected no secret"

    def test_forked_process_reads(self, tmp_path: pathlib.Path) -> None:
        """So do threads of it, and its parent afterwards."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        folder.read("manifest.json", 10)
        _in_forks(_read_in_threads, folder)
        _read_in_threads(folder)

    # ------------------------------------------------------------ writing

    def test_written_file_is_there(self, tmp_path: pathlib.Path) -> None:
        """With the size and version that the write returned; each further content has another version."""
        folder = self.make_folder({} if self.is_writable else {"a": b""}, tmp_path)
        if not self.is_writable:
            for refused in (lambda: folder.write("a", b""), lambda: folder.delete("a"), lambda: folder.copy("a", "b")):
                with _raises(OptionError, "can be read, not written", "a write"):
                    refused()
            return
        versions = set()
        for content in (b"one", b"two", b"", b"one more", bytes(range(256)) * 4000):
            version = folder.write("new/deep/file", content)
            versions.add(version)
            _compare(folder.stat("new/deep/file"), Stat(len(content), version), "size and version of a written file")
            _compare(folder.read("new/deep/file", 1 << 20), content, "content of a written file")
        _compare(len(versions), 5, "distinct versions of a file that was written five times")
        _compare(_names(folder, deep=True), ["new/deep/file"], "names after writing")

    def test_file_is_whole_whenever_it_is_read(self, tmp_path: pathlib.Path) -> None:
        """While it is replaced again and again, readers find one content or the other."""
        if not self.is_writable:
            return
        contents = [bytes([number]) * (100_000 * (number + 1)) for number in range(2)]
        folder = self.make_folder({"file": contents[0]}, tmp_path)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            writing = pool.submit(lambda: [folder.write("file", contents[number % 2]) for number in range(20)])
            is_done = False
            while not is_done:
                is_done = writing.done()
                found = folder.read("file", 1 << 20)
                assert found in contents, f"found {len(found)} bytes of a file while it is replaced, expected all"
            writing.result()

    def test_file_is_created_once(self, tmp_path: pathlib.Path) -> None:
        """Whoever comes later is refused, in any thread or process; content tells whether a lost answer was ours."""
        if not self.is_writable:
            return
        folder = self.make_folder({}, tmp_path)
        folder.write("file", b"one", "create")
        with _raises(ExistsError, "file", "a second creation"):
            folder.write("file", b"two", "create")
        for content, expected in [(b"one", True), (b"two", False), (b"o", False), (b"one more", False)]:
            _compare(create_once(folder, "file", content), expected, f"creation of {content!r} over b'one'")
        _compare(folder.read("file", 10), b"one", "content of a file that was created once")
        if "create" not in folder.keeps:
            return
        _in_forks(_create, folder, () if folder.is_private else range(4))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(_create, [folder] * 4, range(4, 8)))
        won = [name for name in _names(folder) if name.startswith("won")]
        _compare(won, [f"won by {folder.read('race', 10).decode()}"], "who created a file that eight wanted to create")

    def test_version_is_replaced_once(self, tmp_path: pathlib.Path) -> None:
        """Whoever names another version than the last is refused; so is each but one of several that name the last."""
        if not self.is_writable:
            return
        folder = self.make_folder({}, tmp_path)
        first = folder.write("file", b"one")
        last = folder.write("file", b"two", ReplaceIf(first))
        for name, version in [("file", first), ("file", "nonsense"), ("file", ""), ("nothing", last)]:
            with _raises(ChangedError, name, f"a replacement of the version {version!r}"):
                folder.write(name, b"three", ReplaceIf(version))
        _compare(
            (folder.read("file", 10), folder.stat("nothing")), (b"two", None), "content after refused replacements"
        )

        def replace(number: int) -> str:
            with contextlib.suppress(ChangedError):
                return folder.write("file", str(number).encode(), ReplaceIf(last))
            return ""

        if "replace_if" in folder.keeps:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                won = [number for number, version in enumerate(pool.map(replace, range(8))) if version]
            _compare(won, [int(folder.read("file", 10))], "who replaced a version that eight wanted to replace")

    def test_file_of_the_disk_is_written(self, tmp_path: pathlib.Path) -> None:
        """Of any size, on the conditions of every write."""
        if not self.is_writable:
            return
        folder = self.make_folder({}, tmp_path)
        for name, size in (("small", 10), ("empty", 0), ("large", self.large_bytes)):
            content = random.Random(size).randbytes(size)
            (tmp_path / name).write_bytes(content)
            version = folder.write_file(f"to/{name}", tmp_path / name, "create")
            _compare(folder.stat(f"to/{name}"), Stat(size, version), f"{name}: size and version")
            _compare(folder.read(f"to/{name}", size), content, f"{name}: content")
            with _raises(ExistsError, name, f"a second creation of the {name} file"):
                folder.write_file(f"to/{name}", tmp_path / name, "create")
            with _raises(ChangedError, name, f"a replacement of another version of the {name} file"):
                folder.write_file(f"to/{name}", tmp_path / name, ReplaceIf("nonsense"))
            folder.write_file(f"to/{name}", tmp_path / name, ReplaceIf(version))
        folder.write_file("to/small", tmp_path / "large")
        _compare(folder.read("to/small", self.large_bytes), content, "content of a replaced file")

    def test_file_is_copied(self, tmp_path: pathlib.Path) -> None:
        """What has the other name is replaced; the copy stays when the first file goes."""
        if not self.is_writable:
            return
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        content = _FOLDER_FILES["_index/train.index"]
        for target in ("new/copy", "empty", "new/copy"):
            folder.copy("_index/train.index", target)
            _compare(folder.read(target, 1 << 20), content, f"{target}: content of a copy")
        with _raises(AbsentError, "nothing", "a copy of nothing"):
            folder.copy("nothing", "empty")
        folder.write("_index/train.index", b"another")
        folder.delete("_index/train.index")
        _compare(folder.read("empty", 1 << 20), content, "content of a copy of a file that is gone")
        _compare(_names(folder, "new"), ["copy"], "names beside a copy")

    def test_file_is_deleted(self, tmp_path: pathlib.Path) -> None:
        """Alone; where there is none, nothing happens."""
        if not self.is_writable:
            return
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        for name in ("_index/deep/er", "_index/deep/er", "nothing", "nothing/at/all"):
            folder.delete(name)
        _compare(
            _names(folder, deep=True), sorted({*_FOLDER_FILES} - {"_index/deep/er"}), "names after one was deleted"
        )
        _compare(folder.stat("_index/deep/er"), None, "what is said of a deleted file")
        folder.write("_index/deep/er", b"again", "create")
        _compare(folder.read("_index/deep/er", 10), b"again", "content of a file that was created again")

    def test_forked_process_writes(self, tmp_path: pathlib.Path) -> None:
        """Its parent reads what it wrote, and so does a process that is forked later."""
        folder = self.make_folder({}, tmp_path)
        if not self.is_writable or folder.is_private:
            return
        folder.write("file", b"of the parent")
        _in_forks(_write_and_copy, folder)
        for name in ("of a child", "of the disk", "copy"):
            _compare(folder.read(name, 100), b"of a child", f"{name}: content")
        _compare(folder.stat("file"), None, "what is said of a file that a child deleted")


def _names(folder: Folder, below: str = "", *, deep: bool = False) -> list[str]:
    return [*(folder.list(below, deep=deep) or ())]


def _in_forks(function: Callable[..., object], folder: Folder, numbers: Iterable[int | None] = (None,)) -> None:
    """Call a function in a forked process for each number; where nothing can be forked, do nothing."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return
    fork = multiprocessing.get_context("fork")
    children = [
        fork.Process(target=function, args=(folder,) if number is None else (folder, number)) for number in numbers
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0, f"found exit code {child.exitcode} of a forked process, expected 0"


def _read_in_threads(folder: Folder) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: folder.read("_index/train.index", 1 << 20), range(16)))
    _compare(found, {_FOLDER_FILES["_index/train.index"]}, "content, read by several threads")


def _create(folder: Folder, number: int) -> None:
    """Create a file, and note it where this is the first to do so."""
    if create_once(folder, "race", str(number).encode()):
        folder.write(f"won by {number}", b"")


def _write_and_copy(folder: Folder) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"of a child")
        file.flush()
        folder.write_file("of the disk", file.name, "create")
    folder.write("of a child", b"of a child", "create")
    folder.copy("of the disk", "copy")
    folder.delete("file")


# ---------------------------------------------------------------- sidecars


class SidecarConformance:
    """What every `Sidecar` does: its files follow from the manifest alone."""

    def make_sidecar(self) -> Sidecar:
        """Return the sidecar."""
        raise NotImplementedError(f"{type(self).__name__}: define make_sidecar(self)")

    def test_a_run_writes_its_files(self, tmp_path: pathlib.Path) -> None:
        """It has a file for one of the built-in formats at least; a run accepts all, and `verify` finds them."""
        found = {name: self._run(tmp_path / name, name) for name in _installed_formats()}

        assert any(found.values()), f"sidecar: found no file for any of {', '.join(found)}, expected one"
        for name, files in found.items():
            written = {file: (tmp_path / name / file).read_bytes() for file in files}
            _compare(written, files, f"{name}: files of the run")
            report = verify(tmp_path / name)
            assert report.ok, f"{name}: found {report}, expected that the directory verifies"

    def test_files_do_not_depend_on_time_and_place(self, tmp_path: pathlib.Path) -> None:
        """Equal manifests give equal files, in another directory and at another time."""
        for name in _installed_formats():
            first, second = (self._run(tmp_path / f"{name}{number}", name) for number in range(2))
            _compare(second, first, f"{name}: files of a second directory beside those of the first")
            report = export(tmp_path / f"{name}0", sidecars=[self.make_sidecar()])
            _compare(report.written, (), f"{name}: files that `export` wrote again")

    def test_files_follow_the_shards(self, tmp_path: pathlib.Path) -> None:
        """Where the shards are others, a run with the same object writes the files again."""
        for name in _installed_formats():
            sidecar = self.make_sidecar()
            self._run(tmp_path / name, name, sidecar, num_rows=3, num_shards=1)
            files = self._run(tmp_path / name, name, sidecar)
            fresh = self._run(tmp_path / f"{name} fresh", name)
            _compare(files, fresh, f"{name}: files after a change beside those of a new directory")

    def _run(
        self,
        output: pathlib.Path,
        format_name: str,
        sidecar: Sidecar | None = None,
        *,
        num_rows: int = 8,
        num_shards: int = 2,
    ) -> dict[str, bytes]:
        """Run a small job with a sidecar, and return the files that it owns."""
        sidecar = sidecar or self.make_sidecar()
        options: dict[str, Any] = {"format": format_name, "shards": num_shards, "sidecars": [sidecar]}
        Materializer(_Numbers(), num_rows, output, **options).run(executor=InlineExecutor(), progress=False)
        files = sidecar(Manifest.read(output))
        return {
            name: content if isinstance(content, bytes) else content.make(output / content.shard.file)
            for name, content in files.items()
        }


def _installed_formats() -> list[str]:
    found = []
    for name in ("tfrecord", "parquet", "webdataset"):
        with contextlib.suppress(MissingDependencyError):
            get_format(name)
            found.append(name)
    return found


# ---------------------------------------------------------------- run hooks


class _Overheard:
    """Passes events on to a hook, and keeps what it raises."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.errors: list[str] = []
        self.ends: list[RunEnded] = []

    def __call__(self, event: RunEvent) -> None:
        if isinstance(event, RunEnded):
            self.ends.append(event)
        try:
            self.hook(event)
        except Exception as error:  # noqa: BLE001 -- the test reports it
            self.errors.append(f"{type(event).__name__}: {error!r}")


class HookConformance:
    """What every hook does: it hears all kinds of runs without an error, and changes nothing about them."""

    def make_hook(self) -> Hook:
        """Return a new hook."""
        raise NotImplementedError(f"{type(self).__name__}: define make_hook(self)")

    def test_run_has_the_same_bytes(self, tmp_path: pathlib.Path) -> None:
        """Every file of a run is what it is without the hook."""
        _run(tmp_path / "without")

        _run(tmp_path / "with", hooks=[self.make_hook()])

        _compare(
            _digests(tmp_path / "with"), _digests(tmp_path / "without"), "files with the hook beside those without"
        )

    def test_good_run_is_heard_without_an_error(self, tmp_path: pathlib.Path) -> None:
        """A run, and a second one that has nothing to do, with one hook."""
        heard = _Overheard(self.make_hook())

        _run(tmp_path / "out", hooks=[heard])
        report = _run(tmp_path / "out", hooks=[heard])

        _compare(heard.errors, [], "errors of the hook")
        assert report.did_nothing, f"second run: found that it wrote {report}, expected that it had nothing to do"
        _compare(len(heard.ends), 2, "ends of runs that the hook heard")

    def test_rows_that_fail_are_heard_without_an_error(self, tmp_path: pathlib.Path) -> None:
        """A run that skips a row, and one that ends with its error."""
        heard = _Overheard(self.make_hook())

        _run(tmp_path / "skipped", bad=17, errors="skip", hooks=[heard])
        with _raises(SampleError, "0017.*number 17 is bad", "run with a bad row"):
            _run(tmp_path / "raised", bad=17, hooks=[heard])

        _compare(heard.errors, [], "errors of the hook")

    def test_run_that_is_stopped_is_heard_without_an_error(self, tmp_path: pathlib.Path) -> None:
        """A run that reaches its deadline before any work, and the one that finishes it."""
        heard = _Overheard(self.make_hook())

        stopped = _run(tmp_path / "out", hooks=[heard], deadline=1e-9)
        finished = _run(tmp_path / "out", hooks=[heard])

        _compare((stopped.stopped, finished.is_complete), ("deadline", True), "end of the stopped run and of the next")
        _compare(heard.errors, [], "errors of the hook")
