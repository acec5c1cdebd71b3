"""`compute_chunksize` and `prefetch_depth`: pure, bounded, by cost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat.errors import OptionError
from datamat.parallel import compute_chunksize
from datamat.parallel.tasks import least_chunksize, prefetch_depth

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


@given(st.integers(0, 10**7), st.integers(1, 64), st.floats(0, 10))
def test_least_chunk_is_cheap_and_a_small_part_of_a_share(num_items, num_workers, cost):
    """Even if the estimate is wrong, the last chunk delays the end by an eighth of a worker's share at most."""
    size = least_chunksize(num_items, num_workers, cost)

    assert size >= 1
    assert size == 1 or (size * cost <= 0.0002 and size * num_workers * 8 <= num_items)


@given(costs)
def test_prefetched_work_is_bounded(cost):
    """At most 0.1 s of work waits at a worker, and at most 0.01 s at the end of a run."""
    assert 1 <= prefetch_depth(cost, num_waiting=1) <= prefetch_depth(cost) <= 128
    if cost is not None:
        assert (prefetch_depth(cost) - 1) * cost <= 0.1
        assert (prefetch_depth(cost, num_waiting=1) - 1) * cost <= 0.016


def test_one_longer_task_waits_at_a_worker_while_others_wait_elsewhere():
    """A worker then has its next task when it finishes one; near the end, each could run elsewhere."""
    assert [prefetch_depth(cost, num_waiting=2) for cost in (0.01, 0.09, 0.1, 3.0)] == [2, 2, 1, 1]
    assert [prefetch_depth(cost, num_waiting=1.5) for cost in (0.01, 0.09)] == [1, 1]


def test_golden_values():
    assert [compute_chunksize(100_000, 4, cost) for cost in (None, 0, 5e-5, 1e-3, 0.2)] == [782, 4096, 100, 5, 1]
