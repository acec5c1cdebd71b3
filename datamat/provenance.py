"""Where a record came from: its row in the index that was used, and its place in the shards."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from datamat.errors import OptionError
from datamat.formats import get_format
from datamat.index_files import SIZE, column_of_field, field_of_column, read_index_file
from datamat.manifest import Manifest
from datamat.readers.keys import stored_key

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping

    from datamat.manifest import ShardInfo

__all__ = ["Provenance", "find_provenance"]


@dataclasses.dataclass(frozen=True, slots=True)
class Provenance:
    """Where a record came from.

    Attributes:
        key: of the record.
        row_key: of the input row.
        copy: number of the copy; None where the row was stored as it is.
        split: of the row.
        shard: file name of the shard.
        position: of the record in the shard, from 0; None where the row gave no record.
        seed: of the run.
        sources: paths of the input files, by field.
        fields: all fields of the row, as the index gave them.
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


def find_provenance(output: pathlib.Path, source: Any, key: str) -> Provenance:
    """Return where a record of a finished directory came from, as its index has it.

    Args:
        output: the directory.
        source: of the run; relative paths start there.
        key: of the record; of a row that has several, the first is meant.

    Raises:
        OptionError: there is no such record.
        OutputError: the directory is not finished.
        CorruptDataError: the index cannot be read.
    """
    manifest = Manifest.read(output)
    row_key, _, suffix = key.partition("#")
    for split, shards in manifest.splits.items():
        row = _row(read_index_file(output / "index" / f"{split}.parquet"), row_key)
        if row is None:
            continue
        info = shards[row["shard"]]
        is_plain = manifest.copies.get(split, 1) == 1 and split not in manifest.augmented
        if is_plain and suffix:
            raise OptionError(f"{output} has no record {key!r}; its row was stored as it is, under the key {row_key!r}")
        name = key if suffix or is_plain else f"{key}#0"
        base = os.path.abspath(source) if isinstance(source, (str, os.PathLike)) else ""
        fields = {name: row[column_of_field(name)] for name in filter(None, map(field_of_column, row))}
        return Provenance(
            key=name,
            row_key=row_key,
            copy=None if is_plain else _copy_number(name),
            split=split,
            shard=info.file,
            position=_position(output, manifest, info, row, name),
            seed=manifest.seed,
            sources={
                name: os.path.join(base, path) for name, path in fields.items() if column_of_field(name) + SIZE in row
            },
            fields=fields,
        )
    raise OptionError(f"{output} has no record {key!r} in {', '.join(manifest.splits)}; load(...).keys() lists them")


def _row(table: Any, row_key: str) -> dict[str, Any] | None:
    import pyarrow.compute as pc

    place = pc.index(table["key"], row_key).as_py()
    found: list[dict[str, Any]] = table.slice(place, 1).to_pylist() if place >= 0 else []
    return found[0] if found else None


def _copy_number(key: str) -> int:
    number = key.partition("#")[2].partition("-")[0]
    if not number.isdecimal():
        raise OptionError(f"record {key!r}: want KEY, KEY#COPY or KEY#COPY-NUMBER, with numbers from 0")
    return int(number)


def _position(
    output: pathlib.Path, manifest: Manifest, info: ShardInfo, row: Mapping[str, Any], key: str
) -> int | None:
    row_key, _, suffix = key.partition("#")
    copies = manifest.copies.get(info.split, 1)
    if row["record"] is not None:
        copy = int(suffix or 0) if (suffix or "0").isdecimal() else copies
        if copy >= copies:
            raise OptionError(f"{output} has no record {key!r}; row {row_key!r} has {copies}, from 0")
        return int(row["record"]) + copy
    # Rows of this shard gave different numbers of records: only the records tell which is whose.
    shard_format = get_format(manifest.format).with_features(manifest.features)
    keys = [stored_key(record) for record in shard_format.read(output / info.file)]
    places = {name: place for place, name in reversed(list(enumerate(keys)))}
    if key in places:
        return places[key]
    of_copy = [place for name, place in places.items() if name.startswith(f"{key}-")]
    of_row = [name for name in places if name.partition("#")[0] == row_key]
    if not of_copy and of_row:
        raise OptionError(f"{output} has no record {key!r}; row {row_key!r} has {', '.join(sorted(of_row))}")
    return min(of_copy, default=None)
