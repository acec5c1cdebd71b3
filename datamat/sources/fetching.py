"""Fetches files behind URLs to paths on this machine, before anyone opens those paths.

    fetchers of this process: a source (`mirror`), the URLs in rows (`url_files`)
                     │
    rows of a part   ├── `FetchAhead`: many at a time, in their order; dropped when the part is done
    one row          ├── `fill`
    a digest         └── `fetched`

Opening a file never fetches it: a file that is not declared is not here.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import os
from typing import TYPE_CHECKING, Any, final

import xxhash

from datamat.directory.files import default_scratch
from datamat.errors import DatamatError, InputError, SourceError, described
from datamat.folders.base import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


MOST_BYTES = 1 << 34
"""Largest file that is fetched if its size is unknown: a server might send data without end."""
_AHEAD_FILES, _AHEAD_BYTES = 128, 64 << 20  # that are fetched before their rows are read
_KEPT_BYTES = 1 << 30  # of files that rows of a part are done with: others of the part may share them
_FIRST_NS, _SPAN_NS = 946_684_800 * 10**9, 10**18  # from 2000 on, for some thirty years: any file system has such times

_active: dict[str, Fetcher] = {}  # of this process, by folder


class Fetcher(abc.ABC):
    """Fetches files to paths below a folder on this machine. Thread-safe and picklable.

    Attributes:
        folder: the folder; it tells a fetcher from others.
    """

    folder: str

    def activate(self) -> None:
        """Make this process fetch the files from now on."""
        _active[self.folder] = self

    @abc.abstractmethod
    def files_in(self, path: str) -> list[str]:
        """Return the paths of the files that a path of a row stands for and that this object fetches."""

    @abc.abstractmethod
    def is_absent(self, path: str) -> bool:
        """Return True if a file has to be fetched."""

    def stays(self, path: str) -> bool:
        """Return True if a file is here and is never dropped."""
        return False

    def lacks(self, path: str) -> int:
        """Return the bytes that a file takes, or will take once it is here, if that is known."""
        try:
            return os.lstat(path).st_size
        except OSError:
            return 0

    @abc.abstractmethod
    def fetch(self, path: str) -> None:
        """Fetch a file unless it is here; do nothing for any other path.

        Raises:
            InputError: it cannot be fetched, which only concerns its row.
            OutputError: its place cannot be read.
        """

    def ahead(self, path: str) -> None:
        """Fetch a file before its row is read; raises as `fetch`."""
        self.fetch(path)

    @abc.abstractmethod
    def drop(self, path: str) -> bool:
        """Remove the content of a file unless a process has it `held` or it stays; return True if it is gone."""

    def held(self, path: str) -> int | None:
        """Return a descriptor that, while open, keeps a file from being dropped; None if no one else could drop it.

        Raises as `fetch`.
        """
        self.fetch(path)
        return None

    @abc.abstractmethod
    def shown(self, text: str) -> str:
        """Return a text with URLs instead of paths."""

    def placeholder_in(self, text: str) -> str:
        """Return the path of the first file that a text names and that nothing fetches; "" if there is none."""
        return ""

    def forget(self) -> None:  # noqa: B027 -- a subclass may have nothing to do
        """End a part."""


def sent(kind: type[Any], *args: Any) -> Any:
    """Return a fetcher that was sent to this process, activated."""
    found = kind(*args)
    found.activate()
    return found


def fetches_files() -> bool:
    """Return True if this process fetches files of a source behind a URL, or files behind URLs in rows."""
    return bool(_active)


def fetchers() -> dict[str, Fetcher]:
    """Return the fetchers of this process, by folder."""
    return dict(_active)


def behind(path: str) -> Iterator[tuple[Fetcher, str]]:
    """Yield the files that a path stands for and that this process fetches, each with its fetcher."""
    for mirror in fetchers().values():
        yield from ((mirror, file) for file in mirror.files_in(path))


def fill(paths: Iterable[str]) -> None:
    """Fetch files of sources that this process mirrors; ignore other paths."""
    for path in paths:
        for mirror, file in behind(path):
            mirror.fetch(file)


@contextlib.contextmanager
def fetched(paths: Iterable[str]) -> Iterator[None]:
    """Keep files of sources here within the block, and drop those that were fetched for it."""
    new = [(mirror, file) for path in paths for mirror, file in behind(path) if mirror.is_absent(file)]
    try:
        for mirror, file in new:
            mirror.fetch(file)
        yield
    finally:
        for mirror, file in new:
            mirror.drop(file)


def with_urls(text: str) -> str:
    """Return a text with the URLs of sources that this process mirrors instead of the paths of their folders."""
    for mirror in fetchers().values():
        text = mirror.shown(text)
    return text


def remedy(text: str) -> str:
    """Return what to do if a text names a file that was not fetched because it is not declared, otherwise ""."""
    path = next(filter(None, (mirror.placeholder_in(text) for mirror in fetchers().values())), "")
    return path and (
        f"{with_urls(path)} was not fetched, because no row declares it: name its field in file_fields, or the file in "
        "IndexRow(files=...), or in the writer's files if every sample depends on it"
    )


@contextlib.contextmanager
def urls_in_errors() -> Iterator[None]:
    """Make errors name files of sources behind URLs as the user knows them, and say which ones must be declared."""
    try:
        yield
    except Exception as error:
        said = remedy(str(error))
        if said:
            raise SourceError(f"{with_urls(described(error))}; {said}") from error
        if isinstance(error, DatamatError) and _active:
            error.args = tuple(with_urls(arg) if isinstance(arg, str) else arg for arg in error.args)
            for name, value in vars(error).items():
                if isinstance(value, str):
                    setattr(error, name, with_urls(value))
        raise


@final
class FetchAhead:
    """Fetches the files of the rows of a part in order, ahead of their use. Not thread-safe.

    Args:
        rows: paths of the files of each row, and of folders; those that no source of this process fetches do not
            matter.
    """

    def __init__(self, rows: Sequence[Iterable[str]]) -> None:
        self._rows = [[one for path in row for one in behind(path) if not one[0].stays(one[1])] for row in rows]
        self._pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "datamat-fetch")
        self._running: dict[str, concurrent.futures.Future[None]] = {}
        self._first = self._next = 0  # the row at work, and the first that nothing was fetched of
        self._sizes: dict[str, int] = {}  # of the files that were fetched; before they have arrived, a guess
        self._done: dict[str, int] = {}  # those that rows are done with, oldest first
        self._done_bytes = 0
        self._held: list[int] = []

    def __enter__(self) -> FetchAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()
        self._pool.shutdown(cancel_futures=True)
        for mirror, path in (one for row in self._rows[: self._next] for one in row):
            mirror.drop(path)
        for mirror in {mirror for row in self._rows for mirror, _ in row}:
            mirror.forget()

    @property
    def has_files(self) -> bool:
        """Whether rows have files that come and go."""
        return any(self._rows)

    def reach(self, number: int) -> None:
        """Wait for the files of a row, which stay until the next row is reached; files of earlier rows may go.

        Raises:
            OutputError: a file cannot be read. A file that is gone or has changed is left to the row that opens it.
        """
        self._let_go()
        self._begin(number)
        for mirror, path in self._rows[number]:
            running = self._running.pop(path, None)
            with contextlib.suppress(InputError):
                if running is not None:
                    running.result()
                if (held := mirror.held(path)) is not None:
                    self._held.append(held)

    def _begin(self, number: int) -> None:
        """Begin to fetch what comes next, and drop the oldest files if many are here."""
        most_files = _AHEAD_FILES if self._next else AT_ONCE  # until one has arrived, which may be large
        done, self._first = self._rows[self._first : number], number
        ahead = [path for row in self._rows[number : self._next] for _, path in row]
        num_files, num_bytes = len(ahead), sum(map(self._sizes.__getitem__, ahead))
        while self._next < len(self._rows) and (
            self._next <= number or (num_files < most_files and num_bytes < _AHEAD_BYTES)
        ):
            for mirror, path in self._rows[self._next]:
                self._sizes[path] = mirror.lacks(path)
                if path not in self._running and mirror.is_absent(path):
                    self._running[path] = self._pool.submit(self._fetch, mirror, path)
                num_files += 1
                num_bytes += self._sizes[path]
                self._done_bytes -= self._done.pop(path, 0)
            self._next += 1
        needed = {path for row in self._rows[number : self._next] for _, path in row} if done else ()
        for path in (path for row in done for _, path in row if path not in needed):
            self._done_bytes += self._sizes[path] - self._done.pop(path, 0)
            self._done[path] = self._sizes[path]
        while self._done_bytes > _KEPT_BYTES:
            path = next(iter(self._done))
            self._done_bytes -= self._done.pop(path)
            for mirror, file in behind(path):
                mirror.drop(file)

    def _fetch(self, mirror: Fetcher, path: str) -> None:
        mirror.ahead(path)
        self._sizes[path] = mirror.lacks(path)

    def _let_go(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()


def stamp_of(version: str) -> int:
    """Return the time, in nanoseconds, that stands for a version of a file."""
    return _FIRST_NS + xxhash.xxh3_64_intdigest(version.strip('"').encode()) % (_SPAN_NS // 1000) * 1000


def scratch_folder(scratch: str | os.PathLike[str] | None) -> str:
    """Return the folder for scratch files that a user names, or None for one below `TMPDIR`."""
    return os.path.abspath(os.path.expanduser(default_scratch() if scratch is None else scratch))
