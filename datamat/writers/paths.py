"""Lists the files and folders that a source names by path, pattern or braces, sorted, and notes them for the run."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from datamat.errors import OptionError, SourceError
from datamat.parallel.logs import get_logger
from datamat.sources.files import follows_links, note_files, refuse_output_in
from datamat.values import frozen
from datamat.writers.kinds import PACKINGS

SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing")
_SHARD_NUMBER = re.compile(r"-\d{5,}-of-\d{5,}\Z")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SPLIT_OF = re.compile(rf"({'|'.join(SPLITS)})(?=[-_./]|\Z)")


_logger = get_logger("datamat.writers")


@frozen()
class SourceFile:
    """A file that samples lie in.

    Attributes:
        name: its path below the source, with `/`; of several sources that are files, what tells them apart.
        path: its absolute path.
        codec: how it is compressed, where an index of the files says so.
    """

    name: str
    path: str
    codec: str | None = None

    @property
    def stem(self) -> str:
        """What the keys of its samples begin with: the name without its suffix, and `-` for `/`."""
        return stem_and_ending(self.name)[0].replace("/", "-")


def stem_and_ending(name: str) -> tuple[str, str]:
    """Return a name without its extension, and that: both parts of `.tar.gz`, and `.tfrecord` of TFDS' names.

    TFDS and Beam put the number of a shard last, which is part of the stem: `x.tfrecord-00000-of-00002`.
    """
    base, packing = os.path.splitext(name)
    if packing.lower() not in PACKINGS:
        base, packing = name, ""
    match = _SHARD_NUMBER.search(base)
    number = "" if match is None else match[0]
    stem, ending = os.path.splitext(base[: len(base) - len(number)])
    return stem + number, (ending + packing).lower()


def ending_of(name: str) -> str:
    """Return the extension of a name, as `stem_and_ending` does."""
    return stem_and_ending(name)[1]


def splits_of(files: Sequence[SourceFile]) -> list[str | None]:
    """Return the split of each file by its name or first folder, if all have one: `train-00000.parquet`."""
    found = [_SPLIT_OF.match(file.name) for file in files]
    return [match[1] for match in found if match] if all(found) else [None] * len(files)


def paths_of(dataset: Any, *, is_named: bool) -> list[pathlib.Path] | None:
    """Return the files and folders that a source names; None if it is not a path.

    A list of str is a list of paths only if the kind is named: otherwise it is a dataset of texts.
    """
    if isinstance(dataset, (str, os.PathLike)):
        text = os.path.abspath(os.fspath(dataset))
        if glob.has_magic(text) and not os.path.lexists(text):
            found = files_of_pattern(text)
            if not found:
                raise SourceError(f"no file matches {text!r}; correct the pattern")
            return found
        return [pathlib.Path(text)] if os.path.lexists(text) else [pathlib.Path(path) for path in _of_braces(text)]
    is_listed = is_named and isinstance(dataset, (list, tuple)) and bool(dataset)
    if is_listed and all(isinstance(path, (str, os.PathLike)) for path in dataset):
        return [pathlib.Path(os.path.abspath(path)) for path in dataset]
    return None


def _of_braces(text: str) -> list[str]:
    """Return the paths that a pattern of WebDataset names: `shard-{000..127}.tar`."""
    match = _BRACES.search(text)
    if match is None:
        return [text]
    first, last = match.groups()
    numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [path for number in numbers for path in _of_braces(text[: match.start()] + number + text[match.end() :])]


def files_below(
    root: str | os.PathLike[str], pattern: str = "**/*", suffixes: str | Sequence[str] = ()
) -> list[pathlib.PurePosixPath]:
    """Return the visible files below a folder, as sorted paths relative to it.

    Links to folders are not searched by `**`, but for those that lead out of the folder where a run follows these.

    Args:
        root: folder that holds the files.
        pattern: glob pattern, relative to `root`.
        suffixes: suffixes of the files to return, such as ".png", or one of them; empty returns all.

    Raises:
        SourceError: the folder does not exist.
        OptionError: a suffix does not begin with a dot.
        OutputError: a run lists its source, and files of its output would be among them.
    """
    folder = pathlib.Path(root)
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder; give the folder that holds the samples as source")
    real = os.path.join(os.path.realpath(folder), "")
    suffixes = [suffix.lower() for suffix in ([suffixes] if isinstance(suffixes, str) else suffixes)]
    if wrong := [suffix for suffix in suffixes if suffix[:1] != "."]:
        raise OptionError(f"suffixes holds {wrong[0]!r}; want suffixes with their dot, as in suffixes=['.jpg', '.png']")

    def takes(path: str) -> bool:
        below = pathlib.PurePosixPath(path.removeprefix(real))
        return path.startswith(real) and _fits(below.parts, pattern.split("/")) and is_listed(below)

    def is_listed(below: pathlib.PurePosixPath) -> bool:
        is_wanted = not suffixes or below.suffix.lower() in suffixes or ending_of(below.name) in suffixes
        return is_wanted and not any(part.startswith(".") for part in below.parts)

    refuse_output_in(os.fspath(folder), takes)
    visible = visible_files(folder, pattern)
    found = [path for path in visible if is_listed(path)] if suffixes else visible
    note_files(folder, found, [] if len(found) == len(visible) else [path for path in visible if not is_listed(path)])
    return found


def visible_files(folder: pathlib.Path, pattern: str = "**/*") -> list[pathlib.PurePosixPath]:
    """Return the files below a folder that are not hidden, sorted."""
    found = []
    for path in _linked(folder, pattern) if follows_links() else folder.glob(pattern):
        below = pathlib.PurePosixPath(path.relative_to(folder).as_posix())
        visible = not any(part.startswith(".") for part in below.parts)
        # Not `is_file`: a dangling link is a missing sample, which is reported when the file is checked.
        if visible and not path.is_dir():
            found.append(below)
        elif visible and "**" in pattern and not follows_links() and path.is_symlink() and path.is_dir():
            _note_link(folder, path)
    return sorted(found)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True if a path fits a glob pattern, both given by their parts."""
    if not parts or not pattern:
        return not parts and not pattern
    if pattern[0] == "**":
        return _fits(parts, pattern[1:]) or _fits(parts[1:], pattern)
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def files_of_pattern(pattern: str) -> list[pathlib.Path]:
    """Return what a glob pattern finds, in the order of the names; raises `OutputError` as `files_below` does."""
    absolute = os.path.abspath(pattern).split("/")
    refuse_output_in(repr(pattern), lambda path: _fits(path.split("/"), absolute))
    return [pathlib.Path(path) for path in sorted(glob.glob(pattern, recursive=True))]


def _note_link(root: pathlib.Path, path: pathlib.Path) -> None:
    target = os.path.realpath(path)
    if not pathlib.Path(target).is_relative_to(os.path.realpath(root)):
        _logger.warning(
            "%s is a link out of the source, to the folder %s, and is not searched; if the link is yours, pass "
            "follow_links=True",
            path,
            target,
        )


def _linked(root: pathlib.Path, pattern: str) -> set[pathlib.Path]:
    """Return what a pattern finds below a folder, including outside folders that links lead to.

    A folder is not searched again below itself, as links may lead in circles.
    """
    real_root = os.path.realpath(root)

    def search(folder: pathlib.Path, parts: Sequence[str], above: frozenset[str]) -> Iterator[pathlib.Path]:
        first, *rest = parts
        if first == "**" and rest:
            yield from search(folder, rest, above)
        with os.scandir(folder) as listed:
            entries = list(listed)
        for entry in entries:
            if first != "**" and not fnmatch.fnmatchcase(entry.name, first):
                continue
            path = folder / entry.name
            if not rest:
                yield path
            real = os.path.realpath(path)
            inner = first == "**" and entry.is_symlink() and pathlib.Path(real).is_relative_to(real_root)
            if (rest or first == "**") and entry.is_dir() and real not in above and not inner:
                yield from search(path, parts if first == "**" else rest, above | {real})

    return set(search(root, pattern.split("/"), frozenset({real_root})))


_TABLE_LOGS = {
    "_delta_log": ("Delta", "deltalake.DeltaTable({0!r})"),
    "metadata/*.metadata.json": ("Iceberg", "pyiceberg.table.StaticTable.from_metadata(...).scan().to_arrow()"),
    "_versions/*.manifest": ("Lance", "lance.dataset({0!r})"),
    ".hoodie": ("Hudi", "hudi.HudiTable({0!r}).read_snapshot()"),
}
"""What tables with a log have, what they are called, and what reads them."""


def refuse_table_logs(folder: pathlib.Path) -> None:
    """Raise `SourceError` if a log says which files of a folder hold rows, and which were deleted or replaced.

    Tables keep files in folders of their own, `data` or one for each partition, so the log may lie above.
    """
    own = folder.absolute()
    above = [own, *own.parents]
    for table, (pattern, (name, reader)) in itertools.product(above, _TABLE_LOGS.items()):
        if any(table.glob(pattern)):
            shown = folder if table == own else table
            raise SourceError(
                f"{shown} is a table of {name}, whose log says which of its files count; pass what its package reads, "
                f"as in Materializer({reader.format(str(shown))}, ...)"
            )


def listed_files(paths: Sequence[pathlib.Path], suffixes: Sequence[str]) -> list[SourceFile]:
    """Return the files that paths stand for: a folder stands for files in it with a suffix, a file for itself."""
    found = []
    folders = [path for path in paths if path.is_dir()]
    for folder in {*folders, *(path.parent for path in paths if len(paths) > 1 and path not in folders)}:
        refuse_table_logs(folder)
    for path in paths:
        if path.is_dir():
            prefix = f"{path.name}/" if len(folders) > 1 else ""
            names = [str(name) for name in files_below(path, suffixes=suffixes)]
            found += [SourceFile(prefix + name, os.path.join(path, name)) for name in names]
        else:
            found.append(SourceFile(path.name, str(path)))
    names = [file.name for file in found]
    if len(set(names)) < len(names):  # of files in several folders: by their paths below what these share
        shared = os.path.commonpath([os.path.dirname(file.path) for file in found])
        found = [SourceFile(os.path.relpath(file.path, shared).replace(os.sep, "/"), file.path) for file in found]
    return sorted(found, key=lambda file: file.name)
