"""Sources behind URLs: a local folder that looks as the bucket does, and whose files arrive when they are needed.

    listing ──> a placeholder for each object: its name and size, a time made of its ETag, no content, no permission
                     │
    tables, lists    ├── at once, many at a time: libraries open them by themselves
    files of rows    ├── before their rows, many at a time (`FetchAhead`); let go of when the part is done
    other files      └── when Python opens them, in this process or a worker: an audit hook fetches them first

So every writer works, also one that knows nothing of URLs. What is made again is decided as for folders: by sizes and
times, and where these differ, by content. An object whose ETag or generation changes gets another time.
A placeholder can be opened by nobody but root, who finds zeros, which are no picture and no table.

Rows of a table may each name a URL of their own, of any host or store (`UrlFiles`). These have no placeholders: a
process fetches those of its part ahead, under names of its own, and one that fails is a matter of its row.
"""

from __future__ import annotations

import atexit
import base64
import collections
import concurrent.futures
import contextlib
import errno
import glob
import hashlib
import os
import pathlib
import re
import shutil
import stat
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any, final

import xxhash

from datamat.directory.files import default_scratch
from datamat.errors import (
    DatamatError,
    InputError,
    MissingDependencyError,
    OptionError,
    SourceError,
    require_posix,
)
from datamat.folders.other import UrlPath, open_filesystem
from datamat.folders.retries import is_unreachable, reason_of, retried, status_of
from datamat.folders.urls import (
    is_url,
    lasting,
    options_for,
    place_of,
    redacted,
    refuse_chain,
    url_of_table,
    without_secrets,
)
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


__all__ = [
    "AT_ONCE",
    "LIKELY_BYTES",
    "FetchAhead",
    "SourceMirror",
    "UrlFiles",
    "fetches_files",
    "fill",
    "is_path_of_url",
    "mirrored",
    "stamp_of_url",
    "url_folder",
    "url_path",
    "urls_in_errors",
    "with_urls",
]

AT_ONCE = 32
"""Requests that a process makes at once."""
_AHEAD_FILES, _AHEAD_BYTES = 128, 64 << 20  # that are fetched before their rows are read
_KEPT_BYTES = 1 << 30  # of files that rows of a part are done with: others of the part may share them
_OPENED_BY_LIBRARIES = frozenset(
    {".txt", ".csv", ".tsv", ".lst", ".names", ".json", ".jsonl", ".ndjson", ".yaml", ".yml", ".parquet", ".arrow",
     ".feather", ".orc", ".sqlite", ".db", ".h5", ".hdf5", ".nc"}
)  # fmt: skip
_PACKED = frozenset({".gz", ".bz2", ".lz4", ".zst", ".xz"})
_READABLE = 0o444
_WITH_CONTENT = 0o644  # NFS refuses an exclusive lock to whoever may not write
_WILDCARDS = "*?["
_FIRST_NS, _SPAN_NS = 946_684_800 * 10**9, 10**18  # from 2000 on, for some thirty years: any file system has such times
_IDENTITIES = ("md5Hash", "content_settings", "ETag", "etag", "generation", "blob_id", "sha", "mtime", "LastModified",
               "Last-Modified", "created")  # fmt: skip

_active: dict[str, SourceMirror | UrlFiles] = {}  # of this process, by folder and a slash
_has_hook = False


@frozen()
class _Entry:
    """An object of the listing."""

    num_bytes: int  # -1 where its server does not say
    stamp: int
    part: str = ""  # path of its content, where that was fetched with the listing


@final
class SourceMirror:
    """The local folder of a source behind a URL. Thread-safe and picklable; processes share the folder.

    Args:
        root: URL of a folder or of one file, with the options for fsspec.
        pattern: pattern of the files below the folder; "" for all.
        folder: folder of the mirror.
    """

    def __init__(self, root: UrlPath, pattern: str, folder: pathlib.Path) -> None:
        self._root = root
        self._pattern = pattern
        self._folder = folder
        self._files = os.path.join(folder, "files", "")
        self._single = ""  # name of the file where the URL is that of one
        self._is_fresh = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._root, self._folder)

    def __str__(self) -> str:
        return str(self._root / self._pattern) if self._pattern else str(self._root)

    @property
    def root(self) -> UrlPath:
        """The URL of the folder that the mirror stands for."""
        return self._root

    @property
    def path(self) -> str:
        """What stands for the URL on this machine: the path of a folder or file, or a pattern."""
        return os.path.join(self._files, self._pattern or self._single).rstrip("/")

    # ------------------------------------------------------------ the listing

    def update(self) -> None:
        """Bring the folder in line with what is behind the URL now.

        Raises:
            SourceError: it cannot be listed, or there is nothing.
        """
        require_posix("a source behind a URL")
        listed = self._listed()
        work = self._folder / "work"
        for made in (work, pathlib.Path(self._files)):
            made.mkdir(parents=True, exist_ok=True)
        unsized = [name for name, found in listed.items() if found.num_bytes < 0]
        listed |= dict(zip(unsized, _each(self._measured, unsized), strict=True))
        known = set(listed)
        for folder, names, files in os.walk(self._files, topdown=False):
            below = os.path.relpath(folder, self._files)
            for name in files:
                path = os.path.normpath(os.path.join(below, name))
                if path not in known:
                    with contextlib.suppress(FileNotFoundError):  # another process lists the source, too
                        os.unlink(os.path.join(folder, name))
            if below != "." and not any(os.path.lexists(os.path.join(folder, name)) for name in (*names, *files)):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        early = [name for name, found in listed.items() if self._lay(name, found) and self._is_early(name)]
        self.activate()
        self._is_fresh = True
        _each(lambda name: self.fetch(os.path.join(self._files, name)), early)

    def renew(self) -> None:
        """Bring the folder in line, but for the first time after `update`."""
        if self._is_fresh:
            self._is_fresh = False
        else:
            self.update()
            self._is_fresh = False

    def activate(self) -> None:
        """Have this process fetch the files of the folder that Python opens from now on."""
        _activate(self._files, self)

    def _listed(self) -> dict[str, _Entry]:
        try:
            found = retried(self._find)
        except DatamatError:
            raise
        except Exception as error:  # noqa: BLE001 -- each filesystem raises what the client below it does
            reason = redacted(reason_of(error), self._root.url, self._root.options)
            raise SourceError(
                f"{self} cannot be listed: {reason}; check the address, the network and storage_options"
            ) from None
        if not found:
            raise SourceError(f"{self} holds nothing; check the address: want a folder of objects, or an object")
        return found

    def _find(self) -> dict[str, _Entry]:
        filesystem, root = open_filesystem(self._root.url, self._root.options)
        filesystem.invalidate_cache()
        if self._single:
            info = filesystem.info(open_filesystem((self._root / self._single).url, self._root.options)[1])
            return {self._single: _listed(info)}
        with contextlib.suppress(FileNotFoundError):
            info = filesystem.info(root)
            if info["type"] == "file" and not root.endswith("/") and not _is_page(root, info):
                self._root, self._single = self._root.parent, self._root.name
                return {self._single: _listed(info)}
        prefix = f"{root.rstrip('/')}/"
        if self._pattern:
            found = filesystem.glob(prefix + self._pattern, detail=True)
            found = {path: info for path, info in found.items() if info["type"] == "file"}
        else:
            found = filesystem.find(root, detail=True)
        infos = {path[len(prefix) :]: info for path, info in found.items() if path.startswith(prefix)}
        infos = {name: info for name, info in infos.items() if name and not name.endswith("/")}
        blind = [name for name, info in infos.items() if info.get("size") is None]  # a web server's
        infos |= dict(zip(blind, _each(lambda name: filesystem.info(prefix + name), blind), strict=True))
        folders = {name[:place] for name in infos for place, letter in enumerate(name) if letter == "/"}
        for name in infos:
            if any(part in {"", ".", ".."} for part in name.split("/")) or "\0" in name or name in folders:
                raise SourceError(f"{self} holds {name!r}, which cannot be the name of a file; rename it or remove it")
        return {name: _listed(info) for name, info in infos.items()}

    def _measured(self, name: str) -> _Entry:
        """Return an object whose size no server says, with its content: only that tells its versions apart."""
        place, part = self._root / name, self._part()
        try:
            with open(part, "w+b") as file:
                size, _ = place.download(file, _MOST_BYTES)
                file.seek(0)
                digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
            return _Entry(size, _stamp(digest.hexdigest()), part)
        except Exception as error:  # each filesystem raises what the client below it does
            os.unlink(part)
            if _is_of_disk(error) or (isinstance(error, DatamatError) and not isinstance(error, InputError)):
                raise
            reason = str(error).partition(";")[0] if isinstance(error, InputError) else reason_of(error)
            problem = redacted(reason, place.url, place.options)
        raise SourceError(
            f"{place} cannot be fetched to see how large it is, which its server does not say: {problem}; download it, "
            "and give its path"
        )

    def _is_early(self, name: str) -> bool:
        stem, ending = os.path.splitext(name.lower())
        if ending in _PACKED:
            ending = os.path.splitext(stem)[1]
        # What is in the memory of this process can be seen by no other.
        return ending in _OPENED_BY_LIBRARIES or self._root.url.startswith("memory://")

    def _lay(self, name: str, found: _Entry) -> bool:
        """Lay a placeholder for an object, unless it or its content is there; return whether content is missing."""
        path = os.path.join(self._files, name)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            self._leave(path, found)
            return not found.part
        is_same = (status.st_size, status.st_mtime_ns) == (found.num_bytes, found.stamp)
        if is_same and stat.S_ISREG(status.st_mode) and not found.part:
            # What a run that was killed has left: it would fill the disk.
            return self.drop(path) if status.st_mode & _READABLE and not self._is_early(name) else _is_empty(status)
        self._leave(path, found)
        return not found.part

    def _leave(self, path: str, found: _Entry) -> None:
        """Put an object in place: its content where that is here, or else a placeholder."""
        if found.part:
            os.utime(found.part, ns=(found.stamp, found.stamp))
            os.chmod(found.part, _WITH_CONTENT)
            _put(found.part, path)
            return
        part = self._part()
        descriptor = os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o200)
        try:
            os.ftruncate(descriptor, found.num_bytes)
            os.utime(descriptor, ns=(found.stamp, found.stamp))
            os.fchmod(descriptor, 0)
        finally:
            os.close(descriptor)
        _put(part, path)

    def _part(self) -> str:
        descriptor, part = tempfile.mkstemp(dir=self._folder / "work")
        os.close(descriptor)
        return part

    # ------------------------------------------------------------ content

    def fetch(self, path: str) -> None:
        """Put the content of a file in place of its placeholder.

        Args:
            path: path of a file below the folder; whatever else it is, nothing happens.

        Raises:
            InputError: the object is gone, or has changed since it was listed.
            OutputError: it cannot be read.
        """
        try:
            wanted = os.lstat(path)
        except OSError:
            return
        if not stat.S_ISREG(wanted.st_mode) or not _is_empty(wanted):
            return
        name = os.path.relpath(path, self._files)
        part = self._part()
        try:
            digest = self._download(name, part, wanted.st_size)
            if not self._is_as_listed(name, part, wanted, digest):
                raise InputError(
                    f"{self._root / name} has changed since it was listed; run again, when nothing writes there"
                )
            os.chmod(part, _WITH_CONTENT)
            _put(part, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            raise

    def _download(self, name: str, part: str, num_bytes: int) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        place = self._root / name
        try:
            with open(part, "wb") as file, contextlib.closing(place.blocks(num_bytes)) as blocks:
                for block in blocks:
                    file.write(block)
                    digest.update(block)
        except DatamatError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise InputError(f"{place} is gone since it was listed; run again") from error
            raise
        return digest.hexdigest()

    def _is_as_listed(self, name: str, part: str, wanted: os.stat_result, digest: str) -> bool:
        """Return whether a file has the size and the identity of its placeholder, and give it its time."""
        if os.stat(part).st_size != wanted.st_size:
            return False
        stamp = _stamp(digest)
        os.utime(part, ns=(stamp, stamp))
        if os.stat(part).st_mtime_ns == wanted.st_mtime_ns:  # most ETags are the MD5 of the content
            return True
        filesystem, path = open_filesystem((self._root / name).url, self._root.options)
        filesystem.invalidate_cache()
        stamp = _listed(retried(lambda: filesystem.info(path))).stamp
        os.utime(part, ns=(stamp, stamp))
        return os.stat(part).st_mtime_ns == wanted.st_mtime_ns

    def drop(self, path: str) -> bool:
        """Put a placeholder in place of a file, unless a process has it `held`; return whether it is one now."""
        import fcntl

        try:
            if _is_empty(os.lstat(path)):
                return True  # to open it would fetch it
            with open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(file.fileno())
                if not _is_empty(status):
                    self._leave(path, _Entry(status.st_size, status.st_mtime_ns))
                return True
        except OSError:
            return False

    def held(self, path: str) -> int:
        """Return a descriptor of a file with its content; nobody drops it until that is closed. Raises as `fetch`."""
        import fcntl

        while True:
            self.fetch(path)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError) as error:
                if _is_placeholder(path):  # dropped again a moment ago
                    continue
                name = os.path.relpath(path, self._files)
                raise InputError(f"{self._root / name} is gone since it was listed; run again") from error
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)) and not _is_empty(os.fstat(descriptor)):
                    return descriptor
            os.close(descriptor)

    def ahead(self, path: str) -> None:
        """Fetch a file before its row is read; raises as `fetch`."""
        self.fetch(path)

    def lacks(self, path: str) -> int:
        """Return the bytes that a file will take where it is not there yet, or takes already."""
        return _size(path)

    def shown(self, text: str) -> str:
        """Return a text with the URL in place of the path of the folder."""
        url = str(self._root).rstrip("/")
        return text.replace(self._files, f"{url}/").replace(self._files.rstrip(os.sep), url)

    def forget(self) -> None:
        """Do nothing: the folder is that of all parts."""

    def files_in(self, path: str) -> list[str]:
        """Return the paths of the files that a path of a row stands for, as far as they are in the folder."""
        full = os.path.abspath(path)
        if not full.startswith(self._files):
            return []
        if not os.path.isdir(full):
            return [full]
        return [os.path.join(folder, name) for folder, _, names in os.walk(full) for name in sorted(names)]


def _put(part: str, path: str) -> None:
    """Give a file its place, in a folder that is made, also where another process removes that as empty."""
    folder = os.path.dirname(path)
    while True:
        try:
            os.makedirs(folder, exist_ok=True)
            os.replace(part, path)
        except (FileNotFoundError, FileExistsError):  # the latter where it goes while it is made
            if not os.path.exists(part) or os.path.isfile(folder):
                raise
        else:
            return


_MOST_BYTES = 1 << 34  # of a file behind a URL: no disk holds what a server may send without end
LIKELY_BYTES = 1 << 17
"""Size of a file behind the URL of a row, where nothing has said it yet."""
_SUFFIX = re.compile(r"\.\w{1,8}")
_CONNECT_S, _SILENCE_S = 10, 30  # many hosts of an old table are gone, and each must not take minutes
_PAGES = ("text/html", "application/xhtml+xml")


@final
class UrlFiles:
    """The files behind the URLs that rows name, each fetched when its row is read. Thread-safe and picklable.

    A file that cannot be fetched is an `InputError` of whoever opens it: other rows need other hosts.

    Args:
        folder: local folder; each process has its own below it, which goes with the process.
        options: options for fsspec, by scheme or by the beginning of a URL; or those of all stores.
        trusted: URL of the source that the user wrote, whose host gets the headers among them; "" if it is none. Other
            web servers get what is given for them by name.
    """

    def __init__(self, folder: str, options: Mapping[str, Any], trusted: str = "") -> None:
        self.folder = os.path.join(folder, "")
        self._options = dict(options)
        self._trusted = trusted
        self._urls: dict[str, str] = {}
        self._states: dict[str, tuple[int, int]] = {}
        self._failed: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._num_seen = self._seen_bytes = 0  # files that this process has fetched
        self._silent: set[str] = set()  # hosts that have not answered; each further URL of one is asked for once

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived_urls, (self.folder, self._options, self._trusted)

    def activate(self) -> None:
        """Have this process fetch the files that Python opens from now on."""
        _activate(self.folder, self)

    def path_of(self, url: str, place: str, problem: str = "") -> str:
        """Return the path at which the file behind a URL will be found in this process.

        Args:
            url: the URL, in full.
            place: what tells it from all others: row and field.
            problem: why it is not to be fetched, said when its row is read; "" where it is.
        """
        suffix = os.path.splitext(lasting(url).partition("?")[0])[1]
        name = f"{place}{suffix if _SUFFIX.fullmatch(suffix) else ''}"
        path = os.path.join(self.folder, str(os.getpid()), name)
        self._urls[path] = url
        if problem:
            self._refused[path] = problem
        return path

    def fetch(self, path: str) -> None:
        """Put the file at its path, unless it is there.

        Args:
            path: path that `path_of` returned; whatever else it is, nothing happens.

        Raises:
            InputError: it cannot be fetched, or is a page in place of a file.
        """
        url = self._urls.get(path)
        if url is None or os.path.exists(path):
            return
        problem = self._refused.get(path) or self._failed.pop(path, "")
        if not problem:
            _own(os.path.dirname(path))
            problem = self._fetched(url, path)
        if problem:
            raise InputError(problem)

    def ahead(self, path: str) -> None:
        """Fetch a file before its row is read; what fails now is raised when the row opens it."""
        try:
            self.fetch(path)
        except InputError as error:
            self._failed[path] = str(error)
            raise

    def _fetched(self, url: str, path: str) -> str:
        """Fetch a file; return what is wrong with it, or ""."""
        part = f"{path}.part"
        options = self._options_of(url)
        host = lasting(url).partition("://")[2].partition("/")[0]
        try:
            if not is_url(url):
                return f"{url!r} is no URL, and no file below the source; want one of them"
            attempts = {"attempts": 1} if host in self._silent else {}
            with open(part, "wb") as file:
                size, said = UrlPath(url_of_table(url), options).download(file, _MOST_BYTES, **attempts)
            self._silent.discard(host)
            kind = str(said.get("content-type", "")).partition(";")[0].strip().lower()
            is_page = kind in _PAGES and _begins_as_page(part)  # some servers call every file a page
            if is_page and not lasting(url).partition("?")[0].lower().endswith((".html", ".htm")):
                return (
                    f"{without_secrets(url)} answers with a page ({kind}) in place of a file; remove the row, or "
                    "correct the URL"
                )
            self._states[path] = size, _stamp(_identity(_as_info(said, size)))
            self._num_seen, self._seen_bytes = self._num_seen + 1, self._seen_bytes + size
            os.replace(part, path)
        except Exception as error:
            if _is_of_disk(error) or isinstance(error, (MissingDependencyError, OptionError)):
                raise  # it is none of this row
            if is_unreachable(error):
                self._silent.add(host)
            return f"{without_secrets(url)} {_problem(error, url, options)}"
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)
        return ""

    def ask(self, url: str) -> tuple[int, int]:
        """Return size and stamp of the file behind a URL, or two zeros where nothing answers for it."""
        with contextlib.suppress(Exception):
            size, said = UrlPath(url_of_table(url), self._options_of(url)).ask()
            return size, _stamp(_identity(_as_info(said, size)))
        return 0, 0

    def ask_all(self, urls: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return what `ask` returns for each of many URLs, asked many at a time."""
        names = list(dict.fromkeys(urls))
        return dict(zip(names, _each(self.ask, names), strict=True))

    def _options_of(self, url: str) -> dict[str, Any]:
        is_web = url.lower().startswith(("http://", "https://"))
        options = options_for(url, self._options, self._trusted)
        if not is_web:
            return options
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        options = {**options, "client_kwargs": {"timeout": timeout, **options.get("client_kwargs", {})}}
        # Signatures are over the very characters.
        return {"encoded": True, **options} if "%" in url and url.isascii() and " " not in url else options

    def state(self, path: str) -> tuple[int, int] | None:
        """Return size and stamp of a file that this process has fetched for the part at work."""
        return self._states.get(path)

    def drop(self, path: str) -> bool:
        """Remove a file; it is fetched again where it is opened once more."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return True

    def held(self, path: str) -> int | None:
        """Return None: a process drops nothing but its own files."""
        del path
        return None

    def lacks(self, path: str) -> int:
        """Return the bytes of a file; where it is not there yet, a guess: the mean of those that were fetched."""
        return _size(path) or (self._seen_bytes // self._num_seen if self._seen_bytes else LIKELY_BYTES)

    def files_in(self, path: str) -> list[str]:
        """Return the path where it is that of a URL."""
        return [path] if path in self._urls else []

    def shown(self, text: str) -> str:
        """Return a text with URLs in place of their paths."""
        if self.folder not in text:
            return text
        found = re.findall(re.escape(self.folder) + r"\d+/[\w:.-]+", text)
        for path in sorted(set(found), key=len, reverse=True):
            known = path if path in self._urls else path.rstrip(".")
            if known in self._urls:
                text = text.replace(known, without_secrets(self._urls[known]))
        return text

    def forget(self) -> None:
        """Forget the files of a part, and remove the folder of this process: it may end without a word."""
        for known in (self._urls, self._states, self._failed, self._refused):
            known.clear()
        _disown(os.path.join(self.folder, str(os.getpid())))


_owned: dict[str, int] = {}  # descriptor of the lock of each folder of this process, or of one it was forked from
_owning = threading.Lock()


def _own(folder: str) -> None:
    """Make the folder of this process, locked until it ends, and remove those of processes that are gone."""
    import fcntl

    with _owning:
        if folder in _owned:
            return
        for lock in glob.glob(f"{glob.escape(os.path.dirname(folder))}/*.lock"):
            with contextlib.suppress(OSError), open(lock, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.removesuffix(".lock"), ignore_errors=True)
                os.unlink(lock)
        while True:
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            try:
                descriptor = os.open(f"{folder}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # another has ended, and was the last
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the process ends
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(f"{folder}.lock")):
                    break
            os.close(descriptor)  # another took it for one that was left, before it was locked
        os.makedirs(folder, exist_ok=True)
        _owned[folder] = descriptor


def _disown(folder: str) -> None:
    """Remove a folder where it is this process's."""
    with _owning:
        descriptor = _owned.pop(folder, None) if folder.endswith(f"/{os.getpid()}") else None
        if descriptor is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}.lock")
                os.rmdir(os.path.dirname(folder))
            os.close(descriptor)


def _disown_all() -> None:
    for folder in [*_owned]:
        _disown(folder)


def _begins_as_page(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(256).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<")


def _is_of_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE}


def _problem(error: BaseException, url: str, options: Mapping[str, Any]) -> str:
    """Return what is wrong with a URL, and what to do, without its secrets and those of where it leads."""
    status, _ = status_of(error)
    if isinstance(error, InputError):
        return redacted(str(error), url, options)
    if isinstance(error, FileNotFoundError) or status in {404, 410}:
        return f"is not there ({status or 404}); remove the row, or correct the URL"
    if isinstance(error, PermissionError) or status in {401, 403}:
        return f"may not be read ({status or 403}); sign it anew, or give source_options that may read it"
    said = f"the server answers {status}" if status else redacted(reason_of(error), url, options)
    return f"cannot be fetched: {said}; run again later, or remove the row"


def _as_info(said: Mapping[str, Any], size: int) -> dict[str, Any]:
    return {**said, "Last-Modified": said.get("last-modified"), "size": size}


def stamp_of_url(path: str) -> tuple[int, int] | None:
    """Return size and stamp of a fetched file of a row's URL; None for other paths, and where it was not fetched."""
    for mirror in _active.values():
        if isinstance(mirror, UrlFiles) and (found := mirror.state(path)):
            return found
    return None


def is_path_of_url(paths: Sequence[str]) -> bool:
    """Return whether one of some paths is that of a URL of a row."""
    return any(isinstance(files, UrlFiles) and files.files_in(path) for files in _active.values() for path in paths)


def url_path(folder: str, url: str, place: str, problem: str = "") -> str:
    """Return the path of the file behind a URL of a row, in this process.

    Args:
        folder: folder of `UrlFiles`.
        url: the URL, in full.
        place: what tells it from all others: row and field.
        problem: why it is not to be fetched; "" where it is.
    """
    files = _active.get(folder)
    if not isinstance(files, UrlFiles):
        files = UrlFiles(folder, {})
        files.activate()
    return files.path_of(url, place, problem)


def url_folder(output: str | os.PathLike[str], scratch: str | os.PathLike[str] | None) -> str:
    """Return the folder in which files behind URLs of rows wait for them.

    Args:
        output: output of the run.
        scratch: folder below which it lies; None for one below `TMPDIR`.
    """
    return os.path.join(_scratch(scratch), f"urls-{xxhash.xxh3_64_hexdigest(os.fspath(output).encode())}")


def _scratch(scratch: str | os.PathLike[str] | None) -> str:
    return os.path.abspath(os.path.expanduser(default_scratch() if scratch is None else scratch))


def _arrived_urls(folder: str, options: Mapping[str, Any], trusted: str) -> UrlFiles:
    """Return the files that were sent to this process, at work."""
    found = UrlFiles(folder, options, trusted)
    found.activate()
    return found


def _activate(folder: str, files: SourceMirror | UrlFiles) -> None:
    global _has_hook  # noqa: PLW0603 -- a hook belongs to the process, for good
    _active[folder] = files
    if not _has_hook:
        sys.addaudithook(_hear)
        atexit.register(_disown_all)
        _has_hook = True


def fetches_files() -> bool:
    """Return whether this process fetches files of a source behind a URL, or of URLs in rows."""
    return bool(_active)


def fill(paths: Iterable[str]) -> None:
    """Fetch files of sources that this process mirrors; other paths do not matter."""
    if _active:
        for path in paths:
            for prefix, mirror in _active.items():
                if path.startswith(prefix):
                    for file in mirror.files_in(path):
                        mirror.fetch(file)


def with_urls(text: str) -> str:
    """Return a text with the URLs of sources that this process mirrors, in place of the paths of their folders."""
    for mirror in _active.values():
        text = mirror.shown(text)
    return text


@contextlib.contextmanager
def urls_in_errors() -> Iterator[None]:
    """Have errors of datamat name files of sources behind URLs as the user knows them."""
    try:
        yield
    except DatamatError as error:
        if _active:
            error.args = tuple(with_urls(arg) if isinstance(arg, str) else arg for arg in error.args)
            for name, value in vars(error).items():
                if isinstance(value, str):
                    setattr(error, name, with_urls(value))
        raise


def _hear(event: str, args: tuple[Any, ...]) -> None:
    # Called for every audit event of the process: the first comparison is what most cost.
    if event != "open" or not _active:
        return
    path = args[0]
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if isinstance(path, str):
        path = os.path.abspath(path)
        for prefix, mirror in _active.items():
            if path.startswith(prefix):
                mirror.fetch(path)


@final
class FetchAhead:
    """Fetches the files of the rows of a part in their order, ahead of their use. For one thread.

    Args:
        rows: paths of the files of each row, and of folders; those that no source of this process fetches do not
            matter.
    """

    def __init__(self, rows: Sequence[Iterable[str]]) -> None:
        self._mirrors: dict[str, SourceMirror | UrlFiles] = {}
        self._rows = [[file for path in row for file in self._files_in(path)] for row in rows]
        self._next = 0
        self._pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "datamat-fetch")
        self._running: dict[str, concurrent.futures.Future[None]] = {}
        self._fetched: collections.OrderedDict[str, int] = collections.OrderedDict()  # and the size of each
        self._arrived: collections.deque[tuple[str, int]] = collections.deque()  # sizes that were guesses before
        self._most_files = AT_ONCE  # until one has arrived, which may be large
        self._held: list[int] = []

    def _files_in(self, path: str) -> list[str]:
        for prefix, mirror in _active.items():
            if path.startswith(prefix):
                files = mirror.files_in(path)
                self._mirrors |= dict.fromkeys(files, mirror)
                return files
        return []

    def __enter__(self) -> FetchAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()
        self._pool.shutdown(cancel_futures=True)
        for path in self._fetched:
            self._mirrors[path].drop(path)
        for mirror in set(self._mirrors.values()):
            mirror.forget()

    def reach(self, first: int, stop: int) -> None:
        """Wait for the files of some rows; those of rows before may go.

        Raises:
            OutputError: an object cannot be read. One that is gone or has changed is left to the row that opens it.
        """
        self._let_go()
        self._begin(first, stop)
        for row in self._rows[first:stop]:
            for path in row:
                running = self._running.pop(path, None)
                with contextlib.suppress(InputError):
                    if running is not None:
                        running.result()
                    if stop - first > 1:
                        self._mirrors[path].fetch(path)
                    elif (held := self._mirrors[path].held(path)) is not None:
                        self._held.append(held)

    def _begin(self, first: int, stop: int) -> None:
        """Begin to fetch what comes next, and drop the oldest where much is here."""
        num_files = num_bytes = 0
        self._next = max(self._next, first)
        self._note_sizes()
        for row in self._rows[first : self._next]:
            num_files += len(row)
            num_bytes += sum(self._fetched.get(path, 0) for path in row)
        while self._next < len(self._rows) and (
            self._next < stop or (num_files < self._most_files and num_bytes < _AHEAD_BYTES)
        ):
            for path in self._rows[self._next]:
                size = self._mirrors[path].lacks(path)
                num_files += 1
                num_bytes += size
                if path not in self._fetched and size:
                    self._running[path] = self._pool.submit(self._fetch, path)
                self._fetched[path] = size
                self._fetched.move_to_end(path)
            self._next += 1
        ahead = {path for row in self._rows[first : self._next] for path in row}
        total = sum(self._fetched.values())
        for path in [*self._fetched] if total > _KEPT_BYTES else ():
            if total > _KEPT_BYTES and path not in ahead:
                total -= self._fetched.pop(path)
                self._mirrors[path].drop(path)

    def _fetch(self, path: str) -> None:
        self._mirrors[path].ahead(path)
        self._arrived.append((path, self._mirrors[path].lacks(path)))

    def _note_sizes(self) -> None:
        while self._arrived:
            path, size = self._arrived.popleft()
            self._most_files = _AHEAD_FILES
            if path in self._fetched:
                self._fetched[path] = size

    def _let_go(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _is_placeholder(path: str) -> bool:
    try:
        return _is_empty(os.lstat(path))
    except OSError:
        return False


def _is_empty(status: os.stat_result) -> bool:
    return not status.st_mode & _READABLE


def _parted(url: str) -> tuple[str, str]:
    """Return the part of a URL before the first folder or name with a wildcard, and the rest."""
    if not glob.has_magic(url.partition("://")[2]) or url.startswith(("http://", "https://")):
        return url.rstrip("/"), ""
    first = min(place for letter in _WILDCARDS if (place := url.find(letter)) >= 0)
    head, _, _ = url[:first].rpartition("/")
    if head.endswith(":/") or "://" not in head:
        raise OptionError(f"source {without_secrets(url)!r} names no folder before its wildcards; name the bucket")
    return head, url[len(head) + 1 :]


def _is_page(root: str, info: Mapping[str, Any]) -> bool:
    """Return whether a web server answers with a page that lists a folder."""
    return info.get("mimetype") == "text/html" and not root.lower().endswith((".html", ".htm"))


def _stamp(identity: str) -> int:
    return _FIRST_NS + xxhash.xxh3_64_intdigest(identity.encode()) % (_SPAN_NS // 1000) * 1000


def _listed(info: Mapping[str, Any]) -> _Entry:
    size = info.get("size")
    return _Entry(-1 if size is None else int(size), _stamp(_identity(info)))


def _identity(info: Mapping[str, Any]) -> str:
    """Return what changes when an object is written: the MD5 of its content in hexadecimal, where the store has it."""
    for name in _IDENTITIES:
        found = info.get(name)
        if name == "content_settings":  # Azure's
            found = found.get("content_md5") if isinstance(found, dict) else getattr(found, "content_md5", None)
            if found:
                return bytes(found).hex()
        elif name == "md5Hash" and found:  # Google's
            return base64.b64decode(found).hex()
        elif found:
            return str(found.timestamp() if hasattr(found, "timestamp") else found).strip('"')
    return str(info.get("size"))


def _each(call: Callable[[str], Any], names: Sequence[str]) -> Iterator[Any]:
    """Return what a function returns for each name, many at once; raise what the first that fails raises."""
    if not names:
        return iter(())
    with concurrent.futures.ThreadPoolExecutor(min(AT_ONCE, len(names))) as pool:
        return iter(list(pool.map(call, names)))


def _arrived(root: UrlPath, folder: pathlib.Path) -> SourceMirror:
    """Return the mirror that was sent to this process, at work."""
    found = SourceMirror(root, "", folder)
    found.activate()
    return found


def mirrored(
    source: Any, options: Mapping[str, Any] | None, scratch: str | os.PathLike[str] | None
) -> SourceMirror | None:
    """Return the mirror of a source behind a URL, laid out now; None for any other source.

    Args:
        source: the source, as the user gave it.
        options: options for fsspec, often credentials.
        scratch: folder below which mirrors lie; None for one below `TMPDIR`.

    Raises:
        OptionError: it is one of fsspec's chains.
        SourceError: it cannot be listed.
    """
    if not isinstance(source, str) or not is_url(source) or source.startswith("file://"):
        return None
    refuse_chain(source)
    head, pattern = _parted(source)
    root = UrlPath(head, options_for(source, options or {}))
    folder = f"source-{xxhash.xxh3_64_hexdigest(place_of(source, root.options).encode())}"
    made = SourceMirror(root, pattern, pathlib.Path(_scratch(scratch), folder))
    made.update()
    return made
