"""A dataset class of PyTorch becomes shards, once, on all cores: its `__getitem__` is not called in training any more.

    pip install 'datamat[torch]'
    python examples/from_torch_dataset.py [OUTPUT]

`Materializer` takes the object as it is: anything with `len` and items. What an item holds is found out from the first
one. Arrays may differ in their sizes, unless a feature says that they do not, as here: then batches are single tensors.
"""

import sys

import numpy as np
import torch

from datamat import ImportWriter, Materializer, Tensor, load

output = sys.argv[1] if len(sys.argv) > 1 else "out/spirals"


class Spirals(torch.utils.data.Dataset):
    """Points on one of two spirals: slow to compute, as real datasets are slow to decode."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict:
        rng = np.random.default_rng(number)
        arm, angles = number % 2, np.sort(rng.uniform(0, 2 * np.pi, 32))
        radius = angles / 6 + 0.02 * rng.normal(size=32)
        turned = angles + np.pi * arm
        points = np.stack([radius * np.cos(turned), radius * np.sin(turned)], axis=1)
        return {"points": torch.from_numpy(points.astype(np.float32)), "arm": arm}


source = Spirals(600)
writer = ImportWriter(features={"points": Tensor((32, 2), "float32")})
print(Materializer(writer, source, output, splits={"train": 0.8, "val": 0.2}).run(progress=False))

train = load(output, "train")
first = train[0]
assert np.array_equal(first["points"], source[int(first["key"])]["points"].numpy())
print(f"{len(train)} samples; points {first['points'].dtype} {first['points'].shape}")
for batch in train.to_torch(batch_size=32, shuffle=True, seed=1):
    print(f"a batch {batch['points'].dtype} {tuple(batch['points'].shape)}")
    break
