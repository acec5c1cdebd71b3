"""webdataset's convention: files of one basename make a sample; here from a folder to tar shards.

Prints: 40 samples in 4 shards, 40 as on disk
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import collections
import json
import os

import cv2
import numpy as np

from datamat import (
    ClassLabel,
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    Materializer,
    ShardOptions,
    Text,
    WorkerOptions,
)
from datamat import load

if not os.path.isdir("raw"):
    os.mkdir("raw")
    rng = np.random.default_rng(1)
    for i in range(40):
        base = f"raw/sample{i:06d}"
        cv2.imwrite(base + ".jpg", rng.integers(0, 256, (16, 16, 3), np.uint8))
        with open(base + ".cls", "w") as f:
            f.write(str(i % 3))
        with open(base + ".json", "w") as f:
            json.dump({"caption": f"the {i}th", "tags": ["a", "b"][: i % 3]}, f)


class Basenames(DatasetWriter):
    name = "web"
    features = Features({"jpg": Image(), "cls": ClassLabel(num_classes=3), "caption": Text(), "tags": Text()})

    def index(self, source):
        groups = collections.defaultdict(dict)
        for file in sorted(os.listdir(source)):
            base, extension = os.path.splitext(file)
            groups[base][extension[1:]] = file  # below the source
        for base, files in groups.items():
            yield IndexRow(base, "train", files)

    def read(self, row):
        with open(row.fields["json"]) as f:
            meta = json.load(f)
        with open(row.fields["cls"]) as f:
            label = int(f.read())
        with open(row.fields["jpg"], "rb") as f:
            return {"jpg": f.read(), "cls": label, "caption": meta["caption"], "tags": " ".join(meta["tags"])}


Materializer(
    Basenames,
    "raw",
    "out",
    format="webdataset",
    shards=ShardOptions(records_per_shard=10),
).run(workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS))

# %% a plain loop
data, good = load("out"), 0
for i in range(40):
    base = f"raw/sample{i:06d}"
    sample = data[os.path.basename(base)]
    meta = json.load(open(base + ".json"))
    assert np.array_equal(sample["jpg"], cv2.imread(base + ".jpg")[..., ::-1])
    good += int(open(base + ".cls").read()) == sample["cls"] and meta["caption"] == sample["caption"]
print(f"{len(data)} samples in {len([f for f in os.listdir('out') if f.endswith('.tar')])} shards, {good} as on disk")
