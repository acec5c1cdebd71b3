"""Reading an input file: only regular files, once, within limits, without blocking."""

import os
import pathlib
import socket

import pytest

from datamat.codecs import read_file
from datamat.errors import InputError


def test_read_file_returns_the_content(tmp_path):
    """Any bytes, by str or path object, through a symbolic link, empty or not."""
    path = tmp_path / "a.bin"
    link = tmp_path / "link"
    link.symlink_to(path)

    for content in (b"", b"\0\1" * 100_000):
        path.write_bytes(content)

        assert read_file(path) == read_file(str(path)) == read_file(link) == content


def test_descriptors_are_closed(tmp_path):
    """Neither success nor refusal leaves a descriptor open."""
    path = tmp_path / "a"
    path.write_bytes(b"123")
    before = sorted(os.listdir("/proc/self/fd"))

    read_file(path)
    with pytest.raises(InputError):
        read_file(path, max_bytes=2)
    with pytest.raises(InputError):
        read_file(tmp_path)

    assert sorted(os.listdir("/proc/self/fd")) == before


def test_odd_paths_are_refused_at_once(tmp_path):
    """A FIFO without a writer, a device, a directory and a socket neither block nor exhaust memory."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    address = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        odd = {fifo: "is a FIFO; want a regular file", "/dev/zero": "is a character device", tmp_path: "is a directory"}

        for path, found in odd.items():
            with pytest.raises(InputError, match=f"'{path}': {found}"):
                read_file(path)
        with pytest.raises(InputError, match="cannot open it"):
            read_file(address)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("missing.png", r"'missing\.png': cannot open it: No such file or directory; want a readable file"),
        ("a\0b", r"'a\\x00b': cannot open it: (open: )?embedded null"),
        ("a\n\x1b[31m", r"'a\\n\\x1b\[31m': cannot open it"),
        ("", "'': cannot open it"),
    ],
)
def test_paths_that_do_not_open_are_named(path, found):
    """The message holds the path, escaped, and the reason."""
    with pytest.raises(InputError, match=found):
        read_file(path)


def test_files_over_the_limit_are_refused_unread(tmp_path):
    """The limit is inclusive; a sparse file of 1 TiB costs nothing."""
    path = tmp_path / "large"
    path.write_bytes(b"12345")

    assert read_file(path, max_bytes=5) == b"12345"
    with pytest.raises(InputError, match="holds 5 bytes; want at most 4; shrink it or raise the limit"):
        read_file(path, max_bytes=4)
    os.truncate(path, 1 << 40)
    with pytest.raises(InputError, match="holds 1099511627776 bytes; want at most 1073741824"):
        read_file(path)


@pytest.mark.parametrize(("change", "is_before"), [(3, True), (9, True), (9, False)])
def test_file_that_changes_size_while_read_is_refused(tmp_path, monkeypatch, change, is_before):
    """A file that another program is writing, or has truncated, is refused; also where all its bytes had come."""
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    read = os.read

    def read_and_change(descriptor, size):
        if is_before:
            os.truncate(path, change)
        data = read(descriptor, size)
        os.truncate(path, change)
        return data

    monkeypatch.setattr(os, "read", read_and_change)
    with pytest.raises(InputError, match="size changed while it was read"):
        read_file(path)


def test_file_without_a_size_is_refused():
    """Files in /proc report 0 bytes and hold more."""
    with pytest.raises(InputError, match=r"size changed while it was read \(0 bytes at first"):
        read_file(pathlib.Path("/proc/self/status"))


def test_short_reads_are_put_together(tmp_path, monkeypatch):
    """A file system may return fewer bytes than requested."""
    path = tmp_path / "a"
    path.write_bytes(b"abcdefg" * 5)
    read = os.read

    monkeypatch.setattr(os, "read", lambda descriptor, size: read(descriptor, min(size, 4)))

    assert read_file(path) == b"abcdefg" * 5


def test_error_while_reading_names_the_path(tmp_path, monkeypatch):
    """A disk error is an InputError with the system's reason."""
    path = tmp_path / "a"
    path.write_bytes(b"123")

    def fail(descriptor, size):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(InputError, match=r"a': cannot read it: Input/output error; .* check the disk"):
        read_file(path)
