"""How many rows, records and bytes there are in a part, a shard, a directory, or in what a run has done."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Counts"]


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of rows, records and bytes, which are carried and added as one.

    Attributes:
        num_rows: input rows.
        num_failed: rows among them that failed.
        num_dropped: rows among them that were left out on purpose.
        num_dropped_records: records that were left out on purpose, from rows that gave others.
        num_records: records that the others gave.
        num_bytes: size of these records in all formats.
    """

    num_rows: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_dropped_records: int = 0
    num_records: int = 0
    num_bytes: int = 0

    @classmethod
    def of(cls, *counted: Any) -> Counts:
        """Return the sum of what parts, shards, events or other counts have under these names."""
        return cls(*(sum(getattr(one, field.name) for one in counted) for field in dataclasses.fields(cls)))

    def by_name(self) -> dict[str, Any]:
        """Return the numbers by name, for what has fields of these names."""
        return dataclasses.asdict(self)

    def to_ledger(self) -> dict[str, int]:
        """Return the numbers as the ledger has them: rows that were left out only where there are any."""
        found = {"rows": self.num_rows, "failed": self.num_failed, "dropped": self.num_dropped}
        found |= {"records": self.num_records, "bytes": self.num_bytes}
        return {name: count for name, count in found.items() if count or name != "dropped"}
