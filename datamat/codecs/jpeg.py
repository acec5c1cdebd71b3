"""JPEG files: header and structure. libjpeg-turbo, inside simplejpeg or cv2, does the decoding and encoding.

libjpeg only *warns* when a file is cut off and fills the rest with grey, and cv2 drops the warning. So the markers are
walked here from start to end of image first: a truncated file always misses its EOI. Damage inside the compressed data
is seen by no decoder (three of four flipped bits give other pixels, silently): only a digest recorded earlier helps.

Format: ITU-T T.81, annex B.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from datamat.codecs.info import RESTORE, ImageInfo, exif_orientation, refuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["probe_jpeg"]

_EOI, _SOS, _APP1 = 0xD9, 0xDA, 0xE1
_STANDALONE = {0x01, *range(0xD0, 0xD8)}  # TEM and RST0-7 stand without a length
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # SOF0-15; DHT, JPG and DAC lie between them
_COMMON_FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended, progressive: what every decoder takes
_MAX_SCANS = 500  # a tiny progressive file with thousands of scans costs minutes (libjpeg-turbo's fuzzers stop here)
# In compressed data 0xFF is followed by 0x00 or a restart marker; anything else is the next marker (B.1.1.5).
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


def probe_jpeg(data: bytes, name: str, *, whole: bool) -> ImageInfo:
    """Return what the segments before the first scan say.

    Args:
        data: the file.
        name: what to call it in messages.
        whole: also refuse a file without a scan, or whose markers do not lead to its end. What follows EOI is ignored:
            cameras and phones append previews, depth maps and video there; every decoder stops at it.
    """
    info: ImageInfo | None = None
    orientation: int | None = None
    segments = _segments(data, name)
    for marker, start, stop in segments:
        if marker in {_SOS, _EOI}:
            if whole:
                _check_scans(marker, segments, name)
            break
        if marker in _FRAMES:
            if info is not None:
                raise refuse(name, "JPEG with two frame headers", "one picture", RESTORE)
            info = _frame(marker, data[start:stop], name)
        elif marker == _APP1 and orientation is None and data[start : start + 6] == b"Exif\0\0":
            orientation = exif_orientation(memoryview(data)[start + 6 : stop])
    if info is None:
        raise refuse(name, "JPEG without a frame header before its pixels", "a whole JPEG file", RESTORE)
    return info._replace(orientation=orientation) if orientation else info


def _check_scans(marker: int, later: Iterable[tuple[int, int, int]], name: str) -> None:
    """Refuse a file without a scan; walking on to the end of image refuses one that is cut off."""
    scans = int(marker == _SOS)
    for following, _, _ in later:
        scans += following == _SOS
        if scans > _MAX_SCANS:
            raise refuse(name, f"JPEG with over {_MAX_SCANS} scans", "a picture, not a decoding bomb", RESTORE)
    if not scans:
        raise refuse(name, "JPEG without pixels", "at least one scan", RESTORE)


def _segments(data: bytes, name: str) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start of data, end of data) after SOI up to EOI; raise where the file ends before."""
    at, size = 2, len(data)
    while True:
        while at + 1 < size and data[at] == 0xFF and data[at + 1] == 0xFF:  # fill bytes (B.1.1.2)
            at += 1
        if at + 2 > size:
            break
        if data[at] != 0xFF:
            raise refuse(name, f"JPEG with byte {data[at]:#04x} for a marker at byte {at}", "0xff", RESTORE)
        marker = data[at + 1]
        at += 2
        if marker == _EOI:
            yield marker, at, at
            return
        if marker in _STANDALONE:
            continue
        stop = at + int.from_bytes(data[at : at + 2], "big")
        if stop < at + 2 or stop > size:
            break
        yield marker, at + 2, stop
        at = stop
        if marker == _SOS:
            found = _NEXT_MARKER.search(data, at)
            if found is None:
                break
            at = found.start()
    raise refuse(name, f"JPEG of {size} bytes ends before its end-of-image marker", "a whole file", RESTORE)


def _frame(marker: int, frame: bytes, name: str) -> ImageInfo:
    if marker not in _COMMON_FRAMES:
        found = f"JPEG of process SOF{marker - 0xC0} (lossless, hierarchical or arithmetic)"
        raise refuse(name, found, "baseline or progressive", "convert it to PNG")
    channels = frame[5] if len(frame) > 5 else 0
    if channels not in {1, 3, 4} or len(frame) != 6 + 3 * channels:
        raise refuse(name, f"JPEG frame of {channels} components in {len(frame)} bytes", "1, 3 or 4", RESTORE)
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    return ImageInfo("jpeg", height, width, channels, bit_depth=frame[0], cmyk=channels == 4)
