"""What the tests of `datamat.parallel` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

METHODS = ("fork", "forkserver", "spawn")


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """Run the test once for each start method."""
    return request.param


@pytest.fixture(autouse=True)
def _pools_end() -> Iterator[None]:
    """Let no test leave a pool behind."""
    yield
    import threading

    left = [thread.name for thread in threading.enumerate() if thread.name == "datamat-dispatcher"]
    assert not left, "a test left a pool running"
