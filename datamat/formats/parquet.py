"""Parquet shards: typed columns in row groups of a fixed number of rows, for tables, SQL and Hugging Face `datasets`.

A part is a Parquet file. A shard consists of its parts, one after another, and a footer that refers to the row groups
of all of them: readers use the last footer, and never see those of the parts. So workers encode every row group once,
in its final place, and completing a shard costs no more than its footer.

The number of rows in a group is fixed in advance: readers split work by row groups, and read a whole one to get a
record, so groups of rows with images are small. The last group of a part has the remaining rows; rows of several
megabytes end a group earlier, with the row that brings the writer's memory for it to 64 MiB. Pages have a checksum
(CRC32), which is tested when a record is read, and are compressed with Zstandard, except for pictures, sound and video,
which are compressed already. The footer has no checksum: that of the file in the manifest shows any change.

A large value has its own page, so that it is written unchanged, and read alone.

One version of pyarrow always writes the same bytes; another may encode the same records differently.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import io
import itertools
import operator
import os
import struct
import weakref
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, final

import numpy as np

from datamat.codecs.libraries import load_zlib
from datamat.errors import RESOURCES, CorruptDataError, OptionError, SchemaError, want_of_resources
from datamat.features import RaggedColumn
from datamat.features.base import join_blocks, num_bytes_of
from datamat.formats import Block, Offsets, Record, ShardFormat, ShardReader, ShardWriter
from datamat.formats.arrow import ArrowColumn, Rows, arrow_columns
from datamat.formats.example import check_block, checked_record
from datamat.formats.io import BufferedFile, bound, located, refuse_finished
from datamat.formats.thrift import (
    BINARY,
    I32,
    I64,
    LENGTH,
    LIST,
    MAGIC,
    STRUCT,
    Struct,
    footer_bytes,
    read_struct,
    write_int,
)
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from datamat.features import Features
    from datamat.features.base import Column, ColumnBlock, Kind
    from datamat.formats import RecordSpans


OUTPUT_VERSION = 7
"""Incremented when the same records give different bytes; then shards of the format are rebuilt."""

_LARGE_ROWS, _SMALL_ROWS = 64, 8192
_MOST_GROUP_BYTES = 64 << 20
_ENCODING_BYTES = 16  # pyarrow's memory per number of a list during encoding: 64 MB of uint8 took 732 MB
_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 8192
_COMPRESSION, _LEVEL = "zstd", 1
_PAGE_BYTES = 4096  # a page of large values ends with the one that brings it here ...
_PACKED_PAGE_BYTES = 1 << 16  # ... or here, where they are compressed: together they become smaller
_MOST_VALUE_BYTES = (1 << 31) - 1 - 4  # sizes of pages have 32 bits
_UNIT_BYTES = 1 << 20  # of several small row groups that are read in one call
_GROUPS_KEPT, _MOST_GROUPS_KEPT = 8, 512
_MOST_KEPT_BYTES = 32 << 20  # of more than 8 groups: groups whose large values stay in the file take a few KiB
_FIRST_GROUP = 4  # after the magic bytes


@final
@frozen()
class ParquetFormat(ShardFormat):
    """Parquet with typed columns.

    Args:
        row_group_rows: rows in each row group except the last one of a part. None chooses 64 for rows with images or
            large tensors, and 8,192 for others.
        features: features of the records; `with_features` sets them.
    """

    name = "parquet"
    extension = "parquet"
    joins_parts = True
    has_checksums = True
    reads_ranges = True
    packages = frozenset({"pyarrow"})

    row_group_rows: int | None = None
    features: Features | None = None

    def __post_init__(self) -> None:
        rows = self.row_group_rows
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise OptionError(f"ParquetFormat: row_group_rows is {rows!r}; want a number of at least 1, or None")

    @property
    def group_records(self) -> int:
        return self.row_group_rows or _LARGE_ROWS

    def options(self) -> dict[str, str | int | float | bool | None]:
        return {"row_group_rows": self.row_group_rows, "compression": _COMPRESSION, "level": _LEVEL}

    def records_per_group(self, record_bytes: float) -> int | None:
        del record_bytes
        return self.row_group_rows

    def with_features(self, features: Features) -> ParquetFormat:
        is_large = any(column.storage.is_large for column in arrow_columns(features))
        return ParquetFormat(self.row_group_rows or (_LARGE_ROWS if is_large else _SMALL_ROWS), features)

    def writer(self, file: BinaryIO, columns: Mapping[str, Kind]) -> ShardWriter:
        return _ParquetWriter(file, columns, self._columns(), self.row_group_rows or _LARGE_ROWS)

    def trailer(self, file: BinaryIO, parts: Sequence[tuple[int, int]]) -> bytes:
        return _joined_footer(file, parts)

    def reader(self, path: str | os.PathLike[str], spans: RecordSpans) -> ShardReader:
        """Return a reader that finds row groups through the footer, and keeps the most recently used ones."""
        return _ParquetReader(os.fspath(path), spans, self._columns())

    def read_block(
        self,
        readers: Sequence[ShardReader],
        which: NDArray[np.int64],
        numbers: NDArray[np.int64],
        kinds: Mapping[str, Kind],
    ) -> Mapping[str, ColumnBlock] | None:
        import pyarrow as pa

        asked: list[tuple[_ParquetReader, NDArray[np.int64], list[int], NDArray[np.int64], list[_RowGroups]]] = []
        found: list[tuple[NDArray[np.int64], dict[str, ColumnBlock]]] = []
        try:
            for place, reader in enumerate(readers):
                assert isinstance(reader, _ParquetReader), "the format makes them"
                mine = np.flatnonzero(which == place)
                groups, which_group = reader.groups_of(numbers[mine])
                asked.append((reader, mine, groups, which_group, reader.kept(groups)))  # which others may replace
            for reader, mine, groups, which_group, _ in asked:
                pieces = reader.pieces(numbers[mine], groups, which_group)
                found += [(mine[part], piece) for part, piece in pieces]
        except (CorruptDataError, _ChangedError, pa.ArrowException, OSError):
            return None
        # Often one window of a shuffled epoch ends and the next begins: then this is the order.
        found.sort(key=lambda piece: int(piece[0][0]))
        order = np.concatenate([part for part, _ in found])
        back = None if (np.diff(order) == 1).all() else np.argsort(order)
        joined = join_blocks([piece for _, piece in found], back)
        return {name: _of_its_own(column) for name, column in joined.items()}

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Column], tuple[int, ...]]]:
        """Yield each record with offset and size of its row group, and its row in it."""
        import pyarrow as pa

        number, offset, size = 0, _FIRST_GROUP, 0
        try:
            columns = self._columns()
            opened = _opened(file, columns)
            for group in range(opened.metadata.num_row_groups):
                offset += size
                # Read the group before locating it: with damaged metadata, pyarrow raises in the former and aborts the
                # process in the latter.
                rows = _RowGroups(opened.read_row_group(group, use_threads=False), self._columns(), {group: 0}, {})
                offset, size, num_rows = _place(opened.metadata, group)
                for row in range(num_rows):
                    yield rows.record(row), (offset, size, row)
                    number += 1
        except (CorruptDataError, pa.ArrowException, OSError) as exc:
            raise located(exc, path, number, offset) from exc

    def _columns(self) -> Sequence[ArrowColumn]:
        return arrow_columns(bound(self.features, self.name))


@final
class _ParquetWriter(ShardWriter):
    """Gathers rows until a row group is full.

    small columns   record batches of about 1 MiB ──> pyarrow's writer ──> column chunks
    large values    unchanged, uncopied ─────────────────> a page each ──> column chunks after those
    the footer      pyarrow's, of the small columns, with the chunks of the others added
    """

    def __init__(
        self, file: BinaryIO, kinds: Mapping[str, Kind], columns: Sequence[ArrowColumn], group_rows: int
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._kinds = dict(kinds)
        self._columns = columns
        self._paged = [column for column in columns if _is_paged(column)]
        self._encoded = [column for column in columns if not _is_paged(column)]
        self._schema = _schema(self._encoded)
        self._group_rows = group_rows
        self._rows: list[dict[str, Any]] = []  # rows that wait for a batch to fill
        self._rows_bytes = 0  # of their small columns
        self._batches: list[Any] = []  # rows that wait for a full row group: the small columns, ...
        self._values: dict[str, list[bytes]] = {column.name: [] for column in self._paged}  # ... and large values
        self._row_bytes = np.empty(0, np.int64)  # bytes of each of these rows, ...
        self._row_weights = np.empty(0, np.int64)  # ... and their memory until they are written
        self._large_bytes = 0  # of all waiting large values
        self._num_rows = 0
        self._finished = False
        self._groups: list[tuple[int, list[Struct]]] = []  # bytes of large values before it; its chunks of them
        self._spans: list[tuple[int, int, int]] = []  # offset, size and rows of each row group
        self._out = BufferedFile(file)
        self._sink = _PartFile(self._out)
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, "w"),
            self._schema,
            # A column in a list is named by its path.
            compression={_path_of(column): _codec(column) for column in self._encoded},
            compression_level={
                _path_of(column): _LEVEL for column in self._encoded if not column.storage.is_compressed
            },
            use_dictionary=[_path_of(column) for column in self._encoded if _has_dictionary(column)] or False,
            write_statistics=[column.name for column in self._encoded if not column.storage.is_large],
            write_page_checksum=True,
        )

    @property
    def num_records(self) -> int:
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of these records in the file; rows not yet in a row group count unencoded."""
        rows = sum(num_bytes_of(value) for row in self._rows for value in row.values())
        return self._out.num_bytes + rows + int(self._row_bytes.sum())

    def append(self, record: Record) -> None:
        refuse_finished(self._finished)
        row = checked_record(record, self._kinds)
        # Rows wait for their batch, but the caller may reuse the array for the next one.
        row = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in row.items()}
        self._rows.append(row)
        self._num_rows += 1
        self._rows_bytes += sum(num_bytes_of(row[column.name]) for column in self._encoded)
        self._large_bytes += sum(len(row[column.name]) for column in self._paged)
        most_rows = min(_BATCH_ROWS, self._group_rows) if self._paged else _BATCH_ROWS
        if (
            self._rows_bytes >= _BATCH_BYTES
            or self._large_bytes >= _MOST_GROUP_BYTES
            or len(self._rows) + len(self._row_bytes) >= most_rows
        ):
            self._take_rows()

    def append_block(self, columns: Block) -> None:
        refuse_finished(self._finished)
        num_rows = check_block(columns, self._kinds)
        self._take_rows()
        for start in range(0, num_rows, _BATCH_ROWS):
            self._take({name: values[start : start + _BATCH_ROWS] for name, values in columns.items()})
        self._num_rows += num_rows

    def finish(self) -> Offsets:
        refuse_finished(self._finished)
        self._take_rows()
        self._finished = True
        if len(self._row_bytes):
            self._write_group(len(self._row_bytes))
        held: list[bytes] = []
        self._sink.held = held
        self._writer.close()
        written = b"".join(held)
        if self._paged:
            footer, _ = read_struct(written, 0)
            footer = _with_chunks(footer, self._groups, self._columns)
            written, self._spans = footer_bytes(footer), _spans_of(footer)
        self._out.add((written,))
        self._out.flush()
        return _offsets_of(self._spans)

    def __del__(self) -> None:
        # pyarrow's writer writes a footer when it is collected, finished or not: by then the file belongs to others.
        if (sink := getattr(self, "_sink", None)) is not None:
            sink.held = []
        if (writer := getattr(self, "_writer", None)) is not None:
            writer.is_open = False

    def _take_rows(self) -> None:
        if self._rows:
            rows, self._rows, self._rows_bytes = self._rows, [], 0
            self._take({column.name: [row[column.name] for row in rows] for column in self._columns})

    def _take(self, values: Mapping[str, Any]) -> None:
        import pyarrow as pa

        arrays = [column.to_arrow(values[column.name]) for column in self._encoded]
        batch = pa.record_batch(arrays, schema=self._schema)
        sizes, weights = np.zeros(len(batch), np.int64), np.zeros(len(batch), np.int64)
        for column in self._encoded:
            taken = column.row_bytes(batch.column(column.name))
            sizes += taken
            weights += taken * max(
                1, _ENCODING_BYTES // column.item_bytes if column.stored.holds_numbers and column.stored.sizes else 1
            )
        for column in self._paged:
            lengths = _lengths(column, values[column.name])
            sizes += lengths
            weights += lengths
        for column in self._paged:
            self._values[column.name] += values[column.name]
        self._batches.append(batch)
        self._row_bytes = np.concatenate([self._row_bytes, sizes])
        self._row_weights = np.concatenate([self._row_weights, weights])
        while (num_rows := self._next_group()) <= len(self._row_bytes):
            self._write_group(num_rows)
        self._large_bytes = sum(len(value) for waiting in self._values.values() for value in waiting)

    def _next_group(self) -> int:
        """Return the number of rows in the next row group, which may exceed those available."""
        most = int(np.searchsorted(np.cumsum(self._row_weights), _MOST_GROUP_BYTES)) + 1
        return min(self._group_rows, most)

    def _write_group(self, num_rows: int) -> None:
        import pyarrow as pa

        large_before, start = self._out.num_bytes - self._sink.num_bytes, self._sink.num_bytes
        rows = pa.Table.from_batches(self._batches)
        # The division of columns into chunks would affect the pages.
        self._writer.write_table(rows.slice(0, num_rows).combine_chunks(), row_group_size=num_rows)
        self._spans.append((start, self._sink.num_bytes - start, num_rows))
        self._batches = rows.slice(num_rows).to_batches()
        self._row_bytes, self._row_weights = self._row_bytes[num_rows:], self._row_weights[num_rows:]
        chunks = []
        for column in self._paged:
            waiting = self._values[column.name]
            chunks.append(_write_chunk(self._out, column, waiting[:num_rows]))
            self._values[column.name] = waiting[num_rows:]
        self._groups.append((large_before, chunks))


@final
class _PartFile(io.RawIOBase):
    """The file of a part for pyarrow, without the large values, which bypass it.

    Attributes:
        num_bytes: number of bytes that pyarrow has written.
        held: list that receives bytes instead of the file, or None.
    """

    def __init__(self, out: BufferedFile) -> None:
        self._out = out
        self.num_bytes = 0
        self.held: list[bytes] | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        if self.held is None:
            self._out.add((view,))
        else:
            self.held.append(bytes(view))
        self.num_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.num_bytes


def _is_paged(column: ArrowColumn) -> bool:
    """Return True if values of a column get their own pages; nullable values and lists begin with levels instead."""
    return (
        column.storage.is_large
        and column.stored.dtype == "binary"
        and not column.stored.sizes
        and not column.stored.is_nullable
    )


def _codec(column: ArrowColumn) -> str:
    return "none" if column.storage.is_compressed else _COMPRESSION


def _has_dictionary(column: ArrowColumn) -> bool:
    """Return True if a column of small values is dictionary-encoded; others are plain.

    All readers support these two encodings; Daft and fastparquet do not support pyarrow's others. Parquet's narrowest
    integers have 32 bits: Zstandard compresses 8-bit noise to 1.4 bytes per number, and with a dictionary to 1.0.
    """
    return column.is_category or bool(column.stored.sizes and column.stored.dtype in {"int8", "uint8"})


def _path_of(column: ArrowColumn) -> str:
    """Return the path of the only leaf of a column, by pyarrow's rules."""
    return column.name + ".list.element" * len(column.stored.sizes)


def _lengths(column: ArrowColumn, values: Sequence[bytes]) -> NDArray[np.int64]:
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    if len(lengths) and lengths.max() > _MOST_VALUE_BYTES:
        raise SchemaError(
            f"column {column.name!r} does not fit into {column.type}: a value has {lengths.max():,} bytes; "
            f"Parquet allows at most {_MOST_VALUE_BYTES:,}: store less in a record, or use another format"
        )
    return lengths


# ---------------------------------------------------------------- pages of large values
#
# A page is a header (`PageHeader` of parquet.thrift) and values, each after its length in 4 bytes. Large values have a
# page each: so a picture has its own CRC32, is written without a copy, and is read alone. Small ones share a page. The
# sizes of the pages are stored in the metadata of their chunk, under `_PAGES`, as text:
#
#     253412 251007 3*5120        two pages of one value each, and one of three values; with their headers


_PAGES = b"datamat.pages"
_DATA_PAGE = _PLAIN = 0
_RLE = 3
_BYTE_ARRAY = 6
_CODECS = {"none": 0, "zstd": 6}


def _write_chunk(out: BufferedFile, column: ArrowColumn, values: Sequence[bytes]) -> Struct:
    """Write values as a column chunk, and return its `ColumnMetaData`, complete as in pyarrow."""
    codec, offset = _codec(column), out.num_bytes
    unpacked, num_pages, notes = 0, 0, []
    for page in _cut(values, _PAGE_BYTES if column.storage.is_compressed else _PACKED_PAGE_BYTES):
        before = out.num_bytes
        header, page_bytes, pieces = _page(page, codec)
        out.add((header, *pieces))
        unpacked += len(header) + page_bytes
        num_pages += 1
        notes.append(("" if len(page) == 1 else f"{len(page)}*") + str(out.num_bytes - before))
    stats = {1: (I32, _DATA_PAGE), 2: (I32, _PLAIN), 3: (I32, num_pages)}
    sizes = {1: (I64, sum(map(len, values))), 2: (LIST, (I64, [])), 3: (LIST, (I64, []))}
    return {
        1: (I32, _BYTE_ARRAY),
        2: (LIST, (I32, [_RLE, _PLAIN])),
        _PATH: (LIST, (BINARY, [column.name.encode()])),
        _CODEC: (I32, _CODECS[codec]),
        5: (I64, len(values)),
        _UNPACKED_SIZE: (I64, unpacked),
        _CHUNK_SIZE: (I64, out.num_bytes - offset),
        _KEY_VALUES: (LIST, (STRUCT, [{1: (BINARY, _PAGES), 2: (BINARY, " ".join(notes).encode())}])),
        _DATA_PAGE_OFFSET: (I64, offset),
        13: (LIST, (STRUCT, [stats])),
        16: (STRUCT, sizes),
    }


def _cut(values: Sequence[bytes], page_bytes: int) -> Iterator[Sequence[bytes]]:
    """Yield the values of each page."""
    first = size = 0
    for number, value in enumerate(values, 1):
        size += len(value)
        if size >= page_bytes or number == len(values):
            yield values[first:number]
            first, size = number, 0


def _page(values: Sequence[bytes], codec: str) -> tuple[bytes, int, list[bytes]]:
    """Return the header of a page, its uncompressed size, and its bytes in pieces."""
    pieces = [piece for value in values for piece in (LENGTH.pack(len(value)), value)]
    size = packed_size = sum(map(len, pieces))
    if codec != "none":
        pieces = [_zstd().compress(b"".join(pieces), asbytes=True)]
        packed_size = len(pieces[0])
    crc, crc32 = 0, load_zlib().crc32
    for piece in pieces:
        crc = crc32(piece, crc)
    signed = crc - (crc >> 31 << 32)
    header = bytearray()
    # Type, sizes, CRC, and a `DataPageHeader`: number of values, their encoding, and those of the absent levels.
    # Written directly: `write_struct` takes three times as long.
    for tag, number in ((0x15, _DATA_PAGE), (0x15, size), (0x15, packed_size), (0x15, signed)):
        header.append(tag)
        write_int(header, number)
    header += b"\x1c"
    for number in (len(values), _PLAIN, _RLE, _RLE):
        header.append(0x15)
        write_int(header, number)
    header += b"\x00\x00"
    return bytes(header), size, pieces


def _zstd() -> Any:
    import pyarrow as pa

    return pa.Codec(_COMPRESSION, compression_level=_LEVEL)


def _with_chunks(
    footer: Struct, groups: Sequence[tuple[int, Sequence[Struct]]], columns: Sequence[ArrowColumn]
) -> Struct:
    """Return the footer of all columns, given that of the small ones.

    Args:
        footer: pyarrow's footer, without the large values.
        groups: for each row group, the bytes of large values before it, and its chunks of them.
        columns: all columns.
    """
    whole, _ = read_struct(_empty_footer(tuple(columns)), 0)
    for group, (shift, chunks) in zip(footer[_ROW_GROUPS][1][1], groups, strict=True):
        _move(group, shift)
        small, large = iter(group[_COLUMNS][1][1]), iter(chunks)
        merged = [
            {2: (I64, 0), _CHUNK_METADATA: (STRUCT, next(large))} if _is_paged(column) else next(small)
            for column in columns
        ]
        group[_COLUMNS] = (LIST, (STRUCT, merged))
        _add(group, (_GROUP_UNPACKED_SIZE,), sum(chunk[_UNPACKED_SIZE][1] for chunk in chunks))
        _add(group, (_GROUP_SIZE,), sum(chunk[_CHUNK_SIZE][1] for chunk in chunks))
    whole[_NUM_ROWS], whole[_ROW_GROUPS] = footer[_NUM_ROWS], footer[_ROW_GROUPS]
    return whole


@functools.lru_cache(maxsize=4)
def _empty_footer(columns: tuple[ArrowColumn, ...]) -> bytes:
    """Return pyarrow's footer of a file without rows: the schema, in Parquet's form and in Arrow's."""
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.ParquetWriter(file, _schema(columns)).close()  # pyarrow cannot make an empty table of lists of JSON
    return file.getvalue()[-8 - int.from_bytes(file.getvalue()[-8:-4], "little") : -8]


# ---------------------------------------------------------------- footers
#
# One footer for row groups that were written as several files.
#
# pyarrow joins the metadata of several files (`FileMetaData.append_row_groups`), but keeps each file's own
# offsets, and cannot shift them. So the offsets are shifted here. Everything else stays as pyarrow wrote it.


_NUM_ROWS, _ROW_GROUPS = 3, 4  # fields of FileMetaData
_COLUMNS, _GROUP_UNPACKED_SIZE, _GROUP_ROWS, _GROUP_OFFSET, _GROUP_SIZE = 1, 2, 3, 5, 6  # of RowGroup
_CHUNK_OFFSETS, _CHUNK_METADATA = (2, 4, 6), 3  # of ColumnChunk: of the chunk, the offset index, the column index
_PATH, _CODEC, _UNPACKED_SIZE, _CHUNK_SIZE, _KEY_VALUES, _DATA_PAGE_OFFSET = 3, 4, 6, 7, 8, 9  # of ColumnMetaData
_PAGE_OFFSETS = (9, 10, 11, 14)  # of ColumnMetaData: of data pages, index page, dictionary page, bloom filter


def _joined_footer(file: BinaryIO, parts: Sequence[tuple[int, int]]) -> bytes:
    """Return the footer of concatenated Parquet files, whose own footers stay in place.

    Args:
        file: the concatenated Parquet files.
        parts: first byte and size of each.

    Raises:
        CorruptDataError: one of them does not end in a footer.
    """
    if len(parts) == 1:
        return _only_footer(file, *parts[0])
    joined: Struct = {}
    groups: list[Struct] = []
    num_rows = 0
    for start, size in parts:
        footer = _footer(file, start, size)
        joined = joined or footer
        num_rows += footer[_NUM_ROWS][1]
        for group in footer[_ROW_GROUPS][1][1]:
            _move(group, start)
            groups.append(group)
    joined[_NUM_ROWS] = (I64, num_rows)
    joined[_ROW_GROUPS] = (LIST, (STRUCT, groups))
    return footer_bytes(joined)


def _only_footer(file: BinaryIO, start: int, size: int) -> bytes:
    """Return the footer of a shard's only part, whose offsets are those in the shard: pyarrow reads it faster."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    footer = _footer_text(file, start, size) + file.read(8)
    try:
        pq.read_metadata(io.BytesIO(MAGIC + footer))
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(f"bytes {start} to {start + size} are not a Parquet file: {error}") from error
    return footer


def _footer(file: BinaryIO, start: int, size: int) -> Struct:
    try:
        footer, _ = read_struct(_footer_text(file, start, size), 0)
        if footer[_NUM_ROWS][0] != I64 or footer[_ROW_GROUPS][1][0] != STRUCT:
            raise ValueError("its footer is not a Parquet footer")
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptDataError(f"bytes {start} to {start + size} are not a Parquet file: {error}") from error
    return footer


def _footer_text(file: BinaryIO, start: int, size: int) -> bytes:
    """Return the footer of a file in a file, whose length and magic bytes are to be read next."""
    file.seek(start + size - 8)
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != MAGIC or length + 12 > size:
        raise CorruptDataError(f"bytes {start} to {start + size} are not a Parquet file: they end in {end!r}")
    file.seek(start + size - 8 - length)
    return file.read(length)


def _move(group: Struct, by: int) -> None:
    """Shift every offset in the metadata of a row group."""
    _add(group, (_GROUP_OFFSET,), by)
    for chunk in group[_COLUMNS][1][1]:
        _add(chunk, _CHUNK_OFFSETS, by)
        _add(chunk[_CHUNK_METADATA][1], _PAGE_OFFSETS, by)


def _add(fields: Struct, numbers: tuple[int, ...], by: int) -> None:
    for number in numbers:
        kind, value = fields.get(number, (I64, 0))
        if value:  # 0 is not an offset: every file begins with magic bytes
            fields[number] = (kind, value + by)


# ---------------------------------------------------------------- reading


@final
class _ParquetReader(ShardReader):
    """Reads the row group of a record; keeps the footer, and shares a few row groups among readers of the process."""

    def __init__(self, path: str, spans: RecordSpans, columns: Sequence[ArrowColumn]) -> None:
        import pyarrow as pa

        self._path = path
        self._spans = spans
        self._columns = columns
        self._file: Any = None
        try:
            # Not mapped: truncating a mapped file would kill the process.
            self._file = pa.OSFile(path)
            opened = _opened(self._file, columns)
        except (CorruptDataError, pa.ArrowException, OSError) as exc:
            if isinstance(exc, FileNotFoundError) or getattr(exc, "errno", None) in RESOURCES:
                raise
            raise CorruptDataError(f"{path}: {exc}; remove the file and run the job again to rebuild it") from exc
        self._metadata = opened.metadata
        self._unused = [opened]  # one for each thread that reads at the same time: opening takes 0.2 ms
        self._large: dict[int, list[_LargeChunk]] | None = None
        groups = [self._metadata.row_group(group) for group in range(self._metadata.num_row_groups)]
        self._starts: list[int] = list(itertools.accumulate((group.num_rows for group in groups), initial=0))
        self._group_bytes = [group.total_byte_size for group in groups]
        # Weak, so that `_kept` decides.
        self._in_memory: weakref.WeakValueDictionary[int, _RowGroups] = weakref.WeakValueDictionary()

    def read(self, number: int) -> dict[str, Column]:
        import pyarrow as pa

        group = bisect.bisect_right(self._starts, number) - 1
        row = number - self._starts[group]
        try:
            if number >= self._starts[-1]:
                raise CorruptDataError(f"the file holds {self._starts[-1]} records")
            try:
                rows = self._kept_groups([group])[group]
                record = rows.record(rows.first_row[group] + row)
            except _ChangedError:
                whole = _RowGroups(self.read_groups([group]), self._columns, {group: 0}, {})
                record = whole.record(row)  # reports the damage
        except (CorruptDataError, pa.ArrowException, OSError) as exc:
            want = want_of_resources(self._path, exc)
            raise want or located(exc, self._path, number, self._spans.span(number)[0]) from exc
        return record

    @property
    def group_records(self) -> int | None:
        return max((stop - start for start, stop in itertools.pairwise(self._starts)), default=None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def groups_of(self, numbers: NDArray[np.int64]) -> tuple[list[int], NDArray[np.int64]]:
        """Return the row groups that hold some records, and for each record the index of its group among them."""
        low, high = (bisect.bisect_right(self._starts, int(one)) - 1 for one in (numbers.min(), numbers.max()))
        if high >= len(self._group_bytes):
            raise CorruptDataError(f"the file holds {self._starts[-1]} records")
        if low == high:
            return [low], np.zeros_like(numbers)
        which = np.searchsorted(self._starts[low + 1 : high + 1], numbers, side="right")
        is_there = np.bincount(which) > 0
        return (low + np.flatnonzero(is_there)).tolist(), (np.cumsum(is_there) - 1)[which]

    def kept(self, groups: Sequence[int]) -> list[_RowGroups]:
        """Return what is in memory of some row groups."""
        return [rows for group in groups if (rows := self._in_memory.get(group)) is not None]

    def pieces(
        self, numbers: NDArray[np.int64], groups: list[int], which: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], dict[str, ColumnBlock]]]:
        """Yield the columns of some records in few pieces, with the places of each in `numbers`, int64 (n,).

        Args:
            numbers: int64 (n,), the records.
            groups: row groups that hold them.
            which: index in `groups` of that of each record.
        """
        counts = np.bincount(which, minlength=len(groups)).tolist()
        done = {group for group, count in zip(groups, counts, strict=True) if count >= self._num_rows(group)}
        found = self._kept_groups(groups, done)
        rows = numbers + np.array([found[group].first_row[group] - self._starts[group] for group in groups])[which]
        each = list(dict.fromkeys(found.values()))
        if len(each) == 1:
            yield np.arange(len(rows)), each[0].take(rows)
            return
        which_one = np.array([each.index(found[group]) for group in groups])[which]
        for place, one in enumerate(each):
            mine = np.flatnonzero(which_one == place)
            yield mine, one.take(rows[mine])

    def read_groups(self, groups: Sequence[int], columns: Sequence[str] | None = None) -> Any:
        """Return row groups as a `pyarrow.Table`, all columns or some."""
        try:
            opened = self._unused.pop()
        except IndexError:
            opened = _opened(self._file, self._columns, self._metadata)
        table = opened.read_row_groups(groups, columns, use_threads=False)
        self._unused.append(opened)
        return table

    def _kept_groups(self, wanted: Sequence[int], done: Collection[int] = ()) -> dict[int, _RowGroups]:
        """Return some row groups, from memory if possible; their large values stay in the file.

        Those that are `done`, since all their records are read now, are kept for another epoch where there is room.
        """
        found = {group: rows for group in wanted if (rows := self._in_memory.get(group)) is not None}
        units = self._units([group for group in wanted if group not in found])
        if next(_calls) % 2:
            # Two threads that read parts of one window need the same groups: they begin at its two ends, and find the
            # other half in memory. In the same order, each would read all of them.
            units.reverse()
        for unit in units:
            known = {group: rows for group in unit if (rows := self._in_memory.get(group)) is not None}
            if len(known) < len(unit):
                is_kept = _has_room() or not all(group in done for group in unit)
                if is_kept:
                    _drop_the_oldest(self.groups_to_keep, len(unit))
                rows = self._read(unit)
                known = {group: self._in_memory.setdefault(group, rows) for group in unit}
                if is_kept and rows in known.values():  # else another thread has just read the same ones
                    _kept[id(rows)] = rows
            found.update(known)
        for rows in found.values():
            with contextlib.suppress(KeyError):  # another thread has just dropped it
                _kept.move_to_end(id(rows))
        return found

    def _units(self, groups: Sequence[int]) -> list[list[int]]:
        """Divide row groups into those to read at once, which are few or small."""
        units: list[list[int]] = []
        room = 0
        for group in groups:
            is_large = group in self._large_chunks()
            if units and not is_large and self._group_bytes[group] <= room:
                units[-1].append(group)
            else:
                units.append([group])
                room = 0 if is_large else _UNIT_BYTES
            room -= self._group_bytes[group]
        return units

    def _read(self, groups: list[int]) -> _RowGroups:
        """Return row groups whose large values stay in the file, if their columns are stored like ours."""
        large: dict[str, _LargeValues] = {}
        for chunk in self._large_chunks().get(groups[0], ()):
            with contextlib.suppress(*_UNEXPECTED):
                values = _LargeValues(self._file, chunk)
                if len(values) == self._num_rows(groups[0]):
                    large[chunk.name] = values
        if large:
            names = [column.name for column in self._columns if column.name not in large]
            return _RowGroups(self.read_groups(groups, names), self._columns, {groups[0]: 0}, large)
        ends = itertools.accumulate(map(self._num_rows, groups), initial=0)
        return _RowGroups(self.read_groups(groups), self._columns, dict(zip(groups, ends, strict=False)), {})

    def _num_rows(self, group: int) -> int:
        return self._starts[group + 1] - self._starts[group]

    def _large_chunks(self) -> dict[int, list[_LargeChunk]]:
        if self._large is None:
            self._large = _large_chunks(self._file, self._columns)
        return self._large


_calls = itertools.count()
_kept: collections.OrderedDict[int, _RowGroups] = collections.OrderedDict()
"""Row groups used by readers of this process, least recently used first. Without a lock, which a forked process might
inherit in a locked state. So two threads may both read the same one."""


def _has_room() -> bool:
    """Return True if no row group need be dropped for a small one."""
    with contextlib.suppress(RuntimeError):  # other threads change it
        num_bytes: int = sum(rows.num_bytes for rows in _kept.values())
        return num_bytes <= _MOST_KEPT_BYTES - _UNIT_BYTES
    return False


def _drop_the_oldest(wanted: int, num_more: int) -> None:
    """Drop row groups until there is room for more: few are kept, or small ones, or as many as a reader needs."""
    least, most = (max(number, wanted) - num_more for number in (_GROUPS_KEPT, _MOST_GROUPS_KEPT))
    with contextlib.suppress(KeyError, RuntimeError):  # other threads do the same
        count = sum(len(rows.first_row) for rows in _kept.values())  # of hundreds, for each that is read
        if count <= least:
            return
        num_bytes = sum(map(operator.attrgetter("num_bytes"), _kept.values()))
        while count > most or (count > least and num_bytes > _MOST_KEPT_BYTES):
            _, oldest = _kept.popitem(last=False)
            count -= len(oldest.first_row)
            num_bytes -= oldest.num_bytes


def _of_its_own(column: ColumnBlock) -> ColumnBlock:
    """Return a column whose numbers are not shared with a kept row group."""
    if isinstance(column, np.ndarray):
        return column if column.flags.writeable else column.copy()
    if not isinstance(column, RaggedColumn) or column.values.flags.writeable:
        return column
    return RaggedColumn(column.values.copy(), column.lengths)


def _schema(columns: Sequence[ArrowColumn]) -> Any:
    import pyarrow as pa

    return pa.schema([pa.field(column.name, column.type, nullable=column.stored.is_nullable) for column in columns])


def _opened(file: Any, columns: Sequence[ArrowColumn], metadata: Any = None) -> Any:
    """Return a `pyarrow.parquet.ParquetFile` that tests checksums; raise if its columns are not as expected."""
    import pyarrow.parquet as pq

    opened = pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True)
    if metadata is not None:  # the file's columns have been compared before
        return opened
    found, wanted = opened.schema_arrow.remove_metadata(), _schema(columns)
    # In any order: the manifest sorts keys, which loses the order of the features.
    by_name = operator.attrgetter("name")
    if sorted(found, key=by_name) != sorted(wanted, key=by_name):
        raise CorruptDataError(f"its columns are {_listed(found)}; the features require {_listed(wanted)}")
    return opened


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


@final
class _RowGroups:
    """Row groups in memory, each column in the form requested first. Thread-safe.

    Args:
        table: the row groups as a `pyarrow.Table`, without the columns in `large`.
        columns: Arrow columns of the records, in the order of the features.
        first_row: row at which each group begins.
        large: columns of large values that stay in the file.

    Attributes:
        first_row: as given.
        num_bytes: approximate memory.
    """

    def __init__(
        self,
        table: Any,
        columns: Sequence[ArrowColumn],
        first_row: Mapping[int, int],
        large: Mapping[str, _LargeValues],
    ) -> None:
        self._table = table if len(first_row) == 1 else table.combine_chunks()  # of one, even chunks are few
        self._columns = columns
        self._large = large
        self.first_row = first_row
        self.num_bytes = table.get_total_buffer_size() + sum(values.num_bytes for values in self._large.values())
        # Two threads may both create one: a lock could stay locked for ever in a process forked meanwhile.
        self._getters: list[tuple[str, Callable[[int], Column]]] = []
        self._takers: list[tuple[str, Callable[[Rows], ColumnBlock]]] = []

    def record(self, row: int) -> dict[str, Column]:
        """Return the record of a row; raise `_ChangedError` if a large value was changed."""
        if not self._getters:
            self._getters = [(column.name, self._getter(column)) for column in self._columns]
        return {name: get(row) for name, get in self._getters}

    def take(self, rows: NDArray[np.int64]) -> dict[str, ColumnBlock]:
        """Return the columns of some rows, int64 (n,); raise `_ChangedError` as `record` does."""
        if not self._takers:
            self._takers = [(column.name, self._taker(column)) for column in self._columns]
        which: Rows = rows
        # Rows that are not consecutive usually show it at their ends, in a tenth of the time.
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            which = slice(int(rows[0]), int(rows[-1]) + 1)
        return {name: take(which) for name, take in self._takers}

    def _getter(self, column: ArrowColumn) -> Callable[[int], Column]:
        if values := self._large.get(column.name):
            return lambda row: values.take((row,))
        return column.getter(self._table[column.name])

    def _taker(self, column: ArrowColumn) -> Callable[[Rows], ColumnBlock]:
        if values := self._large.get(column.name):
            return lambda rows: values.take(range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist())
        return column.taker(self._table[column.name])


# ---------------------------------------------------------------- large values
#
# Pictures and other large values of a column are read one at a time, without the rest of their row group: the page of
# each is found by the page sizes in the footer, and has its own checksum.


_UNEXPECTED = (ValueError, LookupError, TypeError, OverflowError, struct.error)  # errors of parsing arbitrary bytes
_LARGE_BYTES = 4096  # average size of a value: smaller ones are read faster with the whole group
_HEADER_BYTES = 64  # more than the size of a page header


class _ChangedError(Exception):
    """A page does not match the footer or its checksum."""


class _LargeChunk(NamedTuple):
    """A column chunk of large values, from the footer."""

    name: str
    start: int
    end: int
    unpacked_bytes: int  # its uncompressed size
    is_packed: bool
    pages: bytes  # their sizes, from `_PAGES`


@final
class _LargeValues:
    """The values of a column in a row group, read on demand. Thread-safe.

    Args:
        file: the open file, a `pyarrow.OSFile`.
        chunk: the column chunk.

    Raises:
        ValueError: the sizes of its pages do not match the chunk.
    """

    __slots__ = ("_chunk", "_ends", "_file", "_starts", "num_bytes")

    def __init__(self, file: Any, chunk: _LargeChunk) -> None:
        self._file = file
        self._chunk = chunk
        pages = [page.rpartition(b"*") for page in chunk.pages.split()]
        self._ends = list(itertools.accumulate(int(count or 1) for count, _, _ in pages))
        self._starts: list[int] = list(itertools.accumulate((int(size) for _, _, size in pages), initial=chunk.start))
        if self._starts[-1] != chunk.end:
            raise ValueError("the pages have another size than their chunk")
        self.num_bytes = 100 * len(pages)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def take(self, rows: Iterable[int]) -> list[bytes]:
        """Return the values of some rows; raise `_ChangedError` if a page is damaged."""
        found: list[bytes] = []
        last, values = -1, []
        for row in rows:
            page = bisect.bisect_right(self._ends, row)
            if page != last:
                try:
                    last, values = page, self._tested(page)
                except _UNEXPECTED as error:
                    raise _ChangedError from error
            found.append(values[row - (self._ends[page - 1] if page else 0)])
        return found

    def _tested(self, page: int) -> list[bytes]:
        """Return the values of a page after testing its checksum."""
        start, end = self._starts[page], self._starts[page + 1]
        count = self._ends[page] - (self._ends[page - 1] if page else 0)
        header, at = read_struct(self._file.read_at(min(_HEADER_BYTES, end - start), start), 0)
        (_, kind), (_, size), (_, num_bytes), (_, crc), (_, fields) = (header[number] for number in range(1, 6))
        start += at
        if (kind, fields[1][1], fields[2][1], start + num_bytes) != (_DATA_PAGE, count, _PLAIN, end):
            raise ValueError("another page")
        if not 4 <= size <= self._chunk.unpacked_bytes or (size != num_bytes and not self._chunk.is_packed):
            raise ValueError("a page of another size")
        crc32 = load_zlib().crc32
        if count == 1 and not self._chunk.is_packed:  # read only the value, since cutting it out would copy it
            value: bytes = self._file.read_at(num_bytes - 4, start + 4)
            data, values = value, [value]
            found = crc32(value, crc32(LENGTH.pack(num_bytes - 4)))
        else:
            data, values = self._file.read_at(num_bytes, start), []
            found = crc32(data)
        if found != crc & 0xFFFF_FFFF:
            raise ValueError("another checksum")
        return values or _cut_out(_unpacked(data, size) if self._chunk.is_packed else data, count)


def _unpacked(data: bytes, size: int) -> bytes:
    import pyarrow as pa

    try:
        found: bytes = _zstd().decompress(data, size, asbytes=True)
    except pa.ArrowException as error:
        raise ValueError("not a Zstandard frame") from error
    return found


def _cut_out(data: bytes, count: int) -> list[bytes]:
    """Return the values of a page."""
    found, at = [], 0
    for _ in range(count):
        (length,) = LENGTH.unpack_from(data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if at != len(data):
        raise ValueError("the page has another size")
    return found


def _large_chunks(file: Any, columns: Sequence[ArrowColumn]) -> dict[int, list[_LargeChunk]]:
    """Return the column chunks of large values by row group.

    pyarrow also has them, but aborts the process if a damaged footer lacks them.
    """
    paged = {column.name for column in columns if _is_paged(column)}
    found: dict[int, list[_LargeChunk]] = {}
    if not paged:
        return found
    try:
        size = file.size()
        (length,) = LENGTH.unpack(file.read_at(8, size - 8)[:4])
        footer = _footer(io.BytesIO(file.read_at(length + 12, size - length - 12)), 0, length + 12)
        for number, group in enumerate(footer[_ROW_GROUPS][1][1]):
            chunks = [_large_chunk(chunk[_CHUNK_METADATA][1]) for chunk in group[_COLUMNS][1][1]]
            least = max(_LARGE_BYTES * group[_GROUP_ROWS][1], 1)
            mine = [chunk for chunk in chunks if chunk and chunk.name in paged and chunk.unpacked_bytes >= least]
            if mine:
                found[number] = mine
    except (CorruptDataError, *_UNEXPECTED, OSError):
        return {}
    return found


def _large_chunk(fields: Struct) -> _LargeChunk | None:
    """Return a column chunk whose pages are known, given its `ColumnMetaData`."""
    (name, *others), start, size = fields[_PATH][1][1], fields[_DATA_PAGE_OFFSET][1], fields[_CHUNK_SIZE][1]
    notes = {note[1][1]: note[2][1] for note in fields.get(_KEY_VALUES, (0, (0, ())))[1][1]}
    codec = fields[_CODEC][1]
    if others or _PAGES not in notes or codec not in _CODECS.values():
        return None
    is_packed = codec == _CODECS[_COMPRESSION]
    return _LargeChunk(name.decode(), start, start + size, fields[_UNPACKED_SIZE][1], is_packed, notes[_PAGES])


def _place(metadata: Any, group: int) -> tuple[int, int, int]:
    """Return offset, size and number of rows of a row group, whose column chunks are contiguous, in any order."""
    found = metadata.row_group(group)
    chunks = [found.column(column) for column in range(found.num_columns)]
    offset = min(
        chunk.data_page_offset if chunk.dictionary_page_offset is None else chunk.dictionary_page_offset
        for chunk in chunks
    )
    return offset, sum(chunk.total_compressed_size for chunk in chunks), found.num_rows


def _spans_of(footer: Struct) -> list[tuple[int, int, int]]:
    """Return offset, size and number of rows of each row group."""
    groups = footer[_ROW_GROUPS][1][1]
    return [(group[_GROUP_OFFSET][1], group[_GROUP_SIZE][1], group[_GROUP_ROWS][1]) for group in groups]


def _offsets_of(spans: Sequence[tuple[int, int, int]]) -> Offsets:
    """Return the line of each row: offset and size of its group, and its number in it."""
    if not spans:
        return Offsets(np.empty(0, np.uint64), np.empty(0, np.uint64))
    offset, size, num_rows = np.array(spans, np.int64).T
    rows = np.concatenate([np.arange(count) for count in num_rows])
    return Offsets(
        *(np.array(column, np.uint64) for column in (np.repeat(offset, num_rows), np.repeat(size, num_rows), rows))
    )
