"""Each deliberate defect is caught by the test that is there to catch it; see tests/README.md."""

from __future__ import annotations

import importlib.util
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
    options = ["-x", "-p", "no:cacheprovider", "--timeout", "60"]

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, DEFECTS[name].caught_by],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    # 1: tests ran, and some failed. An import that fails, or a test that is not there, gives another code.
    assert ended.returncode == 1, f"{DEFECTS[name].what}: not caught\n{ended.stdout[-3000:]}{ended.stderr[-1000:]}"


def test_defects_fit_the_sources():
    """Enough of them, each with a text that its module holds just once, and a test that exists."""
    assert len(DEFECTS) >= 15
    for defect in DEFECTS.values():
        source = pathlib.Path(importlib.util.find_spec(defect.module).origin).read_text()
        file, _, test = defect.caught_by.partition("::")
        assert source.count(defect.before) == 1, f"{defect.name}: {defect.module} was changed; renew its text"
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), f"{defect.name}: {test} is gone"
