"""Runs on Ray: the bytes are those of a run on this machine, whatever dies."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types

import psutil
import pytest

pytest.importorskip("ray", reason="make test-all installs Ray")

import engine_job
from clusters import HERE, Programs, answers, free_ports, ray_alone, wait_for, waiting_pids

pytestmark = [pytest.mark.long, pytest.mark.timeout(480)]

PROGRAM = """
import json, logging, os, pathlib, signal, sys, threading
import ray
import engine_job
from clusters import wait_for, waiting_pids
from datamat import materialize

heard = []
class Handler(logging.Handler):
    def emit(self, record):
        heard.append((record.name, record.getMessage(), record.process))
logging.getLogger("engine_job").addHandler(Handler())
logging.getLogger("engine_job").setLevel(logging.INFO)

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    report = engine_job.job("out", executor="ray").run(progress=False)
    materialize(lambda n: {"n": n}, range(5), "lambda", executor=ray, progress=False)

    flags = pathlib.Path("flags")
    killed = []
    def kill():
        (first,) = wait_for(lambda: waiting_pids(flags))
        os.kill(first, signal.SIGKILL)
        killed.append(first)
        wait_for(lambda: waiting_pids(flags) - {first})
        (flags / "go").touch()
    thread = threading.Thread(target=kill)
    thread.start()
    engine_job.job("killed", flags.absolute(), executor="ray").run(progress=False)
    thread.join()
    ray.shutdown()
    messages = {message for name, message, process in heard if process != os.getpid()}
    print(json.dumps({"engine": report.engine, "killed": len(killed), "messages": len(messages)}))
"""


def test_ray_gives_the_bytes_of_this_machine(tmp_path, flags, held):
    """Also where a worker is killed in the middle of a part, which Ray makes again."""
    engine_job.job(tmp_path / "here").run(progress=False)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    with ray_alone() as env:
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["engine"].startswith("Ray at ") and found["killed"] == 1
    assert found["messages"] == engine_job.NUM_ROWS
    assert engine_job.digests(tmp_path / "out") == engine_job.digests(tmp_path / "here")
    assert engine_job.digests(tmp_path / "killed") == held
    assert len(os.listdir(tmp_path / "lambda")) > 3


def test_cluster_without_workers(tmp_path):
    """The run says what it waits for, and ends at its deadline."""
    (tmp_path / "program.py").write_text(
        "import ray, engine_job\n"
        "from datamat.run import dispatch\n"
        "dispatch._SILENCE_S = 0.2\n"
        "ray.init(num_cpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)\n"
        "print(engine_job.job('out', executor='ray').run(deadline=4, progress=False).stopped)\n"
    )

    with ray_alone() as env:
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    assert done.stdout.split()[-1:] == ["deadline"], done.stderr[-3000:]
    assert done.stderr.count("has no workers: start some, or stop with Ctrl-C") == 1


@pytest.fixture
def cluster(tmp_path_factory):
    """A cluster of Ray that is nobody's child: two processors, and a server for clients."""
    programs = Programs(tmp_path_factory.mktemp("cluster"))
    ours = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, for sockets; others do not find this cluster by it
    ports = free_ports(2)
    head = programs.start(
        "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1",
        f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}", "--include-dashboard=false",
        f"--object-store-memory={80 << 20}", "--disable-usage-stats", f"--temp-dir={ours}",
    )  # fmt: skip

    def end():
        servers = [] if head.poll() is not None else psutil.Process(head.pid).children(recursive=True)
        programs.close()
        for server in servers:  # in groups of their own
            with contextlib.suppress(psutil.NoSuchProcess):
                server.kill()

    try:
        wait_for(lambda: head.poll() is not None or answers(ports[1]), seconds=90)
        yield types.SimpleNamespace(address=f"ray://127.0.0.1:{ports[1]}", end=end)
    finally:
        end()
        shutil.rmtree(ours, ignore_errors=True)


def driver_at(programs, output, address, flags, known=frozenset()):
    """Start a run, and wait until its row waits in a process that is not known; return both.

    Ray's server for clients starts one more for each client, which on a busy machine it may give up.
    """
    for _ in range(3):
        driver = programs.start(HERE / "engine_job.py", output, address, flags)
        wait_for(lambda driver=driver: driver.poll() is not None or waiting_pids(flags) - known, seconds=80)
        if driver.poll() is None:
            return driver, waiting_pids(flags) - known
        said = programs.log(driver)
        assert "Starting Ray client server failed" in said or "Initialization failure from server" in said, said
    raise AssertionError(programs.log(driver))


def test_driver_killed_and_run_again(tmp_path, cluster, programs, flags, held):
    """On the same cluster, where a worker is still at a part of the one that was killed: its parts stay."""
    driver, first = driver_at(programs, tmp_path / "out", cluster.address, flags)
    wait_for(lambda: list((tmp_path / "out" / ".datamat" / "parts").glob("*/*.receipt")))  # of the other worker
    programs.kill(driver)

    again, _ = driver_at(programs, tmp_path / "out", cluster.address, flags, first)
    (flags / "go").touch()

    assert again.wait(120) == 0, programs.log(again)
    assert int(programs.log(again).splitlines()[-1]) > 0  # parts that it has taken over
    assert engine_job.digests(tmp_path / "out") == held


def test_cluster_that_is_gone(tmp_path, cluster, programs, flags, monkeypatch):
    """All of its processes have ended: an error of the engine, which names one of the parts."""
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "2")
    driver, _ = driver_at(programs, tmp_path / "out", cluster.address, flags)
    cluster.end()

    assert driver.wait(120) == 1, programs.log(driver)
    assert "was lost: Ray at ray://" in programs.log(driver)
    assert "BrokenPoolError" in programs.log(driver)
