"""Runs on Ray: the bytes are those of a run on this machine, whatever dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="make test-interop installs Ray")

import engine_job
from clusters import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

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


def test_ray_gives_the_bytes_of_this_machine(tmp_path):
    """Also where a worker is killed in the middle of a part, which Ray makes again."""
    engine_job.job(tmp_path / "here").run(progress=False)
    flags = tmp_path / "flags"
    flags.mkdir()
    (flags / "go").touch()
    engine_job.job(tmp_path / "held", flags).run(progress=False)
    for path in flags.iterdir():
        path.unlink()
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**environment(), "RAY_DEDUP_LOGS": "0", "TMPDIR": "/tmp"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["engine"].startswith("Ray at ") and found["killed"] == 1
    assert found["messages"] == engine_job.NUM_ROWS
    assert engine_job.digests(tmp_path / "out") == engine_job.digests(tmp_path / "here")
    assert engine_job.digests(tmp_path / "killed") == engine_job.digests(tmp_path / "held")
    assert len(os.listdir(tmp_path / "lambda")) > 3
