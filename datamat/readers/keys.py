"""From the key of a record to its position, by the index files, read when a key is first asked for.

The index holds the keys of rows. Those of records follow from them (KEY, or KEY#0, KEY#1, ... where copies were drawn),
except in shards where a transform gave several samples for one copy: their records are asked for their keys, once.
Memory holds the keys of the rows, and 30 bytes beside each.
"""

from __future__ import annotations

import bisect
import functools
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from datamat.errors import CorruptDataError, want_of_resources
from datamat.readers.remote import RemotePath

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Mapping, Sequence

    from datamat.manifest import Manifest, ShardInfo
    from datamat.readers.cache import ShardStore

__all__ = ["KeyIndex", "stored_key"]


def stored_key(record: Mapping[str, Any]) -> str:
    """Return the key that a record's columns hold."""
    key = record["key"]
    return (key if isinstance(key, bytes) else bytes(key[0])).decode()


class KeyIndex:
    """The keys of the records of one split or of all.

    Args:
        folder: `index` of the directory.
        manifest: of the directory.
        split: one split, or None for all.
        stored_keys: returns the keys of the records of a shard, by its position among the shards of the splits.
        store: of copies of the index, where the folder is behind a URL.
    """

    def __init__(
        self,
        folder: pathlib.Path | RemotePath,
        manifest: Manifest,
        split: str | None,
        stored_keys: Callable[[int], list[str]],
        store: ShardStore | None = None,
    ) -> None:
        self._splits = []
        first_shard = first_record = 0
        for name, shards in manifest.splits.items():
            if split in (None, name):
                names = _Names(manifest.copies.get(name, 1), name in manifest.augmented)
                local = _LocalIndex(folder / f"{name}.parquet", name, manifest, store)
                self._splits.append(_SplitKeys(local, names, shards, first_shard, first_record, stored_keys))
                first_shard += len(shards)
                first_record += sum(info.num_records for info in shards)

    def position_of(self, key: str) -> int | None:
        """Return the position of the record with this key, or None where there is none."""
        for keys in self._splits:
            found = keys.position_of(key)
            if found is not None:
                return found
        return None

    def key_at(self, position: int) -> str | None:
        """Return the key of a record, or None where only the record itself could tell."""
        for keys in reversed(self._splits):
            if position >= keys.first_record:
                return keys.key_at(position)
        return None

    def keys(self) -> list[str]:
        """Return the keys of all records, in order."""
        return [key for split in self._splits for key in split.keys()]  # noqa: SIM118 -- not a dict


def _hash(row_key: str) -> int:
    return xxhash.xxh3_64_intdigest(row_key.encode(errors="surrogatepass"))  # anyone may ask for what no index holds


class _Names:
    """How the keys of records follow from the key of their row."""

    def __init__(self, copies: int, augmented: bool) -> None:
        self._copies = copies
        self._plain = copies == 1 and not augmented

    def of(self, row_key: str) -> list[str]:
        return [row_key] if self._plain else [f"{row_key}#{copy}" for copy in range(self._copies)]


class _LocalIndex:
    """The file of the index of a split, or a copy of it made when it is first needed."""

    def __init__(
        self, source: pathlib.Path | RemotePath, split: str, manifest: Manifest, store: ShardStore | None
    ) -> None:
        self._source = source
        self._info = next((info for info in manifest.index if info.split == split), None)
        self._store = store

    def path(self) -> pathlib.Path:
        if not isinstance(self._source, RemotePath):
            return self._source
        if self._info is None or self._store is None:
            raise CorruptDataError(f"the manifest does not tell of {self._source}; run the job again to write it anew")
        return self._store.fetch(self._info, self._source)


class _SplitKeys:
    def __init__(
        self,
        file: _LocalIndex,
        names: _Names,
        shards: Sequence[ShardInfo],
        first_shard: int,
        first_record: int,
        stored_keys: Callable[[int], list[str]],
    ) -> None:
        self.first_record = first_record
        self._file = file
        self._names = names
        self._starts = list(accumulate((info.num_records for info in shards[:-1]), initial=first_record))
        self._num_rows = sum(info.num_rows for info in shards)
        self._first_shard = first_shard
        self._stored_keys = stored_keys
        self._numbers_of: dict[int, dict[str, int]] = {}

    def position_of(self, key: str) -> int | None:
        row_key = key.partition("#")[0]
        hashes, order = self._by_hash
        first = int(np.searchsorted(hashes, np.uint64(_hash(row_key))))
        if first == len(order) or self._row_keys[int(order[first])].as_py() != row_key:
            return None
        place = int(order[first])
        shard, record = int(self._table["shard"][place]), int(self._table["record"][place])
        if record < 0:
            number = self._numbers(shard).get(key)
            return None if number is None else self._starts[shard] + number
        names = self._names.of(row_key)
        return self._starts[shard] + record + names.index(key) if key in names else None

    def key_at(self, position: int) -> str | None:
        shard = bisect.bisect_right(self._starts, position) - 1
        number = position - self._starts[shard]
        mine = np.flatnonzero(self._table["shard"] == shard)
        firsts = self._table["record"][mine]
        if not len(mine) or (firsts < 0).any():
            return None
        row = int(np.searchsorted(firsts, number, side="right")) - 1
        return self._names.of(self._row_keys[int(mine[row])].as_py())[number - int(firsts[row])]

    def keys(self) -> list[str]:
        found: list[str] = []
        irregular = self._table["record"] < 0
        for shard in range(len(self._starts)):
            mine = np.flatnonzero(self._table["shard"] == shard)
            if irregular[mine].any():
                found += self._numbers(shard)
            else:
                rows = self._row_keys.slice(mine[0], len(mine)) if len(mine) else self._row_keys.slice(0, 0)
                found += [name for row_key in rows.to_pylist() for name in self._names.of(row_key)]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in {"_columns", "_table", "_by_hash"}}

    def _numbers(self, shard: int) -> dict[str, int]:
        """Return the place of each record of a shard by its key, as the records tell it: read once."""
        if shard not in self._numbers_of:
            keys = self._stored_keys(self._first_shard + shard)
            self._numbers_of[shard] = {key: number for number, key in enumerate(keys)}
        return self._numbers_of[shard]

    @functools.cached_property
    def _columns(self) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        path = self._file.path()
        try:
            with open(path, "rb") as file:
                columns = parquet.read_table(file, columns=["key", "shard", "record"], use_threads=False)
        except (OSError, pa.ArrowException) as error:
            want = want_of_resources(path, error)
            if want is not None:
                raise want from error
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise CorruptDataError(f"index file {path}: {reason}; run the job again to write it anew") from error
        if len(columns) != self._num_rows:
            raise CorruptDataError(
                f"index file {path} has {len(columns)} rows, the manifest says {self._num_rows}; run the job "
                "again to write it anew"
            )
        return columns

    @property
    def _row_keys(self) -> Any:
        return self._columns["key"]

    @functools.cached_property
    def _table(self) -> dict[str, np.ndarray]:
        import pyarrow.compute as pc

        columns = self._columns
        return {
            "shard": columns["shard"].to_numpy(),
            "record": pc.fill_null(columns["record"], -1).to_numpy(),
        }

    @functools.cached_property
    def _by_hash(self) -> tuple[np.ndarray, np.ndarray]:
        """The hashes of the row keys, sorted, and the row of each; two keys of one hash are beyond 64 bits' means."""
        chunks = (key for chunk in self._row_keys.chunks for key in chunk.to_pylist())
        hashes = np.fromiter((_hash(key) for key in chunks), np.uint64, len(self._row_keys))
        order = np.argsort(hashes, kind="stable").astype(np.uint32)
        return hashes[order], order
