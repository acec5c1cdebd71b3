"""What a shard format is: a small interface, a record's values, and a look-up by name.

A format turns encoded records into the bytes of a file and back. It knows nothing of splits or plans: a record is a
mapping of column names to bytes, int64 numbers or float32 numbers.

    workers   columns {name: kind} ── writer(file) ── append / append_block ── finish() ──> a part, its Offsets
    driver    parts, joined byte for byte, and the trailer ──> the shard          where the format allows it
              parts ── assembler(path) ── add ... finish() ──> the shard, its Offsets     elsewhere
    readers   a file ── read(path) ──> every record in order, every checksum tested
              a file, its Offsets ── reader(path, places) ── read(number) ──> one record

A worker writes a *part* (a run of records) into a file that its caller opened, hashes and syncs. No record is encoded
twice, and the parts of a shard come from the plan alone, so that equal records give equal files.

To add a format, implement `ShardFormat`, `ShardWriter` and, where records can't be found by their range of bytes alone,
`ShardReader`; name the class under the entry-point group `datamat.formats`. `get_format` imports it on first use.
"""

from __future__ import annotations

import abc
import importlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, TypeAlias, final

import numpy as np

from datamat.errors import MissingDependencyError, OptionError
from datamat.formats.offsets import Offsets, Place, Places

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from datamat.features import Features

__all__ = [
    "Block",
    "Buffer",
    "ColumnKind",
    "Offsets",
    "Place",
    "Places",
    "Record",
    "ShardAssembler",
    "ShardFormat",
    "ShardReader",
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
_BUILT_IN = {
    "arrayrecord": "datamat.formats.arrayrecord:ArrayRecordFormat",
    "parquet": "datamat.formats.parquet:ParquetFormat",
    "tfrecord": "datamat.formats.tfrecord:TFRecordFormat",
    "tfrecord.gz": "datamat.formats.tfrecord:GzipTFRecordFormat",
    "webdataset": "datamat.formats.webdataset:WebDatasetFormat",
}


class ShardWriter(abc.ABC):
    """Writes the records of one part into a binary file that its caller opened and will hash, sync and close.

    A writer buffers about 256 KiB and only ever calls `file.write`, with a buffer that it uses again: `write` must be
    done with it when it returns. The same records give the same shard, whether they come by `append` or by
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


class ShardAssembler(abc.ABC):
    """Makes a shard of its parts, where joining their bytes does not. One thread uses it, in one process.

    Memory does not grow with the shard. What a kill leaves of the file is of no use: parts are kept until the shard is
    finished, and assembled anew.
    """

    @abc.abstractmethod
    def add(self, part: str | os.PathLike[str]) -> None:
        """Append the records of the next part.

        Raises:
            CorruptDataError: the part is not whole.
        """

    @abc.abstractmethod
    def finish(self) -> Offsets:
        """Write what is still buffered, close the file, and return where the records lie in it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give the file free, finished or not; may be called again."""


class ShardReader(abc.ABC):
    """Reads records of one finished file by their number, in any order. Thread-safe; works in forked children, too.

    It closes itself when nobody holds it any more: of thousands of shards few are open at a time.
    """

    @abc.abstractmethod
    def read(self, number: int) -> dict[str, Value]:
        """Return one record, decoded, its checksums tested.

        Args:
            number: the record's place in the file, from 0.

        Returns:
            For each column a list of bytes, an int64 array (k,) or a float32 array (k,).

        Raises:
            CorruptDataError: names path, record, byte and what is wrong.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give the file free; may be called again, of a reader whose making failed, and while the interpreter ends."""

    def __del__(self) -> None:
        self.close()


class ShardFormat(abc.ABC):
    """One file format. An immutable value: thread-safe, picklable, equal output from equal instances.

    Attributes:
        name: what the user passes as `format=`.
        extension: the ending of shard names, without the dot.
        joins_parts: whether part files, one after the other, and the trailer are a valid file of the format. Where they
            are not, `assembler` makes one.
        trailer: what stands behind the last part of a joined file.
        has_checksums: whether a reader finds every change of a record's values by a checksum.
    """

    name: ClassVar[str]
    extension: ClassVar[str]
    joins_parts: ClassVar[bool]
    trailer: ClassVar[bytes] = b""
    has_checksums: ClassVar[bool] = False

    @abc.abstractmethod
    def options(self) -> dict[str, str | int | float | bool | None]:
        """Return everything that decides the bytes written, for fingerprints; it must survive JSON."""

    def with_features(self, features: Features) -> ShardFormat:
        """Return the format for records of these features: itself where only the kinds of columns matter."""
        del features
        return self

    @abc.abstractmethod
    def writer(self, file: BinaryIO, columns: Mapping[str, ColumnKind]) -> ShardWriter:
        """Return a writer of records with these columns into a part: `file`, any object with a `write` for bytes.

        Raises:
            OptionError: the format stores features and was not given them by `with_features`.
        """

    def assembler(self, path: str | os.PathLike[str]) -> ShardAssembler:
        """Return what makes the shard `path` of its parts; only for formats whose parts can't be joined."""
        raise OptionError(f"{path}: parts of the format {self.name!r} are joined byte for byte; do that")

    @abc.abstractmethod
    def reader(self, path: str | os.PathLike[str], places: Places) -> ShardReader:
        """Return a reader of single records of a finished file.

        Args:
            path: the file.
            places: where its records lie: `Offsets`, or what looks them up in the file that holds them.

        Raises:
            OSError: the file can't be opened.
            CorruptDataError: it is not of this format.
        """

    @abc.abstractmethod
    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Value], tuple[int, ...]]]:
        """Yield each record of an open file with its line of `Offsets`, in order, and test every checksum.

        Raises:
            CorruptDataError: names path, record, byte and what is wrong; also where the file ends inside a record.
                Records missing at the very end can't always be seen from the file: compare with the manifest's count.
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
