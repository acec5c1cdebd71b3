"""Each deliberate defect is caught by the test that is there to catch it; see tests/README.md."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from defects import DEFECTS

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_caught(name):
    """The test goes red under the defect; that it is green without is what the rest of the suite says."""
    path = os.pathsep.join([str(HERE / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "DATAMAT_SEEDED_BUG": name}
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "60"]

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, DEFECTS[name].caught_by],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 1, f"{DEFECTS[name].what}: not caught\n{ended.stdout[-3000:]}{ended.stderr[-1000:]}"
    assert "1 failed" in ended.stdout, f"it did not fail as a test: {ended.stdout[-3000:]}"


def test_there_are_enough_defects():
    """Each with a text of its own, and a test that exists."""
    assert len(DEFECTS) >= 15
    for defect in DEFECTS.values():
        file, _, test = defect.caught_by.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), defect.name
        assert defect.before != defect.after
