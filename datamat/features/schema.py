"""The schema of a data set as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat import codecs
from datamat.errors import InputError, SchemaError
from datamat.features.base import Column, Feature, Kind, some
from datamat.features.pictures import Image, Mask
from datamat.features.values import BBoxes, ClassLabel, Scalar, Tensor, Text

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NO_MEMORY", "Features"]

_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (Image, Mask, ClassLabel, BBoxes, Text, Scalar, Tensor)}

NO_MEMORY: Mapping[str, np.ndarray] = {}
"""No arrays to decode into."""


class Features(Mapping[str, Feature]):
    """The schema of a dataset: field name to feature type, always with the field `key`.

    A value: immutable, compares by content, goes to and from JSON. Names may hold `/` (`objects/bbox`).

    Args:
        fields: feature by name; `key` (a `Text`) is added where it is missing.

    Raises:
        SchemaError: a name is empty or odd, a value is not a feature, or two fields would share a column.

    Example:
        >>> features = Features({"image": Image(), "label": ClassLabel(names=("cat", "dog"))})
        >>> sorted(features)
        ['image', 'key', 'label']
        >>> Features.from_json(features.to_json()) == features
        True
    """

    __slots__ = ("_columns", "_fields")

    def __init__(self, fields: Mapping[str, Feature]) -> None:
        if not isinstance(fields, Mapping):
            raise SchemaError(f"features is a {type(fields).__name__}; want a dict of name to feature type")
        self._fields: dict[str, Feature] = {"key": Text(), **fields}
        self._columns: dict[str, Kind] = {}
        for name, feature in self._fields.items():
            _check_name(name, feature)
            for column, kind in feature.columns(name).items():
                if column in self._columns:
                    raise SchemaError(
                        f"field {name!r} needs the column {column!r}, which another field has; rename one"
                    )
                self._columns[column] = kind
        if not isinstance(self._fields["key"], Text):
            raise SchemaError(f"field 'key' is declared {self._fields['key'].declared()}; it must be Text()")

    def __getitem__(self, name: str) -> Feature:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Features) and self._fields == other._fields

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._columns)))

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{name}: {feature.declared()}' for name, feature in self._fields.items())})"

    @property
    def columns(self) -> Mapping[str, Kind]:
        """The stored columns, by name, with their kinds."""
        return self._columns

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Column]:
        """Return the columns of one sample.

        Args:
            sample: a value for every field, and nothing else.

        Raises:
            SchemaError: a field is missing, unknown, or not as declared.
            InputError: bytes of an image do not decode.
        """
        if sample.keys() != self._fields.keys():
            raise self._wrong_fields(sample)
        columns: dict[str, Column] = {}
        for name, feature in self._fields.items():
            columns.update(feature.encode(name, sample[name]))
        return columns

    def encode_block(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stored columns of n samples given by columns: arrays (n,) and sequences of n bytes.

        Args:
            columns: for every field, an array (n,) of its dtype or n strings.

        Raises:
            SchemaError: a field is missing, unknown, not as declared, or of a kind that does not go in blocks.
        """
        if columns.keys() != self._fields.keys():
            raise self._wrong_fields(columns)
        lengths = {name: len(values) if isinstance(values, Sized) else 1 for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise SchemaError(f"the columns of a block differ in length ({found}); give one value per row in each")
        block: dict[str, Any] = {}
        for name, feature in self._fields.items():
            block.update(feature.encode_block(name, columns[name]))
        return block

    def decode(
        self,
        columns: Mapping[str, Column],
        memory: Mapping[str, np.ndarray] = NO_MEMORY,
        *,
        are_intact: bool = False,
    ) -> dict[str, Any]:
        """Return the sample whose columns these are.

        Args:
            columns: of one record.
            memory: arrays by field that values may be decoded into; where that was done, the value is the array.
            are_intact: a checksum has shown that the columns are what `encode` gave: files that were whole then are not
                looked through again.

        Raises:
            SchemaError: a declared column is missing, or does not hold what is declared.
            InputError: bytes of an image do not decode.
        """
        sample, name = {}, ""
        try:
            for name, feature in self._fields.items():
                sample[name] = feature.decode_into(name, columns, memory.get(name), are_intact=are_intact)
        except KeyError as error:
            raise SchemaError(
                f"the record has no column {error.args[0]!r}; it holds {some(columns)}: "
                "was it written with other features?"
            ) from error
        except (InputError, SchemaError):
            raise
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"field {name!r} is declared {self[name].declared()} but its column does not hold that ({error}): "
                "was the record written with other features?"
            ) from error
        return sample

    def prepare(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sample with every encoded image and mask decoded, as transforms want it."""
        return {
            name: self._fields[name].prepare(name, value) if name in self._fields else value
            for name, value in sample.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON values."""
        return {name: feature.to_json() for name, feature in self._fields.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Features:
        """Return the schema that `to_json` wrote.

        Raises:
            SchemaError: a type or an argument is unknown.
        """
        return cls({name: _feature_from_json(name, declaration) for name, declaration in value.items()})

    @classmethod
    def infer(cls, sample: Mapping[str, Any]) -> Features:
        """Return a schema that holds `sample` exactly: for functions that declare none.

        Arrays of uint8 (height, width, 3 or 4) become lossless images; dimensions other than the number of
        channels are left open. `bytes` must be a PNG or JPEG file.
        """
        return cls({name: _inferred(name, value) for name, value in sample.items() if name != "key"})

    def _wrong_fields(self, sample: Mapping[str, Any]) -> SchemaError:
        missing = sorted(self._fields.keys() - sample.keys())
        unknown = sorted(str(name) for name in sample.keys() - self._fields.keys())
        parts = [f"field {name!r} is declared {self[name].declared()} but the sample has none" for name in missing]
        parts += [f"field {name!r} is not declared but the sample holds it" for name in unknown]
        return SchemaError("; ".join(parts) + "; make read return exactly the declared fields")


def _feature_from_json(name: str, declaration: Mapping[str, Any]) -> Feature:
    arguments = dict(declaration) if isinstance(declaration, Mapping) else {}
    kind = arguments.pop("type", None)
    if not isinstance(kind, str) or kind not in _TYPES:
        raise SchemaError(f"field {name!r} has the type {kind!r}; want one of {some(_TYPES)}")
    try:
        feature: Feature = _TYPES[kind](**{key: _tuples(value) for key, value in arguments.items()})
    except TypeError as error:
        raise SchemaError(f"field {name!r} of type {kind}: {error}") from error
    return feature


def _inferred(name: str, value: Any) -> Feature:
    if isinstance(value, str):
        return Text()
    if isinstance(value, bytes):
        info = codecs.probe(value, name=name)
        return Image((None, None, 4 if info.alpha else 3))
    if isinstance(value, (bool, np.bool_)):
        return Scalar("bool")
    if isinstance(value, np.generic):
        return Scalar(value.dtype.name)
    if isinstance(value, int):
        return Scalar("int64" if value < 1 << 63 else "uint64")
    if isinstance(value, float):
        return Scalar("float64")
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] in {3, 4} and value.size:
            return Image((None, None, value.shape[2]))
        return Tensor((None,) * value.ndim, value.dtype.name)
    raise SchemaError(
        f"field {name!r} holds a {type(value).__name__}, for which no feature can be inferred; "
        "return a numpy array, number, str, bool or encoded image bytes, or pass features="
    )


def _check_name(name: Any, feature: Any) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise SchemaError(f"field name {name!r}: want a printable, non-empty str")
    if not isinstance(feature, Feature):
        raise SchemaError(
            f"field {name!r} is declared as {feature!r}; want a feature such as Image() or Scalar('int64')"
        )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
