"""Sources behind URLs: what lies in the local folder, when content arrives, and when it goes."""

from __future__ import annotations

import concurrent.futures
import functools
import http.server
import multiprocessing
import os
import pathlib
import re
import threading
import types

import cv2
import fsspec
import numpy as np
import pytest
from dict_folder import DictFolder
from nfs_locks import refuse_as_nfs_does
from PIL import Image
from prepared import Prepared

from datamat import (
    DatasetWriter,
    Features,
    IndexRow,
    InputError,
    OptionError,
    SampleError,
    Scalar,
    SourceError,
    Text,
    WorkerOptions,
    load,
)
from datamat.codecs import read_file
from datamat.events import PlanMade
from datamat.folders import register_folder
from datamat.options import RunOptions
from datamat.sources.fetching import FetchAhead
from datamat.sources.mirror import mirrored
from datamat.testing import InlineExecutor
from datamat.writers.table import TableWriter


@pytest.fixture
def web(tmp_path):
    """A folder and the URL of a web server that serves and lists it."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        seen = []  # noqa: RUF012 -- of one test

        def log_message(self, *_):
            pass

        def do_GET(self):
            if "Range" not in self.headers:  # else it is asked for size and version
                self.seen.append(self.path)
            super().do_GET()

    folder = tmp_path / "web"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}", Quiet.seen
    server.shutdown()
    server.server_close()
    thread.join()


def is_here(path):
    """Return whether a file has its content."""
    return bool(os.stat(path).st_mode & 0o444)


def test_names_and_sizes_are_there_and_content_is_not(web, tmp_path):
    """A table comes at once; of other files, nothing but what is asked for; datamat's own reading refuses the rest."""
    folder, url, seen = web
    (folder / "a").mkdir()
    (folder / "a/one.bin").write_bytes(b"content")
    (folder / "a/two.bin").write_bytes(b"other")
    (folder / "table.csv").write_text("x\n1\n")

    mirror = mirrored(url, None, tmp_path)

    path = mirror.path
    assert sorted(os.listdir(path)) == ["a", "table.csv"]
    assert os.path.getsize(f"{path}/a/one.bin") == 7
    assert [is_here(f"{path}/{name}") for name in ("a/one.bin", "a/two.bin", "table.csv")] == [False, False, True]
    mirror.fetch(f"{path}/a/one.bin")
    assert pathlib.Path(f"{path}/a/one.bin").read_bytes() == b"content"
    assert "/a/one.bin" in seen
    assert "/a/two.bin" not in seen
    with pytest.raises(InputError, match="ermission denied"):  # root, too
        read_file(f"{path}/a/two.bin")


def test_what_changes_there_changes_here(web, tmp_path):
    """A new time or size brings new content; what is gone is gone; what is the same is not fetched again."""
    folder, url, _ = web
    for name in ("same.csv", "new.csv", "gone.csv"):
        (folder / name).write_text("x\n1\n")
    mirror = mirrored(url, None, tmp_path)
    before = {name: os.stat(f"{mirror.path}/{name}") for name in ("same.csv", "new.csv")}
    (folder / "new.csv").write_text("x\n2\n")
    os.utime(folder / "new.csv", (1, 1))
    (folder / "gone.csv").unlink()

    mirror.update()

    assert sorted(os.listdir(mirror.path)) == ["new.csv", "same.csv"]
    assert os.stat(f"{mirror.path}/same.csv").st_ino == before["same.csv"].st_ino
    assert os.stat(f"{mirror.path}/new.csv").st_mtime_ns != before["new.csv"].st_mtime_ns
    with open(f"{mirror.path}/new.csv") as file:
        assert file.read() == "x\n2\n"


def test_object_that_changed_after_the_listing_is_refused(web, tmp_path):
    """So is one that is gone: nothing stands for what it does not hold."""
    folder, url, _ = web
    (folder / "a.bin").write_bytes(b"12345")
    (folder / "b.bin").write_bytes(b"12345")
    (folder / "c.bin").write_bytes(b"12345")
    mirror = mirrored(url, None, tmp_path)
    (folder / "a.bin").write_bytes(b"1234")
    (folder / "b.bin").unlink()
    (folder / "c.bin").write_bytes(b"67890")
    os.utime(folder / "c.bin", (1, 1))

    for name in ("a", "c"):
        with pytest.raises(InputError, match=rf"/{name}\.bin has changed since it was listed"):
            mirror.fetch(f"{mirror.path}/{name}.bin")
    with pytest.raises(InputError, match=r"/b\.bin has gone since it was listed"):
        mirror.fetch(f"{mirror.path}/b.bin")
    assert not any(is_here(f"{mirror.path}/{name}.bin") for name in "abc")
    assert not os.listdir(next(tmp_path.glob("source-*/work")))


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_nfs", [False, True])
def test_files_of_rows_come_ahead_and_go(web, tmp_path, monkeypatch, is_nfs):
    """Those of the row at work stay, whoever wants to drop them; after the part none is left."""
    if is_nfs:
        refuse_as_nfs_does(monkeypatch)
    folder, url, seen = web
    for number in range(20):
        (folder / f"{number:02d}.bin").write_bytes(bytes([number]) * 100)
    mirror = mirrored(url, None, tmp_path)
    paths = [f"{mirror.path}/{number:02d}.bin" for number in range(20)]
    with FetchAhead([[path] for path in paths]) as ahead:
        for number, path in enumerate(paths):
            ahead.reach(number)

            assert is_here(path)
            assert not mirror.drop(path)

    assert not any(map(is_here, paths))
    assert sorted(one for one in seen if one.endswith(".bin")) == [f"/{number:02d}.bin" for number in range(20)]


class Removes:
    """Removes a file when the source is listed, and before its row is read."""

    def __call__(self, event):
        """Remove it."""
        if isinstance(event, PlanMade):
            os.unlink(self.path)


def test_placeholder_that_is_gone_is_a_matter_of_its_row(web, tmp_path):
    """Somebody has emptied the folder, or lists the source when the object is gone: other rows are made."""
    folder, url, _ = web
    for name in ("cat/0.png", "cat/1.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / name)
    place = {"scratch": tmp_path / "scratch", "executor": InlineExecutor()}
    removes = Removes()
    job = Prepared("image_folder", url, tmp_path / "out", errors="skip", **place, hooks=[removes])
    removes.path = f"{job._made(RunOptions.of(job.options)).mirror.path}/cat/1.png"

    report = job.run(progress=False)

    assert report.num_failed == 1
    assert len(load(tmp_path / "out")) == 1


def test_run_over_a_web_server(web, tmp_path):
    """Workers fetch the pictures; nothing of them stays; the next run has nothing to do."""
    folder, url, _ = web
    for number in range(12):
        (folder / f"cat{number % 2}").mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(folder / f"cat{number % 2}/{number:02d}.png")
    two = WorkerOptions(num_workers=2, start_method="fork")
    job = Prepared("image_folder", url, tmp_path / "out", scratch=tmp_path / "scratch", workers=two)

    report = job.run(progress=False)
    again = job.run(progress=False)

    local = Prepared("image_folder", folder, tmp_path / "local", executor=InlineExecutor())
    local.run(progress=False)
    files = [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
    assert report.is_complete
    assert "nothing to do" in str(again)
    assert load(tmp_path / "out").keys() == load(tmp_path / "local").keys()
    assert len(files) == 12
    assert not any(map(is_here, files))
    assert url in repr(job)


def test_each_store_has_a_folder_of_its_own(tmp_path):
    """Two may have buckets of one name; what opens them does not matter."""
    memory, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    memory.pipe(f"/{tmp_path.name}/c.bin", b"x")

    def folder(**options):
        return mirrored(url, options, tmp_path).path

    own, secret = folder(), folder(key="A", client_kwargs={"secret": "B"})
    nested = [folder(client_kwargs={"endpoint_url": f"http://{name}"}) for name in ("one", "two", "one")]
    plain = [folder(endpoint_url="http://three"), folder(account_name="one"), folder(connection_string="one")]

    assert own == secret
    assert nested[0] == nested[2]
    assert len({own, *nested, *plain}) == 6


def test_signature_is_not_part_of_the_folder(web, tmp_path):
    """A source that is signed anew is the same one, and what is here is not fetched again."""
    folder, url, _ = web
    (folder / "table.csv").write_text("x\n1\n")

    paths = [mirrored(f"{url}/table.csv?X-Amz-Signature={n}", None, tmp_path).path for n in range(2)]
    before = os.stat(paths[0])
    paths.append(mirrored(f"{url}/table.csv?X-Amz-Signature=2", None, tmp_path).path)

    assert len(set(paths)) == 1
    assert os.stat(paths[2]).st_ino == before.st_ino


class Restless(DictFolder):
    """A folder that holds other files each time that it is listed."""

    is_private = False
    turn = 0

    def list(self, below="", *, deep=False):
        """Return five files two folders down, or one file, in turn."""
        type(self).turn += 1
        self.files = {f"a/b/{n}.bin": bytes(n + 1) for n in range(5)} if self.turn % 2 else {"c.bin": b"x"}
        return super().list(below, deep=deep)


def update_often(source):
    """Bring a folder in line with a source that changes each time."""
    for _ in range(300):
        source.update()


@pytest.mark.long
def test_processes_that_list_a_source_at_once_do_not_disturb_each_other(tmp_path):
    """What one removes another may have removed, and a folder may go before a file is put there."""
    undo = register_folder("restless", lambda url, options: Restless({"c.bin": b"x"}))
    source = mirrored("restless://set", None, tmp_path)
    undo()

    with concurrent.futures.ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(update_often, [source] * 4)) == [None] * 4

    assert list((pathlib.Path(source.path).parent / "work").iterdir()) == []


@pytest.fixture
def unsized(web, monkeypatch):
    """A web server whose answers come in chunks, and do not say how long they are, or when they were changed."""
    folder, url, _ = web

    def send(handler):
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("Content-Type", "text/csv")
        handler.end_headers()
        return handler.wfile

    def get(handler):
        content = (folder / handler.path.lstrip("/")).read_bytes()
        send(handler).write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content))

    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "do_HEAD", send)
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "do_GET", get)
    return folder, url


def test_file_whose_size_no_server_says(unsized, tmp_path):
    """As those that are made on demand, such as exports: its content tells whether it has changed."""
    folder, url = unsized
    (folder / "export.csv").write_text("key,text\na,one\nb,two\n")
    job = Prepared(
        TableWriter(features={"text": Text()}),
        f"{url}/export.csv",
        tmp_path / "out",
        scratch=tmp_path / "scratch",
        executor=InlineExecutor(),
    )

    def texts():
        report = job.run(progress=False)
        return report.num_shards_written, {sample["key"]: sample["text"] for sample in load(tmp_path / "out")}

    first, again = texts(), texts()
    (folder / "export.csv").write_text("key,text\na,one\nb,six\n")

    assert first == (1, {"a": "one", "b": "two"})
    assert again == (0, first[1])
    assert texts() == (1, {"a": "one", "b": "six"})


def test_file_without_end_whose_size_no_server_says_is_refused(unsized, tmp_path, monkeypatch):
    """So much is fetched, and no more."""
    folder, url = unsized
    (folder / "export.csv").write_text("key,text\na,one\n")
    monkeypatch.setattr("datamat.sources.mirror.MOST_BYTES", 10)

    with pytest.raises(SourceError, match=r"export\.csv has over 10 bytes, .*; download it, .* does not say its size"):
        mirrored(f"{url}/export.csv", None, tmp_path)
    assert os.listdir(next(tmp_path.glob("source-*/work"))) == []


def test_one_file_a_pattern_and_a_local_url(tmp_path):
    """All of them stand for what they name, and nothing beside it."""
    memory = fsspec.filesystem("memory")
    for name in ("a.csv", "b.csv", "c.txt"):
        memory.pipe(f"/{tmp_path.name}/{name}", b"x\n1\n")

    one = mirrored(f"memory://{tmp_path.name}/a.csv", None, tmp_path)
    some = mirrored(f"memory://{tmp_path.name}/*.csv", None, tmp_path)

    assert os.path.basename(one.path) == "a.csv"
    assert sorted(os.listdir(os.path.dirname(some.path))) == ["a.csv", "b.csv"]
    assert mirrored(f"file://{tmp_path}", None, None) is None


# ---------------------------------------------------------------- what is declared, and what is not


class Captioned(DatasetWriter):
    """Reads pictures through a library, and a caption beside each, which a field names."""

    name = "captioned"
    features = Features({"size": Scalar("int64"), "caption": Text()})

    def index(self, source):
        """Return a row for each picture."""
        names = sorted(path.relative_to(source) for path in pathlib.Path(source).glob("*/*.png"))
        return [IndexRow(name.stem, "train", {"image": str(name), "caption": str(name.with_suffix(".cap"))})
                for name in names]  # fmt: skip

    def read(self, row):
        """Return the number of pixels, and the caption."""
        place = pathlib.Path(row.fields["image"])
        return {"size": cv2.imread(str(place)).size, "caption": place.with_suffix(".cap").read_text()}


class Declared(Captioned):
    """Declares both."""

    file_fields = ("image", "caption")


class Forgetful(Captioned):
    """Declares the pictures alone."""

    file_fields = ("image",)


class Listed(Forgetful):
    """Declares the pictures in a field, and the captions as further files of the rows."""

    def index(self, source):
        """Return a row for each picture."""
        return [row._replace(files=[row.fields["caption"]], fields={"image": row.fields["image"]})
                for row in super().index(source)]  # fmt: skip


@pytest.fixture
def captioned(web):
    """A web server with six pictures, each with a caption beside it, and a text that nobody reads."""
    folder, url, seen = web
    (folder / "set").mkdir()
    for number in range(6):
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(folder / f"set/{number}.png")
        (folder / f"set/{number}.cap").write_text(f"picture {number}")
    (folder / "set/unread.bin").write_bytes(bytes(1000))
    return folder, url, seen


def captions(output):
    """Return the caption of each sample, by key."""
    return {sample["key"]: str(sample["caption"]) for sample in load(output)}


EXPECTED = {f"{number}": f"picture {number}" for number in range(6)}


@pytest.mark.parametrize("writer", [Declared, Listed])
def test_what_is_declared_is_fetched_and_nothing_else(captioned, tmp_path, caplog, writer):
    """In fields, or as files of the rows; afterwards all of it is gone, and nothing was announced."""
    _, url, seen = captioned
    two = WorkerOptions(num_workers=2, start_method="fork")

    Prepared(writer, url, tmp_path / "out", scratch=tmp_path / "scratch", workers=two).run(progress=False)

    assert captions(tmp_path / "out") == EXPECTED
    assert not any("unread" in path for path in seen)
    assert not any(map(is_here, (tmp_path / "scratch").rglob("*.*")))
    assert "fetching" not in caplog.text


def test_all_is_fetched_for_a_writer_that_declares_nothing(captioned, tmp_path, caplog):
    """It is said before, with the bytes; it stays; and another scratch folder gets it from the first."""
    _, url, seen = captioned
    job = Prepared(Captioned, url, tmp_path / "out", executor=InlineExecutor())
    said, fetched = caplog.text, [path for path in seen if "." in path]
    seen.clear()

    job.run(progress=False, scratch=tmp_path / "scratch")
    job.run(progress=False, scratch=tmp_path / "scratch")

    assert captions(tmp_path / "out") == EXPECTED
    assert re.search(r"fetching 13 files of http://\S+, [\d,]+ bytes, to /.*: the writer .* file_fields", said)
    assert len(fetched) == len(set(fetched)) == 13
    assert not [path for path in seen if "." in path]
    assert len(list((tmp_path / "scratch").rglob("*.*"))) == 13


def test_source_that_does_not_fit_on_the_disk_is_refused(captioned, tmp_path, monkeypatch):
    """Before any of it is fetched."""
    _, url, seen = captioned
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1000))

    with pytest.raises(
        SourceError, match=r"13 files of .* do not fit into .*: .*, or declare file_fields in the writer"
    ):
        Prepared(Captioned, url, tmp_path / "out")

    assert not [path for path in seen if "." in path]


@pytest.mark.parametrize("how", [{"executor": InlineExecutor()}, {"workers": WorkerOptions(1, start_method="fork")}])
@pytest.mark.parametrize("first", ["0", "5"], ids=["from the first row on", "in a later part"])
def test_file_that_is_not_declared_is_named_with_the_remedy(captioned, tmp_path, how, first):
    """By its URL. Root can open it: then the run says so, whatever came of the zeros."""
    _, url, _ = captioned

    class Strict(Forgetful):
        def read(self, row):
            caption = pathlib.Path(row.fields["image"]).with_suffix(".cap")
            return {"size": 1, "caption": caption.read_text() if row.key >= first else ""}

    job = Prepared(Strict, url, tmp_path / "out", scratch=tmp_path / "scratch", shards=6, **how)

    with pytest.raises((SampleError, SourceError)) as raised:
        job.run(progress=False)

    said = rf"{url}/set/\d\.cap was not fetched, because no row declares it: name its field in file_fields"
    assert re.search(said, str(raised.value))
    assert "scratch" not in str(raised.value)
    assert seen_files(captioned) <= {"png"}


def seen_files(captioned):
    """Return the suffixes of the files that were fetched."""
    return {path.rpartition(".")[2] for path in captioned[2] if "." in path}


def test_file_that_the_index_reads_is_declared_by_the_class(captioned, tmp_path):
    """In `files`; else the error says so. It is fetched before `bind`."""
    folder, url, _ = captioned
    (folder / "classes.bin").write_bytes(b"one two")

    class Bound(Declared):
        def bind(self, source):
            self.names = read_file(f"{source}/classes.bin").split()

    class Complete(Bound):
        files = ("classes.bin",)

    class Indexed(Declared):
        def index(self, source):
            return super().index(source) if pathlib.Path(source, "classes.bin").read_bytes() else []

    class Opened(Declared):
        def bind(self, source):
            self.names = pathlib.Path(source, "classes.bin").read_bytes()

    for writer in (Bound, Indexed, Opened):
        with pytest.raises(SourceError, match=rf"{url}/classes\.bin was not fetched, .* in the writer's files"):
            Prepared(writer, url, tmp_path / "out", executor=InlineExecutor()).run(progress=False)
    job = Prepared(Complete, url, tmp_path / "out", executor=InlineExecutor(), scratch=tmp_path / "scratch")
    job.run(progress=False)
    assert job.writer.names == [b"one", b"two"]
    assert captions(tmp_path / "out") == EXPECTED


def test_new_version_with_the_same_content_remakes_nothing(captioned, tmp_path):
    """It is fetched to be compared, and goes again."""
    folder, url, seen = captioned
    job = Prepared(Declared, url, tmp_path / "out", scratch=tmp_path / "scratch", executor=InlineExecutor())
    job.run(progress=False)
    os.utime(folder / "set/3.png", (1, 1))
    seen.clear()

    report = job.run(progress=False)

    assert report.num_shards_written == 0
    assert "/set/3.png" in seen
    assert not any(map(is_here, (tmp_path / "scratch").rglob("*.*")))


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("memory://nothing/there", SourceError, "holds nothing; check the address"),
        ("memory://*/x", OptionError, "names no folder before its wildcards"),
        ("simplecache::memory://x/y", OptionError, "chain of filesystems"),
        ("no-such-thing://x/y", OptionError, "Protocol not known"),
    ],
)
def test_what_cannot_be_listed_is_refused(url, error, message, tmp_path):
    """The message names the URL."""
    with pytest.raises(error, match=message):
        mirrored(url, None, tmp_path)


def test_web_server_that_lists_nothing_is_named(web, tmp_path, monkeypatch):
    """As many are set up, for folders without an index page."""
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "list_directory", lambda self, _: self.send_error(403))

    with pytest.raises(SourceError, match=r"cannot be listed: .*403.*; check the address, and give storage_options"):
        mirrored(web[1], None, tmp_path / "cache")


def test_name_that_is_no_file_name_is_left_aside(tmp_path, caplog):
    """A store may have both `a` and `a/b`; a disk may not, and nothing may lead out of its folder."""
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/{tmp_path.name}/a", b"1")
    for name in ("a/b", "x/../c", "back\\slash", "line\nfeed"):
        memory.store[f"/{tmp_path.name}/{name}"] = memory.store[f"/{tmp_path.name}/a"]

    mirror = mirrored(f"memory://{tmp_path.name}", None, tmp_path)

    assert [path.name for path in pathlib.Path(mirror.path).rglob("*") if path.is_file()] == ["b"]
    assert r"4 of memory:" in caplog.text
    assert r"left aside, as no file can have such a name: 'a', 'back\\slash', 'line\nfeed', 'x/../c'" in caplog.text


def test_names_of_a_web_server_are_those_of_its_files(web, tmp_path):
    """Its pages quote them, as do the requests for them."""
    folder, url, _ = web
    names = ["100%.csv", "a#b.csv", "a b.csv", "a%20b.csv", "a+b&c.csv", "ü.csv"]
    for name in names:
        (folder / name).write_text(name)

    mirror = mirrored(url, None, tmp_path)

    assert sorted(os.listdir(mirror.path)) == sorted(names)
    assert [pathlib.Path(mirror.path, name).read_text() for name in names] == names
    one = mirrored(f"{url}/a%2520b.csv", None, tmp_path)
    assert (os.path.basename(one.path), pathlib.Path(one.path).read_text()) == ("a%20b.csv", "a%20b.csv")


def test_marker_of_a_folder_is_no_file(tmp_path):
    """Consoles of stores make an empty object where a folder is made."""
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/{tmp_path.name}/a/b": b"1"})
    memory.pipe(f"/{tmp_path.name}/c", b"")
    memory.store[f"/{tmp_path.name}/a"] = memory.store[f"/{tmp_path.name}/c"]

    assert sorted(os.listdir(mirrored(f"memory://{tmp_path.name}", None, tmp_path).path)) == ["a", "c"]


def test_file_of_a_web_server_is_told_from_a_page_that_lists_a_folder(web, tmp_path):
    """By how it begins: other XML is a file, and so is a page that is called one."""
    folder, url, _ = web
    for name, content in {"a.xml": '<?xml version="1.0"?><rows/>', "b.html": "<html></html>"}.items():
        (folder / name).write_text(content)

        assert pathlib.Path(mirrored(f"{url}/{name}", None, tmp_path).path).name == name


def test_row_that_ends_its_worker_is_quarantined_with_its_files(captioned, tmp_path):
    """Although another process has fetched them, and has dropped them."""
    _, url, _ = captioned

    class Deadly(Declared):
        def read(self, row):
            if row.key == "3":
                os._exit(1)
            return super().read(row)

    one = WorkerOptions(num_workers=1, start_method="fork", max_retries=0)

    Prepared(Deadly, url, tmp_path / "out", workers=one, errors="quarantine").run(progress=False)

    kept = {path.name for path in (tmp_path / "out/.datamat/quarantine/train/3").iterdir()}
    assert {"image-3.png", "caption-3.cap"} <= kept


def test_errors_name_files_by_their_urls(web, tmp_path):
    """When the source is opened, when it is indexed, and when a row is read; the folder of the mirror is nobody's."""
    folder, url, _ = web
    (folder / "set/cat").mkdir(parents=True)
    (folder / "set/cat/1.png").write_bytes(b"\x89PNG\r\n\x1a\n, and no more")
    (folder / "a.tar").write_bytes(b"no archive, but long enough to be read as the header of one" * 20)
    place = {"scratch": tmp_path / "scratch", "executor": InlineExecutor()}

    with pytest.raises(SourceError) as opened:
        Prepared("webdataset", f"{url}/a.tar", tmp_path / "tar", **place)
    with pytest.raises(SourceError) as indexed:
        Prepared("camvid", f"{url}/set", tmp_path / "camvid", **place).plan()
    with pytest.raises(SampleError) as read:
        Prepared("image_folder", f"{url}/set", tmp_path / "set", **place).run(progress=False)

    for error, name in ((opened, "a.tar"), (indexed, "set"), (read, "set/cat/1.png")):
        assert f"{url}/{name}" in str(error.value)
        assert "scratch" not in str(error.value)
