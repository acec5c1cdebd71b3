"""What a shard format is: one small interface, a record's values, and a look-up by name.

A format turns encoded records into the bytes of a file and back. It knows nothing of images, splits or plans: a record
is a mapping of column names to bytes, int64 numbers or float32 numbers.

    columns {name: kind} ── writer(file) ── append / append_block ── finish() ──> Offsets
    a file  ── read(path) ──────────────> every record in order, every checksum tested
    a range of bytes ── read_record() ──> one record, found through its line of Offsets

A worker writes a *part* (a run of records) into a file that its caller opened, hashes and syncs. The parts of a shard
are joined byte for byte, and `Offsets.joined` gives the offsets inside the joined file, so that no record is encoded
twice.

To add a format, implement `ShardFormat` and `ShardWriter` and name the class under the entry-point group
`datamat.formats`; `get_format` finds it by its name and imports it on first use.
"""

from __future__ import annotations

import abc
import importlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, TypeAlias, final

import numpy as np

from datamat.errors import CorruptDataError, MissingDependencyError, OptionError

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

__all__ = [
    "Block",
    "Buffer",
    "ColumnKind",
    "Offsets",
    "Record",
    "ShardFormat",
    "ShardWriter",
    "Value",
    "format_names",
    "get_format",
]

ColumnKind: TypeAlias = Literal["bytes", "int64", "float32"]
Value: TypeAlias = "bytes | Sequence[bytes] | NDArray[Any]"
"""One column of one record: one bytes value, several of them, or a 1-D int64 or float32 array."""
Record: TypeAlias = Mapping[str, Value]
"""One encoded record: column name to value."""
Block: TypeAlias = Mapping[str, "NDArray[Any] | Sequence[bytes]"]
"""n records: column name to int64 or float32 (n,) or (n, k), or to n bytes values."""
Buffer: TypeAlias = bytes | bytearray | memoryview

_ENTRY_POINTS = "datamat.formats"
_LINES_AT_ONCE = 1 << 14  # Python's integers take several times the memory of the table
_BUILT_IN = {
    "tfrecord": "datamat.formats.tfrecord:TFRecordFormat",
    "tfrecord.gz": "datamat.formats.tfrecord:GzipTFRecordFormat",
}


@final
@dataclass(frozen=True, slots=True, eq=False)
class Offsets:
    """Where each record of one file lies: the content of its `.idx` file.

    Args:
        offset: uint64 (n,), the first byte of the range that must be read for the record.
        size: uint64 (n,), the bytes of that range, framing included.
        skip: uint64 (n,), for compressed formats where the range is a compressed member: the position of the record
            inside the member once it is decompressed. None where the range is the record itself.
    """

    offset: NDArray[np.uint64]
    size: NDArray[np.uint64]
    skip: NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        for column in self._columns():
            if column.dtype != np.uint64 or column.shape != (len(self.offset),):
                raise OptionError(
                    f"offsets need uint64 columns of {len(self.offset)} values, one per record; "
                    f"got {column.dtype} {column.shape}"
                )

    def __len__(self) -> int:
        return len(self.offset)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Offsets):
            return NotImplemented
        mine, others = self._columns(), other._columns()
        if not len(self) and not len(other):  # without records nothing says whether there is a skip
            return True
        return len(mine) == len(others) and all(map(np.array_equal, mine, others))

    __hash__ = None  # type: ignore[assignment]  # arrays decide equality, and arrays have no hash

    def shifted(self, base: int) -> Offsets:
        """Return the offsets of the same records when the file starts `base` bytes into a longer one."""
        return Offsets(self.offset + np.uint64(base), self.size, self.skip)

    @staticmethod
    def joined(parts: Iterable[tuple[Offsets, int]]) -> Offsets:
        """Return the offsets inside the file made of several files, one after the other.

        Args:
            parts: for each file, its offsets and its length in bytes.

        >>> one = Offsets(np.array([0, 20], np.uint64), np.array([20, 30], np.uint64))
        >>> Offsets.joined([(one, 50), (one, 50)]).offset.tolist()
        [0, 20, 50, 70]
        """
        base, shifted = 0, []
        for offsets, num_bytes in parts:
            if len(offsets):  # an empty part has no say in whether there is a skip column
                shifted.append(offsets.shifted(base)._columns())
            base += num_bytes
        if not shifted:
            return Offsets(np.empty(0, np.uint64), np.empty(0, np.uint64))
        return Offsets(*(np.concatenate(column) for column in zip(*shifted, strict=True)))

    def to_text(self) -> str:
        r"""Return the index file: a line `OFFSET SIZE` per record, `MEMBER_OFFSET MEMBER_SIZE SKIP` with a skip.

        The two-column form is what NVIDIA DALI reads, byte for byte what its `tfrecord2idx` writes
        (https://github.com/NVIDIA/DALI/blob/main/tools/tfrecord2idx).

        >>> Offsets(np.array([0, 20], np.uint64), np.array([20, 30], np.uint64)).to_text()
        '0 20\n20 30\n'
        """
        table = np.column_stack(self._columns())
        line = " ".join(["%d"] * table.shape[1]) + "\n"
        # One format call over many numbers takes half the time of a call per line (measured: 0.15 us per record).
        blocks = (table[start : start + _LINES_AT_ONCE] for start in range(0, len(table), _LINES_AT_ONCE))
        return "".join(line * len(block) % tuple(block.ravel().tolist()) for block in blocks)

    @staticmethod
    def from_text(text: str) -> Offsets:
        r"""Read back what `to_text` wrote.

        Raises:
            CorruptDataError: a line is not two, or throughout three, numbers with one space between them.

        >>> Offsets.from_text("0 20\n20 30\n").size.tolist()
        [20, 30]
        """
        if not text:
            return Offsets(np.empty(0, np.uint64), np.empty(0, np.uint64))
        num_columns = text.partition("\n")[0].count(" ") + 1
        if num_columns not in (2, 3) or not _is_table(text, num_columns):
            number, line = _first_bad_line(text, num_columns)
            raise CorruptDataError(
                f"line {number} of the record index is {line!r}, expected 'OFFSET SIZE' or, for compressed shards, "
                f"'OFFSET SIZE SKIP' in every line; remove the shard and run the job again"
            )
        numbers = np.fromstring(text, np.uint64, sep=" ").reshape(-1, num_columns)
        return Offsets(*(np.ascontiguousarray(column) for column in numbers.T))

    def _columns(self) -> tuple[NDArray[np.uint64], ...]:
        return (self.offset, self.size) if self.skip is None else (self.offset, self.size, self.skip)


class ShardWriter(abc.ABC):
    """Writes the records of one part into a binary file that its caller opened and will hash, sync and close.

    A writer buffers about 256 KiB and only ever calls `file.write`, with a buffer that it uses again: `write` must be
    done with it when it returns. The same records give the same bytes, whether they come by `append` or by
    `append_block`. One thread uses a writer; it does not travel between processes. After an exception from
    `file.write` the file is of no use; after a `SchemaError` nothing of the refused record or block was written.
    """

    @property
    @abc.abstractmethod
    def num_records(self) -> int:
        """How many records were appended."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """How many bytes of file they make so far, those still buffered included."""

    @abc.abstractmethod
    def append(self, record: Record) -> None:
        """Append one record.

        Raises:
            SchemaError: the record's columns or their types are not those of the writer.
        """

    @abc.abstractmethod
    def append_block(self, columns: Block) -> None:
        """Append n records given column by column; much faster than `append` for small rows.

        Raises:
            SchemaError: the columns, their types or their lengths don't fit.
        """

    @abc.abstractmethod
    def finish(self) -> Offsets:
        """Write what is still buffered and return where the records lie. The file stays open."""


class ShardFormat(abc.ABC):
    """One file format. Without state: thread-safe, picklable, equal output from every instance.

    Attributes:
        name: what the user passes as `format=`.
        extension: the ending of shard names, without the dot.
        joins_parts: whether part files, one after the other, are a valid file of the format.
    """

    name: ClassVar[str]
    extension: ClassVar[str]
    joins_parts: ClassVar[bool]

    @abc.abstractmethod
    def options(self) -> dict[str, str | int | float | bool | None]:
        """Return everything that decides the bytes written, for fingerprints; it must survive JSON."""

    @abc.abstractmethod
    def writer(self, file: BinaryIO, columns: Mapping[str, ColumnKind]) -> ShardWriter:
        """Return a writer of records with these columns into `file`, any object with a `write` for bytes."""

    @abc.abstractmethod
    def read_record(
        self, buffer: Buffer, *, skip: int = 0, path: str = "", number: int = 0, offset: int = 0
    ) -> dict[str, Value]:
        """Decode the one record that a line of `Offsets` points to, and test its checksums.

        Args:
            buffer: the `size` bytes at `offset` of the file.
            skip: the record's `skip`, 0 where there is none.
            path: the file, for messages only.
            number: the record's place in the file, from 0, for messages only.
            offset: where the buffer lies in the file, for messages only.

        Returns:
            For each column a list of bytes, an int64 array (k,) or a float32 array (k,).

        Raises:
            CorruptDataError: names path, record, byte and what is wrong.
        """

    @abc.abstractmethod
    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Value], tuple[int, ...]]]:
        """Yield each record of an open file with its line of `Offsets`, in order, and test every checksum.

        Raises:
            CorruptDataError: names path, record, byte and what is wrong; also where the file ends inside a record.
                Records missing at the very end can't be seen from the file: compare the count with the manifest.
        """

    @final
    def read(self, path: str | os.PathLike[str]) -> Iterator[dict[str, Value]]:
        """Yield each record of a local file in order and test every checksum; raises as `read_file` does."""
        with open(path, "rb", buffering=1 << 20) as file:
            for record, _ in self.read_file(file, path=str(path)):
                yield record

    @final
    def find_offsets(self, file: BinaryIO, *, path: str) -> Offsets:
        """Return the offsets of an open file by reading all of it; raises as `read_file` does."""
        table, num_columns = array("Q"), 2
        for _, place in self.read_file(file, path=path):
            table.extend(place)
            num_columns = len(place)
        return Offsets(*(column.copy() for column in np.array(table, np.uint64).reshape(-1, num_columns).T))


def format_names() -> list[str]:
    """Return the names that `get_format` knows, sorted; imports none of the formats."""
    return sorted({*_BUILT_IN, *_plug_ins()})


def get_format(name: str) -> ShardFormat:
    """Return the format of that name, imported on first use.

    Raises:
        OptionError: no format has that name.
        MissingDependencyError: the format is known but a package that it needs is not installed.

    >>> get_format("tfrecord").extension
    'tfrecord'
    """
    target = _BUILT_IN.get(name) or _plug_ins().get(name)
    if target is None:
        raise OptionError(
            f"there is no format {name!r}; known are {', '.join(format_names())}. A format of your own is found "
            f"through an entry point in the group {_ENTRY_POINTS!r}"
        )
    module_name, _, attribute = target.partition(":")
    try:
        format_class: type[ShardFormat] = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as exc:
        raise MissingDependencyError(
            f"the format {name!r} ({target}) needs the package {exc.name!r}, which is not installed; "
            f"install it, for a format of datamat with: pip install 'datamat[{name}]'"
        ) from exc
    return format_class()


def _plug_ins() -> dict[str, str]:
    # Imported here because importlib.metadata costs more than this whole module, and built-in names never need it.
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=_ENTRY_POINTS)}


def _is_table(text: str, num_columns: int) -> bool:
    """Whether every line is `num_columns` runs of digits with single spaces between, and ends in a newline."""
    try:
        raw = np.frombuffer(text.encode("ascii"), np.uint8)
    except UnicodeEncodeError:
        return False
    is_digit = (raw >= ord("0")) & (raw <= ord("9"))
    ends = np.flatnonzero(~is_digit)
    separators = raw[ends]
    if len(ends) % num_columns or raw[-1] != ord("\n") or (np.diff(ends, prepend=-1) < 2).any():
        return False
    expected = np.array([ord(" ")] * (num_columns - 1) + [ord("\n")], np.uint8)
    # 20 digits hold every uint64, but not every 20 digits are one: 19 do for files of eight exabytes.
    return bool((separators.reshape(-1, num_columns) == expected).all() and np.diff(ends, prepend=-1).max() <= 20)


def _first_bad_line(text: str, num_columns: int) -> tuple[int, str]:
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        is_last = number == len(lines)
        if num_columns not in (2, 3) or is_last or not _is_table(line + "\n", num_columns):
            return number, line[:80]
    raise AssertionError("the text has no bad line")
