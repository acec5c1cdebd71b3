"""Forks of a caller whose libraries have threads of their own."""

from __future__ import annotations

import platform
import re
import sys
import textwrap

import pytest
from fresh import python

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked"),
]

# Runs `use` here, so that its threads are there, and then in workers. One alone has as many threads as there are cores.
MAPS = """
from datamat.parallel import PathosExecutor, affinity

affinity._PATIENCE_S = 30.0  # on a busy machine, a thread that is about to wait may get no processor for long
use()
for workers, method in ((2, None), (1, None), (1, "fork")):
    if method and pool.stats().start_method != "fork":
        break
    with PathosExecutor(workers, start_method=method, task_timeout_s=40) as pool:
        found = list(pool.map(lambda _: use(), range(4)))
    assert found == [use()] * 4, found
    print(pool.stats().start_method, pool.stats().reason)
"""

# A parallel region of GNU OpenMP, as compilers translate it, in the copy that the wheel of simsimd brings.
OPENMP = """
import ctypes, re, simsimd

with open("/proc/self/maps") as maps:
    gomp = ctypes.CDLL(min(re.findall(r"/\\S*/libgomp[.-]\\S*", maps.read())))
region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

def use():
    entered = []
    callback = region(lambda _: entered.append(1))
    gomp.GOMP_parallel(callback, None, 3, 0)
    return len(entered)
"""
WAITING_THREAD = """
import ctypes, os, threading

reader, writer = os.pipe()
begun = threading.Event()

@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def wait(_):
    begun.set()
    os.read(reader, 1)

thread = ctypes.c_ulong()
assert not ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, wait, None)
begun.wait()

def use():
    return 1
"""
WARNS = """
import warnings

from datamat.parallel import PathosExecutor, PathosPool

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with PathosExecutor(1, start_method="fork") as pool:
        print(*pool.map(abs, [1, -2]), pool.submit(abs, 3).result())
    pool = PathosPool(1, start_method="fork")
    print(*pool.map(abs, [1, -2]))
    pool.clear()
    with PathosExecutor(1) as pool:
        print(pool.submit(abs, 3).result())
for each in caught:
    print(each.category.__name__, each.filename, each.message)
"""


def run(setup: str, program: str = MAPS) -> list[str]:
    """Run a program in a process of its own, and return its lines."""
    code = "\n".join((textwrap.dedent(setup), textwrap.dedent(program)))
    ended = python("-c", code, timeout=140)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()


LIBRARIES = {
    "opencv": """
        import cv2, numpy
        picture = numpy.zeros((800, 800, 3), numpy.uint8)
        cv2.setNumThreads(4)

        def use():
            cv2.GaussianBlur(picture, (31, 31), 5)
            assert os.getpid() != parent or cv2.getNumThreads() == 4  # the caller's own setting is unchanged
    """,
    "numpy": """
        import numpy

        def use():
            return numpy.ones((500, 500)).dot(numpy.ones((500, 500)))[0, 0]
    """,
    "pyarrow": """
        import pyarrow.compute

        def use():
            groups = pyarrow.table({"a": [1, 2] * 999}).group_by("a").aggregate([]).num_rows
            return pyarrow.compute.sum(pyarrow.chunked_array([[1] * 1000] * 50)).as_py(), groups
    """,
    "torch": """
        import torch

        torch.set_num_threads(2)
        model, data = torch.nn.Conv2d(3, 1, 3), torch.ones(40, 3, 20, 20)

        def use():
            torch.set_num_threads(2)
            model.zero_grad()
            model(data).sum().backward()
            return model.bias.grad.item(), torch.ones(3_000_000).sum().item()
    """,
    "simsimd": OPENMP,
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_that_survive_a_fork_are_forked(library):
    """Nearly every program has threads of OpenBLAS; they must not cost it the fastest start."""
    pytest.importorskip({"opencv": "cv2"}.get(library, library))

    lines = run("import os\nparent = os.getpid()\n" + textwrap.dedent(LIBRARIES[library]))

    assert [line.split()[0] for line in lines] == ["fork"] * 3


def test_thread_of_any_library_rules_out_fork():
    """No list names the library: the kernel knows where the thread's stack is, and the stack shows who started it."""
    lines = run(WAITING_THREAD, MAPS + "\nos.write(writer, b'x')\n")

    assert all("fork is unsafe: threads of " in line and " would be missing" in line for line in lines)
    assert [line.split()[0] for line in lines] == ["forkserver"] * 2


def test_fork_that_was_asked_for_says_what_may_hang():
    """Once for each pool, with the remedy, at the line of the program; the choice is the caller's."""
    *results, of_executor, of_pool = run(WAITING_THREAD, WARNS + "\nos.write(writer, b'x')\n")

    assert results == ["1 2 3", "1 2", "3"]
    for warning in (of_executor, of_pool):
        assert re.fullmatch(
            "RuntimeWarning <string> start_method='fork' .*threads of [^ ]+ are running.* 'forkserver'", warning
        )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_tensorflow_is_forked_until_it_is_in_use():
    """The import starts threads of OpenBLAS, Arrow and others, but none of TensorFlow; its first tensor does."""
    setup = """
        import tensorflow
        from datamat.parallel import PathosExecutor

        with PathosExecutor(2) as pool:
            print(*pool.map(abs, [1, -2]), pool.stats().start_method)
        tensorflow.constant(1)
    """

    *results, of_executor, of_pool = run(setup, WARNS)

    assert results == ["1 2 fork", "1 2 3", "1 2", "3"]
    for warning in (of_executor, of_pool):
        assert "the TensorFlow runtime is in use" in warning


def test_fork_that_was_asked_for_is_silent_where_nothing_is_in_danger():
    """Python's threads that hold no lock, and those of OpenBLAS, do no harm."""
    setup = """
        import threading, numpy
        numpy.ones((500, 500)).dot(numpy.ones((500, 500)))
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    """

    assert run(setup, WARNS) == ["1 2 3", "1 2", "3"]


def test_forked_worker_begins_with_no_thread_of_openblas():
    """OpenBLAS starts all its threads when their number is set, and they spin for 40 ms."""
    pytest.importorskip("numpy")
    setup = "import numpy, os\nfrom datamat.parallel import PathosExecutor"
    program = """
        with PathosExecutor(1, start_method="fork") as pool:
            print(len(pool.submit(os.listdir, "/proc/self/task").result()))
            print(pool.submit(numpy.ones((300, 300)).dot, numpy.ones((300, 300))).result()[0, 0])
    """

    assert run(setup, textwrap.dedent(program)) == ["1", "300.0"]


def test_thread_that_computes_rules_out_fork():
    """The kernel does not show whose it is while it runs, and it may hold any lock."""
    setup = """
        import ctypes, threading

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        def never(_):
            pass

        spin = ctypes.create_string_buffer(b"\\xeb\\xfe")  # jmp to itself
        libc = ctypes.CDLL(None)
        page = libc.mmap
        page.restype = ctypes.c_void_p
        page.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        code = page(None, 4096, 7, 0x22, -1, 0)
        ctypes.memmove(code, spin, 2)
        thread = ctypes.c_ulong()
        assert not libc.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(code), None)

        from datamat.parallel.processes import choose_start_method
        print(*choose_start_method())
    """
    if platform.machine() != "x86_64":
        pytest.skip("the machine code is for x86-64")

    assert run(setup, "") == ["forkserver fork is unsafe: threads of an unknown library would be missing"]


def test_polars_rules_out_fork_once_it_is_loaded():
    """A query in a forked child would wait for ever for rayon's threads."""
    pytest.importorskip("polars", reason="needs the extra `interop`")
    setup = """
        import polars

        def use():
            frame = polars.DataFrame({"a": [*range(1000)], "b": [i % 7 for i in range(1000)]})
            return frame.lazy().group_by("b").agg(polars.col("a").sum()).sort("b").collect().height
    """

    lines = run(setup)

    assert [line.split()[0] for line in lines] == ["forkserver"] * 2
    assert "polars" in lines[0]
