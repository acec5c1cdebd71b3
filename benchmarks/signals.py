"""From a signal to the end of the program: seconds, and processor time of the driver.

A run of 20,000 rows in many parts is interrupted in its middle, with TensorFlow imported beside it and without, while
other processes keep all cores busy:

    python benchmarks/signals.py

The last column is the ratio to the end of a program that has imported the same and is idle: what of it is datamat's.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

PROGRAM = """
import sys, time
if sys.argv[3] == "tensorflow":
    import tensorflow
import numpy as np
from datamat import DatasetWriter, Features, IndexRow, Materializer, Tensor, WorkerOptions


class Busy(DatasetWriter):
    name = "busy"
    features = Features({"x": Tensor((64,), "float32")})

    def index(self, source):
        return (IndexRow(f"k{number:06d}", "train", {"i": number}) for number in range(20_000))

    def read(self, row):
        begun = time.thread_time()
        while time.thread_time() - begun < 0.002:
            pass
        return {"x": np.full(64, row.fields["i"], np.float32)}


if sys.argv[2] == "idle":
    open(sys.argv[1], "w").close()
    time.sleep(600)
workers = WorkerOptions(num_workers=2, start_method=sys.argv[2])
Materializer(Busy(), None, sys.argv[1]).run(workers=workers, progress=False)
"""


def measure(method: str, imported: str, number: signal.Signals, num_burners: int) -> tuple[float, float]:
    """Return wall and processor seconds from the signal to the end."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_burners)]
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "out")
        command = [sys.executable, "-c", PROGRAM, str(output), method, imported]
        program = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while not (output.is_file() or any(output.glob(".datamat/parts/*/*.receipt"))):
                time.sleep(0.05)
            before = _processor_s(program.pid)
            begun = time.perf_counter()
            program.send_signal(number)
            # Its figures are there until it is waited for.
            os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
            return time.perf_counter() - begun, _processor_s(program.pid) - before
        finally:
            for process in (program, *burners):
                process.kill()
                process.wait()


def _processor_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--burners", type=int, default=os.cpu_count(), help="busy processes beside the run")
    arguments = parser.parse_args()
    print(f"{'imported':12} {'workers':12} {'signal':8} {'s':>6} {'cpu s':>6} {'ratio':>6}")
    for imported in ("nothing", "tensorflow"):
        for number in (signal.SIGINT, signal.SIGTERM):
            idle, _ = measure("idle", imported, number, arguments.burners)
            for method in ("fork", "forkserver", "spawn"):
                wall, used = measure(method, imported, number, arguments.burners)
                print(
                    f"{imported:12} {method:12} {number.name:8} {wall:6.2f} {used:6.2f} {wall / idle:6.1f}", flush=True
                )


if __name__ == "__main__":
    main()
