"""Sources behind URLs: a local folder that looks as the place does, and whose files arrive before they are needed.

    listing ──> a placeholder for each file: its name and size, a time made of its version, no content, no permission
                     │
    tables, lists, `files` of the writer ├── at once, many at a time; they stay
    files that rows declare              ├── before their rows, many at a time (`FetchAhead`); dropped after their part
    all others                           └── never: whoever opens one gets an error, which says to declare it

Of a writer that declares nothing, the whole source is fetched at once, and stays. What is made again is decided as for
folders: by sizes and times, and where these differ, by content. A file whose version changes gets another time.

A placeholder has a name and a size for whoever lists the source, and open(2) refuses it to Python and to C libraries
alike. A link that leads nowhere would stop root as well, but `exists()` denies it: whoever asks before opening a file
would make rows without it, and nobody would know. Root reads zeros, unless by `read_file`, which refuses what nobody
may read; so a worker fails its first part where it saw Python open a placeholder.

Rows of a table may each name a URL of their own, of any host or store (`UrlFiles`). These have no placeholders: a
process fetches those of its part ahead, under names of its own, and one that fails is a matter of its row.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import errno
import glob
import hashlib
import os
import re
import shutil
import stat
import tempfile
import urllib.parse
from typing import TYPE_CHECKING, Any, final

import xxhash

from datamat.directory.files import default_scratch, temporary_folder
from datamat.errors import (
    DatamatError,
    InputError,
    MissingDependencyError,
    OptionError,
    OutputError,
    SourceError,
    count_of,
    described,
    require_posix,
)
from datamat.folders import AbsentError, DeniedError, Folder, Stat, checked, open_file, open_folder
from datamat.folders.other import FsspecFolder, UrlPath
from datamat.folders.retries import is_unreachable, reason_of, status_of
from datamat.folders.urls import (
    WEB_SCHEMES,
    is_inline,
    is_url,
    lasting,
    options_for,
    place_of,
    redacted,
    refuse_chain,
    scheme_of,
    url_of_table,
    without_secrets,
)
from datamat.parallel.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO


__all__ = [
    "AT_ONCE",
    "LIKELY_BYTES",
    "FetchAhead",
    "SourceMirror",
    "UrlFiles",
    "fetched",
    "fetches_files",
    "fill",
    "is_path_of_url",
    "mirrored",
    "remedy",
    "url_folder",
    "url_path",
    "urls_in_errors",
    "with_urls",
]

AT_ONCE = 32
"""Requests that a process makes at once."""
_AHEAD_FILES, _AHEAD_BYTES = 128, 64 << 20  # that are fetched before their rows are read
_KEPT_BYTES = 1 << 30  # of files that rows of a part are done with: others of the part may share them
_READ_WITH_INDEX = frozenset(
    {".txt", ".csv", ".tsv", ".lst", ".names", ".json", ".jsonl", ".ndjson", ".yaml", ".yml", ".xml", ".parquet",
     ".arrow", ".feather", ".orc", ".sqlite", ".db", ".h5", ".hdf5", ".nc"}
)  # fmt: skip
_PACKED = frozenset({".gz", ".bz2", ".lz4", ".zst", ".xz"})
_READABLE = 0o444
_WITH_CONTENT = 0o644  # NFS refuses an exclusive lock to whoever may not write
_WILDCARDS = "*?["
_FIRST_NS, _SPAN_NS = 946_684_800 * 10**9, 10**18  # from 2000 on, for some thirty years: any file system has such times
_HEAD_BYTES = 256  # of a file, which show whether it is a page

_logger = get_logger("datamat.source")
_active: dict[str, SourceMirror | UrlFiles] = {}  # of this process, by folder and a slash


@final
class SourceMirror:
    """The local folder of a source behind a URL. Thread-safe and picklable; processes share the folder.

    Args:
        root: the source, or the folder that it is in where it is a single file.
        name: pattern of the files, or the name of the single one; "" for all.
        folder: folder of the mirror.
        kept: names of files and folders that are fetched with the listing and stay; "" for all.
    """

    def __init__(self, root: Folder, name: str, folder: str, kept: Collection[str]) -> None:
        self._root = root
        self._name = name
        self._folder = folder
        self._files = os.path.join(folder, "files", "")
        self._parts = os.path.join(folder, "work")
        self._kept = set(kept)
        self._is_fresh = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (SourceMirror, self._root, self._name, self._folder, sorted(self._kept))

    def __str__(self) -> str:
        return f"{self.root}/{self._name}" if self._name else self.root

    @property
    def root(self) -> str:
        """URL of the folder that the mirror stands for, without secrets."""
        return str(self._root).rstrip("/")

    @property
    def path(self) -> str:
        """What stands for the URL on this machine: the path of a folder or file, or a pattern."""
        return os.path.join(self._files, self._name).rstrip("/")

    @property
    def _is_several(self) -> bool:
        """Whether the URL is that of a folder, or a pattern."""
        return not self._name or glob.has_magic(self._name)

    # ------------------------------------------------------------ the listing

    def update(self) -> None:
        """Bring the folder in line with what is behind the URL now.

        Raises:
            SourceError: it cannot be listed, or there is nothing, or the disk has no room for what stays.
        """
        require_posix("a source behind a URL")
        listed = self._listed()
        os.makedirs(self._parts, exist_ok=True)
        os.makedirs(self._files, exist_ok=True)
        self._remove_all_but(listed)
        _each(self._measure, [name for name, found in listed.items() if found.num_bytes < 0])
        missing = {name: found.num_bytes for name, found in listed.items() if self._lay(name, found)}
        self.activate()
        self._is_fresh = True
        self._fetch_kept({name: size for name, size in missing.items() if self._stays(name)})

    def renew(self, kept: Iterable[str] = ()) -> None:
        """Bring the folder in line, but for the first time after `update`; have further files stay.

        Args:
            kept: their paths; whatever is not in the folder does not matter.
        """
        names = {os.path.relpath(path, self._files) for path in kept if path.startswith(self._files)} - self._kept
        self._kept |= names
        if not self._is_fresh:
            self.update()
        else:
            _each(self.fetch, [file for name in names for file in self.files_in(os.path.join(self._files, name))])
        self._is_fresh = False

    def activate(self) -> None:
        """Have this process fetch files of the folder from now on."""
        _active[self._files] = self

    def _listed(self) -> dict[str, Stat]:
        """Return the files behind the URL, by name."""
        try:
            found = self._found()
        except OutputError as error:
            raise SourceError(str(error)) from error
        folders = {name[:place] for name in found for place, letter in enumerate(name) if letter == "/"}
        for name in [name for name in folders if name in found and found[name].num_bytes <= 0]:
            del found[name]  # a marker: consoles of stores make such for folders
        if not found:
            raise SourceError(f"{self} holds nothing; check the address: want a folder of objects, or an object")
        for name in found:
            if any(part in {"", ".", ".."} for part in name.split("/")) or "\0" in name or name in folders:
                raise SourceError(f"{self} holds {name!r}, which cannot be the name of a file; rename it or remove it")
        return found

    def _found(self) -> dict[str, Stat]:
        if not self._is_several:
            return self._told([self._name])
        found = self._root.list(deep="/" in self._name or "**" in self._name or not self._name)
        if found is None and isinstance(self._root, FsspecFolder):
            return self._told(self._root.linked())
        if found is None:
            raise OutputError(f"{self} cannot be listed: its place does not tell which files it has; give another URL")
        if self._name:
            from fsspec.utils import glob_translate

            is_wanted = re.compile(glob_translate(self._name)).match
            found = {name: there for name, there in found.items() if is_wanted(name)}
        blind = [name for name, there in found.items() if not there.version]
        return {**{name: there for name, there in found.items() if there.version}, **self._told(blind)}

    def _told(self, names: Sequence[str]) -> dict[str, Stat]:
        """Return what the place says of each file that is there; -1 bytes where it may not know the size."""
        found = zip(names, _each(self._root.stat, names), strict=True)
        return {name: Stat(there.num_bytes or -1, there.version) for name, there in found if there is not None}

    def _remove_all_but(self, known: Collection[str]) -> None:
        for folder, names, files in os.walk(self._files, topdown=False):
            below = os.path.relpath(folder, self._files)
            for name in files:
                if os.path.normpath(os.path.join(below, name)) not in known:
                    with contextlib.suppress(FileNotFoundError):  # another process lists the source, too
                        os.unlink(os.path.join(folder, name))
            if below != "." and not any(os.path.lexists(os.path.join(folder, name)) for name in (*names, *files)):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def _measure(self, name: str) -> None:
        """Fetch a file whose size no server says, as of exports: only its content tells its versions apart."""
        try:
            part, digest = self._download(
                name,
                _MOST_BYTES,
                f"has over {_MOST_BYTES} bytes, the most that are fetched; download it, and give its path",
            )
        except InputError as error:
            raise SourceError(f"{error}; its server does not say its size, which has to be known") from error
        self._leave(os.path.join(self._files, name), os.path.getsize(part), _stamp(digest), part)

    def _stays(self, name: str) -> bool:
        """Return whether a file is fetched with the listing, and stays."""
        is_kept = "" in self._kept or any(f"{name}/".startswith(f"{one}/") for one in self._kept)
        return is_kept or _is_table(name) or self._root.is_private

    def _fetch_kept(self, missing: Mapping[str, int]) -> None:
        """Fetch files that stay; say so first where that is all of a folder, which may be large."""
        if "" in self._kept and self._is_several and not all(map(_is_table, missing)):
            total, free = sum(missing.values()), shutil.disk_usage(self._folder).free
            said = f"{count_of(len(missing), 'file')} of {self}, {total:,} bytes"
            if total > free:
                raise SourceError(
                    f"{said}, do not fit into {self._folder}, which has {free:,} bytes free: set scratch or TMPDIR to "
                    "a larger disk, or declare file_fields in the writer, to fetch files as rows need them"
                )
            _logger.warning(
                "fetching %s, to %s: the writer reads all of it, or does not declare its file_fields", said, self._files
            )
        _each(self.fetch, [os.path.join(self._files, name) for name in missing])

    def _lay(self, name: str, found: Stat) -> bool:
        """Lay a placeholder for a file, unless it or its content is there; return whether content is missing."""
        if found.num_bytes < 0:
            return False
        path, wanted = os.path.join(self._files, name), (found.num_bytes, _stamp(found.version))
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if (status.st_size, status.st_mtime_ns) == wanted and stat.S_ISREG(status.st_mode):
                # What a run that was killed has left would fill the disk.
                return _is_empty(status) or (not self._stays(name) and self.drop(path))
        self._leave(path, *wanted)
        return True

    def _leave(self, path: str, size: int, stamp: int, part: str = "") -> None:
        """Put a file in place: its content where that is here, or else a placeholder."""
        mode = _WITH_CONTENT if part else 0
        part = part or self._part()
        with open(part, "r+b") as file:
            file.truncate(size)
            os.utime(file.fileno(), ns=(stamp, stamp))
            os.fchmod(file.fileno(), mode)
        _put(part, path)

    def _part(self) -> str:
        descriptor, part = tempfile.mkstemp(dir=self._parts)
        os.close(descriptor)
        return part

    # ------------------------------------------------------------ content

    def fetch(self, path: str) -> None:
        """Put the content of a file in place of its placeholder.

        Args:
            path: path of a file below the folder; whatever else it is, nothing happens.

        Raises:
            InputError: the file is gone, or has changed since it was listed.
            OutputError: it cannot be read.
        """
        try:
            wanted = os.lstat(path)
        except OSError:
            return
        if not stat.S_ISREG(wanted.st_mode) or not _is_empty(wanted):
            return
        name, changed = (
            os.path.relpath(path, self._files),
            "has changed since it was listed; run again, when nothing writes there",
        )
        part = self._copied(name, wanted)
        if not part:
            part, digest = self._download(name, wanted.st_size, changed)
            if not self._is_as_listed(name, part, wanted, digest):
                os.unlink(part)
                raise InputError(f"{self._root.place(name)} {changed}")
        self._leave(path, wanted.st_size, wanted.st_mtime_ns, part)

    def _copied(self, name: str, wanted: os.stat_result) -> str:
        """Return a part with content that another mirror of the place has, in another scratch folder; "" for none."""
        for other in [*_active.values()]:
            if isinstance(other, SourceMirror) and os.path.basename(other._folder) == os.path.basename(self._folder):
                path = os.path.join(other._files, name)
                with contextlib.suppress(OSError):
                    there = os.stat(path)
                    is_same = (there.st_size, there.st_mtime_ns) == (wanted.st_size, wanted.st_mtime_ns)
                    if is_same and not _is_empty(there):
                        return shutil.copyfile(path, self._part())
        return ""

    def _download(self, name: str, max_bytes: int, problem: str) -> tuple[str, str]:
        """Return the path of a part with the content of a file, and its MD5; raise `problem` where it is longer."""
        part, digest = self._part(), hashlib.md5(usedforsecurity=False)
        try:
            with open(part, "wb") as file, contextlib.closing(self._root.blocks(name, max_bytes)) as blocks:
                for block in blocks:
                    file.write(block)
                    digest.update(block)
                    if file.tell() > max_bytes:
                        raise InputError(f"{self._root.place(name)} {problem}")
        except BaseException as error:
            os.unlink(part)
            if isinstance(error, AbsentError):
                raise InputError(f"{self._root.place(name)} is gone since it was listed; run again") from error
            raise
        return part, digest.hexdigest()

    def _is_as_listed(self, name: str, part: str, wanted: os.stat_result, digest: str) -> bool:
        """Return whether a file has the size and the version of its placeholder."""
        if os.path.getsize(part) != wanted.st_size:
            return False

        def is_of(version: str) -> bool:  # by way of the file system, which may round times
            os.utime(part, ns=(_stamp(version), _stamp(version)))
            return os.stat(part).st_mtime_ns == wanted.st_mtime_ns

        if is_of(digest):  # the version is most often an ETag, and that the MD5 of the content
            return True
        found = self._root.stat(name)
        return found is not None and is_of(found.version)

    def drop(self, path: str) -> bool:
        """Put a placeholder in place of a file that does not stay; return whether it is one now.

        Files that a process has `held` are left as they are.
        """
        import fcntl

        try:
            if _is_empty(os.lstat(path)):
                return True
            if self._stays(os.path.relpath(path, self._files)):
                return False
            with open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(file.fileno())
                if not _is_empty(status):
                    self._leave(path, status.st_size, status.st_mtime_ns)
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
                place = self._root.place(os.path.relpath(path, self._files))
                raise InputError(f"{place} is gone since it was listed; run again") from error
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)) and not _is_empty(os.fstat(descriptor)):
                    return descriptor
            os.close(descriptor)

    def lacks(self, path: str) -> int:
        """Return the bytes that a file will take where it is not there yet, or takes already."""
        return _size(path)

    def is_absent(self, path: str) -> bool:
        """Return whether a file has to be fetched."""
        return _is_placeholder(path)

    def ahead(self, path: str) -> None:
        """Fetch a file before its row is read; raises as `fetch`."""
        self.fetch(path)

    def shown(self, text: str) -> str:
        """Return a text with the URL in place of the path of the folder."""
        return text.replace(self._files, f"{self.root}/").replace(self._files.rstrip(os.sep), self.root)

    def placeholder_in(self, text: str) -> str:
        """Return the path of the first placeholder that a text names; "" for none."""
        found = re.findall(rf"(?=({re.escape(self._files)}[^'\"\n]*))", text)
        return next(
            filter(_is_placeholder, (one for path in found for one in (path, re.split(r"[\s:,;)]", path)[0]))), ""
        )

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


class _OwnFolder:
    """A folder of this process, which is removed with this object, or by others when the process is killed."""

    def __init__(self, below: str) -> None:
        os.makedirs(below, exist_ok=True)
        self.path = temporary_folder(self, below)


@final
class UrlFiles:
    """The files behind the URLs that rows name, each fetched when its row is read. Thread-safe and picklable.

    A file that cannot be fetched is an `InputError` of whoever opens it: other rows need other hosts.

    Args:
        folder: what tells them from others, in the folder in which each process has one of its own, that goes with it.
        options: options for fsspec, by scheme or by the beginning of a URL; or those of all stores.
        trusted: URL of the source that the user wrote, whose host gets the headers among them; "" if it is none. Other
            web servers get what is given for them by name.
    """

    def __init__(self, folder: str, options: Mapping[str, Any], trusted: str = "") -> None:
        self.folder = folder
        self._own: dict[int, _OwnFolder] = {}  # by process: one that is forked has its own
        self._options = dict(options)
        self._trusted = trusted
        self._urls: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._num_seen = self._seen_bytes = 0  # files that this process has fetched
        self._silent: set[str] = set()  # hosts that have not answered; each further URL of one is asked for once

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (UrlFiles, self.folder, self._options, self._trusted)

    def activate(self) -> None:
        """Have this process fetch files from now on."""
        _active[self.folder] = self

    def path_of(self, url: str, place: str, problem: str = "") -> str:
        """Return the path at which the file behind a URL will be found in this process.

        Args:
            url: the URL, in full.
            place: what tells it from all others: row and field.
            problem: why it is not to be fetched, said when its row is read; "" where it is.
        """
        suffix = os.path.splitext(lasting(url).partition("?")[0])[1]
        name = f"{place}{suffix if _SUFFIX.fullmatch(suffix) else ''}"
        path = os.path.join(self._own_folder(), name)
        self._urls[path] = url
        if problem:
            self._refused[path] = problem
        return path

    def _own_folder(self) -> str:
        if os.getpid() not in self._own:
            self._own = {os.getpid(): _OwnFolder(os.path.dirname(self.folder))}
        return self._own[os.getpid()].path

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
                kind = _transfer(url_of_table(url), options, file, **attempts)
            self._silent.discard(host)
            is_page = kind in _PAGES and _begins_as_page(part)  # some servers call every file a page
            if is_page and not _is_page_by_name(url):
                return (
                    f"{without_secrets(url)} answers with a page ({kind}) in place of a file; remove the row, or "
                    "correct the URL"
                )
            self._num_seen, self._seen_bytes = self._num_seen + 1, self._seen_bytes + os.path.getsize(part)
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
            if there := _told(url_of_table(url), self._options_of(url)):
                return there.num_bytes, _stamp(there.version)
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

    def is_absent(self, path: str) -> bool:
        """Return whether a file has to be fetched."""
        return path in self._urls and not os.path.exists(path)

    def placeholder_in(self, text: str) -> str:
        """Return "": there are none."""
        del text
        return ""

    def files_in(self, path: str) -> list[str]:
        """Return the path where it is that of a URL."""
        return [path] if path in self._urls else []

    def shown(self, text: str) -> str:
        """Return a text with URLs in place of their paths."""
        for path in sorted((path for path in self._urls if path in text), key=len, reverse=True):
            text = text.replace(path, without_secrets(self._urls[path]))
        return text

    def forget(self) -> None:
        """Forget the files of a part, and remove the folder of this process: it may end without a word."""
        for known in (self._urls, self._failed, self._refused):
            known.clear()
        self._own.pop(os.getpid(), None)


def _transfer(url: str, options: Mapping[str, Any], file: BinaryIO, **attempts: int) -> str:
    """Write what is behind a URL of a table to a file; return the type that a web server says it has, or ""."""
    if scheme_of(url) in WEB_SCHEMES:
        said = UrlPath(url, options).download(file, _MOST_BYTES, **attempts)
        return str(said.get("content-type", "")).partition(";")[0].strip().lower()
    if is_inline(url):
        file.write(_inline(url))
        return ""
    folder, name = _in_bucket(url, options)
    with contextlib.closing(folder.blocks(name, _MOST_BYTES)) as blocks:
        for block in blocks:
            file.write(block)
            if file.tell() > _MOST_BYTES:
                raise InputError(f"has over {_MOST_BYTES} bytes, the most that are fetched; remove the row")
    return ""


def _told(url: str, options: Mapping[str, Any]) -> Stat | None:
    """Return what a store or web server says of a file; None where there is none."""
    if scheme_of(url) in WEB_SCHEMES:
        return UrlPath(url, options).stat()
    if is_inline(url):
        return Stat(len(url), "")
    folder, name = _in_bucket(url, options)
    return folder.stat(name)


def _in_bucket(url: str, options: Mapping[str, Any]) -> tuple[Folder, str]:
    """Return the bucket of a URL, whose connections all of its files share, and the name in it."""
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    try:
        checked(name)
    except OptionError as error:
        raise InputError(str(error)) from error
    return open_folder(f"{scheme}://{bucket}", options), name


def _inline(url: str) -> bytes:
    head, _, content = url.partition(",")
    found = urllib.parse.unquote_to_bytes(content)
    return base64.b64decode(found) if head.endswith(";base64") else found


def _begins_as_page(path: str) -> bool:
    with open(path, "rb") as file:
        return _is_page(file.read(_HEAD_BYTES))


def _is_page(head: bytes) -> bool:
    return head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<")


def _is_page_by_name(url: str) -> bool:
    return lasting(url).partition("?")[0].lower().endswith((".html", ".htm"))


def _is_of_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE}


def _problem(error: BaseException, url: str, options: Mapping[str, Any]) -> str:
    """Return what is wrong with a URL, and what to do, without its secrets and those of where it leads."""
    status, _ = status_of(error)
    if isinstance(error, InputError):
        return redacted(str(error), url, options)
    if isinstance(error, (FileNotFoundError, AbsentError)) or status in {404, 410}:
        return f"is not there ({status or 404}); remove the row, or correct the URL"
    if isinstance(error, (PermissionError, DeniedError)) or status in {401, 403}:
        return f"may not be read ({status or 403}); sign it anew, or give source_options that may read it"
    said = f"the server answers {status}" if status else redacted(reason_of(error), url, options)
    return f"cannot be fetched: {said}; run again later, or remove the row"


def is_path_of_url(paths: Sequence[str]) -> bool:
    """Return whether one of some paths is that of a URL of a row."""
    return any(isinstance(files, UrlFiles) for path in paths for files, _ in _behind(path))


def _behind(path: str) -> Iterator[tuple[SourceMirror | UrlFiles, str]]:
    """Yield the files that a path stands for and that this process fetches, each with what fetches it."""
    for mirror in [*_active.values()]:
        yield from ((mirror, file) for file in mirror.files_in(path))


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


def fetches_files() -> bool:
    """Return whether this process fetches files of a source behind a URL, or of URLs in rows."""
    return bool(_active)


def fill(paths: Iterable[str]) -> None:
    """Fetch files of sources that this process mirrors; other paths do not matter."""
    for path in paths if _active else ():
        for mirror, file in _behind(path):
            mirror.fetch(file)


@contextlib.contextmanager
def fetched(paths: Iterable[str]) -> Iterator[None]:
    """Have files of sources here within the block; those that are fetched for it go."""
    new = [(mirror, file) for path in paths for mirror, file in _behind(path) if mirror.is_absent(file)]
    try:
        for mirror, file in new:
            mirror.fetch(file)
        yield
    finally:
        for mirror, file in new:
            mirror.drop(file)


def with_urls(text: str) -> str:
    """Return a text with the URLs of sources that this process mirrors, in place of the paths of their folders."""
    for mirror in [*_active.values()]:
        text = mirror.shown(text)
    return text


def remedy(text: str) -> str:
    """Return what to do where a text names a file that nothing has fetched, as it is not declared; "" for others."""
    path = next(filter(None, (mirror.placeholder_in(text) for mirror in [*_active.values()])), "")
    return path and (
        f"{with_urls(path)} was not fetched, because no row declares it: name its field in file_fields, or the file in "
        "IndexRow(files=...), or in the writer's files if every sample depends on it"
    )


@contextlib.contextmanager
def urls_in_errors() -> Iterator[None]:
    """Have errors name files of sources behind URLs as the user knows them, and say which have to be declared."""
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
    """Fetches the files of the rows of a part in their order, ahead of their use. For one thread.

    Args:
        rows: paths of the files of each row, and of folders; those that no source of this process fetches do not
            matter.
    """

    def __init__(self, rows: Sequence[Iterable[str]]) -> None:
        self._rows = [[one for path in row for one in _behind(path)] for row in rows]
        self._pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "datamat-fetch")
        self._running: dict[str, concurrent.futures.Future[None]] = {}
        self._first = self._next = 0  # the row at work, and the first that nothing was fetched of
        self._done: dict[str, int] = {}  # size of each file that rows are done with, oldest first
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

    def reach(self, number: int) -> None:
        """Wait for the files of a row, which stay until the next is reached; those of rows before may go.

        Raises:
            OutputError: a file cannot be read. One that is gone or has changed is left to the row that opens it.
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
        """Begin to fetch what comes next, and drop the oldest where much is here."""
        most_files = _AHEAD_FILES if self._next else AT_ONCE  # until one has arrived, which may be large
        done, self._first = self._rows[self._first : number], number
        ahead = [one for row in self._rows[number : self._next] for one in row]
        num_files, num_bytes = len(ahead), sum(mirror.lacks(path) for mirror, path in ahead)
        while self._next < len(self._rows) and (
            self._next <= number or (num_files < most_files and num_bytes < _AHEAD_BYTES)
        ):
            for mirror, path in self._rows[self._next]:
                if mirror.is_absent(path) and path not in self._running:
                    self._running[path] = self._pool.submit(mirror.ahead, path)
                num_files += 1
                num_bytes += mirror.lacks(path)
                self._done.pop(path, None)
            self._next += 1
        needed = {path for row in self._rows[number : self._next] for _, path in row}
        self._done |= {path: mirror.lacks(path) for row in done for mirror, path in row if path not in needed}
        total = sum(self._done.values())
        while total > _KEPT_BYTES:
            path = next(iter(self._done))
            total -= self._done.pop(path)
            for mirror, file in _behind(path):
                mirror.drop(file)

    def _let_go(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()


def _is_table(name: str) -> bool:
    stem, ending = os.path.splitext(name.lower())
    return (os.path.splitext(stem)[1] if ending in _PACKED else ending) in _READ_WITH_INDEX


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


def _stamp(version: str) -> int:
    return _FIRST_NS + xxhash.xxh3_64_intdigest(version.strip('"').encode()) % (_SPAN_NS // 1000) * 1000


def _each(call: Callable[[str], Any], names: Sequence[str]) -> Iterator[Any]:
    """Return what a function returns for each name, many at once; raise what the first that fails raises."""
    if not names:
        return iter(())
    with concurrent.futures.ThreadPoolExecutor(min(AT_ONCE, len(names))) as pool:
        return iter(list(pool.map(call, names)))


def _arrived(kind: type[Any], *args: Any) -> Any:
    """Return a mirror, or files, that were sent to this process, at work."""
    found = kind(*args)
    found.activate()
    return found


def mirrored(
    source: Any,
    options: Mapping[str, Any] | None,
    scratch: str | os.PathLike[str] | None,
    kept: Collection[str] = (),
) -> SourceMirror | None:
    """Return the mirror of a source behind a URL, laid out now; None for any other source.

    Args:
        source: the source, as the user gave it.
        options: options for its place, often credentials.
        scratch: folder below which mirrors lie; None for one below `TMPDIR`.
        kept: names of files and folders that are fetched with the listing and stay; "" for all.

    Raises:
        OptionError: it is one of fsspec's chains.
        SourceError: it cannot be listed.
    """
    if not isinstance(source, str) or not is_url(source) or source.startswith("file://"):
        return None
    refuse_chain(source)
    head, pattern = _parted(source)
    options = options_for(source, options or {})
    folder = f"source-{xxhash.xxh3_64_hexdigest(place_of(head, options).encode())}"
    root, name = (open_folder(head, options), pattern) if pattern else _folder_or_file(head, options)
    made = SourceMirror(root, name, os.path.join(_scratch(scratch), folder), kept)
    made.update()
    return made


def _folder_or_file(url: str, options: Mapping[str, Any]) -> tuple[Folder, str]:
    """Return the folder that a URL names, and ""; of the URL of a file, the folder that it is in, and its name."""
    folder = open_folder(url, options)
    if "/" not in url.partition("://")[2]:
        return folder, ""
    parent, name = open_file(url, options)
    try:
        if scheme_of(url) in WEB_SCHEMES:
            with contextlib.closing(parent.blocks(name, _HEAD_BYTES)) as blocks:
                is_file = not _is_page(next(blocks, b"")) or _is_page_by_name(url)
        else:
            there = parent.stat(name)
            is_file = there is not None and (there.num_bytes > 0 or not folder.list())
    except DeniedError:  # as S3 answers for what is not there, to whoever may not list
        is_file = False
    except OutputError as error:
        raise SourceError(str(error)) from error
    return (parent, name) if is_file else (folder, "")
