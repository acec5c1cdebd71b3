"""Files that appear complete, or not at all."""

import errno
import fcntl
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat.directory.files import (
    commit,
    commit_json,
    digest_file,
    lock_holder,
    locked,
    publish,
    read_json,
    render_json,
)
from datamat.errors import OptionError, OutputLockedError
from datamat.folders.local import expand_home


def test_commit_names_the_file_only_at_the_end(tmp_path):
    """Nothing has the name while the file is written; nothing is left after an error."""
    path = tmp_path / "f"

    with commit(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"

    with pytest.raises(RuntimeError, match="stop"), commit(path) as file:  # noqa: PT012
        file.write(b"half")
        raise RuntimeError("stop")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_commit_flushes_the_file_before_its_name_and_the_folder_after(tmp_path, monkeypatch):
    """Only this order survives a power cut."""
    calls = []
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append("fsync " + os.readlink(f"/proc/self/fd/{fd}")), real_fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), real_replace(a, b)))

    with commit(tmp_path / "f") as file:
        file.write(b"x")

    assert [call.partition(" ")[0] for call in calls] == ["fsync", "rename", "fsync"]
    assert calls[0].endswith(".tmp") and calls[2] == f"fsync {tmp_path}"


def test_commit_does_not_write_through_a_planted_link(tmp_path):
    """A link at the temporary name is removed, and its target is not touched."""
    target = tmp_path / "victim"
    target.write_bytes(b"precious")
    os.symlink(target, tmp_path / f".f.{os.getpid()}.tmp")

    with commit(tmp_path / "f") as file:
        file.write(b"x")

    assert target.read_bytes() == b"precious" and not (tmp_path / "f").is_symlink()


def test_umask_is_honoured(tmp_path):
    """Permissions are the user's choice."""
    old = os.umask(0o027)
    try:
        with commit(tmp_path / "f") as file:
            file.write(b"x")
    finally:
        os.umask(old)

    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


def test_json_is_sorted_and_strict(tmp_path):
    """Equal values give equal bytes; NaN is no JSON; a value that JSON cannot hold is named."""
    commit_json(tmp_path / "a.json", {"b": 1, "a": "é"})
    commit_json(tmp_path / "b.json", {"a": "é", "b": 1})

    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert read_json(tmp_path / "a.json") == {"a": "é", "b": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        commit_json(tmp_path / "c.json", float("nan"))
    (tmp_path / "bad.json").write_bytes(b"\x80\x05K\x01.")
    with pytest.raises(ValueError, match=r"bad.json is not JSON"):
        read_json(tmp_path / "bad.json")
    assert json.loads((tmp_path / "a.json").read_text())


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda parts: (
        st.lists(parts)
        | st.lists(parts).map(tuple)
        | st.dictionaries(st.text(), parts)
        | st.dictionaries(st.integers(), parts)
    ),
)


@given(_JSON)
def test_json_is_rendered_as_by_the_standard_library(value):
    """The fast way gives the bytes of the slow way."""
    wanted = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)

    assert render_json(value) == f"{wanted}\n".encode()


def test_digest_of_a_range_is_the_digest_of_its_bytes(tmp_path):
    """For the whole and for a part."""
    (tmp_path / "a").write_bytes(b"0123456789" * 200_000)
    (tmp_path / "b").write_bytes((b"0123456789" * 200_000)[5:1_500_000])

    assert digest_file(tmp_path / "a", start=5, num_bytes=1_499_995) == digest_file(tmp_path / "b")
    publish(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").exists()


HOLDER = """
import pathlib, sys, os
from datamat.directory.files import locked
with locked(pathlib.Path(sys.argv[1])):
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_names_its_holder_and_dies_with_it(tmp_path):
    """Another process is refused; after SIGKILL the lock is free, though a forked child lives on."""
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"

    with pytest.raises(OutputLockedError, match=f"being written by process {holder.pid} on "), locked(path):
        pass
    holder.kill()
    holder.wait()
    with locked(path), pytest.raises(OutputLockedError, match="another thread of this process"), locked(path):
        pass
    holder.stdin.close(), holder.stdout.close()


@pytest.fixture
def without_locks(monkeypatch):
    """Simulate a file system without locks: a test cannot count on finding one."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)


def test_nothing_is_published_under_a_lock_that_is_gone(tmp_path):
    """Deleted, replaced, or moved away with its folder: files stay as they were, and the message gives the reason."""
    out, lock = tmp_path / "out", tmp_path / "out" / ".datamat" / "lock"
    lock.parent.mkdir(parents=True)
    with locked(lock):
        commit_json(out / "a.json", 1)
        for injure, change in (
            (lock.unlink, "was deleted"),
            (lambda: lock.write_text("process 7 on host\n"), "was replaced by that of process 7 on host"),
        ):
            injure()
            with pytest.raises(OutputLockedError, match=f"/lock {change} while this run"):
                commit_json(out / "a.json", 2)
        commit_json(tmp_path / "out.json", 3)  # it does not lie in the output

    assert read_json(out / "a.json") == 1
    commit_json(out / "a.json", 2)
    assert sorted(path.name for path in out.iterdir()) == [".datamat", "a.json"]


def test_forked_workers_do_not_check_the_lock(tmp_path):
    """Their descriptors are their own: they write parts, and give nothing its final name."""
    lock = tmp_path / ".datamat" / "lock"
    lock.parent.mkdir()
    with locked(lock):
        lock.unlink()
        child = os.fork()
        if child == 0:
            commit_json(tmp_path / "a.json", 1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("without_locks")
def test_latest_process_holds_the_output_where_there_are_no_locks(tmp_path):
    """A killed holder blocks nobody; one that lives elsewhere stops at its next step."""
    lock = tmp_path / "out" / ".datamat" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"process 1 on another-{socket.gethostname()}\n")
    assert lock_holder(lock) == f"process 1 on another-{socket.gethostname()}"

    with locked(lock):
        assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        lock.rename(lock.with_name("ours"))
        lock.write_text("process 7 on another\n")
        with pytest.raises(OutputLockedError, match="was replaced by that of process 7 on another"):
            commit_json(tmp_path / "out" / "a.json", 1)
        lock.with_name("ours").rename(lock)
        commit_json(tmp_path / "out" / "a.json", 2)

    assert lock.read_text() == "" and lock_holder(lock) == ""
    with locked(lock):
        pass


@pytest.mark.usefixtures("without_locks")
def test_live_process_of_this_host_is_not_disturbed_where_there_are_no_locks(tmp_path):
    """The error names it, as with locks."""
    lock = tmp_path / "out" / ".datamat" / "lock"
    lock.parent.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as holder:
        lock.write_text(f"process {holder.pid} on {socket.gethostname()}\n")
        with pytest.raises(OutputLockedError, match=f"being written by process {holder.pid} on"), locked(lock):
            pass
        assert lock_holder(lock).startswith(f"process {holder.pid}")
        holder.communicate(b"\n")

    assert lock_holder(lock) == ""
    with locked(lock):
        pass


def test_lock_holder_is_reported_without_disturbing_it(tmp_path):
    """From the holding process, from another one, and once nobody holds the lock."""
    lock = tmp_path / "lock"
    assert lock_holder(lock) == ""
    ask = (
        "import sys, pathlib; from datamat.directory.files import lock_holder; "
        "print(lock_holder(pathlib.Path(sys.argv[1])))"
    )

    with locked(lock):
        holders = [lock_holder(lock), subprocess.check_output([sys.executable, "-c", ask, lock], text=True).strip()]
        with pytest.raises(OutputLockedError), locked(lock):
            pass
        holders.append(lock_holder(lock))

    assert {*holders} == {holders[0]} and holders[0].startswith(f"process {os.getpid()} on ")
    assert lock.exists() and lock_holder(lock) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04\x95", "is not JSON"),
        (b'{"a": 1, "a": 2}', "the name 'a' stands twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b"\xff{}", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 10_000, "is not JSON"),
    ],
)
def test_only_strict_json_is_read(tmp_path, content, message):
    """Anything laxer that Python's parser accepts, or dies of, is refused."""
    (tmp_path / "f").write_bytes(content)

    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "f")


def test_json_is_read_from_regular_files_of_a_sane_size_only(tmp_path):
    """A FIFO would block for ever, a device has no end, and a sparse file of a terabyte costs its author nothing."""
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)

    for path, message in {
        tmp_path / "fifo": "not a regular",
        tmp_path / "huge": "more than",
        "/dev/zero": "not a reg",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_json(path)


def test_url_that_pathlib_has_spoiled_is_refused():
    """It would be a local folder called `s3:`."""
    with pytest.raises(OptionError, match="was made from a URL, and pathlib drops a slash of it; pass the URL as"):
        expand_home(pathlib.Path("s3://bucket/camvid"))
