"""A small run for tests that compare files."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from datamat.features import Features, Scalar, Tensor
from datamat.run.materializer import Materializer
from datamat.sources.rows import IndexRow
from datamat.writers.base import DatasetWriter

if TYPE_CHECKING:
    from datamat.options import RunKeywords
    from datamat.run.report import RunReport
    from datamat.writers.base import Sample


class Numbers(DatasetWriter):
    """Rows whose records depend on their number and the seed; one of them may fail."""

    name = "numbers"
    features = Features({"number": Scalar("int64"), "noise": Tensor((3,), "float64")})

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def index(self, source: Any) -> Iterable[IndexRow]:
        return [IndexRow(f"{number:04d}", fields={"number": number}) for number in range(source)]

    def read(self, row: IndexRow, rng: np.random.Generator) -> Sample:  # type: ignore[override]  # as documented
        if row.fields["number"] == self.bad:
            raise ValueError(f"number {self.bad} is bad")
        return {"number": row.fields["number"], "noise": rng.random(3)}


def run_numbers(output: pathlib.Path, bad: int | None = None, **options: Unpack[RunKeywords]) -> RunReport:
    """Write forty rows into four shards."""
    options["progress"] = False
    # A fixed version: `bad` must not make it another dataset.
    return Materializer(Numbers(bad), 40, output, shards=4, version="1").run(**options)
