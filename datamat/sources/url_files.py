"""Fetches the files behind URLs that rows name, from any host or store; a failed fetch only concerns its row.

These files have no placeholders, and names of their own, in one folder per process. The author of a table chose its
URLs: `url_of_table` says which of them are followed, and `options_for` which secrets are sent along.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import re
import urllib.parse
from typing import TYPE_CHECKING, Any, final

import xxhash

from datamat.directory.files import temporary_folder
from datamat.errors import InputError, MissingDependencyError, OptionError
from datamat.folders import AbsentError, DeniedError, Folder, Stat, checked, open_folder
from datamat.folders.base import each
from datamat.folders.other import UrlPath
from datamat.folders.retries import is_unreachable, reason_of, retried, status_of
from datamat.folders.urls import (
    WEB_SCHEMES,
    is_inline,
    is_url,
    lasting,
    options_for,
    redacted,
    scheme_of,
    url_of_table,
    without_secrets,
)
from datamat.sources.fetching import MOST_BYTES, Fetcher, behind, fetchers, scratch_folder, sent, stamp_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import BinaryIO


LIKELY_BYTES = 1 << 17
"""Assumed size of a file behind the URL of a row, until it is known."""
_SUFFIX = re.compile(r"\.\w{1,8}")
_CONNECT_S, _SILENCE_S = 10, 30  # many hosts in an old table are gone, and must not take minutes each
_PAGES = ("text/html", "application/xhtml+xml")
_PAGE = re.compile(rb"(?is)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(!doctype\s+html|html|head|body|title)\b")


class _OwnFolder:
    """A folder of this process, removed with this object, or by other processes if this one is killed."""

    def __init__(self, below: str) -> None:
        os.makedirs(below, exist_ok=True)
        self.path = temporary_folder(self, below)


@final
class UrlFiles(Fetcher):
    """Fetches the files behind URLs that rows name. A failure only fails its row: other rows need other hosts.

    Args:
        folder: folder that tells these files from others, in which each process has a folder of its own while it runs.
        options: options for fsspec, by scheme or by the beginning of a URL; or those of all stores.
        trusted: URL of the source that the user wrote, whose host gets the headers among them; "" if it is none. Other
            web servers get what is given for them by name.
    """

    def __init__(self, folder: str, options: Mapping[str, Any], trusted: str = "") -> None:
        self.folder = folder
        self._own: dict[int, _OwnFolder] = {}  # by process: a forked process has its own
        self._options = dict(options)
        self._trusted = trusted
        self._urls: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._num_seen = self._seen_bytes = 0  # files that this process has fetched
        self._silent: set[str] = set()  # hosts that have not answered; their further URLs are tried once

    def __reduce__(self) -> tuple[Any, ...]:
        return sent, (UrlFiles, self.folder, self._options, self._trusted)

    def path_of(self, url: str, place: str, problem: str = "") -> str:
        """Return the path at which the file behind a URL will be found in this process.

        Args:
            url: the URL, in full.
            place: what tells it from all others: its row and field.
            problem: why it is not to be fetched, for the error when its row is read; "" if it is.
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
        url = self._urls.get(path)
        if url is None or os.path.exists(path):
            return
        problem = self._refused.get(path) or self._failed.pop(path, "")
        if not problem:
            problem = self._fetched(url, path)
        if problem:
            raise InputError(problem)

    def ahead(self, path: str) -> None:
        """Fetch a file before its row is read; an error is raised when the row opens the file."""
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
                return f"{url!r} is neither a URL nor a file below the source"
            attempts = {"attempts": 1} if host in self._silent else {}
            with open(part, "wb") as file:
                kind = _transfer(url_of_table(url), options, file, **attempts)
            self._silent.discard(host)
            is_page = kind in _PAGES and _begins_as_page(part)  # some servers say that every file is a page
            if is_page and not is_page_by_name(url):
                return (
                    f"{without_secrets(url)} answers with a page ({kind}) instead of a file; remove the row, or "
                    "correct the URL"
                )
            self._num_seen, self._seen_bytes = self._num_seen + 1, self._seen_bytes + os.path.getsize(part)
            os.replace(part, path)
        except Exception as error:
            if _is_of_disk(error) or isinstance(error, (MissingDependencyError, OptionError)):
                raise  # the problem is not this row
            if is_unreachable(error):
                self._silent.add(host)
            return f"{without_secrets(url)} {_problem(error, url, options)}"
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)
        return ""

    def ask(self, url: str) -> tuple[int, int]:
        """Return size and stamp of the file behind a URL, or two zeros if nothing answers for it."""
        with contextlib.suppress(Exception):
            if there := _told(url_of_table(url), self._options_of(url)):
                return there.num_bytes, stamp_of(there.version)
        return 0, 0

    def ask_all(self, urls: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return what `ask` returns for each of many URLs; many are asked at a time."""
        names = list(dict.fromkeys(urls))
        return dict(zip(names, each(self.ask, names), strict=True))

    def _options_of(self, url: str) -> dict[str, Any]:
        is_web = url.lower().startswith(("http://", "https://"))
        options = options_for(url, self._options, self._trusted)
        if not is_web:
            return options
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        options = {**options, "client_kwargs": {"timeout": timeout, **options.get("client_kwargs", {})}}
        # Signatures cover the exact characters.
        return {"encoded": True, **options} if "%" in url and url.isascii() and " " not in url else options

    def drop(self, path: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return True

    def lacks(self, path: str) -> int:
        """Return the bytes of a file; if it is not here yet, a guess: the mean of the files that were fetched."""
        return super().lacks(path) or (self._seen_bytes // self._num_seen if self._seen_bytes else LIKELY_BYTES)

    def is_absent(self, path: str) -> bool:
        return path in self._urls and not os.path.exists(path)

    def files_in(self, path: str) -> list[str]:
        return [path] if path in self._urls else []

    def shown(self, text: str) -> str:
        for path in sorted((path for path in self._urls if path in text), key=len, reverse=True):
            text = text.replace(path, without_secrets(self._urls[path]))
        return text

    def forget(self) -> None:
        for known in (self._urls, self._failed, self._refused):
            known.clear()
        self._own.pop(os.getpid(), None)  # a worker may end without cleaning up


def url_path(folder: str, url: str, place: str, problem: str = "") -> str:
    """Return `UrlFiles.path_of` for the files of a folder, even if they are not yet activated in this process."""
    files = fetchers().get(folder)
    if not isinstance(files, UrlFiles):
        files = UrlFiles(folder, {})
        files.activate()
    return files.path_of(url, place, problem)


def url_folder(output: str | os.PathLike[str], scratch: str | os.PathLike[str] | None) -> str:
    """Return the folder for files behind URLs of rows.

    Args:
        output: output of the run.
        scratch: folder below which it lies; None for one below `TMPDIR`.
    """
    return os.path.join(scratch_folder(scratch), f"urls-{xxhash.xxh3_64_hexdigest(os.fspath(output).encode())}")


def is_path_of_url(paths: Sequence[str]) -> bool:
    """Return True if any of the paths is that of a URL of a row."""
    return any(isinstance(files, UrlFiles) for path in paths for files, _ in behind(path))


def _transfer(url: str, options: Mapping[str, Any], file: BinaryIO, **attempts: int) -> str:
    """Download what is behind a URL of a table to a file; return the content type from a web server, or ""."""
    if scheme_of(url) in WEB_SCHEMES:
        said = UrlPath(url, options).download(file, MOST_BYTES, **attempts)
        return str(said.get("content-type", "")).partition(";")[0].strip().lower()
    if is_inline(url):
        file.write(_inline(url))
        return ""
    folder, name = _in_bucket(url, options)
    with contextlib.closing(folder.blocks(name, MOST_BYTES)) as blocks:
        for block in blocks:
            file.write(block)
            if file.tell() > MOST_BYTES:
                raise InputError(f"has over {MOST_BYTES} bytes, the most that are fetched; remove the row")
    return ""


def _told(url: str, options: Mapping[str, Any]) -> Stat | None:
    """Return what a store or web server says about a file; None if there is no such file."""
    if scheme_of(url) in WEB_SCHEMES:
        return retried(UrlPath(url, options).stat)
    if is_inline(url):
        return Stat(len(url), "")
    folder, name = _in_bucket(url, options)
    return folder.stat(name)


def _in_bucket(url: str, options: Mapping[str, Any]) -> tuple[Folder, str]:
    """Return the bucket of a URL, whose files share connections, and the name in it."""
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
        return is_page(file.read(256))


def is_page(head: bytes) -> bool:
    """Return True if the first bytes of a file are those of a page rather than of other XML."""
    return _PAGE.match(head) is not None


def is_page_by_name(url: str) -> bool:
    """Return True if a URL looks like that of a page."""
    return lasting(url).partition("?")[0].lower().endswith((".html", ".htm"))


def _is_of_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE}


def _problem(error: BaseException, url: str, options: Mapping[str, Any]) -> str:
    """Return what is wrong with a URL and what to do, without its secrets or those of redirects."""
    status = status_of(error)
    if isinstance(error, InputError):
        return redacted(str(error), url, options)
    if isinstance(error, (FileNotFoundError, AbsentError)) or status in {404, 410}:
        return f"does not exist ({status or 404}); remove the row, or correct the URL"
    if isinstance(error, (PermissionError, DeniedError)) or status in {401, 403}:
        return f"may not be read ({status or 403}); sign it again, or give source_options that may read it"
    said = f"the server answers {status}" if status else redacted(reason_of(error), url, options)
    return f"cannot be fetched: {said}; run again later, or remove the row"
