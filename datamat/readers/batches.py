"""`Batches`: what `to_numpy` and `to_torch` return. An endless supply of epochs, each a walk over batches.

    Order       which record stands at which place of the epoch       (seed, epoch)
    Schedule    which places are the batch of this rank at this step  (batch_size, world_size, where it began)
    making      those records read, decoded, transformed, put together, ahead of their use
    Client      numpy, or torch: what the arrays become

Where one is in an epoch is a step of a schedule, and all that was delivered lies before its first place. So a state is
a few numbers, the same on all ranks, and says what is left for any number of ranks, workers or records in a batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, final

from datamat.errors import CorruptDataError, OptionError
from datamat.parallel import physical_cores
from datamat.readers.making import BatchMaker, Job, ended_at_exit, in_processes, in_threads
from datamat.readers.memory import MemoryPool
from datamat.readers.schedule import Schedule
from datamat.readers.states import Place, read_state

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from datamat.readers.damage import Damages
    from datamat.readers.order import Order

__all__ = ["BatchOptions", "Batches", "Client", "Numpy"]

_SAMPLES_PER_THREAD = 4  # at work or ready for each of `prefetch` where there are no batches


@final
@dataclasses.dataclass(frozen=True, slots=True)
class BatchOptions:
    """The arguments of `to_numpy` and `to_torch`, checked.

    Raises:
        OptionError: a number makes no sense.
    """

    batch_size: int | None = None
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    num_threads: int | None = None
    prefetch: int = 2

    def __post_init__(self) -> None:
        for name, least in {
            "batch_size": 1,
            "world_size": 1,
            "num_workers": 0,
            "num_threads": 1,
            "prefetch": 1,
        }.items():
            value = getattr(self, name)
            if value is None and name in {"batch_size", "num_threads"}:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise OptionError(f"{name} is {value!r}; want {least} or more")
        if not isinstance(self.rank, Integral) or not 0 <= self.rank < self.world_size:
            raise OptionError(f"rank is {self.rank!r} of world_size {self.world_size}; want 0 to {self.world_size - 1}")


class Client(Protocol):
    """What batches are for. Picklable."""

    def convert(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch of arrays as the client wants it."""

    def lane(self) -> tuple[int, int]:
        """Return which of several copies of the loader this one is, and how many there are: each takes its share."""


@final
class Numpy:
    """Batches of numpy arrays."""

    def convert(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch."""
        return batch

    def lane(self) -> tuple[int, int]:
        """Return that there is one."""
        return 0, 1


@final
class Batches:
    """An iterable of batches, each a dict by feature name. Each `iter` goes through the next epoch.

    Made by `ShardedDataset.to_numpy` and `to_torch`. `state_dict` and `load_state_dict` have the form of torchdata's
    `StatefulDataLoader`: take the state when a batch came, and another loader, also with another number of ranks,
    workers or records in a batch, goes on with the record behind it. One thread uses a loader; it is picklable if its
    transform is.

    Args:
        order: of the records.
        maker: of batches.
        options: how they are cut and made.
        client: whom they are for.
        damages: of the data set.
        identity: of the data set and its order, by name: a state of another one is refused.
    """

    def __init__(
        self,
        order: Order,
        maker: BatchMaker,
        options: BatchOptions,
        *,
        client: Client,
        damages: Damages,
        identity: Mapping[str, Any],
    ) -> None:
        self._order = order
        self._maker = maker
        self._options = options
        self._client = client
        self._damages = damages
        self._identity = dict(identity)
        self._memory = MemoryPool()  # kept from epoch to epoch: taking 80 MB anew takes 30 ms
        self._next = Place(0, self._schedule(0), 0)  # where the next `iter` begins
        self._now = self._next  # where the one that moved last is

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self._schedule(0).num_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of the next epoch, or of the rest of one whose state was loaded."""
        here = self._begin()
        steps = range(here.step, here.schedule.num_steps, here.num_lanes)
        with contextlib.closing(self._made(here.jobs(self._order, self._options.rank, steps))) as batches:
            for step, batch in zip(steps, batches, strict=True):
                self._now = dataclasses.replace(here, step=step + here.num_lanes)
                if batch:
                    yield self._client.convert(batch)
                elif self._options.world_size > 1:
                    raise CorruptDataError(
                        f"all records of batch {step} were damaged and skipped: this rank would have a batch less than "
                        "the others; make repair() of the directory, or take larger batches"
                    )

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iter` go through this epoch, from its start; an epoch that is being resumed is gone on with.

        Needed only where copies of this object do the reading (a torch `DataLoader` with workers): they don't see
        how many epochs there were.
        """
        if epoch != self._next.epoch:
            self._next = Place(epoch, self._schedule(0), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where the reading is: numbers and strings only, the same on all ranks."""
        return {**self._now.in_lane(*self._client.lane()).to_state(), **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next `iter` go on behind the last batch that was delivered when `state` was taken.

        Args:
            state: of a loader over the same directory in the same order. The state of a torchdata
                `StatefulDataLoader` that wraps one does as well, so that its number of workers can be another one.

        Raises:
            OptionError: the state is of another data set or order, or no state.
        """
        found = read_state(state, self._identity)
        schedule = self._schedule(0, like=found.schedule)
        if schedule != found.schedule:
            found = Place(found.epoch, self._schedule(found.schedule.place(found.step)), 0)
        self._next = self._now = found

    def _begin(self) -> Place:
        """Return where this `iter` begins, and have the next one begin with the next epoch."""
        lane, num_lanes = self._client.lane()
        here = self._next
        if num_lanes == 1 and here.step >= here.schedule.num_steps > 0:  # of several lanes, others may not be done
            here = Place(here.epoch + 1, self._schedule(0), 0)
        self._next = Place(here.epoch + 1, self._schedule(0), 0)
        self._now = here.in_lane(lane, num_lanes)
        return self._now

    def _schedule(self, start: int, like: Schedule | None = None) -> Schedule:
        """Return the division of the places from `start` on, or from where another one begins."""
        options = self._options
        start = start if like is None else like.start
        return Schedule(self._order.num_records, options.batch_size or 1, options.world_size, options.drop_last, start)

    def _made(self, jobs: Iterator[Job]) -> Generator[dict[str, Any]]:
        options = self._options
        is_worker = self._client.lane()[1] > 1
        if options.num_workers and not is_worker:
            depth = self._depth(options.num_workers) + options.num_workers
            return ended_at_exit(in_processes(jobs, self._maker, options.num_workers, depth, self._damages))
        num_threads = options.num_threads or (1 if is_worker else len(physical_cores()))
        return ended_at_exit(in_threads(jobs, self._maker, num_threads, self._depth(num_threads), self._memory))

    def _depth(self, num_makers: int) -> int:
        return self._options.prefetch * (1 if self._options.batch_size else _SAMPLES_PER_THREAD * num_makers)
