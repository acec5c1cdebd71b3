"""The small job that the faults are caused to: `python job.py '{"source": ..., "output": ...}'`; options are `Job`'s."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))  # `sets` lies there

import sets

from datamat import Materializer, ShardOptions, WorkerOptions


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One run of a `Materializer`, as values that fit into a command line.

    Attributes:
        source, output: paths.
        num_workers, start_method: of `WorkerOptions`.
        format_name: of the shards.
    """

    source: str
    output: str
    num_workers: int = 2
    start_method: str = "fork"
    format_name: str = "tfrecord"

    def run(self) -> None:
        """Run the job in this process."""
        Materializer(
            sets.Pairs(),
            self.source,
            self.output,
            format=self.format_name,
            copies={"train": 2},
            transform=sets.jitter,
            shards=ShardOptions(num_shards=2),
            workers=WorkerOptions(num_workers=self.num_workers, start_method=self.start_method),
        ).run(progress=False)

    def command(self) -> list[str]:
        """Return the command that runs the job in a process of its own."""
        return [sys.executable, __file__, json.dumps(dataclasses.asdict(self))]


if __name__ == "__main__":
    Job(**json.loads(sys.argv[1])).run()
