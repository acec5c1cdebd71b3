"""Reads files behind the URLs that fsspec knows (`s3://`, `gs://`, `https://`, ...): whole, or some of their bytes.

A path holds its URL and options, and nothing that is open: each use asks fsspec for the filesystem, which it caches per
process and set of options. So a path can be pickled, and keeps working in forked processes.

What a server may soon do right is tried again, after waits that grow: errors of the server (5xx), its request to slow
down (429, 503), silence, and connections that it cut; a cut file continues where it ended. Messages never hold what
opens the door: passwords and queries of URLs, and the texts among the options, are left out of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import random
import re
import shutil
import socket
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, TypeVar, final

from datamat.directory.files import expand_home, temporary_folder
from datamat.errors import (
    CorruptDataError,
    DatamatError,
    InputError,
    MissingDependencyError,
    OptionError,
    OutputError,
)
from datamat.options import check_mappings
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
    from typing import BinaryIO


__all__ = [
    "AbsentError",
    "DeniedError",
    "FetchedFolder",
    "RemotePath",
    "chain_of",
    "is_transient",
    "is_unreachable",
    "is_url",
    "lasting",
    "location",
    "open_filesystem",
    "options_for",
    "place_of",
    "reason_of",
    "redacted",
    "retried",
    "status_of",
    "without_secrets",
]

_T = TypeVar("_T")

_URL = re.compile(r"[A-Za-z][\w+.-]+(://|::)|(?i:data):[\w/+.-]*[;,]")  # at least two letters: one is a Windows drive
_READ_BYTES = 1 << 20
_REQUEST_BYTES = 16 << 20  # of one request, and so of memory, where files are read by ranges
_WAIT_S = 60
_HTTP = ("http", "https")
_S3 = ("s3", "s3a")
_PACKAGES = {
    "s3": "datamat[s3]",
    "s3a": "datamat[s3]",
    "gs": "datamat[gs]",
    "gcs": "datamat[gs]",
    "http": "aiohttp",
    "https": "aiohttp",
    "az": "datamat[az]",
    "abfs": "datamat[az]",
    "abfss": "datamat[az]",
    "hf": "huggingface_hub",
}
# Filesystems of this process. In a forked process fsspec drops the parent's; that would close their connections and so
# remove them from the epoll set that the two share: the parent would wait for answers in vain.
_KEPT: dict[int, Any] = {}


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL for fsspec.

    Args:
        path: path or URL.

    Example:
        >>> is_url("s3://bucket/camvid"), is_url("out/camvid"), is_url("C:/camvid")
        (True, False, False)
    """
    return _URL.match(os.fspath(path)) is not None


def location(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> pathlib.Path | RemotePath:
    """Return the place that a user names: an absolute path, or a URL with its options.

    Args:
        path: path or URL; `file://` stands before a path. In a path, `~` is the home folder.
        storage_options: options for fsspec, which only a URL takes.

    Raises:
        OptionError: there are options for a path, or the URL is a chain of filesystems.
    """
    text = os.fspath(path)
    check_mappings(storage_options=storage_options)
    if is_url(text) and not text.startswith("file://"):
        return RemotePath(text, dict(storage_options or {}))
    if storage_options is not None:
        raise OptionError(f"storage_options are for URLs, and {text} is a path; leave them out")
    return pathlib.Path(os.path.abspath(expand_home(text.removeprefix("file://"))))


_CONNECTIONS = 64  # eight shards and their offsets, the files of a row, thirty-two ahead of the rows, uploads, ...


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the filesystem of fsspec that a URL is on, and its path there.

    Args:
        url: URL, `SCHEME://PLACE`.
        options: options for fsspec, often credentials.

    Raises:
        MissingDependencyError: the package that reads such URLs is not installed.
        OptionError: fsspec knows no such URLs, or not these options.
    """
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0].lower()
    try:
        if scheme in _HTTP:
            options = _with_timeout(options)
        elif scheme in _S3:
            options = _with_config(options)
        filesystem, path = url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(scheme, f"fsspec[{scheme}]")
        raise MissingDependencyError(
            f"{without_secrets(url)} needs a package that is not installed ({error}); install it with: "
            f"pip install '{package}'"
        ) from error
    except ValueError as error:
        reason = redacted(str(error), url, options)
        raise OptionError(
            f"{without_secrets(url)}: {reason}; want a URL and storage_options that fsspec takes"
        ) from None
    _KEPT[hash(filesystem)] = filesystem
    return filesystem, path


def _with_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for S3 that have each request made once, and more of them at a time than ten.

    Where we repeat a request, too, both would wait for minutes.
    """
    config = {"retries": {"total_max_attempts": 1}, "max_pool_connections": _CONNECTIONS}
    return {**options, "config_kwargs": {**config, **(options.get("config_kwargs") or {})}}


def options_for(url: str, options: Mapping[str, Any], trusted: str | None = None) -> dict[str, Any]:
    """Return the options for a URL, where they may be given by place: `{"s3": {...}, "https://data.example": {...}}`.

    Args:
        url: URL, `SCHEME://PLACE`.
        options: options for fsspec, or such options by scheme, or by the beginning of a URL: the longest that fits
            counts.
        trusted: a URL that the user wrote, if this one comes from somebody's table. What may be a secret is then only
            for web servers that are named: the host of that URL, or one among the options. None trusts all.
    """
    from fsspec import available_protocols

    by_place = bool(options) and all("://" in key or key in available_protocols() for key in options)
    if by_place:
        fitting = [key for key in options if "://" in key and _begins_with(url, key)]
        if fitting:
            return dict(options[max(fitting, key=len)])
    scheme = url.partition("://")[0].lower()
    found = dict(options.get(scheme, {}) if by_place else options)
    if scheme not in _HTTP or trusted is None or _origin_of(url) == _origin_of(trusted):
        return found
    headers = {name: value for name, value in found.get("headers", {}).items() if name.lower() in _SENT_ANYWHERE}
    client = {name: value for name, value in found.get("client_kwargs", {}).items() if name == "timeout"}
    return {name: value for name, value in (("headers", headers), ("client_kwargs", client)) if value}


def _origin_of(url: str) -> str:
    """Return scheme, host and port of a URL, in small letters and without a password."""
    scheme, _, rest = url.lower().partition("://")
    return f"{scheme}://{re.split('[/?#]', rest, maxsplit=1)[0].rpartition('@')[2]}"


def _begins_with(url: str, place: str) -> bool:
    """Return whether a URL is at a place, or below it: `https://a.example` does not stand for `https://a.example.org`."""
    below = place.partition("://")[2].partition("/")[2].rstrip("/")
    path = url.partition("://")[2].partition("/")[2]
    return _origin_of(url) == _origin_of(place) and f"{path}/".startswith(f"{below}/" if below else "")


def _with_timeout(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that give up a web server after a minute of silence, however long a file takes."""
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=_WAIT_S, sock_read=_WAIT_S)
    kept = {"timeout": timeout, "trace_configs": [_without_headers_elsewhere()], **options.get("client_kwargs", {})}
    return {**options, "client_kwargs": kept}


_SENT_ANYWHERE = frozenset({"accept", "accept-encoding", "range", "user-agent"})


@functools.cache
def _without_headers_elsewhere() -> Any:
    """Return what has aiohttp drop the user's headers where a server redirects to another: it drops but one itself."""
    from aiohttp import TraceConfig
    from yarl import URL

    async def drop(_session: Any, _context: Any, redirect: Any) -> None:
        response = redirect.response
        target = URL(response.headers.get("Location") or response.headers.get("URI") or "")
        if response.url.join(target).origin() != response.url.origin():
            for name in [name for name in redirect.headers if name.lower() not in _SENT_ANYWHERE]:
                redirect.headers.popall(name, None)

    config = TraceConfig()
    config.on_request_redirect.append(drop)
    return config


# ---------------------------------------------------------------- secrets
#
# A URL may hold a password or a signature, and options hold keys. None of them goes into a message.


_LEAST_SECRET = 4  # characters; shorter texts are in every message
_SECRET_VARIABLE = re.compile(r"AWS_(SECRET_ACCESS_KEY|SESSION_TOKEN|ACCESS_KEY_ID)|AZURE_STORAGE_\w+|GOOGLE_API_KEY")


def without_secrets(url: str) -> str:
    """Return a URL as it may be shown: without user and password, and without the values of its query.

    Example:
        >>> without_secrets("https://me:word@host/set?sig=abcd&v=2")
        'https://host/set?...'
    """
    if _is_inline(url):
        return f"{url.partition(',')[0]},..."
    head, query = _halves(url)
    scheme, mark, rest = head.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{mark}{place.rpartition('@')[2]}{slash}{path}{'?...' if query else ''}" if mark else url


_SIGNS = re.compile(
    r"(?i)x-(amz|goog|oss|cos|obs|bz)-.*|awsaccesskeyid|googleaccessid|ossaccesskeyid|signature|sig|expires|policy|"
    r"key-pair-id|.*token|auth|authorization|api_?key|key|secret|password|hdnea|hdnts"
)
_SIGNS_AZURE = frozenset({"st", "se", "sp", "sv", "sr", "spr", "skoid", "sktid", "skt", "ske", "sks", "skv"})


def lasting(url: str) -> str:
    """Return what stays of a URL when it is signed anew: no user and password, and no part of the query that signs it.

    Example:
        >>> lasting("https://host/get?id=7&X-Amz-Expires=600&X-Amz-Signature=abcd")
        'https://host/get?id=7'
    """
    head, query = _halves(url)
    if _is_inline(url) or (not query and "@" not in head):
        return url
    parts = query.split("&") if query else []
    names = [urllib.parse.unquote(part.partition("=")[0]) for part in parts]
    signs = _SIGNS_AZURE if "sig" in names else frozenset()
    kept = [part for part, name in zip(parts, names, strict=True) if name not in signs and not _SIGNS.fullmatch(name)]
    return f"{without_secrets(head)}{'?' if kept else ''}{'&'.join(kept)}"


_PLACE_VARIABLE = re.compile(
    r"AWS_ENDPOINT_URL\w*|STORAGE_EMULATOR_HOST|AZURE_STORAGE_(ACCOUNT_NAME|CONNECTION_STRING)"
)


def place_of(url: str, options: Mapping[str, Any]) -> str:
    """Return a text that is the same however a URL is signed, and another for each store; it may hold secrets.

    Args:
        url: URL, `SCHEME://PLACE`.
        options: options for fsspec.
    """
    said = {
        *_places_in(options),
        *(f"{name}={value}" for name, value in os.environ.items() if _PLACE_VARIABLE.fullmatch(name)),
    }
    return "\n".join([lasting(url), *sorted(said)])


def _places_in(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _places_in(value)
        elif name in _SHOWN or name in _ALSO_PLACES:
            yield f"{name}={value}"


_QUERY = re.compile(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>]+")


def redacted(text: str, url: str, options: Mapping[str, Any]) -> str:
    """Return a text without the secrets of a URL, of its options and of the environment, and without queries of others.

    Args:
        text: message of another library, which may quote both.
        url: URL that it is about.
        options: options for fsspec.

    Example:
        >>> redacted("key AKIA123 is not known", "s3://bucket/set", {"key": "AKIA123"})
        'key ... is not known'
    """
    for secret in sorted(_secrets(url, options), key=len, reverse=True):
        text = text.replace(secret, "...")
    return _QUERY.sub(r"\1?...", text)


def _is_inline(url: str) -> bool:
    """Return whether a URL is itself the file: `data:image/png;base64,...`."""
    return url[:5].lower() == "data:"


def _halves(url: str) -> tuple[str, str]:
    """Return a URL without its query, and the query; only those of web servers have one: `?` may be in a key of S3."""
    if url.partition("://")[0].lower() not in _HTTP:
        return url, ""
    head, _, query = url.partition("?")
    return head, query


def _secrets(url: str, options: Mapping[str, Any]) -> set[str]:
    head, query = _halves(url)
    user, at, _ = head.partition("://")[2].partition("/")[0].rpartition("@")
    found = {value for _, value in urllib.parse.parse_qsl(query)} | {query, *query.split("&")}
    found |= {one.partition("=")[2] for one in query.split("&")}
    found |= {user, *user.split(":")} if at else set()
    found |= set(_texts_in(dict(options)))
    found |= {one for name, value in os.environ.items() if _SECRET_VARIABLE.fullmatch(name) for one in _texts_in(value)}
    found |= {urllib.parse.quote(one, safe="") for one in found} | {urllib.parse.unquote(one) for one in found}
    return {one for one in found if len(one) >= _LEAST_SECRET}


_SECRET_PART = re.compile(r"(?i)(?:key|secret|password|token|signature|\bsig)=([^;&]+)")  # of a connection string
_SHOWN = frozenset({"endpoint_url", "region_name", "protocol", "account_name", "project"})
"""Options that say where something is, and open nothing."""
_ALSO_PLACES = frozenset({"connection_string", "endpoint", "host", "port"})


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode(errors="replace")
        yield text
        yield from _SECRET_PART.findall(text)
    elif isinstance(value, dict):
        for name, one in value.items():
            if name not in _SHOWN:
                yield from _texts_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts_in(one)


# ---------------------------------------------------------------- trying again
#
# Errors say in many ways that a server is busy: each filesystem raises what the client below it does, and some of them
# an error of their own from that one.


_ATTEMPTS = 5
_FIRST_WAIT_S, _MOST_WAIT_S, _MOST_ASKED_WAIT_S = 0.2, 8.0, 30.0
_PROGRESS_BYTES = 1 << 20  # a connection that was cut after so much begins to count again
_SOON = frozenset({408, 425, 429})  # statuses below 500 that pass
_NEVER = frozenset({501, 505, 511})
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
)
_FINAL_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOSYS, errno.EPERM, errno.EINVAL})
_FINAL_NAMES = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "TooManyRedirects",
     "InvalidUrlClientError", "InvalidUrlRedirectClientError", "NonHttpUrlRedirectClientError",
     "ClientConnectorCertificateError"}
)  # fmt: skip
_TRANSIENT_CODES = frozenset(
    {"BadDigest", "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable",
     "SlowDown", "XAmzContentSHA256Mismatch", "ConditionalRequestConflict", "Md5Mismatch"}
)  # fmt: skip
"""What S3 and Azure call errors that pass: some come with a status that does not."""
_NETWORK = ("aiohttp", "botocore", "aiobotocore", "urllib3", "requests", "http", "httpx", "httpcore", "google", "azure")
# Waits are drawn anew in each process, and from no generator that anyone seeds: many readers must not come together.
_jitter = random.SystemRandom()


def is_transient(error: BaseException) -> bool:
    """Return whether what failed may succeed when it is tried again: not where something is missing or forbidden."""
    chain = list(chain_of(error))
    status, code = status_of(error)
    if code in _TRANSIENT_CODES:
        return True
    if status is not None:
        return status in _SOON or (status >= 500 and status not in _NEVER)
    last = chain[-1]
    if isinstance(last, _FINAL) or isinstance(error, DatamatError):
        return False
    if any(type(one).__name__ in _FINAL_NAMES for one in chain):
        return False
    if isinstance(last, OSError) and last.errno in _FINAL_ERRNO:
        return False
    return any(
        isinstance(one, (OSError, EOFError)) or type(one).__module__.partition(".")[0] in _NETWORK for one in chain
    )


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what caused it: fsspec reports a server that is down as a missing file."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def status_of(error: BaseException) -> tuple[int | None, str]:
    """Return the HTTP status of an error or of what caused it, and the store's code of it: None and "" for none."""
    found: tuple[int | None, str] = None, ""
    for one in chain_of(error):
        status, code = _own_status(one)
        if status is not None or code:
            found = status, code
    return found


def _own_status(error: BaseException) -> tuple[int | None, str]:
    if type(error).__module__ == "aiohttp.http_exceptions":  # a connection that was cut, which it gives status 400
        return None, ""
    if type(error) is OSError and str(error).startswith("Forbidden: "):  # gcsfs's
        return 403, ""
    response, code = getattr(error, "response", None), ""
    if isinstance(response, dict):  # botocore's
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(response.get("Error", {}).get("Code", ""))
    else:
        if type(error).__module__.startswith("azure."):
            said = getattr(error, "error_code", "")
            code = str(getattr(said, "value", said) or "")
        # One after the other: aiohttp warns of those that it has no more.
        found = next((getattr(error, name) for name in ("status", "status_code", "code") if hasattr(error, name)), None)
        found = getattr(response, "status_code", None) if found is None else found
        found = int(found) if isinstance(found, str) and found.isdigit() else found  # gcsfs has it as text
    return (found if type(found) is int and 100 <= found < 600 else None), code


def _wait_before(attempt: int, error: BaseException) -> None:
    """Wait before an attempt, from 1 on: twice as long each time, less what chance takes off, or as the server asks."""
    wait = min(_FIRST_WAIT_S * 2 ** (attempt - 1), _MOST_WAIT_S) * (0.5 + _jitter.random() / 2)
    for one in chain_of(error):
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            asked = float(one.headers["Retry-After"])  # type: ignore[attr-defined]
            wait = max(wait, min(asked, _MOST_ASKED_WAIT_S))
    time.sleep(wait)


def reason_of(error: BaseException) -> str:
    """Return the message of an error and of its causes: fsspec reports a server that is down as a missing file."""
    return ", from ".join(f"{type(one).__name__}: {' '.join(str(one).split())}" for one in chain_of(error))


def is_unreachable(error: BaseException) -> bool:
    """Return whether a host did not answer at all, and this machine is not to blame, as when it has no network."""
    for one in chain_of(error):
        if isinstance(one, socket.gaierror):
            return one.errno != socket.EAI_AGAIN
        if isinstance(one, (TimeoutError, ConnectionRefusedError)):
            return True
    return False


def retried(call: Callable[[], _T], attempts: int = _ATTEMPTS) -> _T:
    """Return the result of a call, which is made several times while its errors are transient.

    Args:
        call: function that can be called again.
        attempts: most calls.
    """
    for attempt in range(1, attempts):
        try:
            return call()
        except Exception as error:  # each filesystem raises what the client below it does
            if not is_transient(error):
                raise
            _wait_before(attempt, error)
    return call()


_SLOW_AFTER_S, _LEAST_BYTES_PER_S, _ENDLESS_AFTER_S = 60, 1 << 10, 600


def _check_pace(num_bytes: int, elapsed_s: float, *, has_end: bool) -> None:
    """Raise `InputError` where a server drips, or streams without end, as radio and cameras do: silence never comes.

    Args:
        num_bytes: bytes that have come.
        elapsed_s: time that they took.
        has_end: whether the server has said how many there are.
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
class RemotePath:
    """A file or folder behind a URL; `str` returns the URL without user, password and query.

    Attributes:
        url: URL, `SCHEME://PLACE`; names are appended with a slash, before the query of a web server's.
        options: options for fsspec, often credentials, and therefore not part of the repr.

    Raises:
        OptionError: the URL is one of fsspec's chains (`simplecache::s3://...`), to which no name can be appended.
    """

    url: str = dataclasses.field(repr=False)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if "::" in self.url.partition("://")[0]:
            raise OptionError(
                f"{self} is a chain of filesystems; want the URL of the directory: cache_dir keeps the copies"
            )

    def __truediv__(self, name: str) -> RemotePath:
        head, query = _halves(self.url)
        return RemotePath(f"{head.rstrip('/')}/{name}{'?' if query else ''}{query}", self.options)

    @property
    def name(self) -> str:
        """The last name of the URL."""
        return _halves(self.url)[0].rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that it is in."""
        head, query = _halves(self.url)
        return RemotePath(f"{head.rstrip('/').rpartition('/')[0]}{'?' if query else ''}{query}", self.options)

    def __str__(self) -> str:
        return without_secrets(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def blocks(self, num_bytes: int) -> Generator[bytes, None, None]:
        """Yield the content of the file, a few megabytes at a time; of one that is too long, a byte more or some.

        Args:
            num_bytes: size of the file, as far as it is known; the most it may have otherwise.

        Raises:
            MissingDependencyError: the package that reads such URLs is not installed.
            OptionError: fsspec knows no such URLs.
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
            if attempt == _ATTEMPTS or not is_transient(failed):
                raise self._explained(failed, "cannot be read")
            _wait_before(attempt, failed)

    def download(self, file: BinaryIO, max_bytes: int, *, attempts: int = _ATTEMPTS) -> tuple[int, Mapping[str, Any]]:
        """Write the whole file to another; return its size, and what the store says of it: headers, or fsspec's `info`.

        Args:
            file: file that is open for writing, and empty.
            max_bytes: most bytes that the file may have.
            attempts: most attempts.

        Raises:
            InputError: the file is larger; or a web server sends it too slowly, or without end.
            Exception: whatever the filesystem raises, when the attempts are used up.
        """

        def attempt() -> tuple[int, Mapping[str, Any]]:
            file.seek(0)
            file.truncate()
            said: dict[str, Any] = {}
            if self._is_http:
                blocks = self._streamed(0, max_bytes, heard=said)
            else:
                said = self._info()
                blocks = self._blocks_from(0, max_bytes if said["size"] is None else int(said["size"]))
            began = time.monotonic()
            with contextlib.closing(blocks):
                for block in blocks:
                    file.write(block)
                    if file.tell() > max_bytes:
                        raise InputError(f"has over {max_bytes} bytes, the most that are fetched; remove the row")
                    if self._is_http:
                        _check_pace(file.tell(), time.monotonic() - began, has_end="content-length" in said)
            return file.tell(), said

        return retried(attempt, attempts)

    def ask(self) -> tuple[int, Mapping[str, Any]]:
        """Return the size of the file and what the store says of it, and read at most a byte; raises as `download`.

        Web servers are asked by GET for the first byte: a URL that is signed for GET is good for nothing else.
        """

        def attempt() -> tuple[int, Mapping[str, Any]]:
            if not self._is_http:
                found = self._info()
                return int(found["size"] or 0), found
            said: dict[str, Any] = {}
            with contextlib.closing(self._streamed(0, 1, is_range=True, heard=said)) as blocks:
                next(blocks, b"")
            total = str(said.get("content-range", "")).rpartition("/")[2]
            return int(total if total.isdigit() else said.get("content-length", 0)), said

        return retried(attempt)

    def num_bytes(self) -> int:
        """Return the size of the file; raises as `blocks` does."""
        return self._tried(lambda: self.ask()[0], "cannot be read")

    def _info(self) -> dict[str, Any]:
        filesystem, path = self._filesystem()
        if _is_inline(self.url):  # of these, fsspec has no `info`
            return {"size": len(filesystem.cat_file(path))}
        filesystem.invalidate_cache(path)
        return dict(filesystem.info(path))

    def read_range(self, start: int, stop: int) -> bytes:
        """Return some bytes of the file, in one request if the server answers it; raises as `blocks` does.

        Args:
            start: first byte.
            stop: byte after the last one; the file has it.
        """
        if stop <= start:
            return b""

        def read() -> bytes:
            found = b"".join(self._streamed(start, stop, is_range=True)) if self._is_http else self._part(start, stop)
            if len(found) < stop - start:
                raise ConnectionError(f"the answer ended after {len(found)} of {stop - start} bytes")
            return found[: stop - start]

        return self._tried(read, "cannot be read")

    def read_bytes(self, max_bytes: int) -> bytes:
        """Return the content of a small file.

        Args:
            max_bytes: most bytes that the file may have.

        Raises:
            CorruptDataError: the file is larger.

        It also raises what `blocks` raises.
        """
        content = bytearray()
        with contextlib.closing(self.blocks(max_bytes)) as blocks:
            for block in blocks:
                content += block
                if len(content) > max_bytes:
                    raise CorruptDataError(
                        f"{self} has over {max_bytes} bytes, the most it may have; run the job again"
                    )
        return bytes(content)

    def names(self, *, deep: bool = False) -> list[str] | None:
        """Return the sorted names of the files in the folder; None where its server gives no list.

        Args:
            deep: whether to list folders in it, too, whose files then have paths below this one.

        Raises:
            OutputError: it cannot be listed.
        """
        if self._is_http:
            return None

        def listed() -> list[str]:
            filesystem, path = self._filesystem()
            filesystem.invalidate_cache()
            try:
                found = filesystem.find(path, maxdepth=None if deep else 1, detail=False)
            except FileNotFoundError as error:
                if status_of(error)[1] == "NoSuchBucket":
                    raise
                return []
            place = len(path.rstrip("/")) + 1
            return sorted(str(one)[place:] for one in found if len(str(one)) > place)

        return self._tried(listed, "cannot be listed")

    def read_if_there(self, max_bytes: int) -> bytes | None:
        """Return the content of a small file as `read_bytes` does; None where there is none."""
        try:
            return self.read_bytes(max_bytes)
        except AbsentError:
            return None

    def tail(self, max_bytes: int) -> bytes | None:
        """Return the last bytes of a file, from the beginning of a line on; None where there is none.

        Args:
            max_bytes: most bytes to return.

        Raises:
            OutputError: it cannot be read.
        """
        try:
            size, _ = self._tried(self.ask, "cannot be read")
            start = max(size - max_bytes, 0)
            content = self.read_range(start, size)
        except AbsentError:
            return None
        return content.partition(b"\n")[2] if start else content

    def _tried(self, call: Callable[[], _T], problem: str) -> _T:
        """Return what a call returns, tried again as all are; raise its error as one of ours."""
        try:
            return retried(call)
        except Exception as error:  # noqa: BLE001 -- each filesystem raises what the client below it does
            failed = error
        raise self._explained(failed, problem)

    @property
    def _scheme(self) -> str:
        return self.url.partition("://")[0].lower()

    @property
    def _is_http(self) -> bool:
        return self._scheme in _HTTP

    def _blocks_from(self, start: int, stop: int) -> Generator[bytes, None, None]:
        """Yield the bytes of the file from `start` on, up to `stop` and perhaps some more."""
        if self._is_http:
            yield from self._streamed(start, stop)
            return
        filesystem, path = self._filesystem()
        filesystem.invalidate_cache(path)  # sizes may have been listed before the file was rewritten
        while start < stop:
            # One byte more than there should be shows that there are more.
            behind = start + _REQUEST_BYTES if stop - start > _REQUEST_BYTES else stop + 1
            block = filesystem.cat_file(path, start=start, end=behind)  # by name: s3fs has others between
            if block:
                yield block
            if len(block) < behind - start:
                return
            start += len(block)

    def _part(self, start: int, stop: int) -> bytes:
        filesystem, path = self._filesystem()
        found: bytes = filesystem.cat_file(path, start=start, end=stop)
        return found

    def _streamed(
        self, start: int, stop: int, *, is_range: bool = False, heard: dict[str, Any] | None = None
    ) -> Generator[bytes, None, None]:
        """Yield what one response of a web server holds: not every one serves ranges, and fsspec assumes that it does.

        Ranges are asked for, and what comes of a file before its range is dropped where the server sends all of it.
        `heard` receives the headers, by their names in lower case.
        """
        filesystem, path = self._filesystem()
        headers = {"Accept-Encoding": "identity", **self.options.get("headers", {})}
        if start or is_range:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        # A size, so that fsspec does not ask for it first.
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

    def _filesystem(self) -> tuple[Any, str]:
        return open_filesystem(self.url, self.options)

    def _explained(self, error: Exception, problem: str) -> DatamatError:
        """Return an error of the filesystem as one of ours, with itself as the cause: a copy where it holds a secret.

        Not to be called inside of an `except`, whose error would go along as the context.
        """
        if isinstance(error, DatamatError):
            return error
        reason = redacted(reason_of(error), self.url, self.options)
        said = " ".join(f"{one} {one!r} {one.__context__!r}" for one in chain_of(error))
        hides = redacted(said, self.url, self.options) != said
        status, code = status_of(error)
        explained: OutputError
        if _is_absent(error):
            explained = AbsentError(
                f"{self} {problem}: {reason}; check the address, the network and storage_options, and that the run "
                "that writes there has finished"
            )
        elif code == "NoSuchBucket":
            explained = OutputError(
                f"{self} {problem}: {reason}; there is no such bucket: correct the URL, or storage_options if another "
                "store has it"
            )
        elif status in {401, 403} or {type(one).__name__ for one in chain_of(error)} & _NO_CREDENTIALS:
            explained = DeniedError(
                f"{self} {problem}: {reason}; check the address, and give storage_options, or an environment, whose "
                "credentials may read there"
            )
        else:
            explained = OutputError(f"{self} {problem}: {reason}; check the address, the network and storage_options")
        explained.__cause__ = OSError(reason) if hides else error
        return explained


_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "PermissionError"})


class AbsentError(OutputError):
    """There is no such file behind a URL, as far as its server says."""


class DeniedError(OutputError):
    """A file behind a URL may not be read."""


def _is_absent(error: Exception) -> bool:
    """Return whether an error says that there is no such file; of a bucket, or a server that is down, it does not."""
    status, code = status_of(error)
    if status is not None:
        return status in {404, 410} and code != "NoSuchBucket"
    return isinstance(error, FileNotFoundError) and all(
        isinstance(one, (FileNotFoundError, KeyError)) for one in chain_of(error)
    )


# ---------------------------------------------------------------- files fetched for a while


@final
class FetchedFolder:
    """A temporary folder for some files of a folder behind a URL, removed with this object. Thread-safe.

    Args:
        root: the folder behind the URL.

    Attributes:
        path: the temporary folder, in `TMPDIR`.
    """

    def __init__(self, root: RemotePath) -> None:
        self.root = root
        self.path = pathlib.Path(temporary_folder(self))

    def fetch_if_there(self, name: str, max_bytes: int) -> bool:
        """Write a file to its place below the temporary folder; return whether there is one.

        Args:
            name: path of the file below the folder.
            max_bytes: size from which on it is cut: a longer file has a byte more here, or some.

        Raises:
            OutputError: it cannot be read, or the disk is full.
        """
        place = self.path / name
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(place, "wb") as file, contextlib.closing((self.root / name).blocks(max_bytes)) as blocks:
                file.writelines(blocks)
        except OutputError as error:
            place.unlink(missing_ok=True)
            if isinstance(error, AbsentError):
                return False
            raise
        except OSError as error:
            place.unlink(missing_ok=True)
            raise OutputError(
                f"{self.root / name} does not fit into {self.path.parent} ({error.strerror}), where it is examined; "
                "set TMPDIR to a folder on a larger disk"
            ) from error
        return True

    def fetch(self, name: str, max_bytes: int) -> str:
        """Do what `fetch_if_there` does; return why a file is not here that is missing, or may not be read, or ""."""
        try:
            return "" if self.fetch_if_there(name, max_bytes) else os.strerror(errno.ENOENT)
        except DeniedError:
            return os.strerror(errno.EACCES)

    def fetch_all(self, sizes: Mapping[str, int], at_once: int = 16) -> dict[str, str]:
        """Fetch several files, some at the same time; return why those are not here that are not, by name.

        Args:
            sizes: `max_bytes` of each, by name.
            at_once: how many to fetch at the same time.

        Raises:
            OutputError: as for `fetch`.
        """
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(at_once) as pool:
            found = dict(zip(sizes, pool.map(self.fetch, sizes, sizes.values()), strict=True))
        return {name: why for name, why in found.items() if why}

    def drop(self, names: Iterable[str]) -> None:
        """Remove files from the temporary folder."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the temporary folder, whoever still has this object."""
        shutil.rmtree(self.path, ignore_errors=True)
