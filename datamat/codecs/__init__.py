"""Encoded images and masks: probed, checked, decoded and encoded by pure functions that are safe in forked workers.

    images      probe, decode_image, decode_mask, can_keep_*, check_pixels, encode_*    <- start reading here
    files       bytes of an input file, read once
    headers     ImageInfo, EXIF orientation; headers of JPEG, WebP, BMP and TIFF files, and damage in JPEG data
    png         PNG files, decoded and encoded
    libraries   which library does which job; all calls to cv2

The same rules apply to all encodings (EXIF applied, nothing dropped or scaled silently), so an image and its mask
stay aligned. Importing this package imports none of cv2, isal and pyspng.
"""

from __future__ import annotations

from datamat.codecs.files import read_file
from datamat.codecs.headers import MAX_PIXELS, ImageInfo
from datamat.codecs.images import (
    can_keep_image,
    can_keep_mask,
    check_pixels,
    decode_floats,
    decode_image,
    decode_mask,
    encode_jpeg,
    encode_png,
    note_made,
    probe,
)
from datamat.codecs.libraries import JPEG_ENCODER, LOSSY_DECODERS, PNG_ENCODER

__all__ = [
    "JPEG_ENCODER",
    "LOSSY_DECODERS",
    "MAX_PIXELS",
    "PNG_ENCODER",
    "ImageInfo",
    "can_keep_image",
    "can_keep_mask",
    "check_pixels",
    "decode_floats",
    "decode_image",
    "decode_mask",
    "encode_jpeg",
    "encode_png",
    "note_made",
    "probe",
    "read_file",
]

OUTPUT_VERSION = 1
"""Incremented when images are encoded or decoded to different bytes; shards that hold images are then rebuilt."""
PACKAGES = JPEG_ENCODER | PNG_ENCODER | LOSSY_DECODERS
"""Modules of other packages that decide these bytes, unless a module below sets its own."""
