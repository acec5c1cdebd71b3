"""Writes the rows of an index to the disk, by columns; see `rows` for the files.

    rows of the index ── in batches ──> keys, splits and fields checked, each input file looked at ──> files of columns

Bad rows stop a run before it works, and the message names the line or row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from datamat.errors import SourceError
from datamat.index import named
from datamat.rows import Field, RowStore
from datamat.seeding import mix64
from datamat.source_files import SourceFiles
from datamat.storage import commit_json

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable, Mapping, Sequence
    from typing import BinaryIO

    from datamat.index import IndexRow
    from datamat.rows import FieldKind

__all__ = ["write_rows"]

_BATCH_ROWS = 16_384
_DEFAULT_SPLIT = "train"
_LOOKED_AT = 16  # rows that are looked at to find the fields that hold files
_SPLIT_NAME = re.compile(r"\w+\Z")  # goes into file names; HF and TFDS accept word characters only
# One search over the keys of a batch, joined by newlines: separators, the mark of copies, control characters,
# `..`, and empty keys. Keys become file and member names: nothing of them may lead out of a folder.
_BAD_KEY = re.compile(r"[/\\#\x00-\x09\x0b-\x1f\x7f]|\.\.|(?:\A|\n)(?:\n|\Z)")


def write_rows(
    rows: Iterable[IndexRow],
    folder: pathlib.Path,
    *,
    source: str,
    splits: Mapping[str, float] | None = None,
    file_fields: Sequence[str] | None = None,
) -> RowStore:
    """Check the rows of an index and write them to `folder`, by columns.

    Args:
        rows: the index.
        folder: an empty folder, for this alone.
        source: folder that relative paths of fields start from.
        splits: share of each split for rows that name none, drawn by hash of the key. None: they are all "train".
        file_fields: the fields that hold paths of input files. None finds them: fields of strings that are the
            path of an existing file in one of the first rows.

    Returns:
        The rows, readable, in the order of the index.

    Raises:
        SourceError: no rows, a bad or duplicated key, fields that differ from row to row, a missing file; the
            message names the line or row.
    """
    with contextlib.ExitStack() as stack:
        writer = _RowWriter(folder, source, splits, file_fields, stack)
        iterator = iter(rows)
        while batch := list(islice(iterator, _BATCH_ROWS)):
            writer.append(batch)
        if not writer.num_rows:
            raise SourceError(
                f"the index of {source} is empty; check the path, and that the writer's index finds files there"
            )
    writer.finish()
    store = RowStore(folder)
    _check_unique(store)
    return store


class _RowWriter:
    def __init__(
        self,
        folder: pathlib.Path,
        source: str,
        splits: Mapping[str, float] | None,
        file_fields: Sequence[str] | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.num_rows = 0
        self._folder = folder
        self._source = source
        self._inputs = SourceFiles(source)
        self._file_fields = file_fields
        self._stack = stack
        self._files: dict[str, BinaryIO] = {}
        self._ends: dict[str, int] = {}
        self._fields: list[Field] | None = None
        self._names: tuple[str, ...] = ()
        self._drawn = list(splits or {_DEFAULT_SPLIT: 1.0})
        self._limits = np.cumsum([(splits or {_DEFAULT_SPLIT: 1.0})[name] for name in self._drawn])
        self._codes = {name: code for code, name in enumerate(self._drawn)}

    def append(self, batch: Sequence[IndexRow]) -> None:
        keys = [row[0] for row in batch]
        _check_keys(keys, batch, self.num_rows)
        if self._fields is None:
            self._names = tuple(batch[0].fields)
            self._fields = self._find_fields(batch)
        encoded = self._write_text("key", keys)
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, encoded), np.uint64, len(keys))
        self._write("hash.codes", hashes)
        digests = _mixed(hashes, hashes)
        self._write_text("origin", [row[3] for row in batch])
        codes = self._split_codes(batch, hashes)
        self._write("split.codes", codes)
        columns = self._columns(batch)
        for field in self._fields:
            digests = self._write_field(field, columns[field.number], batch, digests)
        self._write("digest.codes", digests)
        self.num_rows += len(batch)

    def finish(self) -> None:
        commit_json(
            self._folder / "rows.json",
            {
                "num_rows": self.num_rows,
                "source": self._source,
                "splits": list(self._codes),
                "fields": [dataclasses.asdict(field) for field in self._fields or ()],
            },
        )

    def _find_fields(self, batch: Sequence[IndexRow]) -> list[Field]:
        found = []
        for number, (name, column) in enumerate(zip(self._names, self._columns(batch), strict=True)):
            kind = _kind_of(name, column, batch, self.num_rows)
            if self._file_fields is None:
                looked_at = column[:_LOOKED_AT] if kind == "text" else []
                holds_file = any(value and os.path.isfile(os.path.join(self._source, value)) for value in looked_at)
            else:
                holds_file = name in self._file_fields
            found.append(Field(name, number, kind, holds_file))
        return found

    def _columns(self, batch: Sequence[IndexRow]) -> list[list[Any]]:
        """Return the fields of a batch by columns; every row must have the same ones."""
        width = len(self._names)
        try:
            columns = [[row[2][name] for row in batch] for name in self._names]
            same = all(len(row[2]) == width for row in batch)
        except KeyError:
            same = False
        if not same:
            row, number = next((r, n) for n, r in enumerate(batch) if set(r.fields) != set(self._names))
            raise SourceError(
                f"{_place(row, self.num_rows + number)}: the fields are {sorted(row.fields)}, but "
                f"{sorted(self._names)} in the first row; give every row the same fields ('' or nan where one has none)"
            )
        return columns

    def _split_codes(self, batch: Sequence[IndexRow], hashes: np.ndarray) -> np.ndarray:
        names = [row[1] for row in batch]
        # 53 bits of the hash as a fraction: a sample's split depends on its key alone, so it never moves.
        drawn = np.searchsorted(self._limits, (hashes >> np.uint64(11)) * 2.0**-53, side="right")
        drawn = np.minimum(drawn, len(self._drawn) - 1).astype(np.uint16)
        if not any(names):
            return drawn
        for name in dict.fromkeys(names):
            if name is not None and name not in self._codes:
                row = next(row for row in batch if row[1] == name)
                if not isinstance(name, str) or not _SPLIT_NAME.match(name):
                    raise SourceError(f"{_place(row, 0)}: split {name!r}; want letters, digits and _, as in 'train'")
                self._codes[name] = len(self._codes)
        given = np.fromiter((self._codes[name] if name else -1 for name in names), np.int64, len(names))
        return np.where(given < 0, drawn, given).astype(np.uint16)

    def _write_field(
        self, field: Field, column: list[Any], batch: Sequence[IndexRow], digests: np.ndarray
    ) -> np.ndarray:
        kind = _kind_of(field.name, column, batch, self.num_rows)
        if kind != field.kind and (kind, field.kind) != ("int64", "float64"):
            raise SourceError(
                f"{_place(batch[0], self.num_rows)}: field {field.name!r} holds {kind} here, but {field.kind} in the "
                "rows before; give one type to a field (write 1.0 for 1 among floats)"
            )
        if field.kind != "text":
            numbers = np.array(column, np.dtype(field.kind))
            self._write(f"{field.stem}.numbers", numbers)
            return _mixed(digests, numbers.view(np.uint64))
        encoded = self._write_text(field.stem, column)
        digests = _mixed(digests, np.fromiter(map(xxhash.xxh3_64_intdigest, encoded), np.uint64, len(column)))
        if field.holds_file:
            sizes, mtimes = self._look_at(field.name, column, batch)
            self._write(f"{field.stem}.size", sizes)
            self._write(f"{field.stem}.mtime", mtimes)
            digests = _mixed(_mixed(digests, sizes.view(np.uint64)), mtimes.view(np.uint64))
        return digests

    def _look_at(self, name: str, paths: Sequence[str], batch: Sequence[IndexRow]) -> tuple[np.ndarray, np.ndarray]:
        sizes = np.zeros(len(paths), np.int64)
        mtimes = np.zeros(len(paths), np.int64)
        problems = []
        for number, path in enumerate(paths):
            if not path:  # this row has no such file
                continue
            try:
                found = self._inputs.look_at(path)
                sizes[number], mtimes[number] = found.st_size, found.st_mtime_ns
            except OSError as error:
                problem = (error.strerror or str(error)).lower()
            except ValueError as error:
                problem = str(error)
            else:
                continue
            problems.append(f"{_place(batch[number], self.num_rows + number)}: {name} {path!r}: {problem}")
        if problems:
            raise SourceError(f"{named(problems)}; looked below {self._source}: add the files or drop the rows")
        return sizes, mtimes

    def _write_text(self, stem: str, values: Sequence[str]) -> list[bytes]:
        encoded = [value.encode("utf-8", "surrogateescape") for value in values]
        ends = np.cumsum(np.fromiter(map(len, encoded), np.uint64, len(encoded))) + np.uint64(self._ends.get(stem, 0))
        self._ends[stem] = int(ends[-1])
        self._file(f"{stem}.text").write(b"".join(encoded))
        self._write(f"{stem}.ends", ends)
        return encoded

    def _write(self, name: str, array: np.ndarray) -> None:
        self._file(name).write(np.ascontiguousarray(array).data)

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = self._stack.enter_context((self._folder / name).open("xb"))
        return self._files[name]


def _mixed(digests: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Fold one uint64 column into the digests of its rows, so that the order of the columns matters."""
    with np.errstate(over="ignore"):
        return mix64(digests * np.uint64(0x9E3779B97F4A7C15) + values)


def _place(row: IndexRow, number: int) -> str:
    return row.origin or f"row {number}"


def _check_keys(keys: Sequence[Any], batch: Sequence[IndexRow], first: int) -> None:
    if set(map(type, keys)) == {str}:
        joined = "\n".join(keys)
        if not _BAD_KEY.search(joined) and joined.count("\n") == len(keys) - 1 and _encodes(joined):
            return
    for number, key in enumerate(keys):
        if type(key) is not str or "\n" in key or _BAD_KEY.search(key) or not _encodes(key):
            raise SourceError(
                f"{_place(batch[number], first + number)}: key {key!r}; want a non-empty str without '/', '\\', '..', "
                "'#', control characters or lone surrogates: keys become parts of file names"
            )


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind_of(name: str, column: Sequence[Any], batch: Sequence[IndexRow], first: int) -> FieldKind:
    types = set(map(type, column))
    if types == {str}:
        return "text"
    if types == {int}:
        return "int64"
    if types <= {int, float}:
        return "float64"
    number, value = next(
        (n, v) for n, v in enumerate(column) if type(v) not in {str, int, float} or type(v) is not type(column[0])
    )
    raise SourceError(
        f"{_place(batch[number], first + number)}: field {name!r} holds {value!r} ({type(value).__name__}); want str, "
        "int or float, the same type in every row"
    )


def _check_unique(store: RowStore) -> None:
    hashes = store.hashes
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    if not same.size:
        return
    problems = []
    for place in same[:1000].tolist():
        first, second = store.read(np.sort(order[place : place + 2]))
        if first.key == second.key:  # equal hashes of different keys are no matter
            numbers = np.sort(order[place : place + 2]).tolist()
            problems.append(f"key {first.key!r} at {_place(first, numbers[0])} and {_place(second, numbers[1])}")
    if problems:
        raise SourceError(f"duplicated keys: {named(problems)}; keys must be unique over all splits")
