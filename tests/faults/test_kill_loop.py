"""A short run of the benchmarks' kill loop: see `benchmarks/killloop.py`."""

import pathlib
import subprocess
import sys

import pytest

LOOP = pathlib.Path(__file__).parents[2] / "benchmarks" / "killloop.py"


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="inherits orphans, which only Linux can")
def test_kills_at_random_moments_lose_nothing(request):
    """They double, tear, hang and orphan nothing, and cost no more than a quarter of the work."""
    num_kills = 3 if request.config.getoption("--commit") else 40
    formats = ["--formats", "tfrecord"] if request.config.getoption("--commit") else []

    ended = subprocess.run(
        [sys.executable, LOOP, "--kills", str(num_kills), "--rows", "40", "--seed", "5", *formats],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"kills={num_kills} " in ended.stdout
