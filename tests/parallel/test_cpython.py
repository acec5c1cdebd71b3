"""CPython's own executor tests pass against `PathosExecutor`; `cpython_runner` says what is skipped, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh import METHODS, python

RUNNER = Path(__file__).with_name("cpython_runner.py")
NO_TESTS_HERE = 77


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", METHODS)
def test_executor_tests_of_cpython_pass(method: str) -> None:
    done = python(str(RUNNER), method, timeout=380)
    if done.returncode == NO_TESTS_HERE:
        pytest.skip(
            f"{done.stdout.strip()}; install them (Debian: libpython3.11-testsuite), or name the Lib/test of a "
            "checkout of CPython in DATAMAT_CPYTHON_TESTS"
        )
    assert done.returncode == 0, done.stderr[-5000:]
