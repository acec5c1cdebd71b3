"""ArrayRecord shards: `tf.train.Example` records that grain and TFDS read in any order, without TensorFlow.

A part holds the records as TFRecord does. The shard is written by the package `array_record`: its blocks of 64 KiB and
the positions at its end depend on where a record lies, so parts cannot be joined byte for byte. Nothing is encoded
twice: the assembler passes payloads on, at about a gigabyte per second.

One record per group (`group_size:1`) gives random access. `uncompressed` makes the bytes the same on every machine, and
costs little: a single record hardly compresses, and images are compressed already.

    block of 65,536 bytes    header of 24 bytes | 65,512 bytes of chunks, which continue across blocks
    chunk of one record      header of 40 bytes | 0 | number of bytes of the length | length | the record

That is the record format of Riegeli (https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md)
with signature, chunks of single records, and a chunk of positions at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import os
from array import array
from typing import TYPE_CHECKING, Any, BinaryIO, final

import numpy as np

from datamat.errors import (
    READ_FLAGS,
    RESOURCES,
    CorruptDataError,
    MissingDependencyError,
    OutputError,
    want_of_resources,
)
from datamat.formats import Offsets, ShardAssembler, ShardFormat, ShardReader, ShardWriter
from datamat.formats.example import decode_example, varint
from datamat.formats.io import located
from datamat.formats.tfrecord import TFRecordFormat, read_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from datamat.features import Column, Kind
    from datamat.formats import RecordSpans


__all__ = ["ArrayRecordFormat"]

OUTPUT_VERSION = 1
"""Incremented when the same records give different bytes; shards of the format are then rebuilt."""

_OPTIONS = "group_size:1,uncompressed,max_parallelism:1"
_READ_OPTIONS = "max_parallelism:1"
_RECORDS_AT_ONCE = 64
_BLOCK_BYTES = 65_536
_BLOCK_HEADER_BYTES = 24
_CHUNK_HEADER_BYTES = 40
_FIRST_RECORD = 64  # after the header of the first block, and the signature, a chunk without data


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ArrayRecordFormat(ShardFormat):
    """ArrayRecord with one record per group: what grain and `tfds.data_source` open.

    Raises:
        MissingDependencyError: the package `array_record` is not installed.
    """

    name = "arrayrecord"
    extension = "array_record"
    joins_parts = False
    has_checksums = True
    packages = frozenset({"array_record"})

    def __post_init__(self) -> None:
        if importlib.util.find_spec("array_record") is None:
            raise MissingDependencyError(
                "the format 'arrayrecord' needs the package array-record, which is not installed; "
                "install it with: pip install 'datamat[arrayrecord]'"
            )

    def options(self) -> dict[str, str | int | float | bool | None]:
        """Return the options of the package's writer."""
        return {"writer": _OPTIONS}

    def writer(self, file: BinaryIO, columns: Mapping[str, Kind]) -> ShardWriter:
        """Return a writer of parts, which are TFRecords."""
        return TFRecordFormat().writer(file, columns)

    def assembler(self, path: str | os.PathLike[str]) -> ShardAssembler:
        """Return an assembler that passes the records of parts to the package's writer."""
        return _ArrayRecordAssembler(os.fspath(path))

    def reader(self, path: str | os.PathLike[str], spans: RecordSpans) -> ShardReader:
        """Return a reader that asks the package for records by number."""
        return _ArrayRecordReader(os.fspath(path), spans)

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Column], tuple[int, ...]]]:
        """Yield each record with offset and size of its chunk; the package opens the file again, by its name."""
        number, begin = 0, _FIRST_RECORD
        try:
            opened = _opened(os.fspath(file.name))
            num_records = opened.num_records()
            for start in range(0, num_records, _RECORDS_AT_ONCE):
                for payload in opened.read(start, min(start + _RECORDS_AT_ONCE, num_records)):
                    record, end = decode_example(payload), _end_of_chunk(begin, len(payload))
                    yield record, (begin, end - begin)
                    number, begin = number + 1, end
        except (CorruptDataError, RuntimeError) as exc:
            raise located(exc, path, number, begin) from exc


@final
class _ArrayRecordAssembler(ShardAssembler):
    """Passes payloads on and computes where each chunk lies."""

    __slots__ = ("_path", "_sizes", "_writer")

    def __init__(self, path: str) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        self._path = path
        self._writer = ArrayRecordWriter(path, _OPTIONS)
        self._sizes = array("Q")

    def add(self, part: str | os.PathLike[str]) -> None:
        """Append the records of the next part."""
        with open(part, "rb", buffering=1 << 20) as file:
            try:
                while (payload := read_payload(file)) is not None:
                    self._writer.write(payload)
                    self._sizes.append(len(payload))
            except CorruptDataError as exc:
                raise CorruptDataError(f"{part}: not complete ({exc}); remove it and run again") from exc

    def finish(self) -> Offsets:
        """Write positions and metadata, and return where the chunk of each record lies."""
        try:
            self._writer.close()
        except RuntimeError as exc:  # of any earlier call: the package reports its errors here
            raise OutputError(f"{self._path} could not be written: {exc}; make room or give another output") from exc
        ends = list(itertools.accumulate(self._sizes, _end_of_chunk, initial=_FIRST_RECORD))
        bounds = np.array(ends, np.uint64)
        return Offsets(bounds[:-1], np.diff(bounds))

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(RuntimeError):
            self._writer.close()


@final
class _ArrayRecordReader(ShardReader):
    """Reads through the package, which finds a record by the positions in the file and tests its hash."""

    __slots__ = ("_opened", "_path", "_process", "_spans")

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
        """Return one record."""
        try:
            if self._process != os.getpid():  # the threads of the package's reader do not survive a fork
                self._opened, self._process = _opened(self._path), os.getpid()
            return decode_example(self._opened.read([number])[0])
        except (CorruptDataError, OSError, RuntimeError) as exc:
            want = want_of_resources(self._path, exc)
            raise want or located(exc, self._path, number, self._spans.span(number)[0]) from exc

    def close(self, *, getpid: Callable[[], int] = os.getpid) -> None:
        """Close the file."""
        # Bound to the function: when the interpreter ends, `os` may be gone before the last reader is.
        if self._opened is not None and self._process == getpid():
            self._opened.close()


def _opened(path: str) -> Any:
    """Return the package's reader.

    Raises:
        OSError: the file cannot be opened.
        RuntimeError: the package cannot read the file; raised here, not by a later call.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    os.close(os.open(path, READ_FLAGS))  # its error gives the reason, and the package's does not
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


def _end_of_chunk(begin: int, size: int) -> int:
    """Return the end of a chunk that begins at `begin` and holds a record of `size` bytes; tests compare real files."""
    length = _CHUNK_HEADER_BYTES + 2 + len(varint(size)) + size
    usable = _BLOCK_BYTES - _BLOCK_HEADER_BYTES
    num_headers = (length + (begin + usable - 1) % _BLOCK_BYTES) // usable
    return begin + length + num_headers * _BLOCK_HEADER_BYTES
