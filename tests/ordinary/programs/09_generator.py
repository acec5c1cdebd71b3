"""`Dataset.from_generator`: the inputs are a generator, with tqdm around it, and the items are dicts.

Prints: 123 rows, sum 7503
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
from tqdm.auto import tqdm

from datamat import WorkerOptions, load, materialize


def gen():
    for i in range(123):
        yield {"id": i, "text": "word " * (i % 6), "values": [float(i)] * (i % 4)}


def encode(example):
    import numpy as np

    return {
        "id": example["id"],
        "length": len(example["text"].split()),
        "values": np.array(example["values"], np.float32),
    }


# %%
materialize(
    encode,
    (row for row in tqdm(gen(), total=123, desc="reading", unit="rows")),
    "out",
    workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS),
)

# %%
rows = {int(sample["id"]): sample for sample in load("out")}
for example in gen():
    plain = encode(example)
    found = rows.pop(plain["id"])
    assert found["length"] == plain["length"]
    assert found["values"].tolist() == plain["values"].tolist()
assert not rows
print(f"{len(load('out'))} rows, sum {sum(int(sample['id']) for sample in load('out'))}")
