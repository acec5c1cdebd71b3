"""Reads rows of Arrow data: tables in memory, and Arrow files."""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final
from urllib.parse import unquote

import numpy as np

from datamat.errors import CorruptDataError, DatamatError, SourceError
from datamat.writers.arrow_types import (
    OF_ROWS,
    OF_TARS,
    columns_of_schema,
    dicts_of,
    readable,
    readable_schema,
    unified,
)
from datamat.writers.base import DataSource
from datamat.writers.paths import SourceFile, splits_of
from datamat.writers.samples import fit_key
from datamat.writers.tables import content_of
from datamat.writers.tar import archive_of, keys_of_tars
from datamat.writers.text_tables import BATCH_ROWS
from datamat.writers.unpacking import SpoolOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from datamat.features import Feature


class ArrowRows(abc.ABC):
    """Rows of Arrow data by position, in memory or in files.

    Attributes:
        schema: their `pyarrow.Schema`.
        identity: value that stands for their content, as in a `DataSource`.
        files: the files that they lie in.
        refused: why undeclared columns are refused, by name.
    """

    schema: Any
    identity: Any
    files: Sequence[SourceFile] = ()
    refused: Mapping[str, str] = {}

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abc.abstractmethod
    def take(self, numbers: np.ndarray) -> pa.Table:
        """Return rows by their numbers, in this order."""

    @abc.abstractmethod
    def column(self, name: str) -> Iterator[Any]:
        """Yield the cells of a column, in order."""

    @abc.abstractmethod
    def narrow(self, columns: Collection[str]) -> None:
        """Read only these columns."""

    def names(self) -> Iterator[tuple[str, str | None]]:
        """Yield key and split of each row, by where it lies."""
        return ((f"{number:08d}", None) for number in range(len(self)))


@final
class ArrowSource(DataSource):
    """Rows of a table; its columns `key` and `split`, if any, hold the keys and splits, as in CSV files."""

    has_schema = True
    is_of_cells = True

    def __init__(self, rows: ArrowRows) -> None:
        self._rows = rows
        self._columns = {column.name: column for column in columns_of_schema(rows.schema)}
        self._has = OF_ROWS & {*rows.schema.names}
        self._is_of_tars = "key" not in self._has and {*rows.schema.names} >= OF_TARS
        self.identity = rows.identity
        self.files = {file.name: file.path for file in rows.files}
        self.features = {
            name: feature for name, column in self._columns.items() if (feature := column.feature) is not None
        }
        self.refused = {name: column.refused for name, column in self._columns.items() if column.refused}
        self.refused |= {
            name: f"{reason}, or leave it out with drop=[{column.path[0]!r}]"
            for name, column in self._columns.items()
            if (reason := rows.refused.get(column.path[0]))
        }
        self.dicts = dicts_of(self._columns.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        rows = self.rows(np.array([number]))
        return {name: cells[0][:] if isinstance(cells, tuple) else cells[0] for name, cells in rows.items()}

    def rows(self, positions: np.ndarray) -> dict[str, Any]:
        """Return the cells of some rows: arrays, pairs of values and lengths, or lists of Python's values."""
        table = self._rows.take(positions)
        return {name: column.cells(table, positions, self.features.get(name)) for name, column in self._columns.items()}

    def block(self, positions: np.ndarray) -> dict[str, Any]:
        table = self._rows.take(positions)
        return {
            name: column.cells(table, positions, self.features.get(name), for_block=True)
            for name, column in self._columns.items()
        }

    def field_names(self) -> list[str]:
        return list(self._columns)

    def narrow(self, names: Collection[str]) -> None:
        self._columns = {name: column for name, column in self._columns.items() if name in names}
        self._rows.narrow(
            {column.path[0] for column in self._columns.values()} | self._has
            | (OF_TARS if self._is_of_tars else frozenset())
        )  # fmt: skip

    def declare(self, features: Mapping[str, Feature]) -> None:
        self.features = {**self.features, **features}

    def cells(self, name: str) -> Iterator[Any]:
        """Yield the cells of a column, in order, without reading others."""
        return self._rows.column(name) if name in self._columns else super().cells(name)

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        keys = self._rows.column("key") if "key" in self._has else itertools.repeat(None)
        if self._is_of_tars:
            archives = map(archive_of, self._rows.column("__url__"))
            keys = keys_of_tars(list(zip(map(fit_key, self._rows.column("__key__")), archives, strict=True)))
        splits = self._rows.column("split") if "split" in self._has else itertools.repeat(None)
        for number, ((place, of_file), key, split) in enumerate(zip(self._rows.names(), keys, splits, strict=False)):
            if key is None and "key" in self._has:
                raise SourceError(f"row {number}, column 'key' of the table is empty; fill it in, or drop the row")
            yield place if key is None else str(key), split if "split" in self._has else of_file


@final
class MemoryTable(ArrowRows):
    """The rows of a table in memory."""

    def __init__(self, table: pa.Table) -> None:
        self.identity = content_of(table)
        self._table = readable(table)
        self.schema = self._table.schema

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def take(self, numbers: np.ndarray) -> pa.Table:
        # `slice` copies nothing, and `take` of text fails above 2 GB in a column.
        first = int(numbers[0])
        if (np.diff(numbers) == 1).all():
            return self._table.slice(first, len(numbers))
        return self._table.take(numbers)

    def column(self, name: str) -> Iterator[Any]:
        return iter(self._table.column(name).to_pylist())

    def narrow(self, columns: Collection[str]) -> None:
        self._table = self._table.select([name for name in self._table.column_names if name in columns])


_MOST_DECODED = 256 << 20  # bytes of row groups that a worker holds


_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # of Hive, Spark, pyarrow and polars: an empty cell


def folder_values(files: Sequence[SourceFile]) -> list[dict[str, int | str | None]]:
    """Return the values that a file's folders give to all its rows, as in tables of Hive, Spark and `pyarrow.dataset`.

    Returns:
        Values by column: integers if the folders of all files hold integers, otherwise text.

    Raises:
        SourceError: some files lie in such folders, but others do not.
    """
    shared = os.path.commonpath([os.path.dirname(file.path) for file in files]) if files else ""
    found: list[dict[str, str | None]] = []
    for file in files:
        below = os.path.dirname(file.name) or os.path.relpath(os.path.dirname(file.path), shared).replace(os.sep, "/")
        pairs = [part.partition("=") for part in below.split("/") if "=" in part]
        found.append({name: None if text == _NO_VALUE else unquote(text) for name, _, text in pairs if name})
    for file, values in zip(files, found, strict=True):
        if values.keys() != found[0].keys():
            raise SourceError(
                f"{file.path} lies in folders that give it the columns ({', '.join(values)}), but {files[0].path} in "
                f"folders that give it ({', '.join(found[0])}); lay all files out alike"
            )
    numbers = {
        name: all(values[name] is None or re.fullmatch(r"-?(0|[1-9]\d{0,17})", values[name] or "") for values in found)
        for name in (found[0] if found else ())
    }
    return [
        {name: int(text) if text is not None and numbers[name] else text for name, text in values.items()}
        for values in found
    ]  # fmt: skip


class TableFormat(Protocol):
    """How the tables of one kind of file are read.

    Attributes:
        name: name in messages.
    """

    name: str

    def outline(self, path: str) -> tuple[Any, list[int]]:
        """Return the schema of a file, and the number of rows in each group."""

    def read(self, path: str, group: int, columns: Sequence[str]) -> pa.Table:
        """Return columns of a group of rows."""

    def batches(self, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield columns of all rows, some at a time."""


@final
class TableFiles(ArrowRows):
    """The rows of files; a group of rows is read when one of its rows is needed.

    The files of a table may differ: a column may be missing in some, which makes its cells empty, or have a narrower
    type.

    Args:
        files: the files, in the order of their rows.
        format: how they are read.
    """

    def __init__(self, files: Sequence[SourceFile], format: TableFormat) -> None:  # noqa: A002 -- the usual word
        import pyarrow as pa

        self.files = files
        self.identity = "the rows of files"  # whose content counts
        self._format = format
        self._splits = splits_of(files)
        groups: list[tuple[int, int]] = []
        rows: list[int] = []
        self._counts: list[int] = []  # rows of each file
        self.schema = None
        self._own: list[frozenset[str]] = []  # names of the columns in each file itself
        self._folders = folder_values(files)
        for number, (file, values) in enumerate(zip(files, self._folders, strict=True)):
            with _translated(SourceError, f"{file.path} cannot be read as {format.name}"):
                schema, counts = format.outline(file.path)
            if len({*schema.names}) < len(schema.names):
                raise SourceError(
                    f"{file.path} has two columns with the same name ({', '.join(schema.names)}); rename one"
                )
            self._own.append(frozenset(schema.names))
            for name in values:
                if name not in schema.names:  # a writer such as polars may repeat the values in the file
                    is_text = any(isinstance(each[name], str) for each in self._folders)
                    schema = schema.append(pa.field(name, pa.string() if is_text else pa.int64()))
            self.schema = self._with(readable_schema(schema), file)
            groups += [(number, group) for group in range(len(counts))]
            rows += counts
            self._counts.append(sum(counts))
        self._groups = groups
        self._ends = np.cumsum(rows, dtype=np.int64) if rows else np.zeros(0, np.int64)
        self._wanted: Collection[str] | None = None
        self._held: dict[int, pa.Table] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": {}}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, numbers: np.ndarray) -> pa.Table:
        import pyarrow as pa

        places = np.searchsorted(self._ends, numbers, side="right")
        pieces, order = [], []
        for place in np.unique(places).tolist():
            chosen = np.flatnonzero(places == place)
            start = self._ends[place - 1] if place else 0
            pieces.append(self._group(place).take(numbers[chosen] - start))
            order.append(chosen)
        found = pa.concat_tables(pieces)
        here = np.concatenate(order)
        return found if len(pieces) == 1 else found.take(np.argsort(here))

    def column(self, name: str) -> Iterator[Any]:
        for number in range(len(self.files)):
            for batch in self.batches(number, [name]):
                yield from batch.column(name).to_pylist()

    def batches(self, number: int, columns: Collection[str] | None) -> Iterator[pa.RecordBatch]:
        """Yield columns of the rows of a file, some rows at a time; None stands for all columns."""
        import pyarrow as pa

        names = self._names(columns)
        with _translated(CorruptDataError, f"{self.files[number].path} cannot be read"):
            for read in self._format.batches(self.files[number].path, self._own_of(number, names)):
                found = self._complete(pa.Table.from_batches([read]), number, names)
                yield from (batch for batch in found.to_batches() if batch.num_rows)

    def names(self) -> Iterator[tuple[str, str | None]]:
        for file, split, count in zip(self.files, self._splits, self._counts, strict=True):
            stem = f"{file.stem}-" if len(self.files) > 1 else ""
            for number in range(count):
                yield f"{stem}{number:08d}", split

    def narrow(self, columns: Collection[str]) -> None:
        self._wanted = columns
        self._held = {}

    def _group(self, place: int) -> pa.Table:
        """Return a group of rows; the latest groups stay in memory."""
        found = self._held.pop(place, None)
        if found is None:
            found = self._read(place, self._wanted)
            while self._held and found.nbytes + sum(table.nbytes for table in self._held.values()) > _MOST_DECODED:
                del self._held[next(iter(self._held))]
        self._held[place] = found
        return found

    def _read(self, place: int, columns: Collection[str] | None) -> pa.Table:
        number, group = self._groups[place]
        names = self._names(columns)
        with _translated(CorruptDataError, f"{self.files[number].path}: row group {group} cannot be read"):
            found = self._format.read(self.files[number].path, group, self._own_of(number, names))
            return self._complete(found, number, names)

    def _names(self, columns: Collection[str] | None) -> list[str]:
        return [name for name in self.schema.names if columns is None or name in columns]

    def _own_of(self, number: int, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._own[number]]

    def _complete(self, found: pa.Table, number: int, names: Sequence[str]) -> pa.Table:
        """Return rows of a file with all columns, in the types that they have over all files."""
        import pyarrow as pa

        wanted = pa.schema([self.schema.field(name) for name in names])
        for name in names:
            if name not in self._own[number]:
                value = pa.scalar(self._folders[number].get(name), wanted.field(name).type)
                found = found.append_column(name, pa.repeat(value, found.num_rows))
        found = readable(found).select(names)
        if found.schema.types == wanted.types:
            return found
        for column, field in enumerate(found.schema):
            kind = wanted.field(field.name).type
            if field.type != kind and not isinstance(kind, pa.BaseExtensionType):
                try:
                    found = found.set_column(column, field.name, found.column(column).cast(kind))
                except pa.ArrowException as error:
                    raise SourceError(
                        f"{self.files[number].path}: column {field.name!r} is {field.type}, which cannot become {kind} "
                        f"as in other files: {error}; give all files the same type, or leave the column out"
                    ) from error
        return found

    def _with(self, schema: Any, file: SourceFile) -> Any:
        """Return a schema for the rows of a file and of all files before it."""
        if self.schema is None or schema.equals(self.schema):
            return schema
        found, refused = unified(self.schema, schema, self.files[0].path, file.path)
        self.refused = {**self.refused, **refused}
        return found


@contextlib.contextmanager
def _translated(kind: type[DatamatError], what: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        text = str(error).partition("\n")[0]
        raise kind(f"{what}: {text}; write the file again") from error


@final
class ArrowFiles:
    """Files and streams of Arrow, mapped into memory.

    Args:
        span_of: function that returns where the table begins in a file that holds more, and its bytes.
    """

    name = "Arrow"

    def __init__(self, span_of: Callable[[str], tuple[int, int] | None] = lambda path: None) -> None:
        self._span_of = span_of

    def outline(self, path: str) -> tuple[Any, list[int]]:
        reader = self._opened(path)
        return reader.schema, [reader.read_all().num_rows]

    def read(self, path: str, group: int, columns: Sequence[str]) -> pa.Table:
        del group  # there is one
        found = self._opened(path).read_all()
        found.validate(full=True)  # Arrow follows offsets blindly, even out of its memory
        return found.select(columns)

    def batches(self, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return iter(self.read(path, 0, columns).to_batches(max_chunksize=BATCH_ROWS))

    def _opened(self, path: str) -> Any:
        """Return a reader of an Arrow file or stream."""
        import pyarrow as pa

        data = pa.memory_map(path).read_buffer()
        if (span := self._span_of(path)) is not None:
            data = data.slice(*span)
        try:
            return pa.ipc.open_file(data)
        except pa.ArrowInvalid:
            stream = pa.ipc.open_stream(data)
            # Arrow takes the end of the file for that of the stream, even if batches are missing.
            if not data.slice(max(0, data.size - 4)).equals(pa.py_buffer(bytes(4))):
                raise pa.ArrowInvalid("the stream has no end: it was cut off, or its writer was stopped") from None
            return stream


def open_files(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    """Return the rows of Arrow files."""
    del spool
    return ArrowSource(TableFiles(files, ArrowFiles()))
