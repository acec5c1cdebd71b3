"""A test of one's own that writes a small dataset, run by pytest from within the program.

Prints: pytest ended with 0
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import os
import pathlib
import subprocess
import sys

pathlib.Path("raw").mkdir(exist_ok=True)
pathlib.Path("raw/test_mine.py").write_text(
    f"""
import threading

import numpy as np
import pytest

from datamat import WorkerOptions, load, materialize

START_METHOD, NUM_WORKERS = {START_METHOD!r}, {NUM_WORKERS!r}


@pytest.fixture(scope="module")
def lock():
    return threading.RLock()


def helper(i):
    return np.full(3, i)


class TestMine:
    factor = 5

    def sample(self, i):
        assert i >= 0
        return {{"x": helper(i) * self.factor}}

    def test_counts(self, lock, capsys):
        with lock:
            workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
            materialize(self.sample, range(20), "out", workers=workers, progress=False)
        assert sorted(int(one["x"][0]) for one in load("out")) == [i * 5 for i in range(20)]
        assert capsys.readouterr() == ("", "")
"""
)
command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "raw/test_mine.py"]
ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
print("pytest ended with", ended.returncode)
assert ended.returncode == 0, ended.stdout
