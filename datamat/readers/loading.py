"""`load`: from the path of a finished directory to its records."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

from datamat.errors import OptionError
from datamat.formats import get_format
from datamat.manifest import Manifest
from datamat.readers.cache import RecordCache, ShardStore, byte_limit
from datamat.readers.damage import Damages
from datamat.readers.dataset import ShardedDataset
from datamat.readers.keys import KeyIndex
from datamat.readers.records import RecordFiles
from datamat.readers.samples import SampleReader

if TYPE_CHECKING:
    from datamat.options import ErrorPolicy

__all__ = ["load"]

_CACHE_BYTES = 100 << 30


def load(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    format: str | None = None,  # noqa: A002 -- as for `Materializer`
    errors: str | ErrorPolicy = "raise",
    cache: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = _CACHE_BYTES,
) -> ShardedDataset:
    """Open a finished directory.

    Args:
        path: the directory that a run wrote.
        split: one split, or None for all, one after the other.
        format: which of the formats that the run wrote; None for the first that it named.
        errors: what to do about damaged records where many are read: "raise", or "skip", which leaves them out, logs
            each and counts them in `num_skipped`; `ErrorPolicy("skip", max_errors=...)` sets a limit. A single record
            that is asked for raises in any case.
        cache: bytes of memory, in each process, for encoded records; the first that are read fill it.
        cache_dir: a folder on a fast local disk where shards are copied to when they are first needed, for
            directories on a slow file system. Any number of processes may share it.
        cache_bytes: most bytes of copies in `cache_dir`; shards that have no room are read where they are.

    Returns:
        The records: by position, by key, or in order.

    Raises:
        OutputError: there is no manifest: the run is not finished.
        OptionError: there is no such split or format, or an option makes no sense.
        CorruptDataError: the manifest cannot be read.

    Example:
        >>> train = load("out/camvid", "train")   # doctest: +SKIP
        >>> train[0]["image"].shape, train["0001TP_006690#2"]["mask"].dtype   # doctest: +SKIP
        ((360, 480, 3), dtype('uint8'))
    """
    found = Manifest.read(path)
    manifest = found.of_format(format or found.format)
    if split is not None and split not in manifest.splits:
        raise OptionError(f"{os.fspath(path)} has no split {split!r}; it has {', '.join(manifest.splits) or 'none'}")
    shards = manifest.shards if split is None else manifest.splits[split]
    store = None
    if cache_dir is not None:
        store = ShardStore(cache_dir, byte_limit(cache_bytes, "cache_bytes"), shards)
    records = RecordFiles(
        pathlib.Path(path),
        shards,
        get_format(manifest.format).with_features(manifest.features),
        RecordCache(byte_limit(cache, "cache")),
        store,
    )
    keys = KeyIndex(pathlib.Path(path, "index"), manifest, split, records.stored_keys)
    samples = SampleReader(records, manifest.features, Damages(errors, len(records)), keys)
    return ShardedDataset(pathlib.Path(path), manifest, split, samples)
