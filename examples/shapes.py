"""Discs and squares as shards, which the examples of training frameworks learn to tell apart; nothing is downloaded."""

import numpy as np

from datamat import ClassLabel, Image, materialize

SIZE = 32
FEATURES = {"image": Image((SIZE, SIZE, 3)), "label": ClassLabel(names=("disc", "square"))}


def draw(number: int, rng: np.random.Generator) -> dict[str, object]:
    """Return a disc or a square, somewhere, in some colour."""
    image = rng.integers(0, 60, (SIZE, SIZE, 3)).astype(np.uint8)
    down, right = np.indices((SIZE, SIZE)) - rng.integers(10, SIZE - 10, 2)[:, None, None]
    label = number % 2
    shape = np.maximum(abs(down), abs(right)) < 8 if label else np.hypot(down, right) < 9
    image[shape] = rng.integers(120, 256, 3)
    return {"image": image, "label": label}


def write_shapes(folder: str, count: int) -> None:
    """Write the splits `train` and `val`. Your own samples go in the place of `draw`."""
    splits = {"train": 0.8, "val": 0.2}
    materialize(draw, range(count), folder, features=FEATURES, splits=splits, progress=False)
