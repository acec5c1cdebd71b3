"""Where a reading is, as numbers that survive JSON and `torch.save`, and back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import OptionError
from datamat.readers.making import Job
from datamat.readers.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from datamat.readers.order import Order

__all__ = ["Place", "read_state"]

_VERSION = 1
_PLACES_AT_ONCE = 1024


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A step of a schedule in an epoch.

    Attributes:
        epoch: number of the epoch, from 0.
        schedule: of its batches.
        step: the next one to deliver.
        num_lanes: how many copies of the loader share the steps; with several, `step` is the next of one of them.
    """

    epoch: int
    schedule: Schedule
    step: int
    num_lanes: int = 1

    def in_lane(self, lane: int, num_lanes: int) -> Place:
        """Return the place for one of several copies of the loader; itself if it is one's already."""
        if self.num_lanes == num_lanes:
            return self
        return Place(self.epoch, self.schedule, self.step + lane, num_lanes)

    def jobs(self, order: Order, rank: int, steps: range) -> Iterator[Job]:
        """Yield the job of a rank for each step."""
        at_once = -(-_PLACES_AT_ONCE // self.schedule.batch_size)
        for first in range(0, len(steps), at_once):
            bounds = [self.schedule.bounds(step, rank) for step in steps[first : first + at_once]]
            places = np.concatenate([np.arange(*one, dtype=np.int64) for one in bounds])
            positions = order.positions(self.epoch, places)
            ends = np.cumsum([stop - start for start, stop in bounds])
            yield from (Job(self.epoch, part) for part in np.split(positions, ends[:-1]))

    def to_state(self) -> dict[str, Any]:
        """Return the place as JSON values."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "step": self.step,
            "num_lanes": self.num_lanes,
            "schedule": dataclasses.asdict(self.schedule),
        }


def read_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Place:
    """Return the place that a state tells.

    Args:
        state: what `Batches.state_dict` or a `StatefulDataLoader` around it returned.
        identity: of the data set and its order.

    Raises:
        OptionError: it is the state of something else.
    """
    try:
        states = _states_of_lanes(state)
        for one in states:
            _check_identity(one, identity)
        places = [Place(one["epoch"], Schedule(**one["schedule"]), one["step"], one["num_lanes"]) for one in states]
        first = min(places, key=lambda place: place.step)
        if len(places) not in (1, first.num_lanes):
            raise TypeError(f"{len(places)} states of {first.num_lanes} workers")
    except (KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"the state has not the form that state_dict of datamat's loader returns ({error!r}); load one of those"
        ) from error
    return first if len(places) == 1 else dataclasses.replace(first, num_lanes=1)


def _states_of_lanes(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return our own states inside a state: of a `StatefulDataLoader`, that of each of its workers."""
    if "schedule" in state:
        return [state]
    if "_snapshot" in state:
        if state.get("_steps_since_snapshot"):
            raise OptionError(
                "the state was taken between two snapshots of a StatefulDataLoader, and tells of the last one only; "
                "leave snapshot_every_n_steps at 1, or load the state into a StatefulDataLoader with as many workers"
            )
        return [worker["dataset_state"] for worker in state["_snapshot"]["_worker_snapshots"].values()]
    return [state["dataset_state"]]


def _check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    for name, wanted in {"version": _VERSION, **identity}.items():
        if state[name] != wanted:
            raise OptionError(
                f"the state is of a loader with {name} {state[name]!r}, this one has {wanted!r}; make a loader like "
                "that one, whose order is the same, or begin a new epoch without the state"
            )
