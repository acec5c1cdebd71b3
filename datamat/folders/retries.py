"""Retry transient errors, with growing waits.

Transient are server errors (5xx), requests to slow down (429, 503), silence, and broken connections. Each filesystem of
fsspec raises the errors of its client, or its own errors caused by those.
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

_T = TypeVar("_T")

ATTEMPTS = 5
_FIRST_WAIT_S, _MOST_WAIT_S, _MOST_ASKED_WAIT_S = 0.2, 8.0, 30.0
_SOON = frozenset({408, 425, 429})  # transient statuses below 500
_NEVER = frozenset({501, 505, 511})
_FINAL = (
    FileNotFoundError,
    KeyError,  # from fsspec's memory filesystem, for a missing file
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
# Waits are drawn independently in each process, from an unseeded generator, so that many readers do not synchronise.
_jitter = random.SystemRandom()


def is_transient(error: BaseException) -> bool:
    """Return True if a retry may succeed, which excludes missing and forbidden files."""
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
    """Yield an error and its causes: fsspec reports a server that is down as a missing file."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error or its causes; None if there is none."""
    return next((status for one in reversed([*chain_of(error)]) if (status := _own_status(one)) is not None), None)


def _own_status(error: BaseException) -> int | None:
    if type(error).__module__ == "aiohttp.http_exceptions":  # a broken connection, to which it gives status 400
        return None
    # One after the other: aiohttp warns about deprecated ones.
    found = next((getattr(error, name) for name in ("status", "status_code", "code") if hasattr(error, name)), None)
    found = getattr(getattr(error, "response", None), "status_code", None) if found is None else found
    return found if type(found) is int and 100 <= found < 600 else None


def wait_before(attempt: int, error: BaseException) -> None:
    """Wait before attempt 1, 2, ...: twice as long each time, with random jitter, or as long as the server asks."""
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
    """Return True if a host did not answer at all, and not because this machine has no network."""
    for one in chain_of(error):
        if isinstance(one, socket.gaierror):
            return one.errno != socket.EAI_AGAIN
        if isinstance(one, (TimeoutError, ConnectionRefusedError)):
            return True
    return False


def retried(call: Callable[[], _T], attempts: int = ATTEMPTS) -> _T:
    """Make a call, repeatedly while its errors are transient, and return its result.

    Args:
        call: repeatable function.
        attempts: maximum number of calls.
    """
    for attempt in range(1, attempts):
        try:
            return call()
        except Exception as error:  # each filesystem raises what the client below it does
            if not is_transient(error):
                raise
            wait_before(attempt, error)
    return call()
