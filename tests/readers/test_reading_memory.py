"""Memory of batches: reused once nobody holds it, never before."""

from __future__ import annotations

import itertools
import os
import pathlib
import platform
import subprocess
import sys

import numpy as np
import pytest
from shared_memory import left_behind

from datamat import Features, Mask, load, materialize
from datamat.readers.sharing import BlockOwner, BlockUser, SharedFolder
from datamat.testing import InlineExecutor

SHAPE, UINT8 = (2, 1 << 20), np.dtype(np.uint8)


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    """96 masks of 360 x 480, large enough to matter. Read only."""
    output = tmp_path_factory.mktemp("masks") / "out"

    def mask(number):
        return {"mask": np.random.default_rng(number).integers(0, 9, (45, 60), np.uint8).repeat(8, 0).repeat(8, 1)}

    materialize(mask, range(96), output, features=Features({"mask": Mask()}), executor=InlineExecutor(), progress=False)
    return output


# ---------------------------------------------------------------- what a reader holds


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_that_are_held_are_left_alone(masks, num_workers):
    """Any view holds the memory of a batch, however small."""
    holds = itertools.cycle([lambda array: array[1, :3], memoryview, lambda array: [array.reshape(-1)[::2].T]])
    held, wanted = [], []
    for hold, batch in zip(holds, load(masks).to_numpy(4, num_workers=num_workers), strict=False):
        held.append(hold(batch["mask"]))
        wanted.append(np.array(held[-1]))

    assert len(held) == 24
    assert all(np.array_equal(one, other) for one, other in zip(held, wanted, strict=True))


def test_batch_that_a_forked_process_sees_is_left_alone(masks):
    """A fork does not copy shared memory: what was written to it later would show there."""
    batches = iter(load(masks).to_numpy(4, num_workers=1))
    array = next(batches)["mask"]
    wanted = array.copy()
    asked, answer = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(asked, 1)
        os._exit(0 if np.array_equal(array, wanted) else 1)

    del array
    for _ in batches:
        pass
    os.write(answer, b"x")

    assert os.waitpid(pid, 0)[1] == 0
    os.close(asked)
    os.close(answer)


def test_worker_processes_use_shared_memory_again(masks):
    """Six blocks or so for 24 batches: those at work, those ready, and the two that the loop has."""
    places = [batch["mask"].__array_interface__["data"][0] for batch in load(masks).to_numpy(4, num_workers=2)]

    assert len(places) == 24
    assert len(set(places)) <= 10


def test_releases_of_an_earlier_use_do_not_count():
    """Two jobs are sent while a block is free; the first uses it, and its batch is held when the second begins."""
    with SharedFolder() as folder:
        owner, user = BlockOwner(folder.path), BlockUser(folder.path)

        def sent(content, returned):
            owner.begin(returned)
            array = owner.allocate(SHAPE, UINT8)
            array[:] = content
            return user.unpack(owner.pack({"array": array})[0]["array"])

        sent(1, user.returned())
        both = user.returned()
        assert len(both.free) == 1
        held = [sent(content, both) for content in (2, 3)]

        assert [int(array.max()) for array in held] == [2, 3]


# ---------------------------------------------------------------- what there is not, and what is left


def test_full_memory_gives_ordinary_arrays(monkeypatch):
    """They travel through the pipe."""

    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with SharedFolder() as folder:
        owner = BlockOwner(folder.path)
        array = owner.allocate(SHAPE, UINT8)

        assert owner.pack({"array": array})[0]["array"] is array
        assert len(os.listdir(folder.path)) == 1, "its lock"


def test_what_a_killed_reader_left_is_removed_by_the_next():
    """The files of a live reader stay."""
    code = (
        "from datamat.readers.sharing import SharedFolder; folder = SharedFolder(); print(folder.path, flush=True); "
        "os.kill(os.getpid(), 9)"
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limits are glibc's")
def test_memory_that_was_freed_is_used_again(masks):
    """In a process of its own, whose C library has freed nothing large yet; about 45 pages for each record without."""
    done = subprocess.run([sys.executable, "-c", _COUNT_FAULTS, masks], capture_output=True, text=True, check=True)

    assert float(done.stdout) < 12


_LEAVE = """
import sys
from datamat import load
batches = iter(load(sys.argv[1]).to_numpy(8, num_workers=int(sys.argv[2])))
print(len(next(batches)["key"]))
"""


@pytest.mark.parametrize("num_workers", [pytest.param("0", marks=pytest.mark.long), "2"])
def test_program_that_ends_in_an_epoch_prints_nothing(masks, num_workers):
    """No message complains of generators closed after their modules, and shared memory is left empty."""
    before = left_behind()

    done = subprocess.run(
        [sys.executable, "-c", _LEAVE, masks, num_workers], capture_output=True, text=True, check=True
    )

    assert (done.stdout, done.stderr) == ("8\n", "")
    assert left_behind() <= before
