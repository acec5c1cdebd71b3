"""A project with a package: a subclass of a base class in one module, relative imports, a dataclass as settings.

Prints: 45 records of 15 rows, all as the loop has them
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import numpy as np

from datamat import Materializer, WorkerOptions, load
from project.audio import Beeps
from project.base import Settings

settings = Settings(rate=800, seconds=0.05)
workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
writer = Beeps(settings)
Materializer(writer, 15, "out", format="tfrecord.gz", copies=3).run(workers=workers)

# %%
data = load("out")
for sample in data:
    number = int(sample["key"].split("#")[0].removeprefix("beep"))
    clean = writer.tone(number)
    assert sample["signal"].shape == clean.shape
    assert 0 < np.abs(sample["signal"] - clean).max() < 1
assert len({sample["signal"].tobytes() for sample in data}) == 45
print(f"{len(data)} records of {len(data) // 3} rows, all as the loop has them")
