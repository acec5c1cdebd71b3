"""What a repair wants of its run: the bytes that the output had."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from datamat.errors import OutputError
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.directory.manifest import IndexInfo, Manifest, ShardFiles, ShardInfo


__all__ = ["NOTHING_WANTED", "OtherBytesError", "Wanted"]


@frozen()
class Wanted:
    """The result that a repair must reach.

    Attributes:
        files: fingerprint of each file, and the checksums of which it must have one.
        index: size and checksum that each file of the index must have.
        manifest: the manifest, which is to stay; None if it is damaged.
        hurt: names of the shards that are damaged, whatever their sizes and ends say.
    """

    files: Mapping[str, tuple[str, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    index: tuple[IndexInfo, ...] = ()
    manifest: Manifest | None = None
    hurt: frozenset[str] = frozenset()

    @classmethod
    def of(cls, manifest: Manifest, hurt: Iterable[str]) -> Wanted:
        """Return what a repair wants by a manifest that is whole."""
        files = {info.file: (info.fingerprint, (info.checksum,)) for info in manifest.all_files}
        return cls(files, manifest.index, manifest, frozenset(hurt))

    def judge(self, files: ShardFiles) -> None:
        """Raise `OtherBytesError` if the files of a shard have other bytes than before."""
        for info in files:
            fingerprint, checksums = self.files.get(info.file, ("", ()))
            if fingerprint == info.fingerprint and checksums and info.checksum not in checksums:
                raise OtherBytesError(
                    f"{info.file}: the source gives bytes with the checksum {info.checksum}, the manifest says "
                    f"{' or '.join(checksums)}"
                )

    def is_met(self, files: Iterable[ShardInfo], index: Sequence[IndexInfo]) -> bool:
        """Return True if the files are those of the manifest to restore."""
        if self.manifest is None or set(index) != set(self.manifest.index):
            return False
        return set(files) == set(self.manifest.all_files)


NOTHING_WANTED = Wanted()
"""What a run wants that is no repair."""


class OtherBytesError(OutputError):
    """The rebuilt bytes differ from the original ones."""
