"""Memory of batches: used again when nobody holds it, never before."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

from datamat.readers.memory import MemoryPool
from datamat.readers.sharing import Loans, SharedArray, SharedFolder, adopt

SHAPE, UINT8 = (2, 1 << 20), np.dtype(np.uint8)


def address(array):
    """Return where an array lies."""
    return array.__array_interface__["data"][0]


def test_memory_that_is_let_go_is_used_again():
    """Also as another dtype and shape of as many bytes."""
    pool = MemoryPool()
    array = pool.allocate(SHAPE, UINT8)
    before = address(array)

    del array
    again = pool.allocate((1 << 18, 2), np.dtype(np.float32))

    assert address(again) == before
    assert (again.shape, again.dtype) == ((1 << 18, 2), np.float32)
    assert again.flags.writeable


@pytest.mark.parametrize("hold", [lambda array: array[1, :3], memoryview, lambda array: [array.reshape(-1)[::2].T]])
def test_memory_that_is_held_is_left_alone(hold):
    """By any view, however small."""
    pool = MemoryPool()
    array = pool.allocate(SHAPE, UINT8)
    before, held = address(array), hold(array)

    del array
    other = pool.allocate(SHAPE, UINT8)

    assert address(other) != before
    del held
    assert address(pool.allocate(SHAPE, UINT8)) == before


def test_memory_does_not_grow_with_the_variety_of_sizes():
    """What is free and does not fit is let go."""
    pool = MemoryPool()

    for extra in range(20):
        pool.allocate((1 << 20, 1 + extra), UINT8)

    assert len(pool._blocks) == 1


def test_array_in_shared_memory_is_taken_over():
    """Its file is gone then, its content is not; small ones and copies travel as they are."""
    with SharedFolder() as folder:
        loans = Loans(folder.path)
        large, small = loans.allocate(SHAPE, UINT8), loans.allocate((3,), UINT8)
        spare = loans.allocate(SHAPE, UINT8)
        large[:], small[:] = 7, 1

        sent = loans.receipts({"large": large, "small": small, "copy": spare[:1].copy()})
        assert isinstance(sent["large"], SharedArray)
        assert sent["small"] is small
        assert len(os.listdir(folder.path)) == 2  # that of `large`, and the lock

        found = adopt(sent["large"])
        assert os.listdir(folder.path) == ["lock"]

    assert (found == 7).all()
    found[0] = 1
    assert not pathlib.Path(folder.path).exists()


def test_full_memory_gives_ordinary_arrays(monkeypatch):
    """Which then travel over the pipe."""

    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with SharedFolder() as folder:
        loans = Loans(folder.path)

        array = loans.allocate(SHAPE, UINT8)

        assert loans.receipts({"array": array})["array"] is array
        assert os.listdir(folder.path) == ["lock"]


def test_what_a_killed_reader_left_is_removed_by_the_next():
    """That of one which is alive is not."""
    with SharedFolder() as alive:
        dead = SharedFolder()
        dead._lock.close()  # as the end of its process does
        pathlib.Path(dead.path, "batch").write_bytes(b"left")

        with SharedFolder():
            assert not pathlib.Path(dead.path).exists()
            assert pathlib.Path(alive.path).exists()
