"""A process that has imported everything, and runs each job that it reads about in a fork of its own.

It is started with the shim preloaded, and saves half a second of imports for each of thousands of faults. For each job
it reads one JSON line: the arguments of `Job`, and the file for its output. It writes two: the job's process, and how
it ended. Processes that a job leaves behind become children of this one, where the tests find them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback

import cv2  # noqa: F401 -- what a run imports is imported once, here
import pyarrow.parquet  # noqa: F401
from job import Job

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def run(job: Job, log: str) -> None:
    """Run a job as a process of its own would; never returns."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(old, new)
    os.closerange(3, max(nothing, descriptor) + 1)
    code = 0
    try:
        job.run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
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
            run(Job(**order["job"]), order["log"])
        print(json.dumps(pid), flush=True)
        status = wait_for(pid)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    main()
