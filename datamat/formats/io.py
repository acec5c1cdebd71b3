"""Common code of formats: buffered files, records read by byte ranges, and guards against misuse."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, BinaryIO, TypeVar, final

import numpy as np

from datamat.errors import READ_FLAGS, CorruptDataError, OptionError, OutputError
from datamat.formats import Buffer, ShardReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from datamat.features import Features
    from datamat.features.base import Column
    from datamat.formats import RecordSpans


Found = TypeVar("Found")

# ---------------------------------------------------------------- guards
#
# Common errors, so that all formats use the same wording.


def bound(features: Features | None, name: str) -> Features:
    """Return the features of a format that stores them; raise `OptionError` if it has none yet."""
    if features is None:
        raise OptionError(
            f"the format {name!r} stores features, not columns; use get_format({name!r}).with_features(features)"
        )
    return features


def refuse_finished(finished: bool) -> None:
    """Raise `OptionError` if `finish` was called on a writer."""
    if finished:
        raise OptionError("finish was called on this writer; create another one for more records")


def located(error: Exception, path: str, number: int, offset: int) -> CorruptDataError:
    """Return an error that names the damaged record and the remedy."""
    return CorruptDataError(
        f"{path}: record {number} at byte {offset} is damaged: {error}; "
        f"remove the file and run the job again to rebuild it"
    )


# ---------------------------------------------------------------- ranges
#
# Single records, for formats in which the byte range in `Offsets` suffices.


_positions = threading.Lock()


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return some bytes of an open file; fewer if it ends before."""
    data = _read_once(descriptor, size, offset)
    if len(data) in {0, size}:
        return data
    pieces = [data]  # Linux reads at most 2 GiB at a time, and network file systems less
    while data and (missing := size - sum(map(len, pieces))):
        data = _read_once(descriptor, missing, offset + size - missing)
        pieces.append(data)
    return b"".join(pieces)


def _read_once(descriptor: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _positions:  # Windows: threads take turns, since they share the file position
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


@final
class RangeReader(ShardReader):
    """Reads each record by its place, so threads and forked children share neither a lock nor a file position.

    Args:
        path: path of the shard, which is opened at once and stays open until `close`.
        spans: lookup of the place of each record.
        read_record: function that decodes one record, given the bytes in its range and its position in them after
            decompression; it raises `CorruptDataError` if a checksum or anything else is wrong.
        read_intact: function that does so even if bytes around the record are damaged, or returns None; or None.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spans: RecordSpans,
        read_record: Callable[[Buffer, int], dict[str, Column]],
        read_intact: Callable[[Buffer, int], dict[str, Column] | None] | None = None,
    ) -> None:
        self._descriptor = -1
        self._path = os.fspath(path)
        self._spans = spans
        self._read_record = read_record
        self._read_intact = read_intact
        # Never wait for a writer of a FIFO; the caller has checked that the path is a regular file.
        self._descriptor = os.open(path, READ_FLAGS)
        self._num_bytes = os.fstat(self._descriptor).st_size

    def read(self, number: int) -> dict[str, Column]:
        return self._read(number, self._read_record)

    def read_intact(self, number: int) -> dict[str, Column] | None:
        with contextlib.suppress(CorruptDataError):
            return None if self._read_intact is None else self._read(number, self._read_intact)
        return None

    def _read(self, number: int, read_record: Callable[[Buffer, int], Found]) -> Found:
        offset, size, skip = self._spans.span(number)
        try:
            if offset + size > self._num_bytes:  # `pread` would allocate all of it before reading
                raise CorruptDataError(f"it should end at byte {offset + size}, but the file has {self._num_bytes}")
            return read_record(read_at(self._descriptor, size, offset), skip)
        except CorruptDataError as exc:
            raise located(exc, self._path, number, offset) from exc

    def spans(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return offset, size and skip of some records, int64 (n, 3), after checking that they are inside the file."""
        found = self._spans.spans(numbers)
        if len(found) and (found[:, 0] + found[:, 1]).max() > self._num_bytes:
            raise CorruptDataError(f"{self._path} is shorter than its index says")
        return found

    def read_range(self, offset: int, size: int) -> bytes:
        """Return some bytes of the file."""
        return read_at(self._descriptor, size, offset)

    def close(self, *, close_descriptor: Callable[[int], None] = os.close) -> None:
        # Bound as a default: at interpreter exit, `os` may be gone before the last reader.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close_descriptor(descriptor)


_GAP_BYTES = 4096  # reading this much in vain costs less than another call


def read_spans(
    readers: Sequence[ShardReader], which: NDArray[np.int64], numbers: NDArray[np.int64]
) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """Read the ranges of many records, in as few calls as sensible.

    Args:
        readers: readers of the shards, each a `RangeReader`.
        which: int64 (n,), the reader of each record.
        numbers: int64 (n,), the number of each record in its file.

    Returns:
        Bytes that contain the ranges; the start of each record's range in them, and its size, each int64 (n,). Records
        with the same range share it.

    Raises:
        CorruptDataError: a range is outside its file.
    """
    pieces: list[bytes] = []
    starts, of_record = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
    base = 0
    for place, reader in enumerate(readers):
        assert isinstance(reader, RangeReader), "the format makes them"
        mine = np.flatnonzero(which == place)
        if not len(mine):
            continue
        found = reader.spans(numbers[mine])
        of_record[mine] = found[:, 1]
        order = np.argsort(found[:, 0], kind="stable")
        begins = found[order, 0]
        ends = np.maximum.accumulate(begins + found[order, 1])
        cuts = np.flatnonzero(begins[1:] > ends[:-1] + _GAP_BYTES) + 1
        firsts = begins[np.concatenate([[0], cuts])]
        lasts = ends[np.concatenate([cuts, [len(ends)]]) - 1]
        sizes = lasts - firsts
        runs = zip(firsts.tolist(), sizes.tolist(), strict=True)
        pieces += [reader.read_range(first, size) for first, size in runs]
        run = np.searchsorted(firsts, found[:, 0], side="right") - 1
        starts[mine] = base + (np.cumsum(sizes) - sizes - firsts)[run] + found[:, 0]
        base += int(sizes.sum())
    data = b"".join(pieces) if len(pieces) != 1 else pieces[0]
    if len(data) != base:
        raise CorruptDataError("a file became shorter while it was read")
    return data, starts, of_record


# ---------------------------------------------------------------- buffered
#
# File access of formats: small writes are gathered, and claimed sizes allocate nothing.


BUFFER_BYTES = 1 << 18
_READ_BYTES = 16 << 20


@final
class BufferedFile:
    """Gathers pieces in a buffer of 256 KiB and writes it when full; larger pieces go to the file uncopied."""

    __slots__ = ("_buffer", "_file", "_used", "num_bytes")

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # One buffer for the life of the file: a new one for each write would cost a page fault per 4 KiB.
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._used = 0
        self.num_bytes = 0

    def add(self, pieces: Iterable[Buffer]) -> None:
        """Add pieces, without splitting them; write the buffer first if they do not fit."""
        for piece in pieces:
            size = len(piece)
            self.num_bytes += size
            if self._used + size > BUFFER_BYTES:
                self.flush()
                if size > BUFFER_BYTES:
                    write_all(self._file, memoryview(piece))
                    continue
            end = self._used + size
            self._buffer[self._used : end] = piece
            self._used = end

    def flush(self) -> None:
        """Write the buffer."""
        write_all(self._file, self._buffer[: self._used])
        self._used = 0


def write_all(file: BinaryIO, data: memoryview) -> None:
    """Write all of `data` to a file, which may be unbuffered and write less per call.

    Raises:
        OutputError: the file writes nothing, or does not return the number of bytes.
    """
    while data:
        taken = file.write(data)
        if not taken:
            raise OutputError(
                f"the file took {taken} of {len(data)} bytes; pass a blocking binary file whose write returns "
                f"the number of bytes written"
            )
        data = data[taken:]


def read_up_to(file: BinaryIO, size: int) -> bytes:
    """Return the next `size` bytes, or fewer at the end of the file; a wrong size allocates no memory."""
    data = file.read(min(size, _READ_BYTES))
    if len(data) == size or len(data) < _READ_BYTES:
        return data
    pieces, missing = [data], size - len(data)
    while missing and (data := file.read(min(missing, _READ_BYTES))):
        pieces.append(data)
        missing -= len(data)
    return b"".join(pieces)
