"""What is known of finished shards while no manifest tells of them: an entry for each, `.datamat/shards/SHARD.json`.

An entry lists the files of the shard, one for each format, as the manifest would. It is written in one step when all
of them are complete, before they get their names.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING

from datamat.manifest import MANIFEST_FILE, ShardInfo, by_shard, manifest_bytes
from datamat.storage import commit_json, fsync_folder, publish, read_json

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable

    from datamat.manifest import ShardFiles

__all__ = ["put_aside", "read_entry", "salvaged_shards", "write_entry"]


def write_entry(entries: pathlib.Path, files: ShardFiles) -> None:
    """Write the entry of a shard, in one step."""
    commit_json(entries / f"{files[0].name}.json", [info.to_json() for info in files])


def read_entry(path: pathlib.Path) -> ShardFiles | None:
    """Return the files that an entry lists, or None where there is no entry, or only half of one."""
    with contextlib.suppress(OSError, ValueError, TypeError):  # of JSON, and CorruptDataError, which is one
        files = tuple(ShardInfo.from_json(value) for value in read_json(path))
        return files or None
    return None


def salvaged_shards(folder: pathlib.Path) -> list[ShardInfo]:
    """Return the entries of files that can still be read in a manifest that is damaged: innermost objects of the text.

    They are only worth something where the checksum in the entry is that of the file.
    """
    try:
        text = manifest_bytes(folder).decode(errors="replace")
    except (OSError, ValueError):
        return []
    found = []
    for entry in re.findall(r"\{[^{}]*\}", text):
        with contextlib.suppress(ValueError):  # of JSON, and CorruptDataError, which is one
            value = json.loads(entry)
            found += [ShardInfo.from_json(value)] if "key_digest" in value else []
    return found


def put_aside(folder: pathlib.Path, entries: pathlib.Path, files: Iterable[ShardInfo]) -> None:
    """Take the manifest of a directory away, because it will not tell the truth once a shard changes.

    Args:
        folder: the directory.
        entries: where the manifest goes, for `status` to compare with, and beside it an entry for each shard.
        files: of the shards whose entries the next run is to go by.
    """
    entries.mkdir(parents=True, exist_ok=True)
    for shard in by_shard(files).values():
        write_entry(entries, shard)
    publish(folder / MANIFEST_FILE, entries / MANIFEST_FILE)
    fsync_folder(folder)
