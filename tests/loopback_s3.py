"""A server on this machine that answers as S3 does, with its objects in a dict: tests need no package.

It knows what obstore and boto ask for: conditions, checksums, metadata, ranges, copies, listings, uploads in parts.
`meet` hears of each request, and may refuse it, or act before it is answered: so another run comes in between at an
exact point.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import email.utils
import hashlib
import html
import http.server
import itertools
import re
import socket
import struct
import threading
import urllib.parse

import pytest
from web import listening

CODES = {400: "BadDigest", 403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed", 416: "InvalidRange",
         501: "NotImplemented", 503: "SlowDown"}  # fmt: skip
KEY, SECRET = "AKIDEXAMPLE", "a-long-secret-key"


class Refusal(Exception):
    """Status and code to answer with."""

    def __init__(self, status, code=""):
        super().__init__(status, code or CODES.get(status, "InternalError"))


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


class Store:
    """What the server holds, and what happens to requests.

    Attributes:
        url: address of the server.
        buckets: names of the buckets.
        objects: objects by path, "BUCKET/KEY".
        uploads: open uploads by their ids.
        page: most objects in one answer to `list_objects_v2`.
        meet: gets the operation and the path of each request before it is answered, of a part with "#NUMBER"; returns
            None, a status to refuse it with, "silence" to reset the connection, "lose" to do so when the request is
            done, or "cut" to do so in the middle of the answer.
        seen: operation and path of each request.
    """

    def __init__(self):
        self.url, self.buckets, self.objects, self.uploads, self.seen = "", {"bucket"}, {}, {}, []
        self.page = 1000
        self.meet = lambda operation, path: None
        self.numbers = itertools.count()
        self.lock = threading.Lock()  # held while a request is done, and not while `meet` hears of it

    def found(self, path):
        if path not in self.objects:
            raise Refusal(404)
        return self.objects[path]

    def check(self, path, headers):
        there, wanted = self.objects.get(path), headers.get("If-Match")
        if headers.get("If-None-Match") == "*" and there is not None:
            raise Refusal(412)
        if wanted and there is None:
            raise Refusal(404)
        if wanted and wanted.strip('"') != there.tag:
            raise Refusal(412)

    def write(self, path, content, tag, metadata):
        self.objects[path] = Stored(content, tag, metadata, datetime.datetime.now(datetime.UTC))
        return {"ETag": f'"{tag}"'}, b""

    # ------------------------------------------------------------ operations: each returns headers and content

    def head_bucket(self, path, query, headers, body):
        return {}, b""

    def head_object(self, path, query, headers, body):
        one = self.found(path)
        date = email.utils.format_datetime(one.modified, usegmt=True)
        kept = {f"x-amz-meta-{name}": value for name, value in one.metadata.items()}
        return {"ETag": f'"{one.tag}"', "Last-Modified": date, "Accept-Ranges": "bytes", **kept}, one.content

    def get_object(self, path, query, headers, body):
        said, content = self.head_object(path, query, headers, body)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", ""))
        if not wanted:
            return said, content
        first = int(wanted[1])
        last = min(int(wanted[2] or len(content)), len(content) - 1)
        if first > last:
            raise Refusal(416)
        return {**said, "Content-Range": f"bytes {first}-{last}/{len(content)}"}, content[first : last + 1]

    def put_object(self, path, query, headers, body):
        self.check(path, headers)
        metadata = {name[11:].lower(): value for name, value in headers.items() if name.lower()[:11] == "x-amz-meta-"}
        return self.write(path, body, md5_of(body).hexdigest(), metadata)

    def copy_object(self, path, query, headers, body):
        one = self.found(urllib.parse.unquote(headers["x-amz-copy-source"]).lstrip("/"))
        self.write(path, one.content, one.tag, one.metadata)
        date = self.objects[path].modified.isoformat()
        return {}, f"<CopyObjectResult><ETag>{one.tag}</ETag><LastModified>{date}</LastModified></CopyObjectResult>"

    def delete_object(self, path, query, headers, body):
        self.check(path, headers)
        self.objects.pop(path, None)
        return {}, "<R><Deleted><Key>k</Key></Deleted></R>" if "delete" in query else b""

    def create_multipart_upload(self, path, query, headers, body):
        number = f"upload-{next(self.numbers)}"
        self.uploads[number] = Stored(b"", "", {})
        return {}, f"<R><Bucket>b</Bucket><Key>k</Key><UploadId>{number}</UploadId></R>"

    def upload_part(self, path, query, headers, body):
        if query["uploadId"] not in self.uploads:
            raise Refusal(404, "NoSuchUpload")
        self.uploads[query["uploadId"]].parts[int(query["partNumber"])] = body
        return {"ETag": f'"{md5_of(body).hexdigest()}"'}, b""

    def complete_multipart_upload(self, path, query, headers, body):
        self.check(path, headers)
        parts = self.uploads.pop(query["uploadId"]).parts
        content = [parts[int(number)] for number in re.findall(rb"<PartNumber>(\d+)", body)]
        tag = f"{md5_of(b''.join(md5_of(part).digest() for part in content)).hexdigest()}-{len(content)}"
        self.write(path, b"".join(content), tag, {})
        return {}, f"<R><Bucket>b</Bucket><Key>k</Key><ETag>{tag}</ETag><Location>l</Location></R>"

    def abort_multipart_upload(self, path, query, headers, body):
        if self.uploads.pop(query["uploadId"], None) is None:
            raise Refusal(404, "NoSuchUpload")
        return {}, b""

    def list_objects_v2(self, path, query, headers, body):
        bucket, prefix = path.split("/")[0], query.get("prefix", "")
        keys = sorted(one.partition("/")[2] for one in self.objects if one.startswith(f"{bucket}/{prefix}"))
        after = query.get("continuation-token") or query.get("start-after") or ""
        names = {}  # what is listed, each with whether it is a folder
        for key in keys:
            head, mark, _ = key[len(prefix) :].partition(query.get("delimiter") or "\0")
            names[prefix + head + mark] = bool(mark)
        are_folders, names = names, [name for name in names if name > after]
        shown = "".join(self._listed(f"{bucket}/{name}", name, are_folders[name]) for name in names[: self.page])
        for last in names[self.page - 1 : -1][:1]:
            shown += f"<NextContinuationToken>{html.escape(last)}</NextContinuationToken>"
        cut = str(len(names) > self.page).lower()
        return {}, f"<ListBucketResult><IsTruncated>{cut}</IsTruncated>{shown}</ListBucketResult>"

    def _listed(self, path, name, is_folder):
        if is_folder:
            return f"<CommonPrefixes><Prefix>{html.escape(name)}</Prefix></CommonPrefixes>"
        one = self.objects[path]
        said = f"<Size>{len(one.content)}</Size><ETag>{one.tag}</ETag>"
        date = one.modified.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        return f"<Contents><Key>{html.escape(name)}</Key><LastModified>{date}</LastModified>{said}</Contents>"


def operation_of(method, path, query, headers):
    """Return the name of the operation that a request asks for."""
    if "/" not in path:
        return {"GET": "list_objects_v2", "HEAD": "head_bucket"}[method]
    if "uploads" in query or "uploadId" in query:
        started = "create_multipart_upload" if "uploads" in query else "complete_multipart_upload"
        return {"PUT": "upload_part", "DELETE": "abort_multipart_upload", "POST": started}[method]
    if method == "PUT" and "x-amz-copy-source" in headers:
        return "copy_object"
    return "delete_object" if "delete" in query else f"{method.lower()}_object"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, wbufsize, disable_nagle_algorithm = "HTTP/1.1", -1, True
    store: Store

    def log_message(self, *_):
        """Nothing to standard error."""

    def do_GET(self):
        place, _, query = self.path.partition("?")
        query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        path, store = urllib.parse.unquote(place).strip("/"), self.store
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "delete" in query:  # obstore's way to delete, of one object at a time
            (key,) = re.findall("<Key>(.*)</Key>", body.decode())
            path = f"{path}/{html.unescape(key)}"
        operation = operation_of(self.command, path, query, self.headers)
        name = f"{path}#{query['partNumber']}" if operation == "upload_part" else path
        store.seen.append((operation, name))
        try:
            what = store.meet(operation, name)
            if what == "silence":
                return self._reset()
            if isinstance(what, int):
                raise Refusal(what)
            if path.partition("/")[0] not in store.buckets:
                raise Refusal(404, "NoSuchBucket")
            for header, digest in (("x-amz-checksum-sha256", hashlib.sha256), ("Content-MD5", md5_of)):
                if base64.b64decode(self.headers.get(header, "")) not in {b"", digest(body).digest()}:
                    raise Refusal(400)
            with store.lock:
                headers, content = getattr(store, operation)(path, query, self.headers, body)
            status = 206 if "Content-Range" in headers else 204 if self.command == "DELETE" else 200
        except Refusal as refusal:
            (status, code), headers = refusal.args, {}
            content = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
        return self._reset() if what == "lose" else self._answer(status, headers, content, is_cut=what == "cut")

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _answer(self, status, headers, content, *, is_cut):
        content = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.close_connection = self.close_connection or is_cut

    def _reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


@contextlib.contextmanager
def serving():
    """Run a server for the duration of the block, and yield what it holds."""
    store = Store()
    with listening(type("OneHandler", (Handler,), {"store": store})) as store.url:
        yield store


@pytest.fixture
def s3(monkeypatch):
    """The store behind every `s3://` URL, in worker processes, too; its bucket is `bucket`."""
    with serving() as store:
        said = {"AWS_ENDPOINT_URL": store.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        for name, value in {**said, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}.items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL_S3"):
            monkeypatch.delenv(name, raising=False)
        yield store
