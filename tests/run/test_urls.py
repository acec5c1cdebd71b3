"""Tables whose rows name URLs of several hosts: what is fetched, what fails, what a rerun compares, what is hidden."""

import base64
import contextlib
import email.utils
import hashlib
import http.server
import io
import json
import logging
import pathlib
import pickle
import subprocess
import sys
import threading
import time
from concurrent import futures

import numpy as np
import pyarrow as pa
import pytest
from nfs_locks import refuse_as_nfs_does
from PIL import Image as Pillow
from prepared import Prepared
from pyarrow import parquet
from web import listening

from datamat import (
    DatasetWriter,
    ErrorPolicy,
    Features,
    Image,
    Index,
    IndexRow,
    InputError,
    ListOf,
    Materializer,
    Nullable,
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
from datamat.directory.ledger import read_ledger
from datamat.folders import other
from datamat.folders.urls import lasting
from datamat.sources import fetching, url_files
from datamat.testing import InlineExecutor
from datamat.writers.table import TableWriter

SECRET = "s3cr3t0f7h3s1gn4tur3"
HERE = {"executor": InlineExecutor()}


@pytest.fixture
def hosts():
    """Two web servers, as dicts of what they hold by path: content, a status, where it is now, or a function."""
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
                if callable(found):
                    found(self)
                elif isinstance(found, int):
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

        made.append((Handler, files, seen))
    with contextlib.ExitStack() as servers:
        yield [(servers.enter_context(listening(handler)), files, seen) for handler, files, seen in made]
        for _, files, _ in made:
            files.clear()


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
    return Prepared(writer, source, output, **({} if "workers" in more else HERE), **more)


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

    two = WorkerOptions(num_workers=2, start_method="fork")
    job(table(tmp_path / "t.csv", urls), output, scratch=tmp_path / "scratch", workers=two).run(progress=False)

    assert pictures(output) == {f"picture {number}": number for number in range(8)}
    assert sorted(sample["key"] for sample in load(output, "train")) == [f"{number:08d}" for number in range(8)]
    assert sorted(hosts[1][2]) == [f"/{n}.png?id={n}&X-Amz-Signature={SECRET}" for n in (1, 3, 5, 7)]
    assert len(list((tmp_path / "scratch").rglob("*"))) <= 2  # the folder of this process, with its lock
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
    words = {
        "missing": "does not exist (404)", "gone": "does not exist (410)", "no": "may not be read (403)",
        "page": "answers with a page (text/html)", "text": f"{one}/text.png?...", "away": "may not be read (403)",
        "passwd": "of the scheme 'file'", "x": "neither a URL nor a file below the source", "y": "of the scheme 'what'",
    }  # fmt: skip
    assert len(said) == len(words)
    for message, (name, word) in zip([said[key] for key in sorted(said)], words.items(), strict=True):
        assert word in message, (name, message)
    assert pictures(output) == {"picture 6": 1}
    files["/missing.png"] = png(2)
    hosts[0][2].clear()
    job(table(tmp_path / "t.csv", urls), output, errors="quarantine").run(retry_failed=True, progress=False)
    assert pictures(output) == {"picture 0": 2, "picture 6": 1}
    assert not [path for path in hosts[0][2] if "good" in path]
    assert SECRET not in caplog.text + repr(report) + "".join(said.values())
    assert not any(SECRET.encode() in path.read_bytes() for path in output.rglob("*") if path.is_file())


def test_error_of_a_row_does_not_show_its_signature(hosts, tmp_path):
    """The first that fails ends the run; neither it nor what it comes from holds the query."""
    url = f"{hosts[0][0]}/missing.png?X-Amz-Signature={SECRET}"

    with pytest.raises(SampleError, match=r"missing\.png\?\.\.\. does not exist \(404\); remove the row") as raised:
        job(table(tmp_path / "t.csv", [url]), tmp_path / "out").run(progress=False)

    assert SECRET not in f"{raised.value} {raised.value.__cause__!r} {raised.value.__cause__.__context__!r}"


def test_busy_server_is_asked_again(hosts, tmp_path, monkeypatch):
    """503 passes, and the file is whole; a 404 that passes is fetched by the next attempt of the row."""
    monkeypatch.setattr("datamat.folders.retries.wait_before", lambda *_: None)
    url, files, seen = hosts[0]
    files |= {"/busy.png": [503, 500, png(5)], "/late.png": [404, png(3)]}
    source = table(tmp_path / "t.csv", [f"{url}/busy.png", f"{url}/late.png"])

    job(source, tmp_path / "out", errors=ErrorPolicy(retries=1)).run(progress=False)

    assert pictures(tmp_path / "out") == {"picture 0": 5, "picture 1": 3}
    assert sorted(seen) == ["/busy.png"] * 3 + ["/late.png"] * 2


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
    options = {"shards": ShardOptions(num_shards=1, identity=identity), "follow_links": True, **HERE}

    def sums():
        Prepared(Stories(rows), None, tmp_path / "out", **options).run(progress=False)
        return {sample["key"]: int(sample["sum"]) for sample in load(tmp_path / "out", "train")}

    assert [sums(), sums()] == [{"r0": 8, "r1": 15, "r2": 7}] * 2
    (tmp_path / "local.bin").write_bytes(b"12345678")
    assert sums() == {"r0": 8, "r1": 16, "r2": 8}


def test_missing_field_of_urls_is_named(tmp_path):
    """A declaration that fits no field is an error before any work."""

    class Wrong(Stories):
        url_fields = ("picture",)

    with pytest.raises(SourceError, match="there is no field 'picture' to hold URLs; the row has images"):
        Materializer(Wrong([{"images": [], "cover": "x"}]), None, tmp_path / "out").plan()
    with pytest.raises(OptionError, match="files has 'image', which features does not declare"):
        TableWriter(files={"image": "url"})
    with pytest.raises(OptionError, match=r"files is \['image'\].*files={'image': 'url'}"):
        TableWriter(features={"image": Image()}, files=["image"])


def fetched(url, folder):
    """Fetch the file behind a URL; return its content."""
    files = url_files.UrlFiles(str(folder), {})
    path = files.path_of(url, url.rpartition("/")[2])
    files.fetch(path)
    return pathlib.Path(path).read_bytes()


@pytest.mark.parametrize("scheme", ["file", "GIT", "generic", "simplecache::file"])
def test_schemes_that_read_this_machine_are_refused(tmp_path, scheme):
    """`git://` reads a repository here, whatever its name says."""
    (tmp_path / "there").write_bytes(b"x")

    with pytest.raises(InputError, match=r"which tables of URLs must not use|chains filesystems"):
        fetched(f"{scheme}://{tmp_path}/there", tmp_path / "urls")


@pytest.mark.long  # a host that answers must do so within the second that is silence here
def test_host_that_does_not_answer_is_asked_once_for_each_further_url(hosts, tmp_path, monkeypatch):
    """Five attempts for the first; when the host answers again, each URL has five again."""
    url, held, seen = hosts[0]
    is_over = threading.Event()
    held |= {f"/{n}.png": lambda _: is_over.wait(60) for n in range(2)} | {"/2.png": png(2), "/3.png": [503, png(3)]}
    monkeypatch.setattr(url_files, "_SILENCE_S", 1)
    monkeypatch.setattr("datamat.folders.retries.wait_before", lambda *_: None)
    files = url_files.UrlFiles(str(tmp_path), {})
    paths = [files.path_of(f"{url}/{n}.png", f"{n}-0-0") for n in range(4)]

    for path in paths[:2]:
        with pytest.raises(InputError, match=r"cannot be fetched: .*Timeout.*; run again later, or remove the row"):
            files.fetch(path)
    for path in paths[2:]:
        files.fetch(path)

    is_over.set()
    assert seen == ["/0.png"] * 5 + ["/1.png", "/2.png"] + ["/3.png"] * 2


def drip(handler):
    """Send a byte after the other, as long as anyone listens."""
    handler.send_response(200)
    if handler.path.startswith("/long"):
        handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"x" * (1 if handler.path.startswith("/long") else 4096))
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "limits", "message"),
    [
        ("/long.png", {"_SLOW_AFTER_S": 0.1}, r"long\.png comes too slowly: "),
        ("/radio.png", {"_ENDLESS_AFTER_S": 0.1}, r"radio\.png.* a stream without end"),
        ("/large.png", {"MOST_BYTES": 10_000}, r"large\.png has over 10000 bytes"),
    ],
)
def test_body_without_end_fails_its_row(hosts, tmp_path, monkeypatch, path, limits, message):
    """A server that drips, one that streams, a file that is too large: no silence ends them, and none is retried."""
    url, files, seen = hosts[0]
    files[path] = drip
    for name, value in limits.items():
        monkeypatch.setattr(url_files if name == "MOST_BYTES" else other, name, value)

    with pytest.raises(InputError, match=message):
        fetched(f"{url}{path}", tmp_path)

    assert seen == [path]
    assert not list(tmp_path.rglob("*.part"))


def test_file_that_is_called_a_page_is_taken(hosts, tmp_path):
    """Some servers say text/html of everything: what begins like a page is one."""
    url, files, _ = hosts[0]

    def called_page(handler):
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.end_headers()
        handler.wfile.write(png(1))

    files |= {"/is.png": called_page, "/page.png": "\ufeff \n<!doctype html>"}

    assert fetched(f"{url}/is.png", tmp_path) == png(1)
    with pytest.raises(InputError, match=r"page\.png answers with a page \(text/html\)"):
        fetched(f"{url}/page.png", tmp_path)


def test_urls_that_hold_the_file_and_blanks_around_urls(hosts, tmp_path):
    """A `data:` URL, as vision APIs have them; it is never shown whole."""
    url, files, _ = hosts[0]
    files["/1.png"] = png(1)
    inline = base64.b64encode(png(2)).decode()
    source = {
        "url": [f" {url}/1.png\n", f"data:image/png;base64,{inline}", "data:image/png;base64,bm90aGluZw==" * 9],
        "caption": ["blanks", "inline", "nothing"],
    }
    output = tmp_path / "out"

    job(source, output, errors="skip").run(progress=False)

    assert pictures(output) == {"blanks": 1, "inline": 2}
    (failed,) = [e for e in read_ledger(output / ".datamat/ledger.jsonl") if e.event == "sample_skipped"]
    assert "(data:image/png;base64,...)" in failed.values["message"]
    assert "bm90aGluZw" not in failed.values["message"]


def test_rows_of_a_small_table_are_fetched_together(hosts, tmp_path):
    """Eight requests wait for one another: each part has as many rows as are fetched at once."""
    url, files, seen = hosts[0]
    all_there = threading.Barrier(8)

    def together(handler):
        all_there.wait(30)
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(png(1))

    files |= {f"/{n}.png": together for n in range(8)}
    source = table(tmp_path / "t.csv", [f"{url}/{n}.png" for n in range(8)])

    job(source, tmp_path / "out", shards=ShardOptions(num_shards=1)).run(progress=False)

    assert len(pictures(tmp_path / "out")) == len(seen) == 8


def test_large_files_behind_urls_do_not_fill_the_disk(hosts, tmp_path, monkeypatch):
    """No server says beforehand how large they are: those that have come say it."""
    url, files, _ = hosts[0]
    for name, value in {"LIKELY_BYTES": 100, "AT_ONCE": 4, "_KEPT_BYTES": 100_000, "_AHEAD_BYTES": 50_000}.items():
        monkeypatch.setattr(url_files if name == "LIKELY_BYTES" else fetching, name, value)
    found = url_files.UrlFiles(str(tmp_path / "urls"), {})
    found.activate()
    for number in range(100):
        files[f"/{number}.bin"] = bytes(10_000)
    paths = [found.path_of(f"{url}/{number}.bin", str(number)) for number in range(100)]
    held = []

    with fetching.FetchAhead([[path] for path in paths]) as ahead:
        for number, path in enumerate(paths):
            ahead.reach(number)
            assert pathlib.Path(path).stat().st_size == 10_000
            futures.wait(ahead._running.values())
            held.append(sum(file.stat().st_size for file in tmp_path.rglob("*.bin")))

    assert 50_000 <= max(held) <= 100_000 + 2 * 50_000


def test_empty_cells_fail_their_rows_or_are_none(hosts, tmp_path):
    """A caption and a URL that are missing: refused by row, or None where that is declared."""
    url, files, _ = hosts[0]
    files |= {f"/{n}.png": png(n) for n in range(4)}
    source = pa.table(
        {
            "url": [f"{url}/0.png", None, f"{url}/2.png", ""],
            "caption": ["a", "b", None, "d"],
            "other": pa.nulls(4),  # of no interest
        }
    )
    output = tmp_path / "out"

    job(source, output, errors="skip").run(progress=False)

    entries = read_ledger(output / ".datamat/ledger.jsonl")
    said = {e.values["key"]: e.values["message"] for e in entries if e.event == "sample_skipped"}
    assert pictures(output) == {"a": 0}
    assert "column 'url' of the table is empty; fill it in, or drop the row; or declare it with" in said["00000001"]
    assert "features={'caption': Nullable(...)}" in said["00000002"]
    assert "column 'url' of the table is empty" in said["00000003"]
    features = {"image": Nullable(Image()), "caption": Nullable(Text())}
    writer = TableWriter(features=features, files={"image": "url"})
    Prepared(writer, source, tmp_path / "all", **HERE).run(progress=False)
    found = {s["key"]: (s["caption"], s["image"] is None) for s in load(tmp_path / "all")}
    assert found == {f"{n:08d}": row for n, row in enumerate([("a", False), ("b", True), (None, False), ("d", True)])}


def test_column_of_lists_of_urls(hosts, tmp_path):
    """As in MMC4 and OBELICS: a feature of several files."""
    url, files, _ = hosts[0]
    files |= {f"/{n}.png": png(n) for n in range(3)}
    source = tmp_path / "t.jsonl"
    rows = [{"urls": [f"{url}/0.png", f"{url}/1.png"]}, {"urls": []}, {"urls": [f"{url}/2.png"], "more": {"a": 1}}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    writer = TableWriter(features={"images": ListOf(Image())}, files={"images": "urls"})

    Prepared(writer, source, tmp_path / "out", **HERE).run(progress=False)

    found = {s["key"]: [int(image[0, 0, 0]) for image in s["images"]] for s in load(tmp_path / "out")}
    assert found == {"00000000": [0, 1], "00000001": [], "00000002": [2]}


def test_folder_of_tables_with_paths_beside_them(hosts, tmp_path, monkeypatch):
    """As LAION comes, in many files; a relative path begins at the folder of the table."""
    url, files, _ = hosts[0]
    files["/0.png"] = png(0)
    folder = tmp_path / "laion"
    (folder / "images").mkdir(parents=True)
    (folder / "images/1.png").write_bytes(png(1))
    (folder / "_SUCCESS").touch()
    for number, name in enumerate([f"{url}/0.png", "images/1.png"]):
        columns = {"url": [name], "caption": [f"picture {number}"]}
        parquet.write_table(pa.table(columns), folder / f"part-{number}.parquet")

    for number, source in enumerate((folder, str(folder / "part-*.parquet"))):
        job(source, tmp_path / f"out{number}", errors="skip").run(progress=False)
    monkeypatch.chdir(tmp_path)
    job("laion/part-1.parquet", "out2").run(progress=False)

    assert pictures(tmp_path / "out0") == {"picture 0": 0, "picture 1": 1}
    assert "picture 0" in pictures(tmp_path / "out1")
    assert pictures("out2") == {"picture 1": 1}


@pytest.mark.parametrize("kind", ["column", "list"])
def test_link_out_of_the_source_is_no_way_around_urls(tmp_path, kind):
    """A table of somebody else's must not read what it names beside the source; the owner of the links may say so."""
    folder = tmp_path / "set"
    (folder / "images").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(png(1))
    (folder / "images/0.png").write_bytes(png(0))
    (folder / "images/1.png").symlink_to(tmp_path / "secret.png")
    names = ["images/0.png", "images/1.png"]
    rows = [{"key": f"{n}", "image": name if kind == "column" else [name]} for n, name in enumerate(names)]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    feature = Image() if kind == "column" else ListOf(Image())
    writer = TableWriter(features={"image": feature}, files={"image": "image"})

    def run(output, **more):
        report = Prepared(writer, folder / "t.jsonl", tmp_path / output, **HERE, **more).run(progress=False)
        return report.num_shards_written, sorted(load(tmp_path / output).keys())

    with pytest.raises(SampleError, match=r"'images/1\.png': a link leads out of the source, .*; .* follow_links=True"):
        run("raises")
    assert [run("skips", errors="skip") for _ in range(2)] == [(1, ["0"]), (0, ["0"])]
    assert [run("follows", follow_links=True) for _ in range(2)] == [(1, ["0", "1"]), (0, ["0", "1"])]


def test_table_behind_a_signed_url(hosts, tmp_path, caplog):
    """Its name ends before the query, and no message has the signature."""
    (url, files, seen), _ = hosts
    files |= {"/a/t.csv": f"url,caption\n{url}/1.png,picture\n".encode(), "/1.png": png(1), "/a/t.png": png(1)}
    source = f"{url}/a/t.csv?X-Amz-Signature={SECRET}"

    for _ in range(2):
        job(source, tmp_path / "out", scratch=tmp_path / "scratch").run(progress=False)

    assert pictures(tmp_path / "out") == {"picture": 1}
    assert seen.count("/1.png") == 1
    with pytest.raises(SourceError, match="unknown kind of table") as raised:
        job(source.replace("t.csv", "t.png"), tmp_path / "no", scratch=tmp_path / "scratch").plan()
    assert SECRET not in str(raised.value) + caplog.text


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://h/a?id=7&X-Goog-Signature=x&X-Goog-Expires=9", "https://h/a?id=7"),
        ("https://u:p@h/a.png", "https://h/a.png"),
        ("https://h/a?sv=2020&se=x&sig=y", "https://h/a"),
        ("https://h/a?se=x", "https://h/a?se=x"),
        ("s3://b/what?sig=1", "s3://b/what?sig=1"),
        ("data:text/plain,a@b?sig=1", "data:text/plain,a@b?sig=1"),
    ],
)
def test_lasting_part_of_a_url(url, expected):
    """What signs goes; what chooses stays."""
    assert lasting(url) == expected


def test_jobs_of_one_output_share_a_process(hosts, urls, tmp_path):
    """Two of them, a copy that came by pickle, and processes that are forked from this one."""
    source, fork = table(tmp_path / "t.csv", urls), WorkerOptions(num_workers=2, start_method="fork")
    first, second = (job(source, tmp_path / "out", workers=fork) for _ in range(2))
    for one in (first, second, pickle.loads(pickle.dumps(second))):
        assert one.replay("00000002")["caption"] == "picture 2"

    first.run(progress=False)

    assert len(pictures(tmp_path / "out")) == 8


@pytest.mark.parametrize("is_nfs", [False, pytest.param(True, marks=pytest.mark.long)])
def test_files_of_a_killed_process_are_removed(tmp_path, monkeypatch, is_nfs):
    """By the next one that fetches there; those of one that lives stay."""
    if is_nfs:
        refuse_as_nfs_does(monkeypatch)
    code = (
        "import sys; from datamat.sources.url_files import UrlFiles; files = UrlFiles(sys.argv[1], {}); "
        "print(files.path_of('data:,x', 'x'), flush=True); sys.stdin.read()"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / "urls"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    killed, alive = [pathlib.Path(process.stdout.readline().strip()).parent for process in started]
    for folder in (killed, alive):
        (folder / "file").write_text("x")
    started[0].kill()
    started[0].communicate()

    fetched("data:,x", tmp_path / "urls")

    assert not killed.exists()
    assert (alive / "file").exists()
    started[1].communicate()
    assert not alive.exists()
