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
    height, width = stored.shape[:2]
    if highest == _NONE:
        pixels[...] = stored
    elif highest == _UP:
        items = _below_zeros(height, (width, channels))
        items[-height:] = stored
        pixels[...] = _prefix_sums(items, height)
    else:
        items = _below_zeros(width, (height, channels))
        transpose_with_cv2(stored, items[-width:])
        transpose_with_cv2(_prefix_sums(items, width), pixels)
        plain = np.flatnonzero(kinds == _NONE)
        pixels[plain] = stored[plain]
    return pixels


def _below_zeros(num: int, shape: tuple[int, ...]) -> Pixels:
    """Return room for `num` items of a shape, behind as many of zeros as the widest step of `_prefix_sums` reaches."""
    margin = 1 << (num - 1).bit_length() >> 1
    room = np.empty((margin + num, *shape), np.uint8)
    room[:margin] = 0
    return room


def _prefix_sums(items: Pixels, num: int) -> Pixels:
    """Return the sums, modulo 256, of each of the last `num` items and all before it; overwrites `items`.

    The zeros before them let one addition make a step for all: with two threads, each call waits for the interpreter.
    """
    margin = len(items) - num
    sums, scratch = items, _below_zeros(num, items.shape[1:])
    step = 1
    while step < num:
        np.add(sums[margin:], sums[margin - step : -step], out=scratch[margin:])
        sums, scratch = scratch, sums
        step *= 2
    return sums[margin:]
