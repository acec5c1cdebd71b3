"""Reads rows of a CSV, JSON Lines or Parquet file, or a pyarrow, pandas or polars table: each column becomes a feature.

    rows.csv                    key,speed,lane,label
                                0001,13.5,2,car

    Materializer("table", source="rows.csv", output="out/rows", splits={"train": 0.9, "val": 0.1}).run()

    url,caption                 TableWriter(features={"image": Image(), "caption": Text()}, files={"image": "url"})
    https://a.org/x.jpg,A cat

Columns of integers become int64, other numbers float64. A column `key` holds the keys, which are otherwise the row
numbers; a column `split` holds the splits. Blocks of rows are encoded at once, without a call per row. Files that a
column names, by path or URL, are read with their rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.codecs import read_file
from datamat.errors import InputError, OptionError, SourceError
from datamat.features import Feature, Features, Json, Nullable, Scalar, Text, Timestamp
from datamat.sources.rows import IndexRow
from datamat.writers.arrow_types import feature_of_type, is_json
from datamat.writers.base import DatasetWriter, Sample
from datamat.writers.index import Index, table_blocks, table_schema
from datamat.writers.samples import converted, converted_column, empty_cell
from datamat.writers.tables import is_arrow_dataset, table_of
from datamat.writers.text_tables import TextOptions

if TYPE_CHECKING:
    import pyarrow as pa

OUTPUT_VERSION = 3
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""


class TableWriter(DatasetWriter):
    r"""Reads the columns of each row.

    Args:
        key: name of the column that holds the keys; None takes the column "key" if there is one, otherwise the row
            numbers.
        split: name of the column that holds the splits; None takes the column "split" if there is one.
        features: feature of each column to read, such as `{"label": ClassLabel(names=...)}`; a row with an empty cell
            fails, unless the feature of the column is a `Nullable`. None reads all columns, each with the feature that
            fits all its values in the files of the table, and refuses empty cells except in CSV or JSON Lines.
        files: the column that names the file of each of these features, by URL (http, https, s3, gs, az, abfs, hf or
            data) or by a path from the table's folder, such as {"image": "url"}.
        encoding: encoding of CSV and JSON Lines, such as "cp1252"; None for UTF-8, or for UTF-16 if the file says so.
        delimiter: character between the cells of CSV, such as ";"; None detects it.

    Raises:
        OptionError: a feature of `files` is not declared, there is no such encoding, or the delimiter is not one
            character.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "rows.csv"
        ...     _ = path.write_text("key,speed,lane\na,13.5,2\n")
        ...     writer = TableWriter()
        ...     writer.bind(path)
        ...     [writer.read(row) for row in writer.index(path)]
        [{'speed': 13.5, 'lane': 2}]
    """

    name = "table"
    file_fields = ()

    def __init__(
        self,
        *,
        key: str | None = None,
        split: str | None = None,
        features: Mapping[str, Feature] | None = None,
        files: Mapping[str, str] | None = None,
        encoding: str | None = None,
        delimiter: str | None = None,
    ) -> None:
        if files is not None and not isinstance(files, Mapping):
            raise OptionError(
                f"TableWriter: files is {files!r}; want a dict of features and of the columns that name their files, "
                "as in files={'image': 'url'}"
            )
        self._key = key
        self._split = split
        self._declared = None if features is None else Features(features)
        self._files_in = dict(files or {})
        for name in self._files_in:
            if name not in (features or {}):
                raise OptionError(
                    f"TableWriter: files has {name!r}, which features does not declare; add it there, as in "
                    f"features={{{name!r}: Image(), ...}}"
                )
        self.url_fields = sorted({*self._files_in.values()})
        self._columns = None if features is None else [self._files_in.get(n, n) for n in features if n != "key"]
        special, declared = {key or "key", split or "split"}, {*(self._columns or ())}
        texts = {name for name, feature in (features or {}).items() if isinstance(feature, Text)}
        may_miss = {n for n, feature in (features or {}).items() if isinstance(_inner(feature), Text)} - texts
        self._text = TextOptions(
            encoding,
            delimiter,
            names=frozenset({*special, *self.url_fields}),
            texts=frozenset(texts | may_miss),
            json=frozenset(n for n, feature in (features or {}).items() if isinstance(_inner(feature), Json)),
            blank=frozenset(declared - texts),
            columns=None if features is None else frozenset(special | declared),
            keeps_json=True,
        )

    def bind(self, source: Any) -> None:
        """Derive the features from the columns.

        Raises:
            SourceError: the file cannot be read, has no rows, lacks a column, or has a column that no feature can
                hold.
        """
        in_memory = None if is_arrow_dataset(source) else table_of(source)
        source = source if in_memory is None else in_memory  # converted once
        first = next(iter(self.index(source)), None)
        table = source if isinstance(source, (str, os.PathLike)) else "the table"
        if first is None:
            raise SourceError(f"{table} holds no rows; give a table with a header and at least one row")
        if "key" in first.fields:
            raise SourceError(f"{table}: column 'key' does not hold the keys ({self._key!r} does); rename it")
        schema = table_schema(source, self._text)
        if self._declared is None:
            self.features = Features({name: _feature_of(schema.field(name), table) for name in first.fields})
        else:
            self.features = self._declared
        self._names = [name for name in self.features if name != "key"]
        self._json = frozenset(field.name for field in schema if is_json(field.type)) - self._text.names

    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return one row per row of the table, in its order, with the columns that become features.

        Raises:
            SourceError: the file cannot be read, lacks a column, or has an empty cell although no features are
                declared.
        """
        return Index(lambda: table_blocks(source, self._key, self._split, self._text, self._columns))

    @property
    def reads_cells(self) -> bool:
        return self._declared is None and type(self) is TableWriter

    def read(self, row: IndexRow) -> Sample:
        return {name: self._cell(name, row) for name in self._names}

    def _cell(self, name: str, row: IndexRow) -> Any:
        column = self._files_in.get(name, name)
        value = row.fields[column]
        is_file = name in self._files_in
        if value is None or (is_file and not value and isinstance(value, str)):
            if self.features[name].takes_none:
                return None
            raise InputError(empty_cell(column, name=name))
        if column in self._json:
            try:
                value = json.loads(value)
            except ValueError as error:  # of a cell of CSV
                raise InputError(
                    f"column {column!r} holds {value[:40]!r}, which is not valid JSON: {error}; correct it, or declare "
                    f"features={{{name!r}: Text()}}"
                ) from error
            if column in self._text.texts:  # the feature refuses values other than strings
                return value
        if not is_file:
            return converted(value, self.features[name])
        return [read_file(path) for path in value] if isinstance(value, (list, tuple)) else read_file(value)

    def read_block(self, keys: Sequence[str], fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the columns unchanged; None if declared features must check each value."""
        del keys
        if self._declared is not None:
            return None
        return {
            name: [value and json.loads(value) for value in fields[name]]
            if name in self._json else _cells(fields[name], self.features[name])
            for name in self._names
        }  # fmt: skip


def _inner(feature: Feature) -> Feature:
    return feature.feature if isinstance(feature, Nullable) else feature


def _cells(values: Any, feature: Feature) -> Any:
    """Return cells as blocks hold them."""
    import pyarrow as pa

    match feature:
        case Scalar():
            return np.asarray(values)
        case Text() | Nullable(feature=Scalar() | Text()):
            return values
        case Timestamp(tz=zone):
            return pa.array(values, pa.string()).cast(pa.timestamp("us", zone)).to_numpy(zero_copy_only=False)
        case Nullable(feature=Timestamp(tz=zone)):
            return pa.array(values, pa.string()).cast(pa.timestamp("us", zone)).to_pylist()
    return converted_column(values, feature)


def _feature_of(field: pa.Field, source: Any) -> Feature:
    """Return the feature of a column: rows hold integers and other numbers in 64 bits."""
    import pyarrow as pa

    found = feature_of_type(field.type)
    if found is None:
        raise SourceError(
            f"{source}: column {field.name!r} is {field.type}; want numbers, text, times, or lists of these; declare "
            "it with features=, or convert it"
        )
    if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
        found = Scalar("int64" if pa.types.is_integer(field.type) else "float64")
    return Nullable(found) if field.nullable and not found.takes_none else found
