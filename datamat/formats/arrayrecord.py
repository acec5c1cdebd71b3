"""ArrayRecord shards: `tf.train.Example` records that grain and TFDS read in any order, without TensorFlow.

A part holds the records as TFRecord does. The shard is written by the package `array_record`: its blocks of 64 KiB and
the positions at its end depend on where a record lies, so parts can't be joined byte for byte. Nothing is encoded
twice: the assembler hands over payloads, at about a gigabyte per second.

One record per group (`group_size:1`) is what gives random access, and `uncompressed` what makes the bytes the same
wherever they are written: one record by itself hardly compresses, and pictures are compressed already.

    block of 65,536 bytes    header of 24 bytes | 65,512 bytes of chunks, which go on across blocks
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

from datamat.errors import RESOURCES, CorruptDataError, MissingDependencyError, OutputError, want_of_resources
from datamat.formats import Offsets, ShardAssembler, ShardFormat, ShardReader, ShardWriter, Value
from datamat.formats.example import decode_example
from datamat.formats.framing import read_payload
from datamat.formats.guards import located
from datamat.formats.tfrecord import TFRecordFormat
from datamat.formats.wire import varint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from datamat.formats import ColumnKind, Places

__all__ = ["ArrayRecordFormat"]

_OPTIONS = "group_size:1,uncompressed,max_parallelism:1"
_READ_OPTIONS = "max_parallelism:1"
_RECORDS_AT_ONCE = 64
_BLOCK_BYTES = 65_536
_BLOCK_HEADER_BYTES = 24
_CHUNK_HEADER_BYTES = 40
_FIRST_RECORD = 64  # behind the header of the first block and the signature, a chunk without data


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

    def __post_init__(self) -> None:
        if importlib.util.find_spec("array_record") is None:
            raise MissingDependencyError(
                "the format 'arrayrecord' needs the package array-record, which is not installed; "
                "install it with: pip install 'datamat[arrayrecord]'"
            )

    def options(self) -> dict[str, str | int | float | bool | None]:
        """Return the options of the package's writer."""
        return {"writer": _OPTIONS}

    def writer(self, file: BinaryIO, columns: Mapping[str, ColumnKind]) -> ShardWriter:
        """Return a writer of parts, which are TFRecords."""
        return TFRecordFormat().writer(file, columns)

    def assembler(self, path: str | os.PathLike[str]) -> ShardAssembler:
        """Return what hands the records of parts to the package's writer."""
        return _Assembler(os.fspath(path))

    def reader(self, path: str | os.PathLike[str], places: Places) -> ShardReader:
        """Return a reader that asks the package for records by number."""
        return _Reader(os.fspath(path), places)

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Value], tuple[int, ...]]]:
        """Yield each record with the begin and the size of its chunk; the package opens the file anew by its name."""
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
class _Assembler(ShardAssembler):
    """Hands payloads over and counts where they go."""

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
                raise CorruptDataError(f"{part}: not whole ({exc}); remove it and run again") from exc

    def finish(self) -> Offsets:
        """Write positions and metadata, and return the chunk of each record."""
        try:
            self._writer.close()
        except RuntimeError as exc:  # of any call before: the package keeps its errors until here
            raise OutputError(f"{self._path} could not be written: {exc}; make room or give another output") from exc
        ends = list(itertools.accumulate(self._sizes, _end_of_chunk, initial=_FIRST_RECORD))
        bounds = np.array(ends, np.uint64)
        return Offsets(bounds[:-1], np.diff(bounds))

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(RuntimeError):
            self._writer.close()


@final
class _Reader(ShardReader):
    """Asks the package, which finds a record by the positions in the file and tests its hash."""

    __slots__ = ("_opened", "_path", "_places", "_process")

    def __init__(self, path: str, places: Places) -> None:
        self._opened: Any = None
        self._path = path
        self._places = places
        self._process = os.getpid()
        try:
            self._opened = _opened(path)
        except RuntimeError as exc:
            raise CorruptDataError(
                f"{path}: {exc}; remove the file and run the job again, which makes it anew"
            ) from exc

    def read(self, number: int) -> dict[str, Value]:
        """Return one record."""
        try:
            if self._process != os.getpid():  # the threads of the package's reader did not come through the fork
                self._opened, self._process = _opened(self._path), os.getpid()
            return decode_example(self._opened.read([number])[0])
        except (CorruptDataError, OSError, RuntimeError) as exc:
            want = want_of_resources(self._path, exc)
            raise want or located(exc, self._path, number, self._places.place(number)[0]) from exc

    def close(self, *, getpid: Callable[[], int] = os.getpid) -> None:
        """Close the file."""
        # Bound to the function: when the interpreter ends, `os` may be gone before the last reader is.
        if self._opened is not None and self._process == getpid():
            self._opened.close()


def _opened(path: str) -> Any:
    """Return the package's reader.

    Raises:
        OSError: the file cannot be opened.
        RuntimeError: what the package says against it, at once and not in later calls.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # its error says why, and the package's does not
    opened = ArrayRecordReader(path, _READ_OPTIONS)
    if not opened.ok():
        try:
            opened.close()
        except RuntimeError as exc:
            for code in RESOURCES:  # another thread took what was free a moment ago
                if os.strerror(code) in str(exc):
                    raise OSError(code, os.strerror(code), path) from exc
            raise
    return opened


def _end_of_chunk(begin: int, size: int) -> int:
    """Return where the chunk of a record of `size` bytes ends that begins at `begin`; tests compare with real files."""
    length = _CHUNK_HEADER_BYTES + 2 + len(varint(size)) + size
    usable = _BLOCK_BYTES - _BLOCK_HEADER_BYTES
    num_headers = (length + (begin + usable - 1) % _BLOCK_BYTES) // usable
    return begin + length + num_headers * _BLOCK_HEADER_BYTES
