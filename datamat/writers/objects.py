"""Takes objects as sources: tables, columns, lists, map-style datasets, and iterators of rows."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import OptionError, SourceError
from datamat.features.base import as_array
from datamat.writers.arrow import ArrowSource, MemoryTable
from datamat.writers.arrow_types import OF_ROWS
from datamat.writers.base import DataSource
from datamat.writers.huggingface import HfTable
from datamat.writers.kinds import SOURCE_KINDS
from datamat.writers.samples import Items, PlainItems, field_names
from datamat.writers.spool import RowStream, SpooledSource
from datamat.writers.tables import is_of_package, listed_column, table_of
from datamat.writers.tar import TarItems, is_of_tar
from datamat.writers.unpacking import SpoolOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from datamat.features import Feature


_MOST_LOOKED_AT = 3  # items of a list, which may be long


def source_of(dataset: Any, names: Sequence[str] | None, spool: SpoolOptions | None) -> DataSource | None:
    """Return an object as a source; None if its kind is unknown.

    Args:
        dataset: the object.
        names: names of the fields, for samples without.
        spool: how rows of iterators are written to disk; None refuses these.
    """
    if is_of_package(dataset, "datasets") and hasattr(dataset, "__len__"):
        # The rows of `with_transform` are those that the user's function makes from the table.
        has_transform = dataset.format["type"] == "custom"
        return MapSource(dataset, None, dataset._fingerprint) if has_transform else ArrowSource(HfTable(dataset))
    table = table_of(dataset)
    if table is not None:
        return ArrowSource(MemoryTable(table))
    found = _in_memory(dataset, names)
    if found is not None or isinstance(dataset, Mapping):
        return found
    if is_stream(dataset):
        return None if spool is None else SpooledSource(RowStream(dataset, names), spool)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, (str, bytes)):
        return MapSource(dataset, names)
    return None


def _in_memory(dataset: Any, names: Sequence[str] | None) -> DataSource | None:
    """Return the source of columns, arrays, or a list; None for anything else."""
    column = listed_column(dataset)
    if column is not None:
        return MapSource(column, names)
    if isinstance(dataset, Mapping):
        return _with_names(_ColumnSource(dict(dataset)), dataset) if dataset else None
    if not isinstance(dataset, (list, tuple)) or not dataset:
        return None
    if isinstance(dataset, tuple) and are_arrays(dataset):
        return _ColumnSource(dict(zip(field_names(names, len(dataset)), dataset, strict=True)))
    _refuse_paths(dataset)
    if table_of(dataset[0]) is not None:
        return ArrowSource(MemoryTable(_joined_tables(dataset)))
    items = MapSource(dataset, names)
    return _with_names(items, dataset[0]) if isinstance(dataset[0], Mapping) else items


def _refuse_paths(items: Sequence[Any]) -> None:
    """Raise `OptionError` if a list given as a dataset holds paths of files, which no one wants to store as text."""
    first = items[0]
    if all(isinstance(item, (str, os.PathLike)) and os.path.isfile(item) for item in items[:_MOST_LOOKED_AT]):
        raise OptionError(
            f"the list holds paths of files, such as {os.fspath(first)!r}; say what is in them, as in "
            f"Materializer('webdataset', paths, output): want one of {', '.join(SOURCE_KINDS)}"
        )


def _joined_tables(tables: Sequence[Any]) -> pa.Table:
    """Return the tables of a list, such as the batches of one, as one table."""
    import pyarrow as pa

    found = [table_of(table) for table in tables]
    try:
        return pa.concat_tables(found)
    except (pa.ArrowException, TypeError) as error:
        raise SourceError(f"the tables of the list do not fit together: {error}; give all the same columns") from error


def are_arrays(values: Iterable[Any]) -> bool:
    """Return True if all values are arrays."""
    return all(isinstance(column, np.ndarray) for column in values)


def is_stream(dataset: Any) -> bool:
    """Return True if samples come one after another, from an iterator, a function, or an object without positions."""
    if isinstance(dataset, Iterator) or (callable(dataset) and not hasattr(dataset, "__len__")):
        return not isinstance(dataset, type)
    has_positions = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_value = isinstance(dataset, (str, bytes, Mapping, Collection))
    return hasattr(dataset, "__iter__") and not is_value and (not has_positions or _is_torch_iterable(dataset))


def _is_torch_iterable(dataset: Any) -> bool:
    """Return True if it is an `IterableDataset`, which has `__getitem__` of its base class, and may have a length."""
    return any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)


@final
class MapSource(DataSource):
    """Items of any object that has a length.

    Args:
        dataset: the object.
        names: names of the fields, for items that are tuples.
        identity: what stands for its content in fingerprints; None for the object itself.
    """

    def __init__(self, dataset: Any, names: Sequence[str] | None, identity: Any = None) -> None:
        self._dataset = dataset
        self.identity = dataset if identity is None else identity
        self._names = names
        self._reading: Any = None  # what `__getitem__` of the object may change, such as a file that it opens at once
        self._process = 0
        self._items: Items | None = None  # what the first item has shown

    def __len__(self) -> int:
        return len(self._dataset)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_process": 0}

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self._process != os.getpid():  # forked children share the places in files that their parent has opened
            self._reading, self._process = _copied(self._dataset), os.getpid()
        item = self._reading[number]
        if self._items is None:
            self._items = TarItems(item) if is_of_tar(item) else PlainItems(self._names)
            self.features, self.refused = self._items.features, self._items.refused
            self.dicts = self._items.dicts(item)
        return self._items.sample(item)

    def declare(self, features: Mapping[str, Feature]) -> None:
        if self._items is not None:
            self._items.declare(features)


def _copied(dataset: Any) -> Any:
    """Return a shallow copy of an object of a user's class, or the object if it cannot be copied."""
    if type(dataset).__module__ in {"builtins", "numpy"} or not hasattr(dataset, "__dict__"):
        return dataset
    try:
        return copy.copy(dataset)
    except Exception:  # noqa: BLE001 -- of the user's own code
        return dataset


@final
class _ColumnSource(DataSource):
    """Rows of arrays (n, ...)."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise SourceError(f"the arrays differ in length ({found}); give each one row per sample")
        self.identity = self._columns = {name: as_array(column, name=name) for name, column in columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: column[number] for name, column in self._columns.items()}


def _with_names(source: DataSource, fields: Mapping[Any, Any]) -> DataSource:
    """Return the source of items in memory; where they have them, `key` and `split` are keys and splits, as in tables.

    Args:
        source: the items.
        fields: what an item holds, by name.
    """
    return _NamedSource(source) if {*OF_ROWS, "__key__"} & fields.keys() else source


@final
class _NamedSource(DataSource):
    """Items in memory that hold their own key, or split."""

    def __init__(self, items: DataSource) -> None:
        self._items = items
        self.identity = items.identity
        assert items[0], "it shows the features of samples of WebDataset"
        self.features, self.refused = items.features, items.refused

    def declare(self, features: Mapping[str, Feature]) -> None:
        self._items.declare(features)

    @property
    def dicts(self) -> Collection[str]:  # type: ignore[override]  # known once the first item was read
        return self._items.dicts

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: value for name, value in self._items[number].items() if name not in OF_ROWS}

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        for number in range(len(self)):
            item = self._items[number]
            key, split = item.get("key"), item.get("split")
            yield f"{number:08d}" if key is None else str(key), None if split is None else str(split)
