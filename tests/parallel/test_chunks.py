"""`compute_chunksize` and `prefetch_depth`: pure, bounded, by cost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat.errors import OptionError
from datamat.parallel import compute_chunksize

costs = st.none() | st.floats(0, 1e4)


@given(st.integers(0, 10**9), st.integers(1, 512), costs)
def test_chunksize_is_at_least_one_and_leaves_each_worker_chunks(num_items, num_workers, cost):
    size = compute_chunksize(num_items, num_workers, cost)

    assert 1 <= size <= 4096
    assert size <= max(1, math.ceil(num_items / (4 * num_workers)))


@given(st.integers(1, 10**6), st.integers(1, 64), st.floats(1e-6, 10), st.floats(1, 100))
def test_costlier_items_never_make_larger_chunks(num_items, num_workers, cost, factor):
    assert compute_chunksize(num_items, num_workers, cost * factor) <= compute_chunksize(num_items, num_workers, cost)


@given(st.integers(1, 10**6), st.integers(1, 64), st.floats(0.005, 1e3))
def test_items_of_milliseconds_travel_alone(num_items, num_workers, cost):
    """A chunk of two would only make the end of the run uneven."""
    assert compute_chunksize(num_items, num_workers, cost) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((-1, 2), "num_items is -1"), ((5, 0), "num_workers is 0"), ((5, 1, -0.1), "cost is -0.1"),
     ((5, 1, math.nan), "cost is nan")],
)  # fmt: skip
def test_nonsense_is_refused(arguments, words):
    with pytest.raises(OptionError, match=words):
        compute_chunksize(*arguments)


def test_golden_values():
    assert [compute_chunksize(100_000, 4, cost) for cost in (None, 0, 5e-5, 1e-3, 0.2)] == [782, 4096, 100, 5, 1]
