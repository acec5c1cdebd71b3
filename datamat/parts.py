"""Parts on disk: what workers leave for the driver, and how shards grow out of them.

    .datamat/parts/SHARD/00003.part     bytes of the records of one part
                         00003.idx      their offsets in it
                         00003.json     the receipt, written last: a part without one does not count
    .datamat/shards/SHARD.EXT           the shard so far: its first parts, joined or assembled as the format asks
                    SHARD.json          of a finished shard: its entry for the manifest

Parts that are joined byte for byte leave the shard resumable in its middle. Where the format assembles its shards, the
parts stay until the shard is finished, and the next run assembles it anew.

Parts are not flushed to the disk: a receipt holds the digest of its part, and a part that a power cut tore does not
match it and is made again. Shards are flushed before they get their name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from typing import TYPE_CHECKING

import xxhash

from datamat.errors import CorruptDataError
from datamat.formats import Offsets
from datamat.ledger import FailedRow
from datamat.manifest import KeyDigest, ShardInfo
from datamat.storage import commit, commit_json, digest_file, fsync_folder, publish, read_json

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator
    from typing import Any

    from datamat.formats import Buffer, ShardAssembler, ShardFormat
    from datamat.plan import PartSpec, ShardSpec

__all__ = ["Outcome", "PartFile", "Receipt", "ShardAssembly", "part_folder"]

_COPY_BYTES = 1 << 20


@dataclasses.dataclass(slots=True)
class Outcome:
    """What has become of the rows of a part so far.

    Attributes:
        keys: digest of the keys of their records, in order.
        num_done: rows that gave all their records.
        failed: rows that gave none.
        retried: rows that gave theirs when they were tried again.
    """

    keys: KeyDigest = dataclasses.field(default_factory=KeyDigest)
    num_done: int = 0
    failed: list[FailedRow] = dataclasses.field(default_factory=list)
    retried: list[FailedRow] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """What a worker returns for a part: never pixels.

    Attributes:
        shard, number: which part.
        start, stop: its rows, as positions in the order of the plan.
        fingerprint: of the shard.
        num_records, num_bytes, digest: of the part's file (XXH3-128).
        keys: digest of the keys of its records, in order.
        busy_s: processor seconds that the worker spent on it.
        elapsed_s: seconds that it took.
        num_done: rows that gave all their records.
        failed: rows that gave none, and why.
        retried: rows that gave theirs only when they were tried again.
    """

    shard: str
    number: int
    start: int
    stop: int
    fingerprint: str
    num_records: int
    num_bytes: int
    digest: str
    keys: str
    busy_s: float
    elapsed_s: float
    num_done: int
    failed: tuple[FailedRow, ...] = ()
    retried: tuple[FailedRow, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the part."""
        return self.stop - self.start

    @property
    def num_lost(self) -> int:
        """Rows of which it tells nothing: none, unless something is wrong with datamat itself."""
        return self.num_rows - self.num_done - len({row.position for row in self.failed})

    @classmethod
    def from_json(cls, value: Any) -> Receipt:
        """Return the receipt that a part left; raises `TypeError` or `AttributeError` for anything else."""
        rows = {name: tuple(FailedRow(**row) for row in value.pop(name)) for name in ("failed", "retried")}
        return cls(**{**value, **rows})

    def is_for(self, spec: PartSpec) -> bool:
        """Tell whether this is the receipt of a part of the present plan."""
        mine = (self.shard, self.number, self.start, self.stop, self.fingerprint)
        return mine == (spec.shard, spec.number, spec.start, spec.stop, spec.fingerprint)


def part_folder(work: pathlib.Path, shard: str) -> pathlib.Path:
    """Return the folder of the parts of a shard."""
    return work / "parts" / shard


class PartFile:
    """A part being written: a binary file that hashes what goes through it.

    Args:
        work: the `.datamat` folder.
        spec: the part.
    """

    def __init__(self, work: pathlib.Path, spec: PartSpec) -> None:
        self._stem = part_folder(work, spec.shard) / f"{spec.number:05d}"
        self._spec = spec
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0

    def __enter__(self) -> PartFile:
        self._started = time.perf_counter()
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._stem.with_suffix(f".{os.getpid()}.tmp"), "wb", buffering=0)
        return self

    def write(self, data: Buffer) -> int:
        """Write all of `data`; the file is unbuffered because writers of formats buffer."""
        self._digest.update(data)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self.num_bytes += len(memoryview(data))
        return len(memoryview(data))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file.name)

    def finish(self, offsets: Offsets, outcome: Outcome, busy_s: float) -> Receipt:
        """Name the part's files and return the receipt, which is on the disk, too."""
        os.replace(self._file.name, self._stem.with_suffix(".part"))
        _replace(self._stem.with_suffix(".idx"), offsets.to_text().encode())
        spec = self._spec
        receipt = Receipt(
            spec.shard,
            spec.number,
            spec.start,
            spec.stop,
            spec.fingerprint,
            len(offsets),
            self.num_bytes,
            self._digest.hexdigest(),
            outcome.keys.hexdigest(),
            busy_s,
            time.perf_counter() - self._started,
            outcome.num_done,
            tuple(outcome.failed),
            tuple(outcome.retried),
        )
        _replace(self._stem.with_suffix(".json"), json.dumps(dataclasses.asdict(receipt)).encode())
        return receipt


class ShardAssembly:
    """A shard growing out of its parts, in their order, whatever order they come in.

    Args:
        work: the `.datamat` folder.
        output: the folder of the finished shards.
        spec: the shard.
        shard_format: its format.
    """

    def __init__(self, work: pathlib.Path, output: pathlib.Path, spec: ShardSpec, shard_format: ShardFormat) -> None:
        self.spec = spec
        self._folder = part_folder(work, spec.name)
        self._growing = work / "shards" / f"{spec.name}.{shard_format.extension}"
        self._entry = work / "shards" / f"{spec.name}.json"
        self._output = output
        self._final = output / self._growing.name
        self._index = output / f"{spec.name}.idx"
        self._format = shard_format
        self._assembler: ShardAssembler | None = None
        self._receipts: dict[int, Receipt] = {}
        self._joined = 0
        self._digest = xxhash.xxh3_128()

    def finished(self) -> ShardInfo | None:
        """Return the entry of a shard that an earlier run finished from the same rows and options, if it is whole."""
        with contextlib.suppress(OSError, ValueError, CorruptDataError):
            info = ShardInfo.from_json(read_json(self._entry))
            if info.fingerprint != self.spec.fingerprint or not self._index.exists():
                return None
            if _holds(self._final, info):
                return info
            if _holds(self._growing, info):  # killed between the entry and the name: only that is left to do
                publish(self._growing, self._final)
                return info
        return None

    def previous(self) -> ShardInfo | None:
        """Return the entry of the shard of this name that an earlier run finished, whatever it was made from."""
        with contextlib.suppress(OSError, ValueError, CorruptDataError):
            return ShardInfo.from_json(read_json(self._entry))
        return None

    def resume(self, *, with_failed: bool = True) -> list[Receipt]:
        """Take over what an earlier run left of the present plan, and return its receipts.

        A part counts if its bytes, in its own file or already joined to the shard, have the digest of its receipt.

        Args:
            with_failed: whether parts count in which a row failed.
        """
        known = {receipt.number: receipt for receipt in self.receipts() if with_failed or not receipt.failed}
        size = 0
        with contextlib.suppress(OSError):
            while receipt := known.get(self._joined):
                if digest_file(self._growing, start=size, num_bytes=receipt.num_bytes) != receipt.digest:
                    break
                size += receipt.num_bytes
                self._joined += 1
        if self._growing.exists():
            os.truncate(self._growing, size)
            self._hash_file(self._growing)
        for number, receipt in known.items():
            if number < self._joined or self._is_whole(receipt):
                self._receipts[number] = receipt
        self._join_next()
        return list(self._receipts.values())

    def receipts(self) -> list[Receipt]:
        """Return the receipts of the present plan that are on the disk, whether or not their parts are whole."""
        return [receipt for part in self.spec.parts if (receipt := self._read_receipt(part))]

    def add(self, receipt: Receipt) -> None:
        """Take one more finished part, and join what can be joined."""
        self._receipts[receipt.number] = receipt
        self._join_next()

    def taken(self) -> list[Receipt]:
        """Return the receipts of the parts that are done."""
        return list(self._receipts.values())

    @property
    def is_complete(self) -> bool:
        """Whether every part is joined."""
        return self._joined == len(self.spec.parts)

    def missing(self) -> Iterator[PartSpec]:
        """Yield the parts that are still to do."""
        return (part for part in self.spec.parts if part.number not in self._receipts)

    def publish(self) -> ShardInfo:
        """Flush the shard and its offsets, give them their names, and drop the parts.

        Raises:
            CorruptDataError: the shard does not hold what its receipts say.
        """
        receipts = [self._receipts[part.number] for part in self.spec.parts]
        offsets, num_bytes = self._end_file(receipts)
        keys = KeyDigest()
        for receipt in receipts:
            keys += KeyDigest(value=int(receipt.keys, 16), count=receipt.num_records)
        info = ShardInfo(
            file=self._final.name,
            split=self.spec.split,
            num_rows=sum(receipt.num_done + len(receipt.failed) for receipt in receipts),
            num_records=sum(receipt.num_records for receipt in receipts),
            num_bytes=num_bytes,
            checksum=self._digest.hexdigest(),
            key_digest=keys.hexdigest(),
            fingerprint=self.spec.fingerprint,
            num_failed=sum(len(receipt.failed) for receipt in receipts),
        )
        if self._growing.stat().st_size != info.num_bytes or len(offsets) != info.num_records:
            raise CorruptDataError(
                f"{self._growing} holds {self._growing.stat().st_size} bytes and {len(offsets)} offsets, its receipts "
                f"say {info.num_bytes} and {info.num_records}; remove {self._folder.parent.parent} and run again"
            )
        if (replaced := self.previous()) is not None and replaced.file != self._final.name:  # of another format
            (self._output / replaced.file).unlink(missing_ok=True)
        if self._entry.exists():  # of the shard that this one replaces: it would take the new index for its own
            self._entry.unlink()
            fsync_folder(self._entry.parent)
        with commit(self._index, through=self._growing.parent) as file:
            file.write(offsets.to_text().encode())
        with open(self._growing, "rb+") as file:
            os.fsync(file.fileno())
        commit_json(self._entry, info.to_json())
        publish(self._growing, self._final)
        shutil.rmtree(self._folder, ignore_errors=True)
        return info

    def _end_file(self, receipts: list[Receipt]) -> tuple[Offsets, int]:
        """Write what comes behind the records of the last part; return all offsets and the bytes of the shard."""
        if not self._format.joins_parts:
            offsets = self._assembling().finish()
            self._hash_file(self._growing)
            return offsets, self._growing.stat().st_size
        trailer = self._format.trailer
        with open(self._growing, "ab") as file:
            file.write(trailer)
        self._digest.update(trailer)
        parts = [(self._offsets(receipt), receipt.num_bytes) for receipt in receipts]
        return Offsets.joined(parts), sum(receipt.num_bytes for receipt in receipts) + len(trailer)

    def _assembling(self) -> ShardAssembler:
        """Return what makes the shard of its parts, which begins it anew."""
        if self._assembler is None:
            self._growing.parent.mkdir(parents=True, exist_ok=True)
            # A new file: the assembler of a run that failed in this process may still hold the old one, and end it.
            self._growing.unlink(missing_ok=True)
            self._assembler = self._format.assembler(self._growing)
        return self._assembler

    def _join_next(self) -> None:
        while receipt := self._receipts.get(self._joined):
            part = self._part_path(receipt.number)
            if not self._format.joins_parts:
                self._assembling().add(part)
            elif self._joined == 0:
                # The first part becomes the shard: nothing is copied where there is one part only.
                self._growing.parent.mkdir(parents=True, exist_ok=True)
                os.replace(part, self._growing)
                self._hash_file(self._growing)
            else:
                self._append(part)
                part.unlink()
            self._joined += 1

    def _append(self, part: pathlib.Path) -> None:
        buffer = bytearray(_COPY_BYTES)
        view = memoryview(buffer)
        with open(part, "rb", buffering=0) as source, open(self._growing, "ab", buffering=0) as target:
            while count := source.readinto(buffer):
                self._digest.update(view[:count])
                written = 0
                while written < count:
                    written += target.write(view[written:count])

    def _hash_file(self, path: pathlib.Path) -> None:
        buffer = bytearray(_COPY_BYTES)
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                self._digest.update(memoryview(buffer)[:count])

    def _read_receipt(self, part: PartSpec) -> Receipt | None:
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
            receipt = Receipt.from_json(read_json(self._folder / f"{part.number:05d}.json"))
            if receipt.is_for(part) and not receipt.num_lost and len(self._offsets(receipt)) == receipt.num_records:
                return receipt
        return None

    def _is_whole(self, receipt: Receipt) -> bool:
        with contextlib.suppress(OSError):
            path = self._part_path(receipt.number)
            return path.stat().st_size == receipt.num_bytes and digest_file(path) == receipt.digest
        return False

    def _offsets(self, receipt: Receipt) -> Offsets:
        return Offsets.from_text((self._folder / f"{receipt.number:05d}.idx").read_text("ascii"))

    def _part_path(self, number: int) -> pathlib.Path:
        return self._folder / f"{number:05d}.part"


def _holds(path: pathlib.Path, info: ShardInfo) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size == info.num_bytes and digest_file(path) == info.checksum
    return False


def _replace(path: pathlib.Path, data: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)
