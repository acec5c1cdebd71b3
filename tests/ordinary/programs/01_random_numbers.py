"""Random numbers in a lambda: as many distinct ones as a plain loop draws.

Prints: 400 records, 400 and 400 distinct
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import random

import numpy as np

from datamat import WorkerOptions, load, materialize

workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
materialize(lambda i: {"r": random.random(), "n": np.random.rand()}, range(400), "out", workers=workers)

# %% a plain loop draws 400 distinct numbers of each kind
plain = [(random.random(), np.random.rand()) for _ in range(400)]
data = load("out")
drawn = [{sample[name].item() for sample in data} for name in ("r", "n")]
assert [len(numbers) for numbers in drawn] == [len(set(numbers)) for numbers in zip(*plain, strict=True)]
print(f"{len(data)} records, {len(drawn[0])} and {len(drawn[1])} distinct")
