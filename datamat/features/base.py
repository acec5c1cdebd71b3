"""What every feature type is, and the checks that they share."""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from datamat.errors import SchemaError

__all__ = ["Column", "Feature", "Kind", "Shape"]

Column: TypeAlias = bytes | Sequence[bytes] | np.ndarray
"""One encoded column of one record: one bytes value, several, or a 1-D int64 or float32 array."""

Kind: TypeAlias = Literal["bytes", "int64", "float32"]
Shape: TypeAlias = tuple[int | None, ...]


class Feature(abc.ABC):
    """One field of a sample: its declaration, check, encoding and decoding.

    Implementations are immutable values: they compare by their declaration, pickle, and are safe to share.
    """

    @abc.abstractmethod
    def columns(self, name: str) -> dict[str, Kind]:
        """Return the columns that field `name` is stored in, with their kinds."""

    @abc.abstractmethod
    def encode(self, name: str, value: Any) -> dict[str, Column]:
        """Return the columns of one value; raise `SchemaError` where it is not as declared."""

    @abc.abstractmethod
    def decode(self, name: str, columns: Mapping[str, Column]) -> Any:
        """Return the value that `encode` was given, from its columns."""

    def decode_into(
        self, name: str, columns: Mapping[str, Column], out: np.ndarray | None, *, are_intact: bool = False
    ) -> Any:
        """Return what `decode` does.

        Args:
            name: of the field.
            columns: of one record.
            out: where to put it if that saves a copy; it may be overwritten in any case.
            are_intact: a checksum has shown that the columns are what `encode` gave, and checked.
        """
        del out, are_intact
        return self.decode(name, columns)

    def prepare(self, name: str, value: Any) -> Any:
        """Return `value` as a transform wants it: decoded, if it came as encoded bytes."""
        del name
        return value

    def encode_block(self, name: str, values: Any) -> dict[str, Any]:
        """Return the columns of n values at once; only numbers and strings go in blocks.

        Args:
            name: of the field.
            values: an array (n,) of the declared dtype, or n strings.
        """
        raise SchemaError(f"field {name!r} is declared {self.declared()}, which does not go in blocks; use read")

    @abc.abstractmethod
    def declared(self) -> str:
        """Return the declaration as messages show it: `uint8 (360, 480, 3)`."""

    def to_json(self) -> dict[str, Any]:
        """Return the declaration as JSON values, with its type's name under `type`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"type": type(self).__name__, **{name: _plain(value) for name, value in fields.items()}}


def checked_shape(shape: Any, where: str) -> Shape:
    try:
        sizes = tuple(None if size is None else operator.index(size) for size in shape)
    except TypeError as error:
        raise SchemaError(f"{where}: shape is {shape!r}; want a tuple of sizes, None where one varies") from error
    if any(size is not None and size < 0 for size in sizes):
        raise SchemaError(f"{where}: shape is {shape!r}; sizes are not negative")
    return sizes


def checked_names(names: Any, where: str) -> tuple[str, ...]:
    found = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (None,)
    if not all(isinstance(name, str) for name in found):
        raise SchemaError(f"{where}: names is {names!r}; want a sequence of str")
    if len(set(found)) != len(found):
        raise SchemaError(f"{where}: a class name appears twice in {some(found)}")
    return found


def checked_int(value: Any, where: str) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise SchemaError(f"{where} is {value!r}; want an int") from error


def array_of(name: str, feature: Feature, value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise mismatch(name, feature, f"a {type(value).__name__}", "give a numpy array")
    return value


def check_array(
    name: str,
    feature: Feature,
    dtype: Any,
    shape: tuple[int, ...],
    wanted: Shape,
    wanted_dtype: np.dtype[Any],
) -> None:
    same_dtype = np.dtype(dtype).newbyteorder("=") == wanted_dtype  # either byte order holds the same numbers
    same_shape = len(shape) == len(wanted) and all(w in (None, s) for s, w in zip(shape, wanted, strict=True))
    if same_dtype and same_shape:
        return
    found = f"{np.dtype(dtype).name} {shape_text(shape)}"
    raise mismatch(name, feature, found, "cast or reshape it in read, or change the declaration")


def one_bytes(name: str, columns: Mapping[str, Column]) -> bytes:
    column = columns[name]
    if isinstance(column, bytes):
        return column
    if len(column) != 1 or not isinstance(column[0], bytes):
        raise SchemaError(f"column {name!r} of the record holds {len(column)} values; want one bytes value")
    return column[0]


def mismatch(name: str, feature: Feature, found: str, remedy: str) -> SchemaError:
    return SchemaError(f"field {name!r} is declared {feature.declared()} but the sample holds {found}; {remedy}")


def shape_text(shape: Sequence[int | None]) -> str:
    return (
        "(" + ", ".join("?" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"
    )


def some(values: Any, most: int = 12) -> str:
    """Return a list of names for a message, cut where it grows long."""
    names = [str(value) for value in values]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
