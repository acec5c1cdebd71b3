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
from typing import TYPE_CHECKING

import small_pairs
from prepared import Prepared

from datamat import ShardOptions, WorkerOptions, load

if TYPE_CHECKING:
    from concurrent.futures import Executor

HERE = pathlib.Path(__file__).parent


GATED_KEY = "train003"


class Gated(small_pairs.Pairs):
    """Image and mask; one row waits where a test tells it to."""

    def read(self, row):
        gate = _value_from_test("FAULT_GATE")
        if gate and row.key == GATED_KEY:
            with open(f"{gate}/reached", "w") as reached:
                reached.write(str(os.getpid()))
            with open(f"{gate}/go") as go:
                go.read()
        return super().read(row)


def _value_from_test(variable: str) -> str | None:
    """Return a value that a test has set; by a computed name, so that it is no part of the fingerprint."""
    return os.environ.get(variable)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One run of a `Materializer`, as values that fit into a command line.

    Attributes:
        source, output: paths.
        num_workers, start_method: of `WorkerOptions`.
        format_name: format of the shards; several are separated by commas.
        num_shards: of each split.
        seed: seed of the draws: another one makes other records under the same names.
        deed: "run" or "repair"; or "drop", which removes rows of the finished output.
        errors: policy for bad samples.
    """

    source: str
    output: str
    num_workers: int = 2
    start_method: str = "fork"
    format_name: str = "tfrecord"
    num_shards: int = 2
    seed: int = 0
    deed: str = "run"
    errors: str = "raise"

    def run(self, executor: Executor | None = None) -> None:
        """Run the job from this process, or with an executor other than datamat's own."""
        workers = None if executor else WorkerOptions(num_workers=self.num_workers, start_method=self.start_method)
        if self.deed == "drop":
            view = load(self.output).drop(["train003", "train001#1"])
            view.save(workers=workers, executor=executor, progress=False)
            return
        job = Prepared(
            Gated(),
            self.source,
            self.output,
            format=self.format_name.split(","),
            copies={"train": 2},
            seed=self.seed,
            transform=small_pairs.jitter,
            shards=ShardOptions(num_shards=self.num_shards),
            errors=self.errors,
            workers=workers,
            executor=executor,
        )
        getattr(job, self.deed)(progress=False)

    def command(self) -> list[str]:
        """Return the command that runs the job in a process of its own."""
        # Imported rather than run: the manifest names the writer's module, which must be the same everywhere.
        code = f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]; import job; job.main(sys.argv[1])"
        return [sys.executable, "-c", code, json.dumps(dataclasses.asdict(self))]


def main(options: str) -> None:
    """Run the job that the options in JSON describe."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes its background jobs ignore it
    Job(**json.loads(options)).run()
