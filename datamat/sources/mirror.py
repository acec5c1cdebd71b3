"""Mirrors sources behind URLs: a local folder that looks like the place, and whose files arrive before they are needed.

    listing ──> a placeholder for each file: its name and size, a time made of its version, no content, no permission
                     │
    tables, lists, `files` of the writer ├── at once, many at a time; they stay
    files that rows declare              ├── before their rows, many at a time (`FetchAhead`); dropped after their part
    all others                           └── never: opening one is an error, which says to declare it

If a writer declares nothing, the whole source is fetched at once, and stays. What is rebuilt is decided as for folders:
by sizes and times, and where these differ, by content. A file whose version changes gets a new time.

A placeholder has a name and a size for code that lists the source, and open(2) refuses it to Python and to C libraries
alike. A dangling link would stop root as well, but `exists()` says it is not there: code that asks before it opens a
file would silently make rows without it. Root reads zeros, except through `read_file`, which refuses files that no one
may read; a worker therefore fails its first part if it saw Python open a placeholder.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shutil
import stat
import tempfile
from typing import TYPE_CHECKING, Any, final

import xxhash

from datamat.errors import InputError, OptionError, OutputError, SourceError, count_of, require_posix
from datamat.folders import AbsentError, DeniedError, Folder, Stat, checked, open_file, open_folder
from datamat.folders.base import each
from datamat.folders.other import FsspecFolder
from datamat.folders.urls import (
    WEB_SCHEMES,
    is_url,
    options_for,
    place_of,
    refuse_braces,
    refuse_chain,
    scheme_of,
    without_secrets,
)
from datamat.parallel.logs import get_logger
from datamat.sources.fetching import MOST_BYTES, Fetcher, fetchers, scratch_folder, sent, stamp_of
from datamat.sources.url_files import is_page, is_page_by_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


_READ_WITH_INDEX = frozenset(
    {".txt", ".csv", ".tsv", ".lst", ".names", ".json", ".jsonl", ".ndjson", ".yaml", ".yml", ".xml", ".parquet",
     ".arrow", ".feather", ".orc", ".sqlite", ".db", ".h5", ".hdf5", ".nc"}
)  # fmt: skip
_PACKED = frozenset({".gz", ".bz2", ".lz4", ".zst", ".xz"})
_READABLE = 0o444
_WITH_CONTENT = 0o644  # NFS refuses an exclusive lock without the permission to write
_WILDCARDS = "*?["
_MOST_NAMED = 5
_HEAD_BYTES = 256  # of a file, enough to show whether it is a page

_logger = get_logger("datamat.source")


@final
class SourceMirror(Fetcher):
    """The local folder of a source behind a URL, shared by processes.

    Args:
        root: the source, or the folder that holds it if it is a single file.
        name: pattern of the files, or the name of the single one; "" for all.
        folder: folder of the mirror.
        kept: names of files and folders that are fetched with the listing and stay; "" for all.
    """

    def __init__(self, root: Folder, name: str, folder: str, kept: Collection[str]) -> None:
        self._root = root
        self._name = name
        self.folder = folder
        self._files = os.path.join(folder, "files", "")
        self._parts = os.path.join(folder, "work")
        self._kept = set(kept)
        self._is_fresh = False

    def __reduce__(self) -> tuple[Any, ...]:
        return sent, (SourceMirror, self._root, self._name, self.folder, sorted(self._kept))

    def __str__(self) -> str:
        return f"{self.root}/{self._name}" if self._name else self.root

    @property
    def root(self) -> str:
        """URL of the folder that the mirror stands for, without secrets."""
        return str(self._root).rstrip("/")

    @property
    def path(self) -> str:
        """What stands for the URL on this machine: a pattern, or the path of a folder or file."""
        return os.path.join(self._files, self._name).rstrip("/")

    def path_of(self, url: str) -> str | None:
        """Return the path of what stands for a URL in the source; None if the source does not contain it."""
        root = f"{self.root}/"
        return os.path.join(self.path, url.removeprefix(root)) if url.startswith(root) else None

    @property
    def _is_several(self) -> bool:
        """Whether the URL is that of a folder, or a pattern."""
        return not self._name or glob.has_magic(self._name)

    # ------------------------------------------------------------ the listing

    def update(self) -> None:
        """Update the folder to what is behind the URL now.

        Raises:
            SourceError: it cannot be listed, it is empty, or the disk has no room for the files that stay.
        """
        require_posix("a source behind a URL")
        listed = self._listed()
        os.makedirs(self._parts, exist_ok=True)
        os.makedirs(self._files, exist_ok=True)
        self._remove_all_but(listed)
        each(self._measure, [name for name, found in listed.items() if found.num_bytes < 0])
        missing = {name: found.num_bytes for name, found in listed.items() if self._lay(name, found)}
        self.activate()
        self._is_fresh = True
        self._fetch_kept({name: size for name, size in missing.items() if self.stays(os.path.join(self._files, name))})

    def renew(self, kept: Iterable[str] = ()) -> None:
        """Update the folder, except the first time after `update`, and keep further files.

        Args:
            kept: their paths; those outside the folder are ignored.
        """
        names = {os.path.relpath(path, self._files) for path in kept if path.startswith(self._files)} - self._kept
        self._kept |= names
        if not self._is_fresh:
            self.update()
        else:
            each(self.fetch, [file for name in names for file in self.files_in(os.path.join(self._files, name))])
        self._is_fresh = False

    def _listed(self) -> dict[str, Stat]:
        """Return the files behind the URL, by name."""
        try:
            found = self._found()
        except OutputError as error:
            raise SourceError(str(error)) from error
        folders = {name[:place] for name in found for place, letter in enumerate(name) if letter == "/"}
        for name in [name for name in folders if name in found and found[name].num_bytes <= 0]:
            del found[name]  # a marker, as the consoles of stores make for folders
        odd = [name for name in sorted(found) if name in folders or not _is_name(name)]
        if odd:
            said = ", ".join(map(repr, odd[:_MOST_NAMED])) + (", ..." if len(odd) > _MOST_NAMED else "")
            _logger.warning(
                "%s of %s left aside, as no file can have such a name: %s; rename what you need", len(odd), self, said
            )
        for name in odd:
            del found[name]
        if not found:
            raise SourceError(f"{self} holds nothing; check the address: want an object or a folder of objects")
        return found

    def _found(self) -> dict[str, Stat]:
        if not self._is_several:
            return self._told([self._name])
        found = self._root.list(deep="/" in self._name or "**" in self._name or not self._name)
        if found is None and isinstance(self._root, FsspecFolder):
            return self._told(self._root.linked())
        if found is None:
            raise OutputError(f"{self} cannot be listed: its server does not say which files it has; give another URL")
        if self._name:
            from fsspec.utils import glob_translate

            is_wanted = re.compile(glob_translate(self._name)).match
            found = {name: there for name, there in found.items() if is_wanted(name)}
        blind = [name for name, there in found.items() if not there.version]
        return {**{name: there for name, there in found.items() if there.version}, **self._told(blind)}

    def _told(self, names: Sequence[str]) -> dict[str, Stat]:
        """Return what the place says about each file that is there; -1 bytes if it does not know the size."""
        found = zip(names, each(self._root.stat, names), strict=True)
        return {name: Stat(there.num_bytes or -1, there.version) for name, there in found if there is not None}

    def _remove_all_but(self, known: Collection[str]) -> None:
        for folder, names, files in os.walk(self._files, topdown=False):
            below = os.path.relpath(folder, self._files)
            for name in files:
                if os.path.normpath(os.path.join(below, name)) not in known:
                    with contextlib.suppress(FileNotFoundError):  # another process lists the source as well
                        os.unlink(os.path.join(folder, name))
            if below != "." and not any(os.path.lexists(os.path.join(folder, name)) for name in (*names, *files)):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def _measure(self, name: str) -> None:
        """Fetch a file whose size the server does not say, such as an export: only its content tells versions apart."""
        too_large = f"has over {MOST_BYTES} bytes, the most that are fetched; download it, and give its path"
        try:
            part, digest = self._download(name, MOST_BYTES, too_large)
        except InputError as error:
            raise SourceError(f"{error}; its server does not say its size, which has to be known") from error
        self._leave(os.path.join(self._files, name), os.path.getsize(part), stamp_of(digest), part)

    def _fetch_kept(self, missing: Mapping[str, int]) -> None:
        """Fetch files that stay; say so first if they are a whole folder, which may be large."""
        if "" in self._kept and self._is_several and not all(map(_is_table, missing)):
            total, free = sum(missing.values()), shutil.disk_usage(self.folder).free
            said = f"{count_of(len(missing), 'file')} of {self}, {total:,} bytes"
            if total > free:
                raise SourceError(
                    f"{said}, do not fit into {self.folder}, which has {free:,} bytes free: set scratch or TMPDIR to "
                    "a larger disk, or declare file_fields in the writer, to fetch files as rows need them"
                )
            _logger.warning(
                "fetching %s, to %s: the writer reads all of it, or does not declare its file_fields", said, self._files
            )
        each(self.fetch, [os.path.join(self._files, name) for name in missing])

    def _lay(self, name: str, found: Stat) -> bool:
        """Make a placeholder for a file unless it or its content is there; return True if the content is missing."""
        if found.num_bytes < 0:
            return False
        path, wanted = os.path.join(self._files, name), (found.num_bytes, stamp_of(found.version))
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if (status.st_size, status.st_mtime_ns) == wanted and stat.S_ISREG(status.st_mode):
                # Files left by killed runs would fill the disk.
                return _is_empty(status) or (not self.stays(path) and self.drop(path))
        self._leave(path, *wanted)
        return True

    def _leave(self, path: str, size: int, stamp: int, part: str = "") -> None:
        """Put a file in place: its content if that is here, otherwise a placeholder."""
        mode = _WITH_CONTENT if part else 0
        descriptor, part = (os.open(part, os.O_WRONLY | os.O_CLOEXEC), part) if part else self._part()
        try:
            os.ftruncate(descriptor, size)
            os.utime(descriptor, ns=(stamp, stamp))
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        _put(part, path)

    def _part(self) -> tuple[int, str]:
        return tempfile.mkstemp(dir=self._parts)

    # ------------------------------------------------------------ content

    def fetch(self, path: str) -> None:
        """Put the content of a file in place of its placeholder; it must be what was listed."""
        try:
            wanted = os.lstat(path)
        except OSError:
            return
        if not stat.S_ISREG(wanted.st_mode) or not _is_empty(wanted):
            return
        name = os.path.relpath(path, self._files)
        changed = "has changed since it was listed; run again when nothing writes there"
        part = self._copied(name, wanted)
        if not part:
            part, digest = self._download(name, wanted.st_size, changed)
            if not self._is_as_listed(name, part, wanted, digest):
                os.unlink(part)
                raise InputError(f"{self._root.place(name)} {changed}")
        self._leave(path, wanted.st_size, wanted.st_mtime_ns, part)

    def _copied(self, name: str, wanted: os.stat_result) -> str:
        """Return a part with the content if a mirror of the place in another scratch folder has it, otherwise ""."""
        for other in fetchers().values():
            if isinstance(other, SourceMirror) and os.path.basename(other.folder) == os.path.basename(self.folder):
                path = os.path.join(other._files, name)
                with contextlib.suppress(OSError):
                    there = os.stat(path)
                    is_same = (there.st_size, there.st_mtime_ns) == (wanted.st_size, wanted.st_mtime_ns)
                    if is_same and not _is_empty(there):
                        descriptor, part = self._part()
                        os.close(descriptor)
                        return shutil.copyfile(path, part)
        return ""

    def _download(self, name: str, max_bytes: int, problem: str) -> tuple[str, str]:
        """Return the path of a part with the content of a file, and its MD5; raise `problem` if it is longer."""
        (descriptor, part), digest = self._part(), hashlib.md5(usedforsecurity=False)
        try:
            with open(descriptor, "wb") as file, contextlib.closing(self._root.blocks(name, max_bytes)) as blocks:
                for block in blocks:
                    file.write(block)
                    digest.update(block)
                    if file.tell() > max_bytes:
                        raise InputError(f"{self._root.place(name)} {problem}")
        except BaseException as error:
            os.unlink(part)
            if isinstance(error, AbsentError):
                raise InputError(f"{self._root.place(name)} has gone since it was listed; run again") from error
            raise
        return part, digest.hexdigest()

    def _is_as_listed(self, name: str, part: str, wanted: os.stat_result, digest: str) -> bool:
        """Return True if a file has the size and the version of its placeholder."""
        if os.path.getsize(part) != wanted.st_size:
            return False

        def is_of(version: str) -> bool:  # through the file system, which may round times
            os.utime(part, ns=(stamp_of(version), stamp_of(version)))
            return os.stat(part).st_mtime_ns == wanted.st_mtime_ns

        if is_of(digest):  # the version is usually an ETag, which is usually the MD5 of the content
            return True
        found = self._root.stat(name)
        return found is not None and is_of(found.version)

    def drop(self, path: str) -> bool:
        import fcntl

        try:
            if _is_empty(os.lstat(path)):
                return True
            if self.stays(path):
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
        import fcntl

        while True:
            self.fetch(path)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError) as error:
                if _is_placeholder(path):  # dropped again just now
                    continue
                place = self._root.place(os.path.relpath(path, self._files))
                raise InputError(f"{place} has gone since it was listed; run again") from error
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)) and not _is_empty(os.fstat(descriptor)):
                    return descriptor
            os.close(descriptor)

    def stays(self, path: str) -> bool:
        name = os.path.relpath(path, self._files)
        is_kept = "" in self._kept or any(f"{name}/".startswith(f"{one}/") for one in self._kept)
        return is_kept or _is_table(name) or self._root.is_private

    def is_absent(self, path: str) -> bool:
        return _is_placeholder(path)

    def shown(self, text: str) -> str:
        return text.replace(self._files, f"{self.root}/").replace(self._files.rstrip(os.sep), self.root)

    def placeholder_in(self, text: str) -> str:
        quoted = re.findall(rf"{re.escape(self._files)}[^'\"\n]*", text)
        plain = re.findall(rf"{re.escape(self._files)}[^\s:,;)]*", text)
        return next(filter(_is_placeholder, [*quoted, *plain]), "")

    def files_in(self, path: str) -> list[str]:
        full = os.path.abspath(path)
        if not full.startswith(self._files):
            return []
        if not os.path.isdir(full):
            return [full]
        return [os.path.join(folder, name) for folder, _, names in os.walk(full) for name in sorted(names)]


def _put(part: str, path: str) -> None:
    """Move a file into place, and make its folder, even if another process removes that as empty."""
    folder = os.path.dirname(path)
    while True:
        try:
            os.makedirs(folder, exist_ok=True)
            os.replace(part, path)
        except (FileNotFoundError, FileExistsError):  # the latter if it is removed while it is made
            if not os.path.exists(part) or os.path.isfile(folder):
                raise
        else:
            return


def _is_name(name: str) -> bool:
    try:
        return checked(name) == name
    except OptionError:
        return False


def _is_table(name: str) -> bool:
    stem, ending = os.path.splitext(name.lower())
    return (os.path.splitext(stem)[1] if ending in _PACKED else ending) in _READ_WITH_INDEX


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
        OptionError: it is a chain of fsspec URLs.
        SourceError: it cannot be listed.
    """
    if not isinstance(source, str) or not is_url(source) or source.startswith("file://"):
        return None  # writers themselves expand braces in paths
    refuse_braces(source)
    refuse_chain(source)
    head, pattern = _parted(source)
    options = options_for(source, options or {})
    folder = f"source-{xxhash.xxh3_64_hexdigest(place_of(head, options).encode())}"
    root, name = (open_folder(head, options), pattern) if pattern else _folder_or_file(head, options)
    made = SourceMirror(root, name, os.path.join(scratch_folder(scratch), folder), kept)
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
                is_file = not is_page(next(blocks, b"")) or is_page_by_name(url)
        else:
            there = parent.stat(name)
            is_file = there is not None and (there.num_bytes > 0 or not folder.list())
    except DeniedError:  # as S3 answers for a missing object, to users who may not list
        is_file = False
    except OutputError as error:
        raise SourceError(str(error)) from error
    return (parent, name) if is_file else (folder, "")
