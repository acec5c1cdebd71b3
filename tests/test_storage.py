"""Files that appear complete, or not at all."""

import json
import os
import subprocess
import sys

import pytest

from datamat.errors import OutputLockedError
from datamat.storage import commit, commit_json, digest_file, lock_holder, locked, publish, read_json


def test_commit_names_the_file_only_at_the_end(tmp_path):
    """Nothing under the name while it is written; nothing at all after an error."""
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
    """The order that survives a power cut."""
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
    """A link at the temporary name is removed, its target untouched."""
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
    """Equal values give equal bytes; NaN is no JSON; what is not JSON is named."""
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


def test_digest_of_a_range_is_the_digest_of_its_bytes(tmp_path):
    """The whole and a part."""
    (tmp_path / "a").write_bytes(b"0123456789" * 200_000)
    (tmp_path / "b").write_bytes((b"0123456789" * 200_000)[5:1_500_000])

    assert digest_file(tmp_path / "a", start=5, num_bytes=1_499_995) == digest_file(tmp_path / "b")
    publish(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").exists()


HOLDER = """
import pathlib, sys, os
from datamat.storage import locked
with locked(pathlib.Path(sys.argv[1])):
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_names_its_holder_and_dies_with_it(tmp_path):
    """Another process is refused; after SIGKILL it is free, though a forked child lives on."""
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


def test_lock_holder_is_told_without_disturbing_it(tmp_path):
    """From the holding process itself, from another one, and when nobody holds it any more."""
    lock = tmp_path / "lock"
    assert lock_holder(lock) == ""
    ask = "import sys, pathlib; from datamat.storage import lock_holder; print(lock_holder(pathlib.Path(sys.argv[1])))"

    with locked(lock):
        told = [lock_holder(lock), subprocess.check_output([sys.executable, "-c", ask, lock], text=True).strip()]
        with pytest.raises(OutputLockedError), locked(lock):
            pass
        again = subprocess.check_output([sys.executable, "-c", ask, lock], text=True).strip()

    assert told[0] == told[1] == again and told[0].startswith(f"process {os.getpid()} on ")
    assert lock.exists() and lock_holder(lock) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04\x95", "is not JSON"),
        (b'{"a": 1, "a": 2}', "the name 'a' stands twice"),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b"\xff{}", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 10_000, "is not JSON"),
    ],
)
def test_only_strict_json_is_read(tmp_path, content, message):
    """Whatever Python's parser would let pass, or die of."""
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
