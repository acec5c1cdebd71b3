"""Somebody comes from pathos: a bound method mapped by the pool, and the same method written as data.

Prints: [0, 1, 4, 9] / 4 results, 80 records, equal
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import logging
import threading

from datamat import PathosExecutor, PathosPool, WorkerOptions, load, materialize


class Model:
    def __init__(self, power):
        self.power = power
        self.logger = logging.getLogger("model")
        self.lock = threading.RLock()
        self.history = []

    def predict(self, x):
        with self.lock:
            self.history.append(x)
            self.logger.debug("predicting %s", x)
            return x**self.power

    def as_sample(self, x):
        return {"x": x, "y": self.predict(x)}


model = Model(2)

# %%
with PathosPool(nodes=2) as pool:
    print(pool.map(model.predict, range(4)))
with PathosExecutor(NUM_WORKERS, start_method=START_METHOD) as pool:
    results = list(pool.starmap(model.predict, [(x,) for x in range(4)]))

# %%
workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
materialize(model.as_sample, range(80), "out", workers=workers)
found = {int(sample["x"]): int(sample["y"]) for sample in load("out")}
equal = found == {x: model.predict(x) for x in range(80)} and results == [found[x] for x in range(4)]
print(f"{len(results)} results, {len(found)} records, {'equal' if equal else 'other'}")
