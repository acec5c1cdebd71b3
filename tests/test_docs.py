"""The code in the documentation, run as its readers run it: from the top, in one unguarded script for each page."""

from __future__ import annotations

import importlib
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest

import datamat
from datamat import testing

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
    *("docs/quickstart.md", "docs/quickstart.ko.md", "docs/tutorial.md"),
    *("docs/segmentation.md", "docs/detection.md", "docs/audio.md", "docs/tables.md", "docs/tokens.md"),
    "docs/robots.md",
    *("docs/training-class.md", "docs/colab.md", "docs/resume.md", "docs/coming-from.md"),
    *("docs/writers.md", "docs/reading.md", "docs/tf-data.md", "docs/convert.md", "docs/faults.md"),
    *("docs/how-a-run-works.md", "docs/how-reading-works.md", "docs/maintenance.md"),
]
SLOW = {"docs/quickstart.md", "docs/quickstart.ko.md", "docs/tutorial.md", "docs/tf-data.md", "docs/detection.md"}
"""Pages that take the longest: they train, or make many pictures."""
MODULES = ("directory.sidecars", "events", "parallel", "readers.tf", "testing", "view", "writers")
"""Modules of which all names are public."""
NEEDED = {"docs/audio.md": "soundfile", "docs/robots.md": "av"}


@pytest.fixture(scope="module")
def street(tmp_path_factory):
    """A small street set."""
    folder = tmp_path_factory.mktemp("street") / "CamVid"
    runpy.run_path(str(ROOT / "examples/street.py"))["make_street_set"](folder, num_pairs=10)
    return folder


@pytest.mark.timeout(300)
def test_code_of_the_readme_runs(street, tmp_path):
    """The code blocks, one after the other, run without an error or a warning beside a folder `CamVid`."""
    _run_code_of("README.md", street, tmp_path)


@pytest.mark.sample(9)
@pytest.mark.timeout(300)  # TensorFlow is imported, and a busy machine is slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.long] if page in SLOW else []) for page in PAGES]
)
def test_code_of_page_runs(page, street, tmp_path):
    """As in the README; a page may need a package."""
    if page in NEEDED:
        pytest.importorskip(NEEDED[page])
    if page == "docs/robots.md":
        runpy.run_path(str(ROOT / "examples/robots.py"))["record"](tmp_path / "pusht")
    _run_code_of(page, street, tmp_path)


def _run_code_of(page, street, folder):
    shutil.copytree(street, folder / "CamVid")
    script = folder / "page.py"
    script.write_text("\n".join(_pieces(page)))

    found = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, check=False, cwd=folder, timeout=280
    )

    assert found.returncode == 0, found.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_plug_ins_of_the_documentation_conform(tmp_path):
    """Each passes the tests that the page shows beside it, run as its author would."""
    module = tmp_path / "test_page.py"
    module.write_text("\n".join(piece for piece in _pieces("docs/extending.md") if "class Test" in piece))

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", module],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    shown = set(re.findall(r"class Test\w+\((\w+)\)", module.read_text()))
    assert shown == {name for name in testing.__all__ if name.endswith("Conformance")}
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert "passed" in ended.stdout


def _pieces(page: str) -> list[str]:
    pieces = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert pieces, f"{page} has no code to run"
    return pieces


def test_tests_that_the_documentation_names_exist():
    """The table of what a fingerprint covers promises a test for each line."""
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs/faults.md").read_text())

    gone = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in next((ROOT / "tests").rglob(file)).read_text()
    ]

    assert named
    assert not gone


def test_reference_has_every_public_name_once():
    """With what their calls take and return, by the names that programs import."""
    named = []
    for page in (ROOT / "docs/reference").glob("*.md"):
        homes = re.split(r"^\.\. currentmodule:: (\S+)$", page.read_text(), flags=re.MULTILINE)[1:]
        for home, text in zip(homes[::2], homes[1::2], strict=True):
            names = re.findall(r"^\.\. auto\w+:: (\S+)", text, re.MULTILINE)
            assert [name for name in names if not hasattr(importlib.import_module(home), name)] == [], page.name
            named += names

    homes = [datamat, *(importlib.import_module(f"datamat.{module}") for module in MODULES)]
    public = {name for home in homes for name in home.__all__}
    assert sorted(public - set(named)) == []
    assert len(set(named)) == len(named)


@pytest.mark.long
def test_charts_show_their_tables():
    """`python benchmarks/charts.py` renews them."""
    done = subprocess.run([sys.executable, ROOT / "benchmarks/charts.py", "--check"], check=False)

    assert done.returncode == 0, "a table has changed: run python benchmarks/charts.py"


def test_every_chart_is_on_a_page():
    """None is drawn in vain, none is missing, and each can be read on a dark screen."""
    shown = {
        name for page in (ROOT / "docs").glob("*.md") for name in re.findall(r"\(([\w-]+\.svg)\)", page.read_text())
    }

    charts = list((ROOT / "docs").glob("*.svg"))

    assert shown == {path.name for path in charts}
    assert [path.name for path in charts if "(prefers-color-scheme: dark)" not in path.read_text()] == []


@pytest.mark.long
def test_comparison_counts_the_programs_as_they_are(monkeypatch):
    """Lines and concepts of each tool are those of its program in `benchmarks/comparison`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks/comparison")
    compare = runpy.run_path(str(ROOT / "benchmarks/comparison/compare.py"))
    page = (ROOT / "docs/comparison.md").read_text()

    rows = re.findall(r"^\| .+? \| `with_(\w+)\.py` \| (\d+) \| (\d+) \|", page, re.MULTILINE)

    assert {name for name, _, _ in rows} == set(compare["TOOLS"])
    for name, lines, concepts in rows:
        assert compare["size_of"](name) == (int(lines), int(concepts)), name


def test_every_page_has_its_place():
    """Each page is in the table of contents, once."""
    kinds = re.findall(r"```\{toctree\}.*?```", (ROOT / "docs/index.md").read_text(), re.DOTALL)
    placed = [name for kind in kinds for name in re.findall(r"^([\w.-]+)$", kind, re.MULTILINE)]
    families = re.findall(r"^reference/([\w.-]+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)

    assert sorted(placed) == sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")
    assert sorted(families) == sorted(page.stem for page in (ROOT / "docs/reference").glob("*.md"))
