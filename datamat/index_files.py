"""The index that was used, beside the shards: `index/SPLIT.parquet`, one row per input sample, in shard order.

key     string   of the input row
shard   int32    number of the shard in the split
record  int64    number of the row's first record in the shard; null where a transform returned several samples
...              the fields of the row
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.storage import commit, fsync_folder

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

    from datamat.manifest import ShardInfo
    from datamat.plan import Plan, ShardSpec
    from datamat.rows import RowStore

__all__ = ["load_parquet", "write_index_files"]

_GROUP_ROWS = 65_536
_OWN = ("key", "shard", "record")


def load_parquet() -> None:
    """Import what writing needs, so that it is there at the end of a run: a tenth of a second, of one core only."""
    import pyarrow.parquet  # noqa: F401


def write_index_files(
    folder: pathlib.Path, store: RowStore, plan: Plan, infos: Sequence[ShardInfo], *, through: pathlib.Path
) -> None:
    """Write the index of every split, and remove those of splits that are no more.

    Args:
        folder: `index` in the output.
        store: the rows, in the order of the plan.
        plan: which row is where.
        infos: the finished shards, as in the plan.
        through: folder for the temporary files.
    """
    folder.mkdir(exist_ok=True)
    told = {info.name: info for info in infos}
    for split, shards in groupby(plan.shards, key=lambda shard: shard.split):
        with commit(folder / f"{split}.parquet", through=through) as file:
            _write_split(file, store, [(shard, told[shard.name]) for shard in shards])
    for path in folder.glob("*.parquet"):
        if path.stem not in plan.splits:
            path.unlink()
    fsync_folder(folder)


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
    even = np.array([info.num_records == shard.num_rows * shard.copies for shard, info in shards])
    for begin in range(first, last, _GROUP_ROWS):
        places = np.arange(begin, min(begin + _GROUP_ROWS, last))
        of = np.searchsorted(starts, places, side="right") - 1
        rows = store.order[begin : begin + len(places)]
        yield {
            "key": store.keys(rows),
            "shard": numbers[of],
            "record": _nullable((places - starts[of]) * shards[0][0].copies, even[of]),
            **{f"field_{name}" if name in _OWN else name: values for name, values in store.columns(rows)},
        }


def _nullable(values: np.ndarray, valid: np.ndarray) -> Any:
    import pyarrow as pa

    return pa.array(values, mask=~valid)
