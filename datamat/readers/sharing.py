"""Passes arrays from a worker process to the reading one without a copy: blocks of shared memory that both map.

    worker     creates a block, maps it, decodes into it, sends its name and use number
    reader     maps it once; with a later job it reports the blocks that are free again, and after which use
    worker     decodes into such a block again

Only its owner writes to a block. A reader's report counts only for the last use of a block: jobs that were sent earlier
report earlier uses. Blocks are reused because fresh pages of shared memory cost more than decoding an image into them.

The reader unlinks the file of a block as soon as it has mapped it; files that were never mapped, because the worker
died or the batch was not wanted, go with the folder. The next reader removes what a killed one leaves.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.directory.files import temporary_folder
from datamat.errors import require_posix
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


_MEMORY = "/dev/shm"  # noqa: S108 -- a file system in memory, which the standard library's shared memory uses as well
_FLAGS = getattr(mmap, "MAP_SHARED", 0) | getattr(mmap, "MAP_POPULATE", 0)  # macOS has no such hint; Windows no workers
_LEAST_BYTES = 1 << 16  # a smaller array is sent by value: creating and mapping a file costs more
_REFERENCES_OF_FREE = 2  # the block's own, and the argument of getrefcount
_MAX_GONE = 256


@final
class SharedFolder:
    """A folder in memory for the arrays of one loader, removed on exit. A context manager.

    Attributes:
        path: path of the folder.
    """

    def __init__(self) -> None:
        require_posix("num_workers=")
        self.path = temporary_folder(self, _MEMORY if os.access(_MEMORY, os.W_OK) else None)
        self._owner = os.getpid()

    def __enter__(self) -> SharedFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if os.getpid() == self._owner:  # not in a process forked from it
            shutil.rmtree(self.path, ignore_errors=True)


@final
@frozen()
class SharedBlock:
    """An array in a block of shared memory, as it travels.

    Attributes:
        name: file name of the block.
        use: number of this use of the block, from 1.
        shape: shape of the array.
        dtype: dtype of the array.
    """

    name: str
    use: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@final
@frozen()
class Returned:
    """What a reader reports of its blocks along with a job.

    Attributes:
        free: number of the last use of each block that is free again, by name.
        gone: names of the latest blocks that must not be reused.
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
class BlockOwner:
    """The blocks that a worker process has created, and writes to.

    Args:
        folder: shared folder of the loader.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._blocks: dict[str, _Block] = {}
        self._arrays: list[tuple[np.ndarray, SharedBlock]] = []
        self._dropped: list[str] = []

    def begin(self, returned: Returned) -> None:
        """Begin a batch: reclaim the blocks that are free again, and those of the last batch if it was never sent."""
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
        """Return an array in shared memory; an ordinary one if it is small or no shared memory is left."""
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
        self._arrays.append((array, SharedBlock(block.name, block.use, shape, dtype)))
        return array

    def pack(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return a batch as it travels, and the names of blocks that were dropped.

        A `SharedBlock` replaces each array that lies in shared memory.
        """
        blocks = {id(array): shared for array, shared in self._arrays}
        sent = {name: blocks.get(id(value), value) for name, value in batch.items()}
        lent = {value.name for value in sent.values() if isinstance(value, SharedBlock)}
        # Of the others, copies travel: a row was skipped, or images differ in size.
        self._arrays = [pair for pair in self._arrays if pair[1].name not in lent]
        dropped, self._dropped = tuple(self._dropped), []
        return sent, dropped

    def _make(self, num_bytes: int) -> _Block | None:
        # Free blocks of other sizes go, so that memory does not grow with the variety of sizes.
        for name in [name for name, block in self._blocks.items() if block.is_free]:
            del self._blocks[name]
            self._dropped.append(name)
            with contextlib.suppress(FileNotFoundError):  # the reader has unlinked it
                os.unlink(os.path.join(self._folder, name))
        descriptor, path = tempfile.mkstemp(dir=self._folder)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, num_bytes)  # otherwise a full memory would kill the process later
            else:  # macOS
                os.ftruncate(descriptor, num_bytes)
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
def block_owner(folder: str) -> BlockOwner:
    """Return the blocks that this worker process owns in the folder of a loader."""
    return BlockOwner(folder)


# ---------------------------------------------------------------- in the reading process


@final
class BlockUser:
    """The blocks that the reading process has mapped, and reads from.

    Args:
        folder: shared folder of the loader.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._blocks: dict[str, _Block] = {}
        self._gone: collections.deque[str] = collections.deque(maxlen=_MAX_GONE)
        _all_users[id(self)] = self

    def unpack(self, value: Any) -> Any:
        """Return a column as it was before `BlockOwner.pack`: an array instead of a `SharedBlock`."""
        if not isinstance(value, SharedBlock):
            return value
        block = self._blocks.get(value.name)
        if block is None:
            block = self._blocks[value.name] = _Block(value.name, _map(os.path.join(self._folder, value.name)))
        block.use = value.use
        return block.memory.view(value.dtype).reshape(value.shape)

    def drop(self, names: Iterable[str]) -> None:
        """Forget blocks that their owners have dropped; unknown names are ignored."""
        for name in names:
            self._blocks.pop(name, None)

    def returned(self) -> Returned:
        """Return which blocks are free again: no array, view, tensor or buffer refers to them."""
        free = {name: block.use for name, block in list(self._blocks.items()) if _is_free(block)}
        return Returned(free, tuple(self._gone.copy()))  # copied atomically: another thread may fork

    def leave_to_fork(self) -> None:
        """Give up all blocks in use: a process that any thread has just forked sees whatever is written to them."""
        for name, block in list(self._blocks.items()):
            if not _is_free(block):
                self._blocks.pop(name, None)
                self._gone.append(name)


_all_users: weakref.WeakValueDictionary[int, BlockUser] = weakref.WeakValueDictionary()


def _leave_to_fork() -> None:
    for reference in _all_users.valuerefs():
        user = reference()
        if user is not None:
            user.leave_to_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_leave_to_fork)


def _is_free(block: _Block) -> bool:
    return sys.getrefcount(block.memory) == _REFERENCES_OF_FREE


def _map(path: str) -> np.ndarray:
    with open(path, "r+b") as file:
        os.unlink(path)
        pages = mmap.mmap(file.fileno(), 0, _FLAGS)
    return np.frombuffer(pages, np.uint8)
