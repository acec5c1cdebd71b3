"""The code in the documentation, run as its readers run it: from the top, in one unguarded script for each page."""

from __future__ import annotations

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
    "README.md",
    *("docs/quickstart.md", "docs/quickstart.ko.md", "docs/tutorial.md"),
    *("docs/segmentation.md", "docs/detection.md", "docs/audio.md", "docs/tables.md", "docs/tokens.md"),
    *("docs/training-class.md", "docs/colab.md", "docs/resume.md", "docs/coming-from.md"),
    *("docs/writers.md", "docs/reading.md", "docs/tf-data.md", "docs/convert.md", "docs/faults.md"),
    *("docs/how-a-run-works.md", "docs/how-reading-works.md"),
]
NEEDED = {"docs/audio.md": "soundfile"}


@pytest.fixture(scope="module")
def street(tmp_path_factory):
    """A small street set."""
    folder = tmp_path_factory.mktemp("street") / "CamVid"
    runpy.run_path(str(ROOT / "examples/street.py"))["make_street_set"](folder, num_pairs=10)
    return folder


@pytest.mark.timeout(300)  # TensorFlow is imported, and a busy machine is slow
@pytest.mark.parametrize("page", PAGES)
def test_code_of_page_runs(page, street, tmp_path):
    """The code blocks, one after the other, run without an error or a warning beside a folder `CamVid`."""
    if page in NEEDED:
        pytest.importorskip(NEEDED[page])
    shutil.copytree(street, tmp_path / "CamVid")
    script = tmp_path / "page.py"
    script.write_text("\n".join(_pieces(page)))

    found = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=280
    )

    assert found.returncode == 0, found.stderr


@pytest.mark.timeout(600)
def test_plug_ins_of_the_documentation_conform(tmp_path):
    """Each is under 30 lines, and passes the tests that the page shows beside it, run as its author would."""
    pieces = [piece for piece in _pieces("docs/extending.md") if "class Test" in piece]
    module = tmp_path / "test_page.py"
    module.write_text("\n".join(pieces))

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
    sizes = [
        len(re.findall(r"^(?!import|from)\S|^ ", piece.partition("class Test")[0], re.MULTILINE)) for piece in pieces
    ]
    assert max(sizes) < 30, sizes


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

    assert len(named) >= 25
    assert not gone


def test_reference_has_every_public_name_once_and_no_module():
    """It uses the names that programs import: users do not rely on where a class lives inside datamat."""
    page = (ROOT / "docs/reference.md").read_text()
    homes = re.split(r"^\.\. currentmodule:: (\S+)$", page, flags=re.MULTILINE)[1:]
    named = [
        f"{home}.{name}"
        for home, text in zip(homes[::2], homes[1::2], strict=True)
        for name in re.findall(r"^\.\. auto\w+:: (\S+)", text, re.MULTILINE)
    ]

    assert sorted(named) == sorted(f"{home.__name__}.{name}" for home in (datamat, testing) for name in home.__all__)
    assert set(re.findall(r"\bdatamat(?:\.[a-z_]+)+", page)) == {"datamat.testing"}


def test_no_line_of_code_is_cut():
    """The page of the theme shows 88 columns."""
    long = [
        f"{page.name}: {line}"
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for piece in re.findall(
            r"^```(?:py|py3|python|\{code-block\} python)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
        )
        for line in piece.splitlines()
        if len(line) > 88
    ]

    assert not long, "\n".join(long)


def test_charts_show_their_tables():
    """`python benchmarks/charts.py` renews them."""
    done = subprocess.run([sys.executable, ROOT / "benchmarks/charts.py", "--check"], check=False)

    assert done.returncode == 0, "a table has changed: run python benchmarks/charts.py"


def test_every_chart_is_on_a_page():
    """None is drawn in vain, and none is missing."""
    shown = {
        name for page in (ROOT / "docs").glob("*.md") for name in re.findall(r"\(([\w-]+\.svg)\)", page.read_text())
    }

    assert shown == {path.name for path in (ROOT / "docs").glob("*.svg")}


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
    """Each page is in one of the four kinds, once."""
    kinds = re.findall(r"```\{toctree\}.*?```", (ROOT / "docs/index.md").read_text(), re.DOTALL)
    placed = [name for kind in kinds for name in re.findall(r"^([\w.-]+)$", kind, re.MULTILINE)]

    assert sorted(placed) == sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")
    assert [re.search(r":caption: (.+)", kind)[1] for kind in kinds] == [
        "Tutorial",
        "How to",
        "Reference",
        "Explanation",
    ]
