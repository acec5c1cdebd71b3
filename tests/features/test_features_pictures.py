"""Images and masks: files that all decoders read alike are kept, others are encoded again, without loss."""

from __future__ import annotations

import io
import sys

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from round_trip import through_a_record

from datamat import Depth, Features, Image, Mask, Video
from datamat.codecs import MAX_PIXELS, encode_jpeg, encode_png
from datamat.errors import InputError, MissingDependencyError, SchemaError
from datamat.features.base import as_array
from datamat.features.video import video_extension

RNG = np.random.default_rng(7)
RGB = RNG.integers(0, 255, (6, 9, 3), np.uint8)
RGBA = RNG.integers(0, 255, (6, 9, 4), np.uint8)
GREY = RNG.integers(0, 255, (6, 9), np.uint8)
IDS = RNG.integers(0, 2, (6, 9), np.uint8)


def saved(array, encoding, mode=None, **options):
    """Return a file written by Pillow."""
    image = PIL.Image.fromarray(array)
    if mode == "P":
        image.putpalette([200 - level for level in range(60)])
    file = io.BytesIO()
    (image.convert(mode) if mode not in (None, "P") else image).save(file, encoding, **options)
    return file.getvalue()


def exif_of(orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return exif


def turned(array, orientation):
    """Return a JPEG file with an EXIF orientation."""
    return saved(array, "JPEG", exif=exif_of(orientation))


def test_manifests_of_earlier_datasets_stay_what_they_are():
    """A dtype is named only where it is not uint8, so that fingerprints of finished datasets hold."""
    assert "dtype" not in Image().to_json()
    assert "dtype" not in Mask().to_json()
    features = Features({"image": Image(dtype="uint16"), "mask": Mask(dtype=np.uint16), "depth": Depth()})
    assert Features.from_json(features.to_json()) == features


@pytest.mark.parametrize(
    ("value", "feature", "message"),
    [
        (RGB.astype(np.float32) / 255, Image(), "float32"),
        (RGB.astype(np.uint16), Image(), "uint16"),
        (RGB, Image(dtype="uint16"), "cast"),
        (encode_png(RGB), Image(dtype="uint16"), "declare dtype='uint8'"),
        (encode_png(RGB.astype(np.uint16)), Image(), "convert it to 8 bits"),
        (encode_png(RGB.astype(np.uint16)), Mask(), "at most 8 bits"),
        (GREY.astype(np.uint16), Mask(), "uint16"),
        (GREY.astype(np.float32), Depth(), "millimetres .*convert it in read"),
        (GREY.astype(np.uint16), Depth(dtype="float32"), "metres as float32"),
        (encode_png(GREY), Depth(), "convert it to millimetres"),
        (encode_png(GREY), Depth(dtype="float32"), "TIFF"),
        (encode_jpeg(GREY), Depth(), "jpeg"),
        (RGB, Depth(), "uint8"),
    ],
    ids=range(13),
)
def test_pixels_of_another_dtype_are_refused(value, feature, message):
    """Nothing is cast, scaled or dropped."""
    with pytest.raises((SchemaError, InputError), match=message):
        feature.encode(value)


@pytest.mark.parametrize("orientation", [1, 6])
def test_files_of_16_bits_are_stored_untouched_where_they_can_be(orientation):
    """An upright grey PNG of 16 bits is an image, a mask and a depth map; a mask widens files of 8 bits."""
    deep = GREY.astype(np.uint16) * 257
    data = saved(deep, "PNG", exif=exif_of(orientation)) if orientation > 1 else encode_png(deep)
    upright = np.rot90(deep, -1) if orientation == 6 else deep

    for feature in (Image((None, None, 1), dtype="uint16"), Mask(dtype="uint16"), Depth()):
        stored = feature.encode(data)
        assert (stored is data) == (orientation == 1)
        found = through_a_record(feature, data)
        assert found.dtype == np.uint16
        assert np.array_equal(found.reshape(upright.shape), upright)
    assert np.array_equal(through_a_record(Mask(dtype="uint16"), encode_png(GREY)), GREY)


@pytest.mark.parametrize(
    ("mode", "feature"), [("I;16", Depth()), ("F", Depth(dtype="float32")), ("LA", Image((6, 9, 2)))]
)
def test_pillow_images_keep_their_bits(mode, feature):
    """An image of Pillow is the array that it holds, not its conversion to RGB."""
    dtype, shape = feature.value_type()
    array = RNG.integers(0, 255, (6, 9, *shape[2:])).astype(dtype)
    image = PIL.Image.fromarray(array)

    assert image.mode == mode
    assert np.array_equal(through_a_record(feature, as_array(image)), array)


def test_depth_is_drawn_near_as_bright():
    """What was not measured is black; equal distances do not divide by zero."""
    drawn = Depth(dtype="float32").display(np.array([[1, 3, np.nan, 0, np.inf]], np.float32))

    assert drawn[..., 0].tolist() == [[255, 0, 0, 0, 0]]
    assert Depth().display(np.full((2, 2), 7, np.uint16)).dtype == np.uint8


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_arrays_come_back_exactly(data):
    """Any number of channels, strided and mirrored arrays included."""
    channels = data.draw(st.sampled_from([1, 2, 3, 4]))
    dtype = data.draw(st.sampled_from(["uint8", "uint16"]))
    side = st.integers(1, 9)
    array = data.draw(st_numpy.arrays(dtype, st.tuples(side, side, st.just(channels))))
    array = data.draw(st.sampled_from([array, array[::-1], array[:, ::2], array.swapaxes(0, 1)]))

    feature = Image((None, None, channels), dtype=dtype)

    for value in (array, encode_png(array)):
        found = through_a_record(feature, value)
        assert found.dtype == dtype
        assert np.array_equal(found, array)


@settings(deadline=None, max_examples=60)
@given(st_numpy.arrays(np.uint8, st_numpy.array_shapes(min_dims=2, max_dims=2, max_side=9)), st.booleans())
def test_masks_come_back_exactly(array, flip):
    """Every class id survives."""
    array = array.T[::-1] if flip else array

    found = through_a_record(Mask(), array)

    assert found.dtype == np.uint8
    assert np.array_equal(found, array)


def test_grey_arrays_need_no_channel():
    """They read back with one channel, as declared."""
    for shape in ((6, 9, 1), (None, None, 1), (6, None, 1)):
        assert np.array_equal(through_a_record(Image(shape), GREY), GREY[..., None])


def test_jpeg_changes_arrays_a_little():
    """The declared quality decides the size."""
    smooth = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None, None], (64, 64, 3))
    fine, coarse = (Image(encoding="jpeg", quality=quality) for quality in (95, 5))

    assert fine.encode(smooth).startswith(b"\xff\xd8")
    assert np.abs(through_a_record(fine, smooth).astype(int) - smooth).max() <= 2
    assert len(coarse.encode(RGB)) < len(fine.encode(RGB))


@pytest.mark.parametrize(
    ("data", "channels"),
    [
        (saved(RGB, "PNG"), 3),
        (saved(RGB, "JPEG"), 3),
        (saved(RGBA, "PNG"), 4),
        (saved(GREY, "PNG"), 1),
        (saved(GREY, "JPEG"), 1),
        (saved(GREY, "PNG"), 3),
        (saved(GREY, "JPEG"), 3),
    ],
)
def test_bytes_that_need_no_change_are_stored_untouched(data, channels):
    """The declared encoding concerns arrays only, and grey files serve as RGB."""
    for encoding in ("png", "jpeg")[: 1 if channels == 4 else 2]:
        assert Image((6, 9, channels), encoding=encoding).encode(data) is data
    expected = np.asarray(PIL.Image.open(io.BytesIO(data)).convert({1: "L", 3: "RGB", 4: "RGBA"}[channels]))
    assert np.array_equal(through_a_record(Image((None, None, channels)), data), expected.reshape(6, 9, channels))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_turned_pictures_are_stored_upright(orientation):
    """Decoders disagree on EXIF, so pixels are stored upright; the declared shape is that of the result."""
    data = turned(RGB, orientation)
    expected = np.asarray(PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))))

    stored = Image(expected.shape).encode(data)

    assert np.array_equal(PIL.Image.open(io.BytesIO(stored)), expected)
    assert np.array_equal(through_a_record(Image(), data), expected)
    with pytest.raises(SchemaError, match=rf"uint8 \(7, 7, 3\) but .* holds uint8 \({len(expected)}, "):
        Image((7, 7, 3)).encode(data)


@pytest.mark.parametrize(
    ("data", "channels", "expected"),
    [
        (saved(IDS, "PNG", "P"), 3, "RGB"),
        (saved(IDS * 255, "PNG", "1"), 1, "L"),
        (saved(IDS * 255, "PNG", "1"), 3, "RGB"),
        (saved(RGB, "PNG"), 4, "RGBA"),
        (saved(GREY, "PNG", "LA"), 4, "RGBA"),
        (saved(RGB, "WEBP", lossless=True), 3, "RGB"),
        (saved(RGB, "BMP"), 3, "RGB"),
    ],
)
def test_bytes_that_decoders_read_differently_are_encoded_again(data, channels, expected):
    """They are stored with the same pixels."""
    feature = Image((None, None, channels))
    stored = feature.encode(data)

    pixels = np.asarray(PIL.Image.open(io.BytesIO(data)).convert(expected)).reshape(6, 9, channels)
    assert stored != data
    assert stored.startswith(b"\x89PNG")
    assert np.array_equal(through_a_record(feature, data), pixels)


@pytest.mark.parametrize(
    ("data", "channels", "found"),
    [
        (saved(RGBA, "PNG"), 3, "png with alpha"),
        (saved(RGB, "PNG"), 1, "png with colours"),
        (saved(RGB, "JPEG"), 1, "jpeg with colours"),
        (saved(RGB, "PNG")[:-20], 3, ""),
        (saved(RGB, "JPEG")[:-2], 3, ""),
        (b"", 3, "an empty file"),
        (b"plain text", 3, "text that begins"),
    ],
)
def test_bytes_that_lose_something_are_refused(data, channels, found):
    """Alpha, colours and truncation are refused with the name of the field."""
    with pytest.raises(InputError, match=f"^{found}"):
        Image((None, None, channels)).encode(data)


@pytest.mark.parametrize(("bits", "mode"), [(1, "1"), (1, "P"), (2, "P"), (4, "P"), (8, "P")])
def test_masks_of_small_depths_and_palettes_are_stored_as_ids(bits, mode):
    """Other readers would scale the ids, or return colours."""
    options = {"bits": bits} if mode == "P" else {}
    data = saved(IDS if mode == "P" else IDS * 255, "PNG", mode, **options)

    stored = Mask(names=("a", "b")).encode(data)

    assert stored != data
    assert np.array_equal(PIL.Image.open(io.BytesIO(stored)), IDS)
    assert np.array_equal(through_a_record(Mask(), data), IDS)


def test_ids_past_the_names_are_refused_with_their_place():
    """255 is always accepted: segmentation datasets use it for unlabelled pixels."""
    feature = Mask(names=("a", "b"))
    fine = np.where(IDS == 1, np.uint8(255), IDS)
    wrong = fine.copy()
    wrong[2, 3] = 2

    assert np.array_equal(through_a_record(feature, fine), fine)
    message = r"the field is declared uint8 \(height, width\) of 2 classes but pixel \(row 2, column 3\) holds "
    with pytest.raises(SchemaError, match=message):
        feature.encode(wrong)
    with pytest.raises(SchemaError, match="holds class id 2"):
        feature.encode(saved(wrong, "PNG", "P"))
    assert np.array_equal(through_a_record(Mask(), wrong), wrong)


@pytest.mark.parametrize(
    ("feature", "values"),
    [
        (Image((6, 9, 3)), [RGB.astype(np.float32), RGB[:5], GREY, encode_png(RGB[:5]), RGB.tolist()]),
        (Image((6, 9, 3)), [bytearray(encode_png(RGB))]),
        (Image(), [np.zeros((0, 9, 3), np.uint8)]),
        (Image(encoding="jpeg"), [np.zeros((1, 65_501, 3), np.uint8)]),
        (Mask((6, 9)), [IDS.astype(np.int64), IDS[..., None], saved(IDS[:5], "PNG"), saved(IDS[:5], "PNG", "P")]),
        (Mask(), [np.zeros((6, 0), np.uint8)]),
    ],
    ids=range(6),
)
def test_pictures_of_another_kind_are_refused(feature, values):
    """The message names field, declaration, what was found and the remedy."""
    for value in values:
        with pytest.raises(SchemaError, match=r"the field is declared uint8 \(.* but the sample holds .*; "):
            feature.encode(value)


@pytest.mark.parametrize("feature", [Image(), Mask()])
def test_pictures_that_no_reader_takes_are_not_written(feature):
    """The limit against decompression bombs holds in both directions."""
    shape = (1, MAX_PIXELS + 1, 3)[: 3 if isinstance(feature, Image) else 2]
    huge = np.broadcast_to(np.uint8(0), shape)

    with pytest.raises(SchemaError, match=f"the field .* readers accept at most {MAX_PIXELS} pixels: tile it"):
        feature.encode(huge)


@pytest.mark.parametrize("data", [encode_jpeg(RGB), saved(IDS, "PNG", "LA"), saved(RGB, "PNG")])
def test_bytes_that_are_no_mask_are_refused(data):
    """JPEG changes ids, and colours are not ids."""
    with pytest.raises(InputError, match=r"^a mask .*; save the class ids as an 8-bit grey PNG"):
        Mask().encode(data)


def test_prepare_gives_transforms_arrays():
    """An array is passed on."""
    assert np.array_equal(Image().prepare(encode_png(RGB)), RGB)
    assert np.array_equal(Mask().prepare(encode_png(IDS)), IDS)
    assert Image().prepare(RGB) is RGB
    assert Mask().prepare(IDS) is IDS


BEGINNINGS = {
    b"\0\0\0\x20ftypisom\0\0\2\0": "mp4",
    b"\0\0\0\x20ftypM4V \0\0\2\0": "mp4",
    b"\0\0\0\x14ftypqt  \0\0\2\0": "mov",
    b"\0\0\0\x14ftyp3gp5\0\0\2\0": "3gp",
    b"\0\0\0\x08wide\0\0\0\0mdat": "mov",
    b"\0\0\0\x1cftypM4A \0\0\2\0": "",
    b"\0\0\0\x18ftypheic\0\0\2\0": "",
    b"\0\0\0\x18ftypavif\0\0\2\0": "",
    b"\x1a\x45\xdf\xa3\x9f\x42\x86\x81\x01\x42\x82\x84webm": "webm",
    b"\x1a\x45\xdf\xa3\xa3\x42\x86\x81\x01\x42\x82\x88matroska": "mkv",
    b"RIFF\x10\0\0\0AVI LIST": "avi",
    b"RIFF\x10\0\0\0WAVEfmt ": "",
    (b"G" + bytes(187)) * 3: "ts",
    b"GIF89a" + bytes(600): "",
    b"FLV\x01\x05": "flv",
    b"\0\0\1\xba\x44": "mpg",
    b"#EXTM3U\n": "",
    b"": "",
}


@pytest.mark.parametrize(("data", "extension"), BEGINNINGS.items(), ids=range(len(BEGINNINGS)))
def test_videos_are_known_by_their_first_bytes(data, extension):
    """Pictures and sound in the same containers are none."""
    assert video_extension(data) == extension
    if extension:
        assert Features.infer({"x": data})["x"] == Video()


def test_video_names_the_package_that_it_needs(monkeypatch):
    """Reading files that stay files needs none."""
    monkeypatch.setitem(sys.modules, "av", None)
    data = next(iter(BEGINNINGS))

    assert Video(decoded=False).decode(data) == data
    for needs_it in (lambda: Video().decode(data), lambda: Video(decoded=False).encode(data)):
        with pytest.raises(
            MissingDependencyError, match=r"needs the package av; install it with: pip install 'datamat"
        ):
            needs_it()


PALETTE = ((0, 0, 0), (9, 8, 7), (0, 0, 0), (255, 255, 255))


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("given", ["array", "png"])
def test_masks_of_colours_become_ids(given, dtype):
    """Of two classes of one colour, the first; the file of ids is that of an array of ids."""
    feature = Mask(names=("a", "b", "c", "d"), palette=PALETTE, dtype=dtype)
    ids = np.array([[0, 1, 3], [3, 1, 0]], dtype)
    colours = np.array(PALETTE, np.uint8)[ids]

    stored = feature.encode(colours if given == "array" else encode_png(colours))

    assert stored == feature.encode(ids)
    assert np.array_equal(feature.decode(stored), ids)


def test_colour_of_no_class_is_named_with_its_place():
    """Also where ids reach the number that stands for none."""
    colours = np.zeros((4, 5, 3), np.uint8)
    colours[2, 3] = (1, 2, 3)
    full = tuple((0, number, 0) for number in range(256))

    for palette in (PALETTE, full):
        with pytest.raises(SchemaError, match=r"pixel \(row 2, column 3\) has the colour \(1, 2, 3\), which"):
            Mask(palette=palette).encode(colours)
    assert Mask(palette=full).prepare(np.array([[[0, 255, 0]]], np.uint8)).tolist() == [[255]]
    with pytest.raises(InputError, match="RGB samples"):
        Mask().encode(encode_png(colours))
