"""Memory of batches: used again when nobody holds it, never before."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import sys

import numpy as np
import pytest

from datamat import Features, Mask, materialize
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


_COUNT_FAULTS = """
import resource, sys
from datamat import load
loader = load(sys.argv[1]).to_numpy(8, num_threads=2)
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    num_records = sum(len(batch["key"]) for batch in loader)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / num_records)
"""


def _picture(name):
    """A mask of 360 x 480, large enough to matter."""
    return {"mask": np.random.default_rng(int(name)).integers(0, 9, (45, 60), np.uint8).repeat(8, 0).repeat(8, 1)}


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limits are glibc's")
def test_memory_that_was_freed_is_used_again(tmp_path):
    """In a process of its own, whose C library has freed nothing large yet; about 45 pages for each record without."""
    features = Features({"mask": Mask()})
    materialize(_picture, [str(number) for number in range(96)], tmp_path / "out", features=features, progress=False)

    done = subprocess.run(
        [sys.executable, "-c", _COUNT_FAULTS, tmp_path / "out"], capture_output=True, text=True, check=True
    )

    assert float(done.stdout) < 12
