"""What a cold start costs beside `import numpy`: imports, and jobs of ten and a thousand rows, in new interpreters.

    make bytecode && .venv/bin/python benchmarks/cold.py [--rounds 20] [--python OTHER/.venv/bin/python ...]

Every case is a new interpreter (`python -I -c CODE`), from its start to its end, worker processes included. All cases
run in turn in each round, so that a busy moment hits all alike; `--python` adds the interpreters of other checkouts, to
compare them in the same rounds. `wall` is the median in milliseconds, `cpu` the same of user and system time, also that
of child processes; behind each stands its ratio to `import numpy`. Issue 40 wants at most 2.3 for ten rows and 2.8 for
a thousand; `import datamat` is to stay below 30 ms more than an interpreter that imports nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

JOB = """import datamat
datamat.materialize(lambda n: {"x": n, "text": str(n)}, range(%d), "out", progress=False)"""
CASES = {
    "nothing": "pass",
    "import numpy": "import numpy",
    "import datamat": "import datamat",
    "Materializer": "from datamat import Materializer",
    "load": "from datamat import load",
    "numpy, pyarrow": "import numpy, pyarrow",
    "ten rows": JOB % 10,
    "thousand rows": JOB % 1000,
}


def measure(python: str, code: str) -> tuple[float, float]:
    """Run code in a new interpreter and an empty folder; return its milliseconds of wall and of processor time."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        process = subprocess.Popen([python, "-I", "-c", code], cwd=folder)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{python} ended with {process.returncode} at {code}")
    return 1000 * wall, 1000 * (used.ru_utime + used.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--python", action="append", default=[])
    options = parser.parse_args()
    pythons = [sys.executable, *options.python]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "pyarrow"))
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}, {options.rounds} rounds", flush=True
    )
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(options.rounds + 1):
        for name, code in CASES.items():
            for python in pythons:
                times = measure(python, code)
                if number:  # the first round fills the page cache
                    measured.setdefault((python, name), []).append(times)
    for python in pythons:
        print(f"\n{python}\n{'':16} {'wall':>14} {'cpu':>14}")
        numpy = [statistics.median(each) for each in zip(*measured[python, "import numpy"], strict=True)]
        for name in CASES:
            times = [statistics.median(each) for each in zip(*measured[python, name], strict=True)]
            print(f"{name:16}", *(f"{ms:7.1f} ({ms / base:.2f})" for ms, base in zip(times, numpy, strict=True)))


if __name__ == "__main__":
    main()
