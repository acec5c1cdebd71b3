"""The tests of a `DataSource`."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from datamat.parallel import PathosExecutor
from datamat.readers.dataset import load
from datamat.run.materializer import Materializer
from datamat.testing.assertions import compare, plain
from datamat.testing.executors import InlineExecutor
from datamat.writers.dataset import ImportWriter
from datamat.writers.sources import open_source

if TYPE_CHECKING:
    from datamat.run.report import RunReport


class DataSourceConformance:
    """What every `DataSource` does, and every object with `len` and items that is passed as a dataset.

    A dozen samples from `make_source` are enough; the tests read all of them several times.
    """

    def make_source(self) -> Any:
        """Return a new data source, as at the start of a program."""
        raise NotImplementedError(f"{type(self).__name__}: define make_source(self)")

    def test_keys_and_splits_are_the_same_each_time(self) -> None:
        """One pair for each sample, in the same order, with no key twice."""
        source = open_source(self.make_source())

        pairs = [*source.keys_and_splits()]

        assert pairs, "len: found no samples, expected at least one"
        compare(len(pairs), len(source), "number of pairs from keys_and_splits, compared with len")
        compare([*source.keys_and_splits()], pairs, "keys_and_splits, called a second time")
        compare(len({key for key, _ in pairs}), len(pairs), "distinct keys")

    def test_samples_do_not_depend_on_order_or_process(self) -> None:
        """A copy in a worker process, read backwards, returns the samples of the original."""
        source = open_source(self.make_source())
        samples = [plain(source[position]) for position in range(len(source))]

        with PathosExecutor(1) as pool:
            found = [*pool.map(source.__getitem__, reversed(range(len(source))))]

        compare([plain(sample) for sample in found[::-1]], samples, "samples of a copy, read backwards")

    def test_every_sample_is_stored(self, tmp_path: pathlib.Path) -> None:
        """Each sample fits the declared features, and is stored under its key."""
        source = open_source(self.make_source())

        self._run(tmp_path / "out")

        dataset = load(tmp_path / "out")
        compare(sorted(dataset.keys()), sorted(key for key, _ in source.keys_and_splits()), "keys of the records")
        compare({name: dataset.features[name] for name in source.features}, {**source.features}, "features")

    def test_second_run_has_nothing_to_do(self, tmp_path: pathlib.Path) -> None:
        """A new source has the identity of the first: nothing in it depends on time, folder or process."""
        self._run(tmp_path / "out")

        report = self._run(tmp_path / "out")

        assert report.did_nothing, f"second run: found {report}, expected it to have nothing to do"

    def _run(self, output: pathlib.Path) -> RunReport:
        job = Materializer(ImportWriter(), self.make_source(), output)
        return job.run(executor=InlineExecutor(), progress=False)
