"""Tables whose rows name URLs of several hosts: what is fetched, what fails, what a rerun compares, what is hidden."""

from __future__ import annotations

import email.utils
import hashlib
import http.server
import io
import logging
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image as Pillow

from datamat import (
    DatasetWriter,
    ErrorPolicy,
    Features,
    Image,
    Index,
    IndexRow,
    Materializer,
    OptionError,
    SampleError,
    Scalar,
    ShardOptions,
    SourceError,
    Text,
    WorkerOptions,
    load,
)
from datamat.codecs import read_file
from datamat.directory import mirror
from datamat.directory.ledger import read_ledger
from datamat.directory.remote import lasting
from datamat.writers.table import TableWriter

SECRET = "s3cr3t0f7h3s1gn4tur3"
ONE = WorkerOptions(num_workers=1)


@pytest.fixture
def hosts():
    """Two web servers, as dicts of what they hold by path: content, or a status, or where it is now."""
    made = []
    for _ in range(2):
        files, seen = {}, []

        class Handler(http.server.BaseHTTPRequestHandler):
            files_of, seen_of = files, seen

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.seen_of.append(self.path)
                found = self.files_of.get(self.path.partition("?")[0], 404)
                if isinstance(found, list):  # one after the other
                    found = found.pop(0) if len(found) > 1 else found[0]
                if isinstance(found, int):
                    self.send_error(found)
                elif isinstance(found, str) and found.startswith("http"):
                    self.send_response(302)
                    self.send_header("Location", found)
                    self.end_headers()
                else:
                    self.send_response(200)
                    content = found if isinstance(found, bytes) else found.encode()
                    self.send_header("Content-Type", "image/png" if isinstance(found, bytes) else "text/html; x=1")
                    self.send_header("Content-Length", str(len(content)))
                    self.send_header("ETag", f'"{hashlib.md5(content).hexdigest()}"')
                    self.send_header("Last-Modified", email.utils.formatdate(0, usegmt=True))
                    self.end_headers()
                    self.wfile.write(content)

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        made.append((server, thread, f"http://127.0.0.1:{server.server_port}", files, seen))
    yield [(url, files, seen) for _, _, url, files, seen in made]
    for server, thread, *_ in made:
        server.shutdown()
        server.server_close()
        thread.join()


def png(number):
    """Return a picture."""
    file = io.BytesIO()
    Pillow.fromarray(np.full((2, 2, 3), number, np.uint8)).save(file, "PNG")
    return file.getvalue()


def table(path, urls):
    """Write a table as LAION's, with a caption for each URL."""
    path.write_text("url,caption\n" + "".join(f"{url},picture {number}\n" for number, url in enumerate(urls)))
    return path


def job(source, output, **more):
    """Return a job over a table of URLs."""
    writer = TableWriter(features={"image": Image(), "caption": Text()}, files={"image": "url"})
    more.setdefault("shards", ShardOptions(num_shards=2))
    return Materializer(writer, source, output, **{"workers": ONE, **more})


def pictures(output):
    """Return the first value of each picture, by caption."""
    return {str(sample["caption"]): int(sample["image"][0, 0, 0]) for sample in load(output, "train")}


@pytest.fixture
def urls(hosts):
    """URLs of eight pictures, in turn on each host; those of the second are signed, one is elsewhere now."""
    (one, files, _), (two, others, _) = hosts
    for number in range(8):
        (files, others)[number % 2][f"/{number}.png"] = png(number)
    files["/moved/4.png"], files["/4.png"] = files["/4.png"], f"{one}/moved/4.png?{SECRET}"
    return [f"{(one, two)[n % 2]}/{n}.png{('', f'?id={n}&X-Amz-Signature={SECRET}')[n % 2]}" for n in range(8)]


def test_rows_of_two_hosts_are_fetched(hosts, urls, tmp_path):
    """Keys are the numbers of rows; each URL is asked once; the index has it without its signature; nothing stays."""
    output = tmp_path / "out"

    job(table(tmp_path / "t.csv", urls), output, scratch=tmp_path / "scratch").run(progress=False)

    assert pictures(output) == {f"picture {number}": number for number in range(8)}
    assert sorted(sample["key"] for sample in load(output, "train")) == [f"{number:08d}" for number in range(8)]
    assert sorted(hosts[1][2]) == [f"/{n}.png?id={n}&X-Amz-Signature={SECRET}" for n in (1, 3, 5, 7)]
    assert not list((tmp_path / "scratch").rglob("*.png"))
    assert not any(SECRET.encode() in path.read_bytes() for path in output.rglob("*") if path.is_file())


def test_rerun_asks_nobody_and_new_signatures_change_nothing(hosts, urls, tmp_path):
    """What decides is the URL without its signature; a row with another URL is made again, and only its shard."""
    output = tmp_path / "out"
    job(table(tmp_path / "t.csv", urls), output).run(progress=False)
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("*.tfrecord")}
    for _, _, seen in hosts:
        seen.clear()
    urls = [url.replace(SECRET, "another") for url in urls]

    again = job(table(tmp_path / "t.csv", urls), output)

    again.run(progress=False)
    assert not hosts[0][2]
    assert not hosts[1][2]
    assert {path.name: path.stat().st_mtime_ns for path in output.glob("*.tfrecord")} == before
    hosts[0][1]["/new.png"] = png(99)
    job(table(tmp_path / "t.csv", [f"{hosts[0][0]}/new.png", *urls[1:]]), output).run(progress=False)
    after = {path.name: path.stat().st_mtime_ns for path in output.glob("*.tfrecord")}
    assert pictures(output)["picture 0"] == 99
    assert sum(after[name] != before[name] for name in before) == 1
    assert 1 <= len(hosts[0][2]) + len(hosts[1][2]) <= 8  # those of its shard


def test_other_etag_is_seen_where_asked(hosts, urls, tmp_path):
    """With `identity="content"` each run asks for every ETag; what has another is fetched, and its shard made again."""
    output, source = tmp_path / "out", table(tmp_path / "t.csv", urls)
    more = {"shards": ShardOptions(num_shards=2, identity="content")}
    job(source, output, **more).run(progress=False)
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("*.tfrecord")}
    job(source, output, **more).run(progress=False)
    assert {path.name: path.stat().st_mtime_ns for path in output.glob("*.tfrecord")} == before
    hosts[1][1]["/3.png"] = png(77)

    job(source, output, **more).run(progress=False)

    after = {path.name: path.stat().st_mtime_ns for path in output.glob("*.tfrecord")}
    assert pictures(output)["picture 3"] == 77
    assert sum(after[name] != before[name] for name in before) == 1


def test_what_is_no_picture_is_skipped_with_its_url(hosts, tmp_path, caplog):
    """Missing, gone, forbidden, a page, nobody there, no URL, a file of this machine: none ends the run, none tells."""
    (one, files, _), _ = hosts
    files |= {"/gone.png": 410, "/no.png": 403, "/page.png": "<html>not here</html>", "/good.png": png(1)}
    files |= {"/text.png": b"<html>", "/away.png": f"{one}/no.png?sig={SECRET}"}
    names = ["missing", "gone", "no", "page", "text", "away", "good"]
    urls = [f"{one}/{name}.png?X-Amz-Signature={SECRET}" for name in names]
    urls += ["file:///etc/passwd", "example.org/x.png", "what://x/y.png"]
    output = tmp_path / "out"

    with caplog.at_level(logging.DEBUG):
        report = job(table(tmp_path / "t.csv", urls), output, errors="quarantine").run(progress=False)

    entries = read_ledger(output / ".datamat/ledger.jsonl")
    said = {entry.values["key"]: entry.values["message"] for entry in entries if entry.event == "sample_quarantined"}
    shown = {n: said[f"{n:08d}"] for n in (0, 1, 2, 3, 4, 5, 7, 8, 9)}
    assert f"{one}/missing.png?... is not there (404)" in shown[0]
    assert "gone.png?... is not there (410)" in shown[1]
    assert "no.png?... may not be read (403)" in shown[2]
    assert "page.png?... answers with a page (text/html) in place of a file" in shown[3]
    assert f"{one}/text.png?..." in shown[4]
    assert "away.png?... may not be read (403)" in shown[5]
    assert "is of the scheme 'file', which tables of URLs must not use" in shown[7]
    assert "'example.org/x.png' is no URL, and no file below the source" in shown[8]
    assert "is of the scheme 'what', which fsspec does not know" in shown[9]
    assert pictures(output) == {"picture 6": 1}
    files["/missing.png"] = png(2)
    hosts[0][2].clear()
    job(table(tmp_path / "t.csv", urls), output, errors="quarantine").rerun_failed(progress=False)
    assert pictures(output) == {"picture 0": 2, "picture 6": 1}
    assert not [path for path in hosts[0][2] if "good" in path]
    assert SECRET not in caplog.text + repr(report) + "".join(said.values())
    assert not any(SECRET.encode() in path.read_bytes() for path in output.rglob("*") if path.is_file())


def test_error_of_a_row_does_not_show_its_signature(hosts, tmp_path):
    """The first that fails ends the run; neither it nor what it comes from holds the query."""
    url = f"{hosts[0][0]}/missing.png?X-Amz-Signature={SECRET}"

    with pytest.raises(SampleError, match=r"missing\.png\?\.\.\. is not there \(404\); remove the row") as raised:
        job(table(tmp_path / "t.csv", [url]), tmp_path / "out").run(progress=False)

    assert SECRET not in f"{raised.value} {raised.value.__cause__!r} {raised.value.__cause__.__context__!r}"


def test_busy_server_is_asked_again(hosts, tmp_path):
    """503 passes; the file is whole."""
    url, files, seen = hosts[0]
    files["/busy.png"] = [503, 500, png(5)]

    job(table(tmp_path / "t.csv", [f"{url}/busy.png"]), tmp_path / "out").run(progress=False)

    assert pictures(tmp_path / "out") == {"picture 0": 5}
    assert len(seen) == 3


class Stories(DatasetWriter):
    """Rows with several URLs, a path and none."""

    name = "stories"
    features = Features({"sum": Scalar("int64")})
    url_fields = ("images", "cover")

    def __init__(self, rows):
        """Keep the rows."""
        self.rows = rows

    def index(self, source):
        """Return a row for each."""
        return Index.from_rows([IndexRow(f"r{n}", "train", fields) for n, fields in enumerate(self.rows)])

    def read(self, row):
        """Return the sum of sizes of all files."""
        cover = [row.fields["cover"]] if row.fields["cover"] else []
        return {"sum": sum(len(read_file(path)) for path in [*row.fields["images"], *cover])}


@pytest.mark.parametrize("identity", ["stat", "content"])
def test_lists_of_urls_and_paths(hosts, tmp_path, identity):
    """A row may name several, a path among them, or none; a changed local file counts in both."""
    (one, files, _), (two, others, _) = hosts
    files["/a"], others["/b"] = b"12345", b"123"
    (tmp_path / "local.bin").write_bytes(b"1234567")
    rows = [
        {"images": [f"{one}/a?sig={SECRET}", f"{two}/b"], "cover": None},
        {"images": [f"{one}/a", str(tmp_path / "local.bin")], "cover": f"{two}/b"},
        {"images": [], "cover": str(tmp_path / "local.bin")},
    ]
    options = {"shards": ShardOptions(num_shards=1, identity=identity), "workers": ONE}

    for _ in range(2):
        Materializer(Stories(rows), None, tmp_path / "out", **options).run(progress=False)
        assert [int(sample["sum"]) for sample in sorted(load(tmp_path / "out", "train"), key=lambda s: s["key"])] == [
            8,
            15,
            7,
        ]
    (tmp_path / "local.bin").write_bytes(b"12345678")
    Materializer(Stories(rows), None, tmp_path / "out", **options).run(progress=False)

    assert sorted(int(sample["sum"]) for sample in load(tmp_path / "out", "train")) == [8, 8, 16]


def test_missing_field_of_urls_is_named(tmp_path):
    """A declaration that fits no field is an error before any work."""

    class Wrong(Stories):
        url_fields = ("picture",)

    with pytest.raises(SourceError, match="there is no field 'picture', which is to hold URLs; the row has images"):
        Materializer(Wrong([{"images": [], "cover": "x"}]), None, tmp_path / "out").plan()
    with pytest.raises(OptionError, match="files has 'image', which features does not declare"):
        TableWriter(files={"image": "url"})


def test_retries_of_the_policy_fetch_again(hosts, tmp_path):
    """A 404 that passes is fetched by the next attempt of the row."""
    url, files, _ = hosts[0]
    files["/late.png"] = [404, png(3)]

    policy = ErrorPolicy(retries=1)
    job(table(tmp_path / "t.csv", [f"{url}/late.png"]), tmp_path / "out", errors=policy).run(progress=False)

    assert pictures(tmp_path / "out") == {"picture 0": 3}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://h/a?id=7&X-Goog-Signature=x&X-Goog-Expires=9", "https://h/a?id=7"),
        ("https://u:p@h/a.png", "https://h/a.png"),
        ("https://h/a?sv=2020&se=x&sig=y", "https://h/a"),
        ("https://h/a?se=x", "https://h/a?se=x"),
        ("s3://b/what?sig=1", "s3://b/what?sig=1"),
    ],
)
def test_lasting_part_of_a_url(url, expected):
    """What signs goes; what chooses stays."""
    assert lasting(url) == expected


def test_jobs_of_one_output_share_a_process(hosts, urls, tmp_path):
    """Two of them, a copy that came by pickle, and processes that are forked from this one."""
    source = table(tmp_path / "t.csv", urls)
    first, second = job(source, tmp_path / "out"), job(source, tmp_path / "out")
    for one in (first, second, pickle.loads(pickle.dumps(second))):
        assert one.replay("00000002")["caption"] == "picture 2"

    job(source, tmp_path / "out", workers=WorkerOptions(num_workers=2, start_method="fork")).run(progress=False)

    assert len(pictures(tmp_path / "out")) == 8


def test_files_of_a_killed_process_are_removed(tmp_path):
    """By the next one that fetches there; those of one that lives stay."""
    code = (
        "import os, sys; from datamat.directory.mirror import UrlFiles, _own; UrlFiles(sys.argv[1], {}).activate(); "
        "_own(f'{sys.argv[1]}/{os.getpid()}'); print(os.getpid(), flush=True); sys.stdin.read()"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    killed, alive = [tmp_path / process.stdout.readline().strip() for process in started]
    for folder in (killed, alive):
        (folder / "file").write_text("x")
    started[0].kill()
    started[0].communicate()

    mirror._own(str(tmp_path / "1"))

    assert not killed.exists()
    assert (alive / "file").exists()
    started[1].communicate()
    assert not alive.exists()
