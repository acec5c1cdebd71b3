"""Takes finished directories as a source: their records, with stored values unchanged."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any, final

from datamat.directory.manifest import Manifest
from datamat.folders import LocalFolder
from datamat.formats import get_format
from datamat.readers.cache import RecordCache
from datamat.readers.records import KeyIndex, RecordFiles
from datamat.readers.remote import Loaded
from datamat.writers.base import DataSource
from datamat.writers.unpacking import SpoolOptions


@final
class FinishedSource(DataSource):
    """Records of a finished directory; images stay encoded, so that their bytes are stored unchanged."""

    has_schema = True

    def __init__(self, folder: pathlib.Path) -> None:
        manifest, loaded = Manifest.read(folder), Loaded(LocalFolder(folder))
        shard_format = get_format(manifest.format).with_features(manifest.features)
        self._records = RecordFiles(loaded, manifest.shards, shard_format, RecordCache(0))
        self._keys = KeyIndex(loaded, manifest, None, self._records)
        self._splits = {split: sum(info.num_records for info in infos) for split, infos in manifest.splits.items()}
        self._features = manifest.features
        self.features = {name: feature for name, feature in manifest.features.items() if name != "key"}
        self.identity = [info.checksum for info in manifest.shards]
        self.dicts = frozenset(manifest.features.dicts)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> dict[str, Any]:
        columns: Any = self._records.read_record(number)
        stored = self._features.stored
        return {name: feature.encoded_value(stored(name, columns)) for name, feature in self.features.items()}

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        splits = itertools.chain.from_iterable(itertools.repeat(*item) for item in self._splits.items())
        for key, split in zip(self._keys.keys(), splits, strict=True):
            yield key.replace("#", "-"), split  # a copy is a sample of its own here, and # marks copies


def open_folder(folder: pathlib.Path, spool: SpoolOptions) -> DataSource:
    """Return the records of a finished directory."""
    del spool
    return FinishedSource(folder)
