"""COCO's instances: boxes and labels beside each picture, flipped together; pictures without a box are black.

Prints: 12 pictures, 21 boxes, 0 out of step
Says: flip gives equal copies of some samples
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import json
import os

import cv2
import numpy as np

from datamat import Materializer, WorkerOptions, load

if not os.path.exists("raw"):
    os.makedirs("raw/annotations")
    os.makedirs("raw/train2017")
    images, annotations = [], []
    for i in range(12):
        picture = np.zeros((40, 60, 3), np.uint8)
        for j in range(i % 4 + (i % 4 == 0) * (i % 3 == 0) * 3):
            x, y, w, h = 3 + 10 * j, 4 + i, 8, 12
            picture[y : y + h, x : x + w] = 100 + 40 * j
            annotations.append(
                {"id": len(annotations) + 1, "image_id": i, "category_id": 10 + 5 * (j % 2), "bbox": [x, y, w, h],
                 "area": w * h, "iscrowd": 0}
            )  # fmt: skip
        cv2.imwrite(f"raw/train2017/{i:012d}.png", picture)
        images.append({"id": i, "file_name": f"{i:012d}.png", "height": 40, "width": 60})
    categories = [{"id": 10, "name": "car"}, {"id": 15, "name": "bench"}]
    with open("raw/annotations/instances_train2017.json", "w") as file:
        json.dump({"images": images, "annotations": annotations, "categories": categories}, file)


def flip(sample, rng):
    if rng.random() < 0.5:
        boxes = sample["objects/bbox"].copy()
        boxes[:, [1, 3]] = 1 - boxes[:, [3, 1]]
        sample = {**sample, "image": np.ascontiguousarray(sample["image"][:, ::-1]), "objects/bbox": boxes}
    return sample


# %%
workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
Materializer("coco", "raw", "out", transform=flip, copies={"train": 2}).run(workers=workers)

# %% under each box lies what was drawn there
data, out_of_step = load("out", "train"), 0
annotations = json.load(open("raw/annotations/instances_train2017.json"))["annotations"]
num_boxes = 0
for sample in data:
    here = [one for one in annotations if one["image_id"] == sample["image_id"]]
    assert len(here) == len(sample["objects/bbox"])
    names = [data.features["objects/label"].names[label] for label in sample["objects/label"]]
    assert names == [{10: "car", 15: "bench"}[one["category_id"]] for one in here]
    for ymin, xmin, ymax, xmax in np.round(sample["objects/bbox"] * [40, 60, 40, 60]).astype(int):
        inside = sample["image"][ymin:ymax, xmin:xmax]
        drawn = 100 + 40 * np.arange(4)  # pictures that were changed are stored as JPEG
        out_of_step += np.abs(drawn - inside.mean()).min() > 8
        num_boxes += 1
print(f"{len(data) // 2} pictures, {num_boxes // 2} boxes, {out_of_step} out of step")
