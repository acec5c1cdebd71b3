"""JPEG: headers, structure, pixels, and refusals of files that decoders would accept."""

import functools
import io
import re
import struct

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from missing_libraries import without
from PIL import Image
from png_builder import exif

from datamat.codecs import can_keep_image, check_pixels, decode_image, decode_mask, encode_jpeg, probe
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
    """Size, components and depth come from SOF, for baseline and progressive files, grey and RGB."""
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
    """An image with an orientation is turned upright, and its file is kept only if it already was."""
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
    """Without a valid orientation, the image stays as stored."""
    data = pillow_jpeg(picture(), exif=b"Exif\0\0" + block)

    assert probe(data).orientation == 1
    assert decode_image(data).shape == (12, 20, 3)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_every_truncation_is_noticed(options):
    """A file truncated anywhere is refused, to decode or to keep; libjpeg would warn and fill with grey."""
    data = pillow_jpeg(picture(), **options)

    for length in range(len(data)):
        with pytest.raises(InputError):
            decode_image(data[:length])
        with pytest.raises(InputError):
            probe(data[:length], whole=True)
    probe(data, whole=True)


@pytest.mark.parametrize("progressive", [False, True])
def test_piece_of_another_file_among_the_pixels_is_noticed(progressive):
    """A disk or a download may leave end and length intact; the decoder would return some image."""
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
    """T.81 permits any number of 0xff before a marker."""
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
    """Bombs, unusual processes and damaged headers are refused before decoding."""
    data = replaced_frame(pillow_jpeg(picture()), new_frame)

    with pytest.raises(InputError, match=f"'a.jpg': .*{found}"):
        decode_image(data, name="a.jpg")


def test_cmyk_is_refused():
    """CMYK needs a colour profile, and decoders guess differently."""
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


@pytest.mark.parametrize(("modules", "reason"), [((), "Quantization table"), (("simplejpeg",), "cv2")])
def test_picture_that_no_decoder_takes_is_an_error(modules, reason):
    """The message has the file's name and the decoder's reason: here, missing quantization tables."""
    data = bytearray(pillow_jpeg(picture()))
    del data[data.index(b"\xff\xdb") : data.index(b"\xff\xc0")]

    with without(modules), pytest.raises(InputError, match=rf"'b.jpg': jpeg that does not decode \({reason}"):
        decode_image(bytes(data), name="b.jpg")


def test_jpeg_masks_are_refused():
    """Lossy class ids are wrong class ids."""
    with pytest.raises(InputError, match=r"mask in jpeg, which changes class ids; want PNG; save .* 8-bit grey PNG"):
        decode_mask(pillow_jpeg(picture(channels=1)))


@pytest.mark.parametrize("channels", [0, 1, 3])
def test_encode_jpeg_is_what_cv2_writes(channels):
    """The bytes are those of cv2 for the same image in BGR order; views work, too."""
    array = picture(channels=channels or 1) if channels else picture(channels=1)[..., 0]
    bgr = array[..., ::-1].copy() if channels == 3 else array
    expected = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()

    assert encode_jpeg(array, quality=90) == expected
    assert encode_jpeg(array[::-1][::-1], quality=90) == expected


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
    """The message says what was found and what was wanted."""
    with pytest.raises(OptionError, match=found):
        encode_jpeg(array, **options)


KINDS = {
    "baseline": {},
    "sampled": {"subsampling": 2, "optimize": True},
    "restarts": {"restart_marker_rows": 1},
    "progressive": {"progressive": True},
    "progressive, sampled, restarts": {"progressive": True, "subsampling": 2, "restart_marker_blocks": 5},
    "grey": {"mode": "L"},
    "progressive grey": {"mode": "L", "progressive": True},
}
RNG_PICTURE = np.kron(np.random.default_rng(0).integers(0, 256, (9, 12, 3)), np.ones((8, 8, 1))).astype(np.uint8)


def flipped(data, at, rng):
    return data[:at] + bytes([data[at] ^ 1 << rng.integers(8)]) + data[at + 1 :]


def lost(data, at, rng):
    return data[:at] + data[at + rng.integers(1, 99) : -2] + b"\xff\xd9"


def inserted(data, at, rng):
    return data[:at] + rng.bytes(rng.integers(1, 40)) + data[at:]


def zeroed(data, at, rng):
    stop = min(at + rng.integers(1, 99), len(data) - 2)
    return data[:at] + bytes(stop - at) + data[stop:]


def doubled(data, at, rng):
    return data[: at + rng.integers(1, 99)][:-2] + data[at:]


def without_end(data, at, rng):
    return data[:-2]


def refusal(function, data, **options):
    """Return the message of an InputError, or "" if none is raised."""
    try:
        function(data, **options)
    except InputError as error:
        return str(error)
    return ""


def complaint(data):
    """Return libjpeg's complaint about a file from a strict decoder, be it about damage or anything else."""
    strict = pytest.importorskip("simplejpeg", reason="the strict decoder")
    try:
        strict.decode_jpeg(data)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "damage", [flipped, lost, inserted, zeroed, doubled, without_end], ids=lambda way: way.__name__
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_libjpeg_calls_damaged_is_refused(kind, damage):
    """Damage is refused, to decode or to keep, in any kind of file; cv2 accepts most of these, and fills with grey."""
    sound = pillow_jpeg(RNG_PICTURE, **KINDS[kind])
    rng = np.random.default_rng(len(kind))
    start = sound.index(b"\xff\xda") + 14
    refusals = 0

    for _ in range(25):
        data = damage(sound, int(rng.integers(start, len(sound) - 2)), rng)
        said = complaint(data)
        decoding = refusal(decode_image, data, name="d.jpg")
        keeping = refusal(functools.partial(probe, whole=True), data) or refusal(check_pixels, data)
        if said:
            assert "d.jpg" in decoding and keeping, said
        assert bool(decoding) == bool(keeping)
        refusals += bool(decoding)

    assert refusals >= (25 if damage is without_end else 2)
    assert not refusal(decode_image, sound) and not refusal(check_pixels, sound)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 1 << 20), max_size=2))
def test_pixels_and_refusals_do_not_depend_on_the_decoder(kind, flips):
    """Without simplejpeg, cv2 decodes, and damage is still found."""
    content = bytearray(pillow_jpeg(RNG_PICTURE, **KINDS[kind]))
    for flip in flips:
        content[2 + flip % (len(content) - 4)] ^= 1 << flip % 8

    found, wanted = (_decoded_or_refusal(bytes(content), 3, missing) for missing in ((), ("simplejpeg",)))

    # libjpeg passes over a bad code here and there, where it looks at many bits at once; the walk does not.
    assert isinstance(wanted, str) if isinstance(found, str) or isinstance(wanted, str) else True
    assert isinstance(wanted, str) or np.array_equal(found, wanted)


def grey_scan(plane, name, *, progressive):
    """Return tables, frame entry and scans of a plane, to be one component of an image."""
    data = pillow_jpeg(plane[..., None], quality=90, progressive=progressive)
    header = data[: data.index(b"\xff\xda")]
    tables = header[header.index(b"\xff\xdb") :]
    at = re.search(rb"\xff[\xc0\xc2]", tables).start()
    size = 2 + int.from_bytes(tables[at + 2 : at + 4], "big")
    scans = data[len(header) : -2]
    # In each scan's header stands the name of its one component.
    scans = re.sub(rb"\xff\xda\0\x08\x01.", b"\xff\xda\0\x08\x01" + bytes([name]), scans, flags=re.DOTALL)
    return tables[:at] + tables[at + size :] + scans, tables[at : at + 5]


def oddly_sampled(*, progressive=False, height=48, width=72):
    """Return an intact file with chroma subsampling that simplejpeg does not support: 3 x 3."""
    luma = np.add.outer(np.arange(height) * 2, np.arange(width)).astype(np.uint8)
    chroma = np.full((height // 3, width // 3), 90, np.uint8) + np.arange(width // 3, dtype=np.uint8)
    planes = [
        grey_scan(plane, name, progressive=progressive) for name, plane in enumerate((luma, chroma, chroma[::-1]), 1)
    ]
    body = struct.pack(">BHHB", 8, height, width, 3) + b"\x01\x33\0" + b"\x02\x11\0" + b"\x03\x11\0"
    marker = planes[0][1][:2]
    begin = b"\xff\xd8" + marker + struct.pack(">H", 2 + len(body)) + body
    return begin + b"".join(scans for scans, _ in planes) + b"\xff\xd9"


@pytest.mark.parametrize("progressive", [False, True])
def test_sampling_that_simplejpeg_does_not_support_is_no_damage(progressive):
    """cv2 decodes these; they are accepted if intact and refused if not, to decode or to keep."""
    data = oddly_sampled(progressive=progressive)
    end = data.rindex(b"\xff\xda") + 12

    pixels = decode_image(data)

    assert "subsampling" in complaint(data)
    assert np.array_equal(pixels, cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB))
    assert not refusal(check_pixels, data)
    for damaged in (data[:end] + data[end + 2 :], data[:-2] + b"\x55" * 30 + data[-2:]):
        assert cv2.imdecode(np.frombuffer(damaged, np.uint8), cv2.IMREAD_COLOR_RGB) is not None
        assert "Corrupt JPEG data" in refusal(decode_image, damaged)
        assert "Corrupt JPEG data" in refusal(check_pixels, damaged)


def odd_version(data):
    at = data.index(b"JFIF\0")
    return data[: at + 5] + b"\x02" + data[at + 6 :]


def odd_adobe(data):
    segment = b"Adobe\0\x64\0\0\0\0\x07"
    jfif = data.index(b"\xff\xe0")
    rest = data[jfif + 4 + 14 :]
    return data[:jfif] + b"\xff\xee" + struct.pack(">H", 2 + len(segment)) + segment + rest


def odd_scan(data):
    at = data.index(b"\xff\xda")
    stop = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return data[: stop - 3] + b"\0\0\0" + data[stop:]


@pytest.mark.parametrize("odd", [odd_version, odd_adobe, odd_scan], ids=lambda odd: odd.__name__)
def test_odd_header_is_no_damage_and_hides_none(odd):
    """Cameras write such headers; libjpeg complains about them, and about nothing after them."""
    sound = pillow_jpeg(RNG_PICTURE, subsampling=0)
    data = odd(sound)
    at = len(data) * 2 // 3
    damaged = data[:at] + bytes(200) + data[at + 200 :]

    assert complaint(data) == complaint(damaged) != ""
    assert np.array_equal(decode_image(data), decode_image(sound))
    assert not refusal(check_pixels, data)
    assert "Corrupt JPEG data" in refusal(decode_image, damaged)
    assert refusal(check_pixels, damaged)


def _decoded_or_refusal(data, channels, missing):
    with without(missing):
        try:
            return decode_image(data, channels=channels)
        except InputError as error:
            return str(error)


def test_simplejpeg_decodes_where_it_is_installed(monkeypatch):
    """cv2 decodes only the files that simplejpeg does not support."""
    pytest.importorskip("simplejpeg", reason="cv2 decodes without it")
    data = pillow_jpeg(picture())
    wanted = decode_image(data)
    monkeypatch.setattr("datamat.codecs.images.decode_with_cv2", None)

    assert np.array_equal(decode_image(data), wanted)


def test_header_is_found_before_any_byte_that_looks_like_a_scan():
    """Heads that were seen before are not walked again; a segment may hold the bytes of the marker that ends them."""
    pixels = np.zeros((8, 16, 3), np.uint8)
    plain = encode_jpeg(pixels)
    for note in (b"", b"\xff\xda\x00\x02", b"\xff\xda\xff\xff", b"\xff\xda" * 700):
        data = plain[:2] + b"\xff\xfe" + (2 + len(note)).to_bytes(2, "big") + note + plain[2:]
        for _ in range(2):
            assert probe(data) == probe(data, whole=True) == probe(plain)
            assert np.array_equal(decode_image(data, is_whole=True), decode_image(plain))
    for end in range(2, plain.index(b"\xff\xda") + 4):
        with pytest.raises(InputError):
            probe(plain[:end])
