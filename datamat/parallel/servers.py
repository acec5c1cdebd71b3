"""The forkserver of the session: a process that forks workers on request. See `contexts` for who starts whom."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from multiprocess import context, forkserver, popen_forkserver, spawn, util
from pathos.helpers import mp

from datamat.parallel import role
from datamat.parallel.affinity import limit_thread_environment
from datamat.parallel.channel import close_in_forks
from datamat.parallel.contexts import (
    MainFreeProcess,
    SpawnPopen,
    dump_for_child,
    interrupts_blocked,
    search_path,
    tracker_descriptor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ExecServer", "Server", "main_free_context", "serve", "shared_server"]

_MAX_PARENT_BYTES = 80  # an address of a socket holds 103 (macOS) or 107 (Linux); unix(7)


class ServerPopen(popen_forkserver.Popen):  # type: ignore[misc]
    """A fork of a server process."""

    def __init__(self, process_obj: MainFreeProcess, server: Server) -> None:
        self._server = server
        super().__init__(process_obj)

    def _launch(self, process_obj: MainFreeProcess) -> None:
        data = dump_for_child(self, process_obj)
        self.sentinel, data_w = self._server.connect(self._fds)
        kept_open = os.dup(data_w)  # the child's parent_process() watches it
        self.finalizer = util.Finalize(self, util.close_fds, (kept_open, self.sentinel))
        with suppress(BrokenPipeError), open(data_w, "wb", closefd=True) as stream:
            stream.write(data)
        self.pid = forkserver.read_signed(self.sentinel)


class Server:
    """A process that forks workers on request; `_begin` of a subclass says where it comes from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._directory: str | None = None
        self._alive_w: int | None = None
        self._process_id: int | None = None
        self._owner = os.getpid()
        close_in_forks(self)

    def abandon(self) -> None:
        """In a fork of the caller: let go of the server, which belongs to the caller alone."""
        self._process_id = None
        self._directory = None
        if self._alive_w is not None:
            os.close(self._alive_w)
            self._alive_w = None

    def launch(self, process_obj: MainFreeProcess) -> ServerPopen:
        """Start `process_obj` as a fork of this server."""
        self.ensure_running()
        return ServerPopen(process_obj, self)

    def ensure_running(self) -> None:
        """Start the server unless it runs."""
        with self._lock:
            if self._process_id is not None and self._has_ended():
                self._forget()
            if self._process_id is None:
                self._start()

    def _start(self) -> None:
        # A directory of our own (mode 0700): abstract socket names can be connected to by other users of the host.
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > _MAX_PARENT_BYTES and os.access("/tmp", os.W_OK):  # noqa: S108
            parent = "/tmp"  # noqa: S108
        self._directory = tempfile.mkdtemp(prefix="datamat-", dir=parent)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address())
            listener.listen()
            alive_r, alive_w = os.pipe()
            try:
                with interrupts_blocked():
                    self._process_id = self._begin(listener.fileno(), alive_r, alive_w)
            except BaseException:
                os.close(alive_w)
                raise
            finally:
                os.close(alive_r)
        self._alive_w = alive_w

    def _begin(self, listener_fd: int, alive_r: int, alive_w: int) -> int:
        raise NotImplementedError

    def _has_ended(self) -> bool:
        raise NotImplementedError

    def _address(self) -> str:
        assert self._directory is not None
        return os.path.join(self._directory, "s")

    def connect(self, descriptors: Sequence[int]) -> tuple[int, int]:
        """Ask for a new process that inherits `descriptors`.

        Returns:
            The descriptor from which its pid, and later its exit code, can be read, and the one its data goes to.
        """
        assert self._alive_w is not None
        parent_r, child_w = os.pipe()
        child_r, parent_w = os.pipe()
        try:
            with socket.socket(socket.AF_UNIX) as client, tracker_descriptor() as tracker_fd:
                client.connect(self._address())
                context.reduction.sendfds(client, [child_r, child_w, self._alive_w, tracker_fd, *descriptors])
        except BaseException:
            os.close(parent_r)
            os.close(parent_w)
            raise
        finally:
            os.close(child_r)
            os.close(child_w)
        return parent_r, parent_w

    def kill(self) -> None:
        """End the server at once; who waits for it to fork gets an EOFError, and it is started again when needed."""
        process_id = self._process_id
        if process_id is not None and self._owner == os.getpid():
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)

    def stop(self) -> None:
        """End the server; its workers must have ended before."""
        with self._lock:
            if self._process_id is None or self._owner != os.getpid():
                return
            self.kill()
            self._reap()
            self._forget()

    def _reap(self) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        self._process_id = None
        if self._alive_w is not None:
            os.close(self._alive_w)
            self._alive_w = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


class ExecServer(Server):
    """A server that is a fresh interpreter with `preload` imported; it lives as long as the session."""

    def __init__(self, preload: tuple[str, ...], num_threads: int) -> None:
        super().__init__()
        self._preload = preload
        self._num_threads = num_threads
        self._search_path = tuple(sys.path)

    def serves(self, preload: Sequence[str], num_threads: int) -> bool:
        """Can workers with these needs come from here?"""
        mine = (self._owner, self._num_threads, self._search_path)
        return mine == (os.getpid(), num_threads, tuple(sys.path)) and set(preload) <= set(self._preload)

    def _begin(self, listener_fd: int, alive_r: int, alive_w: int) -> int:
        del alive_w  # not inheritable: exec closes it
        command = (
            f"import sys; sys.path[:] = {search_path()!r}; from datamat.parallel.servers import serve; "
            f"serve({listener_fd}, {alive_r}, {self._preload!r}, {self._num_threads})"
        )
        arguments = [spawn.get_executable(), *util._args_from_interpreter_flags(), "-c", command]
        return int(util.spawnv_passfds(spawn.get_executable(), arguments, [listener_fd, alive_r]))

    def _has_ended(self) -> bool:
        try:
            return os.waitpid(self._process_id or 0, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            os.waitpid(self._process_id or 0, 0)


def serve(listener_fd: int, alive_r: int, preload: tuple[str, ...], num_threads: int) -> None:
    """Run an `ExecServer`: import `preload`, then fork workers until the caller and all workers are gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_thread_environment(num_threads)  # before the libraries that read it are imported
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it looks for a newer version when imported
    for name in preload:
        # A module that cannot be imported here is imported, and its error reported, by the task that needs it.
        with suppress(Exception, role.NestedRunError), role.importing():
            __import__(name)
    gc.freeze()
    with socket.socket(fileno=os.dup(listener_fd)) as listener:
        directory = os.path.dirname(listener.getsockname())
    try:
        forkserver.main(listener_fd, alive_r, preload=())
    finally:  # the caller was killed: one that ends by itself removes the directory
        shutil.rmtree(directory, ignore_errors=True)


_shared_servers: list[ExecServer] = []
_shared_lock = threading.Lock()


def shared_server(preload: Sequence[str], num_threads: int) -> ExecServer:
    """Return a server of this session that has these modules; it starts with its first worker.

    Args:
        preload: names of modules to import before any fork; a server that has more of them will do.
        num_threads: threads that a library in a worker may use.
    """
    with _shared_lock:
        for server in _shared_servers:
            if server.serves(preload, num_threads):
                return server
        server = ExecServer(tuple(dict.fromkeys(preload)), num_threads)
        _shared_servers.append(server)
        return server


class _MainFreeContext(context.BaseContext):  # type: ignore[misc]
    """What `multiprocess` calls a context, for code that takes one."""

    def __init__(self, method: str, launcher: Callable[[MainFreeProcess], Any]) -> None:
        self._name = method
        self._launcher = launcher

    def Process(self, *args: Any, **kwargs: Any) -> MainFreeProcess:  # noqa: N802 -- the name of the interface
        """Return a process that does not import the caller's main module."""
        child = MainFreeProcess(*args, **kwargs)
        child.launcher = self._launcher
        return child


def main_free_context(method: str, preload: Sequence[str] = ()) -> Any:
    """Return a `multiprocess` context for pools that are not ours.

    Args:
        method: "fork", "forkserver" or "spawn".
        preload: modules that a forkserver imports once.

    Example:
        >>> from pathos.multiprocessing import ProcessPool
        >>> pool = ProcessPool(2, context=main_free_context("spawn"), id="guardless")
        >>> pool.map(abs, [-1, 2])
        [1, 2]
        >>> pool.terminate(); pool.join(); pool.clear()
    """
    if method == "fork":
        return mp.get_context("fork")
    if method == "spawn":
        return _MainFreeContext("spawn", SpawnPopen)
    return _MainFreeContext("forkserver", shared_server(preload, 1).launch)
