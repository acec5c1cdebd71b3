"""A label map beside the pictures, opened in `read` and declared: editing it makes the data again.

Prints: 20 labels: animal / 20 labels: beast
Says: will be rebuilt: .*changed
Again: edits its input.
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import json
import os

from datamat import DatasetWriter, Features, IndexRow, Materializer, Text, WorkerOptions, load

os.makedirs("raw", exist_ok=True)
LABELS = "raw/labels.json"


def save_labels(word):
    with open(LABELS, "w") as file:
        json.dump({str(i): f"{word} {i}" for i in range(20)}, file)
    os.utime(LABELS, (1_700_000_000, 1_700_000_000))


class Labelled(DatasetWriter):
    name = "labelled"
    features = Features({"label": Text()})
    files = ["labels.json"]  # below the source

    def index(self, source):
        return [IndexRow(f"{i:02d}", fields={"number": i}) for i in range(20)]

    def read(self, row):
        with open(LABELS) as file:
            return {"label": json.load(file)[str(row.fields["number"])]}


# %%
for word in ("animal", "beast"):
    save_labels(word)
    workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
    Materializer(Labelled, "raw", "out").run(workers=workers)
    stored = sorted(sample["label"] for sample in load("out"))
    assert stored == sorted(json.load(open(LABELS)).values())
    print(f"{len(stored)} labels: {stored[0].split()[0]}")
