"""Memory of batches: reused once nobody holds it, never before."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import sys

import numpy as np
import pytest

from datamat import Features, Mask, load, materialize
from datamat.readers.loader import MemoryPool
from datamat.readers.sharing import BlockOwner, BlockUser, SharedBlock, SharedFolder

SHAPE, UINT8 = (2, 1 << 20), np.dtype(np.uint8)


def address(array):
    """Return the address of an array."""
    return array.__array_interface__["data"][0]


def test_released_memory_is_used_again():
    """Another dtype and shape of the same size in bytes may use it."""
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
    """Any view holds it, however small."""
    pool = MemoryPool()
    array = pool.allocate(SHAPE, UINT8)
    before, held = address(array), hold(array)

    del array
    other = pool.allocate(SHAPE, UINT8)

    assert address(other) != before
    del held
    assert address(pool.allocate(SHAPE, UINT8)) == before


def test_memory_does_not_grow_with_the_variety_of_sizes():
    """Free memory that does not fit is released."""
    pool = MemoryPool()

    for extra in range(20):
        pool.allocate((1 << 20, 1 + extra), UINT8)

    assert len(pool._blocks) == 1


@pytest.fixture
def folder():
    """A folder of shared memory."""
    with SharedFolder() as made:
        yield made.path
    assert not pathlib.Path(made.path).exists()


def sent_by(owner, user, content, shape=SHAPE):
    """Have a worker send a batch of one array; return what the reader gets."""
    owner.begin(user.returned())
    array = owner.allocate(shape, UINT8)
    array[:] = content
    sent, dropped = owner.pack({"array": array})
    user.drop(dropped)
    return user.unpack(sent["array"])


def test_reader_takes_ownership_of_an_array_in_shared_memory(folder):
    """Its file is removed, its content stays; small arrays and copies travel through the pipe."""
    owner, user = BlockOwner(folder), BlockUser(folder)
    large, small = owner.allocate(SHAPE, UINT8), owner.allocate((3,), UINT8)
    spare = owner.allocate(SHAPE, UINT8)
    large[:], small[:] = 7, 1

    sent, _ = owner.pack({"large": large, "small": small, "copy": spare[:1].copy()})
    assert isinstance(sent["large"], SharedBlock)
    assert sent["small"] is small

    found = user.unpack(sent["large"])
    assert len(os.listdir(folder)) == 2  # that of `spare`, and the lock
    assert (found == 7).all()
    found[0] = 1
    assert (large[0] == 1).all()


def test_released_block_is_used_again(folder):
    """So is one whose batch was not sent, because a record was damaged."""
    owner, user = BlockOwner(folder), BlockUser(folder)
    array = sent_by(owner, user, 1)
    before = address(array)

    del array
    again = sent_by(owner, user, 2)
    assert address(again) == before

    del again
    owner.begin(user.returned())
    owner.allocate(SHAPE, UINT8)  # and then an error
    assert address(sent_by(owner, user, 3)) == before


@pytest.mark.parametrize("hold", [lambda array: array[1, :3], memoryview, lambda array: [array.reshape(-1)[::2].T]])
def test_block_that_is_held_is_left_alone(folder, hold):
    """No later batch touches it."""
    owner, user = BlockOwner(folder), BlockUser(folder)
    array = sent_by(owner, user, 1)
    held = hold(array)

    del array
    later = [sent_by(owner, user, content) for content in (2, 3)]

    assert [int(one.max()) for one in later] == [2, 3]
    assert int(np.max(held)) == 1


def test_releases_of_an_earlier_use_do_not_count(folder):
    """Two jobs are sent while a block is free; the first uses it, and its batch is held when the second begins."""
    owner, user = BlockOwner(folder), BlockUser(folder)
    sent_by(owner, user, 1)
    both = user.returned()
    assert len(both.free) == 1

    held = []
    for content in (2, 3):
        owner.begin(both)
        array = owner.allocate(SHAPE, UINT8)
        array[:] = content
        held.append(user.unpack(owner.pack({"array": array})[0]["array"]))

    assert [int(array.max()) for array in held] == [2, 3]


def test_blocks_do_not_grow_with_the_variety_of_sizes(folder):
    """Free blocks that do not fit are released, by both sides."""
    owner, user = BlockOwner(folder), BlockUser(folder)

    for extra in range(20):
        sent_by(owner, user, 1, (1 << 20, 1 + extra))

    assert len(owner._blocks) == 1
    assert len(user._blocks) == 1


def test_batch_that_a_forked_process_sees_is_left_alone(folder):
    """A fork does not copy shared memory: what was written to the block later would show there."""
    owner, user = BlockOwner(folder), BlockUser(folder)
    array = sent_by(owner, user, 1)
    asked, answer = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(asked, 1)
        os._exit(0 if (array == 1).all() else 1)

    del array
    for content in (2, 3, 4):
        sent_by(owner, user, content)
    os.write(answer, b"x")

    assert os.waitpid(pid, 0)[1] == 0
    assert len(owner._blocks) == 1  # it was told to forget the other one
    os.close(asked)
    os.close(answer)


def test_full_memory_gives_ordinary_arrays(monkeypatch, folder):
    """They travel through the pipe."""

    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    owner = BlockOwner(folder)

    array = owner.allocate(SHAPE, UINT8)

    assert owner.pack({"array": array})[0]["array"] is array
    assert os.listdir(folder) == ["lock"]


def test_what_a_killed_reader_left_is_removed_by_the_next():
    """The files of a live reader stay."""
    code = (
        "from datamat.readers import sharing; print(sharing.SharedFolder().path, flush=True); os.kill(os.getpid(), 9)"
    )
    with SharedFolder() as alive:
        killed = subprocess.run(
            [sys.executable, "-c", f"import os; {code}"], check=False, capture_output=True, text=True
        )
        dead = pathlib.Path(killed.stdout.rstrip())
        (dead / "batch").write_bytes(b"left")

        with SharedFolder():
            assert not dead.exists()
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limits are glibc's")
def test_memory_that_was_freed_is_used_again(tmp_path):
    """In a process of its own, whose C library has freed nothing large yet; about 45 pages for each record without."""
    features = Features({"mask": Mask()})
    materialize(_picture, [str(number) for number in range(96)], tmp_path / "out", features=features, progress=False)

    done = subprocess.run(
        [sys.executable, "-c", _COUNT_FAULTS, tmp_path / "out"], capture_output=True, text=True, check=True
    )

    assert float(done.stdout) < 12


_LEAVE = """
import sys
from datamat import load
batches = iter(load(sys.argv[1]).to_numpy(8, num_workers=int(sys.argv[2])))
print(len(next(batches)["key"]))
"""


@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_program_that_ends_in_an_epoch_prints_nothing(tmp_path, num_workers):
    """No message complains of generators closed after their modules, and shared memory is left empty."""
    features = Features({"mask": Mask()})
    materialize(_picture, [str(number) for number in range(96)], tmp_path / "out", features=features, progress=False)
    before = set(pathlib.Path("/dev/shm").glob("datamat-read-*"))

    done = subprocess.run(
        [sys.executable, "-c", _LEAVE, tmp_path / "out", num_workers], capture_output=True, text=True, check=True
    )

    assert (done.stdout, done.stderr) == ("8\n", "")
    assert set(pathlib.Path("/dev/shm").glob("datamat-read-*")) <= before


def test_worker_processes_use_shared_memory_again(tmp_path):
    """Six blocks or so for 24 batches: those at work, those ready, and the two that the loop has."""
    features = Features({"mask": Mask()})
    materialize(_picture, [str(number) for number in range(96)], tmp_path / "out", features=features, progress=False)

    places = [address(batch["mask"]) for batch in load(tmp_path / "out").to_numpy(4, num_workers=2)]

    assert len(places) == 24
    assert len(set(places)) <= 10


def test_memory_lies_where_tensorflow_takes_it_without_a_copy():
    """At multiples of 64 bytes."""
    pool = MemoryPool()

    arrays = [pool.allocate((1 << 20, 1 + extra), UINT8) for extra in range(5)]

    assert all(address(array) % 64 == 0 for array in arrays)
    assert [array.size for array in arrays] == [(1 << 20) * (1 + extra) for extra in range(5)]


def test_closed_pool_keeps_nothing():
    """Memory in use stays with its users; memory that is asked for later is not kept either."""
    pool = MemoryPool()
    array = pool.allocate(SHAPE, UINT8)
    array[:] = 7

    pool.close()

    assert address(pool.allocate(SHAPE, UINT8)) != address(array)
    assert not pool._blocks
    assert (array == 7).all()


PAGE_FAULTS = """
import ctypes, resource
import numpy as np
from datamat.readers.loader import keep_freed_pages_again

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.empty(1 << 20, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).mallopt(-1, 128 << 10)  # as TensorFlow's generators do
print(faults())
keep_freed_pages_again()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such limit")
def test_freed_memory_is_kept_where_that_was_forbidden():
    """Each array of 1 MiB is 256 pages."""
    found = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True)
    forbidden, kept = map(int, found.stdout.split())

    assert kept < 1000 < 50 * 100 < forbidden
