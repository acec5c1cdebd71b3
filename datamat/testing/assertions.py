"""Comparisons for tests of plug-ins: values bit by bit, records, and the files of a directory."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_MOST_SHOWN = 6
_MOST_CHARACTERS = 200


def compare(found: Any, expected: Any, place: str) -> None:
    """Assert that two values are equal; for lists and dicts, the message shows the first difference."""
    assert found == expected, f"{place}: {_difference(found, expected)}"


def _difference(found: Any, expected: Any) -> str:
    if isinstance(found, dict) and isinstance(expected, dict):
        key = next(key for key in {**expected, **found} if found.get(key, ...) != expected.get(key, ...))
        return f"{key!r}: {_difference(found.get(key), expected.get(key))}"
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        number = next(number for number, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        return f"entry {number}: {_difference(found[number], expected[number])}"
    return f"found {preview(found)}, expected {preview(expected)}"


def preview(value: Any) -> str:
    """Return a value as shown in messages."""
    if isinstance(value, list) and len(value) > _MOST_SHOWN:
        return f"{len(value)} entries"
    text = repr(value[:_MOST_CHARACTERS] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


@contextlib.contextmanager
def raises(expected: type[Exception], pattern: str, place: str) -> Iterator[None]:
    """Assert that the block raises an error whose message contains a pattern."""
    try:
        yield
    except expected as error:
        assert re.search(pattern, str(error)), f"{place}: found the message {str(error)!r}, expected {pattern!r} in it"
    except Exception as error:
        raise AssertionError(f"{place}: found {error!r}, expected {expected.__name__}") from error
    else:
        raise AssertionError(f"{place}: found no error, expected {expected.__name__}")


def digests(folder: pathlib.Path) -> dict[str, str]:
    """Return the digest of each file of a finished directory."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".datamat" not in path.parts
    }


def plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample in a form that compares arrays bit by bit."""
    return {
        name: (value.dtype.name, value.shape, value.tobytes()) if isinstance(value, np.ndarray | np.generic) else value
        for name, value in sample.items()
    }


def bits(value: Any) -> Any:
    """Return a value in a form that compares arrays and numbers bit by bit."""
    if isinstance(value, list):
        return [bits(item) for item in value]
    is_plain = value is None or type(value) in {str, bytes, dict, list, bool, int, float}
    return value if is_plain else plain({"": np.asarray(value)})[""]


def normal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in a form that compares numbers bit by bit."""
    return {
        name: (value.dtype.name, value.tobytes())
        if isinstance(value, np.ndarray)
        else bytes(value if isinstance(value, bytes) else b"".join(value))
        for name, value in record.items()
    }
