"""The index of the dataset, beside the shards: `_index/SPLIT.index`, one row per input sample, in shard order.

Parquet, with the columns

key             string  of the input row
shard           int32   number of the shard in the split
record          int64   number of the row's first record in the shard; null if rows of the shard differ in their counts
FIELD                   each field of the row; `field_FIELD` if its name is one of these
FIELD:size      int64   for fields with the path of an input file: its size in bytes, ...
FIELD:digest    binary  ... and the XXH3-128 digest of the content that was read

The last two are null if the row has no such file; for several files in one field, or a folder, size is the total, and
digest combines the digests. Further files of rows are in the column `files`. Paths are text; lists, tuples, dicts and
fields of mixed types are JSON, written by `encode_value`; `column_values` reads them back. File times are not stored
here but in `.datamat` (see `inputs`), so that the same content gives the same bytes.

Beside it is `_index/SPLIT.keys`, which readers map into memory: `sorted_hashes` of the keys, uint64, followed by the
numbers of their rows in the index, uint32 (uint64 beyond 2**32 rows), little-endian. That is 12 bytes per row.
"""

from __future__ import annotations

import bisect
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.directory.files import commit, fsync_folder, publish
from datamat.directory.index_files import DIGEST, KIND, SIZE, column_of_field
from datamat.directory.keys import packed_hashes
from datamat.directory.manifest import IndexInfo, index_file, keys_file
from datamat.errors import OutputError
from datamat.formats.arrays import numbers_array, texts_array, validity

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import BinaryIO

    from datamat.directory.manifest import ShardInfo
    from datamat.plan.plan import Plan, ShardSpec
    from datamat.sources.rows import Texts
    from datamat.sources.store import RowField, RowStore

_GROUP_ROWS = 65_536


_NULLABLE = {"int": np.int64, "float": np.float64, "bool": np.bool_}


def write_index_files(
    output: pathlib.Path,
    store: RowStore,
    plan: Plan,
    infos: Sequence[ShardInfo],
    inputs: Callable[[ShardSpec], np.ndarray],
    *,
    through: pathlib.Path,
    place: Callable[[IndexInfo], pathlib.Path],
    wanted: Iterable[IndexInfo] = (),
) -> tuple[IndexInfo, ...]:
    """Write the index of every split, and return its entries for the manifest.

    Args:
        output: directory of the finished shards.
        store: the rows, in the order of the plan.
        plan: shard of each row.
        infos: the finished shards, as in the plan.
        inputs: returns the content of the input files of a shard's rows, as `INPUT` (rows, file fields).
        through: folder for the temporary files.
        place: returns the folder for a file: the output, or a folder where it waits to be published.
        wanted: files to restore: an intact one is kept, and one that comes out differently is not written.

    Raises:
        OutputError: a file came out differently from `wanted`.
    """
    known = {info.name: info for info in wanted}
    by_name = {info.name: info for info in infos}
    written: list[IndexInfo] = []
    folders: set[pathlib.Path] = set()
    for split, shards in groupby(plan.shards, key=lambda shard: shard.split):
        specs = [(shard, by_name[shard.name]) for shard in shards]
        files: dict[str, Callable[[BinaryIO], None]] = {
            index_file(split): functools.partial(_write_split, store=store, shards=specs, inputs=inputs),
            keys_file(split): functools.partial(_write_keys, store=store, shards=specs),
        }
        kept = {name: like for name in files if (like := known.get(name)) is not None and like.is_there(output)}
        missing = [name for name in files if name not in kept]
        with ThreadPoolExecutor(len(files)) as pool:  # by now, the cores have nothing else to do
            made = pool.map(lambda name, files=files: _write(through / os.path.basename(name), files[name]), missing)
            found = kept | dict(zip(missing, made, strict=True))
        for name in files:
            like, info = known.get(name), found[name]
            written.append(info)
            if name in kept:
                continue
            if like not in (None, info):
                raise OutputError(
                    f"{output / name} cannot be repaired: source and packages give other bytes than those of the "
                    "manifest; give back what has changed, or remove manifest.json and run again"
                )
            path = place(info) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(through / os.path.basename(name), path, flushes_name=False)
            folders.add(path.parent)
    for folder in folders:
        fsync_folder(folder)
    return tuple(written)


def _write(path: pathlib.Path, write: Callable[[BinaryIO], None]) -> IndexInfo:
    with commit(path, flushes_name=False) as file:
        write(file)
    return IndexInfo.of_file(path)


def _write_split(
    file: BinaryIO,
    store: RowStore,
    shards: Sequence[tuple[ShardSpec, ShardInfo]],
    inputs: Callable[[ShardSpec], np.ndarray],
) -> None:
    from pyarrow import parquet

    writer = None
    for table in _groups(store, shards, inputs):
        if writer is None:
            # Values that hardly repeat take half the time and bytes without a dictionary.
            repeated = [field.name for field in table.schema if not _is_of_one_row(field)]
            encodings = {"record": "DELTA_BINARY_PACKED"}
            writer = parquet.ParquetWriter(
                file, table.schema, compression="zstd", use_dictionary=repeated, column_encoding=encodings
            )
        writer.write_table(table)
    if writer is not None:
        writer.close()


def _is_of_one_row(field: Any) -> bool:
    is_path = (field.metadata or {}).get(KIND) == b"path"
    return is_path or field.name in ("key", "record") or field.name.endswith((SIZE, DIGEST))


def _write_keys(file: BinaryIO, store: RowStore, shards: Sequence[tuple[ShardSpec, ShardInfo]]) -> None:
    order = store.order[shards[0][0].start : shards[-1][0].stop]
    file.writelines(packed_hashes(len(order), lambda numbers: store.hashes[order[numbers]]))


def _groups(
    store: RowStore, shards: Sequence[tuple[ShardSpec, ShardInfo]], inputs: Callable[[ShardSpec], np.ndarray]
) -> Iterator[Any]:
    """Yield tables of up to `_GROUP_ROWS` rows, so that only one group is in memory."""
    import pyarrow as pa

    first, last = shards[0][0].start, shards[-1][0].stop
    numbers = np.array([shard.number for shard, _ in shards], np.int32)
    starts = np.array([shard.start for shard, _ in shards], np.int64)
    even = np.array(
        [not info.lacks_records and info.num_records == shard.num_rows * shard.copies for shard, info in shards]
    )
    for begin in range(first, last, _GROUP_ROWS):
        places = np.arange(begin, min(begin + _GROUP_ROWS, last))
        of = np.searchsorted(starts, places, side="right") - 1
        rows = store.order[begin : begin + len(places)]
        columns = {
            "key": _texts(store.gathered("key", rows)),
            "shard": numbers_array(numbers[of]),
            "record": numbers_array((places - starts[of]) * shards[0][0].copies, even[of]),
        }
        kinds = {}
        for field in store.fields:
            name = column_of_field(field.name)
            columns[name], kinds[name] = _column(field, store, rows)
        if store.file_fields:
            columns |= _input_columns(store, _inputs_of([shard for shard, _ in shards], places, inputs))
        fields = [
            pa.field(name, column.type, metadata={KIND: kinds[name]} if kinds.get(name) else None)
            for name, column in columns.items()
        ]
        yield pa.table(list(columns.values()), schema=pa.schema(fields))


def _column(field: RowField, store: RowStore, rows: np.ndarray) -> tuple[Any, str]:
    """Return a field as an Arrow array, and the kind of its values: "path", "json", or "" for plain values."""
    if field.kind == "json":
        types = set(field.types) - {"NoneType"}
        plain = _NULLABLE.get(next(iter(types))) if len(types) == 1 and "NoneType" in field.types else None
        if plain is None:
            return _texts(store.gathered(field.stem, rows)), "json"
        values = store.column(field, rows)
        valid = np.array([value is not None for value in values])
        return numbers_array(np.array([value or 0 for value in values], plain), valid), ""
    values = store.column(field, rows)
    if field.kind == "path":
        return texts_array([None if value is None else str(value) for value in values]), "path"
    return (texts_array(values) if field.kind == "text" else numbers_array(values)), ""


def _texts(texts: Texts) -> Any:
    """Return texts as an Arrow array, without a Python object for each."""
    import pyarrow as pa

    ends = np.concatenate([np.zeros(1, np.uint64), texts.ends])
    if int(ends[-1]) > np.iinfo(np.int32).max:
        return pa.array(texts.tolist(), pa.string())
    found = pa.StringArray.from_buffers(len(texts), pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(texts.data))
    found.validate(full=True)
    return found


def _inputs_of(
    shards: Sequence[ShardSpec], places: np.ndarray, inputs: Callable[[ShardSpec], np.ndarray]
) -> np.ndarray:
    """Return the content of the input files of consecutive rows, from their shards."""
    first, last = int(places[0]), int(places[-1])
    found = []
    for number in range(bisect.bisect_right(shards, first, key=lambda shard: shard.start) - 1, len(shards)):
        shard = shards[number]
        if shard.start > last:
            break
        found.append(inputs(shard)[max(first - shard.start, 0) : last + 1 - shard.start])
    return np.concatenate(found)


def _input_columns(store: RowStore, inputs: np.ndarray) -> dict[str, Any]:
    import pyarrow as pa

    columns = {}
    for number, field in enumerate(store.file_fields):
        found, name = inputs[:, number], column_of_field(field.name)
        is_there = found["path"] > 0
        columns[name + SIZE] = numbers_array(found["size"], is_there)
        digests = pa.py_buffer(found["digest"].tobytes())
        columns[name + DIGEST] = pa.Array.from_buffers(pa.binary(16), len(found), [validity(is_there), digests])
    return columns
