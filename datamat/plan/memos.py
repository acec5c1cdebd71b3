"""What memos hold once the code has filled them: workers tell, and the next run compares.

    run      places of memos ────────> .datamat/rows/memos.json ──> worker: first parts, then a digest of each memo
    run      KnownMemos.add <──────── Receipt.memos <─────────────────┘
               └─> .datamat/memos.json ──> KnownMemos.counting, of the next run

A memo that the program has set counts. One that the program left empty does not, nor one that holds what the code fills
in by itself (a call of the function, or `preview`, did so), nor one that goes on changing while rows are read: workers
leave different values in it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from datamat.directory.files import commit_json, read_json
from datamat.fingerprint import Memo, content_of, is_filled, read_memos

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.fingerprint.code import Home


__all__ = ["KnownMemos", "digests_of_memos", "read_places", "write_places"]

_FILE = "memos.json"
_VARIES = "varies"


def digests_of_memos(
    places: Iterable[Home], main: Sequence[dict[str, Any]] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the digests of what memos hold in this process, by name, for those that are filled.

    Args:
        places: where memos are.
        main: as for `read_memos`.

    Returns:
        The digests, and the names of memos that hold too many values to be compared, or are caches whose results cannot
        be told.
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
    """Write where memos are beside the rows of a run, for its workers."""
    if places:
        commit_json(rows_folder / _FILE, sorted(places))


def read_places(rows_folder: pathlib.Path) -> list[Home]:
    """Return the places that a run has written there."""
    with contextlib.suppress(OSError, ValueError):
        return [(module, path) for module, path in read_json(rows_folder / _FILE)]
    return []


class KnownMemos:
    """What runs on an output have seen in memos.

    Args:
        work: `.datamat` folder of the output.
        code: digest of all that decides what the code fills in.
    """

    def __init__(self, work: pathlib.Path, code: str) -> None:
        self._path, self._code = work / _FILE, code
        self._filled: dict[str, str] = {}  # by name: a digest, or that it varies
        self._seen: dict[str, str] = {}  # the same in this run, by the first worker
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            known = read_json(self._path)
            if known["code"] == code:
                self._filled = dict(known["filled"])

    def counting(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return those of the caller's memos that count, by name.

        Args:
            given: digests of what they hold in the caller.
        """
        return {name: digest for name, digest in given.items() if self._filled.get(name) not in {digest, _VARIES}}

    def add(self, given: Mapping[str, str], seen: Mapping[str, str]) -> None:
        """Note what a worker found in memos when it had made some parts.

        Args:
            given: what the worker began with: as for `counting`.
            seen: the same in the worker now.
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
