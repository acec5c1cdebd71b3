"""Holds the rows of an index, one by one or as blocks of columns."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import operator
import os
import pathlib
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import xxhash

from datamat.errors import SourceError
from datamat.values import frozen


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
    """A column of n texts: UTF-8 back to back, and where each text ends.

    Args:
        data: all texts; bytes that are not UTF-8 belong to paths.
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
        """Return a column of texts that are already encoded."""
        ends = np.cumsum(np.fromiter(map(len, pieces), np.uint64, len(pieces)), dtype=np.uint64)
        return cls(b"".join(pieces), ends, pieces)

    @classmethod
    def of_positions(cls, start: int, stop: int) -> Texts:
        """Return the positions from `start` to `stop` with at least eight digits."""
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
        """Return one text, or the texts of a slice with step 1."""
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
        if self._width and text.isascii():
            return [*map(bytes.decode, self.pieces())]
        ends = self.ends.tolist()
        return [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)] if ends else []

    def pieces(self) -> list[bytes]:
        """Return the texts, encoded."""
        if self._pieces is not None:
            return self._pieces
        if self._width:
            found: list[bytes] = np.frombuffer(self.data, f"V{self._width}").tolist()
            return found
        data, ends = self.data, self.ends.tolist()
        return [data[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)] if ends else []

    @property
    def _width(self) -> int:
        """Bytes of each text if all have as many, else 0: a call that cuts them takes a sixth of the time of slices."""
        width = int(self.ends[0]) if len(self) else 0
        return width if (np.diff(self.ends) == width).all() else 0

    def hashes(self) -> np.ndarray:
        """Return uint64 (n,): the XXH3 of each."""
        return np.fromiter(map(xxhash.xxh3_64_intdigest, self.pieces()), np.uint64, len(self))

    def are_plain(self) -> bool:
        """Return True if all are of ASCII letters, digits, `_`, `-` and `.`, without `..`, and none is empty.

        Then each is a key as it is.
        """
        lengths = np.diff(self.ends, prepend=np.uint64(0))
        return bool(lengths.all()) and b".." not in self.data and not self.data.translate(None, _PLAIN_LETTERS)


_POSITION_DIGITS = 8
_PLAIN_LETTERS = b"-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
_ROWS_AT_ONCE = 1024  # that are made of a block
_MANY_BYTES = 64  # average length of a text from which copying slices is faster than gathering bytes


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
        origin: where each row came from, for messages; () if nothing is known.
        splits: the split of each row, None for one that is drawn; or the split of all rows. None draws all of them.
        files: further input files of each row; None if rows have none.

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
    splits: Any = None  # as given; later the names in order of first occurrence, and int64 (n,) indices into them
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
        """Return where a row came from: only its number in the index, if nothing else is known.

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
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iuf" and values.itemsize <= 8:
        if values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
            return listed(values)
        return values.astype(np.float64 if values.dtype.kind == "f" else np.int64, copy=False)
    return values if isinstance(values, Texts) else listed(values)


def _coded(splits: Sequence[Any]) -> tuple[list[Any], np.ndarray] | None:
    """Return the names of splits in order of first occurrence, and int64 (n,), the index of each row's split."""
    names = list(dict.fromkeys(splits))
    codes = {name: code for code, name in enumerate(names)}
    return (names, np.fromiter(map(codes.__getitem__, splits), np.int64, len(splits))) if any(names) else None


class Rows:
    """The rows of an index, which can be iterated any number of times. Blocks of rows are stored as blocks.

    Args:
        rows: function that returns the rows, or blocks of them, in a fixed order; called for each iteration.
    """

    def __init__(self, rows: Callable[[], Iterable[IndexRow] | Iterable[RowBlock]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[IndexRow]:
        return single_rows(self._rows())


def single_rows(found: Iterable[IndexRow] | Iterable[RowBlock]) -> Iterator[IndexRow]:
    """Yield rows one by one, including those of blocks."""
    for one in found:
        if isinstance(one, RowBlock):
            yield from one.rows()
        else:
            yield one


def stored_rows(found: Iterable[IndexRow] | Iterable[RowBlock]) -> Iterable[IndexRow] | Iterable[RowBlock]:
    """Return the rows that a writer's `index` returned, as `write_rows` takes them: single, or in blocks."""
    if found is None:
        raise SourceError("index returned None instead of the rows of the dataset: is a `return` or a `yield` missing?")
    return found._rows() if isinstance(found, Rows) and type(found).__iter__ is Rows.__iter__ else found


def listed(values: np.ndarray | Texts | list[Any]) -> list[Any]:
    """Return a column as Python values."""
    found: list[Any] = (
        values if isinstance(values, list) else values.tolist() if hasattr(values, "tolist") else [*values]
    )
    return found


# ---------------------------------------------------------------- relative paths
#
# Paths that start from the working folder, as `Path(source).glob("*")` gives them if the source is relative.
#
# Rows hold paths relative to the source, or absolute ones. With `source="photos"`, "photos/1.jpg" would be looked for
# below photos/photos, and be taken for a mere word: edits of the file would go unnoticed.


def relative_to_source(
    rows: Iterable[IndexRow] | Iterable[RowBlock],
    source: str | os.PathLike[str],
    file_fields: Collection[str] | None,
) -> Iterator[Any]:
    """Yield rows, or blocks of them, with paths relative to the source instead of the working folder.

    A path stays if the source has a file of that name. Folders in fields stay as well: they may be mere words.

    Args:
        rows: rows as the writer's `index` yields them.
        source: the source, a relative path.
        file_fields: names of the fields that hold files; None if they are not declared.
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
    """Return a value with the paths in it moved; the same object if it has none."""
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


# ---------------------------------------------------------------- rows in blocks


BATCH_ROWS = 16_384
_FEW_ROWS = 200  # held at a time: few enough objects that the garbage collector does not start


def in_blocks(rows: Iterable[IndexRow] | Iterable[RowBlock]) -> Iterator[RowBlock]:
    """Yield rows in the blocks they come in, or single rows in batches."""
    iterator: Iterator[Any] = iter(rows)
    first = next(iterator, None)
    before, names = 0, tuple[str, ...]()
    if isinstance(first, RowBlock):
        for block in itertools.chain([first], iterator):
            if not isinstance(block, RowBlock):
                raise SourceError(f"the index holds {_shown(block)} after blocks of rows; want blocks or rows alone")
            if len(block):
                yield block
        return
    iterator = itertools.chain(() if first is None else (first,), iterator)
    while block := _block_of(iterator, names, before):
        names = names or tuple(block.fields)
        yield block
        before += len(block)


def _check_row(row: Any, number: int) -> None:
    if not isinstance(row, IndexRow):
        raise SourceError(
            f"row {number} of the index is {_shown(row)}; want an IndexRow, such as "
            "IndexRow('0001', 'train', {'image': '0001.png'})"
        )
    if not isinstance(row.fields, Mapping):
        raise SourceError(
            f"{origin_of(row, number)}: its fields are {_shown(row.fields)}; want a dict of what read needs, such as "
            "{'image': '0001.png'}"
        )
    if not isinstance(row.split, (str, type(None))):
        raise SourceError(
            f"{origin_of(row, number)}: the split is {_shown(row.split)}; want a name or None, as in "
            "IndexRow('0001', 'train', {'image': '0001.png'})"
        )


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}, {reprlib.repr(value)}"


def _block_of(rows: Iterator[Any], names: tuple[str, ...], before: int) -> RowBlock | None:
    """Return the next single rows as a block, or None at their end.

    Args:
        rows: the rows of an index that are left.
        names: the fields of its first row; () if that is yet to come.
        before: number of rows before them.

    Raises:
        SourceError: one is not a row, or has other fields than the first, or a bad split.
    """
    keys, splits, origins, files = list[Any](), list[Any](), list[Any](), list[Any]()
    columns: dict[str, list[Any]] = {name: [] for name in names}
    while len(keys) < BATCH_ROWS:
        start, some, fields = before + len(keys), list[IndexRow](), list[dict[str, Any]]()
        for row in itertools.islice(rows, _FEW_ROWS):
            if type(row) is not IndexRow or type(row[2]) is not dict:
                _check_row(row, start + len(some))
            # As they are now: an index may refill what it has yielded. Dicts of text and numbers alone are not tracked.
            fields.append(copied({**row[2]}) if gc.is_tracked(row[2]) else {**row[2]})
            files.append(copied(row[4]) if row[4] else ())
            some.append(row)
        if not some:
            break
        columns = columns or {name: [] for name in fields[0]}
        try:
            found = [[one[name] for one in fields] for name in columns]
        except KeyError:
            found = []
        if len(found) < len(columns) or set(map(len, fields)) != {len(columns)}:
            number = next(number for number, one in enumerate(fields) if one.keys() != columns.keys())
            raise other_fields(origin_of(some[number], start + number), fields[number], columns)
        for values, more in zip(columns.values(), found, strict=True):
            values.extend(more)
        keys += [row[0] for row in some]
        splits += [row[1] for row in some]
        origins += [row[3] for row in some]
        if not set(map(type, splits[-len(some) :])) <= {str, type(None)}:
            for number, row in enumerate(some, start):
                _check_row(row, number)
    return RowBlock(keys, columns, origins, splits, files if any(files) else None) if keys else None


def copied(value: Any) -> Any:
    """Return a value as it is now: lists, tuples, dicts and arrays, however nested, are copied."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in {list, tuple}:
        return type(value)(map(copied, value))
    return {name: copied(part) for name, part in value.items()} if type(value) is dict else value


def origin_of(row: IndexRow, number: int) -> str:
    """Return where a row came from: only its number in the index, if nothing else is known."""
    return row.origin or f"row {number}"


def other_fields(origin: str, found: Iterable[str], wanted: Iterable[str]) -> SourceError:
    """Return the error of a row whose fields are not those of the first row."""
    return SourceError(
        f"{origin}: the fields are {sorted(found)}, but {sorted(wanted)} in the first row; give every row the same "
        "fields (None for missing values)"
    )
