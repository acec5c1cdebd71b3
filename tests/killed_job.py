"""A job that kills itself: workers import this module, and not pytest with it."""

import os
import pathlib
import signal
import subprocess
import sys

import small_pairs
from prepared import Prepared

from datamat import ShardOptions, WorkerOptions
from datamat.testing import InlineExecutor

COPIES = 3


class Deadly(small_pairs.Pairs):
    """Image and mask; where DEADLY_TALLY names a file, the DEADLY_AT-th read of all workers kills all processes."""

    def read(self, row):
        tally = _value_from_test("DEADLY_TALLY")
        if tally:
            with open(tally, "ab") as file:
                file.write(b".")
                file.flush()
                if os.fstat(file.fileno()).st_size >= int(_value_from_test("DEADLY_AT") or 0):  # two may write at once
                    os.killpg(0, signal.SIGKILL)
        return super().read(row)


def _value_from_test(variable):
    """Return a value that a test has set; by a computed name, so that it is no part of the fingerprint."""
    return os.environ.get(variable)


def run_until_killed(source, output, shard_format, *, at, call="run"):
    """Run or repair the job with two workers in a process of its own, killed with all others at the n-th read."""
    here = pathlib.Path(__file__).parent
    arguments = (str(source), str(output), shard_format, 2)
    code = f"import sys; sys.path.insert(0, {str(here)!r}); import killed_job; killed_job.job(*{arguments}).{call}()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DEADLY_TALLY": f"{output}.tally{at}", "DEADLY_AT": str(at)},
        start_new_session=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def job(source, output, shard_format, num_workers=1):
    """Return the job: one shard per split, so that workers can share nothing but its parts; one is this process."""
    workers = {"workers": WorkerOptions(num_workers=num_workers)} if num_workers > 1 else {"executor": InlineExecutor()}
    return Prepared(
        Deadly(),
        source,
        output,
        format=shard_format,
        copies={"train": COPIES},
        transform=small_pairs.jitter,
        shards=ShardOptions(num_shards=1),
        **workers,
    )
