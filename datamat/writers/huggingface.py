"""Reads datasets of Hugging Face `datasets`, in memory or saved: their Arrow tables, with their own types."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import MissingDependencyError
from datamat.writers.arrow import ArrowRows, ArrowSource
from datamat.writers.base import DataSource
from datamat.writers.splits import SplitSource
from datamat.writers.unpacking import SpoolOptions

if TYPE_CHECKING:
    import pyarrow as pa


_BATCH_ROWS = 4096


@final
class HfTable(ArrowRows):
    """The rows of a `datasets.Dataset`, as its Arrow table holds them: encoded files are not decoded."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")
        self.schema = dataset.features.arrow_schema
        # By this name `datasets` itself identifies a table and everything that was done to it.
        self.identity = dataset._fingerprint

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, numbers: np.ndarray) -> pa.Table:
        found: pa.Table = self._dataset[numbers.tolist()]
        return found

    def column(self, name: str) -> Iterator[Any]:
        for batch in self._dataset.select_columns([name]).iter(_BATCH_ROWS):
            yield from batch.column(name).to_pylist()

    def narrow(self, columns: Collection[str]) -> None:
        self._dataset = self._dataset.select_columns([name for name in self.schema.names if name in columns])


def open_folder(folder: pathlib.Path, spool: SpoolOptions) -> DataSource:
    """Return the rows of a folder that `save_to_disk` made, of one table or of one for each split."""
    del spool
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{folder} was saved by Hugging Face datasets, which is not installed; install it with: "
            "pip install datasets"
        ) from error
    found = datasets.load_from_disk(str(folder))
    if isinstance(found, dict):
        return SplitSource({split: ArrowSource(HfTable(table)) for split, table in found.items()})
    return ArrowSource(HfTable(found))
