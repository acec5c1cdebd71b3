"""Parts on disk: what workers leave for the driver, and how a shard grows out of them, in all its formats.

    .datamat/parts/SHARD/           files and receipts of its parts: see `receipts`
    .datamat/shards/SHARD.EXT       each file of the shard so far: see `growing`
                    SHARD.json      of a finished shard: its entry, see `shard_entries`

A part counts when it is there in every format, and a shard is finished when all of its files are.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from datamat.growing import GrowingFile
from datamat.manifest import KeyDigest, ShardInfo, file_names
from datamat.receipts import Receipt, part_folder
from datamat.shard_entries import read_entry, write_entry
from datamat.storage import fsync_folder, read_json

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Mapping, Sequence

    from datamat.formats import ShardFormat
    from datamat.manifest import ShardFiles
    from datamat.plan import PartSpec, ShardSpec

__all__ = ["ShardAssembly"]


class ShardAssembly:
    """A shard growing out of its parts, in their order, whatever order they come in.

    Args:
        work: the `.datamat` folder.
        output: the folder of the finished shards.
        spec: the shard.
        formats: those that it is written in.
    """

    def __init__(
        self, work: pathlib.Path, output: pathlib.Path, spec: ShardSpec, formats: Sequence[ShardFormat]
    ) -> None:
        self.spec = spec
        self._folder = part_folder(work, spec.name)
        self._entries = work / "shards"
        self._output = output
        names = file_names(spec.name, [made.extension for made in formats])
        self._files = [GrowingFile(work, output, spec, made, mine) for made, mine in zip(formats, names, strict=True)]
        self._receipts: dict[int, Receipt] = {}

    def finished(self) -> ShardFiles | None:
        """Return the files of a shard that an earlier run finished from the same rows and options, if it is whole."""
        files = self.previous()
        if files is None or len(files) != len(self._files):
            return None
        if any(info.fingerprint != self.spec.fingerprint for info in files):
            return None
        with contextlib.suppress(OSError):
            if all(file.is_finished(info) for file, info in zip(self._files, files, strict=True)):
                return files
        return None

    def previous(self) -> ShardFiles | None:
        """Return the files of the shard of this name that an earlier run finished, whatever it was made from.

        Those of the present formats come first, in their order.
        """
        files = read_entry(self._entries / f"{self.spec.name}.json")
        order = {file.file: number for number, file in enumerate(self._files)}
        return files and tuple(sorted(files, key=lambda info: order.get(info.file, len(order))))

    def resume(self, *, with_failed: bool = True) -> list[Receipt]:
        """Take over what an earlier run left of the present plan, and return its receipts.

        A part counts if its bytes, in each format, have the digest of its receipt: in its own file, or in that of the
        shard, already joined.

        Args:
            with_failed: whether parts count in which a row failed.
        """
        known = {receipt.number: receipt for receipt in self.receipts() if with_failed or not receipt.failed}
        joined = [file.count_joined(known) for file in self._files]
        whole = self._whole(known, joined)
        first = next(number for number in range(len(whole) + 1) if number not in whole)
        if max(joined) > first:  # behind a part that one format has lost, what others have joined does not count
            joined = [min(count, first) for count in joined]
            whole = self._whole(whole, joined)
        self._receipts = whole
        for file, count in zip(self._files, joined, strict=True):
            file.go_on([whole[number] for number in range(count)])
        self._join()
        return list(whole.values())

    def receipts(self) -> list[Receipt]:
        """Return the receipts of the present plan that are on the disk, whether or not their parts are whole."""
        return [receipt for part in self.spec.parts if (receipt := self._read_receipt(part))]

    def add(self, receipt: Receipt) -> None:
        """Take one more finished part, and join what can be joined."""
        self._receipts[receipt.number] = receipt
        self._join()

    def taken(self) -> list[Receipt]:
        """Return the receipts of the parts that are done."""
        return list(self._receipts.values())

    @property
    def is_complete(self) -> bool:
        """Whether every part is joined."""
        return all(file.joined == len(self.spec.parts) for file in self._files)

    def missing(self) -> Iterator[PartSpec]:
        """Yield the parts that are still to do."""
        return (part for part in self.spec.parts if part.number not in self._receipts)

    def publish(self) -> ShardFiles:
        """Flush the files of the shard and their offsets, give them their names, and drop the parts.

        Raises:
            CorruptDataError: a file does not hold what its receipts say.
        """
        receipts = [self._receipts[part.number] for part in self.spec.parts]
        ends = [file.end(receipts) for file in self._files]
        infos = tuple(
            self._info(file, receipts, num_bytes, checksum)
            for file, (_, num_bytes, checksum) in zip(self._files, ends, strict=True)
        )
        self._drop_previous(infos)
        for file, (offsets, *_) in zip(self._files, ends, strict=True):
            file.flush(offsets)
        write_entry(self._entries, infos)
        for file in self._files:
            file.publish()
        shutil.rmtree(self._folder, ignore_errors=True)
        return infos

    def close(self) -> None:
        """Give free what is open of a shard that is left as it is."""
        for file in self._files:
            file.close()

    def _info(self, file: GrowingFile, receipts: Sequence[Receipt], num_bytes: int, checksum: str) -> ShardInfo:
        keys = KeyDigest()
        for receipt in receipts:
            keys += KeyDigest(value=int(receipt.keys, 16), count=receipt.num_records)
        return ShardInfo(
            file=file.file,
            split=self.spec.split,
            num_rows=sum(receipt.num_done + len(receipt.failed) for receipt in receipts),
            num_records=sum(receipt.num_records for receipt in receipts),
            num_bytes=num_bytes,
            checksum=checksum,
            key_digest=keys.hexdigest(),
            fingerprint=self.spec.fingerprint,
            num_failed=sum(len(receipt.failed) for receipt in receipts),
            index_file=file.index_file,
        )

    def _drop_previous(self, infos: ShardFiles) -> None:
        """Remove the entry of the shard of this name: it would take new offsets for its own. And unwanted formats."""
        mine = {name for info in infos for name in (info.file, info.index_file)}
        for info in self.previous() or ():
            for name in {info.file, info.index_file} - mine:
                (self._output / name).unlink(missing_ok=True)
        entry = self._entries / f"{self.spec.name}.json"
        if entry.exists():
            entry.unlink()
            fsync_folder(self._entries)

    def _whole(self, receipts: Mapping[int, Receipt], joined: Sequence[int]) -> dict[int, Receipt]:
        """Return the receipts whose part is there in every format: joined, so many of each, or apart."""
        return {
            number: receipt
            for number, receipt in receipts.items()
            if all(number < count or file.is_apart(receipt) for file, count in zip(self._files, joined, strict=True))
        }

    def _join(self) -> None:
        for file in self._files:
            while receipt := self._receipts.get(file.joined):
                file.join(receipt)

    def _read_receipt(self, part: PartSpec) -> Receipt | None:
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
            receipt = Receipt.from_json(read_json(self._folder / f"{part.number:05d}.json"))
            is_mine = receipt.is_for(part) and len(receipt.files) == len(self._files)
            if is_mine and not receipt.num_lost and all(file.can_tell(receipt) for file in self._files):
                return receipt
        return None
