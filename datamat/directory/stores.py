"""Object stores and other places behind URLs, written whole object by whole object.

    a file ──> parts, several at once, each with its MD5 ──> completed once, on a condition ──> size and digest compared

An object is visible whole or not at all. Requests are made again as in `remote`; a refusal (403, 404, no such bucket)
is reported at once.
"""

from __future__ import annotations

import abc
import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import errno
import hashlib
import itertools
import json
import math
import os
import re
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, final

from datamat.directory.files import WORK
from datamat.errors import DatamatError, OptionError, OutputError, count_of
from datamat.folders.other import open_filesystem
from datamat.folders.retries import reason_of, retried, status_of
from datamat.folders.urls import redacted
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


__all__ = ["STAGED", "ObjectStore", "StoredObject"]

STAGED = f"{WORK}/uploads"
"""Folder in which Google's store has what is to replace an object, for as long as that takes, or after a kill."""

Result = TypeVar("Result")

# ---------------------------------------------------------------- writing
#
# S3 and the stores of Google and Azure are spoken through the calls of their drivers' clients, since fsspec has no
# words for conditions, checksums and uploads in parts. Of other stores we rely on less: what `put_file` writes
# appears whole (as it does in memory); where it does not, an object is written under another name and moved.


_PART_BYTES = 8 << 20
_MOST_PARTS = 10_000
_PARTS_AT_ONCE = 4
_BLOCK_BYTES = 1 << 20
_ATTEMPTS = 3
_COPY_POLL_S = 0.2
_WHOLE_AT_ONCE = frozenset({"hf", "memory"})
_S3 = frozenset({"s3", "s3a"})
_GOOGLE = frozenset({"gs", "gcs"})
_AZURE = frozenset({"az", "abfs", "abfss"})
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_READ_ONLY = frozenset({"http", "https", "github", "zip", "tar", "data", "reference", "git"})
_CHECKSUM = "datamat-xxh3"
_IDENTITIES = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "created")


@frozen()
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
@frozen()
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

    @property
    def keeps_conditions(self) -> bool:
        """Whether `create` is known to work in such stores; `check_conditions` finds out about one."""
        return self._is_s3 or self.scheme in _GOOGLE | _AZURE

    def url_of(self, name: str) -> str:
        """Return the URL of an object of the folder."""
        return f"{self.url.rstrip('/')}/{name}"

    # ------------------------------------------------------------ requests

    def head(self, name: str) -> StoredObject | None:
        """Return what the store says of an object; None where there is none."""
        with self._explained(name, "cannot be examined"):
            return retried(lambda: self._head(name))

    def _head(self, name: str) -> StoredObject | None:
        filesystem, path = self._open(name)
        try:
            if self._is_s3:
                found = filesystem.call_s3("head_object", **self._place(path))
                identity = str(found.get("ETag", "")).strip('"')
                return StoredObject(int(found["ContentLength"]), identity, found.get("Metadata", {}).get(_CHECKSUM, ""))
            return self._requests(filesystem).head(path)[0]
        except FileNotFoundError as error:
            if status_of(error)[1] in _NO_BUCKET:
                raise
            return None

    def get(self, name: str) -> bytes | None:
        """Return the content of a small object; None where there is none."""
        with self._explained(name, "cannot be read"):
            return retried(lambda: self._get(name))

    def _get(self, name: str) -> bytes | None:
        filesystem, path = self._open(name)
        try:
            if not self._is_s3:
                return self._requests(filesystem).get(path)
            # Not `cat_file`, which reports a bucket that is not there as an object that is not there.
            found = filesystem.call_s3("get_object", **self._place(path))
            return self._body(filesystem, found)
        except FileNotFoundError as error:
            if status_of(error)[1] in _NO_BUCKET:
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

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object where there is none of its name; return whether this call did, and no other.

        Args:
            name: name of the object.
            content: what only this caller writes: by it, an object of its own is known whose answer was lost.

        Raises:
            OptionError: the store grants a name to more than one.
        """
        if not self.keeps_conditions:
            raise self._without_conditions()
        with self._explained(name, "cannot be written"):
            try:
                retried(lambda: self._create(name, content))
            except FileExistsError:
                pass
            except OSError as error:
                status, code = status_of(error)
                if status == 501 or code == "NotImplemented":
                    raise self._without_conditions() from error
                if status not in {409, 412}:
                    raise
            else:
                return True
        return self.get(name) == content

    def _create(self, name: str, content: bytes) -> None:
        if self._is_s3:
            self._put(name, content, {"IfNoneMatch": "*"})
        else:
            filesystem, path = self._open(name)
            self._requests(filesystem).create(path, content)

    def check_conditions(self, name: str) -> None:
        """Refuse a store in which `create` grants a name twice: some take a condition, and ignore it.

        Args:
            name: name of an object for this test alone, which stays. Others may make and delete it meanwhile.

        Raises:
            OptionError: it is such a store, or not known to be another.
        """
        for _ in range(_ATTEMPTS):  # whoever deletes it in between makes a store seem worse than it is
            self.create(name, uuid.uuid4().bytes)
            if not self.create(name, uuid.uuid4().bytes):
                return
        self.delete([name])
        raise self._without_conditions()

    def _without_conditions(self) -> OptionError:
        return OptionError(
            f"{self.url} is in a store that is not known to keep conditions (If-None-Match: *), by which tasks share "
            "an output; call run() without task_index, or give the tasks a folder on a shared file system"
        )

    def listed(self, folder: str) -> dict[str, str]:
        """Return the objects below a folder by their names in it, each with its identity, as far as it lists them."""
        with self._explained(folder, "cannot be listed"):
            filesystem, path = self._open(folder)
            requests = _Other(filesystem) if self._is_s3 else self._requests(filesystem)
            return {name: entry.identity for name, entry in sorted(retried(lambda: requests.entries(path)).items())}

    def ages(self, folder: str) -> dict[str, float]:
        """Return how many seconds ago each object below a folder was written, by the clock of the store alone.

        It is empty where the store is not known to keep conditions: tasks share nothing there.
        """
        filesystem, path = self._open(folder)
        if not self._is_s3:
            with self._explained(folder, "cannot be listed"):
                entries = retried(lambda: self._requests(filesystem).entries(path))
                return {name: entry.age_s for name, entry in entries.items() if entry.age_s is not None}
        place = self._place(path)
        prefix = f"{place.pop('Key').rstrip('/')}/"
        found: dict[str, float] = {}
        with self._explained(folder, "cannot be listed"):
            more: dict[str, str] = {}
            while True:
                call = {**place, "Prefix": prefix, **more}
                listed = retried(lambda call=call: filesystem.call_s3("list_objects_v2", **call))  # type: ignore[misc]
                now = _time_of(listed["ResponseMetadata"]["HTTPHeaders"]["date"])
                for one in listed.get("Contents") or ():
                    found[one["Key"][len(prefix) :]] = (now - one["LastModified"]).total_seconds()
                if not listed.get("IsTruncated"):
                    return found
                more = {"ContinuationToken": listed["NextContinuationToken"]}

    def _put(self, name: str, content: bytes, more: Mapping[str, Any]) -> StoredObject:
        filesystem, path = self._open(name)
        if not self._is_s3:
            return self._requests(filesystem).put(path, content)
        made = hashlib.md5(content, usedforsecurity=False)
        found = filesystem.call_s3(
            "put_object", **self._place(path), Body=content, ContentMD5=_base64(made.digest()), **more
        )
        return StoredObject(len(content), str(found["ETag"]).strip('"'))

    def upload(
        self,
        path: str | os.PathLike[str],
        name: str,
        checksum: str,
        *,
        replaces: str | None = None,
        check: Callable[[], object] | None = None,
    ) -> StoredObject:
        """Write a file as an object, which appears whole, unless it is there already.

        Args:
            path: path of the file, which nobody changes meanwhile.
            name: name of the object.
            checksum: checksum of the content, which the store keeps with the object where it can.
            replaces: identity of the only object that it may replace, "" for none; None for whatever is there.
            check: raises where nothing may be written; called once it is known what is there, as whatever comes there
                later is not replaced.

        Raises:
            OutputError: the store refuses it, or has something else than what was sent, or than may be replaced.
        """
        size = os.stat(path).st_size
        before = self.head(name)
        if before is not None and checksum and (before.num_bytes, before.checksum) == (size, checksum):
            return before
        if replaces is not None and replaces != ("" if before is None else before.identity):
            raise self._other_there(name, before, size, checksum)
        if check is not None:
            check()
        with self._explained(name, "cannot be written"):
            if not self._is_s3:
                return self._upload(os.fspath(path), name, checksum, before)
            return self._upload_s3(os.fspath(path), name, checksum, before)

    def _upload(self, path: str, name: str, checksum: str, before: StoredObject | None) -> StoredObject:
        filesystem, target = self._open(name)
        requests = self._requests(filesystem)
        staged = self._open(f"{STAGED}/{uuid.uuid4().hex}")[1]
        sent = requests.upload(_Upload(path, target, checksum, before, staged))
        try:
            found, there = retried(lambda: requests.head(target))
        except FileNotFoundError:
            found, there = None, ""
        size = os.stat(path).st_size
        if found is None or found.num_bytes != size or found.checksum not in {"", checksum}:
            raise self._other_there(name, found, size, checksum)
        if sent and there and sent != there:
            raise OutputError(
                f"{self.url_of(name)} has the {requests.digest} {there}, what was sent has {sent}: it was damaged on "
                "its way; delete the object, and run again"
            )
        return found

    def _other_there(self, name: str, found: StoredObject | None, size: int, checksum: str) -> OutputError:
        return OutputError(
            f"{self.url_of(name)} holds {found or 'nothing'} where {count_of(size, 'byte')} with the checksum "
            f"{checksum} belong; "
            "something else writes there: end that, and run again"
        )

    # ------------------------------------------------------------ S3

    def _upload_s3(self, path: str, name: str, checksum: str, before: StoredObject | None) -> StoredObject:
        # Whoever completes an object that has changed since it was looked at is told so, instead of replacing it.
        size = os.stat(path).st_size
        condition = {"IfNoneMatch": "*"} if before is None else {"IfMatch": f'"{before.identity}"'}
        kept = {"Metadata": {_CHECKSUM: checksum}}
        try:
            if size <= _PART_BYTES:
                with open(path, "rb") as file:
                    content = file.read()
                retried(lambda: self._conditional(lambda more: self._put(name, content, {**kept, **more}), condition))
                identity = hashlib.md5(content, usedforsecurity=False).hexdigest()
            else:
                identity = self._upload_parts(path, name, kept, condition)
        except OSError as error:
            if status_of(error)[0] not in {404, 412}:
                raise
            # Somebody was faster: another try of ours whose answer was lost, or a worker that was taken for dead.
            identity = ""
        found = self.head(name)
        if found is None or (found.num_bytes, found.checksum) != (size, checksum):
            raise self._other_there(name, found, size, checksum)
        is_as_sent = found.identity == identity or not _are_comparable(found.identity, identity)
        if not is_as_sent and self._has_md5_tags(name):
            raise OutputError(
                f"{self.url_of(name)} has the ETag {found.identity}, what was sent has {identity}: it was damaged on "
                "its way; delete the object, and run again"
            )
        return found

    def _has_md5_tags(self, name: str) -> bool:
        """Return whether the ETag of an object is made of MD5s: not where the store encrypts it with a key of KMS."""
        filesystem, path = self._open(name)
        found = retried(lambda: filesystem.call_s3("head_object", **self._place(path)))
        is_encrypted = str(found.get("ServerSideEncryption", "")).startswith("aws:kms")
        return not is_encrypted and not found.get("SSECustomerAlgorithm")

    @staticmethod
    def _conditional(call: Callable[[Mapping[str, Any]], Result], condition: Mapping[str, Any]) -> Result:
        """Return what a call returns that is made on a condition, or without one where the store has none."""
        try:
            return call(condition)
        except OSError as error:
            if status_of(error)[0] != 501 and status_of(error)[1] != "NotImplemented":
                raise
            return call({})

    def _upload_parts(self, path: str, name: str, kept: Mapping[str, Any], condition: Mapping[str, Any]) -> str:
        """Upload a file in parts and complete it; return the ETag that it should have."""
        filesystem, target = self._open(name)
        place = self._place(target)
        upload = retried(lambda: filesystem.call_s3("create_multipart_upload", **place, **kept))["UploadId"]
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

        def send(number: int, part: _UploadRange) -> tuple[bytes, str]:
            content = os.pread(descriptor, part.num_bytes, part.start)
            made = hashlib.md5(content, usedforsecurity=False).digest()
            call = {**place, "UploadId": upload, "PartNumber": number, "ContentMD5": _base64(made)}
            return made, retried(lambda: filesystem.call_s3("upload_part", **call, Body=content))["ETag"]

        try:
            with concurrent.futures.ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
                sent = list(pool.map(send, itertools.count(1), _ranges(os.fstat(descriptor).st_size)))
            parts = [{"PartNumber": number, "ETag": tag} for number, (_, tag) in enumerate(sent, 1)]
            call = {**place, "UploadId": upload, "MultipartUpload": {"Parts": parts}}
            retried(
                lambda: self._conditional(
                    lambda more: filesystem.call_s3("complete_multipart_upload", **call, **more), condition
                )
            )
        except BaseException:
            with contextlib.suppress(Exception):  # what stays, as after a kill, is for the bucket's lifecycle rule
                retried(lambda: filesystem.call_s3("abort_multipart_upload", **place, UploadId=upload))
            raise
        finally:
            os.close(descriptor)
        together = hashlib.md5(b"".join(made for made, _ in sent), usedforsecurity=False).hexdigest()
        return f"{together}-{len(sent)}"

    # ------------------------------------------------------------ names

    def copy(self, name: str, target: str) -> None:
        """Copy an object within the store, which moves no byte through this machine."""
        with self._explained(target, "cannot be copied"):
            filesystem, path = self._open(name)
            other = self._open(target)[1]
            if self._is_s3:
                retried(lambda: filesystem.cp_file(path, other))
            else:
                retried(lambda: self._requests(filesystem).copy(path, other))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, as far as they are there."""
        for name in names:
            with self._explained(name, "cannot be deleted"), contextlib.suppress(FileNotFoundError):
                retried(lambda name=name: self._delete(name))  # type: ignore[misc]

    def delete_known(self, name: str, identity: str) -> None:
        """Delete an object, unless it is gone, or another one than it was: where the store keeps such a condition.

        Args:
            name: name of the object.
            identity: identity of the object that is meant; "" for whatever is there.
        """
        with self._explained(name, "cannot be deleted"):
            try:
                retried(lambda: self._delete(name, identity))
            except (FileNotFoundError, FileExistsError):
                return
            except OSError as error:
                if status_of(error)[0] != 412:
                    raise

    def _delete(self, name: str, identity: str = "") -> None:
        filesystem, path = self._open(name)
        if not self._is_s3:
            self._requests(filesystem).delete(path, identity)
            return
        condition = {"IfMatch": f'"{identity}"'} if identity else {}
        self._conditional(lambda more: filesystem.call_s3("delete_object", **self._place(path), **more), condition)

    # ------------------------------------------------------------ filesystem

    @property
    def _is_s3(self) -> bool:
        return self.scheme in _S3

    def _open(self, name: str) -> tuple[Any, str]:
        filesystem, path = open_filesystem(self.url_of(name), self.options)
        return filesystem, path

    def _requests(self, filesystem: Any) -> _Requests:
        if self.scheme in _GOOGLE:
            return _Google(filesystem)
        return (
            _Azure(filesystem) if self.scheme in _AZURE else _Other(filesystem, is_whole=self.scheme in _WHOLE_AT_ONCE)
        )

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
        reason = reason_of(error)
        shown = redacted(reason, self.url, self.options)
        status, code = status_of(error)
        if isinstance(error, PermissionError) or status in {401, 403} or type(error).__name__ == "NoCredentialsError":
            remedy = "give storage_options, or an environment, whose credentials may read and write there"
        elif code in _NO_BUCKET or isinstance(error, FileNotFoundError):
            remedy = "make the bucket, or correct the URL"
        else:
            remedy = "check the address, the network and storage_options, and run again to resume"
        # An error that names a secret is not carried along: its traceback would show it.
        raise OutputError(f"{self.url_of(name)} {problem}: {shown}; {remedy}") from (error if shown == reason else None)


# ---------------------------------------------------------------- stores other than S3


class _Upload(NamedTuple):
    """A file on its way into a store.

    Attributes:
        file: path of the file.
        target: path of the object.
        checksum: checksum that the store keeps beside it.
        before: what the store had under its name, and may replace; None for nothing.
        staged: path under which this upload alone writes.
    """

    file: str
    target: str
    checksum: str
    before: StoredObject | None
    staged: str


class _ListedObject(NamedTuple):
    """What a listing says of an object: its identity, and how long ago it was written by the clock of the store."""

    identity: str
    age_s: float | None = None


class _Requests(abc.ABC):
    """What a store is asked. Each call but `upload` is a request or two, and is made once: the caller repeats it.

    Attributes:
        digest: name of the digest by which the store knows the content of an object.

    Raises:
        FileNotFoundError: there is no such object, or no such bucket.
        FileExistsError: a condition does not hold.
    """

    digest = ""

    @abc.abstractmethod
    def head(self, path: str) -> tuple[StoredObject, str]:
        """Return what the store says of an object, and its digest: "" where the store has none."""

    @abc.abstractmethod
    def get(self, path: str) -> bytes:
        """Return the content of a small object."""

    @abc.abstractmethod
    def put(self, path: str, content: bytes) -> StoredObject:
        """Write a small object, compared with what the store then has."""

    @abc.abstractmethod
    def create(self, path: str, content: bytes) -> None:
        """Write a small object where there is none."""

    @abc.abstractmethod
    def upload(self, task: _Upload) -> str:
        """Write a file as an object; return the digest that the store should have of it, "" for none.

        Whoever was faster is left alone: the caller looks at what is there then.
        """

    @abc.abstractmethod
    def copy(self, path: str, target: str) -> None:
        """Copy an object, with its checksum."""

    @abc.abstractmethod
    def delete(self, path: str, identity: str = "") -> None:
        """Delete an object, on the condition that it has this identity unless that is ""."""

    @abc.abstractmethod
    def entries(self, path: str) -> dict[str, _ListedObject]:
        """Return the objects below a folder, by their names in it."""


@final
class _Other(_Requests):
    """A store of which nothing is known but what fsspec says.

    Args:
        filesystem: its filesystem.
        is_whole: whether what is written under a name appears whole.
    """

    def __init__(self, filesystem: Any, *, is_whole: bool = False) -> None:
        self._filesystem = filesystem
        self._is_whole = is_whole

    def head(self, path: str) -> tuple[StoredObject, str]:
        self._filesystem.invalidate_cache()
        info = self._filesystem.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return StoredObject(int(info["size"]), _identity(info)), ""

    def get(self, path: str) -> bytes:
        self._filesystem.invalidate_cache()
        content: bytes = self._filesystem.cat_file(path)
        return content

    def put(self, path: str, content: bytes) -> StoredObject:
        self._filesystem.pipe_file(path, content)
        return _as_written(path, self.head(path), len(content))

    def create(self, path: str, content: bytes) -> None:
        self._filesystem.pipe_file(path, content, mode="create")

    def upload(self, task: _Upload) -> str:
        retried(lambda: self._put_file(task))
        return ""

    def _put_file(self, task: _Upload) -> None:
        parent, _, name = task.target.rpartition("/")
        self._filesystem.makedirs(parent, exist_ok=True)
        if self._is_whole:
            self._filesystem.put_file(task.file, task.target)
        else:
            aside = f"{parent}/.{name}.{os.getpid()}.tmp"
            self._filesystem.put_file(task.file, aside)
            self._filesystem.mv(aside, task.target)
        _as_written(task.target, self.head(task.target), os.stat(task.file).st_size)

    def copy(self, path: str, target: str) -> None:
        self._filesystem.cp_file(path, target)

    def delete(self, path: str, identity: str = "") -> None:
        if identity and self.head(path)[0].identity != identity:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._filesystem.rm_file(path)

    def entries(self, path: str) -> dict[str, _ListedObject]:
        self._filesystem.invalidate_cache()
        try:
            found = self._filesystem.find(path, detail=True)
        except FileNotFoundError:
            return {}
        place = len(path.rstrip("/")) + 1
        names = {str(one)[place:]: _ListedObject(_identity(info)) for one, info in found.items()}
        names.pop("", None)  # the folder itself, if it came to be between two requests of s3fs
        return names


@final
class _Google(_Requests):
    """Google Cloud Storage, by the calls of gcsfs, which repeats each request itself, too.

    gcsfs has no condition for what replaces an object: that is uploaded beside it, and `compose` puts it in its place.
    """

    digest = "CRC32C"

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def head(self, path: str) -> tuple[StoredObject, str]:
        bucket, _, name = path.partition("/")
        found = self._filesystem.call("GET", "b/{}/o/{}", bucket, name, json_out=True)
        checksum = found.get("metadata", {}).get(_CHECKSUM, "")
        return StoredObject(int(found["size"]), str(found["generation"]), checksum), found.get("crc32c", "")

    def get(self, path: str) -> bytes:
        content: bytes = self._filesystem.cat_file(path)
        return content

    def put(self, path: str, content: bytes) -> StoredObject:
        self._filesystem.pipe_file(path, content)
        return _as_written(path, self.head(path), len(content), _crc32c([content]))

    def create(self, path: str, content: bytes) -> None:
        self._filesystem.pipe_file(path, content, mode="create")

    def upload(self, task: _Upload) -> str:
        sent = _crc32c(_blocks(task.file))
        kept = {_CHECKSUM: task.checksum}
        with contextlib.suppress(FileExistsError):
            if task.before is None:
                retried(lambda: self._put_file(task.file, task.target, metadata=kept, mode="create"))
            else:
                self._replace(task, kept, task.before.identity)
        return sent

    def _put_file(self, path: str, target: str, **more: Any) -> None:
        try:
            self._filesystem.put_file(path, target, **more)
        except (
            FileNotFoundError
        ) as error:  # the bucket was there a moment ago: what is gone is the session of the upload
            raise ConnectionResetError(f"the upload has been given up by the store: {error}") from None

    def _replace(self, task: _Upload, kept: Mapping[str, str], generation: str) -> None:
        """Put an object where the store has one of a generation."""
        try:
            retried(lambda: self._put_file(task.file, task.staged))
            retried(lambda: self._compose(task.staged, task.target, kept, generation))
        finally:
            with contextlib.suppress(Exception):  # what stays is in the way of nobody; the next run deletes it
                self._filesystem.rm_file(task.staged)

    def _compose(self, staged: str, path: str, metadata: Mapping[str, str], generation: str) -> None:
        bucket, _, name = path.partition("/")
        self._filesystem.call(
            "POST",
            "b/{}/o/{}/compose",
            bucket,
            name,
            headers={"Content-Type": "application/json"},
            json={
                "sourceObjects": [{"name": staged.partition("/")[2]}],
                "destination": {"contentType": "application/octet-stream", "metadata": dict(metadata)},
            },
            ifGenerationMatch=generation,
        )

    def copy(self, path: str, target: str) -> None:
        self._filesystem.cp_file(path, target)

    def delete(self, path: str, identity: str = "") -> None:
        bucket, _, name = path.partition("/")
        condition = {"ifGenerationMatch": identity} if identity else {}
        try:
            self._filesystem.call("DELETE", "b/{}/o/{}", bucket, name, **condition)
        finally:
            self._filesystem.invalidate_cache()

    def entries(self, path: str) -> dict[str, _ListedObject]:
        bucket, _, prefix = f"{path.rstrip('/')}/".partition("/")
        found: dict[str, _ListedObject] = {}
        page: str | None = None
        while True:
            headers, content = self._filesystem.call("GET", "b/{}/o", bucket, prefix=prefix, pageToken=page)
            now = _time_of(headers["Date"])
            listed = json.loads(content)
            for one in listed.get("items") or ():
                age = now - datetime.datetime.fromisoformat(one["updated"])
                found[one["name"][len(prefix) :]] = _ListedObject(str(one["generation"]), age.total_seconds())
            if not (page := listed.get("nextPageToken")):
                return found


@final
class _Azure(_Requests):
    """Azure Blob Storage, by the client of adlfs, without its own repetitions, which begin after 15 seconds.

    A file is sent in blocks, which Azure keeps for a week without showing them, until their list is committed. Each is
    named after its content: whoever uploads the same file at once sends the same blocks.
    """

    digest = "MD5"
    _CHECKSUM = "datamat_xxh3"  # a name with a hyphen is none there

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def head(self, path: str) -> tuple[StoredObject, str]:
        found = self._call(path, "get_blob_properties")
        checksum = (found.metadata or {}).get(self._CHECKSUM, "")
        return StoredObject(found.size, found.etag.strip('"'), checksum), _hex(found.content_settings.content_md5)

    def get(self, path: str) -> bytes:
        async def read(blob: Any) -> bytes:
            content: bytes = await (await blob.download_blob(retry_total=0)).readall()
            return content

        content: bytes = self._run(path, read)
        return content

    def put(self, path: str, content: bytes) -> StoredObject:
        found = self._call(path, "upload_blob", content, overwrite=True, validate_content=True)
        return StoredObject(len(content), found["etag"].strip('"'))

    def create(self, path: str, content: bytes) -> None:
        self._call(path, "upload_blob", content, overwrite=False, validate_content=True)

    def upload(self, task: _Upload) -> str:
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock, ContentSettings

        blocks, whole = self._stage(task)
        more: dict[str, Any] = {"match_condition": MatchConditions.IfMissing}
        if task.before is not None:
            more = {"match_condition": MatchConditions.IfNotModified, "etag": f'"{task.before.identity}"'}
        more["metadata"] = {self._CHECKSUM: task.checksum}
        more["content_settings"] = ContentSettings(content_type="application/octet-stream", content_md5=whole.digest())
        listed = [BlobBlock(block) for block in blocks]
        try:
            retried(lambda: self._call(task.target, "commit_block_list", listed, **more))
        except FileExistsError:
            pass
        except Exception as error:
            # Whoever was faster has taken the blocks along.
            if status_of(error)[1] != "InvalidBlockList":
                raise
        return str(whole.hexdigest())

    def _stage(self, task: _Upload) -> tuple[list[str], Any]:
        """Send the blocks of a file; return their names, and the MD5 of all."""
        whole = hashlib.md5(usedforsecurity=False)
        names: list[str] = []
        sent: collections.deque[concurrent.futures.Future[Any]] = collections.deque()

        def send(name: str, content: bytes) -> None:
            retried(lambda: self._call(task.target, "stage_block", name, content, validate_content=True))

        with open(task.file, "rb") as file, concurrent.futures.ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
            for number, part in enumerate(_ranges(os.stat(task.file).st_size)):
                content = os.pread(file.fileno(), part.num_bytes, part.start)
                whole.update(content)
                names.append(f"{number:05d}-{hashlib.md5(content, usedforsecurity=False).hexdigest()}")
                if not content:
                    continue
                if len(sent) == _PARTS_AT_ONCE:  # no more than these in memory
                    sent.popleft().result()
                sent.append(pool.submit(send, names[-1], content))
            for future in sent:
                future.result()
        return names if os.stat(task.file).st_size else [], whole

    def copy(self, path: str, target: str) -> None:
        container, _, name = path.partition("/")
        url = self._filesystem.service_client.get_blob_client(container, name).url
        status = self._call(target, "start_copy_from_url", url)["copy_status"]
        while status == "pending":  # it may take a while, and until then the object is not there
            time.sleep(_COPY_POLL_S)
            status = self._call(target, "get_blob_properties").copy.status
        if status != "success":
            raise OSError(errno.EIO, f"the copy of {path} to {target} has ended as {status}")

    def delete(self, path: str, identity: str = "") -> None:
        from azure.core import MatchConditions

        more = {"match_condition": MatchConditions.IfNotModified, "etag": f'"{identity}"'} if identity else {}
        self._call(path, "delete_blob", **more)

    def entries(self, path: str) -> dict[str, _ListedObject]:
        from fsspec.asyn import sync

        container, _, prefix = f"{path.rstrip('/')}/".partition("/")
        found: dict[str, _ListedObject] = {}
        dates: list[str] = []

        async def listed() -> None:
            async with self._filesystem.service_client.get_container_client(container) as client:
                blobs = client.list_blobs(
                    name_starts_with=prefix,
                    retry_total=0,
                    raw_response_hook=lambda answer: dates.append(answer.http_response.headers["Date"]),
                )
                async for blob in blobs:
                    now = _time_of(dates[-1])
                    age = now - blob.last_modified
                    found[blob.name[len(prefix) :]] = _ListedObject(blob.etag.strip('"'), age.total_seconds())

        sync(self._filesystem.loop, listed)
        return found

    def _call(self, path: str, method: str, *args: Any, **more: Any) -> Any:
        return self._run(path, lambda blob: getattr(blob, method)(*args, retry_total=0, **more))

    def _run(self, path: str, call: Callable[[Any], Any]) -> Any:
        from azure.core.exceptions import ResourceExistsError, ResourceModifiedError, ResourceNotFoundError
        from fsspec.asyn import sync

        container, _, name = path.partition("/")

        async def run() -> Any:
            async with self._filesystem.service_client.get_blob_client(container, name) as blob:
                return await call(blob)

        try:
            return sync(self._filesystem.loop, run)
        except ResourceNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        except (ResourceExistsError, ResourceModifiedError) as error:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error


def _as_written(path: str, found: tuple[StoredObject, str], num_bytes: int, digest: str = "") -> StoredObject:
    """Return what the store says of an object that was just written; raise where it is another."""
    if found[0].num_bytes != num_bytes or (digest and found[1] and found[1] != digest):
        raise OSError(errno.EIO, f"{path} is not there as it was written")
    return found[0]


def _blocks(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _crc32c(blocks: Iterable[bytes]) -> str:
    """Return the CRC32C of some bytes, as Google's store writes it."""
    import google_crc32c

    made = 0
    for block in blocks:
        made = google_crc32c.extend(made, block)
    return _base64(made.to_bytes(4, "big"))


def _hex(digest: bytes | bytearray | None) -> str:
    return "" if digest is None else bytes(digest).hex()


# ---------------------------------------------------------------- ranges


class _UploadRange(NamedTuple):
    """A range of a file that is one part of its upload."""

    start: int
    num_bytes: int


def _ranges(size: int) -> list[_UploadRange]:
    """Return the parts in which a file is uploaded, of which there is at least one."""
    step = max(_PART_BYTES, math.ceil(size / _MOST_PARTS))
    return [_UploadRange(first, min(step, size - first)) for first in range(0, size, step)] or [_UploadRange(0, 0)]


def _identity(info: Mapping[str, Any]) -> str:
    return next((str(info[key]) for key in _IDENTITIES if info.get(key)), "").strip('"')


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _are_comparable(one: str, other: str) -> bool:
    """Return whether two ETags are made alike: of the whole, or of its parts. A store that encrypts has others."""
    forms = [re.fullmatch(r"[0-9a-f]{32}(-\d+)?", tag) for tag in (one, other)]
    return all(forms) and ("-" in one) == ("-" in other)


def _time_of(header: str) -> datetime.datetime:
    """Return the time that a header of HTTP gives."""
    import email.utils  # which takes as long as half of this package

    return email.utils.parsedate_to_datetime(header)
