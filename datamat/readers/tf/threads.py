"""Functions of users, run in threads of this process, for which those of TensorFlow wait.

TensorFlow's `PyFuncOp` ends the Python thread state of its thread after each call. `PyGILState_Release` then sets the
state's counter to 0 and frees what `threading.local` holds: a transform's copy for the thread, in which kornia keeps
what it drew last. If a tensor there is a view, torch takes the GIL by pybind11 to free it: the counter goes to 1 and
back to 0, which deletes the state, and `PyGILState_Release` deletes it again (seen in gdb with torch 2.13, TensorFlow
2.21 and Python 3.11: the process dies). Also, a pipeline of albumentations would be copied for each sample.
"""

from __future__ import annotations

import functools
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = [
    "in_own_thread",
]


_idle: list[tuple[SimpleQueue[Callable[[], Any]], SimpleQueue[tuple[Any, BaseException | None]]]] = []
"""Threads of Python, as many as there were calls at a time. They do not keep the program from ending."""


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns, or raise what it raises, in one of the threads."""
    try:
        thread = _idle.pop()
    except IndexError:
        thread = SimpleQueue(), SimpleQueue()
        threading.Thread(target=_answer, args=thread, name="datamat-call", daemon=True).start()
    calls, answers = thread
    calls.put(functools.partial(function, *arguments))
    found, error = answers.get()
    _idle.append(thread)
    if error is not None:
        raise error
    return found


def _answer(calls: SimpleQueue[Callable[[], Any]], answers: SimpleQueue[tuple[Any, BaseException | None]]) -> None:
    while True:
        answers.put(_outcome(calls.get()))  # without a name for it, so that its memory can be reused


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 -- `call` raises it where it is waited for
        return None, error


def in_own_thread(function: Callable[..., Any], *, is_cheap: bool = False) -> Callable[..., Any]:
    """Return a function that has one of the own threads run another.

    Args:
        function: the other one.
        is_cheap: whether it keeps nothing for a thread and may take less time than the way to another one, 50 us: then
            it goes there only where torch is loaded, of which some module may keep a tensor for the thread.
    """

    def call(*arguments: Any) -> Any:
        if is_cheap and "torch" not in sys.modules:
            return function(*arguments)
        return _called(function, *arguments)

    return call
