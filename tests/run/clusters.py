"""Engines as processes of their own, which tests may kill."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


def wait_for(found, *, seconds=50):
    """Return what a function finds, once it finds something."""
    until = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < until, f"{found} has found nothing for {seconds} s"
        time.sleep(0.02)
    return value


def waiting_pids(flags):
    """Return the processes that wait in the row that is held."""
    return {int(path.name.partition("-")[2]) for path in pathlib.Path(flags).glob("at-*")}


def environment(*first):
    """Return an environment in which programs find datamat, the job of the tests, and before them `first`."""
    path = [*map(str, first), str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "RAY_AUTH_MODE": "disabled"}


class Programs:
    """Processes that end with a test."""

    def __init__(self, folder):
        self.folder = folder
        self.running = []

    def start(self, *command, path=()):
        """Start a Python program."""
        with open(self.folder / f"log-{len(self.running)}.txt", "w") as log:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)], cwd=self.folder, env=environment(*path), stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def kill(self, process):
        """Kill a process, and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self):
        for process in self.running:
            self.kill(process)


class DaskCluster:
    """A scheduler and workers of Dask, one thread each.

    Args:
        programs: starts and ends them.
        num_workers: number of workers.
        path: folders that workers look for modules in first.
    """

    def __init__(self, programs, num_workers=2, path=()):
        self.programs = programs
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.start_scheduler()
        for _ in range(num_workers):
            self.start_worker(path)

    def start_scheduler(self):
        """Start the scheduler, always at the same address."""
        self.scheduler = self.programs.start(
            "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", self.port, "--no-dashboard"
        )

    def start_worker(self, path=()):
        """Start a worker, which ends with the scheduler that it finds."""
        return self.programs.start(
            "-m", "distributed.cli.dask_worker", self.address, "--nthreads", 1, "--no-nanny", "--no-dashboard",
            "--local-directory", self.programs.folder, path=path,
        )  # fmt: skip
