"""Every built-in feature type passes the conformance tests that datamat ships for users' types."""

from __future__ import annotations

import datetime
import importlib.util
import io
from typing import TYPE_CHECKING, Any, NamedTuple

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
    ListOf,
    Mask,
    Nullable,
    Polygons,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    Video,
    testing,
)
from datamat.codecs import encode_jpeg, encode_png
from datamat.testing import cases

if TYPE_CHECKING:
    from datamat.features import Feature

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 6, 3), np.uint8)
ROTATED = np.array([[20, 20, 10, 6, 30], [60, 40, 8, 20, -100]], np.float32)
TRIANGLE = np.array([[0, 0], [4, 0], [0, 4.5]], np.float32)
NOON = np.datetime64("2026-11-23T12:30:15.123456")
UTC = datetime.UTC


class Case(NamedTuple):
    """A feature, values of it and values that it refuses."""

    feature: Feature
    values: list[Any]
    wrong: list[Any] = [object()]  # noqa: RUF012
    is_lossy: bool = False
    """Whether values include files, or lists that read back as one array."""


def circular():
    found = []
    found.append(found)
    return found


CASES = {
    "scalar": Case(Scalar("float32"), [0.1, -0.0, np.float32(np.inf)]),
    "tensor": Case(Tensor((None, 2), "int16"), [np.arange(2 * n, dtype=np.int16).reshape(n, 2) for n in (3, 0, 1)]),
    "text": Case(Text(), ["", "größer – 日本語", "x" * 5000]),
    "bytes": Case(
        Bytes(),
        [b"", b"\0trailing zeros\0\0", bytes(range(256)), "größer".encode("latin-1"), b"x" * 5000],
        ["text", None, 5, np.zeros(3, np.uint8)],
    ),
    "json": Case(
        Json(),
        [
            {"a": [1, -0.5, None, True, {"größer": '日本語 \0 "quoted"', "": []}], "b": {}, "c": 2**70},
            *(None, [], {}, 5, 0.1, "text", [[[1.5], []], {}], [None, False]),
        ],
        [{1: 2}, {"a": float("nan")}, {"a": [object()]}, {"a": b"x"}, "\ud800", circular()],
    ),
    "timestamp": Case(
        Timestamp(tz="UTC"),
        [NOON, *(np.datetime64(number, "us") for number in (-(2**63) + 1, -1, 0, 2**63 - 1))],
        [None, 5, "2026-11-23", np.datetime64("NaT", "us"), np.datetime64(1, "ns"), datetime.datetime(2026, 11, 23)],
    ),
    "naive timestamp": Case(
        Timestamp(),
        [datetime.datetime(1, 1, 1), datetime.datetime.max, np.datetime64("2026-11-23")],
        [datetime.datetime(2026, 11, 23, tzinfo=UTC), datetime.time(12), "2026-11-23"],
    ),
    "tokens": Case(
        Tokens(vocab_size=50_257),
        [np.array([464, 3797, 50_256]), [], [1, np.int64(2)], np.zeros(0, np.uint16), np.arange(3000, dtype=np.int32)],
        [None, "text", 5, [50_257], [-1], [1.0], [True], [[1, 2]], np.zeros((1, 2), int), np.zeros(2), b"ab"],
    ),
    "unsigned tokens": Case(
        Tokens("uint64"),
        [[2**64 - 1, 0], np.array([2**63], np.uint64), np.array([5], np.int8)],
        [[2**64], [-1], np.array([-1])],
    ),
    "label": Case(ClassLabel(names=("cat", "dog")), [0, 1, np.int64(0)]),
    "boxes": Case(BBoxes(), [np.zeros((0, 4), np.float32), np.array([[0, 0.25, 0.5, 1]], np.float32), cases.BOXES]),
    "rotated boxes": Case(
        BBoxes(rotated=True),
        [np.zeros((0, 5), np.float32), np.array([[5, -4, 3, 0, 400.5], [1, 2, 3, 4, -90]], np.float32), ROTATED],
        [cases.BOXES, np.array([[1, 1, -1, 1, 0]], np.float32), np.array([[1, 1, 1, np.nan, 0]], np.float32)],
    ),
    "keypoints": Case(
        Keypoints((None, 2, 3), names=("eye", "ear")),
        [np.zeros((0, 2, 3), np.float32), np.array([[[1.5, 2, 2], [-1, 9e9, 1]]], np.float32), [[[0, 0, 0]] * 2] * 3],
        [
            *([[[0, 0, 3], [0, 0, 0]]], [[[np.nan, 0, 1], [0, 0, 0]]], [[0, 0, 0]], [["x"]], [[1, 2], [3]]),
            *(None, np.zeros((1, 2, 2), np.float32), np.zeros((1, 2, 3))),
        ],
    ),
    "points": Case(Keypoints(), [np.zeros((0, 2), np.float32), [[1, 2], [3, -4.5]], ROTATED[:, :2]]),
    "polygons": Case(
        Polygons(),
        [[], [[]], [TRIANGLE], [TRIANGLE, [], [5, 5, 9, 5, 9, 9, 5, 9]], np.stack([TRIANGLE, TRIANGLE + 1])],
        [
            np.array([[[np.nan, np.nan], [1, 1]]], np.float32),
            *([[1, 2, 3]], [[[1, np.inf]]], [[[1, 2, 3]]], [["x"]], 5, np.zeros((2, 3, 2))),
        ],
        is_lossy=True,
    ),
    "image": Case(Image((8, 6, 3)), [PIXELS, encode_png(PIXELS), encode_jpeg(PIXELS)], is_lossy=True),
    "image of 16 bits": Case(
        Image((None, None, 3), dtype="uint16"),
        [cases.DEEP, cases.DEEP.astype(">u2"), cases.DEEP[:2, :3], np.zeros((1, 1, 3), np.uint16)],
        [PIXELS, cases.DEEP.astype(np.float32), cases.DEEP[..., :2], cases.DEEP.astype(np.int32)],
    ),
    "grey and alpha": Case(
        Image((8, 6, 2)),
        [cases.PIXELS[..., :2], cases.PIXELS[..., 2:], np.zeros((8, 6, 2), np.uint8)],
        [cases.PIXELS, cases.PIXELS[..., 0], cases.PIXELS[..., :2].astype(np.float32)],
    ),
    "mask": Case(
        Mask((8, 6), names=("sky", "road")),
        [PIXELS[..., 0] % 2, np.zeros((8, 6), np.uint8), np.ones((8, 6), np.uint8)],
    ),
    "wide mask": Case(
        Mask((8, 6), names=("sky", "road"), dtype="uint16"),
        [np.full((8, 6), level, np.uint16) for level in (0, 1, 65535)],
        [np.zeros((8, 6), np.uint8), np.full((8, 6), 255, np.uint16), np.zeros((8, 6), np.int64)],
    ),
    "depth": Case(
        Depth((8, 6)),
        [cases.DEEP[..., 0], np.zeros((8, 6), np.uint16), np.full((8, 6), 65535, np.uint16)],
        [
            np.ones((8, 6), np.float32),
            np.ones((8, 6), np.uint8),
            np.ones((8, 6, 1), np.uint16),
            encode_png(PIXELS[..., 0]),
        ],
    ),
    "depth in metres": Case(
        Depth(dtype="float32"),
        [cases.METRES, cases.METRES.T, np.zeros((1, 1), np.float32)],
        [np.ones((8, 6)), np.ones((8, 6), np.uint16), np.ones((8, 6, 1), np.float32)],
    ),
    "optional number": Case(
        Nullable(Scalar("float64")), [None, 0.1, float("inf"), None, -0.0], ["text", object(), [1.0]]
    ),
    "optional int": Case(Nullable(Scalar("int32")), [5, None, 7]),
    "optional text": Case(Nullable(Text()), ["", None, "größer – 日本語"]),
    "optional tensor": Case(
        Nullable(Tensor((None, 2), "int16")),
        [np.arange(4, dtype=np.int16).reshape(2, 2), None, np.empty((0, 2), np.int16)],
    ),
    "optional matrix": Case(
        Nullable(Tensor((2, 2), "float32")),
        [None, np.arange(4, dtype=np.float32).reshape(2, 2), np.zeros((2, 2), np.float32)],
    ),
    "optional shapes": Case(
        Nullable(Tensor((None, None), "float32")), [None, np.ones((2, 3), np.float32), np.empty((0, 4), np.float32)]
    ),
    "optional labels": Case(
        Nullable(ClassLabel(names=("cat", "dog"), shape=(None,))), [np.array([1, 0]), None, np.empty(0, np.int64)]
    ),
    "optional time": Case(Nullable(Timestamp(tz="UTC")), [NOON, None, np.datetime64(0, "us")]),
    "optional image": Case(Nullable(Image((8, 6, 3))), [None, PIXELS, encode_png(PIXELS)], is_lossy=True),
    "optional bytes": Case(Nullable(Bytes()), [b"", None, b"\0trailing zeros\0\0"]),
    "texts": Case(
        ListOf(Text()),
        [["sea", "größer – 日本語", ""], [], ["x" * 5000], [""]],
        ["text", None, ["text", None], [b"bytes"], {"a": 1}],
    ),
    "numbers": Case(
        ListOf(Scalar("uint16")),
        [[1, 2, 65535], [], (0,), np.arange(3, dtype=np.uint16)],
        [[-1], [65536], [1.5], [None], 5, None, np.arange(3)],
    ),
    "arrays": Case(
        ListOf(Tensor((2, 2), "float32")),
        [[np.ones((2, 2), np.float32)] * 3, np.zeros((0, 2, 2), np.float32), np.zeros((1, 2, 2), np.float32)],
        [[np.ones((2, 3), np.float32)], [5], np.ones((1, 2), np.float32)],
    ),
    "times": Case(
        ListOf(Timestamp()),
        [[np.datetime64("2026-11-23"), datetime.datetime(1, 1, 1)], [], [datetime.datetime.max]],
    ),
    "files": Case(ListOf(Bytes()), [[b"", b"\0\xff\0"], [], [b"x" * 5000] * 12]),
    "pictures": Case(ListOf(Image((8, 6, 3))), [[PIXELS, encode_png(PIXELS)], [], [PIXELS // 2]], is_lossy=True),
    "jsons": Case(ListOf(Json()), [[{"a": [1, None]}, None, 5], [], [[]]]),
}

if importlib.util.find_spec("ml_dtypes"):
    CASES["bfloat16"] = Case(
        Tensor((None,), "bfloat16"),
        [cases.extremes("bfloat16")[:count] for count in (6, 0, 1)],
        [np.zeros(2, np.float32), np.zeros(2, np.float16)],
    )
    CASES["bfloat16 scalar"] = Case(Scalar("bfloat16"), [0.1, -0.0, float("inf")], [np.float32(1), 257, 1e300, True])


def sound_files(wave):
    import soundfile

    files = [io.BytesIO() for _ in range(3)]
    for file, kind in zip(files, ("WAV", "FLAC", "MP3"), strict=True):
        soundfile.write(file, wave, 8_000, format=kind)
    return [file.getvalue() for file in files]


if importlib.util.find_spec("soundfile"):
    WAVE = np.sin(np.arange(2000) / 9).astype(np.float32)
    CASES["audio"] = Case(
        Audio(8_000),
        [
            *(*sound_files(WAVE), WAVE, WAVE.reshape(-1, 2) * 3),
            *(np.zeros((7, 2), np.int16), np.zeros((0, 1), np.float32)),
        ],
        [None, "a.wav", np.zeros(5), np.zeros((5, 0), np.float32), np.full(5, np.nan, np.float32)],
        is_lossy=True,
    )

if importlib.util.find_spec("av"):
    FRAMES = [np.random.default_rng(0).integers(0, 256, (n, 16, 16 + n, 3), np.uint8) for n in (1, 2, 5)]
    VIDEOS = [Video(fps=10).encode(frames) for frames in FRAMES]
    CASES["video"] = Case(
        Video((16, None), fps=10),
        [*FRAMES, *VIDEOS],
        [
            *(None, "a.mp4", np.zeros((0, 16, 16, 3), np.uint8)),
            *(np.zeros((2, 8, 16, 3), np.uint8), np.zeros((2, 16, 16), np.uint8)),
        ],
        is_lossy=True,
    )
    CASES["video file"] = Case(
        Video(decoded=False), VIDEOS, [None, "a.mp4", np.zeros((1, 8, 8, 3), np.uint8)], is_lossy=True
    )


class TestFeatures(testing.FeatureConformance):
    """Each test with each case; on commit, some of those that run a job or TensorFlow."""

    @pytest.fixture(autouse=True, params=CASES)
    def _case(self, request):
        self.case = CASES[request.param]
        self.is_lossy = self.case.is_lossy

    def make_feature(self):
        return self.case.feature

    def make_values(self):
        return self.case.values

    def make_wrong_values(self):
        return self.case.wrong

    @pytest.mark.sample(4)
    def test_value_survives_a_run(self, tmp_path):
        super().test_value_survives_a_run(tmp_path)

    @pytest.mark.sample(20)
    def test_tf_data_gives_the_same_values(self, tmp_path):
        super().test_tf_data_gives_the_same_values(tmp_path)
