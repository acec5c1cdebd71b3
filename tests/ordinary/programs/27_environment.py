"""Settings in the environment, set by the program itself before the run.

Prints: 30 records, scale 3
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import os

from datamat import WorkerOptions, load, materialize

os.environ["ORDINARY_SCALE"] = "3"


def fn(i):
    return {"i": i, "scaled": i * int(os.environ.get("ORDINARY_SCALE", "1"))}


# %%
workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
materialize(fn, range(30), "out", workers=workers)
plain = [(fn(i)["i"], fn(i)["scaled"]) for i in range(30)]
found = sorted((int(sample["i"]), int(sample["scaled"])) for sample in load("out"))
assert found == plain
print(f"{len(found)} records, scale {found[-1][1] // found[-1][0]}")
