"""Which places of an epoch make up each batch of each rank: the same number of batches for all, each place once.

A *step* is one batch on every rank. Steps follow each other through the places of the epoch, so what was delivered by
a step is all that lies before it: that one number is where to go on, whatever the number of ranks then.

    places   0 ............ start                                                        num_places
    steps                     | rank 0 | rank 1 | rank 0 | rank 1 | ... | rank 0 | rank 1 |
"""

from __future__ import annotations

import dataclasses
from typing import final

__all__ = ["Schedule"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The batches from `start` to the end of an epoch.

    What does not fill a last step is divided evenly: ranks then differ by at most one record. Where less than one
    record for each rank is left, the last two steps share what they have. So every record comes once; only where that
    cannot be, because batches hold single records or there are fewer records than ranks, does a rank without a record
    repeat that of another one.

    Args:
        num_places: places of the epoch.
        batch_size: most records in a batch.
        world_size: number of ranks.
        drop_last: leave out what does not fill a step.
        start: the place at which to begin.
    """

    num_places: int
    batch_size: int
    world_size: int = 1
    drop_last: bool = False
    start: int = 0

    @property
    def num_steps(self) -> int:
        """Number of batches of each rank."""
        full, rest = divmod(self.num_places - self.start, self._step)
        return full + (rest > 0 and not self.drop_last)

    def place(self, step: int) -> int:
        """Return the first place of a step; of the step behind the last one, where the epoch ends."""
        last = self.num_steps
        if step >= last:
            return self.start + last * self._step if self.drop_last else max(self.start, self.num_places)
        before_last = self.start + (last - 2) * self._step
        left = self.num_places - before_last
        if step == last - 1 > 0 and self.batch_size > 1 and left < self._step + self.world_size:
            return self.num_places - left // 2
        return self.start + step * self._step

    def bounds(self, step: int, rank: int) -> tuple[int, int]:
        """Return the first place of the batch of a rank and the place behind its last."""
        start, stop = self.place(step), self.place(step + 1)
        size = stop - start
        first, behind = (start + size * number // self.world_size for number in (rank, rank + 1))
        if first == behind:
            first = start + rank % size
            behind = first + 1
        return first, behind

    @property
    def _step(self) -> int:
        return self.batch_size * self.world_size
