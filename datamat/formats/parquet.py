"""Parquet shards: typed columns in row groups of a fixed number of rows, for tables, SQL and Hugging Face `datasets`.

A part is a Parquet file. A shard is its parts, one behind another, and a footer that leads to the row groups of all of
them: readers follow the last footer, and never see those of the parts. So workers encode every row group once and put
it where it stays, and the end of a shard costs no more than its footer.

The number of rows in a group is fixed in advance: readers split work by row groups, and read a whole one to get at a
record, so groups are small where rows hold images. The last group of a part holds what is left; rows of several
megabytes end a group earlier, with the row that brings it to 256 MiB. Pages are compressed with Zstandard and carry a
checksum (CRC32), which is tested when a record is read. The footer has none: the manifest's checksum of the file shows
any change.

One version of pyarrow always writes the same bytes; another may encode the same records differently.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import os
import struct
import weakref
import zlib
from array import array
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, final

import numpy as np
import xxhash

from datamat.errors import RESOURCES, CorruptDataError, OptionError, want_of_resources
from datamat.features import join_blocks, num_bytes_of
from datamat.formats import Block, Offsets, Record, ShardFormat, ShardReader, ShardWriter
from datamat.formats.arrow import ArrowColumn, arrow_columns
from datamat.formats.example import check_block, checked_record, varint
from datamat.formats.io import bound, located, refuse_finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from datamat.features import Column, ColumnBlock, Features, Kind
    from datamat.formats import RecordSpans


__all__ = ["ParquetFormat"]

OUTPUT_VERSION = 2
"""Incremented when the same records give different bytes; shards of the format are then rebuilt."""

_LARGE_ROWS, _SMALL_ROWS = 64, 8192
_MOST_GROUP_BYTES = 256 << 20
_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 8192
_COMPRESSION, _LEVEL = "zstd", 1  # images do not compress further: a higher level would cost time and gain nothing
_GROUPS_KEPT, _MOST_GROUPS_KEPT = 8, 512
_MOST_KEPT_BYTES = 32 << 20  # of more than 8 groups: those whose large values stay in the file take a few KiB
_FIRST_GROUP = 4  # after the magic bytes


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ParquetFormat(ShardFormat):
    """Parquet with typed columns.

    Args:
        row_group_rows: rows in each row group but the last one of a part. None chooses 64 for rows with images or
            large tensors, and 8,192 for others.
        features: features of the records; `with_features` sets them.
    """

    name = "parquet"
    extension = "parquet"
    joins_parts = True
    has_checksums = True
    packages = frozenset({"pyarrow"})

    row_group_rows: int | None = None
    features: Features | None = None

    def __post_init__(self) -> None:
        rows = self.row_group_rows
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise OptionError(f"ParquetFormat: row_group_rows is {rows!r}; want a number of at least 1, or None")

    @property
    def group_records(self) -> int:
        """Number of rows of a row group."""
        return self.row_group_rows or _LARGE_ROWS

    def options(self) -> dict[str, str | int | float | bool | None]:
        """Return the rows of a group and the compression."""
        return {"row_group_rows": self.row_group_rows, "compression": _COMPRESSION, "level": _LEVEL}

    def records_per_group(self, record_bytes: float) -> int | None:
        """Return the rows of a row group."""
        del record_bytes
        return self.row_group_rows

    def with_features(self, features: Features) -> ParquetFormat:
        """Return the format for these features, which decide the types and the rows of a group."""
        is_large = any(column.is_large for column in arrow_columns(features))
        return ParquetFormat(self.row_group_rows or (_LARGE_ROWS if is_large else _SMALL_ROWS), features)

    def writer(self, file: BinaryIO, columns: Mapping[str, Kind]) -> ShardWriter:
        """Return a writer of parts, which are Parquet files."""
        return _ParquetWriter(file, columns, self._columns(), self.row_group_rows or _LARGE_ROWS)

    def trailer(self, file: BinaryIO, parts: Sequence[tuple[int, int]]) -> bytes:
        """Return a footer for the row groups of all parts."""
        return _joined_footer(file, parts)

    def reader(self, path: str | os.PathLike[str], spans: RecordSpans) -> ShardReader:
        """Return a reader that keeps the row groups it read last; it finds them through the footer."""
        return _ParquetReader(os.fspath(path), spans, self._columns())

    def read_block(
        self,
        readers: Sequence[ShardReader],
        which: NDArray[np.int64],
        numbers: NDArray[np.int64],
        kinds: Mapping[str, Kind],
    ) -> Mapping[str, ColumnBlock] | None:
        """Return the columns of many records, without a row in between."""
        import pyarrow as pa

        pieces: list[dict[str, ColumnBlock]] = []
        places: list[NDArray[np.int64]] = []
        try:
            for place, reader in enumerate(readers):
                assert isinstance(reader, _ParquetReader), "the format makes them"
                mine = np.flatnonzero(which == place)
                for part, piece in reader.read_rows(numbers[mine]):
                    places.append(mine[part])
                    pieces.append(piece)
        except (CorruptDataError, pa.ArrowException, OSError):
            return None
        order = np.concatenate(places)
        back = None if (np.diff(order) == 1).all() else np.argsort(order)
        return join_blocks(pieces, back)

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Column], tuple[int, ...]]]:
        """Yield each record with offset and size of its row group, and its row in it."""
        import pyarrow as pa

        number, offset, size = 0, _FIRST_GROUP, 0
        try:
            opened = _opened(file, self._columns())
            for group in range(opened.metadata.num_row_groups):
                offset += size
                # Read the group before asking where it lies: over damaged metadata, pyarrow raises in the one and
                # aborts the process in the other.
                rows = _RowGroup(opened.read_row_group(group, use_threads=False), self._columns())
                offset, size, num_rows = _place(opened.metadata, group)
                for row in range(num_rows):
                    yield rows.record(row), (offset, size, row)
                    number += 1
        except (CorruptDataError, pa.ArrowException, OSError) as exc:
            raise located(exc, path, number, offset) from exc

    def _columns(self) -> Sequence[ArrowColumn]:
        features = bound(self.features, self.name)
        return _arrow_columns(features, tuple(features))


@functools.lru_cache(maxsize=4)
def _arrow_columns(features: Features, order: tuple[str, ...]) -> tuple[ArrowColumn, ...]:
    """Return the columns of features; `order` makes the cache distinguish equal features in a different order."""
    del order
    return tuple(arrow_columns(features))


@final
class _ParquetWriter(ShardWriter):
    """Gathers rows into record batches of about 1 MiB, and these into row groups."""

    __slots__ = (
        "_batches",
        "_columns",
        "_finished",
        "_found",
        "_group_rows",
        "_kinds",
        "_num_rows",
        "_row_bytes",
        "_rows",
        "_rows_bytes",
        "_sink",
        "_writer",
    )

    def __init__(
        self, file: BinaryIO, kinds: Mapping[str, Kind], columns: Sequence[ArrowColumn], group_rows: int
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._kinds = dict(kinds)
        self._columns = columns
        self._group_rows = group_rows
        self._rows: list[dict[str, Any]] = []  # rows that wait for a batch to fill
        self._rows_bytes = 0
        self._batches: list[Any] = []  # rows that wait for a row group to fill
        self._row_bytes = np.empty(0, np.int64)  # bytes of each of these rows
        self._num_rows = 0
        self._finished = False
        self._sink = _PartFile(file)
        self._found: list[Any] = []  # once closed, the metadata
        labels = [column.name for column in columns if column.is_category]
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, "w"),
            _schema(columns),
            compression=_COMPRESSION,
            compression_level=_LEVEL,
            use_dictionary=labels or False,
            write_statistics=[column.name for column in columns if not column.is_large],
            write_page_checksum=True,
            metadata_collector=self._found,
        )

    @property
    def num_records(self) -> int:
        """Number of records appended."""
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes that these records take in the file; rows not yet in a row group count unencoded."""
        return self._sink.num_bytes + self._rows_bytes + int(self._row_bytes.sum())

    def append(self, record: Record) -> None:
        """Append one record."""
        refuse_finished(self._finished)
        row = checked_record(record, self._kinds)
        self._rows.append(row)
        self._num_rows += 1
        self._rows_bytes += sum(map(num_bytes_of, row.values()))
        if self._rows_bytes >= _BATCH_BYTES or len(self._rows) >= _BATCH_ROWS:
            self._take_rows()

    def append_block(self, columns: Block) -> None:
        """Append n records, in batches of 8,192."""
        refuse_finished(self._finished)
        num_rows = check_block(columns, self._kinds)
        self._take_rows()
        for start in range(0, num_rows, _BATCH_ROWS):
            self._take({name: values[start : start + _BATCH_ROWS] for name, values in columns.items()})
        self._num_rows += num_rows

    def finish(self) -> Offsets:
        """Write the last row group and the footer, and return where the row group of each record lies."""
        refuse_finished(self._finished)
        self._take_rows()
        self._finished = True
        if len(self._row_bytes):
            self._write_group(len(self._row_bytes))
        self._writer.close()
        return _offsets_of(_spans(self._found[0]))

    def __del__(self) -> None:
        # pyarrow's writer ends its file when it is collected, finished or not: by then the file belongs to others.
        if (sink := getattr(self, "_sink", None)) is not None:
            sink.is_abandoned = True
        if (writer := getattr(self, "_writer", None)) is not None:
            writer.is_open = False

    def _take_rows(self) -> None:
        if self._rows:
            rows, self._rows, self._rows_bytes = self._rows, [], 0
            self._take({column.name: [row[column.name] for row in rows] for column in self._columns})

    def _take(self, values: Mapping[str, Any]) -> None:
        import pyarrow as pa

        arrays = [column.to_arrow(values[column.name]) for column in self._columns]
        batch = pa.record_batch(arrays, schema=_schema(self._columns))
        sizes = sum(
            (column.row_bytes(batch.column(column.name)) for column in self._columns), np.zeros(len(batch), np.int64)
        )
        self._batches.append(batch)
        self._row_bytes = np.concatenate([self._row_bytes, sizes])
        while (num_rows := self._next_group()) <= len(self._row_bytes):
            self._write_group(num_rows)

    def _next_group(self) -> int:
        """Return the number of rows in the next row group, which may exceed those at hand."""
        most = int(np.searchsorted(np.cumsum(self._row_bytes), _MOST_GROUP_BYTES)) + 1
        return min(self._group_rows, most)

    def _write_group(self, num_rows: int) -> None:
        import pyarrow as pa

        rows = pa.Table.from_batches(self._batches)
        # Where columns are cut into chunks would show in the pages.
        self._writer.write_table(rows.slice(0, num_rows).combine_chunks(), row_group_size=num_rows)
        self._batches = rows.slice(num_rows).to_batches()
        self._row_bytes = self._row_bytes[num_rows:]


@final
class _PartFile(io.RawIOBase):
    """The file of a part, as pyarrow wants it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0
        self.is_abandoned = False

    def writable(self) -> bool:
        """Return that it can be written."""
        return True

    def write(self, data: Any, /) -> int:
        """Write all of `data`."""
        size = memoryview(data).nbytes
        if not self.is_abandoned:
            self._file.write(data)
        self.num_bytes += size
        return size

    def tell(self) -> int:
        """Return how much was written."""
        return self.num_bytes


# ---------------------------------------------------------------- footers
#
# One footer for row groups that were written as several files.
#
# A footer is a struct `FileMetaData` in Thrift's compact protocol (github.com/apache/thrift, doc/specs/
# thrift-compact-protocol.md; github.com/apache/parquet-format, src/main/thrift/parquet.thrift), its length, and the
# magic bytes. pyarrow joins the metadata of several files (`FileMetaData.append_row_groups`), but keeps each offset as
# it was in its own file, and cannot move it. So the offsets are moved here. Everything else stays as pyarrow wrote it.


_MAGIC = b"PAR1"
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_NUM_ROWS, _ROW_GROUPS = 3, 4  # fields of FileMetaData
_COLUMNS, _GROUP_ROWS, _GROUP_OFFSET, _ORDINAL = 1, 3, 5, 7  # of RowGroup
_CHUNK_OFFSETS, _CHUNK_METADATA = (2, 4, 6), 3  # of ColumnChunk: of the chunk, the offset index, the column index
_PATH, _CODEC, _UNPACKED_SIZE, _CHUNK_SIZE, _DATA_PAGE_OFFSET, _DICTIONARY_OFFSET = 3, 4, 6, 7, 9, 11  # ColumnMetaData
_PAGE_OFFSETS = (9, 10, 11, 14)  # of ColumnMetaData: of data pages, index page, dictionary page, bloom filter
_MOST_ORDINAL = (1 << 15) - 1
_MOST_DEPTH = 32

_Struct: TypeAlias = "dict[int, tuple[int, Any]]"
"""Fields by their numbers, in order: type and value."""


def _joined_footer(file: BinaryIO, parts: Sequence[tuple[int, int]]) -> bytes:
    """Return the footer of Parquet files that lie one behind another, whose own footers stay where they are.

    Args:
        file: the Parquet files, one behind another.
        parts: first byte and size of each.

    Raises:
        CorruptDataError: one of them does not end in a footer.
    """
    joined: _Struct = {}
    groups: list[_Struct] = []
    num_rows = 0
    for start, size in parts:
        footer = _footer(file, start, size)
        joined = joined or footer
        num_rows += footer[_NUM_ROWS][1]
        for group in footer[_ROW_GROUPS][1][1]:
            _move(group, start)
            if len(groups) <= _MOST_ORDINAL:
                group[_ORDINAL] = (_I16, len(groups))
            else:
                group.pop(_ORDINAL, None)
            groups.append(group)
    joined[_NUM_ROWS] = (_I64, num_rows)
    joined[_ROW_GROUPS] = (_LIST, (_STRUCT, groups))
    out = bytearray()
    _write_struct(out, joined)
    return bytes(out) + struct.pack("<I", len(out)) + _MAGIC


def _footer(file: BinaryIO, start: int, size: int) -> _Struct:
    end = start + size
    try:
        file.seek(end - 8)
        length, magic = struct.unpack("<I4s", file.read(8))
        if magic != _MAGIC or length + 12 > size:
            raise ValueError(f"it ends in {magic!r} behind a footer of {length} bytes")
        file.seek(end - 8 - length)
        footer, _ = _read_struct(file.read(length), 0)
        if footer[_NUM_ROWS][0] != _I64 or footer[_ROW_GROUPS][1][0] != _STRUCT:
            raise ValueError("its footer is none of Parquet's")
    except (ValueError, LookupError, struct.error, TypeError) as error:
        raise CorruptDataError(f"bytes {start} to {end} are no Parquet file: {error}") from error
    return footer


def _move(group: _Struct, by: int) -> None:
    """Add to every offset in the metadata of a row group."""
    _add(group, (_GROUP_OFFSET,), by)
    for chunk in group[_COLUMNS][1][1]:
        _add(chunk, _CHUNK_OFFSETS, by)
        _add(chunk[_CHUNK_METADATA][1], _PAGE_OFFSETS, by)


def _add(fields: _Struct, numbers: tuple[int, ...], by: int) -> None:
    for number in numbers:
        kind, value = fields.get(number, (_I64, 0))
        if value:  # 0 is no offset: every file begins with magic bytes
            fields[number] = (kind, value + by)


def _read_struct(data: bytes, at: int, depth: int = 0) -> tuple[_Struct, int]:
    if depth > _MOST_DEPTH:
        raise ValueError("its footer is nested too deeply")
    fields: _Struct = {}
    number = 0
    while (head := data[at]) != 0:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _read_int(data, at)
        kind = head & 15
        value, at = (None, at) if kind in (_TRUE, _FALSE) else _read_value(data, at, kind, depth)
        fields[number] = (kind, value)
    return fields, at + 1


def _read_value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_I16, _I32, _I64):
        return _read_int(data, at)
    if kind == _STRUCT:
        return _read_struct(data, at, depth + 1)
    if kind == _BINARY:
        size, at = _read_varint(data, at)
        if at + size > len(data):
            raise ValueError("its footer is cut off")
        return data[at : at + size], at + size
    if kind in (_LIST, _SET):
        item, size = data[at] & 15, data[at] >> 4
        at += 1
        if size == 15:
            size, at = _read_varint(data, at)
        items = []
        for _ in range(size):
            value, at = _read_value(data, at, item, depth + 1)
            items.append(value)
        return (item, items), at
    size = {_DOUBLE: 8, _BYTE: 1, _TRUE: 1, _FALSE: 1}.get(kind, 0)  # a flag in a list takes a byte
    if not size:  # a map: Parquet has none
        raise ValueError(f"its footer holds a value of type {kind}")
    return data[at : at + size], at + size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


def _read_int(data: bytes, at: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _write_struct(out: bytearray, fields: _Struct) -> None:
    before = 0
    for number, (kind, value) in sorted(fields.items()):
        if 0 < number - before <= 15:
            out.append((number - before) << 4 | kind)
        else:
            out.append(kind)
            _write_int(out, number)
        if value is not None:
            _write_value(out, kind, value)
        before = number
    out.append(0)


def _write_value(out: bytearray, kind: int, value: Any) -> None:
    if kind in (_I16, _I32, _I64):
        _write_int(out, value)
    elif kind == _STRUCT:
        _write_struct(out, value)
    elif kind == _BINARY:
        out += varint(len(value)) + value
    elif kind in (_LIST, _SET):
        item, items = value
        if len(items) < 15:
            out.append(len(items) << 4 | item)
        else:
            out.append(0xF0 | item)
            out += varint(len(items))
        for one in items:
            _write_value(out, item, one)
    else:
        out += value


def _write_int(out: bytearray, value: int) -> None:
    out += varint(value << 1 if value >= 0 else (-value << 1) - 1)


# ---------------------------------------------------------------- reading


@final
class _ParquetReader(ShardReader):
    """Reads the row group of a record; keeps the footer, and a few row groups for all readers of the process."""

    def __init__(self, path: str, spans: RecordSpans, columns: Sequence[ArrowColumn]) -> None:
        import pyarrow as pa

        self._path = path
        self._spans = spans
        self._columns = columns
        self._file: Any = None
        try:
            # Not mapped: truncating a mapped file would kill the process.
            self._file = pa.OSFile(path)
            self._metadata = _opened(self._file, columns).metadata
        except (CorruptDataError, pa.ArrowException, OSError) as exc:
            if isinstance(exc, FileNotFoundError) or getattr(exc, "errno", None) in RESOURCES:
                raise
            raise CorruptDataError(f"{path}: {exc}; remove the file and run the job again to rebuild it") from exc
        self._large: dict[int, list[tuple[str, int, int]]] | None = None
        num_rows = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        self._starts = list(itertools.accumulate(num_rows, initial=0))

    def read(self, number: int) -> dict[str, Column]:
        """Return one record."""
        import pyarrow as pa

        group = bisect.bisect_right(self._starts, number) - 1
        row = number - self._starts[group]
        try:
            if number >= self._starts[-1]:
                raise CorruptDataError(f"the file holds {self._starts[-1]} records")
            try:
                record = self._kept_group(group).record(row)
            except _ChangedError:
                record = self.read_groups([group]).record(row)  # says what is wrong
        except (CorruptDataError, pa.ArrowException, OSError) as exc:
            want = want_of_resources(self._path, exc)
            raise want or located(exc, self._path, number, self._spans.span(number)[0]) from exc
        return record

    @property
    def group_records(self) -> int | None:
        """Number of rows of the largest row group; None where there is none."""
        return max((stop - start for start, stop in itertools.pairwise(self._starts)), default=None)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def read_rows(self, numbers: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], dict[str, ColumnBlock]]]:
        """Yield the places of some records in `numbers` and their columns, until all records have come.

        Row groups all of whose records are asked for are read together; the others are kept, one by one, for the next
        call.
        """
        if numbers.max() >= self._starts[-1]:
            raise CorruptDataError(f"the file holds {self._starts[-1]} records")
        starts = np.array(self._starts)
        groups = np.searchsorted(starts, numbers, side="right") - 1
        found, counts = np.unique(groups, return_counts=True)
        is_whole = counts >= np.diff(starts)[found]
        for group in found[~is_whole].tolist():
            mine = np.flatnonzero(groups == group)
            yield mine, self._kept_group(group, is_whole=True).take(numbers[mine] - starts[group])
        whole = found[is_whole]
        if len(whole):
            sizes = np.diff(starts)[whole]
            mine = np.flatnonzero(np.isin(groups, whole))
            shifts = np.cumsum(sizes) - sizes - starts[whole]
            rows = numbers[mine] + shifts[np.searchsorted(whole, groups[mine])]
            yield mine, self.read_groups(whole.tolist()).take(rows)

    def read_groups(self, groups: Sequence[int]) -> _RowGroup:
        """Return the rows of some groups."""
        opened = _opened(self._file, self._columns, self._metadata)
        return _RowGroup(opened.read_row_groups(groups, use_threads=False), self._columns)

    def _kept_group(self, group: int, *, is_whole: bool = False) -> _RowGroup:
        """Return a row group, from memory where it is there; its large values stay in the file unless it `is_whole`."""
        key = weakref.ref(self), group, is_whole  # a weak reference: what is kept must not keep the file open
        found = _kept.get(key)
        if found is None:
            found = _kept[key] = self.read_groups([group]) if is_whole else self._without_large_values(group)
            _drop_the_oldest(self.groups_to_keep)
        else:
            with contextlib.suppress(KeyError):  # another thread has just dropped it
                _kept.move_to_end(key)
        return found

    def _without_large_values(self, group: int) -> _RowGroup:
        """Return a row group whose large values stay in the file, those of columns that are stored as ours are."""
        if self._large is None:
            self._large = _large_chunks(self._file, self._columns)
        large: dict[str, _LargeValues] = {}
        for name, start, end in self._large.get(group, ()):
            found = _LargeValues.of(self._file, start, end)
            if found is not None and len(found) == self._starts[group + 1] - self._starts[group]:
                large[name] = found
        if not large:
            return self.read_groups([group])
        opened = _opened(self._file, self._columns, self._metadata)
        names = [column.name for column in self._columns if column.name not in large]
        return _RowGroup(opened.read_row_group(group, names, use_threads=False), self._columns, large)


_kept: collections.OrderedDict[tuple[weakref.ref[_ParquetReader], int, bool], _RowGroup] = collections.OrderedDict()
"""Row groups that readers of this process have used, the last one last. Without a lock: a process forked now would
inherit it locked. So two threads may both read the same one."""


def _drop_the_oldest(wanted: int) -> None:
    """Drop row groups until few are kept, or all of them are small; keep as many as a reader wants."""
    least, most = max(_GROUPS_KEPT, wanted), max(_MOST_GROUPS_KEPT, wanted)
    with contextlib.suppress(KeyError, RuntimeError):  # other threads do the same
        left = sum(group.num_bytes for group in _kept.values())
        while len(_kept) > most or (len(_kept) > least and left > _MOST_KEPT_BYTES):
            left -= _kept.popitem(last=False)[1].num_bytes


def _schema(columns: Sequence[ArrowColumn]) -> Any:
    import pyarrow as pa

    return pa.schema([pa.field(column.name, column.type, nullable=column.is_nullable) for column in columns])


def _opened(file: Any, columns: Sequence[ArrowColumn], metadata: Any = None) -> Any:
    """Return a `pyarrow.parquet.ParquetFile` that tests checksums; raise if its columns are not the expected ones."""
    import pyarrow.parquet as pq

    opened = pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True)
    found, wanted = opened.schema_arrow.remove_metadata(), _schema(columns)
    # In any order: the manifest sorts its keys, and so loses the order of the features.
    if metadata is None and sorted(found, key=_name_of) != sorted(wanted, key=_name_of):
        raise CorruptDataError(f"its columns are {_listed(found)}; the features require {_listed(wanted)}")
    return opened


def _name_of(field: Any) -> str:
    return str(field.name)


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


@final
class _RowGroup:
    """A row group in memory, each column in the form that was asked for first. Thread-safe.

    Args:
        table: the row group as a `pyarrow.Table`, without the columns in `large`.
        columns: Arrow columns of the records, in the order of the features.
        large: columns of large values that are in the file.

    Attributes:
        num_bytes: memory that it takes, roughly.
    """

    def __init__(
        self, table: Any, columns: Sequence[ArrowColumn], large: Mapping[str, _LargeValues] | None = None
    ) -> None:
        self._table = table
        self._columns = columns
        self._large = large or {}
        self.num_bytes = table.nbytes + sum(values.num_bytes for values in self._large.values())
        # Two threads may both make one of these: a lock could be held for ever in a process forked meanwhile.
        self._getters: list[tuple[str, Callable[[int], Column]]] = []
        self._takers: list[tuple[str, Callable[[NDArray[np.int64]], ColumnBlock]]] = []

    def record(self, row: int) -> dict[str, Column]:
        """Return the record of a row; raises `_ChangedError` where a large value is not what it was."""
        if not self._getters:
            self._getters = [(column.name, self._getter(column)) for column in self._columns]
        return {name: get(row) for name, get in self._getters}

    def take(self, rows: NDArray[np.int64]) -> dict[str, ColumnBlock]:
        """Return the columns of some rows, int64 (n,)."""
        if not self._takers:
            self._takers = [(column.name, column.taker(self._table[column.name])) for column in self._columns]
        return {name: take(rows) for name, take in self._takers}

    def _getter(self, column: ArrowColumn) -> Callable[[int], Column]:
        if values := self._large.get(column.name):
            return lambda row: [values[row]]
        return column.getter(self._table[column.name])


# ---------------------------------------------------------------- large values
#
# Pictures and other large values of a column, one at a time, without the rest of their row group in memory.
#
# The pictures of a row group are one page, of 16 MB if each has 250 kB. Zstandard leaves what it cannot compress as it
# is, in blocks of 128 KiB, and pictures cannot be compressed. So once the page has passed, a value can be read alone:
#
#     first value of a page   the page passes in pieces of 1 MiB: CRC32 of the page, digest of each value, blocks
#     every value             one read: its pieces of the blocks, compared with its digest
#
# What compressed blocks hold of values stays in memory.


_UNEXPECTED = (ValueError, LookupError, TypeError, OverflowError, struct.error)  # while bytes are taken for structures
_LARGE_BYTES = 4096  # of a value on average: smaller ones are read sooner with all others of the group
_HEADER_BYTES = 1 << 15  # more than the header of a page takes
_PIECE_BYTES = 1 << 20
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_PLAIN = _DATA_PAGE = 0
_ZSTD = 6  # the codec, in a footer
_RAW, _REPEATED = 0, 1  # kinds of blocks
_MOST_BLOCK_BYTES = 128 << 10
_PROBE_BYTES = 64
_MOST_FRAME_HEADER_BYTES = 18


class _ChangedError(Exception):
    """A value is not the one that was in the page when that was tested."""


@final
class _LargeValues:
    """The values of a column in a row group, which are read when they are asked for. Thread-safe.

    Args:
        file: the open file, a `pyarrow.OSFile`.
        pages: the pages of the column.
    """

    __slots__ = ("_ends", "_file", "_pages", "num_bytes")

    def __init__(self, file: Any, pages: Sequence[_LargePage]) -> None:
        self._file = file
        self._pages = pages
        self._ends = list(itertools.accumulate(len(page.digests) for page in pages))
        self.num_bytes = sum(page.num_bytes for page in pages)

    @classmethod
    def of(cls, file: Any, at: int, end: int) -> _LargeValues | None:
        """Return the values of a column chunk, or None where they are stored otherwise, or anything is wrong.

        Args:
            file: the open file.
            at: first byte of the chunk.
            end: its end.
        """
        import pyarrow as pa

        pages: list[_LargePage] = []
        try:
            while at < end:
                page, at = _LargePage.read(file, at, end)
                pages.append(page)
        except (*_UNEXPECTED, pa.ArrowException, OSError):
            return None  # pyarrow finds out what it is
        return cls(file, pages)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> bytes:
        page = bisect.bisect_right(self._ends, row)
        return self._pages[page].value(self._file, row - (self._ends[page - 1] if page else 0))


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _LargePage:
    """A page of large values that has passed.

    Attributes:
        starts: where each value begins in the page, and where the last one ends, 4 bytes before the next begins.
        digests: XXH3-64 of each value.
        blocks: the blocks of the page.
    """

    starts: array[int]
    digests: array[int]
    blocks: _Blocks

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.blocks.num_bytes + 8 * (len(self.starts) + len(self.digests))

    @classmethod
    def read(cls, file: Any, start: int, end: int) -> tuple[_LargePage, int]:
        """Have a page pass; return it, and where it ends.

        Args:
            file: the open file.
            start: first byte of the header of the page.
            end: end of its column chunk.

        Raises:
            ValueError, LookupError, TypeError, struct.error, pyarrow.ArrowException: it is not as datamat writes it.
        """
        import pyarrow as pa

        header, size = _read_struct(file.read_at(min(_HEADER_BYTES, end - start), start), 0)
        (_, kind), (_, page_size), (_, num_bytes), (_, checksum), (_, data) = (header[number] for number in range(1, 6))
        start += size
        if (kind, data[2][1]) != (_DATA_PAGE, _PLAIN) or start + num_bytes > end:
            raise ValueError("another page")
        blocks = _Blocks(file, start, start + num_bytes)
        passing = _Passing(file, start, num_bytes)
        starts, digests = array("q", [4]), array("Q")
        with pa.CompressedInputStream(pa.PythonFile(passing, "r"), _COMPRESSION) as stream:
            for _ in range(data[1][1]):
                head = stream.read(4)
                (length,) = struct.unpack("<I", head)
                if length > page_size:
                    raise ValueError("the page is too short")
                value = stream.read(length)
                blocks.pass_by(head)
                blocks.pass_by(value)
                starts.append(starts[-1] + length + 4)
                digests.append(xxhash.xxh3_64_intdigest(value))
            if stream.read(1):
                raise ValueError("the page has another size")
        if passing.left or passing.crc != checksum & 0xFFFF_FFFF:
            raise ValueError("the page is damaged")
        if blocks.finish() != page_size or starts[-1] - 4 != page_size:
            raise ValueError("the page has another size")
        return cls(starts, digests, blocks), start + num_bytes

    def value(self, file: Any, number: int) -> bytes:
        """Return a value; raises `_ChangedError` where it is no longer in the file."""
        data = self.blocks.read(file, self.starts[number], self.starts[number + 1] - 4)
        if xxhash.xxh3_64_intdigest(data) != self.digests[number]:
            raise _ChangedError
        return data


@final
class _Blocks:
    """The blocks of a page that Zstandard has compressed. Thread-safe once the page has passed.

    The format: github.com/facebook/zstd/blob/dev/doc/zstd_compression_format.md. A raw block says how large it is. A
    compressed one does not, so where the raw one behind it begins is found by its first bytes. Should they also occur
    before, the values read there do not have their digests.

    Args:
        file: the open file.
        start: first byte of the frame.
        end: its end.

    Raises:
        ValueError, LookupError: there is no such frame.
    """

    __slots__ = ("_begins", "_content", "_first_bytes", "_left", "_offsets", "_page_size", "_sizes", "_unplaced")

    def __init__(self, file: Any, start: int, end: int) -> None:
        # Of each raw block, and of each run of others: first byte in the file and size; -1 and the most that it may be.
        self._offsets, self._sizes = array("q"), array("q")
        self._first_bytes: list[bytes] = []
        for offset, size in _zstd_blocks(file, start, end):
            if offset >= 0:
                self._first_bytes.append(file.read_at(min(size, _PROBE_BYTES), offset))
            elif self._offsets and self._offsets[-1] < 0:
                self._sizes[-1] += size
                continue
            else:
                self._first_bytes.append(b"")
            self._offsets.append(offset)
            self._sizes.append(size)
        self._begins = array("q")
        self._content: dict[int, bytes] = {}  # of what is not raw, by its number
        self._page_size = 0
        self._left = 0  # of the raw block that passes
        self._unplaced: bytearray | None = None  # what has passed since the last raw block

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return sum(map(len, self._content.values())) + 24 * len(self._begins)

    def pass_by(self, data: bytes) -> None:
        """Take the next bytes of the page."""
        rest = memoryview(data)
        self._page_size += len(rest)
        while rest:
            if not self._left and self._unplaced is None:
                self._begin(self._page_size - len(rest))
            if self._unplaced is None:
                size = min(self._left, len(rest))
                self._left -= size
                rest = rest[size:]
            else:
                rest = self._place(self._unplaced, rest)

    def _begin(self, place: int) -> None:
        number = len(self._begins)
        self._begins.append(place)
        if self._offsets[number] >= 0:
            self._left = self._sizes[number]
        else:
            self._unplaced = bytearray()

    def _place(self, unplaced: bytearray, data: memoryview) -> memoryview:
        """Add bytes to those of a run of blocks; return what lies behind it, once its end is found."""
        number = len(self._begins) - 1
        before = len(unplaced)
        unplaced += data
        is_last = number + 1 == len(self._offsets)
        end = -1 if is_last else unplaced.find(self._first_bytes[number + 1], max(before - _PROBE_BYTES, 0))
        if min(len(unplaced), end if end >= 0 else len(unplaced) - _PROBE_BYTES) > self._sizes[number]:
            raise ValueError("a compressed block is larger than it may be")
        if end < 0:
            return memoryview(b"")
        self._content[number] = bytes(unplaced[:end])
        behind = bytes(unplaced[end:])
        self._unplaced = None
        self._begin(self._begins[number] + end)
        return memoryview(behind)

    def finish(self) -> int:
        """Return the size of the page, once all of it has passed."""
        if self._unplaced is not None:
            self._content[len(self._begins) - 1] = bytes(self._unplaced)
            self._unplaced = None
        self._first_bytes.clear()
        if self._left or len(self._begins) != len(self._offsets):
            raise ValueError("blocks are missing")
        return self._page_size

    def read(self, file: Any, start: int, stop: int) -> bytes:
        """Return the bytes of the page from `start` to `stop`."""
        pieces: list[tuple[int, int, int]] = []  # number of the block, and first byte and end in it
        for number in range(bisect.bisect_right(self._begins, start) - 1, bisect.bisect_left(self._begins, stop)):
            begin = self._begins[number]
            end = self._begins[number + 1] if number + 1 < len(self._begins) else self._page_size
            pieces.append((number, max(start - begin, 0), min(stop, end) - begin))
        ranges = [
            (self._offsets[number] + first, self._offsets[number] + end)
            for number, first, end in pieces
            if number not in self._content
        ]
        origin = ranges[0][0] if ranges else 0
        data: bytes = file.read_at(ranges[-1][1] - origin, origin) if ranges else b""
        if len(pieces) == len(ranges) == 1:
            return data
        view = memoryview(data)
        return b"".join(
            self._content[number][first:end]
            if number in self._content
            else view[self._offsets[number] + first - origin : self._offsets[number] + end - origin]
            for number, first, end in pieces
        )


def _zstd_blocks(file: Any, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield first byte and size of each raw block of a frame; -1 and the most that it may hold for any other block."""
    head = file.read_at(_MOST_FRAME_HEADER_BYTES, start)
    if head[:4] != _ZSTD_MAGIC:
        raise ValueError("no frame of Zstandard")
    flags = head[4]
    is_single = flags >> 5 & 1
    at = start + 6 - is_single + (0, 1, 2, 4)[flags & 3] + (is_single, 2, 4, 8)[flags >> 6]
    end -= 4 * (flags >> 2 & 1)  # a checksum
    is_last = 0
    while not is_last:
        word = int.from_bytes(file.read_at(3, at), "little")
        is_last, kind, size = word & 1, word >> 1 & 3, word >> 3
        at += 3
        if kind == _RAW and size:
            yield at, size
        elif kind != _RAW:
            yield -1, _MOST_BLOCK_BYTES
        at += 1 if kind == _REPEATED else size
        if at > end:
            raise ValueError("the frame is cut off")
    if at != end:
        raise ValueError("several frames")


def _large_chunks(file: Any, columns: Sequence[ArrowColumn]) -> dict[int, list[tuple[str, int, int]]]:
    """Return the column chunks of large values by row group: name of the column, first byte and end of the chunk.

    pyarrow knows them, too, but aborts the process where a damaged footer lacks them.
    """
    # A page of values that may be null, or stand in lists, begins with levels.
    binary = {
        column.name.encode(): column.name
        for column in columns
        if column.dtype == "binary" and not column.sizes and not column.is_nullable
    }
    found: dict[int, list[tuple[str, int, int]]] = {}
    if not binary:
        return found
    try:
        size = file.size()
        (length,) = struct.unpack("<I", file.read_at(8, size - 8)[:4])
        footer = _footer(io.BytesIO(file.read_at(length + 12, size - length - 12)), 0, length + 12)
        for number, group in enumerate(footer[_ROW_GROUPS][1][1]):
            for chunk in group[_COLUMNS][1][1]:
                fields = chunk[_CHUNK_METADATA][1]
                (name, *others), start, size = fields[_PATH][1][1], fields[_DATA_PAGE_OFFSET][1], fields[_CHUNK_SIZE][1]
                is_large = fields[_UNPACKED_SIZE][1] >= _LARGE_BYTES * group[_GROUP_ROWS][1] > 0
                is_known = fields[_CODEC][1] == _ZSTD and _DICTIONARY_OFFSET not in fields
                if name in binary and not others and is_large and is_known:
                    found.setdefault(number, []).append((binary[name], start, start + size))
    except (CorruptDataError, *_UNEXPECTED, OSError):
        return {}
    return found


@final
class _Passing:
    """A file for pyarrow: bytes of another one, from which it is read in larger pieces, and their CRC32."""

    closed = False

    def __init__(self, file: Any, start: int, num_bytes: int) -> None:
        self._file = file
        self._at = start
        self._piece = b""
        self._place = 0
        self.crc = 0
        self.left = num_bytes

    def read(self, size: int) -> bytes:
        """Return the next bytes, of which there may be fewer."""
        if self._place == len(self._piece) and self.left:
            self._piece = self._file.read_at(min(self.left, _PIECE_BYTES), self._at)
            self._place = 0
            if not self._piece:
                raise ValueError("the file is cut off")
            self.crc = zlib.crc32(self._piece, self.crc)
            self._at += len(self._piece)
            self.left -= len(self._piece)
        found = self._piece[self._place : self._place + size]
        self._place += len(found)
        return found

    def close(self) -> None:
        """Do nothing: the file is not its own."""


def _spans(metadata: Any) -> list[tuple[int, int, int]]:
    """Return offset, size and number of rows of each row group."""
    return [_place(metadata, group) for group in range(metadata.num_row_groups)]


def _place(metadata: Any, group: int) -> tuple[int, int, int]:
    """Return offset, size and number of rows of a row group, whose column chunks are contiguous."""
    found = metadata.row_group(group)
    chunks = [found.column(column) for column in range(found.num_columns)]
    first = chunks[0]
    offset = first.data_page_offset if first.dictionary_page_offset is None else first.dictionary_page_offset
    return offset, sum(chunk.total_compressed_size for chunk in chunks), found.num_rows


def _offsets_of(spans: Sequence[tuple[int, int, int]]) -> Offsets:
    """Return the line of each row: offset and size of its group, and its number in it."""
    if not spans:
        return Offsets(np.empty(0, np.uint64), np.empty(0, np.uint64))
    offset, size, num_rows = np.array(spans, np.int64).T
    rows = np.concatenate([np.arange(count) for count in num_rows])
    return Offsets(
        *(np.array(column, np.uint64) for column in (np.repeat(offset, num_rows), np.repeat(size, num_rows), rows))
    )
