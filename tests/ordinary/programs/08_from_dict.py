"""Hugging Face's first page: a dict of columns, a class label, train and test, a map that augments the training set.

Prints: train 78 of 78 distinct, test 10, labels ['neg', 'pos']
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import random

from datamat import ClassLabel, Features, Scalar, Text, WorkerOptions, load, materialize

columns = {
    "text": [f"review {i}: {'very ' * (i % 4)}{'good' if i % 2 else 'bad'}" for i in range(36)],
    "label": ["pos" if i % 2 else "neg" for i in range(36)],
    "stars": [i % 5 + i / 100 for i in range(36)],
}


def example(i):
    return {name: column[i] for name, column in columns.items()}


def shuffle_words(sample, rng):
    words = sample["text"].split()
    random.shuffle(words)
    return {**sample, "text": " ".join(words), "stars": sample["stars"] + rng.normal()}


# %%
options = {
    "features": Features({"text": Text(), "label": ClassLabel(names=("neg", "pos")), "stars": Scalar("float64")}),
    "splits": {"train": 0.67, "test": 0.33},
    "copies": {"train": 3},
    "transform": shuffle_words,
    "seed": 42,
    "workers": WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS),
}
materialize(example, range(36), "out/reviews", format="parquet", **options)

# %%
train, test = load("out/reviews", "train"), load("out/reviews", "test")
names = train.features["label"].names
assert len(train) == 3 * (36 - len(test))
by_text = dict(zip(columns["text"], zip(columns["label"], columns["stars"])))
for sample in test:
    assert by_text[sample["text"]] == (names[sample["label"]], sample["stars"])
words = sorted(sorted(text.split()) for text in columns["text"])
assert all(sorted(sample["text"].split()) in words for sample in train)
distinct = len({(sample["text"], float(sample["stars"])) for sample in train})
print(f"train {distinct} of {len(train)} distinct, test {len(test)}, labels {list(names)}")
