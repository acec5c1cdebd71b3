"""Common code of types that wrap another feature, and store none, one or many of its values.

`Nullable` and `ListOf` are Arrow's null and list, laid out in columns of numbers and bytes. Each column of the wrapped
type becomes one column of all its values:

    wrapped type                     Nullable        ListOf          a record holds
    bytes                            bytes_list      bytes_list      each value
    numbers, as many in each         the same        the same        the numbers of all values
    numbers, any number of them      bytes_list      the same        Nullable: the numbers as little-endian bytes;
                                                                     ListOf: those of all values, one after another
    numbers as little-endian bytes   bytes_list      bytes           the same
    bytes_list                       bytes_list      bytes_list      the items of all values, one after another

If a ListOf joins values of different sizes, COLUMN/lengths holds the number of items of each. `Nullable` needs no mark
for None, whose columns are empty, and null in Arrow, except for lists of bytes, which may be empty themselves. There,
and in a ListOf of Nullable, NAME/present holds 1 for each value, and 0 for each None in a list.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

from datamat.errors import SchemaError
from datamat.features.base import DictFields, Feature, RaggedColumn, RawColumn, bytes_array, ragged, values_of
from datamat.features.registry import declaration_of, feature_of


class Composed(Feature):
    """A type that wraps another feature and delegates most methods to it.

    Attributes:
        feature: the wrapped feature; or `DictFields`, which the enclosing `Features` take apart.
    """

    feature: Any

    @property
    @abc.abstractmethod
    def stored(self) -> Feature:
        """The feature of the stored values: of the present values, or of the one array that they form."""

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
    """Return the innermost feature, without lists and `Nullable`."""
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
    """Return the feature to wrap, or the fields of a dict."""
    if isinstance(feature, Mapping):
        return DictFields(feature)
    if not isinstance(feature, Feature):
        raise SchemaError(f"{where}: {feature!r} is not a feature; want one such as Text() or Scalar('int64')")
    if isinstance(feature, Composed) and isinstance(feature.feature, Mapping):
        raise SchemaError(
            f"{where}: a list of dicts, or a dict that may be missing, cannot be in another; declare Json()"
        )
    return feature


def declared_as(outer: Feature, inner: Feature, error: SchemaError) -> SchemaError:
    """Return the error of a value with the declaration of the whole field."""
    return SchemaError(str(error).replace(f"is declared {inner.declared()} ", f"is declared {outer.declared()} ", 1))


def as_ragged(column: Any) -> RaggedColumn:
    """Return a column of n values as lists: one item per bytes value, all numbers of an array."""
    if isinstance(column, (list, RawColumn)):
        return RaggedColumn(bytes_array(values_of(column)), np.ones(len(column), np.int64))
    found = ragged(column)
    assert isinstance(found, RaggedColumn), "everything else is numbers"
    return found


def encoded_texts(values: np.ndarray) -> list[bytes]:
    """Return the bytes of an object array, which may contain text instead."""
    return [value.encode() if isinstance(value, str) else value for value in values.tolist()]
