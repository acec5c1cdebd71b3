"""One run, between the lock and the report: what is there already, what comes in, and how it is finished.

    manifest, entries, receipts of earlier runs ──> missing parts ──> dispatch ──> receipts ──> shards ──> manifest

The order of the last steps is what keeps a directory honest: shards are flushed and named, then the index files, and
the manifest last. Before a shard that a manifest tells of is replaced, that manifest is taken away.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import time
from typing import TYPE_CHECKING

from datamat.errors import CorruptDataError, IncompleteRunError, OutputError
from datamat.index import named
from datamat.index_files import write_index_files
from datamat.interop import withdraw_sidecars, write_sidecars
from datamat.manifest import MANIFEST_FILE, Manifest, by_shard
from datamat.parts import ShardAssembly
from datamat.quarantine import kept_names, release, safe_name
from datamat.report import RunReport, progress_bar
from datamat.shard_entries import put_aside, salvaged_shards

if TYPE_CHECKING:
    import logging
    import pathlib
    from collections.abc import Callable, Sequence

    from datamat.dispatch import Dispatch
    from datamat.formats import ShardFormat
    from datamat.kept import KeptRows
    from datamat.ledger import Ledger
    from datamat.limits import ErrorLimit
    from datamat.manifest import IndexInfo, ShardFiles, ShardInfo
    from datamat.plan import Plan, ShardSpec
    from datamat.receipts import Receipt
    from datamat.report import Progress
    from datamat.retry import KeptFinder
    from datamat.rows import RowStore

__all__ = ["Run"]


class Run:
    """One call of `Materializer.run`.

    Args:
        output: folder of the finished shards.
        work: its `.datamat`.
        store: the rows, in the order of the plan.
        plan: the whole plan.
        chosen: the shards of the plan to make.
        formats: those that they are written in.
        describe: makes the manifest from the files of the finished shards and those of the index.
        ledger: is told what happens.
        limit: how many rows may fail.
        logger: for messages.
        retry: finds what of a finished shard can be kept, where rows that failed are to be tried again. None leaves
            them as they are.
    """

    def __init__(  # noqa: PLR0913 -- all that a run works on
        self,
        output: pathlib.Path,
        work: pathlib.Path,
        store: RowStore,
        plan: Plan,
        chosen: Sequence[ShardSpec],
        formats: Sequence[ShardFormat],
        *,
        describe: Callable[[Sequence[ShardFiles], tuple[IndexInfo, ...]], Manifest],
        ledger: Ledger,
        limit: ErrorLimit,
        logger: logging.Logger,
        retry: KeptFinder | None = None,
    ) -> None:
        self._output = output
        self._work = work
        self._store = store
        self._plan = plan
        self._formats = formats
        self._describe = describe
        self._ledger = ledger
        self._limit = limit
        self._logger = logger
        self._retry = retry
        self._kept: dict[str, KeptRows] = {}
        self._assemblies = {shard.name: self._assembly(shard) for shard in chosen}
        self._in_quarantine = {split: kept_names(work, split) for split in plan.splits}
        self._finished: dict[str, ShardFiles] = {}
        self._receipts: list[Receipt] = []
        self._num_written = 0
        self._num_resumed = 0

    def execute(self, dispatch: Dispatch, *, started: float, show: bool) -> RunReport:
        """Make what is missing, check that every row is accounted for, and write the manifest.

        Args:
            dispatch: does the parts.
            started: when the run began, by `time.perf_counter`.
            show: whether to show a bar and a summary on standard error.

        Raises:
            IncompleteRunError: a shard does not hold its rows, or too many rows failed.
        """
        if not self._is_up_to_date():
            is_same = self._retry is None  # otherwise shards with the same fingerprint may get more records
            planned = {shard.name: shard.fingerprint for shard in self._plan.shards} if is_same else {}
            withdraw_sidecars(self._output, planned)
            with contextlib.ExitStack() as stack:
                for assembly in self._assemblies.values():
                    stack.callback(assembly.close)
                self._make(dispatch, show=show)
        is_complete = not dispatch.stopped and self._finish()
        report = self._report(dispatch, is_complete=is_complete, elapsed_s=time.perf_counter() - started)
        self._tell_end(report)
        if show:
            _show(str(report))
        return report

    def _report(self, dispatch: Dispatch, *, is_complete: bool, elapsed_s: float) -> RunReport:
        finished = self._in_order()
        infos = [files[0] for files in finished]
        unfinished = [r for name, a in self._assemblies.items() if name not in self._finished for r in a.taken()]
        return RunReport(
            output=self._output,
            is_complete=is_complete,
            num_rows=sum(info.num_rows for info in infos) + sum(receipt.num_rows for receipt in unfinished),
            num_failed=sum(info.num_failed for info in infos) + sum(len(receipt.failed) for receipt in unfinished),
            num_records=sum(info.num_records for info in infos) + sum(receipt.num_records for receipt in unfinished),
            num_bytes=sum(info.num_bytes for files in finished for info in files)
            + sum(receipt.num_bytes for receipt in unfinished),
            num_rows_planned=sum(assembly.spec.num_rows for assembly in self._assemblies.values()),
            num_shards_written=self._num_written,
            num_shards_reused=len(infos) - self._num_written,
            num_parts_written=len(self._receipts),
            num_parts_resumed=self._num_resumed,
            elapsed_s=elapsed_s,
            busy_s=sum(receipt.busy_s for receipt in self._receipts),
            num_workers=dispatch.num_workers,
            start_method=dispatch.start_method,
            stopped=dispatch.stopped,
        )

    def _assembly(self, shard: ShardSpec) -> ShardAssembly:
        return ShardAssembly(self._work, self._output, shard, self._formats)

    def _in_order(self) -> list[ShardFiles]:
        """Return the files of each finished shard, in the order of the plan."""
        return [self._finished[shard.name] for shard in self._plan.shards if shard.name in self._finished]

    def _is_up_to_date(self) -> bool:
        """Tell whether the last finished run left just what the plan says; if not, take its manifest away."""
        try:
            manifest = Manifest.read(self._output)
        except OutputError:
            return False
        except CorruptDataError as error:
            self._logger.warning("%s: shards that it no longer tells of are made anew", error)
            put_aside(self._output, self._work / "shards", salvaged_shards(self._output))
            return False
        wanted = {shard.name: shard.fingerprint for shard in self._plan.shards}
        known = by_shard(manifest.all_files)
        fresh = {
            name: files
            for name, files in known.items()
            if self._stands(files)
            and all(wanted.get(name) == info.fingerprint and _is_there(self._output, info) for info in files)
        }
        if len(fresh) == len(wanted) == len(known):
            self._finished = fresh
            return True
        put_aside(self._output, self._work / "shards", manifest.all_files)
        return False

    def _stands(self, files: ShardFiles) -> bool:
        """Tell whether a shard of the present plan is left as it is: not where rows of it are to be tried again."""
        return self._retry is None or not files[0].num_failed

    def _make(self, dispatch: Dispatch, *, show: bool) -> None:
        num_resumed = sum([self._resume(assembly) for assembly in self._assemblies.values()])
        assemblies = [a for name, a in self._assemblies.items() if name not in self._finished]
        parts = sorted((part for a in assemblies for part in a.missing()), key=lambda part: -part.cost)
        total = sum(a.spec.num_rows * a.spec.copies for a in self._assemblies.values())
        with contextlib.closing(dispatch.of(parts, self._kept)) as receipts:
            first = next(receipts, None)  # the workers are at work before the bar's package is imported
            with progress_bar(self._plan.name, total, show=show) as bar:
                bar.add(num_resumed, 0, resumed=True)
                if first is not None:
                    self._take(first, bar)
                for receipt in receipts:
                    self._take(receipt, bar)

    def _resume(self, assembly: ShardAssembly) -> int:
        """Take over what an earlier run left of a shard; return the number of its records that are done."""
        files = assembly.finished()
        if files is not None and self._stands(files):
            self._finished[assembly.spec.name] = files
            self._limit.add(files[0].num_rows - files[0].num_failed, files[0].num_failed)
            return files[0].num_records
        if self._retry is not None and (previous := assembly.previous()):
            kept = self._retry.find(assembly.spec, previous[0])
            if kept is not None:
                self._kept[assembly.spec.name] = kept
        receipts = assembly.resume(with_failed=self._retry is None)
        for receipt in receipts:
            self._limit.add(receipt.num_done, len(receipt.failed), receipt.failed)
        self._num_resumed += len(receipts)
        if assembly.is_complete:
            self._publish(assembly)
        return sum(receipt.num_records for receipt in receipts)

    def _take(self, receipt: Receipt, bar: Progress) -> None:
        assembly = self._assemblies[receipt.shard]
        _check_conserved(assembly.spec, receipt, self._store)
        self._receipts.append(receipt)
        bar.add(receipt.num_records, receipt.num_bytes)
        self._tell(receipt, assembly.spec)
        assembly.add(receipt)
        self._limit.add(receipt.num_done, len(receipt.failed), receipt.failed)
        if assembly.is_complete:
            self._publish(assembly)

    def _tell(self, receipt: Receipt, shard: ShardSpec) -> None:
        """Write to the ledger what became of a part and of those of its rows that did not go well, now or before."""
        self._ledger.write(
            "part_committed",
            shard=receipt.shard,
            part=receipt.number,
            rows=receipt.num_rows,
            failed=len(receipt.failed),
            records=receipt.num_records,
            bytes=receipt.num_bytes,
            busy_s=round(receipt.busy_s, 3),
        )
        for event, rows in itertools.groupby((*receipt.failed, *receipt.retried), key=lambda row: row.event):
            self._ledger.write_all(event, [{"shard": receipt.shard, **row.told()} for row in rows])
        mended = self._mended(receipt, shard.split)
        if mended:
            self._ledger.write_all("sample_mended", [{"shard": receipt.shard, "key": key} for key in mended])

    def _mended(self, receipt: Receipt, split: str) -> list[str]:
        """Let go of rows that are in quarantine from an earlier run and are good now; return their keys."""
        kept = self._in_quarantine[split]
        if not kept:
            return []
        failed = {row.key for row in receipt.failed}
        keys = self._store.keys(self._store.order[receipt.start : receipt.stop])
        mended = [key for key in keys if key not in failed and safe_name(key) in kept]
        for key in mended:
            release(self._work, split, key)
        return mended

    def _tell_end(self, report: RunReport) -> None:
        done = {"rows": report.num_rows, "failed": report.num_failed, "records": report.num_records}
        if report.stopped:
            event = "deadline_reached" if report.stopped == "deadline" else "disk_reached"
            self._ledger.write(event, planned=report.num_rows_planned, **done)
        self._ledger.write(
            "run_finished",
            is_complete=report.is_complete,
            **done,
            bytes=report.num_bytes,
            elapsed_s=round(report.elapsed_s, 3),
        )

    def _publish(self, assembly: ShardAssembly) -> None:
        files = assembly.publish()
        _check_published(assembly.spec, files[0])
        self._finished[assembly.spec.name] = files
        self._num_written += 1

    def _finish(self) -> bool:
        """Write what stands beside the shards, the manifest last; tell whether the whole plan is finished."""
        missing = [name for name in self._assemblies if name not in self._finished]
        if missing:
            raise IncompleteRunError(
                f"{len(missing)} of {len(self._assemblies)} shards are not finished ({missing[0]}, ...); run again"
            )
        for shard in self._plan.shards:  # those that include and exclude leave alone may be there from other runs
            if shard.name not in self._finished and (files := self._assembly(shard).finished()):
                self._finished[shard.name] = files
        self._limit.check_end()
        finished = self._in_order()
        is_complete = len(finished) == len(self._plan.shards)
        if is_complete and not (self._output / MANIFEST_FILE).exists():
            self._remove_stale(set(self._finished))
            through, infos = self._work / "shards", [files[0] for files in finished]
            index = write_index_files(self._output / "index", self._store, self._plan, infos, through=through)
            self._warn_of_ranks(infos)
            manifest = self._describe(finished, index)
            write_sidecars(self._output, manifest, self._logger)
            manifest.write(self._output, through=through)
        elif is_complete:
            write_sidecars(self._output, Manifest.read(self._output), self._logger)
        if is_complete:
            for folder in ("parts", "shards"):
                shutil.rmtree(self._work / folder, ignore_errors=True)
        shutil.rmtree(self._work / "rows", ignore_errors=True)
        return is_complete

    def _warn_of_ranks(self, infos: Sequence[ShardInfo]) -> None:
        """Tell where ranks do not get as many records as the plan has for them."""
        planned = self._plan.uneven()
        for split, told in self._plan.uneven({info.name: info.num_records for info in infos}).items():
            if split not in planned:
                self._logger.warning("%s", told)

    def _remove_stale(self, names: set[str]) -> None:
        """Remove the files of shards that an earlier plan had and this one has not."""
        for entry in sorted((self._work / "shards").glob("*.json")):
            if entry.stem not in names:
                for stale in self._output.glob(f"{entry.stem}.*"):  # its offsets, too, and whatever its format was
                    stale.unlink()


def _is_there(output: pathlib.Path, info: ShardInfo) -> bool:
    with contextlib.suppress(OSError):
        return (output / info.file).stat().st_size == info.num_bytes and (output / info.index_file).is_file()
    return False


def _check_conserved(shard: ShardSpec, receipt: Receipt, store: RowStore) -> None:
    """Raise `IncompleteRunError` where a receipt does not account for each row of its part."""
    part = shard.parts[receipt.number]
    if receipt.is_for(part) and not receipt.num_lost and receipt.num_records >= receipt.num_done * shard.copies:
        return
    keys = store.keys(store.order[part.start : part.stop])
    raise IncompleteRunError(
        f"part {part.number} of {shard.name} has {len(keys)} rows, {named(keys)}; its receipt tells of "
        f"{receipt.num_done} with {receipt.num_records} records and of {len(receipt.failed)} that failed, where each "
        f"should give {shard.copies} records or fail: run again to make it anew"
    )


def _check_published(shard: ShardSpec, info: ShardInfo) -> None:
    num_done = info.num_rows - info.num_failed
    if info.num_rows != shard.num_rows or info.num_records < num_done * shard.copies:
        raise IncompleteRunError(
            f"{info.file} holds {info.num_records} records of {num_done} rows, and {info.num_failed} failed; the plan "
            f"has {shard.num_rows} rows and {shard.copies} copies of each: remove the file and run again"
        )


def _show(text: str) -> None:
    from tqdm.auto import tqdm

    tqdm.write(text, file=sys.stderr)
