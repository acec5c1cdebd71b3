"""The example runs as users run it, and its benchmark companions start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    """Run a script of the repository from another folder, and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / arguments[0]), *arguments[1:]], capture_output=True, text=True, timeout=55,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_of_many_models_prints_its_table():
    """It compares one process with two, which give the same result."""
    lines = run("examples/many_models.py", "--targets", "60").splitlines()

    assert lines[0] == "60 targets"
    assert lines[2].split()[0] == "1"
    assert lines[3].split()[0] == "2"


def test_dispatch_benchmark_compares_what_is_installed():
    """At least our pool, the standard library's and that of pathos."""
    output = run(
        "benchmarks/dispatch.py",
        "--rounds",
        "1",
        "--tasks",
        "200",
        "--cheap",
        "5000",
        "--sleeps",
        "50",
        "--ideal",
        "0.1",
    )

    for name in ("datamat", "multiprocessing.Pool", "pathos ProcessPool", "concurrent.futures"):
        assert name in output
