"""The worker process: it reads frames, runs tasks one after the other, and answers each of them.

    parent ── CODE, TASK, FORGET, QUIT ──────────────────────────> worker
    parent <── READY, DONE, FAILED, RETURNED, LOG, RETIRED, ... ─── worker      (one socket pair each)
    parent <── what it has begun, where it hangs or crashed ─────── worker      (a file in memory, `blackbox`)
    parent <── nothing, ever ────────────────────────────────────── worker      (a second socket pair, the lifeline)

The worker ends when its parent ends: the kernel sends SIGKILL as soon as the parent's end of the lifeline is closed,
which needs neither the GIL nor the end of the current task.
"""

from __future__ import annotations

import faulthandler
import fcntl
import functools
import logging
import multiprocessing
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datamat.errors import ParallelError
from datamat.parallel import (
    affinity,
    byvalue,
    inherited,
    logs,
    namespaces,
    outcomes,
    payloads,
    pickling,
    role,
    shipment,
)
from datamat.parallel.channel import WorkerChannel
from datamat.parallel.contexts import forget_idle_tracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from datamat.parallel.blackbox import BlackBox

__all__ = [
    "CODE",
    "OUTCOME",
    "TASK",
    "TRACE_SIGNAL",
    "Mode",
    "Reply",
    "Request",
    "WorkerConfig",
    "bequeath",
    "main",
    "unpack_outcome",
]


# Kinds of frames. Not Enums, whose members cost 0.15 us at each look (Python 3.11).


class Request:
    """What the parent asks of a worker."""

    CODE = 1  # CODE header, shipment
    FORGET = 2  # CODE header
    TASK = 3  # TASK header, arguments
    QUIT = 4


class Reply:
    """What a worker tells its parent."""

    READY = 10
    DONE = 11  # OUTCOME header, result
    FAILED = 12  # OUTCOME header, exception and traceback
    RETURNED = 13  # OUTCOME header: not run, its code has not arrived in a usable form
    LOG = 14
    BY_VALUE = 15  # CODE header, name of a module to send by value
    BROKEN = 16  # the initializer failed: traceback
    RETIRED = 17  # it takes no more tasks; those that it has not answered are not begun


class Mode:
    """How the arguments of a task are laid out."""

    CALL = 0  # (args, kwargs) of one call
    CHUNK = 1  # a list of args of several calls; the result is a list of (ok, value)


CODE = struct.Struct("<Q")  # code id
TASK = struct.Struct("<QQB")  # task number, code id, mode
OUTCOME = struct.Struct("<QdQ")  # task number, busy seconds, peak resident bytes

# Not SIGUSR1 or SIGUSR2, which users' code may have taken.
TRACE_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (2 if hasattr(signal, "SIGRTMAX") else 0)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How a worker sets itself up.

    Attributes:
        name: process name, as log records show it.
        mask: CPUs to run on; None leaves them alone.
        num_threads: threads that BLAS, OpenMP, OpenCV and the like may start.
        logging: levels of the parent's loggers.
        initializer: stream of the capsule of (initializer, initargs), or the number under which that is inherited; None
            if there is none.
        environment: the parent's environment, where the worker does not inherit it.
        umask: the parent's, where the worker does not inherit it.
        max_tasks: tasks after which the worker leaves; None for no limit.
        authkey: what processes of this program prove themselves with to `multiprocessing` managers.
    """

    name: str
    mask: frozenset[int] | None
    num_threads: int
    logging: logs.LoggingState
    initializer: bytes | int | None
    environment: dict[str, str] | None
    umask: int | None
    max_tasks: int | None
    authkey: bytes


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of getrusage
_PEAK_S = 0.2

_inherited: dict[int, tuple[Any, list[inherited.Hazard]]] = {}


def bequeath(code_id: int, obj: Any, hazards: list[inherited.Hazard]) -> Callable[[], None]:
    """In the parent: let the workers that are forked from now on inherit `obj` under this id.

    Returns:
        A function that ends it, to be called after the fork.
    """
    _inherited[code_id] = (obj, hazards)

    def end() -> None:
        _inherited.pop(code_id, None)

    return end


# ---------------------------------------------------------------- set-up


def main(config: WorkerConfig, task_socket: socket.socket, lifeline: socket.socket, box: BlackBox) -> None:
    """Run a worker until the parent sends QUIT or goes away."""
    role.become_worker()
    _set_signals()
    _hold_lifeline(lifeline)
    faulthandler.enable(box, all_threads=True)
    faulthandler.register(TRACE_SIGNAL, box, all_threads=True, chain=True)  # chain: and then end
    forget_idle_tracker()
    multiprocessing.current_process().authkey = config.authkey  # the standard library's, beside that of multiprocess
    if config.environment is not None:
        os.environ.clear()
        os.environ.update(config.environment)
    if config.umask is not None:
        os.umask(config.umask)
    affinity.limit_thread_environment(config.num_threads)
    affinity.limit_loaded_libraries(config.num_threads)
    affinity.bind(config.mask)
    channel = WorkerChannel(task_socket)
    namespaces.remember_globals("__main__")
    logs.forward_in_worker(functools.partial(channel.send, Reply.LOG), config.logging, config.name)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        if _initialize(config, channel):
            channel.send(Reply.READY)
            _Loop(channel, box.begun(), config.max_tasks).run()


def _set_signals() -> None:
    """Leave Ctrl-C to the parent, and undo handlers and masks that a fork inherited."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, TRACE_SIGNAL})


def _hold_lifeline(lifeline: socket.socket) -> None:
    """Have this process killed when the parent's end of `lifeline` closes.

    Nothing is ever sent to the worker on it, so its only event is the hang-up. See fcntl(2), F_SETSIG.
    """
    if hasattr(fcntl, "F_SETSIG"):
        descriptor = lifeline.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
        with suppress(BlockingIOError):  # the parent may have ended before that
            if not lifeline.recv(1, socket.MSG_DONTWAIT):
                os._exit(1)
    else:
        threading.Thread(target=_wait_for_hang_up, args=(lifeline,), daemon=True).start()


def _wait_for_hang_up(lifeline: socket.socket) -> None:
    lifeline.setblocking(True)
    with suppress(OSError):
        lifeline.recv(1)
    os._exit(1)


def _initialize(config: WorkerConfig, channel: WorkerChannel) -> bool:
    """Run the initializer; say whether the worker can go on."""
    if config.initializer is None:
        return True
    try:
        if isinstance(config.initializer, int):
            (initializer, arguments), _ = _inherited.pop(config.initializer)
        else:
            initializer, arguments = pickling.load_code(config.initializer)
        initializer(*arguments)
    except BaseException:  # handed to the parent, which ends the pool with it
        logging.getLogger("datamat.parallel").critical("the initializer of a worker failed", exc_info=True)
        channel.send(Reply.BROKEN, traceback.format_exc().encode(errors="backslashreplace"))
        return False
    return True


# ---------------------------------------------------------------- tasks


class _Loop:
    """Reads requests and answers them."""

    def __init__(self, channel: WorkerChannel, begun: memoryview, max_tasks: int | None) -> None:
        self._channel = channel
        self._begun = begun
        self._remaining = max_tasks
        self._codes: dict[int, Callable[..., Any]] = {}
        self._peak = 0
        self._next_peak = 0.0

    def run(self) -> None:
        """Serve until QUIT."""
        while True:
            kind, data = self._channel.receive()
            if kind == Request.TASK:
                self._serve(data)
                if self._remaining == 0 or role.is_retiring():
                    self._channel.send(Reply.RETIRED)
                    return
            elif kind == Request.CODE:
                self._load(data)
                self._begun[0] = 0
            elif kind == Request.FORGET:
                self._codes.pop(CODE.unpack_from(data)[0], None)
                _inherited.pop(CODE.unpack_from(data)[0], None)
            else:
                return
            del data

    def _load(self, data: bytes) -> None:
        """Rebuild a callable; its tasks are returned, or fail with the reason, if that is not possible."""
        code_id = CODE.unpack_from(data)[0]
        self._begun[0] = code_id
        self._codes.pop(code_id, None)
        try:
            with role.importing():
                function = pickling.load_code(*shipment.unpack(memoryview(data)[CODE.size :]))
        except BaseException as exc:  # noqa: BLE001 -- becomes the error of the tasks that need this code
            module = _module_to_blame(exc)
            if module is not None and not byvalue.is_forced(module):
                byvalue.force_by_value(module)
                self._channel.send(Reply.BY_VALUE, CODE.pack(code_id), module.encode())
            else:
                self._codes[code_id] = _failing(exc, "the callable could not be rebuilt in the worker")
            return
        self._codes[code_id] = _set_up(function)

    def _function(self, code_id: int) -> Callable[..., Any] | None:
        if code_id not in self._codes and code_id in _inherited:
            function, hazards = _inherited.pop(code_id)
            for hazard in hazards:
                hazard.repair()
            self._codes[code_id] = _set_up(function)
        return self._codes.get(code_id)

    def _serve(self, data: bytes) -> None:
        number, code_id, mode = TASK.unpack_from(data)
        self._begun[0] = number  # before anything that may kill: the arguments, and the user's `setup_worker`
        function = self._function(code_id)
        if function is None:
            self._begun[0] = 0
            self._channel.send(Reply.RETURNED, OUTCOME.pack(number, 0.0, 0))
            return
        if self._remaining is not None:
            self._remaining -= 1
        logs.set_task(function, number)
        begin = time.perf_counter()
        try:
            arguments = payloads.loads_data(memoryview(data)[TASK.size :])
            if mode == Mode.CALL:
                result = outcomes.call(function, *arguments)
            else:
                result = [outcomes.call_item(function, item) for item in arguments]
            payload, reply = payloads.dumps_data(result, homewards=True), Reply.DONE
        except BaseException as exc:  # noqa: BLE001 -- an error of the task, raised again by its future
            payload, reply = outcomes.pack_error(exc), Reply.FAILED
        busy_s = time.perf_counter() - begin
        arguments = result = None
        self._channel.send(reply, OUTCOME.pack(number, busy_s, self._peak_rss_bytes(begin + busy_s)), payload)
        logs.set_task(None, 0)

    def _peak_rss_bytes(self, now: float) -> int:
        """Return the highest resident memory so far, asked anew a few times a second: it costs a system call."""
        if now >= self._next_peak:
            self._next_peak = now + _PEAK_S
            self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
        return self._peak


def _set_up(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the user's `setup_worker` hook, once for each callable that arrives."""
    owner = function
    while isinstance(owner, functools.partial):
        owner = owner.func
    hook = getattr(getattr(owner, "__self__", None), "setup_worker", None)
    if callable(hook) and isinstance(owner, types.MethodType):
        try:
            hook()
        except BaseException as exc:  # noqa: BLE001 -- becomes the error of the tasks that need it
            return _failing(exc, "setup_worker failed")
    return function


def _failing(exc: BaseException, what: str) -> Callable[..., Any]:
    text = "".join(traceback.format_exception(exc))

    def fail(*_: Any, **__: Any) -> Any:
        raise ParallelError(f"{what}: {type(exc).__name__}: {exc}\n{text}")

    return fail


def _module_to_blame(exc: BaseException) -> str | None:
    """Return the module that must travel by value because this worker cannot import it, None if that is not it."""
    if isinstance(exc, role.NestedRunError):
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
    """Return task number, busy seconds, peak resident bytes and the packed result of a reply."""
    number, busy_s, peak = OUTCOME.unpack_from(data)
    return number, busy_s, peak, memoryview(data)[OUTCOME.size :]
