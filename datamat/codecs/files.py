"""Reads an input file into bytes, once: the only way in for images, masks and files of rows.

An input path can be anything: a FIFO that blocks forever, `/dev/zero`, a directory, a file that another program is
still writing. So the file is opened without blocking, checked through its descriptor (no gap between check and use) and
read once. Every refusal is an `InputError` that names the path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, TypeAlias

import xxhash

from datamat.errors import READ_FLAGS, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

PICTURES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".tif", ".tiff")
"""Suffixes of the files that `Image` reads."""

Notes: TypeAlias = "dict[str, tuple[int, int, bytes]]"
"""Size, modification time and XXH3-128 digest of each file that was read, by path."""

_noting: list[Notes] = []  # of this process, which works on one row at a time; only the last dict is filled

_READABLE = 0o444

PACKAGES = ()  # reading a file changes none of its bytes

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def read_file(path: str | os.PathLike[str], *, max_bytes: int = 1 << 30) -> bytes:
    """Return the whole content of a regular file, read once.

    Symbolic links are followed, and their target is checked.

    Args:
        path: path of the file.
        max_bytes: most bytes accepted, 1 GiB by default.

    Raises:
        InputError: the file does not exist, cannot be read, is not a regular file, holds more than `max_bytes`, or
            changed while it was read.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "a.txt")
        ...     _ = path.write_bytes(b"abc")
        ...     read_file(path)
        b'abc'
    """
    place = repr(os.fspath(path))
    try:
        descriptor = os.open(path, READ_FLAGS)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        raise InputError(f"{place}: cannot open it: {_reason(exc)}; want a readable file; check the path") from exc
    try:
        data, status = _read_open(descriptor, place, max_bytes)
    except OSError as exc:
        raise InputError(f"{place}: cannot read it: {_reason(exc)}; want a readable file; check the disk") from exc
    finally:
        os.close(descriptor)
    if _noting:
        # The digest of the same bytes that become a record, so that the file is not read again to hash it.
        _noting[-1][os.fsdecode(path)] = status.st_size, status.st_mtime_ns, xxhash.xxh3_128_digest(data)
    return data


@contextlib.contextmanager
def noting_files() -> Iterator[Notes]:
    """Return a context with a dict that records every file that `read_file` reads in this process."""
    notes: Notes = {}
    _noting.append(notes)
    try:
        yield notes
    finally:
        _noting.pop()


def _read_open(descriptor: int, place: str, max_bytes: int) -> tuple[bytes, os.stat_result]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
        raise InputError(f"{place}: is {kind}; want a regular file; take the path out of the index")
    if not status.st_mode & _READABLE:  # root would read it all the same
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if status.st_size > max_bytes:
        raise InputError(
            f"{place}: holds {status.st_size} bytes; want at most {max_bytes}; shrink it or raise the limit"
        )
    data = _read_to(descriptor, status.st_size)
    after = os.fstat(descriptor)
    if len(data) != status.st_size or after.st_size != status.st_size:
        raise InputError(
            f"{place}: its size changed while it was read ({status.st_size} bytes at first); "
            "want a finished file; run again when nothing writes to it"
        )
    if after.st_mtime_ns != status.st_mtime_ns:
        raise InputError(
            f"{place}: it was written to while it was read; want a finished file; run again when nothing writes to it"
        )
    return data, status


def _read_to(descriptor: int, size: int) -> bytes:
    """Read to the end of the file, or one byte past `size` if there is more."""
    data = os.read(descriptor, size + 1)
    if len(data) in {0, size}:
        return data
    pieces = [data]
    # A file system may return fewer bytes than requested (FUSE, network, over 2 GiB): read until it returns none.
    while data and (missing := size + 1 - sum(map(len, pieces))) > 0:
        data = os.read(descriptor, missing)
        pieces.append(data)
    return b"".join(pieces)


def _reason(exc: OSError | ValueError) -> str:
    return exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
