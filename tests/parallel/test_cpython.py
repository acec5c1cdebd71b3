"""CPython's own executor tests pass against `PathosExecutor`; `cpython_runner` says what is skipped, and why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("cpython_runner.py")
ROOT = Path(__file__).resolve().parents[2]
NO_TESTS_HERE = 77


@pytest.mark.timeout(400)
def test_executor_tests_of_cpython_pass(method: str) -> None:
    """All mixins of test_concurrent_futures run under each start method."""
    done = subprocess.run(
        [sys.executable, str(RUNNER), method],
        capture_output=True, text=True, timeout=380, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    if done.returncode == NO_TESTS_HERE:
        pytest.skip(
            f"{done.stdout.strip()}; install them (Debian: libpython3.11-testsuite), or name the Lib/test of a "
            "checkout of CPython in DATAMAT_CPYTHON_TESTS"
        )
    assert done.returncode == 0, done.stderr[-5000:]


def test_tests_of_cpython_are_looked_for_in_every_installation(tmp_path: Path) -> None:
    """They may be in pyenv, in uv or in a source checkout; if there are none, the places searched are listed."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    pyenv = tmp_path / f"pyenv/versions/{version}.99/lib/python{version}/test"
    uv = tmp_path / f"uv/cpython-{version}.99-linux-x86_64-gnu/lib/python{version}/test"
    homes = {"PYENV_ROOT": str(tmp_path / "pyenv"), "UV_PYTHON_INSTALL_DIR": str(tmp_path / "uv")}
    for folder in (pyenv, uv):
        folder.mkdir(parents=True)
    program = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import cpython_runner as runner;"
        "print(*map(str, runner.places(None))); print(runner.places(pathlib.Path('checkout/Lib/test')))"
    )

    printed = _python("-c", program, str(Path(__file__).parent), environment=homes).stdout
    missing = _python(str(RUNNER), "fork", "--suite", str(pyenv))

    assert str(pyenv) in printed
    assert str(uv) in printed
    assert printed.splitlines()[1] == "[PosixPath('checkout/Lib/test')]"
    assert missing.returncode == NO_TESTS_HERE
    assert str(pyenv) in missing.stdout


def _python(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=50, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )  # fmt: skip
