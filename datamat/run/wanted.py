"""The required result of a repair: the original bytes of the output."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from datamat.errors import OutputError
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.directory.manifest import IndexInfo, Manifest, ShardFiles, ShardInfo


@frozen()
class Wanted:
    """The result that a repair must reach.

    Attributes:
        files: fingerprint of each file, and its acceptable checksums.
        index: required size and checksum of each index file.
        manifest: the manifest, which must stay unchanged; None if it is damaged.
        hurt: names of shards known to be damaged, even if their sizes and ends match.
    """

    files: Mapping[str, tuple[str, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    index: tuple[IndexInfo, ...] = ()
    manifest: Manifest | None = None
    hurt: frozenset[str] = frozenset()

    @classmethod
    def of(cls, manifest: Manifest, hurt: Iterable[str]) -> Wanted:
        """Return the result required by an intact manifest."""
        files = {info.file: (info.fingerprint, (info.checksum,)) for info in manifest.all_files}
        return cls(files, manifest.index, manifest, frozenset(hurt))

    def judge(self, files: ShardFiles) -> None:
        """Raise `OtherBytesError` if the files of a shard differ from the original ones."""
        for info in files:
            fingerprint, checksums = self.files.get(info.file, ("", ()))
            if fingerprint == info.fingerprint and checksums and info.checksum not in checksums:
                raise OtherBytesError(
                    f"{info.file}: the source gives bytes with the checksum {info.checksum}, the manifest says "
                    f"{' or '.join(checksums)}"
                )

    def is_met(self, files: Iterable[ShardInfo], index: Sequence[IndexInfo]) -> bool:
        """Return True if the files match the manifest to restore."""
        if self.manifest is None or set(index) != set(self.manifest.index):
            return False
        return set(files) == set(self.manifest.all_files)


NOTHING_WANTED = Wanted()
"""The requirements of a run that is not a repair: none."""


class OtherBytesError(OutputError):
    """The rebuilt bytes differ from the original ones."""
