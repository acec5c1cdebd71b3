"""Examines the input files of a source: their size, their time of change, and whether they lie in the source.

A folder stands for the files in it, at any depth: their names, sizes and times are its own. Hidden files and anything
but regular files are ignored. A value with several files also has one state, for all of them.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import os
import pathlib
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from datamat.errors import READ_FLAGS, OutputError, count_of
from datamat.sources.fetching import fetched

LARGEST_HASHED = 1 << 34
"""Largest file, in bytes, that is hashed by default: larger files are compared by size and time."""

MOST_FILES = 100_000
"""Most files that a folder may hold to be an input: a larger folder is a whole source, not a sample."""

_BLOCK = 1 << 20


class FileState(NamedTuple):
    """State of the file or files of one value.

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
    """Follow links that lead out of a source while its rows are listed and examined."""
    before = _follows.set(follow_links)
    try:
        yield
    finally:
        _follows.reset(before)


@contextlib.contextmanager
def output_excluded(paths: Sequence[str]) -> Iterator[None]:
    """Refuse a source, while its rows are listed, if files that the run will make would be among its input files.

    Args:
        paths: absolute paths that such files may have.
    """
    real = [os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in paths]
    before = _outputs.set(tuple(dict.fromkeys((*paths, *real))))
    try:
        yield
    finally:
        _outputs.reset(before)


def refuse_output_in(place: str, takes: Callable[[str], bool]) -> None:
    """Raise an error if a listing of input files would include files of the output.

    Args:
        place: what is listed, for the message.
        takes: returns whether the listing includes a file, given its absolute path.

    Raises:
        OutputError: it does.
    """
    for path in _outputs.get():
        if takes(path):
            raise OutputError(
                f"the output lies in the source: {place} would list {path}, a file that the run makes, among its input "
                "files; choose an output outside the source"
            )


def output_lies_in(place: str) -> bool:
    """Return True if the run that lists its source has its output below a folder, or below that of a glob pattern."""
    folder = os.path.realpath(re.split(r"/[^/]*[*?[]", place, maxsplit=1)[0])
    return any(path.startswith(os.path.join(folder, "")) for path in _outputs.get())


class Listing:
    """Records what an index has listed of its source: the files that became input, and the files it skipped."""

    def __init__(self) -> None:
        self._listed: list[tuple[str, Sequence[pathlib.PurePath]]] = []
        self._aside: dict[str, str] = {}

    def add(self, folder: str, taken: Sequence[pathlib.PurePath], aside: Sequence[pathlib.PurePath]) -> None:
        """Note files below a folder, by their paths there: one listing may take files that another skips."""
        self._listed.append((folder, taken))
        self._aside.update((_below(folder, path), str(path)) for path in aside)

    def __str__(self) -> str:
        if not self._aside:  # the usual case, even among millions of files
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
    """Note files that an index takes, and files that it skips, if a run lists its source."""
    if (listing := _listing.get()) is not None:
        listing.add(os.fspath(folder), taken, aside)


def follows_links() -> bool:
    """Return True if links that lead out of the source are followed now."""
    return _follows.get()


class SourceFiles:
    """Takes the state of input files by path. Refuses anything else: devices, pipes, and links that lead outside.

    An unpacked archive may hold links that its author chose: they are followed only inside `links_followed`. Absolute
    paths come from the writer's own code, and may lead anywhere.

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
            ValueError: it is not a regular file inside the source.
        """
        found = self._status(path)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        return found

    def problem(self, path: str) -> str:
        """Return why an existing file or folder must not be read, or ""."""
        try:
            self._status(path)
        except OSError:
            return ""
        except ValueError as error:
            return str(error)
        return ""

    def state(self, path: str, *, is_text: bool = False) -> FileState:
        """Return the state of a file or folder; a folder is walked once.

        Args:
            path: its path.
            is_text: whether it may be any text: a folder outside the source then does not count.

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
        if is_text and not _is_below(full, self._source):
            raise ValueError("a folder outside the source")
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
        """Return where a link that is followed out of the source leads, or "" for a path that stays in it."""
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
                f"a link leads out of the source, to {os.path.realpath(full)!r}; if the links are yours, pass "
                "follow_links=True; otherwise copy what it leads to"
            )

    def _holds(self, full: str) -> bool:
        return os.path.join(os.path.realpath(full), "").startswith(self._root)


def may_be_input(path: str, source: str) -> bool:
    """Return True if a text is the path of a file, or of a folder in the source: other folders are never read whole."""
    full = os.path.join(source, path)
    return os.path.isfile(full) or (_is_below(full, source) and os.path.isdir(full))


def _is_below(path: str, folder: str) -> bool:
    return os.path.abspath(path).startswith(os.path.join(os.path.abspath(folder), ""))


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
    # Digests on disk were made from this text, so it must stay.
    listed = ", ".join(f"Look(size={state.size}, stamp={state.stamp}, names={state.names})" for state in states)
    times = xxhash.xxh3_64_intdigest(f"[{listed}]".encode())
    return FileState(sum(state.size for state in states), times >> 1, names >> 1)


def digest_files(
    paths: Sequence[str], state: FileState, *, is_single: bool, largest: int = LARGEST_HASHED
) -> bytes | None:
    """Return the digest of the content of files and folders, 16 bytes; None if their state has changed.

    Files that cannot be read, or are too large, get a digest of size and time, so that a new time counts as new
    content.

    Args:
        paths: paths that can be opened.
        state: size and time that the files had, compared before and after they are read.
        is_single: whether the value is one path rather than a list of paths.
        largest: most bytes that are hashed, over all files.
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

    Files in folders are named by their path below the folder; other files by their position among the paths.

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
                elif entry.is_file():  # follows a link; pipes and devices hold no content
                    found.append(name)
        if len(found) > MOST_FILES:
            raise ValueError(
                f"a folder of more than {count_of(MOST_FILES, 'file')}; name the files that a row needs instead"
            )
    return found
