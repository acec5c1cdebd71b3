"""A job by engines in whose workers a thread draws all the time: `python disturbed_job.py ENGINE OUTPUT`."""

import concurrent.futures
import contextlib
import random
import sys
import threading
import time

import numpy as np

from datamat import materialize

NAMES = ["cat", "dog", "bird", "fish", "cow", "hen", "pig"]
quiet = threading.Event()


def disturb():
    """Start a thread that seeds the generators of this process, and draws from them, until it is to be quiet."""
    quiet.clear()
    threading.Thread(target=_draw_until_quiet, daemon=True).start()


def _draw_until_quiet():
    while not quiet.is_set():
        random.seed(7)
        np.random.seed(7)
        time.sleep(0.0002)


def sample(n):
    """Return what is drawn, with a chance for other threads in between, and what depends on how texts hash."""
    drawn = {}
    for number in range(3):
        drawn[f"random{number}"] = random.random()
        drawn[f"numpy{number}"] = np.random.rand()
        time.sleep(0.001)
    return drawn | {"place": list(set(NAMES)).index(NAMES[n % 7]), "hash": hash(NAMES[n % 7])}


def make(output, **options):
    """Run the job."""
    materialize(sample, range(40), output, progress=False, **options)


@contextlib.contextmanager
def threads():
    """Threads of this very process."""
    disturb()
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as executor:
            yield executor
    finally:
        quiet.set()


@contextlib.contextmanager
def processes():
    """A pool of the standard library."""
    with concurrent.futures.ProcessPoolExecutor(1, initializer=disturb) as executor:
        yield executor


@contextlib.contextmanager
def loky():
    """Interpreters that loky starts."""
    import loky

    with loky.ProcessPoolExecutor(1, initializer=disturb) as executor:
        yield executor


@contextlib.contextmanager
def dask():
    """A process of Dask that makes two calls at a time."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.run(disturb)
        yield client


@contextlib.contextmanager
def ray():
    """Processes of Ray."""
    import ray

    hook = {"worker_process_setup_hook": disturb}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20, runtime_env=hook)
    yield "ray"
    ray.shutdown()


@contextlib.contextmanager
def mpi():
    """Processes that mpiexec has started."""
    from mpi4py.futures import MPIPoolExecutor

    with MPIPoolExecutor(initializer=disturb) as executor:
        yield executor


ENGINES = {engine.__name__: engine for engine in (threads, processes, loky, dask, ray, mpi)}


if __name__ == "__main__":
    import disturbed_job  # its functions go by name

    with disturbed_job.ENGINES[sys.argv[1]]() as engine:
        disturbed_job.make(sys.argv[2], executor=engine)
