"""Reads an input file, once, into bytes: the only way a picture, mask or row file comes in.

An input path can be anything: a FIFO that blocks for ever, `/dev/zero`, a directory, a file that another program is
still writing. So the file is opened without blocking, judged by its descriptor (no gap between check and use), read
once, and every refusal is an `InputError` that names the path.
"""

from __future__ import annotations

import os
import stat

from datamat.errors import InputError

__all__ = ["read_file"]

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}
# O_NONBLOCK: a FIFO without a writer would block open() for ever. O_NOCTTY: a terminal must not become ours.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_file(path: str | os.PathLike[str], *, max_bytes: int = 1 << 30) -> bytes:
    """Return the whole content of a regular file, read once.

    Symbolic links are followed; what they lead to is judged.

    Args:
        path: the file.
        max_bytes: the most bytes accepted, 1 GiB by default.

    Raises:
        InputError: there is no such file, it cannot be read, it is not a regular file, it holds more than `max_bytes`,
            or its size changed while it was read.

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
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        raise InputError(f"{place}: cannot open it: {_reason(exc)}; want a readable file; check the path") from exc
    try:
        return _read_open(descriptor, place, max_bytes)
    except OSError as exc:
        raise InputError(f"{place}: cannot read it: {_reason(exc)}; want a readable file; check the disk") from exc
    finally:
        os.close(descriptor)


def _read_open(descriptor: int, place: str, max_bytes: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
        raise InputError(f"{place}: is {kind}; want a regular file; take the path out of the index")
    if status.st_size > max_bytes:
        raise InputError(
            f"{place}: holds {status.st_size} bytes; want at most {max_bytes}; shrink it or raise the limit"
        )
    data = _read_to(descriptor, status.st_size)
    if len(data) != status.st_size or os.fstat(descriptor).st_size != status.st_size:
        raise InputError(
            f"{place}: its size changed while it was read ({status.st_size} bytes at first); "
            "want a finished file; run again when nothing writes to it"
        )
    return data


def _read_to(descriptor: int, size: int) -> bytes:
    """Read to the end of the file, or one byte past `size` if it goes on."""
    data = os.read(descriptor, size + 1)
    if len(data) in {0, size}:
        return data
    pieces = [data]
    # A file system may hand out less than was asked for (FUSE, network, over 2 GiB): go on until nothing comes.
    while data and (missing := size + 1 - sum(map(len, pieces))) > 0:
        data = os.read(descriptor, missing)
        pieces.append(data)
    return b"".join(pieces)


def _reason(exc: OSError | ValueError) -> str:
    return exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
