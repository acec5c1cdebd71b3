"""What an encoded picture's header says, and the refusals and the EXIF rules that all encodings share."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from datamat.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

__all__ = ["MAX_PIXELS", "RESTORE", "ImageInfo", "exif_orientation", "refuse", "turn_upright"]

MAX_PIXELS = 178_956_970
"""Most pixels (width * height) accepted by default: Pillow's limit against decompression bombs, 512 MiB as RGB."""

RESTORE = "restore the file from its source, or take it out of the index"
"""What to do about a damaged file."""

_ORIENTATION_TAG = 0x0112
_SHORT = 3  # TIFF field type, 16 bits unsigned


class ImageInfo(NamedTuple):
    """What the header of an encoded picture says; nothing here needs its pixels decoded.

    Attributes:
        encoding: the file format.
        height: rows as stored, before `orientation` is applied.
        width: columns as stored, before `orientation` is applied.
        channels: samples per pixel as stored: 1 grey or palette index, 2 grey and alpha, 3 RGB, 4 RGBA or CMYK.
        bit_depth: bits per stored sample.
        palette: the samples are indices into a colour table.
        alpha: the picture holds transparency, as a channel or as a transparent colour.
        orientation: EXIF orientation, 1 (upright) to 8.
        animated: there is more than one frame.
        cmyk: the colours are inks (CMYK or YCCK), not light.
        interlaced: PNG with Adam7 passes.
    """

    encoding: Literal["png", "jpeg", "webp", "bmp"]
    height: int
    width: int
    channels: int
    bit_depth: int = 8
    palette: bool = False
    alpha: bool = False
    orientation: int = 1
    animated: bool = False
    cmyk: bool = False
    interlaced: bool = False


def refuse(name: str, found: str, wanted: str, remedy: str) -> InputError:
    """Return the error to raise for a picture called `name` (a path, key or field; may be empty)."""
    place = repr(name) if name else "image data"
    return InputError(f"{place}: {found}; want {wanted}; {remedy}")


def exif_orientation(exif: bytes | memoryview) -> int:
    r"""Return the orientation, 1 to 8, that an EXIF block (a TIFF file without picture) asks for; 1 if it is unclear.

    A broken EXIF block is no reason to refuse a picture: its pixels are not concerned, and every viewer then shows
    them as stored. Format: TIFF 6.0, section 2; tag 0x0112 of CIPA DC-008 (Exif 3.0), section 4.6.5.

    Example:
        >>> entry = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
        >>> exif_orientation(b"II*\0" + struct.pack("<IH", 8, 1) + entry)
        6
    """
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(exif[:4]))
    if order is None or len(exif) < 10:
        return 1
    (start,) = struct.unpack_from(order + "I", exif, 4)
    if start + 2 > len(exif):
        return 1
    (count,) = struct.unpack_from(order + "H", exif, start)
    first, entry_bytes = start + 2, 12
    for at in range(first, min(first + count * entry_bytes, len(exif) - entry_bytes + 1), entry_bytes):
        tag, kind, number, value = struct.unpack_from(order + "HHIH", exif, at)
        if tag == _ORIENTATION_TAG:
            return value if kind == _SHORT and number == 1 and 1 <= value <= 8 else 1
    return 1


def turn_upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return `pixels`, uint8 (height, width, ...), as EXIF `orientation` 1..8 wants them seen; C-contiguous."""
    if orientation >= 5:  # 5..8 store the picture's columns as rows
        pixels = pixels.swapaxes(0, 1)
    if orientation in {2, 3, 6, 7}:
        pixels = pixels[:, ::-1]
    if orientation in {3, 4, 7, 8}:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
