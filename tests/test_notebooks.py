"""The notebooks in examples/ are those of the documentation, and run in a real kernel as they are."""

from __future__ import annotations

import pathlib
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")


def execute(text: str, folder: pathlib.Path) -> str:
    """Execute a notebook in a kernel of its own; return what its cells printed."""
    book = nbformat.reads(text, as_version=4)
    resources = {"metadata": {"path": str(folder)}}

    nbclient.NotebookClient(book, timeout=200, kernel_name="python3", resources=resources).execute()

    return "".join(out.get("text", "") for cell in book.cells for out in cell.get("outputs", []))


def test_notebooks_are_made_of_the_documentation():
    """`python docs/notebooks.py` renews them."""
    done = subprocess.run([sys.executable, ROOT / "docs/notebooks.py", "--check"], check=False)

    assert done.returncode == 0, "a page has changed: run python docs/notebooks.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tutorial_trains_with_tensorflow(tmp_path):
    """It makes shards of data of its own, has nothing to do when run again, and the model learns."""
    pytest.importorskip("keras")

    said = execute((ROOT / "examples/tf_training.ipynb").read_text(), tmp_path)

    assert "complete: True" in said
    assert "right: True" in said
    assert (tmp_path / "parts.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tutorial_trains_with_torch(tmp_path):
    """The cells of PyTorch follow those that make the shards."""
    pytest.importorskip("torch")
    page = (ROOT / "docs/tutorial.md").read_text()
    before, rest = page.split("## Train with TensorFlow")
    notebook_of = runpy.run_path(str(ROOT / "docs/notebooks.py"))["notebook_of"]

    said = execute(notebook_of(before + rest[rest.index("## Train with PyTorch") :], ("python", "py")), tmp_path)

    assert "right: True" in said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_colab_notebook_stops_and_goes_on(tmp_path):
    """The deadline stops the first run; the second one ends it."""
    said = execute((ROOT / "examples/colab_resume.ipynb").read_text(), tmp_path)

    assert "complete: True records: 2000" in said
