"""Which library does each job in this process; finds them on first use, so that importing `datamat` stays cheap.

Three are quick but could be missing on a platform: isal (inflate and checksums by ISA-L), pyspng (libspng), and
simplejpeg (libjpeg-turbo, in two thirds of cv2's time). zlib and cv2 then do the same work, with the same pixels.
`codec_versions` goes into the manifest.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

__all__ = ["codec_versions", "load_cv2", "load_pyspng", "load_simplejpeg", "load_zlib"]


def load_cv2() -> Any:
    """Return OpenCV."""
    import cv2  # here: 0.1 s and 45 MB that a process without pictures need not pay

    return cv2


# Cached, because a failed import searches the whole path again at every call: 100 µs per picture.
@functools.cache
def load_zlib() -> Any:
    """Return `isal.isal_zlib`, or the standard library's zlib, which has the same functions, where it is missing."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


@functools.cache
def load_pyspng() -> Any | None:
    """Return pyspng, or None where it is missing."""
    try:
        import pyspng
    except ImportError:
        return None
    return pyspng


@functools.cache
def load_simplejpeg() -> Any | None:
    """Return simplejpeg, or None where it is missing."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def codec_versions() -> dict[str, str]:
    """Return for each job the library that does it in this process, and its version.

    Decoded pixels are the same whichever library is named; encoded bytes depend on `jpeg_encode` and `png_encode`.

    Example:
        >>> sorted(codec_versions())
        ['jpeg_decode', 'jpeg_encode', 'png_encode', 'png_inflate', 'png_unfilter']
    """
    opencv = f"opencv {load_cv2().__version__}"
    deflate = f"zlib {zlib.ZLIB_RUNTIME_VERSION}"
    return {
        "jpeg_decode": opencv if load_simplejpeg() is None else f"simplejpeg {_version('simplejpeg')}",
        "jpeg_encode": opencv,
        "png_encode": deflate,
        "png_inflate": deflate if load_zlib() is zlib else f"isal {_version('isal')}",
        "png_unfilter": opencv if load_pyspng() is None else f"pyspng-seunglab {_version('pyspng-seunglab')}",
    }


def _version(distribution: str) -> str:
    from importlib import metadata  # 25 ms at first, a sixth of what `import datamat` may take

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # vendored or frozen: the module is there, its metadata is not
        return "unknown"
