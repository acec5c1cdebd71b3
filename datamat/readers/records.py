"""Reads records of a directory by position or key: opens and checks files, handles damage, and decodes values."""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import errno
import functools
import mmap
import os
import pathlib
import re
import weakref
from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any, BinaryIO, final

import numpy as np

from datamat.directory.index_files import KIND, MappedKeys, SplitIndex, field_of_column, read_index
from datamat.directory.keys import RecordKey, RecordNames, stored_key
from datamat.directory.manifest import MANIFEST_FILE, index_file, keys_file, part_of
from datamat.errors import (
    CorruptDataError,
    InputError,
    OptionError,
    OutputError,
    SchemaError,
    count_of,
    want_of_resources,
)
from datamat.features.base import RaggedColumn, gathered, join_blocks
from datamat.features.schema import NO_MEMORY
from datamat.folders import AbsentError
from datamat.folders.local import open_regular
from datamat.formats import Offsets, ShardFormat
from datamat.formats.arrow import storage_of
from datamat.options import ErrorPolicy
from datamat.parallel.affinity import physical_cores
from datamat.parallel.logs import get_logger
from datamat.readers.remote import SMALL_BYTES, Download, Loaded, RemoteReader, ShardFetcher
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from datamat.directory.manifest import IndexInfo, Manifest, ShardInfo
    from datamat.features import Features, Statistics
    from datamat.features.base import Column, ColumnBlock, Kind
    from datamat.features.nullable import Maybe
    from datamat.formats import RecordSpan, RecordSpans, ShardReader
    from datamat.readers.cache import RecordCache, ShardStore


# ---------------------------------------------------------------- damaged records
#
# Damaged records raise errors, or are skipped, counted and logged.


_logger = get_logger("datamat.readers")


@final
class SkippedRecords:
    """The damaged records of a dataset skipped so far. Thread-safe; a pickled copy starts with the same records.

    Args:
        policy: "raise" or "skip", or an `ErrorPolicy` of either with a limit.
        num_records: number of records in the dataset, of which the limit may be a share.

    Raises:
        OptionError: the policy is none of these.
    """

    def __init__(self, policy: str | ErrorPolicy, num_records: int) -> None:
        found = ErrorPolicy(policy) if policy in ("raise", "skip") else policy  # type: ignore[arg-type]  # one of them
        if not isinstance(found, ErrorPolicy) or found.action == "quarantine" or found.retries:
            raise OptionError(
                f"errors={policy!r}: readers raise or skip; want 'raise', 'skip' or ErrorPolicy('skip', max_errors=...)"
            )
        self._policy = found
        limit = self._policy.limit(num_records)
        # Without a limit, any number except all of them, as when writing.
        self._most = limit if limit is not None else num_records - 1
        # Unlike a lock, a dict cannot be left locked by a fork.
        self._positions: dict[int, None] = {}
        self._logged: dict[str, None] = {}

    @property
    def is_skipping(self) -> bool:
        """Whether damaged records are skipped."""
        return self._policy.action == "skip"

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the records that were skipped, each once."""
        return tuple(self._positions)

    def skip(self, position: int, error: CorruptDataError) -> None:
        """Count a damaged record and log its damage once, or raise, according to the policy.

        Records that are stored together, as in a page of Parquet, are damaged together, and take one line of the log.

        Args:
            position: position of the record in the dataset, from 0.
            error: the error that names its damage.

        Raises:
            CorruptDataError: the error itself, or that too many records are damaged.
        """
        if not self.is_skipping:
            raise error
        if position not in self._positions:
            self._positions[position] = None
            self.log(error)
        self._check(error)

    def log(self, error: CorruptDataError) -> None:
        """Log the damage of a record, unless it was logged before, for this record or another."""
        damage = _damage_in_words(error)
        if damage not in self._logged:
            self._logged[damage] = None
            _logger.warning("skipped, %d so far: %s", len(self._positions), error)

    def add(self, positions: Iterable[int]) -> None:
        """Count records that another process has skipped and logged, by position; raise as `skip` does."""
        self._positions.update(dict.fromkeys(positions))
        self._check(None)

    def _check(self, last: CorruptDataError | None) -> None:
        if len(self._positions) > self._most:
            raise CorruptDataError(
                f"skipped {count_of(len(self._positions), 'damaged record')}, and the policy allows {self._most}"
                + (f"; the last one: {last}" if last else "; the log names them")
            ) from last


def _damage_in_words(error: CorruptDataError) -> str:
    """Return the part that is the same in the messages of all records with the same damage.

    Such messages name the place in the file as well as the record; others name only the record that is damaged.
    """
    text = str(error)
    is_of_place = " at byte " in text or ": record " not in text
    return _RECORD.sub("", text) if is_of_place else text


_RECORD = re.compile(r"record \d+|(?: \(key '.*'\))\Z")


# ---------------------------------------------------------------- offsets, mapped
#
# The offsets of a shard's records stay in the file next to it, and are looked up in a memory map of that file.
#
# 00017.idx  "0 20\n20 30\n ... 1950 31\n1981 28\n ..."      mapped: all processes share its pages
#             ^ line 0              ^ line 16               marks: where every 16th line begins


_LINES_PER_MARK = 16  # half a byte of memory per record, and a few hundred bytes to scan to find one


@final
@frozen(eq=False)
class LineMarks:
    """Where every 16th line of a file begins, to find any line fast.

    Attributes:
        identity: value that distinguishes the scanned file from any other.
        starts: offset of every 16th line in bytes, then the size of the file.
    """

    identity: object
    starts: array[int]

    @classmethod
    def of(cls, content: bytes, identity: object) -> LineMarks:
        """Return the marks of a file.

        Args:
            content: content of the file, not empty.
            identity: value that is equal for equal files, such as size and times.
        """
        ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
        marked = ends[_LINES_PER_MARK - 1 : len(ends) - 1 : _LINES_PER_MARK] + 1
        return cls(identity, array("Q", [0, *marked.tolist(), len(content)]))


@final
class MappedOffsets:
    """Looks up on demand where each record of a shard lies. Thread-safe.

    Args:
        path: path of the file of offsets, for messages.
        file: the same file, open; it may be closed afterwards.
        marks: line marks of the file.
    """

    __slots__ = ("_marks", "_pages", "_path")

    def __init__(self, path: str, file: BinaryIO, marks: LineMarks) -> None:
        self._path = path
        self._marks = marks.starts
        try:
            # Private, although nothing is written: some network file systems do not allow shared maps.
            self._pages = mmap.mmap(file.fileno(), marks.starts[-1], access=mmap.ACCESS_READ)
        except ValueError as error:  # it is shorter now
            raise CorruptDataError(f"{path} was changed while it was opened: {error}; verify its directory") from error

    def span(self, number: int) -> RecordSpan:
        """Return offset, size and skip of a record by number; raise `CorruptDataError` if the file was changed."""
        mark, rest = divmod(number, _LINES_PER_MARK)
        try:
            # Touching mapped pages that the file has lost would kill the process, so one system call checks first.
            if self._pages.size() == self._marks[-1]:
                lines = self._pages[self._marks[mark] : self._marks[mark + 1]].split(b"\n", rest + 1)
                numbers = lines[rest].split()
                return int(numbers[0]), int(numbers[1]), int(numbers[2]) if len(numbers) > 2 else 0
        except (IndexError, ValueError):
            pass
        raise CorruptDataError(
            f"{self._path} was changed while it was open: line {number + 1} differs; verify its directory"
        )

    def spans(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return offset, size and skip of many records, int64 (n, 3); raise as `span` does."""
        marks, place = np.unique(numbers // _LINES_PER_MARK, return_inverse=True)
        bounds = np.frombuffer(self._marks, np.uint64)
        try:
            if self._pages.size() == self._marks[-1]:
                cuts = zip(bounds[marks].tolist(), bounds[marks + 1].tolist(), strict=True)
                text = b"".join([self._pages[start:stop] for start, stop in cuts])
                columns = text[: text.index(b"\n")].count(b" ") + 1
                table = np.fromstring(text.decode("ascii"), np.int64, sep=" ").reshape(-1, columns)
                found = np.zeros((len(numbers), 3), np.int64)
                found[:, :columns] = table[place * _LINES_PER_MARK + numbers % _LINES_PER_MARK]
                return found
        except (IndexError, ValueError):
            pass
        raise CorruptDataError(f"{self._path} was changed while it was open; verify its directory")


# ---------------------------------------------------------------- from key to position
#
# Finds the position of a record among all records of a dataset by its key, with a `SplitIndex` per split.


class KeyIndex:
    """The keys of the records of one split, or of all splits.

    Args:
        loaded: the directory.
        manifest: manifest of the directory, which names the index files.
        split: split whose keys are wanted, or None for all.
        records: the records of these splits.
    """

    def __init__(self, loaded: Loaded, manifest: Manifest, split: str | None, records: RecordFiles) -> None:
        self._splits: list[SplitIndex] = []
        self._reads: list[Callable[..., Any]] = []
        self._starts: list[list[int]] = []  # of each split, the position of the first record of each shard
        first_shard = first_record = 0
        for name, shards in manifest.splits.items():
            if split in (None, name):
                names = RecordNames(manifest.copies.get(name, 1), name in manifest.augmented)
                *starts, after = accumulate((info.num_records for info in shards), initial=first_record)
                info = manifest.index_infos.get(index_file(name))
                read = functools.partial(_index_rows, loaded, name, info, sum(info.num_rows for info in shards))
                hashed = _KeysFile(loaded, name, manifest, records, starts)
                keys_of = functools.partial(_keys_from, records, first_shard)
                self._splits.append(SplitIndex(read, names, shards, keys_of, hashed))
                self._reads.append(read)
                self._starts.append(starts)
                first_shard, first_record = first_shard + len(shards), after

    def position_of(self, key: str, *, is_read: bool = False) -> int | None:
        """Return the position of the record with this key, or None if no record has it.

        Args:
            key: key of the record, `KEY` or `KEY#COPY`; `KEY` as it is stored or as it was in the source.
            is_read: whether the record is read next.
        """
        for one in RecordKey.meant_by(key):
            for split, starts in zip(self._splits, self._starts, strict=True):
                place = split.find(one, is_read=is_read)
                if place is not None:
                    return starts[place.shard] + place.record
        return None

    def key_at(self, position: int) -> str | None:
        """Return the key of the record at a position, or None if only the record itself holds it."""
        for split, starts in zip(reversed(self._splits), reversed(self._starts), strict=True):
            if position >= starts[0]:
                shard = bisect.bisect_right(starts, position) - 1
                return split.key_at(shard, position - starts[shard])
        return None

    def keys(self) -> list[str]:
        """Return the keys of all records, in order."""
        return [key for split in self._splits for key in split.keys()]  # noqa: SIM118 -- not a dict

    def fields(self) -> Any:
        """Return the fields of the row of each record as a `pyarrow.Table`, without `key`, in order.

        Fields that hold lists or dicts are left out; fields that a split does not have are null.
        """
        import pyarrow as pa

        tables = []
        for split, read in zip(self._splits, self._reads, strict=True):
            found = read(None)
            names = [name for name in found.column_names if field_of_column(name) is not None]
            plain = [name for name in names if (found.schema.field(name).metadata or {}).get(KIND) != b"json"]
            fields = found.select(plain).rename_columns([str(field_of_column(name)) for name in plain])
            rows = split.rows_of_records()
            tables.append(fields.take(pa.array(rows, mask=rows < 0)))
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})


def _keys_from(records: RecordFiles, first_shard: int, shard: int) -> list[str]:
    """Return the keys of the records of a shard, given the number of the first shard of its split."""
    return records.stored_keys(first_shard + shard)


class _KeysFile:
    """The sorted hashes of the keys of a split, opened on first use.

    A missing or damaged file is logged once, and then ignored: the index file holds all keys as well.
    """

    def __init__(
        self, loaded: Loaded, split: str, manifest: Manifest, records: RecordFiles, starts: Sequence[int]
    ) -> None:
        self._loaded = loaded
        self._info = manifest.index_infos.get(keys_file(split))
        self._name = keys_file(split) if self._info is None else self._info.file
        self._num_rows = sum(info.num_rows for info in manifest.splits[split])
        self._records = records
        self._starts = starts
        self._is_whole: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_file"}

    def rows(self, row_key: str) -> list[int] | None:
        """Return the numbers of the rows whose keys have the same hash as this one; None if the file cannot be read."""
        if self._is_whole is False or self._file is None:
            return None
        try:
            return self._file.rows(row_key)
        except CorruptDataError as error:
            self._leave_aside(str(error))
            return None

    def is_whole(self) -> bool:
        """Return True if the file is as the manifest says; it is read completely, once: 1 ms for a million rows."""
        if self._is_whole is None:
            assert self._info is not None, "otherwise there is no file"
            assert self._file is not None, "it was asked"
            try:
                self._is_whole = self._info.is_whole(self._file.path)
            except (OSError, CorruptDataError):
                self._is_whole = False
            if not self._is_whole:
                shown = self._loaded.folder.place(self._name)
                self._leave_aside(f"{shown}: its content differs from the manifest's checksum")
        return self._is_whole

    def key_of(self, shard: int, record: int) -> str:
        """Return the key of a record, by the number of its shard in the split and its number there."""
        return self._records.key_at(self._starts[shard] + record)

    @functools.cached_property
    def _file(self) -> MappedKeys | None:
        if self._info is None:  # of a version that wrote none
            return None
        try:
            return self._loaded.opened(self._info, functools.partial(MappedKeys, num_rows=self._num_rows))
        except (CorruptDataError, AbsentError) as error:
            self._leave_aside(str(error))
            return None

    def _leave_aside(self, problem: str) -> None:
        self._is_whole = False
        _logger.warning(
            "%s; its keys are read from %s instead, which takes a second and 100 MB for a million of them in each "
            "process: run repair() to write it again",
            problem,
            self._name.replace(".keys", ".index"),
        )


def _index_rows(
    loaded: Loaded,
    split: str,
    info: IndexInfo | None,
    num_rows: int,
    columns: Sequence[str] | None = ("key", "shard", "record"),
) -> Any:
    """Return these columns of each row of the index file of a split; None reads all."""
    if info is None:
        place = loaded.folder.place(index_file(split))
        raise CorruptDataError(f"the manifest does not list {place}; run the job again to rebuild it")
    return loaded.opened(info, functools.partial(read_index, columns=columns, num_rows=num_rows, info=info))


# ---------------------------------------------------------------- opening shards
#
# Shards are opened together with the offsets of their records, which are checked before any record is read.
#
# offsets   mapped: in place, or in a copy; in memory where none fits
# shard     a copy, where a store keeps such; else in place, or where the directory has no files here, by ranges of it,
#           see `remote`
#
# A file is opened only if it is the one that the manifest lists, as far as its size, its first and its last bytes
# show, and the digest of its offsets: others may have been copied there under its name.


_ATTEMPTS = 5
_MOST_LINE_BYTES = 3 * 21  # of a record's offsets: three numbers of 64 bits, and what stands between them
_UNKEPT_BYTES = 128 << 20  # of offsets in memory: those of other shards are fetched again
_BYTES_PER_OFFSET = 48  # of the arrays, and of the text that they come from


@final
class ShardOpener:
    """Opens the shards of one directory. Thread-safe and picklable.

    Args:
        loaded: the directory.
        shard_format: format of the shards, bound to their features.
    """

    def __init__(self, loaded: Loaded, shard_format: ShardFormat) -> None:
        self.folder = loaded.folder
        self._loaded = loaded
        self._store = loaded.store
        self._format = shard_format
        self.fetcher = None if self._store is None else ShardFetcher(self.folder, self._store)
        self._marks: dict[str, LineMarks] = {}
        self._unkept: dict[str, Offsets] = {}  # offsets for which the store had no room
        self._proved: set[str] = set()  # shards with damaged records whose copies are as the manifest says
        self._damaged: dict[str, str] = {}  # what is wrong with damaged shards, which are not fetched for each record
        # Shards that are damaged at their origin: they are read there as far as possible.
        self._bad_sources: set[str] = set()
        self._known_damaged: set[str] = set()  # of those, whose ends are damaged, and no other file's

    @property
    def keeps_few(self) -> bool:
        """Whether only few shards may be open at a time, because their copies must make room for others."""
        return self.fetcher is not None and self.fetcher.may_rotate

    def open(self, info: ShardInfo) -> ShardReader:
        """Return the reader of a shard.

        Raises:
            CorruptDataError: the shard or its offsets cannot be read, or differ from the manifest.
            OutputError: no more files can be opened; a run has replaced the shard since the directory was loaded; or a
                file cannot be fetched or does not fit into the store.
        """
        if info.file in self._damaged:
            raise CorruptDataError(self._damaged[info.file])
        try:
            spans = self._spans(info)
            for attempt in range(_ATTEMPTS):
                with contextlib.suppress(FileNotFoundError):  # just removed, finished or given up
                    return self._opened(info, spans, waits=attempt > 0)
        except CorruptDataError as error:
            self._loaded.check(info)
            if self._store is not None:
                self._damaged[info.file] = str(error)
            raise
        raise self._removed(info)

    def _removed(self, info: ShardInfo) -> OutputError:
        return OutputError(
            f"{self.folder.place(info.file)}: other processes remove its copy as often as it is made; load with a "
            "larger cache_bytes, or a cache_dir of its own"
        )

    def check(self, info: ShardInfo) -> None:
        """Refuse a shard on this disk that `open` would refuse, for code that opens it by its name."""
        differences = info.differences_of(self._in_place(info.file))
        if "size" in differences:  # TensorFlow does not notice if it is cut off between two records
            info.refuse(differences, self.folder.place(info.file))
        if differences:
            self.open(info).close()  # raises unless some records are damaged and the others are right

    def __reduce__(self) -> tuple[type[ShardOpener], tuple[Loaded, ShardFormat]]:
        return ShardOpener, (self._loaded, self._format)

    def renew(self, info: ShardInfo) -> bool:
        """Remove the copy of a shard with a damaged record, and return True if the record should be read again."""
        if self._store is None or info.file in self._proved:
            return False
        self._proved.add(info.file)  # records read after this come from a new copy, or were right
        self._store.drop_damaged(info)
        try:
            self._store.fetch_if_it_fits(info, self.folder)
        except CorruptDataError:
            self._note_bad_source(info)
        return True

    def _note_bad_source(self, info: ShardInfo) -> None:
        """Note that a shard is damaged at its origin; raise if nothing can be read from it nevertheless."""
        if not (self._format.has_checksums and (self._loaded.here is not None or self._format.reads_ranges)):
            raise  # noqa: PLE0704 -- called where the error is handled
        self._bad_sources.add(info.file)
        self._damaged.pop(info.file, None)

    def named(self, info: ShardInfo, error: CorruptDataError) -> CorruptDataError:
        """Return an error with the name of the shard instead of that of its copy."""
        text = str(error)
        name = f"{info.checksum}.{info.extension}"
        said = re.sub(rf"\S*{re.escape(name)}(?:\.part)?", lambda _: self.folder.place(info.file), text)
        return error if said == text else CorruptDataError(said)

    def _opened(self, info: ShardInfo, spans: RecordSpans, *, waits: bool) -> ShardReader:
        """Return the reader of a shard; with `waits`, wait for a copy that is being made.

        Raises:
            FileNotFoundError: the copy has just gone: try again.
        """
        download = None
        if self._store is not None and info.file not in self._bad_sources:
            try:
                is_wanted, download = (True, None) if waits else self._wants_copy(self._store, info)
                if is_wanted and (found := self._of_copy(self._store, info, spans)) is not None:
                    return found
            except CorruptDataError:
                self._note_bad_source(info)
            except AbsentError:
                if self._loaded.here is None:
                    raise
        if self._loaded.here is None:
            return self._by_ranges(info, spans, download)
        path = self._in_place(info.file)
        try:
            self._refuse_other(path, info, spans)
            opened = self._format.reader(path, spans)
        except OSError as error:
            raise _unread(self.folder.place(info.file), error) from error
        try:
            self._loaded.check(info)
        except OutputError:
            opened.close()
            raise
        return opened

    def _in_place(self, name: str) -> pathlib.Path:
        """Return the path of a file of a directory on this machine."""
        try:
            path = self.folder.local_path(name)
        except OSError as error:
            raise _unread(self.folder.place(name), error) from error
        assert path is not None, "otherwise it is not opened in place"
        return path

    def _wants_copy(self, store: ShardStore, info: ShardInfo) -> tuple[bool, Download | None]:
        """Return True if to wait for a copy of a shard, and the download to read from until then."""
        if store.copy_of(info) is not None or self._loaded.here is not None or not self._format.reads_ranges:
            return True, None
        download = None if self.fetcher is None else self.fetcher.running(info)
        if download is not None and not download.begun():
            if download.is_elsewhere or store.copy_of(info) is not None:
                return True, None
            download = None
        if download is None:  # look again for what another process has made, so that nothing is fetched twice
            return store.is_being_made(info) or store.copy_of(info) is not None, None
        # The checksum of the whole file may be the only one, or the file is soon there.
        return not self._format.has_checksums or info.num_bytes <= SMALL_BYTES, download

    def _of_copy(self, store: ShardStore, info: ShardInfo, spans: RecordSpans) -> ShardReader | None:
        """Return the reader of a copy of a shard, which is made now if it is missing; None if it does not fit."""
        has_other_way = self._loaded.here is not None or self._format.reads_ranges
        copy = (store.fetch_if_it_fits if has_other_way else store.fetch)(info, self.folder)
        if copy is None:
            return None
        try:
            release = store.in_use(copy)
            try:
                info.refuse(info.differences_of(copy), copy)
                opened = self._format.reader(copy, spans)
            except BaseException:
                release()
                raise
        except CorruptDataError as error:  # of its beginning or end
            if not self.renew(info):
                raise self.named(info, error) from error
            return self._opened(info, spans, waits=True)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise want_of_resources(copy, error) or OutputError(f"{copy}: {error.strerror}") from error
        weakref.finalize(opened, release)
        return opened

    def _refuse_other(self, path: pathlib.Path, info: ShardInfo, spans: RecordSpans) -> None:
        """Refuse a file that is not the shard, but accept one with damaged records, which are refused one by one.

        If the ends of a file differ, but the records there have the right checksums, it belongs to another place or
        version, and none of its records may be read.
        """
        differences = info.differences_of(path)
        if not differences:
            return
        if self._format.has_checksums and path.stat().st_size <= info.num_bytes:  # damage makes no file longer
            try:
                if "head" in differences:
                    self._read_head(path, info)
                else:
                    self._read_tail(path, info, spans)
            except CorruptDataError:
                return
        info.refuse(differences, self.folder.place(info.file))

    def _read_head(self, path: pathlib.Path, info: ShardInfo) -> None:
        """Read the records in the head of a file, where the file itself says they are; raise if one is damaged."""
        with path.open("rb") as file:  # by name, which some formats open again; it was a regular file just now
            for _, (start, *_) in self._format.read_file(file, path=str(path)):
                if start >= info.head.num_bytes:
                    return

    def _read_tail(self, path: pathlib.Path, info: ShardInfo, spans: RecordSpans) -> None:
        """Read the records in the tail of a file, where those of the shard are; raise if one is damaged."""
        with contextlib.closing(self._format.reader(path, spans)) as reader:
            for number in range(info.num_records - 1, -1, -1):
                start, size, _ = spans.span(number)
                if start + size <= info.num_bytes - info.tail.num_bytes:
                    return
                reader.read(number)

    def _by_ranges(self, info: ShardInfo, spans: RecordSpans, download: Download | None) -> ShardReader:
        def reader() -> RemoteReader:
            return RemoteReader(
                info,
                self._loaded,
                spans,
                None if info.file in self._bad_sources else self.fetcher,
                functools.partial(self._format.reader, spans=spans),
                download,
                is_damaged=info.file in self._known_damaged,
            )

        try:
            return reader()
        except CorruptDataError:
            if info.file in self._known_damaged:
                raise
            assert self._store is not None, "ranges go there"
            with self._store.scratch(info.num_bytes) as file:
                file.writelines(self.folder.blocks(info.file, info.num_bytes))
                file.truncate()
                file.flush()
                self._refuse_other(pathlib.Path(file.name), info, spans)
            self._known_damaged.add(info.file)
            return reader()

    def _spans(self, info: ShardInfo) -> RecordSpans:
        """Return the offsets of a shard, checked unless the same file was checked before."""
        listed, found = info.offsets_info, self._unkept.get(info.file)
        if found is not None or not info.num_records:
            return found or Offsets.from_text("")
        if self._loaded.here is not None:
            return self._mapped(self._in_place(listed.file), info)
        assert self._store is not None, "where nothing is in place"
        for _ in range(_ATTEMPTS):
            path = self._store.fetch_if_it_fits(listed, self.folder)
            if path is None:
                content = self.folder.read(listed.file, listed.num_bytes)
                return self._remember(info, _tested(content, self.folder.place(listed.file), info))
            try:
                return self._mapped(path, info)
            except CorruptDataError:  # a bad disk, or it has just made room for others
                self._store.drop_damaged(listed)
        raise self._removed(info)

    def _remember(self, info: ShardInfo, offsets: Offsets) -> Offsets:
        """Keep the offsets of a shard in memory instead of the oldest ones."""
        self._unkept[info.file] = offsets
        most = max(_UNKEPT_BYTES // (_BYTES_PER_OFFSET * max(info.num_records, 1)), 1)
        while len(self._unkept) > most:
            with contextlib.suppress(StopIteration, RuntimeError):  # other threads may do so at the same time
                self._unkept.pop(next(iter(self._unkept)), None)
        return offsets

    def _mapped(self, path: pathlib.Path, info: ShardInfo) -> RecordSpans:
        """Return the offsets in a file, checked unless a file with the same identity was checked before."""
        place, marks = self.folder.place(info.index_file), self._marks.get(info.file)
        try:
            with open_regular(path) as file:
                found = os.fstat(file.fileno())
                # The name of a copy is its checksum, and its time is that of its last use.
                identity = found.st_dev, found.st_ino, found.st_size, self._loaded.here and found.st_mtime_ns
                if marks is None or marks.identity != identity:
                    content = file.read(_MOST_LINE_BYTES * info.num_records + 1)
                    if part_of(content) != info.offsets:  # else they are as written: no need to parse them all
                        _tested(content, place, info)
                    marks = self._marks[info.file] = LineMarks.of(content, identity)
                return MappedOffsets(place, file, marks)
        except OSError as error:
            raise _unread(place, error) from error


def _unread(place: str, error: OSError) -> CorruptDataError | OutputError:
    return want_of_resources(place, error) or CorruptDataError(
        f"{place}: {error.strerror}; run the job again to rewrite it"
    )


def _tested(content: bytes, place: str, info: ShardInfo) -> Offsets:
    try:
        offsets = Offsets.from_text(content.decode("ascii"))
    except (UnicodeDecodeError, CorruptDataError) as error:
        raise CorruptDataError(f"{place}: {error}; run the job again to rewrite it") from error
    if len(offsets) != info.num_records:
        raise CorruptDataError(
            f"{place} holds {len(offsets)} offsets, the manifest says {count_of(info.num_records, 'record')}; run the "
            "job again"
        )
    end = np.uint64(info.num_bytes)
    outside = np.flatnonzero((offsets.offset > end) | (offsets.size > end - np.minimum(offsets.offset, end)))
    if len(outside):
        raise CorruptDataError(
            f"{place}: record {outside[0]} would lie outside of {info.file}, which has {info.num_bytes} bytes; "
            "run the job again to rewrite it"
        )
    if part_of(content) != info.offsets:
        raise CorruptDataError(
            f"{place} does not hold the offsets that {MANIFEST_FILE} lists for {info.file}; run repair() to write it "
            "again, or copy the whole directory again"
        )
    return offsets


# ---------------------------------------------------------------- records
#
# The encoded records of a directory by position: shards are opened on demand, and records found by their offsets.
#
# position ── RecordCache ── the shard's reader: offsets beside it, mapped; one read ── encoded record
#                            its file: in the directory, or a copy in a ShardStore


_FEW_OPEN = 2  # copies of a dataset larger than its cache: open copies cannot make room
_MOST_OPEN = 16_384  # the offsets of each are mapped, and Linux allows 65,530 maps per process
_BLOCK_BYTES = 1 << 20  # of records decoded at once: they and their values stay in the CPU cache
# Arrays of int16 in TFRecord, two threads: those of 64 KB took twice the time of one thread, those of 1.7 MB 0.7 of it.
_LARGE_RECORD_BYTES = 512 << 10
# In gzip and Parquet, two threads took 1.2 to 2 times as long over rows of two numbers, and 0.6 over lists of 2 KB.
_LEAST_SHARED_BYTES = 256
_LEAST_BLOCK_RECORDS, _MOST_BLOCK_RECORDS = 64, 8192  # 4,096 took 7 to 20 percent longer
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


@final
class RecordFiles:
    """Encoded records by position. Thread-safe and picklable: a copy in another process opens its own files.

    The most recently opened shards stay open. Together, all datasets of the process use at most a quarter of its file
    descriptors, and none if other code has taken the rest.

    Args:
        loaded: the directory.
        shards: shards to read, in order.
        shard_format: format of the shards, bound to their features.
        cache: keeps encoded records in memory.
    """

    def __init__(
        self, loaded: Loaded, shards: Sequence[ShardInfo], shard_format: ShardFormat, cache: RecordCache
    ) -> None:
        self._shards = shards
        self._format = shard_format
        self._cache = cache
        self._opener = ShardOpener(loaded, shard_format)
        self._ends = list(accumulate(info.num_records for info in shards))
        self._groups_to_keep = 0
        self._asked: tuple[int, Mapping[str, Column]] | None = None  # the last record whose key was asked for

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_asked": None}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def check_files(self) -> None:
        """Refuse shards that TensorFlow must not open by name; raises as `ShardOpener.open` does."""
        for info in self._shards:
            self._opener.check(info)

    @property
    def fetched(self) -> list[tuple[ShardInfo, ShardFetcher | None]]:
        """The shards in order, each with its maker of copies; None if there is none."""
        return [(info, self._opener.fetcher) for info in self._shards]

    def keep_window(self, num_records: int) -> None:
        """Let readers keep groups of records in memory, for a window of so many records and the next window."""
        if self.groups is not None:
            at_once = num_records + self.block_records
            self._groups_to_keep = max(self._groups_to_keep, 2 * -(-at_once // self.groups[0]))
            for reader in list(self._files.values()):
                reader.groups_to_keep = self._groups_to_keep

    def read_record(self, position: int) -> Mapping[str, Column]:
        """Return one record, after checking its checksums.

        Raises:
            CorruptDataError: the record is damaged; the message names file, record and offset.
        """
        asked, self._asked = self._asked, None
        if asked is not None and asked[0] == position:
            return asked[1]
        found = self._cache.get(position)
        if found is None:
            shard, number = self.locate(position)
            try:
                found = self._opened(shard).read(number)
            except CorruptDataError as error:
                found = self._read_again(shard, number, error)
            self._cache.keep(position, found)
        return found

    def key_at(self, position: int) -> str:
        """Return the key that a record holds, and keep the record for the next read. Raises as `read_record` does."""
        found = self.read_record(position)
        self._asked = position, found
        return stored_key(found)

    def _read_again(self, shard: int, number: int, error: CorruptDataError) -> Mapping[str, Column]:
        """Return a record from a new copy of its shard, or raise the error with the name of the shard."""
        info = self._shards[shard]
        try:
            if not self._opener.renew(info):
                raise error
            self._files.pop(shard, None)
            return self._opened(shard).read(number)
        except CorruptDataError as last:
            raise self._opener.named(info, last) from last

    def read_intact(self, position: int) -> Mapping[str, Column] | None:
        """Return a record that `read_record` refuses for damage next to it, if its own checksums prove it intact."""
        shard, number = self.locate(position)
        return self._opened(shard).read_intact(number)

    @property
    def block_records(self) -> int:
        """How many records `read_block` should read at once; 0 if records are large or kept in memory."""
        has_blocks = type(self._format).read_block is not ShardFormat.read_block
        found = min(int(_BLOCK_BYTES / self._record_bytes), _MOST_BLOCK_RECORDS)
        return found if has_blocks and not self._cache.max_bytes and found >= _LEAST_BLOCK_RECORDS else 0

    @property
    def gains_from_threads(self) -> bool:
        """Whether several threads read uncompressed values faster than one thread, which waits for no others.

        They do if reading is more than taking a small record from a file, as with a network or a compressed format.
        """
        least = _LEAST_SHARED_BYTES if self._format.gains_from_threads else _LARGE_RECORD_BYTES
        return self._record_bytes >= least or self._opener.folder.local_path() is None

    @property
    def _record_bytes(self) -> float:
        """Mean size of a record."""
        num_bytes = sum(info.num_bytes - self._format.padding_bytes * len(info.parts) for info in self._shards)
        return max(num_bytes, 1) / max(len(self), 1)

    def read_block(
        self, positions: NDArray[np.int64], kinds: Mapping[str, Kind], num_threads: int = 1
    ) -> Mapping[str, ColumnBlock] | None:
        """Return the columns of many records at once, or None if they have to be read one by one.

        Args:
            positions: int64 (n,), in any order.
            kinds: the kind of each column.
            num_threads: number of threads that read blocks at the same time, and share the files that may be open.
        """
        first, last = (self.locate(int(one))[0] for one in (positions.min(), positions.max()))
        starts = np.array([self._ends[first - 1] if first else 0, *self._ends[first:last]])
        which = np.searchsorted(starts[1:], positions, side="right") if first < last else np.zeros_like(positions)
        numbers = positions - starts[which]
        shards, places = np.flatnonzero(np.bincount(which)), np.empty(last - first + 1, np.int64)
        places[shards] = np.arange(len(shards))
        shards, which = first + shards, places[which]
        most = max(_most_open() // (2 * num_threads), 1)  # the shards of a block cannot be closed while it is read
        if len(shards) <= most:
            readers = [self._opened(shard) for shard in shards.tolist()]
            if any(isinstance(reader, RemoteReader) for reader in readers):
                return None
            return self._format.read_block(readers, which, numbers, kinds)
        order = np.argsort(which, kind="stable")
        cuts = np.searchsorted(which[order], np.arange(most, len(shards), most))
        blocks = [self.read_block(positions[part], kinds, num_threads) for part in np.split(order, cuts)]
        found = [block for block in blocks if block is not None]
        return join_blocks(found, np.argsort(order)) if len(found) == len(blocks) else None

    def locate(self, position: int) -> tuple[int, int]:
        """Return the number of the shard that holds the record at a position, and the number of the record in it."""
        shard = bisect.bisect_right(self._ends, position)
        return shard, position - (self._ends[shard - 1] if shard else 0)

    def positions(self, file: str) -> range:
        """Return the positions of the records of a shard, given its path or URL."""
        shard = [self.file(number) for number in range(len(self._shards))].index(file)
        return range(self._ends[shard] - self._shards[shard].num_records, self._ends[shard])

    def file(self, shard: int) -> str:
        """Return path or URL of a shard, given its number among the shards that are read."""
        return self._opener.folder.place(self._shards[shard].file)

    def stored_keys(self, shard: int) -> list[str]:
        """Return the keys that the records of a shard hold; reads all of them."""
        return [stored_key(self._opened(shard).read(number)) for number in range(self._shards[shard].num_records)]

    @property
    def are_tested(self) -> bool:
        """Whether a checksum proves that records from `read_record` are what was written."""
        return self._format.has_checksums

    @functools.cached_property
    def groups(self) -> tuple[int, int] | None:
        """How many neighbouring records the format reads to get at one, and how many such groups it keeps.

        None if it reads records one by one.
        """
        num_bytes = sum(info.num_bytes for info in self._shards)
        found = self._format.records_per_group(num_bytes / max(len(self), 1))
        if found is None:
            return None
        # Only the files say which options the format had when they were written. The first one is as good as any.
        first = next((number for number, info in enumerate(self._shards) if info.num_records), None)
        with contextlib.suppress(CorruptDataError):  # reported when its records are read or skipped
            if first is not None:
                found = max(found, self._opened(first).group_records or 0)
        return found, self._format.groups_at_once

    def _opened(self, shard: int) -> ShardReader:
        files = self._files
        found = files.get(shard)
        if isinstance(found, RemoteReader) and found.is_stale:
            files.pop(shard, None)
            found = None
        if found is None:
            _keep_at_most(_most_open() - 1)
            if self._opener.keeps_few:
                _keep_at_most_of(files, _FEW_OPEN - 1)
            # Do not take a lock, which a process forked just now would inherit locked: of two threads that open a
            # shard, one closes it again.
            try:
                opened = self._opener.open(self._shards[shard])
            except OutputError as error:
                if getattr(error.__cause__, "errno", None) not in _TOO_MANY or not any(_open_files.values()):
                    raise
                _keep_at_most(0)  # other code has taken the rest: closing these may be enough
                opened = self._opener.open(self._shards[shard])
            opened.groups_to_keep = self._groups_to_keep
            found = files.setdefault(shard, opened)
            if found is not opened:
                opened.close()
        return found

    @property
    def _files(self) -> dict[int, ShardReader]:
        """The open shards, in the order in which they were opened."""
        files = _open_files.get(id(self))
        if files is None:
            files = _open_files.setdefault(id(self), {})
            weakref.finalize(self, _open_files.pop, id(self), None)
        return files


# Not stored in the objects, which travel to worker processes: pools search what a forked worker inherits for files and
# maps, and take those away. These keep working there.
_open_files: dict[int, dict[int, ShardReader]] = {}


def _most_open() -> int:
    """Return how many shards may be open in this process; each takes two descriptors, and other code needs some."""
    try:
        import resource
    except ImportError:  # Windows, whose limit is that of its memory
        return _MOST_OPEN
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else min(max(limit // 8, 1), _MOST_OPEN)


def _keep_at_most_of(files: dict[int, ShardReader], most: int) -> None:
    """Close shards of a dataset, oldest first, until `most` are open."""
    while len(files) > most:
        with contextlib.suppress(StopIteration, RuntimeError):  # as below
            files.pop(next(iter(files)), None)


def _keep_at_most(most: int) -> None:
    """Close shards of this process until `most` are open, starting with the datasets that have the most open shards."""
    while True:
        held = list(_open_files.values())
        if sum(map(len, held)) <= most:
            return
        fullest = max(held, key=len)
        with contextlib.suppress(StopIteration, RuntimeError):  # other threads open and drop shards at the same time
            # Dropped, not closed: a shard closes itself when the last thread that reads it lets go.
            fullest.pop(next(iter(fullest)), None)


# ---------------------------------------------------------------- joined records
#
# Records with columns of other records, which `ShardedDataset.join` has matched by position:
#
#     position ──┬── RecordFiles ─────────────────────────────> columns ──┬──> one record
#                └── Partner.rows ── records of the partner ──> columns ──┘
#
# Columns stay as they are stored, under new names: a reader decodes them, and a conversion copies them, like any other
# column. The columns of a missing partner are those that `Nullable` stores for None.


@final
class ChainedRecords:
    """The encoded records of several datasets, end to end; stands for `RecordFiles` in a partner.

    Args:
        members: the records of each.
    """

    def __init__(self, members: Sequence[RecordFiles | JoinedRecords]) -> None:
        self._members = members
        self._ends = np.cumsum([len(one) for one in members])
        self.fetched = [shard for one in members for shard in one.fetched]
        self.are_tested = all(one.are_tested for one in members)

    def __copy__(self) -> ChainedRecords:
        return ChainedRecords([copy.copy(one) for one in self._members])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def block_records(self) -> int:
        """As in `RecordFiles`."""
        return min(one.block_records for one in self._members)

    @property
    def gains_from_threads(self) -> bool:
        """As in `RecordFiles`."""
        return any(one.gains_from_threads for one in self._members)

    def keep_window(self, num_records: int) -> None:
        """As in `RecordFiles`."""
        for one in self._members:
            one.keep_window(num_records)

    def read_record(self, position: int) -> Mapping[str, Column]:
        """As in `RecordFiles`."""
        number = int(np.searchsorted(self._ends, position, side="right"))
        return self._members[number].read_record(position - self._start(number))

    def read_intact(self, position: int) -> Mapping[str, Column] | None:
        """As in `RecordFiles`."""
        number = int(np.searchsorted(self._ends, position, side="right"))
        return self._members[number].read_intact(position - self._start(number))

    def read_block(
        self, positions: NDArray[np.int64], kinds: Mapping[str, Kind], num_threads: int = 1
    ) -> Mapping[str, ColumnBlock] | None:
        """As in `RecordFiles`."""
        which = np.searchsorted(self._ends, positions, side="right")
        blocks = []
        for number in np.unique(which).tolist():
            own = positions[which == number] - self._start(number)
            block = self._members[number].read_block(own, kinds, num_threads)
            if block is None:
                return None
            blocks.append(block)
        return join_blocks(blocks, np.argsort(np.argsort(which, kind="stable")))

    def _start(self, number: int) -> int:
        return int(self._ends[number]) - len(self._members[number])


@final
@frozen(slots=False, eq=False)
class TableRecords:
    """The encoded records of a table in memory; stands for `RecordFiles` in a partner.

    Attributes:
        columns: the columns of all records, as `Features.encode_block` returns them; no numpy arrays.
    """

    columns: Mapping[str, ColumnBlock]
    fetched = ()
    are_tested = True
    gains_from_threads = False
    block_records = _MOST_BLOCK_RECORDS

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def keep_window(self, num_records: int) -> None:
        """Do nothing: all are in memory."""

    def read_record(self, position: int) -> Mapping[str, Column]:
        """As in `RecordFiles`."""
        record: dict[str, Any] = {name: column[position] for name, column in self.columns.items()}
        return {
            name: value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value
            for name, value in record.items()
        }

    read_intact = read_record

    def read_block(
        self, positions: NDArray[np.int64], kinds: Mapping[str, Kind], num_threads: int = 1
    ) -> Mapping[str, ColumnBlock]:
        """As in `RecordFiles`."""
        del num_threads
        return join_blocks([{name: self.columns[name] for name in kinds}], positions)


@frozen(eq=False)
class JoinedField:
    """Tells how the columns of a partner's field become those of a joined record.

    Attributes:
        name: name of the field of the partner.
        joined: its name in the joined record.
        parts: what follows the name of the field in the names of its columns.
        maybe: how each is stored if the field may be missing, by the same key; None if the columns stay.
    """

    name: str
    joined: str
    parts: Sequence[str]
    maybe: Mapping[str, Maybe] | None

    def of_record(self, record: Mapping[str, Column]) -> dict[str, Column]:
        """Return columns of a joined record, given those of its partner."""
        if self.maybe is None:
            return {self.joined + part: record[self.name + part] for part in self.parts}
        found = {}
        for part, how in self.maybe.items():
            # One of the parts may say whether there is a value; and records may hold a bytes value in a list.
            column: Any = record[self.name + part] if part in self.parts else np.ones(1, np.int64)
            is_listed = how.of == "bytes" and not isinstance(column, bytes)
            found[self.joined + part] = how.wrap(column[0] if is_listed else column)
        return found

    def of_block(self, block: Mapping[str, ColumnBlock], num_records: int) -> dict[str, ColumnBlock]:
        """Return columns of joined records, given those of their partners."""
        if self.maybe is None:
            return {self.joined + part: block[self.name + part] for part in self.parts}
        are_there = np.ones(num_records, bool)
        mark = RaggedColumn(np.ones(num_records, np.int64), np.ones(num_records, np.int64))
        return {
            self.joined + part: how.wrap_block(block[self.name + part] if part in self.parts else mark, are_there)
            for part, how in self.maybe.items()
        }


@frozen(eq=False)
class Partner:
    """The fields that a join adds to the records of a directory.

    Attributes:
        rows: int64 (n,), the position of the partner of each record; -1 if it has none, or is not read.
        records: the records of the partner, by position.
        kinds: kind of each of their columns that are joined.
        fields: how they become columns of joined records.
        nothing: the columns of a joined record without a partner; None if no such record is read.
        joined_kinds: kind of each of those columns.
        digest: digest of rows and records, which changes when any of them does.
        statistics: statistics of all records of the partner, by names of joined fields; None if unknown.
    """

    rows: NDArray[np.int64]
    records: RecordFiles | JoinedRecords | ChainedRecords | TableRecords
    kinds: Mapping[str, Kind]
    fields: Sequence[JoinedField]
    nothing: Mapping[str, Column]
    joined_kinds: Mapping[str, Kind]
    digest: str
    statistics: Statistics | None

    @property
    def joined_fields(self) -> Collection[str]:
        """Names of the fields in joined records."""
        return [field.joined for field in self.fields]

    def __copy__(self) -> Partner:
        return dataclasses.replace(self, records=copy.copy(self.records))

    def columns_at(
        self, position: int, read: Callable[[int], Mapping[str, Column] | None]
    ) -> Mapping[str, Column] | None:
        """Return the columns that a record gets, given how a record of the partner is read; None if that is lost."""
        row = int(self.rows[position])
        if row < 0:
            return self.nothing
        record = read(row)
        if record is None:
            return None
        return {name: column for field in self.fields for name, column in field.of_record(record).items()}

    def block_at(self, positions: NDArray[np.int64], num_threads: int) -> Mapping[str, ColumnBlock] | None:
        """Return the columns that many records get, or None if they have to be read one by one."""
        rows = self.rows[positions]
        there = rows >= 0
        found: dict[str, ColumnBlock] = {}
        if there.any():
            block = self.records.read_block(rows[there], self.kinds, num_threads)
            if block is None:
                return None
            count = int(np.count_nonzero(there))
            found = {name: column for field in self.fields for name, column in field.of_block(block, count).items()}
        if there.all() or not self.fields:
            return found
        if not self.nothing:  # unreadable records have no partners either
            return None
        none = {name: gathered([column], self.joined_kinds[name]) for name, column in self.nothing.items()}
        order = np.where(there, np.cumsum(there) - 1, np.count_nonzero(there))
        return join_blocks([found, none] if found else [none], order)


@final
class JoinedRecords:
    """Encoded records, each with columns of its partners; stands for `RecordFiles`.

    Args:
        files: the records that get partners.
        partners: the partners, in the order in which they were joined.
    """

    def __init__(self, files: RecordFiles, partners: Sequence[Partner]) -> None:
        self.files = files
        self.partners = tuple(partners)
        self.check_files = files.check_files
        self.positions = files.positions
        self.locate = files.locate
        self.file = files.file
        self.key_at = files.key_at

    def __reduce__(self) -> tuple[type[JoinedRecords], tuple[RecordFiles, Sequence[Partner]]]:
        return JoinedRecords, (self.files, self.partners)

    def __copy__(self) -> JoinedRecords:
        return JoinedRecords(copy.copy(self.files), [copy.copy(partner) for partner in self.partners])

    def __len__(self) -> int:
        return len(self.files)

    @classmethod
    def of(cls, records: RecordFiles | JoinedRecords, partner: Partner) -> JoinedRecords:
        """Return records with the columns of another partner."""
        return cls(files_of(records), (*partners_of(records), partner))

    def narrowed(self, columns: Collection[str]) -> RecordFiles | JoinedRecords:
        """Return the records with only those partners that some of these columns come from."""
        partners = [one for one in self.partners if not one.joined_kinds.keys().isdisjoint(columns)]
        return JoinedRecords(self.files, partners) if partners else self.files

    @property
    def fetched(self) -> list[tuple[ShardInfo, ShardFetcher | None]]:
        """As of `RecordFiles`: the shards of the records themselves."""
        return self.files.fetched

    @property
    def are_tested(self) -> bool:
        """As in `RecordFiles`."""
        return self.files.are_tested and all(partner.records.are_tested for partner in self.partners)

    @property
    def groups(self) -> tuple[int, int] | None:
        """As in `RecordFiles`."""
        return self.files.groups

    @property
    def block_records(self) -> int:
        """As in `RecordFiles`."""
        return min(self.files.block_records, *(partner.records.block_records for partner in self.partners))

    @property
    def gains_from_threads(self) -> bool:
        """As in `RecordFiles`."""
        return self.files.gains_from_threads or any(partner.records.gains_from_threads for partner in self.partners)

    def keep_window(self, num_records: int) -> None:
        """As in `RecordFiles`."""
        self.files.keep_window(num_records)
        for partner in self.partners:
            partner.records.keep_window(num_records)

    def read_record(self, position: int) -> Mapping[str, Column]:
        """As in `RecordFiles`."""
        found = dict(self.files.read_record(position))
        for partner in self.partners:
            found.update(partner.columns_at(position, partner.records.read_record) or {})
        return found

    def read_intact(self, position: int) -> Mapping[str, Column] | None:
        """As in `RecordFiles`."""
        each = [_intact(self.files, position)]
        each += [one.columns_at(position, functools.partial(_intact, one.records)) for one in self.partners]
        lost = any(columns is None for columns in each)
        return None if lost else {name: column for columns in each for name, column in (columns or {}).items()}

    def read_block(
        self, positions: NDArray[np.int64], kinds: Mapping[str, Kind], num_threads: int = 1
    ) -> Mapping[str, ColumnBlock] | None:
        """As in `RecordFiles`."""
        of_others = {name for partner in self.partners for name in partner.joined_kinds}
        own = {name: kind for name, kind in kinds.items() if name not in of_others}
        found = self.files.read_block(positions, own, num_threads)
        for partner in self.partners:
            more = None if found is None else partner.block_at(positions, num_threads)
            found = None if found is None or more is None else {**found, **more}
        return found


def files_of(records: RecordFiles | JoinedRecords) -> RecordFiles:
    """Return the records without what was joined."""
    return records.files if isinstance(records, JoinedRecords) else records


def partners_of(records: RecordFiles | JoinedRecords) -> Sequence[Partner]:
    """Return what was joined to records."""
    return records.partners if isinstance(records, JoinedRecords) else ()


def _intact(records: Any, position: int) -> Mapping[str, Column] | None:
    """Return a record that is not damaged itself, even if there is damage next to it."""
    try:
        return records.read_record(position)  # type: ignore[no-any-return]  # any records
    except CorruptDataError:
        return records.read_intact(position)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- decoded samples
#
# Reads and decodes records by position; a damaged record raises an error that names it, or is skipped.


@final
@frozen(eq=False)
class SampleReader:
    """Samples by position. Thread-safe and picklable.

    Attributes:
        records: encoded records by position.
        features: schema of the records.
        skipped: counts damaged records, and decides whether they are skipped.
        keys: keys of the records.
    """

    records: RecordFiles | JoinedRecords
    features: Features
    skipped: SkippedRecords
    keys: KeyIndex

    def with_fields(self, names: Iterable[str]) -> SampleReader:
        """Return a reader of some of the fields of the same samples, and of their keys."""
        records, features = self.records, self.features.only(names)
        narrowed = records.narrowed(features.columns) if isinstance(records, JoinedRecords) else records
        return dataclasses.replace(self, records=narrowed, features=features)

    def read_sample(self, position: int, memory: Mapping[str, np.ndarray] = NO_MEMORY) -> dict[str, Any]:
        """Return a decoded sample; a value decoded into the array of its field in `memory` is that array.

        Raises:
            CorruptDataError: the record is damaged; the message names file, record, key and what is wrong.
        """
        try:
            return self.features.decode(self.records.read_record(position), memory, are_intact=self.records.are_tested)
        except CorruptDataError as error:
            raise CorruptDataError(f"{error}{self._key_note(position)}") from error
        except (InputError, SchemaError) as error:
            shard, number = self.records.locate(position)
            raise CorruptDataError(
                f"{self.records.file(shard)}: record {number} is damaged: {error}; remove the file and run the job "
                f"again, which rebuilds it{self._key_note(position)}"
            ) from error

    def read_or_skip(self, position: int, memory: Mapping[str, np.ndarray] = NO_MEMORY) -> dict[str, Any] | None:
        """Return what `read_sample` returns, or None if the record is damaged and damaged records are skipped."""
        try:
            return self.read_sample(position, memory)
        except CorruptDataError as error:
            found = self._read_intact(position) if self.skipped.is_skipping else None
            if found is None:
                self.skipped.skip(position, error)
            else:
                self.skipped.log(error)
            return found

    def reading(self, positions: NDArray[np.int64]) -> Callable[..., dict[str, Any] | None]:
        """Return a function that acts as `read_or_skip` at these positions.

        Small records that are joined to large ones are all read at once, here.
        """
        found: dict[str, Any] = {}
        for partner in partners_of(self.records):
            fields = {name: self.features[name] for name in self.features if name in partner.joined_fields}
            if partner.records.block_records and all(feature.decodes_many() for feature in fields.values()):
                with contextlib.suppress(CorruptDataError, OutputError, SchemaError):  # raised when they are read alone
                    block = partner.block_at(positions, 1) or {}
                    stored = {name: self.features.stored(name, block) for name in fields if block}
                    found.update({name: fields[name].decode_many(columns) for name, columns in stored.items()})
        if not found:
            return self.read_or_skip
        others = self.with_fields([name for name in self.features if name not in found])
        places = {position: place for place, position in enumerate(positions.tolist())}

        def read(position: int, memory: Mapping[str, np.ndarray] = NO_MEMORY) -> dict[str, Any] | None:
            sample, place = others.read_or_skip(position, memory), places[position]
            values = {name: column[place] for name, column in found.items()}
            return None if sample is None else {**sample, **self.features.unflatten(values)}

        return read

    def _read_intact(self, position: int) -> dict[str, Any] | None:
        """Return a sample that is intact although data stored with its record is damaged, otherwise None."""
        try:
            record = self.records.read_intact(position)
            return None if record is None else self.features.decode(record, are_intact=self.records.are_tested)
        except (CorruptDataError, InputError, SchemaError):
            return None

    @property
    def block_records(self) -> int:
        """How many records `read_block` should read at once; 0 if one by one is as fast."""
        return self.records.block_records if self.features.is_flat else 0

    @property
    def num_threads(self) -> int:
        """How many threads read fastest: one per physical core, or only one if others would make it wait."""
        is_alone = not self.records.gains_from_threads
        is_alone &= not any(storage_of(feature).is_compressed for feature in self.features.values())
        return 1 if is_alone else len(physical_cores())

    def read_block(self, positions: NDArray[np.int64], num_threads: int = 1) -> dict[str, Any] | None:
        """Return many samples by field, or None if they have to be read one by one, for whatever reason.

        Args:
            positions: int64 (n,), in any order.
            num_threads: number of threads that read blocks at the same time, which share the files that may be open.
        """
        try:
            columns = self.records.read_block(positions, self.features.columns, num_threads)
            return None if columns is None else self.features.decode_block(columns)
        except (CorruptDataError, OutputError, SchemaError):
            return None

    def with_own_files(self) -> SampleReader:
        """Return a reader of the same samples with its own files, which the last thread to read them closes."""
        return dataclasses.replace(self, records=copy.copy(self.records))

    def damage_in(self, file: str) -> CorruptDataError:
        """Return what is wrong with a shard whose records could not all be read, given its path or URL."""
        try:
            for position in self.records.positions(file):
                self.read_sample(position)
        except CorruptDataError as error:
            return error
        return CorruptDataError(f"{file} changed while it was read; run datamat verify on its directory")

    def _key_note(self, position: int) -> str:
        try:
            key = self.keys.key_at(position)
        except (CorruptDataError, OutputError):  # the index is damaged as well, or behind a URL and out of reach
            key = None
        return "" if key is None else f" (key {key!r})"
