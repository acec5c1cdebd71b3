"""Orders of epochs: permutations that never change, mix well, and can be computed piece by piece."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat import OptionError
from datamat.readers.batches import Order, permuted

SIZES = (130, 0, 70, 1, 64)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63))
def test_permutation_has_every_place_once(size, seed):
    """This holds for any size."""
    assert sorted(permuted(np.arange(size), size, seed)) == list(range(size))


def test_permutations_are_those_of_the_first_version():
    """A saved state resumes in the same order, in every later version."""
    assert permuted(np.arange(10), 10, 1, 2).tolist() == [5, 7, 2, 4, 8, 9, 1, 3, 6, 0]
    assert permuted(np.array([0, 1, 10**11]), 10**12, 5).tolist() == [326052658550, 901313931001, 552503311736]
    assert Order(SIZES, 3, None).positions(0, np.arange(0, 6)).tolist() == [154, 6, 61, 18, 114, 178]
    assert Order(SIZES, 3, 100).positions(1, np.arange(200, 206)).tolist() == [125, 174, 108, 145, 118, 157]


def test_all_permutations_of_four_are_about_as_frequent():
    """Chi-squared over 24 cells, which 2,400 seeds should give a hundred times each."""
    counts = collections.Counter(tuple(permuted(np.arange(4), 4, seed).tolist()) for seed in range(2400))

    assert len(counts) == 24
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 50  # 23 are expected, 49.7 in one of a thousand


@pytest.mark.parametrize("window", [None, 0, 1, 64, 100, 10_000])
def test_an_epoch_has_every_record_once_in_any_pieces(window):
    """The epoch is read as a whole, or cut anywhere."""
    order = Order(SIZES, 3, window)

    whole = order.positions(2, np.arange(0, 265))
    pieces = np.concatenate([order.positions(2, np.arange(start, min(start + 7, 265))) for start in range(0, 265, 7)])

    assert sorted(whole) == list(range(265))
    assert np.array_equal(whole, pieces)
    assert len(order.positions(2, np.arange(265, 265))) == 0


@pytest.mark.parametrize("window", [None, 100])
def test_epochs_and_seeds_differ(window):
    """Each pair of orders has few places in common."""
    orders = [Order(SIZES, seed, window).positions(epoch, np.arange(0, 265)) for seed in (0, 1) for epoch in (0, 1, 2)]

    for number, one in enumerate(orders):
        assert all((one == other).mean() < 0.05 for other in orders[:number])


@pytest.mark.parametrize(("window", "most"), [(None, 0.02), (1024, 0.02)])
def test_shuffled_records_are_far_from_their_places(window, most):
    """Place and position are uncorrelated, and hardly any neighbours stay together."""
    positions = Order((4000,) * 5, 1, window).positions(0, np.arange(0, 20_000))

    assert abs(np.corrcoef(np.arange(20_000), positions)[0, 1]) < (0.03 if window is None else 0.15)
    assert (np.abs(np.diff(positions)) == 1).mean() < most


def test_window_reads_blocks_of_neighbours():
    """256 consecutive records come from four blocks of 64, so that the disk reads long runs."""
    positions = Order((6400,), 1, 256).positions(0, np.arange(0, 6400)).reshape(-1, 256)

    assert all(len(set(window // 64)) == 4 for window in positions)


def test_groups_of_a_format_stay_together():
    """Four are mixed at a time, or as many as the window holds that was asked for."""
    for shuffle, groups in ((True, 4), (128, 4), (640, 20), (100_000, 200)):
        order = Order.of([6400], shuffle, 1, groups=(32, 4))
        positions = order.positions(0, np.arange(0, 6400)).reshape(-1, 32 * groups)
        assert all(len(set(window // 32)) == groups for window in positions)
    assert Order.of([6400], False, 1, groups=(32, 4)).window == 0


@pytest.mark.parametrize(
    ("shuffle", "seed", "message"), [(0.5, 0, "shuffle is 0.5"), (-1, 0, "shuffle is -1"), (True, -1, "seed is -1")]
)
def test_nonsense_is_refused(shuffle, seed, message):
    """The error says what is accepted."""
    with pytest.raises(OptionError, match=f"{message}; want"):
        Order.of([3], shuffle, seed, groups=None)
