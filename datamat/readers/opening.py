"""Shards opened together with the offsets of their records, which are tested before any record is asked for.

a directory   its offsets, its shard or a copy of it
a URL         a copy of the shard, then the offsets: they have no checksum, so they are kept once they have led to
              the last record. Those of other records, fetched while the directory was written anew, do not
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from datamat.errors import CorruptDataError, OutputError
from datamat.formats import Offsets

if TYPE_CHECKING:
    import pathlib

    from datamat.formats import ShardFormat, ShardReader
    from datamat.manifest import ShardInfo
    from datamat.readers.cache import ShardStore
    from datamat.readers.remote import RemotePath

__all__ = ["open_local", "open_remote"]

_MOST_LINE_BYTES = 3 * 21  # three numbers of 64 bits, and what stands between them


def open_local(
    folder: pathlib.Path, info: ShardInfo, shard_format: ShardFormat, store: ShardStore | None
) -> ShardReader:
    """Return the reader of a shard.

    Args:
        folder: the directory.
        info: which of its shards.
        shard_format: of the shard.
        store: of copies of shards, or None.

    Raises:
        CorruptDataError: the shard or its offsets cannot be read, or are not what the manifest says.
    """
    place = folder / info.index_file
    try:
        content = place.read_bytes()
    except OSError as error:
        raise CorruptDataError(f"{place}: {error.strerror}; run the job again to write it anew") from error
    offsets = _offsets(content, place, info)
    path = folder / info.file
    try:
        return shard_format.reader(store.local(info, path) if store else path, offsets)
    except OSError as error:
        raise CorruptDataError(f"{path}: {error.strerror}; run the job again to write it anew") from error


def open_remote(folder: RemotePath, info: ShardInfo, shard_format: ShardFormat, store: ShardStore) -> ShardReader:
    """Return the reader of the copy of a shard behind a URL; see `open_local`.

    Raises:
        CorruptDataError: the shard or its offsets are not what the manifest says.
        OutputError: one of them cannot be fetched, or has no room.
    """
    copy = store.fetch(info, folder / info.file)
    place = folder / info.index_file
    kept = store.offsets(info)
    if kept is not None:
        with contextlib.suppress(CorruptDataError):  # by what happened to the disk: fetched anew
            return _reader(copy, _offsets(kept, place, info), shard_format)
    content = place.read(_MOST_LINE_BYTES * info.num_records)
    opened = _reader(copy, _offsets(content, place, info), shard_format)
    try:
        if info.num_records:
            opened.read(info.num_records - 1)
        store.keep_offsets(info, content)
    except CorruptDataError as error:
        opened.close()
        raise CorruptDataError(
            f"{place} does not lead to the last record of {info.file}, whose checksum is right: {error}"
        ) from error
    return opened


def _reader(copy: pathlib.Path, offsets: Offsets, shard_format: ShardFormat) -> ShardReader:
    try:
        return shard_format.reader(copy, offsets)
    except OSError as error:  # it was there a moment ago
        raise OutputError(f"{copy}: {error.strerror}; was cache_dir emptied? load again") from error


def _offsets(content: bytes, place: pathlib.Path | RemotePath, info: ShardInfo) -> Offsets:
    try:
        offsets = Offsets.from_text(content.decode("ascii"))
    except (UnicodeDecodeError, CorruptDataError) as error:
        raise CorruptDataError(f"{place}: {error}; run the job again to write it anew") from error
    if len(offsets) != info.num_records:
        raise CorruptDataError(
            f"{place} holds {len(offsets)} offsets, the manifest says {info.num_records} records; run the job again"
        )
    end = np.uint64(info.num_bytes)
    outside = np.flatnonzero((offsets.offset > end) | (offsets.size > end - np.minimum(offsets.offset, end)))
    if len(outside):
        raise CorruptDataError(
            f"{place}: record {outside[0]} would lie outside of {info.file}, which has {info.num_bytes} bytes; "
            "run the job again to write it anew"
        )
    return offsets
