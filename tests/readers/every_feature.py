"""A writer with every feature type, for the readers to read back."""

from __future__ import annotations

import numpy as np

from datamat import (
    BBoxes,
    ClassLabel,
    DatasetWriter,
    Depth,
    Features,
    Image,
    IndexRow,
    Keypoints,
    Mask,
    Polygons,
    Scalar,
    Tensor,
    Text,
    WorkerOptions,
)
from datamat.codecs import encode_jpeg

DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]
ONE_WORKER = WorkerOptions(num_workers=1)


class Everything(DatasetWriter):
    """Every feature type, with values that try their bounds."""

    name = "everything"
    features = Features(
        {
            "png": Image((8, 6, 3)),
            "jpeg": Image((8, 6, 3), encoding="jpeg"),
            "grey": Image((8, 6, 1)),
            "grey_jpeg": Image((8, 6, 3)),
            "rgba": Image((8, 6, 4)),
            "mask": Mask((8, 6), names=("a", "b", "c")),
            "deep": Image((8, 6, 3), dtype="uint16"),
            "two": Image((8, 6, 2)),
            "ids": Mask((8, 6), dtype="uint16"),
            "points": Keypoints(),
            "face": Keypoints((2, 3)),
            "polygons": Polygons(),
            "rotated": BBoxes(rotated=True),
            "millimetres": Depth((8, 6)),
            "metres": Depth((8, 6), dtype="float32"),
            "label": ClassLabel(num_classes=5),
            "labels": ClassLabel(num_classes=5, shape=(2,)),
            "boxes": BBoxes(),
            "caption": Text(),
            "open": Tensor((None, 2, None), "int32"),
            "empty": Tensor((None, 0), "float32"),
            **{f"scalar_{dtype}": Scalar(dtype) for dtype in DTYPES},
            **{f"list_{dtype}": Tensor((3,), dtype) for dtype in DTYPES},
            **{f"raw_{dtype}": Tensor((None, 3), dtype, "raw") for dtype in DTYPES},
        }
    )

    def index(self, source):
        return [IndexRow(f"row{number:02d}", fields={"number": number}) for number in range(7)]

    def read(self, row):
        number = int(row.fields["number"])
        rng = np.random.default_rng(number)
        pixels = rng.integers(0, 256, (8, 6, 4), np.uint8)
        corners = np.sort(rng.random((2, 2), np.float32), 0)
        numbers = {dtype: _numbers(rng, dtype) for dtype in DTYPES}
        return {
            "png": pixels[..., :3],
            "jpeg": pixels[..., :3],
            "grey": pixels[..., 0],
            "grey_jpeg": encode_jpeg(pixels[..., 0]),
            "rgba": pixels,
            "mask": pixels[..., 0] % 3,
            "deep": pixels[..., :3] * np.uint16(257),
            "two": pixels[..., 2:],
            "ids": pixels[..., 3] * np.uint16(255),
            "points": corners,
            "face": np.hstack([corners, np.ones((2, 1), np.float32)]),
            "polygons": np.stack([corners, corners + 1]),
            "rotated": np.array([[*corners.reshape(-1), 30]], np.float32),
            "millimetres": pixels[..., 0] * np.uint16(7),
            "metres": pixels[..., 1].astype(np.float32) / 7,
            "label": int(rng.integers(5)),
            "labels": rng.integers(0, 5, 2),
            "boxes": corners.reshape(1, 4),
            "caption": f"Nummer {row.key} – größer",
            "open": rng.integers(-9, 9, (1 + number % 2, 2, 3), np.int32),
            "empty": np.zeros((4, 0), np.float32),
            **{f"scalar_{dtype}": values[0] for dtype, values in numbers.items()},
            **{f"list_{dtype}": values for dtype, values in numbers.items()},
            **{f"raw_{dtype}": np.stack([values] * (1 + number % 2)) for dtype, values in numbers.items()},
        }


def _numbers(rng, dtype):
    """Return three numbers of a dtype, the bounds of integers among them."""
    kind = np.dtype(dtype).kind
    if kind in "iu":
        bounds = np.iinfo(dtype)
        return rng.permutation(np.array([bounds.min, bounds.max, 7], dtype))
    if kind == "b":
        return rng.random(3) < 0.5
    return (rng.standard_normal(3) + (1j * rng.standard_normal(3) if kind == "c" else 0)).astype(dtype)
