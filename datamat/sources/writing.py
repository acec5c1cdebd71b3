"""Writes the rows of an index to disk in columns, as `RowStore` reads them.

    rows of the index ── in batches ──┐
    tables, arrays ─────── as blocks ──┴──> keys, splits and fields checked ──> files of columns
    columns ── those that hold paths of files ──> state of each input file

Bad rows stop a run before any work, and the message names the line or row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import xxhash

from datamat.directory.files import render_json
from datamat.directory.keys import SPLIT_NAME, bad_key, safe_keys
from datamat.directory.row_values import FILES, decode_value, encode_value, looks_like_path
from datamat.errors import SourceError, join_problems
from datamat.folders.urls import is_url, lasting
from datamat.sources.files import follows_links, may_be_input
from datamat.sources.inputs import InputFinder
from datamat.sources.rows import (
    BATCH_ROWS,
    IndexRow,
    Origin,
    RowBlock,
    Texts,
    in_blocks,
    listed,
    origin_of,
    other_fields,
)
from datamat.sources.store import NO_TEXT, FieldKind, RowField, RowStore, mixed
from datamat.sources.url_files import UrlFiles

_DEFAULT_SPLIT = "train"
_EXACT = 2**53  # integers up to it are exact as floats


def write_rows(  # noqa: PLR0913 -- options of how rows are stored, passed by name
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
        rows: rows, or blocks of rows, as the writer's `index` yields them; consumed once, and never all held in memory.
        folder: an empty folder for these files only.
        source: folder that relative paths of fields start from.
        splits: share of each split for rows that name none, drawn by hash of the key; None puts them all in "train".
        groups: returns the hashes that draw the splits of a block of rows, given the number of rows before them; None
            to draw splits by the keys.
        file_fields: names of the fields that hold paths of input files or folders, blank in rows that have none. None
            finds them by the first values that are not blank, and by a sample of the others.
        identity: how to decide whether an input file is unchanged, as in `ShardOptions`.
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
        for block in in_blocks(rows):
            writer.append(block)
        if not writer.num_rows:
            raise SourceError(
                f"the index of {source} is empty; check the path, and whether the writer's index finds files there"
                if source
                else "the index is empty; check that the writer's index yields rows"
            )
        fields = writer.finish(identity, "" if urls is None else urls.folder)
    InputFinder(RowStore(folder), file_fields, urls).find_files(fields)
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
                    f"{block.origin_of(0, before)}: there is no field {missing[0]!r} to hold URLs; the row "
                    f"has {', '.join(self._names)}"
                )
        if block.fields.keys() != set(self._names):
            raise other_fields(block.origin_of(0, before), block.fields, self._names)
        hashes = self._files.write_text("key", keys)
        self._files.write("hash.codes", hashes)
        digests = mixed(hashes, hashes)
        self._write_origins(block)
        self._files.write("split.codes", self._split_codes(block, hashes))
        for column in self._columns:
            values = block.fields[column.field.name]
            if column.field.name in self._url_fields:
                values, signed = _unsigned(values)
                self._files.write_text(f"{column.field.stem}.signed", signed, hashed=False)
            digests = mixed(digests, column.append(values, block, before))
        digests = self._append_further(block, digests)
        self._files.write("digest.codes", digests)
        self.num_rows += count

    def _checked_keys(self, block: RowBlock) -> Texts:
        with contextlib.suppress(AttributeError, TypeError, UnicodeEncodeError):  # of keys that are not texts
            texts = block.keys if isinstance(block.keys, Texts) else Texts.of(block.keys)
            if texts.are_plain() and (texts is block.keys or set(map(type, block.keys)) == {str}):
                return texts
        given = listed(block.keys)
        keys = safe_keys(given)
        number = bad_key(keys)
        if number is not None:
            raise SourceError(
                f"{block.origin_of(number, self.num_rows)}: key {given[number]!r}; want a non-empty str without lone "
                "surrogates, since keys become parts of file names"
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
        head = {
            "num_rows": self.num_rows,
            "source": self._source,
            "identity": identity,
            "url_folder": url_folder,
            "follows_links": follows_links(),
            "splits": list(self._codes),
            "fields": [dataclasses.asdict(field) for field in fields],
            "origins": self._origins,
        }
        (self._folder / "rows.json").write_bytes(render_json(head))
        return fields

    def _append_further(self, block: RowBlock, digests: np.ndarray) -> np.ndarray:
        """Write the files that rows name besides their fields, if any."""
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
        # Only by their names: their folders may differ from one clone of a project to the next.
        names = ("\0".join(map(os.path.basename, paths)) for paths in listed)
        listing = Texts.of(names).hashes()
        has_files = np.fromiter(map(bool, given), bool, count)
        return np.where(has_files, mixed(digests, listing), digests)

    def _file_test(self, name: str) -> Callable[[str | pathlib.PurePath], bool]:
        """Return the test for input files among texts and paths in lists, tuples and dicts of a field."""
        if name in self._url_fields:
            return lambda path: bool(str(path))
        if self._file_fields is not None:
            is_declared = name in self._file_fields
            return lambda path: is_declared and bool(str(path))

        def exists(path: str | pathlib.PurePath) -> bool:
            if isinstance(path, str):
                return looks_like_path(path) and may_be_input(path, self._source)
            return os.path.exists(os.path.join(self._source, path))

        return exists

    def _split_codes(self, block: RowBlock, hashes: np.ndarray) -> np.ndarray:
        # 53 bits of the hash as a fraction: the split depends only on the key or group, so a sample never moves.
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


class _ColumnFiles:
    """The files of columns, appended to."""

    def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._files: dict[str, BinaryIO] = {}
        self._ends: dict[str, int] = {}

    def write_text(self, stem: str, texts: Texts, *, hashed: bool = True) -> np.ndarray:
        """Append texts; return uint64 (n,), the hash of each, or zeros if hashes are not wanted."""
        base = self._ends.get(stem, 0)
        ends = texts.ends + np.uint64(base)
        self._ends[stem] = base + len(texts.data)
        self._file(f"{stem}.text").write(texts.data)
        self.write(f"{stem}.ends", ends)
        return texts.hashes() if hashed else np.zeros(0, np.uint64)

    def write(self, name: str, array: np.ndarray) -> None:
        self._file(name).write(np.ascontiguousarray(array).data)

    def content(self, name: str) -> bytes:
        """Return the content of a file so far."""
        self._files[name].flush()
        return (self._folder / name).read_bytes()

    def remove(self, stem: str) -> None:
        """Remove the files of a column, to start it again."""
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
    """Writes one field to disk: as text, as numbers, or as JSON for anything else.

    Args:
        name: name of the index field, for messages.
        number: position among the fields of a row, from 0.
        files: files of the rows, opened on demand.
        is_file: returns True if a text or path in a list, tuple or dict is an input file.

    Attributes:
        field: the field; its kind is known at the end.
    """

    def __init__(
        self, name: str, number: int, files: _ColumnFiles, is_file: Callable[[str | pathlib.PurePath], bool]
    ) -> None:
        self.field = RowField(name, number, "json", holds_file=False)
        self._files = files
        self._is_file = is_file
        self._kind: FieldKind | None = None
        self._family = "nested" if name == FILES else ""
        self._types: set[type] = set()
        self._has_files = False

    def append(self, values: np.ndarray | Texts | list[Any], block: RowBlock, first: int) -> np.ndarray:
        """Write the values of a block of rows; return uint64 (n,): the digest of each value."""
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
        """Return the field, with the kind that its values need."""
        assert self._kind is not None
        names = tuple(sorted(kind.__name__ for kind in self._types)) if self._kind == "json" else ()
        return dataclasses.replace(self.field, kind=self._kind, types=names, holds_file=self._has_files)

    def _check(self, types: set[type], values: np.ndarray | Texts | list[Any], block: RowBlock, first: int) -> None:
        """Raise `SourceError` if text, numbers and containers are mixed, or a value is none of these."""
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
            f"{block.origin_of(number, first)}: field {self.field.name!r} holds {value!r} "
            f"({type(value).__name__}); want text, numbers, paths, or lists, tuples and dicts of these, of one kind in "
            "every row, or None in rows without a value"
        )

    def _common(self, kind: FieldKind, types: set[type], values: Sequence[Any]) -> FieldKind:
        """Return the kind that holds the values so far and a batch of another kind; rewrite the former in it."""
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
            self._files.remove(self.field.stem)
            for start in range(0, len(stored), BATCH_ROWS):
                some = stored[start : start + BATCH_ROWS]
                self._put(wanted, set(map(type, some)), some)
        return wanted

    def _stored(self) -> list[Any]:
        """Return all values so far; all are in memory only if the first rows did not decide their kind."""
        stem = self.field.stem
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
        stem = self.field.stem
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
        """Return the error that names the first value with something in it that a row cannot hold."""
        number, value = next((n, v) for n, v in enumerate(values) if not _can_be_json(v))
        return SourceError(
            f"{block.origin_of(number, first)}: field {self.field.name!r} holds {value!r}, with a value of "
            f"type {error} in it; want text, numbers, None, paths, and lists, tuples and dicts of these (tolist() "
            "makes a list of an array)"
        )


def _unsigned(values: np.ndarray | Texts | list[Any]) -> tuple[np.ndarray | Texts | list[Any], Texts]:
    """Return URLs without their signatures, and the signed ones, "" if both are the same; several URLs as JSON."""
    if isinstance(values, np.ndarray):
        return values, Texts.of([""] * len(values))
    if isinstance(values, Texts) and not any(letter in values.data for letter in b"?@ \t\r\n"):
        return values, Texts(b"", np.zeros(len(values), np.uint64))
    kept, signed = [], []
    for value in listed(values):
        value = _each_text(value, _trimmed)  # noqa: PLW2901 -- blanks around a URL mean nothing
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
    """Return a URL without the blanks around it; any other text, which may be a path, unchanged."""
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
    """Stands for integers that int64 cannot hold, among the types of a column."""


def _are_exact(values: Sequence[Any]) -> bool:
    """Return True if these integers are exact as floats."""
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
    """Return the digest of a value in a JSON column, which is the same as in a column of its own kind."""
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


def _listed(files: Any, block: RowBlock, number: int) -> list[str]:
    """Return the listed files of a row as a list of paths."""
    if isinstance(files, (str, os.PathLike)):
        origin = block.origin.of(number) if isinstance(block.origin, Origin) else block.origin[number]
        raise SourceError(f"{origin or block.keys[number]}: files is {files!r}; want a list of paths")
    return [os.fspath(path) for path in files]


def _check_unique(store: RowStore) -> None:
    hashes = store.hashes
    ordered = np.sort(hashes)  # hashes without their rows: half the time and memory
    if not (ordered[1:] == ordered[:-1]).any():
        return
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    problems = []
    for place in same[:1000].tolist():
        first, second = store.read(np.sort(order[place : place + 2]))
        if first.key == second.key:  # different keys may have equal hashes
            numbers = np.sort(order[place : place + 2]).tolist()
            problems.append(f"key {first.key!r} at {origin_of(first, numbers[0])} and {origin_of(second, numbers[1])}")
    if problems:
        raise SourceError(
            f"duplicated keys: {join_problems(problems)}; keys must be unique over all splits: rename a file, or "
            "give a row another key"
        )
