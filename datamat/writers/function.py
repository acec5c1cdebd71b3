"""The writer behind `materialize`: each input is handed to a function."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from datamat.features import Features
from datamat.index import IndexRow
from datamat.writer import DatasetWriter, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["FunctionWriter"]


class FunctionWriter(DatasetWriter):
    """Calls a function for each of a sequence of inputs; the keys are their positions.

    Args:
        fn: returns a dict of values by feature name.
        inputs: the items.
        name: of the data set.
        features: the schema; None infers it from the first sample.
    """

    def __init__(
        self, fn: Callable[[Any], Sample], inputs: Sequence[Any], name: str, features: Features | None
    ) -> None:
        self.name = name
        self._fn = fn
        self._inputs = inputs
        self._declared = features

    @functools.cached_property
    def features(self) -> Features:  # type: ignore[override]  # known once the function was asked
        """As declared, or as the first sample has it."""
        return self._declared or Features.infer(self._fn(self._inputs[0]))

    def index(self, source: Any) -> Iterable[IndexRow]:
        del source
        return (IndexRow(f"{number:08d}", fields={"number": number}) for number in range(len(self._inputs)))

    def read(self, row: IndexRow) -> Sample:
        return self._fn(self._inputs[int(row.fields["number"])])
