"""Write the bytes of a part: at the end of its shard's files, or to separate files if predecessors are missing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import TYPE_CHECKING

import xxhash

from datamat.formats.io import write_all
from datamat.run.growing import SEAL_WAIT_S, open_at
from datamat.run.receipts import (
    DamagedPartError,
    PartInfo,
    Receipt,
    Sealed,
    part_path,
    replace_file,
    temporary_suffix,
    write_receipt,
)

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from datamat.features.base import Kind
    from datamat.formats import Block, Buffer, Record, ShardFormat
    from datamat.plan.plan import PartSpec
    from datamat.run.growing import GrowingShard
    from datamat.run.receipts import Outcome


class PartWriter:
    """Writes the records of a part, each in every format. A context manager.

    Args:
        growing: the unfinished shard.
        spec: the part.
        formats: formats of the part.
        columns: kinds of the columns of the records.
        appends: whether the part may be appended directly to the shard's files; never with an engine that may run a
            call twice at the same time.
    """

    def __init__(
        self,
        growing: GrowingShard,
        spec: PartSpec,
        formats: Sequence[ShardFormat],
        columns: Mapping[str, Kind],
        *,
        appends: bool = False,
    ) -> None:
        self._growing = growing
        self._folder = self._growing.folder
        self._spec = spec
        self._formats = formats
        self._columns = columns
        self._appends = appends and any(made.joins_parts for made in formats)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PartWriter:
        self._started = time.perf_counter()
        # Not its parents: a run whose output was removed must not recreate the folder.
        self._folder.parent.mkdir(exist_ok=True)
        self._folder.mkdir(exist_ok=True)
        with self._stack:
            self._lock = self._stack.enter_context(contextlib.ExitStack())
            ends = self._end_before()
            self._files = [self._stack.enter_context(self._file(made, ends)) for made in self._formats]
            self._writers = [
                made.writer(file, self._columns)  # type: ignore[arg-type]  # `write` is enough
                for made, file in zip(self._formats, self._files, strict=True)
            ]
            self._stack = self._stack.pop_all()
        return self

    def _end_before(self) -> dict[str, int]:
        """Return the part's position in the shard's files, whose lock is then held; {} if it needs separate files."""
        number = self._spec.number
        if not self._appends or (number and not self._growing.is_done(number - 1)):
            return {}
        if self._lock.enter_context(self._growing.held()):
            self._growing.check_run()
            ends = self._growing.end_before(number)
            if ends is not None:
                return ends
        self._lock.close()
        return {}

    def _file(self, made: ShardFormat, ends: Mapping[str, int]) -> PartFile:
        if made.extension in ends:
            return PartFile(self._growing.files[made.extension], start=ends[made.extension])
        return PartFile(part_path(self._folder, self._spec.number, made.extension))

    def append(self, record: Record) -> None:
        """Append one record; raise `SchemaError` if it does not match its columns."""
        for writer in self._writers:
            writer.append(record)

    def append_block(self, columns: Block) -> None:
        """Append n records given by columns; raise `SchemaError` like `append`."""
        for writer in self._writers:
            writer.append_block(columns)

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def check_run(self) -> None:
        """Raise `OutputLockedError` if another run has begun since this one."""
        self._growing.check_run()

    def first(self) -> Receipt | None:
        """Return the receipt of another worker if an engine made the call twice and that worker is done.

        The first to complete a part wins: it is never written again.
        """
        number = self._spec.number
        found = self._growing.receipt(number)
        if found is None or not found.is_for(self._spec):
            return None
        if not self._growing.is_joined(found) and number not in self._growing.whole({number: found}):
            return None
        return dataclasses.replace(found, is_repeated=True)

    def finish(self, outcome: Outcome, busy_s: Callable[[], float]) -> Receipt:
        """Complete the part and return its receipt, which is also on disk.

        Separate parts after it are then joined; if the shard is complete, it is sealed.

        Args:
            outcome: results of its rows.
            busy_s: returns the processor seconds that the part has taken so far.
        """
        with contextlib.nullcontext() if self._appends else self._growing.held(wait_s=SEAL_WAIT_S):
            self._growing.check_run()  # its file may have been replaced meanwhile, see `disown`
            if not self._appends and (first := self.first()):
                return first
            receipt = self._receipt(outcome, busy_s)
            write_receipt(self._folder, receipt)
        sealed = self._join_others() if self._appends else None
        return dataclasses.replace(
            receipt,
            undeclared=outcome.undeclared,
            memos=outcome.memos,
            remarks=tuple(sorted(outcome.remarks)),
            sealed=sealed,
            busy_s=busy_s(),
        )

    def _receipt(self, outcome: Outcome, busy_s: Callable[[], float]) -> Receipt:
        spec, num_records = self._spec, self._writers[0].num_records
        files = []
        for made, file, writer in zip(self._formats, self._files, self._writers, strict=True):
            offsets = writer.finish().to_bytes()
            file.finish()
            replace_file(part_path(self._folder, spec.number, made.extension).with_suffix(".idx"), offsets)
            offsets_digest = xxhash.xxh3_128_hexdigest(offsets)
            files.append(PartInfo(made.extension, file.num_bytes, file.hexdigest(), offsets_digest, file.start))
        return Receipt(
            spec.shard,
            spec.number,
            spec.start,
            spec.stop,
            spec.fingerprint,
            num_records,
            tuple(files),
            outcome.keys.hexdigest(),
            busy_s(),
            time.perf_counter() - self._started,
            outcome.num_done,
            tuple(outcome.failed),
            tuple(outcome.retried),
            tuple(outcome.dropped),
            outcome.inputs,
            outcome.input_times,
            outcome.statistics,
        )

    def _join_others(self) -> Sealed | None:
        """Join the separate parts after this one, and seal the shard if it is now complete."""
        growing, number = self._growing, self._spec.number
        with contextlib.suppress(DamagedPartError):  # the driver then lets the shard be sealed, and gets the error
            if any(file.start is not None for file in self._files):
                reached = growing.join_from(number + 1)
                if reached == self._spec.num_parts:
                    return growing.seal_held()
                self._lock.close()
            else:
                reached = number
            # Meanwhile another worker may have completed a part: the one that sees both receipts joins it.
            while growing.is_done(reached):
                with growing.held() as is_held:
                    if not is_held:
                        break
                    if growing.end_before(reached) is None:
                        break
                    reached = growing.join_from(reached)
                    if reached == self._spec.num_parts:
                        return growing.seal_held()
        return None


class PartFile:
    """A binary file that takes the bytes of a part in one format, and digests them.

    Args:
        path: final name of the part's own file; or, with `start`, the growing file of the shard.
        start: first byte of the part in the growing file.

    Attributes:
        num_bytes: number of bytes written.
        start: first byte of the part in the growing file; None for a file of its own.
    """

    def __init__(self, path: pathlib.Path, *, start: int | None = None) -> None:
        self._path = path
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0
        self.start = start

    def __enter__(self) -> PartFile:
        if self.start is not None:
            self._file = open_at(self._path, self.start)
        else:
            self._temporary = self._path.with_suffix(temporary_suffix())
            self._file = open(self._temporary, "wb", buffering=0)
        return self

    def write(self, data: Buffer) -> int:
        """Write all of `data`; the file is unbuffered, since format writers buffer."""
        self._digest.update(data)
        write_all(self._file, memoryview(data))
        self.num_bytes += len(memoryview(data))
        return len(memoryview(data))

    def hexdigest(self) -> str:
        """Return the digest of the bytes so far."""
        return self._digest.hexdigest()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is not None and self.start is None:
            self._temporary.unlink(missing_ok=True)

    def finish(self) -> None:
        """Give the file of a separate part its final name."""
        if self.start is None:
            os.replace(self._temporary, self._path)
