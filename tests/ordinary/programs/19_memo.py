"""A cache on `self` and `functools.cache`, filled by the run and by a loop before it: neither is a change.

Prints: 64 rows, squares up to 3969, 64 remembered
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import functools

from datamat import WorkerOptions, load, materialize


@functools.cache
def slow_square(n):
    return n * n


class Lookup:
    def __init__(self):
        self.cache = {}

    def fn(self, n):
        if n not in self.cache:
            self.cache[n] = slow_square(n)
        return {"n": n, "square": self.cache[n]}


# %%
lookup = Lookup()
workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
report = materialize(lookup.fn, range(64), "out", workers=workers)
plain = [lookup.fn(n) for n in range(64)]
again = materialize(lookup.fn, range(64), "out", workers=workers)
assert again.did_nothing, "a full cache is no change"

# %%
assert sorted(s["square"].item() for s in load("out")) == [one["square"] for one in plain]
print(f"{len(load('out'))} rows, squares up to {max(lookup.cache.values())}, {len(lookup.cache)} remembered")
