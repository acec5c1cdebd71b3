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
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from datamat.directory.files import commit, fsync_folder, publish
from datamat.directory.index_files import DIGEST, KIND, SIZE, column_of_field
from datamat.directory.keys import packed_hashes
from datamat.directory.manifest import IndexInfo, index_file, keys_file
from datamat.errors import OutputError
from datamat.formats.example import varint
from datamat.formats.thrift import BINARY, I32, I64, LENGTH, LIST, MAGIC, STRUCT, footer_bytes, write_struct
from datamat.sources.rows import Texts

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import BinaryIO

    from datamat.directory.manifest import ShardInfo
    from datamat.formats.thrift import Struct
    from datamat.plan.plan import Plan, ShardSpec
    from datamat.sources.store import RowField, RowStore

_GROUP_ROWS = 16_384


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
        for name, write in files.items():
            like = known.get(name)
            if like is not None and like.is_there(output):
                written.append(like)
                continue
            made = through / os.path.basename(name)
            with commit(made, flushes_name=False) as file:
                write(file)
            info = IndexInfo.of_file(made)
            if like not in (None, info):
                raise OutputError(
                    f"{output / name} cannot be repaired: source and packages give other bytes than those of the "
                    "manifest; give back what has changed, or remove manifest.json and run again"
                )
            path = place(info) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(made, path, flushes_name=False)
            folders.add(path.parent)
            written.append(info)
    for folder in folders:
        fsync_folder(folder)
    return tuple(written)


def _write_split(
    file: BinaryIO,
    store: RowStore,
    shards: Sequence[tuple[ShardSpec, ShardInfo]],
    inputs: Callable[[ShardSpec], np.ndarray],
) -> None:
    schema: list[Struct] = []
    kinds: list[Struct] = []
    groups: list[Struct] = []
    file.write(MAGIC)
    for num_rows, columns in _groups(store, shards, inputs):
        chunks: list[Struct] = []
        for name, column in columns.items():
            if not groups:
                schema.append(column.schema(name))
                if column.kind:
                    kinds.append({1: (BINARY, KIND + name.encode()), 2: (BINARY, column.kind.encode())})
            chunks.append(column.write(file, name, num_rows))
        num_bytes = sum(chunk[3][1][_PLAIN_BYTES][1] for chunk in chunks)
        groups.append({1: (LIST, (STRUCT, chunks)), 2: (I64, num_bytes), 3: (I64, num_rows)})
    footer = {
        1: (I32, 1),
        2: (LIST, (STRUCT, [{4: (BINARY, b"schema"), 5: (I32, len(schema))}, *schema])),
        3: (I64, shards[-1][0].stop - shards[0][0].start),
        4: (LIST, (STRUCT, groups)),
        5: (LIST, (STRUCT, kinds)),
        6: (BINARY, b"datamat"),
    }
    file.write(footer_bytes(footer))


def _write_keys(file: BinaryIO, store: RowStore, shards: Sequence[tuple[ShardSpec, ShardInfo]]) -> None:
    order = store.order[shards[0][0].start : shards[-1][0].stop]
    file.writelines(packed_hashes(len(order), lambda numbers: store.hashes[order[numbers]]))


def _groups(
    store: RowStore, shards: Sequence[tuple[ShardSpec, ShardInfo]], inputs: Callable[[ShardSpec], np.ndarray]
) -> Iterator[tuple[int, dict[str, _Column]]]:
    """Yield the numbers of rows and the columns of up to `_GROUP_ROWS` rows, so that only one group is in memory."""
    numbers = np.array([shard.number for shard, _ in shards], np.int32)
    starts = np.array([shard.start for shard, _ in shards], np.int64)
    even = np.array(
        [not info.lacks_records and info.num_records == shard.num_rows * shard.copies for shard, info in shards]
    )
    begin, last, num_rows = shards[0][0].start, shards[-1][0].stop, _GROUP_ROWS
    while begin < last:
        places = np.arange(begin, min(begin + num_rows, last))
        of = np.searchsorted(starts, places, side="right") - 1
        rows = store.order[begin : begin + len(places)]
        columns = {
            "key": _texts(store.gathered("key", rows)),
            "shard": _numbers(numbers[of]),
            "record": _numbers((places - starts[of]) * shards[0][0].copies, even[of]),
        }
        for field in store.fields:
            columns[column_of_field(field.name)] = _column(field, store, rows)
        if store.file_fields:
            columns |= _input_columns(store, _inputs_of([shard for shard, _ in shards], places, inputs))
        if max(len(column.data) for column in columns.values()) > _MOST_PAGE_BYTES and len(places) > 1:
            num_rows = len(places) // 2
            continue
        yield len(places), columns
        begin += len(places)


def _column(field: RowField, store: RowStore, rows: np.ndarray) -> _Column:
    """Return a field of rows as a column."""
    if field.kind == "json":
        types = set(field.types) - {"NoneType"}
        plain = _NULLABLE.get(next(iter(types))) if len(types) == 1 and "NoneType" in field.types else None
        if plain is None:
            return _texts(store.gathered(field.stem, rows), kind="json")
        values = store.column(field, rows)
        valid = np.array([value is not None for value in values])
        return _numbers(np.array([value or 0 for value in values], plain), valid)
    values = store.column(field, rows)
    if field.kind in {"path", "text"}:
        texts = [str(value).encode() for value in values if value is not None]
        valid = np.array([value is not None for value in values])
        return _texts(Texts.of_bytes(texts), valid, "path" if field.kind == "path" else "")
    return _numbers(values)


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


def _input_columns(store: RowStore, inputs: np.ndarray) -> dict[str, _Column]:
    columns = {}
    for number, field in enumerate(store.file_fields):
        found, name = inputs[:, number], column_of_field(field.name)
        is_there = found["path"] > 0
        columns[name + SIZE] = _numbers(found["size"], is_there)
        columns[name + DIGEST] = _Column(_FIXED, found["digest"][is_there].tobytes(), is_there)
    return columns


# ---------------------------------------------------------------- Parquet
#
# Written here, since loading pyarrow would take an eighth of a short job's time. The structs are those of
# parquet.thrift; each row group has one page per column, whose values have the encoding PLAIN.


_BOOL, _INT32, _INT64, _DOUBLE, _TEXT, _FIXED = 0, 1, 2, 5, 6, 7
_TYPES = {"bool": _BOOL, "int32": _INT32, "int64": _INT64, "float64": _DOUBLE}
_PLAIN, _RLE = 0, 3
_NO_CODEC, _ZSTD = 0, 6
_PLAIN_BYTES = 6  # field of ColumnMetaData
_PACKED_BYTES = 1 << 16  # pages of this size or more are compressed
_MOST_PAGE_BYTES = 1 << 30  # sizes of pages have 32 bits


class _Column(NamedTuple):
    """A column of a row group.

    Attributes:
        type: its type in Parquet.
        data: the values that are not null.
        valid: bool (n,), which values are not null; None for a column without nulls.
        kind: what the values stand for, if not for themselves: "path" or "json".
    """

    type: int
    data: bytes
    valid: np.ndarray | None = None
    kind: str = ""

    def schema(self, name: str) -> Struct:
        """Return its `SchemaElement`."""
        found: Struct = {1: (I32, self.type), 3: (I32, int(self.valid is not None)), 4: (BINARY, name.encode())}
        if self.type == _TEXT:
            found[6] = (I32, 0)  # UTF-8
        elif self.type == _FIXED:
            found[2] = (I32, 16)
        return found

    def write(self, file: BinaryIO, name: str, num_rows: int) -> Struct:
        """Write its page; return its `ColumnChunk`."""
        place, page, codec = file.tell(), self.data, _NO_CODEC
        if self.valid is not None:
            levels = varint(-(-num_rows // 8) << 1 | 1) + np.packbits(self.valid, bitorder="little").tobytes()
            page = LENGTH.pack(len(levels)) + levels + page
        num_bytes = len(page)
        if num_bytes >= _PACKED_BYTES:
            import pyarrow as pa

            page, codec = pa.Codec("zstd", compression_level=1).compress(page, asbytes=True), _ZSTD
        values = {1: (I32, num_rows), 2: (I32, _PLAIN), 3: (I32, _RLE), 4: (I32, _RLE)}
        header = bytearray()
        write_struct(header, {1: (I32, 0), 2: (I32, num_bytes), 3: (I32, len(page)), 5: (STRUCT, values)})
        file.write(header)
        file.write(page)
        about = {
            1: (I32, self.type),
            2: (LIST, (I32, [_RLE, _PLAIN])),
            3: (LIST, (BINARY, [name.encode()])),
            4: (I32, codec),
            5: (I64, num_rows),
            _PLAIN_BYTES: (I64, len(header) + num_bytes),
            7: (I64, len(header) + len(page)),
            9: (I64, place),
        }
        return {2: (I64, 0), 3: (STRUCT, about)}


def _numbers(values: np.ndarray, valid: np.ndarray | None = None) -> _Column:
    """Return a column of numbers or booleans; invalid ones are null."""
    kept = values if valid is None else values[valid]
    data = np.packbits(kept, bitorder="little") if values.dtype == np.bool_ else kept
    return _Column(_TYPES[values.dtype.name], data.tobytes(), valid)


def _texts(texts: Texts, valid: np.ndarray | None = None, kind: str = "") -> _Column:
    """Return a column of texts, each after its length in 4 bytes; `valid` has one more element for each null."""
    texts.data.decode()  # an index with other bytes could not be read
    starts = np.concatenate([np.zeros(1, np.uint64), texts.ends])
    lengths = np.diff(starts).astype("<u4").view(np.uint8)
    data = np.insert(np.frombuffer(texts.data, np.uint8), np.repeat(starts[:-1].astype(np.int64), 4), lengths)
    return _Column(_TEXT, data.tobytes(), valid, kind)
