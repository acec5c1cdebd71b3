"""Servers that fork workers: two at most, used for all that they are good for, and gone when nobody needs them."""

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from fresh import environment, start

from datamat.parallel import PathosExecutor, processes

SETS = [("wave",), ("mailbox",), ("plistlib",), ("poplib",), ("fractions", "cmd")]  # none has what another needs


@pytest.fixture(autouse=True)
def _own_servers(monkeypatch):
    """Give a test servers of its own, and end them afterwards."""
    fresh = processes._Servers()
    monkeypatch.setattr(processes, "_servers", fresh)
    yield
    for server in fresh._running:
        server.stop()


@pytest.fixture
def directories(monkeypatch):
    """Return a function that lists the directories of the servers of a test."""
    with tempfile.TemporaryDirectory() as folder:  # not `tmp_path`: the address of a socket holds 107 bytes
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield lambda: list(Path(folder).glob("datamat-*"))


def pool_with(*preload, **options):
    return PathosExecutor(1, start_method="forkserver", preload=preload, **options)


def server_of(pool):
    """Return the process that has forked the worker."""
    return pool.submit(os.getppid).result()


def use(*preload):
    with pool_with(*preload) as pool:
        return server_of(pool)


def running(pids):
    """Return those processes that are still servers of this one."""
    children = {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}
    return children & set(pids)


def test_pools_with_other_needs_in_turn_have_two_servers():
    """The server that was used last stays; earlier ones may never be needed again."""
    pids = [use(*preload) for preload in SETS]

    assert running(pids) == set(pids[-2:])
    assert use(*SETS[-2]) == pids[-2]
    assert use(*SETS[0]) not in pids
    assert running(pids) == {pids[-2]}


BY_THREAD = """
import queue, threading
jobs = queue.SimpleQueue()
def work():
    while True:
        number, answer = jobs.get()
        answer.put(2 * number)
{start}
def double(number):
    answer = queue.SimpleQueue()
    jobs.put((number, answer))
    return answer.get()
"""
STARTS = {
    "thread": "threading.Thread(target=work, daemon=True).start()",
    "raw": "import _thread; _thread.start_new_thread(work, ())",
    "pool": "from concurrent.futures import ThreadPoolExecutor; ThreadPoolExecutor(1).submit(work)",
}


def double_by_thread(number):
    import sys

    import outer

    return outer.double(number), "wave" in sys.modules


@pytest.mark.parametrize("start", ["thread", *(pytest.param(each, marks=pytest.mark.long) for each in ("raw", "pool"))])
def test_module_that_starts_a_thread_is_not_preloaded(tmp_path, monkeypatch, start):
    """A fork of the server would lack the thread: calls of that library would wait for ever."""
    (tmp_path / "inner.py").write_text(BY_THREAD.format(start=STARTS[start]))
    (tmp_path / "outer.py").write_text("from inner import double")
    monkeypatch.syspath_prepend(tmp_path)

    with pool_with("outer", "wave", task_timeout_s=20) as pool:
        assert pool.submit(double_by_thread, 3).result() == (6, True)


def test_pools_with_other_needs_at_once_have_two_servers():
    """Later workers import what their server lacks, and so do workers that replace others."""
    with ExitStack() as ends:
        pools = [ends.enter_context(pool_with(*preload, max_retries=1)) for preload in SETS]
        pids = [server_of(pool) for pool in pools]
        for pool in pools:
            os.kill(pool.stats().workers[0].pid, signal.SIGKILL)
        again = [server_of(pool) for pool in pools]

    assert len(set(pids)) == 2
    assert set(again) == set(pids)


def test_server_that_has_all_modules_is_used():
    """Whether it was asked to import them or did so anyway; a server that has more will do, too."""
    pid = use("mailbox", "wave")

    assert {use("wave"), use("email.message"), use(), use("wave", "mailbox")} == {pid}


def test_search_path_of_another_kind_in_use_gives_spawned_workers(monkeypatch, tmp_path):
    """The same names may lead to other modules than those that the servers have."""
    (tmp_path / "wave.py").write_text("here = True\n")
    with pool_with("wave") as one, pool_with("mailbox") as two:
        pids = {server_of(one), server_of(two)}
        monkeypatch.syspath_prepend(tmp_path)
        with pool_with("wave") as three:
            parent = server_of(three)
            found = three.submit(eval, "__import__('wave').here").result()

    assert len(pids) == 2
    assert parent == os.getpid()
    assert found


def test_idle_server_ends(monkeypatch, directories):
    """So does its directory; the next pool silently starts another."""
    monkeypatch.setattr(processes, "IDLE_S", 0.2)
    pid = use("wave")
    server = psutil.Process(pid)
    (directory,) = directories()

    server.wait(timeout=40)

    assert not directory.exists()
    assert use("wave") != pid


def test_server_whose_modules_started_processes_ends_when_it_is_idle(monkeypatch, tmp_path):
    """Such processes are not its workers; whoever started them must end them."""
    monkeypatch.setattr(processes, "IDLE_S", 0.2)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "starts_a_process.py").write_text(
        "import subprocess\nprocess = subprocess.Popen(['sleep', '1000'])\n"
        f"with open({str(tmp_path / 'pid')!r}, 'w') as file:\n    file.write(str(process.pid))\n"
    )
    server = psutil.Process(use("starts_a_process"))

    try:
        server.wait(timeout=40)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.long
def test_server_in_use_is_not_idle(monkeypatch):
    """It does not matter how long its worker has been idle or busy."""
    monkeypatch.setattr(processes, "IDLE_S", 0.2)
    with pool_with("wave") as pool:
        pid = server_of(pool)
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(pid).wait(timeout=2.5)  # it looks once a second
        os.kill(pool.stats().workers[0].pid, signal.SIGKILL)

        assert server_of(pool) == pid


def test_server_whose_directory_was_tidied_up_is_replaced(directories, caplog):
    """Systems remove old temporary files; the workers of the server continue."""
    with pool_with("wave") as one:
        pid = server_of(one)
        shutil.rmtree(*directories())

        other = use("wave")

        assert server_of(one) == pid
    assert other != pid
    assert not caplog.records


@pytest.mark.parametrize("is_seen", [False, True])
def test_server_that_was_killed_is_replaced(is_seen, directories, monkeypatch):
    """A system short of memory may kill it; nothing of it stays.

    It listens no more, but `waitpid` does not know it yet: as long as the system takes to free its memory.
    """
    pid = use("wave")
    (directory,) = directories()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if not is_seen:
        monkeypatch.setattr(processes, "_has_ended", lambda _: False)

    assert use("wave") != pid
    assert not directory.exists()


def test_long_name_of_the_folder_of_temporary_files(tmp_path, monkeypatch):
    """The address of a socket holds 107 bytes, and cluster schedulers give each job a deeply nested folder."""
    deep = tmp_path / ("scratch" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    assert use("wave") != os.getpid()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # libraries of other tests may have threads
def test_fork_of_the_program_has_servers_of_its_own():
    """It does not use, end or wait for those of the program."""
    pid = use("wave")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if use("wave") != pid and processes._servers._running else 2
            for server in processes._servers._running:
                server.stop()
        finally:
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert use("wave") == pid


LEAVES = """
import os, signal, sys, time
from datamat.parallel import PathosExecutor

how = sys.argv[1]
pool = PathosExecutor(1, start_method="forkserver", preload=("never_imported" if how == "terminate" else "wave",))
if how == "terminate":
    pool.submit(int)
    while not os.path.exists("begun"):
        time.sleep(0.01)
    pool.terminate()
else:
    pool.submit(int).result()
    if how == "kill":
        os.killpg(0, signal.SIGKILL)
    print("running", flush=True)
    input()
"""
NEVER_IMPORTED = """
import pathlib, time

pathlib.Path("begun").touch()
time.sleep(100)
"""


def program(how, folder):
    """Start a program in a process group of its own, whose servers have their directories in `folder / "tmp"`."""
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "never_imported.py").write_text(NEVER_IMPORTED)
    variables = environment(TMPDIR=str(folder / "tmp"))
    variables["PYTHONPATH"] += os.pathsep + str(folder)
    return start(LEAVES, how, cwd=folder, stdin=subprocess.PIPE, env=variables, start_new_session=True)


def test_pool_that_is_terminated_as_its_server_imports_leaves_no_directory(tmp_path):
    """The server is killed, and cannot remove it."""
    ended = program("terminate", tmp_path)

    ended.communicate(timeout=50)

    assert ended.returncode == 0
    assert not list((tmp_path / "tmp").iterdir())


def test_directory_of_a_server_that_was_killed_with_its_program_is_removed_by_the_next(monkeypatch, tmp_path):
    """No other is: neither that of a running server nor somebody else's of a similar name."""
    folder = tmp_path / "tmp"
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    program("kill", tmp_path).communicate(timeout=50)
    (left,) = folder.iterdir()
    running = program("stay", tmp_path)
    running.stdout.readline()
    (of_another,) = {*folder.iterdir()} - {left}
    for name in ("datamat-results", "datamat-empty"):
        (folder / name).mkdir()
    (folder / "datamat-results" / "modules").write_text("mine")
    for directory in folder.iterdir():
        os.utime(directory, (1, 1))

    use("wave")

    found = {path.name for path in folder.iterdir()}
    running.communicate("\n", timeout=50)
    kept = {of_another.name, "datamat-results", "datamat-empty"}
    assert kept < found
    assert left.name not in found
    assert len(found - kept) == 1  # that of the server of this process


CLIENT = """
import os, sys, threading, time
from datamat.parallel import PathosExecutor, processes

def quietly():
    return os.getppid()

def detaching_a_fork():
    if os.fork() == 0:
        os.setsid()  # leaves the group that ends with the worker, and holds the server's pipe open
        time.sleep(60)
        os._exit(0)
    return os.getppid()

def leaving_a_program():
    os.system("sleep 60 >/dev/null 2>&1 &")
    return os.getppid()

task, *preload = sys.argv[1:]
pool = PathosExecutor(1, start_method="forkserver", preload=preload)
future = pool.submit(globals()[task])
if "blocks" in preload:
    while not processes._servers._running or not processes._servers._running[0]._process_id:
        time.sleep(0.01)
    print(processes._servers._running[0]._process_id, flush=True)
else:
    print(future.result(), flush=True)
time.sleep(600)
"""
BLOCKS = "import os, time\nprint('importing', flush=True)\ntime.sleep(60)\n"
THREADED = "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"


@pytest.mark.parametrize(
    ("task", "preload"),
    [
        ("detaching_a_fork", None),
        ("leaving_a_program", None),
        pytest.param("quietly", "threaded", marks=pytest.mark.long),
        ("quietly", "blocks"),
    ],
)
def test_server_of_a_killed_program_ends(tmp_path, task, preload):
    """Whatever its tasks have started, and whatever its modules do when they are imported."""
    (tmp_path / "blocks.py").write_text(BLOCKS)
    (tmp_path / "threaded.py").write_text(THREADED)
    client = start(CLIENT, task, *([preload] if preload else []), cwd=tmp_path)
    try:
        said = [client.stdout.readline() for _ in range(2 if preload == "blocks" else 1)]
        server = psutil.Process(next(int(line) for line in said if line != "importing\n"))
        below = server.children(recursive=True)
    finally:
        client.kill()
        client.wait()
        client.stdout.close()

    _, left = psutil.wait_procs([server], timeout=30)
    _, started = psutil.wait_procs(below, timeout=0 if task == "detaching_a_fork" else 30)
    for process in (*left, *started):
        with suppress(psutil.NoSuchProcess):
            process.kill()

    assert not left
    assert not started or task == "detaching_a_fork"
