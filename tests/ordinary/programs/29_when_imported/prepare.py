"""Writes its data when it is imported, as a project of one's own begins."""

import threading

from datamat import WorkerOptions, materialize
from settings import NUM_WORKERS, START_METHOD

lock = threading.Lock()
DONE = []


def square(n):
    with lock:
        return {"n": n, "square": n**2}


report = materialize(
    square, range(50), "out/imported", workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
)
DONE.append(report.num_records)
