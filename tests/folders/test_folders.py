"""Every kind of folder passes the conformance tests that datamat ships; and which folder a path or URL names."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import uuid

import psutil
import pytest
from dict_folder import DictFolder
from web import serving

from datamat import OptionError, OutputError, load, materialize, verify
from datamat.folders import DeniedError, open_file, open_folder, register_folder
from datamat.testing import FolderConformance, InlineExecutor


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """What fails is tried again at once."""
    monkeypatch.setattr("datamat.folders.retries._FIRST_WAIT_S", 0.001)


KEYS = {"key": "AKIDEXAMPLE", "secret": "a-long-secret-key", "client_kwargs": {"region_name": "us-east-1"}}


def write(files, folder):
    """Write files below a folder of the disk."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


class TestLocal(FolderConformance):
    def make_folder(self, files, tmp_path):
        return open_folder(write(files, tmp_path / "set"))


class TestMemory(FolderConformance):
    """A filesystem of fsspec."""

    has_processes = False

    def make_folder(self, files, tmp_path):
        fsspec = pytest.importorskip("fsspec")
        url = f"memory://{uuid.uuid4().hex}"
        for name, content in files.items():
            fsspec.filesystem("memory").pipe_file(f"{url}/{name}", content)
        return open_folder(url)


class TestWeb(FolderConformance):
    """A web server; with a signature in the URL, which goes along to each file."""

    secrets = ("sesame", "tok-en")
    ranges = True
    test_odd_names_are_names = None  # a name is a part of the URL as it is written

    @pytest.fixture(autouse=True)
    def server(self, tmp_path):
        pytest.importorskip("aiohttp")
        (tmp_path / "served").mkdir()
        with serving(tmp_path / "served", ranges=self.ranges) as self.web:
            yield

    def make_folder(self, files, tmp_path):
        write(files, tmp_path / "served")
        return open_folder(f"{self.web.url}?sig=sesame", {"headers": {"X-Token": "tok-en"}})


class TestWebWithoutRanges(TestWeb):
    ranges = False


class TestS3(FolderConformance):
    """A server that answers as S3 does; `tests/interop` has those of others."""

    secrets = (KEYS["secret"],)

    @pytest.fixture(autouse=True)
    def server(self, tmp_path):
        (tmp_path / "served").mkdir()
        with serving(tmp_path / "served") as self.web:
            yield

    def make_folder(self, files, tmp_path):
        write(files, tmp_path / "served/bucket/sets/one")
        return open_folder("s3://bucket/sets/one", {**KEYS, "endpoint_url": self.web.url})

    @pytest.mark.parametrize("fault", ["silence", 500, 503, "cut"])
    def test_failures_that_pass_are_survived(self, tmp_path, fault):
        folder = self.make_folder({"name": bytes(3 << 20)}, tmp_path)
        self.web.faults["name"] = [fault]

        assert folder.read_range("name", 5, 2 << 20) == bytes((2 << 20) - 5)
        self.web.faults["name"] = [fault]
        assert b"".join(folder.blocks("name", 3 << 20)) == bytes(3 << 20)
        assert self.web.faults == {"name": []}

    def test_refusal_says_what_to_do(self, tmp_path):
        folder = self.make_folder({"name": b"1"}, tmp_path)
        self.web.faults["name"] = 403

        with pytest.raises(DeniedError, match=r"s3://bucket/sets/one/name cannot be read: .* credentials may read"):
            folder.read("name", 1)

    def test_interrupt_ends_a_request(self, tmp_path):
        """Within a moment, although the server says nothing for a minute."""
        folder = self.make_folder({"name": b"1"}, tmp_path)
        self.web.faults["name"] = "stall"
        self.web.hears = lambda: os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            folder.read("name", 1)

    def test_helper_of_a_forked_process_that_is_killed_is_said(self, tmp_path):
        """The error has the remedy."""
        folder = self.make_folder({"name": b"1"}, tmp_path)
        folder.read("name", 1)
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            said = pool.submit(kill_helper, folder).result()

        assert "forkserver" in said


def kill_helper(folder):
    """Read, kill the process that does so, and read again: for a forked process."""
    folder.read("name", 1)
    for child in psutil.Process().children():
        child.kill()
        child.wait()
    try:
        folder.read("name", 1)
    except OutputError as error:
        return str(error)
    return ""


class TestOfAnotherPackage(FolderConformance):
    def make_folder(self, files, tmp_path):
        return DictFolder(dict(files))


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("/data/set", ("/data/set", "/data", "set")),
        ("file:///data/set/", ("/data/set", "/data", "set")),
        ("/set", ("/set", "/", "set")),
        ("https://me:word@host/a/set?sig=1", ("https://host/a/set?...", "https://host/a?...", "set")),
    ],
)
def test_places_are_shown_without_secrets(place, expected):
    folder, name = open_file(place)

    assert (str(open_folder(place)), str(folder), name) == expected


def test_home_and_working_folder_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    assert open_folder("~/set").local_path() == tmp_path / "home/set"
    assert open_folder("set").local_path() == tmp_path / "set"
    assert [str(part) for part in open_file("set.tfrecord")] == [str(tmp_path), "set.tfrecord"]


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("out", {"anon": True}, "storage_options are for URLs, and out is a path"),
        ("simplecache::https://host/set", None, "is a chain of filesystems"),
    ],
)
def test_what_names_no_folder_is_refused(place, options, message):
    with pytest.raises(OptionError, match=message):
        open_folder(place, options)


def test_folder_of_another_package_is_read_by_its_url(tmp_path):
    """One class and one line: then its URLs are read and verified as all others are."""
    out = tmp_path / "out"
    materialize(lambda number: {"square": number * number}, range(20), out, executor=InlineExecutor(), progress=False)
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    undo = register_folder("dict", lambda url, options: DictFolder(files))

    found = load("dict://set", cache_dir=tmp_path / "cache")

    assert [sample["square"] for sample in found] == [sample["square"] for sample in load(out)]
    assert found.keys() == load(out).keys()
    assert verify("dict://set").ok
    undo()
    with pytest.raises(OptionError, match="dict://set"):
        load("dict://set", cache_dir=tmp_path / "cache")
