"""What the tests of `datamat.parallel` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

METHODS = ("fork", "forkserver", "spawn")


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """Run the test once for each start method."""
    return request.param


def _pool_threads() -> list[threading.Thread]:
    import threading

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
