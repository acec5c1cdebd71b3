"""The code blocks of `docs/interop.md`, by their heading."""

import pathlib

PAGE = pathlib.Path(__file__).parents[2] / "docs/interop.md"
SECTIONS = PAGE.read_text().split("\n### ")[1:]
LINES = {section.partition("\n")[0]: section.split("```python\n")[1].split("```")[0] for section in SECTIONS}
