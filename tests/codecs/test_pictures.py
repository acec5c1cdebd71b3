"""What all encodings share: detection, limits, refusals with remedies, and which files are kept untouched."""

import io
import itertools
import struct

import cv2
import numpy as np
import pytest
from PIL import Image
from png_builder import SAMPLES, build_png, chunk, exif, header

from datamat.codecs import (
    can_keep_image,
    can_keep_mask,
    decode_image,
    decode_mask,
    encode_jpeg,
    encode_png,
    images,
    probe,
)
from datamat.errors import InputError, OptionError

RGB = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3) * 2
RGBA = np.concatenate([RGB, RGB[..., :1]], axis=-1)
PALETTE = chunk(b"PLTE", bytes(range(256)) * 3)


def saved(array, encoding, mode=None, **options):
    buffer = io.BytesIO()
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(buffer, encoding, **options)
    return buffer.getvalue()


def png(colour, depth, **options):
    before = [PALETTE] if colour == 3 else []
    return build_png(np.zeros((2, 3, SAMPLES[colour])), colour=colour, depth=depth, before=before, **options)


def saved_by_cv2(array):
    """Return a PNG file: cv2 uses filter 1 in all rows."""
    return cv2.imencode(".png", array[..., ::-1] if array.ndim == 3 else array)[1].tobytes()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "an empty file"),
        (b"GIF89a", "a GIF"),
        (b"\0\0\0 ftypavif", "a HEIF, AVIF or video file"),
        (b"%PDF-1.7", "a PDF"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x1f\x8b\x08", "a gzip"),
        (b"\x93NUMPY\x01", "a NumPy array"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        (b"\n<!DOCTYPE HTML><html>", "an HTML page"),
        (b"404: Not Found\n", "text that begins b'404: Not Found"),
        (b"\x89PN\x1b[2J", "unknown data that begins 89 50 4e 1b"),
        (b"\xff\xd8", "unknown data that begins ff d8"),
    ],
    ids=itertools.count(),
)
def test_other_files_are_named(data, found):
    """The message says what the file seems to be, and what to do."""
    for function in (probe, decode_image, decode_mask):
        with pytest.raises(InputError, match=f"'x.png': {found}.*; convert it"):
            function(data, name="x.png")


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("encoding", ["png", "webp"])
def test_lossless_encodings_decode_exactly(encoding, mode):
    """PNG and lossless WebP decode to the pixels that Pillow encoded."""
    array = {"RGB": RGB, "L": RGB[..., 0].copy(), "RGBA": RGBA}[mode]
    data = saved(array, encoding, **({"lossless": True, "exact": True} if encoding == "webp" else {}))
    channels = 4 if mode == "RGBA" else 3

    info = probe(data)
    pixels = decode_image(data, channels=channels)

    assert (info.encoding, info.height, info.width, info.alpha) == (encoding, 5, 7, mode == "RGBA")
    assert np.array_equal(pixels, np.broadcast_to(array.reshape(5, 7, -1), pixels.shape))


@pytest.mark.parametrize("mode", ["1", "P", "RGB", "L"])
def test_bmp_of_every_depth_decodes_as_in_pillow(mode):
    """1, 8 and 24 bits, palettes included; 32 bits without an alpha mask are opaque."""
    data = saved(RGB, "bmp", mode)

    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(decode_image(data), np.asarray(image.convert("RGB")))


def bmp(width=2, height=1, bits=32, compression=0, pixels=bytes(8), offset=54):
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(pixels), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, offset) + info + pixels


def test_padding_byte_of_bmp_is_no_alpha():
    """The fourth byte of 32-bit pixels means nothing without an alpha mask."""
    data = bmp(width=5, pixels=bytes([1, 2, 3, 9] * 5))

    assert not probe(data).alpha
    assert decode_image(data).tolist() == [[[3, 2, 1]] * 5]
    assert decode_image(data, channels=4).tolist() == [[[3, 2, 1, 255]] * 5]


def test_decoder_that_disagrees_with_the_header_is_not_believed(monkeypatch):
    """Limits and shapes were checked against the header, so a decoder that returns another size is an error."""
    monkeypatch.setattr(images, "decode_with_cv2", lambda data, channels: np.zeros((2, 1, channels), np.uint8))

    with pytest.raises(InputError, match="bmp that decodes to 1 x 2 pixels; want 2 x 1, as its header says"):
        decode_image(bmp())


def test_bmp_with_an_alpha_mask_has_alpha():
    """BITMAPV4HEADER says which bits of a pixel are alpha."""
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    sizes = struct.pack("<IiiHHIIiiII", 108, 2, 1, 1, 32, 3, 8, 0, 0, 0, 0)
    data = b"BM" + struct.pack("<IHHI", 130, 0, 0, 122) + sizes + masks + bytes(52) + bytes([1, 2, 3, 4, 5, 6, 7, 255])

    assert probe(data).alpha
    assert decode_image(data, channels=4).tolist() == [[[3, 2, 1, 4], [7, 6, 5, 255]]]


def test_bmp_from_the_top_down_decodes():
    """A negative height stores the first row first."""
    data = bmp(width=1, height=-2, bits=24, pixels=bytes([1, 2, 3, 0, 4, 5, 6, 0]))

    assert decode_image(data)[:, 0].tolist() == [[3, 2, 1], [6, 5, 4]]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (bmp()[:40], "without a complete header"),
        (bmp(bits=16), "16 bits per pixel"),
        (bmp(bits=8, compression=1), "compression 1"),
        (bmp(compression=3, pixels=bytes(16)), "unusual colour masks; want plain"),
        (bmp(compression=3, bits=24, pixels=bytes(16)), "24 bits per pixel with compression 3"),
        (bmp(width=-2), "-2 x 1 pixels; want at least one"),
        (bmp(width=1 << 20, height=1 << 20), "want 4398046511158 bytes"),
        (bmp()[:-1], r"BMP of 61 bytes .* want 62"),
        (bmp(offset=20), "pixels from byte 20"),
    ],
    ids=itertools.count(),
)
def test_wrong_bmp_is_refused(data, found):
    """Damaged, truncated, compressed and giant BMP files are refused before decoding."""
    with pytest.raises(InputError, match=found):
        decode_image(data)


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("orientation", [1, 6])
def test_webp_headers_are_read(lossless, orientation):
    """Simple and extended containers, lossy and lossless, with EXIF."""
    options = {"exif": exif(orientation)} if orientation > 1 else {}
    data = saved(RGB, "webp", lossless=lossless, **options)

    info = probe(data)

    assert (info.height, info.width, info.channels, info.orientation) == (5, 7, 3, orientation)
    assert decode_image(data).shape == ((7, 5, 3) if orientation == 6 else (5, 7, 3))


def test_every_truncation_of_webp_and_bmp_is_noticed():
    """A file truncated anywhere is refused."""
    for data in (saved(RGB, "webp"), saved(RGBA, "webp", lossless=True), saved(RGB, "bmp")):
        for length in range(len(data)):
            with pytest.raises(InputError):
                decode_image(data[:length], channels=4)


def test_webp_chunk_past_the_container_is_refused():
    """A chunk that claims more than its container holds is an error."""
    data = bytearray(saved(RGB, "webp"))
    data[16:20] = (len(data) * 2).to_bytes(4, "little")

    with pytest.raises(InputError, match=r"WebP of \d+ bytes whose container declares"):
        decode_image(bytes(data))


def test_damaged_webp_is_refused():
    """What cv2 cannot decode is an error with the file's name."""
    data = bytearray(saved(np.tile(RGB, (9, 9, 1)), "webp", lossless=True))
    data[25:] = bytes(len(data) - 25)

    with pytest.raises(InputError, match=r"'w\.webp': webp that"):
        decode_image(bytes(data), name="w.webp")


def animated(encoding):
    buffer = io.BytesIO()
    frames = [Image.fromarray(RGB), Image.fromarray(RGB[::-1].copy())]
    frames[0].save(buffer, encoding, save_all=True, append_images=frames[1:])
    return buffer.getvalue()


@pytest.mark.parametrize("encoding", ["png", "webp"])
def test_animations_are_refused(encoding):
    """Decoders differ in the frame that they return; none is chosen silently."""
    data = animated(encoding)

    assert probe(data).animated
    assert not can_keep_image(probe(data))
    with pytest.raises(InputError, match=f"animated {encoding}; want one image; extract"):
        decode_image(data)


@pytest.mark.parametrize(
    ("data", "channels", "found"),
    [
        (png(6, 8), 3, "png with alpha; want an opaque image; declare channels=4, or convert"),
        (png(4, 8), 1, "png with alpha"),
        (png(3, 8), 1, "png with colours; want a grey image; declare channels=3"),
        (png(2, 8), 1, "png with colours"),
        (png(2, 16), 3, "16 bits per sample; want at most 8 bits; convert it to 8 bits, or declare dtype='uint16'"),
        (png(0, 16), 1, "16 bits per sample"),
        (build_png(RGB, before=[chunk(b"tRNS", bytes(6))]), 3, "png with alpha"),
    ],
    ids=itertools.count(),
)
def test_images_that_channels_cannot_hold_are_refused(data, channels, found):
    """Nothing is dropped silently: not alpha, not colours, not low bits."""
    with pytest.raises(InputError, match=f"'k': .*{found}"):
        decode_image(data, channels=channels, name="k")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (png(2, 8), "mask of RGB samples; want one class id per pixel; save the class ids as an 8-bit grey PNG"),
        (png(4, 8), "mask of grey and alpha samples"),
        (png(6, 8), "mask of RGBA samples"),
        (png(0, 16), "16 bits per sample"),
        (saved(RGB, "webp"), "mask in webp; want PNG"),
        (saved(RGB, "bmp"), "mask in bmp; want PNG"),
        (animated("png"), "animated png"),
    ],
    ids=itertools.count(),
)
def test_masks_that_are_not_class_ids_are_refused(data, found):
    """The message says what to save instead."""
    with pytest.raises(InputError, match=f"'m.png': .*{found}"):
        decode_mask(data, name="m.png")


def test_transparent_colour_of_a_mask_is_ignored():
    """Segmentation datasets mark a class as transparent for viewers; its id stays."""
    data = build_png([[[0], [5]]], colour=3, before=[PALETTE, chunk(b"tRNS", b"\0")])

    assert decode_mask(data).tolist() == [[0, 5]]


@pytest.mark.parametrize("channels", [0, 5, None])
def test_other_channel_counts_are_refused(channels):
    """Only grey and RGB exist, with alpha or without."""
    with pytest.raises(
        OptionError, match=r"channels is .*; want 1 \(grey\), 2 \(grey and alpha\), 3 \(RGB\) or 4 \(RGBA\)"
    ):
        decode_image(encode_png(RGB), channels=channels)


@pytest.mark.parametrize("function", [probe, decode_image, decode_mask])
def test_bombs_are_refused_from_the_header(function):
    """A file of 57 bytes that declares 2^31 x 2^31 pixels, or one over the limit, costs nothing."""
    start = b"\x89PNG\r\n\x1a\n"

    for width, height in ((1 << 31, 1 << 31), (65536, 65536), (178_956_971, 1), (0, 5), (5, 0)):
        with pytest.raises(InputError, match=f"png of {width} x {height} pixels; want at"):
            function(start + header(width, height, 8, 0) + chunk(b"IDAT") + chunk(b"IEND"))


def test_limit_on_pixels_can_be_set():
    """The limit is on width times height."""
    data = encode_png(RGB)

    assert probe(data, max_pixels=35).width == 7
    with pytest.raises(InputError, match="7 x 5 pixels; want at most 34 pixels; tile it, shrink it or raise"):
        probe(data, max_pixels=34)


KEPT = {
    "rgb png": (build_png(RGB), 3),
    "interlaced png": (build_png(RGB, interlaced=True), 3),
    "grey png": (png(0, 8), 1),
    "rgba png": (png(6, 8), 4),
    "rgb jpeg": (encode_jpeg(RGB), 3),
    "grey jpeg": (encode_jpeg(RGB[..., 0]), 1),
    "grey for rgb": (png(0, 8), 3),
}
NOT_KEPT = {
    "rgb for rgba": (png(2, 8), 4),
    "grey with alpha": (png(4, 8), 1),
    "4 bits": (png(0, 4), 1),
    "16 bits": (png(2, 16), 3),
    "palette": (png(3, 8), 3),
    "palette as grey": (png(3, 8), 1),
    "transparent colour": (build_png(RGB, before=[chunk(b"tRNS", bytes(6))]), 3),
    "turned": (build_png(RGB, after=[chunk(b"eXIf", exif(3))]), 3),
    "webp": (saved(RGB, "webp"), 3),
    "bmp": (saved(RGB, "bmp"), 3),
}


@pytest.mark.parametrize("case", KEPT)
def test_bytes_that_every_decoder_reads_alike_are_kept(case):
    """Pillow, given only the number of channels, returns the pixels that decode_image returns."""
    data, channels = KEPT[case]

    assert can_keep_image(probe(data), channels=channels)
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels]))
    assert np.array_equal(pixels.reshape(*pixels.shape[:2], -1), decode_image(data, channels=channels))


@pytest.mark.parametrize("case", NOT_KEPT)
def test_bytes_that_decoders_read_differently_are_not_kept(case):
    """Such files are decoded and encoded again."""
    data, channels = NOT_KEPT[case]

    assert not can_keep_image(probe(data), channels=channels)


def test_only_8_bit_grey_png_is_kept_as_mask():
    """Decoders expand palettes and scale small depths."""
    refused = [png(3, 8), png(0, 4), png(0, 1), png(2, 8), png(0, 16), png(4, 8), encode_jpeg(RGB[..., 0])]
    turned = build_png(RGB[..., :1], colour=0, before=[chunk(b"eXIf", exif(6))])

    assert can_keep_mask(probe(png(0, 8)))
    assert can_keep_mask(probe(png(0, 8, interlaced=True)))
    assert not any(can_keep_mask(probe(data)) for data in [*refused, turned])


def test_file_that_was_found_whole_is_checked_again_where_it_may_differ():
    """Another limit is compared, and a buffer may have changed."""
    data = encode_png(RGB)
    buffer = bytearray(data)

    for _ in range(2):
        assert probe(buffer, whole=True) == probe(data, whole=True) == probe(data)
    with pytest.raises(InputError, match="at most 34 pixels"):
        probe(data, whole=True, max_pixels=34)
    buffer[-20] ^= 1
    with pytest.raises(InputError, match="wrong CRC"):
        probe(buffer, whole=True)


def test_damaged_file_stays_damaged():
    """Neither a look at its header alone nor an earlier refusal makes it pass."""
    data = bytearray(encode_png(np.zeros((3, 4, 3), np.uint8)))
    data[-20] ^= 1
    damaged = bytes(data)

    probe(damaged)
    for _ in range(2):
        with pytest.raises(InputError, match="wrong CRC"):
            probe(damaged, whole=True)


def test_file_as_long_as_a_whole_one_is_checked():
    """Files of one length are known one at a time; a damaged one never passes for another."""
    data = encode_png(np.zeros((3, 4, 3), np.uint8))
    damaged = bytearray(data)
    damaged[-20] ^= 1

    for _ in range(2):
        probe(data, whole=True)
        with pytest.raises(InputError, match="wrong CRC"):
            probe(bytes(damaged), whole=True)


def test_whole_files_of_every_encoding_pass():
    """The message names the truncated file."""
    for encoding in ("png", "jpeg", "webp", "bmp"):
        data = saved(RGB, encoding)

        assert probe(data) == probe(data, whole=True)
        with pytest.raises(InputError, match=f"^'{encoding}': "):
            probe(data[:-2], whole=True, name=encoding)


def test_memory_that_fits_is_used():
    """PNG as cv2 writes it, and JPEG: the pixels are not copied."""
    png, jpeg, mask = saved_by_cv2(RGB), encode_jpeg(RGB, quality=90), saved_by_cv2(RGB[..., 0])
    memory, ids = np.full((3, *RGB.shape), 9, np.uint8), np.empty(RGB.shape[:2], np.uint8)
    image = memory[1]

    assert decode_image(png, out=image) is image
    assert np.array_equal(image, RGB)
    assert decode_image(jpeg, out=image) is image
    assert np.array_equal(image, decode_image(jpeg))
    assert (memory[[0, 2]] == 9).all()
    assert decode_mask(mask, out=ids) is ids
    assert np.array_equal(ids, RGB[..., 0])


@pytest.mark.parametrize(
    "memory",
    [np.zeros((7, 5, 3), np.uint8), np.zeros(RGB.shape, np.int8), np.zeros((5, 7, 6), np.uint8)[..., ::2]],
    ids=["shape", "dtype", "not contiguous"],
)
@pytest.mark.parametrize("data", [encode_png(RGB), encode_jpeg(RGB, quality=90)], ids=["png", "jpeg"])
def test_memory_that_does_not_fit_is_left_alone(data, memory):
    """The result is then an array of its own."""
    found = decode_image(data, out=memory)

    assert np.array_equal(found, decode_image(data))
    assert not memory.any()


def test_rotated_picture_is_not_decoded_into_the_memory():
    """An image stored upside down has the right shape, but must not be decoded in place."""
    turned = saved(RGB, "jpeg", exif=b"Exif\0\0" + exif(3))
    memory = np.empty(RGB.shape, np.uint8)

    assert np.array_equal(decode_image(turned, out=memory), decode_image(turned))
