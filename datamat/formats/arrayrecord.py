"""ArrayRecord shards: `tf.train.Example` records that grain and TFDS read in any order, without TensorFlow.

The record format is that of Riegeli (https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md),
with a chunk of positions and one that points to it at the end of the file
(https://github.com/google/array_record/blob/main/cpp/layout.proto):

    block of 65,536 bytes    header of 24 bytes | 65,512 bytes of chunks, which continue across blocks
    chunk of one record      header of 40 bytes | 0 | number of bytes of the length | length | the record
    package's file           signature | chunk of one record ... | positions | padding to a block || block: their place

Headers of blocks and chunks contain distances, not positions, and a signature may be at the start of any block. So
files that end with a block can be joined byte for byte. A worker lets the package `array_record` write the records of a
part into files in memory, of some megabytes each, and writes these to the shard without their last block:

    shard    package's file without its last block ... || positions of all records | padding || block: their place
             └── a part ──┘                               └── trailer ──┘

Readers begin at the end, and so never see the positions in the middle. The package also writes the chunks of the
trailer, since positions are records to it. So datamat computes none of the hashes of chunks and blocks.

One record per group (`group_size:1`) gives random access. `uncompressed` makes the bytes the same on every machine, and
costs little: a single record hardly compresses, and images are compressed already.
"""

from __future__ import annotations

import importlib.util
import io
import mmap
import os
import struct
import tempfile
from array import array
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, final

import numpy as np

from datamat.errors import (
    READ_FLAGS,
    RESOURCES,
    CorruptDataError,
    MissingDependencyError,
    OutputError,
    want_of_resources,
)
from datamat.formats import Offsets, ShardFormat, ShardReader, ShardWriter
from datamat.formats.example import (
    ExampleEncoder,
    buffers_of,
    decode_block,
    decode_example,
    encode_examples,
    varint,
)
from datamat.formats.io import located, refuse_finished, write_all
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from datamat.features.base import Column, ColumnBlock, Kind
    from datamat.formats import Block, Record, RecordSpans


OUTPUT_VERSION = 2
"""Incremented when the same records give different bytes; then shards of the format are rebuilt."""

_OPTIONS = "group_size:1,uncompressed,max_parallelism:1"
_PADDED_OPTIONS = "uncompressed,max_parallelism:1,pad_to_block_boundary:true"
_READ_OPTIONS = "max_parallelism:1"
_RECORDS_AT_ONCE = 64
_BLOCK_BYTES = 65_536
_BLOCK_HEADER_BYTES = 24
_USABLE_BYTES = _BLOCK_BYTES - _BLOCK_HEADER_BYTES
_CHUNK_HEADER = struct.Struct("<8xQ8xQQ")  # hash | bytes of data | hash of data | type, number of records << 8 | bytes
_TYPES = frozenset(b"mprst")  # metadata, padding, records, signature, transposed records
_FILE_BYTES = 8 << 20  # of records in one of the package's files in memory
_MAGIC = 0x71930E704FDAE05E  # ends each file; cpp/array_record_writer.cc
_METADATA_OPTIONS = b"group_size:1,transpose:false,pad_to_block_boundary:false,uncompressed,max_parallelism:1"


@final
@frozen()
class ArrayRecordFormat(ShardFormat):
    """ArrayRecord with one record per group, for grain and `tfds.data_source`.

    Raises:
        MissingDependencyError: the package `array_record` is not installed.
    """

    name = "arrayrecord"
    extension = "array_record"
    joins_parts = True
    has_checksums = True
    gains_from_threads = False
    padding_bytes = _BLOCK_BYTES
    packages = frozenset({"array_record"})

    def __post_init__(self) -> None:
        if importlib.util.find_spec("array_record") is None:
            raise MissingDependencyError(
                "the format 'arrayrecord' needs the package array-record, which is not installed; "
                "install it with: pip install 'datamat[arrayrecord]'"
            )

    def options(self) -> dict[str, str | int | float | bool | None]:
        return {"writer": _OPTIONS}

    def writer(self, file: BinaryIO, columns: Mapping[str, Kind]) -> ShardWriter:
        return _ArrayRecordWriter(file, columns)

    def trailer(self, file: BinaryIO, parts: Sequence[tuple[int, int]]) -> bytes:
        """Return the positions of all records, from the headers of their chunks, and the final block."""
        footer = [b""]
        for start, size in parts:
            for chunk in _chunks(file, start, start + size):
                if chunk.is_record:
                    footer.append(_message((1, chunk.begin), (2, chunk.num_bytes), (3, 1)))
        count = len(footer) - 1
        metadata = _message((1, 1), (2, count), (3, count)) + _field(4, _METADATA_OPTIONS)
        footer[0] = _field(1, metadata)
        end = sum(parts[-1])
        positions = _packed(footer, f"group_size:{len(footer)},{_PADDED_OPTIONS}")[: -2 * _BLOCK_BYTES]
        last = [_message((1, end + _placed(_CHUNK_HEADER.size)), (2, _MAGIC))] * 3
        # After another chunk, so that it is at the start of a block, as the package expects.
        return positions + _packed(last * 2, f"group_size:3,{_PADDED_OPTIONS}")[_BLOCK_BYTES : 2 * _BLOCK_BYTES]

    def reader(self, path: str | os.PathLike[str], spans: RecordSpans) -> ShardReader:
        return _ArrayRecordReader(os.fspath(path), spans)

    def read_block(
        self,
        readers: Sequence[ShardReader],
        which: NDArray[np.int64],
        numbers: NDArray[np.int64],
        kinds: Mapping[str, Kind],
    ) -> Mapping[str, ColumnBlock] | None:
        payloads = np.empty(len(numbers), object)
        try:
            for place in np.unique(which).tolist():
                reader, mine = readers[place], which == place
                assert isinstance(reader, _ArrayRecordReader), "the format's own"
                payloads[mine] = reader.read_payloads(numbers[mine].tolist())
        except (OSError, RuntimeError):
            return None
        stops = np.cumsum(np.fromiter(map(len, payloads), np.int64, len(payloads)))
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])
        return decode_block(b"".join(payloads), starts, stops, kinds)

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Column], tuple[int, ...]]]:
        """Yield each record with offset and size of its chunk; the package reopens the file by name."""
        number, begin = 0, 0
        try:
            opened = _opened(os.fspath(file.name))
            num_records = opened.num_records()
            chunks = (chunk for chunk in _chunks(file, 0, file.seek(0, io.SEEK_END)) if chunk.is_record)
            for start in range(0, num_records, _RECORDS_AT_ONCE):
                for payload in opened.read(start, min(start + _RECORDS_AT_ONCE, num_records)):
                    chunk = next(chunks, None)
                    if chunk is None or chunk.num_bytes != len(payload):
                        raise CorruptDataError(
                            f"the chunk has {chunk and chunk.num_bytes} bytes, but the package reads {len(payload)}"
                        )
                    begin = chunk.begin
                    yield decode_example(payload), (begin, chunk.end - begin)
                    number, begin = number + 1, chunk.end
        except (CorruptDataError, RuntimeError) as exc:
            raise located(exc, path, number, begin) from exc


@final
class _ArrayRecordWriter(ShardWriter):
    """Passes encoded records to the package's writer, and computes the places of their chunks."""

    def __init__(self, file: BinaryIO, columns: Mapping[str, Kind]) -> None:
        self._columns = dict(columns)
        self._encoder = ExampleEncoder(self._columns)
        self._file = file
        self._packed: _PackedFile | None = None
        self._end = 0  # of the file so far
        self._lengths = array("Q")  # of the chunks in the package's file, without headers of blocks
        self._held = 0  # their sum
        self._begins: list[NDArray[np.uint64]] = []
        self._sizes: list[NDArray[np.uint64]] = []
        self._finished = False

    @property
    def num_records(self) -> int:
        return sum(map(len, self._sizes)) + len(self._lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of these records in the file, without the positions that follow those in memory."""
        return self._end + (_placed(_CHUNK_HEADER.size + self._held) if self._held else 0)

    def append(self, record: Record) -> None:
        refuse_finished(self._finished)
        pieces, _ = self._encoder.encode(record)
        self._add(b"".join(pieces))

    def append_block(self, columns: Block) -> None:
        refuse_finished(self._finished)
        for rows in buffers_of(columns, self._columns, self.append):
            for payload in encode_examples(rows, self._columns):
                self._add(payload)

    def finish(self) -> Offsets:
        refuse_finished(self._finished)
        self._finished = True
        self._write()
        none = np.empty(0, np.uint64)
        return Offsets(np.concatenate([none, *self._begins]), np.concatenate([none, *self._sizes]))

    def _add(self, payload: bytes) -> None:
        if self._packed is None:
            self._packed = _PackedFile(_OPTIONS)
        self._packed.write(payload)
        length = _CHUNK_HEADER.size + 2 + len(varint(len(payload))) + len(payload)
        self._lengths.append(length)
        self._held += length
        if self._held >= _FILE_BYTES:
            self._write()

    def _write(self) -> None:
        if self._packed is None:
            return
        kept = memoryview(self._packed.finish())[:-_BLOCK_BYTES]
        write_all(self._file, kept)
        ends = np.cumsum(np.array([_CHUNK_HEADER.size, *self._lengths], np.uint64))
        bounds = _placed(ends) + np.uint64(self._end)
        self._begins.append(bounds[:-1])
        self._sizes.append(np.diff(bounds))
        self._packed, self._held, self._lengths = None, 0, array("Q")
        self._end += len(kept)


@final
class _PackedFile:
    """A file in memory that the package writes."""

    __slots__ = ("_file", "_writer")

    def __init__(self, options: str) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        # The package opens files only by name; memory has names only on Linux.
        if hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("datamat"), "rb", buffering=0)
            name = f"/proc/self/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile(suffix=".array_record")  # noqa: SIM115 -- `finish` closes it
            name = self._file.name
        self._writer = ArrayRecordWriter(name, options)

    def write(self, payload: bytes) -> None:
        self._writer.write(payload)

    def finish(self) -> mmap.mmap:
        try:
            self._writer.close()
        except RuntimeError as exc:  # the package reports errors of earlier calls here
            raise OutputError(
                f"records could not be packed in memory: {exc}; make room, or write fewer at a time"
            ) from exc
        with self._file as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # of an abandoned part
            self._file.close()


@final
class _ArrayRecordReader(ShardReader):
    """Reads through the package, which finds records by the positions in the file and tests their hashes."""

    def __init__(self, path: str, spans: RecordSpans) -> None:
        self._opened: Any = None
        self._path = path
        self._spans = spans
        self._process = os.getpid()
        try:
            self._opened = _opened(path)
        except RuntimeError as exc:
            raise CorruptDataError(f"{path}: {exc}; remove the file and run the job again to rebuild it") from exc

    def read(self, number: int) -> dict[str, Column]:
        try:
            return decode_example(self.read_payloads([number])[0])
        except (CorruptDataError, OSError, RuntimeError) as exc:
            want = want_of_resources(self._path, exc)
            raise want or located(exc, self._path, number, self._spans.span(number)[0]) from exc

    def read_payloads(self, numbers: list[int]) -> list[bytes]:
        """Return encoded records by number, after testing the hash of each.

        Raises:
            OSError, RuntimeError: the package cannot read one of them.
        """
        if self._process != os.getpid():  # the threads of the package's reader do not survive a fork
            self._opened, self._process = _opened(self._path), os.getpid()
        found: list[bytes] = self._opened.read(numbers)
        return found

    def close(self, *, getpid: Callable[[], int] = os.getpid) -> None:
        # Bound as a default: at interpreter exit, `os` may be gone before the last reader.
        if self._opened is not None and self._process == getpid():
            self._opened.close()


def _opened(path: str) -> Any:
    """Return the package's reader.

    Raises:
        OSError: the file cannot be opened.
        RuntimeError: the package cannot read the file; raised here, not by a later call.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    os.close(os.open(path, READ_FLAGS))  # its error gives the reason, unlike the package's
    opened = ArrayRecordReader(path, _READ_OPTIONS)
    if not opened.ok():
        try:
            opened.close()
        except RuntimeError as exc:
            for code in RESOURCES:  # another thread took the last descriptor in the meantime
                if os.strerror(code) in str(exc):
                    raise OSError(code, os.strerror(code), path) from exc
            raise
    return opened


class _FoundChunk(NamedTuple):
    """The content of a chunk's header."""

    begin: int
    end: int
    is_record: bool
    num_bytes: int


def _chunks(file: BinaryIO, begin: int, stop: int) -> Iterator[_FoundChunk]:
    """Yield the chunks between two positions, the first of which is the start of a block.

    Raises:
        CorruptDataError: there is no chunk where one should begin, or it ends after `stop`.
    """
    while begin < stop:
        file.seek(begin)
        found = file.read(_CHUNK_HEADER.size + _BLOCK_HEADER_BYTES)
        to_block = -begin % _BLOCK_BYTES
        if to_block < _CHUNK_HEADER.size:  # the header of a block interrupts that of the chunk
            found = found[:to_block] + found[to_block + _BLOCK_HEADER_BYTES :]
        if len(found) < _CHUNK_HEADER.size:
            raise CorruptDataError(f"the data ends inside the header of a chunk, at byte {begin}")
        num_bytes, type_and_count, decoded_bytes = _CHUNK_HEADER.unpack_from(found)
        end = _placed(_unplaced(begin) + _CHUNK_HEADER.size + num_bytes)
        if type_and_count & 255 not in _TYPES or end > stop:
            raise CorruptDataError(f"byte {begin} is not the start of a chunk that ends before byte {stop}")
        # Positions are records to Riegeli, too, but one more than those before them.
        yield _FoundChunk(begin, end, type_and_count == 1 << 8 | ord("r"), decoded_bytes)
        begin = end


def _placed(size: Any) -> Any:
    """Return the end of `size` bytes that begin with a block and are interrupted by block headers."""
    return size + (size + _USABLE_BYTES - 1) // _USABLE_BYTES * _BLOCK_HEADER_BYTES


def _unplaced(end: int) -> int:
    """Return the number of bytes before an end, without block headers: the inverse of `_placed`."""
    return end - (end + _BLOCK_BYTES - 1) // _BLOCK_BYTES * _BLOCK_HEADER_BYTES


def _packed(records: Iterable[bytes], options: str) -> bytes:
    """Return the package's file of these records."""
    packed = _PackedFile(options)
    for record in records:
        packed.write(record)
    with packed.finish() as data:
        return data[:]


def _message(*fields: tuple[int, int]) -> bytes:
    """Return a message of integers in protobuf's wire format (https://protobuf.dev/programming-guides/encoding)."""
    return b"".join(varint(number << 3) + varint(value) for number, value in fields)


def _field(number: int, value: bytes) -> bytes:
    """Return a field of bytes in the same format."""
    return varint(number << 3 | 2) + varint(len(value)) + value
