"""What litdata needs to stream Parquet shards: `index.json` for the whole directory, and one index for each split.

litdata (0.2.76) looks for `index.json` by itself and knows no splits; `index_path=` takes the index of a split. Chunks
stand in the order of the shards: litdata's own indexer takes them as the file system lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datamat.formats.arrow import arrow_columns
from datamat.interop.contents import shards_of
from datamat.storage import render_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from datamat.manifest import Manifest, ShardInfo

__all__ = ["litdata_sidecars"]


def litdata_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Return the indexes, by the names of their files; none where there are no Parquet shards."""
    splits = shards_of(manifest, "parquet")
    if not splits:
        return {}
    return {
        "index.json": _index(manifest, (shard for shards in splits.values() for shard in shards)),
        **{f"{manifest.name}-{split}.litdata.json": _index(manifest, shards) for split, shards in splits.items()},
    }


def _index(manifest: Manifest, shards: Iterable[ShardInfo]) -> bytes:
    chunks = [
        {"filename": shard.file, "chunk_size": shard.num_records, "chunk_bytes": shard.num_bytes, "dim": None}
        for shard in shards
        if shard.num_records  # a chunk without rows has no first one, which litdata asks for
    ]
    config = {
        "chunk_bytes": None,
        "chunk_size": None,
        "compression": None,
        "data_format": [str(column.type) for column in arrow_columns(manifest.features)],
        "data_spec": None,
        "encryption": None,
        "item_loader": "ParquetLoader",
        "types": None,
    }
    return render_json({"chunks": chunks, "config": config})
