"""The job that tests of engines run: a program of its own, because engines import what they are sent by name.

python engine_job.py OUTPUT ENGINE FLAGS        FLAGS: the folder of the file that one row waits for
"""

import contextvars
import hashlib
import logging
import pathlib
import sys
import time

import numpy as np
import psutil

from datamat import DatasetWriter, Features, IndexRow, Scalar, ShardOptions, Tensor

NUM_ROWS = 64
HELD = "0037"  # the key of the row that waits
log = logging.getLogger("engine_job")
FACTOR = contextvars.ContextVar("FACTOR", default=1)


class Numbers(DatasetWriter):
    """Rows of random numbers; one of them may wait for a file."""

    name = "numbers"
    features = Features({"n": Scalar("int64"), "drawn": Tensor((50,), "float64")})

    def __init__(self, flags=None):
        self.flags = flags

    def index(self, source):
        return [IndexRow(f"{n:04d}", fields={"n": n}) for n in range(NUM_ROWS)]

    def read(self, row):
        log.info("reading %s", row.key)
        if self.flags and row.key == HELD:
            wait_in(pathlib.Path(self.flags))
        return {"n": row.fields["n"], "drawn": np.random.rand(50)}


def wait_in(folder):
    """Say for which worker of an engine this is, and stay until it is told to go on."""
    if (folder / "go").exists():
        return
    worker = psutil.Process().parents()[1]  # of the server that has forked this process
    (folder / f"at-{worker.pid}").touch()
    until = time.monotonic() + 100
    while not (folder / "go").exists() and time.monotonic() < until:
        time.sleep(0.02)


def jitter(sample, rng):
    return {**sample, "drawn": sample["drawn"] + rng.random(50)}


def job(output, flags=None, **options):
    """Return the job: three shards of several parts."""
    if flags:  # they decide no byte
        options["version"] = "1"
    shards = ShardOptions(num_shards=3)
    sys.path.append(str(pathlib.Path(__file__).parents[1]))  # workers, who import this module, have no `prepared`
    from prepared import Prepared

    return Prepared(Numbers(flags), None, output, shards=shards, copies=2, transform=jitter, **options)


def share(index, scratch):
    """Make what one of two tasks can take, in a folder that it shares with nobody."""
    place = {"scratch": f"{scratch}/{index}", "task_index": index, "num_tasks": 2}
    return job("s3://bucket/out", **place).run(progress=False).num_shards_written


def digests(output):
    """Return the digest of each finished file."""
    files = sorted(path for path in pathlib.Path(output).iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    import engine_job  # its classes go by name, and not as those of `__main__`

    print(engine_job.job(sys.argv[1], sys.argv[3], executor=sys.argv[2]).run(progress=False).num_parts_resumed)
