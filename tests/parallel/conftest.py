"""What the tests of `datamat.parallel` share."""

from __future__ import annotations

import copyreg
import threading
from typing import TYPE_CHECKING

import pytest
from fresh import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the argument `method` by every start method, on commit by those in `ON_COMMIT` of its module.

    A test of which all should run on commit is parametrized with `fresh.METHODS`.
    """
    marks = metafunc.definition.iter_markers("parametrize")
    if "method" in metafunc.fixturenames and not any("method" in mark.args[0] for mark in marks):
        on_commit = getattr(metafunc.module, "ON_COMMIT", ("fork",))
        others = [pytest.param(name, marks=pytest.mark.long) for name in METHODS if name not in on_commit]
        metafunc.parametrize("method", [*on_commit, *others])


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
    """Let no test leave a pool behind; one that it shut down without waiting may still be ending."""
    yield
    for thread in _pool_threads():
        thread.join(timeout=60)
    assert not _pool_threads(), "a test left a pool running"


@pytest.fixture(autouse=True)
def _exceptions_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what dask has done if another test of this process imported it.

    Its tblib teaches copyreg how to pickle every exception that is defined by then.
    """
    for kind in list(copyreg.dispatch_table):
        if isinstance(kind, type) and issubclass(kind, BaseException):
            monkeypatch.delitem(copyreg.dispatch_table, kind)
