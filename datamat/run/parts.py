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
    temporary_suffix,
)

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, BinaryIO

    from datamat.features.base import Kind
    from datamat.formats import Block, Buffer, Record, ShardFormat
    from datamat.plan.plan import PartSpec
    from datamat.run.growing import GrowingShard
    from datamat.run.receipts import Outcome


class ShardEnd:
    """The end of an unfinished shard, where the parts of a call are appended. A context manager.

    From the first part that can be appended to the end of the call, it holds the lock and keeps the files open.

    Args:
        growing: the unfinished shard.
        appends: whether parts may be appended directly to the shard's files; never with an engine that may run a call
            twice at the same time.
    """

    def __init__(self, growing: GrowingShard, *, appends: bool) -> None:
        self.appends = appends and growing.joins_parts
        self.growing = growing
        self._stack = contextlib.ExitStack()
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> ShardEnd:
        # Not its parents: a run whose output was removed must not recreate the folder.
        self.growing.folder.parent.mkdir(exist_ok=True)
        self.growing.folder.mkdir(exist_ok=True)
        return self

    def at(self, number: int) -> Mapping[str, BinaryIO]:
        """Return the shard's files, open at the position of a part, by extension; {} if it needs separate files."""
        growing = self.growing
        if not self.appends or self._files or (number and not growing.is_done(number - 1)):
            return self._files
        if self._stack.enter_context(growing.held()):
            growing.check_run()
            for extension, end in (growing.end_before(number) or {}).items():
                self._files[extension] = self._stack.enter_context(open_at(growing.files[extension], end))
        if not self._files:
            self._stack.close()
        return self._files

    def leave(self, last: PartSpec) -> Sealed | None:
        """After the last part of the call, join the separate parts behind it; seal the shard if it is then complete."""
        growing, reached = self.growing, last.number
        with contextlib.suppress(DamagedPartError):  # the driver then lets the shard be sealed, and gets the error
            if self._files:
                reached = growing.join_from(reached + 1)
                if reached == last.num_parts:
                    return growing.seal_held()
                self._stack.close()
            # Meanwhile another worker may have completed a part: the one that sees both receipts joins it.
            while self.appends and growing.is_done(reached):
                with growing.held() as is_held:
                    if not is_held:
                        break
                    if growing.end_before(reached) is None:
                        break
                    reached = growing.join_from(reached)
                    if reached == last.num_parts:
                        return growing.seal_held()
        return None

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class PartWriter:
    """Writes the records of a part, each in every format. A context manager.

    Args:
        end: the end of the unfinished shard.
        spec: the part.
        formats: formats of the part.
        columns: kinds of the columns of the records.

    Attributes:
        folder: folder of the parts of the shard.
    """

    def __init__(
        self, end: ShardEnd, spec: PartSpec, formats: Sequence[ShardFormat], columns: Mapping[str, Kind]
    ) -> None:
        self._end = end
        self._growing = end.growing
        self.folder = end.growing.folder
        self._spec = spec
        self._formats = formats
        self._columns = columns
        self._appends = end.appends
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PartWriter:
        self._started = time.perf_counter()
        with self._stack:
            files = self._end.at(self._spec.number)
            self._files = [
                self._stack.enter_context(
                    PartFile(part_path(self.folder, self._spec.number, made.extension), files.get(made.extension))
                )
                for made in self._formats
            ]
            self._writers = [
                made.writer(file, self._columns)  # type: ignore[arg-type]  # `write` is enough
                for made, file in zip(self._formats, self._files, strict=True)
            ]
            self._stack = self._stack.pop_all()
        return self

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

        Args:
            outcome: results of its rows.
            busy_s: returns the processor seconds that the part has taken so far.
        """
        with contextlib.nullcontext() if self._appends else self._growing.held(wait_s=SEAL_WAIT_S):
            self._growing.check_run()  # its file may have been replaced meanwhile, see `disown`
            if not self._appends and (first := self.first()):
                return first
            offsets = []
            for file, writer in zip(self._files, self._writers, strict=True):
                offsets.append(writer.finish().to_bytes())
                file.finish()
            receipt = self._receipt(offsets, outcome, busy_s())
            self._growing.put(receipt, b"".join(offsets))
        return receipt

    def _receipt(self, offsets: Sequence[bytes], outcome: Outcome, busy_s: float) -> Receipt:
        spec = self._spec
        files = [
            PartInfo(
                made.extension,
                file.num_bytes,
                file.hexdigest(),
                len(places),
                xxhash.xxh3_128_hexdigest(places),
                file.start,
            )
            for made, file, places in zip(self._formats, self._files, offsets, strict=True)
        ]
        return Receipt(
            spec.shard,
            spec.number,
            spec.start,
            spec.stop,
            spec.fingerprint,
            self._writers[0].num_records,
            tuple(files),
            outcome.keys.hexdigest(),
            busy_s,
            time.perf_counter() - self._started,
            outcome.num_done,
            tuple(outcome.failed),
            tuple(outcome.retried),
            tuple(outcome.dropped),
            outcome.inputs,
            outcome.input_times,
            outcome.statistics,
            outcome.undeclared,
            outcome.memos,
            tuple(sorted(outcome.remarks)),
        )


class PartFile:
    """A binary file that takes the bytes of a part in one format, and digests them.

    Args:
        path: final name of the part's own file.
        growing: the growing file of the shard, open at its end; None for a file of its own.

    Attributes:
        num_bytes: number of bytes written.
        start: first byte of the part in the growing file; None for a file of its own.
    """

    def __init__(self, path: pathlib.Path, growing: BinaryIO | None = None) -> None:
        self._path = path
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0
        self.start = None if growing is None else growing.tell()
        self._file: Any = growing

    def __enter__(self) -> PartFile:
        if self.start is None:
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
        if self.start is None:
            self._file.close()
            if kind is not None:
                self._temporary.unlink(missing_ok=True)

    def finish(self) -> None:
        """Give the file of a separate part its final name."""
        if self.start is None:
            os.replace(self._temporary, self._path)
