"""The growing files of a shard; one process at a time, which holds their lock, writes to them.

    receipts 0 .. k-1 give the positions of their parts in the file  ──> part k goes to the end of part k-1
    bytes beyond that end were left by a worker that died            ──> truncated

A receipt is a checkpoint: it is written once the bytes of its part are in the file, and bytes after the last receipt
do not count. So an append may be killed at any byte, and another worker can repeat it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import shutil
import time
from typing import TYPE_CHECKING, cast

import numpy as np
import xxhash

from datamat.directory.files import commit, digest_file
from datamat.directory.manifest import (
    FilePart,
    ends_of,
    file_names,
    growing_path,
    tree_checksum,
)
from datamat.directory.sidecars.indexes import index_ahead, prepare_index
from datamat.errors import CorruptDataError, OutputError, OutputLockedError
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
    write_receipt,
)
from datamat.sources.store import INPUT

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any, BinaryIO

    from datamat.formats import Offsets, ShardFormat

_COPY_BYTES = 1 << 20
_FLUSH_BYTES = 8 << 20  # larger writes are no faster
_MOST_WALKED = 64  # consecutive separate parts past which a worker still looks for the end of the file
_POLL_S = 0.02
WAIT_S = 3.0  # for a process that is still writing: workers of a killed program end within seconds
SEAL_WAIT_S = 600.0  # for the same call, which another executor may run twice at the same time


def inputs_of_shard(shards: pathlib.Path, name: str) -> pathlib.Path:
    """Return the file that records the content of a shard's input files."""
    return shards / f"{name}.inputs"


class GrowingShard:
    """The files of an unfinished shard.

    Args:
        work: the `.datamat` folder.
        name: name of the shard.
        fingerprint: fingerprint of the shard: receipts with another one do not count.
        formats: formats of the shard.
        num_parts: number of its parts.
        run: mark of the run that writes to them, as returned by `begin_run`; "" for reading only.

    Attributes:
        names: the final names of its file and offsets in each format.
        files, index_files: where they grow, by extension.
        joins_parts: whether any format does.
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
        self.joins_parts = any(made.joins_parts for made in formats)
        self._put: dict[int, Receipt] = {}  # of joined parts, while this process holds the lock: no other changes them
        self._mark = work / "shards" / "run"
        self._shard = name
        self.folder = part_folder(work, name)
        self.names = file_names(name, [made.extension for made in formats])
        self.files = {
            made.extension: growing_path(work / "shards", file)
            for made, (file, _) in zip(formats, self.names, strict=True)
        }
        self.index_files = {
            made.extension: growing_path(work / "shards", index)
            for made, (_, index) in zip(formats, self.names, strict=True)
        }

    @contextlib.contextmanager
    def held(self, *, wait_s: float = 0.0) -> Iterator[bool | None]:
        """Hold the lock of the files for the block; the system releases it when the process ends.

        Yields False if another process keeps the lock, and None if the file system has no locks.

        Args:
            wait_s: seconds to wait for the lock.
        """
        import fcntl

        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            until = time.monotonic() + wait_s
            while (is_held := _lock(descriptor)) is False and time.monotonic() < until:
                time.sleep(_POLL_S)
            yield is_held
        finally:
            self._put.clear()
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for children that user code has forked and abandoned
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
        """Return the receipt of a part of this shard; None if there is none."""
        if number in self._put:
            return self._put[number]
        found = read_receipt(self.folder, number)
        if found is None or (found.number, found.fingerprint) != (number, self._fingerprint):
            return None
        has_formats = [file.extension for file in found.files] == [made.extension for made in self._formats]
        return found if has_formats else None

    def put(self, receipt: Receipt, offsets: bytes) -> None:
        """Write a receipt and the offsets behind it; requires the lock if the part is joined."""
        write_receipt(self.folder, receipt, offsets)
        if self.is_joined(receipt):
            self._put[receipt.number] = receipt

    def is_joined(self, receipt: Receipt) -> bool:
        """Return True if a part is in the file of every format that joins parts."""
        return all(
            file.start is not None for made, file in zip(self._formats, receipt.files, strict=True) if made.joins_parts
        )

    def end_before(self, number: int) -> dict[str, int] | None:
        """Return where a part begins in each file that joins parts, by extension, after its predecessors.

        Separate parts right before it are joined first. Requires the lock.

        Returns:
            None if its predecessors are not done, or do not match their receipts.
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
        if any(_size(self.files[extension]) < end for extension, end in ends.items()):
            return None
        try:
            for receipt in reversed(apart):
                ends = self._ends(self._join(receipt, ends))
        except DamagedPartError:  # reported to the driver when the shard is sealed
            return None
        return ends

    def join_from(self, number: int) -> int:
        """Join the separate parts after a joined one; return the number of the first missing part."""
        before = self.receipt(number - 1) if number else None
        ends = self._ends(before)
        while number < self._num_parts and (receipt := self.receipt(number)):
            ends = self._ends(receipt if self.is_joined(receipt) else self._join(receipt, ends))
            number += 1
        return number

    def is_done(self, number: int) -> bool:
        """Return True if a part has a receipt, whether valid or not."""
        return receipt_path(self.folder, number).exists()

    def whole(self, receipts: Mapping[int, Receipt]) -> dict[int, Receipt]:
        """Return the receipts whose parts are on disk, in every format, with the right digests.

        Parts in the shard's files count up to the first damaged one.
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
                if not self._has_offsets(receipt, part.extension) or not _has_digest(path, part):
                    break
            else:
                found[number] = receipt
                ends = self._ends(receipt) if self.is_joined(receipt) else ends
        return found

    def _has_offsets(self, receipt: Receipt, extension: str) -> bool:
        with contextlib.suppress(OSError, CorruptDataError):
            read_offsets(self.folder, receipt, extension)
            return True
        return False

    def drop(self, but: set[int]) -> None:
        """Remove everything of other parts."""
        kept = {f"{number:05d}" for number in but}
        for path in self.folder.iterdir():
            if path.name.partition(".")[0] not in kept:
                path.unlink(missing_ok=True)  # a worker of a killed driver may be cleaning up, too

    def disown(self) -> None:
        """Replace the files by copies, so that a process that is still writing to them does no harm."""
        for path in self.files.values():
            if path.exists():
                copy = path.with_suffix(f".{os.getpid()}.tmp")
                shutil.copyfile(path, copy)
                os.replace(copy, path)

    def seal(self, *, is_alone: bool = True) -> Sealed:
        """When all parts are done, complete and flush the files and their offsets, and combine their inputs.

        Args:
            is_alone: whether no other process of this run can be working on the shard: then the lock may be held by
                an abandoned child of a worker, which does no harm.

        Raises:
            DamagedPartError: a part, or its offsets, differ from its receipt; the driver rebuilds it.
            OutputLockedError: another process holds the shard, or it belongs to another run.
        """
        with self.held(wait_s=WAIT_S if is_alone else SEAL_WAIT_S) as is_held:
            if is_held is False and not is_alone:
                raise OutputLockedError(
                    f"another process has been at {self.folder} for {SEAL_WAIT_S:.0f} s; end it, and run again to "
                    "resume"
                )
            return self.seal_held()

    def seal_held(self) -> Sealed:
        """Seal the shard, with the lock held; see `seal`."""
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
        """Write the content of the input files of all parts, and return its digest.

        Returns:
            None if rows have no input files, or a part's record of them does not match its receipt.
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
            with open_at(path, ends[made.extension]) as file:
                write_all(file, memoryview(trailer))
        else:
            lines, trailer = self._assembled(made, receipts).text_blocks(), b""
            parts = [FilePart(_size(path), digest_file(path))]
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            head, tail = ends_of(file, sum(part.num_bytes for part in parts), len(trailer))
        offsets, num_bytes = xxhash.xxh3_128(), 0
        with commit(self.index_files[made.extension], flushes_name=False) as index:  # the entry's is flushed later
            for text in lines:
                index.write(text)
                offsets.update(text)
                num_bytes += len(text)
        if made.name == "webdataset":
            prepare_index(path, index_ahead(path.parent, f"{self._shard}.{made.extension}", tree_checksum(parts)))
        return SealedFile(made.extension, tuple(parts), head, tail, FilePart(num_bytes, offsets.hexdigest()))

    def _lines(self, receipts: Sequence[Receipt], made: ShardFormat) -> Iterator[bytes]:
        """Yield the text of the offsets in the shard, part by part: a million records take 16 MB."""
        start = 0
        for receipt in receipts:
            yield from self._offsets(receipt, made).shifted(start).text_blocks()
            start += receipt.file_of(made.extension).num_bytes

    def _assembled(self, made: ShardFormat, receipts: Sequence[Receipt]) -> Offsets:
        path = self.files[made.extension]
        self.check_run()
        path.unlink(missing_ok=True)  # the assembler of a failed attempt may still hold it, and finish it
        with contextlib.closing(made.assembler(path)) as assembler:
            for receipt in receipts:
                part, expected = part_path(self.folder, receipt.number, made.extension), receipt.file_of(made.extension)
                with _naming_part(receipt.number):
                    # Checked before it is read: the reader of record batches may crash on damaged data.
                    _compare(digest_file(part), expected.digest, part)
                    self._offsets(receipt, made)
                    assembler.add(part)
            return assembler.finish()

    def _offsets(self, receipt: Receipt, made: ShardFormat) -> Offsets:
        with _naming_part(receipt.number):
            offsets = read_offsets(self.folder, receipt, made.extension)
            if len(offsets) != receipt.num_records:
                raise CorruptDataError(f"it has {len(offsets)} offsets, its receipt says {receipt.num_records}")
            return offsets

    def _ends(self, receipt: Receipt | None) -> dict[str, int]:
        """Return where a joined part ends in each file that joins parts; the start of the files for None."""
        found = {}
        for place, made in enumerate(self._formats):
            if made.joins_parts:
                file = None if receipt is None else receipt.files[place]
                found[made.extension] = 0 if file is None else (file.start or 0) + file.num_bytes
        return found

    def _join(self, receipt: Receipt, ends: Mapping[str, int]) -> Receipt:
        """Append a separate part to each file, and record its position in its receipt."""
        self.check_run()
        files, offsets = [], b""
        for file in receipt.files:
            with _naming_part(receipt.number):
                offsets += read_offsets(self.folder, receipt, file.extension).to_bytes()
                if file.extension in ends:
                    self._copy(receipt.number, file, ends[file.extension])
            files.append(dataclasses.replace(file, start=ends.get(file.extension)))
        joined = dataclasses.replace(receipt, files=tuple(files))
        self.put(joined, offsets)
        for extension in ends:
            part_path(self.folder, receipt.number, extension).unlink(missing_ok=True)
        return joined

    def _copy(self, number: int, part: PartInfo, end: int) -> None:
        """Append the file of a part to that of the shard, comparing its bytes with the receipt.

        `copy_file_range` would not compute the digest, which costs 0.04 ms per MB, compared to 0.3 for the copy, and
        finds bits that memory or disk has flipped since the worker wrote the part.
        """
        path, target = part_path(self.folder, number, part.extension), self.files[part.extension]
        if end == 0 and self._is_linked(path, target, part):
            return
        digest = xxhash.xxh3_128()
        buffer = bytearray(_COPY_BYTES)
        view = memoryview(buffer)
        with open(path, "rb", buffering=0) as source, open_at(target, end) as file:
            while count := source.readinto(buffer):
                digest.update(view[:count])
                write_all(file, view[:count])
        _compare(digest.hexdigest(), part.digest, path)

    def _is_linked(self, path: pathlib.Path, target: pathlib.Path, part: PartInfo) -> bool:
        """Hard-link the file of the first part as that of the shard; return False if the disk has no links."""
        _compare(digest_file(path), part.digest, path)
        target.parent.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:
            return False
        return True


def _lock(descriptor: int) -> bool | None:
    """Try to take the lock; return True if this process has it, None if the file system has no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


class _GrowingFile(io.FileIO):
    """A shard's file, opened at its end, whose bytes are written back while later ones are made.

    Otherwise the final flush, and a core with it, would wait for all of them. Only whole blocks of `_FLUSH_BYTES`,
    counted from the start of the file, are written back, so that tiny parts do not cause tiny writes.
    """

    def write(self, data: Any, /) -> int:
        taken = super().write(data)
        end = self.tell()
        start, sent = (end - taken) // _FLUSH_BYTES * _FLUSH_BYTES, end // _FLUSH_BYTES * _FLUSH_BYTES
        if sent > start and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # only a hint
                # Linux starts writing the range without waiting, and keeps pages that are not written yet.
                os.posix_fadvise(self.fileno(), start, sent - start, os.POSIX_FADV_DONTNEED)
        return taken


def open_at(path: pathlib.Path, end: int) -> BinaryIO:
    """Open a growing file at its end, and truncate it there."""
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
    """Return True if a part is in its place in the growing file, or makes up its own file."""
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
    """Convert an error about a file of a part into one with the number of the part."""
    try:
        yield
    except DamagedPartError:
        raise
    except (CorruptDataError, FileNotFoundError) as error:
        raise DamagedPartError(number, str(error)) from error


def _compare(digest: str, expected: str, path: pathlib.Path) -> None:
    if digest != expected:
        raise CorruptDataError(f"{path} has the digest {digest}, its receipt says {expected}")
