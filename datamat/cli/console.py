"""What the commands share: exit codes, and how they print."""

from __future__ import annotations

import sys

from datamat.text import printable

__all__ = ["NOTHING_THERE", "NOT_WELL", "OK", "say"]

OK, NOT_WELL, NOTHING_THERE = 0, 1, 2


def say(text: str, *, error: bool = False) -> None:
    """Print lines, without what a terminal would obey: names of files and messages are text of others."""
    shown = "\n".join(map(printable, text.split("\n")))
    print(f"datamat: {shown}" if error else shown, file=sys.stderr if error else sys.stdout)
