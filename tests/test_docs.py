"""The code in the documentation, run as its readers run it: from the top, in one unguarded script for each page."""

from __future__ import annotations

import pathlib
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/quickstart.md", "docs/reading.md", "docs/writers.md", "docs/faults.md", "docs/convert.md"],
)
def test_code_of_page_runs(page, tmp_path):
    """The pieces of code, one after the other, run without an error or a warning beside a folder `CamVid`."""
    runpy.run_path(str(ROOT / "examples/street.py"))["make_street_set"](tmp_path / "CamVid", num_pairs=10)
    script = tmp_path / "page.py"
    script.write_text("\n".join(_pieces(page)))

    found = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=50
    )

    assert found.returncode == 0, found.stderr


def _pieces(page: str) -> list[str]:
    pieces = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert pieces, f"{page} has no code to run"
    return pieces
