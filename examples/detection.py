"""Object detection: a COCO folder becomes shards whose copies are flipped and cropped together with their boxes.

    python examples/detection.py [COCO [OUTPUT]]

Where there is no such folder, a few pictures with balls and bricks are drawn there first.
"""

import json
import pathlib
import sys

import albumentations as A  # noqa: N812 -- the name that its users know
import cv2
import numpy as np

from datamat import Materializer, load

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "coco")
output = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else "out/coco")
CLASSES = ("ball", "brick")


def draw_coco(folder: pathlib.Path) -> None:
    """Write pictures, and their boxes (left, top, width, height) in pixels as COCO has them."""
    rng = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True)
    for split, count in (("train", 24), ("val", 8)):
        (folder / split).mkdir()
        images, annotations = [], []
        for number in range(count):
            picture = rng.integers(0, 80, (96, 128, 3)).astype(np.uint8)
            name = f"{split}{number:03d}.jpg"
            for _ in range(int(rng.integers(1, 4))):
                kind, size = int(rng.integers(2)), int(rng.integers(12, 30))
                left, top = int(rng.integers(0, 128 - size)), int(rng.integers(0, 96 - size))
                colour = tuple(int(value) for value in rng.integers(120, 256, 3))
                if CLASSES[kind] == "ball":
                    cv2.circle(picture, (left + size // 2, top + size // 2), size // 2, colour, -1)
                else:
                    cv2.rectangle(picture, (left, top), (left + size, top + size), colour, -1)
                box = {"image_id": number, "category_id": kind + 1, "bbox": [left, top, size, size]}
                annotations.append({**box, "id": len(annotations), "area": size * size, "iscrowd": 0})
            cv2.imwrite(str(folder / split / name), picture)
            images.append({"id": number, "file_name": name, "height": 96, "width": 128})
        categories = [{"id": kind + 1, "name": name} for kind, name in enumerate(CLASSES)]
        listed = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(listed))


if not folder.exists():
    draw_coco(folder)

augment = A.Compose(
    [A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.5), A.RandomCrop(80, 96)],
    bbox_params=A.BboxParams("albumentations", label_fields=["objects/label", "objects/is_crowd"]),
)
Materializer("coco", source=folder, output=output, copies={"train": 3}, transform=augment).run()

train = load(output, "train")
train.preview(6, columns=3).save(output.parent / "coco.png")
print(f"{len(train)} pictures, {sum(len(sample['objects/bbox']) for sample in train)} boxes")
for batch in train.to_numpy(batch_size=8, shuffle=True, seed=1):
    print(f"a batch {batch['image'].shape}, boxes of the first picture {batch['objects/bbox'][0].shape}")
    break
