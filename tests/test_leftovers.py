"""The suite ends whatever one test does, and no test file leaves a process behind unnoticed."""

import pathlib
import re
import subprocess
import sys

import psutil
import pytest

HERE = pathlib.Path(__file__).parent

pytestmark = pytest.mark.timeout(300)

SUBPROCESS = """
import subprocess
def test_it(): subprocess.Popen(["sleep", "600"])
"""
ORPHAN = """
import subprocess
def test_it(): subprocess.run("sleep 600 & exit", shell=True, start_new_session=True)
"""
FORKED_ORPHAN = """
import os, time
def test_it():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()
"""
POOL = """
import datamat
pool = datamat.PathosExecutor(2, start_method="METHOD")
def test_it(): assert pool.submit(abs, -1).result() == 1
"""
CLOSED_POOL = """
import multiprocessing, multiprocessing.shared_memory
import datamat
def test_it():
    with datamat.PathosExecutor(2, start_method="forkserver") as pool:
        assert pool.submit(abs, -1).result() == 1
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(abs, (-1,)) == 1
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=8)
    shared.close()
    shared.unlink()
"""
INNOCENT = """
import pytest
@pytest.mark.parametrize("number", range(6))
def test_innocent(number): pass
"""
STUCK = """
import ctypes, pytest
@pytest.mark.timeout(1)
def test_stuck():
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
def test_after(): pass
"""
CRASHING = """
import os
def test_before(): pass
def test_crashing(): os._exit(1)
def test_after(): pass
"""


def run_suite(folder, files, *arguments):
    """Run test files under the conftest of this suite; return what pytest prints."""
    for name in ("conftest.py", "leftovers.py", "crash_scheduler.py"):
        (folder / name).write_text((HERE / name).read_text().replace("GRACE_S = 20.0", "GRACE_S = 1.0"))
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 60\ntimeout_method = signal\nstuck_s = 2\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=250)
    return ended.stdout + ended.stderr


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("test", "command"),
    [
        pytest.param(SUBPROCESS, "sleep 600", id="subprocess"),
        pytest.param(ORPHAN, "sleep 600", id="orphan"),
        pytest.param(FORKED_ORPHAN, "-m pytest -q", id="forked orphan"),
        pytest.param(POOL.replace("METHOD", "fork"), "-m pytest -q", id="fork"),
        pytest.param(POOL.replace("METHOD", "forkserver"), "python", id="forkserver"),
        pytest.param(POOL.replace("METHOD", "spawn"), "python", id="spawn"),
    ],
)
def test_process_that_is_left_is_ended_and_reported_with_the_file(tmp_path, test, command):
    """The kind of process does not matter; the files before and after it pass."""
    found = run_suite(tmp_path, {"test_a.py": INNOCENT, "test_b.py": test, "test_c.py": INNOCENT})

    assert re.search(rf"test_b\.py left behind:\n  \d+, child of \d+, .*: .*{command}", found), found
    assert "13 passed, 1 error" in found
    pids = [int(pid) for pid in re.findall(r"^  (\d+), child of", found, re.MULTILINE)]
    assert pids
    assert not [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid):
    """Return whether a process runs; one that only waits to be reaped has ended."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
def test_servers_kept_for_the_next_pool_are_no_leftovers(tmp_path):
    """They end with each file, and trackers with the session."""
    assert "1 passed" in run_suite(tmp_path, {"test_b.py": CLOSED_POOL})


@pytest.mark.long
def test_left_process_is_reported_by_the_worker_of_xdist_that_has_the_file(tmp_path):
    """No other worker reports it, although both run at once."""
    files = {"test_a.py": INNOCENT, "test_b.py": SUBPROCESS, "test_c.py": FORKED_ORPHAN, "test_d.py": INNOCENT}

    found = run_suite(tmp_path, files, "-n", "2", "--dist", "loadfile")

    assert sorted(re.findall(r"^(test_\w\.py) left behind", found, re.MULTILINE)) == ["test_b.py", "test_c.py"], found
    assert "14 passed, 2 errors" in found


@pytest.mark.long
@pytest.mark.parametrize(("name", "test"), [("stuck", STUCK), ("crashing", CRASHING)], ids=["stuck", "crashing"])
def test_test_that_ends_its_worker_fails_alone(tmp_path, name, test):
    """All other tests run, those of its file included."""
    files = {"test_a.py": INNOCENT, "test_b.py": test, "test_c.py": INNOCENT, "test_d.py": INNOCENT}

    found = run_suite(tmp_path, files, "-n", "2", "--dist", "loadfile")

    passed = 18 + test.count("def test_") - 1
    assert re.search(rf"1 failed, {passed} passed", found), found
    assert f"crashed while running 'test_b.py::test_{name}'" in found


@pytest.mark.long
def test_test_that_is_stuck_shows_its_stack(tmp_path):
    """Without xdist, the run ends there."""
    found = run_suite(tmp_path, {"test_b.py": STUCK})

    assert re.search(r"Timeout \(0:00:03\)!\n(.|\n)*in test_stuck", found), found
