"""A job that kills itself: workers import this module, and not pytest with it."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import sets

from datamat import Materializer, ShardOptions, WorkerOptions

COPIES = 3


class Deadly(sets.Pairs):
    """Image and mask; where DEADLY_TALLY names a file, the DEADLY_AT-th read of all workers kills all processes."""

    def read(self, row):
        tally = os.environ.get("DEADLY_TALLY")
        if tally:
            with open(tally, "ab") as file:
                file.write(b".")
                file.flush()
                if os.fstat(file.fileno()).st_size == int(os.environ["DEADLY_AT"]):
                    os.killpg(0, signal.SIGKILL)
        return super().read(row)


def run_until_killed(source, output, shard_format, *, at):
    """Run the job with two workers in a process of its own, which is killed with all others at the n-th read."""
    here = pathlib.Path(__file__).parent
    arguments = (str(source), str(output), shard_format, 2)
    code = f"import sys; sys.path.insert(0, {str(here)!r}); import deadly; deadly.job(*{arguments}).run()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DEADLY_TALLY": f"{output}.tally{at}", "DEADLY_AT": str(at)},
        start_new_session=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def job(source, output, shard_format, num_workers=1):
    """Return the job: one shard per split, so that its parts are all that workers can share."""
    return Materializer(
        Deadly(),
        source,
        output,
        format=shard_format,
        copies={"train": COPIES},
        transform=sets.jitter,
        shards=ShardOptions(num_shards=1),
        workers=WorkerOptions(num_workers=num_workers),
    )
