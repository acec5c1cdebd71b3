"""CamVid as the SegNet tutorial ships it: lists with paths of another machine; four augmented copies for training.

Prints: train 32 records, 32 distinct, val 4 / each mask fits its picture
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import pathlib

import albumentations as A
import cv2
import numpy as np

from datamat import Materializer, WorkerOptions, load

base = pathlib.Path("raw/CamVid")
if not base.exists():
    rng = np.random.default_rng(0)
    for split, count in {"train": 8, "val": 4}.items():
        lines = []
        for i in range(count):
            mask = np.kron(rng.integers(0, 11, (6, 8)), np.ones((8, 8))).astype(np.uint8)
            image = np.stack([mask * 20, 255 - mask * 20, rng.integers(0, 255, mask.shape)], -1).astype(np.uint8)
            for folder, picture in ((split, image), (f"{split}annot", mask)):
                (base / folder).mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(base / folder / f"{i:04d}_{split}.png"), picture)
            lines.append(f"/SegNet/CamVid/{split}/{i:04d}_{split}.png /SegNet/CamVid/{split}annot/{i:04d}_{split}.png")
        (base / f"{split}.txt").write_text("\n".join(lines) + "\n")

# %%
augment = A.Compose([A.HorizontalFlip(p=0.5), A.RandomCrop(32, 48), A.GaussNoise(p=1.0), A.Rotate(limit=0, p=0.1)])
job = Materializer(
    "camvid",
    source=base,
    output="out/camvid",
    copies={"train": 4},
    transform=augment,
    seed=1,
)
job.run(workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS))

# %% each mask is a crop of its own picture's mask, perhaps flipped
train, val = load("out/camvid", "train"), load("out/camvid", "val")
assert {sample["key"].split("#")[0] for sample in train} == {f"{i:04d}_train" for i in range(8)}
for sample in train:
    mask = cv2.imread(str(base / "trainannot" / (sample["key"].split("#")[0] + ".png")), cv2.IMREAD_UNCHANGED)
    windows = np.lib.stride_tricks.sliding_window_view(mask, (32, 48)).reshape(-1, 32, 48)
    found = sample["mask"]
    assert (windows == found).all((1, 2)).any() or (windows == found[:, ::-1]).all((1, 2)).any()
for sample in val:
    assert np.array_equal(sample["image"], cv2.imread(str(base / "val" / (sample["key"] + ".png")))[..., ::-1])
distinct = len({sample["image"].tobytes() for sample in train})
print(f"train {len(train)} records, {distinct} distinct, val {len(val)}")
print("each mask fits its picture")
