"""Batches of ranks: equally many for each, every record once, and one number to resume from."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat.readers.batches import Schedule

sizes = st.integers(1, 9)


def places(schedule, steps=None):
    """Return the places that all ranks read."""
    steps = range(schedule.num_steps) if steps is None else steps
    ranks = range(schedule.world_size)
    return [place for step, rank in itertools.product(steps, ranks) for place in range(*schedule.bounds(step, rank))]


@given(num_places=st.integers(0, 60), batch_size=sizes, world_size=sizes, start=st.integers(0, 60))
def test_every_place_comes_and_none_twice_where_possible(num_places, batch_size, world_size, start):
    """No batch is empty or too large; repeats only make up for ranks in excess of records."""
    schedule = Schedule(num_places, batch_size, world_size, start=min(start, num_places))

    found = places(schedule)

    left = num_places - schedule.start
    assert sorted(set(found)) == list(range(schedule.start, num_places))
    if world_size == 1 or (batch_size > 1 and left >= world_size):
        assert len(found) == left
    assert len(found) - left < world_size
    for step, rank in itertools.product(range(schedule.num_steps), range(world_size)):
        first, behind = schedule.bounds(step, rank)
        assert 1 <= behind - first <= batch_size


@given(num_places=st.integers(0, 60), batch_size=sizes, world_size=sizes)
def test_dropping_leaves_full_batches_only(num_places, batch_size, world_size):
    """All are of one size, and they are the first ones of the epoch."""
    schedule = Schedule(num_places, batch_size, world_size, drop_last=True)

    num_steps = num_places // (batch_size * world_size)
    assert schedule.num_steps == num_steps
    assert places(schedule) == list(range(num_steps * batch_size * world_size))


@given(st.data())
def test_delivered_places_lie_before_the_next_step(data):
    """So another division among ranks can resume there."""
    before = Schedule(50, data.draw(sizes), data.draw(sizes))
    step = data.draw(st.integers(0, before.num_steps))

    after = Schedule(50, data.draw(sizes), data.draw(sizes), start=before.place(step))

    assert set(places(before, range(step))) == set(range(before.place(step)))
    assert set(places(before, range(step))) | set(places(after)) == set(range(50))
    assert not set(places(before, range(step))) & set(places(after))


@pytest.mark.parametrize(
    ("num_places", "batch_size", "world_size", "expected"),
    [
        (20, 4, 3, [[4, 4, 4], [2, 3, 3]]),
        (10, 3, 3, [[1, 2, 2], [1, 2, 2]]),
        (2, 4, 3, [[1, 1, 1]]),
        (5, 1, 2, [[1, 1], [1, 1], [1, 1]]),
    ],
)
def test_rest_is_divided_evenly(num_places, batch_size, world_size, expected):
    """A rest too small for all ranks is shared by the last two steps; ranks without a record repeat another's."""
    schedule = Schedule(num_places, batch_size, world_size)

    found = [
        [behind - first for first, behind in (schedule.bounds(step, rank) for rank in range(world_size))]
        for step in range(schedule.num_steps)
    ]

    assert found == expected
