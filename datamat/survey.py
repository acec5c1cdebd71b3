"""The source and the options as they are now: what a finished directory is compared with, and recomputed from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from datamat.errors import OptionError
from datamat.index import named
from datamat.seeding import key_hash

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping

    from datamat.index import IndexRow
    from datamat.pipeline import Pipeline
    from datamat.plan import Plan, ShardSpec
    from datamat.rows import RowStore

__all__ = ["Survey"]


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
