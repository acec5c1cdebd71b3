"""Counts of rows, records and bytes in a part, a shard, a directory or a run."""

from __future__ import annotations

import dataclasses
from typing import Any

from datamat.values import frozen


@frozen()
class Counts:
    """Numbers of rows, records and bytes, which are added together.

    Attributes:
        num_rows: input rows.
        num_failed: rows among them that failed.
        num_dropped: rows among them that were intentionally left out.
        num_dropped_records: records that were intentionally left out from rows that gave others.
        num_records: records of the other rows.
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
        """Return the sum of the counts of parts, shards, events or other objects with these attributes."""
        return cls(*(sum(getattr(one, field.name) for one in counted) for field in dataclasses.fields(cls)))

    def by_name(self) -> dict[str, Any]:
        """Return the numbers by name, for classes with fields of these names."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_ledger(self) -> dict[str, int]:
        """Return the numbers for the ledger: dropped rows only if there are any."""
        found = {"rows": self.num_rows, "failed": self.num_failed, "dropped": self.num_dropped}
        found |= {"records": self.num_records, "bytes": self.num_bytes}
        return {name: count for name, count in found.items() if count or name != "dropped"}
