"""Small pieces gathered before they are written: what writers of formats write through."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, final

from datamat.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from datamat.formats import Buffer

__all__ = ["BUFFER_BYTES", "BufferedFile"]

BUFFER_BYTES = 1 << 18


@final
class BufferedFile:
    """Gathers pieces in one buffer of 256 KiB, which is written when full; larger pieces go to the file uncopied."""

    __slots__ = ("_buffer", "_file", "_used", "num_bytes")

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # One buffer for good: a fresh one for each write would cost a page fault per 4 KiB.
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._used = 0
        self.num_bytes = 0

    def add(self, pieces: Iterable[Buffer]) -> None:
        for piece in pieces:
            size = len(piece)
            self.num_bytes += size
            if self._used + size > BUFFER_BYTES:
                self.flush()
                if size > BUFFER_BYTES:
                    self._write(memoryview(piece))
                    continue
            end = self._used + size
            self._buffer[self._used : end] = piece
            self._used = end

    def flush(self) -> None:
        self._write(self._buffer[: self._used])
        self._used = 0

    def _write(self, data: memoryview) -> None:
        while data:  # an unbuffered file may take less than it is given
            taken = self._file.write(data)
            if not taken:
                raise OutputError(
                    f"the file took {taken} of {len(data)} bytes; pass a blocking binary file whose write returns "
                    f"the number of bytes written"
                )
            data = data[taken:]
