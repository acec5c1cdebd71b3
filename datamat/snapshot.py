"""The plan of the run that is under way, in a few words on the disk: what `status` compares finished work with.

It is `.datamat/rows/plan.json`, written when a run has made its plan, and removed when the run is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from datamat.storage import read_json, render_json

if TYPE_CHECKING:
    import pathlib

    from datamat.plan import Plan, ShardSpec

__all__ = ["PlannedShard", "read_snapshot", "write_snapshot"]

_FILE = "plan.json"


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedShard:
    """What is to be known of a planned shard to tell how far it is.

    Attributes:
        name, split, fingerprint: as in `ShardSpec`.
        num_rows: input rows of it.
    """

    name: str
    split: str
    fingerprint: str
    num_rows: int

    @classmethod
    def of(cls, shard: ShardSpec) -> PlannedShard:
        """Return what is to be known of a shard of a plan."""
        return cls(shard.name, shard.split, shard.fingerprint, shard.num_rows)


def write_snapshot(rows_folder: pathlib.Path, plan: Plan) -> None:
    """Write the shards of a plan beside its rows.

    It is not flushed to the disk: it tells how far a run is, and decides nothing.
    """
    shards = [dataclasses.asdict(PlannedShard.of(shard)) for shard in plan.shards]
    (rows_folder / _FILE).write_bytes(render_json(shards))


def read_snapshot(rows_folder: pathlib.Path) -> list[PlannedShard] | None:
    """Return the shards of the plan that a run left there, or None where there is none, or it is not whole."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [PlannedShard(**shard) for shard in read_json(rows_folder / _FILE)]
    return None
