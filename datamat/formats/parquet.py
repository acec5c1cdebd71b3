"""Parquet shards: typed columns in row groups of a fixed number of rows, for tables, SQL and Hugging Face `datasets`.

A part is a stream of Arrow record batches as they come. The assembler cuts the batches of all parts into row groups and
writes them: pictures pass through it as the bytes that they are, one row group is in memory, and neither the cuts
between parts nor those between batches show in the file.

The number of rows of a group is fixed before any row is seen: a row group is what readers split work by, and what they
read to get at one record, so it is small where rows hold pictures. Only rows of megabytes end a group earlier, with the
row that brings it to 256 MiB. Pages are compressed with Zstandard and carry a
checksum (CRC32), which is tested when a record is read. The footer has none: the manifest's checksum of the file
shows any change.

Bytes are the same for one version of pyarrow; another may write the same records as other bytes.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import os
import weakref
from typing import TYPE_CHECKING, Any, BinaryIO, final

import numpy as np

from datamat.errors import RESOURCES, CorruptDataError, OptionError, want_of_resources
from datamat.formats import Block, ColumnKind, Offsets, Record, ShardAssembler, ShardFormat, ShardReader, ShardWriter
from datamat.formats.arrow import ArrowColumn, arrow_columns
from datamat.formats.block import check_block, checked_record
from datamat.formats.buffered import BufferedFile
from datamat.formats.guards import bound, located, refuse_finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from datamat.features import Features
    from datamat.formats import Places, Value

__all__ = ["ParquetFormat"]

_LARGE_ROWS, _SMALL_ROWS = 64, 8192
_MOST_GROUP_BYTES = 256 << 20
_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 8192
_COMPRESSION, _LEVEL = "zstd", 1  # pictures don't compress further: a higher level would be time for nothing
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_GROUPS_KEPT = 8


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ParquetFormat(ShardFormat):
    """Parquet with typed columns.

    Args:
        row_group_rows: rows in each row group but the last. None: 64 where rows hold pictures or large tensors,
            8,192 elsewhere.
        features: of the records; `with_features` gives them.
    """

    name = "parquet"
    extension = "parquet"
    joins_parts = False
    has_checksums = True

    row_group_rows: int | None = None
    features: Features | None = None

    def __post_init__(self) -> None:
        rows = self.row_group_rows
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise OptionError(f"ParquetFormat: row_group_rows is {rows!r}; want a number of at least 1, or None")

    def options(self) -> dict[str, str | int | float | bool | None]:
        """Return the rows of a group, and the compression."""
        return {"row_group_rows": self.row_group_rows, "compression": _COMPRESSION, "level": _LEVEL}

    def with_features(self, features: Features) -> ParquetFormat:
        """Return the format for these features, which decide the types and the rows of a group."""
        is_large = any(column.is_large for column in arrow_columns(features))
        return ParquetFormat(self.row_group_rows or (_LARGE_ROWS if is_large else _SMALL_ROWS), features)

    def writer(self, file: BinaryIO, columns: Mapping[str, ColumnKind]) -> ShardWriter:
        """Return a writer of parts, which are streams of Arrow record batches."""
        return _BatchWriter(file, columns, self._columns())

    def assembler(self, path: str | os.PathLike[str]) -> ShardAssembler:
        """Return what cuts the batches of parts into row groups."""
        return _Assembler(os.fspath(path), self._columns(), self.row_group_rows or _LARGE_ROWS)

    def reader(self, path: str | os.PathLike[str], places: Places) -> ShardReader:
        """Return a reader that keeps the last row groups it read; the footer tells it where they are."""
        del places
        return _Reader(os.fspath(path), self._columns())

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Value], tuple[int, ...]]]:
        """Yield each record with the place of its row group and its row in it."""
        import pyarrow as pa

        number = offset = 0
        try:
            opened = _opened(file, self._columns())
            for group, (offset, size, num_rows) in enumerate(_places(opened.metadata)):
                record = _record_of(opened.read_row_group(group, use_threads=False), self._columns())
                for row in range(num_rows):
                    yield record(row), (offset, size, row)
                    number += 1
        except (CorruptDataError, pa.ArrowException, OSError) as exc:
            raise located(exc, path, number, offset) from exc

    def _columns(self) -> Sequence[ArrowColumn]:
        features = bound(self.features, self.name)
        return _arrow_columns(features, tuple(features))


@functools.lru_cache(maxsize=4)
def _arrow_columns(features: Features, order: tuple[str, ...]) -> tuple[ArrowColumn, ...]:
    """Return the columns of features; `order` tells features apart for the cache that are equal in another order."""
    del order
    return tuple(arrow_columns(features))


@final
class _BatchWriter(ShardWriter):
    """Gathers rows into record batches of about 1 MiB."""

    __slots__ = ("_batches", "_columns", "_file", "_finished", "_kinds", "_num_rows", "_row_bytes", "_rows")

    def __init__(self, file: BinaryIO, kinds: Mapping[str, ColumnKind], columns: Sequence[ArrowColumn]) -> None:
        self._file = BufferedFile(file)
        self._kinds = dict(kinds)
        self._columns = columns
        self._rows: list[dict[str, Any]] = []
        self._row_bytes = 0
        self._num_rows = 0
        self._batches: list[tuple[int, int, int]] = []  # offset, size and rows of each
        self._finished = False
        self._file.add([memoryview(_schema(columns).serialize()).cast("B")])

    @property
    def num_records(self) -> int:
        """How many records were appended."""
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        """How many bytes of file they make so far, those of rows not yet in a batch as they came."""
        return self._file.num_bytes + self._row_bytes

    def append(self, record: Record) -> None:
        """Append one record."""
        refuse_finished(self._finished)
        row = checked_record(record, self._kinds)
        self._rows.append(row)
        self._num_rows += 1
        self._row_bytes += sum(len(value) if isinstance(value, bytes) else value.nbytes for value in row.values())
        if self._row_bytes >= _BATCH_BYTES or len(self._rows) >= _BATCH_ROWS:
            self._write_rows()

    def append_block(self, columns: Block) -> None:
        """Append n records as one batch for every 8,192 of them."""
        refuse_finished(self._finished)
        num_rows = check_block(columns, self._kinds)
        self._write_rows()
        for start in range(0, num_rows, _BATCH_ROWS):
            self._write({name: values[start : start + _BATCH_ROWS] for name, values in columns.items()})
        self._num_rows += num_rows

    def finish(self) -> Offsets:
        """Write what is still buffered and return where the batches of the records lie."""
        refuse_finished(self._finished)
        self._write_rows()
        self._finished = True
        self._file.add([_END_OF_STREAM])
        self._file.flush()
        return _offsets_of(self._batches)

    def _write_rows(self) -> None:
        if self._rows:
            rows, self._rows, self._row_bytes = self._rows, [], 0
            self._write({column.name: [row[column.name] for row in rows] for column in self._columns})

    def _write(self, values: Mapping[str, Any]) -> None:
        import pyarrow as pa

        arrays = [column.to_arrow(values[column.name]) for column in self._columns]
        batch = pa.record_batch(arrays, schema=_schema(self._columns))
        data = memoryview(batch.serialize()).cast("B")
        self._batches.append((self._file.num_bytes, len(data), len(batch)))
        self._file.add([data])


@final
class _Assembler(ShardAssembler):
    """Cuts record batches into row groups and writes them."""

    __slots__ = ("_batches", "_columns", "_file", "_group_rows", "_path", "_row_bytes", "_writer")

    def __init__(self, path: str, columns: Sequence[ArrowColumn], group_rows: int) -> None:
        import pyarrow.parquet as pq

        self._path = path
        self._columns = columns
        self._group_rows = group_rows
        self._batches: list[Any] = []  # what waits to fill a row group
        self._row_bytes = np.empty(0, np.int64)  # of each row in them
        self._file = open(path, "wb")  # noqa: SIM115 -- `finish` or `close` ends it
        labels = [column.name for column in columns if column.is_category]
        self._writer = pq.ParquetWriter(
            self._file,
            _schema(columns),
            compression=_COMPRESSION,
            compression_level=_LEVEL,
            use_dictionary=labels or False,
            write_statistics=[column.name for column in columns if not column.is_large],
            write_page_checksum=True,
        )

    def add(self, part: str | os.PathLike[str]) -> None:
        """Append the records of the next part."""
        for batch in _batches_of(os.fspath(part)):
            self._take(batch)

    def finish(self) -> Offsets:
        """Write the last row group and the footer, and return the place of each record."""
        import pyarrow.parquet as pq

        if len(self._row_bytes):
            self._write_group(len(self._row_bytes))
        self._writer.close()
        self._file.close()
        return _offsets_of(_places(pq.read_metadata(self._path)))

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # of a disk that is full: what was not finished is not wanted either
            if not self._file.closed:
                self._writer.close()  # it writes a footer, whatever there is
            self._file.close()

    def _take(self, batch: Any) -> None:
        sizes = sum(
            (column.row_bytes(batch.column(column.name)) for column in self._columns), np.zeros(len(batch), np.int64)
        )
        self._batches.append(batch)
        self._row_bytes = np.concatenate([self._row_bytes, sizes])
        while (num_rows := self._next_group()) <= len(self._row_bytes):
            self._write_group(num_rows)

    def _next_group(self) -> int:
        """Return the rows of the next row group, which may be more than there are yet."""
        most = int(np.searchsorted(np.cumsum(self._row_bytes), _MOST_GROUP_BYTES)) + 1
        return min(self._group_rows, most)

    def _write_group(self, num_rows: int) -> None:
        import pyarrow as pa

        rows = pa.Table.from_batches(self._batches)
        # How columns are cut into chunks would show in the pages.
        self._writer.write_table(rows.slice(0, num_rows).combine_chunks(), row_group_size=num_rows)
        self._batches = rows.slice(num_rows).to_batches()
        self._row_bytes = self._row_bytes[num_rows:]


@final
class _Reader(ShardReader):
    """Reads the row group of a record; keeps the footer, and few row groups for all readers of the process."""

    def __init__(self, path: str, columns: Sequence[ArrowColumn]) -> None:
        import pyarrow as pa

        self._path = path
        self._columns = columns
        self._file: Any = None
        try:
            # Not mapped: a file that is cut short while it is mapped would end the process.
            self._file = pa.OSFile(path)
            self._metadata = _opened(self._file, columns).metadata
        except (CorruptDataError, pa.ArrowException, OSError) as exc:
            if isinstance(exc, FileNotFoundError) or getattr(exc, "errno", None) in RESOURCES:
                raise
            raise CorruptDataError(
                f"{path}: {exc}; remove the file and run the job again, which makes it anew"
            ) from exc
        groups = _places(self._metadata)
        self._starts = list(itertools.accumulate((num_rows for _, _, num_rows in groups), initial=0))
        self._offsets = [*(offset for offset, _, _ in groups), self._file.size()]

    def read(self, number: int) -> dict[str, Value]:
        """Return one record."""
        import pyarrow as pa

        group = bisect.bisect_right(self._starts, number) - 1
        try:
            if number >= self._starts[-1]:
                raise CorruptDataError(f"the file holds {self._starts[-1]} records")
            record: dict[str, Value] = _kept_group(weakref.ref(self), group)(number - self._starts[group])
        except (CorruptDataError, pa.ArrowException, OSError) as exc:
            raise want_of_resources(self._path, exc) or located(exc, self._path, number, self._offsets[group]) from exc
        return record

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def read_group(self, group: int) -> Callable[[int], dict[str, Value]]:
        """Return a function from the number of a row of the group to its record."""
        opened = _opened(self._file, self._columns, self._metadata)
        return _record_of(opened.read_row_group(group, use_threads=False), self._columns)


@functools.lru_cache(maxsize=_GROUPS_KEPT)
def _kept_group(reader: weakref.ref[_Reader], group: int) -> Callable[[int], dict[str, Value]]:
    opened = reader()  # not kept with the group: a reader that nobody holds closes its file
    assert opened is not None, "its own method asks"
    return opened.read_group(group)


def _batches_of(part: str) -> Iterator[Any]:
    """Yield the record batches of a part; raise `CorruptDataError` where it is not whole."""
    import pyarrow as pa

    try:
        with pa.OSFile(part) as file, pa.ipc.open_stream(file) as batches:
            yield from batches
    except (pa.ArrowException, OSError) as exc:
        raise CorruptDataError(
            f"{part}: not a whole stream of record batches ({exc}); remove it and run again"
        ) from exc


def _schema(columns: Sequence[ArrowColumn]) -> Any:
    import pyarrow as pa

    return pa.schema([pa.field(column.name, column.type, nullable=False) for column in columns])


def _opened(file: Any, columns: Sequence[ArrowColumn], metadata: Any = None) -> Any:
    """Return a `pyarrow.parquet.ParquetFile` that tests checksums; raise where it has other columns."""
    import pyarrow.parquet as pq

    opened = pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True)
    found, wanted = opened.schema_arrow.remove_metadata(), _schema(columns)
    # In any order: that of the features is lost on the way through the manifest, whose keys are sorted.
    if metadata is None and sorted(found, key=_name_of) != sorted(wanted, key=_name_of):
        raise CorruptDataError(f"its columns are {_listed(found)}; the features ask for {_listed(wanted)}")
    return opened


def _name_of(field: Any) -> str:
    return str(field.name)


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _record_of(table: Any, columns: Sequence[ArrowColumn]) -> Callable[[int], dict[str, Value]]:
    """Return a function from the number of a row to its record."""
    getters = [(column.name, column.getter(table[column.name])) for column in columns]
    return lambda row: {name: get(row) for name, get in getters}


def _places(metadata: Any) -> list[tuple[int, int, int]]:
    """Return offset, size and rows of each row group: its column chunks stand one behind the other."""
    places = []
    for group in range(metadata.num_row_groups):
        found = metadata.row_group(group)
        chunks = [found.column(column) for column in range(found.num_columns)]
        first = chunks[0]
        offset = first.data_page_offset if first.dictionary_page_offset is None else first.dictionary_page_offset
        places.append((offset, sum(chunk.total_compressed_size for chunk in chunks), found.num_rows))
    return places


def _offsets_of(places: Sequence[tuple[int, int, int]]) -> Offsets:
    """Return the line of each row: offset and size of its group, and its number there."""
    if not places:
        return Offsets(np.empty(0, np.uint64), np.empty(0, np.uint64))
    offset, size, num_rows = np.array(places, np.int64).T
    rows = np.concatenate([np.arange(count) for count in num_rows])
    return Offsets(
        *(np.array(column, np.uint64) for column in (np.repeat(offset, num_rows), np.repeat(size, num_rows), rows))
    )
