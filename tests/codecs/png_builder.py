"""Builds PNG files from samples, straight from the specification: every colour type, depth, filter and Adam7.

Slow and plain on purpose: it is what the tests trust. Nothing here is taken from the code under test.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

ADAM7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def header(width, height, depth=8, colour=2, interlace=0, compression=0, filtering=0) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, compression, filtering, interlace))


def scanlines(samples, depth=8, filters=(0,)) -> bytes:
    """Return the filtered rows of samples (height, width, n); filter types are taken in turn."""
    height, width, n = samples.shape
    bits = np.unpackbits(samples.astype(">u2").view(np.uint8).reshape(height, width * n, 2), axis=2)[:, :, 16 - depth :]
    rows = np.packbits(bits.reshape(height, -1), axis=1).tolist()
    step = max(1, n * depth // 8)
    above = [0] * len(rows[0])
    out = bytearray()
    for y, row in enumerate(rows):
        kind = filters[y % len(filters)]
        out.append(kind)
        for x, value in enumerate(row):
            left, corner = (row[x - step], above[x - step]) if x >= step else (0, 0)
            out.append((value - predict(kind, left, above[x], corner)) & 255)
        above = row
    return bytes(out)


def predict(kind: int, left: int, up: int, corner: int) -> int:
    if kind == 4:
        p = left + up - corner
        return min((abs(p - left), 0, left), (abs(p - up), 1, up), (abs(p - corner), 2, corner))[2]
    return {0: 0, 1: left, 2: up, 3: (left + up) // 2}[kind]


def build_png(samples, *, colour=2, depth=8, filters=(0,), interlaced=False, before=(), after=(), raw=None, split=None):
    """Return a PNG file of samples (height, width, n); `before` and `after` are chunks around the image data."""
    samples = np.asarray(samples)
    height, width, n = samples.shape
    assert n == SAMPLES[colour]
    if raw is None:
        parts = [samples[y::dy, x::dx] for y, x, dy, dx in ADAM7] if interlaced else [samples]
        raw = b"".join(scanlines(part, depth, filters) for part in parts if part.size)
    stream = zlib.compress(raw)
    split = split or max(1, len(stream))
    pieces = [chunk(b"IDAT", stream[i : i + split]) for i in range(0, len(stream), split)]
    parts = [header(width, height, depth, colour, int(interlaced)), *before, *pieces, *after, chunk(b"IEND")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def exif(orientation: int, order: str = "<") -> bytes:
    """Return an EXIF block that says nothing but the orientation."""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(order + "IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
