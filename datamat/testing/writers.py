"""The tests of a `DatasetWriter`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from datamat.readers.dataset import load
from datamat.run.materializer import Materializer
from datamat.sources.rows import single_rows
from datamat.testing.assertions import compare, digests, plain
from datamat.testing.executors import InlineExecutor
from datamat.writers.base import DatasetWriter


class DatasetWriterConformance:
    """What every `DatasetWriter` does: the same rows, in any order and process, make the same records.

    A dozen rows from `make_source` are enough; the tests read all of them several times.
    """

    def make_writer(self) -> DatasetWriter:
        """Return a new writer, as at the start of a program."""
        raise NotImplementedError(f"{type(self).__name__}: define make_writer(self)")

    def make_source(self, folder: pathlib.Path) -> Any:
        """Return the source of the writer; put its files, if any, into `folder`, which is empty."""
        raise NotImplementedError(f"{type(self).__name__}: define make_source(self, folder)")

    def test_index_is_the_same_each_time(self, tmp_path: pathlib.Path) -> None:
        """Two calls return equal rows in the same order, and a plan accepts them."""
        source = self._source(tmp_path)

        rows, again = ([*single_rows(_bound(self.make_writer(), source).index(source))] for _ in range(2))

        assert rows, "index: found no rows, expected one for each sample of the source"
        compare(again, rows, "index, called a second time")
        compare(self._job(source, tmp_path / "out").plan().num_rows, len(rows), "rows of the plan")

    def test_every_row_is_stored(self, tmp_path: pathlib.Path) -> None:
        """The result of `read` fits the declared features, and each row makes its copies."""
        source = self._source(tmp_path)
        job = self._job(source, tmp_path / "out")

        report = job.run(executor=InlineExecutor(), progress=False)

        dataset = load(tmp_path / "out")
        compare(report.num_rows, job.plan().num_rows, "number of rows read")
        compare(len({*dataset.keys()}), report.num_records, "distinct keys of the records")
        for sample in dataset:
            compare({*sample}, {*job.writer.features, "key"}, f"fields of the record {sample['key']!r}")

    def test_records_do_not_depend_on_workers(self, tmp_path: pathlib.Path) -> None:
        """Runs with one worker and with two write the same bytes, including randomly drawn copies."""
        source = self._source(tmp_path)

        self._job(source, tmp_path / "one").run(workers=1, progress=False)
        self._job(source, tmp_path / "two").run(workers=2, progress=False)

        compare(digests(tmp_path / "two"), digests(tmp_path / "one"), "files of two workers, compared with one")

    def test_records_do_not_depend_on_other_rows(self, tmp_path: pathlib.Path) -> None:
        """A row read alone, by a new writer, makes the same record as in a run."""
        source = self._source(tmp_path)
        self._job(source, tmp_path / "out").run(executor=InlineExecutor(), progress=False)
        dataset = load(tmp_path / "out")

        for sample in [*dataset][:: -max(len(dataset) // 6, 1)]:
            alone = self._job(source, tmp_path / "out").replay(str(sample["key"]))
            compare(plain(alone), plain(sample), f"record {sample['key']!r}, read alone")

    def test_second_run_has_nothing_to_do(self, tmp_path: pathlib.Path) -> None:
        """A new writer has the fingerprint of the first: nothing in it depends on time, folder or process."""
        source = self._source(tmp_path)
        self._job(source, tmp_path / "out").run(executor=InlineExecutor(), progress=False)

        report = self._job(source, tmp_path / "out").run(executor=InlineExecutor(), progress=False)

        assert report.did_nothing, f"second run: found {report}, expected it to have nothing to do"

    def test_read_block_agrees_with_read(self, tmp_path: pathlib.Path) -> None:
        """The columns of a block hold what `read` returns for each row."""
        source = self._source(tmp_path)
        by_rows = self._job(source, tmp_path / "rows", copies=1)  # `read_block` is not called for drawn copies
        by_rows.writer.read_block = _no_block  # type: ignore[method-assign]  # on the instance alone
        by_rows.run(executor=InlineExecutor(), progress=False)

        self._job(source, tmp_path / "blocks", copies=1).run(executor=InlineExecutor(), progress=False)

        rows, blocks = ([plain(sample) for sample in load(tmp_path / name)] for name in ("rows", "blocks"))
        compare(blocks, rows, "samples from read_block, compared with read")

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
