"""What types that are made of another feature have in common: they store none, one or many of its values.

`Nullable` and `ListOf` are null and list of Arrow, laid out in columns of numbers and bytes. A column of the other type
becomes one column of all its values:

    of the other type                Nullable        ListOf          a record holds
    bytes                            bytes_list      bytes_list      each value
    numbers, as many in each         the same        the same        the numbers of all values
    numbers, any number of them      bytes_list      the same        Nullable: the numbers as little-endian bytes;
                                                                     ListOf: those of all values, one after another
    numbers as little-endian bytes   bytes_list      bytes           the same
    bytes_list                       bytes_list      bytes_list      the items of all values, one after another

Where a ListOf joins values that differ in size, COLUMN/lengths says how many items each has. `Nullable` needs no mark
for None, whose columns are empty, and null in Arrow, except for lists of bytes, which may be empty themselves. There,
and in a ListOf of Nullable, NAME/present holds 1 for each value, and 0 for each None in a list.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from datamat.errors import SchemaError
from datamat.features.base import DictFields, Feature, RaggedColumn, bytes_array, ragged
from datamat.features.registry import declaration_of, feature_of

__all__ = ["Composed", "alone", "as_ragged", "checked_part", "declared_as", "encoded_texts", "innermost"]


class Composed(Feature):
    """A type that answers most questions as another feature does.

    Attributes:
        feature: the other feature; or `DictFields`, which the `Features` that this one is in take apart.
        group: what a dict of fields is to this type.
    """

    __slots__ = ("_layout",)  # neither compared nor pickled

    group: ClassVar[Literal["list", "optional"]]
    feature: Any
    _layout: Any

    @property
    def layout(self) -> Any:
        """What `_laid_out` returns; kept, as it takes longer than to encode a value."""
        try:
            return self._layout
        except AttributeError:
            object.__setattr__(self, "_layout", self._laid_out())
            return self._layout

    @abc.abstractmethod
    def _laid_out(self) -> Any:
        """Return how the columns of a field are stored."""

    @property
    @abc.abstractmethod
    def stored(self) -> Feature:
        """The feature of what is stored: of the values that are there, or of the one array that they form."""

    def parts(self) -> tuple[Feature, ...]:
        return (self.feature,)

    def arguments(self) -> dict[str, Any]:
        return {"feature": declaration_of(self.feature)}

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Feature:
        return cls(**{**arguments, "feature": feature_of("feature", arguments["feature"])})

    def decode(self, stored: Any) -> Any:
        return self.decode_into(stored, None)

    def is_ragged(self) -> bool:
        return True

    def packages(self, *, drawn: bool) -> frozenset[str]:
        return self.stored.packages(drawn=drawn)

    def class_names(self) -> tuple[str, ...] | None:
        return self.stored.class_names()

    def encodes_many(self) -> bool:
        return self.stored.encodes_many()

    def decodes_many(self) -> bool:
        return self.stored.decodes_many()


def innermost(feature: Feature) -> Feature:
    """Return the feature of the values in lists, and of those that may be missing."""
    while isinstance(feature, Composed):
        feature = feature.stored
    return feature


def alone(feature: Any, where: str) -> Feature:
    """Return a feature; refuse the fields of a dict, which `Features` take apart."""
    if isinstance(feature, Mapping):
        raise SchemaError(f"{where}: its fields are encoded by the Features that it is part of; call encode of those")
    found: Feature = feature
    return found


def checked_part(feature: Any, where: str) -> Any:
    """Return the feature that another is to be made of, or the fields of a dict."""
    if isinstance(feature, Mapping):
        return DictFields(feature)
    if not isinstance(feature, Feature):
        raise SchemaError(f"{where}: {feature!r} is no feature; want one such as Text() or Scalar('int64')")
    if isinstance(feature, Composed) and isinstance(feature.feature, Mapping):
        raise SchemaError(
            f"{where}: a list of dicts, or a dict that may be missing, cannot be in another; declare Json()"
        )
    return feature


def declared_as(outer: Feature, inner: Feature, error: SchemaError) -> SchemaError:
    """Return an error of a value with the declaration of the whole field in it."""
    return SchemaError(str(error).replace(f"is declared {inner.declared()} ", f"is declared {outer.declared()} ", 1))


def as_ragged(column: Any) -> RaggedColumn:
    """Return a column of n values as one of lists: of one for each bytes value, of its numbers for each array."""
    if isinstance(column, list):
        return RaggedColumn(bytes_array(column), np.ones(len(column), np.int64))
    found = ragged(column)
    assert isinstance(found, RaggedColumn), "all else is numbers"
    return found


def encoded_texts(values: np.ndarray) -> list[bytes]:
    """Return the bytes of an object array, which may hold text in their place."""
    return [value.encode() if isinstance(value, str) else value for value in values.tolist()]
