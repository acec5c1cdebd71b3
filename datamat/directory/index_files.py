"""The index beside the shards, `_index/SPLIT.index` and `.keys`: safe reading of its columns, and key lookup."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import mmap
import os
import pathlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import numpy as np

from datamat.directory.keys import KeyLookup, RecordKey, key_hash, row_type
from datamat.directory.row_values import FILES, decode_value
from datamat.errors import CorruptDataError, count_of, require_package, want_of_resources
from datamat.folders.local import open_regular, regular_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from datamat.directory.keys import RecordNames
    from datamat.directory.manifest import IndexInfo, ShardInfo

_FILES = "files"
_OWN = ("key", "shard", "record", _FILES)
KIND = b"datamat"  # kind of a column, in the metadata of its Arrow field


_PREFIX = "field_"
SIZE, DIGEST = ":size", ":digest"
"""Suffixes of the columns with size and digest of an input file."""


def column_values(columns: Any, name: str) -> list[Any]:
    """Return a column of a `pyarrow.Table` or `RecordBatch` of an index file, with its original values."""
    values: list[Any] = columns.column(name).to_pylist()
    kind = (columns.schema.field(name).metadata or {}).get(KIND)
    if kind == b"path":
        return [None if value is None else pathlib.Path(value) for value in values]
    return [decode_value(value, "") for value in values] if kind == b"json" else values


def field_of_column(name: str) -> str | None:
    """Return the field in a column; None if the column is something else."""
    if name in _OWN or name.endswith((SIZE, DIGEST)):
        return None
    return name.removeprefix(_PREFIX).removesuffix(":") if name.startswith(_PREFIX) else name


def column_of_field(name: str) -> str:
    """Return the name of the column of a field: the field's own, unless another column could have it."""
    if name == FILES:
        return _FILES
    if name in _OWN or ":" in name or name.startswith(_PREFIX):
        return f"{_PREFIX}{name}{':' if ':' in name else ''}"
    return name


# ---------------------------------------------------------------- index reading
#
# Reads index files from any source; `run.publish` documents their content.
#
# A small file can expand to a table of any size: one value and a repeat count, or zeros that compress to nothing. So
# rows are counted before they are read, and their memory is counted meanwhile.


# Keys differ, and so take some bytes each, however well they compress.
_MOST_ROWS_PER_BYTE = 64
_MOST_BYTES_PER_ROW = 4096
_LEAST_BUDGET = 64 << 20
_BATCH_ROWS = 65_536


def read_index(
    folder: pathlib.Path,
    name: str,
    columns: Sequence[str] | Callable[[str], bool] | None = None,
    *,
    num_rows: int | None = None,
    info: IndexInfo | None = None,
) -> Any:
    """Return an index file of a directory as a `pyarrow.Table`, each column in one piece.

    Args:
        folder: the directory; links out of it are not followed.
        name: path of the file below it.
        columns: names of the columns to read, or a predicate of names; None reads all.
        num_rows: number of rows in the manifest; None allows any number.
        info: entry of the file in the manifest; None allows any file.

    Raises:
        CorruptDataError: the file is missing, unreadable, not the one in the manifest, or would take more memory than
            an index needs.
        OutputError: descriptors or memory ran out.
    """
    require_package("pyarrow", "the index of a dataset")
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / name
    try:
        path = regular_path(folder, name)
        if info is not None and not info.is_whole(path):
            raise CorruptDataError("it is not the file that the manifest lists: its size or checksum differs")
        with open_regular(path) as file, parquet.ParquetFile(file) as opened:
            metadata, schema = opened.metadata, opened.schema_arrow
            budget = _budget(metadata, num_rows, os.fstat(file.fileno()).st_size)
            names = list(filter(columns, schema.names)) if callable(columns) else columns
            wanted = schema if names is None else pa.schema([schema.field(name) for name in names])
            texts = [field.name for field in schema if field.type in (pa.string(), pa.binary())]
            # pyarrow needs the names of dictionary columns when it opens a file, but they are in the file: open it
            # twice.
            with parquet.ParquetFile(file, metadata=metadata, read_dictionary=texts) as of_texts:
                batches = list(_batches(of_texts, wanted, budget))
        return pa.Table.from_batches(batches, wanted).combine_chunks()
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise _unread(path, error) from error


def _budget(metadata: Any, wanted: int | None, num_bytes: int) -> int:
    """Return the memory budget of a file in bytes; raise `CorruptDataError` if it declares more.

    Nothing else is read from the metadata: pyarrow aborts the process if a damaged column is accessed.
    """
    num_rows = metadata.num_rows
    if wanted not in (None, num_rows):
        raise CorruptDataError(f"it has {count_of(num_rows, 'row')}, the manifest says {wanted}")
    if num_rows > num_bytes * _MOST_ROWS_PER_BYTE:
        raise CorruptDataError(f"it has {count_of(num_rows, 'row')} in {num_bytes} bytes, too many for an index")
    budget: int = max(_LEAST_BUDGET, num_rows * _MOST_BYTES_PER_ROW)
    if sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)) > budget:
        raise CorruptDataError(f"its {num_rows} rows take more than {budget} bytes of memory")
    return budget


def _batches(opened: Any, schema: Any, budget: int) -> Iterator[Any]:
    """Yield the rows with expanded texts; raise `CorruptDataError` before they exceed the budget."""
    import pyarrow as pa

    left = budget
    for batch in opened.iter_batches(_BATCH_ROWS, columns=schema.names, use_threads=False):
        left -= sum(map(_expanded_bytes, batch.columns))
        if left < 0:
            raise CorruptDataError(f"its rows take more than {budget} bytes of memory")
        columns = [batch.column(name) for name in schema.names]
        expanded = [one.dictionary_decode() if isinstance(one, pa.DictionaryArray) else one for one in columns]
        yield pa.record_batch(expanded, schema)


def _expanded_bytes(column: Any) -> int:
    """Return the bytes of a column with each of its texts expanded."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(column, pa.DictionaryArray):
        return int(column.nbytes)
    lengths = pc.fill_null(pc.binary_length(column.dictionary), 0).to_numpy(zero_copy_only=False)
    places = column.indices.drop_null().to_numpy(zero_copy_only=False)
    if len(places) and not 0 <= places.min() <= places.max() < len(lengths):
        raise CorruptDataError("it refers to missing texts")
    return int(lengths[places].sum())


def _unread(path: pathlib.Path, error: Exception) -> Exception:
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0].removeprefix(f"{path} ")
    return want_of_resources(path, error) or CorruptDataError(
        f"index file {path}: {reason}; run the job again, or repair(), to rebuild it"
    )


# ---------------------------------------------------------------- from key to place
#
# Finds the place of a row or record in the shards by its key.
#
# The index holds the keys of rows. Keys of records follow from them (KEY, or KEY#0, KEY#1, ... for copies), except in
# shards in which a transform gave several records for one copy, or rows failed: there the keys are read from the
# records, once for each such shard.
#
# `_index/SPLIT.keys` maps the hash of a key to the row, whose number gives the shard; it is memory-mapped, and the
# record itself confirms the key. Without that file, the keys of all rows are held in memory, with 30 bytes for each.


_mapped: dict[int, tuple[mmap.mmap, np.ndarray, np.ndarray]] = {}
"""Memory maps of the hash files; not stored in the objects, since pools remove them there in forked workers."""


@final
class MappedKeys:
    """The key hashes of a split, in the file written by a run; processes share its pages. Thread-safe.

    Args:
        folder: the directory, or a folder with a copy of the file; links out of it are not followed.
        name: path of the file below it.
        num_rows: number of rows in the manifest.

    Raises:
        CorruptDataError: the file is missing or has the wrong size.
        OutputError: descriptors or memory ran out.
    """

    def __init__(self, folder: pathlib.Path, name: str, num_rows: int) -> None:
        self.path = folder / name
        width = row_type(num_rows)
        self._num_bytes = num_rows * (8 + width.itemsize)
        try:
            with open_regular(regular_path(folder, name)) as file:
                found = os.fstat(file.fileno()).st_size
                if found != self._num_bytes or not found:
                    raise CorruptDataError(
                        f"it has {found} bytes, the keys of {count_of(num_rows, 'row')} take {self._num_bytes}"
                    )
                pages = mmap.mmap(file.fileno(), found, access=mmap.ACCESS_READ)
        except (OSError, ValueError, CorruptDataError) as error:
            raise want_of_resources(self.path, error) or CorruptDataError(
                f"{self.path}: {getattr(error, 'strerror', None) or error}"
            ) from error
        hashes = np.frombuffer(pages, "<u8", num_rows)
        _mapped[id(self)] = pages, hashes, np.frombuffer(pages, width, num_rows, 8 * num_rows)
        weakref.finalize(self, _mapped.pop, id(self), None)

    def rows(self, row_key: str) -> list[int]:
        """Return the numbers of the rows with this key's hash, in order: almost always one or none.

        Raises:
            CorruptDataError: the file was changed since it was opened.
        """
        pages, hashes, rows = _mapped[id(self)]
        # Accessing mapped pages beyond the end of a truncated file would kill the process: a system call checks this
        # first.
        if pages.size() != self._num_bytes:
            raise CorruptDataError(f"{self.path}: it was changed while it was open")
        wanted = np.uint64(key_hash(row_key))
        first, found = int(hashes.searchsorted(wanted)), []
        while first < len(hashes) and hashes[first] == wanted:
            found.append(int(rows[first]))
            first += 1
        return found

    def rows_without(self, hashes: np.ndarray) -> np.ndarray:
        """Return the numbers of the rows whose hashes are not among these, in order: 0.1 s for a million.

        Args:
            hashes: uint64 (n,), in ascending order.
        """
        _, mine, rows = _mapped[id(self)]
        places = np.minimum(np.searchsorted(hashes, mine), len(hashes) - 1)
        return np.sort(rows[hashes[places] != mine])


class IndexTable:
    """The rows of an index file, by key or by shard.

    Args:
        table: `pyarrow.Table` from `read_index` with at least the columns "key" and "shard".
    """

    def __init__(self, table: Any) -> None:
        self.table = table
        self._keys = table["key"]
        self.shards: np.ndarray = table["shard"].to_numpy()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def find(self, row_key: str) -> int | None:
        """Return the number of the row with this key, or None."""
        return self._lookup.find(row_key)

    def find_all(self, row_keys: Sequence[str]) -> np.ndarray:
        """Return int64 (n,): the number of the row of each key; -1 for none."""
        return self._lookup.find_all(row_keys)

    def are_in_shard(self, rows: np.ndarray, number: int) -> np.ndarray:
        """Return bool (n,): whether each row is in a shard; -1 stands for no row."""
        found = rows >= 0
        found[found] = self.shards[rows[found]] == number
        return found

    def rows_of_shard(self, number: int) -> np.ndarray:
        """Return int64 (n,): the numbers of the rows of a shard, in order."""
        order, ends = self._by_shard
        return order[ends[number] : ends[number + 1]] if 0 <= number < len(ends) - 1 else order[:0]

    def keys_at(self, rows: np.ndarray | Sequence[int]) -> list[str]:
        """Return the keys of rows by number."""
        return [self._keys[row].as_py() for row in rows] if len(rows) < 8 else self._keys.take(rows).to_pylist()

    def values(self, column: str, rows: np.ndarray) -> list[Any] | None:
        """Return the original values of a column by row number; None if there is no such column."""
        if column not in self.table.column_names:
            return None
        return column_values(self.table.select([column]).take(rows), column)

    @functools.cached_property
    def _lookup(self) -> KeyLookup:
        return KeyLookup.of(self._keys.to_pylist(), self.keys_at)

    @functools.cached_property
    def _by_shard(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.shards, kind="stable")
        return order, np.searchsorted(self.shards[order], np.arange(int(self.shards.max(initial=-1)) + 2))


class RecordPlace(NamedTuple):
    """The place of a record.

    Attributes:
        row: number of its row in the index file.
        shard: number of its shard in the split.
        record: number of the record in the shard.
    """

    row: int
    shard: int
    record: int


class HashedKeys(Protocol):
    """The key hashes of a split, and access to the keys of its records."""

    def rows(self, row_key: str) -> list[int] | None:
        """Return the numbers of the rows with this key's hash; None if the file cannot be read."""

    def is_whole(self) -> bool:
        """Read the file once, and return True if it matches the manifest."""

    def key_of(self, shard: int, record: int) -> str:
        """Return the key of a record, by the number of its shard and its number in it."""


_MOST_UNREAD = 100  # records read only for their keys before the whole index file is read instead


@final
class SplitIndex:
    """Finds the records of one split by key; the index file is read only if no other file has the answer.

    Args:
        read: returns the index file as a table with at least the columns "key", "shard" and "record".
        names: the keys of the records of a row.
        shards: the shards of the split.
        stored_keys: returns the keys of the records of a shard, by its number.
        hashed: the file of key hashes; None to read only the index file.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        names: RecordNames,
        shards: Sequence[ShardInfo],
        stored_keys: Callable[[int], Iterable[str]],
        hashed: HashedKeys | None = None,
    ) -> None:
        self._read = read
        self._names = names
        self._shards = shards
        self._stored_keys = stored_keys
        self._hashed = hashed
        self._places: dict[int, dict[str, int]] = {}
        self._num_unread = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in {"table", "_firsts", "_irregular"}}

    @functools.cached_property
    def table(self) -> IndexTable:
        """The rows of the index file."""
        return IndexTable(self._read())

    def find(self, key: RecordKey, *, is_read: bool = False) -> RecordPlace | None:
        """Return the place of a record; None if there is no such key.

        Args:
            key: key of the record, as stored.
            is_read: whether the record is read next, so that checking its key costs nothing.
        """
        rows = None if self._hashed is None else self._hashed.rows(key.row_key)
        if rows is None:
            return self._found_in_table(key)
        for row in rows:
            place = self._place_of(row, key)
            if place is not None and self._has_key(place, key, is_read=is_read):
                return place
        # A damaged file may omit any key, but cannot assign one to a record with another key.
        return None if self._hashed is None or self._hashed.is_whole() else self._found_in_table(key)

    def _found_in_table(self, key: RecordKey) -> RecordPlace | None:
        row = self.table.find(key.row_key)
        if row is None:
            return None
        shard, first = int(self.table.shards[row]), int(self._firsts[row])
        if first < 0:
            number = self.records_of(shard).get(str(key))
        else:
            place = self._names.place_of(key)
            number = None if place is None else first + place
        return None if number is None else RecordPlace(row, shard, number)

    def _place_of(self, row: int, key: RecordKey) -> RecordPlace | None:
        """Return the place of the record of a row that may have a key; None if the row has no such record."""
        shard = bisect.bisect_right(self._ends, row)
        if shard == len(self._ends):  # the file is damaged
            return None
        info, place = self._shards[shard], self._names.place_of(key)
        if info.lacks_records or info.num_records != info.num_rows * self._names.copies:
            number = self.records_of(shard).get(str(key))
        else:
            before = self._ends[shard - 1] if shard else 0
            number = None if place is None else (row - before) * self._names.copies + place
        return None if number is None else RecordPlace(row, shard, number)

    def _has_key(self, place: RecordPlace, key: RecordKey, *, is_read: bool) -> bool:
        """Return True if the record at a place has a key, by the record or by the index file."""
        assert self._hashed is not None, "it has found the place"
        if place.shard in self._places:
            return True
        is_at_hand = "table" in self.__dict__
        if not is_read and not is_at_hand:
            self._num_unread += 1
            is_at_hand = self._num_unread > _MOST_UNREAD
        if is_read or not is_at_hand:
            with contextlib.suppress(CorruptDataError):  # raised again when it is read
                return self._hashed.key_of(place.shard, place.record) == str(key)
        return self.table.keys_at([place.row]) == [key.row_key]

    def is_regular(self, shard: int) -> bool:
        """Return True if every row of a shard gave one record for each copy."""
        return shard not in self._irregular

    def key_at(self, shard: int, record: int) -> str | None:
        """Return the key of a record; None if only the record itself has it."""
        rows = self.table.rows_of_shard(shard)
        if not len(rows) or not self.is_regular(shard):
            return None
        firsts = self._firsts[rows]
        place = int(np.searchsorted(firsts, record, side="right")) - 1
        return self._names.of(self.table.keys_at(rows[place : place + 1])[0])[record - int(firsts[place])]

    def keys(self) -> list[str]:
        """Return the keys of all records, in order."""
        found: list[str] = []
        for shard in range(len(self._shards)):
            if self.is_regular(shard):
                rows = self.table.keys_at(self.table.rows_of_shard(shard))
                found += rows if self._names.are_plain else [key for row in rows for key in self._names.of(row)]
            else:
                found += self.records_of(shard)
        return found

    def rows_of_records(self) -> np.ndarray:
        """Return int64 (num_records,): the number of the row of each record, in order."""
        found = [np.empty(0, np.int64)]
        for shard in range(len(self._shards)):
            if self.is_regular(shard):
                found.append(np.repeat(self.table.rows_of_shard(shard), self._names.copies))
            else:
                found.append(self.table.find_all([RecordKey.row_of(key) for key in self.records_of(shard)]))
        return np.concatenate(found)

    def records_of(self, shard: int) -> dict[str, int]:
        """Return the number of each record of a shard by key, read once from the records."""
        if shard not in self._places:
            self._places[shard] = {key: number for number, key in enumerate(self._stored_keys(shard))}
        return self._places[shard]

    @functools.cached_property
    def _ends(self) -> list[int]:
        """Cumulative number of rows up to each shard."""
        return list(itertools.accumulate(info.num_rows for info in self._shards))

    @functools.cached_property
    def _irregular(self) -> frozenset[int]:
        return frozenset(np.unique(self.table.shards[self._firsts < 0]).tolist())

    @functools.cached_property
    def _firsts(self) -> np.ndarray:
        """int64 (num_rows,): number of the first record of each row in its shard; -1 if rows differ in their counts."""
        import pyarrow.compute as pc

        firsts: np.ndarray = pc.fill_null(self.table.table["record"], -1).to_numpy()
        return firsts
