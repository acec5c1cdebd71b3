"""Convert values of index fields to text and back: lists, tuples, dicts, paths, `None`, and numpy numbers.

The text is JSON, in which objects with one name represent what JSON lacks:

    {"tuple": [...]}    {"dict": [[key, value], ...]}    {"path": "a/b"}
    {"file": "a/b"}     {"file_path": "a/b"}             a str or path that is an input file
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

FILES = ":files"
"""Name of the field for further files of rows; no field of an index can have it."""

_LONGEST_PATH = 4096
_NO_PATH = re.compile(r"[\n\0]")
# Labels and other words are not looked up on disk: a path has a folder or an extension.
_LIKE_PATH = re.compile(r"/|\.\w{1,8}\Z")
_PLAIN = {bool, int, float, type(None)}


def looks_like_path(text: str) -> bool:
    """Return True if a text may be a path, so that looking it up on disk is worthwhile."""
    return 0 < len(text) < _LONGEST_PATH and bool(_LIKE_PATH.search(text)) and not _NO_PATH.search(text)


def encode_value(value: Any, is_file: Callable[[str | pathlib.PurePath], bool]) -> str:
    """Return a value as text.

    Args:
        value: value of a field: text, number, bool, `None`, path, or a list, tuple or dict of these.
        is_file: returns True if a text or path in it is an input file.

    Raises:
        TypeError: it contains something else; the message is the name of its type.

    Example:
        >>> encode_value((1, [None, "x"]), is_file=lambda path: False)
        '{"tuple": [1, [null, "x"]]}'
    """
    return json.dumps(_tagged(value, is_file))


def decode_value(text: str, source: str | Callable[[str], str]) -> Any:
    """Return the value of a text; paths of input files are joined to the source, or converted by a function.

    Example:
        >>> decode_value('{"tuple": [1, [null, {"file": "a/b.png"}]]}', source="/data")
        (1, [None, '/data/a/b.png'])
    """
    return json.loads(text, object_hook=lambda found: _untagged(found, source))


def files_of_text(text: str) -> list[str]:
    """Return the paths of input files in the text of a value, as in the index, in order."""
    found: list[str] = []

    def collect(tagged: dict[str, Any]) -> None:
        found.extend(path for name, path in tagged.items() if name in {"file", "file_path"})

    json.loads(text, object_hook=collect)
    return found


def nested_paths(item: Any) -> Iterator[str]:
    """Yield the texts and paths in an item that may be paths of files, in an order that depends only on its content.

    It searches tuples, lists, sets, dicts, dataclasses and arrays, at any depth. Bytes count if they have a folder or
    an extension.
    """
    return (path for path, _ in typed_paths(item))


def typed_paths(item: Any) -> Iterator[tuple[str, bool]]:
    """Yield the `nested_paths` of an item, each with a flag for path types."""
    return _nested_paths(item, ())


def _nested_paths(item: Any, around: tuple[int, ...]) -> Iterator[tuple[str, bool]]:
    if isinstance(item, (str, os.PathLike)):
        path = os.fsdecode(item)
        if 0 < len(path) < _LONGEST_PATH and not _NO_PATH.search(path):
            yield path, not isinstance(item, str)
    elif isinstance(item, bytes):
        if len(item) < _LONGEST_PATH and looks_like_path(path := os.fsdecode(item)):
            yield path, False
    elif id(item) not in around:  # objects may be cyclic
        around = (*around, id(item))
        found = (path for part in _parts_of(item) for path in _nested_paths(part, around))
        yield from sorted(found) if isinstance(item, (set, frozenset)) else found


def _parts_of(item: Any) -> Iterable[Any]:
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, np.ndarray):
        return item.ravel() if item.dtype.kind in "OSU" else ()
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    return ()


def _tagged(value: Any, is_file: Callable[[str | pathlib.PurePath], bool]) -> Any:
    kind = type(value)
    if kind is str:
        return {"file": value} if is_file(value) else value
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_tagged(part, is_file) for part in value]
    if isinstance(value, (np.bool_, np.integer, np.floating, np.str_)):
        return _tagged(value.item(), is_file)
    if isinstance(value, tuple):
        return {"tuple": [_tagged(part, is_file) for part in value]}
    if isinstance(value, pathlib.PurePath):
        return {"file_path" if is_file(value) else "path": str(value)}
    if isinstance(value, dict):
        return {"dict": [[_tagged(name, _is_no_file), _tagged(part, is_file)] for name, part in value.items()]}
    raise TypeError(kind.__name__)


def _untagged(tagged: dict[str, Any], source: str | Callable[[str], str]) -> Any:
    ((name, value),) = tagged.items()
    if name == "tuple":
        return tuple(value)
    if name == "dict":
        return dict(value)
    if name == "path":
        return pathlib.Path(value)
    full = source(value) if callable(source) else os.path.join(source, value)
    return full if name == "file" else pathlib.Path(full)


def _is_no_file(_: str | pathlib.PurePath) -> bool:
    return False
