"""CamVid, augmented fourfold, as TFRecord shards; then read back.

    python examples/camvid.py CamVid out/camvid

Where there is no folder CamVid, a small street set of the same layout is drawn there first.
"""

import argparse
import pathlib

import albumentations as A  # noqa: N812 -- the name that its users know

from datamat import Materializer, load

parser = argparse.ArgumentParser(description="Turn CamVid into augmented shards, and read them back.")
parser.add_argument("source", nargs="?", default="CamVid")
parser.add_argument("output", nargs="?", default="out/camvid")
parser.add_argument("--pairs", type=int, default=60, help="how many to draw where there is no source")
options = parser.parse_args()
source, output = options.source, options.output
if not pathlib.Path(source).exists():
    from street import make_street_set

    make_street_set(source, options.pairs)

# ---- write, read

augment = A.Compose([A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.8), A.RandomCrop(320, 320)])
Materializer("camvid", source=source, output=output, copies={"train": 4}, transform=augment).run()
train = load(output, "train")

# ---- what came out

sample = train[0]
print(f"{len(train)} samples; {sample['key']}: image {sample['image'].shape}, mask {sample['mask'].shape}")
for batch in train.to_tf(batch_size=8).take(1):
    print("a batch:", {name: tuple(values.shape) for name, values in batch.items()})
