"""The small job that the faults are caused to: `python job.py '{"source": ..., "output": ...}'`; see `Job`.

Where FAULT_GATE names a folder, the row `GATED_KEY` says through the FIFO `reached` that its turn has come, and waits
until something is written to the FIFO `go`: a test acts in between, and no test has to sleep.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import sys

import sets

from datamat import Materializer, ShardOptions, WorkerOptions

HERE = pathlib.Path(__file__).parent


GATED_KEY = "train003"


class Gated(sets.Pairs):
    """Image and mask; one row waits where it is told to."""

    def read(self, row):
        gate = os.environ.get("FAULT_GATE")
        if gate and row.key == GATED_KEY:
            with open(f"{gate}/reached", "w") as reached:
                reached.write(str(os.getpid()))
            with open(f"{gate}/go") as go:
                go.read()
        return super().read(row)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One run of a `Materializer`, as values that fit into a command line.

    Attributes:
        source, output: paths.
        num_workers, start_method: of `WorkerOptions`.
        format_name: of the shards.
        seed: of the draws: another one makes other records under the same names.
        deed: "run" or "repair".
    """

    source: str
    output: str
    num_workers: int = 2
    start_method: str = "fork"
    format_name: str = "tfrecord"
    seed: int = 0
    deed: str = "run"

    def run(self) -> None:
        """Run the job in this process."""
        job = Materializer(
            Gated(),
            self.source,
            self.output,
            format=self.format_name,
            copies={"train": 2},
            seed=self.seed,
            transform=sets.jitter,
            shards=ShardOptions(num_shards=2),
            workers=WorkerOptions(num_workers=self.num_workers, start_method=self.start_method),
        )
        getattr(job, self.deed)(progress=False)

    def command(self) -> list[str]:
        """Return the command that runs the job in a process of its own."""
        # Imported rather than run: the manifest names the writer's module, which is to be the same everywhere.
        code = f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]; import job; job.main(sys.argv[1])"
        return [sys.executable, "-c", code, json.dumps(dataclasses.asdict(self))]


def main(options: str) -> None:
    """Run the job that the options in JSON describe."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background
    Job(**json.loads(options)).run()
