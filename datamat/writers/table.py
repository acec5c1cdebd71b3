"""Rows of a CSV or Parquet file, or of a pyarrow, pandas or polars table: each column becomes a feature.

    rows.csv                    key,speed,lane,label
                                0001,13.5,2,car

    Materializer("table", source="rows.csv", output="out/rows", splits={"train": 0.9, "val": 0.1}).run()

    url,caption                 TableWriter(features={"image": Image(), "caption": Text()}, files={"image": "url"})
    https://a.org/x.jpg,A cat

Columns of integers become int64, other numbers float64, text str. A column `key` holds the keys, which otherwise are
the row numbers; a column `split` holds the splits. Blocks of rows are encoded at once, without a call per row. Files
that a column names, by path or URL, are read in their rows' turn.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from datamat.codecs import read_file
from datamat.errors import InputError, OptionError, SourceError
from datamat.features import Feature, Features, Scalar, Text
from datamat.sources.rows import IndexRow
from datamat.writers.base import DatasetWriter, Sample
from datamat.writers.index import Index

__all__ = ["TableWriter"]

OUTPUT_VERSION = 1
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""


class TableWriter(DatasetWriter):
    r"""Reads the columns of each row.

    Args:
        key: name of the column that holds the keys; None takes the column "key" if there is one, else the row numbers.
        split: name of the column that holds the splits; None takes the column "split" if there is one.
        features: feature of each column to read, such as `{"label": ClassLabel(names=...)}`; a row with an empty cell
            fails, unless the feature of the column is a `Nullable`. None reads all columns, with the feature that fits
            their values, and refuses a table with empty cells.
        files: the column that names the file of each of these features, by URL (http, https, s3, gs, az, abfs, hf or
            data) or by a path from the table's folder, such as {"image": "url"}.

    Raises:
        OptionError: a feature of `files` is not declared.

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

    def bind(self, source: Any) -> None:
        """Derive the features from the first row.

        Raises:
            SourceError: the file cannot be read, has no rows, lacks a column, or has a column of something other than
                numbers and text.
        """
        first = next(iter(self.index(source)), None)
        table = source if isinstance(source, (str, os.PathLike)) else "the table"
        if first is None:
            raise SourceError(f"{table} holds no rows; give a table with a header and at least one row")
        if "key" in first.fields:
            raise SourceError(f"{table}: column 'key' does not hold the keys ({self._key!r} does); rename it")
        self.features = self._declared or Features(
            {name: _feature_of(value, name, table) for name, value in first.fields.items()}
        )
        self._names = [name for name in self.features if name != "key"]

    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return one row per row of the table, in its order, with the columns that become features.

        Raises:
            SourceError: the file cannot be read, lacks a column, or has an empty cell where no features are declared.
        """
        names = [name for name in self._declared or () if name != "key"]
        columns = [self._files_in.get(name, name) for name in names] if self._declared is not None else None
        return Index.from_table(source, key=self._key, split=self._split, columns=columns)

    def read(self, row: IndexRow) -> Sample:
        return {name: self._cell(name, row) for name in self._names}

    def _cell(self, name: str, row: IndexRow) -> Any:
        column = self._files_in.get(name, name)
        value = row.fields[column]
        is_file = name in self._files_in
        if value is None or (is_file and not value and isinstance(value, str)):
            if self.features[name].takes_none:
                return None
            raise InputError(
                f"column {column!r} of the table is empty; fill it in, or drop the row; or declare it with "
                f"features={{{name!r}: Nullable(...)}}"
            )
        if not is_file:
            return value
        return [read_file(path) for path in value] if isinstance(value, (list, tuple)) else read_file(value)

    def read_block(self, keys: Sequence[str], fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the columns unchanged; None where declared features must check each value."""
        del keys
        if self._declared is not None:
            return None
        return {
            name: fields[name] if self.features[name].value_type()[0] == "string" else np.asarray(fields[name])
            for name in self._names
        }


def _feature_of(value: Any, name: str, source: Any) -> Feature:
    features: dict[type, Feature] = {str: Text(), int: Scalar("int64"), float: Scalar("float64")}
    if type(value) not in features:
        raise SourceError(
            f"{source}: column {name!r} holds {value!r} ({type(value).__name__}), want text or numbers; convert it "
            "(booleans to 0 and 1)"
        )
    return features[type(value)]
