"""What a worker leaves of a part beside its records: the receipt, which says where they are and what they are.

    .datamat/parts/SHARD/00003.json         the receipt, written last: a part without one does not count
                         00003.EXT.idx      where its records begin, counted from the part's first byte
                         00003.EXT.part     its records in one format, where they are not in the shard's file yet
                         00003.inputs       what its input files held, see `inputs`

Nothing is flushed to the disk: a receipt holds the digests of the bytes of its part and of their offsets. A part that
does not match them, because a power cut tore it or memory or disk flipped a bit, is made again and never joined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from typing import TYPE_CHECKING

import xxhash

from datamat.directory.files import read_json
from datamat.directory.keys import KeyDigest, RecordKey
from datamat.directory.ledger import FailedRow
from datamat.errors import CorruptDataError
from datamat.folders.local import read_regular
from datamat.formats import Offsets
from datamat.values import frozen

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping
    from typing import Any

    from datamat.directory.manifest import FilePart
    from datamat.events import PartTrace
    from datamat.plan.plan import PartSpec


__all__ = [
    "DamagedPartError",
    "Outcome",
    "PartInfo",
    "Receipt",
    "Sealed",
    "SealedFile",
    "inputs_path",
    "part_folder",
    "part_path",
    "read_offsets",
    "read_receipt",
    "receipt_path",
    "replace_file",
    "temporary_suffix",
    "write_receipt",
]

_MOST_OFFSETS_BYTES = 1 << 32


class DamagedPartError(CorruptDataError):
    """A part is not what its receipt says; it can be made again.

    Args:
        number: number of the part in its shard.
        message: which file is damaged, what was found, and what the receipt says.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"part {number}: {message}")
        self.number = number
        self._message = message

    def __reduce__(self) -> tuple[type[DamagedPartError], tuple[int, str]]:
        return type(self), (self.number, self._message)


@dataclasses.dataclass(slots=True)
class Outcome:
    """The results of the rows of a part so far.

    Attributes:
        keys: digest of the keys of the records, in order.
        num_done: number of rows that gave all their records.
        failed: rows that gave no record.
        retried: rows that gave their records when tried again.
        dropped: rows, and single records of other rows, that were left out on purpose.
        inputs: digest of the content of the input files; "" if there are none, or it is unknown.
        input_times: digest of the rows with sizes and times of their input files; "" where these do not count.
        undeclared: opened files that no row of the part declares; only for the first part of a worker.
        memos: digests of what memos hold, by name; only for the first parts of a worker.
        remarks: what the user should know of the transform, as `Pipeline.records` gives it.
        statistics: what is known of the values of the records, as `Statistics.to_lines` gives it.
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
        offsets_digest: XXH3-128 of the file with its offsets.
        start: its first byte in the shard's growing file; None while it lies apart, in a file of its own.
    """

    extension: str
    num_bytes: int
    digest: str
    offsets_digest: str
    start: int | None = None


@frozen()
class SealedFile:
    """A complete and flushed file of a shard, which has no name yet.

    Attributes:
        extension: file extension of the format.
        parts: the size and the digest of each of its parts.
        head, tail, offsets: its ends, and the file of its offsets, as in `ShardInfo`.
    """

    extension: str
    parts: tuple[FilePart, ...]
    head: FilePart
    tail: FilePart
    offsets: FilePart


@frozen()
class Sealed:
    """What a worker returns for a shard that it has completed.

    Attributes:
        shard: name of the shard.
        files: its files, in the order of the formats.
        num_records: number of records of the parts that it was made of.
        inputs: digest of what its input files held, which the worker has put together in `shards/SHARD.inputs`; None
            where that is left to the driver.
        damaged: the part that has to be made again, where that prevented it.
    """

    shard: str
    files: tuple[SealedFile, ...] = ()
    num_records: int = 0
    inputs: str | None = None
    damaged: DamagedPartError | None = None


@frozen()
class Receipt:
    """What a worker returns for a part: never pixels.

    Attributes:
        shard, number: name of the shard, and number of the part in it.
        start, stop: range of its rows, as positions in the order of the plan.
        fingerprint: fingerprint of the shard.
        num_records: number of records in each of its files.
        files: its files, one per format, in the order of the formats.
        keys: digest of the keys of its records, in order.
        busy_s: processor seconds that the worker spent on it.
        elapsed_s: wall time that it took, in seconds.
        num_done: number of rows that gave all their records.
        failed: rows that gave no record, and why.
        retried: rows that gave their records only when tried again.
        dropped: rows, and single records of other rows, that were left out on purpose.
        inputs, input_times: digests of input files, as in `Outcome`.
        statistics: what is known of the values of its records, as in `Outcome`.
        undeclared: opened files that no row declares, as far as the worker watched; not stored on disk.
        memos: digests of what memos hold in the worker, as in `Outcome`; not stored on disk.
        remarks: what the user should know of the transform; not stored on disk.
        sealed: the complete shard, where this part was the last that it lacked; not stored on disk.
        is_repeated: whether an engine made the call again, after another worker had completed the part; not stored on
            disk.
        trace: when and where it was made; not stored on disk.
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
        """Number of rows that it does not account for: 0, unless datamat has a bug."""
        return self.num_rows - self.num_done - len({row.position for row in self.failed}) - self.num_dropped

    @property
    def num_failed(self) -> int:
        """Number of rows that failed."""
        return len(self.failed)

    @property
    def num_dropped(self) -> int:
        """Number of rows of which every record was left out."""
        if not self.dropped:  # asked several times for each part
            return 0
        return sum(RecordKey.row_of(row.key) == row.key for row in self.dropped)

    @property
    def num_dropped_records(self) -> int:
        """Number of records that were left out of rows that gave others."""
        return len(self.dropped) - self.num_dropped

    @classmethod
    def from_json(cls, value: Any) -> Receipt:
        """Return the receipt that a part left; raises `TypeError`, `KeyError` or `AttributeError` for anything else."""
        rows = {name: tuple(FailedRow(**row) for row in value.pop(name)) for name in ("failed", "retried", "dropped")}
        files = tuple(PartInfo(**file) for file in value.pop("files"))
        return cls(**{**value, **rows, "files": files, "statistics": tuple(value["statistics"])})

    def to_json(self) -> dict[str, Any]:
        """Return what the part leaves on disk."""
        value = dataclasses.asdict(self)
        for name in ("undeclared", "memos", "remarks", "sealed", "is_repeated", "trace"):  # they concern this run only
            del value[name]
        return value

    def is_for(self, spec: PartSpec) -> bool:
        """Return True if this is the receipt of a part of the present plan."""
        mine = (self.shard, self.number, self.start, self.stop, self.fingerprint)
        return mine == (spec.shard, spec.number, spec.start, spec.stop, spec.fingerprint)

    def file_of(self, extension: str) -> PartInfo:
        """Return the file of one format, which must be among the formats of the receipt."""
        return next(file for file in self.files if file.extension == extension)


def part_folder(work: pathlib.Path, shard: str) -> pathlib.Path:
    """Return the folder of the parts of a shard."""
    return work / "parts" / shard


def part_path(folder: pathlib.Path, number: int, extension: str) -> pathlib.Path:
    """Return the file of a part in one format."""
    return folder / f"{number:05d}.{extension}.part"


def inputs_path(folder: pathlib.Path, number: int) -> pathlib.Path:
    """Return the file that records the content of a part's input files."""
    return folder / f"{number:05d}.inputs"


def read_offsets(folder: pathlib.Path, number: int, part: PartInfo) -> Offsets:
    """Return the offsets of the records in a file of a part.

    Raises:
        OSError: they cannot be read.
        CorruptDataError: they differ from what the receipt says.
    """
    path = part_path(folder, number, part.extension).with_suffix(".idx")
    content = read_regular(path, max_bytes=_MOST_OFFSETS_BYTES)
    if xxhash.xxh3_128_hexdigest(content) != part.offsets_digest:
        raise CorruptDataError(f"{path} does not have the digest that the receipt of part {number} gives")
    return Offsets.from_text(content.decode("ascii"))


def read_receipt(folder: pathlib.Path, number: int) -> Receipt | None:
    """Return the receipt of a part, or None if there is no whole one."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
        return Receipt.from_json(read_json(receipt_path(folder, number)))
    return None


def write_receipt(folder: pathlib.Path, receipt: Receipt) -> None:
    """Write a receipt atomically: from then on its part counts."""
    replace_file(receipt_path(folder, receipt.number), json.dumps(receipt.to_json()).encode())


def replace_file(path: pathlib.Path, data: bytes) -> None:
    """Write a file that is either complete or absent; it is not flushed."""
    temporary = path.with_suffix(temporary_suffix())
    temporary.write_bytes(data)
    os.replace(temporary, path)


def temporary_suffix() -> str:
    """Return the end of a name that nobody else uses: two hosts may have processes of one number."""
    return f".{uuid.uuid4().hex}.tmp"


def receipt_path(folder: pathlib.Path, number: int) -> pathlib.Path:
    """Return the receipt of a part."""
    return folder / f"{number:05d}.json"
