"""A proxy before a server that answers as a store does: it answers wrongly, cuts connections, and counts requests."""

import contextlib
import http.client
import http.server
import threading
import time

PIECE_BYTES = 4 << 20
PAUSE_S = 0.1  # of a slow answer, before each piece
KEY, SECRET = "AKIAone", "wJalrXUtnFEMI"  # that clients of the server behind it sign with


class Proxy(http.server.ThreadingHTTPServer):
    """Hands requests on to a server, after asking `meet` about each.

    Attributes:
        meet: gets the number of the request and its handler; returns None to hand it on, a status to answer with,
            "cut" to close the connection, "lose" to hand it on and to close the connection instead of answering,
            "hang" to say nothing until the client gives up, "slow" to answer piece by piece, or an event to wait for
            before it is handed on.
        seen: method and path of each request.
        headers: its headers.
        alter: gets the headers of each answer that is handed on, and returns those to answer with.
        rewrite: gets the content of it, and returns that to answer with.
    """

    daemon_threads = True

    def __init__(self, behind):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = behind
        self.meet = lambda number, handler: None
        self.alter = lambda headers: headers
        self.rewrite = lambda content: content
        self.seen = []
        self.headers = []
        self.lock = threading.Lock()

    def handle_error(self, request, address):
        """Clients that are killed break their connections."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Say nothing."""

    def do_GET(self):
        """Hand the request on, or not."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            self.server.seen.append(f"{self.command} {self.path}")
            self.server.headers.append(self.headers)
            number = len(self.server.seen)
            what = self.server.meet(number, self)
        if isinstance(what, threading.Event):
            what.wait()
        if what in {"cut", "hang"}:
            if what == "hang":
                self.rfile.read(1)  # until the client closes the connection
            self.connection.close()
            self.close_connection = True
            return
        if isinstance(what, int):
            code = {
                503: "SlowDown",
                500: "InternalError",
                403: "AccessDenied",
                404: "NoSuchKey",
                412: "PreconditionFailed",
                501: "NotImplemented",
            }[what]
            self.answer(what, {}, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())
            return
        # Google's emulator hangs up on whoever repeats the last request of an upload, and so does this proxy.
        with contextlib.closing(http.client.HTTPConnection(*self.server.behind)) as there:
            there.request(self.command, self.path, body, dict(self.headers))
            found = there.getresponse()
            content = found.read()
        if what == "lose":
            self.connection.close()
            self.close_connection = True
            return
        headers = self.server.alter(dict(found.getheaders()))
        if "Location" in headers:  # of an upload to Google's store, which goes through the proxy, too
            here = "{}:{}".format(*self.server.server_address[:2])
            headers["Location"] = headers["Location"].replace("{}:{}".format(*self.server.behind), here)
        self.answer(found.status, headers, self.server.rewrite(content), is_slow=what == "slow")

    def answer(self, status, headers, content, *, is_slow=False):
        """Send an answer."""
        if is_slow:
            time.sleep(PAUSE_S)
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in {"transfer-encoding", "connection", "content-length"} or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            for begin in range(0, len(content), PIECE_BYTES):
                self.wfile.write(content[begin : begin + PIECE_BYTES])
                if is_slow:
                    time.sleep(PAUSE_S)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET
