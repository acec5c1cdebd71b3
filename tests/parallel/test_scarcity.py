"""Pools where the system has little left to give."""

import subprocess
import sys
import textwrap

import pytest
from fresh import METHODS, python, run


def test_pool_continues_with_the_workers_that_could_be_started(method):
    """One warning says how many there are, and what helps."""
    program = f"""
        import logging, os, resource
        from datamat.parallel import PathosExecutor

        logging.basicConfig(format="%(message)s")
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 30, before + 30))
        pool = PathosExecutor(16, start_method={method!r})
        for _ in range(3):
            assert list(pool.map(abs, range(-200, 0), chunksize=1)) == list(range(200, 0, -1))
        open(os.devnull).close()  # something is left for the program itself
        pool.shutdown()
    """

    ended = python("-c", textwrap.dedent(program))

    assert ended.returncode == 0, ended.stderr
    said = ended.stderr.splitlines()
    assert len(said) == 1, said
    assert said[0].startswith("only ") and " of 16 workers could be started: OSError" in said[0]
    assert "ulimit -n" in said[0]


@pytest.mark.parametrize("method", METHODS)
def test_pool_that_gets_no_worker_says_why(method):
    """It raises an error and does not hang; it can be used once the limit is raised."""
    program = f"""
        import os, resource
        from datamat.errors import BrokenPoolError
        from datamat.parallel import PathosExecutor

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for room in (1, 6, 9):
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + room, most))
            pool = PathosExecutor(4, start_method={method!r})
            try:
                print(list(pool.map(abs, [-1])))
            except BrokenPoolError as error:
                print("ulimit -n" in str(error))
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            pool.shutdown()
        with PathosExecutor(4, start_method={method!r}) as pool:
            print(list(pool.map(abs, [-1])))
    """

    assert run(program).splitlines() == ["True", "True", "True", "[1]"]


def test_program_that_may_write_nowhere(method):
    """A forkserver's socket needs a directory; without one, workers are spawned, and one warning says so."""
    program = f"""
        import logging, os, tempfile
        from datamat.parallel import PathosExecutor

        logging.basicConfig(format="%(message)s")
        tempfile.tempdir = "/proc"  # takes no files, not even of root
        with PathosExecutor(2, start_method={method!r}, max_retries=1) as pool:
            assert list(pool.map(abs, range(-9, 0))) == list(range(9, 0, -1))
            for worker in pool.stats().workers:  # those that replace a forked one come from a server, too
                os.kill(worker.pid, 9)
            assert list(pool.map(abs, range(-9, 0))) == list(range(9, 0, -1))
    """

    ended = python("-c", textwrap.dedent(program))

    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "by spawn" in line]
    assert len(said) == (method != "spawn"), ended.stderr


@pytest.mark.parametrize("size", ["missing", "full"])
def test_shared_memory_that_is_missing_or_full_is_not_needed(method, size):
    """A container may have 64 MB of it, or none; neither the pool nor the arrays that it sends use any."""
    program = f"""
        import numpy
        from datamat.parallel import PathosExecutor

        class Model:
            def __init__(self):
                self.weights = numpy.ones((1500, 1500))

            def total(self, part):
                return part.sum() + self.weights.sum(), part

        model, parts = Model(), [numpy.full((500, 500), i) for i in range(4)]
        with PathosExecutor(2, start_method={method!r}) as pool:
            for i, (total, part) in enumerate(pool.map(model.total, parts)):
                assert total == i * 250_000 + 2_250_000 and part[0, 0] == i
    """
    change = {
        "missing": "mount --rbind /dev /mnt && mount -t tmpfs none /dev && touch /dev/null /dev/urandom"
        " && mount --bind /mnt/null /dev/null && mount --bind /mnt/urandom /dev/urandom",
        "full": "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full",
    }[size]
    tried = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*tried, change], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount here")

    ended = subprocess.run(
        [*tried, f'{change}; exec "$0" -c "$1"', sys.executable, textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
