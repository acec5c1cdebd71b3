"""What the tests of `datamat.parallel` share."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=["fork", *(pytest.param(name, marks=pytest.mark.long) for name in ("forkserver", "spawn"))])
def method(request: pytest.FixtureRequest) -> str:
    """Run the test by fork, and in the long tier by the other start methods.

    The one test of a kind that needs them on commit is parametrized with `METHODS`.
    """
    return request.param


def _pool_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "datamat-dispatcher"]


@pytest.fixture
def pool_thread() -> Callable[[], threading.Thread]:
    """Return a function that finds the thread of the one pool that is running; it ends after the pool's workers."""

    def find() -> threading.Thread:
        (thread,) = _pool_threads()
        return thread

    return find


@pytest.fixture(autouse=True)
def _pools_end() -> Iterator[None]:
    """Let no test leave a pool behind."""
    yield
    assert not _pool_threads(), "a test left a pool running"
