"""Calls in a worker, and their errors on the way to the caller: with the item, and with the traceback as text."""

from __future__ import annotations

import os
import reprlib
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from datamat.errors import ParallelError
from datamat.parallel import payloads

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call", "call_item", "pack_error"]

_HERE = os.path.dirname(__file__)


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call; its error says with what it was called."""
    try:
        return function(*args, **kwargs)
    except BaseException as exc:
        _note_item(exc, args, kwargs)
        raise


def call_item(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    """Return (True, result) or (False, packed error) of one item of a chunk."""
    try:
        return True, function(*args)
    except BaseException as exc:  # noqa: BLE001 -- an error of this item, raised where the item's result is asked for
        _note_item(exc, args, {})
        return False, pack_error(exc)


def _note_item(exc: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say in the exception which item it belongs to."""
    parts = [reprlib.repr(arg) for arg in args] + [f"{name}={reprlib.repr(arg)}" for name, arg in kwargs.items()]
    with suppress(Exception):  # a user's exception class may refuse notes
        exc.add_note(f"item: {', '.join(parts)} (process {os.getpid()})")


def pack_error(exc: BaseException) -> bytes:
    """Return the exception and its traceback, in words if the exception itself cannot travel."""
    trace = exc.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next  # users need not see our frames
    text = "".join(traceback.format_exception(type(exc), exc, trace))
    try:
        packed = payloads.dumps_data((exc, text), homewards=True)
        payloads.loads_data(packed)  # an exception whose __init__ takes other arguments fails only here
    except BaseException:  # noqa: BLE001 -- whatever its __reduce__ does
        notes = getattr(exc, "__notes__", [])
        plain = ParallelError(f"{type(exc).__qualname__}: {_text_of(exc)} (this exception cannot be pickled)")
        for note in notes:
            plain.add_note(str(note))
        packed = payloads.dumps_data((plain, text), homewards=True)
    return packed


def _text_of(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 -- a user's __str__
        return "<no text>"
