"""Rows of numbers, text and tokens that tests write, and what they look for in them."""

from __future__ import annotations

import numpy as np
from prepared import Prepared

from datamat import (
    DatasetWriter,
    Features,
    IndexRow,
    ListOf,
    Materializer,
    Scalar,
    ShardOptions,
    Tensor,
    Text,
    Tokens,
    load,
)
from datamat.testing import InlineExecutor


class Rows(DatasetWriter):
    """Numbers and text; the index knows the weather, which samples do not."""

    name = "rows"
    features = Features(
        {"number": Scalar("int64"), "word": Text(), "tokens": Tensor((None,), "int32"), "pair": Tensor((2,), "float32")}
    )

    def __init__(self, first, count):
        self.first, self.count = first, count

    def index(self, source):
        return [
            IndexRow(f"k{number}", fields={"number": -number, "weather": ("sun", "rain", "snow")[number % 3]})
            for number in range(self.first, self.first + self.count)
        ]

    def read(self, row):
        number = int(row.key[1:])
        tokens = np.arange(number, number + number % 5, dtype=np.int32)
        return {"number": number, "word": f"w{number % 7}", "tokens": tokens, "pair": np.full(2, number, np.float32)}


def written(folder, first, count, shards, format_name="tfrecord", **options):
    """Return a dataset of rows."""
    options = {
        "format": format_name,
        "shards": ShardOptions(num_shards=shards),
        "executor": InlineExecutor(),
        **options,
    }
    Prepared(Rows(first, count), None, folder, **options).run(progress=False)
    return load(folder)


def numbers_of(data):
    """Return the numbers of the samples, in order."""
    return [int(sample["number"]) for sample in data]


def batched(batches):
    """Return the numbers of all batches, in order."""
    return [int(number) for batch in batches for number in batch["number"]]


class NestedRows(DatasetWriter):
    """Tokens beside all others, the same in a dict, and in a list of dicts."""

    name = "nested"
    features = Features(
        {
            "tokens": Tokens(),
            "of": Features({"tokens": Tokens(), "number": Scalar("int64")}),
            "words": ListOf({"token": Scalar("int32"), "half": Scalar("float32")}),
        }
    )

    def index(self, source):
        return [IndexRow(f"k{number}") for number in range(24)]

    def read(self, row):
        number = int(row.key[1:])
        tokens = np.arange(number, number + number % 5, dtype=np.int32)
        words = [{"token": token, "half": np.float32(token) / 2} for token in tokens]
        return {"tokens": tokens, "of": {"tokens": tokens, "number": number}, "words": words}


def nested_rows(folder):
    """Return a dataset of `NestedRows`."""
    Materializer(NestedRows(), None, folder).run(executor=InlineExecutor(), progress=False)
    return load(folder)
