"""Runs users' functions in Python threads while TensorFlow's threads wait for them.

TensorFlow's `PyFuncOp` ends the Python thread state of its thread after each call. `PyGILState_Release` then sets the
state's counter to 0 and frees the contents of `threading.local`: the thread's copy of a transform, in which kornia
keeps its last draw. If a tensor there is a view, torch takes the GIL by pybind11 to free it: the counter goes to 1 and
back to 0, which deletes the state, and `PyGILState_Release` deletes it again (seen in gdb with torch 2.13, TensorFlow
2.21 and Python 3.11: the process dies). Also, an albumentations pipeline would be copied for each sample.
"""

from __future__ import annotations

import functools
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


_idle: list[tuple[SimpleQueue[Callable[[], Any]], SimpleQueue[tuple[Any, BaseException | None]]]] = []
"""Idle Python threads, at most as many as there were simultaneous calls. Daemons, so they do not block exit."""


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in one of the threads, and return its result or raise its error."""
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
        answers.put(_outcome(calls.get()))  # not bound to a name, so that its memory can be reused


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 -- `_called` raises it in the waiting thread
        return None, error


def in_own_thread(function: Callable[..., Any], *, is_cheap: bool = False) -> Callable[..., Any]:
    """Return a function that runs another in one of these threads.

    Args:
        function: the function to run.
        is_cheap: whether it stores nothing per thread and may take less than the 50 us of switching threads: then it
            switches only if torch is loaded, because some module may keep a tensor of torch per thread.
    """

    def call(*arguments: Any) -> Any:
        if is_cheap and "torch" not in sys.modules:
            return function(*arguments)
        return _called(function, *arguments)

    return call
