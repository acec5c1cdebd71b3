"""What the payload of a record is: `tf.train.Example`, `tf.train.SequenceExample`, or something else, from any writer.

Nothing in a TFRecord or ArrayRecord file says what its payloads are. A payload is taken for a message only where every
byte of its outer structure reads as one (tensorflow/core/example/example.proto); anything else is raw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from datamat.errors import CorruptDataError
from datamat.formats.example import decode_example
from datamat.formats.wire import LEN, fields, varint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EXAMPLE", "RAW", "SEQUENCE", "Values", "parse_payload"]

EXAMPLE, SEQUENCE, RAW = "tf.train.Example", "tf.train.SequenceExample", "raw payload"

Values: TypeAlias = "Sequence[bytes] | np.ndarray"
"""What one field of a record holds: several bytes values, or a 1-D array of numbers."""

_LISTS = 2  # SequenceExample { Features context = 1; FeatureLists feature_lists = 2; }


def parse_payload(payload: bytes) -> tuple[str, Mapping[str, Values]]:
    r"""Return what a payload is and its fields.

    The steps of a feature list follow one another in the field `NAME[]`. A raw payload is one field without a name.

    Example:
        >>> parse_payload(b"\n\x0f\n\r\n\x03key\x12\x06\n\x04\n\x02a1")
        ('tf.train.Example', {'key': [b'a1']})
        >>> parse_payload(b"anything")
        ('raw payload', {'': [b'anything']})
    """
    try:
        numbers = _message_fields(payload)
        if numbers == {1}:
            return EXAMPLE, _columns(payload)
        if numbers:
            return SEQUENCE, {**_columns(payload), **_feature_lists(payload)}
    except (CorruptDataError, UnicodeDecodeError):
        pass
    return RAW, {"": [payload]}


def _message_fields(data: bytes) -> set[int]:
    """Return the numbers of the outer fields; raise `CorruptDataError` where one is not a map of names."""
    numbers = set()
    for number, wire_type, start, stop in fields(data, 0, len(data)):
        if number not in {1, _LISTS} or wire_type != LEN:
            raise CorruptDataError(f"field {number} at byte {start} is none of the message")
        numbers.add(number)
        for entry, entry_type, begin, end in fields(data, start, stop):
            if entry != 1 or entry_type != LEN:
                raise CorruptDataError(f"byte {begin} is in no entry of the map")
            inner = [(name, kind) for name, kind, _, _ in fields(data, begin, end)]
            if inner not in ([(1, LEN), (2, LEN)], [(1, LEN)], [(2, LEN), (1, LEN)]):
                raise CorruptDataError(f"the entry at byte {begin} has no name and value")
    return numbers


def _feature_lists(data: bytes) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for number, _, start, stop in fields(data, 0, len(data)):
        if number != _LISTS:
            continue
        for _, _, begin, end in fields(data, start, stop):
            name, steps = "", []
            for part, _, first, last in fields(data, begin, end):
                if part == 1:
                    name = data[first:last].decode()
                else:
                    steps += [_feature(data[a:b]) for _, _, a, b in fields(data, first, last)]
            found[f"{name}[]"] = _joined(steps)
    return found


def _feature(data: bytes) -> Values:
    """Decode one Feature, as the only one of an Example."""
    value = b"\x12" + varint(len(data)) + data
    entry = b"\x0a" + varint(len(value)) + value
    return _columns(b"\x0a" + varint(len(entry)) + entry)[""]


def _columns(data: bytes) -> dict[str, Values]:
    columns = decode_example(data)
    return {name: [values] if isinstance(values, bytes) else values for name, values in columns.items()}


def _joined(steps: Sequence[Values]) -> Values:
    arrays = [step for step in steps if isinstance(step, np.ndarray)]
    if arrays:
        return np.concatenate(arrays)
    return [value for step in steps for value in step]
