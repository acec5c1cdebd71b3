"""TFRecord shards, plain and gzip, byte for byte like `tf.io.TFRecordWriter`, without TensorFlow.

Such files can be joined byte for byte. This module writes the framing of a record, `example` its content.

`tfrecord.gz` is the same stream as gzip members (RFC 1952) of whole records, each closed by the record that brings it
to 64 KiB or more. So parts can still be joined byte for byte, tf.data reads the file with `compression_type="GZIP"`,
and reading a record inflates one member. The header of members is constant (no time, no name, operating system
"unknown"). The zlib that Python is linked with makes the deflate stream, at level 6: another implementation, such as
zlib-ng, makes different bytes that inflate to the same records.

Reading tests every checksum: no record is read wrong. Checksums cannot detect a file that lacks its last records and,
in gzip, a flipped bit that changes no record (in the padding of a member); the manifest's count and digest detect both.
"""

from __future__ import annotations

import functools
import itertools
import struct
import weakref
import zlib
from array import array
from typing import TYPE_CHECKING, BinaryIO, TypeVar, final

import google_crc32c
import numpy as np

from datamat.errors import CorruptDataError, count_of
from datamat.formats import Block, Buffer, Offsets, Record, ShardFormat, ShardReader, ShardWriter
from datamat.formats.example import (
    MAX_EXAMPLE_BYTES,
    ExampleEncoder,
    buffers_of,
    decode_block,
    decode_example,
    pack_block,
)
from datamat.formats.io import BUFFER_BYTES, BufferedFile, RangeReader, located, read_spans, read_up_to, refuse_finished

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from datamat.features.base import Column, ColumnBlock, Kind
    from datamat.formats import RecordSpans


# ---------------------------------------------------------------- the bytes around a record
#
# TFRecord framing: the bytes around a payload, written and tested.
#
# A record in the file (tensorflow/core/lib/io/record_writer.h), all little endian:
#
#   uint64 length | uint32 masked CRC32C of those 8 bytes | payload, length bytes | uint32 masked CRC32C of the payload
#
# The mask keeps a CRC over data that holds CRCs from being weak (tensorflow/core/lib/hash/crc32c.h).


FRAMING_BYTES = 16
_HEADER_BYTES = 12
_TRAILER_BYTES = 4
_LARGE_BYTES = 4096  # values that are not copied; to copy smaller ones costs less than a view of them
_DENSE = 16  # ratio of possible lengths to records, above which a table of all lengths is too large
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_LENGTH_AND_CRC = struct.Struct("<QI")

_Crc = TypeVar("_Crc", int, "NDArray[np.uint64]")


def frame(pieces: list[bytes], length: int) -> list[bytes]:
    """Return the pieces of one payload between header and trailer, without copying large ones."""
    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, piece)
    return [_header(length) + pieces[0], *pieces[1:], _CRC.pack(_mask(crc))]


def encode_block(columns: Block, kinds: Mapping[str, Kind]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return n rows as framed records back to back, uint8 (total,), and the length of each, int64 (n,).

    Args:
        columns: n > 0 rows, as columns.
        kinds: kind of each column, by its name.

    Raises:
        SchemaError: the columns are not those of `kinds`.
    """
    packed, sizes = pack_block(columns, kinds, header=_block_headers, trailer_size=_TRAILER_BYTES)
    ends = np.cumsum(sizes)
    raw = packed.tobytes()  # the CRC takes bytes, and slices of bytes are fastest
    stops = (ends - _TRAILER_BYTES).tolist()
    starts = (ends - sizes + _HEADER_BYTES).tolist()
    crcs = np.array([google_crc32c.value(raw[a:b]) for a, b in zip(starts, stops, strict=True)], np.uint64)
    masked = _mask(crcs).astype("<u4")
    packed[ends[:, None] + np.arange(-_TRAILER_BYTES, 0)] = masked.view(np.uint8).reshape(-1, _TRAILER_BYTES)
    return packed, sizes


def read_payload(file: BinaryIO) -> bytes | None:
    """Return the next payload of a plain file, or None at its end."""
    header = file.read(_HEADER_BYTES)
    if not header:
        return None
    length = _checked_length(header)
    payload = read_up_to(file, length)
    _check_payload(payload, length, file.read(_TRAILER_BYTES))
    return payload


def record_size(buffer: Buffer, start: int) -> int:
    """Return the length of the record at `start`, framing included; the buffer need only hold its header."""
    return _checked_length(memoryview(buffer)[start : start + _HEADER_BYTES]) + FRAMING_BYTES


def unframe(buffer: Buffer, start: int) -> tuple[Buffer, int]:
    """Return the payload of the record at `start`, a view if it is large, and the length of the whole record."""
    view, begin = memoryview(buffer), start + _HEADER_BYTES
    length = _checked_length(view[start:begin])
    end = begin + length
    payload = bytes(view[begin:end]) if length < _LARGE_BYTES else view[begin:end]
    _check_payload(payload, length, view[end : end + _TRAILER_BYTES])
    return payload, length + FRAMING_BYTES


def _mask(crc: _Crc) -> _Crc:
    """Return a CRC32C as TFRecord stores it (tensorflow/core/lib/hash/crc32c.h)."""
    # numpy keeps uint64 in sums with Python integers, but its stubs do not say so.
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF  # type: ignore[return-value]


@functools.lru_cache(maxsize=1 << 12)
def _header(length: int) -> bytes:
    packed = _LENGTH.pack(length)
    return packed + _CRC.pack(_mask(google_crc32c.value(packed)))


def _block_headers(lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the header of each record, uint8 (n, 12), computed once per distinct length."""
    least = int(lengths.min())
    if int(lengths.max()) - least > _DENSE * len(lengths):
        distinct, places = np.unique(lengths, return_inverse=True)
        headers = b"".join(map(_header, distinct.tolist()))
        return np.frombuffer(headers, np.uint8).reshape(-1, _HEADER_BYTES)[places]
    table = np.zeros((int(lengths.max()) - least + 1, _HEADER_BYTES), np.uint8)
    for index in np.flatnonzero(np.bincount(lengths - least)).tolist():
        table[index] = np.frombuffer(_header(index + least), np.uint8)
    return table[lengths - least]


def _checked_length(header: Buffer) -> int:
    if len(header) < _HEADER_BYTES:
        raise CorruptDataError(f"the data ends inside the header, after {len(header)} of its {_HEADER_BYTES} bytes")
    length, stored = _LENGTH_AND_CRC.unpack(header)
    if (wanted := _header(length)) != header:
        found = _CRC.unpack_from(wanted, 8)[0]
        raise CorruptDataError(f"the checksum of the length is {found:#010x}, but {stored:#010x} is stored")
    if length > MAX_EXAMPLE_BYTES:
        raise CorruptDataError(f"the record claims {length} bytes, but no Example exceeds {MAX_EXAMPLE_BYTES}")
    return int(length)


def _check_payload(payload: Buffer, length: int, trailer: Buffer) -> None:
    if len(payload) + len(trailer) < length + _TRAILER_BYTES:
        raise CorruptDataError(
            f"the data ends inside the record, {len(payload) + len(trailer)} bytes after its header, "
            f"which needs {length + _TRAILER_BYTES}"
        )
    # The CRC takes bytes or arrays, but not a memoryview.
    crc = google_crc32c.value(payload if isinstance(payload, bytes) else np.frombuffer(payload, np.uint8))
    found, stored = _mask(crc), _CRC.unpack(trailer)[0]
    if found != stored:
        raise CorruptDataError(f"the checksum of the data is {found:#010x}, but {stored:#010x} is stored")


# ---------------------------------------------------------------- gzip members
#
# Gzip members (RFC 1952) with a constant header, written and read one at a time.
#
# A gzip file is a sequence of members, each with its own header, deflate stream, CRC32 and length. Members of whole
# records can be joined byte for byte and inflated one by one, which gives random access. A member may inflate to a
# thousand times its size: it only gets memory for the records that its first bytes announce.


_HEADER = bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 255])  # deflate, no flags, no time, no hint, unknown system
_TRAILER = struct.Struct("<II")
_READ_BYTES = 1 << 20
_GZIP = zlib.MAX_WBITS | 16  # zlib then reads header and trailer, and tests CRC and length


def _next_member(file: BinaryIO, buffer: bytes) -> tuple[bytes, int, bytes]:
    """Return the next member inflated, its length in the file, and the bytes read past it.

    Args:
        file: gzip file, positioned after `buffer`.
        buffer: bytes of the member that have already been read.
    """
    while len(buffer) < len(_HEADER) and (more := file.read(_READ_BYTES)):
        buffer += more
    return _inflate(itertools.chain([buffer], iter(lambda: file.read(_READ_BYTES), b"")))


def _inflate(pieces: Iterable[Buffer]) -> tuple[bytes, int, bytes]:
    """Return the first member in the pieces inflated, its length, and the rest of the piece in which it ends."""
    inflate = zlib.decompressobj(_GZIP)
    found = bytearray()
    size = 0
    for piece in pieces:
        if not size and (head := bytes(piece[: len(_HEADER)])) != _HEADER:
            raise CorruptDataError(f"the gzip header is {head.hex()}; want {_HEADER.hex()}")
        size += len(piece)
        left = piece
        while not inflate.eof:
            # One byte over the bound shows whether there is more, and lets zlib reach the trailer if not.
            least, most = len(found), _most_of_member(found)
            try:
                found += inflate.decompress(left, most - least + 1)
            except zlib.error as exc:
                raise CorruptDataError(f"the gzip member does not inflate: {exc}") from exc
            if len(found) > (most := _most_of_member(found)):
                raise CorruptDataError(f"the gzip member holds more than its records, which end at {most}")
            left = inflate.unconsumed_tail
            if not left and len(found) == least:
                break
        if inflate.eof:
            return bytes(found), size - len(inflate.unused_data), inflate.unused_data
    raise CorruptDataError(f"the data ends inside a gzip member, after {size} of its bytes")


OUTPUT_VERSION = 1
"""Incremented when the same records give different bytes; shards of the format are then rebuilt."""

_MEMBER_BYTES = 64 << 10
_MOST_SPREAD = 1 << 20  # of the lengths of records decoded together: a table holds the header of each
_GZIP_LEVEL = 6
_USUAL_RATIO = 2  # typical compression ratio of rows and text
_LEAST_GROUP_RECORDS = 16  # larger records are read as fast one by one, each with its member


@final
class TFRecordFormat(ShardFormat):
    """Plain TFRecord, for tf.data, TFDS, DALI and grain."""

    name = "tfrecord"
    extension = "tfrecord"
    joins_parts = True
    has_checksums = True
    reads_ranges = True
    gains_from_threads = False

    def options(self) -> dict[str, str | int | float | bool | None]:
        return {}

    def writer(self, file: BinaryIO, columns: Mapping[str, Kind]) -> ShardWriter:
        return _TFRecordWriter(_PlainSink(file), columns)

    def reader(self, path: str | os.PathLike[str], spans: RecordSpans) -> ShardReader:
        return RangeReader(path, spans, _read_record)

    def read_block(
        self,
        readers: Sequence[ShardReader],
        which: NDArray[np.int64],
        numbers: NDArray[np.int64],
        kinds: Mapping[str, Kind],
    ) -> Mapping[str, ColumnBlock] | None:
        try:
            data, starts, sizes = read_spans(readers, which, numbers)
        except CorruptDataError:
            return None
        return _decode_frames(data, starts, sizes, kinds)

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Column], tuple[int, ...]]]:
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
    """TFRecord in gzip members of about 64 KiB, for text and tables; images are compressed already."""

    name = "tfrecord.gz"
    extension = "tfrecord.gz"
    joins_parts = True
    has_checksums = True
    reads_ranges = True
    groups_at_once = 32
    packages = frozenset({"zlib"})

    def options(self) -> dict[str, str | int | float | bool | None]:
        return {"level": _GZIP_LEVEL, "member_bytes": _MEMBER_BYTES}

    def writer(self, file: BinaryIO, columns: Mapping[str, Kind]) -> ShardWriter:
        return _TFRecordWriter(_GzipSink(file), columns)

    def records_per_group(self, record_bytes: float) -> int | None:
        """Return the approximate number of small records in a member, which must be inflated as a whole."""
        found = int(_MEMBER_BYTES / (_USUAL_RATIO * max(record_bytes, 1)))
        return found if found >= _LEAST_GROUP_RECORDS else None

    def reader(self, path: str | os.PathLike[str], spans: RecordSpans) -> ShardReader:
        return RangeReader(path, spans, _read_record_of_member, _read_intact)

    def read_block(
        self,
        readers: Sequence[ShardReader],
        which: NDArray[np.int64],
        numbers: NDArray[np.int64],
        kinds: Mapping[str, Kind],
    ) -> Mapping[str, ColumnBlock] | None:
        """Return the columns of many records, inflating each member once; recently used members are kept."""
        members: list[bytes] = []
        skips, of_record = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        try:
            for place, reader in enumerate(readers):
                assert isinstance(reader, RangeReader), "this format makes them"
                mine = np.flatnonzero(which == place)
                spans = reader.spans(numbers[mine])
                offsets, firsts, inverse = np.unique(spans[:, 0], return_index=True, return_inverse=True)
                skips[mine], of_record[mine] = spans[:, 2], len(members) + inverse
                held = weakref.ref(reader)
                ranges = zip(offsets.tolist(), spans[firsts, 1].tolist(), strict=True)
                members += [_kept_member(held, offset, size) for offset, size in ranges]
        except CorruptDataError:
            return None
        lengths = np.fromiter(map(len, members), np.int64, len(members))
        bases = np.cumsum(lengths) - lengths
        inflated, places = b"".join(members), bases[of_record] + skips
        frames = places[:, None] + np.arange(_LENGTH.size)
        if frames[:, -1].max() >= len(inflated):
            return None
        payloads = np.frombuffer(inflated, np.uint8)[frames].reshape(-1).view("<u8")
        if payloads.max() > MAX_EXAMPLE_BYTES:
            return None
        return _decode_frames(inflated, places, payloads.astype(np.int64) + FRAMING_BYTES, kinds)

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Column], tuple[int, ...]]]:
        """Yield each record with offset and size of its member, and its position inside."""
        number = offset = 0
        buffer = b""
        while buffer := buffer or file.read(BUFFER_BYTES):
            skip = 0
            try:
                member, size, buffer = _next_member(file, buffer)
                while skip < len(member):
                    payload, frame_size = unframe(member, skip)
                    yield decode_example(payload), (offset, size, skip)
                    skip, number = skip + frame_size, number + 1
            except CorruptDataError as exc:
                raise located(exc, path, number, offset) from exc
            offset += size


# Members of two windows of a shuffled order, one of which ends while the next begins: 10 MiB. Groups of the order do
# not begin where members do, so each group is in two of them.
@functools.lru_cache(maxsize=160)
def _kept_member(reader: weakref.ref[RangeReader], offset: int, size: int) -> bytes:
    """Return a member of a file, inflated."""
    opened = reader()  # a weak reference: what is kept must not keep the file open
    assert opened is not None, "its caller holds it"
    return _whole_member(opened.read_range(offset, size))


def _whole_member(buffer: Buffer) -> bytes:
    """Return the member that fills the buffer, inflated."""
    member, _, rest = _inflate([buffer])
    if rest:
        raise CorruptDataError(f"{len(rest)} bytes follow the gzip member, which should end there")
    return member


def _read_record(buffer: Buffer, skip: int) -> dict[str, Column]:
    """Decode the record that fills the buffer."""
    payload, size = unframe(buffer, skip)
    if size != len(buffer) - skip:
        raise CorruptDataError(f"the record has {count_of(size, 'byte')}, but the index says {len(buffer) - skip:,}")
    return decode_example(payload)


def _read_record_of_member(buffer: Buffer, skip: int) -> dict[str, Column]:
    """Inflate the member that fills the buffer and decode the record at `skip`."""
    return decode_example(unframe(_whole_member(buffer), skip)[0])


def _read_intact(buffer: Buffer, skip: int) -> dict[str, Column] | None:
    """Decode the record at `skip` of a damaged member, if its own checksums prove it intact.

    Data before a flipped bit is inflated correctly.
    """
    inflate, found, end = zlib.decompressobj(_GZIP), bytearray(), skip + _HEADER_BYTES
    for start in range(0, len(buffer), _INTACT_BYTES):
        try:
            found += inflate.decompress(bytes(buffer[start : start + _INTACT_BYTES]))
        except zlib.error:
            return None
        if len(found) >= end:
            end = skip + FRAMING_BYTES + _checked_length(bytes(found[skip : skip + _HEADER_BYTES]))
            if len(found) >= end:
                return decode_example(unframe(bytes(found[skip:end]), 0)[0])
    return None


_INTACT_BYTES = 16  # inflated at a time: those before the damage are lost with it


def _decode_frames(
    data: bytes, starts: NDArray[np.int64], sizes: NDArray[np.int64], kinds: Mapping[str, Kind]
) -> Mapping[str, ColumnBlock] | None:
    """Return the columns of framed records; None if a checksum or the form of a record is wrong.

    Args:
        data: bytes that contain the framed records.
        starts: int64 (n,), the first byte of each.
        sizes: int64 (n,), the bytes of each, including framing.
        kinds: the kind of each column.
    """
    lengths = sizes - FRAMING_BYTES
    stops = starts + sizes
    if lengths.min() < 0 or lengths.max() - lengths.min() > _MOST_SPREAD or stops.max() > len(data):
        return None
    raw = np.frombuffer(data, np.uint8)
    begins, ends = starts + _HEADER_BYTES, stops - _TRAILER_BYTES
    if (raw[starts[:, None] + np.arange(_HEADER_BYTES)] != _block_headers(lengths)).any():
        return None
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    found = np.array([google_crc32c.value(data[begin:end]) for begin, end in spans], np.uint64)
    stored = raw[ends[:, None] + np.arange(_TRAILER_BYTES)].view("<u4")[:, 0]
    return decode_block(data, begins, ends, kinds) if (_mask(found) == stored).all() else None


def _most_of_member(found: bytearray) -> int:
    """Return the maximum bytes of a member with this beginning: up to the end of the record that closes it."""
    if len(found) <= 2 * _MEMBER_BYTES:
        return 2 * _MEMBER_BYTES  # most members are shorter, and need no further check
    end = 0
    while end < _MEMBER_BYTES:
        end += record_size(found, end)
    return max(end, 2 * _MEMBER_BYTES)


@final
class _TFRecordWriter(ShardWriter):
    """Encodes and frames records; its sink decides their layout in the file."""

    def __init__(self, sink: _PlainSink | _GzipSink, columns: Mapping[str, Kind]) -> None:
        self._columns = dict(columns)
        self._encoder = ExampleEncoder(self._columns)
        self._sink = sink
        self._sizes = array("Q")
        self._finished = False

    @property
    def num_records(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of these records in the file; in gzip, only complete members count."""
        return self._sink.num_bytes

    def append(self, record: Record) -> None:
        refuse_finished(self._finished)
        pieces, length = self._encoder.encode(record)
        self._sink.add_record(frame(pieces, length), length + FRAMING_BYTES)
        self._sizes.append(length + FRAMING_BYTES)

    def append_block(self, columns: Block) -> None:
        refuse_finished(self._finished)
        for rows in buffers_of(columns, self._columns, self.append):
            packed, sizes = encode_block(rows, self._columns)
            self._sink.add_block(packed.data, sizes)
            self._sizes.frombytes(sizes.astype(np.uint64).tobytes())

    def finish(self) -> Offsets:
        refuse_finished(self._finished)
        self._finished = True
        return self._sink.finish(np.array(self._sizes, np.uint64))


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
        self._counts = array("Q")  # number of records in each complete member
        self._member_sizes = array("Q")  # size of each in the file

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
        data = b"".join(self._member)
        deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        # In one call: zlib's output does not depend on how the input is split, but this is not guaranteed.
        body = (deflate.compress(data), deflate.flush())
        member = b"".join((_HEADER, *body, _TRAILER.pack(zlib.crc32(data), len(data) & 0xFFFF_FFFF)))
        self._file.add([member])
        self._counts.append(self._member_records)
        self._member_sizes.append(len(member))
        self._member.clear()
        self._member_bytes = self._member_records = 0
