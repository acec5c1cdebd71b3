"""Arrays from a worker process to the reading one without a copy: blocks of shared memory, mapped by both.

    worker     makes a block, maps it, decodes into it, sends its name and the number of its use
    reader     maps it, once; says with a later job which blocks nobody holds any more, and after which use
    worker     decodes into such a block again

Only its maker writes to a block, and what a reader says of a block counts only if it is of its last use: jobs that were
sent before tell of earlier ones. Fresh pages of shared memory cost more than decoding a picture into them.

The file of a block goes as soon as the reader has mapped it; those that were not, because the worker died or nobody
wanted the batch, go with the folder. What a reader leaves that was killed is removed by the next one: nobody holds the
lock of its folder any more.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import functools
import math
import mmap
import os
import pathlib
import shutil
import sys
import tempfile
import weakref
from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Borrowed", "Loans", "Returned", "SharedArray", "SharedFolder", "loans_in"]

_MEMORY = "/dev/shm"  # noqa: S108 -- a file system in memory, which the standard library's shared memory uses as well
_PREFIX = "datamat-read-"
_LOCK_FILE = "lock"
_FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE
_LEAST_BYTES = 1 << 16  # a smaller array is sent as it is: making and mapping a file costs more
_REFERENCES_OF_FREE = 2  # the block's own, and the argument of getrefcount
_MAX_GONE = 256


@final
class SharedFolder:
    """A folder in memory for the arrays of one reading, removed at its end. A context manager.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        parent = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
        _sweep(pathlib.Path(parent))
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        self._lock = open(os.path.join(self.path, _LOCK_FILE), "wb")  # noqa: SIM115 -- open as long as the folder is
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._owner = os.getpid()

    def __enter__(self) -> SharedFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if os.getpid() == self._owner:  # not a process forked from it that ends
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(parent: pathlib.Path) -> None:
    """Remove the folders that killed readers left."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK_FILE}"):
        with contextlib.suppress(OSError), open(lock, "ab") as file:  # another's, still in use, or gone by now
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class SharedArray:
    """An array in a block of shared memory, as it is sent: the block, which use of it this is, shape and dtype."""

    name: str
    use: int
    shape: tuple[int, ...]
    dtype: str


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """What a reader says of blocks when it sends a job.

    Attributes:
        free: the last use of each block that nobody holds any more.
        gone: blocks that must not be used again, the latest ones.
    """

    free: Mapping[str, int]
    gone: tuple[str, ...]


# ---------------------------------------------------------------- in a worker


@dataclasses.dataclass(slots=True)
class _Block:
    name: str
    memory: np.ndarray
    use: int = 0
    is_free: bool = True


@final
class Loans:
    """The blocks that a worker process has made.

    Args:
        folder: of the reading.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._blocks: dict[str, _Block] = {}
        self._arrays: list[tuple[np.ndarray, SharedArray]] = []
        self._dropped: list[str] = []

    def begin(self, returned: Returned) -> None:
        """Begin a batch; take back what came back, and what the last batch had if it was not sent."""
        for _, shared in self._arrays:
            self._blocks[shared.name].is_free = True
        self._arrays = []
        for name in returned.gone:
            self._blocks.pop(name, None)
        for name, use in returned.free.items():
            block = self._blocks.get(name)
            if block is not None and block.use == use:
                block.is_free = True

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array in shared memory; an ordinary one if it is small, or where there is no room."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return np.empty(shape, dtype)
        fitting = (block for block in self._blocks.values() if block.is_free and block.memory.nbytes == num_bytes)
        block = next(fitting, None) or self._make(num_bytes)
        if block is None:
            return np.empty(shape, dtype)
        block.is_free = False
        block.use += 1
        array = block.memory.view(dtype).reshape(shape)
        self._arrays.append((array, SharedArray(block.name, block.use, shape, dtype.str)))
        return array

    def receipts(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return a batch as it is sent, and the names of blocks that are no more.

        Where an array is in shared memory, it is told where, in place of the array.
        """
        places = {id(array): shared for array, shared in self._arrays}
        sent = {name: places.get(id(value), value) for name, value in batch.items()}
        lent = {value.name for value in sent.values() if isinstance(value, SharedArray)}
        # Of the others, copies go instead: a row was left out, or pictures differ in size.
        self._arrays = [pair for pair in self._arrays if pair[1].name not in lent]
        dropped, self._dropped = tuple(self._dropped), []
        return sent, dropped

    def _make(self, num_bytes: int) -> _Block | None:
        # What is free and of another size is let go, so that memory does not grow with the variety of sizes.
        for name in [name for name, block in self._blocks.items() if block.is_free]:
            del self._blocks[name]
            self._dropped.append(name)
            with contextlib.suppress(FileNotFoundError):  # the reader has it
                os.unlink(os.path.join(self._folder, name))
        descriptor, path = tempfile.mkstemp(dir=self._folder)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # without it, a full memory would end the process later
            pages = mmap.mmap(descriptor, num_bytes, _FLAGS)
        except OSError:
            os.unlink(path)
            return None
        finally:
            os.close(descriptor)
        block = _Block(os.path.basename(path), np.frombuffer(pages, np.uint8))
        self._blocks[block.name] = block
        return block


@functools.lru_cache(maxsize=1)
def loans_in(folder: str) -> Loans:
    """Return the blocks that this worker process has made for a reading."""
    return Loans(folder)


# ---------------------------------------------------------------- in the reading process


@final
class Borrowed:
    """The blocks that the reading process has mapped.

    Args:
        folder: of the reading.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._blocks: dict[str, _Block] = {}
        self._gone: collections.deque[str] = collections.deque(maxlen=_MAX_GONE)
        _all_borrowed[id(self)] = self

    def take(self, value: Any) -> Any:
        """Return a column as it was before `Loans.receipts`."""
        if not isinstance(value, SharedArray):
            return value
        block = self._blocks.get(value.name)
        if block is None:
            block = self._blocks[value.name] = _Block(value.name, _map(os.path.join(self._folder, value.name)))
        block.use = value.use
        return block.memory.view(value.dtype).reshape(value.shape)

    def drop(self, names: Iterable[str]) -> None:
        """Forget blocks that their workers have let go."""
        for name in names:
            self._blocks.pop(name, None)

    def returned(self) -> Returned:
        """Return which blocks can be used again: no array, view, tensor or buffer refers to them."""
        free = {name: block.use for name, block in list(self._blocks.items()) if _is_free(block)}
        return Returned(free, tuple(self._gone.copy()))  # copied in one step, also for a fork by another thread

    def leave_to_fork(self) -> None:
        """Give up all blocks in use: a process that was just forked, by any thread, sees what is written to them."""
        for name, block in list(self._blocks.items()):
            if not _is_free(block):
                self._blocks.pop(name, None)
                self._gone.append(name)


_all_borrowed: weakref.WeakValueDictionary[int, Borrowed] = weakref.WeakValueDictionary()


def _leave_to_fork() -> None:
    for reference in _all_borrowed.valuerefs():
        borrowed = reference()
        if borrowed is not None:
            borrowed.leave_to_fork()


os.register_at_fork(after_in_parent=_leave_to_fork)


def _is_free(block: _Block) -> bool:
    return sys.getrefcount(block.memory) == _REFERENCES_OF_FREE


def _map(path: str) -> np.ndarray:
    with open(path, "r+b") as file:
        os.unlink(path)
        pages = mmap.mmap(file.fileno(), 0, _FLAGS)
    return np.frombuffer(pages, np.uint8)
