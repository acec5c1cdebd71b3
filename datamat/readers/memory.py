"""Memory that is used again: fresh pages cost a tenth of decoding into them."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
from typing import Any, final

import numpy as np

__all__ = ["MemoryPool", "keep_freed_pages", "keep_freed_pages_again"]

_LEAST_BYTES = 1 << 20  # of smaller arrays, the allocator keeps the pages by itself
_KEPT_BYTES = 8 << 20  # several times what decoding a picture of a megapixel needs; larger batches get huge pages
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3), in glibc's malloc.h
_ALIGNMENT = 64  # bytes; what TensorFlow wants (EIGEN_MAX_ALIGN_BYTES), or it copies
_REFERENCES_OF_FREE = 2  # the pool's list, and the argument of getrefcount


@functools.cache
def keep_freed_pages() -> None:
    """Have the C library keep a few megabytes of freed memory for what is asked for next, from now on.

    glibc gives the top of a heap back to the system from 128 KiB on, and takes larger blocks from it one by one: with
    two decoding threads, page faults and their locks took 6 % of the time. It raises both limits by itself to the size
    of what is freed (mallopt(3), M_MMAP_THRESHOLD), so one large block, which is never touched, is freed here. Other
    C libraries are not impressed.
    """
    np.empty(_KEPT_BYTES, np.uint8)


def keep_freed_pages_again() -> None:
    """Have the C library keep them although TensorFlow forbade it.

    Each generator of `tf.data` sets the limit to 128 KiB (generator_dataset_op.cc: "Memory patch applied"), and with
    that, glibc does not raise it any more. Decoding pictures in the generator then took 1.6 times as long.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BYTES)


@functools.cache
def _mallopt() -> Any:
    """Return the function of the C library, or None where it has none."""
    try:
        return ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return None


@final
class MemoryPool:
    """Allocates arrays in memory of earlier ones that are gone. Thread-safe; a copy in another process has its own.

    Every view, tensor or buffer on an array keeps a reference to the memory below it. When the pool's own is the only
    one left, nobody can tell that the memory is used again.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array of any content."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return np.empty(shape, dtype)
        with self._lock:
            block = np.empty(num_bytes + _ALIGNMENT, np.uint8) if self._is_closed else self._block(num_bytes)
        start = -block.ctypes.data % _ALIGNMENT
        return block[start : start + num_bytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Let go of the memory that is not in use, and keep none from now on: allocation goes on without it."""
        with self._lock:
            self._blocks, self._is_closed = [], True

    def __reduce__(self) -> tuple[type[MemoryPool], tuple[()]]:
        return MemoryPool, ()

    def _block(self, num_bytes: int) -> np.ndarray:
        blocks = self._blocks  # counted by number: a loop over them would hold a reference more
        free = [number for number in range(len(blocks)) if sys.getrefcount(blocks[number]) == _REFERENCES_OF_FREE]
        for number in free:
            if blocks[number].nbytes == num_bytes + _ALIGNMENT:
                return blocks[number]
        # What is free and of another size is let go, so that memory does not grow with the variety of sizes.
        self._blocks = [block for number, block in enumerate(blocks) if number not in free]
        self._blocks.append(np.empty(num_bytes + _ALIGNMENT, np.uint8))
        return self._blocks[-1]
