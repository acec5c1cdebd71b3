"""What a file says of its image before it is decoded: format, size, orientation, and damage that decoders hide."""

from __future__ import annotations

import functools
import itertools
import re
import struct
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final

import numpy as np

from datamat.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    Pixels = NDArray[Any]

# ---------------------------------------------------------------- what all encodings share
#
# The content of a header, and the refusals and EXIF rules that all encodings share.


MAX_PIXELS = 178_956_970
"""Most pixels (width * height) accepted by default: Pillow's limit against decompression bombs, 512 MiB in RGB."""

RESTORE = "restore the file from its source, or take it out of the index"
"""The remedy for a damaged file."""

_ORIENTATION_TAG = 0x0112
_SHORT = 3  # TIFF field type, 16 bits unsigned


class ImageInfo(NamedTuple):
    """The header of an encoded image; reading it decodes no pixel.

    Attributes:
        encoding: file format.
        height: number of rows as stored, before `orientation` is applied.
        width: number of columns as stored, before `orientation` is applied.
        channels: samples per pixel as stored: 1 grey or palette index, 2 grey and alpha, 3 RGB, 4 RGBA or CMYK.
        bit_depth: bits per stored sample.
        palette: whether the samples are indices into a colour table.
        alpha: whether the image has transparency, as a channel or as a transparent colour.
        orientation: EXIF orientation, 1 (upright) to 8.
        animated: whether there is more than one frame.
        cmyk: whether the colours are inks (CMYK or YCCK), not light.
        interlaced: whether the file is a PNG with Adam7 passes.
        is_float: whether the samples are floating-point numbers.
    """

    encoding: Literal["png", "jpeg", "webp", "bmp", "tiff"]
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
    is_float: bool = False


def refuse(name: str, found: str, wanted: str, remedy: str) -> InputError:
    """Return the error for an image called `name`: a path, key or field, or empty."""
    place = f"{name!r}: " if name else ""
    return InputError(f"{place}{found}; want {wanted}; {remedy}")


def exif_orientation(exif: bytes | memoryview) -> int:
    r"""Return the orientation, 1 to 8, in an EXIF block (a TIFF file without an image); 1 if there is none.

    A broken EXIF block is no reason to refuse an image: its pixels are unaffected, and every viewer shows them as
    stored.
    Format: TIFF 6.0, section 2; tag 0x0112 of CIPA DC-008 (Exif 3.0), section 4.6.5.

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
    """Return `pixels`, (height, width, ...), turned upright from EXIF `orientation` 1 to 8; C-contiguous."""
    if orientation >= 5:  # 5 to 8 store columns as rows
        pixels = pixels.swapaxes(0, 1)
    if orientation in {2, 3, 6, 7}:
        pixels = pixels[:, ::-1]
    if orientation in {3, 4, 7, 8}:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


# ---------------------------------------------------------------- BMP
#
# Why own code reads the headers of BMP and WebP: size, alpha, orientation and frames must be known before a pixel is
# allocated. Measured at 480 x 360 on one core, this takes 2 to 7 us. OpenCV 5.0 reports none of it without decoding
# (25 us to 20 ms), returns the first frame of an animation, and writes to stderr about a truncated file. imagesize 2.0
# reports width and height only. Pillow 13, which is not a dependency, reports everything but truncation, in 6 to 74 us,
# after an import of at least 14 ms in each worker.
#
# BMP headers. Format: Microsoft, "Bitmap Storage" and BITMAPINFOHEADER, BITMAPV4HEADER in wingdi.h.


_BITFIELDS = 3  # compression: masks locate each colour in a pixel; 0 is plain
_USUAL_MASKS = struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)  # as in plain files; cv2 4 supports no others
_CHANNELS = {1: 1, 4: 1, 8: 1, 24: 3, 32: 4}  # bits per pixel to samples; up to 8 bits they are palette indices
_INFO = struct.Struct("<IiiHHI")  # size, width, height, planes, bits per pixel, compression


def probe_bmp(data: bytes, name: str, *, whole: bool) -> ImageInfo:
    """Return the content of the headers; `whole` also checks that the file holds all rows."""
    if len(data) < 14 + 40 or int.from_bytes(data[14:18], "little") < 40:
        raise refuse(name, "BMP without a complete header of Windows 3 or later", "a whole BMP file", RESTORE)
    header_bytes, width, height, _, bits, compression = _INFO.unpack_from(data, 14)
    is_usual = compression == 0 or (compression == _BITFIELDS and bits == 32 and data[54:66] == _USUAL_MASKS)
    if not is_usual or bits not in _CHANNELS:
        found = f"BMP of {bits} bits per pixel with compression {compression}, or unusual colour masks"
        raise refuse(name, found, "plain 1, 4, 8, 24 or 32 bits", "save it as PNG")
    offset = int.from_bytes(data[10:14], "little")
    wanted = offset + (width * bits + 31) // 32 * 4 * abs(height)
    if whole and (len(data) < wanted or offset < 14 + header_bytes):
        found = f"BMP of {len(data)} bytes with pixels from byte {offset} on"
        raise refuse(name, found, f"{wanted} bytes", RESTORE)
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


# ---------------------------------------------------------------- WebP
#
# WebP headers. Format: RFC 9649, section 2 (container) and 3.4 (lossless header); RFC 6386, section 9.1 (lossy).


_HEADERS = {b"VP8X", b"VP8 ", b"VP8L", b"ANIM", b"EXIF"}
_ALPHA_FLAG, _ANIMATION_FLAG = 0x10, 0x02


def probe_webp(data: bytes, name: str, *, whole: bool) -> ImageInfo:
    """Return the content of the chunks; `whole` also checks the length of the file."""
    declared, end = 8 + _uint(data[4:8]), 0
    chunks: dict[bytes, bytes] = {}
    for kind, start, stop in _chunks(data):
        end = stop
        if kind in _HEADERS and kind not in chunks:
            chunks[kind] = data[start:stop] if kind == b"EXIF" else data[start : start + 10]
    if whole and (len(data) < declared or end > declared):  # shorter, or with a chunk that extends past its end
        found = f"WebP of {len(data)} bytes whose container declares {declared}"
        raise refuse(name, found, "a whole file", RESTORE)
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
        raise refuse(name, "WebP without a complete image header", "a whole WebP file", RESTORE)
    exif = chunks.get(b"EXIF", b"").removeprefix(b"Exif\0\0")  # some encoders keep the prefix of JPEG's APP1
    return ImageInfo(
        encoding="webp",
        height=height,
        width=width,
        channels=4 if alpha else 3,
        alpha=alpha,
        orientation=exif_orientation(exif),
        animated=animated or b"ANIM" in chunks,
    )


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, start, declared end) of each chunk in the RIFF container, up to the end of the file."""
    at, size = 12, min(len(data), 8 + _uint(data[4:8]))
    while at + 8 <= size:
        stop = at + 8 + _uint(data[at + 4 : at + 8])
        yield data[at : at + 4], at + 8, stop
        at = stop + stop % 2


def _uint(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


# ---------------------------------------------------------------- TIFF
#
# TIFF files: the first directory. tifffile decodes what passes here; what it would fill in or convert is refused first.
#
# OpenCV decodes TIFF as well, but multiplies the colours of 8-bit RGBA by alpha, mixes up planes, drops the second
# channel of two and writes to stderr about each file that it refuses (5.0).
#
# Format: TIFF 6.0, and its technical notes 1 (trees of directories), 2 (deflate) and 3 (predictor of floats).


_TIFF_ORDERS: dict[bytes, tuple[str, Literal["little", "big"]]] = {b"II*\0": ("<", "little"), b"MM\0*": (">", "big")}
_TIFF_TYPES = {1: ("B", 1), 3: ("H", 2), 4: ("I", 4)}  # the field types of the tags below: bytes, 16 and 32 bits
_UNCOMPRESSED = 1
# None, LZW, deflate (two numbers), PackBits, LZMA, Zstandard.
_TIFF_LOSSLESS = {_UNCOMPRESSED, 5, 8, 32946, 32773, 34925, 50000}
_TIFF_REFUSED = {2: "CCITT", 3: "CCITT", 4: "CCITT", 6: "JPEG", 7: "JPEG", 34712: "JPEG 2000", 50001: "WebP",
                 34887: "LERC"}  # fmt: skip
_TIFF_COLOURS = {0: "white is zero", 1: "black is zero", 2: "RGB", 3: "palette"}
_TIFF_OTHER_COLOURS = {4: "a transparency mask", 5: "inks (CMYK)", 6: "YCbCr", 8: "Lab", 32803: "raw sensor data"}
_PALETTE_COLOURS = 3
_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _COLOURS = 254, 256, 257, 258, 259, 262
_ORDER_OF_BITS, _STRIPS, _SAMPLES, _ROWS, _STRIP_BYTES, _PLANES = 266, 273, 277, 278, 279, 284
_PREDICTOR, _COLOUR_MAP, _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 317, 320, 322, 323, 324, 325
_EXTRA_SAMPLES, _SAMPLE_FORMAT = 338, 339
_UNSIGNED, _FLOAT = 1, 3
_REDUCED = 1  # bit of `_SUBFILE`: a smaller version of another image of the file
_PREMULTIPLIED = 1
_MAX_SEGMENTS = 1 << 20

_Tags: TypeAlias = "dict[int, tuple[int, ...]]"


def probe_tiff(data: bytes, name: str, *, whole: bool) -> ImageInfo:
    """Return the content of the first directory; `whole` also checks that the file holds all strips or tiles.

    Raises:
        InputError: a tag is damaged, or the image is of a kind that datamat does not decode.
    """
    if data[:4] not in _TIFF_ORDERS:
        raise refuse(name, "BigTIFF", "TIFF with offsets of 32 bits", "save it as plain TIFF or PNG")
    order, endian = _TIFF_ORDERS[data[:4]]
    tags, following = _directory(data, order, int.from_bytes(data[4:8], endian), name)
    channels = _tag(tags, _SAMPLES, 1)
    if not 1 <= channels <= 4:  # before anything is made of so many
        remedy = "store it as a Tensor, or split it into several fields"
        raise refuse(name, f"TIFF of {channels} channels", "1 to 4", remedy)
    bits = tags.get(_BITS, (1,) * channels)
    kinds = tags.get(_SAMPLE_FORMAT, (_UNSIGNED,) * channels)
    compression, colours = _tag(tags, _COMPRESSION, _UNCOMPRESSED), _tag(tags, _COLOURS, 1)
    if compression not in _TIFF_LOSSLESS:
        found = f"TIFF compressed by {_TIFF_REFUSED.get(compression, f'method {compression}')}"
        raise refuse(name, found, "LZW, deflate, PackBits, LZMA, Zstandard or none", "save it so, or as PNG")
    if colours not in _TIFF_COLOURS or _tag(tags, _ORDER_OF_BITS, 1) != 1:
        found = f"TIFF of {_TIFF_OTHER_COLOURS.get(colours, f'colours {colours} or unusual order of bits')}"
        raise refuse(name, found, "grey, RGB or a palette", "convert it")
    is_float = set(kinds) == {_FLOAT}
    depths = {32} if is_float else {8, 16} if channels > 1 else {1, 2, 4, 8, 16}
    if len(set(bits)) != 1 or len(set(kinds)) != 1 or kinds[0] not in {_UNSIGNED, _FLOAT} or bits[0] not in depths:
        kind = {_UNSIGNED: "unsigned", 2: "signed", _FLOAT: "floating-point"}.get(next(iter(kinds), 0), "other")
        found = f"TIFF of {'/'.join(map(str, bits)) or 'unknown'} bits per sample, {kind}"
        raise refuse(name, found, "8 or 16 bits, or floats of 32", "convert it, or store it as a Tensor")
    if _PREMULTIPLIED in tags.get(_EXTRA_SAMPLES, ()):
        raise refuse(
            name, "TIFF with colours multiplied by alpha", "colours as they are", "save it with straight alpha"
        )
    orientation = _tag(tags, _ORIENTATION_TAG, 1)
    info = ImageInfo(
        encoding="tiff",
        height=_tag(tags, _HEIGHT, 0),
        width=_tag(tags, _WIDTH, 0),
        channels=channels,
        bit_depth=bits[0],
        palette=colours == _PALETTE_COLOURS,
        alpha=channels in {2, 4},
        orientation=orientation if 1 <= orientation <= 8 else 1,
        animated=_has_pages(data, order, following, name),
        is_float=is_float,
    )
    end = _end_of_segments(tags, info, name)
    if whole and end > len(data):
        raise refuse(name, f"TIFF of {len(data)} bytes whose pixels end at byte {end}", "a whole file", RESTORE)
    return info


def _end_of_segments(tags: _Tags, info: ImageInfo, name: str) -> int:
    """Return where the last strip or tile ends; refuse sizes that do not make the image, whose gaps would be filled."""
    is_tiled = _TILES in tags
    height = _tag(tags, _TILE_HEIGHT, 0) if is_tiled else min(_tag(tags, _ROWS, info.height), info.height)
    width = _tag(tags, _TILE_WIDTH, 0) if is_tiled else info.width
    starts = tags.get(_TILES if is_tiled else _STRIPS, ())
    sizes = tags.get(_TILE_BYTES if is_tiled else _STRIP_BYTES, ())
    is_planar = _tag(tags, _PLANES, 1) == 2 and info.channels > 1
    predictor = _tag(tags, _PREDICTOR, 1)
    if (
        not 0 < height * width <= MAX_PIXELS
        or predictor not in ({1, 3} if info.is_float else {1, 2})
        or (predictor > 1 and info.bit_depth < 8)
    ):
        raise refuse(name, "TIFF with damaged sizes of strips, or an unknown predictor", "intact data", RESTORE)
    wanted = -(-info.height // height) * -(-info.width // width) * (info.channels if is_planar else 1)
    if len(starts) != wanted or len(sizes) != wanted:
        raise refuse(name, f"TIFF of {len(starts)} strips or tiles", f"{wanted}, as its size needs", RESTORE)
    is_plain = _tag(tags, _COMPRESSION, _UNCOMPRESSED) == _UNCOMPRESSED
    least = info.height * -(-info.width * info.channels * info.bit_depth // 8) if is_plain else 1
    if not all(sizes) or sum(sizes) < least:
        raise refuse(name, f"TIFF with empty strips or tiles, or {sum(sizes)} bytes", f"{least} or more", RESTORE)
    num_colours = len(tags.get(_COLOUR_MAP, ()))
    if info.palette and (info.channels > 1 or info.bit_depth > 8 or num_colours != 3 << info.bit_depth):
        raise refuse(name, "TIFF palette of the wrong size", "a colour for every index", RESTORE)
    return max(start + size for start, size in zip(starts, sizes, strict=True))


def _directory(data: bytes, order: str, start: int, name: str) -> tuple[_Tags, int]:
    """Return the numbers of each tag of a directory, and where the next directory begins; 0 if there is none."""
    damaged = refuse(
        name, f"TIFF of {len(data)} bytes with a directory that reaches past its end", "a whole file", RESTORE
    )
    if start + 2 > len(data):
        raise damaged
    (count,) = struct.unpack_from(order + "H", data, start)
    end = start + 2 + 12 * count
    if end + 4 > len(data):
        raise damaged
    tags: _Tags = {}
    for at in range(start + 2, end, 12):
        tag, kind, number = struct.unpack_from(order + "HHI", data, at)
        letter, size = _TIFF_TYPES.get(kind, ("", 0))
        if not letter or tag in tags:
            continue  # text, fractions and private data, none of which says where the pixels are
        if number > _MAX_SEGMENTS:
            raise refuse(name, f"TIFF with {number} numbers in tag {tag}", f"at most {_MAX_SEGMENTS}", RESTORE)
        place = at + 8 if number * size <= 4 else struct.unpack_from(order + "I", data, at + 8)[0]
        if place + number * size > len(data):
            raise damaged
        tags[tag] = struct.unpack_from(f"{order}{number}{letter}", data, place)
    return tags, struct.unpack_from(order + "I", data, end)[0]


def _has_pages(data: bytes, order: str, start: int, name: str) -> bool:
    """Return True if a later directory holds another image, and not a smaller version of the first."""
    seen = set[int]()
    while start and start not in seen:
        seen.add(start)
        tags, start = _directory(data, order, start, name)
        if not _tag(tags, _SUBFILE, 0) & _REDUCED:
            return True
    return False


def _tag(tags: _Tags, tag: int, default: int) -> int:
    return next(iter(tags.get(tag, ())), default)


# ---------------------------------------------------------------- JPEG: structure
#
# JPEG files: header and structure. libjpeg-turbo, inside simplejpeg or cv2, does the decoding and encoding.
#
# libjpeg only *warns* about a truncated file and fills the rest with grey, and cv2 drops the warning. So the markers
# are walked here first: a truncated file always lacks its end-of-image marker. Damage inside the compressed data is
# left to the decoder, which finds what is no valid code: three of four flipped bits change pixels without a complaint,
# and only a digest recorded earlier shows them.
#
# Format: ITU-T T.81, annex B.


SOS = 0xDA
_EOI, _APP0, _APP1, _APP14 = 0xD9, 0xE0, 0xE1, 0xEE
_STANDALONE = {0x01, *range(0xD0, 0xD8)}  # TEM and RST0-7 have no length
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # SOF0-15; DHT, JPG and DAC lie between them
_SEQUENTIAL_FRAMES = {0xC0, 0xC1}
_COMMON_FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended, progressive: every decoder supports these
_SOS_MARKER = bytes([0xFF, SOS])
_MOST_HEAD_BYTES = 1 << 10  # of heads that are remembered: longer ones hold EXIF, and differ from file to file
_MAX_SCANS = 500  # thousands of scans in a tiny progressive file cost minutes (libjpeg-turbo's fuzzers stop here)
# In compressed data, 0x00 or a restart marker follows 0xFF; anything else is the next marker (B.1.1.5).
NEXT_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


def probe_jpeg(data: bytes, name: str, *, whole: bool) -> ImageInfo:
    """Return the content of the segments before the first scan.

    Args:
        data: the whole content of a JPEG file.
        name: name of the file in messages.
        whole: whether to also refuse a file without a scan, or whose markers do not lead to its end. Bytes after EOI
            are ignored: cameras and phones append previews, depth maps and video, and every decoder stops at EOI.
    """
    if not whole:
        scan = data.find(_SOS_MARKER, 2, _MOST_HEAD_BYTES)
        if scan > 0:
            end = scan + 2 + int.from_bytes(data[scan + 2 : scan + 4], "big")
            if (known := _info_of_head(bytes(data[: min(end, _MOST_HEAD_BYTES)]))) is not None:
                return known
    return _info_of_segments(data, name, whole=whole)


# Cached, because the files of a dataset often share a head, and threads parse heads one at a time.
@functools.lru_cache(maxsize=1 << 8)
def _info_of_head(head: bytes) -> ImageInfo | None:
    """Return the content of a head that ends with its first scan header; None if it does not, or is damaged."""
    try:
        return _info_of_segments(head, "", whole=False)
    except InputError:
        return None


def _info_of_segments(data: bytes, name: str, *, whole: bool) -> ImageInfo:
    info: ImageInfo | None = None
    orientation: int | None = None
    segments = walk_segments(data, name)
    for marker, start, stop in segments:
        if marker in {SOS, _EOI}:
            if whole:
                _check_scans(marker, segments, name)
            break
        if marker in _FRAMES:
            if info is not None:
                raise refuse(name, "JPEG with two frame headers", "one image", RESTORE)
            info = _frame(marker, data[start:stop], name)
        elif marker == _APP1 and orientation is None and data[start : start + 6] == b"Exif\0\0":
            orientation = exif_orientation(memoryview(data)[start + 6 : stop])
    if info is None:
        raise refuse(name, "JPEG without a frame header before its pixels", "a whole JPEG file", RESTORE)
    return info._replace(orientation=orientation) if orientation else info


def plain_headers(data: bytes) -> bytes:
    """Return a file without the oddities in headers about which libjpeg complains although nothing is damaged.

    libjpeg reads each of them as the value that replaces it here, so the pixels stay the same. It reports only its
    first complaint, and an oddity would hide damage that follows. Some cameras write such files.

    Args:
        data: file that `probe_jpeg` accepted, not in CMYK.
    """
    plain = bytearray(data)
    is_sequential = False
    for marker, start, stop in walk_segments(data, ""):
        if marker in _FRAMES:
            is_sequential = marker in _SEQUENTIAL_FRAMES
        elif marker == _APP0 and data[start : start + 5] == b"JFIF\0" and stop - start >= 14:
            plain[start + 5] = 1  # "unknown JFIF revision number": T.871 has 1.01 and 1.02
        elif marker == _APP14 and data[start : start + 5] == b"Adobe" and stop - start >= 12:
            plain[start + 11] = min(data[start + 11], 1)  # "unknown Adobe color transform code": YCbCr
        elif marker == SOS and is_sequential and stop - start >= 6:
            plain[stop - 3 : stop] = b"\0\x3f\0"  # "Invalid SOS parameters": all 64 coefficients (B.2.3)
    return bytes(plain)


def _check_scans(marker: int, later: Iterable[tuple[int, int, int]], name: str) -> None:
    """Refuse a file without a scan; walking to the end of the image refuses a truncated one."""
    scans = int(marker == SOS)
    for following, _, _ in later:
        scans += following == SOS
        if scans > _MAX_SCANS:
            raise refuse(name, f"JPEG with over {_MAX_SCANS} scans", "an image, not a decompression bomb", RESTORE)
    if not scans:
        raise refuse(name, "JPEG without pixels", "at least one scan", RESTORE)


def walk_segments(data: bytes, name: str) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start of data, end of data) after SOI up to EOI; raise if the file ends first."""
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
        if marker == SOS:
            found = NEXT_MARKER.search(data, at)
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


# ---------------------------------------------------------------- JPEG: damage in the compressed data
#
# Finds damage in the compressed data of a JPEG file, as libjpeg does, for the few files that no strict decoder reads.
#
# simplejpeg is strict and fast, but refuses chroma subsampling that it does not know. cv2 decodes such a file and
# swallows libjpeg's warnings: of 2,878 files that are refused here, cv2 and the search for the end of the image find
# 820. So the codes are walked here, without decoding a pixel: a second per 400 kB, which is acceptable for files this
# rare.
#
# Format: ITU-T T.81, annexes F and G. Damage is what libjpeg-turbo warns about (jdhuff.c, jdphuff.c): a code in no
# table, data that ends early, bytes left over, restart markers out of order, an inconsistent progression of scans.
# libjpeg-turbo itself misses a few of these where it reads many bits at once; this code does not.


_DHT, _DRI = 0xC4, 0xDD
_PROGRESSIVE = 0xC2
_CHECKED_FRAMES = {0xC0, 0xC1, _PROGRESSIVE}
_RESTART = re.compile(rb"\xff+([\xd0-\xd7])")
_STUFFED = re.compile(rb"\xff+\x00")
_SIXTEEN_ZEROS = 15
_PEEK_BITS = 16  # the longest code
_FILL_BYTES = 64  # at a time: shifting a larger number costs more

_Table: TypeAlias = "Sequence[int]"
_TableId: TypeAlias = tuple[int, int]
_Step: TypeAlias = "Callable[[_Bits, int], object]"


class _DamageError(Exception):
    """Damage in the compressed data."""


def find_damage(data: bytes) -> str:
    """Return what is wrong with the compressed data of a file, in libjpeg's words; "" if nothing is.

    Args:
        data: file that `probe_jpeg(whole=True)` accepted, and that decodes.
    """
    tables: dict[_TableId, _Table] = {}
    frame: _Frame | None = None
    interval = 0
    try:
        for marker, start, stop in walk_segments(data, ""):
            segment = data[start:stop]
            if marker == _DHT:
                tables.update(_tables(segment))
            elif marker == _DRI:
                interval = int.from_bytes(segment[:2], "big")
            elif marker in _CHECKED_FRAMES:
                frame = _Frame(segment, is_progressive=marker == _PROGRESSIVE)
            elif marker == SOS and frame is not None:
                scan = _Scan(frame, segment, tables)
                found = NEXT_MARKER.search(data, stop)
                scan.check(_intervals(data[stop : found.start() if found else len(data)]), interval)
    except _DamageError as damage:
        return str(damage)
    except (KeyError, IndexError):  # an undeclared table or component
        return "Corrupt JPEG data: scan of undeclared components or tables"
    return ""


def _tables(segment: bytes) -> Iterator[tuple[_TableId, _Table]]:
    """Yield ((class, number), table).

    A table maps the next 16 bits to the length of the code that they begin with, times 256, plus its symbol; 0 where
    they begin with no code.
    """
    at = 0
    while at + 17 <= len(segment):
        counts = segment[at + 1 : at + 17]
        symbols = iter(segment[at + 17 : at + 17 + sum(counts)])
        table = [0] * (1 << _PEEK_BITS)
        code = 0
        for length, count in enumerate(counts, 1):
            span = 1 << (_PEEK_BITS - length)
            for symbol in itertools.islice(symbols, count):
                table[code : code + span] = [length << 8 | symbol] * span
                code += span
        yield (segment[at] >> 4, segment[at] & 15), table
        at += 17 + sum(counts)


def _intervals(compressed: bytes) -> list[bytes]:
    """Return the data between restart markers, with stuffed bytes removed.

    Raises:
        _DamageError: the markers are out of order.
    """
    found = list(_RESTART.finditer(compressed))
    for number, marker in enumerate(found):
        if marker[1][0] & 7 != number & 7:
            raise _DamageError(f"Corrupt JPEG data: found marker {marker[1][0]:#04x} instead of RST{number & 7}")
    edges = [0, *itertools.chain.from_iterable(marker.span() for marker in found), len(compressed)]
    # Fill bytes may precede a marker; data never ends in 0xff.
    pieces = (compressed[start:stop].rstrip(b"\xff") for start, stop in zip(edges[::2], edges[1::2], strict=True))
    return [_STUFFED.sub(b"\xff", piece) for piece in pieces]


_ENDS_EARLY = "Corrupt JPEG data: premature end of data segment"


@final
class _Bits:
    """The bits of one interval, from the first."""

    __slots__ = ("_at", "_bits", "_data", "_left")

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._bits, self._left = 0, 0

    def code(self, table: _Table) -> int:
        """Read one code and return its symbol."""
        if self._left < _PEEK_BITS:
            self._fill()
        missing = max(0, _PEEK_BITS - self._left)
        entry = table[self._bits << missing >> (self._left + missing - _PEEK_BITS)]
        length = entry >> 8
        if not length or length > self._left:
            raise _DamageError(_ENDS_EARLY if missing else "Corrupt JPEG data: bad Huffman code")
        self._drop(length)
        return entry & 255

    def take(self, count: int) -> int:
        """Read `count` bits and return their value."""
        if self._left < count:
            self._fill()
            if self._left < count:
                raise _DamageError(_ENDS_EARLY)
        value = self._bits >> (self._left - count)
        self._drop(count)
        return value

    def check_end(self) -> None:
        """Refuse whole bytes that are left over."""
        over = len(self._data) - self._at + self._left // 8
        if over:
            raise _DamageError(f"Corrupt JPEG data: {over} extraneous bytes before marker")

    def _drop(self, count: int) -> None:
        self._left -= count
        self._bits &= (1 << self._left) - 1

    def _fill(self) -> None:
        more = self._data[self._at : self._at + _FILL_BYTES]
        self._at += len(more)
        self._bits = self._bits << 8 * len(more) | int.from_bytes(more, "big")
        self._left += 8 * len(more)


class _Component(NamedTuple):
    """One component of a frame.

    Attributes:
        across: number of blocks side by side in each unit of an interleaved scan.
        down: number of blocks one below the other in each such unit.
        num_blocks: number of blocks that hold pixels of the image.
        nonzero: 1 for each coefficient known not to be zero, by block and in zigzag order.
        precision: number of low bits still to come for each coefficient; -1 before its first scan.
    """

    across: int
    down: int
    num_blocks: int
    nonzero: bytearray
    precision: list[int]


@final
class _Frame:
    """The content of the frame header, and the state after the scans so far."""

    def __init__(self, segment: bytes, *, is_progressive: bool) -> None:
        height, width = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
        sampled = {segment[at]: divmod(segment[at + 1], 16) for at in range(6, 6 + 3 * segment[5], 3)}
        most_across = max(across for across, _ in sampled.values())
        most_down = max(down for _, down in sampled.values())
        self.is_progressive = is_progressive
        self.num_units = -(-width // (8 * most_across)) * -(-height // (8 * most_down))
        self.components: dict[int, _Component] = {}
        for name, (across, down) in sampled.items():
            num_blocks = -(-width * across // (8 * most_across)) * -(-height * down // (8 * most_down))
            nonzero = bytearray(64 * num_blocks if is_progressive else 0)
            self.components[name] = _Component(across, down, num_blocks, nonzero, [-1] * 64)


@final
class _Scan:
    """One scan of a frame."""

    def __init__(self, frame: _Frame, segment: bytes, tables: dict[_TableId, _Table]) -> None:
        self._first, self._last, bits = segment[-3:]
        self._is_refining = bits >> 4 > 0
        chosen = [(segment[at], segment[at + 1]) for at in range(1, 1 + 2 * segment[0], 2)]
        components = [frame.components[name] for name, _ in chosen]
        if frame.is_progressive:
            _check_progression(components, self._first, self._last, bits)
        self._run = 0  # blocks left in a run of end-of-block codes
        self._nonzero = components[0].nonzero
        alone = len(components) == 1
        self._num_units = components[0].num_blocks if alone else frame.num_units
        self._steps: list[_Step] = []
        for component, (_, numbers) in zip(components, chosen, strict=True):
            step = self._step(frame, tables, *divmod(numbers, 16))
            self._steps += [step] * (1 if alone else component.across * component.down)

    def check(self, intervals: Sequence[bytes], units_each: int) -> None:
        """Walk all codes of the scan.

        Raises:
            _DamageError: the codes are damaged.
        """
        units_each = units_each or self._num_units
        wanted = -(-self._num_units // units_each)
        if len(intervals) != wanted:
            raise _DamageError(f"Corrupt JPEG data: {len(intervals) - 1} restart markers instead of {wanted - 1}")
        for number, interval in enumerate(intervals):
            bits = _Bits(interval)
            self._run = 0
            start = number * units_each
            for unit in range(start, min(start + units_each, self._num_units)):
                for step in self._steps:
                    step(bits, unit)
            bits.check_end()

    def _step(self, frame: _Frame, tables: dict[_TableId, _Table], dc: int, ac: int) -> _Step:
        """Return a function that walks one block of a component."""
        if not frame.is_progressive:
            return _sequential(tables[0, dc], tables[1, ac])
        if self._first == 0:
            if self._is_refining:
                return lambda bits, _: bits.take(1)
            first = tables[0, dc]
            return lambda bits, _: bits.take(bits.code(first))
        table = tables[1, ac]
        walk = self._refining_ac if self._is_refining else self._first_ac
        return lambda bits, block: walk(bits, block, table)

    def _first_ac(self, bits: _Bits, block: int, table: _Table) -> None:
        if self._run:
            self._run -= 1
            return
        at = self._first
        while at <= self._last:
            zeros, size = divmod(bits.code(table), 16)
            if not size and zeros != _SIXTEEN_ZEROS:
                self._run = (1 << zeros) + bits.take(zeros) - 1
                return
            at += zeros
            if size:
                bits.take(size)
                self._nonzero[64 * block + min(at, 63)] = 1
            at += 1

    def _refining_ac(self, bits: _Bits, block: int, table: _Table) -> None:
        start, at = 64 * block, self._first
        while not self._run and at <= self._last:
            zeros, size = divmod(bits.code(table), 16)
            if size > 1:
                raise _DamageError("Corrupt JPEG data: bad Huffman code")
            if size:
                bits.take(1)
            elif zeros != _SIXTEEN_ZEROS:
                self._run = (1 << zeros) + bits.take(zeros)
                break
            while at <= self._last:
                if self._nonzero[start + at]:
                    bits.take(1)
                elif zeros == 0:
                    break
                else:
                    zeros -= 1
                at += 1
            if size:
                self._nonzero[start + min(at, 63)] = 1
            at += 1
        if self._run:
            bits.take(sum(self._nonzero[start + at : start + self._last + 1]))
            self._run -= 1


def _check_progression(components: Sequence[_Component], first: int, last: int, bits: int) -> None:
    """Refuse a scan that does not continue the progression."""
    for component in components:
        before = component.precision
        if first and before[0] < 0:
            raise _DamageError("Inconsistent progression sequence")
        for at in range(first, last + 1):
            if bits >> 4 != max(before[at], 0):
                raise _DamageError("Inconsistent progression sequence")
            before[at] = bits & 15


def _sequential(dc: _Table, ac: _Table) -> _Step:
    def walk(bits: _Bits, _: int) -> None:
        bits.take(bits.code(dc))
        at = 1
        while at < 64:
            zeros, size = divmod(bits.code(ac), 16)
            if not size and zeros != _SIXTEEN_ZEROS:
                return
            at += zeros + 1
            bits.take(size)

    return walk
