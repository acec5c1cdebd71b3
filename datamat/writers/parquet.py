"""Reads Parquet files; a row group is read when one of its rows is needed."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

from datamat.writers.arrow import ArrowSource, TableFiles
from datamat.writers.base import DataSource
from datamat.writers.text_tables import BATCH_ROWS, HEAD_BYTES, refuse_other_kinds

if TYPE_CHECKING:
    import pyarrow as pa

    from datamat.writers.paths import SourceFile
    from datamat.writers.unpacking import SpoolOptions


@final
class ParquetFiles:
    """Parquet files, by row group."""

    name = "Parquet"

    def outline(self, path: str) -> tuple[Any, list[int]]:
        from pyarrow import parquet

        with open(path, "rb") as file:
            if (magic := file.read(4)) != b"PAR1":
                refuse_other_kinds(pathlib.Path(path), magic + file.read(HEAD_BYTES))
        with parquet.ParquetFile(path) as opened:
            footer = opened.metadata
            return opened.schema_arrow, [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]

    def read(self, path: str, group: int, columns: Sequence[str]) -> pa.Table:
        from pyarrow import parquet

        with parquet.ParquetFile(path, page_checksum_verification=True) as opened:
            return opened.read_row_group(group, columns=columns, use_threads=False)

    def batches(self, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        from pyarrow import parquet

        with parquet.ParquetFile(path, page_checksum_verification=True) as opened:
            yield from opened.iter_batches(batch_size=BATCH_ROWS, columns=columns)


def open_files(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    """Return the rows of Parquet files."""
    del spool
    return ArrowSource(TableFiles(files, ParquetFiles()))
