"""PNG files to pixels and back: the same pixels as from cv2, up to seven times as fast."""

from __future__ import annotations

import contextlib
import functools
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from datamat.codecs.headers import RESTORE, ImageInfo, exif_orientation, refuse
from datamat.codecs.libraries import corner_sums_with_cv2, decode_with_cv2, load_pyspng, load_zlib
from datamat.errors import InputError
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from datamat.codecs.headers import Pixels

# ---------------------------------------------------------------- chunks
#
# The structure of a PNG file: chunks, header, compressed scanlines, but no pixels.
#
# Section numbers below refer to Portable Network Graphics (Third Edition), https://www.w3.org/TR/png-3/.


SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CRC = struct.Struct(">I")
_FRAME = struct.Struct(">I4s")  # length of the data, type; then follow data and CRC-32 (5.3)
_HEADER = struct.Struct(">IIBBBBB")  # width, height, depth, colour type, compression, filter, interlace (11.2.1)
_MAX_CHUNKS = 1 << 18  # a file of empty chunks would exhaust memory; encoders write 8 KiB or more into each

COLOUR_TYPES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Colour type (grey, RGB, palette, grey and alpha, RGBA) to samples per pixel (11.2.1, table 12)."""

_TELLING = {b"tRNS", b"eXIf", b"acTL"}  # chunks that say more than the header
_DEPTHS = {0: {1, 2, 4, 8, 16}, 2: {8, 16}, 3: {1, 2, 4, 8}, 4: {8, 16}, 6: {8, 16}}


class Chunk(NamedTuple):
    """One chunk: its type, and where its data begin and end in the file."""

    kind: bytes
    start: int
    stop: int


@frozen()
class PngFile:
    """A PNG file split into chunks, not yet checked.

    Attributes:
        data: content of the file.
        chunks: chunks in file order, up to the end of the file; the last one is IEND in a complete file.
    """

    data: bytes
    chunks: tuple[Chunk, ...]

    def first(self, kind: bytes) -> bytes | None:
        """Return the data of the first chunk of a kind, or None if there is none."""
        return next((self.data[start:stop] for found, start, stop in self.chunks if found == kind), None)

    def image_data(self) -> bytes:
        """Return the zlib stream that all IDAT chunks form."""
        view = memoryview(self.data)
        return b"".join([view[start:stop] for kind, start, stop in self.chunks if kind == b"IDAT"])


def make_chunk(kind: bytes, *parts: bytes) -> list[bytes]:
    """Return the pieces of a chunk: length and type, the given parts of its data, CRC-32."""
    crc32 = load_zlib().crc32
    crc = crc32(kind)
    for part in parts:
        crc = crc32(part, crc)
    return [_FRAME.pack(sum(map(len, parts)), kind), *parts, crc.to_bytes(4, "big")]


def walk_chunks(data: bytes, name: str) -> PngFile:
    """Return the chunks of a file up to IEND or the first truncated one; bytes after IEND are ignored."""
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
    """Return the content of the header and the types of chunks; `whole` also checks that all chunks are intact."""
    info = _info_of_header(data, name)
    if not whole:
        return info_of_chunks(walk_chunks(data, name), name)
    return info if _is_plain(data) else info_of_chunks(check_png(data, name), name)


def info_of_chunks(file: PngFile, name: str) -> ImageInfo:
    """Return what the header and the types of chunks say."""
    info = _info_of_header(file.data, name)
    kinds = {chunk[0] for chunk in file.chunks}
    if kinds.isdisjoint(_TELLING):
        return info
    return info._replace(
        alpha=info.alpha or b"tRNS" in kinds,
        orientation=exif_orientation(file.first(b"eXIf") or b""),
        animated=b"acTL" in kinds,
    )


def _info_of_header(data: bytes, name: str) -> ImageInfo:
    head = data[len(SIGNATURE) : len(SIGNATURE) + 8 + _HEADER.size]
    if len(head) < 8 + _HEADER.size or not head.startswith(b"\0\0\0\rIHDR"):
        raise refuse(name, "PNG signature without a complete IHDR chunk", "a whole PNG file", RESTORE)
    info = _parsed_header(bytes(head[8:]))
    if info is None:
        _, _, depth, colour, *methods = _HEADER.unpack_from(head, 8)
        found = f"PNG header with colour type {colour}, depth {depth}, methods {', '.join(map(str, methods))}"
        raise refuse(name, found, "a combination that PNG defines", RESTORE)
    return info


# Cached, because the files of a dataset often share a header, and threads parse headers one at a time.
@functools.lru_cache(maxsize=1 << 8)
def _parsed_header(header: bytes) -> ImageInfo | None:
    """Return what the data of IHDR say, or None if PNG does not define them."""
    width, height, depth, colour, compression, filtering, interlace = _HEADER.unpack(header)
    if depth not in _DEPTHS.get(colour, ()) or compression or filtering or interlace > 1:
        return None
    return ImageInfo(
        encoding="png",
        height=height,
        width=width,
        channels=COLOUR_TYPES[colour],
        bit_depth=depth,
        palette=colour == 3,
        alpha=colour >= 4,
        interlaced=interlace == 1,
    )


def check_png(data: bytes, name: str) -> PngFile:
    """Return the chunks of a file after checking that they are complete, in order, and have the right CRCs.

    Raises:
        InputError: the file is truncated, a CRC is wrong, a critical chunk is unknown, or IDAT or PLTE are misplaced.
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


def _is_plain(data: bytes) -> bool:
    """Return True if `check_png` accepts a file whose header says all of it, in half the time.

    A picture has a chunk for each 8 KB, and a file that is stored untouched costs little else.
    """
    crc32, unpack, crc_of = load_zlib().crc32, _FRAME.unpack_from, _CRC.unpack_from
    view = memoryview(data)
    kinds: list[bytes] = []
    at, size, kind, num_chunks = len(SIGNATURE), len(data), b"", 0
    while kind != b"IEND":
        num_chunks += 1
        if at + 12 > size or num_chunks > _MAX_CHUNKS:
            return False
        before = kind
        length, kind = unpack(data, at)
        stop = at + 8 + length
        if stop + 4 > size or crc32(view[at + 4 : stop]) != crc_of(data, stop)[0]:
            return False
        if kind != b"IDAT" or before != b"IDAT":  # the order of further chunks of pixels is that of the first
            kinds.append(kind)
        at = stop + 4
    return _are_plain(tuple(kinds))


@functools.lru_cache(maxsize=8)  # most files of a dataset have the same ones
def _are_plain(kinds: tuple[bytes, ...]) -> bool:
    """Return True for types of chunks in a valid order, none of which says more than the header."""
    with contextlib.suppress(InputError):
        _check_order(kinds, "")
        return _TELLING.isdisjoint(kinds)
    return False


def _check_order(kinds: Sequence[bytes], name: str) -> None:
    """Refuse what decoders disagree on: a second header or palette, split image data, unknown critical chunks."""
    images = [i for i, kind in enumerate(kinds) if kind == b"IDAT"]
    if not images or images[-1] - images[0] + 1 != len(images):
        raise refuse(name, "PNG without IDAT chunks in one run", "the data of one image", RESTORE)
    palettes = [i for i, kind in enumerate(kinds) if kind == b"PLTE"]
    if kinds.count(b"IHDR") != 1 or len(palettes) > 1 or any(i > images[0] for i in palettes):
        raise refuse(name, "PNG with misplaced IHDR or PLTE chunks", "each once, before the pixels", RESTORE)
    # Bit 5 of the first letter is clear for chunks that a decoder must understand (5.4).
    unknown = {kind for kind in kinds if not kind[0] & 0x20} - {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
    if unknown:
        raise refuse(name, f"PNG with unknown critical chunks {sorted(unknown)}", "a standard PNG", RESTORE)


# ---------------------------------------------------------------- filters
#
# Undoing the filters of PNG scanlines: the sums that libspng computes pixel by pixel, computed for a whole image.
#
# Filter 1 (sub) stores each byte as its difference from the pixel to the left, filter 2 (up) from the pixel above. cv2
# writes only the former, `encode_png` only the latter. A pixel is then the sum, modulo 256, of the bytes stored in its
# row or column up to its position. In a table of sums over all rectangles at the corner (Crow, 1984), which OpenCV
# computes with SIMD, that is the difference of two neighbours. This takes a sixth of libspng's time for masks of
# 480 x 360 and half for RGB, in three calls that let other threads run. Files that mix these filters, or use others, go
# to libraries.
#
# Format: Portable Network Graphics (Third Edition), section 9.2.


_NONE, _SUB, _UP = 0, 1, 2
_STRIP_BYTES = 1 << 20  # of scanlines at a time; their sums take four times the memory
_MOST_IN_LINE = (1 << 31) // 255 - 1  # most pixels in a row or column whose sum fits 32 bits


def undo_uniform_filters(filtered: Pixels, channels: int, out: Pixels | None = None) -> Pixels | None:
    """Return the pixels of scanlines that use filters 0 and 1 only, or 2 only; otherwise None.

    Args:
        filtered: scanlines, uint8 (height, 1 + width * channels), each with its filter type first.
        channels: bytes per pixel, 1 to 4.
        out: memory for the pixels, uint8 (height, width, channels), C-contiguous; None allocates it.

    Example:
        >>> undo_uniform_filters(np.array([[0, 1, 2, 3], [1, 1, 2, 3]], np.uint8), 1)[..., 0].tolist()
        [[1, 2, 3], [1, 3, 6]]
    """
    kinds = filtered[:, 0].tobytes()
    num_plain, num_sub = kinds.count(_NONE), kinds.count(_SUB)
    stored = filtered[:, 1:].reshape(len(filtered), -1, channels)
    height, width = stored.shape[:2]
    is_up = kinds.count(_UP) == height
    if not (is_up or num_plain + num_sub == height) or max(height, width) > _MOST_IN_LINE:
        return None
    pixels = np.empty(stored.shape, np.uint8) if out is None else out
    if num_plain == height:
        pixels[...] = stored
    elif is_up:
        for strip in _strips(width, height * channels):
            sums = corner_sums_with_cv2(stored[:, strip])
            np.subtract(sums[1:, 1:], sums[1:, :-1], out=pixels[:, strip])
    else:
        for strip in _strips(height, width * channels):
            sums = corner_sums_with_cv2(stored[strip])
            np.subtract(sums[1:, 1:], sums[:-1, 1:], out=pixels[strip])
        if num_plain:
            plain = np.flatnonzero(filtered[:, 0] == _NONE)
            pixels[plain] = stored[plain]
    return pixels


def _strips(num: int, item_bytes: int) -> Iterator[slice]:
    """Yield slices that together are all of `num` rows or columns, each of about `_STRIP_BYTES`."""
    step = max(1, _STRIP_BYTES // item_bytes)
    for start in range(0, num, step):
        yield slice(start, start + step)


# ---------------------------------------------------------------- decoding and encoding
#
# cv2 spends most of its time inflating, so ISA-L inflates the scanlines here. A filter that all rows share is undone by
# the sums above. Other scanlines go, as a PNG file whose deflate stream is only *stored*, to libspng, which undoes the
# filters with SIMD, or in threads to cv2. These libraries always see the same simple kind of file: no palette, not
# interlaced; pixels of 6 and 8 bytes as 16 bits, all others as 8. Palettes, small depths, transparent colours and Adam7
# are interpreted here, in numpy, so that the class ids of a mask do not depend on the library.
#
#     file -> chunks, CRCs -> zlib stream -> scanlines -> per pass: rows of bytes -> samples -> colours
#                             ISA-L                       sums, libspng, cv2         numpy
#
# CRCs, Adler-32, the exact number of bytes and filter types are all checked. zlib deflates arrays.
#
# Measured in ms on grey masks of 480 x 360, against cv2.imdecode 5.0, which gives the same pixels: one filter in all
# rows, as cv2 and this module write it, 0.16 against 0.40 to 0.63; palettes, as Pillow writes them, 0.05 against 0.39;
# mixed filters, as Pillow writes grey, 0.37 against 0.35, and in a thread 0.38 against 0.30. Of the latter, both spend
# 0.28 in libpng, undoing filters. To pass such files to cv2 unchanged, after inflating them for the checks, would save
# 0.02, and cost as much at 960 x 720, which zlib inflates more slowly. Without the checks, cv2 would accept a file with
# more pixels than its header declares, and libpng would write to stderr about other damage.


_COLOUR_TYPE = {1: 0, 2: 4, 3: 2, 4: 6}  # samples per pixel to the colour type that has as many
_SPNG_FORMAT = {1: "L", 2: "RGBA", 3: "RGB", 4: "RGBA"}  # libspng has no 8-bit grey with alpha
_DEFLATE_LEVEL = 1
_MOST_SUMMED = 4  # bytes of a pixel for which OpenCV computes sums
_MAX_INFLATION = 1032  # the limit of deflate (https://zlib.net/zlib_tech.html)
_MAX_EXCESS = 64  # a stream that could inflate to this many times the expected size,
_MAX_UNLIMITED_BYTES = 64 << 20  # or to this many bytes, is inflated with a limit
_STORED_BYTES = 65535  # most bytes in a stored deflate block, RFC 1951 section 3.2.4
MAX_SCANLINE_BYTES = (1 << 31) - (1 << 20)
"""Most bytes of scanlines: one IDAT chunk (2^31 - 1) when stored, less the headers of blocks."""


class _InterlacePass(NamedTuple):
    """One of Adam7's reduced images: pixels (y, x), (y, x + dx), ... of the whole, and its size in pixels."""

    y: int
    x: int
    dy: int
    dx: int
    height: int
    width: int


_ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


def decode_png_samples(file: PngFile, info: ImageInfo, name: str, out: Pixels | None = None) -> Pixels:
    """Return the stored samples, unscaled: (height, width, samples per pixel); indices for palettes.

    Args:
        file: chunks of the file, which `check_png` has accepted.
        info: header that `probe_png` returned.
        name: name of the file in messages.
        out: memory of the result's shape and dtype that the samples may be decoded into.

    Returns:
        uint16 for 16 bits per sample, else uint8.

    Raises:
        InputError: the compressed data are damaged, or hold too few or too many bytes.
    """
    passes = _passes(info)
    scanlines = memoryview(_inflate(file.image_data(), sum(_filtered_bytes(part, info) for part in passes), name))
    if not info.interlaced:
        return _decode_pass(scanlines, passes[0], info, name, out)
    samples = np.empty((info.height, info.width, info.channels), np.uint16 if info.bit_depth > 8 else np.uint8)
    start = 0
    for part in passes:
        stop = start + _filtered_bytes(part, info)
        samples[part.y :: part.dy, part.x :: part.dx] = _decode_pass(scanlines[start:stop], part, info, name)
        start = stop
    return samples


def decode_png_image(file: PngFile, info: ImageInfo, channels: int, name: str, out: Pixels | None = None) -> Pixels:
    """Return colours (height, width, channels): 1 channel or 2 (with alpha) for a grey file, 3 or 4 for any.

    Other arguments and errors are those of `decode_png_samples`.
    """
    is_verbatim = info.channels == channels and info.bit_depth >= 8 and not info.palette
    samples = decode_png_samples(file, info, name, out if is_verbatim else None)
    if is_verbatim:
        return samples
    if info.palette:
        return _palette(file, samples, channels, name)[samples[..., 0]]
    colours = np.empty((info.height, info.width, channels), samples.dtype)
    if channels in {2, 4}:
        colours[..., -1] = samples[..., -1] if info.channels == 2 else _opacity(file, samples, info, name)
    scale = max(255 // ((1 << info.bit_depth) - 1), 1)  # 1, 2 and 4 bits go to 255 exactly (13.12)
    grey_or_rgb = samples[..., :1] if info.channels < 3 else samples[..., :3]
    np.multiply(grey_or_rgb, samples.dtype.type(scale), out=colours[..., : 3 if channels > 2 else 1])
    return colours


def encode_png_pixels(pixels: Pixels) -> bytes:
    """Return an array, uint8 or uint16 (height, width, 1 to 4), C-contiguous and not empty, as a PNG file.

    Every row has filter 2 (up); zlib deflates them with matches of distance 1 only (Z_RLE). For street scenes, masks
    are a third smaller than cv2's, and masks and images are a little faster to encode. ISA-L is seven and four times as
    fast, but was once seen, in one process and its forks, to make different bytes of the same pixels, for a reason that
    was not found. Runs of distance 1 need no table of earlier bytes, which could differ: equal pixels, equal bytes.
    """
    height, width, channels = pixels.shape
    stored = pixels.astype(">u2") if pixels.dtype == np.uint16 else pixels  # (7.1): the high byte first
    rows = stored.view(np.uint8).reshape(height, width * channels * pixels.itemsize)
    filtered = np.empty((height, 1 + rows.shape[1]), np.uint8)
    filtered[:, 0] = 2
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    deflater = zlib.compressobj(_DEFLATE_LEVEL, strategy=zlib.Z_RLE)
    stream = deflater.compress(filtered.data) + deflater.flush()
    return _png_file(width, height, channels, stream, depth=8 * pixels.itemsize)


def _passes(info: ImageInfo) -> list[_InterlacePass]:
    height, width = info.height, info.width
    if not info.interlaced:
        return [_InterlacePass(0, 0, 1, 1, height, width)]
    parts = [_InterlacePass(y, x, dy, dx, -(-(height - y) // dy), -(-(width - x) // dx)) for y, x, dy, dx in _ADAM7]
    return [part for part in parts if part.height > 0 and part.width > 0]


def _row_bytes(part: _InterlacePass, info: ImageInfo) -> int:
    return (part.width * info.channels * info.bit_depth + 7) // 8


def _filtered_bytes(part: _InterlacePass, info: ImageInfo) -> int:
    return part.height * (1 + _row_bytes(part, info))


def _inflate(stream: bytes, num_bytes: int, name: str) -> bytes:
    """Return exactly `num_bytes`; the limit also keeps a small file from exhausting memory."""
    if num_bytes > MAX_SCANLINE_BYTES:
        raise refuse(name, f"PNG with {num_bytes} bytes of pixels", f"at most {MAX_SCANLINE_BYTES}", "tile it")
    library = load_zlib()
    if num_bytes <= _MAX_INFLATION * len(stream) <= min(_MAX_EXCESS * num_bytes, _MAX_UNLIMITED_BYTES):
        # One call: a decompressor with a limit takes five, and each waits for the interpreter's lock.
        with contextlib.suppress(library.error):  # raised below, with its reason
            inflated: bytes = library.decompress(stream, bufsize=num_bytes + 1)
            if len(inflated) == num_bytes:
                return inflated
    inflater = library.decompressobj()
    try:
        scanlines: bytes = inflater.decompress(stream, num_bytes + 1)
    except library.error as exc:
        raise refuse(name, f"PNG with damaged compressed data ({exc})", "intact data", RESTORE) from exc
    if len(scanlines) != num_bytes or not inflater.eof:  # without eof, Adler-32 was not compared
        found = (
            f"PNG whose data end at {len(scanlines)} bytes of pixels"
            if len(scanlines) < num_bytes
            else "PNG with more pixels than its header says"
        )
        raise refuse(name, found, f"{num_bytes} bytes", RESTORE)
    return scanlines


def _decode_pass(
    scanlines: memoryview, part: _InterlacePass, info: ImageInfo, name: str, out: Pixels | None = None
) -> Pixels:
    """Return one pass's samples (part.height, part.width, info.channels)."""
    row_bytes = _row_bytes(part, info)
    # Filters work on bytes: samples under 8 bits count as one-byte pixels (9.2).
    bytes_per_pixel = max(info.channels * info.bit_depth // 8, 1)
    filtered = np.frombuffer(scanlines, np.uint8).reshape(part.height, 1 + row_bytes)
    # Filter 2 (up) is the same for pixels of any size, and the sums know up to four bytes.
    is_wide = bytes_per_pixel > _MOST_SUMMED
    rows = None
    if not is_wide or set(filtered[:, 0].tolist()) in ({_NONE}, {_UP}):
        rows = undo_uniform_filters(filtered, 1 if is_wide else bytes_per_pixel, out if info.bit_depth == 8 else None)
    if rows is None:
        rows = _unfilter(scanlines, part.height, row_bytes // bytes_per_pixel, bytes_per_pixel, name)
    if info.bit_depth == 8:
        return rows
    if info.bit_depth == 16:
        pixels = np.empty((part.height, part.width, info.channels), np.uint16) if out is None else out
        pixels[...] = rows.reshape(part.height, row_bytes).view(">u2").reshape(pixels.shape)
        return pixels
    return _unpack(rows[..., 0], part.width, info.bit_depth)


def _unfilter(scanlines: memoryview, height: int, width: int, channels: int, name: str) -> Pixels:
    """Undo the filters of scanlines by wrapping these, stored, in a plain PNG file for libspng or cv2."""
    highest = int(np.frombuffer(scanlines, np.uint8)[:: 1 + width * channels].max())
    if highest > 4:
        raise refuse(name, f"PNG with a row of filter type {highest}", "filter types 0 to 4", RESTORE)
    samples, depth = (channels, 8) if channels in _SPNG_FORMAT else (channels // 2, 16)
    file = _png_file(width, height, samples, *_stored_stream(scanlines), depth=depth)
    # libspng is faster by a third, but holds the interpreter's lock: threads would decode one after another.
    pyspng = (
        load_pyspng() if threading.current_thread() is threading.main_thread() and channels in _SPNG_FORMAT else None
    )
    try:
        pixels: Pixels = pyspng.load(file, _SPNG_FORMAT[channels]) if pyspng else decode_with_cv2(file, samples, depth)
    except (RuntimeError, ValueError) as exc:
        raise refuse(name, f"PNG that does not decode ({exc})", "intact data", RESTORE) from exc
    if pyspng and channels == 2:
        pixels = np.ascontiguousarray(pixels[..., 2:])  # all three colours hold the grey value
    if depth == 16:
        pixels = pixels.astype(">u2").view(np.uint8)
    return pixels.reshape(height, width, channels)


def _stored_stream(data: memoryview) -> list[bytes]:
    """Return the pieces of a zlib stream that stores `data` uncompressed (RFC 1950, RFC 1951)."""
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


def _png_file(width: int, height: int, channels: int, *stream: bytes, depth: int = 8) -> bytes:
    header = b"".join(
        [width.to_bytes(4, "big"), height.to_bytes(4, "big"), bytes([depth, _COLOUR_TYPE[channels], 0, 0, 0])]
    )
    return b"".join([SIGNATURE, *make_chunk(b"IHDR", header), *make_chunk(b"IDAT", *stream), *make_chunk(b"IEND")])


def _unpack(rows: Pixels, width: int, depth: int) -> Pixels:
    """Return samples of 1, 2 or 4 bits, packed from the highest bit down (7.2), as uint8 (height, width, 1)."""
    shifts = np.arange(8 - depth, -1, -depth, dtype=np.uint8)
    samples = (rows[..., None] >> shifts) & np.uint8((1 << depth) - 1)
    return np.ascontiguousarray(samples.reshape(len(rows), -1)[:, :width, None])


def _palette(file: PngFile, indices: Pixels, channels: int, name: str) -> Pixels:
    """Return the colour table, uint8 (entries, channels); refuse one too short for an index."""
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
    """Return 0 for each pixel with exactly the transparent colour in tRNS, and the largest sample for others."""
    key = file.first(b"tRNS")
    if key is None:
        return np.iinfo(samples.dtype).max
    if len(key) != 2 * info.channels:
        raise refuse(name, f"PNG with a tRNS chunk of {len(key)} bytes", f"{2 * info.channels}", RESTORE)
    transparent = np.frombuffer(key, ">u2") & ((1 << info.bit_depth) - 1)  # only the low bits count (11.3.1.1)
    return np.where((samples == transparent).all(axis=-1), 0, np.iinfo(samples.dtype).max)
