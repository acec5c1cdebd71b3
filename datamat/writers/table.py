"""Rows of a CSV or Parquet file: each column becomes a feature.

    rows.csv                    key,speed,lane,label
                                0001,13.5,2,car

    Materializer("table", source="rows.csv", output="out/rows", splits={"train": 0.9, "val": 0.1}).run()

Columns of whole numbers become int64, others float64, text str. A column `key` holds the keys (else they are the row
numbers), a column `split` the splits. Whole blocks of rows are encoded at once, without a call per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import SourceError
from datamat.features import Features, Scalar, Text
from datamat.index import Index, IndexRow
from datamat.writer import DatasetWriter, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.features import Feature

__all__ = ["TableWriter"]


class TableWriter(DatasetWriter):
    r"""The columns of each row.

    Args:
        key: column of the keys; None: "key" where there is such a column, else the row number.
        split: column of the splits; None: "split" where there is such a column.
        features: which columns to take, and as what (`{"label": ClassLabel(names=...)}`); None takes all as they are.

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
        self, *, key: str | None = None, split: str | None = None, features: Mapping[str, Feature] | None = None
    ) -> None:
        self._key = key
        self._split = split
        self._declared = None if features is None else Features(features)

    def bind(self, source: Any) -> None:
        """Take the columns as features, as the first row has them.

        Raises:
            SourceError: the file cannot be read, has no rows, lacks a column, or holds one that is neither numbers nor
                text.
        """
        first = next(iter(self.index(source)), None)
        if first is None:
            raise SourceError(f"{source} holds no rows; give a table with a header and at least one row")
        if "key" in first.fields:
            raise SourceError(f"{source}: column 'key' does not hold the keys ({self._key!r} does); rename it")
        self.features = self._declared or Features(
            {name: _feature_of(value, name, source) for name, value in first.fields.items()}
        )
        self._names = [name for name in self.features if name != "key"]
        missing = [name for name in self._names if name not in first.fields]
        if missing:
            raise SourceError(f"{source} has no column {missing[0]!r}; it has {', '.join(first.fields)}")

    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return a row per row of the table, in its order.

        Raises:
            SourceError: the file cannot be read, lacks the column of keys or splits, or has an empty cell.
        """
        return Index.from_table(source, key=self._key, split=self._split)

    def read(self, row: IndexRow) -> Sample:
        return {name: row.fields[name] for name in self._names}

    def read_block(self, keys: Sequence[str], fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the columns as they are; None where declared features want to look at each value."""
        del keys
        if self._declared is not None:
            return None
        return {
            name: fields[name] if isinstance(self.features[name], Text) else np.asarray(fields[name])
            for name in self._names
        }


def _feature_of(value: Any, name: str, source: Any) -> Feature:
    features: dict[type, Feature] = {str: Text(), int: Scalar("int64"), float: Scalar("float64")}
    if type(value) not in features:
        raise SourceError(
            f"{source}: column {name!r} holds {value!r} ({type(value).__name__}), want text or numbers; convert it "
            "(truth values to 0 and 1)"
        )
    return features[type(value)]
