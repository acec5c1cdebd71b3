"""Executors that a program has anyway: threads and processes of concurrent.futures, and datamat's own.

Prints: threads 40, processes 40, own 40: the same bytes
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import concurrent.futures
import hashlib
import math
import multiprocessing
import pathlib

import numpy as np

from datamat import PathosExecutor, load, materialize


def fn(i):
    return {"i": i, "root": math.sqrt(i), "noise": np.random.rand(4)}


def digests(folder):
    return [hashlib.md5(path.read_bytes()).hexdigest() for path in sorted(pathlib.Path(folder).glob("*.tfrecord"))]


# %%
with concurrent.futures.ThreadPoolExecutor(1) as threads:
    materialize(fn, range(40), "out/threads", executor=threads)

# %%
context = multiprocessing.get_context("fork")
with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as processes:
    materialize(fn, range(40), "out/processes", executor=processes)

# %%
with PathosExecutor(NUM_WORKERS, start_method=START_METHOD) as own:
    materialize(fn, range(40), "out/own", executor=own)

# %%
made = {name: digests(f"out/{name}") for name in ("threads", "processes", "own")}
for name in made:
    assert sorted(float(sample["root"]) for sample in load(f"out/{name}")) == [fn(i)["root"] for i in range(40)]
same = made["threads"] == made["processes"] == made["own"]
counts = ", ".join(f"{name} {len(load(f'out/{name}'))}" for name in made)
print(f"{counts}: {'the same bytes' if same else 'other bytes'}")
