"""The notebooks in examples/ are those of the documentation with their outputs, and run in a real kernel."""

from __future__ import annotations

import pathlib
import re
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
    """`python docs/notebooks.py` renews them; sources and what the cells print are compared."""
    done = subprocess.run([sys.executable, ROOT / "docs/notebooks.py", "--check"], check=False)

    assert done.returncode == 0, "a page has changed: run python docs/notebooks.py"


def test_notebook_that_was_not_executed_or_printed_something_else_is_out_of_date():
    """The page shows what the cells of the notebook gave."""
    made, page = runpy.run_path(str(ROOT / "docs/notebooks.py")), (ROOT / "docs/tutorial.md").read_text()
    notebook = (ROOT / "examples/tf_training.ipynb").read_text()

    assert made["is_current"](page, notebook)
    assert not made["is_current"](page, made["without_outputs"](notebook))
    assert not made["is_current"](page.replace("960 80 part", "961 80 part"), notebook)
    assert not made["is_current"](page.replace("KINDS = (", "KINDS = ( "), notebook)


@pytest.mark.parametrize("name", ["tf_training", "colab_resume"])
def test_outputs_of_notebooks_hold_nothing_of_a_machine(name):
    """Printed text and pictures are kept: no error, no time, no path, and no more than a repository should hold."""
    path = ROOT / f"examples/{name}.ipynb"
    book = nbformat.reads(path.read_text(), as_version=4)
    outputs = [out for cell in book.cells for out in cell.get("outputs", [])]

    assert outputs
    nbformat.validate(book)
    assert {out.output_type for out in outputs} <= {"stream", "execute_result"}
    assert not [out for out in outputs if out.get("name") == "stderr"]
    assert not re.search(r"/tmp|/home|/work| in \d+\.\d+ s", path.read_text())
    assert path.stat().st_size < 200_000
    assert any("image/jpeg" in out.get("data", {}) for out in outputs) or name != "tf_training"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_tutorial_trains_with_tensorflow(tmp_path):
    """It makes shards of data of its own, has nothing to do when run again, and the model learns."""
    pytest.importorskip("keras")

    said = execute((ROOT / "examples/tf_training.ipynb").read_text(), tmp_path)

    assert "complete: True" in said
    assert "right: True" in said


@pytest.mark.long
@pytest.mark.timeout(300)
def test_tutorial_trains_with_torch(tmp_path):
    """The cells of PyTorch follow those that make the shards."""
    pytest.importorskip("torch")
    page = (ROOT / "docs/tutorial.md").read_text()
    before, rest = page.split("## Train with TensorFlow")
    notebook_of = runpy.run_path(str(ROOT / "docs/notebooks.py"))["notebook_of"]

    said = execute(notebook_of(before + rest[rest.index("## Train with PyTorch") :], ("python", "py")), tmp_path)

    assert "right: True" in said


@pytest.mark.long
@pytest.mark.timeout(200)
def test_colab_notebook_stops_and_goes_on(tmp_path):
    """The deadline stops the first run; the second one ends it."""
    said = execute((ROOT / "examples/colab_resume.ipynb").read_text(), tmp_path)

    assert "complete: True records: 2000" in said
