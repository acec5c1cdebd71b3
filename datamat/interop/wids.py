"""What wids needs to read tar shards by number: `NAME-SPLIT.json`, which lists the shards of a split with their counts.

The format is that of wids 0.1 (`wids-shard-index-v1`). Names of files are relative to the index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datamat.interop.contents import shards_of
from datamat.storage import render_json

if TYPE_CHECKING:
    from datamat.manifest import Manifest

__all__ = ["wids_sidecars"]


def wids_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Return the index of each split, by the name of its file; none where there are no tar shards."""
    return {
        f"{manifest.name}-{split}.json": render_json(
            {
                "__kind__": "wids-shard-index-v1",
                "wids_version": 1,
                "name": f"{manifest.name}-{split}",
                "shardlist": [{"url": shard.file, "nsamples": shard.num_records} for shard in shards],
            }
        )
        for split, shards in shards_of(manifest, "webdataset").items()
    }
