"""One run, between the lock and the report: what is there already, what comes in, and how it is finished.

    manifest, entries, receipts of earlier runs ──> missing parts ──> dispatch ──> receipts ──> shards ──> manifest

The order of the last steps is what keeps a directory honest: shards are flushed and named, then the index files, and
the manifest last. Before a shard that a manifest tells of is replaced, that manifest is taken away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

from datamat.errors import CorruptDataError, IncompleteRunError, OutputError
from datamat.index_files import load_parquet, write_index_files
from datamat.manifest import MANIFEST_FILE, Manifest, ShardInfo, salvaged_shards
from datamat.parts import ShardAssembly
from datamat.report import RunReport, progress_bar
from datamat.storage import commit_json, fsync_folder, publish

if TYPE_CHECKING:
    import logging
    import pathlib
    from collections.abc import Callable, Generator, Sequence

    from datamat.formats import ShardFormat
    from datamat.manifest import IndexInfo
    from datamat.parts import Receipt
    from datamat.plan import PartSpec, Plan, ShardSpec
    from datamat.report import Progress
    from datamat.rows import RowStore

__all__ = ["Dispatched", "Run"]


class Dispatched:
    """The receipts of parts, as workers finish them, and what is known of the workers.

    Args:
        receipts: begins the work when it is first asked.
    """

    def __init__(self, receipts: Callable[[Dispatched, Sequence[PartSpec]], Generator[Receipt]]) -> None:
        self._receipts = receipts
        self.num_workers = 0
        self.start_method = ""

    def of(self, parts: Sequence[PartSpec]) -> Generator[Receipt]:
        """Yield the receipt of each part, in the order in which they are finished."""
        return self._receipts(self, parts)


class Run:
    """One call of `Materializer.run`.

    Args:
        output: folder of the finished shards.
        work: its `.datamat`.
        store: the rows, in the order of the plan.
        plan: the whole plan.
        chosen: the shards of the plan to make.
        shard_format: their format.
        describe: makes the manifest from the finished shards and the files of the index.
        logger: for messages.
    """

    def __init__(
        self,
        output: pathlib.Path,
        work: pathlib.Path,
        store: RowStore,
        plan: Plan,
        chosen: Sequence[ShardSpec],
        shard_format: ShardFormat,
        describe: Callable[[tuple[ShardInfo, ...], tuple[IndexInfo, ...]], Manifest],
        logger: logging.Logger,
    ) -> None:
        self._output = output
        self._work = work
        self._store = store
        self._plan = plan
        self._format = shard_format
        self._describe = describe
        self._logger = logger
        self._assemblies = {shard.name: self._assembly(shard) for shard in chosen}
        self._finished: dict[str, ShardInfo] = {}
        self._receipts: list[Receipt] = []
        self._num_written = 0
        self._num_resumed = 0

    def execute(self, dispatched: Dispatched, *, started: float, show: bool) -> RunReport:
        """Make what is missing, check that every row is accounted for, and write the manifest.

        Args:
            dispatched: does the parts.
            started: when the run began, by `time.perf_counter`.
            show: whether to show a bar and a summary on standard error.

        Raises:
            IncompleteRunError: a shard does not hold its rows.
        """
        if not self._is_up_to_date():
            self._make(dispatched, show=show)
        is_complete = self._finish()
        infos = self._infos()
        report = RunReport(
            output=self._output,
            is_complete=is_complete,
            num_rows=sum(info.num_rows for info in infos),
            num_records=sum(info.num_records for info in infos),
            num_bytes=sum(info.num_bytes for info in infos),
            num_shards_written=self._num_written,
            num_shards_reused=len(infos) - self._num_written,
            num_parts_written=len(self._receipts),
            num_parts_resumed=self._num_resumed,
            elapsed_s=time.perf_counter() - started,
            busy_s=sum(receipt.busy_s for receipt in self._receipts),
            num_workers=dispatched.num_workers,
            start_method=dispatched.start_method,
        )
        if show:
            _show(str(report))
        return report

    def _assembly(self, shard: ShardSpec) -> ShardAssembly:
        return ShardAssembly(self._work, self._output, shard, self._format)

    def _infos(self) -> tuple[ShardInfo, ...]:
        return tuple(self._finished[shard.name] for shard in self._plan.shards if shard.name in self._finished)

    def _is_up_to_date(self) -> bool:
        """Tell whether the last finished run left just what the plan says; if not, take its manifest away."""
        try:
            manifest = Manifest.read(self._output)
        except OutputError:
            return False
        except CorruptDataError as error:
            self._logger.warning("%s: shards that it no longer tells of are made anew", error)
            self._put_aside(salvaged_shards(self._output))
            return False
        wanted = {shard.name: shard.fingerprint for shard in self._plan.shards}
        fresh = {
            info.name: info
            for info in manifest.shards
            if wanted.get(info.name) == info.fingerprint and _is_there(self._output, info)
        }
        if len(fresh) == len(wanted) == len(manifest.shards):
            self._finished = fresh
            return True
        self._put_aside(manifest.shards)
        return False

    def _put_aside(self, infos: Sequence[ShardInfo]) -> None:
        """Keep what a manifest says of each shard: it does not tell the truth any more once one of them changes.

        The manifest itself stays beside these entries until the run is complete, for `status` to compare with.
        """
        (self._work / "shards").mkdir(exist_ok=True)
        for info in infos:
            commit_json(self._work / "shards" / f"{info.name}.json", info.to_json())
        publish(self._output / MANIFEST_FILE, self._work / "shards" / MANIFEST_FILE)
        fsync_folder(self._output)

    def _make(self, dispatched: Dispatched, *, show: bool) -> None:
        num_resumed = sum([self._resume(assembly) for assembly in self._assemblies.values()])
        assemblies = [a for name, a in self._assemblies.items() if name not in self._finished]
        parts = sorted((part for a in assemblies for part in a.missing()), key=lambda part: -part.cost)
        total = sum(a.spec.num_rows * a.spec.copies for a in self._assemblies.values())
        with contextlib.closing(dispatched.of(parts)) as receipts:
            first = next(receipts, None)  # while the workers are at work, what comes later is imported
            load_parquet()
            with progress_bar(self._plan.name, total, show=show) as bar:
                bar.add(num_resumed, 0, resumed=True)
                if first is not None:
                    self._take(first, bar)
                for receipt in receipts:
                    self._take(receipt, bar)

    def _resume(self, assembly: ShardAssembly) -> int:
        """Take over what an earlier run left of a shard; return the number of its records that are done."""
        if info := assembly.finished():
            self._finished[assembly.spec.name] = info
            return info.num_records
        receipts = assembly.resume()
        self._num_resumed += len(receipts)
        if assembly.is_complete:
            self._publish(assembly)
        return sum(receipt.num_records for receipt in receipts)

    def _take(self, receipt: Receipt, bar: Progress) -> None:
        self._receipts.append(receipt)
        bar.add(receipt.num_records, receipt.num_bytes)
        assembly = self._assemblies[receipt.shard]
        assembly.add(receipt)
        if assembly.is_complete:
            self._publish(assembly)

    def _publish(self, assembly: ShardAssembly) -> None:
        info = assembly.publish()
        _check_conserved(assembly.spec, info)
        self._finished[assembly.spec.name] = info
        self._num_written += 1

    def _finish(self) -> bool:
        """Write what stands beside the shards, the manifest last; tell whether the whole plan is finished."""
        missing = [name for name in self._assemblies if name not in self._finished]
        if missing:
            raise IncompleteRunError(
                f"{len(missing)} of {len(self._assemblies)} shards are not finished ({missing[0]}, ...); run again"
            )
        for shard in self._plan.shards:  # those that include and exclude leave alone may be there from other runs
            if shard.name not in self._finished and (info := self._assembly(shard).finished()):
                self._finished[shard.name] = info
        infos = self._infos()
        is_complete = len(infos) == len(self._plan.shards)
        if is_complete and not (self._output / MANIFEST_FILE).exists():
            self._remove_stale({info.name for info in infos})
            through = self._work / "shards"
            index = write_index_files(self._output / "index", self._store, self._plan, infos, through=through)
            self._describe(infos, index).write(self._output, through=through)
        if is_complete:
            for folder in ("parts", "shards"):
                shutil.rmtree(self._work / folder, ignore_errors=True)
        shutil.rmtree(self._work / "rows", ignore_errors=True)
        return is_complete

    def _remove_stale(self, names: set[str]) -> None:
        """Remove the files of shards that an earlier plan had and this one has not."""
        for entry in sorted((self._work / "shards").glob("*.json")):
            if entry.stem not in names:
                for stale in (f"{entry.stem}.{self._format.extension}", f"{entry.stem}.idx"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._output / stale)


def _is_there(output: pathlib.Path, info: ShardInfo) -> bool:
    with contextlib.suppress(OSError):
        return (output / info.file).stat().st_size == info.num_bytes and (output / info.index_file).is_file()
    return False


def _check_conserved(shard: ShardSpec, info: ShardInfo) -> None:
    if info.num_rows != shard.num_rows or info.num_records < shard.num_rows * shard.copies:
        raise IncompleteRunError(
            f"{info.file} holds {info.num_records} records of {info.num_rows} rows; the plan has {shard.num_rows} rows "
            f"and {shard.copies} copies of each: remove the file and run again"
        )


def _show(text: str) -> None:
    from tqdm.auto import tqdm

    tqdm.write(text, file=sys.stderr)
