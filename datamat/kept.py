"""Records of a finished shard that are taken over as they are, when other rows of it are tried again."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from typing import TYPE_CHECKING

from datamat.formats import Offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from datamat.formats import ShardFormat, Value

__all__ = ["KeptRows", "open_kept"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Where the records of consecutive rows lie in a finished shard.

    Attributes:
        path: the shard.
        index: the file of its offsets.
        start: the first of the rows, as a position in the order of the plan.
        first: int64 (n,): number of the first record of each row.
        count: int64 (n,): how many records it has; 0 for a row that is to be computed.
    """

    path: str
    index: str
    start: int
    first: np.ndarray
    count: np.ndarray

    def of(self, start: int, stop: int) -> KeptRows:
        """Return what is told of the rows of a part."""
        rows = slice(start - self.start, stop - self.start)
        return dataclasses.replace(self, start=start, first=self.first[rows], count=self.count[rows])

    def numbers(self, position: int) -> range:
        """Return the numbers of the records of a row: none for one that is to be computed."""
        place = position - self.start
        first = int(self.first[place])
        return range(first, first + int(self.count[place]))


@contextlib.contextmanager
def open_kept(
    kept: KeptRows | None, shard_format: ShardFormat
) -> Iterator[Callable[[int], list[tuple[str, dict[str, Value]]]]]:
    """Open the shard that records are kept in.

    Args:
        kept: where they are; None where nothing is kept.
        shard_format: of the shard.

    Yields:
        A function that returns (key, columns) of each record of a row, given its position in the order of the plan;
        nothing for a row that is to be computed. It raises `CorruptDataError` where the shard is damaged.
    """
    if kept is None:
        yield lambda _: []
        return
    offsets = Offsets.from_text(pathlib.Path(kept.index).read_text("ascii"))
    with contextlib.closing(shard_format.reader(kept.path, offsets)) as reader:

        def records(position: int) -> list[tuple[str, dict[str, Value]]]:
            found = [reader.read(number) for number in kept.numbers(position)]
            return [(bytes(record["key"][0]).decode(), record) for record in found]

        yield records
