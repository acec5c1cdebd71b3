"""Embeddings that a model gave, one array of (n, 768): the rows of it are the inputs.

Prints: 500 vectors of 768, all equal
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import numpy as np

from datamat import Features, Scalar, Tensor, WorkerOptions, load, materialize

embeddings = np.random.default_rng(0).normal(size=(500, 768)).astype(np.float32)
materialize(
    lambda vector: {"embedding": vector, "norm": np.linalg.norm(vector)},
    embeddings,
    "out",
    features=Features({"embedding": Tensor((768,), "float32"), "norm": Scalar("float32")}),
    workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS),
)

# %%
found = load("out")
stacked = {sample["embedding"].tobytes(): float(sample["norm"]) for sample in found}
for vector in embeddings:
    assert stacked[vector.tobytes()] == float(np.linalg.norm(vector))
batch = next(iter(found.to_numpy(batch_size=64)))
print(f"{len(found)} vectors of {batch['embedding'].shape[1]}, all equal")
