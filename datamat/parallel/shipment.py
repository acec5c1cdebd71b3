"""A pickled callable on its way: its stream, and its large buffers, written once for all workers.

Arrays that `self` holds do not go through the sockets. Their bytes are copied once, at the moment of pickling, into
anonymous memory (memfd_create(2)), which each worker maps privately: pages are shared until a worker writes to them.
The copy is also the snapshot that later tells whether the arrays have changed since.

    packed = number of buffers (uint32), length of the path (uint32), lengths of stream and buffers (uint64 each),
             path, stream, and, where the path is empty, the buffers
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pickle import PickleBuffer

__all__ = ["Shipment", "unpack"]

_COUNTS = struct.Struct("<II")
_LARGE_BYTES = 1 << 20  # below this, mapping costs more than copying


class Shipment:
    """What is sent of a callable, as it was when this was made.

    Args:
        stream: the pickle.
        buffers: large buffers beside it.
    """

    def __init__(self, stream: bytes, buffers: Sequence[PickleBuffer]) -> None:
        views = [buffer.raw() for buffer in buffers]
        self._memory: _Memory | None = None
        if sum(view.nbytes for view in views) >= _LARGE_BYTES and hasattr(os, "memfd_create"):
            self._memory = _Memory(views)
        path = b"" if self._memory is None else self._memory.path.encode()
        lengths = struct.pack(f"<{len(views) + 1}Q", len(stream), *(view.nbytes for view in views))
        inline = [] if path else views
        self.packed = b"".join((_COUNTS.pack(len(views), len(path)), lengths, path, stream, *inline))
        self._stream = stream

    def is_same_as(self, stream: bytes, buffers: Sequence[PickleBuffer]) -> bool:
        """Would a shipment of these be the same?"""
        if stream != self._stream:
            return False
        if self._memory is None:
            return Shipment(stream, buffers).packed == self.packed
        return self._memory.holds([buffer.raw() for buffer in buffers])


class _Memory:
    """Anonymous memory that lives as long as this object, or a mapping of it."""

    def __init__(self, views: list[memoryview]) -> None:
        self._descriptor = os.memfd_create("datamat", os.MFD_CLOEXEC)
        self._owner = os.getpid()
        self.path = f"/proc/{self._owner}/fd/{self._descriptor}"
        for view in views:
            rest = view
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def holds(self, views: list[memoryview]) -> bool:
        """Are these its bytes?"""
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as held, memoryview(held) as content:
            start = 0
            for view in views:
                if content[start : start + view.nbytes] != view:
                    return False
                start += view.nbytes
            return start == len(content)

    def __del__(self) -> None:
        if os.getpid() == self._owner:  # in a fork the number may be another file by now
            os.close(self._descriptor)


def unpack(packed: memoryview) -> tuple[bytes, list[memoryview]]:
    """Return stream and buffers of a shipment; the buffers are writable, and private to this process."""
    num_buffers, path_length = _COUNTS.unpack_from(packed)
    lengths = struct.unpack_from(f"<{num_buffers + 1}Q", packed, _COUNTS.size)
    start = _COUNTS.size + 8 * (num_buffers + 1)
    path = bytes(packed[start : start + path_length]).decode()
    start += path_length
    stream = bytes(packed[start : start + lengths[0]])
    if path:
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    else:
        content = memoryview(bytearray(packed[start + lengths[0] :]))
    buffers = []
    start = 0
    for length in lengths[1:]:
        buffers.append(content[start : start + length])
        start += length
    return stream, buffers
