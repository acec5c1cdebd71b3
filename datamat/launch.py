"""From the call of `run` to its report: the lock, the ledger, the rows and the plan, and who does the work.

Materializer.run ──> Launch.run: lock ── ledger ── rows ── plan ──> Run, fed by Dispatch ──> report
workers: Materializer.write_part
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from datamat.dispatch import Dispatch, own_executor
from datamat.errors import OptionError, OutputError
from datamat.estimate import Estimate
from datamat.ledger import LEDGER_FILE, recorded
from datamat.limits import DiskLimit, ErrorLimit, free_bytes
from datamat.parallel import physical_cores
from datamat.pilot import choose_samples
from datamat.retry import KeptFinder
from datamat.running import Run
from datamat.snapshot import write_snapshot
from datamat.storage import disk_errors_told, empty_folder, locked, refuse_links
from datamat.survey import WORK, open_survey

if TYPE_CHECKING:
    import logging
    import pathlib
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from datamat.kept import KeptRows
    from datamat.ledger import FailedRow, Ledger
    from datamat.limits import Deadline
    from datamat.options import ErrorPolicy, WorkerOptions
    from datamat.pilot import Pilot, SplitSample
    from datamat.plan import PartSpec
    from datamat.receipts import Receipt
    from datamat.recipe import Recipe
    from datamat.report import RunReport

__all__ = ["Launch", "work_folder"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a call of `run` or `estimate` goes by; the arguments are those of `Materializer`, resolved."""

    recipe: Recipe
    output: pathlib.Path
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    workers: WorkerOptions
    executor: Executor | None
    errors: ErrorPolicy
    logger: logging.Logger

    def run(
        self,
        write_part: Callable[[PartSpec, Sequence[FailedRow] | None, KeptRows | None], Receipt],
        placed: Callable[[pathlib.Path], contextlib.AbstractContextManager[None]],
        *,
        deadline: Deadline,
        max_disk: int | None,
        show: bool,
        retry_failed: bool,
    ) -> RunReport:
        """Do a run.

        Args:
            write_part: the bound method that is dispatched.
            placed: while its block lasts, `write_part` knows the folder of the rows that it is given.
            deadline: when to stop.
            max_disk: how much may lie below the output, in bytes; None for any number.
            show: whether to show a bar and a summary.
            retry_failed: whether rows that failed in earlier runs are tried again.
        """
        started = time.perf_counter()
        work = work_folder(self.output)
        with (
            disk_errors_told(self.output),
            locked(work / "lock"),
            recorded(work / LEDGER_FILE, **self._told()) as ledger,
        ):
            run, dispatch = self._prepared(write_part, work, ledger, deadline, max_disk, retry_failed=retry_failed)
            with placed(work / "rows"):
                report = run.execute(dispatch, started=started, show=show)
        self.logger.info("%s", report)
        return report

    def estimate(self, run_pilot: Callable[[pathlib.Path, Sequence[SplitSample]], Pilot], num_samples: int) -> Estimate:
        """Measure a few rows in a worker; warn where the disk will not do.

        Args:
            run_pilot: the bound method that measures: folder of the rows, samples -> what they cost.
            num_samples: rows to do; each split has one at least.
        """
        if num_samples < 1:
            raise OptionError(f"estimate: num_samples is {num_samples!r}; want 1 or more")
        begun = time.perf_counter()
        with open_survey(self.recipe, self.output) as survey, contextlib.ExitStack() as stack:
            samples = choose_samples(survey.plan.select(self.include, self.exclude), num_samples)
            executor = self.executor or stack.enter_context(own_executor(self.workers, 1, self.logger))
            pilot = executor.submit(run_pilot, survey.store.folder, samples).result()
            start_s = time.perf_counter() - begun - pilot.elapsed_s
        estimate = Estimate.of(
            pilot, samples, num_workers=self._num_workers(), start_s=start_s, free_bytes=free_bytes(self.output)
        )
        if not estimate.fits:
            warnings.warn(
                f"{self.output} will need about {estimate.needed_bytes / 1e6:,.1f} MB, and its disk has "
                f"{estimate.free_bytes / 1e6:,.1f} MB free; make room, or give an output on another disk",
                stacklevel=3,
            )
        return estimate

    def _prepared(
        self,
        write_part: Callable[[PartSpec, Sequence[FailedRow] | None, KeptRows | None], Receipt],
        work: pathlib.Path,
        ledger: Ledger,
        deadline: Deadline,
        max_disk: int | None,
        *,
        retry_failed: bool,
    ) -> tuple[Run, Dispatch]:
        """Write rows and plan, and return what does the run and what has the parts done."""
        recipe = self.recipe
        empty_folder(work / "rows")
        store = recipe.write_rows(work / "rows")
        ingredients = recipe.ingredients()
        plan = recipe.plan(store, ingredients)
        write_snapshot(work / "rows", plan)
        for uneven in plan.uneven().values():
            self.logger.warning("%s", uneven)
        chosen = plan.select(self.include, self.exclude)
        retry = KeptFinder(self.output, work, store, recipe.formats[0], ingredients.to_json())
        run = Run(
            self.output,
            work,
            store,
            plan,
            chosen,
            recipe.formats,
            describe=functools.partial(recipe.manifest, plan, ingredients),
            ledger=ledger,
            limit=ErrorLimit(self.errors, sum(shard.num_rows for shard in chosen)),
            logger=self.logger,
            retry=retry if retry_failed else None,
        )
        dispatch = Dispatch(
            write_part,
            executor=self.executor,
            num_workers=self._num_workers(),
            workers=self.workers,
            errors=self.errors,
            store=store,
            work=work,
            ledger=ledger,
            deadline=deadline,
            disk=DiskLimit(self.output, max_disk, num_formats=len(recipe.formats)),
            logger=self.logger,
        )
        return run, dispatch

    def _told(self) -> dict[str, Any]:
        """Return what the ledger tells of the start of a run: nothing that may be secret."""
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "python": sys.version.partition(" ")[0],
            "writer": self.recipe.writer_name,
            "formats": [made.name for made in self.recipe.formats],
            "seed": self.recipe.seed,
            "copies": self.recipe.copies,
            "include": self.include,
            "exclude": self.exclude,
            "shards": dataclasses.asdict(self.recipe.shards),
            "workers": dataclasses.asdict(self.workers),
            "errors": dataclasses.asdict(self.errors),
        }

    def _num_workers(self) -> int:
        return self.workers.num_workers or len(physical_cores())


def work_folder(output: pathlib.Path) -> pathlib.Path:
    """Return the `.datamat` folder of an output, made if missing.

    Raises:
        OutputError: it cannot be made, or a link stands where datamat writes.
    """
    work = output / WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"output {output} cannot be made: {error}; give a folder that can be written") from error
    refuse_links(work)
    refuse_links(output / "index")
    return work
