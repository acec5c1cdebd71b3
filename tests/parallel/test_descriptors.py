"""What a process that the program forks has of its pools: nothing, whatever other threads do at that moment."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from fresh import METHODS, python

from datamat.parallel import PathosExecutor
from datamat.parallel.channel import Descriptor, no_forks

# `left()` names what is open here and belongs to a pool: pipes may belong to others, and are passed over.
HEAD = """
import os, socket, sys, threading
from concurrent.futures import ThreadPoolExecutor
from datamat.parallel import PathosExecutor
from datamat.parallel.channel import close_in_forks

ends = set()
make_pair = socket.socketpair
def noting_pair():
    ours, theirs = make_pair()
    ends.add(os.readlink(f"/proc/self/fd/{ours.fileno()}"))
    return ours, theirs
socket.socketpair = noting_pair

def left():
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # that of the listing
            pass
    return found & {*ends, "anon_inode:[pidfd]", "anon_inode:[eventpoll]"}

def in_fork(check):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

ONE_FAILS = """
class Bad:
    def close(self):
        raise OSError("it does not close")
bad = [Bad() for _ in range(20)]
with PathosExecutor(2, start_method=sys.argv[1]) as pool:
    print(*pool.map(abs, [-1, -2]))
    close_in_forks(*bad)
    print(len(left()) > 4, in_fork(lambda: not left()))
"""

# Between the moment a number is closed and the next one, another thread opens a file under it, and forks.
NUMBER_USED_AGAIN = """
me, found, other = os.getpid(), [], os.open(os.devnull, os.O_RDONLY)
really_close = os.close
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
def close(number):
    really_close(number)
    if os.getpid() == me:
        os.dup2(other, number)
        found.append(in_fork(lambda: is_open(number)))
        really_close(number)
with PathosExecutor(2, start_method=sys.argv[1], max_retries=1) as pool:
    print(*pool.map(abs, [-1, -2]))
    os.close = close
    os.kill(pool.stats().workers[0].pid, 9)
    print(*pool.map(abs, [-1, -2]))
os.close = really_close
print(len(found) > 4, set(found))
"""

# A pair is hardly made when there is time for a fork; where forks have to wait, that time passes.
EIGHT_THREADS = """
forked = threading.Event()
def slow_pair():
    try:
        return noting_pair()
    finally:
        forked.clear()
        forked.wait(0.05)
socket.socketpair = slow_pair
def use_pools(_):
    for _ in range(2):
        with PathosExecutor(1, start_method=sys.argv[1]) as pool:
            assert pool.submit(abs, -1).result() == 1
with ThreadPoolExecutor(8) as threads:
    users = [threads.submit(use_pools, n) for n in range(8)]
    found = []
    while not all(user.done() for user in users):
        found.append(in_fork(lambda: not left()))
        forked.set()
    for user in users:
        user.result()
print(set(found))
"""


def run(program, method):
    done = python("-W", "ignore::DeprecationWarning", "-c", HEAD + program, method)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_fork_closes_every_end_although_some_fail(method):
    """Each is closed separately, and Python reports an error."""
    output, errors = run(ONE_FAILS, method)

    assert output == "1 2\nTrue 0\n"
    assert "it does not close" in errors


def test_fork_closes_no_number_that_is_another_file_by_now(method):
    """Neither after a worker has died nor after a pool has ended."""
    output, errors = run(NUMBER_USED_AGAIN, method)

    assert output == "1 2\n1 2\nTrue {0}\n"
    assert "Error" not in errors


def test_fork_beside_threads_that_make_pools_has_no_end_of_theirs():
    """That includes pools still being made; a program with threads does not fork its own workers."""
    assert run(EIGHT_THREADS, "forkserver") == ("{0}\n", "")


def test_no_fork_comes_between_the_forgetting_of_a_number_and_its_end(monkeypatch):
    """A fork at that moment would keep the descriptor open, and know of none."""
    really_close, forks_wait = os.close, []

    def close(number):
        with ThreadPoolExecutor(1) as other:
            forks_wait.append(not other.submit(no_forks.acquire, blocking=False).result())
        really_close(number)

    descriptor = Descriptor(os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(os, "close", close)

    descriptor.close()

    assert forks_wait == [True]


def inherited_by_a_program(_=None):
    """Return what a program inherits when it is started without closing anything."""
    listing = "import os; print(*sorted({os.readlink(f'/proc/self/fd/{fd}') for fd in range(3, 200) if is_open(fd)}))"
    check = "is_open = lambda fd: os.path.lexists(f'/proc/self/fd/{fd}')"
    command = [sys.executable, "-c", f"import os; {check}; {listing}"]
    return set(subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_program_that_a_task_starts_has_no_end_of_the_pool(method):
    """`os.system` passes on whatever is inheritable, and a program may outlive its worker."""
    before = inherited_by_a_program()

    with PathosExecutor(2, start_method=method) as pool:
        assert pool.submit(inherited_by_a_program).result() <= before
        assert inherited_by_a_program() == before
