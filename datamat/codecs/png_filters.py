"""Undoing the filters of PNG scanlines: the sums that libspng makes pixel by pixel, made for the whole picture at once.

Filter 1 (sub) stores each byte as its difference from the pixel to its left, filter 2 (up) from the one above. cv2
writes nothing but the first, `encode` nothing but the second. Prefix sums by doubling (Hillis and Steele, 1986) take
log2(width) or log2(height) additions of whole arrays, which numpy does with SIMD: on masks of 480 x 360 a seventh and
half of libspng's time, on RGB two thirds. Files that mix them, or take other filters, are left to libspng.

Format: Portable Network Graphics (Third Edition), section 9.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from datamat.codecs.opencv import transpose_with_cv2

if TYPE_CHECKING:
    from datamat.codecs.info import Pixels

__all__ = ["undo_uniform_filters"]

_NONE, _SUB, _UP = 0, 1, 2


def undo_uniform_filters(filtered: Pixels, channels: int, out: Pixels | None = None) -> Pixels | None:
    """Return the pixels of scanlines that use filters 0 and 1 only, or 2 only; None where others are among them.

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
    if highest > _SUB and not lowest == highest == _UP:
        return None
    stored = filtered[:, 1:].reshape(len(filtered), -1, channels)
    pixels = np.empty(stored.shape, np.uint8) if out is None else out
    if highest != _SUB:
        pixels[...] = stored if highest == _NONE else _prefix_sums(stored.copy())
        return pixels
    transpose_with_cv2(_prefix_sums(transpose_with_cv2(stored)), pixels)
    plain = np.flatnonzero(kinds == _NONE)
    pixels[plain] = stored[plain]
    return pixels


def _prefix_sums(values: Pixels) -> Pixels:
    """Return the sums, modulo 256, of each item and all before it along the first axis; overwrites `values`."""
    sums, scratch = values, np.empty_like(values)
    step = 1
    while step < len(sums):
        scratch[:step] = sums[:step]
        np.add(sums[step:], sums[:-step], out=scratch[step:])
        sums, scratch = scratch, sums
        step *= 2
    return sums
