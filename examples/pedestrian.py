"""Pictures of the pavement with colour-coded masks of its surface, as shards of images and class numbers.

    python examples/pedestrian.py [FOLDER [OUTPUT]]

The layout is that of AI Hub's "sidewalk walking video": `Surface_NNN/*.jpg`, with `Surface_NNN/MASK/*.png` in colours.
Where there is no such folder, a few pictures are drawn there first.
"""

import pathlib
import sys

import albumentations as A  # noqa: N812 -- the name that its users know
import cv2
import numpy as np

from datamat import Materializer, load
from datamat.writers import PedestrianWriter

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "sidewalk")
output = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else "out/sidewalk")
BLOCKS, GUIDE = (0, 0, 255), (255, 255, 0)  # paving blocks, and the tactile strip for the blind, as RGB


def draw_walk(folder: pathlib.Path, count: int = 24) -> None:
    """Draw a pavement with a tactile strip, from a walker's eye."""
    rng = np.random.default_rng(0)
    for number in range(count):
        place = folder / f"Surface_{number // 8 + 1:03d}"
        (place / "MASK").mkdir(parents=True, exist_ok=True)
        image = np.full((120, 160, 3), rng.integers(70, 120), np.uint8)
        mask = np.zeros((120, 160, 3), np.uint8)
        left, right = int(rng.integers(0, 40)), int(rng.integers(120, 160))
        strip = int(rng.integers(70, 90))
        for corners, paint, colour in (
            ([(left, 119), (70, 40), (90, 40), (right, 119)], (150, 150, 165), BLOCKS),
            ([(strip - 9, 119), (78, 40), (82, 40), (strip + 9, 119)], (210, 190, 70), GUIDE),
        ):
            cv2.fillPoly(image, [np.array(corners)], paint)
            cv2.fillPoly(mask, [np.array(corners)], colour)
        noise = rng.integers(-12, 13, image.shape)
        image = (image + noise).clip(0, 255).astype(np.uint8)
        cv2.imwrite(str(place / f"{number:03d}.jpg"), image[..., ::-1])
        cv2.imwrite(str(place / "MASK" / f"{number:03d}.png"), mask[..., ::-1])


if not folder.exists():
    draw_walk(folder)

augment = A.Compose([A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.8)])
job = Materializer(
    PedestrianWriter(),
    source=folder,
    output=output,
    splits={"train": 0.75, "val": 0.25},
    copies={"train": 3},
    transform=augment,
)
job.run()

train = load(output, "train")
train.preview(6, columns=3).save(output.parent / "sidewalk.png")
names = train.features["mask"].names
counts = sum(np.bincount(sample["mask"].ravel(), minlength=len(names)) for sample in train)
print(f"{len(train)} samples in train, {len(load(output, 'val'))} in val")
for number in np.flatnonzero(counts):
    print(f"{names[number]}: {counts[number] / counts.sum():.0%} of the pixels")
