"""The core is a package of its own: copied elsewhere under another name, it passes its tests where datamat is not."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import datamat.parallel

HERE = pathlib.Path(__file__).parent
NAME = "mapper"
ABSENT = 'raise ImportError("datamat is not here")\n'
OF_THE_CORE = re.compile(r"\bdatamat\.parallel\b|\bdatamat(?=\.errors\b)|(?<=from )datamat(?= import)")
OF_DATAMAT = re.compile(
    r"datamat\.(?!parallel)\w+ import|\bimport datamat\b|import .*\btesting\b|Materializer|materialize"
)
ON_COMMIT = ("test_chunks.py", "test_example.py", "test_items.py", "test_pickling.py", "test_retire.py")


def renamed(text: str) -> str:
    """Return code that uses the core under its other name."""
    return OF_THE_CORE.sub(NAME, text)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the core under another name, those of its tests that use nothing else, and no datamat."""
    root = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(pathlib.Path(datamat.parallel.__file__).parent, root / NAME)
    shutil.copytree(HERE, root / "tests" / "parallel")
    for path in HERE.parent.glob("*.py"):
        if not path.name.startswith("test_"):
            shutil.copy(path, root / "tests")
    for path in root.rglob("*.py"):
        path.write_text(renamed(path.read_text()))
    (root / "datamat.py").write_text(ABSENT)
    (root / "pyproject.toml").write_text((HERE.parents[1] / "pyproject.toml").read_text())
    return root


def run_tests(root: pathlib.Path, *files: str, **options: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTEST_ADDOPTS": ""}
    environment.pop("TMPDIR", None)  # below that of these tests, paths would be too long for sockets
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--commit", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        cwd=root / "tests" / "parallel",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@pytest.mark.timeout(300)
def test_core_passes_its_tests_under_another_name(elsewhere):
    ended = run_tests(elsewhere, *ON_COMMIT)

    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_core_passes_all_its_tests_under_another_name(elsewhere):
    files = [path.name for path in HERE.glob("test_*.py") if path.name != pathlib.Path(__file__).name]
    own = [name for name in files if not OF_DATAMAT.search((elsewhere / "tests/parallel" / name).read_text())]

    ended = run_tests(elsewhere, *own)

    assert len(own) > 25
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
