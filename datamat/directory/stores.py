"""Object stores and other places behind URLs: one way to open them, to write whole objects, and to try again.

    a file ──> parts, several at once, each with its MD5 ──> completed once, on a condition ──> size and ETag compared

An object is visible whole or not at all. A request that fails for reasons that pass (a 500, a slow-down, a timeout, a
cut connection) is repeated with growing, random pauses; a refusal (403, 404, no such bucket) is reported at once. What
a store says of itself is never put into a message unless the secrets of its options are out of it.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import math
import os
import random
import re
import time
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

from datamat.errors import DatamatError, MissingDependencyError, OptionError, OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


__all__ = ["ObjectStore", "StoredObject", "is_url", "open_filesystem", "passes", "retried", "without_secrets"]

_URL = re.compile(r"[A-Za-z][\w+.-]+(://|::)")  # at least two letters: one is a Windows drive
_WAIT_S = 60
_HTTP = ("http", "https")
_PACKAGES = {
    "s3": "datamat[s3]",
    "s3a": "datamat[s3]",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
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
        filesystem, path = url_to_fs(url, **(_with_timeout(options) if scheme in _HTTP else options))
    except ImportError as error:
        package = _PACKAGES.get(scheme, f"fsspec[{scheme}]")
        raise MissingDependencyError(
            f"{url} needs a package that is not installed ({error}); install it with: pip install '{package}'"
        ) from error
    except ValueError as error:
        raise OptionError(f"{url}: {error}; want a URL and storage_options that fsspec takes") from error
    _KEPT[hash(filesystem)] = filesystem
    return filesystem, path


def _with_timeout(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that give up a web server after a minute of silence, however long a file takes."""
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=_WAIT_S, sock_read=_WAIT_S)
    return {**options, "client_kwargs": {"timeout": timeout, **options.get("client_kwargs", {})}}


# ---------------------------------------------------------------- errors
#
# Which errors pass, and what of them may be shown.


_MOST_TRIES = 7
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 8.0
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_PASSING_CODES = frozenset(
    {"BadDigest", "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable",
     "SlowDown", "XAmzContentSHA256Mismatch", "ConditionalRequestConflict"}
)  # fmt: skip
_LASTING = (PermissionError, FileNotFoundError, FileExistsError, NotImplementedError, DatamatError, IsADirectoryError)
_PASSING = (OSError, TimeoutError, concurrent.futures.TimeoutError, EOFError)
_LASTING_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOSYS, errno.EPERM, errno.EINVAL})
_OF_CLIENTS = ("aiohttp.", "botocore.", "aiobotocore.", "azure.", "gcsfs.", "google.", "requests.", "urllib3.")
_SECRET_NAME = re.compile(r"key|secret|token|passw|credential|sas|connection_string|auth|cookie", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"AWS_(SECRET_ACCESS_KEY|SESSION_TOKEN|ACCESS_KEY_ID)|AZURE_STORAGE_\w+|GOOGLE_API_KEY")
_LEAST_SECRET = 4  # letters; a shorter one would blank out half a message

Result = TypeVar("Result")


def passes(error: BaseException) -> bool:
    """Return whether an error of a store is one that passes: the same request may succeed a little later."""
    status, code = _status(error)
    if code in _PASSING_CODES:
        return True
    if status is not None:
        return status in _PASSING_STATUS
    if isinstance(error, _LASTING):
        return False
    if isinstance(error, OSError) and error.errno in _LASTING_ERRNO:
        return False
    if type(error).__name__ in {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError"}:
        return False
    return isinstance(error, _PASSING) or type(error).__module__.startswith(_OF_CLIENTS)


def _status(error: BaseException | None) -> tuple[int | None, str]:
    """Return the HTTP status and the code that an error or one of its causes carries."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, str(response.get("Error", {}).get("Code", ""))
        if isinstance(status := getattr(response, "status_code", None), int):
            return status, ""
        for name in ("status", "status_code", "code"):
            value = getattr(error, name, None)
            if isinstance(value, (int, str)) and str(value).isdigit():
                return int(value), ""
        error = error.__cause__
    return None, ""


def retried(call: Callable[[], Result], *, most_tries: int = _MOST_TRIES) -> Result:
    """Return what a call returns; repeat it with growing, random pauses while it fails for reasons that pass.

    Args:
        call: request to a store that may be repeated.
        most_tries: calls after which the error of the last is raised.
    """
    for number in range(1, most_tries):
        try:
            return call()
        except Exception as error:
            if not passes(error):
                raise
        # All of a random pause, so that workers that were refused together do not come back together.
        time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**number)))  # noqa: S311 -- no secret
    return call()


def without_secrets(text: str, options: Mapping[str, Any]) -> str:
    """Return a message without what options or the environment hold as secrets.

    Example:
        >>> without_secrets("key AKIA123 is not known", {"key": "AKIA123"})
        'key *** is not known'
    """
    secrets = {*_secrets_in(options), *(os.environ[name] for name in os.environ if _SECRET_VARIABLE.fullmatch(name))}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST_SECRET:
            text = text.replace(secret, "***")
    return text


def _secrets_in(value: Any, *, is_named: bool = False) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _secrets_in(inner, is_named=is_named or bool(_SECRET_NAME.search(str(name))))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _secrets_in(inner, is_named=is_named)
    elif is_named and isinstance(value, (str, bytes)):
        yield value if isinstance(value, str) else value.decode(errors="replace")


def _reason(error: BaseException) -> str:
    """Return the message of an error and of its causes."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return message if error.__cause__ is None else f"{message}, from {_reason(error.__cause__)}"


# ---------------------------------------------------------------- writing
#
# S3 is spoken through the calls of s3fs's client, since fsspec has no words for conditions, checksums and uploads that
# are open. Of other stores we rely on less: what `put_file` writes appears whole (as it does on Google's and Azure's
# stores and in memory); where it does not, an object is written under another name and moved.


_PART_BYTES = 8 << 20  # S3 takes no part below 5 MiB but the last one
_MOST_PARTS = 10_000
_PARTS_AT_ONCE = 4
_WHOLE_AT_ONCE = frozenset({"gs", "gcs", "az", "abfs", "abfss", "hf", "memory"})
_S3 = frozenset({"s3", "s3a"})
_READ_ONLY = frozenset({*_HTTP, "github", "zip", "tar", "data", "reference", "git"})
_CHECKSUM = "datamat-xxh3"
_IDENTITIES = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "created")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredObject:
    """What a store says of an object.

    Attributes:
        num_bytes: its size.
        identity: what changes whenever it is written: ETag, generation or time; "" where the store has nothing.
        checksum: the checksum that `ObjectStore` gave it, which the store keeps beside it; "" where it has none.
    """

    num_bytes: int
    identity: str
    checksum: str = ""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ObjectStore:
    """A folder in a store, written object by object. It holds nothing that is open, and can be pickled.

    Attributes:
        url: URL of the folder, `SCHEME://PLACE`.
        options: options for fsspec, often credentials, and therefore not part of the repr.

    Raises:
        OptionError: it cannot be written, or the URL holds a password.
    """

    url: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        scheme, _, place = self.url.partition("://")
        if "::" in scheme:
            raise OptionError(f"{self.url} is a chain of filesystems; want the URL of a folder, as in s3://bucket/out")
        if self.scheme in _READ_ONLY:
            raise OptionError(f"{scheme}:// can be read, not written; give a folder, or a URL such as s3://bucket/out")
        if re.match(r"[^/]*:[^/]*@", place) or "?" in place:
            raise OptionError(
                f"a {scheme}:// URL holds a password or a signature, which would end in logs and manifests; "
                "give them in storage_options={...}, or by the environment"
            )
        if not place.strip("/"):
            raise OptionError(f"{self.url} names no folder; want a URL such as {scheme}://bucket/out")

    @property
    def scheme(self) -> str:
        """The scheme of the URL, in small letters."""
        return self.url.partition("://")[0].lower()

    def url_of(self, name: str) -> str:
        """Return the URL of an object of the folder."""
        return f"{self.url.rstrip('/')}/{name}"

    # ------------------------------------------------------------ requests

    def head(self, name: str, *, most_tries: int = _MOST_TRIES) -> StoredObject | None:
        """Return what the store says of an object; None where there is none."""
        with self._explained(name, "cannot be examined"):
            return retried(lambda: self._head(name), most_tries=most_tries)

    def _head(self, name: str) -> StoredObject | None:
        filesystem, path = self._open(name)
        try:
            if self._is_s3:
                found = filesystem.call_s3("head_object", **self._place(path))
                identity = str(found.get("ETag", "")).strip('"')
                return StoredObject(int(found["ContentLength"]), identity, found.get("Metadata", {}).get(_CHECKSUM, ""))
            filesystem.invalidate_cache()
            info = filesystem.info(path)
        except FileNotFoundError as error:
            if _status(error)[1] == "NoSuchBucket":
                raise
            return None
        if info["type"] != "file":
            return None
        identity = next((str(info[key]) for key in _IDENTITIES if info.get(key)), "")
        return StoredObject(int(info["size"]), identity.strip('"'))

    def get(self, name: str, *, most_tries: int = _MOST_TRIES) -> bytes | None:
        """Return the content of a small object; None where there is none."""
        with self._explained(name, "cannot be read"):
            return retried(lambda: self._get(name), most_tries=most_tries)

    def _get(self, name: str) -> bytes | None:
        filesystem, path = self._open(name)
        try:
            if not self._is_s3:
                filesystem.invalidate_cache()
                content: bytes = filesystem.cat_file(path)
                return content
            # Not `cat_file`, which reports a bucket that is not there as an object that is not there.
            found = filesystem.call_s3("get_object", **self._place(path))
            return self._body(filesystem, found)
        except FileNotFoundError as error:
            if _status(error)[1] == "NoSuchBucket":
                raise
            return None

    @staticmethod
    def _body(filesystem: Any, found: Mapping[str, Any]) -> bytes:
        from fsspec.asyn import sync

        async def read() -> bytes:
            async with found["Body"] as body:
                content: bytes = await body.read()
                return content

        content: bytes = sync(filesystem.loop, read)
        return content

    def put(self, name: str, content: bytes) -> StoredObject:
        """Write a small object whole; what was there under its name is replaced."""
        with self._explained(name, "cannot be written"):
            return retried(lambda: self._put(name, content, {}))

    def _put(self, name: str, content: bytes, more: Mapping[str, Any]) -> StoredObject:
        filesystem, path = self._open(name)
        if not self._is_s3:
            filesystem.pipe_file(path, content)
            found = self._head(name)
            if found is None or found.num_bytes != len(content):
                raise OSError(errno.EIO, f"{self.url_of(name)} is not there as it was written")
            return found
        made = hashlib.md5(content, usedforsecurity=False)
        found = filesystem.call_s3(
            "put_object", **self._place(path), Body=content, ContentMD5=_base64(made.digest()), **more
        )
        return StoredObject(len(content), str(found["ETag"]).strip('"'))

    def upload(self, path: str | os.PathLike[str], name: str, checksum: str) -> StoredObject:
        """Write a file as an object, which appears whole, unless it is there already.

        Args:
            path: path of the file, which nobody changes meanwhile.
            name: name of the object.
            checksum: checksum of the content, which the store keeps with the object where it can.

        Raises:
            OutputError: the store refuses it, or has something else than what was sent.
        """
        size = os.stat(path).st_size
        before = self.head(name)
        if before is not None and checksum and (before.num_bytes, before.checksum) == (size, checksum):
            return before
        with self._explained(name, "cannot be written"):
            if not self._is_s3:
                return retried(lambda: self._put_file(path, name, size))
            return self._upload_s3(os.fspath(path), name, size, checksum, before)

    def _put_file(self, path: str | os.PathLike[str], name: str, size: int) -> StoredObject:
        filesystem, target = self._open(name)
        parent = target.rpartition("/")[0]
        if self.scheme in _WHOLE_AT_ONCE:
            if self.scheme == "memory":
                filesystem.makedirs(parent, exist_ok=True)
            filesystem.put_file(os.fspath(path), target)
        else:
            filesystem.makedirs(parent, exist_ok=True)
            aside = f"{parent}/.{target.rpartition('/')[2]}.{os.getpid()}.tmp"
            filesystem.put_file(os.fspath(path), aside)
            filesystem.mv(aside, target)
        found = self._head(name)
        if found is None or found.num_bytes != size:
            raise OSError(errno.EIO, f"{self.url_of(name)} is not there as it was written")
        return found

    # ------------------------------------------------------------ S3

    def _upload_s3(self, path: str, name: str, size: int, checksum: str, before: StoredObject | None) -> StoredObject:
        # Whoever completes an object that has changed since it was looked at is told so, instead of replacing it.
        condition = {"IfNoneMatch": "*"} if before is None else {"IfMatch": f'"{before.identity}"'}
        kept = {"Metadata": {_CHECKSUM: checksum}}
        try:
            if size <= _PART_BYTES:
                with open(path, "rb") as file:
                    content = file.read()
                retried(lambda: self._conditional(lambda more: self._put(name, content, {**kept, **more}), condition))
                identity = hashlib.md5(content, usedforsecurity=False).hexdigest()
            else:
                identity = self._upload_parts(path, name, size, kept, condition)
        except OSError as error:
            if _status(error)[0] not in {404, 412}:
                raise
            # Somebody was faster: another try of ours whose answer was lost, or a worker that was taken for dead.
            identity = ""
        found = self.head(name)
        if found is None or (found.num_bytes, found.checksum) != (size, checksum):
            raise OutputError(
                f"{self.url_of(name)} holds {found or 'nothing'} where {size} bytes with the checksum {checksum} were "
                "sent; something else writes there: end that, and run again"
            )
        if _are_comparable(found.identity, identity) and found.identity != identity:
            raise OutputError(
                f"{self.url_of(name)} has the ETag {found.identity}, what was sent has {identity}: it was damaged on "
                "its way; delete the object, and run again"
            )
        return found

    @staticmethod
    def _conditional(call: Callable[[Mapping[str, Any]], Result], condition: Mapping[str, Any]) -> Result:
        """Return what a call returns that is made on a condition, or without one where the store has none."""
        try:
            return call(condition)
        except OSError as error:
            if _status(error)[0] != 501 and _status(error)[1] != "NotImplemented":
                raise
            return call({})

    def _upload_parts(
        self, path: str, name: str, size: int, kept: Mapping[str, Any], condition: Mapping[str, Any]
    ) -> str:
        """Upload a file in parts and complete it; return the ETag that it should have."""
        filesystem, target = self._open(name)
        place = self._place(target)
        part_bytes = max(_PART_BYTES, math.ceil(size / _MOST_PARTS))
        numbers = range(math.ceil(size / part_bytes))
        upload = retried(lambda: filesystem.call_s3("create_multipart_upload", **place, **kept))["UploadId"]
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

        def send(number: int) -> bytes:
            content = os.pread(descriptor, part_bytes, number * part_bytes)
            made = hashlib.md5(content, usedforsecurity=False).digest()
            more = {"UploadId": upload, "PartNumber": number + 1, "ContentMD5": _base64(made)}
            answer = retried(lambda: filesystem.call_s3("upload_part", **place, **more, Body=content))
            tags[number] = answer["ETag"]
            return made

        tags = [""] * len(numbers)
        try:
            with concurrent.futures.ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
                digests = list(pool.map(send, numbers))
            parts = [{"PartNumber": number + 1, "ETag": tag} for number, tag in enumerate(tags)]
            call = {**place, "UploadId": upload, "MultipartUpload": {"Parts": parts}}
            retried(
                lambda: self._conditional(
                    lambda more: filesystem.call_s3("complete_multipart_upload", **call, **more), condition
                )
            )
        except BaseException:
            with contextlib.suppress(Exception):
                retried(lambda: filesystem.call_s3("abort_multipart_upload", **place, UploadId=upload))
            raise
        finally:
            os.close(descriptor)
        together = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
        return f"{together}-{len(numbers)}"

    def end_uploads(self) -> int:
        """End the uploads that killed processes have left open below the folder; return their number.

        They cost room and are in no listing of objects. Nothing is relied upon here: what the store does not list now
        is ended another time, or by a lifecycle rule of the bucket.
        """
        if not self._is_s3:
            return 0
        filesystem, path = self._open("")
        place = self._place(path)
        prefix, ended = f"{place.pop('Key').rstrip('/')}/", 0
        with self._explained("", "cannot list its open uploads"):
            try:
                found = retried(lambda: filesystem.call_s3("list_multipart_uploads", **place, Prefix=prefix))
            except OSError as error:
                if _status(error)[0] != 501:
                    raise
                return 0  # this store cannot say
        for upload in found.get("Uploads") or ():
            call = {**place, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            with contextlib.suppress(FileNotFoundError), self._explained("", "cannot end an open upload"):
                retried(lambda call=call: filesystem.call_s3("abort_multipart_upload", **call))  # type: ignore[misc]
                ended += 1
        return ended

    # ------------------------------------------------------------ names

    def copy(self, name: str, target: str) -> None:
        """Copy an object within the store, which moves no byte through this machine."""
        with self._explained(target, "cannot be copied"):
            filesystem, path = self._open(name)
            other = self._open(target)[1]
            retried(lambda: filesystem.cp_file(path, other))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, as far as they are there."""
        for name in names:
            with self._explained(name, "cannot be deleted"), contextlib.suppress(FileNotFoundError):
                retried(lambda name=name: self._delete(name))  # type: ignore[misc]

    def _delete(self, name: str) -> None:
        filesystem, path = self._open(name)
        if self._is_s3:
            filesystem.call_s3("delete_object", **self._place(path))
        else:
            filesystem.rm_file(path)

    # ------------------------------------------------------------ filesystem

    @property
    def _is_s3(self) -> bool:
        return self.scheme in _S3

    def _open(self, name: str) -> tuple[Any, str]:
        options = dict(self.options)
        if self._is_s3:  # we repeat requests ourselves: both would wait for minutes
            config = dict(options.get("config_kwargs") or {})
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **config}
        filesystem, path = open_filesystem(self.url_of(name), options)
        return filesystem, path

    @staticmethod
    def _place(path: str) -> dict[str, str]:
        bucket, _, key = path.partition("/")
        return {"Bucket": bucket, "Key": key}

    @contextlib.contextmanager
    def _explained(self, name: str, problem: str) -> Iterator[None]:
        try:
            yield
        except DatamatError:
            raise
        except Exception as error:  # noqa: BLE001 -- each filesystem raises what the client below it does
            self._raise(error, name, problem)

    def _raise(self, error: Exception, name: str, problem: str) -> NoReturn:
        reason = _reason(error)
        shown = without_secrets(reason, self.options)
        status, code = _status(error)
        if isinstance(error, PermissionError) or status in {401, 403} or type(error).__name__ == "NoCredentialsError":
            remedy = "give storage_options, or an environment, whose credentials may read and write there"
        elif code == "NoSuchBucket" or isinstance(error, FileNotFoundError):
            remedy = "make the bucket, or correct the URL"
        else:
            remedy = "check the address, the network and storage_options, and run again to resume"
        # An error that names a secret is not carried along: its traceback would show it.
        raise OutputError(f"{self.url_of(name)} {problem}: {shown}; {remedy}") from (error if shown == reason else None)


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _are_comparable(one: str, other: str) -> bool:
    """Return whether two ETags are made alike: of the whole, or of its parts. A store that encrypts has others."""
    forms = [re.fullmatch(r"[0-9a-f]{32}(-\d+)?", tag) for tag in (one, other)]
    return all(forms) and ("-" in one) == ("-" in other)
