"""Processes that a test file leaves behind: found, ended, and reported with the name of the file.

A process belongs to this session if it descends from it, if it was started with the session's environment (then it is
found even where its parent is gone), or if it is a fork that still holds the session's file. Each worker of xdist is a
session of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import time

import psutil
import pytest

VARIABLE = "DATAMAT_TEST_SESSION"
GRACE_S = 20.0
"""For processes that are on their way out."""


@functools.cache
def _session() -> str:
    """Mark this process and those that it starts from now on; return the mark."""
    mark = f"datamat-tests-{os.getpid()}"
    os.environ[VARIABLE] = mark
    os.memfd_create(mark)  # stays open: a fork inherits it, whatever becomes of its parents
    return mark


@pytest.fixture(scope="module", autouse=True)
def no_process_left(request: pytest.FixtureRequest):
    """Fail, under the name of the test file, where a process of it is alive when its last test has ended."""
    before = set(_processes(_session()))
    yield
    left = _wait_for_end(before)
    if left:
        descriptions = [_describe(process) for process in left]
        _kill(left)
        pytest.fail(f"{request.node.nodeid} left behind:\n" + "\n".join(descriptions), pytrace=False)


def _wait_for_end(before: set[psutil.Process]) -> list[psutil.Process]:
    """Return what is still there after the grace period."""
    gc.collect()  # pools in reference cycles end their workers now
    _end_servers()
    deadline = time.monotonic() + GRACE_S
    while left := [process for process in _processes(_session()) if process not in before]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def _end_servers() -> None:
    """End the servers that a program keeps for its next pool, datamat's and those of the standard library."""
    if processes := sys.modules.get("datamat.parallel.processes"):
        for server in processes._servers._running:
            server.stop()
        processes._servers.close()
    for package in ("multiprocessing", "multiprocess"):
        if (module := sys.modules.get(f"{package}.forkserver")) and module._forkserver._forkserver_pid:
            os.kill(module._forkserver._forkserver_pid, signal.SIGKILL)  # otherwise it stays as long as a fork of ours
            module._forkserver._stop()


def _processes(mark: str) -> list[psutil.Process]:
    """Return the live processes of this session, except itself and the trackers of its shared memory."""
    here = psutil.Process()
    descendants = set(here.children(recursive=True))
    trackers = {
        module._resource_tracker._pid
        for package in ("multiprocessing", "multiprocess")
        if (module := sys.modules.get(f"{package}.resource_tracker"))
    }
    found = []
    for process in psutil.process_iter():
        if process == here or process.pid in trackers:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process in descendants or _is_marked(process, mark):
                found.append(process)
    return found


def _is_marked(process: psutil.Process, mark: str) -> bool:
    if process.environ().get(VARIABLE) == mark:
        return True
    if process.cmdline() != psutil.Process().cmdline():  # no fork of this one
        return False
    folder = f"/proc/{process.pid}/fd"
    return any(os.readlink(f"{folder}/{name}").startswith(f"/memfd:{mark} ") for name in os.listdir(folder))


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"  {process.pid}, child of {process.ppid()}, {process.status()}: {' '.join(process.cmdline())[:300]}"
    return f"  {process.pid}: ended meanwhile"


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=GRACE_S)
