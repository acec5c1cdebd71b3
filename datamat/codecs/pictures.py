"""What the rest of datamat asks of a picture file: probe, decode, may it be kept.

Order of every decode: header and structure, refusals, pixels. So nothing large is allocated for a file that is refused,
and what is refused does not depend on which library decodes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from datamat.codecs.bmp import probe_bmp
from datamat.codecs.info import MAX_PIXELS, RESTORE, refuse, turn_upright
from datamat.codecs.jpeg import probe_jpeg
from datamat.codecs.libraries import load_simplejpeg
from datamat.codecs.opencv import decode_with_cv2
from datamat.codecs.png import decode_png_image, decode_png_samples
from datamat.codecs.png_chunks import SIGNATURE, probe_png, walk_chunks
from datamat.codecs.webp import probe_webp
from datamat.errors import OptionError

if TYPE_CHECKING:
    from datamat.codecs.info import ImageInfo, Pixels

__all__ = [
    "can_keep_image",
    "can_keep_mask",
    "decode_image",
    "decode_mask",
    "probe",
]

_PROBES = {"png": probe_png, "jpeg": probe_jpeg, "webp": probe_webp, "bmp": probe_bmp}
_FOREIGN = {
    b"GIF8": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\1\0": "Windows icon",
    b"%PDF": "PDF",
    b"8BPS": "Photoshop",
    b"PK\3\4": "zip archive",
    b"\x1f\x8b": "gzip",
    b"\x93NUMPY": "NumPy array",
    b"version https://git-lfs": "Git LFS pointer (the picture itself was never fetched)",
}
_KEPT_ENCODINGS = {"png", "jpeg"}


def probe(data: bytes, *, whole: bool = False, name: str = "", max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Return what an encoded picture's header says; no pixel is decoded.

    Args:
        data: the file; without `whole` its first bytes are enough, up to where the pixels begin (for PNG with an eXIf
            chunk after them and for WebP, the whole file).
        whole: also refuse a file that is cut off or damaged, as far as that is seen without decoding it. PNG: every
            chunk with its CRC, up to IEND. JPEG: every marker up to end of image; damage inside the compressed data
            is not seen. WebP and BMP: lengths. Bytes after the end are allowed, as every decoder does.
        name: what to call it in messages: a path, key or field.
        max_pixels: most pixels (width * height) accepted, by default as in Pillow.

    Raises:
        InputError: it is not PNG, JPEG, WebP or BMP, its header is damaged, it has no pixels or more than `max_pixels`,
            or it is not whole.

    Example:
        >>> import numpy as np
        >>> from datamat.codecs import encode_png
        >>> info = probe(encode_png(np.zeros((2, 3), np.uint8)))
        >>> info.encoding, info.height, info.width, info.channels
        ('png', 2, 3, 1)
    """
    info = _PROBES[_encoding(data, name)](data, name, whole=whole)
    found = f"{info.encoding} of {info.width} x {info.height} pixels"
    if info.height < 1 or info.width < 1:
        raise refuse(name, found, "at least one pixel", "take it out of the index")
    if info.height * info.width > max_pixels:
        raise refuse(name, found, f"at most {max_pixels} pixels", "tile it, shrink it or raise max_pixels")
    return info


def decode_image(
    data: bytes,
    *,
    channels: int = 3,
    name: str = "",
    max_pixels: int = MAX_PIXELS,
    out: Pixels | None = None,
    is_whole: bool = False,
) -> Pixels:
    """Return the pixels of a picture file, upright as its EXIF orientation says.

    Grey becomes RGB and palettes become their colours; nothing is dropped: what `channels` cannot hold is refused.

    Args:
        data: a whole PNG, JPEG, WebP or BMP file.
        channels: 3 for RGB; 4 for RGBA, opaque where the file has no alpha; 1 for grey files.
        name: what to call it in messages: a path, key or field.
        max_pixels: most pixels (width * height) accepted.
        out: memory to decode into. It is filled and returned where it is uint8, C-contiguous and of the shape of the
            result, and the file needs no conversion; else the result is another array. It may be overwritten anyway.
        is_whole: these very bytes went through `probe(whole=True)` before. It is not done again, which saves 20 µs for
            a JPEG file of 50 kB.

    Returns:
        uint8 (height, width, channels), C-contiguous. PNG, WebP lossless and BMP are exact; JPEG is libjpeg-turbo's
        accurate integer DCT.

    Raises:
        InputError: it is no picture, is cut off or damaged, is animated, has alpha (with `channels` under 4), colours
            (with 1), CMYK inks, or samples of more than 8 bits.
        OptionError: `channels` is not 1, 3 or 4.

    Example:
        >>> import numpy as np
        >>> from datamat.codecs import encode_png
        >>> pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
        >>> bool((decode_image(encode_png(pixels)) == pixels).all())
        True
    """
    if channels not in {1, 3, 4}:
        raise OptionError(f"decode_image: channels is {channels!r}; want 1 (grey), 3 (RGB) or 4 (RGBA)")
    info = probe(data, whole=not is_whole, name=name, max_pixels=max_pixels)
    _refuse_image(info, channels, name)
    out = _fitting(out, (info.height, info.width, channels), info)
    if info.encoding == "png":
        pixels = decode_png_image(walk_chunks(data, name), info, channels, name, out)
    else:
        pixels = _decode_other(data, info, channels, name, out)
    return pixels if info.orientation == 1 else turn_upright(pixels, info.orientation)


def decode_mask(
    data: bytes,
    *,
    name: str = "",
    max_pixels: int = MAX_PIXELS,
    out: Pixels | None = None,
    is_whole: bool = False,
) -> Pixels:
    """Return the class ids of a mask file, upright as its EXIF orientation says.

    Ids are the stored samples, verbatim: grey values without scaling, also of 1, 2 and 4 bits, and the *indices* of a
    palette file, not their colours. A transparent colour (tRNS) is ignored.

    Args:
        data: a whole PNG file, grey or palette.
        name: what to call it in messages: a path, key or field.
        max_pixels: most pixels (width * height) accepted.
        out: uint8 (height, width), as of `decode_image`.
        is_whole: as of `decode_image`.

    Returns:
        uint8 (height, width), C-contiguous.

    Raises:
        InputError: it is no PNG (JPEG changes ids), is cut off or damaged, is animated, holds colours, an alpha
            channel or 16-bit samples.

    Example:
        >>> import numpy as np
        >>> from datamat.codecs import encode_png
        >>> decode_mask(encode_png(np.array([[0, 7]], np.uint8))).tolist()
        [[0, 7]]
    """
    info = probe(data, whole=not is_whole, name=name, max_pixels=max_pixels)
    _refuse_mask(info, name)
    out = _fitting(out, (info.height, info.width), info)
    samples = None if out is None else out[..., None]
    found = decode_png_samples(walk_chunks(data, name), info, name, samples)
    if out is not None and found is samples:
        return out
    ids = found[..., 0]
    return ids if info.orientation == 1 else turn_upright(ids, info.orientation)


def can_keep_image(info: ImageInfo, *, channels: int = 3) -> bool:
    """Return whether the encoded bytes may be stored as they are: every decoder that is asked for `channels` agrees.

    Grey counts as RGB: decoders repeat the one channel when three are asked for, and it need not be encoded anew.
    TensorFlow and Pillow don't apply an orientation and cv2 does; they differ on palettes, small depths, transparent
    colours, 16 bits, inks and frames; not all read WebP and BMP.

    Example:
        >>> import numpy as np
        >>> from datamat.codecs import encode_png
        >>> can_keep_image(probe(encode_png(np.zeros((2, 3, 3), np.uint8))))
        True
    """
    return (
        info.encoding in _KEPT_ENCODINGS
        and (info.channels == channels or (info.channels, channels) == (1, 3))
        and info.alpha == (channels == 4)
        and info.bit_depth == 8
        and info.orientation == 1
        and not (info.palette or info.animated or info.cmyk)
    )


def can_keep_mask(info: ImageInfo) -> bool:
    """Return whether the encoded bytes may be stored as a mask: upright, 8-bit grey PNG.

    Other decoders give a palette's colours and scale 1, 2 and 4 bits up to 255.
    """
    return info.encoding == "png" and can_keep_image(info, channels=1)


def _encoding(data: bytes, name: str) -> str:
    if data.startswith(SIGNATURE):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data.startswith(b"BM"):
        return "bmp"
    raise refuse(name, _describe(data), "a PNG, JPEG, WebP or BMP file", "convert it, or take it out of the index")


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
        return "an HTML page (a download that answered with an error?)"
    if start.isascii() and all(byte >= 32 or byte in b"\t\r\n" for byte in start):
        return f"text that begins {start!r}"
    return f"unknown data that begins {start[:8].hex(' ')}"


def _refuse_image(info: ImageInfo, channels: int, name: str) -> None:
    _refuse_both(info, name)
    kind = f"{info.encoding} with"
    if info.alpha and channels < 4:
        remedy = "declare channels=4, or convert it to RGB"
        raise refuse(name, f"{kind} alpha", "an opaque picture", remedy)
    if channels == 1 and (info.channels > 1 or info.palette):
        raise refuse(name, f"{kind} colours", "a grey picture", "declare channels=3, or convert it to grey")


def _refuse_mask(info: ImageInfo, name: str) -> None:
    remedy = "save the class ids as an 8-bit grey PNG"
    if info.encoding != "png":
        found = f"a mask in {info.encoding}" + (", which changes class ids" if info.encoding == "jpeg" else "")
        raise refuse(name, found, "PNG", remedy)
    _refuse_both(info, name)
    if info.channels > 1:
        kind = {2: "grey and alpha", 3: "RGB", 4: "RGBA"}[info.channels]
        raise refuse(name, f"a mask of {kind} samples", "one class id per pixel", remedy)


def _refuse_both(info: ImageInfo, name: str) -> None:
    if info.animated:
        raise refuse(name, f"animated {info.encoding}", "one picture", "extract its frames as files of their own")
    if info.cmyk:
        raise refuse(name, f"{info.encoding} in CMYK inks", "RGB or grey", "convert it with its colour profile")
    if info.bit_depth > 8:
        found = f"{info.encoding} of {info.bit_depth} bits per sample"
        raise refuse(name, found, "at most 8 bits", "convert it to 8 bits, or store it as a Tensor")


def _fitting(out: Pixels | None, shape: tuple[int, ...], info: ImageInfo) -> Pixels | None:
    """Return `out` if a picture can be decoded into it."""
    if out is None or out.shape != shape or out.dtype != "uint8" or not out.flags.c_contiguous:
        return None
    return out if info.orientation == 1 else None


def _decode_jpeg(data: bytes, channels: int, out: Pixels | None) -> Pixels:
    """Return what cv2 gives, from simplejpeg if it has nothing to say against the file: else cv2 is the judge."""
    library = load_simplejpeg()
    if library is not None and channels in {1, 3}:
        with contextlib.suppress(ValueError):
            pixels: Pixels = library.decode_jpeg(data, "RGB" if channels == 3 else "GRAY", buffer=out)
            return pixels if out is None or pixels.shape != out.shape else out
    return decode_with_cv2(data, channels)


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
