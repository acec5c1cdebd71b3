"""`load`: from the path of a finished directory to its records."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from datamat.errors import OptionError
from datamat.formats import get_format
from datamat.manifest import MANIFEST_FILE, MOST_MANIFEST_BYTES, Manifest
from datamat.parallel.logs import get_logger
from datamat.readers.cache import RecordCache, ShardStore, byte_limit
from datamat.readers.damage import Damages
from datamat.readers.dataset import ShardedDataset
from datamat.readers.keys import KeyIndex
from datamat.readers.records import RecordFiles
from datamat.readers.remote import RemotePath, is_url
from datamat.readers.samples import SampleReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datamat.manifest import IndexInfo, ShardInfo
    from datamat.options import ErrorPolicy

__all__ = ["load"]

_CACHE_BYTES = 100 << 30
_logger = get_logger("datamat.readers")


def load(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    format: str | None = None,  # noqa: A002 -- as for `Materializer`
    errors: str | ErrorPolicy = "raise",
    cache: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = _CACHE_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardedDataset:
    """Open a finished directory.

    Args:
        path: the directory that a run wrote, or its URL, of any kind that fsspec knows: `s3://BUCKET/PATH`, `https://...`.
        split: one split, or None for all, one after the other.
        format: which of the formats that the run wrote; None for the first that it named.
        errors: what to do about damaged records where many are read: "raise", or "skip", which leaves them out, logs
            each and counts them in `num_skipped`; `ErrorPolicy("skip", max_errors=...)` sets a limit. A single record
            that is asked for raises in any case.
        cache: bytes of memory, in each process, for encoded records; the first that are read fill it.
        cache_dir: a folder on a fast local disk where shards are copied to when they are first needed, for
            directories on a slow file system. Any number of processes may share it. A URL needs one.
        cache_bytes: most bytes of copies in `cache_dir`; shards that have no room are read where they are, or, behind a
            URL, raise `OutputError`.
        storage_options: what fsspec is given with a URL, such as `{"key": ..., "secret": ...}` or `{"anon": True}`.

    Returns:
        The records: by position, by key, or in order.

    Raises:
        OutputError: there is no manifest: the run is not finished; or the URL cannot be read.
        OptionError: there is no such split or format, or an option makes no sense.
        CorruptDataError: the manifest is damaged.
        MissingDependencyError: the package for such URLs is not installed.

    Example:
        >>> train = load("out/camvid", "train")   # doctest: +SKIP
        >>> train[0]["image"].shape, train["0001TP_006690#2"]["mask"].dtype   # doctest: +SKIP
        ((360, 480, 3), dtype('uint8'))
    """
    folder = _folder(path, storage_options, cache_dir)
    found = _manifest(folder)
    manifest = found.of_format(format or found.format)
    if split is not None and split not in manifest.splits:
        raise OptionError(f"{folder} has no split {split!r}; it has {', '.join(manifest.splits) or 'none'}")
    shards = manifest.shards if split is None else manifest.splits[split]
    files: list[ShardInfo | IndexInfo] = [*shards, *(info for info in manifest.index if split in (None, info.split))]
    store = None if cache_dir is None else ShardStore(cache_dir, byte_limit(cache_bytes, "cache_bytes"), files)
    if isinstance(folder, RemotePath):
        _tell_if_too_large(folder, sum(info.num_bytes for info in files), cache_bytes)
    records = RecordFiles(
        folder,
        shards,
        get_format(manifest.format).with_features(manifest.features),
        RecordCache(byte_limit(cache, "cache")),
        store,
    )
    keys = KeyIndex(folder / "index", manifest, split, records.stored_keys, store)
    samples = SampleReader(records, manifest.features, Damages(errors, len(records)), keys)
    return ShardedDataset(folder, manifest, split, samples)


def _folder(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    cache_dir: str | os.PathLike[str] | None,
) -> pathlib.Path | RemotePath:
    if is_url(path):
        if cache_dir is None:
            raise OptionError(
                f"{path} is read through copies on a local disk, and cache_dir is None; give it a folder: "
                f"load({path!r}, cache_dir='/tmp/datamat')"
            )
        return RemotePath(os.fspath(path), dict(storage_options or {}))
    if storage_options is not None:
        raise OptionError(f"storage_options are for URLs, and {os.fspath(path)} is a path; leave them out")
    return pathlib.Path(path)


def _tell_if_too_large(folder: RemotePath, num_bytes: int, cache_bytes: int) -> None:
    """Say at once what else would be found out at the end of the first epoch."""
    if num_bytes > cache_bytes:
        _logger.warning(
            "%s: %d bytes, and cache_bytes is %d: what has no room cannot be read", folder, num_bytes, cache_bytes
        )


def _manifest(folder: pathlib.Path | RemotePath) -> Manifest:
    if not isinstance(folder, RemotePath):
        return Manifest.read(folder)
    file = folder / MANIFEST_FILE
    return Manifest.parse(file.read(MOST_MANIFEST_BYTES), str(file))
