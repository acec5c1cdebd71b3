"""Reads tables of pyarrow, pandas, polars, Spark and others as rows; recognizes types by name, and imports nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import xxhash

from datamat.errors import SourceError

if TYPE_CHECKING:
    import pyarrow as pa


def table_of(value: Any) -> pa.Table | None:
    """Return a table of any package in `_TABLES`, or any other that exports Arrow, as a pyarrow table; otherwise None.

    NaN in numbers of pandas stays NaN; levels of its index that have names become columns.

    Args:
        value: what may be a table.

    Raises:
        SourceError: two columns share a name, or a column holds values that Arrow cannot store.
    """
    convert = _known(value, _TABLES) or (_of_stream if _gives_arrow(value) else None)
    table: pa.Table | None = convert and convert(value)
    if table is not None and len(set(table.column_names)) < len(table.column_names):
        names = ", ".join(table.column_names)
        raise SourceError(f"the table has two columns with the same name ({names}); rename one")
    return table


def _gives_arrow(value: Any) -> bool:
    """Return True if a value is a table by Arrow's own interface, but not an iterator or a dataset that reads files."""
    is_read_in_parts = isinstance(value, Iterator) or is_of_package(value, "datasets")
    return hasattr(type(value), "__arrow_c_stream__") and not is_read_in_parts and listed_column(value) is None


def listed_column(value: Any) -> list[Any] | None:
    """Return a column or array of any of the three packages as a list; None for anything else.

    Args:
        value: what may be a column.
    """
    convert = _known(value, _COLUMNS)
    return convert and convert(value)


def is_arrow_dataset(value: Any) -> bool:
    """Return True if a value is a `pyarrow.dataset.Dataset`, which need not be in memory as a whole."""
    return any((base.__module__.partition(".")[0], base.__name__) == _ARROW_DATASET for base in type(value).__mro__)


def is_of_package(value: Any, package: str) -> bool:
    """Return True if the type of a value, or one of its bases, is defined in a package."""
    return any(base.__module__.partition(".")[0] == package for base in type(value).__mro__)


def content_of(table: pa.Table) -> str:
    """Return the digest of a table's content, which does not depend on how its columns are chunked."""
    import pyarrow as pa

    digest = xxhash.xxh3_128()
    whole = table.replace_schema_metadata(None).combine_chunks()
    with pa.PythonFile(_DigestFile(digest), "w") as file, pa.ipc.new_stream(file, whole.schema) as stream:
        stream.write_table(whole)
    return digest.hexdigest()


@final
class TableRows(Sequence[dict[str, Any]]):
    """The rows of a table by position, each a dict of Python values; an empty cell is None."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, place: int) -> dict[str, Any]:  # type: ignore[override]  # never called with a slice
        return {name: column[place].as_py() for name, column in zip(self.table.column_names, self.table.columns)}  # noqa: B905 -- 1 us

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.table.to_batches(max_chunksize=4096):
            yield from batch.to_pylist()


@final
class _DigestFile:
    """A file that digests what is written to it and stores nothing."""

    closed = False

    def __init__(self, digest: xxhash.xxh3_128) -> None:
        self._digest = digest

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.closed = True


def _known(value: Any, kinds: dict[tuple[str, str], Callable[[Any], Any]]) -> Callable[[Any], Any] | None:
    for base in type(value).__mro__:
        found = kinds.get((base.__module__.partition(".")[0], base.__name__))
        if found is not None:
            return found
    return None


def _of_stream(value: Any) -> pa.Table:
    import pyarrow as pa

    return pa.table(value)


def _of_polars(frame: Any) -> pa.Table:
    objects = [name for name, dtype in frame.schema.items() if str(dtype) == "Object"]
    if objects:
        raise SourceError(
            f"column {objects[0]!r} of the table holds Python objects, of which Arrow only has the addresses; give "
            "it a type of polars, or pass frame.to_dicts()"
        )
    return frame.to_arrow()


def _of_pandas(frame: Any) -> pa.Table:
    import pyarrow as pa

    named = [name for name in frame.index.names if name is not None]
    frame = frame.reset_index(level=named) if named else frame
    arrays = []
    for place, name in enumerate(frame.columns):
        column = frame.iloc[:, place]
        zones = set(_zones(column)) if column.dtype == object else set()
        if len(zones) > len({place for place, _ in zones}):
            raise SourceError(
                f"column {name!r} of the table holds times with a time zone and others without; give all of them one, "
                "as in pandas.to_datetime(column, utc=True)"
            )
        plain = isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"
        try:
            arrays.append(pa.array(column.to_numpy()) if plain else pa.Array.from_pandas(column))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise SourceError(
                f"column {name!r} of the table cannot be converted: {error}; give it values of one type, or pass "
                "frame.to_dict('records')"
            ) from error
        kind = arrays[-1].type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if getattr(kind, "extension_name", "").startswith("pandas."):
            raise SourceError(
                f"column {name!r} of the table is {column.dtype}, whose numbers only pandas understands; pass "
                f"frame.astype({{{name!r}: str}}), or frame.drop(columns={name!r})"
            )
    return pa.table(arrays, names=[str(name) for name in frame.columns])


def _zones(cells: Iterable[Any], place: str = "") -> Iterator[tuple[str, bool]]:
    """Yield where times lie in cells, and whether they have a time zone; times in a list lie in one place."""
    for cell in cells:
        if hasattr(cell, "tzinfo"):
            if cell == cell:  # noqa: PLR0124 -- the NaT of pandas is not a time
                yield place, cell.tzinfo is not None
        elif isinstance(cell, Mapping):
            for name, value in cell.items():
                yield from _zones([value], f"{place}/{name}")
        elif isinstance(cell, (list, tuple)) or (isinstance(cell, np.ndarray) and cell.dtype.kind == "O"):
            yield from _zones(cell, f"{place}/")


_ARROW_DATASET = ("pyarrow", "Dataset")
_TABLES: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("pyarrow", "Table"): lambda table: table,
    ("pyarrow", "RecordBatch"): _of_stream,
    _ARROW_DATASET: lambda dataset: dataset.to_table(),
    ("pandas", "DataFrame"): _of_pandas,
    ("polars", "DataFrame"): _of_polars,
    ("polars", "LazyFrame"): lambda frame: _of_polars(frame.collect()),
    ("pyspark", "DataFrame"): lambda frame: frame.toArrow(),
    ("deltalake", "DeltaTable"): lambda table: table.to_pyarrow_table(),
}
_COLUMNS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("pyarrow", "ChunkedArray"): lambda column: column.to_pylist(),
    ("pyarrow", "Array"): lambda column: column.to_pylist(),
    ("pandas", "Series"): lambda column: column.tolist(),
    ("pandas", "Index"): lambda column: column.tolist(),
    ("polars", "Series"): lambda column: column.to_list(),
}
"""How each type is converted, by package and name of the type or of one of its bases."""
