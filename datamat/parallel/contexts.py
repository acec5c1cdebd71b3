"""Worker processes that never run the caller's main program again.

The `multiprocess` package (`pathos.helpers.mp`) starts a process under spawn and forkserver by importing the
parent's `__main__` there; without an `if __name__ == "__main__":` guard that runs the caller's program again, and
again in each copy (156 times in 15 s under spawn, 864 under forkserver, before it was killed). The processes made
here get no hint of a main module; what they need of it travels by value (`parallel.pickling`).

    fork        caller ── os.fork ──> worker, worker, ...            (all at the first task)
    forkserver  caller ── exec ─────> server (modules preloaded, kept for the session) ── os.fork ──> worker, ...
    spawn       caller ── exec ─────> worker

Only the thread that submits the first task forks, while it is the only one; the caller has threads from then on, and a
fork of it could inherit a lock that is never freed. So a worker that replaces a dead one comes from a server, which is
started when it is needed for the first time. (A helper process forked beforehand would be as sound, and quicker to
ask; it would also hold the caller's memory once more for as long as the pool lives.)
"""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from multiprocess import context, popen_fork, popen_spawn_posix, process, spawn, util
from multiprocess import resource_tracker as tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ForkPopen",
    "MainFreeProcess",
    "SpawnPopen",
    "current_umask",
    "dump_for_child",
    "forget_idle_tracker",
    "interrupts_blocked",
    "interrupts_held",
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


def current_umask() -> int:
    """Return the process's umask."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    umask = os.umask(0o077)  # elsewhere it is only told to who sets it; meanwhile files of other threads are private
    os.umask(umask)
    return umask


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread, so that a child starts with it blocked and cannot die of it before it is ready."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Put off what SIGINT and SIGTERM raise in this thread, the main one, to the end of the block.

    Python swallows what a signal handler raises in a function that runs at a fork (`logging` has one, whose lock then
    stays taken), and a child that was forked meanwhile would be known to nobody. To block the signals would not do:
    a thread of a library takes them then, and the handler still runs in this one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in held:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


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


@contextmanager
def _opencv_at_rest() -> Iterator[None]:
    """End OpenCV's thread pool for the block, in which the process is forked; it comes back when it is next used.

    A forked process inherits the pool's records but not its threads: `cv2.setNumThreads` then waits for ever for them
    to end (pthreads backend, OpenCV 4 and 5; the pool exists once the caller has run a parallel function).
    """
    cv2 = sys.modules.get("cv2")
    if cv2 is None:
        yield
        return
    num_threads = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(num_threads)


class ForkPopen(popen_fork.Popen):  # type: ignore[misc]
    """A fork of the calling thread, which must be the only one."""

    def __init__(self, process_obj: MainFreeProcess) -> None:
        with _opencv_at_rest(), interrupts_blocked():
            super().__init__(process_obj)


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
