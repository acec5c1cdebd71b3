"""Engines as processes of their own, which tests may kill."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


def wait_for(found, *, seconds=100):
    """Return what a function finds, once it finds something."""
    until = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < until, f"{found} has found nothing for {seconds} s"
        time.sleep(0.02)
    return value


def free_ports(count):
    """Return ports of this machine that nobody has."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in taken]


def answers(port):
    """Return whether a server answers at a port."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def waiting_pids(flags):
    """Return the workers of an engine in whose children the row that is held waits."""
    return {int(path.name.partition("-")[2]) for path in pathlib.Path(flags).glob("at-*")}


def environment(*first):
    """Return an environment in which programs find datamat, the job of the tests, and before them `first`.

    Ray's workers run at the priority of their program: on a busy machine others left them nothing.
    """
    path = [*map(str, first), str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **ray}


@contextlib.contextmanager
def ray_alone():
    """Give an environment in which `ray.init` starts a Ray of its own.

    It looks in a folder that all programs of a machine share for the address of another, which may have been killed.
    """
    ours = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, for sockets
    try:
        yield {**environment(), "RAY_DEDUP_LOGS": "0", "RAY_TMPDIR": ours, "TMPDIR": "/tmp"}
    finally:
        shutil.rmtree(ours, ignore_errors=True)


class Programs:
    """Processes that end with a test."""

    def __init__(self, folder):
        self.folder = folder
        self.running = []

    def start(self, *command, path=(), host="", options=None):
        """Start a Python program, in the network of a host, with further variables of the environment."""
        where = ["ip", "netns", "exec", host] if host else []
        with open(self._log(len(self.running)), "w") as log:
            process = subprocess.Popen(
                [*where, sys.executable, *map(str, command)], cwd=self.folder, env=environment(*path) | (options or {}),
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def log(self, process):
        """Return what a process has written."""
        return self._log(self.running.index(process)).read_text()

    def _log(self, number):
        return self.folder / f"log-{number}.txt"

    def kill(self, process):
        """Kill a process, and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self):
        for process in self.running:
            self.kill(process)


class DaskCluster:
    """A scheduler and workers of Dask, one thread each.

    Args:
        programs: starts and ends them.
        num_workers: number of workers.
        path: folders that workers look for modules in first.
        listens_at: address of the scheduler.
        options: variables of its environment.
    """

    def __init__(self, programs, num_workers=2, path=(), *, listens_at="127.0.0.1", options=None):
        self.programs = programs
        self._listens_at, self._options = listens_at, options
        (self.port,) = free_ports(1)
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.start_scheduler()
        for _ in range(num_workers):
            self.start_worker(path)

    def start_scheduler(self):
        """Start the scheduler, always at the same address."""
        self.scheduler = self.programs.start(
            "-m", "distributed.cli.dask_scheduler", "--host", self._listens_at, "--port", self.port, "--no-dashboard",
            options=self._options,
        )  # fmt: skip

    def start_worker(self, path=(), host=None):
        """Start a worker, on a host or here, which ends with the scheduler that it finds."""
        address = f"tcp://{host.gateway}:{self.port}" if host else self.address
        at = ["--host", host.address] if host else []
        return self.programs.start(
            "-m", "distributed.cli.dask_worker", address, "--nthreads", 1, "--no-nanny", "--no-dashboard", *at,
            "--local-directory", self.programs.folder, path=path, host=host.name if host else "",
        )  # fmt: skip


class Host:
    """A network of its own, joined to that of this machine by one cable, which tests may cut.

    Args:
        number: from 0; of hosts at the same time, each has another.

    Raises:
        OSError: nobody may make one here.
    """

    def __init__(self, number):
        third = os.getpid() % 250 + 1
        self.gateway, self.address = (f"10.{213 + number}.{third}.{last}" for last in (1, 2))
        self.name = f"datamat-{os.getpid()}-{number}"
        self._cable = f"dm{os.getpid() % 100_000}-{number}"
        try:
            _ip("netns", "add", self.name)
            _ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _ip("addr", "add", f"{self.gateway}/30", "dev", self._cable)
            _ip("link", "set", self._cable, "up")
            for command in (f"addr add {self.address}/30 dev eth0", "link set eth0 up", "link set lo up"):
                _ip("-n", self.name, *command.split())
        except OSError:
            self.close()
            raise

    def cut(self):
        """Cut the cable: no packet passes, and no connection ends."""
        _ip("link", "set", self._cable, "down")

    def close(self):
        """Take the network away."""
        with contextlib.suppress(OSError):
            _ip("netns", "del", self.name)


def _ip(*command):
    try:
        subprocess.run(["ip", *command], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr) from error
