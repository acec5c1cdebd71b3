"""The clock, and a generator made once for the module, in what makes a sample: refused, and `rng` is what to take.

Prints: the clock: refused / one generator for all: refused / rng: 50 records, 50 distinct
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import time

import numpy as np

from datamat import DatamatError, WorkerOptions, load, materialize

workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
shared = np.random.default_rng(7)


def with_clock(i):
    return {"i": i, "made": time.time()}


def with_shared(i):
    return {"i": i, "noise": shared.normal(size=3)}


def with_rng(i, rng):
    return {"i": i, "noise": rng.normal(size=3)}


# %%
for name, fn in (("the clock", with_clock), ("one generator for all", with_shared)):
    try:
        materialize(fn, range(50), f"out/{fn.__name__}", workers=workers, progress=False)
        print(f"{name}: taken")
    except DatamatError as error:
        assert "rng" in str(error) or "same" in str(error), error
        print(f"{name}: refused")

# %%
materialize(with_rng, range(50), "out/with_rng", workers=workers)
found = list(load("out/with_rng"))
print(f"rng: {len(found)} records, {len({sample['noise'].tobytes() for sample in found})} distinct")
