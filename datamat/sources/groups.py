"""Draws splits by group: all rows of a group land in one split, drawn by the hash of the group, not of the key."""

from __future__ import annotations

import os
import reprlib
import unicodedata
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from datamat.errors import OptionError, count_of, join_problems
from datamat.folders.urls import is_url, lasting
from datamat.sources.rows import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from datamat.sources.rows import IndexRow, RowBlock


class Groups:
    """Gives each row of one index the hash of its group.

    The hash depends on the group alone, so that new groups move no old ones. It is that of the group's text:
    `7`, `"7"`, `b"7"` and `np.int64(7)` are one group, since a column may be text in one file and numbers in the next;
    so are the two forms of `é`. A path below the source counts from there, and a URL counts without its signature.

    Args:
        given: name of the field that holds the group, or function of an `IndexRow` that returns it.
        source: folder that relative paths of fields start from; "" if there is none.
        contents: what rows stand for, in the order of the index, if their own fields do not hold it.
    """

    def __init__(
        self,
        given: str | Callable[[IndexRow], Any],
        source: str = "",
        contents: Iterator[Mapping[str, Any]] | None = None,
    ) -> None:
        self._given, self._name = given, groups_in_words(given)
        self._root = os.path.join(source, "") if source else ""
        self._contents = contents
        self._seen: list[np.ndarray] = []

    def __str__(self) -> str:
        number = len(np.unique(np.concatenate(self._seen)))
        return f"splits drawn by {count_of(number, 'group')}: {self._name}"

    def hashes(self, block: RowBlock, before: int) -> np.ndarray:
        """Return uint64 (n,): the hash of the group of each row.

        Args:
            block: rows of the index, in its order.
            before: number of rows before them in the index.

        Raises:
            OptionError: a row has no such field or no group, the function fails, or a row names its own split.
        """
        if block.splits is not None and any(block.splits[0]):
            number = int(np.flatnonzero(np.array([name is not None for name in block.splits[0]])[block.splits[1]])[0])
            raise OptionError(
                f"groups= draws the splits, and the index names them: {block.origin_of(number, before)} is in "
                f"{block.splits[0][int(block.splits[1][number])]!r}; leave out groups= and splits=, or the splits of "
                "the index"
            )
        found = np.fromiter(self._hashes(block, before), np.uint64, len(block))
        self._seen.append(np.unique(found))
        return found

    def _hashes(self, block: RowBlock, before: int) -> Iterator[int]:
        for number, value in enumerate(self._values(block, before)):
            try:
                yield self._hash(value)
            except (TypeError, ValueError) as error:
                key, origin = listed(block.keys[number : number + 1])[0], block.origin_of(number, before)
                raise OptionError(
                    f"groups={self._name}: the group of {key!r} ({origin}) is {reprlib.repr(value)}, {error}; want a "
                    "str, int, bytes, path, or a tuple of these; a row that belongs to no group can be its own group, "
                    "by its key"
                ) from None

    def _values(self, block: RowBlock, before: int) -> Iterator[Any]:
        given, contents = self._given, self._contents
        if isinstance(given, str) and contents is None:
            if given not in block.fields:
                raise self._no_field(given, block.fields, block.origin_of(0, before))
            yield from listed(block.fields[given])
            return
        for number, row in enumerate(block.rows()):
            seen = row if contents is None else row._replace(fields=next(contents))
            origin = block.origin_of(number, before)
            if isinstance(given, str):
                if given not in seen.fields:
                    raise self._no_field(given, seen.fields, origin)
                yield seen.fields[given]
                continue
            try:
                value = given(seen)
            except Exception as error:
                raise OptionError(
                    f"groups={self._name}: it raised {type(error).__name__} for {row.key!r} ({origin}): {error}; its "
                    f"argument is an IndexRow, and {_fields_in_words(seen.fields)}"
                ) from error
            yield value

    def _no_field(self, name: str, fields: Mapping[str, Any], origin: str) -> OptionError:
        there = _fields_in_words(fields)
        return OptionError(f"groups={name!r} names no field of {origin}: {there}; name one, or give a function")

    def _hash(self, value: Any) -> int:
        if isinstance(value, tuple) and value:
            parts = [self._hash(part).to_bytes(8, "little") for part in value]
            return xxhash.xxh3_64_intdigest(b"".join(parts), seed=1)
        text = self._text(value)
        if not text:
            raise ValueError("which is empty")
        return xxhash.xxh3_64_intdigest(text)

    def _text(self, value: Any) -> bytes:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, int):  # bool, too: True is 1, as in Python
            return b"%d" % value
        if isinstance(value, str):
            value = lasting(value) if "://" in value and is_url(value) else value
            value = value.removeprefix(self._root) if self._root else value
            # Lone surrogates stand for bytes of paths that are not UTF-8.
            text = value if value.isascii() else unicodedata.normalize("NFC", value)
            return text.encode("utf-8", "surrogatepass")
        if isinstance(value, bytes):
            return value
        if value is None or isinstance(value, tuple):
            return b""
        raise TypeError(f"of type {type(value).__name__}")


def _fields_in_words(fields: Mapping[str, Any]) -> str:
    return f"its fields are {join_problems([*map(str, fields)])}" if fields else "it has no fields"


def groups_in_words(given: str | Callable[..., Any]) -> str:
    """Return the groups as the user gave them: the name of a field or of a function."""
    return given if isinstance(given, str) else str(getattr(given, "__qualname__", type(given).__qualname__))
