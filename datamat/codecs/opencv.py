"""The only file that hands pictures to OpenCV: RGB order in and out, and an exception where it gives none.

cv2 answers damaged files with None, an exception or a picture, and applies EXIF orientation unless told not to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.codecs.libraries import load_cv2
from datamat.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from datamat.codecs.info import Pixels

__all__ = ["corner_sums_with_cv2", "decode_with_cv2", "encode_jpeg_with_cv2"]


def decode_with_cv2(data: bytes, channels: int) -> Pixels:
    """Return uint8 (height, width, channels), C-contiguous: 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA; not turned.

    Raises:
        ValueError: cv2 gives no picture, or not one of 8 bits.
    """
    cv2 = load_cv2()
    flag = {1: cv2.IMREAD_GRAYSCALE, 3: cv2.IMREAD_COLOR_RGB}.get(channels, cv2.IMREAD_UNCHANGED)
    try:
        pixels: Any = cv2.imdecode(np.frombuffer(data, np.uint8), flag | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as exc:
        raise ValueError(f"cv2: {exc}") from exc
    if pixels is None or pixels.dtype != np.uint8:
        raise ValueError("cv2 gives None" if pixels is None else f"cv2 gives {pixels.dtype}")
    if channels in {2, 4}:
        stored = pixels.shape[2] if pixels.ndim == 3 else 1
        codes = {1: cv2.COLOR_GRAY2RGBA, 3: cv2.COLOR_BGR2RGBA, 4: cv2.COLOR_BGRA2RGBA}
        # cv2 knows no grey with alpha: it gives the grey value in all three colours.
        pixels = np.ascontiguousarray(cv2.cvtColor(pixels, codes[stored])[..., 4 - channels :])
    result: Pixels = pixels.reshape(*pixels.shape[:2], channels)
    return result


def encode_jpeg_with_cv2(pixels: Pixels, quality: int) -> bytes:
    """Return uint8 (height, width, 1 or 3), C-contiguous, as JPEG.

    Raises:
        OptionError: cv2 refuses the array.
    """
    cv2 = load_cv2()
    # cvtColor, not pixels[..., ::-1]: a view with a negative stride takes cv2 1.07 ms instead of 0.41.
    ordered = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR) if pixels.shape[2] == 3 else pixels
    encoded, buffer = cv2.imencode(".jpg", ordered, [cv2.IMWRITE_JPEG_QUALITY, int(quality)])
    if not encoded:
        raise OptionError(f"encode_jpeg: cv2 refuses an array of {pixels.shape}; want one that JPEG holds; use PNG")
    result: bytes = buffer.tobytes()
    return result


def corner_sums_with_cv2(pixels: Pixels) -> NDArray[np.int32]:
    """Return the sums of all pixels above and to the left: int32 (height + 1, width + 1, channels), modulo 2**32.

    Args:
        pixels: uint8 (height, width, channels); its rows may lie apart.
    """
    height, width, channels = pixels.shape
    sums = np.empty((height + 1, width + 1, channels), np.int32)  # cv2 would wait for the interpreter to make it
    load_cv2().integral(pixels, sums)
    return sums
