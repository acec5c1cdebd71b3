"""The structure of a PNG file: chunks, header, compressed scanlines. Nothing here knows about pixels.

Format: Portable Network Graphics (Third Edition), https://www.w3.org/TR/png-3/, section numbers below are its.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import NamedTuple

from datamat.codecs.info import RESTORE, ImageInfo, exif_orientation, refuse
from datamat.codecs.libraries import load_zlib

__all__ = ["COLOUR_TYPES", "SIGNATURE", "Chunk", "PngFile", "check_png", "make_chunk", "probe_png", "walk_chunks"]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_FRAME = struct.Struct(">I4s")  # length of the data, type; the data and their CRC-32 follow (5.3)
_HEADER = struct.Struct(">IIBBBBB")  # width, height, depth, colour type, compression, filter, interlace (11.2.1)
_MAX_CHUNKS = 1 << 18  # a file of empty chunks would fill the memory; encoders write 8 KiB or more into each

COLOUR_TYPES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Colour type (grey, RGB, palette, grey and alpha, RGBA) to samples per pixel (11.2.1, table 12)."""

_DEPTHS = {0: {1, 2, 4, 8, 16}, 2: {8, 16}, 3: {1, 2, 4, 8}, 4: {8, 16}, 6: {8, 16}}


class Chunk(NamedTuple):
    """One chunk: its type and where its data lie in the file."""

    kind: bytes
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class PngFile:
    """A PNG file cut into its chunks, not yet checked.

    Attributes:
        data: the file.
        chunks: in file order, as far as the file goes; the last one is IEND in a complete file.
    """

    data: bytes
    chunks: tuple[Chunk, ...]

    def first(self, kind: bytes) -> bytes | None:
        """Return the data of the first chunk of that kind, None if there is none."""
        return next((self.data[start:stop] for found, start, stop in self.chunks if found == kind), None)

    def image_data(self) -> bytes:
        """Return the zlib stream that the IDAT chunks hold together."""
        view = memoryview(self.data)
        return b"".join([view[start:stop] for kind, start, stop in self.chunks if kind == b"IDAT"])


def make_chunk(kind: bytes, *parts: bytes) -> list[bytes]:
    """Return the pieces of a chunk: length and type, the parts of its data, CRC-32."""
    crc32 = load_zlib().crc32
    crc = crc32(kind)
    for part in parts:
        crc = crc32(part, crc)
    return [_FRAME.pack(sum(map(len, parts)), kind), *parts, crc.to_bytes(4, "big")]


def walk_chunks(data: bytes, name: str) -> PngFile:
    """Return the file's chunks up to IEND, or up to the first that is cut off. What follows IEND is ignored."""
    chunks = []
    at, size = len(SIGNATURE), len(data)
    while at + 12 <= size:
        length, kind = _FRAME.unpack_from(data, at)
        stop = at + 8 + length
        if stop + 4 > size:
            break
        chunks.append(Chunk(kind, at + 8, stop))
        if kind == b"IEND":
            break
        if len(chunks) > _MAX_CHUNKS:
            raise refuse(name, f"PNG of over {_MAX_CHUNKS} chunks", "fewer", RESTORE)
        at = stop + 4
    return PngFile(data, tuple(chunks))


def probe_png(data: bytes, name: str, *, whole: bool) -> ImageInfo:
    """Return what the header and the chunk types say; `whole` also checks that the chunks are all there and intact."""
    if len(data) < len(SIGNATURE) + 8 + _HEADER.size or data[8:16] != b"\0\0\0\rIHDR":
        raise refuse(name, "PNG signature without a complete IHDR chunk", "a whole PNG file", RESTORE)
    width, height, depth, colour, compression, filtering, interlace = _HEADER.unpack_from(data, 16)
    if depth not in _DEPTHS.get(colour, ()) or compression or filtering or interlace > 1:
        found = f"PNG header with colour type {colour}, depth {depth}, methods {compression}, {filtering}, {interlace}"
        raise refuse(name, found, "a combination that PNG defines", RESTORE)
    file = check_png(data, name) if whole else walk_chunks(data, name)
    kinds = {chunk.kind for chunk in file.chunks}
    return ImageInfo(
        encoding="png",
        height=height,
        width=width,
        channels=COLOUR_TYPES[colour],
        bit_depth=depth,
        palette=colour == 3,
        alpha=colour >= 4 or b"tRNS" in kinds,
        orientation=exif_orientation(file.first(b"eXIf") or b""),
        animated=b"acTL" in kinds,
        interlaced=interlace == 1,
    )


def check_png(data: bytes, name: str) -> PngFile:
    """Return the file's chunks after checking that all are there, in order, with the right CRCs.

    Raises:
        InputError: the file is cut off, a chunk's CRC is wrong, a critical chunk is unknown, or IDAT or PLTE are not
            where they belong.
    """
    file = walk_chunks(data, name)
    if not file.chunks or file.chunks[-1].kind != b"IEND":
        raise refuse(name, f"PNG of {len(data)} bytes ends before its IEND chunk", "a whole file", RESTORE)
    crc32 = load_zlib().crc32
    view = memoryview(data)
    for kind, start, stop in file.chunks:
        if crc32(view[start - 4 : stop]) != int.from_bytes(view[stop : stop + 4], "big"):
            raise refuse(name, f"PNG chunk {kind!r} at byte {start - 8} has a wrong CRC", "intact data", RESTORE)
    _check_order([chunk.kind for chunk in file.chunks], name)
    return file


def _check_order(kinds: list[bytes], name: str) -> None:
    """Refuse what makes decoders disagree: a second header or palette, split image data, critical chunks unknown."""
    images = [i for i, kind in enumerate(kinds) if kind == b"IDAT"]
    if not images or images[-1] - images[0] + 1 != len(images):
        raise refuse(name, "PNG without IDAT chunks in one run", "one picture's data", RESTORE)
    palettes = [i for i, kind in enumerate(kinds) if kind == b"PLTE"]
    if kinds.count(b"IHDR") != 1 or len(palettes) > 1 or any(i > images[0] for i in palettes):
        raise refuse(name, "PNG with misplaced IHDR or PLTE chunks", "each once, before the pixels", RESTORE)
    # Bit 5 of the first letter is clear in chunks that a decoder must understand (5.4).
    unknown = {kind for kind in kinds if not kind[0] & 0x20} - {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
    if unknown:
        raise refuse(name, f"PNG with unknown critical chunks {sorted(unknown)}", "a standard PNG", RESTORE)
