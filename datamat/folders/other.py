"""Folders behind all other URLs that fsspec supports (`https://`, `hf://`, ...).

A path holds its URL and options, but no open resources: each use asks fsspec for the filesystem, which it caches per
process and set of options. So it can be pickled, and keeps working in forked processes.

Transient errors are retried; an interrupted file continues where it ended. Messages never contain secrets: passwords
and queries of URLs, and the texts among the options, are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import secrets
import tempfile
import threading
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, TypeVar, final

from datamat.errors import DatamatError, InputError, MissingDependencyError, OptionError, OutputError
from datamat.folders.base import (
    ASIDE,
    AbsentError,
    ChangedError,
    DeniedError,
    ExistsError,
    Folder,
    Mode,
    Range,
    ReplaceIf,
    Stat,
    checked,
    not_written,
)
from datamat.folders.retries import (
    ATTEMPTS,
    chain_of,
    is_transient,
    reason_of,
    retried,
    status_of,
    wait_before,
)
from datamat.folders.urls import (
    READ_ONLY,
    SENT_ANYWHERE,
    WEB_SCHEMES,
    halves,
    redacted,
    scheme_of,
    without_secrets,
)
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from typing import BinaryIO

_T = TypeVar("_T")

_READ_BYTES = 1 << 20
_REQUEST_BYTES = 16 << 20  # of one request, and so of memory, for files read by ranges
_WAIT_S = 60
_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub"}
# Filesystems of this process. In a forked process fsspec drops the parent's; that would close their connections and
# remove them from the epoll set that both share: the parent would never get its responses.
_KEPT: dict[int, Any] = {}
_PROGRESS_BYTES = 1 << 20  # after this much progress, retries are counted anew


def _with_timeout(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that give up on a web server after a minute of silence, without limiting the total time."""
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=_WAIT_S, sock_read=_WAIT_S)
    kept = {"timeout": timeout, "trace_configs": [_without_headers_elsewhere()], **options.get("client_kwargs", {})}
    return {**options, "client_kwargs": kept}


@functools.cache
def _without_headers_elsewhere() -> Any:
    """Return a hook that drops the user's headers on redirects to other servers: aiohttp itself drops only one."""
    from aiohttp import TraceConfig
    from yarl import URL

    async def drop(_session: Any, _context: Any, redirect: Any) -> None:
        response = redirect.response
        target = URL(response.headers.get("Location") or response.headers.get("URI") or "")
        if response.url.join(target).origin() != response.url.origin():
            for name in [name for name in redirect.headers if name.lower() not in SENT_ANYWHERE]:
                redirect.headers.popall(name, None)

    config = TraceConfig()
    config.on_request_redirect.append(drop)
    return config


_SLOW_AFTER_S, _LEAST_BYTES_PER_S, _ENDLESS_AFTER_S = 60, 1 << 10, 600


def _check_pace(num_bytes: int, elapsed_s: float, *, has_end: bool) -> None:
    """Raise `InputError` if a server drips, or streams endlessly, like radio and cameras: it is never silent.

    Args:
        num_bytes: bytes received so far.
        elapsed_s: time that they took.
        has_end: whether the server has told the size.
    """
    if elapsed_s > _SLOW_AFTER_S and num_bytes < _LEAST_BYTES_PER_S * elapsed_s:
        raise InputError(
            f"comes too slowly: {num_bytes} bytes in {elapsed_s:.0f} s; run again later, or remove the row"
        )
    if elapsed_s > _ENDLESS_AFTER_S and not has_end:
        raise InputError(
            f"is still being sent after {elapsed_s:.0f} s, and the server does not say how long it is, as "
            "with a stream without end; remove the row"
        )


# ---------------------------------------------------------------- paths


@final
@frozen()
class UrlPath:
    """A file or folder behind a URL; `str` returns the URL without user, password and query.

    Attributes:
        url: URL, `SCHEME://PLACE`; names are appended with a slash, before any query.
        options: options for fsspec, often credentials, and therefore not part of the repr.
    """

    url: str = dataclasses.field(repr=False)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __truediv__(self, name: str) -> UrlPath:
        head, query = halves(self.url)
        return UrlPath(f"{head.rstrip('/')}/{name}{'?' if query else ''}{query}", self.options)

    def __str__(self) -> str:
        return without_secrets(self.url)

    def blocks(self, num_bytes: int) -> Generator[bytes, None, None]:
        """Yield the content of the file, a few megabytes at a time; if it is too long, a little more than `num_bytes`.

        Args:
            num_bytes: size of the file if known, else its maximum size.

        Raises:
            MissingDependencyError: the package that reads such URLs is not installed.
            OptionError: fsspec does not support such URLs.
            OutputError: the file is missing, or cannot be read to its end; the filesystem's own error is the cause.
        """
        done = attempt = counted = 0
        while True:
            try:
                for block in self._blocks_from(done, num_bytes):
                    done += len(block)
                    yield block
                return
            except Exception as error:  # noqa: BLE001 -- each filesystem raises what the client below it does
                failed = error
            attempt = attempt + 1 if done - counted < _PROGRESS_BYTES else 1
            counted = done
            if attempt == ATTEMPTS or not is_transient(failed):
                raise self._explained(failed, "cannot be read")
            wait_before(attempt, failed)

    def download(self, file: BinaryIO, max_bytes: int, *, attempts: int = ATTEMPTS) -> Mapping[str, str]:
        """Download a file from a web server to a local one; return the response headers, in lower case.

        Args:
            file: empty file, open for writing.
            max_bytes: maximum size.
            attempts: maximum number of attempts.

        Raises:
            InputError: the file is larger, or arrives too slowly or endlessly.
            Exception: error of the filesystem after the last attempt.
        """

        def attempt() -> Mapping[str, str]:
            file.seek(0)
            file.truncate()
            said: dict[str, str] = {}
            began = time.monotonic()
            with contextlib.closing(self._streamed(0, max_bytes, heard=said)) as blocks:
                for block in blocks:
                    file.write(block)
                    if file.tell() > max_bytes:
                        raise InputError(f"has over {max_bytes} bytes, the maximum that is fetched; remove the row")
                    _check_pace(file.tell(), time.monotonic() - began, has_end="content-length" in said)
            return said

        return retried(attempt, attempts)

    def stat(self) -> Stat | None:
        """Return size and version of the file, 0 bytes if the server does not tell; None for a folder.

        It makes one request, and raises the filesystem's errors. For web servers it is a GET of the first byte: a URL
        signed for GET allows nothing else.
        """
        said: dict[str, Any] = {}
        if self.is_web:
            with contextlib.closing(self._streamed(0, 1, is_range=True, heard=said)) as blocks:
                next(blocks, b"")
            total = str(said.get("content-range", "")).rpartition("/")[2]
            return Stat(int(total if total.isdigit() else said.get("content-length", 0)), _version_of(said))
        filesystem, path = self.filesystem()
        filesystem.invalidate_cache(path)
        said = filesystem.info(path)
        return None if said.get("type") == "directory" else Stat(int(said["size"] or 0), _version_of(said))

    def read_range(self, start: int, stop: int) -> Range:
        """Return some bytes of the file, in one request if the server allows; raise as `blocks` does.

        Only web servers also return the version, by a strong ETag, as in RFC 9110 for ranges.

        Args:
            start: first byte.
            stop: byte after the last one, within the file.
        """
        if stop <= start:
            return Range(b"", "")

        def read() -> Range:
            said: dict[str, Any] = {}
            if self.is_web:
                found = b"".join(self._streamed(start, stop, is_range=True, heard=said))
            else:
                filesystem, path = self.filesystem()
                found = filesystem.cat_file(path, start=start, end=stop)
            if len(found) < stop - start:
                raise ConnectionError(f"the answer ended after {len(found)} of {stop - start} bytes")
            tag = str(said.get("etag", ""))
            return Range(found[: stop - start], "" if tag.startswith("W/") else tag.strip('"'))

        return self.tried(read, "cannot be read")

    def tried(self, call: Callable[[], _T], problem: str) -> _T:
        """Make a call with retries; convert its error to ours."""
        try:
            return retried(call)
        except Exception as error:  # noqa: BLE001 -- each filesystem raises what the client below it does
            failed = error
        raise self._explained(failed, problem)

    @property
    def is_web(self) -> bool:
        """Whether it is on a web server."""
        return scheme_of(self.url) in WEB_SCHEMES

    def _blocks_from(self, start: int, stop: int) -> Generator[bytes, None, None]:
        """Yield the bytes of the file from `start` to `stop`, and perhaps some more."""
        if self.is_web:
            yield from self._streamed(start, stop)
            return
        filesystem, path = self.filesystem()
        filesystem.invalidate_cache(path)  # sizes may have been listed before the file was rewritten
        while start < stop:
            # One byte more than expected shows that there are more.
            behind = start + _REQUEST_BYTES if stop - start > _REQUEST_BYTES else stop + 1
            try:
                block = filesystem.cat_file(path, start=start, end=behind)
            except Exception as error:  # each filesystem raises what the client below it does
                if status_of(error) != 416:
                    raise
                return  # no bytes from there on; some servers also reply this for an empty file
            if block:
                yield block
            if len(block) < behind - start:
                return
            start += len(block)

    def _streamed(
        self, start: int, stop: int, *, is_range: bool = False, heard: dict[str, Any] | None = None
    ) -> Generator[bytes, None, None]:
        """Yield the body of one response of a web server: not every server supports ranges, as fsspec assumes.

        A range is requested; if the server sends the whole file, bytes before the range are dropped. `heard` receives
        the headers, by their names in lower case.
        """
        filesystem, path = self.filesystem()
        headers = {"Accept-Encoding": "identity", **self.options.get("headers", {})}
        if start or is_range:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        # A size, so that fsspec does not request it first.
        with filesystem.open(path, "rb", block_size=0, size=1, headers=headers) as file:
            if heard is not None:
                heard.update((name.lower(), value) for name, value in file.r.headers.items())
            before = 0 if getattr(file.r, "status", 200) == 206 else start
            left = stop - start if is_range else stop
            while left > 0 and (block := file.read(_READ_BYTES)):
                if before >= len(block):
                    before -= len(block)
                else:
                    yield block[before:]
                    left -= (len(block) - before) * is_range
                    before = 0

    def filesystem(self) -> tuple[Any, str]:
        """Return the fsspec filesystem and the path on it.

        Raises:
            MissingDependencyError: the package that reads such URLs is not installed.
            OptionError: fsspec does not support such URLs or these options.
        """
        from fsspec.core import url_to_fs

        try:
            options = _with_timeout(self.options) if self.is_web else self.options
            filesystem, path = url_to_fs(self.url, **options)
        except ImportError as error:
            scheme = scheme_of(self.url)
            package = _PACKAGES.get(scheme, f"fsspec[{scheme}]")
            raise MissingDependencyError(
                f"{self} needs a package that is not installed ({error}); install it with: pip install '{package}'"
            ) from error
        except ValueError as error:
            reason = redacted(str(error), self.url, self.options)
            raise OptionError(f"{self}: {reason}; want a URL and storage_options that fsspec takes") from None
        _KEPT[hash(filesystem)] = filesystem
        return filesystem, path

    def _explained(self, error: Exception, problem: str) -> DatamatError:
        """Convert an error of the filesystem to ours, with itself as the cause: a copy if it contains a secret.

        Do not call this inside an `except` block, whose error would become its context.
        """
        if isinstance(error, DatamatError):
            return error
        reason = redacted(reason_of(error), self.url, self.options)
        said = " ".join(f"{one} {one!r} {one.__context__!r}" for one in chain_of(error))
        hides = redacted(said, self.url, self.options) != said
        explained: OutputError
        if _is_absent(error):
            explained = AbsentError(
                f"{self} {problem}: {reason}; check the address, the network and storage_options, and that the run "
                "that writes there has finished"
            )
        elif status_of(error) in {401, 403} or any(isinstance(one, PermissionError) for one in chain_of(error)):
            explained = DeniedError(
                f"{self} {problem}: {reason}; check the address, and give storage_options, or an environment, whose "
                f"credentials may {'read' if problem == _NOT_READ else 'read and write'} there"
            )
        else:
            explained = OutputError(f"{self} {problem}: {reason}; check the address, the network and storage_options")
        explained.__cause__ = OSError(reason) if hides else error
        return explained


def _is_absent(error: Exception) -> bool:
    """Return True if an error means that there is no such file, rather than that the server is down."""
    if (status := status_of(error)) is not None:
        return status in {404, 410}
    return isinstance(error, FileNotFoundError) and all(
        isinstance(one, (FileNotFoundError, KeyError)) for one in chain_of(error)
    )


# ---------------------------------------------------------------- folders


_NOT_READ, _NOT_WRITTEN = "cannot be read", "cannot be written"
_WHOLE_AT_ONCE = frozenset({"hf", "memory"})
_VERSIONS = ("blob_id", "ETag", "etag")
_SIGNS_OF_CHANGE = ("mtime", "LastModified", "last_modified", "last-modified", "modified", "created", "ino", "size")
_in_memory = threading.RLock()  # held while writing to `memory://`


@final
class FsspecFolder(Folder):
    """A folder behind a URL that fsspec supports.

    If a filesystem may show incomplete files, a file is written under a hidden name and moved. Few filesystems have
    conditions: see `keeps`. On others a condition is checked before the write, which is not atomic, and versions are
    only as fine as the filesystem's clock.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._root = UrlPath(url, options)
        self._scheme = scheme_of(url)
        self.is_private = self._scheme == "memory"
        self.keeps = frozenset({"create", "replace_if"} if self.is_private else ())

    def __str__(self) -> str:
        return str(self._root)

    def place(self, name: str) -> str:
        return str(self._named(name))

    def blocks(self, name: str, max_bytes: int) -> Generator[bytes]:
        return self._file(name).blocks(max_bytes)

    def read_range(self, name: str, start: int, stop: int) -> Range:
        return self._file(name).read_range(start, stop)

    def stat(self, name: str) -> Stat | None:
        file = self._file(name)
        try:
            return file.tried(file.stat, _NOT_READ)
        except AbsentError:
            return None

    def list(self, below: str = "", *, deep: bool = False) -> dict[str, Stat] | None:
        place = self._file(below) if below else self._root
        if place.is_web:
            return None

        def listed() -> dict[str, Stat]:
            filesystem, path = place.filesystem()
            filesystem.invalidate_cache()
            try:
                found = filesystem.find(path, maxdepth=None if deep else 1, detail=True)
            except FileNotFoundError:
                return {}
            top = len(path.rstrip("/")) + 1
            names = {str(one)[top:]: Stat(int(said["size"] or 0), _version_of(said)) for one, said in found.items()}
            return {name: names[name] for name in sorted(names) if name and ASIDE not in name}

        return place.tried(listed, "cannot be listed")

    def linked(self) -> Sequence[str]:
        """Return the sorted names of the files linked from a web server's directory pages, at any depth.

        Raises:
            OutputError: there are no such pages, or they cannot be read.
        """

        def found() -> Sequence[str]:
            filesystem, path = self._root.filesystem()
            filesystem.invalidate_cache()
            top = f"{path.rstrip('/')}/"
            links = [one.removeprefix(top) for one in filesystem.find(path) if one.startswith(top) and one != top]
            return sorted(map(urllib.parse.unquote, links))

        return self._root.tried(found, "cannot be listed")

    def write(self, name: str, content: bytes, mode: Mode = "overwrite") -> str:
        return self._written(name, mode, lambda files, path: files.pipe_file(path, bytes(content)))

    def write_file(self, name: str, path: str | os.PathLike[str], mode: Mode = "overwrite") -> str:
        source = os.fspath(path)
        return self._written(name, mode, lambda files, path: files.put_file(source, path))

    def copy(self, name: str, target: str) -> None:
        source, found = self._writable(name), self.stat(name)
        if found is None:
            raise AbsentError(f"{source} cannot be copied: there is no such file")
        try:
            self._written(target, "overwrite", lambda files, path: files.cp_file(source.filesystem()[1], path))
            return
        except OutputError as error:
            if not isinstance(error.__cause__, NotImplementedError):
                raise
        with tempfile.NamedTemporaryFile() as file:
            for block in self.blocks(name, found.num_bytes):
                file.write(block)
            file.flush()
            self.write_file(target, file.name)

    def delete(self, name: str) -> None:
        file = self._writable(name)

        def delete() -> None:
            filesystem, path = file.filesystem()
            filesystem.rm_file(path)
            filesystem.invalidate_cache()

        with contextlib.suppress(AbsentError):
            file.tried(delete, "cannot be deleted")

    def child(self, name: str) -> FsspecFolder:
        place = self._file(name)
        return FsspecFolder(place.url, place.options)

    def _written(self, name: str, mode: Mode, send: Callable[[Any, str], object]) -> str:
        """Write a file by a function of the filesystem and a path."""
        file = self._writable(name)
        hidden = f"{name.rpartition('/')[0]}/{ASIDE}{secrets.token_hex(8)}".lstrip("/")
        aside = file if self._scheme in _WHOLE_AT_ONCE else self._root / hidden

        def written() -> None:
            filesystem, path = file.filesystem()
            filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            temporary = aside.filesystem()[1]
            send(filesystem, temporary)
            if temporary != path:
                filesystem.mv(temporary, path)

        with _in_memory if self.is_private else contextlib.nullcontext():
            found = self.stat(name) if mode != "overwrite" else None
            if mode == "create" and found is not None:
                raise ExistsError(f"{file} is to be created, but already exists")
            if isinstance(mode, ReplaceIf) and (found is None or found.version != mode.version):
                raise ChangedError(f"{file} has changed meanwhile, so it was not replaced")
            file.tried(written, _NOT_WRITTEN)
            there = self.stat(name)
        return "" if there is None else there.version

    def _writable(self, name: str) -> UrlPath:
        file = self._file(name)
        if self._scheme in READ_ONLY:
            raise not_written(str(self))
        return file

    def _file(self, name: str) -> UrlPath:
        return self._named(checked(name))

    def _named(self, name: str) -> UrlPath:
        return self._root / (urllib.parse.quote(name, safe="/:@!$&'()*+,;=") if self._root.is_web else name)


def _version_of(said: Mapping[str, Any]) -> str:
    """Return a text that changes with the content; without versions, only as reliably as the clock is fine."""
    found = next((str(said[name]) for name in _VERSIONS if said.get(name)), "").strip('"')
    signs = [said.get(name) for name in _SIGNS_OF_CHANGE]
    texts = [str(one.timestamp() if isinstance(one, datetime.datetime) else one) for one in signs if one is not None]
    return found or "-".join(texts)
