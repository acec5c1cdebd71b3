"""Cause faults to a job and check what is left: the shim's control block, runs under it, and what must hold."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import mmap
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import small_pairs

from datamat import load, verify

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = pathlib.Path(__file__).parent
LIMIT_S = 40.0
_FORK_S = 600.0  # of the server: before its first, it imports everything
ORPHAN_S = 2.0

ACTIONS = ("nothing", "fail", "short", "kill", "kill group", "tear", "lie", "clock")
KINDS = {"open": 1, "write": 2, "fsync": 4, "rename": 8, "unlink": 16, "mkdir": 32, "truncate": 64, "read": 128}
KINDS["close"] = 256
CHANGES = ("open", "write", "fsync", "rename", "unlink", "mkdir", "truncate", "close")
_FOREVER = 1 << 62


class _Block(ctypes.Structure):
    """The shim's `struct control`."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("action", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("kinds", ctypes.c_uint32),
        ("fired", ctypes.c_int32),
        ("folder", ctypes.c_char * 4096),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen to which operation.

    Attributes:
        action: one of `ACTIONS`: an error; half of the data is taken; the process, or its group, is killed before the
            operation; it is killed after half of the data was written; nothing is done, and success is reported.
        at: number of the operation that is hit, from 1.
        error: number of the error, for "fail".
        persists: whether all later operations are hit as well.
        kinds: kinds of operations that count.
        shift_s: how far the clock is set back from then on, for "clock".
    """

    action: str = "nothing"
    at: int = 0
    error: int = 0
    persists: bool = False
    kinds: tuple[str, ...] = CHANGES
    shift_s: int = 0


class Control:
    """The control block that the shim maps.

    Args:
        path: file for it; made.
    """

    def __init__(self, path: pathlib.Path) -> None:
        path.write_bytes(bytes(ctypes.sizeof(_Block)))
        self.path = path
        with open(path, "r+b") as file:
            self._block = _Block.from_buffer(mmap.mmap(file.fileno(), 0))

    def set(self, fault: Fault, folder: str | os.PathLike[str]) -> None:
        """Choose what happens, to files below a folder, and count from 0."""
        block = self._block
        block.kinds = 0  # nothing is counted while the block is half written
        block.folder = os.fsencode(os.path.realpath(folder))
        block.count = block.fired = 0
        block.first = fault.at
        block.last = _FOREVER if fault.persists else fault.at
        block.action = ACTIONS.index(fault.action)
        block.error, block.shift = fault.error, fault.shift_s
        block.kinds = sum(KINDS[kind] for kind in fault.kinds)

    @property
    def count(self) -> int:
        """The number of operations since `set`."""
        return int(self._block.count)

    @property
    def fired(self) -> int:
        """The number of operations that the fault hit."""
        return int(self._block.fired)

    def environment(self, shim: pathlib.Path) -> dict[str, str]:
        """Return the environment of a process that the shim is to control."""
        return {**os.environ, "LD_PRELOAD": str(shim), "FAULT_CONTROL": str(self.path)}


def compiled(folder: pathlib.Path) -> pathlib.Path:
    """Return the shim, compiled into `folder`; skips the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("the shim needs Linux and a C compiler")
    library = folder / "shim.so"
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, HERE / "shim.c"], check=True
    )
    return library


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended.

    Attributes:
        code: its exit code, negative for a signal, None if it hung and was killed.
        said: output of the run, both streams.
        num_orphans: processes of it that lived 2 s longer.
        num_operations: number of operations that the shim counted.
        num_hit: number of operations that the fault hit.
    """

    code: int | None
    said: str
    num_orphans: int
    num_operations: int = 0
    num_hit: int = 0

    @property
    def error(self) -> str:
        """The error that it ended with, and its notes: the text after the last traceback."""
        lines = self.said.splitlines()
        last = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=-1)
        return "\n".join(lines[last + 1 :])


class Process:
    """A job in a process, and a process group, of its own; a context manager, which leaves nothing alive.

    Args:
        job: the job, or any command.
        folder: for the gate where it is to wait.
        is_gated: whether it waits at the row `GATED_KEY`, until `open_gate`.
        options: options of `subprocess.Popen`.
    """

    def __init__(self, job: Any, folder: pathlib.Path, *, is_gated: bool = False, **options: Any) -> None:
        self._gate = folder / "gate"
        environment = {**os.environ, **options.pop("env", {})}
        if is_gated:
            self._gate.mkdir(exist_ok=True)
            for name in ("reached", "go"):
                if not (self._gate / name).exists():
                    os.mkfifo(self._gate / name)
            environment["FAULT_GATE"] = str(self._gate)
        self.popen = subprocess.Popen(
            job.command(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            **options,
        )
        self._said = bytearray()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        self.process = psutil.Process(self.popen.pid)
        self._below: list[psutil.Process] = []

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            reap_below(self.process, grace_s=0)
            self.popen.kill()
            self.popen.wait()
        self._listener.join()

    def _listen(self) -> None:
        assert self.popen.stdout
        with self.popen.stdout as said:
            for line in said:
                self._said += line

    def wait_at_gate(self) -> psutil.Process:
        """Wait until the gated row has its turn; return the process of its worker."""
        with open(self._gate / "reached") as reached:
            worker = psutil.Process(int(reached.read()))
        # Asked for now: once the parent is dead, they are no longer its children.
        self._below = self.process.children(recursive=True)
        assert worker in self._below
        return worker

    def open_gate(self) -> None:
        """Let the gated row continue, also where it is read again to compare, unless the run has ended without it."""
        while self.popen.poll() is None:
            try:  # opened for good, it would wait for ever for a worker that has died
                go = os.open(self._gate / "go", os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:  # nobody reads
                    raise
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.popen.wait(0.01)
            else:
                for name in ("reached", "go"):
                    (self._gate / "plain").touch()
                    os.replace(self._gate / "plain", self._gate / name)
                with contextlib.suppress(BrokenPipeError):  # its reader has died since
                    os.write(go, b"go")
                os.close(go)
                return

    def ended(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait for the end; a run that takes too long counts as hung."""
        below = self._below or (self.process.children(recursive=True) if self.popen.poll() is None else [])
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.popen.wait(limit_s)
        if code is None:
            reap_below(self.process, grace_s=0)
            self.popen.kill()
        num_orphans = reap_all(below)
        self._listener.join()
        return Ended(code, self._said.decode(errors="replace"), num_orphans)


class JobServer:
    """Runs jobs in forks of a process that has imported everything; see `job_server.py`.

    Args:
        shim: the library; None runs without faults.
        folder: for the control block and logs.
    """

    def __init__(self, shim: pathlib.Path | None, folder: pathlib.Path) -> None:
        self.control = Control(folder / "control")
        self._log = folder / "log"
        environment = self.control.environment(shim) if shim else dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(HERE.parent), environment.get("PYTHONPATH", "")]
        )  # `small_pairs` is there
        self._process = subprocess.Popen(
            [sys.executable, HERE / "job_server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        self._answers = b""

    def run(self, job: Any, fault: Fault | None = None, *, limit_s: float = LIMIT_S) -> Ended:
        """Run a job under a fault to its end, and end what it leaves behind."""
        self.control.set(fault or Fault(kinds=()), job.output)
        order = {"job": dataclasses.asdict(job), "out": str(self._log), "err": str(self._log)}
        code, num_orphans = self._run(order, limit_s)
        said = self._log.read_text(errors="replace")
        return Ended(code, said, num_orphans, self.control.count, self.control.fired)

    def run_script(self, path: pathlib.Path, limit_s: float = LIMIT_S, **environment: str) -> tuple[Any, str, str, int]:
        """Run a script in its folder; return its exit code, both streams, and how many processes it left behind."""
        err = self._log.with_name("err")
        order = {"script": str(path), "environment": environment, "out": str(self._log), "err": str(err)}
        code, num_orphans = self._run(order, limit_s)
        return code, self._log.read_text(), err.read_text(), num_orphans

    def _run(self, order: dict[str, Any], limit_s: float) -> tuple[int | None, int]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        pid = self._answer(_FORK_S)
        code = self._answer(limit_s)
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            self._answer(_FORK_S)
        return code, reap_below(psutil.Process(self._process.pid))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self, limit_s: float) -> Any:
        assert self._process.stdout
        # Without Python's buffers: `select` sees nothing of a second line that came along with the first.
        while b"\n" not in self._answers:
            if not select.select([self._process.stdout], [], [], limit_s)[0]:
                return None
            answer = self._process.stdout.read(1 << 16)
            assert answer, "the job server has ended"
            self._answers += answer
        line, _, self._answers = self._answers.partition(b"\n")
        return json.loads(line)


def reap_below(parent: psutil.Process, *, grace_s: float = ORPHAN_S) -> int:
    """Wait for the processes below `parent`; kill those that take longer, and return their number."""
    return reap_all(parent.children(recursive=True), grace_s=grace_s)


def reap_all(processes: list[psutil.Process], *, grace_s: float = ORPHAN_S) -> int:
    """Wait for processes; kill those that take longer, and return their number."""
    deadline = time.monotonic() + grace_s
    alive = [process for process in processes if not _has_ended(process, deadline)]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(alive)


def _has_ended(process: psutil.Process, deadline: float) -> bool:
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:  # readable once the process has ended, even where nobody has waited for it yet
        return bool(select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0])
    finally:
        os.close(descriptor)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.01)


def check_visible(output: pathlib.Path, reference: dict[str, str]) -> None:
    """Check that each file with a final name has the content that belongs there."""
    found = small_pairs.digests(output) if output.is_dir() else {}
    assert {name: reference.get(name) for name in found} == found


def records(output: pathlib.Path | str) -> dict[str, bytes]:
    """Return what readers find in a finished directory, with which nothing is wrong: the image of each key."""
    report = verify(output)
    assert report.ok, str(report)
    return {sample["key"]: sample["image"].tobytes() for sample in load(output)}


def left_behind(output: pathlib.Path) -> list[str]:
    """Return what a run should have removed from `.datamat`, or beside it, but did not."""
    kept = {"inputs", "lock", "ledger.jsonl", "memos.json", "names.json", "quarantine", "sidecars.json"}
    found = [path.name for path in (output / ".datamat").iterdir() if path.name not in kept]
    return sorted(found + [path.name for path in output.rglob(".datamat-*")])
