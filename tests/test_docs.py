"""The code in the documentation, run as its readers run it: from the top, in one unguarded script for each page."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from sets import make_pairs

DOCS = pathlib.Path(__file__).parents[1] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["quickstart", "reading", "writers"])
def test_code_of_page_runs(page, tmp_path):
    """The pieces of code, one after the other, run without an error or a warning beside a folder `CamVid`."""
    make_pairs(tmp_path / "CamVid")
    script = tmp_path / "page.py"
    script.write_text("\n".join(_pieces(page)))

    found = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=55,
    )

    assert found.returncode == 0, found.stderr


def _pieces(page: str) -> list[str]:
    pieces = re.findall(r"^```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert pieces, f"{page}.md has no code to run"
    return pieces
