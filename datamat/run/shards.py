"""Shards: written by workers part by part, sealed by one of them, and published by the driver.

    .datamat/parts/SHARD/                   receipts and offsets of its parts, and separate parts: see `receipts`
    .datamat/shards/SHARD.EXT.growing       the file so far: the records of its first parts
                    SHARD.idx.growing       its offsets, once complete
                    SHARD.json              entry of a finished shard, see `write_entry`
                    SHARD.inputs            content of its input files, see `inputs`
                    run                     the mark of the run whose workers may write here
    .datamat/run-N/SHARD.EXT, SHARD.idx     a complete shard that waits for others before it is published
                   SHARD.json               its entry

A worker appends a part directly to the shard's file if the parts before it are there, so that every byte is written
once. Otherwise, because two workers share the shard, the part stays in a separate file until the worker that fills the
gap appends it: see `growing` and `parts`. The driver moves no bytes of records. It takes over the results of earlier
runs, collects receipts, and publishes.

A part counts once every format has it. Both files of a format are flushed before they get their names. No name in
`.datamat` ends like that of a finished shard, so that globs which include hidden folders skip them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import uuid
from typing import TYPE_CHECKING

import numpy as np

from datamat.directory.counts import Counts
from datamat.directory.files import WORK, fsync_folder, is_stand_in, publish
from datamat.directory.keys import KeyDigest
from datamat.directory.manifest import (
    MANIFEST_FILE,
    ShardInfo,
    growing_path,
    read_entry,
    read_versions,
    run_folder,
    write_entry,
)
from datamat.errors import CorruptDataError, IncompleteRunError, count_of
from datamat.features import Statistics
from datamat.folders.local import LocalFolder, version_of
from datamat.plan.changes import missing_files
from datamat.plan.inputs import content_digest, read_inputs
from datamat.run.growing import WAIT_S, GrowingShard, inputs_of_shard
from datamat.run.receipts import (
    DamagedPartError,
    Receipt,
    Sealed,
    inputs_path,
    replace_file,
)
from datamat.sources.store import INPUT

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator, Sequence

    from datamat.directory.manifest import ShardFiles
    from datamat.formats import ShardFormat
    from datamat.plan.inputs import InputFiles
    from datamat.plan.plan import PartSpec, ShardSpec

_ASIDE = ".done"  # suffix of the folder of a published shard's parts, until it is removed


def begin_run(work: pathlib.Path) -> str:
    """Make this run the only one whose workers may write to the shards' files; return its mark.

    A worker that outlives its killed driver finds another mark and stops: it cannot write after the new run's parts.
    """
    mark = uuid.uuid4().hex
    (work / "shards").mkdir(parents=True, exist_ok=True)
    replace_file(work / "shards" / "run", mark.encode())
    for folder in (work / "parts").glob(f"*{_ASIDE}"):
        remove_folder(folder)
    return mark


def remove_folder(folder: str | os.PathLike[str]) -> None:
    """Remove a folder and its content if it exists; safe to call twice, even concurrently."""
    shutil.rmtree(folder, ignore_errors=True)


class ShardBuilder:
    """Builds a shard, from its plan to its final names.

    Args:
        work: `.datamat` folder of the output.
        output: folder of the finished shards.
        spec: shard to build, with its parts.
        formats: formats of the shard.
        inputs: tells whether input files have changed; None if rows have none.
        listed: files of the shard of this name in the published manifest, if any.
    """

    def __init__(
        self,
        work: pathlib.Path,
        output: pathlib.Path,
        spec: ShardSpec,
        formats: Sequence[ShardFormat],
        inputs: InputFiles | None = None,
        listed: ShardFiles = (),
    ) -> None:
        self.spec = spec
        self._formats = formats
        self._inputs = inputs
        self._resumed: frozenset[int] = frozenset()
        self._is_made_now = False
        self._inputs_file = inputs_of_shard(work / "shards", spec.name)
        self._growing = GrowingShard(work, spec.name, spec.fingerprint, formats, len(spec.parts))
        self._entries = work / "shards"
        self._waiting = run_folder(work)
        self._output = output
        self._listed = listed
        self._names = self._growing.names
        self._receipts: dict[int, Receipt] = {}

    def finished(self) -> ShardFiles | None:
        """Return the files of the shard if an earlier run finished it, intact, from the same rows and options."""
        files = self.previous()
        if files is None or not self._is_mine(files):
            return None
        if self._entry(waits=False).exists():
            return files if self._are_there(files, waits=False) else None
        with contextlib.suppress(OSError, CorruptDataError):
            published = os.stat(self._output / MANIFEST_FILE).st_mtime_ns
            if all(self._is_still_there(info, published) for info in files):
                return files
        return None

    def _is_still_there(self, info: ShardInfo, published: int) -> bool:
        """Return True if a published file matches its entry; it is read only if it was written to since."""
        path = self._output / info.file
        if is_stand_in(path) or path.stat().st_mtime_ns <= published:
            return not missing_files(self._output, info)
        return info.is_whole(path) and _has_offsets(self._output / info.index_file, info)

    def waiting(self) -> ShardFiles | None:
        """Return the files of the shard if it is complete and waits to be published; otherwise remove waiting files."""
        files = read_entry(self._entry(waits=True))
        if files is None or (self._is_mine(files) and self._are_there(files, waits=True)):
            return files
        remove_waiting(self._waiting, files)
        return None

    def _entry(self, *, waits: bool) -> pathlib.Path:
        return (self._waiting if waits else self._entries) / f"{self.spec.name}.json"

    def _are_there(self, files: ShardFiles, *, waits: bool) -> bool:
        """Return True if files and offsets match their entry; first move files that were about to get their names.

        A run may have been killed between writing an entry and naming its files.
        """
        folder, versions = self._waiting if waits else self._output, read_versions(self._entry(waits=waits))
        with contextlib.suppress(OSError):
            for info in files:
                version = versions.get(info.file, "")
                if not _holds(folder / info.file, info, version):
                    if not _holds(self._growing.files[info.extension], info, version):
                        return False
                    self._name(info, folder)
                if not _has_offsets(folder / info.index_file, info):
                    return False
            return True
        return False

    def _is_mine(self, files: ShardFiles) -> bool:
        """Return True if files have the present formats, rows and options, and the same input files."""
        if [(info.file, info.index_file) for info in files] != self._names:
            return False
        if any(info.fingerprint != self.spec.fingerprint for info in files):
            return False
        return self._inputs is None or self._inputs.stand(self.spec, files)

    def previous(self) -> ShardFiles | None:
        """Return the files of the shard of this name that an earlier run finished, from whatever rows and options.

        Files in the present formats come first, in order.
        """
        files = read_entry(self._entry(waits=False)) or self._listed
        order = {file: number for number, (file, _) in enumerate(self._names)}
        return tuple(sorted(files, key=lambda info: order.get(info.file, len(order)))) or None

    # ------------------------------------------------------------ parts

    def resume(self, *, with_failed: bool = True) -> list[Receipt]:
        """Resume from an earlier run of the present plan, and return its receipts.

        A part counts if its bytes, in each format, match the digest in its receipt, either in its own file or in the
        shard's. Everything else in the folder of the parts is removed.

        Args:
            with_failed: whether to count parts with failed rows.
        """
        if self._growing.folder.is_dir():
            with self._growing.held(wait_s=WAIT_S) as is_held:
                if not is_held:  # by a worker that outlives its driver, or by a child that it forked
                    self._growing.disown()
                found = filter(None, map(self._read_receipt, self.spec.parts))
                known = {receipt.number: receipt for receipt in found if with_failed or not receipt.failed}
                self._receipts = self._growing.whole(known)
                self._growing.drop(set(self._receipts))
        self._resumed = frozenset(self._receipts)
        return list(self._receipts.values())

    def forget(self, damaged: DamagedPartError) -> list[PartSpec]:
        """Fall back to the intact parts; return those to rebuild.

        Requires that no worker is writing to the shard. Parts after the damaged one in the shard's file are lost with
        it.
        """
        before = self._receipts
        present = {number: self._growing.receipt(number) for number in before}
        self._receipts = {
            number: receipt
            for number, receipt in present.items()
            if receipt
            and number != damaged.number
            and (number < damaged.number or all(file.start is None for file in receipt.files))
        }
        self._growing.drop(set(self._receipts))
        return [part for part in self.spec.parts if part.number in before.keys() - self._receipts.keys()]

    def _read_receipt(self, part: PartSpec) -> Receipt | None:
        """Return the receipt of a part of the present plan, even if the part is damaged; None if there is none."""
        receipt = self._growing.receipt(part.number)
        if receipt is None or not receipt.is_for(part) or receipt.num_lost:
            return None
        inputs = (receipt.inputs, receipt.input_times)
        if self._inputs is not None and not self._inputs.are_same(part.start, part.stop, *inputs):
            return None
        return receipt

    def add(self, receipt: Receipt) -> None:
        """Add one more finished part."""
        # Shares texts between receipts, each of which arrives with its own.
        shared = dataclasses.replace(receipt, shard=self.spec.name, fingerprint=self.spec.fingerprint, sealed=None)
        self._receipts[receipt.number] = shared

    def taken(self) -> list[Receipt]:
        """Return the receipts of the finished parts."""
        return list(self._receipts.values())

    @property
    def is_complete(self) -> bool:
        """Whether every part is done."""
        return len(self._receipts) == len(self.spec.parts)

    def missing(self) -> Iterator[PartSpec]:
        """Yield the parts that remain to be made."""
        return (part for part in self.spec.parts if part.number not in self._receipts)

    # ------------------------------------------------------------ the end of a shard

    def publish(
        self, files: ShardFiles, *, waits: bool, remove: Callable[[pathlib.Path], None] = remove_folder
    ) -> None:
        """Name the files of the shard and their offsets, and remove the folder of its parts.

        Args:
            files: result of `complete`.
            waits: whether they wait in the folder of the run, under these names, until a manifest lists them.
            remove: removes an unused folder, now or later.
        """
        entry = self._entry(waits=waits)
        if waits:
            self._waiting.mkdir(exist_ok=True)
            fsync_folder(self._entries)  # with the names of the files; otherwise that of the entry is flushed there
        else:
            self._drop_other_formats(files)
        write_entry(entry.parent, files, functools.partial(growing_path, self._entries))
        for info in files:
            self._name(info, self._waiting if waits else self._output)
        self._receipts = {}
        folder = self._growing.folder
        # A unique name: removing it late, or twice, removes nothing of a later run.
        aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}{_ASIDE}")
        with contextlib.suppress(OSError):
            os.rename(folder, aside)
            remove(aside)

    def unname(self) -> None:
        """Let a finished shard wait whose files are not named yet: a run was killed between its entry and its names.

        It must not appear beside shards of another plan, which may have become visible meanwhile.
        """
        files = read_entry(self._entry(waits=False))
        if files is None or not self._is_mine(files) or self._entry(waits=True).exists():
            return
        if not any((self._output / info.file).exists() or (self._output / info.index_file).exists() for info in files):
            self._waiting.mkdir(exist_ok=True)
            publish(self._entry(waits=False), self._entry(waits=True))

    def give_names(self, files: ShardFiles) -> None:
        """Name the files of a shard that no longer needs to wait."""
        publish(self._entry(waits=True), self._entry(waits=False))
        for info in files:
            for name in (info.index_file, info.file):
                publish(self._waiting / name, self._output / name)

    def discard(self) -> None:
        """Remove the files and parts of a shard that will not be published."""
        for path in (*self._growing.files.values(), *self._growing.index_files.values()):
            path.unlink(missing_ok=True)
        shutil.rmtree(self._growing.folder, ignore_errors=True)

    def _name(self, info: ShardInfo, folder: pathlib.Path) -> None:
        """Name a file and its offsets in a folder, the offsets first.

        The names in the output are flushed before the manifest: until then, a file that lost its name in a power cut
        gets it again by its entry.
        """
        index = self._growing.index_files[info.extension]
        if index.exists():
            publish(index, folder / info.index_file, flushes_name=False)
        publish(self._growing.files[info.extension], folder / info.file, flushes_name=folder == self._waiting)

    def inputs(self) -> np.ndarray:
        """Return `INPUT` (rows, file fields): the content of the input files when the shard was made."""
        if self._inputs is None:
            return np.zeros((self.spec.num_rows, 0), INPUT)
        if not self._is_made_now:
            return self._inputs.records(self.spec.start, self.spec.stop)
        # Not `read_inputs`: this run has written it, so that a failing disk must be reported.
        return np.frombuffer(self._inputs_file.read_bytes(), INPUT).reshape(self.spec.num_rows, -1)

    def _put_inputs_together(self, receipts: Sequence[Receipt], digest: str | None) -> str:
        """Write the content of all parts' input files, unless a worker has, and return its digest for the entry.

        Args:
            receipts: receipts of all parts, in order.
            digest: digest from the worker that sealed the shard.
        """
        inputs = self._inputs
        if inputs is None or not inputs.has_files:
            return ""
        if digest is not None and not self._resumed:
            return digest
        found = np.concatenate([self._inputs_of_part(receipt, inputs) for receipt in receipts])
        self._inputs_file.write_bytes(found.tobytes())
        return content_digest(found)

    def _inputs_of_part(self, receipt: Receipt, inputs: InputFiles) -> np.ndarray:
        """Return the content of a part's input files; for parts of earlier runs, with the present times."""
        found = read_inputs(inputs_path(self._growing.folder, receipt.number))
        part = found.reshape(receipt.num_rows, -1) if len(found) and not len(found) % receipt.num_rows else found
        if receipt.number not in self._resumed and content_digest(part) == receipt.inputs:
            return part
        return inputs.records(receipt.start, receipt.stop)

    def complete(self, sealed: Sealed) -> ShardFiles:
        """Return the shard's entries for files that are complete and flushed."""
        receipts = [self._receipts[part.number] for part in self.spec.parts]
        counts = Counts.of(*receipts)
        if sealed.num_records != counts.num_records:
            raise IncompleteRunError(
                f"{self.spec.name} was completed with {count_of(sealed.num_records, 'record')}; the receipts of its "
                f"{count_of(len(receipts), 'part')} give {counts.num_records}: this is a defect of datamat, please "
                "report it; "
                f"remove {self._growing.folder} and run again"
            )
        keys = KeyDigest()
        for receipt in receipts:
            keys += KeyDigest(value=int(receipt.keys, 16), count=receipt.num_records)
        inputs = self._put_inputs_together(receipts, sealed.inputs)
        known = Statistics.total(receipt.statistics for receipt in receipts)
        statistics = () if known is None else known.to_lines()
        self._is_made_now = True
        infos = tuple(
            ShardInfo(
                file=name,
                split=self.spec.split,
                num_rows=sum(receipt.num_done + receipt.num_failed + receipt.num_dropped for receipt in receipts),
                num_records=counts.num_records,
                parts=file.parts,
                key_digest=keys.hexdigest(),
                fingerprint=self.spec.fingerprint,
                head=file.head,
                tail=file.tail,
                offsets=file.offsets,
                num_failed=counts.num_failed,
                num_dropped=counts.num_dropped,
                num_dropped_records=counts.num_dropped_records,
                index_file=index_name,
                inputs=inputs,
                statistics=statistics,
            )
            for file, (name, index_name) in zip(sealed.files, self._names, strict=True)
        )
        for info in infos:
            path = self._growing.files[info.extension]
            if path.stat().st_size != info.num_bytes:
                raise CorruptDataError(
                    f"{path} holds {path.stat().st_size} bytes, its receipts say {info.num_bytes}; something else "
                    f"writes to it: end that, remove {self._entries.parent} and run again"
                )
        return infos

    def _drop_other_formats(self, infos: ShardFiles) -> None:
        """Remove the files of the shard in other formats."""
        mine = {name for info in infos for name in (info.file, info.index_file)}
        for info in read_entry(self._entry(waits=False)) or ():  # published files are removed with their set
            for name in {info.file, info.index_file} - mine:
                (self._output / name).unlink(missing_ok=True)


def take_over(output: pathlib.Path, files: ShardFiles, renamed: ShardFiles, below: str = "") -> None:
    """Keep a finished shard under another name until it is published, by hard links if possible.

    Args:
        output: folder of the set that it will join.
        files: entries of its files.
        renamed: the same under the other name.
        below: prefix of the paths of the files in that folder: "" or "FOLDER/".
    """
    folder, waiting = LocalFolder(output), run_folder(output / WORK)
    place = waiting.relative_to(output).as_posix()
    for old, new in zip(files, renamed, strict=True):
        folder.copy(f"{below}{old.index_file}", f"{place}/{new.index_file}")
        folder.copy(f"{below}{old.file}", f"{place}/{new.file}")
    fsync_folder(waiting)
    write_entry(waiting, renamed)


def remove_waiting(folder: pathlib.Path, files: ShardFiles) -> None:
    """Remove a shard that waits in the folder of a run, its entry last."""
    for info in files:
        for file in (info.file, info.index_file):
            (folder / file).unlink(missing_ok=True)
    fsync_folder(folder)
    (folder / f"{files[0].name}.json").unlink(missing_ok=True)


def _has_offsets(path: pathlib.Path, info: ShardInfo) -> bool:
    return is_stand_in(path) or info.has_offsets(path)


def _holds(path: pathlib.Path, info: ShardInfo, version: str) -> bool:
    """Return True if a file matches its entry; it is read only if it was written to since."""
    with contextlib.suppress(OSError, CorruptDataError):
        if path.stat().st_size != info.num_bytes:
            return False
        return is_stand_in(path) or version_of(path) == version or info.is_whole(path)
    return False
