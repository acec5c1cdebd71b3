"""Reads shards behind a URL: fetches them ahead of use, reads ranges until they are whole, drops them if room is short.

    an epoch      its order ── LookAhead ── which shards come next ── ShardFetcher: a few at once, each in a thread
    a record      the copy of its shard                            if that is whole
                  the first bytes of a copy that is being made     as soon as they reach it: RemoteReader
                  a range of the file                              if no copy is made, or not for a long time

Nothing here decides what is read, or in which order: without it, the same records only come later.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np

from datamat.directory.manifest import MANIFEST_FILE, MOST_MANIFEST_BYTES, Manifest, head_of
from datamat.errors import CorruptDataError, DatamatError, OutputError
from datamat.folders import AbsentError
from datamat.formats import ShardReader
from datamat.formats.io import read_at
from datamat.parallel.logs import get_logger

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from datamat.directory.manifest import IndexInfo, ListedFile, ShardInfo
    from datamat.features.base import Column
    from datamat.folders import Folder
    from datamat.formats import RecordSpans
    from datamat.readers.cache import ShardStore
    from datamat.readers.loader import BatchJob


SMALL_BYTES = 64 << 10  # of a shard that is fetched in one piece: two requests for its ends would take longer
_AT_ONCE = 8  # shards of an epoch that are fetched at the same time
_AT_FIRST, _MORE = 3, 2  # at the start, and with each that is there: the first batch waits for its share of the network
_NEAR_BYTES = 4 << 20  # wait for a copy that lacks less than this of a record: a request costs about as much
_WAIT_S = 1.0  # how long to wait for a copy that does not grow
_SCRATCH_BYTES = 16 << 20
_LEAST_RANGES, _SHARE_OF_RANGES = 8, 8  # an eighth of a shard read by ranges: the rest will be wanted as well
_CHECK_S = 2.0  # how long the last manifest seen is taken for the current one

_logger = get_logger("datamat.readers")
_T = TypeVar("_T")


@final
class Loaded:
    """The files of a directory as they were when its manifest was read. Thread-safe and picklable.

    Shards are opened on first use, and a run may have replaced them by then, under the same names, with records of the
    same sizes. A run removes the manifest first: as long as that is the same, so are all other files. Its
    digest is at its beginning, so that a few bytes tell. Otherwise checksums decide: those of the manifest that is
    there now, or that of the file itself, where it is on this machine. Ranges of a file must be of one version of it.

    Args:
        folder: the directory.
        store: copies of its files, or None; needed if the directory has no files on this machine.
        content: content of its manifest; b"" if no one can replace the directory meanwhile.

    Attributes:
        folder: the directory.
        store: copies of its files.
        here: where its files can be opened in place; None if they have no paths on this machine.
    """

    def __init__(self, folder: Folder, store: ShardStore | None = None, content: bytes = b"") -> None:
        self.folder = folder
        self.store = store
        self.here = folder.local_path()
        self._head = self._first = head_of(content) if content else b""  # of the manifest now; b"" without one
        self._later: tuple[bytes, dict[str, str]] = b"", {}  # of a later one that was seen, and its checksums by file
        self._versions: dict[str, str] = {}  # by file, as its first range said
        self._looked_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_looked_at": -_CHECK_S}  # the clock differs on another machine

    def opened(self, info: IndexInfo, read: Callable[[pathlib.Path, str], _T]) -> _T:
        """Return what a function returns for an index file or a copy of it, given a folder and the name in it.

        Raises:
            CorruptDataError: the file is not as the manifest says, or the function raises this.
            OutputError: it cannot be read, or is no longer what was loaded.
        """
        try:
            if self.here is None:
                assert self.store is not None, "copies are what is read"
                copy = self.store.fetch(info, self.folder)
                if not info.is_whole(copy):  # a bad disk
                    self.store.drop_damaged(info)
                    copy = self.store.fetch(info, self.folder)
                return read(copy.parent, copy.name)
            found = read(self.here, info.file)
        except (CorruptDataError, AbsentError):
            self.check(info)
            raise
        self.check(info)
        return found

    def read_range(self, info: ListedFile, start: int, stop: int) -> bytes:
        """Return some bytes of a file, from the same version as its first range.

        Raises:
            AbsentError: it is not there.
            OutputError: it cannot be read, or has been replaced.
        """
        found = self.folder.read_range(info.file, start, stop)
        if found.version and found.version != self._versions.setdefault(info.file, found.version):
            raise self._replaced(info)
        return found.content

    def check(self, info: ListedFile, *, within_s: float = 0.0) -> None:
        """Refuse a file that has been replaced; to be called when the file is open, or bytes of it were read.

        Args:
            info: entry of the file in the manifest that was loaded.
            within_s: for how long to trust the last look at the manifest.

        Raises:
            OutputError: another file or none has its name now, a run is replacing files, or the manifest cannot be
                read.
        """
        if not self._first:
            return
        now = time.monotonic()
        if now - self._looked_at >= within_s:
            self._look()
            self._looked_at = now
        is_listed = self._later[1].get(info.file) == info.checksum
        if self._head == self._first or (self._head and is_listed) or self._is_here(info):
            return
        if not self._head:
            raise OutputError(
                f"{self.folder.place(MANIFEST_FILE)} has gone since it was loaded: a run is replacing shards; load "
                f"{self.folder} again when it has finished"
            )
        raise self._replaced(info)

    def _replaced(self, info: ListedFile, reason: str = "") -> OutputError:
        return OutputError(
            f"{self.folder.place(info.file)} is no longer the file that was loaded{reason}: a run has replaced it; "
            f"load {self.folder} again"
        )

    def _is_here(self, info: ListedFile) -> bool:
        place = self.folder.place(info.file)
        try:
            path = self.folder.local_path(info.file)
            return path is not None and info.is_whole(path)
        except FileNotFoundError as error:
            raise OutputError(
                f"{place} no longer exists: since it was loaded, it was removed, or a folder was moved or "
                "renamed; load the directory from where it is now"
            ) from error
        except (OSError, CorruptDataError) as error:
            raise self._replaced(info, f" ({error})") from error

    def _look(self) -> None:
        try:
            head = self.folder.read_range(MANIFEST_FILE, 0, len(self._first)).content
            if head not in (self._first, self._later[0]):
                content = self.folder.read(MANIFEST_FILE, MOST_MANIFEST_BYTES)
                found = Manifest.parse(content, self.folder.place(MANIFEST_FILE))
                head = head_of(content)
                files: list[ShardInfo | IndexInfo] = [*found.all_files, *found.index]
                self._later = head, {info.file: info.checksum for info in files}
        except (AbsentError, CorruptDataError):  # not one yet while it is being written
            head = b""
        self._head = head


@final
class Download:
    """A copy that a thread of this process is making, or the reason why not. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_bytes = 0
        self.pid = os.getpid()
        self.part: pathlib.Path | None = None
        self.is_over = False
        self.is_elsewhere = False
        self.has_room = True

    def watch(self, part: pathlib.Path, num_bytes: int) -> None:
        """Note that so many bytes are there."""
        with self._changed:
            self.part, self._num_bytes = part, num_bytes
            self._changed.notify_all()

    def end(self) -> None:
        """Note that the thread has ended."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def begun(self) -> bool:
        """Wait until the file of the copy is there; return False if it will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self.part is not None)
            return not self.is_over

    def reaches(self, stop: int) -> bool:
        """Return True if the bytes up to `stop` are there; wait for them if they are near, and while they come."""
        with self._changed:
            while stop > self._num_bytes:
                before = self._num_bytes
                if self.is_over or stop - before > _NEAR_BYTES:
                    return False
                if not self._changed.wait(_WAIT_S) and before == self._num_bytes:
                    return False
            return True


@final
class ShardFetcher:
    """Makes copies of the shards of a directory in threads. Thread-safe and picklable: a copy begins with none.

    Args:
        folder: the directory.
        store: where the copies go.
    """

    def __init__(self, folder: Folder, store: ShardStore) -> None:
        self.store = store
        self._folder = folder
        self._running: dict[str, Download] = {}

    def __reduce__(self) -> tuple[type[ShardFetcher], tuple[Any, ...]]:
        return ShardFetcher, (self._folder, self.store)

    @property
    def may_rotate(self) -> bool:
        """Whether shards that an epoch has finished make room for the next: not if shards are read in place."""
        return self.store.is_too_small and self._folder.local_path() is None

    def running(self, info: ShardInfo) -> Download | None:
        """Return the download of a shard that began in this process and has not ended, or that failed."""
        found = self._running.get(info.file)
        return found if found is not None and found.pid == os.getpid() else None

    def start(self, info: ShardInfo, then: Callable[[Download], None] | None = None) -> bool:
        """Begin to fetch a shard and its offsets, unless it is there or on its way; return True if this began it.

        `then` is called in the thread at the end.
        """
        running = self.running(info)
        if (running is not None and not running.is_over) or self.store.copy_of(info) is not None:
            return False
        download = self._running[info.file] = Download()
        # Daemons: the program need not wait for shards that it will not read. Unfinished files are replaced.
        self._in_thread(info.offsets_info.file, self._fetch_offsets, info)
        self._in_thread(info.file, self._fetch, info, download, then)
        return True

    def _in_thread(self, name: str, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=work, args=args, name=f"datamat-fetch {name}", daemon=True).start()

    def _fetch_offsets(self, info: ShardInfo) -> None:
        with contextlib.suppress(DatamatError, BlockingIOError):  # fetched again when they are needed, which raises
            if info.num_records and self._folder.local_path() is None:
                self.store.fetch_if_it_fits(info.offsets_info, self._folder, wait=False)

    def _fetch(self, info: ShardInfo, download: Download, then: Callable[[Download], None] | None) -> None:
        try:
            found = self.store.fetch_if_it_fits(info, self._folder, wait=False, watch=download.watch)
            download.has_room = found is not None
        except BlockingIOError:
            download.is_elsewhere = True
        except DatamatError as error:
            # Reading the shard fetches it again, which raises.
            _logger.debug("fetching ahead failed: %s", error)
        finally:
            if not (download.is_elsewhere or not download.has_room):
                self._running.pop(info.file, None)
            download.end()
            if then is not None:
                then(download)


# ---------------------------------------------------------------- reading before a shard is whole


@final
class RemoteReader(ShardReader):
    """Reads records of an incomplete shard, each from the part that is here, or by a range of its own.

    The bytes of a range go to their place in a local file, where the reader of the format finds them. The file has the
    size of the shard, but takes room only for what was read. This works for any format that reads no more than the
    ranges of its records. A copy that is being made is only read from: its stream is compared with the manifest.

    Args:
        info: entry of the shard in the manifest.
        loaded: the directory, with a store.
        spans: lookup of where each record lies.
        fetcher: makes a copy once much of the shard was read by ranges; None if that is of no use.
        read_file: returns the format's reader of a file.
        download: copy of the shard in progress, or None.
        is_damaged: whether the shard is known to be damaged, so that its ends may differ from the manifest.

    Raises:
        CorruptDataError: the ends of the shard are not as the manifest says.
    """

    def __init__(
        self,
        info: ShardInfo,
        loaded: Loaded,
        spans: RecordSpans,
        fetcher: ShardFetcher | None,
        read_file: Callable[[str], ShardReader],
        download: Download | None,
        *,
        is_damaged: bool = False,
    ) -> None:
        self._descriptor = self._part = -1
        self._info = info
        self._folder = loaded.folder
        self._spans = spans
        self._fetcher = fetcher
        self._read_file = read_file
        self._download = download
        self._loaded = loaded
        self._is_damaged = is_damaged
        self._is_small = info.num_bytes <= SMALL_BYTES
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._here: set[tuple[int, int]] = set()
        self._written = self._num_ranges = self._range_bytes = 0
        if download is not None and download.part is not None:
            self._part = os.open(download.part, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        assert loaded.store is not None, "what is read goes there"
        try:
            with loaded.store.scratch(info.num_bytes) as file:
                self._open(file.name)
        except BaseException:
            self.close()
            raise

    def _open(self, path: str) -> None:
        info, self._path = self._info, path
        self._descriptor = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        end = sum(self._spans.span(info.num_records - 1)[:2]) if info.num_records else 0
        tail = info.num_bytes - info.tail.num_bytes
        start = 0 if self._is_small else min(end, tail)
        rest = b""
        try:
            if self._download is not None and end == info.num_bytes:
                # The shard only has records, each with its checksum, and the copy is compared with the manifest as a
                # whole: the first record need not wait for a request of the shard's end, which takes as long as the
                # server does.
                head = self._bytes(0, info.head.num_bytes)[0]
            else:
                with concurrent.futures.ThreadPoolExecutor(1) as pool:  # both at once, for the same reason
                    coming = None if self._is_small else pool.submit(self._bytes, 0, info.head.num_bytes)
                    rest = self._loaded.read_range(info, start, info.num_bytes)
                    head = rest[: info.head.num_bytes] if coming is None else coming.result()[0]
        except AbsentError:
            raise
        except OutputError:
            there = self._folder.stat(info.file)
            if there is not None and there.num_bytes < info.num_bytes:
                info.refuse(info.differences(there.num_bytes, b"", b""), self._folder.place(info.file))
            raise
        if not self._is_damaged:
            ends = info.differences(info.num_bytes, head, rest[tail - start :] if rest else None)
            info.refuse(ends, self._folder.place(info.file))
        self._loaded.check(info, within_s=_CHECK_S)
        _write_at(self._descriptor, rest, start)
        self._inner = self._read_file(path)

    @property
    def is_stale(self) -> bool:
        """Whether there is now a better way to read the shard, or this reader belongs to the parent process."""
        if self._pid != os.getpid():
            return True
        if self._download is not None:
            return self._download.is_over
        if self._fetcher is None:
            return False
        running = self._fetcher.running(self._info)
        return (running is not None and not running.is_over) or self._fetcher.store.copy_of(self._info) is not None

    def read(self, number: int) -> dict[str, Column]:
        """Return one record."""
        try:
            return self._read(number, self._inner.read)  # type: ignore[return-value]
        except CorruptDataError as error:
            self._loaded.check(self._info)
            raise CorruptDataError(str(error).replace(self._path, self._folder.place(self._info.file))) from error

    def read_intact(self, number: int) -> dict[str, Column] | None:
        """Return a record that is intact although data stored with it is damaged; None if it is not."""
        return self._read(number, self._inner.read_intact)

    def _read(self, number: int, read: Callable[[int], dict[str, Column] | None]) -> dict[str, Column] | None:
        offset, size, _ = self._spans.span(number)
        with self._lock:
            if self._is_small or (offset, size) in self._here:
                return read(number)
        data, is_range = self._bytes(offset, size)
        self._loaded.check(self._info, within_s=_CHECK_S)  # one check for all: each takes as long as the server is away
        with self._lock:
            if self._written > _SCRATCH_BYTES:
                os.ftruncate(self._descriptor, 0)
                os.ftruncate(self._descriptor, self._info.num_bytes)
                self._here.clear()
                self._written = 0
            _write_at(self._descriptor, data, offset)
            self._here.add((offset, size))
            self._written += size
            found = read(number)
            self._num_ranges += is_range
            self._range_bytes += size * is_range
        if (
            self._fetcher is not None
            and self._num_ranges >= _LEAST_RANGES
            and self._range_bytes * _SHARE_OF_RANGES >= self._info.num_bytes
        ):
            self._num_ranges = 0
            self._fetcher.start(self._info)
        return found

    def _bytes(self, offset: int, size: int) -> tuple[bytes, bool]:
        """Return bytes of the shard, and whether a range was requested for them."""
        is_range = self._download is None or not self._download.reaches(offset + size)
        if is_range:
            return self._loaded.read_range(self._info, offset, offset + size), True
        return read_at(self._part, size, offset), False

    @property
    def group_records(self) -> int | None:
        """Number of records in the largest group, as the format's reader says."""
        return self._inner.group_records

    def close(self, *, close_descriptor: Callable[[int], None] = os.close) -> None:
        """Release the file."""
        descriptors, self._descriptor, self._part = (self._descriptor, self._part), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                close_descriptor(descriptor)


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


# ---------------------------------------------------------------- looking ahead

_FIRST_RECORDS = 1024
_JOBS_PER_JOB = 4  # how many to look at for each one that is made, until they reach far enough
_LEAST_RECORDS, _MOST_RECORDS = 8192, 1 << 20
_numbers = itertools.count()


@final
class LookAhead:
    """Fetches the shards of an epoch in the order in which it needs them. Not thread-safe; `close` ends it.

    Args:
        shards: first to last shard of all records that are read, each with its fetcher; None for local shards.
        is_local: whether the epoch reads each shard once, in one go, so that finished shards may make room.
        reached: function of positions that adds those of other records read with them; None if there are none.
    """

    def __init__(
        self,
        shards: Sequence[tuple[ShardInfo, ShardFetcher | None]],
        *,
        is_local: bool,
        reached: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
    ) -> None:
        self._shards = shards
        self._reached = reached
        self._ends = np.cumsum([info.num_records for info, _ in shards])
        self._rotating = {fetcher.store for _, fetcher in shards if fetcher is not None and fetcher.may_rotate}
        self._is_local = is_local
        self._number = next(_numbers)
        self._held: collections.deque[list[int]] = collections.deque()
        self._uses: collections.Counter[int] = collections.Counter()
        self._wanted: collections.deque[int] = collections.deque()
        self._num_running = 0
        self._at_once = _AT_FIRST
        self._is_open = True
        self._lock = threading.Lock()  # `_done` comes from threads that fetch
        self.most_records = min(
            max(_LEAST_RECORDS, 2 * max((info.num_records for info, _ in shards), default=0)), _MOST_RECORDS
        )

    @property
    def is_far_enough(self) -> bool:
        """Whether more shards are known to follow than are fetched at once."""
        return bool(self._wanted)

    def add(self, positions: NDArray[np.int64]) -> None:
        """Note records that come next, by position; `release` forgets the first ones."""
        reached = positions if self._reached is None else self._reached(positions)
        found, first = np.unique(np.searchsorted(self._ends, reached, side="right"), return_index=True)
        shards = found[np.argsort(first)].tolist()
        self._held.append(shards)
        for shard in shards:
            self._uses[shard] += 1
            if self._uses[shard] == 1 and self._shards[shard][1] is not None:
                self._wanted.append(shard)
        self._say_needs()
        self._start()

    def release(self) -> None:
        """Forget the records that were added first: they have been read."""
        for shard in self._held.popleft():
            self._uses[shard] -= 1
            if not self._uses[shard]:
                del self._uses[shard]
        self._say_needs()
        self._start()

    def close(self) -> None:
        """Fetch no more shards; shards on their way still arrive."""
        with self._lock:
            self._is_open = False
            self._wanted.clear()
        for store in self._rotating:
            store.need(self._number, None)

    def _say_needs(self) -> None:
        if not self._is_local:
            return
        needs: dict[ShardStore, list[ShardInfo]] = {store: [] for store in self._rotating}
        for info, fetcher in (self._shards[shard] for shard in self._uses):
            if fetcher is not None and fetcher.store in needs:
                needs[fetcher.store].append(info)
        for store, infos in needs.items():
            store.need(self._number, infos)

    def _start(self) -> None:
        with self._lock:
            while self._is_open and self._wanted and self._num_running < self._at_once:
                shard = self._wanted.popleft()
                info, fetcher = self._shards[shard]
                if fetcher is None or shard not in self._uses:
                    continue
                self._num_running += 1
                if not fetcher.start(info, lambda download, shard=shard: self._done(shard, download)):  # type: ignore[misc]
                    self._num_running -= 1

    def _done(self, shard: int, download: Download) -> None:
        with self._lock:
            self._num_running -= 1
            self._at_once = min(self._at_once + _MORE, _AT_ONCE)
            if not download.has_room and self._is_open:
                self._wanted.appendleft(shard)  # there may be room when the next one is released
                return
        self._start()


def ahead(jobs: Iterator[BatchJob], look: LookAhead, lag: int) -> Generator[BatchJob]:
    """Yield jobs unchanged, and fetch the shards of later jobs.

    Args:
        jobs: batches to make, in order.
        look: fetches shards; closed at the end.
        lag: number of jobs that may be in progress at a time.
    """
    held: collections.deque[BatchJob] = collections.deque()
    num_records, num_given, reach = 0, 0, _FIRST_RECORDS
    try:
        while True:
            # At least one; as many as reach far enough, and more with each that is made, so that the first is soon
            # there.
            while not held or (num_records < reach and not look.is_far_enough):
                job = next(jobs, None)
                if job is None:
                    break
                held.append(job)
                num_records += len(job.positions)
                look.add(job.positions)
            if not held:
                return
            job = held.popleft()
            num_records -= len(job.positions)
            reach = min(reach + _JOBS_PER_JOB * len(job.positions), look.most_records)
            yield job
            num_given += 1
            if num_given > lag:
                look.release()
    finally:
        look.close()
