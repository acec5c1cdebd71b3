"""The open files of this process, and limits on how many more it may open."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def open_files(folder: str | os.PathLike[str] = "") -> list[str]:
    """Return the paths below a folder that descriptors lead to, one for each descriptor."""
    links = []
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(descriptor))
    return [link for link in links if link.startswith(os.fspath(folder))]


@contextlib.contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """Let this process open no more than `count` further files; below 0, none until some are closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_descriptors() -> Iterator[Callable[[], None]]:
    """Let this process open no file at all; yield what takes the descriptors that other threads have freed since."""
    gc.collect()  # what it frees later would be room for a file
    held: list[int] = []

    def fill() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))

    with few_descriptors(20):
        fill()
        try:
            yield fill
        finally:
            for descriptor in held:
                os.close(descriptor)
