"""JPEG: headers, structure, pixels, and the refusals of what decoders would let pass."""

from __future__ import annotations

import io
import struct

import cv2
import numpy as np
import pytest
from conftest import without
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from png_builder import exif

from datamat.codecs import can_keep_image, decode_image, decode_mask, encode_jpeg, probe
from datamat.errors import InputError, OptionError


def picture(height=12, width=20, channels=3):
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 9 + columns * (4 + c) for c in range(channels)], -1).astype(np.uint8)


def pillow_jpeg(array, mode=None, **options):
    buffer = io.BytesIO()
    image = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    (image.convert(mode) if mode else image).save(buffer, "jpeg", **options)
    return buffer.getvalue()


def test_probe_reads_the_frame_header():
    """Size, components and depth come from SOF, of baseline and progressive files, grey and RGB."""
    for channels in (1, 3):
        for progressive in (False, True):
            info = probe(pillow_jpeg(picture(5, 7, channels), progressive=progressive))

            assert (info.encoding, info.height, info.width, info.channels) == ("jpeg", 5, 7, channels)
            assert (info.bit_depth, info.orientation, info.cmyk, info.animated) == (8, 1, False, False)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([1, 3]),
    st.booleans(),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([0, 1]),
)
def test_decode_image_gives_the_pixels_of_pillow(height, width, channels, progressive, subsampling, restarts):
    """Baseline and progressive, every chroma sampling, restart markers: the pixels are those of Pillow."""
    data = pillow_jpeg(
        picture(height, width, channels),
        progressive=progressive,
        subsampling=subsampling,
        restart_marker_rows=restarts,
    )

    pixels = decode_image(data)

    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(pixels, np.asarray(image.convert("RGB")))
    assert channels == 3 or np.array_equal(decode_image(data, channels=1), pixels[..., :1])
    assert np.array_equal(decode_image(data, channels=4)[..., :3], pixels)
    assert (decode_image(data, channels=4)[..., 3] == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_image_applies_orientation_as_pillow_on_request(orientation):
    """A picture tagged by Pillow comes upright, and may not be kept as it is unless it already was."""
    tag = Image.Exif()
    tag[0x0112] = orientation
    data = pillow_jpeg(picture(), exif=tag)

    pixels = decode_image(data)

    info = probe(data)
    assert (info.orientation, info.height, info.width) == (orientation, 12, 20)
    assert can_keep_image(info) == (orientation == 1)
    with Image.open(io.BytesIO(data)) as image:
        turned = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}.get(orientation)
        expected = image if turned is None else image.transpose(Image.Transpose(turned))
        assert np.array_equal(pixels, np.asarray(expected))


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"II*\0",
        b"XX*\0" + bytes(20),
        b"II*\0\xff\xff\xff\xff" + bytes(20),
        exif(6)[:-10],
        exif(0),
        exif(9),
        exif(6).replace(b"\x03\0\x01\0\0\0", b"\x02\0\x01\0\0\0"),
        b"II*\0" + struct.pack("<IH", 8, 65535),
    ],
)
def test_broken_exif_is_no_reason_to_refuse(block):
    """Without a clear orientation the picture is shown as stored."""
    data = pillow_jpeg(picture(), exif=b"Exif\0\0" + block)

    assert probe(data).orientation == 1
    assert decode_image(data).shape == (12, 20, 3)


def test_first_exif_block_counts():
    """A second APP1 with another orientation is ignored."""
    data = pillow_jpeg(picture(), exif=b"Exif\0\0" + exif(3))
    second = b"Exif\0\0" + exif(6)
    at = data.index(b"\xff\xdb")
    data = data[:at] + b"\xff\xe1" + struct.pack(">H", 2 + len(second)) + second + data[at:]

    assert probe(data).orientation == 3


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_every_truncation_is_noticed(options):
    """A file cut anywhere is refused, decoded or kept; libjpeg would warn and fill with grey."""
    data = pillow_jpeg(picture(), **options)

    for length in range(len(data)):
        with pytest.raises(InputError):
            decode_image(data[:length])
        with pytest.raises(InputError):
            probe(data[:length], whole=True)
    probe(data, whole=True)


@pytest.mark.parametrize("progressive", [False, True])
def test_piece_of_another_file_among_the_pixels_is_noticed(progressive):
    """As a disk or a download leaves it, end and length in order; the decoder would give some picture."""
    data = pillow_jpeg(np.random.default_rng(0).integers(0, 256, (96, 160, 3), np.uint8), progressive=progressive)
    pixels = data.index(b"\xff\xda")
    header = data[:pixels]

    for at in range(pixels + 20, len(data) - len(header) - 2, 97):
        with pytest.raises(InputError):
            probe(data[:at] + header + data[at + len(header) :], whole=True)


def test_bytes_after_the_end_are_ignored():
    """Phones append previews and video after EOI."""
    data = pillow_jpeg(picture())

    assert np.array_equal(decode_image(data + b"\xff\xd8 motion photo"), decode_image(data))


def test_fill_bytes_before_markers_are_allowed():
    """T.81 lets any number of 0xff stand before a marker."""
    data = pillow_jpeg(picture())
    at = data.index(b"\xff\xdb")

    filled = data[:at] + b"\xff\xff" + data[at:-2] + b"\xff" + data[-2:]

    assert np.array_equal(decode_image(filled), decode_image(data))


def replaced_frame(data, frame):
    at = data.index(b"\xff\xc0")
    length = struct.unpack(">H", data[at + 2 : at + 4])[0]
    return data[:at] + frame + data[at + 2 + length :]


def frame(marker=0xC0, depth=8, height=12, width=20, components=3):
    body = struct.pack(">BHHB", depth, height, width, components) + b"\1\x11\0" * components
    return bytes([0xFF, marker]) + struct.pack(">H", 2 + len(body)) + body


@pytest.mark.parametrize(
    ("new_frame", "found"),
    [
        (frame(height=65535, width=65535), "65535 x 65535 pixels; want at most 178956970"),
        (frame(height=0), "20 x 0 pixels; want at least one"),
        (frame(depth=12), "12 bits per sample"),
        (frame(components=4), "CMYK"),
        (frame(components=2), "frame of 2 components"),
        (frame(components=3)[:-1], "JPEG"),
        (frame(marker=0xC3), "process SOF3"),
        (frame(marker=0xC9), "process SOF9"),
        (frame() + frame(), "two frame headers"),
        (b"", "without a frame header"),
        (b"\0\0", "byte 0x00 for a marker at byte"),
        (b"\xff\xe5\0\1", "ends before its end-of-image marker"),
    ],
)
def test_wrong_frames_are_refused(new_frame, found):
    """Bombs, unusual processes and damaged headers stop before any decoding."""
    data = replaced_frame(pillow_jpeg(picture()), new_frame)

    with pytest.raises(InputError, match=f"'a.jpg': .*{found}"):
        decode_image(data, name="a.jpg")


def test_cmyk_is_refused():
    """Inks need a colour profile; decoders guess differently."""
    data = pillow_jpeg(picture(), "CMYK")

    assert probe(data).cmyk
    assert not can_keep_image(probe(data), channels=4)
    with pytest.raises(InputError, match="CMYK inks; want RGB or grey; convert it"):
        decode_image(data)


def test_scan_bomb_is_refused():
    """Thousands of scans in a small progressive file cost minutes in libjpeg."""
    data = pillow_jpeg(picture(8, 8, 1), progressive=True)
    at = data.rindex(b"\xff\xda")
    bomb = data[:at] + data[at:-2] * 600 + data[-2:]

    with pytest.raises(InputError, match="over 500 scans"):
        decode_image(bomb)


def test_file_without_pixels_is_refused():
    """An abbreviated file holds tables only."""
    data = pillow_jpeg(picture())

    with pytest.raises(InputError, match="JPEG without pixels"):
        decode_image(data[: data.index(b"\xff\xda")] + b"\xff\xd9")


def test_picture_that_cv2_refuses_is_an_error():
    """What cv2 answers with None, here a file without quantization tables, is an error with the file's name."""
    data = bytearray(pillow_jpeg(picture()))
    del data[data.index(b"\xff\xdb") : data.index(b"\xff\xc0")]

    with pytest.raises(InputError, match=r"'b.jpg': jpeg that does not decode \(cv2"):
        decode_image(bytes(data), name="b.jpg")


def test_jpeg_masks_are_refused():
    """Lossy class ids are wrong class ids."""
    with pytest.raises(InputError, match=r"mask in jpeg, which changes class ids; want PNG; save .* 8-bit grey PNG"):
        decode_mask(pillow_jpeg(picture(channels=1)))


@pytest.mark.parametrize("channels", [0, 1, 3])
def test_encode_jpeg_is_what_cv2_writes(channels):
    """The bytes are those of cv2 for the same picture, RGB order heeded, views too."""
    array = picture(channels=channels or 1) if channels else picture(channels=1)[..., 0]
    bgr = array[..., ::-1].copy() if channels == 3 else array
    expected = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()

    assert encode_jpeg(array, quality=90) == expected
    assert encode_jpeg(array[::-1][::-1], quality=90) == expected


def test_encode_jpeg_is_close_at_high_quality():
    """Quality 100 keeps a smooth grey picture within two levels, after our own decoder."""
    array = np.add.outer(np.arange(40), np.arange(50)).astype(np.uint8)

    decoded = decode_image(encode_jpeg(array, quality=100), channels=1)

    assert np.abs(decoded[..., 0].astype(int) - array).max() <= 2


@pytest.mark.parametrize(
    ("array", "options", "found"),
    [
        (np.zeros((2, 2, 4), np.uint8), {}, r"uint8 \(2, 2, 4\); want uint8"),
        (np.zeros((2, 2), np.int64), {}, r"int64 \(2, 2\)"),
        (np.zeros((2, 2), np.uint8), {"quality": 0}, "quality is 0; want 1 to 100"),
        (np.zeros((2, 2), np.uint8), {"quality": 101}, "quality is 101; want 1 to 100"),
        (np.zeros((1, 65501), np.uint8), {}, "want sides up to 65500; store it as PNG"),
    ],
)
def test_encode_jpeg_refuses_what_jpeg_cannot_hold(array, options, found):
    """The message says what came and what was wanted."""
    with pytest.raises(OptionError, match=found):
        encode_jpeg(array, **options)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([1, 3]), st.booleans(), st.sampled_from([0, 1, 2]), st.lists(st.integers(0, 1 << 20), max_size=3)
)
def test_pixels_and_refusals_do_not_depend_on_the_decoder(channels, progressive, subsampling, flips):
    """Sound files and damaged ones: simplejpeg decodes what it has nothing against, cv2 the rest, as cv2 alone does."""
    content = bytearray(
        pillow_jpeg(
            picture(33, 47, channels), progressive=progressive, subsampling=subsampling if channels == 3 else -1
        )
    )
    for flip in flips:
        content[2 + flip % (len(content) - 4)] ^= 1 << flip % 8

    found, wanted = (_decoded_or_refusal(bytes(content), channels, missing) for missing in ((), ("simplejpeg",)))

    assert np.array_equal(found, wanted)


def _decoded_or_refusal(data, channels, missing):
    with without(missing):
        try:
            return decode_image(data, channels=channels)
        except InputError as error:
            return str(error)


def test_simplejpeg_decodes_where_it_is_installed(monkeypatch):
    """cv2 is asked only when it has something against a file."""
    pytest.importorskip("simplejpeg", reason="cv2 decodes without it")
    data = pillow_jpeg(picture())
    wanted = decode_image(data)
    monkeypatch.setattr("datamat.codecs.pictures.decode_with_cv2", None)

    assert np.array_equal(decode_image(data), wanted)
