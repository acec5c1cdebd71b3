"""The index that was used, beside the shards: `index/SPLIT.parquet`, one row per input sample, in shard order.

key             string  of the input row
shard           int32   number of the shard in the split
record          int64   number of the row's first record in the shard; null in shards where rows differ in how many
FIELD                   each field of the row; `field_FIELD` where it has the name of one of these
FIELD:size      int64   of fields that hold the path of an input file: its size in bytes, ...
FIELD:mtime_ns  int64   ... and its time of change, nanoseconds since 1970
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import CorruptDataError
from datamat.manifest import IndexInfo
from datamat.storage import commit, fsync_folder

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

    from datamat.manifest import ShardInfo
    from datamat.plan import Plan, ShardSpec
    from datamat.rows import RowStore

__all__ = ["MTIME", "SIZE", "column_of_field", "field_of_column", "read_index_file", "write_index_files"]

_GROUP_ROWS = 65_536
_OWN = ("key", "shard", "record")
_PREFIX = "field_"
SIZE, MTIME = ":size", ":mtime_ns"
"""What the columns of an input file's size and time of change end in."""


def write_index_files(
    folder: pathlib.Path, store: RowStore, plan: Plan, infos: Sequence[ShardInfo], *, through: pathlib.Path
) -> tuple[IndexInfo, ...]:
    """Write the index of every split, remove those of splits that are no more, and return what the manifest says of it.

    Args:
        folder: `index` in the output.
        store: the rows, in the order of the plan.
        plan: which row is where.
        infos: the finished shards, as in the plan.
        through: folder for the temporary files.
    """
    folder.mkdir(exist_ok=True)
    told = {info.name: info for info in infos}
    written = []
    for split, shards in groupby(plan.shards, key=lambda shard: shard.split):
        with commit(folder / f"{split}.parquet", through=through) as file:
            _write_split(file, store, [(shard, told[shard.name]) for shard in shards])
        written.append(IndexInfo.of_file(folder / f"{split}.parquet"))
    for path in folder.glob("*.parquet"):
        if path.stem not in plan.splits:
            path.unlink()
    fsync_folder(folder)
    return tuple(written)


def read_index_file(path: pathlib.Path, columns: Sequence[str] | None = None) -> Any:
    """Return an index file as a `pyarrow.Table`.

    Args:
        path: of the file.
        columns: names of those to read; None reads all.

    Raises:
        CorruptDataError: it is not there, or cannot be read.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with open(path, "rb") as file:
            return parquet.read_table(file, columns=columns, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise CorruptDataError(f"index file {path}: {reason}; run repair() to write it anew") from error


def field_of_column(name: str) -> str | None:
    """Return the field that a column holds, or None for one that holds something else of the row."""
    if name in _OWN or name.endswith((SIZE, MTIME)):
        return None
    return name.removeprefix(_PREFIX).removesuffix(":") if name.startswith(_PREFIX) else name


def column_of_field(name: str) -> str:
    """Return the name of the column that holds a field: its own, where that cannot be taken for another column's."""
    if name in _OWN or ":" in name or name.startswith(_PREFIX):
        return f"{_PREFIX}{name}{':' if ':' in name else ''}"
    return name


def _write_split(file: BinaryIO, store: RowStore, shards: Sequence[tuple[ShardSpec, ShardInfo]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    writer = None
    for columns in _groups(store, shards):
        table = pa.table(columns)
        if writer is None:
            writer = parquet.ParquetWriter(file, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is not None:
        writer.close()


def _groups(store: RowStore, shards: Sequence[tuple[ShardSpec, ShardInfo]]) -> Iterator[dict[str, Any]]:
    """Yield the columns of up to `_GROUP_ROWS` rows at a time: memory stays at one group."""
    first, last = shards[0][0].start, shards[-1][0].stop
    numbers = np.array([shard.number for shard, _ in shards], np.int32)
    starts = np.array([shard.start for shard, _ in shards], np.int64)
    even = np.array(
        [not info.num_failed and info.num_records == shard.num_rows * shard.copies for shard, info in shards]
    )
    for begin in range(first, last, _GROUP_ROWS):
        places = np.arange(begin, min(begin + _GROUP_ROWS, last))
        of = np.searchsorted(starts, places, side="right") - 1
        rows = store.order[begin : begin + len(places)]
        yield {
            "key": store.keys(rows),
            "shard": numbers[of],
            "record": _nullable((places - starts[of]) * shards[0][0].copies, even[of]),
            **{column_of_field(name): values for name, values in store.columns(rows)},
            **{
                column_of_field(name) + ending: values
                for name, *columns in store.file_columns(rows)
                for ending, values in zip((SIZE, MTIME), columns, strict=True)
            },
        }


def _nullable(values: np.ndarray, valid: np.ndarray) -> Any:
    import pyarrow as pa

    return pa.array(values, mask=~valid)
