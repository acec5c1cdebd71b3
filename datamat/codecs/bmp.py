"""BMP headers. Format: Microsoft, "Bitmap Storage" and BITMAPINFOHEADER, BITMAPV4HEADER in wingdi.h."""

from __future__ import annotations

import struct

from datamat.codecs.info import RESTORE, ImageInfo, refuse

__all__ = ["probe_bmp"]

_BITFIELDS = 3  # compression: masks say where in a pixel each colour lies; 0 is plain
_USUAL_MASKS = struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)  # red, green, blue: as plain; cv2 4 knows no others
_CHANNELS = {1: 1, 4: 1, 8: 1, 24: 3, 32: 4}  # bits per pixel to samples; up to 8 bits they are palette indices
_INFO = struct.Struct("<IiiHHI")  # size, width, height, planes, bits per pixel, compression


def probe_bmp(data: bytes, name: str, *, whole: bool) -> ImageInfo:
    """Return what the headers say; `whole` also checks that the file holds all rows."""
    width, height, bits, compression, header_bytes = _header(data, name)
    is_usual = compression == 0 or (compression == _BITFIELDS and bits == 32 and data[54:66] == _USUAL_MASKS)
    if not is_usual or bits not in _CHANNELS:
        found = f"BMP of {bits} bits per pixel with compression {compression}, or unusual colour masks"
        raise refuse(name, found, "plain 1, 4, 8, 24 or 32 bits", "save it as PNG")
    if whole:
        _check_length(data, name)
    # The mask of the alpha bits is at byte 52 of BITMAPV3INFOHEADER and later; before that the 4th byte is padding.
    alpha = bits == 32 and header_bytes >= 56 and data[66:70] not in {b"", bytes(4)}
    return ImageInfo(
        encoding="bmp",
        height=abs(height),  # negative: rows are stored from the top down
        width=width,
        channels=_CHANNELS[bits],
        bit_depth=min(bits, 8),
        palette=bits <= 8,
        alpha=alpha,
    )


def _check_length(data: bytes, name: str) -> None:
    """Refuse a file that is too short for its rows."""
    width, height, bits, _, header_bytes = _header(data, name)
    offset = int.from_bytes(data[10:14], "little")
    wanted = offset + (width * bits + 31) // 32 * 4 * abs(height)
    if len(data) < wanted or offset < 14 + header_bytes:
        found = f"BMP of {len(data)} bytes with pixels from byte {offset} on"
        raise refuse(name, found, f"{wanted} bytes", RESTORE)


def _header(data: bytes, name: str) -> tuple[int, int, int, int, int]:
    """Return (width, height, bits per pixel, compression, bytes of the information header)."""
    if len(data) < 14 + 40 or int.from_bytes(data[14:18], "little") < 40:
        raise refuse(name, "BMP without a complete header of Windows 3 or later", "a whole BMP file", RESTORE)
    header_bytes, width, height, _, bits, compression = _INFO.unpack_from(data, 14)
    return width, height, bits, compression, header_bytes
