"""Threads that decode, of which there are fewer at the end of a program than in its course."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DecodingThreads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_TOO_LATE = "cannot schedule new futures"  # after shutdown, of the executor or of the interpreter


class DecodingThreads(concurrent.futures.ThreadPoolExecutor):
    """A thread pool that other threads can go on with when the main thread has ended.

    Python lets the program go on as long as there are threads to wait for, but executors take nothing more from them:
    what they submit then is done at once, by the thread that does.
    """

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> concurrent.futures.Future[_T]:
        """Return the future result of a call."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if _TOO_LATE not in str(error):
                raise
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- whoever asks for the result gets it
            done.set_exception(error)
        return done
