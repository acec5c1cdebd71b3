"""Shard formats: their contract, and finding them by name.

A format turns encoded records into the bytes of a file and back. It knows nothing of splits, plans or samples: a record
maps column names to bytes, int64 numbers or float32 numbers.

    workers   columns {name: kind} ── writer(file) ── append / append_block ── finish() ──> a part, its Offsets
    workers   parts, one after another, and the trailer ──> the shard         if joins_parts
              parts ── assembler(path) ── add ... finish() ──> the shard, its Offsets     otherwise
    readers   a file ── read(path) ──> every record in order, every checksum tested
              a file, its Offsets ── reader(path, spans) ── read(number) ──> one record

A worker writes a *part*, which is a run of records, into a file that its caller opens, hashes and syncs. No record is
encoded twice. Only the plan decides where parts begin, so equal records give equal files.

To add a format, subclass `ShardFormat` and `ShardWriter`, and `ShardReader`, too, if a record needs more than its own
range of bytes (`io.RangeReader` reads ranges). List the format's class in the entry-point group `datamat.formats`;
`get_format` imports it on first use. `datamat.testing.ShardFormatConformance` tests every promise made below.
"""

from __future__ import annotations

import abc
import importlib
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from datamat.errors import MissingDependencyError, OptionError
from datamat.features import Features, RaggedColumn
from datamat.features.base import Column, ColumnBlock, Kind
from datamat.formats.offsets import Offsets, RecordSpan, RecordSpans

__all__ = [
    "Block",
    "Buffer",
    "Offsets",
    "Record",
    "RecordSpan",
    "RecordSpans",
    "ShardAssembler",
    "ShardFormat",
    "ShardReader",
    "ShardWriter",
    "format_names",
    "get_format",
]


def __dir__() -> list[str]:
    return __all__


Record: TypeAlias = Mapping[str, "Column"]
"""One encoded record: column name to value."""
Block: TypeAlias = Mapping[str, "NDArray[Any] | RaggedColumn | Sequence[bytes]"]
"""n records: column name to int64 or float32 (n,) or (n, k) or a `RaggedColumn` of such, or to n bytes values."""
Buffer: TypeAlias = bytes | bytearray | memoryview

_ENTRY_POINTS = "datamat.formats"
_BUILT_IN = {
    "arrayrecord": "datamat.formats.arrayrecord:ArrayRecordFormat",
    "parquet": "datamat.formats.parquet:ParquetFormat",
    "tfrecord": "datamat.formats.tfrecord:TFRecordFormat",
    "tfrecord.gz": "datamat.formats.tfrecord:GzipTFRecordFormat",
    "webdataset": "datamat.formats.webdataset:WebDatasetFormat",
}
_ELSEWHERE = {
    "megatron": "; for a finished set, load(OUTPUT, SPLIT).to_megatron(PREFIX) writes the files of Megatron-LM"
}


class ShardWriter(abc.ABC):
    """Writes the records of one part to a binary file that its caller opens, hashes, syncs and closes.

    What an implementation must guarantee:

    - It calls nothing but `file.write`, in order, and never seeks: the file may be a shard that already holds earlier
      parts, or an upload. It buffers little (datamat's own 256 KiB) and may reuse the buffer once `write` returns.
    - Equal records give equal parts, through `append` or `append_block`. The bytes depend neither on the time nor on
      the process.
    - After a `SchemaError` nothing of the refused record or block is written, and the writer accepts further records.
      After an exception of `file.write` the caller discards the part.
    - After a crash the caller discards an unfinished part and writes it again from its first record: there is no state
      to recover.

    One thread uses a writer, in the process that created it.
    """

    @property
    @abc.abstractmethod
    def num_records(self) -> int:
        """Number of records appended."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of these records in the file, including those still buffered."""

    @abc.abstractmethod
    def append(self, record: Record) -> None:
        """Append one record, whose arrays the caller may change afterwards.

        Raises:
            SchemaError: the columns of the record, or their types, differ from the writer's.
            OptionError: `finish` was called.
        """

    @abc.abstractmethod
    def append_block(self, columns: Block) -> None:
        """Append n records given by columns, which is much faster than `append` for small rows.

        Raises:
            SchemaError: the columns, their types or their lengths differ from what the writer expects.
            OptionError: `finish` was called.
        """

    @abc.abstractmethod
    def finish(self) -> Offsets:
        """Flush the buffer and return the place of each record in the part; leave the file open."""


class ShardAssembler(abc.ABC):
    """Builds a shard from its parts, for formats whose parts cannot be joined byte for byte.

    What an implementation must guarantee: equal parts give equal shards. Memory does not grow with the shard. A run
    that is killed leaves the parts in place, and the next one assembles the shard again from the first part,
    overwriting the unfinished file.

    One thread uses an assembler, in one process.
    """

    @abc.abstractmethod
    def add(self, part: str | os.PathLike[str]) -> None:
        """Append the records of the next part.

        Raises:
            CorruptDataError: the part is incomplete or damaged; the message names it.
        """

    @abc.abstractmethod
    def finish(self) -> Offsets:
        """Complete the shard, close the file, and return the place of each record."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the file, finished or not; may be called more than once."""


class ShardReader(abc.ABC):
    """Reads single records of one finished file by number, in any order.

    What an implementation must guarantee: several threads may call `read` concurrently, and so may children forked
    after the reader was created. It never returns a wrong record: a failed checksum raises `CorruptDataError`. The file
    is closed with the last reference to the reader, because only a few of thousands of shards are open at a time.

    Attributes:
        groups_to_keep: number of groups of records that a loader mixes, and that must stay in memory to read each once.
    """

    groups_to_keep: int = 0

    @abc.abstractmethod
    def read(self, number: int) -> dict[str, Column]:
        """Return one decoded record after testing its checksums.

        Args:
            number: position of the record in the file, from 0.

        Returns:
            For each column a list of bytes, an int64 array (k,) or a float32 array (k,).

        Raises:
            CorruptDataError: the record is damaged; the message gives path, record, byte and reason.
        """

    def read_intact(self, number: int) -> dict[str, Column] | None:
        """Return a record that `read` refuses for adjacent damage, if its own checksums prove it intact; else None.

        Args:
            number: position of the record in the file, from 0.
        """
        del number
        return None

    @property
    def group_records(self) -> int | None:
        """Number of records in the largest group of the file; None if unknown, or if there are no groups."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Release the file; may be called more than once, after a failed `__init__`, and while the interpreter ends."""

    def __del__(self) -> None:
        self.close()


class ShardFormat(abc.ABC):
    """One file format.

    A format is an immutable value: thread-safe, picklable, and equal instances write equal bytes. A frozen dataclass
    satisfies this.

    Attributes:
        name: name of the format, as users pass it in `format=`; also the name of its entry point.
        extension: extension of shard names, without the dot.
        joins_parts: whether parts, one after another and followed by the `trailer`, form a valid shard. Workers then
            append parts directly to the growing shard. Otherwise `assembler` builds the shard from them.
        has_checksums: whether a reader detects every change of a record's values by checksums in the file.
        reads_ranges: whether a reader reads only the ranges of records in the offsets and, when it is created, whatever
            follows the last range: then only these are fetched from files behind a URL.
        gains_from_threads: whether several threads read small records faster than one, because most of the work, such
            as decompression, is done without the GIL.
        groups_at_once: number of groups of records that shuffling mixes at a time; about half of those that readers
            keep in memory, since one window ends while the next begins.
        padding_bytes: bytes that a part may have besides its records.
        packages: top-level modules of other packages that determine the bytes; a new version of one rebuilds the
            shards. The package that the format comes from always counts.

    Example:
        >>> get_format("tfrecord").joins_parts
        True
    """

    name: ClassVar[str]
    extension: ClassVar[str]
    joins_parts: ClassVar[bool]
    has_checksums: ClassVar[bool] = False
    reads_ranges: ClassVar[bool] = False
    gains_from_threads: ClassVar[bool] = True
    groups_at_once: ClassVar[int] = 4
    padding_bytes: ClassVar[int] = 0
    packages: ClassVar[frozenset[str]] = frozenset()

    @property
    def group_records(self) -> int:
        """Number of records that the format stores together, if a reader must read all of them to get one."""
        return 1

    @abc.abstractmethod
    def options(self) -> dict[str, str | int | float | bool | None]:
        """Return every option that decides the bytes, as JSON values: shards are rebuilt if one differs."""

    def with_features(self, features: Features) -> ShardFormat:
        """Return the format for records of these features; itself, if it only needs the kinds of columns."""
        del features
        return self

    @abc.abstractmethod
    def writer(self, file: BinaryIO, columns: Mapping[str, Kind]) -> ShardWriter:
        """Return a writer of one part.

        Args:
            file: file of the part: any object whose `write` takes bytes and returns the number written.
            columns: kind of each column of the records.

        Raises:
            OptionError: the format stores features, and `with_features` has not set them.
        """

    def trailer(self, file: BinaryIO, parts: Sequence[tuple[int, int]]) -> bytes:
        """Return the bytes that follow the last part of a joined shard; only called if `joins_parts` is true.

        Args:
            file: the parts, one after another, open for reading.
            parts: first byte and size of each part; at least one.

        Raises:
            CorruptDataError: a part was changed.
        """
        del file, parts
        return b""

    def assembler(self, path: str | os.PathLike[str]) -> ShardAssembler:
        """Return an assembler of the shard `path`; only called if `joins_parts` is false."""
        raise OptionError(f"{path}: parts of the format {self.name!r} are joined byte for byte; join them")

    @abc.abstractmethod
    def reader(self, path: str | os.PathLike[str], spans: RecordSpans) -> ShardReader:
        """Return a reader of single records of a finished file.

        Args:
            path: path of the finished shard.
            spans: lookup of the place of each record: `Offsets`, or a memory-mapped index file.

        Raises:
            OSError: the file cannot be opened.
            CorruptDataError: the file is not of this format.
        """

    def records_per_group(self, record_bytes: float) -> int | None:
        """Return the number of neighbouring records that must be read together.

        Shuffling then mixes the records of `groups_at_once` such groups at a time, and reads each group once. If the
        first shard has larger groups, their size counts.

        Args:
            record_bytes: average bytes of a record in a file.

        Returns:
            The number of records; None if each is read separately.
        """
        del record_bytes
        return None

    def read_block(
        self,
        readers: Sequence[ShardReader],
        which: NDArray[np.int64],
        numbers: NDArray[np.int64],
        kinds: Mapping[str, Kind],
    ) -> Mapping[str, ColumnBlock] | None:
        """Return the columns of many small records at once, their checksums tested.

        Args:
            readers: readers of open files of this format.
            which: int64 (n,), the index in `readers` of each record's file.
            numbers: int64 (n,), the number of each record in its file.
            kinds: the kind of each column.

        Returns:
            The columns, in the order of `numbers`; None if this is not faster than one by one, or if anything is
            unusual: the caller then reads each record, which reports damaged ones.
        """
        del readers, which, numbers, kinds
        return None

    @abc.abstractmethod
    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Column], tuple[int, ...]]]:
        """Yield each record of an open file with its line of `Offsets`, in order, after testing its checksums.

        Args:
            file: the file, open at its start.
            path: path of the file, for messages.

        Raises:
            CorruptDataError: a record is damaged, or the file ends inside one; the message gives path, record, byte and
                reason. Some formats cannot detect that whole records are missing at the end: callers compare the number
                of records with the manifest.
        """

    @final
    def read(self, path: str | os.PathLike[str]) -> Iterator[dict[str, Column]]:
        """Yield each record of a local file in order after testing its checksums; raise as `read_file` does."""
        with open(path, "rb", buffering=1 << 20) as file:
            for record, _ in self.read_file(file, path=str(path)):
                yield record

    @final
    def find_offsets(self, file: BinaryIO, *, path: str) -> Offsets:
        """Return the offsets of an open file, found by reading all of it; raise as `read_file` does."""
        table, num_columns = array("Q"), 2
        for _, place in self.read_file(file, path=path):
            table.extend(place)
            num_columns = len(place)
        return Offsets(*(column.copy() for column in np.array(table, np.uint64).reshape(-1, num_columns).T))


def format_names() -> list[str]:
    """Return the names that `get_format` knows, sorted, without importing a format."""
    return sorted({*_BUILT_IN, *_plug_ins()})


def get_format(name: str) -> ShardFormat:
    """Return the format of that name, imported on first use.

    Raises:
        OptionError: no format has that name.
        MissingDependencyError: a package that the format needs is not installed.

    >>> get_format("tfrecord").extension
    'tfrecord'
    """
    target = _BUILT_IN.get(name) or _plug_ins().get(name)
    if target is None:
        raise OptionError(
            f"there is no format {name!r}; want one of {', '.join(format_names())}, or an entry point of that name in "
            f"the group {_ENTRY_POINTS!r}{_ELSEWHERE.get(name, '')}"
        )
    module_name, _, attribute = target.partition(":")
    try:
        format_class: type[ShardFormat] = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as exc:
        raise MissingDependencyError(
            f"the format {name!r} ({target}) needs the package {exc.name!r}, which is not installed; "
            f"install it; for a format of datamat: pip install 'datamat[{name}]'"
        ) from exc
    return format_class()


def _plug_ins() -> dict[str, str]:
    # Imported here because importlib.metadata costs more than this whole module, and built-in names do not need it.
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=_ENTRY_POINTS)}
