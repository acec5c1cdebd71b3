"""Hugging Face datasets: `map` over a table of paths, then `save_to_disk`; spawned workers, so a guard."""

import sys

import datasets
from task import files, sample


def paths(source):
    for path in files(source):
        yield {"path": path}


def convert(row):
    return sample(row["path"])


if __name__ == "__main__":
    source, output, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    table = datasets.Dataset.from_generator(paths, gen_kwargs={"source": source})
    made = table.map(convert, num_proc=workers, remove_columns="path")
    made = made.cast_column("image", datasets.Image())
    made.save_to_disk(output, num_proc=workers)
