"""Makes the notebooks in examples/ of pages of the documentation: prose becomes text, each block of Python a cell.

    python docs/notebooks.py            # write them
    python docs/notebooks.py --check    # fail where one is out of date

Blocks marked `py`, which need torch, stay out. `tests/test_notebooks.py` executes the notebooks.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = {"tf_training": "tutorial", "colab_resume": "colab"}


def notebook_of(page: str, languages: tuple[str, ...] = ("python",)) -> str:
    """Return the notebook of a page as JSON text."""
    cells = []
    for number, piece in enumerate(
        re.split(r"^```(\w+)\n(.*?)^```\n", page, flags=re.DOTALL | re.MULTILINE)
    ):
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
    """Return text whose links to other pages lead from examples/ to docs/."""
    text = re.sub(r"\[\]\(([\w-]+\.md)([^)]*)\)", r"[\1](../docs/\1\2)", text)
    return re.sub(r"\]\(([\w-]+\.(?:md|jpg))", r"](../docs/\1", text)


def main() -> int:
    """Write the notebooks, or return 1 where `--check` finds one that differs."""
    old = []
    for name, page in NOTEBOOKS.items():
        path, text = (
            ROOT / f"examples/{name}.ipynb",
            notebook_of((ROOT / f"docs/{page}.md").read_text()),
        )
        if not path.exists() or path.read_text() != text:
            old.append(path)
            if "--check" not in sys.argv:
                path.write_text(text)
    return int("--check" in sys.argv and bool(old))


if __name__ == "__main__":
    raise SystemExit(main())
