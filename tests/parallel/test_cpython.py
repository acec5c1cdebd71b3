"""CPython's own executor tests pass against `PathosExecutor`; `cpython_runner` says what is skipped, and why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_TESTS_HERE = 77


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_executor_tests_of_cpython_pass(method: str) -> None:
    """All mixins of test_concurrent_futures, for each start method."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cpython_runner.py")), method],
        capture_output=True, text=True, timeout=380, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    if done.returncode == NO_TESTS_HERE:
        pytest.skip("this interpreter has no tests; Debian has them as libpython3.11-testsuite")
    assert done.returncode == 0, done.stderr[-5000:]
