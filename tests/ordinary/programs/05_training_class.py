"""A class with a lock and a logger on `self` whose `fit` writes the data that it trains on, with its own method.

Prints: [fit] wrote 50 samples / loss 0.0
Says: drawing number 49
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import logging
import threading

import numpy as np

from datamat import WorkerOptions, load, materialize

logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("datamat").setLevel(logging.WARNING)


class Trainer:
    def __init__(self, num_features):
        self.logger = logging.getLogger("trainer")
        self.lock = threading.RLock()
        self.w = np.zeros(num_features)
        self.num_features = num_features

    def sample(self, number):
        with self.lock:
            if number % 50 == 49:
                self.logger.info("drawing number %d", number)
        x = np.linspace(0, number, self.num_features)
        return {"x": x, "y": float(x.sum())}

    def fit(self, count):
        options = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
        materialize(self.sample, range(count), "out", workers=options)
        data = load("out")
        print(f"[fit] wrote {len(data)} samples")
        x = np.stack([one["x"] for one in data])
        y = np.array([one["y"] for one in data])
        self.w = np.linalg.lstsq(x, y, rcond=None)[0]
        return float(np.abs(x @ self.w - y).max())


# %%
print("loss", round(Trainer(4).fit(50), 6))
