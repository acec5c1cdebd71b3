"""Makes the notebooks in examples/ of pages of the documentation: prose becomes text, each block of Python a cell.

    python docs/notebooks.py            # write and execute those that are out of date
    python docs/notebooks.py --all      # execute all of them again
    python docs/notebooks.py --check    # fail where one is out of date, without executing it

Blocks marked `py`, which need torch, stay out. A `text` block below one of Python is what that block prints: `--check`
compares it with the outputs. What differs from machine to machine is no output here: bars with their times, and what
is written to stderr. `tests/test_notebooks.py` executes the notebooks too.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import pathlib
import re
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = {"tf_training": "tutorial", "colab_resume": "colab"}
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_WIDTH = 660  # pixels of a picture in a notebook


def notebook_of(page: str, languages: tuple[str, ...] = ("python",)) -> str:
    """Return the notebook of a page as JSON text, not executed."""
    cells = []
    for number, piece in enumerate(_BLOCK.split(page)):
        if number % 3 == 0 and piece.strip():
            cells.append(("markdown", _linked(piece.strip())))
        elif number % 3 == 1:
            language = piece
        elif number % 3 == 2 and language in languages:
            cells.append(("code", piece.rstrip()))
    book = {
        "cells": [
            _cell(number, kind, text) for number, (kind, text) in enumerate(cells)
        ],
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return _text(book)


def printed_on(page: str) -> list[str]:
    """Return what the blocks of Python print, for each that a block of text follows."""
    kinds = [(block[1], block[2]) for block in _BLOCK.finditer(page)]
    return [
        text
        for (before, _), (kind, text) in itertools.pairwise(kinds)
        if before == "python" and kind == "text"
    ]


def without_outputs(text: str) -> str:
    """Return a notebook as it was before it was executed."""
    book = json.loads(text)
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            cell.update(execution_count=None, outputs=[])
    return _text(book)


def executed(text: str) -> str:
    """Return a notebook with its outputs, made by a kernel in an empty folder."""
    import nbclient
    import nbformat

    book = nbformat.reads(text, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            book, timeout=300, resources={"metadata": {"path": folder}}
        ).execute()
    made = json.loads(text)
    for cell, ran in zip(made["cells"], book.cells, strict=True):
        if ran.cell_type == "code":
            cell["execution_count"] = ran.execution_count
            cell["outputs"] = [kept for out in ran.outputs if (kept := _kept(out))]
    return _text(made)


def _kept(out: Any) -> dict[str, Any] | None:
    """Return an output that every machine gives, or None."""
    if out.output_type == "stream" and out.name == "stdout":
        return {
            "name": "stdout",
            "output_type": "stream",
            "text": out.text.splitlines(keepends=True),
        }
    if out.output_type == "execute_result" and "image/png" in out.data:
        return {
            "data": {
                "image/jpeg": _smaller(out.data["image/png"]),
                "text/plain": [out.data["text/plain"]],
            },
            "execution_count": out.execution_count,
            "metadata": {},
            "output_type": "execute_result",
        }
    return None


def _smaller(png: str) -> str:
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.thumbnail((_WIDTH, 10 * _WIDTH))
    picture.save(file := io.BytesIO(), "jpeg", quality=70)
    return base64.b64encode(file.getvalue()).decode()


def _text(book: dict[str, Any]) -> str:
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _cell(number: int, kind: str, text: str) -> dict:
    rest = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {
        "cell_type": kind,
        "id": f"cell{number}",
        "metadata": {},
        **rest,
        "source": text.splitlines(keepends=True),
    }


def _linked(text: str) -> str:
    """Return text whose links to other pages lead from examples/ to docs/, without the pictures, which are outputs."""
    text = re.sub(r"^!\[[^\]]*\]\([\w-]+\.jpg\)\n*", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[\]\(([\w-]+\.md)([^)]*)\)", r"[\1](../docs/\1\2)", text)
    return re.sub(r"\]\(([\w-]+\.md)", r"](../docs/\1", text).strip()


def is_current(page: str, notebook: str) -> bool:
    """Return whether a notebook is that of a page, executed, with the outputs that the page shows."""
    if without_outputs(notebook) != notebook_of(page):
        return False
    cells = [
        cell for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"
    ]
    outputs = [output for cell in cells for output in cell["outputs"]]
    shown = ["".join(output["text"]) for output in outputs if "text" in output]
    return all(cell["execution_count"] for cell in cells) and shown == printed_on(page)


def main() -> int:
    """Write the notebooks, or return 1 where `--check` finds one that differs."""
    old = []
    for name, page_name in NOTEBOOKS.items():
        path = ROOT / f"examples/{name}.ipynb"
        page = (ROOT / f"docs/{page_name}.md").read_text()
        if (
            "--all" not in sys.argv
            and path.exists()
            and is_current(page, path.read_text())
        ):
            continue
        if "--check" not in sys.argv:
            path.write_text(executed(notebook_of(page)))
        if not path.exists() or not is_current(page, path.read_text()):
            old.append(path.name)
    if old:
        sys.stderr.write(f"{', '.join(old)}: not as the pages say\n")
    return int(bool(old))


if __name__ == "__main__":
    raise SystemExit(main())
