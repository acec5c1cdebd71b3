"""A module of constants that argparse sets before the run: workers use what was set, not what stands in the file.

Prints: values (0, 99000), scales {0.5}, names {3}
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import argparse

import config as cfg
import pipeline

from datamat import WorkerOptions, load, materialize

parser = argparse.ArgumentParser()
parser.add_argument("--k", type=int, default=cfg.K)
parser.add_argument("--scale", type=float, default=1.0)
args = parser.parse_args(["--k", "1000", "--scale", "0.5"])
cfg.K = args.k
cfg.options["scale"] = args.scale
cfg.NAMES = ["a", "b", "c"]

# %%
workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
materialize(pipeline.make, range(100), "out", workers=workers)

# %%
plain = sorted((one["value"], one["scaled"], one["names"]) for one in map(pipeline.make, range(100)))
found = sorted((s["value"].item(), s["scaled"].item(), s["names"].item()) for s in load("out"))
assert found == plain, (found[:3], plain[:3])
values, scaled, names = zip(*found)
scales = {s / v * 1000 for v, s in zip(values, scaled) if v}
print(f"values {min(values), max(values)}, scales {scales}, names {set(names)}")
