"""Text that came from outside (file names, keys, messages of others), made safe to show."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""Return text on one line that is safe in any terminal or log: what is not printable as its escape.

    Example:
        >>> print(printable("a\x1b[31m\nb"))
        a\x1b[31m\nb
    """
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
