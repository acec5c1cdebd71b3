"""What a worker does with a part: read its rows, make their records, deal with those that fail, leave a receipt.

    rows of the part ── watch: noted in `NUMBER.at` ── Pipeline.records ──> all copies, then appended
                                                            └── fails ──> policy ──> told in the receipt

Whether a row fails, and which bytes the others give, depends on the row alone: so a shard with rows left out is the
same for any number of workers.
"""

from __future__ import annotations

import itertools
import resource
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import OutputError, SampleError, SchemaError
from datamat.kept import open_kept
from datamat.ledger import FailedRow
from datamat.parallel import retire
from datamat.parallel.role import is_worker
from datamat.quarantine import quarantine
from datamat.receipts import Outcome, PartWriter, part_folder
from datamat.rows import RowStore
from datamat.seeding import global_state_kept
from datamat.transforms import forbid_update_check
from datamat.watch import RowWatch
from datamat.writer import DatasetWriter

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Sequence

    from datamat.formats import Record, ShardFormat
    from datamat.index import IndexRow
    from datamat.kept import KeptRows
    from datamat.options import ErrorPolicy, WorkerOptions
    from datamat.pipeline import Pipeline
    from datamat.plan import PartSpec
    from datamat.receipts import Receipt

__all__ = ["Workplace", "set_up_process", "watch_file"]

_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # before a file is read again that could not be read
_LEAST_HEADROOM = 1 << 30  # bytes that one sample may ask for, however small max_rss is
_PAGE = resource.getpagesize()


def set_up_process() -> None:
    """Prepare a worker before anything is sent to it."""
    forbid_update_check()
    # glibc gives large blocks back as soon as they are freed, and the next picture faults every page in again: a third
    # of the time of decoding. Freeing one block of nearly 32 MB, the largest that it learns from, raises its
    # thresholds for good (mallopt(3), M_MMAP_THRESHOLD); the pages of this one are never touched.
    np.empty((32 << 20) - (1 << 16), np.uint8)
    # Where memory runs out the kernel is to end a worker, whose sample can be told, and not the run.
    _write_proc("/proc/self/oom_score_adj", "500")


def watch_file(work: pathlib.Path, spec: PartSpec) -> pathlib.Path:
    """Return where the worker of a part notes the row that it is at."""
    return part_folder(work, spec.shard) / f"{spec.number:05d}.at"


class Workplace:
    """What a worker keeps from part to part.

    Args:
        folder: of the rows; beside it are the parts.
        pipeline: makes records of rows.
        formats: those that they are written in.
        errors: what is done about rows that fail.
        workers: limits of time and memory.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        pipeline: Pipeline,
        formats: Sequence[ShardFormat],
        errors: ErrorPolicy,
        workers: WorkerOptions,
    ) -> None:
        self.store = RowStore(folder)
        self.work = folder.parent
        self.pipeline = pipeline
        self.errors = errors
        self.is_checked = False  # whether the transform was seen to draw from the seed alone
        self._formats = formats
        self._workers = workers
        # One part at a time in a process: a transform keeps the generators of the draw it is at.
        self._lock = threading.Lock()
        if workers.max_rss is not None and is_worker():
            _limit_memory(workers.max_rss)

    def write_part(self, spec: PartSpec, lost: Sequence[FailedRow] | None, kept: KeptRows | None) -> Receipt:
        """Write a part; see `Materializer.write_part`."""
        part_folder(self.work, spec.shard).mkdir(parents=True, exist_ok=True)
        watch = RowWatch(watch_file(self.work, spec), self._workers.sample_timeout_s)
        made = PartWriter(self.work, spec, self._formats, self.pipeline.writer.features.columns)
        try:
            with self._lock, global_state_kept(), watch, made as writer:
                started = time.process_time()
                with open_kept(kept, self._formats[0]) as find_kept:
                    outcome = _PartWork(self, spec, writer, watch, find_kept).do(lost, by_row=kept is not None)
                receipt = writer.finish(outcome, lambda: time.process_time() - started)
        except OSError as error:
            if isinstance(error, OutputError):
                raise
            raise OutputError(
                f"part {spec.number} of {spec.shard} cannot be written below {self.work}: {error.strerror or error}; "
                "make room or mend the disk, and run again to go on"
            ) from error
        if self._workers.max_rss is not None and _resident_bytes() > self._workers.max_rss:
            retire()
        return receipt


class _PartWork:
    """The rows of one part on their way into its files."""

    def __init__(
        self,
        place: Workplace,
        spec: PartSpec,
        writer: PartWriter,
        watch: RowWatch,
        find_kept: Callable[[int], Sequence[tuple[str, Record]]],
    ) -> None:
        self._place = place
        self._pipeline = place.pipeline
        self._spec = spec
        self._writer = writer
        self._watch = watch
        self._find_kept = find_kept
        self._outcome = Outcome()

    def do(self, lost: Sequence[FailedRow] | None, *, by_row: bool) -> Outcome:
        """Write the records of all rows but those that are lost."""
        spec, outcome = self._spec, self._outcome
        positions = np.asarray(self._place.store.order[spec.start : spec.stop])
        block_error = None
        if lost is None and not by_row and self._is_block():
            try:
                if self._write_block(positions):
                    return outcome
            except SampleError as error:
                block_error = error  # each row for itself then tells which one it was
        left_out = {failed.position: failed for failed in lost or ()}
        for position, row in enumerate(self._place.store.read(positions), spec.start):
            if position in left_out:
                self._leave_out(row, left_out[position], left_out[position].message)
            else:
                self._watch.at(position)
                self._append(self._find_kept(position) or self._records(position, row))
        self._watch.rest()
        if block_error is not None and not outcome.failed:
            raise block_error
        return outcome

    def _append(self, records: Sequence[tuple[str, Record]]) -> None:
        for key, record in records:
            self._writer.append(record)
            self._outcome.keys.add(key)
        self._outcome.num_done += len(records) >= self._spec.copies

    def _records(self, position: int, row: IndexRow) -> Sequence[tuple[str, Record]]:
        """Return all records of a row; none where it fails and the policy goes on without it."""
        spec = self._spec
        failure: SampleError | None = None
        for attempt in itertools.count(1):
            try:
                # All copies before the first is appended: a row is there with all of them, or not at all.
                records = list(self._pipeline.records(row, copies=spec.copies, augmented=spec.augmented))
                if spec.augmented and not self._place.is_checked:
                    self._pipeline.check_determined(row)
                    self._place.is_checked = True
            except (SampleError, SystemExit) as raised:
                error = raised if isinstance(raised, SampleError) else _exit_error(row, raised)
                if attempt <= self._place.errors.retries and _may_pass(error):
                    _pause(error, attempt)
                    failure = error
                    continue
                self._give_up(position, row, error, attempt)
                return ()
            if failure is not None:
                self._outcome.retried.append(_failed_row(position, failure, "retry", attempt))
            return records
        raise AssertionError("unreachable")

    def _give_up(self, position: int, row: IndexRow, error: SampleError, attempts: int) -> None:
        action = self._place.errors.action
        if action == "raise":
            raise error
        told = "".join(traceback.format_exception(error.__cause__ or error)) if action == "quarantine" else ""
        self._leave_out(row, _failed_row(position, error, action, attempts), told)

    def _leave_out(self, row: IndexRow, failed: FailedRow, told: str) -> None:
        if failed.action == "quarantine":
            quarantine(self._place.work, row, failed, told)
        self._outcome.failed.append(failed)

    def _is_block(self) -> bool:
        """Tell whether the rows may be done all at once."""
        plain = not self._spec.augmented and self._spec.copies == 1
        return plain and type(self._pipeline.writer).read_block is not DatasetWriter.read_block

    def _write_block(self, positions: np.ndarray) -> bool:
        """Write all rows at once, or tell that the plug-in wants to be asked for each."""
        store = self._place.store
        names = store.keys(positions)
        self._watch.at(self._spec.start, len(names))
        block = self._pipeline.block(names, dict(store.columns(positions)))
        if block is None:
            return False
        self._watch.rest()
        self._writer.append_block(block)
        for name in names:
            self._outcome.keys.add(name)
        self._outcome.num_done = len(names)
        return True


def _exit_error(row: IndexRow, error: SystemExit) -> SampleError:
    made = SampleError(row.key, f"SystemExit: {error}: read or augment called sys.exit; raise an error instead")
    made.__cause__ = error
    return made


def _may_pass(error: SampleError) -> bool:
    """Tell whether another attempt may go better: not where the sample itself is not as declared."""
    return not isinstance(error.__cause__, SchemaError)


def _pause(error: SampleError, attempt: int) -> None:
    """Wait a little, and longer each time, for a disk or network that does not answer; nothing else mends itself."""
    cause: Any = error.__cause__
    if isinstance(cause, OSError) or isinstance(getattr(cause, "__cause__", None), OSError):
        time.sleep(min(_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S))


def _failed_row(position: int, error: SampleError, action: str, attempts: int) -> FailedRow:
    name = type(error.__cause__ or error).__name__
    return FailedRow(position, error.key, name, error.reason, action, attempts)


def _limit_memory(max_rss: int) -> None:
    """Have what asks for far more memory than a worker may hold fail, before the system must end some process."""
    with open("/proc/self/statm", "rb") as file:
        data_bytes = int(file.read().split()[5]) * _PAGE
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data_bytes + max(max_rss, _LEAST_HEADROOM)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


def _write_proc(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:  # another system, or a container that forbids it
        return
