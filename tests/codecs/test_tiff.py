"""TIFF files: any layout that is decoded gives exactly the samples that were stored; all others are refused."""

import io
import struct
import sys
import tracemalloc

import cv2
import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamat.codecs import decode_floats, decode_image, decode_mask, probe
from datamat.errors import InputError, MissingDependencyError

RNG = np.random.default_rng(3)


def build_tiff(samples, **tags):
    """Return a little-endian TIFF file of one strip, of an array (height, width, channels).

    Args:
        samples: uint8, uint16 or float32.
        tags: further tags, or others in place of those that the samples have, by number after an underscore.
    """
    height, width, channels = samples.shape
    values = {
        256: [width], 257: [height], 258: [8 * samples.itemsize] * channels, 259: [1],
        262: [2 if channels > 2 else 1], 273: [0], 277: [channels], 278: [height], 279: [samples.nbytes],
        339: [3 if samples.dtype.kind == "f" else 1] * channels, **({338: [2]} if channels in {2, 4} else {}),
        **{int(name[1:]): value for name, value in tags.items()},
    }  # fmt: skip
    places, at = {}, 8 + 2 + 12 * len(values) + 4
    for tag in sorted(values):
        if len(values[tag]) > 1:
            places[tag], at = at, at + 4 * len(values[tag])
    values[273] = [at]
    entries = [
        struct.pack("<HHII", tag, 4, len(values[tag]), places.get(tag, values[tag][0])) for tag in sorted(values)
    ]
    lists = [struct.pack(f"<{len(values[tag])}I", *values[tag]) for tag in sorted(places)]
    return b"".join([b"II*\0", struct.pack("<IH", 8, len(values)), *entries, bytes(4), *lists, samples.tobytes()])


def written(samples, **options):
    """Return the file that tifffile writes of an array (height, width, channels)."""
    import tifffile

    channels, file = samples.shape[2], io.BytesIO()
    if options.get("planarconfig") == "separate":
        samples = np.moveaxis(samples, -1, 0)
    elif channels == 1:
        samples = samples[..., 0]
    options = {"photometric": "rgb" if channels > 2 else "minisblack", "metadata": None, **options}
    tifffile.imwrite(file, samples, extrasamples=["unassalpha"] if channels in {2, 4} else None, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def tifffile():
    pytest.importorskip("imagecodecs")
    return pytest.importorskip("tifffile")


def decoded(data):
    """Return all samples of a file."""
    info = probe(data, whole=True)
    if info.is_float:
        return decode_floats(data)[..., None]
    return decode_image(data, channels=info.channels, dtype="uint16" if info.bit_depth > 8 else "uint8")


@pytest.mark.usefixtures("tifffile")
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_every_layout_of_tifffile_gives_the_stored_samples(data):
    """Byte orders, strips, tiles, planes, predictors and compressions, in any combination."""
    dtype = data.draw(st.sampled_from(["uint8", "uint16", "float32"]))
    channels = 1 if dtype == "float32" else data.draw(st.integers(1, 4))
    shape = (data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40)), channels)
    samples = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 65536, shape).astype(dtype)
    compression = data.draw(st.sampled_from([None, "lzw", "zlib", "adobe_deflate", "packbits", "lzma", "zstd"]))

    file = written(
        samples,
        byteorder=data.draw(st.sampled_from("<>")),
        compression=compression,
        predictor=data.draw(st.booleans()) if compression not in {None, "packbits"} else None,
        planarconfig="separate" if channels > 1 and data.draw(st.booleans()) else None,
        **data.draw(st.sampled_from([{}, {"tile": (16, 16)}, {"tile": (16, 32)}, {"rowsperstrip": 7}])),
    )

    found = decoded(file)
    assert found.dtype == samples.dtype
    assert np.array_equal(found, samples)


@pytest.mark.usefixtures("tifffile")
@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate", "packbits"])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "F"])
def test_files_of_pillow_decode_as_pillow_does(mode, compression):
    """Truth values and palettes, too, as colours and as class ids."""
    kinds = {"1": (bool, ()), "P": (np.uint8, ()), "LA": (np.uint8, (2,)), "RGB": (np.uint8, (3,))}
    dtype, last = {**kinds, "RGBA": (np.uint8, (4,)), "I;16": (np.uint16, ()), "F": (np.float32, ())}.get(
        mode, (np.uint8, ())
    )
    array = RNG.integers(0, 2 if mode == "1" else 3 if mode == "P" else 256, (33, 41, *last)).astype(dtype)
    image = PIL.Image.fromarray(array)
    if mode == "P":
        image.putpalette([9, 8, 7, 200, 100, 50, 1, 2, 3])
    file = io.BytesIO()
    image.save(file, "TIFF", **({"compression": compression} if compression else {}))
    expected = np.asarray(image.convert({"P": "RGB", "1": "L"}.get(mode, mode)))

    data = file.getvalue()
    info = probe(data, whole=True)

    assert (info.encoding, info.palette, info.is_float) == ("tiff", mode == "P", mode == "F")
    if mode == "F":
        assert np.array_equal(decode_floats(data), array)
        return
    channels = 3 if mode == "P" else info.channels
    found = decode_image(data, channels=channels, dtype="uint16" if mode == "I;16" else "uint8")
    assert np.array_equal(found.reshape(expected.shape), expected)
    if not last:
        assert np.array_equal(decode_mask(data, dtype="uint16"), array)


@pytest.mark.usefixtures("tifffile")
@pytest.mark.parametrize(("dtype", "channels", "predictor"), [("uint8", 1, 2), ("uint16", 3, 1), ("uint16", 4, 2)])
def test_lzw_files_of_opencv_decode_exactly(dtype, channels, predictor):
    """Many strips of 16 bits, with and without differences."""
    smooth = np.cumsum(RNG.integers(0, 9, (150, 90, channels)), axis=1).astype(dtype)
    options = [cv2.IMWRITE_TIFF_COMPRESSION, 5, cv2.IMWRITE_TIFF_PREDICTOR, predictor]
    _, data = cv2.imencode(".tiff", smooth, [*options, cv2.IMWRITE_TIFF_ROWSPERSTRIP, 7])

    found = decode_image(data.tobytes(), channels=channels, dtype=dtype)

    order = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[channels]
    assert np.array_equal(found, smooth[..., order])


@pytest.mark.usefixtures("tifffile")
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_small_numbers_are_ids_or_scaled_to_white(bits):
    """Several pixels share a byte, and a row begins with a new one."""
    ids = RNG.integers(0, 1 << bits, (5, 11, 1)).astype(np.uint8)
    places = np.pad(ids, [(0, 0), (0, 5), (0, 0)]).reshape(5, -1, 8 // bits) << np.arange(8 - bits, -1, -bits)
    packed = places.sum(axis=2).astype(np.uint8)[:, : -(-11 * bits // 8), None]
    data = build_tiff(packed, _256=[11], _258=[bits])

    assert np.array_equal(decode_mask(data)[..., None], ids)
    assert np.array_equal(decode_image(data, channels=1), ids * (255 // ((1 << bits) - 1)))


@pytest.mark.usefixtures("tifffile")
def test_white_may_be_zero():
    """An image is inverted; class ids are not."""
    samples = np.array([[[0], [9]]], np.uint8)
    data = build_tiff(samples, _262=[0])

    assert decode_image(data, channels=1)[..., 0].tolist() == [[255, 246]]
    assert decode_mask(data).tolist() == [[0, 9]]


@pytest.mark.usefixtures("tifffile")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(orientation):
    """The tag is that of EXIF; Pillow turns the same way."""
    samples = RNG.integers(0, 256, (3, 5, 3), np.uint8)
    data = build_tiff(samples, _274=[orientation])
    image = PIL.Image.fromarray(samples)
    image.getexif()[0x0112] = orientation

    assert np.array_equal(decode_image(data), np.asarray(PIL.ImageOps.exif_transpose(image)))


@pytest.mark.usefixtures("tifffile")
def test_grey_serves_as_rgb_and_opaque_as_rgba():
    """As for PNG: channels are repeated or added, never dropped."""
    grey, rgb = (RNG.integers(0, 65536, (3, 4, channels)).astype(np.uint16) for channels in (1, 3))

    assert np.array_equal(decode_image(build_tiff(grey), dtype="uint16"), grey.repeat(3, 2))
    found = decode_image(build_tiff(rgb), channels=4, dtype="uint16")
    assert np.array_equal(found[..., :3], rgb)
    assert (found[..., 3] == 65535).all()
    with pytest.raises(InputError, match="tiff with alpha; want an opaque image"):
        decode_image(build_tiff(np.zeros((2, 2, 4), np.uint8)))
    with pytest.raises(InputError, match="tiff with colours; want a grey image"):
        decode_image(build_tiff(np.zeros((2, 2, 3), np.uint8)), channels=2)


GREY = RNG.integers(0, 256, (4, 6, 1)).astype(np.uint8)


def deflated():
    """Return the file that Pillow writes of `GREY`, compressed."""
    file = io.BytesIO()
    PIL.Image.fromarray(GREY[..., 0]).save(file, "TIFF", compression="tiff_adobe_deflate")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"II+\0" + bytes(20), "BigTIFF; want TIFF with offsets of 32 bits"),
        (build_tiff(GREY, _259=[7]), "compressed by JPEG; want LZW, deflate, .* or none; save it so, or as PNG"),
        (build_tiff(GREY, _259=[34887]), "compressed by LERC"),
        (build_tiff(GREY, _259=[4711]), "compressed by method 4711"),
        (build_tiff(GREY, _262=[5]), r"TIFF of inks \(CMYK\); want grey, RGB or a palette"),
        (build_tiff(np.zeros((2, 2, 5), np.uint8)), "TIFF of 5 channels; want 1 to 4; store it as a Tensor"),
        (build_tiff(GREY, _339=[2]), "8 bits per sample, signed; want 8 or 16 bits"),
        (build_tiff(GREY, _258=[12]), "TIFF of 12 bits per sample"),
        (build_tiff(np.zeros((2, 2, 4), np.uint8), _338=[1]), "colours multiplied by alpha"),
        (build_tiff(GREY, _262=[6]), "TIFF of YCbCr"),
        (build_tiff(GREY, _279=[0]), "empty strips or tiles"),
        (build_tiff(GREY, _279=[23]), "23 bytes; want 24 or more"),
        (build_tiff(GREY, _278=[2]), "TIFF of 1 strips or tiles; want 2"),
        (build_tiff(GREY, _317=[9]), "unknown predictor"),
        (build_tiff(GREY, _262=[3]), "TIFF palette of the wrong size"),
        (build_tiff(np.zeros((2, 2, 1), np.float32)), "tiff of 32-bit floats per sample; want whole numbers"),
        (build_tiff(GREY)[:-1], "whose pixels end at byte"),
        (build_tiff(GREY)[:30], "with a directory that reaches past its end"),
        (build_tiff(np.zeros((2, 2, 1), np.uint8), _256=[1 << 20], _257=[1 << 20]), "at most|strips"),
    ],
)
def test_what_is_not_decoded_is_refused(data, message):
    """The message says what the file is and what to do; nothing is decoded nearly right."""
    with pytest.raises(InputError, match=f"'x.tif': .*({message})"):
        decode_image(data, channels=1, name="x.tif")


@pytest.mark.usefixtures("tifffile")
@pytest.mark.parametrize("compression", ["lzw", "zlib", "packbits", "lzma", "zstd"])
def test_compressed_data_that_end_early_are_refused(compression):
    """Nothing is filled in for the pixels that are missing."""
    file = written(np.tile(GREY, (9, 9, 1)), compression=compression)

    with pytest.raises(InputError, match=r"'x\.tif': TIFF that does not decode"):
        decode_image(file[:-60] + bytes(60), channels=1, name="x.tif")


def test_missing_package_is_named_when_a_file_is_decoded(monkeypatch):
    """The header is read without it."""
    monkeypatch.setitem(sys.modules, "tifffile", None)
    data = build_tiff(GREY)

    assert probe(data, whole=True).width == 6
    for decode in (decode_image, decode_mask):
        with pytest.raises(MissingDependencyError, match=r"'x\.tif'.*datamat\[tiff\]"):
            decode(data, name="x.tif")


@pytest.mark.parametrize("decode", [decode_image, decode_mask, probe])
def test_number_of_channels_is_refused_before_memory_is_taken_for_it(decode):
    """One flipped byte of a file of 200 makes millions of channels, of which the layout has numbers for each."""
    data = build_tiff(GREY, _277=[1 << 27])

    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="TIFF of 134217728 channels; want 1 to 4"):
            decode(data, name="x.tif")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 1 << 20


def test_tags_without_numbers_are_damage():
    """Bits and kinds of samples may be declared with none."""
    for tag in (258, 339):
        data = bytearray(build_tiff(GREY))
        place = data.index(struct.pack("<HHI", tag, 4, 1))
        data[place + 4] = 0

        with pytest.raises(InputError, match="bits per sample"):
            decode_image(bytes(data), channels=1)


@pytest.mark.usefixtures("tifffile")
def test_tag_that_tifffile_skips_as_damaged_is_refused():
    """It would make an image of no rows, for a height whose number lies elsewhere in the file."""
    data = bytearray(written(GREY, tile=(16, 16)))
    data[data.index(struct.pack("<HHI", 257, 4, 1)) + 4] = 2

    assert probe(bytes(data), whole=True).height == 8
    with pytest.raises(InputError, match="want what its header says"):
        decode_image(bytes(data), channels=1)


@pytest.mark.usefixtures("tifffile")
def test_pages_are_refused_and_smaller_versions_are_not():
    """A pyramid holds one image; a file of pages or slices holds many."""
    data = bytearray(build_tiff(GREY, _254=[0]))
    count = int.from_bytes(data[8:10], "little")
    end = 10 + 12 * count
    data[end : end + 4] = len(data).to_bytes(4, "little")

    for subfile in (0, 1):
        second = struct.pack("<HHHIII", 1, 254, 4, 1, subfile, 0)
        if subfile:
            assert np.array_equal(decode_image(bytes(data) + second, channels=1), GREY)
            continue
        with pytest.raises(InputError, match="tiff of several pages; want one image"):
            decode_image(bytes(data) + second, channels=1)


@pytest.mark.usefixtures("tifffile")
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damage_never_gives_another_error(data):
    """A flipped byte is refused, or changes pixels; it never crashes or hangs."""
    files = [deflated(), *(written(GREY, tile=(16, 16), compression=name) for name in ("packbits", "lzw", "zstd"))]
    file = bytearray(data.draw(st.sampled_from(files)))
    file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))

    for decode in (lambda: decode_image(bytes(file), channels=1), lambda: decode_mask(bytes(file), dtype="uint16")):
        try:
            found = decode()
        except InputError:
            continue
        assert found.ndim in {2, 3}
