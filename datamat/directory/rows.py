"""The rows of an index on disk, as columns: written as they come, read by position, with the state of their files."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import json
import operator
import os
import pathlib
import re
import reprlib
import shutil
import stat
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, overload

import numpy as np
import xxhash

from datamat.directory.fetching import fetched
from datamat.directory.files import commit_json, read_json
from datamat.directory.keys import SPLIT_NAME, KeyLookup, bad_key, mix64, safe_keys
from datamat.directory.url_files import LIKELY_BYTES, url_path
from datamat.errors import READ_FLAGS, OutputError, SourceError, count_of, join_problems
from datamat.folders.urls import is_url, lasting
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.directory.url_files import UrlFiles


__all__ = [
    "FILES",
    "INPUT",
    "LARGEST_HASHED",
    "MOST_FILES",
    "NO_TEXT",
    "FieldKind",
    "FileState",
    "IndexRow",
    "Origin",
    "RowBlock",
    "RowField",
    "RowStore",
    "Rows",
    "SourceFiles",
    "Texts",
    "decode_value",
    "digest_files",
    "encode_value",
    "file_state",
    "files_in",
    "files_of_text",
    "follows_links",
    "links_followed",
    "listed",
    "looks_like_path",
    "nested_paths",
    "relative_to_source",
    "single_rows",
    "stored_rows",
    "write_rows",
]

# ---------------------------------------------------------------- source files
#
# The input files of a source, as the index finds them: size, time of change, and whether they lie in the source.
#
# A folder stands for the files in it, at any depth: their names, sizes and times are its own. Hidden files do not
# count, nor what is no regular file. A value with several files, too, has one state: that of all of them.


LARGEST_HASHED = 1 << 34
"""Largest file, in bytes, that is hashed unless asked for: a larger one counts by size and time."""

MOST_FILES = 100_000
"""Most files that a folder may hold to be an input: a larger one is no sample, but a whole source."""

_BLOCK = 1 << 20


class FileState(NamedTuple):
    """State of the file, or the files, of one value.

    Attributes:
        size: bytes of all files.
        stamp: time of change of one file, nanoseconds since 1970; of several, a digest of names, sizes and times.
        names: digest of names and sizes of several files; 0 for one file.
    """

    size: int
    stamp: int
    names: int = 0


_follows: contextvars.ContextVar[bool] = contextvars.ContextVar("datamat.follow_links", default=False)
_outputs: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("datamat.outputs", default=())


@contextlib.contextmanager
def links_followed(follow_links: bool) -> Iterator[None]:
    """Follow links that lead out of a source while its rows are listed and examined: writers ask for this, too."""
    before = _follows.set(follow_links)
    try:
        yield
    finally:
        _follows.reset(before)


@contextlib.contextmanager
def output_excluded(paths: Sequence[str]) -> Iterator[None]:
    """Refuse a source while its rows are listed if some of the files that the run will make would be among them.

    Args:
        paths: absolute paths, as such files may have them.
    """
    real = [os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in paths]
    before = _outputs.set(tuple(dict.fromkeys((*paths, *real))))
    try:
        yield
    finally:
        _outputs.reset(before)


def refuse_output_in(place: str, takes: Callable[[str], bool]) -> None:
    """Raise where a listing of input files would take files of the output.

    Args:
        place: what is listed, for the message.
        takes: returns whether the listing takes a file, by its absolute path.

    Raises:
        OutputError: it does.
    """
    for path in _outputs.get():
        if takes(path):
            raise OutputError(
                f"the output lies in the source: {place} would list {path}, a file that the run makes, among its input "
                "files; give an output outside of the source"
            )


def output_lies_in(place: str) -> bool:
    """Return whether the run that lists its source has its output below a folder, or that of a glob pattern."""
    folder = os.path.realpath(re.split(r"/[^/]*[*?[]", place, maxsplit=1)[0])
    return any(path.startswith(os.path.join(folder, "")) for path in _outputs.get())


class Listing:
    """What an index has listed of its source: files that became input, and those that it has left aside."""

    def __init__(self) -> None:
        self._listed: list[tuple[str, Sequence[pathlib.PurePath]]] = []
        self._aside: dict[str, str] = {}

    def add(self, folder: str, taken: Sequence[pathlib.PurePath], aside: Sequence[pathlib.PurePath]) -> None:
        """Note files below a folder, by their paths there: another listing may take those that one leaves aside."""
        self._listed.append((folder, taken))
        self._aside.update((_below(folder, path), str(path)) for path in aside)

    def __str__(self) -> str:
        if not self._aside:  # the rule, also among millions of files
            return ""
        taken = {_below(folder, path) for folder, paths in self._listed for path in paths}
        names = sorted(name for path, name in self._aside.items() if path not in taken)
        return f"left aside: {describe_files(names)}" if names else ""


def _below(folder: str, path: pathlib.PurePath) -> str:
    return os.path.abspath(os.path.join(folder, path))


def describe_files(names: Sequence[str]) -> str:
    """Return the number of files, how many have each suffix, and the first names.

    Example:
        >>> describe_files(["a.gif", "b.GIF", "c.heic"])
        '3 files (.gif 2, .heic 1): a.gif, b.GIF, c.heic'
    """
    counts = collections.Counter(os.path.splitext(name)[1].lower() or "no suffix" for name in names)
    if not names:
        return "no file"
    kinds = ", ".join(f"{suffix} {count}" for suffix, count in counts.most_common(_MOST_SUFFIXES))
    more = ", ..." if len(names) > _MOST_SHOWN else ""
    files = count_of(len(names), "file")
    return f"{files} ({kinds}): {', '.join(names[:_MOST_SHOWN])}{more}"


_MOST_SUFFIXES, _MOST_SHOWN = 5, 3
_listing: contextvars.ContextVar[Listing | None] = contextvars.ContextVar("datamat.listing", default=None)


@contextlib.contextmanager
def listing_noted() -> Iterator[Listing]:
    """Note what is listed of a source in the block."""
    before = _listing.set(listing := Listing())
    try:
        yield listing
    finally:
        _listing.reset(before)


def note_files(
    folder: str | os.PathLike[str], taken: Sequence[pathlib.PurePath], aside: Sequence[pathlib.PurePath] = ()
) -> None:
    """Note files that an index takes, and others that it leaves aside, where a run lists its source."""
    if (listing := _listing.get()) is not None:
        listing.add(os.fspath(folder), taken, aside)


def follows_links() -> bool:
    """Return whether links that lead out of the source are followed now."""
    return _follows.get()


class SourceFiles:
    """Takes the state of input files by path, and of nothing else: no device or pipe, nothing outside by a link.

    Whoever unpacks somebody else's archive has links of that person's choice in the source: they are followed only
    inside of `links_followed`. Absolute paths come from the writer's own code, and may lead anywhere.

    Args:
        source: folder that relative paths start from.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._root = os.path.join(os.path.realpath(source), "")
        self._is_inside: dict[str, bool] = {}
        self._folders: dict[str, FileState] = {}

    def check_file(self, path: str) -> os.stat_result:
        """Return the status of a file.

        Raises:
            OSError: there is none.
            ValueError: it is no regular file inside the source.
        """
        found = self._status(path)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        return found

    def problem(self, path: str) -> str:
        """Return why a file or folder that is there must not be read, or ""."""
        try:
            self._status(path)
        except OSError:
            return ""
        except ValueError as error:
            return str(error)
        return ""

    def state(self, path: str) -> FileState:
        """Return the state of a file or folder; a folder is walked once.

        Raises:
            OSError: there is none, or it cannot be read.
            ValueError: it is neither a regular file nor a folder inside the source, or the folder holds too many files.
        """
        found = self._status(path)
        if stat.S_ISREG(found.st_mode):
            return FileState(found.st_size, found.st_mtime_ns)
        if not stat.S_ISDIR(found.st_mode):
            raise ValueError("not a regular file")
        full = os.path.join(self._source, path)
        if full not in self._folders:
            self._folders[full] = file_state([full])
        return self._folders[full]

    def state_of_several(self, paths: Sequence[str]) -> FileState:
        """Return the state of several files and folders together; raises as `state` does, and names the path."""
        states = []
        for path in paths:
            try:
                states.append(self.state(path))
            except OSError as error:
                raise OSError(error.errno, f"{path!r}: {(error.strerror or str(error)).lower()}") from error
            except ValueError as error:
                raise ValueError(f"{path!r}: {error}") from error
        return _together(states)

    def target(self, path: str) -> str:
        """Return where a link leads that is followed out of the source, or "" for a path that stays in it."""
        full = os.path.join(self._source, path)
        if not follows_links() or os.path.isabs(path) or self._holds(full):
            return ""
        return os.path.realpath(full)

    def _status(self, path: str) -> os.stat_result:
        full = os.path.join(self._source, path)
        found = os.lstat(full)
        if stat.S_ISLNK(found.st_mode):
            self._check_target(path, full)
            found = os.stat(full)
        elif not os.path.isabs(path):
            folder = os.path.dirname(full)
            if folder not in self._is_inside:  # one check for each folder, not for each file
                self._is_inside[folder] = self._holds(folder)
            if not self._is_inside[folder]:
                self._check_target(path, full)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise ValueError("not a regular file")
        if ".." in path.split("/"):
            raise ValueError("leads out of its folder by '..'")
        return found

    def _check_target(self, path: str, full: str) -> None:
        if not os.path.isabs(path) and not follows_links() and not self._holds(full):
            raise ValueError(
                f"a link leads out of the source, to {os.path.realpath(full)!r}; where the links are yours, pass "
                "follow_links=True; otherwise copy what it leads to"
            )

    def _holds(self, full: str) -> bool:
        return os.path.join(os.path.realpath(full), "").startswith(self._root)


def file_state(paths: Sequence[str], *, several: bool = False) -> FileState:
    """Return the present state of files and folders.

    Args:
        paths: paths that can be opened.
        several: whether to treat a single file as one of several.

    Raises:
        OSError: one is gone, or cannot be read.
        ValueError: a folder holds more than `MOST_FILES` files.
    """
    states = [_state_of_path(path) for path in paths]
    return states[0] if len(states) == 1 and not several else _together(states)


def _state_of_path(path: str) -> FileState:
    found = os.stat(path)
    if stat.S_ISREG(found.st_mode):
        return FileState(found.st_size, found.st_mtime_ns)
    names, times, size = xxhash.xxh3_64(), xxhash.xxh3_64(), 0
    for name, file in files_in([path]):
        found = os.stat(file)
        size += found.st_size
        line = f"{name}\0{found.st_size}\n".encode("utf-8", "surrogateescape")
        names.update(line)
        times.update(line + found.st_mtime_ns.to_bytes(8, "little", signed=True))
    return FileState(size, times.intdigest() >> 1, names.intdigest() >> 1)


def _together(states: Sequence[FileState]) -> FileState:
    names = xxhash.xxh3_64_intdigest(repr([(state.size, state.names) for state in states]).encode())
    # Digests on disk were made of this text; it must stay.
    listed = ", ".join(f"Look(size={state.size}, stamp={state.stamp}, names={state.names})" for state in states)
    times = xxhash.xxh3_64_intdigest(f"[{listed}]".encode())
    return FileState(sum(state.size for state in states), times >> 1, names >> 1)


def digest_files(
    paths: Sequence[str], state: FileState, *, is_single: bool, largest: int = LARGEST_HASHED
) -> bytes | None:
    """Return the digest of the content of files and folders, 16 bytes; None where their state has changed.

    Files that cannot be read, or are too large, get a digest of size and time: then another time counts as another
    content.

    Args:
        paths: paths that can be opened.
        state: size and time that the files had; compared before and after they are read.
        is_single: whether the value is one path, and not a list of them.
        largest: most bytes, of all files together, that are hashed.
    """
    try:
        if file_state(paths, several=not is_single)[:2] != state[:2]:
            return None
        if state.size > largest:
            return _stand_in(paths, state)
        with fetched(paths):
            digest = _hash_all(paths, is_single=is_single)
        return digest if file_state(paths, several=not is_single)[:2] == state[:2] else None
    except (OSError, ValueError):
        return _stand_in(paths, state)


def _stand_in(paths: Sequence[str], state: FileState) -> bytes:
    return xxhash.xxh3_128_digest(repr((len(paths), state.size, state.stamp)).encode())


def _hash_all(paths: Sequence[str], *, is_single: bool) -> bytes:
    if is_single and not os.path.isdir(paths[0]):
        return _hash_file(paths[0])
    digest = xxhash.xxh3_128()
    for name, path in files_in(paths):
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + _hash_file(path))
    return digest.digest()


def _hash_file(path: str) -> bytes:
    digest = xxhash.xxh3_128()
    descriptor = os.open(path, READ_FLAGS)
    try:
        while block := os.read(descriptor, _BLOCK):
            digest.update(block)
    finally:
        os.close(descriptor)
    return digest.digest()


def files_in(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and path of each regular file among paths, and in those that are folders, in a fixed order.

    Files of folders are named by their path below it; others by the place among the paths.

    Raises:
        OSError: a path is gone, or a folder cannot be read.
        ValueError: a folder holds more than `MOST_FILES` files.
    """
    for number, path in enumerate(paths):
        if not os.path.isdir(path):
            yield str(number), path
            continue
        names = sorted(_names_below(path, ""))
        yield from ((f"{number}/{name}", os.path.join(path, name)) for name in names)


def _names_below(folder: str, prefix: str) -> list[str]:
    found = []
    waiting = [prefix]
    while waiting:
        below = waiting.pop()
        with os.scandir(os.path.join(folder, below)) as entries:
            for entry in entries:
                name = f"{below}{entry.name}"
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{name}/")
                elif entry.is_file():  # of a link, what it leads to; pipes and devices hold nothing of their own
                    found.append(name)
        if len(found) > MOST_FILES:
            raise ValueError(
                f"a folder of more than {count_of(MOST_FILES, 'file')}; name the files that a row needs instead"
            )
    return found


# ---------------------------------------------------------------- row values
#
# Values of index fields as text, and back: lists, tuples, dicts, paths, `None`, and numbers of numpy.
#
# JSON, whose objects stand for what JSON lacks. Each has one name:
#
#     {"tuple": [...]}    {"dict": [[key, value], ...]}    {"path": "a/b"}      as they say
#     {"file": "a/b"}     {"file_path": "a/b"}             a str or path that is an input file


_LONGEST_PATH = 4096
_NO_PATH = re.compile(r"[\n\0]")
# Labels and other words are not looked for on the disk: a path has a folder, or an ending.
_LIKE_PATH = re.compile(r"/|\.\w{1,8}\Z")
_PLAIN = {bool, int, float, type(None)}


def looks_like_path(text: str) -> bool:
    """Return whether a text may be a path, so that asking the file system for it is worthwhile."""
    return 0 < len(text) < _LONGEST_PATH and bool(_LIKE_PATH.search(text)) and not _NO_PATH.search(text)


def encode_value(value: Any, is_file: Callable[[str | pathlib.PurePath], bool]) -> str:
    """Return a value as text.

    Args:
        value: value of a field: text, number, truth value, `None`, path, or a list, tuple or dict of these.
        is_file: returns whether a text or path in it is an input file.

    Raises:
        TypeError: it holds something else; the message is the name of its type.

    Example:
        >>> encode_value((1, [None, "x"]), is_file=lambda path: False)
        '{"tuple": [1, [null, "x"]]}'
    """
    return json.dumps(_tagged(value, is_file))


def decode_value(text: str, source: str | Callable[[str], str]) -> Any:
    """Return the value of a text; paths of input files are joined to the source, or what a function makes of them.

    Example:
        >>> decode_value('{"tuple": [1, [null, {"file": "a/b.png"}]]}', source="/data")
        (1, [None, '/data/a/b.png'])
    """
    return json.loads(text, object_hook=lambda found: _untagged(found, source))


def files_of_text(text: str) -> list[str]:
    """Return the paths of input files in the text of a value, as the index gave them, in order."""
    found: list[str] = []

    def collect(tagged: dict[str, Any]) -> None:
        found.extend(path for name, path in tagged.items() if name in {"file", "file_path"})

    json.loads(text, object_hook=collect)
    return found


def nested_paths(item: Any) -> Iterator[str]:
    """Yield the texts and paths in an item that may be paths of files, in an order that depends on its content alone.

    It searches tuples, lists, sets, dicts, dataclasses and arrays, at any depth. Bytes count where they have a folder
    or an extension.
    """
    return _nested_paths(item, ())


def _nested_paths(item: Any, around: tuple[int, ...]) -> Iterator[str]:
    if isinstance(item, (str, os.PathLike)):
        path = os.fsdecode(item)
        if 0 < len(path) < _LONGEST_PATH and not _NO_PATH.search(path):
            yield path
    elif isinstance(item, bytes):
        if len(item) < _LONGEST_PATH and looks_like_path(path := os.fsdecode(item)):
            yield path
    elif id(item) not in around:  # an object may lead back to itself
        around = (*around, id(item))
        found = (path for part in _parts_of(item) for path in _nested_paths(part, around))
        yield from sorted(found) if isinstance(item, (set, frozenset)) else found


def _parts_of(item: Any) -> Iterable[Any]:
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, np.ndarray):
        return item.ravel() if item.dtype.kind in "OSU" else ()
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    return ()


def _tagged(value: Any, is_file: Callable[[str | pathlib.PurePath], bool]) -> Any:
    kind = type(value)
    if kind is str:
        return {"file": value} if is_file(value) else value
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_tagged(part, is_file) for part in value]
    if isinstance(value, (np.bool_, np.integer, np.floating, np.str_)):
        return _tagged(value.item(), is_file)
    if isinstance(value, tuple):
        return {"tuple": [_tagged(part, is_file) for part in value]}
    if isinstance(value, pathlib.PurePath):
        return {"file_path" if is_file(value) else "path": str(value)}
    if isinstance(value, dict):
        return {"dict": [[_tagged(name, _is_no_file), _tagged(part, is_file)] for name, part in value.items()]}
    raise TypeError(kind.__name__)


def _untagged(tagged: dict[str, Any], source: str | Callable[[str], str]) -> Any:
    ((name, value),) = tagged.items()
    if name == "tuple":
        return tuple(value)
    if name == "dict":
        return dict(value)
    if name == "path":
        return pathlib.Path(value)
    full = source(value) if callable(source) else os.path.join(source, value)
    return full if name == "file" else pathlib.Path(full)


def _is_no_file(_: str | pathlib.PurePath) -> bool:
    return False


class IndexRow(NamedTuple):
    """One input sample: where it is, not its content.

    Attributes:
        key: unique id, without path separator, `..`, `#` or control character.
        split: "train", "val", ..., or None to draw the split by a hash of the key.
        fields: what `read` needs, by name: paths of files and folders (relative to the source, or absolute), text,
            numbers, None, and lists, tuples and dicts of these.
        origin: where the row came from ("train.txt:17"); messages name it.
        files: further input files that the sample is made of, and folders of such files: if one of them changes, the
            row's shard is rebuilt.

    Example:
        >>> IndexRow("0001", "train", {"image": "train/0001.png", "speed": 3.5}).fields["speed"]
        3.5
    """

    key: str
    split: str | None = None
    fields: Mapping[str, Any] = {}
    origin: str = ""
    files: Sequence[str | os.PathLike[str]] = ()


# ---------------------------------------------------------------- blocks of rows
#
# Rows of tables, as columns: no object for a row from the table to the files of columns.


class Texts(Sequence[str]):
    """A column of n texts: UTF-8 back to back, and where each ends.

    Args:
        data: all texts; bytes that are no UTF-8 are those of paths.
        ends: uint64 (n,), where each ends in `data`.
    """

    __slots__ = ("_pieces", "data", "ends")

    def __init__(self, data: bytes, ends: np.ndarray, pieces: list[bytes] | None = None) -> None:
        self.data = data
        self.ends = ends
        self._pieces = pieces

    @classmethod
    def of(cls, values: Iterable[str]) -> Texts:
        """Return a column of these texts."""
        return cls.of_bytes([value.encode("utf-8", "surrogateescape") for value in values])

    @classmethod
    def of_bytes(cls, pieces: list[bytes]) -> Texts:
        """Return a column of texts that are encoded already."""
        ends = np.cumsum(np.fromiter(map(len, pieces), np.uint64, len(pieces)), dtype=np.uint64)
        return cls(b"".join(pieces), ends, pieces)

    @classmethod
    def of_positions(cls, start: int, stop: int) -> Texts:
        """Return the positions from `start` to `stop` with eight digits, or more where they have more."""
        if stop > 10**_POSITION_DIGITS:
            return cls.of(f"{number:0{_POSITION_DIGITS}d}" for number in range(start, stop))
        left, digits = np.arange(start, stop, dtype=np.uint32), np.empty((stop - start, _POSITION_DIGITS), np.uint8)
        for place in reversed(range(_POSITION_DIGITS)):
            left, digits[:, place] = np.divmod(left, np.uint32(10))
        digits += ord("0")
        return cls(digits.tobytes(), np.arange(1, stop - start + 1, dtype=np.uint64) * np.uint64(_POSITION_DIGITS))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Texts: ...

    def __getitem__(self, place: int | slice) -> str | Texts:
        """Return one text, or those of a slice with step 1."""
        if isinstance(place, int):
            place = range(len(self))[place]
            return self[place : place + 1].tolist()[0]
        start, stop, _ = place.indices(len(self))
        first = int(self.ends[start - 1]) if start else 0
        ends = self.ends[start:stop]
        return Texts(self.data[first : int(ends[-1]) if len(ends) else first], ends - np.uint64(first))

    def tolist(self) -> list[str]:
        """Return the texts."""
        text = self.data.decode("utf-8", "surrogateescape")
        if len(text) != len(self.data):  # beyond ASCII
            return [piece.decode("utf-8", "surrogateescape") for piece in self.pieces()]
        ends = self.ends.tolist()
        return [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)] if ends else []

    def pieces(self) -> list[bytes]:
        """Return the texts, encoded."""
        if self._pieces is not None:
            return self._pieces
        data, ends = self.data, self.ends.tolist()
        return [data[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)] if ends else []

    def hashes(self) -> np.ndarray:
        """Return uint64 (n,): the XXH3 of each."""
        return np.fromiter(map(xxhash.xxh3_64_intdigest, self.pieces()), np.uint64, len(self))

    def are_plain(self) -> bool:
        """Return whether all are made of ASCII letters, digits, `_`, `-` and `.`, but no `..`, and none is empty.

        Then each is a key as it is.
        """
        lengths = np.diff(self.ends, prepend=np.uint64(0))
        return bool(lengths.all()) and b".." not in self.data and not self.data.translate(None, _PLAIN_LETTERS)


_POSITION_DIGITS = 8
_PLAIN_LETTERS = b"-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
_ROWS_AT_ONCE = 1024  # that are made of a block
_MANY_BYTES = 64  # of a text on average, from which on slices are copied faster than bytes are gathered


class Origin(NamedTuple):
    """Where the rows of a block came from.

    Attributes:
        prefix: text before the number of the row ("rows.csv row ").
        first: number of the first row.
        suffix: text after the number.
    """

    prefix: str
    first: int
    suffix: str = ""

    def of(self, number: int) -> str:
        """Return where a row came from, by its position in the block."""
        return f"{self.prefix}{self.first + number}{self.suffix}"


@frozen(eq=False)
class RowBlock:
    """Many rows of an index, as columns: an `index` that yields blocks takes a fraction of the time.

    Attributes:
        keys: the keys of n rows.
        fields: values by name: an array (n,) of numbers, or n values as an `IndexRow` has them.
        origin: where each row came from, which messages name; () where nothing is known.
        splits: the split of each row, None for one that is drawn; or the split of all rows. None draws all of them.
        files: further input files of each row; None where rows have none.

    Raises:
        SourceError: there are not n values of each field.

    Example:
        >>> block = RowBlock(["a", "b"], {"age": np.array([30, 40])}, splits=["train", "val"])
        >>> [(row.key, row.split, row.fields) for row in block.rows()]
        [('a', 'train', {'age': 30}), ('b', 'val', {'age': 40})]
    """

    keys: Texts | list[str]
    fields: Mapping[str, np.ndarray | Texts | list[Any]] = dataclasses.field(default_factory=dict)
    origin: Origin | Sequence[str] = ()
    splits: Any = None  # as given; then names in the order in which they first occur, and int64 (n,), which of them
    files: Sequence[Sequence[str | os.PathLike[str]]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", self.keys if isinstance(self.keys, (Texts, list)) else listed(self.keys))
        object.__setattr__(self, "fields", {name: _stored_column(values) for name, values in self.fields.items()})
        splits = self.splits
        if splits is not None and not (isinstance(splits, tuple) and isinstance(splits[-1], np.ndarray)):
            splits = [splits] * len(self.keys) if isinstance(splits, str) else listed(splits)
            object.__setattr__(self, "splits", _coded(splits))
        given = {"splits": self.splits and self.splits[1], "files": self.files, "origin": self.origin or None}
        if isinstance(self.origin, Origin):
            del given["origin"]
        for name, values in {**given, **self.fields}.items():
            if values is not None and len(values) != len(self.keys):
                raise SourceError(
                    f"a block of {len(self.keys)} rows, from {self.origin_of(0) if len(self.keys) else 'nothing'}, has "
                    f"{len(values)} values of {name!r}; want one for each key"
                )

    def __len__(self) -> int:
        return len(self.keys)

    def origin_of(self, number: int, before: int = 0) -> str:
        """Return where a row came from: its number in the index, where that is all that is known.

        Args:
            number: position of the row in the block.
            before: number of rows of the index before the block.
        """
        return self._origin(number) or f"row {before + number}"

    def _origin(self, number: int) -> str:
        if isinstance(self.origin, Origin):
            return self.origin.of(number)
        return self.origin[number] if self.origin else ""

    def rows(self) -> Iterator[IndexRow]:
        """Yield the rows, one by one."""
        names = list(self.fields)
        for start in range(0, len(self), _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(self))
            columns = [listed(values[start:stop]) for values in self.fields.values()]
            values = zip(*columns, strict=True) if columns else itertools.repeat(())
            splits: Iterable[Any] = itertools.repeat(None)
            if self.splits is not None:
                splits = [self.splits[0][code] for code in self.splits[1][start:stop].tolist()]
            found = zip(listed(self.keys[start:stop]), splits, values)  # noqa: B905 -- `repeat` has no end
            for number, (key, split, row) in enumerate(found, start):
                files = () if self.files is None else self.files[number]
                fields = dict(zip(names, row, strict=True))
                yield IndexRow(key, split, fields, self._origin(number), files)


def _stored_column(values: Any) -> np.ndarray | Texts | list[Any]:
    """Return a column as it is stored: int64 or float64 (n,), texts, or a list."""
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "if" and values.itemsize <= 8:
        return values.astype(np.int64 if values.dtype.kind == "i" else np.float64, copy=False)
    return values if isinstance(values, Texts) else listed(values)


def _coded(splits: Sequence[Any]) -> tuple[list[Any], np.ndarray] | None:
    """Return the names of splits in the order in which they first occur, and int64 (n,), which of them each row has."""
    names = list(dict.fromkeys(splits))
    codes = {name: code for code, name in enumerate(names)}
    return (names, np.fromiter(map(codes.__getitem__, splits), np.int64, len(splits))) if any(names) else None


class Rows:
    """The rows of an index, which can be iterated any number of times; those that come in blocks are stored so.

    Args:
        rows: function that returns the rows, or blocks of all of them, in a fixed order; called for each iteration.
    """

    def __init__(self, rows: Callable[[], Iterable[IndexRow] | Iterable[RowBlock]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[IndexRow]:
        return single_rows(self._rows())


def single_rows(found: Iterable[IndexRow] | Iterable[RowBlock]) -> Iterator[IndexRow]:
    """Yield rows one by one, those of blocks, too."""
    for one in found:
        if isinstance(one, RowBlock):
            yield from one.rows()
        else:
            yield one


def stored_rows(found: Iterable[IndexRow] | Iterable[RowBlock]) -> Iterable[IndexRow] | Iterable[RowBlock]:
    """Return the rows that a writer's `index` returned, as `write_rows` takes them: in blocks, where they come so."""
    if found is None:
        raise SourceError("index returned None; want the rows of the dataset: is a `return` or a `yield` missing?")
    return found._rows() if isinstance(found, Rows) and type(found).__iter__ is Rows.__iter__ else found


def listed(values: np.ndarray | Texts | list[Any]) -> list[Any]:
    """Return a column as Python's own values."""
    found: list[Any] = (
        values if isinstance(values, list) else values.tolist() if hasattr(values, "tolist") else [*values]
    )
    return found


# ---------------------------------------------------------------- relative paths
#
# Paths that start from the working folder, as `Path(source).glob("*")` gives them where the source is relative.
#
# Rows hold paths relative to the source, or absolute ones. With `source="photos"`, "photos/1.jpg" would be looked for
# below photos/photos, and be taken for a mere word: nobody would notice an edit of the file.


def relative_to_source(
    rows: Iterable[IndexRow] | Iterable[RowBlock],
    source: str | os.PathLike[str],
    file_fields: Collection[str] | None,
) -> Iterator[Any]:
    """Yield rows with paths relative to the source in place of paths relative to the working folder; blocks likewise.

    A path stays where the source has a file of that name. Folders in fields stay, too: they may be mere words.

    Args:
        rows: rows as the writer's `index` yields them.
        source: the source, a relative path.
        file_fields: names of the fields that hold files; None where that is not declared.
    """
    given = os.fspath(source)
    prefixes = tuple({os.path.join(form, "") for form in (given, str(pathlib.Path(given)), os.path.normpath(given))})
    given_rows: Iterator[Any] = iter(rows)
    for number, row in enumerate(given_rows):
        if isinstance(row, RowBlock):
            yield _moved_block(row, prefixes, file_fields)
            continue
        _check_row(row, number)
        changed = {
            name: moved
            for name, value in row.fields.items()
            if (file_fields is None or name in file_fields)
            and (moved := _moved(value, prefixes, os.path.isfile)) is not value
        }
        files: Any = row.files
        if isinstance(files, (list, tuple)) and files:
            files = _moved(files, prefixes, os.path.exists)
        is_same = not changed and files is row.files
        yield row if is_same else row._replace(fields={**row.fields, **changed}, files=files)


def _moved_block(block: RowBlock, prefixes: tuple[str, ...], file_fields: Collection[str] | None) -> RowBlock:
    given = [prefix.encode("utf-8", "surrogateescape") for prefix in prefixes]
    fields = dict(block.fields)
    for name, values in block.fields.items():
        if (file_fields is not None and name not in file_fields) or isinstance(values, np.ndarray):
            continue
        if isinstance(values, list) or any(prefix in values.data for prefix in given):
            moved = [_moved(value, prefixes, os.path.isfile) for value in listed(values)]
            fields[name] = moved if isinstance(values, list) else Texts.of(moved)
    files = block.files
    if files is not None:
        files = [_moved(some, prefixes, os.path.exists) if isinstance(some, (list, tuple)) else some for some in files]
    return dataclasses.replace(block, fields=fields, files=files)


def _moved(value: Any, prefixes: tuple[str, ...], is_there: Callable[[str], bool]) -> Any:
    """Return a value with the paths in it moved; the very value where there are none."""
    if isinstance(value, (str, pathlib.PurePath)):
        return _moved_path(value, prefixes, is_there)
    if type(value) in {list, tuple}:
        parts = [_moved(part, prefixes, is_there) for part in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    if type(value) is dict:
        named = {name: _moved(part, prefixes, is_there) for name, part in value.items()}
        return value if all(named[name] is value[name] for name in value) else named
    return value


def _moved_path(
    value: str | pathlib.PurePath, prefixes: tuple[str, ...], is_there: Callable[[str], bool]
) -> str | pathlib.PurePath:
    path = str(value)
    if not path.startswith(prefixes) or "\0" in path or "\n" in path:
        return value
    prefix = next(prefix for prefix in prefixes if path.startswith(prefix))
    if os.path.lexists(os.path.join(prefix, path)) or not is_there(path):
        return value
    below = path.removeprefix(prefix).lstrip("/")
    return below if isinstance(value, str) else type(value)(below)


# ---------------------------------------------------------------- rows
#
# The index on disk, by columns, so that a worker reads its own rows and no process holds them all.
#
# `RowStore` maps the files that `write_rows` wrote into memory: row i of any column is two offsets away. The driver
# holds a few integers per row while it plans.
#
#     rows.json                   number of rows, source, splits, fields, where blocks of rows came from, what decides
#                                 whether a file is the same
#     key.text key.ends           UTF-8 of all keys; where each ends (uint64)
#     FIELD.text FIELD.ends       a field of strings, of paths, or of other values as JSON (`encode_value`)
#     FIELD.numbers               a field of int64 or float64
#     FIELD.inputs                of input files: path, size, time of change and digest, see `INPUT`
#     FIELD.signed                of URLs: the whole one, where FIELD has it without what signs it; several as JSON
#     split.codes hash.codes      uint16 number of the split; uint64 hash of the key
#     digest.codes                uint64 digest of everything in the row, and of sizes and times of its files
#     identity.codes              the same without the times, for fingerprints; only where rows have files
#     order.codes                 row numbers in the order of the plan (written by `RowStore.set_order`)


FieldKind = Literal["text", "path", "json", "int64", "float64"]

FILES = ":files"
"""Name of the field for the files that rows list beside their fields; no field of an index can have it."""

NO_TEXT = b"\xff\x00\xff"
"""Stands for None among texts and paths; it is neither UTF-8 nor a path."""

INPUT = np.dtype([("path", "<u8"), ("size", "<i8"), ("stamp", "<i8"), ("digest", "V16")])
"""An input file of a row, or several of one field together.

path: hash of its path as the index has it, and of where a link leads that is followed out of the source; 0 where the
row has no such file. size: in bytes. stamp: time of change in
nanoseconds since 1970; of several files, a digest of their names, sizes and times. digest: of the content, XXH3-128; 0
where it is not known.
"""

_NO_TEXT = NO_TEXT.decode("utf-8", "surrogateescape")


@frozen()
class RowField:
    """One field of the rows.

    Attributes:
        name: name of the field in the index.
        number: position of the field among those of a row, from 0.
        kind: how its values are stored; some texts and paths may be None.
        holds_file: whether input files are among its values.
        types: sorted names of the Python types of its values, where the kind is "json".
        holds_urls: whether they may be URLs.
    """

    name: str
    number: int
    kind: FieldKind
    holds_file: bool
    types: tuple[str, ...] = ()
    holds_urls: bool = False

    @property
    def stem(self) -> str:
        """Prefix of the names of its files: not the field's own name, which may be anything."""
        return f"field{self.number}"


class RowStore:
    """The rows that `write_rows` wrote; any number of processes may open them.

    Args:
        folder: folder that `write_rows` wrote to.

    Attributes:
        left_aside: what the index has left aside of the files of its source, in words; "" where nothing is known.
        groups: which groups draw the splits, in words; "" where keys do, or nothing is known.
    """

    left_aside = ""
    groups = ""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        found = read_json(folder / "rows.json")
        self.num_rows: int = found["num_rows"]
        self.source: str = found["source"]
        self.identity: str = found["identity"]
        self.splits: list[str] = found["splits"]
        self._fields = [RowField(**{**field, "types": tuple(field["types"])}) for field in found["fields"]]
        self._file_fields = [field for field in self._fields if field.holds_file]
        self.url_folder: str = found.get("url_folder", "")
        self._follows_links: bool = found.get("follows_links", False)
        self._blocks = [(start, stop, Origin(*origin)) for start, stop, origin in found["origins"]]

    def __len__(self) -> int:
        return self.num_rows

    @functools.cached_property
    def hashes(self) -> np.ndarray:
        """uint64 (num_rows,): hash of each key."""
        return self._codes("hash.codes", np.uint64)

    @functools.cached_property
    def split_codes(self) -> np.ndarray:
        """uint16 (num_rows,): position of each row's split in `splits`."""
        return self._codes("split.codes", np.uint16)

    @functools.cached_property
    def digests(self) -> np.ndarray:
        """uint64 (num_rows,): digest of key, fields, and size and time of the input files."""
        return self._codes("digest.codes", np.uint64)

    @functools.cached_property
    def identities(self) -> np.ndarray:
        """uint64 (num_rows,): digest of key, fields, and sizes of the input files: without their times."""
        return self._codes("identity.codes" if self._file_fields else "digest.codes", np.uint64)

    @functools.cached_property
    def order(self) -> np.ndarray:
        """uint32 (num_rows,): row numbers in the order of the plan."""
        return self._codes("order.codes", np.uint32)

    def set_order(self, order: np.ndarray) -> None:
        """Write the order of the plan."""
        with open(self.folder / "order.codes", "wb") as file:
            file.write(np.ascontiguousarray(order, np.uint32).data)
        for name in ("order", "_places"):
            self.__dict__.pop(name, None)

    @property
    def largest_hashed(self) -> int:
        """Size in bytes of the largest input file that is hashed."""
        return LARGEST_HASHED if self.identity == "stat" else 1 << 62

    @property
    def file_fields(self) -> list[RowField]:
        """The fields that hold input files."""
        return self._file_fields

    def input_bytes(self) -> np.ndarray:
        """Return int64 (num_rows,): bytes of the input files of each row; a guess where they are behind URLs."""
        total = np.zeros(self.num_rows, np.int64)
        for field in self._file_fields:
            inputs = self._inputs(field)
            total += inputs["size"]
            if field.holds_urls:
                total[(inputs["path"] != 0) & (inputs["size"] == 0)] += LIKELY_BYTES
        return total

    @property
    def holds_urls(self) -> bool:
        """Whether rows name files by URL."""
        return any(field.holds_urls for field in self._file_fields)

    def times(self, start: int, stop: int) -> str:
        """Return the digest of rows start to stop in the order of the plan, with sizes and times of their files.

        It is "" where rows have no files, or where times do not count.
        """
        if not self._file_fields or self.identity == "content":
            return ""
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.digests[self.order[start:stop]]).data)

    def inputs(self, positions: np.ndarray) -> np.ndarray:
        """Return `INPUT` (n, number of file fields): the input files of rows by number, as the index saw them."""
        columns = [self._inputs(field)[positions] for field in self._file_fields]
        return np.stack(columns, axis=1) if columns else np.zeros((len(positions), 0), INPUT)

    def input_paths(self, positions: np.ndarray) -> list[list[list[str]]]:
        """Return the paths, as they can be opened, of the files of rows by number: row, file field, files."""
        columns = [self._paths(field, positions) for field in self._file_fields]
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in positions]

    def set_digests(self, positions: np.ndarray, digests: np.ndarray) -> None:
        """Write the digests of input files, V16 (n, number of file fields), to the store."""
        for number, field in enumerate(self._file_fields):
            column = np.memmap(self.folder / f"{field.stem}.inputs", INPUT, "r+")
            column["digest"][positions] = digests[:, number]
            column.flush()

    def read(self, positions: np.ndarray) -> list[IndexRow]:
        """Return rows by number, the paths of their input files joined to the source.

        Args:
            positions: row numbers, any integer dtype, (n,).
        """
        keys = self._text("key", positions)
        origins = self._origins(positions)
        splits = map(self.splits.__getitem__, self.split_codes[positions].tolist())
        fields = [field for field in self._fields if field.name != FILES]
        names = tuple(field.name for field in fields)
        columns = [self._values(field, positions) for field in fields]
        values: Iterable[tuple[Any, ...]] = zip(*columns, strict=True) if columns else [()] * len(keys)
        files: Sequence[tuple[str, ...]] = [()] * len(keys)
        if len(fields) < len(self._fields):
            files = self._values(self._fields[-1], positions)
        # Without a loop in Python, in half of the time: a row of a table costs little more than this.
        dicts = map(dict, map(zip, itertools.repeat(names), values))
        rows = zip(keys, splits, dicts, origins, files, strict=True)
        return list(map(tuple.__new__, itertools.repeat(IndexRow), rows))

    def keys(self, positions: np.ndarray) -> list[str]:
        """Return the keys of rows by number."""
        return self._text("key", positions)

    def find(self, key: str) -> int | None:
        """Return the number of the row with this key, or None."""
        return self._lookup.find(key)

    def find_all(self, keys: Sequence[str]) -> np.ndarray:
        """Return int64 (n,): the number of the row with each key, -1 where there is none."""
        return self._lookup.find_all(keys)

    def place_in_order(self, row: int) -> int:
        """Return the position of a row in the order of the plan."""
        return int(self._places[row])

    @functools.cached_property
    def _lookup(self) -> KeyLookup:
        return KeyLookup(np.asarray(self.hashes), lambda rows: self.keys(np.asarray(rows)))

    @functools.cached_property
    def _places(self) -> np.ndarray:
        places = np.empty(self.num_rows, np.uint32)
        places[self.order] = np.arange(self.num_rows, dtype=np.uint32)
        return places

    def columns(self, positions: np.ndarray) -> Iterator[tuple[str, Any]]:
        """Yield each field of rows by number: int64 or float64 (n,), or n values as the index gave them."""
        for field in self._fields:
            if field.name != FILES:
                yield field.name, self.column(field, positions)

    def column(self, field: RowField, positions: np.ndarray) -> Any:
        """Return one field of rows by number: int64 or float64 (n,), or n values as the index gave them."""
        if field.kind in {"int64", "float64"}:
            return np.asarray(self._codes(f"{field.stem}.numbers", np.dtype(field.kind))[positions])
        if field.kind == "json":
            return [decode_value(text, "") for text in self._text(field.stem, positions)]
        values = self._nullable(field.stem, positions)
        return [value and pathlib.Path(value) for value in values] if field.kind == "path" else values

    def texts(self, field: RowField, positions: np.ndarray) -> list[str]:
        """Return a field of text or JSON of rows by number, as stored."""
        return self._text(field.stem, positions)

    @property
    def fields(self) -> list[RowField]:
        """All fields, that of listed files last."""
        return self._fields

    def _values(self, field: RowField, positions: np.ndarray) -> list[Any]:
        if field.kind in {"int64", "float64"}:
            numbers: list[Any] = self._codes(f"{field.stem}.numbers", np.dtype(field.kind))[positions].tolist()
            return numbers
        if field.kind == "json":
            texts = self._text(field.stem, positions)
            places = self._url_places(field, positions) if field.holds_urls else [{}] * len(texts)
            return [
                decode_value(text, lambda name, urls=urls: urls.get(name) or os.path.join(self.source, name))  # type: ignore[misc]
                for text, urls in zip(texts, places, strict=True)
            ]
        values = self._nullable(field.stem, positions)
        if field.holds_urls:
            places = self._url_places(field, positions)
            values = [value and urls.get(value, value) for value, urls in zip(values, places, strict=True)]
        if field.holds_file:
            paths = self._inputs(field)["path"][positions].tolist()
            values = [
                os.path.join(self.source, value) if value and path else value
                for value, path in zip(values, paths, strict=True)
            ]
        return [value and pathlib.Path(value) for value in values] if field.kind == "path" else values

    def _paths(self, field: RowField, positions: np.ndarray) -> list[list[str]]:
        texts = self._text(field.stem, positions)
        paths = self._inputs(field)["path"][positions].tolist()
        found = map(files_of_text, texts) if field.kind == "json" else ([text] for text in texts)
        places = self._url_places(field, positions) if field.holds_urls else [{}] * len(paths)
        return [
            [urls.get(name) or os.path.join(self.source, name) for name in names] if path else []
            for names, path, urls in zip(found, paths, places, strict=True)
        ]

    def _url_places(self, field: RowField, positions: np.ndarray) -> list[dict[str, str]]:
        """Return the path of each URL of rows by number, by the URL as the row has it.

        So do local files that lie outside of the source: their rows fail when they are read.
        """
        found, files = [], SourceFiles(self.source)
        texts, each = self._text(field.stem, positions), self.input_urls(field, positions)
        for row, text, urls in zip(np.asarray(positions).tolist(), texts, each, strict=True):
            place = f"{row}-{field.number}"
            paths = {name: url_path(self.url_folder, url, f"{place}-{n}") for n, (name, url) in enumerate(urls.items())}
            for number, (name, problem) in enumerate(self._refused(files, _names_in(field, text)).items(), len(urls)):
                paths[name] = url_path(self.url_folder, name, f"{place}-{number}", f"{name!r}: {problem}")
            found.append(paths)
        return found

    def _refused(self, files: SourceFiles, names: Sequence[str]) -> dict[str, str]:
        """Return what is wrong with the local files among URLs, by their names."""
        with links_followed(self._follows_links):
            problems = {
                # The table may be somebody else's, and name any file of this machine.
                name: "is an absolute path; make it relative, or pass follow_links=True if the table is yours"
                if os.path.isabs(name) and not self._follows_links
                else files.problem(name)
                for name in names
                if self._is_file(name)
            }
        return {name: problem for name, problem in problems.items() if problem}

    def input_urls(self, field: RowField, positions: np.ndarray) -> list[dict[str, str]]:
        """Return the whole URLs of rows by number, each by what the row calls it."""
        texts, signed = self._text(field.stem, positions), self._text(f"{field.stem}.signed", positions)
        found = []
        for text, whole in zip(texts, signed, strict=True):
            names = _names_in(field, text)
            urls = names if not whole else json.loads(whole) if field.kind == "json" else [whole]
            found.append({name: url for name, url in zip(names, urls, strict=True) if name and not self._is_file(name)})
        return found

    def _is_file(self, name: str) -> bool:
        return not is_url(name) and os.path.lexists(os.path.join(self.source, name))

    def _inputs(self, field: RowField) -> np.ndarray:
        return self._codes(f"{field.stem}.inputs", INPUT)

    def _nullable(self, stem: str, positions: np.ndarray) -> list[Any]:
        return [None if value == _NO_TEXT else value for value in self._text(stem, positions)]

    def gathered(self, stem: str, positions: np.ndarray) -> Texts:
        """Return a column of texts of rows by number.

        Args:
            stem: name of the column's files.
            positions: row numbers, any integer dtype, (n,).
        """
        text, ends = self._codes(f"{stem}.text", np.uint8), self._codes(f"{stem}.ends", np.uint64)
        positions = np.asarray(positions, np.int64)
        stops = ends[positions].astype(np.int64)
        starts = np.where(positions > 0, ends[positions - 1], 0).astype(np.int64)
        lengths = stops - starts
        bounds = np.cumsum(lengths)
        if not len(bounds) or bounds[-1] > _MANY_BYTES * len(bounds):
            whole = memoryview(text.data)
            return Texts.of_bytes([bytes(whole[a:b]) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)])
        if (lengths == lengths[0]).all():
            places = (starts[:, None] + np.arange(lengths[0])).reshape(-1)
        else:
            places = np.arange(bounds[-1]) + np.repeat(starts - bounds + lengths, lengths)
        return Texts(text[places].tobytes(), bounds.astype(np.uint64))

    def rows_naming(self, *parts: str) -> np.ndarray:
        """Return the numbers of the rows of which a path of an input file, as the index has it, holds one of `parts`.

        Paths are searched all at once: of a million rows, that takes some milliseconds where none is found.
        """
        wanted = [re.compile(re.escape(part.encode("utf-8", "surrogateescape"))) for part in {*parts}]
        found = np.zeros(len(self), bool)
        for field in self._file_fields:
            text, ends = self._codes(f"{field.stem}.text", np.uint8), self._codes(f"{field.stem}.ends", np.uint64)
            places = np.array([match.start() for each in wanted for match in each.finditer(text.data)], np.uint64)
            found[np.searchsorted(ends, places, side="right")] = True
        return np.flatnonzero(found)

    def _text(self, stem: str, positions: np.ndarray) -> list[str]:
        return self.gathered(stem, positions).tolist()

    def _origins(self, positions: np.ndarray) -> list[str]:
        """Return where rows came from, by number."""
        if not self._blocks:
            return self._text("origin", positions)
        starts = np.array([start for start, _, _ in self._blocks])
        places = np.searchsorted(starts, positions, side="right") - 1
        numbers = zip(places.tolist(), (np.asarray(positions, np.int64) - starts[places]).tolist(), strict=True)
        origins = [origin for _, _, origin in self._blocks]
        return [origins[place].of(number) for place, number in numbers]

    def _codes(self, name: str, dtype: Any) -> np.ndarray:
        if name not in self.__dict__:
            path = self.folder / name
            empty = not path.stat().st_size  # a file of no bytes cannot be mapped
            # As a plain array: each index into a `memmap` makes another one, in Python, ten times as slowly.
            self.__dict__[name] = np.zeros(0, dtype) if empty else np.asarray(np.memmap(path, dtype, "r"))
        mapped: np.ndarray = self.__dict__[name]
        return mapped


# ---------------------------------------------------------------- row writer
#
# Writes the rows of an index to the disk, by columns, in the files above.
#
#     rows of the index ── in batches ──┐
#     tables, arrays ─────── as blocks ──┴──> keys, splits and fields checked ──> files of columns
#     columns ── those that hold paths of files ──> state of each input file
#
# Bad rows stop a run before any work, and the message names the line or row.


_BATCH_ROWS = 16_384
_PIECE_ROWS = 1 << 20
_DEFAULT_SPLIT = "train"
_LOOKED_AT = 16  # values that are examined to find the fields that hold files: the first that are not blank, ...
_LOOKED_AT_LATER = 1024  # ... and so many more, over all rows, of those that look like paths
_EXACT = 2**53  # integers up to it are floats, too, without loss


def write_rows(  # noqa: PLR0913 -- what decides how rows are stored, by name
    rows: Iterable[IndexRow] | Iterable[RowBlock],
    folder: pathlib.Path,
    *,
    source: str,
    splits: Mapping[str, float] | None = None,
    groups: Callable[[RowBlock, int], np.ndarray] | None = None,
    file_fields: Sequence[str] | None = None,
    identity: str = "stat",
    url_fields: Collection[str] = (),
    urls: UrlFiles | None = None,
) -> RowStore:
    """Check the rows of an index and write them to `folder`, by columns.

    Args:
        rows: rows as the writer's `index` yields them, or all of them as blocks; consumed once, never held all
            together.
        folder: an empty folder for these files alone.
        source: folder that relative paths of fields start from.
        splits: share of each split for rows that name none, drawn by hash of the key; None puts them all in "train".
        groups: returns the hashes that draw the splits of a block of rows in place of those of the keys, given the
            number of rows before them; None where keys do.
        file_fields: names of the fields that hold paths of input files, or of folders of them, blank in rows without;
            None finds them by the first values that are not blank, and by samples of the others.
        identity: what decides whether an input file is the same, as in `ShardOptions`.
        url_fields: names of the fields that hold URLs of input files, or paths.
        urls: the files behind them.

    Returns:
        The rows, readable, in the order of the index.

    Raises:
        SourceError: no rows, a bad or duplicated key, fields that differ from row to row, a missing file; the
            message names the line or row.
    """
    with contextlib.ExitStack() as stack:
        writer = _RowWriter(folder, source, splits, groups, file_fields, stack, url_fields)
        for block in _blocks(rows):
            writer.append(block)
        if not writer.num_rows:
            raise SourceError(
                f"the index of {source} is empty; check the path, and that the writer's index finds files there"
                if source
                else "the index is empty; check that the writer's index yields rows"
            )
        fields = writer.finish(identity, "" if urls is None else urls.folder)
    _InputFinder(RowStore(folder), file_fields, urls).find_files(fields)
    store = RowStore(folder)
    _check_unique(store)
    return store


class _RowWriter:
    def __init__(
        self,
        folder: pathlib.Path,
        source: str,
        splits: Mapping[str, float] | None,
        groups: Callable[[RowBlock, int], np.ndarray] | None,
        file_fields: Sequence[str] | None,
        stack: contextlib.ExitStack,
        url_fields: Collection[str],
    ) -> None:
        self.num_rows = 0
        self._url_fields = frozenset(url_fields)
        self._folder = folder
        self._source = source
        self._file_fields = file_fields
        self._files = _ColumnFiles(folder, stack)
        self._columns: list[_FieldWriter] | None = None
        self._listed_files: _FieldWriter | None = None
        self._names: tuple[str, ...] = ()
        self._origins: list[tuple[int, int, Origin]] = []
        self._groups = groups
        self._drawn = list(splits or {_DEFAULT_SPLIT: 1.0})
        self._limits = np.cumsum([(splits or {_DEFAULT_SPLIT: 1.0})[name] for name in self._drawn])
        self._codes = {name: code for code, name in enumerate(self._drawn)}

    def append(self, block: RowBlock) -> None:
        before, count = self.num_rows, len(block)
        keys = self._checked_keys(block)
        if self._columns is None:
            self._names = tuple(block.fields)
            self._columns = [
                _FieldWriter(name, n, self._files, self._file_test(name)) for n, name in enumerate(self._names)
            ]
            if missing := sorted(self._url_fields - set(self._names)):
                raise SourceError(
                    f"{block.origin_of(0, before)}: there is no field {missing[0]!r}, which is to hold URLs; the row "
                    f"has {', '.join(self._names)}"
                )
        if block.fields.keys() != set(self._names):
            raise _other_fields(block.origin_of(0, before), block.fields, self._names)
        hashes = self._files.write_text("key", keys)
        self._files.write("hash.codes", hashes)
        digests = _mixed(hashes, hashes)
        self._write_origins(block)
        self._files.write("split.codes", self._split_codes(block, hashes))
        for column in self._columns:
            values = block.fields[column.name]
            if column.name in self._url_fields:
                values, signed = _unsigned(values)
                self._files.write_text(f"{column.stem}.signed", signed, hashed=False)
            digests = _mixed(digests, column.append(values, block, before))
        digests = self._append_further(block, digests)
        self._files.write("digest.codes", digests)
        self.num_rows += count

    def _checked_keys(self, block: RowBlock) -> Texts:
        with contextlib.suppress(AttributeError, TypeError, UnicodeEncodeError):  # those of keys that are no text
            texts = block.keys if isinstance(block.keys, Texts) else Texts.of(block.keys)
            if texts.are_plain() and (texts is block.keys or set(map(type, block.keys)) == {str}):
                return texts
        given = listed(block.keys)
        keys = safe_keys(given)
        number = bad_key(keys)
        if number is not None:
            raise SourceError(
                f"{block.origin_of(number, self.num_rows)}: key {given[number]!r}; want a non-empty str without lone "
                "surrogates: keys become parts of file names"
            )
        return block.keys if isinstance(block.keys, Texts) and keys is given else Texts.of(keys)

    def _write_origins(self, block: RowBlock) -> None:
        if not isinstance(block.origin, Origin):
            origins = Texts.of(block.origin) if any(block.origin) else Texts(b"", np.zeros(len(block), np.uint64))
            self._files.write_text("origin", origins, hashed=False)
            return
        last = self._origins[-1] if self._origins else None
        start, stop, origin = self.num_rows, self.num_rows + len(block), block.origin
        if last is not None and origin == last[2]._replace(first=last[2].first + start - last[0]):
            start, _, origin = self._origins.pop()
        self._origins.append((start, stop, origin))

    def finish(self, identity: str, url_folder: str) -> list[RowField]:
        columns = [*(self._columns or ()), *([self._listed_files] if self._listed_files else [])]
        fields = [column.finish() for column in columns]
        fields = [dataclasses.replace(field, holds_urls=field.name in self._url_fields) for field in fields]
        _write_head(
            self._folder,
            num_rows=self.num_rows,
            source=self._source,
            identity=identity,
            url_folder=url_folder,
            follows_links=follows_links(),
            splits=list(self._codes),
            fields=[dataclasses.asdict(field) for field in fields],
            origins=self._origins,
        )
        return fields

    def _append_further(self, block: RowBlock, digests: np.ndarray) -> np.ndarray:
        """Write the files that rows name beside their fields, if there are any."""
        count = len(block)
        given = [()] * count if block.files is None else block.files
        if self._listed_files is None:
            if block.files is None or not any(given):
                return digests
            self._listed_files = _FieldWriter(FILES, len(self._names), self._files, lambda path: bool(str(path)))
            if self.num_rows:
                self._listed_files.append([[]] * self.num_rows, block, 0)
        listed = [_listed(files, block, number) for number, files in enumerate(given)]
        self._listed_files.append(listed, block, self.num_rows)
        # By their own names alone: where they lie may differ from one clone of a project to the next.
        names = ("\0".join(map(os.path.basename, paths)) for paths in listed)
        listing = np.fromiter((xxhash.xxh3_64_intdigest(_as_bytes(name)) for name in names), np.uint64, count)
        has_files = np.fromiter(map(bool, given), bool, count)
        return np.where(has_files, _mixed(digests, listing), digests)

    def _file_test(self, name: str) -> Callable[[str | pathlib.PurePath], bool]:
        """Return the test for input files among the texts and paths in lists, tuples and dicts of a field."""
        if name in self._url_fields:
            return lambda path: bool(str(path))
        if self._file_fields is not None:
            is_declared = name in self._file_fields
            return lambda path: is_declared and bool(str(path))

        def exists(path: str | pathlib.PurePath) -> bool:
            is_path = looks_like_path(path) if isinstance(path, str) else True
            return is_path and os.path.exists(os.path.join(self._source, path))

        return exists

    def _split_codes(self, block: RowBlock, hashes: np.ndarray) -> np.ndarray:
        # 53 bits of the hash as a fraction: a sample's split depends on its key or group alone, so it never moves.
        hashes = hashes if self._groups is None else self._groups(block, self.num_rows)
        drawn = np.searchsorted(self._limits, (hashes >> np.uint64(11)) * 2.0**-53, side="right")
        drawn = np.minimum(drawn, len(self._drawn) - 1).astype(np.uint16)
        if block.splits is None or not any(block.splits[0]):
            return drawn
        names, places = block.splits
        for place, name in enumerate(names):
            if name is not None and name not in self._codes:
                if not isinstance(name, str) or not SPLIT_NAME.match(name):
                    origin = block.origin_of(int(np.flatnonzero(places == place)[0]), self.num_rows)
                    raise SourceError(f"{origin}: split {name!r}; want letters, digits and _, as in 'train'")
                self._codes[name] = len(self._codes)
        given = np.array([self._codes[name] if name else -1 for name in names], np.int64)[places]
        return np.where(given < 0, drawn, given).astype(np.uint16)


def _blocks(rows: Iterable[IndexRow] | Iterable[RowBlock]) -> Iterator[RowBlock]:
    """Yield rows in blocks: those that they come in, or batches of single rows."""
    iterator: Iterator[Any] = iter(rows)
    first = next(iterator, None)
    before, names = 0, ()
    if isinstance(first, RowBlock):
        for block in itertools.chain([first], iterator):
            if not isinstance(block, RowBlock):
                raise SourceError(f"the index holds {_shown(block)} behind blocks of rows; want blocks, or rows, alone")
            if len(block):
                yield block
        return
    iterator = itertools.chain(() if first is None else (first,), iterator)
    while batch := list(itertools.islice(iterator, _BATCH_ROWS)):
        _check_rows(batch, before)
        names = names or tuple(batch[0].fields)
        yield _block_of(batch, names, before)
        before += len(batch)


def _check_rows(batch: Sequence[Any], before: int) -> None:
    """Raise `SourceError` where what an index yields is no row."""
    if set(map(type, batch)) == {IndexRow} and {type(row[2]) for row in batch} == {dict}:
        return
    for number, row in enumerate(batch, before):
        _check_row(row, number)


def _check_row(row: Any, number: int) -> None:
    if not isinstance(row, IndexRow):
        raise SourceError(
            f"row {number} of the index is {_shown(row)}; want an IndexRow, such as "
            "IndexRow('0001', 'train', {'image': '0001.png'})"
        )
    if not isinstance(row.fields, Mapping):
        raise SourceError(
            f"{_origin(row, number)}: its fields are {_shown(row.fields)}; want a dict of what read needs, such as "
            "{'image': '0001.png'}"
        )


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}, {reprlib.repr(value)}"


def _block_of(batch: Sequence[IndexRow], names: tuple[str, ...], before: int) -> RowBlock:
    """Return rows as a block; raise `SourceError` where one has other fields than the first row of the index."""
    splits = [row[1] for row in batch]
    width = len(names)
    try:
        columns = {name: [row[2][name] for row in batch] for name in names}
        same = all(len(row[2]) == width for row in batch)
    except KeyError:
        same = False
    if not same:
        row, number = next((r, n) for n, r in enumerate(batch) if set(r.fields) != set(names))
        raise _other_fields(_origin(row, before + number), row.fields, names)
    files = [row[4] for row in batch]
    bad = next((place for place, split in enumerate(splits) if not isinstance(split, (str, type(None)))), None)
    if bad is not None:
        raise SourceError(
            f"{_origin(batch[bad], before + bad)}: the split is {_shown(splits[bad])}; want a name or None, as "
            "in IndexRow('0001', 'train', {'image': '0001.png'})"
        )
    return RowBlock(
        [row[0] for row in batch],
        columns,
        [row[3] for row in batch],
        splits,
        files if any(files) else None,
    )


class _ColumnFiles:
    """The files of columns, appended to."""

    def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._files: dict[str, BinaryIO] = {}
        self._ends: dict[str, int] = {}

    def write_text(self, stem: str, texts: Texts, *, hashed: bool = True) -> np.ndarray:
        """Append texts; return uint64 (n,), the hash of each, or zeros where nobody wants them."""
        base = self._ends.get(stem, 0)
        ends = texts.ends + np.uint64(base)
        self._ends[stem] = base + len(texts.data)
        self._file(f"{stem}.text").write(texts.data)
        self.write(f"{stem}.ends", ends)
        return texts.hashes() if hashed else np.zeros(0, np.uint64)

    def write(self, name: str, array: np.ndarray) -> None:
        self._file(name).write(np.ascontiguousarray(array).data)

    def content(self, name: str) -> bytes:
        """Return what a file holds so far."""
        self._files[name].flush()
        return (self._folder / name).read_bytes()

    def remove(self, stem: str) -> None:
        """Remove the files of a column, to begin it again."""
        self._ends.pop(stem, None)
        for name in (f"{stem}.text", f"{stem}.ends", f"{stem}.numbers"):
            if name in self._files:
                self._files.pop(name).close()
                (self._folder / name).unlink()

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = self._stack.enter_context((self._folder / name).open("xb"))
        return self._files[name]


class _FieldWriter:
    """Writes one field to the disk: as text, as numbers, or anything else as JSON, whichever its values need.

    Args:
        name: name of the index field, for messages.
        number: position among the fields of a row, from 0.
        files: files of the rows, opened on demand.
        is_file: returns whether a text or path in a list, tuple or dict is an input file.
    """

    def __init__(
        self, name: str, number: int, files: _ColumnFiles, is_file: Callable[[str | pathlib.PurePath], bool]
    ) -> None:
        self._field = RowField(name, number, "json", holds_file=False)
        self._files = files
        self._is_file = is_file
        self._kind: FieldKind | None = None
        self._family = "nested" if name == FILES else ""
        self._types: set[type] = set()
        self._has_files = False

    @property
    def name(self) -> str:
        """Name of the index field."""
        return self._field.name

    @property
    def stem(self) -> str:
        """What the names of its files begin with."""
        return self._field.stem

    def append(self, values: np.ndarray | Texts | list[Any], block: RowBlock, first: int) -> np.ndarray:
        """Write the values of a block of rows; return uint64 (n,): their digests, which depend on no other value."""
        types: set[type]
        if isinstance(values, list):
            types = set(map(type, values))
        else:
            types = {str if isinstance(values, Texts) else int if values.dtype.kind == "i" else float}
        if isinstance(values, list) and any(issubclass(kind, np.generic) for kind in types):
            values = [value.item() if isinstance(value, np.generic) else value for value in values]
            types = set(map(type, values))
        self._check(types, values, block, first)
        kind = _kind_of(types, values)
        if self._kind is not None and kind != self._kind:
            values = listed(values)
            kind = self._common(kind, types, values)
        self._kind = kind
        self._types |= types
        if kind == "json" and int in types and any(type(v) is int and not _is_int64(v) for v in values):
            self._types.add(_Long)
        try:
            return self._put(kind, types, values)
        except TypeError as error:
            raise self._refused(listed(values), error, block, first) from error

    def finish(self) -> RowField:
        """Return the field as its values have made it."""
        assert self._kind is not None
        names = tuple(sorted(kind.__name__ for kind in self._types)) if self._kind == "json" else ()
        return dataclasses.replace(self._field, kind=self._kind, types=names, holds_file=self._has_files)

    def _check(self, types: set[type], values: np.ndarray | Texts | list[Any], block: RowBlock, first: int) -> None:
        """Raise `SourceError` where text, numbers and containers are mixed, or a value is none of these."""
        families = {kind: _family(kind) for kind in types}
        if len(types) == 1:
            self._family = self._family or next(iter(families.values()))
        self._family = self._family or next((families[type(v)] for v in values if families[type(v)]), "")
        if set(families.values()) <= {"", self._family} and self._family != "unknown":
            return
        values = listed(values)
        number, value = next(
            (n, v)
            for n, v in enumerate(values)
            if families[type(v)] == "unknown" or families[type(v)] not in {"", self._family}
        )
        raise SourceError(
            f"{block.origin_of(number, first)}: field {self._field.name!r} holds {value!r} "
            f"({type(value).__name__}); want text, numbers, paths, or lists, tuples and dicts of these, of one kind in "
            "every row, or None where a row has none"
        )

    def _common(self, kind: FieldKind, types: set[type], values: Sequence[Any]) -> FieldKind:
        """Return the kind that holds the values so far and a batch of another kind; rewrite those so far in it."""
        before = self._kind
        if types == {type(None)} and before in {"text", "path", "json"}:
            return before
        if self._types == {type(None)} and {before, kind} == {"text", "path"}:
            return kind
        wanted: FieldKind = "json"
        if {before, kind} == {"int64", "float64"} and _are_exact(values if kind == "int64" else self._stored()):
            wanted = "float64"
        if wanted != before:
            stored = self._stored()
            self._files.remove(self._field.stem)
            for start in range(0, len(stored), _BATCH_ROWS):
                some = stored[start : start + _BATCH_ROWS]
                self._put(wanted, set(map(type, some)), some)
        return wanted

    def _stored(self) -> list[Any]:
        """Return all values so far; they are in memory at once only where the first rows did not decide their kind."""
        stem = self._field.stem
        if self._kind in {"int64", "float64"}:
            numbers: list[Any] = np.frombuffer(self._files.content(f"{stem}.numbers"), np.dtype(self._kind)).tolist()
            return numbers
        text, ends = self._files.content(f"{stem}.text"), np.frombuffer(self._files.content(f"{stem}.ends"), np.uint64)
        pieces = [text[a:b] for a, b in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]
        texts = [None if piece == NO_TEXT else piece.decode("utf-8", "surrogateescape") for piece in pieces]
        if self._kind == "path":
            return [text and pathlib.Path(text) for text in texts]
        return [decode_value(text or "", "") for text in texts] if self._kind == "json" else texts

    def _put(self, kind: FieldKind, types: set[type], values: np.ndarray | Texts | list[Any]) -> np.ndarray:
        stem = self._field.stem
        if kind in {"int64", "float64"}:
            numbers = np.ascontiguousarray(values, np.dtype(kind))
            self._files.write(f"{stem}.numbers", numbers)
            return numbers.view(np.uint64)
        if kind == "json":
            texts = [encode_value(value, self._is_file) for value in values]
            self._has_files = self._has_files or any('{"file' in text for text in texts)
            encoded = Texts.of(texts)
            self._files.write_text(stem, encoded, hashed=False)
            return np.fromiter(map(_value_digest, values, encoded.pieces()), np.uint64, len(values))
        if isinstance(values, Texts):
            return self._files.write_text(stem, values)
        if types == {str}:
            return self._files.write_text(stem, Texts.of(values))
        given = [NO_TEXT if v is None else str(v).encode("utf-8", "surrogateescape") for v in values]
        return self._files.write_text(stem, Texts.of_bytes(given))

    def _refused(self, values: Sequence[Any], error: TypeError, block: RowBlock, first: int) -> SourceError:
        """Return the error that names the first value holding something that a row cannot."""
        number, value = next((n, v) for n, v in enumerate(values) if not _can_be_json(v))
        return SourceError(
            f"{block.origin_of(number, first)}: field {self._field.name!r} holds {value!r}, with a value of "
            f"type {error} in it; want text, numbers, None, paths, and lists, tuples and dicts of these (tolist() "
            "makes a list of an array)"
        )


class _InputFinder:
    """Finds the fields that hold paths of input files, and takes the state of these files.

    Args:
        store: the rows, with no file known yet.
        file_fields: names of the fields that hold files; None where that is not declared.
        urls: the files behind URLs.
    """

    def __init__(self, store: RowStore, file_fields: Sequence[str] | None, urls: UrlFiles | None) -> None:
        self._store = store
        self._declared = file_fields
        self._urls = urls
        self._files = SourceFiles(store.source)

    def find_files(self, fields: Sequence[RowField]) -> None:
        """Write the state of the files of all rows, in one pass for each field that holds files."""
        is_strict = self._fields_with_files(fields)
        if not is_strict:
            return
        store = self._store
        digests = np.memmap(store.folder / "digest.codes", np.uint64, "r+")
        shutil.copyfile(store.folder / "digest.codes", store.folder / "identity.codes")
        identities = np.memmap(store.folder / "identity.codes", np.uint64, "r+")
        for field in fields:
            if field.name not in is_strict:
                continue
            with open(store.folder / f"{field.stem}.inputs", "xb") as file:
                for start in range(0, store.num_rows, _BATCH_ROWS):
                    rows = np.arange(start, min(start + _BATCH_ROWS, store.num_rows))
                    if field.holds_urls:
                        found, names = self._look_at_urls(field, rows)
                    else:
                        found, names = self._look_at(field, rows, is_strict=is_strict[field.name])
                    file.write(found.data)
                    here, sizes, times = found["path"] > 0, found["size"].view(np.uint64) ^ names, found["stamp"]
                    identities[rows] = np.where(here, _mixed(identities[rows], sizes), identities[rows])
                    with_files = _mixed(_mixed(digests[rows], sizes), times.view(np.uint64))
                    digests[rows] = np.where(here, with_files, digests[rows])
                    if follows_links():  # the names of the files have digests of where links lead
                        digests[rows] = np.where(here, _mixed(digests[rows], found["path"]), digests[rows])
        digests.flush()
        identities.flush()
        fields = [dataclasses.replace(field, holds_file=field.name in is_strict) for field in fields]
        _write_head(
            store.folder, **read_json(store.folder / "rows.json") | {"fields": [*map(dataclasses.asdict, fields)]}
        )

    def _fields_with_files(self, fields: Sequence[RowField]) -> dict[str, bool]:
        """Return the fields that hold files, and whether each value that is not blank must be one."""
        found = {field.name: True for field in fields if field.kind == "json" and field.holds_file}
        found |= {field.name: True for field in fields if field.holds_urls}
        texts = [field for field in fields if field.kind in {"text", "path"} and not field.holds_urls]
        if self._declared is not None:
            return found | {field.name: True for field in texts if field.name in self._declared}
        samples = {field.name: self._samples(field) for field in texts}
        for field in texts:
            first, later = samples[field.name]
            if any(self._is(os.path.isfile, path) for _, path in first):
                found[field.name] = True
            elif any(looks_like_path(path) and self._is(os.path.isfile, path) for _, path in later):
                found[field.name] = False
        beside = [field for field in texts if field.name in found]
        for field in texts:
            if field.name not in found and self._holds_folders(field, samples[field.name], beside, bool(found)):
                found[field.name] = False
        return found

    def _samples(self, field: RowField) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Return row and value of the first values of a field that are not blank, and of some of all of them."""
        step = max(sum(map(len, self._given(field))) // _LOOKED_AT_LATER, 1)
        before, firsts, steps = 0, [], []
        for given in self._given(field):
            firsts.append(given[: max(_LOOKED_AT - before, 0)])
            steps.append(given[-before % step :: step])
            before += len(given)
        rows = (np.concatenate(firsts), np.concatenate(steps)[:_LOOKED_AT_LATER])
        first, later = ([(row, str(v)) for row, v in self._values(field, chosen) if v is not None] for chosen in rows)
        return first, later

    def _given(self, field: RowField) -> Iterator[np.ndarray]:
        """Yield int64 (n,): the numbers of rows whose value is not blank, by pieces."""
        ends = np.asarray(np.memmap(self._store.folder / f"{field.stem}.ends", np.uint64, "r"))
        for start in range(0, len(ends), _PIECE_ROWS):
            before = ends[start - 1] if start else np.uint64(0)
            yield start + np.flatnonzero(np.diff(ends[start : start + _PIECE_ROWS], prepend=before))

    def _values(self, field: RowField, rows: np.ndarray) -> list[tuple[int, Any]]:
        return list(zip(rows.tolist(), self._store.column(field, rows), strict=True))

    def _is(self, test: Callable[[str], bool], path: str) -> bool:
        try:
            return test(os.path.join(self._store.source, path))
        except ValueError:  # a NUL in it
            return False

    def _holds_folders(
        self,
        field: RowField,
        samples: tuple[list[tuple[int, str]], list[tuple[int, str]]],
        beside: Sequence[RowField],
        has_files: bool,
    ) -> bool:
        """Return whether a field names folders whose files are the sample, not a folder of samples, or a class.

        A mere name counts only where rows have no other files: "cat" may be a class, and a folder, too.
        """
        for row, path in {**dict(samples[0]), **dict(samples[1])}.items():
            is_plain = field.kind == "text" and "/" not in path
            if (is_plain and has_files) or not self._is(os.path.isdir, path):
                continue
            full = os.path.join(self._store.source, path, "")
            others = [str(self._values(other, np.array([row]))[0][1]) for other in beside]
            if any(os.path.join(self._store.source, other).startswith(full) for other in others):
                continue
            try:
                self._files.state(path)
            except (OSError, ValueError) as error:
                warnings.warn(
                    f"field {field.name!r}: {path!r} is {error}; a change in it will not be noticed. Name the field in "
                    "file_fields, or the files in IndexRow(files=...), if samples are made of it",
                    stacklevel=2,
                )
                return False
            return True
        return False

    def _look_at(self, field: RowField, rows: np.ndarray, *, is_strict: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return `INPUT` (n,), and uint64 (n,): digests of the names where a value stands for several files."""
        found, names = np.zeros(len(rows), INPUT), np.zeros(len(rows), np.uint64)
        problems = []
        for number, value in enumerate(self._texts(field, rows)):
            if not value:
                continue
            try:
                state = self._look(field, value, is_strict=is_strict)
            except OSError as error:
                problem = (error.strerror or str(error)).lower()
            except ValueError as error:
                problem = str(error)
            else:
                name = value + self._targets(field, value)
                found[number] = (xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape")), *state[:2], b"")
                names[number] = state.names
                continue
            if is_strict:
                (row,) = self._store.read(rows[number : number + 1])
                shown = "" if field.kind == "json" else f" {value!r}"
                name = "files" if field.name == FILES else field.name
                problems.append(f"{_origin(row, int(rows[number]))}: {name}{shown}: {problem}")
        if problems:
            raise SourceError(
                f"{join_problems(problems)}; looked below {self._store.source}: add the files or drop the rows"
            )
        return found, names

    def _look_at_urls(self, field: RowField, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `_look_at` returns, of URLs: no request unless content is to decide, and no row is refused."""
        found = np.zeros(len(rows), INPUT)
        if field.kind == "json":
            texts = self._store.texts(field, rows)
            named = [files_of_text(text) for text in texts]
        else:
            texts = ["" if value is None else str(value) for value in self._store.column(field, rows)]
            named = [[text] if text else [] for text in texts]
        asked: dict[str, tuple[int, int]] = {}
        if self._store.identity == "content" and self._urls is not None:
            places = self._store.input_urls(field, rows)
            whole = {name: url for urls in places for name, url in urls.items()}
            answers = self._urls.ask_all(whole.values())
            asked = {name: answers[url] for name, url in whole.items()}
        names_found = np.zeros(len(rows), np.uint64)
        for number, (text, names) in enumerate(zip(texts, named, strict=True)):
            state = None if any(map(is_url, names)) else self._local_state(field, text)
            if names and state is not None:
                name = (text + self._targets(field, text)).encode("utf-8", "surrogateescape")
                found[number] = (xxhash.xxh3_64_intdigest(name), *state[:2], b"")
                names_found[number] = state.names
            elif names:
                states = [asked.get(name) if is_url(name) else self._local_state(None, name) for name in names]
                found[number] = _input_of_urls(text, [one[:2] for one in states if one is not None])
        return found, names_found

    def _local_state(self, field: RowField | None, text: str) -> FileState | None:
        """Return the state of local files beside URLs; None where their row is to fail when it is read."""
        with contextlib.suppress(OSError, ValueError):
            return self._files.state(text) if field is None else self._look(field, text, is_strict=False)
        return None

    def _targets(self, field: RowField, value: str) -> str:
        """Return where the links of a value lead out of the source, so that another target is another file."""
        if not follows_links():
            return ""
        found = map(self._files.target, files_of_text(value) if field.kind == "json" else [value])
        return "".join(f"\0{target}" for target in found if target)

    def _texts(self, field: RowField, rows: np.ndarray) -> list[str]:
        if field.kind == "json":
            return [text if '{"file' in text else "" for text in self._store.texts(field, rows)]
        return ["" if value is None else str(value) for value in self._store.column(field, rows)]

    def _look(self, field: RowField, value: str, *, is_strict: bool) -> FileState:
        if field.kind == "json":
            return self._files.state_of_several(files_of_text(value))
        if is_strict and self._declared is None:  # among files, a folder is a mistake
            self._files.check_file(value)
        return self._files.state(value)


def _names_in(field: RowField, text: str) -> list[str]:
    """Return the URLs and paths that a row has in a field of URLs."""
    if field.kind == "json":
        return files_of_text(text)
    return [text] if text and text != _NO_TEXT else []


def _input_of_urls(text: str, states: Sequence[tuple[int, int]]) -> tuple[int, int, int, bytes]:
    """Return an `INPUT` of URLs: what they are called decides, and what their stores say of them, where that is asked.

    Args:
        text: the URLs, as the row has them.
        states: size and stamp of each; none where nobody has asked.
    """
    path = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))
    size, stamp = sum(size for size, _ in states), 0
    if states:
        stamp = xxhash.xxh3_64_intdigest(repr(states).encode()) >> 1
    said = repr((text, states)).encode("utf-8", "surrogateescape")
    return path, size, stamp, xxhash.xxh3_128_digest(said)


def _unsigned(values: np.ndarray | Texts | list[Any]) -> tuple[np.ndarray | Texts | list[Any], Texts]:
    """Return URLs without what signs them, and the whole ones, "" where both are the same; of several, as JSON."""
    if isinstance(values, np.ndarray):
        return values, Texts.of([""] * len(values))
    if isinstance(values, Texts) and not any(letter in values.data for letter in b"?@ \t\r\n"):
        return values, Texts(b"", np.zeros(len(values), np.uint64))
    kept, signed = [], []
    for value in listed(values):
        value = _each_text(value, _trimmed)  # noqa: PLW2901 -- what is around a URL is of no use to anyone
        if isinstance(value, str):
            kept.append(lasting(value))
            signed.append("" if kept[-1] == value else value)
            continue
        kept.append(_each_text(value, lasting))
        whole: list[str] = []
        _each_text(value, lambda text, whole=whole: whole.append(text) or text)  # type: ignore[misc]
        signed.append("" if kept[-1] == value else json.dumps(whole))
    return (Texts.of(kept) if isinstance(values, Texts) else kept), Texts.of(signed)


def _trimmed(text: str) -> str:
    """Return a URL without the blanks around it; any other text, which may be a path, as it is."""
    trimmed = text.strip()
    return trimmed if is_url(trimmed) else text


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with each text in it changed, in the order of `files_of_text`."""
    if isinstance(value, str):
        return change(value)
    if type(value) in {list, tuple}:
        return type(value)([_each_text(part, change) for part in value])
    if type(value) is dict:
        return {name: _each_text(part, change) for name, part in value.items()}
    return value


def _mixed(digests: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Fold one uint64 column into the digests of its rows, so that the order of the columns matters."""
    with np.errstate(over="ignore"):
        return mix64(digests * np.uint64(0x9E3779B97F4A7C15) + values)


def _origin(row: IndexRow, number: int) -> str:
    return row.origin or f"row {number}"


def _other_fields(origin: str, found: Iterable[str], wanted: Iterable[str]) -> SourceError:
    return SourceError(
        f"{origin}: the fields are {sorted(found)}, but {sorted(wanted)} in the first row; give every row the same "
        "fields (None where one has none)"
    )


def _kind_of(types: set[type], values: np.ndarray | Texts | list[Any]) -> FieldKind:
    """Return the kind that holds the values of a block without loss; integers among floats become floats."""
    if not isinstance(values, list):
        return "text" if isinstance(values, Texts) else "int64" if types == {int} else "float64"
    if types <= {str, type(None)}:
        return "text"
    if types == {int} and _is_int64(min(values)) and _is_int64(max(values)):
        return "int64"
    if types == {float} or (types == {int, float} and _are_exact([v for v in values if type(v) is int])):
        return "float64"
    if all(kind is type(None) or issubclass(kind, pathlib.PurePath) for kind in types):
        return "path"
    return "json"


def _is_int64(value: int) -> bool:
    return -(2**63) <= value < 2**63


class _Long:
    """Stands among the types of a column for integers that int64 cannot hold."""


def _are_exact(values: Sequence[Any]) -> bool:
    """Return whether floats hold these integers without loss."""
    return all(-_EXACT <= value <= _EXACT for value in values)


_FAMILIES = {"text": (str, pathlib.PurePath), "number": (int, float), "nested": (list, tuple, dict)}
_EXACT_TYPES = {str, int, float, bool}


def _family(kind: type) -> str:
    """Return the family of a type: "text", "number", "nested" or "unknown"; "" for None."""
    if kind is type(None):
        return ""
    found = next((name for name, kinds in _FAMILIES.items() if issubclass(kind, kinds)), "unknown")
    is_odd = found in {"text", "number"} and kind not in _EXACT_TYPES and not issubclass(kind, pathlib.PurePath)
    return "unknown" if is_odd else found


def _value_digest(value: Any, encoded: bytes) -> int:
    """Return the digest of a value in a column of JSON: the same as in a column of its own kind."""
    if value is None:
        return xxhash.xxh3_64_intdigest(NO_TEXT)
    if isinstance(value, (str, pathlib.PurePath)):
        return xxhash.xxh3_64_intdigest(str(value).encode("utf-8", "surrogateescape"))
    if type(value) is int and _is_int64(value):
        return value & 0xFFFF_FFFF_FFFF_FFFF
    if type(value) is float:
        return int(np.float64(value).view(np.uint64))
    return xxhash.xxh3_64_intdigest(encoded)


def _can_be_json(value: Any) -> bool:
    try:
        encode_value(value, lambda _: False)
    except TypeError:
        return False
    return True


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _listed(files: Any, block: RowBlock, number: int) -> list[str]:
    """Return the listed files of a row as a list of paths."""
    if isinstance(files, (str, os.PathLike)):
        origin = block.origin.of(number) if isinstance(block.origin, Origin) else block.origin[number]
        raise SourceError(f"{origin or block.keys[number]}: files is {files!r}; want a list of paths")
    return [os.fspath(path) for path in files]


def _write_head(folder: pathlib.Path, **head: Any) -> None:
    commit_json(folder / "rows.json", head)


def _check_unique(store: RowStore) -> None:
    hashes = store.hashes
    ordered = np.sort(hashes)  # without their places: half the time and memory
    if not (ordered[1:] == ordered[:-1]).any():
        return
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    problems = []
    for place in same[:1000].tolist():
        first, second = store.read(np.sort(order[place : place + 2]))
        if first.key == second.key:  # equal hashes of different keys do no harm
            numbers = np.sort(order[place : place + 2]).tolist()
            problems.append(f"key {first.key!r} at {_origin(first, numbers[0])} and {_origin(second, numbers[1])}")
    if problems:
        raise SourceError(f"duplicated keys: {join_problems(problems)}; keys must be unique over all splits")
