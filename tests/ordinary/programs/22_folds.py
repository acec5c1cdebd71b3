"""Five folds for cross-validation: a split each, written one after the other with `include`.

Prints: fold0 20, fold1 20, fold2 20, fold3 20, fold4 20 / 100 in all, each once
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import numpy as np

from datamat import DatasetWriter, Features, IndexRow, Materializer, Scalar, ShardOptions, Tensor, WorkerOptions, load


class Folds(DatasetWriter):
    name = "folds"
    features = Features({"x": Tensor((4,), "float64"), "y": Scalar("int64")})

    def index(self, source):
        order = np.random.default_rng(0).permutation(100)
        for place, number in enumerate(order):
            yield IndexRow(f"{number:03d}", f"fold{place % 5}", {"number": int(number)})

    def read(self, row):
        number = row.fields["number"]
        return {"x": np.arange(4) / (number + 1), "y": number}


# %%
for fold in range(5):
    job = Materializer(
        Folds,
        None,
        "out",
        shards=ShardOptions(num_shards=2),
    )
    workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
    report = job.run(include=f"*fold{fold}*", workers=workers, progress=False)
    assert report.is_complete == (fold == 4) or report.did_nothing, report

# %%
seen = []
for fold in range(5):
    data = load("out", f"fold{fold}")
    seen += [int(sample["y"]) for sample in data]
    for sample in data:
        assert np.array_equal(sample["x"], np.arange(4) / (sample["y"] + 1))
print(", ".join(f"fold{fold} {len(load('out', f'fold{fold}'))}" for fold in range(5)))
print(f"{len(seen)} in all, {'each once' if sorted(seen) == list(range(100)) else 'not each once'}")
