"""Headers that a user gives for a source: which web servers get them."""

import http.server
import io

import numpy as np
import pytest
from PIL import Image as Pillow
from prepared import Prepared
from web import listening

from datamat import Image, ShardOptions
from datamat.testing import InlineExecutor
from datamat.writers.table import TableWriter

TOKEN = {"Authorization": "Bearer t0ken", "X-Api-Key": "k3y", "Cookie": "session=c00kie", "User-Agent": "me"}
SECRETS = {"t0ken", "k3y", "c00kie"}


class Handler(http.server.BaseHTTPRequestHandler):
    """Holds a table and a picture, redirects from `/moved/HOST/...`, and knows the headers of each request by path."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.heard[self.path] = " ".join(self.headers.values())
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", f"http://{self.path.removeprefix('/moved/')}")
            self.end_headers()
            return
        content = type(self).table.encode() if self.path.endswith(".csv") else png()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_HEAD(self):
        self.do_GET()


def png():
    file = io.BytesIO()
    Pillow.fromarray(np.zeros((2, 2, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def servers():
    """Two web servers, by their addresses HOST:PORT."""
    made = [type("OneHandler", (Handler,), {"heard": {}, "table": ""}) for _ in range(2)]
    with listening(made[0]) as one, listening(made[1]) as two:
        yield [(one.removeprefix("http://"), made[0]), (two.removeprefix("http://"), made[1])]


def run(tmp_path, urls, options, source=None):
    table = tmp_path / "t.csv"
    table.write_text("url\n" + "".join(f"{url}\n" for url in urls))
    writer = TableWriter(features={"image": Image()}, files={"image": "url"})
    job = Prepared(
        writer,
        source or table,
        tmp_path / "out",
        source_options=options,
        shards=ShardOptions(num_shards=1),
        executor=InlineExecutor(),
    )
    return job.run(progress=False)


def secrets_in(server, path):
    return {secret for secret in SECRETS if secret in server.heard[path]}


@pytest.mark.parametrize("by", ["scheme", "host", "path", "another port", "flat", "user and host"])
def test_headers_go_to_hosts_that_the_user_names(servers, tmp_path, by):
    """Neither another host of the table, nor one that is named alike; a client's name goes to all."""
    (one, first), (two, second) = servers
    key = {
        "scheme": "http",
        "host": f"http://{one}",
        "path": f"HTTP://{one}/in/",
        "another port": f"http://{one}1",
        "flat": None,
        "user and host": f"http://{one}",
    }[by]
    options = {"headers": TOKEN} if key is None else {key: {"headers": TOKEN}, "s3": {"anon": True}}
    named = f"http://{one}@{two}/c.png" if by == "user and host" else f"http://{two}/c.png"

    run(tmp_path, [f"http://{one}/in/a.png", f"http://{one}/inside.png", named], options)

    gets = {"host": ("/in/a.png", "/inside.png"), "user and host": ("/in/a.png", "/inside.png"), "path": ("/in/a.png",)}
    for path in ("/in/a.png", "/inside.png"):
        assert secrets_in(first, path) == (SECRETS if path in gets.get(by, ()) else set())
    assert secrets_in(second, "/c.png") == set()
    if by == "scheme":
        assert "me" in second.heard["/c.png"].split()


def test_host_of_the_source_gets_the_headers(servers, tmp_path):
    """The user wrote it; a table there may name other hosts, which get none."""
    (one, first), (two, second) = servers
    first.table = f"url\nhttp://{one}/a.png\nhttp://{two}/b.png\n"

    run(tmp_path, [], {"http": {"headers": TOKEN}}, source=f"http://{one}/t.csv")

    assert secrets_in(first, "/t.csv") == secrets_in(first, "/a.png") == SECRETS
    assert secrets_in(second, "/b.png") == set()


def test_redirects_to_another_host_carry_no_headers(servers, tmp_path):
    """On the same host they do."""
    (one, first), (two, second) = servers
    urls = [f"http://{one}/moved/{two}/b.png", f"http://{one}/moved/{one}/a.png"]

    run(tmp_path, urls, {f"http://{one}": {"headers": TOKEN}})

    assert secrets_in(first, "/a.png") == SECRETS
    assert secrets_in(second, "/b.png") == set()
