"""What a finished directory holds for readers of one format: its shards, by split.

The one place of this package that knows how a manifest tells of formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datamat.manifest import Manifest, ShardInfo

__all__ = ["formats_of", "pattern", "shards_of"]


def formats_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the formats that the shards are in."""
    return tuple(manifest.by_format)


def shards_of(manifest: Manifest, format_name: str) -> Mapping[str, tuple[ShardInfo, ...]]:
    """Return the files of a format, by split and in order; none where the directory does not hold the format."""
    return manifest.of_format(format_name).splits if format_name in manifest.by_format else {}


def pattern(manifest: Manifest, split: str, shards: tuple[ShardInfo, ...]) -> str:
    """Return the pattern of names that the files of one split and one format have, and no other file."""
    extension = shards[0].file.partition(".")[2]
    return f"{manifest.name}-{split}-*.{extension}"
