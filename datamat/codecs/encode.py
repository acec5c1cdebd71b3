"""Arrays to encoded pictures: JPEG by libjpeg-turbo (cv2), PNG by the writer in `png`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.codecs.opencv import encode_jpeg_with_cv2
from datamat.codecs.png import MAX_SCANLINE_BYTES, encode_png_pixels
from datamat.errors import OptionError

if TYPE_CHECKING:
    from datamat.codecs.info import Pixels

__all__ = ["encode_jpeg", "encode_png"]

_JPEG_SIDE = 65_500  # JPEG_MAX_DIMENSION of libjpeg, a little under what 16 bits hold


def encode_jpeg(image: Pixels, *, quality: int = 95) -> bytes:
    r"""Return an array as JPEG, chroma subsampled 4:2:0.

    Args:
        image: uint8 (height, width, 3) in RGB order, or (height, width) or (height, width, 1) grey.
        quality: 1 to 100.

    Raises:
        OptionError: the array or the quality is not of that kind, or a side is over 65,500.

    Example:
        >>> import numpy as np
        >>> encode_jpeg(np.zeros((8, 8, 3), np.uint8))[:2]
        b'\xff\xd8'
    """
    if not 1 <= quality <= 100:
        raise OptionError(f"encode_jpeg: quality is {quality!r}; want 1 to 100")
    pixels = _checked_pixels(image, "encode_jpeg", (1, 3))
    if max(pixels.shape[:2]) > _JPEG_SIDE:
        raise OptionError(f"encode_jpeg: the array is {pixels.shape}; want sides up to {_JPEG_SIDE}; store it as PNG")
    return encode_jpeg_with_cv2(pixels, quality)


def encode_png(image: Pixels) -> bytes:
    """Return an array as PNG: the same pixels after any decoder.

    The *bytes* depend on the zlib that Python uses, which `codec_versions` names and the manifest records.

    Args:
        image: uint8 (height, width, 3) RGB, (height, width, 4) RGBA, (height, width) or (height, width, 1) grey.

    Raises:
        OptionError: the array is not of that kind, or holds 2 GiB or more.

    Example:
        >>> import numpy as np
        >>> encode_png(np.zeros((8, 8), np.uint8))[1:4]
        b'PNG'
    """
    pixels = _checked_pixels(image, "encode_png", (1, 3, 4))
    if pixels.nbytes + len(pixels) > MAX_SCANLINE_BYTES:
        raise OptionError(f"encode_png: the array holds {pixels.nbytes} bytes; want under 2 GiB; tile the picture")
    return encode_png_pixels(pixels)


def _checked_pixels(image: Any, place: str, channels: tuple[int, ...]) -> Pixels:
    """Return the array as C-contiguous uint8 (height, width, channels)."""
    pixels = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in channels or pixels.size == 0:
        raise OptionError(
            f"{place}: the array is {np.asarray(image).dtype} {np.asarray(image).shape}; want uint8 (height, width) or "
            f"(height, width, channels) with channels in {channels} and at least one pixel; cast or reshape it"
        )
    return np.ascontiguousarray(pixels)
