"""The records of a finished directory as they are stored: found by the rows of its index, never decoded.

    index/SPLIT.parquet ──> StoredWriter.index: one row per input row, with the place of its records
    shards, .idx        ──> StoredPipeline.records: their columns, checksums tested, bit for bit

`conversion` writes them into other files. Nothing here knows what a picture is.
"""

from __future__ import annotations

import dataclasses
import pathlib
from itertools import groupby
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.errors import CorruptDataError, SampleError
from datamat.formats import get_format
from datamat.index import IndexRow
from datamat.index_files import field_of_column, read_index_file
from datamat.manifest import Manifest
from datamat.pipeline import Pipeline
from datamat.readers.cache import RecordCache
from datamat.readers.keys import stored_key
from datamat.readers.records import RecordFiles
from datamat.writer import DatasetWriter, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from datamat.features import Column

__all__ = ["SHARD", "StoredPipeline", "StoredWriter"]

SHARD, _RECORD, _RECORDS = "from_shard", "from_record", "from_records"
"""Fields of a row: number of the shard in its split, number of its first record there, and how many it has."""
_OWN = {SHARD, _RECORD, _RECORDS}

_BATCH_ROWS = 16_384


class _ShardAtHand:
    """The records of one shard after the other: rows come in order, and no system opens thousands of files.

    Args:
        folder: the finished directory.
        manifest: its manifest.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest) -> None:
        self._folder = folder
        self._splits = manifest.splits
        self._format = get_format(manifest.format).with_features(manifest.features)
        self._place: tuple[str, int] | None = None

    def of(self, split: str, shard: int) -> RecordFiles:
        """Return the records of a shard, by number."""
        if self._place != (split, shard):
            self._place = (split, shard)
            self._files = RecordFiles(self._folder, [self._splits[split][shard]], self._format, RecordCache(0))
        return self._files


class StoredWriter(DatasetWriter):
    """The plug-in that stands for a finished directory: its name, its features, and a row for each of its rows.

    Args:
        manifest: of the directory. Its digest counts in fingerprints; where the directory lies does not.
    """

    file_fields = ()

    def __init__(self, manifest: Manifest) -> None:
        self.name = manifest.name
        self.features = manifest.features
        self.digest = xxhash.xxh3_128_hexdigest(manifest.render())

    def index(self, source: Any) -> Iterator[IndexRow]:
        """Return the rows that gave records, in the order of the shards, with the fields that they had.

        Raises:
            CorruptDataError: the index or a shard cannot be read.
        """
        folder = pathlib.Path(source)
        manifest = Manifest.read(folder)
        at_hand = _ShardAtHand(folder, manifest)
        for split in manifest.splits:
            yield from _rows(folder, manifest, split, at_hand)

    def read(self, row: IndexRow) -> Sample:
        """Refuse: there are records, and no samples."""
        raise NotImplementedError(f"row {row.key!r} is not read: StoredPipeline takes its records over as they are")


@dataclasses.dataclass(frozen=True)
class StoredPipeline(Pipeline):
    """Takes the records of a row over as they are stored, keys included.

    Args:
        folder: the finished directory.
        manifest: its manifest.
    """

    folder: pathlib.Path = dataclasses.field(kw_only=True)
    manifest: Manifest = dataclasses.field(kw_only=True)
    _at_hand: _ShardAtHand = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_at_hand", _ShardAtHand(self.folder, self.manifest))

    def records(self, row: IndexRow, *, copies: int, augmented: bool) -> Iterator[tuple[str, dict[str, Column]]]:
        """Yield (key, columns) of each record of one row; raises `SampleError` where one is damaged."""
        del copies, augmented
        shard, first, count = (int(row.fields[name]) for name in (SHARD, _RECORD, _RECORDS))
        try:
            stored = self._at_hand.of(str(row.split), shard)
            for number in range(first, first + count):
                columns: Any = stored.read(number)
                key = stored_key(columns)
                if key.partition("#")[0] != row.key:
                    raise CorruptDataError(f"record {number} of {row.origin} is {key!r}, the index says {row.key!r}")
                yield key, columns
        except CorruptDataError as error:
            raise SampleError(row.key, f"CorruptDataError: {error}") from error


def _rows(folder: pathlib.Path, manifest: Manifest, split: str, at_hand: _ShardAtHand) -> Iterator[IndexRow]:
    infos = manifest.splits[split]
    table = read_index_file(folder / "index" / f"{split}.parquet")
    names = {name: field for name in table.column_names if (field := field_of_column(name)) and field not in _OWN}
    copies = manifest.copies.get(split, 1)
    places: Mapping[str, tuple[int, int]] = {}
    shard_of_places = -1
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        columns = {name: batch.column(name).to_pylist() for name in ("key", "shard", "record", *names)}
        for key, shard, record, *values in zip(*columns.values(), strict=True):
            first, count = record, copies
            if record is None:
                if shard != shard_of_places:
                    shard_of_places, places = shard, _places(at_hand.of(split, shard).stored_keys(0))
                first, count = places.get(key, (0, 0))
            if count:  # else the row failed, and there is nothing of it
                fields = {
                    SHARD: shard,
                    _RECORD: first,
                    _RECORDS: count,
                    **dict(zip(names.values(), values, strict=True)),
                }
                yield IndexRow(key, split, fields, infos[shard].file)


def _places(keys: Sequence[str]) -> Mapping[str, tuple[int, int]]:
    """Return first record and number of records of each row of a shard, where rows differ in that."""
    found, first = {}, 0
    for key, same in groupby(keys, key=lambda key: key.partition("#")[0]):
        count = sum(1 for _ in same)
        found[key] = (first, count)
        first += count
    return found
