"""PyTorch in the same program: written, then trained on, by a `DataLoader` and by batches.

Prints: 96 samples, sum 4560, 12 batches of 8 / DataLoader: 96 samples, sum 4560
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import numpy as np
import torch
from torch.utils.data import DataLoader

from datamat import Features, Scalar, Tensor, WorkerOptions, load, materialize

features = Features({"x": Tensor((3,), "float32"), "y": Scalar("int64")})
materialize(
    lambda i: {"x": np.full(3, i, np.float32), "y": i},
    range(96),
    "out",
    features=features,
    workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS),
)

# %%
data = load("out")
batches = list(data.to_torch(batch_size=8))
assert all(isinstance(batch["x"], torch.Tensor) and batch["x"].shape == (8, 3) for batch in batches)
total = sum(int(batch["y"].sum()) for batch in batches)
print(f"{sum(len(batch['y']) for batch in batches)} samples, sum {total}, {len(batches)} batches of 8")

# %%
loader = DataLoader(data, batch_size=8, shuffle=True)
seen = [int(y) for batch in loader for y in batch["y"]]
assert sorted(seen) == list(range(96))
print(f"DataLoader: {len(seen)} samples, sum {sum(seen)}")
