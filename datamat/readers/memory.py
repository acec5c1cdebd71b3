"""The memory of batches, used again once nobody holds it: fresh pages cost a tenth of decoding into them."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any, final

import numpy as np

__all__ = ["MemoryPool"]

_LEAST_BYTES = 1 << 20  # of smaller arrays, the allocator keeps the pages by itself
_REFERENCES_OF_FREE = 3  # the pool's list, the name it is looked at by, and the argument of getrefcount


@final
class MemoryPool:
    """Allocates arrays in memory of earlier ones that are gone. Thread-safe.

    Every view, tensor or buffer on an array keeps a reference to the memory below it. When the pool's own is the only
    one left, nobody can tell that the memory is used again.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._lock = threading.Lock()

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array of any content."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return np.empty(shape, dtype)
        with self._lock:
            return self._block(num_bytes).view(dtype).reshape(shape)

    def _block(self, num_bytes: int) -> np.ndarray:
        for block in self._blocks:
            if block.nbytes == num_bytes and sys.getrefcount(block) == _REFERENCES_OF_FREE:
                return block
        # What is free and of another size is let go, so that memory does not grow with the variety of sizes.
        self._blocks = [block for block in self._blocks if sys.getrefcount(block) > _REFERENCES_OF_FREE]
        self._blocks.append(np.empty(num_bytes, np.uint8))
        return self._blocks[-1]
