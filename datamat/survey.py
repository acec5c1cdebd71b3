"""The source and the options as they are now: what a finished directory is compared with, and recomputed from."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pathlib
import tempfile
from typing import TYPE_CHECKING

import numpy as np

from datamat.errors import OptionError
from datamat.index import named
from datamat.seeding import key_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from datamat.index import IndexRow
    from datamat.pipeline import Pipeline
    from datamat.plan import Plan, ShardSpec
    from datamat.recipe import Recipe
    from datamat.rows import RowStore

__all__ = ["WORK", "Survey", "open_survey"]

WORK = ".datamat"
"""The folder in an output for what a run needs and users do not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """What a run would go by, if it began now.

    Attributes:
        output: the directory.
        work: its `.datamat`.
        store: the rows, in the order of the plan.
        plan: which row goes where.
        ingredients: digests of what decides the output beside the rows, as the manifest would have them.
        pipeline: makes the records of a row.
    """

    output: pathlib.Path
    work: pathlib.Path
    store: RowStore
    plan: Plan
    ingredients: Mapping[str, str]
    pipeline: Pipeline

    def find(self, row_key: str) -> tuple[IndexRow, ShardSpec]:
        """Return the row of a key, its paths joined to the source, and the shard that it goes to.

        Raises:
            OptionError: the source has no such row.
        """
        for position in np.flatnonzero(self.store.hashes == np.uint64(key_hash(row_key))).tolist():
            (row,) = self.store.read(np.array([position]))
            if row.key == row_key:
                place = int(np.flatnonzero(self.store.order == position)[0])
                return row, next(shard for shard in self.plan.shards if shard.start <= place < shard.stop)
        some = named(self.store.keys(np.arange(min(len(self.store), 20))))
        raise OptionError(f"the source has no row {row_key!r}; it has {some}")


@contextlib.contextmanager
def open_survey(recipe: Recipe, output: pathlib.Path) -> Iterator[Survey]:
    """Give what a run into an output would go by if it began now; its rows are there for the block only.

    Raises:
        SourceError: the source cannot be indexed.
        OptionError: options and rows do not fit together.
        FingerprintError: the writer or the transform cannot be fingerprinted.
    """
    with tempfile.TemporaryDirectory(prefix="datamat-") as folder:
        store = recipe.write_rows(pathlib.Path(folder))
        ingredients = recipe.ingredients()
        plan = recipe.plan(store, ingredients)
        # Its pipeline is for use in this process: `setup_worker` is to change a copy of the writer only.
        pipeline = dataclasses.replace(recipe, writer=copy.copy(recipe.writer)).pipeline()
        yield Survey(output, output / WORK, store, plan, recipe.told(ingredients), pipeline)
