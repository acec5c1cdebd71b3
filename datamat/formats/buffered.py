"""What formats write and read files through: small pieces are gathered, and claims of size are not believed."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, final

from datamat.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from datamat.formats import Buffer

__all__ = ["BUFFER_BYTES", "BufferedFile", "read_up_to"]

BUFFER_BYTES = 1 << 18
_READ_BYTES = 16 << 20


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
        """Take pieces, each whole; what does not fit with those before is written."""
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
        """Write what is gathered."""
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


def read_up_to(file: BinaryIO, size: int) -> bytes:
    """Return the next `size` bytes, or all that there are: one that claims gigabytes takes no memory by itself."""
    data = file.read(min(size, _READ_BYTES))
    if len(data) == size or len(data) < _READ_BYTES:
        return data
    pieces, missing = [data], size - len(data)
    while missing and (data := file.read(min(missing, _READ_BYTES))):
        pieces.append(data)
        missing -= len(data)
    return b"".join(pieces)
