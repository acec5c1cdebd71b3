"""Programs that run pools where others rule the process: servers, loaders, archives, and handlers of signals."""

import sys
import textwrap
import zipfile

import pytest
from fresh import python, run


def test_server_that_forks_with_a_live_pool(method):
    """`gunicorn --preload` does so: the application has a pool, and each server is a fork that ends normally."""
    program = f"""
        import os, sys
        from datamat.parallel import PathosExecutor

        class Model:
            factor = 3

            def predict(self, x):
                return self.factor * x, os.getpid()

        model = Model()
        pool = PathosExecutor(2, start_method={method!r})
        assert [x for x, _ in pool.map(model.predict, range(4))] == [0, 3, 6, 9]
        servers = [os.fork() for _ in range(2)]
        if 0 in servers:
            with PathosExecutor(2, start_method={method!r}) as own:
                found = list(own.map(model.predict, range(4)))
            assert [x for x, _ in found] == [0, 3, 6, 9] and os.getpid() not in {{pid for _, pid in found}}
            assert [x for x, _ in pool.map(model.predict, range(2))] == [0, 3]  # here: its workers are the master's
            sys.exit(0)
        for server in servers:
            assert os.waitpid(server, 0)[1] == 0
        assert [x for x, _ in pool.map(model.predict, range(4))] == [0, 3, 6, 9]
        pool.shutdown()
    """

    assert run(program) == ""


def test_program_in_a_zip_file(tmp_path):
    """In `python program.pyz` a new interpreter finds no part of the program on its search path."""
    program = """
        from datamat.parallel import PathosExecutor
        from helper import scale

        class Job:
            factor = 3

            def run(self, x):
                return scale(self.factor * x)

        for method in ("fork", "forkserver", "spawn"):
            with PathosExecutor(2, start_method=method) as pool:
                print(list(pool.map(Job().run, range(4))))
    """
    with zipfile.ZipFile(tmp_path / "program.pyz", "w") as archive:
        archive.writestr("__main__.py", textwrap.dedent(program))
        archive.writestr("helper.py", "def scale(x):\n    return x + 1\n")

    ended = python(str(tmp_path / "program.pyz"))

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[1, 4, 7, 10]\n" * 3, "")


def test_pool_in_a_sub_interpreter():
    """Apache's mod_wsgi uses them. A fork could not set signal handlers there, so the pool does not fork."""
    pytest.importorskip(interpreters := "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters")
    inner = """
        from datamat.errors import OptionError
        from datamat.parallel import PathosExecutor, PathosPool

        def square(x):
            return x * x

        for method in (None, "forkserver", "spawn"):
            with PathosExecutor(2, start_method=method) as pool:
                print(list(pool.map(square, range(4))), pool.stats().reason, flush=True)
        try:
            PathosExecutor(2, start_method="fork")
        except OptionError as exc:
            print(exc, flush=True)
        pool = PathosPool(2, id="inside")
        print(pool.map(square, range(4)), flush=True)
        pool.clear()
    """
    make = "create('legacy')" if sys.version_info >= (3, 13) else "create(isolated=False)"
    program = f"""
        import {interpreters} as interpreters
        interpreter = interpreters.{make}
        interpreters.run_string(interpreter, {textwrap.dedent(inner)!r})
        interpreters.destroy(interpreter)
    """

    first, *others = run(program).splitlines()
    refusal = "start_method='fork' is not possible in a sub-interpreter"
    assert first == "[0, 1, 4, 9] fork is unsafe: this is a sub-interpreter"
    assert [line.partition(",")[0] if line.startswith("start") else line for line in others] == [
        "[0, 1, 4, 9] asked for", "[0, 1, 4, 9] asked for", refusal, "[0, 1, 4, 9]",
    ]  # fmt: skip


def test_signals_that_hit_every_thread(method):
    """A timer, signals sent to the pool's own threads, and a handler that collects all children's exit codes."""
    program = """
        import os, signal, sys, threading
        from datamat.errors import WorkerDied
        from datamat.parallel import PathosExecutor

        came = set()
        signal.signal(signal.SIGUSR1, lambda *_: came.add(1))
        signal.signal(signal.SIGALRM, lambda *_: came.add(2))
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)

        def reap(*_):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass

        def die(x):
            if x == 40:
                os.kill(os.getpid(), signal.SIGKILL)
            return x

        def bother(over):
            while not over.wait(0.0005):
                for thread in threading.enumerate():
                    if thread is not threading.current_thread():
                        signal.pthread_kill(thread.ident, signal.SIGUSR1)

        for handler in (signal.SIG_DFL, reap):
            signal.signal(signal.SIGCHLD, handler)
            over = threading.Event()
            with PathosExecutor(2, start_method=sys.argv[1]) as pool:
                assert list(pool.map(abs, range(-50, 0), chunksize=1)) == list(range(50, 0, -1))
                thread = threading.Thread(target=bother, args=[over])
                thread.start()
                assert list(pool.map(abs, range(-500, 0), chunksize=1)) == list(range(500, 0, -1))
                futures = [pool.submit(die, i) for i in range(80)]
                dead = [i for i, future in enumerate(futures) if isinstance(future.exception(), WorkerDied)]
                over.set()
                thread.join()
            print(dead, came)
        signal.setitimer(signal.ITIMER_REAL, 0)
    """

    assert run(program, method) == "[40] {1, 2}\n" * 2


@pytest.mark.timeout(200)
def test_pool_in_the_worker_of_a_loader():
    """A DataLoader's worker is not one of datamat's, so it gets a real pool."""
    pytest.importorskip("torch", reason="needs the extra `torch`")
    program = """
        import os
        from datamat.parallel import PathosExecutor
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 4

            def square(self, x):
                return x * x, os.getpid()

            def __getitem__(self, i):
                with PathosExecutor(2) as pool:
                    found = list(pool.map(self.square, range(i + 3)))
                return sum(x for x, _ in found), os.getpid() in {pid for _, pid in found}

        print(list(DataLoader(Squares(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=90)))
    """

    ended = python("-c", textwrap.dedent(program), timeout=180)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[[5, False], [14, False], [30, False], [55, False]]\n"


UNSEEN = """
import ctypes, os, sys
import numpy as np
if len(sys.argv) == 2:  # without the right to look into other processes, which is root's
    ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "again"])
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
import multiprocessing
from datamat import PathosExecutor
class Job:
    def __init__(self, context=multiprocessing.get_context("spawn")):
        self.array = np.ones(200_000)
        self.queue, self.counter = context.Queue(), context.Value("i", 0)
        self.receiving, self.sending = context.Pipe(duplex=False)
    def total(self, n):
        self.queue.put(n)
        with self.counter:
            self.counter.value += 1
        self.sending.send(n)
        return int(self.array.sum()) + n
def keep(array):
    global kept
    kept = array
def total():
    return int(kept.sum())
with PathosExecutor(1, start_method=sys.argv[1], initializer=keep, initargs=(np.ones(300_000),)) as pool:
    job = Job()
    print(pool.submit(total).result(), *pool.map(job.total, range(2)), job.counter.value)
    print([(job.queue.get(timeout=20), job.receiving.recv()) for _ in range(2)])
"""


def test_process_that_nobody_may_look_into(method):
    """As a server that has given up the rights of root: its workers cannot open its descriptors by their path."""
    assert run(UNSEEN, method) == "300000 200000 200001 2\n[(0, 0), (1, 1)]\n"
