"""Every kind of folder passes the conformance tests that datamat ships; and which folder a path or URL names."""

import concurrent.futures
import contextlib
import errno
import multiprocessing
import os
import pathlib
import re
import signal
import socket
import threading
import uuid

import loopback_s3
import psutil
import pytest
from dict_folder import DictFolder
from web import serving

from datamat import OptionError, OutputError, load, materialize, verify
from datamat.folders import (
    AbsentError,
    ChangedError,
    DeniedError,
    ReplaceIf,
    UnsupportedError,
    create_once,
    open_file,
    open_folder,
    open_output,
    register_folder,
)
from datamat.testing import FolderConformance, InlineExecutor


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """What fails is tried again at once."""
    monkeypatch.setattr("datamat.folders.retries._FIRST_WAIT_S", 0.001)


KEYS = {"key": loopback_s3.KEY, "secret": loopback_s3.SECRET, "client_kwargs": {"region_name": "us-east-1"}}


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

    def test_nothing_is_written_through_a_link(self, tmp_path):
        """Neither through that of a folder, nor of a file: this one is replaced."""
        folder = self.make_folder({"a": b"1"}, tmp_path)
        elsewhere = write({"file": b"theirs"}, tmp_path / "elsewhere")
        (tmp_path / "set/link").symlink_to(elsewhere)
        (tmp_path / "set/file").symlink_to(elsewhere / "file")

        for use in (lambda: folder.write("link/x", b""), lambda: folder.delete("link/file")):
            with pytest.raises(OutputError, match="link"):
                use()
        folder.write("file", b"mine")
        assert folder.read("file", 10) == b"mine"
        assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == {"file": b"theirs"}

    def test_link_to_itself_is_listed(self, tmp_path):
        """As a file that is there, and cannot be read: whoever repairs moves it away."""
        folder = self.make_folder({"a": b"1"}, tmp_path)
        (tmp_path / "set/loop").symlink_to("loop")
        assert [*folder.list(deep=True)] == ["a", "loop"]

    def test_killed_writer_leaves_nothing_to_see(self, tmp_path):
        """Neither a name, nor a lock that others wait for."""
        folder = self.make_folder({}, tmp_path)
        version = folder.write("file", b"1")
        for kill, mode in [("link", "create"), ("rename", "overwrite"), ("rename", ReplaceIf(version))]:
            child = multiprocessing.get_context("fork").Process(target=killed_at, args=(kill, folder, mode))
            child.start()
            child.join()
            assert child.exitcode == 9
            assert {name: folder.read(name, 10) for name in folder.list()} == {"file": b"1"}
        assert len(os.listdir(tmp_path / "set")) > 1

        folder.write("file", b"2", ReplaceIf(version))
        assert folder.read("file", 10) == b"2"

    @pytest.mark.parametrize("mode", ["create", "overwrite"])
    def test_full_disk_is_said(self, tmp_path, monkeypatch, mode):
        folder = self.make_folder({"file": b"1"}, tmp_path)

        def fsync(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(OutputError, match=r"set/new cannot be written: No space left on device; make room"):
            folder.write("new", b"2", mode)
        assert os.listdir(tmp_path / "set") == ["file"]

    def test_file_system_without_links_and_locks_will_do(self, tmp_path, monkeypatch):
        def refuse(*_, **__):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(os, "link", refuse)
        monkeypatch.setattr("fcntl.flock", refuse)
        self.test_file_is_created_once(tmp_path / "a")
        self.test_file_is_copied(tmp_path / "b")
        folder = self.make_folder({}, tmp_path / "c")
        folder.write("file", b"2", ReplaceIf(folder.write("file", b"1")))
        assert folder.read("file", 10) == b"2"

    def test_file_that_goes_after_it_was_listed_hides_no_other(self, tmp_path):
        folder = self.make_folder({"a/goes": b"", "a/stays": b"1", "b": b""}, tmp_path)
        listed = folder.list(deep=True)
        folder.delete("a/goes")
        assert [(name, stat.num_bytes, bool(stat.version)) for name, stat in listed.items()] == [
            ("a/goes", 0, False), ("a/stays", 1, True), ("b", 0, True)
        ]  # fmt: skip

    def test_file_that_another_host_has_just_written_is_seen(self, tmp_path, monkeypatch):
        """NFS remembers which names were missing, until their folder is opened."""
        folder = self.make_folder({"a/new": b"1"}, tmp_path)
        lstat, opened, missing = os.lstat, os.open, {str(folder.local_path() / "a"), str(folder.local_path() / "a/new")}

        def lstat_of_nfs(path):
            if str(path) in missing:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return lstat(path)

        def open_of_nfs(path, *args, **more):
            missing.difference_update([name for name in missing if os.path.dirname(name) == str(path)])
            return opened(path, *args, **more)

        monkeypatch.setattr(os, "lstat", lstat_of_nfs)
        monkeypatch.setattr(os, "open", open_of_nfs)
        assert folder.read_if_there("a/new", 10) == b"1"
        missing |= {str(folder.local_path() / "a/new")}
        assert folder.stat("a/new").num_bytes == 1


def killed_at(call, folder, mode):
    """Write a file, and end where a function of the system would be called: for a forked process."""
    setattr(os, call, lambda *_, **__: os._exit(9))
    folder.write("new" if mode == "create" else "file", b"of the dead", mode)


class TestMemory(FolderConformance):
    """A filesystem of fsspec."""

    def make_folder(self, files, tmp_path):
        fsspec = pytest.importorskip("fsspec")
        url = f"memory://{uuid.uuid4().hex}"
        for name, content in files.items():
            fsspec.filesystem("memory").pipe_file(f"{url}/{name}", content)
        return open_folder(url)


class TestWeb(FolderConformance):
    """A web server; with a signature in the URL, which goes along to each file."""

    secrets = ("sesame", "tok-en")
    is_writable = False
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
    def server(self):
        with loopback_s3.serving() as self.s3:
            self.s3.page = 2
            yield

    def make_folder(self, files, tmp_path):
        folder = open_output("s3://bucket/sets/one", {**KEYS, "endpoint_url": self.s3.url})
        for name, content in files.items():
            self.s3.write(f"bucket/sets/one/{name}", content, loopback_s3.md5_of(content).hexdigest(), {})
        return folder

    def fail_once(self, fault, *operations):
        """Have the server fail at the next request of a kind."""
        faults = [fault]
        self.s3.meet = lambda operation, path: faults.pop() if operation in operations and faults else None
        return faults

    def test_objects_that_stand_for_folders_are_no_files(self, tmp_path):
        """The console of S3 makes one for each folder, and Hadoop does."""
        folder = self.make_folder(
            {"": b"", "a/": b"", "a/b/": b"", "a/b/file": b"1", "empty": b"", "e/x": b"2"}, tmp_path
        )

        assert [*folder.list()] == ["empty"]
        assert [*folder.list(deep=True)] == ["a/b/file", "e/x", "empty"]
        assert [*folder.list("a", deep=True)] == ["b/file"]

    @pytest.mark.parametrize("fault", ["silence", 500, 503, "cut"])
    def test_failures_that_pass_are_survived(self, tmp_path, fault):
        content = bytes(3 << 20)
        folder = self.make_folder({"name": content}, tmp_path)
        for use, operation, expected in [
            (lambda: folder.read_range("name", 5, 2 << 20).content, "get_object", bytes((2 << 20) - 5)),
            (lambda: b"".join(folder.blocks("name", 3 << 20)), "get_object", content),
            (lambda: [*folder.list()], "list_objects_v2", ["name"]),
            (lambda: folder.copy("name", "copy"), "copy_object", None),
            (lambda: folder.delete("copy"), "delete_object", None),
        ]:
            left = self.fail_once(fault, operation)
            assert use() == expected
            assert not left

    @pytest.mark.parametrize("fault", ["silence", "lose", 500, 503])
    @pytest.mark.parametrize("mode", ["create", "replace_if"])
    def test_writes_on_a_condition_are_made_again(self, tmp_path, fault, mode):
        """Where the answer was lost, the file that is met is the writer's own: content decides."""
        folder = self.make_folder({"there": b"1"}, tmp_path)
        left = self.fail_once(fault, "put_object")

        if mode == "create":
            assert create_once(folder, "name", b"2")
        else:
            version = folder.stat("there").version
            with pytest.raises(ChangedError) if fault == "lose" else contextlib.nullcontext():
                folder.write("there", b"2", ReplaceIf(version))

        assert folder.read("there" if mode == "replace_if" else "name", 1) == b"2"
        assert not left

    def test_store_without_conditions_is_said(self, tmp_path):
        """At once: callers write in another way then."""
        folder = self.make_folder({"there": b"1"}, tmp_path)
        self.s3.meet = lambda operation, path: 501 if operation == "put_object" else None

        for mode in ("create", ReplaceIf(folder.stat("there").version)):
            self.s3.seen.clear()
            with pytest.raises(UnsupportedError, match="does not support a condition"):
                folder.write("there", b"2", mode)
            assert len(self.s3.seen) == 1

    @pytest.mark.parametrize("operation", ["get_object", "put_object"])
    def test_refusal_says_what_to_do(self, tmp_path, operation):
        folder = self.make_folder({"name": b"1"}, tmp_path)
        self.s3.meet = lambda found, path: 403 if found == operation else None

        done, way = ("read", "read there") if operation == "get_object" else ("written", "read and write there")
        with pytest.raises(DeniedError, match=rf"s3://bucket/sets/one/name cannot be {done}: .* credentials may {way}"):
            folder.read("name", 1) if operation == "get_object" else folder.write("name", b"2")

    def test_bucket_that_is_missing_is_no_missing_file(self, tmp_path):
        folder = self.make_folder({"name": b"1"}, tmp_path)
        self.s3.buckets.clear()
        for use in (
            lambda: folder.read("name", 1),
            lambda: folder.stat("name"),
            folder.list,
            lambda: folder.write("name", b"", "create"),
            lambda: folder.copy("name", "other"),
            lambda: folder.delete("name"),
        ):
            with pytest.raises(OutputError, match="there is no such bucket") as raised:
                use()
            assert not isinstance(raised.value, AbsentError)

    @pytest.mark.parametrize(
        ("address", "message"),
        [
            ("http://127.0.0.1:1", "127.0.0.1:1 refuses connections; start it, or correct the address"),
            ("http://nowhere.invalid", "nowhere.invalid cannot be found by that name; correct the address"),
            ("http://127.0.0.1:{silent}", "127.0.0.1:{silent} does not answer in time; check the network"),
            ("https://127.0.0.1:{port}", "127.0.0.1:{port} does not speak TLS; give its address with http://"),
        ],
    )
    def test_cause_that_is_the_network_is_named(self, monkeypatch, address, message):
        """With the server and what to do, and no secret."""
        monkeypatch.setattr("datamat.folders.objects._RETRY", {"max_retries": 0})
        with socket.create_server(("127.0.0.1", 0)) as silent:
            ports = {"silent": silent.getsockname()[1], "port": self.s3.url.rpartition(":")[2]}
            timeout_s = 0.5 if "silent" in address else 60
            options = {**KEYS, "endpoint_url": address.format(**ports), "config_kwargs": {"read_timeout": timeout_s}}
            with pytest.raises(OutputError, match=re.escape(message.format(**ports))) as failed:
                open_folder("s3://bucket/sets", options).read("name", 1)

        assert KEYS["secret"] not in str(failed.value)

    @pytest.mark.parametrize("key", ["a//b.png", "a/../b.png", "./b.png"])
    def test_key_that_is_no_path_is_named(self, tmp_path, key):
        """The client lists none of the others then."""
        folder = self.make_folder({"name": b"1", key: b"2"}, tmp_path)

        with pytest.raises(OutputError, match=f"the key 'sets/one/{re.escape(key)}' in it is not a path; rename"):
            folder.list(deep=True)

    def test_key_that_is_no_path_in_a_folder_below_hides_nothing(self, tmp_path):
        """Readers and runs list the folders of a set alone: what lies beside its files there does not end them."""
        folder = self.make_folder({"name": b"1", "a//b.png": b"2", "a/../c.png": b"3", "b/d": b"4"}, tmp_path)

        assert [*folder.list()] == ["name"]
        assert [*folder.list("b", deep=True)] == ["d"]

    @pytest.mark.parametrize("name", ["a?b", "a#b", "a%20b", "a b"])
    def test_name_of_an_output_may_hold_what_ends_a_url(self, name):
        folder = open_output(f"s3://bucket/{name}", {**KEYS, "endpoint_url": self.s3.url})

        folder.write("file", b"1")

        assert list(self.s3.objects) == [f"bucket/{name}/file"]
        assert [*folder.list()] == ["file"]

    def test_configuration_of_fsspec_counts(self, tmp_path, monkeypatch):
        """As for s3fs; options win over it."""
        config = pytest.importorskip("fsspec.config")
        self.make_folder({"name": b"1"}, tmp_path)
        monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", self.s3.url)
        monkeypatch.setitem(config.conf, "s3", {**KEYS, "endpoint_url": self.s3.url})
        monkeypatch.setattr("datamat.folders.objects._RETRY", {"max_retries": 0})

        assert open_folder("s3://bucket/sets/one").read("name", 1) == b"1"
        with pytest.raises(OutputError, match=r"127\.0\.0\.1:1 refuses connections"):
            open_folder("s3://bucket/sets/one", {"endpoint_url": "http://127.0.0.1:1"}).read("name", 1)

    def test_interrupt_ends_a_request(self, tmp_path):
        """Within a moment, although the server says nothing for a minute."""
        folder, ends = self.make_folder({"name": b"1"}, tmp_path), threading.Event()

        def meet(operation, path):
            os.kill(os.getpid(), signal.SIGINT)
            ends.wait()

        self.s3.meet = meet
        with pytest.raises(KeyboardInterrupt):
            folder.read("name", 1)
        ends.set()

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


class TestS3InParts(TestS3):
    """Files that are sent as those over half a gigabyte are."""

    large_bytes = 20 << 20
    # Of requests that are the same:
    test_failures_that_pass_are_survived = None
    test_cause_that_is_the_network_is_named = None
    test_key_that_is_no_path_is_named = None
    test_key_that_is_no_path_in_a_folder_below_hides_nothing = None
    test_configuration_of_fsspec_counts = None

    @pytest.fixture(autouse=True)
    def in_parts(self, monkeypatch):
        monkeypatch.setattr("datamat.folders.objects._AT_ONCE_BYTES", 15)

    @pytest.mark.parametrize("fault", ["silence", "lose", 503])
    def test_part_is_sent_again(self, tmp_path, fault):
        folder = self.make_folder({}, tmp_path)
        (tmp_path / "large").write_bytes(bytes(self.large_bytes))
        left = self.fail_once(fault, "upload_part")

        folder.write_file("large", tmp_path / "large", "create")

        assert folder.read("large", self.large_bytes) == bytes(self.large_bytes)
        assert not left
        assert not self.s3.uploads

    def test_upload_that_fails_is_given_up(self, tmp_path):
        folder = self.make_folder({}, tmp_path)
        (tmp_path / "large").write_bytes(bytes(self.large_bytes))
        self.s3.meet = lambda operation, path: 403 if operation == "upload_part" else None

        with pytest.raises(DeniedError):
            folder.write_file("large", tmp_path / "large")

        assert not self.s3.uploads
        assert not self.s3.objects


class TestUnknownFilesystem(FolderConformance):
    """One of fsspec's, of which nothing is known: a file is written aside, and moved."""

    def make_folder(self, files, tmp_path):
        pytest.importorskip("fsspec")
        write(files, tmp_path / "set")
        return open_output(f"local://{tmp_path}/set")

    def test_one_that_cannot_copy_is_read_and_written(self, tmp_path, monkeypatch):
        """As those of FTP and SFTP are."""

        def refuse(*_, **__):
            raise NotImplementedError

        def put(files, source, path):
            files.pipe_file(path, pathlib.Path(source).read_bytes())

        filesystem = "fsspec.implementations.local.LocalFileSystem"
        monkeypatch.setattr(f"{filesystem}.cp_file", refuse)
        monkeypatch.setattr(f"{filesystem}.put_file", put)
        self.test_file_is_copied(tmp_path)


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
        ("https://host/a/my%20set", ("https://host/a/my%20set", "https://host/a", "my set")),
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
        ("s3://bucket/shard-{000..009}.tar", None, r"a wildcard: s3://bucket/shard-\*\.tar"),
        ("shard-{000..009}.tar", None, r"a wildcard: shard-\*\.tar"),
    ],
)
def test_what_names_no_folder_is_refused(place, options, message):
    with pytest.raises(OptionError, match=message):
        open_folder(place, options)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("simplecache::s3://bucket/out", "chain of filesystems"),
        ("https://host/out", "https:// can be read, not written; give a folder, or a URL such as s3://bucket/out"),
        ("s3://key:word@bucket/out", "a s3:// URL holds a password"),
        ("gs://bucket/out?sig=1", "or a signature"),
        ("s3://", "names no folder"),
    ],
)
def test_what_is_no_output_is_refused(place, message):
    """The message never repeats what may be a secret."""
    with pytest.raises(OptionError, match=re.escape(message)) as refused:
        open_output(place)

    assert "word@" not in str(refused.value)
    assert "sig=" not in str(refused.value)


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
