"""The origin of a record: its row in the index, and its place in the shards."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from datamat.directory.display import Table, render_html
from datamat.directory.fetched import FilesHere
from datamat.directory.index_files import (
    SIZE,
    SplitIndex,
    column_of_field,
    column_values,
    field_of_column,
    read_index,
)
from datamat.directory.keys import RecordKey, RecordNames, stored_key
from datamat.directory.manifest import index_file
from datamat.directory.row_values import looks_like_path, nested_paths
from datamat.errors import OptionError
from datamat.formats import get_format
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.directory.manifest import Manifest
    from datamat.folders import Folder


@frozen()
class Provenance:
    """The origin of a record.

    Attributes:
        key: key of the record.
        row_key: key of the input row.
        copy: number of the copy; None if the row was stored untransformed.
        split: name of the split.
        shard: file name of the shard.
        position: position of the record in the shard, from 0; None if the row gave no record.
        seed: base seed of the run; with the key it decided every random draw.
        sources: paths of the input files, by field; several of one field as "FIELD.0", "FIELD.1", and so on.
        fields: all fields of the row in the index.
    """

    key: str
    row_key: str
    copy: int | None
    split: str
    shard: str
    position: int | None
    seed: int
    sources: Mapping[str, str]
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        copy = "as it is" if self.copy is None else f"copy {self.copy}, drawn from seed {self.seed}"
        sources = ", ".join(self.sources.values()) or f"row {self.row_key!r}"
        place = "which gave no record" if self.position is None else f"record {self.position} of {self.shard}"
        return f"{self.key}: {sources}, {copy}: {place}"

    def __repr__(self) -> str:
        return f"Provenance({self})"

    def _repr_html_(self) -> str:
        position = "none: its row gave no record" if self.position is None else self.position
        facts = [
            ("row", self.row_key),
            ("copy", "none: stored as it is" if self.copy is None else self.copy),
            ("split", self.split),
            ("shard", self.shard),
            ("position", position),
            ("seed", self.seed),
        ]
        fields = [*self.sources.items(), *((name, value) for name, value in self.fields.items())]
        return render_html(f"Provenance of {self.key}", facts, [Table(["source or field", "value"], fields)])


class ProvenanceFinder:
    """Finds the origin of records; each index is read once, on first use. Thread-safe.

    Args:
        output: the finished directory.
        manifest: its manifest.
        source: source of the run, to which relative paths are joined; None leaves them unchanged.
    """

    def __init__(self, output: Folder, manifest: Manifest, source: Any = None) -> None:
        self._files, self._manifest, self._source = FilesHere(output), manifest, source
        self._indexes: dict[str, SplitIndex] = {}
        self._lock = threading.Lock()

    def find(self, key: str) -> Provenance:
        """Return the origin of a record, by its key or by that of a row, which means its first record.

        Raises:
            OptionError: there is no such record.
            OutputError: the directory lacks its index.
            CorruptDataError: the index cannot be read.
        """
        with self._lock:
            return self._find(key)

    def _find(self, key: str) -> Provenance:
        manifest, output, source = self._manifest, self._files.root, self._source
        for wanted, (split, shards) in itertools.product(RecordKey.meant_by(key), manifest.splits.items()):
            names = RecordNames(manifest.copies.get(split, 1), split in manifest.augmented)
            if split not in self._indexes:
                self._indexes[split] = _split_index(self._files, manifest, split, names)
            index = self._indexes[split]
            number = index.table.find(wanted.row_key)
            if number is None or (names.are_plain and wanted.copy is not None):
                continue
            found = wanted if names.are_plain or wanted.copy is not None else RecordKey(wanted.row_key, 0)
            row = {
                name: column_values(index.table.table.slice(number, 1), name)[0]
                for name in index.table.table.column_names
            }
            base = os.path.abspath(source) if isinstance(source, (str, os.PathLike)) else ""
            fields = {name: row[column_of_field(name)] for name in filter(None, map(field_of_column, row))}
            return Provenance(
                key=str(found),
                row_key=found.row_key,
                copy=found.copy,
                split=split,
                shard=shards[row["shard"]].file,
                position=_position(output, index, names, found, row["shard"]),
                seed=manifest.seed,
                sources=_sources(row, fields, base),
                fields=fields,
            )
        raise OptionError(
            f"{output} has no record {key!r} in {', '.join(manifest.splits)}; load(...).keys() lists them"
        )


def _split_index(files: FilesHere, manifest: Manifest, split: str, names: RecordNames) -> SplitIndex:
    shards = manifest.splits[split]
    shard_format = get_format(manifest.format).with_features(manifest.features)

    def read() -> Any:
        info = manifest.index_infos[index_file(split)]
        files.listed(info)
        return read_index(files.path, info.file, num_rows=sum(info.num_rows for info in shards), info=info)

    def keys_of(shard: int) -> Any:
        files.listed(shards[shard])
        return map(stored_key, shard_format.read(shards[shard].path_in(files.path)))

    return SplitIndex(read, names, shards, keys_of)


def _position(output: Folder, index: SplitIndex, names: RecordNames, key: RecordKey, shard: int) -> int | None:
    """Return the number of a record in its shard; None if its row gave no record."""
    found = index.find(key)
    if found is not None:
        return found.record
    if index.is_regular(shard):
        raise OptionError(f"{output} has no record {str(key)!r}; row {key.row_key!r} has {names.copies}, from 0")
    records = {name: RecordKey.parse(name) for name in index.records_of(shard)}
    mine = {name: record for name, record in records.items() if record.row_key == key.row_key}
    of_copy = [index.records_of(shard)[name] for name, record in mine.items() if record.copy == key.copy]
    if mine and (key.number is not None or not of_copy):
        raise OptionError(f"{output} has no record {str(key)!r}; row {key.row_key!r} has {', '.join(sorted(mine))}")
    return min(of_copy, default=None)


def _sources(row: Mapping[str, Any], fields: Mapping[str, Any], base: str) -> dict[str, str]:
    """Return the paths of the input files of a row of an index file, by field."""
    found: dict[str, str] = {}
    for name, value in {**fields, "files": row.get("files")}.items():
        column = column_of_field(name) if name in fields else name
        if row.get(column + SIZE) is None:
            continue
        if isinstance(value, (str, os.PathLike)):
            found[name] = os.path.join(base, value)
        else:
            paths = [path for path in nested_paths(value) if looks_like_path(path)]
            found |= {f"{name}.{number}": os.path.join(base, path) for number, path in enumerate(paths)}
    return found
