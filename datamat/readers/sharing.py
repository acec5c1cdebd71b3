"""Arrays from a worker process to the reading one without a copy: files in shared memory, mapped by both.

    worker     makes a file, maps it, decodes into it, sends its name
    reader     maps the file, unlinks it; the pages are free again when the last array on them goes

A file that was not taken over, because its worker died or nobody wanted the batch, goes with the folder. What a reader
leaves that was killed is removed by the next one: nobody holds the lock of its folder any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import mmap
import os
import pathlib
import shutil
import tempfile
from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Loans", "SharedArray", "SharedFolder", "adopt"]

_MEMORY = "/dev/shm"  # noqa: S108 -- a file system in memory, which the standard library's shared memory uses as well
_PREFIX = "datamat-read-"
_LOCK_FILE = "lock"
_FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE
_LEAST_BYTES = 1 << 16  # a smaller array is sent as it is: making and mapping a file costs more


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

    def __enter__(self) -> SharedFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
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
    """An array in a file of shared memory, as it is sent: path, shape and dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@final
class Loans:
    """The arrays of one batch in shared memory.

    Args:
        folder: of the reading.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._arrays: list[tuple[np.ndarray, SharedArray]] = []

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array in shared memory; an ordinary one if it is small, or where there is no room."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return np.empty(shape, dtype)
        descriptor, path = tempfile.mkstemp(dir=self._folder)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # without it, a full memory would end the process later
            pages = mmap.mmap(descriptor, num_bytes, _FLAGS)
        except OSError:
            os.unlink(path)
            return np.empty(shape, dtype)
        finally:
            os.close(descriptor)
        array: np.ndarray = np.frombuffer(pages, dtype).reshape(shape)
        self._arrays.append((array, SharedArray(path, shape, dtype.str)))
        return array

    def receipts(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch as it is sent: where an array is in shared memory, in place of the array."""
        places = {id(array): shared for array, shared in self._arrays}
        sent = {name: places.get(id(value), value) for name, value in batch.items()}
        lent = {value.path for value in sent.values() if isinstance(value, SharedArray)}
        for shared in places.values():
            if shared.path not in lent:  # a row was left out, or pictures differ in size: copies go instead
                os.unlink(shared.path)
        return sent


def adopt(value: Any) -> Any:
    """Return a column as it was before `Loans.receipts`, its memory now of this process."""
    if not isinstance(value, SharedArray):
        return value
    with open(value.path, "r+b") as file:
        os.unlink(value.path)
        pages = mmap.mmap(file.fileno(), 0, _FLAGS)
    return np.frombuffer(pages, np.dtype(value.dtype)).reshape(value.shape)
