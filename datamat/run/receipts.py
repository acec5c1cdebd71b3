"""Receipts: what a worker leaves for a part besides its records, saying where and what they are.

    .datamat/parts/SHARD/00003.receipt      the receipt, written last: a part without one does not count; a line of JSON
                                            and then the offsets of its records from the part's first byte, as numbers
                         00003.EXT.part     its records in one format, where they are not in the shard's file yet
                         00003.inputs       what its input files held, see `inputs`

Nothing is flushed to disk: a receipt contains the digests of the bytes of its part and of their offsets. A part that
does not match them, because of a power cut or a flipped bit in memory or on disk, is rebuilt and never joined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from typing import TYPE_CHECKING

import xxhash

from datamat.directory.files import parse_json
from datamat.directory.keys import KeyDigest, RecordKey
from datamat.directory.ledger import FailedRow
from datamat.errors import CorruptDataError
from datamat.folders.local import read_regular
from datamat.formats import Offsets
from datamat.formats.io import write_all
from datamat.values import frozen

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping
    from typing import Any

    from datamat.directory.manifest import FilePart
    from datamat.events import PartTrace
    from datamat.plan.plan import PartSpec


_MOST_BYTES = 1 << 32


class DamagedPartError(CorruptDataError):
    """A part does not match its receipt; it can be rebuilt.

    Args:
        number: number of the part in its shard.
        message: the damaged file, what was found, and what the receipt says.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"part {number}: {message}")
        self.number = number
        self._message = message

    def __reduce__(self) -> tuple[type[DamagedPartError], tuple[int, str]]:
        return type(self), (self.number, self._message)


@dataclasses.dataclass(slots=True, repr=False, eq=False)
class Outcome:
    """The results of the rows of a part so far.

    Attributes:
        keys: digest of the keys of the records, in order.
        num_done: number of rows that gave all their records.
        failed: rows that gave no record.
        retried: rows that gave their records when tried again.
        dropped: rows, and single records of other rows, that were intentionally left out.
        inputs: digest of the content of the input files; "" if there are none or it is unknown.
        input_times: digest of the rows with the sizes and times of their input files; "" if these do not count.
        undeclared: opened files that no row of the part declares; only for a worker's first part.
        memos: digests of memos' contents, by name; only for a worker's first parts.
        remarks: remarks for the user on the transform, as returned by `Pipeline.records`.
        statistics: statistics of the records' values, as returned by `Statistics.to_lines`.
    """

    keys: KeyDigest = dataclasses.field(default_factory=KeyDigest)
    num_done: int = 0
    failed: list[FailedRow] = dataclasses.field(default_factory=list)
    retried: list[FailedRow] = dataclasses.field(default_factory=list)
    dropped: list[FailedRow] = dataclasses.field(default_factory=list)
    inputs: str = ""
    input_times: str = ""
    undeclared: tuple[str, ...] = ()
    memos: Mapping[str, str] = dataclasses.field(default_factory=dict)
    remarks: set[str] = dataclasses.field(default_factory=set)
    statistics: tuple[str, ...] = ()


@frozen()
class PartInfo:
    """A part in one format.

    Attributes:
        extension: file extension of the format.
        num_bytes: number of its bytes.
        digest: XXH3-128 of its bytes.
        offsets_bytes: size of its offsets behind the receipt.
        offsets_digest: XXH3-128 of these.
        start: its first byte in the shard's growing file; None while it is in a separate file.
    """

    extension: str
    num_bytes: int
    digest: str
    offsets_bytes: int
    offsets_digest: str
    start: int | None = None


@frozen()
class SealedFile:
    """A complete and flushed file of a shard, not under its final name yet.

    Attributes:
        extension: file extension of the format.
        parts: size and digest of each of its parts.
        head, tail, offsets: its two ends and its offsets file, as in `ShardInfo`.
    """

    extension: str
    parts: tuple[FilePart, ...]
    head: FilePart
    tail: FilePart
    offsets: FilePart


@frozen()
class Sealed:
    """A worker's reply for a completed shard.

    Attributes:
        shard: name of the shard.
        files: its files, in the order of the formats.
        num_records: number of records of its parts.
        inputs: digest of the content of its input files, which the worker has combined in `shards/SHARD.inputs`; None
            if that is left to the driver.
        damaged: the damaged part to rebuild that prevented completion, if any.
    """

    shard: str
    files: tuple[SealedFile, ...] = ()
    num_records: int = 0
    inputs: str | None = None
    damaged: DamagedPartError | None = None


@frozen()
class Receipt:
    """A worker's reply for a part: never pixels.

    Attributes:
        shard, number: name of the shard, and number of the part in it.
        start, stop: range of its rows, as positions in the plan.
        fingerprint: fingerprint of the shard.
        num_records: number of records in each of its files.
        files: its files, one for each format, in order.
        keys: digest of the keys of its records, in order.
        busy_s: processor seconds that the worker spent on it.
        elapsed_s: wall time in seconds.
        num_done: number of rows that gave all their records.
        failed: rows that gave no record, with the reason.
        retried: rows that gave their records only on another attempt.
        dropped: rows, and single records of other rows, that were intentionally left out.
        inputs, input_times: digests of input files, as in `Outcome`.
        statistics: statistics of the values of its records, as in `Outcome`.
        undeclared: opened files that no row declares, if the worker watched; not stored on disk.
        memos: digests of memos' contents in the worker, as in `Outcome`; not stored on disk.
        remarks: remarks for the user on the transform; not stored on disk.
        sealed: the completed shard, if this was its last part; not stored on disk.
        is_repeated: whether an engine repeated the call after another worker had completed the part; not stored on
            disk.
        trace: time and place of the work; not stored on disk.
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
    dropped: tuple[FailedRow, ...] = ()
    inputs: str = ""
    input_times: str = ""
    statistics: tuple[str, ...] = ()
    undeclared: tuple[str, ...] = ()
    memos: Mapping[str, str] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    sealed: Sealed | None = None
    is_repeated: bool = False
    trace: PartTrace | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows of the part."""
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        """Size of all its files, in bytes."""
        return sum(file.num_bytes for file in self.files)

    @property
    def num_lost(self) -> int:
        """Number of rows that are unaccounted for: 0, unless datamat has a bug."""
        return self.num_rows - self.num_done - len({row.position for row in self.failed}) - self.num_dropped

    @property
    def num_failed(self) -> int:
        """Number of rows that failed."""
        return len(self.failed)

    @property
    def num_dropped(self) -> int:
        """Number of rows of which every record was left out."""
        if not self.dropped:  # called several times per part
            return 0
        return sum(RecordKey.row_of(row.key) == row.key for row in self.dropped)

    @property
    def num_dropped_records(self) -> int:
        """Number of records left out of rows that gave others."""
        return len(self.dropped) - self.num_dropped

    @classmethod
    def from_json(cls, value: Any) -> Receipt:
        """Return a receipt from its JSON value; raise `TypeError`, `KeyError` or `AttributeError` for anything else."""
        rows = {name: tuple(FailedRow(**row) for row in value.pop(name)) for name in ("failed", "retried", "dropped")}
        files = tuple(PartInfo(**file) for file in value.pop("files"))
        return cls(**{**value, **rows, "files": files, "statistics": tuple(value["statistics"])})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value that is stored on disk, with its files and rows as they are."""
        return {name: getattr(self, name) for name in _STORED}

    def is_for(self, spec: PartSpec) -> bool:
        """Return True if the receipt is for a part of the present plan."""
        mine = (self.shard, self.number, self.start, self.stop, self.fingerprint)
        return mine == (spec.shard, spec.number, spec.start, spec.stop, spec.fingerprint)

    def file_of(self, extension: str) -> PartInfo:
        """Return the file of one format, which must be among the formats of the receipt."""
        return next(file for file in self.files if file.extension == extension)


_STORED = tuple(
    field.name
    for field in dataclasses.fields(Receipt)
    if field.name not in {"undeclared", "memos", "remarks", "sealed", "is_repeated", "trace"}  # only for this run
)


def part_folder(work: pathlib.Path, shard: str) -> pathlib.Path:
    """Return the folder of the parts of a shard."""
    return work / "parts" / shard


def part_path(folder: pathlib.Path, number: int, extension: str) -> pathlib.Path:
    """Return the file of a part in one format."""
    return folder / f"{number:05d}.{extension}.part"


def inputs_path(folder: pathlib.Path, number: int) -> pathlib.Path:
    """Return the file that records the content of a part's input files."""
    return folder / f"{number:05d}.inputs"


def read_offsets(folder: pathlib.Path, receipt: Receipt, extension: str) -> Offsets:
    """Return the offsets of the records in a file of a part.

    Raises:
        OSError: they cannot be read.
        CorruptDataError: they do not have the digest that the receipt gave.
    """
    path, part = receipt_path(folder, receipt.number), receipt.file_of(extension)
    content = read_regular(path, max_bytes=_MOST_BYTES)
    start = content.find(b"\n") + 1 + sum(file.offsets_bytes for file in receipt.files[: receipt.files.index(part)])
    found = content[start : start + part.offsets_bytes]
    if xxhash.xxh3_128_hexdigest(found) != part.offsets_digest:
        raise CorruptDataError(f"{path} does not have the offsets in {extension} that the receipt was written with")
    try:
        return Offsets.from_bytes(found)
    except ValueError as error:
        raise CorruptDataError(f"{path} is of another version of datamat") from error


def parse_receipt(content: bytes, place: str) -> Receipt:
    """Return a receipt; raise `ValueError`, `TypeError`, `LookupError` or `AttributeError` for anything else."""
    return Receipt.from_json(parse_json(content[: content.index(b"\n")], place))


def read_receipt(folder: pathlib.Path, number: int) -> Receipt | None:
    """Return the receipt of a part; None if it is missing or damaged."""
    path = receipt_path(folder, number)
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
        return parse_receipt(read_regular(path, max_bytes=_MOST_BYTES), os.fspath(path))
    return None


def write_receipt(folder: pathlib.Path, receipt: Receipt, offsets: bytes) -> None:
    """Write a receipt, with the offsets in its files one after another, atomically; from then on its part counts."""
    text = json.dumps(receipt.to_json(), default=_by_field)
    replace_file(receipt_path(folder, receipt.number), text.encode() + b"\n" + offsets)


def _by_field(one: PartInfo | FailedRow) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}


def replace_file(path: pathlib.Path, data: bytes) -> None:
    """Write a file that is either complete or absent; it is not flushed."""
    temporary = path.with_suffix(temporary_suffix())
    with open(temporary, "wb", buffering=0) as file:
        write_all(file, memoryview(data))
    os.replace(temporary, path)


def temporary_suffix() -> str:
    """Return a unique suffix for a name: two hosts may have processes with the same id."""
    return f".{uuid.uuid4().hex}.tmp"


def receipt_path(folder: pathlib.Path, number: int) -> pathlib.Path:
    """Return the receipt of a part."""
    return folder / f"{number:05d}.receipt"
