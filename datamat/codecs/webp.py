"""WebP headers. Format: RFC 9649, section 2 (container) and 3.4 (lossless header); RFC 6386, section 9.1 (lossy)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datamat.codecs.info import RESTORE, ImageInfo, exif_orientation, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["probe_webp"]

_HEADERS = {b"VP8X", b"VP8 ", b"VP8L", b"ANIM", b"EXIF"}
_ALPHA_FLAG, _ANIMATION_FLAG = 0x10, 0x02


def probe_webp(data: bytes, name: str, *, whole: bool) -> ImageInfo:
    """Return what the container's chunks say; `whole` also checks that the file is as long as they say."""
    if whole:
        _check_length(data, name)
    chunks: dict[bytes, bytes] = {}
    for kind, start, stop in _chunks(data):
        if kind in _HEADERS and kind not in chunks:
            chunks[kind] = data[start:stop] if kind == b"EXIF" else data[start : start + 10]
    extended, lossy, lossless = (chunks.get(kind) for kind in (b"VP8X", b"VP8 ", b"VP8L"))
    alpha = animated = False
    if extended is not None and len(extended) >= 10:
        alpha, animated = bool(extended[0] & _ALPHA_FLAG), bool(extended[0] & _ANIMATION_FLAG)
        width, height = _uint(extended[4:7]) + 1, _uint(extended[7:10]) + 1
    elif lossless is not None and len(lossless) >= 5 and lossless[0] == 0x2F:
        bits = _uint(lossless[1:5])
        width, height, alpha = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, bool(bits >> 28 & 1)
    elif lossy is not None and len(lossy) >= 10 and lossy[3:6] == b"\x9d\x01\x2a":
        width, height = _uint(lossy[6:8]) & 0x3FFF, _uint(lossy[8:10]) & 0x3FFF
    else:
        raise refuse(name, "WebP without a complete picture header", "a whole WebP file", RESTORE)
    exif = chunks.get(b"EXIF", b"").removeprefix(b"Exif\0\0")  # some writers keep the prefix of JPEG's APP1
    return ImageInfo(
        encoding="webp",
        height=height,
        width=width,
        channels=4 if alpha else 3,
        alpha=alpha,
        orientation=exif_orientation(exif),
        animated=animated or b"ANIM" in chunks,
    )


def _check_length(data: bytes, name: str) -> None:
    """Refuse a file that is shorter than its container says, or whose chunks go past its end."""
    wanted = 8 + _uint(data[4:8])
    end = max((stop for _, _, stop in _chunks(data)), default=0)
    if len(data) < wanted or end > wanted:
        found = f"WebP of {len(data)} bytes whose container declares {wanted}"
        raise refuse(name, found, "a whole file", RESTORE)


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, start, declared end) of the chunks in the RIFF container, as far as the file goes."""
    at, size = 12, min(len(data), 8 + _uint(data[4:8]))
    while at + 8 <= size:
        stop = at + 8 + _uint(data[at + 4 : at + 8])
        yield data[at : at + 4], at + 8, stop
        at = stop + stop % 2


def _uint(raw: bytes) -> int:
    return int.from_bytes(raw, "little")
