"""A sample eats all the memory there is, and nobody set a limit: the kernel kills its worker, for real."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import psutil
import pytest
import small_pairs

from datamat import load
from datamat.directory.ledger import read_ledger

LIMIT_BYTES = 1 << 30
GROUPS = pathlib.Path("/sys/fs/cgroup")

JOB = """
import os, pathlib, sys
(pathlib.Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
import numpy as np, small_pairs
from datamat import Materializer, ShardOptions, WorkerOptions

class Eater(small_pairs.Pairs):
    def read(self, row):
        eaten = []
        while row.key == "train003":
            eaten.append(np.ones(1 << 26, np.uint8))
        return super().read(row)

job = Materializer(Eater(), sys.argv[2], sys.argv[3], shards=2)
workers = WorkerOptions(num_workers=2, start_method=sys.argv[4])
print(job.run(errors="skip", workers=workers, progress=False).num_failed)
"""


@pytest.fixture
def group():
    """A control group of the kernel with a gibibyte of memory and no swap, version 2 or 1."""
    version_2 = (GROUPS / "cgroup.controllers").exists()
    folder = (GROUPS if version_2 else GROUPS / "memory") / f"datamat-test-{os.getpid()}"
    limits = ("memory.max", "memory.swap.max") if version_2 else ("memory.limit_in_bytes",)
    try:
        folder.mkdir()
        (folder / limits[0]).write_text(str(LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group for memory can be made here: {error}")
    for name in limits[1:]:
        with contextlib.suppress(OSError):  # no swap, so no limit on it
            (folder / name).write_text("0")
    yield folder
    left = [
        psutil.Process(int(pid)) for pid in (folder / "cgroup.procs").read_text().split() if psutil.pid_exists(int(pid))
    ]
    psutil.wait_procs(left, timeout=30)  # the servers of a pool may end a moment after the program
    folder.rmdir()


@pytest.mark.long  # the kernel swaps and kills as slowly as the machine is busy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_sample_that_eats_the_machine_costs_two_workers_and_nothing_else(group, tmp_path, method):
    """The killed worker's row is retried once, and then handled by the policy; all other rows are stored."""
    small_pairs.make_pairs(tmp_path / "source")

    done = subprocess.run(
        [sys.executable, "-c", JOB, group, tmp_path / "source", tmp_path / "out", method],
        capture_output=True, text=True, check=False, timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(pathlib.Path(small_pairs.__file__).parent), *sys.path])},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    entries = list(read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl"))
    (skipped,) = (entry.values for entry in entries if entry.event == "sample_skipped")
    deaths = [json.dumps(entry.values) for entry in entries if entry.event == "worker_died"]
    assert (skipped["key"], skipped["error"], skipped["attempts"]) == ("train003", "WorkerDied", 2)
    assert len(deaths) == 2 and all("out-of-memory killer" in death for death in deaths)
    assert done.stdout.strip() == "1" and len(load(tmp_path / "out")) == 23
