"""A training class makes its own shards: the job and the augmentation are methods, and nothing needs a guard.

    python examples/train_in_a_class.py [FOLDER]

`Materializer` is called in the middle of a class that has a logger, a lock and settings, as training classes do. The
methods that it is given run in worker processes, where `self` has all of these. A second `Trainer` of the same folder
finds the shards finished; one with other settings writes only what these change.
"""

import logging
import pathlib
import sys
import threading

import numpy as np
from shapes import SIZE, draw

from datamat import ClassLabel, DatasetWriter, Features, Image, IndexRow, Materializer, load

logging.basicConfig(level=logging.WARNING, format="%(processName)s %(name)s: %(message)s")


class Shapes(DatasetWriter):
    """Discs and squares. Your own samples go in the place of `draw`."""

    name = "shapes"
    features = Features({"image": Image((SIZE, SIZE, 3)), "label": ClassLabel(names=("disc", "square"))})

    def index(self, source: int) -> list[IndexRow]:
        return [IndexRow(f"shape{number:04d}", fields={"number": number}) for number in range(source)]

    def read(self, row: IndexRow, rng: np.random.Generator) -> dict:
        return draw(row.fields["number"], rng)


class Trainer:
    """Owns the data, the augmentation and the model."""

    def __init__(self, folder: pathlib.Path, noise: float = 12.0, count: int = 400):
        self.folder, self.noise, self.count = folder, noise, count
        self.logger = logging.getLogger("trainer")
        self.lock = threading.RLock()  # neither can be pickled, and neither is in the way
        self.weights = np.zeros(3)

    def augment(self, sample: dict, rng: np.random.Generator) -> dict:
        """Add noise, and turn the picture: in a worker process, on another `self`."""
        with self.lock:
            self.logger.debug("augmenting %s", sample["key"])
        pixels = sample["image"] + rng.normal(0, self.noise, sample["image"].shape)
        return {**sample, "image": np.rot90(pixels.clip(0, 255).astype(np.uint8), rng.integers(4)).copy()}

    def prepare(self) -> None:
        """Write the shards; do nothing where they are finished."""
        job = Materializer(
            Shapes,
            source=self.count,
            output=self.folder,
            splits={"train": 0.8, "val": 0.2},
            copies={"train": 2},
            transform=self.augment,
        )
        report = job.run(progress=False)
        print("nothing to do" if report.did_nothing else f"wrote {report.num_records} records")

    def describe(self, images: np.ndarray) -> np.ndarray:
        """Return, for each picture, float64 (3,): a constant, the area of the shape, and how full its box is."""
        lit = images.max(axis=3) > 100
        area = lit.sum(axis=(1, 2))
        box = lit.any(axis=1).sum(axis=1) * lit.any(axis=2).sum(axis=1)
        return np.stack([np.ones(len(images)), area / SIZE**2, area / box], axis=1)

    def fit(self, epochs: int = 40) -> None:
        """Train by gradient descent on shuffled batches."""
        train = load(self.folder, "train")
        batches = train.to_numpy(32, shuffle=True, seed=1)
        for _ in range(epochs):
            for batch in batches:
                inputs, targets = self.describe(batch["image"]), batch["label"]
                guesses = 1 / (1 + np.exp(-inputs @ self.weights))
                self.weights -= 2 * inputs.T @ (guesses - targets) / len(targets)

    def accuracy(self) -> float:
        """Return the share of the validation pictures that the model tells right."""
        right = [
            (self.describe(batch["image"]) @ self.weights > 0) == batch["label"]
            for batch in load(self.folder, "val").to_numpy(64)
        ]
        return float(np.concatenate(right).mean())


trainer = Trainer(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out"))
trainer.prepare()
trainer.prepare()
trainer.fit()
print(f"accuracy {trainer.accuracy():.2f}")
