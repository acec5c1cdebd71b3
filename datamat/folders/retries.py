"""What a server may soon do right is tried again, after waits that grow.

That is so for errors of the server (5xx), its request to slow down (429, 503), silence, and connections that it cut.
Each filesystem of fsspec raises what the client below it does, and some of them an error of their own from that one.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import time
from typing import TYPE_CHECKING, TypeVar

from datamat.errors import DatamatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


__all__ = ["ATTEMPTS", "chain_of", "is_transient", "is_unreachable", "reason_of", "retried", "status_of", "wait_before"]

_T = TypeVar("_T")

ATTEMPTS = 5
_FIRST_WAIT_S, _MOST_WAIT_S, _MOST_ASKED_WAIT_S = 0.2, 8.0, 30.0
_SOON = frozenset({408, 425, 429})  # statuses below 500 that pass
_NEVER = frozenset({501, 505, 511})
_FINAL = (
    FileNotFoundError,
    KeyError,  # of fsspec's memory, which has no such file
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
)
_FINAL_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOSYS, errno.EPERM, errno.EINVAL})
_FINAL_NAMES = frozenset(
    {"TooManyRedirects", "InvalidUrlClientError", "InvalidUrlRedirectClientError", "NonHttpUrlRedirectClientError",
     "ClientConnectorCertificateError"}
)  # fmt: skip
_NETWORK = ("aiohttp", "urllib3", "requests", "http", "httpx", "httpcore")
# Waits are drawn anew in each process, and from no generator that anyone seeds: many readers must not come together.
_jitter = random.SystemRandom()


def is_transient(error: BaseException) -> bool:
    """Return True if what failed may succeed when it is tried again: not where something is missing or forbidden."""
    chain = list(chain_of(error))
    if (status := status_of(error)) is not None:
        return status in _SOON or (status >= 500 and status not in _NEVER)
    last = chain[-1]
    if isinstance(last, _FINAL) or isinstance(error, DatamatError):
        return False
    if any(type(one).__name__ in _FINAL_NAMES for one in chain):
        return False
    if isinstance(last, OSError) and last.errno in _FINAL_ERRNO:
        return False
    return any(
        isinstance(one, (OSError, EOFError)) or type(one).__module__.partition(".")[0] in _NETWORK for one in chain
    )


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what caused it: fsspec reports a server that is down as a missing file."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error or of what caused it; None for none."""
    return next((status for one in reversed([*chain_of(error)]) if (status := _own_status(one)) is not None), None)


def _own_status(error: BaseException) -> int | None:
    if type(error).__module__ == "aiohttp.http_exceptions":  # a connection that was cut, which it gives status 400
        return None
    # One after the other: aiohttp warns of those that it has no more.
    found = next((getattr(error, name) for name in ("status", "status_code", "code") if hasattr(error, name)), None)
    found = getattr(getattr(error, "response", None), "status_code", None) if found is None else found
    return found if type(found) is int and 100 <= found < 600 else None


def wait_before(attempt: int, error: BaseException) -> None:
    """Wait before an attempt, from 1 on: twice as long each time, less what chance takes off, or as the server asks."""
    wait = min(_FIRST_WAIT_S * 2 ** (attempt - 1), _MOST_WAIT_S) * (0.5 + _jitter.random() / 2)
    for one in chain_of(error):
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            asked = float(one.headers["Retry-After"])  # type: ignore[attr-defined]
            wait = max(wait, min(asked, _MOST_ASKED_WAIT_S))
    time.sleep(wait)


def reason_of(error: BaseException) -> str:
    """Return the message of an error and of its causes: fsspec reports a server that is down as a missing file."""
    return ", from ".join(f"{type(one).__name__}: {' '.join(str(one).split())}" for one in chain_of(error))


def is_unreachable(error: BaseException) -> bool:
    """Return True if a host did not answer at all, and this machine is not to blame, as when it has no network."""
    for one in chain_of(error):
        if isinstance(one, socket.gaierror):
            return one.errno != socket.EAI_AGAIN
        if isinstance(one, (TimeoutError, ConnectionRefusedError)):
            return True
    return False


def retried(call: Callable[[], _T], attempts: int = ATTEMPTS) -> _T:
    """Return the result of a call, which is made several times while its errors are transient.

    Args:
        call: function that can be called again.
        attempts: most calls.
    """
    for attempt in range(1, attempts):
        try:
            return call()
        except Exception as error:  # each filesystem raises what the client below it does
            if not is_transient(error):
                raise
            wait_before(attempt, error)
    return call()
