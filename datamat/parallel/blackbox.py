"""What a worker leaves behind, whatever ends it: a small file in memory that its parent reads after its death.

    bytes 0 to 7    number of the task, or of the callable, that the worker has begun last; 0 if that is done with
    then            Python stacks, as `faulthandler` writes them when the process crashes or is told to show where it is

The worker writes the number through a memory map: that takes no system call, and wakes nobody. So the parent can tell
a task that killed its worker from one that merely lay in the socket of a worker which died of something else.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any, Self

from multiprocess.reduction import DupFd

__all__ = ["BlackBox"]

_NUMBER_BYTES = 8


class BlackBox:
    """A descriptor of the file; the parent and the worker have one each."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls) -> Self:
        """Return a new, empty one."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("datamat-worker")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.write(descriptor, bytes(_NUMBER_BYTES))  # stacks follow: all descriptors of the file share one position
        return cls(descriptor)

    def share(self) -> BlackBox:
        """Return one more descriptor of the same file, for the worker."""
        return BlackBox(os.dup(self._descriptor))

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a process that is being started, which inherits the descriptor."""
        return _receive, (DupFd(self._descriptor),)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def begun(self) -> memoryview:
        """In the worker: return the one-element uint64 view that takes the number of what it begins."""
        return memoryview(mmap.mmap(self._descriptor, _NUMBER_BYTES)).cast("Q")

    def last_begun(self) -> int:
        """In the parent: return the number of what the worker had begun and was not done with, else 0."""
        return int.from_bytes(os.pread(self._descriptor, _NUMBER_BYTES, 0), "little")

    def stacks(self) -> str:
        """In the parent: return the stacks that the worker wrote down."""
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, size, _NUMBER_BYTES).decode(errors="replace")

    def close(self) -> None:
        """Close the descriptor; safe to repeat."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _receive(descriptor: Any) -> BlackBox:
    return BlackBox(descriptor.detach())
