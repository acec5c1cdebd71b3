"""WebDataset: a pool by hand, and a writer of shards for each process."""

import multiprocessing
import os
import sys

import webdataset
from task import files, sample

source, output, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])


def convert(job):
    number, paths = job
    with webdataset.ShardWriter(os.path.join(output, f"{number}-%05d.tar"), maxsize=1e6, verbose=0) as writer:
        for path in paths:
            made = sample(path)
            key = os.path.splitext(os.path.basename(path))[0]
            writer.write({"__key__": key, "jpg": made["image"], "cls": made["label"]})


os.makedirs(output, exist_ok=True)
paths = files(source)
with multiprocessing.Pool(workers) as pool:
    pool.map(convert, [(number, paths[number::workers]) for number in range(workers)])
