"""What works where Python lacks what it has on Linux alone.

New interpreters lose modules, functions, constants and folders before anything is imported, as do all workers that they
start. That shows what is asked for in vain, and nothing else of another system: neither its file names, its files that
cannot be removed while they are open, its signals, nor its ways to start a process.
"""

import os
import pathlib
import pickle
import subprocess
import sys

import pytest

import datamat
from datamat import Features, ListOf, Text, load, materialize
from datamat.testing.cases import CASES

pytestmark = [pytest.mark.timeout(300)]

WINDOWS = """
import asyncio, faulthandler, mmap, os, select, signal, socket, sys, sysconfig, time
import multiprocess.reduction, numpy, psutil, shutil, subprocess, threading  # which ask for other modules there

shutil._use_fd_functions = False

MISSING = {
    os: "O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NDELAY O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH "
    "O_SYNC O_TMPFILE RTLD_NOLOAD WEXITED WNOHANG WNOWAIT chown chroot copy_file_range eventfd fchdir fchmod fchown "
    "fdatasync fork forkpty fstatvfs getegid geteuid getgid getgroups getloadavg getpgid getpriority getsid getuid "
    "getxattr kill killpg lchown listxattr lockf memfd_create mkfifo mknod nice openpty pathconf pidfd_open "
    "pipe2 posix_fadvise posix_fallocate posix_spawn pread preadv pwrite pwritev readv register_at_fork "
    "sched_getaffinity sched_setaffinity sched_yield sendfile set_blocking setpgid setsid setxattr splice statvfs sync "
    "sysconf tcgetpgrp ttyname uname wait wait3 wait4 waitid writev",
    signal: "ITIMER_REAL SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGRTMAX SIGRTMIN SIGSTOP SIGTSTP "
    "SIGUSR1 SIGUSR2 alarm getitimer pause pidfd_send_signal pthread_kill pthread_sigmask setitimer siginterrupt "
    "sigtimedwait sigwait",
    mmap: "MAP_ANONYMOUS MAP_POPULATE MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    faulthandler: "register unregister",
    select: "epoll poll",
    socket: "AF_UNIX CMSG_LEN CMSG_SPACE MSG_DONTWAIT MSG_NOSIGNAL SCM_RIGHTS recv_fds send_fds",
    time: "clock_gettime clock_gettime_ns pthread_getcpuclockid tzset",
    multiprocess.reduction: "DupFd HAVE_SEND_HANDLE",
}
NO_MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}
SYSTEM, FOLDERS = None, ("/proc", "/dev", "/sys")
"""

MACOS = """
import fcntl, mmap, os, resource, select, signal, socket, sys, sysconfig, time
import psutil, subprocess  # which ask for other modules there

MISSING = {
    os: "O_DIRECT O_NOATIME O_PATH O_TMPFILE P_PIDFD RTLD_DEEPBIND copy_file_range eventfd fdatasync getrandom "
    "getresgid getresuid getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate removexattr "
    "sched_getaffinity sched_getparam sched_setaffinity sched_setscheduler setresgid setresuid setxattr splice waitid",
    signal: "SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    fcntl: "F_ADD_SEALS F_GETPIPE_SZ F_GETSIG F_NOTIFY F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_SETPIPE_SZ F_SETSIG",
    mmap: "MAP_DENYWRITE MAP_EXECUTABLE MAP_POPULATE MAP_STACK",
    resource: "RUSAGE_THREAD prlimit",
    select: "epoll",
    socket: "MSG_CMSG_CLOEXEC MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK SO_PASSCRED SO_PEERCRED",
    time: "CLOCK_BOOTTIME pthread_getcpuclockid",
}
NO_MODULES = set()
SYSTEM, FOLDERS = "darwin", ("/proc", "/dev/shm", "/sys")
"""

HOOK = """
import builtins, contextlib, errno, io

with contextlib.suppress(ImportError):
    import soundfile  # which looks for the library of the system that this pretends to be
sys.modules.pop("tempfile", None)  # which remembers what `os` had

sysconfig.get_config_vars()
for module, names in MISSING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


class NotHere:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in NO_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in NO_MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, NotHere)


def without_folders(function):
    def call(path=".", *args, **options):
        is_ours = not sys._getframe(1).f_globals.get("__name__", "").startswith("psutil")
        if is_ours and not isinstance(path, int) and os.fsdecode(path).startswith(FOLDERS) and path != os.devnull:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *args, **options)

    return call


def access(path, *args, ask=os.access, **options):
    return not os.fsdecode(path).startswith(FOLDERS) and ask(path, *args, **options)


for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink"):
    setattr(os, name, without_folders(getattr(os, name)))
builtins.open = io.open = without_folders(io.open)
os.access = access
sys.platform = SYSTEM or sys.platform
"""

SAME = """
def same(one, other):
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist()) or (
            one.tobytes() == other.tobytes()
        )
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            same(one[name], other[name])
    else:
        assert type(one) is type(other) and (one == other or one != one)
"""


def _run(system, code, tmp_path):
    """Run code in a new interpreter of another system, in a folder; its workers are of that system, too."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(system + HOOK)
    path = os.pathsep.join([str(tmp_path / "hook"), str(pathlib.Path(datamat.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


READ = f"""
import importlib, pickle, pkgutil
import numpy as np
import datamat
from datamat import Materializer
{SAME}
for found in pkgutil.walk_packages(datamat.__path__, "datamat."):
    if found.name != "datamat.testing":
        importlib.import_module(found.name)
with open("expected", "rb") as file:
    expected = pickle.load(file)
for name in ("tfrecord", "tfrecord.gz", "parquet", "webdataset"):
    dataset = datamat.load("all", format=name)
    assert len(dataset) == len(expected)
    for sample, wanted in zip(dataset, expected, strict=True):
        same(wanted, sample)
        same(wanted, dataset[sample["key"]])
    batches = list(dataset.to_numpy(2, shuffle=False))
    same([sample["key"] for sample in expected], [key for batch in batches for key in batch["key"]])
    assert datamat.describe(dataset.files[0]).num_records == len(expected)
    assert sorted(x for batch in datamat.load("plain", format=name).to_numpy(4) for x in batch["x"]) == list(range(6))
assert datamat.verify("all", deep=True).ok
writer = Materializer("dataset", [{{"x": 1}}], "other")
assert writer.status().state == "empty"
plain = datamat.load("plain")
for act in (
    writer.run,
    lambda: datamat.materialize(abs, [1], "other"),
    lambda: datamat.convert("plain", "other", format="webdataset"),
    lambda: datamat.PathosExecutor(2),
    lambda: next(iter(plain.to_numpy(4, num_workers=2))),
    lambda: datamat.load("plain", cache_dir="cache")[0],
):
    try:
        act()
    except datamat.MissingDependencyError as error:
        assert "needs the module 'fcntl', which Python has on Linux and macOS" in str(error), error
    else:
        raise AssertionError("it worked")
"""


def test_reading_needs_nothing_that_only_posix_has(tmp_path):
    """As on Windows: all modules can be imported, and every type of field be read in every format.

    What takes locks or processes says so in one sentence.
    """
    formats = ["tfrecord", "tfrecord.gz", "parquet", "webdataset"]
    names = {case: f"f{number}" for number, case in enumerate(CASES)}
    features = Features({names[case]: feature for case, (feature, _) in CASES.items()} | {"texts": ListOf(Text())})

    def make(number):
        values = {names[case]: values[number % len(values)] for case, (_, values) in CASES.items()}
        return {**values, "texts": ["größe"] * number}

    materialize(make, range(3), tmp_path / "all", features=features, format=formats, progress=False)
    materialize(lambda n: {"x": n}, range(6), tmp_path / "plain", format=formats, progress=False)
    (tmp_path / "expected").write_bytes(pickle.dumps(list(load(tmp_path / "all"))))

    _run(WINDOWS, READ, tmp_path)


WRITE = """
import numpy as np
from datamat import *

workers = WorkerOptions(num_workers=2, max_rss=2 << 30, sample_timeout_s=60)


def make(number):
    return {"image": np.full((9, 7, 3), number, np.uint8), "x": number}


def write():
    return materialize(make, range(12), "out", format=["tfrecord", "parquet"], workers=workers, progress=False)


assert write().is_complete and write().did_nothing
dataset = load("out", cache_dir="cache")
assert sorted(sample["x"] for sample in dataset) == list(range(12)) and dataset["00000003"]["image"].max() == 3
assert sorted(x for batch in dataset.to_numpy(4, num_workers=2) for x in batch["x"]) == list(range(12))
assert verify("out", deep=True).ok
with PathosExecutor(1) as pool:
    assert pool.submit(make, 3).result()["x"] == 3 and pool.stats().start_method == "spawn"
"""


@pytest.mark.long
def test_writing_needs_nothing_that_only_linux_has(tmp_path):
    """As on macOS: workers are spawned and replaced, batches come from processes, and shards are cached."""
    _run(MACOS, WRITE, tmp_path)
