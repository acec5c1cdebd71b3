"""Encoded pictures and masks: look at, check, decode, encode them. Pure functions, safe in forked workers.

    files       bytes of an input file, read once
    pictures    probe, decode_image, decode_mask, can_keep_*    <- start reading here
    encode      encode_jpeg, encode_png
    info        ImageInfo, EXIF orientation
    png, png_chunks, jpeg, webp, bmp   one format each
    opencv      the calls of cv2
    libraries   which library does which job

All four encodings are decoded by the same rules (EXIF applied, 8 bits, nothing dropped silently), so an image and its
mask never part. Importing this package imports none of cv2, isal, pyspng.
"""

from __future__ import annotations

from datamat.codecs.encode import encode_jpeg, encode_png
from datamat.codecs.files import read_file
from datamat.codecs.info import MAX_PIXELS, ImageInfo
from datamat.codecs.libraries import codec_versions
from datamat.codecs.pictures import (
    can_keep_image,
    can_keep_mask,
    decode_image,
    decode_mask,
    probe,
)

__all__ = [
    "MAX_PIXELS",
    "ImageInfo",
    "can_keep_image",
    "can_keep_mask",
    "codec_versions",
    "decode_image",
    "decode_mask",
    "encode_jpeg",
    "encode_png",
    "probe",
    "read_file",
]
