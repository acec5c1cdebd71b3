"""Parquet files, each row group read when one of its rows is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from datamat.writers.arrow import ArrowSource, TableFiles
from datamat.writers.base import DataSource

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

        with parquet.ParquetFile(path) as opened:
            footer = opened.metadata
            return opened.schema_arrow, [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]

    def read(self, path: str, group: int, columns: Sequence[str]) -> pa.Table:
        from pyarrow import parquet

        with parquet.ParquetFile(path, page_checksum_verification=True) as opened:
            return opened.read_row_group(group, columns=columns, use_threads=False)


def open_files(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    """Return the rows of Parquet files."""
    del spool
    return ArrowSource(TableFiles(files, ParquetFiles()))
