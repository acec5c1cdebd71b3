"""PNG files to pixels and back, up to three times as fast as cv2 and with the same pixels.

cv2 spends most of a picture on inflating it, so here the scanlines are inflated by ISA-L. A filter that all rows share
is undone by `png_filters`. Other scanlines are handed on, as a PNG file whose deflate stream is only *stored*, to
libspng, which undoes the filters with SIMD, or in threads to cv2. The file that they see is always the same simple
kind: 8 bits, no palette, not interlaced. What palettes, small depths, transparent colours and Adam7 mean is decided
here, in numpy, so that it does not depend on the library and a mask's class ids stay what they are.

    file -> chunks, CRCs -> zlib stream -> scanlines -> per pass: rows of bytes -> samples -> colours
            png_chunks      ISA-L                       png_filters, libspng, cv2  numpy

Everything is checked on the way: CRCs, Adler-32, the exact number of bytes, filter types. Arrays are deflated by zlib.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from datamat.codecs.info import RESTORE, refuse
from datamat.codecs.libraries import load_pyspng, load_zlib
from datamat.codecs.opencv import decode_with_cv2
from datamat.codecs.png_chunks import SIGNATURE, make_chunk
from datamat.codecs.png_filters import undo_uniform_filters

if TYPE_CHECKING:
    from datamat.codecs.info import ImageInfo, Pixels
    from datamat.codecs.png_chunks import PngFile

__all__ = ["MAX_SCANLINE_BYTES", "decode_png_image", "decode_png_samples", "encode_png_pixels"]

_COLOUR_TYPE = {1: 0, 2: 4, 3: 2, 4: 6}  # bytes per pixel to the PNG colour type with as many 8-bit samples
_SPNG_FORMAT = {1: "L", 2: "RGBA", 3: "RGB", 4: "RGBA"}  # libspng gives no grey with alpha at 8 bits
_DEFLATE_LEVEL = 1
_MAX_INFLATION = 1032  # deflate makes nothing smaller (https://zlib.net/zlib_tech.html)
_MAX_EXCESS = 64  # a stream that could come to this many times what is wanted,
_MAX_UNLIMITED_BYTES = 64 << 20  # or to this many bytes, is inflated up to a limit
_STORED_BYTES = 65535  # most bytes in a stored deflate block, RFC 1951 section 3.2.4
MAX_SCANLINE_BYTES = (1 << 31) - (1 << 20)
"""Most bytes of scanlines: what one IDAT chunk can hold (2^31 - 1), stored, with room for the blocks' headers."""


class _Pass(NamedTuple):
    """One of Adam7's reduced pictures: pixels (y, x), (y, x + dx), ... of the whole; its size in pixels."""

    y: int
    x: int
    dy: int
    dx: int
    height: int
    width: int


_ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


def decode_png_samples(file: PngFile, info: ImageInfo, name: str, out: Pixels | None = None) -> Pixels:
    """Return the stored samples, unscaled: uint8 (height, width, samples per pixel); palettes give indices.

    Args:
        file: a file that `check_png` has passed.
        info: what `probe_png` said of it; of at most 8 bits per sample.
        name: the file's name in messages.
        out: memory of that shape that the samples may be put into.

    Raises:
        InputError: the compressed data are damaged or hold too little or too much.
    """
    passes = _passes(info)
    scanlines = memoryview(_inflate(file.image_data(), sum(_filtered_bytes(part, info) for part in passes), name))
    if not info.interlaced:
        return _decode_pass(scanlines, passes[0], info, name, out)
    samples = np.empty((info.height, info.width, info.channels), np.uint8)
    start = 0
    for part in passes:
        stop = start + _filtered_bytes(part, info)
        samples[part.y :: part.dy, part.x :: part.dx] = _decode_pass(scanlines[start:stop], part, info, name)
        start = stop
    return samples


def decode_png_image(file: PngFile, info: ImageInfo, channels: int, name: str, out: Pixels | None = None) -> Pixels:
    """Return colours: uint8 (height, width, channels), channels 1 for a grey file, 3 (RGB) or 4 (RGBA) for any.

    Arguments and errors are those of `decode_png_samples`.
    """
    is_verbatim = info.channels == channels and info.bit_depth == 8 and not info.palette
    samples = decode_png_samples(file, info, name, out if is_verbatim else None)
    if is_verbatim:
        return samples
    if info.palette:
        return _palette(file, samples, channels, name)[samples[..., 0]]
    colours = np.empty((info.height, info.width, channels), np.uint8)
    if channels == 4:
        colours[..., 3] = samples[..., -1] if info.channels == 2 else _opacity(file, samples, info, name)
    scale = 255 // ((1 << info.bit_depth) - 1)  # 1, 2 and 4 bits go to 255 exactly (13.12)
    grey_or_rgb = samples[..., :1] if info.channels < 3 else samples[..., :3]
    np.multiply(grey_or_rgb, np.uint8(scale), out=colours[..., : min(channels, 3)])
    return colours


def encode_png_pixels(pixels: Pixels) -> bytes:
    """Return uint8 (height, width, 1, 3 or 4), C-contiguous, not empty, as a PNG file.

    Every row has filter 2 (up), deflated by zlib with matches of distance 1 only (Z_RLE). On street scenes that makes
    masks a third smaller than cv2's, and masks and pictures a little faster. ISA-L is seven and four times as fast, but
    was seen once, in one process and its forks, to give other bytes for the same pixels, for a reason that was not
    found. Runs of distance 1 need no table of earlier bytes that could differ: same pixels, same bytes.
    """
    height, width, channels = pixels.shape
    rows = pixels.reshape(height, width * channels)
    filtered = np.empty((height, 1 + width * channels), np.uint8)
    filtered[:, 0] = 2
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    return _png_file(width, height, channels, _deflate(filtered))


def _deflate(scanlines: Pixels) -> bytes:
    deflater = zlib.compressobj(_DEFLATE_LEVEL, strategy=zlib.Z_RLE)
    return deflater.compress(scanlines.data) + deflater.flush()


def _passes(info: ImageInfo) -> list[_Pass]:
    height, width = info.height, info.width
    if not info.interlaced:
        return [_Pass(0, 0, 1, 1, height, width)]
    parts = [_Pass(y, x, dy, dx, -(-(height - y) // dy), -(-(width - x) // dx)) for y, x, dy, dx in _ADAM7]
    return [part for part in parts if part.height > 0 and part.width > 0]


def _row_bytes(part: _Pass, info: ImageInfo) -> int:
    return (part.width * info.channels * info.bit_depth + 7) // 8


def _filtered_bytes(part: _Pass, info: ImageInfo) -> int:
    return part.height * (1 + _row_bytes(part, info))


def _inflate(stream: bytes, num_bytes: int, name: str) -> bytes:
    """Return exactly `num_bytes`; the limit also keeps a small file from filling the memory."""
    if num_bytes > MAX_SCANLINE_BYTES:
        raise refuse(name, f"PNG with {num_bytes} bytes of pixels", f"at most {MAX_SCANLINE_BYTES}", "tile it")
    library = load_zlib()
    if num_bytes <= _MAX_INFLATION * len(stream) <= min(_MAX_EXCESS * num_bytes, _MAX_UNLIMITED_BYTES):
        # One call: an object that stops at a limit takes five, and each waits for the interpreter's lock.
        with contextlib.suppress(library.error):  # told of below
            inflated: bytes = library.decompress(stream, bufsize=num_bytes + 1)
            if len(inflated) == num_bytes:
                return inflated
    inflater = library.decompressobj()
    try:
        scanlines: bytes = inflater.decompress(stream, num_bytes + 1)
    except library.error as exc:
        raise refuse(name, f"PNG with damaged compressed data ({exc})", "intact data", RESTORE) from exc
    if len(scanlines) != num_bytes or not inflater.eof:  # not eof: Adler-32 has not been compared
        found = (
            f"PNG whose data end at {len(scanlines)} bytes of pixels"
            if len(scanlines) < num_bytes
            else "PNG with more pixels than its header says"
        )
        raise refuse(name, found, f"{num_bytes} bytes", RESTORE)
    return scanlines


def _decode_pass(scanlines: memoryview, part: _Pass, info: ImageInfo, name: str, out: Pixels | None = None) -> Pixels:
    """Return one pass's samples, uint8 (part.height, part.width, info.channels)."""
    row_bytes = _row_bytes(part, info)
    # Filters work on bytes: samples under 8 bits count as one-byte pixels there (9.2), whatever they mean.
    bytes_per_pixel = info.channels if info.bit_depth == 8 else 1
    filtered = np.frombuffer(scanlines, np.uint8).reshape(part.height, 1 + row_bytes)
    rows = undo_uniform_filters(filtered, bytes_per_pixel, out if info.bit_depth == 8 else None)
    if rows is None:
        rows = _unfilter(scanlines, part.height, row_bytes // bytes_per_pixel, bytes_per_pixel, name)
    if info.bit_depth == 8:
        return rows
    return _unpack(rows[..., 0], part.width, info.bit_depth)


def _unfilter(scanlines: memoryview, height: int, width: int, channels: int, name: str) -> Pixels:
    """Undo the scanline filters by wrapping them, stored, in a plain PNG file for libspng or cv2."""
    highest = int(np.frombuffer(scanlines, np.uint8)[:: 1 + width * channels].max())
    if highest > 4:
        raise refuse(name, f"PNG with a row of filter type {highest}", "filter types 0 to 4", RESTORE)
    file = _png_file(width, height, channels, *_stored_stream(scanlines))
    # libspng is quicker by a third, but holds the interpreter's lock: threads would decode one after the other.
    pyspng = load_pyspng() if threading.current_thread() is threading.main_thread() else None
    try:
        pixels: Pixels = pyspng.load(file, _SPNG_FORMAT[channels]) if pyspng else decode_with_cv2(file, channels)
    except (RuntimeError, ValueError) as exc:
        raise refuse(name, f"PNG that does not decode ({exc})", "intact data", RESTORE) from exc
    if pyspng and channels == 2:
        pixels = np.ascontiguousarray(pixels[..., 2:])  # the grey value stands in all three colours
    return pixels.reshape(height, width, channels)


def _stored_stream(data: memoryview) -> list[bytes]:
    """Return `data` as the pieces of a zlib stream that only stores it (RFC 1950, RFC 1951)."""
    pieces: list[Any] = [b"\x78\x01"]
    for start in range(0, len(data), _STORED_BYTES):
        block = data[start : start + _STORED_BYTES]
        is_last = start + _STORED_BYTES >= len(data)
        pieces += [
            bytes([is_last]),
            len(block).to_bytes(2, "little"),
            (len(block) ^ 0xFFFF).to_bytes(2, "little"),
            block,
        ]
    pieces.append(load_zlib().adler32(data).to_bytes(4, "big"))
    return pieces


def _png_file(width: int, height: int, channels: int, *stream: bytes) -> bytes:
    header = b"".join(
        [width.to_bytes(4, "big"), height.to_bytes(4, "big"), bytes([8, _COLOUR_TYPE[channels], 0, 0, 0])]
    )
    return b"".join([SIGNATURE, *make_chunk(b"IHDR", header), *make_chunk(b"IDAT", *stream), *make_chunk(b"IEND")])


def _unpack(rows: Pixels, width: int, depth: int) -> Pixels:
    """Return samples of 1, 2 or 4 bits, packed from the high bits down (7.2), as uint8 (height, width, 1)."""
    shifts = np.arange(8 - depth, -1, -depth, dtype=np.uint8)
    samples = (rows[..., None] >> shifts) & np.uint8((1 << depth) - 1)
    return np.ascontiguousarray(samples.reshape(len(rows), -1)[:, :width, None])


def _palette(file: PngFile, indices: Pixels, channels: int, name: str) -> Pixels:
    """Return the colour table, uint8 (entries, channels), long enough for every index."""
    colours = np.frombuffer(file.first(b"PLTE") or b"", np.uint8)
    if len(colours) % 3 or len(colours) // 3 <= int(indices.max()):
        found = f"palette PNG with {len(colours)} bytes of colours and index {int(indices.max())}"
        raise refuse(name, found, "a colour for every index", RESTORE)
    table = np.full((len(colours) // 3, 4), 255, np.uint8)
    table[:, :3] = colours.reshape(-1, 3)
    alpha = np.frombuffer(file.first(b"tRNS") or b"", np.uint8)[: len(table)]
    table[: len(alpha), 3] = alpha  # entries without a value are opaque (11.3.1.1)
    return np.ascontiguousarray(table[:, :channels])


def _opacity(file: PngFile, samples: Pixels, info: ImageInfo, name: str) -> Any:
    """Return 0 where a pixel has exactly the transparent colour that tRNS names, else 255."""
    key = file.first(b"tRNS")
    if key is None:
        return 255
    if len(key) != 2 * info.channels:
        raise refuse(name, f"PNG with a tRNS chunk of {len(key)} bytes", f"{2 * info.channels}", RESTORE)
    transparent = np.frombuffer(key, ">u2") & ((1 << info.bit_depth) - 1)  # only the low bits count (11.3.1.1)
    return np.where((samples == transparent).all(axis=-1), 0, 255)
