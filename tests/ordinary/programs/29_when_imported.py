"""A module that writes its data while it is imported, and a run in a thread beside the main one.

Prints: imported 50, in a thread 50, squares equal
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import pathlib
import threading

from datamat import WorkerOptions, load, materialize

pathlib.Path("settings.py").write_text(f"START_METHOD, NUM_WORKERS = {START_METHOD!r}, {NUM_WORKERS!r}\n")

import prepare

# %%
results = {}


def work():
    workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
    results["report"] = materialize(prepare.square, range(50), "out/thread", workers=workers)


thread = threading.Thread(target=work)
thread.start()
thread.join()

# %%
for folder in ("out/imported", "out/thread"):
    assert sorted(int(sample["square"]) for sample in load(folder)) == [n**2 for n in range(50)]
print(f"imported {prepare.DONE[0]}, in a thread {results['report'].num_records}, squares equal")
