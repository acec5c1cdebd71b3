"""A builder as TFDS has it, `_generate_examples` and all, made into a writer by somebody who knows that best.

Prints: my_dataset: {'test': 10, 'train': 30} / 40 as generated
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import os
import pathlib

import numpy as np

from datamat import DatasetWriter, Features, IndexRow, Materializer, Scalar, Tensor, Text, WorkerOptions, load


class MyDataset(DatasetWriter):
    """The split generators say where the examples are."""

    VERSION = "1.0.0"
    name = "my_dataset"

    @property
    def features(self):
        return Features({"signal": Tensor((None,), "float32"), "mean": Scalar("float32"), "speaker": Text()})

    def _split_generators(self, folder):
        return {"train": folder / "train", "test": folder / "test"}

    def _generate_examples(self, path):
        for file in sorted(path.glob("*.npy")):
            yield file.stem, {"file": str(file), "speaker": file.stem.split("_")[0]}

    def index(self, source):
        for split, path in self._split_generators(pathlib.Path(source)).items():
            for key, example in self._generate_examples(path):
                yield IndexRow(f"{split}_{key}", split, {**example, "file": os.path.relpath(example["file"], source)})

    def read(self, row):
        signal = np.load(row.fields["file"])
        return {"signal": signal, "mean": signal.mean(), "speaker": row.fields["speaker"]}


# %%
raw = pathlib.Path("raw")
if not raw.exists():
    for split, count in (("train", 30), ("test", 10)):
        (raw / split).mkdir(parents=True)
        for i in range(count):
            values = np.random.default_rng([i, count]).normal(size=10 + i).astype(np.float32)
            np.save(raw / split / f"{'ann' if i % 3 else 'bob'}_{i:03d}.npy", values)

# %%
workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
Materializer(MyDataset(), "raw", "out/my_dataset/1.0.0").run(workers=workers)

# %%
builder = MyDataset()
counts, same = {}, 0
for split, path in builder._split_generators(raw).items():
    data = load("out/my_dataset/1.0.0", split)
    counts[split] = len(data)
    for key, example in builder._generate_examples(path):
        sample, values = data[f"{split}_{key}"], np.load(example["file"])
        same += np.array_equal(sample["signal"], values) and sample["mean"] == values.mean()
print(f"{builder.name}: {dict(sorted(counts.items()))}")
print(f"{same} as generated")
