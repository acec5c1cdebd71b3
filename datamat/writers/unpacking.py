"""Unpacks compressed files once, to a folder that the workers share."""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import errno
import glob
import importlib
import lzma
import os
import struct
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, final

import numpy as np
import xxhash

from datamat.directory.files import temporary_folder
from datamat.errors import (
    CorruptDataError,
    MissingDependencyError,
    OptionError,
    OutputError,
    SourceError,
    count_of,
    want_of_resources,
)
from datamat.folders.local import expand_home
from datamat.formats.example import read_varint
from datamat.values import frozen

if TYPE_CHECKING:
    from typing import BinaryIO


PIECE = 1 << 20
_THREADS = 4
_LONGEST_HEAD = 512  # a header of tar
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAGIC = {b"\x1f\x8b\x08": "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", ZSTD_MAGIC: "zst"}
_ZLIB_METHOD = 8
_OF_ARROW = {"zst": "zstd", "br": "brotli"}


def compression_of(path: str, is_plain: Callable[[bytes], bool]) -> str | None:
    """Return how a file is compressed, by its first bytes, whatever it is called; None if it is not.

    Args:
        path: path of the file.
        is_plain: tells from the first 512 bytes whether the file is what it would be without compression.
    """
    with open(path, "rb") as file:
        head = file.read(_LONGEST_HEAD)
    if is_plain(head):
        return None
    found = next((codec for magic, codec in _MAGIC.items() if head.startswith(magic)), None)
    # RFC 1950: method, and a check of the first two bytes.
    is_zlib = len(head) > 1 and head[0] & 15 == _ZLIB_METHOD and (head[0] << 8 | head[1]) % 31 == 0
    return "zlib" if found is None and is_zlib else found


class _SharedFolder:
    """A temporary folder that lives as long as a source of this process uses it."""

    def __init__(self) -> None:
        self.path = temporary_folder(self)


_shared: weakref.ReferenceType[_SharedFolder] | None = None


def _shared_folder() -> _SharedFolder:
    global _shared  # noqa: PLW0603 -- one for the process: a source that is opened again finds what is unpacked
    found = None if _shared is None else _shared()
    if found is None or not os.path.isdir(found.path):
        found = _SharedFolder()
        _shared = weakref.ref(found)
    return found


_FREE_BYTES = 8 << 20
"""A file of this size may be packed at any ratio: blocks of zeros between small members are most of a small archive."""


@frozen()
class SpoolOptions:
    """Where a source writes to disk what cannot be read in place: rows of an iterator, and what files unpack to.

    Args:
        folder: folder of both, which is kept; None takes a temporary one, for as long as the source is in use.
        max_ratio: how many times its own size a file may unpack to.

    Raises:
        OptionError: `folder` is not a folder, or the ratio is below 1.
    """

    folder: str | None = None
    max_ratio: float = 500

    def __post_init__(self) -> None:
        if self.folder is not None and os.path.lexists(path := expand_home(self.folder)) and not os.path.isdir(path):
            raise OptionError(f"spool is {self.folder!r}, which is a file; want a folder, or the path of a new one")
        if not self.max_ratio >= 1:
            raise OptionError(f"max_unpack_ratio is {self.max_ratio!r}; want a number of 1 or more, such as 500")

    def below(self, name: str) -> SpoolOptions:
        """Return the options of one of several sources."""
        return dataclasses.replace(self, folder=self.folder and os.path.join(self.folder, name))

    def limited(self, pieces: Iterable[bytes], num_packed: int) -> Iterator[bytes]:
        """Yield pieces of what a file of so many bytes unpacks to; raises `ValueError` where they become too many."""
        most, found = max(_FREE_BYTES, self.max_ratio * num_packed), 0
        for piece in pieces:
            found += len(piece)
            if found > most:
                raise ValueError(
                    f"it holds more than {self.max_ratio:g} times its {num_packed:,} bytes, as files do that are made "
                    "to fill disks; if you trust it, pass ImportWriter(max_unpack_ratio=...)"
                )
            yield piece


@final
class UnpackedFiles:
    """Files by their number, of which those that are compressed are unpacked when they are needed.

    Args:
        paths: the files.
        codecs: how each is compressed; None if it is not.
        spool: where unpacked files go.
    """

    def __init__(self, paths: Sequence[str], codecs: Sequence[str | None], spool: SpoolOptions) -> None:
        self.paths = paths
        self.spool = spool
        self._codecs = codecs
        self._folder = None if spool.folder is None else os.path.abspath(expand_home(spool.folder))
        self._shared = _shared_folder() if spool.folder is None and any(codecs) else None
        self._place = "" if self._shared is None else self._shared.path
        self._known: dict[int, str] = {}
        self._damaged: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shared": None, "_known": {}, "_damaged": {}}

    def path(self, number: int) -> str:
        """Return the path that the records of a file are read from.

        Raises:
            CorruptDataError: the file does not unpack.
            OutputError: there is no room for it.
            MissingDependencyError: pyarrow was built without the codec.
        """
        codec = self._codecs[number]
        if codec is None:
            return self.paths[number]
        if number in self._damaged:  # not for each of its rows
            raise CorruptDataError(self._damaged[number])
        if number not in self._known:
            try:
                self._known[number] = self._unpacked(self.paths[number], codec)
            except CorruptDataError as error:
                self._damaged[number] = str(error)
                raise
        return self._known[number]

    def unpack_all(self) -> None:
        """Unpack all files that are compressed, several at a time; raises as `path` does."""
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(self.path, [number for number, codec in enumerate(self._codecs) if codec]):
                pass

    def _unpacked(self, path: str, codec: str) -> str:
        state = os.stat(path)
        stem = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.abspath(path)))
        name = os.path.join(self._made_folder(), f"{stem}-{state.st_size}-{state.st_mtime_ns}")
        if os.path.exists(name):
            return name
        with _alone(os.path.join(os.path.dirname(name), f"{stem}.lock")) as is_alone:
            if os.path.exists(name):
                return name
            if is_alone:  # what kills have left, and the file as it was before it changed
                for former in glob.glob(os.path.join(glob.escape(os.path.dirname(name)), f"{stem}-*")):
                    os.unlink(former)
            self._unpack(path, codec, name)
        return name

    def _made_folder(self) -> str:
        """Return the folder, made where it is missing: on another machine, a temporary one of this process."""
        if self._folder is not None:
            os.makedirs(self._folder, exist_ok=True)
            return self._folder
        if not os.path.isdir(self._place):
            self._shared = _shared_folder()
            self._place = self._shared.path
        return self._place

    def _unpack(self, path: str, codec: str, name: str) -> None:
        descriptor, temporary = tempfile.mkstemp(".tmp", f"{os.path.basename(name)}-", os.path.dirname(name))
        try:
            with open(descriptor, "wb") as file:
                for piece in _pieces(path, codec, self.spool):
                    file.write(piece)
                if self._folder is not None:  # a power cut leaves no empty file under a complete one's name
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, name)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            if isinstance(error, OSError):
                want = want_of_resources(path, error)
                raise want or OutputError(
                    f"{path} cannot be unpacked into {os.path.dirname(name)}: {error.strerror}; make room there, name "
                    "another folder with ImportWriter(spool=...) or TMPDIR, or unpack the files yourself"
                ) from error
            raise


@contextlib.contextmanager
def _alone(path: str) -> Iterator[bool]:
    """Wait until no other process or thread holds a lock file, and hold it; yield whether the file system has locks."""
    import fcntl

    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
                raise
            yield False  # then two may unpack the same file, each under a name of its own
            return
        yield True


def _pieces(path: str, codec: str, spool: SpoolOptions) -> Iterator[bytes]:
    """Yield what a compressed file holds, in pieces of 1 MiB at most; raises `CorruptDataError`."""
    size = os.path.getsize(path)
    try:
        if codec in _WHOLE:
            with open(path, "rb") as file:
                yield from spool.limited(_WHOLE[codec](file, spool), size)
            return
        with _opened(path, codec) as stream:
            yield from spool.limited(iter(lambda: stream.read(PIECE), b""), size)
    except MissingDependencyError:
        raise
    except Exception as error:  # each codec has its own class of error for damage; gzip and Arrow also use OSError
        is_of_system = isinstance(error, OSError) and error.errno in {errno.ENOENT, errno.EACCES}
        if is_of_system or (isinstance(error, OSError) and want_of_resources(path, error)):
            raise
        raise _damage(path, codec, error) from error


def _damage(path: str, codec: str, error: Exception) -> CorruptDataError:
    text = str(error).partition("\n")[0]
    return CorruptDataError(f"{path} does not unpack ({codec}): {text}; copy or write it again")


def _opened(path: str, codec: str) -> Any:
    if codec == "gz":
        try:
            module = importlib.import_module("isal.igzip")  # three times as fast
        except ImportError:
            module = importlib.import_module("gzip")
        return module.open(path, "rb")
    if codec in {"bz2", "xz"}:
        return (bz2 if codec == "bz2" else lzma).open(path, "rb")
    import pyarrow as pa

    return _arrow_stream(pa.OSFile(path), _OF_ARROW[codec])


def _arrow_stream(file: Any, name: str) -> Any:
    import pyarrow as pa

    _need_codec(name)
    return pa.CompressedInputStream(file, name)


def _need_codec(name: str) -> None:
    import pyarrow as pa

    if not pa.Codec.is_available(name):
        raise MissingDependencyError(
            f"the source is compressed by {name}, which this build of pyarrow ({pa.__version__}) lacks; install the "
            "wheel of PyPI: pip install --force-reinstall pyarrow; or unpack the files"
        )


def unpacked_item(data: bytes, spool: SpoolOptions) -> bytes:
    """Return the item that a zstd frame holds; raises `CorruptDataError`."""
    import pyarrow as pa

    try:
        with _arrow_stream(pa.BufferReader(data), "zstd") as stream:
            return b"".join(spool.limited(iter(lambda: stream.read(PIECE), b""), len(data)))
    except (ValueError, OSError) as error:
        raise CorruptDataError(f"it does not unpack: {error}") from error


def _inflated(file: BinaryIO, _: SpoolOptions) -> Iterator[bytes]:
    inflate = zlib.decompressobj()
    while not inflate.eof:
        data = inflate.unconsumed_tail or file.read(PIECE)
        if not data:
            raise EOFError("it ends before its last byte")
        if piece := inflate.decompress(data, PIECE):
            yield piece
    if inflate.unused_data or file.read(1):
        raise ValueError("other bytes follow its end")


_SNAPPY_RATIO = 64  # an element of three bytes copies 64 at most


def _unsnapped(file: BinaryIO, _: SpoolOptions) -> Iterator[bytes]:
    """Yield what one block of Snappy holds, which is unpacked as a whole: its format has no frames.

    Arrow wants the size, which stands before it.
    """
    import pyarrow as pa

    data = file.read()
    _need_codec("snappy")
    size = read_varint(data, 0, 5)[0]
    if size > _SNAPPY_RATIO * len(data):
        raise ValueError(f"its {count_of(len(data), 'byte')} cannot hold the {size:,} that they say they do")
    whole = pa.Codec("snappy").decompress(data, size)
    for start in range(0, size, PIECE):
        yield whole[start : start + PIECE].to_pybytes()


_FRAMED_HEAD, _FRAMED_ENTRY = struct.Struct("<8sHHIII"), struct.Struct("<IIQII")
FRAMED_MAGIC = b"LDFZ01\0\0"


def _unframed(file: BinaryIO, spool: SpoolOptions) -> Iterator[bytes]:
    """Yield a chunk of litdata as it is without compression, from one with a zstd frame for each 256 items or so.

    litdata 0.2.76, streaming/framed_zstd.py: head, offsets of items behind each other, a table of frames, the frames.
    """
    magic, version, _, num_items, _, num_frames = _FRAMED_HEAD.unpack(_exactly(file, _FRAMED_HEAD.size))
    if (magic, version) != (FRAMED_MAGIC, 1):
        raise ValueError(f"it begins with {magic!r}, version {version}; want {FRAMED_MAGIC!r}, version 1")
    offsets = np.frombuffer(_exactly(file, 4 * (num_items + 1)), "<u4")
    entries = _exactly(file, _FRAMED_ENTRY.size * num_frames)
    yield np.uint32(num_items).tobytes() + (offsets + np.uint32(4 * (num_items + 2))).tobytes()
    for _, _, place, size, num_bytes in _FRAMED_ENTRY.iter_unpack(entries):
        file.seek(place)
        data = unpacked_item(_exactly(file, size), spool)
        if len(data) != num_bytes:
            raise ValueError(f"a frame holds {count_of(len(data), 'byte')}, and its table says {num_bytes:,}")
        yield data


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise EOFError("it ends before its last byte")
    return data


_WHOLE: dict[str, Callable[[BinaryIO, SpoolOptions], Iterator[bytes]]] = {
    "zlib": _inflated,
    "snappy": _unsnapped,
    "framed": _unframed,
}


def unpacked_by_content(paths: Sequence[str], is_plain: Callable[[bytes], bool], spool: SpoolOptions) -> UnpackedFiles:
    """Return the files, those that are compressed unpacked; raises `SourceError` where one does not unpack."""
    try:
        files = UnpackedFiles(paths, [compression_of(path, is_plain) for path in paths], spool)
        files.unpack_all()
    except CorruptDataError as error:
        raise SourceError(str(error)) from error
    return files
