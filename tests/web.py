"""A web server on this machine for the tests of URLs: it records requests, and fails on demand."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
import urllib.parse


class Web:
    """The requests that a server got, and how it answers.

    Attributes:
        url: URL of the folder that it serves.
        asked: path of each GET, in order.
        headers: headers of each GET, in order.
        faults: by end of a path, the status to answer with, "cut" for half of the content, "silence" for the end
            of the connection, "stall" for no answer until the server ends; a list has one for each of the next
            requests.
        ranges: whether parts of files are given.
    """

    def __init__(self, folder, *, ranges):
        self.folder = folder
        self.ranges = ranges
        self.asked = []
        self.headers = []
        self.faults = {}
        self.url = ""
        self.ends = threading.Event()
        self.lock = threading.Lock()

    def count(self, ending):
        """Return how many files with such an end of their path were asked for, each time."""
        return sum(path.endswith(ending) for path in self.asked)

    def fault_of(self, path):
        """Return the fault for a path."""
        name = path.partition("?")[0]
        found = next((fault for ending, fault in self.faults.items() if name.endswith(ending)), None)
        if isinstance(found, list):
            with self.lock:
                return found.pop(0) if found else None
        return found


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as by all servers of today
    wbufsize = -1  # connections are kept alive, as by all servers of today
    web: Web

    def do_HEAD(self):
        self._answer(with_content=False)

    def do_GET(self):
        self.web.asked.append(self.path)
        self.web.headers.append(self.headers)
        self._answer(with_content=True)

    def log_message(self, *arguments):
        """Nothing to standard error."""

    def _content(self):
        return (self.web.folder / urllib.parse.unquote(self.path.partition("?")[0]).lstrip("/")).read_bytes()

    def _answer(self, *, with_content):
        fault = self.web.fault_of(self.path)
        try:
            content = self._content()
        except OSError:
            fault = fault or 404
        if fault == "stall":
            self.web.ends.wait()
        if fault in ("silence", "stall"):
            self.close_connection = True
            return
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.web.ranges else None
        self.send_response(206 if wanted else 200)
        if self.web.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if wanted:
            first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            content = content[first : last + 1]
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"0"')  # stores have both
        self.send_header("Last-Modified", "Thu, 01 Jan 1970 00:00:00 GMT")
        self.end_headers()
        if with_content:
            self.close_connection = fault == "cut"
            self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)


@contextlib.contextmanager
def listening(handler):
    """Let a handler answer at an address of this machine for the duration of the block, and yield its URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def serving(folder, *, ranges=True):
    """Serve a folder at an address of this machine for the duration of the block."""
    web = Web(folder, ranges=ranges)
    with listening(type("OneHandler", (Handler,), {"web": web})) as web.url:
        try:
            yield web
        finally:
            web.ends.set()
