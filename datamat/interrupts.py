"""Ctrl-C and SIGTERM, while a run is under way: it ends like at an error, and its state stays good to go on from."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator

__all__ = ["raise_swallowed", "signals_raised"]

_heard: list[int] = []  # in the block that runs now


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Have SIGINT raise `KeyboardInterrupt`, and SIGTERM `SystemExit(143)`, in the block; then all is as before.

    Only the main thread hears signals: elsewhere nothing changes. A signal that is ignored, as SIGINT is below nohup,
    stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    _heard.clear()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and handler is not None:  # None: set by C code, which we could not restore
                before[number] = handler
                signal.signal(number, _raise)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _heard.clear()


def raise_swallowed() -> None:
    """Raise once more what a signal has raised in the block, if it goes on all the same; for its loops.

    Python swallows exceptions in finalizers, in callbacks of C code and in functions that run at a fork.
    """
    if _heard and threading.current_thread() is threading.main_thread():
        _raise(_heard[-1], None)


def _raise(number: int, _frame: types.FrameType | None) -> NoReturn:
    _heard.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)  # what a shell says of a process that a signal ended
