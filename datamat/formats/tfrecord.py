"""TFRecord shards, plain and gzip, byte for byte what `tf.io.TFRecordWriter` writes, without TensorFlow.

Files of this form can be joined byte for byte. `framing` has the bytes around a record, `example` those inside it.

`tfrecord.gz` is the same stream as gzip members (RFC 1952) of whole records, each closed by the record that brings it
to 64 KiB or more. So parts can still be joined byte for byte, tf.data reads the file with `compression_type="GZIP"`,
and one record is read by inflating one member. The members' header is constant (no time, no name, operating system
"unknown"). Their deflate stream comes from the zlib that Python is linked with, level 6: another zlib implementation,
zlib-ng for instance, gives other bytes that inflate to the same records.

Reading tests everything that the format protects: no record is ever read wrong. What it can't show is a file that
lacks its last records, and in gzip a flipped bit that changes no record (the padding at the end of a member): the
manifest's count and digest show both.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, BinaryIO, Protocol, final

import numpy as np

from datamat.errors import CorruptDataError
from datamat.formats import Block, Buffer, ColumnKind, Offsets, Record, ShardFormat, ShardReader, ShardWriter, Value
from datamat.formats.block import check_block, row_of
from datamat.formats.buffered import BUFFER_BYTES, BufferedFile
from datamat.formats.example import ExampleEncoder, decode_example
from datamat.formats.framing import FRAMING_BYTES, encode_block, frame, read_payload, record_size, unframe
from datamat.formats.guards import located, refuse_finished
from datamat.formats.gzip_members import deflate_member, inflate_member, read_member
from datamat.formats.ranges import RangeReader

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from datamat.formats import Places

__all__ = ["GzipTFRecordFormat", "TFRecordFormat"]

_MEMBER_BYTES = 64 << 10
_GZIP_LEVEL = 6
# From here on joining the pieces of single records is faster than packing a matrix (benchmarks/framing.py shows it).
_LARGE_ROW_BYTES = 2048
# Rows are packed this many bytes at a time, so that the matrix stays in cache (measured: 0.51 us per record of 120
# bytes in the file, 0.66 with all 20,000 at once), but in no fewer rows than make numpy's calls cheap.
_BLOCK_BYTES = 128 << 10
_LEAST_BLOCK_ROWS = 1000


@final
class TFRecordFormat(ShardFormat):
    """Plain TFRecord: what tf.data, TFDS, DALI and grain open."""

    name = "tfrecord"
    extension = "tfrecord"
    joins_parts = True
    has_checksums = True

    def options(self) -> dict[str, str | int | float | bool | None]:
        """Return no options: there is one way to write the format."""
        return {}

    def writer(self, file: BinaryIO, columns: Mapping[str, ColumnKind]) -> ShardWriter:
        """Return a writer of TFRecords."""
        return _TFRecordWriter(_PlainSink(file), columns)

    def reader(self, path: str | os.PathLike[str], places: Places) -> ShardReader:
        """Return a reader by ranges."""
        return RangeReader(path, places, self.read_record)

    def read_record(
        self, buffer: Buffer, *, skip: int = 0, path: str = "", number: int = 0, offset: int = 0
    ) -> dict[str, Value]:
        """Decode the record that fills the buffer."""
        try:
            payload, size = unframe(buffer, skip)
            if size != len(buffer) - skip:
                raise CorruptDataError(f"the record has {size} bytes, but the index says {len(buffer) - skip}")
            return decode_example(payload)
        except CorruptDataError as exc:
            raise located(exc, path, number, offset) from exc

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Value], tuple[int, ...]]]:
        """Yield each record with its offset and size."""
        offset = number = 0
        while True:
            try:
                payload = read_payload(file)
                if payload is None:
                    return
                record = decode_example(payload)
            except CorruptDataError as exc:
                raise located(exc, path, number, offset) from exc
            size = len(payload) + FRAMING_BYTES
            yield record, (offset, size)
            offset, number = offset + size, number + 1


@final
class GzipTFRecordFormat(ShardFormat):
    """TFRecord in gzip members of about 64 KiB: for text and tables; images are compressed already."""

    name = "tfrecord.gz"
    extension = "tfrecord.gz"
    joins_parts = True
    has_checksums = True

    def options(self) -> dict[str, str | int | float | bool | None]:
        """Return the compression level and the least size of a member before compression."""
        return {"level": _GZIP_LEVEL, "member_bytes": _MEMBER_BYTES}

    def writer(self, file: BinaryIO, columns: Mapping[str, ColumnKind]) -> ShardWriter:
        """Return a writer of TFRecords in gzip members."""
        return _TFRecordWriter(_GzipSink(file), columns)

    def reader(self, path: str | os.PathLike[str], places: Places) -> ShardReader:
        """Return a reader by ranges."""
        return RangeReader(path, places, self.read_record)

    def read_record(
        self, buffer: Buffer, *, skip: int = 0, path: str = "", number: int = 0, offset: int = 0
    ) -> dict[str, Value]:
        """Inflate the member that fills the buffer and decode the record at `skip`."""
        try:
            member, rest = inflate_member(buffer, _most_of_member)
            if rest:
                raise CorruptDataError(f"{rest} bytes follow the gzip member, which should end there")
            return decode_example(unframe(member, skip)[0])
        except CorruptDataError as exc:
            raise located(exc, path, number, offset) from exc

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Value], tuple[int, ...]]]:
        """Yield each record with the offset and size of its member and its place inside."""
        number = offset = 0
        buffer = b""
        while buffer := buffer or file.read(BUFFER_BYTES):
            skip = 0
            try:
                member, size, buffer = read_member(file, buffer, _most_of_member)
                while skip < len(member):
                    payload, frame_size = unframe(member, skip)
                    yield decode_example(payload), (offset, size, skip)
                    skip, number = skip + frame_size, number + 1
            except CorruptDataError as exc:
                raise located(exc, path, number, offset) from exc
            offset += size


def _most_of_member(found: bytearray) -> int:
    """Return how many bytes a member may hold that begins with these: to the end of the record that closes it."""
    if len(found) <= 2 * _MEMBER_BYTES:
        return 2 * _MEMBER_BYTES  # most members end here, and nobody need look into them
    end = 0
    while end < _MEMBER_BYTES:
        end += record_size(found, end)
    return max(end, 2 * _MEMBER_BYTES)


@final
class _TFRecordWriter(ShardWriter):
    """Encodes and frames records; the sink decides how they lie in the file."""

    __slots__ = ("_columns", "_encoder", "_finished", "_sink", "_sizes")

    def __init__(self, sink: _Sink, columns: Mapping[str, ColumnKind]) -> None:
        self._columns = dict(columns)
        self._encoder = ExampleEncoder(self._columns)
        self._sink = sink
        self._sizes = array("Q")
        self._finished = False

    @property
    def num_records(self) -> int:
        """How many records were appended."""
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """How many bytes of file they make so far; of gzip, the members that are complete."""
        return self._sink.num_bytes

    def append(self, record: Record) -> None:
        """Append one record."""
        refuse_finished(self._finished)
        pieces, length = self._encoder.encode(record)
        self._sink.add_record(frame(pieces, length), length + FRAMING_BYTES)
        self._sizes.append(length + FRAMING_BYTES)

    def append_block(self, columns: Block) -> None:
        """Append n records, packed a buffer's worth of rows at a time."""
        refuse_finished(self._finished)
        num_rows = check_block(columns, self._columns)
        if not num_rows:
            return
        step = max(_LEAST_BLOCK_ROWS, _BLOCK_BYTES * num_rows // _num_bytes(columns))
        for start in range(0, num_rows, step):
            rows = {name: values[start : start + step] for name, values in columns.items()}
            self._append_rows(rows, min(step, num_rows - start))

    def finish(self) -> Offsets:
        """Write what is still buffered and return where the records lie."""
        refuse_finished(self._finished)
        self._finished = True
        return self._sink.finish(np.array(self._sizes, np.uint64))

    def _append_rows(self, rows: Block, num_rows: int) -> None:
        if _padded_bytes(rows) > min(_LARGE_ROW_BYTES * num_rows, 2 * _num_bytes(rows) + 64 * num_rows):
            for index in range(num_rows):
                self.append(row_of(rows, index))
            return
        packed, sizes = encode_block(rows, self._columns)
        self._sink.add_block(packed.data, sizes)
        self._sizes.frombytes(sizes.astype(np.uint64).tobytes())


class _Sink(Protocol):
    """Takes framed records."""

    @property
    def num_bytes(self) -> int: ...

    def add_record(self, pieces: Sequence[bytes], size: int) -> None: ...

    def add_block(self, records: memoryview, sizes: NDArray[np.int64]) -> None: ...

    def finish(self, sizes: NDArray[np.uint64]) -> Offsets: ...


@final
class _PlainSink:
    """Records back to back."""

    __slots__ = ("_file",)

    def __init__(self, file: BinaryIO) -> None:
        self._file = BufferedFile(file)

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def add_record(self, pieces: Sequence[bytes], size: int) -> None:
        self._file.add(pieces)

    def add_block(self, records: memoryview, sizes: NDArray[np.int64]) -> None:
        self._file.add([records])

    def finish(self, sizes: NDArray[np.uint64]) -> Offsets:
        self._file.flush()
        return Offsets(np.cumsum(sizes, dtype=np.uint64) - sizes, sizes)


@final
class _GzipSink:
    """Records in gzip members; the record that brings a member to 64 KiB is its last."""

    __slots__ = ("_counts", "_file", "_member", "_member_bytes", "_member_records", "_member_sizes")

    def __init__(self, file: BinaryIO) -> None:
        self._file = BufferedFile(file)
        self._member: list[Buffer] = []
        self._member_bytes = 0
        self._member_records = 0
        self._counts = array("Q")  # records of each complete member
        self._member_sizes = array("Q")  # and its bytes in the file

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def add_record(self, pieces: Sequence[bytes], size: int) -> None:
        self._add(pieces, size, 1)

    def add_block(self, records: memoryview, sizes: NDArray[np.int64]) -> None:
        ends = np.cumsum(sizes)
        first = start = 0
        while first < len(ends):
            last = int(np.searchsorted(ends, start + _MEMBER_BYTES - self._member_bytes))
            last = min(last, len(ends) - 1)
            stop = int(ends[last])
            self._add([records[start:stop]], stop - start, last + 1 - first)
            first, start = last + 1, stop

    def finish(self, sizes: NDArray[np.uint64]) -> Offsets:
        if self._member_records:
            self._close_member()
        self._file.flush()
        counts = np.array(self._counts, np.int64)
        member_sizes = np.array(self._member_sizes, np.uint64)
        starts = np.cumsum(sizes, dtype=np.uint64) - sizes
        first_starts = starts[np.cumsum(counts) - counts]
        member_starts = np.cumsum(member_sizes, dtype=np.uint64) - member_sizes
        return Offsets(
            np.repeat(member_starts, counts), np.repeat(member_sizes, counts), starts - np.repeat(first_starts, counts)
        )

    def _add(self, pieces: Sequence[Buffer], size: int, num_records: int) -> None:
        self._member += pieces
        self._member_bytes += size
        self._member_records += num_records
        if self._member_bytes >= _MEMBER_BYTES:
            self._close_member()

    def _close_member(self) -> None:
        member = deflate_member(b"".join(self._member), level=_GZIP_LEVEL)
        self._file.add([member])
        self._counts.append(self._member_records)
        self._member_sizes.append(len(member))
        self._member.clear()
        self._member_bytes = self._member_records = 0


def _num_bytes(columns: Block) -> int:
    """Return roughly the bytes that a block takes in a file, at least 1."""
    return 1 + sum(
        values.nbytes if isinstance(values, np.ndarray) else sum(map(len, values)) for values in columns.values()
    )


def _padded_bytes(columns: Block) -> int:
    """Return roughly the bytes that a block takes when every row is as wide as the widest."""
    return sum(
        values.nbytes if isinstance(values, np.ndarray) else len(values) * max(map(len, values))
        for values in columns.values()
    )
