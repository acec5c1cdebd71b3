"""The main program of a worker: read requests, make the calls, reply."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import multiprocessing
import os
import reprlib
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from datamat.parallel import (
    affinity,
    byvalue,
    channel,
    logs,
    pickling,
    process_role,
    processes,
    shared,
    standins,
    unforkable,
)
from datamat.parallel.channel import WorkerChannel
from datamat.parallel.errors import DatamatError, ParallelError, fold
from datamat.parallel.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from datamat.parallel.channel import Claims
    from datamat.parallel.crash import CrashNote

# ---------------------------------------------------------------- calls and their results
#
# Calls in a worker, and their errors on the way to the caller: with the item, and with the traceback as text.


_HERE = os.path.dirname(__file__)


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call; an error names the call."""
    try:
        return function(*args, **kwargs)
    except BaseException as exc:
        note_item(exc, args, kwargs, os.getpid())
        raise


def call_each(
    function: Callable[..., Any], items: Iterable[Any], *, are_tuples: bool
) -> tuple[list[Any], dict[int, bytes]]:
    """Call `function` with each item of a chunk, or with each tuple of arguments.

    Returns:
        The results, None for failed calls, and the packed errors by position. Most chunks have no errors, so that
        results travel bare.
    """
    results: list[Any] = []
    errors: dict[int, bytes] = {}
    for item in items:
        try:
            result = function(*item) if are_tuples else function(item)
        except BaseException as exc:  # noqa: BLE001 -- raised when this item's result is read
            note_item(exc, item if are_tuples else (item,), {}, os.getpid())
            errors[len(results)] = pack_error(exc)
            result = None
        results.append(result)
    return results, errors


def _answer(
    function: Callable[..., Any], arguments: Any, mode: int, noted: Callable[[list[Any]], Iterable[Any]]
) -> tuple[int, bytes]:
    """Make the calls of a task, and return the reply to it."""
    try:
        if mode == Mode.CALL:
            return Reply.DONE, pickling.dumps_data(call(function, *arguments))
        are_tuples = mode == Mode.CHUNK
        outcomes = call_each(function, noted(arguments), are_tuples=are_tuples)
        return Reply.DONE, _pack_outcomes(outcomes, arguments, are_tuples=are_tuples)
    except BaseException as exc:  # noqa: BLE001 -- the task's error; its future raises it again
        return Reply.FAILED, pack_error(exc)


def _pack_outcomes(outcomes: tuple[list[Any], dict[int, bytes]], items: list[Any], *, are_tuples: bool) -> bytes:
    """Return the packed outcomes of a chunk; a result that cannot be sent becomes an error of its item."""
    results, errors = outcomes
    try:
        return pickling.dumps_results(results, errors)
    except BaseException:  # noqa: BLE001 -- whatever a user's `__reduce__` raises
        packed = []
        for position, (item, result) in enumerate(zip(items, results, strict=True)):
            try:
                packed.append(pickling.dumps_data(result))
            except BaseException as exc:  # noqa: BLE001 -- raised when this item's result is read
                note_item(exc, item if are_tuples else (item,), {}, os.getpid())
                errors[position] = pack_error(exc)
                packed.append(pickling.dumps_data(None))
        return pickling.join_results(packed, errors)


def note_item(exc: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any], pid: int) -> None:
    """Add a note to the exception that names its item and the process, unless the error names them itself."""
    if isinstance(exc, DatamatError) and exc.names_its_item:
        return
    parts = [reprlib.repr(arg) for arg in args] + [f"{name}={reprlib.repr(arg)}" for name, arg in kwargs.items()]
    with suppress(Exception):  # a user's exception class may refuse notes
        exc.add_note(f"item: {', '.join(parts)} (process {pid})")


def pack_error(exc: BaseException) -> bytes:
    """Pack the exception, or its text if it cannot travel, and its traceback for `workers.unpack_error`."""
    if isinstance(exc, DatamatError) and exc.names_its_item:
        fold(exc)
    trace = exc.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next  # users need not see our frames
    text = "".join(traceback.format_exception(type(exc), exc, trace))
    try:
        packed = pickling.dumps_data(exc)
        pickling.loads_data(packed)  # an exception whose __init__ takes different arguments fails only here
    except BaseException:  # noqa: BLE001 -- whatever its __reduce__ raises
        notes = getattr(exc, "__notes__", [])
        plain = ParallelError(f"{type(exc).__qualname__}: {text_of(exc)} (this exception cannot be pickled)")
        for note in notes:
            plain.add_note(str(note))
        packed = pickling.dumps_data(plain)
    return pickling.dumps_data((packed, text))


def text_of(exc: BaseException) -> str:
    """Return the text of an exception, even if its `__str__` fails."""
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 -- a user's __str__
        return "<no text>"


# ---------------------------------------------------------------- the worker
#
# The worker process: it reads frames, runs tasks one after the other, and answers each.
#
#     parent ── FUNCTION, TASK, FORGET, QUIT ──────────────────────> worker
#     parent <── READY, DONE, FAILED, RETURNED, LOG, RETIRED, ... ─── worker      (one socket pair each)
#     parent <── current task, stacks of a hang or crash ──────────── worker      (a file in memory, `CrashNote`)
#     parent <── nothing, ever ────────────────────────────────────── worker      (a second socket pair, the lifeline)
#
# The worker ends when its parent ends: the kernel sends SIGKILL as soon as the parent's end of the lifeline is closed,
# which needs neither the GIL nor the end of the current task.


# Kinds of frames. Not Enums, whose members cost 0.15 us per access (Python 3.11).


class Request:
    """Kinds of messages to a worker."""

    FUNCTION = 1  # FUNCTION header, packed function
    FORGET = 2  # FUNCTION header
    TASK = 3  # TASK header, arguments
    QUIT = 4


class Reply:
    """Kinds of messages from a worker."""

    READY = 10
    DONE = 11  # OUTCOME header, result
    FAILED = 12  # OUTCOME header, exception and traceback
    RETURNED = 13  # OUTCOME header: not run, its function has not arrived in a usable form
    LOG = 14
    BY_VALUE = 15  # FUNCTION header, name of a module to send by value
    BROKEN = 16  # the initializer failed: traceback
    RETIRED = 17  # it takes no more tasks; unanswered ones have not begun
    PASSED_OVER = 18  # a task that the parent has taken back
    HELD_UP = 19  # it is ready to end, but waits for a reader of a `multiprocessing` queue
    UNREAD = 20  # OUTCOME header, exception and traceback: not run, its arguments cannot be unpickled


class Mode:
    """Layouts of the arguments of a task."""

    CALL = 0  # (args, kwargs) of one call
    CHUNK = 1  # a list of argument tuples; the result is that of `call_each`
    ITEMS = 2  # the same for calls with one argument, without tuples: half the work


FUNCTION = struct.Struct("<Q")  # function id
TASK = struct.Struct("<QQB?")  # task number, function id, mode, whether it must be claimed
OUTCOME = struct.Struct("<QdQ")  # task number, busy seconds, peak resident bytes

# Not SIGUSR1 or SIGUSR2, which user code may handle.
TRACE_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGUSR2", signal.SIGTERM)


@frozen()
class WorkerConfig:
    """Settings of a worker.

    Attributes:
        name: process name, as log records show it.
        mask: CPUs that the worker may run on; None leaves its affinity alone.
        num_threads: threads that BLAS, OpenMP, OpenCV and the like may start.
        logging: levels of the parent's loggers, for the worker's.
        initializer: packed (initializer, initargs), or the number under which it is inherited; None if there is none.
        registered: packed functions that users have registered for types, by name, unless the worker inherits them.
        environment: environment variables of the parent, unless the worker inherits them.
        umask: umask of the parent, unless the worker inherits it.
        max_tasks: number of tasks after which the worker ends; None for no limit.
        notes_times: whether the worker records when each call of a chunk begins: calls have a time limit.
        is_fork: whether the worker is a fork of the parent.
        authkey: key by which processes of this program authenticate themselves to `multiprocessing` managers.
    """

    name: str
    mask: frozenset[int] | None
    num_threads: int
    logging: logs.LoggingState
    initializer: bytes | int | None
    registered: dict[str, bytes]
    environment: dict[str, str] | None
    umask: int | None
    max_tasks: int | None
    notes_times: bool
    is_fork: bool
    authkey: bytes


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of getrusage
_PEAK_S = 0.2
_STDERR = 2
_HELD_UP_S = 0.3  # that queues may take to empty into their pipes before the parent is told

_inherited: dict[int, tuple[Any, unforkable.Unforkables]] = {}


def inherit(function_id: int, obj: Any, unforkables: unforkable.Unforkables) -> Callable[[], None]:
    """In the parent: let workers that are forked from now on inherit `obj` under this id.

    Returns:
        A function that ends this, to be called after the fork.
    """
    _inherited[function_id] = (obj, unforkables)

    def end() -> None:
        _inherited.pop(function_id, None)

    return end


# ---------------------------------------------------------------- set-up


def main(
    config: WorkerConfig, task_socket: socket.socket, lifeline: socket.socket, note: CrashNote, claims: Claims
) -> None:
    """Run a worker until the parent sends QUIT or goes away."""
    import faulthandler  # imported here: a sub-interpreter that uses a pool cannot import it

    # Garbage collection writes into the header of each object that it visits. Objects inherited by a fork are excluded,
    # or all shared pages would be copied. In the parent, where objects come and go, nothing is frozen.
    gc.freeze()
    process_role.become_worker()
    _forget_exit_handlers()
    _set_signals()
    _hold_lifeline(lifeline)
    faulthandler.enable(note, all_threads=True)
    faulthandler.register(TRACE_SIGNAL, note, all_threads=True, chain=True)  # chain: and then end
    processes.forget_idle_tracker()
    shared.begin_worker(is_fork=config.is_fork)
    multiprocessing.current_process().authkey = config.authkey  # the standard library's; multiprocess has its own
    if config.environment is not None:
        os.environ.clear()
        os.environ.update(config.environment)
    if config.umask is not None:
        os.umask(config.umask)
    if not config.is_fork:
        _hide_descriptors()
    affinity.limit_thread_environment(config.num_threads)
    affinity.limit_loaded_libraries(config.num_threads)
    affinity.bind(config.mask)
    _renew_random_state()
    channel = WorkerChannel(task_socket)
    byvalue.remember_globals("__main__")
    for name, packed in config.registered.items():
        standins.take_over(name, _loaded_when_called(packed))
    logs.forward_in_worker(functools.partial(channel.send, Reply.LOG), config.logging, config.name)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        if _initialize(config, channel):
            channel.send(Reply.READY)
            _Loop(channel, note.open(), claims, config).run()
    if not {"multiprocessing.queues", "multiprocess.queues"}.isdisjoint(sys.modules):
        held_up = threading.Timer(_HELD_UP_S, channel.send, (Reply.HELD_UP,))
        held_up.daemon = True
        held_up.start()
    _run_exit_handlers()


def _forget_exit_handlers() -> None:
    """Drop inherited exit handlers: they are the parent's.

    Keep the one that ends the threads of a `ThreadPoolExecutor`, for which the process would otherwise wait for ever.
    """
    atexit._clear()
    threads = sys.modules.get("concurrent.futures.thread")
    getattr(threading, "_threading_atexits", [])[:] = [threads._python_exit] if threads is not None else []


def _run_exit_handlers() -> None:
    """Run the exit handlers that tasks have registered, which neither fork nor forkserver does by itself.

    joblib and the like end their own workers there; the order is that of an interpreter's exit. The parent kills this
    worker if it takes too long.
    """
    for handler in reversed(getattr(threading, "_threading_atexits", [])):
        with suppress(Exception):
            handler()
    shared.end_worker()
    atexit._run_exitfuncs()


def _hide_descriptors() -> None:
    """Keep programs that tasks start from inheriting the descriptors that this process was started with.

    They arrive inheritable; `os.system`, or `Popen` with `close_fds=False`, would pass them on, and a program that
    outlives the worker would keep the pool's sockets open.
    """
    for name in _listed_descriptors():
        with suppress(OSError):  # the one used for listing is closed by now
            if int(name) > _STDERR:
                os.set_inheritable(int(name), False)


def _listed_descriptors() -> list[str]:
    """Return the open descriptors; empty if the system does not list them."""
    for folder in ("/proc/self/fd", "/dev/fd"):  # a bare container has no /dev/fd; macOS has no /proc
        with suppress(OSError):
            return os.listdir(folder)
    return []


def _unpack(packed: bytes | memoryview) -> Any:
    return pickling.load_code(*channel.unpack(memoryview(packed)))


def _loaded_when_called(packed: bytes) -> Callable[[Any], Any]:
    """Return the function, whose imports are delayed until it is called."""
    load = functools.cache(_unpack)

    def reduce(obj: Any) -> Any:
        return load(packed)(obj)

    return reduce


def _set_signals() -> None:
    """Leave Ctrl-C to the parent, and reset inherited handlers and masks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, TRACE_SIGNAL})


def _renew_random_state() -> None:
    """Reseed the generators of libraries from the system's entropy: forks of one process share their state.

    Python does so for `random` in each fork. Seeding each task instead, so that its numbers do not depend on where it
    runs, would cost 3 us per task and hide what they depend on; a generator that the task makes from its item does not.
    """
    if (numpy_random := sys.modules.get("numpy.random")) is not None and hasattr(numpy_random, "seed"):
        try:
            numpy_random.seed()
        except TypeError:  # the user has set a bit generator other than numpy's default
            numpy_random.set_bit_generator(type(numpy_random.get_bit_generator())())
    if (generator := getattr(sys.modules.get("torch"), "default_generator", None)) is not None:
        generator.seed()


def _hold_lifeline(lifeline: socket.socket) -> None:
    """Let the kernel kill this process, and those that its tasks start, when the parent's end of `lifeline` closes.

    Nothing is ever sent on it, so its only event is the hang-up. See fcntl(2), F_SETSIG.
    """
    import fcntl

    if hasattr(fcntl, "F_SETSIG"):
        descriptor = lifeline.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        sys.addaudithook(functools.partial(_lead_group, descriptor, os.getpid()))
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
        with suppress(BlockingIOError):  # the parent may have ended before that
            if not lifeline.recv(1, socket.MSG_DONTWAIT):
                os._exit(1)
    else:
        threading.Thread(target=_wait_for_hang_up, args=(lifeline,), daemon=True).start()


def _lead_group(descriptor: int, pid: int, event: str, _: tuple[Any, ...]) -> None:
    """Before a worker starts its first process, make it the leader of a process group, which is killed together.

    Until then it stays in the program's group, so that signals to that group reach it.
    """
    # Constants: this is still called at interpreter exit, when the module's names are gone.
    is_start = event in {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
    if is_start and os.getpid() == pid != os.getpgid(0):
        import fcntl

        with suppress(OSError):
            os.setpgid(0, 0)
            fcntl.fcntl(descriptor, fcntl.F_SETOWN, -pid)  # fcntl(2): a negative number means a group


def _wait_for_hang_up(lifeline: socket.socket) -> None:
    lifeline.setblocking(True)
    with suppress(OSError):
        lifeline.recv(1)
    os._exit(1)


def _initialize(config: WorkerConfig, channel: WorkerChannel) -> bool:
    """Run the initializer; return whether the worker can continue."""
    if config.initializer is None:
        return True
    try:
        if isinstance(config.initializer, int):
            (initializer, arguments), unforkables = _inherited.pop(config.initializer)
            unforkables.repair()
        else:
            initializer, arguments = _unpack(config.initializer)
        initializer(*arguments)
    except BaseException:  # sent to the parent, which ends the pool with it
        logging.getLogger("datamat.parallel").critical("the initializer of a worker failed", exc_info=True)
        channel.send(Reply.BROKEN, traceback.format_exc().encode(errors="backslashreplace"))
        return False
    return True


# ---------------------------------------------------------------- tasks


class _Loop:
    """Reads requests and answers them."""

    def __init__(self, channel: WorkerChannel, begun: memoryview, claims: Claims, config: WorkerConfig) -> None:
        self._channel = channel
        self._begun = begun
        self._claims = claims
        self._remaining = config.max_tasks
        self._notes_times = config.notes_times
        self._pid = os.getpid()
        self._functions: dict[int, Callable[..., Any]] = {}
        self._awaited: set[int] = set()  # functions to be sent again in another form
        self._load_error: BaseException | None = None
        self._peak = 0
        self._next_peak = 0.0

    def run(self) -> None:
        """Serve until QUIT."""
        while True:
            kind, data = self._channel.receive()
            if kind == Request.TASK:
                self._serve(data)
                if os.getpid() != self._pid:  # the task has forked, and its child also returned here
                    _end_fork()
                if self._remaining == 0 or process_role.is_retiring():
                    self._channel.send(Reply.RETIRED)
                    return
            elif kind == Request.FUNCTION:
                self._load(data)
                self._begun[0] = 0
            elif kind == Request.FORGET:
                self._functions.pop(FUNCTION.unpack_from(data)[0], None)
                _inherited.pop(FUNCTION.unpack_from(data)[0], None)
            else:
                return
            del data

    def _load(self, data: bytes) -> None:
        """Rebuild a callable; if that fails, its tasks are returned or fail with the reason."""
        function_id = FUNCTION.unpack_from(data)[0]
        self._begun[0] = function_id
        self._functions.pop(function_id, None)
        self._awaited.discard(function_id)
        try:
            with process_role.importing():
                function = _unpack(memoryview(data)[FUNCTION.size :])
        except BaseException as exc:  # noqa: BLE001 -- becomes the error of this function's tasks
            module = _module_to_blame(exc)
            if module is not None and not byvalue.is_forced(module):
                byvalue.force_by_value(module)
                self._awaited.add(function_id)
                self._channel.send(Reply.BY_VALUE, FUNCTION.pack(function_id), module.encode())
            else:
                self._load_error = exc
                self._functions[function_id] = _failing(exc, "the callable could not be rebuilt in the worker")
            return
        self._functions[function_id] = _set_up(function)

    def _function(self, function_id: int) -> Callable[..., Any] | None:
        if function_id not in self._functions and function_id in _inherited:
            function, unforkables = _inherited.pop(function_id)
            unforkables.repair()
            self._functions[function_id] = _set_up(function)
        return self._functions.get(function_id)

    def _serve(self, data: bytes) -> None:
        number, function_id, mode, is_claimed = TASK.unpack_from(data)
        if is_claimed and not self._claims.claim():
            self._channel.send(Reply.PASSED_OVER)
            return
        self._begun[0] = number  # before anything that may kill: unpickling the arguments, the user's `setup_worker`
        function = self._function(function_id)
        if function is None:
            self._begun[0] = 0
            self._channel.send(Reply.RETURNED, OUTCOME.pack(number, 0.0, 0))
            return
        if self._remaining is not None:
            self._remaining -= 1
        logs.set_task(function, number)
        begin = time.perf_counter()
        try:
            arguments = pickling.loads_data(memoryview(data)[TASK.size :])
        except BaseException as exc:  # noqa: BLE001 -- whatever the class of an item raises while it is rebuilt
            reply, payload = self._refusal(exc)
        else:
            reply, payload = _answer(function, arguments, mode, self._noted)
            del arguments
        busy_s = time.perf_counter() - begin
        self._channel.send(reply, OUTCOME.pack(number, busy_s, self._peak_rss_bytes(begin + busy_s)), payload)
        logs.set_task(None, 0)

    def _refusal(self, exc: BaseException) -> tuple[int, bytes]:
        """Return the reply to a task whose arguments cannot be unpickled because of this error."""
        if not isinstance(exc, byvalue.UnknownClassError):
            return Reply.UNREAD, pack_error(exc)
        if self._awaited:  # the class will be sent again in another form
            self._begun[0] = 0
            return Reply.RETURNED, b""
        return Reply.UNREAD, pack_error(self._load_error or exc)

    def _noted(self, arguments: list[Any]) -> Iterable[Any]:
        """Return the items of a chunk; if calls have a time limit, record when each begins."""
        return map(self._note_time, arguments) if self._notes_times else arguments

    def _note_time(self, item: Any) -> Any:
        self._begun[1] = time.monotonic_ns()
        return item

    def _peak_rss_bytes(self, now: float) -> int:
        """Return the peak resident memory, read only a few times a second since it costs a system call."""
        if now >= self._next_peak:
            self._next_peak = now + _PEAK_S
            self._peak = peak_rss_bytes()
        return self._peak


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def _end_fork() -> NoReturn:
    """End a child that a task has forked: requests and replies on the socket belong to its parent."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _set_up(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the user's `setup_worker` hook, once per callable."""
    method = unforkable.innermost(function)
    if not isinstance(method, types.MethodType):
        return function
    owner: Any = method.__self__
    # Looked up on the class: a `__getattr__` may raise anything, and the hook of instances is not a hook of the class.
    if callable(getattr(type(owner), "setup_worker", None)):
        try:
            owner.setup_worker()
        except BaseException as exc:  # noqa: BLE001 -- becomes the error of its tasks
            return _failing(exc, "setup_worker failed")
    return function


def _failing(exc: BaseException, what: str) -> Callable[..., Any]:
    text = "".join(traceback.format_exception(exc))

    def fail(*_: Any, **__: Any) -> Any:
        raise ParallelError(f"{what}: {type(exc).__name__}: {exc}\n{text}")

    return fail


def _module_to_blame(exc: BaseException) -> str | None:
    """Return the module that must travel by value because this worker cannot import it; None for other errors."""
    if isinstance(exc, process_role.NestedRunError):
        name = exc.module_name
    elif isinstance(exc, ModuleNotFoundError):
        name = exc.name
    elif isinstance(exc, ImportError):
        frames = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(exc.__traceback__)
                  if frame.f_code.co_name == "<module>")  # fmt: skip
        name = next(frames, None)
    else:
        name = None
    return None if name in (None, "__main__") else str(name)


def unpack_outcome(data: bytes) -> tuple[int, float, int, memoryview]:
    """Return the task number, busy seconds, peak resident bytes and packed result of a reply."""
    number, busy_s, peak = OUTCOME.unpack_from(data)
    return number, busy_s, peak, memoryview(data)[OUTCOME.size :]
