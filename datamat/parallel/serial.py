"""Calls run at once in this process: what a pool does inside a worker, whose own pool has all the cores."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_now"]


def run_now(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
    """Return a finished future of the call."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    try:
        result = function(*args, **kwargs)
    except BaseException as exc:  # noqa: BLE001 -- a future carries any error to whoever asks for the result
        future.set_exception(exc)
    else:
        future.set_result(result)
    return future
