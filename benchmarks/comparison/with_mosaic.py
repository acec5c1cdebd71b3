"""MosaicML streaming: a pool by hand, a writer for each process, then one merged index, as in its guide."""

import multiprocessing
import os
import sys

from streaming import MDSWriter
from streaming.base.util import merge_index
from task import files, sample

source, output, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
COLUMNS = {"image": "bytes", "label": "int"}


def convert(job):
    number, paths = job
    with MDSWriter(out=os.path.join(output, str(number)), columns=COLUMNS, size_limit="1mb") as writer:
        for path in paths:
            writer.write(sample(path))


paths = files(source)
with multiprocessing.Pool(workers) as pool:
    pool.map(convert, [(number, paths[number::workers]) for number in range(workers)])
merge_index(output, keep_local=True)
