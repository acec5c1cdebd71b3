"""Every built-in feature type passes the conformance tests that datamat ships for users' types."""

from __future__ import annotations

import datetime
import io

import numpy as np
import pytest

from datamat import (
    Audio,
    BBoxes,
    Bytes,
    ClassLabel,
    Depth,
    Image,
    Json,
    Keypoints,
    Mask,
    Optional,
    Polygons,
    Scalar,
    Sequence,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    Video,
    testing,
)
from datamat.codecs import encode_jpeg, encode_png

ROTATED = np.array([[20, 20, 10, 6, 30], [60, 40, 8, 20, -100]], np.float32)
PIXELS = np.random.default_rng(0).integers(0, 256, (8, 6, 3), np.uint8)


class TestScalar(testing.FeatureConformance):
    def make_feature(self):
        return Scalar("float32")

    def make_values(self):
        return [0.1, -0.0, np.float32(np.inf)]


class TestTensor(testing.FeatureConformance):
    def make_feature(self):
        return Tensor((None, 2), "int16")

    def make_values(self):
        return [np.arange(2 * count, dtype=np.int16).reshape(count, 2) for count in (3, 0, 1)]


class TestText(testing.FeatureConformance):
    def make_feature(self):
        return Text()

    def make_values(self):
        return ["", "größer – 日本語", "x" * 5000]


class TestBytes(testing.FeatureConformance):
    def make_feature(self):
        return Bytes()

    def make_values(self):
        return [b"", b"\0trailing zeros\0\0", bytes(range(256)), "größer".encode("latin-1"), b"x" * 5000]

    def make_wrong_values(self):
        return ["text", None, 5, np.zeros(3, np.uint8)]


class TestJson(testing.FeatureConformance):
    def make_feature(self):
        return Json()

    def make_values(self):
        nested = {"a": [1, -0.5, None, True, {"größer": '日本語 \0 "quoted"', "": []}], "b": {}, "c": 2**70}
        return [nested, None, [], {}, 5, 0.1, "text", [[[1.5], []], {}], [None, False]]

    def make_wrong_values(self):
        circle = []
        circle.append(circle)
        return [{1: 2}, {"a": float("nan")}, {"a": [object()]}, {"a": b"x"}, "\ud800", circle]


class TestTimestamp(testing.FeatureConformance):
    def make_feature(self):
        return Timestamp(tz="UTC")

    def make_values(self):
        span = [np.datetime64(number, "us") for number in (-(2**63) + 1, -1, 0, 2**63 - 1)]
        return [np.datetime64("2026-11-23T12:30:15.123456"), *span]

    def make_wrong_values(self):
        nothing = np.datetime64("NaT", "us")  # with a unit: numpy 2.5 warns of times without one
        return [None, 5, "2026-11-23", nothing, np.datetime64(1, "ns"), datetime.datetime(2026, 11, 23)]


class TestNaiveTimestamp(testing.FeatureConformance):
    def make_feature(self):
        return Timestamp()

    def make_values(self):
        return [datetime.datetime(1, 1, 1), datetime.datetime.max, np.datetime64("2026-11-23")]

    def make_wrong_values(self):
        return [datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC), datetime.time(12), "2026-11-23"]


class TestTokens(testing.FeatureConformance):
    def make_feature(self):
        return Tokens(vocab_size=50_257)

    def make_values(self):
        return [
            np.array([464, 3797, 50_256]),
            [],
            [1, np.int64(2)],
            np.zeros(0, np.uint16),
            np.arange(3000, dtype=np.int32),
        ]

    def make_wrong_values(self):
        return [None, "text", 5, [50_257], [-1], [1.0], [True], [[1, 2]], np.zeros((1, 2), int), np.zeros(2), b"ab"]


class TestUnsignedTokens(testing.FeatureConformance):
    def make_feature(self):
        return Tokens("uint64")

    def make_values(self):
        return [[2**64 - 1, 0], np.array([2**63], np.uint64), np.array([5], np.int8)]

    def make_wrong_values(self):
        return [[2**64], [-1], np.array([-1])]


class TestAudio(testing.FeatureConformance):
    is_lossy = True  # a value may come as the bytes of a file

    def make_feature(self):
        pytest.importorskip("soundfile")
        return Audio(8_000)

    def make_values(self):
        soundfile = pytest.importorskip("soundfile")
        wave = np.sin(np.arange(2000) / 9).astype(np.float32)
        files = []
        for kind in ("WAV", "FLAC", "MP3"):
            file = io.BytesIO()
            soundfile.write(file, wave, 8_000, format=kind)
            files.append(file.getvalue())
        return [*files, wave, np.zeros((7, 2), np.int16), np.zeros((0, 1), np.float32), wave.reshape(-1, 2) * 3]

    def make_wrong_values(self):
        return [None, "a.wav", np.zeros(5), np.zeros((5, 0), np.float32), np.full(5, np.nan, np.float32)]


class TestVideo(testing.FeatureConformance):
    is_lossy = True  # a value may come as the bytes of a file

    def make_feature(self):
        pytest.importorskip("av")
        return Video((16, None), fps=10)

    def make_values(self):
        pytest.importorskip("av")
        rng = np.random.default_rng(0)
        arrays = [rng.integers(0, 256, (frames, 16, 16 + frames, 3), np.uint8) for frames in (1, 2, 5)]
        return [*arrays, *(Video(fps=10).encode("x", array)["x"] for array in arrays)]

    def make_wrong_values(self):
        wrong = [np.zeros((0, 16, 16, 3), np.uint8), np.zeros((2, 8, 16, 3), np.uint8), np.zeros((2, 16, 16), np.uint8)]
        return [None, "a.mp4", *wrong]


class TestVideoFile(testing.FeatureConformance):
    is_lossy = True

    def make_feature(self):
        pytest.importorskip("av")
        return Video(decoded=False)

    def make_values(self):
        pytest.importorskip("av")
        return [Video(fps=10).encode("x", np.zeros((frames, 8, 8, 3), np.uint8))["x"] for frames in (1, 3)]

    def make_wrong_values(self):
        return [None, "a.mp4", np.zeros((1, 8, 8, 3), np.uint8)]


class TestClassLabel(testing.FeatureConformance):
    def make_feature(self):
        return ClassLabel(names=("cat", "dog"))

    def make_values(self):
        return [0, 1, np.int64(0)]


class TestBBoxes(testing.FeatureConformance):
    def make_feature(self):
        return BBoxes()

    def make_values(self):
        return [np.zeros((0, 4), np.float32), np.array([[0, 0.25, 0.5, 1]], np.float32), testing.BOXES]


class TestMask(testing.FeatureConformance):
    def make_feature(self):
        return Mask((8, 6), names=("sky", "road"))

    def make_values(self):
        return [PIXELS[..., 0] % 2, np.zeros((8, 6), np.uint8), np.ones((8, 6), np.uint8)]


class TestRotatedBBoxes(testing.FeatureConformance):
    def make_feature(self):
        return BBoxes(rotated=True)

    def make_values(self):
        return [np.zeros((0, 5), np.float32), np.array([[5, -4, 3, 0, 400.5], [1, 2, 3, 4, -90]], np.float32), ROTATED]

    def make_wrong_values(self):
        return [testing.BOXES, np.array([[1, 1, -1, 1, 0]], np.float32), np.array([[1, 1, 1, np.nan, 0]], np.float32)]


class TestKeypoints(testing.FeatureConformance):
    def make_feature(self):
        return Keypoints((None, 2, 3), names=("eye", "ear"))

    def make_values(self):
        return [
            np.zeros((0, 2, 3), np.float32),
            np.array([[[1.5, 2, 2], [-1, 9e9, 1]]], np.float32),
            [[[0, 0, 0]] * 2] * 3,
        ]

    def make_wrong_values(self):
        wrong = [[[0, 0, 3], [0, 0, 0]]], [[[np.nan, 0, 1], [0, 0, 0]]], [[0, 0, 0]], [["x"]], [[1, 2], [3]]
        return [*wrong, None, np.zeros((1, 2, 2), np.float32), np.zeros((1, 2, 3))]


class TestPoints(testing.FeatureConformance):
    def make_feature(self):
        return Keypoints()

    def make_values(self):
        return [np.zeros((0, 2), np.float32), [[1, 2], [3, -4.5]], ROTATED[:, :2]]


class TestPolygons(testing.FeatureConformance):
    is_lossy = True  # a list reads back as one array, which ends in NaN

    def make_feature(self):
        return Polygons()

    def make_values(self):
        triangle, square = np.array([[0, 0], [4, 0], [0, 4.5]], np.float32), [5, 5, 9, 5, 9, 9, 5, 9]
        return [[], [[]], [triangle], [triangle, [], square], np.stack([triangle, triangle + 1])]

    def make_wrong_values(self):
        hole = np.array([[[np.nan, np.nan], [1, 1]]], np.float32)
        return [hole, [[1, 2, 3]], [[[1, np.inf]]], [[[1, 2, 3]]], [["x"]], 5, np.zeros((2, 3, 2))]


class TestWideMask(testing.FeatureConformance):
    def make_feature(self):
        return Mask((8, 6), names=("sky", "road"), dtype="uint16")

    def make_values(self):
        return [np.full((8, 6), level, np.uint16) for level in (0, 1, 65535)]

    def make_wrong_values(self):
        return [np.zeros((8, 6), np.uint8), np.full((8, 6), 255, np.uint16), np.zeros((8, 6), np.int64)]


class TestDepth(testing.FeatureConformance):
    def make_feature(self):
        return Depth((8, 6))

    def make_values(self):
        return [testing.DEEP[..., 0], np.zeros((8, 6), np.uint16), np.full((8, 6), 65535, np.uint16)]

    def make_wrong_values(self):
        return [
            np.ones((8, 6), np.float32),
            np.ones((8, 6), np.uint8),
            np.ones((8, 6, 1), np.uint16),
            encode_png(PIXELS[..., 0]),
        ]


class TestDepthInMetres(testing.FeatureConformance):
    def make_feature(self):
        return Depth(dtype="float32")

    def make_values(self):
        return [testing.METRES, testing.METRES.T, np.zeros((1, 1), np.float32)]

    def make_wrong_values(self):
        return [np.ones((8, 6)), np.ones((8, 6), np.uint16), np.ones((8, 6, 1), np.float32)]


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_of_16_bits_are_exact(channels):
    """All bits of each channel come back, from arrays and from the files that hold them."""
    feature = Image((8, 6, channels), dtype="uint16")
    pixels = np.random.default_rng(channels).integers(0, 65536, (8, 6, channels), np.uint16)

    for value in (pixels, encode_png(pixels), pixels.astype(">u2")):
        found = feature.decode("x", feature.encode("x", value))
        assert found.dtype == np.uint16
        assert np.array_equal(found, pixels)


class TestImageOf16Bits(testing.FeatureConformance):
    def make_feature(self):
        return Image((None, None, 3), dtype="uint16")

    def make_values(self):
        return [testing.DEEP, testing.DEEP[:2, :3], np.zeros((1, 1, 3), np.uint16)]

    def make_wrong_values(self):
        return [PIXELS, testing.DEEP.astype(np.float32), testing.DEEP[..., :2], testing.DEEP.astype(np.int32)]


class TestGreyAndAlpha(testing.FeatureConformance):
    def make_feature(self):
        return Image((8, 6, 2))

    def make_values(self):
        return [testing.PIXELS[..., :2], testing.PIXELS[..., 2:], np.zeros((8, 6, 2), np.uint8)]

    def make_wrong_values(self):
        return [testing.PIXELS, testing.PIXELS[..., 0], testing.PIXELS[..., :2].astype(np.float32)]


class TestImage(testing.FeatureConformance):
    is_lossy = True  # a value may come as the bytes of a file

    def make_feature(self):
        return Image((8, 6, 3))

    def make_values(self):
        return [PIXELS, encode_png(PIXELS), encode_jpeg(PIXELS)]


class TestBfloat16(testing.FeatureConformance):
    def make_feature(self):
        pytest.importorskip("ml_dtypes")
        return Tensor((None,), "bfloat16")

    def make_values(self):
        pytest.importorskip("ml_dtypes")
        return [testing.extremes("bfloat16")[:count] for count in (6, 0, 1)]

    def make_wrong_values(self):
        return [np.zeros(2, np.float32), np.zeros(2, np.float16)]


class TestBfloat16Scalar(testing.FeatureConformance):
    def make_feature(self):
        pytest.importorskip("ml_dtypes")
        return Scalar("bfloat16")

    def make_values(self):
        return [0.1, -0.0, float("inf")]

    def make_wrong_values(self):
        return [np.float32(1), 257, 1e300, True]


class TestOptionalNumber(testing.FeatureConformance):
    def make_feature(self):
        return Optional(Scalar("float64"))

    def make_values(self):
        return [None, 0.1, float("inf"), None, -0.0]

    def make_wrong_values(self):
        return ["text", object(), [1.0]]


class TestOptionalText(testing.FeatureConformance):
    def make_feature(self):
        return Optional(Text())

    def make_values(self):
        return ["", None, "größer – 日本語"]


class TestOptionalTensor(testing.FeatureConformance):
    """No numbers are not None."""

    def make_feature(self):
        return Optional(Tensor((None, 2), "int16"))

    def make_values(self):
        return [np.arange(4, dtype=np.int16).reshape(2, 2), None, np.empty((0, 2), np.int16)]


class TestOptionalMatrix(testing.FeatureConformance):
    def make_feature(self):
        return Optional(Tensor((2, 2), "float32"))

    def make_values(self):
        return [None, np.arange(4, dtype=np.float32).reshape(2, 2), np.zeros((2, 2), np.float32)]


class TestOptionalShapes(testing.FeatureConformance):
    """Two open sizes are stored beside the numbers."""

    def make_feature(self):
        return Optional(Tensor((None, None), "float32"))

    def make_values(self):
        return [None, np.ones((2, 3), np.float32), np.empty((0, 4), np.float32)]


class TestOptionalLabels(testing.FeatureConformance):
    def make_feature(self):
        return Optional(ClassLabel(names=("cat", "dog"), shape=(None,)))

    def make_values(self):
        return [np.array([1, 0]), None, np.empty(0, np.int64)]


class TestOptionalTime(testing.FeatureConformance):
    def make_feature(self):
        return Optional(Timestamp(tz="UTC"))

    def make_values(self):
        return [np.datetime64("2026-11-23T12:30:15.123456"), None, np.datetime64(0, "us")]


class TestOptionalImage(testing.FeatureConformance):
    is_lossy = True  # a value may come as the bytes of a file

    def make_feature(self):
        return Optional(Image((8, 6, 3)))

    def make_values(self):
        return [None, PIXELS, encode_png(PIXELS)]


class TestOptionalBytes(testing.FeatureConformance):
    def make_feature(self):
        return Optional(Bytes())

    def make_values(self):
        return [b"", None, b"\0trailing zeros\0\0"]


class TestTexts(testing.FeatureConformance):
    def make_feature(self):
        return Sequence(Text())

    def make_values(self):
        return [["sea", "größer – 日本語", ""], [], ["x" * 5000], [""]]

    def make_wrong_values(self):
        return ["text", None, ["text", None], [b"bytes"], {"a": 1}]


class TestNumbers(testing.FeatureConformance):
    def make_feature(self):
        return Sequence(Scalar("uint16"))

    def make_values(self):
        return [[1, 2, 65535], [], (0,), np.arange(3, dtype=np.uint16)]

    def make_wrong_values(self):
        return [[-1], [65536], [1.5], [None], 5, None, np.arange(3)]


class TestArrays(testing.FeatureConformance):
    def make_feature(self):
        return Sequence(Tensor((2, 2), "float32"))

    def make_values(self):
        return [[np.ones((2, 2), np.float32)] * 3, np.zeros((0, 2, 2), np.float32), np.zeros((1, 2, 2), np.float32)]

    def make_wrong_values(self):
        return [[np.ones((2, 3), np.float32)], [5], np.ones((1, 2), np.float32)]


class TestTimes(testing.FeatureConformance):
    def make_feature(self):
        return Sequence(Timestamp())

    def make_values(self):
        return [[np.datetime64("2026-11-23"), datetime.datetime(1, 1, 1)], [], [datetime.datetime.max]]


class TestFiles(testing.FeatureConformance):
    def make_feature(self):
        return Sequence(Bytes())

    def make_values(self):
        return [[b"", b"\0\xff\0"], [], [b"x" * 5000] * 12]


class TestPictures(testing.FeatureConformance):
    is_lossy = True  # a value may come as the bytes of a file

    def make_feature(self):
        return Sequence(Image((8, 6, 3)))

    def make_values(self):
        return [[PIXELS, encode_png(PIXELS)], [], [PIXELS // 2]]


class TestJsons(testing.FeatureConformance):
    def make_feature(self):
        return Sequence(Json())

    def make_values(self):
        return [[{"a": [1, None]}, None, 5], [], [[]]]
