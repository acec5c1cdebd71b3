"""Google's XML interface, which obstore speaks, before fake-gcs-server, which only reads, lists and deletes by it.

Uploads go to its JSON interface, which keeps the condition on a generation itself; copies are read and
uploaded. Uploads in parts are kept here until they are complete: Google takes no condition for them.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import re
import urllib.parse
import uuid

_JSON = ("/storage/", "/upload/", "/download/", "/batch/", "/_internal/")


class GoogleFront(http.server.ThreadingHTTPServer):
    """A server on the loopback that answers as Google's store does.

    Args:
        behind: host and port of fake-gcs-server, which knows itself by them.
    """

    daemon_threads = True

    def __init__(self, behind):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = behind
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.uploads = {}

    def ask(self, method, path, body=b"", headers=()):
        """Return status, headers and content of what the server behind says."""
        with contextlib.closing(http.client.HTTPConnection(*self.behind)) as there:
            there.request(method, path, body, dict(headers))
            found = there.getresponse()
            return found.status, dict(found.getheaders()), found.read()

    def handle_error(self, request, address):
        """Clients that are killed break their connections."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: GoogleFront

    def log_message(self, *_):
        """Say nothing."""

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        said = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        _, bucket, *name = path.split("/", 2)
        is_json = path.startswith(_JSON)
        if not is_json and {"uploads", "uploadId"} & said.keys():
            status, headers, content = self._in_parts(bucket, *name, said, body)
        elif not is_json and self.command == "PUT":
            status, headers, content = self._put(bucket, *name, body)
        else:
            status, headers, content = self._hand_on(body, is_json)
        if status >= 400 and not is_json and self.server.ask("GET", f"/storage/v1/b/{bucket}")[0] == 404:
            status, content = 404, b"<Error><Code>NoSuchBucket</Code></Error>"
        self.send_response_only(status)
        length = headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
        for key, value in {**headers, "Content-Length": length or "0"}.items():
            if key.lower() not in {"transfer-encoding", "connection"}:
                self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = do_GET

    def _hand_on(self, body, is_json):
        headers = {key: value for key, value in self.headers.items() if is_json or key.lower() != "host"}
        return self.server.ask(self.command, self.path, body, headers)

    def _put(self, bucket, name, body):
        if source := self.headers.get("x-goog-copy-source"):
            status, headers, body = self.server.ask("GET", f"/{source.lstrip('/')}")
            if status != 200:
                return status, headers, body
        path, edge = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart", uuid.uuid4().hex
        if generation := self.headers.get("x-goog-if-generation-match"):
            path += f"&ifGenerationMatch={generation}"  # which it does not keep for uploadType=media
        said = json.dumps({"name": urllib.parse.unquote(name)})
        body = f"--{edge}\r\n\r\n{said}\r\n--{edge}\r\n\r\n".encode() + body + f"\r\n--{edge}--\r\n".encode()
        headers = {"Content-Type": f"multipart/related; boundary={edge}"}
        status, headers, content = self.server.ask("POST", path, body, headers)
        if status == 200:
            made = json.loads(content)
            headers, content = {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}, b""
        return status, headers, content

    def _in_parts(self, bucket, name, said, body):
        if "uploads" in said:
            self.server.uploads[upload := uuid.uuid4().hex] = {}
            return 200, {}, _xml("InitiateMultipartUploadResult", "UploadId", upload)
        parts = self.server.uploads.get(said["uploadId"])
        if parts is None:
            return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
        if self.command == "PUT":
            parts[said["partNumber"]] = body
            return 200, {"ETag": f'"{uuid.uuid4().hex}"'}, b""
        del self.server.uploads[said["uploadId"]]
        if self.command == "DELETE":
            return 204, {}, b""
        wanted = re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())
        status, headers, content = self._put(bucket, name, b"".join(parts[number] for number in wanted))
        return status, headers, content or _xml("CompleteMultipartUploadResult", "ETag", headers["ETag"])


def _xml(element, part, text):
    return f"<{element}><{part}>{text}</{part}></{element}>".encode()
