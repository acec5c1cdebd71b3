"""Single records of files where the range of bytes in `Offsets` is all that a record needs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol, final

from datamat.errors import CorruptDataError
from datamat.formats import Buffer, ShardReader, Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from datamat.formats import Places

__all__ = ["RangeReader"]


class ReadRecord(Protocol):
    """Decodes the one record that a line of `Offsets` points to, and tests its checksums."""

    def __call__(self, buffer: Buffer, *, skip: int, path: str, number: int, offset: int) -> dict[str, Value]:
        """Return the record.

        Args:
            buffer: the `size` bytes at `offset` of the file.
            skip: the record's `skip`, 0 where there is none.
            path: the file, for messages only.
            number: the record's place in the file, from 0, for messages only.
            offset: where the buffer lies in the file, for messages only.

        Raises:
            CorruptDataError: names path, record, byte and what is wrong.
        """


@final
class RangeReader(ShardReader):
    """Reads each record with one `pread`, which needs no lock and no position that threads or forks would share.

    Args:
        path: the file.
        places: where its records lie.
        read_record: decodes one.
    """

    __slots__ = ("_descriptor", "_num_bytes", "_path", "_places", "_read_record")

    def __init__(self, path: str | os.PathLike[str], places: Places, read_record: ReadRecord) -> None:
        self._descriptor = -1
        self._path = os.fspath(path)
        self._places = places
        self._read_record = read_record
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._num_bytes = os.fstat(self._descriptor).st_size

    def read(self, number: int) -> dict[str, Value]:
        """Return one record."""
        offset, size, skip = self._places.place(number)
        if offset + size > self._num_bytes:  # never asked for: `pread` takes that memory before it reads
            raise CorruptDataError(
                f"{self._path}: record {number} at byte {offset} is damaged: it should end at byte {offset + size}, "
                f"but the file has {self._num_bytes}; remove the file and run the job again, which makes it anew"
            )
        data = os.pread(self._descriptor, size, offset)
        return self._read_record(data, skip=skip, path=self._path, number=number, offset=offset)

    def close(self, *, close_descriptor: Callable[[int], None] = os.close) -> None:
        """Close the file."""
        # Bound to the function: when the interpreter ends, `os` may be gone before the last reader is.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close_descriptor(descriptor)
