"""A pandas data frame as the source, an Arrow table as another: their rows are the samples.

Prints: frame 25 rows, key str, count int64, text str, value float64 / table 25 rows, 25 equal
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import pandas as pd
import pyarrow as pa

from datamat import Materializer, WorkerOptions, load, materialize

frame = pd.DataFrame({"text": [f"row {i}" for i in range(25)], "value": [i / 4 for i in range(25)], "count": range(25)})

# %%
workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
Materializer("table", frame, "out/frame").run(workers=workers)
materialize(lambda row: dict(row, value=row["value"] * 2), pa.Table.from_pandas(frame), "out/table", workers=workers)

# %%
data = load("out/frame")
for sample, row in zip(sorted(data, key=lambda one: one["count"]), frame.itertuples(), strict=True):
    assert (sample["text"], sample["value"], sample["count"]) == (row.text, row.value, row[3])
print(f"frame {len(data)} rows, {', '.join(f'{k} {type(v).__name__}' for k, v in data[0].items())}")
equal = sum(sample["value"] == 2 * frame["value"][sample["count"]] for sample in load("out/table"))
print(f"table {len(load('out/table'))} rows, {equal} equal")
