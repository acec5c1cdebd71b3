"""What a run did, and how its user sees it while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

__all__ = ["Progress", "RunReport", "progress_bar"]


@dataclasses.dataclass(frozen=True, slots=True)
class RunReport:
    """What a run did. `str` of it is the summary.

    Attributes:
        output: the directory.
        is_complete: whether every shard of the plan is finished and the manifest written; False where `include` or
            `exclude` left some out.
        num_rows, num_records, num_bytes: in what is finished. Of a run that was stopped, in finished parts, too.
        num_shards_written, num_shards_reused: shards made by this run, and left as they were.
        num_parts_written, num_parts_resumed: parts made by this run, and taken over from an interrupted one.
        elapsed_s: wall time of the run.
        busy_s: processor time that workers spent on parts, added up.
        num_workers: worker processes; 0 where there was nothing to do.
        start_method: of the workers, and why it was chosen.
        num_failed: rows among `num_rows` that gave no record, by this run and by earlier ones; the ledger says why.
        num_rows_planned: rows of the shards that this run was to make.
        stopped: "deadline" or "max_disk" where that ended the run before it was done, else "".
    """

    output: pathlib.Path
    is_complete: bool
    num_rows: int
    num_records: int
    num_bytes: int
    num_shards_written: int
    num_shards_reused: int
    num_parts_written: int
    num_parts_resumed: int
    elapsed_s: float
    busy_s: float
    num_workers: int
    start_method: str = ""
    num_failed: int = 0
    num_rows_planned: int = 0
    stopped: str = ""

    @property
    def did_nothing(self) -> bool:
        """Whether everything was there already."""
        return not self.stopped and self.num_shards_written == 0 and self.num_parts_written == 0

    @property
    def speedup(self) -> float:
        """How much faster than one core doing the same work and nothing else: busy time / elapsed time."""
        return self.busy_s / self.elapsed_s if self.elapsed_s else 0.0

    def __str__(self) -> str:
        size = f"{self.num_records:,} records, {self.num_bytes / 1e6:,.1f} MB"
        if self.num_failed:
            size += (
                f"; {self.num_failed:,} rows failed (.datamat/ledger.jsonl says why, rerun_failed() tries them again)"
            )
        if self.did_nothing:
            return f"{self.output}: nothing to do, {size} are there and up to date ({self.elapsed_s:.2f} s)"
        state = "complete" if self.is_complete else "finished as far as include/exclude say"
        if self.stopped:
            share = self.num_rows / max(self.num_rows_planned, 1)
            state = (
                f"stopped by its {self.stopped} with {self.num_rows:,} of {self.num_rows_planned:,} rows done "
                f"({share:.0%}), run() again goes on from there"
            )
        resumed = f", {self.num_parts_resumed} parts resumed" if self.num_parts_resumed else ""
        reused = f", {self.num_shards_reused} shards reused" if self.num_shards_reused else ""
        return (
            f"{self.output}: {state}: {size} in {self.elapsed_s:.2f} s with {self.num_workers} workers "
            f"({self.speedup:.2f}x one core){resumed}{reused}"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>"


class Progress:
    """A bar over records, in the terminal or the notebook; silent where it is not wanted.

    Args:
        bar: a tqdm bar, or None.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._num_bytes = 0

    def add(self, num_records: int, num_bytes: int, *, resumed: bool = False) -> None:
        """Count records that are done; resumed ones don't count as speed."""
        if self._bar is None:
            return
        if resumed:
            self._bar.initial += num_records
        else:
            self._num_bytes += num_bytes
            elapsed = self._bar.format_dict["elapsed"] or 1e-9
            self._bar.set_postfix_str(f"{self._num_bytes / 1e6 / elapsed:.1f} MB/s", refresh=False)
        self._bar.update(num_records)


@contextlib.contextmanager
def progress_bar(name: str, num_records: int, *, show: bool) -> Iterator[Progress]:
    """Show a bar for the block.

    Args:
        name: shown before the bar.
        num_records: the whole.
        show: whether there is a bar at all.
    """
    if not show:
        yield Progress(None)
        return
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm warns in a notebook without ipywidgets, and shows a text bar there
        from tqdm.auto import tqdm
    with tqdm(total=num_records, desc=name, unit=" samples", unit_scale=True, file=sys.stderr) as bar:
        yield Progress(bar)
