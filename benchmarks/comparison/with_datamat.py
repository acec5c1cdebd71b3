"""datamat: a function of the input."""

import sys

from task import files, sample

from datamat import WorkerOptions, materialize

source, output, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
materialize(sample, files(source), output, workers=WorkerOptions(num_workers=workers))
