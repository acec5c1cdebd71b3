"""Worker processes that never run the caller's main program again.

The `multiprocess` package (`pathos.helpers.mp`) starts a process under spawn and forkserver by importing the
parent's `__main__` there; without an `if __name__ == "__main__":` guard that runs the caller's program again, and
again in each copy (156 times in 15 s under spawn, 864 under forkserver, before it was killed). The processes made
here get no hint of a main module; what they need of it travels by value (`parallel.pickling`).

    fork        caller ── os.fork ──> zygote ── os.fork ──> worker, worker, replacement, ...
    forkserver  caller ── exec ─────> server (modules preloaded, kept for the session) ── os.fork ──> worker, ...
    spawn       caller ── exec ─────> worker

The zygote is what makes fork last: it is forked once, at the first task, while the caller still has one thread, and
has no threads itself. So a worker that replaces a dead one is forked from a sound image of the caller, although the
caller has had threads for long. Zygote and server both run `multiprocess.forkserver.main`.
"""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from multiprocess import context, popen_spawn_posix, process, spawn, util
from multiprocess import resource_tracker as tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "MainFreeProcess",
    "SpawnPopen",
    "dump_for_child",
    "forget_idle_tracker",
    "interrupts_blocked",
    "search_path",
    "start_process",
    "tracker_descriptor",
]


class MainFreeProcess(process.BaseProcess):  # type: ignore[misc]  # multiprocess ships no types
    """A `multiprocess` process whose child does not import the caller's `__main__`."""

    _start_method = None  # leaves the child's own default alone
    launcher: Callable[[MainFreeProcess], Any] | None = None

    @staticmethod
    def _Popen(process_obj: MainFreeProcess) -> Any:  # noqa: N802 -- the name that multiprocess calls
        assert process_obj.launcher is not None
        return process_obj.launcher(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "launcher"}


def start_process(
    launcher: Callable[[MainFreeProcess], Any], target: Callable[..., object], args: tuple[Any, ...], name: str
) -> MainFreeProcess:
    """Start `target(*args)` in a new process; `launcher` is `SpawnPopen` or a server's `launch`."""
    child = MainFreeProcess(target=target, args=args, name=name)
    child.launcher = launcher
    child.start()
    child.launcher = None
    return child


def search_path() -> list[str]:
    """Return where this process finds modules, for one that may run in another directory."""
    return [entry or process.ORIGINAL_DIR or "" for entry in sys.path]


def _preparation(name: str) -> dict[str, Any]:
    """Return what a child is told of its parent: as multiprocess does it, without the main module.

    `multiprocess.spawn.get_preparation_data` also fixes the process-wide start method, which is the caller's to set.
    """
    data = {
        "name": name,
        "authkey": process.current_process().authkey,
        "sys_path": search_path(),
        "sys_argv": list(sys.argv),
        "orig_dir": process.ORIGINAL_DIR,
    }
    with suppress(FileNotFoundError):  # the caller's directory may have been removed
        data["dir"] = os.getcwd()
    return data


def dump_for_child(popen: Any, child: MainFreeProcess) -> memoryview:
    """Return what a new process reads first: about its parent, and what to run."""
    buffer = io.BytesIO()
    context.set_spawning_popen(popen)
    try:
        context.reduction.dump(_preparation(child.name), buffer)
        context.reduction.dump(child, buffer)
    finally:
        context.set_spawning_popen(None)
    return buffer.getbuffer()


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread, so that a child starts with it blocked and cannot die of it before it is ready."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


@contextmanager
def tracker_descriptor() -> Iterator[int]:
    """Give the descriptor of the resource tracker, or of /dev/null where none runs.

    Our workers share no semaphores, so there is no reason to start a tracker process; a worker that needs one later
    starts its own (`forget_idle_tracker`).
    """
    running = tracker._resource_tracker._fd
    descriptor = os.open(os.devnull, os.O_WRONLY) if running is None else running
    try:
        yield descriptor
    finally:
        if running is None:
            os.close(descriptor)


def forget_idle_tracker() -> None:
    """In a worker: drop the placeholder that `tracker_descriptor` gave instead of a resource tracker."""
    held = tracker._resource_tracker
    if held._fd is not None and stat.S_ISCHR(os.fstat(held._fd).st_mode):
        os.close(held._fd)
        held._fd = None


class SpawnPopen(popen_spawn_posix.Popen):  # type: ignore[misc]
    """A fresh interpreter by exec."""

    def _launch(self, process_obj: MainFreeProcess) -> None:
        data = dump_for_child(self, process_obj)
        parent_r, child_w = os.pipe()
        child_r, parent_w = os.pipe()
        self.finalizer = util.Finalize(self, util.close_fds, (parent_r, parent_w))
        self.sentinel = parent_r
        try:
            with tracker_descriptor() as tracker_fd, interrupts_blocked():
                command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
                descriptors = [*self._fds, child_r, child_w, tracker_fd]
                self.pid = util.spawnv_passfds(spawn.get_executable(), command, descriptors)
        finally:
            os.close(child_r)
            os.close(child_w)
        with suppress(BrokenPipeError), open(parent_w, "wb", closefd=False) as stream:  # a dead child is seen later
            stream.write(data)
