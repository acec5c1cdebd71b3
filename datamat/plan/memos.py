"""The contents of memos after the code has filled them: workers report them, and the next run compares.

    run      places of memos ────────> .datamat/rows/memos.json ──> worker: first parts, then a digest of each memo
    run      KnownMemos.add <──────── Receipt.memos <─────────────────┘
               └─> .datamat/memos.json ──> KnownMemos.counting, of the next run

A memo that the program has set counts. A memo does not count if the program left it empty, if it holds what the code
itself fills in (a call of the function, or `preview`, did so), or if it keeps changing while rows are read, since
workers leave different values in it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from datamat.directory.files import commit_json, read_json, render_json
from datamat.fingerprint import Memo, content_of, is_filled, read_memos

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.fingerprint.code import Home

_FILE = "memos.json"
_VARIES = "varies"


def digests_of_memos(
    places: Iterable[Home], main: Sequence[dict[str, Any]] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the digests of the filled memos in this process, by name.

    Returns:
        The digests, and the names of memos with too many values to compare, or of caches whose results are
        inaccessible.
    """
    memos, untold = read_memos(places, main)
    digests: dict[str, str] = {}
    uncompared = [str(Memo(place)).removesuffix("()") for place in untold]
    for memo, value in memos.items():
        if is_filled(memo, value):
            try:
                digest = content_of(value)
            except OverflowError:
                uncompared.append(str(memo))
            else:
                digests |= {} if digest is None else {str(memo): digest}
    return digests, tuple(sorted(uncompared))


def write_places(rows_folder: pathlib.Path, places: Iterable[Home]) -> None:
    """Write the places of memos beside the rows of a run, for its workers."""
    if places:
        (rows_folder / _FILE).write_bytes(render_json(sorted(places)))


def read_places(rows_folder: pathlib.Path) -> list[Home]:
    """Return the places written by `write_places`."""
    with contextlib.suppress(OSError, ValueError):
        return [(module, path) for module, path in read_json(rows_folder / _FILE)]
    return []


class KnownMemos:
    """The contents of memos seen by runs on an output."""

    def __init__(self, work: pathlib.Path, code: str) -> None:
        self._path, self._code = work / _FILE, code
        self._filled: dict[str, str] = {}  # by name: a digest, or a mark that it varies
        self._seen: dict[str, str] = {}  # the same in this run, from the first worker
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            known = read_json(self._path)
            if known["code"] == code:
                self._filled = dict(known["filled"])

    def counting(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the caller's memos that count, by name."""
        return {name: digest for name, digest in given.items() if self._filled.get(name) not in {digest, _VARIES}}

    def add(self, given: Mapping[str, str], seen: Mapping[str, str]) -> None:
        """Record the memos of a worker after some parts.

        Args:
            given: the state at the start of the worker, as for `counting`.
            seen: the present state in the worker.
        """
        found = dict(self._filled)
        for name, digest in seen.items():
            if given.get(name, digest) != digest or self._seen.setdefault(name, digest) != digest:
                found[name] = _VARIES
            elif name not in given and found.get(name) != _VARIES:
                found[name] = digest
        if found != self._filled:
            self._filled = found
            commit_json(self._path, {"code": self._code, "filled": found}, through=self._path.parent / "rows")
