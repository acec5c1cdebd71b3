"""A folder for each class, with names as people give them; a split drawn by key, augmented copies for training.

Prints: 36 pictures, classes ['golden retriever', 'tabby cat', 'Ångström'], 74 records
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import pathlib

import albumentations as A
import cv2
import numpy as np

from datamat import Materializer, WorkerOptions, load

raw = pathlib.Path("raw/my pets")
classes = ["golden retriever", "tabby cat", "Ångström"]
if not raw.exists():
    rng = np.random.default_rng(0)
    for name in classes:
        (raw / name).mkdir(parents=True)
        for number in range(12):
            picture = rng.integers(0, 256, (24 + number, 32, 3), np.uint8)
            (raw / name / f"IMG {number} (1).jpg").write_bytes(cv2.imencode(".jpg", picture)[1].tobytes())

# %%
Materializer(
    "image_folder",
    raw,
    "out",
    splits={"train": 0.7, "val": 0.3},
    copies={"train": 3},
    transform=A.Compose([A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=1.0), A.RandomCrop(24, 24)]),
).run(workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS))

# %%
train, val = load("out", "train"), load("out", "val")
names = train.features["label"].names
originals = {key.split("#")[0] for data in (train, val) for key in data.keys()}
assert len(originals) == sum(1 for _ in raw.rglob("*.jpg"))
assert len({sample["image"].tobytes() for sample in train}) == len(train)
for sample in val:
    assert sample["key"].startswith(names[sample["label"]])
    path = raw / (sample["key"].replace("-", "/", 1) + ".jpg")
    assert np.array_equal(sample["image"], cv2.imdecode(np.fromfile(path, np.uint8), 1)[..., ::-1])
print(f"{len(originals)} pictures, classes {sorted(names)}, {len(train) + len(val)} records")
