"""Images to arrays and back: probe, decode, encode, and whether encoded bytes may be kept as they are."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from datamat.codecs.headers import (
    MAX_PIXELS,
    RESTORE,
    find_damage,
    plain_headers,
    probe_bmp,
    probe_jpeg,
    probe_tiff,
    probe_webp,
    refuse,
    turn_upright,
)
from datamat.codecs.libraries import (
    decode_with_cv2,
    encode_jpeg_with_cv2,
    load_simplejpeg,
    load_tifffile,
)
from datamat.codecs.png import (
    MAX_SCANLINE_BYTES,
    SIGNATURE,
    decode_png_image,
    decode_png_samples,
    encode_png_pixels,
    info_of_chunks,
    probe_png,
    walk_chunks,
)
from datamat.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from datamat.codecs.headers import ImageInfo, Pixels
    from datamat.codecs.png import PngFile

# ---------------------------------------------------------------- encoding
#
# Arrays to encoded images: JPEG through libjpeg-turbo (cv2), PNG through `png`.


_JPEG_SIDE = 65_500  # JPEG_MAX_DIMENSION of libjpeg, slightly below the limit of 16 bits


def encode_jpeg(image: Pixels, *, quality: int = 95) -> bytes:
    r"""Return an array as JPEG, chroma subsampled 4:2:0.

    Args:
        image: uint8 (height, width, 3) in RGB order, or (height, width) or (height, width, 1) grey.
        quality: JPEG quality, 1 to 100.

    Raises:
        OptionError: the array or the quality is out of range, or a side exceeds 65,500.

    Example:
        >>> import numpy as np
        >>> encode_jpeg(np.zeros((8, 8, 3), np.uint8))[:2]
        b'\xff\xd8'
    """
    if not 1 <= quality <= 100:
        raise OptionError(f"encode_jpeg: quality is {quality!r}; want 1 to 100")
    pixels = _checked_pixels(image, "encode_jpeg", (1, 3))
    if max(pixels.shape[:2]) > _JPEG_SIDE:
        raise OptionError(f"encode_jpeg: the array is {pixels.shape}; want sides up to {_JPEG_SIDE}; store it as PNG")
    return encode_jpeg_with_cv2(pixels, quality)


def encode_png(image: Pixels) -> bytes:
    """Return an array as PNG, which every decoder decodes to the same pixels.

    The *bytes* depend on the zlib that Python is linked with; the manifest records its version.

    Args:
        image: uint8 or uint16, (height, width, 3) RGB, (height, width, 4) RGBA, (height, width, 2) grey and alpha,
            (height, width) or (height, width, 1) grey.

    Raises:
        OptionError: the array has another dtype or shape, or holds 2 GiB or more.

    Example:
        >>> import numpy as np
        >>> encode_png(np.zeros((8, 8), np.uint8))[1:4]
        b'PNG'
    """
    pixels = _checked_pixels(image, "encode_png", (1, 2, 3, 4), ("uint8", "uint16"))
    if pixels.nbytes + len(pixels) > MAX_SCANLINE_BYTES:
        raise OptionError(f"encode_png: the array holds {pixels.nbytes} bytes; want under 2 GiB; tile the image")
    return encode_png_pixels(pixels)


def _checked_pixels(image: Any, place: str, channels: tuple[int, ...], dtypes: tuple[str, ...] = ("uint8",)) -> Pixels:
    """Return the array as C-contiguous (height, width, channels)."""
    pixels = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.dtype.name not in dtypes or pixels.ndim != 3 or pixels.shape[2] not in channels or pixels.size == 0:
        found, wanted = np.asarray(image), " or ".join(dtypes)
        raise OptionError(
            f"{place}: the array is {found.dtype} {found.shape}; want {wanted} (height, width) or (height, width, "
            f"channels) with channels in {channels} and at least one pixel; cast or reshape it"
        )
    return np.ascontiguousarray(pixels)


# ---------------------------------------------------------------- probing and decoding
#
# What the rest of datamat asks of an image file: its header, its pixels, and whether it may be kept.
#
# Every decode goes through header and structure, then refusals, then pixels. So a refused file allocates nothing large,
# and refusals do not depend on the library that decodes.


_PROBES = {"png": probe_png, "jpeg": probe_jpeg, "webp": probe_webp, "bmp": probe_bmp, "tiff": probe_tiff}
_FOREIGN = {
    b"GIF8": "GIF",
    b"\0\0\1\0": "Windows icon",
    b"%PDF": "PDF",
    b"8BPS": "Photoshop",
    b"PK\3\4": "zip archive",
    b"\x1f\x8b": "gzip",
    b"\x93NUMPY": "NumPy array",
    b"version https://git-lfs": "Git LFS pointer (the image itself was never fetched)",
}
_KEPT_ENCODINGS = {"png", "jpeg"}
_COLOURS = {1: "GRAY", 3: "RGB", 4: "RGBA"}
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_LOSSLESS = {"png", "tiff"}
_MOST_BYTES_KNOWN = 4 << 20
_ENTRY_BYTES = 512  # that an entry takes beside its file
_num_bytes_known = 0
_whole: dict[int, tuple[bytes, ImageInfo]] = {}
"""Files that were found whole a moment ago: a writer looks at the size of a file that is stored later, and statistics
at that of each copy of a sample. By their lengths, since each call of `id` is an event for the audit hooks of workers;
of files of one length, the last is known."""
_made: tuple[bytes, ...] = ()
"""Files that a transform of this process returned a moment ago: they were encoded here, not read."""
_MADE_PER_DECODED = 16
_UNSUPPORTED = "subsampling"  # the subject of simplejpeg's only complaint about a file that may be intact


def probe(data: bytes, *, whole: bool = False, name: str = "", max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Return the header of an encoded image without decoding a pixel.

    Args:
        data: content of the file. Without `whole`, the bytes before the pixels are enough (for WebP, and for PNG with
            an eXIf chunk after the pixels, and for TIFF the whole file).
        whole: whether to also refuse a file that is truncated or damaged, as far as that shows without decoding. PNG:
            the CRC of every chunk up to IEND. JPEG: every marker up to the end of the image; `check_pixels` finds
            damage between them. WebP, BMP and TIFF: lengths. Bytes after the end are allowed, as in every decoder.
        name: name of the file in messages: a path, key or field.
        max_pixels: most pixels (width * height) accepted; the default is Pillow's.

    Raises:
        InputError: the file is not PNG, JPEG, WebP, BMP or TIFF, its header is damaged, it has no pixels or more than
            `max_pixels`, or it is not whole.

    Example:
        >>> import numpy as np
        >>> from datamat.codecs import encode_png
        >>> info = probe(encode_png(np.zeros((2, 3), np.uint8)))
        >>> info.encoding, info.height, info.width, info.channels
        ('png', 2, 3, 1)
    """
    known = _whole.get(len(data))
    if known is not None and known[0] is data:
        info = known[1]
    else:
        info = _PROBES[_encoding(data, name)](data, name, whole=whole)
        if whole and type(data) is bytes:  # nobody can change these
            _note_whole(data, info)
    return _of_sane_size(info, max_pixels, name)


def _of_sane_size(info: ImageInfo, max_pixels: int, name: str) -> ImageInfo:
    """Return the header unless it declares no pixels, or more than `max_pixels`."""
    if 0 < info.height * info.width <= max_pixels:
        return info
    found = f"{info.encoding} of {info.width} x {info.height} pixels"
    if info.height < 1 or info.width < 1:
        raise refuse(name, found, "at least one pixel", "take it out of the index")
    raise refuse(name, found, f"at most {max_pixels} pixels", "tile it, shrink it or raise max_pixels")


def _opened(data: bytes, name: str, *, is_whole: bool) -> tuple[ImageInfo, PngFile | None]:
    """Return what `probe` returns, and the chunks of a PNG file, which are walked once if `is_whole`."""
    if not data.startswith(SIGNATURE):
        return probe(data, whole=not is_whole, name=name), None
    file = walk_chunks(data, name)
    info = info_of_chunks(file, name) if is_whole else probe(data, whole=True, name=name)
    return _of_sane_size(info, MAX_PIXELS, name), file


def _note_whole(data: bytes, info: ImageInfo) -> None:
    global _whole, _num_bytes_known  # noqa: PLW0603 -- threads that write at once forget files, and know none wrongly
    if _num_bytes_known + len(data) > _MOST_BYTES_KNOWN:
        _whole, _num_bytes_known = {}, 0
    if len(data) <= _MOST_BYTES_KNOWN:
        _whole[len(data)] = data, info
        _num_bytes_known += len(data) + _ENTRY_BYTES


def decode_image(
    data: bytes,
    *,
    channels: int = 3,
    dtype: str = "uint8",
    name: str = "",
    out: Pixels | None = None,
    is_whole: bool = False,
) -> Pixels:
    """Return the pixels of an image file, turned upright according to its EXIF orientation.

    Grey becomes RGB and palette indices become colours. Nothing is dropped: a file that does not fit `channels` is
    refused.

    Args:
        data: content of a whole PNG, JPEG, WebP, BMP or TIFF file.
        channels: 3 for RGB; 4 for RGBA, opaque if the file has no alpha; 1 for grey files; 2 for grey with alpha.
        dtype: "uint8", or "uint16" for files of 16 bits per sample.
        name: name of the file in messages: a path, key or field.
        out: memory to decode into. It is filled and returned if it is C-contiguous and of the right dtype and shape,
            and the file needs no conversion; otherwise the result is another array. It may be overwritten in any case.
        is_whole: whether these very bytes passed `probe(whole=True)` before; skipping it saves 20 µs for a JPEG file of
            50 kB.

    Returns:
        uint8 or uint16 (height, width, channels), C-contiguous. PNG, TIFF, WebP lossless and BMP are exact;
        JPEG is libjpeg-turbo's accurate integer DCT.

    Raises:
        InputError: the file is not an image, is truncated, damaged or animated, or has alpha (with `channels` under 4),
            colours (with 1 or 2), CMYK inks, or samples of another depth.
        OptionError: `channels` is not 1 to 4.
        MissingDependencyError: a TIFF file, without tifffile or imagecodecs.

    Example:
        >>> import numpy as np
        >>> from datamat.codecs import encode_png
        >>> pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
        >>> bool((decode_image(encode_png(pixels)) == pixels).all())
        True
    """
    if channels not in {1, 2, 3, 4}:
        raise OptionError(
            f"decode_image: channels is {channels!r}; want 1 (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGBA)"
        )
    info, file = _opened(data, name, is_whole=is_whole)
    _refuse_image(info, channels, dtype, name)
    out = _fitting(out, (info.height, info.width, channels), dtype, info)
    if file is not None:
        pixels = decode_png_image(file, info, channels, name, out)
    elif info.encoding == "tiff":
        pixels = _tiff_colours(data, info, channels, name)
    else:
        pixels = _decode_other(data, info, channels, name, out)
    return pixels if info.orientation == 1 else turn_upright(pixels, info.orientation)


def decode_mask(
    data: bytes,
    *,
    dtype: str = "uint8",
    name: str = "",
    out: Pixels | None = None,
    is_whole: bool = False,
) -> Pixels:
    """Return the class ids of a mask file, turned upright according to its EXIF orientation.

    Ids are the stored samples, verbatim: unscaled grey values, including those of 1, 2 and 4 bits, and the *indices* of
    a palette file, not their colours. A transparent colour (tRNS) is ignored.

    Args:
        data: content of a whole PNG or TIFF file, grey or palette.
        dtype: "uint8", or "uint16", to which files of 8 bits are widened.
        name: name of the file in messages: a path, key or field.
        out: memory to decode into, (height, width), as in `decode_image`.
        is_whole: whether these very bytes passed `probe(whole=True)` before.

    Returns:
        uint8 or uint16 (height, width), C-contiguous.

    Raises:
        InputError: the file is neither PNG nor TIFF (JPEG changes ids), is truncated, damaged or animated, or has
            colours, an alpha channel, or more bits than `dtype`.

    Example:
        >>> import numpy as np
        >>> from datamat.codecs import encode_png
        >>> decode_mask(encode_png(np.array([[0, 7]], np.uint8))).tolist()
        [[0, 7]]
    """
    info, file = _opened(data, name, is_whole=is_whole)
    _refuse_mask(info, dtype, name)
    if file is None:
        ids = _tiff_samples(data, info, name)[0][..., 0]
    else:
        out = _fitting(out, (info.height, info.width), dtype, info)
        samples = None if out is None or 8 * out.itemsize != info.bit_depth else out[..., None]
        found = decode_png_samples(file, info, name, samples)
        if out is not None and found is samples:
            return out
        ids = found[..., 0]
    ids = ids.astype(dtype, copy=False)
    return ids if info.orientation == 1 else turn_upright(ids, info.orientation)


def decode_floats(data: bytes, *, name: str = "") -> Pixels:
    """Return the numbers of a TIFF file of one channel of 32-bit floats, turned upright: float32 (height, width).

    Args:
        data: content of a whole TIFF file.
        name: name of the file in messages: a path, key or field.

    Raises:
        InputError: the file holds something else, or is truncated, damaged or of several pages.
    """
    info = probe(data, whole=True, name=name)
    if not info.is_float or info.channels > 1 or info.animated:
        raise refuse(name, _kind_of(info), "a TIFF file of one channel of 32-bit floats", "convert it in read")
    return turn_upright(_tiff_samples(data, info, name)[0][..., 0], info.orientation)


def check_pixels(data: bytes, *, name: str = "") -> None:
    """Refuse an image file that is to be kept as it is, but that `decode_image` would refuse later.

    PNG has checksums, which `probe(whole=True)` has tested. JPEG has none: a decoder walks its codes, making a grey
    image of an eighth of the size in half the time of decoding. Of the files that this process has just encoded itself,
    one in 16 shows whether the encoder is sound: which ones depends on their bytes alone.

    Args:
        data: file that passed `probe(whole=True)` and `can_keep_image`.
        name: name of the file in messages.

    Raises:
        InputError: the compressed data is damaged.
    """
    library = load_simplejpeg()
    if _encoding(data, name) != "jpeg":
        return
    if any(data is one for one in _made) and xxhash.xxh3_64_intdigest(data) % _MADE_PER_DECODED:
        return
    try:
        if library is not None:
            library.decode_jpeg(data, "GRAY", min_height=1, min_width=1, min_factor=8)
            return
    except ValueError:
        pass  # perhaps merely unsupported
    decode_image(data, name=name, is_whole=True)


def note_made(files: Iterable[bytes]) -> None:
    """Note that files have just been encoded in this process, until the next call; see `check_pixels`."""
    global _made  # noqa: PLW0603 -- replaced as one, for threads
    _made = tuple(files)


def can_keep_image(info: ImageInfo, *, channels: int = 3, dtype: str = "uint8") -> bool:
    """Return True if encoded bytes may be stored as they are: whether all decoders read the same `channels` from them.

    A grey file may serve as RGB, because every decoder can repeat its channel. Decoders disagree on EXIF orientation,
    which cv2 applies and TensorFlow and Pillow do not, and on palettes, small depths, transparent colours, inks and
    frames. Not all of them read WebP, BMP and TIFF.

    Example:
        >>> import numpy as np
        >>> from datamat.codecs import encode_png
        >>> can_keep_image(probe(encode_png(np.zeros((2, 3, 3), np.uint8))))
        True
    """
    return (
        info.encoding in _KEPT_ENCODINGS
        and (info.channels == channels or (info.channels, channels) == (1, 3))
        and info.alpha == (channels in {2, 4})
        and info.bit_depth == 8 * np.dtype(dtype).itemsize
        and info.orientation == 1
        and not (info.palette or info.animated or info.cmyk)
    )


def can_keep_mask(info: ImageInfo, *, dtype: str = "uint8") -> bool:
    """Return True if encoded bytes may be stored as a mask: an upright grey PNG of as many bits as the dtype.

    Of other files, some decoders return palette colours, or scale 1, 2 and 4 bits up to 255.
    """
    return info.encoding == "png" and can_keep_image(info, channels=1, dtype=dtype)


def _encoding(data: bytes, name: str) -> str:
    if data.startswith(SIGNATURE):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data.startswith(b"BM"):
        return "bmp"
    if data.startswith(_TIFF):
        return "tiff"
    raise refuse(
        name, _describe(data), "a PNG, JPEG, WebP, BMP or TIFF file", "convert it, or take it out of the index"
    )


def _describe(data: bytes) -> str:
    if not data:
        return "an empty file"
    start = bytes(data[:32])
    for magic, kind in _FOREIGN.items():
        if start.startswith(magic):
            return f"a {kind}"
    if start[4:8] == b"ftyp":
        return "a HEIF, AVIF or video file"
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page (an error page instead of a download?)"
    if start.isascii() and all(byte >= 32 or byte in b"\t\r\n" for byte in start):
        return f"text that begins {start!r}"
    return f"unknown data that begins {start[:8].hex(' ')}"


def _refuse_image(info: ImageInfo, channels: int, dtype: str, name: str) -> None:
    _refuse_both(info, dtype, name)
    if dtype == "uint16" and info.bit_depth < 16:
        raise refuse(name, _kind_of(info), "16 bits", "declare dtype='uint8', or scale the values in read")
    kind = f"{info.encoding} with"
    if info.alpha and channels not in {2, 4}:
        remedy = (
            "declare channels=2, or drop its alpha" if channels == 1 else "declare channels=4, or convert it to RGB"
        )
        raise refuse(name, f"{kind} alpha", "an opaque image", remedy)
    if channels < 3 and (info.channels > 2 or info.palette):
        raise refuse(name, f"{kind} colours", "a grey image", "declare channels=3, or convert it to grey")


def _refuse_mask(info: ImageInfo, dtype: str, name: str) -> None:
    remedy = "save the class ids as an 8-bit grey PNG"
    if info.encoding not in _LOSSLESS:
        found = f"a mask in {info.encoding}" + (", which changes class ids" if info.encoding == "jpeg" else "")
        raise refuse(name, found, "PNG", remedy)
    _refuse_both(info, dtype, name)
    if info.channels > 1:
        kind = {2: "grey and alpha", 3: "RGB", 4: "RGBA"}[info.channels]
        raise refuse(name, f"a mask of {kind} samples", "one class id per pixel", remedy)


def _kind_of(info: ImageInfo) -> str:
    numbers = "floats" if info.is_float else "bits"
    channels = f" in {info.channels} channels" if info.is_float and info.channels > 1 else ""
    return f"{info.encoding} of {info.bit_depth}{'-bit' if info.is_float else ''} {numbers} per sample{channels}"


def _refuse_both(info: ImageInfo, dtype: str, name: str) -> None:
    if info.animated:
        found = "tiff of several pages" if info.encoding == "tiff" else f"animated {info.encoding}"
        raise refuse(name, found, "one image", "extract its frames into separate files")
    if info.cmyk:
        raise refuse(name, f"{info.encoding} in CMYK inks", "RGB or grey", "convert it with its colour profile")
    if info.is_float:
        raise refuse(name, _kind_of(info), "whole numbers", "declare Depth(dtype='float32') or a Tensor, or convert it")
    most = 8 * np.dtype(dtype).itemsize
    if info.bit_depth > most:
        raise refuse(name, _kind_of(info), f"at most {most} bits", "convert it to 8 bits, or declare dtype='uint16'")


def _fitting(out: Pixels | None, shape: tuple[int, ...], dtype: str, info: ImageInfo) -> Pixels | None:
    """Return `out` if an image can be decoded into it."""
    if out is None or out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        return None
    return out if info.orientation == 1 else None


def _decode_jpeg(data: bytes, channels: int, out: Pixels | None) -> Pixels:
    """Return the pixels of a file about which libjpeg has no complaint; it would fill damaged parts with grey.

    Raises:
        ValueError: libjpeg's complaint.
    """
    library = load_simplejpeg()
    if library is None:
        return _decode_with_judge(data, channels)
    colours = _COLOURS[channels]
    try:
        pixels: Pixels = library.decode_jpeg(data, colours, buffer=out)
    except ValueError:
        plain = plain_headers(data)
        try:
            pixels = library.decode_jpeg(plain, colours, buffer=out)
        except ValueError as complaint:
            if _UNSUPPORTED not in str(complaint):
                raise
            return _decode_with_judge(plain, channels)
    return pixels if out is None or pixels.shape != out.shape else out


def _decode_with_judge(data: bytes, channels: int) -> Pixels:
    """Return the pixels that cv2 decodes; find damage separately, because cv2 hides it."""
    pixels = decode_with_cv2(data, channels)
    damage = find_damage(data)
    if damage:
        raise ValueError(damage)
    return pixels


def _decode_other(data: bytes, info: ImageInfo, channels: int, name: str, out: Pixels | None) -> Pixels:
    try:
        pixels = _decode_jpeg(data, channels, out) if info.encoding == "jpeg" else decode_with_cv2(data, channels)
    except ValueError as exc:
        raise refuse(name, f"{info.encoding} that does not decode ({exc})", "intact data", RESTORE) from exc
    if pixels.shape[:2] != (info.height, info.width):
        found = f"{info.encoding} that decodes to {pixels.shape[1]} x {pixels.shape[0]} pixels"
        raise refuse(name, found, f"{info.width} x {info.height}, as its header says", RESTORE)
    if channels == 4 and not info.alpha:
        pixels[..., 3] = 255  # the fourth byte of a 32-bit BMP without an alpha mask is padding
    return pixels


# ---------------------------------------------------------------- TIFF


def _tiff_colours(data: bytes, info: ImageInfo, channels: int, name: str) -> Pixels:
    """Return the colours of a TIFF file that `_refuse_image` passed: uint8 or uint16 (height, width, channels)."""
    samples, table, is_inverted = _tiff_samples(data, info, name)
    if info.palette:
        # 16 bits by the specification; some writers leave them at 8, which readers of TIFF know by their size.
        samples = (table >> 8 if table.max() > 255 else table).astype(np.uint8).T[samples[..., 0]]
    elif info.bit_depth < 8:
        samples *= np.uint8(255 // ((1 << info.bit_depth) - 1))
    if is_inverted:
        samples = np.iinfo(samples.dtype).max - samples
    found = samples.shape[2]
    if found == channels:
        return np.ascontiguousarray(samples)
    colours = np.empty((*samples.shape[:2], channels), samples.dtype)
    colours[..., : 3 if channels > 2 else 1] = samples[..., : 3 if found > 2 else 1]
    if channels in {2, 4}:
        colours[..., -1] = samples[..., -1] if found in {2, 4} else np.iinfo(samples.dtype).max
    return colours


def _tiff_samples(data: bytes, info: ImageInfo, name: str) -> tuple[Pixels, Any, bool]:
    """Return what a TIFF file stores: samples, colour table, and whether 0 is white.

    Returns:
        uint8, uint16 or float32 (height, width, samples per pixel); uint16 (3, 2**bits) for a palette, else None.

    Raises:
        InputError: the compressed data are damaged, or hold something else than the header says.
    """
    library = load_tifffile(name)
    try:
        with library.TiffFile(io.BytesIO(data)) as file:
            page = file.pages[0]
            found = page.asarray(squeeze=False, maxworkers=1)  # (planes, depth, height, width, channels of each plane)
            table, is_inverted = page.colormap, page.photometric == 0
    except MemoryError:
        raise
    except Exception as error:  # each codec has its own class of error, and damaged tags lead tifffile to any
        raise refuse(name, f"TIFF that does not decode ({error})", "intact data", RESTORE) from error
    dtype = "float32" if info.is_float else "uint16" if info.bit_depth > 8 else "uint8"
    is_expected = found.shape[1:4] == (1, info.height, info.width) and len(found) * found.shape[-1] == info.channels
    if not is_expected or found.dtype.name != ("bool" if info.bit_depth == 1 else dtype):  # tifffile skips damaged tags
        raise refuse(name, f"TIFF that holds {found.dtype} {found.shape}", "what its header says", RESTORE)
    return np.concatenate(list(found[:, 0]), axis=-1).astype(dtype, copy=False), table, is_inverted
