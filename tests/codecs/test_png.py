"""PNG decoding and encoding against Pillow, cv2 and a plain writer, with and without the fast libraries."""

import concurrent.futures
import hashlib
import io
import struct
import tracemalloc
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from missing_libraries import COMBINATIONS, without
from PIL import Image
from png_builder import SAMPLES, build_png, chunk, exif, header

from datamat.codecs import decode_image, decode_mask, encode_png, libraries, png, probe
from datamat.errors import InputError, OptionError

KINDS = [(0, 1), (0, 2), (0, 4), (0, 8), (2, 8), (3, 1), (3, 2), (3, 4), (3, 8), (4, 8), (6, 8)]


@st.composite
def pictures(draw, kinds=tuple(KINDS)):
    """A PNG file of any kind with its samples: colour type, depth, filters, interlacing, transparency, IDAT sizes."""
    colour, depth = draw(st.sampled_from(kinds))
    height, width = draw(st.integers(1, 18)), draw(st.integers(1, 18))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    top = draw(st.sampled_from([1, 2, 1 << depth]))  # few values as in masks, or all
    samples = rng.integers(0, min(top, 1 << depth), (height, width, SAMPLES[colour]), dtype=np.uint8)
    before = [chunk(b"gAMA", struct.pack(">I", 45455))] if draw(st.booleans()) else []
    transparent = draw(st.booleans())
    if colour == 3:
        before.append(chunk(b"PLTE", rng.integers(0, 256, 3 << depth, dtype=np.uint8).tobytes()))
    if colour in {0, 2} and depth == 8 and transparent:  # Pillow compares small depths after scaling them: wrong
        before.append(chunk(b"tRNS", samples[0, 0].astype(">u2").tobytes()))
    if colour == 3 and transparent:
        before.append(chunk(b"tRNS", rng.integers(0, 256, draw(st.integers(1, 1 << depth)), dtype=np.uint8).tobytes()))
    data = build_png(
        samples,
        colour=colour,
        depth=depth,
        filters=draw(st.lists(st.integers(0, 4), min_size=1, max_size=6)),
        interlaced=draw(st.booleans()),
        before=before,
        split=draw(st.sampled_from([None, 1, 7])),
    )
    return data, samples


def pillow(data, mode):
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert(mode))


@settings(max_examples=100, deadline=None)
@given(pictures(), st.sampled_from(COMBINATIONS))
def test_decode_image_gives_the_pixels_of_pillow(picture, missing_modules):
    """Any colour type, depth, filter, interlacing and transparency decodes as in Pillow, with any library."""
    data, _ = picture

    with without(missing_modules):
        rgba = decode_image(data, channels=4)
        opaque = None if probe(data).alpha else decode_image(data)

    assert np.array_equal(rgba, pillow(data, "RGBA"))
    assert rgba.dtype == np.uint8
    assert rgba.flags.c_contiguous
    assert rgba.flags.writeable
    assert opaque is None or np.array_equal(opaque, pillow(data, "RGB"))


@settings(max_examples=40, deadline=None)
@given(pictures([(0, 8), (2, 8)]))
def test_decode_image_gives_the_pixels_of_cv2(picture):
    """Grey and RGB files decode as with cv2 alone."""
    data, samples = picture

    pixels = decode_image(data, channels=4)[..., :3]

    assert np.array_equal(pixels, cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB))
    assert np.array_equal(pixels, np.broadcast_to(samples, pixels.shape))


@settings(max_examples=60, deadline=None)
@given(pictures([kind for kind in KINDS if kind[0] in {0, 3}]), st.sampled_from(COMBINATIONS))
def test_decode_mask_gives_stored_samples(picture, missing_modules):
    """Unscaled grey values and palette indices survive at every depth, interlaced or not."""
    data, samples = picture

    with without(missing_modules):
        ids = decode_mask(data)

    assert np.array_equal(ids, samples[..., 0])
    assert ids.shape == samples.shape[:2]
    assert ids.flags.c_contiguous


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, 1, 3, 4]), st.integers(0, 99))
def test_encode_png_keeps_every_pixel(height, width, channels, seed):
    """Pillow, cv2 and decode_image return the encoded array."""
    shape = (height, width, channels) if channels else (height, width)
    array = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    data = encode_png(array)

    mode = {0: "L", 1: "L", 3: "RGB", 4: "RGBA"}[channels]
    assert np.array_equal(pillow(data, mode), array.reshape(shape[:2]) if channels < 3 else array)
    assert np.array_equal(decode_image(data, channels=channels or 1), array.reshape(height, width, -1))
    grey = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    assert channels > 1 or np.array_equal(grey, array.reshape(shape[:2]))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(COMBINATIONS))
def test_samples_of_16_bits_decode_exactly(data, missing_modules):
    """Every filter, mixed or alone, with and without Adam7, in the main thread and in others."""
    colour = data.draw(st.sampled_from([0, 2, 4, 6]))
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)), channels)
    samples = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 65536, shape, dtype=np.uint16)
    filters = data.draw(st.sampled_from([(0,), (1,), (2,), (3,), (4,), (0, 1), (0, 2), (4, 1, 3, 2, 0)]))
    file = build_png(samples, colour=colour, depth=16, filters=filters, interlaced=data.draw(st.booleans()))

    with without(missing_modules), concurrent.futures.ThreadPoolExecutor(1) as executor:
        found = decode_image(file, channels=channels, dtype="uint16")
        apart = executor.submit(decode_image, file, channels=channels, dtype="uint16").result()

    assert found.dtype == np.uint16
    assert np.array_equal(found, samples)
    assert np.array_equal(apart, samples)
    assert np.array_equal(decode_image(encode_png(samples), channels=channels, dtype="uint16"), samples)


def test_encode_png_takes_views():
    """Flipped, transposed and strided arrays are encoded as they appear."""
    array = np.arange(240, dtype=np.uint8).reshape(8, 10, 3)

    for view in (array[::-1], array[:, ::-1], array[..., ::-1], array.swapaxes(0, 1), array[::2, ::3]):
        assert np.array_equal(decode_image(encode_png(view)), view)


@pytest.mark.skipif("ng" in zlib.ZLIB_RUNTIME_VERSION, reason="zlib-ng in place of zlib deflates differently")
def test_encode_png_gives_the_same_bytes_on_every_machine(missing):
    """Golden digests: a zlib that deflates differently shows here, not in somebody's resumed run."""
    rows, columns = np.mgrid[:120, :160]
    mask = ((rows // 37 + (columns + rows // 3) // 53) % 12).astype(np.uint8)
    picture = np.random.default_rng(7).integers(0, 40, (50, 60, 3), dtype=np.uint8)

    digests = [hashlib.sha256(encode_png(array)).hexdigest()[:16] for array in (mask, picture)]

    assert digests == ["8d3d3ac9da243487", "462de1ad8e63b107"]


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((2, 2), np.float32), r"float32 \(2, 2\)"),
        (np.zeros((2, 2, 5), np.uint8), r"uint8 \(2, 2, 5\)"),
        (np.zeros((0, 2, 3), np.uint8), r"uint8 \(0, 2, 3\)"),
        (np.zeros(4, np.uint8), r"uint8 \(4,\)"),
    ],
)
def test_encode_png_refuses_other_arrays(array, found):
    """The message says which array was found and which was wanted."""
    with pytest.raises(OptionError, match=f"encode_png: the array is {found}; want uint8"):
        encode_png(array)


def flipped(data, bit):
    found = bytearray(data)
    found[bit // 8] ^= 1 << bit % 8
    return bytes(found)


def test_every_flipped_bit_is_noticed(missing):
    """No flipped bit of a PNG file goes unnoticed, in the header, the data, a CRC or the end."""
    data = build_png(np.arange(36).reshape(3, 4, 3) * 7, filters=(0, 1, 4))

    for bit in range(8 * len(data)):
        with pytest.raises(InputError):
            decode_image(flipped(data, bit), channels=4)


def test_every_truncation_is_noticed(missing):
    """A file truncated anywhere is refused, as an image and as a mask."""
    data = build_png(np.arange(30).reshape(5, 6, 1), colour=0, filters=(2, 4), split=9)

    for length in range(len(data)):
        with pytest.raises(InputError):
            decode_image(data[:length])
        with pytest.raises(InputError):
            decode_mask(data[:length])


def test_bytes_after_the_end_are_ignored(missing):
    """Bytes after IEND are ignored, as in every decoder."""
    data = build_png(np.full((2, 2, 3), 9))

    assert np.array_equal(decode_image(data + b"PK\x03\x04 a hidden archive"), np.full((2, 2, 3), 9))


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"\0" + bytes(6), r"end at 7 bytes of pixels; want 14 bytes"),
        (b"\0" + bytes(6) + b"\0" + bytes(7), "more pixels than its header says"),
        (b"\0" + bytes(6) + b"\5" + bytes(6), "row of filter type 5"),
    ],
)
def test_wrong_scanlines_are_refused(raw, found, missing):
    """Too few rows, too many, and an unknown filter type are refused despite valid CRCs."""
    data = build_png(np.zeros((2, 2, 3)), raw=raw)

    with pytest.raises(InputError, match=f"'a.png': PNG .*{found}"):
        decode_image(data, name="a.png")


def test_small_file_that_inflates_to_much_is_refused_without_inflating(missing):
    """A header of 1 x 1 pixels bounds the memory that 64 MiB of zeros in IDAT take."""
    deflater = zlib.compressobj(9)
    stream = b"".join(deflater.compress(bytes(1 << 20)) for _ in range(64)) + deflater.flush()
    data = b"\x89PNG\r\n\x1a\n" + header(1, 1, 8, 0) + chunk(b"IDAT", stream) + chunk(b"IEND")

    tracemalloc.start()
    with pytest.raises(InputError, match="more pixels than its header says"):
        decode_mask(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 1 << 20


def test_damaged_stream_with_right_crcs_is_refused(missing):
    """A wrong Adler-32, or data that is no stream, is an error even with a matching CRC."""
    stream = bytearray(zlib.compress(bytes(4)))
    stream[-1] ^= 1
    start = b"\x89PNG\r\n\x1a\n" + header(3, 1, 8, 0)

    for damaged in (bytes(stream), b"not zlib at all", bytes(stream[:-4]), b""):
        with pytest.raises(InputError, match="PNG"):
            decode_mask(start + chunk(b"IDAT", damaged) + chunk(b"IEND"))


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([header(1, 1, 8, 0), chunk(b"IEND")], "without IDAT"),
        (
            [header(1, 1, 8, 0), chunk(b"IDAT"), chunk(b"tEXt"), chunk(b"IDAT"), chunk(b"IEND")],
            "without IDAT .* in one",
        ),
        ([header(1, 1, 8, 0), header(1, 1, 8, 0), chunk(b"IDAT"), chunk(b"IEND")], "misplaced IHDR or PLTE"),
        ([header(1, 1, 8, 3), chunk(b"IDAT"), chunk(b"PLTE"), chunk(b"IEND")], "misplaced IHDR or PLTE"),
        ([header(1, 1, 8, 0), chunk(b"CgBI"), chunk(b"IDAT"), chunk(b"IEND")], "unknown critical chunks .*CgBI"),
        ([header(1, 1, 3, 0)], "colour type 0, depth 3"),
        ([header(1, 1, 8, 5)], "colour type 5, depth 8"),
        ([header(1, 1, 8, 0, 2)], "methods 0, 0, 2"),
        ([header(1, 1, 8, 0, 0, 1)], "methods 1, 0, 0"),
        ([chunk(b"IDAT", bytes(13))], "without a complete IHDR"),
        ([header(1, 1, 8, 0), chunk(b"teXt") * ((1 << 18) + 1)], "over 262144 chunks"),
    ],
)
def test_wrong_structure_is_refused(parts, found):
    """Missing, misplaced and unknown chunks are refused, and headers that PNG does not define."""
    with pytest.raises(InputError, match=found):
        decode_image(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize("palette", [b"", b"\1\2", b"\1\2\3"])
def test_index_without_colour_is_refused(palette):
    """A palette that is missing or too short is an error, not black pixels."""
    data = build_png([[[0], [1]]], colour=3, before=[chunk(b"PLTE", palette)])

    with pytest.raises(InputError, match="want a colour for every index"):
        decode_image(data)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_transparent_grey_of_small_depth_is_compared_unscaled(depth):
    """The key is a stored sample, and only the low of its 16 bits count."""
    samples = np.arange(1 << depth).reshape(1, -1, 1)
    key = chunk(b"tRNS", struct.pack(">H", 0x100 | 1))

    pixels = decode_image(build_png(samples, colour=0, depth=depth, before=[key]), channels=4)

    assert pixels[0, :, 3].tolist() == [0 if sample == 1 else 255 for sample in range(1 << depth)]
    assert pixels[0, -1].tolist()[:3] == [255, 255, 255]


def test_wrong_transparent_colour_is_refused():
    """A tRNS chunk of the wrong length is an error."""
    data = build_png([[[0], [1]]], colour=0, before=[chunk(b"tRNS", b"\0")])

    with pytest.raises(InputError, match="tRNS chunk of 1 bytes; want 2"):
        decode_image(data, channels=4)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("place", "order"), [("before", "<"), ("after", ">")])
def test_image_and_mask_are_turned_alike(orientation, place, order):
    """An eXIf chunk, on either side of the data, turns images and masks in the same way as in Pillow."""
    mask = np.arange(6).reshape(2, 3, 1)
    block = {place: [chunk(b"eXIf", exif(orientation, order))]}

    ids = decode_mask(build_png(mask, colour=0, **block))
    pixels = decode_image(build_png(np.repeat(mask, 3, 2), **block))

    turn = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}.get(orientation)
    upright = Image.fromarray(mask[..., 0].astype(np.uint8))
    expected = np.asarray(upright if turn is None else upright.transpose(Image.Transpose(turn)))
    assert np.array_equal(ids, expected)
    assert np.array_equal(pixels, np.repeat(expected[..., None], 3, 2))
    assert ids.flags.c_contiguous
    assert pixels.flags.c_contiguous


@pytest.mark.sample(4)
def test_large_picture_decodes(missing):
    """Rows of 75 MB, above libspng's limit for other chunks, and a row of 300,000 pixels decode."""
    tall = np.random.default_rng(1).integers(0, 256, (5000, 1), dtype=np.uint8) * np.ones(5001 * 3, np.uint8)
    wide = np.arange(600_000, dtype=np.uint32).astype(np.uint8).reshape(2, 300_000)

    assert np.array_equal(decode_image(encode_png(tall.reshape(5000, 5001, 3))), tall.reshape(5000, 5001, 3))
    assert np.array_equal(decode_mask(encode_png(wide)), wide)


@pytest.mark.parametrize("filters", [[0], [1], [2], [1, 0, 0, 1], [0, 1, 2]])
@pytest.mark.parametrize(("width", "strip_bytes"), [(1, 300), (2, 1), (7, 300), (130, 1), (130, 1 << 20)])
def test_uniform_filters_give_the_samples(filters, width, strip_bytes, monkeypatch):
    """Uniform filters are undone for many rows at once; mixed filters are not."""
    monkeypatch.setattr(png, "_STRIP_BYTES", strip_bytes)
    for colour, channels in {0: 1, 2: 3, 4: 4, 6: 4}.items():
        samples = np.random.default_rng(width).integers(0, 256, (9, width, SAMPLES[colour]), dtype=np.uint8)
        data = build_png(samples, colour=colour, depth=8, filters=filters)

        wanted = samples if colour != 4 else samples[..., [0, 0, 0, 1]]
        assert np.array_equal(decode_image(data, channels=channels), wanted)


def test_threads_do_not_block_each_other(monkeypatch):
    """In threads, cv2 replaces libspng, which holds the interpreter's lock, and gives the same pixels."""
    samples = np.random.default_rng(0).integers(0, 256, (9, 130, 3), dtype=np.uint8)
    data = build_png(samples, filters=[4, 3, 0, 1, 2])
    wanted = decode_image(data)

    monkeypatch.setattr(png, "load_pyspng", lambda: pytest.fail("asked of a thread"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(decode_image, data).result()

    assert np.array_equal(found, wanted)


@pytest.mark.long  # columns of eight million pixels take seconds
@pytest.mark.parametrize("height", [8_421_503, 8_421_504])
def test_long_columns_decode(height):
    """The longest row whose sum fits 32 bits is decoded here, a longer one by libraries. Each difference is 255."""
    column = (height - np.arange(height, dtype=np.int64)).astype(np.uint8)[:, None]

    assert np.array_equal(decode_mask(encode_png(column)), column)


@pytest.mark.sample(4)
def test_small_file_of_many_pixels_decodes(missing):
    """A stream says little about its size: 65 kB hold 64 MB."""
    pixels = np.zeros((8000, 8000), np.uint8)
    pixels[-1, -1] = 7

    assert np.array_equal(decode_mask(encode_png(pixels)), pixels)


def test_file_that_is_kept_is_checked_as_one_that_is_decoded(missing):
    """The walk that keeps a file refuses every flipped bit, truncation and wrong order, and says which."""
    data = build_png(np.arange(90).reshape(5, 6, 3), filters=(0, 1, 4), split=9)
    damaged = [data[:length] for length in range(8, len(data))]
    damaged += [flipped(data, bit) for bit in range(8 * 8, 8 * len(data))]
    start, stop = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    damaged.append(data[:start] + data[stop:])
    damaged.append(data[:start] + chunk(b"ABCD", b"") + data[start:])
    damaged.append(data[:stop] + chunk(b"tEXt", b"") + data[start:])
    damaged.append(data[:stop] + chunk(b"PLTE", bytes(3)) + data[stop:])

    assert probe(data, whole=True) == probe(data)
    for one in damaged:
        with pytest.raises(InputError, match="PNG"):
            probe(one, whole=True)


@pytest.mark.parametrize("rows", [slice(None), slice(None, None, 2)], ids=["contiguous", "strided"])
def test_sums_without_cv2_are_the_same(rows):
    """Where cv2 is missing, numpy undoes the filters that all rows share; sums wrap alike."""
    pixels = np.random.default_rng(0).integers(0, 256, (37, 23, 3), np.uint8)[rows]
    wanted = libraries.corner_sums_with_cv2(pixels)

    with without(("cv2",)):
        assert np.array_equal(libraries.corner_sums_with_cv2(pixels), wanted)
