"""The records of a finished directory as they are stored: found by the rows of its index, never decoded.

    index/SPLIT.parquet ──> StoredWriter.index: one row per input row, with the place of its records
    shards, .idx        ──> StoredPipeline.records: their columns, checksums tested, bit for bit

`conversion` writes them into other files. Nothing here knows what a picture is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from itertools import groupby
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.errors import CorruptDataError, SampleError
from datamat.formats import Offsets, get_format
from datamat.index import IndexRow
from datamat.index_files import field_of_column, read_index_file
from datamat.manifest import Manifest
from datamat.pipeline import Pipeline
from datamat.readers.keys import stored_key
from datamat.writer import DatasetWriter, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from datamat.features import Column
    from datamat.formats import ShardReader, Value
    from datamat.manifest import ShardInfo

__all__ = ["SHARD", "StoredPipeline", "StoredRecords", "StoredWriter"]

SHARD, _RECORD, _RECORDS = "from_shard", "from_record", "from_records"
"""Fields of a row: number of the shard in its split, number of its first record there, and how many it has."""

_MOST_OPEN = 8
_BATCH_ROWS = 16_384


class StoredRecords:
    """The records of a finished directory by split, shard and number; keeps the last shards open. Not thread-safe.

    Args:
        folder: the directory.
        manifest: its manifest.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest) -> None:
        self._folder = folder
        self._splits = manifest.splits
        self._format = get_format(manifest.format).with_features(manifest.features)
        self._opened: dict[str, ShardReader] = {}

    def read(self, split: str, shard: int, number: int) -> dict[str, Value]:
        """Return the columns of one record; raises `CorruptDataError` where it is damaged."""
        return self._reader(self._splits[split][shard]).read(number)

    def close(self) -> None:
        """Close every file."""
        while self._opened:
            self._opened.popitem()[1].close()

    def _reader(self, info: ShardInfo) -> ShardReader:
        if info.file not in self._opened:
            if len(self._opened) == _MOST_OPEN:
                self._opened.pop(next(iter(self._opened))).close()
            self._opened[info.file] = self._open(info)
        return self._opened[info.file]

    def _open(self, info: ShardInfo) -> ShardReader:
        path = self._folder / info.index_file
        try:
            offsets = Offsets.from_text(path.read_text("ascii"))
            if len(offsets) != info.num_records:
                raise CorruptDataError(f"{len(offsets)} offsets for {info.num_records} records")
            return self._format.reader(self._folder / info.file, offsets)
        except (OSError, UnicodeDecodeError, CorruptDataError) as error:
            raise CorruptDataError(f"{path}: {error}; mend the directory with `datamat repair`") from error


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
        with contextlib.closing(StoredRecords(folder, manifest)) as records:
            for split in manifest.splits:
                yield from _rows(folder, manifest, split, records)

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
    _stored: StoredRecords = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_stored", StoredRecords(self.folder, self.manifest))

    def records(self, row: IndexRow, *, copies: int, augmented: bool) -> Iterator[tuple[str, dict[str, Column]]]:
        """Yield (key, columns) of each record of one row; raises `SampleError` where one is damaged."""
        del copies, augmented
        shard, first, count = (int(row.fields[name]) for name in (SHARD, _RECORD, _RECORDS))
        try:
            for number in range(first, first + count):
                columns: Any = self._stored.read(str(row.split), shard, number)
                key = stored_key(columns)
                if key.partition("#")[0] != row.key:
                    raise CorruptDataError(f"record {number} of {row.origin} is {key!r}, the index says {row.key!r}")
                yield key, columns
        except CorruptDataError as error:
            raise SampleError(row.key, f"CorruptDataError: {error}") from error


def _rows(folder: pathlib.Path, manifest: Manifest, split: str, records: StoredRecords) -> Iterator[IndexRow]:
    infos = manifest.splits[split]
    table = read_index_file(folder / "index" / f"{split}.parquet")
    names = {name: field for name in table.column_names if (field := field_of_column(name))}
    places: dict[int, dict[str, tuple[int, int]]] = {}
    copies = manifest.copies.get(split, 1)
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        columns = {name: batch.column(name).to_pylist() for name in ("key", "shard", "record", *names)}
        for key, shard, record, *values in zip(*columns.values(), strict=True):
            if record is None:
                if shard not in places:
                    places = {shard: _places(records, split, shard, infos[shard].num_records)}
                first, count = places[shard].get(key, (0, 0))
            else:
                first, count = record, copies
            if count:  # else the row failed, and there is nothing of it
                fields = {SHARD: shard, _RECORD: first, _RECORDS: count}
                fields |= {
                    field: value for field, value in zip(names.values(), values, strict=True) if field not in fields
                }
                yield IndexRow(key, split, fields, infos[shard].file)


def _places(records: StoredRecords, split: str, shard: int, num_records: int) -> dict[str, tuple[int, int]]:
    """Return first record and number of records of each row of a shard whose rows differ in that: its keys tell."""
    found, first = {}, 0
    keys = (stored_key(records.read(split, shard, number)) for number in range(num_records))
    for key, same in groupby(keys, key=lambda key: key.partition("#")[0]):
        count = sum(1 for _ in same)
        found[key] = (first, count)
        first += count
    return found
