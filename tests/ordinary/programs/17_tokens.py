"""litdata's example for language models: texts to token ids of any length, some of them empty.

Prints: 300 documents, 7350 tokens, longest 49, 6 empty
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import re

import numpy as np

from datamat import Features, ShardOptions, Tensor, WorkerOptions, load, materialize


class Tokenizer:
    def __init__(self, texts):
        words = sorted({word for text in texts for word in re.findall(r"\w+", text)})
        self.ids = {word: number for number, word in enumerate(words)}

    def encode(self, text):
        return np.array([self.ids[word] for word in re.findall(r"\w+", text)], dtype=np.int32)


texts = [" ".join(f"w{(i * j) % 97}" for j in range(i % 50)) for i in range(300)]
tokenizer = Tokenizer(texts)


def tokenize(text):
    return {"tokens": tokenizer.encode(text)}


# %%
materialize(
    tokenize,
    texts,
    "out",
    features=Features({"tokens": Tensor((None,), "int32")}),
    shards=ShardOptions(num_shards=2, shuffle=False),
    workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS),
)

# %%
found = sorted(tuple(sample["tokens"].tolist()) for sample in load("out"))
assert found == sorted(tuple(tokenizer.encode(text).tolist()) for text in texts)
lengths = [len(tokens) for tokens in found]
print(f"{len(found)} documents, {sum(lengths)} tokens, longest {max(lengths)}, {lengths.count(0)} empty")
