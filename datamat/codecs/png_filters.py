"""Undoing the filters of PNG scanlines: the sums that libspng makes pixel by pixel, made for the whole picture at once.

Filter 1 (sub) stores each byte as its difference from the pixel to its left, filter 2 (up) from the one above. cv2
writes nothing but the first, `encode` nothing but the second. Undone, a pixel is the sum of what is stored in its row,
or in its column, up to it, modulo 256. In a table of the sums of all rectangles at the corner (Crow, 1984), which
OpenCV makes with SIMD, that is the difference of two neighbours. On masks of 480 x 360 this takes a sixth of libspng's
time, on RGB half, and it is three calls, during which other threads may decode. Files that mix these filters, or take
others, are left to libraries.

Format: Portable Network Graphics (Third Edition), section 9.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from datamat.codecs.opencv import corner_sums_with_cv2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from datamat.codecs.info import Pixels

__all__ = ["undo_uniform_filters"]

_NONE, _SUB, _UP = 0, 1, 2
_STRIP_BYTES = 1 << 20  # of scanlines at a time: their sums take four times the memory
_MOST_IN_LINE = (1 << 31) // 255 - 1  # pixels in a row or column whose sum fits 32 bits


def undo_uniform_filters(filtered: Pixels, channels: int, out: Pixels | None = None) -> Pixels | None:
    """Return the pixels of scanlines that use filters 0 and 1 only, or 2 only; else None.

    Args:
        filtered: uint8 (height, 1 + width * channels), the filter type first in each row.
        channels: bytes of a pixel.
        out: uint8 (height, width, channels), C-contiguous, to put them into; else it is made.

    Example:
        >>> undo_uniform_filters(np.array([[0, 1, 2, 3], [1, 1, 2, 3]], np.uint8), 1)[..., 0].tolist()
        [[1, 2, 3], [1, 3, 6]]
    """
    kinds = filtered[:, 0]
    lowest, highest = int(kinds.min()), int(kinds.max())
    stored = filtered[:, 1:].reshape(len(filtered), -1, channels)
    height, width = stored.shape[:2]
    if (highest > _SUB and not lowest == highest == _UP) or max(height, width) > _MOST_IN_LINE:
        return None
    pixels = np.empty(stored.shape, np.uint8) if out is None else out
    if highest == _NONE:
        pixels[...] = stored
    elif highest == _UP:
        for strip in _strips(width, height * channels):
            sums = _corner_sums(stored[:, strip])
            np.subtract(sums[1:, 1:], sums[1:, :-1], out=pixels[:, strip])
    else:
        for strip in _strips(height, width * channels):
            sums = _corner_sums(stored[strip])
            np.subtract(sums[1:, 1:], sums[:-1, 1:], out=pixels[strip])
        if lowest == _NONE:
            plain = np.flatnonzero(kinds == _NONE)
            pixels[plain] = stored[plain]
    return pixels


def _strips(num: int, item_bytes: int) -> Iterator[slice]:
    """Yield slices that together are all of `num` rows or columns, each of about `_STRIP_BYTES`."""
    step = max(1, _STRIP_BYTES // item_bytes)
    for start in range(0, num, step):
        yield slice(start, start + step)


def _corner_sums(stored: Pixels) -> Pixels:
    """Return the sums modulo 256 of all before each row and column: uint8 (height + 1, width + 1, channels)."""
    return corner_sums_with_cv2(stored).astype(np.uint8)
