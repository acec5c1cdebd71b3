"""Folders in S3 and compatible stores, Google Cloud Storage and Azure, through the client `obstore`.

obstore retries transient errors, continues interrupted responses, and never returns fewer bytes than requested. Four
things are added: errors with remedies, repeated conditional writes, forked processes, and a responsive Ctrl-C (see
`forked`). Only this module uses obstore.

A file of up to 512 MB is sent in one request, from the page cache, and the store itself checks the condition. A larger
one is sent in parts, which obstore completes without a condition. S3 compares each request with its SHA-256.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import mmap
import os
import pathlib
import re
import urllib.parse
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, final

from datamat.errors import DatamatError, MissingDependencyError, OptionError, OutputError
from datamat.folders.base import (
    AbsentError,
    ChangedError,
    DeniedError,
    ExistsError,
    Folder,
    Mode,
    Range,
    ReplaceIf,
    Stat,
    UnsupportedError,
    checked,
)
from datamat.folders.forked import asked
from datamat.folders.options import GOOGLE_SCHEMES, S3_SCHEMES, configured, translated
from datamat.folders.retries import ATTEMPTS, wait_before
from datamat.folders.urls import redacted, scheme_of, without_secrets
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

_T = TypeVar("_T")

_STREAM_BYTES = 1 << 20
_PART_BYTES, _MOST_PARTS, _PARTS_AT_ONCE = 8 << 20, 10_000, 4
_AT_ONCE_BYTES = 512 << 20  # files up to this size are sent in one request
_BYTES_A_MINUTE, _COPY_MINUTES = 15 << 20, 30
_CLIENT = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "30m"}  # of silence, and of a request
# obstore draws each wait between the first one and twice the last: at least 5 s in total, which a restarting server
# needs; its own default is about one.
_BACKOFF = {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=8), "base": 2.0}
_RETRY = {"max_retries": 10, "retry_timeout": timedelta(minutes=3), "backoff": _BACKOFF}
_NOT_READ, _NOT_WRITTEN = "cannot be read", "cannot be written"
_CREDENTIALS_LAST = timedelta(minutes=30)  # until boto is asked again: it renews expiring ones


@frozen()
class _Place:
    """The arguments to open a store, picklable for other processes."""

    url: str
    options: str = dataclasses.field(repr=False)  # as JSON, since a place is a key of the open stores

    @property
    def is_google(self) -> bool:
        return scheme_of(self.url) in GOOGLE_SCHEMES


@final
class ObjectFolder(Folder):
    """A folder in an object store.

    A file appears when it is complete. A killed multipart upload leaves invisible parts in the store until a lifecycle
    rule of the bucket removes them.

    Args:
        url: URL of the folder, `SCHEME://BUCKET/PATH`.
        options: options of fsspec's filesystem for that store, or of obstore; the environment completes them.

    Raises:
        OptionError: an option cannot be translated.
    """

    keeps = frozenset({"create", "replace_if"})

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        given = translated(scheme_of(url), {**configured(scheme_of(url)), **options})
        try:
            self._place = _Place(url.rstrip("/"), json.dumps(given, sort_keys=True))
        except TypeError as error:
            raise OptionError(
                f"{without_secrets(url)}: storage_options hold what is not a text or a number ({error})"
            ) from None

    def __str__(self) -> str:
        return without_secrets(self._place.url)

    def place(self, name: str) -> str:
        return f"{self}/{name}"

    def blocks(self, name: str, max_bytes: int) -> Generator[bytes]:
        stream = self._asked(_open_stream, name)
        done, owner = 0, os.getpid()
        try:
            while done <= max_bytes and (block := asked(_next_block, self._place, name, stream)):
                done += len(block)
                yield block
        finally:
            if os.getpid() == owner:  # a forked child has a copy of this generator, but not the stream
                with contextlib.suppress(RuntimeError):  # at interpreter exit, no thread can start
                    asked(_close_stream, stream)

    def read_range(self, name: str, start: int, stop: int) -> Range:
        return self._asked(_read_range, name, start, stop) if start < stop else Range(b"", "")

    def stat(self, name: str) -> Stat | None:
        try:
            return self._asked(_stat, name)
        except AbsentError:
            return None

    def list(self, below: str = "", *, deep: bool = False) -> dict[str, Stat]:
        return asked(_list, self._place, checked(below) if below else "", deep)

    def write(self, name: str, content: bytes, mode: Mode = "overwrite") -> str:
        return self._asked(_put, name, content, mode)

    def write_file(self, name: str, path: str | os.PathLike[str], mode: Mode = "overwrite") -> str:
        """Write a file from one on this machine; see `Folder.write_file`.

        Above 512 MB the condition is checked only before the first part is sent: an object that others write under that
        name during the upload is replaced.
        """
        return self._asked(_write_file, name, os.path.abspath(path), mode)

    def copy(self, name: str, target: str) -> None:
        """Copy a file in the store (S3: up to 5 GB); see `Folder.copy`."""
        self._asked(_copy, name, checked(target))

    def delete(self, name: str) -> None:
        with contextlib.suppress(AbsentError):
            self._asked(_delete, name)

    def child(self, name: str) -> ObjectFolder:
        return ObjectFolder(f"{self._place.url}/{checked(name)}", json.loads(self._place.options))

    def _asked(self, call: Callable[..., _T], name: str, *args: Any) -> _T:
        return asked(call, self._place, checked(name), *args)


# ---------------------------------------------------------------- calls
#
# Functions that use obstore. Each runs in a process that may do so: here, or in the helper of a forked one.


def _read_range(place: _Place, name: str, start: int, stop: int) -> Range:
    import obstore

    def read() -> Range:
        answer = obstore.get(_store(place), name, options={"range": (start, stop)})
        return Range(bytes(answer.bytes()), _version_of(answer.meta, place))

    found = _tried(place, name, read)
    if len(found.content) < stop - start:
        where = f"{without_secrets(place.url)}/{name}"
        raise OutputError(f"{where} ends before byte {stop}; run the job again to rewrite it")
    return found


def _stat(place: _Place, name: str) -> Stat:
    import obstore

    def looked() -> Any:
        store = _store(place)
        with contextlib.suppress(FileNotFoundError):
            return obstore.head(store, name)
        obstore.get(store, name)  # tells whether the file or the bucket is missing: responses to HEAD have no text
        return obstore.head(store, name)

    return _stat_of(_tried(place, name, looked), place)


def _list(place: _Place, below: str, deep: bool) -> dict[str, Stat]:
    import obstore

    def listed() -> tuple[list[Any], set[str]]:
        if deep:
            return [one for chunk in obstore.list(_store(place), below or None) for one in chunk], set()
        both = obstore.list_with_delimiter(_store(place), below or None)
        return list(both["objects"]), set(both["common_prefixes"])

    found, folders = _tried(place, below, lambda: _repeated(listed), "cannot be listed")
    stats = {one["path"]: _stat_of(one, place) for one in found}
    folders.add(below)
    for path in stats:
        while (path := path.rpartition("/")[0]) and path not in folders:
            folders.add(path)
    # Empty objects represent folders: obstore drops the trailing slash of their keys.
    names = sorted(path for path in stats if stats[path].num_bytes or path not in folders)
    return {path.removeprefix(f"{below}/"): stats[path] for path in names}


def _stat_of(found: Mapping[str, Any], place: _Place) -> Stat:
    return Stat(int(found["size"]), _version_of(found, place))


def _version_of(found: Mapping[str, Any], place: _Place) -> str:
    """Return the ETag, or in Google's store the generation, which obstore omits from listings.

    Azure quotes ETags in responses, but not in listings.
    """
    return str(found["version" if place.is_google else "e_tag"] or "").strip('"')


def _write_file(place: _Place, name: str, path: str, mode: Mode) -> str:
    import obstore

    size = os.path.getsize(path)
    if size <= _AT_ONCE_BYTES:
        with open(path, "rb") as file:
            # Not closed explicitly: after an error, obstore may still hold it.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        return _put(place, name, content, mode)
    if mode != "overwrite":
        _check(place, name, mode)
    part = max(_PART_BYTES, -(-size // _MOST_PARTS))

    def send() -> Any:
        whole, at_once = pathlib.Path(path), _PARTS_AT_ONCE
        return obstore.put(store, name, whole, use_multipart=True, chunk_size=part, max_concurrency=at_once)

    store = _store(place, minutes=_minutes_for(part))
    return _version_of(_tried(place, name, send, _NOT_WRITTEN), place)


def _minutes_for(num_bytes: int) -> int:
    """Return the time limit, in minutes, of a request with this many bytes: half a megabyte per second suffices."""
    return 1 << max(num_bytes // _BYTES_A_MINUTE, 1).bit_length() - 1


def _check(place: _Place, name: str, mode: Mode) -> None:
    """Raise the error that a conditional write would raise now."""
    try:
        found = _stat(place, name)
    except AbsentError:
        found = None
    where = f"{without_secrets(place.url)}/{name}"
    if mode == "create" and found is not None:
        raise ExistsError(f"{where} is to be created, but already exists")
    if isinstance(mode, ReplaceIf) and (found is None or found.version != mode.version):
        raise ChangedError(f"{where} has changed meanwhile, so it was not replaced")


def _put(place: _Place, name: str, content: bytes | mmap.mmap, mode: Mode) -> str:
    """Send a file in one request, and return its version."""
    import obstore

    minutes = _minutes_for(len(content)) if len(content) > _PART_BYTES else 0
    store = _store(place, minutes=minutes, repeats=mode == "overwrite")
    wanted: Any = mode
    if isinstance(mode, ReplaceIf):
        wanted = {"version": mode.version} if place.is_google else {"e_tag": f'"{mode.version}"'}
        if place.is_google and not mode.version.strip("0").isdecimal():  # to Google, "0" means create
            raise ChangedError(f"{without_secrets(place.url)}/{name}: {mode.version!r} is not a version of any file")

    def send() -> Any:
        return obstore.put(store, name, content, mode=wanted, use_multipart=False)

    try:
        return _version_of(_tried(place, name, lambda: _repeated(send), _NOT_WRITTEN), place)
    except AbsentError as error:
        if not isinstance(mode, ReplaceIf):
            raise
        raise ChangedError(str(error)) from None  # raised by S3 for a version if there is no file


def _copy(place: _Place, name: str, target: str) -> None:
    import obstore

    store = _store(place, minutes=_COPY_MINUTES)
    _tried(place, name, lambda: _repeated(lambda: obstore.copy(store, name, target)), "cannot be copied")


def _delete(place: _Place, name: str) -> None:
    import obstore

    _tried(place, name, lambda: _repeated(lambda: obstore.delete(_store(place), name)), "cannot be deleted")


def _repeated(call: Callable[[], _T]) -> _T:
    """Make a call, repeating it where obstore does not: conditional writes, interrupted responses."""
    from obstore.exceptions import GenericError

    for attempt in range(1, ATTEMPTS):
        try:
            return call()
        except GenericError as error:
            if _is_unsupported(str(error)):
                raise
            wait_before(attempt, error)
    return call()


_streams: dict[int, Iterator[bytes]] = {}  # open streams of this process
_numbers = itertools.count()


def _open_stream(place: _Place, name: str) -> int:
    import obstore

    number = next(_numbers)
    found = _tried(place, name, lambda: obstore.get(_store(place), name).stream(min_chunk_size=_STREAM_BYTES))
    _streams[number] = iter(found)
    return number


def _next_block(place: _Place, name: str, stream: int) -> bytes:
    return bytes(_tried(place, name, lambda: next(_streams[stream], b"")))


def _close_stream(stream: int) -> None:
    _streams.pop(stream, None)


@functools.lru_cache(maxsize=64)
def _store(place: _Place, *, minutes: int = 0, repeats: bool = True) -> Any:
    """Return the client of a place.

    Args:
        place: the place.
        minutes: time limit for requests that take long to send; 0 limits only silence, which would end those.
        repeats: whether it repeats requests; `_repeated` does so only where it can help.
    """
    from obstore import store
    from obstore.exceptions import BaseError

    config = json.loads(place.options)
    scheme, (bucket, _, path) = scheme_of(place.url), place.url.partition("://")[2].partition("/")
    timeout = {"timeout": f"{minutes}m"} if minutes else {}
    client = {**_CLIENT, **timeout, **config.pop("client_options", {})}
    if minutes:
        client.pop("read_timeout")
    more: dict[str, Any] = {"client_options": client, "retry_config": _RETRY if repeats else {"max_retries": 0}}
    if place.is_google:
        more |= _google_credentials(place, config)
    try:
        if scheme in S3_SCHEMES:
            profile = config.pop("profile", None)
            if credentials := _boto_credentials(place, config, profile):
                more["credential_provider"] = credentials
                config = {**credentials.config, **config}
                if config.get("endpoint", "").startswith("http:"):
                    client = more["client_options"] = {"allow_http": True, **client}
            if not {"endpoint", "region"} & config.keys() and not any(map(os.environ.get, _PLACES_OF_S3)):
                config["region"] = bucket_region(bucket)
            config = {"checksum_algorithm": "SHA256", **config}
            return store.S3Store(bucket, prefix=path or None, config=config, **more)  # type: ignore[arg-type]  # from JSON
        if place.is_google:
            return store.GCSStore(bucket, prefix=path or None, config=config, **more)
        url = urllib.parse.quote(place.url, safe=":/@")  # "?" and "#" would end it, and "%" be decoded
        return store.from_url(url, config=config or None, **more)
    except (ValueError, TypeError, BaseError) as error:
        reason = redacted(str(error).partition("\n")[0], place.url, json.loads(place.options))
        raise OptionError(
            f"{without_secrets(place.url)}: {reason}; want a URL and storage_options that fsspec or obstore takes"
        ) from None


_PLACES_OF_S3 = ("AWS_ENDPOINT", "AWS_REGION", "AWS_DEFAULT_REGION")


def bucket_region(bucket: str, address: str = "https://s3.amazonaws.com") -> str:
    """Return the region of an S3 bucket, which S3 tells anyone; "us-east-1" if it does not."""
    import http.client

    parts = urllib.parse.urlsplit(address)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    found = None
    with (
        contextlib.suppress(OSError, http.client.HTTPException),
        contextlib.closing(kind(parts.netloc, timeout=10)) as it,
    ):
        it.request("HEAD", f"/{bucket}")
        found = it.getresponse().getheader("x-amz-bucket-region")
    return found or "us-east-1"


def _boto_credentials(place: _Place, config: Mapping[str, Any], profile: str | None) -> _BotoCredentials | None:
    """Return a credential provider that uses boto, if only boto has credentials: obstore does not read `~/.aws`."""
    is_said = {"access_key_id", "skip_signature"} & config.keys() or "AWS_ACCESS_KEY_ID" in os.environ
    has_profile = "AWS_PROFILE" in os.environ or os.path.exists(os.path.expanduser("~/.aws"))
    if not profile and (is_said or not has_profile):
        return None
    try:
        import botocore.session
    except ImportError:
        raise MissingDependencyError(
            f"{without_secrets(place.url)}: the profiles of ~/.aws are read by boto3, which is not installed; install "
            "it with: pip install boto3"
        ) from None
    session = botocore.session.Session(profile=profile)
    found = session.get_credentials()
    if found is None:
        return None
    named = {"region": session.get_config_variable("region"), "endpoint": _endpoint_of(session)}
    return _BotoCredentials(found, {name: value for name, value in named.items() if value})


def _endpoint_of(session: Any) -> str | None:
    """Return a profile's endpoint for S3, or for all services."""
    from botocore.configprovider import ConfiguredEndpointProvider

    scoped = session.get_scoped_config()
    found: str | None = ConfiguredEndpointProvider(session.full_config, scoped, "s3").provide()
    return found


class _BotoCredentials:
    """The credential provider for obstore."""

    def __init__(self, credentials: Any, config: dict[str, str]) -> None:
        self._credentials = credentials
        self.config = config

    def __call__(self) -> dict[str, Any]:
        found = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST,
        }


def _google_credentials(place: _Place, config: dict[str, Any]) -> dict[str, Any]:
    """Add this machine's credentials to a configuration; return a provider that uses google-auth if only that can.

    obstore reads credential files of service accounts and users, but not of federations and impersonated accounts.
    """
    is_cloud, given = config.pop("token", None) == "cloud", config.get("application_credentials")
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    path = given or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    path = path or os.path.join(folder, "application_default_credentials.json")
    if {"bearer_token", "service_account", "service_account_key"} & config.keys() or not os.path.isfile(path):
        return {}
    where, kind = without_secrets(place.url), None
    if is_cloud:
        raise OptionError(
            f"{where}: token='cloud' is for the account of the machine, and the client would take {path} first; leave "
            "out token for that, or move it and unset GOOGLE_APPLICATION_CREDENTIALS"
        )
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError), open(path, "rb") as file:
        kind = json.load(file)["type"]  # for a broken file, obstore reports the error
    if kind in (None, "service_account", "authorized_user"):
        config["application_credentials"] = path
        return {}
    if given:
        raise OptionError(
            f"{where}: {path} holds credentials of the type {kind!r}, which are taken from the environment alone; "
            f"leave out token, and set GOOGLE_APPLICATION_CREDENTIALS={path}"
        )
    try:
        import google.auth
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError:
        raise MissingDependencyError(
            f"{where}: credentials of the type {kind!r}, as in {path}, are read by google-auth, which is not "
            "installed; install it with: pip install google-auth requests"
        ) from None
    return {"credential_provider": GoogleCredentialProvider(google.auth.default(scopes=[_GOOGLE_SCOPE])[0])}


_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


def _tried(place: _Place, name: str, call: Callable[[], _T], problem: str = _NOT_READ) -> _T:
    """Make a call; convert errors of obstore to ours."""
    try:
        return call()
    except DatamatError:
        raise
    except Exception as error:  # noqa: BLE001 -- obstore raises its clients' errors
        failed = error
    found = _explained(failed, place, name, problem)
    if isinstance(found, DeniedError):
        _store.cache_clear()  # its credentials may come from an environment that is now being corrected
    raise found  # here, so that obstore's error, with its secrets, is not its context


def _explained(error: Exception, place: _Place, name: str, problem: str) -> OutputError:
    text, kind = str(error), type(error).__name__
    reason = f"{kind}: {redacted(text.partition(chr(10))[0], place.url, json.loads(place.options))}"
    where = f"{without_secrets(place.url)}/{name}".rstrip("/") + f" {problem}"
    said = f"{where}: {reason}"
    found: OutputError
    if cause := next((cause for sign, cause in _CAUSES.items() if sign in text), ""):
        server = re.search(r"https?://([^/\s?]*@)?([^/\s?]+)", text)
        found = OutputError(f"{where}: {server[2] if server else 'its server'} {cause}")
    elif kind == "InvalidPathError":
        key = re.search(r'(?s)path: "(.*?)"', text)
        found = OutputError(
            f"{where}: the key {key[1] if key else ''!r} in it is not a path; rename or delete that object, or give a "
            "folder without it"
        )
    elif any(code in text for code in ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")):
        found = OutputError(
            f"{said}; there is no such bucket: correct the URL, or storage_options if another store has it"
        )
    elif isinstance(error, FileNotFoundError):
        found = AbsentError(
            f"{said}; check the address, the network and storage_options, and that the run that writes "
            "there has finished"
        )
    elif kind in _CONDITIONS:
        found = _CONDITIONS[kind](f"{said}; something else has written it meanwhile")
    elif _is_unsupported(text):
        found = UnsupportedError(f"{said}; the store does not support a condition or checksum of the request")
    elif kind in _DENIED or " 403 " in text or " 401 " in text:
        found = DeniedError(
            f"{said}; check the address, and give storage_options, or an environment, whose credentials may "
            f"{'read' if problem == _NOT_READ else 'read and write'} there"
        )
    else:
        found = OutputError(f"{said}; check the address, the network and storage_options")
    found.__cause__ = OSError(reason)
    return found


_CAUSES = {
    "kind: ConnectionRefused": "refuses connections; start it, or correct the address",
    "dns error": "cannot be found by that name; correct the address, or check the network",
    "TimedOut": "does not answer in time; check the network, its proxy and its firewall",
    "InvalidCertificate": "has a certificate that this machine does not trust; name the file of its authority, as in "
    "client_kwargs={'verify': 'ca.pem'}",
    "InvalidContentType": "does not speak TLS; give its address with http://",
}
"""The client's network errors, with a description and a remedy for each."""

_CONDITIONS = {"AlreadyExistsError": ExistsError, "PreconditionError": ChangedError}
_DENIED = frozenset({"PermissionDeniedError", "UnauthenticatedError"})


def _is_unsupported(text: str) -> bool:
    """Return True if a store reports an unsupported condition."""
    return " 501 " in text or "NotImplemented" in text
