"""Make calls into a library whose threads do not survive fork(2) in a process where that is safe.

obstore, like other libraries with threads, hangs in the forked child of a process that has used it, and steals the
parent's responses, so that the parent hangs, too. torch's DataLoader forks its workers on Linux until Python 3.14. So
such a child never calls it: it starts a helper, a fresh Python process that does, and talks to it through a socket.

    this process has used it, or no ancestor had ──> asked(call, ...) ──> call(...)
    forked from one that had                     ──> asked(call, ...) ──socket──> helper: call(...)

The helper costs a tenth of a second, once, and a tenth of a millisecond for each 100 KB. It ends when its process does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar, final

from datamat.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

_has_used = _must_not_use = False
_helper: _Helper | None = None
_starting = threading.Lock()


def asked(call: Callable[..., _T], *args: Any) -> _T:
    """Make a call in a process that is allowed to, and return its result.

    Args:
        call: function of a module, with picklable arguments, result and errors.
        args: its arguments.

    Raises:
        OutputError: the helper has ended.
    """
    global _has_used, _helper  # noqa: PLW0603 -- state of this process
    if not _must_not_use:
        _has_used = True
        is_main = threading.current_thread() is threading.main_thread()
        return _interruptible(call, *args) if is_main else call(*args)
    with _starting:
        if _helper is None:
            _helper = _Helper()
    return _helper.ask(call, *args)


def _interruptible(call: Callable[..., _T], *args: Any) -> _T:
    """Make a call and return its result; Ctrl-C ends the wait at once, which the call might ignore for minutes."""
    answer: Future[_T] = Future()

    def make() -> None:
        try:
            answer.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001 -- the caller raises it
            answer.set_exception(error)

    threading.Thread(target=make, name="datamat-folder", daemon=True).start()
    return answer.result()


def _after_fork() -> None:
    global _must_not_use, _helper, _starting
    _must_not_use, _helper, _starting = _must_not_use or _has_used, None, threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)


@final
class _Helper:
    """A fresh process that makes calls for this one, several at a time; it ends when this one does."""

    def __init__(self) -> None:
        self._control, its = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({its.fileno()})"
        with its:
            self._process = subprocess.Popen(  # noqa: S603 -- code of this module
                [sys.executable, "-c", code], pass_fds=[its.fileno()], stdin=subprocess.DEVNULL
            )
        self._idle: list[Connection] = []

    def ask(self, call: Callable[..., _T], *args: Any) -> _T:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connected()
        try:
            connection.send((call, args))
            is_error, found = connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended(error) from None
        self._idle.append(connection)
        if is_error:
            raise found
        return found  # type: ignore[no-any-return]

    def _connected(self) -> Connection:
        mine, its = socket.socketpair()
        with its:
            try:
                socket.send_fds(self._control, [b"+"], [its.fileno()])
            except OSError as error:
                mine.close()
                raise self._ended(error) from None
        return Connection(mine.detach())

    @staticmethod
    def _ended(error: Exception) -> OutputError:
        return OutputError(
            f"the process that reads for this forked one has ended ({type(error).__name__}); start worker processes by "
            'multiprocessing_context="forkserver" or "spawn" instead'
        )


def serve(descriptor: int) -> None:
    """Answer calls in the helper, until the process that started it ends.

    Args:
        descriptor: descriptor of the socket over which the process sends connections.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the calling process
    control = socket.socket(fileno=descriptor)
    while True:
        said, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not said:
            return
        threading.Thread(target=_answer, args=(Connection(descriptors[0]),), daemon=True).start()


def _answer(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            call, args = connection.recv()
            try:
                answer = False, call(*args)
            except Exception as error:  # noqa: BLE001 -- the caller raises it
                answer = True, error
            connection.send(answer)
