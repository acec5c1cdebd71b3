"""What becomes of calls that are not as a pool wishes: ours beside four others.

    uv run --with loky --with mpire python benchmarks/pools.py [--limit 60]

Each case is a program of its own, with two workers:

- `lock`: four calls of a bound method whose `self` holds a `threading.RLock`.
- `lambda`: four calls of a lambda.
- `logs`: how many of four records that workers log reach the handler of the program's root logger.
- `killed`: how many of eight calls have a result if the fourth one kills its worker.
- `guard`: four calls in a script without `if __name__ == "__main__"`.

The start method is given where a pool takes one; loky starts its workers by fork and exec, pathos by fork. A program
that takes longer than the limit, in seconds, hangs. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys

SETUP = """
import logging, multiprocessing, os, signal, sys, threading, time

class Job:
    def __init__(self, lock=None):
        self.lock = lock
    def locked(self, x):
        with self.lock:
            return x + 1
    def log(self, x):
        logging.getLogger("job").warning("hello %d", x)
        return x
    def kill(self, x):
        if x == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return x

class Heard(logging.Handler):
    records = 0
    def emit(self, record):
        self.records += 1
"""
POOLS = {
    ("datamat", "fork"): "from datamat.parallel import PathosExecutor; pool = PathosExecutor(2, start_method='fork')",
    ("datamat", "spawn"): "from datamat.parallel import PathosExecutor; pool = PathosExecutor(2, start_method='spawn')",
    ("concurrent.futures", "fork"): "from concurrent.futures import ProcessPoolExecutor as P; pool = P(2)",
    ("concurrent.futures", "spawn"): (
        "from concurrent.futures import ProcessPoolExecutor as P; "
        "pool = P(2, mp_context=multiprocessing.get_context('spawn'))"
    ),
    ("loky", "exec"): "from loky import ProcessPoolExecutor as P; pool = P(2)",
    ("mpire", "fork"): "from mpire import WorkerPool; pool = WorkerPool(2, start_method='fork', use_dill=True)",
    ("mpire", "spawn"): "from mpire import WorkerPool; pool = WorkerPool(2, start_method='spawn', use_dill=True)",
    ("pathos", "fork"): "from pathos.pools import ProcessPool; pool = ProcessPool(2)",
}
SUBMIT = {"mpire": "pool.apply_async(f, (x,))", "pathos": "pool.apipe(f, x)"}
CASES = {
    "lock": "f, count, heard = Job(threading.RLock()).locked, 4, None",
    "lambda": "f, count, heard = (lambda x: x + 1), 4, None",
    "logs": "f, count, heard = Job().log, 4, Heard(); logging.getLogger().addHandler(heard)",
    "killed": "f, count, heard = Job().kill, 8, None",
    "guard": "f, count, heard = Job().log, 4, None",
}
CALLS = """
    calls, results, errors, until = [SUBMIT for x in range(count)], 0, [], time.monotonic() + 20
    for call in calls:
        try:
            (call.get if hasattr(call, "get") else call.result)(max(until - time.monotonic(), 0.1))
            results += 1
        except BaseException as error:
            errors.append(type(error).__name__)
    if heard is not None:
        time.sleep(1)  # records may come behind the results
        results = heard.records
    print("OUTCOME", f"{results} of {count}", *sorted(set(errors)), flush=True)
    getattr(pool, "shutdown", getattr(pool, "terminate", None))()
"""


def program(case: str, pool: str, made: str) -> str:
    """Return the text of a program."""
    calls = CALLS.replace("SUBMIT", SUBMIT.get(pool, "pool.submit(f, x)"))
    begin = "if True:" if case == "guard" else 'if __name__ == "__main__":'
    return f"{SETUP}\n{begin}\n    {CASES[case]}\n    {made}\n{calls}"


def outcome(text: str, limit_s: float, place: str) -> str:
    """Run a program; return what it prints, or how it ended."""
    with open(place, "w") as file:
        file.write(text)
    command = subprocess.Popen(
        [sys.executable, place], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        printed, how = command.communicate(timeout=limit_s)[0], f"exit code {command.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(command.pid, signal.SIGKILL)
        printed, how = command.communicate()[0], "hangs"
    found = [line.removeprefix("OUTCOME ") for line in printed.splitlines() if line.startswith("OUTCOME ")]
    return ", ".join([*found[:1], *([how] if how != "exit code 0" else [])])


def main() -> None:
    """Print a table of the outcomes."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--cases", default=",".join(CASES))
    given = parser.parse_args()
    pools = {one: made for one, made in POOLS.items() if importlib.util.find_spec(one[0].split(".")[0])}
    with tempfile.TemporaryDirectory() as folder:
        for case in given.cases.split(","):
            for (pool, method), made in pools.items():
                found = outcome(program(case, pool, made), given.limit, os.path.join(folder, "program.py"))
                print(f"{case:8} {pool:20} {method:6} {found}", flush=True)


if __name__ == "__main__":
    main()
