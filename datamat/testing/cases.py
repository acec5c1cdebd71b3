"""Values of every built-in feature, and records for tests of formats."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.codecs import encode_jpeg, encode_png
from datamat.features import (
    Audio,
    BBoxes,
    Bytes,
    ClassLabel,
    Depth,
    Feature,
    Features,
    Image,
    Json,
    Keypoints,
    Mask,
    Polygons,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    Video,
)
from datamat.features.base import dtype_of

if TYPE_CHECKING:
    from datamat.writers.base import Sample

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 6, 4), np.uint8)
BOXES = np.array([[0, 0.25, 0.5, 1], [0.1, 0.1, 0.3, 0.7]], np.float32)
DEEP = np.random.default_rng(1).integers(0, 65536, (8, 6, 3), np.uint16)
PEOPLE = np.array([[[1.5, -2, 2], [0, 0, 0]]], np.float32)
ROTATED = np.array([[5, 4, 3, 2, -30.5]], np.float32)
METRES = np.array([[0.0, 65.535, np.nan], [np.inf, np.finfo(np.float32).tiny, -1.0]], np.float32)


def extremes(dtype: str) -> Any:
    """Return the bounds of a dtype, and unusual values between them."""
    kind = dtype_of(dtype).kind
    if kind in "iu":
        return np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 7], dtype)
    if kind == "b":
        return np.array([True, False, True])
    if dtype == "bfloat16":  # among them the smallest and the largest, infinity and NaN
        return np.array([0x3DCD, 0x8000, 0x7F80, 0x7FC0, 0x0001, 0x7F7F], np.uint16).view(dtype_of(dtype))
    values = [0.1, -0.0, np.inf, np.nan, np.finfo(dtype).tiny, np.finfo(dtype).max]
    return np.array(values, dtype) + (1j if kind == "c" else 0) * np.array(1, dtype)


NUMBERS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]
NUMBERS += ["bfloat16"] if importlib.util.find_spec("ml_dtypes") else []

CASES: dict[str, tuple[Feature, list[Any]]] = {
    "png": (Image((8, 6, 3)), [encode_png(PIXELS[..., :3]), encode_png(PIXELS[..., :3] // 2)]),
    "jpeg": (Image((8, 6, 3)), [encode_jpeg(PIXELS[..., :3])]),
    "either": (Image((8, 6, 3)), [encode_png(PIXELS[..., :3]), encode_jpeg(PIXELS[..., :3])]),
    "mask": (Mask((8, 6)), [encode_png(PIXELS[..., 0] % 3)]),
    "grey and alpha": (Image((8, 6, 2)), [PIXELS[..., :2]]),
    "16 bits": (Image((None, None, 3), dtype="uint16"), [DEEP, DEEP[:2, :3]]),
    "many ids": (Mask((None, None), dtype="uint16"), [DEEP[..., 0], encode_png(DEEP[..., 1])]),
    "millimetres": (Depth(), [DEEP[..., 0], encode_png(DEEP[..., 1])]),
    "points": (Keypoints(), [BOXES[:, :2] * 9, np.zeros((0, 2), np.float32)]),
    "people": (Keypoints((None, 2, 3)), [PEOPLE, PEOPLE[:0]]),
    "polygons": (Polygons(), [[[[0, 0], [4, 0], [0.5, 4]], [], [5, 5, 9, 5, 9, 9, 5, 9]], [], [[]]]),
    "rotated boxes": (BBoxes(rotated=True), [ROTATED, ROTATED[:0]]),
    "metres": (Depth(dtype="float32"), [METRES]),
    "label": (ClassLabel(num_classes=5), [0, 4]),
    "labels": (ClassLabel(num_classes=5, shape=(None,)), [[], [4], [0, 1, 2, 3, 4]]),
    "two labels": (ClassLabel(num_classes=5, shape=(2,)), [[0, 4], [1, 1]]),
    "boxes": (BBoxes(), [np.zeros((0, 4), np.float32), BOXES, BOXES[:1]]),
    "text": (Text(), ["", "größer – 日本語 \U0001f600", 'a "quote"\n\0 and \\ more', "x" * 5000]),
    "bytes": (Bytes(), [b"", b"\0\xff\0", b"x" * 5000]),
    "json": (Json(), [None, {"b": [1, 0.5, {"größe": "\0 \\ \U0001f600"}], "a": {}}, [], "text", 2**70]),
    "moments": (Timestamp("UTC"), [np.datetime64(n, "us") for n in (1 - 2**63, -1, 0, 2**63 - 1)]),
    "times": (Timestamp(), [np.datetime64("2026-11-23T12:00")]),
    "tokens": (Tokens(vocab_size=50_257), [[0, 50_256, 7], [], [256] * 3000]),
    **(
        {"audio": (Audio(8_000), [np.sin(np.arange(2 * n, dtype=np.float32)).reshape(-1, 2) for n in (0, 1, 900)])}
        if importlib.util.find_spec("soundfile")
        else {}
    ),
    **(
        {"video": (Video(fps=10), [DEEP.astype(np.uint8)[None, ..., :3], np.zeros((3, 9, 7, 3), np.uint8)])}
        if importlib.util.find_spec("av")
        else {}
    ),
    **{f"scalar {dtype}": (Scalar(dtype), list(extremes(dtype))) for dtype in NUMBERS},
    **{f"fixed {dtype}": (Tensor((3,), dtype), [extremes(dtype)[:3], extremes(dtype)[-3:]]) for dtype in NUMBERS},
    **{f"open {dtype}": (Tensor((None,), dtype), [extremes(dtype)[:n] for n in (0, 1, 3)]) for dtype in NUMBERS},
    **{f"raw {dtype}": (Tensor((None,), dtype, "raw"), [extremes(dtype)[:n] for n in (0, 3)]) for dtype in NUMBERS},
    "matrix": (Tensor((2, 3), "int32"), [np.arange(6, dtype=np.int32).reshape(2, 3)]),
    "matrices": (Tensor((None, 2, 3), "int16"), [np.arange(6 * n, dtype=np.int16).reshape(n, 2, 3) for n in (2, 0)]),
    "open inside": (Tensor((2, None), "float32"), [np.ones((2, n), np.float32) for n in (3, 0)]),
    "open twice": (Tensor((None, 2, None), "int32"), [np.ones((2, 2, 3), np.int32), np.ones((0, 2, 5), np.int32)]),
    "no numbers": (Tensor((None, 0), "float32"), [np.zeros((4, 0), np.float32), np.zeros((0, 0), np.float32)]),
    "large": (Tensor((50_000,), "float32"), [np.arange(50_000, dtype=np.float32)]),
}
"""Features with values, including extremes, by name of the case."""

ODD_KEYS = [
    *("plain", "größe/日本語", "a.b.c", "%2E", "../../etc/passwd", "/abs", "end/", "two//slashes", "__meta__/x"),
    *("name#0", "with space", "tab\tnew\nline", "back\\slash", "x" * 300, "ü" * 60, "d/" * 80 + "deep.name", "."),
]

IMAGES = [encode_png(np.roll(PIXELS[..., :3], shift)) for shift in range(7)]
MIXED = Features(
    {"image": Image((8, 6, 3)), "label": ClassLabel(num_classes=500), "boxes": BBoxes(), "caption": Text()}
)
TABLE = Features({"label": ClassLabel(num_classes=500), "x": Scalar("float64"), "caption": Text()})


def mixed(number: int) -> Sample:
    """Return a sample of `MIXED`, different from all others."""
    return {
        "key": f"sample {number:05d}",
        "image": IMAGES[number % len(IMAGES)],
        "label": number % 500,
        "boxes": BOXES[: number % 3],
        "caption": f"number {number} " * (number % 5),
    }
