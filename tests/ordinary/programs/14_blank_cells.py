"""A table that came out of a spreadsheet: blank cells, text with commas and line breaks, a column of labels.

Prints: 30 rows, 6 blank ages, labels {'cat': 10, 'dog': 20}
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import collections
import csv
import math
import os

from datamat import WorkerOptions, load, materialize

if not os.path.exists("raw"):
    os.mkdir("raw")
    with open("raw/pets.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["name", "age", "weight", "notes", "label"])
        for i in range(30):
            age = "" if i % 5 == 0 else i
            table.writerow([f"Pet №{i}", age, i / 3, f'likes "{i}",\nand naps', "dog" if i % 3 else "cat"])


def to_sample(row):
    return {
        "name": row["name"],
        "age": float(row["age"]) if row["age"] else math.nan,
        "weight": float(row["weight"]),
        "notes": row["notes"],
        "label": row["label"],
    }


# %%
with open("raw/pets.csv", newline="", encoding="utf-8") as file:
    rows = csv.DictReader(file)
    workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
    materialize(to_sample, rows, "out", format="parquet", workers=workers)

# %%
with open("raw/pets.csv", newline="", encoding="utf-8") as file:
    plain = [to_sample(row) for row in csv.DictReader(file)]
found = sorted(load("out"), key=lambda sample: int(sample["name"].split("№")[1]))
for one, sample in zip(plain, found, strict=True):
    for name, value in one.items():
        assert sample[name] == value or (math.isnan(sample[name]) and math.isnan(value)), (name, value, sample)
labels = collections.Counter(sample["label"] for sample in found)
print(
    f"{len(found)} rows, {sum(math.isnan(s['age']) for s in found)} blank ages, labels {dict(sorted(labels.items()))}"
)
