"""What a worker leaves of a part: its records, in a file for each format, and the receipt.

    .datamat/parts/SHARD/00003.EXT.part     bytes of the records in one format
                         00003.EXT.idx      their offsets in it
                         00003.json         the receipt, written last: a part without one does not count

Nothing is flushed to the disk: a receipt holds the digests of the files of its part, and a part that a power cut tore
does not match them and is made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING

import xxhash

from datamat.formats import Offsets
from datamat.ledger import FailedRow
from datamat.manifest import KeyDigest

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from datamat.formats import Block, Buffer, ColumnKind, Record, ShardFormat
    from datamat.plan import PartSpec

__all__ = ["Outcome", "PartFile", "PartInfo", "PartWriter", "Receipt", "part_folder", "part_path", "read_offsets"]


@dataclasses.dataclass(slots=True)
class Outcome:
    """What has become of the rows of a part so far.

    Attributes:
        keys: digest of the keys of their records, in order.
        num_done: rows that gave all their records.
        failed: rows that gave none.
        retried: rows that gave theirs when they were tried again.
    """

    keys: KeyDigest = dataclasses.field(default_factory=KeyDigest)
    num_done: int = 0
    failed: list[FailedRow] = dataclasses.field(default_factory=list)
    retried: list[FailedRow] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class PartInfo:
    """One file of a part: the extension of its format, its size in bytes, and its digest (XXH3-128)."""

    extension: str
    num_bytes: int
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """What a worker returns for a part: never pixels.

    Attributes:
        shard, number: which part.
        start, stop: its rows, as positions in the order of the plan.
        fingerprint: of the shard.
        num_records: in each of its files.
        files: one for each format, in the order of the formats.
        keys: digest of the keys of its records, in order.
        busy_s: processor seconds that the worker spent on it.
        elapsed_s: seconds that it took.
        num_done: rows that gave all their records.
        failed: rows that gave none, and why.
        retried: rows that gave theirs only when they were tried again.
    """

    shard: str
    number: int
    start: int
    stop: int
    fingerprint: str
    num_records: int
    files: tuple[PartInfo, ...]
    keys: str
    busy_s: float
    elapsed_s: float
    num_done: int
    failed: tuple[FailedRow, ...] = ()
    retried: tuple[FailedRow, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the part."""
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def num_lost(self) -> int:
        """Rows of which it tells nothing: none, unless something is wrong with datamat itself."""
        return self.num_rows - self.num_done - len({row.position for row in self.failed})

    @classmethod
    def from_json(cls, value: Any) -> Receipt:
        """Return the receipt that a part left; raises `TypeError`, `KeyError` or `AttributeError` for anything else."""
        rows = {name: tuple(FailedRow(**row) for row in value.pop(name)) for name in ("failed", "retried")}
        files = tuple(PartInfo(**file) for file in value.pop("files"))
        return cls(**{**value, **rows, "files": files})

    def is_for(self, spec: PartSpec) -> bool:
        """Tell whether this is the receipt of a part of the present plan."""
        mine = (self.shard, self.number, self.start, self.stop, self.fingerprint)
        return mine == (spec.shard, spec.number, spec.start, spec.stop, spec.fingerprint)

    def file_of(self, extension: str) -> PartInfo:
        """Return what is told of the file of one format; there is one, or the receipt is of other formats."""
        return next(file for file in self.files if file.extension == extension)


def part_folder(work: pathlib.Path, shard: str) -> pathlib.Path:
    """Return the folder of the parts of a shard."""
    return work / "parts" / shard


def part_path(folder: pathlib.Path, number: int, extension: str) -> pathlib.Path:
    """Return the file of a part in one format."""
    return folder / f"{number:05d}.{extension}.part"


def read_offsets(folder: pathlib.Path, number: int, extension: str) -> Offsets:
    """Return the offsets of the records in a file of a part; raises `OSError` or `CorruptDataError`."""
    return Offsets.from_text(part_path(folder, number, extension).with_suffix(".idx").read_text("ascii"))


class PartWriter:
    """Writes the records of a part, each once in every format.

    Args:
        work: the `.datamat` folder.
        spec: the part.
        formats: in which it is written.
        columns: kinds of the columns of the records.
    """

    def __init__(
        self,
        work: pathlib.Path,
        spec: PartSpec,
        formats: Sequence[ShardFormat],
        columns: Mapping[str, ColumnKind],
    ) -> None:
        self._folder = part_folder(work, spec.shard)
        self._spec = spec
        self._formats = formats
        self._columns = columns
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PartWriter:
        self._started = time.perf_counter()
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._stack:
            self._files = [
                self._stack.enter_context(PartFile(part_path(self._folder, self._spec.number, made.extension)))
                for made in self._formats
            ]
            self._writers = [
                made.writer(file, self._columns)  # type: ignore[arg-type]  # `write` is enough
                for made, file in zip(self._formats, self._files, strict=True)
            ]
            self._stack = self._stack.pop_all()
        return self

    def append(self, record: Record) -> None:
        """Append one record; raises `SchemaError` where it is not as its columns say."""
        for writer in self._writers:
            writer.append(record)

    def append_block(self, columns: Block) -> None:
        """Append n records given column by column; raises `SchemaError` as `append` does."""
        for writer in self._writers:
            writer.append_block(columns)

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def finish(self, outcome: Outcome, busy_s: Callable[[], float]) -> Receipt:
        """Name the files of the part and return the receipt, which is on the disk, too.

        Args:
            outcome: of its rows.
            busy_s: tells the processor seconds that were spent on it so far.
        """
        spec, num_records = self._spec, self._writers[0].num_records
        files = tuple(
            PartInfo(made.extension, *file.finish(writer.finish()))
            for made, file, writer in zip(self._formats, self._files, self._writers, strict=True)
        )
        receipt = Receipt(
            spec.shard,
            spec.number,
            spec.start,
            spec.stop,
            spec.fingerprint,
            num_records,
            files,
            outcome.keys.hexdigest(),
            busy_s(),
            time.perf_counter() - self._started,
            outcome.num_done,
            tuple(outcome.failed),
            tuple(outcome.retried),
        )
        _replace(self._folder / f"{spec.number:05d}.json", json.dumps(dataclasses.asdict(receipt)).encode())
        return receipt


class PartFile:
    """A file of a part being written: a binary file that hashes what goes through it.

    Args:
        path: the name that it gets when it is complete.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0

    def __enter__(self) -> PartFile:
        self._file = open(self._path.with_suffix(f".{os.getpid()}.tmp"), "wb", buffering=0)
        return self

    def write(self, data: Buffer) -> int:
        """Write all of `data`; the file is unbuffered because writers of formats buffer."""
        self._digest.update(data)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self.num_bytes += len(memoryview(data))
        return len(memoryview(data))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file.name)

    def finish(self, offsets: Offsets) -> tuple[int, str]:
        """Name the file, write the offsets of its records beside it, and return its size in bytes and its digest."""
        os.replace(self._file.name, self._path)
        _replace(self._path.with_suffix(".idx"), offsets.to_text().encode())
        return self.num_bytes, self._digest.hexdigest()


def _replace(path: pathlib.Path, data: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)
