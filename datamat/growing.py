"""A file of a shard growing out of the parts of its format: joined byte for byte, or assembled as the format asks.

    .datamat/shards/SHARD.EXT       the file so far: its first parts

Parts that are joined leave the file resumable in its middle. Where the format assembles its shards, the parts stay
until the shard is finished, and the next run assembles it anew. The file is flushed before it gets its name.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import xxhash

from datamat.errors import CorruptDataError
from datamat.formats import Offsets
from datamat.receipts import part_folder, part_path, read_offsets
from datamat.storage import commit, digest_file, publish

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping, Sequence

    from datamat.formats import ShardAssembler, ShardFormat
    from datamat.manifest import ShardInfo
    from datamat.plan import ShardSpec
    from datamat.receipts import Receipt

__all__ = ["GrowingFile"]

_COPY_BYTES = 1 << 20


class GrowingFile:
    """One file of a shard, in one format.

    Args:
        work: the `.datamat` folder.
        output: the folder of the finished shards.
        spec: the shard.
        shard_format: of the file.
        names: of the file, and of that with its offsets.

    Attributes:
        joined: how many parts are in it; always the first ones of the shard.
    """

    def __init__(
        self,
        work: pathlib.Path,
        output: pathlib.Path,
        spec: ShardSpec,
        shard_format: ShardFormat,
        names: tuple[str, str],
    ) -> None:
        self.joined = 0
        self.file, self.index_file = names
        self._folder = part_folder(work, spec.name)
        self._growing = work / "shards" / self.file
        self._final = output / self.file
        self._index = output / self.index_file
        self._format = shard_format
        self._assembler: ShardAssembler | None = None
        self._digest = xxhash.xxh3_128()

    # ------------------------------------------------------------ what an earlier run left

    def is_finished(self, info: ShardInfo) -> bool:
        """Tell whether the file is there as its entry says, with its offsets; give it its name if only that is left."""
        if (info.file, info.index_file) != (self.file, self.index_file) or not self._index.exists():
            return False
        if _holds(self._final, info):
            return True
        if _holds(self._growing, info):  # killed between the entry and the name
            publish(self._growing, self._final)
            return True
        return False

    def count_joined(self, receipts: Mapping[int, Receipt]) -> int:
        """Return how many parts are in the file, from its first on, with the digests of their receipts."""
        count = size = 0
        with contextlib.suppress(OSError):
            while self._format.joins_parts and (receipt := receipts.get(count)):
                part = receipt.file_of(self._format.extension)
                if digest_file(self._growing, start=size, num_bytes=part.num_bytes) != part.digest:
                    break
                size += part.num_bytes
                count += 1
        return count

    def is_apart(self, receipt: Receipt) -> bool:
        """Tell whether the part's own file is there and whole."""
        part = receipt.file_of(self._format.extension)
        with contextlib.suppress(OSError):
            path = self._part_path(receipt)
            return path.stat().st_size == part.num_bytes and digest_file(path) == part.digest
        return False

    def can_tell(self, receipt: Receipt) -> bool:
        """Tell whether a receipt and the offsets of its part speak of this format, and of as many records."""
        with contextlib.suppress(OSError, UnicodeDecodeError, CorruptDataError):
            offsets = read_offsets(self._folder, receipt.number, self._format.extension)
            known = [part.extension for part in receipt.files]
            return self._format.extension in known and len(offsets) == receipt.num_records
        return False

    def go_on(self, receipts: Sequence[Receipt]) -> None:
        """Leave just these first parts in the file, and go on behind them."""
        if self._growing.exists():
            os.truncate(self._growing, sum(receipt.file_of(self._format.extension).num_bytes for receipt in receipts))
            self._hash_file()
        self.joined = len(receipts)

    # ------------------------------------------------------------ growing

    def join(self, receipt: Receipt) -> None:
        """Take the next part."""
        part = self._part_path(receipt)
        if not self._format.joins_parts:
            self._assembling().add(part)
        elif self.joined == 0:
            # The first part becomes the shard: nothing is copied where there is one part only.
            self._growing.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, self._growing)
            self._hash_file()
        else:
            self._append(part)
            part.unlink()
        self.joined += 1

    def end(self, receipts: Sequence[Receipt]) -> tuple[Offsets, int, str]:
        """Write what comes behind the records of the last part; return all offsets, bytes of the file, and its digest.

        Raises:
            CorruptDataError: the file does not hold what the receipts say.
        """
        offsets, num_bytes = self._end(receipts)
        num_records = sum(receipt.num_records for receipt in receipts)
        if self._growing.stat().st_size != num_bytes or len(offsets) != num_records:
            raise CorruptDataError(
                f"{self._growing} holds {self._growing.stat().st_size} bytes and {len(offsets)} offsets, its receipts "
                f"say {num_bytes} and {num_records}; remove {self._folder.parent.parent} and run again"
            )
        return offsets, num_bytes, self._digest.hexdigest()

    def flush(self, offsets: Offsets) -> None:
        """Write the offsets, under their name, and flush the file, which has none yet."""
        with commit(self._index, through=self._growing.parent) as file:
            file.write(offsets.to_text().encode())
        with open(self._growing, "rb+") as file:
            os.fsync(file.fileno())

    def publish(self) -> None:
        """Give the file its name."""
        publish(self._growing, self._final)

    def close(self) -> None:
        """Give free what an assembler holds; may be called again."""
        if self._assembler is not None:
            self._assembler.close()

    def _end(self, receipts: Sequence[Receipt]) -> tuple[Offsets, int]:
        if not self._format.joins_parts:
            offsets = self._assembling().finish()
            self._hash_file()
            return offsets, self._growing.stat().st_size
        trailer, extension = self._format.trailer, self._format.extension
        with open(self._growing, "ab") as file:
            file.write(trailer)
        self._digest.update(trailer)
        parts = [
            (read_offsets(self._folder, receipt.number, extension), receipt.file_of(extension).num_bytes)
            for receipt in receipts
        ]
        return Offsets.joined(parts), sum(num_bytes for _, num_bytes in parts) + len(trailer)

    def _assembling(self) -> ShardAssembler:
        """Return what makes the shard of its parts, which begins it anew."""
        if self._assembler is None:
            self._growing.parent.mkdir(parents=True, exist_ok=True)
            # A new file: the assembler of a run that failed in this process may still hold the old one, and end it.
            self._growing.unlink(missing_ok=True)
            self._assembler = self._format.assembler(self._growing)
        return self._assembler

    def _append(self, part: pathlib.Path) -> None:
        buffer = bytearray(_COPY_BYTES)
        view = memoryview(buffer)
        with open(part, "rb", buffering=0) as source, open(self._growing, "ab", buffering=0) as target:
            while count := source.readinto(buffer):
                self._digest.update(view[:count])
                written = 0
                while written < count:
                    written += target.write(view[written:count])

    def _hash_file(self) -> None:
        buffer = bytearray(_COPY_BYTES)
        with open(self._growing, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                self._digest.update(memoryview(buffer)[:count])

    def _part_path(self, receipt: Receipt) -> pathlib.Path:
        return part_path(self._folder, receipt.number, self._format.extension)


def _holds(path: pathlib.Path, info: ShardInfo) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size == info.num_bytes and digest_file(path) == info.checksum
    return False
