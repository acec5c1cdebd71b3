"""Process the rows of a part: make and append the records of each row, or handle its failure by the policy.

    rows of the part ── RowWatch: noted ── Pipeline.records ──> all copies, then appended
                                                     └── fails ──> policy ──> recorded in the receipt

Whether a row fails, and which bytes the others give, depends on the row alone: so a shard without some rows is the same
for any number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.codecs.files import noting_files
from datamat.directory.ledger import FailedRow, cut_text
from datamat.directory.row_values import nested_paths
from datamat.errors import (
    InputError,
    OutputError,
    SampleError,
    SchemaError,
    Skip,
    SourceError,
    fold,
)
from datamat.events import PartTrace
from datamat.features import RaggedColumn, Statistics
from datamat.features.base import gathered, join_blocks, num_bytes_of, one_bytes, ragged
from datamat.features.pictures import PictureFile
from datamat.parallel import retire
from datamat.parallel.process_role import is_worker
from datamat.parallel.worker import peak_rss_bytes
from datamat.plan.changes import open_reused
from datamat.plan.inputs import OpenedFiles, PartInputs, content_digest, placeholders_refused
from datamat.plan.memos import digests_of_memos, read_places
from datamat.plan.pipeline import MadeColumns, stage_clock, without_urls
from datamat.run.growing import GrowingShard
from datamat.run.limits import limit_memory, resident_bytes
from datamat.run.module_state import main_namespaces
from datamat.run.parts import PartWriter, ShardEnd
from datamat.run.quarantine import quarantine
from datamat.run.receipts import Outcome, inputs_path
from datamat.run.row_watch import RowWatch
from datamat.sources.fetching import FetchAhead, fetches_files, remedy
from datamat.sources.store import RowStore
from datamat.transforms.seeding import global_state_kept

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import IO

    from datamat.codecs.files import Notes
    from datamat.features import Features
    from datamat.features.base import ColumnBlock
    from datamat.formats import Record
    from datamat.plan.changes import ReusedRows
    from datamat.plan.gather import SampleColumns
    from datamat.plan.job import Job
    from datamat.plan.pipeline import GatheredRows, Pipeline
    from datamat.plan.plan import PartSpec
    from datamat.run.receipts import Receipt
    from datamat.sources.rows import IndexRow
    from datamat.writers.base import Sample

_ROWS_PER_CHECK = 200  # one of this many rows is processed twice, at half a per cent of the cost
_MOST_READS = 4  # attempts to read a row whose files change meanwhile
_MOST_TOLD = 2  # parts after which a worker reports the contents of memos
_MOST_SLOW = 3  # slowest rows of a part to report
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # before retrying a file that could not be read
_ROWS_AT_ONCE = 4096  # rows of a part held in memory
_MOST_OBSERVED, _OBSERVED_BYTES = 2048, 1 << 20  # records whose statistics are computed together, and their bytes
_MOST_HELD_BYTES = 16 << 20  # bytes of a row's copies held in memory before spilling to disk


_REMOVED = Skip("removed from the finished dataset")


class _RowRecords:
    """Holds the records of a row until the last is made: a row is stored with all its records or not at all.

    They are held in memory, or, if large, in an unnamed file, which vanishes with the process.

    Attributes:
        dropped: reason why a record was intentionally left out, by key.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._held: list[tuple[str, Record]] = []
        self._num_bytes = self._num_stored = 0
        self._file: IO[bytes] | None = None
        self.dropped: dict[str, Skip] = {}

    def add(self, key: str, record: Record) -> None:
        """Add one more record."""
        self._held.append((key, record))
        if len(self) > 1:  # most rows have one
            self._num_bytes += sum(map(num_bytes_of, record.values()))
        if self._num_bytes > _MOST_HELD_BYTES:
            self._file = self._file or tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 -- `close` does
            for one in self._held:
                pickle.dump(one, self._file, pickle.HIGHEST_PROTOCOL)
            self._num_stored += len(self._held)
            self._held, self._num_bytes = [], 0

    def __len__(self) -> int:
        return self._num_stored + len(self._held)

    def __iter__(self) -> Iterator[tuple[str, Record]]:
        if self._file is not None:
            self._file.seek(0)
            for _ in range(self._num_stored):
                yield pickle.load(self._file)  # noqa: S301 -- this process wrote it
        yield from self._held

    def __contains__(self, one: object) -> bool:
        return any(one == found for found in self)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class _Observer:
    """Collects the statistics of a part's records, hundreds at a time, in a tenth of the time."""

    def __init__(self, features: Features) -> None:
        self._features = features
        columns = [(feature, column, stored.kind) for name, feature in features.observed.items()
                   for column, stored in feature.columns(name).items()]  # fmt: skip
        self._kinds = {column: kind for _, column, kind in columns}
        self._sizes = {column: feature.observed_size for feature, column, kind in columns
                       if kind == "bytes" and isinstance(feature, PictureFile)}  # fmt: skip
        self._found = Statistics()
        self._values: dict[str, list[Any]] = {column: [] for column in self._kinds}
        self._num_records = self._num_bytes = 0
        self._blocks: list[dict[str, ColumnBlock]] = []
        self._num_in_blocks = self._bytes_in_blocks = 0

    def add(self, record: Record) -> None:
        """Add one record."""
        if isinstance(record, MadeColumns):
            self._add_seen(record.seen)
        for column, values in self._values.items():
            value: Any = record[column]
            if type(value) is not bytes and self._kinds[column] == "bytes":
                value = one_bytes(value)
            if column in self._sizes:
                values.append(self._sizes[column](value))
                continue
            values.append(value.copy() if isinstance(value, np.ndarray) else value)  # `read` may fill it anew
            self._num_bytes += num_bytes_of(value)
        self._num_records += 1
        if self._num_records >= _MOST_OBSERVED or self._num_bytes > _OBSERVED_BYTES:
            self._flush()

    def add_block(self, block: Mapping[str, Any], num_records: int) -> None:
        """Add the records of a block."""
        if isinstance(block, MadeColumns):
            self._add_seen(block.seen)
        held: dict[str, Any] = {name: ragged(block[name]) for name in self._kinds}
        held |= {name: [size_of(value) for value in block[name]] for name, size_of in self._sizes.items()}
        self._blocks.append(held)
        self._num_in_blocks += num_records
        self._bytes_in_blocks += sum(map(_held_bytes, held.values()))
        if self._num_in_blocks >= _MOST_OBSERVED or self._bytes_in_blocks > _OBSERVED_BYTES:
            self._flush_blocks()

    def lines(self) -> tuple[str, ...]:
        """Return the statistics."""
        self._flush()
        self._flush_blocks()
        return self._found.to_lines()

    def _add_seen(self, seen: Mapping[str, Any]) -> None:
        for name, found in seen.items():
            self._found.observe(name, found)

    def _flush_blocks(self) -> None:
        blocks, self._blocks = self._blocks, []
        if blocks:
            self._found.add(self._features.observe(join_blocks(blocks), self._num_in_blocks))
            self._num_in_blocks = self._bytes_in_blocks = 0

    def _flush(self) -> None:
        if self._num_records:
            block = {name: gathered(values, self._kinds[name]) for name, values in self._values.items()}
            self._found.add(self._features.observe(block, self._num_records))
            self._values = {column: [] for column in self._kinds}
            self._num_records = self._num_bytes = 0


def _held_bytes(column: ColumnBlock) -> int:
    values = column.values if isinstance(column, RaggedColumn) else column
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values.nbytes
    return sum(map(len, values))


class PartTask:
    """The rows of one part on their way into its files."""

    def __init__(
        self,
        shared: SharedByParts,
        spec: PartSpec,
        writer: PartWriter,
        watch: RowWatch,
        find_reused: Callable[[int], Sequence[tuple[str, Record]]],
        notes: Notes,
    ) -> None:
        self._shared = shared
        self._source = shared.source
        self._spec = spec
        self._writer = writer
        self._watch = watch
        self._find_reused = find_reused
        self._notes = notes
        self._ahead: FetchAhead | None = None
        self._outcome = Outcome()
        self._observer = _Observer(shared.source.features)
        self._known: Statistics | None = Statistics()  # of records that are copied
        self._folder = writer.folder
        self.slowest: list[tuple[float, str]] = []  # rows made one by one that took longest, as (seconds, key)
        # In a long part one row is read twice, even if the process has done so in an earlier part.
        self._is_checked = shared.is_checked and spec.stop - spec.start < _ROWS_PER_CHECK
        self._positions = np.asarray(shared.store.order[spec.start : spec.stop])
        self._inputs = PartInputs(shared.store, self._positions, shared.digests) if shared.store.file_fields else None
        self._removed = frozenset(spec.removed)
        # Makes many rows at once: blocks of them, or samples read one at a time. None where copies are drawn.
        is_one_by_one = spec.augmented or spec.copies > 1 or spec.removed
        self._pipeline = None if is_one_by_one else self._source.pipeline

    def do(self, lost: Sequence[FailedRow] | None, reused: ReusedRows | None) -> Outcome:
        """Write the records of all rows except `lost`."""
        if reused is not None:
            self._pipeline = None
        with self._fetching(lost or (), reused):
            self._write(lost)
            self._watch.rest()
            self._note_inputs()
        if self._source.is_observed:
            self._outcome.statistics = self._observer.lines()
        elif self._known is not None:
            self._outcome.statistics = self._known.to_lines()
        return self._outcome

    @contextlib.contextmanager
    def _fetching(self, lost: Sequence[FailedRow], reused: ReusedRows | None) -> Iterator[None]:
        """Prefetch the files of rows behind URLs; they are removed at the end."""
        if not fetches_files() or not self._shared.store.file_fields:
            yield
            return
        rows = self._shared.store.input_paths(self._positions)
        named = [[path for field in row for path in field] for row in rows]
        for position in {failed.position for failed in lost}:
            named[position - self._spec.start] = []
        for number in np.flatnonzero(reused.count) if reused is not None else ():
            named[number] = []
        if self._removed:
            keys = self._shared.store.keys(self._positions)
            named = [[] if key in self._removed else paths for key, paths in zip(keys, named, strict=True)]
        with FetchAhead(named) as ahead:
            self._ahead = ahead if ahead.has_files else None
            yield
        self._ahead = None

    def _note_inputs(self) -> None:
        if self._inputs is not None:
            found = self._inputs.finish()
            inputs_path(self._folder, self._spec.number).write_bytes(found.tobytes())
            self._outcome.inputs = content_digest(found)
            if self._inputs.is_as_indexed:
                self._outcome.input_times = self._shared.store.times(self._spec.start, self._spec.stop)

    def _write(self, lost: Sequence[FailedRow] | None) -> None:
        # Fetched files are kept for one row: those of a block could fill the disk.
        if lost is not None or self._ahead is not None or self._pipeline is None or not self._pipeline.makes_blocks:
            self._write_rows(self._spec.start, self._positions, lost)
            return
        step = self._pipeline.rows_per_block
        for first in range(0, len(self._positions), step):
            positions = self._positions[first : first + step]
            block_error, num_failed = None, len(self._outcome.failed)
            try:
                if self._write_block(self._pipeline, self._spec.start + first, positions):
                    continue
            except SampleError as error:
                block_error = error  # processing them one at a time shows which one it was
            self._write_rows(self._spec.start + first, positions, None)
            if block_error is not None and len(self._outcome.failed) == num_failed:
                raise block_error

    def _write_rows(self, start: int, positions: np.ndarray, lost: Sequence[FailedRow] | None) -> None:
        """Write rows, reading them one by one.

        Args:
            start: position of the first in the order of the plan.
            positions: numbers of the rows in the index.
            lost: rows to leave out after a worker died; then none are encoded together, so that the culprit shows.
        """
        left_out = {failed.position: failed for failed in lost or ()}
        pipeline = self._pipeline if self._inputs is None and lost is None else None
        columns = pipeline.sample_columns() if pipeline is not None and pipeline.gathers_samples else None
        for first in range(0, len(positions), _ROWS_AT_ONCE):
            rows = self._shared.rows(start + first, min(start + len(positions), start + first + _ROWS_AT_ONCE))
            if lost is None and self._source.pipeline is not None:
                self._source.pipeline.expect([row for row in rows if row.key not in self._removed])
            done = 0
            while done < len(rows):
                position = start + first + done
                if columns is not None and self._is_checked:
                    done += self._write_gathered(rows, done, position, columns)
                    continue
                row = rows[done]
                if row.key in self._removed:
                    self._drop(position, row, {row.key: _REMOVED}, is_whole=True)
                elif position in left_out:
                    self._leave_out(row, left_out[position], left_out[position].message)
                else:
                    if self._ahead is not None:
                        self._ahead.reach(position - self._spec.start)
                    self._write_row(position, row)
                done += 1

    def _write_row(
        self,
        position: int,
        row: IndexRow,
        failure: SampleError | SystemExit | None = None,
        samples: Sequence[Sample | Skip] | None = None,
    ) -> None:
        """Write one row; see `_records` for the arguments."""
        self._watch.at(position)
        begun, num_failed = time.perf_counter(), len(self._outcome.failed)
        self._append(position, row, self._reused(position) or self._records(position, row, failure, samples))
        if len(self._outcome.failed) == num_failed:  # otherwise the time is that of an abandoned attempt
            self._note_time(row.key, time.perf_counter() - begun)

    def _write_gathered(self, rows: Sequence[IndexRow], first: int, position: int, columns: SampleColumns) -> int:
        """Write rows whose samples are encoded together, and the next one if it cannot be; return their number.

        Args:
            rows: rows, in order.
            first: number of the first row to write.
            position: position of that row in the order of the plan.
            columns: collects the samples.
        """
        assert self._pipeline is not None, "it reads them"
        self._notes.clear()
        found = self._pipeline.gather(rows, first, position, self._watch.at, columns)
        done = found.num_rows
        if self._append_gathered(position, found, columns):
            for number, dropped in found.dropped.items():
                self._drop(position + number, rows[first + number], dropped, is_whole=False)
        else:
            for number in range(done):
                self._write_row(position + number, rows[first + number])
        if found.alone is not None or found.failure is not None:
            self._write_row(position + done, rows[first + done], found.failure, found.alone)
            done += 1
        return done

    def _append_gathered(self, position: int, found: GatheredRows, columns: SampleColumns) -> bool:
        """Append the samples of gathered rows; if one does not fit the schema, append none and return False."""
        if keys := columns.keys:
            assert self._pipeline is not None, "it has read them"
            self._watch.at(position, found.num_rows)
            block = self._pipeline.encode_columns(columns)
            if block is None:
                return False
            self._watch.rest()
            self._append_block(block, len(keys))
            self._outcome.keys.extend(keys)
            self._outcome.num_done += found.num_rows - found.num_without
        return True

    def _note_time(self, key: str, seconds: float) -> None:
        if len(self.slowest) < _MOST_SLOW:
            self.slowest.append((seconds, key))
        elif seconds > min(self.slowest)[0]:
            self.slowest[self.slowest.index(min(self.slowest))] = (seconds, key)

    def _reused(self, position: int) -> Sequence[tuple[str, Record]]:
        found = self._find_reused(position)
        if found and self._inputs is not None:
            self._inputs.keep(position - self._spec.start)
        return found

    def _append(self, position: int, row: IndexRow, records: Collection[tuple[str, Record]]) -> None:
        """Append the records of a row, and record which of them were left out."""
        dropped = records.dropped if isinstance(records, _RowRecords) else {}
        self._drop(position, row, dropped, is_whole=not records)
        if not self._source.is_observed and self._known is not None:
            known = self._source.known_statistics(row)
            self._known = None if known is None else self._known.add(known)
        begun = time.perf_counter()
        try:
            for key, record in records:
                self._writer.append(record)
                self._outcome.keys.add(key)
                if self._source.is_observed:
                    self._observer.add(record)
        finally:
            stage_clock.add("write", begun)
            if isinstance(records, _RowRecords):
                records.close()
        self._outcome.num_done += 0 < len(records) >= self._spec.copies - len(dropped)

    def _append_block(self, block: dict[str, Any], num_records: int) -> None:
        begun = time.perf_counter()
        self._writer.append_block(block)
        self._observer.add_block(block, num_records)
        stage_clock.add("write", begun)

    def _drop(self, position: int, row: IndexRow, dropped: Mapping[str, Skip], *, is_whole: bool) -> None:
        """Record what was intentionally left out of a row.

        Args:
            position: position of the row in the order of the plan.
            row: row of the index.
            dropped: reason for each dropped record, by key.
            is_whole: whether no record of the row is left; then one line covers all.
        """
        for key, skip in itertools.islice(dropped.items(), 1 if is_whole else None):
            named = row.key if is_whole else key
            self._outcome.dropped.append(FailedRow(position, named, type(skip).__name__, cut_text(skip.reason), "drop"))

    def _records(
        self,
        position: int,
        row: IndexRow,
        first: SampleError | SystemExit | None = None,
        samples: Sequence[Sample | Skip] | None = None,
    ) -> Collection[tuple[str, Record]]:
        """Return all records of a row; none if it fails and the policy continues without it.

        Args:
            position: position of the row in the order of the plan.
            row: row of the index, with paths that can be opened.
            first: error of the first attempt, if it has been made.
            samples: samples that it read, if it has been made.
        """
        spec = self._spec
        failure: SampleError | None = None
        read: dict[str, str] | None = None if self._is_checked else {}
        for attempt in itertools.count(1):
            try:
                if first is not None and attempt == 1:
                    raise first
                # Make all copies before the first is appended: a row is stored with all of them or not at all.
                records = self._made(position, row, read, samples if attempt == 1 else None)
                if read is not None and len(records):  # otherwise the next row that gives records is read twice
                    self._watch.at(position)  # restart its time limit
                    self._source.check_determined(row, read, augmented=spec.augmented)
                    self._shared.is_checked = self._is_checked = True
            except (SampleError, SystemExit) as raised:
                error = raised if isinstance(raised, SampleError) else exit_error(row, raised)
                if attempt <= self._shared.errors.retries and may_pass(error):
                    pause(error, attempt)
                    failure = error
                    continue
                self._give_up(position, row, error, attempt)
                return ()
            if failure is not None:
                self._outcome.retried.append(_failed_row(position, failure, "retry", attempt))
            return records
        raise AssertionError("unreachable")

    def _made(
        self,
        position: int,
        row: IndexRow,
        read: dict[str, str] | None,
        samples: Sequence[Sample | Skip] | None,
    ) -> _RowRecords:
        """Return the records of a row; read it again if its files changed meanwhile."""
        spec = self._spec
        for _ in range(_MOST_READS):
            self._notes.clear()
            records = _RowRecords(self._folder)
            try:
                if samples is not None and self._pipeline is not None:
                    made = self._pipeline.records_of(row, samples, records.dropped)
                else:
                    made = self._source.records(
                        row,
                        copies=spec.copies,
                        augmented=spec.augmented,
                        read=read,
                        dropped=records.dropped,
                        remarks=self._outcome.remarks,
                    )
                for key, record in made:
                    if key in self._removed:
                        records.dropped[key] = _REMOVED
                    else:
                        records.add(key, record)
            except BaseException:
                records.close()
                raise
            if self._inputs is None or self._inputs.settle(position - spec.start, self._notes):
                return records
            records.close()
        error = InputError("an input file changed each time that it was read; run again when nothing writes to it")
        raise SampleError(row.key, f"InputError: {error}") from error

    def _give_up(self, position: int, row: IndexRow, error: SampleError, attempts: int) -> None:
        action = self._shared.errors.action
        if action == "raise":
            raise error
        fold(error)
        text = "".join(traceback.format_exception(error.__cause__ or error))
        text = without_urls(text, nested_paths(row.fields))
        failed = dataclasses.replace(_failed_row(position, error, action, attempts), traceback=cut_text(text))
        self._leave_out(row, failed, text)

    def _leave_out(self, row: IndexRow, failed: FailedRow, text: str) -> None:
        """Record that a row gives no record; `text` is its traceback, or whatever is known, for the quarantine."""
        number = self._positions[failed.position - self._spec.start : failed.position - self._spec.start + 1]
        (files,) = self._shared.store.input_paths(number)
        paths = [without_urls(path, nested_paths(row.fields)) for field in files for path in field]
        path = next((path for path in paths if path in failed.message), paths[0] if paths else "")
        failed = dataclasses.replace(failed, row=int(number[0]), path=path)
        if failed.action == "quarantine":
            quarantine(self._shared.work, row, failed, text)
        self._outcome.failed.append(failed)

    def _write_block(self, pipeline: Pipeline, start: int, positions: np.ndarray) -> bool:
        """Write rows as one block; return False if the writer needs them one at a time."""
        store = self._shared.store
        keys = store.gathered("key", positions)
        self._watch.at(start, len(keys))
        fields = dict(store.columns(positions))
        block = pipeline.block(keys, fields)
        if block is None:
            return False
        if not self._shared.is_block_checked:
            pipeline.check_block(keys, fields)
            self._shared.is_block_checked = True
        self._watch.rest()
        self._append_block(block, len(keys))
        self._outcome.keys.extend_encoded(keys.pieces())
        self._outcome.num_done += len(keys)
        return True


def exit_error(row: IndexRow, error: SystemExit) -> SampleError:
    """Return the error of a row whose code called `sys.exit`."""
    made = SampleError(row.key, f"SystemExit: {error}: read or augment called sys.exit; raise an error instead")
    made.__cause__ = error
    return made


def may_pass(error: SampleError) -> bool:
    """Return True if another attempt may succeed; a mismatch with the declaration is permanent."""
    return not isinstance(error.__cause__, SchemaError)


def pause(error: SampleError, attempt: int) -> None:
    """Wait, longer each time, if a disk or network does not answer; other errors cause no wait."""
    cause: Any = error.__cause__
    if isinstance(cause, OSError) or isinstance(getattr(cause, "__cause__", None), OSError):
        time.sleep(min(_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S))


def _failed_row(position: int, error: SampleError, action: str, attempts: int) -> FailedRow:
    name = type(error.__cause__ or error).__name__
    return FailedRow(position, error.key, name, error.reason, action, attempts)


class SharedByParts:
    """State shared by the parts that one process writes.

    Args:
        job: the job, without the caller's objects.
        folder: folder of the rows; the parts are beside it.
        run: mark of the run.
        opened: records the files that this process opens until the end of its first part; None records nothing.
        appends: whether parts may be appended directly to the shards' files.
    """

    def __init__(self, job: Job, folder: pathlib.Path, run: str, opened: OpenedFiles | None, *, appends: bool) -> None:
        self._run = run
        self._appends = appends
        self.store = RowStore(folder)
        self.work = folder.parent
        self.source = job.records
        self._columns = job.records.features.columns
        self.errors = job.how.errors
        self.is_checked = False  # whether a row, read twice in this process, was found to draw only from its seed
        self.is_block_checked = False  # the same for a block
        self.digests: dict[tuple[tuple[str, ...], int, int], bytes] = {}  # of input files shared by rows
        self._formats = job.formats
        self._workers = job.how.workers
        self._opened = opened
        self._memos = read_places(folder)
        self._rows: Sequence[IndexRow] = ()  # read together for the parts of a call
        self._rows_start = self._rows_stop = 0
        self._num_told = 0  # parts after which the contents of memos were reported
        # One part at a time per process: a transform holds the random generators of its current draw.
        self._lock = threading.Lock()
        self._no_limit: tuple[int, int] | None = None
        if job.how.workers.max_rss is not None and is_worker():
            import resource

            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            self._no_limit = (hard, hard)
            limit_memory(job.how.workers.max_rss)

    def write_parts(
        self, parts: Sequence[PartSpec], lost: Sequence[FailedRow] | None, reused: ReusedRows | None, until: float
    ) -> list[Receipt]:
        """Write parts until a time on the monotonic clock, at least the first; see `PartWorker.write_parts`."""
        part = parts[0]
        growing = GrowingShard(self.work, part.shard, part.fingerprint, self._formats, part.num_parts, self._run)
        watch = RowWatch(self._workers.sample_timeout_s)
        receipts: list[Receipt] = []
        try:
            with (
                self._lock,
                global_state_kept(),
                watch,
                noting_files() as notes,
                ShardEnd(growing, appends=self._appends and bool(self._run)) as end,
            ):
                self._rows, self._rows_start, self._rows_stop = (), part.start, parts[-1].stop
                for part in parts:
                    receipts.append(self._write_part(end, part, watch, notes, lost, reused))
                    if time.monotonic() > until:  # leave the rest to other workers
                        break
                if sealed := end.leave(part):
                    receipts[-1] = dataclasses.replace(receipts[-1], sealed=sealed)
        except OSError as error:
            if isinstance(error, OutputError):
                raise
            if isinstance(error, FileNotFoundError):
                growing.check_run()  # another run has finished, and removed the folder of parts
            raise OutputError(
                f"part {part.number} of {part.shard} cannot be written below {self.work}: {error.strerror or error}; "
                "make room or repair the disk, and run again to continue"
            ) from error
        if self._workers.max_rss is not None and resident_bytes() > self._workers.max_rss:
            retire()
        return receipts

    def _write_part(
        self,
        end: ShardEnd,
        spec: PartSpec,
        watch: RowWatch,
        notes: Notes,
        lost: Sequence[FailedRow] | None,
        reused: ReusedRows | None,
    ) -> Receipt:
        made = PartWriter(end, spec, self._formats, self._columns)
        if not self._appends and (first := made.first()):
            return first  # written by a worker that was lost afterwards
        with made as writer:
            started, began_at, begun = time.process_time(), time.time(), time.perf_counter()
            stage_clock.take()
            reader = open_reused(reused, self._formats[0], self.source.features)
            with self._opened_files(spec) as undeclared, reader as find_reused:
                task = PartTask(self, spec, writer, watch, find_reused, notes)
                try:
                    outcome = task.do(lost, reused)
                except MemoryError:
                    # There is too little memory even to report it. The crash note still names the row.
                    if self._no_limit is not None:
                        import resource

                        resource.setrlimit(resource.RLIMIT_DATA, self._no_limit)  # the next line needs memory
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise
            outcome.undeclared = tuple(undeclared)
            outcome.memos = self._memos_now()
            writing = time.perf_counter()
            receipt = writer.finish(outcome, lambda: time.process_time() - started)
            stage_clock.add("write", writing)
            trace = _trace(receipt, began_at, time.perf_counter() - begun, task.slowest)
        return dataclasses.replace(receipt, trace=trace)

    def rows(self, start: int, stop: int) -> Sequence[IndexRow]:
        """Return rows by their positions in the plan, which follow those of the last call."""
        here = start - self._rows_start
        if stop - self._rows_start > len(self._rows):
            most = min(self._rows_stop, max(stop, start + _ROWS_AT_ONCE))
            self._rows, self._rows_start, here = self.store.read(self.store.order[start:most]), start, 0
        return self._rows[here : here + stop - start]

    def _memos_now(self) -> dict[str, str]:
        """Return the digests of memos' contents after some rows; later, only varying ones change."""
        if not self._memos or self._num_told == _MOST_TOLD:
            return {}
        self._num_told += 1
        return digests_of_memos(self._memos, main_namespaces(self.source))[0]

    @contextlib.contextmanager
    def _opened_files(self, spec: PartSpec) -> Iterator[list[str]]:
        """Yield a list that, after the block, contains the opened files that no row declares."""
        opened, self._opened = self._opened, None
        undeclared: list[str] = []

        def declared() -> list[list[list[str]]]:
            return self.store.input_paths(np.asarray(self.store.order[spec.start : spec.stop]))

        if opened is None:
            # Not in threads of one process, which would record each other's files.
            is_alone = is_worker() or threading.current_thread() is threading.main_thread()
            with placeholders_refused(declared) if is_alone else contextlib.nullcontext():
                yield undeclared
            return
        before = declared()  # paths for URLs create a folder, which is removed with the part
        failure = None
        try:
            yield undeclared
        except SampleError as error:
            failure = error
        finally:
            opened.stop()
        undeclared += opened.undeclared(before)
        said = next(filter(None, map(remedy, undeclared)), "")  # root reads zeros there, without an error
        if failure is not None:
            known = not said or said in failure.reason
            raise failure if known else SampleError(failure.key, f"{failure.reason}; {said}") from failure.__cause__
        if said:
            raise SourceError(f"a file was opened that is not here: {said}")


def _trace(receipt: Receipt, began_at: float, elapsed_s: float, slowest: Sequence[tuple[float, str]]) -> PartTrace:
    stages = stage_clock.take()
    return PartTrace(
        shard=receipt.shard,
        part=receipt.number,
        worker=f"{socket.gethostname()}:{os.getpid()}",
        began_at=began_at,
        elapsed_s=elapsed_s,
        busy_s=receipt.busy_s,
        num_records=receipt.num_records,
        num_bytes=receipt.num_bytes,
        peak_bytes=peak_rss_bytes(),
        stages={"read": max(elapsed_s - sum(stages.values()), 0.0), **stages},
        slowest=tuple((key, seconds) for seconds, key in sorted(slowest, reverse=True)),
    )
