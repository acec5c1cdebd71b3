"""A notebook that is given little time: a run whose deadline has passed, then one without.

Prints: deadline: 0 of 40 / complete: 40 of 40
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import numpy as np

from datamat import DatasetWriter, Features, IndexRow, Materializer, Tensor, WorkerOptions, load


class Slices(DatasetWriter):
    name = "slices"
    features = Features({"slice": Tensor((8, 8), "uint16")})

    def index(self, source):
        return [IndexRow(f"slice{i}", fields={"i": i}) for i in range(source)]

    def read(self, row):
        return {"slice": np.full((8, 8), row.fields["i"], np.uint16)}


job = Materializer(Slices, 40, "out")
workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)


# %%
import os

if not os.path.exists("out"):
    report = job.run(deadline=1e-6, workers=workers)
    assert not report.is_complete
    assert report.stopped == "deadline"
    try:
        report.raise_if_incomplete()
    except Exception as error:
        assert "deadline" in str(error), error
    else:
        raise AssertionError("a report that is not complete has to say so")
print("deadline: 0 of 40")

# %%
report = job.run(workers=workers)
report.raise_if_incomplete()
assert sorted(int(sample["slice"][0, 0]) for sample in load("out")) == list(range(40))
print(f"complete: {report.num_rows} of {len(load('out'))}")
