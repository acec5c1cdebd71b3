"""Shards opened together with the offsets of their records, which are tested before any record is asked for.

a directory   its offsets, mapped; its shard or a copy of it
a URL         a copy of the shard, then the offsets: they have no checksum, so they are kept once they have led to
              the last record. Those of other records, fetched while the directory was written anew, do not
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import CorruptDataError, OutputError
from datamat.formats import Offsets
from datamat.formats.guards import lacks_resources
from datamat.readers.mapped_offsets import LineMarks, MappedOffsets
from datamat.readers.remote import RemotePath

if TYPE_CHECKING:
    import pathlib

    from datamat.formats import Places, ShardFormat, ShardReader
    from datamat.manifest import ShardInfo
    from datamat.readers.cache import ShardStore

__all__ = ["ShardOpener"]

_MOST_LINE_BYTES = 3 * 21  # three numbers of 64 bits, and what stands between them


@final
class ShardOpener:
    """Opens the shards of one directory. Thread-safe and picklable.

    Args:
        folder: the directory, or its URL.
        shard_format: of the shards.
        store: of copies of shards, or None; needed where the directory is behind a URL.
    """

    def __init__(self, folder: pathlib.Path | RemotePath, shard_format: ShardFormat, store: ShardStore | None) -> None:
        self.folder = folder
        self._format = shard_format
        self._store = store
        self._marks: dict[str, LineMarks] = {}
        # Of shards behind URLs, so that nothing is fetched again for each record:
        self._unkept: dict[str, Offsets] = {}  # offsets that found no room
        self._damaged: dict[str, str] = {}

    def open(self, info: ShardInfo) -> ShardReader:
        """Return the reader of a shard.

        Raises:
            CorruptDataError: the shard or its offsets cannot be read, or are not what the manifest says.
            OutputError: no more files can be opened; or, behind a URL, one of them cannot be fetched, or has no room.
        """
        if not isinstance(self.folder, RemotePath):
            return self._open_local(self.folder, info)
        if info.file in self._damaged:
            raise CorruptDataError(self._damaged[info.file])
        try:
            return self._open_remote(self.folder, info)
        except CorruptDataError as error:
            self._damaged[info.file] = str(error)
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_marks": {}, "_unkept": {}, "_damaged": {}}

    def _open_local(self, folder: pathlib.Path, info: ShardInfo) -> ShardReader:
        place, path = folder / info.index_file, folder / info.file
        try:
            places = self._mapped(place, place, info)
        except OSError as error:
            raise _unread(place, error) from error
        try:
            return self._format.reader(self._store.local(info, path) if self._store else path, places)
        except OSError as error:
            raise _unread(path, error) from error

    def _open_remote(self, folder: RemotePath, info: ShardInfo) -> ShardReader:
        assert self._store is not None, "copies are what is read"
        copy = self._store.fetch(info, folder / info.file)
        if info.file in self._unkept:
            return self._reader(copy, self._unkept[info.file])
        place = folder / info.index_file
        kept = self._store.offsets(info)
        if kept is not None:
            # By what happened to the disk, or to make room: fetched anew.
            with contextlib.suppress(CorruptDataError, OSError):
                return self._reader(copy, self._mapped(kept, place, info))
        content = place.read(_MOST_LINE_BYTES * info.num_records)
        offsets = _tested(content, place, info)
        opened = self._reader(copy, offsets)
        try:
            if info.num_records:
                opened.read(info.num_records - 1)
            if not self._store.keep_offsets(info, content):
                self._unkept[info.file] = offsets
        except CorruptDataError as error:
            opened.close()
            raise CorruptDataError(
                f"{place} does not lead to the last record of {info.file}, whose checksum is right: {error}"
            ) from error
        return opened

    def _mapped(self, path: pathlib.Path, place: pathlib.Path | RemotePath, info: ShardInfo) -> Places:
        """Return the offsets in a file, which was fetched from `place`, or is the one there."""
        with open(path, "rb") as file:
            marks = self._marks.get(info.file)
            if marks is None or not marks.fit(file):
                content = file.read()
                offsets = _tested(content, place, info)
                if not len(offsets):  # an empty file cannot be mapped
                    return offsets
                marks = self._marks[info.file] = LineMarks.of(file, content)
            return MappedOffsets(str(path), file, marks)

    def _reader(self, copy: pathlib.Path, places: Places) -> ShardReader:
        try:
            return self._format.reader(copy, places)
        except OSError as error:  # it was there a moment ago
            raise OutputError(f"{copy}: {error.strerror}; was cache_dir emptied? load again") from error


def _unread(path: pathlib.Path, error: OSError) -> CorruptDataError | OutputError:
    if lacks_resources(error):  # which says nothing of the file, and must not pass for damage
        return OutputError(f"{path}: {error.strerror}; close what is open, or raise the limit (ulimit -n)")
    return CorruptDataError(f"{path}: {error.strerror}; run the job again to write it anew")


def _tested(content: bytes, place: pathlib.Path | RemotePath, info: ShardInfo) -> Offsets:
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
