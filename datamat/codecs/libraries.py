"""Which library does each job in this process, and all calls to OpenCV."""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import MissingDependencyError, OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# ---------------------------------------------------------------- the choice
#
# Libraries are imported on first use, so that importing `datamat` stays cheap.
#
# Three are fast but may be missing on a platform: isal (inflate and checksums by ISA-L), pyspng (libspng), and
# simplejpeg (libjpeg-turbo, in two thirds of cv2's time). zlib and cv2 then do the same work and give the same pixels.
# The manifest records the versions of those that decided bytes only.


# Which modules decide bytes. Every library decodes PNG to the same pixels; the standards of JPEG and WebP leave the
# last bit of a pixel open. Nothing decides the bytes of a file that is stored untouched.
JPEG_ENCODER = frozenset({"cv2"})
PNG_ENCODER = frozenset({"zlib"})
LOSSY_DECODERS = frozenset({"cv2", "simplejpeg"})


def load_cv2() -> Any:
    """Return OpenCV; raises `MissingDependencyError` where it cannot be imported."""
    try:
        import cv2  # imported here: it costs 0.1 s and 45 MB, and many processes decode no images
    except ImportError as error:  # also where a library of the system is missing
        raise MissingDependencyError(
            f"this picture needs the package cv2 ({error}); install it with: pip install opencv-python-headless"
        ) from error
    return cv2


# Cached, because a failed import searches the whole path again at every call: 100 µs per image.
@functools.cache
def load_zlib() -> Any:
    """Return `isal.isal_zlib`, or zlib, which has the same functions, if isal is missing."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


@functools.cache
def load_pyspng() -> Any | None:
    """Return pyspng, or None if it is missing."""
    try:
        import pyspng
    except ImportError:
        return None
    return pyspng


@functools.cache
def load_simplejpeg() -> Any | None:
    """Return simplejpeg, or None if it is missing."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def load_tifffile(name: str) -> Any:
    """Return tifffile, for a file called `name`; raises `MissingDependencyError` where it or its codecs are missing."""
    try:
        import imagecodecs  # noqa: F401 -- tifffile does without it for some files, and only says so for the others
        import tifffile
    except ImportError as error:
        raise MissingDependencyError(
            f"{name!r}: TIFF files need the packages tifffile and imagecodecs ({error}); install them with: "
            "pip install 'datamat[tiff]', or convert the file to PNG"
        ) from error
    return tifffile


# ---------------------------------------------------------------- OpenCV
#
# The only calls to OpenCV: RGB order in and out, and an exception where it returns no image.
#
# For a damaged file, cv2 returns None, raises, or returns an image. It applies EXIF orientation unless told not to.


def decode_with_cv2(data: bytes, channels: int, depth: int = 8) -> NDArray[Any]:
    """Return (height, width, channels), C-contiguous: 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA; EXIF is ignored.

    Args:
        data: content of the file.
        channels: number of channels of the result.
        depth: 8 for uint8; 16 for the uint16 of a file with three channels or four.

    Raises:
        ValueError: cv2 returns no image, or one of another depth.
    """
    cv2 = load_cv2()
    flag = {1: cv2.IMREAD_GRAYSCALE, 3: cv2.IMREAD_COLOR_RGB}.get(channels, cv2.IMREAD_UNCHANGED)
    flag |= cv2.IMREAD_ANYDEPTH if depth > 8 else 0
    try:
        pixels: Any = cv2.imdecode(np.frombuffer(data, np.uint8), flag | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as exc:
        raise ValueError(f"cv2: {exc}") from exc
    if pixels is None or pixels.itemsize * 8 != depth:
        raise ValueError("cv2 returns None" if pixels is None else f"cv2 returns {pixels.dtype}")
    if channels in {2, 4}:
        stored = pixels.shape[2] if pixels.ndim == 3 else 1
        codes = {1: cv2.COLOR_GRAY2RGBA, 3: cv2.COLOR_BGR2RGBA, 4: cv2.COLOR_BGRA2RGBA}
        # cv2 has no grey with alpha: all three colours hold the grey value.
        pixels = np.ascontiguousarray(cv2.cvtColor(pixels, codes[stored])[..., 4 - channels :])
    result: NDArray[Any] = pixels.reshape(*pixels.shape[:2], channels)
    return result


def encode_jpeg_with_cv2(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """Return uint8 (height, width, 1 or 3), C-contiguous, as JPEG.

    Raises:
        OptionError: cv2 refuses the array.
    """
    cv2 = load_cv2()
    # cvtColor, not pixels[..., ::-1]: with a view of negative stride, cv2 takes 1.07 ms, not 0.41.
    ordered = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR) if pixels.shape[2] == 3 else pixels
    encoded, buffer = cv2.imencode(".jpg", ordered, [cv2.IMWRITE_JPEG_QUALITY, int(quality)])
    if not encoded:
        raise OptionError(f"encode_jpeg: cv2 refuses an array of {pixels.shape}; want one that JPEG can hold; use PNG")
    result: bytes = buffer.tobytes()
    return result


def corner_sums_with_cv2(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the sums of all pixels above and to the left, modulo 256: uint8 (height + 1, width + 1, channels).

    Args:
        pixels: array uint8 (height, width, channels); rows need not be contiguous.
    """
    height, width, channels = pixels.shape
    sums = np.empty((height + 1, width + 1, channels), np.int32)  # allocated here: cv2 would need the GIL
    try:
        load_cv2().integral(pixels, sums)
    except MissingDependencyError:  # numpy does the same, several times as slowly
        sums[0] = sums[:, 0] = 0
        np.cumsum(pixels, axis=0, dtype=np.int32).cumsum(axis=1, dtype=np.int32, out=sums[1:, 1:])
    return sums.astype(np.uint8)
