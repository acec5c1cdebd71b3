"""Workers draw random numbers of their own, also where they were forked with one and the same state."""

import multiprocessing
import random

import numpy as np
import pytest

from datamat.parallel import PathosExecutor

NUM_WORKERS = 3


class Draws:
    """Draws in as many workers as there are, each of which waits for the others."""

    def __init__(self):
        self.barrier = multiprocessing.get_context("spawn").Barrier(NUM_WORKERS)

    def draw(self, library):
        self.barrier.wait(30)
        if library == "random":
            return random.random()
        if library == "torch":
            import torch

            return torch.rand(()).item()
        return np.random.random()


@pytest.fixture(params=["random", "numpy", pytest.param("torch", marks=pytest.mark.long)])
def library(request):
    pytest.importorskip(request.param)
    return request.param


def test_workers_draw_different_numbers(method, library):
    """They differ from each other's, from the caller's, and from those of the next pool's workers."""
    seen = {np.random.RandomState(0).random_sample()}  # what the caller, and so each of its forks, would draw next
    kept = np.random.get_state()
    try:
        np.random.seed(0)
        for _ in range(2):
            with PathosExecutor(NUM_WORKERS, start_method=method, preload=("numpy.random",)) as pool:
                draws = Draws()
                futures = [pool.submit(draws.draw, library) for _ in range(NUM_WORKERS)]
                seen |= {future.result(timeout=50) for future in futures}
        assert np.random.random() == np.random.RandomState(0).random_sample()
    finally:
        np.random.set_state(kept)

    assert len(seen) == 1 + 2 * NUM_WORKERS


def test_other_bit_generator_is_renewed_too():
    """`numpy.random.seed` supports only one of them."""
    kept = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(0))
        draws = Draws()
        with PathosExecutor(NUM_WORKERS, start_method="fork") as pool:
            futures = [pool.submit(draws.draw, "numpy") for _ in range(NUM_WORKERS)]
            assert len({future.result(timeout=50) for future in futures}) == NUM_WORKERS
    finally:
        np.random.set_bit_generator(kept)


def test_initializer_may_seed(method):
    """It runs after the worker has reseeded the generators."""
    with PathosExecutor(1, start_method=method, initializer=np.random.seed, initargs=(5,)) as pool:
        drawn = pool.submit(np.random.random).result(timeout=30)

    assert drawn == np.random.RandomState(5).random_sample()
