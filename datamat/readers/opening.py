"""Shards opened together with the offsets of their records, which are tested before any record is asked for.

a directory   its offsets, mapped; its shard or a copy of it
a URL         a copy of the shard, then the offsets: they have no checksum, so they are kept once they have led to
              the last record. Those of other records, fetched while the directory was written anew, do not
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, BinaryIO, final

import numpy as np

from datamat.errors import CorruptDataError, OutputError, want_of_resources
from datamat.formats import Offsets
from datamat.readers.mapped_offsets import LineMarks, MappedOffsets
from datamat.readers.remote import RemotePath

if TYPE_CHECKING:
    import pathlib

    from datamat.formats import Places, ShardFormat, ShardReader
    from datamat.manifest import ShardInfo
    from datamat.readers.cache import ShardStore

__all__ = ["ShardOpener"]

_ATTEMPTS = 5
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
            with open(place, "rb") as file:
                found = os.fstat(file.fileno())
                identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
                places = self._mapped(file, place, info, identity)
        except OSError as error:
            raise _unread(place, error) from error
        try:
            if self._store is not None:
                with contextlib.suppress(FileNotFoundError):  # another process made room: read where it is
                    return self._format.reader(self._store.local(info, path), places)
            return self._format.reader(path, places)
        except OSError as error:
            raise _unread(path, error) from error

    def _open_remote(self, folder: RemotePath, info: ShardInfo) -> ShardReader:
        assert self._store is not None, "copies are what is read"
        shard, place = folder / info.file, folder / info.index_file
        if info.file in self._unkept:
            return self._reader(self._store, info, shard, self._unkept[info.file])
        kept = self._kept(self._store, info, place)
        if kept is not None:
            return self._reader(self._store, info, shard, kept)
        self._store.fetch(info, shard)  # whose bytes tell whether the offsets are its own
        content = place.read(_MOST_LINE_BYTES * info.num_records)
        offsets = _tested(content, place, info)
        opened = self._reader(self._store, info, shard, offsets)
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

    def _kept(self, store: ShardStore, info: ShardInfo, place: RemotePath) -> Places | None:
        """Return the offsets that were fetched before, or None where they have to be fetched anew."""
        kept = store.offsets(info)
        if kept is not None:
            try:
                with open(kept, "rb") as file:
                    return self._mapped(file, place, info, info.checksum)  # its name tells what it holds
            except (CorruptDataError, FileNotFoundError):  # by what happened to the disk; to make room
                return None
            except OSError as error:
                raise want_of_resources(kept, error) or OutputError(f"{kept}: {error.strerror}") from error
        return None

    def _mapped(self, file: BinaryIO, place: pathlib.Path | RemotePath, info: ShardInfo, identity: object) -> Places:
        """Return the offsets in an open file, tested where no file of this identity was."""
        marks = self._marks.get(info.file)
        if marks is None or marks.identity != identity:
            content = file.read()
            offsets = _tested(content, place, info)
            if not len(offsets):  # an empty file cannot be mapped
                return offsets
            marks = self._marks[info.file] = LineMarks.of(content, identity)
        return MappedOffsets(str(place), file, marks)

    def _reader(self, store: ShardStore, info: ShardInfo, shard: RemotePath, places: Places) -> ShardReader:
        for _ in range(_ATTEMPTS):
            copy = store.fetch(info, shard)
            try:
                return self._format.reader(copy, places)
            except FileNotFoundError:  # another process made room a moment ago
                continue
            except OSError as error:
                raise want_of_resources(copy, error) or OutputError(f"{copy}: {error.strerror}") from error
        raise OutputError(
            f"{copy}: others remove it as often as it is made; load with larger cache_bytes, or a cache_dir of its own"
        )


def _unread(path: pathlib.Path, error: OSError) -> CorruptDataError | OutputError:
    return want_of_resources(path, error) or CorruptDataError(
        f"{path}: {error.strerror}; run the job again to write it anew"
    )


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
