"""Orders of epochs, which the version in states pins, and their division among ranks: every record once."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat import OptionError
from datamat.readers.batches import Order, Schedule, permuted

SIZES = (130, 0, 70, 1, 64)
counts = st.integers(1, 9)


# ---------------------------------------------------------------- orders


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63))
def test_permutation_has_every_place_once(size, seed):
    assert sorted(permuted(np.arange(size), size, seed)) == list(range(size))


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, 99_991, 300 * 301, 1 << 18])
def test_large_permutation_has_every_place_once_in_any_pieces(size):
    """Small permutations are sorted, large ones computed place by place."""
    whole = permuted(np.arange(size), size, 3)
    places = np.arange(size)[::97]

    assert np.array_equal(np.sort(whole), np.arange(size))
    assert np.array_equal(permuted(places, size, 3), whole[places])


@pytest.mark.parametrize("size", [(1 << 16) + 1, 10**12])
def test_neighbours_of_a_large_permutation_are_independent(size):
    """Over 2,000 seeds, two places are sent to each pair of 8 x 8 regions equally often."""
    column = math.isqrt(size - 1) + 1
    places = np.array([0, 1, column - 1, column, size - 1])
    regions = np.array([permuted(places, size, seed) for seed in range(2000)]) * 8 // size
    for other in regions.T[1:]:
        counts = np.bincount(regions[:, 0] * 8 + other, minlength=64)
        assert ((counts - 2000 / 64) ** 2 / (2000 / 64)).sum() < 63 + 5 * math.sqrt(2 * 63)


def test_permutations_are_those_of_version_2():
    """A saved state resumes in the same order, until the version in states is raised."""
    assert permuted(np.arange(10), 10, 1, 2).tolist() == [1, 6, 4, 3, 2, 0, 8, 9, 5, 7]
    assert permuted(np.array([0, 1, 10**11]), 10**12, 5).tolist() == [627651242718, 72225337407, 794498146048]
    assert Order(SIZES, 3, None).positions(0, np.arange(0, 6)).tolist() == [195, 45, 62, 88, 4, 99]
    assert Order(SIZES, 3, 100).positions(1, np.arange(200, 206)).tolist() == [264, 238, 220, 246, 250, 225]


@pytest.mark.parametrize("window", [None, 0, 1, 64, 100, 10_000])
def test_an_epoch_has_every_record_once_in_any_pieces(window):
    order = Order(SIZES, 3, window)

    whole = order.positions(2, np.arange(0, 265))
    pieces = np.concatenate([order.positions(2, np.arange(start, min(start + 7, 265))) for start in range(0, 265, 7)])

    assert sorted(whole) == list(range(265))
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("window", [None, 100])
def test_epochs_and_seeds_differ(window):
    """Each pair of orders has few places in common."""
    orders = [Order(SIZES, seed, window).positions(epoch, np.arange(0, 265)) for seed in (0, 1) for epoch in (0, 1, 2)]

    assert all((one == other).mean() < 0.05 for one, other in itertools.combinations(orders, 2))


@pytest.mark.parametrize(("window", "correlation"), [(None, 0.03), (1024, 0.15)])
def test_shuffled_records_are_far_from_their_places(window, correlation):
    """Place and position are uncorrelated, and hardly any neighbours stay together."""
    positions = Order((4000,) * 5, 1, window).positions(0, np.arange(0, 20_000))

    assert abs(np.corrcoef(np.arange(20_000), positions)[0, 1]) < correlation
    assert (np.abs(np.diff(positions)) == 1).mean() < 0.02


def test_windows_and_groups_read_blocks_of_neighbours():
    """256 records come from four runs of 64; groups of a format stay together, as many as the window asks for."""
    positions = Order((6400,), 1, 256).positions(0, np.arange(0, 6400)).reshape(-1, 256)
    assert all(len(set(window // 64)) == 4 for window in positions)

    for shuffle, groups in ((True, 4), (128, 4), (640, 20), (100_000, 200)):
        order = Order.of([6400], shuffle, 1, groups=(32, 4))
        positions = order.positions(0, np.arange(0, 6400)).reshape(-1, 32 * groups)
        assert all(len(set(window // 32)) == groups for window in positions)


@pytest.mark.parametrize(("shuffle", "seed"), [(0.5, 0), (-1, 0), (True, -1)])
def test_nonsense_is_refused(shuffle, seed):
    with pytest.raises(OptionError, match="seed" if seed else "shuffle"):
        Order.of([3], shuffle, seed, groups=None)


# ---------------------------------------------------------------- ranks


def places(schedule, steps=None):
    """Return the places that all ranks read."""
    steps = range(schedule.num_steps) if steps is None else steps
    ranks = range(schedule.world_size)
    return [place for step, rank in itertools.product(steps, ranks) for place in range(*schedule.bounds(step, rank))]


@given(num_places=st.integers(0, 60), batch_size=counts, world_size=counts, start=st.integers(0, 60))
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


@given(num_places=st.integers(0, 60), batch_size=counts, world_size=counts)
def test_dropping_leaves_the_full_batches_at_the_start(num_places, batch_size, world_size):
    schedule = Schedule(num_places, batch_size, world_size, drop_last=True)

    assert schedule.num_steps == num_places // (batch_size * world_size)
    assert places(schedule) == list(range(schedule.num_steps * batch_size * world_size))


@given(st.data())
def test_another_division_resumes_where_one_stopped(data):
    before = Schedule(50, data.draw(counts), data.draw(counts))
    step = data.draw(st.integers(0, before.num_steps))

    after = Schedule(50, data.draw(counts), data.draw(counts), start=before.place(step))

    assert set(places(before, range(step))) == set(range(before.place(step)))
    assert set(places(after)) == set(range(before.place(step), 50))


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
    """The last two steps share a rest too small for all ranks; ranks without a record repeat another's."""
    schedule = Schedule(num_places, batch_size, world_size)

    bounds = [[schedule.bounds(step, rank) for rank in range(world_size)] for step in range(schedule.num_steps)]

    assert [[behind - first for first, behind in step] for step in bounds] == expected
