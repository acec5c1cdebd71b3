"""What a run will take, told from a few samples: time, bytes, memory, and which stage costs what."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING

from datamat.errors import SampleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from datamat.pilot import Pilot, SplitSample

__all__ = ["Estimate"]

_ROOM = 1.05  # index and offsets, and what stands on the disk twice for a moment


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What a run from nothing will take. `str` of it says so; in a notebook it is a table.

    Attributes:
        num_samples: rows that were measured.
        num_rows: rows of the run.
        num_workers: that will share the work.
        seconds: wall time of the run.
        num_bytes: of the finished shards.
        worker_bytes: memory of each worker at its highest, pages that it shares with others included.
        free_bytes: free space on the disk of the output.
        stages: seconds per row on one core, by stage: "read", "decode", "augment", "encode", "write", "other".
        failed: what was said of samples that failed; they are not counted in the rest.
    """

    num_samples: int
    num_rows: int
    num_workers: int
    seconds: float
    num_bytes: int
    worker_bytes: int
    free_bytes: int
    stages: Mapping[str, float]
    failed: tuple[str, ...]

    @classmethod
    def of(
        cls, pilot: Pilot, samples: Sequence[SplitSample], *, num_workers: int, start_s: float, free_bytes: int
    ) -> Estimate:
        """Return what the measurements of a pilot mean for all rows.

        Args:
            pilot: the measurements.
            samples: what was measured.
            num_workers: that will share the work.
            start_s: seconds before the first row is begun.
            free_bytes: free space on the disk of the output.

        Raises:
            SampleError: not one sample of a split could be read, so that nothing can be told.
        """
        busy_s = num_bytes = 0.0
        for sample in samples:
            if not pilot.rows.get(sample.split):
                raise SampleError(sample.split, f"each sample of this split failed: {pilot.failed[0]}")
            share = sample.num_rows / pilot.rows[sample.split]
            busy_s += pilot.seconds[sample.split] * share
            num_bytes += pilot.num_bytes[sample.split] * share
        num_measured = sum(pilot.rows.values())
        return cls(
            num_samples=num_measured,
            num_rows=sum(sample.num_rows for sample in samples),
            num_workers=num_workers,
            seconds=start_s + pilot.warm_up_s + busy_s / num_workers,
            num_bytes=round(num_bytes),
            worker_bytes=pilot.peak_bytes,
            free_bytes=free_bytes,
            stages={stage: seconds / num_measured for stage, seconds in pilot.stages.items()},
            failed=pilot.failed,
        )

    @property
    def needed_bytes(self) -> int:
        """Space on the disk that the run needs."""
        return round(self.num_bytes * _ROOM)

    @property
    def fits(self) -> bool:
        """Whether the free space on the disk will do."""
        return self.needed_bytes <= self.free_bytes

    def _lines(self) -> list[tuple[str, str]]:
        total = sum(self.stages.values()) or 1.0
        stages = sorted(self.stages.items(), key=lambda item: -item[1])
        free = f"{self.free_bytes / 1e6:,.1f} MB free" + ("" if self.fits else ": NOT ENOUGH")
        return [
            ("time", f"{self.seconds:,.1f} s with {self.num_workers} workers, for {self.num_rows:,} rows"),
            ("disk", f"{self.needed_bytes / 1e6:,.1f} MB, {free}"),
            ("memory", f"{self.worker_bytes / 1e6:,.0f} MB per worker"),
            *(
                (stage, f"{seconds * 1e3:,.3f} ms per row, {seconds / total:.0%} of the work")
                for stage, seconds in stages
            ),
            *([("failed", f"{len(self.failed)} samples: {self.failed[0]}")] if self.failed else []),
        ]

    def __str__(self) -> str:
        lines = [f"{name:>8}  {text}" for name, text in self._lines()]
        return "\n".join([f"Estimate from {self.num_samples} samples:", *lines])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in self._lines())
        return f"<table><caption>Estimate from {self.num_samples} samples</caption>{rows}</table>"
