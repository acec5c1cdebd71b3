"""What litdata needs to stream Parquet shards: `index.json`, which lists the shards with their rows and bytes.

litdata (0.2.76) knows no splits, but takes those shards of the index whose names fit the pattern that it is given.
Chunks stand in the order of the shards: its own indexer takes them as the file system lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datamat.formats.arrow import arrow_columns
from datamat.interop.contents import shards_of
from datamat.storage import render_json

if TYPE_CHECKING:
    from datamat.manifest import Manifest

__all__ = ["litdata_sidecars"]


def litdata_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Return the index, by the name of its file; none where there are no Parquet shards."""
    splits = shards_of(manifest, "parquet")
    if not splits:
        return {}
    chunks = [
        {"filename": shard.file, "chunk_size": shard.num_records, "chunk_bytes": shard.num_bytes, "dim": None}
        for shards in splits.values()
        for shard in shards
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
    return {"index.json": render_json({"chunks": chunks, "config": config})}
