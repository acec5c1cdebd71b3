"""Runs programs in fresh interpreters, as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("fork", "forkserver", "spawn")


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of this process, in which any folder can import datamat, and `variables`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


def python(*arguments: str, timeout: float = 55, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments."""
    return subprocess.run(
        [sys.executable, *arguments],
        **{"env": environment(), "capture_output": True, "text": True, "timeout": timeout, "check": False, **options},
    )


def run(program: str, *arguments: str, **options: Any) -> str:
    """Run a program that succeeds and writes no error; return what it printed."""
    done = python("-c", textwrap.dedent(program), *arguments, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def start(program: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a program whose output the caller reads."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), *arguments],
        **{"env": environment(), "stdout": subprocess.PIPE, "text": True, **options},
    )
