"""Worker processes that never run the caller's main program again, started by the fastest method that is safe."""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import logging
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

# Not through pathos, which takes each new worker 8 ms to import.
from multiprocess import context, forkserver, process, spawn, util
from multiprocess import resource_tracker as tracker

from datamat.parallel import process_role
from datamat.parallel.affinity import (
    library_against_fork,
    limit_thread_environment,
    native_threads,
    note_thread_pools,
)
from datamat.parallel.channel import Descriptor, close_in_forks, no_forks
from datamat.parallel.errors import OptionError

if hasattr(os, "fork"):
    from multiprocess.popen_fork import Popen as _Forked
    from multiprocess.popen_forkserver import Popen as _ForkedByServer
    from multiprocess.popen_spawn_posix import Popen as _Spawned
else:  # Windows, where these modules cannot be imported; there a pool says what it needs (`require_posix`)
    _Forked = _ForkedByServer = _Spawned = object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# ---------------------------------------------------------------- the choice of a start method
#
# Chooses the fastest start method that is safe here and now.
#
# fork starts a worker in a few milliseconds and needs no pickling, but copies only the calling thread: a lock that
# another thread holds stays locked for ever in the child. After a single `tf.constant` in the parent, a matmul in a
# forked child hangs every time; after only importing TensorFlow nothing hangs. So the choice depends on what is *live*.


START_METHODS = ("fork", "forkserver", "spawn")


def choose_start_method(requested: str | None = None) -> tuple[str, str]:
    """Return the start method to use, and the reason.

    Args:
        requested: "fork", "forkserver" or "spawn"; None chooses.

    Raises:
        OptionError: `requested` is none of these, or this system does not have it.

    Example:
        >>> choose_start_method("spawn")
        ('spawn', 'asked for')
    """
    if requested is not None:
        _check_start_method(requested)
        return requested, "asked for"
    if is_frozen():
        return "fork", "this program is frozen, and another interpreter would run it again"
    if sys.platform != "linux":
        return "spawn", f"{sys.platform} libraries are not safe to fork"
    if (reason := _reason_against_fork()) is not None:
        return "forkserver", f"fork is unsafe: {reason}"
    if (library := library_against_fork()) is not None:
        return "forkserver", f"fork is unsafe: threads of {library} would be missing"
    return "fork", "one thread, and no runtime that a fork would break"


def _check_start_method(requested: str) -> None:
    if requested not in START_METHODS:
        raise OptionError(f"start_method is {requested!r}; pass one of {', '.join(START_METHODS)}, or None")
    if requested != "fork" and is_frozen():
        raise OptionError(
            f"start_method={requested!r} is not possible in a frozen program, which would run itself again; "
            "leave it out, or pass 'fork'"
        )
    if requested == "fork" and _is_in_subinterpreter():
        raise OptionError(
            "start_method='fork' is not possible in a sub-interpreter, whose forks can set no signals; "
            "leave it out, or pass 'forkserver'"
        )


def is_frozen() -> bool:
    """Return True if `sys.executable` is the program itself (PyInstaller and the like), not a Python interpreter."""
    return bool(getattr(sys, "frozen", False))


def danger_of_fork() -> str | None:
    """Describe what would be broken in workers that are forked now; None if nothing is known.

    Other Python threads do not count: most of them hold no lock, and each pool of this library has one.
    """
    if (reason := _reason_against_fork(counts_threads=False)) is not None:
        return reason
    library = library_against_fork(is_patient=False)
    return None if library is None else f"threads of {library} are running"


def _reason_against_fork(*, counts_threads: bool = True) -> str | None:
    if _is_in_subinterpreter():
        return "this is a sub-interpreter"
    if counts_threads and (threading.active_count() > 1 or threading.current_thread() is not threading.main_thread()):
        return "this process has other Python threads"
    for module, is_live, reason in _RUNTIMES:
        with suppress(AttributeError):  # it is being imported, or another version
            if module in sys.modules and is_live(sys.modules[module]):
                return reason
    return None


def _is_in_subinterpreter() -> bool:
    """Return True if this is not the main interpreter of the process, as in Apache's mod_wsgi."""
    try:
        interpreters = importlib.import_module("_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters")
    except ImportError:
        return False
    return bool(interpreters.get_current() != interpreters.get_main())


# By name, so that the check imports nothing. Merely importing one of them does no harm.
_RUNTIMES: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    (
        "tensorflow.python.eager.context",
        lambda context: context._context is not None and context._context._initialized,
        "the TensorFlow runtime is in use",
    ),
    ("torch", lambda torch: torch.cuda.is_initialized(), "CUDA is initialised by torch"),
    ("jax._src.xla_bridge", lambda bridge: bridge._backends, "a JAX backend is in use"),
    ("ray", lambda ray: ray.is_initialized(), "ray is running"),
    (
        "numba.np.ufunc.parallel",  # GNU OpenMP ends each process that is forked after this and uses its threads
        lambda parallel: parallel._is_initialized and "numba.np.ufunc.omppool" in sys.modules,
        "numba's OpenMP threads are running",
    ),
)


# ---------------------------------------------------------------- the three ways to start
#
# Worker processes that never run the caller's main program again.
#
# The `multiprocess` package (`pathos.helpers.mp`) starts a process under spawn and forkserver by importing the
# parent's `__main__` there; without an `if __name__ == "__main__":` guard that runs the caller's program again, and
# again in each copy (156 times in 15 s under spawn, 864 under forkserver, before it was killed). The processes made
# here get no hint of a main module; what they need of it travels by value (`parallel.pickling`).
#
#     fork        caller ── os.fork ──> worker, worker, ...            (all at the first task)
#     forkserver  caller ── exec ─────> server (modules preloaded, kept while in use) ── os.fork ──> worker, ...
#     spawn       caller ── exec ─────> worker
#
# Only the thread that submits the first task forks, while it is the only one; afterwards the caller has threads, and a
# fork of it could inherit a lock that is never freed. So the replacement of a dead worker comes from a server, which is
# started on first use. (A helper process forked beforehand would be as safe, and faster; it would also hold a second
# copy of the caller's memory for the life of the pool.)


class MainFreeProcess(process.BaseProcess):  # type: ignore[misc]  # multiprocess ships no types
    """A `multiprocess` process whose child does not import the caller's `__main__`."""

    _start_method = None  # leaves the child's own default alone
    launcher: Callable[[MainFreeProcess], Any] | None = None

    @staticmethod
    def _Popen(process_obj: MainFreeProcess) -> Any:  # noqa: N802 -- called by multiprocess
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
    # At exit multiprocess joins all registered processes, even in a fork of the caller, where they are not its
    # children.
    process._children.discard(child)
    child.launcher = None
    return child


def search_path() -> list[str]:
    """Return the module search path of this process, for a process that may run in another directory.

    An empty entry, as in notebooks and `python -c`, is replaced by the present working directory. Modules imported
    before the caller changed directory are not found there and travel by value: another module may have the same name.
    """
    here = process.ORIGINAL_DIR or ""
    with suppress(FileNotFoundError):  # the caller's directory may have been removed
        here = os.getcwd()
    return [entry or here for entry in sys.path]


def _preparation(name: str) -> dict[str, Any]:
    """Return the data about the parent for a child: as in multiprocess, but without the main module.

    `multiprocess.spawn.get_preparation_data` also fixes the process-wide start method, which is the caller's choice.
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
    """Return the bytes that a new process reads first: data about its parent, and the function to run."""
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
    umask = os.umask(0o077)  # elsewhere it can only be read by setting it; meanwhile other threads create private files
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
    """Delay the exceptions of SIGINT and SIGTERM handlers in this thread, the main one, until the end of the block.

    Python swallows what a signal handler raises in a function that runs at a fork (`logging` has one, whose lock then
    stays taken), and the new child would be lost. Blocking the signals is not enough: then a thread of a library
    receives them, and the handler still runs in this one.
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
    """Yield the descriptor of the resource tracker, or of /dev/null if none runs.

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


class ForkPopen(_Forked):  # type: ignore[misc]
    """A fork of the calling thread, which must be the only one."""

    def __init__(self, process_obj: MainFreeProcess) -> None:
        with interrupts_blocked():
            super().__init__(process_obj)


class SpawnPopen(_Spawned):  # type: ignore[misc]
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
                self.pid = _run_interpreter(command, descriptors)
        finally:
            os.close(child_r)
            os.close(child_w)
        with suppress(BrokenPipeError), open(parent_w, "wb", closefd=False) as stream:  # a dead child is seen later
            stream.write(data)


def _environment() -> dict[str, str]:
    """Return the environment of new interpreters: one hash seed for all, or the order of sets would differ."""
    return {**os.environ, "PYTHONHASHSEED": "0"}


def hashes_as_workers_do() -> bool:
    """Return True if this process has the hash seed of interpreters started for workers."""
    return not sys.flags.hash_randomization


def _run_interpreter(command: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start an interpreter that inherits these descriptors, and return its process id; the caller reaps it."""
    import subprocess

    process = subprocess.Popen(  # noqa: S603 -- ourselves
        command, pass_fds=descriptors, env=_environment(), restore_signals=False
    )
    process.returncode = 0  # keeps `subprocess` from reaping it
    return process.pid


# ---------------------------------------------------------------- forkservers
#
# The forkservers of the session: processes that fork workers on request. There are two at most, and each ends after
# some idle minutes.


_logger = logging.getLogger("datamat.parallel")
_MAX_PARENT_BYTES = 80  # an address of a socket holds 103 (macOS) or 107 (Linux); unix(7)
_PREFIX = "datamat-"  # of a server's directory, on which it holds a lock
_SOCKET, _MODULES, _DRAFT = _FILES = "s", "modules", "draft"  # in it; `modules` says what the server has imported
_LEFT_S = 60.0  # age at which an unlocked directory counts as left behind: a new one is about to be locked
_MAX_SERVERS = 2  # one with TensorFlow takes 590 MB
IDLE_S = 300.0  # without a worker, until a server ends: longer than most pauses between two cells of a notebook
_LOOK_S = 1.0  # a server looks this often for its caller and its workers
_GRACE_S = 1.0  # a caller that found the address connects within microseconds


class _NoPlaceError(Exception):
    """No directory is writable, as in a container whose file systems are all read-only."""


class ServerPopen(_ForkedByServer):  # type: ignore[misc]
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
    """A fresh interpreter with `preload` imported, which forks workers on request."""

    def __init__(self, preload: Sequence[str], num_threads: int) -> None:
        self.num_starting = 0  # processes being requested
        self._preload = tuple(preload)
        self._num_threads = num_threads
        self._search_path = tuple(sys.path)
        self._lock = threading.Lock()
        self._directory: str | None = None
        self._alive_w = Descriptor(-1)
        self._process_id: int | None = None
        self._children: weakref.WeakSet[ServerPopen] = weakref.WeakSet()
        close_in_forks(self)

    def close(self) -> None:
        """Release the server without ending it; called in forks of the caller, to which it does not belong."""
        self._process_id = None
        self._directory = None
        self._alive_w.close()

    # ------------------------------------------------------------ suitability

    def suits(self) -> bool:
        """Return True if it would import the same modules as the caller."""
        return self._search_path == tuple(sys.path)

    def serves(self, preload: Sequence[str], num_threads: int) -> bool:
        """Return True if it can fork workers with these needs, and has imported all their modules."""
        return self.suits() and self._num_threads == num_threads and not self.missing(preload)

    def missing(self, preload: Sequence[str]) -> set[str]:
        """Return which of these modules it lacks, as far as known while it is still importing."""
        missing = set(preload).difference(self._preload)
        if missing and self._directory is not None:
            with suppress(OSError), open(os.path.join(self._directory, _MODULES), encoding="utf-8") as names:
                missing.difference_update(names.read().split())
        return missing

    def is_idle(self) -> bool:
        """Return True if it is unused."""
        with self._lock:
            return not self.num_starting and all(child.returncode is not None for child in self._children)

    # ------------------------------------------------------------ life

    def launch(self, process_obj: MainFreeProcess) -> ServerPopen:
        """Start `process_obj` as a fork of this server."""
        self.ensure_running()
        try:
            child = ServerPopen(process_obj, self)
        except (FileNotFoundError, ConnectionError):  # it is about to end, or was killed
            self.ensure_running()
            child = ServerPopen(process_obj, self)
        with self._lock:
            self._children.add(child)
        return child

    def ensure_running(self) -> None:
        """Start the server, unless it runs and can be found."""
        with self._lock:
            if self._is_gone() or not os.path.exists(self._address()):
                self._forget()
                self._start()

    def is_gone(self) -> bool:
        """Return True if it has ended, or was never started."""
        with self._lock:
            return self._is_gone()

    def _is_gone(self) -> bool:
        _reap_forgotten()
        if self._process_id is not None and _has_ended(self._process_id):
            self._process_id = None
            self._forget()
        return self._process_id is None

    def _start(self) -> None:
        import fcntl

        # A directory of our own (mode 0700): abstract socket names can be connected to by other users of the host.
        try:
            parent = tempfile.gettempdir()
            if len(os.fsencode(parent)) > _MAX_PARENT_BYTES and os.access("/tmp", os.W_OK):  # noqa: S108
                parent = "/tmp"  # noqa: S108
            _remove_leftovers(parent)
            self._directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            held = Descriptor(os.open(self._directory, os.O_RDONLY))
        except OSError as exc:
            self._forget()
            raise _NoPlaceError(str(exc)) from exc
        try:
            with closing(held), socket.socket(socket.AF_UNIX) as listener:
                with suppress(OSError):  # a file system without locks, where no directory is considered left behind
                    fcntl.flock(held.fileno(), fcntl.LOCK_SH)
                listener.bind(self._address())
                listener.listen()
                with no_forks:
                    alive_r, alive_w = os.pipe()
                    self._alive_w = Descriptor(alive_w)
                    close_in_forks(self._alive_w)
                with interrupts_blocked(), closing(Descriptor(alive_r)):
                    self._process_id = self._begin(listener.fileno(), alive_r, held.fileno())
        except BaseException:
            self._forget()
            raise

    def _begin(self, listener_fd: int, alive_r: int, held: int) -> int:
        options = (listener_fd, alive_r, self._preload, self._num_threads, IDLE_S, os.getpid())
        arguments = _server_command(search_path(), options)
        return _run_interpreter(arguments, [listener_fd, alive_r, held])

    def _address(self) -> str:
        assert self._directory is not None
        return os.path.join(self._directory, _SOCKET)

    def connect(self, descriptors: Sequence[int]) -> tuple[int, int]:
        """Ask for a new process that inherits `descriptors`.

        Returns:
            The descriptor from which its pid, and later its exit code, can be read, and the one its data goes to.
        """
        with self._lock:
            address, alive_w = self._address(), self._alive_w.fileno()
        parent_r, child_w = os.pipe()
        child_r, parent_w = os.pipe()
        try:
            with socket.socket(socket.AF_UNIX) as client, tracker_descriptor() as tracker_fd:
                client.connect(address)
                context.reduction.sendfds(client, [child_r, child_w, alive_w, tracker_fd, *descriptors])
        except BaseException as exc:
            if isinstance(exc, ConnectionError):
                # It was killed. For some milliseconds, until the system has released its resources, `waitpid` does not
                # say so yet, and a caller that tries again would be refused again.
                with suppress(OSError):
                    os.unlink(address)
            os.close(parent_r)
            os.close(parent_w)
            raise
        finally:
            os.close(child_r)
            os.close(child_w)
        return parent_r, parent_w

    def interrupt(self) -> None:
        """End it if it is still importing; callers waiting for it get an EOFError, and it restarts when needed."""
        if self._directory is not None and not os.path.exists(os.path.join(self._directory, _MODULES)):
            self._kill()

    def stop(self) -> None:
        """End the server; its workers must have ended before."""
        with self._lock:
            if self._process_id is not None:
                self._kill()
                with suppress(ChildProcessError):
                    os.waitpid(self._process_id, 0)
                self._process_id = None
                self._forget()

    def _kill(self) -> None:
        process_id = self._process_id
        if process_id is not None:
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)

    def _forget(self) -> None:
        """Abandon it: it ends once it has no workers."""
        if self._process_id is not None:
            _forgotten.append(self._process_id)
        self.remove_directory()
        self.close()

    def remove_directory(self) -> None:
        """Remove its directory, so that the next caller starts another server."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _server_command(path: list[str], options: tuple[Any, ...]) -> list[str]:
    """Return the command line of a server with this module search path; `options` are the arguments of `serve`."""
    code = f"import sys; sys.path[:] = {path!r}; from datamat.parallel.processes import serve; serve(*{options!r})"
    return [spawn.get_executable(), *util._args_from_interpreter_flags(), "-c", code]


def _remove_leftovers(parent: str) -> None:
    """Remove the directories of servers that were killed together with their callers, which are no longer locked."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _remove_leftover(entry)


def _remove_leftover(entry: os.DirEntry[str]) -> None:
    import fcntl

    found = entry.stat(follow_symlinks=False)
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or time.time() - found.st_mtime < _LEFT_S or not {*os.listdir(entry.path)} <= {*_FILES}:
        return
    if not stat.S_ISSOCK(os.lstat(os.path.join(entry.path, _SOCKET)).st_mode):
        return
    with closing(Descriptor(os.open(entry.path, os.O_RDONLY))) as directory:
        fcntl.flock(directory.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path, ignore_errors=True)


_forgotten: deque[int] = deque()  # of servers that have not ended yet


def _reap_forgotten() -> None:
    for _ in range(len(_forgotten)):
        with suppress(IndexError):  # another thread does the same
            process_id = _forgotten.popleft()
            if not _has_ended(process_id):
                _forgotten.append(process_id)


def _has_ended(process_id: int) -> bool:
    try:
        return os.waitpid(process_id, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


# ---------------------------------------------------------------- in the server


def serve(
    listener_fd: int, alive_r: int, preload: tuple[str, ...], num_threads: int, idle_s: float, caller: int
) -> None:
    """Import `preload`, then fork workers until the caller is gone or the server has been idle for a while.

    Args:
        listener_fd: socket on which the caller asks for workers.
        alive_r: pipe that the caller, and each worker, holds open.
        preload: names of modules that the server imports before it forks a worker, except those that start threads.
        num_threads: threads that libraries in a worker may use.
        idle_s: seconds without a worker, after which the server ends.
        caller: process that started the server.
    """
    with socket.socket(fileno=os.dup(listener_fd)) as listener:
        address = listener.getsockname()
    directory = os.path.dirname(address)
    path = list(sys.path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_thread_environment(num_threads)  # before the libraries that read it are imported
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it looks for a newer version when imported
    with _ending_with(caller, directory):
        threads = native_threads()
        for name in preload:
            # A module that cannot be imported here is imported, and its error reported, by the task that needs it.
            with suppress(Exception, process_role.NestedRunError), process_role.importing():
                __import__(name)
            if library_against_fork(known=threads) is not None:
                # It has started a thread, which forks would lack. Imports cannot be undone, so start over without it.
                others = tuple(other for other in preload if other != name)
                options = (listener_fd, alive_r, others, num_threads, idle_s, caller)
                os.execve(spawn.get_executable(), _server_command(path, options), _environment())  # noqa: S606
    note_thread_pools()
    gc.freeze()
    with suppress(OSError):
        _write_modules(directory)
    _ServerWatch(address, idle_s, caller).begin()
    try:
        forkserver.main(listener_fd, alive_r, preload=())
    except Exception:  # noqa: BLE001 -- shown as Python would
        sys.excepthook(*sys.exc_info())
    finally:
        _end_server(directory)


def _end_server(directory: str) -> NoReturn:
    """End at once: threads and exit handlers of imported libraries may never finish."""
    shutil.rmtree(directory, ignore_errors=True)  # a caller that was killed has not done this
    os._exit(0)


@contextmanager
def _ending_with(caller: int, directory: str) -> Iterator[None]:
    """End with the caller even while modules are imported; the thread that watches for this ends before any fork."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_LOOK_S):
            if os.getppid() != caller:
                _end_server(directory)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _write_modules(directory: str) -> None:
    """Write the names of imported modules atomically, since the caller may read them at any time."""
    draft = os.path.join(directory, _DRAFT)
    with open(draft, "w", encoding="utf-8", errors="replace") as file:
        file.write("\n".join(list(sys.modules)))
    os.replace(draft, os.path.join(directory, _MODULES))


class _ServerWatch:
    """Ends a server whose caller is gone, or that has had no worker for a while.

    The caller is the server's parent. The pipe that tells `forkserver.main` the same may be held open by a program that
    a task has started.

    A server without workers first removes its address: from then on the caller does not find it and starts another
    server. It ends after a grace period for requests that found the address just before.
    """

    def __init__(self, address: str, idle_s: float, caller: int) -> None:
        self._address = address
        self._idle_s = idle_s
        self._caller = caller
        self._last_use = time.monotonic()
        self._is_hidden = False
        self._others = _children() - {0}  # started by modules during their import

    def begin(self) -> None:
        """Start a timer, which no fork inherits."""
        os.register_at_fork(after_in_parent=self._note_use)
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)

    def _note_use(self) -> None:
        self._last_use = time.monotonic()

    def _look(self, *_: object) -> None:
        if os.getppid() != self._caller:
            _end_server(os.path.dirname(self._address))
        elif _children() - self._others:
            self._note_use()
        elif self._is_hidden and time.monotonic() - self._last_use >= _GRACE_S:
            _end_server(os.path.dirname(self._address))
        elif time.monotonic() - self._last_use >= self._idle_s:
            self._is_hidden = True
            self._note_use()
            with suppress(OSError):
                os.unlink(self._address)


def _children() -> set[int]:
    """Return the pids of the children of this process; {0} for any children if the kernel does not list them."""
    found: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as children:
                found.update(map(int, children.read().split()))
    except OSError:
        if not hasattr(os, "waitid"):  # some builds of Python for macOS: a server ends only with its caller
            return {0}
        with suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return {0}
    return found


# ---------------------------------------------------------------- of the session


class _Servers:
    """The servers of this session, least recently used first."""

    def __init__(self) -> None:
        self._lock: threading.Lock
        self._running: list[Server]
        self.close()

    def close(self) -> None:
        """Start with no servers; also called in a fork, where no thread holds the lock any more."""
        self._lock = threading.Lock()
        self._running = []
        _forgotten.clear()
        close_in_forks(self)

    @contextmanager
    def lend(self, preload: Sequence[str], num_threads: int) -> Iterator[Server | None]:
        """Yield the server to fork from; None if all permitted servers are in use and none suits."""
        with self._lock:
            server = self._find(preload, num_threads)
            if server is not None:
                server.num_starting += 1
                self._running = [each for each in self._running if each is not server] + [server]
        try:
            yield server
        finally:
            if server is not None:
                with self._lock:
                    server.num_starting -= 1

    def _find(self, preload: Sequence[str], num_threads: int) -> Server | None:
        self._running = [server for server in self._running if not server.is_gone() or server.num_starting]
        for server in reversed(self._running):
            if server.serves(preload, num_threads):
                return server
        if len(self._running) >= _MAX_SERVERS:
            idle = next((server for server in self._running if server.is_idle()), None)
            if idle is None:  # a worker imports the modules that its server lacks
                suiting = [server for server in self._running if server.suits()]
                return min(suiting, key=lambda server: len(server.missing(preload)), default=None)
            self._running.remove(idle)
            idle.stop()
        server = Server(tuple(dict.fromkeys(preload)), num_threads)
        self._running.append(server)
        return server

    def end(self) -> None:
        """At the end of the program: remove directories of servers that were killed before they could do so."""
        for server in self._running:
            server.remove_directory()


_servers = _Servers()
atexit.register(_servers.end)


class ServerLauncher:
    """Starts processes as forks of a server of this session.

    Args:
        preload: names of modules that the server imports before it forks; a server with more modules also suits.
        num_threads: threads that a library may use in a worker.
    """

    def __init__(self, preload: Sequence[str], num_threads: int) -> None:
        self._preload = tuple(preload)
        self._num_threads = num_threads
        self._asked: Server | None = None
        self._has_warned = False

    def __call__(self, process_obj: MainFreeProcess) -> Any:
        """Start `process_obj`."""
        with _servers.lend(self._preload, self._num_threads) as server:
            if server is None:
                return SpawnPopen(process_obj)
            self._asked = server
            try:
                return server.launch(process_obj)
            except _NoPlaceError as exc:
                if not self._has_warned:
                    self._has_warned = True
                    _logger.warning("workers start by spawn, since no directory can hold a socket: %s; set TMPDIR", exc)
                return SpawnPopen(process_obj)
            finally:
                self._asked = None

    def interrupt(self) -> None:
        """Stop waiting for a server that is still importing."""
        if (server := self._asked) is not None:
            server.interrupt()
