"""A process that has imported everything, and runs each job or script that it reads about in a fork of its own.

It saves half a second of imports for each of thousands of faults, for which it is started with the shim preloaded. For
each job it reads one JSON line: the arguments of `Job` or the path of a script, and the files for its output. It writes
two: the process, and how it ended. Processes that a job leaves behind become children of this one, for tests to find.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import traceback
import types

import cv2  # noqa: F401 -- what a run imports is imported once, here
import pyarrow.parquet  # noqa: F401
from job import Job

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def run_script(path: str, environment: dict[str, str]) -> None:
    """Run a script as `python SCRIPT` does in its folder, up to the end of the interpreter."""
    folder = os.path.dirname(path)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv, sys.path[0] = [os.path.basename(path)], folder
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = path
    try:
        with open(path) as file:
            exec(compile(file.read(), path, "exec"), vars(main))
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def run(order: dict) -> None:
    """Run a job or a script as a process of its own would; never returns."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    descriptors = [os.open(os.devnull, os.O_RDONLY), *(os.open(order[name], flags) for name in ("out", "err"))]
    for new, old in enumerate(descriptors):
        os.dup2(old, new)
    os.closerange(3, max(descriptors) + 1)
    code = 0
    try:
        if "script" in order:
            run_script(order["script"], order["environment"])
        else:
            Job(**order["job"]).run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def wait_for(pid: int) -> int:
    """Wait for a process, and for any it left that have ended, too; return its status."""
    status = None
    while status is None:
        ended, found = os.waitpid(-1, 0)
        if ended == pid:
            status = found
    return status


def main() -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            os.setsid()
            run(order)
        print(json.dumps(pid), flush=True)
        status = wait_for(pid)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    main()
