"""Shards: written by workers part behind part, sealed by one of them, and published by the driver.

    .datamat/parts/SHARD/                   receipts and offsets of its parts, and parts that lie apart: see `receipts`
    .datamat/shards/SHARD.EXT.growing       the file so far: the records of its first parts
                    SHARD.idx.growing       its offsets, once it is complete
                    SHARD.json              of a finished shard: its entry, see `write_entry`
                    SHARD.inputs            what its input files held, see `inputs`
                    held/SHARD.json         of a complete shard that waits for others before it is named
                    run                     the mark of the run whose workers may write here

A worker writes a part straight onto the end of the shard's file where the parts before it are there, so that every
byte is written once. Where they are not, because two workers are at one shard, the part lies apart, in a file of its
own, until the worker that fills the gap copies it onto the end. The driver moves no byte of a record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import shutil
import time
import uuid
from typing import TYPE_CHECKING, cast

import numpy as np
import xxhash

from datamat.directory.counts import Counts
from datamat.directory.files import commit, digest_file, is_stand_in, publish
from datamat.directory.keys import KeyDigest
from datamat.directory.manifest import (
    HELD,
    FilePart,
    ShardInfo,
    ends_of,
    file_names,
    growing_path,
    is_older,
    read_entry,
    tree_checksum,
    write_entry,
)
from datamat.directory.sidecars.indexes import index_ahead, prepare_index
from datamat.errors import CorruptDataError, IncompleteRunError, OutputError, OutputLockedError, count_of
from datamat.features import Statistics
from datamat.folders.local import read_regular
from datamat.formats.io import write_all
from datamat.plan.inputs import content_digest, read_inputs
from datamat.run.receipts import (
    DamagedPartError,
    PartInfo,
    Receipt,
    Sealed,
    SealedFile,
    inputs_path,
    part_folder,
    part_path,
    read_offsets,
    read_receipt,
    receipt_path,
    replace_file,
    temporary_suffix,
    write_receipt,
)
from datamat.sources.store import INPUT

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, BinaryIO

    from datamat.directory.manifest import ShardFiles
    from datamat.features.base import Kind
    from datamat.formats import Block, Buffer, Offsets, Record, ShardFormat
    from datamat.plan.inputs import InputFiles
    from datamat.plan.plan import PartSpec, ShardSpec
    from datamat.run.receipts import Outcome


__all__ = ["GrowingShard", "PartWriter", "ShardBuilder", "begin_run", "inputs_of_shard", "remove_folder"]

_ASIDE = ".done"  # ends the name of the folder of the parts of a published shard, until somebody removes it
_COPY_BYTES = 1 << 20
_FLUSH_BYTES = 8 << 20  # a disk takes this much at once as fast as more
_MOST_WALKED = 64  # parts that lie apart in a row, behind which a worker still looks for the end of the file
_POLL_S = 0.02
_WAIT_S = 3.0  # for a process that still writes: workers of a killed program end within some seconds
_SEAL_WAIT_S = 600.0  # for the same call, which another executor may run twice at once


def begin_run(work: pathlib.Path) -> str:
    """Make this run the only one whose workers may write to the shards' files; return its mark.

    A worker that outlives its killed driver finds another mark and stops: it cannot write behind the new run's parts.
    """
    mark = uuid.uuid4().hex
    (work / "shards").mkdir(parents=True, exist_ok=True)
    replace_file(work / "shards" / "run", mark.encode())
    for folder in (work / "parts").glob(f"*{_ASIDE}"):
        remove_folder(folder)
    return mark


def remove_folder(folder: str | os.PathLike[str]) -> None:
    """Remove a folder and all that is in it, as far as it is there; it may be called twice, and at once."""
    shutil.rmtree(folder, ignore_errors=True)


def inputs_of_shard(shards: pathlib.Path, name: str) -> pathlib.Path:
    """Return the file that records what the input files of a shard held.

    Args:
        shards: folder of the entries of shards.
        name: name of the shard.
    """
    return shards / f"{name}.inputs"


# ---------------------------------------------------------------- the growing shard
#
# The files of a shard while they grow, for whoever writes to them: one process at a time, which holds their lock.
#
#     receipts 0 .. k-1 say where their parts begin in the file  ──> the end of part k-1 is where part k goes
#     what follows that end, a worker that died left there       ──> it is cut off
#
# A receipt is the checkpoint: it is written once the bytes of its part are in the file, and nothing behind the last
# receipt counts. So an append may be killed at any byte, and another worker can repeat it.


class GrowingShard:
    """The files of a shard that is not finished.

    Args:
        work: the `.datamat` folder.
        name: name of the shard.
        fingerprint: fingerprint of the shard: receipts of another one do not count.
        formats: formats that it is written in.
        num_parts: number of its parts.
        run: mark of the run that writes to them, as `begin_run` returned it; "" for whoever only reads.
    """

    def __init__(
        self,
        work: pathlib.Path,
        name: str,
        fingerprint: str,
        formats: Sequence[ShardFormat],
        num_parts: int,
        run: str = "",
    ) -> None:
        self._run = run
        self._fingerprint = fingerprint
        self._formats = formats
        self._num_parts = num_parts
        self._mark = work / "shards" / "run"
        self._shard = name
        self.folder = part_folder(work, name)
        names = file_names(name, [made.extension for made in formats])
        self.files = {
            made.extension: growing_path(work / "shards", file) for made, (file, _) in zip(formats, names, strict=True)
        }
        self.index_files = {
            made.extension: growing_path(work / "shards", index)
            for made, (_, index) in zip(formats, names, strict=True)
        }

    @property
    def joins_parts(self) -> bool:
        """Whether parts can be written to the file of a format."""
        return any(made.joins_parts for made in self._formats)

    @contextlib.contextmanager
    def held(self, *, wait_s: float = 0.0) -> Iterator[bool | None]:
        """Hold the lock of the files for the block, which the system releases when the process ends.

        Yields False where another process keeps the lock, and None where the file system has none.

        Args:
            wait_s: how long to wait for the lock, in seconds.
        """
        import fcntl

        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            until = time.monotonic() + wait_s
            while (is_held := _lock(descriptor)) is False and time.monotonic() < until:
                time.sleep(_POLL_S)
            yield is_held
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for children that user code forked and left behind
            os.close(descriptor)

    def check_run(self) -> None:
        """Raise `OutputLockedError` if another run has begun since this one; call it before writing."""
        found = ""
        with contextlib.suppress(FileNotFoundError, CorruptDataError):
            found = read_regular(self._mark, max_bytes=100).decode(errors="replace")
        if self._run and found != self._run:
            if not (self._mark.parent.parent / "lock").exists():
                raise OutputError(
                    f"{self._mark.parent.parent.parent} was removed while this run wrote to it: "
                    f"{os.strerror(errno.ENOENT)}; run again to make it from the beginning"
                )
            raise OutputLockedError(
                f"{self._mark} names another run than the one that this worker (process {os.getpid()}) belongs to: "
                "two have been at work on the output, and this one stops; once no other is, run again to resume"
            )

    def receipt(self, number: int) -> Receipt | None:
        """Return the receipt of a part of this very shard; None where there is none."""
        found = read_receipt(self.folder, number)
        if found is None or (found.number, found.fingerprint) != (number, self._fingerprint):
            return None
        return found if self._has_formats(found) else None

    def _has_formats(self, receipt: Receipt) -> bool:
        return [file.extension for file in receipt.files] == [made.extension for made in self._formats]

    def is_joined(self, receipt: Receipt) -> bool:
        """Return whether a part is in the file of every format that joins parts."""
        return all(
            file.start is not None for made, file in zip(self._formats, receipt.files, strict=True) if made.joins_parts
        )

    def end_before(self, number: int) -> dict[str, int] | None:
        """Return where a part begins in each file that joins parts, by extension, once those before it are there.

        Parts that lie apart right before it are joined first. Only while the lock is held.

        Returns:
            None where the parts before it are not done, or not as their receipts say.
        """
        apart: list[Receipt] = []
        before: Receipt | None = None
        for other in range(number - 1, -1, -1):
            found = self.receipt(other)
            if found is None or len(apart) > _MOST_WALKED:
                return None
            if self.is_joined(found):
                before = found
                break
            apart.append(found)
        ends = self._ends(before)
        if not self._reaches(ends):
            return None
        try:
            for receipt in reversed(apart):
                ends = self._ends(self._join(receipt, ends))
        except DamagedPartError:  # the driver learns of it when the shard is sealed
            return None
        return ends

    def join_from(self, number: int) -> int:
        """Join the parts that lie apart behind a joined one; return the number of the first that is not there."""
        before = self.receipt(number - 1) if number else None
        ends = self._ends(before)
        while number < self._num_parts and (receipt := self.receipt(number)):
            ends = self._ends(receipt if self.is_joined(receipt) else self._join(receipt, ends))
            number += 1
        return number

    def is_done(self, number: int) -> bool:
        """Return whether a part has left a receipt, whatever it says."""
        return receipt_path(self.folder, number).exists()

    def is_in(self, receipt: Receipt) -> bool:
        """Return whether a part is in the file of any format."""
        return any(file.start is not None for file in receipt.files)

    def whole(self, receipts: Mapping[int, Receipt]) -> dict[int, Receipt]:
        """Return those receipts whose parts are on the disk, in every format, with their digests.

        Parts in the shard's files count as far as all of them are whole from the first on.
        """
        found: dict[int, Receipt] = {}
        ends = self._ends(None)
        for number, receipt in sorted(receipts.items()):
            is_next = number == 0 or (number - 1 in found and self.is_joined(found[number - 1]))
            for made, part in zip(self._formats, receipt.files, strict=True):
                path = part_path(self.folder, number, made.extension)
                if part.start is not None:
                    path = self.files[made.extension]
                    if not is_next or part.start != ends.get(made.extension):
                        break
                if not self._has_offsets(number, part) or not _has_digest(path, part):
                    break
            else:
                found[number] = receipt
                ends = self._ends(receipt) if self.is_joined(receipt) else ends
        return found

    def _has_offsets(self, number: int, part: PartInfo) -> bool:
        path = part_path(self.folder, number, part.extension).with_suffix(".idx")
        with contextlib.suppress(OSError, CorruptDataError):
            return digest_file(path) == part.offsets_digest
        return False

    def drop(self, but: set[int]) -> None:
        """Remove everything that other parts have left."""
        kept = {f"{number:05d}" for number in but}
        for path in self.folder.iterdir():
            if path.name.partition(".")[0] not in kept:
                path.unlink(missing_ok=True)  # a worker of a driver that was killed may clear up, too

    def disown(self) -> None:
        """Replace the files by copies of them: a process that still writes to them then does no harm."""
        for path in self.files.values():
            if path.exists():
                copy = path.with_suffix(f".{os.getpid()}.tmp")
                shutil.copyfile(path, copy)
                os.replace(copy, path)

    def seal(self, *, is_alone: bool = True) -> Sealed:
        """Complete and flush the files and their offsets, once all parts are done, and put together their inputs.

        Args:
            is_alone: whether no other process of this run can be at the shard: then the lock may still be with a child
                that a worker has left behind, which does no harm.

        Raises:
            DamagedPartError: a part, or its offsets, differ from its receipt; the driver has it made again.
            OutputLockedError: another process keeps the shard, or belongs to another run.
        """
        with self.held(wait_s=_WAIT_S if is_alone else _SEAL_WAIT_S) as is_held:
            if is_held is False and not is_alone:
                raise OutputLockedError(
                    f"another process has been at {self.folder} for {_SEAL_WAIT_S:.0f} s; end it, and run again to "
                    "resume"
                )
            return self.seal_held()

    def seal_held(self) -> Sealed:
        """Do what `seal` does, while the lock is held."""
        receipts: list[Receipt] = []
        ends = self._ends(None)
        for number in range(self._num_parts):
            receipt = self.receipt(number)
            if receipt is None:
                raise DamagedPartError(number, f"{self.folder} holds no receipt of it")
            if not self.is_joined(receipt):
                receipt = self._join(receipt, ends)
            elif any(file.start != ends[file.extension] for file in receipt.files if file.extension in ends):
                raise DamagedPartError(number, f"its receipt says {receipt.files}, where {ends} is expected")
            ends = self._ends(receipt)
            for extension, end in ends.items():
                if _size(self.files[extension]) < end:
                    raise DamagedPartError(number, f"{self.files[extension]} ends before byte {end}")
            receipts.append(receipt)
        files = tuple(self._sealed(made, receipts, ends) for made in self._formats)
        num_records = sum(receipt.num_records for receipt in receipts)
        return Sealed(self._shard, files, num_records, self._inputs_together(receipts))

    def _inputs_together(self, receipts: Sequence[Receipt]) -> str | None:
        """Write what the input files of all parts held, and return its digest.

        Returns:
            None where rows have no input files, or a part has not left what its receipt says.
        """
        found = []
        for receipt in receipts:
            part = read_inputs(inputs_path(self.folder, receipt.number))
            if not len(part) or len(part) % receipt.num_rows or content_digest(part) != receipt.inputs:
                return None
            found.append(part.tobytes())
        data = b"".join(found)
        self.check_run()
        replace_file(inputs_of_shard(self._mark.parent, self._shard), data)
        return content_digest(np.frombuffer(data, INPUT))

    def _sealed(self, made: ShardFormat, receipts: Sequence[Receipt], ends: Mapping[str, int]) -> SealedFile:
        path = self.files[made.extension]
        if made.joins_parts:
            mine = [receipt.file_of(made.extension) for receipt in receipts]
            with open(path, "rb") as file:
                trailer = made.trailer(file, [(part.start or 0, part.num_bytes) for part in mine])
            parts = [FilePart(part.num_bytes, part.digest) for part in mine]
            parts += [FilePart(len(trailer), xxhash.xxh3_128_hexdigest(trailer))] if trailer else []
            lines = self._lines(receipts, made)
            self.check_run()
            with _opened(path, ends[made.extension]) as file:
                write_all(file, memoryview(trailer))
        else:
            lines, trailer = self._assembled(made, receipts).text_blocks(), b""
            parts = [FilePart(_size(path), digest_file(path))]
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            head, tail = ends_of(file, sum(part.num_bytes for part in parts), len(trailer))
        offsets, num_bytes = xxhash.xxh3_128(), 0
        with commit(self.index_files[made.extension]) as index:
            for text in lines:
                index.write(text)
                offsets.update(text)
                num_bytes += len(text)
        if made.name == "webdataset":
            prepare_index(path, index_ahead(path.parent, f"{self._shard}.{made.extension}", tree_checksum(parts)))
        return SealedFile(made.extension, tuple(parts), head, tail, FilePart(num_bytes, offsets.hexdigest()))

    def _lines(self, receipts: Sequence[Receipt], made: ShardFormat) -> Iterator[bytes]:
        """Yield the text of the offsets in the shard, one part at a time: those of a million records take 16 MB."""
        start = 0
        for receipt in receipts:
            yield from self._offsets(receipt, made).shifted(start).text_blocks()
            start += receipt.file_of(made.extension).num_bytes

    def _assembled(self, made: ShardFormat, receipts: Sequence[Receipt]) -> Offsets:
        path = self.files[made.extension]
        self.check_run()
        path.unlink(missing_ok=True)  # the assembler of an attempt that failed may still hold it, and finish it
        with contextlib.closing(made.assembler(path)) as assembler:
            for receipt in receipts:
                part, expected = part_path(self.folder, receipt.number, made.extension), receipt.file_of(made.extension)
                with _naming_part(receipt.number):
                    # Before it is read: the reader of record batches may crash on damaged ones.
                    _compare(digest_file(part), expected.digest, part)
                    self._offsets(receipt, made)
                    assembler.add(part)
            return assembler.finish()

    def _offsets(self, receipt: Receipt, made: ShardFormat) -> Offsets:
        with _naming_part(receipt.number):
            offsets = read_offsets(self.folder, receipt.number, receipt.file_of(made.extension))
            if len(offsets) != receipt.num_records:
                raise CorruptDataError(f"it has {len(offsets)} offsets, its receipt says {receipt.num_records}")
            return offsets

    def _ends(self, receipt: Receipt | None) -> dict[str, int]:
        """Return where a joined part ends in each file that joins parts; the beginning for None."""
        found = {}
        for place, made in enumerate(self._formats):
            if made.joins_parts:
                file = None if receipt is None else receipt.files[place]
                found[made.extension] = 0 if file is None else (file.start or 0) + file.num_bytes
        return found

    def _reaches(self, ends: Mapping[str, int]) -> bool:
        return all(not end or _size(self.files[extension]) >= end for extension, end in ends.items())

    def _join(self, receipt: Receipt, ends: Mapping[str, int]) -> Receipt:
        """Copy a part that lies apart onto the end of each file, and note in its receipt where it is now."""
        self.check_run()
        files = []
        for file in receipt.files:
            if file.extension in ends:
                with _naming_part(receipt.number):
                    self._copy(receipt.number, file, ends[file.extension])
                files.append(dataclasses.replace(file, start=ends[file.extension]))
            else:
                files.append(file)
        joined = dataclasses.replace(receipt, files=tuple(files))
        write_receipt(self.folder, joined)
        for extension in ends:
            part_path(self.folder, receipt.number, extension).unlink(missing_ok=True)
        return joined

    def _copy(self, number: int, part: PartInfo, end: int) -> None:
        """Append the file of a part to that of the shard, and compare its bytes with the receipt on the way.

        The digest is why this is not left to `copy_file_range`: it costs 0.04 ms per MB where the copy costs 0.3, and
        finds the bit that memory or disk flipped since the worker wrote the part.
        """
        path, target = part_path(self.folder, number, part.extension), self.files[part.extension]
        if end == 0 and self._is_linked(path, target, part):
            return
        digest = xxhash.xxh3_128()
        buffer = bytearray(_COPY_BYTES)
        view = memoryview(buffer)
        with open(path, "rb", buffering=0) as source, _opened(target, end) as file:
            while count := source.readinto(buffer):
                digest.update(view[:count])
                write_all(file, view[:count])
        _compare(digest.hexdigest(), part.digest, path)

    def _is_linked(self, path: pathlib.Path, target: pathlib.Path, part: PartInfo) -> bool:
        """Link the file of the first part as that of the shard; return False where the disk has no links."""
        _compare(digest_file(path), part.digest, path)
        target.parent.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:
            return False
        return True


def _lock(descriptor: int) -> bool | None:
    """Return whether this process now has the lock; None where the file system has no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


class _GrowingFile(io.FileIO):
    """A shard's file, opened at its end; the disk begins to take the bytes while later ones are made.

    Otherwise the flush at the end waits for all of them, and a processor with it. Only whole pieces of `_FLUSH_BYTES`,
    counted from the start of the file, are sent, so that parts of a few bytes do not become writes of a few bytes.
    """

    def write(self, data: Any, /) -> int:
        taken = super().write(data)
        end = self.tell()
        start, sent = (end - taken) // _FLUSH_BYTES * _FLUSH_BYTES, end // _FLUSH_BYTES * _FLUSH_BYTES
        if sent > start and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # it is a hint
                # Linux starts to write the range, does not wait, and keeps pages that are not yet written.
                os.posix_fadvise(self.fileno(), start, sent - start, os.POSIX_FADV_DONTNEED)
        return taken


def _opened(path: pathlib.Path, end: int) -> BinaryIO:
    """Open a growing file at its end, and cut off what follows."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
        return cast("BinaryIO", _GrowingFile(descriptor, "wb"))
    except BaseException:
        os.close(descriptor)
        raise


def _has_digest(path: pathlib.Path, part: PartInfo) -> bool:
    """Return whether a part is at its place in the growing file, or all that its own file holds."""
    with contextlib.suppress(OSError, CorruptDataError):
        behind = path.stat().st_size - (part.start or 0) - part.num_bytes
        if behind == 0 or (behind > 0 and part.start is not None):
            return digest_file(path, start=part.start or 0, num_bytes=part.num_bytes) == part.digest
    return False


def _size(path: pathlib.Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _naming_part(number: int) -> Iterator[None]:
    """Turn an error about a file of a part into one that carries the number of the part."""
    try:
        yield
    except DamagedPartError:
        raise
    except (CorruptDataError, FileNotFoundError) as error:
        raise DamagedPartError(number, str(error)) from error


def _compare(digest: str, expected: str, path: pathlib.Path) -> None:
    if digest != expected:
        raise CorruptDataError(f"{path} has the digest {digest}, its receipt says {expected}")


# ---------------------------------------------------------------- writing a part


class PartWriter:
    """Writes the records of a part, each once in every format. Used as a context manager.

    Args:
        work: the `.datamat` folder.
        spec: the part.
        formats: formats that it is written in.
        columns: kinds of the columns of the records.
        run: mark of the run; "" for a part that belongs to none.
        appends: whether the part may go straight into the shard's files. An engine that may make a call twice at once
            must not append.
    """

    def __init__(
        self,
        work: pathlib.Path,
        spec: PartSpec,
        formats: Sequence[ShardFormat],
        columns: Mapping[str, Kind],
        run: str = "",
        *,
        appends: bool = False,
    ) -> None:
        self._growing = GrowingShard(work, spec.shard, spec.fingerprint, formats, spec.num_parts, run)
        self._folder = self._growing.folder
        self._spec = spec
        self._formats = formats
        self._columns = columns
        self._appends = appends and bool(run) and self._growing.joins_parts
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PartWriter:
        self._started = time.perf_counter()
        # Not its parents: a run whose output was removed must not bring the folder back.
        self._folder.parent.mkdir(exist_ok=True)
        self._folder.mkdir(exist_ok=True)
        with self._stack:
            self._lock = self._stack.enter_context(contextlib.ExitStack())
            ends = self._end_before()
            self._files = [self._stack.enter_context(self._file(made, ends)) for made in self._formats]
            self._writers = [
                made.writer(file, self._columns)  # type: ignore[arg-type]  # `write` is enough
                for made, file in zip(self._formats, self._files, strict=True)
            ]
            self._stack = self._stack.pop_all()
        return self

    def _end_before(self) -> dict[str, int]:
        """Return where the part goes in the shard's files, whose lock is then held; {} where it must lie apart."""
        number = self._spec.number
        if not self._appends or (number and not self._growing.is_done(number - 1)):
            return {}
        if self._lock.enter_context(self._growing.held()):
            self._growing.check_run()
            ends = self._growing.end_before(number)
            if ends is not None:
                return ends
        self._lock.close()
        return {}

    def _file(self, made: ShardFormat, ends: Mapping[str, int]) -> PartFile:
        if made.extension in ends:
            return PartFile(self._growing.files[made.extension], start=ends[made.extension])
        return PartFile(part_path(self._folder, self._spec.number, made.extension))

    def append(self, record: Record) -> None:
        """Append one record; raises `SchemaError` where it does not match its columns."""
        for writer in self._writers:
            writer.append(record)

    def append_block(self, columns: Block) -> None:
        """Append n records given column by column; raises `SchemaError` as `append` does."""
        for writer in self._writers:
            writer.append_block(columns)

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def check_run(self) -> None:
        """Raise `OutputLockedError` where another run has begun since this one."""
        self._growing.check_run()

    def first(self) -> Receipt | None:
        """Return the receipt of the same call in another worker, where an engine made it twice and that one is done.

        The first that completes a part has it: nobody writes to it again.
        """
        number = self._spec.number
        found = self._growing.receipt(number)
        if found is None or not found.is_for(self._spec):
            return None
        if not self._growing.is_joined(found) and number not in self._growing.whole({number: found}):
            return None
        return dataclasses.replace(found, is_repeated=True)

    def finish(self, outcome: Outcome, busy_s: Callable[[], float]) -> Receipt:
        """Complete the part and return its receipt, which is also on disk.

        Parts that lie apart behind it are then joined to it; if the shard lacks none, it is sealed.

        Args:
            outcome: results of its rows.
            busy_s: returns the processor seconds that the part has taken so far.
        """
        with contextlib.nullcontext() if self._appends else self._growing.held(wait_s=_SEAL_WAIT_S):
            self._growing.check_run()  # its file may have been replaced meanwhile, see `disown`
            if not self._appends and (first := self.first()):
                return first
            receipt = self._receipt(outcome, busy_s)
            write_receipt(self._folder, receipt)
        sealed = self._join_others() if self._appends else None
        return dataclasses.replace(
            receipt,
            undeclared=outcome.undeclared,
            memos=outcome.memos,
            remarks=tuple(sorted(outcome.remarks)),
            sealed=sealed,
            busy_s=busy_s(),
        )

    @property
    def _is_appended(self) -> bool:
        return any(file.start is not None for file in self._files)

    def _receipt(self, outcome: Outcome, busy_s: Callable[[], float]) -> Receipt:
        spec, num_records = self._spec, self._writers[0].num_records
        files = []
        for made, file, writer in zip(self._formats, self._files, self._writers, strict=True):
            lines = writer.finish().to_text().encode()
            file.finish()
            replace_file(part_path(self._folder, spec.number, made.extension).with_suffix(".idx"), lines)
            offsets_digest = xxhash.xxh3_128_hexdigest(lines)
            files.append(PartInfo(made.extension, file.num_bytes, file.hexdigest(), offsets_digest, file.start))
        return Receipt(
            spec.shard,
            spec.number,
            spec.start,
            spec.stop,
            spec.fingerprint,
            num_records,
            tuple(files),
            outcome.keys.hexdigest(),
            busy_s(),
            time.perf_counter() - self._started,
            outcome.num_done,
            tuple(outcome.failed),
            tuple(outcome.retried),
            tuple(outcome.dropped),
            outcome.inputs,
            outcome.input_times,
            outcome.statistics,
        )

    def _join_others(self) -> Sealed | None:
        """Join the parts that lie apart behind this one, and seal the shard if it is now complete."""
        growing, number = self._growing, self._spec.number
        with contextlib.suppress(DamagedPartError):  # the driver then has the shard sealed, and learns of it
            if self._is_appended:
                reached = growing.join_from(number + 1)
                if reached == self._spec.num_parts:
                    return growing.seal_held()
                self._lock.close()
            else:
                reached = number
            # Meanwhile another worker may have completed a part: whoever sees both receipts joins it.
            while growing.is_done(reached):
                with growing.held() as is_held:
                    if not is_held:
                        break
                    if growing.end_before(reached) is None:
                        break
                    reached = growing.join_from(reached)
                    if reached == self._spec.num_parts:
                        return growing.seal_held()
        return None


class PartFile:
    """Where the bytes of a part go in one format: a binary file that digests what goes through it.

    Args:
        path: name of the part's own file when it is complete; or, with `start`, the growing file of the shard.
        start: first byte of the part in the growing file.

    Attributes:
        num_bytes: number of bytes written.
        start: first byte of the part in the growing file; None for a file of its own.
    """

    def __init__(self, path: pathlib.Path, *, start: int | None = None) -> None:
        self._path = path
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0
        self.start = start

    def __enter__(self) -> PartFile:
        if self.start is not None:
            self._file = _opened(self._path, self.start)
        else:
            self._temporary = self._path.with_suffix(temporary_suffix())
            self._file = open(self._temporary, "wb", buffering=0)
        return self

    def write(self, data: Buffer) -> int:
        """Write all of `data`; the file is unbuffered because the writers of formats buffer."""
        self._digest.update(data)
        write_all(self._file, memoryview(data))
        self.num_bytes += len(memoryview(data))
        return len(memoryview(data))

    def hexdigest(self) -> str:
        """Return the digest of the bytes so far."""
        return self._digest.hexdigest()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is not None and self.start is None:
            self._temporary.unlink(missing_ok=True)

    def finish(self) -> None:
        """Name the file of a part that lies apart."""
        if self.start is None:
            os.replace(self._temporary, self._path)


# ---------------------------------------------------------------- a shard and the driver
#
# What the driver does for a shard: it takes over what earlier runs left, collects receipts, and publishes.
#
# A part counts once every format has it. Both files of a format are flushed before they get their names. No name below
# `.datamat` ends like that of a finished shard, so a glob that looks into hidden folders skips them.


class ShardBuilder:
    """Brings a shard from its plan to its names.

    Args:
        work: `.datamat` folder of the output.
        output: the folder of the finished shards.
        spec: shard to build, with its parts.
        formats: formats that the shard is written in.
        inputs: knows whether input files have changed; None where rows have none.
    """

    def __init__(
        self,
        work: pathlib.Path,
        output: pathlib.Path,
        spec: ShardSpec,
        formats: Sequence[ShardFormat],
        inputs: InputFiles | None = None,
    ) -> None:
        self.spec = spec
        self._formats = formats
        self._inputs = inputs
        self._resumed: frozenset[int] = frozenset()
        self._is_made_now = False
        self._inputs_file = inputs_of_shard(work / "shards", spec.name)
        self._growing = GrowingShard(work, spec.name, spec.fingerprint, formats, len(spec.parts))
        self._entries = work / "shards"
        self._held = self._entries / HELD / f"{spec.name}.json"
        self._output = output
        self._names = file_names(spec.name, [made.extension for made in formats])
        self._receipts: dict[int, Receipt] = {}

    def finished(self) -> ShardFiles | None:
        """Return the files of the shard if an earlier run finished it, intact, from the same rows and options."""
        files = self.previous()
        if files is None or not self._is_mine(files):
            return None
        with contextlib.suppress(OSError):
            if all(self._is_finished(info) for info in files):
                return files
        return None

    def _is_finished(self, info: ShardInfo) -> bool:
        """Return whether a file and its offsets match the entry; name them if nothing else is left to do."""
        entry = self._entries / f"{self.spec.name}.json"
        if not _holds(self._output / info.file, info, entry):
            if not _holds(self._growing.files[_extension(info)], info, entry):
                return False
            self._name(info)  # killed between the entry and the names
        return _has_offsets(self._output / info.index_file, info)

    def _is_mine(self, files: ShardFiles) -> bool:
        """Return whether files have the present formats, rows and options, and the same input files."""
        if [(info.file, info.index_file) for info in files] != self._names:
            return False
        if any(info.fingerprint != self.spec.fingerprint for info in files):
            return False
        return self._inputs is None or self._inputs.stand(self.spec, files)

    def previous(self) -> ShardFiles | None:
        """Return the files of the shard of this name that an earlier run finished, whatever it made them from.

        Those of the present formats come first, in their order.
        """
        files = read_entry(self._entries / f"{self.spec.name}.json")
        order = {file: number for number, (file, _) in enumerate(self._names)}
        return files and tuple(sorted(files, key=lambda info: order.get(info.file, len(order))))

    # ------------------------------------------------------------ parts

    def resume(self, *, with_failed: bool = True) -> list[Receipt]:
        """Resume from what an earlier run left of the present plan, and return its receipts.

        A part counts if its bytes, in each format, have the digest of its receipt, either in its own file or in that
        of the shard. What else lies in the folder of the parts is removed.

        Args:
            with_failed: whether to count parts in which a row failed.
        """
        if self._growing.folder.is_dir():
            with self._growing.held(wait_s=_WAIT_S) as is_held:
                if not is_held:  # by a worker that outlives its driver, or by a child that it has forked
                    self._growing.disown()
                known = {receipt.number: receipt for receipt in self.receipts() if with_failed or not receipt.failed}
                self._receipts = self._growing.whole(known)
                self._growing.drop(set(self._receipts))
        self._resumed = frozenset(self._receipts)
        return list(self._receipts.values())

    def forget(self, damaged: DamagedPartError) -> list[PartSpec]:
        """Fall back to the parts that are intact; return those that have to be made again.

        Only while no worker is at the shard. Parts behind the damaged one that are in the shard's file go with it.
        """
        before = self._receipts
        present = {number: self._growing.receipt(number) for number in before}
        self._receipts = {
            number: receipt
            for number, receipt in present.items()
            if receipt and number != damaged.number and (number < damaged.number or not self._growing.is_in(receipt))
        }
        self._growing.drop(set(self._receipts))
        return [part for part in self.spec.parts if part.number in before.keys() - self._receipts.keys()]

    def receipts(self) -> list[Receipt]:
        """Return the receipts of the present plan that are on disk, even of damaged parts."""
        return [receipt for part in self.spec.parts if (receipt := self._read_receipt(part))]

    def _read_receipt(self, part: PartSpec) -> Receipt | None:
        receipt = self._growing.receipt(part.number)
        if receipt is None or not receipt.is_for(part) or receipt.num_lost:
            return None
        inputs = (receipt.inputs, receipt.input_times)
        if self._inputs is not None and not self._inputs.are_same(part.start, part.stop, *inputs):
            return None
        return receipt

    def add(self, receipt: Receipt) -> None:
        """Add one more finished part."""
        # With texts that all parts share: each arrives with its own.
        shared = dataclasses.replace(receipt, shard=self.spec.name, fingerprint=self.spec.fingerprint, sealed=None)
        self._receipts[receipt.number] = shared

    def taken(self) -> list[Receipt]:
        """Return the receipts of the parts that are done."""
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
        self,
        sealed: Sealed,
        judge: Callable[[ShardFiles], ShardFiles] | None = None,
        remove: Callable[[pathlib.Path], None] = remove_folder,
    ) -> ShardFiles:
        """Name the files of the shard and their offsets, and have the folder of its parts removed.

        Args:
            sealed: the files, complete and flushed.
            judge: takes the entries of the files and returns them, or raises where these must not get their names.
            remove: removes a folder, now or later: nobody looks into it any more.
        """
        infos = self._infos(sealed, judge)
        self._drop_other_formats(infos)
        write_entry(self._entries, infos)
        for info in infos:
            self._name(info)
        self._let_parts_go(remove)
        return infos

    def hold(
        self,
        sealed: Sealed,
        judge: Callable[[ShardFiles], ShardFiles] | None = None,
        remove: Callable[[pathlib.Path], None] = remove_folder,
    ) -> ShardFiles:
        """Do what `publish` does, without names: `publish_held` gives them once the old files are gone."""
        infos = self._infos(sealed, judge)
        self._held.parent.mkdir(parents=True, exist_ok=True)
        write_entry(self._held.parent, infos)
        self._let_parts_go(remove)
        return infos

    def _let_parts_go(self, remove: Callable[[pathlib.Path], None]) -> None:
        """Move the folder of the parts aside, and have it removed.

        Its new name is its own: whoever removes it late, or twice, removes nothing of a later run.
        """
        self._receipts = {}
        folder = self._growing.folder
        aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}{_ASIDE}")
        with contextlib.suppress(OSError):
            os.rename(folder, aside)
            remove(aside)

    def held(self) -> ShardFiles | None:
        """Return the files of a shard that waits for its names, of the same rows and options; drop any other."""
        files = read_entry(self._held)
        if files is None:
            return None
        with contextlib.suppress(OSError):
            if self._is_mine(files) and all(
                _has_offsets(self._growing.index_files[_extension(info)], info)
                and _holds(self._growing.files[_extension(info)], info, self._held)
                for info in files
            ):
                return files
        self._held.unlink()
        return None

    def unname(self) -> None:
        """Have a finished shard wait whose files have no names yet: a kill came between its entry and its names.

        Meanwhile shards of another plan may have become visible, beside which it must not appear.
        """
        files = read_entry(entry := self._entries / f"{self.spec.name}.json")
        if files is None or not self._is_mine(files) or self._held.exists():
            return
        if not any((self._output / info.file).exists() or (self._output / info.index_file).exists() for info in files):
            self._held.parent.mkdir(parents=True, exist_ok=True)
            publish(entry, self._held)

    def publish_held(self, files: ShardFiles) -> None:
        """Name the files of a shard that waits; `finished` completes what a kill interrupts."""
        publish(self._held, self._entries / f"{self.spec.name}.json")
        for info in files:
            self._name(info)

    def discard(self) -> None:
        """Remove the files and parts of a shard that will not be published."""
        for path in (*self._growing.files.values(), *self._growing.index_files.values()):
            path.unlink(missing_ok=True)
        shutil.rmtree(self._growing.folder, ignore_errors=True)

    def _name(self, info: ShardInfo) -> None:
        """Name a file and its offsets, the offsets first."""
        index = self._growing.index_files[_extension(info)]
        if index.exists():
            publish(index, self._output / info.index_file)
        publish(self._growing.files[_extension(info)], self._output / info.file)

    def inputs(self) -> np.ndarray:
        """Return `INPUT` (rows, file fields): the content of the input files when the shard was made."""
        if self._inputs is None:
            return np.zeros((self.spec.num_rows, 0), INPUT)
        if not self._is_made_now:
            return self._inputs.records(self.spec.start, self.spec.stop)
        # Not `read_inputs`: this run has written it, and a disk that fails now must be said to.
        return np.frombuffer(self._inputs_file.read_bytes(), INPUT).reshape(self.spec.num_rows, -1)

    def _put_inputs_together(self, receipts: Sequence[Receipt], digest: str | None) -> str:
        """Write the content of the input files of all parts, unless a worker has, and return its digest for the entry.

        Args:
            receipts: receipts of all parts, in order.
            digest: what the worker that sealed the shard has found.
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
        """Return the content of a part's input files; for a part of an earlier run, with their present times."""
        found = read_inputs(inputs_path(self._growing.folder, receipt.number))
        part = found.reshape(receipt.num_rows, -1) if len(found) and not len(found) % receipt.num_rows else found
        if receipt.number not in self._resumed and content_digest(part) == receipt.inputs:
            return part
        return inputs.records(receipt.start, receipt.stop)

    def _infos(self, sealed: Sealed, judge: Callable[[ShardFiles], ShardFiles] | None) -> ShardFiles:
        """Return what the entry will list, once `judge` has accepted it."""
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
            path = self._growing.files[_extension(info)]
            if path.stat().st_size != info.num_bytes:
                raise CorruptDataError(
                    f"{path} holds {path.stat().st_size} bytes, its receipts say {info.num_bytes}; something else "
                    f"writes to it: end that, remove {self._entries.parent} and run again"
                )
        return infos if judge is None else judge(infos)

    def _drop_other_formats(self, infos: ShardFiles) -> None:
        """Remove the files of the shard in formats that are no longer wanted."""
        mine = {name for info in infos for name in (info.file, info.index_file)}
        for info in self.previous() or ():
            for name in {info.file, info.index_file} - mine:
                (self._output / name).unlink(missing_ok=True)


def _extension(info: ShardInfo) -> str:
    return info.file.partition(".")[2]


def _has_offsets(path: pathlib.Path, info: ShardInfo) -> bool:
    return is_stand_in(path) or info.has_offsets(path)


def _holds(path: pathlib.Path, info: ShardInfo, entry: pathlib.Path) -> bool:
    """Return whether a file matches its entry; it is read only if something has written to it since."""
    with contextlib.suppress(OSError, CorruptDataError):
        return is_older(path, entry, info) or info.is_whole(path)
    return False
