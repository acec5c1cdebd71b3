"""A store in memory that answers the calls of s3fs as S3 does: tests need neither packages nor a server.

It knows what datamat asks of S3: ETags, metadata, conditions, uploads in parts. `meet` hears of each request, and may
refuse it, or act before it is answered: so another run comes in between at an exact point, without threads.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import email.utils
import errno
import hashlib
import itertools
import os

import fsspec
import pytest
from fsspec.asyn import get_loop
from fsspec.registry import _registry

from datamat.folders import register_folder
from datamat.folders.other import FsspecFolder

CODES = {403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed", 501: "NotImplemented", 503: "SlowDown"}
KINDS = {403: PermissionError, 404: FileNotFoundError}


def refusal(status, code=""):
    """Return an error as s3fs raises it."""
    error = KINDS.get(status, OSError)(errno.EIO, f"{status} {code or CODES.get(status, 'InternalError')}")
    code = code or CODES.get(status, "InternalError")
    error.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}
    return error


def md5_of(content):
    return hashlib.md5(content, usedforsecurity=False)


@dataclasses.dataclass
class Stored:
    """An object, or an upload that is open: `parts` are its parts by number."""

    content: bytes
    tag: str
    metadata: dict
    modified: datetime.datetime = None
    parts: dict = dataclasses.field(default_factory=dict)
    place: tuple = ()


class Body:
    """The body of an answer."""

    def __init__(self, content):
        self.content = content

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def read(self):
        return self.content


class Store:
    """What the store holds, and what happens to requests.

    Attributes:
        buckets: names of the buckets.
        objects: objects by path, "BUCKET/KEY".
        uploads: open uploads by number.
        meet: gets the operation and the path of each request, before it is answered; returns None, or a status to
            refuse it with, or "lose" to answer it, and lose the answer.
        more: what `head_object` says of every object beside.
        seen: operation and path of each request, a part with its number.
    """

    def __init__(self):
        self.buckets, self.objects, self.uploads, self.more, self.seen = {"bucket"}, {}, {}, {}, []
        self.meet = lambda operation, path: None
        self.numbers = itertools.count()

    def call(self, operation, values):
        """Answer a request."""
        path = f"{values['Bucket']}/{values.get('Key', values.get('Prefix', ''))}"
        number = values.get("PartNumber")
        self.seen.append((operation, path if number is None else number))
        what = self.meet(operation, path if number is None else f"{path}#{number}")
        if values["Bucket"] not in self.buckets:
            raise refusal(404, "NoSuchBucket")
        if isinstance(what, int):
            raise refusal(what)
        answer = getattr(self, operation)(path, **{name: value for name, value in values.items() if name != "Key"})
        if what == "lose":
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return answer

    def found(self, path):
        if path not in self.objects:
            raise refusal(404)
        return self.objects[path]

    def check(self, path, values):
        there = self.objects.get(path)
        if values.get("IfNoneMatch") == "*" and there is not None:
            raise refusal(412)
        if "IfMatch" in values and (there is None or values["IfMatch"].strip('"') != there.tag):
            raise refusal(412)

    def write(self, path, content, tag, metadata):
        self.objects[path] = Stored(content, tag, metadata, datetime.datetime.now(datetime.UTC))
        return {"ETag": f'"{tag}"'}

    def head_object(self, path, **_):
        found = self.found(path)
        return {"ContentLength": len(found.content), "ETag": f'"{found.tag}"', "Metadata": found.metadata, **self.more}

    def get_object(self, path, **_):
        return {"Body": Body(self.found(path).content)}

    def put_object(self, path, Body, Metadata=None, ContentMD5="", **values):
        self.check(path, values)
        assert not ContentMD5 or base64.b64decode(ContentMD5) == md5_of(Body).digest()
        return self.write(path, bytes(Body), md5_of(Body).hexdigest(), Metadata or {})

    def delete_object(self, path, **values):
        self.check(path, values)
        self.objects.pop(path, None)

    def create_multipart_upload(self, path, Metadata=None, **_):
        number = f"upload-{next(self.numbers)}"
        self.uploads[number] = Stored(b"", "", Metadata or {}, place=tuple(path.split("/", 1)))
        return {"UploadId": number}

    def upload_part(self, path, UploadId, PartNumber, Body, **_):
        if UploadId not in self.uploads:
            raise refusal(404, "NoSuchUpload")
        self.uploads[UploadId].parts[PartNumber] = bytes(Body)
        return {"ETag": f'"{md5_of(Body).hexdigest()}"'}

    def complete_multipart_upload(self, path, UploadId, MultipartUpload, **values):
        self.check(path, values)
        upload = self.uploads.pop(UploadId)
        parts = [upload.parts[one["PartNumber"]] for one in MultipartUpload["Parts"]]
        tag = f"{md5_of(b''.join(md5_of(part).digest() for part in parts)).hexdigest()}-{len(parts)}"
        return self.write(path, b"".join(parts), tag, upload.metadata)

    def abort_multipart_upload(self, path, UploadId, **_):
        if self.uploads.pop(UploadId, None) is None:
            raise refusal(404, "NoSuchUpload")

    def list_objects_v2(self, path, Bucket, **_):
        date = email.utils.format_datetime(datetime.datetime.now(datetime.UTC), usegmt=True)
        return {
            "ResponseMetadata": {"HTTPHeaders": {"date": date}},
            "Contents": [
                {"Key": name.partition("/")[2], "LastModified": one.modified}
                for name, one in self.objects.copy().items()  # in one step, whatever other threads do
                if name.startswith(path)
            ],
        }


class MemoryS3(fsspec.AbstractFileSystem):
    """The filesystem of the store, which stands in for that of s3fs."""

    protocol = ("s3", "s3a")
    cachable = False
    store = Store()

    def __init__(self, **options):
        super().__init__()
        self.loop = get_loop()

    def call_s3(self, operation, **values):
        return self.store.call(operation, values)

    def _call(self, operation, path, **values):
        bucket, _, key = self._strip_protocol(path).partition("/")
        return self.call_s3(operation, Bucket=bucket, Key=key, **values)

    def find(self, path, maxdepth=None, withdirs=False, detail=False, **_):
        path = self._strip_protocol(path).rstrip("/")
        bucket, _, prefix = f"{path}/".partition("/")
        self.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix)
        depth = path.count("/") + (maxdepth or 1 << 30)
        names = [one for one in sorted(self.store.objects) if one == path or one.startswith(f"{path}/")]
        found = {name: self._told(name) for name in names if name.count("/") <= depth}
        return found if detail else list(found)

    def _told(self, path):
        one = self.store.objects[path]
        return {
            "name": path,
            "size": len(one.content),
            "type": "file",
            "ETag": f'"{one.tag}"',
            "LastModified": one.modified,
        }

    def info(self, path, **_):
        path = self._strip_protocol(path).rstrip("/")
        if "/" in path:
            try:
                self._call("head_object", path)
                return self._told(path)
            except FileNotFoundError:
                if path.partition("/")[0] not in self.store.buckets:
                    raise
        if self.find(path):
            return {"name": path, "size": 0, "type": "directory"}
        raise refusal(404)

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path).rstrip("/")
        found = {}
        for name, told in self.find(path, detail=True).items():
            head, is_deep, _ = name[len(path) + 1 :].partition("/")
            child = f"{path}/{head}"
            found[child] = {"name": child, "size": 0, "type": "directory"} if is_deep else told
        return list(found.values()) if detail else list(found)

    def cat_file(self, path, start=None, end=None, **_):
        path = self._strip_protocol(path)
        self._call("get_object", path)
        return self.store.objects[path].content[start:end]

    def pipe_file(self, path, value, mode="overwrite", **_):
        self._call("put_object", path, Body=bytes(value), **({"IfNoneMatch": "*"} if mode == "create" else {}))

    def put_file(self, lpath, rpath, **_):
        if not os.path.isdir(lpath):
            with open(lpath, "rb") as file:
                self.pipe_file(rpath, file.read())

    def get_file(self, rpath, lpath, **_):
        os.makedirs(os.path.dirname(lpath), exist_ok=True)
        with open(lpath, "wb") as file:
            file.write(self.cat_file(rpath))

    def rm_file(self, path):
        self._call("head_object", path)
        self._call("delete_object", path)

    def cp_file(self, path1, path2, **_):
        source = self.store.found(self._strip_protocol(path1))
        self._call("put_object", path2, Body=source.content, Metadata=source.metadata)
        self.store.objects[self._strip_protocol(path2)].tag = source.tag

    def makedirs(self, path, exist_ok=False):
        """There are no folders."""

    mkdir = makedirs


@pytest.fixture
def s3(monkeypatch):
    """The store behind every `s3://` URL; its bucket is `bucket`."""
    monkeypatch.setitem(_registry, "s3", MemoryS3)
    undo = register_folder("s3", FsspecFolder)
    monkeypatch.setattr(MemoryS3, "store", Store())
    yield MemoryS3.store
    undo()
